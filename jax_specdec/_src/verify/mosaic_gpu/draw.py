"""The last token: a two-level inverse CDF over the row that was read last, then the output.

Masses of tiles pick the tile; in the block that has it, sums of its chunks by warp pick the warp,
then its threads, then an id of one thread.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, Masses, sums_by_lane, tree_sum
from jax_specdec._src.verify.mosaic_gpu.lists import Candidates
from jax_specdec._src.verify.mosaic_gpu.plan import WARPS
from jax_specdec._src.verify.mosaic_gpu.request import Work
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk
from jax_specdec._src.verify.mosaic_gpu.statistics import (
    Exponent,
    Normalizer,
    TileSums,
    Weights,
    tile_masses,
)
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Threads
from jax_specdec._src.verify.tiles import TILE

NONE = 2**24
"""Greater than any place."""


class PositionResult(NamedTuple):
    """What the rows of a position gave: the kernel's share of `position.Position`.

    Every warp of the cluster has the same.

    Attributes:
      accepted: ``[]`` int32, 0 or 1.
      status: ``[]`` int32.
      scale: normalizer of the target row; of a sampled request.
      draft_scale: normalizer of the draft row; where normalizers are not stored.
      argmax: ``[]`` int32, of the target row; of a greedy request.
      p_masses: of the target row's tiles, where they were summed; else their total is 0.
    """

    accepted: jax.Array
    status: jax.Array
    scale: Normalizer
    draft_scale: Normalizer
    argmax: jax.Array
    p_masses: Masses

    @classmethod
    def nothing(cls, cluster: Cluster) -> PositionResult:
        """Stands for a position not visited."""
        zero, unit = jnp.int32(0), Normalizer.of(jnp.float32(0), jnp.float32(1))
        return cls(zero, jnp.int32(Status.OK), unit, unit, zero, cluster.no_masses())


class TileWeights(NamedTuple):
    """The masses to draw a tile by.

    Attributes:
      tries: ``[]`` int32, how often they have been summed.
      from_residual: ``[]`` bool, whether by ``(p - q)+``; else by ``p``.
      masses: of the tiles.
      round: ``[]`` int32, of the next exchange.
    """

    tries: jax.Array
    from_residual: jax.Array
    masses: Masses
    round: jax.Array


class Draw:
    """Drawing the recovered or bonus token of a sampled request, while the kernel is traced.

    Args:
      work: what the warpgroup has in hand.
      position: ``[]`` int32, the one whose target row is in shared memory.
      result: what its rows gave.
      weight: ``[]`` float32, joint weight of the drafts before it; None for 1.
    """

    def __init__(
        self,
        work: Work,
        position: jax.Array,
        result: PositionResult,
        weight: jax.Array | None = None,
    ):
        self.request, self.target, self.draft, self.drafted, self.cluster = work
        request, draft, drafted = self.request, self.draft, self.drafted
        self.position, self.result, self.threads = position, result, request.threads
        self.row = request.first_row + position
        self.rejected = request.is_proposed(position)
        self.from_residual = self.rejected & drafted.has_q(position)
        self.token_id = self.threads.at(request.token_ids, position)
        self.logit = self.threads.at(drafted.loads.logit, position)
        p = Exponent.of(result.scale, request.scale)
        weighted = p if weight is None else p.times(weight)
        self.draft_row, q = self.token_id, None
        if draft is not None:
            self.draft_row = self.threads.at(drafted.loads.draft_row, position)
            q = drafted.exponent(position, result.draft_scale)
        if isinstance(draft, Candidates):  # which gives probabilities
            self.draft, q = dataclasses.replace(draft, exponent=q), None
        self.weights = Weights(p, weighted, q)

    def run(self, round: jax.Array) -> None:
        """Sum the tiles' weights, draw and write."""
        masses = self.result.p_masses
        has_masses = self.from_residual | (masses.total > 0)
        draft = self.draft
        if draft is not None:
            if not self.request.plan.sums_draft_rows:  # else it was read already
                pl.when(self.from_residual)(lambda: draft.prefetch(self.draft_row))
            # Outside the loop of `finish`, whose state would take registers.
            masses, round = lax.cond(
                self.from_residual, lambda: self.residual_masses(round), lambda: (masses, round)
            )
        tries = has_masses.astype(jnp.int32)
        self.finish(TileWeights(tries, self.from_residual, masses, round))

    def finish(self, weights: TileWeights) -> None:
        """Sum by ``p`` if nothing was summed, or nothing had weight; draw and write."""
        pl.when(self._is_without_token)(lambda: self._set_logit(self.threads.filled(-jnp.inf)))

        def again(weights: TileWeights) -> jax.Array:
            return (weights.tries == 0) | ((weights.masses.total == 0) & (weights.tries == 1))

        weights = lax.while_loop(again, self._sum_by_p, weights)
        bad = ~(weights.masses.total > 0)  # then the draft row holds no probabilities
        is_first, bad_row = self.cluster.is_first_warp(), jnp.int32(Status.BAD_DRAFT_ROW)
        if self.request.samples_draft:  # then the masses add up to what normalizes the row
            total = self.result.scale.total * weights.masses.total
            self.request.write_row(self.result.scale._replace(total=total), is_first)
        pl.when(bad)(lambda: self.request.write(self.position, jnp.int32(0), bad_row, is_first))
        pl.when(~bad)(lambda: self._pick(weights))

    @property
    def _is_without_token(self) -> jax.Array:
        """Whether the rejected token has no weight: its draft was one-hot."""
        return self.rejected & ~self.from_residual

    def _set_logit(self, value: jax.Array) -> None:
        """Write the rejected token's logit in the row in shared memory."""
        place = self.token_id - self.target.first
        here = (place >= 0) & (place < self.target.per_slice * TILE)
        place = jnp.where(here, place, 0)
        begin = self.target.begin(self.row, lax.div(place, TILE))
        where = jnp.zeros_like(self.threads.index) + (begin + lax.rem(place, TILE))
        self.threads.scatter(self.target.buffer, where, value, here & (self.threads.index == 0))
        self.threads.sync()

    # Weights, and their sums by tile.

    def _sum_by_p(self, weights: TileWeights) -> TileWeights:
        """By ``p``: of a row without the rejected token, or, where that is empty, of all of it."""
        pl.when((weights.tries == 1) & self._is_without_token)(
            lambda: self._set_logit(self.threads.filled(0.0) + self.logit)
        )
        mine = tile_masses(self.target, self.row, None, self.weights.p.probabilities)
        masses, round = self.cluster.gather_masses(weights.round, mine)
        return TileWeights(weights.tries + 1, jnp.bool_(False), masses, round)

    def residual_masses(self, round: jax.Array) -> tuple[Masses, jax.Array]:
        """By the residual, which is 0 past the end of the row, where ``p`` is; and the round."""
        threads, target, draft = self.threads, self.target, self.draft
        if isinstance(draft, Candidates):
            return self._masses_with(draft, round)
        assert draft is not None
        size, count = draft.together, target.count()
        passes_end = target.per_slice % size > 0

        def add(
            tile: jax.Array, place: int, piece: jax.Array | int, drafts: Any, sums: TileSums
        ) -> TileSums:
            inside = jnp.minimum(tile, target.per_slice - 1) if passes_end else tile
            both = zip(target.piece(self.row, inside, piece), drafts, strict=True)
            mass = tree_sum([x for chunks in both for x in self.weights.residual(*chunks)])
            if size > 1:
                mass = jnp.where(tile < count, mass, 0.0)
            put = functools.partial(sums.put, threads, lax.div(tile, size), place, mass)
            if isinstance(piece, int):
                return put(begins=piece == 0)
            return lax.cond(piece == 0, put, lambda: put(begins=False))

        start = TileSums.start(threads, size)
        sums = draft.fold_pieces(self.draft_row, add, start, masked=True)
        return self.cluster.gather_masses(round, sums.first(threads, target.per_slice))

    def _masses_with(self, draft: Candidates, round: jax.Array) -> tuple[Masses, jax.Array]:
        """The same, where few ids have a `q`: of these, and of the row without them."""
        threads, target = self.threads, self.target
        ids, q = draft.q_by_thread(self.draft_row)
        place = ids - target.first
        here = (place >= 0) & (place < target.per_slice * TILE)
        place = jnp.where(here, place, 0)
        tile = lax.div(place, TILE)
        where = target.begin(self.row, tile) + lax.rem(place, TILE)
        entries = threads.gather(target.buffer, where)
        (weight,) = self.weights.residual([entries], [q])
        threads.scatter(target.buffer, where, threads.filled(-jnp.inf), here)
        threads.sync()
        masses = tile_masses(target, self.row, None, self.weights.weighted.probabilities)
        threads.sync()  # all have read
        threads.scatter(target.buffer, where, entries, here)
        threads.fence_copies()
        threads.sync()
        for i, mass in enumerate(masses):
            masses[i] = mass + threads.warp_sum(jnp.where(here & (tile == i), weight, 0.0))
        return self.cluster.gather_masses(round, masses)

    # Picking.

    def _pick(self, weights: TileWeights) -> None:
        """The tile, then the token in it, by the block that has the tile."""
        tile = self._place_in(weights.masses, 0)[0]
        place = tile - self.cluster.block * self.target.per_slice

        @pl.when((place >= 0) & (place < self.target.per_slice))
        def _() -> None:
            def plain() -> list[Chunk]:
                targets = self.target.chunks(self.row, place)
                return [self.weights.p.probabilities(chunk) for chunk in targets]

            if self.draft is None:
                self._pick_in_tile(place, plain())
                return
            draft = self.draft

            def residual() -> list[Chunk]:
                read = draft.q_of_tile if isinstance(draft, Candidates) else draft.chunks
                drafts = read(self.draft_row, place)
                targets = self.target.chunks(self.row, place)
                return [self.weights.residual(*both) for both in zip(targets, drafts, strict=True)]

            self._pick_in_tile(place, lax.cond(weights.from_residual, residual, plain))

    def _place_in(self, masses: Masses, which: int) -> tuple[jax.Array, jax.Array]:
        """The place that a uniform picks, as `first_past`.

        Args:
          masses: by lane.
          which: of the two uniforms to recover with.

        Returns:
          ``[]`` int32, and the uniform's share of the total.
        """
        threads = self.threads
        past = threads.at(self.drafted.uniforms, self.request.plan.k + which) * masses.total
        return threads.scalar(first_past(threads, masses.of_tiles, masses.sums, past)), past

    def _pick_in_tile(self, tile: jax.Array, chunks: list[Chunk]) -> None:
        """Pick a warp's part of a chunk, then one of its threads, then one of the thread's ids.

        Args:
          tile: ``[]`` int32, of the slice.
          chunks: its weights.
        """
        threads, request, target = self.threads, self.request, self.target
        sums = [tree_sum(list(chunk)) for chunk in chunks]
        inclusive = [threads.warp_scan(x) for x in sums]
        parts = self.cluster.gather_in_block([threads.shuffle(x, WARP - 1) for x in inclusive])
        whole = Masses.of(threads, [parts])
        part, aim = self._place_in(whole, 1)
        before = jnp.where(part > 0, threads.at(whole.sums[0], jnp.maximum(part - 1, 0)), 0.0)
        chunk, warp = lax.div(part, WARPS), lax.rem(part, WARPS)

        def of_chunk(values: list[jax.Array]) -> jax.Array:
            found = values[0]
            for i, value in enumerate(values[1:], start=1):
                found = jnp.where(chunk == i, value, found)
            return found

        mass = of_chunk(sums)
        up_to = of_chunk(inclusive) + before
        weights = [of_chunk(list(of_chunks)) for of_chunks in zip(*chunks, strict=True)]
        place = pick_of(weights, aim - (up_to - mass))
        place = place + threads.index * target.each + chunk * target.chunk
        place = place_of(threads.warp_min(key_of(place, up_to > aim, mass)))
        token_id = target.first + tile * TILE + place
        is_writer = lax.div(threads.index, WARP) == warp
        request.write(self.position, token_id, jnp.int32(Status.OK), is_writer)


