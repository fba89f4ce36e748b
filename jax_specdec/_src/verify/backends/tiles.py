"""`Tiles`: all rows tile by tile, for TPUs.

No TPU has run it: it was compiled for TPUs, and measured by the schedules of the programs.

A TPU copies columns of every row to its vector memory, and takes the rows there: to read one row of
its main memory, it copies the eight that lie together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.sampling import Filter
from jax_specdec._src.rows import tiles
from jax_specdec._src.rows.blocks import any_under_vmap
from jax_specdec._src.rows.device import LANES, Device, Tpu
from jax_specdec._src.rows.part import Part
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.rows.tiles import TILE
from jax_specdec._src.verify import draw
from jax_specdec._src.verify.backends import gather
from jax_specdec._src.verify.backends.gather import Gather
from jax_specdec._src.verify.backends.largest import Largest, lists_of, search_among_largest
from jax_specdec._src.verify.draw import TileMasses
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.position import Position, Source
from jax_specdec._src.verify.q import Dense, Stored
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rules import Rule
from jax_specdec._src.verify.statistics import MANY_PAIRS, Partials, TargetStatistics, of_owners


class Tiles(Gather):
    """All rows, tile by tile."""

    # Three tests of a threshold take about as long to compute as the rows take to read.
    tests_at_once: ClassVar[int] = 3
    device: ClassVar[Device] = Tpu()

    def keeps_sums(self, part: Part, rule: Rule, filter: Filter | None) -> bool:
        # To sum filtered rows by tile, XLA would copy all of them.
        return filter is None and not part.is_split

    def applies_bitmask(self, part: Part) -> bool:
        return True

    # Reading rows.

    def of_all_rows(self, rows: LocalRows, requests: Request) -> TargetStatistics:
        if not self._by_tile(rows, requests):
            return super().of_all_rows(rows, requests)
        # [M]: the temperature of the request that owns a row
        given = requests.inv_temperature, requests.is_ok & ~requests.greedy, requests.filter
        inv_temperature, _, _ = of_owners(requests, rows.target.matrix.shape[0], given)
        return self._tile_by_tile(rows, requests, None, inv_temperature)

    def of_chosen_rows(
        self, rows: LocalRows, requests: Request, positions: Position
    ) -> TargetStatistics:
        if not self._by_tile(rows, requests):
            return super().of_chosen_rows(rows, requests, positions)
        # [B]: the row of each request; -1 where none is read
        wanted = requests.is_ok & (positions.offset[:, 0] < requests.num_rows)
        index = jnp.where(wanted, positions.row[:, 0], -1)
        found = self._tile_by_tile(rows, requests, index, requests.inv_temperature)
        return jax.tree.map(lambda x: x[:, None], found)

    def _by_tile(self, rows: LocalRows, requests: Request) -> bool:
        """Returns whether rows can be read as `by_tile` does: without a filter."""
        target = rows.target
        whole_tiles = not (target.part.is_split and rows.keeps_sums)  # an edge may cut a tile
        return whole_tiles and requests.filter is None and target.token_bitmask is None

    def _tile_by_tile(
        self,
        rows: LocalRows,
        requests: Request,
        index: jax.Array | None,
        inv_temperature: jax.Array,
    ) -> TargetStatistics:
        """Returns the statistics of rows ``index [n]``, or of all."""
        wants_argmax = any_under_vmap(jnp.any(requests.is_ok & requests.greedy))
        partials, sums = self.by_tile(rows.target, index, inv_temperature, wants_argmax)
        return TargetStatistics(partials, None, sums if rows.keeps_sums else None)

    def at_positions(self, of_rows: Any, positions: Position) -> Any:
        # To gather 320 numbers, a TPU takes longer than for a sum over all pairs of a row and a
        # position.
        num_rows = jax.tree.leaves(of_rows)[0].shape[0]
        shape = positions.row.shape
        index = jnp.minimum(positions.row, num_rows - 1)
        if num_rows * positions.row.size > MANY_PAIRS:
            return jax.tree.map(lambda x: x[index], of_rows)
        # [M, B * P]: which row each position has
        is_row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] == index.reshape(1, -1)

        def of_positions(x: jax.Array) -> jax.Array:
            if x.ndim > 1:
                return x[index]
            own = jnp.where(is_row, x[:, None], jnp.zeros_like(x[:, None]))  # [M, B * P]
            return jnp.sum(own, axis=0, dtype=x.dtype).reshape(shape)

        return jax.tree.map(of_positions, of_rows)

    def draft_partials(
        self, q: Stored, requests: Request, index: jax.Array, inv_temperature: jax.Array
    ) -> Partials:
        # [B * P]: rows one after another, which a tile of all rows is taken for
        flat = index.reshape(-1)
        inv = inv_temperature[:, : index.shape[1]].reshape(-1)
        partials, _ = self.by_tile(q.storage, flat, inv, jnp.bool_(False))
        partials = partials._replace(argmax=None)
        return jax.tree.map(lambda x: x.reshape(index.shape), partials)

    # Statistics of some rows of a matrix.

    def by_tile(
        self,
        rows: VocabRows,
        index: jax.Array | None,
        inv_temperature: jax.Array,
        wants_argmax: jax.Array,
    ) -> tuple[Partials, jax.Array]:
        """Returns partials and sums by tile of many rows, in one pass over the tiles of all.

        In vector memory, the sum of a tile is taken relative to its own maximum. Without a bitmask.
        Tiles are counted from the first column.

        Args:
          rows: this device's part of them.
          index: ``[n]`` int32, or None for all rows.
          inv_temperature: ``[n]`` float32.
          wants_argmax: ``[]`` bool, whether the argmax of any row is wanted.

        Returns:
          Partials ``[n]``, whose argmax is undefined if it is not wanted; and ``[n, T]``, the sums
          relative to their maxima.
        """

        def read(start: Any, length: int) -> jax.Array:
            """Returns ``[3, n]``: maximum, place of it, and sum of a tile of each row."""
            # [n, length]: in vector memory
            tile = columns(rows, index, start, length)
            peak = self.peak(tile, None)

            def argmax() -> jax.Array:  # as float32, whose minimum is one operation
                place = jnp.arange(length, dtype=jnp.float32)[None, :]
                return jnp.min(jnp.where(tile.whole() == peak[:, None], place, length), axis=1)

            place = lax.cond(wants_argmax, argmax, lambda: jnp.zeros_like(peak))
            return jnp.stack([peak, place, self.exp_sums(tile, None, peak, inv_temperature)])

        # [T, n] each
        peaks, places, sums = jnp.moveaxis(tiles.each_tile(read, rows.width), 1, 0)
        starts = jnp.arange(peaks.shape[0], dtype=jnp.int32) * TILE
        # [T, n]: the id of the largest entry of each tile, then the lowest of the largest tiles
        argmaxes = starts[:, None] + places.astype(jnp.int32)
        argmaxes = argmaxes + rows.part.first_id if rows.part.is_split else argmaxes
        peak = jnp.max(peaks, axis=0)
        none = jnp.iinfo(jnp.int32).max
        argmax = jnp.min(jnp.where(peaks == peak[None], argmaxes, none), axis=0)
        # From the maximum of each tile to that of the row.
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)[None]
        sums = (sums * jnp.exp((peaks - base) * inv_temperature[None])).T
        return Partials(peak, jnp.sum(sums, axis=1), argmax).checked(), sums

    def largest_of(
        self, rows: VocabRows, x: jax.Array, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        # One reduction of the whole row: a second look into one tile would copy eight rows.
        peak, place = self.max_and_place(x)
        return peak, rows.part.ids(place)

    def peak(self, rows: VocabRows, index: jax.Array | None) -> jax.Array:
        x = rows.whole(index)
        if x.shape[0] > 1:
            return jnp.max(x, axis=1)
        # One row would fill an eighth of each register.
        count = tiles.num_tiles(x.shape[1])
        views = self.in_tiles(rows, [(x, -jnp.inf)], count, False, by_lanes=True)
        return jnp.max(jnp.stack([jnp.max(x) for _, (x,) in views]), keepdims=True)

    def sum_in_tiles(self, x: jax.Array) -> jax.Array:
        if x.ndim == 4:  # lanes are added last, and at once
            x = lax.optimization_barrier(jnp.sum(x, axis=2))
        return jnp.sum(x, axis=2)

    def in_tiles(
        self,
        rows: VocabRows,
        matrices: Sequence[tuple[jax.Array, float]],
        count: int,
        by_first_id: bool = True,
        by_lanes: bool = False,
    ) -> gather.TileViews:
        of_one_row = by_lanes and matrices[0][0].shape[0] == 1
        if not of_one_row or (by_first_id and gather.has_cut_tiles(rows)):
            return super().in_tiles(rows, matrices, count, by_first_id, by_lanes)
        # [1, t, 16, 128] fills registers as it lies: [t, L] would be moved, [1, W] fills an eighth
        # of each.
        found: gather.TileViews = []
        for first, views in gather.whole_and_cut(matrices, (TILE // LANES, LANES)):
            is_whole = views[0].ndim == 4
            found.append((first, lax.optimization_barrier(views) if is_whole else views))
        return found

    def search(
        self,
        rows: VocabRows,
        index: jax.Array | None,
        filter: Filter,
        limited: jax.Array,
        peak: jax.Array,
        inv_temperature: jax.Array,
    ) -> jax.Array:
        if index is not None or rows.part.is_split:
            return super().search(rows, index, filter, limited, peak, inv_temperature)
        mass = functools.partial(self.exp_sums, rows, None, peak, inv_temperature)
        return search_among_largest(
            lambda: Largest.of(lists_of(rows.matrix, rows.width), mass),
            rows,
            filter,
            limited,
            peak,
            inv_temperature,
            self.tests_at_once,
        )

    # Drawing tokens.

    def residuals(self, rows: LocalRows, sources: Source) -> draw.Residuals:
        if not self._sums_apart(rows, sources):
            return super().residuals(rows, sources)
        # The residual alone is summed, [B * P, T], and the last of several positions has none.
        is_cut = sources.row.shape[1] > 1
        read = jax.tree.map(lambda x: x[:, :-1], sources) if is_cut else sources
        found = self.residual_masses(rows, jax.tree.map(lambda x: lax.collapse(x, 0, 2), read))
        residual = found.reshape(*read.row.shape, -1)
        residual = jnp.pad(residual, ((0, 0), (0, int(is_cut)), (0, 0)))  # [B, P, T]
        known = sources._replace(residual_masses=residual)
        return draw.Residuals(known, None, jnp.sum(residual, axis=2))

    def _sums_apart(self, rows: LocalRows, source: Source) -> bool:
        """Returns whether the masses of sources that use q are summed without those of ``p``."""
        knows_p = source.p_masses is not None
        return knows_p and not rows.q.is_one_hot and self.reads_tiles(rows)

    def reads_tiles(self, rows: LocalRows) -> bool:
        """Returns whether many rows are read by tiles of all rows, as a TPU reads them best."""
        target = rows.target
        # A tile of the target's columns must be one of the draft rows', without a bitmask.
        is_whole = not target.part.is_split and target.token_bitmask is None
        same_ids = rows.q.is_one_hot or (
            isinstance(rows.q, Dense) and rows.q.storage.width == target.width
        )
        return is_whole and same_ids

    def residual_masses(self, rows: LocalRows, source: Source) -> jax.Array:
        """Returns ``[n, num_tiles]``: the masses of sources that use q, 0 of others."""
        # As if all used q: what is summed for the others is not read.
        of_q = source._replace(uses_q=jnp.ones_like(source.uses_q))
        return lax.cond(
            any_under_vmap(jnp.any(source.uses_q & (source.row >= 0))),
            lambda: self.weight_sums(rows, of_q)[0],
            lambda: jnp.zeros((source.row.shape[0], rows.num_tiles), jnp.float32),
        )

    def masses(self, rows: LocalRows, source: Source) -> TileMasses:
        # Summed apart, if the block rule has not summed them before.
        if source.residual_masses is None and self._sums_apart(rows, source):
            source = source._replace(residual_masses=self.residual_masses(rows, source))
        return super().masses(rows, source)

    def own_masses(self, rows: LocalRows, source: Source) -> jax.Array:
        # In blocks of rows, each block would copy all rows.
        if self.reads_tiles(rows):
            return self.masses_of(rows, source)
        return super().own_masses(rows, source)

    def weight_sums(self, rows: LocalRows, source: Source) -> list[jax.Array]:
        if not self.reads_tiles(rows):
            return super().weight_sums(rows, source)

        def read(start: Any, length: int) -> jax.Array:
            """Returns ``[1 or 2, n]``, the sums of columns that all rows have in vector memory."""
            ids = start + jnp.arange(length, dtype=jnp.int32)[None, :]
            # [n, length]: the same ids of the target row and of the draft row
            entries = [columns(rows.target, source.row, start, length).whole()]
            if isinstance(rows.q, Stored):
                storage = columns(rows.q.storage, source.draft_row, start, length)
                entries.append(storage.whole())
            return jnp.stack(self.weight_sums_of_ids(rows, source, ids, *entries))

        sums = tiles.each_tile(read, rows.target.width)  # [T, 1 or 2, n]
        return [*jnp.moveaxis(sums, 0, 2)]


def columns(rows: VocabRows, index: jax.Array | None, start: Any, length: int) -> VocabRows:
    """Returns some columns of many rows, or of all without an index; without a bitmask."""
    matrix = lax.dynamic_slice_in_dim(rows.matrix, start, length, axis=1)  # [R, length]
    # Else XLA would fuse the slice with taking rows, and read them from the main memory.
    matrix = lax.optimization_barrier(matrix)
    least = rows.thresholds
    if index is not None:
        index = jnp.clip(index, 0, matrix.shape[0] - 1)
        matrix = matrix[index]
        least = jax.tree.map(lambda x: x[index], least)
    return dataclasses.replace(
        rows, matrix=matrix, token_bitmask=None, thresholds=least, part=rows.part.moved(start)
    )
