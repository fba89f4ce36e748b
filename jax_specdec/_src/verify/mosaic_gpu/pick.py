"""The two-level inverse CDF inside a kernel, where nothing sorts and nothing scans.

A prefix sum is a masked sum over everything, so it does not decrease, and it is the total once
all that is left out is zero. Hence bisection never ends at an entry of zero weight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify.mosaic_gpu.buffers import tree_sum
from jax_specdec._src.verify.mosaic_gpu.config import LANES


def pick_scalar(weights: list[jax.Array], target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least index whose inclusive sum exceeds `target`, among positive weights.

    Returns:
      ``(index, sum of what lies before)``; the last positive one where rounding finds none.
    """
    index, before = jnp.int32(0), jnp.float32(0)
    inclusive = jnp.float32(0)
    searching = target == target
    for i, weight in enumerate(weights):
        take = (weight > 0) & searching
        index = jnp.where(take, i, index)
        before = jnp.where(take, inclusive, before)
        inclusive = inclusive + weight
        searching = searching & ~(take & (inclusive > target))
    return index, before


def bisect_groups(groups: list[Any], target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first group of vectors whose inclusive sum exceeds `target`.

    Args:
      groups: arrays of weights, of one shape.
      target: ``[]``, less than the sum of all.

    Returns:
      ``(index, sum of the groups before it)``.
    """

    def prefix(count: jax.Array) -> jax.Array:
        # A scalar cannot select between vectors, but it can scale one.
        kept = [group * jnp.where(count > i, 1.0, 0.0) for i, group in enumerate(groups)]
        return jnp.sum(tree_sum(kept))

    low, before = jnp.int32(0), jnp.float32(0)
    step = 1 << max(len(groups) - 1, 0).bit_length()
    while step > 1:
        step //= 2
        sums = prefix(low + step)
        right = ~(sums > target) & (low + step < len(groups))
        low = jnp.where(right, low + step, low)
        before = jnp.where(right, sums, before)
    return low, before


def pick_in_row(entry: Any, target: jax.Array, before: jax.Array) -> jax.Array:
    """The same among the LANES weights of one row, read one by one.

    Args:
      entry: maps an index in ``[0, LANES)`` to its weight; one at least is positive.
      target: ``[]``, as a sum over the tile.
      before: ``[]``, sum of the tile's rows before this one.

    Returns:
      ``[]`` int32.
    """
    width = 16
    weights = [entry(i) for i in range(LANES)]
    sums = [tree_sum(weights[i : i + width]) for i in range(0, LANES, width)]
    group, skipped = pick_scalar(sums, target - before)
    inside = [entry(group * width + i) for i in range(width)]
    place, _ = pick_scalar(inside, target - before - skipped)
    return lax.convert_element_type(group * width + place, jnp.int32)
