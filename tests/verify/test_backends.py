"""Every backend is held to one contract: the oracle's tokens over a grid, and invariance.

Edges by hand stand in `test_edges`, `test_bad_rows`, `test_block_edges` and `test_processed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jax_specdec as sd

from .backends import BACKENDS, run_on
from .batch import FILTERS, HALF, OPTIMIZED, Batch, Layout, Request, agree, pack, take, verify
from .between import OnBackends, edge_layout
from .cases import cold_batch, random_batches, random_request
from .layouts import (
    AGREEMENT,
    BIG,
    BLOCK,
    COLD,
    CUT_IN_PARTS,
    FILTERED_PARTS,
    GRID,
    IN_BLOCKS,
    KERNEL_BLOCK,
    KERNEL_FILTERED,
    PROCESSED,
    RACE,
    SYNTHETIC,
    TILES,
    WHOLE_DRAFTS,
    few,
)

newest, long, slow, gpu = (getattr(pytest.mark, x) for x in ("newest", "long", "slow", "gpu"))
GEMMA = [
    Layout(
        vocab=262144,  # with a distribution of drafts, filters and masks of a grammar
        kind="logits",
        block=block,
        num_speculative_tokens=2,
        num_requests=3,
        num_drafts=5,
        **HALF,
        **FILTERS,
    )
    for block in (False, True)
]
LARGE = [
    *[
        Layout(vocab=128256, **BIG, **FILTERS, kind="normalized", dtype=dtype, draft_dtype=dtype)
        for dtype in ("bfloat16", "float32")
    ],
    *[
        Layout(vocab=128256, **BIG, kind=kind, dtype=dtype, draft_dtype=dtype, block=block)
        for kind in ("none", "normalized", "relative")
        for dtype in ("bfloat16", "float32")
        for block in (False, True)
    ],
]
MANY_REQUESTS = [
    Layout(vocab=2049, **BIG, kind="logits", has_active=True, has_filters=True),
    Layout(vocab=97, **BIG, kind="probs", block=True, has_bonus=True),
]
AGREEING_PARTS = dataclasses.replace(FILTERED_PARTS, agreement=True, has_bonus=True)
ALL = [*GRID, *BLOCK]


def on(
    backend: str, layouts: Iterable[Layout], num_seeds: int, *marks: pytest.MarkDecorator
) -> list[Any]:
    return [
        pytest.param(backend, layout, num_seeds, marks=marks, id=f"{backend}-{layout}")
        for layout in layouts
    ]


CASES = [
    *on("in-order", [*(GRID[i] for i in (0, 2, 6, 8)), AGREEMENT], 12),  # on every JAX
    *on("in-order", [GRID[9], *BLOCK[:2], RACE], 12, newest),
    *on("in-order", [GRID[i] for i in (1, 3, 4, 5, 7, *range(10, 18))], 12, newest, slow),
    *on("in-order", BLOCK[2:], 12, newest, slow),
    *on("in-order", PROCESSED[:1], 8, newest, long),
    *on("in-order", PROCESSED[1:], 8, newest, slow),
    *on("in-order", GEMMA, 3, newest, long),
    *on("at-once", [GRID[1], PROCESSED[1]], 8, newest, long),
    *on("at-once", [GRID[16], RACE, AGREEMENT, BLOCK[2]], 8, newest, slow),
    *on("at-once-large", MANY_REQUESTS, 6, newest, slow),
    *on("tile-by-tile", IN_BLOCKS[:1], 8, newest, long),
    *on("tile-by-tile", IN_BLOCKS[1:], 8, newest, slow),
    *on("2-devices", [WHOLE_DRAFTS], 12, long),
    *on("4-devices", [AGREEING_PARTS], 12, slow),
    *on("8-devices", [CUT_IN_PARTS], 12),
    *on("8-devices", [FILTERED_PARTS], 12, slow),
    *on("kernel", [SYNTHETIC], 4, newest, long),
    *on("kernel", [few(KERNEL_BLOCK[1]), few(KERNEL_FILTERED[1])], 4, newest, slow),
    *on("GPU", [*ALL, *PROCESSED], 8, gpu),
    *on("GPU", LARGE, 3, gpu),
    *on("GPU-row-by-row", ALL, 4, gpu),
]


@pytest.mark.parametrize(("backend", "layout", "num_seeds"), CASES)
def test_gives_the_tokens_of_the_oracle(backend: str, layout: Layout, num_seeds: int) -> None:
    """And its counts and status, but for calls closer than float32 can tell."""
    first = 1 if backend == "kernel" else 0  # batch 0 has no drafts
    batches = random_batches(layout, range(first, first + num_seeds))
    outputs = agree(batches, BACKENDS[backend])
    assert any((output.num_emitted > 0).any() for output in outputs)


@pytest.mark.parametrize(
    ("backend", "layout", "num_seeds"),
    [
        *on("at-once", COLD[:1], 12, newest, long),
        *on("in-order", COLD[1:], 12, newest, slow),
        *on("kernel-four-tiles", [TILES], 3, newest, slow),
        *on("GPU", [*COLD, TILES], 12, gpu),
    ],
)
def test_cold_requests_get_the_tokens_of_the_oracle(
    backend: str, layout: Layout, num_seeds: int
) -> None:
    """As in `test_normalizers`: logits far from 0, over very low temperatures."""
    agree((cold_batch(layout, seed) for seed in range(num_seeds)), BACKENDS[backend])


@pytest.mark.long
@pytest.mark.newest
def test_gives_the_tokens_of_the_oracle_as_users_compile_it(optimized: None) -> None:
    agree(random_batches(PROCESSED[3], range(12)), OPTIMIZED)


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


@run_on(("in-order", (pytest.mark.newest,)), ("GPU", (pytest.mark.gpu,)))
class TestInvariance(OnBackends):
    """A token does not depend on who else is in the batch, on the slot or on padding."""

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
