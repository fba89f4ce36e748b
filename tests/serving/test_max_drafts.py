"""How many drafts a request has verified: what it asks for, and what its length allows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import engines, tiny
from .engines import VOCAB, K

pytestmark = [pytest.mark.xdist_group("engines")]

BY_LENGTH = ((12, 1), (20, 0))
SHORTER = dataclasses.replace(engines.TABLE, max_drafts_by_length=BY_LENGTH)


def allowed(max_drafts: int | None, length: int) -> int:
    """By hand."""
    own = K if max_drafts is None else max_drafts
    return min(own, K if length < 12 else 1 if length < 20 else 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "max_steps_ahead"), [(SHORTER, 0), (SHORTER, 2)], ids=["at once", "ahead"]
)
def test_no_request_has_more_drafts_than_it_may_and_greedy_text_stays(
    engine: lm.Engine, max_steps_ahead: int
) -> None:
    rng, driver = (
        np.random.default_rng(0),
        engines.driver_of(engine, max_steps_ahead=max_steps_ahead),
    )
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
        length = len(one["prompt"])
        for update in found[i].updates:
            limit = allowed(one["max_drafts"], length)
            assert update.num_proposed <= limit
            most[limit] = max(most.get(limit, 0), update.num_proposed)
            length += len(update.token_ids)
    assert most == {0: 0, 1: 1, 2: 2}


def test_a_limit_is_the_same_on_the_host_and_on_the_device() -> None:
    options = [lm.RequestOptions(max_drafts=n) for n in (None, 0, 1, 2)]
    for length in (1, 11, 12, 13, 19, 20, 30):
        arrays = SHORTER.options_of(options, [length - 1] * 4)
        empty = jax.eval_shape(SHORTER.init_state, engines.TABLES[1]).batch
        batch = dataclasses.replace(
            empty, lengths=jnp.full((4,), length), done=jnp.zeros((4,), bool), options=arrays
        )
        wanted = [allowed(one.max_drafts, length) for one in options]
        assert np.minimum(SHORTER.decoder._most_drafts(batch), K).tolist() == wanted
        assert [SHORTER.most_drafts(one, length) for one in options] == wanted


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
    driver = engines.driver_of(SHORTER, max_steps_ahead=1)
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
    choice = lm.DraftChoice(COSTS.num_drafts, rates, COSTS, limits=limits)
    tokens = {
        n: np.mean([1 + sum(np.cumprod(rates)[: min(n, one)]) for one in limits or (K,)])
        for n in COSTS.num_drafts
    }
    speeds = {n: tokens[n] / COSTS.seconds[n] for n in tokens}
    assert max(speeds, key=lambda n: speeds[n]) == choice.best == best


def test_no_trial_and_no_unmeasured_step_has_more_drafts_than_anybody_may_have() -> None:
    choice = lm.DraftChoice((0, 1, 2), [0.1, 0.1], COSTS, limits=(1, 0))
    assert {choice.next() for _ in range(3000)} == {0, 1}
    unmeasured = lm.DraftChoice((0, 1, 4), [0.1] * 4, limits=(2, 1))
    assert [unmeasured.best, unmeasured.next()] == [4, 4]
    unmeasured.limits = (1, 0)
    assert [unmeasured.best, unmeasured.next()] == [1, 1]


@pytest.mark.long
def test_the_estimator_learns_nothing_of_drafts_that_a_request_may_not_have() -> None:
    driver = engines.driver_of(engines.BUDGETED)
    driver.draft_choice.next = lambda: K  # as wide as for requests that may have more
    for _ in range(8):
        driver.submit([1, 2], max_new_tokens=30, max_drafts=1)
    before = driver.state.estimator.visited.tolist()
    engines.run(driver)
    after = driver.state.estimator.visited.tolist()
    assert after[0] > before[0] and after[1] == before[1]


# Mistakes


def generated(**fields: Any) -> Any:
    drafting = dict(drafter=lm.NGramDrafter(), config=engines.CONFIG)
    return lm.generate(tiny.Trigram(VOCAB), engines.TABLES[0], [[1]], **drafting, **fields)


def with_lengths(value: Any) -> lm.Engine:
    return dataclasses.replace(engines.TABLE, max_drafts_by_length=value)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "max_drafts must be at most .* = 2, .* 3", lambda: generated(max_drafts=3)),
        (ValueError, "max_drafts", lambda: generated(max_drafts=-1)),
        (TypeError, "max_drafts", lambda: generated(max_drafts=True)),
        (ValueError, "max_drafts must be at most .* = 2, .* 3",
         lambda: engines.driver_of(SHORTER).submit([1], max_new_tokens=2, max_drafts=3)),
        (TypeError, "max_drafts_by_length must be pairs", lambda: with_lengths(4096)),
        (TypeError, "max_drafts_by_length must be pairs", lambda: with_lengths(((4, 1, 0),))),
        (TypeError, "max_drafts_by_length must be pairs", lambda: with_lengths("4:1")),
        (TypeError, "the drafts of max_drafts_by_length", lambda: with_lengths(((4, 0.5),))),
        (ValueError, "the drafts of max_drafts_by_length", lambda: with_lengths(((4, 3),))),
        (ValueError, "the drafts of max_drafts_by_length", lambda: with_lengths(((4, 1), (5, 1)))),
        (ValueError, "the lengths of max_drafts_by_length", lambda: with_lengths(((0, 1),))),
        (ValueError, "the lengths of max_drafts_by_length",
         lambda: with_lengths(((5, 1), (4, 0)))),
    ],
)  # fmt: skip
def test_mistakes_are_named(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_lengths_are_kept_as_tuples_of_ints() -> None:
    engine = with_lengths([[np.int64(4), 1], (9, 0)])
    assert engine.max_drafts_by_length == ((4, 1), (9, 0)) and hash(engine)
    assert sd.SpecDecodeConfig(num_speculative_tokens=2) == engine.config
