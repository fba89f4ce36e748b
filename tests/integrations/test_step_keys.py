"""One key per step: exact over steps, under padding and reordering, and what it gives up."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import fold_in_each
from serving.chi_square import ALPHA, CONTROL, assert_distributed, p_value, tally

import jax_specdec as sd
from jax_specdec.adapters import common, sglang_jax, tpu_inference
from jax_specdec.adapters.keys import step_keys

V, K, B, STEPS = 4, 2, 20000, 3
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="block")
P = np.array([0.4, 0.3, 0.2, 0.1])
Q = np.array([0.1, 0.2, 0.3, 0.4])
IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_slot_has_its_key_whoever_else_is_there(impl):
    key = jax.random.key(3, impl=impl)
    slots = jnp.array([4, 0, 2])
    found = step_keys(key, slots)
    alone = [step_keys(key, slots[b : b + 1])[0] for b in range(3)]
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(jnp.stack(alone)))
    many = jax.random.key_data(step_keys(key, jnp.arange(1000)))
    assert len(np.unique(many, axis=0)) == 1000
    if impl == "threefry2x32":
        want = jax.random.key_data(fold_in_each(key, 5))[slots]
        np.testing.assert_array_equal(jax.random.key_data(found), want)


@functools.partial(jax.jit, static_argnames="has_positions")
def step(
    key: jax.Array, order: jax.Array, lengths: jax.Array, has_positions: bool
) -> tuple[jax.Array, jax.Array]:
    """The first token of each request and how many it gets; `order` says who has which slot."""
    draft_key, key = jax.random.split(key)
    p, q = (jnp.asarray(np.log(x), jnp.float32) for x in (P, Q))
    ids = jax.random.categorical(draft_key, q, shape=(B * K,)).astype(jnp.int32)
    found = tpu_inference.verify_flat(
        jnp.broadcast_to(p, (B * (K + 1), V)),
        ids,
        jnp.full((B,), K, jnp.int32),
        config=CONFIG,
        temperature=jnp.ones((B,), jnp.float32),
        keys=key,
        positions=lengths[order] if has_positions else None,
        draft_probs=jnp.broadcast_to(jnp.asarray(Q, jnp.float32), (B * K, V)),
    )
    back = jnp.argsort(order)
    return found.output.token_ids[back, 0], found.output.num_emitted[back]


def loop(key: jax.Array, has_positions: bool, is_fresh: bool) -> np.ndarray:
    """Steps of many requests, each in another slot on every step; `[B, STEPS]` first tokens."""
    orders = [np.arange(B, dtype=np.int32) * stride % B for stride in (1, 7, 9)]
    orders = orders if is_fresh else orders[:1] * STEPS
    lengths, tokens = np.zeros(B, np.int32), []
    for i, order in enumerate(orders):
        key_of_step = jax.random.fold_in(key, i) if is_fresh else key
        first, count = jax.device_get(step(key_of_step, order, lengths, has_positions))
        lengths = lengths + count
        tokens.append(first)
    return np.stack(tokens, axis=1)


JOINT = np.einsum("i,j,k->ijk", P, P, P)


@pytest.mark.long
@pytest.mark.newest
def test_fresh_keys_make_tokens_of_consecutive_steps_independent():
    tokens = loop(jax.random.key(11), has_positions=True, is_fresh=True)
    counts = tally(tokens, V)
    print(np.round(counts / B, 4).tolist())
    assert_distributed(counts, JOINT, f"{STEPS} steps")


@pytest.mark.slow
@pytest.mark.newest
def test_control_with_the_same_key_on_every_step_noise_repeats():
    tokens = loop(jax.random.key(11), has_positions=False, is_fresh=False)
    assert p_value(tally(tokens, V), JOINT) < CONTROL
    assert p_value(tally(tokens[:, :1], V), P) >= ALPHA  # each step alone is exact


FLAT = jax.jit(functools.partial(tpu_inference.verify_flat, config=CONFIG))
CHAINS = jax.jit(functools.partial(sglang_jax.verify_chains, config=CONFIG))
ROWS = np.random.default_rng(4).normal(size=(3, K + 1, V)).astype(np.float32)
IDS = np.int32([[0, 1], [2, 3], [1, 0]])


def small(batch: int, order: list[int] | None = None) -> dict[str, Any]:
    """Three requests, in some order, then padding."""
    order = [0, 1, 2] if order is None else order
    rows = ROWS[order].reshape(-1, V)
    return dict(
        logits=np.concatenate([rows, np.full((2 * batch, V), np.nan, np.float32)]),
        draft_token_ids=np.append(IDS[order].reshape(-1), np.full(batch, -9, np.int32)),
        draft_lengths=np.int32([K] * 3 + [0] * (batch - 3)),
        temperature=np.ones(batch, np.float32),
        active=np.arange(batch) < 3,
    )


def tokens_of_three(found: Any) -> np.ndarray:
    return np.asarray(found.output.token_ids)[:3]


@pytest.mark.slow
@pytest.mark.newest
def test_padding_changes_no_token_and_the_slot_does():
    differ = 0
    for seed in range(8):
        key = jax.random.key(seed)
        alone, padded = (tokens_of_three(FLAT(**small(n), keys=key)) for n in (3, 7))
        np.testing.assert_array_equal(alone, padded)
        turned = tokens_of_three(FLAT(**small(7, [2, 1, 0]), keys=key))
        differ += not np.array_equal(turned[::-1], alone)
    assert differ  # this is what one key per step gives up


@pytest.mark.long
@pytest.mark.newest
def test_with_a_key_per_request_neither_slot_nor_neighbours_matter():
    keys, positions = jax.random.split(jax.random.key(2), 7), np.arange(7, dtype=np.int32) + 5
    want = tokens_of_three(FLAT(**small(7), keys=keys, positions=positions))
    order = np.array([2, 1, 0, 3, 4, 5, 6])
    turned = FLAT(**small(7, [2, 1, 0]), keys=keys[order], positions=positions[order])
    np.testing.assert_array_equal(tokens_of_three(turned)[::-1], want)


@pytest.mark.long
@pytest.mark.newest
def test_both_adapters_draw_the_same_tokens_from_the_same_key():
    lengths = np.int32([3, 4, 5, 0, 0, 0, 0])
    chains, ones = np.zeros((7, K + 1), np.int32), np.ones(7, np.float32)
    chains[:3, 1:] = IDS
    given = small(7)
    for seed in range(3):
        key = jax.random.key(seed)
        one = FLAT(**given, keys=step_keys(key, jnp.arange(7)), positions=lengths)
        other = CHAINS(given["logits"][:21], chains, lengths, temperatures=ones, keys=key)
        np.testing.assert_array_equal(one.output.token_ids, other.output.token_ids)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_raw_keys_are_the_same_keys(impl):
    key = jax.random.key(5, impl=impl)
    for keys, positions in ((key, None), (jax.random.split(key, 3), jnp.arange(3) + 5)):
        want = common.keys_of_requests(keys, positions, 3, sampled_by=("temperature", None))
        raw = jax.random.key_data(keys)
        found = common.keys_of_requests(raw, positions, 3, sampled_by=("temperature", None))
        np.testing.assert_array_equal(*map(jax.random.key_data, (found[0], want[0])))
        np.testing.assert_array_equal(found[1], want[1])


@pytest.mark.slow
def test_one_parameter_for_all_requests_is_that_of_each():
    given, keys = small(3), jax.random.key_data(jax.random.key(5, impl="rbg"))
    want = FLAT(**given | dict(top_p=np.full(3, 0.9, np.float32)), keys=keys)
    one = dict(temperature=np.ones(1, np.float32), top_p=np.full(1, 0.9, np.float32))
    np.testing.assert_array_equal(FLAT(**given | one, keys=keys).token_ids, want.token_ids)
