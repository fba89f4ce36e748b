"""One request's walk, position by position: read a row, judge its draft, go on; then draw.

This is the greedy and the standard rule, and the end of the synthetic one. `block_rule` has a walk
of its own, which visits positions by this one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.base.types import Status
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_gpu.cluster import OneWarpgroup, Warpgroups
from jax_specdec._src.verify.mosaic_gpu.drafted import Work
from jax_specdec._src.verify.mosaic_gpu.draw import Draw
from jax_specdec._src.verify.mosaic_gpu.reader import PositionResult, Reader
from jax_specdec._src.verify.mosaic_gpu.request import KernelRequest
from jax_specdec._src.verify.mosaic_gpu.rows import TargetSlice
from jax_specdec._src.verify.mosaic_gpu.statistics import is_finite

OK = int(Status.OK)


def copy_row(request: KernelRequest, target: TargetSlice, position: jax.Array) -> None:
    """Begins to copy the target row of a position, if there is one."""
    pl.when(position < request.num_rows)(lambda: target.copy(request.first_row + position))


class WalkState(NamedTuple):
    """State of a warpgroup's walk."""

    position: jax.Array  # [] int32, the next to visit
    result: PositionResult  # what the rows of the last one visited gave
    round: jax.Array  # [] int32, of the next exchange
    # [] int32, the warpgroup at whose position the walk ends; the number of them if it goes on.
    ender: jax.Array


class Walk:
    """One warpgroup at work on one request, while the kernel is traced.

    Args:
      work: its request, the rows, the drafted tokens and the cluster; see `drafted.Work`.
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

    def walk_and_emit(self, round: jax.Array) -> None:
        """Visits positions in order until one is not accepted, and emits from that.

        Each warpgroup of the CTA has its own: n of them visit n positions at once.
        """
        warpgroups = self.warpgroups
        count = warpgroups.count

        def goes_on(state: WalkState) -> jax.Array:
            return state.ender == count

        def step(state: WalkState) -> WalkState:
            result, round = self.visit(state.position, state.round)
            # Does the walk end at one of the positions that were visited at once? At the first.
            ender = warpgroups.first(result.accepted == 0, state.position)
            # All warps of this warpgroup have read its row: if it goes on, `visit` ended with an
            # exchange.
            pl.when(ender == count)(
                lambda: copy_row(self.request, self.target, state.position + count)
            )
            return WalkState(state.position + count, result, round, ender)

        # Warpgroup i begins with position i, whose copy is under way.
        start = WalkState(warpgroups.index, self.nothing, round, jnp.int32(count))
        end = lax.while_loop(goes_on, step, start)
        # The warpgroup whose position ends the walk still has that row.
        pl.when(end.ender == warpgroups.index)(
            lambda: self.emit(end.position - count, end.result, end.round)
        )

    def visit(self, position: jax.Array, round: jax.Array) -> tuple[PositionResult, jax.Array]:
        """Returns the result of a position, judged by the greedy or the standard rule.

        Args:
          position: ``[]`` int32; the copy of its target row is under way, if it has one.
          round: ``[]`` int32, of the next exchange.

        Returns:
          The result, `nothing` where there is no row; and the next round.
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
        is_judged = not self.plan.rule.reads_one_position
        rows_before = self.warpgroups.rows_before(position) if is_judged else jnp.int32(0)
        result, round = Reader.of(self.work, self.nothing, position, rows_before).read(round)
        # NaN or +inf in a row, or nothing but -inf, leaves no finite maximum.
        bad_target = ~is_finite(result.target.peak)
        bad_draft = drafted.bad | (drafted.uses_q & ~is_finite(result.draft.peak))

        # [128] by lane: what the lane of this position finds is right.
        accepted = self.threads.filled(0, jnp.int32)
        if is_judged:
            p, q = drafted.probabilities(result.target, result.draft)
            bad_draft = bad_draft | (drafted.uses_q & ~((q >= 0) & (q < jnp.inf)))
            # The rule, by every lane for its own draft: the greedy one, or u q < p.
            is_best = rules.accepts_greedy(request.token_ids, result.argmax)
            by_rule = (request.greedy & is_best) | (
                ~request.greedy & rules.accepts(drafted.uniforms, p, q)
            )
            accepted = (request.proposed & by_rule).astype(jnp.int32)
        # One shuffle for both: whether it was accepted, and whether its draft row is bad.
        flags = self.threads.at(accepted + 2 * bad_draft.astype(jnp.int32), position)
        # If both rows are bad, the target's is what is reported.
        status = jnp.where(bad_target, jnp.int32(Status.BAD_TARGET_ROW), jnp.int32(OK))
        status = jnp.where(~bad_target & (flags >= 2), jnp.int32(Status.BAD_DRAFT_ROW), status)
        kept = (status == OK) & (flags == 1)
        return result._replace(accepted=kept.astype(jnp.int32), status=status), round

    def emit(self, num_accepted: jax.Array, result: PositionResult, round: jax.Array) -> None:
        """Writes the accepted tokens, then one drawn from the row that was read last."""
        request = self.request
        visited = num_accepted < request.num_rows  # else the bonus token is given
        draws = visited & (result.status == OK) & ~request.greedy

        # Nothing to draw: the argmax of a greedy request, a given bonus token, or a bad row.
        @pl.when(~draws)
        def _() -> None:
            token_id = jnp.where(visited, result.argmax, request.bonus)
            is_writer = self.cluster.is_first_warp()
            request.write(num_accepted, token_id, result.status, is_writer)
            request.write_row(result.target, is_writer)

        pl.when(draws)(lambda: Draw(self.work, num_accepted, result).run(round))
