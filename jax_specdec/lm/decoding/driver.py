"""The host loop around an engine: a queue, slots, steps ahead, interrupts and failed calls."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Self, Unpack

import jax
import numpy as np

from jax_specdec._src.acceptance import AcceptanceCounters, AcceptanceStats
from jax_specdec._src.arrays import check_choice, check_int, check_type, require
from jax_specdec._src.grammar import check_matchers
from jax_specdec._src.matchers import GrammarMatcher
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID
from jax_specdec.lm.decoding import inputs, programs
from jax_specdec.lm.decoding.bookkeeping import (
    HostState,
    Matching,
    RequestUpdate,
    ServedRequest,
    StepAhead,
)
from jax_specdec.lm.decoding.core import DecodeState, on_all_devices
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.failures import FailedCall, awaiting, interrupts
from jax_specdec.lm.decoding.matchers import Matchers
from jax_specdec.lm.decoding.metrics import ServingStats
from jax_specdec.lm.decoding.options import RequestFields, RequestOptions, options_per_request
from jax_specdec.lm.decoding.prompts import ChunkedPrefill, Prompts, next_group
from jax_specdec.lm.decoding.step_costs import DraftChoice, StepCosts
from jax_specdec.lm.models.protocol import check_params

Requests = Iterable[ServedRequest]
Program = Callable[..., Any]


class EngineDriver:
    """Serves requests with an `Engine`: call `step` again and again, and `submit` at any time.

    Requests wait in a queue for a free slot, first come, first served, or clients in turn;
    preempted ones go before all others. Not safe for several threads at once.

    **Steps ahead.** The device gets its next steps, up to `max_steps_ahead`, before the host reads
    the results of the last one, so that neither waits for the other. Tokens are the same for every
    number. A request that has ended keeps its slot for the steps that were dispatched by then.

    **The host's tokens are the truth.** Each request keeps its prompt and its tokens in a list. A
    KeyboardInterrupt or any other exception drops what is on the device and the steps ahead. Go on
    with `step`: requests that ran go first in the queue, and are read again from their tokens as
    preempted ones are (see `preempt`). Every token is delivered once, with the updates, finish
    reasons and `stats` of an uninterrupted run. A `submit` or `cancel` that was cut short has
    happened completely or not at all; a `preempt` that was has happened to all running requests.
    JAX makes a ValueError of an interrupt of its own caches: it is a KeyboardInterrupt again here.

    **Prompts** are read between steps, at most `chunk_size` tokens while requests run, or in steps.

    **Failed calls**, as on a device with too little memory, are not raised; an error while a
    program is traced is. Each request that was in the call gets an update with the `error`. A
    request ends, as "failed", when more than `max_retries` of its calls have failed in a row:
    without a new token, or a further chunk of a long prompt, in between. From its second failure
    on, its prompt is read alone, so that a prompt which cannot be read ends no other request.

    **Grammars.** A request may have a matcher. While such a request runs, a step is drafted, its
    masks are made on the host, and it is then verified. A token that a grammar forces takes the
    place of a draft. The masks need the tokens of the step before, so no step runs ahead. Matchers
    are called in a thread of their own, which the first of them starts and `close` ends. A driver
    is its own context manager.

    Attributes:
      engine, max_queue, max_steps_ahead, max_prefills, prompts_in_steps, max_retries: as given.
      client_of: None, or a function of a request's id that returns whose it is. A free slot then
        goes to the client with the fewest, or of several of these, to the one that waits longest.
      chunk_size: the most tokens of prompts that one call reads while requests run.
      draft_choice: how many drafts the steps of an engine with a `draft_budget` have; else None.

    Example:
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()  # the smaller one
      >>> engine = lm.Engine(
      ...     model, lm.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> driver = lm.EngineDriver(engine, params)
      >>> driver.warm_up()
      >>> texts = {driver.submit(lm.encode_bytes(p), max_new_tokens=8): []
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
        chunk_size: int | None = None,
        prompts_in_steps: bool = False,
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
          chunk_size: the most tokens that such a call reads, one of the engine's `chunk_sizes`:
            longer prompts are read in chunks of so many. None for the largest; `warm_up` then
            chooses the largest that costs at most 1.1 steps, or within a step half a step more.
            While nobody runs, a call reads up to the engine's `chunk_size`.
          prompts_in_steps: while requests run, read prompts in the target's pass of a step, as many
            as one call between steps would: see `Engine.step`. So a step with prompts takes little
            longer than one without, but its sums of floats may differ in their last bits: near
            ties, and so sampled texts, may then depend on when other requests come. In steps for a
            grammar, and of requests whose calls have failed, nothing is read.
          max_retries: the most failed calls in a row after which a request goes on.
          step_costs: of steps with each number of drafts of the engine's `draft_budget`; None to
            measure them in `warm_up`. Until there are some, every step has the largest number.

        Raises:
          TypeError: an argument has another type, a model's weights are missing, or the drafter
            cannot read prompts in chunks where it has to.
          ValueError: `max_queue` or `max_prefills` is below 1, or `max_steps_ahead` or
            `max_retries` below 0; the engine has no such `chunk_size`; `step_costs` are not those
            of such an engine; weights have other shapes than the models'.
        """
        check_type("engine", engine, Engine)
        check_params("params", engine.model, params)
        check_params("draft_params", engine.drafter, draft_params)
        self.engine = engine
        self.max_queue = None if max_queue is None else check_int("max_queue", max_queue, 1)
        self.max_steps_ahead = check_int("max_steps_ahead", max_steps_ahead, 0)
        calls = None if max_prefills is None else check_int("max_prefills", max_prefills, 1)
        self.max_prefills = calls
        check_type("prompts_in_steps", prompts_in_steps, bool)
        self.prompts_in_steps = prompts_in_steps
        self.client_of: Callable[[int], Hashable] | None = None
        self.chunk_size = engine.chunk_size
        if chunk_size is not None:
            self.chunk_size = check_int("chunk_size", chunk_size)
            check_choice("chunk_size", self.chunk_size, engine.chunk_sizes)
            if self.chunk_size < engine.max_length:
                inputs.check_reads_chunks(engine.drafter, "chunk_size", self.chunk_size)
        self._chooses_chunk_size = (
            chunk_size is None
            and calls is not None
            and min(engine.num_slots, len(engine.chunk_sizes)) > 1
            and engine.drafter.serves.chunks
        )
        self.max_retries = check_int("max_retries", max_retries, 0)
        self._weights = on_all_devices((params, draft_params), engine.model)
        budget, estimator = engine.draft_budget, engine.new_estimator()
        self.draft_choice = DraftChoice.of(engine.num_slots, budget, step_costs, estimator)
        if self.draft_choice is not None and 0 in self.draft_choice.num_drafts:
            is_cpu = jax.default_backend() == "cpu"
            self.draft_choice.may_be_narrow = is_cpu and engine.drafter.serves.may_abstain
        counters = AcceptanceCounters.create(engine.decoder.most_accepted)
        counters, estimator = on_all_devices((counters, estimator), engine.model)
        # The truth; `_settle` says what an exception does to it.
        stats = ServingStats(engine.num_slots)
        self._host = HostState({}, (), (), counters, estimator, stats)
        self._waiting: dict[int, ServedRequest] = {}  # for their first slot
        self._num_submitted = 0
        self._matchers = Matchers(engine.num_slots, engine.model.vocab_size)
        # What is on the device: dropped after an exception.
        self._state: DecodeState | None = None
        self._prefill: ChunkedPrefill | None = None  # the long prompt that is being read
        self._ahead: list[StepAhead] = []
        self._is_whole = True  # False while something changes, and after an exception

    def close(self) -> None:
        """End the thread of the matchers; another request with a grammar would start another."""
        self._matchers.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """`close`."""
        self.close()

    @property
    def state(self) -> DecodeState:
        """The engine's state after the steps ahead; the next call donates it.

        Raises:
          Exception: the state was dropped, and the call that makes one failed.
        """
        self._settle()
        try:
            return self._ready_state([])
        except FailedCall as failed:
            raise failed.error from None

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot."""
        self._settle()
        return len(self._host.returning) + len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot, including those that end in the steps ahead."""
        self._settle()
        return len(self._host.slots)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and every update was delivered."""
        return not (self.num_queued or self.num_running or self._host.updates)

    def warm_up(
        self, on_progress: Callable[[int, int], None] | None = None, *, grammars: bool = False
    ) -> None:
        """Compile everything now: from here on, serving compiles nothing.

        With JAX's persistent compilation cache, a later start reads the programs from disk.

        Args:
          on_progress: called with the number of programs that are ready and the number of all,
            before the first and after each: `admit` for each of the engine's `admit_shapes`,
            `release`, and `step` for each number of drafts, for none, and with `prompts_in_steps`
            for each of these shapes. None for no calls. Steps and prompts are measured where a
            `chunk_size` is to be chosen, or `step_costs` are missing.
          grammars: whether requests will have matchers; their steps are then compiled, too, as two
            more programs.

        Raises:
          TypeError: `on_progress` cannot be called.
          RuntimeError: a request is running.
          Exception: a call failed.
        """
        is_function = on_progress is None or callable(on_progress)
        require(is_function, "on_progress", "be a function", on_progress, error=TypeError)
        running = self.num_running
        require(not running, "num_running", "be 0 before warm_up", running, error=RuntimeError)
        calls = self._calls_of_all_programs(grammars)
        self._is_whole = False  # what the calls leave behind is dropped by the last one
        try:
            for done, call in enumerate([*calls, self._settle]):
                if on_progress is not None:
                    on_progress(done, len(calls))
                call()
            if self.draft_choice is not None and self.draft_choice.costs is None:
                self.draft_choice.costs = programs.measure_steps(self.engine, *self._weights)
            self._ready_state([])
        except FailedCall as failed:
            raise failed.error from None

    def _calls_of_all_programs(self, grammars: bool) -> list[Callable[[], object]]:
        """One call of each, for requests in slots that do not exist: nothing has to be undone."""
        engine, nowhere = self.engine, self.engine.num_slots

        def request(size: int) -> ServedRequest:
            return ServedRequest(size, None, 0, -1, [0] * size, size, RequestOptions(seed=0))

        def step(dispatch: Callable[..., None], *chosen: Any) -> None:
            dispatch(*chosen)
            self._read_step()

        def choose() -> None:
            self._settle()  # there may be no room for two states
            given = engine, *self._weights
            costs = programs.measure_chunks(*given, in_steps=self.prompts_in_steps)
            self.chunk_size = costs.largest
            self._chooses_chunk_size = False  # a second call measures nothing
            self._is_whole = False

        calls: list[Callable[[], object]] = []
        prompts = [
            Prompts({nowhere + row: request(size) for row in range(num_rows)}, 0, size, None)
            for num_rows, size in engine.admit_shapes
        ]
        calls += [functools.partial(self._read, one) for one in prompts]
        calls.append(functools.partial(self._empty, nowhere))
        chosen = itertools.product({False, engine.request_options}, engine.draft_budget or (None,))
        each = dict.fromkeys(((False, 0), *chosen))
        calls += [functools.partial(step, self._dispatch_whole, *one) for one in each]
        beside = functools.partial(step, self._dispatch_whole, False, programs.full_budget(engine))
        calls += [functools.partial(beside, one) for one in prompts] * self.prompts_in_steps
        most = engine.most_drafts(RequestOptions(), 1)
        masked = [
            functools.partial(step, self._dispatch_masked, {nowhere: n})
            for n in sorted({0, min(1, most)})
        ]
        calls += masked * grammars
        if engine.drafter.serves.has_history:
            calls.append(functools.partial(self._remember, [[]]))
        if self._chooses_chunk_size:
            calls.append(choose)
        return calls

    def submit(
        self,
        prompt: Sequence[int],
        options: RequestOptions | None = None,
        *,
        matcher: GrammarMatcher | None = None,
        **fields: Unpack[RequestFields],
    ) -> int:
        """Queue a request; nothing is computed yet. A refused request changes nothing.

        Args:
          prompt: token ids, at least one.
          options: what the request asks for: a budget of at least 1, and at most as many stop
            tokens as the engine's `max_stop_tokens`. More than a temperature, a budget, stop
            tokens, a seed and a limit of drafts needs an engine with `request_options`.
          matcher: at the beginning of its grammar, and of this request alone; made for the
            target's vocabulary. It is called in a thread of the driver's; if it raises, its request
            alone ends as "failed", with its words as the `error`. Where it has terminated, it
            allows every token: to end the text, let it allow a stop token only. None for none.
          **fields: of `RequestOptions`, such as ``temperature=0.8``; they override `options`.

        Returns:
          The request's id: 0, 1, 2, ...

        Raises:
          TypeError: something is not an integer, not a number, no field of `RequestOptions`, or no
            matcher.
          ValueError: an empty prompt, an id outside the vocabulary, a prompt and budget longer
            than the engine's `max_length`, or a value out of range.
          RuntimeError: `max_queue` requests wait already; preempted ones do not count.
        """
        check_matchers([matcher])
        token_ids = inputs.token_list("prompt", prompt, self.engine.model.vocab_size)
        (own,) = options_per_request(options, 1, fields)
        sizes = len(token_ids), check_int("max_new_tokens", own.max_new_tokens, 1)
        must = f"fit into max_length={self.engine.max_length} tokens"
        fit = sum(sizes) <= self.engine.max_length
        require(fit, "prompt and max_new_tokens", must, sizes)
        self.engine.check_options(own)
        if self.max_queue is not None:
            self._settle()
            waiting, must = len(self._waiting), f"be below max_queue={self.max_queue}"
            require(waiting < self.max_queue, "waiting requests", must, waiting, error=RuntimeError)
        length, request_id = len(token_ids), self._num_submitted
        matching = None if matcher is None else Matching(matcher)
        begun = length, None, 0, request_id, token_ids, length, own, matching, time.perf_counter()
        self._num_submitted = request_id + 1  # first: no two requests may have one id
        self._waiting[request_id] = ServedRequest(*begun)
        return request_id

    def cancel(self, request_id: int) -> bool:
        """End a request, wherever it is; it gets no more updates.

        A drafter's history learns what it has generated, as of a request that ends by itself.

        Returns:
          Whether it was still waiting or running.
        """
        with self._changes():
            if self._waiting.pop(request_id, None) is not None:
                self._count_ends(["cancelled"])
                return True
            host = self._host
            slot = host.slot_of(request_id)
            others = host.without(request_id)
            before, after = ([*map(len, (x.slots, x.returning, x.updates))] for x in (host, others))
            is_known = before != after
            reasons = ["cancelled"] * is_known
            # One assignment: what fails or is interrupted after it does not bring the request back.
            self._host = others._replace(stats=others.stats.after_ends(reasons))
            if slot is not None:
                self._empty(slot)
            if self.engine.drafter.serves.has_history:
                begun = *host.slots.values(), *host.returning
                ended = [one for one in begun if one.request_id == request_id]
                texts = [one.token_ids[one.prompt_length :] for one in ended]
                self._remember([text for text in texts if text])
        return is_known

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
            if self._host.slot_of(request_id) is None:
                return False
            while self._ahead:
                self._read_step()
            slot = self._host.slot_of(request_id)
            if slot is not None:
                self._host = self._host.queued_first([slot])
                self._empty(slot)
        return any(one.request_id == request_id for one in self._host.returning)

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
            if self._ahead and not self._host.updates:
                self._read_step()
        host = self._host
        try:
            self._host = host._replace(updates=())
            self._count_ends(update.finish_reason for update in host.updates)
            return [*host.updates]
        except BaseException:
            self._host = host
            raise

    def _count_ends(self, reasons: Iterable[str | None]) -> None:
        self._host = self._host._replace(stats=self._host.stats.after_ends(reasons))

    def stats(self) -> AcceptanceStats:
        """Acceptance in the steps whose results were read."""
        self._settle()
        return AcceptanceStats.from_counters(self._host.counters)

    def serving_stats(self) -> ServingStats:
        """How busy the engine was in the steps whose results were read."""
        running, queued = self.num_running, self.num_queued
        return dataclasses.replace(self._host.stats, num_running=running, num_queued=queued)

    # From the queue to the last token, in the order in which a request meets these.

    def _dispatch_step(self) -> bool:
        """Read prompts and dispatch a step, if one more is wanted; whether it did."""
        running = self._decoding
        is_failing = any(one.num_failures for one in running.values())
        has_grammar = any(one.matching is not None for one in running.values())
        # Of what fails, less is lost; and masks need the tokens of the step before.
        num_ahead = 0 if is_failing or has_grammar else self.max_steps_ahead
        if len(self._ahead) >= num_ahead + (not self._host.updates):
            return False
        prompts = None
        if self.prompts_in_steps and not (is_failing or has_grammar) and self._has_budget():
            prompts = self._next_prompts(self.chunk_size)
            if prompts is not None and any(one.num_failures for one in prompts.group.values()):
                self._read(prompts)  # if it fails again, that concerns nobody else
                prompts = None
        else:
            self._admit_queued()
        running = self._running_beside(prompts)
        if not self._has_budget():
            return False
        # A request may be longer on the device, and so have fewer drafts there, but never more.
        limits = {i: self.engine.most_drafts(x.options, x.length) for i, x in running.items()}
        if any(one.matching is not None for one in running.values()):
            self._dispatch_masked(limits)
            return True
        neutral = [one.options.is_neutral for one in running.values()]
        all_neutral = self.engine.request_options and all(neutral)
        num_drafts = None
        if prompts is not None:  # for these, and for no drafts, one program is enough
            all_neutral, num_drafts = False, programs.full_budget(self.engine)
        elif not any(limits.values()):
            num_drafts = 0
            all_neutral &= 0 in (self.engine.draft_budget or ())  # or it is not compiled
        elif self.draft_choice is not None:
            self.draft_choice.limits = [*limits.values()]
            num_drafts = self.draft_choice.next()
        self._dispatch_whole(all_neutral, num_drafts, prompts)
        return True

    def _has_budget(self) -> bool:
        """Whether a request has a budget left after the steps ahead, if each spends one token."""
        return any(
            one.budget_left > sum(x.request_ids.get(slot) == one.request_id for x in self._ahead)
            for slot, one in self._decoding.items()
        )

    def _admit_queued(self) -> None:
        """Read prompts, if there are any: at most `max_prefills` calls while requests run."""
        num_calls = 0
        while self.max_prefills is None or num_calls < self.max_prefills or not self._decoding:
            most = self.chunk_size if self._decoding else self.engine.chunk_size
            prompts = self._next_prompts(most)
            if prompts is None:
                break
            self._read(prompts)
            num_calls += 1

    def _next_prompts(self, most: int) -> Prompts | None:
        """What is to be read next, at most so many tokens; its requests are in slots from now on.

        Chunks of a long prompt and groups of shorter prompts take turns.
        """
        prefill, host, group = self._prefill, self._host, {}
        if prefill is None or prefill.waits:
            has_long = prefill is not None
            group = next_group(self.engine, self._queue(), host.slots, most, has_long=has_long)
        if group:
            group = self._occupy(group)
            slot, first = next(iter(group.items()))
            if first.length <= most:
                rest = None if prefill is None else prefill._replace(waits=False)
                return Prompts(group, 0, self.engine.prompt_size(first.length), rest)
            prefill = ChunkedPrefill(slot, first)
        return None if prefill is None else prefill.next_chunk(self.engine, most, self.chunk_size)

    def _queue(self) -> Iterator[ServedRequest]:
        """Returns the requests that wait, in the order in which they get slots."""
        waiting: Iterable[ServedRequest] = self._waiting.values()
        if (client_of := self.client_of) is not None:
            # How many of its client's are before a request, in slots and in the queue.
            counts = collections.Counter(client_of(x.request_id) for x in self._host.slots.values())
            ranks = {}
            for one in waiting:
                client = client_of(one.request_id)
                ranks[one.request_id] = counts[client]
                counts[client] += 1
            waiting = sorted(waiting, key=lambda one: ranks[one.request_id])
        # No generator: an interrupt while Python closes one is lost.
        return itertools.chain(self._host.returning, waiting)

    def _read(self, prompts: Prompts) -> None:
        """Read prompts between two steps; those that are read to their end run from now on."""
        requests = prompts.group.values()
        state, new = self._ready_state(requests), prompts.arrays(self.engine)
        self._state = self._call(requests, programs.admit, *self._weights, state, new)
        self._prefill = rest = prompts.rest
        is_chunk = prompts.start > 0 or (rest is not None and rest.slot in prompts.group)
        for slot, request in prompts.group.items():
            num_read = prompts.start + prompts.size
            if is_chunk and request.num_failures and num_read > request.num_read:
                request = request._replace(num_read=num_read, num_failures=0)
                self._occupy({slot: request})
                self._prefill = rest and rest._replace(request=request)

    def _occupy(self, group: dict[int, ServedRequest]) -> dict[int, ServedRequest]:
        """Requests are in slots from now on."""
        host, now = self._host, time.perf_counter()
        group = {i: x._replace(admitted=x.admitted or now) for i, x in group.items()}
        ids = {one.request_id for one in group.values()}
        returning = tuple(one for one in host.returning if one.request_id not in ids)
        self._host = host._replace(slots={**host.slots, **group}, returning=returning)
        for request_id in ids:
            self._waiting.pop(request_id, None)
        return group

    def _dispatch_whole(
        self, all_neutral: bool, num_drafts: int | None, prompts: Prompts | None = None
    ) -> None:
        """Dispatch a step, which may read prompts; there is a program for each pair of the first.

        With prompts, there is one for each shape of these.
        """
        static = dict(all_neutral=all_neutral, num_drafts=num_drafts)
        slots = self._running_beside(prompts)
        requests, new = [*slots.values()], None
        if prompts is not None:
            requests += prompts.group.values()
            new = prompts.arrays(self.engine)
        given = *self._weights, self._ready_state(requests), new
        state, result = self._call(requests, programs.step, *given, **static)
        self._prefill = self._prefill if prompts is None else prompts.rest
        self._add_step(slots, state, result, num_drafts)

    def _dispatch_masked(self, limits: dict[int, int]) -> None:
        """Dispatch a step whose rows are masked by grammars, with the most drafts by slot.

        Where a pass may be narrow and drafts do not pay, only those are verified that are forced.
        """
        slots, (params, draft_params) = self._decoding, self._weights
        requests, num_drafts, choice = slots.values(), 0, self.draft_choice
        matched = [i for i, one in slots.items() if one.matching is not None]
        has_grammar = np.isin(np.arange(self.engine.num_slots), matched)
        state = self._ready_state(requests)
        if any(limits.values()):
            num_drafts = self.engine.config.num_speculative_tokens
            given = state.features, state.num_features, has_grammar
            state = dataclasses.replace(state, features=None, num_features=None)
            state = self._call(requests, programs.draft, draft_params, state, *given)
        with awaiting(requests):
            ids = jax.device_get(state.draft_token_ids)[:, :num_drafts]
        drops = choice is not None and choice.may_be_narrow and choice.next() == 0
        ids = np.full_like(ids, PLACEHOLDER_TOKEN_ID) if drops else ids
        drafts, failed = self._matchers.forced_drafts(slots, ids, limits, state.store is not None)
        if drops:  # nothing is learned of what was not verified
            drafts = drafts._replace(is_forced=np.ones_like(drafts.is_forced))
        going_on = {slot: one for slot, one in slots.items() if slot not in failed}
        call: tuple[Any, ...] = programs.verify, params, state, *drafts
        if not num_drafts:
            call = programs.masked_step, params, draft_params, state, drafts.token_bitmask
        state, result = self._call(requests, *call)
        self._add_step(going_on, state, result, 0 if drops else num_drafts)
        for slot, reason in failed.items():
            self._host = self._host.failed(slot, f"the matcher has failed: {reason}")
            self._empty(slot)

    def _add_step(
        self,
        slots: dict[int, ServedRequest],
        state: DecodeState,
        result: programs.StepResult,
        num_drafts: int | None,
    ) -> None:
        """A step was dispatched: begin to copy what the host reads, and do not wait."""
        self._state = state
        request_ids = {i: one.request_id for i, one in slots.items()}
        self._ahead.append(StepAhead(result, request_ids, num_drafts))
        with awaiting(slots.values()):
            for array in jax.tree.leaves(result.for_host):
                array.copy_to_host_async()

    def _read_step(self) -> None:
        """Read the result of the oldest step ahead."""
        result, request_ids, num_drafts = self._ahead[0]
        host, begin = self._host, time.perf_counter()
        with awaiting(self._decoding.values()):
            numbers, logprobs, rates = jax.device_get(result.for_host)
        now = time.perf_counter()
        slots, updates, grown, ended = dict(host.slots), [*host.updates], [], []
        rows = numbers.tolist()
        for slot, request_id in sorted(request_ids.items()):
            request = slots.get(slot)
            if request is None or request.request_id != request_id:
                continue  # it ended in an earlier step, or was cancelled
            update = request.update(slot, rows, logprobs)
            updates.append(update)
            grown.append((request, len(update.token_ids)))
            if update.finish_reason is None:
                slots[slot] = request.after(update.token_ids, now)
            else:
                del slots[slot]
                ended.append(request.token_ids[request.prompt_length :] + update.token_ids)
        if self.draft_choice is not None and grown:
            has_drafts = any(update.num_proposed for update in updates[len(host.updates) :])
            self.draft_choice.learn(rates, num_drafts, has_drafts)
        new = [(request, n) for request, n in grown if request.last_read is None]
        stats = host.stats.after_step(
            num_busy=len(request_ids),
            num_ahead=len(self._ahead) - 1,
            waited=now - begin,
            prompt_tokens=sum(one.prompt_length for one, _ in new),
            queued=[one.admitted - one.submitted for one, _ in new],
            first=[(now - one.submitted, 1) for one, n in new if n],
            between=[((now - one.last_read) / n, n) for one, n in grown if one.last_read and n],
        )
        learned = result.counters, result.estimator, stats
        self._host = HostState(slots, host.returning, tuple(updates), *learned)
        del self._ahead[0]
        if self.engine.drafter.serves.has_history:
            self._remember(ended)

    def _remember(self, texts: list[list[int]]) -> None:
        """Let the drafter search what requests have generated; steps ahead do not do so yet."""
        params, draft_params = self._weights
        for text in texts:
            token_ids = np.array(text + [-1] * (self.engine.max_length - len(text)), np.int32)
            draft_params = self._call((), programs.remember, draft_params, token_ids)
        self._weights = params, draft_params

    def _empty(self, slot: int) -> None:
        """Empty a slot on the device; its request has not ended, and has left it on the host."""
        if self._prefill is not None and self._prefill.slot == slot:
            self._prefill = None
        here, requests = np.arange(self.engine.num_slots) == slot, self._decoding.values()
        self._state = self._call(requests, programs.release, self._ready_state(requests), here)

    @property
    def _decoding(self) -> dict[int, ServedRequest]:
        """The requests, by slot, that the next step emits tokens for."""
        waits = None if self._prefill is None else self._prefill.slot
        return {slot: one for slot, one in self._host.slots.items() if slot != waits}

    def _running_beside(self, prompts: Prompts | None) -> dict[int, ServedRequest]:
        """The requests that run, by slot, without those whose prompts are about to be read."""
        new = () if prompts is None else prompts.group
        return {slot: one for slot, one in self._decoding.items() if slot not in new}

    # Interrupts and failed calls

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """Around what changes requests, slots or the device; contains failed calls."""
        self._settle()
        self._is_whole = False
        try:
            with interrupts():
                yield
        except FailedCall as failed:
            retries = self.max_retries
            self._host = self._host.after_failed_call(failed.request_ids, str(failed), retries)
            self._settle()
        if not self._host.slots:
            self._ahead.clear()  # there is nothing to read
        self._is_whole = True

    def _settle(self) -> None:
        """What an exception does, an interrupt included: done before anything else that follows it.

        What is on the device may be half of one step and half of the next, so it is dropped. All
        that was read is in `_host`, which is as it was before a step or after it, because one
        assignment replaces it. So the requests in its slots go first in the queue, and are read
        again from their tokens. An exception while this is done does no harm: it is done again.
        """
        if self._is_whole:
            return
        self._state = self._prefill = None
        self._ahead.clear()
        self._host = self._host.queued_first(sorted(self._host.slots))
        for request in self._host.returning:  # some had got a slot, and were still waiting for one
            self._waiting.pop(request.request_id, None)
        self._is_whole = True

    def _ready_state(self, requests: Requests) -> DecodeState:
        """The state, of empty slots if it was dropped."""
        if self._state is None:
            kept = dict(counters=self._host.counters, estimator=self._host.estimator)
            state = self._call(requests, programs.init, *self._weights, **kept)
            self._state = on_all_devices(state, self.engine.model)
        return self._state

    def _call(self, requests: Requests, function: Program, *args: Any, **named: Any) -> Any:
        """Call a compiled function that concerns some requests.

        Raises:
          FailedCall: whatever it says, unless the function cannot be traced.
        """
        program = functools.partial(function, self.engine, **named)
        try:
            with interrupts():
                result = program(*args)
            if any(one.num_failures for one in requests):
                jax.block_until_ready(result)  # or a failure would show later, and concern others
            return result
        except Exception as error:
            jax.eval_shape(program, *args)  # raises what is wrong with the program
            raise FailedCall(error, requests) from error
