"""Trees of drafts: which nodes are chosen, and what they are scored by."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import noise
from models import reference_block
from upper_floor import drafting_draw, drafting_tree

import jax_specdec as sd
from jax_specdec import lm

from . import test_block

pytestmark = [pytest.mark.newest, pytest.mark.long]

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
    candidates = drafting_tree.grow(children, newest, depth, num_nodes, num_nodes)
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
    logits: jax.Array, context: lm.DraftContext, ids: jax.Array | None, count: int, vocab_size: int
) -> tuple[drafting_tree.Children, jax.Array]:
    """Children of rows ``[B, R, Vd]`` of levels 0 to R - 1, and a chain's drafts of these rows."""
    offsets = jnp.arange(ROWS, dtype=jnp.int32)
    columns = drafting_draw.ids_of(ids, vocab_size)
    found = drafting_tree.likeliest(logits, offsets, context, count, columns)

    def forward(carry: None, last: jax.Array, offset: Any) -> tuple[Any, None]:
        return drafting_draw.Row(logits[:, offset], columns), None

    first, _ = forward(None, context.lengths, 0)
    chain, _ = drafting_draw.draft_chain(first, None, forward, context, None)
    return found, chain.token_ids


def test_xla_compiles_the_level_of_a_lone_request_without_complaint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """XLA for CPUs knows that its rows have one key and position, and went round in a circle."""
    level = jnp.zeros((1,), jnp.int32)

    def children(logits: jax.Array, context: lm.DraftContext) -> drafting_tree.Children:
        return drafting_tree.likeliest(logits, level, context, 8, drafting_draw.ids_of(None, 256))

    jax.jit(children).lower(jnp.zeros((1, 8, 256)), context_of(1)).compile()
    assert "circular" not in capfd.readouterr().err


@pytest.mark.parametrize("size", [300, pytest.param("map", marks=pytest.mark.slow)])
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


@pytest.mark.slow
def test_processors_come_before_scores() -> None:
    rng = np.random.default_rng(2)
    ids = jnp.asarray(rng.permutation(5000)[:700].astype(np.int32))
    logits = rng.normal(size=(BATCH, ROWS, 700)).astype(np.float32)
    context = context_of(BATCH)
    likeliest, _ = jax.device_get(likeliest_and_chain(logits, context, ids, 8, 5000))
    forbidden = likeliest.token_ids[:, 0, 0]
    bias = sd.LogitBias.from_mappings([{int(x): -np.inf} for x in forbidden])
    context = dataclasses.replace(context, processors=sd.LogitsProcessors(logit_bias=bias))
    found, chain = jax.device_get(likeliest_and_chain(logits, context, ids, 8, 5000))
    assert found.token_ids[:, :, 0].tolist() == chain.tolist()
    is_drafted = found.scores > -np.inf
    assert not (is_drafted & (found.token_ids == forbidden[:, None, None])).any()
    # Where another token is the likeliest, it stays so, unless a filter has changed.
    is_free = np.asarray(context.sampling.temperature == 0)[:, None]
    is_other = is_free & (likeliest.token_ids[:, :, 0] != forbidden[:, None])
    assert (likeliest.token_ids[:, :, 0] == found.token_ids[:, :, 0])[is_other].all()
    assert is_other.sum() > 10


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


# Trees of block heads

DEPTH, NODES, SIZE = 3, 8, test_block.SIZE
REQUESTS = 24
FEATURES = np.random.default_rng(6).normal(size=(REQUESTS, 2, 16)).astype(np.float32)
NEWEST = np.arange(REQUESTS, dtype=np.int32) % SIZE


