"""Draft rows on a list of ids.

Rows that share a map are read in the order of ids, by the column of each. Rows that list a few
candidates of their own are read whole: by each warp, or a candidate by each thread.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify.mosaic_gpu.cluster import tree_max, tree_sum
from jax_specdec._src.verify.mosaic_gpu.plan import MAX_MAPPED
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, DraftSlice
from jax_specdec._src.verify.mosaic_gpu.statistics import Exponent, base_of
from jax_specdec._src.verify.mosaic_gpu.threads import THREADS, WARP, Threads
from jax_specdec._src.verify.tiles import TILE, num_tiles


class Listed(NamedTuple):
    """What a warp loads of a row: lane i has candidates i, 32 + i, and so on.

    Attributes:
      ids: int32 ``[128]`` each; those past the last candidate are negative, no two the same.
      entries: float32 ``[128]`` each, likewise -inf; 0 of probabilities.
    """

    ids: list[jax.Array]
    entries: list[jax.Array]


NOT_LISTED = MAX_MAPPED
"""The column of an id that a map does not list; columns are half a word each."""


def columns_of_map(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """A map of ids turned round.

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
    found = columns.at[index].get(mode="fill", fill_value=NOT_LISTED)
    place = jnp.where(found == own, 1, 0)  # a scatter: a sum would be two launches
    is_bad = jnp.zeros((1,), jnp.int32).at[place].set(1, mode="drop")
    words = lax.bitcast_convert_type(columns.reshape(-1, 2), jnp.int32)
    return words[None], is_bad


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedSlice(DraftSlice):
    """A block's slice of draft rows that share a map of ids: in the order of ids.

    Attributes, besides those of `DraftSlice`:
      columns: ref ``[1, W]`` int32, the column of each id; see `columns_of_map`.
      storage: a block's slice of the rows as they are stored, in the order of columns.
    """

    columns: Any = None
    storage: DraftSlice | None = None

    def prefetch(self, row: jax.Array) -> None:
        assert self.storage is not None
        self.storage.prefetch(row)

    def column(self, token_id: jax.Array) -> jax.Array:
        """The column of one id per thread."""
        word = self.threads.gather(self.columns, jnp.zeros_like(token_id), token_id >> 1)
        return lax.shift_right_logical(word, (token_id & 1) << 4) & NOT_LISTED

    def entry_in(self, row: jax.Array, column: jax.Array) -> jax.Array:
        """The entry in one column per thread, that of an id which is not listed if so."""
        last = self.rows.shape[1] - 1
        entry = self.entry(row, jnp.minimum(column, last))
        return jnp.where(column <= last, entry, self.fill)

    def _words(
        self, row: jax.Array, tile: jax.Array, piece: jax.Array | int, *, is_full: bool
    ) -> list[list[jax.Array]]:
        threads, first, last = self.threads, self._first(tile, piece), self.rows.shape[1] - 1
        row, zero = row + jnp.zeros_like(first), jnp.zeros_like(first)
        found = []
        for offset in self._offsets:
            begin = lax.shift_right_logical(first + offset, 1)
            words = threads.row_words(self.columns, zero, begin, self.each // 2)
            columns = [half for x in words for half in (x & NOT_LISTED, _upper_half(x))]
            entries = [threads.gather(self.rows, row, jnp.minimum(x, last)) for x in columns]
            both = zip(columns, entries, strict=True)
            found.append([jnp.where(column <= last, x, self.fill) for column, x in both])
        return found


def _upper_half(word: jax.Array) -> jax.Array:
    return lax.shift_right_logical(word, 16)


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Draft rows of at most a candidate for each thread of a warpgroup, in global memory.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, C]``.
      ids: ref ``[R, C]`` int32, what the entries of `rows` stand for.
      first: ``[]`` int32, the first id of this block's slice of the target row.
      size: ids of the target row that count.
      fill: the entry of an id that is not listed.
      each: consecutive ids per thread of a target row.
      sums: whether a row must be summed to normalize it.
      thresholds: ref ``[R]`` float32, what an entry must reach, or None.
      exponent: from an entry of a row to the logarithm of ``q``; None of probabilities.
    """

    threads: Threads
    rows: Any
    ids: Any
    first: jax.Array
    size: int
    fill: float
    each: int
    sums: bool
    thresholds: Any = None
    exponent: Exponent | None = None

    def prefetch(self, row: jax.Array) -> None:
        """A row is small, and was loaded when the drafted token was looked for."""

    # A row as it is listed.

    def load(self, row: jax.Array) -> Listed:
        """Begin to load a row, by each warp."""
        found = [self._at(row, column) for column in self._columns()]
        return Listed(*map(list, zip(*found, strict=True)))

    def _at(self, row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Id and entry in one column per thread."""
        last = self.rows.shape[1] - 1
        row, inside = row + jnp.zeros_like(column), jnp.minimum(column, last)
        ids, entries = (self.threads.gather(ref, row, inside) for ref in (self.ids, self.rows))
        if self.thresholds is not None:
            threshold = self.threads.gather(self.thresholds, row)
            entries = jnp.where(entries < threshold, -jnp.inf, entries)
        is_there = column <= last
        return jnp.where(is_there, ids, -1 - column), jnp.where(is_there, entries, self.fill)

    def find(self, listed: Listed, token_id: jax.Array, scale: jax.Array) -> list[jax.Array]:
        """What a row says of an id, ``[128]`` each, the same in all threads of a warp.

        Returns:
          The id's entry; int32, 1 for a row that lists an id twice or one out of range; and, if
          `sums`, the row's largest entry and log2 of the mass relative to it.
        """
        found = [self.entry_of(listed, token_id), self.is_bad(listed)]
        return [*found, *self.peak_and_log(listed, scale)] if self.sums else found

    def is_bad(self, listed: Listed) -> jax.Array:
        """1 if an id is out of range or there twice."""
        threads = self.threads
        bad = threads.filled(0, jnp.int32) != 0
        for column, ids in zip(self._columns(), listed.ids, strict=True):
            is_there = column < self.rows.shape[1]
            bad |= (is_there & ((ids < 0) | (ids >= self.size))) | threads.has_twin(ids)

        def turn(by: jax.Array, twins: jax.Array) -> jax.Array:
            for i, ids in enumerate(listed.ids):
                for others in listed.ids[:i]:
                    same = threads.shuffle(others, by, "bfly") == ids
                    twins = twins | same.astype(jnp.int32)
            return twins

        if len(listed.ids) > 1:
            bad |= (
                lax.fori_loop(jnp.int32(0), jnp.int32(WARP), turn, threads.filled(0, jnp.int32))
                != 0
            )
        return -threads.warp_min(-bad.astype(jnp.int32))

    def entry_of(self, listed: Listed, token_id: jax.Array) -> jax.Array:
        """The entry of an id, `fill` where it is not listed."""
        column = self.threads.filled(TILE, jnp.int32)
        for ids, mine in zip(listed.ids, self._columns(), strict=True):
            column = jnp.where(ids == token_id, mine, column)
        column = self.threads.warp_min(column)
        return jnp.where(column < TILE, self._take(listed.entries, column), self.fill)

    def peak_and_log(self, listed: Listed, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest entry, and log2 of the mass relative to it."""
        peak = self.threads.warp_max(tree_max(listed.entries))
        base = base_of(peak)
        weights = [jnp.exp2((x - base) * scale) for x in listed.entries]
        return peak, jnp.log2(self.threads.warp_sum(tree_sum(weights)))

    def q_by_thread(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each thread's candidate: its id, negative where there is none, and ``q``."""
        ids, entries = self._at(row, self.threads.index)
        return ids, self._q(entries)

    def _q(self, entries: jax.Array) -> jax.Array:
        return entries if self.exponent is None else jnp.exp2(self.exponent(entries))

    def q_of_tile(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        """``q`` of all ids that each thread has of a tile of the slice, 0 of those not listed."""
        threads, listed = self.threads, self.load(row)
        places = [ids - (self.first + tile * TILE) for ids in listed.ids]
        q = [self._q(entries) for entries in listed.entries]
        own = threads.index * self.each

        def following(column: jax.Array) -> jax.Array:
            """The next column whose id is in the tile, or what no column is."""
            least = threads.filled(TILE, jnp.int32)
            for place, mine in zip(places, self._columns(), strict=True):
                is_next = (place >= 0) & (place < TILE) & (mine > column)
                least = jnp.where(is_next, jnp.minimum(least, mine), least)
            return threads.scalar(threads.warp_min(least))

        def put(state: tuple[jax.Array, list[Chunk]]) -> tuple[jax.Array, list[Chunk]]:
            column, chunks = state
            place, value = self._take(places, column) - own, self._take(q, column)
            firsts = range(0, TILE, THREADS * self.each)
            both = zip(firsts, chunks, strict=True)
            return following(column), [
                [jnp.where(place == first + j, value, x) for j, x in enumerate(chunk)]
                for first, chunk in both
            ]

        nothing = [[threads.filled(0.0)] * self.each] * (TILE // (THREADS * self.each))
        start = following(jnp.int32(-1)), nothing
        return lax.while_loop(lambda state: state[0] < TILE, put, start)[1]

    def _columns(self) -> list[jax.Array]:
        """The columns that the lanes of a warp have."""
        lane = self.threads.lane
        return [lane + first for first in range(0, self.rows.shape[1], WARP)]

    def _take(self, by_lane: list[jax.Array], column: jax.Array) -> jax.Array:
        """What the lanes have of a column, ``[128]``; of no column anything."""
        found = [self.threads.shuffle(x, column & (WARP - 1)) for x in by_lane]
        result = found[0]
        for i, x in enumerate(found[1:], start=1):
            result = jnp.where(lax.div(column, WARP) == i, x, result)
        return result
