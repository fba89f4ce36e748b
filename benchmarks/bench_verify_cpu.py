"""`rejection_sample` on the CPU against the plain formulation, in one run, alternating."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import inputs
import jax
import jax.numpy as jnp
import measure
import plain
from rich.console import Console
from rich.table import Table

import jax_specdec as sd

K = inputs.K
LLAMA_3_VOCABULARY = 128256


class Case(NamedTuple):
    """One row of the table. `noise`: how far the drafter's logits are from the target's."""

    name: str
    batch: int = 8
    k: int = K
    vocabulary: int = LLAMA_3_VOCABULARY
    temperature: float = 0.8
    distribution: str = "probs"
    noise: float = 0.7
    dtype: str = "float32"
    goal: float | None = None


CASES = (
    Case("standard, about 2.5 emitted", goal=15),
    Case("standard, all accepted", noise=0, goal=10),
    Case("greedy, about 2.5 emitted", temperature=0, distribution="none", noise=0.5, goal=3.5),
    Case("greedy, all accepted", temperature=0, distribution="none", noise=0, goal=3.5),
    Case("standard, draft logits", distribution="logits"),
    Case("standard, draft logits with normalizer", distribution="normalized"),
    Case("standard, one-hot drafts", distribution="none"),
    Case("bfloat16, draft logits with normalizer", distribution="normalized", dtype="bfloat16"),
    *(Case(f"standard, V = {v}", vocabulary=v) for v in (16032, 32064, 64128, 256512)),
    *(Case(f"standard, B = {b}", batch=b) for b in (1, 2, 4, 16)),
)


def run(case: Case, repeats: int) -> dict[str, Any]:
    logits, drafts, probs = inputs.make(case, seed=3)
    keys = jax.random.split(jax.random.key(2), case.batch)
    positions = jnp.arange(case.batch, dtype=jnp.int32)
    temperature = jnp.full((case.batch,), case.temperature, jnp.float32)
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)

    @jax.jit
    def ours(logits: Any, drafts: Any, temperature: Any, keys: Any, positions: Any) -> Any:
        return sd.rejection_sample(
            logits,
            drafts,
            sampling=sd.SamplingParams(temperature),
            keys=keys,
            positions=positions,
            config=config,
        )

    arguments = (logits, drafts, temperature, keys, positions)
    compiled = ours.lower(*arguments).compile()
    given = None if case.distribution == "none" else probs

    def plainly() -> Any:
        if case.temperature == 0:
            return plain.greedy_sample(logits, drafts.token_ids, k=K)
        key = jax.random.key(3)
        return plain.rejection_sample(logits, drafts.token_ids, given, temperature, key, k=K)

    samples = measure.alternate({"ours": lambda: compiled(*arguments), "plain": plainly}, repeats)
    output = compiled(*arguments)
    emitted = int(output.num_emitted.sum())
    rejected = int((output.num_accepted < K).sum())
    row_bytes = case.vocabulary * logits.dtype.itemsize
    read = emitted * row_bytes
    if drafts.distribution is not None:
        read += rejected * case.vocabulary * jax.tree.leaves(drafts.distribution)[0].dtype.itemsize
    if case.distribution == "logits":  # no stored normalizer: every draft visited is read for it
        read += (int(output.num_accepted.sum()) + rejected) * row_bytes
    return {
        **case._asdict(),
        "emitted_per_request": emitted / case.batch,
        "bytes_read": read,
        "temporary_bytes_over_logits": compiled.memory_analysis().temp_size_in_bytes
        / logits.nbytes,
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    bandwidth = measure.read_bandwidth()
    table = Table(title=f"K = {K}; this machine reads {bandwidth / 1e9:.1f} GB/s")
    for heading in ("case", "emitted", "ours ms", "plain ms", "ratio", "goal", "GB/s", "temp"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    rows = []
    console = Console(width=110)
    with console.status("running") as status:
        for case in CASES:
            status.update(case.name)
            row = run(case, repeats)
            rows.append(row)
            ours, other = (measure.median(row["samples"][name]) for name in ("ours", "plain"))
            table.add_row(
                case.name,
                f"{row['emitted_per_request']:.2f}",
                f"{ours * 1e3:.2f}",
                f"{other * 1e3:.1f}",
                f"{other / ours:.1f}",
                f"{case.goal:g}" if case.goal else "",
                f"{row['bytes_read'] / ours / 1e9:.1f}",
                f"{row['temporary_bytes_over_logits']:.1%}",
            )
    console.print(table)
    path = measure.save("verify_cpu", [{"read_bandwidth": bandwidth}, *rows])
    console.print(f"raw samples: {path.name}")


if __name__ == "__main__":
    main()