@functools.cache
def block_context(config: sd.SpecDecodeConfig) -> lm.DraftContext:
    """Texts of three tokens, greedy or not, some with a filter; the last is of one token."""
    text = np.tile(np.array([2, 0, 0, 0, 0, 0, 0], np.int32), (REQUESTS, 1))
    text[:, 2] = NEWEST
    index = np.arange(REQUESTS)
    is_last = index == REQUESTS - 1
    return lm.DraftContext(
        token_ids=jnp.asarray(text),
        lengths=jnp.asarray(np.where(is_last, 1, 3).astype(np.int32)),
        sampling=sd.SamplingParams(
            jnp.asarray(np.array([0.0, 0.8, 1.3], np.float32)[index % 3]),
            top_k=jnp.asarray(np.array([0, 2], np.int32)[index // 3 % 2]),
        ),
        keys=jax.random.split(jax.random.key(5), REQUESTS),
        config=config,
        features=jnp.asarray(FEATURES[:, 1:]),
        num_features=jnp.asarray(np.where(is_last, 0, 1).astype(np.int32)),
    )


def agreement(count: int, **settings: Any) -> sd.SpecDecodeConfig:
    return sd.SpecDecodeConfig(
        num_speculative_tokens=count, rejection_sample_method="agreement", **settings
    )


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter: lm.BlockDrafter, params: Any, context: lm.DraftContext) -> lm.Proposal:
    cache = drafter.init_cache(REQUESTS, 7)
    first = jnp.asarray(FEATURES[:, :1])
    rows = lm.models.Rows(context.token_ids[:, :1], jnp.zeros(REQUESTS, jnp.int32))
    cache = drafter.prefill(params, rows, cache, first)
    assert drafter.init_store(params, REQUESTS, context.config) is None
    return drafter.propose(params, context, cache, None)[0]


def proposed(
    drafter: lm.BlockDrafter, params: Any, config: sd.SpecDecodeConfig, **changes: Any
) -> lm.Proposal:
    context = dataclasses.replace(block_context(config), **changes)
    proposal: lm.Proposal = jax.device_get(propose(drafter, params, context))
    return proposal


@functools.cache
def exponentials() -> np.ndarray:
    """The noise of every request and level, ``[REQUESTS, DEPTH, 1+V]``."""
    keys = block_context(agreement(NODES)).keys[:, None]
    positions = 3 + jnp.arange(DEPTH, dtype=jnp.int32)[None, :]
    return np.asarray(noise.token_exponentials(keys, positions, SIZE), np.float64)


def path_scores(kind: str, b: int, num_candidates: int | None = None) -> dict[Path, float]:
    """The score of every path by formula, from logits of NumPy."""
    head, params, _ = test_block.head_of(kind)
    context = block_context(agreement(NODES))
    logits, _ = reference_block.forward(head.config, params, FEATURES[b], NEWEST[b])
    ids = test_block.MAP if "map" in kind else [*range(SIZE)]
    temperature = float(context.sampling.temperature[b])
    assert context.sampling.top_k is not None
    top_k = int(context.sampling.top_k[b])
    scores = {(): 0.0}

    def log_chances(row: np.ndarray, gumbel: np.ndarray) -> np.ndarray:
        """Of a row ``[Vd]`` of the head's ids, ``[V]``, as the request samples."""
        found = np.full(SIZE, -np.inf)
        found[ids] = row
        if temperature > 0 and top_k:
            found[found < np.sort(found)[-top_k]] = -np.inf
        found = (found + temperature * gumbel) / drafting_tree.SPREAD
        chances: np.ndarray = found - np.log(np.sum(np.exp(found)))
        return chances

    for size in range(DEPTH):
        gumbel = -np.log(exponentials()[b, size, 1:])  # one tile
        for above in itertools.product(range(SIZE), repeat=size):
            bias = reference_block.bias(head.config, params, [NEWEST[b], *above][-1])
            if num_candidates is None:
                row = log_chances(logits[size] + bias, gumbel)
            else:  # the best without the bias; what is left of 1 stays beside them
                base = log_chances(logits[size], gumbel)
                is_left = np.argsort(np.argsort(-base, kind="stable")) >= num_candidates
                others = np.sum(np.exp(base[is_left]))
                moved = np.full(SIZE, -np.inf)
                moved[ids] = bias / drafting_tree.SPREAD
                row = np.where(is_left, -np.inf, base + moved)
                row = row - np.log(np.sum(np.exp(row)) + others)
            scores |= {(*above, x): scores[above] + float(row[x]) for x in range(SIZE)}
    del scores[()]
    return scores


@pytest.mark.parametrize(
    ("kind", "num_candidates"),
    [("DSpark", None), ("DFlash", 2), pytest.param("map", 2, marks=pytest.mark.slow)],
)
def test_a_block_heads_tree_has_the_paths_with_the_best_scores(
    kind: str, num_candidates: int | None
) -> None:
    head, params, _ = test_block.head_of(kind)
    drafter = lm.BlockDrafter(head, tree_depth=DEPTH, num_candidates=num_candidates)
    found = proposed(drafter, params, agreement(NODES))
    assert found.store is None and found.parents is not None
    shapes = set()
    for b in range(REQUESTS - 1):
        paths = paths_of(found.token_ids[b], found.parents[b])
        scores = path_scores(kind, b, num_candidates)
        best = sorted((x for x in scores.values() if x > -np.inf), reverse=True)[:NODES]
        np.testing.assert_allclose([scores[path] for path in paths], best, atol=1e-4)
        shapes.add(tuple(found.parents[b].tolist()))
    assert len(shapes) > 5
    assert (found.token_ids[-1] == -1).all()  # a prompt of one token


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("DFlash", "greedy"),
        pytest.param("map", "probabilistic", marks=pytest.mark.slow),  # of a DSpark head
    ],
)
def test_the_first_child_of_each_node_of_a_chain_is_its_draft(kind: str, method: Any) -> None:
    head, params, _ = test_block.head_of(kind)
    settings = {"draft_sample_method": method}
    tree = proposed(lm.BlockDrafter(head, tree_depth=DEPTH), params, agreement(40, **settings))
    chain = proposed(lm.BlockDrafter(head), params, agreement(DEPTH, **settings)).token_ids
    assert tree.parents is not None
    followed = np.zeros(DEPTH, int)
    for b in range(REQUESTS - 1):
        node = 0
        for d in range(DEPTH):
            is_child = (tree.parents[b] == node) & (tree.token_ids[b] >= 0)
            if not is_child.any():
                break
            first = int(is_child.argmax())
            assert tree.token_ids[b, first] == chain[b, d]
            node = first + 1
            followed[d] += 1
    assert (followed > 0.9 * REQUESTS).all(), followed


