"""One request's walk: read a row, judge its draft, go on; then draw.

A cluster of CTAs verifies one request. Every CTA has one slice of a target row in shared memory,
and all make the same decisions from the same numbers. A row is read once its position is reached,
or with the one before it where a CTA has several warpgroups. The row to draw from is still there
when that is known.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify import rules, threshold
from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.cluster import (
    Cluster,
    Masses,
    OneWarpgroup,
    Warpgroups,
    tree_sum,
)
from jax_specdec._src.verify.mosaic_gpu.drafted import (
    DraftedTokens,
    DraftLoads,
    DraftRows,
    SummedQ,
    Work,
)
from jax_specdec._src.verify.mosaic_gpu.draw import Draw, PositionResult, TileWeights
from jax_specdec._src.verify.mosaic_gpu.plan import Plan
from jax_specdec._src.verify.mosaic_gpu.request import (
    KernelRequest,
    Operands,
    Outputs,
    RequestLoads,
)
from jax_specdec._src.verify.mosaic_gpu.rows import Below, DraftSlice, TargetSlice, TileStep
from jax_specdec._src.verify.mosaic_gpu.statistics import Normalizer, is_finite
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Ref, Threads

OK = int(Status.OK)


def verify_request(
    plan: Plan,
    threads: Threads,
    operands: Operands[Ref],
    outputs: Outputs[Ref],
    index: jax.Array,
    target: TargetSlice,
    draft: DraftRows,
    cluster: Cluster,
    warpgroups: OneWarpgroup | Warpgroups,
) -> None:
    """The kernel: what each warpgroup does for one request.

    What is loaded and copied, and when, is decided here. Each load begins as early as its address
    is known, and what does not need it comes between.
    """
    loads = RequestLoads.begin(plan, threads, operands, index)
    # This PTX keeps the loads above in place: all of them are in flight.
    threads.init_barriers(cluster.barriers, plan.memory.barriers)
    request = KernelRequest.of(plan, threads, operands, outputs, index, loads)
    ok = request.status == Status.OK

    @pl.when(ok)
    def _() -> None:
        draft_loads = DraftLoads(request, target, draft)  # small: loaded before rows
        by_rate = isinstance(plan.rule, rules.Synthetic)
        position = warpgroups.index
        if by_rate:
            uniforms = request.uniforms()
            position = _accepted_by_rate(request, uniforms)
        _copy_row(request, target, position)
        target.fill_end()
        if warpgroups.count > 1 and plan.has_draft_rows:
            # There are registers to spare, and the row is needed if the position is.
            uses_q = threads.at(draft_loads.uses_q, position)
            pl.when(uses_q)(lambda: draft_loads.prefetch(position))
        if not by_rate:  # while rows are under way
            uniforms = request.uniforms()
        drafted = DraftedTokens(draft_loads, uniforms)
        threads.cluster_wait()
        Walk(Work(request, target, draft, drafted, cluster), warpgroups).run(position)

    @pl.when(~ok)
    def _() -> None:
        threads.cluster_wait()  # all CTAs of a cluster must
        zero = jnp.int32(0)
        request.write(zero, zero, request.status, cluster.is_first_warp())


def _accepted_by_rate(request: KernelRequest, uniforms: jax.Array) -> jax.Array:
    """Returns how many drafts the synthetic rule accepts, ``[]`` int32."""
    lane = request.lane
    threads = request.threads
    rate = threads.filled(0.0)
    for i, value in enumerate(request.plan.rule.conditional_rates or ()):
        rate = jnp.where(lane == i, jnp.float32(value), rate)
    accepted = request.proposed & rules.accepts_synthetic(uniforms, rate)
    # By lane: its index if its draft is the end, else past every lane. The least is where it ends.
    rejected = jnp.where(accepted & (lane < request.plan.k), WARP, lane)
    return threads.scalar(threads.warp_min(rejected))


def _copy_row(request: KernelRequest, target: TargetSlice, position: jax.Array) -> None:
    """Begin to copy the target row of a position, if there is one."""
    pl.when(position < request.num_rows)(lambda: target.copy(request.first_row + position))


class WalkState(NamedTuple):
    """Where the walk of a warpgroup stands.

    Attributes:
      position: ``[]`` int32, the next to visit.
      result: what the rows of the last one visited gave.
      round: ``[]`` int32, of the next exchange.
      first: ``[]`` int32, the warpgroup at whose position the walk ends; their number before that.
    """

    position: jax.Array
    result: PositionResult
    round: jax.Array
    first: jax.Array


class Walk:
    """One warpgroup at work on one request, while the kernel is traced.

    Args:
      work: what it has in hand.
      warpgroups: those of this CTA.

    Attributes:
      nothing: stands for a position not visited.
    """

    def __init__(self, work: Work, warpgroups: OneWarpgroup | Warpgroups):
        self.work = work
        self.warpgroups = warpgroups
        self.request = work.request
        self.target = work.target
        self.drafted = work.drafted
        self.cluster = work.cluster
        self.plan = work.request.plan
        self.threads = work.request.threads
        self.nothing = PositionResult.nothing(work.cluster)

    def run(self, position: jax.Array) -> None:
        """Walk from `position` on, draw the last token, write the output.

        The copy of its target row is under way, if it has one.
        """
        round = jnp.int32(0)
        match self.plan.rule:
            case rules.Synthetic():  # the one row that the last token comes from
                result, round = self.visit(position, round)
                self.emit(position, result, round)
            case rules.Block():
                # A greedy request ends where its first draft is not the argmax by either rule.
                pl.when(self.request.greedy)(lambda: self.walk_and_emit(round))
                pl.when(~self.request.greedy)(lambda: BlockRuleWalk(self).run(round))
            case _:
                self.walk_and_emit(round)

    def walk_and_emit(self, round: jax.Array) -> None:
        """Visit positions in order until one is not accepted, and emit from that.

        Each warpgroup of the CTA has its own: n of them visit n positions at once.
        """
        warpgroups = self.warpgroups
        count = warpgroups.count

        def goes_on(state: WalkState) -> jax.Array:
            return state.first == count

        def step(state: WalkState) -> WalkState:
            result, round = self.visit(state.position, state.round)
            first = warpgroups.first(result.accepted == 0, state.position)
            # All warps of the CTA have read the row: `visit` ends with an exchange.
            pl.when(first == count)(
                lambda: _copy_row(self.request, self.target, state.position + count)
            )
            return WalkState(state.position + count, result, round, first)

        start = WalkState(warpgroups.index, self.nothing, round, jnp.int32(count))
        end = lax.while_loop(goes_on, step, start)
        pl.when(end.first == warpgroups.index)(
            lambda: self.emit(end.position - count, end.result, end.round)
        )

    def visit(self, position: jax.Array, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Read the rows of one position, and judge its draft by the greedy or the standard rule.

        Args:
          position: ``[]`` int32; the copy of its target row is under way, if it has one.
          round: ``[]`` int32, of the next exchange.

        Returns:
          The result, nothing where there is no row; and the next round.
        """
        return lax.cond(
            position < self.request.num_rows,
            lambda: self._read_and_judge(position, round),
            lambda: (self.nothing, round),
        )

    def _read_and_judge(
        self, position: jax.Array, round: jax.Array
    ) -> tuple[PositionResult, jax.Array]:
        request = self.request
        drafted = self.drafted
        by_rate = isinstance(self.plan.rule, rules.Synthetic)
        rows_before = jnp.int32(0) if by_rate else self.warpgroups.rows_before(position)
        result, round = Reader.of(self, position, rows_before).read(round)
        bad_target = ~is_finite(result.target.peak)
        bad_draft = drafted.bad | (drafted.uses_q & ~is_finite(result.draft.peak))

        # [128] by lane: what the lane of this position finds is right.
        accepted = self.threads.filled(0, jnp.int32)
        if not by_rate:
            p, q = drafted.probabilities(result.target, result.draft)
            bad_draft = bad_draft | (drafted.uses_q & ~((q >= 0) & (q < jnp.inf)))
            is_best = rules.accepts_greedy(request.token_ids, result.argmax)
            by_rule = (request.greedy & is_best) | (
                ~request.greedy & rules.accepts(drafted.uniforms, p, q)
            )
            accepted = (request.proposed & by_rule).astype(jnp.int32)
        # One shuffle for both: whether it was accepted, and whether its draft row is bad.
        flags = self.threads.at(accepted + 2 * bad_draft.astype(jnp.int32), position)
        status = jnp.where(bad_target, jnp.int32(Status.BAD_TARGET_ROW), jnp.int32(OK))
        status = jnp.where(~bad_target & (flags >= 2), jnp.int32(Status.BAD_DRAFT_ROW), status)
        kept = (status == OK) & (flags == 1)
        return result._replace(accepted=kept.astype(jnp.int32), status=status), round

    def emit(self, num_accepted: jax.Array, result: PositionResult, round: jax.Array) -> None:
        """Write the accepted tokens, then one drawn from the row that was read last."""
        request = self.request
        visited = num_accepted < request.num_rows  # else the bonus token is given
        draws = visited & (result.status == OK) & ~request.greedy

        @pl.when(~draws)
        def _() -> None:
            token_id = jnp.where(visited, result.argmax, request.bonus)
            is_writer = self.cluster.is_first_warp()
            request.write(num_accepted, token_id, result.status, is_writer)
            request.write_row(result.target, is_writer)

        pl.when(draws)(lambda: Draw(self.work, num_accepted, result).run(round))


