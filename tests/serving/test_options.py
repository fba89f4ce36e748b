"""What a request asks for besides a temperature: tokens, drafts and log-probabilities."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec._src.serving import generate as generate_lib
from jax_specdec._src.serving.options import RequestFields, options_per_request

from . import sampled, tiny
from .chi_square import CONTROL, assert_distributed, p_value, tally

pytestmark = pytest.mark.dearest

VOCAB, K, NUM_TOKENS = 7, 3, 12
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
TARGET = tiny.random_table(VOCAB, seed=30)
DRAFT = (0.8 * TARGET + 0.5 * tiny.random_table(VOCAB, seed=6)).astype(np.float32)
PROMPT = [1, 4, 0, 1, 4]
OPTIONS = [
    sd.RequestOptions(),
    sd.RequestOptions(frequency_penalty=0.7),
    sd.RequestOptions(presence_penalty=1.5),
    sd.RequestOptions(repetition_penalty=1.8),
    sd.RequestOptions(frequency_penalty=-0.3, presence_penalty=0.4, repetition_penalty=0.8),
    sd.RequestOptions(allowed_token_ids=(0, 2, 5)),
    sd.RequestOptions(allowed_token_ids=range(4), frequency_penalty=1.0, top_k=3, min_p=0.1),
    sd.RequestOptions(logit_bias={5: 2.0, 1: -1.0}, repetition_penalty=1.3),
    sd.RequestOptions(bad_words=[[0], [1, 4, 4], [4, 1]]),
    sd.RequestOptions(stop_token_ids=(0, 1, 4), min_tokens=7),
]
MODEL = (sd.ModelDrafter(tiny.Trigram(VOCAB)), jnp.asarray(DRAFT))
LOOKUP = (sd.NGramDrafter(min_ngram=1), None)
RAW, PROCESSED = (sd.LogprobsConfig(2, distribution) for distribution in ("raw", "processed"))


def run(
    generate: Any,
    options: Any = OPTIONS,
    *,
    requests: int = len(OPTIONS),
    temperature: Any = 0.0,
    num_tokens: int = NUM_TOKENS,
    **changes: Any,
) -> sd.GenerateOutput:
    if np.ndim(temperature):
        options = tiny.options_of(requests, options, temperature=temperature)
    else:
        changes["temperature"] = temperature
    return generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(TARGET),
        [PROMPT] * requests,
        max_new_tokens=num_tokens,
        options=options,
        key=jax.random.key(3),
        **changes,
    )


def speculative(*args: Any, drafter: tuple[Any, Any] = MODEL, **changes: Any) -> Any:
    drafted = functools.partial(
        sd.generate, drafter=drafter[0], draft_params=drafter[1], config=CONFIG
    )
    return run(drafted, *args, **changes)


# Few programs for all tests, because each is compiled.
by_model = functools.partial(speculative, drafter=MODEL, logprobs=PROCESSED)
plainly = functools.partial(run, sd.generate_plain, logprobs=RAW)


TEMPERATURES = [0.0, 0.5, 1.0, 2.0, 0.0, 0.7, 1.0, 0.8, 1.5, 0.6]
TRUTH = [sampled.greedy(TARGET, PROMPT, one, NUM_TOKENS, one.stop_token_ids) for one in OPTIONS]


def test_every_option_changes_what_is_written() -> None:
    assert all(TRUTH[0] != other for other in TRUTH[1:])
    assert 7 < len(TRUTH[-1]) < NUM_TOKENS  # at its first stop token after the seventh


def test_greedy_tokens_are_those_of_one_token_at_a_time() -> None:
    output = by_model()
    assert output.completions == TRUTH
    assert 0 < output.steps.num_accepted.sum() < output.steps.num_proposed.sum()


@pytest.mark.newest
def test_plain_decoding_takes_the_same_options() -> None:
    assert plainly().completions == TRUTH


@pytest.mark.long
def test_the_stream_takes_the_same_options_whatever_drafts() -> None:
    steps: Any = run(sd.generate_stream, drafter=LOOKUP[0], config=CONFIG)
    found: list[list[int]] = [[] for _ in OPTIONS]
    for step in steps:
        for b, (row, count) in enumerate(zip(step.token_ids, step.num_kept, strict=True)):
            found[b] += row[:count].tolist()
    assert found == TRUTH


def test_a_drafter_under_the_same_options_has_everything_accepted() -> None:
    output = by_model(drafter=(MODEL[0], jnp.asarray(TARGET)), temperature=TEMPERATURES)
    kept = output.steps.num_emitted > 0
    assert (output.steps.num_accepted[kept] == output.steps.num_proposed[kept]).all()


@pytest.mark.slow
def test_neutral_options_are_the_program_without_options() -> None:
    drafted = functools.partial(speculative, drafter=LOOKUP)
    without = [f(None).completions for f in (drafted, plainly)]
    size = generate_lib._generate._cache_size()
    for neutral in (sd.RequestOptions(), [sd.RequestOptions(top_k=0)] * len(OPTIONS)):
        assert [f(neutral).completions for f in (drafted, plainly)] == without
    assert generate_lib._generate._cache_size() == size


@pytest.mark.newest
def test_the_gap_of_a_greedy_difference_is_that_of_the_processed_row() -> None:
    other = [[*completion] for completion in TRUTH]
    for completion in other:
        completion[3] = VOCAB - 1 - completion[3]  # not the middle token, which would stay
    outputs = [
        sd.GenerateOutput(completions, steps=None, status=[]) for completions in (other, TRUTH)
    ]
    model, params = tiny.Trigram(VOCAB), jnp.asarray(TARGET)
    found = sd.testing.greedy_differences(model, params, [PROMPT] * len(OPTIONS), *outputs, OPTIONS)
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


def test_the_fields_of_options_are_the_arguments_of_a_call_by_the_same_types() -> None:
    assert get_type_hints(RequestFields) == get_type_hints(sd.RequestOptions)


def test_a_field_in_the_call_holds_for_every_request_whatever_its_options_say() -> None:
    options = [sd.RequestOptions(temperature=0.5, top_p=0.9), sd.RequestOptions(max_new_tokens=3)]
    fields: RequestFields = {"max_new_tokens": 7, "temperature": 0.0}
    assert options_per_request(options, 2, fields) == [
        sd.RequestOptions(max_new_tokens=7, top_p=0.9),
        sd.RequestOptions(max_new_tokens=7),
    ]
    assert options_per_request(None, 2, {"top_k": 3}) == [sd.RequestOptions(top_k=3)] * 2
    assert options_per_request(options, 2, {}) == options


def test_a_request_with_a_seed_samples_with_its_key_wherever_it_stands() -> None:
    prompts, seeded = [[1, 2], [3, 4], [1, 2]], sd.RequestOptions(seed=5)
    decode = functools.partial(
        sd.generate_plain,
        tiny.Trigram(VOCAB),
        jnp.asarray(TARGET),
        temperature=2.0,
        max_new_tokens=16,
    )
    options = [sd.RequestOptions(), seeded, seeded]
    three = decode(prompts, options=options, key=jax.random.key(1)).completions
    others = decode(prompts, options=[seeded, seeded, sd.RequestOptions()]).completions
    assert three[2] == others[0] and three[1] == others[1]
    assert three[0] != three[2]
    unlike = decode(prompts, options=[sd.RequestOptions(seed=6)] * 3).completions
    assert unlike[0] == unlike[2] != three[2]


# Whoever asks for nothing


def eager(jaxpr: Any) -> Iterator[Any]:
    """Equations that are computed in any case: not those of branches, nor of loops with a test."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in ("cond", "while"):
            for value in jax.tree.leaves(list(equation.params.values())):
                if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                    yield from eager(getattr(value, "jaxpr", value))


