"""`prefix_caching=True`: what an earlier request left in a slot, against reading all anew.

A fresh driver of the same engine has nothing to begin with, so it reads all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from upper_floor import programs, schedule

import jax_specdec as sd
from jax_specdec import lm

from . import engines
from .engines import Finished, alone, run
from .grammars import Follows
from .tiny import Scripted, Trigram

pytestmark = [pytest.mark.newest, pytest.mark.xdist_group("prefixes")]

# Its logits and drafts say where a row is not that of the text: each needs the token before.
TABLE = dataclasses.replace(
    engines.TABLE, max_length=160, prefill_sizes=(32, 64), prefix_caching=True
)
K = 4
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")
TARGET, DRAFT = lm.load_embedded_pair()
SUFFIX = lm.SuffixDrafter()


@functools.cache
def drafting(name: str) -> tuple[lm.Drafter, Any]:
    """A drafter and its weights."""
    if name == "model":
        return lm.ModelDrafter(DRAFT.model), DRAFT.params
    if name == "n-grams":
        return lm.NGramDrafter(min_ngram=1), None
    if name == "pieces":  # the draft model has no vowels, which it reads as two letters
        ids = [i for i in range(256) if chr(i) not in "aeiou"]
        pieces = np.array(
            [[i, -1] if i in ids else [ord("b"), i + 1] for i in range(256)], np.int32
        )
        return lm.RetokenizingDrafter(DRAFT.model, ids=ids), lm.RetokenizedParams(
            DRAFT.params, jax.numpy.asarray(pieces)
        )
    head, params = lm.load_embedded_head(TARGET, "dspark" if name == "DSpark" else "eagle3")
    if name == "DSpark":
        return lm.BlockDrafter(head), params
    if name == "tree":
        return lm.Eagle3Drafter(head, tree_depth=3), params
    if name == "both":
        return lm.FirstOf(SUFFIX, lm.Eagle3Drafter(head)), (SUFFIX.init_params(), params)
    return lm.Eagle3Drafter(head), params


def driver_of(name: str, **changes: Any) -> lm.EngineDriver:
    drafter, params = drafting(name)
    settings: dict[str, Any] = dict(
        num_slots=3, max_length=160, prefill_sizes=(32,), prefix_caching=True
    )
    engine = lm.Engine(TARGET.model, drafter, CONFIG, **settings | changes)
    return lm.EngineDriver(engine, TARGET.params, params)


def fresh(driver: lm.EngineDriver) -> lm.EngineDriver:
    return lm.EngineDriver(driver.engine, *driver.weights, max_steps_ahead=0)


def said(found: Finished) -> list[tuple[Any, ...]]:
    """Of each step the tokens, their bits, and how many drafts were accepted of how many."""
    return [
        (one.token_ids, one.num_proposed, one.num_accepted, bits_of(one)) for one in found.updates
    ]


def bits_of(update: lm.RequestUpdate) -> bytes:
    return b"" if update.logprobs is None else np.asarray(update.logprobs.logprobs).tobytes()


def cached(driver: lm.EngineDriver, text: list[int], count: int) -> list[np.ndarray]:
    """What both models remember of the first tokens of a text, out of the slot that holds it."""
    state, engine = driver.state, driver.engine
    held = np.asarray(state.batch.token_ids)[:, : len(text)]
    (slot, *_) = np.flatnonzero((held == text).all(axis=1))
    found = []
    for leaf in jax.tree.leaves((state.target_cache, state.draft_cache)):
        axis = next((i for i, n in enumerate(leaf.shape) if n >= engine.buffer_length), None)
        if axis is not None:
            each = np.asarray(leaf).reshape(engine.num_slots, -1, *leaf.shape[1:])[slot]
            found.append(np.take(each, range(count), axis=axis))
    return found


def assert_as_fresh(
    driver: lm.EngineDriver, request: dict[str, Any], least: int, **close: float
) -> list[int]:
    """A request begins with so many tokens of others, and all is as without; returns its text."""
    found, wanted = alone(driver, request), alone(cold := fresh(driver), request)
    assert found.updates[0].num_reused >= least
    assert wanted.updates[0].num_reused == 0
    assert said(found) == said(wanted)
    text = request["prompt"] + found.token_ids
    count = len(text) - len(found.updates[-1].token_ids) - 1
    pairs = zip(cached(driver, text, count), cached(cold, text, count), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, **dict(atol=1e-4) | close)
    return text


def ids(text: str) -> list[int]:
    return lm.encode_bytes(text)


BEGIN = ids("import os\n\ndef join(first, second):\n    return os.path.")
NEXT = ids("\n\ndef split(path):\n    ")
GREEDY = dict(max_new_tokens=20)
SAMPLED = dict(max_new_tokens=20, temperature=0.8, seed=7)
DRAFTERS = [
    *(pytest.param(x, marks=pytest.mark.long) for x in ("both", "pieces")),
    *(
        pytest.param(x, marks=pytest.mark.slow)
        for x in ("EAGLE-3", "model", "DSpark", "tree", "n-grams")
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_conversations_that_branch_are_as_if_read_anew(name: str) -> None:
    driver = driver_of(name)
    one = assert_as_fresh(driver, dict(prompt=BEGIN) | GREEDY, least=0)
    two = assert_as_fresh(driver, dict(prompt=one + NEXT) | SAMPLED, least=len(one) - K - 3)
    # Another token where the kept text goes on: what is known of the one before it is not right.
    other = [*two[:70], (two[70] + 1) % 256, *NEXT]
    assert_as_fresh(driver, dict(prompt=other) | GREEDY, least=69)
    assert_as_fresh(driver, dict(prompt=[*BEGIN[:40], *NEXT, *BEGIN[:8]]) | SAMPLED, least=38)
    assert_as_fresh(driver, dict(prompt=two) | GREEDY, least=len(two) - K - 3)
    stats = driver.serving_stats()
    assert 220 < stats.num_reused_tokens < stats.num_prompt_tokens


@pytest.mark.parametrize("name", ["EAGLE-3", pytest.param("model", marks=pytest.mark.slow)])
def test_requests_beside_each_other_share_one_prefix(name: str) -> None:
    """One reads it; rows are copied; one is cancelled, one preempted, and goes on from its own."""
    driver = driver_of(name)
    asked = [dict(prompt=[*BEGIN, *ids(f"{i}.")]) | SAMPLED for i in range(5)]
    numbers = [driver.submit(**one) for one in asked]
    updates = driver.step() + driver.step() + driver.step()
    driver.cancel(numbers[1])
    driver.preempt(numbers[0])
    found = run(driver, updates)
    for i, one in enumerate(asked):
        if i != 1:
            wanted = alone(fresh(driver), one)
            assert said(found[numbers[i]]) == said(wanted), i
            assert found[numbers[i]].updates[0].num_reused == (len(BEGIN) - 1 if i else 0)


def test_a_slot_that_is_copied_to_is_as_long_as_the_other_and_has_no_features() -> None:
    driver = driver_of("EAGLE-3")
    driver.submit(BEGIN, max_new_tokens=20)
    driver.step()
    assert driver.state.features.lengths[0] > 0
    copied = programs.copy(driver.engine, driver.state, np.array([1, 0], np.int32))
    assert (copied.features.lengths[0], copied.batch.lengths[0]) == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["EAGLE-3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("DSpark", "tree"))]
)
def test_a_step_that_reads_a_prompt_drafts_after_what_was_copied(name: str) -> None:
    """The slot has the length and the features of a short text that ended in the step before."""
    driver = driver_of(name, num_slots=2)
    driver.prompts_in_steps = True
    driver.max_steps_ahead = 0
    driver.submit(ids("x = "), max_new_tokens=3, max_drafts=0)
    updates = driver.step()
    driver.submit(BEGIN, max_new_tokens=40)
    updates += [*driver.step(), *driver.step()]  # it is read in two chunks
    assert updates[-1].finish_reason == "length" and driver._device.prefill is None
    asked = dict(prompt=[*BEGIN, *ids("1.")]) | SAMPLED
    number = driver.submit(**asked)
    found = run(driver, updates)[number]
    assert found.updates[0].num_reused == len(BEGIN) - 1
    assert said(found) == said(alone(cold := fresh(driver), asked))
    held = (cached(one, asked["prompt"], len(BEGIN)) for one in (driver, cold))
    for one, other in zip(*held, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EAGLE-3", "n-grams"])
def test_an_exact_engine_has_the_same_bits(name: str) -> None:
    driver = driver_of(name, exact=True, logprobs=sd.LogprobsConfig())
    one = assert_as_fresh(driver, dict(prompt=BEGIN) | SAMPLED, least=0)
    two = assert_as_fresh(driver, dict(prompt=one + NEXT) | GREEDY, least=32)
    assert_as_fresh(driver, dict(prompt=[*two[:66], *NEXT]) | SAMPLED, least=64)
    assert_as_fresh(driver, dict(prompt=two) | SAMPLED, least=64)


def table_driver(**settings: Any) -> lm.EngineDriver:
    return lm.EngineDriver(TABLE, *engines.weights_of(engines.TABLE), **settings)


RNG = np.random.default_rng(3)
TEXT = RNG.integers(0, engines.VOCAB, 60).tolist()
ASKED = dict(prompt=TEXT, max_new_tokens=6)


def reused(driver: lm.EngineDriver, **fields: Any) -> int:
    """How many tokens a request begins with, whose text is right."""
    request = ASKED | fields
    before = driver.serving_stats()
    found = alone(driver, request)
    assert found.token_ids == engines.greedy_truth(request)
    new = driver.serving_stats() - before
    number = found.updates[0].num_reused
    assert [one.num_reused for one in found.updates[1:]] == [0] * (len(found.updates) - 1)
    assert (new.num_prompt_tokens, new.num_reused_tokens) == (len(request["prompt"]), number)
    return number


def fails(patch: pytest.MonkeyPatch, name: str) -> None:
    """The next call of a program fails on the device."""
    right, left = getattr(programs, name), [1]

    def call(*args: Any, **named: Any) -> Any:
        if left:
            left.pop()
            raise JaxRuntimeError("no memory")
        return right(*args, **named)

    patch.setattr(programs, name, call)


def dropped(driver: lm.EngineDriver) -> None:
    """What an exception does."""
    driver._is_whole = False


@pytest.mark.parametrize("program", ["step", "admit", "release"])
def test_what_a_failed_call_leaves_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    driver = table_driver()
    assert (reused(driver), reused(driver)) == (0, 58)
    other = driver.submit([1] * 50, max_new_tokens=9)
    driver.step()
    fails(monkeypatch, program)
    driver.cancel(other)
    run(driver)
    if program != "release":
        driver.submit([2] * 50, max_new_tokens=2)
        run(driver)
    assert driver.serving_stats().num_failed_calls == 1
    assert (reused(driver), reused(driver)) == (0, 58)
    dropped(driver)
    assert reused(driver) == 0


def test_what_a_step_writes_in_other_slots_comes_after_what_was_copied() -> None:
    """Slot 1 held a short text, slot 2 none; both models remember the tokens themselves."""
    driver = table_driver(max_steps_ahead=0, prompts_in_steps=True)
    driver.submit(TEXT, max_new_tokens=40)
    driver.step()
    driver.submit([1], max_new_tokens=2)
    updates = [*driver.step(), *driver.step(), *driver.step()]
    assert driver.num_running == 1
    asked = [dict(prompt=[*TEXT[:50], i], max_new_tokens=6) for i in range(2)]
    numbers = [driver.submit(**one) for one in asked]
    found = run(driver, updates)
    for number, one in zip(numbers, asked, strict=True):
        assert found[number].updates[0].num_reused == 49
        assert found[number].token_ids == engines.greedy_truth(one)
        for held in cached(driver, one["prompt"], 51):
            np.testing.assert_array_equal(held.ravel(), one["prompt"])


def test_a_slot_is_copied_before_another_is_copied_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two slots that are longest unused, one holds what the request in the other begins with."""
    driver = table_driver(max_steps_ahead=0, max_prefills=None)
    alone(driver, dict(prompt=[1], max_new_tokens=2))
    alone(driver, dict(prompt=TEXT, max_new_tokens=12))
    for prompt in (TEXT[::-1], [2]):
        driver.submit(prompt, max_new_tokens=60)
    updates = driver.step()
    asked = [dict(prompt=[*text, 0, 1], max_new_tokens=9) for text in (TEXT[:33], TEXT[:9:-1])]
    numbers = [driver.submit(**one) for one in asked]
    pairs, copy = [], programs.copy

    def noting(engine: lm.Engine, state: lm.DecodeState, slots: np.ndarray) -> lm.DecodeState:
        pairs.append(slots.tolist())
        return copy(engine, state, slots)

    monkeypatch.setattr(programs, "copy", noting)
    updates += driver.step()
    assert pairs == [[1, 0], [2, 1]] and driver.num_running == 4
    for one, start in zip(asked, (32, 49), strict=True):
        for held in cached(driver, one["prompt"], start):  # both models remember the tokens
            np.testing.assert_array_equal(held.ravel(), one["prompt"][:start])
    found = run(driver, updates)
    for number, one in zip(numbers, asked, strict=True):
        assert found[number].token_ids == engines.greedy_truth(one)


