"""A CTA's slice of target rows, in shared memory, and of draft rows, in global memory.

How a row is cut, from the largest to the smallest:

- a slice for each CTA of the cluster: `per_slice` whole tiles;
- a tile: 2048 ids, the unit of a copy and of a draw;
- a piece of a draft row's tile: half of it, the most that a thread loads before it uses any of it;
- a chunk: the ids that the 128 threads of a warpgroup read at once, `each` consecutive ones per
  thread: 1024 ids if `each` is 8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.mosaic.threads import COPIED, THREADS, Ref, RowTiles, Threads
from jax_specdec._src.rows.tiles import TILE

PIECES = 2
"""Pieces of a tile of a draft row, of eight ids per thread. Fewer would need more registers."""

Chunk: TypeAlias = list[jax.Array]
"""A list of float32 ``[128]``, one for each of the consecutive ids that a thread has."""

TileStep: TypeAlias = Callable[[jax.Array, list[jax.Array], Any], Any]
"""Takes a tile, entries of it that each thread has, and a state; returns the next state."""

PieceStep: TypeAlias = Callable[[jax.Array, int, jax.Array | int, list[Chunk], Any], Any]
"""Takes a tile, its index among those loaded at once, a piece of it, the chunks of the piece, and a
state; returns the next state."""


# Which entries of a row are hidden: they read as -inf.


class Limit(Protocol):
    """Hides some entries of a row."""

    def hidden(
        self, target: TargetSlice, row: jax.Array, tile: jax.Array, chunk: int, entries: Chunk
    ) -> list[jax.Array]:
        """Returns which entries of a chunk of a tile in shared memory are hidden, a bool each."""

    def cut(self, threads: Threads, row: jax.Array, ids: jax.Array, entries: Chunk) -> Chunk:
        """Returns the entries of the ids from `ids` on, -inf where they are hidden."""


class Below(NamedTuple):
    """Hides entries that are less than a threshold."""

    threshold: jax.Array  # [] or [128] float32

    def hidden(
        self, target: TargetSlice, row: jax.Array, tile: jax.Array, chunk: int, entries: Chunk
    ) -> list[jax.Array]:
        """Returns which entries are less than the threshold."""
        return [x < self.threshold for x in entries]

    def cut(self, threads: Threads, row: jax.Array, ids: jax.Array, entries: Chunk) -> Chunk:
        """Returns the entries, -inf where they are less than the threshold."""
        return [jnp.where(x < self.threshold, -jnp.inf, x) for x in entries]


class Forbidden(NamedTuple):
    """Hides ids that a bitmask does not allow.

    The ids of a thread are in one word, since words have 32 bits and a thread begins at a multiple
    of its ids.
    """

    words: Ref  # ref [R, words] int32

    def hidden(
        self, target: TargetSlice, row: jax.Array, tile: jax.Array, chunk: int, entries: Chunk
    ) -> list[jax.Array]:
        """Returns which ids the bitmask forbids."""
        # [128]: the bit of a thread's first id is the lowest
        bits = _bits(target.threads, self.words, row, target.ids(tile) + chunk * target.chunk)
        return [(bits & (1 << j)) == 0 for j in range(len(entries))]

    def cut(self, threads: Threads, row: jax.Array, ids: jax.Array, entries: Chunk) -> Chunk:
        """Returns the entries, -inf where the bitmask forbids the id."""
        bits = _bits(threads, self.words, row, ids)
        return [
            jnp.where((bits & (1 << j)) == (1 << j), x, -jnp.inf) for j, x in enumerate(entries)
        ]


def _bits(threads: Threads, words: Ref, row: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the bits of a bitmask from `ids` on, as far as their word goes."""
    # Padding past the last id may have no word.
    word = jnp.minimum(lax.shift_right_logical(ids, 5), words.shape[1] - 1)
    found = threads.gather(words, row + jnp.zeros_like(ids), word)
    return lax.shift_right_logical(found, ids & 31)


def words_of(token_bitmask: jax.Array) -> jax.Array:
    """Returns a bitmask as the kernels read it: ``[R, words]`` int32."""
    return lax.bitcast_convert_type(token_bitmask, jnp.int32)


