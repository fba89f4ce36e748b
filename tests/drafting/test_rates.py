"""How often drafts were accepted: sums and rates by plain NumPy, of chains and of trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import DraftRates

K, BATCH = 6, 5
update = jax.jit(DraftRates.update)
values = jax.jit(lambda rates: rates.values)


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
def test_rates_are_those_of_the_drafts_that_were_tried(has_trees):
    """A chain's drafts after the first rejection are not; all of a tree are."""
    rng, rates = np.random.default_rng(1), DraftRates.create(K, has_trees=has_trees)
    tried, accepted = np.zeros(K), np.zeros(K)
    for _ in range(40):
        counts = rng.integers(0, K + 1, BATCH) * (rng.random(BATCH) < 0.8)
        depths = np.array([rng.integers(0, min(count, 3) + 1) for count in counts])
        path, here, hits = np.full((BATCH, 4), -1), np.zeros((BATCH, K)), np.zeros((BATCH, K))
        for b, (count, depth) in enumerate(zip(counts, depths, strict=True)):
            nodes = sorted(rng.choice(count, depth, replace=False)) if has_trees else range(depth)
            path[b, : depth + 1] = [0, *(1 + np.array(nodes, int))]
            here[b, : count if has_trees else min(count, depth + 1)] = 1
            hits[b, list(nodes)] = 1
        given = jnp.asarray(counts), jnp.asarray(depths)
        rates = update(rates, *given, jnp.asarray(path) if has_trees else None)
        fade = np.where(here.any(axis=0), 0.99, 1.0)
        tried = fade * tried + here.sum(axis=0)
        accepted = fade * accepted + hits.sum(axis=0)
    np.testing.assert_allclose(rates.tried, tried, rtol=1e-5)
    np.testing.assert_allclose(rates.accepted, accepted, rtol=1e-5)
    before, wanted = 0.7, []
    for i in range(K):
        before *= i / (i + 1) if i and has_trees else 1
        before = (accepted[i] + 2 * before) / (tried[i] + 2)
        wanted.append(before)
    np.testing.assert_allclose(values(rates), wanted, rtol=1e-5)


def test_places_of_which_nothing_is_known_have_the_rate_before_or_a_falling_one():
    np.testing.assert_allclose(
        values(DraftRates.create(4, has_trees=True)), 0.7 / np.arange(1, 5), rtol=1e-6
    )
    rates = update(DraftRates.create(3), jnp.array([1]), jnp.array([0]))
    first, second, third = values(rates).tolist()
    assert first == second == third < 0.7
