"""The last token: a two-level inverse CDF over the row that was read last, then the output.

The first uniform picks a tile by the masses of tiles, the second an id in it: in the CTA that has
the tile, sums of its chunks by warp pick the warp, then its threads, then an id of one thread.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.base.types import Status
from jax_specdec._src.mosaic.threads import WARP, WARPS, Threads
from jax_specdec._src.rows.tiles import TILE
from jax_specdec._src.verify.mosaic_gpu.cluster import Masses, tree_sum
from jax_specdec._src.verify.mosaic_gpu.drafted import Work
from jax_specdec._src.verify.mosaic_gpu.lists import CandidateRows
from jax_specdec._src.verify.mosaic_gpu.reader import PositionResult
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, DraftSlice, NoDraftRows
from jax_specdec._src.verify.mosaic_gpu.statistics import (
    Exponent,
    GivenProbability,
    Probability,
    TileSums,
    excess,
    tile_masses,
)

NONE = 2**24
"""Greater than any place."""


class TileWeights(NamedTuple):
    """The masses to draw a tile by."""

    # [] int32, how often they have been summed: 0, or 1 by the weights of the position, or 2 by p,
    # because those were 0 everywhere.
    tries: jax.Array
    from_residual: jax.Array  # [] bool, whether by (p - q)+; else by p
    masses: Masses  # of the tiles
    round: jax.Array  # [] int32, of the next exchange


class Draw:
    """Drawing the recovered or bonus token of a sampled request, while the kernel is traced.

    The weights are one of three: ``(weight * p - q)+`` where a draft with a draft distribution was
    rejected; ``p`` without the draft where a one-hot draft was; else ``p``.

    Args:
      work: what the warpgroup has in hand.
      position: ``[]`` int32, the one whose target row is in shared memory.
      result: what its rows gave.
      weight: ``[]`` float32, joint weight of the drafts before it; or the number 1, for which
        nothing is traced.
    """

    def __init__(
        self,
        work: Work,
        position: jax.Array,
        result: PositionResult,
        weight: jax.Array | int = 1,
    ):
        self.request = work.request
        self.target = work.target
        self.drafted = work.drafted
        self.cluster = work.cluster
        self.threads = work.request.threads
        self.position = position
        self.result = result
        threads = self.threads
        loads = work.drafted.loads
        self.row = work.request.first_row + position
        self.rejected = work.request.is_proposed(position)
        self.from_residual = self.rejected & work.drafted.has_q(position)
        self.token_id = threads.at(work.request.token_ids, position)
        self.logit = threads.at(loads.logit, position)
        self.p = result.target.exponent(work.request.factor)
        weighted = self.p if isinstance(weight, int) else self.p.times(weight)
        self.residual: NoResidual | RowResidual | ListedResidual = NoResidual(work)
        if isinstance(work.draft, NoDraftRows):
            return
        # What turns entries of the draft row into q, and the residual by it.
        draft_row = threads.at(loads.draft_row, position)
        q = work.drafted.probability_at(position, result.draft)
        if isinstance(work.draft, CandidateRows):
            draft = dataclasses.replace(work.draft, q=q)
            self.residual = ListedResidual(work, self.row, draft_row, weighted, draft)
        else:
            self.residual = RowResidual(work, self.row, draft_row, weighted, work.draft, q)

    def run(self, round: jax.Array) -> None:
        """Sums the tiles' weights, draws and writes."""
        # Masses by p, if the row was read for them: then nothing is left to sum, unless the token
        # is drawn from the residual.
        masses = self.result.p_masses
        has_masses = self.from_residual | (masses.total > 0)
        # Outside the loop of `finish`, whose state would take registers.
        masses, round = self.residual.masses_if(self.from_residual, masses, round)
        tries = has_masses.astype(jnp.int32)
        self.finish(TileWeights(tries, self.from_residual, masses, round))

    def finish(self, weights: TileWeights) -> None:
        """Sums by ``p`` if nothing was summed, or nothing had weight; draws and writes."""
        # Where the draft was one-hot, p without it: its logit becomes -inf in shared memory.
        pl.when(self._is_without_token)(lambda: self._set_logit(self.threads.filled(-jnp.inf)))

        # Sums where nothing was summed yet, and once more where nothing has weight: in the residual
        # of p = q, or in a row that has the rejected token alone.
        def again(weights: TileWeights) -> jax.Array:
            return (weights.tries == 0) | ((weights.masses.total == 0) & (weights.tries == 1))

        weights = lax.while_loop(again, self._sum_by_p, weights)
        bad = ~(weights.masses.total > 0)  # then the draft row holds no probabilities
        is_first = self.cluster.is_first_warp()
        bad_row = jnp.int32(Status.BAD_DRAFT_ROW)
        if self.request.samples_draft:  # then the masses add up to what normalizes the row
            total = self.result.target.total * weights.masses.total
            self.request.write_row(self.result.target._replace(total=total), is_first)
        pl.when(bad)(lambda: self.request.write(self.position, jnp.int32(0), bad_row, is_first))
        pl.when(~bad)(lambda: self._pick(weights))

    @property
    def _is_without_token(self) -> jax.Array:
        """Returns whether the rejected token has no weight: its draft was one-hot."""
        return self.rejected & ~self.from_residual

    def _set_logit(self, value: jax.Array) -> None:
        """Writes the rejected token's logit in the row in shared memory."""
        # By one thread of the CTA that has it; the others of its warpgroup wait to read it.
        place, _, is_here = self.target.place_of(self.row, self.token_id)
        where = jnp.zeros_like(self.threads.index) + place
        self.threads.scatter(self.target.buffer, where, value, is_here & (self.threads.index == 0))
        self.threads.sync()

    def _sum_by_p(self, weights: TileWeights) -> TileWeights:
        """Returns masses by ``p``: without the rejected token, or, where that is empty, of all."""
        # The second time even the rejected token may be drawn: it is all that has weight.
        pl.when((weights.tries == 1) & self._is_without_token)(
            lambda: self._set_logit(self.threads.filled(0.0) + self.logit)
        )
        # Each warp's part of every tile, then of all warps the sum.
        mine = tile_masses(self.target, self.row, None, self.p.of_chunk)
        masses, round = self.cluster.gather_masses(weights.round, mine)
        return TileWeights(weights.tries + 1, jnp.bool_(False), masses, round)

    # Picking.

    def _pick(self, weights: TileWeights) -> None:
        """Picks the tile, then the token in it, by the CTA that has the tile."""
        # Every warp of the cluster finds the same tile; `place` is its index in this CTA's slice.
        tile = self._place_in(weights.masses, 0)[0]
        place = tile - self.cluster.cta * self.target.per_slice

        @pl.when((place >= 0) & (place < self.target.per_slice))
        def _() -> None:
            # [chunks, each, 128]: the weights of the tile's ids, computed again.
            def plain() -> list[Chunk]:
                targets = self.target.chunks(self.row, place)
                return [self.p.of_chunk(chunk) for chunk in targets]

            chunks = self.residual.of_tile_if(weights.from_residual, place, plain)
            self._pick_in_tile(place, chunks)

    def _place_in(self, masses: Masses, which: int) -> tuple[jax.Array, jax.Array]:
        """Returns the place that a uniform picks, as `first_past`.

        Args:
          masses: by lane.
          which: of the two uniforms to recover with.

        Returns:
          ``[]`` int32, and the uniform's share of the total.
        """
        threads = self.threads
        # Lanes K and K + 1 hold the uniforms to recover with.
        past = threads.at(self.drafted.uniforms, self.request.plan.k + which) * masses.total
        return threads.scalar(first_past(threads, masses.of_tiles, masses.sums, past)), past

    def _pick_in_tile(self, tile: jax.Array, chunks: list[Chunk]) -> None:
        """Picks a warp's part of a chunk, then one of its threads, then one of the thread's ids.

        Ids are in the order of chunks, then warps, then threads, then those of a thread: so a part
        is a run of ids, and the sums before it are those before its first id.

        Args:
          tile: ``[]`` int32, of the slice.
        """
        threads = self.threads
        target = self.target
        # [128] for each chunk: the sum of each thread's ids, and up to it in its warp.
        sums = [tree_sum(list(chunk)) for chunk in chunks]
        inclusive = [threads.warp_scan(x) for x in sums]
        # By lane: the sum of part 4 * chunk + warp.
        parts = self.cluster.gather_in_cta([threads.shuffle(x, WARP - 1) for x in inclusive])
        whole = Masses.of(threads, [parts])
        part, aim = self._place_in(whole, 1)
        before = jnp.where(part > 0, threads.at(whole.sums[0], jnp.maximum(part - 1, 0)), 0.0)
        chunk = lax.div(part, WARPS)
        warp = lax.rem(part, WARPS)

        # Registers have no index: the chunk is selected by comparisons.
        def of_chunk(values: list[jax.Array]) -> jax.Array:
            found = values[0]
            for i, value in enumerate(values[1:], start=1):
                found = jnp.where(chunk == i, value, found)
            return found

        mass = of_chunk(sums)
        up_to = of_chunk(inclusive) + before  # and with each thread's ids
        weights = [of_chunk(list(of_chunks)) for of_chunks in zip(*chunks, strict=True)]
        # Each thread picks one of its ids; of the threads, the first whose sum is past the aim. All
        # warps do, with their own numbers: those of the part's warp are the right ones.
        place = pick_of(weights, aim - (up_to - mass))
        place = place + threads.index * target.each + chunk * target.chunk
        place = place_of(threads.warp_min(key_of(place, up_to > aim, mass)))
        token_id = target.first + tile * TILE + place
        is_writer = lax.div(threads.index, WARP) == warp
        self.request.write(self.position, token_id, jnp.int32(Status.OK), is_writer)


