"""Steps ahead, prompts read together and in pieces, and calls that fail on the device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from upper_floor import programs

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import SLOTS, TABLE, TABLES, VOCAB, K, alone, collect, driver_of, greedy_truth, run

pytestmark = [pytest.mark.newest, pytest.mark.xdist_group("engines")]

MOST_RETRIES = 3


@dataclasses.dataclass(frozen=True)
class Failing(tiny.Trigram):
    """The tables, on a device that fails where `shall_fail` of the tokens that it reads says so."""

    # Of the class: one compilation serves all.
    shall_fail: ClassVar[Callable[[np.ndarray], bool]] = staticmethod(lambda tokens: False)

    def run(self, params: Any, token_ids: Any, start: Any, cache: Any) -> Any:
        def check(tokens: np.ndarray, zero: np.ndarray) -> np.ndarray:
            if Failing.shall_fail(np.asarray(tokens)):
                raise MemoryError("no memory left on the device")
            return np.asarray(zero)

        zero = jax.pure_callback(
            check, jax.ShapeDtypeStruct((), jnp.int32), token_ids, jnp.int32(0)
        )
        return super().run(params, token_ids + zero, start, cache)


# Reads four prompts of two tokens a call, or eight tokens of one.
PIECES = dataclasses.replace(TABLE, model=Failing(VOCAB), prefill_sizes=(2, 8))


def in_pieces(
    shall_fail: Callable[[np.ndarray], bool] = lambda tokens: False, **settings: Any
) -> lm.EngineDriver:
    Failing.shall_fail = staticmethod(shall_fail)
    return driver_of(PIECES, *TABLES, **settings)


def failing(shall_fail: Callable[[np.ndarray], bool], ahead: int) -> lm.EngineDriver:
    return in_pieces(shall_fail, max_steps_ahead=ahead, max_prefills=1, max_retries=MOST_RETRIES)


def reads_5(tokens: np.ndarray) -> bool:
    """Of a prompt: a step reads no more than K + 1 tokens of each of the slots."""
    is_step = tokens.shape in ((SLOTS, 1), (SLOTS, K + 1))
    return not is_step and bool((tokens == 5).any())


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prompts that each call has read, padding included; a step's are negative, or 0."""
    found: list[int] = []

    def noting(name: str, sign: int) -> Callable[..., Any]:
        function = getattr(programs, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            packed = args[-1]
            found.append(0 if packed is None else sign * packed.requests.prompts.size)
            return function(*args, **kwargs)

        return call

    for name, sign in (("admit", 1), ("step", -1)):
        monkeypatch.setattr(programs, name, noting(name, sign))
    return found


# Steps ahead


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_steps_are_dispatched_before_the_last_results_are_read(ahead, monkeypatch):
    driver = driver_of(TABLE, max_steps_ahead=ahead)
    driver.submit([1, 2], max_new_tokens=30)
    calls = calls_of(monkeypatch)
    tokens = [update.token_ids for update in driver.step()]
    assert calls == [8] + [0] * (1 + ahead)
    assert len(tokens) == 1, "a step's results are delivered one by one, in their order"
    driver.step()
    assert calls.count(0) == 2 + ahead
    assert driver.serving_stats().mean_steps_ahead == ahead


def test_a_slot_idles_for_the_steps_ahead_and_no_longer():
    ahead, driver = 2, driver_of(TABLE, max_steps_ahead=2)
    stop = greedy_truth(dict(prompt=[1, 2], max_new_tokens=1))[0]
    short = driver.submit([1, 2], max_new_tokens=30, stop_token_ids=[stop])
    for i in range(SLOTS - 1):
        driver.submit([3, i], max_new_tokens=37)
    waiting = driver.submit([2, 1], max_new_tokens=2)
    steps = []
    while waiting not in {u.request_id for u in (steps[-1] if steps else [])}:
        steps.append(driver.step())
    ended = next(i for i, step in enumerate(steps) if short in {u.request_id for u in step})
    assert ended == 0 and len(steps) - 1 - ended == ahead + 1
    assert all(len(step) == SLOTS - 1 for step in steps[ended + 1 : -1])


def test_a_cancelled_request_gets_nothing_of_the_steps_ahead():
    driver = driver_of(TABLE, max_steps_ahead=3)
    ids = [driver.submit([i], max_new_tokens=20) for i in range(SLOTS)]
    driver.step()
    assert driver.cancel(ids[1]) and not driver.cancel(ids[1])
    follower = driver.submit([1, 4], max_new_tokens=9)  # in the same slot, behind those steps
    found = run(driver)
    assert ids[1] not in found
    assert found[follower].token_ids == greedy_truth(dict(prompt=[1, 4], max_new_tokens=9))


def test_a_preempted_request_gets_the_steps_ahead_once():
    driver = driver_of(TABLE, max_steps_ahead=3)
    request = dict(prompt=[1, 2], max_new_tokens=20)
    request_id = driver.submit(**request)
    updates = driver.step()
    assert driver.preempt(request_id)
    late = driver.step()
    assert [u.request_id for u in late] == [request_id] * 3
    found = run(driver, updates + late)
    assert found[request_id].token_ids == greedy_truth(request)


def test_a_request_that_ended_ahead_cannot_be_preempted():
    driver = driver_of(TABLE, max_steps_ahead=9)
    truth = greedy_truth(dict(prompt=[1, 2], max_new_tokens=9))
    stop = next(token for i, token in enumerate(truth) if i and token not in truth[:i])
    request_id = driver.submit([1, 2], max_new_tokens=30, stop_token_ids=[stop])
    updates = driver.step()
    assert driver.state.batch.done[0] and driver.num_running == 1
    assert not driver.preempt(request_id)
    updates += driver.step()
    assert driver.is_idle
    assert collect(updates)[request_id].token_ids == truth[: truth.index(stop) + 1]


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "max_steps_ahead", -1),
        (ValueError, "max_retries", -1),
        (ValueError, "max_prefills", 0),
        (ValueError, "max_queue", 0),
        (TypeError, "max_queue", 1.5),
        (TypeError, "step_widths", 1),
        (ValueError, "step_widths", (0,)),
        (ValueError, "step_widths", (2, 1)),
        (ValueError, "step_widths", (SLOTS,)),  # that of every step
    ],
)
def test_a_driver_is_not_made_with(error, name, value):
    with pytest.raises(error, match=f"^{name}"):
        lm.EngineDriver(TABLE, *TABLES, **{name: value})


