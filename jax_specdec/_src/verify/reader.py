"""Reading on XLA: what a position knows of its rows, all rows at once or in order.

*At once*, for GPUs and TPUs, reads the rows of all requests in place, by operations on whole
matrices: a loop of small reads would spend its time on launches. *In order*, for CPUs, takes the
requests one after another, and reads the rows of a position only if the positions before it leave
it to matter.

If the vocabulary is split over devices, each reads its part of every row. One exchange of the
statistics lets all devices decide alike; filters exchange sums as well. No row leaves its device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import ragged
from jax_specdec._src.blocks import gathering
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import Status
from jax_specdec._src.verify import rules, tiles
from jax_specdec._src.verify.draw import LocalRows
from jax_specdec._src.verify.exchange import WHOLE, Exchange, of_owner
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rows import Partials, Rows, argmax_of_parts
from jax_specdec._src.verify.rules import Rule

_MANY_PAIRS = 2**22
"""Pairs of a row and a request from which on owners are searched for."""


class Kernels(NamedTuple):
    """The functions of `mosaic_gpu.phases`, which read rows of a part of the vocabulary."""

    row_statistics: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    part_masses: Callable[..., jax.Array]
    part_draw: Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a platform reads rows.

    Attributes:
      exchange: between the devices that split the vocabulary.
      draft_is_split: whether draft rows are split in the same way. If not, each device has all of
        them.
      kernels: what reads rows of a part on a GPU, or None for XLA.
      in_order: whether rows are read in order, instead of all at once.
      keeps_sums: whether the sums of target rows are kept by tile, to draw by them.
    """

    exchange: Exchange = WHOLE
    draft_is_split: bool = False
    kernels: Kernels | None = None
    in_order: bool = False
    keeps_sums: bool = False