@pytest.mark.newest
def test_where_nobody_asks_no_mask_is_read_and_nothing_counted() -> None:
    """By the step's program; times are in the benchmarks."""
    slots, vocab_size = 3, 500
    model = tiny.OneRow(vocab_size)
    engine = sd.Engine(
        model, sd.ModelDrafter(model), CONFIG, num_slots=slots, max_length=32, request_options=True
    )
    row = jnp.zeros((vocab_size,))
    state = engine.init_state(row)
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
    # A program that does read and count is found out.
    count = functools.partial(
        sd.Penalties.from_sequences,
        vocab_size=vocab_size,
        **{name: jnp.zeros(slots) for name in ("frequency", "presence", "repetition")},
    )
    lengths = state.batch.lengths
    traced = jax.make_jaxpr(
        lambda ids, mask: (count(ids, lengths=lengths, prompt_lengths=lengths), mask >> 1)
    )(state.batch.token_ids, token_bitmask)
    found = {equation.primitive.name: equation.invars for equation in eager(traced.jaxpr)}
    assert found["scatter-add"][2].aval.size > slots * (K + 1) and "shift_right_logical" in found


# Distributions

MIXED = sd.RequestOptions(
    min_p=0.02, top_k=6, top_p=0.97, frequency_penalty=0.8, presence_penalty=-0.5,
    repetition_penalty=1.4, allowed_token_ids=(0, 1, 2, 3, 5, 6), logit_bias={2: 1.0, 6: -0.5},
    bad_words=[[4, 1], [3, 3], [1, 2, 0]],
)  # fmt: skip


@pytest.mark.statistics
def test_sampled_tokens_have_the_distribution_of_one_token_at_a_time() -> None:
    temperatures = np.resize([0.7, 1.5], 6000)
    output = speculative(MIXED, temperature=temperatures, requests=6000, num_tokens=3)
    share = output.steps.num_accepted.sum() / output.steps.num_proposed.sum()
    assert 0.05 < share < 0.95, f"{share} of the drafts accepted: too one-sided to show much"
    tokens = np.array(output.completions)
    for temperature in (0.7, 1.5):
        counts = tally(tokens[temperatures == temperature], VOCAB)
        right = sampled.exact_distribution(TARGET, PROMPT, 3, temperature, MIXED)
        assert_distributed(counts, right, f"three tokens at temperature {temperature}")
        wrong = sampled.exact_distribution(TARGET, PROMPT, 3, temperature, sd.RequestOptions())
        assert p_value(counts, wrong) < CONTROL


