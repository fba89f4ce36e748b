"""Draft rows that list ids of their own: `q` of a drafted token, and of one tile at a time."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify.mosaic_gpu.cluster import tree_sum
from jax_specdec._src.verify.mosaic_gpu.ptx import WARP
from jax_specdec._src.verify.mosaic_gpu.rows import PIECES, Chunk, DraftSlice, Step
from jax_specdec._src.verify.mosaic_gpu.statistics import Exponent, is_finite, largest
from jax_specdec._src.verify.tiles import TILE


class Listed(NamedTuple):
    """What a warp loads of a row: lane i has candidates i, 32 + i, and so on.

    Attributes:
      ids: int32 ``[128]`` each; those past the last candidate are negative, no two the same.
      entries: float32 ``[128]`` each, likewise -inf; 0 of probabilities.
    """

    ids: list[jax.Array]
    entries: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Candidates(DraftSlice):
    """Draft rows of at most a candidate for each thread of a warpgroup.

    What is read of it by tile is `q`, 0 of ids that are not listed: put together in shared memory,
    one tile after another.

    Attributes:
      ids: ref ``[R, C]`` int32 in global memory, beside `rows`.
      buffer: float32 ref ``[2048]`` in shared memory.
      exponent: from an entry of a row to the logarithm of ``q``; None of probabilities.
    """

    ids: Any = None
    buffer: Any = None
    exponent: Exponent | None = None

    def prefetch(self, row: jax.Array) -> None:
        """A row is small, and was loaded when the drafted token was looked for."""

    # A row as it is listed.

    def load(self, row: jax.Array) -> Listed:
        """Begin to load a row, by each warp."""
        starts = range(0, self.rows.shape[1], WARP)
        found = [self._at(row, (self.threads.index() & (WARP - 1)) + first) for first in starts]
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

    def is_bad(self, listed: Listed) -> jax.Array:
        """Whether an id is out of range or there twice, ``[]``."""
        threads, lane = self.threads, self.threads.index() & (WARP - 1)
        bad = threads.filled(0, jnp.int32) != 0
        for first, ids in zip(range(0, self.rows.shape[1], WARP), listed.ids, strict=True):
            is_there = lane + first < self.rows.shape[1]
            bad |= (is_there & ((ids < 0) | (ids >= self.row_size))) | threads.has_twin(ids)

        def turn(by: jax.Array, twins: jax.Array) -> jax.Array:
            for i, ids in enumerate(listed.ids):
                for others in listed.ids[:i]:
                    same = threads.shuffle(others, (lane + by) & (WARP - 1)) == ids
                    twins = twins | same.astype(jnp.int32)
            return twins

        if len(listed.ids) > 1:
            bad |= lax.fori_loop(0, WARP, turn, threads.filled(0, jnp.int32)) != 0
        return threads.scalar(threads.warp_min(jnp.where(bad, 0, 1))) == 0

    def entry_of(self, listed: Listed, token_id: jax.Array) -> jax.Array:
        """The entry of an id, ``[128]``, the same in all threads of a warp."""
        column, lane = self.threads.filled(TILE, jnp.int32), self.threads.index() & (WARP - 1)
        for i, ids in enumerate(listed.ids):
            column = jnp.where(ids == token_id, i * WARP + lane, column)
        column = self.threads.warp_min(column)
        found = self.threads.filled(self.fill)
        for i, entries in enumerate(listed.entries):
            entry = self.threads.shuffle(entries, column & (WARP - 1))
            found = jnp.where(lax.div(column, WARP) == i, entry, found)
        return found

    def peak_and_log(self, listed: Listed, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A row's largest entry and log2 of the mass relative to it, ``[128]`` as `entry_of`."""
        peak = self.threads.warp_max(largest(listed.entries))
        base = jnp.where(is_finite(peak), peak, 0.0)
        weights = [jnp.exp2((x - base) * scale) for x in listed.entries]
        return peak, jnp.log2(self.threads.warp_sum(tree_sum(weights)))

    # A row by tile.

    def fold(self, row: jax.Array, step: Step, state: Any, *, masked: bool = False) -> Any:
        """As that of all ids."""
        ids, q = self._clear_and_load(row)

        def by_tile(tile: jax.Array, state: Any) -> Any:
            def by_piece(piece: jax.Array, state: Any) -> Any:
                return step(tile, 0, piece, self._piece(piece), state)

            self._put(tile, ids, q)
            state = lax.fori_loop(0, PIECES, by_piece, state)
            self.threads.sync()  # all have read it
            self._put(tile, ids, jnp.zeros_like(q))
            return state

        return lax.fori_loop(0, self.count(), by_tile, state)

    def chunks(self, row: jax.Array, tile: jax.Array) -> list[Chunk]:
        self._put(tile, *self._clear_and_load(row))
        return [chunk for piece in range(PIECES) for chunk in self._piece(piece)]

    def _clear_and_load(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each thread's candidate, id and `q`; and nothing in the buffer."""
        ids, entries = self._at(row, self.threads.index())
        self.threads.fill(self.buffer, jnp.int32(0), jnp.int32(0), TILE, 0.0)
        self.threads.sync()
        return ids, entries if self.exponent is None else jnp.exp2(self.exponent(entries))

    def _put(self, tile: jax.Array, ids: jax.Array, q: jax.Array) -> None:
        """Write what the threads have of a tile of the slice; all know it then."""
        place = ids - self.first - tile * TILE
        self.threads.scatter(self.buffer, place, q, (place >= 0) & (place < TILE))
        self.threads.sync()

    def _piece(self, piece: jax.Array | int) -> list[Chunk]:
        begin = jnp.int32(piece * (TILE // PIECES))
        return [
            self.threads.entries(self.buffer, begin, self.each, aligned=True, offset=offset)
            for offset in range(0, TILE // PIECES, self.chunk)
        ]
