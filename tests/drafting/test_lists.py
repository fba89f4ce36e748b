"""Drafting on a list of ids: what is drawn, kept and checked are target ids."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import test_options, tiny

import jax_specdec as sd
from jax_specdec import lm

pytestmark = [pytest.mark.newest, pytest.mark.long]

BATCH, SLOTS, K, VOCAB, C = 4, 5, 3, 60, 6
MAP = jax.device_put(np.array([50, 3, 17, 41, 8, 29], np.int32))
SAMPLING = sd.SamplingParams(
    jax.device_put(np.float32([0.0, 0.7, 1.0, 1.5])),
    top_k=jax.device_put(np.int32([0, 0, 2, 3])),
    top_p=jax.device_put(np.float32([1.0, 0.8, 1.0, 0.9])),
)
KEYS = jax.random.split(jax.random.key(2), BATCH)
POSITIONS = jax.device_put(np.int32([7, 3, 12, 9]))
LOGITS = jax.device_put(np.float32(2 * np.random.default_rng(0).standard_normal((BATCH, C))))
CANDIDATES = jax.device_put(
    np.int32([np.random.default_rng(b).permutation(VOCAB)[:C] for b in range(BATCH)])
)

draw = jax.jit(
    functools.partial(sd.sample_draft_tokens, sampling=SAMPLING, keys=KEYS, positions=POSITIONS)
)


@pytest.mark.parametrize("ids", [MAP, CANDIDATES], ids=["map", "candidates"])
def test_a_draft_is_the_id_of_the_drawn_column(ids):
    for offset in range(20):
        plain, listed = draw(LOGITS, offset=offset), draw(LOGITS, offset=offset, ids=ids)
        expected = np.broadcast_to(ids, (BATCH, C))[np.arange(BATCH), plain.token_ids]
        np.testing.assert_array_equal(listed.token_ids, expected)
        np.testing.assert_array_equal(listed.log_normalizer, plain.log_normalizer)
        np.testing.assert_array_equal(listed.row_max, plain.row_max)
        np.testing.assert_array_equal(listed.threshold, plain.threshold)
    given = dict(sampling=SAMPLING, keys=KEYS, positions=POSITIONS, offset=0, ids=np.asarray(ids))
    traced = jax.eval_shape(functools.partial(sd.sample_draft_tokens, **given), LOGITS)
    assert traced.token_ids.shape == (BATCH,)


@jax.jit
def write_row(store, offset, drawn, ids, slots):
    given = dict(ids=ids, positions=POSITIONS, sampling=SAMPLING, slots=slots)
    return store.write(offset, LOGITS, drawn, **given)


@jax.jit
def attach(store, drafts, order, slots):
    sampling = jax.tree.map(lambda x: x[order], SAMPLING)
    return store.attach(drafts, positions=POSITIONS[order], sampling=sampling, slots=slots)


def written(slots: np.ndarray) -> tuple[sd.DraftStore, dict[tuple[int, int], np.ndarray]]:
    """A store of candidates, and what each slot and offset lists."""
    rng, expected = np.random.default_rng(1), {}
    store = sd.DraftStore.create(SLOTS, K, C, own_ids=True)
    for offset in range(K):
        ids = np.stack([rng.permutation(VOCAB)[:C] for _ in slots]).astype(np.int32)
        drawn = draw(LOGITS, offset=offset, ids=jnp.asarray(ids))
        store = write_row(store, offset, drawn, ids, slots)
        expected |= {(slot, offset): row for slot, row in zip(slots.tolist(), ids, strict=True)}
    return store, expected


def test_a_request_finds_its_candidates_in_any_order():
    slots = np.array([4, 0, 3, 1], np.int32)
    store, expected = written(slots)
    assert store.logits.shape == store.ids.shape == (K * SLOTS, C)
    order = np.array([2, 0, 3, 1])
    counts = jnp.array([3, 1, 2, 3])
    drafts = sd.Drafts.from_flat(jnp.zeros(9, jnp.int32), counts)
    distribution = jax.device_get(attach(store, drafts, order, slots[order]).distribution)
    temperature = np.asarray(SAMPLING.temperature)
    assert distribution.valid.tolist() == (temperature[order] > 0).tolist()
    places = [
        (slots[b], i) for b, count in zip(order, counts.tolist(), strict=True) for i in range(count)
    ]
    for row, place in zip(distribution.rows, places, strict=True):
        np.testing.assert_array_equal(distribution.ids[row], expected[place])


def test_a_store_of_all_slots_keeps_one_map():
    store = sd.DraftStore.create(BATCH, K, C, ids=MAP)
    drawn = draw(LOGITS, offset=0, ids=MAP)
    store = write_row(store, 0, drawn, None, None)
    np.testing.assert_array_equal(np.asarray(store.logits)[:BATCH], LOGITS)
    own = sd.DraftStore.create(BATCH, K, C, own_ids=True)
    own = write_row(own, 2, drawn, CANDIDATES, None)
    np.testing.assert_array_equal(np.asarray(own.ids)[2 * BATCH :], CANDIDATES)
    drafts = sd.Drafts.from_dense(drawn.token_ids[:, None])
    attached = attach(store, drafts, np.arange(BATCH), None)
    np.testing.assert_array_equal(attached.distribution.ids, MAP)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: draw(LOGITS, offset=0, ids=MAP[:2]), ValueError, "ids"),
    (lambda: draw(LOGITS, offset=0, ids=LOGITS), TypeError, "ids"),
    (lambda: sd.DraftStore.create(SLOTS, K, C, ids=MAP[:2]), ValueError, "ids"),
    (lambda: sd.DraftStore.create(BATCH, 1, C, ids=CANDIDATES), ValueError, "ids"),
    (lambda: sd.DraftStore.create(SLOTS, K, C, ids=MAP, own_ids=True), ValueError, "own_ids"),
    (lambda: write(CANDIDATES, own_ids=False), ValueError, "ids"),
    (lambda: write(None, own_ids=True), ValueError, "ids"),
    (lambda: write(MAP, own_ids=True), ValueError, "ids"),
    (lambda: stored(ids=[5, 4]), ValueError, "ids"),
    (lambda: stored(num_candidates=4), ValueError, "num_candidates"),
]


def write(ids: Any, own_ids: bool) -> None:
    drawn = sd.DraftSample(*[jnp.zeros(BATCH)] * 3)
    sd.DraftStore.create(BATCH, K, C, own_ids=own_ids).write(
        0, LOGITS, drawn, ids=ids, positions=POSITIONS, sampling=SAMPLING
    )


def stored(**fields: Any) -> None:
    drafter = lm.ModelDrafter(tiny.Trigram(3), **fields)
    drafter.init_store(jnp.zeros((3, 3, 3)), 1, sd.SpecDecodeConfig(num_speculative_tokens=1))


@pytest.mark.parametrize(
    ("call", "error", "message"), ERRORS, ids=[f"{i}-{m}" for i, (*_, m) in enumerate(ERRORS)]
)
def test_what_cannot_be_is_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_drafters_compare_and_hash_by_their_ids():
    one, other = (lm.ModelDrafter(tiny.Trigram(2), ids=ids) for ids in ([5, 4], np.array([5, 4])))
    assert one == other and hash(one) == hash(other) and dataclasses.replace(one) == one
    assert one != lm.ModelDrafter(tiny.Trigram(2), ids=[4, 5])


# In a decoding loop; all requests with options of their own.

V = test_options.VOCAB
PERMUTED = np.array([3, 0, 6, 2, 5, 1, 4])
MODEL = tiny.Trigram(V)


def test_a_drafter_of_four_ids_changes_no_greedy_text():
    ids = np.array([4, 1, 6, 2])
    drafter = lm.ModelDrafter(tiny.Trigram(4), ids=ids)
    output = lm.generate(
        MODEL,
        jnp.asarray(test_options.TARGET),
        [test_options.PROMPT],
        drafter=drafter,
        draft_params=jnp.asarray(test_options.TARGET[:, :, ids]),
        config=sd.SpecDecodeConfig(num_speculative_tokens=K, draft_sample_method="greedy"),
        max_new_tokens=test_options.NUM_TOKENS,
    )
    assert output.completions == test_options.TRUTH[:1]
    assert output.steps.num_accepted.sum() > 0
