"""Steps with few or no drafts: the text's law, compilations, the choice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from upper_floor import programs, schedule, stopwatch

from jax_specdec import lm

from . import engines, tiny
from .chi_square import assert_distributed, tally
from .engines import TARGET, VOCAB
from .test_grammar_driver import Cycle, constrained_truth

pytestmark = pytest.mark.xdist_group("engines")

TABLE = engines.BUDGETED
BUDGET, SLOTS = TABLE.draft_budget, TABLE.num_slots


class Cycling(lm.DraftChoice):
    """Every number in turn, with several steps without drafts in a row."""

    def next(self) -> int:
        self.saved += 1
        wanted = (0, 2, 0, 0, 0, 1, 0, 1, 2, 2)[int(self.saved) % 10]
        return wanted if wanted in self.draft_budget else max(self.draft_budget)


class FromThePast(lm.DraftChoice):
    """An arbitrary function of what earlier steps accepted."""

    def next(self) -> int:
        self.saved += 1
        return self.draft_budget[
            int(1e4 * np.sum(self.rates) + self.saved) % len(self.draft_budget)
        ]


def driver_of(engine: lm.Engine, choice: type, *weights: Any, **settings: Any) -> lm.EngineDriver:
    driver = engines.driver_of(engine, *weights, **settings)
    driver.draft_choice = choice(engine.draft_budget, driver.draft_choice.rates)
    return driver


# What is emitted


@pytest.mark.long
def test_greedy_text_is_the_targets_whatever_the_numbers_of_drafts():
    rng = np.random.default_rng(0)
    requests = [engines.random_request(rng, [0.0]) for _ in range(96)]
    driver = driver_of(TABLE, Cycling, max_steps_ahead=1)
    found = [driver.submit(**request) for request in requests]
    texts = engines.run(driver)
    for request, request_id in zip(requests, found, strict=True):
        assert texts[request_id].token_ids == engines.greedy_truth(request)
    offered = driver.stats().offered_per_position
    assert 0 < offered[1] < offered[0] < driver.stats().num_verifications


PROMPT, NUM_TOKENS, REQUESTS = [1, 4, 0], 4, 6000


@pytest.mark.long
def test_text_under_load_is_distributed_as_the_targets():
    driver = driver_of(TABLE, FromThePast)
    asked = lm.RequestOptions(max_new_tokens=NUM_TOKENS, temperature=1.0)
    for _ in range(REQUESTS):
        driver.submit(PROMPT, asked)
    found = engines.run(driver)
    tokens = np.array([one.token_ids for one in found.values()])
    assert tokens.shape == (REQUESTS, NUM_TOKENS)
    offered, stats = driver.stats().offered_per_position, driver.stats()
    assert 0 < offered[1] < offered[0] < stats.num_verifications - REQUESTS
    joint = tiny.exact_distribution(TARGET, PROMPT, NUM_TOKENS, 1.0)
    windows = [
        (tally(tokens[:, :-1], VOCAB), joint.sum(axis=-1), "first three tokens"),
        (tally(tokens[:, 1:], VOCAB), joint.sum(axis=0), "last three tokens"),
    ]
    for counts, probabilities, what in windows:
        assert_distributed(counts, probabilities, what)


# Compilations


@pytest.mark.long
def test_nothing_is_compiled_after_warm_up():
    driver = engines.driver_of(TABLE, max_steps_ahead=1)
    progress: list[tuple[int, int]] = []
    driver.warm_up(lambda *counts: progress.append(counts))
    assert progress[-1] == (7, 7)  # admit (3), release, and a step for each number
    costs = driver.draft_choice.costs
    assert costs.draft_budget == BUDGET
    assert all(x > 0 for x in costs.seconds)
    driver.draft_choice = Cycling(BUDGET, driver.draft_choice.rates, costs)
    with engines.compilations() as names:
        for i in range(12):
            driver.submit([1 + i % 3, 2], max_new_tokens=9, temperature=i % 2)
        engines.run(driver)
    assert names == []


@pytest.mark.parametrize("exact", [False, True])
def test_steps_that_are_measured_are_those_that_serve(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stop-watch that computes nothing; an exact engine has no steps without options."""
    engine = dataclasses.replace(engines.EXACT, request_options=True, exact=exact)
    measured: list[bool] = []

    def step(*_: Any, all_neutral: bool, **__: Any) -> tuple[None, None]:
        measured.append(all_neutral)
        return None, None

    monkeypatch.setattr(programs, "init", lambda *_: None)
    monkeypatch.setattr(programs, "step", step)
    monkeypatch.setattr(stopwatch, "_occupied", lambda *_: None)
    lm.measure_steps(engine, *engines.TABLES)
    traffic = schedule.Traffic(slots=schedule.placeholders(2, 3, slot=0).group)
    planned = schedule.plan(engine, schedule.Settings(max_prefills=0), traffic)
    assert isinstance(planned, schedule.Step)
    assert {*measured} == {planned.all_neutral} == {not exact}
    rehearsed = schedule.rehearsal(engine, prompts_in_steps=False, grammars=False)
    assert {x.all_neutral for x in rehearsed if isinstance(x, schedule.Step)} == {False, not exact}


