"""One hand-made request between two ordinary ones, which must not notice it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jax_specdec as sd

from .backends import alone
from .batch import ALMOST_ONE, Batch, Layout, Request, Verifier, check, pack, verify
from .cases import random_request

LARGE = 10243  # ids: five whole tiles and three ids of a sixth

STORED = ("probs", "logits", "normalized")
KINDS = ("none", *STORED)
BAD = float("nan"), float("inf")
RATES = (1.0, 0.5, 0.0)  # synthetic: draft 0 always, 1 at even odds, 2 never

kinds = pytest.mark.parametrize("kind", KINDS)
stored = pytest.mark.parametrize("kind", STORED)
temperatures = pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])


def logs(p: Any) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64))


def request(p, ids=(), q=None, kind="none", temperature=1.0, **fields: Any) -> Request:
    """A request with target probabilities `p [count+1, V]` and draft probabilities `q`."""
    scale = temperature or 1.0
    if kind == "probs":
        fields.setdefault("draft", np.array(q, np.float64))
    elif kind != "none":
        constant = 0.75 if kind == "normalized" else 0.0  # logits are free up to a constant
        fields.setdefault("draft", scale * (logs(q) + constant))
        if kind == "normalized":
            fields.setdefault("log_normalizer", np.full(len(ids), constant))
    return Request(target=scale * logs(p), draft_ids=list(ids), temperature=temperature, **fields)


def on(*ids: int, vocab: int = 8) -> list[float]:
    """The uniform distribution on `ids`."""
    return [1 / len(ids) if i in ids else 0.0 for i in range(vocab)]


ALL = on(*range(8))


def edge_layout(**changes: Any) -> Layout:
    """Layouts that differ in little, because each compiles."""
    if changes.get("kind", "none") != "none":
        changes = dict(store_rows=12, has_valid=True) | changes
    return Layout(has_active=True, **changes)


def synthetic(kind: str) -> dict[str, Any]:
    """Layouts with rates: one-hot drafts have a bonus token given, the others have it drawn."""
    return dict(kind=kind, rates=RATES, has_bonus=kind == "none")


@functools.cache
def neighbours(layout: Layout) -> list[Request]:
    rng = np.random.default_rng(0)
    requests = [random_request(layout, rng, 2, temperature=0.8) for _ in range(2)]
    return [dataclasses.replace(request, active=True) for request in requests]


@functools.cache
def without_middle(layout: Layout, verifier: Verifier) -> sd.RejectionSampleOutput:
    """What the neighbours emit with next to nothing between them."""
    before, after = neighbours(layout)
    quiet = Request(np.zeros((1, layout.vocab)), (), temperature=0.0)
    return verify(pack([before, quiet, after], layout), verifier)


def with_offsets(offsets: Sequence[int], layout: Layout) -> Batch:
    """A batch of requests with three drafts each, and other offsets."""
    rng = np.random.default_rng(4)
    requests = [
        random_request(layout, rng, 3, 0.3 + 0.7 * (i % 3 < 2)) for i in range(len(offsets) - 1)
    ]
    requests = [dataclasses.replace(request, active=True) for request in requests]
    batch = pack(requests, layout)
    drafts = sd.Drafts(batch.drafts.token_ids, np.array(offsets, np.int32))
    return batch.replace(drafts=drafts)


class OnBackends:
    """Tests of a backend, which `run_on` names."""

    verifier: Verifier

    @pytest.fixture(autouse=True)
    def _on(self, verifier: Verifier) -> None:
        self.verifier = verifier


class Between(OnBackends):
    """A backend's answer to one request between two others."""

    def verify(self, batch: Batch) -> sd.RejectionSampleOutput:
        output = verify(batch, self.verifier)
        check(batch, output)
        return output

    def answer(self, middle: Request, **changes: Any) -> list[int] | sd.Status:
        """The tokens of a request between two neighbours, or its status; they must not notice."""
        layout = edge_layout(**changes)
        before, after = neighbours(layout)
        output = self.verify(pack([before, middle, after], layout))
        quietly = without_middle(layout, self.verifier)
        got, want = (jax.tree.map(lambda x: x[[0, 2]], one) for one in (output, quietly))
        chex.assert_trees_all_equal(got, want)
        status = sd.Status(output.status[1])
        if status != sd.Status.OK:
            assert (output.token_ids[1] == sd.PLACEHOLDER_TOKEN_ID).all()
            assert output.num_accepted[1] == output.num_emitted[1] == 0
            return status
        emitted = output.num_emitted[1]
        assert output.num_accepted[1] == emitted - 1
        assert (output.token_ids[1, emitted:] == sd.PLACEHOLDER_TOKEN_ID).all()
        return output.token_ids[1, :emitted].tolist()

    def keeps_drafts_of_equal_distributions(self, **layout: Any) -> None:
        """Even at the largest uniform."""
        rng, vocab = np.random.default_rng(1), layout.get("vocab", 8)
        # Interpreted, the sums of two equal rows may differ in the last place.
        u = 0.999 if self.verifier is alone else ALMOST_ONE
        for temperature in (0.3, 1.0, 1.7):
            logits = 3 * rng.standard_normal((4, vocab)).astype(np.float32)
            ids = rng.integers(vocab, size=3).tolist()
            middle = Request(logits, ids, logits[:3], accept=[u] * 3, temperature=temperature)
            assert self.answer(middle, kind="logits", **layout)[:3] == ids
