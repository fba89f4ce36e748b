"""Trees that an EAGLE-3 head grows, against a search over paths that NumPy runs one by one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import reference_eagle3 as reference
from models.weights import random_ids, random_weights
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm

from .loops import LONGEST, PARAMS, TARGET, VOCAB
from .test_eagle3 import HEAD, IDS, LAYERS
from .test_eagle3 import HEAD_PARAMS as WEAK_PARAMS

pytestmark = [pytest.mark.newest, pytest.mark.long]

DEPTH, NODES, BATCH = 4, 20, 4
WIDTH = 8  # nodes of a level that are run
# Fourfold, or it hardly matters which positions a row looks at.
HEAD_PARAMS = WEAK_PARAMS | {"layer": random_weights(HEAD, 1, 4.0)["layer"]}
TREES = lm.Eagle3Drafter(HEAD, tree_depth=DEPTH)
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=NODES, rejection_sample_method="agreement")
TEXTS = random_ids((BATCH, LONGEST), VOCAB)
TEMPERATURES = np.array([0.0, 0.8, 0.8, 1.5], np.float32)
KEYS = jax.random.split(jax.random.key(5), BATCH)


@functools.cache
def features() -> jax.Array:
    """Features ``[B, L, A*H]`` of the whole texts."""
    start, cache = jnp.zeros(BATCH, jnp.int32), TARGET.init_cache(BATCH, LONGEST)
    found: jax.Array = jax.jit(run_pass, static_argnums=(0, 5))(
        TARGET, PARAMS, TEXTS, start, cache, LAYERS
    ).features
    return found


def prefill(drafter: lm.Eagle3Drafter) -> Any:
    """The cache after all but the last token of the texts."""
    cache = drafter.init_cache(BATCH, LONGEST)
    rows = lm.models.Rows(jnp.asarray(TEXTS[:, :-1]), jnp.zeros(BATCH, jnp.int32))
    return drafter.prefill(HEAD_PARAMS, rows, cache, features()[:, :-1], TEXTS[:, -1])


@functools.partial(jax.jit, static_argnums=(0, 1))
def propose(
    drafter: lm.Eagle3Drafter,
    config: sd.SpecDecodeConfig,
    lengths: jax.Array,
    num_features: jax.Array,
    cache: Any,
) -> tuple[lm.Proposal, Any]:
    """Drafts after the first tokens of each text, with as many features as are told."""
    place = (lengths - 1 - num_features)[:, None] + jnp.arange(DEPTH + 1)[None, :]
    rows = jnp.take_along_axis(features(), place[:, :, None], axis=1, mode="clip")
    is_row = jnp.arange(DEPTH + 1)[None, :, None] < num_features[:, None, None]
    context = lm.DraftContext(
        token_ids=jnp.asarray(TEXTS),
        lengths=lengths,
        sampling=sd.SamplingParams(jnp.asarray(TEMPERATURES)),
        keys=KEYS,
        config=config,
        features=jnp.where(is_row, rows, 0),
        num_features=num_features,
    )
    return drafter.propose(HEAD_PARAMS, context, cache, None)


def fresh(
    lengths: list[int], drafter: lm.Eagle3Drafter = TREES, config: sd.SpecDecodeConfig = CONFIG
) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids and parents ``[B, K]`` of drafts after a prefill."""
    at = jnp.asarray(np.array(lengths, np.int32))
    proposal, _ = propose(drafter, config, at, jnp.minimum(at - 1, 1), prefill(drafter))
    parents = proposal.parents
    return np.asarray(proposal.token_ids), None if parents is None else np.asarray(parents)


def rows_after(request: int, length: int, path: tuple[int, ...]) -> np.ndarray:
    """Logits ``[Vd]`` after drafts that follow a text, by formula in float64, without a cache."""
    states = reference.project(
        HEAD.config, HEAD_PARAMS, np.asarray(features())[request, : length - 1]
    )
    text = [*TEXTS[request, :length].tolist(), *path]
    for end in range(length - 1, length + len(path)):
        logits, feedback = reference.forward(HEAD.config, HEAD_PARAMS, states, text[1 : end + 1])
        states = np.concatenate([states, feedback[-1:]])
    return logits[-1]


