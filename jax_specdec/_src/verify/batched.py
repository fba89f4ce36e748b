"""The XLA backend: the three phases joined, in two forms.

`"xla_batched"`, for GPUs and TPUs, reads the rows of all requests at once and in place, by
operations on whole matrices: a loop of small reads would spend its time on launches. `"xla_lazy"`,
for CPUs, goes through the requests one after another and reads a row only when its position is
reached. Deciding and drawing are the same in both. Only small arrays go under `vmap`: there a
conditional computes both branches, and repeats what it closes over for every request.

If the vocabulary is split over devices, each device reads its part of every row, and there are
three exchanges:

1. the statistics and the drafts' logits, by which all devices decide alike;
2. the masses of tiles, by which all devices find the tile that the token is in;
3. the token, which the device that holds it draws.

Filters exchange sums as well. No row leaves its device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import entries_of, entry_of, gathering
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, RejectionSampleOutput, Status
from jax_specdec._src.verify import decide, resample, tiles
from jax_specdec._src.verify.decide import RowStatistics
from jax_specdec._src.verify.draft_rows import DraftRows, DraftScale
from jax_specdec._src.verify.exchange import WHOLE, Exchange, of_owner
from jax_specdec._src.verify.requests import CallArrays, Request, requests_of
from jax_specdec._src.verify.resample import LocalRows, Source
from jax_specdec._src.verify.rows import Partials, Rows, argmax_of_parts, compute_once
from jax_specdec._src.verify.rules import Rule

_LARGE = 2**23
"""Bytes of logits from which on it pays to ask first whether any request samples."""

MAX_PIECES = 32
"""Parts of the vocabulary that may share a tile if `Kernels.part_draw` draws: a lane for each."""


class Kernels(NamedTuple):
    """The functions of `mosaic_gpu.shard_kernels`, which read rows of a part of the vocabulary."""

    row_statistics: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    part_masses: Callable[..., jax.Array]
    part_draw: Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the vocabulary is split over devices.

    Attributes:
      exchange: between them.
      draft_is_split: whether draft rows are split in the same way. If not, each device has all of
        them.
      kernels: what reads rows on a GPU, or None for XLA.
    """

    exchange: Exchange = WHOLE
    draft_is_split: bool = False
    kernels: Kernels | None = None


def verify(
    arrays: CallArrays,
    rule: Rule,
    *,
    k: int,
    size: int,
    lazy: bool | None = None,
    split: Split,
) -> RejectionSampleOutput:
    """Verify a batch.

    Args:
      arrays: of the call, with at least one target row. If the vocabulary is split, the logits are
        this device's columns of them, and all else is the same on all devices that split it.
      rule: the rule.
      k: K.
      size: ids from it on are padding; at most V.
      lazy: whether to read rows one by one as they are reached, or all at once; None chooses by
        platform.
      split: how the vocabulary is split. If it is, rows are read all at once.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all devices that split the vocabulary.
    """

    def one_by_one(arrays: CallArrays) -> RejectionSampleOutput:
        return _Phases.of_call(arrays, size, rule, split).one_by_one(requests_of(arrays, k))

    def all_at_once(
        arrays: CallArrays, keeps_sums: bool, samples: bool = True
    ) -> RejectionSampleOutput:
        phases = _Phases.of_call(arrays, size, rule, split)
        phases = dataclasses.replace(phases, keeps_sums=keeps_sums)
        return phases.all_at_once(requests_of(arrays, k), samples)

    def unless_greedy(arrays: CallArrays, keeps_sums: bool = True) -> RejectionSampleOutput:
        logits, samples = arrays.target_logits, arrays.sampling.temperature != 0
        some = functools.partial(all_at_once, keeps_sums=keeps_sums)
        if logits.size * logits.dtype.itemsize < _LARGE or rule.conditional_rates is not None:
            return some(arrays)
        if arrays.active is not None:
            samples &= arrays.active

        def none(arrays: CallArrays) -> RejectionSampleOutput:
            no_rows = dataclasses.replace(arrays.drafts, distribution=None)
            return some(arrays._replace(drafts=no_rows), samples=False)

        # Each branch makes its own requests, so that XLA fuses what they are made of with its use.
        return lax.cond(jnp.any(samples), some, none, arrays)

    if split.exchange.axis is not None:
        return all_at_once(arrays, keeps_sums=False)
    if lazy:
        return one_by_one(arrays)
    # To sum rows by tile, a TPU would copy all of them.
    on_tpu = functools.partial(unless_greedy, keeps_sums=False)
    on_cpu = one_by_one if lazy is None else unless_greedy
    return lax.platform_dependent(arrays, cpu=on_cpu, tpu=on_tpu, default=unless_greedy)


