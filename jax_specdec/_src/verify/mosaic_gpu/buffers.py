"""A block's slice of a row in shared memory: copies, padding, passes over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu.config import LANES, TILE_ROWS, Slices


@dataclasses.dataclass(frozen=True)
class RowBuffer:
    """The slice of one row that this block looks at, ``[rows, LANES]``.

    What lies past `size` holds `fill`, so that no pass needs a mask.

    Attributes:
      rows: ref ``[R, V / LANES, LANES]`` in global memory.
      ref: ref ``[slices.rows, LANES]`` in shared memory.
      barrier: completes when a copy has arrived.
      slices: how a row is cut.
      size: ids of a row that count.
      fill: the entry of an id that does not.
      block: this block's place in the cluster.
      vector: rows per vector.
      interpreted: whether the kernel runs in interpret mode.
    """

    rows: Any
    ref: Any
    barrier: Any
    slices: Slices
    size: int
    fill: float
    block: jax.Array
    vector: int
    interpreted: bool

    @property
    def _stored(self) -> int:
        """Rows of LANES ids that hold some id that counts."""
        return -(-self.size // LANES)

    @property
    def _full(self) -> int:
        """Blocks whose slice counts whole."""
        return self._stored // self.slices.rows

    @property
    def _rest(self) -> int:
        """Rows of the one block whose slice counts in part."""
        return self._stored % self.slices.rows

    def pad(self) -> None:
        """Fill what no copy will write; once, before the first copy."""
        rows = self.slices.rows

        def fill(start: int) -> Callable[[], None]:
            def write() -> None:
                def one(i: jax.Array, _: None) -> None:
                    # A row of one value, but not known as such: that could not be stored.
                    row = jnp.where(self._iota(1, 1) >= 0, self.fill, 0.0)
                    self.ref[pl.ds(start + i, 1)] = row.astype(self.ref.dtype)

                lax.fori_loop(0, rows - start, one, None)
                plgpu.commit_smem()

            return write

        if self._rest:
            pl.when(self.block == self._full)(fill(self._rest))
        if self._full + bool(self._rest) < self.slices.cluster:
            pl.when(self.block >= self._full + bool(self._rest))(fill(0))

    def fetch(self, row: jax.Array) -> None:
        """Start the copy of a row's slice."""

        def copy(count: int) -> Callable[[], None]:
            def start() -> None:
                plgpu.copy_gmem_to_smem(
                    self.rows.at[row, pl.ds(self.block * self.slices.rows, count)],
                    self.ref.at[pl.ds(0, count)],
                    self.barrier,
                )

            return start

        if self._full:
            pl.when(self.block < self._full)(copy(self.slices.rows))
        if self._rest:
            pl.when(self.block == self._full)(copy(self._rest))

    def wait(self) -> None:
        """Wait for the copy, and hide the ids of its last row that do not count."""
        pl.when(self.block < self._full + bool(self._rest))(
            lambda: plgpu.barrier_wait(self.barrier)
        )
        if self.size % LANES:
            last = self._stored - 1

            @pl.when(self.block == last // self.slices.rows)
            def _() -> None:
                place = pl.ds(last % self.slices.rows, 1)
                lane = self._iota(1, 1)
                row = self.ref[place].astype(jnp.float32)
                row = jnp.where(lane < self.size % LANES, row, self.fill)
                self.ref[place] = row.astype(self.ref.dtype)
                plgpu.commit_smem()

    def at(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry of a row, from global memory."""
        return self.rows[row, lax.div(token_id, LANES), lax.rem(token_id, LANES)].astype(
            jnp.float32
        )

    # What the residual asks of a draft row, be it held whole or tile by tile.

    def open(self, row: jax.Array) -> None:
        """Have the row's slice here."""
        self.fetch(row)
        self.wait()

    def ready(self, tile: Any) -> None:
        """Wait for a tile."""

    def release(self, row: jax.Array, tile: Any) -> None:
        """Say that a tile has been read."""

    def reopen(self, row: jax.Array, tile: Any) -> None:
        """Have one tile here again."""

    def raw(self, tile: Any) -> list[jax.Array]:
        """A tile's entries as stored, ``[vector, LANES]`` each."""
        return [
            self.ref[pl.ds(tile * TILE_ROWS + j, self.vector)]
            for j in range(0, TILE_ROWS, self.vector)
        ]

    def vectors(self, tile: Any) -> list[jax.Array]:
        """A tile's entries, float32 ``[vector, LANES]`` each."""
        return [x.astype(jnp.float32) for x in self.raw(tile)]

    def _iota(self, rows: int, dimension: int) -> jax.Array:
        if self.interpreted:  # which has no layouts before JAX 0.11
            return lax.broadcasted_iota(jnp.int32, (rows, LANES), dimension)
        layout = plgpu.Layout.WG_STRIDED((rows, LANES), vec_size=rows)
        return plgpu.broadcasted_iota(jnp.int32, (rows, LANES), dimension, layout=layout)

    def constant(self, value: float, dtype: Any = jnp.float32) -> jax.Array:
        """``[vector, LANES]`` of one value, laid out as entries are, to start a loop with."""
        return jnp.where(
            self._iota(self.vector, 0) >= 0, jnp.asarray(value, dtype), jnp.asarray(0, dtype)
        )

    def reduce(self, fn: Callable[[Any, jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        """``fn(tile, carry)`` over the tiles of the slice: a loop, since code must be fetched."""
        return lax.fori_loop(0, self.slices.tiles, fn, start)

    def place(self, tile: Any) -> list[jax.Array]:
        """The tile's ids as places in the slice, int32 ``[vector, LANES]`` each."""
        base = self._iota(self.vector, 0) * LANES + self._iota(self.vector, 1)
        return [base + (tile * TILE_ROWS + j) * LANES for j in range(0, TILE_ROWS, self.vector)]


@dataclasses.dataclass(frozen=True)
class TileRing(RowBuffer):
    """The same for a row that is read once and in order: some tiles of it at a time.

    Attributes:
      ref: ref ``[tiles, TILE_ROWS, LANES]`` in shared memory.
      barrier: one for each of them.
      masked: whether entries that do not count must be hidden; else they are zeros.
    """

    masked: bool

    def _slot(self, tile: Any) -> Any:
        return lax.rem(tile, self.ref.shape[0])

    def _fetch_tile(self, row: jax.Array, tile: Any) -> None:
        # What lies past the row arrives as zeros.
        start = self.block * self.slices.rows + tile * TILE_ROWS
        slot = self._slot(tile)
        plgpu.copy_gmem_to_smem(
            self.rows.at[row, pl.ds(start, TILE_ROWS)], self.ref.at[slot], self.barrier.at[slot]
        )

    def pad(self) -> None:
        """Nothing to fill."""

    def open(self, row: jax.Array) -> None:
        for tile in range(min(self.ref.shape[0], self.slices.tiles)):
            self._fetch_tile(row, jnp.int32(tile))

    def ready(self, tile: Any) -> None:
        plgpu.barrier_wait(self.barrier.at[self._slot(tile)])

    def release(self, row: jax.Array, tile: Any) -> None:
        following = tile + self.ref.shape[0]

        @pl.when(following < self.slices.tiles)
        def _() -> None:
            plgpu.commit_smem()  # all have read what the copy will overwrite
            self._fetch_tile(row, following)

    def reopen(self, row: jax.Array, tile: Any) -> None:
        plgpu.commit_smem()
        self._fetch_tile(row, tile)
        self.ready(tile)

    def vectors(self, tile: Any) -> list[jax.Array]:
        slot = self._slot(tile)
        entries = [
            self.ref[slot, pl.ds(j, self.vector)].astype(jnp.float32)
            for j in range(0, TILE_ROWS, self.vector)
        ]
        if not self.masked:
            return entries
        end = self.size - self.block * (self.slices.rows * LANES)
        return [
            jnp.where(place < end, x, self.fill)
            for x, place in zip(entries, self.place(tile), strict=True)
        ]


def tree_sum(xs: list[jax.Array]) -> jax.Array:
    """Sum of arrays, in pairs: short chains of additions."""
    while len(xs) > 1:
        xs = [a + b for a, b in zip(xs[::2], xs[1::2], strict=False)] + xs[len(xs) // 2 * 2 :]
    return xs[0]
