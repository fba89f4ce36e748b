"""Lookup in what other requests generated: it changes their drafts, and no text."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import engines, tiny
from .engines import VOCAB

pytestmark = [pytest.mark.long, pytest.mark.newest]

DRAFTER = lm.SuffixDrafter(max_match=8, min_match=2, history=64)
LOCAL = dataclasses.replace(DRAFTER, history=0)
ENGINE = dataclasses.replace(engines.LOOKUP, drafter=DRAFTER)
AGREEMENT = dataclasses.replace(engines.CONFIG, rejection_sample_method="agreement")
MODEL = tiny.Trigram(VOCAB)
# What is generated does not repeat itself soon, but it is that of the other requests.
REQUEST: dict[str, Any] = dict(prompt=[1, 4, 0, 1], max_new_tokens=12)


def driver_of(engine: lm.Engine, **settings: Any) -> lm.EngineDriver:
    params = engine.drafter.init_params()
    return engines.driver_of(engine, engines.TABLES[0], params, **settings)


def requests(count: int, **fields: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        dict(
            prompt=rng.integers(0, VOCAB, 2).tolist(),
            max_new_tokens=int(rng.integers(8, 16)),
            seed=int(i % 3),
            **fields,
        )
        for i in range(count)
    ]


def all_texts(driver: lm.EngineDriver, asked: list[dict[str, Any]]) -> list[list[int]]:
    ids = [driver.submit(**one) for one in asked]
    found = engines.run(driver)
    return [found[i].token_ids for i in ids]


@pytest.mark.long
def test_greedy_texts_stay_and_more_drafts_are_accepted() -> None:
    asked, lengths = requests(16), {}
    for drafter in (DRAFTER, LOCAL):
        driver = driver_of(dataclasses.replace(ENGINE, drafter=drafter), max_steps_ahead=1)
        assert all_texts(driver, asked) == [engines.greedy_truth(one) for one in asked]
        lengths[drafter] = driver.stats().tokens_per_target_pass
    assert lengths[DRAFTER] > lengths[LOCAL] + 0.1


@pytest.mark.parametrize("history", [pytest.param(0, marks=pytest.mark.slow), 64])
def test_without_a_history_others_do_not_change_a_requests_drafts(history: int) -> None:
    drafter = dataclasses.replace(DRAFTER, history=history)
    driver = driver_of(dataclasses.replace(ENGINE, drafter=drafter))
    first = engines.alone(driver, REQUEST)
    all_texts(driver, requests(8))
    again = engines.alone(driver, REQUEST)
    beside = [driver.submit(**one) for one in [REQUEST, *requests(3)]][0]
    among = engines.run(driver)[beside]
    assert first.token_ids == again.token_ids == among.token_ids
    drafts = [
        [(x.token_ids, x.num_proposed, x.num_accepted) for x in one.updates]
        for one in (first, again, among)
    ]
    are_same = drafts[0] == drafts[1] == drafts[2]
    assert are_same == (not history)  # the control: with one they do


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (engines.CONFIG, dict(temperature=0.5, max_new_tokens=4)),
        (engines.BLOCK, dict(options=lm.RequestOptions(temperature=1.0, max_new_tokens=4))),
    ],
)
def test_a_request_whose_text_would_depend_on_others_is_refused(config, fields) -> None:
    driver = driver_of(dataclasses.replace(ENGINE, config=config))
    must = 'temperature must be 0 unless rejection_sample_method is "agreement", but it is '
    with pytest.raises(ValueError, match=must + r"\d\.\d: the drafter has a history, so other"):
        driver.submit([1], **fields)
    assert driver.is_idle
    driver_of(dataclasses.replace(ENGINE, config=AGREEMENT)).submit([1], **fields)


def test_synthetic_acceptance_is_refused() -> None:
    config = sd.SpecDecodeConfig(
        num_speculative_tokens=2,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=1.5,
    )
    with pytest.raises(ValueError, match="text does not depend on drafts, because the drafter has"):
        dataclasses.replace(ENGINE, config=config)
    dataclasses.replace(ENGINE, config=config, drafter=LOCAL)


def history_of(driver: lm.EngineDriver) -> list[int]:
    _, params = driver._device.weights
    ring = np.roll(params["token_ids"], -int(params["next"]))
    return ring[np.flatnonzero(ring >= 0)[0] :].tolist()


def test_the_history_holds_what_was_generated_by_requests_that_have_ended() -> None:
    driver = driver_of(ENGINE)
    first, second = (dict(prompt=[i], max_new_tokens=3 + 6 * i) for i in (0, 1))
    ids = [driver.submit(**one) for one in (second, first)]
    cancelled = driver.submit([2], max_new_tokens=9)
    driver.cancel(driver.submit([3], max_new_tokens=9))  # which has generated nothing
    begun: list[int] = []
    while not begun:
        begun += [x for one in driver.step() if one.request_id == cancelled for x in one.token_ids]
    driver.cancel(cancelled)
    driver.preempt(ids[0])
    engines.run(driver)
    wanted = [engines.greedy_truth(one) for one in (first, second)]  # in the order they ended
    assert history_of(driver) == [*begun, -1, *wanted[0], -1, *wanted[1], -1]


def test_nothing_is_compiled_after_warm_up() -> None:
    driver = driver_of(ENGINE, max_steps_ahead=1)
    driver.warm_up()
    with engines.compilations() as names:
        all_texts(driver, requests(12))
    assert names == []


def test_a_text_that_cannot_be_kept_is_delivered_all_the_same(monkeypatch) -> None:
    add, calls = lm.SuffixDrafter.add, []

    def fails_once(self: lm.SuffixDrafter, params: Any, token_ids: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return add(self, params, token_ids)

    monkeypatch.setattr(lm.SuffixDrafter, "add", fails_once)
    driver, asked = driver_of(ENGINE), requests(4)
    assert all_texts(driver, asked) == [engines.greedy_truth(one) for one in asked]
    assert driver.serving_stats().num_failed_calls == 1


def test_a_drafter_without_its_history_is_refused() -> None:
    asked: dict[str, Any] = dict(config=engines.CONFIG, drafter=DRAFTER, max_new_tokens=2)
    with pytest.raises(ValueError, match="draft_params must be a history"):
        lm.generate(MODEL, engines.TABLES[0], [[1]], **asked)
