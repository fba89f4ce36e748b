"""Interrupts, preemption, failures, cancelled neighbours: every request goes on as if alone.

All tests share the programs of one engine that has everything: options, log-probabilities, and
prompts that are read in pieces.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from upper_floor import programs

import jax_specdec as sd
from jax_specdec import lm

from . import sampled, tiny
from .engines import EVERYTHING as ENGINE
from .engines import (
    LONGEST,
    PIECE,
    TABLE,
    TABLES,
    TARGET,
    VOCAB,
    Finished,
    K,
    alone,
    collect,
    greedy_truth,
    run,
)

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("engines")]

MOST_ALIVE = 16  # counted by request: after a lost state, those that ran wait too
FUNCTIONS = ("init", "admit", "step", "release")
Call = Callable[..., Any]


def driver_of(**settings: Any) -> lm.EngineDriver:
    """A driver; all that happens in a step happens at once, unless asked for otherwise."""
    return lm.EngineDriver(
        ENGINE, *TABLES, **(dict(max_steps_ahead=0, max_prefills=None) | settings)
    )


@functools.cache
def warmed_up() -> lm.EngineDriver:
    driver = driver_of(prompts_in_steps=True)
    driver.warm_up()
    return driver


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    """What a test serves, it serves with the programs that `warm_up` compiled."""
    warmed_up()
    sizes = [getattr(programs, name)._cache_size() for name in FUNCTIONS]
    yield
    assert [getattr(programs, name)._cache_size() for name in FUNCTIONS] == sizes


# Traffic


def random_request(rng: np.random.Generator) -> dict[str, Any]:
    """Any prompt, budget, temperature, stop tokens and options that the engine can serve."""
    length = int(rng.choice([1, LONGEST - 1, PIECE, PIECE + 1, rng.integers(1, LONGEST)]))
    options = dict(
        top_k=int(rng.integers(0, VOCAB)),
        top_p=0.8,
        min_p=0.1,
        presence_penalty=-0.4,
        frequency_penalty=0.7,
        repetition_penalty=1.6,
        allowed_token_ids=rng.permutation(VOCAB)[:4].tolist(),
        logit_bias={int(token): float(rng.normal()) for token in rng.permutation(VOCAB)[:2]},
        bad_words=rng.integers(0, VOCAB, (2, 2)).tolist(),
    )
    prompt, budget = rng.integers(0, VOCAB, length).tolist(), rng.integers(1, LONGEST - length + 1)
    options["min_tokens"] = min(5, int(budget))
    return dict(
        prompt=prompt,
        max_new_tokens=int(budget),
        temperature=float(rng.choice([0.0, 0.6, 1.4])),
        seed=int(rng.integers(0, 2**32)),
        stop_token_ids=rng.integers(
            0, VOCAB, rng.integers(0, 3) * int(rng.integers(0, 2))
        ).tolist(),
        options=lm.RequestOptions(**{k: v for k, v in options.items() if rng.random() < 0.3}),
    )


@functools.cache
def served_alone(index: int, seed: int) -> tuple[dict[str, Any], Finished]:
    """Request `index` of traffic `seed`, and what it gets by itself, uninterrupted."""
    request = random_request(np.random.default_rng([seed, index]))
    found = alone(warmed_up(), request)
    if request["temperature"] == 0:
        truth = sampled.greedy(
            TARGET,
            request["prompt"],
            request["options"],
            request["max_new_tokens"],
            request["stop_token_ids"],
        )
        assert found.token_ids == truth[: len(found.token_ids)]
        for update in found.updates:  # the emitted token is the likeliest
            logprobs = update.logprobs
            assert logprobs.top_token_ids[:, 0].tolist() == update.token_ids
            np.testing.assert_array_equal(logprobs.top_logprobs[:, 0], logprobs.logprobs)
    stopped = found.token_ids[-1] in request["stop_token_ids"]
    assert stopped or len(found.token_ids) == request["max_new_tokens"]
    assert found.finish_reason == ("stop" if stopped else "length")
    return request, found


def plainly(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def serve(
    count: int, seed: int, call: Call = plainly, driver: lm.EngineDriver | None = None
) -> tuple[list[list[lm.RequestUpdate]], set[int], sd.AcceptanceStats]:
    """Requests at random times, some preempted and some cancelled.

    Args:
      count: how many requests.
      seed: decides everything that happens.
      call: calls a method of the driver until it is not interrupted.
      driver: an idle one; None for a new one.

    Returns:
      The updates of every step, by request; those that were cancelled; the counters.
    """
    rng = np.random.default_rng([seed])
    driver = driver or driver_of(max_queue=MOST_ALIVE)
    steps: list[list[lm.RequestUpdate]] = []
    alive: set[int] = set()
    cancelled: set[int] = set()
    num_submitted = 0
    while num_submitted < count or not call(lambda: driver.is_idle):
        for _ in range(min(count - num_submitted, rng.poisson(2.5 * (rng.random() < 0.5)))):
            request = served_alone(num_submitted, seed)[0]
            if len(alive) >= MOST_ALIVE:
                break
            submit(driver, num_submitted, request, call)
            alive.add(num_submitted)
            num_submitted += 1
        new = call(driver.step)
        steps.append(sorted(new, key=lambda update: update.request_id))
        assert {update.request_id for update in new} <= alive
        alive -= {update.request_id for update in new if update.finish_reason is not None}
        assert driver.num_running + driver.num_queued == len(alive)
        for chosen in sorted(alive):
            if rng.random() < 0.03:
                call(driver.cancel, chosen)
                assert not driver.cancel(chosen)
                alive.remove(chosen)
                cancelled.add(chosen)
            elif rng.random() < 0.15:
                call(driver.preempt, chosen)
    assert driver.num_running == driver.num_queued == 0 and not alive
    return steps, cancelled, call(driver.stats)


def submit(driver: lm.EngineDriver, request_id: int, request: dict[str, Any], call: Call) -> None:
    """Submit once: one that was interrupted is queued or it is not."""
    before = driver.num_queued

    def unless_queued() -> None:
        if driver.num_queued == before:
            driver._num_submitted = request_id  # an interrupt may have used up an id
            assert driver.submit(**request) == request_id

    call(unless_queued)
    assert driver.num_queued == before + 1


def assert_each_is_as_if_alone(
    steps: list[list[lm.RequestUpdate]], cancelled: set[int], count: int, seed: int
) -> None:
    """Tokens, finish reasons, drafts, and log-probabilities of every step, bit for bit."""
    found = collect(list(itertools.chain(*steps)))
    for index in range(count):
        _, expected = served_alone(index, seed)
        got = found.get(index, Finished([], None, sd.Status.OK, []))
        if index not in cancelled:
            assert got.finish_reason == expected.finish_reason
            assert len(got.updates) == len(expected.updates)
        for one, other in zip(got.updates, expected.updates, strict=False):
            assert_same(one, other)


def assert_counted(
    stats: sd.AcceptanceStats, steps: list[list[lm.RequestUpdate]], unwanted: int
) -> None:
    """What was delivered, and at most `unwanted` verifications in steps ahead, for nobody."""
    updates = list(itertools.chain(*steps))
    for counted, delivered, most in (
        (stats.num_draft_tokens, sum(update.num_proposed for update in updates), K * unwanted),
        (stats.num_accepted_tokens, sum(update.num_accepted for update in updates), K * unwanted),
        (stats.num_verifications, len(updates), unwanted),
    ):
        assert 0 <= counted - delivered <= most


def assert_same(one: lm.RequestUpdate, other: lm.RequestUpdate) -> None:
    """But for the id."""
    a, b = (dataclasses.replace(x, request_id=0, logprobs=None) for x in (one, other))
    assert a == b
    jax.tree.map(np.testing.assert_array_equal, one.logprobs, other.logprobs)


# Preemption


@pytest.mark.parametrize(
    ("ahead", "prefills"), [(0, None), (1, 1), pytest.param(7, 2, marks=pytest.mark.slow)]
)
def test_a_request_that_comes_back_gets_what_it_gets_alone(
    ahead: int, prefills: int | None
) -> None:
    driver = driver_of(max_queue=MOST_ALIVE, max_steps_ahead=ahead, max_prefills=prefills)
    steps, cancelled, stats = serve(24, seed=1, driver=driver)
    assert_each_is_as_if_alone(steps, cancelled, 24, seed=1)
    assert_counted(stats, steps, len(cancelled) * ahead)
    assert stats.num_fallbacks == 0
    assert 0.05 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95


draft = jax.jit(ENGINE.draft)


def drafted(driver: lm.EngineDriver) -> lm.DecodeState:
    """The state in the middle of the next step; the driver's own stays as it is."""
    return jax.device_get(draft(TABLES[1], driver.state))


