"""Draft rows on a list of ids.

Rows that share a map are read in the order of ids, by the column of each. Rows that list a few
candidates of their own are read whole: by each warp, or a candidate by each thread.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.mosaic.threads import THREADS, WARP, Ref, Threads
from jax_specdec._src.rows.tiles import TILE, num_tiles
from jax_specdec._src.verify.mosaic_gpu.cluster import tree_max, tree_sum
from jax_specdec._src.verify.mosaic_gpu.plan import MAX_MAPPED
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, DraftSlice, limits_of
from jax_specdec._src.verify.mosaic_gpu.statistics import GivenProbability, Probability, base_of

NOT_LISTED = MAX_MAPPED
"""The column of an id that a map does not list: 0xffff, which is also the mask of half a word."""


def columns_of_map(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns a map of ids turned round: the column of each id.

    Args:
      ids: ``[Vd]`` int32, at most `MAX_MAPPED`.
      size: ids that count.

    Returns:
      ``[1, W]`` int32, words of two columns each, of all ids of whole tiles in order; and ``[1]``
      int32, 1 if an id is out of range or there twice.
    """
    own = jnp.arange(ids.shape[0], dtype=jnp.uint16)
    columns = jnp.full((num_tiles(size) * TILE,), NOT_LISTED, jnp.uint16)
    index = jnp.where((ids < 0) | (ids >= size), columns.shape[0], ids)  # which is dropped
    columns = columns.at[index].set(own, mode="drop")
    # Of an id that is there twice, one of the columns finds the other in its place.
    found = columns.at[index].get(mode="fill", fill_value=NOT_LISTED)
    place = jnp.where(found == own, 1, 0)
    is_bad = jnp.zeros((1,), jnp.int32).at[place].set(1, mode="drop")  # a sum: two launches
    # [W, 2] uint16 -> [1, W] int32, the first of two columns in the lower half.
    words = lax.bitcast_convert_type(columns.reshape(-1, 2), jnp.int32)
    return words[None], is_bad


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedSlice(DraftSlice):
    """A CTA's slice of draft rows that share a map of ids: in the order of ids."""

    columns: Ref  # ref [1, W] int32, the column of each id; see `columns_of_map`
    storage: DraftSlice  # a CTA's slice of the rows as they are stored, in the order of columns

    @property
    def by_column(self) -> DraftSlice:
        """Returns the slice in the order of columns: a sum needs no ids."""
        return self.storage

    def prefetch(self, row: jax.Array) -> None:
        """Begins to fetch the slice of a row into the L2 cache."""
        self.storage.prefetch(row)

    def column(self, token_id: jax.Array) -> jax.Array:
        """Returns the column of one id per thread."""
        word = self.threads.gather(self.columns, jnp.zeros_like(token_id), token_id >> 1)
        # Odd ids are in the upper half.
        return lax.shift_right_logical(word, (token_id & 1) << 4) & NOT_LISTED

    def entry_in(self, row: jax.Array, column: jax.Array) -> jax.Array:
        """Returns the entry in one column per thread; `fill` for an id that is not listed."""
        # [128]: a column past the last reads the last, and gives `fill`.
        last = self.matrix.shape[1] - 1
        entry = self.entry(row, jnp.minimum(column, last))
        return jnp.where(column <= last, entry, self.fill)

    def _words(
        self, row: jax.Array, tile: jax.Array, piece: jax.Array | int, *, is_full: bool
    ) -> list[list[jax.Array]]:
        """Loads the chunks of a piece as entries: first the columns of their ids, then those."""
        threads = self.threads
        first = self._first(tile, piece)
        last = self.matrix.shape[1] - 1
        row = row + jnp.zeros_like(first)
        zero = jnp.zeros_like(first)
        found = []
        for offset in self._offsets:
            # Two columns of a word: those of `each` ids are each / 2 words.
            begin = lax.shift_right_logical(first + offset, 1)
            words = threads.row_words(self.columns, zero, begin, self.each // 2)
            columns = [half for x in words for half in (x & NOT_LISTED, _upper_half(x))]
            entries = [threads.gather(self.matrix, row, jnp.minimum(x, last)) for x in columns]
            listed = zip(columns, entries, strict=True)
            found.append([jnp.where(column <= last, x, self.fill) for column, x in listed])
        return found


def _upper_half(word: jax.Array) -> jax.Array:
    return lax.shift_right_logical(word, 16)


class LaneCandidates(NamedTuple):
    """Candidates of a row, by lane of a warp: lane i has candidates i, 32 + i, and so on."""

    # Int32 [128] each; those past the last candidate are negative, no two the same.
    ids: list[jax.Array]
    entries: list[jax.Array]  # float32 [128] each, likewise -inf; 0 of probabilities


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateRows:
    """Draft rows of at most a candidate for each thread of a warpgroup, in global memory."""

    threads: Threads  # the operations of the warpgroup
    matrix: Ref  # ref [R, C]
    ids: Ref  # ref [R, C] int32, what the entries of `matrix` stand for
    first: jax.Array  # [] int32, the first id of this CTA's slice of the target row
    size: int  # ids of the target row that count
    fill: float  # the entry of an id that is not listed
    each: int  # consecutive ids per thread of a target row
    sums: bool  # whether a row must be summed to normalize it
    thresholds: Ref | None  # ref [R] float32; see `rows.limits_of`
    # From an entry of a row to its probability. Only that of the row that is drawn from is needed,
    # and set there; until then, it stands for none.
    q: Probability = GivenProbability()

    def prefetch(self, row: jax.Array) -> None:
        """Does nothing: a row is small, and was loaded when the drafted token was looked for."""

    # A row as it is listed.

    def load(self, row: jax.Array) -> LaneCandidates:
        """Begins to load a row, by each warp."""
        ids = list[jax.Array]()
        entries = list[jax.Array]()
        for column in self._columns():
            of_column, entry = self._at(row, column)
            ids.append(of_column)
            entries.append(entry)
        return LaneCandidates(ids=ids, entries=entries)

    def _at(self, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns id and entry in one column per thread."""
        last = self.matrix.shape[1] - 1
        row = row + jnp.zeros_like(column)
        inside = jnp.minimum(column, last)
        ids = self.threads.gather(self.ids, row, inside)
        entries = [self.threads.gather(self.matrix, row, inside)]
        for limit in limits_of(self.thresholds, self.threads, row):
            entries = limit.cut(self.threads, row, ids, entries)
        # Lanes past the last candidate have none.
        is_there = column <= last
        # -1 - column: negative, and another one in each column.
        ids = jnp.where(is_there, ids, -1 - column)
        return ids, jnp.where(is_there, entries[0], self.fill)

    def is_bad(self, listed: LaneCandidates) -> jax.Array:
        """Returns 1 if an id is out of range or there twice, the same in all threads of a warp."""
        threads = self.threads
        bad = threads.filled(0, jnp.int32) != 0
        for column, ids in zip(self._columns(), listed.ids, strict=True):
            is_there = column < self.matrix.shape[1]
            is_outside = is_there & ((ids < 0) | (ids >= self.size))
            bad |= is_outside | threads.has_twin(ids)  # a twin in the same array

        # Twins in two arrays: each lane sees every lane of the other once, in 32 turns.
        def turn(by: jax.Array, twins: jax.Array) -> jax.Array:
            for i, ids in enumerate(listed.ids):
                for others in listed.ids[:i]:
                    same = threads.shuffle(others, by, "bfly") == ids
                    twins = twins | same.astype(jnp.int32)
            return twins

        if len(listed.ids) > 1:
            none = threads.filled(0, jnp.int32)
            bad |= lax.fori_loop(jnp.int32(0), jnp.int32(WARP), turn, none) != 0
        return -threads.warp_min(-bad.astype(jnp.int32))  # the maximum over the warp

    def entry_of(self, listed: LaneCandidates, token_id: jax.Array) -> jax.Array:
        """Returns the entry of an id, `fill` where it is not listed."""
        column = self.threads.filled(TILE, jnp.int32)  # which no column is
        for ids, mine in zip(listed.ids, self._columns(), strict=True):
            column = jnp.where(ids == token_id, mine, column)
        # Of each lane's column the least: that of the warp.
        column = self.threads.warp_min(column)
        return jnp.where(column < TILE, self._take(listed.entries, column), self.fill)

    def peak_and_log(
        self, listed: LaneCandidates, factor: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the largest entry, and log2 of the mass relative to it."""
        # [128], the same in all threads of a warp
        peak = self.threads.warp_max(tree_max(listed.entries))
        base = base_of(peak)
        weights = [jnp.exp2((x - base) * factor) for x in listed.entries]
        return peak, jnp.log2(self.threads.warp_sum(tree_sum(weights)))

    # A row as it is drawn from.

    def q_by_thread(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns each thread's candidate: its id, negative where there is none, and ``q``."""
        ids, entry = self._at(row, self.threads.index)
        return ids, self.q.of(entry)

    def q_of_tile(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        """Returns ``q`` of all ids that each thread has of a tile, 0 of those not listed.

        Each candidate that lies in the tile is handed to the thread that has its id, one after
        another: few are in one tile.
        """
        threads = self.threads
        listed = self.load(row)
        # [128] each: where in the tile each candidate lies, if it does, and its q
        places = [ids - (self.first + tile * TILE) for ids in listed.ids]
        q = [self.q.of(entries) for entries in listed.entries]
        own = threads.index * self.each

        def following(column: jax.Array) -> jax.Array:
            """Returns the next column whose id is in the tile, or `TILE`, which no column is."""
            least = threads.filled(TILE, jnp.int32)
            for place, mine in zip(places, self._columns(), strict=True):
                is_next = (place >= 0) & (place < TILE) & (mine > column)
                least = jnp.where(is_next, jnp.minimum(least, mine), least)
            return threads.scalar(threads.warp_min(least))

        def put(state: tuple[jax.Array, list[Chunk]]) -> tuple[jax.Array, list[Chunk]]:
            column, chunks = state
            # Relative to each thread's first id; the chunks of a tile lie `THREADS * each` apart.
            place = self._take(places, column) - own
            value = self._take(q, column)
            firsts = range(0, TILE, THREADS * self.each)
            following_column = following(column)
            return following_column, [
                [jnp.where(place == first + j, value, x) for j, x in enumerate(chunk)]
                for first, chunk in zip(firsts, chunks, strict=True)
            ]

        nothing = [[threads.filled(0.0)] * self.each] * (TILE // (THREADS * self.each))
        start = following(jnp.int32(-1)), nothing
        return lax.while_loop(lambda state: state[0] < TILE, put, start)[1]

    def _columns(self) -> list[jax.Array]:
        """Returns the columns that the lanes of a warp have, an array for every 32."""
        lane = self.threads.lane
        return [lane + first for first in range(0, self.matrix.shape[1], WARP)]

    def _take(self, by_lane: list[jax.Array], column: jax.Array) -> jax.Array:
        """Returns what the lanes have of a column, ``[128]``; of no column anything."""
        found = [self.threads.shuffle(x, column & (WARP - 1)) for x in by_lane]
        result = found[0]
        for i, x in enumerate(found[1:], start=1):
            result = jnp.where(lax.div(column, WARP) == i, x, result)
        return result
