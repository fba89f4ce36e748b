"""Keys of every kind that JAX has: a request draws what it would draw alone, and losslessly."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import random as extend_random
from lower_floor import noise
from serving import engines, tiny
from serving.chi_square import CONTROL, assert_distributed, p_value

import jax_specdec as sd
from jax_specdec import lm

K = 2
V = engines.VOCAB


def has(impl: str) -> bool:
    try:
        jax.random.key(0, impl=impl)
    except ValueError:
        return False
    return True


# Those of two or four words; the last two came with JAX 0.12.
IMPLS = list(filter(has, ["threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox4x32"]))
of_every_kind = pytest.mark.parametrize("impl", IMPLS)
OTHER = "rbg"
"""One that JAX draws from by another generator: behind its words all kinds are the same."""


def of_seeds(impl: str, *seeds: int) -> jax.Array:
    return jnp.stack([jax.random.key(seed, impl=impl) for seed in seeds])


# The noise itself.

draw_noise = jax.jit(sd.testing.draw_noise, static_argnames="num_speculative_tokens")


@of_every_kind
def test_the_words_of_a_key_are_one_threefry_block(impl):
    for key in of_seeds(impl, 0, 7, 2**32 - 1):
        words = jax.random.key_data(key)
        if len(words) == 4:
            words = extend_random.threefry_2x32(words[:2], words[2:])
        np.testing.assert_array_equal(noise.key_words(key), words)
        np.testing.assert_array_equal(jax.random.key_data(noise.threefry_keys(key)), words)


@pytest.mark.newest
@of_every_kind
def test_the_noise_of_a_request_is_what_it_gets_alone(impl):
    keys, positions = of_seeds(impl, 5, 6, 7), np.int32([9, 0, 2**31 - 1])
    together = jax.device_get(draw_noise(keys, positions, num_speculative_tokens=K))
    for b in range(3):
        alone = draw_noise(keys[b : b + 1], positions[b : b + 1], num_speculative_tokens=K)
        np.testing.assert_array_equal(together.accept[b : b + 1], alone.accept)
        np.testing.assert_array_equal(together.recover[b : b + 1], alone.recover)


@of_every_kind
def test_keys_of_a_batch_are_those_of_folding_in_indices(impl):
    key = jax.random.key(3, impl=impl)
    alone = [noise.key_words(jax.random.fold_in(key, b)) for b in range(5)]
    np.testing.assert_array_equal(jax.random.key_data(noise.fold_in_each(key, 5)), alone)


def three_words() -> jax.Array:
    """A key of a kind that is not known."""

    def seed(value: jax.Array) -> jax.Array:
        return jnp.zeros((3,), jnp.uint32) + value.astype(jnp.uint32)

    kind = extend_random.define_prng_impl(
        key_shape=(3,), seed=seed, split=None, random_bits=None, fold_in=None, name="three"
    )
    return jax.random.key(1, impl=kind)


@pytest.mark.newest
def test_keys_of_other_sizes_are_refused_wherever_keys_are_taken():
    key = three_words()
    keys, positions = jnp.stack([key]), jnp.zeros((1,), jnp.int32)
    sampling = sd.SamplingParams(jnp.ones(1))
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)
    drafts = sd.Drafts.from_flat(jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.int32))
    engine, (table, draft) = engines.TABLE, engines.TABLES
    calls: dict[str, Any] = {
        "noise": lambda: sd.testing.draw_noise(keys, positions, K),
        "verification": lambda: sd.rejection_sample(
            jnp.zeros((1, V)),
            drafts,
            sampling=sampling,
            keys=keys,
            positions=positions,
            config=config,
        ),
        "drafting": lambda: sd.sample_draft_tokens(
            jnp.zeros((1, V)), sampling=sampling, keys=keys, positions=positions, offset=0
        ),
        "loop": lambda: lm.generate_plain(engine.model, table, [[1]], key=key),
        "engine": lambda: engine.admit(
            table, draft, engine.init_state(draft), admission(1, key, [1], 2)
        ),
    }
    for call in calls.values():
        with pytest.raises(TypeError, match="^keys? must"):
            call()


def test_keys_that_are_not_typed_are_named_as_they_came():
    raw, positions = jnp.zeros((2, 2), jnp.uint32), jnp.zeros((2,), jnp.int32)
    message = "keys"
    with pytest.raises(TypeError, match=message):
        sd.testing.draw_noise(raw, positions, K)
    with pytest.raises(TypeError, match=message):
        sd.sample_draft_tokens(
            jnp.zeros((2, V)),
            sampling=sd.SamplingParams(jnp.ones(2)),
            keys=raw,
            positions=positions,
            offset=0,
        )


# Verification and drafting.

P = np.array([0.4, 0.05, 0.25, 0.15, 0.1, 0.05])
Q = np.array([0.1, 0.2, 0.3, 0.1, 0.1, 0.2])
NUM_STEPS = 4000


def theirs(keys: jax.Array, positions: jax.Array) -> sd.testing.Noise:
    """What JAX itself draws for a batch: the mistake that these tests are about."""

    def one_request(key: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(key, position)
        bits = jax.random.bits(key, (K + 2,), jnp.uint32)
        return noise.to_uniform(bits[:K]), noise.to_uniform(bits[K:])

    return sd.testing.Noise(*jax.vmap(one_request)(keys, positions))


@functools.partial(jax.jit, static_argnames=("jax_draws",))
def decode(keys: jax.Array, temperature: jax.Array, jax_draws: bool = False) -> jax.Array:
    """Tokens ``[NUM_STEPS, B, K+1]`` of requests that always have the same rows; 0 is idle."""
    size = keys.shape[0]
    p, q = jnp.log(jnp.asarray(P, jnp.float32)), jnp.log(jnp.asarray(Q, jnp.float32))
    sampling = sd.SamplingParams(temperature)
    named: Any = dict(
        sampling=sampling,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        active=jnp.arange(size) > 0,
    )

    def step(positions: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        ids = [
            sd.sample_draft_tokens(
                jnp.broadcast_to(q, (size, V)),
                sampling=sampling,
                keys=keys,
                positions=positions,
                offset=j,
            ).token_ids
            for j in range(K)
        ]
        distribution = sd.DraftLogits(jnp.broadcast_to(q, (size, K, V)))
        drafts = sd.Drafts.from_dense(jnp.stack(ids, axis=1), None, distribution)
        logits = jnp.broadcast_to(p, (size * (K + 1), V))
        if jax_draws:
            output = sd.testing.rejection_sample_with_noise(
                logits, drafts, theirs(keys, positions), **named
            )
        else:
            output = sd.rejection_sample(logits, drafts, keys=keys, positions=positions, **named)
        return positions + output.num_emitted, output.token_ids

    return jax.lax.scan(step, jnp.zeros((size,), jnp.int32), length=NUM_STEPS)[1]


def counts(tokens: np.ndarray) -> np.ndarray:
    return np.bincount(tokens[tokens >= 0], minlength=V)


@pytest.mark.slow
def test_drafting_and_verification_beside_an_idle_slot_are_lossless():
    tokens = np.asarray(decode(of_seeds(OTHER, 0, 7, 8), jnp.ones(3)))
    assert (tokens[:, 0] == sd.PLACEHOLDER_TOKEN_ID).all()
    for b in (1, 2):
        assert_distributed(counts(tokens[:, b]), P, f"request {b}")
    assert (tokens[:, 1] != tokens[:, 2]).any()
    pairs = np.zeros((V, V))  # of tokens that two seeds emit first in a step
    np.add.at(pairs, (tokens[:, 1, 0], tokens[:, 2, 0]), 1)
    assert_distributed(pairs, np.outer(P, P), "two requests jointly")
    # Nobody's tokens depend on the others' keys.
    others = np.asarray(decode(of_seeds(OTHER, 1, 7, 9), jnp.ones(3)))
    np.testing.assert_array_equal(others[:, 1], tokens[:, 1])


@pytest.mark.slow
def test_what_jax_draws_for_a_batch_is_not_lossless():
    tokens = np.asarray(decode(of_seeds(OTHER, 0, 7, 8), jnp.ones(3), jax_draws=True))
    assert p_value(counts(tokens[:, 1]), P) < CONTROL


# The loop.


@pytest.mark.slow
@pytest.mark.newest
def test_the_loop_gives_each_request_the_tokens_of_its_key():
    """Against one request at a time by `rejection_sample`, with ``fold_in(key, b)``."""
    key, prompts, count = jax.random.key(7, impl=OTHER), [[1, 2], [3], [1, 2]], 6
    output = lm.generate_plain(
        tiny.Trigram(V),
        jnp.asarray(engines.TARGET),
        prompts,
        temperature=1.3,
        max_new_tokens=count,
        key=key,
    )

    @jax.jit
    def next_token(row: jax.Array, b: int, position: int) -> jax.Array:
        return sd.rejection_sample(
            row[None],
            sd.Drafts.from_flat(jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.int32)),
            sampling=sd.SamplingParams(1.3),
            keys=jax.random.fold_in(key, b)[None],
            positions=position[None],
            config=sd.SpecDecodeConfig(num_speculative_tokens=1),
        ).token_ids[0, 0]

    for b, prompt in enumerate(prompts):
        sequence = list(prompt)
        for _ in range(count):
            row = tiny.next_logits(engines.TARGET, sequence)
            sequence.append(int(next_token(row, b, np.int32(len(sequence)))))
        assert output.completions[b] == sequence[len(prompt) :]


# The engine.


def admission(slot: int, key: jax.Array, prompt: list[int], budget: int) -> lm.NewRequests:
    options = lm.RequestOptions(temperature=1.3, max_new_tokens=budget)
    return lm.NewRequests(
        slots=jnp.array([slot]),
        prompts=engines.TABLE.pad_prompt(prompt)[None],
        lengths=jnp.array([len(prompt)]),
        keys=key[None],
        options=engines.TABLE.options_of([options], [len(prompt)]),
    )
