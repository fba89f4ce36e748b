"""The emitted tokens have the target's distribution: chi-square tests with fixed keys.

A Markov chain stands for the target model and another for the drafter. Many independent
sequences are decoded at once, several steps each, as a serving loop does: keys stay, positions
grow. What comes out is compared with the target's chain: the first token, the first two, and the
first three jointly. Controls that must fail show that these tests can tell.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from lower_floor import Stream, uniforms

import jax_specdec as sd

from .batch import jitted

pytestmark = pytest.mark.newest


def long(*kinds):
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


V, K, LENGTH = 5, 2, 3
TEMPERATURES = (0.6, 1.0, 1.6)
B = 8000 * len(TEMPERATURES)
GROUP = np.arange(B, dtype=np.int32) % len(TEMPERATURES)
TEMPERATURE = np.float32(TEMPERATURES)[GROUP]
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
BLOCK = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="block")
AGREEMENT = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")

_rng = np.random.default_rng(0)
TARGET = (1.2 * _rng.standard_normal((V, V))).astype(np.float32)  # row: the token before
DRAFTER = (TARGET + 0.8 * _rng.standard_normal((V, V))).astype(np.float32)

LISTS = {
    "map": np.int32([[4, 1, 3]] * V),
    "candidates": np.int32([[(x + 2) % V, x] for x in range(V)]),
}
"""Ids that the drafter knows after each token."""

KINDS = ("probs", "logits", "normalized", "lookup", "chance", *LISTS)
BLOCK_KINDS = ("normalized", "lookup", "map")
NUM_TESTS = (len(KINDS) + len(BLOCK_KINDS) + 1) * len(TEMPERATURES) * LENGTH + 1
ALPHA = 0.01 / NUM_TESTS  # one failure in a hundred suites, had the keys not been fixed

verify = jax.jit(sd.rejection_sample)
explicit = jitted(functools.partial(sd.testing.rejection_sample_with_noise, implementation="xla"))


def chain(length: int, temperature: float) -> np.ndarray:
    """Probability of each sequence of tokens after token 0, ``[V] * length``."""
    step = scipy.special.softmax(TARGET.astype(np.float64) / temperature, axis=1)
    joint = step[0]
    for _ in range(length - 1):
        joint = joint[..., None] * step
    return joint


def p_value(counts: np.ndarray, expected: np.ndarray) -> tuple[float, str]:
    """Chi-square with cells below 5 expected pooled, and the frequencies for the message."""
    counts, expected = counts.ravel(), expected.ravel() / expected.sum() * counts.sum()
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    cells = zip(counts, expected, strict=True)
    report = "\n".join(f"{c:8.0f} seen {e:10.1f} expected" for c, e in cells)
    return float(scipy.stats.chisquare(counts, expected).pvalue), report


SHARED = "shared"
"""In place of a stream: the noise of the target's own tokens under the agreement rule."""


def drafted(kind, keys, positions, last, stream):
    """K tokens of the drafter after `last`, and the token before each."""

    def one(key, position, prev, temperature):
        ids, before = [], []
        for j in range(K):
            u = uniforms(key, position, Stream.DRAFT if stream == SHARED else stream, j)
            u = u[1 if stream == Stream.RECOVER else 0]  # to recover, that of an id
            if kind == "lookup":  # as an n-gram table proposes
                x = jnp.argmax(jnp.asarray(DRAFTER)[prev])
            elif kind == "chance":
                x = jnp.floor(u * V)
            else:
                listed = jnp.asarray(LISTS.get(kind, np.int32([range(V)] * V)))[prev]
                row = jnp.asarray(DRAFTER)[prev, listed] / temperature
                cdf = jnp.cumsum(jax.nn.softmax(row))
                place = jnp.minimum(jnp.sum(cdf <= u * cdf[-1]), len(listed) - 1)
                if stream == SHARED:
                    race = sd.testing.token_exponentials(key, position + j, V)[1:]
                    place = jnp.argmax(jnp.exp(row) / race[listed])
                x = listed[place]
            before.append(prev)
            prev = x.astype(jnp.int32)
            ids.append(prev)
        return jnp.stack(ids), jnp.stack(before)

    return jax.vmap(one)(keys, positions, last, TEMPERATURE)


drafted = jax.jit(drafted, static_argnames=("kind", "stream"))


