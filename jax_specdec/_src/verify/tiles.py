"""A row of the vocabulary in tiles: statistics, and the two-level inverse CDF.

`TILE` is counted from id 0 on every backend, so that every backend picks the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 2048
CHUNK = 4 * TILE
"""Ids per trip of a loop over one row: small enough to stay in the nearest cache."""


class Scale(NamedTuple):
    """Turns an entry of a row into ``exp((entry - shift) * inv_temperature - log_scale)``.

    Target and draft rows use the same expression, so that equal rows give equal probabilities to
    the last bit.
    """

    shift: jax.Array
    log_scale: jax.Array

    def probs(self, entries: jax.Array, inv_temperature: jax.Array) -> jax.Array:
        """Probabilities of entries of a row."""
        return jnp.exp((entries - self.shift) * inv_temperature - self.log_scale)


class RowStats(NamedTuple):
    """What one read of a row of logits leaves behind.

    Attributes:
      max: ``[T]`` float32, largest logit of each tile, before temperature; +inf for NaN.
      sum: ``[T]`` float32, ``sum(exp((logit - max) / temperature))`` of each tile.
      threshold: ``[]`` float32, or None for none; entries below it count as -inf.
    """

    max: jax.Array
    sum: jax.Array
    threshold: jax.Array | None = None

    @property
    def peak(self) -> jax.Array:
        """``[]`` largest logit of the row; not finite where the row is not a distribution."""
        return jnp.max(self.max)

    def masses(self, inv_temperature: jax.Array) -> jax.Array:
        """``[T]`` weight of each tile, relative to the weight of the largest logit."""
        return self.sum * jnp.exp((self.max - self.peak) * inv_temperature)

    def scale(self, inv_temperature: jax.Array) -> Scale:
        """What normalizes the row."""
        return Scale(self.peak, jnp.log(jnp.sum(self.masses(inv_temperature))))


def keep(x: jax.Array, threshold: jax.Array | None) -> jax.Array:
    """Entries, -inf for those below a threshold; NaN stays."""
    return x if threshold is None else jnp.where(x < threshold, -jnp.inf, x)


def num_tiles(size: int) -> int:
    """Tiles that ``size`` ids fill, the last one perhaps in part."""
    return -(-size // TILE)


def tiles_of_part(width: int, num_parts: int) -> int:
    """Tiles that a part of `width` ids lies in, at most; others may lie in the first and last."""
    starts = range(0, num_parts * width, width)
    return max((start + width - 1) // TILE - start // TILE + 1 for start in starts)


def map_tiles(
    fn: Callable[..., Any],
    read: Callable[[Any, int], tuple[jax.Array, ...]],
    size: int,
    chunk: int | None,
    whole: int | None = None,
) -> Any:
    """Apply a function to every tile of one or more rows, reading each once.

    Args:
      fn: maps arrays ``[n, length]`` of n tiles to a pytree of arrays ``[n]``. A tile's length
        is TILE, or less for the last one.
      read: ``read(start, length)`` gives the rows' entries as arrays ``[length]``.
      size: how many ids.
      chunk: ids per trip of a loop, a multiple of TILE; None for no loop.
      whole: ids that every row has, where rows differ in length; the one tile beyond them is
        read last, from a static start.

    Returns:
      The results of `fn`, ``[num_tiles(size)]`` each.
    """

    def on_tiles(start: Any, length: int, width: int) -> Any:
        return fn(*(row.reshape(-1, width) for row in read(start, length)))

    full = (size if whole is None else whole) // TILE * TILE
    trips = full // chunk if chunk else 0
    looped = trips * chunk if chunk else 0
    parts = []
    if trips and chunk:
        steps = jnp.arange(trips, dtype=jnp.int32)
        results = lax.map(lambda i: on_tiles(i * chunk, chunk, TILE), steps)
        parts.append(jax.tree.map(lambda x: x.reshape(-1), results))
    if looped < full:
        parts.append(on_tiles(looped, full - looped, TILE))
    if full < size:
        parts.append(on_tiles(full, size - full, size - full))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)


def maxima(x: jax.Array) -> RowStats:
    """Statistics of n tiles that greedy needs: no sum."""
    # XLA:CPU's max may pass over a NaN.
    m = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=1)
    return RowStats(m, jnp.zeros_like(m))


def max_and_sum(x: jax.Array, inv_temperature: jax.Array) -> RowStats:
    """Statistics of n tiles, from their entries ``[n, length]``."""
    m = jnp.max(x, axis=1)
    base = jnp.where(jnp.isfinite(m), m, 0.0)
    total = jnp.sum(jnp.exp((x - base[:, None]) * inv_temperature), axis=1)
    return RowStats(jnp.where(jnp.isnan(total), jnp.inf, m), total)


def first(hit: jax.Array) -> jax.Array:
    """Index of the first true entry of ``[n]``; n where there is none."""
    n = hit.shape[0]
    return jnp.min(jnp.where(hit, jnp.arange(n, dtype=jnp.int32), n))


def pick(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Inverse CDF: the least index whose inclusive sum exceeds ``u * total``.

    Never an index of zero weight; the last of positive weight where rounding finds none.

    Args:
      weights: ``[n]`` float32, not negative, not all zero.
      u: ``[]`` float32 uniform on [0, 1).

    Returns:
      ``[]`` int32.
    """
    return pick_past(weights, u * jnp.cumsum(weights)[-1])


def pick_past(weights: jax.Array, mass: jax.Array) -> jax.Array:
    """`pick`, with `mass` in place of ``u * total``."""
    positive = weights > 0
    index = jnp.arange(weights.shape[0], dtype=jnp.int32)
    last_positive = jnp.max(jnp.where(positive, index, 0))
    return jnp.minimum(first((jnp.cumsum(weights) > mass) & positive), last_positive)
