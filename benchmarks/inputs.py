"""Inputs of the verification benchmarks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jax_specdec as sd

K = 4

LISTED = {"map": 32000, "candidates": 32}
"""Ids that drafts are drawn from: of a map that all rows share, or the likeliest of each row."""


def make(case: Any, seed: int, with_probs: bool = True) -> tuple[jax.Array, sd.Drafts, Any]:
    """Logits like a language model's, drafts from a distribution near them, and its probabilities.

    Args:
      case: has ``batch``, ``k``, ``vocabulary``, ``temperature``, ``dtype``, ``noise`` (how far
        the drafter's logits are from the target's) and ``distribution``: "none", "probs",
        "logits" or "normalized"; perhaps ``ids``, "map" or "candidates", and ``scattered``.
      seed: of the random numbers.
      with_probs: whether the probabilities are wanted.

    Returns:
      Target logits ``[B*(K+1), V]``, drafts, and draft probabilities ``[B*K, V]`` or None.
    """
    return _make(
        jnp.uint32(seed),
        jnp.float32(case.noise),
        jnp.float32(case.temperature),
        shape=(case.batch, case.k + 1, case.vocabulary),
        dtype=case.dtype,
        distribution=case.distribution,
        ids=getattr(case, "ids", None),
        scattered=getattr(case, "scattered", False),
        with_probs=with_probs,
    )


# Noise and temperature are not static: cases of one shape share a compilation.
@functools.partial(
    jax.jit,
    static_argnames=("shape", "dtype", "distribution", "ids", "scattered", "with_probs"),
)
def _make(
    seed: jax.Array,
    noise: jax.Array,
    temperature: jax.Array,
    *,
    shape: tuple[int, int, int],
    dtype: str,
    distribution: str,
    ids: str | None,
    scattered: bool,
    with_probs: bool,
) -> tuple[jax.Array, sd.Drafts, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    batch, rows, vocabulary = shape
    drafted = (batch, rows - 1, vocabulary)
    target = jax.random.normal(keys[0], shape) * 3
    width = vocabulary if ids is None else min(LISTED[ids], vocabulary)
    listed = None
    if ids == "map":  # the likely ids, as a drafter knows
        listed = jnp.arange(width, dtype=jnp.int32) * (vocabulary // width)
        target = target.at[..., listed].add(4)
    target = target.astype(dtype)
    moved = target[:, :-1].astype(jnp.float32) + noise * jax.random.normal(keys[1], drafted)
    draft = moved.astype(dtype)
    if ids == "map":
        draft = draft[..., listed]
    elif ids == "candidates":
        draft, listed = jax.lax.top_k(draft, width)
    scaled = draft.astype(jnp.float32) / jnp.where(temperature == 0, 1.0, temperature)
    race = jnp.where(temperature == 0, 0.0, jax.random.gumbel(keys[2], draft.shape))
    token_ids = jnp.argmax(scaled + race, axis=-1).astype(jnp.int32)

    probs = jax.nn.softmax(scaled)
    row_max = jnp.max(draft.astype(jnp.float32), axis=-1)
    normalizer = jax.nn.logsumexp(scaled - scaled.max(axis=-1, keepdims=True), axis=-1)
    if listed is not None:
        every = jnp.broadcast_to(listed, draft.shape)
        token_ids = jnp.take_along_axis(every, token_ids[..., None], axis=-1)[..., 0]
        if scattered:
            draft = _scatter(draft, every, vocabulary, -jnp.inf)
            probs, listed = _scatter(probs, every, vocabulary, 0.0), None
    given: Any = None
    if distribution == "probs":
        given = sd.DraftProbs(probs, ids=listed)
    elif distribution == "logits":
        given = sd.DraftLogits(draft, ids=listed)
    elif distribution == "normalized":
        given = sd.DraftLogits(draft, log_normalizer=normalizer, row_max=row_max, ids=listed)
    drafts = sd.Drafts.from_dense(token_ids, None, given)
    probs = probs.reshape(-1, probs.shape[-1])
    return target.reshape(-1, vocabulary), drafts, probs if with_probs else None


def _scatter(x: jax.Array, ids: jax.Array, vocabulary: int, fill: float) -> jax.Array:
    """Rows ``[B, K, C]`` of some ids as rows ``[B, K, V]``."""
    full = jnp.full((*x.shape[:-1], vocabulary), fill, x.dtype)
    return jnp.put_along_axis(full, ids, x, axis=-1, inplace=False)