# Prompts


def test_calls_read_as_many_prompts_as_their_size_allows():
    engine = dataclasses.replace(PIECES, prefill_sizes=(2, 4, 8), max_prefill_requests=3)
    assert [engine.group_size(size) for size in (2, 4, 8)] == [3, 2, 1]
    assert engine.admit_shapes == ((1, 2), (3, 2), (1, 4), (2, 4), (1, 8))
    with pytest.raises(ValueError, match="^max_prefill_requests"):
        dataclasses.replace(PIECES, max_prefill_requests=0)


# Failures on the device


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_step_that_fails_is_reported_and_loses_nothing(ahead):
    left = [5]

    def fifth_step(tokens: np.ndarray) -> bool:
        is_step = tokens.shape == (SLOTS, K + 1)
        left[0] -= is_step
        return is_step and left[0] == 0

    driver = failing(fifth_step, ahead)
    requests = [dict(prompt=[1, i], max_new_tokens=12 + i) for i in range(SLOTS + 2)]
    ids = [driver.submit(**request) for request in requests]
    updates = []
    while not driver.is_idle:
        updates += driver.step()
    errors = [update for update in updates if update.error is not None]
    assert [update.request_id for update in errors] == ids[:SLOTS]
    for update in errors:
        assert "no memory left on the device" in update.error
        assert (update.token_ids, update.finish_reason) == ([], None)
    found = collect(updates)
    for request_id, request in zip(ids, requests, strict=True):
        assert found[request_id].token_ids == greedy_truth(request)
        assert found[request_id].finish_reason == "length"
    assert driver.serving_stats().num_failed_calls == 1


def test_a_state_that_cannot_be_made_says_what_failed(monkeypatch):
    times = itertools.count()

    def fails_once(*_: Any, **__: Any) -> None:  # not when it is traced afterwards
        if not next(times):
            raise RuntimeError("no memory left on the device")

    driver = driver_of(TABLE, *TABLES)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "init", fails_once)
        with pytest.raises(RuntimeError, match="^no memory left on the device"):
            _ = driver.state
    assert driver.state.batch.done.all()


@pytest.mark.parametrize("ahead", [0, 2])
def test_after_a_failed_step_those_that_ran_come_before_those_that_wait(ahead):
    num_steps = itertools.count(1)
    driver = failing(lambda x: x.shape == (SLOTS, K + 1) and next(num_steps) == SLOTS, ahead)
    ids = [driver.submit([i % VOCAB], max_new_tokens=20) for i in range(2 * SLOTS)]
    updates = []
    while not driver.is_idle:
        updates += driver.step()
    failed = [i for i, update in enumerate(updates) if update.error is not None]
    ran = {updates[i].request_id for i in failed}
    came = list(dict.fromkeys(update.request_id for update in updates[failed[-1] + 1 :]))
    assert ran and ran < set(ids)
    assert set(came[: len(ran)]) == ran
    assert all(one.finish_reason == "length" for one in collect(updates).values())


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("length", [2, 30], ids=["short", "long"])
def test_a_prompt_that_cannot_be_read_ends_its_request_alone(ahead, length):
    driver = failing(reads_5, ahead)
    good = [dict(prompt=[1, i % 5], max_new_tokens=9 + i, stop_token_ids=[5]) for i in range(7)]
    ids = [driver.submit(**request) for request in good[:3]]
    bad = driver.submit([2] * (length - 1) + [5], max_new_tokens=9)
    ids += [driver.submit(**request) for request in good[3:]]
    found = run(driver)
    assert (found[bad].token_ids, found[bad].finish_reason) == ([], "failed")
    assert "no memory left on the device" in found[bad].updates[-1].error
    for request_id, request in zip(ids, good, strict=True):
        assert found[request_id].token_ids == greedy_truth(request)
        assert found[request_id].finish_reason in ("stop", "length")
    assert driver.is_idle and driver.num_running == driver.num_queued == 0


