"""The recipe of `docs/draft_budget.md`: against plain loops, and the exact law of the output."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "draft_budget.md"


@functools.cache
def recipe() -> dict[str, Any]:
    """What the last block of the page defines."""
    *_, block = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


# Against plain loops


def planned(confidences: np.ndarray, speeds: np.ndarray) -> list[int]:
    """Takes the best next draft of any request, again and again."""
    b, k = confidences.shape
    counts, gained = [0] * b, 0.0
    survival = np.cumprod(confidences.astype(np.float64), axis=1)
    while heads := [i for i in range(b) if counts[i] < k]:
        best = min(heads, key=lambda i: (-survival[i, counts[i]], counts[i], i))
        rows, more = b + sum(counts), survival[best, counts[best]]
        if (b + gained + more) * speeds[rows + 1] < (b + gained) * speeds[rows]:
            break
        counts[best] += 1
        gained += more
    return counts


@pytest.mark.parametrize("shape", [(1, 1), (4, 3)])
def test_counts_are_those_of_a_loop_over_the_best_drafts(shape):
    rng, (b, k), plan = np.random.default_rng(0), shape, jax.jit(recipe()["plan"])
    some = set()
    for trial in range(200):
        # With many ties; products and sums are not rounded.
        confidences = rng.choice(np.array([0, 0.25, 0.5, 0.75, 1, 1], np.float32), shape)
        speeds = rng.choice(np.array([2, 1.5, 1, 0.75, 0.5], np.float32), b * k + b + 1)
        if trial % 3 == 0:
            speeds = np.sort(speeds)[::-1]
        if trial % 3 == 1:  # a budget of rows
            speeds = (np.arange(speeds.size) <= b + rng.integers(0, b * k + 1)).astype(np.float32)
        found = plan(confidences, np.ascontiguousarray(speeds)).tolist()
        assert found == planned(confidences, speeds), trial
        some.add(sum(found))
    assert len(some) > 1


@pytest.mark.parametrize("counts", [[3, 0, 1, 2], [0, 3, 0, 0], [3, 3, 3, 3], [0] * 4], ids=str)
def test_rows_are_those_of_a_loop_over_the_requests(counts):
    last, drafted = np.int32([20, 21, 22, 23]), np.arange(12, dtype=np.int32).reshape(4, 3)
    for size in {sum(counts), 12}:
        pack = jax.jit(recipe()["pack"], static_argnums=3)
        tokens, owners, offsets, drafts = pack(last, drafted, np.int32(counts), size)
        rows = [(b, j) for b, count in enumerate(counts) for j in range(count + 1)]
        found = zip(owners.tolist(), offsets.tolist(), strict=True)
        assert list(found)[: len(rows)] == rows and len(tokens) == size + 4
        wanted = [[last[b], *drafted[b]][j] for b, j in rows]
        assert tokens.tolist()[: len(rows)] == wanted
        flat = [token for ids, count in zip(drafted, counts, strict=True) for token in ids[:count]]
        assert drafts.token_ids.tolist()[: len(flat)] == flat
        assert drafts.cu_num_draft_tokens.tolist() == [0, *np.cumsum(counts)]


# The exact law of the output: every draft of every request is enumerated.

Tables = dict[tuple[int, ...], np.ndarray]
Plan = Callable[[np.ndarray, np.ndarray], list[int]]
"""Counts from the drafts ``[B, K]`` and the confidences ``[B, K]`` along them."""


def plain(p: Tables, prefix: tuple[int, ...], length: int) -> np.ndarray:
    """The law of sequences of `length` tokens that begin with `prefix`, sampled one by one."""
    size = len(p[()])
    if len(prefix) == length:
        law = np.zeros((size,) * length)
        law[prefix] = 1
        return law
    return sum(p[prefix][x] * plain(p, (*prefix, x), length) for x in range(size))


def speculative(p: Tables, q: Tables, drafts: tuple[int, ...], count: int) -> np.ndarray:
    """The law of K + 1 tokens, the first ones by the standard rule from `count` drafts."""
    length, law, weight = len(drafts) + 1, 0.0, 1.0
    for i in range(count):
        prefix, x = drafts[:i], drafts[i]
        accept = 1.0 if p[prefix][x] >= q[prefix][x] else p[prefix][x] / q[prefix][x]
        residual = np.maximum(p[prefix] - q[prefix], 0)
        if accept < 1:
            residual /= residual.sum()
            for y in range(len(residual)):
                rejected = weight * (1 - accept) * residual[y]
                law = law + rejected * plain(p, (*prefix, y), length)
        weight *= accept
    return law + weight * plain(p, drafts[:count], length)


class Case:
    """B requests with random p, q and confidences at each prefix, of tokens 0 and 1."""

    def __init__(self, rng: np.random.Generator, b: int, k: int, by_max_q: bool) -> None:
        self.shape = b, k
        self.prefixes = [x for n in range(k + 1) for x in itertools.product((0, 1), repeat=n)]
        self.p, self.q = (
            [{x: np.array([w, 1 - w]) for x, w in self._random(rng)} for _ in range(b)]
            for _ in range(2)
        )
        some = np.array([0.125, 0.25, 0.5, 0.75, 1.0])  # with ties
        self.c = [
            {x: float(self.q[i][x].max() if by_max_q else rng.choice(some)) for x in self.prefixes}
            for i in range(b)
        ]

    def _random(self, rng: np.random.Generator) -> list[tuple[tuple[int, ...], float]]:
        return [(x, rng.uniform(0.1, 0.9)) for x in self.prefixes]

    @functools.cached_property
    def outcomes(self) -> np.ndarray:
        """``[n, B, K]``, all drafts there can be."""
        b, k = self.shape
        return np.array([*itertools.product((0, 1), repeat=b * k)]).reshape(-1, b, k)

    @functools.cached_property
    def confidences(self) -> np.ndarray:
        """``[n, B, K]``, from the drafts before each position."""
        return np.array(
            [
                [[self.c[i][tuple(row[:j])] for j in range(len(row))] for i, row in enumerate(one)]
                for one in self.outcomes.tolist()
            ]
        )

    def law(self, counts: np.ndarray) -> np.ndarray:
        """The joint law of all requests' K + 1 tokens, for counts ``[n, B]``."""
        total: Any = 0.0
        for drafts, row in zip(self.outcomes.tolist(), counts.tolist(), strict=True):
            laws, chance = [], 1.0
            for p, q, x, count in zip(self.p, self.q, drafts, row, strict=True):
                laws.append(speculative(p, q, tuple(x), count).ravel())
                chance *= np.prod([q[tuple(x[:i])][x[i]] for i in range(len(x))])
            total = total + chance * functools.reduce(np.multiply.outer, laws)
        return total

    @property
    def wanted(self) -> np.ndarray:
        laws = [plain(p, (), self.shape[1] + 1).ravel() for p in self.p]
        return functools.reduce(np.multiply.outer, laws)

    def distance(self, counts: np.ndarray) -> float:
        """Total variation between what is emitted and plain sampling."""
        return 0.5 * float(np.abs(self.law(counts) - self.wanted).sum())


