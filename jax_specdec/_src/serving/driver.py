"""The host side of continuous batching: a queue, slots, and what became of each request."""

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
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import check_int
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.bookkeeping import (
    Host,
    Reading,
    Report,
    RequestUpdate,
    ServedRequest,
)
from jax_specdec._src.serving.core import DecodeState
from jax_specdec._src.serving.engine import Caches, Engine
from jax_specdec._src.serving.metrics import AcceptanceCounters, AcceptanceStats, ServingStats
from jax_specdec._src.serving.options import RequestFields, RequestOptions, one_each
from jax_specdec._src.serving.placement import on_all_devices
from jax_specdec._src.types import described

_Device = tuple[DecodeState, Report | None]
"""A state, and what the step that led to it reports, until the host has taken that."""

_MAYBE_OF_DEVICE = (jax.errors.JaxRuntimeError, ValueError)
"""What calls raise that fail on the device: a ValueError where an argument has failed before."""


def _is_of_device(error: Exception) -> bool:
    """Whether it is the device's, rather than of what is traced."""
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(
        re.match("[A-Z_]+: ", str(error))  # the name of XLA's status
    )


def _requests(seeds: Any, **arrays: Any) -> dict[str, Any]:
    return dict(keys=jax.vmap(jax.random.key)(seeds), **arrays)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _admit(
    params: Any, draft_params: Any, state: DecodeState, requests: dict[str, Any], *, engine: Engine
) -> _Device:
    return engine.admit(params, draft_params, state, **_requests(**requests)), None


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("caches",))
def _read(
    params: Any, draft_params: Any, caches: Caches, piece: Any, start: Any, *, engine: Engine
) -> Caches:
    return engine.read(params, draft_params, caches, piece, start)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _insert(
    state: DecodeState, caches: Caches, requests: dict[str, Any], *, engine: Engine
) -> _Device:
    return engine.insert(state, caches, **_requests(**requests)), None


@functools.partial(jax.jit, static_argnames=("engine", "all_neutral"), donate_argnames=("state",))
def _step(
    params: Any, draft_params: Any, state: DecodeState, *, engine: Engine, all_neutral: bool = False
) -> _Device:
    state, record = engine.step(params, draft_params, state, all_neutral=all_neutral)
    return state, Report.of(record, state.batch, state.counters)


@functools.partial(jax.jit, static_argnames=("engine",), donate_argnames=("state",))
def _release(state: DecodeState, slots: Any, *, engine: Engine) -> _Device:
    return engine.release(state, slots), None


