"""The compiled programs of an engine, which all drivers of equal engines share, and their cost."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.acceptance import AcceptanceCounters
from jax_specdec._src.arrays import check_int
from jax_specdec._src.drafts.estimator import AcceptanceEstimator, TreeEstimator
from jax_specdec._src.emitted import StepRecord
from jax_specdec._src.logprobs import TokenLogprobs
from jax_specdec.lm.decoding.core import Caches, DecodeState, on_all_devices
from jax_specdec.lm.decoding.engine import Engine, NewRequests
from jax_specdec.lm.decoding.options import RequestOptions
from jax_specdec.lm.decoding.step_costs import ChunkCosts, StepCosts

_LONGEST_TIMING = 0.1
"""Seconds that calls may take together when they are dispatched at once to be timed."""

admit = jax.jit(Engine.admit, static_argnums=0, donate_argnames="state")
prefill_chunk = jax.jit(Engine.prefill_chunk, static_argnums=0, donate_argnames="caches")
insert = jax.jit(Engine.insert, static_argnums=0, donate_argnames="state")
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
    drafter: Any = engine.drafter
    return drafter.add(draft_params, token_ids)


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


@functools.partial(jax.jit, static_argnums=0, static_argnames="has_chunks")
def init(
    engine: Engine, params: Any, draft_params: Any, *, has_chunks: bool = False, **kept: Any
) -> tuple[DecodeState, Caches | None]:
    """Empty slots, and caches for a prompt that is read in chunks if there are such.

    Args:
      engine: static.
      params: the target's weights.
      draft_params: the drafter's weights.
      has_chunks: static.
      **kept: fields of `DecodeState` that are not to begin anew.
    """
    state = dataclasses.replace(engine.init_state(draft_params, params), **kept)
    return state, engine.init_caches(params=params) if has_chunks else None


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
    *,
    all_neutral: bool = False,
    num_drafts: int | None = None,
) -> tuple[DecodeState, StepResult]:
    """A step, and what the host reads of it."""
    chosen: Any = dict(all_neutral=all_neutral, num_drafts=num_drafts)
    return _with_result(*engine.step(params, draft_params, state, **chosen))


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
        nodes = jnp.arange(state.draft_parents.shape[1], dtype=jnp.int32)
        is_forced |= jnp.all(state.draft_parents == nodes[None, :], axis=1)
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
    if the driver has no costs yet. Each number is measured three times, and the least time counts.

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
    seconds = [calls.seconds_of_step(n, num_steps) for n in engine.draft_budget]
    return StepCosts(engine.num_slots, engine.draft_budget, tuple(seconds))


def measure_chunks(engine: Engine, params: Any, draft_params: Any = None) -> ChunkCosts:
    """Measure a step, all slots busy, and calls that read a prompt of each of `chunk_sizes`.

    The step has the most drafts. Sizes beyond the first that is too large are not measured.
    """
    calls = _Calls(engine, params, draft_params)
    num_drafts = None if engine.draft_budget is None else engine.draft_budget[-1]
    costs = ChunkCosts(calls.seconds_of_step(num_drafts), {})
    for size in engine.chunk_sizes:
        costs.seconds[size] = calls.seconds_of_prompt(size)
        if costs.largest < size:
            break
    return costs


class _Calls:
    """Times calls on a state of its own, all slots busy; compiles what was not compiled."""

    def __init__(self, engine: Engine, params: Any, draft_params: Any) -> None:
        self._engine = engine
        self._weights = on_all_devices((params, draft_params), engine.model)
        self._state = on_all_devices(init(engine, *self._weights)[0], engine.model)

    def seconds_of_step(self, num_drafts: int | None, num_calls: int = 8) -> float:
        engine = self._engine
        static: Any = dict(all_neutral=engine.request_options, num_drafts=num_drafts)
        return self._least(lambda x: step(engine, *self._weights, x, **static)[0], num_calls)

    def seconds_of_prompt(self, size: int, num_calls: int = 8) -> float:
        engine = self._engine
        arrays: dict[str, Any] = dict(
            slots=np.zeros(1, np.int32),
            prompts=np.zeros((1, size), np.int32),
            lengths=np.array([size], np.int32),
            keys=np.zeros(1, np.uint32),
        )
        request = NewRequests(**arrays, options=engine.options_of([RequestOptions()], [size]))
        return self._least(lambda x: admit(engine, *self._weights, x, request), num_calls)

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