def test_an_engine_without_a_budget_counts_no_rates():
    assert engines.TABLE.init_state(engines.TABLES[1]).draft_rates is None
    assert engines.driver_of(engines.TABLE).draft_choice is None


class Watched(tiny.Trigram):
    """Keeps the groups of all its passes."""

    groups: ClassVar[list[lm.models.Rows]] = []

    def apply(self, params: Any, groups: Any, cache: Any, *wants: Any) -> Any:
        Watched.groups += groups
        return super().apply(params, groups, cache, *wants)


def test_attention_may_follow_the_longest_text_only_where_last_bits_follow_the_load():
    watched = Watched(VOCAB)
    budgeted = dataclasses.replace(
        TABLE, model=watched, drafter=lm.ModelDrafter(watched), num_slots=4
    )
    lengths, done = jnp.array([9, 31, 12, 1]), jnp.array([False, True, False, True])
    seen = {}
    for name, changes in (
        ("budget", {}),
        ("exact", dict(exact=True, draft_budget=(2,), prefill_sizes=(8,))),
        ("no budget", dict(draft_budget=None)),
        ("no budget, one slot", dict(draft_budget=None, num_slots=1)),
    ):
        engine = dataclasses.replace(budgeted, **changes)
        state = engine.init_state(engines.TABLES[1])
        n = engine.num_slots
        batch = dataclasses.replace(state.batch, lengths=lengths[:n], done=done[:n])
        state = engine.with_proposal(dataclasses.replace(state, batch=batch))
        Watched.groups.clear()
        engine.score(engines.TABLES[0], state)
        (rows,) = Watched.groups
        # Prompts, which the target reads first, then the draft model
        options = [lm.RequestOptions(max_new_tokens=1)] * min(n, 2)
        requests = lm.NewRequests(
            slots=np.arange(len(options)),
            prompts=np.ones((len(options), 8), np.int32),
            lengths=np.full(len(options), 8),
            keys=jax.random.split(jax.random.key(0), len(options)),
            options=engine.options_of(options, [8] * len(options)),
        )
        jax.eval_shape(engine.admit, *engines.TABLES, state, requests)
        _, *prompts = Watched.groups
        assert len(prompts) == 2
        assert all((one.max_seen is None) == (rows.max_seen is None) for one in prompts)
        seen[name] = None if rows.max_seen is None else int(rows.max_seen)
    # K + 1 rows from position 11 on, or from 8 on; the slot that is done holds a longer text.
    wanted = {"budget": 14, "exact": None, "no budget": None, "no budget, one slot": 11}
    assert seen == wanted


# The choice

COSTS = lm.StepCosts(SLOTS, BUDGET, (1.0, 1.5, 1.75))


@pytest.mark.parametrize(
    ("rates", "best"), [([0.4, 0.1], 0), ([0.6, 0.1], 1), ([0.6, 0.5], 2), ([0.5, 0.25], 0)]
)
def test_the_best_number_of_drafts_gives_most_tokens_per_second(rates, best):
    rate = {k: (1 + sum(rates[:k])) / COSTS.seconds[k] for k in BUDGET}
    assert rate[best] == max(rate.values())
    assert COSTS.best(rates) == best


@pytest.mark.long
def test_a_choice_learns_whether_speculation_pays():
    """From real verifications, of drafts that are always or never accepted."""
    for is_good in (True, False):
        draft = engines.TABLES[0] if is_good else -engines.TABLES[0]
        driver = engines.driver_of(TABLE, engines.TABLES[0], draft, step_costs=COSTS)
        for _ in range(4 * SLOTS):
            driver.submit([1, 2], max_new_tokens=30)
        engines.run(driver)
        assert driver.draft_choice.best == (2 if is_good else 0)
        stats = driver.stats()
        assert (stats.offered_per_position[0] > stats.num_verifications / 2) == is_good


