"""All requests of a batch at once: row statistics, decide, resample.

Rows are read where they lie, by operations on whole matrices. Only small arrays go under `vmap`:
there a conditional computes both branches, and repeats what it closes over for every request.

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

from jax_specdec._src.blocks import gathering
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftLogits, RejectionSampleOutput, Status
from jax_specdec._src.verify import decide, tiles
from jax_specdec._src.verify.decide import Request
from jax_specdec._src.verify.exchange import WHOLE, Exchange, of_holder
from jax_specdec._src.verify.resample import (
    Source,
    Weights,
    choose,
    draw,
    pieces_of_tiles,
)
from jax_specdec._src.verify.rows import DraftRows, DraftScale, Partials, Rows, best_of, first_of
from jax_specdec._src.verify.rules import Rule

_LARGE = 2**25
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


NOT_SPLIT = Split()


def verify(
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    token_bitmask: jax.Array | None,
    *,
    size: int,
    rule: Rule,
    split: Split = NOT_SPLIT,
) -> RejectionSampleOutput:
    """Verify a batch.

    Args:
      requests: batched requests, the same on all devices that split the vocabulary.
      target_logits: ``[M, V]``, M at least 1, or this device's columns of them.
      distribution: draft distributions, or None where every request is one-hot.
      token_bitmask: ``[M, ceil(V/32)]`` of the whole vocabulary, or None for every token.
      size: ids that count, at most V.
      rule: the rule.
      split: how the vocabulary is split.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all those devices.
    """
    draft_rows = None if distribution is None else DraftRows(distribution, size, None)
    all_phases = _Phases.of(target_logits, draft_rows, token_bitmask, size, rule, split)
    target, owners = all_phases.target, None
    if rule.conditional_rates is None and split.kernels is None:
        owners = _owners(requests, target_logits.shape[0])
        requests = _without_shared_rows(requests, owners)
    positions, places = jax.vmap(all_phases.positions)(requests)
    rows = requests.first_row[:, None] + positions
    found = None
    if split.kernels is None:
        found = target.largest(rows[:, 0] if owners is None else None)

    def finish(samples: bool) -> RejectionSampleOutput:
        phases = all_phases if samples else all_phases.for_greedy
        if found is None:
            stats = phases.statistics_by_kernel(requests, positions, rows)
        else:
            stats = phases.statistics(requests, owners, rows, found, samples)
        known = phases.known(requests, positions, places, rows, stats)
        masses = None
        if rule.is_block:
            residual_masses = jnp.zeros_like(known.entry)
            if phases.weights.draft is not None:  # the masses of every position judge its drafts
                masses = phases.masses(jax.vmap(phases.sources)(requests, known), requests)
                residual_masses = jnp.sum(masses[..., 0, :], axis=(0, 3))
            num_accepted, last = jax.vmap(phases.walk_jointly)(requests, known, residual_masses)
        else:
            num_accepted, last = jax.vmap(phases.walk)(requests, positions, known)
        index = (num_accepted - positions[:, 0])[:, None]
        token_ids = jnp.take_along_axis(known.best_id, index, axis=1)[:, 0]
        bad_draft = jnp.zeros_like(requests.greedy)
        if samples:
            source = jax.vmap(functools.partial(decide.source_of, size=size))(
                requests, num_accepted, last
            )
            if requests.exponential is not None:
                drawn, bad_draft = phases.weights.race(source, requests.exponential)
            else:
                if masses is None:
                    masses = phases.masses(jax.tree.map(lambda x: x[:, None], source), requests)
                else:
                    index = num_accepted[None, :, None, None, None]
                    masses = jnp.take_along_axis(masses, index, axis=2)
                drawn, bad_draft = phases.draw(source, masses[:, :, 0], requests.recover, requests)
            token_ids = jnp.where(requests.greedy, token_ids, drawn)
        status = jnp.where(requests.status == Status.OK, last.status, requests.status)
        bad_draft &= ~requests.greedy
        return jax.vmap(decide.assemble)(requests, num_accepted, status, token_ids, bad_draft)

    is_small = True
    if found is not None:
        is_small = found[0].shape[0] * target.width * target_logits.dtype.itemsize < _LARGE
    if is_small or split.exchange.axis is not None:
        return finish(samples=True)
    samples = (requests.status == Status.OK) & ~requests.greedy
    return lax.cond(
        jnp.any(samples),
        functools.partial(finish, samples=True),
        functools.partial(finish, samples=False),
    )


class Sampled(NamedTuple):
    """What `sample` draws, ``[B]`` each.

    Attributes:
      token_ids: int32.
      log_normalizer: float32, ``logsumexp(logits / temperature)`` of what is not left out.
      threshold: float32, entries below it were left out; None where nothing can have been.
    """

    token_ids: jax.Array
    log_normalizer: jax.Array
    threshold: jax.Array | None


def sample(
    logits: jax.Array,
    inv_temperature: jax.Array,
    greedy: jax.Array,
    filter: Filter | None,
    uniforms: jax.Array,
    *,
    split: Split = NOT_SPLIT,
) -> Sampled:
    """One token of each row, as a verification without drafts would emit it.

    Args:
      logits: ``[B, V]``, or this device's columns of them.
      inv_temperature: ``[B]`` float32.
      greedy: ``[B]`` bool.
      filter: what to leave out, ``[B]``; None for nothing.
      uniforms: ``[B, 2]`` float32, for tile and token.
      split: how the vocabulary is split.
    """
    size = logits.shape[1] * split.exchange.num_parts
    phases = _Phases.of(logits, None, None, size, Rule("standard", None), split)
    rows, least = phases.target, None
    peak, best_id = rows.largest(None)
    if filter is not None:
        given = filter, ~greedy, peak, inv_temperature, split.exchange
        least = rows.find_thresholds(None, *given)
    partials = Partials(peak, rows.sums(None, peak, inv_temperature, least))
    parts, best_ids = split.exchange.gather((partials, best_id))
    stats = Partials.of_whole(parts, inv_temperature)
    no = jnp.zeros_like(greedy)
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)
    source = Source(
        row=index,
        draft_row=index,
        token_id=index,
        stats=tiles.RowStats(stats.max[:, None], stats.sum[:, None], least),
        scale=DraftScale.unit(),
        weight=jnp.ones_like(stats.max),
        from_residual=no,
        without_token=no,
        inv_temperature=inv_temperature,
    )
    masses = split.exchange.gather(phases.weights.masses(source, in_place=True))
    drawn, _ = phases.draw(source, masses, uniforms)
    token_ids = jnp.where(greedy, best_of(parts.max, best_ids), drawn)
    return Sampled(token_ids, stats.max * inv_temperature + jnp.log(stats.sum), least)


def best_ids(logits: jax.Array, exchange: Exchange) -> jax.Array:
    """``[B]`` int32, the argmax of each row ``[B, V]``, ties to the lowest id."""
    split = Split(exchange)
    size = logits.shape[1] * exchange.num_parts
    target = _Phases.of(logits, None, None, size, Rule("standard", None), split).target
    return best_of(*exchange.gather(target.largest(None)))


class Known(NamedTuple):
    """What deciding takes of one request's rows, at positions ``[P]`` and drafts ``[D]``.

    Attributes:
      target: statistics of the target rows, ``[P]``.
      best_id: ``[P]`` int32, the argmax of each.
      threshold: ``[P]`` float32, entries below it count as -inf; None for none.
      entry: ``[P]`` float32, the drafted token's logit; -inf where it does not count.
      draft_entry: ``[D]`` float32, its entry in the draft row; None without draft distributions.
      draft_scale: what normalizes the draft rows ``[D]``; None likewise.
    """

    target: Partials
    best_id: jax.Array
    threshold: jax.Array | None
    entry: jax.Array
    draft_entry: jax.Array | None
    draft_scale: DraftScale | None


class _Statistics(NamedTuple):
    """Of this part of target rows ``[B, P]``: partials, argmax, and the threshold of the row."""

    partials: Partials
    best_id: jax.Array
    threshold: jax.Array | None


@dataclasses.dataclass(frozen=True)
class KnownTarget:
    """One request's target rows as `decide` reads them; row i is that of position i."""

    known: Known
    size: int

    def stats(self, row: jax.Array, *_: Any) -> tiles.RowStats:
        of, least = self.known.target, self.known.threshold
        least = None if least is None else least[row]
        return tiles.RowStats(of.max[row][None], of.sum[row][None], least)

    def at(self, row: jax.Array, *_: Any) -> jax.Array:
        return self.known.entry[row]

    def best(self, row: jax.Array, *_: Any) -> jax.Array:
        return self.known.best_id[row]


