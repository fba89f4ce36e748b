"""A request as a warpgroup holds it: its parameters, its drafted tokens, and its output.

Lane i of every warp holds position i: the drafted token, and all that can be computed of it before
whole rows are read. `RequestLoads` and `DraftLoads` are loads that are in flight; `KernelRequest`
and `DraftedTokens` are what comes of them. `walk.verify_request` says when each is made.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import noise, ragged
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.types import MAX_LOG_NORMALIZER, PLACEHOLDER_TOKEN_ID, Status
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster
from jax_specdec._src.verify.mosaic_gpu.lists import Candidates, Listed, MappedSlice
from jax_specdec._src.verify.mosaic_gpu.plan import Plan
from jax_specdec._src.verify.mosaic_gpu.rows import DraftSlice, TargetSlice
from jax_specdec._src.verify.mosaic_gpu.statistics import (
    LARGEST,
    LOG2E,
    Exponent,
    Normalizer,
    is_finite,
)
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Ref, Threads

_ROUNDS = 8
"""Loads of offsets, of 32 requests each, that are in flight at once."""

_ENTRIES = 8
"""Loads of lists, of 32 candidates each, that are in flight at once."""

X = TypeVar("X")


class Operands(NamedTuple, Generic[X]):
    """What a call gives the kernel: arrays, or refs of them in global memory.

    Attributes:
      target: ``[M, V]`` target logits.
      token_ids: ``[N]`` int32, at least one.
      temperature: ``[B]`` float32.
      offsets: ``[B+1]`` int32; None if there are no drafts and K is 0.
      accept: ``[B, K]`` float32 uniforms; None if K is 0, or if they are drawn from keys.
      recover: ``[B, 2]`` float32 uniforms; None if they are drawn from keys.
      keys: ``[B, 2]`` uint32, or None.
      positions: ``[B]`` int32, or None.
      draft: ``[R, Vd]`` draft rows, or None, as all that follows.
      columns: ``[1, W]`` int32, of a map of ids; see `lists.columns_of_map`.
      bad_map: ``[1]`` int32, 1 if the map lists an id twice or one that is out of range.
      ids: ``[R, C]`` int32, candidates.
      normalizer: ``[R]`` float32.
      row_max: ``[R]`` float32.
      thresholds: ``[R]`` float32.
      rows: ``[N]`` int32, the draft row of each draft.
      valid: ``[B]`` bool, whether the request's draft distribution is stored.
      bonus: ``[B]`` int32.
      active: ``[B]`` bool.
      bitmask: ``[M, words]`` int32.
      min_p: ``[B]`` float32.
      top_k: ``[B]`` int32.
      top_p: ``[B]`` float32.
    """

    target: X
    token_ids: X
    temperature: X
    offsets: X | None = None
    accept: X | None = None
    recover: X | None = None
    keys: X | None = None
    positions: X | None = None
    draft: X | None = None
    columns: X | None = None
    bad_map: X | None = None
    ids: X | None = None
    normalizer: X | None = None
    row_max: X | None = None
    thresholds: X | None = None
    rows: X | None = None
    valid: X | None = None
    bonus: X | None = None
    active: X | None = None
    bitmask: X | None = None
    min_p: X | None = None
    top_k: X | None = None
    top_p: X | None = None


class Outputs(NamedTuple, Generic[X]):
    """What the kernel writes: arrays, their types, or refs of them in global memory.

    Attributes:
      token_ids: ``[B * (K+1)]`` int32.
      num_accepted: ``[B]`` int32; None where draft tokens are sampled, as the next two.
      num_emitted: ``[B]`` int32.
      status: ``[B]`` int32.
      log_normalizer: ``[B]`` float32, of the row that a draft token is sampled from, relative to
        `row_max`; None in a verification, as the next two.
      row_max: ``[B]`` float32, its maximum.
      threshold: ``[B]`` float32, below which its filter keeps no entry; None without filters.
      slots: ``[B, warpgroups, 2, floats]`` float32, of exchanges in interpret mode; else None.
    """

    token_ids: X
    num_accepted: X | None = None
    num_emitted: X | None = None
    status: X | None = None
    log_normalizer: X | None = None
    row_max: X | None = None
    threshold: X | None = None
    slots: X | None = None


class RequestLoads:
    """The loads of a request that depend on nothing else; they begin here, all at once.

    Attributes:
      lane: ``[128]`` int32, the index of each thread in its warp.
      token_ids: ``[128]`` by lane, the drafts if all requests before have K drafts.
      rows: ``[128]`` by lane, their draft rows; None if not given.
      start: ``[]`` int32, where its drafts begin.
      end: ``[]`` int32.
      sampling: ``[]`` each.
      key: two words ``[]``, and the position ``[]``; None with explicit noise.
      active: ``[]`` int32 or None.
      valid: ``[]`` int32 or None.
      before: of up to 256 requests before it, by lane: index and two offsets; [] without.
      bonus: ``[]`` int32, the bonus token that the caller gave.
    """

    def __init__(self, plan: Plan, threads: Threads, operands: Operands[Ref], index: jax.Array):
        def number(ref: Ref | None) -> jax.Array | None:
            return None if ref is None else ref[index]

        def flag(ref: Ref | None) -> jax.Array | None:
            if ref is None:
                return None
            return threads.scalar(threads.gather(ref, threads.filled(0, jnp.int32) + index))

        self.lane = threads.lane
        guess = jnp.minimum(index * plan.k + self.lane, operands.token_ids.shape[0] - 1)
        self.token_ids = threads.gather(operands.token_ids, guess)
        self.rows = None if operands.rows is None else threads.gather(operands.rows, guess)
        self.start = self.end = jnp.int32(0)
        if operands.offsets is not None:
            self.start, self.end = operands.offsets[index], operands.offsets[index + 1]
        self.sampling = SamplingParams(
            operands.temperature[index],
            min_p=number(operands.min_p),
            top_k=number(operands.top_k),
            top_p=number(operands.top_p),
        )
        self.key = None
        if operands.keys is not None and operands.positions is not None:
            words = operands.keys[index, 0], operands.keys[index, 1]
            self.key = words, operands.positions[index]
        self.active, self.valid = flag(operands.active), flag(operands.valid)
        rounds = min(-(-operands.temperature.shape[0] // WARP), _ROUNDS)
        rounds = 0 if operands.offsets is None else rounds
        self.before = [
            _offsets_before(threads, operands, index, self.lane, i) for i in range(rounds)
        ]
        self.bonus = jnp.int32(0) if operands.bonus is None else operands.bonus[index]


def _offsets_before(
    threads: Threads,
    operands: Operands[Ref],
    index: jax.Array,
    lane: jax.Array,
    round: jax.Array | int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """By lane, 32 a round: a request before `index`, perhaps repeated, and its two offsets."""
    assert operands.offsets is not None
    other = jnp.minimum(round * WARP + lane, jnp.maximum(index - 1, 0))
    start, end = (threads.gather(operands.offsets, other + i) for i in range(2))
    return other, start, end


class KernelRequest:
    """One request, while the kernel is traced.

    Attributes:
      plan: the static side of the launch.
      threads: the operations of the warpgroup.
      operands: refs of what the call gives.
      outputs: refs of what is written.
      samples_draft: whether a draft token is sampled: what its row amounts to is written, and no
        status.
      index: ``[]`` int32, of the request.
      lane: ``[128]`` int32, the index of each thread in its warp.
      status: ``[]`` int32. If it is not OK, none of the request's rows may be read.
      first_row: ``[]`` int32.
      num_drafts: ``[]`` int32.
      num_rows: ``[]`` int32, target rows that it owns.
      greedy: ``[]`` bool.
      stored: ``[]`` bool, whether its draft distribution is stored.
      inv: ``[]`` float32, the inverse of its temperature.
      scale: ``[]`` float32, the same for exponentials of base two.
      bonus: ``[]`` int32, the bonus token that the caller gave.
      filter: its min-p, top-k and top-p; None if the call has none of them.
      filters: ``[]`` bool, whether its filter may leave out anything; None without filters.
      key: two words ``[]``, and the position ``[]``; None with explicit noise.
      token_ids: ``[128]`` int32 by lane, -1 for lanes without a draft.
      proposed: ``[128]`` bool by lane, whether the id is in range.
      draft_rows: ``[128]`` int32 by lane.
    """

    def __init__(
        self,
        plan: Plan,
        threads: Threads,
        operands: Operands[Ref],
        outputs: Outputs[Ref],
        index: jax.Array,
        loads: RequestLoads,
    ):
        self.plan, self.threads, self.operands, self.outputs = plan, threads, operands, outputs
        self.index, self.lane, self.bonus, self.key = index, loads.lane, loads.bonus, loads.key
        lane, sampling = loads.lane, loads.sampling
        start, self.num_drafts, in_bounds = ragged.locate(
            loads.start, loads.end, index, plan.k, plan.num_drafts
        )

        def end(other: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
            """By lane: where that request's drafts end; 0 if its offsets are out of range."""
            _, _, in_bounds = ragged.locate(start, end, other, plan.k, plan.num_drafts)
            return jnp.where(in_bounds & (other < index), end, 0)

        def end_of_round(i: jax.Array, reached: jax.Array) -> jax.Array:
            return jnp.maximum(reached, end(*_offsets_before(threads, operands, index, lane, i)))

        if loads.before:
            reached = functools.reduce(jnp.maximum, [end(*offsets) for offsets in loads.before])
            if operands.temperature.shape[0] > _ROUNDS * WARP:
                last = lax.div(index + WARP - 1, WARP)
                reached = lax.fori_loop(_ROUNDS, last, end_of_round, reached)
            in_bounds &= start >= -threads.scalar(threads.warp_min(-reached))
        self.first_row = start + index if plan.has_bonus_rows else start
        self.num_rows = self.num_drafts + (1 if plan.has_bonus_rows else 0)

        self.samples_draft, is_valid = outputs.status is None, in_bounds
        if not self.samples_draft:
            is_valid &= sampling_lib.is_valid(sampling)
        if self.key is not None:
            is_valid &= self.key[1] >= 0
        if operands.target.shape[0] < plan.num_rows:
            is_valid &= self.first_row + self.num_rows <= operands.target.shape[0]
        status = jnp.where(is_valid, jnp.int32(Status.OK), jnp.int32(Status.BAD_INPUT))
        if loads.active is not None:
            status = jnp.where(loads.active == 0, jnp.int32(Status.INACTIVE), status)
        self.status = status
        self.greedy = sampling.temperature == 0
        has_q = jnp.bool_(plan.entries is not None)
        self.stored = has_q if loads.valid is None else loads.valid != 0
        self.inv = sampling_lib.inverse_temperature(sampling.temperature)
        self.scale = jnp.minimum(self.inv * LOG2E, LARGEST)
        self.filter = sampling_lib.Filter.of(sampling)
        self.filters = None
        if self.filter is not None:
            self.filters = ~self.greedy & self.filter.limits(plan.size)
        is_draft = lane < self.num_drafts
        place = jnp.where(is_draft, start + lane, 0)
        # If all requests before it have K drafts, what was loaded with the offsets is right.
        token_ids, rows = lax.cond(
            start == index * plan.k,
            lambda: (loads.token_ids, loads.rows),
            lambda: (
                threads.gather(operands.token_ids, place),
                None if operands.rows is None else threads.gather(operands.rows, place),
            ),
        )
        self.token_ids = jnp.where(is_draft, token_ids, -1)
        self.proposed = (self.token_ids >= 0) & (self.token_ids < plan.size)
        self.draft_rows = place if rows is None else jnp.where(is_draft, rows, 0)

    def uniforms(self) -> jax.Array:
        """``[128]`` float32 by lane: K to accept, then two to recover. Drawn, or looked up."""
        k, lane, threads, operands = self.plan.k, self.lane, self.threads, self.operands
        recovers = lane >= k
        if operands.recover is not None:
            row, accept = self.index + jnp.zeros_like(lane), None
            if operands.accept is not None:
                accept = threads.gather(operands.accept, row, jnp.minimum(lane, k - 1))
            recover = threads.gather(operands.recover, row, jnp.clip(lane - k, 0, 1))
            return recover if accept is None else jnp.where(recovers, recover, accept)
        assert self.key is not None
        key, position = self.key
        stream = jnp.where(recovers, int(noise.Stream.RECOVER), int(noise.Stream.ACCEPT))
        place = noise.counter_of(stream, jnp.where(recovers, 0, lane).astype(jnp.uint32))
        first, second = noise.threefry_bits(key, position + jnp.zeros_like(lane), place)
        return noise.to_uniform(jnp.where(lane == k + 1, second, first))

    def is_proposed(self, position: jax.Array) -> jax.Array:
        """Whether a token was proposed at `position`, ``[]``; false past the last draft."""
        return self.threads.at(self.proposed, jnp.minimum(position, WARP - 1))

    def write(
        self,
        num_accepted: jax.Array,
        token_id: jax.Array,
        status: jax.Array,
        is_writer: jax.Array,
    ) -> None:
        """Write the accepted drafts and one more token, or no tokens if the status is not OK.

        A draft token that is sampled must be an id: it is 0 if the status is not OK.

        Args:
          num_accepted: ``[]`` int32.
          token_id: ``[]`` or ``[128]`` int32, the last token.
          status: ``[]`` int32.
          is_writer: ``[128]`` bool, true in one warp of the cluster.
        """
        lane, outputs, ok = self.lane, self.outputs, status == Status.OK
        emitted = jnp.where(lane == num_accepted, token_id, self.token_ids)
        nothing = 0 if self.samples_draft else PLACEHOLDER_TOKEN_ID
        token_ids = jnp.where(ok & (lane <= num_accepted), emitted, nothing)
        place = self.index * (self.plan.k + 1) + lane
        is_place = is_writer & (lane < self.plan.k + 1)
        self.threads.scatter(outputs.token_ids, place, token_ids, is_place)
        self._write_numbers(
            is_writer,
            (outputs.num_accepted, jnp.where(ok, num_accepted, 0)),
            (outputs.num_emitted, jnp.where(ok, num_accepted + 1, 0)),
            (outputs.status, status),
        )

    def write_row(self, row: Normalizer, is_writer: jax.Array) -> None:
        """Write what the row of a draft token amounts to.

        Args:
          row: relative to its maximum.
          is_writer: ``[128]`` bool, true in one warp of the cluster.
        """
        # As in XLA: a row that holds NaN has the maximum inf, and its normalizer tells that.
        self._write_numbers(
            is_writer,
            (
                self.outputs.log_normalizer,
                jnp.where(is_finite(row.peak), jnp.log(row.total), row.peak),
            ),
            (self.outputs.row_max, jnp.where(row.peak != row.peak, jnp.inf, row.peak)),
            (self.outputs.threshold, row.threshold),
        )

    def _write_numbers(self, is_writer: jax.Array, *numbers: tuple[Ref | None, jax.Array]) -> None:
        """Write numbers ``[]`` of this request, each to its output if there is one."""
        for ref, value in numbers:
            if ref is not None:
                everywhere = jnp.zeros_like(self.lane)
                once = is_writer & (self.lane == 0)
                value = everywhere.astype(value.dtype) + value
                self.threads.scatter(ref, everywhere + self.index, value, once)