# Reading the rows of a position.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Reading the rows of one position: their argmax, or what normalizes them.

    Each warp reads its part; then all exchange what they found. Masses are relative to the entry of
    the drafted token, which all know beforehand: nothing has to be compared. Where that entry is
    too far from the others, the rows are read again for their largest entries.

    From a row without a draft the last token is drawn, by the target alone: the masses of its tiles
    are summed while it is read.

    Attributes:
      walk: the warpgroup at work.
      position: ``[]`` int32; the copy of its target row is under way.
      row: ``[]`` int32, that target row.
      rows_before: ``[]`` int32, rows that were copied before it.
      base: ``[]`` float32, what masses of the target row are relative to.
      needs_peak: ``[]`` bool, whether the row's largest entry is wanted: for the argmax, a filter,
        or an output.
      sums_masses: ``[]`` bool, whether the masses of tiles are summed at once.
      draft: the draft row, if it is read too.
    """

    walk: Walk
    position: jax.Array
    row: jax.Array
    rows_before: jax.Array
    base: jax.Array
    needs_peak: jax.Array
    sums_masses: jax.Array
    draft: NoDraftRow | DraftRow

    @classmethod
    def of(cls, walk: Walk, position: jax.Array, rows_before: jax.Array) -> Reader:
        """Returns that of a position."""
        request = walk.request
        drafted = walk.drafted
        threads = walk.threads
        row = request.first_row + position
        needs_peak = request.greedy
        if walk.plan.has_filter:
            needs_peak = request.greedy | request.is_filtered
        if request.samples_draft:  # the maximum of its row is asked for
            needs_peak = jnp.bool_(True)
        sums_masses = jnp.bool_(False)
        if walk.plan.is_plain and not request.samples_draft:
            sums_masses = ~request.greedy & ~request.is_proposed(position)
        base = _base_at(request, position, drafted.loads.logit)
        draft: NoDraftRow | DraftRow = NoDraftRow()
        if isinstance(drafted.q, SummedQ) and isinstance(walk.work.draft, DraftSlice):
            draft = DraftRow(
                walk=walk,
                slice=walk.work.draft.by_column,
                is_used=threads.at(drafted.uses_q, position),
                row=threads.at(drafted.loads.draft_row, position),
                base=_base_at(request, position, drafted.q.entry),
            )
        return cls(
            walk=walk,
            position=position,
            row=row,
            rows_before=rows_before,
            base=base,
            needs_peak=needs_peak,
            sums_masses=sums_masses,
            draft=draft,
        )

    def read(self, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Returns what the rows gave, not judged yet; and the next round."""
        walk = self.walk
        if not (walk.plan.is_plain and not walk.request.samples_draft):
            return self.look(round)
        masses, round = lax.cond(
            self.sums_masses,
            lambda: self.tile_masses(round),
            lambda: (walk.nothing.p_masses, round),
        )
        # All that anybody needs of a row that is drawn from, unless the base was of no use. Of
        # other rows the total is 0, which is never usable.
        target = Normalizer.of(self.base, masses.total)
        result = walk.nothing._replace(target=target, p_masses=masses)
        usable = statistics.is_usable(masses.total, self.base, walk.request.factor)
        return lax.cond(usable, lambda: (result, round), lambda: self.look(round))

    def tile_masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """Returns the masses of all tiles of the row, and the next round."""
        target = self.walk.target
        weights = statistics.weight_function(self.base, self.walk.request.factor, target.entry_size)
        mine = statistics.tile_masses(target, self.row, self.rows_before, weights)
        return self.walk.cluster.gather_masses(round, mine)

    def look(self, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Returns what the rows gave, and the next round: read, then filter."""
        walk = self.walk
        request = walk.request
        cluster = walk.cluster
        draft = self.draft
        draft.prefetch()
        # What each warp finds: of the target row its maximum and the place of that, or anything and
        # its mass; then of the draft row anything and its mass.
        mine = lax.cond(
            self.needs_peak,
            lambda: statistics.max_and_place(walk.target, self.row, self.rows_before),
            self.mass,
        )
        of_draft = draft.mass()
        found, round = cluster.all_gather(round, *mine, *of_draft)
        best, target = lax.cond(
            self.needs_peak,
            lambda: _argmax(cluster, found[0], found[1]),
            lambda: (jnp.int32(0), Normalizer.of(self.base, cluster.sum(found[1]))),
        )
        usable = self.needs_peak | statistics.is_usable(target.total, self.base, request.factor)
        of_draft_row = draft.normalizer(found[2:], walk.nothing.draft)
        usable = draft.confirms(usable, of_draft_row)
        target, of_draft_row, round = lax.cond(
            usable,
            lambda: (target, of_draft_row, round),
            lambda: self.read_again(of_draft_row, round),
        )
        if walk.plan.has_filter:
            target, round = lax.cond(
                request.is_filtered & is_finite(target.peak),
                lambda: RowFilter(walk, self.row, target.peak).run(round),
                lambda: (target, round),
            )
        result = walk.nothing._replace(target=target, draft=of_draft_row, argmax=best)
        return result, round

    def mass(self) -> tuple[jax.Array, jax.Array]:
        """Returns anything, and each warp's mass; 0 if the masses of tiles were of no use."""
        walk = self.walk
        nothing = walk.threads.filled(0.0)
        return nothing, lax.cond(
            self.sums_masses,
            lambda: nothing,
            lambda: statistics.mass(
                walk.target, self.row, self.rows_before, self.base, walk.request.factor
            ),
        )

    def read_again(
        self, of_draft_row: Normalizer, round: jax.Array
    ) -> tuple[Normalizer, Normalizer, jax.Array]:
        """Returns normalizers by the largest entries, and the next round; the rows are there."""
        request = self.walk.request
        cluster = self.walk.cluster
        mine = statistics.max_and_sum(self.walk.target, self.row, request.factor)
        of_draft = self.draft.max_and_sum()
        found, round = cluster.all_gather(round, *mine, *of_draft)
        target = _by_largest(cluster, request.factor, found[0], found[1])
        return target, self.draft.by_largest(found[2:], of_draft_row), round


class NoDraftRow:
    """Stands for the draft row of a position where none is read to normalize it."""

    def prefetch(self) -> None:
        """Do nothing."""

    def mass(self) -> tuple[jax.Array, ...]:
        """Returns nothing."""
        return ()

    def max_and_sum(self) -> tuple[jax.Array, ...]:
        """Returns nothing."""
        return ()

    def normalizer(self, found: list[list[jax.Array]], other: Normalizer) -> Normalizer:
        """Returns `other`."""
        return other

    def by_largest(self, found: list[list[jax.Array]], other: Normalizer) -> Normalizer:
        """Returns `other`."""
        return other

    def confirms(self, usable: jax.Array, row: Normalizer) -> jax.Array:
        """Returns `usable`."""
        return usable


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRow:
    """The draft row of a position, which is read beside the target row to normalize it.

    Attributes:
      walk: the warpgroup at work.
      slice: draft rows, in the order of columns.
      row: ``[]`` int32.
      is_used: ``[]`` bool; if not, nothing is read and its mass is 1.
      base: ``[]`` float32, what its mass is relative to.
    """

    walk: Walk
    slice: DraftSlice
    row: jax.Array
    is_used: jax.Array
    base: jax.Array

    def prefetch(self) -> None:
        """Begin to fetch it into the L2 cache, while the target row is read."""
        pl.when(self.is_used)(lambda: self.slice.prefetch(self.row))

    def mass(self) -> tuple[jax.Array, ...]:
        """Returns anything, and each warp's mass."""
        threads = self.walk.threads
        factor = self.walk.request.factor
        nothing = threads.filled(0.0), threads.filled(1.0)
        return lax.cond(
            self.is_used,
            lambda: (
                threads.filled(0.0),
                statistics.mass(self.slice, self.row, None, self.base, factor),
            ),
            lambda: nothing,
        )

    def max_and_sum(self) -> tuple[jax.Array, ...]:
        """Returns each warp's maximum, and its mass relative to that."""
        threads = self.walk.threads
        factor = self.walk.request.factor
        nothing = threads.filled(0.0), threads.filled(1.0)
        return lax.cond(
            self.is_used,
            lambda: statistics.max_and_sum(self.slice, self.row, factor),
            lambda: nothing,
        )

    def normalizer(self, found: list[list[jax.Array]], other: Normalizer) -> Normalizer:
        """Returns its normalizer, from what all warps found by `mass`."""
        _, masses = found
        return Normalizer.of(self.base, self.walk.cluster.sum(masses))

    def by_largest(self, found: list[list[jax.Array]], other: Normalizer) -> Normalizer:
        """Returns its normalizer, from what all warps found by `max_and_sum`."""
        peaks, sums = found
        return _by_largest(self.walk.cluster, self.walk.request.factor, peaks, sums)

    def confirms(self, usable: jax.Array, row: Normalizer) -> jax.Array:
        """Returns whether `usable`, and its mass too if it counts."""
        is_usable = statistics.is_usable(row.total, row.peak, self.walk.request.factor)
        return usable & (~self.is_used | is_usable)


def _base_at(request: KernelRequest, position: jax.Array, by_lane: jax.Array) -> jax.Array:
    """Returns an entry of the order of a row's largest: that of its draft, or of the last one's.

    Args:
      request: the request.
      position: ``[]`` int32.
      by_lane: the drafted tokens' entries.

    Returns:
      ``[]`` float32, finite.
    """
    last = jnp.maximum(request.num_drafts - 1, 0)
    return statistics.base_of(request.threads.at(by_lane, jnp.minimum(position, last)))


# What all warps have, from what each has.


def _argmax(
    cluster: Cluster, peaks: list[jax.Array], places: list[jax.Array]
) -> tuple[jax.Array, Normalizer]:
    """Returns the least of the places of the row's largest entry, and that entry."""
    peak = cluster.max(peaks)
    found = [
        jnp.where(x == peak, lax.bitcast_convert_type(place, jnp.int32), statistics.NO_PLACE)
        for x, place in zip(peaks, places, strict=True)
    ]
    best = cluster.threads.warp_min(functools.reduce(jnp.minimum, found))
    return cluster.threads.scalar(best), Normalizer.of(peak, jnp.float32(1))


def _by_largest(
    cluster: Cluster, factor: jax.Array, peaks: list[jax.Array], sums: list[jax.Array]
) -> Normalizer:
    """Returns a normalizer from each warp's largest entry, and its mass relative to that."""
    peak = cluster.max(peaks)
    masses = [
        jnp.where(x > -jnp.inf, mass * statistics.decay(x, peak, factor), 0.0)
        for x, mass in zip(peaks, sums, strict=True)
    ]
    return Normalizer.of(peak, cluster.sum(masses))


class RowFilter:
    """Min-p, top-k and top-p of a row: what `threshold.search` reads, while the kernel is traced.

    The state of the search is the round of the next exchange.

    Args:
      walk: the warpgroup at work.
      row: ``[]`` int32, a target row that has arrived.
      peak: ``[]`` float32, its largest entry.
    """

    def __init__(self, walk: Walk, row: jax.Array, peak: jax.Array):
        self.request = walk.request
        self.threads = walk.threads
        self.target = walk.target
        self.cluster = walk.cluster
        self.row = row
        self.peak = peak

    def run(self, round: jax.Array) -> tuple[Normalizer, jax.Array]:
        """Hide what is filtered out.

        Returns:
          What normalizes the rest, and the next round.
        """
        least, round = threshold.search(
            self.request.filter,
            self,
            round,
            size=self.target.size,
            bits=threshold.bits_of(self.target.matrix.dtype),
            candidates=1,
            peak=self.peak,
            inv_temperature=self.request.inv_temperature,
        )

        def hide(tile: jax.Array, _: list[jax.Array], total: jax.Array) -> jax.Array:
            self.target.hide(Below(least), self.row, tile)
            # Read again: entries from before would be kept in registers over the writes.
            return total + self.mass_of(self.target.of_tile(self.row, tile), least)

        total, round = self.everywhere(hide, round)
        return Normalizer(peak=self.peak, total=total, threshold=least), round

    # What is searched by: see `threshold.Amounts`.

    def count(
        self, candidate: threshold.Candidate, goal: jax.Array, round: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns whether enough entries reach the candidate; exact up to 2**24 ids per thread."""
        least = candidate(1)

        def add(_: jax.Array, entries: list[jax.Array], total: jax.Array) -> jax.Array:
            return total + tree_sum([jnp.where(x >= least, 1.0, 0.0) for x in entries])

        found, round = self.everywhere(add, round)
        return (found >= goal.astype(jnp.float32)).astype(jnp.int32), round

    def mass(
        self, candidate: threshold.Candidate, goal: jax.Array, round: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns whether the entries that reach the candidate have mass enough."""
        found, round = self.mass_from(candidate(1), round)
        return (found >= goal).astype(jnp.int32), round

    def total(
        self, least: jax.Array, wanted: jax.Array, round: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the mass from `least` on where it is wanted, else 1."""
        return lax.cond(
            wanted, lambda: self.mass_from(least, round), lambda: (jnp.float32(1), round)
        )

    def mass_from(self, least: jax.Array, round: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the mass of the row's entries from a threshold on, and the next round."""
        return self.everywhere(lambda _, entries, x: x + self.mass_of(entries, least), round)

    def mass_of(self, entries: list[jax.Array], least: jax.Array) -> jax.Array:
        """Returns the mass of a tile's entries from a threshold on, relative to the largest."""
        factor = self.request.factor
        return tree_sum(
            [jnp.where(x >= least, jnp.exp2((x - self.peak) * factor), 0.0) for x in entries]
        )

    def everywhere(self, add: TileStep, round: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a sum over the tiles of the whole row, ``[]``, and the next round."""
        mine = self.target.fold(self.row, None, add, self.threads.filled(0.0))
        (sums,), round = self.cluster.all_gather(round, self.threads.warp_sum(mine))
        return self.cluster.sum(sums), round


# The block rule.


class Prefix(NamedTuple):
    """The longest prefix that has passed the block rule so far.

    Attributes:
      length: ``[]`` int32.
      weight: ``[]`` float32, its joint weight.
      target: normalizer of the target row after it.
      draft: normalizer of the draft row after it.
      masses: of the residual there.
    """

    length: jax.Array
    weight: jax.Array
    target: Normalizer
    draft: Normalizer
    masses: Masses


class BlockRuleState(NamedTuple):
    """Where the block rule's walk stands.

    Attributes:
      position: ``[]`` int32, rows read.
      weight: ``[]`` float32, joint weight of all drafts before it.
      going: ``[]`` int32, whether the draft at `position` is to be looked at. As the next two not a
        bool, which Mosaic does not carry through a loop.
      ends: ``[]`` int32, whether all drafts were and pass.
      status: ``[]`` int32.
      round: ``[]`` int32, of the next exchange.
      kept: the longest prefix that passed.
    """

    position: jax.Array
    weight: jax.Array
    going: jax.Array
    ends: jax.Array
    status: jax.Array
    round: jax.Array
    kept: Prefix


class BlockRuleWalk:
    """The block rule: looks at every draft of a sampled request, keeps the longest passing prefix.

    Args:
      walk: the warpgroup at work, the only one of its CTA.
    """

    def __init__(self, walk: Walk):
        self.walk = walk
        self.request = walk.request
        self.plan = walk.plan
        self.threads = walk.threads
        self.drafted = walk.drafted
        self.target = walk.target

    def run(self, round: jax.Array) -> None:
        """Walk, draw the last token, write the output."""
        state = lax.while_loop(lambda state: state.going == 1, self.step, self.start(round))
        ok = state.status == OK
        position = state.position
        ends = ok & (state.ends == 1)

        @pl.when(~ok)
        def _() -> None:
            is_writer = self.walk.cluster.is_first_warp()
            self.request.write(position, jnp.int32(0), state.status, is_writer)

        @pl.when(ends)  # all drafts are accepted: the bonus token
        def _() -> None:
            result, after = self.walk.visit(position, state.round)
            self.walk.emit(position, result, after)

        pl.when(ok & ~ends)(lambda: self.recover(state))

    def start(self, round: jax.Array) -> BlockRuleState:
        """Returns the state before the first position."""
        zero = jnp.int32(0)
        one = jnp.float32(1)
        nothing = self.walk.nothing
        # The empty prefix passes, with the weight 1.
        kept = Prefix(
            length=zero,
            weight=one,
            target=nothing.target,
            draft=nothing.draft,
            masses=nothing.p_masses,
        )
        going = self.request.is_proposed(zero).astype(jnp.int32)
        return BlockRuleState(
            position=zero,
            weight=one,
            going=going,
            ends=1 - going,
            status=zero,
            round=round,
            kept=kept,
        )

    def step(self, state: BlockRuleState) -> BlockRuleState:
        """Look at one position: does the prefix before it pass, and what is its draft's weight?"""
        walk = self.walk
        request = self.request
        drafted = self.drafted
        position = state.position
        weight = state.weight
        if self.plan.has_draft_rows and not self.plan.sums_draft_rows:
            pl.when(drafted.has_q(position))(lambda: drafted.loads.prefetch(position))
        result, round = walk.visit(position, state.round)
        p_by_lane, q_by_lane = drafted.probabilities(result.target, result.draft)
        p = self.threads.at(p_by_lane, position)
        q = self.threads.at(q_by_lane, position)

        # S, the mass of (weight * p - q)+; of a one-hot draft without reading the row again.
        masses = state.kept.masses
        mass = rules.one_hot_residual_mass(weight, p)
        status = result.status
        if self.plan.has_draft_rows:

            def residual() -> tuple[Masses, jax.Array, jax.Array]:
                draw = Draw(walk.work, position, result, weight)
                found, after = draw.residual.masses(round)
                return found, found.total, after

            has_q = drafted.has_q(position)
            masses, mass, round = lax.cond(has_q, residual, lambda: (masses, mass, round))
            bad = (status == OK) & ~((mass >= 0) & (mass < jnp.inf))
            status = jnp.where(bad, jnp.int32(Status.BAD_DRAFT_ROW), status)

        # Does the prefix before this position pass? By the uniform of its last draft.
        last = self.threads.at(drafted.uniforms, jnp.maximum(position - 1, 0))
        passes = (position == 0) | rules.passes(last, weight, mass)
        now = Prefix(
            length=position,
            weight=weight,
            target=result.target,
            draft=result.draft,
            masses=masses,
        )
        kept = jax.tree.map(lambda new, old: jnp.where(passes, new, old), now, state.kept)

        # With its draft, and if that was the last one, does the whole pass?
        following_weight = rules.joint_weight(weight, p, q)
        ok = status == OK
        proposed = request.is_proposed(position + 1)
        going = ok & proposed & (following_weight > 0)
        own = self.threads.at(drafted.uniforms, position)
        ends = ok & ~proposed & rules.passes(own, following_weight, following_weight)
        pl.when((going | ends) & (position + 1 < request.num_rows))(
            lambda: _copy_row(request, self.target, position + 1)
        )
        return BlockRuleState(
            position=position + 1,
            weight=following_weight,
            going=going.astype(jnp.int32),
            ends=ends.astype(jnp.int32),
            status=status,
            round=round,
            kept=kept,
        )

    def recover(self, state: BlockRuleState) -> None:
        """Draw from the residual after the longest prefix that passed."""
        target = self.target
        kept = state.kept
        row = self.request.first_row + kept.length

        @pl.when(kept.length != state.position - 1)  # else the row is there
        def _() -> None:
            target.copy_again(row, rows_before=state.position)
            if self.plan.has_filter:
                limit = Below(kept.target.threshold)
                target.for_all(lambda tile: target.hide(limit, row, tile))

        result = self.walk.nothing._replace(target=kept.target, draft=kept.draft)
        has_q = self.drafted.has_q(kept.length)
        weights = TileWeights(
            tries=has_q.astype(jnp.int32),  # of a one-hot draft nothing was summed
            from_residual=has_q,
            masses=kept.masses,
            round=state.round,
        )
        Draw(self.walk.work, kept.length, result, kept.weight).finish(weights)