@dataclasses.dataclass(frozen=True)
class KnownDraft:
    """One request's draft rows, likewise."""

    known: Known
    rows: DraftRows

    def scale(self, row: jax.Array, *_: Any) -> DraftScale:
        return jax.tree.map(lambda x: x[row], self.known.draft_scale)

    def at(
        self, row: jax.Array, token_id: jax.Array, scale: DraftScale, inv_temperature: jax.Array
    ) -> jax.Array:
        assert self.known.draft_entry is not None
        return self.rows.probs(self.known.draft_entry[row], scale, inv_temperature)


@dataclasses.dataclass(frozen=True)
class _Phases:
    """The steps of `verify`.

    Attributes:
      weights: target and draft rows, and what tokens are drawn by.
      rule: the rule.
      split: how the vocabulary is split.
    """

    weights: Weights
    rule: Rule
    split: Split

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        draft: DraftRows | None,
        token_bitmask: jax.Array | None,
        size: int,
        rule: Rule,
        split: Split,
    ) -> _Phases:
        exchange, width = split.exchange, target_logits.shape[1]
        first_id = None if exchange.axis is None else exchange.part * width
        target = Rows(target_logits, size, -float("inf"), token_bitmask, first_id=first_id)
        target = target if first_id is None else target.masked()
        both = None
        if draft is not None:
            d, is_split = draft.distribution, split.draft_is_split
            thresholds = d.threshold if isinstance(d, DraftLogits) else None
            first_id = first_id if is_split else None
            both = draft, Rows(draft.storage, size, draft.fill, None, thresholds, first_id)
        weights = Weights(target, both, split.draft_is_split, exchange.num_parts)
        return cls(weights, rule, split)

    @property
    def for_greedy(self) -> _Phases:
        """The same for a batch in which nobody samples: no draft row counts."""
        return dataclasses.replace(self, weights=dataclasses.replace(self.weights, draft=None))

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

    def statistics(
        self,
        requests: Request,
        owners: jax.Array | None,
        rows: jax.Array,
        found: tuple[jax.Array, jax.Array],
        samples: bool,
    ) -> _Statistics:
        """Statistics of this part of target rows ``[B, P]``.

        Args:
          requests: batched requests.
          owners: ``[M]``, the request of each row, where all rows were read in place; None where
            ``rows[:, 0]`` were gathered.
          rows: ``[B, P]`` int32.
          found: largest entries and their ids, ``[M]`` or ``[B]``, of the rows that were read.
          samples: whether anybody may sample; if not, nothing more is read.
        """
        (peak, best_id), in_place = found, owners is not None
        sampled = (requests.status == Status.OK) & ~requests.greedy
        given = (requests.inv_temperature, sampled, requests.filter)
        inv, wanted, filter = jax.tree.map(lambda x: x[owners] if in_place else x, given)
        read = None if in_place else rows[:, 0]
        sums = jnp.zeros_like(peak)
        least = None if filter is None else jnp.full_like(peak, -jnp.inf)
        if samples:
            if filter is not None:
                exchange = self.split.exchange
                least = self.target.find_thresholds(read, filter, wanted, peak, inv, exchange)
            sums = self.target.sums(read, peak, inv, least)
        stats = _Statistics(Partials(peak, sums), best_id, least)
        if not in_place:
            return jax.tree.map(lambda x: x[:, None], stats)
        rows = jnp.minimum(rows, self.target.matrix.shape[0] - 1)
        return jax.tree.map(lambda x: x[rows], stats)

    def statistics_by_kernel(
        self, requests: Request, positions: jax.Array, rows: jax.Array
    ) -> _Statistics:
        """The same without thresholds, by a kernel that skips the rows nobody looks at."""
        wanted = (requests.status == Status.OK)[:, None] & (positions < requests.num_rows[:, None])
        return _Statistics(*self._by_kernel(self.target, requests, rows, wanted), None)

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
        self,
        requests: Request,
        positions: jax.Array,
        places: jax.Array,
        rows: jax.Array,
        stats: _Statistics,
    ) -> Known:
        """What deciding takes of rows ``[B, P]`` and drafts ``[B, D]``, by all parts."""
        exchange, width, least = self.split.exchange, self.target.width, stats.threshold
        last = requests.token_ids.shape[1] - 1
        ids = jnp.take_along_axis(requests.token_ids, jnp.minimum(positions, last), axis=1)
        inv = requests.inv_temperature[:, None]
        of_target = stats.partials, stats.best_id, self.target.at(rows, ids)
        of_draft: Any = None
        if self.weights.draft is not None:
            draft_rows = jnp.take_along_axis(requests.draft_rows, places, axis=1)
            draft_ids = jnp.take_along_axis(requests.token_ids, places, axis=1)
            of_draft = (
                self.weights.draft[1].at(draft_rows, draft_ids),
                self._draft_partials(requests, draft_rows, places),
            )
        if of_draft is not None and self.split.draft_is_split:
            of_target, of_draft = exchange.gather((of_target, of_draft))
        else:
            of_target, of_draft = exchange.gather(of_target), WHOLE.gather(of_draft)
        parts, best_ids, entry = of_target
        known = Known(
            target=Partials.of_whole(parts, inv),
            best_id=best_of(parts.max, best_ids),
            threshold=least,
            entry=tiles.keep(of_holder(entry, ids, width), least),
            draft_entry=None,
            draft_scale=None,
        )
        if of_draft is None:
            return known
        entry, parts = of_draft
        partials = None if parts is None else Partials.of_whole(parts, inv)
        return known._replace(
            draft_entry=of_holder(entry, draft_ids, width),
            draft_scale=self._draft_scales(draft_rows, partials),
        )

    def _draft_partials(
        self, requests: Request, draft_rows: jax.Array, places: jax.Array
    ) -> Partials | None:
        """Of draft rows ``[B, D]``, or this part of them; None where nothing is to be read."""
        assert self.weights.draft is not None
        (rows, entries), kernels = self.weights.draft, self.split.kernels
        d = rows.distribution
        if not isinstance(d, DraftLogits) or d.log_normalizer is not None:
            return None
        if kernels is not None and self.split.draft_is_split:
            wanted = (requests.status == Status.OK) & requests.stored & ~requests.greedy
            wanted = wanted[:, None] & (places < requests.num_drafts[:, None])
            return self._by_kernel(entries, requests, draft_rows, wanted)[0]

        def of_rows(rows: jax.Array, inv: jax.Array) -> Partials:
            x = entries.whole(rows)
            peak = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=1)
            return Partials(peak, entries.sums(rows, peak, inv, None))

        shape = draft_rows.shape
        inv = jnp.broadcast_to(requests.inv_temperature[:, None], shape)
        found = gathering(of_rows, draft_rows.reshape(-1), inv.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(shape), found)

    def _draft_scales(self, draft_rows: jax.Array, partials: Partials | None) -> DraftScale:
        """What normalizes draft rows ``[B, D]``: the stored normalizers, or what was read."""
        assert self.weights.draft is not None
        d, count = self.weights.draft[0].distribution, self.weights.draft[1].matrix.shape[0]
        outside = (draft_rows < 0) | (draft_rows >= count)
        zero = jnp.zeros(draft_rows.shape, jnp.float32)
        if not isinstance(d, DraftLogits):
            return DraftScale(tiles.Scale(zero, zero), outside)
        row = jnp.clip(draft_rows, 0, count - 1)
        if d.threshold is not None:
            outside |= jnp.isnan(d.threshold[row])
        if partials is None:
            assert d.log_normalizer is not None
            stored = d.log_normalizer[row]
            return DraftScale(tiles.Scale(zero, stored), outside | ~jnp.isfinite(stored))
        scale = tiles.Scale(partials.max, jnp.log(partials.sum))
        return DraftScale(scale, outside | ~jnp.isfinite(partials.max))

    def _known(self, known: Known) -> tuple[Any, Any]:
        """One request's rows as `decide` takes them."""
        draft = self.weights.draft
        draft_rows = None if draft is None else KnownDraft(known, draft[0])
        return KnownTarget(known, self.target.size), draft_rows

    def walk(
        self, request: Request, positions: jax.Array, known: Known
    ) -> tuple[jax.Array, decide.Visit]:
        """Phase 2, of one request, by the greedy, the standard or the synthetic rule."""
        target, draft = self._known(known)
        if self.rule.conditional_rates is None:
            return decide.eager_walk(_local(request), target, draft)
        (num_accepted,) = positions
        at = _local(request, -num_accepted)
        last = decide.read_rows(at, num_accepted, target, draft)
        is_read = num_accepted < request.num_rows
        return num_accepted, last._replace(status=jnp.where(is_read, last.status, Status.OK))

    def walk_jointly(
        self, request: Request, known: Known, masses: jax.Array
    ) -> tuple[jax.Array, decide.Visit]:
        """Phase 2, of one request, by the block rule, with residual masses ``[K+1]``."""
        target, draft = self._known(known)
        return decide.eager_block_walk(
            _local(request), target, draft, lambda source, *_: masses[source.row]
        )

    def sources(self, request: Request, known: Known) -> Source:
        """What the token after each position would be drawn from by the block rule, ``[K+1]``."""
        target, draft = self._known(known)
        found, p = decide.joint_weights(_local(request), target, draft)
        positions = jnp.arange(p.shape[0], dtype=jnp.int32)
        return jax.vmap(lambda i, found: decide.source_of(request, i, found, self.target.size))(
            positions, found
        )

    def masses(self, source: Source, requests: Request) -> jax.Array:
        """``[num_parts, B, P, 2, n]`` masses of the tiles of every part, of sources ``[B, P]``."""
        kernels, shape = self._draw_kernels, source.row.shape
        if kernels is not None:
            source = _drawn(source, requests)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), source)
        if kernels is not None:
            found = kernels.tile_masses(flat, **self._part, num_parts=self.weights.num_parts)
        else:
            found = gathering(self.weights.masses, flat)
        return self.split.exchange.gather(found.reshape(*shape, *found.shape[1:]))

    def draw(
        self,
        source: Source,
        masses: jax.Array,
        recover: jax.Array | None,
        requests: Request | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Phase 3: a token of each request, and whether its draft row is bad, ``[B]``.

        Args:
          source: what each is drawn from.
          masses: ``[num_parts, B, 2, n]``.
          recover: ``[B, 2]`` uniforms for tile and token.
          requests: by which a kernel skips those that draw no token.
        """
        assert recover is not None
        weights, exchange, kernels = self.weights, self.split.exchange, self._draw_kernels
        if kernels is not None and requests is not None:
            source = _drawn(source, requests)
            token_ids, bad = kernels.part_draw(source, recover, masses, **self._part)
            return exchange.sum(token_ids), source.from_residual & (bad | source.scale.bad)
        chosen = choose(source, masses, recover, self.target.width, weights.num_tiles)
        return draw(weights, source, chosen, exchange), chosen.bad_draft

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
            distribution=None if draft is None else draft[0].distribution,
            first_id=target.first,
            size=target.size,
        )


def _local(request: Request, first_row: jax.Array | int = 0) -> Request:
    """The request with positions for row indices."""
    index = jnp.arange(request.token_ids.shape[0], dtype=jnp.int32)
    if not isinstance(first_row, int):  # one row alone is known
        index = jnp.zeros_like(index)
    return request._replace(first_row=jnp.int32(0) + first_row, draft_rows=index)


def _drawn(source: Source, requests: Request) -> Source:
    """Sources ``[B]`` or ``[B, P]``, with row -1, which kernels skip, where no token is drawn."""
    dims = source.row.shape[:1] + (1,) * (source.row.ndim - 1)
    is_drawn = ((requests.status == Status.OK) & ~requests.greedy).reshape(dims)
    is_drawn &= source.row - requests.first_row.reshape(dims) < requests.num_rows.reshape(dims)
    return source._replace(row=jnp.where(is_drawn, source.row, -1))


def _owners(requests: Request, num_rows: int) -> jax.Array:
    """``[M]`` int32, the request of each target row; of a row that is nobody's, any."""
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    owns = (row >= 0) & (row < requests.num_rows[None, :]) & (requests.status == Status.OK)[None, :]
    return jnp.minimum(first_of(owns), requests.status.shape[0] - 1)


def _without_shared_rows(requests: Request, owners: jax.Array) -> Request:
    """`BAD_INPUT` where bad offsets give a request rows of one before it: each is read for one."""
    index = jnp.arange(requests.token_ids.shape[1] + 1, dtype=jnp.int32)[None, :]
    rows = jnp.clip(requests.first_row[:, None] + index, 0, owners.shape[0] - 1)
    own = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    shared = (owners[rows] != own) & (index < requests.num_rows[:, None])
    bad = jnp.any(shared, axis=1) & (requests.status == Status.OK)
    return requests._replace(status=jnp.where(bad, jnp.int32(Status.BAD_INPUT), requests.status))
