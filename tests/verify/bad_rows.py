"""Rows that cannot be used, and rows that nobody reads: what every backend must pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd

from .batch import ALMOST_ONE, Request
from .between import ALL, BAD, LARGE, Between, on, request, stored, temperatures
from .cases import uniforms


class BadRowSuite(Between):
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

    def test_minus_infinity_entries_are_never_emitted(self):
        rng = np.random.default_rng(2)
        for temperature in (0.0, 0.5, 1.0):
            target = rng.standard_normal((1, 8))
            target[0, ::2] = -np.inf
            for u in (0.0, *uniforms(rng, 4), ALMOST_ONE):
                middle = Request(target, (), temperature=temperature, recover=(u, u))
                (token,) = self.answer(middle)
                assert token % 2 == 1

    @stored
    @pytest.mark.parametrize("outside", [0, 1], ids=["before", "after"])
    def test_a_row_index_outside_the_store_is_bad(self, kind, outside):
        drafts: Any = dict(kind=kind, q=[on(1), on(1)], accept=[0.0, 0.0])
        for position in (0, 1):
            if position % 2 == outside:
                middle = request(
                    [on(1), on(1), ALL], [1, 1], **drafts, bad_rows=frozenset([position])
                )
                assert self.answer(middle, kind=kind) == sd.Status.BAD_DRAFT_ROW
        unvisited = request([on(0), on(1), ALL], [1, 1], **drafts, bad_rows=frozenset([1]))
        assert self.answer(unvisited, kind=kind) == [0]
        no_proposal = request([on(3), ALL], [-1], [ALL], kind, bad_rows=frozenset([0]))
        assert self.answer(no_proposal, kind=kind) == [3]

    @pytest.mark.parametrize("entry", [*BAD, -0.5])
    def test_a_drafts_entry_of_no_probability_is_bad(self, entry):
        q = np.array([on(0, 1)])
        q[0, 1] = entry
        middle = request([ALL, ALL], [1], q, "probs", accept=[0.0])
        assert self.answer(middle, kind="probs") == sd.Status.BAD_DRAFT_ROW

    @pytest.mark.parametrize("entry", [*BAD, -0.5])
    def test_another_bad_entry_matters_once_the_residual_is_read(self, entry):
        q = np.array([on(0, 1)])
        q[0, 6] = entry
        accepted = request([ALL, on(4)], [1], q, "probs", accept=[0.0])
        assert self.answer(accepted, kind="probs") == [1, 4]
        rejected = request([ALL, on(4)], [1], q, "probs", accept=[0.9])
        assert self.answer(rejected, kind="probs") == sd.Status.BAD_DRAFT_ROW

    @pytest.mark.parametrize("entry", [*BAD, "all -inf"])
    @pytest.mark.parametrize("vocab", [8, LARGE])
    def test_logits_without_a_normalizer_are_bad_without_a_finite_one(self, entry, vocab):
        layout: Any = dict(kind="logits", vocab=vocab)
        if vocab == LARGE:  # a program that there is already
            layout["dtype"] = layout["draft_dtype"] = "bfloat16"
        draft = np.zeros((1, vocab))
        if entry == "all -inf":
            draft[:] = -np.inf
        else:
            draft[0, vocab - 2] = entry
        middle = Request(np.zeros((2, vocab)), [1], draft, accept=[0.0])
        assert self.answer(middle, **layout) == sd.Status.BAD_DRAFT_ROW

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

    @pytest.mark.parametrize("entry", [*BAD, -float("inf")])
    def test_a_stored_normalizer_must_be_finite(self, entry):
        middle = request(
            [ALL, ALL], [1], [ALL], "normalized", accept=[0.0], log_normalizer=np.array([entry])
        )
        assert self.answer(middle, kind="normalized") == sd.Status.BAD_DRAFT_ROW

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
    def test_a_greedy_request_never_reads_the_draft_distribution(self, kind):
        middle = request(
            [on(1), on(2), on(3)],
            [1, 2],
            kind=kind,
            temperature=0.0,
            draft=np.full((2, 8), np.nan),
            log_normalizer=np.full(2, np.nan),
            bad_rows=frozenset([1]),
        )
        assert self.answer(middle, kind=kind) == [1, 2, 3]

    @stored
    def test_a_request_without_a_stored_distribution_alone_is_one_hot(self, kind):
        drafts: Any = dict(draft=np.full((1, 8), np.nan), bad_rows=frozenset([0]), valid=False)
        p = [0.5, 0.25, 0.25, 0, 0, 0, 0, 0]
        kept = request([p, on(7)], [0], accept=[0.49], **drafts)
        assert self.answer(kept, kind=kind) == [0, 7]
        for u, token in ((0.4, 1), (0.6, 2)):
            rejected = request([p, on(7)], [0], accept=[0.51], recover=(0.5, u), **drafts)
            assert self.answer(rejected, kind=kind) == [token]