# Log-probabilities


def expected_logprobs(
    completion: list[int], temperature: float, options: sd.RequestOptions, distribution: str
) -> np.ndarray:
    """``[n, V]``."""
    rows = []
    for i in range(len(completion)):
        row = tiny.next_logits(TARGET, [*PROMPT, *completion[:i]])
        if distribution == "raw":
            options, temperature = sd.RequestOptions(), 1.0
        # A greedy request is taken at temperature 1, where nothing is filtered.
        filters = options if temperature else _without_filters(options)
        stops = () if distribution == "raw" else filters.stop_token_ids
        p = sampled.processed(row, PROMPT, completion[:i], temperature or 1.0, filters, stops)
        with np.errstate(divide="ignore"):
            rows.append(np.log(p))
    return np.array(rows)


def _without_filters(options: sd.RequestOptions) -> sd.RequestOptions:
    return dataclasses.replace(options, min_p=0.0, top_k=0, top_p=1.0)


@pytest.mark.parametrize(
    ("generate", "distribution"),
    [(by_model, "processed"), pytest.param(plainly, "raw", marks=pytest.mark.newest)],
    ids=["speculative", "plain"],
)
def test_logprobs_are_those_of_the_tokens(generate: Any, distribution: str) -> None:
    output = generate(temperature=TEMPERATURES)
    steps, found = output.steps, output.steps.logprobs
    assert found is not None
    for b, completion in enumerate(output.completions):
        kept = np.arange(found.logprobs.shape[-1]) < steps.num_kept[:, b, None]
        assert np.isnan(found.logprobs[:, b][~kept]).all()
        assert (found.top_token_ids[:, b][~kept] == -1).all()
        want = expected_logprobs(completion, TEMPERATURES[b], OPTIONS[b], distribution)
        own = want[np.arange(len(completion)), completion]
        np.testing.assert_allclose(found.logprobs[:, b][kept], own, rtol=1e-4, atol=1e-5)
        ids = np.argsort(-want, axis=1, kind="stable")[:, :2]
        np.testing.assert_array_equal(found.top_token_ids[:, b][kept], ids)
        np.testing.assert_allclose(
            found.top_logprobs[:, b][kept], np.take_along_axis(want, ids, 1), rtol=1e-4, atol=1e-5
        )


# Errors

REFUSED = {
    "a negative min-p": (dict(min_p=-0.1), ValueError, "min_p"),
    "a min-p above 1": (dict(min_p=1.1), ValueError, "min_p"),
    "no min-p": (dict(min_p=float("nan")), ValueError, "min_p"),
    "min-p in words": (dict(min_p="low"), TypeError, "min_p"),
    "no top-p": (dict(top_p=0.0), ValueError, "top_p"),
    "a top-p above 1": (dict(top_p=1.5), ValueError, "top_p"),
    "a negative top-k": (dict(top_k=-1), ValueError, "top_k"),
    "half a token": (dict(top_k=0.5), TypeError, "top_k"),
    "an infinite frequency penalty": (
        dict(frequency_penalty=float("inf")),
        ValueError,
        "frequency_penalty",
    ),
    "a presence penalty that float32 does not hold": (
        dict(presence_penalty=1e39),
        ValueError,
        "presence_penalty",
    ),
    "a repetition penalty of 0": (
        dict(repetition_penalty=0.0),
        ValueError,
        "repetition_penalty",
    ),
    "no repetition penalty": (dict(repetition_penalty=None), TypeError, "repetition_penalty"),
    "nothing allowed": (
        dict(allowed_token_ids=()),
        ValueError,
        "allowed_token_ids",
    ),
    "text allowed": (dict(allowed_token_ids="ab"), TypeError, "allowed_token_ids"),
    "a negative id": (dict(allowed_token_ids=[-1]), ValueError, "allowed_token_ids"),
}


@pytest.mark.parametrize(("fields", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_options_out_of_range_are_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        sd.RequestOptions(**fields)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (3, TypeError, "options"),
        ([{}], TypeError, "options"),
        (
            OPTIONS[:2],
            ValueError,
            "options",
        ),
        (
            sd.RequestOptions(allowed_token_ids=[VOCAB]),
            ValueError,
            "allowed_token_ids",
        ),
    ],
    ids=["a number", "a dict", "too few", "an id past the vocabulary"],
)
@pytest.mark.parametrize("generate", [by_model, plainly], ids=["speculative", "plain"])
def test_the_loops_refuse_what_are_no_options(
    generate: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        generate(options)


def test_logprobs_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="^distribution"):
        sd.LogprobsConfig(distribution="mine")
    with pytest.raises(ValueError, match="^num_top"):
        sd.LogprobsConfig(num_top=-1)
    with pytest.raises(ValueError, match="^num_top"):
        by_model(logprobs=sd.LogprobsConfig(num_top=8))
