"""Draft rows, read from global memory by the threads that need their entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify.mosaic_gpu import signals
from jax_specdec._src.verify.mosaic_gpu.threads import THREADS
from jax_specdec._src.verify.tiles import TILE

PIECES = 2
"""Of a tile, each of eight ids per thread: more at once need more registers."""

Step = Callable[[jax.Array, int, jax.Array | int, list[list[jax.Array]], Any], Any]
"""From a tile, its place among those loaded at once, a piece of it, that piece's chunks, and a
state to the next state."""


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """A block's slice of draft rows, of which nothing is kept.

    What a tile has past the ids that count reads as `fill`, what a threshold hides as -inf.

    Attributes:
      threads: the operations of the warpgroup.
      rows: ref ``[R, columns]`` in global memory.
      per_slice: tiles of a slice, the last slice of a row aside.
      first: ``[]`` int32, the first id of this block's slice.
      size: ids that the drafter could draw.
      row_size: ids of the target row that count.
      fill: the entry of an id that the drafter could not draw.
      each: consecutive ids per thread.
      aligned: whether every row begins at a multiple of sixteen bytes.
      at_once: see `together`; of aligned rows.
      thresholds: ref ``[R]`` float32, what an entry must reach, or None.
    """

    threads: Any
    rows: Any
    per_slice: int
    first: jax.Array
    size: int
    row_size: int
    fill: float
    each: int
    aligned: bool
    at_once: int = 1
    thresholds: Any = None

    @property
    def chunk(self) -> int:
        """Ids that all threads read at once."""
        return THREADS * self.each

    def count(self) -> jax.Array:
        """Tiles of this slice of the target row."""
        return _tiles(self.row_size - self.first + TILE - 1, self.per_slice)

    def full(self) -> jax.Array:
        """Those of them, from the first on, of which every id counts."""
        return _tiles(self.size - self.first, self.per_slice)

    @property
    def _is_whole(self) -> bool:
        """Whether rows are aligned and hold the ids that count, nothing else."""
        return self.aligned and self.rows.shape[1] == self.size == self.row_size

    @property
    def together(self) -> int:
        """Tiles that a masked `fold` loads before it looks at the first of them."""
        return self.at_once if self._is_whole else 1

    def fetch(self, row: jax.Array) -> None:
        """Begin to bring the slice of a row into the second-level cache."""
        if self.threads.interpreted:
            return
        index = self.threads.index_anew()
        first = self.first + index * TILE
        count = jnp.where(index < self.per_slice, jnp.minimum(self.size - first, TILE), 0)
        signals.prefetch_pieces(self.rows, row, first, count)

    def fold(self, row: jax.Array, step: Step, state: Any, *, masked: bool = False) -> Any:
        """``state = step(tile, place, piece, chunks, state)`` for each piece of the slice's tiles.

        A `masked` step counts nothing past the end of the target row: there it may be given tiles
        that are none, and any entries of the draft row.
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

    def of_tile(self, row: jax.Array, tile: jax.Array) -> list[jax.Array]:
        """All entries that each thread has of a tile."""
        return [x for chunk in self.chunks(row, tile) for x in chunk]

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[list[jax.Array]]:
        """The same chunk by chunk."""
        loaded = [self._words(row, tile, i, is_full=False) for i in range(PIECES)]
        pieces = [self._numbers(row, tile, i, x, is_full=False) for i, x in enumerate(loaded)]
        return [chunk for chunks in pieces for chunk in chunks]

    def _first(self, tile: jax.Array, piece: jax.Array | int) -> jax.Array:
        """The first id of each thread in the first chunk of a piece."""
        begin = tile * TILE + piece * (TILE // PIECES)
        return self.first + begin + self.threads.index() * self.each

    def _words(
        self, row: jax.Array, tile: jax.Array, piece: jax.Array | int, *, is_full: bool
    ) -> list[list[jax.Array]]:
        """What is loaded of the chunks of a piece: words, or entries of rows not aligned.

        Some entry or other for those that are not inside the row; `is_full` if all are.
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

    @property
    def _offsets(self) -> range:
        """Where the chunks of a piece begin."""
        return range(0, TILE // PIECES, self.chunk)

    def _numbers(
        self,
        row: jax.Array,
        tile: jax.Array,
        piece: jax.Array | int,
        words: list[list[jax.Array]],
        *,
        is_full: bool,
    ) -> list[list[jax.Array]]:
        """The chunks of a piece; `is_full` if every id of it counts."""
        first, chunks = self._first(tile, piece), words
        row = row + jnp.zeros_like(first)
        if self.aligned:
            chunks = [self.threads.numbers(of_chunk, self.rows.dtype) for of_chunk in words]
        if not is_full:
            chunks = [
                [jnp.where(first < self.size - i - j, x, self.fill) for j, x in enumerate(chunk)]
                for i, chunk in zip(self._offsets, chunks, strict=True)
            ]
        if self.thresholds is not None:
            least = self.threads.gather(self.thresholds, row)
            chunks = [[jnp.where(x < least, -jnp.inf, x) for x in chunk] for chunk in chunks]
        return chunks

    def at(self, row: jax.Array, token_id: jax.Array) -> jax.Array:
        """One entry per thread; -inf where it is hidden."""
        entry = self.threads.gather(self.rows, row, token_id)
        if self.thresholds is not None:
            entry = jnp.where(entry < self.threads.gather(self.thresholds, row), -jnp.inf, entry)
        return entry


def _tiles(ids: jax.Array, most: int) -> jax.Array:
    return jnp.clip(lax.div(ids, TILE), 0, most)
