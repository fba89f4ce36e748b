"""The two-level inverse CDF inside the kernel: weigh the tiles, pick one, pick a token in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify import probabilistic
from jax_specdec._src.verify.mosaic_gpu import output
from jax_specdec._src.verify.mosaic_gpu.config import WARPS
from jax_specdec._src.verify.mosaic_gpu.draft_rows import PIECES
from jax_specdec._src.verify.mosaic_gpu.mail import tree_sum
from jax_specdec._src.verify.mosaic_gpu.pick import first_past
from jax_specdec._src.verify.mosaic_gpu.reader import Shown
from jax_specdec._src.verify.mosaic_gpu.request import LOG2E
from jax_specdec._src.verify.mosaic_gpu.statistics import Exponent, residual
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
      masses: by lane, one array for every 32 tiles of the row.
      total: ``[]`` float32, their sum.
    """

    turn: jax.Array
    from_residual: jax.Array
    masses: list[jax.Array]
    total: jax.Array


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
        shown = self.shown
        self.finish(Weighed(shown.weighed, self.from_residual, shown.masses, shown.target.total))

    def finish(self, start: Weighed) -> None:
        """Weigh as far as that is not done, draw and write."""
        without = self.rejected & ~self.from_residual
        pl.when(without)(lambda: self.set_logit(self.threads.filled(-jnp.inf)))

        def again(weighed: Weighed) -> jax.Array:
            return (weighed.turn == 0) | ((weighed.total == 0) & (weighed.turn == 1))

        weighed = lax.while_loop(again, self.weigh, start)
        bad = ~(weighed.total > 0)  # then the draft row holds no probabilities
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
        start = self.target.starts(self.row, lax.div(place, TILE))[0]
        where = jnp.zeros_like(self.threads.index()) + (start + lax.rem(place, TILE))
        self.threads.scatter(self.target.held, where, value, here & (self.threads.index() == 0))
        self.threads.meet()

    # Weights: a list of the ids that each thread has of a chunk.

    def plain(self, start: jax.Array) -> list[jax.Array]:
        """``p``."""
        return [jnp.exp2(self.p_exponent(x)) for x in self.target.entries(start)]

    def residual(self, start: jax.Array, drafts: list[jax.Array]) -> list[jax.Array]:
        """``(p - q)+``, p times the joint weight; NaN where q is none."""
        weights, target = [], self.target.entries(start)
        for x, d in zip(target, drafts, strict=True):
            p = jnp.exp2(self.weighted(x))
            if self.q_exponent is None:
                weights.append(probabilistic.residual(p, d))
            else:
                weights.append(residual(p, jnp.exp2(self.q_exponent(d))))
        return weights

    def weigh(self, weighed: Weighed) -> Weighed:
        """By the residual, or by ``p``; a second time by ``p`` where the residual is empty."""
        again = weighed.turn == 1

        @pl.when(again)
        def _() -> None:
            without = self.rejected & ~self.from_residual
            pl.when(without)(lambda: self.set_logit(self.threads.filled(0.0) + self.logit))

        from_residual = self.from_residual & ~again
        if self.draft is None:
            masses = self.plain_masses()
        else:
            masses = lax.cond(from_residual, self.residual_masses, self.plain_masses)

        # Everybody has read the masses of the first turn once the boxes have been used again.
        @pl.when(again)
        def _() -> None:
            self.mail.tell(self.turns.told, self.threads.filled(0.0))

        tiles, total = self.mail.tell_masses(self.turns.weighings + weighed.turn, masses)
        return Weighed(weighed.turn + 1, from_residual, tiles, total)

    def weigh_residual(self) -> tuple[list[jax.Array], jax.Array]:
        """Masses of all tiles by lane, and their sum, by the residual."""
        return self.mail.tell_masses(self.turns.weighings, self.residual_masses())

    def plain_masses(self) -> list[jax.Array]:
        """Each warp's part of the mass of each tile of the slice, by ``p``."""

        def add(tile: jax.Array, sums: TileSums) -> TileSums:
            starts = self.target.starts(self.row, tile)
            weights = [w for start in starts for w in self.plain(start)]
            return sums.begin(self.threads, tile, tree_sum(weights))

        start = TileSums.start(self.threads)
        return self.of_slice(lax.fori_loop(0, self.target.count(), add, start))

    def residual_masses(self) -> list[jax.Array]:
        """The same by the residual."""
        target = self.target

        def add(tile: jax.Array, piece: jax.Array | int, drafts: Any, sums: TileSums) -> TileSums:
            begin = target.starts(self.row, tile)[0] + piece * (TILE // PIECES)
            mass = tree_sum(
                [
                    weight
                    for i, chunk in enumerate(drafts)
                    for weight in self.residual(begin + i * target.chunk, chunk)
                ]
            )
            if isinstance(piece, int):
                return sums.add(mass) if piece else sums.begin(self.threads, tile, mass)
            return lax.cond(
                piece == 0,
                lambda: sums.begin(self.threads, tile, mass),
                lambda: sums.add(mass),
            )

        return self.of_slice(self.draft.fold(self.draft_row, add, TileSums.start(self.threads)))

    def of_slice(self, sums: TileSums) -> list[jax.Array]:
        return sums.of_slice(self.threads, self.target.count(), self.target.per_slice)

    # Picking.

    def pick(self, weighed: Weighed) -> None:
        """The tile, then the token in it, by the block that has the tile."""
        tile = self.pick_tile(weighed.masses)
        place = tile - self.mail.block * self.mail.shared.slices.tiles

        @pl.when((place >= 0) & (place < self.mail.shared.slices.tiles))
        def _() -> None:
            starts = self.target.starts(self.row, place)
            if self.draft is None:
                self.pick_in_tile(place, [self.plain(start) for start in starts])
                return

            def residual() -> list[list[jax.Array]]:
                drafts = self.draft.chunks(self.draft_row, place)
                return [self.residual(*both) for both in zip(starts, drafts, strict=True)]

            weights = lax.cond(
                weighed.from_residual, residual, lambda: [self.plain(start) for start in starts]
            )
            self.pick_in_tile(place, weights)

    def pick_tile(self, masses: list[jax.Array]) -> jax.Array:
        """The least tile whose inclusive sum exceeds ``u * total``, never one of no mass.

        Args:
          masses: by lane, one array for every 32 tiles.

        Returns:
          ``[]`` int32, the last one with mass where rounding finds none.
        """
        threads = self.threads
        sums, before = [threads.warp_scan(mass) for mass in masses], jnp.float32(0)
        for i, inclusive in enumerate(sums):
            sums[i] = inclusive + before
            before = threads.scalar(threads.from_lane(sums[i], WARP - 1))
        aim = self.request.at(self.request.uniforms, self.call.k) * before
        return threads.scalar(first_past(threads, masses, sums, aim))

    def pick_in_tile(self, tile: jax.Array, chunks: list[list[jax.Array]]) -> None:
        """Choose a warp's part of a chunk, then one of its threads, then one of the thread's ids.

        Args:
          tile: ``[]`` int32, of the slice.
          chunks: its weights.
        """
        threads, request, target = self.threads, self.request, self.target
        sums = [tree_sum(list(chunk)) for chunk in chunks]
        inclusive = [threads.warp_scan(x) for x in sums]
        parts = self.mail.cells([threads.from_lane(x, WARP - 1) for x in inclusive])
        total = tree_sum(list(parts))
        aim = request.at(request.uniforms, self.call.k + 1) * total
        cell, before = pick_scalar(parts, aim)
        chunk, warp = lax.div(cell, WARPS), lax.rem(cell, WARPS)

        def chosen(values: list[jax.Array]) -> jax.Array:
            found = values[0]
            for i, value in enumerate(values[1:], start=1):
                found = jnp.where(chunk == i, value, found)
            return found

        mass = chosen(sums)
        up_to = chosen(inclusive) + before
        running, place, searching = up_to - mass, jnp.zeros_like(request.lane), mass == mass
        for j, of_chunks in enumerate(zip(*chunks, strict=True)):
            weight = chosen(list(of_chunks))
            take = (weight > 0) & searching
            place = jnp.where(take, j, place)
            running = running + weight
            searching = searching & ~(take & (running > aim))
        place = place + threads.index() * target.each + chunk * target.chunk
        last = jnp.where(mass > 0, 2 * TILE - place, 4 * TILE)
        key = threads.warp_min(jnp.where((mass > 0) & (up_to > aim), place, last))
        place = jnp.where(key < TILE, key, 2 * TILE - key)
        token_id = target.first + tile * TILE + place
        is_writer = lax.div(threads.index(), WARP) == warp
        output.write(request, self.position, token_id, jnp.int32(Status.OK), is_writer)


def pick_scalar(weights: list[jax.Array], aim: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least index whose inclusive sum exceeds `aim`, among positive weights.

    Returns:
      The index, the last positive one where rounding finds none; and the sum before it.
    """
    index, before, inclusive = jnp.int32(0), jnp.float32(0), jnp.float32(0)
    searching = aim == aim
    for i, weight in enumerate(weights):
        take = (weight > 0) & searching
        index, before = jnp.where(take, i, index), jnp.where(take, inclusive, before)
        inclusive = inclusive + weight
        searching = searching & ~(take & (inclusive > aim))
    return index, before
