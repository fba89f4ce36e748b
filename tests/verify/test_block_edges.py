"""Block verification by hand, by every backend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd

from .backends import run_on
from .batch import ALMOST_ONE, Request
from .between import ALL, BAD, STORED, Between, on, request, stored


@run_on(
    ("in-order", (pytest.mark.newest, pytest.mark.long)),
    ("kernel", (pytest.mark.slow,)),
    ("GPU", (pytest.mark.gpu,)),
)
class TestBlock(Between):
    """Named edges of the block rule, one test each."""

    def answer(self, middle: Request, **changes: Any) -> list[int] | sd.Status:
        """With draft probabilities a bonus token is given, and with the others drawn."""
        return super().answer(
            middle, block=True, has_bonus=changes.get("kind") == "probs", **changes
        )

    # What is emitted.

    @stored
    def test_a_draft_that_would_fail_is_saved_by_the_next(self, kind):
        # Weights 1/2, then min(1, 1/2 * 3).
        p, q = [on(0, 1, 2, 3), [0.25, 0.75, *[0] * 6]], [on(0, 1), [0.75, 0.25, *[0] * 6]]
        middle = request([*p, on(6)], [0, 1], q, kind, accept=[ALMOST_ONE] * 2, bonus=6)
        assert self.answer(middle, kind=kind) == [0, 1, 6]

    @stored
    def test_the_residual_after_a_prefix_has_its_joint_weight(self, kind):
        # Weight 1/2 leaves (1/2 p - q)+ = 1/4 on id 0, so one draft passes with probability 1/3.
        p = [[0, 0, 0, 0, 0, 0.25, 0.75, 0], [0.5, 0.25, 0.25, 0, 0, 0, 0, 0], ALL]
        q = [on(5, 6), [0, 0.125, 0.5, 0.375, 0, 0, 0, 0]]
        for u, answer in ((0.0, [5, 0]), (0.33, [5, 0]), (0.34, [6]), (ALMOST_ONE, [6])):
            middle = request(p, [5, 2], q, kind, accept=[u, 0.9], recover=(0.5, 0.9))
            assert self.answer(middle, kind=kind) == answer

    @pytest.mark.parametrize("kind", ["none", "probs"])
    def test_drafts_without_probabilities_leave_the_rest_of_the_target(self, kind):
        # Weights 1/2 and 1/8; one draft leaves 1/2 * 3/4 and passes with probability 3/7.
        p = [on(1, 2), on(3, 4, 5, 6), on(7)]
        drafts: Any = dict(draft=np.full((2, 8), np.nan), valid=False) if kind == "probs" else {}
        for u, answer in (
            ((0.42, 0.9), [1, 6]),
            ((0.43, 0.9), [2]),
            ((ALMOST_ONE, 0.12), [1, 3, 7]),
            ((0.42, 0.13), [1, 6]),
        ):
            middle = request(p, [1, 3], accept=u, recover=(0.5, 0.9), bonus=7, **drafts)
            assert self.answer(middle, kind=kind) == answer

    def test_equal_distributions_keep_every_draft_even_at_the_largest_u(self):
        self.keeps_drafts_of_equal_distributions()

    @pytest.mark.parametrize("kind", ["none", *STORED])
    def test_zero_target_probability_ends_the_block_even_at_u_0(self, kind):
        p, accept = [on(1), on(2, 3), on(4), on(5)], [0.0] * 3
        q = [on(1), ALL, on(4)]
        second = request(p, [1, 0, 4], q, kind, accept=accept, recover=(0.5, 0.9))
        assert self.answer(second, kind=kind) == [1, 3]
        first = request(p[1:], [0, 4], q[1:], kind, accept=accept[1:], recover=(0.5, 0.1))
        assert self.answer(first, kind=kind) == [2]

    @stored
    def test_zero_draft_probability_ends_the_block_even_at_u_0(self, kind):
        p, q = [ALL, ALL, ALL], [on(1, 2, 3), ALL]
        middle = request(p, [0, 1], q, kind, accept=[0.0, 0.0], recover=(0.5, 0.0))
        assert self.answer(middle, kind=kind) == [0]  # the residual holds id 0 and 4 to 7

    def test_weights_without_mass_go_to_the_target(self):
        q = [[0.5] * 8]  # no distribution, but each entry could be a probability
        for u, token in ((0.1, 0), (0.9, 7)):
            middle = request([ALL, ALL], [3], q, "probs", accept=[0.9], recover=(0.5, u))
            assert self.answer(middle, kind="probs") == [token]

    @pytest.mark.parametrize("id_", [-1, 8, 2**31 - 1])
    @pytest.mark.parametrize("kind", ["none", "probs"], ids=["", "bonus"])
    def test_ids_out_of_range_end_the_drafts_at_their_row(self, id_, kind):
        p = [on(1, 2), on(4), on(6), ALL]
        for u, answer in ((0.49, [1, 4]), (0.51, [2])):
            middle = request(p, [1, id_, 6], accept=[u, 0.0, 0.0], bonus=7, valid=kind == "none")
            assert self.answer(middle, kind=kind) == answer

    # Rows that cannot be used.

    @pytest.mark.parametrize("entry", BAD)
    def test_a_bad_target_row_counts_while_it_matters(self, entry):
        bad = np.zeros((3, 8))
        bad[1, 3] = entry
        late = Request(bad, [1, 2], accept=[0.9, 0.9])  # the standard rule would stop before it
        assert self.answer(late) == sd.Status.BAD_TARGET_ROW
        bad[0] = [0, -np.inf, *[0] * 6]
        impossible = Request(bad, [1, 2], accept=[0.9, 0.9], recover=(0.5, 0.0))
        assert self.answer(impossible) == [0]

    def test_the_first_bad_row_gives_the_status_target_before_draft(self):
        q = np.array([on(1, 2)] * 2)
        q[0, 6] = np.nan
        middle = request([ALL, ALL, ALL], [1, 2], q, "probs", accept=[0.9, 0.9])
        for row, status in ((0, sd.Status.BAD_TARGET_ROW), (1, sd.Status.BAD_DRAFT_ROW)):
            target = middle.target.copy()
            target[row, 0] = np.nan
            answer = self.answer(dataclasses.replace(middle, target=target), kind="probs")
            assert answer == status
