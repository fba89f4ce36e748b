"""Synthetic acceptance through the whole engine: what is measured is what the config says."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import collect

pytestmark = pytest.mark.newest

VOCAB, K, SLOTS = 6, 4, 64
SIGMA = 5
"""Standard deviations that a count may lie off: one false alarm in two million."""


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


RATES = (0.9, 0.6, 0.35, 0.1)


@functools.cache
def serve() -> dict[float, np.ndarray]:
    """``[n, 3]`` by temperature: drafts offered, drafts accepted, tokens kept per verification.

    Short requests of many lengths, half of them with stop tokens, so that budgets and stops cut
    many of the steps.
    """
    config = sd.SpecDecodeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=RATES,
    )
    engine = lm.Engine(
        tiny.Trigram(VOCAB),
        Counting(),
        config,
        num_slots=SLOTS,
        max_length=32,
        prefill_sizes=(32,),
        max_stop_tokens=1,
    )
    driver = lm.EngineDriver(engine, jnp.asarray(tiny.random_table(VOCAB, seed=1)))
    rng, temperature = np.random.default_rng(0), {}
    for i in range(1600):
        t = (0.0, 0.8)[i % 2]
        request_id = driver.submit(
            rng.integers(0, VOCAB, rng.integers(1, 9)).tolist(),
            max_new_tokens=int(rng.integers(4, 16)),
            temperature=t,
            stop_token_ids=[0] if i % 4 < 2 else [],
        )
        temperature[request_id] = t
    updates = []
    while not driver.is_idle:
        updates += driver.step()
    for request_id, finished in collect(updates).items():
        assert finished.status == sd.Status.OK, request_id
    rows = np.array(
        [
            (temperature[u.request_id], u.num_proposed, u.num_accepted, len(u.token_ids))
            for u in updates
        ]
    )
    stats = driver.stats()
    assert stats.num_accepted_tokens == rows[:, 2].sum()
    assert stats.num_draft_tokens == rows[:, 1].sum()
    return {t: rows[rows[:, 0] == t][:, 1:].astype(int) for t in (0.0, 0.8)}


def deviations(accepted: np.ndarray, rates: tuple[float, ...]) -> dict[str, float]:
    """How many standard deviations measured quantities lie off those of a schedule; inf: cannot be.

    Args:
      accepted: ``[n]``, drafts accepted in verifications that were offered all K.
      rates: K unconditional rates.
    """

    def off(count: float, expected: float, variance: float) -> float:
        if variance < 1e-9:
            return 0.0 if abs(count - expected) < 1e-9 * max(1, len(accepted)) else math.inf
        return abs(count - expected) / math.sqrt(variance)

    n, found = len(accepted), {}
    conditional = [
        now / before if before else 0.0 for before, now in itertools.pairwise([1.0, *rates])
    ]
    for i in range(K):
        kept, reached = int((accepted > i).sum()), int((accepted >= i).sum())
        r, c = rates[i], conditional[i]
        found[f"unconditional {i}: {kept}/{n}, {r}"] = off(kept, n * r, n * r * (1 - r))
        found[f"conditional {i}: {kept}/{reached}, {c}"] = off(
            kept, reached * c, reached * c * (1 - c)
        )
    mean = sum(rates)
    variance = sum((2 * i + 1) * r for i, r in enumerate(rates)) - mean**2
    found[f"length: {1 + accepted.mean()}, {1 + mean}"] = off(
        accepted.sum(), n * mean, n * variance
    )
    return found


def assert_follows(accepted: np.ndarray, rates: tuple[float, ...]) -> None:
    assert len(accepted) > 700
    off = deviations(accepted, rates)
    assert max(off.values()) <= SIGMA, off


@pytest.mark.slow
def test_measured_rates_and_length_are_those_of_the_schedule():
    for temperature, rows in serve().items():
        proposed, accepted, kept = rows.T
        assert set(proposed) == {0, 1, 2, 3, K}, "gaps and first steps are there"
        assert_follows(accepted[proposed == K], RATES)
        # What was offered less is cut there, and follows the same rates before.
        for count in (1, 2, 3):
            short = accepted[proposed == count]
            assert (short <= count).all() and len(short) > 20
            expected = len(short) * RATES[0]
            bound = SIGMA * math.sqrt(expected * (1 - RATES[0]))
            assert abs((short > 0).sum() - expected) <= bound, (temperature, count)
        assert (kept <= accepted + 1).all()
        assert (accepted[proposed == 0] == 0).all()


@pytest.mark.long
def test_the_bounds_tell_other_schedules_and_cut_counts_apart():
    rows = serve()
    for temperature in (0.0, 0.8):
        proposed, accepted, kept = rows[temperature].T
        full = proposed == K
        for other in [(0.8, 0.6, 0.35, 0.1), (0.9, 0.6, 0.35, 0.2), (0.9, 0.5, 0.35, 0.1)]:
            assert max(deviations(accepted[full], other).values()) > SIGMA
        # What was kept after stops and budgets had cut follows no such schedule.
        cut = np.minimum(accepted, np.maximum(kept - 1, 0))
        assert max(deviations(cut[full], RATES).values()) > SIGMA
        # Nor are all verifications, whatever they were offered.
        assert max(deviations(accepted, RATES).values()) > SIGMA
