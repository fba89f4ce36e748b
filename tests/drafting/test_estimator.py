"""Confidences that are learned from verifications: against an offline fit, and censored data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
from filled import ones
from lower_floor import TreeEstimator

import jax_specdec as sd

K = 3
SLOPE, INTERCEPTS = 0.8, np.array([1.0, 0.0, -0.7])
UPDATE = jax.jit(sd.AcceptanceEstimator.update)
confidences = jax.jit(sd.AcceptanceEstimator.confidences)
rates = jax.jit(lambda estimator: estimator.rates)


def log_normalizer_of(log_odds: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, -log_odds).astype(np.float32)


def verifications(steps: int, requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-odds of max q ``[steps, B, K]``, drafts offered and accepted ``[steps, B]``."""
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 1.5, (steps, requests, K))
    accepts = rng.random(x.shape) < scipy.special.expit(SLOPE * x + INTERCEPTS)
    offered = rng.integers(0, K + 1, (steps, requests))
    accepts &= np.arange(K) < offered[..., None]
    return x, offered, np.cumprod(accepts, axis=2).sum(axis=2)


@pytest.fixture(scope="module")
def learned():
    x, offered, accepted = verifications(400, 32)
    estimator = sd.AcceptanceEstimator.create(K)
    for step in zip(offered, accepted, log_normalizer_of(x), strict=True):
        names = "num_drafts", "num_accepted", "log_normalizer"
        estimator = UPDATE(estimator, **dict(zip(names, map(jnp.asarray, step), strict=True)))
    return estimator, x, offered, accepted


def test_the_online_fit_is_the_maximum_likelihood_of_its_memory(learned):
    estimator, x, offered, accepted = learned
    age = np.arange(len(x))[::-1]
    weight = np.broadcast_to((0.99**age)[:, None, None], x.shape)
    place = np.arange(K)
    visited = (place < offered[..., None]) & (place <= accepted[..., None])
    hit = place < accepted[..., None]

    def loss(theta: np.ndarray) -> float:
        z = theta[0] * x + theta[1:]
        return float((weight * visited * (np.logaddexp(0, z) - hit * z)).sum())

    fit = scipy.optimize.minimize(loss, np.zeros(K + 1)).x
    grid = np.linspace(-2, 4, 25)
    offline = scipy.special.expit(fit[0] * grid[:, None] + fit[1:])
    normalizers = np.repeat(log_normalizer_of(grid)[:, None], K, axis=1)
    online = np.asarray(confidences(estimator, normalizers))
    truth = scipy.special.expit(SLOPE * grid[:, None] + INTERCEPTS)
    print(fit, estimator.slope, estimator.intercepts)
    assert np.abs(online - offline).max() < 0.03
    assert np.abs(online - truth).max() < 0.06


def test_rates_are_those_of_visited_positions(learned):
    estimator, x, _, _ = learned
    # P(accepted | visited): x at a position does not depend on those before.
    truth = scipy.special.expit(SLOPE * x + INTERCEPTS).mean(axis=(0, 1))
    assert np.abs(np.asarray(rates(estimator)) - truth).max() < 0.04
    unconditional = np.cumprod(truth)
    assert truth[-1] - unconditional[-1] > 0.2  # what counting every offered draft would give


def test_what_was_not_visited_teaches_nothing():
    x, offered, accepted = verifications(1, 64)
    place = np.arange(K)
    is_later = (place > accepted[0][:, None]) | (place >= offered[0][:, None])
    assert is_later.any()
    assert not is_later.all()
    estimators = []
    for changes in (None, is_later, ~is_later):
        normalizer = log_normalizer_of(x[0])
        if changes is not None:
            normalizer = np.where(changes, normalizer + 1, normalizer)
        estimators.append(
            UPDATE(
                sd.AcceptanceEstimator.create(K),
                num_drafts=offered[0].astype(np.int32),
                num_accepted=accepted[0].astype(np.int32),
                log_normalizer=normalizer.astype(np.float32),
            )
        )
    one, same, other = (jax.device_get(jax.tree.leaves(x)) for x in estimators)
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert one[0] != other[0]


def test_drafts_without_a_distribution_have_the_rates_of_their_history():
    estimator = sd.AcceptanceEstimator.create(K)
    for _ in range(100):
        estimator = UPDATE(
            estimator,
            num_drafts=jnp.array([3, 3, 0]),
            num_accepted=jnp.array([3, 1, 0]),
            log_normalizer=np.full((3, K), np.nan, np.float32),
        )
    np.testing.assert_allclose(rates(estimator), [1, 0.5, 1], atol=0.03)
    unknown = np.full((1, K), np.nan, np.float32)
    found = np.asarray(confidences(estimator, unknown))[0]
    np.testing.assert_array_equal(found, rates(estimator))
    first = sd.AcceptanceEstimator.create(K)
    assert estimator.slope == first.slope
    np.testing.assert_array_equal(estimator.intercepts, first.intercepts)


