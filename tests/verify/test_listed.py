"""Draft distributions on a list of ids equal the same ones scattered over the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from lower_floor import LocalRows, Source, VocabRows, Xla, q_of, tiles

import jax_specdec as sd

from .backends import BACKENDS, all_at_once, over
from .batch import ALMOST_ONE, FILTERS, Layout, agree, oracle
from .cases import random_batch
from .layouts import RATES
from .lists import with_bad_ids, with_ids
from .positions import source_of_rows
from .test_memory import VOCAB, shape, temporary_rows
from .test_sharded import EVEN, even_batch

BIG: Any = dict(num_speculative_tokens=4, num_requests=8, num_drafts=34)
STORED: Any = dict(store_rows=40, has_valid=True, has_active=True)

GRID = [
    ("map", Layout(vocab=2049, **BIG, **STORED, kind="probs", dtype="bfloat16")),
    ("map", Layout(vocab=4200, **BIG, **FILTERS, kind="logits", vocab_size=4100)),
    ("map", Layout(vocab=5000, **BIG, kind="relative", block=True, draft_dtype="bfloat16")),
    ("map", Layout(vocab=97, **BIG, kind="probs", rates=RATES, has_bonus=True)),
    ("candidates", Layout(vocab=5000, **BIG, kind="probs", vocab_size=4500, has_bonus=True)),
    ("candidates", Layout(vocab=4200, **BIG, **FILTERS, **STORED, kind="normalized")),
    ("candidates", Layout(vocab=5000, **BIG, kind="logits", block=True, dtype="bfloat16")),
    ("candidates", Layout(vocab=2049, **BIG, kind="logits", rates=RATES, draft_dtype="bfloat16")),
]
PARTS = Layout(vocab=4096, **BIG, kind="logits", block=True, has_valid=True)
KERNEL = Layout(vocab=2176, num_requests=3, num_drafts=12, num_speculative_tokens=4, kind="probs")
RACE = Layout(vocab=2049, **BIG, race=True, kind="logits", vocab_size=2000)
LENGTHS = {"map": 0.7, "candidates": 0.01}


def batches(ids: str, layout: Layout, seeds: Any) -> Any:
    """Listed and scattered."""
    for seed in seeds:
        length = max(3, int(LENGTHS[ids] * layout.real_vocab))
        yield with_ids(random_batch(layout, seed), ids, length, seed)


@pytest.mark.long
@pytest.mark.parametrize(("ids", "layout"), GRID, ids=str)
def test_the_oracle_gives_the_tokens_of_the_scattered_rows(ids, layout):
    accepted = 0
    for listed, scattered in batches(ids, layout, range(6)):
        got, want = oracle(listed), oracle(scattered)
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_array_equal(got.status, want.status)
        accepted += got.num_accepted.sum()
    assert accepted > 10


def on(
    backend: str, cases: Iterable[tuple[str, Layout]], num_seeds: int, *marks: pytest.MarkDecorator
) -> list[Any]:
    return [
        pytest.param(BACKENDS[backend], *case, num_seeds, marks=marks, id=f"{backend}-{case[1]}")
        for case in cases
    ]


long, slow, gpu = pytest.mark.long, pytest.mark.slow, pytest.mark.gpu


@pytest.mark.parametrize(
    ("verifier", "ids", "layout", "num_seeds"),
    [
        *on("in-order", [GRID[5], ("map", RACE), ("candidates", RACE)], 12, long),
        *on("in-order", [*GRID[1:5], *GRID[6:]], 12, slow),
        *on("at-once", [GRID[6]], 12, slow),
        *on("8-devices", [("candidates", PARTS)], 8, slow),
        *on("GPU", GRID, 6, gpu),
        *on("GPU-row-by-row", GRID, 6, gpu),
    ],
)
def test_gives_the_tokens_of_the_oracle(verifier, ids, layout, num_seeds):
    agree((listed for listed, _ in batches(ids, layout, range(num_seeds))), verifier)


@pytest.mark.parametrize(
    ("verifier", "ids", "layout", "num_seeds"),
    [
        *on("in-order", [GRID[5]], 8, long),
        *on("in-order", [GRID[1]], 8, slow),
        *on("kernel", [("candidates", KERNEL)], 6, slow),
        *on("GPU", [("candidates", KERNEL), ("map", KERNEL), GRID[1], GRID[5]], 8, gpu),
    ],
)
def test_bad_lists_of_ids_hurt_only_who_visits_their_row(verifier, ids, layout, num_seeds):
    """With an id of none of the vocabulary, or with one twice."""
    given = enumerate(batches(ids, layout, range(num_seeds)))
    bad = [with_bad_ids(listed, seed) for seed, (listed, _) in given]
    statuses = np.array([output.status for output in agree(bad, verifier)])
    assert np.mean(statuses == sd.Status.BAD_DRAFT_ROW) > 0.1
    assert np.mean(statuses == sd.Status.OK) > 0.1


@pytest.mark.slow
def test_requests_split_over_an_axis_give_the_oracles_tokens():
    layout = Layout(vocab=5000, **EVEN, kind="logits", has_valid=True)
    dense = [even_batch(layout, seed) for seed in range(8)]
    listed = (with_ids(batch, "candidates", 50, seed)[0] for seed, batch in enumerate(dense))
    agree(listed, over(2, 4))


# Masses of tiles.

N, V = 12, 3 * tiles.TILE + 100


def weights_of(
    logits: np.ndarray, distribution: sd.DraftProbs | sd.DraftLogits, weight: np.ndarray
) -> tuple[LocalRows, Source]:
    """What is left of each target row by the draft row of its own."""
    backend = Xla().on("cpu")
    target = VocabRows(jnp.asarray(logits), V, -np.inf, backend.device)
    q, rows = q_of(distribution, V, backend.device), jnp.arange(N, dtype=jnp.int32)
    peak, one = backend.peak(target, rows), jnp.ones(N)
    total = backend.exp_sums(target, rows, peak, one)
    return LocalRows(target, q, 4), source_of_rows(
        N,
        V,
        draft_row=rows,
        token_id=rows,
        scale=tiles.Scale(peak, jnp.log(total)),
        draft_scale=q.scales(rows, None),
        weight=jnp.asarray(weight),
        proposed=jnp.ones(N, bool),
        uses_q=jnp.ones(N, bool),
    )


def listed_and_left(rng: np.random.Generator, length: int, noise: float, weight: np.ndarray) -> Any:
    """Target logits, probabilities on candidates near the target's, and what they leave of it."""
    logits = (3 * rng.standard_normal((N, V))).astype(np.float32)
    ids = np.stack([rng.permutation(V)[:length] for _ in range(N)]).astype(np.int32)
    near = np.take_along_axis(logits, ids, axis=1) + noise * rng.standard_normal(ids.shape)
    q = scipy.special.softmax(near, axis=1).astype(np.float32)
    left = weight[:, None] * scipy.special.softmax(logits.astype(np.float64), axis=1)
    np.put_along_axis(left, ids, np.take_along_axis(left, ids, axis=1) - q, axis=1)
    return logits, sd.DraftProbs(q, ids=ids), np.maximum(left, 0)


