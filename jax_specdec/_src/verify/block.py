"""Block verification: one position of one sampled request.

The prefix of i drafts carries the joint weight ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))``, with
``w_0 = 1``. With ``S_i = sum((w_i p - q)+)`` over what may follow the prefix, it passes with
probability ``h_i = S_i / (S_i + 1 - w_i)``, and the longest prefix that passes is kept: a draft
that the standard rule would stop at may yet be saved by those after it. The next token is drawn
from ``(w_i p - q)+``. After the last draft nothing is proposed: ``q = 0`` there, so ``S = w`` and
``h = w``. The emitted tokens are distributed as ``p``, and no rule of this kind keeps more drafts
in expectation.

Where q is 1 at one token x (a draft without probabilities) ``S_i = w_i (1 - p(x))``; a greedy
request is that with ``p`` 1 at the argmax.

References:
  Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_specdec._src.verify import probabilistic


def joint_weight(weight: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Joint weight of a prefix and the draft after it: ``min(1, weight * p / q)``.

    Once 0 it stays 0, and no longer prefix passes.

    Args:
      weight: ``[]`` float32 in [0, 1], joint weight of the prefix; 1 for the empty one.
      p: ``[]`` float32, target probability of the draft.
      q: ``[]`` float32, draft probability of the draft; 1 for a one-hot draft.

    Returns:
      ``[]`` float32 in [0, 1]; 0 where `q` is.
    """
    possible = (weight > 0) & (q > 0)
    # The ratio first: weight * p may be too small for float32 where weight * (p / q) is not.
    # Divided approximately, as on a GPU, equal numbers need not give 1.
    ratio = jnp.where(p == q, 1.0, p / jnp.where(possible, q, 1.0))
    return jnp.where(possible, jnp.minimum(weight * ratio, 1.0), 0.0)


def residual(weight: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Weights ``(weight * p - q)+`` of the token after a prefix; they sum to its residual mass.

    Args:
      weight: ``[]`` float32, joint weight of the prefix; 1 gives the standard rule's residual.
      p: float32 target probabilities of any shape.
      q: float32 draft probabilities of the same shape.

    Returns:
      float32 weights of the same shape, not normalized; NaN where `q` is not a probability.
    """
    return probabilistic.residual(weight * p, q)


def one_hot_residual_mass(weight: jax.Array, p: jax.Array) -> jax.Array:
    """The sum of the residual where the next draft is one-hot.

    Args:
      weight: ``[]`` float32, joint weight of the prefix.
      p: ``[]`` float32, target probability of the next draft.

    Returns:
      ``[]`` float32.
    """
    return weight * (1.0 - p)


def passes(u: jax.Array, weight: jax.Array, mass: jax.Array) -> jax.Array:
    """Whether a prefix of at least one draft passes: ``u < mass / (mass + 1 - weight)``.

    Strict, so a prefix of weight 0 never passes; where ``p = q`` so far, one always does.

    Args:
      u: ``[]`` float32 uniform on [0, 1), the one of the prefix's last draft.
      weight: ``[]`` float32, joint weight of the prefix.
      mass: ``[]`` float32, its residual mass; `weight` itself after the last draft.

    Returns:
      ``[]`` bool.
    """
    return u * (mass + (1.0 - weight)) < mass
