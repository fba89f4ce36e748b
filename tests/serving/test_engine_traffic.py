"""Requests that come and go at random: each gets the tokens it gets alone, and all get theirs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from .engines import (
    LLAMA,
    TABLE,
    Finished,
    K,
    alone,
    collect,
    driver_of,
    greedy_truth,
    random_request,
    step,
)

pytestmark = [pytest.mark.newest, pytest.mark.xdist_group("engines")]

idle = functools.cache(driver_of)


@functools.cache
def request_of(seed: int, index: int) -> dict[str, Any]:
    return random_request(np.random.default_rng([seed, index]), (0.0, 0.6, 1.4))


@functools.cache
def by_itself(engine: lm.Engine, seed: int, index: int) -> Finished:
    """What a request gets alone, whatever the number of steps ahead."""
    request = request_of(seed, index)
    found = alone(idle(engine), request)
    if engine is not LLAMA and not request["temperature"]:
        assert found.token_ids == greedy_truth(request)
    return found


def serve(
    engine: lm.Engine, count: int, *, seed: int, preempt: float = 0.0, **settings: Any
) -> tuple[dict[int, dict[str, Any]], dict[int, Finished], set[int], lm.EngineDriver]:
    """`count` requests at random times; after each step some are cancelled or preempted.

    Returns:
      The requests, what became of them, those that were cancelled, and the driver.
    """
    rng = np.random.default_rng(seed)
    driver = driver_of(engine, max_steps_ahead=1, max_prefills=1, **settings)
    requests: dict[int, dict[str, Any]] = {}
    cancelled: set[int] = set()
    updates: list[lm.RequestUpdate] = []
    alive: set[int] = set()
    while len(requests) < count or not driver.is_idle:
        # Bursts and lulls: the queue grows, and the engine runs partly empty.
        for _ in range(min(count - len(requests), rng.poisson(2.5 if rng.random() < 0.5 else 0))):
            request = request_of(seed, len(requests))
            request_id = driver.submit(**request)
            assert request_id == len(requests)
            requests[request_id] = request
            alive.add(request_id)
        new = step(driver)
        updates += new
        alive -= {update.request_id for update in new if update.finish_reason is not None}
        if alive and rng.random() < 0.1:
            chosen = int(rng.choice(sorted(alive)))
            assert driver.cancel(chosen)
            assert not driver.cancel(chosen)
            alive.remove(chosen)
            cancelled.add(chosen)
        assert driver.num_running + driver.num_queued == len(alive)
        assert driver.num_running <= engine.num_slots
        running = [update.request_id for update in new if update.request_id in alive]
        if running and rng.random() < preempt:
            driver.preempt(int(rng.choice(running)))
    assert np.asarray(driver.state.batch.done).all()
    return requests, collect(updates), cancelled, driver


def assert_complete(request: dict[str, Any], got: Finished) -> None:
    """No token lost: it ended where its budget or a stop token says, and not before."""
    assert got.status == sd.Status.OK
    stops = [i for i, x in enumerate(got.token_ids) if x in request["stop_token_ids"]]
    if stops:
        assert got.finish_reason == "stop" and stops == [len(got.token_ids) - 1]
    else:
        assert got.finish_reason == "length" and len(got.token_ids) == request["max_new_tokens"]


@pytest.mark.parametrize(
    ("engine", "count"), [(TABLE, 60), pytest.param(LLAMA, 60, marks=pytest.mark.long)]
)
def test_steps_of_some_slots_change_no_token(
    engine: lm.Engine, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come, go and leave, in steps of one, two and all of four slots."""
    made: list[int] = []
    device: Any = type(idle(engine)._device)
    narrow = device._narrow

    def counted(self: Any, name: str, width: int, *args: Any, **static: Any) -> Any:
        program = narrow(self, name, width, *args, **static)
        if program is not None:
            made.append(width)
        return program

    monkeypatch.setattr(device, "_narrow", counted)
    requests, found, cancelled, driver = serve(
        engine, count, seed=1, preempt=0.3, step_widths=(1, 2)
    )
    driver.close()
    for request_id in requests.keys() - cancelled:
        expected = by_itself(engine, 1, request_id)
        assert found[request_id].token_ids == expected.token_ids
        counts = [
            [(u.num_proposed, u.num_accepted) for u in x.updates]
            for x in (found[request_id], expected)
        ]
        assert counts[0] == counts[1]
    num_steps = driver.serving_stats().num_steps
    assert made.count(1) > 3 and made.count(2) > 5
    assert len(made) < 0.9 * num_steps


