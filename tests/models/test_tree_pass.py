"""A pass over trees of drafts: each node reads what its own path says, and a path is kept.

What a path says is a pass over its text alone, of consecutive tokens, by the plain `Llama`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm

from .weights import mixed, random_ids, random_weights, sizes

pytestmark = pytest.mark.newest

CONFIG = mixed(sizes(41, 24, 40, 3, (6, 2, 8), rope_theta=500.0))
WHOLE = lm.models.Llama(CONFIG)
B, T, K = 4, 64, 36  # node 36 has its bit in the second word
PROMPTS = np.array([5, 1, 9, 3], np.int32)  # tokens before node 0
LAYERS = (0, 2, 3)


@functools.cache
def weights() -> Any:
    return random_weights(WHOLE, 1, moved=0.3)


@functools.partial(jax.jit, static_argnums=0)
def apply(model: Any, params: Any, token_ids: Any, start: Any, cache: Any, parents: Any) -> Any:
    tree = None if parents is None else sd.TreeRows.of(parents)
    return run_pass(model, params, token_ids, start, cache, LAYERS, tree)


commit = jax.jit(lambda model, *args: model.commit(*args), static_argnums=0)


def random_parents(seed: int) -> np.ndarray:
    """``[B, K]``: a tree of any shape, a chain, children of one node, and a few branches."""
    rng = np.random.default_rng(seed)
    j = np.arange(K)
    any_shape = rng.integers(0, j + 1)
    branches = np.maximum(j - rng.integers(0, 4, K), 0)
    return np.stack([any_shape, j, 0 * j, branches]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Texts before node 0 of each request, ``[B, K+1]`` ids of nodes, and their parents."""

    texts: list[list[int]]
    token_ids: np.ndarray
    parents: np.ndarray

    @property
    def start(self) -> np.ndarray:
        return np.array([len(text) for text in self.texts], np.int32)

    def nodes_to(self, request: int, node: int) -> list[int]:
        """From node 0 to one that is given, both included."""
        path = [node]
        while path[0]:
            path.insert(0, int(self.parents[request, path[0] - 1]))
        return path

    def text(self, request: int, node: int) -> list[int]:
        path = self.nodes_to(request, node)
        return self.texts[request] + self.token_ids[request, path].tolist()

    def used(self) -> list[tuple[int, int]]:
        """Pairs of request and node that hold a token."""
        return [(int(b), int(i)) for b, i in np.argwhere(self.token_ids >= 0)]


def made(seed: int, texts: list[list[int]] | None = None) -> Case:
    """A case with unused nodes behind request 0's node 20, and behind request 3's node 0."""
    ids = random_ids((B, T), CONFIG.vocab_size, seed)
    texts = texts or [row[:n].tolist() for row, n in zip(ids, PROMPTS, strict=True)]
    token_ids, parents = random_ids((B, K + 1), CONFIG.vocab_size, seed + 1), random_parents(seed)
    for request, first in ((0, 21), (3, 1)) if seed % 2 else ((0, 21),):
        token_ids[request, first:], parents[request, first - 1 :] = -1, -1
    return Case(texts, token_ids, parents)


