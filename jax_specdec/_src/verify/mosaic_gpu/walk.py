"""One request's walk: read a row, judge its draft, go on; then draw.

A cluster of blocks verifies one request. Every block has one slice of a target row in shared
memory, and all make the same decisions from the same numbers. A row is read once its position is
reached, or with the one before it where a block has several warpgroups. The row to draw from is
still there when that is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify import rules, threshold
from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, Masses, Warpgroups, tree_sum
from jax_specdec._src.verify.mosaic_gpu.draw import Draw, PositionResult, TileWeights
from jax_specdec._src.verify.mosaic_gpu.lists import Candidates, MappedSlice
from jax_specdec._src.verify.mosaic_gpu.plan import Plan
from jax_specdec._src.verify.mosaic_gpu.request import (
    DraftedTokens,
    DraftLoads,
    KernelRequest,
    Operands,
    Outputs,
    RequestLoads,
    Work,
)
from jax_specdec._src.verify.mosaic_gpu.rows import DraftSlice, TargetSlice, TileStep
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
    draft: DraftSlice | Candidates | None,
    cluster: Cluster,
    warpgroups: Warpgroups,
) -> None:
    """The kernel: what each warpgroup does for one request.

    What is loaded and copied, and when, is decided here. Each load begins as early as its address
    is known, and what does not need it comes between.
    """
    loads = RequestLoads(plan, threads, operands, index)
    # This PTX keeps the loads above in place: all of them are in flight.
    threads.init_barriers(cluster.barriers, plan.memory.barriers)
    request = KernelRequest(plan, threads, operands, outputs, index, loads)
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
        if warpgroups.count > 1 and draft is not None:
            uses_q = threads.at(draft_loads.uses_q, position)
            pl.when(uses_q)(lambda: draft_loads.prefetch(position))
        if not by_rate:
            uniforms = request.uniforms()
        drafted = DraftedTokens(draft_loads, uniforms)
        threads.cluster_wait()
        Walk(Work(request, target, draft, drafted, cluster), warpgroups).run(position)

    @pl.when(~ok)
    def _() -> None:
        threads.cluster_wait()
        zero = jnp.int32(0)
        request.write(zero, zero, request.status, cluster.is_first_warp())


def _accepted_by_rate(request: KernelRequest, uniforms: jax.Array) -> jax.Array:
    """How many drafts the synthetic rule accepts, ``[]`` int32."""
    lane, threads = request.lane, request.threads
    rate = threads.filled(0.0)
    for i, value in enumerate(request.plan.rule.conditional_rates or ()):
        rate = jnp.where(lane == i, jnp.float32(value), rate)
    accepted = request.proposed & rules.accepts_synthetic(uniforms, rate)
    rejected = jnp.where(accepted & (lane < request.plan.k), WARP, lane)
    return threads.scalar(threads.warp_min(rejected))


def _copy_row(request: KernelRequest, target: TargetSlice, position: jax.Array) -> None:
    """Begin to copy the target row of a position, if there is one."""
    pl.when(position < request.num_rows)(lambda: target.copy(request.first_row + position))


class Walk:
    """One warpgroup at work on one request, while the kernel is traced.

    Args:
      work: what it has in hand.
      warpgroups: those of this block.

    Attributes:
      nothing: stands for a position not visited.
    """

    def __init__(self, work: Work, warpgroups: Warpgroups):
        self.work, self.warpgroups = work, warpgroups
        self.request, self.target, self.draft, self.drafted, self.cluster = work
        self.plan, self.threads = work.request.plan, work.request.threads
        self.nothing = PositionResult.nothing(self.cluster)

    def run(self, position: jax.Array) -> None:
        """Walk from `position` on, draw the last token, write the output.

        The copy of its target row is under way, if it has one.
        """
        request, rule, round = self.request, self.plan.rule, jnp.int32(0)
        if isinstance(rule, rules.Synthetic):  # the one row that the last token comes from
            self.emit(position, *self.visit(position, round))
        elif not isinstance(rule, rules.Block):
            self.walk_and_emit(round)
        else:
            pl.when(request.greedy)(lambda: self.walk_and_emit(round))
            pl.when(~request.greedy)(lambda: BlockWalk(self).run(round))

    def walk_and_emit(self, round: jax.Array) -> None:
        """Positions in order, one for each warpgroup, until one is not accepted: that one emits."""
        warpgroups = self.warpgroups

        def goes_on(state: tuple[jax.Array, Any, jax.Array, jax.Array]) -> jax.Array:
            _, _, _, first = state
            return first == warpgroups.count

        def step(state: tuple[jax.Array, Any, jax.Array, jax.Array]) -> Any:
            position, _, round, _ = state
            result, round = self.visit(position, round)
            first = warpgroups.first(result.accepted == 0, position)
            pl.when(first == warpgroups.count)(
                lambda: _copy_row(self.request, self.target, position + warpgroups.count)
            )
            return position + warpgroups.count, result, round, first

        start = warpgroups.index, self.nothing, round, jnp.int32(warpgroups.count)
        following, result, round, first = lax.while_loop(goes_on, step, start)
        pl.when(first == warpgroups.index)(
            lambda: self.emit(following - warpgroups.count, result, round)
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
        request, drafted = self.request, self.drafted
        by_rate = isinstance(self.plan.rule, rules.Synthetic)
        rows_before = jnp.int32(0) if by_rate else self.warpgroups.rows_before(position)
        result, round = Reader(self, position, rows_before).read(round)
        bad_target = ~is_finite(result.scale.peak)
        bad_draft = drafted.bad | (drafted.uses_q & ~is_finite(result.draft_scale.peak))

        accepted = self.threads.filled(0, jnp.int32)
        if not by_rate:
            p, q = drafted.probabilities(result.scale, result.draft_scale)
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
        """The accepted tokens, then one drawn from the row that was read last."""
        request = self.request
        visited = num_accepted < request.num_rows
        draws = visited & (result.status == OK) & ~request.greedy

        @pl.when(~draws)
        def _() -> None:
            token_id = jnp.where(visited, result.argmax, request.bonus)
            is_writer = self.cluster.is_first_warp()
            request.write(num_accepted, token_id, result.status, is_writer)
            if request.samples_draft:
                request.write_row(result.scale, is_writer)

        pl.when(draws)(lambda: Draw(self.work, num_accepted, result).run(round))


class Reader:
    """Reading the rows of one position: their argmax, or what normalizes them.

    Each warp reads its part; then all exchange what they found. Masses are relative to the entry of
    the drafted token, which all know beforehand: nothing has to be compared. Where that entry is
    too far from the others, the rows are read again for their largest entries.

    From a row without a draft the last token is drawn, by the target alone: the masses of its tiles
    are summed while it is read.

    Args:
      walk: the warpgroup at work.
      position: ``[]`` int32; the copy of its target row is under way.
      rows_before: ``[]`` int32, rows that were copied before it.
    """

    def __init__(self, walk: Walk, position: jax.Array, rows_before: jax.Array):
        request, self.target, draft, self.drafted, self.cluster = walk.work
        self.request, self.position, self.rows_before = request, position, rows_before
        self.threads, self.plan, self.nothing = walk.threads, walk.plan, walk.nothing
        self.row, self.scale = request.first_row + position, request.scale
        filters = request.filters
        self.needs_peak = request.greedy if filters is None else request.greedy | filters
        if request.samples_draft:  # the maximum of its row is asked for
            self.needs_peak = jnp.bool_(True)
        self.sums_masses = jnp.bool_(False)
        self.sums_first = self.plan.is_plain and not request.samples_draft
        if self.sums_first:
            self.sums_masses = ~request.greedy & ~request.is_proposed(position)
        self.target_base = self.base(self.drafted.loads.logit)
        self.draft: DraftSlice | None = None
        if isinstance(draft, DraftSlice) and self.plan.sums_draft_rows:
            self.draft = draft.storage if isinstance(draft, MappedSlice) else draft
            self.uses_q = self.threads.at(self.drafted.uses_q, position)
            self.draft_row = self.threads.at(self.drafted.loads.draft_row, position)
            assert self.drafted.entry is not None
            self.draft_base = self.base(self.drafted.entry)

    def read(self, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Read; the result is not judged. And the next round."""
        if not self.sums_first:
            return self.look(round)
        masses, round = lax.cond(
            self.sums_masses,
            lambda: self.tile_masses(round),
            lambda: (self.nothing.p_masses, round),
        )
        target = Normalizer.of(self.target_base, masses.total)
        result = self.nothing._replace(scale=target, p_masses=masses)
        usable = statistics.is_usable(masses.total, self.target_base, self.scale)
        return lax.cond(usable, lambda: (result, round), lambda: self.look(round))

    def tile_masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """The masses of the tiles of a row that is drawn from: all that anybody needs of it."""
        weights = statistics.weight_function(self.target_base, self.scale, self.target.entry_size)
        mine = statistics.tile_masses(self.target, self.row, self.rows_before, weights)
        return self.cluster.gather_masses(round, mine)

    def look(self, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Read, and filter."""
        draft = self.draft
        if draft is not None:
            pl.when(self.uses_q)(lambda: draft.prefetch(self.draft_row))
        mine = lax.cond(
            self.needs_peak,
            lambda: statistics.max_and_place(self.target, self.row, self.rows_before),
            self.target_mass,
        )
        parts = self.if_q(self.draft_mass) if draft is not None else ()
        (first, second, *of_draft), round = self.cluster.all_gather(round, *mine, *parts)
        best, target_row = lax.cond(
            self.needs_peak,
            lambda: self.argmax(first, second),
            lambda: (jnp.int32(0), Normalizer.of(self.target_base, self.cluster.sum(second))),
        )
        usable = self.needs_peak | statistics.is_usable(
            target_row.total, self.target_base, self.scale
        )
        draft_row = self.nothing.draft_scale
        if draft is not None:
            draft_row = Normalizer.of(self.draft_base, self.cluster.sum(of_draft[1]))
            usable &= ~self.uses_q | statistics.is_usable(
                draft_row.total, draft_row.peak, self.scale
            )
        target_row, draft_row, round = lax.cond(
            usable,
            lambda: (target_row, draft_row, round),
            lambda: self.read_again(draft_row, round),
        )
        if self.request.filters is not None:
            target_row, round = lax.cond(
                self.request.filters & is_finite(target_row.peak),
                lambda: RowFilter(self, target_row.peak).run(round),
                lambda: (target_row, round),
            )
        result = self.nothing._replace(scale=target_row, draft_scale=draft_row, argmax=best)
        return result, round

    def read_again(
        self, draft_row: Normalizer, round: jax.Array
    ) -> tuple[Normalizer, Normalizer, jax.Array]:
        """Normalizers by the largest entries; the rows have arrived."""
        mine = statistics.max_and_sum(self.target, self.row, self.scale)
        parts: tuple[jax.Array, ...] = ()
        if self.draft is not None:
            parts = self.if_q(lambda x: statistics.max_and_sum(x, self.draft_row, self.scale))
        (peaks, sums, *of_draft), round = self.cluster.all_gather(round, *mine, *parts)
        target_row = self.by_largest(peaks, sums)
        return target_row, self.by_largest(*of_draft) if of_draft else draft_row, round

    # What each warp finds in its part of the rows.

    def target_mass(self) -> tuple[jax.Array, jax.Array]:
        """Nothing that anybody needs, and the mass; 0 if the masses of tiles were of no use."""
        nothing = self.threads.filled(0.0)
        return nothing, lax.cond(
            self.sums_masses,
            lambda: nothing,
            lambda: statistics.mass(
                self.target, self.row, self.rows_before, self.target_base, self.scale
            ),
        )

    def if_q(
        self, read: Callable[[DraftSlice], tuple[jax.Array, jax.Array]]
    ) -> tuple[jax.Array, jax.Array]:
        """What `read` gives of the draft row, if that counts."""
        draft = self.draft
        assert draft is not None
        nothing = self.threads.filled(0.0), self.threads.filled(1.0)
        return lax.cond(self.uses_q, lambda: read(draft), lambda: nothing)

    def draft_mass(self, draft: DraftSlice) -> tuple[jax.Array, jax.Array]:
        """As `target_mass`."""
        return self.threads.filled(0.0), statistics.mass(
            draft, self.draft_row, None, self.draft_base, self.scale
        )

    # What all warps have, from what each has.

    def base(self, by_lane: jax.Array) -> jax.Array:
        """An entry of the order of a row's largest: that of its draft, or else of the last one's.

        Args:
          by_lane: the drafted tokens' entries.

        Returns:
          ``[]`` float32, finite.
        """
        last = jnp.maximum(self.request.num_drafts - 1, 0)
        return statistics.base_of(self.threads.at(by_lane, jnp.minimum(self.position, last)))

    def argmax(
        self, peaks: list[jax.Array], places: list[jax.Array]
    ) -> tuple[jax.Array, Normalizer]:
        """The least of the places of the row's largest entry, and that entry."""
        peak = self.cluster.max(peaks)
        found = [
            jnp.where(m == peak, lax.bitcast_convert_type(p, jnp.int32), jnp.int32(2**30))
            for m, p in zip(peaks, places, strict=True)
        ]
        best = self.threads.warp_min(functools.reduce(jnp.minimum, found))
        return self.threads.scalar(best), Normalizer.of(peak, jnp.float32(1))

    def by_largest(self, peaks: list[jax.Array], sums: list[jax.Array]) -> Normalizer:
        """From each warp's largest entry, and its mass relative to that."""
        peak, scale = self.cluster.max(peaks), self.request.scale
        masses = [
            jnp.where(m > -jnp.inf, s * statistics.decay(m, peak, scale), 0.0)
            for m, s in zip(peaks, sums, strict=True)
        ]
        return Normalizer.of(peak, self.cluster.sum(masses))


class RowFilter:
    """Min-p, top-k and top-p of a row: what `threshold.search` reads, while the kernel is traced.

    The state of the search is the round of the next exchange.

    Args:
      reader: of the target row, which has arrived.
      peak: ``[]`` float32, its largest entry.
    """

    def __init__(self, reader: Reader, peak: jax.Array):
        self.reader, self.row, self.peak = reader, reader.row, peak
        self.request, self.threads = reader.request, reader.threads
        self.target, self.cluster = reader.target, reader.cluster

    def run(self, round: jax.Array) -> tuple[Normalizer, jax.Array]:
        """Hide what is filtered out.

        Returns:
          What normalizes the rest, and the next round.
        """
        assert self.request.filter is not None
        least, round = threshold.search(
            self.request.filter,
            self,
            round,
            size=self.target.size,
            bits=threshold.bits_of(self.target.rows.dtype),
            candidates=1,
            peak=self.peak,
            inv_temperature=self.request.inv,
        )

        def hide(tile: jax.Array, _: list[jax.Array], total: jax.Array) -> jax.Array:
            self.target.hide_below(least, self.row, tile)
            # Read again: entries from before would be kept in registers over the writes.
            return total + self.mass_of(self.target.of_tile(self.row, tile), least)

        total, round = self.everywhere(hide, round)
        return Normalizer(self.peak, total, least), round

    # What is searched by.

    def count(
        self, candidate: threshold.Candidate, goal: jax.Array, round: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """How many entries there are; exact up to 2**24 ids per thread."""
        least = candidate(1)

        def add(_: jax.Array, entries: list[jax.Array], total: jax.Array) -> jax.Array:
            return total + tree_sum([jnp.where(x >= least, 1.0, 0.0) for x in entries])

        found, round = self.everywhere(add, round)
        return (found >= goal.astype(jnp.float32)).astype(jnp.int32), round

    def mass(
        self, candidate: threshold.Candidate, goal: jax.Array, round: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        found, round = self.mass_from(candidate(1), round)
        return (found >= goal).astype(jnp.int32), round

    def total(
        self, least: jax.Array, wanted: jax.Array, round: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return lax.cond(
            wanted, lambda: self.mass_from(least, round), lambda: (jnp.float32(1), round)
        )

    def mass_from(self, least: jax.Array, round: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mass of the row's entries from a threshold on, and the next round."""
        return self.everywhere(lambda _, entries, x: x + self.mass_of(entries, least), round)

    def mass_of(self, entries: list[jax.Array], least: jax.Array) -> jax.Array:
        """The same of a tile, relative to the largest entry."""
        scale = self.request.scale
        return tree_sum(
            [jnp.where(x >= least, jnp.exp2((x - self.peak) * scale), 0.0) for x in entries]
        )

    def everywhere(self, add: TileStep, round: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A sum over the tiles of the whole row, ``[]``, and the next round."""
        mine = self.target.fold(self.row, None, add, self.threads.filled(0.0))
        (sums,), round = self.cluster.all_gather(round, self.threads.warp_sum(mine))
        return self.cluster.sum(sums), round


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


class BlockState(NamedTuple):
    """Where the block rule's walk stands.

    Attributes:
      position: ``[]`` int32, rows read.
      weight: ``[]`` float32, joint weight of all drafts before it.
      going: ``[]`` int32, whether the draft at `position` is to be looked at.
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


class BlockWalk:
    """The block rule: looks at every draft of a sampled request, keeps the longest passing prefix.

    Args:
      walk: the warpgroup at work, the only one of its block.
    """

    def __init__(self, walk: Walk):
        self.walk, self.request, self.plan = walk, walk.request, walk.plan
        self.threads, self.drafted = walk.threads, walk.drafted
        self.target, self.draft = walk.target, walk.draft

    def run(self, round: jax.Array) -> None:
        """Walk, draw the last token, write the output."""
        state = lax.while_loop(lambda state: state.going == 1, self.step, self.start(round))
        ok, position = state.status == OK, state.position
        ends = ok & (state.ends == 1)

        @pl.when(~ok)
        def _() -> None:
            is_writer = self.walk.cluster.is_first_warp()
            self.request.write(position, jnp.int32(0), state.status, is_writer)

        @pl.when(ends)
        def _() -> None:
            self.walk.emit(position, *self.walk.visit(position, state.round))

        pl.when(ok & ~ends)(lambda: self.recover(state))

    def start(self, round: jax.Array) -> BlockState:
        """Before the first position."""
        zero, one, nothing = jnp.int32(0), jnp.float32(1), self.walk.nothing
        kept = Prefix(zero, one, nothing.scale, nothing.draft_scale, nothing.p_masses)
        going = self.request.is_proposed(zero).astype(jnp.int32)
        return BlockState(zero, one, going, 1 - going, zero, round, kept)

    def step(self, state: BlockState) -> BlockState:
        """Look at one position: does the prefix before it pass, and what is its draft's weight?"""
        walk, request, drafted = self.walk, self.request, self.walk.drafted
        position, weight = state.position, state.weight
        if self.draft is not None and not self.plan.sums_draft_rows:
            pl.when(drafted.has_q(position))(lambda: drafted.loads.prefetch(position))
        result, round = walk.visit(position, state.round)
        by_lane = drafted.probabilities(result.scale, result.draft_scale)
        p, q = (self.threads.at(x, position) for x in by_lane)

        masses, mass = state.kept.masses, rules.one_hot_residual_mass(weight, p)
        status = result.status
        if self.draft is not None:

            def residual() -> tuple[Masses, jax.Array, jax.Array]:
                found, after = Draw(walk.work, position, result, weight).residual_masses(round)
                return found, found.total, after

            has_q = drafted.has_q(position)
            masses, mass, round = lax.cond(has_q, residual, lambda: (masses, mass, round))
            bad = (status == OK) & ~((mass >= 0) & (mass < jnp.inf))
            status = jnp.where(bad, jnp.int32(Status.BAD_DRAFT_ROW), status)

        last = self.threads.at(self.drafted.uniforms, jnp.maximum(position - 1, 0))
        passes = (position == 0) | rules.passes(last, weight, mass)
        now = Prefix(position, weight, result.scale, result.draft_scale, masses)
        kept = jax.tree.map(lambda new, old: jnp.where(passes, new, old), now, state.kept)

        following_weight = rules.joint_weight(weight, p, q)
        ok = status == OK
        proposed = request.is_proposed(position + 1)
        going = ok & proposed & (following_weight > 0)
        own = self.threads.at(self.drafted.uniforms, position)
        ends = ok & ~proposed & rules.passes(own, following_weight, following_weight)
        pl.when((going | ends) & (position + 1 < request.num_rows))(
            lambda: _copy_row(request, self.target, position + 1)
        )
        return BlockState(
            position + 1,
            following_weight,
            going.astype(jnp.int32),
            ends.astype(jnp.int32),
            status,
            round,
            kept,
        )

    def recover(self, state: BlockState) -> None:
        """Draw from the residual after the longest prefix that passed."""
        request, target, kept = self.request, self.target, state.kept
        row = request.first_row + kept.length

        @pl.when(kept.length != state.position - 1)  # else the row is there
        def _() -> None:
            target.copy_again(row, rows_before=state.position)
            if request.filters is not None:
                least = kept.target.threshold
                target.for_all(lambda tile: target.hide_below(least, row, tile))

        result = self.walk.nothing._replace(scale=kept.target, draft_scale=kept.draft)
        has_q = self.walk.drafted.has_q(kept.length)
        tries = has_q.astype(jnp.int32)
        Draw(self.walk.work, kept.length, result, kept.weight).finish(
            TileWeights(tries, has_q, kept.masses, state.round)
        )