def test_what_cannot_be_compiled_behind_is_a_warning() -> None:
    behind: Any = driver_of(TABLE)._device.behind

    @functools.partial(jax.jit, static_argnums=0)
    def broken(size: int, x: jax.Array) -> jax.Array:
        raise ValueError(f"x must not be {list(x.shape)}")

    def asked() -> Any:
        return behind.get("broken", broken, 1, np.zeros(2, np.float32))

    assert asked() is None
    behind.wait()
    with pytest.warns(UserWarning, match=r"^broken cannot be compiled: x must not be \[2\]"):
        assert asked() is None
    behind.wait()
    assert asked() is None
    behind.close()


def test_what_is_compiled_for_another_program_behind_has_the_places_of_its_arrays() -> None:
    """As the second half of a step with grammars is: the first half's arrays are not there yet."""
    behind: Any = driver_of(TABLE)._device.behind

    @functools.partial(jax.jit, static_argnums=0)
    def twice(size: int, x: jax.Array) -> jax.Array:
        return size * x

    x = jax.device_put(np.ones(2, np.float32), jax.devices()[1])
    assert behind.get("first", twice, 2, x) is None
    behind.wait()
    first = behind.get("first", twice, 2, x)
    assert behind.get("second", twice, 2, first.returned) is None
    behind.wait()
    second = behind.get("second", twice, 2, first.returned)
    behind.close()
    assert second(2, first(2, x)).tolist() == [4, 4]


@pytest.mark.long
def test_a_request_among_others_gets_the_tokens_it_gets_alone():
    requests, found, cancelled, _ = serve(LLAMA, 60, seed=1, preempt=0.3)
    assert 0 < len(cancelled) < 20
    slots_differ = 0
    for request_id, request in requests.items():
        expected = by_itself(LLAMA, 1, request_id)
        got = found.get(request_id, Finished([], None, sd.Status.OK, []))
        if request_id in cancelled:
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
            continue
        assert_complete(request, got)
        assert got.token_ids == expected.token_ids
        # Every step is the same: what was drafted, and what was accepted of it.
        counts = [[(u.num_proposed, u.num_accepted) for u in x.updates] for x in (got, expected)]
        assert counts[0] == counts[1]
        slots_differ += len(got.updates) > 1
    assert slots_differ > 20
    sampled = [found[i] for i, r in requests.items() if r["temperature"] and i in found]
    accepted = sum(u.num_accepted for f in sampled for u in f.updates)
    proposed = sum(u.num_proposed for f in sampled for u in f.updates)
    assert 0.05 < accepted / proposed < 0.95, "too one-sided to show much"


def test_300_requests_leak_no_slot_and_lose_no_token():
    count, seed = 300, 3
    requests, found, cancelled, driver = serve(TABLE, count, seed=seed)
    assert len(requests) == count and len(cancelled) > count / 100
    assert driver.is_idle and driver.num_running == driver.num_queued == 0
    for request_id, request in requests.items():
        if request_id in cancelled:
            continue
        got = found[request_id]
        assert_complete(request, got)
        if request["temperature"] == 0:
            assert got.token_ids == greedy_truth(request)
        elif request_id % 10 == 0:
            assert got.token_ids == by_itself(TABLE, seed, request_id).token_ids
    # The counters saw every verification.
    updates = [u for f in found.values() for u in f.updates]
    stats = driver.stats()
    # A cancelled request may have been verified in a step ahead, whose tokens nobody gets.
    most = len(cancelled)
    for counted, found_in_updates, per_step in (
        (stats.num_accepted_tokens, sum(u.num_accepted for u in updates), K),
        (stats.num_draft_tokens, sum(u.num_proposed for u in updates), K),
        (stats.num_verifications, len(updates), 1),
    ):
        assert 0 <= counted - found_in_updates <= most * per_step
    assert stats.num_fallbacks == 0
    # All slots serve: as many requests as there are slots, at once.
    for _ in range(TABLE.num_slots):
        driver.submit([1], max_new_tokens=4)
    assert {u.request_id for u in driver.step()} == set(range(count, count + TABLE.num_slots))