class DraftLoads:
    """The loads of a request's drafted tokens, by lane; they begin here.

    Attributes:
      request: the request.
      draft: draft rows, or None if the call has none.
      place: ``[128]`` int32, the id; 0 if none was proposed.
      logit: ``[128]`` float32, its entry in the target row, whether or not the row is visited.
      uses_q: ``[128]`` bool, whether its draft row may be used.
      draft_row: ``[128]`` int32, in range.
      entry: ``[128]`` float32, its entry in the draft row; of a map, its column, int32.
      lists: the first lists, if rows hold candidates.
      threshold: ``[128]`` float32, of the draft row, or None.
      log_normalizer: ``[128]`` float32, or None.
      row_max: ``[128]`` float32, what it is relative to; None for 0.
    """

    def __init__(
        self, request: KernelRequest, target: TargetSlice, draft: DraftSlice | Candidates | None
    ):
        threads, plan, operands = request.threads, request.plan, request.operands
        self.request, self.draft = request, draft
        used = request.proposed
        self.place = jnp.where(used, request.token_ids, 0)
        row = jnp.where(request.lane < request.num_rows, request.first_row + request.lane, 0)
        self.logit = target.entry(row, self.place)
        self.uses_q = used & request.stored & ~request.greedy
        self.draft_row, self.lists = self.place, list[Listed]()
        if draft is not None:
            self.draft_row = jnp.clip(request.draft_rows, 0, plan.draft_rows - 1)
        self.entry: jax.Array | None = None
        if isinstance(draft, Candidates):
            at_once = max(1, _ENTRIES // -(-draft.rows.shape[1] // WARP))
            self.lists = _load_lists(request, draft, self.draft_row, 0, min(plan.k, at_once))
        elif isinstance(draft, MappedSlice):
            self.entry = draft.column(self.place)
        elif draft is not None:
            self.entry = draft.entry(self.draft_row, jnp.minimum(self.place, plan.draft_size - 1))

        def of_row(ref: Ref | None) -> jax.Array | None:
            return None if ref is None else threads.gather(ref, self.draft_row)

        self.threshold = of_row(operands.thresholds)
        self.log_normalizer, self.row_max = of_row(operands.normalizer), of_row(operands.row_max)

    def prefetch(self, position: jax.Array) -> None:
        """Begin to fetch the draft row of a position into the L2 cache."""
        if self.draft is not None:
            self.draft.prefetch(self.request.threads.at(self.draft_row, position))


def _load_lists(
    request: KernelRequest,
    draft: Candidates,
    draft_row: jax.Array,
    first: jax.Array | int,
    count: int,
) -> list[Listed]:
    """Begin to load the lists of `count` positions; undefined past the last position."""
    places = [jnp.minimum(first + i, WARP - 1) for i in range(count)]
    return [draft.load(request.threads.at(draft_row, place)) for place in places]


class DraftedTokens:
    """The drafted tokens of a request, by lane, while the kernel is traced.

    Attributes:
      request: the request.
      loads: what was loaded of them.
      uniforms: ``[128]`` float32: K to accept, then two to recover.
      uses_q: ``[128]`` bool, whether the draft row is used.
      entry: ``[128]`` float32, the token's entry in the draft row; None of candidates.
      q: ``[128]`` float32, the draft probability; 1 if a whole row must be read to compute it.
      bad: ``[128]`` bool, whether the draft row is found bad without reading all of it.
      listed: of rows of candidates, ``[128]`` each: a row's largest entry or what stands for it,
        and log2 of the mass relative to it; None of others, and of probabilities.
    """

    def __init__(self, loads: DraftLoads, uniforms: jax.Array):
        request, draft, normalizer = loads.request, loads.draft, loads.log_normalizer
        plan, rows, uses_q, entry = request.plan, request.draft_rows, loads.uses_q, loads.entry
        self.request, self.loads, self.uniforms, self.listed = request, loads, uniforms, None
        q, bad = request.threads.filled(1.0), request.lane < 0
        if draft is not None:
            is_outside = (rows < 0) | (rows >= plan.draft_rows)
            if normalizer is not None:
                size = jnp.abs(normalizer)
                is_large = (size >= MAX_LOG_NORMALIZER) & (size < jnp.inf)
                uses_q = uses_q & (is_outside | ~is_large)
            bad = uses_q & is_outside
            if loads.threshold is not None:
                bad = bad | (uses_q & (loads.threshold != loads.threshold))
        if isinstance(draft, Candidates):
            q, is_bad, self.listed = _find_listed(loads, draft)
            bad = bad | (uses_q & is_bad)
        if isinstance(draft, MappedSlice):
            assert entry is not None and request.operands.bad_map is not None
            entry = draft.entry_in(loads.draft_row, entry)
            bad = bad | (uses_q & (request.operands.bad_map[0] != 0))
        if entry is not None and plan.entries == "probs":
            q = entry
        if entry is not None and normalizer is not None:
            relative = entry if loads.row_max is None else entry - loads.row_max
            q = jnp.exp2((relative * request.inv - normalizer) * LOG2E)
        for stored in (loads.row_max, normalizer):
            if stored is not None:
                bad = bad | (uses_q & ~is_finite(stored))
        self.uses_q, self.entry, self.q, self.bad = uses_q, entry, q, bad

    def exponent(self, position: jax.Array, of_row: Normalizer) -> Exponent | None:
        """What turns entries of the draft row of a position into `q`; None of probabilities.

        Args:
          position: ``[]`` int32.
          of_row: what normalizes the row, if it was read.
        """
        at, scale, entries = self.request.threads.at, self.request.scale, self.request.plan.entries
        if entries == "probs":
            return None
        if self.listed is not None:
            peak, log = self.listed
            return Exponent(scale, at(log, position), at(peak, position))
        if self.loads.log_normalizer is not None:
            log = at(self.loads.log_normalizer, position)
            row_max = None if self.loads.row_max is None else at(self.loads.row_max, position)
            return Exponent(scale, log * LOG2E, row_max)
        return Exponent.of(of_row, scale)

    def probabilities(self, target: Normalizer, draft: Normalizer) -> tuple[jax.Array, jax.Array]:
        """By lane: p and q of the drafted token, by the normalizers of one position's rows."""
        request, plan = self.request, self.request.plan
        p = jnp.exp2((self.loads.logit - target.peak) * request.scale) / target.total
        if request.filters is not None:
            p = jnp.where(self.loads.logit >= target.threshold, p, 0.0)
        q = self.q
        if plan.sums_draft_rows:
            assert self.entry is not None
            q = jnp.exp2((self.entry - draft.peak) * request.scale) / draft.total
        if plan.entries is not None:
            q = jnp.where(self.uses_q, jnp.where(self.loads.place < plan.draft_size, q, 0.0), 1.0)
        return p, q

    def has_q(self, position: jax.Array) -> jax.Array:
        """Whether a draft of a sampled request has a draft distribution, ``[]``: else one-hot."""
        if self.loads.log_normalizer is None:
            return self.request.stored
        return self.request.threads.at(self.uses_q, position)


def _find_listed(
    loads: DraftLoads, draft: Candidates
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Of rows of candidates, a few positions at once: `q`, whether it is bad, and `listed`."""
    request, threads, k = loads.request, loads.request.threads, loads.request.plan.k
    found = [threads.filled(draft.fill), threads.filled(0, jnp.int32)]
    if draft.sums:
        found += [threads.filled(0.0)] * 2

    def search(first: jax.Array | int, lists: list[Listed], found: Any) -> list[jax.Array]:
        for i, listed in enumerate(lists):
            here = request.lane == first + i
            token_id = threads.at(loads.place, jnp.minimum(first + i, WARP - 1))
            of_row = draft.find(listed, token_id, request.scale)
            found = [jnp.where(here, *x) for x in zip(of_row, found, strict=True)]
        return found

    def load_and_search(i: jax.Array, found: Any) -> list[jax.Array]:
        first = i * count
        return search(first, _load_lists(request, draft, loads.draft_row, first, count), found)

    count = len(loads.lists)
    found = search(0, loads.lists, found)
    if k > count:
        last = jnp.int32(-(-k // count))
        found = lax.fori_loop(jnp.int32(1), last, load_and_search, found)
    q, is_bad = found[0], found[1] != 0
    if request.plan.entries == "probs":
        return q, is_bad, None
    if draft.sums:
        peak, log = found[2:]
    else:
        assert loads.log_normalizer is not None
        peak = threads.filled(0.0) if loads.row_max is None else loads.row_max
        log = loads.log_normalizer * LOG2E
    q = jnp.exp2(Exponent(request.scale, log, peak)(q))
    return q, is_bad | ~is_finite(peak), (peak, log)


class Work(NamedTuple):
    """The objects that one warpgroup works with, while the kernel is traced.

    Attributes:
      request: the request.
      target: target rows.
      draft: draft rows, or None if the call has none.
      drafted: the drafted tokens.
      cluster: the blocks that verify the request.
    """

    request: KernelRequest
    target: TargetSlice
    draft: DraftSlice | Candidates | None
    drafted: DraftedTokens
    cluster: Cluster
