"""The tiles of a row's slice in a block's shared memory: copied, put right, read."""

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
class Tiles:
    """Slots that hold a slice of rows that are opened one after another.

    A tile's slot is its place, and turns count rows. What a tile has past the ids that count, or
    what a mask hides, reads as -inf.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, columns]`` in global memory.
      held: ref of shared memory, flat.
      barriers: ref of barriers, or `plgpu.Barrier` in interpret mode.
      per_slice: tiles of a slice, the last slice of a row aside.
      stride: from one slot to the next.
      first_barrier: the barrier of the first slot.
      first: ``[]`` int32, the first id of this block's slice.
      size: ids of a row that count.
      each: consecutive ids per thread.
      bitmask: ref ``[R, words]`` int32, bits of the ids that are allowed, or None.
      end: ``[]`` int32, ids from it on are hidden, or None.
    """

    threads: Any
    rows: Any
    held: Any
    barriers: Any
    per_slice: int
    stride: int
    first_barrier: jax.Array | int
    first: jax.Array
    size: int
    each: int
    bitmask: Any = None
    end: jax.Array | None = None

    @property
    def chunk(self) -> int:
        """Ids that all threads read at once."""
        return THREADS * self.each

    def count(self) -> jax.Array:
        """Tiles of this slice."""
        return jnp.clip(lax.div(self.size - self.first + TILE - 1, TILE), 0, self.per_slice)

    def prepare(self) -> None:
        """Fill what no copy will reach; once, before the first row."""
        if self._fills_once and not self.threads.interpreted:
            last = self.count() - 1
            count = self.size - self.first - last * TILE
            pl.when((count < TILE) & (last >= 0))(lambda: self._fill(count, jnp.int32(0), last))

    @property
    def _fills_once(self) -> bool:
        """Whether copies of whole units leave a fill alone."""
        units = self.size * jnp.dtype(self.held.dtype).itemsize % signals.COPIED == 0
        return units and self.stride == TILE

    def open(self, row: jax.Array) -> None:
        """Begin to copy the slice of a row; all have done reading what it replaces."""
        if self.threads.interpreted:
            for i in range(self.per_slice):
                self._interpreted_copy(row, jnp.int32(i))
            return
        index = self.threads.index_anew()
        first = self.first + index * TILE
        size = jnp.minimum(self.size - first, TILE)
        signals.copy_pieces(
            self.rows,
            row,
            first,
            self.held,
            index * self.stride,
            self.barriers,
            self.first_barrier + index,
            jnp.where(index < self.per_slice, size, 0),
        )

    def _interpreted_copy(self, row: jax.Array, tile: jax.Array) -> None:
        first, rest = self.first + tile * TILE, self.size % TILE

        def copy(count: int) -> Callable[[], None]:
            def run() -> None:
                plgpu.copy_gmem_to_smem(
                    self.rows.at[row, pl.ds(first, count)],
                    self.held.at[pl.ds(tile * self.stride, count)],
                    self.barriers.at[self.first_barrier + tile],
                )

            return run

        here = tile < self.per_slice
        pl.when(here & (first + TILE <= self.size))(copy(TILE))
        if rest:
            pl.when(here & (first < self.size) & (first + TILE > self.size))(copy(rest))

    def ready(self, row: jax.Array, tile: jax.Array, turn: jax.Array) -> None:
        """Wait for a tile, hide what does not count, and fill what it has past the ids that do."""
        self.arrived(tile, turn)
        if self.bitmask is not None:
            self._hide(row, tile, lambda i, _: self._forbidden(row, tile, i))
        if self.end is not None:
            last = self.first + (tile + 1) * TILE
            pl.when(last > self.end)(
                lambda: self._hide(row, tile, lambda i, _: self._past(tile, i))
            )
        if self._fills_once and not self.threads.interpreted:
            return
        first = self.first + tile * TILE
        count = jnp.clip(self.size - first, 0, TILE)
        pl.when(count < TILE)(lambda: self._fill(count, row, tile))

    def arrived(self, tile: jax.Array, turn: jax.Array) -> None:
        """Wait for the copy of a tile."""
        if self.threads.interpreted:
            plgpu.barrier_wait(self.barriers.at[self.first_barrier + tile])
        else:
            signals.wait(self.barriers, self.first_barrier + tile, turn & 1)

    def hide_below(self, least: jax.Array, row: jax.Array, tile: jax.Array) -> None:
        """Hide the entries of a tile that are less than `least`."""
        self._hide(row, tile, lambda _, entries: [x < least for x in entries])

    def _hide(
        self,
        row: jax.Array,
        tile: jax.Array,
        hidden: Callable[[int, list[jax.Array]], list[jax.Array]],
    ) -> None:
        """Overwrite entries; each thread those that no other will read."""
        nothing = self.threads.filled(-jnp.inf)
        begin = self.begin(row, tile)
        for i, offset in enumerate(self.offsets):
            first = begin + offset + self.threads.index() * self.each
            for j, where in enumerate(hidden(i, self.entries(begin, offset))):
                self.threads.scatter(self.held, first + j, nothing, where)
        self.threads.written()

    def _forbidden(self, row: jax.Array, tile: jax.Array, chunk: int) -> list[jax.Array]:
        """Where the bitmask has no bit, for the ids that each thread has of a chunk."""
        bits = self._bits(row, self.ids(tile) + chunk * self.chunk)
        return [(bits & (1 << j)) == 0 for j in range(self.each)]

    def _past(self, tile: jax.Array, chunk: int) -> list[jax.Array]:
        """Where ids do not count."""
        assert self.end is not None
        ids = self.ids(tile) + chunk * self.chunk
        return [ids + j >= self.end for j in range(self.each)]

    def _bits(self, row: jax.Array, ids: jax.Array) -> jax.Array:
        """Bits of the bitmask from `ids` on, which a word holds."""
        word = jnp.minimum(lax.shift_right_logical(ids, 5), self.bitmask.shape[1] - 1)
        words = self.threads.gather(self.bitmask, row + jnp.zeros_like(ids), word)
        return lax.shift_right_logical(words, ids & 31)

    def _fill(self, count: jax.Array, row: jax.Array, tile: jax.Array) -> None:
        """Hide what lies past `count` in a tile."""
        start = tile * self.stride + self._shift(row)
        self.threads.fill(self.held, start, count, TILE, -jnp.inf)
        self.threads.written()
        self.threads.meet()

    def _shift(self, row: jax.Array) -> jax.Array | int:
        """Where a row's tiles begin in their slots."""
        if self.stride == TILE or self.threads.interpreted:
            return 0
        return signals.shift(self.rows, row)

    def fold(self, row: jax.Array, turn: jax.Array | None, step: Any, state: Any) -> Any:
        """``state = step(tile, 0, 0, chunks, state)`` for each tile of the slice.

        As they arrive, or, where `turn` is None, of a row that has.
        """

        def run(tile: jax.Array, state: Any) -> Any:
            if turn is not None:
                self.ready(row, tile, turn)
            return step(tile, 0, 0, self.chunks(row, tile), state)

        return lax.fori_loop(0, self.count(), run, state)

    def of_tile(self, row: jax.Array, tile: jax.Array) -> list[jax.Array]:
        """All entries that each thread has of a tile."""
        return [x for chunk in self.chunks(row, tile) for x in chunk]

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[list[jax.Array]]:
        """The same chunk by chunk."""
        begin = self.begin(row, tile)
        return [self.entries(begin, offset) for offset in self.offsets]

    def begin(self, row: jax.Array, tile: jax.Array) -> jax.Array:
        """Where a tile begins."""
        return tile * self.stride + self._shift(row)

    @property
    def offsets(self) -> range:
        """Where its chunks begin, from there on."""
        return range(0, TILE, self.chunk)

    def entries(self, begin: jax.Array, offset: int) -> list[jax.Array]:
        """A chunk: float32 ``[128]`` for each of the ids that a thread has."""
        aligned = self.stride == TILE
        return self.threads.entries(self.held, begin, self.each, aligned=aligned, offset=offset)

    def ids(self, tile: jax.Array) -> jax.Array:
        """The first id of each thread in a tile, of its first chunk."""
        return self.first + tile * TILE + self.threads.index() * self.each

    def at(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry per thread, from global memory; -inf where it is hidden."""
        entry = self.threads.gather(self.rows, row, token_id)
        if self.bitmask is not None:
            entry = jnp.where((self._bits(row, token_id) & 1) == 1, entry, -jnp.inf)
        return entry
