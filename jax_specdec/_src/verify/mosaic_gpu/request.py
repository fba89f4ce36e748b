"""A request as a warpgroup holds it: its operands, its parameters, and its output.

Lane i of every warp holds position i of the request. `RequestLoads` are loads that are in flight;
`KernelRequest` is what comes of them. `drafted` has the same of the drafted tokens, and
`kernel.verify_request` says when each is made.

The kernel also samples drafts. It then verifies no drafts: K is 0, and it draws the one token
of each request. See `launch.sample`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base import noise, ragged
from jax_specdec._src.base import sampling as sampling_lib
from jax_specdec._src.base.sampling import Filter, SamplingParams
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Status
from jax_specdec._src.mosaic.threads import WARP, Ref, Threads
from jax_specdec._src.verify.mosaic_gpu.plan import Plan
from jax_specdec._src.verify.mosaic_gpu.statistics import LARGEST, LOG2E, Normalizer, is_finite

_GROUPS = 8
"""Groups of 32 requests, the offsets of which are loaded at once."""

X = TypeVar("X")

# What a call gives the kernel: arrays, or refs of them in global memory. What a call does not have
# is None: it has no leaf, and takes no parameter. Fields are in the order of the parameters.


class GivenNoise(NamedTuple, Generic[X]):
    """Uniforms that the caller gives."""

    accept: X | None  # [B, K] float32; None if drafts are sampled: K is 0
    recover: X  # [B, 2] float32


class KeyNoise(NamedTuple, Generic[X]):
    """Keys and positions that uniforms are drawn from."""

    keys: X  # [B, 2] uint32, the words of each key
    positions: X  # [B] int32


class RowNumbers(NamedTuple, Generic[X]):
    """Numbers that the drafter stored beside rows of logits, ``[R]`` float32 each."""

    log_normalizer: X | None = None  # natural logarithm; None: rows are summed, or hold q itself
    row_max: X | None = None  # what it is relative to; None: to nothing


class DraftOperands(NamedTuple, Generic[X]):
    """The draft distribution of a call."""

    matrix: X  # [R, Vd] probabilities or logits
    # Which ids its columns stand for: of a map that all rows share, [1, W] int32 (see
    # `lists.columns_of_map`) and [1] int32, 1 if it lists an id twice or one out of range; of lists
    # that rows have, [R, C] int32. None of these: column j is id j.
    columns: X | None
    bad: X | None
    ids: X | None
    numbers: RowNumbers[X]  # what is stored beside each row
    thresholds: X | None  # [R] float32, the least entry that a filter kept; None: it kept all


class Operands(NamedTuple, Generic[X]):
    """Operands of the kernel that verifies."""

    target: X  # [M, V] target logits
    token_ids: X  # [N] int32, at least one
    temperature: X  # [B] float32
    offsets: X | None  # [B+1] int32; None if drafts are sampled: there are no drafts
    noise: GivenNoise[X] | KeyNoise[X]  # uniforms, or what to draw them from
    draft: DraftOperands[X] | None  # the draft distribution; None: every draft is one-hot
    row_of_draft: X | None  # [N] int32; None: draft n has row n of the distribution
    valid: X | None  # [B] bool, whether the request's rows are stored; None: all are
    bonus: X | None  # [B] int32, bonus tokens; None if requests own bonus rows
    active: X | None  # [B] bool; None: all are
    bitmask: X | None  # [M, words] int32; None: all ids are allowed
    filter: Filter  # min-p, top-k and top-p, [B] each, None for those that the call does not have


# What the kernel writes: arrays, their types, or refs of them in global memory.


class Outcome(NamedTuple, Generic[X]):
    """Outcome of a verification, ``[B]`` int32 each."""

    num_accepted: X
    num_emitted: X
    status: X


class SampledRow(NamedTuple, Generic[X]):
    """Numbers of the row that a draft is sampled from, ``[B]`` float32 each."""

    log_normalizer: X  # relative to `row_max`
    row_max: X  # its maximum
    threshold: X | None  # below which its filter keeps no entry; None without a filter


class Outputs(NamedTuple, Generic[X]):
    """Outputs of the kernel that verifies."""

    token_ids: X  # [B * (K+1)] int32
    numbers: Outcome[X] | SampledRow[X]  # of each request


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLoads:
    """The loads of a request that depend on nothing else; all of them begin at once."""

    lane: jax.Array  # [128] int32, the index of each thread in its warp
    token_ids: jax.Array  # [128] by lane, the drafts if all requests before have K drafts
    draft_rows: jax.Array | None  # [128] by lane, theirs; None if draft n has row n
    start: jax.Array  # [] int32, where its drafts begin
    end: jax.Array  # [] int32
    sampling: SamplingParams  # [] each
    # The refs of given uniforms, or two words [] of the key and the position [].
    noise: GivenNoise[Ref] | LoadedKey
    active: jax.Array | None  # [] int32; None: it is
    valid: jax.Array | None  # [] int32; None: its draft rows are stored, if there are any
    before: list[OffsetsBefore]  # offsets of up to 256 requests before it, by lane
    bonus: jax.Array  # [] int32, the bonus token that the caller gave, else 0

    @classmethod
    def begin(
        cls, plan: Plan, threads: Threads, operands: Operands[Ref], index: jax.Array
    ) -> RequestLoads:
        """Returns the loads of request `index`, all begun.

        A field that the call does not have is None among the operands, an empty tree to
        `jax.tree.map`, and stays None.
        """

        def flag(ref: Ref) -> jax.Array:
            # A byte, which a gather widens.
            return threads.scalar(threads.gather(ref, threads.filled(0, jnp.int32) + index))

        lane = threads.lane
        # Where its drafts begin is not known yet. If all requests before have K, it is here.
        guess = jnp.minimum(index * plan.k + lane, operands.token_ids.shape[0] - 1)
        token_ids = threads.gather(operands.token_ids, guess)
        draft_rows = jax.tree.map(lambda ref: threads.gather(ref, guess), operands.row_of_draft)
        # Groups of 32 requests before this one, whose offsets are loaded at once; if there are more
        # requests, `_reached` loads the others later.
        start = jnp.int32(0)
        end = start
        num_before = 0
        if operands.offsets is not None:
            start = operands.offsets[index]
            end = operands.offsets[index + 1]
            num_before = min(-(-operands.temperature.shape[0] // WARP), _GROUPS)
        # Scalars [], the same in all threads.
        temperature = operands.temperature[index]
        limits = jax.tree.map(lambda ref: ref[index], operands.filter)
        # Given uniforms are loaded later, by `uniforms`; a key now, since hashing it takes a while.
        source: GivenNoise[Ref] | LoadedKey
        if isinstance(operands.noise, KeyNoise):
            keys = operands.noise.keys
            words = keys[index, 0], keys[index, 1]
            source = LoadedKey(words=words, position=operands.noise.positions[index])
        else:
            source = operands.noise
        return cls(
            lane=lane,
            token_ids=token_ids,
            draft_rows=draft_rows,
            start=start,
            end=end,
            sampling=SamplingParams(temperature, **limits._asdict()),
            noise=source,
            active=jax.tree.map(flag, operands.active),
            valid=jax.tree.map(flag, operands.valid),
            before=[
                OffsetsBefore.begin(threads, operands.offsets, index, i) for i in range(num_before)
            ],
            bonus=jnp.int32(0) if operands.bonus is None else operands.bonus[index],
        )


class LoadedKey(NamedTuple):
    """Key and position that a request's uniforms are drawn from."""

    words: tuple[jax.Array, jax.Array]  # [] uint32 each
    position: jax.Array  # [] int32


