"""`rejection_sample` on a TPU: are the tokens those of the CPU, and how fast is it?

    python benchmarks/bench_verify_tpu.py      # everything; `--only greedy` for a part

No TPU has run it yet. Please report what this prints, and attach the file that it writes.

First the TPU and the CPU verify batches of fresh logits, drafts and noise, and every difference is
judged by the NumPy oracle. Then each form is timed in compiled chains of calls (`chain`), in turns:
a long chain less a short one, so that what begins and ends a chain is not counted. "plain" is how
rejection samplers for TPUs are written, that of tpu-inference (vllm-jax) among them: softmax and
noise of all rows, and the argmax of their quotient. (Its sampler of bonus tokens may look at the
candidates of each chip alone.) "reads" are calls in units of reading the target logits once at the
bandwidth that a sum of a large array reaches.

Without a TPU shapes are tiny, and times mean nothing: it only shows that this works.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from typing import Any

import chain as chain_lib
import disagreements
import inputs as inputs_lib
import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table
from verify_cases import GREEDY, Case, Variant

import jax_specdec as sd

FORMS = "xla", "plain"
ONE_HOT: dict[str, Any] = {"distribution": "none"}
RATES = 0.8, 0.6, 0.4, 0.2
HAS_PLAIN = "greedy", "one-hot", "probabilities"


def cases(batch: int, vocabulary: int) -> list[Case]:
    """Every rule and draft distribution."""
    make = functools.partial(Case, batch=batch, vocabulary=vocabulary)
    return [
        make("greedy", **GREEDY),
        make("one-hot", **ONE_HOT),
        make("stored normalizers"),
        make("probabilities", distribution="probs"),
        make("block, stored normalizers", method="block"),
        make("synthetic", rates=RATES, **ONE_HOT),
        make("one-hot, float32", dtype="float32", **ONE_HOT),
    ]


@functools.partial(jax.jit, static_argnames="case")
def verify(
    logits: jax.Array, drafts: sd.Drafts, keys: jax.Array, *, case: Case
) -> sd.RejectionSampleOutput:
    return sd.rejection_sample(
        logits,
        drafts,
        sampling=sd.SamplingParams(jnp.full((case.batch,), case.temperature, jnp.float32)),
        keys=keys,
        positions=jnp.zeros((case.batch,), jnp.int32),
        config=case.config,
        implementation="xla",
    )


def margins(case: Case, draws: int) -> list[float]:
    """How close each decision was that the default device and the CPU took differently."""
    cpu = jax.local_devices(backend="cpu")[0]
    found = []
    for seed in range(draws):
        logits, drafts, _ = inputs_lib.make(case, seed, with_probs=False)
        given = logits, drafts, jax.random.split(jax.random.key(seed), case.batch)
        here = verify(*given, case=case)
        there = verify(*jax.device_put(given, cpu), case=case)
        differs = (np.asarray(here.token_ids) != np.asarray(there.token_ids)).any(axis=1)
        found += [disagreements.margin(case, *given, int(b)) for b in np.flatnonzero(differs)]
    return found


def seconds_per_call(case: Case, forms: list[str], calls: int, repeats: int) -> dict[str, Any]:
    """By form: one sample for each repetition."""
    sets = [inputs_lib.make(case, seed) for seed in range(2)]
    runs = {}
    for form in forms:
        variant = Variant(form)
        given = chain_lib.arguments(case, variant, sets)
        for trips in (1, 1 + calls):
            static: Any = dict(case=case, variant=variant, trips=trips, kernel_config=None)
            compiled = chain_lib.chain.lower(given, **static).compile()
            runs[form, trips > 1] = functools.partial(compiled, given)
    samples = measure.alternate(runs, repeats)
    return {
        form: [
            (long - short) / (calls * len(sets))
            for long, short in zip(samples[form, True], samples[form, False], strict=True)
        ]
        for form in forms
    }


def main(command_line: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("verify_tpu.json"))
    options = parser.parse_args(command_line)
    batches, vocabulary, draws, calls, repeats = [8, 64], 128256, 16, 100, 11
    has_tpu = jax.default_backend() == "tpu"
    if not has_tpu:
        batches, vocabulary, draws, calls, repeats = [2], 300, 2, 1, 1
    console, rows, ok = Console(width=120), [], True
    device = jax.devices()[0].device_kind
    bandwidth = measure.read_bandwidth(256 if has_tpu else 2)
    table = Table(title=f"{device}, JAX {jax.__version__}, {bandwidth / 1e9:.0f} GB/s")
    for heading in ("case", "B", "form", "us", "reads", "differ"):
        table.add_column(heading, justify="left" if heading in ("case", "form") else "right")
    begin = time.time()
    for case in [case for batch in batches for case in cases(batch, vocabulary)]:
        if options.only not in case.name:
            continue
        console.print(f"{time.time() - begin:4.0f} s  {case.label}")
        differ = margins(case, draws)
        ok &= all(margin <= disagreements.LARGEST_MARGIN for margin in differ)
        forms = [form for form in FORMS if form != "plain" or case.name in HAS_PLAIN]
        samples = seconds_per_call(case, forms, calls, repeats)
        logits = case.batch * (case.k + 1) * case.vocabulary
        read = logits * (4 if case.dtype == "float32" else 2) / bandwidth
        rows.append({**case._asdict(), "samples": samples, "margins": differ})
        for form in forms:
            took = measure.median(samples[form])
            shown = f"{len(differ)} of {draws * case.batch}" if form == "xla" else ""
            given = case.name, str(case.batch), form, f"{took * 1e6:.1f}", f"{took / read:.2f}"
            table.add_row(*given, shown)
    console.print(table)
    what = {"environment": measure.environment(), "device": device, "bandwidth": bandwidth}
    measure.write(options.output, {**what, "rows": rows})
    console.print("tokens agree" if ok else "TOKENS DIFFER beyond rounding: see the file")
    console.print(f"Please report the table, and attach {options.output}.")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
