"""The host loop around an engine: a queue, slots, steps ahead, interrupts and failed calls."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from jax_specdec._src.arrays import check_int, described
from jax_specdec._src.drafting.estimator import AcceptanceEstimator
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.bookkeeping import (
    ChunkedPrefill,
    FailedCall,
    FinishReason,
    Received,
    RequestUpdate,
    ServedRequest,
    StepAhead,
    Update,
)
from jax_specdec._src.serving.core import Caches, DecodeState, on_all_devices
from jax_specdec._src.serving.engine import Engine, NewRequests
from jax_specdec._src.serving.metrics import AcceptanceCounters, AcceptanceStats, ServingStats
from jax_specdec._src.serving.options import RequestFields, RequestOptions, options_per_request
from jax_specdec._src.serving.programs import admit as _admit
from jax_specdec._src.serving.programs import init as _init
from jax_specdec._src.serving.programs import insert as _insert
from jax_specdec._src.serving.programs import measure_steps
from jax_specdec._src.serving.programs import prefill_chunk as _prefill_chunk
from jax_specdec._src.serving.programs import release as _release
from jax_specdec._src.serving.programs import step as _step
from jax_specdec._src.serving.step_costs import DraftChoice, StepCosts


class EngineDriver:
    """Serves requests with an `Engine`: call `step` again and again, and `submit` at any time.

    Requests wait in a queue for a free slot, first come, first served; preempted ones go before
    all others. Not safe for several threads at once.

    **Steps ahead.** The device gets its next steps, up to `max_steps_ahead`, before the host reads
    the results of the last one, so that neither waits for the other. Tokens are the same for every
    number. A request that has ended keeps its slot for the steps that were dispatched by then.

    **The host's tokens are the truth.** Each request keeps its prompt and its tokens in a list. An
    exception, at whatever place, drops what is on the device and the steps ahead. Running requests
    then go first in the queue, and are read again from their tokens as preempted ones are (see
    `preempt`). Every token is delivered once, with the updates, finish reasons and `stats` of an
    uninterrupted run.

    **Interrupts.** After a KeyboardInterrupt or any other exception, go on with `step`. A `submit`
    or `cancel` that was cut short has happened completely or not at all; a `preempt` that was has
    happened to all running requests.

    **Failed calls**, as on a device with too little memory, are not raised; an error while a
    program is traced is. Each request that was in the call gets an update with the `error`. A
    request ends, as "failed", when more than `max_retries` of its calls have failed in a row:
    without a new token, or a further chunk of a long prompt, in between. From its second failure
    on, its prompt is read alone, so that a prompt which cannot be read ends no other request.

    Attributes:
      engine: sizes and models.
      max_queue: the most requests that may wait; None for any number.
      max_steps_ahead: the most steps that are under way when `step` returns.
      max_prefills: the most calls that read prompts before a step while requests run; None for
        any number.
      max_retries: the most failed calls in a row after which a request goes on.
      draft_choice: how many drafts the steps of an engine with a `draft_budget` have; else None.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> engine = sd.Engine(
      ...     model, sd.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> driver = sd.EngineDriver(engine, params)
      >>> texts = {driver.submit(sd.encode_bytes(p), max_new_tokens=8): []
      ...     for p in ("import ", "def ")}
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
        step_costs: StepCosts | None = None,
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
          step_costs: of steps with each number of drafts of the engine's `draft_budget`; None to
            measure them in `warm_up`. Until there are some, every step has the largest number.

        Raises:
          TypeError: an argument has another type, or a model's weights are missing.
          ValueError: `max_queue` or `max_prefills` is below 1, or `max_steps_ahead` or
            `max_retries` below 0; `step_costs` are not those of such an engine.
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
        self._weights = on_all_devices((params, draft_params), engine.model)
        k, estimator = engine.config.num_speculative_tokens, None
        if engine.draft_budget is not None:
            estimator = AcceptanceEstimator.create(k)
        self.draft_choice = DraftChoice.of(
            engine.num_slots, engine.draft_budget, step_costs, estimator
        )
        counters = AcceptanceCounters.create(k)
        counters, estimator = on_all_devices((counters, estimator), engine.model)
        # What is on the device: dropped, and None, after an exception.
        self._state: DecodeState | None = None
        self._caches: Caches | None = None  # of the long prompt that is being read
        self._ahead: list[StepAhead] = []
        # What the host knows. Between changes a request is in a queue or in a slot, not in both.
        self._received = Received((), counters, estimator, ServingStats(engine.num_slots))
        self._delivered: tuple[Update, ...] | None = None  # what the last `step` returned
        self._preempted: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._waiting: collections.OrderedDict[int, ServedRequest] = collections.OrderedDict()
        self._slots: list[ServedRequest | None] = [None] * engine.num_slots
        self._prefill: ChunkedPrefill | None = None
        self._num_submitted = 0
        self._is_whole = True  # False while something changes, and after an exception

    @property
    def state(self) -> DecodeState:
        """The engine's state after the steps ahead; the next call donates it."""
        self._settle()
        return self._ready_state([])

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        self._settle()
        return len(self._preempted) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot, including those that end in the steps ahead."""
        self._settle()
        return sum(request is not None for request in self._slots)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and every update was delivered."""
        return not (self.num_queued or self.num_running or self._undelivered)

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything now: from here on, serving compiles nothing.

        With JAX's persistent compilation cache, a later start reads the programs from disk.

        Args:
          on_progress: called with the number of programs that are ready and the number of all,
            before the first and after each. The programs are `admit` for each of the engine's
            `admit_shapes`, `prefill_chunk` and `insert` where long prompts are read in chunks,
            `release`, and `step` (two, with `request_options`, and that for each number of the
            `draft_budget`). None for no calls. Steps are measured afterwards, if there is a
            `draft_budget` and no `step_costs` were given.

        Raises:
          TypeError: `on_progress` cannot be called.
          RuntimeError: a request is running.
          Exception: a call failed.

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

        def step(all_neutral: bool, num_drafts: int | None) -> None:
            self._step(all_neutral, num_drafts)
            self._read_step()

        programs: list[Callable[[], Any]] = [
            functools.partial(admit, *shape) for shape in engine.admit_shapes
        ]
        if engine.chunk_size < engine.max_length:
            longest = ChunkedPrefill(nowhere, request(engine.max_length))
            all_chunks = longest._replace(num_chunks=engine.max_length)
            programs += [functools.partial(self._read_chunk, x) for x in (longest, all_chunks)]
        programs += [lambda: self._release(nowhere)]
        programs += [
            functools.partial(step, one, num_drafts)
            for one in sorted({False, engine.request_options})
            for num_drafts in engine.draft_budget or (None,)
        ]
        self._is_whole = False  # what the programs leave behind is dropped
        try:
            for done, compile_ in enumerate([*programs, None]):
                if on_progress is not None:
                    on_progress(done, len(programs))
                if compile_ is not None:
                    compile_()
            self._settle()
            if self.draft_choice is not None and self.draft_choice.costs is None:
                self.draft_choice.costs = measure_steps(engine, *self._weights)
            self._ready_state([])
        except FailedCall as failed:
            raise failed.error from None

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
            self._settle()
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
        with self._changes():
            queued = self._preempted.get(request_id) or self._waiting.get(request_id)
            slot, request = self._find_running(request_id) or (None, queued)
            for one in self._undelivered:
                if one.update.request_id == request_id:
                    request = one.request
            if request is None:
                return False
            request.is_cancelled = True  # first: the rest follows from it
            self._unqueue(request_id)
            if slot is not None:
                self._release(slot)
        return True

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
        with self._changes():
            if self._find_running(request_id) is None:
                return False
            while self._ahead:
                self._read_step()
            if (found := self._find_running(request_id)) is not None:
                self._queue_first([found[1]])
                self._release(found[0])
        return request_id in self._preempted

    def step(self) -> list[RequestUpdate]:
        """Admit what fits, dispatch steps, and return what the oldest step under way did.

        After an exception, call it again: it then returns what was not returned.

        Returns:
          One update for each request that took part in the step and was not cancelled since. An
          update has tokens, unless it says why not. After a `preempt`, the updates of all steps
          that were under way.
        """
        with self._changes():
            while self._dispatch_step():
                pass
            if self._ahead and not self._undelivered:
                self._read_step()
        try:
            updates = [one.update for one in self._undelivered]
            self._delivered = self._received.updates
            return updates
        except BaseException:
            self._delivered = None
            raise

    def stats(self) -> AcceptanceStats:
        """Acceptance in the steps whose results were read."""
        self._settle()
        return AcceptanceStats.from_counters(self._received.counters)

    def serving_stats(self) -> ServingStats:
        """How busy the engine was in the steps whose results were read."""
        running, queued = self.num_running, self.num_queued
        return dataclasses.replace(self._received.stats, num_running=running, num_queued=queued)

    # From the queue to the last token, in the order in which a request meets these.

    def _dispatch_step(self) -> bool:
        """Read prompts and dispatch a step, if one more is wanted; whether it did."""
        is_failing = any(one.num_failures for one in self._decoding)
        num_ahead = 0 if is_failing else self.max_steps_ahead  # of what fails, less is lost
        if len(self._ahead) >= num_ahead + (not self._undelivered):
            return False
        self._admit_queued()
        if not any(
            request is not None
            and request.budget_left > sum(step.slots[slot] is request for step in self._ahead)
            for slot, request in enumerate(self._decoding_slots)
        ):
            return False  # all budgets are spent after the steps ahead, if each spends one token
        all_neutral = self.engine.request_options and all(one.is_neutral for one in self._decoding)
        self._step(all_neutral, None if self.draft_choice is None else self.draft_choice.next())
        return True

    def _admit_queued(self) -> None:
        """Read prompts: at most `max_prefills` calls while requests run.

        Chunks of a long prompt and groups of shorter prompts take turns.
        """
        num_calls = 0
        while self.max_prefills is None or num_calls < self.max_prefills or not self._decoding:
            prefill = self._prefill
            group = {} if prefill is not None and not prefill.waits else self._next_group()
            if prefill is None and any(map(self._is_long, group.values())):
                ((slot, request),) = group.items()
                prefill, group = ChunkedPrefill(slot, request), {}
            if group:
                self._admit(group)
            elif prefill is not None:
                self._read_chunk(prefill)
            else:
                return
            num_calls += 1

    def _next_group(self) -> dict[int, ServedRequest]:
        """By free slot, the first request in the queue and others whose prompts have its size.

        Looks only at as many requests as there are free slots. Long prompts, and requests whose
        calls keep failing, are read alone; while a long prompt is read, no other long one is.
        """
        free = [slot for slot, request in enumerate(self._slots) if request is None]
        queue = itertools.chain(self._preempted.values(), self._waiting.values())
        group: list[ServedRequest] = []
        most = 1
        for request in itertools.islice(queue, len(free)):
            is_long = self._is_long(request)
            is_alone = is_long or request.num_failures > 1
            if is_long and self._prefill is not None:
                continue
            if not group:
                most = 1 if is_alone else self.engine.group_size(self._size(request))
                group = [request]
            elif not is_alone and self._size(request) == self._size(group[0]):
                group.append(request)
            if len(group) == most:
                break
        return dict(zip(free, group, strict=False))

    def _size(self, request: ServedRequest) -> int:
        return self.engine.prompt_size(len(request.token_ids))

    def _is_long(self, request: ServedRequest) -> bool:
        return len(request.token_ids) > self.engine.chunk_size

    def _admit(self, group: Mapping[int, ServedRequest]) -> None:
        """Read the prompts of requests, which are of one size, by slot; they run then."""
        requests = [*group.values()]
        num_rows = self.engine.group_size(self._size(requests[0])) if len(group) > 1 else 1
        new = self._new_requests(group, num_rows)
        self._state = self._call(requests, _admit, *self._weights, self._ready_state(requests), new)
        if self._prefill is not None:
            self._prefill = self._prefill._replace(waits=False)
        self._occupy(group)

    def _read_chunk(self, prefill: ChunkedPrefill) -> None:
        """Read the next chunk of a long prompt, if one is left; after the last, it runs."""
        slot, request, num_chunks, _ = prefill
        size, prompt = self.engine.chunk_size, self.engine.pad_prompt(request.token_ids)
        state = self._ready_state([request])
        if num_chunks * size < len(request.token_ids):
            start = min(num_chunks * size, len(prompt) - size)  # the last one ends where that ends
            following = prompt[start + size] if start + size < len(prompt) else 0
            numbers = map(np.int32, (start, len(request.token_ids), following))
            chunk = prompt[start : start + size], *numbers
            self._caches = self._call(
                [request], _prefill_chunk, *self._weights, self._caches, *chunk
            )
            num_chunks += 1
            if request.num_failures and num_chunks > request.num_chunks:
                request.num_chunks, request.num_failures = num_chunks, 0
        self._occupy({slot: request})
        self._prefill = ChunkedPrefill(slot, request, num_chunks, waits=True)
        if num_chunks * size >= len(request.token_ids):
            new = self._new_requests({slot: request}, 1)
            self._state = self._call([request], _insert, state, self._caches, new)
            self._prefill = None

    def _new_requests(self, group: Mapping[int, ServedRequest], num_rows: int) -> NewRequests:
        """Requests by slot as arrays; the first one is repeated until there are `num_rows`."""
        rows = [*group.items()]
        rows += rows[:1] * (num_rows - len(rows))
        arrays: dict[str, Any] = dict(
            slots=np.array([slot for slot, _ in rows], np.int32),
            prompts=np.stack([self.engine.pad_prompt(one.token_ids) for _, one in rows]),
            lengths=np.array([len(one.token_ids) for _, one in rows], np.int32),
            keys=np.array([one.seed for _, one in rows], np.uint32),
        )
        options = [one.option_arrays for _, one in rows]
        return NewRequests(**arrays, options=jax.tree.map(lambda *x: np.concatenate(x), *options))

    def _occupy(self, group: Mapping[int, ServedRequest]) -> None:
        """Requests are in slots from now on."""
        now = time.perf_counter()
        for slot, request in group.items():
            request.admitted = request.admitted or now
            if slot < self.engine.num_slots:  # `warm_up` has others
                self._slots[slot] = request
            self._unqueue(request.request_id)

    def _step(self, all_neutral: bool, num_drafts: int | None) -> None:
        """Dispatch a step; there is a program for each pair of these."""
        requests = self._decoding
        state = self._ready_state(requests)
        self._state, result = self._call(
            requests, _step, *self._weights, state, all_neutral=all_neutral, num_drafts=num_drafts
        )
        self._ahead.append(StepAhead(result, self._decoding_slots))
        with _reading(requests):
            result.copy_to_host()

    def _read_step(self) -> None:
        """Read the result of the oldest step ahead."""
        step, begin = self._ahead[0], time.perf_counter()
        with _reading(self._decoding):
            result = step.result
            read = jax.device_get((result.numbers, result.logprobs, result.rates))
        numbers, logprobs, rates = read
        if self.draft_choice is not None:
            self.draft_choice.rates = rates
        now = time.perf_counter()
        updates = step.updates(numbers, logprobs, self._slots, now)
        grown = [(one.request, len(one.update.token_ids)) for one in updates]
        new = [(request, n) for request, n in grown if request.last_read is None]
        stats = self._received.stats.after_step(
            num_busy=sum(one is not None for one in step.slots),
            num_ahead=len(self._ahead) - 1,
            waited=now - begin,
            queued=[one.admitted - one.submitted for one, _ in new],
            first=[(now - one.submitted, 1) for one, n in new if n],
            between=[((now - one.last_read) / n, n) for one, n in grown if one.last_read and n],
        )
        undelivered = (*self._undelivered, *updates)
        self._received = Received(undelivered, result.counters, result.estimator, stats)
        self._apply_updates()
        del self._ahead[0]

    def _apply_updates(self) -> None:
        """Let requests grow by the undelivered updates, and end."""
        for one in self._undelivered:
            one.apply()
            if one.update.finish_reason is not None:
                self._unqueue(one.request.request_id)
                self._slots = [None if it is one.request else it for it in self._slots]

    def _release(self, slot: int) -> None:
        """Empty a slot whose request has not ended."""
        if slot < self.engine.num_slots:  # `warm_up` has others
            self._slots[slot] = None
        if self._prefill is not None and self._prefill.slot == slot:
            self._prefill = None
        slots, requests = np.arange(self.engine.num_slots) == slot, self._decoding
        self._state = self._call(requests, _release, self._ready_state(requests), slots)

    @property
    def _decoding_slots(self) -> tuple[ServedRequest | None, ...]:
        """The requests, by slot, that the next step emits tokens for."""
        reading = None if self._prefill is None else self._prefill.request
        return tuple(None if one is reading else one for one in self._slots)

    @property
    def _decoding(self) -> list[ServedRequest]:
        return [request for request in self._decoding_slots if request is not None]

    def _find_running(self, request_id: int) -> tuple[int, ServedRequest] | None:
        for slot, request in enumerate(self._slots):
            if request is not None and request.request_id == request_id:
                return slot, request
        return None

    def _queue_first(self, requests: Sequence[ServedRequest]) -> None:
        """Put requests before all others in the queue, in this order."""
        for request in reversed(requests):
            self._preempted[request.request_id] = request
            self._preempted.move_to_end(request.request_id, last=False)
            self._waiting.pop(request.request_id, None)

    def _unqueue(self, request_id: int) -> None:
        self._preempted.pop(request_id, None)
        self._waiting.pop(request_id, None)

    # Interrupts and failed calls

    @property
    def _undelivered(self) -> tuple[Update, ...]:
        if self._received.updates is self._delivered:
            return ()
        return tuple(one for one in self._received.updates if not one.request.is_cancelled)

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """Around what changes requests, slots or the device; contains failed calls."""
        self._settle()
        self._received = self._received._replace(updates=self._undelivered)
        self._is_whole = False
        try:
            yield
        except FailedCall as failed:
            self._tell(failed)
            self._start_again()
        if not any(self._slots):
            self._ahead.clear()  # there is nothing to read
        self._is_whole = True

    def _settle(self) -> None:
        """Start again if an exception has left a change half done."""
        if not self._is_whole:
            self._start_again()

    def _start_again(self) -> None:
        """Drop what is on the device, and put running requests first in the queue.

        Cut short by an exception, it is done again.
        """
        self._state = self._caches = self._prefill = None
        self._ahead.clear()
        self._apply_updates()
        self._queue_first([one for one in self._slots if one is not None])
        self._slots = [None] * self.engine.num_slots
        for queue in (self._preempted, self._waiting):
            for request in [one for one in queue.values() if one.is_cancelled]:
                del queue[request.request_id]
        self._is_whole = True

    def _tell(self, failed: FailedCall) -> None:
        """Updates for the requests in a call that failed; some end by it."""
        updates = [*self._undelivered]
        for request in failed.requests:
            count = request.num_failures + 1
            reason: FinishReason | None = "failed" if count > self.max_retries else None
            update = RequestUpdate(request.request_id, [], reason, error=str(failed))
            updates.append(Update(request, len(request.token_ids), update, None, count))
        _, counters, estimator, stats = self._received
        stats = dataclasses.replace(stats, num_failed_calls=stats.num_failed_calls + 1)
        self._received = Received(tuple(updates), counters, estimator, stats)

    def _ready_state(self, requests: Sequence[ServedRequest]) -> DecodeState:
        """The state, of empty slots if it was dropped."""
        if self._state is None:
            kept = dict(counters=self._received.counters, estimator=self._received.estimator)
            arrays = self._call(requests, _init, *self._weights, **kept)
            self._state, self._caches = on_all_devices(arrays, self.engine.model)
        return self._state

    def _call(
        self,
        requests: Sequence[ServedRequest],
        function: Callable[..., Any],
        *args: Any,
        **named: Any,
    ) -> Any:
        """Call a compiled function that concerns some requests.

        Raises:
          FailedCall: whatever it says, unless the function cannot be traced.
        """
        program = functools.partial(function, self.engine, **named)
        try:
            result = program(*args)
            if any(one.num_failures for one in requests):
                jax.block_until_ready(result)  # or a failure would show later, and concern others
            return result
        except Exception as error:
            jax.eval_shape(program, *args)  # raises what is wrong with the program
            raise FailedCall(error, requests) from error


@contextlib.contextmanager
def _reading(requests: Sequence[ServedRequest]) -> Iterator[None]:
    """Around what waits for the device: its errors are failed calls."""
    try:
        yield
    except Exception as error:
        raise FailedCall(error, requests) from error
