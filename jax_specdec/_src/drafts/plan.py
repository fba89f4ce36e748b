"""How many drafts of each request to verify, decided without looking at the drafts themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_specdec._src.arrays import Sizes, as_float32, as_int32, require


def plan_drafts(
    confidences: ArrayLike,
    capacities: ArrayLike,
    *,
    budget: ArrayLike | None = None,
    steps_per_second: ArrayLike | None = None,
) -> jax.Array:
    """How many of its drafts each request verifies, such that the output stays lossless.

    With c the confidences, clipped to [0, 1] and NaN taken as 0, draft k of a request survives with
    probability ``a_k = c_0 * ... * c_k``. All drafts of the batch are put in the order of falling
    a; of equal ones, earlier positions go first, then requests with a lower index. From this order,

    - with `budget`, the first N drafts are verified;
    - with `steps_per_second`, drafts are taken up to the first one that lowers the expected tokens
      per second, ``(B + sum of a) * steps_per_second[B + n]``, for n drafts and B requests.

    **What keeps it lossless.** ``c_k`` may depend on the drafts before k, on the distribution that
    draft k is drawn from (such as its maximum), and on earlier steps. It must not depend on draft k
    or a later one: not on its probability q(x_k) either. `budget` and `steps_per_second` must be
    fixed before the drafts of the step are drawn. Whether a draft is verified then never depends on
    what it is. A search for the best of all counts would look further ahead, and is not lossless.
    Drafts without a distribution, and those verified by agreement, need no such care.

    Args:
      confidences: ``[B, K]`` floating point: the chance that a draft is accepted if those before it
        were; see `AcceptanceEstimator.confidences`.
      capacities: ``[B]`` integers, the most drafts of each request. Negative for an empty slot: it
        is not one of the B requests of the formula.
      budget: ``[]`` integer, N, the most drafts of the batch; a negative one stands for 0.
      steps_per_second: ``[T]`` floating point; entry t is how many passes of the target over t rows
        fit into a second. No pass has T rows or more. NaN and negative entries stand for 0.

    Returns:
      ``[B]`` int32, at most `capacities`, and 0 for empty slots.

    Raises:
      TypeError: `confidences` or `steps_per_second` are not floating point, or `capacities` or
        `budget` not integers.
      ValueError: shapes that do not fit; both or neither of `budget` and `steps_per_second`.

    Example:
      >>> import jax.numpy as jnp
      >>> confidences = jnp.array([[0.9, 0.8, 0.6], [0.5, 0.4, 0.3]])  # a: .9 .72 .43; .5 .2 .06
      >>> plan_drafts(confidences, jnp.array([3, 3]), budget=3).tolist()
      [2, 1]
      >>> time = jnp.maximum(1.0, jnp.arange(9) / 4)  # seconds: up to four rows cost the same
      >>> plan_drafts(confidences, jnp.array([3, 3]), steps_per_second=1 / time).tolist()
      [2, 0]

    References:
      DSpark, 2026, https://arxiv.org/abs/2607.05147, section 3.2.2 and appendix A.
    """
    if (budget is None) == (steps_per_second is None):
        raise ValueError(
            "exactly one of budget and steps_per_second must be given, but "
            f"{'neither' if budget is None else 'both'} of them is"
        )
    sizes: Sizes = {}
    confidences = as_float32("confidences", confidences, "[B, K]", sizes)
    capacities = as_int32("capacities", capacities, "[B]", sizes)
    if budget is not None:
        return _within_budget(confidences, capacities, as_int32("budget", budget, "[]", sizes))
    speeds = as_float32("steps_per_second", steps_per_second, "[T]", sizes)
    require(sizes["T"] > 0, "steps_per_second", "have an entry", speeds)
    return _while_faster(confidences, capacities, speeds)


@jax.jit
def _within_budget(confidences: jax.Array, capacities: jax.Array, budget: jax.Array) -> jax.Array:
    return _first(jnp.maximum(budget, 0), *_ranked(confidences, capacities))


@jax.jit
def _while_faster(confidences: jax.Array, capacities: jax.Array, speeds: jax.Array) -> jax.Array:
    order, survival = _ranked(confidences, capacities)
    speeds = jnp.where(speeds > 0, speeds, 0)  # NaN too
    num_requests = jnp.sum(capacities >= 0, dtype=jnp.int32)
    num_drafts = jnp.arange(order.size + 1, dtype=jnp.int32)
    speed = speeds.at[num_requests + num_drafts].get(mode="fill", fill_value=0)
    gained = jnp.concatenate([jnp.zeros((1,), jnp.float32), jnp.cumsum(jnp.maximum(survival, 0))])
    rate = (num_requests.astype(jnp.float32) + gained) * speed
    lowers = jnp.append((rate[1:] < rate[:-1]) | (speed[1:] == 0), True)
    return _first(jnp.argmax(lowers).astype(jnp.int32), order, survival)


def _ranked(confidences: jax.Array, capacities: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The drafts of a batch in the order of falling survival, and their survival.

    Returns:
      order: ``[K, B]`` int32, the rank of each draft.
      survival: ``[K*B]`` float32 by rank; -1 for drafts beyond the capacities, which come last.
    """
    c = jnp.where(jnp.isnan(confidences), 0, jnp.clip(confidences, 0, 1)).T
    # However a product is rounded, a later position must not come before an earlier one.
    survival = lax.cummin(jnp.cumprod(c, axis=0), axis=0)
    place = jnp.arange(c.shape[0], dtype=jnp.int32)[:, None]
    survival = jnp.where(place < capacities[None, :], survival, -1).ravel()
    order = jnp.argsort(survival, stable=True, descending=True).astype(jnp.int32)
    ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
    return ranks.reshape(c.shape), survival[order]


def _first(count: jax.Array, ranks: jax.Array, survival: jax.Array) -> jax.Array:
    """How many of the first `count` drafts each request has, ``[B]`` int32."""
    usable = jnp.sum(survival >= 0, dtype=jnp.int32)
    return jnp.sum(ranks < jnp.minimum(count, usable), axis=0, dtype=jnp.int32)