# The inverse CDF over what the lanes of a warp hold, or over what each thread holds.


def key_of(place: jax.Array | int, is_past: jax.Array, weight: jax.Array) -> jax.Array:
    """What is least for the place to pick: the first one past the aim, or else the last of weight.

    Args:
      place: int32 below `NONE`.
      is_past: whether the sum up to and including it exceeds the aim.
      weight: float32; a place of none is never picked.
    """
    return jnp.where(weight > 0, jnp.where(is_past, place, 2 * NONE - place), 4 * NONE)


def place_of(key: jax.Array) -> jax.Array:
    """The place of the least key; 0 where none has weight."""
    return jnp.maximum(jnp.where(key < NONE, key, 2 * NONE - key), 0)


def first_past(
    threads: Threads, masses: list[jax.Array], sums: list[jax.Array], past: jax.Array
) -> jax.Array:
    """The least place of mass whose inclusive sum exceeds `past`, never one of no mass.

    Args:
      threads: the operations of the warpgroup.
      masses: float32 by lane, one array for every 32 places.
      sums: up to and including each place.
      past: what the sum must exceed.

    Returns:
      ``[128]`` int32, the same in all threads of a warp: the last place of mass where rounding
      finds none, 0 where there is no mass.
    """
    lane, least = threads.lane, threads.filled(4 * NONE, jnp.int32)
    for i, (mass, inclusive) in enumerate(zip(masses, sums, strict=True)):
        least = jnp.minimum(least, key_of(lane + i * WARP, inclusive > past, mass))
    return place_of(threads.warp_min(least))