# The residual, by what draft rows there are.


@dataclasses.dataclass(frozen=True)
class NoResidual:
    """Stands for the residual where a call has no draft rows."""

    work: Work  # what the warpgroup has in hand

    def masses_if(
        self, wanted: jax.Array, other: Masses, round: jax.Array
    ) -> tuple[Masses, jax.Array]:
        """Returns `other`, and the round: no residual is ever wanted."""
        return other, round

    def masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """Returns zeros, and the round."""
        return self.work.cluster.no_masses(), round

    def of_tile_if(
        self, wanted: jax.Array, tile: jax.Array, other: Callable[[], list[Chunk]]
    ) -> list[Chunk]:
        """Returns what `other` gives."""
        return other()


@dataclasses.dataclass(frozen=True)
class RowResidual:
    """``(weight * p - q)+``, of a target row in shared memory and a draft row."""

    work: Work  # what the warpgroup has in hand
    row: jax.Array  # [] int32, target row
    draft_row: jax.Array  # [] int32
    weighted: Exponent  # from entries of the target row to weight * p
    draft: DraftSlice  # draft rows
    q: Probability  # from entries of the draft row to q

    def masses_if(
        self, wanted: jax.Array, other: Masses, round: jax.Array
    ) -> tuple[Masses, jax.Array]:
        """Returns the masses of all tiles where they are wanted, else `other`; and the round."""
        if not self.work.request.plan.sums_draft_rows:  # else it was read already
            pl.when(wanted)(lambda: self.draft.prefetch(self.draft_row))
        return lax.cond(wanted, lambda: self.masses(round), lambda: (other, round))

    def masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """Returns the masses of all tiles, and the next round.

        Past the end of the row the residual is 0, where ``p`` is. So the draft row may be read
        there (`fold_pieces` calls it masked), several tiles at once.
        """
        threads = self.work.request.threads
        target = self.work.target
        draft = self.draft
        # Tiles of a group, loaded at once; a group may go past the end of the slice.
        size = draft.together
        count = target.count()
        passes_end = target.per_slice % size > 0

        def add(
            tile: jax.Array, place: int, piece: jax.Array | int, drafts: Any, sums: TileSums
        ) -> TileSums:
            # Tiles that the slice does not have are read in place of the last, and count 0.
            inside = jnp.minimum(tile, target.per_slice - 1) if passes_end else tile
            targets = target.piece(self.row, inside, piece)
            chunks = zip(targets, drafts, strict=True)
            left = [x for of_p, of_q in chunks for x in self._weights(of_p, of_q)]
            mass = tree_sum(left)
            if size > 1:  # what was read in place of a tile that is not there
                mass = jnp.where(tile < count, mass, 0.0)
            # A piece is the first of its tile, or is added to it.
            put = functools.partial(sums.put, threads, lax.div(tile, size), place, mass)
            if isinstance(piece, int):
                return put(begins=piece == 0)
            return lax.cond(piece == 0, put, lambda: put(begins=False))

        start = TileSums.start(threads, size)
        sums = draft.fold_pieces(self.draft_row, add, start, masked=True)
        mine = sums.first(threads, target.per_slice)
        return self.work.cluster.gather_masses(round, mine)

    def of_tile_if(
        self, wanted: jax.Array, tile: jax.Array, other: Callable[[], list[Chunk]]
    ) -> list[Chunk]:
        """Returns the weights of a tile where they are wanted, else what `other` gives."""

        # Loads of the draft row begin first: the target row is in shared memory.
        def of_tile() -> list[Chunk]:
            drafts = self.draft.chunks(self.draft_row, tile)
            targets = self.work.target.chunks(self.row, tile)
            chunks = zip(targets, drafts, strict=True)
            return [self._weights(of_p, of_q) for of_p, of_q in chunks]

        return lax.cond(wanted, of_tile, other)

    def _weights(self, targets: Chunk, drafts: Chunk) -> Chunk:
        """Returns the weights of a chunk, from its target and draft entries."""
        return excess((self.weighted.of(x) for x in targets), drafts, self.q)