class EngineDriver:
    """Serves requests with an `Engine`: call `step` again and again, and `submit` at any time.

    Requests wait in a queue for a free slot, first come, first served; preempted ones go before
    them. Not safe for several threads at once.

    **Steps ahead.** With `max_steps_ahead`, the device has its next step before the host reads the
    last one's results, so neither waits for the other. A request's tokens are the same with every
    number. One that has ended keeps its slot, idle, for the steps that were dispatched by then.

    **Interrupts.** Whatever a KeyboardInterrupt, or another exception, cuts short, go on with
    `step`: every token is delivered once, with the updates, the finish reasons and the `stats` of
    an uninterrupted run. A step that was dispatched is delivered by the next `step`. One that was
    lost inside JAX, together with the state it was given, is done again: running requests are then
    read again as preempted ones are (`preempt` says what that means). A `submit`, `cancel` or
    `preempt` that was cut short has happened wholly or not at all.

    **Failures on the device**, such as too little memory, do not leave `step`. All requests are
    read again from what the host has. Those that were in the call that failed get an update with
    its `error`; if another call fails with such a request before it has got a token, it ends, as
    "failed". So that a prompt which cannot be read harms no other, they are read one by one then.

    Attributes:
      engine: sizes and models.
      max_queue: the most requests that may wait; None for any number.
      max_steps_ahead: the most steps that are under way when `step` returns.
      max_prefills: the most calls that read prompts before a step while requests run; None for
        any number.

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
    ) -> None:
        """An idle driver.

        Args:
          engine: sizes and models.
          params: the target's weights.
          draft_params: the drafter's weights.
          max_queue: the most requests that may wait for their first slot; None for any number.
          max_steps_ahead: the most steps that are under way when `step` returns. 0 is for a host
            that decides, after each step, what the next one does.
          max_prefills: the most calls that read prompts before a step while requests run: each
            makes them wait. None for as many as there is something to read for.

        Raises:
          TypeError: an argument of another type, or a model's weights missing.
          ValueError: `max_queue` or `max_prefills` is below 1, `max_steps_ahead` below 0.
        """
        if not isinstance(engine, Engine):
            raise TypeError(f"engine must be an Engine, but it is {described(engine)}")
        inputs.weights("params", params)
        inputs.draft_weights(engine.drafter, draft_params)
        self.engine = engine
        self.max_queue = None if max_queue is None else check_int("max_queue", max_queue, 1)
        self.max_steps_ahead = check_int("max_steps_ahead", max_steps_ahead, 0)
        self.max_prefills = (
            None if max_prefills is None else check_int("max_prefills", max_prefills, 1)
        )
        self._params, self._draft_params = on_all_devices((params, draft_params), engine.model)
        counters = AcceptanceCounters.create(engine.config.num_speculative_tokens)
        host = Host((None,) * engine.num_slots, iter(()), counters, ServingStats(engine.num_slots))
        # What device and host know, as one thing that is replaced as a whole.
        self._now: list[tuple[_Device, Caches | None, Host]] = [(*self._empty(counters), host)]
        # Set while they change: `_settle` then looks what an exception has cut short.
        self._is_changing = self._is_in_jax = False
        # An interrupted call may leave a request both here and in a slot: then it runs.
        self._preempted: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._waiting: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._num_submitted = 0

    @property
    def state(self) -> DecodeState:
        """The engine's state, after the steps ahead; the next call donates it."""
        return self._now[0][0][0]

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        self._settle()
        return len(self._preempted) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot, those that end in the steps ahead included."""
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
            first and after each: `admit` for each of the engine's `admit_shapes`, `read` and
            `insert` where long prompts are read in pieces, `release`, and `step`, twice with
            `request_options`. None: nobody wants to know.

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
        nowhere = engine.num_slots  # a slot that is not there: nothing needs to be undone

        def request(size: int) -> ServedRequest:
            options = RequestOptions(seed=0)
            arrays = engine.options_of([options], [size])
            return ServedRequest(-1, [0] * size, size, options, 0, arrays, True)

        def admit(num_rows: int, size: int) -> None:
            self._admit({nowhere + row: request(size) for row in range(num_rows)})

        def step(all_neutral: bool) -> None:
            self._step(all_neutral)
            self._take_step()

        programs: list[Callable[[], None]] = [
            functools.partial(admit, *shape) for shape in engine.admit_shapes
        ]
        if engine.piece_size < engine.max_length:
            longest = Reading(nowhere, request(engine.max_length))
            programs += [lambda: self._read(longest), lambda: self._insert(longest)]
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
        arrays = self.engine.options_of([asked], [len(token_ids)])
        request_id = self._num_submitted
        if self.max_queue is not None:
            self._settle()
            if len(self._waiting) >= self.max_queue:
                raise RuntimeError(
                    f"submit needs fewer than max_queue={self.max_queue} waiting requests, but "
                    f"{len(self._waiting)} wait"
                )
        seed = request_id if asked.seed is None else asked.seed
        request = ServedRequest(
            request_id,
            token_ids,
            len(token_ids),
            asked,
            seed,
            arrays,
            asked.is_neutral,
            time.perf_counter(),
        )
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
        self._know(host)
        return waited or undelivered > 0

    def preempt(self, request_id: int) -> bool:
        """Give a running request's slot up; it goes on later, first in the queue.

        It then reads its tokens so far again and goes on as if it had never left, a sampled request
        with the same noise. So its tokens do not change, but for ties of float32 sums and for what
        a drafter has learned that its `prefill` cannot rebuild: see `Engine.admit`.

        The steps ahead are waited for first: its tokens are among them.

        Returns:
          Whether it was running, and still is after the steps ahead.
        """
        self._settle()
        if self._host.find(request_id) is None:
            return False
        while self._host.ahead:
            self._take_step()
        running = self._host.find(request_id)
        if running is None:
            return False
        slot, request = running
        self._is_changing = True
        self._queue_first([request])
        self._release(slot, self._host)
        return True

    def step(self) -> list[RequestUpdate]:
        """Admit what fits, dispatch a step, and return what the oldest of those under way did.

        Call it again after an exception: a step that was dispatched, or whose updates nobody got,
        is what it then delivers.

        Returns:
          One update for each request that took part and is still wanted. It has tokens, unless it
          says why not. After a `preempt`, those of all steps that were under way.
        """
        self._settle()
        num_wanted = self.max_steps_ahead + (not operator.length_hint(self._host.updates))
        while len(self._host.ahead) < num_wanted and self._dispatch_step():
            pass
        if self._host.ahead and not operator.length_hint(self._host.updates):
            self._take_step()
        # One instruction takes the updates, and the next returns them. Python handles interrupts
        # after calls, at jumps back and where functions begin, so not between these two.
        return [*self._now[0][2].updates]

    def stats(self) -> AcceptanceStats:
        """Acceptance of all verifications of the steps that were read."""
        self._settle()
        return AcceptanceStats.from_counters(self._host.counters)

    def serving_stats(self) -> ServingStats:
        """How busy the engine was, in the steps that were read."""
        self._settle()
        return self._host.stats

    @property
    def _host(self) -> Host:
        return self._now[0][2]

    def _know(self, host: Host) -> None:
        """Replace what the host knows."""
        (state, _), caches, _ = self._now[0]
        self._now[:] = [((state, None), caches, host)]

    def _empty(self, counters: AcceptanceCounters) -> tuple[_Device, Caches | None]:
        """A state of empty slots, and caches for a long prompt."""
        engine = self.engine
        state = engine.init_state(self._draft_params)
        copied = jax.tree.map(jnp.copy, counters)  # those of the state are donated
        state = dataclasses.replace(state, counters=copied)
        caches = engine.init_caches() if engine.piece_size < engine.max_length else None
        state, caches = on_all_devices((state, caches), engine.model)
        return (state, None), caches

    def _settle(self) -> None:
        """Finish what an exception cut short; all of it may be cut short again."""
        if not self._is_changing:
            return
        (state, report), caches, host = self._now[0]
        if report is not None:
            host = host.with_step(report)
            self._know(host)
        for request in host.running:
            self._unqueue(request.request_id)
        for update in copy.copy(host.updates):
            if update.finish_reason is not None:
                self._unqueue(update.request_id)
        if self._is_in_jax and any(x.is_deleted() for x in jax.tree.leaves((state, caches))):
            self._start_again(host, host.running)  # they were donated to a call that failed
        self._is_changing = self._is_in_jax = False

    def _start_again(self, host: Host, requests: Sequence[ServedRequest]) -> None:
        """Empty all slots; some requests are read again, before all others, from what `host` has.

        What was computed ahead is computed again: nobody has got it.
        """
        self._queue_first(requests)
        slots = (None,) * self.engine.num_slots
        host = dataclasses.replace(host, slots=slots, ahead=(), reading=None)
        self._now[:] = [(*self._empty(host.counters), host)]

    def _recover(self, error: Exception, concerned: Iterable[ServedRequest]) -> None:
        """After a call that failed on the device: see the class.

        Raises:
          Exception: `error`, where it is of something else.
        """
        if not _is_of_device(error):
            raise error
        self._is_changing = True
        host, ids = self._host, {request.request_id: request for request in concerned}
        ended = ids.keys() & host.suspects
        updates = [
            RequestUpdate(i, [], "failed" if i in ended else None, error=str(error)) for i in ids
        ]
        host = dataclasses.replace(
            host,
            updates=iter([*copy.copy(host.updates), *updates]),
            suspects=(host.suspects | ids.keys()) - ended,
            stats=dataclasses.replace(host.stats, num_failed_calls=host.stats.num_failed_calls + 1),
        )
        self._start_again(host, [one for one in host.running if one.request_id not in ended])
        self._settle()

    def _dispatch(
        self, function: Callable[..., Any], host: Host, *args: Any, **static: bool
    ) -> None:
        """Call a compiled function, and replace with what it returns, and `host`, what is known.

        Python handles interrupts between instructions. The last but one here both calls and keeps
        what comes back, so a donated state is never without its successor, nor a step without its
        report.
        """
        device, caches, _ = self._now[0]
        call = functools.partial(function, engine=self.engine, **static)
        returned: Any = itertools.starmap(call, [args])
        results: Any = (
            zip([device], returned, [host], strict=True)
            if function is _read
            else zip(returned, [caches], [host], strict=True)
        )
        self._is_changing = self._is_in_jax = True
        self._now[:] = results
        self._is_in_jax = False

    def _dispatch_step(self) -> bool:
        """Read prompts, and dispatch a step if anybody needs one; says whether."""
        if not (self._admit_queued() and self._host.may_go_on):
            return False
        try:
            self._step(
                self.engine.request_options and all(one.is_neutral for one in self._decoding)
            )
        except _MAYBE_OF_DEVICE as error:
            self._recover(error, self._decoding)
            return False
        return True

    def _take_step(self) -> None:
        """Read the report of the oldest step ahead."""
        try:
            self._know(self._host.after())
        except _MAYBE_OF_DEVICE as error:
            self._recover(error, self._decoding)

    @property
    def _decoding(self) -> list[ServedRequest]:
        return [request for request in self._host.decoding if request is not None]

    def _admit_queued(self) -> bool:
        """Read prompts: at most `max_prefills` calls while requests run; False if one failed.

        A long prompt's pieces and groups of shorter prompts take turns.
        """
        num_calls = 0
        while self.max_prefills is None or num_calls < self.max_prefills or not self._decoding:
            reading = self._host.reading
            group = {} if reading is not None and not reading.waits else self._next_group()
            if reading is None and any(map(self._is_long, group.values())):
                ((slot, request),) = group.items()
                reading, group = Reading(slot, request), {}
            concerned = [*group.values()] or ([] if reading is None else [reading.request])
            if not concerned:
                return True
            try:
                if group:
                    self._admit(group)
                elif reading is not None:
                    self._read_on(reading)
                if not self._host.suspects.isdisjoint(one.request_id for one in concerned):
                    jax.block_until_ready((self.state.batch.lengths, self._now[0][1]))
            except _MAYBE_OF_DEVICE as error:
                self._recover(error, concerned)
                return False
            num_calls += 1
        return True

    def _next_group(self) -> dict[int, ServedRequest]:
        """Slots for the first in the queue, and for those after it whose prompts have its size.

        Only those are looked at for whom there are slots; while a long prompt is read, no other.
        """
        free = [slot for slot, request in enumerate(self._host.slots) if request is None]
        if not free:
            return {}
        queue = itertools.chain(reversed(self._preempted.values()), self._waiting.values())
        found: list[ServedRequest] = []
        most = 1
        for request in itertools.islice(queue, len(free)):
            is_suspect = request.request_id in self._host.suspects
            if self._is_long(request) and self._host.reading is not None:
                continue
            if found and (is_suspect or self._size(request) != self._size(found[0])):
                continue
            found.append(request)
            if len(found) == 1 and not (is_suspect or self._is_long(request)):
                most = self.engine.num_rows(self._size(request))
            if len(found) == most:
                break
        return dict(zip(free, found, strict=False))

    def _size(self, request: ServedRequest) -> int:
        return self.engine.prompt_size(len(request.token_ids))

    def _is_long(self, request: ServedRequest) -> bool:
        return len(request.token_ids) > self.engine.piece_size

    def _admit(self, requests: Mapping[int, ServedRequest]) -> None:
        """Read the prompts of requests, which are of one size, by slot; they run then."""
        size = self._size(next(iter(requests.values())))
        rows = self.engine.num_rows(size) if len(requests) > 1 else 1
        host = self._admitted(requests.values()).with_slots(requests)
        if host.reading is not None:
            host = dataclasses.replace(host, reading=host.reading._replace(waits=False))
        arrays = self._arrays(requests, rows)
        self._dispatch(_admit, host, self._params, self._draft_params, self.state, arrays)
        self._settle()

    def _read_on(self, reading: Reading) -> None:
        """The next piece of a long prompt; after the last one its request runs."""
        size, length = self.engine.piece_size, len(reading.request.token_ids)
        if reading.num_pieces * size < length:
            self._read(reading)
            reading = reading._replace(num_pieces=reading.num_pieces + 1)
        if reading.num_pieces * size >= length:
            self._insert(reading)

    def _read(self, reading: Reading) -> None:
        slot, request, num_pieces, _ = reading
        size, prompt = self.engine.piece_size, self.engine.pad_prompt(request.token_ids)
        start = min(num_pieces * size, len(prompt) - size)  # the last piece may not reach past it
        host = self._admitted([request]).with_slots({slot: request})
        host = dataclasses.replace(host, reading=Reading(slot, request, num_pieces + 1, True))
        self._dispatch(
            _read,
            host,
            self._params,
            self._draft_params,
            self._now[0][1],
            prompt[start : start + size],
            np.int32(start),
        )
        self._settle()

    def _insert(self, reading: Reading) -> None:
        host = dataclasses.replace(self._host, reading=None)
        requests = self._arrays({reading.slot: reading.request}, 1)
        self._dispatch(_insert, host, self.state, self._now[0][1], requests)
        self._settle()

    def _arrays(self, requests: Mapping[int, ServedRequest], num_rows: int) -> dict[str, Any]:
        """What `Engine.admit` takes, by slot; where there are more rows, the first comes again."""
        rows = [*requests.items()]
        rows += rows[:1] * (num_rows - len(rows))
        return dict(
            slots=np.array([slot for slot, _ in rows], np.int32),
            prompts=np.stack([self.engine.pad_prompt(one.token_ids) for _, one in rows]),
            lengths=np.array([len(one.token_ids) for _, one in rows], np.int32),
            seeds=np.array([one.seed for _, one in rows], np.uint32),
            options=jax.tree.map(lambda *x: np.concatenate(x), *(one.arrays for _, one in rows)),
        )

    def _admitted(self, requests: Iterable[ServedRequest]) -> Host:
        """What is known after requests have left the queue."""
        now, host = time.perf_counter(), self._host
        waited = [now - one.submitted for one in requests if one.request_id in self._waiting]
        return dataclasses.replace(host, stats=host.stats.after_admission(waited))

    def _step(self, all_neutral: bool) -> None:
        """A step; an engine with `request_options` has two programs for it."""
        self._dispatch(
            _step,
            self._host,
            self._params,
            self._draft_params,
            self.state,
            all_neutral=all_neutral,
        )
        self._settle()

    def _release(self, slot: int, host: Host) -> None:
        slots = np.arange(self.engine.num_slots) == slot
        self._dispatch(_release, host.with_slots({slot: None}), self.state, slots)
        self._settle()

    def _queue_first(self, requests: Sequence[ServedRequest]) -> None:
        """Put requests before all others in the queue, in this order."""
        for request in reversed(requests):
            self._preempted[request.request_id] = request

    def _unqueue(self, request_id: int) -> bool:
        """Take a request out of the queue; says whether it was there."""
        return any([queue.pop(request_id, None) for queue in (self._preempted, self._waiting)])
