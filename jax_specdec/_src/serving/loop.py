"""Speculative decoding of a batch: one step, and the two loops around it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.drafter import Drafter
from jax_specdec._src.drafting.store import DraftStore
from jax_specdec._src.models.protocol import CausalModel
from jax_specdec._src.serving import batch as batch_lib
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving import step as step_lib
from jax_specdec._src.serving.batch import Batch, GenerateOutput, StepRecord
from jax_specdec._src.serving.options import LogprobsConfig, RequestOptions, check_logprobs
from jax_specdec._src.serving.placement import on_all_devices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a step reads and writes.

    Attributes:
      batch: the sequences and where they stand.
      target_cache: the target's cache.
      draft_cache: the drafter's cache.
      store: what the drafts were drawn from, or None.
    """

    batch: Batch
    target_cache: Any
    draft_cache: Any
    store: DraftStore | None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static half of speculative decoding: models, settings, and pure functions of them.

    Attributes:
      model: the target.
      drafter: what proposes tokens.
      config: how they are verified.
      logprobs: which log-probabilities a step's record has; None for none.
    """

    model: CausalModel
    drafter: Drafter
    config: SpecDecodeConfig
    logprobs: LogprobsConfig | None = None

    def prefill(
        self, params: Any, draft_params: Any, batch: Batch, prompt_size: int
    ) -> DecodeState:
        """Caches filled with the prompts, ``batch.token_ids[:, :prompt_size]``."""
        size, length = batch.token_ids.shape
        prompts, start = batch.token_ids[:, :prompt_size], jnp.zeros((size,), jnp.int32)
        target_cache = self.model.init_cache(size, length)
        _, target_cache = self.model.apply(params, prompts, start, target_cache)
        draft_cache = self.drafter.init_cache(size, length)
        draft_cache = self.drafter.prefill(draft_params, prompts, draft_cache)
        store = self.drafter.init_store(draft_params, size, self.config)
        return DecodeState(batch, target_cache, draft_cache, store)

    def step(
        self, params: Any, draft_params: Any, state: DecodeState
    ) -> tuple[DecodeState, StepRecord]:
        """Draft, verify, append: at least one token for every request that is not done."""
        proposal, draft_cache = step_lib.draft(
            self.drafter,
            draft_params,
            state.batch,
            state.draft_cache,
            state.store,
            self.config,
            self.model.vocab_size,
        )
        batch, target_cache, record, _ = step_lib.verify(
            self.model,
            params,
            state.batch,
            state.target_cache,
            proposal,
            self.config,
            self.logprobs,
            may_abstain=getattr(self.drafter, "may_abstain", False),
        )
        return DecodeState(batch, target_cache, draft_cache, proposal.store), record


@functools.partial(jax.jit, static_argnames=("decoder", "prompt_size"))
def _prefill(
    params: Any, draft_params: Any, batch: Batch, *, decoder: Decoder, prompt_size: int
) -> DecodeState:
    return decoder.prefill(params, draft_params, batch, prompt_size)


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def _step(
    params: Any, draft_params: Any, state: DecodeState, *, decoder: Decoder
) -> tuple[DecodeState, StepRecord]:
    return decoder.step(params, draft_params, state)


@functools.partial(jax.jit, static_argnames=("decoder", "prompt_size", "max_steps"))
def _generate(
    params: Any,
    draft_params: Any,
    batch: Batch,
    *,
    decoder: Decoder,
    prompt_size: int,
    max_steps: int,
) -> tuple[Batch, StepRecord, jax.Array]:
    state = decoder.prefill(params, draft_params, batch, prompt_size)

    def step(state: DecodeState) -> tuple[DecodeState, StepRecord]:
        return decoder.step(params, draft_params, state)

    return batch_lib.run_until_done(step, state, lambda state: state.batch, max_steps)


def generate(
    model: CausalModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter,
    draft_params: Any = None,
    config: SpecDecodeConfig,
    temperature: float | Sequence[float] = 0.0,
    key: jax.Array | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop_token_ids: Sequence[int] = (),
    options: RequestOptions | Sequence[RequestOptions] | None = None,
    logprobs: LogprobsConfig | None = None,
) -> GenerateOutput:
    """Generate with speculative decoding: the target's own distribution, in fewer passes.

    Runs as one compiled `while_loop`; compiled once per shape of the batch.

    Args:
      model: the target, any `CausalModel`.
      params: its weights.
      prompts: B token id lists of any lengths, none empty.
      drafter: a `ModelDrafter`, an `NGramDrafter`, or any `Drafter`.
      draft_params: the drafter's weights.
      config: static settings.
      temperature: one for all requests, or one each; 0 is greedy.
      key: a typed key, or None for ``jax.random.key(0)``; request b uses ``fold_in(key, b)``.
      max_new_tokens: one budget for all requests, or one each.
      stop_token_ids: a request ends after emitting one of these.
      options: what requests ask for besides, one for all or one each.
      logprobs: which log-probabilities the steps have; None for none.

    Returns:
      `GenerateOutput`.

    Raises:
      TypeError: an argument of another type; ids that are not integers; a key that is not typed.
      ValueError: an empty prompt, an id out of range, a list of the wrong length, a negative
        temperature or budget.

    Example:
      >>> import jax_specdec as sd
      >>> (target, params), (draft, draft_params) = sd.load_embedded_pair()
      >>> output = sd.generate(
      ...     target, params, [sd.encode("def add(a, b):")],
      ...     drafter=sd.ModelDrafter(draft), draft_params=draft_params,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2), max_new_tokens=8)
      >>> len(output.completions[0])
      8
    """
    inputs.target(model, params)
    inputs.drafting(drafter, config)
    inputs.draft_weights(drafter, draft_params)
    check_logprobs(logprobs)
    batch, prompt_size, max_steps = batch_lib.make_batch(
        prompts,
        vocab_size=model.vocab_size,
        temperature=temperature,
        key=key,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        options=options,
        slack=config.num_speculative_tokens + 1,
    )
    decoder = Decoder(model, drafter, config, logprobs)
    params, draft_params, batch = on_all_devices((params, draft_params, batch), model)
    batch, steps, num_steps = _generate(
        params,
        draft_params,
        batch,
        decoder=decoder,
        prompt_size=prompt_size,
        max_steps=max_steps,
    )
    return batch_lib.collect(prompts, batch, steps, num_steps)


def generate_stream(
    model: CausalModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter,
    draft_params: Any = None,
    config: SpecDecodeConfig,
    temperature: float | Sequence[float] = 0.0,
    key: jax.Array | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop_token_ids: Sequence[int] = (),
    options: RequestOptions | Sequence[RequestOptions] | None = None,
    logprobs: LogprobsConfig | None = None,
) -> Iterator[StepRecord]:
    """`generate`, one step at a time: yields what each step emitted, as it comes.

    The tokens and the acceptance of every step are those of `generate`.

    Args:
      model: as in `generate`.
      params: as in `generate`.
      prompts: as in `generate`.
      drafter: as in `generate`.
      draft_params: as in `generate`.
      config: as in `generate`.
      temperature: as in `generate`.
      key: as in `generate`.
      max_new_tokens: as in `generate`.
      stop_token_ids: as in `generate`.
      options: as in `generate`.
      logprobs: as in `generate`.

    Yields:
      One `StepRecord` of NumPy arrays ``[B, ...]`` per step.

    Raises:
      TypeError: as in `generate`.
      ValueError: as in `generate`.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> steps = sd.generate_stream(
      ...     model, params, [sd.encode("import os, import ")],
      ...     drafter=sd.NGramDrafter(), config=sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     max_new_tokens=4)
      >>> sum(int(step.num_kept[0]) for step in steps)
      4
    """
    inputs.target(model, params)
    inputs.drafting(drafter, config)
    inputs.draft_weights(drafter, draft_params)
    check_logprobs(logprobs)
    batch, prompt_size, _ = batch_lib.make_batch(
        prompts,
        vocab_size=model.vocab_size,
        temperature=temperature,
        key=key,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        options=options,
        slack=config.num_speculative_tokens + 1,
    )
    params, draft_params, batch = on_all_devices((params, draft_params, batch), model)
    decoder = Decoder(model, drafter, config, logprobs)

    def steps() -> Iterator[StepRecord]:
        done = np.asarray(batch.done)
        if done.all():
            return
        state = _prefill(params, draft_params, batch, decoder=decoder, prompt_size=prompt_size)
        while not done.all():
            state, record = _step(params, draft_params, state, decoder=decoder)
            record, done = jax.device_get((record, state.batch.done))
            yield record

    return steps()