@dataclasses.dataclass(frozen=True)
class ListedResidual:
    """``(weight * p - q)+``, where few ids have a ``q``: the candidates of a draft row."""

    work: Work  # what the warpgroup has in hand
    row: jax.Array  # [] int32, target row
    draft_row: jax.Array  # [] int32
    weighted: Exponent  # from entries of the target row to weight * p
    draft: CandidateRows  # draft rows, with what gives q of this one

    def masses_if(
        self, wanted: jax.Array, other: Masses, round: jax.Array
    ) -> tuple[Masses, jax.Array]:
        """Returns the masses of all tiles where they are wanted, else `other`; and the round."""
        return lax.cond(wanted, lambda: self.masses(round), lambda: (other, round))

    def masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """Returns the masses of all tiles, and the next round.

        They are those of the row without the candidates, and then of each candidate. Nothing is
        subtracted from a sum: a tile has mass if and only if an id in it has weight.
        """
        threads = self.work.request.threads
        target = self.work.target
        # [128] each: a candidate for each thread, and its entry in the target row.
        ids, q = self.draft.q_by_thread(self.draft_row)
        where, tile, is_here = target.place_of(self.row, ids)
        entries = threads.gather(target.buffer, where)
        (weight,) = excess([self.weighted.of(entries)], [q], GivenProbability())
        # The row without them: their entries are -inf, until all have read.
        threads.scatter(target.buffer, where, threads.filled(-jnp.inf), is_here)
        threads.sync()
        # The masses of what is left, then the entries come back.
        masses = tile_masses(target, self.row, None, self.weighted.of_chunk)
        threads.sync()
        threads.scatter(target.buffer, where, entries, is_here)
        threads.fence_copies()
        threads.sync()
        # To the mass of each tile, those of its candidates.
        with_candidates = [
            mass + threads.warp_sum(jnp.where(is_here & (tile == i), weight, 0.0))
            for i, mass in enumerate(masses)
        ]
        return self.work.cluster.gather_masses(round, with_candidates)

    def of_tile_if(
        self, wanted: jax.Array, tile: jax.Array, other: Callable[[], list[Chunk]]
    ) -> list[Chunk]:
        """Returns the weights of a tile where they are wanted, else what `other` gives."""

        def of_tile() -> list[Chunk]:
            drafts = self.draft.q_of_tile(self.draft_row, tile)
            targets = self.work.target.chunks(self.row, tile)
            chunks = zip(targets, drafts, strict=True)
            return [
                excess((self.weighted.of(x) for x in of_p), q, GivenProbability())
                for of_p, q in chunks
            ]

        return lax.cond(wanted, of_tile, other)


