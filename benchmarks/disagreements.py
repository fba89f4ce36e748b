"""How often two backends differ with the same noise, and how close each such decision was."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import inputs as inputs_lib
import jax
import jax.numpy as jnp
import numpy as np
from verify_cases import Case

import jax_specdec as sd
from jax_specdec._src.testing import reference

LARGEST_MARGIN = 1e-5
"""Relative distance of a quantity from its threshold within which backends may differ."""


@functools.partial(jax.jit, static_argnames=("case", "backends", "kernel_config"))
def compare(
    logits: jax.Array,
    drafts: sd.Drafts,
    keys: jax.Array,
    *,
    case: Case,
    backends: tuple[str, str],
    kernel_config: Any,
) -> tuple[jax.Array, jax.Array]:
    """Which requests ``[B]`` two backends answer differently, and how much the first decided."""

    def verify(implementation: str) -> sd.RejectionSampleOutput:
        options = {} if kernel_config is None else {"kernel_config": kernel_config}
        return sd.rejection_sample(
            logits,
            drafts,
            sampling=sd.SamplingParams(jnp.full((case.batch,), case.temperature, jnp.float32)),
            keys=keys,
            positions=jnp.zeros((case.batch,), jnp.int32),
            config=case.config,
            implementation=implementation,
            **(options if implementation == "mosaic_gpu" else {}),
        )

    ours, theirs = map(verify, backends)
    differs = (ours.token_ids != theirs.token_ids).any(axis=1) | (ours.status != theirs.status)
    if case.temperature == 0 and case.rates is None:
        return differs, ours.num_emitted.sum()  # one argmax each
    rejected = ours.num_accepted < case.k
    # One for each draft looked at, then the tile and the token.
    return differs, (ours.num_accepted + rejected.astype(jnp.int32) + 2).sum()


def sweep(
    case: Case,
    draws: int,
    backends: tuple[str, str] = ("xla", "mosaic_gpu"),
    kernel_config: Any = None,
) -> dict[str, Any]:
    """Compare on `draws` batches, each of fresh logits, drafts and noise.

    Returns:
      Decisions, and the margin of each disagreement in float64, by the NumPy oracle.
    """

    def draw(seed: int) -> tuple[jax.Array, sd.Drafts, jax.Array]:
        logits, drafts, _ = inputs_lib.make(case, seed, with_probs=False)
        return logits, drafts, jax.random.split(jax.random.key(seed), case.batch)

    options = {"case": case, "backends": backends, "kernel_config": kernel_config}
    results = []
    for seed in range(draws):
        results.append(compare(*draw(seed), **options))
        if seed % 8 == 7:  # do not queue more inputs than fit into memory
            jax.block_until_ready(results[-1])
    results = jax.device_get(results)
    margins = []
    for seed, (differs, _) in enumerate(results):
        if differs.any():
            inputs = draw(seed)
            margins += [margin(case, *inputs, int(b)) for b in np.flatnonzero(differs)]
    decisions = sum(int(count) for _, count in results)
    return {
        "kind": "disagreements",
        "name": case.name,
        "batch": case.batch,
        "implementation": " and ".join(backends),
        "draws": draws,
        "decisions": decisions,
        "disagreements_per_million": len(margins) / decisions * 1e6,
        "margins": margins,
        "largest_allowed": LARGEST_MARGIN,
        "ok": all(m <= LARGEST_MARGIN for m in margins),
    }


def margin(
    case: Case, logits: jax.Array, drafts: sd.Drafts, keys: jax.Array, request: int
) -> float:
    """The oracle's least margin of a decision for one request of a batch of `inputs.make`."""
    k, b = case.k, request
    noise = jax.device_get(sd.testing.draw_noise(keys[b : b + 1], jnp.zeros((1,), jnp.int32), k))
    mine = slice(b * k, (b + 1) * k)
    num_drafts = drafts.token_ids.shape[0]
    distribution = jax.tree.map(  # all by draft, but a map that all rows share
        lambda x: np.asarray(x[mine] if x.shape[0] == num_drafts else x), drafts.distribution
    )
    one = dataclasses.replace(
        drafts,
        token_ids=np.asarray(drafts.token_ids[mine]),
        cu_num_draft_tokens=np.array([0, k], np.int32),
        distribution=distribution,
    )
    oracle = reference.rejection_sample(
        np.asarray(logits[b * (k + 1) : (b + 1) * (k + 1)]),
        one,
        noise,
        temperature=np.array([case.temperature], np.float32),
        method=case.config.rejection_sample_method,
        num_speculative_tokens=k,
        conditional_rates=case.config.conditional_rates,
    )
    return float(oracle.margin[0])
