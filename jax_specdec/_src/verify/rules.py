"""The rules, as functions of one position of one request. Every backend traces these.

**Greedy**: a draft is accepted if it is the target's argmax.

**Standard**: a draft ``x`` drawn from ``q`` is accepted with probability ``min(1, p(x) / q(x))``.
At the first rejection the emitted token is drawn from the normalized residual ``(p - q)+``. It is
then distributed as ``p``, whatever ``q`` is.

**Block**: the prefix of i drafts has the joint weight ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))``,
with ``w_0 = 1``, and the residual mass ``S_i = sum((w_i p - q)+)`` over the tokens that may follow.
It passes with probability ``h_i = S_i / (S_i + 1 - w_i)``. The longest prefix that passes is
accepted: a draft that the standard rule would reject may be accepted because of those after it. The
next token is drawn from ``(w_i p - q)+``. After the last draft nothing is proposed, which is
``q = 0``, so ``S = w`` and ``h = w``. The emitted tokens are distributed as ``p``, and no rule of
this kind accepts more drafts in expectation. If ``q`` is one-hot at x, ``S_i = w_i (1 - p(x))``. A
greedy request is the case that ``p`` is one-hot at the argmax as well.

**Synthetic**: drafts are accepted at a configured rate, whatever the models say. This is for
benchmarks of a serving system: it does the same work, but its tokens are not the target's.

References:
  Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
  Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
  arXiv 2302.01318.
  Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_specdec._src.config import RejectionSampleMethod


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule that a call verifies by. Static.

    Attributes:
      method: "standard" or "block" for sampled requests, or "synthetic" for all.
      conditional_rates: K rates of the synthetic rule; None for the others.
    """

    method: RejectionSampleMethod
    conditional_rates: tuple[float, ...] | None

    @property
    def is_block(self) -> bool:
        """Whether sampled requests follow the block rule."""
        return self.method == "block"


def accepts_greedy(token_id: jax.Array, best_id: jax.Array) -> jax.Array:
    """Whether a greedy request accepts a draft: it is the target's argmax, `best_id`."""
    return token_id == best_id


def accepts(u: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Whether a sampled request accepts a draft: ``u * q < p``, and ``q > 0``.

    The inequality is strict, so a token of zero target probability is never accepted, even at
    ``u = 0``. If ``p = q``, the draft is always accepted.

    Args:
      u: ``[]`` float32 uniform on [0, 1).
      p: ``[]`` float32, target probability of the proposed token.
      q: ``[]`` float32, its draft probability; 1 for a one-hot draft.

    Returns:
      ``[]`` bool.
    """
    return (q > 0) & (u * q < p)


def accepts_synthetic(u: jax.Array, conditional_rate: jax.Array) -> jax.Array:
    """Whether a request, greedy or sampled, accepts a draft if it accepted all before it."""
    return u < conditional_rate


def residual(weight: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Weights ``(weight * p - q)+`` of the token after a prefix; they sum to its residual mass.

    `q` is used once: XLA may write to memory what is used twice, here an exponential for each id.

    Args:
      weight: float32, joint weight of the prefix; 1 gives the standard rule's residual.
      p: float32 target probabilities of any shape.
      q: float32 draft probabilities of the same shape, not negative.

    Returns:
      float32 weights of the same shape, not normalized; NaN where `q` is infinite or NaN.
    """
    left = weight * p - q
    return jnp.where(left > -jnp.inf, jnp.maximum(left, 0.0), jnp.nan)


def excess(p: jax.Array, q: jax.Array) -> jax.Array:
    """``(p - q)+``, as `residual`, in the two instructions that a kernel spends on it."""
    return jnp.maximum(p, q) - q


def joint_weight(weight: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Joint weight of a prefix with one more draft: ``min(1, weight * p / q)``.

    Once it is 0 it stays 0, and no longer prefix passes.

    Args:
      weight: ``[]`` float32 in [0, 1], joint weight of the prefix; 1 for the empty one.
      p: ``[]`` float32, target probability of the draft.
      q: ``[]`` float32, draft probability of the draft; 1 for a one-hot draft.

    Returns:
      ``[]`` float32 in [0, 1]; 0 if `q` is 0.
    """
    possible = (weight > 0) & (q > 0)
    # The ratio comes first, because weight * p may underflow when weight * (p / q) does not. An
    # approximate division, as on a GPU, need not give 1 for equal numbers.
    ratio = jnp.where(p == q, 1.0, p / jnp.where(possible, q, 1.0))
    return jnp.where(possible, jnp.minimum(weight * ratio, 1.0), 0.0)


def one_hot_residual_mass(weight: jax.Array, p: jax.Array) -> jax.Array:
    """The sum of `residual` if the next draft is one-hot and has target probability `p`."""
    return weight * (1.0 - p)


def passes(u: jax.Array, weight: jax.Array, mass: jax.Array) -> jax.Array:
    """Whether a prefix of at least one draft passes: ``u < mass / (mass + 1 - weight)``.

    The inequality is strict, so a prefix of weight 0 never passes. If ``p = q`` so far, it always
    passes.

    Args:
      u: ``[]`` float32 uniform on [0, 1), that of the prefix's last draft.
      weight: ``[]`` float32, joint weight of the prefix.
      mass: ``[]`` float32, its residual mass; `weight` itself after the last draft.

    Returns:
      ``[]`` bool.
    """
    return u * (mass + (1.0 - weight)) < mass