def limits_of(thresholds: Ref | None, threads: Threads, row: jax.Array) -> tuple[Below, ...]:
    """Returns what hides entries of the draft row that each thread reads.

    Args:
      thresholds: ref ``[R]`` float32, the least entry that the drafter's filter kept; None: it kept
        all of them.
      threads: the operations of the warpgroup.
      row: ``[128]`` int32.
    """
    return () if thresholds is None else (Below(threads.gather(thresholds, row)),)


# Slices.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSlice:
    """A CTA's slice of target or draft rows: what both kinds have in common."""

    threads: Threads  # the operations of the warpgroup
    matrix: Ref  # ref [R, columns] in global memory
    per_slice: int  # tiles of a slice; the last slices of a row may have fewer
    first: jax.Array  # [] int32, the first id of this CTA's slice
    size: int  # ids of a target row, without padding
    each: int  # consecutive ids per thread

    def count(self) -> jax.Array:
        """Returns how many tiles this slice has."""
        return _whole_tiles(self.size - self.first + TILE - 1, self.per_slice)

    @property
    def entry_size(self) -> int:
        """Returns the bytes of an entry."""
        return jnp.dtype(self.matrix.dtype).itemsize

    @property
    def chunk(self) -> int:
        """Returns how many ids all threads read at once."""
        return THREADS * self.each

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        """Returns all entries of a tile, chunk by chunk."""
        raise NotImplementedError

    def of_tile(self, row: jax.Array, tile: jax.Array) -> list[jax.Array]:
        """Returns all entries of a tile that each thread has, 16 of them."""
        return [x for chunk in self.chunks(row, tile) for x in chunk]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSlice(RowSlice):
    """A CTA's slice of target rows, which are copied to shared memory one after another.

    Ids that are padding, and entries that a limit hides, read as -inf: once a tile has arrived,
    -inf is written over them.
    """

    buffer: Ref  # ref of shared memory, flat
    barriers: Ref  # mbarriers, which complete with the copies; in interpret mode `plgpu.Barrier`
    # Distance from one tile to the next in `buffer`. Where rows are not aligned, copies begin a
    # little early, and tiles lie a little apart.
    stride: int
    first_barrier: jax.Array | int  # the barrier of the first tile; the next tiles have the next
    limits: tuple[Limit, ...]  # what hides entries of every row

    # Copying.

    def copy(self, row: jax.Array) -> None:
        """Begins to copy the slice of a row. All threads must have read what it replaces."""
        # Nothing says here that they have: an exchange comes between, which waits for all warps.
        tiles = RowTiles(self.matrix, row, self.first, self.size, self.per_slice)
        self.threads.copy_tiles(tiles, self.buffer, self.stride, self.barriers, self.first_barrier)

    def fill_end(self) -> None:
        """Fills the end of the last tile, which no copy reaches; once, before the first row."""
        if self._fills_once:
            # Only the CTA that has the row's last tile writes, and only if that is not full.
            last = self.count() - 1
            count = self.size - self.first - last * TILE
            pl.when((count < TILE) & (last >= 0))(lambda: self._fill(count, jnp.int32(0), last))

    @property
    def _fills_once(self) -> bool:
        """Returns whether copies and fill never overlap, so that one fill lasts for all rows."""
        # A copy of whole units would overwrite what was filled in the last unit of a row that ends
        # within one. In interpret mode a copy overwrites the whole tile.
        ends_with_a_unit = self.size * self.entry_size % COPIED == 0
        return ends_with_a_unit and self.stride == TILE and not self.threads.interpreted

    def ready(self, row: jax.Array, tile: jax.Array, rows_before: jax.Array) -> None:
        """Waits for a tile, then writes -inf over what is hidden and over padding.

        Args:
          row: ``[]`` int32.
          tile: ``[]`` int32, of the slice.
          rows_before: ``[]`` int32, how many rows were copied before this one. Each has completed a
            phase of every barrier: the parity of this row's is that of their number.
        """
        self.threads.wait(self.barriers, self.first_barrier + tile, rows_before & 1)
        # What is hidden is written over where it lies, so that all who read the row find it so.
        for limit in self.limits:
            self.hide(limit, row, tile)
        if not self._fills_once:  # count: entries of this tile that are not padding
            count = jnp.clip(self.size - self.first - tile * TILE, 0, TILE)
            pl.when(count < TILE)(lambda: self._fill(count, row, tile))

    def copy_again(self, row: jax.Array, rows_before: jax.Array) -> None:
        """Copies the whole slice of a row, and waits for it."""
        self.copy(row)
        self.for_all(lambda tile: self.ready(row, tile, rows_before))

    def for_all(self, do: Callable[[jax.Array], None]) -> None:
        """Calls `do` for every tile of the slice."""
        lax.fori_loop(0, self.count(), lambda tile, _: do(tile), None)

    def hide(self, limit: Limit, row: jax.Array, tile: jax.Array) -> None:
        """Writes -inf over the entries of a tile that a limit hides.

        Each thread writes to entries that no other thread reads, so nobody has to wait.
        """
        nothing = self.threads.filled(-jnp.inf)
        begin = self.begin(row, tile)
        # One chunk after another; a thread stores only where something is hidden.
        for i, offset in enumerate(self.offsets):
            first = begin + offset + self.threads.index * self.each
            hidden = limit.hidden(self, row, tile, i, self.entries(begin, offset))
            for j, where in enumerate(hidden):
                self.threads.scatter(self.buffer, first + j, nothing, where)
        # The next row's copy must not overtake these writes.
        self.threads.fence_copies()

    def _fill(self, count: jax.Array, row: jax.Array, tile: jax.Array) -> None:
        """Writes -inf over the entries of a tile past `count`."""
        threads = self.threads
        begin = self.begin(row, tile)

        # From the 128 entries that hold the first one past the end to the end of the tile.
        def run(i: jax.Array, _: None) -> None:
            place = i * THREADS + threads.index
            threads.scatter(self.buffer, begin + place, threads.filled(-jnp.inf), place >= count)

        lax.fori_loop(lax.div(count, THREADS), TILE // THREADS, run, None)
        threads.fence_copies()
        threads.sync()  # threads read what others have written

    # Reading.

    def fold(
        self, row: jax.Array, rows_before: jax.Array | None, step: TileStep, state: Any
    ) -> Any:
        """Returns the last of ``state = step(tile, entries, state)`` over the tiles of the slice.

        Waits for each tile, unless `rows_before` is None, for a row that has arrived.
        """

        def run(tile: jax.Array, state: Any) -> Any:
            if rows_before is not None:  # the first to read it: tiles arrive one after another
                self.ready(row, tile, rows_before)
            return step(tile, self.of_tile(row, tile), state)

        return lax.fori_loop(0, self.count(), run, state)

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        begin = self.begin(row, tile)
        return [self.entries(begin, offset) for offset in self.offsets]

    def piece(self, row: jax.Array, tile: jax.Array, piece: jax.Array | int) -> list[Chunk]:
        """Returns the chunks of a piece of a tile, as `DraftSlice` has pieces."""
        begin = self.begin(row, tile)
        first = piece * (TILE // PIECES)
        if not isinstance(first, int):
            # An offset is part of the instruction, so a piece that is known only on the GPU
            # moves the beginning instead.
            begin = begin + first
            first = 0
        offsets = range(first, first + TILE // PIECES, self.chunk)
        return [self.entries(begin, offset) for offset in offsets]

    def place_of(
        self, row: jax.Array, token_id: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns where the entry of an id is in `buffer`, its tile, and whether it is here.

        Where it is not, the place is that of the slice's first id.
        """
        # [128]: where in the slice the id is, if it is there
        offset = token_id - self.first
        is_here = (offset >= 0) & (offset < self.per_slice * TILE)
        offset = jnp.where(is_here, offset, 0)
        tile = lax.div(offset, TILE)
        return self.begin(row, tile) + lax.rem(offset, TILE), tile, is_here

    def begin(self, row: jax.Array, tile: jax.Array) -> jax.Array:
        """Returns where a tile begins in `buffer`."""
        # An unaligned copy has up to fifteen bytes before the first entry.
        shift: jax.Array | int = 0
        if self.stride != TILE:
            shift = self.threads.copy_shift(self.matrix, row)
        return tile * self.stride + shift

    @property
    def offsets(self) -> range:
        """Returns where the chunks of a tile begin, relative to `begin`."""
        return range(0, TILE, self.chunk)

    def entries(self, begin: jax.Array, offset: int) -> Chunk:
        """Returns a chunk."""
        aligned = self.stride == TILE
        return self.threads.entries(self.buffer, begin, self.each, aligned=aligned, offset=offset)

    def ids(self, tile: jax.Array) -> jax.Array:
        """Returns the first id of each thread in the first chunk of a tile."""
        return self.first + tile * TILE + self.threads.index * self.each

    def entry(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """Returns one entry per thread, from global memory; -inf if it is hidden."""
        entries = [self.threads.gather(self.matrix, row, token_id)]
        for limit in self.limits:
            entries = limit.cut(self.threads, row, token_id, entries)
        return entries[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSlice(RowSlice):
    """A CTA's slice of draft rows, read from global memory each time.

    Ids that are padding read as `fill`, entries below the threshold as -inf.
    """

    draft_size: int  # ids that the drafter could draw
    fill: float  # the entry of an id that the drafter could not draw
    aligned: bool  # whether every row begins at a multiple of sixteen bytes
    at_once: int  # `together` for aligned rows
    thresholds: Ref | None  # ref [R] float32; see `limits_of`

    @property
    def by_column(self) -> DraftSlice:
        """Returns the slice in the order of columns, which is that of ids here."""
        return self

    def full(self) -> jax.Array:
        """Returns how many tiles, from the first on, have no padding."""
        return _whole_tiles(self.draft_size - self.first, self.per_slice)

    @property
    def _is_whole(self) -> bool:
        """Returns whether rows are aligned, without padding, and as wide as target rows."""
        return self.aligned and self.matrix.shape[1] == self.draft_size == self.size

    @property
    def together(self) -> int:
        """Returns how many tiles a masked `fold` loads before it uses the first of them."""
        return self.at_once if self._is_whole else 1

    def prefetch(self, row: jax.Array) -> None:
        """Begins to fetch the slice of a row into the L2 cache."""
        tiles = RowTiles(self.matrix, row, self.first, self.draft_size, self.per_slice)
        self.threads.prefetch_tiles(tiles)

    def fold(
        self, row: jax.Array, rows_before: jax.Array | None, step: TileStep, state: Any
    ) -> Any:
        """Returns what `TargetSlice.fold` does; nothing is waited for, and tiles come in pieces."""
        del rows_before

        def by_tile(
            tile: jax.Array, _: int, __: jax.Array | int, chunks: list[Chunk], state: Any
        ) -> Any:
            return step(tile, sum(chunks, []), state)  # the entries of all chunks of the piece

        return self.fold_pieces(row, by_tile, state)

    def fold_pieces(
        self, row: jax.Array, step: PieceStep, state: Any, *, masked: bool = False
    ) -> Any:
        """Returns the last of ``state = step(tile, place, piece, chunks, state)`` over all pieces.

        A `masked` step must ignore everything past the end of the target row: it may be given tiles
        there that do not exist, with undefined entries.
        """
        # Tiles without padding come first, in groups; where padding does not matter, all do.
        masked &= self._is_whole
        full = self.count() if masked else self.full()
        count = self.together if masked else 1

        def by_group(group: jax.Array, state: Any) -> Any:
            # All loads of `count` tiles begin before the first of them is used. A piece is a tile,
            # its index in the group, and which half of the tile.
            pieces = [
                (group * count + i, i, piece) for i in range(count) for piece in range(PIECES)
            ]
            words = [self._words(row, tile, piece, is_full=True) for tile, _, piece in pieces]
            for (tile, place, piece), of_piece in zip(pieces, words, strict=True):
                numbers = self._numbers(row, tile, piece, of_piece, is_full=True)
                state = step(tile, place, piece, numbers, state)
            return state

        def by_piece(tile: jax.Array, state: Any) -> Any:
            # The last tiles have padding. A loop, so that their code is there once.
            def run(i: jax.Array, state: Any) -> Any:
                words = self._words(row, tile, i, is_full=False)
                return step(tile, 0, i, self._numbers(row, tile, i, words, is_full=False), state)

            return lax.fori_loop(0, PIECES, run, state)

        # Whole groups, then the tiles at the end.
        state = lax.fori_loop(0, lax.div(full + count - 1, count), by_group, state)
        return lax.fori_loop(full, self.count(), by_piece, state)

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        # Both halves are in flight at once: the draw reads one tile, and waits for it.
        loaded = [self._words(row, tile, i, is_full=False) for i in range(PIECES)]
        pieces = [self._numbers(row, tile, i, x, is_full=False) for i, x in enumerate(loaded)]
        return [chunk for chunks in pieces for chunk in chunks]

    def _first(self, tile: jax.Array, piece: jax.Array | int) -> jax.Array:
        """Returns the first id of each thread in the first chunk of a piece."""
        begin = tile * TILE + piece * (TILE // PIECES)
        return self.first + begin + self.threads.index * self.each

    @property
    def _offsets(self) -> range:
        """Returns where the chunks of a piece begin."""
        return range(0, TILE // PIECES, self.chunk)

    def _words(
        self, row: jax.Array, tile: jax.Array, piece: jax.Array | int, *, is_full: bool
    ) -> list[list[jax.Array]]:
        """Loads the chunks of a piece: as words, or as entries if rows are not aligned.

        Two or four bytes of a word are turned into numbers later, by `_numbers`: until then they
        take half of the registers, and a thread waits for all loads once.

        Entries outside of the row are undefined; `is_full` if there are none.
        """
        threads = self.threads
        first = self._first(tile, piece)
        row = row + jnp.zeros_like(first)  # [128], as the indices of a load must be
        last = self.matrix.shape[1] - 1
        # [chunks, words or entries, 128]. Aligned: a vector load for each chunk, kept in the row.
        if self.aligned:
            firsts = [jnp.minimum(first + i, last + 1 - self.each) for i in self._offsets]
            return [threads.row_words(self.matrix, row, x, self.each) for x in firsts]
        if is_full:  # at any address, one entry at a time
            return [threads.row_run(self.matrix, row, first, i, self.each) for i in self._offsets]
        # Each entry at its own address, kept in the row.
        return [
            [
                threads.gather(self.matrix, row, jnp.minimum(first + i + j, last))
                for j in range(self.each)
            ]
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
        """Returns the chunks of a piece as numbers; `is_full` if it has no padding."""
        first = self._first(tile, piece)
        row = row + jnp.zeros_like(first)
        # [chunks, each, 128]
        chunks = words
        if self.aligned:
            chunks = [self.threads.numbers(of_chunk, self.matrix.dtype) for of_chunk in words]
        if not is_full:
            # The id of entry j of the chunk at offset i is first + i + j.
            chunks = [
                [
                    jnp.where(first < self.draft_size - i - j, x, self.fill)
                    for j, x in enumerate(chunk)
                ]
                for i, chunk in zip(self._offsets, chunks, strict=True)
            ]
        for limit in limits_of(self.thresholds, self.threads, row):
            chunks = [limit.cut(self.threads, row, first, chunk) for chunk in chunks]
        return chunks

    def entry(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """Returns one entry per thread; -inf if it is below the threshold."""
        entries = [self.threads.gather(self.matrix, row, token_id)]
        for limit in limits_of(self.thresholds, self.threads, row):
            entries = limit.cut(self.threads, row, token_id, entries)
        return entries[0]


class NoDraftRows(NamedTuple):
    """Stands for draft rows where a call has none: every draft is one-hot."""

    def prefetch(self, row: jax.Array) -> None:
        """Does nothing."""


def _whole_tiles(ids: jax.Array, most: int) -> jax.Array:
    """Returns how many whole tiles `ids` ids make, between 0 and `most`."""
    return jnp.clip(lax.div(ids, TILE), 0, most)
