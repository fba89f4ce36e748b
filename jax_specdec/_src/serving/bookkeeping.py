"""What the host of an engine knows: requests, slots, steps under way, and updates to deliver."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec._src.serving.batch import Batch, StepRecord
from jax_specdec._src.serving.metrics import AcceptanceCounters, ServingStats
from jax_specdec._src.serving.options import BatchOptions, RequestOptions
from jax_specdec._src.types import Status

FinishReason = Literal["length", "stop", "failed"]


@dataclasses.dataclass(frozen=True)
class RequestUpdate:
    """What one step did for one request.

    Attributes:
      request_id: as `EngineDriver.submit` returned it.
      token_ids: new tokens, a stop token included.
      finish_reason: None while the request goes on. "length": its budget is spent. "stop": it
        emitted a stop token. "failed": it could not be verified (`status` says why), or the device
        failed too often (`error`).
      status: `Status.OK`, or why the request could not be verified.
      num_proposed: drafts offered to the verification.
      num_accepted: drafts that were accepted, counted before a stop token or the budget cuts them.
      logprobs: `TokenLogprobs` of NumPy arrays, one row for each new token; None unless the engine
        has them.
      error: the device's message, if a call failed that this request was in. Such an update has no
        tokens. If it has no finish reason either, the request is read again and goes on.

    Example:
      >>> import jax_specdec as sd
      >>> sd.RequestUpdate(0, [7], "stop").status.name
      'OK'
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    status: Status = Status.OK
    num_proposed: int = 0
    num_accepted: int = 0
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class ServedRequest:
    """A request that has not ended. Only `token_ids` changes: it grows."""

    request_id: int
    token_ids: list[int]  # the prompt, and what was generated since
    prompt_length: int
    options: RequestOptions
    seed: int
    option_arrays: BatchOptions  # `options` for `NewRequests`, of one request
    is_neutral: bool  # that of `options`, which computes it each time
    submitted: float = 0.0  # by `time.perf_counter`

    @property
    def budget_left(self) -> int:
        """The most tokens it may still get, as far as the host knows."""
        return self.prompt_length + self.options.max_new_tokens - len(self.token_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of a step. No later call donates its buffers, as those of the state are.

    Attributes:
      numbers: ``[S, K+7]`` int32: the tokens kept, their number, drafts proposed and accepted, the
        sequence's length, whether it is done, and its status. One array, for one copy to the host.
      logprobs: of the tokens kept; None unless asked for.
      counters: acceptance of all steps so far.
    """

    numbers: jax.Array
    logprobs: TokenLogprobs | None
    counters: AcceptanceCounters

    @classmethod
    def of(cls, record: StepRecord, batch: Batch, counters: AcceptanceCounters) -> StepResult:
        """The result of the step that made `record` and left `batch`; for use inside jit."""
        columns = (
            record.num_kept,
            record.num_proposed,
            record.num_accepted,
            batch.lengths,
            batch.done.astype(jnp.int32),
            batch.status,
        )
        numbers = jnp.concatenate([record.token_ids, jnp.stack(columns, axis=1)], axis=1)
        return cls(numbers, record.logprobs, counters)

    def copy_to_host(self) -> None:
        """Begin to copy what `HostState.after_step` reads; does not wait."""
        for x in jax.tree.leaves((self.numbers, self.logprobs)):
            x.copy_to_host_async()


class StepAhead(NamedTuple):
    """A step that was dispatched and whose result the host has not read."""

    result: StepResult
    slots: tuple[ServedRequest | None, ...]  # the requests that took part


class ChunkedPrefill(NamedTuple):
    """A long prompt that is read chunk by chunk, and the slot that is kept for its request."""

    slot: int
    request: ServedRequest
    num_chunks: int = 0  # dispatched so far
    waits: bool = False  # shorter prompts go before the next chunk


class Failures(NamedTuple):
    """Failed calls of one request in a row: without a new token or a further chunk in between."""

    num_calls: int = 0
    num_chunks: int = 0  # the most chunks of its prompt that were read


@dataclasses.dataclass(frozen=True)
class HostState:
    """What the host knows after the last step whose result it has read.

    Attributes:
      slots: the requests in S slots; None for an empty slot.
      updates: those not delivered yet; iterating takes them.
      counters: acceptance of the steps whose results were read; on the device.
      stats: how busy the engine was.
      ahead: the steps dispatched since, oldest first.
      prefill: the long prompt that is being read.
      failures: of the requests, by id, that have not got a token since a call of theirs failed.
    """

    slots: tuple[ServedRequest | None, ...]
    updates: Iterator[RequestUpdate]
    counters: AcceptanceCounters
    stats: ServingStats
    ahead: tuple[StepAhead, ...] = ()
    prefill: ChunkedPrefill | None = None
    failures: Mapping[int, Failures] = dataclasses.field(default_factory=dict)

    @property
    def running(self) -> list[ServedRequest]:
        """The requests in slots."""
        return [request for request in self.slots if request is not None]

    @property
    def decoding(self) -> list[ServedRequest]:
        """The requests that the next step emits tokens for."""
        return [request for request in self._decoding_slots if request is not None]

    @property
    def _decoding_slots(self) -> tuple[ServedRequest | None, ...]:
        if self.prefill is None:
            return self.slots
        return tuple(None if s == self.prefill.slot else one for s, one in enumerate(self.slots))

    @property
    def needs_step(self) -> bool:
        """Whether a request has budget left after the steps ahead, if each spends one token."""
        return any(
            request is not None
            and request.budget_left > sum(step.slots[slot] is request for step in self.ahead)
            for slot, request in enumerate(self._decoding_slots)
        )

    def find(self, request_id: int) -> tuple[int, ServedRequest] | None:
        """A running request and its slot."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.request_id == request_id:
                return slot, request
        return None

    def with_slots(self, slots: Mapping[int, ServedRequest | None]) -> HostState:
        """With other requests, or none, in some slots; slots from S on are ignored."""
        prefill = None if self.prefill is None or self.prefill.slot in slots else self.prefill
        new = tuple(slots.get(s, one) for s, one in enumerate(self.slots))
        ahead = self.ahead if any(new) else ()  # without requests there is nothing to read
        return dataclasses.replace(self, slots=new, prefill=prefill, ahead=ahead)

    def with_step(self, result: StepResult) -> HostState:
        """With one more step ahead."""
        result.copy_to_host()
        step = StepAhead(result, self._decoding_slots)
        return dataclasses.replace(self, ahead=(*self.ahead, step))

    def without_updates_of(self, request_id: int) -> HostState:
        """Without a request's updates and failures; the updates of `self` are not taken."""
        updates = [one for one in copy.copy(self.updates) if one.request_id != request_id]
        failures = {i: one for i, one in self.failures.items() if i != request_id}
        return dataclasses.replace(self, updates=iter(updates), failures=failures)

    def after_failure(
        self, error: str, request_ids: Iterable[int], max_retries: int
    ) -> tuple[HostState, set[int]]:
        """The state after a call that failed, and the ids of the requests that end by it.

        Args:
          error: the device's message.
          request_ids: of the requests in the call.
          max_retries: as in `EngineDriver`.
        """
        earlier = {i: self.failures.get(i, Failures()) for i in request_ids}
        failures = {i: one._replace(num_calls=one.num_calls + 1) for i, one in earlier.items()}
        ended = {i for i, one in failures.items() if one.num_calls > max_retries}
        updates = [
            RequestUpdate(i, [], "failed" if i in ended else None, error=error) for i in failures
        ]
        known = {**self.failures, **failures}
        stats = dataclasses.replace(self.stats, num_failed_calls=self.stats.num_failed_calls + 1)
        state = dataclasses.replace(
            self,
            updates=iter([*copy.copy(self.updates), *updates]),
            stats=stats,
            failures={i: one for i, one in known.items() if i not in ended},
        )
        return state, ended

    def after_chunk(self) -> HostState:
        """The state after a chunk of a long prompt was read without an error."""
        if self.prefill is None:
            return self
        request_id, num_chunks = self.prefill.request.request_id, self.prefill.num_chunks
        if num_chunks <= self.failures[request_id].num_chunks:
            return self
        failures = {**self.failures, request_id: Failures(0, num_chunks)}
        return dataclasses.replace(self, failures=failures)

    def after_step(self) -> HostState:
        """The state after the oldest of the steps ahead; waits for its result.

        The tokens of running requests grow; if this is done twice, they grow once. A request that
        has left its slot since the step was dispatched gets nothing of it.
        """
        step, *rest = self.ahead
        begin = time.perf_counter()
        numbers, logprobs = jax.device_get((step.result.numbers, step.result.logprobs))
        waited = time.perf_counter() - begin
        k = numbers.shape[1] - 7
        updates, slots = [*copy.copy(self.updates)], list(self.slots)
        rows = numbers.tolist()
        for slot, request in enumerate(step.slots):
            if request is None or request is not slots[slot]:
                continue
            count, proposed, accepted, length, done, status = rows[slot][k + 1 :]
            new = rows[slot][:count]
            request.token_ids[length - count :] = new
            reason: FinishReason | None = None
            if done:
                stopped = bool(new) and new[-1] in request.options.stop_token_ids
                failed = status != Status.OK
                reason = "failed" if failed else "stop" if stopped else "length"
                slots[slot] = None
            updates.append(
                RequestUpdate(
                    request.request_id,
                    new,
                    reason,
                    Status(status),
                    proposed,
                    accepted,
                    None if logprobs is None else logprobs.of(slot, count),
                )
            )
        failures = self.failures
        if failures:
            past = {u.request_id for u in updates if u.token_ids or u.finish_reason is not None}
            failures = {i: one for i, one in failures.items() if i not in past}
        num_busy = sum(one is not None for one in step.slots)
        return dataclasses.replace(
            self,
            slots=tuple(slots),
            updates=iter(updates),
            counters=step.result.counters,
            stats=self.stats.after_step(num_busy=num_busy, num_ahead=len(rest), waited=waited),
            ahead=tuple(rest) if any(slots) else (),
            failures=failures,
        )
