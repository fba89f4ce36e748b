"""Draft distributions on a list of ids equal the same ones scattered over the vocabulary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from .batch import Layout, oracle
from .cases import random_batch
from .lists import with_ids

BIG = dict(num_speculative_tokens=4, num_requests=8, num_drafts=34)
RULES = [{}, dict(block=True), dict(rates=(0.9, 0.75, 0.3, 0.1))]


@pytest.mark.parametrize("ids", ["map", "candidates"])
@pytest.mark.parametrize("kind", ["probs", "logits", "normalized"])
@pytest.mark.parametrize("changes", RULES, ids=str)
def test_the_oracle_gives_the_tokens_of_the_scattered_rows(ids, kind, changes):
    layout = Layout(vocab=4200, **BIG, kind=kind, store_rows=40, vocab_size=4100, **changes)
    layout = dataclasses.replace(layout, has_threshold=kind != "probs", has_filters=True)
    accepted = 0
    for seed in range(6):
        batch = random_batch(layout, seed)
        listed, scattered = with_ids(batch, ids, 3000 if ids == "map" else 24, seed)
        got, want = oracle(listed), oracle(scattered)
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_array_equal(got.status, want.status)
        accepted += got.num_accepted.sum()
    assert accepted > 10
