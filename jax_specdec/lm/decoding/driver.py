"""The host loop around an engine: a queue, slots, steps ahead, interrupts and failed calls.

`submit` puts a request into `_waiting`. From there on `step` does all of the following:

1. `_plan` asks `schedule.plan`, a function of `_settings` and `_traffic`, what is to be done next.
2. `_occupy` moves requests whose prompts are read now to slots of `_host`.
3. `_carry_out` has `_device` (`device.DeviceState`) call the programs, without waiting for them. A
   step that was dispatched is in `_device.ahead`.
4. `_read_step` waits for the oldest of these. `_host.after_step` (`bookkeeping.HostState`) makes of
   its numbers longer requests and `RequestUpdate`s, which `step` returns.

What happens where one of these raises, or is interrupted, stands at `_changes` and `_settle`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Self, Unpack

import jax
import numpy as np

from jax_specdec._src.base.arrays import check_choice, check_int, check_type, require
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.rates import DraftRates
from jax_specdec._src.logits.grammar import check_matchers
from jax_specdec._src.logits.matchers import GrammarMatcher
from jax_specdec._src.stats.acceptance import AcceptanceCounters, AcceptanceStats
from jax_specdec.lm.decoding import inputs, schedule
from jax_specdec.lm.decoding.bookkeeping import (
    HostState,
    Matching,
    Replay,
    RequestUpdate,
    ServedRequest,
    Timing,
)
from jax_specdec.lm.decoding.device import DeviceState
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.failures import FailedCall, awaiting, interrupts
from jax_specdec.lm.decoding.matchers import Matchers
from jax_specdec.lm.decoding.metrics import ServingStats
from jax_specdec.lm.decoding.options import RequestFields, RequestOptions, options_per_request
from jax_specdec.lm.decoding.schedule import Action, Masked, Read, Step, Traffic, Wait
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.decoding.step_costs import DraftChoice, StepCosts
from jax_specdec.lm.decoding.warm_up import WarmUp
from jax_specdec.lm.decoding.weights import (
    Weights,
    check_are_there,
    check_replaces,
    on_all_devices,
    put,
    replaced,
)
from jax_specdec.lm.models.protocol import Params, check_params

_PAUSE = 0.02
"""Seconds between two looks whether a program that all wait for is compiled."""


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
    happened completely or not at all, as has a `set_params` that does not delete the old weights; a
    `preempt` that was has happened to all running requests.
    JAX makes a ValueError of an interrupt of its own caches: it is a KeyboardInterrupt again here.

    **Prompts** are read between steps, at most `chunk_size` tokens while requests run, or in steps.

    **Failed calls**, as on a device with too little memory, are not raised; an error while a
    program is traced is, and so are weights that were deleted (see `set_params`). Each request that
    was in the call gets an update with the `error`. A request ends, as "failed", when more than
    `max_retries` of its calls have failed in a row: without a new token, or a further chunk of a
    long prompt, in between. From its second failure on, its prompt is read alone, so that a prompt
    which cannot be read ends no other request.

    **Grammars.** A request may have a matcher. While such a request runs, a step is drafted, its
    masks are made on the host, and it is then verified. A token that a grammar forces takes the
    place of a draft. The masks need the tokens of the step before, so no step runs ahead. Matchers
    have a thread of their own, which the first starts and `close`, or the end of a `with`, ends.

    Attributes:
      engine, max_queue, max_steps_ahead, max_prefills, prompts_in_steps, max_retries: as given.
      client_of: None, or a function of a request's id that returns whose it is. A free slot then
        goes to the client with the fewest, or of several of these, to the one that waits longest.
      chunk_size: the most tokens of prompts that one call reads while requests run.
      step_widths: of how many slots a step may be; it has all where none of these is enough.
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
        params: Params,
        draft_params: Params = None,
        *,
        max_queue: int | None = None,
        max_steps_ahead: int = 1,
        max_prefills: int | None = 1,
        chunk_size: int | None = None,
        prompts_in_steps: bool = False,
        max_retries: int = 5,
        step_costs: StepCosts | None = None,
        step_widths: Sequence[int] | None = None,
    ) -> None:
        """Makes an idle driver.

        Args:
          engine: sizes and models.
          params: the target's weights. Arrays of the host are copied, those of devices are shared;
            so are those of `draft_params`.
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
          step_widths: of how many slots a step may be, increasing, where fewer than all of the
            engine are busy: it then costs what its requests cost. A step of another width is
            another program, so near ties of float32 sums may be decided otherwise; so an exact
            engine's steps have all slots, whatever is given. None for those that pay on the device,
            from 8 slots on: 1, 2, 4, 8, 16 on CPUs, 1, 8, 32 on GPUs, up to half of the slots;
            ``()`` for none. Steps that read prompts have all slots; elsewhere than on CPUs, so have
            those with grammars.

        Raises:
          TypeError: an argument has another type, a model's weights are missing, or the drafter
            cannot read prompts in chunks where it has to.
          RuntimeError: an array of the weights was deleted.
          ValueError: `max_queue` or `max_prefills` is below 1, or `max_steps_ahead` or
            `max_retries` below 0; the engine has no such `chunk_size`; `step_costs` are not those
            of such an engine; `step_widths` do not increase, or one is not below the number of
            slots; weights have other shapes than the models'.
        """
        check_type("engine", engine, Engine)
        check_params("params", engine.model, params)
        check_params("draft_params", engine.drafter, draft_params)
        check_are_there("params", params)
        check_are_there("draft_params", draft_params)
        # Copied once, not with every call, and waited for: the caller may then change the arrays.
        placed = on_all_devices((params, draft_params), engine.model)
        weights = jax.block_until_ready(jax.tree.map(put, placed))
        self.engine = engine
        self.max_queue = None if max_queue is None else check_int("max_queue", max_queue, 1)
        self.max_steps_ahead = check_int("max_steps_ahead", max_steps_ahead, 0)
        self.max_prefills = max_prefills
        if max_prefills is not None:
            self.max_prefills = check_int("max_prefills", max_prefills, 1)
        check_type("prompts_in_steps", prompts_in_steps, bool)
        must = "be false for an exact engine, whose prompts are read by one program"
        require(not (engine.exact and prompts_in_steps), "prompts_in_steps", must, prompts_in_steps)
        self.prompts_in_steps = prompts_in_steps
        self.client_of: Callable[[int], Hashable] | None = None
        self.chunk_size = engine.chunk_size
        if chunk_size is not None:
            self.chunk_size = check_int("chunk_size", chunk_size)
            check_choice("chunk_size", self.chunk_size, engine.chunk_sizes)
            if self.chunk_size < engine.max_length:
                inputs.check_reads_chunks(engine.drafter, "chunk_size", self.chunk_size)
        # `warm_up` measures only where there are several sizes, others who would wait for a large
        # one, and a drafter that reads chunks.
        self._chooses_chunk_size = (
            chunk_size is None
            and max_prefills is not None
            and min(engine.num_slots, len(engine.chunk_sizes)) > 1
            and engine.drafter.serves.chunks
        )
        self.max_retries = check_int("max_retries", max_retries, 0)
        self.step_widths = schedule.widths_of(engine, jax.default_backend(), step_widths)
        counters, draft_rates = self._new_counts()
        self.draft_choice = DraftChoice.of(
            engine.num_slots, engine.draft_budget, step_costs, draft_rates
        )
        if self.draft_choice is not None and 0 in self.draft_choice.draft_budget:
            # On CPUs `core._run_as_wide_as_needed` runs one row of each request where nobody has a
            # draft.
            is_cpu = jax.default_backend() == "cpu" and not engine.exact
            self.draft_choice.may_be_narrow = is_cpu and engine.drafter.serves.may_abstain
        # What is known of requests that have had a slot. One assignment replaces it, so an
        # interrupt finds it before a change or after it; `_settle` builds the rest from it.
        self._host = HostState(weights, counters, draft_rates, ServingStats(engine.num_slots))
        self._waiting: dict[int, ServedRequest] = {}  # for their first slot
        self._num_submitted = 0
        self._matchers = Matchers(engine.num_slots, engine.model.vocab_size)
        self._device = DeviceState(engine, self._host)
        self._warm_up = WarmUp(engine, self._device)
        self._is_whole = True  # False while something changes, and after an exception

    def _new_counts(self) -> tuple[AcceptanceCounters, DraftRates | None]:
        """Returns counters and rates that have seen nothing."""
        counters = AcceptanceCounters.create(self.engine.most_accepted)
        return on_all_devices((counters, self.engine.new_draft_rates()), self.engine.model)

    def close(self) -> None:
        """Ends the threads of matchers and programs; what needs one starts another."""
        self._matchers.close()
        self._device.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Calls `close`."""
        self.close()

    @property
    def state(self) -> DecodeState:
        """The engine's state after the steps ahead; the next call donates it.

        Raises:
          Exception: the state was dropped, and the call that makes one failed.
        """
        self._settle()
        try:
            return self._device.state([])
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
    def compiling_for(self) -> list[str]:
        """What requests in the queue wait for: programs for "options" or for "grammars".

        Empty if all is compiled, or nobody waits for what is not: see `warm_up`, with `behind`.
        """
        return self._warm_up.compiling_for(self._waiting.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, nothing runs, and every update was delivered."""
        return not (self.num_queued or self.num_running or self._host.updates)

    def warm_up(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        grammars: bool = False,
        behind: bool = False,
    ) -> None:
        """Compiles everything now: from here on, serving compiles nothing that it waits for.

        On CPUs narrow steps (`step_widths`) are compiled in a thread, each when it is first of use;
        until then steps have all slots. On GPUs they are compiled here, as XLA times products.

        With JAX's persistent compilation cache, a later start reads the programs from disk.

        Args:
          on_progress: called with the number of programs that are ready and the number of all,
            before the first and after each: `admit` for each of the engine's `admit_shapes`,
            `release`, and `step` for each number of drafts, for none, and with `prompts_in_steps`
            for each of these shapes. None for no calls. Steps and prompts are measured where a
            `chunk_size` is to be chosen, or `step_costs` are missing. Before all else the model of
            an exact engine is checked by `jax_specdec.testing.row_dependence`.
          grammars: whether requests will have matchers; their steps are then compiled, too, as two
            more programs.
          behind: on a CPU, whether what only some requests need is compiled in a thread while
            others are served: those that ask for `request_options`, or have a matcher, wait in the
            queue until their programs are there, which then come first. Prompts are read in calls
            of the least of `chunk_sizes` until there are programs for more; and while others run
            always, unless a `chunk_size` was given. An engine that is exact, or on a mesh, or a
            drafter that reads no chunks, compiles all now.

        Raises:
          TypeError: `on_progress` cannot be called.
          RuntimeError: a request is running.
          ValueError: the engine is exact, and its model does not allow that on this device.
          Exception: a call failed.
        """
        is_function = on_progress is None or callable(on_progress)
        require(is_function, "on_progress", "be a function", on_progress, error=TypeError)
        must = "be 0 before warm_up"
        require(not self.num_running, "num_running", must, self.num_running, error=RuntimeError)
        actions, later = self._warm_up.actions(self._settings, grammars=grammars, behind=behind)
        calls = self._warm_up.calls(actions, self._rehearse, self._host)
        if self._chooses_chunk_size and later:
            # Nothing is measured: programs for larger sizes come later, so the least stays.
            self.chunk_size = self.engine.chunk_sizes[0]
            self._chooses_chunk_size = False
        elif self._chooses_chunk_size:
            calls.append(self._choose_chunk_size)
        # The calls write to the state of the device. `_settle`, which comes last and is no program,
        # drops it. If one of these raises, the next method that calls `_settle` does.
        self._is_whole = False
        try:
            for done, call in enumerate([*calls, self._settle]):
                if on_progress is not None:
                    on_progress(done, len(calls))
                call()
            # There is no state now, so there is room for that of the measurement.
            if self.draft_choice is not None and self.draft_choice.costs is None:
                self.draft_choice.costs = self._warm_up.measure_steps()
            # The first request need not wait for it, and `compile_later` takes its shapes.
            state = self._device.state([])
        except FailedCall as failed:
            raise failed.error from None
        if later:
            self._warm_up.compile_later(later, self._host, state)

    def _rehearse(self, action: Action) -> None:
        """Carries out an action for nobody, and reads the step if it is one."""
        self._carry_out(action)
        if self._device.ahead:
            self._read_step()

    def _choose_chunk_size(self) -> None:
        """Measures steps and prompts; a second call of `warm_up` measures nothing."""
        in_steps = self.prompts_in_steps
        self.chunk_size = self._warm_up.measure_chunk_size(self._host, in_steps=in_steps)
        self._chooses_chunk_size = False

    def submit(
        self,
        prompt: Sequence[int],
        options: RequestOptions | None = None,
        *,
        matcher: GrammarMatcher | None = None,
        **fields: Unpack[RequestFields],
    ) -> int:
        """Queues a request; nothing is computed yet. A refused request changes nothing.

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
          TypeError: something is no integer, number, field of `RequestOptions`, or matcher.
          ValueError: an empty prompt, an id outside the vocabulary, a prompt and budget longer
            than the engine's `max_length`, or a value out of range.
          RuntimeError: `max_queue` requests wait already; preempted ones do not count.
        """
        check_matchers([matcher])
        token_ids = inputs.token_list("prompt", prompt, self.engine.model.vocab_size)
        (full_options,) = options_per_request(options, 1, fields)
        sizes = len(token_ids), check_int("max_new_tokens", full_options.max_new_tokens, 1)
        must = f"fit into max_length={self.engine.max_length} tokens"
        fit = sum(sizes) <= self.engine.max_length
        require(fit, "prompt and max_new_tokens", must, sizes)
        self.engine.check_options(full_options)
        if self.max_queue is not None:
            # After an interrupt within `_occupy`, some of `_waiting` have had a slot already.
            self._settle()
            waiting = len(self._waiting)
            must = f"be below max_queue={self.max_queue}"
            require(waiting < self.max_queue, "waiting requests", must, waiting, error=RuntimeError)
        request = ServedRequest(
            request_id=self._num_submitted,
            tokens=token_ids,
            length=len(token_ids),
            prompt_length=len(token_ids),
            options=full_options,
            matching=None if matcher is None else Matching(matcher),
            timing=Timing(submitted=time.perf_counter()),
            replay=Replay(begin=len(token_ids)) if self.engine.exact else None,
        )
        # The number first: no two requests may have one id. The second line submits the request.
        self._num_submitted = request.request_id + 1
        self._waiting[request.request_id] = request
        return request.request_id

    def cancel(self, request_id: int) -> bool:
        """Ends a request, wherever it is; it gets no more updates.

        A drafter's history learns what it has generated, as of a request that ends by itself.

        Returns:
          Whether it was still waiting or running.
        """
        return self._end(request_id, "cancelled")

    def finish(self, request_id: int) -> bool:
        """Ends a request whose text is complete, as at a string that its caller looks for.

        As `cancel`, but `ServingStats` counts it among those that stopped.

        Returns:
          Whether it was still waiting or running.
        """
        return self._end(request_id, "stop")

    def _end(self, request_id: int, reason: str) -> bool:
        """Ends a request for one of `END_REASONS`; see `cancel`."""
        with self._changes():
            if self._waiting.pop(request_id, None) is not None:
                self._host = self._host.after_ends([reason])
                return True
            host = self._host
            begun = [one for one in host.begun if one.request_id == request_id]
            # One that has ended, and whose last update was not delivered, is known by this alone.
            is_known = bool(begun) or any(one.request_id == request_id for one in host.updates)
            # One assignment: what fails or is interrupted after it does not bring the request back.
            self._host = host.without(request_id).after_ends([reason] * is_known)
            # The device comes last. What steps ahead emit for the request is dropped when they
            # are read: by then its slot is empty, or has another id.
            slot = host.slot_of(request_id)
            if slot is not None:
                self._empty(slot)
            self._remember([one.new_token_ids for one in begun if one.new_token_ids])
        return is_known

    def preempt(self, request_id: int) -> bool:
        """Takes a running request out of its slot and puts it first in the queue.

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
            while self._device.ahead:
                self._read_step()
            # By its id again: it may have ended in one of these steps.
            slot = self._host.slot_of(request_id)
            if slot is not None:
                self._host = self._host.queued_first([slot])
                self._empty(slot)
        return any(one.request_id == request_id for one in self._host.returning)

    @property
    def weights(self) -> Weights:
        """The weights of the target and of the drafter, with its history up to now."""
        return self._host.weights

    def set_params(
        self,
        params: Params = None,
        draft_params: Params = None,
        *,
        reread: bool = True,
        delete: bool = False,
    ) -> None:
        """Changes the weights between two steps; nothing is compiled again.

        Steps ahead are read first: each token is of the weights that made it, as
        `RequestUpdate.weights_version` says, and the next `step` delivers these. Acceptance is then
        counted anew, by `stats` and for a `draft_budget`. A drafter that was trained for the old
        weights drafts as before, and less of it is accepted: see ``docs/weights.md``.

        Arrays of the host, or elsewhere, are copied to where the old ones are; those of JAX that
        are there are not. If these are donated later, as to an update by a trainer, the driver has
        no weights: calls that need some raise a RuntimeError and lose nothing, until weights are
        set again.

        Args:
          params: the target's weights, of the old structure, shapes and dtypes; None keeps the old.
          draft_params: the drafter's weights likewise. The history of a drafter is among them, and
            begins anew with what `SuffixDrafter.init_params` gives; `weights` has the old one.
          reread: whether running requests leave their slots and are read again, as preempted ones:
            all that follows is then what the new weights say after the text so far. False is
            cheaper: requests go on with what the old weights left in their caches, so the rest of
            their texts is of neither. A request that returns to a slot later is read again.
          delete: whether the old arrays are deleted, also for whoever else holds them, each before
            the new one is copied to the device; those that are given again are not. So there need
            be room for one set of weights alone; give arrays of the host. If it fails or is
            interrupted, the driver has no weights.

        Raises:
          TypeError: an array of another dtype, or nothing is given.
          ValueError: another structure or shape; an array is committed to devices, where those of
            the driver are not; `reread` is false for an exact engine.
          RuntimeError: an array was deleted.
          Exception: the weights could not be copied to the device.
        """
        check_type("reread", reread, bool)
        check_type("delete", delete, bool)
        is_given = params is not None or draft_params is not None
        require(is_given, "params or draft_params", "be given", None, error=TypeError)
        require(reread or not self.engine.exact, "reread", "be true for an exact engine", reread)
        old_params, old_draft_params = self._host.weights
        if params is not None:
            check_replaces("params", self.engine.model, params, old_params)
        if draft_params is not None:
            check_replaces("draft_params", self.engine.drafter, draft_params, old_draft_params)
        # Two blocks: a failed call among the steps ahead does not keep the second from its work.
        with self._changes():
            while self._device.ahead:
                self._read_step()
        with self._changes():
            if reread:
                self._device.drop(self._host)  # there may be no room for caches beside two sets
            weights = replaced(self._host.weights, (params, draft_params), delete)
            host = self._host.with_weights(weights, *self._new_counts())
            if reread:
                host = host.queued_first(sorted(host.slots))
            self._host = host  # now it has happened
            if reread:
                self._device.drop(host)
            else:
                self._device.go_on(host)
            if self.draft_choice is not None and host.draft_rates is not None:
                self.draft_choice.forget(np.asarray(host.draft_rates.values))

    def step(self) -> list[RequestUpdate]:
        """Admits what fits, dispatches steps, and returns what the oldest step under way did.

        After an exception, call it again: it then returns what was not returned.

        Returns:
          One update for each request that took part in the step and was not cancelled since. An
          update has tokens, unless it says why not. After a `preempt`, the updates of all steps
          that were under way.
        """
        with self._changes():
            # Until the schedule says `Wait`: then at most `max_steps_ahead` steps are under way,
            # and the oldest, which is read below. So the device has work while the host reads.
            while self._dispatch_step():
                pass
            if self._device.ahead and not self._host.updates:
                self._read_step()
        host = self._host
        if self._warm_up.lacking and self._waiting and not (host.updates or host.slots):
            time.sleep(_PAUSE)  # until a program is compiled
        try:
            # Delivered once: if this is cut short, the caller gets no list, and the updates stay.
            reasons = [update.finish_reason for update in host.updates]
            self._host = host._replace(updates=()).after_ends(reasons)
            return [*host.updates]
        except BaseException:
            self._host = host
            raise

    def stats(self) -> AcceptanceStats:
        """Returns acceptance in the steps whose results were read, since the weights changed."""
        self._settle()
        stats = AcceptanceStats.from_counters(self._host.counters)
        return dataclasses.replace(stats, weights_version=self._host.stats.weights_version)

    def serving_stats(self) -> ServingStats:
        """Returns how busy the engine was in the steps whose results were read."""
        return dataclasses.replace(
            self._host.stats, num_running=self.num_running, num_queued=self.num_queued
        )

    # From the queue to the last token, in the order in which a request meets these.

    def _plan(self, after: Read | None) -> Action:
        """Returns what is to be done next."""
        return schedule.plan(self.engine, self._settings, self._traffic, after)

    @property
    def _settings(self) -> schedule.Settings:
        """What the schedule keeps to."""
        most_read = self._warm_up.most_read
        return schedule.Settings(
            max_steps_ahead=self.max_steps_ahead,
            max_prefills=self.max_prefills,
            chunk_size=most_read or self.chunk_size,
            largest=most_read,
            prompts_in_steps=self.prompts_in_steps,
            step_widths=self.step_widths,
        )

    @property
    def _traffic(self) -> Traffic:
        """What the schedule knows."""
        return Traffic(
            slots=self._host.slots,
            returning=self._host.returning,
            waiting=self._warm_up.served_now(self._waiting.values()),
            client_of=self.client_of,
            prefill=self._device.prefill,
            kept=self._host.kept,
            ahead=[step.request_ids for step in self._device.ahead],
            has_updates=bool(self._host.updates),
        )

    def _dispatch_step(self) -> bool:
        """Reads prompts and dispatches a step, if one more is wanted; returns whether it did."""
        action = self._admit_queued()
        if isinstance(action, Step) and action.prompts.group:
            self._occupy(action.prompts.group)
        self._carry_out(action)
        return not isinstance(action, Wait)

    def _admit_queued(self) -> Action:
        """Reads prompts between steps, if there are any; returns what is to be done then."""
        action = self._plan(after=None)
        while isinstance(action, Read):
            # First, so that a failed call finds them in slots: see `after_failed_call`.
            self._occupy(action.prompts.group)
            self._carry_out(action)
            action = self._plan(after=action)
        return action

    def _carry_out(self, action: Action) -> None:
        """Calls the programs of an action; the requests whose prompts it reads are in slots."""
        match action:
            case Read(prompts):
                self._device.read(prompts)
                # A further chunk ends a row of failures; no `Step` reads for a request that has
                # some.
                if prompts.is_chunk:
                    for slot, end in zip(prompts.group, prompts.end, strict=True):
                        self._host = self._host.after_chunk(slot, end)
            case Step(num_drafts=num_drafts):
                # Chosen before anything is drafted, by the steps that were read.
                if action.max_drafts and self.draft_choice is not None:
                    num_drafts = self.draft_choice.next_for(action.max_drafts)
                self._device.step(action, num_drafts)
            case Masked():
                self._dispatch_masked(action)

    def _occupy(self, group: Mapping[int, ServedRequest]) -> None:
        """Puts requests into slots, from now on."""
        now = time.perf_counter()
        occupants = {slot: request.in_slot(now) for slot, request in group.items()}
        # Cut short after this line, requests are in both places, which `_settle` puts right.
        self._host = self._host.with_new(occupants)
        for request in occupants.values():
            self._waiting.pop(request.request_id, None)

    def _dispatch_masked(self, step: Masked) -> None:
        """Dispatches a step whose rows are masked by grammars.

        Where a pass may be narrow and drafts do not pay, only those are verified that are forced.
        """
        # A program drafts for all, the host walks each matcher along its request's drafts and makes
        # a mask for each row, and a second program verifies under the masks. The schedule asks for
        # this only where no step is ahead, so matchers get all tokens of their texts.
        num_drafts = 0
        if any(step.max_drafts.values()) or self.engine.exact:  # whose passes are all as wide
            num_drafts = self.engine.config.num_speculative_tokens
        ids = self._device.draft(step, num_drafts)  # [S, num_drafts]
        choice = self.draft_choice
        is_narrow = False
        if choice is not None and choice.may_be_narrow:
            is_narrow = choice.next_for([*step.max_drafts.values()]) == 0
        if is_narrow:
            ids = np.full_like(ids, PLACEHOLDER_TOKEN_ID)
            num_drafts = 0
        # Without a store no draft has a distribution: all are verified one-hot, forced or not.
        has_store = self._device.state(step.running.values()).store is not None
        drafts, failed = self._matchers.forced_drafts(step.running, ids, step.max_drafts, has_store)
        if is_narrow:
            # Rates would count a dropped draft as refused; they are learned of none that is forced.
            drafts = drafts._replace(is_forced=np.ones_like(drafts.is_forced))
        # A request whose matcher has failed has rows in this pass, which nobody reads.
        going_on = {slot: request for slot, request in step.running.items() if slot not in failed}
        self._device.verify(step, drafts, going_on, num_drafts)
        for slot, reason in failed.items():
            self._host = self._host.failed(slot, f"the matcher has failed: {reason}")
            self._empty(slot)

    def _read_step(self) -> None:
        """Reads the result of the oldest step ahead."""
        step = self._device.ahead[0]
        begin = time.perf_counter()
        # Waits until the device has come to the end of this step. Its errors show here, and concern
        # whoever runs: by now later steps may stand on what it left.
        with awaiting(self._traffic.running.values()):
            numbers, logprobs, rates = jax.device_get(step.result.for_host)
        now = time.perf_counter()
        host = self._host.after_step(
            step,
            numbers.tolist(),
            None if logprobs is None else logprobs.of_bits(),
            now=now,
            waited=now - begin,
            num_ahead=len(self._device.ahead) - 1,
        )
        updates = host.updates[len(self._host.updates) :]
        if self.draft_choice is not None and updates:
            has_drafts = any(update.num_proposed for update in updates)
            self.draft_choice.learn(rates, step.num_drafts, has_drafts)
        # The new record has no requests that have ended: their texts are put together here.
        by_id = {request.request_id: request for request in self._host.slots.values()}
        ended = [
            by_id[update.request_id].new_token_ids + update.token_ids
            for update in updates
            if update.finish_reason is not None
        ]
        # Cut short between these two, the step is not read twice: `_settle` drops `ahead`.
        self._host = host
        del self._device.ahead[0]
        self._remember(ended)

    def _remember(self, texts: list[list[int]]) -> None:
        """Lets a drafter with a history search what requests have generated."""
        if self.engine.drafter.serves.has_history:
            self._device.remember(texts)
            # The history is among the weights: else the next `drop` would forget the texts.
            self._host = self._host._replace(weights=self._device.weights)

    def _empty(self, slot: int) -> None:
        """Empties a slot on the device; its request has not ended, and has left it on the host."""
        self._device.empty(slot, self._traffic.running.values())

    # Interrupts and failed calls

    @contextlib.contextmanager
    def _changes(self) -> Iterator[None]:
        """Surrounds what changes requests, slots or the device; contains failed calls."""
        self._settle()
        # From here on the host and the device may differ. An exception other than `FailedCall`
        # leaves this False, and the next method that reads one of the two begins with `_settle`.
        self._is_whole = False
        try:
            with interrupts():
                yield
        except FailedCall as failed:
            # The requests of the call get an update each, or end. All who are in slots lose what
            # the device had of them, also those that were not in the call.
            self._host = self._host.after_failed_call(
                failed.request_ids, error=str(failed), max_retries=self.max_retries
            )
            self._settle()
        # All for whom the steps ahead have rows have ended, or were cancelled.
        if not self._host.slots:
            self._device.ahead.clear()
        self._is_whole = True

    def _settle(self) -> None:
        """Does what an exception asks for, an interrupt included, before anything else follows it.

        What is on the device may be half of one step and half of the next, so it is dropped. All
        that was read is in `_host`, which is as it was before a step or after it, because one
        assignment replaces it. So the requests in its slots go first in the queue, and are read
        again from their tokens. An exception while this is done does no harm: it is done again.
        """
        if self._is_whole:
            return
        self._device.drop(self._host)
        self._host = self._host.queued_first(sorted(self._host.slots)).without_kept()
        # Cut short within `_occupy`, some had got a slot and were still among those that wait.
        for request in self._host.returning:
            self._waiting.pop(request.request_id, None)
        self._is_whole = True
