"""The forms of the XLA backend: which a platform gets, and rows as TPUs read them."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import BLOCK, platform

import jax_specdec as sd

from .backends import BACKENDS
from .batch import agree, pack
from .cases import random_request
from .layouts import IN_BLOCKS

pytestmark = [pytest.mark.newest, pytest.mark.long]

BATCH, K, VOCAB = BLOCK + 1, 1, 5


def shaped(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.cache
def operations(implementation: str | None, platform: str) -> collections.Counter[str]:
    """Of the program of a call, before it is compiled: how many there are of each kind."""
    call = functools.partial(
        sd.testing.rejection_sample_with_noise,
        implementation=implementation,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
    )
    traced = jax.jit(lambda *args, sampling: call(*args, sampling=sampling)).trace(
        shaped(BATCH * (K + 1), VOCAB),
        sd.Drafts(shaped(BATCH * K, dtype=jnp.int32), shaped(BATCH + 1, dtype=jnp.int32)),
        sd.testing.Noise(shaped(BATCH, K), shaped(BATCH, 2)),
        sampling=sd.SamplingParams(shaped(BATCH)),
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = collections.Counter(re.findall(r"stablehlo\.\w+", text))
    for name in ("case", "constant", "return"):  # left over from choosing
        del found[f"stablehlo.{name}"]
    return found


PLATFORMS = "cpu", "cuda", "tpu"
TELLING = "while", "gather", "dot_general", "exponential"


@pytest.mark.parametrize("device", PLATFORMS)
def test_a_platform_gets_its_own_form(device):
    own = operations(None, device)
    assert own == operations("xla", device)
    for form in PLATFORMS:
        with platform.assume(form):  # compiled for this device all the same
            other = operations.__wrapped__("xla", device)
        names = [f"stablehlo.{name}" for name in TELLING]
        assert all(own[name] == other[name] for name in names) == (form == device)


# Rows by slices, in blocks.

on_tpu, LAYOUT = BACKENDS["tile-by-tile"], IN_BLOCKS[0]


def test_bad_offsets_hurt_no_other_request():
    """One request claims 20 drafts, of 3 at most."""
    rng = np.random.default_rng(1)
    requests = [random_request(LAYOUT, rng, 2, 1.0) for _ in range(5)]
    batch = pack(requests, LAYOUT, 1)
    offsets = np.full(LAYOUT.num_requests + 1, 33, np.int32)
    offsets[:7] = 0, 2, 22, 24, 27, 30, 33
    batch = batch.replace(
        drafts=sd.Drafts(batch.drafts.token_ids, offsets, batch.drafts.distribution)
    )
    (output,) = agree([batch], on_tpu)
    assert output.status[1] == sd.Status.BAD_INPUT


@pytest.mark.slow
def test_a_batch_with_a_greedy_request_and_one_without_agree_under_vmap():
    """On a TPU the argmax of a tile is found only if a request of the batch is greedy."""
    vocab, rng = 2100, np.random.default_rng(2)  # the second tile is cut
    logits = rng.standard_normal((2 * 4, vocab)).astype(np.float32)
    logits[1, 2060] = logits[1, 7] = logits[3, 2050] = 9.0
    logits[4, 2070], logits[6, 2099] = np.nan, np.inf
    drafts = sd.Drafts(
        np.argmax(logits[::2], axis=1).astype(np.int32), np.arange(5, dtype=np.int32)
    )
    noise = sd.testing.Noise(np.zeros((4, 1), np.float32), np.full((4, 2), 0.5, np.float32))
    config = sd.SpecDecodeConfig(num_speculative_tokens=1)

    def verify(temperature: jax.Array) -> sd.RejectionSampleOutput:
        return on_tpu(logits, drafts, noise, sampling=sd.SamplingParams(temperature), config=config)

    temperatures = np.float32([[1, 0.5, 1, 2], [0, 0.5, 1, 0], [0, 0, 0, 0]])
    sampled, mixed, greedy = (jax.device_get(verify(t)) for t in temperatures)
    bad = sd.Status.BAD_TARGET_ROW
    assert sampled.status.tolist() == mixed.status.tolist() == greedy.status.tolist()
    assert greedy.status.tolist() == [0, 0, bad, bad]
    np.testing.assert_array_equal(mixed.token_ids[0], greedy.token_ids[0])
    np.testing.assert_array_equal(mixed.token_ids[1], sampled.token_ids[1])
    assert greedy.token_ids[:2, 1].tolist() == [7, 2050]
    together = jax.vmap(verify)(temperatures)
    jax.tree.map(
        np.testing.assert_array_equal,
        together,
        jax.tree.map(lambda *x: np.stack(x), sampled, mixed, greedy),
    )