def sample(
    logits: jax.Array,
    inv_temperature: jax.Array,
    greedy: jax.Array,
    filter: Filter | None,
    uniforms: jax.Array,
    *,
    exchange: Exchange = WHOLE,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Sample one token from each row, as a verification without drafts would.

    Args:
      logits: ``[B, V]``, or this device's columns of them.
      inv_temperature: ``[B]`` float32.
      greedy: ``[B]`` bool.
      filter: min-p, top-k and top-p, ``[B]``; None for none.
      uniforms: ``[B, 2]`` float32, for tile and token.
      exchange: between the devices that split the vocabulary.

    Returns:
      Three arrays ``[B]``: token ids; ``logsumexp(logits / temperature)`` of the logits that the
      filter keeps; and the thresholds below which it keeps none, or None without a filter.
    """
    phases = _Phases.of_rows(logits, exchange)
    peak, argmax = phases.target.max_and_argmax(None)
    partials, sums, least = phases.partials(None, peak, inv_temperature, ~greedy, filter)
    assert sums is not None
    parts, argmaxes = exchange.gather((partials, argmax))
    stats = Partials.of_whole(parts, inv_temperature)
    scale = tiles.Scale(stats.max, jnp.log(stats.sum))
    no = jnp.zeros_like(greedy)
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)
    p_masses = sums * stats.share_of(partials, inv_temperature)[:, None]
    source = Source(
        row=index,
        draft_row=index,
        token_id=index,
        scale=scale,
        threshold=least,
        p_masses=p_masses,
        draft_scale=DraftScale.unit(),
        weight=jnp.ones_like(stats.max),
        from_residual=no,
        without_token=no,
        inv_temperature=inv_temperature,
    )
    masses = jnp.stack([p_masses, p_masses], axis=1)
    drawn, _ = phases.draw(source, exchange.gather(masses), uniforms)
    token_ids = jnp.where(greedy, argmax_of_parts(parts.max, argmaxes), drawn)
    return token_ids, stats.max * inv_temperature + scale.log_scale, least


def argmax(logits: jax.Array, exchange: Exchange) -> jax.Array:
    """``[B]`` int32, the argmax of each row of ``[B, V]``; ties go to the lowest id."""
    target = _Phases.of_rows(logits, exchange).target
    return argmax_of_parts(*exchange.gather(target.max_and_argmax(None)))


class _TargetStatistics(NamedTuple):
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
class _Phases:
    """The steps of `verify`.

    Attributes:
      rows: target and draft rows.
      rule: the rule.
      split: how the vocabulary is split.
      keeps_sums: whether the sums of target rows are kept by tile, to draw by them.
    """

    rows: LocalRows
    rule: Rule
    split: Split
    keeps_sums: bool = True

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        distribution: DraftDistribution | None,
        token_bitmask: jax.Array | None,
        size: int,
        rule: Rule,
        split: Split,
    ) -> _Phases:
        target = Rows.of_logits(target_logits, size, token_bitmask, split.exchange)
        target = target if target.first_id is None else target.masked()
        draft = None
        if distribution is not None:
            first_id = target.first_id if split.draft_is_split else None
            draft = DraftRows.of(distribution, size, first_id)
        return cls(LocalRows(target, draft, split.exchange.num_parts), rule, split)

    @classmethod
    def of_call(cls, arrays: CallArrays, size: int, rule: Rule, split: Split) -> _Phases:
        """For a call."""
        distribution = arrays.drafts.distribution
        return cls.of(arrays.target_logits, distribution, arrays.token_bitmask, size, rule, split)

    @classmethod
    def of_rows(cls, logits: jax.Array, exchange: Exchange) -> _Phases:
        """For rows alone, without drafts or padding."""
        size = logits.shape[1] * exchange.num_parts
        return cls.of(logits, None, None, size, Rule("standard", None), Split(exchange))

    @property
    def target(self) -> Rows:
        return self.rows.target

    def positions(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """Positions ``[P]`` whose target rows are read, and indices ``[D]`` of the drafts there."""
        if self.rule.conditional_rates is None:
            positions = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
            return positions, positions[:-1]
        rates = jnp.array(self.rule.conditional_rates, jnp.float32)
        positions = decide.num_accepted_by_rate(request, rates, self.target.size)[None]
        return positions, request.place(positions)

    def all_at_once(self, requests: Request, samples: bool = True) -> RejectionSampleOutput:
        """All phases. Each row is read, whether or not its position is reached.

        If `samples` is false, every request is greedy, and draft rows are not needed.
        """
        positions, places = jax.vmap(self.positions)(requests)
        if self.split.kernels is not None:
            stats = self.statistics_by_kernel(requests, positions)
        elif self.rule.conditional_rates is not None:
            stats = self.statistics_of_rows(requests, positions)
        else:
            stats = self.statistics_in_place(requests, positions, samples)
        rows = self.row_statistics(requests, positions, places, stats)
        return self.finish(requests, rows, samples)

    def one_by_one(self, requests: Request) -> RejectionSampleOutput:
        """All phases; phase 1 request by request, each only as far as its rule goes."""
        return self.finish(requests, lax.map(self.read_in_order, requests))

    def read_in_order(self, request: Request) -> RowStatistics:
        """Phase 1 of one request: read its rows in order, until no other row can matter."""
        one = jax.tree.map(lambda x: x[None], request)
        positions, _ = self.positions(request)

        def read(position: jax.Array) -> RowStatistics:
            at = position[None, None]
            stats = self.statistics_of_one(one, position)
            return self.row_statistics(one, at, request.place(at), stats)

        def is_left(state: tuple[jax.Array, jax.Array, RowStatistics]) -> jax.Array:
            may_matter, count, _ = state
            position = positions[jnp.minimum(count, positions.shape[0] - 1)]
            return may_matter & (count < positions.shape[0]) & (position < request.num_rows)

        def step(
            state: tuple[jax.Array, jax.Array, RowStatistics],
        ) -> tuple[jax.Array, jax.Array, RowStatistics]:
            _, count, rows = state
            found = read(positions[count])
            rows = jax.tree.map(lambda all, x: all.at[count].set(x[0, 0]), rows, found)
            draft, size = self.rows.draft, self.target.size
            drafts = decide.judge_drafts(request, rows, draft, size, self.rule)
            may_matter = decide.goes_on(request, drafts, self.rule)[count]
            return may_matter, count + 1, rows

        shapes = jax.eval_shape(read, positions[0])
        count = positions.shape[0]
        unread = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[2:]), x.dtype), shapes)
        unread = unread._replace(position=positions)
        start = request.status == Status.OK, jnp.int32(0), unread
        return lax.while_loop(is_left, step, start)[2]

    def partials(
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
        least, exchange = None, self.split.exchange
        if filter is not None:
            given = filter, wanted, peak, inv_temperature, exchange
            least = self.target.find_thresholds(rows, *given)
        if not self.keeps_sums:
            return self.target.partials(rows, peak, inv_temperature, least), None, least
        num_tiles = self.rows.num_tiles
        sums = self.target.sums_by_tile(rows, peak, inv_temperature, least, num_tiles)
        return Partials(peak, jnp.sum(sums, axis=1)), sums, least

    def statistics_in_place(
        self, requests: Request, positions: jax.Array, samples: bool
    ) -> _TargetStatistics:
        """Of target rows at positions ``[B, P]``: all rows are read, in place."""
        num_rows = self.target.matrix.shape[0]
        peak, argmax = self.target.max_and_argmax(None)
        stats = _TargetStatistics(Partials(peak, jnp.zeros_like(peak)), argmax, None, None)
        if samples:
            owns = _owns(requests, num_rows)
            sampled = (requests.status == Status.OK) & ~requests.greedy
            given = requests.inv_temperature, sampled, requests.filter
            given = jax.tree.map(functools.partial(_of_owner, owns), given)
            partials, sums, least = self.partials(None, peak, *given)
            stats = _TargetStatistics(partials, argmax, least, sums)
        rows = jnp.minimum(requests.first_row[:, None] + positions, num_rows - 1)
        return jax.tree.map(lambda x: x[rows], stats)

    def statistics_of_rows(self, requests: Request, positions: jax.Array) -> _TargetStatistics:
        """Of target rows at one position each, ``[B, 1]``: only these rows are read."""
        wanted = (requests.status == Status.OK) & (positions[:, 0] < requests.num_rows)
        rows = jnp.where(wanted, requests.first_row + positions[:, 0], -1)

        def read(
            rows: jax.Array, inv: jax.Array, sampled: jax.Array, filter: Any
        ) -> _TargetStatistics:
            peak, argmax = self.target.max_and_argmax(rows)
            partials, sums, least = self.partials(rows, peak, inv, sampled, filter)
            return _TargetStatistics(partials, argmax, least, sums)

        sampled = wanted & ~requests.greedy
        found = gathering(read, rows, requests.inv_temperature, sampled, requests.filter)
        return jax.tree.map(lambda x: x[:, None], found)

    def statistics_of_one(self, one: Request, position: jax.Array) -> _TargetStatistics:
        """Of one row of one request, ``[1, 1]``: the argmax if it is greedy, else the sum."""
        rows = one.first_row + position
        least = None if one.filter is None else jnp.full((1,), -jnp.inf, jnp.float32)

        def greedy() -> _TargetStatistics:
            peak, argmax = self.target.max_and_argmax(rows)
            sums = jnp.zeros((1, self.rows.num_tiles), jnp.float32)
            return _TargetStatistics(Partials(peak, jnp.ones_like(peak)), argmax, least, sums)

        def sampled() -> _TargetStatistics:
            peak = self.target.peak(rows)
            given = peak, one.inv_temperature, ~one.greedy, one.filter
            partials, sums, least = self.partials(rows, *given)
            return _TargetStatistics(partials.checked(), jnp.zeros_like(rows), least, sums)

        return jax.tree.map(lambda x: x[:, None], lax.cond(one.greedy[0], greedy, sampled))

    def statistics_by_kernel(self, requests: Request, positions: jax.Array) -> _TargetStatistics:
        """Of target rows at positions ``[B, P]``, by a kernel that skips rows without a use."""
        wanted = (requests.status == Status.OK)[:, None] & (positions < requests.num_rows[:, None])
        rows = requests.first_row[:, None] + positions
        return _TargetStatistics(*self._by_kernel(self.target, requests, rows, wanted), None, None)

    def _by_kernel(
        self, of: Rows, requests: Request, rows: jax.Array, wanted: jax.Array
    ) -> tuple[Partials, jax.Array]:
        """Partials and argmax of the rows ``[B, n]`` that are `wanted`, unfiltered."""
        assert self.split.kernels is not None
        peak, total, column = self.split.kernels.row_statistics(
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

    def row_statistics(
        self, requests: Request, positions: jax.Array, places: jax.Array, stats: _TargetStatistics
    ) -> RowStatistics:
        """End phase 1: statistics of whole rows, from those of every part.

        Args:
          requests: the requests.
          positions: ``[B, P]`` int32.
          places: ``[B, D]`` int32, indices of the drafts at the first D positions.
          stats: of this part of the target rows at these positions.
        """
        exchange, width, least = self.split.exchange, self.target.width, stats.threshold
        last = requests.token_ids.shape[1] - 1
        ids = entries_of(requests.token_ids, jnp.minimum(positions, last))
        rows = requests.first_row[:, None] + positions
        of_target = stats.partials, stats.argmax, self.target.at(rows, ids)
        draft, of_draft = self.rows.draft, None
        if draft is not None:
            draft_rows = entries_of(requests.draft_rows, places)
            draft_ids = entries_of(requests.token_ids, places)
            partials = None
            if draft.needs_statistics:
                partials = self._draft_partials(draft, requests, draft_rows, places)
            of_draft = draft.rows.at(draft_rows, draft_ids), partials
        if self.split.draft_is_split:
            of_target, of_draft = exchange.gather((of_target, of_draft))
        else:
            of_target, of_draft = exchange.gather(of_target), WHOLE.gather(of_draft)
        parts, argmaxes, logit = of_target
        inv = requests.inv_temperature[:, None]
        draft_entry = draft_scale = None
        if draft is not None:
            draft_entry, partials = of_draft
            partials = None if partials is None else Partials.of_whole(partials, inv)
            draft_entry = of_owner(draft_entry, draft_ids, width)
            draft_scale = draft.scales(draft_rows, partials)
        target, p_masses = Partials.of_whole(parts, inv), None
        if stats.sums is not None:
            p_masses = stats.sums * target.share_of(stats.partials, inv)[..., None]
        return RowStatistics(
            position=positions,
            target=target,
            argmax=argmax_of_parts(parts.max, argmaxes),
            threshold=least,
            p_masses=p_masses,
            logit=tiles.apply_threshold(of_owner(logit, ids, width), least),
            draft_entry=draft_entry,
            draft_scale=draft_scale,
        )

    def _draft_partials(
        self, draft: DraftRows, requests: Request, draft_rows: jax.Array, places: jax.Array
    ) -> Partials:
        """Maximum and sum of draft rows ``[B, D]``, or of this part of them."""
        wanted = (requests.status == Status.OK) & requests.stored & ~requests.greedy
        wanted = wanted[:, None] & (places < requests.num_drafts[:, None])
        by_kernel = self.split.kernels is not None and self.split.draft_is_split
        if by_kernel and isinstance(draft.rows, Rows):
            return self._by_kernel(draft.storage, requests, draft_rows, wanted)[0]

        def read(rows: jax.Array, inv: jax.Array) -> Partials:
            return draft.storage.partials(rows, draft.storage.peak(rows), inv).checked()

        inv = jnp.broadcast_to(requests.inv_temperature[:, None], wanted.shape).reshape(-1)
        found = gathering(read, jnp.where(wanted, draft_rows, -1).reshape(-1), inv)
        return jax.tree.map(lambda x: x.reshape(wanted.shape), found)

    def finish(
        self, requests: Request, rows: RowStatistics, samples: bool = True
    ) -> RejectionSampleOutput:
        """Phases 2 and 3. If `samples` is false, every request is greedy."""
        draft, rule, size = self.rows.draft, self.rule, self.target.size
        judge_drafts = functools.partial(decide.judge_drafts, draft=draft, size=size, rule=rule)
        drafts = jax.vmap(judge_drafts)(requests, rows)
        sources = jax.vmap(decide.sources_of)(requests, rows, drafts)
        masses, residual_masses = None, jnp.zeros_like(drafts.p)
        if rule.is_block and draft is not None:  # the rule takes the mass at every position
            masses = self.masses(compute_once(sources))
            residual_masses = jnp.sum(masses[..., 0, :], axis=(0, 3))
        count_accepted = functools.partial(decide.count_accepted, size=size, rule=rule)
        num_accepted, status = jax.vmap(count_accepted)(requests, rows, drafts, residual_masses)
        index = num_accepted - rows.position[:, 0]
        token_ids = entry_of(rows.argmax, index)
        bad_draft = jnp.zeros_like(requests.greedy)
        if samples:
            source = compute_once(jax.tree.map(lambda x: entry_of(x, index), sources))
            if requests.exponential is not None:
                drawn, bad_draft = self.rows.race(source, requests.exponential)
            else:
                if masses is None:
                    masses = self.masses(jax.tree.map(lambda x: x[:, None], source))[:, :, 0]
                else:
                    masses = jax.vmap(entry_of, (0, None))(masses, index)
                drawn, bad_draft = self.draw(source, masses, requests.recover)
            token_ids = jnp.where(requests.greedy, token_ids, drawn)
        status = jnp.where(requests.status == Status.OK, status, requests.status)
        bad_draft &= ~requests.greedy
        return jax.vmap(decide.assemble)(requests, num_accepted, status, token_ids, bad_draft)

    def masses(self, source: Source) -> jax.Array:
        """``[num_parts, B, P, 2, n]``: masses of the tiles of every part, of sources ``[B, P]``."""
        kernels, shape = self._draw_kernels, source.row.shape
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), source)
        if kernels is not None:
            found = kernels.part_masses(flat, **self._part, num_parts=self.rows.num_parts)
        else:
            found = gathering(lambda _, source: self.rows.masses(source), flat.row, flat)
        return self.split.exchange.gather(found.reshape(*shape, *found.shape[1:]))

    def draw(
        self, source: Source, masses: jax.Array, recover: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """`resample.draw`, or its form in a kernel."""
        assert recover is not None
        exchange, kernels = self.split.exchange, self._draw_kernels
        if kernels is not None:
            token_ids, bad = kernels.part_draw(source, recover, masses, **self._part)
            return exchange.sum(token_ids), source.from_residual & (bad | source.draft_scale.bad)
        return resample.draw(self.rows, source, masses, recover, exchange)

    @property
    def _draw_kernels(self) -> Kernels | None:
        """The kernels, if they can read the rows to draw from: draft rows split as the target."""
        rows, width = self.rows, self.target.width
        pieces = resample.pieces_of_tiles(width, rows.num_parts, rows.num_tiles)
        can_read = rows.draft is None or self.split.draft_is_split
        return self.split.kernels if can_read and pieces.shape[1] <= MAX_PIECES else None

    @property
    def _part(self) -> dict[str, Any]:
        """The arguments of the kernels that draw: what they read."""
        target, draft = self.target, self.rows.draft
        return dict(
            target=target.matrix,
            distribution=None if draft is None else draft.distribution,
            first_id=target.first,
            size=target.size,
        )


def _owns(requests: Request, num_rows: int) -> jax.Array:
    """``[M, B]`` bool, whether a request owns a target row; each row has at most one owner."""
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    is_ok = (requests.status == Status.OK)[None, :]
    return (row >= 0) & (row < requests.num_rows[None, :]) & is_ok


def _of_owner(owns: jax.Array, x: jax.Array) -> jax.Array:
    """``[M]``: the value in ``[B]`` of each row's owner; 0 for a row without one.

    A sum takes one kernel on a GPU; finding the owner and indexing with it take two.
    """
    return jnp.sum(jnp.where(owns, x[None, :], jnp.zeros_like(x)), axis=1, dtype=x.dtype)
