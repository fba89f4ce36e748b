"""Greedy requests alone, known when a call is traced: less to compile, and the same tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import CallArrays, Standard
from lower_floor import gpu_launch as launch

import jax_specdec as sd
from jax_specdec.adapters import sglang_jax, tpu_inference
from jax_specdec.testing import KernelConfig

from .backends import over
from .batch import Batch, Layout, Verifier, agree, jitted, on
from .cases import random_batches
from .interpret_mode import interpret_gpu_params
from .layouts import BIG

long = pytest.mark.long


def without_temperatures(verifier: Verifier) -> Verifier:
    def verify(*args: Any, sampling: sd.SamplingParams, **named: Any) -> sd.RejectionSampleOutput:
        greedy = sd.SamplingParams(None, sampling.min_p, sampling.top_k, sampling.top_p)
        return verifier(*args, sampling=greedy, **named)

    return verify


def greedy_batches(layout: Layout, count: int) -> list[Batch]:
    """Ragged, some requests with bad rows, offsets or ids, and all at temperature 0."""
    batches = random_batches(layout, range(count), broken=0.3)
    return [batch.replace(temperature=np.zeros_like(batch.temperature)) for batch in batches]


@jitted
def by_kernel(logits: Any, drafts: Any, noise: Any, **given: Any) -> sd.RejectionSampleOutput:
    """The kernel, interpreted, with neither keys nor positions."""
    del noise
    arrays = CallArrays(logits, drafts, (None, None), given["sampling"])
    return launch.verify(
        arrays,
        Standard(),
        k=given["config"].num_speculative_tokens,
        size=logits.shape[1],
        config=KernelConfig(max_cluster=1),
        interpret=interpret_gpu_params(),
    )


WITH_Q = Layout(vocab=2500, vocab_size=2400, **BIG, kind="logits", has_active=True)
BLOCK = Layout(
    vocab=2500, **BIG, kind="probs", block=True, has_bonus=True, has_filters=True, has_bitmask=True
)
ALONE = Layout(vocab=97, num_requests=2, num_drafts=7, num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("verifier", "layout"),
    [
        pytest.param(on("cpu"), WITH_Q, id="in-order"),
        pytest.param(on("tpu"), BLOCK, id="tile by tile, block", marks=long),
        pytest.param(on("cuda"), BLOCK, id="at once, block", marks=long),
        pytest.param(
            on("cpu"),
            dataclasses.replace(BLOCK, agreement=True, block=False),
            id="agreement",
            marks=long,
        ),
        pytest.param(
            on("cpu"), Layout(vocab=97, **BIG, rates=(0.9, 0.5, 0.3, 0.2)), id="synthetic"
        ),
        pytest.param(by_kernel, ALONE, id="kernel", marks=pytest.mark.slow),
    ],
)
def test_without_temperatures_the_tokens_are_those_of_temperature_0(verifier, layout):
    outputs = agree(greedy_batches(layout, 8), without_temperatures(verifier))
    assert any((output.num_accepted > 0).any() for output in outputs)


@long
def test_over_a_split_vocabulary_too():
    layout = Layout(vocab=2504, vocab_size=2500, **BIG, kind="probs", has_bitmask=True)
    agree(greedy_batches(layout, 8), without_temperatures(over(4)))


# Neither keys nor positions.

B, K, V = 8, 4, 32000
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
IDS = jnp.zeros((2, 1), jnp.int32)
GREEDY: dict[str, Any] = dict(sampling=sd.SamplingParams(None), keys=None, positions=None)


def test_greedy_requests_need_neither_keys_nor_positions():
    call = functools.partial(
        sd.rejection_sample, jax.nn.one_hot(jnp.array([0, 5, 3, 4]), 8), sd.Drafts.from_dense(IDS)
    )
    config = sd.SpecDecodeConfig(num_speculative_tokens=1)
    assert sd.parse_output(call(config=config, **GREEDY)) == [[0, 5], [3]]
    sampled = dict(GREEDY, sampling=sd.SamplingParams(0.0))
    with pytest.raises(TypeError, match="^keys must be typed"):
        call(config=config, **sampled)
    synthetic = dataclasses.replace(
        config, rejection_sample_method="synthetic", synthetic_acceptance_length=1.5
    )
    with pytest.raises(TypeError, match="^keys must be typed"):
        call(config=synthetic, **GREEDY)


# How much is compiled.


def theirs(logits: jax.Array, ids: jax.Array, counts: jax.Array) -> jax.Array:
    """The same for flat rows, as an engine without our checks would write it."""
    n = ids.shape[0]
    best = jnp.argmax(logits, axis=1).astype(jnp.int32)
    owner = jnp.repeat(jnp.arange(B), counts, total_repeat_length=n)
    first = jnp.cumsum(counts, dtype=jnp.int32) - counts
    place = jnp.arange(n) - jnp.repeat(first, counts, total_repeat_length=n)
    own = best[jnp.minimum(jnp.arange(n) + owner, len(best) - 1)]
    ended = jax.ops.segment_min(
        jnp.where(ids != own, place, n), owner, num_segments=B, indices_are_sorted=True
    )
    ended = jnp.where(ended > n, n, ended)
    end = jnp.repeat(ended, counts, total_repeat_length=n)
    bonus = best[jnp.cumsum(counts + 1, dtype=jnp.int32) - 1]
    bonus = jnp.where((ended == n) | (counts == 0), bonus, -1)
    return jnp.concatenate([jnp.where(place <= end, own, -1), bonus])


def ours(logits: jax.Array, ids: jax.Array, counts: jax.Array) -> jax.Array:
    return tpu_inference.verify_flat(logits, ids, counts, config=CONFIG, temperature=None).token_ids


def chains(logits: jax.Array, ids: jax.Array, lengths: jax.Array) -> Any:
    """What a scheduler of chains reads."""
    found = sglang_jax.verify_chains(
        logits, ids[: B * (K + 1)], lengths, config=CONFIG, temperatures=None
    )
    return found.accept_lens, found.predict, found.verified_ids


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_a_greedy_call_is_at_most_twice_as_long_as_an_engines_own(platform):
    rows = {ours: 64, theirs: 64, chains: B * (K + 1)}
    lines = {}
    for function, count in rows.items():
        shapes = (
            jax.ShapeDtypeStruct((count, V), jnp.float32),
            jax.ShapeDtypeStruct((64,), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.int32),
        )
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))
        lines[function.__name__] = len(lowered.as_text().splitlines())
    print(lines)
    assert max(lines["ours"], lines["chains"]) <= 2 * lines["theirs"], lines
