"""The host loop around an engine: a queue, slots, steps ahead, interrupts and failed calls."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import check_int
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.bookkeeping import (
    ChunkedPrefill,
    Failures,
    HostState,
    RequestUpdate,
    ServedRequest,
    StepResult,
)
from jax_specdec._src.serving.core import DecodeState, on_all_devices
from jax_specdec._src.serving.engine import Caches, Engine, NewRequests
from jax_specdec._src.serving.metrics import AcceptanceCounters, AcceptanceStats, ServingStats
from jax_specdec._src.serving.options import RequestFields, RequestOptions, options_per_request
from jax_specdec._src.types import described

_Device = tuple[DecodeState, StepResult | None]
"""A state, and the result of the step that led to it, until the host has that."""


class _Snapshot(NamedTuple):
    """Everything that device and host know at one moment."""

    device: _Device
    caches: Caches | None  # of the long prompt that is being read
    host: HostState


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _admit(
    params: Any, draft_params: Any, state: DecodeState, requests: NewRequests, *, engine: Engine
) -> _Device:
    return engine.admit(params, draft_params, state, requests), None


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("caches",))
def _prefill_chunk(
    params: Any, draft_params: Any, caches: Caches, chunk: Any, start: Any, *, engine: Engine
) -> Caches:
    return engine.prefill_chunk(params, draft_params, caches, chunk, start)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _insert(
    state: DecodeState, caches: Caches, requests: NewRequests, *, engine: Engine
) -> _Device:
    return engine.insert(state, caches, requests), None


@functools.partial(jax.jit, static_argnames=("engine", "all_neutral"), donate_argnames=("state",))
def _step(
    params: Any, draft_params: Any, state: DecodeState, *, engine: Engine, all_neutral: bool = False
) -> _Device:
    state, record = engine.step(params, draft_params, state, all_neutral=all_neutral)
    return state, StepResult.of(record, state.batch, state.counters)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _release(state: DecodeState, slots: Any, *, engine: Engine) -> _Device:
    return engine.release(state, slots), None


class EngineDriver:
    """Serves requests with an `Engine`: call `step` again and again, and `submit` at any time.

    Requests wait in a queue for a free slot, first come, first served; preempted ones go before
    all others. Not safe for several threads at once.

    **Steps ahead.** The device gets its next steps, up to `max_steps_ahead`, before the host reads
    the results of the last one, so that neither waits for the other. Tokens are the same for every
    number. A request that has ended keeps its slot for the steps that were dispatched by then.

    **Interrupts.** After a KeyboardInterrupt or any other exception, go on with `step`. Every token
    is delivered once, with the updates, finish reasons and `stats` of an uninterrupted run. A step
    that was dispatched is delivered by the next `step`. A step that was lost inside JAX, together
    with the state it was given, is done again; running requests are then read again as preempted
    ones are (see `preempt`). A `submit`, `cancel` or `preempt` that was cut short has happened
    completely or not at all.

    **Failures on the device**, such as too little memory, are not raised by `step`. What a failed
    call has destroyed is read again from what the host has, so no token is lost. Each request that
    was in the call gets an update with the `error`. A request ends, as "failed", when more than
    `max_retries` of its calls have failed in a row: without a new token, or a further chunk of a
    long prompt, in between. From its second failure on, its prompt is read alone, so that a prompt
    which cannot be read ends no other request.

    Attributes:
      engine: sizes and models.
      max_queue: the most requests that may wait; None for any number.
      max_steps_ahead: the most steps that are under way when `step` returns.
      max_prefills: the most calls that read prompts before a step while requests run; None for
        any number.
      max_retries: the most failed calls in a row after which a request goes on.

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
        self,
        engine: Engine,
        params: Any,
        draft_params: Any = None,
        *,
        max_queue: int | None = None,
        max_steps_ahead: int = 1,
        max_prefills: int | None = 1,
        max_retries: int = 5,
    ) -> None:
        """An idle driver.

        Args:
          engine: sizes and models.
          params: the target's weights.
          draft_params: the drafter's weights.
          max_queue: the most requests that may wait for their first slot; None for any number.
          max_steps_ahead: the most steps that are under way when `step` returns. 0 is for a host
            that decides, after each step, what the next one does.
          max_prefills: the most calls that read prompts before a step while requests run; each of
            them makes running requests wait. None for as many as free slots and prompts allow.
          max_retries: the most failed calls in a row after which a request goes on.

        Raises:
          TypeError: an argument has another type, or a model's weights are missing.
          ValueError: `max_queue` or `max_prefills` is below 1, or `max_steps_ahead` or
            `max_retries` below 0.
        """
        if not isinstance(engine, Engine):
            raise TypeError(f"engine must be an Engine, but it is {described(engine)}")
        inputs.check_params("params", params)
        inputs.check_draft_params(engine.drafter, draft_params)
        self.engine = engine
        self.max_queue = None if max_queue is None else check_int("max_queue", max_queue, 1)
        self.max_steps_ahead = check_int("max_steps_ahead", max_steps_ahead, 0)
        self.max_prefills = (
            None if max_prefills is None else check_int("max_prefills", max_prefills, 1)
        )
        self.max_retries = check_int("max_retries", max_retries, 0)
        self._params, self._draft_params = on_all_devices((params, draft_params), engine.model)
        counters = AcceptanceCounters.create(engine.config.num_speculative_tokens)
        stats = ServingStats(engine.num_slots)
        host = HostState((None,) * engine.num_slots, iter(()), counters, stats)
        # A list of one, so that one instruction replaces the whole snapshot.
        self._snapshot: list[_Snapshot] = [self._empty(host)]
        # True while the snapshot changes; `_finish_interrupted` then looks what was cut short.
        self._is_changing = self._is_in_jax = False
        # An interrupted call may leave a request both in a queue and in a slot; then it runs.
        self._preempted: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._waiting: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._num_submitted = 0

    @property
    def state(self) -> DecodeState:
        """The engine's state after the steps ahead; the next call donates it."""
        return self._snapshot[0].device[0]

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        self._finish_interrupted()
        return len(self._preempted) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot, including those that end in the steps ahead."""
        self._finish_interrupted()
        return len(self._host.running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and every update was delivered."""
        self._finish_interrupted()
        queued = self._preempted or self._waiting
        return not (queued or self._host.running or operator.length_hint(self._host.updates))

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything now: from here on, serving compiles nothing.

        With JAX's persistent compilation cache, a later start reads the programs from disk.

        Args:
          on_progress: called with the number of programs that are ready and the number of all,
            before the first and after each. The programs are `admit` for each of the engine's
            `admit_shapes`, `prefill_chunk` and `insert` where long prompts are read in chunks,
            `release`, and `step` (two, with `request_options`). None for no calls.

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
        engine = self.engine
        nowhere = engine.num_slots  # a slot that does not exist, so nothing has to be undone

        def request(size: int) -> ServedRequest:
            options = RequestOptions(seed=0)
            arrays = engine.options_of([options], [size])
            return ServedRequest(-1, [0] * size, size, options, 0, arrays, True)

        def admit(num_rows: int, size: int) -> None:
            self._admit({nowhere + row: request(size) for row in range(num_rows)})

        def step(all_neutral: bool) -> None:
            self._step(all_neutral)
            self._read_step()

        programs: list[Callable[[], None]] = [
            functools.partial(admit, *shape) for shape in engine.admit_shapes
        ]
        if engine.chunk_size < engine.max_length:
            longest = ChunkedPrefill(nowhere, request(engine.max_length))
            programs += [lambda: self._prefill_chunk(longest), lambda: self._insert(longest)]
        programs += [lambda: self._release(nowhere, self._host)]
        programs += [
            functools.partial(step, one) for one in sorted({False, engine.request_options})
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
          options: what the request asks for: a budget of at least 1, and at most as many stop
            tokens as the engine's `max_stop_tokens`. More than a temperature, a budget, stop
            tokens and a seed needs an engine with `request_options`.
          **fields: of `RequestOptions`, such as ``temperature=0.8``; they override `options`.

        Returns:
          The request's id: 0, 1, 2, ...

        Raises:
          TypeError: something is not an integer, not a number, or not a field of `RequestOptions`.
          ValueError: an empty prompt, an id outside the vocabulary, a prompt and budget longer
            than the engine's `max_length`, or a value out of range.
          RuntimeError: `max_queue` requests wait already; preempted ones do not count.
        """
        vocab_size, longest = self.engine.model.vocab_size, self.engine.max_length
        token_ids = inputs.token_list("prompt", prompt, vocab_size)
        (own,) = options_per_request(options, 1, fields)
        budget = check_int("max_new_tokens", own.max_new_tokens, 1)
        if len(token_ids) + budget > longest:
            raise ValueError(
                f"prompt and max_new_tokens must fit into max_length={longest} tokens, but they "
                f"are {len(token_ids)} and {budget}"
            )
        arrays = self.engine.options_of([own], [len(token_ids)])
        request_id = self._num_submitted
        if self.max_queue is not None:
            self._finish_interrupted()
            if len(self._waiting) >= self.max_queue:
                raise RuntimeError(
                    f"submit needs fewer than max_queue={self.max_queue} waiting requests, but "
                    f"{len(self._waiting)} wait"
                )
        request = ServedRequest(
            request_id,
            token_ids,
            prompt_length=len(token_ids),
            options=own,
            seed=request_id if own.seed is None else own.seed,
            option_arrays=arrays,
            is_neutral=own.is_neutral,
            submitted=time.perf_counter(),
        )
        self._num_submitted = request_id + 1  # first: no two requests may have one id
        self._waiting[request_id] = request
        return request_id

    def cancel(self, request_id: int) -> bool:
        """End a request, wherever it is; it gets no more updates.

        Takes the same time however many requests wait.

        Returns:
          Whether it was still waiting or running.
        """
        self._finish_interrupted()
        host = self._host.without_updates_of(request_id)
        undelivered = operator.length_hint(self._host.updates) - operator.length_hint(host.updates)
        running = host.find(request_id)
        if running is not None:
            self._release(running[0], host)
            return True
        waited = self._unqueue(request_id)
        self._set_host(host)
        return waited or undelivered > 0

    def preempt(self, request_id: int) -> bool:
        """Take a running request out of its slot and put it first in the queue.

        When it gets a slot again, its prompt and its tokens so far are read again, and it goes on
        as if it had never left; a sampled request has the same noise. So its tokens do not change,
        except where float32 sums nearly tie, or where the drafter had learned something that its
        `prefill` cannot rebuild: see `Engine.admit`.

        Waits for the steps ahead first, because the request's tokens are among their results.

        Returns:
          Whether it was running, and still was after the steps ahead.
        """
        self._finish_interrupted()
        if self._host.find(request_id) is None:
            return False
        while self._host.ahead:
            self._read_step()
        running = self._host.find(request_id)
        if running is None:
            return False
        slot, request = running
        self._is_changing = True
        self._queue_first([request])
        self._release(slot, self._host)
        return True

    def step(self) -> list[RequestUpdate]:
        """Admit what fits, dispatch steps, and return what the oldest step under way did.

        After an exception, call it again: it then delivers a step that was dispatched, or updates
        that were not returned.

        Returns:
          One update for each request that took part in the step and was not cancelled since. An
          update has tokens, unless it says why not. After a `preempt`, the updates of all steps
          that were under way.
        """
        self._finish_interrupted()
        num_wanted = self.max_steps_ahead + (not operator.length_hint(self._host.updates))
        while len(self._host.ahead) < num_wanted and self._dispatch_step():
            pass
        if self._host.ahead and not operator.length_hint(self._host.updates):
            self._read_step()
        # One instruction takes the updates, and the next returns them. Python handles interrupts
        # after calls, at jumps back and where functions begin, so not between these two.
        return [*self._snapshot[0].host.updates]

    def stats(self) -> AcceptanceStats:
        """Acceptance in the steps whose results were read."""
        self._finish_interrupted()
        return AcceptanceStats.from_counters(self._host.counters)

    def serving_stats(self) -> ServingStats:
        """How busy the engine was in the steps whose results were read."""
        self._finish_interrupted()
        return self._host.stats

    @property
    def _host(self) -> HostState:
        return self._snapshot[0].host

    def _set_host(self, host: HostState) -> None:
        """Replace what the host knows; it has the result of the last step."""
        (state, _), caches, _ = self._snapshot[0]
        self._snapshot[:] = [_Snapshot((state, None), caches, host)]

    # From the queue to the last token, in the order in which a request meets these.

    def _dispatch_step(self) -> bool:
        """Read prompts, and dispatch a step if any request needs one; whether it did."""
        if not (self._admit_queued() and self._host.needs_step):
            return False
        concerned = self._host.decoding
        try:
            self._step(self.engine.request_options and all(one.is_neutral for one in concerned))
        except _DEVICE_ERRORS as error:
            self._recover(error, concerned)
            return False
        return True

    def _admit_queued(self) -> bool:
        """Read prompts: at most `max_prefills` calls while requests run; False if one failed.

        Chunks of a long prompt and groups of shorter prompts take turns.
        """
        num_calls = 0
        while self.max_prefills is None or num_calls < self.max_prefills or not self._host.decoding:
            prefill = self._host.prefill
            group = {} if prefill is not None and not prefill.waits else self._next_group()
            if prefill is None and any(map(self._is_long, group.values())):
                ((slot, request),) = group.items()
                prefill, group = ChunkedPrefill(slot, request), {}
            concerned = [*group.values()] or ([] if prefill is None else [prefill.request])
            if not concerned:
                return True
            try:
                if group:
                    self._admit(group)
                elif prefill is not None:
                    self._prefill_on(prefill)
                if any(one.request_id in self._host.failures for one in concerned):
                    # Wait, or a failure would show in the next step and concern all.
                    jax.block_until_ready((self.state, self._snapshot[0].caches))
                    if not group:
                        self._set_host(self._host.after_chunk())
            except _DEVICE_ERRORS as error:
                self._recover(error, concerned, is_chunk=not group)
                return False
            num_calls += 1
        return True

    def _next_group(self) -> dict[int, ServedRequest]:
        """By free slot, the first request in the queue and others whose prompts have its size.

        Looks only at as many requests as there are free slots. Long prompts, and requests whose
        calls keep failing, are read alone; while a long prompt is read, no other long one is.
        """
        free = [slot for slot, request in enumerate(self._host.slots) if request is None]
        queue = itertools.chain(reversed(self._preempted.values()), self._waiting.values())
        group: list[ServedRequest] = []
        most = 1
        for request in itertools.islice(queue, len(free)):
            is_long = self._is_long(request)
            is_alone = (
                is_long or self._host.failures.get(request.request_id, Failures()).num_calls > 1
            )
            if is_long and self._host.prefill is not None:
                continue
            if not group:
                group, most = [request], 1 if is_alone else self._group_size(request)
            elif not is_alone and self._size(request) == self._size(group[0]):
                group.append(request)
            if len(group) == most:
                break
        return dict(zip(free, group, strict=False))

    def _size(self, request: ServedRequest) -> int:
        return self.engine.prompt_size(len(request.token_ids))

    def _group_size(self, request: ServedRequest) -> int:
        return self.engine.group_size(self._size(request))

    def _is_long(self, request: ServedRequest) -> bool:
        return len(request.token_ids) > self.engine.chunk_size

    def _admit(self, requests: Mapping[int, ServedRequest]) -> None:
        """Read the prompts of requests, which are of one size, by slot; they run then."""
        num_rows = self._group_size(next(iter(requests.values()))) if len(requests) > 1 else 1
        host = self._admitted(requests.values()).with_slots(requests)
        if host.prefill is not None:
            host = dataclasses.replace(host, prefill=host.prefill._replace(waits=False))
        new = self._new_requests(requests, num_rows)
        self._call(_admit, host, self._params, self._draft_params, self.state, new)

    def _prefill_on(self, prefill: ChunkedPrefill) -> None:
        """Read the next chunk of a long prompt; after the last one, its request runs."""
        size, length = self.engine.chunk_size, len(prefill.request.token_ids)
        if prefill.num_chunks * size < length:
            self._prefill_chunk(prefill)
            prefill = prefill._replace(num_chunks=prefill.num_chunks + 1)
        if prefill.num_chunks * size >= length:
            self._insert(prefill)

    def _prefill_chunk(self, prefill: ChunkedPrefill) -> None:
        slot, request, num_chunks, _ = prefill
        size, prompt = self.engine.chunk_size, self.engine.pad_prompt(request.token_ids)
        start = min(num_chunks * size, len(prompt) - size)  # the last chunk ends where that ends
        host = self._admitted([request]).with_slots({slot: request})
        host = dataclasses.replace(
            host, prefill=ChunkedPrefill(slot, request, num_chunks + 1, True)
        )
        chunk, caches = prompt[start : start + size], self._snapshot[0].caches
        weights = self._params, self._draft_params
        self._call(_prefill_chunk, host, *weights, caches, chunk, np.int32(start))

    def _insert(self, prefill: ChunkedPrefill) -> None:
        host = dataclasses.replace(self._host, prefill=None)
        new = self._new_requests({prefill.slot: prefill.request}, 1)
        self._call(_insert, host, self.state, self._snapshot[0].caches, new)

    def _new_requests(self, requests: Mapping[int, ServedRequest], num_rows: int) -> NewRequests:
        """Requests by slot as arrays; the first one is repeated until there are `num_rows`."""
        rows = [*requests.items()]
        rows += rows[:1] * (num_rows - len(rows))
        arrays: dict[str, Any] = dict(
            slots=np.array([slot for slot, _ in rows], np.int32),
            prompts=np.stack([self.engine.pad_prompt(one.token_ids) for _, one in rows]),
            lengths=np.array([len(one.token_ids) for _, one in rows], np.int32),
            keys=np.array([one.seed for _, one in rows], np.uint32),
        )
        options = [one.option_arrays for _, one in rows]
        return NewRequests(**arrays, options=jax.tree.map(lambda *x: np.concatenate(x), *options))

    def _admitted(self, requests: Iterable[ServedRequest]) -> HostState:
        """The host's state, with the time that requests had waited for their first slot."""
        now, host = time.perf_counter(), self._host
        waited = [now - one.submitted for one in requests if one.request_id in self._waiting]
        return dataclasses.replace(host, stats=host.stats.after_admission(waited))

    def _step(self, all_neutral: bool) -> None:
        """Dispatch a step; an engine with `request_options` has two programs for it."""
        weights = self._params, self._draft_params
        self._call(_step, self._host, *weights, self.state, all_neutral=all_neutral)

    def _read_step(self) -> None:
        """Read the result of the oldest step ahead."""
        try:
            self._set_host(self._host.after_step())
        except _DEVICE_ERRORS as error:
            self._recover(error, self._host.decoding)

    def _release(self, slot: int, host: HostState) -> None:
        slots = np.arange(self.engine.num_slots) == slot
        self._call(_release, host.with_slots({slot: None}), self.state, slots)

    def _queue_first(self, requests: Sequence[ServedRequest]) -> None:
        """Put requests before all others in the queue, in this order."""
        for request in reversed(requests):
            self._preempted[request.request_id] = request

    def _unqueue(self, request_id: int) -> bool:
        """Take a request out of the queue; whether it was there."""
        return any([queue.pop(request_id, None) for queue in (self._preempted, self._waiting)])

    # Interrupts and failed calls

    def _call(
        self, function: Callable[..., Any], host: HostState, *args: Any, **static: bool
    ) -> None:
        """Call a compiled function; what it returns, and `host`, are the new snapshot.

        Python handles interrupts between instructions. One instruction here makes the call and
        keeps what comes back, so a donated state is never without its successor, nor a step
        without its result.
        """
        device, caches, _ = self._snapshot[0]
        call = functools.partial(function, engine=self.engine, **static)
        returned: Any = itertools.starmap(call, [args])
        parts = [[device], returned] if function is _prefill_chunk else [returned, [caches]]
        new_snapshot = functools.partial(tuple.__new__, _Snapshot)  # not a function in Python
        snapshots: Any = map(new_snapshot, zip(*parts, [host], strict=True))
        self._is_changing = self._is_in_jax = True
        self._snapshot[:] = snapshots
        self._is_in_jax = False
        self._finish_interrupted()

    def _finish_interrupted(self) -> None:
        """Finish what an exception cut short; this may be cut short, and called again."""
        if not self._is_changing:
            return
        (state, result), caches, host = self._snapshot[0]
        if result is not None:
            host = host.with_step(result)
            self._set_host(host)
        for request in host.running:
            self._unqueue(request.request_id)
        for update in copy.copy(host.updates):
            if update.finish_reason is not None:
                self._unqueue(update.request_id)
        if self._is_in_jax and any(x.is_deleted() for x in jax.tree.leaves((state, caches))):
            self._start_again(host, host.running)  # they were donated to a call that failed
        self._is_changing = self._is_in_jax = False

    def _start_again(self, host: HostState, requests: Sequence[ServedRequest]) -> None:
        """Empty all slots and put `requests`, which were in them, first in the queue.

        What the steps ahead computed was not delivered, and is computed again.
        """
        self._queue_first(requests)
        slots = (None,) * self.engine.num_slots
        self._snapshot[:] = [
            self._empty(dataclasses.replace(host, slots=slots, ahead=(), prefill=None))
        ]

    def _empty(self, host: HostState) -> _Snapshot:
        """A snapshot with nothing in the slots, as `host` says."""
        engine = self.engine
        state = engine.init_state(self._draft_params)
        counters = jax.tree.map(jnp.copy, host.counters)  # those of the state are donated
        state = dataclasses.replace(state, counters=counters)
        state = on_all_devices(state, engine.model)
        return _Snapshot((state, None), self._empty_caches(), host)

    def _empty_caches(self) -> Caches | None:
        if self.engine.chunk_size == self.engine.max_length:
            return None
        caches: Caches = on_all_devices(self.engine.init_caches(), self.engine.model)
        return caches

    def _recover(
        self, error: Exception, concerned: Iterable[ServedRequest], *, is_chunk: bool = False
    ) -> None:
        """Go on after a call that failed on the device.

        Raises:
          Exception: `error`, if it is not the device's.
        """
        if not _is_of_device(error):
            raise error
        self._is_changing = True
        ids = [request.request_id for request in concerned]
        host, ended = self._host.after_failure(str(error), ids, self.max_retries)
        if not is_chunk or _is_lost(self.state):
            self._start_again(host, [one for one in host.running if one.request_id not in ended])
        else:  # no slot is lost, only the caches of a long prompt
            if host.prefill is not None:
                if host.prefill.request.request_id not in ended:
                    self._queue_first([host.prefill.request])
                host = host.with_slots({host.prefill.slot: None})
            device = self._snapshot[0].device
            self._snapshot[:] = [_Snapshot(device, self._empty_caches(), host)]
        self._finish_interrupted()


_DEVICE_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""What a call raises that fails on the device: a ValueError if its argument is of a failed call."""


def _is_of_device(error: Exception) -> bool:
    """Whether the device failed, rather than what is traced."""
    is_status = re.match("[A-Z_]+: ", str(error))  # such as "RESOURCE_EXHAUSTED: "
    return isinstance(error, jax.errors.JaxRuntimeError) or is_status is not None


def _is_lost(arrays: Any) -> bool:
    """Whether arrays were donated to a call that failed, or are the results of one."""
    leaves = jax.tree.leaves(arrays)
    if any(x.is_deleted() for x in leaves):
        return True
    try:
        jax.block_until_ready(leaves)
    except _DEVICE_ERRORS:
        return True
    return False
