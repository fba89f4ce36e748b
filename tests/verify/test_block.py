"""What the paper on block verification proves of it, without sampling.

On a tiny vocabulary every draft is tried, and the probability that each of its prefixes is kept is
found by bisection over its uniform, so that expectations are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from .batch import ALMOST_ONE, XLA, Layout, pack, verify
from .between import request
from .cases import random_request

pytestmark = [pytest.mark.newest, pytest.mark.long]

V, K = 3, 3
NUM_MODELS = 12
DRAFTS = list(itertools.product(range(V), repeat=K))


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and a drafter: distributions after each prefix, ``[V] * i + [V]`` for i = 0 .. K."""

    p: list[np.ndarray]
    q: list[np.ndarray]

    @classmethod
    def random(cls, seed: int) -> Models:
        rng = np.random.default_rng(seed)
        p = [rng.dirichlet(np.ones(V), size=[V] * i) for i in range(K + 1)]
        mix = rng.uniform(0, 0.7)
        q = [mix * x + (1 - mix) * rng.dirichlet(np.ones(V), size=x.shape[:-1]) for x in p[:K]]
        return cls(p, [x.astype(np.float32).astype(np.float64) for x in q])

    def drafted(self, ids) -> float:
        """Probability that the drafter proposes `ids`."""
        return float(np.prod([self.q[i][ids[: i + 1]] for i in range(len(ids))]))


def two_tokens() -> Models:
    """The paper's example: neither model looks at what came before."""
    p, q = [1 / 3, 2 / 3, 0], [2 / 3, 1 / 3, 0]
    return Models(
        [np.broadcast_to(p, [V] * (i + 1)) for i in range(K + 1)],
        [np.broadcast_to(q, [V] * (i + 1)) for i in range(K)],
    )


MODELS = [two_tokens(), *map(Models.random, range(NUM_MODELS))]
CASES = [
    (models, ids)
    for models in MODELS
    for ids in (itertools.product(range(2), repeat=2) if models is MODELS[0] else DRAFTS)
]


def layout_of_cases(block: bool) -> Layout:
    return Layout(
        vocab=V,
        num_speculative_tokens=K,
        num_requests=len(CASES) * K,
        num_drafts=len(CASES) * K * K,
        kind="probs",
        block=block,
    )


@functools.cache
def thresholds(block: bool) -> np.ndarray:
    """Of each case, the uniforms below which its drafts 0, 1, ... pass, ``[cases, K]``.

    The other uniforms are such that this one decides: 0 under the standard rule; the largest under
    the block rule, where a longer prefix that passes hides the shorter ones.
    """
    requests = [
        request(
            [models.p[j][ids[:j]] for j in range(len(ids) + 1)],
            ids,
            [models.q[j][ids[:j]] for j in range(len(ids))],
            "probs",
        )
        for models, ids in CASES
    ]
    batch = pack([each for each in requests for _ in range(K)], layout_of_cases(block))
    which = np.tile(np.eye(K, dtype=bool), (len(CASES), 1))
    passing = np.zeros(len(which), np.int64)  # how many of the 2**24 uniforms
    for bit in 2 ** np.arange(24, -1, -1):
        u = np.minimum((passing + bit - 1) * 2.0**-24, ALMOST_ONE)
        accept = np.where(which, u[:, None], ALMOST_ONE if block else 0.0).astype(np.float32)
        noise = dataclasses.replace(batch.noise, accept=accept)
        output = verify(batch.replace(noise=noise), XLA)
        assert not output.status.any()
        passes = output.num_accepted > which.argmax(axis=1)
        passing += bit * (passes & (passing + bit <= 2**24))
    return passing.reshape(-1, K) * 2.0**-24


def num_kept(case: int, block: bool) -> np.ndarray:
    """Probabilities that 0, 1, ... drafts of a case are kept."""
    h = np.append(1.0, thresholds(block)[case, : len(CASES[case][1])])
    if block:  # the longest prefix that passes
        return h * np.append(np.cumprod((1 - h)[:0:-1])[::-1], 1.0)
    return np.cumprod(h) * np.append(1 - h[1:], 1.0)


def expected(models: Models, block: bool) -> float:
    """Expected number of drafts kept in one step."""
    total = 0.0
    for case, (its_models, ids) in enumerate(CASES):
        if its_models is models:
            probs = num_kept(case, block)
            total += models.drafted(ids) * (probs @ np.arange(len(probs)))
    return total


@pytest.mark.slow
def test_the_papers_example_keeps_as_many_drafts_as_it_says():
    assert expected(MODELS[0], block=False) == pytest.approx(10 / 9, abs=1e-6)
    assert expected(MODELS[0], block=True) == pytest.approx(11 / 9, abs=1e-6)


def test_never_fewer_drafts_are_kept_than_one_by_one():
    gains = [expected(m, block=True) - expected(m, block=False) for m in MODELS[1:]]
    print("expected drafts gained", np.round(gains, 4))
    assert min(gains) > -1e-6
    assert max(gains) > 0.02


def emitted(models: Models, weighted: bool) -> np.ndarray:
    """Distribution of the first K + 1 tokens: what a step emits, then the target's own."""
    joint = np.zeros([V] * (K + 1))
    for case, (its_models, ids) in enumerate(CASES):
        if its_models is not models:
            continue
        weight = 1.0
        for i, prob in enumerate(num_kept(case, block=True)):
            token = p = models.p[i][ids[:i]]
            if i < K:
                q = models.q[i][ids[:i]]
                left = np.maximum((weight if weighted else 1.0) * p - q, 0)
                token = left / left.sum() if left.sum() > 0 else p
                weight = min(1.0, weight * p[ids[i]] / q[ids[i]])
            rest = token
            for j in range(i + 1, K + 1):
                rest = rest[..., None] * models.p[j][ids[:i]]
            joint[ids[:i]] += models.drafted(ids) * prob * rest
    return joint


def test_tokens_have_the_targets_distribution_by_the_weighted_residual():
    off = []
    for models in MODELS[1:]:
        target = np.ones(())
        for p in models.p:
            target = target[..., None] * p
        np.testing.assert_allclose(emitted(models, weighted=True), target, atol=1e-6)
        off.append(abs(emitted(models, weighted=False) - target).sum())
    assert max(off) > 0.01


def test_one_draft_is_verified_as_by_the_standard_rule():
    layout, rng = layout_of_cases(block=False), np.random.default_rng(2)
    batch = pack([random_request(layout, rng, 1) for _ in range(layout.num_requests)], layout)
    got, want = verify(batch.replace(layout=layout_of_cases(block=True)), XLA), verify(batch, XLA)
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    assert 0 < got.num_accepted.sum() < layout.num_requests
