"""Trees by lookup equal a trie of all continuations, counted in plain Python."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jax_specdec import lm

from .test_suffix import EXACT, HISTORY, SIZE, context, history_of, places, texts

pytestmark = [pytest.mark.newest, pytest.mark.long]

NODES = 6
LONG = lm.SuffixDrafter(max_match=12, spec_factor=2.5, tree_depth=5, **EXACT)
FEW = lm.SuffixDrafter(**(EXACT | dict(max_occurrences=3)), tree_depth=3)
WITH_HISTORY = lm.SuffixDrafter(max_match=8, history=HISTORY, tree_depth=4, **EXACT)

Path = tuple[int, ...]


def trie(
    corpus: Sequence[int], last: Sequence[int], drafter: lm.SuffixDrafter
) -> dict[Path, float]:
    """The probability of each path that may be drafted after the last tokens."""
    corpus = [*corpus, -1]
    nearest = places(corpus, last, drafter.max_match - 1)[: drafter.max_occurrences]
    found: dict[Path, float] = {}
    for m in range(drafter.min_match, drafter.max_match):
        alive = [place for n, place in nearest if n >= m]
        limit = min(int(m * drafter.spec_factor + 1e-6), drafter.max_match - m)
        counts: Counter[Path] = Counter()
        for place in alive:
            for depth in range(1, min(limit, drafter.tree_depth) + 1):
                path = tuple(corpus[place : place + depth])
                if -1 in path or len(path) < depth:
                    break
                counts[path] += 1
        for path, count in counts.items():
            p = count / (len(alive) + 1)
            if p >= drafter.min_probability:
                found[path] = max(found.get(path, 0), p)
    return found


def assert_is_best(
    ids: np.ndarray, parents: np.ndarray, likely: np.ndarray, wanted: dict[Path, float]
) -> None:
    """Whether a tree has the likeliest paths, in order; of equally likely ones, some."""
    best = sorted(wanted.values(), reverse=True)[:NODES]
    paths: list[Path] = [()]
    for node, token in enumerate(ids.tolist()):
        assert (token >= 0) == (node < len(best))
        if token >= 0:
            assert parents[node] <= node
            paths.append((*paths[parents[node]], token))
    assert len({*paths}) == len(paths)
    np.testing.assert_allclose([wanted[path] for path in paths[1:]], best, atol=1e-6)
    np.testing.assert_allclose(likely, best + [0] * (NODES - len(best)), atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def looked_up(
    drafter: lm.SuffixDrafter, params: Any, token_ids: jax.Array, lengths: jax.Array
) -> Any:
    given = context(token_ids, lengths, NODES)
    proposal, _ = drafter.propose(params, given, (), None)
    assert proposal.store is None
    return proposal.token_ids, proposal.parents, drafter.lookup(params, given)


def trees_of(drafter: lm.SuffixDrafter, texts: Sequence[Sequence[int]], params: Any = None) -> Any:
    """Ids, parents and probabilities of trees after texts."""
    rows = np.full((len(texts), SIZE), 2, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    ids, parents, found = jax.device_get(looked_up(drafter, params, rows, lengths))
    np.testing.assert_allclose(found.scores, found.probabilities.sum(axis=1), atol=1e-5)
    return ids, parents, found.probabilities


@pytest.mark.parametrize("drafter", [LONG, FEW], ids=["long", "few occurrences"])
@hypothesis.given(texts=texts(3))
def test_nodes_are_those_of_a_trie(drafter: lm.SuffixDrafter, texts: list[list[int]]) -> None:
    for text, *tree in zip(texts, *trees_of(drafter, texts), strict=True):
        assert_is_best(*tree, trie(text, text, drafter))


@hypothesis.given(own=texts(1), others=st.integers(0, 5).flatmap(lambda n: texts(n, 2 * HISTORY)))
def test_the_tree_of_the_history_is_taken_where_it_is_better(own: Any, others: Any) -> None:
    params = history_of(WITH_HISTORY, others)
    newest = [token for text in others for token in [*text, -1]][-HISTORY:]
    wanted = [trie(corpus, own[0], WITH_HISTORY) for corpus in (own[0], newest)]
    scores = [sum(sorted(one.values(), reverse=True)[:NODES]) for one in wanted]
    (ids,), (parents,), (likely,) = trees_of(WITH_HISTORY, own, params)
    near = abs(scores[0] - scores[1]) < 1e-5 and likely.sum() > 0
    if near and wanted[0] != wanted[1]:
        return  # float32 decides between equals
    assert_is_best(ids, parents, likely, wanted[int(scores[1] > scores[0])])
