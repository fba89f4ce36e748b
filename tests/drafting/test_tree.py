"""Trees of drafts: which nodes are chosen, and what they are scored by."""

from __future__ import annotations

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from upper_floor import draft_chain, drafting_tree

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

Path = tuple[int, ...]
"""Ranks of the tokens on the path to a node."""


# Which nodes


def best_first(marginals: np.ndarray, num_nodes: int) -> list[tuple[float, Path]]:
    """DDTree's heap over marginals ``[D, C]``, each descending: scores and paths, best first."""
    if not num_nodes:
        return []
    depth, width = marginals.shape
    heap = [(-marginals[0, 0], (0,))]
    found: list[tuple[float, Path]] = []
    while heap and len(found) < num_nodes:
        score, path = heapq.heappop(heap)
        if score == np.inf:
            break
        found.append((-score, path))
        above = sum((marginals[d, r] for d, r in enumerate(path[:-1])), np.float32(0))
        if path[-1] + 1 < width:  # the next sibling
            heapq.heappush(
                heap,
                (-(above + marginals[len(path) - 1, path[-1] + 1]), (*path[:-1], path[-1] + 1)),
            )
        if len(path) < depth:  # the first child
            heapq.heappush(heap, (score - marginals[len(path), 0], (*path, 0)))
    return found


def random_marginals(rng: np.random.Generator, depth: int, width: int) -> np.ndarray:
    """Log-chances ``[depth, width]``, descending: sharp, flat, with equal ones or with none."""
    kind = rng.integers(5)
    x = rng.normal(size=(depth, width)) * rng.choice([0.1, 1.0, 4.0])
    if kind == 1:
        x = np.round(x)  # equal ones
    if kind == 2:
        x[:] = 0  # flat
    if kind == 3:
        x[rng.random(x.shape) < 0.5] = -np.inf
        x[:, 0] = 0
        x[rng.integers(depth), 1:] = -np.inf
    if kind == 4:
        x[:, rng.integers(1, 3) :] = -np.inf  # few
    x = x - np.log(np.sum(np.exp(x), axis=1, keepdims=True))
    return np.minimum(-np.sort(-x, axis=1), 0).astype(np.float32)


@functools.partial(jax.jit, static_argnames="num_nodes")
def grown(
    marginals: jax.Array, num_nodes: int
) -> tuple[drafting_tree.Candidates, jax.Array, jax.Array]:
    """Candidates and nodes from marginals ``[B, D, C]``; an id is a token's rank."""
    batch, depth, width = marginals.shape
    ranks = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, 1, width))

    def children(d: int, token_ids: jax.Array) -> drafting_tree.Children:
        return drafting_tree.Children(ranks, marginals[:, d, None])

    newest = jnp.zeros((batch,), jnp.int32)
    candidates = drafting_tree.grow(children, newest, depth, num_nodes)
    return candidates, *drafting_tree.best_nodes(candidates, num_nodes)


def paths_of(token_ids: np.ndarray, parents: np.ndarray) -> list[Path]:
    """The path to each node, of ``[K]`` arrays; fails if they are no tree."""
    paths: list[Path] = [()]
    for j, (token_id, parent) in enumerate(zip(token_ids.tolist(), parents.tolist(), strict=True)):
        if token_id < 0:
            assert (token_ids[j:] < 0).all() and (parents[j:] == 0).all()
            break
        assert 0 <= parent <= j
        paths.append((*paths[parent], token_id))
    assert len({*paths}) == len(paths)
    return paths[1:]


@pytest.mark.parametrize(("depth", "width", "num_nodes"), [(5, 8, 8), (3, 20, 20), (7, 4, 12)])
def test_nodes_are_those_of_a_heap(depth: int, width: int, num_nodes: int) -> None:
    # With fewer children than nodes too, where the heap has no more of them either.
    rng, count = np.random.default_rng(depth), 700
    marginals = np.stack([random_marginals(rng, depth, width) for _ in range(count)])
    _, token_ids, parents = jax.device_get(grown(marginals, num_nodes))
    fewer = 0
    for b in range(count):
        expected = best_first(marginals[b], num_nodes)
        paths = paths_of(token_ids[b], parents[b])
        scores = [
            sum((marginals[b, d, r] for d, r in enumerate(path)), np.float32(0)) for path in paths
        ]
        assert scores == [score for score, _ in expected]
        if len({*scores}) == len(scores):  # none are equal
            assert paths == [path for _, path in expected]
        fewer += len(paths) < num_nodes
    assert fewer > 10


def test_the_first_nodes_are_the_best_tree_of_so_many() -> None:
    rng = np.random.default_rng(2)
    marginals = np.stack([random_marginals(rng, 5, 8) for _ in range(200)])
    _, *whole = jax.device_get(grown(marginals, 8))
    _, *fewer = jax.device_get(grown(marginals, 3))
    for all_of_them, some in zip(whole, fewer, strict=True):
        np.testing.assert_array_equal(all_of_them[:, :3], some)


