"""`rejection_sample` on a TPU: are the tokens of `"mosaic_tpu"` those of XLA, and how fast is it?

    python benchmarks/bench_verify_tpu.py      # everything; `--only greedy` for a part

No TPU has run the kernel yet. Please report what this prints, and attach the file that it writes.

First both implementations verify batches of fresh logits, drafts and noise, and every difference is
judged by the NumPy oracle. Then each form is timed in compiled chains of calls (`chain`), in turns:
a long chain less a short one, so that what begins and ends a chain is not counted. "plain" is how
samplers for TPUs are written, tpu-inference's among them: softmax and noise of all rows, and the
argmax of their quotient. "reads" are calls in units of reading the target logits once at the
bandwidth that a sum of a large array reaches.

Without a TPU the kernel is interpreted, shapes are tiny, and times mean nothing: it only shows that
this works.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import pathlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import chain as chain_lib
import disagreements
import inputs as inputs_lib
import jax
import measure
from jax.experimental.pallas import tpu as pltpu
from rich.console import Console
from rich.table import Table
from verify_cases import GREEDY, Case, Variant

from jax_specdec._src.verify.mosaic_tpu import support

FORMS = "mosaic_tpu", "xla", "plain"
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


@contextlib.contextmanager
def somewhere() -> Iterator[None]:
    """Where there is no TPU, the kernel is interpreted."""
    if jax.default_backend() == "tpu":
        yield
        return
    with (
        mock.patch.object(support, "no_device", lambda: None),
        pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()),
    ):
        yield


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
    parser = argparse.ArgumentParser(description=__doc__)
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
    with somewhere():
        for case in [case for batch in batches for case in cases(batch, vocabulary)]:
            if options.only not in case.name:
                continue
            console.print(f"{time.time() - begin:4.0f} s  {case.label}")
            judged = disagreements.sweep(case, draws, ("xla", "mosaic_tpu"))
            ok &= judged["ok"]
            forms = [form for form in FORMS if form != "plain" or case.name in HAS_PLAIN]
            samples = seconds_per_call(case, forms, calls, repeats)
            logits = case.batch * (case.k + 1) * case.vocabulary
            read = logits * (4 if case.dtype == "float32" else 2) / bandwidth
            rows.append({**case._asdict(), "samples": samples, "disagreements": judged})
            for form in forms:
                took = measure.median(samples[form])
                differ = f"{len(judged['margins'])} of {judged['decisions']}"
                shown = differ if form == "mosaic_tpu" else ""
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