def read(model: Any, params: Any, texts: list[list[int]], cache: Any) -> Any:
    """The cache after a pass over texts, padded, of consecutive tokens."""
    padded = np.zeros((B, T), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return apply(model, params, padded, np.zeros(B, np.int32), cache, None).cache


def check_rows(case: Case, output: Any) -> None:
    """Logits and features of each node are those of its text alone."""
    padded = np.zeros((B * (K + 1), T), np.int32)
    last = np.zeros(len(padded), np.int32)
    for b, i in case.used():
        text = case.text(b, i)
        padded[b * (K + 1) + i, : len(text)] = text
        last[b * (K + 1) + i] = len(text) - 1
    cache = WHOLE.init_cache(len(padded), T)
    alone = apply(WHOLE, weights(), padded, np.zeros_like(last), cache, None)
    is_used = case.token_ids >= 0
    found = output.logits[..., : CONFIG.vocab_size], output.features
    for ours, whole in zip(found, (alone.logits, alone.features), strict=True):
        wanted = np.asarray(whole)[np.arange(len(last)), last].reshape(B, K + 1, -1)
        np.testing.assert_allclose(ours[is_used], wanted[is_used], rtol=1e-5, atol=1e-5)


def entries(cache: Any, request: int, length: int) -> list[np.ndarray]:
    """What the cache holds of the first tokens of a request."""
    found = []
    for x in jax.tree.leaves(cache):
        x = np.asarray(x)
        x = x if x.shape[-1] == T else x.swapaxes(-1, -2)  # positions last
        x = x.reshape(*x.shape[:-3], B, -1, *x.shape[-2:])
        found.append(x[..., request, :, :, :length])
    return found


def paths_of(case: Case, seed: int) -> np.ndarray:
    """``[B, K+1]``: a path to any node of each request."""
    path = np.full((B, K + 1), -1, np.int32)
    rng = np.random.default_rng(seed)
    for b in range(B):
        used = [i for request, i in case.used() if request == b]
        nodes = case.nodes_to(b, rng.choice(used))
        path[b, : len(nodes)] = nodes
    return path


@pytest.mark.long
def test_a_node_reads_its_path_and_a_path_that_is_kept_is_its_text() -> None:
    """Two steps, of trees of two words: the second finds what the first kept, and the rest."""
    model, params = WHOLE, weights()
    first = made(3)
    cache = read(model, params, first.texts, model.init_cache(B, T))
    output = apply(model, params, first.token_ids, first.start, cache, first.parents)
    check_rows(first, output)
    path = paths_of(first, seed=5)
    cache = commit(model, output.cache, first.start, path)
    texts = [first.text(b, max(path[b])) for b in range(B)]
    fresh = read(model, params, texts, model.init_cache(B, T))
    for b, text in enumerate(texts):
        found, wanted = (entries(one, b, len(text)) for one in (cache, fresh))
        for ours, whole in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)
    # There is room for no more than a part of a second tree: a chain's texts are long.
    texts = [text[: T - K - 1] for text in texts]
    second = made(6, texts)
    output = apply(model, params, second.token_ids, second.start, cache, second.parents)
    check_rows(second, output)


def test_nan_is_for_those_who_come_after_it() -> None:
    """A token whose embedding is infinite: its own node and its descendants, and no other."""
    model, params = WHOLE, weights()
    bad = 7
    case = made(4)
    case.token_ids[case.token_ids == bad] = bad + 1
    for text in case.texts:
        text[:] = [bad + 1 if token == bad else token for token in text]
    case.token_ids[[0, 1, 2, 3], [2, 30, 5, 3]] = bad
    broken = params | {"embed_tokens": params["embed_tokens"].at[bad].set(jnp.inf)}
    cache = read(model, params, case.texts, model.init_cache(B, T))
    given = case.token_ids, case.start, cache, case.parents
    wanted, found = (apply(model, weights, *given) for weights in (params, broken))
    is_bad, is_good = np.zeros((2, B, K + 1), bool)
    for b, i in case.used():
        is_bad[b, i] = bad in case.text(b, i)
        is_good[b, i] = not is_bad[b, i]
    assert is_bad.sum() > 12 and is_good.sum() > 60
    np.testing.assert_array_equal(found.logits[is_good], wanted.logits[is_good])
    assert np.isnan(np.asarray(found.logits)[is_bad]).all()
    # A path beside it is kept as if it had not been there, and the next pass does not see it.
    path = np.full((B, K + 1), -1, np.int32)
    for b in range(B):
        nodes = case.nodes_to(b, max(np.flatnonzero(is_good[b])))
        path[b, : len(nodes)] = nodes
    start = case.start + (path >= 0).sum(axis=1).astype(np.int32)
    start = np.minimum(start, T - K - 1)
    again = random_ids((B, K + 1), bad, seed=8), start
    logits = [
        apply(model, params, *again, commit(model, output.cache, case.start, path), case.parents)
        for output in (wanted, found)
    ]
    assert np.isfinite(logits[0].logits).all()
    np.testing.assert_array_equal(logits[0].logits, logits[1].logits)


