"""Pieces of rows in shared memory, one warpgroup's own: copied, put right, read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu import signals
from jax_specdec._src.verify.mosaic_gpu.threads import THREADS
from jax_specdec._src.verify.tiles import TILE


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Slots that hold pieces of rows in turn: turn i is held by slot ``i % slots``.

    What a piece has past the ids that count reads as `fill`, up to the end of its last tile.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, columns]`` in global memory.
      held: ref of shared memory, flat, of all warpgroups.
      barriers: ref of barriers, or `plgpu.Barrier` of this warpgroup in interpret mode.
      slots: pieces held.
      length: ids of a piece, whole tiles.
      stride: from one slot to the next.
      first_slot: ``[]`` int32, the first of this warpgroup.
      first_barrier: ``[]`` int32, the barrier of that slot.
      size: ids of a row that count.
      row_size: ids of the target row that count, for pieces of a draft row.
      per_slice: pieces per slice.
      fill: the entry of an id that does not.
      each: consecutive ids per thread.
    """

    threads: Any
    rows: Any
    held: Any
    barriers: Any
    slots: int
    length: int
    stride: int
    first_slot: jax.Array
    first_barrier: jax.Array
    size: int
    row_size: int
    per_slice: int
    fill: float
    each: int

    @property
    def chunk(self) -> int:
        """Ids that all threads read at once."""
        return THREADS * self.each

    def _slot(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, self.slots) if self.slots > 1 else jnp.int32(0)

    def _start(self, turn: jax.Array) -> jax.Array:
        return (self.first_slot + self._slot(turn)) * self.stride

    def count(self, first: jax.Array) -> jax.Array:
        """Ids that count of the piece that begins at id `first`."""
        return jnp.clip(self.size - first, 0, self.length)

    def fetch(self, row: jax.Array, first: jax.Array, turn: jax.Array) -> None:
        """Begin to copy the piece from id `first` on; all have done reading what it replaces."""
        if self.threads.interpreted:
            self._interpreted_fetch(row, first, turn)
            return
        count = self.count(first)

        @pl.when(count > 0)
        def _() -> None:
            signals.copy_row(
                self.rows,
                row,
                first,
                count,
                self.held,
                self._start(turn),
                self.barriers,
                self.first_barrier + self._slot(turn),
            )

    def _interpreted_fetch(self, row: jax.Array, first: jax.Array, turn: jax.Array) -> None:
        def copy(count: int) -> Callable[[], None]:
            def run() -> None:
                plgpu.copy_gmem_to_smem(
                    self.rows.at[row, pl.ds(first, count)],
                    self.held.at[pl.ds(self._start(turn), count)],
                    self.barriers.at[self._slot(turn)],
                )

            return run

        rest = self.size % self.length
        pl.when(first + self.length <= self.size)(copy(self.length))
        if rest:
            pl.when((first < self.size) & (first + self.length > self.size))(copy(rest))

    def wait(self, row: jax.Array, first: jax.Array, turn: jax.Array) -> None:
        """Wait for the piece, and put it right: entries in their places, fills where none are."""
        count = self.count(first)
        # Copies of whole units leave what is past them alone: fill it while they are under way.
        whole_units = self.stride == self.length
        whole_units &= self.size * jnp.dtype(self.held.dtype).itemsize % signals.COPIED == 0
        is_partial = lax.rem(count, TILE) > 0
        if self.length == TILE:
            is_partial |= count == 0
        if whole_units and not self.threads.interpreted:
            again = self.length == TILE  # a slot of single tiles holds others in turn
            is_first = (turn < self.slots) | again
            pl.when(is_partial & is_first)(lambda: self._fill(count, turn))

        self.arrived(first, turn)
        if self.stride > self.length:
            pl.when(count > 0)(lambda: self._move(signals.shift(self.rows, row, first), count, turn))
        if not whole_units or self.threads.interpreted:
            pl.when(is_partial)(lambda: self._fill(count, turn))

    def _fill(self, count: jax.Array, turn: jax.Array) -> None:
        """Hide what lies past `count` in its tile, or the whole of an empty piece of one tile."""
        index = self.threads.index()

        def fill(i: jax.Array, _: None) -> None:
            place = lax.div(count, TILE) * TILE + i * THREADS + index
            where = (place >= count) & (place < self.length)
            value = self.threads.filled(self.fill)
            self.threads.scatter(self.held, self._start(turn) + place, value, where)

        lax.fori_loop(0, TILE // THREADS, fill, None)
        self.threads.meet()

    def _move(self, shift: jax.Array, count: jax.Array, turn: jax.Array) -> None:
        """Move a piece that arrived `shift` bytes late to where its slot begins."""
        words = 4
        size = self.held.dtype.itemsize
        per_pass = THREADS * words * 4 // size

        def move(i: jax.Array, _: None) -> None:
            start = self._start(turn) + i * per_pass
            found = signals.load_words(self.held, start, shift, words)
            self.threads.meet()  # all have read what is now overwritten
            signals.store_words(self.held, start, found)

        @pl.when(shift > 0)
        def _() -> None:
            lax.fori_loop(0, lax.div(count + per_pass - 1, per_pass), move, None)
            self.threads.meet()

    def arrived(self, first: jax.Array, turn: jax.Array) -> None:
        """Wait for a copy, if there was anything to copy."""
        parity = lax.rem(lax.div(turn, self.slots), 2)
        slot = self._slot(turn)

        @pl.when(self.count(first) > 0)
        def _() -> None:
            if self.threads.interpreted:
                plgpu.barrier_wait(self.barriers.at[slot])
            else:
                signals.wait(self.barriers, self.first_barrier + slot, parity)

    def tiles(self, first: jax.Array) -> jax.Array:
        """Tiles of a piece that hold ids that count."""
        return lax.div(self.count(first) + TILE - 1, TILE)

    def tiles_of(self, first: jax.Array) -> jax.Array:
        """Pieces of the slice that begins at `first` that are in the row at all."""
        return jnp.clip(lax.div(self.row_size - first + TILE - 1, TILE), 0, self.per_slice)

    def fetched(self, first: jax.Array) -> jax.Array:
        """Those of them that are copied at all."""
        return jnp.clip(lax.div(self.size - first + TILE - 1, TILE), 0, self.per_slice)

    @property
    def tile_size(self) -> int:
        """Ids of a tile."""
        return TILE

    def starts(self, turn: jax.Array, tile: Any) -> list[jax.Array]:
        """Where the chunks of a tile of the piece begin."""
        begin = self._start(turn) + tile * TILE
        return [begin + i for i in range(0, TILE, self.chunk)]

    def entries(self, start: jax.Array) -> list[jax.Array]:
        """A chunk: float32 ``[128]`` for each of the ids that a thread has."""
        return self.threads.entries(self.held, start, self.each)

    def at(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry per thread, from global memory."""
        return self.threads.gather(self.rows, row, token_id)
