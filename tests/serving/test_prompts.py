"""Prompts between steps and in them: what programs read, texts, and the choice of a size."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from upper_floor import stopwatch

from jax_specdec import lm

from . import engines, test_eagle3, tiny
from .engines import LONGEST, SLOTS, TABLES, VOCAB, driver_of, greedy_truth, run
from .test_steps_ahead import PIECES, Failing, calls_of, in_pieces

pytestmark = [pytest.mark.long, pytest.mark.newest, pytest.mark.xdist_group("engines")]

SMALL, LARGE = PIECES.chunk_sizes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return calls_of(monkeypatch)


def request(rng: np.random.Generator, length: int, budget: int) -> dict[str, Any]:
    prompt = rng.integers(0, VOCAB, length).tolist()
    return dict(prompt=prompt, max_new_tokens=budget)


# What one call reads, as `test_schedule.py` has it


def test_while_nobody_runs_calls_are_as_large_as_they_may_be(calls):
    driver = in_pieces(max_prefills=1, chunk_size=SMALL)
    long = dict(prompt=[1, 2, 3] * 10, max_new_tokens=6)
    driver.submit(**long)
    (update,) = driver.step()
    assert calls == [LARGE] * 4 + [0]
    assert update.token_ids == greedy_truth(long)[:1]


def test_a_step_reads_prompts_while_somebody_runs(calls):
    driver = in_pieces(max_prefills=1, prompts_in_steps=True)
    driver.submit([1], max_new_tokens=20)
    driver.step()
    del calls[:]
    long = dict(prompt=[1, 2, 3] * 5, max_new_tokens=6)
    request_id = driver.submit(**long)
    found = run(driver)
    assert calls[:3] == [-LARGE, -LARGE, 0] and not any(calls[2:])
    assert found[request_id].token_ids == greedy_truth(long)


def test_whether_steps_read_prompts_is_a_bool():
    with pytest.raises(TypeError, match="^prompts_in_steps must be a bool, but it is 1"):
        lm.EngineDriver(PIECES, *TABLES, prompts_in_steps=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("leave", ["cancel", "preempt"])
def test_a_request_may_leave_between_two_chunks(leave):
    driver = in_pieces(max_steps_ahead=1, max_prefills=1, chunk_size=SMALL)
    driver.submit([1], max_new_tokens=39)
    driver.step()
    long = dict(prompt=[5, 2, 3] * 4, max_new_tokens=6)
    request_id = driver.submit(**long)
    for _ in range(2):
        driver.step()
    assert getattr(driver, leave)(request_id)
    follower = dict(prompt=long["prompt"][::-1], max_new_tokens=6)
    follower_id = driver.submit(**follower)
    found = run(driver)
    assert found[follower_id].token_ids == greedy_truth(follower)
    if leave == "preempt":
        assert found[request_id].token_ids == greedy_truth(long)
    else:
        assert request_id not in found


# Texts


EAGLE3 = dataclasses.replace(test_eagle3.ENGINE, prefill_sizes=(3, 8))


@pytest.mark.parametrize(
    ("engine", "weights", "in_steps"),
    [
        pytest.param(PIECES, TABLES, False, id="tables"),
        pytest.param(EAGLE3, test_eagle3.weights_of(EAGLE3), True, id="eagle3"),
    ],
)
def test_the_size_of_chunks_changes_no_text(engine, weights, in_steps):
    Failing.shall_fail = staticmethod(lambda tokens: False)
    rng = np.random.default_rng(3)
    asked = [engines.random_request(rng, [0.0, 1.0]) for _ in range(12)]
    driver = driver_of(engine, *weights)
    wanted = [engines.alone(driver, one) for one in asked]
    busy = driver_of(
        engine,
        *weights,
        max_steps_ahead=2,
        max_prefills=1,
        chunk_size=engine.chunk_sizes[0],
        prompts_in_steps=in_steps,
    )
    ids = [busy.submit(**one) for one in asked]
    cancelled = busy.submit([1] * 12, max_new_tokens=20)
    updates = [update for _ in range(6) for update in busy.step()]
    assert busy.cancel(cancelled)
    assert any([busy.preempt(i) for i in ids[:4]])
    found = run(busy, [update for update in updates if update.request_id != cancelled])
    for request_id, one in zip(ids, wanted, strict=True):
        got = found[request_id]
        assert (got.token_ids, got.finish_reason) == (one.token_ids, one.finish_reason)


# The choice


@pytest.mark.parametrize(
    ("seconds", "largest"),
    [
        ({64: 0.5}, 64),
        ({64: 3.0}, 64),
        ({64: 0.5, 128: 1.09, 256: 1.11}, 128),
        ({64: 0.5, 128: 0.6, 256: 0.7}, 256),
        ({64: 1.5, 128: 2.0}, 64),
    ],
)
def test_the_largest_chunk_costs_about_a_step(seconds, largest):
    assert stopwatch.ChunkCosts(1.0, seconds).largest == largest
    within = {size: x / 2.2 for size, x in seconds.items()}
    assert stopwatch.ChunkCosts(1.0, within, in_steps=True).largest == largest


def costing(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    monkeypatch.setattr(
        stopwatch, "measure_chunks", lambda *_, **__: stopwatch.ChunkCosts(1.0, seconds)
    )


@pytest.mark.parametrize(("large", "chosen"), [(1.0, LARGE), (1.5, SMALL)])
def test_warm_up_chooses_and_compiles_what_it_has_chosen(large, chosen, monkeypatch):
    costing(monkeypatch, {SMALL: 0.9, LARGE: large})
    driver = in_pieces(max_steps_ahead=1, max_prefills=1)
    progress: list[tuple[int, int]] = []
    driver.warm_up(lambda *counts: progress.append(counts))
    assert progress[0][0] == 0 and progress[-1][0] == progress[-1][1] == len(progress) - 1
    assert driver.chunk_size == chosen and driver.is_idle
    costing(monkeypatch, {SMALL: 0.9, LARGE: 2.5 - large})
    again: list[tuple[int, int]] = []
    driver.warm_up(lambda *counts: again.append(counts))
    assert len(again) == len(progress) - 1 and driver.chunk_size == chosen  # measured once
    rng = np.random.default_rng(4)
    with engines.compilations() as names:
        for length in (3, 1, 20, 8, 2, 7, 30):
            driver.submit(**request(rng, length, 5), temperature=0.5)
            driver.step()
        run(driver)
    assert names == []


ONE_SLOT, ONE_SIZE = (
    dataclasses.replace(PIECES, num_slots=1), dataclasses.replace(PIECES, prefill_sizes=(LARGE,))
)  # fmt: skip
WHOLE = dataclasses.replace(PIECES, drafter=tiny.Scripted(), prefill_sizes=(2, LONGEST))


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        (PIECES, dict(max_prefills=None)),
        (PIECES, dict(max_prefills=1, chunk_size=LARGE)),
        (ONE_SLOT, dict(max_prefills=1)),
        (ONE_SIZE, dict(max_prefills=1)),
        (WHOLE, dict(max_prefills=1)),
    ],
    ids=["throughput", "given", "alone", "one size", "whole prompts only"],
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(engine, settings, monkeypatch):
    monkeypatch.setattr(stopwatch, "measure_chunks", lambda *_, **__: 1 / 0)
    script = np.zeros((SLOTS, LONGEST), np.int32)
    driver = driver_of(engine, TABLES[0], script if engine is WHOLE else TABLES[1], **settings)
    for owner, name in ((driver, "_carry_out"), (driver._device, "empty")):  # compiles nothing
        monkeypatch.setattr(owner, name, lambda *_: None)
    driver.warm_up()
    assert driver.chunk_size == engine.chunk_size


def test_steps_and_prompts_are_measured():
    costs = stopwatch.measure_chunks(PIECES, *TABLES, in_steps=False)
    assert 0 < costs.step < np.inf and np.isfinite([*costs.seconds.values()]).all()
    assert min(costs.seconds.values()) > 0
    assert tuple(costs.seconds) == PIECES.chunk_sizes[: len(costs.seconds)]
    assert costs.largest in costs.seconds


@pytest.mark.parametrize(
    ("error", "engine", "value", "message"),
    [
        (ValueError, PIECES, 5, "^chunk_size must be 2 or 8, but it is 5"),
        (ValueError, PIECES, 0, "^chunk_size"),
        (TypeError, PIECES, 2.0, "^chunk_size"),
        (TypeError, WHOLE, 2, "prompts longer than chunk_size=2 are read in chunks"),
    ],
)
def test_a_chunk_size_is_refused(error, engine, value, message):
    with pytest.raises(error, match=message):
        lm.EngineDriver(engine, TABLES[0], np.zeros((1, LONGEST), np.int32), chunk_size=value)
