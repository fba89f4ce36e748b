"""Models and drafters small enough to know everything about, and the loop in plain Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import passes

import jax_specdec as sd
from jax_specdec import lm


@dataclasses.dataclass(frozen=True)
class Trigram(passes.RunsTokens):
    """Scores a token by the two before it, ``params [V, V, V]``; token 0 stands before the first.

    The older of the two comes from the cache, so a cache that holds a rejected token shows.
    """

    vocab_size: int

    def init_cache(self, batch_size: int, max_length: int) -> jax.Array:
        return jnp.zeros((batch_size, max_length), jnp.int32)

    def run(
        self, params: jax.Array, token_ids: jax.Array, start: jax.Array, cache: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        positions = start[:, None] + jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
        requests = jnp.arange(token_ids.shape[0])[:, None]
        cache = cache.at[requests, positions].set(token_ids)
        before = jnp.where(positions > 0, cache[requests, jnp.maximum(positions - 1, 0)], 0)
        return params.at[before, token_ids].get(mode="clip"), cache


@dataclasses.dataclass(frozen=True)
class OneRow(passes.RunsTokens):
    """Gives the same logits ``params [V]`` everywhere: a large vocabulary without a model."""

    vocab_size: int

    def run(
        self, params: jax.Array, token_ids: jax.Array, start: jax.Array, cache: tuple
    ) -> tuple[jax.Array, tuple]:
        return jnp.broadcast_to(params, (*token_ids.shape, self.vocab_size)), cache


def context(
    token_ids: Any, lengths: jax.Array, temperature: Any, *, k: int, seed: int = 0, **fields: Any
) -> lm.DraftContext:
    """Of requests at one temperature, or one each, whose keys are split from a seed."""
    size = lengths.shape[0]
    sampling = sd.SamplingParams(jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (size,)))
    keys = jax.random.split(jax.random.key(seed), size)
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)
    return lm.DraftContext(jnp.asarray(token_ids), lengths, sampling, keys, config, **fields)


def random_table(vocab_size: int, seed: int, scale: float = 1.5) -> np.ndarray:
    """Params of a `Trigram`."""
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((vocab_size,) * 3)).astype(np.float32)


def next_logits(table: np.ndarray, sequence: Sequence[int]) -> np.ndarray:
    before, last = [0, *sequence][-2:]
    return table[before, last]


def exact_distribution(
    table: np.ndarray, prompt: Sequence[int], length: int, temperature: float
) -> np.ndarray:
    """Probability of every continuation, ``[V] * length``, float64."""
    probabilities = np.ones(())
    for _ in range(length):
        rows = np.zeros((*probabilities.shape, table.shape[-1]))
        for tokens in np.ndindex(*probabilities.shape):
            x = next_logits(table, [*prompt, *tokens]).astype(np.float64) / temperature
            weights = np.exp(x - x.max())
            rows[tokens] = weights / weights.sum()
        probabilities = probabilities[..., None] * rows
    return probabilities


@dataclasses.dataclass(frozen=True)
class Scripted(lm.Drafter):
    """Proposes ``params[b, P : P + K]`` for position P, whatever the sequence holds."""

    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(chunks=False)

    def propose(
        self, params: jax.Array, context: lm.DraftContext, cache: Any, store: None
    ) -> tuple[lm.Proposal, Any]:
        offsets = jnp.arange(context.config.num_speculative_tokens, dtype=jnp.int32)
        place = jnp.minimum(context.lengths[:, None] + offsets[None, :], params.shape[1] - 1)
        return lm.Proposal(jnp.take_along_axis(params, place, axis=1)), cache


def options_of(count: int, options: Any = None, **lists: Sequence[Any]) -> list[lm.RequestOptions]:
    """Options of `count` requests, each with its own entry of every list."""
    each = options if isinstance(options, list) else [options or lm.RequestOptions()] * count
    made: dict[Any, lm.RequestOptions] = {}  # of thousands, few differ
    found = []
    for b, one in enumerate(each):
        fields = {name: values[b] for name, values in lists.items()}
        key = id(one), *fields.values()
        if key not in made:
            made[key] = dataclasses.replace(one, **fields)
        found.append(made[key])
    return found


class Step(NamedTuple):
    """What one step does to one request."""

    kept: list[int]
    num_proposed: int
    num_accepted: int
    num_emitted: int


def greedy_steps(
    table: np.ndarray,
    prompt: Sequence[int],
    script: Sequence[int],
    *,
    k: int,
    budget: int,
    stop_token_ids: Sequence[int] = (),
) -> list[Step]:
    """Greedy speculative decoding of one request by a `Trigram`, with `Scripted` drafts."""
    vocab_size = table.shape[-1]
    sequence, steps = list(prompt), []
    while len(sequence) - len(prompt) < budget:
        drafts = [int(x) for x in script[len(sequence) : len(sequence) + k]]
        proposals = drafts[: next((i for i, x in enumerate(drafts) if not 0 <= x < vocab_size), k)]
        emitted: list[int] = []
        for draft in [*proposals, None]:
            emitted.append(int(np.argmax(next_logits(table, [*sequence, *emitted]))))
            if emitted[-1] != draft:
                break
        kept = emitted[: budget - (len(sequence) - len(prompt))]
        stops = [i for i, token in enumerate(kept) if token in stop_token_ids]
        kept = kept[: stops[0] + 1] if stops else kept
        sequence += kept
        steps.append(Step(kept, len(proposals), len(emitted) - 1, len(emitted)))
        if stops:
            break
    return steps


def steps_of(output: lm.GenerateOutput, request: int) -> list[Step]:
    """The steps of one request, those after its end left out (they must be empty)."""
    record = jax.tree.map(lambda x: x[:, request], output.steps)
    steps = []
    for s in range(len(record.num_kept)):
        kept = record.token_ids[s, : record.num_kept[s]].tolist()
        assert (record.token_ids[s, len(kept) :] == sd.PLACEHOLDER_TOKEN_ID).all()
        counts = (record.num_proposed[s], record.num_accepted[s], record.num_emitted[s])
        steps.append(Step(kept, *map(int, counts)))
    while steps and steps[-1] == Step([], 0, 0, 0):
        steps.pop()
    assert sum((step.kept for step in steps), []) == output.completions[request]
    return steps


def assert_same(one: lm.GenerateOutput, other: lm.GenerateOutput) -> None:
    """Two generations agree in tokens, status and every step."""
    assert one.completions == other.completions
    assert one.status == other.status
    jax.tree.map(np.testing.assert_array_equal, one.steps, other.steps)
