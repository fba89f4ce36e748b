"""Inputs of the verification benchmarks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jax_specdec as sd

K = 4


def make(case: Any, seed: int, with_probs: bool = True) -> tuple[jax.Array, sd.Drafts, Any]:
    """Logits like a language model's, drafts from a distribution near them, and its probabilities.

    Args:
      case: has ``batch``, ``k``, ``vocabulary``, ``temperature``, ``dtype``, ``noise`` (how far
        the drafter's logits are from the target's) and ``distribution``: "none", "probs",
        "logits" or "normalized".
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
        with_probs=with_probs,
    )


# Noise and temperature are not static: cases of one shape share a compilation.
@functools.partial(jax.jit, static_argnames=("shape", "dtype", "distribution", "with_probs"))
def _make(
    seed: jax.Array,
    noise: jax.Array,
    temperature: jax.Array,
    *,
    shape: tuple[int, int, int],
    dtype: str,
    distribution: str,
    with_probs: bool,
) -> tuple[jax.Array, sd.Drafts, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    batch, rows, vocabulary = shape
    drafted = (batch, rows - 1, vocabulary)
    target = (jax.random.normal(keys[0], shape) * 3).astype(dtype)
    moved = target[:, :-1].astype(jnp.float32) + noise * jax.random.normal(keys[1], drafted)
    draft = moved.astype(dtype)
    scaled = draft.astype(jnp.float32) / jnp.where(temperature == 0, 1.0, temperature)
    race = jnp.where(temperature == 0, 0.0, jax.random.gumbel(keys[2], drafted))
    ids = jnp.argmax(scaled + race, axis=-1).astype(jnp.int32)

    probs = jax.nn.softmax(scaled).reshape(-1, vocabulary)
    given: Any = None
    if distribution == "probs":
        given = sd.DraftProbs(probs)
    elif distribution == "logits":
        given = sd.DraftLogits(draft.reshape(-1, vocabulary))
    elif distribution == "normalized":
        normalizer = jax.nn.logsumexp(scaled, axis=-1).reshape(-1)
        given = sd.DraftLogits(draft.reshape(-1, vocabulary), log_normalizer=normalizer)
    drafts = sd.Drafts.from_dense(ids, None, given)
    return target.reshape(-1, vocabulary), drafts, probs if with_probs else None
