"""The compiled programs of an engine, which all drivers of equal engines share, and their cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.acceptance import AcceptanceCounters
from jax_specdec._src.arrays import check_int
from jax_specdec._src.drafts.estimator import AcceptanceEstimator, TreeEstimator
from jax_specdec._src.emitted import StepRecord
from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec.lm.decoding.core import DecodeState, on_all_devices
from jax_specdec.lm.decoding.engine import Engine, NewRequests
from jax_specdec.lm.decoding.options import RequestOptions
from jax_specdec.lm.decoding.step_costs import ChunkCosts, StepCosts

_LONGEST_TIMING = 0.1
"""Seconds that calls may take together when they are dispatched at once to be timed."""

release = jax.jit(Engine.release, static_argnums=0, donate_argnames="state")


class StepResult(NamedTuple):
    """What the host reads of a step. No later call donates its buffers, as those of the state are.

    Attributes:
      numbers: ``[S, K+6]`` int32, or of trees fewer columns: the tokens kept, their number, drafts
        proposed and accepted, whether the request is done, and its status. One array, for one copy
        to the host.
      logprobs: of the tokens kept; None unless asked for.
      rates: ``[K]`` float32, those of the estimator; None without one.
      counters: acceptance of all steps so far.
      estimator: of the state.
    """

    numbers: jax.Array
    logprobs: TokenLogprobs | None
    rates: jax.Array | None
    counters: AcceptanceCounters
    estimator: AcceptanceEstimator | TreeEstimator | None

    @property
    def for_host(self) -> tuple[jax.Array, TokenLogprobs | None, jax.Array | None]:
        """What is copied to the host after every step."""
        return self.numbers, self.logprobs, self.rates


def remember(engine: Engine, draft_params: Any, token_ids: Any) -> Any:
    """The drafter's params, with what a request generated, padded with -1 to `max_length`.

    Not one program, which would copy the weights that do not change: the drafter has its own.
    """
    return engine.drafter.add(draft_params, token_ids)


def _with_result(state: DecodeState, record: StepRecord) -> tuple[DecodeState, StepResult]:
    batch, estimator = state.batch, state.estimator
    columns = (
        record.num_kept,
        record.num_proposed,
        record.num_accepted,
        batch.done.astype(jnp.int32),
        batch.status,
    )
    numbers = jnp.concatenate([record.token_ids, jnp.stack(columns, axis=1)], axis=1)
    rates = None if estimator is None else estimator.rates
    return state, StepResult(numbers, record.logprobs, rates, state.counters, estimator)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRequests:
    """`NewRequests` as one array of the host, for one copy to the device.

    A copy of each of its arrays takes a call longer than to dispatch a step.

    Attributes:
      words: ``[N]`` uint32, the arrays one after another; a bool is a word.
      layout: static: the structure, and the shape and dtype of each array.
    """

    words: Any
    layout: tuple[Any, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, requests: NewRequests) -> PackedRequests:
        """NumPy arrays of 32 bits, or of bools, packed."""
        leaves, treedef = jax.tree.flatten(requests)
        words = [
            x.astype(np.uint32) if x.dtype == bool else np.ascontiguousarray(x).view(np.uint32)
            for x in leaves
        ]
        layout = treedef, tuple((x.shape, x.dtype) for x in leaves)
        return cls(np.concatenate([x.ravel() for x in words]), layout)

    @property
    def requests(self) -> NewRequests:
        """What was packed, as arrays of the device."""
        treedef, kinds = self.layout
        ends = np.cumsum([math.prod(shape) for shape, _ in kinds])
        leaves = []
        for (shape, dtype), end in zip(kinds, ends.tolist(), strict=True):
            words = self.words[end - math.prod(shape) : end].reshape(shape)
            is_flag = jnp.issubdtype(dtype, jnp.bool_)
            leaves.append(words != 0 if is_flag else lax.bitcast_convert_type(words, dtype))
        requests: NewRequests = jax.tree.unflatten(treedef, leaves)
        return requests


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def admit(
    engine: Engine, params: Any, draft_params: Any, state: DecodeState, packed: PackedRequests
) -> DecodeState:
    """`Engine.admit`."""
    return engine.admit(params, draft_params, state, packed.requests)


@functools.partial(jax.jit, static_argnums=0)
def init(engine: Engine, params: Any, draft_params: Any, **kept: Any) -> DecodeState:
    """Empty slots.

    Args:
      engine: static.
      params: the target's weights.
      draft_params: the drafter's weights.
      **kept: fields of `DecodeState` that are not to begin anew.
    """
    return dataclasses.replace(engine.init_state(draft_params, params), **kept)


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("all_neutral", "num_drafts"),
    donate_argnames="state",
)
def step(
    engine: Engine,
    params: Any,
    draft_params: Any,
    state: DecodeState,
    packed: PackedRequests | None = None,
    *,
    all_neutral: bool = False,
    num_drafts: int | None = None,
) -> tuple[DecodeState, StepResult]:
    """A step, which may read prompts too, and what the host reads of it."""
    chosen: Any = dict(all_neutral=all_neutral, num_drafts=num_drafts)
    requests = None if packed is None else packed.requests
    return _with_result(*engine.step(params, draft_params, state, requests, **chosen))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def draft(
    engine: Engine,
    draft_params: Any,
    state: DecodeState,
    features: jax.Array | None,
    num_features: jax.Array | None,
    has_grammar: Any,
) -> DecodeState:
    """The first half of a step. Features end here, so they cannot be donated with the state.

    Requests with a grammar, ``[S]`` bool, get chains of drafts, which the host can follow.
    """
    state = dataclasses.replace(state, features=features, num_features=num_features)
    return engine.draft(draft_params, state).with_chains(has_grammar)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def masked_step(
    engine: Engine, params: Any, draft_params: Any, state: DecodeState, token_bitmask: Any
) -> tuple[DecodeState, StepResult]:
    """A step without drafts whose rows are masked, and what the host reads of it."""
    state = engine.draft(draft_params, state, num_drafts=0)
    return _with_result(*engine.verify(params, state, token_bitmask))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def verify(
    engine: Engine,
    params: Any,
    state: DecodeState,
    token_ids: Any,
    is_forced: Any,
    token_bitmask: Any,
) -> tuple[DecodeState, StepResult]:
    """The second half of a step with `ForcedDrafts`, and what the host reads of it."""
    state = dataclasses.replace(state, draft_token_ids=token_ids)
    if state.draft_parents is not None:
        # `with_chains` has changed the ranks of drafts: an estimator does not learn from those.
        is_forced |= state.are_chains
    return _with_result(*engine.verify(params, state, token_bitmask, is_forced))


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def _occupied(engine: Engine, state: DecodeState) -> DecodeState:
    """All slots busy, with sequences of half the length."""
    batch = state.batch
    most = jnp.full_like(batch.lengths, engine.max_length)
    batch = dataclasses.replace(
        batch,
        lengths=most // 2,
        done=jnp.zeros_like(batch.done),
        options=dataclasses.replace(batch.options, max_lengths=most),
    )
    return dataclasses.replace(state, batch=batch)


def measure_steps(
    engine: Engine, params: Any, draft_params: Any = None, *, num_steps: int = 8
) -> StepCosts:
    """Measure a step with each number of drafts of an engine's `draft_budget`, all slots busy.

    Makes a state of its own, and compiles what was not compiled. `EngineDriver.warm_up` calls this
    if the driver has no costs yet. Each number is measured six times, and the least time counts.

    Args:
      engine: with a `draft_budget`.
      params: the target's weights.
      draft_params: the drafter's weights.
      num_steps: the steps that are dispatched at once and timed together, at least 1; fewer where
        they would take longer than 0.1 s.

    Returns:
      The costs. `StepCosts.save` keeps them for a later driver.

    Raises:
      TypeError: `num_steps` is not an int.
      ValueError: the engine has no `draft_budget`, or `num_steps` is below 1.

    Example:
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()  # the smaller one
      >>> engine = lm.Engine(
      ...     model, lm.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32, draft_budget=(0, 2))
      >>> costs = lm.measure_steps(engine, params)
      >>> costs.num_drafts
      (0, 2)
    """
    check_int("num_steps", num_steps)
    if engine.draft_budget is None:
        raise ValueError("engine must have a draft_budget, but it is None")
    calls = _Calls(engine, params, draft_params)
    # The numbers take turns, so that a machine that is busy for a while slows all of them.
    rounds = [
        [calls.seconds_of_step(n, num_calls=num_steps) for n in engine.draft_budget]
        for _ in range(2)
    ]
    return StepCosts(engine.num_slots, engine.draft_budget, tuple(map(min, *rounds)))


def measure_chunks(
    engine: Engine, params: Any, draft_params: Any = None, *, in_steps: bool = False
) -> ChunkCosts:
    """Measure a step, all slots busy, and what it costs to read a prompt of each of `chunk_sizes`.

    The step has the most drafts. Sizes beyond the first that is too large are not measured.

    Args:
      engine: that is measured.
      params: the target's weights.
      draft_params: the drafter's weights.
      in_steps: whether steps read prompts; a prompt then costs what such a step takes longer.
    """
    calls = _Calls(engine, params, draft_params)
    costs = ChunkCosts(calls.seconds_of_step(full_budget(engine)), {}, in_steps)
    for size in engine.chunk_sizes:
        if in_steps:
            costs.seconds[size] = calls.seconds_of_step(full_budget(engine), size) - costs.step
        else:
            costs.seconds[size] = calls.seconds_of_prompt(size)
        if costs.largest < size:
            break
    return costs


def full_budget(engine: Engine) -> int | None:
    """As a step's `num_drafts`, the most of a `draft_budget`; None, which is all, without one."""
    return None if engine.draft_budget is None else engine.draft_budget[-1]


