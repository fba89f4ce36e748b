"""The host side of continuous batching: a queue, slots, and what became of each request."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.batch import StepRecord
from jax_specdec._src.serving.engine import Engine, EngineState
from jax_specdec._src.serving.metrics import AcceptanceStats
from jax_specdec._src.serving.options import RequestOptions, per_request
from jax_specdec._src.serving.placement import on_all_devices
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, Status

FinishReason = Literal["length", "stop", "failed"]


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _admit(
    params: Any,
    draft_params: Any,
    state: EngineState,
    seed: np.uint32,
    request: dict[str, Any],
    *,
    engine: Engine,
) -> EngineState:
    return engine.admit(params, draft_params, state, key=jax.random.key(seed), **request)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _step(
    params: Any, draft_params: Any, state: EngineState, *, engine: Engine
) -> tuple[EngineState, StepRecord]:
    return engine.step(params, draft_params, state)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _release(state: EngineState, slots: Any, *, engine: Engine) -> EngineState:
    return engine.release(state, slots)


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


@dataclasses.dataclass
class _Request:
    """A request that has not ended."""

    request_id: int
    token_ids: list[int]  # the prompt, and what was generated since
    max_new_tokens: int  # those left
    temperature: float
    seed: int
    stop_token_ids: list[int]
    options: Any  # what `Engine.admit` takes


class EngineDriver:
    """Serves requests with an `Engine`: call `step` again and again, and `submit` at any time.

    Requests wait in a queue for a free slot, first come, first served. Not safe for several
    threads at once.

    Attributes:
      engine: sizes and models.
      state: the `EngineState`; the next call donates it.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> engine = sd.Engine(
      ...     model, sd.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> driver = sd.EngineDriver(engine, params)
      >>> texts = {driver.submit(sd.encode(p), max_new_tokens=8): [] for p in ("import ", "def ")}
      >>> while not driver.is_idle:
      ...     for update in driver.step():
      ...         texts[update.request_id] += update.token_ids
      >>> [len(text) for text in texts.values()]
      [8, 8]
    """

    def __init__(self, engine: Engine, params: Any, draft_params: Any = None) -> None:
        """An idle driver.

        Args:
          engine: sizes and models.
          params: the target's weights.
          draft_params: the drafter's weights.
        """
        self.engine = engine
        arrays = (params, draft_params, engine.init_state(draft_params))
        self._params, self._draft_params, self.state = on_all_devices(arrays, engine.model)
        self._queue: collections.deque[_Request] = collections.deque()
        self._slots: list[_Request | None] = [None] * engine.num_slots
        self._num_submitted = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return sum(request is not None for request in self._slots)

    @property
    def is_idle(self) -> bool:
        """True where nothing waits and nothing runs."""
        return not self._queue and self.num_running == 0

    def warm_up(self) -> None:
        """Compile everything now: from here on, serving compiles nothing.

        Raises:
          RuntimeError: a request is running.
        """
        if self.num_running:
            raise RuntimeError(
                f"warm_up must come while no request runs, but {self.num_running} do"
            )
        for size in self.engine.prefill_sizes or ():
            options = self.engine.options_of(RequestOptions(), size)
            self._admit(0, _Request(-1, [0] * size, 1, 0.0, 0, [], options))
            self._release(0)
        self.state, _ = _step(self._params, self._draft_params, self.state, engine=self.engine)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        options: RequestOptions | None = None,
    ) -> int:
        """Queue a request; nothing is computed yet.

        Args:
          prompt: token ids, at least one.
          max_new_tokens: the budget, at least 1.
          temperature: 0 is greedy.
          seed: in [0, 2**32); the request samples with ``jax.random.key(seed)``. None: its id.
          stop_token_ids: the request ends after emitting one of these; at most the engine's
            `max_stop_tokens`.
          options: what else is asked for; needs an engine with `request_options`.

        Returns:
          The request's id: 0, 1, 2, ...

        Raises:
          TypeError: something is no integer, or no number.
          ValueError: an empty prompt, an id outside the vocabulary, a prompt and budget longer
            than the engine's `max_length`, a value out of range. The request is not queued, and
            nothing else changes.
        """
        vocab_size, longest = self.engine.model.vocab_size, self.engine.max_length
        token_ids = inputs.token_list("prompt", prompt, vocab_size)
        budget = inputs.integer("max_new_tokens", max_new_tokens, 1)
        if len(token_ids) + budget > longest:
            raise ValueError(
                f"prompt and max_new_tokens must fit into max_length={longest} tokens, but they "
                f"are {len(token_ids)} and {budget}"
            )
        (checked_temperature,) = inputs.temperatures(temperature, 1)
        stops = inputs.stop_ids(stop_token_ids, vocab_size)
        if len(stops) > self.engine.max_stop_tokens:
            raise ValueError(
                f"stop_token_ids must be at most max_stop_tokens={self.engine.max_stop_tokens}, "
                f"but they are {len(stops)}"
            )
        (asked,) = per_request(options, 1)
        arrays = self.engine.options_of(asked, len(token_ids))
        request_id = self._num_submitted
        seed = request_id if seed is None else inputs.integer("seed", seed, 0, 2**32)
        self._queue.append(
            _Request(request_id, token_ids, budget, checked_temperature, seed, stops, arrays)
        )
        self._num_submitted += 1
        return request_id

    def cancel(self, request_id: int) -> bool:
        """End a request, wherever it is; it gets no update any more.

        Returns:
          Whether it was still waiting or running.
        """
        for request in self._queue:
            if request.request_id == request_id:
                self._queue.remove(request)
                return True
        return self._vacate(request_id) is not None

    def preempt(self, request_id: int) -> bool:
        """Give a running request's slot up; it goes on later, first in the queue.

        Its tokens so far are kept and read again; the drafts at hand are dropped.

        Returns:
          Whether it was running.
        """
        request = self._vacate(request_id)
        if request is None:
            return False
        self._queue.appendleft(request)
        return True

    def step(self) -> list[RequestUpdate]:
        """Admit what fits, run one step, and tell what it did.

        Returns:
          One update for each running request; every one gets tokens, unless it fails.
        """
        for slot, request in enumerate(self._slots):
            if request is None and self._queue:
                self._admit(slot, self._queue[0])
                self._slots[slot] = self._queue.popleft()
        if self.num_running == 0:
            return []
        self.state, record = _step(self._params, self._draft_params, self.state, engine=self.engine)
        batch = self.state.batch
        record, done, status = jax.device_get((record, batch.done, batch.status))
        updates = []
        for slot, request in enumerate(self._slots):
            if request is None:
                continue
            new = record.token_ids[slot, : record.num_kept[slot]].tolist()
            request.token_ids += new
            request.max_new_tokens -= len(new)
            reason: FinishReason | None = None
            if done[slot]:
                stopped = bool(new) and new[-1] in request.stop_token_ids
                failed = status[slot] != Status.OK
                reason = "failed" if failed else "stop" if stopped else "length"
                self._slots[slot] = None
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
        return updates

    def stats(self) -> AcceptanceStats:
        """Acceptance of all verifications so far; waits for the device."""
        return AcceptanceStats.from_counters(self.state.counters)

    def _admit(self, slot: int, request: _Request) -> None:
        stops = np.full((self.engine.max_stop_tokens,), PLACEHOLDER_TOKEN_ID, np.int32)
        stops[: len(request.stop_token_ids)] = request.stop_token_ids
        self.state = _admit(
            self._params,
            self._draft_params,
            self.state,
            np.uint32(request.seed),
            dict(
                slot=np.int32(slot),
                prompt=self.engine.pad_prompt(request.token_ids),
                prompt_length=np.int32(len(request.token_ids)),
                max_new_tokens=np.int32(request.max_new_tokens),
                temperature=np.float32(request.temperature),
                stop_token_ids=stops,
                options=request.options,
            ),
            engine=self.engine,
        )

    def _release(self, slot: int) -> None:
        slots = np.arange(self.engine.num_slots) == slot
        self.state = _release(self.state, slots, engine=self.engine)

    def _vacate(self, request_id: int) -> _Request | None:
        for slot, request in enumerate(self._slots):
            if request is not None and request.request_id == request_id:
                self._release(slot)
                self._slots[slot] = None
                return request
        return None