@pytest.mark.parametrize("reread", [False, True])
def test_what_other_weights_wrote_is_forgotten(reread: bool) -> None:
    driver = table_driver()
    reused(driver, prompt=[1, *TEXT])
    driver.submit([*TEXT[:50], 1], max_new_tokens=20)
    driver.step()
    driver.set_params(driver.weights[0], reread=reread)
    driver.submit([1, *TEXT], max_new_tokens=2)
    other = driver.submit(TEXT, max_new_tokens=20)
    found = run(driver)
    assert [found[number].updates[0].num_reused for number in (2, other)] == [0, 49 * reread]
    assert reused(driver, prompt=[*TEXT[:50], 1, 2]) == 49 + reread


def test_other_salts_share_nothing() -> None:
    driver = table_driver()
    assert [reused(driver, cache_salt=salt) for salt in ("x", "y", None, "x", "y", None)] == [
        0, 0, 0, 58, 58, 58,
    ]  # fmt: skip


def test_what_could_not_be_verified_is_not_kept() -> None:
    table, draft = engines.weights_of(engines.TABLE)
    driver = lm.EngineDriver(TABLE, table.at[TEXT[-2], TEXT[-1]].set(np.nan), draft)
    for _ in range(2):
        found = alone(driver, ASKED)
        assert (found.finish_reason, found.updates[0].num_reused) == ("failed", 0)