def distribution(kind: str, before: np.ndarray, misstated: float = 1.0):
    """What the drafts were drawn from, read in place: one row per token before."""
    if kind in LISTS:
        ids, rows = LISTS[kind], before.reshape(-1)
        logits = np.take_along_axis(DRAFTER, LISTS[kind], axis=1)
        return sd.DraftLogits(logits, rows=rows, ids=ids[0] if kind == "map" else ids)
    if kind == "probs":
        tables = [scipy.special.softmax(DRAFTER / (t * misstated), axis=1) for t in TEMPERATURES]
        rows = GROUP[:, None] * V + before
        return sd.DraftProbs(np.float32(np.concatenate(tables)), rows=rows.reshape(-1))
    if kind == "logits":
        return sd.DraftLogits(DRAFTER, rows=before.reshape(-1))
    if kind == "normalized":  # a third of the requests has lost its rows
        rows = GROUP[:, None] * V + before
        tables = np.concatenate([DRAFTER] * len(TEMPERATURES))
        scaled = tables / np.repeat(np.float32(TEMPERATURES), V)[:, None]
        return sd.DraftLogits(
            tables,
            rows=rows.reshape(-1),
            valid=np.arange(B) // 3 % 3 > 0,
            log_normalizer=np.float32(scipy.special.logsumexp(scaled, axis=1)),
        )
    return None


@jax.jit
def noise_by_token(keys, positions):
    """Noise that belongs to a place in the sequence, whichever step comes to it."""

    def accept(key, position):
        return uniforms(key, position, Stream.ACCEPT, 0)[0]

    per_place = [jax.vmap(accept)(keys, positions + j) for j in range(K)]
    return sd.testing.Noise(
        jnp.stack(per_place, axis=1), sd.testing.draw_noise(keys, positions, K).recover
    )


def decode(
    kind,
    seed,
    *,
    config=CONFIG,
    stream=Stream.DRAFT,
    misstated=1.0,
    positions_grow=True,
    by_token=False,
):
    """``[B, LENGTH]`` tokens decoded speculatively after token 0."""
    keys = jax.random.split(jax.random.key(seed), B)
    counts = np.arange(B, dtype=np.int32) // len(TEMPERATURES) % 4
    counts = np.minimum(counts, K)  # 0, 1, 2, 2
    tokens = np.full((B, LENGTH + K + 1), -1)
    done = np.zeros(B, np.int32)
    last = np.zeros(B, np.int32)
    while done.min() < LENGTH:
        positions = 1 + done if positions_grow else np.ones_like(done)
        ids, before = jax.device_get(drafted(kind, keys, positions, last, stream))
        context = np.concatenate([last[:, None], ids], axis=1)
        logits = TARGET[context].reshape(-1, V)
        drafts = sd.Drafts.from_dense(ids, counts, distribution(kind, before, misstated))
        named = dict(sampling=sd.SamplingParams(temperature=TEMPERATURE), config=config)
        if by_token:
            out = explicit(logits, drafts, noise_by_token(keys, positions), **named)
        else:
            out = verify(logits, drafts, keys=keys, positions=positions, **named)
        out = jax.device_get(out)
        assert not out.status.any()
        for j in range(K + 1):
            writes = (j < out.num_emitted) & (done + j < tokens.shape[1])
            tokens[writes, done[writes] + j] = out.token_ids[writes, j]
        last = out.token_ids[np.arange(B), out.num_accepted]
        done = np.minimum(done + out.num_emitted, tokens.shape[1])
    return tokens[:, :LENGTH]


def check_lossless(tokens: np.ndarray) -> float:
    """Asserts every chi-square; returns the least p-value."""
    least = 1.0
    for group, temperature in enumerate(TEMPERATURES):
        mine = tokens[group == GROUP]
        for length in range(1, LENGTH + 1):
            counts = np.zeros([V] * length)
            np.add.at(counts, tuple(mine[:, :length].T), 1)
            p, report = p_value(counts, chain(length, temperature))
            assert p > ALPHA, f"{length} tokens at temperature {temperature}: p = {p:.3g}\n{report}"
            least = min(least, p)
    return least


@pytest.mark.parametrize(
    "kind",
    ["probs", *long("map", "candidates", "logits", "normalized", "lookup", "chance")],
)
def test_decoding_is_lossless_token_by_token_and_jointly(kind):
    print("least p-value", check_lossless(decode(kind, seed=1)))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["normalized", *long("lookup", "map")])