class OffsetsBefore(NamedTuple):
    """Offsets of 32 requests before one, by lane; if there are fewer, the last is repeated."""

    other: jax.Array  # [128] int32, index of the request
    start: jax.Array  # [128] int32, where its drafts begin
    end: jax.Array  # [128] int32, where they end

    @classmethod
    def begin(
        cls, threads: Threads, offsets: Any, index: jax.Array, group: jax.Array | int
    ) -> OffsetsBefore:
        """Returns the offsets of requests ``32 * group`` and after, before `index`; loads begin."""
        # [128]: request 32 * group + lane, or the last one before this.
        other = jnp.minimum(group * WARP + threads.lane, jnp.maximum(index - 1, 0))
        start = threads.gather(offsets, other)
        end = threads.gather(offsets, other + 1)
        return cls(other=other, start=start, end=end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """One request, while the kernel is traced."""

    plan: Plan  # the static side of the launch
    threads: Threads  # the operations of the warpgroup
    operands: Operands[Ref]  # refs of what the call gives
    outputs: Outputs[Ref]  # refs of what is written
    index: jax.Array  # [] int32, of the request
    lane: jax.Array  # [128] int32, the index of each thread in its warp
    status: jax.Array  # [] int32. If it is not OK, none of the request's rows may be read.
    first_row: jax.Array  # [] int32
    num_drafts: jax.Array  # [] int32
    num_rows: jax.Array  # [] int32, target rows that it owns
    greedy: jax.Array  # [] bool
    has_stored_q: jax.Array  # [] bool, whether its draft distribution is stored
    inv_temperature: jax.Array  # [] float32
    factor: jax.Array  # [] float32, the same for exponentials of base two: log2(e) / temperature
    bonus: jax.Array  # [] int32, the bonus token that the caller gave
    filter: Filter  # its min-p, top-k and top-p, None for those that the call does not have
    is_filtered: jax.Array  # [] bool, whether its filter may leave out anything
    # Given uniforms, or what to draw them from.
    noise: GivenNoise[Ref] | LoadedKey
    token_ids: jax.Array  # [128] int32 by lane, -1 for lanes without a draft
    proposed: jax.Array  # [128] bool by lane, whether the id is in range
    draft_rows: jax.Array  # [128] int32 by lane

    @classmethod
    def of(
        cls,
        plan: Plan,
        threads: Threads,
        operands: Operands[Ref],
        outputs: Outputs[Ref],
        index: jax.Array,
        loads: RequestLoads,
    ) -> KernelRequest:
        """Returns what comes of the loads of request `index`."""
        lane = loads.lane
        sampling = loads.sampling
        start, num_drafts, in_bounds = ragged.locate(loads.start, loads.end, index, plan.k, plan.n)
        if loads.before:
            reached = _reached(plan, threads, operands, index, loads.before)
            # No draft has two owners: its drafts begin where those before it have ended.
            in_bounds &= start >= reached
        # A request before it that owns a bonus row moves its rows by one.
        first_row = start + index if plan.has_bonus_rows else start
        num_rows = num_drafts + (1 if plan.has_bonus_rows else 0)

        # The status, by what is known before a row is read.
        is_valid = in_bounds
        if isinstance(outputs.numbers, Outcome):  # as in XLA, drafting refuses no parameter
            is_valid &= sampling_lib.is_valid(sampling)
        if isinstance(loads.noise, LoadedKey):
            is_valid &= loads.noise.position >= 0
        if operands.target.shape[0] < plan.num_rows:  # rows were left out at the end
            is_valid &= first_row + num_rows <= operands.target.shape[0]
        status = jnp.where(is_valid, jnp.int32(Status.OK), jnp.int32(Status.BAD_INPUT))
        if loads.active is not None:
            # An empty slot is no error, whatever else it holds.
            status = jnp.where(loads.active == 0, jnp.int32(Status.INACTIVE), status)

        # How it samples. All numbers are [], the same in all threads.
        # Temperature 0 is greedy; q is read of requests whose rows are stored.
        greedy = sampling.temperature == 0
        has_stored_q = jnp.bool_(plan.has_draft_rows)
        if loads.valid is not None:
            has_stored_q = loads.valid != 0
        inv_temperature = sampling_lib.inverse_temperature(sampling.temperature)
        factor = jnp.minimum(inv_temperature * LOG2E, LARGEST)
        filter = Filter(sampling.min_p, sampling.top_k, sampling.top_p)
        # A filter that leaves out nothing is not searched for.
        is_filtered = jnp.bool_(False)
        if plan.has_filter:
            is_filtered = ~greedy & filter.limits(plan.size)

        # The drafts, by lane: what was loaded with the offsets, if the guess was right.
        is_draft = lane < num_drafts
        place = jnp.where(is_draft, start + lane, 0)
        token_ids, draft_rows = lax.cond(
            start == index * plan.k,
            lambda: (loads.token_ids, loads.draft_rows),
            lambda: (
                threads.gather(operands.token_ids, place),
                jax.tree.map(lambda ref: threads.gather(ref, place), operands.row_of_draft),
            ),
        )
        # Lanes past the last draft have none.
        token_ids = jnp.where(is_draft, token_ids, -1)
        return cls(
            plan=plan,
            threads=threads,
            operands=operands,
            outputs=outputs,
            index=index,
            lane=lane,
            status=status,
            first_row=first_row,
            num_drafts=num_drafts,
            num_rows=num_rows,
            greedy=greedy,
            has_stored_q=has_stored_q,
            inv_temperature=inv_temperature,
            factor=factor,
            bonus=loads.bonus,
            filter=filter,
            is_filtered=is_filtered,
            noise=loads.noise,
            token_ids=token_ids,
            proposed=(token_ids >= 0) & (token_ids < plan.size),
            draft_rows=place if draft_rows is None else jnp.where(is_draft, draft_rows, 0),
        )

    @property
    def samples_draft(self) -> bool:
        """Returns whether a draft is sampled: what its row amounts to is written."""
        return isinstance(self.outputs.numbers, SampledRow)

    def uniforms(self) -> jax.Array:
        """Returns ``[128]`` float32 by lane: K to accept, then two to recover; drawn or loaded."""
        k = self.plan.k
        lane = self.lane
        recovers = lane >= k
        if isinstance(self.noise, LoadedKey):
            # Threefry gives two words: the draft of lane i is accepted by the first word of place
            # i; the token is recovered with both words of one place.
            # [128]: the stream and the place of each lane's uniform
            stream = jnp.where(recovers, int(noise.Stream.RECOVER), int(noise.Stream.ACCEPT))
            place = noise.counter_of(stream, jnp.where(recovers, 0, lane).astype(jnp.uint32))
            position = self.noise.position + jnp.zeros_like(lane)
            first, second = noise.threefry_bits(self.noise.words, position, place)
            return noise.to_uniform(jnp.where(lane == k + 1, second, first))
        # Loaded: each lane one of K, or one of two.
        threads = self.threads
        row = self.index + jnp.zeros_like(lane)
        if self.noise.accept is None:
            return threads.gather(self.noise.recover, row, jnp.clip(lane - k, 0, 1))
        accept = threads.gather(self.noise.accept, row, jnp.minimum(lane, k - 1))
        recover = threads.gather(self.noise.recover, row, jnp.clip(lane - k, 0, 1))
        return jnp.where(recovers, recover, accept)

    def is_proposed(self, position: jax.Array) -> jax.Array:
        """Returns whether a token was proposed at `position`, ``[]``; false past the last draft."""
        return self.threads.at(self.proposed, jnp.minimum(position, WARP - 1))

    # The output.

    def write(
        self,
        num_accepted: jax.Array,
        token_id: jax.Array,
        status: jax.Array,
        is_writer: jax.Array,
    ) -> None:
        """Writes the accepted drafts and one more token, or no tokens if the status is not OK.

        A draft that is sampled must be an id: it is 0 if the status is not OK.

        Args:
          num_accepted: ``[]`` int32.
          token_id: ``[]`` or ``[128]`` int32, the last token.
          status: ``[]`` int32.
          is_writer: ``[128]`` bool, true in one warp of the cluster.
        """
        lane = self.lane
        ok = status == Status.OK
        # By lane, [128]: the accepted drafts, the last token, then nothing; K + 1 lanes write.
        emitted = jnp.where(lane == num_accepted, token_id, self.token_ids)
        nothing = 0 if self.samples_draft else PLACEHOLDER_TOKEN_ID
        token_ids = jnp.where(ok & (lane <= num_accepted), emitted, nothing)
        place = self.index * (self.plan.k + 1) + lane
        is_place = is_writer & (lane < self.plan.k + 1)
        self.threads.scatter(self.outputs.token_ids, place, token_ids, is_place)
        numbers = self.outputs.numbers
        if isinstance(numbers, Outcome):
            # []: a request whose status is not OK emits nothing
            accepted = jnp.where(ok, num_accepted, 0)
            emitted = jnp.where(ok, num_accepted + 1, 0)
            self._write_number(numbers.num_accepted, accepted, is_writer)
            self._write_number(numbers.num_emitted, emitted, is_writer)
            self._write_number(numbers.status, status, is_writer)

    def write_row(self, row: Normalizer, is_writer: jax.Array) -> None:
        """Writes what the row of a draft amounts to; nothing in a verification.

        Args:
          row: relative to its maximum.
          is_writer: ``[128]`` bool, true in one warp of the cluster.
        """
        numbers = self.outputs.numbers
        if isinstance(numbers, Outcome):
            return
        # As in XLA: a row that holds NaN has the maximum inf, which its normalizer shows.
        log_normalizer = jnp.where(is_finite(row.peak), jnp.log(row.total), row.peak)
        row_max = jnp.where(row.peak != row.peak, jnp.inf, row.peak)
        self._write_number(numbers.log_normalizer, log_normalizer, is_writer)
        self._write_number(numbers.row_max, row_max, is_writer)
        if numbers.threshold is not None:
            self._write_number(numbers.threshold, row.threshold, is_writer)

    def _write_number(self, ref: Ref, value: jax.Array, is_writer: jax.Array) -> None:
        """Writes a number ``[]`` of this request, by one thread."""
        # A scatter takes arrays [128]; lane 0 of the warp that writes stores.
        everywhere = jnp.zeros_like(self.lane)
        once = is_writer & (self.lane == 0)
        value = everywhere.astype(value.dtype) + value
        self.threads.scatter(ref, everywhere + self.index, value, once)


def _reached(
    plan: Plan,
    threads: Threads,
    operands: Operands[Ref],
    index: jax.Array,
    before: list[OffsetsBefore],
) -> jax.Array:
    """Returns where the last drafts of the requests before `index` end, ``[]`` int32."""

    def end(offsets: OffsetsBefore) -> jax.Array:
        """Returns where each lane's request ends; 0 if its offsets are out of range."""
        _, _, in_bounds = ragged.locate(offsets.start, offsets.end, offsets.other, plan.k, plan.n)
        return jnp.where(in_bounds & (offsets.other < index), offsets.end, 0)

    def end_of_group(i: jax.Array, reached: jax.Array) -> jax.Array:
        offsets = OffsetsBefore.begin(threads, operands.offsets, index, i)
        return jnp.maximum(reached, end(offsets))

    # [128], by lane: the largest end among its requests of all groups.
    reached = functools.reduce(jnp.maximum, [end(offsets) for offsets in before])
    if operands.temperature.shape[0] > _GROUPS * WARP:
        last = lax.div(index + WARP - 1, WARP)  # groups up to this request
        reached = lax.fori_loop(_GROUPS, last, end_of_group, reached)
    return -threads.scalar(threads.warp_min(-reached))  # the maximum over the lanes
