"""What an exact engine generates again is counted, learned from and delivered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from .engines import EXACT, VOCAB, driver_of, run
from .grammars import Follows

pytestmark = [pytest.mark.newest, pytest.mark.xdist_group("engines")]

RNG = np.random.default_rng(5)
ASKED = [
    dict(prompt=RNG.integers(0, VOCAB, n).tolist(), max_new_tokens=40 - n, seed=n)
    for n in (3, 9, 17, 5)
]


def preempted(driver: lm.EngineDriver) -> None:
    """Two of the requests, also in the middle of what they say again."""
    driver.preempt(0)
    driver.preempt(3)


def dropped(driver: lm.EngineDriver) -> None:
    """What an exception does."""
    driver._is_whole = False


def nothing(driver: lm.EngineDriver) -> None:
    """For comparison."""


def with_a_grammar() -> list[dict[str, Any]]:
    """One of them forces every third token."""
    matcher = Follows(lambda text: range(VOCAB) if len(text) % 3 else (len(text) % VOCAB,))
    return [dict(prompt=[1, 2], max_new_tokens=30, matcher=matcher), *ASKED[:3]]


def served(
    asked: list[dict[str, Any]], between: Callable[[lm.EngineDriver], None]
) -> tuple[list[list[lm.RequestUpdate]], sd.AcceptanceStats, list[np.ndarray]]:
    """The updates of each request, what was counted, and what was learned."""
    with driver_of(EXACT) as driver:
        for one in asked:
            driver.submit(**one)
        updates: list[lm.RequestUpdate] = []
        for step in range(20):
            updates += driver.step()
            if step in (2, 5, 6, 7, 12):
                between(driver)
        found = run(driver, updates)
        learned = jax.device_get(jax.tree.leaves(driver.state.draft_rates))
        return [found[i].updates for i in range(len(asked))], driver.stats(), learned


@pytest.mark.parametrize("between", [preempted, dropped])
@pytest.mark.parametrize(
    "asked",
    [lambda: ASKED, lambda: ASKED[:1], pytest.param(with_a_grammar, marks=pytest.mark.long)],
    ids=["several", "one", "grammar"],
)
def test_what_is_generated_again_counts_once(
    asked: Callable[[], list[dict[str, Any]]], between: Callable[[lm.EngineDriver], None]
) -> None:
    found, counted, learned = served(asked(), between)
    wanted, stats, expected = served(asked(), nothing)
    assert found == wanted
    assert counted == stats
    updates = [update for one in found for update in one]
    assert stats.num_tokens == sum(one["max_new_tokens"] for one in asked())
    assert stats.num_draft_tokens == sum(one.num_proposed for one in updates)
    assert stats.num_accepted_tokens == sum(one.num_accepted for one in updates)
    if len(found) == 1:  # the rates see the same steps, one after another
        np.testing.assert_equal(learned, expected)