def test_block_verification_is_lossless_within_a_step_and_over_several(kind):
    print("least p-value", check_lossless(decode(kind, seed=1, config=BLOCK)))


def test_under_the_agreement_rule_every_drafter_gives_one_lossless_text():
    drafters = ("lookup", {}), ("chance", {}), ("logits", dict(stream=SHARED))
    first, *others = (decode(kind, seed=1, config=AGREEMENT, **how) for kind, how in drafters)
    print("least p-value", check_lossless(first))
    for tokens in others:
        np.testing.assert_array_equal(tokens, first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("probs", dict(misstated=1.3)),
        ("probs", dict(stream=Stream.RECOVER)),
        ("probs", dict(positions_grow=False)),
        ("lookup", dict(by_token=True, config=BLOCK)),
    ],
    ids=[
        "another q",
        "drafter shares recover bits",
        "bits reused",
        "bits of dropped drafts reused by blocks",
    ],
)
def test_a_mistake_is_noticed(kind, mistake):
    with pytest.raises(AssertionError, match="seen"):
        check_lossless(decode(kind, seed=1, **mistake))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")  # it runs longer than it compiles
def test_races_in_two_levels_draw_from_the_row():
    """Three tiles; in each an id with a quarter of it, and one of the very least in each tail."""
    vocab, per_call, num_calls = 4099, 64, 300
    config = dataclasses.replace(AGREEMENT, num_speculative_tokens=1)
    weights = np.full(vocab, 1e-4)
    weights[[0, 2048, 4096]] = 0.3, 0.1, 0.05
    weights[1], weights[2049] = 0.2, 1e-2
    cells = np.arange(vocab) // 2048 * 3 + np.minimum(np.arange(vocab) % 2048, 2)
    logits = jnp.asarray(np.log(np.repeat(weights[None], 2 * per_call, axis=0)), jnp.float32)
    keys = jax.random.split(jax.random.key(5), per_call)

    @jax.jit
    def draw(shares: bool):
        def of_position(position):
            at = position + jnp.arange(2)[None, :]
            noise = sd.testing.token_exponentials(keys[:, None], at, vocab)
            own = noise.at[:, :, 3:6].set(noise[:, :, :3])  # ids with the noise of tiles
            return sd.testing.rejection_sample_with_noise(
                logits,
                sd.Drafts.from_dense(jnp.full((per_call, 1), -1)),
                sd.testing.RaceNoise(jnp.zeros((per_call, 1)), jnp.where(shares, own, noise)),
                sampling=sd.SamplingParams(jnp.ones(per_call)),
                config=config,
            ).token_ids[:, 0]

        return jax.lax.map(of_position, jnp.arange(num_calls, dtype=jnp.int32))

    expected = np.bincount(cells, weights)
    for shares in (False, True):
        counts = np.bincount(cells[np.ravel(draw(shares))], minlength=len(expected))
        p, report = p_value(counts, expected)
        assert (p < 1e-12) if shares else (p > ALPHA), report


@functools.cache
def synthetic_acceptance() -> tuple[tuple[float, ...], np.ndarray, np.ndarray]:
    """The rates, and drafts kept by each of many requests, greedy and sampled in turn."""
    rates, b, k = (0.9, 0.6, 0.6, 0.1), 20000, 4
    rng = np.random.default_rng(3)
    temperature = np.float32(np.arange(b) % 2)
    out = verify(
        np.repeat(TARGET[:1], b * (k + 1), axis=0),
        sd.Drafts.from_dense(rng.integers(V, size=(b, k))),
        sampling=sd.SamplingParams(temperature=temperature),
        keys=jax.random.split(jax.random.key(4), b),
        positions=rng.integers(10000, size=b).astype(np.int32),
        config=sd.SpecDecodeConfig(
            num_speculative_tokens=k,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=rates,
        ),
    )
    return rates, np.asarray(out.num_accepted), temperature


@pytest.mark.long
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_synthetic_acceptance_is_what_was_asked_for_at_every_position(greedy):
    rates, accepted, temperature = synthetic_acceptance()
    accepted = accepted[(temperature == 0) == greedy]
    reached = len(accepted)
    for i, (before, rate) in enumerate(itertools.pairwise((1.0, *rates))):
        kept = int((accepted > i).sum())
        conditional = rate / before
        p = scipy.stats.binomtest(kept, reached, conditional).pvalue
        assert p > 0.001, f"position {i}: {kept} of {reached} kept, {conditional:.3f} expected"
        reached = kept