def pick(
    threads: Threads, masses: list[jax.Array], aim: jax.Array, *, is_share: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The least place whose inclusive sum exceeds `aim`, or this share of the total; by each warp.

    Returns:
      ``[128]`` int32 places, and the aim less the sum before the place.
    """
    sums, total = sums_by_lane(threads, masses)
    past = aim * total if is_share else aim
    place = first_past(threads, masses, sums, past)
    before = threads.filled(0.0)
    for i, (mass, inclusive) in enumerate(zip(masses, sums, strict=True)):
        up_to = threads.shuffle(inclusive - mass, place & (WARP - 1))
        before = jnp.where(lax.div(place, WARP) == i, up_to, before)
    return place, past - before


def pick_of(weights: list[jax.Array], aim: jax.Array) -> jax.Array:
    """The least index whose inclusive sum exceeds `aim`, among positive weights, by each thread.

    Returns:
      int32, the last positive one where rounding finds none.
    """
    keys = [
        key_of(i, total > aim, weight)
        for i, (weight, total) in enumerate(zip(weights, _running(weights), strict=True))
    ]
    return place_of(functools.reduce(jnp.minimum, keys))


def _running(xs: list[jax.Array]) -> list[jax.Array]:
    """Sums up to and including each array, in short chains of additions."""
    step = 1
    while step < len(xs):
        xs = xs[:step] + [a + b for a, b in zip(xs[step:], xs[:-step], strict=True)]
        step *= 2
    return xs
