"""Synthetic acceptance through the whole engine: each step keeps the drafts of the schedule.

That rates between 0 and 1 are met is for `verify/test_statistics.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import run

VOCAB, K = 6, 4
RATES = (1.0, 1.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Counting(lm.Drafter):
    """Proposes K tokens; at every fifth length fewer, by a gap."""

    def propose(
        self, params: Any, context: lm.DraftContext, cache: tuple, store: None
    ) -> tuple[lm.Proposal, tuple]:
        lengths = context.lengths
        offset = jnp.arange(context.config.num_speculative_tokens, dtype=jnp.int32)[None, :]
        ids = (lengths[:, None] + offset) % VOCAB
        last = jnp.take_along_axis(context.token_ids, lengths[:, None] - 1, axis=1)
        has_gap = (lengths % 5 == 0)[:, None] & (offset == last % 3 + 1)
        return lm.Proposal(jnp.where(has_gap, -1, ids)), cache


@pytest.mark.long
@pytest.mark.newest
def test_every_step_keeps_two_drafts_or_what_it_was_offered() -> None:
    config = sd.SpecDecodeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=RATES,
    )
    sizes = dict(num_slots=8, max_length=32, prefill_sizes=(32,), max_stop_tokens=1)
    engine = lm.Engine(tiny.Trigram(VOCAB), Counting(), config, **sizes)
    driver = lm.EngineDriver(engine, jnp.asarray(tiny.random_table(VOCAB, seed=1)))
    rng, offered, num_accepted = np.random.default_rng(0), set(), 0
    for i in range(80):  # half of them with a stop token: both cut steps
        driver.submit(
            rng.integers(0, VOCAB, rng.integers(1, 9)).tolist(),
            max_new_tokens=int(rng.integers(4, 16)),
            temperature=(0.0, 0.8)[i % 2],
            stop_token_ids=[0] if i % 4 < 2 else [],
        )
    for found in run(driver).values():
        assert found.status == sd.Status.OK
        for update in found.updates:
            assert update.num_accepted == min(update.num_proposed, 2)
            assert len(update.token_ids) == update.num_accepted + 1 or update.finish_reason
            offered.add(update.num_proposed)
            num_accepted += update.num_accepted
    assert offered == {0, 1, 2, 3, K}, "gaps and first steps are there"
    assert driver.stats().num_accepted_tokens == num_accepted