@jax.jit
def masses(logits: Any, distribution: Any, weight: Any) -> tuple[jax.Array, jax.Array]:
    """Of each row's tiles: as a draw finds them, and as the sums of what it draws from in each."""
    weights, source = weights_of(logits, distribution, weight)

    def of_tile(t: jax.Array) -> jax.Array:
        return weights.in_tile(source, jnp.full(N, t))[1][:, 0].sum(1)

    of_tiles = Xla().on("cpu").masses_of(weights, source)[:, 0]
    return of_tiles, jax.lax.map(of_tile, jnp.arange(4)).T


@pytest.mark.long
@pytest.mark.parametrize(("length", "noise"), [(8, 1.0), (V, 0.0)])
def test_what_candidates_leave_of_tiles_is_right_to_22_bits(length, noise):
    rng, weight = np.random.default_rng(length), np.float32([1, 1, 1, 0.5, 0.1, 1e-3] * 2)
    logits, distribution, left = listed_and_left(rng, length, noise, weight)
    found, inside = (np.float64(x) for x in masses(logits, distribution, weight))
    edges = np.arange(0, V, tiles.TILE)
    expected = np.add.reduceat(left, edges, axis=1)
    error = np.abs(found - expected) / weight[:, None]
    print(f"largest error 2^{np.log2(error.max()):.1f} of the row")
    assert error.max() <= 2.0**-22
    assert (np.abs(inside - expected) / weight[:, None]).max() <= 2.0**-22


@pytest.mark.slow
def test_a_tile_with_mass_by_rounding_alone_is_passed_over():
    """The drafter has p itself, but for one id; acceptance at rate 0 reads what that leaves."""
    rng, only = np.random.default_rng(5), 5000
    logits = (2 * rng.standard_normal((N, V))).astype(np.float32)
    logits[:, only] = scipy.special.logsumexp(logits, axis=1) + np.log(1e-6)
    own = np.delete(np.arange(V, dtype=np.int32), only)
    ids = np.stack([rng.permutation(own) for _ in range(N)])
    listed = np.take_along_axis(logits, ids, axis=1)
    normalizer = scipy.special.logsumexp(listed, axis=1).astype(np.float32)
    distribution = sd.DraftLogits(listed, log_normalizer=normalizer, ids=ids)
    found, _ = masses(logits, distribution, np.ones(N, np.float32))
    by_rounding = np.delete(np.asarray(found), only // tiles.TILE, axis=1) > 0
    assert by_rounding.any(axis=1).sum() >= N // 2
    config = sd.SpecDecodeConfig(
        num_speculative_tokens=1,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(0.0,),
    )
    for u in (0.0, 0.5, ALMOST_ONE):  # the first tile and the last that have mass
        output = all_at_once(
            np.repeat(logits, 2, axis=0),
            sd.Drafts.from_dense(ids[:, :1], None, distribution),
            sd.testing.Noise(np.full((N, 1), 0.5, np.float32), np.full((N, 2), u, np.float32)),
            sampling=sd.SamplingParams(np.ones(N, np.float32)),
            config=config,
            vocab_size=None,
        )
        assert np.asarray(output.token_ids)[:, 0].tolist() == [only] * N


# Memory.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ids", "length", "form"),
    [("map", 32000, "cpu"), pytest.param("candidates", 32, "cuda", marks=pytest.mark.slow)],
)
def test_no_q_of_the_vocabulary_is_written(ids, length, form):
    """Beside what one-hot drafts take: 8 requests would have 8 rows of it, 32 drafts 32."""
    lists = shape(length, dtype="int32") if ids == "map" else shape(32, length, dtype="int32")
    listed = sd.DraftLogits(shape(32, length), ids=lists)
    config = sd.SpecDecodeConfig(num_speculative_tokens=4)
    used, without = (
        temporary_rows(8, "float32", distribution, config, form) for distribution in (listed, None)
    )
    print(f"{used - without:.2f} rows of {VOCAB} ids")
    assert used - without < 4  # a map's columns, and one request at a time or a few tiles
