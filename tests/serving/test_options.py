"""What a request asks for besides a temperature: tokens, drafts and log-probabilities."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from upper_floor import RequestFields, options_per_request

import jax_specdec as sd
from jax_specdec import lm

from . import engines, sampled, tiny
from .chi_square import CONTROL, assert_distributed, p_value, tally

VOCAB, K, NUM_TOKENS = 7, 3, 12
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
TARGET = tiny.random_table(VOCAB, seed=30)
DRAFT = (0.8 * TARGET + 0.5 * tiny.random_table(VOCAB, seed=6)).astype(np.float32)
PROMPT = [1, 4, 0, 1, 4]
OPTIONS = [
    dataclasses.replace(one, max_new_tokens=NUM_TOKENS)
    for one in (
        lm.RequestOptions(),
        lm.RequestOptions(frequency_penalty=0.7),
        lm.RequestOptions(presence_penalty=1.5),
        lm.RequestOptions(repetition_penalty=1.8),
        lm.RequestOptions(frequency_penalty=-0.3, presence_penalty=0.4, repetition_penalty=0.8),
        lm.RequestOptions(allowed_token_ids=(0, 2, 5)),
        lm.RequestOptions(allowed_token_ids=range(4), frequency_penalty=1.0, top_k=3, min_p=0.1),
        lm.RequestOptions(logit_bias={5: 2.0, 1: -1.0}, repetition_penalty=1.3),
        lm.RequestOptions(bad_words=[[0], [1, 4, 4], [4, 1]]),
        lm.RequestOptions(stop_token_ids=(0, 1, 4), min_tokens=7),
    )
]
MIXED = lm.RequestOptions(
    max_new_tokens=3, min_p=0.02, top_k=6, top_p=0.97, frequency_penalty=0.8, presence_penalty=-0.5,
    repetition_penalty=1.4, allowed_token_ids=(0, 1, 2, 3, 5, 6), logit_bias={2: 1.0, 6: -0.5},
    bad_words=[[4, 1], [3, 3], [1, 2, 0]], min_tokens=3, stop_token_ids=(6,),
)  # fmt: skip
MIXED_TEMPERATURES = (0.7, 1.5) * 300
MODEL = lm.ModelDrafter(tiny.Trigram(VOCAB))
RAW, PROCESSED = (sd.LogprobsConfig(2, *given) for given in (("raw",), ("processed", True)))


def run(
    generate: Any, options: Any, count: int = len(OPTIONS), key: int = 3, **fields: Any
) -> lm.GenerateOutput:
    model, prompts = tiny.Trigram(VOCAB), [PROMPT] * count
    fields |= dict(options=options, key=jax.random.key(key))
    return generate(model, jnp.asarray(TARGET), prompts, **fields)


# Few programs for all tests, because each is compiled.
plainly = functools.partial(run, lm.generate_plain, logprobs=RAW)
speculative = functools.partial(
    run, lm.generate, drafter=MODEL, draft_params=jnp.asarray(DRAFT), config=CONFIG
)


def with_mixed(options: list[lm.RequestOptions], **changes: Any) -> lm.GenerateOutput:
    """Behind `options`, three tokens of `MIXED` for each of `MIXED_TEMPERATURES`."""
    count = len(MIXED_TEMPERATURES)
    options = options + tiny.options_of(count, MIXED, temperature=MIXED_TEMPERATURES)
    return speculative(options, len(options), logprobs=PROCESSED, **changes)


TEMPERATURES = [0.0, 0.5, 1.0, 2.0, 0.0, 0.7, 1.0, 0.8, 1.5, 0.6]
AT_TEMPERATURES = tiny.options_of(len(OPTIONS), OPTIONS, temperature=TEMPERATURES)
TRUTH = [sampled.greedy(TARGET, PROMPT, one, NUM_TOKENS, one.stop_token_ids) for one in OPTIONS]


def test_every_option_changes_what_is_written() -> None:
    assert all(TRUTH[0] != other for other in TRUTH[1:])
    assert 7 < len(TRUTH[-1]) < NUM_TOKENS  # at its first stop token after the seventh


@pytest.mark.long
def test_greedy_tokens_are_those_of_one_token_at_a_time() -> None:
    output = with_mixed(OPTIONS)
    assert output.completions[: len(OPTIONS)] == TRUTH
    accepted, proposed = (
        counts[:, : len(OPTIONS)].sum()
        for counts in (output.steps.num_accepted, output.steps.num_proposed)
    )
    assert 0 < accepted < proposed


@pytest.mark.slow
@pytest.mark.newest
def test_plain_decoding_takes_the_same_options() -> None:
    assert plainly(OPTIONS).completions == TRUTH


@pytest.mark.long
@pytest.mark.newest
def test_a_drafter_under_the_same_options_has_everything_accepted() -> None:
    output = with_mixed(AT_TEMPERATURES, draft_params=jnp.asarray(TARGET))
    kept = output.steps.num_emitted > 0
    assert (output.steps.num_accepted[kept] == output.steps.num_proposed[kept]).all()


@pytest.mark.long
@pytest.mark.newest
def test_a_greedy_differences_gap_is_that_of_the_processed_row() -> None:
    other = [[*completion] for completion in TRUTH]
    for completion in other:
        completion[3] = VOCAB - 1 - completion[3]  # not the middle token, which would stay
    outputs = [
        lm.GenerateOutput(completions, steps=None, status=[]) for completions in (other, TRUTH)
    ]
    model, params = tiny.Trigram(VOCAB), jnp.asarray(TARGET)
    found = lm.greedy_differences(model, params, [PROMPT] * len(OPTIONS), *outputs, OPTIONS)
    assert [difference.request for difference in found] == [
        b for b, truth in enumerate(TRUTH) if truth[3] != VOCAB // 2
    ]
    for difference in found:
        b, before = difference.request, TRUTH[difference.request][:3]
        row = tiny.next_logits(TARGET, [*PROMPT, *before])
        own, stops = _without_filters(OPTIONS[b]), OPTIONS[b].stop_token_ids
        p = sampled.processed(row, PROMPT, before, 1.0, own, stops)
        second, best = np.log(np.sort(p)[-2:])
        assert difference.index == 3
        assert difference.gap == pytest.approx(best - second, rel=1e-4)


# Fields in the call itself


def test_options_have_the_fields_and_types_of_a_calls_arguments() -> None:
    assert get_type_hints(RequestFields) == get_type_hints(lm.RequestOptions)


def test_a_field_in_the_call_goes_before_the_options() -> None:
    options = [lm.RequestOptions(temperature=0.5, top_p=0.9), lm.RequestOptions(max_new_tokens=3)]
    fields: RequestFields = {"max_new_tokens": 7, "temperature": 0.0}
    assert options_per_request(options, 2, fields) == [
        lm.RequestOptions(max_new_tokens=7, top_p=0.9),
        lm.RequestOptions(max_new_tokens=7),
    ]
    assert options_per_request(None, 2, {"top_k": 3}) == [lm.RequestOptions(top_k=3)] * 2
    assert options_per_request(options, 2, {}) == options


@pytest.mark.long
@pytest.mark.newest
def test_a_seed_gives_the_same_tokens_wherever_its_request_stands() -> None:
    def decode(options: list[lm.RequestOptions]) -> list[list[int]]:
        return plainly(options, temperature=2.0).completions

    seeded, others = (
        tiny.options_of(len(OPTIONS), OPTIONS, seed=range(first, first + len(OPTIONS)))
        for first in (0, 100)
    )
    found = decode(seeded)
    assert decode(seeded[::-1]) == found[::-1]
    for unlike in (decode(others), decode(OPTIONS)):
        assert all(one != other for one, other in zip(found, unlike, strict=True))


# Whoever asks for nothing


def eager(jaxpr: Any) -> Iterator[Any]:
    """Equations that are computed in any case: not those of branches, nor of loops with a test."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("cond", "while"):
            for value in jax.tree.leaves(list(equation.params.values())):
                if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                    yield from eager(getattr(value, "jaxpr", value))