def test_a_drafters_own_confidences_take_the_place_of_what_was_accepted():
    own = np.array([[0.5, 0.25, 0.8], [0.9, np.nan, np.nan], [np.nan] * K], np.float32)
    offered, accepted = jnp.array([0, 3, 2]), jnp.array([0, 1, 2])
    estimator = UPDATE(
        sd.AcceptanceEstimator.create(K), num_drafts=offered, num_accepted=accepted, confidences=own
    )
    # Expected visits: 1, 1 and 1; then 0.5 beside what was seen of the others; then 0.125.
    np.testing.assert_allclose(estimator.visited, [3, 0.5 + 1 + 1, 0.125 + 0 + 0])
    np.testing.assert_allclose(estimator.accepted, [0.5 + 0.9 + 1, 0.125 + 0 + 1, 0.1], rtol=1e-6)
    known = np.full((1, K), 0.6, np.float32)
    for _ in range(300):
        estimator = UPDATE(
            estimator, num_drafts=offered[:1], num_accepted=accepted[:1], confidences=known
        )
    np.testing.assert_allclose(rates(estimator), 0.6, atol=0.01)


def test_an_unvisited_position_has_the_rate_before_it():
    new = sd.AcceptanceEstimator.create(K)
    estimator = UPDATE(new, num_drafts=jnp.array([1]), num_accepted=jnp.array([0]))
    first, second, third = rates(estimator).tolist()
    assert first == second == third < 0.7


def test_extreme_rows_stay_finite():
    normalizer = jnp.array([[0.0, 1e-30, -1e-3], [jnp.inf, 200.0, 1e-3]])
    estimator = sd.AcceptanceEstimator.create(K)
    for accepted in (0, 3) * 20:
        estimator = UPDATE(
            estimator,
            num_drafts=jnp.array([3, 3]),
            num_accepted=jnp.array([accepted, 3 - accepted]),
            log_normalizer=normalizer,
        )
        found = np.asarray(confidences(estimator, normalizer))
        assert np.isfinite(found).all()
        assert ((found >= 0) & (found <= 1)).all()


ONE, TWO = ones((1,), jnp.int32), ones((2,), jnp.int32)
ROW = ones((1, K))
BOTH = dict(num_drafts=ONE, num_accepted=ONE)


@pytest.mark.parametrize(
    ("error", "name", "given"),
    [
        (TypeError, "num_drafts", dict(num_drafts=ROW[0], num_accepted=ONE)),
        (ValueError, "num_accepted", dict(num_drafts=ONE, num_accepted=TWO)),
        (ValueError, "num_drafts", dict(num_drafts=ONE[0], num_accepted=ONE[0])),
        (TypeError, "log_normalizer", BOTH | dict(log_normalizer=ONE)),
        (ValueError, "log_normalizer", BOTH | dict(log_normalizer=ROW[0])),
        (ValueError, "log_normalizer", BOTH | dict(log_normalizer=ones((2, K)))),
        (TypeError, "confidences", BOTH | dict(confidences=ONE)),
        (ValueError, "confidences", BOTH | dict(confidences=ROW[0])),
    ],
)
def test_mistakes_are_named(error, name, given):
    with pytest.raises(error, match=name):
        sd.AcceptanceEstimator.create(K).update(**given)


# Trees


def test_the_rates_of_a_tree_are_those_of_its_ranks():
    """Sums and rates by plain NumPy, of random paths."""
    rng, k = np.random.default_rng(1), 6
    estimator, update = TreeEstimator.create(k), jax.jit(TreeEstimator.update)
    offered, kept = np.zeros(k), np.zeros(k)
    for _ in range(40):
        counts = rng.integers(0, k + 1, 5) * (rng.random(5) < 0.8)
        path = np.full((5, 4), -1)
        for b, count in enumerate(counts):
            depth = rng.integers(0, min(count, 3) + 1)
            path[b, : depth + 1] = [0, *sorted(1 + rng.choice(count, depth, replace=False))]
        estimator = update(estimator, num_drafts=jnp.asarray(counts), path=jnp.asarray(path))
        here = np.arange(k) < counts[:, None]
        hits = (path[:, :, None] == 1 + np.arange(k)).any(axis=1)
        fade = np.where(here.any(axis=0), 0.99, 1.0)
        offered = fade * offered + here.sum(axis=0)
        kept = fade * kept + hits.sum(axis=0)
    np.testing.assert_allclose(estimator.offered, offered, rtol=1e-5)
    np.testing.assert_allclose(estimator.kept, kept, rtol=1e-5)
    before, wanted = 0.7, []
    for rank in range(k):
        before *= rank / (rank + 1) if rank else 1
        before = (kept[rank] + 2 * before) / (offered[rank] + 2)
        wanted.append(before)
    np.testing.assert_allclose(rates(estimator), wanted, rtol=1e-5)


def test_a_tree_of_which_nothing_is_known_has_falling_rates():
    found = TreeEstimator.create(4).rates
    np.testing.assert_allclose(found, 0.7 / np.arange(1, 5), rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (ValueError, dict(path=ones((2, 3), np.int32), num_drafts=ones(1, np.int32))),
        (ValueError, dict(path=ones(2, np.int32), num_drafts=ones(2, np.int32))),
        (TypeError, dict(path=ones((2, 3)), num_drafts=ones(2, np.int32))),
        (TypeError, dict(path=ones((2, 3), np.int32), num_drafts=ones(2))),
    ],
)
def test_mistakes_about_trees_are_named(error, given):
    with pytest.raises(error, match="path|num_drafts"):
        TreeEstimator.create(4).update(**given)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        TreeEstimator.create(0)
