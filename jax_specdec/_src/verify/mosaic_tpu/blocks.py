"""What both kernels share: blocks of whole tiles in vector memory, and sums by tile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.verify.mosaic_tpu.largest import LANES
from jax_specdec._src.verify.tiles import TILE, num_tiles

_CHUNKS = TILE // LANES

VMEM = 8 * 2**20
"""Bytes of vector memory that a kernel may take; every TPU gives it twice as many."""


class Blocks(NamedTuple):
    """How a row is divided into blocks, which a kernel's grid goes over last.

    Attributes:
      tiles: of a block.
      num: of a row.
    """

    tiles: int
    num: int

    @classmethod
    def of(cls, width: int, most: int) -> Blocks:
        """Returns the blocks of `width` ids, at most so many tiles each."""
        count = num_tiles(width)
        # Of the three largest, that which leaves the fewest tiles empty.
        tiles = min(range(most - 2, most + 1), key=lambda n: (-(-count // n) * n, -n))
        return cls(min(count, tiles), pl.cdiv(count, tiles))

    @property
    def width(self) -> int:
        """Ids of a block."""
        return self.tiles * TILE

    @property
    def num_sums(self) -> int:
        """One for each tile of a row, and more that are 0, to fill registers."""
        return pl.cdiv(self.num * self.tiles, LANES) * LANES

    def put_sums(self, ref: Any, entry: Callable[[int], jax.Array]) -> None:
        """Puts sums by tile where they belong among those of all blocks, ``ref [rows, num_sums]``.

        `entry` gives ``[rows, 128]``, of each chunk of 128 ids. Lanes are added once for each tile.
        """
        first = pl.program_id(1) * self.tiles
        sums = ref[...]
        tile = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
        for t in range(self.tiles):
            # [rows, 1]: 16 chunks are added lane by lane, then their lanes
            chunks = range(t * _CHUNKS, (t + 1) * _CHUNKS)
            total = jnp.sum(functools.reduce(jnp.add, map(entry, chunks)), axis=1, keepdims=True)
            sums = jnp.where(tile == first + t, total, sums)
        ref[...] = sums


def of_rows(rows: int, columns: int) -> Any:
    """Returns a block that stays in vector memory while the grid goes over those of its rows."""
    return pl.BlockSpec((rows, columns), lambda i, j, *_: (i, 0))


def in_powers_of_two(x: jax.Array) -> jax.Array:
    """Returns what `exp2` takes for what `exp` takes."""
    return jnp.minimum(x * 1.4426950408889634, jnp.finfo(jnp.float32).max)


def clear(ref: Any, end: jax.Array, value: float) -> None:
    """Fills the columns of ``ref [rows, width]`` from `end` on, which may hold anything."""
    rows, width = ref.shape
    wide = jnp.int32 if ref.dtype == jnp.int16 else jnp.float32

    @pl.when(end < width)
    def _() -> None:
        def step(chunk: jax.Array, nothing: None) -> None:
            here = pl.ds(chunk * LANES, LANES)
            column = chunk * LANES + lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
            x = jnp.where(column < end, ref[:, here].astype(wide), wide(value))
            ref[:, here] = x.astype(ref.dtype)

        # From the chunk that the end is in.
        start = lax.div(jnp.maximum(end, 0), jnp.int32(LANES))
        lax.fori_loop(start, jnp.int32(width // LANES), step, None)
