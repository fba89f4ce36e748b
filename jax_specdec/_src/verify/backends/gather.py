"""`Gather`: the rows of all requests at once, in place, by operations on whole matrices.

For GPUs, where a loop of small reads would spend its time on launches, and for devices that nothing
is known of. Other backends are made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.sampling import Filter, SamplingParams
from jax_specdec._src.base.types import Status
from jax_specdec._src.rows import tiles
from jax_specdec._src.rows.part import Part
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.rows.threshold import find_thresholds
from jax_specdec._src.rows.tiles import TILE
from jax_specdec._src.verify import draw, reader
from jax_specdec._src.verify.backends.base import Backend
from jax_specdec._src.verify.draw import TileMasses
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.position import Position, Source
from jax_specdec._src.verify.q import Listed, Mapped, Stored
from jax_specdec._src.verify.requests import DrawnRaces, Races, Request, Uniforms
from jax_specdec._src.verify.rules import Agreement, Rule, Standard
from jax_specdec._src.verify.statistics import (
    Partials,
    TargetStatistics,
    argmax_of_parts,
    of_owners,
)

TileViews = list[tuple[int, list[jax.Array]]]
"""Some tiles of each of several matrices, after the number of the first."""


class Gather(Backend):
    """All rows at once.

    Attributes:
      tests_at_once: thresholds that a search tests in one read of whole rows.
      tests_per_exchange: the same of parts of rows, each read of which is an exchange: 3 tests
        halve the distance twice. 15, which halve it four times, took as long or longer on two GPUs
        and on CPU devices, whose time goes to the sums.
    """

    tests_at_once: ClassVar[int] = 1
    tests_per_exchange: ClassVar[int] = 3

    def keeps_sums(self, part: Part, rule: Rule, filter: Filter | None) -> bool:
        # Of a part, the sums of all rows would have to be exchanged.
        return rule.draws_every_row or not part.is_split

    def applies_bitmask(self, part: Part) -> bool:
        return part.is_split  # bits of a part are expensive to read repeatedly

    # Reading rows.

    def read(self, rows: LocalRows, requests: Request, positions: Position, rule: Rule) -> Position:
        return self.read_ahead(rows, requests, positions, rule)

    def read_ahead(
        self, rows: LocalRows, requests: Request, positions: Position, rule: Rule
    ) -> Position:
        """Does `read` for all positions at once, whatever the positions before them hold."""
        # One pass or two over rows of logits. All that follows has arrays [B, P].
        stats = self.statistics(rows, requests, positions, rule)
        positions = reader.judged(rows, requests, positions, stats, self.draft_partials)
        # Under the agreement rule the token drawn from a row takes the place of its argmax.
        if rule.draws_every_row:
            return reader.drawn(rows, requests, positions, self.race_token)
        return positions

    def read_argmax(self, rows: LocalRows, requests: Request, positions: Position) -> Position:
        # [num_parts, M] each, by the only exchange
        peaks, argmaxes = rows.part.gather(self.max_and_argmax(rows.target, None))
        # [M]: of whole rows; NaN and infinity are in the maximum, and so is a row without any id
        is_good = jnp.isfinite(jnp.max(peaks, axis=0))
        status = jnp.where(is_good, Status.OK, Status.BAD_TARGET_ROW).astype(jnp.int32)
        argmax, status = self.at_positions((argmax_of_parts(peaks, argmaxes), status), positions)
        return positions._replace(argmax=argmax, status=status)

    def statistics(
        self, rows: LocalRows, requests: Request, positions: Position, rule: Rule
    ) -> TargetStatistics:
        """Returns the statistics of the target rows of positions ``[B, P]``."""
        if rule.reads_one_position:
            return self.of_chosen_rows(rows, requests, positions)
        stats: TargetStatistics = self.at_positions(self.of_all_rows(rows, requests), positions)
        return stats

    def of_all_rows(self, rows: LocalRows, requests: Request) -> TargetStatistics:
        """Returns the statistics of every row ``[M]``, read in place."""
        num_rows = rows.target.matrix.shape[0]
        given = requests.inv_temperature, requests.is_ok & ~requests.greedy, requests.filter
        peak, argmax = self.max_and_argmax(rows.target, None)
        # [M]: the temperature of the request that owns a row, and so on
        return self.summed(rows, None, peak, argmax, *of_owners(requests, num_rows, given))

    def of_chosen_rows(
        self, rows: LocalRows, requests: Request, positions: Position
    ) -> TargetStatistics:
        """Returns those of one position of each request: only its row is read, if that is less."""
        wanted = requests.is_ok & (positions.offset[:, 0] < requests.num_rows)

        def read(which: jax.Array, *given: Any) -> TargetStatistics:
            """Returns the statistics of some of the rows: see `in_blocks`."""
            return self.summed(rows, which, *self.max_and_argmax(rows.target, which), *given)

        given = requests.inv_temperature, wanted & ~requests.greedy, requests.filter
        # [B], -1 for a row that need not be read
        index = jnp.where(wanted, positions.row[:, 0], -1)
        found = self.device.in_blocks(read, index, index, *given)
        # [B, 1]: one position
        return jax.tree.map(lambda x: x[:, None], found)

    def summed(
        self,
        rows: LocalRows,
        index: jax.Array | None,
        peak: jax.Array,
        argmax: jax.Array,
        inv_temperature: jax.Array,
        wanted: jax.Array,
        filter: Filter | None,
    ) -> TargetStatistics:
        """Returns the statistics of target rows, whose maxima are known.

        Thresholds are found for those that are `wanted`.
        """
        target = rows.target
        least = None
        if filter is not None:
            least = self.thresholds(target, index, filter, wanted, peak, inv_temperature)
        # [n, T], or [n] if only the total is kept
        sums = self.exp_sums(target, index, peak, inv_temperature, least, rows.num_sums)
        if not rows.keeps_sums:
            return TargetStatistics(Partials(peak, sums, argmax), least, None)
        return TargetStatistics(Partials(peak, jnp.sum(sums, axis=1), argmax), least, sums)

    def at_positions(self, of_rows: Any, positions: Position) -> Any:
        """Returns arrays ``[M, ...]`` of all rows as ``[B, P, ...]``."""
        num_rows = jax.tree.leaves(of_rows)[0].shape[0]
        index = jnp.minimum(positions.row, num_rows - 1)
        return jax.tree.map(lambda x: x[index], of_rows)

    def draft_partials(
        self, q: Stored, requests: Request, index: jax.Array, inv_temperature: jax.Array
    ) -> Partials:
        """Returns the partials of the draft rows ``index [B, P]`` that are not negative."""

        def read(index: jax.Array, inv: jax.Array) -> Partials:
            """Returns the partials of some of the rows: first their maxima, then their sums."""
            peak = self.peak(q.storage, index)
            return Partials(peak, self.exp_sums(q.storage, index, peak, inv)).checked()

        # [B * P]: rows one after another
        flat = index.reshape(-1)
        inv = inv_temperature[:, : index.shape[1]].reshape(-1)
        found = self.device.in_blocks(read, flat, flat, inv)
        return jax.tree.map(lambda x: x.reshape(index.shape), found)

    # Statistics of some rows ``[n]`` of a matrix, or of all without an index.

    def max_and_argmax(
        self, rows: VocabRows, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the maximum of each row, +inf if the row holds a NaN, and the lowest id of it."""
        x = rows.whole(index)
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # which a maximum may pass over
        return self.largest_of(rows, x, index)

    def largest_of(
        self, rows: VocabRows, x: jax.Array, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Does `max_and_argmax`, from entries ``[n, width]`` without NaN."""
        # By the maximum of each tile, then a look into one: faster on GPUs.
        views = self.in_tiles(rows, [(x, -jnp.inf)], tiles.num_tiles(rows.width), False)
        found = jnp.concatenate([jnp.max(x, axis=2) for _, (x,) in views], axis=1)  # [n, T]
        peak, tile = self.max_and_place(lax.optimization_barrier(found))
        columns = rows.matrix.shape[1]
        length = min(TILE, columns)
        start = jnp.minimum(tile * TILE, columns - length)
        first = start + rows.part.first_id if rows.part.is_split else start
        these = jnp.arange(peak.shape[0], dtype=jnp.int32) if index is None else index
        # [n, L]: the entries of that tile
        column = start + self.max_and_place(rows.slices(these, first, length, columns))[1]
        return peak, rows.part.ids(column)

    def max_and_place(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the maximum of each row of ``[n, L]`` without NaN, and the first index of it."""
        index = lax.broadcasted_iota(jnp.int32, x.shape, 1)

        # A pair of an entry and its index: of equal entries the one with the lower index.
        def larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
            is_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(is_b, b[0], a[0]), jnp.where(is_b, b[1], a[1])

        least = jnp.asarray(-jnp.inf, x.dtype), jnp.int32(x.shape[1])
        # One kernel on a GPU; on a TPU half the code of `jnp.argmax`, and less time than its bytes.
        peak, place = lax.reduce((x, index), least, larger, (1,))
        return peak, place

    def peak(self, rows: VocabRows, index: jax.Array | None) -> jax.Array:
        """Returns the maximum alone. It may pass over a NaN: see `Partials.checked`."""
        return jnp.max(rows.whole(index), axis=1)

    def exp_sums(
        self,
        rows: VocabRows,
        index: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None = None,
        num_tiles: int | None = None,
    ) -> jax.Array:
        """Returns sums of exponentials relative to `peak`, of entries that are not below `least`.

        They are ``[n]``, or ``[n, num_tiles]`` by tile, from the tile that this part begins in.
        """
        x = tiles.kept_of_rows(rows.whole(index), least)
        # Relative to the maximum no exponential overflows. Rows without a finite one are bad.
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None]
        inv = inv_temperature[:, None]
        if num_tiles is None:
            return jnp.sum(jnp.exp((x - base) * inv), axis=1)
        # [n, t, L]: the entries of some tiles. All tiles, but on CPUs, and of one row on TPUs, the
        # last one by itself.
        found = []
        for _, (view,) in self.in_tiles(rows, [(x, -jnp.inf)], num_tiles, by_lanes=True):
            shift, scale = (lax.expand_dims(y, range(2, view.ndim)) for y in (base, inv))
            found.append(self.sum_in_tiles(jnp.exp((view - shift) * scale)))
        return lax.optimization_barrier(jnp.concatenate(found, axis=1))

    def sum_in_tiles(self, x: jax.Array) -> jax.Array:
        """Returns ``[n, t]`` of tiles ``[n, t, ...]``, as `in_tiles` gives them."""
        return jnp.sum(x, axis=2)

    def thresholds(
        self,
        rows: VocabRows,
        index: jax.Array | None,
        filter: Filter,
        wanted: jax.Array,
        peak: jax.Array,
        inv_temperature: jax.Array,
    ) -> jax.Array:
        """Returns ``[n]``, below which a filter keeps no entry of a row; -inf if it keeps all.

        Args:
          rows: this device's part of them.
          index: of the rows.
          filter: of each row, ``[n]``.
          wanted: ``[n]`` bool, whether a request samples from the row.
          peak: ``[n]`` float32, the maximum of each row.
          inv_temperature: ``[n]`` float32.
        """
        peak = rows.part.max(peak)
        # Greedy requests, bad rows and neutral parameters have no threshold.
        limited = filter.limits(rows.size) & wanted & jnp.isfinite(peak)
        least = self.search(rows, index, filter, limited, peak, inv_temperature)
        return jnp.where(limited, least, -jnp.inf)

    def search(
        self,
        rows: VocabRows,
        index: jax.Array | None,
        filter: Filter,
        limited: jax.Array,
        peak: jax.Array,
        inv_temperature: jax.Array,
    ) -> jax.Array:
        """Returns the thresholds of rows that are `limited`; of others anything."""
        # The copy with the bitmask is made where it is read: it is not where nothing is limited.
        masked = rows.part.is_split and rows.token_bitmask is not None
        return find_thresholds(
            filter,
            lambda: (rows.masked() if masked else rows).select(index),
            limited,
            size=rows.size,
            dtype=rows.matrix.dtype,
            peak=peak,
            inv_temperature=inv_temperature,
            part=rows.part,
            candidates=self.tests_per_exchange if rows.part.is_split else self.tests_at_once,
        )

    def in_tiles(
        self,
        rows: VocabRows,
        matrices: Sequence[tuple[jax.Array, float]],
        count: int,
        by_first_id: bool = True,
        by_lanes: bool = False,
    ) -> TileViews:
        """Returns matrices ``[n, W]`` of the ids of a part as tiles ``[n, t, L]``.

        Args:
          rows: whose part of the vocabulary the columns are.
          matrices: each with what to pad it with.
          count: number of tiles, from the one that the part begins in.
          by_first_id: whether tiles are counted from id 0; if not, from the first column.
          by_lanes: whether tiles of one row may come as ``[1, t, 16, 128]`` instead.
        """
        size = count * TILE
        if not (by_first_id and has_cut_tiles(rows)):
            xs = [padded(x, 0, size - x.shape[1], fill) for x, fill in matrices]
        else:  # an edge between parts may be inside a tile
            start = TILE - rows.part.first_id % TILE
            xs = [padded(x, TILE, size - x.shape[1], fill) for x, fill in matrices]
            xs = [lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in xs]
        return [(0, [x.reshape(x.shape[0], count, TILE) for x in xs])]

    # Drawing tokens.

    def residuals(self, rows: LocalRows, sources: Source) -> draw.Residuals:
        p_masses = sources.p_masses
        if p_masses is None or sources.row.shape[1] == 1:
            both = self.both_of_positions(rows, sources)
        else:
            # At the last of several positions nothing is proposed, so its weights are `p`.
            both = self.both_of_positions(rows, jax.tree.map(lambda x: x[:, :-1], sources))
            last = jnp.stack([p_masses[None, :, -1:]] * 2, axis=3)
            both = jnp.concatenate([both, last], axis=2)
        masses = TileMasses(both)
        return draw.Residuals(sources, masses, jnp.sum(masses.weights, axis=(0, 3)))

    def both_of_positions(self, rows: LocalRows, sources: Source) -> jax.Array:
        """Returns `TileMasses` of positions ``[B, P]``, as ``[num_parts, B, P, 2, T]``."""
        # [B * P]: sources stand one after another
        flat = jax.tree.map(lambda x: lax.collapse(x, 0, 2), sources)
        both = self.masses(rows, flat).both
        return both.reshape(both.shape[0], *sources.row.shape, *both.shape[2:])

    def masses(self, rows: LocalRows, source: Source) -> TileMasses:
        return TileMasses(rows.part.gather(self.own_masses(rows, source)))

    def own_masses(self, rows: LocalRows, source: Source) -> jax.Array:
        """Returns ``[n, 2, num_tiles]``: of this part, the masses of weights and of ``p``."""

        def masses(source: Source) -> jax.Array:
            return self.masses_of(rows, source)

        found: jax.Array = self.device.in_blocks(masses, source.row, source)
        return found

    def masses_of(self, rows: LocalRows, source: Source) -> jax.Array:
        """Returns what `own_masses` does, of sources that are read at once."""
        p_masses = source.p_masses
        residual = source.residual_masses
        # Known residual masses are used below, and not taken along.
        source = source._replace(residual_masses=None)
        # Whole rows are read if a residual is to be summed over all ids, or `p` is.
        reads_rows = residual is None and (p_masses is None or not rows.q.is_one_hot)
        if not isinstance(rows.q, Listed) and reads_rows:
            sums = self.weight_sums(rows, source)
            return jnp.stack(sums if p_masses is None else [*sums, p_masses], axis=1)
        # Otherwise the masses of `p` are known, or summed alone, and a few ids are taken off.
        if p_masses is None:
            p_masses = self.masses_of(rows.alone(), source)[:, 1]
        # Only the tile that a one-hot draft is in has another mass than `p`.
        masses = self._without_token(rows, source, p_masses)
        if isinstance(rows.q, Listed):
            residual = self._without_listed(rows, source, p_masses, rows.q)
        if residual is not None:
            masses = jnp.where(source.uses_q[:, None], residual, masses)
        return jnp.stack([masses, p_masses], axis=1)

    def weight_sums(self, rows: LocalRows, source: Source) -> list[jax.Array]:
        """Returns sums of weights by tile, and of ``p`` if not known, in one read of the rows."""
        target = rows.target
        q = rows.q
        # [n, W]: of the target row of each source, and of its draft row in the same ids
        entries = [(target.whole(source.row), target.fill)]
        if isinstance(q, Mapped):
            # The columns of ids are cut into tiles, and looked up below.
            columns = q.columns_of(rows.part, target.width)
            entries.append((columns[None], q.unlisted))
        elif isinstance(q, Stored) and rows.part.is_split and not rows.draft_is_split:
            # Whole draft rows beside a part of the target: the ids of that part.
            first = jnp.broadcast_to(rows.part.first_id, source.row.shape)
            (part_of_q,) = q.slices(source.draft_row, first, target.width, rows.end)
            entries.append((part_of_q, q.storage.fill))
        elif isinstance(q, Stored):
            entries.append((q.storage.whole(source.draft_row), q.storage.fill))
        # Tile by tile: [n, t, L] entries, ids, weights, and sums [n, t].
        place = jnp.arange(TILE, dtype=jnp.int32)
        tile_ids = rows.tile_ids()
        found = []
        for first_tile, xs in self.in_tiles(target, entries, rows.num_tiles):
            _, count, length = xs[0].shape
            these = tile_ids[first_tile : first_tile + count, None]
            ids = (place[None, :length] + these * TILE)[None]  # [1, t, L]
            if isinstance(q, Mapped):  # tile by tile: XLA fuses this, but not whole rows
                xs[1] = q.storage.at(source.draft_row[:, None, None], xs[1])
            found.append(lax.optimization_barrier(self.weight_sums_of_ids(rows, source, ids, *xs)))
        return [jnp.concatenate(of_tiles, axis=1) for of_tiles in zip(*found, strict=True)]

    def weight_sums_of_ids(
        self, rows: LocalRows, source: Source, ids: jax.Array, *entries: jax.Array
    ) -> list[jax.Array]:
        """Returns sums of the weights of `ids`, and of ``p`` if not known, from their entries."""
        sums = [jnp.sum(rows.weights(source, ids, *entries)[0], axis=-1)]
        if source.p_masses is None:
            # XLA writes to memory what two sums share. Behind a barrier, p is computed twice.
            _, p = rows.weights(lax.optimization_barrier(source), ids, *entries)
            sums.append(jnp.sum(p, axis=-1))
        return sums

    def _without_token(self, rows: LocalRows, source: Source, p_masses: jax.Array) -> jax.Array:
        """Returns `p_masses`, with the tile of a one-hot draft summed again without the draft."""
        # [n, 2, L]: the weights of that tile, read once more
        tile = source.token_id // TILE
        _, inside = rows.alone().in_tile(source, tile)
        # [n, T]: the tile that the draft is in
        is_its = source.is_one_hot[:, None] & (rows.tile_ids()[None, :] == tile[:, None])
        return jnp.where(is_its, jnp.sum(inside[:, 0], axis=1)[:, None], p_masses)

    def _without_listed(
        self, rows: LocalRows, source: Source, p_masses: jax.Array, q: Listed
    ) -> jax.Array:
        """Returns the masses of the residual if few ids have a q.

        They are ``weight * p - sum(min(weight * p, q))``. A difference of sums has a rounding error
        in proportion to the row's mass: `draw` skips tiles whose mass is nothing else.
        """
        ids, q_entries = q.listed(source.draft_row)  # [n, C]
        p_entries = rows.target.at(source.row[:, None], ids)
        # What each listed id takes off `weight * p`: the smaller one of that and q.
        left, p = rows.weights(source, ids, p_entries, q_entries)
        taken = source.weight[:, None] * p - left
        # [n, T, C]: what the listed ids take from each tile
        is_inside = (ids // TILE)[:, None, :] == rows.tile_ids()[None, :, None]
        taken = jnp.sum(jnp.where(is_inside, taken[:, None, :], 0.0), axis=2)
        return jnp.maximum(source.weight[:, None] * p_masses - taken, 0.0)

    def token(
        self, rows: LocalRows, source: Source, masses: TileMasses, recover: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return draw.inverse_cdf_draw(rows, source, masses, recover)

    def race_token(self, rows: LocalRows, source: Source, exponential: jax.Array) -> jax.Array:
        """Returns tokens ``[n]`` drawn from ``p`` by races with noise ``[n, T+L]``."""
        masses = source.p_masses  # [n, T]
        if masses is None:
            masses = self.device.in_blocks(
                lambda those: self.masses_of(rows, those)[:, 1], source.row, source
            )
        return draw.race_draw(rows, source, rows.part.gather(masses), exponential)

    # One token of each row.

    def sample(
        self,
        logits: jax.Array,
        sampling: SamplingParams,
        noise: Uniforms | Races | DrawnRaces,
        part: Part,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Samples one token from each row: a verification without drafts.

        Args:
          logits: ``[B, V]``, or this device's columns of them.
          sampling: parameters of each row.
          noise: uniforms, or the noise of the agreement rule's races, or what it is drawn from.
          part: of the vocabulary, which the columns are.

        Returns:
          Four arrays ``[B]``: token ids; ``logsumexp((logits - maximum) / temperature)`` of the
          logits that the filter keeps; the maxima; and the thresholds below which it keeps none, or
          None without a filter.
        """
        requests = Request.without_drafts(sampling.temperature, Filter.of(sampling), noise)
        size = logits.shape[1] * part.num_parts
        rows = LocalRows.of(
            logits, None, None, size=size, device=self.device, part=part, keeps_sums=True
        )
        # [B, 1]: one position each, at which nothing is proposed
        unread = requests.unread(size, rows.num_sums)
        rule = Standard() if isinstance(noise, Uniforms) else Agreement()
        positions = self.read_ahead(rows, requests, unread, rule)
        last = jax.tree.map(lambda x: x[:, 0], positions)
        token_ids = last.argmax
        if not rule.draws_every_row:
            token_ids, _ = self.draw(rows, requests, Source.at(last), None)
        return token_ids, last.scale.log_scale, last.scale.shift, last.threshold

    def argmax(self, logits: jax.Array, part: Part) -> jax.Array:
        """Returns ``[B]`` int32, the argmax of each row ``[B, V]``; ties go to the lowest id."""
        size = logits.shape[1] * part.num_parts
        rows = LocalRows.of(logits, None, None, size=size, device=self.device, part=part)
        return argmax_of_parts(*part.gather(self.max_and_argmax(rows.target, None)))


def has_cut_tiles(rows: VocabRows) -> bool:
    """Returns whether an edge between parts may be inside a tile."""
    return rows.part.is_split and rows.width % TILE > 0


def padded(x: jax.Array, before: int, after: int, fill: float) -> jax.Array:
    """Returns ``[n, W]`` with columns more."""
    count = (0, 0), (before, after)
    return jnp.pad(x, count, constant_values=fill) if before or after else x


def whole_and_cut(
    matrices: Sequence[tuple[jax.Array, float]], of_tile: tuple[int, ...] = (TILE,)
) -> Iterator[tuple[int, list[jax.Array]]]:
    """Yields whole tiles ``[n, t, *of_tile]``, then the last one by itself, which needs no copy."""
    width = max([x.shape[1] for x, _ in matrices])
    xs = [padded(x, 0, width - x.shape[1], fill) for x, fill in matrices]
    whole = width // TILE
    cut = whole * TILE
    if whole:
        yield 0, [x[:, :cut].reshape(-1, whole, *of_tile) for x in xs]
    if cut < width:
        yield whole, [x[:, None, cut:] for x in xs]
