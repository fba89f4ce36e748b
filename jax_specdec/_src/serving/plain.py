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
from jax_specdec._src.serving import batch as batch_lib
from jax_specdec._src.serving.batch import Batch, GenerateOutput, StepRecord
from jax_specdec._src.serving.placement import on_all_devices
from jax_specdec._src.types import Drafts, SamplingParams
from jax_specdec._src.verify.api import rejection_sample


@functools.partial(jax.jit, static_argnames=("model", "prompt_size", "max_steps"))
def _generate_plain(
    params: Any,
    batch: Batch,
    *,
    model: CausalModel,
    prompt_size: int,
    max_steps: int,
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
        output = rejection_sample(
            logits[:, 0],
            no_drafts,
            sampling=SamplingParams(temperature=batch.temperature),
            keys=batch.keys,
            positions=batch.lengths,
            active=~batch.done,
            config=SpecDecodeConfig(num_speculative_tokens=1),
            sharding=sharding_of(model),
        )
        batch, record = batch_lib.append(batch, output, none)
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

    Returns:
      `GenerateOutput`; its steps propose nothing and emit one token each.

    Raises:
      TypeError: ids that are not integers, or a key that is not typed.
      ValueError: an empty prompt, an id out of range, a list of the wrong length, a negative
        temperature or budget.

    Example:
      >>> import jax_specdec as sd
      >>> (target, params), _ = sd.load_embedded_pair()
      >>> output = sd.generate_plain(target, params, [sd.encode("import ")], max_new_tokens=4)
      >>> len(output.completions[0])
      4
    """
    batch, prompt_size, max_steps = batch_lib.make_batch(
        prompts,
        vocab_size=model.vocab_size,
        temperature=temperature,
        key=key,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        slack=1,
    )
    params, batch = on_all_devices((params, batch), model)
    batch, steps, num_steps = _generate_plain(
        params,
        batch,
        model=model,
        prompt_size=prompt_size,
        max_steps=max_steps,
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
) -> list[GreedyDifference]:
    """The first difference of each request that has one, with how close the decision was.

    Args:
      model: the target.
      params: its weights.
      prompts: what both generations began from.
      output: of `generate` at temperature 0.
      plain: of `generate_plain` at temperature 0.

    Returns:
      One entry per request that differs; empty where all are identical.

    Example:
      >>> import jax_specdec as sd
      >>> (target, params), _ = sd.load_embedded_pair()
      >>> prompts = [sd.encode("class ")]
      >>> plain = sd.generate_plain(target, params, prompts, max_new_tokens=4)
      >>> sd.greedy_differences(target, params, prompts, plain, plain)
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
        second, best = np.sort(np.asarray(logits[0, -1], np.float32))[-2:]
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
