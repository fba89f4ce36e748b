"""Under the agreement rule the text of a seed is that of plain decoding, whatever is drafted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_weights
from passes import run as run_pass
from upper_floor import _processed

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.testing import reference

from . import engines, test_eagle3, tiny
from .test_draft_budget import Cycling

MAX_MARGIN = 1e-4
"""Passes of one token and of several differ in the last bits of their logits."""

MODEL = engines.LLAMA.model
B, VOCAB = 6, engines.VOCAB
NEW_TOKENS = 14

_rng = np.random.default_rng(6)
PROMPTS = [_rng.integers(0, VOCAB, n).tolist() for n in (3, 8, 1, 5, 2, 7)]
OPTIONS = [
    lm.RequestOptions(seed=100 + b, max_new_tokens=NEW_TOKENS, **fields)
    for b, fields in enumerate(
        [
            # All ask for something: an engine need not compile its steps without options.
            dict(temperature=1.0, presence_penalty=0.2),
            dict(temperature=0.0, repetition_penalty=1.1),
            dict(temperature=0.7, top_k=4, frequency_penalty=0.5),
            dict(temperature=1.0, top_p=0.8, min_p=0.02, repetition_penalty=1.4),
            dict(temperature=0.4, logit_bias={2: 1.5}, presence_penalty=0.3),
            dict(temperature=1.3, allowed_token_ids=(0, 1, 3, 4), bad_words=((1, 1),)),
        ]
    )
]
SCRIPT = _rng.integers(-1, VOCAB + 1, (B, 64)).astype(np.int32)


@functools.cache
def params() -> Any:
    """Sharper, most tokens are all but certain."""
    return random_weights(MODEL, 16, 4 / 3)


def config_of(k: int) -> sd.SpecDecodeConfig:
    return sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method="agreement")


@functools.cache
def plain() -> list[list[int]]:
    return lm.generate_plain(
        MODEL, params(), PROMPTS, config=config_of(1), options=OPTIONS
    ).completions


@jax.jit
def score(token_ids: jax.Array) -> jax.Array:
    """Logits of a text, whatever stands after it."""
    cache, zero = MODEL.init_cache(*token_ids.shape), jnp.zeros(1, jnp.int32)
    return run_pass(MODEL, params(), token_ids, zero, cache).logits


def margin(b: int, text: list[int]) -> float:
    """How close the choice of the token after `text` is, by the oracle."""
    asked, sequence = OPTIONS[b], np.array([[*PROMPTS[b], *text]], np.int32)
    count = sequence.shape[1]
    logits = np.asarray(score(np.resize(sequence, (1, 32)))[:, count - 1])
    key = jax.random.key(np.uint32(asked.seed))[None]
    exponential = sd.testing.token_exponentials(key, np.array([count], np.int32), VOCAB)
    output = reference.rejection_sample(
        _processed(logits, asked, sequence, len(PROMPTS[b]))[None],
        sd.Drafts(np.zeros(0, np.int32), np.zeros(2, np.int32)),
        sd.testing.RaceNoise(np.zeros((1, 1)), np.asarray(exponential)[:, None]),
        temperature=[asked.temperature],
        min_p=[asked.min_p],
        top_k=[asked.top_k],
        top_p=[asked.top_p],
        method="agreement",
        num_speculative_tokens=1,
    )
    return float(output.margin[0])


def check_texts(texts: list[list[int]]) -> None:
    """Asserts that texts are those of plain decoding, up to calls that are too close."""
    for b, (text, expected) in enumerate(zip(texts, plain(), strict=True)):
        if text != expected:
            same = next(i for i in range(NEW_TOKENS) if text[:i] != expected[:i]) - 1
            found = margin(b, expected[:same])
            print(f"request {b} differs from token {same} on, margin {found:.3g}")
            assert found < MAX_MARGIN, f"request {b}: {text} but plainly {expected}"


@pytest.mark.long
@pytest.mark.newest
def test_generate_gives_the_text_of_plain_decoding():
    output = lm.generate(
        MODEL,
        params(),
        PROMPTS,
        drafter=tiny.Scripted(),
        draft_params=jnp.asarray(SCRIPT),
        config=config_of(5),
        options=OPTIONS,
    )
    check_texts(output.completions)
    assert output.steps.num_accepted.sum() > 0


@pytest.mark.slow
def test_engines_give_it_whatever_the_traffic_and_who_is_preempted():
    budget = (0, 2)
    engine = dataclasses.replace(
        test_eagle3.ENGINE, config=config_of(2), request_options=True, draft_budget=budget
    )
    driver = engines.driver_of(
        engine,
        params(),
        test_eagle3.weights_of(test_eagle3.ENGINE)[1],
        max_steps_ahead=1,
        max_prefills=1,
    )
    driver.draft_choice = Cycling(budget, driver.draft_choice.rates)
    ids, updates = {}, []
    for b in np.random.default_rng(0).permutation(B).tolist():
        driver.submit([1, 2], max_new_tokens=3, temperature=1.0, top_k=5)
        ids[driver.submit(PROMPTS[b], OPTIONS[b])] = b
        updates += driver.step()
    preempted = 0
    for i in range(60):
        updates += driver.step()
        preempted += driver.preempt([*ids][i % B]) if not driver.is_idle and i < 20 else 0
    found = engines.run(driver, updates)
    assert preempted > 3
    check_texts([text.token_ids for b in range(B) for i, text in found.items() if ids.get(i) == b])


@pytest.mark.slow
@pytest.mark.newest
def test_another_seed_gives_another_text():
    """What the tests above could not notice if texts were always the same."""
    others = [dataclasses.replace(one, seed=7 + one.seed) for one in OPTIONS]
    texts = lm.generate_plain(
        MODEL, params(), PROMPTS, config=config_of(1), options=others
    ).completions
    different = [a != b for a, b in zip(texts, plain(), strict=True)]
    assert sum(different) >= 3, different
    with pytest.raises(AssertionError, match="plainly"):
        check_texts(texts)