def test_a_tree_that_is_a_chain_is_the_chain_to_the_last_bit() -> None:
    model, params = WHOLE, weights()
    case = made(2)
    chain = np.broadcast_to(np.arange(K, dtype=np.int32), (B, K))
    cache = read(model, params, case.texts, model.init_cache(B, T))
    given = case.token_ids, case.start, cache
    wanted, found = (apply(model, params, *given, parents) for parents in (None, chain))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    whole = np.broadcast_to(np.arange(K + 1, dtype=np.int32), (B, K + 1))
    kept = commit(model, found.cache, case.start, whole)
    jax.tree.map(np.testing.assert_array_equal, kept, wanted.cache)


def test_nothing_is_moved_where_there_is_no_path() -> None:
    """Nor where a request stands that has ended: at the end of its cache, or beyond."""
    model, params = WHOLE, weights()
    case = made(3)
    cache = read(model, params, case.texts, model.init_cache(B, T))
    start, nothing = np.array([0, 10, T - 1, T], np.int32), np.full((B, K + 1), -1, np.int32)
    kept = commit(model, cache, start, nothing)
    jax.tree.map(np.testing.assert_array_equal, kept, cache)


def test_a_path_is_kept_in_place() -> None:
    cache = jax.eval_shape(lambda: WHOLE.init_cache(B, 8192))
    given = cache, np.zeros(B, np.int32), np.zeros((B, 8), np.int32)
    compiled = jax.jit(WHOLE.commit, donate_argnums=0).lower(*given).compile()
    one = B * CONFIG.layers[0].head_sizes[1] * 4  # bytes of a token's keys
    most = 4 * len(CONFIG.layers) * 8 * one
    assert compiled.memory_analysis().temp_size_in_bytes < most


GOOD: dict[str, Any] = {
    "token_ids": np.zeros((2, 3), np.int32),
    "start": np.zeros(2, np.int32),
    "tree": sd.TreeRows(np.zeros((2, 3), np.int32), np.ones((2, 3, 2), np.uint32)),
}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"depth": np.zeros((2, 2), np.int32)}, ValueError, r"tree.depth must .*\[G, S\] = \[2, 3"),
        ({"depth": np.zeros((2, 3), np.float32)}, TypeError, "tree.depth must .*int32"),
        (
            {"tree_mask": np.zeros((2, 3, 1), np.uint32)},
            ValueError,
            r"tree.tree_mask must .*2, 3, 2",
        ),
        ({"tree_mask": np.zeros((2, 3, 2), np.int32)}, TypeError, "tree.tree_mask must .*uint32"),
    ],
)
def test_trees_that_do_not_fit_are_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = jax.eval_shape(lambda: WHOLE.init_cache(2, 8))
    given = GOOD | {"tree": GOOD["tree"]._replace(**changed)}
    with pytest.raises(error, match=rf"^groups\[0\].{message}"):
        jax.eval_shape(functools.partial(run_pass, WHOLE), weights(), cache=cache, **given)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"start": np.zeros(3, np.int32)}, ValueError, r"path must .*\[B, J\] = \[3"),
        ({"start": np.zeros(2, np.float32)}, TypeError, "start must .*int"),
        ({"path": np.zeros(2, np.int32)}, ValueError, r"path must .*\[B, P\]"),
        ({"path": np.zeros((2, 3), np.float32)}, TypeError, "path must .*int32"),
        ({"path": np.zeros((2, 9), np.int32)}, ValueError, "path must have at most 8 tokens"),
    ],
)
def test_paths_that_do_not_fit_are_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    cache = jax.eval_shape(lambda: WHOLE.init_cache(2, 8))
    given = {"start": np.zeros(2, np.int32), "path": np.zeros((2, 3), np.int32)} | changed
    with pytest.raises(error, match=f"^{message}"):
        jax.eval_shape(WHOLE.commit, cache, **given)