def test_fewer_candidates_than_nodes_and_bad_scores() -> None:
    candidates = drafting_tree.Candidates(
        jnp.array([[5, 6, 7, 8]]),
        jnp.array([[0, 1, 0, 3]]),
        jnp.array([[-0.0, 0.0, jnp.nan, -jnp.inf]]),
    )
    token_ids, parents = drafting_tree.best_nodes(candidates, 6)
    assert token_ids.tolist() == [[5, 6, -1, -1, -1, -1]]
    assert parents.tolist() == [[0, 1, 0, 0, 0, 0]]


# Scores

FILTERS = [(0.0, 0, 1.0), (0.1, 0, 1.0), (0.0, 5, 1.0), (0.0, 0, 0.7), (0.01, 40, 0.9)]
"""Min-p, top-k and top-p of requests, each with all of `TEMPERATURES`."""

TEMPERATURES = [0.0, 0.3, 0.8, 1.0, 2.0]
BATCH, ROWS = 50, 3


def context_of(batch: int) -> lm.DraftContext:
    min_p, top_k, top_p = np.resize(FILTERS, (batch, 3)).T
    temperature = np.resize(np.repeat(TEMPERATURES, len(FILTERS)), batch)
    return lm.DraftContext(
        token_ids=jnp.zeros((batch, 32), jnp.int32),
        lengths=jnp.arange(batch, dtype=jnp.int32) % 20 + 1,
        sampling=sd.SamplingParams(
            jnp.asarray(temperature.astype(np.float32)),
            jnp.asarray(min_p.astype(np.float32)),
            jnp.asarray(top_k.astype(np.int32)),
            jnp.asarray(top_p.astype(np.float32)),
        ),
        keys=jax.random.split(jax.random.key(3), batch),
        config=sd.SpecDecodeConfig(
            num_speculative_tokens=ROWS, rejection_sample_method="agreement"
        ),
    )


@functools.partial(jax.jit, static_argnames=("count", "vocab_size"))
def likeliest_and_chain(
    logits: jax.Array,
    context: lm.DraftContext,
    ids: jax.Array | None,
    count: int,
    vocab_size: int,
) -> tuple[drafting_tree.Children, jax.Array]:
    """Children of rows ``[B, R, Vd]`` of levels 0 to R - 1, and a chain's drafts of these rows."""
    offsets = jnp.arange(ROWS, dtype=jnp.int32)
    found = drafting_tree.likeliest(logits, offsets, context, count, ids=ids, vocab_size=vocab_size)

    def forward(carry: None, last: jax.Array, offset: jax.Array) -> tuple[jax.Array, None]:
        return logits[:, offset], None

    chain, _ = draft_chain(
        logits[:, 0], None, forward, context, None, ids=ids, vocab_size=vocab_size
    )
    return found, chain.token_ids


@pytest.mark.parametrize("size", [300, 5000, "map"])
def test_the_likeliest_token_is_the_draft_of_a_chain(size: int | str) -> None:
    rng, ids = np.random.default_rng(0), None
    vocab_size = 5000 if size == "map" else size
    width = vocab_size
    if size == "map":
        width = 700
        ids = jnp.asarray(rng.permutation(vocab_size)[:width].astype(np.int32))
    logits = rng.normal(size=(BATCH, ROWS, width)).astype(np.float32) * 2
    context = context_of(BATCH)
    found, chain = jax.device_get(likeliest_and_chain(logits, context, ids, 8, vocab_size))
    assert found.token_ids[:, :, 0].tolist() == chain.tolist()
    assert (found.scores[:, :, 1:] <= found.scores[:, :, :-1]).all()
    # No token that the filter leaves out; greedy requests have none.
    is_limited = np.asarray((context.sampling.top_k == 5) & (context.sampling.temperature > 0))
    count = np.isfinite(found.scores).sum(axis=2)
    assert (count[is_limited] == 5).all() and is_limited.any()
    is_free = np.asarray((context.sampling.top_k == 0) & (context.sampling.temperature == 0))
    assert (count[is_free] == 8).all() and is_free.any()


def test_likeliest_tokens_are_those_of_a_sort() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(50, 5000)).astype(np.float32)
    scores[10:30] = np.round(scores[10:30]) + 0.0  # equal ones, and no -0
    scores[20:25, 7:] = -np.inf
    first = scores.argmax(axis=1).astype(np.int32)
    first[40:] = 3
    ids, found = jax.device_get(jax.jit(drafting_tree._largest, static_argnums=2)(scores, first, 9))
    ranked = scores.copy()
    ranked[np.arange(50), first] = np.inf
    order = np.argsort(-ranked, axis=1, kind="stable")[:, :9]
    expected = np.take_along_axis(scores, order, axis=1)
    expected[:, 0] = np.maximum(expected[:, 0], expected[:, 1])
    np.testing.assert_array_equal(found, expected)
    is_there = found > -np.inf
    np.testing.assert_array_equal(np.where(is_there, ids, -1), np.where(is_there, order, -1))
