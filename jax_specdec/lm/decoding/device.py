"""What a driver has on the device: a state and steps ahead, and the calls that change them.

`EngineDriver` has a `DeviceState` do what `schedule.plan` has decided: `read` prompts, make a
`step`, or `draft` and `verify` one whose rows are masked by grammars. Each calls `programs`, which
return before the device has run them. The state is donated to every call: its arrays are deleted,
and those that the call returns take their place. So no call can be tried again: after an exception
the driver calls `drop`, and the requests are read again from their tokens.

A `Rehearsal` compiles the same programs for arrays that are not there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.logits.grammar import ForcedDrafts
from jax_specdec.lm.decoding import programs
from jax_specdec.lm.decoding.behind import Behind
from jax_specdec.lm.decoding.bookkeeping import HostState, ServedRequest, StepAhead, StepResult
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.failures import FailedCall, awaiting, interrupts
from jax_specdec.lm.decoding.schedule import (
    Action,
    ChunkedPrefill,
    Masked,
    Prompts,
    Read,
    Step,
)
from jax_specdec.lm.decoding.state import DecodeState, Drafted
from jax_specdec.lm.decoding.weights import on_all_devices, put_like

Requests = Iterable[ServedRequest]


@functools.lru_cache(64)
def _array_of(slots: tuple[int, ...]) -> jax.Array:
    """Returns slots on the device: a copy takes a call longer than to dispatch a step."""
    return jax.device_put(np.array(slots, np.int32))


def _of_rows(
    drafts: ForcedDrafts, rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns drafts ``[R, K]``, which are forced, and masks ``[R*(K+1), ..]``, of R slots."""
    # The host makes drafts and masks for all S slots, in the order of the slots.
    if rows is None:
        return drafts.token_ids, drafts.is_forced, drafts.token_bitmask
    size, k = drafts.token_ids.shape
    # [S*(K+1), ..] -> [S, K+1, ..] -> [R*(K+1), ..]
    mask = drafts.token_bitmask.reshape(size, k + 1, -1)[rows]
    return drafts.token_ids[rows], drafts.is_forced[rows], mask.reshape(-1, mask.shape[2])


