"""The block rule inside the kernel: looks at every draft, keeps the longest prefix that passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_gpu import output
from jax_specdec._src.verify.mosaic_gpu.draw import Draw, Turns, Weighed
from jax_specdec._src.verify.mosaic_gpu.mail import Masses
from jax_specdec._src.verify.mosaic_gpu.reader import Shown
from jax_specdec._src.verify.mosaic_gpu.rows import Tiles


class Prefix(NamedTuple):
    """The longest prefix that has passed so far.

    Attributes:
      length: ``[]`` int32.
      weight: ``[]`` float32, its joint weight.
      shown: what the position after it showed.
      masses: of the residual there.
    """

    length: jax.Array
    weight: jax.Array
    shown: Shown
    masses: Masses


class State(NamedTuple):
    """Where the walk stands.

    Attributes:
      position: ``[]`` int32, rows looked at.
      weight: ``[]`` float32, joint weight of all drafts before it.
      going: ``[]`` int32, whether the draft at `position` is to be looked at.
      ends: ``[]`` int32, whether all drafts were and pass.
      status: ``[]`` int32.
      told: ``[]`` int32, how often warps have told each other of rows.
      kept: the longest prefix that passed.
    """

    position: jax.Array
    weight: jax.Array
    going: jax.Array
    ends: jax.Array
    status: jax.Array
    told: jax.Array
    kept: Prefix


class BlockWalk:
    """Verifying one sampled request, while the kernel is traced."""

    def __init__(self, verifier: Any):
        self.verifier, self.request, self.call = verifier, verifier.request, verifier.call
        self.target, self.draft = verifier.target, verifier.draft

    def run(self) -> None:
        """Walk, draw the last token, write the output."""
        verifier = self.verifier
        state = lax.while_loop(lambda state: state.going == 1, self.step, self.start())
        ok, position = state.status == Status.OK, state.position
        ends = ok & (state.ends == 1)

        @pl.when(~ok)
        def _() -> None:
            is_writer = verifier.is_first_warp()
            output.write(self.request, position, jnp.int32(0), state.status, is_writer)

        @pl.when(ends)
        def _() -> None:
            visited = position < self.request.num_rows
            seen = lax.cond(
                visited,
                lambda: verifier.visit(position, position, state.told),
                verifier.nothing,
            )
            verifier.emit(position, seen, self.weighings(position))

        pl.when(ok & ~ends)(lambda: self.recover(state))

    def start(self) -> State:
        """Before the first position."""
        zero, verifier = jnp.int32(0), self.verifier
        shown, masses = Shown.nothing(verifier.mail), verifier.mail.no_masses()
        kept = Prefix(zero, jnp.float32(1), shown, masses)
        going = self.request.is_proposed(zero).astype(jnp.int32)
        return State(zero, jnp.float32(1), going, 1 - going, zero, zero, kept)

    def step(self, state: State) -> State:
        """Look at one position: does the prefix before it pass, and what does its draft weigh?"""
        verifier, request, draft = self.verifier, self.request, self.draft
        position, weight = state.position, state.weight
        if draft is not None and self.call.draft != "logits":
            row = request.at(verifier.draft_row, position)
            pl.when(request.stored)(lambda: draft.fetch(row))
        seen = verifier.visit(position, position, state.told)
        shown = seen.shown
        by_lane = verifier.probabilities(shown.target, shown.draft)
        p, q = (request.at(x, position) for x in by_lane)

        masses, mass = state.kept.masses, rules.one_hot_residual_mass(weight, p)

        def weigh() -> tuple[Masses, jax.Array]:
            draw = Draw(verifier, position, shown, Turns(shown.told, position), weight)
            found = draw.weigh_residual()
            return found, found.total

        status = seen.status
        if draft is not None:
            masses, mass = lax.cond(request.stored, weigh, lambda: (masses, mass))
            bad = (status == Status.OK) & ~((mass >= 0) & (mass < jnp.inf))
            status = jnp.where(bad, jnp.int32(Status.BAD_DRAFT_ROW), status)

        last = request.at(request.uniforms, jnp.maximum(position - 1, 0))
        passes = (position == 0) | rules.passes(last, weight, mass)
        now = Prefix(position, weight, shown, masses)
        kept = jax.tree.map(lambda new, old: jnp.where(passes, new, old), now, state.kept)

        following_weight = rules.joint_weight(weight, p, q)
        ok = status == Status.OK
        proposed = request.is_proposed(position + 1)
        going = ok & proposed & (following_weight > 0)
        own = request.at(request.uniforms, position)
        ends = ok & ~proposed & rules.passes(own, following_weight, following_weight)
        pl.when((going | ends) & (position + 1 < request.num_rows))(
            lambda: verifier.open(position + 1)
        )
        return State(
            position + 1,
            following_weight,
            going.astype(jnp.int32),
            ends.astype(jnp.int32),
            status,
            shown.told,
            kept,
        )

    def weighings(self, positions: jax.Array) -> jax.Array:
        """How often masses were told at so many positions."""
        return jnp.where(self.request.stored, positions, 0)

    def recover(self, state: State) -> None:
        """Draw from the residual after the longest prefix that passed."""
        verifier, request, kept = self.verifier, self.request, state.kept
        looked_at, length = state.position, kept.length
        is_held = length == looked_at - 1
        row = request.first_row + length

        @pl.when(~is_held)
        def _() -> None:
            hold(self.target, row, looked_at)
            if request.filters is not None:
                least = kept.shown.target.least
                for_all(self.target, lambda i: self.target.hide_below(least, row, i))

        weighings = self.weighings(looked_at - 1)  # and the one that was kept
        turns = Turns(state.told, weighings)
        draw = Draw(verifier, length, kept.shown, turns, kept.weight)
        weighed = Weighed(request.stored.astype(jnp.int32), request.stored, kept.masses)
        draw.finish(weighed)


def hold(tiles: Tiles, row: jax.Array, turn: jax.Array) -> None:
    """Have a whole row here again."""
    tiles.open(row)
    for_all(tiles, lambda tile: tiles.ready(row, tile, turn))


def for_all(tiles: Tiles, do: Callable[[jax.Array], None]) -> None:
    """Do something to every tile of the slice."""
    lax.fori_loop(0, tiles.count(), lambda tile, _: do(tile), None)
