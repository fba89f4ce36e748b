"""The XLA backend in its two forms: row statistics, decide, resample.

On GPUs and TPUs the rows of all requests are read at once, where they lie, by operations on whole
matrices: a loop of small reads would be all launches. On CPUs requests are walked one after another
and a row is read only when its position is reached. Deciding and drawing are the same. Only small
arrays go under `vmap`: there a conditional computes both branches, and repeats what it closes over
for every request.

Where the vocabulary is split over devices, each reads its part of every row, and three exchanges
stand between the phases: of statistics and the drafted tokens' entries, after which all devices
decide alike; of the masses of tiles, after which all know where the token is; and of the token,
which the device that holds it draws. Filters exchange sums besides. No row leaves its device.
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
from jax_specdec._src.verify import decide, tiles
from jax_specdec._src.verify.decide import Known, Request
from jax_specdec._src.verify.draft_rows import DraftRows, DraftScale
from jax_specdec._src.verify.exchange import WHOLE, Exchange, of_holder
from jax_specdec._src.verify.requests import CallArrays, unpack
from jax_specdec._src.verify.resample import Source, Weights, pick_and_draw, pieces_of_tiles
from jax_specdec._src.verify.rows import Partials, Rows, as_they_are, best_of
from jax_specdec._src.verify.rules import Rule

_LARGE = 2**23
"""Bytes of logits from which on asking whether anybody samples costs less than their sums do."""

MAX_PIECES = 32
"""Parts of the vocabulary that may share a tile, where `Kernels.part_draw` draws: a lane each."""


class Kernels(NamedTuple):
    """Functions of `mosaic_gpu` that read rows of a part of the vocabulary."""

    row_statistics: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    tile_masses: Callable[..., jax.Array]
    part_draw: Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Split:
    """How the vocabulary is split over devices.

    Attributes:
      exchange: over them.
      draft_is_split: whether draft rows are split alike; if not, each device has whole ones.
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
      arrays: of the call, with at least one target row; of a split vocabulary, this device's
        columns of logits. All else is the same on all devices that split it.
      rule: the rule.
      k: K.
      size: ids that count, at most V.
      lazy: read rows one by one as they are reached, or all at once; None chooses by platform.
      split: how the vocabulary is split; if it is, rows are read all at once.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all those devices.
    """

    def one_by_one(arrays: CallArrays) -> RejectionSampleOutput:
        return _Phases.of_call(arrays, size, rule, split).one_by_one(unpack(arrays, k))

    def all_at_once(
        arrays: CallArrays, keeps_sums: bool, samples: bool = True
    ) -> RejectionSampleOutput:
        phases = _Phases.of_call(arrays, size, rule, split)
        phases = dataclasses.replace(phases, keeps_sums=keeps_sums)
        return phases.all_at_once(unpack(arrays, k), samples)

    def unless_greedy(arrays: CallArrays, keeps_sums: bool = True) -> RejectionSampleOutput:
        logits, samples = arrays.target_logits, arrays.sampling.temperature != 0
        some = functools.partial(all_at_once, keeps_sums=keeps_sums)
        if logits.size * logits.dtype.itemsize < _LARGE or rule.conditional_rates is not None:
            return some(arrays)
        if arrays.active is not None:
            samples &= arrays.active
        # Each branch unpacks for itself, so that all it computes is fused with what uses it.
        none = functools.partial(some, samples=False)
        return lax.cond(jnp.any(samples), some, none, arrays)

    if split.exchange.axis is not None:
        return all_at_once(arrays, keeps_sums=False)
    if lazy:
        return one_by_one(arrays)
    # A TPU would copy all rows to sum them by tile.
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
    """One token of each row, as a verification without drafts would emit it.

    Args:
      logits: ``[B, V]``, or this device's columns of them.
      inv_temperature: ``[B]`` float32.
      greedy: ``[B]`` bool.
      filter: what to leave out, ``[B]``; None for nothing.
      uniforms: ``[B, 2]`` float32, for tile and token.
      exchange: over the devices that split the vocabulary.

    Returns:
      Token ids; ``logsumexp(logits / temperature)`` of what is not left out; and the thresholds
      below which entries were left out, None where nothing can have been. ``[B]`` each.
    """
    phases = _Phases.of_rows(logits, exchange)
    peak, best_id = phases.target.largest(None)
    partials, sums, least = phases.partials(None, peak, inv_temperature, ~greedy, filter)
    assert sums is not None
    parts, best_ids = exchange.gather((partials, best_id))
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
    token_ids = jnp.where(greedy, best_of(parts.max, best_ids), drawn)
    return token_ids, stats.max * inv_temperature + scale.log_scale, least


def best_ids(logits: jax.Array, exchange: Exchange) -> jax.Array:
    """``[B]`` int32, the argmax of each row ``[B, V]``, ties to the lowest id."""
    target = _Phases.of_rows(logits, exchange).target
    return best_of(*exchange.gather(target.largest(None)))


class _Statistics(NamedTuple):
    """Of this part of target rows.

    Attributes:
      partials: of the part.
      best_id: its argmax.
      threshold: of the row, or None.
      sums: those of `Partials` by tile, ``[..., num_tiles]``; None where only totals are read.
    """

    partials: Partials
    best_id: jax.Array
    threshold: jax.Array | None
    sums: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Phases:
    """The steps of `verify`.

    Attributes:
      weights: target and draft rows, and what tokens are drawn by.
      rule: the rule.
      split: how the vocabulary is split.
      keeps_sums: whether sums of target rows are kept by tile, for drawing from them.
    """

    weights: Weights
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
        return cls(Weights(target, draft, split.exchange.num_parts), rule, split)

    @classmethod
    def of_call(cls, arrays: CallArrays, size: int, rule: Rule, split: Split) -> _Phases:
        """Those of a call."""
        distribution = arrays.drafts.distribution
        return cls.of(arrays.target_logits, distribution, arrays.token_bitmask, size, rule, split)

    @classmethod
    def of_rows(cls, logits: jax.Array, exchange: Exchange) -> _Phases:
        """Those of rows alone, of which all ids count."""
        size = logits.shape[1] * exchange.num_parts
        return cls.of(logits, None, None, size, Rule("standard", None), Split(exchange))

    @property
    def target(self) -> Rows:
        return self.weights.target

    def positions(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """Positions ``[P]`` whose target row is read, and places ``[D]`` of drafts likewise."""
        if self.rule.conditional_rates is None:
            positions = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
            return positions, positions[:-1]
        rates = jnp.array(self.rule.conditional_rates, jnp.float32)
        positions = decide.num_accepted_by_rate(request, rates, self.target.size)[None]
        return positions, request.place(positions)

    def all_at_once(self, requests: Request, samples: bool = True) -> RejectionSampleOutput:
        """Phases 1 to 3; each row is read whether or not its position is reached.

        `samples` says whether anybody may sample; if not, no draft row counts.
        """
        phases = self
        if not samples:
            phases = dataclasses.replace(
                self, weights=dataclasses.replace(self.weights, draft=None)
            )
        positions, places = jax.vmap(self.positions)(requests)
        if self.split.kernels is not None:
            stats = self.statistics_by_kernel(requests, positions)
        elif self.rule.conditional_rates is not None:
            stats = self.statistics_of_rows(requests, positions)
        else:
            stats = self.statistics_in_place(requests, positions, samples)
        known = phases.known(requests, positions, places, stats)
        return phases.finish(requests, known, samples)

    def one_by_one(self, requests: Request) -> RejectionSampleOutput:
        """The same; phase 1 goes request by request, and ends where its rule does."""
        return self.finish(requests, lax.map(self.known_of_one, requests))

    def known_of_one(self, request: Request) -> Known:
        """What is known of a request once its rows are read in order, as far as they matter."""
        one = jax.tree.map(lambda x: x[None], request)
        positions, _ = self.positions(request)

        def read(position: jax.Array) -> Known:
            at = position[None, None]
            stats = self.statistics_of_one(one, position)
            return self.known(one, at, request.place(at), stats)

        def is_left(state: tuple[jax.Array, jax.Array, Known]) -> jax.Array:
            may_matter, count, _ = state
            position = positions[jnp.minimum(count, positions.shape[0] - 1)]
            return may_matter & (count < positions.shape[0]) & (position < request.num_rows)

        def step(
            state: tuple[jax.Array, jax.Array, Known],
        ) -> tuple[jax.Array, jax.Array, Known]:
            _, count, known = state
            found = read(positions[count])
            known = jax.tree.map(lambda all, x: all.at[count].set(x[0, 0]), known, found)
            drafts = decide.judge(request, known, self.weights.draft, self.target.size, self.rule)
            may_matter = decide.goes_on(request, drafts, self.rule)[count]
            return may_matter, count + 1, known

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
        """Of rows: partials, their sums by tile, and thresholds of what is wanted and filtered."""
        least, exchange = None, self.split.exchange
        if filter is not None:
            given = filter, wanted, peak, inv_temperature, exchange
            least = self.target.find_thresholds(rows, *given)
        if not self.keeps_sums:
            return self.target.partials(rows, peak, inv_temperature, least), None, least
        num_tiles = self.weights.num_tiles
        sums = self.target.sums_by_tile(rows, peak, inv_temperature, least, num_tiles)
        return Partials(peak, jnp.sum(sums, axis=1)), sums, least

    def statistics_in_place(
        self, requests: Request, positions: jax.Array, samples: bool
    ) -> _Statistics:
        """Of target rows at positions ``[B, P]``, of all rows where they lie."""
        num_rows = self.target.matrix.shape[0]
        peak, best_id = self.target.largest(None)
        stats = _Statistics(Partials(peak, jnp.zeros_like(peak)), best_id, None, None)
        if samples:
            owns = _owns(requests, num_rows)
            sampled = (requests.status == Status.OK) & ~requests.greedy
            given = requests.inv_temperature, sampled, requests.filter
            given = jax.tree.map(functools.partial(_of_owner, owns), given)
            partials, sums, least = self.partials(None, peak, *given)
            stats = _Statistics(partials, best_id, least, sums)
        rows = jnp.minimum(requests.first_row[:, None] + positions, num_rows - 1)
        return jax.tree.map(lambda x: x[rows], stats)

    def statistics_of_rows(self, requests: Request, positions: jax.Array) -> _Statistics:
        """Of target rows at positions ``[B, 1]``, each read by itself."""
        wanted = (requests.status == Status.OK) & (positions[:, 0] < requests.num_rows)
        rows = jnp.where(wanted, requests.first_row + positions[:, 0], -1)

        def read(rows: jax.Array, inv: jax.Array, sampled: jax.Array, filter: Any) -> _Statistics:
            peak, best_id = self.target.largest(rows)
            partials, sums, least = self.partials(rows, peak, inv, sampled, filter)
            return _Statistics(partials, best_id, least, sums)

        sampled = wanted & ~requests.greedy
        found = gathering(read, rows, requests.inv_temperature, sampled, requests.filter)
        return jax.tree.map(lambda x: x[:, None], found)

    def statistics_of_one(self, one: Request, position: jax.Array) -> _Statistics:
        """Of one row of one request, ``[1, 1]``: its argmax if it is greedy, else its sum."""
        rows = one.first_row + position
        least = None if one.filter is None else jnp.full((1,), -jnp.inf, jnp.float32)

        def best() -> _Statistics:
            peak, best_id = self.target.largest(rows)
            sums = jnp.zeros((1, self.weights.num_tiles), jnp.float32)
            return _Statistics(Partials(peak, jnp.ones_like(peak)), best_id, least, sums)

        def sampled() -> _Statistics:
            peak = self.target.peak(rows)
            given = peak, one.inv_temperature, ~one.greedy, one.filter
            partials, sums, least = self.partials(rows, *given)
            return _Statistics(partials.checked(), jnp.zeros_like(rows), least, sums)

        return jax.tree.map(lambda x: x[:, None], lax.cond(one.greedy[0], best, sampled))

    def statistics_by_kernel(self, requests: Request, positions: jax.Array) -> _Statistics:
        """Of target rows ``[B, P]``, unfiltered, by a kernel that skips what nobody needs."""
        wanted = (requests.status == Status.OK)[:, None] & (positions < requests.num_rows[:, None])
        rows = requests.first_row[:, None] + positions
        return _Statistics(*self._by_kernel(self.target, requests, rows, wanted), None, None)

    def _by_kernel(
        self, of: Rows, requests: Request, rows: jax.Array, wanted: jax.Array
    ) -> tuple[Partials, jax.Array]:
        assert self.split.kernels is not None
        peak, total, best = self.split.kernels.row_statistics(
            of.matrix,
            jnp.clip(rows, 0, of.matrix.shape[0] - 1).reshape(-1),
            requests.inv_temperature,
            requests.greedy,
            wanted.reshape(-1),
            of.first,
            size=of.size,
        )
        peak = jnp.where(jnp.isnan(peak), jnp.inf, peak)
        peak, total, best = (x.reshape(rows.shape) for x in (peak, total, best))
        return Partials(peak, total), of.first + best

    def known(
        self, requests: Request, positions: jax.Array, places: jax.Array, stats: _Statistics
    ) -> Known:
        """What deciding takes of positions ``[B, P]`` and drafts ``[B, D]``, by all parts."""
        exchange, width, least = self.split.exchange, self.target.width, stats.threshold
        last = requests.token_ids.shape[1] - 1
        ids = entries_of(requests.token_ids, jnp.minimum(positions, last))
        rows = requests.first_row[:, None] + positions
        of_target = stats.partials, stats.best_id, self.target.at(rows, ids)
        draft, of_draft = self.weights.draft, None
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
        parts, best_ids, entry = of_target
        inv = requests.inv_temperature[:, None]
        draft_entry = draft_scale = None
        if draft is not None:
            draft_entry, partials = of_draft
            partials = None if partials is None else Partials.of_whole(partials, inv)
            draft_entry = of_holder(draft_entry, draft_ids, width)
            draft_scale = draft.scales(draft_rows, partials)
        target, p_masses = Partials.of_whole(parts, inv), None
        if stats.sums is not None:
            p_masses = stats.sums * target.share_of(stats.partials, inv)[..., None]
        return Known(
            position=positions,
            target=target,
            best_id=best_of(parts.max, best_ids),
            threshold=least,
            p_masses=p_masses,
            entry=tiles.keep(of_holder(entry, ids, width), least),
            draft_entry=draft_entry,
            draft_scale=draft_scale,
        )

    def _draft_partials(
        self, draft: DraftRows, requests: Request, draft_rows: jax.Array, places: jax.Array
    ) -> Partials:
        """Of draft rows ``[B, D]``, or this part of them."""
        wanted = (requests.status == Status.OK) & requests.stored & ~requests.greedy
        wanted = wanted[:, None] & (places < requests.num_drafts[:, None])
        by_kernel = self.split.kernels is not None and self.split.draft_is_split
        if by_kernel and isinstance(draft.rows, Rows):
            return self._by_kernel(draft.rows, requests, draft_rows, wanted)[0]

        def read(rows: jax.Array, inv: jax.Array) -> Partials:
            return draft.rows.partials(rows, draft.rows.peak(rows), inv).checked()

        inv = jnp.broadcast_to(requests.inv_temperature[:, None], wanted.shape).reshape(-1)
        found = gathering(read, jnp.where(wanted, draft_rows, -1).reshape(-1), inv)
        return jax.tree.map(lambda x: x.reshape(wanted.shape), found)

    def finish(
        self, requests: Request, known: Known, samples: bool = True
    ) -> RejectionSampleOutput:
        """Phases 2 and 3; `samples` says whether anybody may sample."""
        weights, rule, size = self.weights, self.rule, self.target.size
        drafts = jax.vmap(lambda r, k: decide.judge(r, k, weights.draft, size, rule))(
            requests, known
        )
        sources = jax.vmap(decide.sources_of)(requests, known, drafts)
        masses, residual_masses = None, jnp.zeros_like(drafts.p)
        if rule.is_block and weights.draft is not None:  # those of every position judge its drafts
            masses = self.masses(as_they_are(sources))
            residual_masses = jnp.sum(masses[..., 0, :], axis=(0, 3))
        num_accepted, status = jax.vmap(functools.partial(decide.walk, size=size, rule=rule))(
            requests, known, drafts, residual_masses
        )
        index = num_accepted - known.position[:, 0]
        token_ids = entry_of(known.best_id, index)
        bad_draft = jnp.zeros_like(requests.greedy)
        if samples:
            source = as_they_are(jax.tree.map(lambda x: entry_of(x, index), sources))
            if requests.exponential is not None:
                drawn, bad_draft = weights.race(source, requests.exponential)
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
        """``[num_parts, B, P, 2, n]`` masses of the tiles of every part, of sources ``[B, P]``."""
        kernels, shape = self._draw_kernels, source.row.shape
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), source)
        if kernels is not None:
            found = kernels.tile_masses(flat, **self._part, num_parts=self.weights.num_parts)
        else:
            found = gathering(lambda _, source: self.weights.masses(source), flat.row, flat)
        return self.split.exchange.gather(found.reshape(*shape, *found.shape[1:]))

    def draw(
        self, source: Source, masses: jax.Array, recover: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Phase 3: a token of each source, and whether its draft row is bad, ``[B]``.

        Args:
          source: what each is drawn from.
          masses: ``[num_parts, B, 2, n]``.
          recover: ``[B, 2]`` uniforms for tile and token.
        """
        assert recover is not None
        weights, exchange, kernels = self.weights, self.split.exchange, self._draw_kernels
        if kernels is not None:
            token_ids, bad = kernels.part_draw(source, recover, masses, **self._part)
            return exchange.sum(token_ids), source.from_residual & (bad | source.draft_scale.bad)
        return pick_and_draw(weights, source, masses, recover, exchange)

    @property
    def _draw_kernels(self) -> Kernels | None:
        """Kernels that read chosen rows; they know draft rows that are split alike."""
        known = self.weights.draft is None or self.split.draft_is_split
        pieces = pieces_of_tiles(self.target.width, self.weights.num_parts, self.weights.num_tiles)
        return self.split.kernels if known and pieces.shape[1] <= MAX_PIECES else None

    @property
    def _part(self) -> dict[str, Any]:
        """What they read of."""
        target, draft = self.target, self.weights.draft
        return dict(
            target=target.matrix,
            distribution=None if draft is None else draft.distribution,
            first_id=target.first,
            size=target.size,
        )


def _owns(requests: Request, num_rows: int) -> jax.Array:
    """``[M, B]`` bool, whether a target row is a request's: of no more than one."""
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    is_ok = (requests.status == Status.OK)[None, :]
    return (row >= 0) & (row < requests.num_rows[None, :]) & is_ok


def _of_owner(owns: jax.Array, x: jax.Array) -> jax.Array:
    """``[M]``, of values ``[B]`` that of each row's owner; 0 for a row that is nobody's.

    A sum, which takes one kernel where an index and what it finds take two.
    """
    return jnp.sum(jnp.where(owns, x[None, :], jnp.zeros_like(x)), axis=1, dtype=x.dtype)
