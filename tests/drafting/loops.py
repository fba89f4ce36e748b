"""A head in the loop of an engine, told what to draft, against one pass over the whole text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from models.weights import random_weights, sizes
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm

VOCAB, K, SLOTS, LONGEST, CHUNK = 11, 3, 5, 32, 8
SIZES = sizes(VOCAB, 16, 24, 2, (2, 1, 8))
TARGET = lm.models.Llama(SIZES)
PARAMS = random_weights(TARGET, 0, 4.0)  # fourfold, or every token follows every other alike
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
PROMPTS = [[4], [7, 2], [1, 2, 3, 4, 5, 6, 7], [9, 1] * 8, [3] * 8 + [5]]  # two are long
BUDGET = 12


OnePass = Callable[[np.ndarray, int, np.ndarray], Any]
"""Rows ``[K, Vd]`` that drafts after the first `length` tokens of a text are drawn from; of a
drafter whose rows list their own ids, of all of these."""


class Loop:
    """An engine whose requests come, leave and come back, each part compiled once."""

    def __init__(self, drafter: Any, params: Any, target: Any = (TARGET, PARAMS)) -> None:
        model, self.target_params = target
        self.params = params
        self.engine = lm.Engine(
            model, drafter, CONFIG, num_slots=SLOTS, max_length=LONGEST, prefill_sizes=(CHUNK,)
        )
        self.admit = jax.jit(functools.partial(self.engine.admit, self.target_params, params))
        draft = functools.partial(self.engine.draft, params)
        self.draft = jax.jit(draft, static_argnames="num_drafts")
        self.verify = jax.jit(functools.partial(self.engine.verify, self.target_params))

    def start(self) -> lm.DecodeState:
        """Empty slots."""
        return self.engine.init_state(self.params, self.target_params)

    def read(
        self, state: lm.DecodeState, slot: int, text: list[int], *, drafts_between: bool = False
    ) -> lm.DecodeState:
        """A request comes into a slot; its text is read whole, or in chunks as a driver does.

        It is one that had left, by one token at least: an engine drops a new one's first drafts.
        Between two chunks the drafter may draft, as in a step for other requests.
        """
        prompt = np.append(self.engine.pad_prompt(text), np.int32(0))
        options = lm.RequestOptions(max_new_tokens=len(PROMPTS[slot]) + BUDGET)
        for start in range(0, max(len(text) - 1, 1), CHUNK):
            start = min(start, len(prompt) - 1 - CHUNK)
            requests = lm.NewRequests(
                slots=np.array([slot]),
                prompts=prompt[None, start : start + CHUNK],
                lengths=np.array([len(text)]),
                keys=np.array([slot], np.uint32),
                options=self.engine.options_of([options], [0]),
                start=np.array([start]),
                next_token_ids=prompt[None, start + CHUNK],
            )
            if drafts_between and start:
                state = dataclasses.replace(state, draft_cache=self.draft(state).draft_cache)
            state = self.admit(state, requests)
        return state


def greedy(loop: Loop) -> list[list[int]]:
    """Whole texts of plain decoding, each token from a pass over all before it."""
    model, params = loop.engine.model, loop.target_params
    texts, start = [[*prompt] for prompt in PROMPTS], jnp.zeros(len(PROMPTS), jnp.int32)
    cache = model.init_cache(len(PROMPTS), LONGEST)
    score = jax.jit(lambda ids: run_pass(model, params, ids, start, cache).logits.argmax(axis=2))
    for _ in range(BUDGET):
        best = score(np.array([np.resize(text, LONGEST) for text in texts], np.int32))
        for text, row in zip(texts, best.tolist(), strict=True):
            text.append(row[len(text) - 1])
    return texts


def check(loop: Loop, one_pass: OnePass, ids: list[int], *, plain_step: int = -1) -> None:
    """Compares every row that is drafted from, after any acceptances.

    Args:
      loop: of a drafter.
      one_pass: that the rows must agree with.
      ids: target ids of the columns; all ids, where rows list their own.
      plain_step: a step that has no drafts.
    """
    texts, rng = greedy(loop), np.random.default_rng(0)
    state = loop.start()
    for slot, prompt in enumerate(PROMPTS):
        state = loop.read(state, slot, prompt)
    compared = np.zeros(K + 1, int)  # how often, by drafts accepted before
    accepted = np.full(SLOTS, -1)
    for step in range(7):
        if step == plain_step:
            state, record = loop.verify(loop.draft(state, num_drafts=0))
            accepted = np.where(np.asarray(record.num_kept) > 0, 0, -1)
            continue
        drafted = loop.draft(state)
        rows = np.asarray(drafted.store.logits).reshape(K, SLOTS, -1)
        columns = np.broadcast_to(np.array(ids), (K, SLOTS, len(ids)))
        if drafted.store.has_own_ids:
            columns = np.asarray(drafted.store.ids).reshape(rows.shape)
        lengths, token_ids = np.asarray(state.batch.lengths), np.asarray(state.batch.token_ids)
        proposed = np.asarray(drafted.proposal.token_ids)
        told = np.full((SLOTS, K), -1, np.int32)
        for slot, (text, length) in enumerate(zip(texts, lengths.tolist(), strict=True)):
            assert token_ids[slot, :length].tolist() == text[:length]
            found = proposed[slot]
            if length == len(text) or length == 1:  # done, or no row that has a next token
                assert (found < 0).all()
                continue
            best = rows[:, slot].argmax(axis=1)
            drawn = columns[np.arange(K), slot, best].astype(np.int32)
            assert found.tolist() == drawn.tolist()
            padded = np.resize(text, LONGEST).astype(np.int32)
            expected = np.asarray(one_pass(padded, np.int32(length), drawn))
            if drafted.store.has_own_ids:
                expected = np.take_along_axis(expected, columns[:, slot], axis=1)
            np.testing.assert_allclose(rows[:, slot], expected, rtol=2e-4, atol=2e-4)
            if accepted[slot] >= 0:
                compared[accepted[slot]] += 1
            # In place of the head's drafts: some right ones and a wrong one, or none at all.
            count = int(rng.integers(-1, K + 1))
            right = text[length:][: max(count, 0)]
            wrong = (text + [0])[length + len(right)] + 1
            told[slot] = [*right, wrong % VOCAB, *[0] * K][:K] if count >= 0 else -1
        proposal = dataclasses.replace(drafted.proposal, token_ids=jnp.asarray(told))
        drafted = dataclasses.replace(drafted, proposal=proposal)
        state, record = loop.verify(drafted)
        record = jax.device_get(record)
        accepted = np.where(record.num_kept > 0, record.num_accepted, -1)
        if step == 2:  # this one leaves its slot, and comes back
            length = int(state.batch.lengths[2])
            state = loop.read(state, 2, np.asarray(state.batch.token_ids)[2, :length].tolist())
    assert (compared > 0).all() and compared.sum() > 12


def check_between_chunks(loop: Loop) -> None:
    """A step between two chunks of a prompt changes nothing of what its request drafts."""
    states = [
        loop.draft(loop.read(loop.start(), 3, PROMPTS[3], drafts_between=between))
        for between in (False, True)
    ]
    alone, beside = (np.asarray(state.store.logits)[3::SLOTS] for state in states)
    assert (np.asarray(states[0].proposal.token_ids)[3] >= 0).all()
    np.testing.assert_array_equal(beside, alone)


def check_next_request(loop: Loop) -> None:
    """Nothing reaches the next request of a slot, not even NaN."""
    state = loop.read(loop.start(), 0, [7, 2, 3])
    features = state.features._replace(values=jnp.full_like(state.features.values, jnp.nan))
    # What a request with NaN leaves in caches: their values are finite, their keys are not.
    draft_cache, target_cache = (
        [(jnp.full_like(keys, jnp.nan), jnp.full_like(values, 1e9)) for keys, values in cache]
        for cache in (state.draft_cache, state.target_cache)
    )
    spoiled = dataclasses.replace(
        state, features=features, draft_cache=draft_cache, target_cache=target_cache
    )
    for prompt in PROMPTS[1], PROMPTS[4]:
        stores = [loop.draft(loop.read(one, 0, prompt)).store for one in (state, spoiled)]
        rows = [np.asarray(store.logits)[::SLOTS] for store in stores]
        np.testing.assert_array_equal(*rows)
        assert np.isfinite(rows[1]).all()
