"""The host side of continuous batching: a queue, slots, and what became of each request."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import check_int
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.bookkeeping import Host, Report, RequestUpdate, ServedRequest
from jax_specdec._src.serving.core import DecodeState
from jax_specdec._src.serving.engine import Engine
from jax_specdec._src.serving.metrics import AcceptanceCounters, AcceptanceStats
from jax_specdec._src.serving.options import RequestFields, RequestOptions, one_each
from jax_specdec._src.serving.placement import on_all_devices
from jax_specdec._src.types import described

_Device = tuple[DecodeState, Report | None]
"""A state, and what the step that led to it reports, until the host has read that."""


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _admit(
    params: Any,
    draft_params: Any,
    state: DecodeState,
    seed: np.uint32,
    request: dict[str, Any],
    *,
    engine: Engine,
) -> _Device:
    return engine.admit(params, draft_params, state, key=jax.random.key(seed), **request), None


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _step(params: Any, draft_params: Any, state: DecodeState, *, engine: Engine) -> _Device:
    state, record = engine.step(params, draft_params, state)
    batch = state.batch
    return state, Report(record, batch.lengths, batch.done, batch.status, state.counters)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _release(state: DecodeState, slots: Any, *, engine: Engine) -> _Device:
    return engine.release(state, slots), None


class EngineDriver:
    """Serves requests with an `Engine`: call `step` again and again, and `submit` at any time.

    Requests wait in a queue for a free slot, first come, first served; preempted ones go before
    them. Not safe for several threads at once.

    **Interrupts.** Whatever a KeyboardInterrupt, or another exception, cuts short, go on with
    `step`: every token is delivered once, with the updates, the finish reasons and the `stats` of
    an uninterrupted run. A step that was dispatched is delivered by the next `step`. One that was
    lost inside JAX, together with the state it was given, is done again: running requests are then
    read again as preempted ones are (`preempt` says what that means). A `submit`, `cancel` or
    `preempt` that was cut short has happened wholly or not at all.

    Attributes:
      engine: sizes and models.
      max_queue: the most requests that may wait; None for any number.

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

    def __init__(
        self, engine: Engine, params: Any, draft_params: Any = None, *, max_queue: int | None = None
    ) -> None:
        """An idle driver.

        Args:
          engine: sizes and models.
          params: the target's weights.
          draft_params: the drafter's weights.
          max_queue: the most requests that may wait for their first slot; None for any number.

        Raises:
          TypeError: an argument of another type, or a model's weights missing.
          ValueError: `max_queue` is below 1.
        """
        if not isinstance(engine, Engine):
            raise TypeError(f"engine must be an Engine, but it is {described(engine)}")
        inputs.weights("params", params)
        inputs.draft_weights(engine.drafter, draft_params)
        self.engine = engine
        self.max_queue = None if max_queue is None else check_int("max_queue", max_queue, 1)
        self._params, self._draft_params = on_all_devices((params, draft_params), engine.model)
        counters = AcceptanceCounters.create(engine.config.num_speculative_tokens)
        host = Host((None,) * engine.num_slots, iter(()), counters)
        state = self._empty_state(counters)
        # What device and host know, as one thing that is replaced as a whole.
        self._now: list[tuple[_Device, Host]] = [((state, None), host)]
        # An interrupted call may leave a request both here and in a slot: then it runs.
        self._preempted: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._waiting: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._num_submitted = 0

    @property
    def state(self) -> DecodeState:
        """The engine's state; the next call donates it."""
        return self._now[0][0][0]

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        self._settle()
        return len(self._preempted) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        self._settle()
        return len(self._host.running)

    @property
    def is_idle(self) -> bool:
        """True where nothing waits, nothing runs, and no update is undelivered."""
        self._settle()
        queued = self._preempted or self._waiting
        return not (queued or self._host.running or operator.length_hint(self._host.updates))

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything now: from here on, serving compiles nothing.

        With JAX's persistent compilation cache, a later start reads the programs from disk.

        Args:
          on_progress: called with how many programs are ready and how many there are, before the
            first and after each: `admit` for each of the engine's `prompt_sizes`, `release` and
            `step`. None: nobody wants to know.

        Raises:
          TypeError: `on_progress` cannot be called.
          RuntimeError: a request is running.

        Example:
          >>> import jax_specdec as sd
          >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
          >>> engine = sd.Engine(
          ...     model, sd.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
          ...     num_slots=2, max_length=32)
          >>> driver = sd.EngineDriver(engine, params)
          >>> driver.warm_up(lambda done, total: print(f"{done} of {total}"))
          0 of 3
          1 of 3
          2 of 3
          3 of 3
        """
        if on_progress is not None and not callable(on_progress):
            raise TypeError(f"on_progress must be a function, but it is {on_progress!r:.80}")
        if self.num_running:
            raise RuntimeError(
                f"warm_up must come while no request runs, but {self.num_running} do"
            )
        nowhere = self.engine.num_slots  # a slot that is not there: nothing needs to be undone

        def admit(size: int) -> None:
            options = RequestOptions(seed=0)
            arrays = self.engine.options_of(options, size)
            self._admit(nowhere, ServedRequest(-1, [0] * size, size, options, 0, arrays))

        programs: list[Callable[[], None]] = [
            *(functools.partial(admit, size) for size in self.engine.prompt_sizes),
            lambda: self._release(nowhere, self._host),
            self._step,
        ]
        for done, compile_ in enumerate([*programs, None]):
            if on_progress is not None:
                on_progress(done, len(programs))
            if compile_ is not None:
                compile_()

    def submit(
        self,
        prompt: Sequence[int],
        options: RequestOptions | None = None,
        **fields: Unpack[RequestFields],
    ) -> int:
        """Queue a request; nothing is computed yet. A refused request changes nothing.

        Args:
          prompt: token ids, at least one.
          options: what is asked for: a budget of at least 1, at most the engine's
            `max_stop_tokens` stop tokens, and what is not neutral needs its `request_options`.
          **fields: of `RequestOptions`, such as ``temperature=0.8``; they go before `options`.

        Returns:
          The request's id: 0, 1, 2, ...

        Raises:
          TypeError: something is no integer, or no number, or no field of `RequestOptions`.
          ValueError: an empty prompt, an id outside the vocabulary, a prompt and budget longer
            than the engine's `max_length`, a value out of range.
          RuntimeError: `max_queue` requests wait; preempted ones do not count.
        """
        vocab_size, longest = self.engine.model.vocab_size, self.engine.max_length
        token_ids = inputs.token_list("prompt", prompt, vocab_size)
        (asked,) = one_each(options, 1, fields)
        budget = check_int("max_new_tokens", asked.max_new_tokens, 1)
        if len(token_ids) + budget > longest:
            raise ValueError(
                f"prompt and max_new_tokens must fit into max_length={longest} tokens, but they "
                f"are {len(token_ids)} and {budget}"
            )
        arrays = self.engine.options_of(asked, len(token_ids))
        request_id = self._num_submitted
        if self.max_queue is not None:
            self._settle()
            if len(self._waiting) >= self.max_queue:
                raise RuntimeError(
                    f"submit needs fewer than max_queue={self.max_queue} waiting requests, but "
                    f"{len(self._waiting)} wait"
                )
        seed = request_id if asked.seed is None else asked.seed
        request = ServedRequest(request_id, token_ids, len(token_ids), asked, seed, arrays)
        self._num_submitted = request_id + 1  # first: no two requests may have one id
        self._waiting[request_id] = request
        return request_id

    def cancel(self, request_id: int) -> bool:
        """End a request, wherever it is; it gets no update any more.

        Takes as long however many requests wait.

        Returns:
          Whether it was still waiting or running.
        """
        self._settle()
        host = self._host.without_updates_of(request_id)
        undelivered = operator.length_hint(self._host.updates) - operator.length_hint(host.updates)
        running = host.find(request_id)
        if running is not None:
            self._release(running[0], host)
            return True
        waited = self._unqueue(request_id)
        self._now[:] = [((self.state, None), host)]
        return waited or undelivered > 0

    def preempt(self, request_id: int) -> bool:
        """Give a running request's slot up; it goes on later, first in the queue.

        It then reads its tokens so far again and goes on as if it had never left, a sampled request
        with the same noise. So its tokens do not change, but for ties of float32 sums and for what
        a drafter has learned that its `prefill` cannot rebuild: see `Engine.admit`.

        Returns:
          Whether it was running.
        """
        self._settle()
        running = self._host.find(request_id)
        if running is None:
            return False
        slot, request = running
        self._queue_first([request])
        self._release(slot, self._host)
        return True

    def step(self) -> list[RequestUpdate]:
        """Admit what fits, run one step, and return what it did.

        Call it again after an exception: a step that was dispatched, or whose updates nobody got,
        is what it then delivers.

        Returns:
          One update for each running request; every one gets tokens, unless it fails.
        """
        self._settle()
        if not operator.length_hint(self._host.updates):
            self._admit_queued()
            if self._host.running:
                self._step()
                self._settle()
        # One instruction takes the updates, and the next returns them. Python handles interrupts
        # after calls, at jumps back and where functions begin, so not between these two.
        return [*self._now[0][1].updates]

    def stats(self) -> AcceptanceStats:
        """Acceptance of all verifications so far; waits for the device."""
        self._settle()
        return AcceptanceStats.from_counters(self._host.counters)

    @property
    def _host(self) -> Host:
        return self._now[0][1]

    def _empty_state(self, counters: AcceptanceCounters) -> DecodeState:
        state = self.engine.init_state(self._draft_params)
        copied = jax.tree.map(jnp.copy, counters)  # those of the state are donated
        return on_all_devices(dataclasses.replace(state, counters=copied), self.engine.model)

    def _settle(self) -> None:
        """Finish what an exception cut short; all of it may be cut short again."""
        (state, report), host = self._now[0]
        if report is not None:
            host = host.after(report)
            self._now[:] = [((state, None), host)]
        for request in host.running:
            self._unqueue(request.request_id)
        if any(x.is_deleted() for x in jax.tree.leaves(state)):  # donated to a call that failed
            self._queue_first(host.running)
            host = dataclasses.replace(host, slots=(None,) * self.engine.num_slots)
            self._now[:] = [((self._empty_state(host.counters), None), host)]

    def _dispatch(self, function: Callable[..., _Device], host: Host, *args: Any) -> None:
        """Call a compiled function, and replace with what it returns, and `host`, what is known.

        Python handles interrupts between instructions. The last one here both calls and keeps what
        comes back, so a donated state is never without its successor, nor a step without its
        report.
        """
        call = functools.partial(function, engine=self.engine)
        results = zip(itertools.starmap(call, [args]), [host], strict=True)
        self._now[:] = results

    def _admit_queued(self) -> None:
        for slot, running in enumerate(self._host.slots):
            if running is None:
                queued = itertools.chain(reversed(self._preempted.values()), self._waiting.values())
                request = next(queued, None)
                if request is None:
                    return
                self._admit(slot, request)
                self._unqueue(request.request_id)

    def _admit(self, slot: int, request: ServedRequest) -> None:
        arguments = dict(
            slot=np.int32(slot),
            prompt=self.engine.pad_prompt(request.token_ids),
            length=np.int32(len(request.token_ids)),
            options=request.arrays,
        )
        host = self._host.with_slot(slot, request)
        seed = np.uint32(request.seed)
        self._dispatch(_admit, host, self._params, self._draft_params, self.state, seed, arguments)

    def _step(self) -> None:
        self._dispatch(_step, self._host, self._params, self._draft_params, self.state)

    def _release(self, slot: int, host: Host) -> None:
        slots = np.arange(self.engine.num_slots) == slot
        self._dispatch(_release, host.with_slot(slot, None), self.state, slots)

    def _queue_first(self, requests: Sequence[ServedRequest]) -> None:
        """Put requests before all others in the queue, in this order."""
        for request in reversed(requests):
            self._preempted[request.request_id] = request

    def _unqueue(self, request_id: int) -> bool:
        """Take a request out of the queue; says whether it was there."""
        return any([queue.pop(request_id, None) for queue in (self._preempted, self._waiting)])
