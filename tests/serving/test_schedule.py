"""What the schedule says: a table, and traffic that plain Python carries out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from upper_floor import schedule

from jax_specdec import lm

from . import engines
from .engines import LONGEST, K

# Reads four prompts of two tokens a call, or eight tokens of one.
SMALL, LARGE = 2, 8
ENGINE = dataclasses.replace(engines.TABLE, prefill_sizes=(SMALL, LARGE), request_options=True)
BUDGET = dict(engine=dataclasses.replace(ENGINE, draft_budget=(0, 2)))
FIXED = dict(engine=dataclasses.replace(ENGINE, request_options=False))
ChunkedPrefill, Read, Step, Traffic = (
    schedule.ChunkedPrefill, schedule.Read, schedule.Step, schedule.Traffic
)  # fmt: skip
LATENCY = schedule.Settings(max_steps_ahead=1, max_prefills=1, chunk_size=SMALL)
THROUGHPUT = LATENCY._replace(max_prefills=None, chunk_size=LARGE)
WITHIN = LATENCY._replace(chunk_size=LARGE, prompts_in_steps=True)
NARROW, EVEN = LATENCY._replace(step_widths=(1, 2)), LATENCY._replace(step_widths=(2,))


def request(
    request_id: int, length: int = 2, *, budget: int = 5, failures: int = 0, **options: Any
) -> schedule.ServedRequest:
    asked = lm.RequestOptions(max_new_tokens=budget, **options)
    given = request_id, [0] * length, length, length, asked
    return schedule.ServedRequest(*given, num_failures=failures)


def ids(group: dict[int, schedule.ServedRequest]) -> list[int]:
    return [one.request_id for one in group.values()]


def said(action: schedule.Action) -> tuple[Any, ...]:
    """Who takes part in which step, with how many drafts; and who is read, from where to where."""
    step: Any = ()
    match action:
        case schedule.Wait():
            return ()
        case schedule.Masked(running, limits, slots):
            return ids(running), "masked", [*limits.values()], *([slots] if slots else [])
        case Step(running, prompts, all_neutral, num_drafts, limits, slots):
            program = "neutral" if all_neutral else "any"
            step = ids(running), program, [*limits] or num_drafts, *([slots] if slots else [])
        case Read(prompts):
            pass
    if not prompts.group:
        return step
    (start,), (end,) = {*prompts.start}, {*prompts.end}
    return *step, ids(prompts.group), start, end


R = [request(i) for i in range(9)]
SPENT, DRAFTLESS, ASKS = request(10, budget=1), request(11, max_drafts=0), request(12, top_k=2)
FAILED, FAILS, MIDDLE, LONG = (
    request(13, failures=1), request(14, failures=2), request(15, 5), request(16, 30)
)  # fmt: skip
GRAMMAR = request(17)._replace(matching=object())
RUNS, RUN_LONG, AHEAD = {0: R[0]}, {0: R[0], 1: LONG}, {0: 0, 1: 10}
CHUNKED = ChunkedPrefill(slot=1, num_read=2, waits=True)
FIRST = ([1], 0, SMALL)
PLANS: dict[str, tuple[schedule.Settings, dict[str, Any], tuple[Any, ...]]] = {
    # Who is read.
    "nobody runs: a program of one size": (LATENCY, dict(waiting=R[:5]), ([0, 1, 2, 3], 0, SMALL)),
    "somebody runs: one chunk": (LATENCY, dict(slots=RUNS, waiting=R[1:4]), FIRST),
    "as many as are free": (THROUGHPUT, dict(slots=RUNS, waiting=R[1:6]), ([1, 2, 3], 0, SMALL)),
    "others of its size": (THROUGHPUT, dict(waiting=[R[0], MIDDLE, R[1]]), ([0, 1], 0, SMALL)),
    "none from behind the free slots": (
        THROUGHPUT, dict(slots={0: R[0], 1: R[2]}, waiting=[R[1], MIDDLE, R[3]]), FIRST),
    "those that return": (
        LATENCY, dict(slots=RUNS, returning=[R[5]], waiting=R[1:3]), ([5], 0, SMALL)),
    "alone after two failures": (THROUGHPUT, dict(waiting=[FAILS, R[0]]), ([14], 0, SMALL)),
    "with others after one": (THROUGHPUT, dict(waiting=[FAILED, R[0]]), ([13, 0], 0, SMALL)),
    "not with others": (THROUGHPUT, dict(waiting=[R[0], FAILS, R[1]]), ([0, 1], 0, SMALL)),
    "a chunk": (LATENCY, dict(slots=RUNS, waiting=[LONG, R[1]]), ([16], 0, SMALL)),
    "nobody runs: a large chunk": (LATENCY, dict(waiting=[LONG]), ([16], 0, LARGE)),
    "its next chunk": (LATENCY, dict(slots=RUN_LONG, prefill=CHUNKED), ([16], 2, 4)),
    "nobody runs: a small chunk near the end": (
        LATENCY, dict(slots={1: request(18, 39)}, prefill=CHUNKED._replace(num_read=34)),
        ([18], 34, 36)),
    "a shorter prompt before the next chunk": (
        LATENCY, dict(slots=RUN_LONG, waiting=[MIDDLE, R[1]], prefill=CHUNKED), FIRST),
    "the next chunk behind a shorter prompt": (
        LATENCY, dict(slots=RUN_LONG, waiting=R[1:2], prefill=CHUNKED._replace(waits=False)),
        ([16], 2, 4)),
    "no second long prompt": (
        LATENCY, dict(slots=RUN_LONG, waiting=[MIDDLE], prefill=CHUNKED), ([16], 2, 4)),
    "the client with the fewest": (
        LATENCY, dict(slots=RUNS, waiting=[R[2], R[4], R[1]], client_of=lambda i: i % 2), FIRST),
    "the client that waits longest": (
        LATENCY, dict(slots=RUNS, waiting=[R[1], R[2], R[5]], client_of=lambda i: i % 4), FIRST),
    "clients in turn": (
        THROUGHPUT, dict(slots={0: R[7], 1: R[8]}, waiting=[R[2], R[4], R[1]],
                         client_of=lambda i: i % 2), ([2, 1], 0, SMALL)),
    "within a step": (
        WITHIN, dict(slots=RUNS, waiting=R[1:6]), ([0], "any", None, [1, 2, 3], 0, SMALL)),
    "a chunk within a step": (
        WITHIN, dict(slots=RUN_LONG, prefill=CHUNKED), ([0], "any", None, [16], 2, 10)),
    "within a step of most drafts": (
        WITHIN, dict(slots={1: DRAFTLESS}, waiting=R[1:2]) | BUDGET, ([11], "any", K, *FIRST)),
    "between, as nobody would run": (
        WITHIN, dict(slots={1: SPENT}, waiting=R[1:2], ahead=[AHEAD]), FIRST),
    "between, beside a grammar": (WITHIN, dict(slots={0: GRAMMAR}, waiting=R[1:2]), FIRST),
    "between, as it has failed": (WITHIN, dict(slots=RUNS, waiting=[FAILED]), ([13], 0, SMALL)),
    # Which step.
    "nothing": (LATENCY, {}, ()),
    "K drafts": (LATENCY, dict(slots=RUNS), ([0], "neutral", [K])),
    "an engine without options": (LATENCY, dict(slots=RUNS) | FIXED, ([0], "any", [K])),
    "one ahead, and one to read": (
        LATENCY, dict(slots=RUNS, ahead=[AHEAD]), ([0], "neutral", [K])),
    "no more ahead": (LATENCY, dict(slots=RUNS, ahead=[AHEAD] * 2), ()),
    "no more where updates wait": (LATENCY, dict(slots=RUNS, ahead=[AHEAD], has_updates=True), ()),
    "no more ahead of failures": (LATENCY, dict(slots={0: FAILED}, ahead=[AHEAD]), ()),
    "no more ahead of a grammar": (LATENCY, dict(slots={0: GRAMMAR}, ahead=[AHEAD]), ()),
    "all budgets are spent": (LATENCY, dict(slots={1: SPENT}, ahead=[AHEAD]), ()),
    "another's was": (LATENCY, dict(slots={0: SPENT}, ahead=[AHEAD]), ([10], "neutral", [K])),
    "one is left": (
        LATENCY, dict(slots={0: R[0], 1: SPENT}, ahead=[AHEAD]), ([0, 10], "neutral", [K, K])),
    "options": (LATENCY, dict(slots={0: R[0], 1: ASKS}), ([0, 12], "any", [K, K])),
    "nobody may draft": (LATENCY, dict(slots={1: DRAFTLESS}), ([11], "any", 0)),
    "the same in a budget": (LATENCY, dict(slots={1: DRAFTLESS}) | BUDGET, ([11], "neutral", 0)),
    "somebody may": (
        LATENCY, dict(slots={0: R[0], 1: DRAFTLESS}) | BUDGET, ([0, 11], "neutral", [K, 0])),
    "a grammar": (LATENCY, dict(slots={0: R[0], 1: GRAMMAR}), ([0, 17], "masked", [K, K])),
    # Of which slots.
    "one": (NARROW, dict(slots={2: R[0]}), ([0], "neutral", [K], (2,))),
    "two": (NARROW, dict(slots={3: R[1], 0: R[0]}), ([1, 0], "neutral", [K, K], (0, 3))),
    "one, and an empty one": (EVEN, dict(slots={2: R[0]}), ([0], "neutral", [K], (0, 2))),
    "one, and one that is read": (
        EVEN, dict(slots={0: R[0], 1: LONG}, prefill=CHUNKED, left=0),
        ([0], "neutral", [K], (0, 1))),
    "all, as three are busy": (
        NARROW, dict(slots={0: R[0], 1: R[1], 3: R[2]}), ([0, 1, 2], "neutral", [K] * 3)),
    "one, with options": (NARROW, dict(slots={1: ASKS}), ([12], "any", [K], (1,))),
    "one, with a grammar": (NARROW, dict(slots={1: GRAMMAR}), ([17], "masked", [K], (1,))),
    "all, as it has a prompt": (
        WITHIN._replace(step_widths=(1, 2)), dict(slots=RUNS, waiting=R[1:2]),
        ([0], "any", None, *FIRST)),
    "all, as nobody may draft": (NARROW, dict(slots={1: DRAFTLESS}), ([11], "any", 0)),
    "one, of a budget": (
        NARROW, dict(slots={1: DRAFTLESS}) | BUDGET, ([11], "neutral", 0, (1,))),
    # What follows a call that has read prompts, where `left` more may.
    "its step": (LATENCY, dict(slots=RUNS, waiting=R[1:2], left=0), ([0], "neutral", [K])),
    "another call": (LATENCY, dict(slots=RUNS, waiting=R[1:2], left=1), FIRST),
    "another, as nobody runs": (
        LATENCY, dict(slots={1: LONG}, prefill=CHUNKED, left=0), ([16], 2, 10)),
    "not within": (WITHIN, dict(slots=RUNS, waiting=R[1:2], left=0), ([0], "neutral", [K])),
    "not who waits for a chunk": (
        LATENCY, dict(slots=RUN_LONG, prefill=CHUNKED, left=0), ([0], "neutral", [K])),
    "a new grammar's step, behind one": (
        LATENCY, dict(slots={0: R[0], 1: GRAMMAR}, ahead=[AHEAD], left=0),
        ([0, 17], "masked", [K, K])),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "known", "expected"), PLANS.values(), ids=PLANS)
def test_a_plan_is(settings: schedule.Settings, known: dict[str, Any], expected: Any) -> None:
    engine = known.get("engine", ENGINE)
    traffic = Traffic(**{name: x for name, x in known.items() if name in Traffic._fields})
    after = Read(schedule.Prompts({}, (), 0, None), known["left"]) if "left" in known else None
    assert said(schedule.plan(engine, settings, traffic, after)) == expected


@pytest.mark.parametrize(
    ("platform", "num_slots", "widths"),
    [
        ("cpu", 7, ()), ("cpu", 8, (1, 2, 4)), ("cpu", 31, (1, 2, 4, 8)),
        ("gpu", 8, (1,)), ("gpu", 32, (1, 8)), ("gpu", 64, (1, 8, 32)), ("tpu", 64, ()),
    ],
)  # fmt: skip
def test_widths_that_pay_are(platform: str, num_slots: int, widths: tuple[int, ...]) -> None:
    assert schedule.default_widths(platform, num_slots) == widths


def test_there_is_a_program_for_each_step_of_some_slots() -> None:
    """Of what `next_step` gives slots to, but for grammars: those are compiled behind alone."""
    for engine in (ENGINE, BUDGET["engine"], FIXED["engine"]):
        given = dict(prompts_in_steps=True, grammars=True, step_widths=(1, 2))
        steps = [x for x in schedule.rehearsal(engine, **given) if isinstance(x, Step) and x.slots]
        kinds = [(x.all_neutral, x.num_drafts, len(x.slots)) for x in steps]
        neutral = {False, engine.request_options}
        budget = engine.draft_budget or (None,)
        assert sorted(map(str, kinds)) == sorted(
            str(kind) for kind in itertools.product(neutral, budget, (1, 2))
        )


def test_beside_a_call_that_reads_what_has_failed_nothing_is_read() -> None:
    traffic = Traffic(slots=RUNS, waiting=[FAILED, *R[1:3]])
    action = schedule.plan(ENGINE, WITHIN._replace(max_prefills=None), traffic)
    assert isinstance(action, Read) and action.left == 0


@pytest.mark.parametrize("most", [7, 11])
def test_chunks_follow_one_another_and_end_within_the_longest_prompt(most: int) -> None:
    for length in range(12, LONGEST + 1):
        rest: schedule.ChunkedPrefill | None = ChunkedPrefill(slot=0)
        end = 0
        while rest is not None:
            chunk = rest.next_chunk(ENGINE, request(0, length), most, usual=7)
            assert chunk.start[0] <= end < chunk.end[0] <= LONGEST
            (end,), rest = chunk.end, chunk.rest
        assert end >= length - 1


# Prefixes. Texts A and B differ in all tokens; `of` is the record of a slot that holds some.
WARM = dataclasses.replace(ENGINE, max_length=256, prefill_sizes=(64, 128), prefix_caching=True)
EXACT = dataclasses.replace(WARM, prefill_sizes=(64,), exact=True)
BOTH = lm.FirstOf(lm.SuffixDrafter(), WARM.drafter)


@dataclasses.dataclass(frozen=True)
class KeepsPrompts(lm.ModelDrafter):
    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(kept_rows="prompts")


OF_PROMPTS = KeepsPrompts(WARM.drafter.model)
LOOKUP = dataclasses.replace(WARM, drafter=lm.NGramDrafter())
A, B = [*range(256)], [*range(1000, 1256)]


def asks(request_id: int, tokens: list[int], **options: Any) -> schedule.ServedRequest:
    asked = lm.RequestOptions(max_new_tokens=5, **options)
    return schedule.ServedRequest(request_id, tokens, len(tokens), len(tokens), asked)


def runs(tokens: list[int], num_rows: int, **options: Any) -> schedule.ServedRequest:
    return asks(99, tokens, **options)._replace(num_rows=num_rows, most_rows=256)


def of(tokens: list[int], num_rows: int = 200, salt: str | None = None) -> schedule.KeptRows:
    return schedule.KeptRows(tokens, num_rows, salt)


LONG_A = runs(A[:250], num_rows=128)
READING = dict(slots={0: LONG_A}, prefill=ChunkedPrefill(0, num_read=128, waits=True))
THREE = [asks(i, A[:60] + [2000 + i] * 4) for i in range(3)]
# Of each that is read: its id, its slot, where reading begins; how much is read; what is copied.
PLACES: dict[str, tuple[dict[str, Any], list[tuple[int, int, int]], int, list[tuple[int, int]]]] = {
    "an empty slot first": (dict(kept={0: of(B), 2: of(B)}), [(0, 1, 0)], 128, []),
    "then the longest unused": (
        dict(kept={2: of(B), 0: of(B), 1: of(B), 3: of(B)}), [(0, 2, 0)], 128, []),
    "what goes on": (dict(kept={2: of(A[:90], 80)}), [(0, 2, 80)], 64, []),
    "what goes on, all but a few tokens": (
        dict(kept={2: of(A[:61] + B, 91)}), [(0, 2, 60)], 64, []),
    "what only begins alike": (dict(kept={2: of(A[:61] + B, 92)}), [(0, 0, 60)], 64, [(2, 0)]),
    "in the place of less": (
        dict(kept={1: of(B, 69), 0: of(B), 2: of(A[:61] + B, 130), 3: of(B)}),
        [(0, 1, 60)], 64, [(2, 1)]),
    "not in the place of as much": (
        dict(kept={1: of(B, 70), 0: of(B), 2: of(A[:61] + B, 130), 3: of(B)}),
        [(0, 2, 60)], 64, []),
    "the longest of several": (
        dict(kept={1: of(A[:51] + B, 60), 3: of(A[:71] + B, 80), 0: of(B)}), [(0, 3, 70)], 64, []),
    "of equals the longest unused": (
        dict(kept={3: of(A[:90], 80), 1: of(A[:90], 80)}), [(0, 3, 80)], 64, []),
    "its own text": (dict(kept={2: of(A[:100], 99)}), [(0, 2, 98)], 64, []),
    "from 32 tokens on": (dict(kept={2: of(A[:33] + B, 60)}), [(0, 2, 32)], 128, []),
    "below 32 none": (dict(kept={2: of(A[:32] + B, 60)}), [(0, 0, 0)], 128, []),
    "none of other salt": (dict(kept={2: of(A, salt="x")}), [(0, 0, 0)], 128, []),
    "of its own salt": (
        dict(kept={2: of(A, 110, "x")}, waiting=[asks(0, A[:100], cache_salt="x")]),
        [(0, 2, 98)], 64, []),
    "of one that runs": (dict(slots={1: runs(A, 90)}), [(0, 0, 90)], 64, [(1, 0)]),
    "of one that runs, none of other salt": (
        dict(slots={1: runs(A, 90, cache_salt="x")}), [(0, 0, 0)], 64, []),
    "a free slot before one that runs": (
        dict(slots={1: runs(A, 90)}, kept={3: of(A[:95], 90)}), [(0, 3, 90)], 64, []),
    "back from the end of the longest": (
        dict(kept={2: of(A)}, waiting=[asks(0, A[:225] + B[:20])]), [(0, 2, 192)], 64, []),
    "the rest in chunks": (
        dict(kept={2: of(A[:61] + B, 80)}, waiting=[asks(0, A[:240])]), [(0, 2, 60)], 128, []),
    "several, each from its own": (
        dict(kept={2: of(A[:61] + B, 80), 3: of(B, 90)},
             waiting=[asks(0, A[:70]), asks(1, B[:99])]), [(0, 2, 60), (1, 3, 90)], 64, []),
    "only those of whom as much is left": (
        dict(kept={2: of(A[:61] + B, 80)}, waiting=[asks(0, A[:70]), asks(1, B[:99])]),
        [(0, 2, 60)], 64, []),
    "one of many that share": (dict(waiting=THREE), [(0, 0, 0)], 64, []),
    "then all others": (
        dict(slots={0: runs(THREE[0].tokens, 63)}, waiting=THREE[1:], most=128),
        [(1, 1, 59), (2, 2, 59)], 64, [(0, 1), (0, 2)]),
    "none while what it shares is read": (
        dict(waiting=[asks(0, A[:200])]) | READING, [(99, 0, 128)], 128, []),
    "what was read of it": (
        dict(waiting=[asks(0, A[:150] + B[:20])]) | READING, [(0, 1, 128)], 64, [(0, 1)]),
    "others beside it": (
        dict(waiting=[asks(0, A[:200]), asks(1, B[:50])]) | READING, [(1, 1, 0)], 64, []),
    "exact: whole chunks": (
        dict(engine=EXACT, kept={2: of(A, 128)}, waiting=[asks(0, A[:190])]),
        [(0, 2, 128)], 64, []),
    "exact: not the chunk of its last token": (
        dict(engine=EXACT, kept={2: of(A, 64)}, waiting=[asks(0, A[:129])]),
        [(0, 2, 64)], 64, []),
    "exact: no less than a chunk": (
        dict(engine=EXACT, kept={2: of(A[:64] + B, 128)}, waiting=[asks(0, A[:80])]),
        [(0, 0, 0)], 64, []),
    "off": (dict(engine=ENGINE, kept={2: of(A)}, waiting=[R[0]]), [(0, 0, 0)], SMALL, []),
}  # fmt: skip


@pytest.mark.parametrize(("known", "read", "size", "copies"), PLACES.values(), ids=PLACES)
def test_a_prompt_is_read_at(known: dict[str, Any], read: Any, size: int, copies: Any) -> None:
    known = dict(waiting=[asks(0, A[:100])]) | known
    traffic = Traffic(**{name: x for name, x in known.items() if name in Traffic._fields})
    settings = LATENCY._replace(chunk_size=known.get("most", 64))
    action = schedule.plan(known.get("engine", WARM), settings, traffic)
    assert isinstance(action, Read)
    prompts = action.prompts
    found = zip(ids(prompts.group), prompts.group, prompts.start, strict=True)
    assert ([*found], prompts.size, [*prompts.copies]) == (read, size, copies)


@pytest.mark.parametrize(
    ("engine", "request_", "rows", "later"),
    [
        (dataclasses.replace(WARM, prefix_caching=False), asks(0, A[:100]), 0, 0),
        (WARM, asks(0, A[:100]), 99, 119),
        (WARM, asks(0, A[:100])._replace(matching=object()), 99, 119),
        (dataclasses.replace(WARM, drafter=BOTH), asks(0, A[:100]), 99, 119),
        (dataclasses.replace(WARM, drafter=OF_PROMPTS), asks(0, A[:100]), 99, 99),
        (LOOKUP, asks(0, A[:100])._replace(matching=object()), 99, 119),
        (EXACT, asks(0, A[:129]), 128, 128),
        (EXACT, asks(0, A[:128]), 64, 64),
    ],
    ids=[
        "off",
        "a text",
        "beside a grammar",
        "a lookup's drafts",
        "a drafter that keeps prompts",
        "a lookup",
        "exact",
        "exact: not its last chunk",
    ],  # fmt: skip
)
def test_the_rows_that_a_request_leaves_are(
    engine: lm.Engine, request_: schedule.ServedRequest, rows: int, later: int
) -> None:
    action = schedule.plan(engine, THROUGHPUT, Traffic(waiting=[request_]))
    one = action.prompts.group[0].with_rows(request_.length)
    assert one.num_rows == rows
    assert one.with_tokens([7] * 20, 0.0).with_tokens([8], 0.0).num_rows == later


@pytest.mark.parametrize(("admitted", "count"), [(0.0, 98), (1.0, 7)])
def test_what_a_request_has_read_itself_is_not_reused(admitted: float, count: int) -> None:
    """Preempted in its prompt, it begins with its own rows."""
    one = asks(0, A[:100])
    one = one._replace(timing=one.timing._replace(admitted=admitted), num_reused=7)
    traffic = Traffic(waiting=[one], kept={2: of(A[:100], 99)})
    prompts = schedule.plan(WARM, LATENCY._replace(chunk_size=64), traffic).prompts
    assert (prompts.start, prompts.group[2].num_reused) == ([98], count)


def test_a_common_prefix_is_found() -> None:
    for count in range(12):
        assert schedule.common_prefix([1] * count + [2] * 9, [1] * 30, most=10) == min(count, 10)


# Traffic


def served(
    settings: schedule.Settings, seed: int, lengths: Sequence[int]
) -> list[tuple[bool, schedule.Action]]:
    """The actions for 60 requests that come at random, and whether somebody ran at each.

    Plain Python carries them out. A step emits one token for each request, and is read some time.
    """
    rng, traffic, done = np.random.default_rng(seed), Traffic(), []
    new = [request(i, int(rng.choice(lengths)), budget=int(rng.integers(1, 9))) for i in range(60)]
    while new or traffic.waiting or traffic.slots:
        count = rng.poisson(1.5)
        traffic = traffic._replace(waiting=[*traffic.waiting, *new[:count]])
        del new[:count]
        action = None
        while action is None or isinstance(action, Read):
            action = schedule.plan(ENGINE, settings, traffic, action)
            done.append((bool(traffic.running), action))
            if isinstance(action, Step):
                ahead = {slot: one.request_id for slot, one in action.running.items()}
                traffic = traffic._replace(ahead=[*traffic.ahead, ahead])
            if isinstance(action, Read | Step):
                group, rest = action.prompts.group, action.prompts.rest
                waiting = [one for one in traffic.waiting if one not in group.values()]
                slots = {**traffic.slots, **group}
                traffic = traffic._replace(slots=slots, waiting=waiting, prefill=rest)
        if len(traffic.ahead) > rng.integers(2):
            oldest, *later = traffic.ahead
            longer = {
                slot: one._replace(length=one.length + (oldest.get(slot) == one.request_id))
                for slot, one in traffic.slots.items()
            }
            slots = {slot: one for slot, one in longer.items() if one.budget_left}
            traffic = traffic._replace(slots=slots, ahead=later)
    return done


def reads(done: list[tuple[bool, schedule.Action]]) -> list[schedule.Prompts]:
    found = [action.prompts for _, action in done if isinstance(action, Read | Step)]
    return [prompts for prompts in found if prompts.group]


def program(action: Any) -> tuple[Any, ...]:
    """What is compiled for an action that reads prompts or dispatches a step."""
    shape = len(action.prompts.group) > 1, action.prompts.size
    return type(action), getattr(action, "all_neutral", 0), getattr(action, "num_drafts", 0), shape


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("policy", [LATENCY, LATENCY._replace(max_prefills=2), THROUGHPUT, WITHIN])
def test_prompts_are_read_once_and_steps_wait_for_few_tokens(
    policy: schedule.Settings, ahead: int
) -> None:
    done = served(policy._replace(max_steps_ahead=ahead), ahead, [1, 2, 3, 8, 9, 20, 31])
    ends = dict.fromkeys(range(60), 0)
    for prompts in reads(done):
        for i, start, end in zip(ids(prompts.group), prompts.start, prompts.end, strict=True):
            assert start <= ends[i] < end <= LONGEST
            ends[i] = end
    assert {i for _, one in done if isinstance(one, Step) for i in ids(one.running)} == {*ends}
    rehearsed = schedule.rehearsal(ENGINE, prompts_in_steps=policy is WITHIN, grammars=False)
    needed = {program(action) for _, action in done if not isinstance(action, schedule.Wait)}
    assert needed <= {program(action) for action in rehearsed}
    for is_read, group in itertools.groupby(done, key=lambda one: isinstance(one[1], Read)):
        calls = [action.prompts for has_running, action in group if is_read and has_running]
        assert len(calls) <= (policy.max_prefills or np.inf)
        assert all(len(one.group) * one.size <= policy.chunk_size for one in calls)


@pytest.mark.parametrize("seed", range(3))
def test_prompts_are_read_in_order_and_chunks_alternate_with_short_ones(seed: int) -> None:
    found = reads(served(LATENCY, seed, [1, 2, 2, 2, 9, 20]))
    for is_chunk in (False, True):
        came = [i for one in found if one.is_chunk == is_chunk for i in ids(one.group)]
        assert came == sorted(came)
    pairs = [pair for pair in itertools.pairwise(found) if not pair[1].is_chunk]
    beside_long = [before.is_chunk for before, one in pairs if one.rest is not None]
    assert len(beside_long) > 9 and all(beside_long)
