"""Bitmasks, min-p, top-k and top-p of the oracle, by sorting."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def mask(logits: Array, token_bitmask: npt.ArrayLike | None) -> Array:
    """Logits ``[M, V]``, with -inf if bit ``id % 32`` of the row's word ``id // 32`` is not set."""
    if token_bitmask is None:
        return logits
    ids = np.arange(logits.shape[1])
    words = np.asarray(token_bitmask).astype(np.int64)[:, ids // 32]
    return np.where(words >> ids % 32 & 1, logits, -np.inf)


def filter_row(
    row: Array, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[Array, float]:
    """The row with -inf for what is left out, and the margin of the closest comparison.

    Each step keeps all entries that are not below a threshold.
    """
    peak, margin = float(row.max()), math.inf

    if 0 < min_p < 1:  # p < min_p * max(p)
        depth = temperature * math.log(min_p)
        below = row[(row < peak) & (row > -math.inf)]
        margin = np.min(np.abs(below - (peak + depth)) / (abs(peak) - depth), initial=margin)
        row = np.where(row < peak + depth, -math.inf, row)
    elif min_p == 1:
        row = np.where(row < peak, -math.inf, row)

    if 0 < top_k < len(row):
        row = np.where(row < np.sort(row)[-top_k], -math.inf, row)

    if top_p < 1:
        entries = np.sort(row)[::-1]
        mass = np.cumsum(np.exp((entries - peak) / temperature))
        last_of_ties = np.append(entries[1:] < entries[:-1], True)
        entries, mass = entries[last_of_ties], mass[last_of_ties]
        goal = top_p * mass[-1]
        margin = np.min(np.abs(mass[:-1] - goal) / np.maximum(mass[:-1], goal), initial=margin)
        row = np.where(row < entries[mass >= goal][0], -math.inf, row)

    return row, float(margin)
