"""`InOrder`: one request after another, for CPUs.

The rows of a position are read only if the positions before it leave it to matter, and one row
after another, so that it stays in the CPU's cache. Over a split vocabulary, where each row is an
exchange, the rows of all requests are read ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.types import Status
from jax_specdec._src.rows.device import Cpu, Device
from jax_specdec._src.rows.part import pack, unpack
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.verify import reader
from jax_specdec._src.verify.backends.gather import Gather, TileViews, has_cut_tiles, whole_and_cut
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.order import ChainOrder
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rules import Rule
from jax_specdec._src.verify.statistics import Partials, TargetStatistics

_FOUND = "argmax", "scale", "threshold", "p_masses", "draft_scale", "p", "q", "weight", "status"
"""Fields of a position that reading and the rule find."""

_GIVEN = tuple(x for x in Position._fields if x != "p_masses")
"""Fields that a position is sliced out of. Its masses are large, and not known before."""


class InOrder(Gather):
    """Rows in order."""

    reads_ahead: ClassVar[bool] = False
    device: ClassVar[Device] = Cpu()

    def read(self, rows: LocalRows, requests: Request, positions: Position, rule: Rule) -> Position:
        # Every row of a part is an exchange, which all devices must come to.
        if rows.part.is_split:
            return self.read_ahead(rows, requests, positions, rule)
        given = [getattr(positions, name) for name in _GIVEN]
        # [B]: positions that have a row; none if the request is known to be bad
        num_owned = jnp.sum(positions.offset < requests.num_rows[:, None], axis=1, dtype=jnp.int32)
        num_owned = jnp.where(requests.is_ok, num_owned, 0)

        def of_request(b: jax.Array, words: jax.Array) -> jax.Array:
            """Reads a request until no other row of it can matter."""
            request = jnp.uint32(b)  # an int under jax.disable_jit
            # [1, ...]: this request
            one = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, request, 1), requests)
            last = lax.dynamic_index_in_dim(num_owned, request, keepdims=False).astype(jnp.uint32)

            def step(state: Any) -> Any:
                """Reads position i, and says whether the next one may matter."""
                _, i, weight, words = state
                place = request, i
                # [1, 1]: this position
                own = jax.tree.map(lambda x: lax.dynamic_slice(x, place, (1, 1)), given)
                this = positions._replace(**dict(zip(_GIVEN, own, strict=True)))
                stats = self.of_one_row(rows, one, this)
                this = reader.judged(rows, one, this, stats, self.draft_partials)
                this = this._replace(weight=weight)
                if rule.draws_every_row:
                    this = lax.cond(
                        one.greedy[0],
                        lambda: this,
                        lambda: reader.drawn(rows, one, this, self.race_token),
                    )
                # All that was found of it is written as one array.
                found = pack(_found_of(this), 2)
                words = lax.dynamic_update_slice(words, found, (*place, jnp.uint32(0)))
                this = one.order.followed(one.token_ids, this)
                goes_on = rule.goes_on(this)[0, 0]
                row = one.order.next_row(one.token_ids, this, i)
                return goes_on, row, rule.next_weight(this), words

            start = jnp.bool_(True), jnp.uint32(0), jnp.ones((1, 1), jnp.float32), words
            return lax.while_loop(lambda state: state[0] & (state[1] < last), step, start)[3]

        # [B, P, words]: what is found of a position stands side by side, as one array to write.
        unread = _found_of(positions)
        words = lax.fori_loop(0, num_owned.shape[0], of_request, pack(unread, 2))
        return positions._replace(**dict(zip(_FOUND, unpack(words, unread, 2), strict=True)))

    def read_argmax(self, rows: LocalRows, requests: Request, positions: Position) -> Position:
        # Over a split vocabulary, and of trees, every row is read.
        if rows.part.is_split or not isinstance(requests.order, ChainOrder):
            return super().read_argmax(rows, requests, positions)
        shape = positions.row.shape
        # [2, B * (K+1)]: the rows of chains one after another, and the drafts that they judge
        given = jnp.stack([positions.row, positions.token_id]).reshape(2, -1)
        end = jnp.uint32(given.shape[1])
        width = jnp.uint32(shape[1])

        def step(state: Any) -> Any:
            """Reads one row, and goes to the next that may matter."""
            place, found = state
            row, token_id = lax.dynamic_slice_in_dim(given, place, 1, axis=1)
            peak, argmax = self.max_and_argmax(rows.target, row)
            status = jnp.where(jnp.isfinite(peak), Status.OK, Status.BAD_TARGET_ROW)
            both = jnp.stack([argmax, status.astype(jnp.int32)])
            found = lax.dynamic_update_slice_in_dim(found, both, place, axis=1)
            # The rest of a request does not matter after a draft that is not the argmax. (What
            # comes after a bad row is read in vain: nothing of it is used.)
            left = width - lax.rem(place, width)
            return place + jnp.where(argmax[0] == token_id[0], jnp.uint32(1), left), found

        start = jnp.uint32(0), jnp.zeros_like(given)
        _, found = lax.while_loop(lambda state: state[0] < end, step, start)
        argmax, status = found.reshape(2, *shape)
        return positions._replace(argmax=argmax, status=status)

    def of_one_row(self, rows: LocalRows, one: Request, position: Position) -> TargetStatistics:
        """Returns those of one position of one request: its argmax if it is greedy, else sums."""
        row = position.row[:, 0]

        def greedy() -> TargetStatistics:
            peak, argmax = self.max_and_argmax(rows.target, row)
            least = None if one.filter is None else jnp.full((1,), -jnp.inf, jnp.float32)
            sums = jnp.zeros((1, rows.num_tiles), jnp.float32)
            return TargetStatistics(Partials(peak, jnp.ones_like(peak), argmax), least, sums)

        def sampled() -> TargetStatistics:
            # No argmax is wanted, so the maximum needs no look at NaN: the sum shows it.
            peak = self.peak(rows.target, row)
            argmax = jnp.zeros_like(row)
            given = one.inv_temperature, ~one.greedy, one.filter
            stats = self.summed(rows, row, peak, argmax, *given)
            return stats._replace(partials=stats.partials.checked())

        return jax.tree.map(lambda x: x[:, None], lax.cond(one.greedy[0], greedy, sampled))

    # What a CPU does otherwise than a GPU. All rows of a part are read one after another.

    def max_and_argmax(
        self, rows: VocabRows, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        read = functools.partial(super().max_and_argmax, rows)
        if index is not None or not rows.part.is_split:
            return read(index)
        found: tuple[jax.Array, jax.Array] = self.device.each_row(read, rows.matrix.shape[0])
        return found

    def exp_sums(
        self,
        rows: VocabRows,
        index: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None = None,
        num_tiles: int | None = None,
    ) -> jax.Array:
        read = functools.partial(super().exp_sums, rows, num_tiles=num_tiles)
        if index is not None or not rows.part.is_split:
            return read(index, peak, inv_temperature, least)
        given = peak, inv_temperature, least
        found: jax.Array = self.device.each_row(read, rows.matrix.shape[0], *given)
        return found

    def largest_of(
        self, rows: VocabRows, x: jax.Array, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if not rows.part.is_split:
            return super().largest_of(rows, x, index)
        peak, place = self.max_and_place(x)
        return peak, rows.part.ids(place)

    def max_and_place(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        peak = jnp.max(x, axis=1)
        # Two plain reductions: faster on a CPU than one of pairs.
        return peak, jnp.min(jnp.where(x == peak[:, None], index, x.shape[1]), axis=1)

    def in_tiles(
        self,
        rows: VocabRows,
        matrices: Sequence[tuple[jax.Array, float]],
        count: int,
        by_first_id: bool = True,
        by_lanes: bool = False,
    ) -> TileViews:
        # Whole tiles are where they lie; the last one by itself saves a copy of the rows.
        if by_first_id and has_cut_tiles(rows):
            return super().in_tiles(rows, matrices, count, by_first_id, by_lanes)
        return [*whole_and_cut(matrices)]


def _found_of(positions: Position) -> tuple[Any, ...]:
    return tuple(getattr(positions, name) for name in _FOUND)
