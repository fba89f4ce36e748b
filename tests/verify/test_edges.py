"""Edge cases of every backend, most of them small enough to check by hand.

Each compares with the oracle and says itself what must come out. Vocabularies are 8 ids where one
tile will do, or LARGE.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd

from .backends import run_on
from .batch import ALMOST_ONE, Request
from .between import (
    ALL,
    LARGE,
    Between,
    edge_layout,
    kinds,
    logs,
    on,
    request,
    stored,
    synthetic,
    temperatures,
    with_offsets,
)

BFLOAT16: Any = dict(vocab=LARGE, dtype="bfloat16", draft_dtype="bfloat16")


@run_on(
    ("in-order", (pytest.mark.newest,)),
    ("kernel", (pytest.mark.slow,)),
    ("GPU", (pytest.mark.gpu,)),
    ("GPU-row-by-row", (pytest.mark.gpu,)),
)
class TestEdges(Between):
    """Named edges, one test each."""

    # What is emitted.

    @kinds
    def test_a_rejected_draft_is_replaced_from_the_residual(self, kind):
        p, q = on(0, 1, 2, 3), on(2, 3, 4, 5)  # the residual is uniform on 0, 1
        if kind == "none":
            p = [0.4, 0.4, 0, 0, 0.2, 0, 0, 0]  # without 4: the same
        for u, token in ((0.0, 0), (0.49, 0), (0.51, 1), (ALMOST_ONE, 1)):
            middle = request([p, ALL], [4], [q], kind, accept=[0.9], recover=(0.5, u))
            assert self.answer(middle, kind=kind) == [token]

    @pytest.mark.parametrize("kind", ["none", "logits"])
    def test_entries_far_from_the_drafts_are_summed_all_the_same(self, kind):
        target = np.full((2, 8), -np.inf, np.float32)
        target[0, [3, 6]] = 2.0, -500.0  # exp(502) is out of range
        target[1, 5] = -300.0  # and exp(-302), relative to the row before
        draft = None if kind == "none" else target[:1]
        middle = Request(target, [6], draft=draft, accept=[ALMOST_ONE])
        assert self.answer(middle, kind=kind) == [3]
        middle = dataclasses.replace(middle, draft_ids=[3], accept=[0.0])
        assert self.answer(middle, kind=kind) == [3, 5]

    @pytest.mark.parametrize("layout", [{}, BFLOAT16], ids=["float32", "bfloat16"])
    def test_equal_distributions_always_accept_even_at_the_largest_u(self, layout):
        self.keeps_drafts_of_equal_distributions(**layout)

    @kinds
    def test_zero_target_probability_is_never_accepted_even_at_u_0(self, kind):
        middle = request([on(1, 2), ALL], [0], [ALL], kind, accept=[0.0], recover=(0.5, 0.7))
        assert self.answer(middle, kind=kind) == [2]

    @stored
    def test_zero_draft_probability_is_rejected_even_at_u_0(self, kind):
        middle = request([ALL, ALL], [0], [on(1, 2, 3)], kind, accept=[0.0], recover=(0.5, 0.0))
        assert self.answer(middle, kind=kind) == [0]  # the residual holds id 0 and 4 to 7

    # Empty residuals: synthetic rejection can meet p = q.

    @pytest.mark.parametrize("temperature", [0.6, 1.0])
    def test_an_empty_residual_of_equal_logits_samples_the_target(self, temperature):
        rng = np.random.default_rng(5)
        for p in ([0, 0.25, 0, 0.25, 0.5, 0, 0, 0], *rng.dirichlet(np.ones(8), size=10)):
            logits = temperature * logs([p] * 3)
            for u in (0.1, 0.3, 0.6, 0.9):
                middle = Request(
                    target=logits,
                    draft=logits[:2],
                    draft_ids=[7, 4],
                    accept=[0.0, 0.9],
                    recover=(0.5, u),
                    temperature=temperature,
                )
                token = int(np.searchsorted(np.cumsum(p), u, side="right"))
                assert self.answer(middle, **synthetic("logits")) == [7, token]

    # Ids, temperatures, offsets.

    @temperatures
    @kinds
    @pytest.mark.parametrize("id_", [-1, 8, -(2**31), 2**31 - 1])
    def test_ids_out_of_range_end_the_request_at_their_row(self, temperature, kind, id_):
        p, q = [on(1), on(2), on(3)], [on(1), on(1)]
        middle = request(p, [1, id_], q, kind, temperature, accept=[0.0, 0.0], bonus=6)
        assert self.answer(middle, kind=kind) == [1, 2]
        if kind == "none":
            assert self.answer(middle, has_bonus=True) == [1, 2]

    @pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-45])
    def test_a_tiny_temperature_is_as_good_as_greedy(self, temperature):
        target = np.array([[0, 3.0, 2.0, -np.inf, 0, 0, 0, 0.5]] * 3)
        middle = Request(target, [1, 2], accept=[0.9, 0.0], temperature=temperature)
        assert self.answer(middle) == [1, 1]

    @pytest.mark.parametrize("temperature", [1e4, 1e30, 3e38])
    def test_a_huge_temperature_is_uniform_over_what_is_possible(self, temperature):
        target = np.array([[0, 3.0, 2.0, -np.inf, 0, -np.inf, 0, 0.5]])  # six tokens
        for u, token in ((0.1, 0), (0.2, 1), (0.4, 2), (0.6, 4), (0.8, 6), (0.9, 7)):
            middle = Request(target, (), recover=(0.5, u), temperature=temperature)
            assert self.answer(middle) == [token]

    def test_temperature_minus_zero_is_greedy(self):
        middle = dataclasses.replace(request([on(3), on(4)], [3]), temperature=-0.0)
        assert self.answer(middle) == [3, 4]

    @pytest.mark.parametrize(
        ("offsets", "bad"),
        [
            ([0, 5, 3, 5], [0, 1]),  # not sorted
            ([0, 4, 6, 8], [0]),  # a count above K
            ([0, 3, 6, 10], [2]),  # past N
            ([0, 3, 10, 12], [1, 2]),
            ([1, 2, 3, 4], [0]),  # does not begin with 0
            ([0, -1, 2, 3], [0, 1]),
            ([0, 2**31 - 1, -(2**31), 2], [0, 1, 2]),
            ([0, 3, 0, 3], [1, 2]),  # the last request's rows begin within the first's
            ([0, 2, 1, 3], [1, 2]),
            ([0, 2, 5, 3], [2]),
        ],
    )
    def test_offsets_without_sense_are_bad_input_of_their_request(self, offsets, bad):
        logits = np.random.default_rng(3).standard_normal((12, 8)).astype(np.float32)
        batch = with_offsets(offsets, edge_layout()).replace(target_logits=logits)
        status = self.verify(batch).status
        assert np.flatnonzero(status == sd.Status.BAD_INPUT).tolist() == bad
        assert not np.delete(status, bad).any()

    def test_an_inactive_slot_emits_nothing_whatever_it_holds(self):
        nan = np.full((3, 8), np.nan)
        middle = Request(nan, [1, 9], active=False, temperature=float("nan"))
        assert self.answer(middle) == sd.Status.INACTIVE

    # Greedy ties and the ends of tiles.

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_greedy_ties_go_to_the_lowest_id(self, dtype):
        float32: Any = dict(vocab=LARGE, kind="probs")
        layout = float32 if dtype == "float32" else BFLOAT16 | dict(kind="logits")
        for ids in ((3, 4), (2047, 2048), (4095, LARGE - 1), (0, LARGE - 1), (1, 2, 2048)):
            target = np.full((2, LARGE), -1.0)
            target[:, ids] = 2.0
            middle = Request(target, [ids[0]], temperature=0.0)
            assert self.answer(middle, **layout) == [ids[0], ids[0]]
            late = dataclasses.replace(middle, draft_ids=[ids[1]])
            assert self.answer(late, **layout) == [ids[0]]
        signs = np.full((1, LARGE), -1.0)
        signs[0, 1], signs[0, 2] = -0.0, 0.0
        middle = Request(signs, (), temperature=0.0)
        assert self.answer(middle, **layout) == [1]

    def test_the_ends_of_uniforms_pick_no_token_of_zero_weight(self):
        rng = np.random.default_rng(4)
        ends = [0.0, 2.0**-24, ALMOST_ONE]
        for possible in (
            [100],
            [2047, 2048],
            [2048],
            [LARGE - 1],
            [4095, 4096],
            range(2048, 4096),
            range(10, LARGE - 10, 7),
        ):
            p = np.full((1, LARGE), -np.inf)
            p[0, possible] = rng.standard_normal(len(possible))
            for u_tile in ends:
                for u_token in ends:
                    middle = Request(p, (), recover=(u_tile, u_token))
                    (token,) = self.answer(middle, vocab=LARGE, kind="probs")
                    assert token in possible

    # Synthetic acceptance.

    @temperatures
    def test_synthetic_accepts_by_rate_whatever_the_logits_say(self, temperature):
        p = [on(1), on(2), on(3), on(4)]
        for accept, tokens in (
            ([ALMOST_ONE, 0.5, 0.0], [7, 2]),
            ([ALMOST_ONE, 0.49, 0.0], [7, 6, 3]),
        ):
            middle = request(p, [7, 6, 5], temperature=temperature, accept=accept, valid=False)
            assert self.answer(middle, **synthetic("logits")) == tokens
        middle = request(p[:3], [7, 6], temperature=temperature, accept=[0.9, 0.4], valid=False)
        assert self.answer(middle, **synthetic("logits")) == [7, 6, 3]

    @temperatures
    def test_synthetic_reads_only_the_row_it_emits_from(self, temperature):
        target = np.full((4, 8), np.nan)
        target[1] = [0, 0, 90.0, 0, 0, 0, 0, 0]
        draft = np.full((3, 8), np.nan)
        draft[1] = 0.0
        accept = [0.0, 0.9, 0.0]
        middle = Request(target, [3, 4, 5], draft, accept=accept, temperature=temperature)
        for kind in ("logits", "none"):
            assert self.answer(middle, **synthetic(kind)) == [3, 2]
