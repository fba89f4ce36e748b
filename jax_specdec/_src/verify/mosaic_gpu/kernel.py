"""One launch that verifies a batch: a cluster of blocks per request.

Every block of a cluster holds one slice of a row in shared memory and makes the same decisions
from the same numbers. A row is fetched when its position is reached; the row that was read last
is the one to draw from, so it is still there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, Status
from jax_specdec._src.verify import greedy, probabilistic, synthetic
from jax_specdec._src.verify.mosaic_gpu import exchange
from jax_specdec._src.verify.mosaic_gpu.block import (
    LOG2E,
    Block,
    is_finite,
)
from jax_specdec._src.verify.mosaic_gpu.buffers import RowBuffer, tree_sum
from jax_specdec._src.verify.mosaic_gpu.config import LANES
from jax_specdec._src.verify.mosaic_gpu.pick import pick_entry, pick_in_tile, pick_scalar
from jax_specdec._src.verify.tiles import TILE

OK, BAD_TARGET_ROW, BAD_DRAFT_ROW = (
    int(Status.OK),
    int(Status.BAD_TARGET_ROW),
    int(Status.BAD_DRAFT_ROW),
)


class Scale(NamedTuple):
    """Turns entries of a draft row into ``q``; of no meaning where rows hold probabilities.

    ``q = exp(entry / temperature - shift)`` where normalizers are stored, else
    ``q = exp((entry - shift) / temperature) * factor``.
    """

    shift: jax.Array
    factor: jax.Array


class Seen(NamedTuple):
    """What a position showed; every block of the cluster has the same.

    Attributes:
      accepted: ``[]`` int32, 0 or 1.
      status: ``[]`` int32.
      peak: ``[]`` largest entry of the target row.
      masses: per block, the weight of its slice relative to that of `peak`.
      best: ``[]`` int32, the row's argmax; for greedy requests only.
      scale: of the draft row.
    """

    accepted: jax.Array
    status: jax.Array
    peak: jax.Array
    masses: tuple[jax.Array, ...]
    best: jax.Array
    scale: Scale


class Verifier:
    """One block at work on one request, while the kernel is traced."""

    def __init__(self, block: Block, target: RowBuffer, draft: RowBuffer | None):
        self.block, self.target, self.draft, self.call = block, target, draft, block.call

    def run(self) -> None:
        """Walk the positions, draw the last token, write the output."""
        block, status = self.block, self.block.status

        if self.call.rates is None:
            pl.when((status == OK) & (block.num_rows > 0))(
                lambda: self.target.fetch(block.first_row)
            )
        self.target.pad()
        if self.draft is not None:
            self.draft.pad()
        if self.call.slices.cluster > 1 and not self.call.interpreted:
            exchange.open_barriers(block.refs["meeting"])

        walk = self.walk if self.call.rates is None else self.synthetic_walk
        zero = jnp.int32(0)
        pl.when(status != OK)(lambda: self.write(zero, zero, status, zero))
        pl.when(status == OK)(lambda: self.emit(*walk()))

    # Deciding.

    def walk(self) -> tuple[jax.Array, Seen]:
        """Positions in order, until one is not accepted."""

        def goes_on(state: tuple[jax.Array, Seen]) -> jax.Array:
            position, last = state
            going = (position == 0) | (last.accepted == 1)
            return going & (position < self.block.num_rows)

        def step(state: tuple[jax.Array, Seen]) -> tuple[jax.Array, Seen]:
            position = state[0]
            seen = self.visit(position, position)

            @pl.when((seen.accepted == 1) & (position + 1 < self.block.num_rows))
            def _() -> None:
                plgpu.commit_smem()  # all have read what the copies will overwrite
                self.target.fetch(self.block.first_row + position + 1)

            return position + 1, seen

        position, last = lax.while_loop(goes_on, step, (jnp.int32(0), self.nothing()))
        ended = (position > 0) & (last.accepted == 0)
        return jnp.where(ended, position - 1, position), last

    def synthetic_walk(self) -> tuple[jax.Array, Seen]:
        """Accept by rate, then read the one row that the last token comes from."""
        assert self.call.rates is not None
        num_accepted, going = jnp.int32(0), jnp.int32(1)
        for i, rate in enumerate(self.call.rates):
            u = self.block.accept(i)
            accepted = self.block.is_proposed(jnp.int32(i)) & synthetic.accepts(
                u, jnp.float32(rate)
            )
            going = jnp.where(accepted, going, 0)
            num_accepted = num_accepted + going

        def read() -> Seen:
            self.target.fetch(self.block.first_row + num_accepted)
            return self.visit(num_accepted, jnp.int32(0), judge=False)

        return num_accepted, lax.cond(num_accepted < self.block.num_rows, read, self.nothing)

    def nothing(self) -> Seen:
        """Stands for a position not visited."""
        zero = jnp.float32(0)
        masses = (zero,) * self.call.slices.cluster
        return Seen(
            jnp.int32(0), jnp.int32(OK), zero, masses, jnp.int32(0), Scale(zero, jnp.float32(1))
        )

    @property
    def _fetches_draft_early(self) -> bool:
        return self.call.draft == "logits" or self.call.config.prefetch_draft

    def visit(self, position: jax.Array, turn: jax.Array, *, judge: bool = True) -> Seen:
        """Read the rows of one position; `judge` its draft by the greedy or the standard rule.

        The copy of the target row is under way.
        """
        block, call, target, draft = self.block, self.call, self.target, self.draft
        row = block.first_row + position
        token_id, proposed = block.token_id(position), block.is_proposed(position)
        place = jnp.clip(token_id, 0, call.size - 1)
        uses_q = proposed & block.stored & ~block.greedy
        x = target.at(row, place)

        q = jnp.float32(1)
        scale = Scale(jnp.float32(0), jnp.float32(1))
        if draft is not None:
            draft_row = block.draft_row(position)
            outside = (draft_row < 0) | (draft_row >= call.draft_rows)
            draft_row = jnp.clip(draft_row, 0, call.draft_rows - 1)
            d = draft.at(draft_row, jnp.minimum(place, call.draft_size - 1))
            if self._fetches_draft_early:
                pl.when(uses_q)(lambda: draft.fetch(draft_row))
            if call.draft == "normalized":
                scale = scale._replace(shift=block.refs["normalizer"][draft_row])
            bad = uses_q & (outside | ~is_finite(scale.shift))

        target.wait()
        stats = lax.cond(
            block.greedy,
            lambda: block.max_and_place(target),
            lambda: block.max_and_sum(target),
        )
        if draft is not None and self._fetches_draft_early:
            pl.when(uses_q)(draft.wait)
        held = draft or target
        if call.draft == "logits":
            stats = (
                *stats,
                *lax.cond(
                    uses_q,
                    lambda: block.max_and_sum(held),
                    lambda: (jnp.float32(0), jnp.float32(1)),
                ),
            )
        peaks, others, *draft_stats = block.exchange(turn, *stats)
        peak, masses = block.combine(peaks, others)
        best = jnp.float32(2**30)
        for m, first in zip(peaks, others, strict=True):
            best = jnp.where(m == peak, jnp.minimum(best, first), best)
        if draft_stats:
            draft_peak, draft_masses = block.combine(*draft_stats)
            scale = Scale(draft_peak, 1.0 / tree_sum(draft_masses))
            bad = bad | (uses_q & ~is_finite(draft_peak))

        status = jnp.where(is_finite(peak), jnp.int32(OK), jnp.int32(BAD_TARGET_ROW))
        if draft is not None:
            status = jnp.where((status == OK) & bad, BAD_DRAFT_ROW, status)
        seen = Seen(
            jnp.int32(0),
            status,
            peak,
            tuple(masses),
            best.astype(jnp.int32),
            scale,
        )
        if not judge:
            return seen

        if draft is not None:
            stored_q = jnp.where(token_id < call.draft_size, self.probs(d, scale), 0.0)
            q = jnp.where(uses_q, stored_q, q)
            bad_q = uses_q & ~((q >= 0) & (q < jnp.inf)) & (status == OK)
            status = jnp.where(bad_q, BAD_DRAFT_ROW, status)
        p = jnp.exp2((x - peak) * block.scale) / tree_sum(masses)
        u = block.accept(position)
        accepted = (block.greedy & greedy.accepts(token_id, seen.best)) | (
            ~block.greedy & probabilistic.accepts(u, p, q)
        )
        kept = proposed & accepted & (status == OK)
        return seen._replace(accepted=kept.astype(jnp.int32), status=status)

    def probs(self, entries: jax.Array, scale: Scale) -> jax.Array:
        """``q`` of entries of the draft row."""
        if self.call.draft == "probs":
            return entries
        if self.call.draft == "normalized":
            return jnp.exp2((entries * self.block.inv - scale.shift) * LOG2E)
        return jnp.exp2((entries - scale.shift) * self.block.scale) * scale.factor

    # Drawing.

    def emit(self, num_accepted: jax.Array, last: Seen) -> None:
        """The accepted tokens, then one drawn from the row that was read last."""
        block = self.block
        visited = num_accepted < block.num_rows
        draws = visited & (last.status == OK) & ~block.greedy

        @pl.when(~draws)
        def _() -> None:
            token_id = jnp.where(visited, last.best, block.bonus)
            self.write(num_accepted, token_id, last.status, jnp.int32(0))

        pl.when(draws)(lambda: self.draw(num_accepted, last))

    def draw(self, num_accepted: jax.Array, last: Seen) -> None:
        """The recovered or bonus token of a sampled request."""
        block, call = self.block, self.call
        rejected = block.is_proposed(num_accepted)
        from_residual, without_token = rejected & block.stored, rejected & ~block.stored
        token_id, draft_row = block.token_id(num_accepted), block.draft_row(num_accepted)
        p_total = tree_sum(list(last.masses))
        factor = 1.0 / p_total
        offset = block.block * (call.slices.rows * LANES)

        def plain(tile: Any, removed: jax.Array) -> list[jax.Array]:
            """Weights of a tile: ``p`` up to a factor, without the id at place `removed`."""
            return [
                jnp.where(ids == removed, 0.0, jnp.exp2((x - last.peak) * block.scale))
                for x, ids in zip(self.target.vectors(tile), self.target.place(tile), strict=True)
            ]

        def residual(tile: Any) -> list[jax.Array]:
            """Weights of a tile: ``(p - q)+``, NaN where q is none."""
            assert self.draft is not None
            weights = []
            for x, d in zip(self.target.vectors(tile), self.draft.vectors(tile), strict=True):
                p = jnp.exp2((x - last.peak) * block.scale) * factor
                q = self.probs(d, last.scale)
                if call.draft == "probs":
                    weights.append(probabilistic.residual(p, q))
                else:  # the same in fewer steps: q is not negative, and q - q is 0 or NaN
                    weights.append(jnp.maximum(p - q, q - q))
            return weights

        masses_of_tiles = block.refs["tile_masses"]

        def mass(weights: Any) -> jax.Array:
            """The slice's mass; that of each tile is left for the block that is chosen."""

            def add(tile: Any, total: jax.Array) -> jax.Array:
                tile_mass = jnp.sum(tree_sum(weights(tile)))
                masses_of_tiles[tile] = tile_mass
                return total + tile_mass

            return lax.fori_loop(0, call.slices.tiles, add, jnp.float32(0))

        def residual_mass() -> jax.Array:
            draft = self.draft
            assert draft is not None
            if not self._fetches_draft_early:
                draft.open(draft_row)

            def weights(tile: Any) -> list[jax.Array]:
                draft.ready(tile)
                found = residual(tile)
                draft.release(draft_row, tile)
                return found

            return mass(weights)

        def mass_without() -> jax.Array:
            return mass(lambda tile: plain(tile, token_id - offset))

        def weigh() -> tuple[jax.Array, ...]:
            if self.draft is None:
                total = mass_without()
            else:
                total = lax.cond(from_residual, residual_mass, mass_without)
            turn = num_accepted + 1 if call.rates is None else jnp.int32(1)
            (masses,) = block.exchange(turn, total)
            return tuple(masses)

        masses = lax.cond(rejected, weigh, lambda: last.masses)
        total = tree_sum(list(masses))
        # No weight left to draw from means drawing from p.
        some = total > 0
        masses = tuple(jnp.where(some, m, p) for m, p in zip(masses, last.masses, strict=True))
        bad = from_residual & (total != total)
        total = jnp.where(some, total, p_total)
        target = block.u_tile * total
        chosen, before = pick_scalar(list(masses), target)

        @pl.when(bad)
        def _() -> None:
            self.write(num_accepted, jnp.int32(0), jnp.int32(BAD_DRAFT_ROW), jnp.int32(0))

        @pl.when(~bad & (block.block == chosen))
        def _() -> None:
            # Unless a residual was weighed, and is not empty, p is what to draw from.
            weighed = rejected & some
            removed = jnp.where(weighed & without_token, token_id - offset, -1)

            @pl.when(~weighed)
            def _() -> None:
                mass(lambda tile: plain(tile, jnp.int32(-1)))

            tile = pick_entry(masses_of_tiles, call.slices.tiles, jnp.maximum(target - before, 0.0))

            def pick(weights: list[jax.Array]) -> jax.Array:
                return pick_in_tile(
                    weights, self.target.place(0), block.refs["weights"], block.u_token
                )

            def pick_residual() -> jax.Array:
                assert self.draft is not None
                self.draft.reopen(draft_row, tile)
                return pick(residual(tile))

            def pick_plain() -> jax.Array:
                return pick(plain(tile, removed))

            place = (
                pick_plain()
                if self.draft is None
                else lax.cond(weighed & from_residual, pick_residual, pick_plain)
            )
            self.write(num_accepted, offset + tile * TILE + place, jnp.int32(OK), chosen)

    def write(
        self, num_accepted: jax.Array, token_id: jax.Array, status: jax.Array, writer: jax.Array
    ) -> None:
        """The output of this request, written by one block."""
        block, refs = self.block, self.block.refs

        @pl.when(block.block == writer)
        def _() -> None:
            ok = status == OK
            for i in range(self.call.k + 1):
                draft = block.token_id(i)
                emitted = jnp.where(num_accepted == i, token_id, draft)
                kept = ok & (num_accepted >= i)
                refs["token_ids"][block.b, i] = jnp.where(kept, emitted, PLACEHOLDER_TOKEN_ID)
            refs["num_accepted"][block.b] = jnp.where(ok, num_accepted, 0)
            refs["num_emitted"][block.b] = jnp.where(ok, num_accepted + 1, 0)
            refs["status"][block.b] = status
