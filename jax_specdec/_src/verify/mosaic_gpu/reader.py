"""Reading the rows of one position: what normalizes them, or the target row's argmax.

Each warp reads its part of the rows, then all warps of the cluster exchange what they found, and
every warp makes the same of it. Filters are here too: they read the row again and again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.base.types import Status
from jax_specdec._src.rows import threshold
from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, Masses, tree_sum
from jax_specdec._src.verify.mosaic_gpu.drafted import SummedQ, Work
from jax_specdec._src.verify.mosaic_gpu.request import KernelRequest
from jax_specdec._src.verify.mosaic_gpu.rows import Below, DraftSlice, TileStep
from jax_specdec._src.verify.mosaic_gpu.statistics import Normalizer, is_finite


class PositionResult(NamedTuple):
    """Result of reading the rows of a position: the kernel's share of `position.Position`.

    Every warp of the cluster has the same.
    """

    accepted: jax.Array  # [] int32, 0 or 1
    status: jax.Array  # [] int32
    target: Normalizer  # normalizer of the target row; of a sampled request
    draft: Normalizer  # normalizer of the draft row; where normalizers are not stored
    argmax: jax.Array  # [] int32, of the target row; of a greedy request
    p_masses: Masses  # of the target row's tiles, where they were summed; else their total is 0

    @classmethod
    def nothing(cls, cluster: Cluster) -> PositionResult:
        """Returns what stands for a position not visited."""
        zero = jnp.int32(0)
        unit = Normalizer.of(jnp.float32(0), jnp.float32(1))
        return cls(
            accepted=zero,
            status=jnp.int32(Status.OK),
            target=unit,
            draft=unit,
            argmax=zero,
            p_masses=cluster.no_masses(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """Reading the rows of one position: their argmax, or what normalizes them.

    Each warp reads its part; then all exchange what they found. Masses are relative to the entry of
    the drafted token, which all know beforehand: nothing has to be compared. Where that entry is
    too far from the others, the rows are read again for their largest entries.

    From a row without a draft the last token is drawn, by the target alone: the masses of its tiles
    are summed while it is read.
    """

    work: Work  # what the warpgroup has in hand
    nothing: PositionResult  # stands for a position not visited
    row: jax.Array  # [] int32, the target row, whose copy is under way
    rows_before: jax.Array  # [] int32, rows that were copied before it
    base: jax.Array  # [] float32, what masses of the target row are relative to
    # [] bool, whether the row's largest entry is wanted: for the argmax, a filter, or an output.
    needs_peak: jax.Array
    may_sum_masses: bool  # whether the masses of tiles are summed at once where that serves
    sums_masses: jax.Array  # [] bool, whether it serves here
    draft: NoDraftRow | DraftRow  # the draft row, if it is read too

    @classmethod
    def of(
        cls, work: Work, nothing: PositionResult, position: jax.Array, rows_before: jax.Array
    ) -> Reader:
        """Returns that of a position, ``[]`` int32."""
        request = work.request
        plan = request.plan
        drafted = work.drafted
        row = request.first_row + position
        # A greedy request needs the argmax. A filter counts from the largest entry down.
        needs_peak = request.greedy
        if plan.has_filter:
            needs_peak = request.greedy | request.is_filtered
        if request.samples_draft:  # the maximum of its row is asked for
            needs_peak = jnp.bool_(True)
        # Where nothing was proposed, the token is drawn from this row, whatever it holds.
        may_sum_masses = plan.is_plain and not request.samples_draft
        sums_masses = jnp.bool_(False)
        if may_sum_masses:
            sums_masses = ~request.greedy & ~request.is_proposed(position)
        base = _base_at(request, position, drafted.loads.logit)
        draft: NoDraftRow | DraftRow = NoDraftRow()
        if isinstance(drafted.q, SummedQ) and isinstance(work.draft, DraftSlice):
            draft = DraftRow(
                work=work,
                slice=work.draft.by_column,
                is_used=request.threads.at(drafted.uses_q, position),
                row=request.threads.at(drafted.loads.draft_row, position),
                base=_base_at(request, position, drafted.q.entry),
            )
        return cls(
            work=work,
            nothing=nothing,
            row=row,
            rows_before=rows_before,
            base=base,
            needs_peak=needs_peak,
            may_sum_masses=may_sum_masses,
            sums_masses=sums_masses,
            draft=draft,
        )

    def read(self, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Returns what the rows gave, not judged yet; and the next round."""
        if not self.may_sum_masses:
            return self.look(round)
        request = self.work.request
        masses, round = lax.cond(
            self.sums_masses,
            lambda: self.tile_masses(round),
            lambda: (self.nothing.p_masses, round),
        )
        # All that anybody needs of a row that is drawn from, unless the base was of no use: then it
        # is read once more. The same test sends all other rows there, whose total is 0.
        target = Normalizer.of(self.base, masses.total)
        result = self.nothing._replace(target=target, p_masses=masses)
        usable = statistics.is_usable(masses.total, self.base, request.factor)
        return lax.cond(usable, lambda: (result, round), lambda: self.look(round))

    def tile_masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """Returns the masses of all tiles of the row, and the next round."""
        target = self.work.target
        factor = self.work.request.factor
        # While tiles arrive: each warp's part of each tile, then of all warps the sum.
        weights = statistics.weight_function(self.base, factor, target.entry_size)
        mine = statistics.tile_masses(target, self.row, self.rows_before, weights)
        return self.work.cluster.gather_masses(round, mine)

    def look(self, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Returns what the rows gave, and the next round: read, then filter."""
        request = self.work.request
        cluster = self.work.cluster
        draft = self.draft
        draft.prefetch()  # while the target row is read
        # What each warp finds, [128] each. Of the target row: its maximum and the place of that, or
        # anything and its mass. Of the draft row, if it is read: anything and its mass. Both ways
        # send as many values, for all warps of the cluster must take part in one exchange.
        mine = lax.cond(
            self.needs_peak,
            lambda: statistics.max_and_place(self.work.target, self.row, self.rows_before),
            self.mass,
        )
        of_draft = draft.mass()
        found, round = cluster.all_gather(round, *mine, *of_draft)
        best, target = lax.cond(
            self.needs_peak,
            lambda: _argmax(cluster, found[0], found[1]),
            lambda: (jnp.int32(0), Normalizer.of(self.base, cluster.sum(found[1]))),
        )
        # Were the drafted token's entries of the order of their rows' largest? If not, the rows are
        # read again: the target row is still in shared memory, the draft row in the L2 cache.
        usable = self.needs_peak | statistics.is_usable(target.total, self.base, request.factor)
        of_draft_row = draft.normalizer(found[2:], self.nothing.draft)
        usable = draft.confirms(usable, of_draft_row)
        target, of_draft_row, round = lax.cond(
            usable,
            lambda: (target, of_draft_row, round),
            lambda: self.read_again(of_draft_row, round),
        )
        # A filter hides entries in shared memory, for whoever draws from the row, and gives the
        # mass of what is left. A row without a finite maximum has nothing to filter.
        if request.plan.has_filter:
            target, round = lax.cond(
                request.is_filtered & is_finite(target.peak),
                lambda: RowFilter(self.work, self.row, target.peak).run(round),
                lambda: (target, round),
            )
        result = self.nothing._replace(target=target, draft=of_draft_row, argmax=best)
        return result, round

    def mass(self) -> tuple[jax.Array, jax.Array]:
        """Returns anything, and each warp's mass; 0 if the masses of tiles were of no use."""
        nothing = self.work.request.threads.filled(0.0)
        factor = self.work.request.factor
        return nothing, lax.cond(
            self.sums_masses,
            lambda: nothing,
            lambda: statistics.mass(
                self.work.target, self.row, self.rows_before, self.base, factor
            ),
        )

    def read_again(
        self, of_draft_row: Normalizer, round: jax.Array
    ) -> tuple[Normalizer, Normalizer, jax.Array]:
        """Returns normalizers by the largest entries, and the next round; the rows are there."""
        factor = self.work.request.factor
        cluster = self.work.cluster
        # Each warp by its own maximum, in one pass; the maxima are compared after the exchange.
        mine = statistics.max_and_sum(self.work.target, self.row, factor)
        of_draft = self.draft.max_and_sum()
        found, round = cluster.all_gather(round, *mine, *of_draft)
        target = _by_largest(cluster, factor, found[0], found[1])
        return target, self.draft.by_largest(found[2:], of_draft_row), round


class NoDraftRow:
    """Stands for the draft row of a position where none is read to normalize it."""

    def prefetch(self) -> None:
        """Does nothing."""

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
    """The draft row of a position, which is read beside the target row to normalize it."""

    work: Work  # what the warpgroup has in hand
    slice: DraftSlice  # draft rows, in the order of columns
    row: jax.Array  # [] int32
    is_used: jax.Array  # [] bool; if not, nothing is read and its mass is 1
    base: jax.Array  # [] float32, what its mass is relative to

    def prefetch(self) -> None:
        """Begins to fetch it into the L2 cache."""
        pl.when(self.is_used)(lambda: self.slice.prefetch(self.row))

    def mass(self) -> tuple[jax.Array, ...]:
        """Returns anything, and each warp's mass."""
        filled = self.work.request.threads.filled
        factor = self.work.request.factor
        # [128] each: what a row that is not read stands for
        nothing = filled(0.0), filled(1.0)
        return lax.cond(
            self.is_used,
            lambda: (
                filled(0.0),
                statistics.mass(self.slice, self.row, None, self.base, factor),
            ),
            lambda: nothing,
        )

    def max_and_sum(self) -> tuple[jax.Array, ...]:
        """Returns each warp's maximum, and its mass relative to that."""
        filled = self.work.request.threads.filled
        factor = self.work.request.factor
        nothing = filled(0.0), filled(1.0)
        return lax.cond(
            self.is_used,
            lambda: statistics.max_and_sum(self.slice, self.row, factor),
            lambda: nothing,
        )

    def normalizer(self, found: list[list[jax.Array]], other: Normalizer) -> Normalizer:
        """Returns its normalizer, from what all warps found by `mass`."""
        _, masses = found
        return Normalizer.of(self.base, self.work.cluster.sum(masses))

    def by_largest(self, found: list[list[jax.Array]], other: Normalizer) -> Normalizer:
        """Returns its normalizer, from what all warps found by `max_and_sum`."""
        peaks, sums = found
        return _by_largest(self.work.cluster, self.work.request.factor, peaks, sums)

    def confirms(self, usable: jax.Array, row: Normalizer) -> jax.Array:
        """Returns whether `usable`, and its mass too if it counts."""
        # A row that is not read confirms everything.
        is_usable = statistics.is_usable(row.total, row.peak, self.work.request.factor)
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
    # After the last draft nothing is proposed, and no entry is known. Neighbouring rows are alike.
    last = jnp.maximum(request.num_drafts - 1, 0)
    return statistics.base_of(request.threads.at(by_lane, jnp.minimum(position, last)))


# What all warps have, from what each has.


def _argmax(
    cluster: Cluster, peaks: list[jax.Array], places: list[jax.Array]
) -> tuple[jax.Array, Normalizer]:
    """Returns the least of the places of the row's largest entry, and that entry."""
    peak = cluster.max(peaks)
    # By lane, the place that a warp found if its maximum is that of the row. The least of them is
    # the lowest id.
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
    # By lane: each warp's mass, scaled down from its own maximum to the row's.
    masses = [
        jnp.where(x > -jnp.inf, mass * statistics.decay(x, peak, factor), 0.0)
        for x, mass in zip(peaks, sums, strict=True)
    ]
    return Normalizer.of(peak, cluster.sum(masses))


class RowFilter:
    """Min-p, top-k and top-p of a row: what `threshold.search` reads, while the kernel is traced.

    The state of the search is the round of the next exchange.

    Args:
      work: what the warpgroup has in hand.
      row: ``[]`` int32, a target row that has arrived.
      peak: ``[]`` float32, its largest entry.
    """

    def __init__(self, work: Work, row: jax.Array, peak: jax.Array):
        self.request = work.request
        self.threads = work.request.threads
        self.target = work.target
        self.cluster = work.cluster
        self.row = row
        self.peak = peak

    def run(self, round: jax.Array) -> tuple[Normalizer, jax.Array]:
        """Hides what is filtered out.

        Returns:
          What normalizes the rest, and the next round.
        """
        # Each step of the search reads the whole row in shared memory, and ends with an exchange.
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

        # The last pass hides what is below the threshold, and sums the rest.
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
        least = candidate(1)  # one candidate at a time is tested

        # Counted in float32, which all exchanges send.
        def add(_: jax.Array, entries: list[jax.Array], total: jax.Array) -> jax.Array:
            return total + tree_sum([jnp.where(x >= least, 1.0, 0.0) for x in entries])

        # []: how many entries of the row reach it
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
        # A sum for each thread, for each warp, then for the cluster: every warp has it.
        mine = self.target.fold(self.row, None, add, self.threads.filled(0.0))
        (sums,), round = self.cluster.all_gather(round, self.threads.warp_sum(mine))
        return self.cluster.sum(sums), round
