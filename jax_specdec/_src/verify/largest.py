"""The largest entries of rows, among which nearly all thresholds of filters are, for TPUs.

A TPU compares lane by lane. So each lane of every second register has a list of the largest entries
that it has met, in order: an entry is sorted in without a look at another lane. All entries that
are larger than the last one of every list are listed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify.tiles import TILE

LANES = 128

_LISTS, _DEPTH = 2, 6
"""Lists of each lane, and how long they are: of 50 largest entries at random places, one is not
listed in 1 of 60,000 rows; of 150 in 1 of 100."""

NUM_LISTED = _LISTS * _DEPTH * LANES
"""Entries listed of each row."""


class Largest(NamedTuple):
    """The largest entries of rows.

    Attributes:
      entries: ``[n, L]`` float32.
      bound: ``[n]`` float32, all entries larger than it are listed.
      mass: gives ``[n]`` float32, the masses of whole rows.
    """

    entries: jax.Array
    bound: jax.Array
    mass: Callable[[], jax.Array]

    @classmethod
    def of(cls, lists: Iterable[jax.Array], mass: Callable[[], jax.Array]) -> Largest:
        """From lists ``[n, 128]`` of each rank."""
        ranks = [x.astype(jnp.float32) for x in lists]
        last = functools.reduce(jnp.maximum, ranks[_DEPTH - 1 :: _DEPTH])
        return cls(jnp.concatenate(ranks, axis=1), jnp.max(last, axis=1), mass)

    def whole(self) -> jax.Array:
        """``[n, L]`` float32, as rows that have no other entries."""
        return self.entries


def sort_in(lists: list[jax.Array], chunks: Iterable[jax.Array]) -> list[jax.Array]:
    """Lists ``[n, 128]`` of each rank, with the entries of chunks ``[n, 128]`` of columns."""
    lists = list(lists)
    for number, chunk in enumerate(chunks):
        first, x = number % _LISTS * _DEPTH, chunk.astype(jnp.float32)
        for i in range(first, first + _DEPTH):
            lists[i], x = jnp.maximum(lists[i], x), jnp.minimum(lists[i], x)
    return lists


def lists_of(matrix: jax.Array, width: int) -> list[jax.Array]:
    """The lists of the first `width` columns of a matrix, a tile of every row after another."""
    empty = jnp.full((matrix.shape[0], LANES), -jnp.inf, jnp.float32)

    def read(start: int | jax.Array, count: int, lists: list[jax.Array]) -> list[jax.Array]:
        tile = lax.dynamic_slice_in_dim(matrix, start, count, axis=1)
        missing = -count % LANES
        if missing:
            tile = jnp.pad(tile, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        return sort_in(lists, jnp.split(tile, tile.shape[1] // LANES, axis=1))

    whole, cut = divmod(width, TILE)
    lists = [empty] * (_LISTS * _DEPTH)
    lists = lax.fori_loop(0, whole, lambda i, found: read(i * TILE, TILE, found), lists)
    return read(whole * TILE, cut, lists) if cut else lists
