"""What a driver has on the device: a state and steps ahead, and the calls that change them."""

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
from jax_specdec.lm.decoding.core import on_all_devices
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
from jax_specdec.lm.decoding.weights import put_like

Requests = Iterable[ServedRequest]


@functools.lru_cache(64)
def _array_of(slots: tuple[int, ...]) -> jax.Array:
    """Returns slots on the device: a copy takes a call longer than to dispatch a step."""
    return jax.device_put(np.array(slots, np.int32))


def _of_rows(
    drafts: ForcedDrafts, rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns drafts ``[R, K]``, which are forced, and masks ``[R*(K+1), ..]``, of R slots."""
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
        self._state: DecodeState | None = None
        self._drafted: Drafted | None = None  # between the halves of a masked step
        self._take(host)
        self.prefill: ChunkedPrefill | None = None
        self.ahead.clear()

    def _take(self, host: HostState) -> None:
        self.weights = host.weights
        self._kept = dict(counters=host.counters, draft_rates=host.draft_rates)

    def go_on(self, host: HostState) -> None:
        """Goes on with the caches that there are, under the weights and counts of `host`."""
        self._take(host)
        if self._state is None:
            return
        # In arrays of their own, for a step donates its state, and placed as those before.
        own = {name: getattr(self._state, name) for name in self._kept}
        counts = jax.tree.map(put_like, jax.device_get(self._kept), own)
        self._state = dataclasses.replace(self._state, **counts)

    def state(self, requests: Requests) -> DecodeState:
        """Returns the state, of empty slots if it was dropped."""
        if self._state is None:
            state = self._call(requests, programs.init, *self.weights, **self._kept)
            self._state = on_all_devices(state, self._engine.model)
        return self._state

    def read(self, prompts: Prompts) -> None:
        """Reads prompts between two steps."""
        requests = prompts.group.values()
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
        own = None
        if step.slots is not None:
            narrow = *args, _array_of(step.slots)
            own = self._narrow("step", len(step.slots), *narrow, **static)
            args = args if own is None else narrow
        state, result = self._call(requests, own or programs.step, *args, **static)
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
            slots = np.array(pair, np.int32)
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
        if self.behind is None:
            return program
        kind = name, width, *static.values()
        return self.behind.get(kind, program, self._engine, *args, **static)

    def draft(self, step: Masked, num_drafts: int) -> np.ndarray:
        """Drafts for a step; returns the drafts, ``[S, num_drafts]``, and waits for them."""
        num_slots = self._engine.num_slots
        found = np.full((num_slots, num_drafts), PLACEHOLDER_TOKEN_ID, np.int32)
        if not num_drafts:
            return found
        requests = step.running.values()
        state = self.state(requests)
        matched = [slot for slot, one in step.running.items() if one.matching is not None]
        has_grammar = np.isin(np.arange(num_slots), matched)  # [S]
        _, draft_params = self.weights
        without = dataclasses.replace(state, features=None)
        args: tuple[Any, ...] = draft_params, without, state.features, has_grammar
        own = None
        if step.slots is not None:
            narrow = *args, _array_of(step.slots)
            own = self._narrow_halves(len(step.slots), narrow)
            args = args if own is None else narrow
        self._state, self._drafted = self._call(requests, own or programs.draft, *args)
        with awaiting(requests):
            ids, rows = jax.device_get((self._drafted.token_ids, self._drafted.slots))
        found[slice(None) if rows is None else rows] = ids
        return found

    def _narrow_halves(self, width: int, args: Any) -> Any:
        """Returns the first half of a masked step of some slots, if the second is there, too."""
        if self.behind is None:
            return None  # two programs more for a host that waits for masks
        own = self._narrow("draft", width, *args)
        if own is None:
            return None
        k = self._engine.config.num_speculative_tokens
        num_words = -(-self._engine.model.vocab_size // 32)
        forced = (
            np.zeros((width, k), np.int32),
            np.zeros((width,), bool),
            np.zeros((width * (k + 1), num_words), np.uint32),
        )
        params, _ = self.weights
        is_there = self._narrow("verify", width, params, *own.returned, *forced) is not None
        return own if is_there else None

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
        if drafts.token_ids.shape[1]:
            drafted = self._drafted
            assert drafted is not None
            args = params, state, drafted, *_of_rows(drafts, jax.device_get(drafted.slots))
            if drafted.slots is not None:
                program = self._narrow("verify", drafted.slots.shape[0], *args)
        else:
            program = programs.masked_step
            args = params, draft_params, state, drafts.token_bitmask
            if step.slots is not None and self.behind is not None:
                *_, mask = _of_rows(drafts, np.array(step.slots))
                narrow = *args[:-1], mask, _array_of(step.slots)
                own = self._narrow("masked_step", len(step.slots), *narrow)
                program, args = (program, args) if own is None else (own, narrow)
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
        request_ids = {slot: one.request_id for slot, one in running.items()}
        self.ahead.append(StepAhead(result, request_ids, num_drafts))
        with awaiting(running.values()):
            for array in jax.tree.leaves(result.for_host):
                array.copy_to_host_async()

    def empty(self, slot: int, requests: Requests) -> None:
        """Empties a slot whose request has not ended, and has left it on the host."""
        if self.prefill is not None and self.prefill.slot == slot:
            self.prefill = None
        here = np.arange(self._engine.num_slots) == slot  # [S]
        self._state = self._call(requests, programs.release, self.state(requests), here)

    def remember(self, texts: Iterable[list[int]]) -> None:
        """Lets the drafter search what requests have generated; steps ahead do not do so yet."""
        params, draft_params = self.weights
        for text in texts:
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
            if any(one.num_failures for one in requests):
                jax.block_until_ready(result)  # or a failure would show later, and concern others
            return result
        except Exception as error:
            for name, weights in zip(("params", "draft_params"), self.weights, strict=True):
                if any(one.is_deleted() for one in jax.tree.leaves(weights)):
                    raise RuntimeError(
                        f"{name} must be on the device, but arrays of them were deleted, by a "
                        "donation or by a set_params that failed: call set_params with all of them"
                    ) from error
            jax.eval_shape(program, *args)  # raises what is wrong with the program
            raise FailedCall(error, requests) from error


class Rehearsal(DeviceState):
    """A device that compiles what it is called for, and runs nothing: its arrays are shapes.

    The programs are then there for a `DeviceState` of the same engine, which calls them by
    `jax.jit`.
    """

    def __init__(self, engine: Engine, host: HostState, state: DecodeState) -> None:
        super().__init__(engine, host)
        self.behind = None
        self.weights = jax.tree.map(_without_values, self.weights)
        self._state = jax.tree.map(_without_values, state)

    def _call(
        self, requests: Requests, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        del requests
        program: Any = function
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
        num_drafts = max(step.max_drafts.values()) and self._engine.config.num_speculative_tokens
        num_words = -(-self._engine.model.vocab_size // 32)
        drafts = ForcedDrafts(
            token_ids=self.draft(step, num_drafts),
            is_forced=np.zeros((num_slots,), bool),
            token_bitmask=np.zeros((num_slots * (num_drafts + 1), num_words), np.uint32),
        )
        self.verify(step, drafts, {}, num_drafts)


def _without_values(x: Any) -> Any:
    """Returns an array of zeros in place of another, in no memory; a shape in place of keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)
