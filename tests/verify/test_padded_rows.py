"""Target logits of another number of rows than the drafts ask for: padded, or cut off."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec.testing import KernelConfig

from .backends import interpreted
from .batch import Batch, Layout, on, oracle, verify
from .cases import random_batch

LAYOUT = Layout(
    vocab=97, num_speculative_tokens=3, num_requests=6, num_drafts=16, kind="logits", store_rows=20
)
WITHOUT_BONUS_ROWS = Layout(
    vocab=97, num_speculative_tokens=3, num_requests=6, num_drafts=16, has_bonus=True
)


def ends(batch: Batch) -> np.ndarray:
    """Where the rows of each request end."""
    offsets = np.asarray(batch.drafts.cu_num_draft_tokens)[1:]
    return offsets if batch.layout.has_bonus else offsets + np.arange(1, len(offsets) + 1)


FORMS = {
    "in-order": on("cpu", padded_rows=True),
    "at-once": on("cuda", padded_rows=True),
    "kernel": interpreted(KernelConfig(max_cluster=1), padded_rows=True),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        pytest.param("in-order", LAYOUT, marks=pytest.mark.slow),
        ("at-once", WITHOUT_BONUS_ROWS),
        pytest.param("kernel", LAYOUT, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_whose_rows_are_left_out_are_bad_input(form, layout):
    """And rows past all requests are read by nobody."""
    verifier, missing = FORMS[form], 0
    for seed in range(2 if form == "kernel" else 4):
        batch = random_batch(layout, seed, broken=0)
        want, logits = oracle(batch), np.asarray(batch.target_logits)
        padding = np.full((7, layout.vocab), np.nan, logits.dtype)
        for those in (np.concatenate([logits, padding]), logits[:9]):
            output = verify(batch.replace(target_logits=those), verifier)
            there = ends(batch) <= len(those)
            missing += np.count_nonzero(~there)
            assert there.any()
            np.testing.assert_array_equal(output.token_ids[there], want.token_ids[there])
            np.testing.assert_array_equal(output.status[there], want.status[there])
            assert (output.status[~there] == sd.Status.BAD_INPUT).all()
            assert (output.token_ids[~there] == -1).all()
    assert missing > 1


def arguments(num_rows: int, active: list[bool]) -> tuple[Any, ...]:
    """Two drafts for the first of four requests, one for the second: five rows, then padding."""
    logits = np.random.default_rng(0).standard_normal((num_rows, 9)).astype(np.float32)
    drafts = sd.Drafts.from_flat(np.int32([1, 2, 3, -1]), np.int32([2, 1, 0, 0]))
    named = dict(
        sampling=sd.SamplingParams(np.zeros(4, np.float32)),
        config=sd.SpecDecodeConfig(num_speculative_tokens=2),
    )
    keys = dict(keys=jax.random.split(jax.random.key(1), 4), positions=np.int32([0, 1, 2, 3]))
    return logits, drafts, named, keys, np.array(active)


@pytest.mark.long
def test_rows_of_inactive_requests_may_be_left_out():
    logits, drafts, named, keys, active = arguments(5, [True, True, False, False])
    output = sd.rejection_sample(logits, drafts, **named, **keys, active=active, padded_rows=True)
    assert output.status.tolist() == [0, 0, sd.Status.INACTIVE, sd.Status.INACTIVE]
    best = np.argmax(logits, axis=1)
    assert np.asarray(output.token_ids)[:2, 0].tolist() == [best[0], best[3]]
    found = sd.token_logprobs(logits, drafts, output, **named, padded_rows=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        np.asarray(found.logprobs)[:2, 0], [log_p[0].max(), log_p[3].max()], rtol=1e-5
    )
    sd.testing.validate(logits, drafts, **named, active=active, padded_rows=True)
    zeros, one = np.zeros((4, 9), np.int32), np.ones(4, np.float32)
    counts = zeros.copy()
    counts[1, 7] = 1
    penalties = sd.Penalties(0 * one, one, one, counts, zeros.astype(bool))
    given = sd.LogitsProcessors(penalties=penalties)
    config = named["config"]
    penalized = sd.process_logits(logits, drafts, given, config=config, padded_rows=True)
    expected = np.array(logits)
    expected[[3, 4], 7] -= 1  # was generated
    expected[[1, 2], 1] -= 1  # are drafted before
    expected[2, 2] -= 1
    expected[4, 3] -= 1
    np.testing.assert_allclose(penalized, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("num_rows", "given", "error", "sentence"),
    [
        (7, {}, ValueError, "target_logits"),
        (7, {"padded_rows": 1}, TypeError, "padded_rows"),
        (0, {"padded_rows": True}, ValueError, "target_logits"),
    ],
)
def test_other_numbers_of_rows_are_refused_unless_asked_for(num_rows, given, error, sentence):
    logits, drafts, named, keys, active = arguments(num_rows, [True] * 4)
    with pytest.raises(error, match=sentence):
        sd.rejection_sample(logits, drafts, **named, **keys, active=active, **given)


def test_whether_rows_are_padded_is_a_bool():
    logits, drafts, named, *_ = arguments(7, [True] * 4)
    processors, config = sd.LogitsProcessors(), named["config"]
    with pytest.raises(TypeError, match="^padded_rows must be a bool"):
        sd.process_logits(logits, drafts, processors, config=config, padded_rows=1)


def test_validate_says_whose_rows_are_missing():
    logits, drafts, named, _, active = arguments(5, [True] * 4)
    with pytest.raises(ValueError, match="target_logits"):
        sd.testing.validate(logits, drafts, **named, active=active, padded_rows=True)