@pytest.mark.long
def test_a_draft_model_reads_what_a_grammar_forced() -> None:
    with table_driver() as driver:
        one = alone(driver, ASKED | dict(matcher=Follows(lambda text: (len(text) % 5,))))
        assert one.token_ids == [0, 1, 2, 3, 4, 0]
        prompt = TEXT + one.token_ids
        for held in cached(driver, prompt, 62):  # both models remember the tokens themselves
            np.testing.assert_array_equal(held.ravel(), prompt[:62])
        assert reused(driver, prompt=prompt) == 62
        assert reused(driver, prompt=prompt) == 64


def served(seed: int, count: int, driver: lm.EngineDriver) -> None:
    """Conversations that branch, at random times; some are preempted, cancelled, interrupted."""
    rng = np.random.default_rng(seed)
    texts: list[tuple[str | None, list[int]]] = [(None, TEXT), ("x", TEXT)]
    asked: dict[int, tuple[str | None, dict[str, Any]]] = {}
    updates: list[lm.RequestUpdate] = []
    cancelled = set()
    while len(asked) < count or not driver.is_idle:
        for _ in range(rng.poisson(0.3) * (len(asked) < count)):
            salt, text = texts[-rng.integers(1, min(8, len(texts)) + 1)]
            text = text[: 100 if rng.random() < 0.5 else rng.integers(100)]
            prompt = [*text, *rng.integers(0, engines.VOCAB, rng.integers(1, 40)).tolist()]
            request: dict[str, Any] = dict(
                prompt=prompt,
                max_new_tokens=int(rng.integers(1, 160 - len(prompt))),
                temperature=float(rng.choice([0.0, 1.0])),
                seed=int(rng.integers(100)),
            )
            asked[driver.submit(**request, cache_salt=salt)] = salt, request
        number = int(rng.integers(count))
        match rng.integers(60):
            case 0 | 1:
                driver.preempt(number)
            case 2:
                cancelled |= {number} if driver.cancel(number) else set()
            case 3:
                dropped(driver)
        new = driver.step()
        updates += new
        for number in {one.request_id for one in new if one.finish_reason is not None}:
            salt, request = asked[number]
            found = engines.collect([one for one in updates if one.request_id == number])[number]
            first = next(one for one in found.updates if one.token_ids)
            shared = [
                schedule.common_prefix(text, request["prompt"], len(text))
                for own, text in texts
                if own == salt
            ]
            # Those that run, or were cancelled, are not in this list.
            running = [
                schedule.common_prefix(one["prompt"], request["prompt"], len(one["prompt"]))
                for other, (own, one) in asked.items()
                if own == salt and other != number
            ]
            assert first.num_reused <= max(shared + running)
            assert found.token_ids == text_of(driver.engine, **request)
            texts.append((salt, request["prompt"] + found.token_ids))
    ends = {one.request_id for one in updates if one.finish_reason is not None}
    assert ends == asked.keys() - cancelled


