"""Plain decoding, one token per target pass: what speculative decoding is measured against."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.models.protocol import CausalModel, sharding_of
from jax_specdec._src.penalties import apply_penalties
from jax_specdec._src.serving import batch as batch_lib
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving import step as step_lib
from jax_specdec._src.serving.batch import Batch, GenerateOutput, StepRecord
from jax_specdec._src.serving.options import (
    BatchOptions,
    LogprobsConfig,
    RequestOptions,
    check_logprobs,
    per_request,
)
from jax_specdec._src.serving.placement import on_all_devices
from jax_specdec._src.types import Drafts


@functools.partial(jax.jit, static_argnames=("model", "prompt_size", "max_steps", "logprobs"))
def _generate_plain(
    params: Any,
    batch: Batch,
    *,
    model: CausalModel,
    prompt_size: int,
    max_steps: int,
    logprobs: LogprobsConfig | None,
) -> tuple[Batch, StepRecord, jax.Array]:
    size, length = batch.token_ids.shape
    cache = model.init_cache(size, length)
    start = jnp.zeros((size,), jnp.int32)
    _, cache = model.apply(params, batch.token_ids[:, :prompt_size], start, cache)
    no_drafts = Drafts(jnp.zeros((0,), jnp.int32), jnp.zeros((size + 1,), jnp.int32))
    none = jnp.zeros((size,), jnp.int32)

    def step(state: tuple[Batch, Any]) -> tuple[tuple[Batch, Any], StepRecord]:
        batch, cache = state
        last = jnp.take_along_axis(batch.token_ids, batch.lengths[:, None] - 1, axis=1)
        logits, cache = model.apply(params, last, batch.lengths - 1, cache)
        config = SpecDecodeConfig(num_speculative_tokens=1)
        output, found = step_lib.sample(
            logits[:, 0], no_drafts, batch, config, logprobs, sharding_of(model)
        )
        batch, record = batch_lib.append(batch, output, none, found)
        return (batch, cache), record

    return batch_lib.run_until_done(step, (batch, cache), lambda state: state[0], max_steps)


def generate_plain(
    model: CausalModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float | Sequence[float] = 0.0,
    key: jax.Array | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop_token_ids: Sequence[int] = (),
    options: RequestOptions | Sequence[RequestOptions] | None = None,
    logprobs: LogprobsConfig | None = None,
) -> GenerateOutput:
    """Generate with the target alone, one token per pass, in one compiled `while_loop`.

    Args:
      model: any `CausalModel`.
      params: its weights.
      prompts: B token id lists of any lengths, none empty.
      temperature: one for all requests, or one each; 0 is greedy.
      key: a typed key, or None for ``jax.random.key(0)``.
      max_new_tokens: one budget for all requests, or one each.
      stop_token_ids: a request ends after emitting one of these.
      options: what requests ask for besides, one for all or one each.
      logprobs: which log-probabilities the steps have; None for none.

    Returns:
      `GenerateOutput`; its steps propose nothing and emit one token each.

    Raises:
      TypeError: an argument of another type; ids that are not integers; a key that is not typed.
      ValueError: an empty prompt, an id out of range, a list of the wrong length, a negative
        temperature or budget.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> output = sd.generate_plain(model, params, [sd.encode("import ")], max_new_tokens=4)
      >>> len(output.completions[0])
      4
    """
    inputs.target(model, params)
    check_logprobs(logprobs)
    batch, prompt_size, max_steps = batch_lib.make_batch(
        prompts,
        vocab_size=model.vocab_size,
        temperature=temperature,
        key=key,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        options=options,
        slack=1,
    )
    params, batch = on_all_devices((params, batch), model)
    batch, steps, num_steps = _generate_plain(
        params,
        batch,
        model=model,
        prompt_size=prompt_size,
        max_steps=max_steps,
        logprobs=logprobs,
    )
    return batch_lib.collect(prompts, batch, steps, num_steps)


@dataclasses.dataclass(frozen=True)
class GreedyDifference:
    """Where a greedy generation first left plain decoding.

    Attributes:
      request: index of the request.
      index: index into its completion.
      token_id: what it emitted there; None where it had ended.
      plain_token_id: what plain decoding emitted there; None where it had ended.
      gap: difference of the two best target logits there. Sums of float32 numbers depend on how
        many tokens a pass holds; a gap below 1e-4 is within that rounding.

    Example:
      >>> GreedyDifference(request=0, index=17, token_id=40, plain_token_id=91, gap=2e-6).gap < 1e-4
      True
    """

    request: int
    index: int
    token_id: int | None
    plain_token_id: int | None
    gap: float


def greedy_differences(
    model: CausalModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    output: GenerateOutput,
    plain: GenerateOutput,
    options: RequestOptions | Sequence[RequestOptions] | None = None,
) -> list[GreedyDifference]:
    """The first difference of each request that has one, with how close the decision was.

    Args:
      model: the target.
      params: its weights.
      prompts: what both generations began from.
      output: of `generate` at temperature 0.
      plain: of `generate_plain` at temperature 0.
      options: of both.

    Returns:
      One entry per request that differs; empty where all are identical.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()
      >>> prompts = [sd.encode("class ")]
      >>> plain = sd.generate_plain(model, params, prompts, max_new_tokens=4)
      >>> sd.greedy_differences(model, params, prompts, plain, plain)
      []
    """
    found = []
    pairs = zip(output.completions, plain.completions, strict=True)
    for b, (ours, theirs) in enumerate(pairs):
        if ours == theirs:
            continue
        shorter = min(len(ours), len(theirs))
        index = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        sequence = jnp.array([[*prompts[b], *theirs[:index]]], jnp.int32)
        cache = model.init_cache(1, sequence.shape[1])
        logits, _ = model.apply(params, sequence, jnp.zeros((1,), jnp.int32), cache)
        own = per_request(options, len(prompts))[b]
        row = _processed(logits[:, -1], own, sequence, len(prompts[b]))
        second, best = np.sort(row)[-2:]
        found.append(
            GreedyDifference(
                b,
                index,
                ours[index] if index < len(ours) else None,
                theirs[index] if index < len(theirs) else None,
                float(best - second),
            )
        )
    return found


def _processed(
    logits: jax.Array, options: RequestOptions, sequence: jax.Array, prompt_length: int
) -> np.ndarray:
    """The row ``[V]`` that a greedy token is the argmax of, from ``logits [1, V]``."""
    asked = BatchOptions.create([options], [prompt_length], logits.shape[1])
    if asked is not None:
        length = jnp.array([sequence.shape[1]], jnp.int32)
        done = jnp.zeros((1,), bool)
        penalties = asked.count(sequence, length, done, logits.shape[1])
        if penalties is not None:
            logits = apply_penalties(logits, None, penalties)
    row = np.array(logits[0], np.float32)
    if options.allowed_token_ids is not None:
        row[np.setdiff1d(np.arange(len(row)), options.allowed_token_ids)] = -np.inf
    return row
