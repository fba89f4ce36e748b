"""Prompts between steps: at most one chunk while somebody runs, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from upper_floor import programs, schedule, stopwatch

from jax_specdec import lm

from . import engines, test_eagle3, tiny
from .engines import LONGEST, SLOTS, TABLES, VOCAB, driver_of, greedy_truth, run
from .test_steps_ahead import PIECES, Failing, in_pieces

pytestmark = [pytest.mark.long, pytest.mark.newest, pytest.mark.xdist_group("engines")]

SMALL, LARGE = PIECES.chunk_sizes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prompts that each call has read, padding included; a step's are negative, or 0."""
    found: list[int] = []

    def note(name: str, tokens_of: Callable[..., int]) -> None:
        function = getattr(programs, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(tokens_of(*args))
            return function(*args, **kwargs)

        monkeypatch.setattr(programs, name, call)

    note("admit", lambda *args: prompt_size(args[-1]))
    note("step", lambda *args: -prompt_size(args[-1]))
    return found


def prompt_size(packed: object) -> int:
    return packed.requests.prompts.size if isinstance(packed, programs.PackedRequests) else 0


def between_steps(calls: list[int]) -> list[list[int]]:
    """The calls before each step."""
    groups = itertools.groupby(calls, key=lambda n: n > 0)
    return [list(group) for is_read, group in groups if is_read]


def request(rng: np.random.Generator, length: int, budget: int) -> dict[str, Any]:
    prompt = rng.integers(0, VOCAB, length).tolist()
    return dict(prompt=prompt, max_new_tokens=budget)


# What one call reads


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 2])
def test_while_somebody_runs_a_step_waits_for_one_chunk_and_no_larger_one(ahead, calls):
    driver = in_pieces(max_steps_ahead=ahead, max_prefills=1, chunk_size=SMALL)
    rng = np.random.default_rng(0)
    running = driver.submit([1], max_new_tokens=39)
    updates = driver.step()
    asked = [request(rng, length, 4) for length in (9, 2, 1, 5, 2, 3, 1)]
    ids = [driver.submit(**one) for one in asked]
    del calls[:]
    while not any(update.request_id == running and update.finish_reason for update in updates):
        updates += driver.step()
    assert len(calls) > 20 and max(map(sum, between_steps(calls))) <= SMALL
    found = run(driver, updates)
    for request_id, one in zip(ids, asked, strict=True):
        assert found[request_id].token_ids == greedy_truth(one)


def test_while_nobody_runs_calls_are_as_large_as_they_may_be(calls):
    driver = in_pieces(max_prefills=1, chunk_size=SMALL)
    long = dict(prompt=[1, 2, 3] * 10, max_new_tokens=6)
    driver.submit(**long)
    (update,) = driver.step()
    assert calls == [LARGE] * 4 + [0]
    assert update.token_ids == greedy_truth(long)[:1]
    run(driver)
    del calls[:]
    prompts = [1, 2] * 3, [0], [1], [2]
    ids = [driver.submit(prompt, max_new_tokens=3) for prompt in prompts]
    found = run(driver)
    # The first is read whole; from then on it runs, and the others come one at a time.
    assert calls[:6] == [LARGE, 0, SMALL, 0, SMALL, 0]
    assert [len(found[i].token_ids) for i in ids] == [3] * 4


def test_a_prompt_whose_neighbours_have_ended_is_read_in_larger_chunks(calls):
    driver = in_pieces(max_prefills=1, chunk_size=SMALL)
    driver.submit([1], max_new_tokens=9)
    driver.step()
    long = request(np.random.default_rng(1), 36, 3)
    request_id = driver.submit(**long)
    del calls[:]
    found = run(driver)
    reads = [n for n in calls if n]
    assert reads == sorted(reads[:-1]) + reads[-1:] and {*reads} == {SMALL, LARGE}
    # Up to the end of the longest prompt there may be, and none is read twice.
    assert sum(reads) <= LONGEST
    assert found[request_id].token_ids == greedy_truth(long)