def ours(case: Case, speeds: np.ndarray) -> np.ndarray:
    plan = jax.vmap(recipe()["plan"], in_axes=(0, None))
    return np.asarray(plan(jnp.asarray(case.confidences, jnp.float32), np.float32(speeds)))


def planted(case: Case, plan: Plan) -> np.ndarray:
    return np.array([plan(*one) for one in zip(case.outcomes, case.confidences, strict=True)])


def best_of_all_counts(speeds: np.ndarray) -> Plan:
    """For one request: the count with the most expected tokens per second."""

    def plan(drafts: np.ndarray, confidences: np.ndarray) -> list[int]:
        gained = np.concatenate([[0], np.cumsum(np.cumprod(confidences[0]))])
        return [int(np.argmax((1 + gained) * speeds[1:]))]

    return plan


def the_counterexample() -> Case:
    case = Case(np.random.default_rng(0), 1, 2, by_max_q=True)
    for prefix in case.prefixes:
        case.p[0][prefix], case.q[0][prefix] = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    case.c[0] = {(): 0.8, (0,): 0.9, (1,): 0.0}
    return case


SPEEDS = np.array([1, 1, 0.5, 0.45])  # by rows


def test_a_search_over_counts_is_lossy_and_ours_is_not():
    case = the_counterexample()
    lossy = case.law(planted(case, best_of_all_counts(SPEEDS))).reshape(2, 2, 2)
    np.testing.assert_allclose(lossy.sum(axis=(1, 2)), [0.85, 0.15], rtol=1e-12)
    found = ours(case, SPEEDS)
    first = case.law(found).reshape(2, 2, 2).sum(axis=(1, 2))
    np.testing.assert_allclose(first, [0.7, 0.3], rtol=1e-12)
    assert case.distance(found) < 1e-12


@pytest.mark.newest
@pytest.mark.parametrize(("b", "k", "trials"), [(1, 3, 20), (2, 2, 12)])
def test_what_is_emitted_has_exactly_the_law_of_plain_sampling(b, k, trials):
    rng, varied = np.random.default_rng(b + 10 * k), 0
    for trial in range(trials):
        case = Case(rng, b, k, by_max_q=bool(trial % 2))
        rows = np.arange(b * k + b + 1)
        budgets = [(rows <= b + n).astype(float) for n in range(b * k + 1)]
        others = rng.uniform(0.3, 1, (4, rows.size))
        others = np.sort(others)[:, ::-1] if trial % 3 else others
        for counts in [ours(case, speeds) for speeds in (*budgets, *others)]:
            assert case.distance(counts) < 1e-12
            varied += len(np.unique(counts, axis=0)) > 1
    assert varied > trials / 4  # counts did depend on drafts
