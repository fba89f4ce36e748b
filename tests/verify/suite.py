"""What every backend must pass: the oracle's tokens over a grid, and invariance.

A backend's test file subclasses these and those of `edges` and `bad_rows`, naming its `verifier`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jax_specdec as sd

from .batch import FILTERS, HALF, Batch, Layout, Request, Verifier, agree, pack, stored, verify
from .between import edge_layout
from .cases import random_batches, random_request

RATES = (0.9, 0.75, 0.3, 0.1)
BIG = dict(num_speculative_tokens=4, num_requests=8, num_drafts=34)
LONG = dict(num_speculative_tokens=30, num_requests=3, num_drafts=90)

F16 = dict(dtype="float16", draft_dtype="float16")
CUT = dict(vocab_size=4500, has_active=True)
NARROW = dict(draft_vocab=4097, has_bonus=True)

# Few layouts, because each compiles; many seeds of each.
GRID = [
    # Every kind of draft distribution with every dtype, full and narrower, in place and permuted.
    Layout(vocab=97, **BIG),
    Layout(vocab=2049, **BIG, dtype="bfloat16", has_active=True),
    Layout(vocab=97, **LONG, **stored(100), kind="probs", draft_vocab=60),
    Layout(vocab=2048, **BIG, kind="probs", dtype="float16", has_bonus=True, has_active=True),
    Layout(vocab=97, **BIG, kind="logits", draft_dtype="bfloat16"),
    Layout(vocab=10243, **BIG, **HALF, **stored(64), kind="logits"),
    Layout(vocab=5000, **BIG, **NARROW, kind="logits", vocab_size=4500),
    Layout(vocab=2048, **BIG, **F16, **stored(40), kind="normalized"),
    Layout(vocab=8195, **BIG, **CUT, dtype="bfloat16", kind="relative", draft_vocab=6500),
    # Small numbers of everything.
    Layout(vocab=1, kind="logits", store_rows=12, has_valid=True, has_active=True),
    Layout(vocab=2, num_speculative_tokens=1, num_requests=8, num_drafts=8, kind="probs"),
    Layout(vocab=97, num_speculative_tokens=4, num_requests=1, num_drafts=4, kind="logits"),
    Layout(vocab=97, num_drafts=0),
    Layout(vocab=97, num_drafts=0, kind="probs", store_rows=5, has_bonus=True),
    # Synthetic.
    Layout(vocab=97, **BIG, rates=RATES, dtype="float16", has_active=True),
    Layout(vocab=97, **BIG, **stored(50), rates=RATES, kind="probs"),
    Layout(vocab=2049, **BIG, rates=RATES, kind="logits", dtype="bfloat16"),
    Layout(vocab=5000, **BIG, **NARROW, rates=RATES, kind="normalized", vocab_size=4999),
]
OTHERS = [*(GRID[i] for i in (1, 3, 4, 5, 7, 10, 11, 13, 14, 15, 16))]  # slow
DEFAULT = [
    *(GRID[0], GRID[2], GRID[6], GRID[8]),  # one of each kind, on every JAX
    pytest.param(GRID[9], marks=pytest.mark.newest),
    *(pytest.param(GRID[i], marks=[pytest.mark.newest, pytest.mark.slow]) for i in (12, 17)),
]
BLOCK = [
    Layout(vocab=97, **BIG, block=True, has_bonus=True, has_active=True),
    Layout(vocab=5000, **BIG, **HALF, **NARROW, block=True, kind="logits", vocab_size=4500),
    Layout(vocab=2049, **BIG, **stored(50), block=True, kind="probs", draft_vocab=60),
    Layout(
        vocab=10243,
        **BIG,
        **stored(64),
        block=True,
        kind="normalized",
        dtype="bfloat16",
        has_active=True,
    ),
    Layout(vocab=37, **LONG, block=True, kind="probs"),
]
AGREEMENT = Layout(
    vocab=5000,
    **BIG,
    **FILTERS,
    **CUT,
    agreement=True,
    kind="relative",
    dtype="bfloat16",
    draft_vocab=4097,
)
RACE = Layout(
    vocab=2049, **BIG, **stored(50), race=True, kind="logits", vocab_size=2040, has_bonus=True
)


def suite_of(base: type, verifier: Verifier, *marks: Any, **fields: Any) -> type:
    """Returns a suite for one verifier; pytest finds it by the name that a test file gives it."""
    made = type(base.__name__, (base,), {"verifier": staticmethod(verifier), **fields})
    for mark in marks:
        mark(made)
    return made


class OracleSuite:
    """The oracle's tokens, counts and status, but for calls closer than float32 can tell."""

    verifier: Verifier
    seeds = range(12)

    def agree(self, layout: Layout) -> None:
        agree(random_batches(layout, self.seeds), self.verifier)

    @pytest.mark.parametrize("layout", DEFAULT, ids=str)
    def test_gives_the_tokens_of_the_oracle(self, layout):
        self.agree(layout)

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", OTHERS, ids=str)
    def test_gives_the_tokens_of_the_oracle_too(self, layout):
        self.agree(layout)

    @pytest.mark.newest
    @pytest.mark.parametrize(
        "layout",
        [*BLOCK[:2], *(pytest.param(layout, marks=pytest.mark.slow) for layout in BLOCK[2:])],
        ids=str,
    )
    def test_gives_the_tokens_of_the_oracle_under_the_block_rule(self, layout):
        self.agree(layout)


