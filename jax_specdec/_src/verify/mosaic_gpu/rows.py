"""A block's slice of target rows, in shared memory, and of draft rows, in global memory.

Or, in global memory, a row for each warp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.verify.mosaic_gpu.threads import COPIED, THREADS, Threads
from jax_specdec._src.verify.tiles import TILE

PIECES = 2
"""Pieces of a tile of a draft row, of eight ids per thread. Fewer would need more registers."""

Chunk: TypeAlias = list[jax.Array]
"""A list of float32 ``[128]``, one for each of the consecutive ids that a thread has."""

TileStep: TypeAlias = Callable[[jax.Array, list[jax.Array], Any], Any]
"""Takes a tile, entries of it that each thread has, and a state; returns the next state."""

PieceStep: TypeAlias = Callable[[jax.Array, int, jax.Array | int, list[Chunk], Any], Any]
"""Takes a tile, its index among those loaded at once, a piece of it, the chunks of the piece, and a
state; returns the next state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSlice:
    """A block's slice of target or draft rows: what both kinds have in common.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, columns]`` in global memory.
      per_slice: tiles of a slice; the last slices of a row may have fewer.
      first: ``[]`` int32, the first id of this block's slice.
      size: ids of a target row, without padding.
      each: consecutive ids per thread.
    """

    threads: Threads
    rows: Any
    per_slice: int
    first: jax.Array
    size: int
    each: int

    def count(self) -> jax.Array:
        """Tiles of this slice."""
        return _tiles(self.size - self.first + TILE - 1, self.per_slice)

    @property
    def entry_size(self) -> int:
        """Bytes of an entry."""
        return jnp.dtype(self.rows.dtype).itemsize

    @property
    def chunk(self) -> int:
        """Ids that all threads read at once."""
        return THREADS * self.each

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        """All entries of a tile, chunk by chunk."""
        raise NotImplementedError

    def of_tile(self, row: jax.Array, tile: jax.Array) -> list[jax.Array]:
        """All entries of a tile that each thread has."""
        return [x for chunk in self.chunks(row, tile) for x in chunk]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSlice(RowSlice):
    """A block's slice of target rows, which are copied to shared memory one after another.

    Ids that are padding, or that a mask forbids, and entries below the threshold read as -inf.

    Attributes, besides those of `RowSlice`:
      buffer: ref of shared memory, flat.
      barriers: mbarriers, which complete with the copies; in interpret mode `plgpu.Barrier`.
      stride: distance from one tile to the next in `buffer`.
      first_barrier: the barrier of the first tile.
      bitmask: ref ``[R, words]`` int32, bits of the ids that are allowed, or None.
      first_id: ``[]`` int32, the id of the first column of a part of the vocabulary, or None.
      end: ``[]`` int32, columns from it on are padding too, or None.
      threshold: ``[]`` float32, entries below it are hidden, or None.
    """

    buffer: Any
    barriers: Any
    stride: int
    first_barrier: Any
    bitmask: Any = None
    first_id: jax.Array | None = None
    end: jax.Array | None = None
    threshold: jax.Array | None = None

    # Copying.

    def copy(self, row: jax.Array) -> None:
        """Begin to copy the slice of a row. All threads must have read what it replaces."""
        self.threads.copy_tiles(
            self.rows,
            row,
            self.first,
            self.size,
            self.per_slice,
            self.buffer,
            self.stride,
            self.barriers,
            self.first_barrier,
        )

    def fill_end(self) -> None:
        """Fill the end of the last tile, which no copy reaches; once, before the first row."""
        if self._fills_once:
            last = self.count() - 1
            count = self.size - self.first - last * TILE
            pl.when((count < TILE) & (last >= 0))(lambda: self._fill(count, jnp.int32(0), last))

    @property
    def _fills_once(self) -> bool:
        """Whether copies and fill never overlap, so that one fill lasts for all rows."""
        units = self.size * self.entry_size % COPIED == 0 and self.end is None
        return units and self.stride == TILE and not self.threads.interpreted

    def ready(self, row: jax.Array, tile: jax.Array, rows_before: jax.Array) -> None:
        """Wait for a tile, then write -inf over forbidden ids and padding.

        Args:
          row: ``[]`` int32.
          tile: ``[]`` int32, of the slice.
          rows_before: ``[]`` int32, how many rows were copied before this one.
        """
        self.threads.wait(self.barriers, self.first_barrier + tile, rows_before & 1)
        if self.bitmask is not None:
            self._hide(row, tile, lambda i, _: self._forbidden(row, tile, i))
        if self.threshold is not None:
            self.hide_below(self.threshold, row, tile)
        if not self._fills_once:
            end = self.size if self.end is None else self.end
            count = jnp.clip(end - self.first - tile * TILE, 0, TILE)
            pl.when(count < TILE)(lambda: self._fill(count, row, tile))

    def copy_again(self, row: jax.Array, rows_before: jax.Array) -> None:
        """Copy the whole slice of a row, and wait for it."""
        self.copy(row)
        self.for_all(lambda tile: self.ready(row, tile, rows_before))

    def for_all(self, do: Callable[[jax.Array], None]) -> None:
        """Call `do` for every tile of the slice."""
        lax.fori_loop(0, self.count(), lambda tile, _: do(tile), None)

    def hide_below(self, threshold: jax.Array, row: jax.Array, tile: jax.Array) -> None:
        """Write -inf over the entries of a tile that are less than `threshold`."""
        self._hide(row, tile, lambda _, entries: [x < threshold for x in entries])

    def _hide(
        self, row: jax.Array, tile: jax.Array, hidden: Callable[[int, Chunk], list[jax.Array]]
    ) -> None:
        """Write -inf over entries; each thread writes to entries that no other thread reads."""
        nothing = self.threads.filled(-jnp.inf)
        begin = self.begin(row, tile)
        for i, offset in enumerate(self.offsets):
            first = begin + offset + self.threads.index * self.each
            for j, where in enumerate(hidden(i, self.entries(begin, offset))):
                self.threads.scatter(self.buffer, first + j, nothing, where)
        self.threads.fence_copies()

    def _forbidden(self, row: jax.Array, tile: jax.Array, chunk: int) -> list[jax.Array]:
        """Whether the bitmask forbids each of the ids that a thread has of a chunk."""
        ids = self.ids(tile) + chunk * self.chunk
        if self.first_id is None:
            bits = _bits(self.threads, self.bitmask, row, ids)
            return [(bits & (1 << j)) == 0 for j in range(self.each)]
        ids = self.first_id + ids
        return [x == 0 for x in _allowed(self.threads, self.bitmask, row, ids, self.each)]

    def _fill(self, count: jax.Array, row: jax.Array, tile: jax.Array) -> None:
        """Write -inf over the entries of a tile past `count`."""
        threads, begin = self.threads, self.begin(row, tile)

        def run(i: jax.Array, _: None) -> None:
            place = i * THREADS + threads.index
            threads.scatter(self.buffer, begin + place, threads.filled(-jnp.inf), place >= count)

        lax.fori_loop(lax.div(count, THREADS), TILE // THREADS, run, None)
        self.threads.fence_copies()
        self.threads.sync()

    # Reading.

    def fold(
        self, row: jax.Array, rows_before: jax.Array | None, step: TileStep, state: Any
    ) -> Any:
        """``state = step(tile, entries, state)`` for each tile of the slice.

        Waits for each tile, unless `rows_before` is None, for a row that has arrived.
        """

        def run(tile: jax.Array, state: Any) -> Any:
            if rows_before is not None:
                self.ready(row, tile, rows_before)
            return step(tile, self.of_tile(row, tile), state)

        return lax.fori_loop(0, self.count(), run, state)

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        begin = self.begin(row, tile)
        return [self.entries(begin, offset) for offset in self.offsets]

    def piece(self, row: jax.Array, tile: jax.Array, piece: jax.Array | int) -> list[Chunk]:
        """The chunks of a piece of a tile, as `DraftSlice` has pieces."""
        begin, first = self.begin(row, tile), piece * (TILE // PIECES)
        if not isinstance(first, int):
            begin, first = begin + first, 0
        offsets = range(first, first + TILE // PIECES, self.chunk)
        return [self.entries(begin, offset) for offset in offsets]

    def begin(self, row: jax.Array, tile: jax.Array) -> jax.Array:
        """Where a tile begins in `buffer`."""
        shift = 0 if self.stride == TILE else self.threads.copy_shift(self.rows, row)
        return tile * self.stride + shift

    @property
    def offsets(self) -> range:
        """Where the chunks of a tile begin, relative to `begin`."""
        return range(0, TILE, self.chunk)

    def entries(self, begin: jax.Array, offset: int) -> Chunk:
        """A chunk."""
        aligned = self.stride == TILE
        return self.threads.entries(self.buffer, begin, self.each, aligned=aligned, offset=offset)

    def ids(self, tile: jax.Array) -> jax.Array:
        """The first id of each thread in the first chunk of a tile."""
        return self.first + tile * TILE + self.threads.index * self.each

    def entry(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry per thread, from global memory; -inf if the bitmask forbids it."""
        entry = self.threads.gather(self.rows, row, token_id)
        if self.bitmask is not None:
            bits = _bits(self.threads, self.bitmask, row, token_id)
            entry = jnp.where((bits & 1) == 1, entry, -jnp.inf)
        return entry


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSlice(RowSlice):
    """A block's slice of draft rows, read from global memory each time.

    Ids that are padding read as `fill`, entries below the threshold as -inf.

    Attributes, besides those of `RowSlice`:
      draft_size: ids that the drafter could draw.
      fill: the entry of an id that the drafter could not draw.
      aligned: whether every row begins at a multiple of sixteen bytes.
      at_once: `together` for aligned rows.
      thresholds: ref ``[R]`` float32, the least entry of each row that was kept, or None.
    """

    draft_size: int
    fill: float
    aligned: bool
    at_once: int = 1
    thresholds: Any = None

    def full(self) -> jax.Array:
        """How many tiles, from the first on, have no padding."""
        return _tiles(self.draft_size - self.first, self.per_slice)

    @property
    def _is_whole(self) -> bool:
        """Whether rows are aligned, without padding, and as wide as target rows."""
        return self.aligned and self.rows.shape[1] == self.draft_size == self.size

    @property
    def together(self) -> int:
        """Tiles that a masked `fold` loads before it uses the first of them."""
        return self.at_once if self._is_whole else 1

    def prefetch(self, row: jax.Array) -> None:
        """Begin to fetch the slice of a row into the L2 cache."""
        self.threads.prefetch_tiles(self.rows, row, self.first, self.draft_size, self.per_slice)

    def fold(
        self, row: jax.Array, rows_before: jax.Array | None, step: TileStep, state: Any
    ) -> Any:
        """As of target rows, but nothing is waited for, and tiles come in pieces."""
        del rows_before
        return self.fold_pieces(
            row, lambda tile, _, __, chunks, state: step(tile, sum(chunks, []), state), state
        )

    def fold_pieces(
        self, row: jax.Array, step: PieceStep, state: Any, *, masked: bool = False
    ) -> Any:
        """``state = step(tile, place, piece, chunks, state)`` for each piece of the slice's tiles.

        A `masked` step must ignore everything past the end of the target row: it may be given tiles
        there that do not exist, with undefined entries.
        """

        def by_group(group: jax.Array, state: Any) -> Any:
            pieces = [
                (group * count + i, i, piece) for i in range(count) for piece in range(PIECES)
            ]
            words = [self._words(row, tile, piece, is_full=True) for tile, _, piece in pieces]
            for (tile, place, piece), of_piece in zip(pieces, words, strict=True):
                numbers = self._numbers(row, tile, piece, of_piece, is_full=True)
                state = step(tile, place, piece, numbers, state)
            return state

        def by_piece(tile: jax.Array, state: Any) -> Any:
            def run(i: jax.Array, state: Any) -> Any:
                words = self._words(row, tile, i, is_full=False)
                return step(tile, 0, i, self._numbers(row, tile, i, words, is_full=False), state)

            return lax.fori_loop(0, PIECES, run, state)

        masked &= self._is_whole
        full, count = (self.count(), self.together) if masked else (self.full(), 1)
        state = lax.fori_loop(0, lax.div(full + count - 1, count), by_group, state)
        return lax.fori_loop(full, self.count(), by_piece, state)

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        loaded = [self._words(row, tile, i, is_full=False) for i in range(PIECES)]
        pieces = [self._numbers(row, tile, i, x, is_full=False) for i, x in enumerate(loaded)]
        return [chunk for chunks in pieces for chunk in chunks]

    def _first(self, tile: jax.Array, piece: jax.Array | int) -> jax.Array:
        """The first id of each thread in the first chunk of a piece."""
        begin = tile * TILE + piece * (TILE // PIECES)
        return self.first + begin + self.threads.index * self.each

    @property
    def _offsets(self) -> range:
        """Where the chunks of a piece begin."""
        return range(0, TILE // PIECES, self.chunk)

    def _words(
        self, row: jax.Array, tile: jax.Array, piece: jax.Array | int, *, is_full: bool
    ) -> list[list[jax.Array]]:
        """Load the chunks of a piece: as words, or as entries if rows are not aligned.

        Entries outside of the row are undefined; `is_full` if there are none.
        """
        threads, rows, first = self.threads, self.rows, self._first(tile, piece)
        row, last = row + jnp.zeros_like(first), rows.shape[1] - 1
        if self.aligned:
            firsts = [jnp.minimum(first + i, last + 1 - self.each) for i in self._offsets]
            return [threads.row_words(rows, row, x, self.each) for x in firsts]
        if is_full:
            return [threads.row_run(rows, row, first, i, self.each) for i in self._offsets]
        return [
            [threads.gather(rows, row, jnp.minimum(first + i + j, last)) for j in range(self.each)]
            for i in self._offsets
        ]

    def _numbers(
        self,
        row: jax.Array,
        tile: jax.Array,
        piece: jax.Array | int,
        words: list[list[jax.Array]],
        *,
        is_full: bool,
    ) -> list[Chunk]:
        """The chunks of a piece as numbers; `is_full` if it has no padding."""
        first, chunks = self._first(tile, piece), words
        row = row + jnp.zeros_like(first)
        if self.aligned:
            chunks = [self.threads.numbers(of_chunk, self.rows.dtype) for of_chunk in words]
        if not is_full:
            chunks = [
                [
                    jnp.where(first < self.draft_size - i - j, x, self.fill)
                    for j, x in enumerate(chunk)
                ]
                for i, chunk in zip(self._offsets, chunks, strict=True)
            ]
        if self.thresholds is not None:
            threshold = self.threads.gather(self.thresholds, row)
            chunks = [[jnp.where(x < threshold, -jnp.inf, x) for x in chunk] for chunk in chunks]
        return chunks

    def entry(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry per thread; -inf if it is below the threshold."""
        entry = self.threads.gather(self.rows, row, token_id)
        if self.thresholds is not None:
            threshold = self.threads.gather(self.thresholds, row)
            entry = jnp.where(entry < threshold, -jnp.inf, entry)
        return entry


@dataclasses.dataclass(frozen=True)
class WarpRow:
    """A row for each warp, in global memory, read by id: all of a row, or a part with a first id.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, columns]``.
      row: ``[128]`` int32, in range.
      each: consecutive ids per thread; if not 1, aligned pieces of every row.
      first: ``[]`` int32, the id of the first column.
      size: ids from it on are padding.
      fill: the entry of padding, and of ids that are not here.
      threshold: ``[128]`` float32, entries below it read as -inf; None for none.
      bitmask: ref ``[R, words]`` int32, forbidden ids read as -inf; None for none.
      columns: ref ``[size]`` int32, the column of each id; None if columns are in order.
    """

    threads: Threads
    rows: Any
    row: jax.Array
    each: int
    first: jax.Array
    size: int
    fill: float
    threshold: jax.Array | None = None
    bitmask: Any = None
    columns: Any = None

    def entries(self, ids: jax.Array) -> Chunk:
        """Entries of the ids from `ids` on, multiples of `each`."""
        threads, width, found = self.threads, self.rows.shape[1], list[jax.Array]()
        if self.columns is None:
            start, end = ids - self.first, jnp.clip(self.size - self.first, 0, width)
            inside = jnp.clip(start, 0, width - self.each)
            place = jnp.where(start < 0, width, start)
            found = threads.row_entries(self.rows, self.row, inside, self.each)
            found = [jnp.where(place < end - j, x, self.fill) for j, x in enumerate(found)]
        else:
            for j in range(self.each):
                column = threads.gather(self.columns, jnp.minimum(ids + j, self.size - 1))
                entry = threads.gather(self.rows, self.row, jnp.minimum(column, width - 1))
                found.append(jnp.where(column < width, entry, self.fill))
        if self.threshold is not None:
            found = [jnp.where(x < self.threshold, -jnp.inf, x) for x in found]
        if self.bitmask is None:
            return found
        allowed = _allowed(threads, self.bitmask, self.row, ids, self.each)
        return [
            jnp.where(is_set != 0, x, -jnp.inf) for is_set, x in zip(allowed, found, strict=True)
        ]


def words_of(token_bitmask: jax.Array | None) -> jax.Array | None:
    """A bitmask as the kernels read it: ``[R, words]`` int32."""
    if token_bitmask is None:
        return None
    return lax.bitcast_convert_type(token_bitmask, jnp.int32)


def _bits(threads: Threads, bitmask: Any, row: jax.Array, ids: jax.Array) -> jax.Array:
    """The bits of a bitmask from `ids` on, as far as their word goes."""
    word = jnp.minimum(lax.shift_right_logical(ids, 5), bitmask.shape[1] - 1)
    words = threads.gather(bitmask, row + jnp.zeros_like(ids), word)
    return lax.shift_right_logical(words, ids & 31)


def _allowed(
    threads: Threads, bitmask: Any, row: jax.Array, ids: jax.Array, each: int
) -> list[jax.Array]:
    """Not 0 for those of `each` ids from `ids` on that are allowed.

    Two ids may be in different words: a part may begin anywhere if its rows are not aligned.
    """
    if each > 2:
        bits = _bits(threads, bitmask, row, ids)
        return [bits & (1 << j) for j in range(each)]
    return [_bits(threads, bitmask, row, ids + j) & 1 for j in range(each)]


def _tiles(ids: jax.Array, most: int) -> jax.Array:
    return jnp.clip(lax.div(ids, TILE), 0, most)