def searched(request: int, length: int) -> list[tuple[int, ...]]:
    """The NODES best paths of those that a beam of WIDTH runs, best first."""
    temperature = float(TEMPERATURES[request])
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    every = []
    for depth in range(DEPTH):
        position = jnp.int32(length + depth)
        noise = np.asarray(
            sd.testing.token_exponentials(KEYS[request], position, VOCAB), np.float64
        )
        found = []
        for score, path in beam:
            # one tile, whose noise comes first
            chance = rows_after(request, length, path) - temperature * np.log(noise[1:][IDS])
            chance -= np.log(np.sum(np.exp(chance)))
            found += [(score + s, (*path, i)) for s, i in zip(chance.tolist(), IDS, strict=True)]
        beam = sorted(found, reverse=True)[:WIDTH]
        every += found
    return [path for _, path in sorted(every, reverse=True)[:NODES]]


def paths_of(ids: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """The tokens on the way to each node of one tree."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(ids.tolist(), parents.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_nodes_are_those_of_a_search_over_paths() -> None:
    lengths = [9, 5, 12, 2]
    ids, parents = fresh(lengths)
    assert parents is not None
    for request, length in enumerate(lengths):
        found = paths_of(ids[request], parents[request])
        assert found == searched(request, length)
        assert max(map(len, found)) > 2


@pytest.mark.slow
def test_first_children_are_the_chain_with_the_same_noise() -> None:
    lengths = [9, 5, 12, 3]
    ids, parents = fresh(lengths)
    assert parents is not None
    chain = lm.Eagle3Drafter(HEAD)
    config = dataclasses.replace(CONFIG, num_speculative_tokens=DEPTH)
    drafts, none = fresh(lengths, chain, config)
    assert none is None
    for request in range(BATCH):
        path, node = [], 0
        while (children := np.flatnonzero(parents[request] == node)).size:
            path.append(int(ids[request, children[0]]))
            node = int(children[0]) + 1
        assert len(path) > 1 and path == drafts[request, : len(path)].tolist()


def test_steps_after_any_path_are_those_of_a_new_cache() -> None:
    rng = np.random.default_rng(0)
    lengths, num_features = np.array([2, 3, 5, 9], np.int32), np.ones(BATCH, np.int32)
    cache = prefill(TREES)
    for _ in range(5):
        garbage = spoiled(cache, lengths - 1 - num_features)
        proposals = [propose(TREES, CONFIG, lengths, num_features, one) for one in (cache, garbage)]
        ids, parents = fresh(lengths.tolist())
        for proposal, _ in proposals:
            np.testing.assert_array_equal(proposal.token_ids, ids)
            np.testing.assert_array_equal(proposal.parents, parents)
        cache = proposals[0][1]
        num_features = rng.integers(1, DEPTH + 2, BATCH, np.int32)
        lengths = lengths + num_features
    assert lengths.max() < LONGEST
    # What lies before is seen.
    proposal, _ = propose(TREES, CONFIG, lengths, num_features, spoiled(cache, lengths * 0))
    assert not np.array_equal(proposal.token_ids, fresh(lengths.tolist())[0])


def spoiled(cache: Any, first: np.ndarray) -> Any:
    """A cache with other numbers from these positions ``[B]`` on."""
    ((keys, values),) = cache
    heads = keys.shape[0] // BATCH
    is_kept = np.arange(keys.shape[2])[None, :] < np.repeat(first, heads)[:, None]
    return [(jnp.where(is_kept[:, None, :], keys, 7), jnp.where(is_kept[:, :, None], values, -9))]


def test_one_token_has_no_drafts_and_fewer_nodes_are_the_best() -> None:
    lengths = [1, 5, 12, LONGEST - 1]
    ids, _ = fresh(lengths)
    assert (ids[0] == -1).all() and (ids[1:] >= 0).all()
    few = dataclasses.replace(CONFIG, num_speculative_tokens=1)
    one, parents = fresh(lengths, config=few)
    np.testing.assert_array_equal(one, ids[:, :1])
    assert parents is not None and (parents == 0).all()


def test_a_chain_keeps_its_cache() -> None:
    def room(depth: int) -> int:
        ((keys, _),) = lm.Eagle3Drafter(HEAD, tree_depth=depth).init_cache(1, LONGEST)
        return int(keys.shape[2])

    assert (room(0), room(2)) == (LONGEST, LONGEST + 64)
