"""The two-level inverse CDF inside the kernel: weigh the tiles, pick one, pick a token in it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_gpu import output
from jax_specdec._src.verify.mosaic_gpu.config import WARPS
from jax_specdec._src.verify.mosaic_gpu.draft_rows import PIECES
from jax_specdec._src.verify.mosaic_gpu.mail import Masses, tree_sum
from jax_specdec._src.verify.mosaic_gpu.pick import first_past, key_of, pick_of, place_of
from jax_specdec._src.verify.mosaic_gpu.reader import Shown
from jax_specdec._src.verify.mosaic_gpu.request import LOG2E
from jax_specdec._src.verify.mosaic_gpu.statistics import Exponent, tile_masses
from jax_specdec._src.verify.mosaic_gpu.threads import WARP
from jax_specdec._src.verify.mosaic_gpu.tile_sums import TileSums
from jax_specdec._src.verify.tiles import TILE


class Turns(NamedTuple):
    """How often what is used again and again has been used.

    Attributes:
      told: ``[]`` int32, how often warps have told each other of a row.
      weighings: ``[]`` int32, how often they have of masses.
    """

    told: jax.Array
    weighings: jax.Array


class Weighed(NamedTuple):
    """The tiles' weights.

    Attributes:
      turn: ``[]`` int32, how often they have been weighed.
      from_residual: ``[]`` bool, whether by ``(p - q)+``; else by ``p``.
      masses: those weights.
    """

    turn: jax.Array
    from_residual: jax.Array
    masses: Masses


class Draw:
    """Drawing the recovered or bonus token of a sampled request, while the kernel is traced.

    Args:
      verifier: the block at work.
      position: ``[]`` int32, the one whose row is held.
      shown: what it showed.
      turns: how often things have been used.
      weight: ``[]`` float32, joint weight of the drafts before it; None for 1.
    """

    def __init__(
        self,
        verifier: Any,
        position: jax.Array,
        shown: Shown,
        turns: Turns,
        weight: jax.Array | None = None,
    ):
        self.verifier, self.position, self.shown, self.turns = verifier, position, shown, turns
        self.request, self.call = verifier.request, verifier.call
        self.threads, self.mail = verifier.threads, verifier.mail
        self.target, self.draft = verifier.target, verifier.draft
        request = self.request
        self.row = request.first_row + position
        self.rejected = request.is_proposed(position)
        self.from_residual = self.rejected & request.stored
        self.token_id = request.at(request.token_ids, position)
        self.logit = request.at(verifier.logit, position)
        size = jnp.dtype(self.target.rows.dtype).itemsize
        self.p_exponent = self.weighted = Exponent.of(shown.target, request.scale, size)
        if weight is not None:
            self.weighted = self.p_exponent.times(weight)
        if self.draft is not None:
            self.draft_row = request.at(verifier.draft_row, position)
            self.q_exponent = self._q_exponent()

    def _q_exponent(self) -> Exponent | None:
        request = self.request
        if self.call.draft == "probs":
            return None
        if self.call.draft == "normalized":
            shift = request.at(self.verifier.shift, self.position)
            return Exponent(request.scale, shift * LOG2E, None)
        size = jnp.dtype(self.draft.rows.dtype).itemsize
        return Exponent.of(self.shown.draft, request.scale, size)

    def run(self) -> None:
        """Weigh, draw and write."""
        if self.draft is not None and self.call.draft != "logits":  # else it was read already
            pl.when(self.from_residual)(lambda: self.draft.fetch(self.draft_row))
        masses = self.shown.masses
        weighed = self.from_residual | (masses.total > 0)
        if self.draft is not None:  # outside the loop, whose state would take registers
            masses = lax.cond(self.from_residual, self.weigh_residual, lambda: self.shown.masses)
        self.finish(Weighed(weighed.astype(jnp.int32), self.from_residual, masses))

    def finish(self, start: Weighed) -> None:
        """Weigh by ``p`` if nothing was weighed, or nothing had weight; draw and write."""
        without = self.rejected & ~self.from_residual
        pl.when(without)(lambda: self.set_logit(self.threads.filled(-jnp.inf)))

        def again(weighed: Weighed) -> jax.Array:
            return (weighed.turn == 0) | ((weighed.masses.total == 0) & (weighed.turn == 1))

        weighed = lax.while_loop(again, self.weigh, start)
        bad = ~(weighed.masses.total > 0)  # then the draft row holds no probabilities
        is_first = self.verifier.is_first_warp()
        bad_row = jnp.int32(Status.BAD_DRAFT_ROW)
        pl.when(bad)(
            lambda: output.write(self.request, self.position, jnp.int32(0), bad_row, is_first)
        )
        pl.when(~bad)(lambda: self.pick(weighed))

    def set_logit(self, value: jax.Array) -> None:
        """Write the rejected token's logit in the row that is held."""
        place = self.token_id - self.target.first
        here = (place >= 0) & (place < self.target.per_slice * TILE)
        place = jnp.where(here, place, 0)
        begin = self.target.begin(self.row, lax.div(place, TILE))
        where = jnp.zeros_like(self.threads.index()) + (begin + lax.rem(place, TILE))
        self.threads.scatter(self.target.held, where, value, here & (self.threads.index() == 0))
        self.threads.meet()

    # Weights: a list of the ids that each thread has of a chunk.

    def p(self, entry: jax.Array) -> jax.Array:
        return jnp.exp2(self.p_exponent(entry))

    def residual(self, targets: list[jax.Array], drafts: list[jax.Array]) -> list[jax.Array]:
        """``(p - q)+``, p times the joint weight; NaN where q is none."""
        weights = []
        for x, d in zip(targets, drafts, strict=True):
            p = jnp.exp2(self.weighted(x))
            if self.q_exponent is None:
                weights.append(jnp.where(d >= 0, rules.excess(p, d), jnp.nan))
            else:
                weights.append(rules.excess(p, jnp.exp2(self.q_exponent(d))))
        return weights

    def weigh(self, weighed: Weighed) -> Weighed:
        """By ``p``: of a row without the rejected token, or, where that is empty, of all of it."""
        again = weighed.turn == 1

        @pl.when(again)
        def _() -> None:
            without = self.rejected & ~self.from_residual
            pl.when(without)(lambda: self.set_logit(self.threads.filled(0.0) + self.logit))

        masses = self.plain_masses()

        # Everybody has read the masses of the first turn once the boxes have been used again.
        @pl.when(again)
        def _() -> None:
            self.mail.tell(self.turns.told, self.threads.filled(0.0))

        told = self.mail.tell_masses(self.turns.weighings + weighed.turn, masses)
        return Weighed(weighed.turn + 1, jnp.bool_(False), told)

    def weigh_residual(self) -> Masses:
        """Masses of all tiles by the residual."""
        return self.mail.tell_masses(self.turns.weighings, self.residual_masses())

    def plain_masses(self) -> list[jax.Array]:
        """Each warp's part of the mass of each tile of the slice, by ``p``."""
        return tile_masses(self.target, self.row, None, self.p)

    def residual_masses(self) -> list[jax.Array]:
        """The same by the residual, which is 0 past the end of the row, where ``p`` is."""
        threads, target = self.threads, self.target
        size, count = self.draft.together, target.count()
        passes_end = target.per_slice % size > 0

        def add(
            tile: jax.Array, place: int, piece: jax.Array | int, drafts: Any, sums: TileSums
        ) -> TileSums:
            held = jnp.minimum(tile, target.per_slice - 1) if passes_end else tile
            begin, first = target.begin(self.row, held), piece * (TILE // PIECES)
            if not isinstance(piece, int):
                begin, first = begin + first, 0
            offsets = range(first, first + TILE // PIECES, target.chunk)
            targets = [target.entries(begin, offset) for offset in offsets]
            both = zip(targets, drafts, strict=True)
            mass = tree_sum([weight for chunks in both for weight in self.residual(*chunks)])
            if size > 1:
                mass = jnp.where(tile < count, mass, 0.0)
            next_tile = functools.partial(sums.begin, threads, lax.div(tile, size), place, mass)
            if isinstance(piece, int):
                return sums.add(place, mass) if piece else next_tile()
            return lax.cond(piece == 0, next_tile, lambda: sums.add(place, mass))

        start = TileSums.start(threads, size)
        sums = self.draft.fold(self.draft_row, add, start, masked=True)
        return sums.first(threads, target.per_slice)

    # Picking.

    def pick(self, weighed: Weighed) -> None:
        """The tile, then the token in it, by the block that has the tile."""
        tile = self.pick_tile(weighed.masses)
        place = tile - self.mail.block * self.mail.shared.slices.tiles

        @pl.when((place >= 0) & (place < self.mail.shared.slices.tiles))
        def _() -> None:

            def plain() -> list[list[jax.Array]]:
                targets = self.target.chunks(self.row, place)
                return [[self.p(x) for x in chunk] for chunk in targets]

            if self.draft is None:
                self.pick_in_tile(place, plain())
                return

            def residual() -> list[list[jax.Array]]:
                drafts = self.draft.chunks(self.draft_row, place)
                targets = self.target.chunks(self.row, place)
                return [self.residual(*both) for both in zip(targets, drafts, strict=True)]

            weights = lax.cond(weighed.from_residual, residual, plain)
            self.pick_in_tile(place, weights)

    def pick_tile(self, masses: Masses) -> jax.Array:
        """The least tile whose inclusive sum exceeds ``u * total``, never one of no mass.

        Returns:
          ``[]`` int32, the last one with mass where rounding finds none.
        """
        aim = self.request.at(self.request.uniforms, self.call.k) * masses.total
        return self.threads.scalar(first_past(self.threads, masses.of_tiles, masses.sums, aim))

    def pick_in_tile(self, tile: jax.Array, chunks: list[list[jax.Array]]) -> None:
        """Choose a warp's part of a chunk, then one of its threads, then one of the thread's ids.

        Args:
          tile: ``[]`` int32, of the slice.
          chunks: its weights.
        """
        threads, request, target = self.threads, self.request, self.target
        sums = [tree_sum(list(chunk)) for chunk in chunks]
        inclusive = [threads.warp_scan(x) for x in sums]
        cells = self.mail.cells([threads.from_lane(x, WARP - 1) for x in inclusive])
        whole = Masses.of(threads, [cells])
        aim = request.at(request.uniforms, self.call.k + 1) * whole.total
        cell = threads.scalar(first_past(threads, [cells], whole.sums, aim))
        before = jnp.where(cell > 0, request.at(whole.sums[0], jnp.maximum(cell - 1, 0)), 0.0)
        chunk, warp = lax.div(cell, WARPS), lax.rem(cell, WARPS)

        def chosen(values: list[jax.Array]) -> jax.Array:
            found = values[0]
            for i, value in enumerate(values[1:], start=1):
                found = jnp.where(chunk == i, value, found)
            return found

        mass = chosen(sums)
        up_to = chosen(inclusive) + before
        weights = [chosen(list(of_chunks)) for of_chunks in zip(*chunks, strict=True)]
        place = pick_of(weights, aim - (up_to - mass))
        place = place + threads.index() * target.each + chunk * target.chunk
        place = place_of(threads.warp_min(key_of(place, up_to > aim, mass)))
        token_id = target.first + tile * TILE + place
        is_writer = lax.div(threads.index(), WARP) == warp
        output.write(request, self.position, token_id, jnp.int32(Status.OK), is_writer)
