"""The Mosaic GPU kernel and draft distributions on a list of ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from .batch import Layout, check, verify
from .cases import random_batch
from .lists import with_ids
from .test_mosaic_gpu import (
    BIG,
    BLOCK,
    FILTERED,
    SYNTHETIC,
    TILES,
    alone,
    few,
)

PROBS = Layout(vocab=4224, **BIG, kind="probs", dtype="bfloat16", store_rows=50, has_valid=True)
UNALIGNED = Layout(vocab=4203, **BIG, kind="logits", vocab_size=4100, has_bonus=True)


def agrees(layout: Layout, verifier: Any, length: int, seeds: Any = range(4)) -> None:
    """The tokens of the oracle, and of the same rows over all ids."""
    rejected = 0
    for seed in seeds:
        batch = random_batch(layout, seed + len(layout.kind), broken=0.2)
        listed, scattered = with_ids(batch, "candidates", length, seed)
        output = verify(listed, verifier)
        if check(listed, output) == 0:
            dense = verify(scattered, verifier)
            np.testing.assert_array_equal(output.token_ids, dense.token_ids)
            np.testing.assert_array_equal(output.status, dense.status)
        counts = np.diff(batch.drafts.cu_num_draft_tokens)
        rejected += ((output.num_emitted > 0) & (output.num_accepted < counts)).sum()
    assert rejected > 3


@pytest.mark.parametrize(
    ("length", "layout"),
    [
        *(pytest.param(*case, marks=pytest.mark.newest) for case in ((24, few(PROBS)),)),
        pytest.param(40, few(FILTERED[3]), marks=pytest.mark.newest),
        pytest.param(3, few(UNALIGNED), marks=pytest.mark.newest),
        *(
            pytest.param(length, layout, marks=pytest.mark.slow)
            for length, layout in (
                (128, TILES),
                (33, UNALIGNED),
                (24, SYNTHETIC),
                (24, dataclasses.replace(PROBS, block=True)),
                (100, BLOCK[2]),
                (24, BLOCK[3]),
                (24, FILTERED[2]),
            )
        ),
    ],
    ids=str,
)
def test_gives_the_tokens_of_the_oracle_and_of_scattered_rows(length, layout):
    agrees(layout, alone, length)