class TargetStatistics(NamedTuple):
    """Statistics of target rows, or of this device's part of them.

    Attributes:
      partials: maximum and sum of the part.
      argmax: of the part.
      threshold: of the whole row, or None.
      sums: ``[..., num_tiles]``, the sum of `partials` by tile; None if only the total is kept.
    """

    partials: Partials
    argmax: jax.Array
    threshold: jax.Array | None
    sums: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the rows of positions.

    Attributes:
      rows: target and draft rows.
      form: how they are read.
    """

    rows: LocalRows
    form: Form

    @property
    def target(self) -> Rows:
        """The target rows."""
        return self.rows.target

    def unread(self, requests: Request) -> Position:
        """All positions of requests ``[B]``, before any row is read."""
        num_tiles = self.rows.num_tiles if self.form.keeps_sums else None
        return Position.unread(requests, self.target.size, num_tiles)

    def read(
        self, requests: Request, positions: Position, rule: Rule, samples: bool = True
    ) -> Position:
        """The chosen positions, with what their rows hold.

        If `samples` is false, every request is greedy, and draft rows are not needed.
        """
        if self.form.in_order:
            read = functools.partial(self._in_order, rule=rule)
            return lax.map(lambda of_one: read(*of_one), (requests, positions))
        if self.form.kernels is not None:
            stats = self._by_kernel(requests, positions)
        elif isinstance(rule, rules.Synthetic):
            stats = self._of_chosen_rows(requests, positions)
        else:
            stats = self._of_all_rows(requests, positions, samples)
        return self._judged(requests, positions, stats)

    def _in_order(self, request: Request, positions: Position, rule: Rule) -> Position:
        """`read` of one request: position after position, until no other row can matter."""
        one, positions = jax.tree.map(lambda x: x[None], (request, positions))
        count, index = positions.offset.shape[1], positions.offset[0]

        def is_left(state: tuple[jax.Array, jax.Array, jax.Array, Position]) -> jax.Array:
            may_matter, i, _, _ = state
            return may_matter & (i < count) & (index[jnp.minimum(i, count - 1)] < one.num_rows[0])

        def step(
            state: tuple[jax.Array, jax.Array, jax.Array, Position],
        ) -> tuple[jax.Array, jax.Array, jax.Array, Position]:
            _, i, weight, positions = state
            this = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, 1, axis=1), positions)
            this = self._judged(one, this, self._of_one_row(one, this))._replace(weight=weight)
            positions = jax.tree.map(
                lambda all, x: lax.dynamic_update_slice_in_dim(all, x, i, axis=1), positions, this
            )
            return rule.goes_on(this)[0, 0], i + 1, rule.next_weight(this), positions

        start = one.is_ok[0], jnp.int32(0), jnp.ones((1, 1), jnp.float32), positions
        *_, positions = lax.while_loop(is_left, step, start)
        return jax.tree.map(lambda x: x[0], positions)

    def _of_all_rows(
        self, requests: Request, positions: Position, samples: bool
    ) -> TargetStatistics:
        """Of all positions: every row is read, in place."""
        num_rows = self.target.matrix.shape[0]
        peak, argmax = self.target.max_and_argmax(None)
        stats = TargetStatistics(Partials(peak, jnp.zeros_like(peak)), argmax, None, None)
        if samples:
            given = requests.inv_temperature, requests.is_ok & ~requests.greedy, requests.filter
            given = _of_owners(requests, num_rows, given)
            partials, sums, least = self._partials(None, peak, *given)
            stats = TargetStatistics(partials, argmax, least, sums)
        rows = jnp.minimum(positions.row, num_rows - 1)
        return jax.tree.map(lambda x: x[rows], stats)

    def _of_chosen_rows(self, requests: Request, positions: Position) -> TargetStatistics:
        """Of one position of each request: only these rows are read."""
        wanted = requests.is_ok & (positions.offset[:, 0] < requests.num_rows)
        rows = jnp.where(wanted, positions.row[:, 0], -1)

        def read(
            rows: jax.Array, inv: jax.Array, sampled: jax.Array, filter: Filter | None
        ) -> TargetStatistics:
            peak, argmax = self.target.max_and_argmax(rows)
            partials, sums, least = self._partials(rows, peak, inv, sampled, filter)
            return TargetStatistics(partials, argmax, least, sums)

        sampled = wanted & ~requests.greedy
        found = gathering(read, rows, requests.inv_temperature, sampled, requests.filter)
        return jax.tree.map(lambda x: x[:, None], found)

    def _of_one_row(self, one: Request, position: Position) -> TargetStatistics:
        """Of one position of one request: the argmax if it is greedy, else the sum."""
        rows = position.row[:, 0]
        least = None if one.filter is None else jnp.full((1,), -jnp.inf, jnp.float32)

        def greedy() -> TargetStatistics:
            peak, argmax = self.target.max_and_argmax(rows)
            sums = None
            if self.form.keeps_sums:
                sums = jnp.zeros((1, self.rows.num_tiles), jnp.float32)
            return TargetStatistics(Partials(peak, jnp.ones_like(peak)), argmax, least, sums)

        def sampled() -> TargetStatistics:
            peak = self.target.peak(rows)
            partials, sums, least = self._partials(
                rows, peak, one.inv_temperature, ~one.greedy, one.filter
            )
            return TargetStatistics(partials.checked(), jnp.zeros_like(rows), least, sums)

        return jax.tree.map(lambda x: x[:, None], lax.cond(one.greedy[0], greedy, sampled))

    def _by_kernel(self, requests: Request, positions: Position) -> TargetStatistics:
        """Of all positions, by a kernel that skips rows without a use."""
        wanted = requests.is_ok[:, None] & (positions.offset < requests.num_rows[:, None])
        found = self._rows_by_kernel(self.target, requests, positions.row, wanted)
        return TargetStatistics(*found, None, None)

    def _rows_by_kernel(
        self, of: Rows, requests: Request, rows: jax.Array, wanted: jax.Array
    ) -> tuple[Partials, jax.Array]:
        """Partials and argmax of the rows ``[B, n]`` that are `wanted`, unfiltered."""
        assert self.form.kernels is not None
        peak, total, column = self.form.kernels.row_statistics(
            of.matrix,
            jnp.clip(rows, 0, of.matrix.shape[0] - 1).reshape(-1),
            requests.inv_temperature,
            requests.greedy,
            wanted.reshape(-1),
            of.first,
            size=of.size,
        )
        peak = jnp.where(jnp.isnan(peak), jnp.inf, peak)
        peak, total, column = (x.reshape(rows.shape) for x in (peak, total, column))
        return Partials(peak, total), of.first + column

    def _partials(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        wanted: jax.Array,
        filter: Filter | None,
    ) -> tuple[Partials, jax.Array | None, jax.Array | None]:
        """Of target rows: partials, their sums by tile or None, and thresholds or None.

        Thresholds are found for the rows that are `wanted`.
        """
        least = None
        if filter is not None:
            given = filter, wanted, peak, inv_temperature, self.form.exchange
            least = self.target.find_thresholds(rows, *given)
        if not self.form.keeps_sums:
            return self.target.partials(rows, peak, inv_temperature, least), None, least
        num_tiles = self.rows.num_tiles
        sums = self.target.sums_by_tile(rows, peak, inv_temperature, least, num_tiles)
        return Partials(peak, jnp.sum(sums, axis=1)), sums, least

    def _judged(self, requests: Request, positions: Position, stats: TargetStatistics) -> Position:
        """Positions with p, q and the status of their rows, from the statistics of this part."""
        exchange, width, least = self.form.exchange, self.target.width, stats.threshold
        ids, inv, greedy = positions.token_id, positions.inv_temperature, requests.greedy[:, None]
        of_target = stats.partials, stats.argmax, self.target.at(positions.row, ids)
        # No draft follows the last of several positions.
        drafted = jax.tree.map(lambda x: x[:, : max(1, ids.shape[1] - 1)], positions)
        of_draft = self._of_drafts(requests, drafted)
        if self.form.draft_is_split:
            of_target, of_draft = exchange.gather((of_target, of_draft))
        else:
            of_target, of_draft = exchange.gather(of_target), WHOLE.gather(of_draft)
        parts, argmaxes, logit = of_target
        whole, p_masses = Partials.of_whole(parts, inv), None
        if stats.sums is not None:
            p_masses = stats.sums * whole.share_of(stats.partials, inv)[..., None]
        scale = tiles.Scale(whole.max, jnp.log(whole.sum))
        argmax = argmax_of_parts(parts.max, argmaxes)
        logit = tiles.apply_threshold(of_owner(logit, ids, width), least)
        is_argmax = rules.accepts_greedy(ids, argmax).astype(jnp.float32)
        status = jnp.where(jnp.isfinite(whole.max), Status.OK, Status.BAD_TARGET_ROW)
        positions = positions._replace(
            argmax=argmax,
            scale=scale,
            threshold=least,
            p_masses=p_masses,
            p=jnp.where(greedy, is_argmax, scale.probs(logit, inv)),
            status=status.astype(jnp.int32),
        )
        if of_draft is None:
            return positions
        entry, partials = of_draft
        draft = self.rows.draft
        assert draft is not None
        partials = (
            None if partials is None else Partials.of_whole(partials, drafted.inv_temperature)
        )
        entry = of_owner(entry, drafted.token_id, width)
        found = entry, draft.scales(drafted.draft_row, partials)
        missing = ((0, 0), (0, ids.shape[1] - entry.shape[1]))
        entry, draft_scale = jax.tree.map(lambda x: jnp.pad(x, missing), found)
        q = jnp.where(positions.uses_q, draft.probs(entry, draft_scale, inv), positions.q)
        is_bad = positions.uses_q & (draft_scale.bad | ~((q >= 0) & (q < jnp.inf)))
        is_bad &= positions.status == Status.OK
        status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, positions.status)
        return positions._replace(q=q, draft_scale=draft_scale, status=status)

    def _of_drafts(self, requests: Request, positions: Position) -> Any:
        """The drafts' entries in their draft rows, and the rows' partials or None, of this part."""
        draft = self.rows.draft
        if draft is None:
            return None
        entries = draft.rows.at(positions.draft_row, positions.token_id)
        if not draft.needs_statistics:
            return entries, None
        wanted = positions.uses_q & requests.is_ok[:, None]
        by_kernel = self.form.kernels is not None and self.form.draft_is_split
        if by_kernel and isinstance(draft.rows, Rows):
            given = requests, positions.draft_row, wanted
            return entries, self._rows_by_kernel(draft.storage, *given)[0]

        def read(rows: jax.Array, inv: jax.Array) -> Partials:
            return draft.storage.partials(rows, draft.storage.peak(rows), inv).checked()

        rows = jnp.where(wanted, positions.draft_row, -1).reshape(-1)
        found = gathering(read, rows, positions.inv_temperature.reshape(-1))
        return entries, jax.tree.map(lambda x: x.reshape(wanted.shape), found)


def _of_owners(requests: Request, size: int, values: Any) -> Any:
    """Arrays ``[B]`` as ``[size]``: for each target row, the value of its owner; 0 without one.

    A sum over all pairs of a row and a request takes one kernel on a GPU; finding the owners and
    indexing with them take several, but their time and memory do not grow with B squared.
    """
    num_rows = jnp.where(requests.is_ok, requests.num_rows, 0)
    if size * num_rows.shape[0] > _MANY_PAIRS:
        owner, is_owned = ragged.owner_of_rows(requests.first_row, num_rows, size)
        return jax.tree.map(lambda x: jnp.where(is_owned, x[owner], jnp.zeros_like(x[0])), values)
    row = jnp.arange(size, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    owns = (row >= 0) & (row < num_rows[None, :])

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(owns, x[None, :], jnp.zeros_like(x)), axis=1, dtype=x.dtype)

    return jax.tree.map(summed, values)
