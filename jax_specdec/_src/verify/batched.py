"""All requests of a batch at once: row statistics, decide, resample.

Rows are read where they lie, by operations on whole matrices. Only small arrays go under `vmap`:
there a conditional computes both branches, and repeats what it closes over for every request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.config import RejectionSampleMethod
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftLogits, RejectionSampleOutput, Status
from jax_specdec._src.verify import block, decide, tiles
from jax_specdec._src.verify.decide import Request
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import DraftRows, DraftScale, sum_of
from jax_specdec._src.verify.threshold import find_threshold, only_if

_LARGE = 2**25
"""Bytes of logits from which on asking whether anybody samples costs less than their sums do."""

_GATHERED_AT_ONCE = 8
"""Requests whose rows a TPU gathers at a time: it writes to memory what it gathers."""


class RowStatistics(NamedTuple):
    """What is known of rows of logits, ``[n]`` each.

    Attributes:
      max: float32, the largest logit before temperature; not finite where the row is not a
        distribution.
      sum: float32, ``sum(exp((logit - max) / temperature))``; 0 where nobody samples.
      best_id: int32, the lowest id of the largest logit.
      threshold: float32, or None for none; entries below it count as -inf.
    """

    max: jax.Array
    sum: jax.Array
    best_id: jax.Array
    threshold: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """A matrix ``[R, W]`` of logits or probabilities.

    Attributes:
      matrix: of any float dtype.
      size: ids from it on do not count.
      fill: the entry of ids that do not count.
      token_bitmask: ``[R, ceil(W/32)]``; an id whose bit is not set does not count. None for all.
      thresholds: ``[R]`` float32; an entry below that of its row is `fill`. None for none.
    """

    matrix: jax.Array
    size: int
    fill: float
    token_bitmask: jax.Array | None = None
    thresholds: jax.Array | None = None

    @property
    def width(self) -> int:
        """Ids that may count."""
        return min(self.size, self.matrix.shape[1])

    def at(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """Entries of `ids`, any shape that `rows` broadcasts to."""
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        columns = jnp.clip(ids, 0, self.width - 1)
        return self._entries(self.matrix[rows, columns], rows, ids, columns)

    def slices(self, rows: jax.Array, first: jax.Array, length: int) -> jax.Array:
        """Entries ``[n, length]`` of ids ``first[i] + (0, ..., length - 1)`` in ``rows[i]``.

        Contiguous reads; `first` is at most the vocabulary minus `length`.
        """
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        available = min(length, self.matrix.shape[1])
        start = jnp.clip(first, 0, self.matrix.shape[1] - available)
        x = jax.vmap(lambda r, s: lax.dynamic_slice(self.matrix, (r, s), (1, available))[0])(
            rows, start
        )
        ids = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        if available < length or self.matrix.shape[1] != self.size:
            x = jnp.take_along_axis(x, jnp.clip(ids - start[:, None], 0, available - 1), axis=1)
        columns = jnp.clip(ids, 0, self.width - 1)
        return self._entries(x, rows[:, None], ids, columns)

    def whole(self, rows: jax.Array | None = None) -> jax.Array:
        """``[n, width]`` entries of some rows; None for all rows, where they lie."""
        matrix, words, least = self.matrix, self.token_bitmask, self.thresholds
        if rows is not None:
            rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
            matrix, words, least = jax.tree.map(lambda x: x[rows], (matrix, words, least))
        return self._read(matrix, words, least)

    def _entries(
        self, x: jax.Array, rows: jax.Array, ids: jax.Array, columns: jax.Array
    ) -> jax.Array:
        counts = (ids >= 0) & (ids < self.width)
        if self.token_bitmask is not None:
            words = self.token_bitmask[rows, columns // 32]
            counts &= (words >> (columns % 32).astype(words.dtype)) & 1 == 1
        x = jnp.where(counts, x.astype(jnp.float32), self.fill)
        return x if self.thresholds is None else self._keep(x, self.thresholds[rows])

    def _read(
        self, matrix: jax.Array, words: jax.Array | None, least: jax.Array | None
    ) -> jax.Array:
        """``[..., width]`` entries of given rows, with their words and thresholds."""
        x = matrix[..., : self.width].astype(jnp.float32)
        if words is not None:
            places = jnp.arange(32, dtype=words.dtype).reshape((1,) * words.ndim + (32,))
            bits = (words[..., None] >> places) & 1
            bits = bits.reshape(*words.shape[:-1], -1)[..., : self.width]
            x = jnp.where(bits == 1, x, self.fill)
        return x if least is None else self._keep(x, least[..., None])

    def _keep(self, x: jax.Array, least: jax.Array) -> jax.Array:
        return jnp.where(x < least, self.fill, x)

    def largest(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Largest entry ``[n]`` of each row, not finite if it holds NaN or inf, and its lowest id.

        `rows` are ``[n]`` int32, or None for all rows, where they lie.
        """
        return lax.platform_dependent(rows, tpu=self._argmax, default=self._argmax_by_tiles)

    def sums(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        samples: jax.Array,
        filter: Filter | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Sums of exponentials relative to the largest, and thresholds, ``[n]``.

        Args:
          rows: as of `largest`.
          peak: what that found.
          inv_temperature: ``[n]`` float32.
          samples: ``[n]`` bool, whether anybody samples from a row.
          filter: what to leave out of each, ``[n]``; None for nothing.
        """
        least = None
        if filter is not None:
            limited = filter.limits(self.size) & samples & jnp.isfinite(peak)
            least = only_if(
                jnp.any(limited),
                lambda: self._find_thresholds(rows, filter, peak, inv_temperature),
                jnp.full_like(peak, -jnp.inf),
            )
            least = jnp.where(limited, least, -jnp.inf)
        x = self.whole(rows)
        x = x if least is None else self._keep(x, least[:, None])
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None]
        return jnp.sum(jnp.exp((x - base) * inv_temperature[:, None]), axis=1), least

    def _clean(self, rows: jax.Array | None) -> jax.Array:
        x = self.whole(rows)
        return jnp.where(jnp.isnan(x), jnp.inf, x)  # a maximum may pass over a NaN

    def _argmax(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Largest entry of each row, and its lowest id."""
        x = self._clean(rows)
        return jnp.max(x, axis=1), jnp.argmax(x, axis=1).astype(jnp.int32)

    def _argmax_by_tiles(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The same by a maximum of each tile and a look into one, which GPUs do faster."""
        clean = _in_tiles(self._clean(rows), tiles.num_tiles(self.width), -jnp.inf)
        largest = _as_they_are(jnp.max(clean, axis=2))
        peak = jnp.max(largest, axis=1)
        length = min(tiles.TILE, self.matrix.shape[1])
        tile = _first(largest == peak[:, None])
        first = jnp.minimum(tile * tiles.TILE, self.matrix.shape[1] - length)
        index = jnp.arange(peak.shape[0], dtype=jnp.int32) if rows is None else rows
        hits = self.slices(index, first, length) == peak[:, None]
        return peak, first + _first(hits)

    def _find_thresholds(
        self, rows: jax.Array | None, filter: Filter, peak: jax.Array, inv_temperature: jax.Array
    ) -> jax.Array:
        matrix, words = self.matrix, self.token_bitmask
        if rows is not None:
            rows = jnp.clip(rows, 0, matrix.shape[0] - 1)
            matrix, words = jax.tree.map(lambda x: x[rows], (matrix, words))

        def one_row(
            row: jax.Array, words: jax.Array | None, filter: Filter, peak: Any, inv: Any
        ) -> jax.Array:
            return find_threshold(
                filter,
                lambda fn: sum_of(fn(self._read(row, words, None))),
                size=self.size,
                dtype=self.matrix.dtype,
                peak=peak,
                inv_temperature=inv,
            )

        return jax.vmap(one_row)(matrix, words, filter, peak, inv_temperature)


def _in_tiles(x: jax.Array, count: int, fill: float) -> jax.Array:
    """``[n, W]`` as ``[n, count, TILE]``, filled up at the end."""
    missing = ((0, 0), (0, count * tiles.TILE - x.shape[1]))
    x = jnp.pad(x, missing, constant_values=fill)
    return x.reshape(x.shape[0], count, tiles.TILE)


def _first(hit: jax.Array) -> jax.Array:
    """``[n]`` int32, the place of the first true entry of each row ``[n, L]``; L where none is."""
    return jax.vmap(tiles.first)(hit)


def _pick(weights: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`tiles.pick` of each of weights ``[n, 2, L]`` by ``u [n]``, and their totals, ``[n, 2]``."""
    sums = jnp.cumsum(weights, axis=2)
    total = sums[:, :, -1]
    place = jnp.arange(weights.shape[2], dtype=jnp.int32)[None, None, :]
    size, positive = weights.shape[2], weights > 0
    hit = positive & (sums > (u[:, None] * total)[:, :, None])
    # The first hit; or else, counted from the end, the last of positive weight: one reduction.
    key = jnp.where(hit, place, jnp.where(positive, 2 * size - place, 2 * size))
    found = jnp.min(key, axis=2)
    return jnp.where(found < size, found, 2 * size - found), total


def _as_they_are(sums: Any) -> Any:
    """Sums or maxima of tiles, of which XLA shall not make another read of the rows."""
    return lax.optimization_barrier(sums)


class Known(NamedTuple):
    """What deciding takes of one request's rows, at positions ``[P]`` and drafts ``[D]``.

    Attributes:
      target: statistics of the target rows, ``[P]``.
      entry: ``[P]`` float32, the drafted token's logit; -inf where it does not count.
      draft_entry: ``[D]`` float32, its entry in the draft row; None without draft distributions.
      draft_scale: what normalizes the draft rows ``[D]``; None likewise.
    """

    target: RowStatistics
    entry: jax.Array
    draft_entry: jax.Array | None
    draft_scale: DraftScale | None


@dataclasses.dataclass(frozen=True)
class KnownTarget:
    """One request's target rows as `decide` reads them; row i is that of position i."""

    known: Known
    size: int

    def stats(self, row: jax.Array, *_: Any) -> tiles.RowStats:
        of = jax.tree.map(lambda x: x[row], self.known.target)
        return tiles.RowStats(of.max[None], of.sum[None], of.threshold)

    def at(self, row: jax.Array, *_: Any) -> jax.Array:
        return self.known.entry[row]

    def best(self, row: jax.Array, *_: Any) -> jax.Array:
        return self.known.target.best_id[row]


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
        q = self.rows.probs(self.known.draft_entry[row], scale, inv_temperature)
        return jnp.where(token_id < self.rows.size, q, 0.0)


def verify(
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    token_bitmask: jax.Array | None,
    *,
    size: int,
    method: RejectionSampleMethod,
    conditional_rates: tuple[float, ...] | None,
) -> RejectionSampleOutput:
    """Verify a batch; arguments as of `xla.verify`."""
    target = Rows(target_logits, size, -float("inf"), token_bitmask)
    draft = None
    if distribution is not None:
        stored = DraftRows(distribution, size, None)
        thresholds = distribution.threshold if isinstance(distribution, DraftLogits) else None
        draft = stored, Rows(stored.storage, size, stored.fill, None, thresholds)
    owners = None
    if conditional_rates is None:
        owners = _owners(requests, target_logits.shape[0])
        requests = _without_shared_rows(requests, owners)
    all_phases = _Phases(target, draft, conditional_rates)
    positions, places = jax.vmap(all_phases.positions)(requests)
    rows = requests.first_row[:, None] + positions
    peak, best_id = target.largest(rows[:, 0] if owners is None else None)

    def finish(samples: bool) -> RejectionSampleOutput:
        phases = all_phases if samples else _Phases(target, None, conditional_rates)
        stats = phases.statistics(requests, owners, rows, peak, best_id, samples)
        known = phases.known(requests, positions, places, rows, stats)
        if method == "block":
            masses = phases.residual_masses(requests, known)
            num_accepted, last = jax.vmap(phases.walk_jointly)(requests, known, masses)
        else:
            num_accepted, last = jax.vmap(phases.walk)(requests, positions, known)
        index = (num_accepted - positions[:, 0])[:, None]
        token_ids = jnp.take_along_axis(stats.best_id, index, axis=1)[:, 0]
        bad_draft = jnp.zeros_like(requests.greedy)
        if samples:
            source = jax.vmap(functools.partial(decide.source_of, size=size))(
                requests, num_accepted, last
            )
            drawn, bad_draft = phases.resample(source, requests.recover, requests.exponential)
            token_ids = jnp.where(requests.greedy, token_ids, drawn)
        status = jnp.where(requests.status == Status.OK, last.status, requests.status)
        bad_draft &= ~requests.greedy
        return jax.vmap(decide.assemble)(requests, num_accepted, status, token_ids, bad_draft)

    if peak.shape[0] * target.width * target_logits.dtype.itemsize < _LARGE:
        return finish(samples=True)
    samples = (requests.status == Status.OK) & ~requests.greedy
    return lax.cond(
        jnp.any(samples),
        functools.partial(finish, samples=True),
        functools.partial(finish, samples=False),
    )


def sample(
    logits: jax.Array,
    inv_temperature: jax.Array,
    greedy: jax.Array,
    filter: Filter | None,
    uniforms: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """One token of each row, as a verification without drafts would emit it.

    Args:
      logits: ``[B, V]``.
      inv_temperature: ``[B]`` float32.
      greedy: ``[B]`` bool.
      filter: what to leave out, ``[B]``; None for nothing.
      uniforms: ``[B, 2]`` float32, for tile and token.

    Returns:
      Tokens, normalizers ``logsumexp(logits / temperature)`` and thresholds, ``[B]``.
    """
    rows = Rows(logits, logits.shape[1], -float("inf"))
    peak, best_id = rows.largest(None)
    sums, least = rows.sums(None, peak, inv_temperature, ~greedy, filter)
    no = jnp.zeros_like(greedy)
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)
    source = Source(
        row=index,
        draft_row=index,
        token_id=index,
        stats=tiles.RowStats(peak[:, None], sums[:, None], least),
        scale=DraftScale.unit(),
        weight=jnp.ones_like(peak),
        from_residual=no,
        without_token=no,
        inv_temperature=inv_temperature,
    )
    drawn, _ = _Phases(rows, None, None).resample(source, uniforms, in_place=True)
    token_ids = jnp.where(greedy, best_id, drawn)
    return token_ids, peak * inv_temperature + jnp.log(sums), least


@dataclasses.dataclass(frozen=True)
class _Phases:
    """The steps of `verify`.

    Attributes:
      target: target rows.
      draft: what draft rows mean, and their entries; None where every request is one-hot.
      conditional_rates: K rates of the synthetic rule, or None for the others.
    """

    target: Rows
    draft: tuple[DraftRows, Rows] | None
    conditional_rates: tuple[float, ...] | None

    def positions(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """Positions ``[P]`` whose target row is read, and places ``[D]`` of drafts likewise."""
        if self.conditional_rates is None:
            positions = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
            return positions, positions[:-1]
        rates = jnp.array(self.conditional_rates, jnp.float32)
        positions = decide.num_accepted_by_rate(request, rates, self.target.size)[None]
        return positions, request.place(positions)

    def statistics(
        self,
        requests: Request,
        owners: jax.Array | None,
        rows: jax.Array,
        peak: jax.Array,
        best_id: jax.Array,
        samples: bool,
    ) -> RowStatistics:
        """Statistics of target rows ``[B, P]``.

        Args:
          requests: batched requests.
          owners: ``[M]``, the request of each row, where all rows were read in place; None where
            ``rows[:, 0]`` were gathered.
          rows: ``[B, P]`` int32.
          peak: ``[M]`` or ``[B]``, of the rows that were read.
          best_id: likewise.
          samples: whether anybody may sample; if not, nothing more is read.
        """
        sampled = (requests.status == Status.OK) & ~requests.greedy
        given = (requests.inv_temperature, sampled, requests.filter)
        if owners is not None:
            given = jax.tree.map(lambda x: x[owners], given)
        sums = jnp.zeros_like(peak)
        least = None if requests.filter is None else jnp.full_like(peak, -jnp.inf)
        if samples:
            sums, least = self.target.sums(rows[:, 0] if owners is None else None, peak, *given)
        stats = RowStatistics(peak, sums, best_id, least)
        if owners is None:
            return jax.tree.map(lambda x: x[:, None], stats)
        rows = jnp.minimum(rows, self.target.matrix.shape[0] - 1)
        return jax.tree.map(lambda x: x[rows], stats)

    def known(
        self,
        requests: Request,
        positions: jax.Array,
        places: jax.Array,
        rows: jax.Array,
        stats: RowStatistics,
    ) -> Known:
        """What deciding takes of rows ``[B, P]`` and drafts ``[B, D]``."""
        last = requests.token_ids.shape[1] - 1
        ids = jnp.take_along_axis(requests.token_ids, jnp.minimum(positions, last), axis=1)
        entry = tiles.keep(self.target.at(rows, ids), stats.threshold)
        if self.draft is None:
            return Known(stats, entry, None, None)
        draft_rows = jnp.take_along_axis(requests.draft_rows, places, axis=1)
        ids = jnp.take_along_axis(requests.token_ids, places, axis=1)
        entry_q = self.draft[1].at(draft_rows, ids)
        return Known(stats, entry, entry_q, self._draft_scales(requests, draft_rows))

    def _draft_scales(self, requests: Request, draft_rows: jax.Array) -> DraftScale:
        """What normalizes draft rows ``[B, D]``: the stored normalizers, or a read of the rows."""
        assert self.draft is not None
        rows, entries = self.draft
        d = rows.distribution
        outside = (draft_rows < 0) | (draft_rows >= entries.matrix.shape[0])
        zero = jnp.zeros(draft_rows.shape, jnp.float32)
        if not isinstance(d, DraftLogits):
            return DraftScale(tiles.Scale(zero, zero), outside)
        row = jnp.clip(draft_rows, 0, entries.matrix.shape[0] - 1)
        if d.threshold is not None:
            outside |= jnp.isnan(d.threshold[row])
        if d.log_normalizer is not None:
            stored = d.log_normalizer[row]
            return DraftScale(tiles.Scale(zero, stored), outside | ~jnp.isfinite(stored))

        def peak_and_log_sum(row: jax.Array, inv: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = entries.whole(row)
            peak = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=1)
            base = jnp.where(jnp.isfinite(peak), peak, 0.0)
            total = jnp.sum(jnp.exp((x - base[:, None]) * inv), axis=1)
            return peak, jnp.log(total)

        peak, log_sum = _gathering(peak_and_log_sum, row, requests.inv_temperature)
        return DraftScale(tiles.Scale(peak, log_sum), outside | ~jnp.isfinite(peak))

    def _known(self, known: Known) -> tuple[Any, Any]:
        """One request's rows as `decide` takes them."""
        draft = None if self.draft is None else KnownDraft(known, self.draft[0])
        return KnownTarget(known, self.target.size), draft

    def walk(
        self, request: Request, positions: jax.Array, known: Known
    ) -> tuple[jax.Array, decide.Visit]:
        """Phase 2, of one request, by the greedy, the standard or the synthetic rule."""
        target, draft = self._known(known)
        if self.conditional_rates is None:
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

    def residual_masses(self, requests: Request, known: Known) -> jax.Array:
        """``[B, K+1]`` mass of the residual after the drafts before each position."""
        shape = known.entry.shape
        if self.draft is None:
            return jnp.zeros(shape, jnp.float32)

        def sources(request: Request, known: Known) -> Source:
            target, draft = self._known(known)
            seen, _ = decide.weigh(_local(request), target, draft)
            positions = jnp.arange(shape[1], dtype=jnp.int32)
            return jax.vmap(lambda i, seen: decide.source_of(request, i, seen, self.target.size))(
                positions, seen
            )

        each = jax.vmap(sources)(requests, known)
        # By request, since a TPU writes to memory the rows that it gathers.
        return _gathering(lambda s: jnp.sum(self._masses(s)[0], axis=1), each)

    def _gathered_masses(self, source: Source) -> tuple[jax.Array, jax.Array]:
        """`_masses`, a few sources at a time where gathered rows are written to memory."""

        def of_one(source: Source) -> tuple[jax.Array, jax.Array]:
            found = self._masses(jax.tree.map(lambda x: x[None], source))
            return jax.tree.map(lambda x: x[0], found)

        return lax.platform_dependent(
            source,
            tpu=lambda source: lax.map(of_one, source, batch_size=_GATHERED_AT_ONCE),
            default=self._masses,
        )

    def _masses(self, source: Source, in_place: bool = False) -> tuple[jax.Array, jax.Array]:
        """Of sources ``[n]``: what the token is drawn by, and ``p``, summed by tile ``[n, T]``."""
        count = tiles.num_tiles(self.target.width)
        rows = self.target.whole(None if in_place else source.row)
        p_entries = _in_tiles(rows, count, self.target.fill)
        q_entries = None
        if self.draft is not None:
            entries = self.draft[1]
            q_entries = _in_tiles(entries.whole(source.draft_row), count, entries.fill)
        ids = jnp.arange(count * tiles.TILE, dtype=jnp.int32).reshape(1, count, tiles.TILE)
        weights, _ = self._weights(source, ids, p_entries, q_entries)
        # Computed apart, p is written nowhere: XLA writes to memory what two sums share.
        _, p = self._weights(_as_they_are(source), ids, p_entries, q_entries)
        return _as_they_are((jnp.sum(weights, axis=2), jnp.sum(p, axis=2)))

    def _weights(
        self, source: Source, ids: jax.Array, p_entries: jax.Array, q_entries: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Weights of entries ``[n, ...]`` whose ids are `ids`, and their ``p``."""
        stats = source.stats
        source = source._replace(stats=stats._replace(max=stats.max[:, 0], sum=stats.sum[:, 0]))
        dims = (1,) * (p_entries.ndim - 1)
        source = jax.tree.map(lambda x: x.reshape(-1, *dims), source)
        inv, stats = source.inv_temperature, source.stats
        scale = tiles.Scale(stats.max, jnp.log(stats.sum))
        p = scale.probs(tiles.keep(p_entries, stats.threshold), inv)
        weights = jnp.where(source.without_token & (ids == source.token_id), 0.0, p)
        if self.draft is None or q_entries is None:
            return weights, p
        q = self.draft[0].probs(q_entries, source.scale, inv)
        residual = block.residual(source.weight, p, q)
        return jnp.where(source.from_residual, residual, weights), p

    def resample(
        self,
        source: Source,
        recover: jax.Array | None,
        exponential: jax.Array | None = None,
        in_place: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        """Phase 3: a token of each request, and whether its draft row is bad, ``[B]``.

        Args:
          source: what each is drawn from.
          recover: ``[B, 2]`` uniforms for tile and token, or None for a race.
          exponential: ``[B, V]`` Exp(1) noise of a race, or None.
          in_place: whether the sources' rows are all rows, in order: then none is gathered.
        """
        if exponential is not None:
            return self._race(exponential, source)
        assert recover is not None
        by_tile = self._masses(source, True) if in_place else self._gathered_masses(source)
        masses = jnp.stack(by_tile, axis=1)
        tile, total = _pick(masses, recover[:, 0])
        has_mass = total[:, 0] > 0
        bad_draft = source.from_residual & (jnp.isnan(total[:, 0]) | source.scale.bad)
        # No weight left to draw from: draw from p.
        chosen = jnp.where(has_mass, tile[:, 0], tile[:, 1])

        length = min(tiles.TILE, self.target.width)
        first = jnp.minimum(chosen * tiles.TILE, self.target.width - length)
        ids = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        p_entries = self.target.slices(source.row, first, length)
        q_entries = None
        if self.draft is not None:
            q_entries = self.draft[1].slices(source.draft_row, first, length)
        weights = jnp.stack(self._weights(source, ids, p_entries, q_entries), axis=1)
        inside = ids // tiles.TILE == chosen[:, None]
        token, total = _pick(jnp.where(inside[:, None], weights, 0.0), recover[:, 1])
        # Rounding can leave a tile of tiny residual mass without a positive weight of its own.
        has_mass &= total[:, 0] > 0
        return first + jnp.where(has_mass, token[:, 0], token[:, 1]), bad_draft

    def _race(self, exponential: jax.Array, source: Source) -> tuple[jax.Array, jax.Array]:
        width = self.target.width
        q_entries = None
        if self.draft is not None:
            entries = self.draft[1]
            q_entries = entries.whole(source.draft_row)
            missing = ((0, 0), (0, width - q_entries.shape[1]))
            q_entries = jnp.pad(q_entries, missing, constant_values=entries.fill)
        ids = jnp.arange(width, dtype=jnp.int32)[None, :]
        weights, p = self._weights(source, ids, self.target.whole(source.row), q_entries)
        total = jnp.sum(weights, axis=1)
        bad_draft = source.from_residual & (jnp.isnan(total) | source.scale.bad)
        weights = jnp.where((total > 0)[:, None], weights, p)
        score = jnp.where(weights > 0, weights / exponential[:, :width], -1.0)
        return jnp.argmax(score, axis=1).astype(jnp.int32), bad_draft


def _local(request: Request, first_row: jax.Array | int = 0) -> Request:
    """The request with positions for row indices."""
    index = jnp.arange(request.token_ids.shape[0], dtype=jnp.int32)
    if not isinstance(first_row, int):  # one row alone is known
        index = jnp.zeros_like(index)
    return request._replace(first_row=jnp.int32(0) + first_row, draft_rows=index)


def _owners(requests: Request, num_rows: int) -> jax.Array:
    """``[M]`` int32, the request of each target row; of a row that is nobody's, any."""
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    owns = (row >= 0) & (row < requests.num_rows[None, :]) & (requests.status == Status.OK)[None, :]
    return jnp.minimum(_first(owns), requests.status.shape[0] - 1)


def _without_shared_rows(requests: Request, owners: jax.Array) -> Request:
    """`BAD_INPUT` where bad offsets give a request rows of one before it: each is read for one."""
    index = jnp.arange(requests.token_ids.shape[1] + 1, dtype=jnp.int32)[None, :]
    rows = jnp.clip(requests.first_row[:, None] + index, 0, owners.shape[0] - 1)
    own = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    shared = (owners[rows] != own) & (index < requests.num_rows[:, None])
    bad = jnp.any(shared, axis=1) & (requests.status == Status.OK)
    return requests._replace(status=jnp.where(bad, jnp.int32(Status.BAD_INPUT), requests.status))


def _gathering(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` by request, ``[B]``; a few at a time where gathered rows are written to memory."""

    def in_blocks(arrays: Any) -> Any:
        return lax.map(lambda one: function(*one), arrays, batch_size=_GATHERED_AT_ONCE)

    def at_once(arrays: Any) -> Any:
        return jax.vmap(lambda *one: function(*one))(*arrays)

    return lax.platform_dependent(arrays, tpu=in_blocks, default=at_once)
