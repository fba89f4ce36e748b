"""Drafts from predictions equal a search in plain Python, and no text depends on them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import tiny
from serving.engines import compilations

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

SIZE, MOST, K, CASES = 24, 12, 4, 200
MOST_MATCHING = 8


def longest_match(text: Sequence[int], corpus: Sequence[int], place: int) -> int:
    """How many tokens before a place of a corpus equal the last ones of a text, at most 8."""
    n = 0
    while n < min(place, len(text), MOST_MATCHING) and corpus[place - 1 - n] == text[-1 - n]:
        n += 1
    return n


def expected_drafts(text: list[int], start: int, prediction: list[int]) -> tuple[list[int], int]:
    """What follows the longest match in a prediction, the nearest of equals, and its length."""
    whole = text[:start] + prediction
    found = [
        (longest_match(text, whole, start + i), -abs(i - (len(text) - start)), -i)
        for i in range(len(prediction))
    ]
    most, _, place = max(found, default=(0, 0, 0))
    return (prediction[-place:][:K] if most else []), most


def cases() -> Any:
    """Texts of few tokens, prompt and output, and predictions that are near them or are not."""
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, 4, (CASES, SIZE)).astype(np.int32)
    starts = rng.integers(1, 8, CASES).astype(np.int32)
    lengths = (starts + rng.integers(0, 12, CASES)).astype(np.int32)
    predictions = np.full((CASES, MOST), -1, np.int32)
    for b, row in enumerate(predictions):
        size = rng.integers(0, MOST + 1)
        own = token_ids[b, starts[b] :][:size]
        changed = np.where(rng.random(size) < 0.2, rng.integers(0, 4, size), own)
        row[:size] = changed if b % 4 else rng.integers(0, 5, size)
    return token_ids, lengths, starts, predictions


@functools.cache
def proposed(drafter: lm.Drafter, has_predictions: bool = True) -> np.ndarray:
    """``[CASES, K]``, in one program."""
    token_ids, lengths, starts, predictions = cases()
    given = dict(predictions=predictions, prompt_lengths=starts) if has_predictions else {}
    given = {name: jnp.asarray(x) for name, x in given.items()}
    context = tiny.context(token_ids, jnp.asarray(lengths), 0.0, k=K, **given)
    proposal, _ = jax.jit(drafter.propose)(None, context, (), None)
    return np.asarray(proposal.token_ids)


NGRAM = lm.NGramDrafter(min_ngram=3, max_ngram=MOST_MATCHING)
SUFFIX = lm.SuffixDrafter(max_match=MOST_MATCHING + 1)


@pytest.mark.parametrize("drafter", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
def test_a_prediction_is_drafted_where_nothing_matches_longer(drafter: Any) -> None:
    token_ids, lengths, starts, predictions = cases()
    least = drafter.min_ngram if drafter is NGRAM else drafter.min_match
    num_predicted = 0
    for b, own in enumerate(proposed(drafter, False)):
        text = token_ids[b, : lengths[b]].tolist()
        prediction = [x for x in predictions[b].tolist() if x >= 0]
        drafts, most = expected_drafts(text, int(starts[b]), prediction)
        before = max((longest_match(text, text, i) for i in range(len(text))), default=0)
        is_predicted = most > 0 and most >= (before if before >= least else 0)
        num_predicted += is_predicted
        truth = drafts + [-1] * (K - len(drafts)) if is_predicted else own.tolist()
        assert proposed(drafter)[b].tolist() == truth, (b, text, prediction)
    assert 40 < num_predicted < CASES - 20


def test_a_prediction_in_a_tree_is_a_chain() -> None:
    depth = 3
    token_ids, lengths, starts, predictions = cases()
    drafter = dataclasses.replace(SUFFIX, tree_depth=depth)
    given = dict(predictions=jnp.asarray(predictions), prompt_lengths=jnp.asarray(starts))
    context = tiny.context(token_ids, jnp.asarray(lengths), 0.0, k=K, **given)
    proposal, _ = jax.jit(drafter.propose)(None, context, (), None)
    chains = proposed(SUFFIX)
    # Where the text begins, nothing but the prediction matches a whole prompt.
    first = (lengths == starts) & (chains[:, 0] >= 0) & (predictions[:, 0] == chains[:, 0])
    assert first.sum() > 5
    ids, parents = np.asarray(proposal.token_ids)[first], np.asarray(proposal.parents)[first]
    assert (ids[:, :depth] == chains[first, :depth]).all() and (ids[:, depth:] == -1).all()
    assert (parents == np.arange(K)).all()


# In the loops

VOCAB, NUM_TOKENS = 12, 16
TABLE = tiny.random_table(VOCAB, seed=3)
AGREEMENT = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")
PROMPTS = [[1, 2], [1, 2], [1, 2, 3], [4]]
OPTIONS = [
    lm.RequestOptions(temperature=temperature, max_new_tokens=NUM_TOKENS, seed=seed)
    for seed, temperature in enumerate((0.0, 0.9, 0.0, 0.9))
]


@functools.cache
def plain() -> list[list[int]]:
    model = tiny.Trigram(VOCAB)
    output = lm.generate_plain(
        model, jnp.asarray(TABLE), PROMPTS, config=AGREEMENT, options=OPTIONS
    )
    return output.completions


def predictions() -> list[list[int] | None]:
    """The text, one that differs in the middle, none, and one that is of another request."""
    first, second, _, _ = plain()
    changed = [*second[:6], (second[6] + 1) % VOCAB, *second[7:]]
    return [first, changed, None, [11] * 30]


HEAD = lm.ModelDrafter(tiny.Trigram(VOCAB))
LOOKUPS = {
    "ngram": (lm.NGramDrafter(), None),
    "suffix": (lm.SuffixDrafter(), None),
    "suffix beside a model": (lm.FirstOf(lm.SuffixDrafter(), HEAD), (None, jnp.asarray(-TABLE))),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_no_text_depends_on_predictions_and_fewer_passes_make_it(name: str) -> None:
    drafter, draft_params = LOOKUPS[name]
    asked = [
        dataclasses.replace(one, prediction=x)
        for one, x in zip(OPTIONS, predictions(), strict=True)
    ]
    output = lm.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(TABLE),
        PROMPTS,
        drafter=drafter,
        draft_params=draft_params,
        config=AGREEMENT,
        options=asked,
    )
    assert output.completions == plain()
    num_steps = (output.steps.num_kept > 0).sum(axis=0)
    # All right: K drafts and one token more a pass. One wrong: that one, and a token to match.
    assert num_steps[0] == -(-NUM_TOKENS // (K + 1))
    assert num_steps[1] <= num_steps[0] + 2


def test_without_a_drafter_predictions_change_no_program() -> None:
    given = tiny.Trigram(VOCAB), jnp.asarray(TABLE), PROMPTS
    texts = lm.generate_plain(*given, config=AGREEMENT, options=OPTIONS).completions
    asked = [
        dataclasses.replace(one, prediction=x)
        for one, x in zip(OPTIONS, predictions(), strict=True)
    ]
    with compilations() as names:
        assert lm.generate_plain(*given, config=AGREEMENT, options=asked).completions == texts
    assert names == []


def test_an_engine_drafts_from_predictions_also_after_a_preemption() -> None:
    engine = lm.Engine(
        tiny.Trigram(VOCAB),
        lm.NGramDrafter(),
        AGREEMENT,
        num_slots=2,
        max_length=40,
        request_options=True,
        option_sizes=lm.OptionSizes(prediction=30),
    )
    driver = lm.EngineDriver(engine, jnp.asarray(TABLE), max_steps_ahead=0)
    texts: dict[int, list[int]] = {}
    num_steps: dict[int, int] = {}
    for prompt, asked, prediction in zip(PROMPTS, OPTIONS, predictions(), strict=True):
        request_id = driver.submit(prompt, dataclasses.replace(asked, prediction=prediction))
        texts[request_id] = []
        num_steps[request_id] = 0
    count = 0
    while not driver.is_idle:
        for update in driver.step():
            texts[update.request_id] += update.token_ids
            num_steps[update.request_id] += 1
        count += 1
        if count == 2:
            assert driver.preempt(0)
    assert list(texts.values()) == plain()
    # The first step of a request has no drafts.
    assert num_steps[0] == 1 + -(-(NUM_TOKENS - 1) // (K + 1))


def test_what_cannot_be_used_is_refused() -> None:
    model = tiny.Trigram(VOCAB)
    engine = lm.Engine(model, HEAD, AGREEMENT, num_slots=1, max_length=20, request_options=True)
    asked = lm.RequestOptions(prediction=[1, 2])
    says = r"prediction must be None with ModelDrafter, which looks in no text, but it is \(1, 2\)"
    with pytest.raises(ValueError, match=says):
        engine.check_options(asked)
    with pytest.raises(ValueError, match=says):
        lm.generate(
            model, TABLE, [[1]], drafter=HEAD, draft_params=TABLE, config=AGREEMENT, options=asked
        )
    lookup = dataclasses.replace(engine, drafter=lm.NGramDrafter())
    with pytest.raises(ValueError, match=r"prediction must fit option_sizes.prediction = 0"):
        lookup.check_options(asked)
    sized = dataclasses.replace(lookup, option_sizes=lm.OptionSizes(prediction=2))
    sized.check_options(asked)
    with pytest.raises(ValueError, match=r"prediction must hold ids in \[0, 12\)"):
        sized.check_options(lm.RequestOptions(prediction=[12]))
    with pytest.raises(ValueError, match="prediction must hold at least one token"):
        lm.RequestOptions(prediction=[])