def text_of(engine: lm.Engine, **request: Any) -> list[int]:
    if request["temperature"] == 0:
        return engines.greedy_truth(request)
    return alone(fresh(table_driver()), request).token_ids


@pytest.mark.parametrize(
    ("seed", "ahead", "within"),
    [
        (0, 1, False),
        *(pytest.param(i, i % 3, i > 3, marks=pytest.mark.slow) for i in (1, 2, 3, 4, 5, 6)),
    ],
)
def test_conversations_at_random(seed: int, ahead: int, within: bool) -> None:
    driver = table_driver(max_steps_ahead=ahead, prompts_in_steps=within)
    driver.warm_up()
    alone(driver, ASKED)
    with engines.compilations() as names:
        served(seed, 15 if within else 40, driver)
    assert not names, "all was compiled by warm_up"
    stats = driver.serving_stats()
    assert stats.num_reused_tokens > stats.num_prompt_tokens / 8


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: dataclasses.replace(TABLE, prefix_caching=1), TypeError, "^prefix_caching must"),
        (
            lambda: dataclasses.replace(TABLE, drafter=Scripted(), prefill_sizes=(160,)),
            TypeError,
            "^drafter must keep rows for prefix_caching=True, but Scripted.serves says chunks=F",
        ),
        (
            lambda: dataclasses.replace(TABLE, drafter=Silent(TABLE.model)),
            TypeError,
            "^drafter must keep rows .* Silent.serves says chunks=True, kept_rows='none'",
        ),
        (
            lambda: dataclasses.replace(TABLE, model=Counts(TABLE.model.vocab_size)),
            ValueError,
            r"^model must have a cache whose arrays grow .* 'Counts.init_cache\(...\)\[1\]'",
        ),
        (lambda: lm.DrafterServes(kept_rows="all"), ValueError, "^serves.kept_rows must be"),
        (lambda: lm.RequestOptions(cache_salt=1), TypeError, "^cache_salt must be"),
    ],
)
def test_what_cannot_be_reused_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


