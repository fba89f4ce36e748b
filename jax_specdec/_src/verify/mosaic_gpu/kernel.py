"""One launch that verifies a batch: a cluster of blocks per request.

Every block of a cluster holds one slice of a row in shared memory, and all make the same decisions
from the same numbers. A row is read once its position is reached, or with the one before it where a
block has several warpgroups. The row to draw from is still there when that is known.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.types import Status
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_gpu import output, signals
from jax_specdec._src.verify.mosaic_gpu.block_walk import BlockWalk
from jax_specdec._src.verify.mosaic_gpu.draft_rows import DraftRows
from jax_specdec._src.verify.mosaic_gpu.draw import Draw, Turns
from jax_specdec._src.verify.mosaic_gpu.mail import Mail
from jax_specdec._src.verify.mosaic_gpu.reader import Reader, Shown
from jax_specdec._src.verify.mosaic_gpu.request import LOG2E, Call, Request
from jax_specdec._src.verify.mosaic_gpu.rows import Tiles
from jax_specdec._src.verify.mosaic_gpu.statistics import Normalizer, is_finite
from jax_specdec._src.verify.mosaic_gpu.threads import WARP
from jax_specdec._src.verify.mosaic_gpu.warpgroups import Warpgroups

OK, BAD_TARGET_ROW, BAD_DRAFT_ROW = (
    int(Status.OK),
    int(Status.BAD_TARGET_ROW),
    int(Status.BAD_DRAFT_ROW),
)


class Seen(NamedTuple):
    """What a position showed; every warp of the cluster has the same.

    Attributes:
      accepted: ``[]`` int32, 0 or 1.
      status: ``[]`` int32.
      shown: what its rows show.
    """

    accepted: jax.Array
    status: jax.Array
    shown: Shown


class Verifier:
    """One warpgroup at work on one request, while the kernel is traced.

    Attributes:
      call: what is static.
      request: what is known of the request.
      target: target rows.
      draft: draft rows, or None where there are none.
      mail: what reaches the others.
      warpgroups: who reads which positions.
    """

    def __init__(
        self,
        call: Call,
        request: Request,
        target: Tiles,
        draft: DraftRows | None,
        mail: Mail,
        warpgroups: Warpgroups,
    ):
        self.call, self.request, self.target, self.draft = call, request, target, draft
        self.mail, self.warpgroups, self.threads = mail, warpgroups, request.threads

    def run(self) -> None:
        """Walk the positions, draw the last token, write the output."""
        request = self.request

        @pl.when(request.status == OK)
        def _() -> None:
            self.load_entries()  # small: they go before copies
            position = self.warpgroups.index
            if self.call.rates is not None:
                request.know_noise()
                position = self.accepted_by_rate(self.call.rates)
            self.open(position)
            self.target.prepare()
            if self.warpgroups.count > 1:
                self.fetch_draft(self.warpgroups.index)
            if self.call.rates is None:
                request.know_noise()
            self.know_probabilities()
            if not self.threads.interpreted:
                signals.meet()
            if self.call.rates is not None:
                self.emit(position, self.read_at(position))
            elif not self.call.block:
                self.walk_and_emit()
            else:
                pl.when(request.greedy)(self.walk_and_emit)
                pl.when(~request.greedy)(lambda: BlockWalk(self).run())

        @pl.when(request.status != OK)
        def _() -> None:
            if not self.threads.interpreted:
                signals.meet()
            output.write_status(request, self.mail.block, request.status)

    def open(self, position: jax.Array) -> None:
        """Begin to copy the target row of a position, if there is one."""
        pl.when(position < self.request.num_rows)(
            lambda: self.target.open(self.request.first_row + position)
        )

    def fetch_draft(self, position: jax.Array) -> None:
        """Begin to bring the draft row of a position into the second-level cache."""
        draft = self.draft
        if draft is not None:
            row = self.request.at(self.draft_row, position)
            pl.when(self.knows_q(position))(lambda: draft.fetch(row))

    def load_entries(self) -> None:
        """By lane: the drafted token's entries in its target row and its draft row.

        Those of rows that are not visited may be read, and are not used.
        """
        request, call = self.request, self.call
        used = request.proposed
        self.place = jnp.where(used, request.token_ids, 0)
        row = jnp.where(request.lane < request.num_rows, request.first_row + request.lane, 0)
        self.logit = self.target.at(row, self.place)
        self.uses_q = used & request.stored & ~request.greedy
        if self.draft is None:
            return
        self.draft_row = jnp.clip(request.draft_rows, 0, call.draft_rows - 1)
        self.entry = self.draft.at(self.draft_row, jnp.minimum(self.place, call.draft_size - 1))
        if self.draft.thresholds is not None:
            self.least = self.threads.gather(self.draft.thresholds, self.draft_row)
        if call.draft == "normalized":
            self.shift = self.threads.gather(request.refs["normalizer"], self.draft_row)

    def know_probabilities(self) -> None:
        """By lane: the drafted token's draft probability where that is known, or that it is bad."""
        request, call = self.request, self.call
        self.q = self.threads.filled(1.0)
        self.bad = request.lane < 0
        if self.draft is None:
            return
        rows = request.draft_rows
        self.bad = self.uses_q & ((rows < 0) | (rows >= call.draft_rows))
        if self.draft.thresholds is not None:
            self.bad = self.bad | (self.uses_q & (self.least != self.least))
        if call.draft == "probs":
            self.q = self.entry
        if call.draft == "normalized":
            self.q = jnp.exp2((self.entry * request.inv - self.shift) * LOG2E)
            self.bad = self.bad | (self.uses_q & ~is_finite(self.shift))

    # Deciding.

    def walk_and_emit(self) -> None:
        """Positions in order, one for each warpgroup, until one is not accepted: that one emits."""
        warpgroups = self.warpgroups

        def goes_on(state: tuple[jax.Array, jax.Array, Seen]) -> jax.Array:
            _, first, _ = state
            return first == warpgroups.count

        def step(state: tuple[jax.Array, jax.Array, Seen]) -> tuple[jax.Array, jax.Array, Seen]:
            turn, _, last = state
            position = turn * warpgroups.count + warpgroups.index
            seen = lax.cond(
                position < self.request.num_rows,
                lambda: self.visit(position, turn, last.shown.told),
                self.nothing,
            )
            first = warpgroups.first(seen.accepted == 0, turn)
            pl.when(first == warpgroups.count)(lambda: self.open(position + warpgroups.count))
            return turn + 1, first, seen

        start = jnp.int32(0), jnp.int32(warpgroups.count), self.nothing()
        turns, first, seen = lax.while_loop(goes_on, step, start)
        pl.when(first == warpgroups.index)(
            lambda: self.emit((turns - 1) * warpgroups.count + warpgroups.index, seen)
        )

    def accepted_by_rate(self, rates: tuple[float, ...]) -> jax.Array:
        """How many drafts the synthetic rule accepts, ``[]`` int32."""
        request, lane = self.request, self.request.lane
        rate = self.threads.filled(0.0)
        for i, value in enumerate(rates):
            rate = jnp.where(lane == i, jnp.float32(value), rate)
        accepted = request.proposed & rules.accepts_synthetic(request.uniforms, rate)
        rejected = jnp.where(accepted & (lane < self.call.k), WARP, lane)
        return self.threads.scalar(self.threads.warp_min(rejected))

    def read_at(self, position: jax.Array) -> Seen:
        """Read the one row that the last token comes from, if there is one."""
        zero = jnp.int32(0)
        return lax.cond(
            position < self.request.num_rows,
            lambda: self.visit(position, zero, zero, judge=False),
            self.nothing,
        )

    def nothing(self) -> Seen:
        """Stands for a position not visited."""
        return Seen(jnp.int32(0), jnp.int32(OK), Shown.nothing(self.mail))

    def visit(
        self,
        position: jax.Array,
        turn: jax.Array,
        told: jax.Array,
        *,
        judge: bool = True,
    ) -> Seen:
        """Read the rows of one position; `judge` its draft by the greedy or the standard rule.

        The copy of the target row is under way.
        """
        request = self.request
        shown = Reader(self, position, turn).read(told)
        target = shown.target
        status = jnp.where(is_finite(target.peak), jnp.int32(OK), jnp.int32(BAD_TARGET_ROW))
        bad = self.bad | (self.uses_q & ~is_finite(shown.draft.peak))

        accepted = self.threads.filled(0, jnp.int32)
        if judge:
            p, q = self.probabilities(target, shown.draft)
            bad = bad | (self.uses_q & ~((q >= 0) & (q < jnp.inf)))
            by_rule = (request.greedy & rules.accepts_greedy(request.token_ids, shown.best)) | (
                ~request.greedy & rules.accepts(request.uniforms, p, q)
            )
            accepted = (request.proposed & by_rule).astype(jnp.int32)
        # One shuffle for both: whether it was accepted, and whether its draft row is bad.
        flags = request.at(accepted + 2 * bad.astype(jnp.int32), position)
        status = jnp.where((status == OK) & (flags >= 2), jnp.int32(BAD_DRAFT_ROW), status)
        kept = (status == OK) & (flags == 1)
        return Seen(kept.astype(jnp.int32), status, shown)

    def probabilities(self, target: Normalizer, draft: Normalizer) -> tuple[jax.Array, jax.Array]:
        """By lane: p and q of the drafted token, were the rows of its position so normalized."""
        scale = self.request.scale
        p = jnp.exp2((self.logit - target.peak) * scale) / target.total
        if self.request.filters is not None:
            p = jnp.where(self.logit >= target.least, p, 0.0)
        q = self.q
        if self.call.draft == "logits":
            q = jnp.exp2((self.entry - draft.peak) * scale) / draft.total
        if self.draft is not None:
            q = jnp.where(self.uses_q, jnp.where(self.place < self.call.draft_size, q, 0.0), 1.0)
        return p, q

    def knows_q(self, position: jax.Array) -> jax.Array:
        """Whether the draft row of a position counts, ``[]``."""
        return self.request.at(self.uses_q.astype(jnp.int32), position) == 1

    def weighs(self, position: jax.Array) -> jax.Array:
        """Whether the row of a position, if visited, is weighed while it is read, ``[]``."""
        if not self.call.is_plain:
            return jnp.bool_(False)
        return ~self.request.greedy & ~self.request.is_proposed(position)

    def is_first_warp(self) -> jax.Array:
        """Whether a thread is in the first warp of the cluster, ``[128]`` bool."""
        return (self.threads.index() < WARP) & (self.mail.block == 0)

    # Emitting.

    def emit(self, num_accepted: jax.Array, seen: Seen, weighings: jax.Array | int = 0) -> None:
        """The accepted tokens, then one drawn from the row that was read last."""
        request = self.request
        visited = num_accepted < request.num_rows
        draws = visited & (seen.status == OK) & ~request.greedy

        @pl.when(~draws)
        def _() -> None:
            token_id = jnp.where(visited, seen.shown.best, request.bonus)
            is_writer = self.is_first_warp()
            output.write(request, num_accepted, token_id, seen.status, is_writer)

        @pl.when(draws)
        def _() -> None:
            told = weighings + self.weighs(num_accepted).astype(jnp.int32)
            Draw(self, num_accepted, seen.shown, Turns(seen.shown.told, told)).run()
