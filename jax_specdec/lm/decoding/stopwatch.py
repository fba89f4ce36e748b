"""The stop-watch of an engine: measures what steps and prompts cost.

`EngineDriver.warm_up` calls `measure_steps` where a `draft_budget` has no costs yet, and
`measure_chunks` where a `chunk_size` is to be chosen (`warm_up.WarmUp`). Both make a state of their
own, so there has to be room for it, and call the programs that serve.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import check_int
from jax_specdec.lm.decoding import programs
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.schedule import full_budget, has_neutral_steps, placeholders
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.decoding.step_costs import ChunkCosts, StepCosts
from jax_specdec.lm.decoding.weights import on_all_devices
from jax_specdec.lm.models.protocol import Params

_LONGEST_TIMING = 0.1
"""Seconds that calls may take together when they are dispatched at once to be timed."""


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def _occupied(engine: Engine, state: DecodeState) -> DecodeState:
    """Returns a state with all slots busy, with sequences of half the length."""
    batch = state.batch
    # All slots run, with texts of half the length, because on some devices attention takes as long
    # as the tokens that are there.
    max_lengths = jnp.full_like(batch.lengths, engine.max_length)  # [S]
    batch = dataclasses.replace(
        batch,
        lengths=max_lengths // 2,
        done=jnp.zeros_like(batch.done),
        options=dataclasses.replace(batch.options, max_lengths=max_lengths),
    )
    return dataclasses.replace(state, batch=batch)


def measure_steps(
    engine: Engine, params: Params, draft_params: Params = None, *, num_steps: int = 8
) -> StepCosts:
    """Measures a step with each number of drafts of an engine's `draft_budget`, all slots busy.

    Makes a state of its own, and compiles what was not compiled. `EngineDriver.warm_up` calls this
    if the driver has no costs yet. Each number is measured six times, and the least time counts.

    Args:
      engine: with a `draft_budget`.
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
      >>> costs.draft_budget
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
    # Of each number the lesser of two rounds: what else the machine does can only make a step
    # slower.
    return StepCosts(engine.num_slots, engine.draft_budget, tuple(map(min, *rounds)))


def measure_chunks(
    engine: Engine, params: Params, draft_params: Params = None, *, in_steps: bool = False
) -> ChunkCosts:
    """Measures a step, all slots busy, and the costs of a prompt of each of `chunk_sizes`.

    The step has the most drafts. Sizes beyond the first that is too large are not measured. Where
    prompts are read `in_steps`, one costs what such a step takes longer.
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


class _Calls:
    """Times calls on a state of its own, all slots busy; compiles what was not compiled."""

    def __init__(self, engine: Engine, params: Params, draft_params: Params) -> None:
        self._engine = engine
        self._weights = on_all_devices((params, draft_params), engine.model)
        self._state = on_all_devices(programs.init(engine, *self._weights), engine.model)

    def seconds_of_step(
        self, num_drafts: int | None, prompt_size: int = 0, *, num_calls: int = 8
    ) -> float:
        """Returns the seconds of a step that also reads a prompt, or none if `prompt_size` is 0."""
        engine = self._engine
        # As `schedule.next_step` has it for requests that ask for no options.
        all_neutral = has_neutral_steps(engine) and not prompt_size
        requests = None
        if prompt_size:
            requests = programs.pack(engine, placeholders(1, prompt_size, slot=0))

        def call(state: DecodeState) -> DecodeState:
            state, _ = programs.step(
                engine,
                *self._weights,
                state,
                requests,
                all_neutral=all_neutral,
                num_drafts=num_drafts,
            )
            return state

        return self._least(call, num_calls)

    def seconds_of_prompt(self, size: int, num_calls: int = 8) -> float:
        """Returns the seconds of a call of `admit` with one prompt."""
        engine = self._engine
        request = programs.pack(engine, placeholders(1, size, slot=0))
        return self._least(lambda x: programs.admit(engine, *self._weights, x, request), num_calls)

    def _least(self, call: Callable[[DecodeState], DecodeState], num_calls: int) -> float:
        """Returns the seconds of a call: the least of three times, of some dispatched at once."""

        def seconds(num_calls: int) -> float:
            # Anew each time, for each step makes the texts longer.
            self._state = _occupied(self._engine, self._state)
            jax.block_until_ready(self._state)
            # Calls return before the device has run them, and each takes the state of the one
            # before: so they wait in a row, and what the host takes to dispatch them is hidden, as
            # in serving.
            begin = time.perf_counter()
            for _ in range(num_calls):
                self._state = call(self._state)
            jax.block_until_ready(self._state)
            return (time.perf_counter() - begin) / num_calls

        # The first call compiles, the second says how long one takes.
        seconds(1)
        # Fewer calls where they are slow, so that a measurement takes little longer than 0.1 s.
        num_calls = min(num_calls, max(1, int(_LONGEST_TIMING / seconds(1))))
        return min(seconds(num_calls) for _ in range(3))
