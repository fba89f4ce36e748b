"""The vocabulary in tiles, and the scale that turns logits into probabilities.

Tiles of `TILE` ids are counted from id 0 of the whole vocabulary on every backend, so that every
backend draws the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base import types

TILE = types.TILE


class Scale(NamedTuple):
    """Turns a logit into the probability ``exp((logit - shift) * inv_temperature - log_scale)``.

    Target and draft rows use the same expression, so that equal rows give equal probabilities to
    the last bit.
    """

    shift: jax.Array
    log_scale: jax.Array

    def probs(self, logits: jax.Array, inv_temperature: jax.Array) -> jax.Array:
        """Returns the probabilities of logits of a row."""
        return jnp.exp((logits - self.shift) * inv_temperature - self.log_scale)


def num_tiles(size: int) -> int:
    """Returns how many tiles `size` ids take; the last may be partly filled."""
    return -(-size // TILE)


def kept(entries: jax.Array, least: jax.Array | None, fill: float = -jnp.inf) -> jax.Array:
    """Returns entries with `fill` in place of those below a threshold; None keeps them all."""
    return entries if least is None else jnp.where(entries < least, fill, entries)


def kept_of_rows(entries: jax.Array, least: jax.Array | None, fill: float = -jnp.inf) -> jax.Array:
    """Returns the same of entries ``[n, W]``, with a threshold ``[n]`` of each row."""
    return entries if least is None else kept(entries, least[:, None], fill)


def each_tile(read: Callable[[Any, int], jax.Array], width: int) -> jax.Array:
    """Returns ``[T, ...]``: what `read` gives of each tile of `width` columns.

    `read` gets the first column of a tile, and how many columns it has.
    """
    whole, cut = divmod(width, TILE)
    starts = jnp.arange(whole, dtype=jnp.int32) * TILE
    found = []
    if whole:
        # [whole, ...]: one tile after another
        found.append(lax.map(lambda start: read(start, TILE), starts))
    if cut:  # the last tile has fewer columns
        found.append(read(whole * TILE, cut)[None])
    return jnp.concatenate(found)


# Tiles of a vocabulary that is split into parts of equal width. An edge may cut a tile.


def tiles_of_part(width: int, num_parts: int) -> int:
    """Returns the most tiles that any part of `width` ids overlaps."""
    # The first and the last tile of a part may be shared with its neighbours.
    starts = range(0, num_parts * width, width)
    return max([(start + width - 1) // TILE - start // TILE + 1 for start in starts])


def pieces_of_tiles(width: int, num_parts: int, num_tiles_of_part: int) -> np.ndarray:
    """Returns which masses belong to which tile: ``[T, m]`` indices into the masses of all parts.

    Each part of `width` ids has `num_tiles_of_part` masses, beginning with the tile that it begins
    in; those of all parts stand one after another. A tile that an edge between parts cuts has a
    piece in several parts. Tiles with fewer than m pieces are filled up with the index past the
    last mass.
    """
    # Of each tile, the places of its pieces among the masses of all parts.
    found: list[list[int]] = [[] for _ in range(num_tiles(width * num_parts))]
    for part, start in enumerate(range(0, num_parts * width, width)):
        first = start // TILE
        for tile in range(first, (start + width - 1) // TILE + 1):
            found[tile].append(part * num_tiles_of_part + tile - first)
    # Parts that are narrower than a tile make more than two pieces of it.
    most = max([len(pieces) for pieces in found])
    past = num_parts * num_tiles_of_part
    return np.array([pieces + [past] * (most - len(pieces)) for pieces in found], np.int32)