@pytest.mark.parametrize("length", [1, PIECE, PIECE + 1, LONGEST - 3])
def test_a_request_gets_the_drafts_that_it_would_have_had(length: int) -> None:
    """After a prompt of any length, read in any number of pieces."""
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    driver = driver_of()
    request_id = driver.submit(prompt, max_new_tokens=3, temperature=1.3)
    driver.submit([1], max_new_tokens=30)

    def of_slot_0() -> list[Any]:
        state = drafted(driver)
        rows = jax.tree.map(lambda x: x.reshape(K, ENGINE.num_slots, -1)[:, 0], state.store)
        held = int(state.batch.lengths[0])
        return [
            state.proposal.token_ids[0],
            rows,
            state.batch.token_ids[0, :held],
            state.batch.lengths[0],
            state.batch.options.max_lengths[0],
            state.target_cache[0, : held - 1],
            state.draft_cache[0, : held - 1],
        ]

    first = driver.step()
    assert len(first[0].token_ids) == 1
    before, neighbour = of_slot_0(), drafted(driver).proposal.token_ids[1]
    assert (before[0] >= 0).all() and (before[1].positions == length + 1).all()
    assert driver.preempt(request_id)
    assert (drafted(driver).proposal.token_ids[0] == -1).all()
    driver._admit_queued()  # what `step` begins with
    jax.tree.map(np.testing.assert_array_equal, of_slot_0(), before)
    np.testing.assert_array_equal(drafted(driver).proposal.token_ids[1], neighbour)


