"""Picking among the weights that one thread of a kernel holds."""

import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import pick_of


def first_whose_sum_exceeds(weights, aim):
    """The rule, one weight after another."""
    past = [i for i, total in enumerate(np.cumsum(weights)) if total > aim and weights[i] > 0]
    positive = [i for i, weight in enumerate(weights) if weight > 0]
    return past[0] if past else positive[-1] if positive else 0


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_picks_the_first_positive_weight_whose_sum_exceeds_the_aim_or_else_the_last(count):
    rng = np.random.default_rng(count)
    weights = rng.integers(0, 3, (count, 500)).astype(np.float32)  # sums are exact; some are 0
    aims = rng.integers(-1, weights.sum(0).max() + 2, 500).astype(np.float32)
    picked = pick_of([jnp.asarray(w) for w in weights], jnp.asarray(aims))
    wanted = [first_whose_sum_exceeds(w, aim) for w, aim in zip(weights.T, aims, strict=True)]
    np.testing.assert_array_equal(picked, wanted)
