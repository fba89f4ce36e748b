"""Standard rejection sampling: one position of one sampled request.

A token ``x`` drawn from ``q`` is kept with probability ``min(1, p(x) / q(x))``; at the first
rejection the emitted token is drawn from the normalized residual ``(p - q)+``. The emitted token
is then distributed as ``p``, whatever ``q`` is.

References:
  Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
  Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
  arXiv 2302.01318.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def accepts(u: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Whether one sampled request keeps one draft: ``u * q < p``, and ``q > 0``.

    Strict, so a token of zero target probability is never kept, even at ``u = 0``; and ``p = q``
    always keeps.

    Args:
      u: ``[]`` float32 uniform on [0, 1).
      p: ``[]`` float32, target probability of the proposed token.
      q: ``[]`` float32, draft probability of the proposed token; 1 for a one-hot draft.

    Returns:
      ``[]`` bool.
    """
    return (q > 0) & (u * q < p)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """Weights ``(p - q)+`` of the recovered token; NaN where `q` is not a probability.

    Args:
      p: float32 target probabilities of any shape.
      q: float32 draft probabilities of the same shape.

    Returns:
      float32 weights of the same shape, not normalized.
    """
    return jnp.where(q >= 0, excess(p, q), jnp.nan)


def excess(p: jax.Array, q: jax.Array) -> jax.Array:
    """`residual` of a `q` that is not negative, in two steps; NaN where it is infinite or NaN."""
    return jnp.maximum(p, q) - q
