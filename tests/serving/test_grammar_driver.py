"""Requests of an `EngineDriver` with grammars beside others, against plain Python."""

from __future__ import annotations

import _thread
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import llguidance
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import (
    EVERYTHING,
    EXACT,
    LONGEST,
    TABLE,
    TABLES,
    TARGET,
    VOCAB,
    compilations,
    greedy_truth,
    run,
    step,
    weights_of,
)
from .grammars import Follows, of_digits

pytestmark = pytest.mark.xdist_group("engines")

ALLOWED = ((0, 1), (2, 3, 4), (1, 5))


class Cycle(Follows):
    """Allows one set of tokens after the other, over and over."""

    def __init__(self) -> None:
        super().__init__(lambda text: ALLOWED[len(text) % len(ALLOWED)])


def constrained_truth(prompt: list[int], count: int) -> list[int]:
    """The likeliest allowed token at each position."""
    sequence = list(prompt)
    for i in range(count):
        logits = tiny.next_logits(TARGET, sequence)
        sequence.append(max(ALLOWED[i % len(ALLOWED)], key=lambda token: logits[token]))
    return sequence[len(prompt) :]


def driver(**settings: Any) -> lm.EngineDriver:
    return lm.EngineDriver(TABLE, *weights_of(TABLE), **settings)


@pytest.mark.parametrize(
    ("max_steps_ahead", "step_widths"),
    [(0, ()), *(pytest.param(*x, marks=pytest.mark.newest) for x in ((1, (1, 2)), (3, ())))],
)
def test_requests_with_and_without_grammars_get_what_plain_python_gives(
    max_steps_ahead: int, step_widths: tuple[int, ...]
) -> None:
    served = driver(max_steps_ahead=max_steps_ahead, step_widths=step_widths)
    rng, truths, updates = np.random.default_rng(0), {}, []
    for i in range(12):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist()
        asked: dict[str, Any] = dict(prompt=prompt, max_new_tokens=int(rng.integers(1, 12)))
        if i % 3:
            request_id = served.submit(**asked)
            truths[request_id] = greedy_truth(asked)
        else:
            request_id = served.submit(**asked, matcher=Cycle())
            truths[request_id] = constrained_truth(prompt, asked["max_new_tokens"])
        for _ in range(i % 4):
            updates += step(served)
        if i % 5 == 4:
            served.preempt(request_id)
    found = run(served, updates)
    served.close()
    assert {i: one.token_ids for i, one in found.items()} == truths
    assert served.stats().num_accepted_tokens > 0


def test_sampled_tokens_are_allowed_and_those_of_a_request_alone() -> None:
    asked: dict[str, Any] = dict(prompt=[1, 2], max_new_tokens=12, temperature=1.0, seed=5)
    alone, crowded = driver(), driver()
    alone.submit(**asked, matcher=Cycle())
    for seed in range(3):
        crowded.submit([3], max_new_tokens=9, temperature=1.0, seed=seed)
    crowded.submit(**asked, matcher=Cycle())
    (first,), second = run(alone).values(), run(crowded)[3]
    assert first.token_ids == second.token_ids and len(first.token_ids) == 12
    for i, token in enumerate(first.token_ids):
        assert token in ALLOWED[i % len(ALLOWED)]