@pytest.mark.long
@pytest.mark.newest
def test_where_nobody_asks_no_mask_is_read_and_nothing_counted() -> None:
    """By the step's program; times are in the benchmarks."""
    slots, vocab_size = 3, 500
    model = tiny.OneRow(vocab_size)
    engine = lm.Engine(
        model, lm.ModelDrafter(model), CONFIG, num_slots=slots, max_length=32, request_options=True
    )
    row = jnp.zeros((vocab_size,))
    state = jax.jit(engine.init_state)(row)
    words, seen, passes = (slots, -(-vocab_size // 32)), set(), ("while", "cond", "jit", "scan")
    for equation in eager(jax.make_jaxpr(engine.step)(row, row, state).jaxpr):
        name = equation.primitive.name
        seen.add(name)
        assert name in passes or all(x.aval.shape != words for x in equation.invars), name
        # The tokens of this step are added to what was counted; no sequence is.
        assert name != "scatter-add" or equation.invars[2].aval.size <= slots * (K + 1)
    assert {"while", "scan"} <= seen
    token_bitmask = state.batch.options.processors.allowed_tokens.token_bitmask
    assert token_bitmask.shape == words


# Distributions

CONTROLS = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "allowed_token_ids",
    "logit_bias", "bad_words", "min_tokens",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.newest
def test_sampled_tokens_have_the_distribution_of_plain_python() -> None:
    outputs = [with_mixed(OPTIONS, key=key) for key in range(10)]
    accepted, proposed = (
        sum(getattr(one.steps, name)[:, len(OPTIONS) :].sum() for one in outputs)
        for name in ("num_accepted", "num_proposed")
    )
    share = accepted / proposed
    assert 0.05 < share < 0.95, f"{share} of the drafts accepted: too one-sided to show much"
    tokens = np.array([row for one in outputs for row in one.completions[len(OPTIONS) :]])
    temperatures = np.resize(MIXED_TEMPERATURES, len(tokens))
    for temperature in (0.7, 1.5):
        counts = tally(tokens[temperatures == temperature], VOCAB)
        exact = functools.partial(sampled.exact_distribution, TARGET, PROMPT, 3, temperature)
        right = exact(MIXED, MIXED.stop_token_ids)
        assert_distributed(counts, right, f"three tokens at temperature {temperature}")
        for name in CONTROLS if temperature == 0.7 else ():
            neutral = getattr(lm.RequestOptions(), name)
            without = dataclasses.replace(MIXED, **{name: neutral})
            assert p_value(counts, exact(without, MIXED.stop_token_ids)) < CONTROL, name


# Log-probabilities


def expected_logprobs(
    completion: list[int], temperature: float, options: lm.RequestOptions, distribution: str
) -> np.ndarray:
    """``[n, V]``."""
    rows = []
    for i in range(len(completion)):
        row = tiny.next_logits(TARGET, [*PROMPT, *completion[:i]])
        if distribution == "raw":
            options, temperature = lm.RequestOptions(), 1.0
        # A greedy request is taken at temperature 1, where nothing is filtered.
        filters = options if temperature else _without_filters(options)
        stops = () if distribution == "raw" else filters.stop_token_ids
        p = sampled.processed(row, PROMPT, completion[:i], temperature or 1.0, filters, stops)
        with np.errstate(divide="ignore"):
            rows.append(np.log(p))
    return np.array(rows)


def _without_filters(options: lm.RequestOptions) -> lm.RequestOptions:
    return dataclasses.replace(options, min_p=0.0, top_k=0, top_p=1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("generate", "distribution"),
    [(with_mixed, "processed"), pytest.param(plainly, "raw", marks=pytest.mark.newest)],
    ids=["speculative", "plain"],
)
def test_logprobs_are_those_of_the_tokens(generate: Any, distribution: str) -> None:
    output = generate(AT_TEMPERATURES)
    steps, found = output.steps, output.steps.logprobs
    assert found is not None and output.logprobs is not None
    assert len(output.logprobs) == len(output.completions)
    pairs = zip(output.completions, output.logprobs, strict=True)
    for b, (completion, joined) in enumerate(itertools.islice(pairs, len(OPTIONS))):
        kept = np.arange(found.logprobs.shape[-1]) < steps.num_kept[:, b, None]
        assert np.isnan(found.logprobs[:, b][~kept]).all()
        assert (found.top_token_ids[:, b][~kept] == -1).all()
        want = expected_logprobs(completion, TEMPERATURES[b], OPTIONS[b], distribution)
        own = want[np.arange(len(completion)), completion]
        np.testing.assert_allclose(joined.logprobs, own, rtol=1e-4, atol=1e-5)
        ids = np.argsort(-want, axis=1, kind="stable")[:, :2]
        np.testing.assert_array_equal(joined.top_token_ids, ids)
        np.testing.assert_allclose(
            joined.top_logprobs, np.take_along_axis(want, ids, 1), rtol=1e-4, atol=1e-5
        )
        if joined.thresholds is not None:
            free = _without_filters(OPTIONS[b])
            possible = expected_logprobs(completion, TEMPERATURES[b], free, distribution)
            is_truncated = (np.isfinite(possible) & ~np.isfinite(want)).any(axis=1)
            assert is_truncated.any() == (free != OPTIONS[b])
            np.testing.assert_array_equal(joined.thresholds > -np.inf, is_truncated)


# Errors

NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[type[Exception], str, Any]] = [
    *((ValueError, "temperature", value) for value in (-0.5, NAN, INF, 1e39)),
    *((TypeError, "temperature", value) for value in (None, "hot")),
    *((ValueError, "min_p", value) for value in (-0.1, 1.1, NAN)),
    (TypeError, "min_p", "low"),
    *((ValueError, "top_p", value) for value in (0.0, 1.5, 1e-45, 1e-38)),
    (ValueError, "top_k", -2),
    (TypeError, "top_k", 0.5),
    *((ValueError, "frequency_penalty", value) for value in (INF, 3e38, -3e38)),
    *((ValueError, "presence_penalty", value) for value in (1e39, -3e38)),
    *((ValueError, "repetition_penalty", value) for value in (0.0, 1e-45, 1e-38, 1e-7, 3e38)),
    (TypeError, "repetition_penalty", None),
    (ValueError, "max_new_tokens", -1),
    (TypeError, "max_new_tokens", 2.5),
    (ValueError, "min_tokens", -1),
    (TypeError, "min_tokens", 0.5),
    *((ValueError, "seed", value) for value in (-1, 2**32)),
    (TypeError, "seed", np.zeros(2, np.uint32)),  # a key
    (TypeError, "stop_token_ids", 3),
    (TypeError, "stop_token_ids", [2.5]),
    *((ValueError, "allowed_token_ids", value) for value in ((), [-1])),
    (TypeError, "allowed_token_ids", "ab"),
    *((ValueError, "logit_bias", {3: value}) for value in (NAN, 1e39, 3e38, -1e39)),
    (TypeError, "logit_bias", {3: "much"}),
    *((TypeError, "logit_bias", value) for value in ({"the": 1}, {"+5": 1}, {"9" * 5000: 1}, [1])),
    *((ValueError, "logit_bias", value) for value in ({-1: 1.0}, {"5": 1.0, 5: 2.0})),
    (ValueError, "bad_words", [[1], []]),
    *((TypeError, "bad_words", value) for value in (["the"], "the", [3, 4], 3)),
]


@pytest.mark.parametrize(("error", "name", "value"), REFUSED)
def test_a_field_out_of_range_is_refused(error: type[Exception], name: str, value: Any) -> None:
    with pytest.raises(error, match=f"^{name}"):
        lm.RequestOptions(**{name: value})


@pytest.mark.slow
def test_extremes_that_are_taken_are_served() -> None:
    """At their ends, together, and where float32 is 0."""
    tiny_top_p, least = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).min)
    given: list[dict[str, Any]] = [
        {
            "repetition_penalty": factor,
            "frequency_penalty": added,
            "presence_penalty": added,
            "logit_bias": {1: bias, 2: least},
            "top_p": tiny_top_p,
            "temperature": temperature,
        }
        for factor in (1e-6, 1e6)
        for added in (-1e20, 1e20)
        for bias in (-1e20, 1e20)
        for temperature in (0.0, 1e-45, 1e-38, 1.0, 3e38)
    ]
    options = [lm.RequestOptions(max_new_tokens=NUM_TOKENS, **fields) for fields in given]
    drafter = lm.NGramDrafter(min_ngram=1)
    output = run(lm.generate, options, len(options), drafter=drafter, config=CONFIG)
    assert not np.any(output.status)
    assert [len(one) for one in output.completions] == [NUM_TOKENS] * len(options)
    zeros = {"temperature": 1e-45, "min_p": 1e-40, "presence_penalty": -1e-45}
    assert lm.RequestOptions(**zeros) == lm.RequestOptions()
    with pytest.raises(ValueError, match="top_p .* 1e-45: devices take it for 0$"):
        lm.RequestOptions(top_p=1e-45)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (3, TypeError, "options"),
        ([{}], TypeError, "options"),
        (OPTIONS[:2], ValueError, "options"),
        (lm.RequestOptions(allowed_token_ids=[VOCAB]), ValueError, "allowed_token_ids"),
    ],
    ids=["a number", "a dict", "too few", "an id past the vocabulary"],
)
@pytest.mark.parametrize("generate", [speculative, plainly], ids=["speculative", "plain"])
def test_the_loops_refuse_what_are_no_options(
    generate: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        generate(options)


def test_logprobs_that_there_are_not_are_refused() -> None:
    for name, value in (("distribution", "mine"), ("num_top", -1)):
        with pytest.raises(ValueError, match=f"^{name}"):
            sd.LogprobsConfig(**{name: value})
    with pytest.raises(ValueError, match="^num_top"):
        plainly(OPTIONS, logprobs=sd.LogprobsConfig(num_top=8))
    with pytest.raises(ValueError, match=r"^num_top must be in \[0, 6\]"):
        dataclasses.replace(engines.TABLE, logprobs=sd.LogprobsConfig(num_top=8))
