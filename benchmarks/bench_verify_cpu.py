"""`rejection_sample` on the CPU against the plain formulation, in one run, alternating."""

from __future__ import annotations

import functools
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import measure
import plain
import verify_cases

import jax_specdec as sd

K, SEED = inputs.K, 3

Case = functools.partial(
    verify_cases.Case, batch=8, distribution="probs", noise=0.7, dtype="float32"
)
CASES = (
    Case("standard, about 2.5 emitted"),
    Case("standard, all accepted", noise=0),
    Case("greedy, about 2.5 emitted", temperature=0, distribution="none", noise=0.5),
    Case("greedy, all accepted", temperature=0, distribution="none", noise=0),
    Case("standard, draft logits", distribution="logits"),
    Case("standard, draft logits with normalizer", distribution="normalized"),
    Case("standard, one-hot drafts", distribution="none"),
    Case("agreement", distribution="none", method="agreement"),
    Case("bfloat16, draft logits with normalizer", distribution="normalized", dtype="bfloat16"),
    *(Case(f"standard, V = {v}", vocabulary=v) for v in (16032, 32064, 64128, 256512)),
    *(Case(f"standard, B = {b}", batch=b) for b in (1, 2, 4, 16)),
)


def run(case: verify_cases.Case, repeats: int) -> dict[str, Any]:
    logits, drafts, probs = inputs.make(case, SEED)
    temperature = jnp.full((case.batch,), case.temperature, jnp.float32)
    verify = jax.jit(sd.rejection_sample, static_argnames="config")
    named = dict(
        sampling=sd.SamplingParams(temperature),
        keys=jax.random.split(jax.random.key(2), case.batch),
        positions=jnp.arange(case.batch, dtype=jnp.int32),
    )
    compiled = verify.lower(logits, drafts, **named, config=case.config).compile()
    ours = functools.partial(compiled, logits, drafts, **named)
    given = None if case.distribution == "none" else probs

    def plainly() -> Any:
        if case.temperature == 0:
            return plain.greedy_sample(logits, drafts.token_ids, k=K)
        key = jax.random.key(3)
        return plain.rejection_sample(logits, drafts.token_ids, given, temperature, key, k=K)

    samples = measure.alternate({"ours": ours, "plain": plainly}, repeats)
    output = ours()
    emitted, rejected = int(output.num_emitted.sum()), int((output.num_accepted < K).sum())
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {
        **case._asdict(),
        "emitted_per_request": emitted / case.batch,
        "bytes_read": verify_cases.bytes_read(case, 1, emitted, rejected),
        "temporary_bytes_over_logits": temporary / logits.nbytes,
        "samples": samples,
    }


def cells(row: dict[str, Any]) -> dict[str, Any]:
    ours, other = (measure.median(row["samples"][name]) for name in ("ours", "plain"))
    return {
        "case": row["name"],
        "emitted": f"{row['emitted_per_request']:.2f}",
        "ours ms": f"{ours * 1e3:.2f}",
        "plain ms": f"{other * 1e3:.1f}",
        "ratio": f"{other / ours:.1f}",
        "GB/s": f"{row['bytes_read'] / ours / 1e9:.1f}",
        "temp": f"{row['temporary_bytes_over_logits']:.1%}",
    }


def main() -> None:
    options = measure.parser(__doc__, repeats=11).parse_args()
    bandwidth = measure.read_bandwidth()
    results = measure.Results("verify_cpu", read_bandwidth=bandwidth)
    for case in CASES:
        results.add([run(case, options.repeats)])
    title = f"K = {K}; this machine reads {bandwidth / 1e9:.1f} GB/s"
    measure.show(title, [cells(row) for row in results.rows])


if __name__ == "__main__":
    main()