def test_trials_take_one_percent_of_the_time():
    choice = lm.DraftChoice(BUDGET, [0.1, 0.1], COSTS)
    numbers = [choice.next() for _ in range(3000)]
    assert choice.best == 0
    assert set(numbers) == {0, 1}
    seconds = [COSTS.seconds[k] for k in numbers]
    trials = sum(x for x, k in zip(seconds, numbers, strict=True) if k)
    assert 0.008 < trials / sum(seconds) < 0.0101


def test_a_step_in_which_nobody_has_a_draft_costs_what_a_plain_one_does():
    """Where passes are as wide as they have to be: what counts is the cost of those with drafts."""
    costs = lm.StepCosts(SLOTS, (0, 2), (1.0, 2.0))
    rates = [0.3, 0.5]  # 0.45 tokens more a step; of steps with drafts, each costs 1 more
    found = {}
    for may_be_narrow, wide in itertools.product((False, True), (0.4, 0.5)):
        choice = lm.DraftChoice((0, 2), rates, costs, may_be_narrow=may_be_narrow)
        for i in range(400):
            choice.learn(rates, 2, i % 10 < 10 * wide)
            choice.learn(rates, 0, False)  # says nothing
        found[may_be_narrow, wide] = choice.best, choice.is_loss
    loss, gain = (0, True), (2, False)
    assert found == {
        (False, 0.4): loss, (False, 0.5): loss, (True, 0.4): gain, (True, 0.5): loss
    }  # fmt: skip


def test_a_fixed_choice_drafts_though_it_does_not_pay():
    choice = lm.DraftChoice(BUDGET, [0.1, 0.1], COSTS, is_fixed=True)
    assert (choice.is_loss, choice.next()) == (True, 2)
    choice.max_drafts = [0, 1]
    assert choice.next() == 1
    assert not lm.DraftChoice((0,), [0.1, 0.1], lm.StepCosts(SLOTS, (0,), (1.0,))).is_loss


@pytest.mark.slow
def test_rates_are_those_of_the_drafts_that_were_tried():
    engine = dataclasses.replace(engines.LOOKUP, drafter=lm.SuffixDrafter(min_match=1))
    driver = engines.driver_of(dataclasses.replace(engine, draft_budget=(2,)))
    driver.submit([1, 4, 0, 1, 4], max_new_tokens=30)
    (found,) = engines.run(driver).values()
    tried, accepted = np.zeros(2), np.zeros(2)
    for update in found.updates[1:]:
        is_tried = np.arange(2) <= update.num_accepted
        decay = np.where(is_tried, 0.99, 1.0)
        tried = decay * tried + is_tried
        accepted = decay * accepted + (np.arange(2) < update.num_accepted)
    rates = driver.state.draft_rates
    np.testing.assert_allclose(rates.tried, tried, rtol=1e-5)
    np.testing.assert_allclose(rates.accepted, accepted, rtol=1e-5)
    assert 0 < accepted[0] < tried[0]


@pytest.mark.slow
def test_beside_a_grammar_a_lookup_that_does_not_pay_drafts_nothing():
    agreement = dataclasses.replace(engines.CONFIG, rejection_sample_method="agreement")
    engine = dataclasses.replace(engines.LOOKUP, config=agreement, draft_budget=(0, 2))
    proposed, texts = [], []
    for cost in (1.01, 9.0):
        costs = lm.StepCosts(engine.num_slots, (0, 2), (1.0, cost))
        with engines.driver_of(engine, step_costs=costs) as driver:
            driver.submit([1, 4, 0, 1, 4], max_new_tokens=12, matcher=Cycle())
            driver.submit([1, 4, 0, 1, 4], max_new_tokens=12)
            texts.append([one.token_ids for one in engines.run(driver).values()])
            proposed.append(driver.stats().num_draft_tokens)
            learned = driver.state.draft_rates.tried.any(), driver.draft_choice.num_steps > 0
            assert learned == (cost < 2, cost < 2)
    assert texts[0] == texts[1] and texts[0][0] == constrained_truth([1, 4, 0, 1, 4], 12)
    assert proposed[0] > proposed[1] == 0


def test_beside_a_grammar_a_choice_counts_only_drafts_that_requests_may_have():
    """One step in which both requests may have two drafts, then one in which one may have none."""

    class Device:
        """Notes how many drafts there are to verify, and computes nothing."""

        verified: list[int] = []

        def draft(self, step: Any, num_drafts: int) -> np.ndarray:
            return np.zeros((engine.num_slots, num_drafts), np.int32)

        def state(self, requests: Any) -> Any:
            return types.SimpleNamespace(store=None)

        def verify(self, step: Any, drafts: Any, going_on: Any, num_drafts: int) -> None:
            self.verified.append(num_drafts)

    engine = dataclasses.replace(engines.LOOKUP, draft_budget=(0, 2))
    costs = lm.StepCosts(engine.num_slots, (0, 2), (1.0, 1.4))
    group = schedule.placeholders(2, 3, slot=0).group
    with engines.driver_of(engine, step_costs=costs) as driver:
        assert driver.draft_choice.may_be_narrow
        device, driver._device = driver._device, Device()
        driver.draft_choice.rates = [0.5, 0.5]  # 0.75 tokens more for each that may have drafts
        for limits in ({0: 2, 1: 2}, {0: 2, 1: 0}):
            driver._carry_out(schedule.Masked(group, limits))
        driver._device = device
    assert Device.verified == [2, 0]


