"""What the host knows of the requests in the slots, and what it tells about each step."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Iterator, Mapping
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
      finish_reason: None while the request goes on; "length" where its budget is spent, "stop"
        after a stop token, "failed" where a verification could not be made, or where the device
        failed again.
      status: `Status.OK`, or why a verification could not be made.
      num_proposed: drafts offered to the verification.
      num_accepted: drafts it accepted, before a stop token or the budget cut its tokens.
      logprobs: `TokenLogprobs` of NumPy arrays, a row for each new token; None unless the engine
        has them.
      error: what the device said where a call failed that this request was in; such an update has
        no tokens. Without a finish reason, the request is read again and goes on.

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
    """A request that has not ended; only `token_ids` grows."""

    request_id: int
    token_ids: list[int]  # the prompt, and what was generated since
    prompt_length: int
    options: RequestOptions
    seed: int
    arrays: BatchOptions  # what `Engine.admit` takes, of one request
    is_neutral: bool  # as in `options`, where that is worked out again
    submitted: float = 0.0  # by `time.perf_counter`

    @property
    def budget_left(self) -> int:
        """Tokens that it may still get, as far as the host knows."""
        return self.prompt_length + self.options.max_new_tokens - len(self.token_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What the device says of one step, in buffers that no later call is given to donate.

    Attributes:
      numbers: ``[S, K+7]`` int32, one array so that there is one copy to the host: tokens kept,
        their number, drafts proposed and accepted, the length, done or not, and the status.
      logprobs: of the tokens kept; None unless asked for.
      counters: acceptance of all steps so far.
    """

    numbers: jax.Array
    logprobs: TokenLogprobs | None
    counters: AcceptanceCounters

    @classmethod
    def of(cls, record: StepRecord, batch: Batch, counters: AcceptanceCounters) -> Report:
        """For use inside jit."""
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
        """Begin to copy what `Host.after` reads; does not wait."""
        for x in jax.tree.leaves((self.numbers, self.logprobs)):
            x.copy_to_host_async()


class StepAhead(NamedTuple):
    """A step that was dispatched and whose report nobody has read."""

    report: Report
    slots: tuple[ServedRequest | None, ...]  # who took part


class Reading(NamedTuple):
    """A long prompt that is read piece by piece; its slot is kept for it."""

    slot: int
    request: ServedRequest
    num_pieces: int = 0  # dispatched so far
    waits: bool = False  # shorter prompts go before the next piece


@dataclasses.dataclass(frozen=True)
class Host:
    """What the host knows after the last step whose report it has read.

    Attributes:
      slots: S requests; None for an empty slot.
      updates: those not delivered yet; whoever iterates takes them.
      counters: acceptance of all steps whose reports were read, on the device.
      stats: how busy the engine was.
      ahead: steps dispatched since, the oldest first.
      reading: the long prompt that is being read.
      suspects: ids of requests that were in a call that failed, and have got no token since.
    """

    slots: tuple[ServedRequest | None, ...]
    updates: Iterator[RequestUpdate]
    counters: AcceptanceCounters
    stats: ServingStats
    ahead: tuple[StepAhead, ...] = ()
    reading: Reading | None = None
    suspects: frozenset[int] = frozenset()

    @property
    def running(self) -> list[ServedRequest]:
        """The requests in slots."""
        return [request for request in self.slots if request is not None]

    @property
    def decoding(self) -> tuple[ServedRequest | None, ...]:
        """The requests that the next step emits tokens for, by slot."""
        if self.reading is None:
            return self.slots
        return tuple(None if s == self.reading.slot else one for s, one in enumerate(self.slots))

    @property
    def may_go_on(self) -> bool:
        """Whether a request may be left for another step: one that spends a token at each."""
        return any(
            request is not None
            and request.budget_left > sum(step.slots[slot] is request for step in self.ahead)
            for slot, request in enumerate(self.decoding)
        )

    def find(self, request_id: int) -> tuple[int, ServedRequest] | None:
        """A running request and its slot."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.request_id == request_id:
                return slot, request
        return None

    def with_slots(self, slots: Mapping[int, ServedRequest | None]) -> Host:
        """The same with other requests, or none, in some slots; left out are those beyond S."""
        reading = None if self.reading is None or self.reading.slot in slots else self.reading
        new = tuple(slots.get(s, one) for s, one in enumerate(self.slots))
        ahead = self.ahead if any(new) else ()  # it would concern nobody
        return dataclasses.replace(self, slots=new, reading=reading, ahead=ahead)

    def with_step(self, report: Report) -> Host:
        """The same after one more step was dispatched."""
        report.copy_to_host()
        return dataclasses.replace(self, ahead=(*self.ahead, StepAhead(report, self.decoding)))

    def without_updates_of(self, request_id: int) -> Host:
        """The same without the updates of a request; this one keeps its updates."""
        kept = [one for one in copy.copy(self.updates) if one.request_id != request_id]
        return dataclasses.replace(self, updates=iter(kept))

    def after(self) -> Host:
        """What is known after the oldest of the steps ahead; waits for it.

        The tokens of running requests grow; done again, they grow no further. Whoever has left the
        slot since the step was dispatched had ended, or is not to get anything.
        """
        step, *rest = self.ahead
        begin = time.perf_counter()
        numbers, logprobs = jax.device_get((step.report.numbers, step.report.logprobs))
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
        return Host(
            tuple(slots),
            iter(updates),
            step.report.counters,
            self.stats.after_step(
                num_busy=sum(one is not None for one in step.slots),
                num_ahead=len(rest),
                waited=waited,
            ),
            tuple(rest) if any(slots) else (),  # the rest would concern nobody
            self.reading,
            self.suspects and self.suspects - {u.request_id for u in updates if u.token_ids},
        )
