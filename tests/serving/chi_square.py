"""Pearson's chi-square test of counts against a known distribution."""

import collections
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy.special

ALPHA = 1e-2 / 50
"""Chance of a false alarm per test: one in a hundred for the fifty or so tests together."""

CONTROL = 1e-12
"""A negative control, which samples from something else, must fall below this."""


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P(a statistic at least as large), cells expecting fewer than 5 pooled into one."""
    counts, expected = np.ravel(counts), np.ravel(probabilities) * np.sum(counts)
    np.testing.assert_allclose(np.sum(probabilities), 1, rtol=1e-6)
    if np.any(counts[expected == 0]):
        return 0.0
    large = expected >= 5
    observed, wanted = counts[large], expected[large]
    if expected[~large].sum() > 0:
        observed = np.append(observed, counts[~large].sum())
        wanted = np.append(wanted, expected[~large].sum())
    assert len(wanted) > 1, "one cell tests nothing"
    statistic = np.sum((observed - wanted) ** 2 / wanted)
    return float(scipy.special.chdtrc(len(wanted) - 1, statistic))


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray, what: str) -> None:
    """Fails with the cells that deviate most."""
    p = p_value(counts, probabilities)
    if p >= ALPHA:
        return
    expected = probabilities * np.sum(counts)
    deviation = np.abs(counts - expected) / np.sqrt(np.maximum(expected, 1e-9))
    worst = np.argsort(deviation, axis=None)[::-1][:10]
    cells = [tuple(map(int, np.unravel_index(i, counts.shape))) for i in worst]
    lines = [f"  {cell}: counted {counts[cell]}, expected {expected[cell]:.1f}" for cell in cells]
    raise AssertionError("\n".join([f"{what}: p = {p:.2g} < {ALPHA:.2g}", *lines]))


def tally(rows: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each row of `rows [n, length]` occurs, as an array `[V] * length`."""
    counts = np.zeros((vocab_size,) * rows.shape[1], np.int64)
    np.add.at(counts, tuple(rows.T), 1)
    return counts


def tally_texts(
    texts: Iterable[Sequence[int]], law: Mapping[tuple[int, ...], float]
) -> tuple[np.ndarray, np.ndarray]:
    """How often each text of a law occurs, and its probability; no other text may occur."""
    found = collections.Counter(tuple(text) for text in texts)
    assert found.keys() <= law.keys()
    return np.array([found[text] for text in law]), np.array([*law.values()])
