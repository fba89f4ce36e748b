"""Inputs of the verification benchmarks."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import jax_specdec as sd

K = 4


@functools.partial(jax.jit, static_argnames=("case",))
def make(case: Any, seed: jax.Array) -> tuple[jax.Array, sd.Drafts, jax.Array]:
    """Logits like a language model's, drafts from a distribution near them, and its probabilities.

    Args:
      case: hashable, with ``batch``, ``vocabulary``, ``temperature``, ``dtype``, ``noise`` (how far
        the drafter's logits are from the target's) and ``distribution``: "none", "probs",
        "logits" or "normalized".
      seed: of the random numbers.

    Returns:
      Target logits ``[B*(K+1), V]``, drafts, and draft probabilities ``[B*K, V]``.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (case.batch, K + 1, case.vocabulary)
    target = (jax.random.normal(keys[0], shape) * 3).astype(case.dtype)
    noise = case.noise * jax.random.normal(keys[1], (case.batch, K, case.vocabulary))
    draft = (target[:, :K].astype(jnp.float32) + noise).astype(case.dtype)
    scaled = draft.astype(jnp.float32) / (case.temperature or 1)
    if case.temperature == 0:
        ids = jnp.argmax(draft, axis=-1)
    else:
        ids = jax.random.categorical(keys[2], scaled)
    distribution: Any = None
    if case.distribution == "probs":
        distribution = sd.DraftProbs(jax.nn.softmax(scaled))
    elif case.distribution == "logits":
        distribution = sd.DraftLogits(draft)
    elif case.distribution == "normalized":
        distribution = sd.DraftLogits(draft, log_normalizer=jax.nn.logsumexp(scaled, axis=-1))
    drafts = sd.Drafts.from_dense(ids.astype(jnp.int32), None, distribution)
    return target.reshape(-1, case.vocabulary), drafts, jax.nn.softmax(scaled).reshape(-1, shape[2])
