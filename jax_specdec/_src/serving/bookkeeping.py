"""What the host of an engine knows of a request, a step and an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jax_specdec._src.drafting.estimator import AcceptanceEstimator
from jax_specdec._src.grammar import GrammarMatcher
from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec._src.serving.metrics import AcceptanceCounters, ServingStats
from jax_specdec._src.serving.options import RequestOptions
from jax_specdec._src.serving.programs import StepResult
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
      >>> sd.serving.RequestUpdate(0, [7], "stop").status.name
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


@dataclasses.dataclass(eq=False)
class ServedRequest:
    """A request that has not ended, or whose last updates have not been delivered."""

    request_id: int
    token_ids: list[int]  # the prompt, and every token that an `Update` of its own has
    prompt_length: int
    options: RequestOptions
    matcher: GrammarMatcher | None = None
    submitted: float = 0.0  # times are of `time.perf_counter`
    num_matched: int = 0  # new tokens that the matcher has accepted
    admitted: float = 0.0  # when it got its first slot
    last_read: float | None = None  # when its last update was read
    num_failures: int = 0  # failed calls in a row, without a new token or a further chunk
    num_chunks: int = 0  # the most chunks of its prompt that were read
    is_cancelled: bool = False

    @property
    def seed(self) -> int:
        """Of its key."""
        return self.request_id if self.options.seed is None else self.options.seed

    @property
    def budget_left(self) -> int:
        """The most tokens it may still get, as far as the host knows."""
        return self.prompt_length + self.options.max_new_tokens - len(self.token_ids)


class Update(NamedTuple):
    """An update, and what it does to its request. Doing it twice changes nothing."""

    request: ServedRequest
    start: int  # the position of its first token
    update: RequestUpdate
    read: float | None = None  # when it was read; None for the update of a failed call
    num_failures: int = 0  # of the request from then on


class Received(NamedTuple):
    """All that was read from the device; one assignment replaces it."""

    updates: tuple[Update, ...]  # those that have not been delivered
    counters: AcceptanceCounters  # of the steps that were read; on the device
    estimator: AcceptanceEstimator | None  # of these steps; None without a draft budget
    stats: ServingStats  # of these steps


class StepAhead(NamedTuple):
    """A step that was dispatched and whose result the host has not read."""

    result: StepResult
    slots: Mapping[int, ServedRequest]  # the requests that took part

    def updates(
        self, numbers: Any, logprobs: Any, slots: Mapping[int, ServedRequest], read: float
    ) -> list[Update]:
        """For those still in their `slots`; the rest is of the result, on the host, and when."""
        found, k = [], numbers.shape[1] - 7
        for slot, request in sorted(self.slots.items()):
            if request is not slots.get(slot):
                continue
            row = numbers[slot].tolist()
            count, proposed, accepted, length, done, status = row[k + 1 :]
            new, own = row[:count], None if logprobs is None else logprobs.of(slot, count)
            reason: FinishReason | None = None
            if done:
                stopped = bool(new) and new[-1] in request.options.stop_token_ids
                reason = "failed" if status != Status.OK else "stop" if stopped else "length"
            counts = Status(status), proposed, accepted
            update = RequestUpdate(request.request_id, new, reason, *counts, own)
            found.append(Update(request, length - count, update, read))
        return found


class ChunkedPrefill(NamedTuple):
    """A long prompt that is read chunk by chunk, and the slot that is kept for its request."""

    slot: int
    request: ServedRequest
    num_chunks: int = 0  # dispatched so far
    waits: bool = False  # shorter prompts go before the next chunk


class FailedCall(Exception):
    """A call failed on the device; `requests` were in it."""

    def __init__(self, error: Exception, requests: list[ServedRequest]) -> None:
        super().__init__(str(error))
        self.error, self.requests = error, requests