def test_a_request_that_has_emitted_nothing_comes_back_without_drafts() -> None:
    driver = driver_of()
    request_id = driver.submit([1, 2], max_new_tokens=3, temperature=1.3)
    driver._admit_queued()
    assert driver.preempt(request_id)
    driver._admit_queued()
    assert (drafted(driver).proposal.token_ids == -1).all()


# Interrupts and failures

SERVING = str(Path(programs.__file__).parent)


class Interrupts:
    """Calls, and calls again, interrupting at random lines of the serving code.

    Only lines of some functions count, if `only` names them.
    """

    def __init__(self, seed: int, every: float, only: tuple[str, ...] = ()) -> None:
        self.rng, self.every, self.only = np.random.default_rng(seed), every, only
        self.left, self.count = 1, 0
        self.places: set[str] = set()  # functions that were interrupted

    def __call__(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        while True:
            count = self.count
            result = self.once(function, *args, **kwargs)
            if self.count == count:
                return result

    def once(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; nothing, if it was interrupted."""
        sys.settrace(self._trace)
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            self.count += 1
            return []
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SERVING):
            return None
        if event == "line" and (not self.only or frame.f_code.co_name in self.only):
            self.left -= 1
            if self.left == 0:
                self.left = 1 + int(self.rng.exponential(self.every))
                self.places.add(frame.f_code.co_name)
                raise KeyboardInterrupt
        return self._trace


def assert_same_traffic(one: Any, other: Any) -> None:
    """The same updates in every step, the same requests cancelled, the same counters."""
    assert one[1:] == other[1:]
    for got, expected in zip(one[0], other[0], strict=True):
        assert [update.request_id for update in got] == [u.request_id for u in expected]
        for mine, theirs in zip(got, expected, strict=True):
            assert_same(mine, theirs)


class InsideJax:
    """Calls, and calls again, while compiled functions raise at random.

    Before a call or after it: then the state that it was given is gone, and nothing was returned.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seed: int,
        share: float = 0.2,
        *errors: type[BaseException],
    ) -> None:
        self.rng, self.share = np.random.default_rng(seed), share
        self.errors = errors or (KeyboardInterrupt,)
        self.raised: Counter[type[BaseException]] = Counter()
        for name in FUNCTIONS:
            monkeypatch.setattr(programs, name, self._failing(getattr(programs, name)))

    def __call__(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return function(*args, **kwargs)
            except KeyboardInterrupt:
                pass

    def _failing(self, function: Call) -> Call:
        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                return function(*args, **kwargs)  # the driver asks whether it can be traced
            fails = self.rng.random() < self.share
            if fails and self.rng.random() < 0.3:
                self._fail("before")
            result = function(*args, **kwargs)
            if fails:
                self._fail("after")
            return result

        return failing

    def _fail(self, when: str) -> None:
        error = self.errors[int(self.rng.integers(len(self.errors)))]
        self.raised[error] += 1
        raise error(when)


def test_a_state_that_is_lost_inside_jax_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serve(24, 1)
    with monkeypatch.context() as patched:
        inside = InsideJax(patched, seed=0)
        lossy = serve(24, 1, inside)
    assert inside.raised[KeyboardInterrupt] > 20
    assert_same_traffic(lossy, expected)


def test_an_interrupt_that_jax_makes_an_error_of_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while JAX compares an engine with those that it has programs of."""
    expected = serve(24, 1)
    warmed_up()
    rng, equal = np.random.default_rng(0), lm.Engine.__eq__
    places: list[lm.Engine] = []

    def interrupted(one: lm.Engine, other: object) -> bool:
        if rng.random() < 0.2:
            places.append(one)
            raise KeyboardInterrupt
        return equal(one, other)

    def again(function: Call, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return function(*args, **kwargs)
            except KeyboardInterrupt:
                pass

    engine = copy.copy(ENGINE)  # what is the same object is not compared
    driver = lm.EngineDriver(engine, *TABLES, max_steps_ahead=0, max_prefills=None)
    monkeypatch.setattr(lm.Engine, "__eq__", interrupted)
    lossy = serve(24, 1, again, driver)
    assert len(places) > 20
    assert_same_traffic(lossy, expected)
    places.clear()
    while not places:  # what reads the state alone is interrupted too
        driver = lm.EngineDriver(engine, *TABLES)
        with contextlib.suppress(KeyboardInterrupt):
            assert driver.state is not None


def test_an_error_of_a_value_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("a KeyboardInterrupt is not what this is")

    driver = driver_of()
    driver.submit([1, 2], max_new_tokens=3)
    monkeypatch.setattr(lm.Engine, "options_of", fails)
    with pytest.raises(ValueError, match="not what this is"):
        driver.step()
    monkeypatch.undo()
    (found,) = run(driver).values()
    assert len(found.token_ids) == 3


@pytest.mark.parametrize(
    ("share", "max_retries", "ahead", "most_ended"),
    [(0.04, 1, 0, 12), (0.04, 5, 1, 0), (0.15, 5, 2, 5)],
)
def test_failed_calls_lose_no_token_and_reach_whom_they_concern(
    share: float,
    max_retries: int,
    ahead: int,
    most_ended: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, seed, updates = 24, 1, []
    for index in range(count):
        served_alone(index, seed)
    driver = driver_of(max_steps_ahead=ahead, max_prefills=1, max_retries=max_retries)
    for index in range(count):
        driver.submit(**served_alone(index, seed)[0])
    with monkeypatch.context() as patched:
        inside = InsideJax(patched, seed, share, JaxRuntimeError)
        while not driver.is_idle:
            updates += driver.step()
    assert inside.raised[JaxRuntimeError] == driver.serving_stats().num_failed_calls > 3
    found, num_ended = collect(updates), 0
    for index in range(count):
        got, expected = found[index].updates, served_alone(index, seed)[1].updates
        with_error = [update for update in got if update.error is not None]
        assert {update.error for update in with_error} <= {"before", "after"}
        assert not any(update.token_ids for update in with_error)
        with_tokens = [update for update in got if update.error is None]
        assert len(with_tokens) == len(expected) or with_error[-1].finish_reason == "failed"
        for one, other in zip(with_tokens, expected, strict=False):
            assert_same(one, other)
        ended = with_error and with_error[-1].finish_reason == "failed"
        num_ended += bool(ended)
        assert ended or got[-1].finish_reason in ("stop", "length")
    assert num_ended <= most_ended, "of 24 requests"


def test_whatever_a_call_says_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    request, expected = served_alone(3, 1)
    driver = driver_of()
    driver.submit(**request)
    updates = driver.step()

    def exhausted(*args: Any, **static: Any) -> Any:
        if isinstance(args[1], jax.core.Tracer):
            return ()
        jax.tree.map(lambda x: x.delete(), args[3])
        raise MemoryError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(programs, "step", exhausted)
        (with_error,) = driver.step()
    assert (with_error.error, with_error.token_ids, with_error.finish_reason) == (
        "out of memory",
        [],
        None,
    )
    assert (driver.num_running, driver.num_queued, driver.is_idle) == (0, 1, False)
    (found,) = run(driver, updates).values()
    for one, other in zip(found.updates, expected.updates, strict=True):
        assert_same(one, other)


def test_an_error_of_tracing_is_raised_and_loses_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request, expected = served_alone(3, 1)
    driver = driver_of()
    driver.submit(**request)
    updates = driver.step()

    def wrong(*args: Any, **static: Any) -> Any:
        raise TypeError("propose must return a Proposal")

    with monkeypatch.context() as patched:
        patched.setattr(programs, "step", wrong)
        for _ in range(2):
            with pytest.raises(TypeError, match="propose must return"):
                driver.step()
    assert driver.serving_stats().num_failed_calls == 0
    (found,) = run(driver, updates).values()
    for one, other in zip(found.updates, expected.updates, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("leave", ["cancel", "preempt"])
def test_leaving_succeeds_whether_the_device_fails_or_not(
    leave: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [dict(prompt=[1, i], max_new_tokens=20) for i in range(3)]
    driver = driver_of()
    ids = [driver.submit(**request) for request in requests]
    updates = driver.step()

    def failing(*args: Any, **static: Any) -> Any:
        if isinstance(args[1].batch.done, jax.core.Tracer):
            return args[1]
        raise JaxRuntimeError("INTERNAL: lost")

    with monkeypatch.context() as patched:
        patched.setattr(programs, "release", failing)
        assert getattr(driver, leave)(ids[0])
    assert (driver.num_running, driver.num_queued) == (0, 2 + (leave == "preempt"))
    assert driver.serving_stats().num_failed_calls == 1
    found = run(driver, updates)
    for request_id, request in zip(
        ids[leave == "cancel" :], requests[leave == "cancel" :], strict=True
    ):
        with_error = [update.error for update in found[request_id].updates if update.error]
        assert with_error == ([] if request_id == ids[0] else ["INTERNAL: lost"])
        assert found[request_id].token_ids == greedy_truth(request)
    if leave == "cancel":
        assert found[ids[0]].updates == [one for one in updates[:3] if one.request_id == ids[0]]


def test_an_interrupt_and_then_a_failure_lose_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every seventh line of a step; then the call by which another request leaves fails."""
    requests = [dict(prompt=[1, i], max_new_tokens=20) for i in range(3)]
    for line in itertools.count(1, 7):
        driver = driver_of(max_steps_ahead=1)
        ids = [driver.submit(**request) for request in requests]
        updates = driver.step() + driver.step()
        interrupts = Interrupts(0, every=1e9)
        interrupts.left = line
        updates += interrupts.once(driver.step)
        with monkeypatch.context() as patched:
            InsideJax(patched, 1, 1.0, JaxRuntimeError)
            driver.cancel(ids[0])
        while not driver.is_idle:
            updates += driver.step()
        found = collect([one for one in updates if one.request_id != ids[0]])
        for request_id, request in zip(ids[1:], requests[1:], strict=True):
            assert found[request_id].token_ids == greedy_truth(request), interrupts.places
            assert found[request_id].finish_reason == "length"
        if not interrupts.count:
            break
    assert line > 100


def test_an_interrupt_at_any_line_loses_and_repeats_nothing() -> None:
    """Of what moves requests into slots, reads a step, and delivers its updates."""
    requests = [dict(prompt=[1, i], max_new_tokens=3) for i in range(2)]
    for line in itertools.count(1):
        driver = driver_of()
        ids = [driver.submit(**request) for request in requests]
        interrupts = Interrupts(0, 1e9, only=("_occupy", "_read_step", "step"))
        interrupts.left = line
        updates = interrupts(driver.step)
        found = run(driver, updates)
        for request_id, request in zip(ids, requests, strict=True):
            assert found[request_id].token_ids == greedy_truth(request), interrupts.places
        assert driver.stats().num_tokens == sum(len(found[i].token_ids) for i in ids)
        if not interrupts.count:
            break
    assert line > 30


@pytest.mark.parametrize(
    ("seed", "ahead"),
    [(5, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((4, 0), (6, 2)))],
)
def test_random_interrupts_and_failures_lose_nothing_and_repeat_nothing(
    seed: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 24
    for index in range(count):
        served_alone(index, seed)
    driver = driver_of(
        max_queue=MOST_ALIVE,
        max_steps_ahead=ahead,
        max_prefills=1 if ahead else None,
        prompts_in_steps=ahead > 1,
        max_retries=1000,
    )
    interrupts = Interrupts(seed, every=1500)
    with monkeypatch.context() as patched:
        inside = InsideJax(patched, seed, 0.08, KeyboardInterrupt, JaxRuntimeError)
        steps, cancelled, stats = serve(count, seed, interrupts, driver)
    with_error = [update for update in itertools.chain(*steps) if update.error is not None]
    assert with_error and {update.error for update in with_error} <= {"before", "after"}
    assert not any(update.token_ids or update.finish_reason for update in with_error)
    steps = [[update for update in step if update.error is None] for step in steps]
    assert_each_is_as_if_alone(steps, cancelled, count, seed)
    assert interrupts.count > 20 and inside.raised[KeyboardInterrupt] > 1
    # An interrupt may come before a failure is noted.
    failures = inside.raised[JaxRuntimeError]
    assert 1 < 0.7 * failures <= driver.serving_stats().num_failed_calls <= failures
    assert_counted(stats, steps, len(cancelled) * (ahead + 1))


# The queue


class Counted(int):
    """An id that counts its comparisons."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Counted.count += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_cancelling_compares_as_often_however_many_wait() -> None:
    driver, many = driver_of(), 2000
    running = [driver.submit([1], max_new_tokens=30) for _ in range(ENGINE.num_slots)]
    driver.step()
    waiting = [driver.submit([1], max_new_tokens=9) for _ in range(many)]
    Counted.count = 0
    for request_id in reversed(waiting[1:]):
        assert driver.cancel(Counted(request_id))
    assert Counted.count < many * (ENGINE.num_slots + 4)
    assert driver.num_queued == 1
    assert driver.cancel(running[2])
    assert [u.request_id for u in driver.step()] == [*running[:2], waiting[0], running[3]]


def test_a_full_queue_refuses_and_stays_as_it_is() -> None:
    driver = driver_of(max_queue=2)
    ids = [driver.submit([1], max_new_tokens=30) for _ in range(2)]
    with pytest.raises(RuntimeError, match="^waiting requests"):
        driver.submit([1], max_new_tokens=30)
    assert (driver.num_queued, driver.num_running) == (2, 0)
    driver.step()
    for request_id in ids:
        assert driver.preempt(request_id)
    ids += [driver.submit([1], max_new_tokens=30) for _ in range(2)]  # those do not count
    assert ids == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="^waiting requests"):
        driver.submit([1], max_new_tokens=30)
    assert driver.num_queued == 4
    assert [update.request_id for update in driver.step()] == [1, 0, 2, 3]


def test_a_drafter_that_cannot_read_pieces_is_refused_where_needed() -> None:
    sizes = dict(num_slots=1, max_length=LONGEST)
    lm.Engine(TABLE.model, tiny.Scripted(), TABLE.config, **sizes, prefill_sizes=(PIECE, LONGEST))
    message = (
        r"drafter must serve chunks, because prompts longer than "
        r"prefill_sizes\[-1\]=8 are read in chunks, but Scripted does not"
    )
    with pytest.raises(TypeError, match=message):
        lm.Engine(TABLE.model, tiny.Scripted(), TABLE.config, **sizes, prefill_sizes=(PIECE,))
    # An exact engine has one size without being given any.
    message = "prompts longer than chunk_size=128 are read in chunks, but Scripted does not"
    with pytest.raises(TypeError, match=message):
        lm.Engine(
            TABLE.model, tiny.Scripted(), TABLE.config, num_slots=1, max_length=200, exact=True
        )


# Everything at once


def fuzz(seed: int, count: int) -> None:
    for index in range(count):
        served_alone(index, seed)
    ahead = seed % 3

    def driver() -> lm.EngineDriver:
        return driver_of(
            max_queue=MOST_ALIVE, max_steps_ahead=ahead, max_prefills=1 if ahead else None
        )

    with pytest.MonkeyPatch.context() as patched:
        everything = serve(count, seed, InsideJax(patched, seed, share=0.05), driver())
    assert_each_is_as_if_alone(*everything[:2], count, seed)
    interrupts = Interrupts(seed, every=800)
    interrupted = serve(count, seed, interrupts, driver())
    assert_each_is_as_if_alone(*interrupted[:2], count, seed)
    if not ahead:
        assert_same_traffic(interrupted, everything)
    assert interrupts.count > count


@pytest.mark.slow
def test_fuzz_of_traffic_with_a_fixed_seed() -> None:
    fuzz(12, count=15)


@pytest.mark.slow
def test_fuzz_of_traffic_without_end() -> None:
    for seed in itertools.count(np.random.SeedSequence().generate_state(1)[0]):
        print(f"seed {seed}")  # a failure shows the last one
        fuzz(int(seed), count=60)
        served_alone.cache_clear()
