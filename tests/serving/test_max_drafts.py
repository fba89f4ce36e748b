"""How many drafts a request has verified, if it asks for fewer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec import lm

from . import engines, tiny
from .engines import VOCAB, K

pytestmark = [pytest.mark.xdist_group("engines")]


@pytest.mark.long
@pytest.mark.parametrize("max_steps_ahead", [0, 2], ids=["at once", "ahead"])
def test_no_request_has_more_drafts_than_it_may_and_greedy_text_stays(max_steps_ahead: int) -> None:
    rng = np.random.default_rng(0)
    driver = engines.driver_of(engines.TABLE, max_steps_ahead=max_steps_ahead)
    asked: dict[int, dict[str, Any]] = {}
    updates: list[lm.RequestUpdate] = []
    for i in range(24):
        one = engines.random_request(rng, [0.0]) | dict(max_drafts=(None, 0, 1, 2)[i % 4])
        asked[driver.submit(**one)] = one
        updates += driver.step()
        if i % 5 == 4:
            driver.preempt(i)
    found = engines.run(driver, updates)
    most = {}
    for i, one in asked.items():
        assert found[i].token_ids == engines.greedy_truth(one)
        limit = one["max_drafts"]
        proposed = max(update.num_proposed for update in found[i].updates)
        most[limit] = max(most.get(limit, 0), proposed)
    assert most == {None: K, 0: 0, 1: 1, 2: 2}


def test_a_limit_is_the_same_on_the_host_and_on_the_device() -> None:
    options = [lm.RequestOptions(max_drafts=n) for n in (None, 0, 1, 2)]
    engine = engines.TABLE
    arrays = engine.options_of(options, [4] * 4)
    empty = jax.eval_shape(engine.init_state, engines.TABLES[1]).batch
    batch = dataclasses.replace(
        empty, lengths=jnp.full((4,), 5), done=jnp.zeros((4,), bool), options=arrays
    )
    assert np.minimum(engine._max_drafts(batch), K).tolist() == [K, 0, 1, 2]
    assert [engine.max_drafts(one) for one in options] == [K, 0, 1, 2]
    without = dataclasses.replace(engine, draft_budget=(0,))
    assert [without.max_drafts(one) for one in options] == [0] * 4


# Steps in which nobody may draft


class Silent(lm.ModelDrafter):
    """Must not be asked."""

    def propose(self, *args: Any) -> Any:
        raise AssertionError("nobody wants drafts")


@pytest.mark.slow
def test_generate_without_drafts_is_plain_decoding() -> None:
    model, (params, draft_params) = tiny.Trigram(VOCAB), engines.TABLES
    asked: dict[str, Any] = dict(max_new_tokens=9, temperature=1.0)
    given = model, params, [[1, 2], [3]]
    plain = lm.generate_plain(*given, **asked)
    drafting = dict(drafter=Silent(model), draft_params=draft_params, config=engines.CONFIG)
    output = lm.generate(*given, **drafting, **asked, max_drafts=0)
    assert output.completions == plain.completions
    streamed = list(lm.generate_stream(*given, **drafting, **asked, max_drafts=0))
    assert [int(x) for step in streamed for x in step.num_proposed] == [0] * 18
    with pytest.raises(AssertionError, match="nobody"):
        lm.generate(*given, **drafting, **asked)


@pytest.mark.slow
def test_generate_keeps_to_the_limits_of_a_batch() -> None:
    model, (params, draft_params) = tiny.Trigram(VOCAB), engines.TABLES
    prompts, limits = [[1, 2], [3], [4, 4, 1], [0]], (None, 0, 1, 2)
    config = dataclasses.replace(engines.CONFIG, rejection_sample_method="agreement")
    asked: dict[str, Any] = dict(max_new_tokens=12, temperature=1.0)
    output = lm.generate(
        model,
        params,
        prompts,
        drafter=lm.ModelDrafter(model),
        draft_params=draft_params,
        config=config,
        options=[lm.RequestOptions(max_drafts=one, **asked) for one in limits],
    )
    assert output.steps.num_proposed.max(axis=0).tolist() == [2, 0, 1, 2]
    plain = lm.generate_plain(model, params, prompts, config=config, **asked)
    assert output.completions == plain.completions


@pytest.mark.slow
@pytest.mark.newest
def test_no_value_is_compiled_for_after_warm_up() -> None:
    driver = engines.driver_of(engines.TABLE, max_steps_ahead=1)
    driver.warm_up()
    with engines.compilations() as names:
        for i in range(12):
            driver.submit([1 + i % 3, 2], max_new_tokens=9 + i, max_drafts=(None, 0, 1, 2)[i % 4])
        engines.run(driver)
        driver.submit([1, 2], max_new_tokens=9, max_drafts=0)
        engines.run(driver)
    assert names == []


# The choice of a number

COSTS = lm.StepCosts(4, (0, 1, 2), (1.0, 1.5, 1.75))


@pytest.mark.parametrize(
    ("limits", "best"),
    [((), 2), ((2, 2), 2), ((1, 1), 1), ((1, 0), 0), ((2, 0, 0), 0), ((2, 2, 1), 2)],
)
def test_the_best_number_counts_only_drafts_that_requests_may_have(
    limits: tuple[int, ...], best: int
) -> None:
    rates = np.array([0.9, 0.9])
    choice = lm.DraftChoice(COSTS.draft_budget, rates, COSTS, max_drafts=limits)
    tokens = {
        n: np.mean([1 + sum(np.cumprod(rates)[: min(n, one)]) for one in limits or (K,)])
        for n in COSTS.draft_budget
    }
    speeds = {n: tokens[n] / COSTS.seconds[n] for n in tokens}
    assert max(speeds, key=lambda n: speeds[n]) == choice.best == best


def test_no_trial_and_no_unmeasured_step_has_more_drafts_than_anybody_may_have() -> None:
    choice = lm.DraftChoice((0, 1, 2), [0.1, 0.1], COSTS, max_drafts=(1, 0))
    assert {choice.next() for _ in range(3000)} == {0, 1}
    unmeasured = lm.DraftChoice((0, 1, 4), [0.1] * 4, max_drafts=(2, 1))
    assert [unmeasured.best, unmeasured.next()] == [4, 4]
    unmeasured.max_drafts = (1, 0)
    assert [unmeasured.best, unmeasured.next()] == [1, 1]


@pytest.mark.long
def test_rates_learn_nothing_of_drafts_that_a_request_may_not_have() -> None:
    driver = engines.driver_of(engines.BUDGETED)
    driver.draft_choice.next = lambda: K  # as wide as for requests that may have more
    for _ in range(8):
        driver.submit([1, 2], max_new_tokens=30, max_drafts=1)
    before = driver.state.draft_rates.tried.tolist()
    engines.run(driver)
    after = driver.state.draft_rates.tried.tolist()
    assert after[0] > before[0] and after[1] == before[1]


# Mistakes


def generated(**fields: Any) -> Any:
    drafting = dict(drafter=lm.NGramDrafter(), config=engines.CONFIG)
    return lm.generate(tiny.Trigram(VOCAB), engines.TABLES[0], [[1]], **drafting, **fields)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "max_drafts must be at most .* = 2, .* 3", lambda: generated(max_drafts=3)),
        (ValueError, "max_drafts", lambda: generated(max_drafts=-1)),
        (TypeError, "max_drafts", lambda: generated(max_drafts=True)),
        (ValueError, "max_drafts must be at most .* = 2, .* 3",
         lambda: engines.driver_of(engines.TABLE).submit([1], max_new_tokens=2, max_drafts=3)),
    ],
)  # fmt: skip
def test_mistakes_are_named(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()