def test_a_device_that_fails_at_every_step_ends_every_request():
    driver = failing(lambda tokens: tokens.shape == (SLOTS, K + 1), ahead=1)
    ids = [driver.submit([i % 5], max_new_tokens=9) for i in range(SLOTS + 1)]
    found = run(driver)
    assert {found[i].finish_reason for i in ids} == {"failed"}
    for i in ids:
        assert [u.finish_reason for u in found[i].updates] == [None] * MOST_RETRIES + ["failed"]
    num_calls = driver.serving_stats().num_failed_calls
    assert MOST_RETRIES < num_calls <= len(ids) * (MOST_RETRIES + 1)


# Metrics


def test_the_driver_counts_what_it_did(monkeypatch):
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr("time.perf_counter", clock)
    driver = driver_of(TABLE, max_steps_ahead=1)
    assert driver.serving_stats() == lm.ServingStats(num_slots=SLOTS)
    for i in range(2):
        driver.submit([i], max_new_tokens=4 if i else 1)
    updates = []
    while not driver.is_idle:
        updates += driver.step()
    stats = driver.serving_stats()
    num_steps = sum(u.request_id == 1 for u in updates)
    assert (stats.num_slots, stats.num_steps) == (SLOTS, num_steps)
    # The first ended in its first step, and idled for one, if there was one.
    assert stats.num_busy_slots == num_steps + 2
    assert stats.host_wait_seconds == num_steps, "one tick each"
    assert (stats.num_admitted, stats.queue_seconds) == (2, 3.0), "at 1 and 2, until 3"
    assert (
        "Slots busy: " in (line := stats.log_line(seconds=2.0))
        and f"Steps: {num_steps / 2:.1f}/s," in line
    )
    assert (stats.num_prompt_tokens, stats.num_ended) == (2, (2, 0, 0, 0)), "by their budgets"
    assert stats - stats == lm.ServingStats(num_slots=SLOTS)
    first, others = stats.time_to_first_token_seconds, stats.inter_token_latency_seconds
    assert (first.count, others.count) == (2, 3), "of 1 and 4 tokens"
    assert first.total_seconds == 3 + 4, "submitted at 1 and 2, admitted at 3, waits from 4 to 5"
    # The last token was read when the clock was read last.
    assert others.total_seconds == pytest.approx(now[0] - 5)
    assert driver.stats().num_tokens == 5
    driver.cancel(driver.submit([1], max_new_tokens=1))
    driver.finish(driver.submit([1], max_new_tokens=1))
    assert driver.serving_stats().num_ended == (2, 1, 0, 1)


def test_log_probabilities_are_no_fault_to_the_search_of_jax_for_nan():
    """Which fails calls that return NaN; there is some where a step has emitted no token."""
    config = sd.LogprobsConfig(1, "processed", thresholds=True)
    driver = driver_of(dataclasses.replace(TABLE, logprobs=config))
    asked = dict(prompt=[1, 2], max_new_tokens=5)
    with jax.debug_nans(True):
        found = alone(driver, asked)
        output = lm.generate(
            TABLE.model,
            TABLES[0],
            [asked["prompt"]],
            drafter=TABLE.drafter,
            draft_params=TABLES[1],
            config=TABLE.config,
            max_new_tokens=asked["max_new_tokens"],
            logprobs=config,
        )
    assert found.finish_reason == "length"
    rows = [update.logprobs.logprobs for update in found.updates]
    assert np.isfinite(np.concatenate(rows)).all() and rows[0].dtype == np.float32
    steps = output.steps
    exists = np.arange(steps.token_ids.shape[2]) < steps.num_kept[..., None]
    assert (np.isfinite(steps.logprobs.logprobs) == exists).all() and not exists.all()


def test_the_driver_says_how_many_run_and_how_many_wait():
    driver = driver_of(TABLE)
    for _ in range(SLOTS + 2):
        driver.submit([1], max_new_tokens=9)
    driver.step()
    stats = driver.serving_stats()
    assert (stats.num_running, stats.num_queued) == (SLOTS, 2)
    run(driver)
    later = driver.serving_stats() - stats
    assert (later.num_running, later.num_queued) == (0, 0) and later.num_admitted == 2


def test_readings_of_other_drivers_are_not_subtracted():
    with pytest.raises(ValueError, match=r"^earlier\.num_slots"):
        lm.ServingStats(4) - lm.ServingStats(5)
    with pytest.raises(ValueError, match="^earlier must"):
        lm.ServingStats(4) - lm.ServingStats(4, num_steps=1)
