"""The block rule: looks at every draft of a request, keeps the longest prefix that passes.

`verify.rules` has the rule itself: joint weights, residual masses, and when a prefix passes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.base.types import Status
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_gpu.cluster import Masses
from jax_specdec._src.verify.mosaic_gpu.draw import Draw, TileWeights
from jax_specdec._src.verify.mosaic_gpu.rows import Below
from jax_specdec._src.verify.mosaic_gpu.statistics import Normalizer
from jax_specdec._src.verify.mosaic_gpu.walk import OK, Walk, copy_row


class Prefix(NamedTuple):
    """The longest prefix that has passed the block rule so far."""

    length: jax.Array  # [] int32
    weight: jax.Array  # [] float32, its joint weight
    target: Normalizer  # normalizer of the target row after it
    draft: Normalizer  # normalizer of the draft row after it
    masses: Masses  # of the residual there


class BlockRuleState(NamedTuple):
    """State of the block rule's walk."""

    position: jax.Array  # [] int32, rows read
    weight: jax.Array  # [] float32, joint weight of all drafts before it
    going: jax.Array  # [] int32, whether the draft at `position` is to be looked at
    ends: jax.Array  # [] int32, whether all drafts were and pass
    status: jax.Array  # [] int32
    round: jax.Array  # [] int32, of the next exchange
    kept: Prefix  # the longest prefix that passed


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
        """Walks, draws the last token, writes the output."""
        # Rows are read in order, and the best prefix so far is kept with what is needed to draw.
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
        """Looks at one position: does the prefix before it pass, and what is its draft's weight?"""
        walk = self.walk
        request = self.request
        drafted = self.drafted
        position = state.position
        weight = state.weight
        # The residual reads the draft row after the target row: it is fetched meanwhile. A row that
        # must be summed is fetched by the reader.
        if self.plan.has_draft_rows and not self.plan.sums_draft_rows:
            pl.when(drafted.has_q(position))(lambda: drafted.loads.prefetch(position))
        result, round = walk.visit(position, state.round)
        # p and q of the draft at this position.
        p_by_lane, q_by_lane = drafted.probabilities(result.target, result.draft)
        p = self.threads.at(p_by_lane, position)
        q = self.threads.at(q_by_lane, position)

        # S, the mass of (weight * p - q)+; of a one-hot draft without reading the row again.
        # For such a draft no masses are summed, and those that stand here are not drawn by.
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
        # What is known of the prefix before this position, should it be the longest.
        now = Prefix(
            length=position,
            weight=weight,
            target=result.target,
            draft=result.draft,
            masses=masses,
        )
        kept = jax.tree.map(lambda new, old: jnp.where(passes, new, old), now, state.kept)

        # With its draft, and if that was the last one, does the whole pass?
        # The weight goes on to the next position, and 0 ends the walk.
        following_weight = rules.joint_weight(weight, p, q)
        ok = status == OK
        proposed = request.is_proposed(position + 1)
        going = ok & proposed & (following_weight > 0)
        own = self.threads.at(drafted.uniforms, position)
        # After the last draft q = 0, so S is the joint weight itself.
        ends = ok & ~proposed & rules.passes(own, following_weight, following_weight)
        # The next row, of a draft or of the bonus token, takes this one's place.
        pl.when((going | ends) & (position + 1 < request.num_rows))(
            lambda: copy_row(request, self.target, position + 1)
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
        """Draws from the residual after the longest prefix that passed."""
        target = self.target
        # The row after the longest prefix, which is the one drawn from.
        kept = state.kept
        row = self.request.first_row + kept.length

        @pl.when(kept.length != state.position - 1)  # else the row is there
        def _() -> None:
            # That row was overwritten since. It is copied again, and filtered as it was.
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