class _Calls:
    """Times calls on a state of its own, all slots busy; compiles what was not compiled."""

    def __init__(self, engine: Engine, params: Any, draft_params: Any) -> None:
        self._engine = engine
        self._weights = on_all_devices((params, draft_params), engine.model)
        self._state = on_all_devices(init(engine, *self._weights), engine.model)

    def seconds_of_step(
        self, num_drafts: int | None, prompt_size: int = 0, *, num_calls: int = 8
    ) -> float:
        """Seconds of a step that also reads a prompt, or none if `prompt_size` is 0."""
        engine = self._engine
        static: Any = dict(all_neutral=engine.request_options, num_drafts=num_drafts)
        requests = None
        if prompt_size:
            static["all_neutral"] = False
            requests = self._request(prompt_size)

        def call(state: DecodeState) -> DecodeState:
            return step(engine, *self._weights, state, requests, **static)[0]

        return self._least(call, num_calls)

    def seconds_of_prompt(self, size: int, num_calls: int = 8) -> float:
        """Seconds of a call of `admit` with one prompt."""
        engine, request = self._engine, self._request(size)
        return self._least(lambda x: admit(engine, *self._weights, x, request), num_calls)

    def _request(self, size: int) -> PackedRequests:
        zero: Any = np.zeros(1, np.int32)
        prompts: Any = np.zeros((1, size), np.int32)
        request = NewRequests(
            slots=zero,
            prompts=prompts,
            lengths=zero + size,
            keys=zero.astype(np.uint32),
            options=self._engine.options_of([RequestOptions()], [size]),
            start=zero,
            next_token_ids=zero,
        )
        return PackedRequests.of(request)

    def _least(self, call: Callable[[DecodeState], DecodeState], num_calls: int) -> float:
        """Seconds of a call, the least of three times `num_calls` that are dispatched at once."""

        def seconds(num_calls: int) -> float:
            self._state = _occupied(self._engine, self._state)
            jax.block_until_ready(self._state)
            begin = time.perf_counter()
            for _ in range(num_calls):
                self._state = call(self._state)
            jax.block_until_ready(self._state)
            return (time.perf_counter() - begin) / num_calls

        seconds(1)  # compiles
        num_calls = min(num_calls, max(1, int(_LONGEST_TIMING / seconds(1))))
        return min(seconds(num_calls) for _ in range(3))
