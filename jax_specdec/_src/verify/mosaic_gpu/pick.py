"""The two-level inverse CDF inside a kernel, where nothing sorts and nothing scans."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu.buffers import tree_sum
from jax_specdec._src.verify.mosaic_gpu.config import LANES, TILE_ROWS

_WIDTH = 16  # ids that are looked at one by one


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


def pick_entry(weights: Any, count: int, target: jax.Array) -> jax.Array:
    """The same, of `count` weights in shared memory, for a `target` that is not negative."""

    def goes_on(state: Any) -> jax.Array:
        i, _, inclusive = state
        return (i < count) & ~(inclusive > target)

    def step(state: Any) -> Any:
        i, index, inclusive = state
        weight = weights[i]
        return i + 1, jnp.where(weight > 0, i, index), inclusive + weight

    _, index, _ = lax.while_loop(goes_on, step, (jnp.int32(0), jnp.int32(0), jnp.float32(0)))
    return index


def pick_in_tile(
    weights: list[jax.Array], places: list[jax.Array], scratch: Any, u: jax.Array
) -> jax.Array:
    """Inverse CDF over a tile.

    A prefix sum is a masked sum over everything, so it does not decrease, and is the total once
    all that is left out is zero. Hence bisection never ends at a row of zero weight.

    Args:
      weights: float32 ``[vector, LANES]`` each, not all zero.
      places: int32, place of each in the tile.
      scratch: float32 ref ``[vector, LANES]`` in shared memory.
      u: ``[]`` float32 uniform on [0, 1).

    Returns:
      ``[]`` int32, place in the tile.
    """
    vector = weights[0].shape[0]

    def prefix(row: jax.Array) -> jax.Array:
        kept = [
            jnp.where(place < row * LANES, w, 0.0) for w, place in zip(weights, places, strict=True)
        ]
        return jnp.sum(tree_sum(kept))

    target = u * prefix(jnp.int32(TILE_ROWS))

    def halve(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, before = state
        middle = row + lax.shift_right_logical(jnp.int32(TILE_ROWS // 2), i)
        mass = prefix(middle)
        return jnp.where(mass > target, row, middle), jnp.where(mass > target, before, mass)

    steps = TILE_ROWS.bit_length() - 1
    row, before = lax.fori_loop(0, steps, halve, (jnp.int32(0), jnp.float32(0)))

    def keep(w: jax.Array) -> None:
        scratch[...] = w

    for j, w in enumerate(weights):
        pl.when(lax.div(row, vector) == j)(functools.partial(keep, w))

    plgpu.commit_smem()

    def group(start: Any) -> list[jax.Array]:
        return [scratch[lax.rem(row, vector), start + i] for i in range(_WIDTH)]

    # Sixteen at a time, until the sum exceeds the target; then among those.
    def goes_on(state: Any) -> jax.Array:
        start, _, _, inclusive = state
        return (start < LANES) & ~(inclusive > target)

    def step(state: Any) -> Any:
        start, found, skipped, inclusive = state
        mass = tree_sum(group(start))
        return (
            start + _WIDTH,
            jnp.where(mass > 0, start, found),
            jnp.where(mass > 0, inclusive, skipped),
            inclusive + mass,
        )

    zero = jnp.int32(0)
    _, found, skipped, _ = lax.while_loop(goes_on, step, (zero, zero, before, before))
    place, _ = pick_scalar(group(found), target - skipped)
    return row * LANES + found + place
