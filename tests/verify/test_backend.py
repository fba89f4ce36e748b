"""A backend is a file and a row of the table: one that has NumPy read the rows, on the host."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import TILE, LocalRows, api, draw_lib, gather, statistics

import jax_specdec as sd

from .batch import Layout, agree, jitted
from .cases import random_batches


class Host(gather.Gather):
    """Statistics and tokens by NumPy, of one-hot drafts; XLA does the rest."""

    def unserved(self, arrays: Any, static: Any) -> str | None:
        has_q = arrays.drafts.distribution is not None
        return "implementation='numpy' takes one-hot drafts" if has_q else None

    def of_all_rows(self, rows: LocalRows, requests: Any) -> Any:
        logits = rows.target.whole()
        inv = statistics.of_owners(requests, logits.shape[0], requests.inv_temperature)

        def read(x: np.ndarray, inv: np.ndarray) -> Any:
            peak = np.where(np.isnan(x).any(axis=1), np.inf, x.max(axis=1))
            base = np.where(np.isfinite(peak), peak, 0)[:, None]
            weights = np.exp((x - base) * inv[:, None])
            sums = np.add.reduceat(weights, np.arange(0, x.shape[1], TILE), axis=1)
            return [y.astype(np.float32) for y in (peak, sums)] + [x.argmax(axis=1).astype("i4")]

        shapes = [(len(logits),), (len(logits), rows.num_tiles), (len(logits),)]
        types = map(jax.ShapeDtypeStruct, shapes, (jnp.float32, jnp.float32, jnp.int32))
        peak, sums, argmax = jax.pure_callback(read, [*types], logits, inv)
        partials = statistics.Partials(peak, jnp.sum(sums, axis=1), argmax)
        return statistics.TargetStatistics(partials, None, sums)

    def token(self, rows: LocalRows, source: Any, masses: draw_lib.TileMasses, recover: Any) -> Any:
        weights, p = rows.weights(
            source, jnp.arange(rows.target.width)[None], rows.target.whole(source.row)
        )

        def pick(weights: np.ndarray, p: np.ndarray, u: np.ndarray) -> np.ndarray:
            return np.array([*map(first, weights, p, u)], np.int32)

        one = jax.ShapeDtypeStruct(source.row.shape, jnp.int32)
        token_ids = jax.pure_callback(pick, one, weights, p, recover)
        return token_ids, jnp.zeros(token_ids.shape, bool)


def first(weights: np.ndarray, p: np.ndarray, u: np.ndarray) -> int:
    """By inverse CDF: a tile, then an id in it; of ``p`` if there is no weight."""
    weights = np.float64(weights if weights.sum() > 0 else p)
    sums = np.add.reduceat(weights, np.arange(0, len(weights), TILE))
    tile = least(sums, u[0])
    return tile * TILE + least(weights[tile * TILE : (tile + 1) * TILE], u[1])


def least(weights: np.ndarray, u: np.float32) -> int:
    """Place whose inclusive sum exceeds a share of the total; 0 for a bad row, which has none."""
    hits = np.flatnonzero(np.cumsum(weights) > u * weights.sum())
    return hits[0] if len(hits) else 0


by_numpy = jitted(functools.partial(sd.testing.rejection_sample_with_noise, implementation="numpy"))
REGISTERED = mock.patch.dict(api.BACKENDS, {"numpy": Host()})
LAYOUT = Layout(vocab=TILE + 79, num_requests=5, num_drafts=12, has_active=True)


@REGISTERED
@pytest.mark.parametrize("changes", [{}, dict(has_bonus=True, rates=(0.9, 0.5, 0.2))], ids=str)
def test_a_backend_of_a_file_and_a_row_gives_the_tokens_of_the_oracle(changes):
    layout = Layout(**{**vars(LAYOUT), **changes})
    assert any(
        (got.num_emitted > 0).any() for got in agree(random_batches(layout, range(6)), by_numpy)
    )


@REGISTERED
def test_it_refuses_what_it_does_not_serve():
    layout = Layout(**{**vars(LAYOUT), "kind": "probs"})
    with pytest.raises(NotImplementedError, match="'numpy' takes one-hot drafts"):
        agree(random_batches(layout, range(1)), by_numpy)
