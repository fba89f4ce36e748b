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
    """Slots that hold the tiles of rows that are opened one after another.

    Where there are slots for a whole slice, a tile's slot is its place and turns count rows; else
    tiles take the slots in a ring, and turns count the tiles that were copied. What a tile has past
    the ids that count reads as `fill`, what a mask or a threshold hides as -inf.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, columns]`` in global memory.
      held: ref of shared memory, flat.
      barriers: ref of barriers, or `plgpu.Barrier` in interpret mode.
      slots: tiles held.
      per_slice: tiles of a slice, the last slice of a row aside.
      stride: from one slot to the next.
      first_barrier: the barrier of the first slot.
      first: ``[]`` int32, the first id of this block's slice.
      size: ids of a row that count.
      row_size: ids of the target row that count; tiles past `size` are all `fill`.
      fill: the entry of an id that does not count.
      each: consecutive ids per thread.
      bitmask: ref ``[R, words]`` int32, bits of the ids that are allowed, or None.
      thresholds: ref ``[R]`` float32, what an entry must reach, or None.
      end: ``[]`` int32, ids from it on are hidden, or None.
    """

    threads: Any
    rows: Any
    held: Any
    barriers: Any
    slots: int
    per_slice: int
    stride: int
    first_barrier: int
    first: jax.Array
    size: int
    row_size: int
    fill: float
    each: int
    bitmask: Any = None
    thresholds: Any = None
    end: jax.Array | None = None

    @property
    def chunk(self) -> int:
        """Ids that all threads read at once."""
        return THREADS * self.each

    def count(self) -> jax.Array:
        """Tiles of this slice of the target row."""
        return _tiles(self.row_size - self.first, self.per_slice)

    def copied(self) -> jax.Array:
        """Those of them that are copied."""
        return _tiles(self.size - self.first, self.per_slice)

    @property
    def whole(self) -> bool:
        """Whether slots hold whole slices."""
        return self.slots == self.per_slice

    def following(self, turn: jax.Array) -> jax.Array:
        """The turn after that of a row."""
        return turn + (1 if self.whole else self.copied())

    def _slot(self, tile: jax.Array, turn: jax.Array) -> jax.Array:
        return tile if self.whole else _remainder(turn + tile, self.slots)

    def _parity(self, tile: jax.Array, turn: jax.Array) -> jax.Array:
        return _remainder(turn if self.whole else _quotient(turn + tile, self.slots), 2)

    def _start(self, tile: jax.Array, turn: jax.Array) -> jax.Array:
        return self._slot(tile, turn) * self.stride

    def prepare(self) -> None:
        """Fill what no copy will reach; once, before the first row."""
        if self._fills_once and not self.threads.interpreted:
            last = self.copied() - 1
            count = self.size - self.first - last * TILE
            zero = jnp.int32(0)
            pl.when((count < TILE) & (last >= 0))(lambda: self._fill(count, zero, last, zero))

    @property
    def _fills_once(self) -> bool:
        """Whether copies of whole units leave a fill alone, in slots that hold no other tile."""
        units = self.size * jnp.dtype(self.held.dtype).itemsize % signals.COPIED == 0
        return units and self.whole and self.stride == TILE and self.size == self.row_size

    def open(self, row: jax.Array, turn: jax.Array) -> None:
        """Begin to copy the first tiles of a row; all have done reading what they replace."""
        self._copy(row, jnp.int32(0), self.slots, turn)

    def reopen(self, row: jax.Array, tile: jax.Array, turn: jax.Array) -> None:
        """Have one tile here again, where slots do not hold whole slices; see `reopened`."""
        self.threads.meet()
        self._copy(row, tile, 1, turn - tile)
        self.ready(row, tile, turn - tile)

    def reopened(self, row: jax.Array, tile: jax.Array, turn: jax.Array) -> list[jax.Array]:
        """Where the chunks of a tile begin that was reopened."""
        return self.starts(row, tile, turn - tile)

    def _copy(self, row: jax.Array, tile: jax.Array, count: int, turn: jax.Array) -> None:
        """Copy up to `count` tiles of the row that has `turn`."""
        if self.threads.interpreted:
            for i in range(count):
                self._interpreted_copy(row, tile + i, turn)
            return
        index = self.threads.index()
        first = self.first + (tile + index) * TILE
        slot = self._slot(tile + index, turn)
        size = jnp.minimum(self.size - first, TILE)
        signals.copy_pieces(
            self.rows,
            row,
            first,
            self.held,
            slot * self.stride,
            self.barriers,
            self.first_barrier + slot,
            jnp.where((index < count) & (tile + index < self.per_slice), size, 0),
        )

    def _interpreted_copy(self, row: jax.Array, tile: jax.Array, turn: jax.Array) -> None:
        first, rest = self.first + tile * TILE, self.size % TILE

        def copy(count: int) -> Callable[[], None]:
            def run() -> None:
                plgpu.copy_gmem_to_smem(
                    self.rows.at[row, pl.ds(first, count)],
                    self.held.at[pl.ds(self._start(tile, turn), count)],
                    self.barriers.at[self._slot(tile, turn)],
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
            self._hide(row, tile, turn, lambda i, _: self._forbidden(row, tile, i))
        if self.end is not None:
            last = self.first + (tile + 1) * TILE
            pl.when(last > self.end)(
                lambda: self._hide(row, tile, turn, lambda i, _: self._past(tile, i))
            )
        if self.thresholds is not None:
            self.hide_below(self._threshold(row), row, tile, turn)
        if self._fills_once and not self.threads.interpreted:
            return
        first = self.first + tile * TILE
        count = jnp.clip(self.size - first, 0, TILE)
        pl.when(count < TILE)(lambda: self._fill(count, row, tile, turn))

    def arrived(self, tile: jax.Array, turn: jax.Array) -> None:
        """Wait for the copy of a tile, if there was anything to copy."""

        def wait() -> None:
            slot = self._slot(tile, turn)
            if self.threads.interpreted:
                plgpu.barrier_wait(self.barriers.at[slot])
            else:
                parity = self._parity(tile, turn)
                signals.wait(self.barriers, self.first_barrier + slot, parity)

        if self.size == self.row_size:  # every tile has something
            wait()
        else:
            pl.when(tile < self.copied())(wait)

    def release(self, row: jax.Array, tile: jax.Array, turn: jax.Array) -> None:
        """Say that a tile has been read: what follows takes its slot."""
        if self.whole:
            return

        @pl.when(tile + self.slots < self.count())
        def _() -> None:
            # All have read what the copy will overwrite, and none has written there.
            self.threads.pause() if self.stride == TILE else self.threads.meet()
            self._copy(row, tile + self.slots, 1, turn)

    def hide_below(
        self, least: jax.Array, row: jax.Array, tile: jax.Array, turn: jax.Array
    ) -> None:
        """Hide the entries of a tile that are less than `least`."""
        self._hide(row, tile, turn, lambda _, entries: [x < least for x in entries])

    def _hide(
        self,
        row: jax.Array,
        tile: jax.Array,
        turn: jax.Array,
        hidden: Callable[[int, list[jax.Array]], list[jax.Array]],
    ) -> None:
        """Overwrite entries; each thread those that no other will read."""
        nothing = self.threads.filled(-jnp.inf)
        for i, start in enumerate(self.starts(row, tile, turn)):
            first = start + self.threads.index() * self.each
            for j, where in enumerate(hidden(i, self.entries(start))):
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

    def _threshold(self, row: jax.Array) -> jax.Array:
        return self.threads.gather(self.thresholds, row + jnp.zeros_like(self.threads.index()))

    def _fill(self, count: jax.Array, row: jax.Array, tile: jax.Array, turn: jax.Array) -> None:
        """Hide what lies past `count` in a tile."""
        start = self._start(tile, turn) + self._shift(row)
        self.threads.fill(self.held, start, count, TILE, self.fill)
        self.threads.meet()

    def _shift(self, row: jax.Array) -> jax.Array | int:
        """Where a row's tiles begin in their slots."""
        if self.stride == TILE or self.threads.interpreted:
            return 0
        return signals.shift(self.rows, row)

    def starts(self, row: jax.Array, tile: jax.Array, turn: jax.Array) -> list[jax.Array]:
        """Where the chunks of a tile begin."""
        begin = self._start(tile, turn) + self._shift(row)
        return [begin + i for i in range(0, TILE, self.chunk)]

    def entries(self, start: jax.Array) -> list[jax.Array]:
        """A chunk: float32 ``[128]`` for each of the ids that a thread has."""
        aligned = self.stride == TILE
        return self.threads.entries(self.held, start, self.each, aligned=aligned)

    def ids(self, tile: jax.Array) -> jax.Array:
        """The first id of each thread in a tile, of its first chunk."""
        return self.first + tile * TILE + self.threads.index() * self.each

    def at(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry per thread, from global memory; -inf where it is hidden."""
        entry = self.threads.gather(self.rows, row, token_id)
        if self.bitmask is not None:
            entry = jnp.where((self._bits(row, token_id) & 1) == 1, entry, -jnp.inf)
        if self.thresholds is not None:
            entry = jnp.where(entry < self.threads.gather(self.thresholds, row), -jnp.inf, entry)
        return entry


def _remainder(x: jax.Array, divisor: int) -> jax.Array:
    """``x % divisor`` of what is not negative."""
    if divisor & (divisor - 1) == 0:
        return x & (divisor - 1)
    return lax.rem(x, divisor)


def _quotient(x: jax.Array, divisor: int) -> jax.Array:
    if divisor & (divisor - 1) == 0:
        return lax.shift_right_logical(x, divisor.bit_length() - 1)
    return lax.div(x, divisor)


def _tiles(ids: jax.Array, most: int) -> jax.Array:
    return jnp.clip(lax.div(ids + TILE - 1, TILE), 0, most)