class RaceSuite(OracleSuite):
    """The same for backends that can run an exponential race, and draw from every row."""

    def test_gives_the_tokens_of_the_oracle_under_the_agreement_rule(self):
        self.agree(AGREEMENT)

    @pytest.mark.newest
    def test_gives_the_tokens_of_the_oracle_in_a_race(self):
        self.agree(RACE)


PROPERTIES = [
    pytest.param(edge_layout(kind="logits"), id="logits"),
    pytest.param(
        edge_layout(kind="probs", has_bonus=True, block=True),
        id="probs, bonus, block",
        marks=pytest.mark.long,
    ),
]
"""Programs that the named edges have compiled already."""

on_layouts = pytest.mark.parametrize("layout", PROPERTIES)
seeds = st.integers(0, 2**32 - 1)
few_examples = hypothesis.settings(max_examples=25)


def three_requests(layout: Layout, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [random_request(layout, rng, int(rng.integers(3))) for _ in range(3)]


class InvarianceSuite:
    """A token does not depend on who else is in the batch, on the slot or on padding."""

    verifier: Verifier

    def verify(self, batch: Batch) -> sd.RejectionSampleOutput:
        return verify(batch, self.verifier)

    def verify_requests(self, requests, layout, seed=0) -> sd.RejectionSampleOutput:
        return self.verify(pack(requests, layout, seed))

    def verify_alone(self, request: Request, layout: Layout) -> sd.RejectionSampleOutput:
        """Without padding; as wide as in the layout's batch."""
        small = dict(num_requests=1, num_drafts=2, num_speculative_tokens=2, store_rows=5)
        output = self.verify_requests([request], dataclasses.replace(layout, **small))
        padding = ((0, 0), (0, layout.num_speculative_tokens - 2))
        ids = np.pad(output.token_ids, padding, constant_values=sd.PLACEHOLDER_TOKEN_ID)
        return dataclasses.replace(output, token_ids=ids)

    @on_layouts
    @few_examples
    @hypothesis.given(seed=seeds, order=st.permutations(range(3)), rubbish=seeds)
    def test_permuting_requests_permutes_the_output(self, layout, seed, order, rubbish):
        requests = three_requests(layout, seed)
        straight = self.verify_requests(requests, layout)
        permuted = self.verify_requests([requests[i] for i in order], layout, rubbish)
        chex.assert_trees_all_equal(permuted, take(straight, list(order)))

    @on_layouts
    @few_examples
    @hypothesis.given(seed=seeds)
    def test_a_request_alone_gives_what_it_gives_in_a_batch(self, layout, seed):
        requests = three_requests(layout, seed)
        whole = self.verify_requests(requests, layout)
        for b, request in enumerate(requests):
            single = self.verify_alone(request, layout)
            chex.assert_trees_all_equal(single, take(whole, slice(b, b + 1)))

    @on_layouts
    @few_examples
    @hypothesis.given(seed=seeds)
    def test_what_no_rule_visits_may_hold_anything(self, layout, seed):
        requests = three_requests(layout, seed)
        clean = self.verify_requests(requests, layout)
        poisoned = [
            poison_unvisited(request, layout, int(accepted))
            for request, accepted in zip(requests, clean.num_accepted, strict=True)
        ]
        chex.assert_trees_all_equal(self.verify_requests(poisoned, layout, seed=1), clean)


def take(output: sd.RejectionSampleOutput, index) -> sd.RejectionSampleOutput:
    return sd.RejectionSampleOutput(
        output.token_ids[index],
        output.num_accepted[index],
        output.num_emitted[index],
        output.status[index],
    )


def poison_unvisited(request: Request, layout: Layout, accepted: int) -> Request:
    """NaN in every row past the last that is visited; draft rows too, where not read."""
    visited = accepted + 1
    if layout.block and request.temperature > 0:
        visited = max(visited, impossible_from(request, layout))
    target = request.target.copy()
    target[visited:] = np.nan
    draft = request.draft
    if draft is not None:
        draft = draft.copy()
        draft[visited:] = np.nan
        one_hot = layout.has_valid and not request.valid
        if one_hot or request.temperature == 0:
            draft[:] = np.nan
    return dataclasses.replace(request, target=target, draft=draft)


def impossible_from(request: Request, layout: Layout) -> int:
    """How many drafts to go through until one is impossible under the target, or none is left."""
    for i, x in enumerate(request.draft_ids):
        if not 0 <= x < layout.real_vocab:
            return i
        if request.target[i, x] == -np.inf:
            return i + 1
    return request.count