class Counts(Trigram):
    """Counts what it reads."""

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return super().init_cache(batch_size, max_length), np.zeros(batch_size, np.int32)


def room(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def indexed(length: int) -> dict[str, Any]:
    return {"k": np.zeros((room(length, 64), 3)), "end_index": np.int32(0)}


def of_dtype(name: str) -> Any:
    return dataclasses.replace(TARGET.model, dtype=jax.numpy.dtype(name))


def on_two_devices() -> lm.models.TensorParallelLlama:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return lm.models.TensorParallelLlama(of_dtype("bfloat16"), mesh, "x")


# Functions, since a machine with one device has no mesh while this file is imported.
ROUNDED: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: of_dtype("bfloat16"),
    "float16": lambda: of_dtype("float16"),
    "devices": on_two_devices,
    "index": lambda: lm.models.foreign.OneIndexModel(6, print, indexed, index="end_index"),
    "window": lambda: lm.models.foreign.OneIndexModel(
        6, print, lambda n: np.zeros((min(n, 999), 3))
    ),
}
ROOMS: dict[str, tuple[Callable[[int], tuple[int, ...]], bool]] = {
    "256": (lambda n: (room(n, 256),), True),
    "4096": (lambda n: (room(n, 4096), 2), True),
    "power of two": (lambda n: (3, 1 << (n - 1).bit_length()), True),
    "pages": (lambda n: (room(n, 16) // 16, 16, 3), True),
    "ring": (lambda n: (min(n, 100), 3), False),
    "rounded ring": (lambda n: (min(room(n, 64), 128),), False),
    "state": (lambda n: (5, 4096), False),
}


class Room(Trigram):
    """Has an array more, `name`, in its cache."""

    name = ""

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        shape = ROOMS[self.name][0](max_length)
        return super().init_cache(batch_size, max_length), np.zeros((batch_size, *shape))


@pytest.mark.parametrize("length", [40, 160])
@pytest.mark.parametrize("name", [*ROUNDED, *ROOMS])
def test_caches_that_are_rounded_up_are_reused_and_rings_are_not(name: str, length: int) -> None:
    is_kept = True
    if name in ROUNDED:
        model = ROUNDED[name]()
    else:
        model = type(name, (Room,), {"name": name})(6)
        is_kept = ROOMS[name][1] or (length == 40 and "ring" in name)
    how = dict(model=model, drafter=lm.NGramDrafter(), max_length=length, prefill_sizes=(32,))
    if is_kept:
        assert dataclasses.replace(TABLE, **how).prefix_caching
        return
    with pytest.raises(ValueError, match=r"^model must have a cache whose arrays grow .*\[1\]'"):
        dataclasses.replace(TABLE, **how)


def test_a_context_of_fixed_size_is_refused_by_the_same_sentence() -> None:
    model = lm.models.foreign.OneIndexModel(6, print, lambda n: np.zeros((999, 3)))
    with pytest.raises(ValueError, match=r"^model must have .* 'OneIndexModel.init_cache\(...\)"):
        dataclasses.replace(TABLE, model=model)


class Silent(lm.ModelDrafter):
    """Declares nothing."""

    serves = lm.DrafterServes()
