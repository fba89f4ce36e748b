"""Numbers at the edge: vocabularies, temperatures, huge logits and ties, against float64 NumPy."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import scipy.special

import jax_specdec as sd

from .backends import all_at_once
from .batch import ALMOST_ONE, XLA, Batch, Layout, Request, agree, check, pack, verify
from .cases import random_filters, uniforms

HUGE = 1e30
VERIFIERS = {"lazy": XLA, "all at once": all_at_once}
K, B = 2, 4


def layout(vocab: int, kind: str = "logits", dtype: str = "float32", **fields: bool) -> Layout:
    return Layout(
        vocab=vocab,
        num_speculative_tokens=K,
        num_requests=B,
        num_drafts=K * B,
        kind=kind,
        dtype=dtype,
        draft_dtype=dtype,
        has_filters=True,
        **fields,
    )


def row(rng: np.random.Generator, vocab: int, temperature: float) -> np.ndarray:
    """Logits of one of many shapes; differences matter at the scale of the temperature."""
    shape = rng.integers(9)
    x = rng.standard_normal(vocab)
    if shape == 0:
        return 3 * x
    if shape == 1:  # close together, far from 0
        return rng.choice([-1, 1]) * 64 + np.round(x * 8) / 8 * min(max(temperature, 1e-2), 1e2)
    if shape == 2:
        return np.zeros(vocab)
    if shape == 3:  # a flat row with one entry that stands out a little
        x = np.zeros(vocab)
        x[rng.integers(vocab)] = temperature
        return x
    if shape == 4:
        return HUGE * np.sign(x)
    if shape == 5:
        return np.where(rng.random(vocab) < 0.5, 2 * x, -HUGE)
    if shape == 6:
        return np.where(rng.random(vocab) < 2 / vocab, HUGE, 2 * x)
    if shape == 7:
        return np.round(x)
    x[rng.random(vocab) < 0.9] = -np.inf
    x[rng.integers(vocab)] = 0.0
    return x


def request(rng: np.random.Generator, where: Layout) -> Request:
    temperature = 0.0 if rng.random() < 0.2 else float(np.float32(10 ** rng.uniform(-4, 4)))
    if where.kind == "normalized":  # as large as logits over temperature, and rounded so
        temperature = max(temperature, 0.5)
    count = int(rng.integers(K + 1))
    dtype = where.draft_dtype
    target = np.stack([row(rng, where.vocab, temperature) for _ in range(count + 1)])
    same = rng.random(count) < 0.5  # the drafter is right, or it is not
    draft = [target[i] if same[i] else row(rng, where.vocab, temperature) for i in range(count)]
    stored = np.reshape(draft, (count, where.vocab)).astype(dtype).astype(np.float64)
    if where.kind == "normalized":
        stored = np.clip(stored, -1e3, 80.0)
    scaled = stored / (temperature or 1.0)
    q = [scipy.special.softmax(x) for x in scaled]
    fields = {}
    if where.kind == "normalized":
        fields["log_normalizer"] = scipy.special.logsumexp(scaled, axis=1).astype(np.float32)
    if where.kind == "relative":
        peak = stored.max(axis=1)
        relative = (stored - peak[:, None]) / (temperature or 1.0)
        normalizer = scipy.special.logsumexp(relative, axis=1).astype(np.float32)
        fields |= dict(row_max=peak, log_normalizer=normalizer)
    if where.kind == "probs":
        stored = np.float32(q).reshape(count, where.vocab)
    edge = rng.choice([0.0, 2.0**-24, ALMOST_ONE], 2)
    return Request(
        target=target.astype(np.float32).astype(np.float64),
        draft_ids=[int(rng.choice(where.vocab, p=p)) for p in q],
        draft=None if where.kind == "none" else stored,
        accept=uniforms(rng, count),
        recover=np.where(rng.random(2) < 0.2, edge, uniforms(rng, 2)),
        temperature=temperature,
        **random_filters(rng, where.vocab),
        **fields,
    )


def batch(where: Layout, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return pack([request(rng, where) for _ in range(B)], where, seed)


@pytest.mark.parametrize(
    ("where", "verifier", "seeds"),
    [
        (layout(1), "lazy", 8),
        pytest.param(layout(2049), "lazy", 60, marks=pytest.mark.slow),
        pytest.param(layout(2049, "relative"), "all at once", 60, marks=pytest.mark.slow),
        pytest.param(layout(262147, "probs"), "lazy", 6, marks=pytest.mark.slow),
    ],
    ids=lambda x: str(x),
)
def test_tokens_are_those_of_the_oracle(where, verifier, seeds):
    answer = functools.partial(verify, verifier=VERIFIERS[verifier])
    close = sum(check(b, answer(b)) for b in (batch(where, seed) for seed in range(seeds)))
    assert close <= 0.02 * seeds * B


FLAT = {"lazy": layout(262147, "probs"), "all at once": layout(2**17)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "verifier", [x if x == "lazy" else pytest.param(x, marks=pytest.mark.slow) for x in VERIFIERS]
)
def test_ties_of_a_whole_vocabulary(verifier):
    """A flat row: greedy takes id 0, a filter leaves all, and the uniforms name the token."""
    where = FLAT[verifier]
    vocab = where.vocab
    for first, u in ((0, 0.0), (0, 0.3), (70_000, 0.3), (vocab - 1, ALMOST_ONE)):
        flat = np.full((1, vocab), -2.5)
        flat[0, :first] = -3e4
        tied = vocab - first
        sampled = Request(flat, (), temperature=1.0, recover=(u, u), top_k=1, top_p=1e-6, min_p=1.0)
        requests = [dataclasses.replace(sampled, temperature=0.0), sampled]
        (output,) = agree([pack(requests, where)], VERIFIERS[verifier])
        assert output.token_ids[0, 0] == first
        # Whole tiles weigh the same: the first uniform picks a tile by its share of the ties.
        sizes = np.bincount(np.arange(first, vocab) // 2048)
        tile = int(np.flatnonzero(np.cumsum(sizes) > u * tied)[0])
        place = int(u * sizes[tile]) + max(first - 2048 * tile, 0)
        assert output.token_ids[1, 0] == 2048 * tile + place
    assert (output.status[:2] == sd.Status.OK).all()