def test_groups_are_read_while_others_run_where_they_are_small_enough(calls):
    driver = in_pieces(max_prefills=1)
    driver.submit([1], max_new_tokens=20)
    driver.step()
    del calls[:]
    for i in range(3):
        driver.submit([i, 2], max_new_tokens=2)
    run(driver)
    assert calls[0] == LARGE == 4 * SMALL


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 2])
def test_steps_read_prompts_while_somebody_runs(ahead, calls):
    settings = dict(max_steps_ahead=ahead, chunk_size=LARGE, prompts_in_steps=True)
    driver = in_pieces(max_prefills=1, **settings)
    rng = np.random.default_rng(0)
    running = driver.submit([1], max_new_tokens=39)
    updates = driver.step()
    asked = [request(rng, length, 2) for length in (9, 2, 1, 20, 2, 3, 1)]
    ids = [driver.submit(**one) for one in asked]
    del calls[:]
    while sum(len(u.token_ids) for u in updates if u.request_id == running) < 33:
        updates += driver.step()
    # Nothing is read between steps.
    assert max(calls) == 0 and min(calls) == -LARGE
    parts = sum(-(-(len(one["prompt"]) - 1) // LARGE) for one in asked if len(one["prompt"]) > 2)
    found = run(driver, updates)
    num_reads = sum(n != 0 for n in calls)
    assert parts < num_reads < parts + 4, "some of the four shortest go together"
    for request_id, one in zip(ids, asked, strict=True):
        assert found[request_id].token_ids == greedy_truth(one)


def test_a_step_reads_no_prompt_where_nobody_would_run(calls):
    driver = in_pieces(max_prefills=1, prompts_in_steps=True)
    first = driver.submit([1, 2] * 6, max_new_tokens=1)
    second = driver.submit([2, 1] * 6, max_new_tokens=1)
    found = run(driver)
    assert min(calls) == 0, "its budget would be spent before the step"
    assert [len(found[i].token_ids) for i in (first, second)] == [1, 1]


def test_whether_steps_read_prompts_is_a_bool():
    with pytest.raises(TypeError, match="^prompts_in_steps must be a bool, but it is 1"):
        lm.EngineDriver(PIECES, *TABLES, prompts_in_steps=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [7, 11])
def test_chunks_follow_one_another_and_end_within_the_longest_prompt(most: int) -> None:
    for length in range(12, LONGEST + 1):
        rest: schedule.ChunkedPrefill | None = schedule.ChunkedPrefill(slot=0)
        end = 0
        while rest is not None:
            chunk = rest.next_chunk(PIECES, SimpleNamespace(length=length), most, 7)
            assert chunk.start <= end < chunk.end <= LONGEST
            end, rest = chunk.end, chunk.rest
        assert end >= length - 1


# Whose turn it is


def first_tokens(updates: list[lm.RequestUpdate]) -> list[int]:
    return list(dict.fromkeys(update.request_id for update in updates))


def test_those_who_wait_come_in_their_order_and_a_long_prompt_alternates_with_short_ones(calls):
    driver = in_pieces(max_prefills=1, chunk_size=SMALL)
    rng = np.random.default_rng(2)
    running = driver.submit([1], max_new_tokens=39)
    updates = driver.step()
    longs = [driver.submit(**request(rng, 20, 2))]
    shorts = [driver.submit(**request(rng, 1 + i % 2, 2)) for i in range(3)]
    longs.append(driver.submit(**request(rng, 5, 2)))
    shorts += [driver.submit(**request(rng, 1, 2)) for i in range(2)]
    while not driver.is_idle:
        updates += driver.step()
    order = first_tokens(updates)
    assert order[0] == running
    assert [i for i in order if i in shorts] == shorts
    assert [i for i in order if i in longs] == longs
    assert order.index(shorts[-1]) < order.index(longs[0]), "ten chunks, five prompts between them"


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
    [(PIECES, TABLES, False), (EAGLE3, test_eagle3.weights_of(EAGLE3), True)],
    ids=["tables", "eagle3"],
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


@pytest.mark.parametrize(
    ("engine", "weights", "settings"),
    [
        (PIECES, TABLES, dict(max_prefills=None)),
        (PIECES, TABLES, dict(max_prefills=1, chunk_size=LARGE)),
        (dataclasses.replace(PIECES, num_slots=1), TABLES, dict(max_prefills=1)),
        (dataclasses.replace(PIECES, prefill_sizes=(LARGE,)), TABLES, dict(max_prefills=1)),
        (
            dataclasses.replace(PIECES, drafter=tiny.Scripted(), prefill_sizes=(2, LONGEST)),
            (TABLES[0], np.zeros((SLOTS, LONGEST), np.int32)),
            dict(max_prefills=1),
        ),
    ],
    ids=["throughput", "given", "alone", "one size", "whole prompts only"],
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(
    engine, weights, settings, monkeypatch
):
    monkeypatch.setattr(stopwatch, "measure_chunks", lambda *_, **__: 1 / 0)
    for name in ("_read", "_empty", "_dispatch_whole", "_read_step"):  # compiles nothing
        monkeypatch.setattr(lm.EngineDriver, name, lambda *_: None)
    driver = driver_of(engine, *weights, **settings)
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
        (
            TypeError,
            dataclasses.replace(PIECES, drafter=tiny.Scripted(), prefill_sizes=(2, LONGEST)),
            2,
            "prompts longer than chunk_size=2 are read in chunks",
        ),
    ],
)
def test_a_chunk_size_is_refused(error, engine, value, message):
    with pytest.raises(error, match=message):
        lm.EngineDriver(engine, TABLES[0], np.zeros((1, LONGEST), np.int32), chunk_size=value)


def test_a_step_takes_about_two_steps_at_most_by_what_calls_cost(calls, monkeypatch):
    """By invented costs: a step takes 1, a call that reads n tokens `cost[n]`."""
    cost = {0: 1.0, SMALL: 1.1, LARGE: 3.5}
    costing(monkeypatch, {n: x for n, x in cost.items() if n})
    longest = []
    for size in (None, LARGE):
        driver = in_pieces(max_prefills=1, chunk_size=size)
        driver.warm_up()
        rng = np.random.default_rng(5)
        driver.submit([1], max_new_tokens=39)
        driver.step()
        times = []
        for _ in range(120):
            if rng.random() < 0.15 or driver.num_running < 2:
                driver.submit(**request(rng, 30 if rng.random() < 0.2 else 2, 9))
            has_runner = driver.num_running > (driver._prefill is not None)
            del calls[:]
            driver.step()
            times += [sum(cost[n] for n in calls)] * has_runner
        assert len(times) > 80
        longest.append(max(times))
    assert longest == [1.0 + 1.1, 1.0 + 3.5]
