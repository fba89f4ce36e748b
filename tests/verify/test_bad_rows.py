"""Rows that cannot be used, and rows that nobody reads, by every backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd

from .backends import run_on
from .batch import Request
from .between import ALL, BAD, LARGE, Between, on, request, stored, temperatures


@run_on(
    ("in-order", (pytest.mark.newest, pytest.mark.long)),
    ("GPU", (pytest.mark.gpu,)),
)
class TestBadRows(Between):
    """A bad row hurts its own request only, and only where a rule visits it."""

    @temperatures
    @pytest.mark.parametrize("vocab", [8, LARGE])
    @pytest.mark.parametrize("bad", ["nan", "+inf", "all -inf"])
    def test_a_bad_target_row_hurts_only_its_own_request(self, temperature, bad, vocab):
        layout: Any = dict(vocab=vocab, kind="probs")
        clean = 0.1 * np.arange(3 * vocab).reshape(3, vocab) % 1
        clean[:, 2] = 60.0  # both drafts are kept
        for row in range(3):
            for id_ in {0, 2, vocab // 2, vocab - 1}:
                target = clean.copy()
                if bad == "all -inf":
                    target[row] = -np.inf
                else:
                    target[row, id_] = float(bad)
                middle = Request(target, [2, 2], temperature=temperature, valid=False)
                assert self.answer(middle, **layout) == sd.Status.BAD_TARGET_ROW
                # Where the walk ends before that row, the row does not matter.
                ends = dataclasses.replace(middle, draft_ids=[3, 2])
                if row > 0:
                    assert self.answer(ends, **layout) == [2]

    @pytest.mark.parametrize("entry", [*BAD, -0.5])
    def test_another_bad_entry_matters_once_the_residual_is_read(self, entry):
        q = np.array([on(0, 1)])
        q[0, 6] = entry
        accepted = request([ALL, on(4)], [1], q, "probs", accept=[0.0])
        assert self.answer(accepted, kind="probs") == [1, 4]
        rejected = request([ALL, on(4)], [1], q, "probs", accept=[0.9])
        assert self.answer(rejected, kind="probs") == sd.Status.BAD_DRAFT_ROW

    @pytest.mark.parametrize("entry", BAD)
    def test_logits_with_a_normalizer_are_judged_by_what_is_read(self, entry):
        q = [on(0, 1)]
        at_the_draft = request([ALL, on(4)], [1], q, "normalized", accept=[0.0])
        at_the_draft.draft[0, 1] = entry
        assert self.answer(at_the_draft, kind="normalized") == sd.Status.BAD_DRAFT_ROW
        for accept, answer in ((0.0, [1, 4]), (0.9, sd.Status.BAD_DRAFT_ROW)):
            elsewhere = request([ALL, on(4)], [1], q, "normalized", accept=[accept])
            elsewhere.draft[0, 6] = entry
            assert self.answer(elsewhere, kind="normalized") == answer

    def test_a_draft_with_a_large_normalizer_alone_is_one_hot(self):
        """At 1024 in size; which of them it is depends on no other draft."""
        p, q = [0.5, 0.25, 0.25, 0, 0, 0, 0, 0], [0.125, 0.875, 0, 0, 0, 0, 0, 0]
        nothing = np.full(8, np.nan)  # of a one-hot draft's row nothing is read
        for large in (1024.0, -1024.0, 3e38):
            for i in range(2):
                ids, normalizer = [0, 0], np.full(2, np.float32(0.75))
                draft = request([p, p, ALL], ids, [q, q], "normalized").draft
                normalizer[i], draft[i] = large, nothing
                accept = np.full(2, 0.99)  # kept if q = 1/8 is used, and else not
                middle = request(
                    [p, p, on(7)],
                    ids,
                    kind="normalized",
                    draft=draft,
                    log_normalizer=normalizer,
                    accept=accept,
                    recover=(0.5, 0.9),
                )
                assert self.answer(middle, kind="normalized") == [0] * i + [2]
                kept = dataclasses.replace(middle, accept=np.where(np.arange(2) == i, 0.49, 0.99))
                assert self.answer(kept, kind="normalized") == [0, 0, 7]
        below = request([p, on(7)], [0], [q], "normalized", accept=[0.99])
        below = dataclasses.replace(below, draft=below.draft + 1023.0)
        below = dataclasses.replace(below, log_normalizer=np.float32([1023.75]))
        assert self.answer(below, kind="normalized") == [0, 7]

    @stored
    def test_a_request_without_a_stored_distribution_alone_is_one_hot(self, kind):
        drafts: Any = dict(draft=np.full((1, 8), np.nan), bad_rows=frozenset([0]), valid=False)
        p = [0.5, 0.25, 0.25, 0, 0, 0, 0, 0]
        kept = request([p, on(7)], [0], accept=[0.49], **drafts)
        assert self.answer(kept, kind=kind) == [0, 7]
        for u, token in ((0.4, 1), (0.6, 2)):
            rejected = request([p, on(7)], [0], accept=[0.51], recover=(0.5, u), **drafts)
            assert self.answer(rejected, kind=kind) == [token]