# The inverse CDF over what the lanes of a warp hold, or over what each thread holds.


def key_of(place: jax.Array | int, is_past: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns what is least for the place to pick: the first past the aim, or the last of weight.

    Keys of places past the aim lie below `NONE` and grow with the place; those of the others lie
    between it and twice that, and fall. One minimum finds both.

    Args:
      place: int32 below `NONE`.
      is_past: whether the sum up to and including it exceeds the aim.
      weight: float32; a place of none is never picked.
    """
    return jnp.where(weight > 0, jnp.where(is_past, place, 2 * NONE - place), 4 * NONE)


def place_of(key: jax.Array) -> jax.Array:
    """Returns the place of the least key; 0 where none has weight."""
    return jnp.maximum(jnp.where(key < NONE, key, 2 * NONE - key), 0)


def first_past(
    threads: Threads, masses: list[jax.Array], sums: list[jax.Array], past: jax.Array
) -> jax.Array:
    """Returns the least place of mass whose inclusive sum exceeds `past`, never one of no mass.

    Args:
      threads: the operations of the warpgroup.
      masses: float32 by lane, one array for every 32 places.
      sums: up to and including each place.
      past: what the sum must exceed.

    Returns:
      ``[128]`` int32, the same in all threads of a warp: the last place of mass where rounding
      finds none, 0 where there is no mass.
    """
    lane = threads.lane
    least = threads.filled(4 * NONE, jnp.int32)
    for i, (mass, inclusive) in enumerate(zip(masses, sums, strict=True)):
        least = jnp.minimum(least, key_of(lane + i * WARP, inclusive > past, mass))
    return place_of(threads.warp_min(least))


def pick_of(weights: list[jax.Array], aim: jax.Array) -> jax.Array:
    """Returns the least index of positive weight whose inclusive sum exceeds `aim`.

    Each thread has weights of its own.

    Returns:
      int32, the last index of positive weight where rounding finds none.
    """
    keys = [
        key_of(i, total > aim, weight)
        for i, (weight, total) in enumerate(zip(weights, _running(weights), strict=True))
    ]
    return place_of(functools.reduce(jnp.minimum, keys))


def _running(xs: list[jax.Array]) -> list[jax.Array]:
    """Returns sums up to and including each array, in short chains of additions.

    After the step of length s, array i is the sum of the last 2 s arrays up to i.
    """
    step = 1
    while step < len(xs):
        xs = xs[:step] + [a + b for a, b in zip(xs[step:], xs[:-step], strict=True)]
        step *= 2
    return xs
