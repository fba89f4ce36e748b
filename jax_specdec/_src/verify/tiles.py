"""The vocabulary in tiles, and the scale that turns logits into probabilities.

Tiles of `TILE` ids are counted from id 0 of the whole vocabulary on every backend, so that every
backend draws the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import types

TILE = types.TILE


class Scale(NamedTuple):
    """Turns a logit into the probability ``exp((logit - shift) * inv_temperature - log_scale)``.

    Target and draft rows use the same expression, so that equal rows give equal probabilities to
    the last bit.
    """

    shift: jax.Array
    log_scale: jax.Array

    def probs(self, logits: jax.Array, inv_temperature: jax.Array) -> jax.Array:
        """Probabilities of logits of a row."""
        return jnp.exp((logits - self.shift) * inv_temperature - self.log_scale)


def num_tiles(size: int) -> int:
    """How many tiles `size` ids take; the last may be partly filled."""
    return -(-size // TILE)


def each_tile(read: Callable[[Any, int], jax.Array], width: int) -> jax.Array:
    """``[T, ...]``, what `read` gives of each tile of `width` columns, by its start and length."""
    whole, cut = divmod(width, TILE)
    found, starts = [], jnp.arange(whole, dtype=jnp.int32) * TILE
    if whole:
        found.append(lax.map(lambda start: read(start, TILE), starts))
    if cut:
        found.append(read(whole * TILE, cut)[None])
    return jnp.concatenate(found)