def test_a_draft_model_reads_all_that_a_step_with_more_drafts_may_have_emitted():
    """Traced alone: a step with one draft, after one with K."""
    widths = []

    class Watched(tiny.Trigram):
        def run(self, params, token_ids, start, cache):
            widths.append(token_ids.shape[1])
            return super().run(params, token_ids, start, cache)

    engine = dataclasses.replace(TABLE, drafter=lm.ModelDrafter(Watched(VOCAB)))
    draft_params = engines.TABLES[1]
    state = jax.eval_shape(engine.init_state, draft_params)
    del widths[:]
    jax.eval_shape(lambda state: engine.draft(draft_params, state, num_drafts=1), state)
    assert widths[0] == engines.K + 1, widths


def test_without_costs_every_step_has_the_most_drafts():
    choice = lm.DraftChoice(BUDGET, [0.0, 0.0])
    assert [choice.best, choice.next()] == [2, 2]


def test_costs_are_saved_and_loaded(tmp_path):
    COSTS.save(tmp_path / "costs.json")
    assert lm.StepCosts.load(tmp_path / "costs.json") == COSTS
    driver = engines.driver_of(TABLE, step_costs=COSTS)
    assert driver.draft_choice.costs == COSTS
    wrong = {"num_slots": 4, "draft_budget": 2, "seconds": [1]}
    large = {"num_slots": 4, "draft_budget": [0], "seconds": [10**400]}
    for text in ("{", "[1]", json.dumps({"seconds": [1]}), json.dumps(wrong), json.dumps(large)):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"path .*other\.json"):
            lm.StepCosts.load(tmp_path / "other.json")


@pytest.mark.long
def test_a_broken_step_keeps_what_was_learned(monkeypatch):
    driver = engines.driver_of(TABLE, step_costs=COSTS)
    for _ in range(4):
        driver.submit([1, 2], max_new_tokens=20)
    for _ in range(3):
        driver.step()
    before = np.asarray(driver.state.draft_rates.tried)
    monkeypatch.setattr(driver, "_read_step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.step()
    monkeypatch.undo()
    assert before.sum() > 0
    np.testing.assert_array_equal(driver.state.draft_rates.tried, before)


StepCosts, measure_steps = lm.StepCosts, lm.measure_steps


@pytest.mark.parametrize(
    ("error", "name", "call"),
    [
        (ValueError, "draft_budget", lambda: dataclasses.replace(TABLE, draft_budget=())),
        (ValueError, "draft_budget", lambda: dataclasses.replace(TABLE, draft_budget=(1, 1))),
        (ValueError, "draft_budget", lambda: dataclasses.replace(TABLE, draft_budget=(0, 3))),
        (TypeError, "draft_budget", lambda: dataclasses.replace(TABLE, draft_budget=(0, 0.5))),
        (ValueError, "draft_budget", lambda: StepCosts(4, (2, 1), (1, 1))),
        (ValueError, "seconds", lambda: StepCosts(4, (1, 2), (1,))),
        (ValueError, "seconds", lambda: StepCosts(4, (1, 2), (1, float("nan")))),
        (ValueError, "seconds", lambda: StepCosts(4, (1, 2), (1, 0))),
        (TypeError, "num_slots", lambda: StepCosts(4.5, (1,), (1,))),
        (TypeError, "step_costs", lambda: engines.driver_of(TABLE, step_costs=1)),
        (ValueError, "step_costs", lambda: engines.driver_of(engines.TABLE, step_costs=COSTS)),
        (ValueError, "draft_budget", lambda: lm.measure_steps(engines.TABLE, *engines.TABLES)),
        (ValueError, "num_steps", lambda: lm.measure_steps(TABLE, *engines.TABLES, num_steps=0)),
        (ValueError, "num_drafts", lambda: TABLE.draft(None, None, num_drafts=3)),
    ],
)
def test_mistakes_are_named(error, name, call):
    with pytest.raises(error, match=name):
        call()
