"""A row of the vocabulary in tiles: statistics, and the two-level inverse CDF.

`TILE` is counted from id 0 on every backend, so that every backend picks the same token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 2048


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


def keep(x: jax.Array, threshold: jax.Array | None, fill: float = -float("inf")) -> jax.Array:
    """Entries, `fill` for those below a threshold; NaN stays."""
    return x if threshold is None else jnp.where(x < threshold, fill, x)


def num_tiles(size: int) -> int:
    """Tiles that ``size`` ids fill, the last one perhaps in part."""
    return -(-size // TILE)


def tiles_of_part(width: int, num_parts: int) -> int:
    """Tiles that a part of `width` ids lies in, at most; others may lie in the first and last."""
    starts = range(0, num_parts * width, width)
    return max((start + width - 1) // TILE - start // TILE + 1 for start in starts)


def first(hit: jax.Array) -> jax.Array:
    """Index of the first true entry of ``[n]``; n where there is none."""
    n = hit.shape[0]
    return jnp.min(jnp.where(hit, jnp.arange(n, dtype=jnp.int32), n))
