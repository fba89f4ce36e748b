"""Log-probabilities of emitted tokens against float64 NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import platform

import jax_specdec as sd
from jax_specdec.testing import reference

from .batch import XLA, Batch, Layout, Request, pack, verify
from .cases import random_batch
from .layouts import RATES

K, NUM_TOP = 4, 5
BIG = dict(num_requests=8, num_drafts=26, num_speculative_tokens=K)
TIED = Layout(vocab=97, **BIG, dtype="bfloat16", kind="logits")  # many entries are equal
GEMMA = Layout(vocab=262144, **BIG, has_active=True)
FILTERED = dataclasses.replace(TIED, vocab_size=90, has_filters=True, has_bitmask=True)

STATIC = "config", "num_top", "distribution", "thresholds", "vocab_size"
token_logprobs = jax.jit(sd.token_logprobs, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def by_offset(*args: Any, **kwargs: Any) -> sd.TokenLogprobs:
    """As other devices run it; the CPU can do that too."""
    with platform.assume("default"):
        return sd.token_logprobs(*args, **kwargs)


@functools.partial(jax.jit, static_argnames=STATIC)
def split(
    target_logits: jax.Array, *args: Any, vocab_size: int | None = None, **kwargs: Any
) -> sd.TokenLogprobs:
    """Over eight parts of the vocabulary, padded until it divides."""
    mesh = jax.make_mesh((8,), ("v",), devices=jax.devices()[:8])
    v = target_logits.shape[1]
    target_logits = jnp.pad(target_logits, ((0, 0), (0, -v % 8)), constant_values=jnp.nan)
    kwargs |= dict(vocab_size=vocab_size or v, sharding=sd.VerifySharding(mesh, "v"))
    return sd.token_logprobs(target_logits, *args, **kwargs)


def log_softmax(row: np.ndarray, temperature: float) -> np.ndarray:
    x = np.asarray(row, np.float64) / temperature
    return x - np.max(x) - np.log(np.sum(np.exp(x - np.max(x))))


def expected(
    batch: Batch, output: sd.RejectionSampleOutput, distribution: str, num_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layout = batch.layout
    shape = output.token_ids.shape
    own = np.full(shape, np.nan)
    ids = np.full((*shape, num_top), -1)
    top = np.full((*shape, num_top), np.nan)
    cu = np.asarray(batch.drafts.cu_num_draft_tokens)
    logits = np.asarray(batch.target_logits, np.float64)[:, : layout.real_vocab]
    for b, j in np.ndindex(*shape):
        count = cu[b + 1] - cu[b]
        if j >= output.num_emitted[b] or (layout.has_bonus and j == count):
            continue
        row = logits[cu[b] + j + (0 if layout.has_bonus else b)]
        greedy = distribution == "raw" or batch.temperature[b] == 0
        logp = log_softmax(row, 1.0 if greedy else float(batch.temperature[b]))
        own[b, j] = logp[output.token_ids[b, j]]
        ids[b, j] = np.argsort(-row, kind="stable")[:num_top]
        top[b, j] = logp[ids[b, j]]
        ids[b, j][top[b, j] == -np.inf] = -1
    return own, ids, top


def compare(batch: Batch, function: Any, distribution: str, num_top: int = NUM_TOP) -> np.ndarray:
    """Asserts equality; returns where tokens were emitted and had a row."""
    output = verify(batch, XLA)
    args, kwargs = batch.arguments()
    found = function(
        *args[:2],
        output,
        sampling=kwargs["sampling"],
        config=batch.layout.config,
        vocab_size=batch.layout.vocab_size,
        num_top=num_top,
        distribution=distribution,
    )
    own, ids, top = expected(batch, output, distribution, num_top)
    assert found.logprobs.dtype == found.top_logprobs.dtype == jnp.float32
    np.testing.assert_allclose(found.logprobs, own, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found.top_token_ids, ids)
    np.testing.assert_allclose(found.top_logprobs, top, rtol=2e-5, atol=2e-5)
    return ~np.isnan(own)


@pytest.mark.newest
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(token_logprobs, id="cpu"),
        pytest.param(by_offset, id="elsewhere", marks=pytest.mark.slow),
        pytest.param(split, id="split", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("layout", "distribution"),
    [
        (Layout(vocab=5000, **BIG, vocab_size=4500, has_active=True, has_bonus=True), "processed"),
        pytest.param(TIED, "raw", marks=pytest.mark.slow),
        pytest.param(GEMMA, "processed", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_they_are_those_of_the_rows(layout: Layout, distribution: str, function: Any) -> None:
    there = [compare(random_batch(layout, seed), function, distribution) for seed in range(2, 8)]
    assert 20 < np.sum(there) < np.size(there)


@pytest.mark.long
def test_processed_ones_are_masked_and_filtered_raw_ones_not() -> None:
    row = np.log([[0.3, 0.2, 0.1, 0.4]])
    layout = Layout(vocab=4, num_speculative_tokens=1, num_requests=4, num_drafts=4)
    batch = pack([Request(target=row, draft_ids=(), temperature=t) for t in (1, 1, 1, 0)], layout)
    sampling = sd.SamplingParams(
        temperature=np.float32([1.0, 0.5, 1.0, 0.0]),
        min_p=np.float32([0.5, 0.0, 0.0, 0.9]),
        top_k=np.int32([0, 2, 0, 1]),
        top_p=np.float32([1.0, 1.0, 0.6, 0.1]),
    )
    mask = np.full((8, 1), 0b0111, np.uint32)  # all but the likeliest
    output = sd.RejectionSampleOutput(
        np.zeros((4, 2), np.int32), *[np.full((4,), n, np.int32) for n in (0, 1, 0)]
    )
    call = dict(sampling=sampling, config=layout.config, num_top=4)
    args, _ = batch.arguments()
    call["token_bitmask"] = mask[: args[0].shape[0]]
    for function in (token_logprobs, by_offset, split):
        found = function(*args[:2], output, distribution="processed", **call)
        top, ids = np.exp(found.top_logprobs)[:, 0], np.asarray(found.top_token_ids)[:, 0]
        want = [[0.6, 0.4, 0, 0], [9 / 13, 4 / 13, 0, 0], [0.6, 0.4, 0, 0], [0.5, 1 / 3, 1 / 6, 0]]
        np.testing.assert_allclose(top, want, rtol=1e-5)
        assert ids.tolist() == [[0, 1, -1, -1]] * 3 + [[0, 1, 2, -1]]
    raw = token_logprobs(*args[:2], output, distribution="raw", **call)
    np.testing.assert_allclose(
        np.exp(raw.top_logprobs)[:, 0], [[0.4, 0.3, 0.2, 0.1]] * 4, rtol=1e-5
    )
    np.testing.assert_allclose(np.exp(raw.logprobs)[:, 0], [0.3] * 4, rtol=1e-5)


# What filters kept


def check_thresholds(batch: Batch, output: sd.RejectionSampleOutput, function: Any) -> np.ndarray:
    """Asserts what a trainer needs; returns the number of ids that each token's row kept, or 0.

    With its own pass over the rows, which differ a little, it finds the ids that the oracle keeps,
    and the log-probability that the token was drawn with.
    """
    args, kwargs = batch.arguments()
    call = {name: x for name, x in kwargs.items() if name in ("sampling", "config", "vocab_size")}
    call |= dict(distribution="processed", token_bitmask=kwargs.get("token_bitmask"))
    found = function(*args[:2], output, thresholds=True, **call)
    without = function(*args[:2], output, **call)
    assert without.thresholds is None
    np.testing.assert_array_equal(found.logprobs, without.logprobs)
    cu, rng = np.asarray(batch.drafts.cu_num_draft_tokens), np.random.default_rng(0)
    num_kept = np.zeros(output.token_ids.shape, int)
    for b, j in np.ndindex(*num_kept.shape):
        threshold = found.thresholds[b, j]
        if j >= output.num_emitted[b]:
            assert np.isnan(threshold)
            continue
        m, token, temperature = cu[b] + b + j, output.token_ids[b, j], batch.temperature[b]
        row = np.asarray(batch.target_logits[m], np.float64)
        bits = np.arange(len(row)) < batch.layout.real_vocab
        if batch.token_bitmask is not None:
            words = np.asarray(batch.token_bitmask)[m].astype(np.uint32)
            bits &= np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row)] == 1
        row = np.where(bits, row, -np.inf)
        filters = {name: x[b].item() for name, x in batch.filters.items()}
        want, margin = row, np.inf
        if temperature:
            want, margin = reference._filter_row(row, float(temperature), **filters)
        assert margin > 1e-5
        wanted = want > -np.inf
        left_out = (row > -np.inf) & ~wanted
        is_kept = bits & (np.float32(row) >= threshold) & (row > -np.inf)
        np.testing.assert_array_equal(is_kept, wanted)
        assert (threshold == -np.inf) == (not left_out.any())
        if left_out.any():  # the same of logits that were computed in another way
            gap = row[wanted].min() - row[left_out].max()
            noise = rng.uniform(-0.4, 0.4, len(row)) * gap * (gap > 1e-3)
            np.testing.assert_array_equal(bits & (row + noise >= threshold), wanted)
        log_p = log_softmax(np.where(is_kept, row, -np.inf), temperature or 1.0)
        np.testing.assert_allclose(found.logprobs[b, j], log_p[token], rtol=2e-5, atol=2e-5)
        assert is_kept[token] or batch.layout.rates
        num_kept[b, j] = is_kept.sum()
    return num_kept


FORMS = [
    pytest.param(token_logprobs, id="cpu"),
    pytest.param(by_offset, id="elsewhere", marks=pytest.mark.slow),
    pytest.param(split, id="split", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("function", FORMS)
def test_a_trainer_finds_what_was_kept(function: Any) -> None:
    a, b, c = 1.0, float(np.nextafter(np.float32(1), np.float32(0))), -2.0
    rows: list[tuple[list[float], dict[str, Any], int]] = [
        ([a, c, 0, 3, 3, 0, c, c], dict(), 8),
        ([a, c, 0, 3, 3, 0, c, c], dict(top_k=8), 8),
        ([a, c, 0, 3, 3, 0, c, c], dict(top_k=1), 2),  # ties at the threshold are kept
        ([a, c, 0, 3, 3, 0, c, c], dict(top_k=4), 5),
        ([a, c, 0, 3, 3, 0, c, c], dict(top_k=4, temperature=0.0), 8),
        ([a, c, 0, 3, 3, 0, c, c], dict(top_p=0.1), 2),
        ([a, c, 0, 3, 3, 0, c, c], dict(top_p=0.96, temperature=0.7), 3),
        ([a, c, 0, 3, 3, 0, c, c], dict(min_p=0.04), 5),
        ([a, c, 0, 3, 3, 0, c, c], dict(min_p=1.0), 2),
        ([a, c, 0, 3, 3, 0, c, c], dict(min_p=0.04, top_k=3, top_p=0.9), 2),
        ([a, b, b, c, c, c, c, c], dict(top_k=1), 1),  # no float32 lies between
        ([a, b, b, c, c, c, c, c], dict(top_k=2), 3),
        ([c, c, c, c, c, c, c, c], dict(top_k=1), 8),  # all are equal
        ([-np.inf, a, -np.inf, 0, *[-np.inf] * 4], dict(top_k=1), 1),
        ([-np.inf, a, -np.inf, 0, *[-np.inf] * 4], dict(top_k=3), 2),
    ]
    batch = pack(
        [Request(target=np.array([row]), draft_ids=(), **given) for row, given, _ in rows],
        Layout(num_requests=len(rows), num_drafts=1, has_filters=True),
    )
    num_kept = check_thresholds(batch, verify(batch, XLA), function)
    possible = [sum(x > -np.inf for x in row) for row, _, _ in rows]
    assert num_kept[:, 0].tolist() == [min(n, m) for (*_, n), m in zip(rows, possible, strict=True)]
    assert not num_kept[:, 1:].any()


@pytest.mark.parametrize(
    ("rule", "function"),
    [
        (dict(), token_logprobs),
        pytest.param(dict(block=True), by_offset, marks=pytest.mark.slow),
        pytest.param(dict(agreement=True, kind="none"), split, marks=pytest.mark.slow),
        pytest.param(dict(rates=RATES), token_logprobs, marks=pytest.mark.long),
    ],
    ids=["standard", "block", "agreement", "synthetic"],
)
def test_a_trainer_finds_what_any_rule_kept(rule: dict[str, Any], function: Any) -> None:
    for seed in (2, 3):
        batch = random_batch(dataclasses.replace(FILTERED, **rule), seed)
        num_kept = check_thresholds(batch, verify(batch, XLA), function)
        assert len({*num_kept.flat}) > 4


@pytest.mark.long
def test_ties_go_to_the_lowest_id_the_impossible_has_none() -> None:
    row = np.full((1, TIED.vocab), -np.inf)
    row[0, 1:4] = -0.0, 0.0, -0.0
    batch = pack([Request(target=row, draft_ids=(), temperature=0.0)], TIED)
    output = verify(batch, XLA)
    args, kwargs = batch.arguments()
    found = token_logprobs(
        *args[:2],
        output,
        sampling=kwargs["sampling"],
        config=TIED.config,
        num_top=NUM_TOP,
        distribution="raw",
        vocab_size=None,
    )
    assert found.top_token_ids[0, 0].tolist() == [1, 2, 3, -1, -1]
    np.testing.assert_allclose(
        found.top_logprobs[0, 0], [*np.log([1 / 3] * 3), -np.inf, -np.inf], rtol=1e-6
    )
    assert np.isnan(found.logprobs[0, 1]) and np.isnan(found.top_logprobs[0, 1]).all()
    assert found.top_token_ids[0, 1].tolist() == [-1] * 5


@pytest.mark.long
def test_rows_without_tokens_are_not_read() -> None:
    batch = random_batch(TIED, 3, broken=0)
    output = verify(batch, XLA)
    emitted = [
        batch.drafts.cu_num_draft_tokens[b] + b + n for b, n in enumerate(output.num_emitted)
    ]
    logits = np.array(batch.target_logits)
    poisoned = np.full_like(logits, np.nan)
    for b, end in enumerate(emitted):
        begin = end - output.num_emitted[b]
        poisoned[begin:end] = logits[begin:end]
    assert np.isnan(poisoned).any()
    compare(batch.replace(target_logits=poisoned), token_logprobs, "raw")


@pytest.mark.long
def test_without_alternatives_there_are_none() -> None:
    compare(random_batch(TIED, 3), token_logprobs, "processed", num_top=0)


@pytest.mark.long
def test_without_rows_there_is_nothing() -> None:
    drafts = sd.Drafts.from_flat(jnp.zeros((0,), jnp.int32), jnp.zeros((2,), jnp.int32))
    one = jnp.ones((2,), jnp.int32)
    output = sd.RejectionSampleOutput(jnp.array([[3, -1], [4, -1]]), 0 * one, one, 0 * one)
    found = sd.token_logprobs(
        jnp.zeros((0, 9)),
        drafts,
        output,
        sampling=sd.SamplingParams(jnp.ones(2)),
        config=sd.SpecDecodeConfig(num_speculative_tokens=1),
        num_top=2,
        distribution="processed",
        thresholds=True,
    )
    assert np.isnan(found.thresholds).all() and found.thresholds.shape == (2, 2)
    assert np.isnan(found.logprobs).all() and found.top_token_ids.shape == (2, 2, 2)


@pytest.mark.long
@pytest.mark.parametrize("num_top", [0, 20])
def test_temporaries_are_those_of_one_row(num_top: int) -> None:
    b, vocab = 8, 128256
    of = jax.ShapeDtypeStruct
    int32 = jnp.int32
    lowered = token_logprobs.lower(
        of((b * K + b, vocab), jnp.bfloat16),
        sd.Drafts(of((b * K,), int32), of((b + 1,), int32)),
        sd.RejectionSampleOutput(of((b, K + 1), int32), *[of((b,), int32)] * 3),
        sampling=sd.SamplingParams(of((b,), jnp.float32)),
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        num_top=num_top,
    )
    used = lowered.compile().memory_analysis().temp_size_in_bytes
    rows = used / (4 * vocab)
    assert rows < (4 if num_top else 1.1), f"{rows:.2f} float32 rows"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(config=4), TypeError, "config"),
        (dict(output=None), TypeError, "output"),
        (dict(sampling=0.5), TypeError, "sampling"),
        (dict(config=sd.SpecDecodeConfig(num_speculative_tokens=2)), ValueError, "output"),
        (dict(distribution="top"), ValueError, "distribution"),
        (dict(thresholds=True), ValueError, "thresholds must be False with distribution"),
        (dict(thresholds=1, distribution="processed"), TypeError, "thresholds"),
        (dict(num_top=1.0), TypeError, "num_top"),
        (dict(num_top=True), TypeError, "num_top"),
        (dict(num_top=-1), ValueError, "num_top"),
        (dict(num_top=6, vocab_size=5), ValueError, "num_top"),
        (dict(target_logits=jnp.zeros((5, 9))), ValueError, "target_logits"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    one = jnp.ones((2,), jnp.int32)
    call = dict(
        target_logits=jnp.zeros((3, 9)),
        drafts=sd.Drafts.from_flat(jnp.array([1]), jnp.array([1, 0])),
        output=sd.RejectionSampleOutput(jnp.array([[3, -1], [4, -1]]), 0 * one, one, 0 * one),
        sampling=sd.SamplingParams(jnp.ones(2)),
        config=sd.SpecDecodeConfig(num_speculative_tokens=1),
    )
    with pytest.raises(error, match=f"^{message}"):
        sd.token_logprobs(**(call | change))