class DeviceState:
    """The state of an engine and its steps ahead; all of it can be dropped at any time.

    Each method calls programs that concern some requests, and raises `FailedCall` for these
    whatever a program says, unless it cannot be traced.

    Attributes:
      weights: of the target and of the drafter; those of the host, or with a longer history.
      prefill: the long prompt that is being read.
      ahead: the steps that were dispatched and not read, the oldest first.
    """

    def __init__(self, engine: Engine, host: HostState) -> None:
        self._engine = engine
        self.ahead: list[StepAhead] = []
        # Where narrow steps are compiled; None: with the first call, as all other programs.
        self.behind = Behind() if jax.default_backend() == "cpu" else None
        self.drop(host)

    def close(self) -> None:
        """Ends the thread in which programs are compiled; what needs it starts another."""
        if self.behind is not None:
            self.behind.close()

    def drop(self, host: HostState) -> None:
        """Drops all; a state of empty slots has the weights of `host`, and goes on counting."""
        # None: the next call that needs a state makes one.
        self._state: DecodeState | None = None
        self._drafted: Drafted | None = None  # between the halves of a masked step
        self._take(host)
        self.prefill: ChunkedPrefill | None = None
        self.ahead.clear()

    def _take(self, host: HostState) -> None:
        self.weights = host.weights
        # What a new state begins with: acceptance is counted on from the last step that was read.
        self._counts = dict(counters=host.counters, draft_rates=host.draft_rates)

    def go_on(self, host: HostState) -> None:
        """Goes on with the caches that there are, under the weights and counts of `host`."""
        self._take(host)
        if self._state is None:
            return
        # In arrays of their own, for a step donates its state, and `host` must keep those it has;
        # and placed as those before, so that nothing is compiled for other places.
        held = {name: getattr(self._state, name) for name in self._counts}
        counts = jax.tree.map(put_like, jax.device_get(self._counts), held)
        self._state = dataclasses.replace(self._state, **counts)

    def state(self, requests: Requests) -> DecodeState:
        """Returns the state, of empty slots if it was dropped."""
        if self._state is None:
            # The program copies the counts: those of the state are donated, those of the host not.
            state = self._call(requests, programs.init, *self.weights, **self._counts)
            self._state = on_all_devices(state, self._engine.model)
        return self._state

    def read(self, prompts: Prompts) -> None:
        """Reads prompts between two steps."""
        requests = prompts.group.values()
        # Copies come first: the prompts are read behind the rows that were copied.
        state = self._copied(prompts.copies, requests)
        packed = programs.pack(self._engine, prompts)
        self._state = self._call(requests, programs.admit, *self.weights, state, packed)
        self.prefill = prompts.rest

    def step(self, step: Step, num_drafts: int | None) -> None:
        """Dispatches a step, which may read prompts."""
        requests = [*step.running.values(), *step.prompts.group.values()]
        state = self._copied(step.prompts.copies, requests)
        packed = programs.pack(self._engine, step.prompts) if step.prompts.group else None
        static = dict(all_neutral=step.all_neutral, num_drafts=num_drafts)
        args: tuple[Any, ...] = (*self.weights, state, packed)
        program = None
        if step.slots is not None:
            # A step of R slots, if its program is there by now; else the step of all S slots, which
            # serves the same requests. So nobody waits for the thread that compiles it.
            narrow = *args, _array_of(step.slots)
            program = self._narrow("step", len(step.slots), *narrow, **static)
            args = args if program is None else narrow
        state, result = self._call(requests, program or programs.step, *args, **static)
        self.prefill = step.prompts.rest
        self._add_step(step.running, state, result, num_drafts)

    def _copied(self, copies: Iterable[tuple[int, int]], requests: Requests) -> DecodeState:
        """Returns the state after slots were copied to others, one after another.

        Steps ahead do no harm. The device runs calls in their order; and what a step writes for a
        request, also for one that has ended, begins at its newest token, or a draft model's at the
        token before, which gets the same row again. All rows that the host knows of lie before.
        The step that reads the rest of a prompt drafts first: see `programs.copy`.
        """
        for pair in copies:
            slots = np.array(pair, np.int32)  # [2]
            # The state is replaced each time: the next copy may be from a slot that this one fills.
            self._state = self._call(requests, programs.copy, self.state(requests), slots)
        return self.state(requests)

    def _narrow(self, name: str, width: int, *args: Any, **static: Any) -> Any:
        """Returns the program of a step of some slots; None while it is compiled.

        Args:
          name: of the program.
          width: how many slots there are.
          *args: for it.
          **static: for it.
        """
        program: Any = getattr(programs, name)
        # Compiled by `warm_up`, or by the first call, which waits.
        if self.behind is None:
            return program
        # What the shapes of its arrays depend on, for one engine.
        kind = name, width, *static.values()
        return self.behind.get(kind, program, self._engine, *args, **static)

    def draft(self, step: Masked, num_drafts: int) -> np.ndarray:
        """Drafts for a step; returns the drafts, ``[S, num_drafts]``, and waits for them."""
        num_slots = self._engine.num_slots
        drafts = np.full((num_slots, num_drafts), PLACEHOLDER_TOKEN_ID, np.int32)
        # Without drafts there is one program for all of the step: see `verify`.
        if not num_drafts:
            return drafts
        requests = step.running.values()
        state = self.state(requests)
        matched = [slot for slot, one in step.running.items() if one.matching is not None]
        has_grammar = np.isin(np.arange(num_slots), matched)  # [S]
        _, draft_params = self.weights
        # Features are an argument beside the state, which is donated: they end in this half, and
        # JAX warns of donated arrays whose room nothing that is returned can take.
        without = dataclasses.replace(state, features=None)
        args: tuple[Any, ...] = draft_params, without, state.features, has_grammar
        program = None
        if step.slots is not None:
            narrow = *args, _array_of(step.slots)
            program = self._narrow_halves(len(step.slots), narrow)
            args = args if program is None else narrow
        self._state, self._drafted = self._call(requests, program or programs.draft, *args)
        with awaiting(requests):
            ids, rows = jax.device_get((self._drafted.token_ids, self._drafted.slots))
        # [R, K] -> [S, K]: -1 in slots that take no part
        drafts[slice(None) if rows is None else rows] = ids
        return drafts

    def _narrow_halves(self, width: int, args: Any) -> Any:
        """Returns the first half of a masked step of some slots, if the second is there, too."""
        # On a GPU two programs more of each width would have to be compiled before the driver
        # serves, to shorten steps whose host waits for masks.
        if self.behind is None:
            return None
        program = self._narrow("draft", width, *args)
        if program is None:
            return None
        # The second half takes the drafts of R slots, so the first must not be narrow without it.
        # It is compiled for the shapes that the first returns, and for these, as `verify` makes
        # them.
        k = self._engine.config.num_speculative_tokens
        num_words = -(-self._engine.model.vocab_size // 32)
        forced = (
            np.zeros((width, k), np.int32),
            np.zeros((width,), bool),
            np.zeros((width * (k + 1), num_words), np.uint32),
        )
        params, _ = self.weights
        is_there = self._narrow("verify", width, params, *program.returned, *forced) is not None
        return program if is_there else None

    def verify(
        self,
        step: Masked,
        drafts: ForcedDrafts,
        running: Mapping[int, ServedRequest],
        num_drafts: int,
    ) -> None:
        """Dispatches the second half of a step, or all of a step without drafts.

        Args:
          step: whose requests take part.
          drafts: with the masks of its rows.
          running: those of the requests that go on, by slot.
          num_drafts: of a request at most, as the step is noted.
        """
        requests = step.running.values()
        state = self.state(requests)
        params, draft_params = self.weights
        program: Any = programs.verify
        args: tuple[Any, ...]
        # [S, K] or [S, 0]: `draft` was called with K or with 0
        if drafts.token_ids.shape[1]:
            drafted = self._drafted
            assert drafted is not None
            # As wide as the first half was. A narrow one is compiled: `_narrow_halves` has seen it.
            args = params, state, drafted, *_of_rows(drafts, jax.device_get(drafted.slots))
            if drafted.slots is not None:
                program = self._narrow("verify", drafted.slots.shape[0], *args)
        else:
            # Drafting none and verifying are one program, because the mask of each request's one
            # row depends on no draft: it was made before the call.
            program = programs.masked_step
            args = params, draft_params, state, drafts.token_bitmask
            if step.slots is not None and self.behind is not None:
                *_, mask = _of_rows(drafts, np.array(step.slots))
                narrow = *args[:-1], mask, _array_of(step.slots)
                compiled = self._narrow("masked_step", len(step.slots), *narrow)
                program, args = (program, args) if compiled is None else (compiled, narrow)
        state, result = self._call(requests, program, *args)
        self._add_step(running, state, result, num_drafts)

    def _add_step(
        self,
        running: Mapping[int, ServedRequest],
        state: DecodeState,
        result: StepResult,
        num_drafts: int | None,
    ) -> None:
        """Notes a step that was dispatched; begins to copy what the host reads, without waiting."""
        self._state = state
        # Ids, because the slots may have other requests when the step is read.
        request_ids = {slot: request.request_id for slot, request in running.items()}
        self.ahead.append(StepAhead(result, request_ids, num_drafts))
        with awaiting(running.values()):
            for array in jax.tree.leaves(result.for_host):
                array.copy_to_host_async()

    def empty(self, slot: int, requests: Requests) -> None:
        """Empties a slot whose request has not ended, and has left it on the host."""
        # Its prompt was still being read: another long one may be begun.
        if self.prefill is not None and self.prefill.slot == slot:
            self.prefill = None
        here = np.arange(self._engine.num_slots) == slot  # [S]
        self._state = self._call(requests, programs.release, self.state(requests), here)

    def remember(self, texts: Iterable[list[int]]) -> None:
        """Lets the drafter search what requests have generated; steps ahead do not do so yet."""
        # The texts become a part of the drafter's weights, which the next calls take as an
        # argument.
        params, draft_params = self.weights
        for text in texts:
            # [L]: one shape for all, padded with -1
            token_ids = np.array(text + [-1] * (self._engine.max_length - len(text)), np.int32)
            draft_params = self._call((), programs.remember, draft_params, token_ids)
        self.weights = params, draft_params

    def _call(
        self, requests: Requests, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        program = functools.partial(function, self._engine, **named)
        try:
            with interrupts():
                result = program(*args)
            # A call returns before the device has run it, so an error shows where its result is
            # next used, and concerns whoever is in that call. Where a request has failed before,
            # the host waits, so that an error of this call concerns those that are in it.
            if any(request.num_failures for request in requests):
                jax.block_until_ready(result)
            return result
        except Exception as error:
            # Three causes. Weights that somebody has deleted: no retry helps, so the caller has to
            # know.
            for name, weights in zip(("params", "draft_params"), self.weights, strict=True):
                if any(one.is_deleted() for one in jax.tree.leaves(weights)):
                    raise RuntimeError(
                        f"{name} must be on the device, but arrays of them were deleted, by a "
                        "donation or by a set_params that failed: call set_params with all of them"
                    ) from error
            # A program that cannot be traced: tracing it again raises the same. This reads shapes
            # alone, which arrays have that were donated to the call.
            jax.eval_shape(program, *args)
            # All else comes from compiling or running it, as too little memory does.
            raise FailedCall(error, requests) from error


class Rehearsal(DeviceState):
    """A device that compiles what it is called for, and runs nothing: its arrays are shapes.

    The programs are then there for a `DeviceState` of the same engine, which calls them by
    `jax.jit`.
    """

    def __init__(self, engine: Engine, host: HostState, state: DecodeState) -> None:
        super().__init__(engine, host)
        # It is called by the thread of another one's `behind`, and compiles where it is called.
        self.behind = None
        self.weights = jax.tree.map(_without_values, self.weights)
        self._state = jax.tree.map(_without_values, state)

    def _call(
        self, requests: Requests, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        del requests
        program: Any = function
        # A later call with arrays of these shapes, dtypes and places finds it compiled.
        lowered = program.lower(self._engine, *args, **named)
        lowered.compile()
        return jax.tree.map(_without_values, lowered.out_info)

    def _add_step(
        self,
        running: Mapping[int, ServedRequest],
        state: DecodeState,
        result: StepResult,
        num_drafts: int | None,
    ) -> None:
        del running, result, num_drafts
        self._state = state

    def compile(self, action: Action) -> None:
        """Compiles the programs of an action."""
        match action:
            case Read(prompts):
                self.read(prompts)
            case Step(num_drafts=num_drafts):
                self.step(action, num_drafts)
            case Masked():
                self.masked_step(action)

    def masked_step(self, step: Masked) -> None:
        """Compiles a step whose rows are masked: both halves, or all of one without drafts."""
        num_slots = self._engine.num_slots
        # As `EngineDriver._dispatch_masked` has it: K drafts for all, or none.
        num_drafts = max(step.max_drafts.values()) and self._engine.config.num_speculative_tokens
        num_words = -(-self._engine.model.vocab_size // 32)
        # Of these only shapes and dtypes count; `draft` returns zeros, which nobody computed.
        drafts = ForcedDrafts(
            token_ids=self.draft(step, num_drafts),
            is_forced=np.zeros((num_slots,), bool),
            token_bitmask=np.zeros((num_slots * (num_drafts + 1), num_words), np.uint32),
        )
        self.verify(step, drafts, {}, num_drafts)


def _without_values(x: Any) -> Any:
    """Returns an array of zeros in place of another, in no memory; a shape in place of keys."""
    # NumPy has no dtype for keys. Nothing reads those on the host.
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    # One zero, with strides of 0: the weights of a model take no room a second time.
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)
