"""Min-p, top-k, top-p and bitmasks by hand, by every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jax_specdec as sd

from .backends import run_on
from .batch import ALMOST_ONE, FILTERS, Request
from .between import ALL, BAD, Between, on, request

# p of ids 0 to 4, and twice the same weight.
P = [0.4, 0.2, 0.2, 0.15, 0.05, 0, 0, 0]


@run_on(
    ("in-order", (pytest.mark.newest, pytest.mark.long)),
    ("GPU", (pytest.mark.gpu,)),
)
class TestProcessed(Between):
    """Named edges; they share a compilation."""

    def answer(self, middle: Request, **changes: Any) -> list[int] | sd.Status:
        return super().answer(middle, kind="logits", **FILTERS, **changes)

    def support(self, p: list[float] = P, **fields: Any) -> set[int]:
        """Which ids come out over a fine grid of noise."""
        found = set()
        for u in [0.0, *np.linspace(0.01, 0.99, 25), ALMOST_ONE]:
            (token,) = self.answer(request([p], recover=(0.5, u), **fields))
            found.add(token)
        return found

    @pytest.mark.parametrize(
        ("filters", "kept"),
        [
            ({}, {0, 1, 2, 3, 4}),
            (dict(top_k=8), {0, 1, 2, 3, 4}),  # V
            (dict(top_k=-1), {0, 1, 2, 3, 4}),
            (dict(top_k=2**31 - 1), {0, 1, 2, 3, 4}),
            (dict(min_p=0.3), {0, 1, 2, 3}),
            (dict(min_p=0.45), {0, 1, 2}),
            (dict(min_p=1.0), {0}),
            (dict(top_k=1), {0}),
            (dict(top_k=2), {0, 1, 2}),  # ties at the threshold all stay
            (dict(top_k=3), {0, 1, 2}),
            (dict(top_p=0.3), {0}),
            (dict(top_p=0.45), {0, 1, 2}),
            (dict(top_p=0.85), {0, 1, 2, 3}),
            (dict(top_p=1e-30), {0}),
            # Top-p is a share of what min-p and top-k have left: 0.4 of 0.8.
            (dict(top_k=3, top_p=0.48), {0}),
            (dict(min_p=0.45, top_p=0.48), {0}),
            (dict(min_p=0.45, top_k=1, top_p=0.9), {0}),
        ],
        ids=str,
    )
    def test_what_is_left_is_what_comes_out(self, filters, kept):
        assert self.support(**filters) == kept
        assert self.support(**filters, temperature=2.0) == kept  # with logits of the same p

    def test_a_forbidden_draft_is_rejected_and_the_residual_is_right(self):
        allowed = np.isin(np.arange(8), [2, 3])[None].repeat(2, axis=0)
        p, q = [0.3, 0, 0.175, 0.525, 0, 0, 0, 0], [0.5, 0, 0.5, 0, 0, 0, 0, 0]
        # Of 2 and 3, p is 0.25 and 0.75; the residual is all on 3.
        middle = request(
            [p, ALL], [0], [q], "logits", accept=[0.0], recover=(0.5, 0.0), allowed=allowed
        )
        assert self.answer(middle) == [3]

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_a_row_with_everything_masked_is_a_bad_target_row(self, temperature):
        allowed = np.ones((3, 8), bool)
        allowed[1] = False
        middle = request(
            [on(1), on(2), ALL], [1, 2], temperature=temperature, valid=False, allowed=allowed
        )
        assert self.answer(middle) == sd.Status.BAD_TARGET_ROW
        ends = request([on(1), on(2)], [3], temperature=temperature, valid=False, allowed=allowed)
        assert self.answer(ends) == [1]

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    @pytest.mark.parametrize("entry", BAD)
    def test_what_a_mask_hides_may_hold_anything(self, temperature, entry):
        target, allowed = np.zeros((1, 8)), np.ones((1, 8), bool)
        target[0, [2, 5]] = entry, 9.0
        allowed[0, 2] = False
        for top_k in (0, 1):
            middle = Request(target, (), temperature=temperature, allowed=allowed, top_k=top_k)
            token = self.answer(middle)
            assert token == [5] or (top_k == 0 and temperature > 0 and token != [2])
            shown = Request(target, (), temperature=temperature, top_k=top_k)
            assert self.answer(shown) == sd.Status.BAD_TARGET_ROW

    def test_greedy_requests_take_the_largest_allowed_and_are_not_filtered(self):
        allowed = np.arange(8)[None].repeat(3, axis=0) != 0
        middle = request([P] * 3, [1, 2], temperature=0.0, top_k=1, top_p=0.1, allowed=allowed)
        assert self.answer(middle) == [1, 1]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *[("min_p", x) for x in (-0.1, 1.5, float("nan"), float("inf"))],
            *[("top_k", x) for x in (-2, -(2**31))],
            *[("top_p", x) for x in (0.0, -0.5, 1.5, float("nan"), float("inf"))],
        ],
    )
    def test_a_parameter_out_of_range_is_bad_input(self, name, value, temperature):
        middle = request([P], temperature=temperature, **{name: value})
        assert self.answer(middle) == sd.Status.BAD_INPUT

    def test_a_draft_below_its_threshold_is_rejected(self):
        q, threshold = [0.5, 0.3, 0.2, 0, 0, 0, 0, 0], np.log([0.25])
        for x, accept, answer in ((2, 0.0, 2), (1, ALMOST_ONE, 2), (1, 0.0, [1, 6])):
            # q is 5/8, 3/8 after all, and what it leaves of p is all on 2.
            p = [0.4, 0.2, 0.4, 0, 0, 0, 0, 0]
            middle = request([p, on(6)], [x], [q], "logits", accept=[accept], threshold=threshold)
            assert self.answer(middle) == ([answer] if isinstance(answer, int) else answer)

    @pytest.mark.parametrize("accept", [0.0, ALMOST_ONE])
    def test_a_threshold_that_is_none_is_a_bad_draft_row(self, accept):
        middle = request(
            [ALL, ALL], [1], [ALL], "logits", accept=[accept], threshold=np.array([np.nan])
        )
        assert self.answer(middle) == sd.Status.BAD_DRAFT_ROW