class Interrupting(Cycle):
    """Interrupts the main thread now and then, before or after it has changed."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.rng, self.num_interrupts = rng, 0

    def accept_token(self, token_id: int) -> bool:
        self.maybe_interrupt()
        accepted = super().accept_token(token_id)
        self.maybe_interrupt()
        return accepted

    def rollback(self, num_tokens: int) -> None:
        self.maybe_interrupt()
        super().rollback(num_tokens)
        self.maybe_interrupt()

    def maybe_interrupt(self) -> None:
        if self.rng.random() < 0.05:
            self.num_interrupts += 1
            _thread.interrupt_main()


def test_an_interrupt_while_matchers_advance_loses_no_token() -> None:
    rng, served = np.random.default_rng(0), driver()
    matchers = [Interrupting(rng) for _ in range(4)]
    for i, matcher in enumerate(matchers):
        served.submit([i], max_new_tokens=30, matcher=matcher)
    updates: list[lm.RequestUpdate] = []
    num_interrupts = 0
    while not served.is_idle:
        try:
            updates += served.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 5
    found = run(served, updates)
    assert {i: one.token_ids for i, one in found.items()} == {
        i: constrained_truth([i], 30) for i in range(4)
    }
    for i, matcher in enumerate(matchers):  # the last tokens were not needed for a mask
        assert [*matcher.tokens] == found[i].token_ids[: len(matcher.tokens)]


class Wrong(Cycle):
    """Refuses its fourth token, which its mask allowed."""

    def accept_token(self, token_id: int) -> bool:
        return len(self.tokens) < 3 and super().accept_token(token_id)


class Broken(Cycle):
    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        raise RuntimeError("no mask")


class Forgets(Cycle):
    """Cannot go back, once it has accepted six tokens."""

    def rollback(self, num_tokens: int) -> None:
        if len(self.tokens) > 5:
            raise RuntimeError("no way back")
        super().rollback(num_tokens)


LONG = llguidance.LLMatcher.grammar_from_regex("[1-5]*2[1-5]{12}")
FAILING: dict[str, tuple[Callable[[], Any], str]] = {
    "refuses": (Wrong, "its matcher takes"),
    "no mask": (Broken, "no mask"),
    "no way back": (Forgets, "no way back"),
    "a wrong grammar": (lambda: of_digits("start: (", b"12345"), "Expected token"),
    "limits": (lambda: of_digits(LONG, b"12345", max_lexer_states=12), "too many states"),
}


@pytest.mark.parametrize(("make", "error"), FAILING.values(), ids=FAILING)
def test_a_matcher_that_fails_ends_its_own_request_alone_and_at_once(
    make: Callable[[], Any], error: str
) -> None:
    served, undisturbed = driver(), driver()
    asked: dict[str, Any] = dict(max_new_tokens=12, temperature=1.0, stop_token_ids=[0])
    failing = served.submit([1], **asked, matcher=make())
    for seed in range(2):
        for one in (served, undisturbed):
            one.submit([2], **asked, seed=seed)
            one.submit([3], **asked, seed=seed, matcher=Cycle())
    found, expected = run(served), run(undisturbed)
    *_, last = found.pop(failing).updates
    assert last.finish_reason == "failed" and not last.token_ids and last.status == sd.Status.OK
    assert last.error is not None and "matcher" in last.error and error in last.error
    assert [one.token_ids for one in found.values()] == [one.token_ids for one in expected.values()]
    assert all(update.error is None for one in found.values() for update in one.updates)
    assert served.serving_stats().num_failed_calls == 0 and served.is_idle


def test_something_else_than_a_matcher_is_refused_and_queues_nothing() -> None:
    served = driver()
    with pytest.raises(TypeError, match="matcher"):
        served.submit([1], max_new_tokens=2, matcher=3)  # type: ignore[arg-type]
    assert served.num_queued == 0


def test_a_cancelled_request_leaves_no_grammar() -> None:
    served = driver()
    request_id = served.submit([1], max_new_tokens=20, matcher=Cycle())
    served.step()
    assert served.cancel(request_id)
    assert run(served) == {}


def test_closing_a_driver_ends_the_thread_of_its_matchers() -> None:
    before = set(threading.enumerate())
    with driver() as served:
        served.submit([1], max_new_tokens=2)
        run(served)
        assert set(threading.enumerate()) <= before  # nobody had a grammar
        served.submit([1], max_new_tokens=2, matcher=Cycle())
        run(served)
        (own,) = set(threading.enumerate()) - before
    assert not own.is_alive()
    served.close()
    with served:
        request_id = served.submit([1], max_new_tokens=2, matcher=Cycle())
        assert run(served)[request_id].token_ids == constrained_truth([1], 2)
    assert set(threading.enumerate()) <= before


@pytest.mark.long
def test_warming_up_for_grammars_compiles_two_more_programs_and_leaves_nothing() -> None:
    totals = []
    for grammars in (False, True):
        served = driver()
        calls: list[tuple[int, int]] = []
        served.warm_up(lambda *x, calls=calls: calls.append(x), grammars=grammars)
        total = len(calls) - 1
        assert calls == [(done, total) for done in range(total + 1)]
        totals.append(total)
    assert totals[1] == totals[0] + 2  # with drafts and without
    assert served.is_idle and served.stats().num_tokens == 0
    served.warm_up(grammars=True)


SIZES = dataclasses.replace(EVERYTHING, prefill_sizes=(2, LONGEST))


@pytest.mark.parametrize(
    ("engine", "kinds"),
    [
        (SIZES, ["options", "long prompts", "grammars"]),
        (dataclasses.replace(SIZES, request_options=False, logprobs=None), []),
        (dataclasses.replace(EXACT, request_options=True), []),
        (dataclasses.replace(SIZES, drafter=tiny.Scripted()), []),
    ],
    ids=["some", "no options", "exact", "whole prompts only"],
)
def test_what_only_some_need_is_compiled_behind_unless_all_need_it(
    engine: lm.Engine, kinds: list[str]
) -> None:
    served = lm.EngineDriver(engine, *TABLES)  # computes nothing
    settings, warm_up = served._settings, served._warm_up
    whole, nothing = warm_up.actions(settings, grammars=True, behind=False)
    now, later = warm_up.actions(settings, grammars=True, behind=True)
    assert nothing == [] and len(now) + len(later) == len(whole)
    assert [*dict.fromkeys(kind for kind, _ in later)] == kinds
    assert [action for action in whole if action in now] == now  # in the same order


def test_who_needs_what_is_compiled_behind_waits_and_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = threading.Event()
    compile_one = jax.stages.Lowered.compile

    def compile_later(*args: Any) -> Any:
        assert waits.wait(100)
        return compile_one(*args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_later)
    weights = weights_of(EVERYTHING)
    prompt = [1, 2, 3]
    asked: dict[str, dict[str, Any]] = {
        "options": dict(prompt=prompt, max_new_tokens=9, frequency_penalty=0.5),
        "a grammar": dict(prompt=prompt, max_new_tokens=9, matcher=Cycle()),
        "a prompt in pieces": dict(prompt=prompt * 3, max_new_tokens=9),
        "no drafts": dict(prompt=prompt, max_new_tokens=9, max_drafts=0),
    }
    with lm.EngineDriver(EVERYTHING, *weights) as served:
        progress: list[int] = []
        served.warm_up(lambda done, _: progress.append(done), grammars=True, behind=True)
        assert progress[-1] == 3  # a prompt, a step, and `release`
        ids = {name: served.submit(**own) for name, own in asked.items()}
        updates: list[lm.RequestUpdate] = []
        while served.num_queued > 3 or served.num_running:
            updates += served.step()
        ended = {update.request_id for update in updates if update.finish_reason is not None}
        assert ended == {ids["a prompt in pieces"]}
        waits.set()
        found = run(served, updates)
        texts = {name: found[ids[name]].token_ids for name in asked}
        truths = {name: greedy_truth(own) for name, own in asked.items()}
        assert texts["a grammar"] == constrained_truth(prompt, 9)
        assert texts["a prompt in pieces"] == truths["a prompt in pieces"]
        assert texts["no drafts"] == truths["no drafts"] != texts["options"]
        while served._warm_up.lacking:
            served.step()
        again = lm.EngineDriver(EVERYTHING, *weights)
        with compilations() as names:
            served.warm_up(grammars=True)
            again.submit(**asked["options"])
            ((_, one),) = run(again).items()
        assert one.token_ids == texts["options"]
        assert names == []