def test_bias_that_leaves_nothing_or_is_no_number_leaves_scores_in_order() -> None:
    candidates = drafting_tree.Children(
        jnp.array([[[4, 7, 1]]]), jnp.log(jnp.array([[[0.75, 0.25, 0.0]]]))
    )
    bias = jnp.array([[[0.0, 0.0, 0.0], [jnp.nan, 0.0, 0.0], [-jnp.inf] * 3, [3.0, -1.0, 9.0]]])
    found = jax.device_get(drafting_tree.with_bias(candidates, bias))
    assert found.token_ids.tolist() == [[[4, 7, 1]] * 4]
    np.testing.assert_allclose(np.exp(found.scores[0, 0]), [0.75, 0.25, 0], rtol=1e-6)
    assert (found.scores[0, 1:3] == -np.inf).all()
    weights = np.array([0.75 * np.exp(3), 0.25 * np.exp(-1), 0])
    np.testing.assert_allclose(np.exp(found.scores[0, 3]), weights / weights.sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_candidates", [None, 2])
def test_a_tree_depends_on_its_own_request_alone(num_candidates: int | None) -> None:
    head, params, _ = test_block.head_of("DSpark")
    drafter = lm.BlockDrafter(head, tree_depth=DEPTH, num_candidates=num_candidates)
    before = proposed(drafter, params, agreement(NODES))
    features = FEATURES[:, 1:].copy()
    features[1::2] = np.nan
    after = proposed(drafter, params, agreement(NODES), features=jnp.asarray(features))
    assert before.parents is not None and after.parents is not None
    np.testing.assert_array_equal(before.token_ids[::2], after.token_ids[::2])
    np.testing.assert_array_equal(before.parents[::2], after.parents[::2])
    assert (after.token_ids[1::2] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "count"), [(1, 8), (3, 1)])
def test_the_smallest_trees(depth: int, count: int) -> None:
    head, params, _ = test_block.head_of("DSpark")
    found = proposed(lm.BlockDrafter(head, tree_depth=depth), params, agreement(count))
    first = proposed(lm.BlockDrafter(head), params, agreement(1)).token_ids[:, 0]
    assert found.parents is not None and found.parents.shape == found.token_ids.shape
    assert found.token_ids.shape == (REQUESTS, count) and (found.parents == 0).all()
    assert found.token_ids[:, 0].tolist() == first.tolist()
    is_filtered = np.asarray(block_context(agreement(count)).sampling.top_k) == 2
    is_filtered &= np.arange(REQUESTS) % 3 != 0  # not greedy
    num_found = np.where(is_filtered, 2, SIZE)
    num_found[-1] = 0
    assert (found.token_ids >= 0).sum(axis=1).tolist() == np.minimum(num_found, count).tolist()
