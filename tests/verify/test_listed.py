"""Draft distributions on a list of ids equal the same ones scattered over the vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .batch import XLA, Layout, check, oracle, verify
from .cases import random_batch
from .lists import with_ids
from .suite import RATES
from .test_forms import on_tpu
from .test_xla_all_at_once import all_at_once

BIG: Any = dict(num_speculative_tokens=4, num_requests=8, num_drafts=34)
STORED: Any = dict(store_rows=40, has_valid=True, has_active=True)
EVERYTHING: Any = dict(has_filters=True, has_bitmask=True, has_threshold=True)

GRID = [
    ("map", Layout(vocab=2049, **BIG, **STORED, kind="probs", dtype="bfloat16")),
    ("map", Layout(vocab=4200, **BIG, **EVERYTHING, kind="logits", vocab_size=4100)),
    ("map", Layout(vocab=5000, **BIG, kind="normalized", block=True, draft_dtype="bfloat16")),
    ("map", Layout(vocab=97, **BIG, kind="probs", rates=RATES, has_bonus=True)),
    ("candidates", Layout(vocab=5000, **BIG, kind="probs", vocab_size=4500, has_bonus=True)),
    ("candidates", Layout(vocab=4200, **BIG, **EVERYTHING, **STORED, kind="normalized")),
    ("candidates", Layout(vocab=5000, **BIG, kind="logits", block=True, dtype="bfloat16")),
    ("candidates", Layout(vocab=2049, **BIG, kind="logits", rates=RATES, draft_dtype="bfloat16")),
]
LENGTHS = {"map": 0.7, "candidates": 0.01}
on_grid = pytest.mark.parametrize(("ids", "layout"), GRID, ids=str)


def batches(ids: str, layout: Layout, seeds: Any) -> Any:
    """Listed and scattered."""
    for seed in seeds:
        length = max(3, int(LENGTHS[ids] * layout.real_vocab))
        yield with_ids(random_batch(layout, seed), ids, length, seed)


@on_grid
def test_the_oracle_gives_the_tokens_of_the_scattered_rows(ids, layout):
    accepted = 0
    for listed, scattered in batches(ids, layout, range(6)):
        got, want = oracle(listed), oracle(scattered)
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_array_equal(got.status, want.status)
        accepted += got.num_accepted.sum()
    assert accepted > 10


def agree(ids: str, layout: Layout, verifier: Any, seeds: Any = range(12)) -> None:
    close = sum(
        check(listed, verify(listed, verifier)) for listed, _ in batches(ids, layout, seeds)
    )
    print(f"{close} close calls differ in {len(seeds)} batches of {layout}")


@on_grid
def test_rows_read_one_by_one_give_the_tokens_of_the_oracle(ids, layout):
    agree(ids, layout, XLA)


@pytest.mark.newest
@pytest.mark.parametrize(("ids", "layout"), [*GRID[:3], *GRID[4:7]], ids=str)
def test_rows_read_at_once_give_the_tokens_of_the_oracle(ids, layout):
    agree(ids, layout, all_at_once)


@pytest.mark.newest
@pytest.mark.parametrize(("ids", "layout"), [GRID[1], GRID[5]], ids=str)
def test_rows_read_as_on_a_tpu_give_the_tokens_of_the_oracle(ids, layout):
    agree(ids, layout, on_tpu)
