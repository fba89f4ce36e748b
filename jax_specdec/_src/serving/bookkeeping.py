"""What the host knows of the requests in the slots, and what it tells about each step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax

from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec._src.serving.batch import StepRecord
from jax_specdec._src.serving.metrics import AcceptanceCounters
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
        after a stop token, "failed" where a verification could not be made.
      status: `Status.OK`, or why it failed.
      num_proposed: drafts offered to the verification.
      num_accepted: drafts it accepted, before a stop token or the budget cut its tokens.
      logprobs: `TokenLogprobs` of NumPy arrays, a row for each new token; None unless the engine
        has them.

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


@dataclasses.dataclass(frozen=True)
class ServedRequest:
    """A request that has not ended; only `token_ids` grows."""

    request_id: int
    token_ids: list[int]  # the prompt, and what was generated since
    prompt_length: int
    options: RequestOptions
    seed: int
    arrays: BatchOptions  # what `Engine.admit` takes


class Report(NamedTuple):
    """What the device says of one step, in buffers that no later call is given to donate."""

    record: StepRecord
    lengths: jax.Array
    done: jax.Array
    status: jax.Array
    counters: AcceptanceCounters


@dataclasses.dataclass(frozen=True)
class Host:
    """What the host knows after the last step whose report it has read.

    Attributes:
      slots: S requests; None for an empty slot.
      updates: those not delivered yet; whoever iterates takes them.
      counters: acceptance of all steps so far, on the device.
    """

    slots: tuple[ServedRequest | None, ...]
    updates: Iterator[RequestUpdate]
    counters: AcceptanceCounters

    @property
    def running(self) -> list[ServedRequest]:
        """The requests in slots."""
        return [request for request in self.slots if request is not None]

    def find(self, request_id: int) -> tuple[int, ServedRequest] | None:
        """A running request and its slot."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.request_id == request_id:
                return slot, request
        return None

    def with_slot(self, slot: int, request: ServedRequest | None) -> Host:
        """The same with another request, or none, in a slot; the same if there is no such slot."""
        slots = tuple(request if s == slot else one for s, one in enumerate(self.slots))
        return dataclasses.replace(self, slots=slots)

    def without_updates_of(self, request_id: int) -> Host:
        """The same without the updates of a request; this one keeps its updates."""
        kept = [one for one in copy.copy(self.updates) if one.request_id != request_id]
        return dataclasses.replace(self, updates=iter(kept))

    def after(self, report: Report) -> Host:
        """What is known after the next step; waits for it.

        The tokens of running requests grow; done again, they grow no further.
        """
        record, lengths, done, status = jax.device_get(report[:4])
        updates, slots = [], list(self.slots)
        for slot, request in enumerate(self.slots):
            if request is None:
                continue
            new: list[int] = record.token_ids[slot, : record.num_kept[slot]].tolist()
            request.token_ids[lengths[slot] - len(new) :] = new
            reason: FinishReason | None = None
            if done[slot]:
                stopped = bool(new) and new[-1] in request.options.stop_token_ids
                failed = status[slot] != Status.OK
                reason = "failed" if failed else "stop" if stopped else "length"
                slots[slot] = None
            updates.append(
                RequestUpdate(
                    request.request_id,
                    new,
                    reason,
                    Status(status[slot]),
                    int(record.num_proposed[slot]),
                    int(record.num_accepted[slot]),
                    None if record.logprobs is None else record.logprobs.of(slot, len(new)),
                )
            )
        return Host(tuple(slots), iter(updates), report.counters)
