"""Weights that change between steps: each token is of those that made it, and none is lost."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from models.weights import random_weights

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import (
    BUDGETED,
    DRAFT,
    EXACT,
    LLAMA,
    SLOTS,
    TABLE,
    TABLES,
    TARGET,
    VOCAB,
    Finished,
    alone,
    compilations,
    driver_of,
    run,
    weights_of,
)
from .test_engine_continuity import Interrupts
from .test_grammar_driver import ALLOWED, Cycle
from .test_history import ENGINE as WITH_HISTORY
from .test_history import history_of

pytestmark = [pytest.mark.newest, pytest.mark.xdist_group("engines")]

OTHER = tiny.random_table(VOCAB, seed=3)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 1, 8, 20, 2, 28, 4)]
BUDGETS = (30, 9, 26, 5, 30, 12, 20)
MODELS = dict(model=LLAMA.model, drafter=LLAMA.drafter)
AGREEMENT = dataclasses.replace(LLAMA.config, rejection_sample_method="agreement")
EXACT_LLAMA = dataclasses.replace(EXACT, **MODELS, config=AGREEMENT, logprobs=sd.LogprobsConfig())


def truth(table: np.ndarray, text: list[int], count: int, num_before: int | None) -> list[int]:
    """The likeliest tokens after a text; of a grammar after so many, those that it allows."""
    sequence = list(text)
    for i in range(count):
        ids = range(VOCAB) if num_before is None else ALLOWED[(num_before + i) % len(ALLOWED)]
        logits = tiny.next_logits(table, sequence)
        sequence.append(max(ids, key=lambda token: logits[token]))
    return sequence[len(text) :]


def old_tokens(one: Finished) -> list[int]:
    assert sorted(one.updates, key=lambda update: update.weights_version) == one.updates
    return [
        token for update in one.updates if not update.weights_version for token in update.token_ids
    ]


def assert_follows(found: dict[int, Finished], new: np.ndarray, masked: int | None = None) -> None:
    """Each text is the old table's up to the change of weights, and then that of `new`."""
    for i, (prompt, budget) in enumerate(zip(PROMPTS, BUDGETS, strict=True)):
        before = old_tokens(found[i])
        assert before == truth(TARGET, prompt, len(before), 0 if i == masked else None)
        num_left, num_before = budget - len(before), len(before) if i == masked else None
        assert found[i].token_ids[len(before) :] == truth(
            new, prompt + before, num_left, num_before
        )
        assert found[i].finish_reason == "length"


def under_way(
    ahead: int, masked: int | None = None, engine: lm.Engine = TABLE
) -> tuple[lm.EngineDriver, list[lm.RequestUpdate]]:
    """A driver in the middle of everything, and its updates so far."""
    weights = jax.device_put((TARGET, DRAFT))  # of its own
    driver = driver_of(engine, *weights, chunk_size=8, max_prefills=1, max_steps_ahead=ahead)
    asked = list(zip(PROMPTS, BUDGETS, strict=True))
    for i, (prompt, budget) in enumerate(asked[:-1]):
        matcher = Cycle() if i == masked else None
        driver.submit(prompt, max_new_tokens=budget, matcher=matcher)
    updates = [*driver.step(), *driver.step()]
    while driver._host.slot_of(5) is None:  # until the longest prompt is read
        updates += driver.step()
    running = [one for one in driver._host.slots.values() if one.request_id != 5]
    assert driver.preempt(max(running, key=lambda one: one.budget_left).request_id)
    driver.submit(asked[-1][0], max_new_tokens=asked[-1][1])
    updates += driver.step()
    assert driver._device.prefill is not None and driver.num_running > 1
    assert len(driver._device.ahead) == ahead
    return driver, updates


@pytest.mark.parametrize(
    ("engine", "ahead", "masked", "reread"),
    [
        *((TABLE, 2, None, True), (TABLE, 2, None, False), (TABLE, 0, 1, True)),
        (EXACT, 1, None, True),
    ],
)
def test_texts_go_on_under_the_new_weights(
    engine: lm.Engine, ahead: int, masked: int | None, reread: bool
) -> None:
    driver, updates = under_way(ahead, masked, engine)
    if engine.exact:  # what one that waits was to say again is the text that the new weights read
        running = [one for one in driver._host.slots.values() if one.length > one.prompt_length]
        assert driver.preempt(min(running, key=lambda one: one.length).request_id)
        assert any(one.num_known for one in driver._host.returning)
    before = driver.stats()
    driver.set_params(OTHER, reread=reread)
    assert driver.stats() == sd.AcceptanceStats((0, 0), (0, 0), (0, 0), 0, 0, weights_version=1)
    np.testing.assert_array_equal(driver.weights[0], OTHER)
    updates += [*driver.step(), *driver.step()]
    for request_id in range(len(PROMPTS)):
        driver.preempt(request_id)
    found = run(driver, updates)
    assert_follows(found, OTHER, masked)
    assert any(map(old_tokens, found.values()))
    stats = driver.stats()
    num_new = sum(len(one.token_ids) - len(old_tokens(one)) for one in found.values())
    assert num_new == stats.num_tokens
    assert stats - before == stats and (stats - stats).weights_version == 1
    serving = driver.serving_stats()
    assert serving.weights_version == (serving - lm.ServingStats(SLOTS)).weights_version == 1
    driver.close()


@pytest.mark.slow
def test_texts_and_their_bits_are_those_of_a_fresh_exact_engine() -> None:
    """Of requests that run, wait, are half read, or generate again what they had."""
    new = random_weights(LLAMA.model, 17, 4.0)
    old, draft = weights_of(LLAMA)
    driver, fresh = driver_of(EXACT_LLAMA, old, draft), driver_of(EXACT_LLAMA, new, draft)
    asked = [
        dict(prompt=prompt, max_new_tokens=BUDGETS[i], temperature=i % 3 * 0.8, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    for one in asked:
        driver.submit(**one)
    updates = []
    for i in range(5):
        updates += driver.step()
        if i == 3:
            assert driver.preempt(1) and driver.preempt(0)
    repeating = [one for one in driver._host.slots.values() if one.length < one.num_known]
    assert repeating and driver.num_queued
    driver.set_params(new)
    updates += [*driver.step(), *driver.step()]
    for request_id in range(len(PROMPTS)):
        driver.preempt(request_id)
    found = run(driver, updates)
    for i, one in enumerate(asked):
        before = old_tokens(found[i])
        if len(before) == BUDGETS[i]:
            continue
        one |= dict(prompt=PROMPTS[i] + before, max_new_tokens=BUDGETS[i] - len(before))
        expected = alone(fresh, one)
        assert found[i].token_ids[len(before) :] == expected.token_ids
        assert bits(found[i])[len(before) :] == bits(expected)
    with pytest.raises(ValueError, match="^reread must be true for an exact engine"):
        driver.set_params(new, reread=False)


def bits(one: Finished) -> list[float]:
    rows = [np.asarray(update.logprobs.logprobs) for update in one.updates]
    return np.concatenate(rows).tolist()


@pytest.mark.slow
def test_caches_are_read_again_or_stay() -> None:
    new, texts = random_weights(LLAMA.model, 17, 4.0), {}
    for reread in (True, False):
        driver = driver_of(LLAMA, max_prefills=1)
        for i, prompt in enumerate(PROMPTS):
            driver.submit(prompt, max_new_tokens=BUDGETS[i])
        updates = [*driver.step(), *driver.step()]
        driver.set_params(new, reread=reread)
        found = run(driver, updates)
        texts[reread] = [one.token_ids for _, one in sorted(found.items())]
        before = [old_tokens(found[i]) for i in range(len(PROMPTS))]
        assert [len(text) for text in texts[reread]] == [*BUDGETS]
    fresh = driver_of(LLAMA, new, weights_of(LLAMA)[1])
    for i, text in enumerate(before):
        one = dict(prompt=PROMPTS[i] + text, max_new_tokens=BUDGETS[i] - len(text))
        rest = alone(fresh, one).token_ids if one["max_new_tokens"] else []
        assert texts[True][i] == text + rest
        assert texts[False][i][: len(text)] == text
    assert texts[True] != texts[False]


@pytest.mark.parametrize("where", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_warm_up(where: int | None) -> None:
    device = None if where is None else jax.devices()[where]
    driver = driver_of(TABLE, *jax.device_put((TARGET, DRAFT), device), max_steps_ahead=1)
    driver.warm_up()
    given = OTHER, DRAFT.copy()
    with compilations() as names:
        for settings in (
            dict(params=OTHER),
            dict(params=jax.device_put(OTHER), draft_params=DRAFT, reread=False),
            dict(draft_params=driver.weights[0], delete=True),
            dict(params=given[0], draft_params=given[1], reread=False, delete=True),
        ):
            driver.submit([1, 2, 3], max_new_tokens=9)
            driver.step()
            driver.set_params(**settings)
            run(driver)
    assert names == [] and driver.serving_stats().weights_version == 4
    assert {x.committed for x in driver.weights} == {device is not None}


def test_a_draft_budget_begins_anew() -> None:
    driver = driver_of(BUDGETED)
    choice, rates = driver.draft_choice, driver.draft_choice.rates
    choice.learn([0.1, 0.1], 2, has_drafts=True)
    driver.set_params(draft_params=DRAFT)
    np.testing.assert_array_equal(choice.rates, rates)
    assert choice.num_steps == choice.num_wide == 0


@pytest.mark.long
def test_a_history_stays_or_begins_with_what_is_given() -> None:
    driver = driver_of(WITH_HISTORY, TABLES[0], WITH_HISTORY.drafter.init_params())
    (text,) = (alone(driver, dict(prompt=[1], max_new_tokens=6)).token_ids for _ in range(1))
    driver.set_params(OTHER)
    assert history_of(driver) == [*text, -1]
    driver._is_whole = False  # an exception takes nothing from it
    kept = driver.weights[1]
    driver.set_params(draft_params=WITH_HISTORY.drafter.init_params())
    assert int(driver.weights[1]["next"]) == 0
    driver.set_params(draft_params=kept)
    assert history_of(driver) == [*text, -1]


@pytest.mark.slow
def test_the_loop_of_the_page_shows_a_drafter_that_was_not_told(
    optimized: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(compile("".join(blocks), "weights.md", "exec"), scope)
    found = re.findall(r"version (\d): (\d\.\d) tokens", capsys.readouterr().out)
    assert [int(version) for version, _ in found] == [0, 1, 2, 3, 4]
    first, *others, last, told = (float(length) for _, length in found)
    assert first > max(others) > min(others) > last and told > last
    said = re.search(
        r"`version 0: (.{3}) tokens`, then (.{3}), (.{3}) and (.{3}).*prints (.{3})",
        page,
        re.S,
    )
    np.testing.assert_allclose([float(x) for _, x in found], [*map(float, said.groups())], atol=0.3)
    own = scope["score"](scope["target"], scope["driver"].weights[0], scope["token_ids"])
    np.testing.assert_allclose(own, scope["logprobs"], atol=1e-3)


# What fails

LINES = (
    "set_params",
    "_changes",
    "_read_step",
    "with_weights",
    "put_all",
    "put_in_place",
    "put",
    "go_on",
    "drop",
)


@pytest.mark.parametrize("delete", [False, True])
def test_weights_that_cannot_be_copied_change_nothing_or_are_missed(
    delete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, updates = under_way(ahead=1)
    put, left = jax.device_put, [1]

    def fails(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory left on the device")
        return put(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", fails)
        with pytest.raises(MemoryError):
            driver.set_params(OTHER, DRAFT, delete=delete)
    assert driver.serving_stats().weights_version == driver.stats().weights_version == 0
    if delete:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="^params must be on the device, but arrays of"):
                driver.step()
        driver.set_params(OTHER, DRAFT)
    assert_follows(run(driver, updates), OTHER if delete else TARGET)
    assert driver.serving_stats().num_failed_calls == 0


@pytest.mark.parametrize("steps_between", [0, 2])
def test_weights_that_a_trainer_donates_are_missed_until_there_are_others(
    steps_between: int,
) -> None:
    driver, updates = under_way(ahead=2)
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(driver.weights[0])
    for _ in range(steps_between):
        with pytest.raises(RuntimeError, match="^params must be on the device"):
            driver.step()
    driver.set_params(new)
    assert_follows(run(driver, updates), TARGET)  # which a constant does not change
    assert driver.serving_stats().num_failed_calls == 0


def test_arrays_that_stay_or_are_given_again_are_not_deleted() -> None:
    one = jax.device_put(TARGET)
    driver = driver_of(TABLE, one, one)
    driver.set_params(OTHER, delete=True)
    assert not one.is_deleted()
    driver.set_params(draft_params=one, delete=True)
    assert not one.is_deleted()
    first = driver.weights[0]
    driver.set_params(TARGET, delete=True)
    assert first.is_deleted()
    found = alone(driver, dict(prompt=[1, 2], max_new_tokens=9))
    assert found.token_ids == truth(TARGET, [1, 2], 9, None)
    assert driver.stats().draft_acceptance_rate == 1


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy in memory that a CPU device takes as it is."""
    room = np.empty(values.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    found = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    found[...] = values
    return found


def mapped(values: np.ndarray, path: Path) -> np.ndarray:
    """A copy in a file."""
    found = np.memmap(path, values.dtype, "w+", shape=values.shape)
    found[...] = values
    return found


@pytest.mark.parametrize("is_mapped", [False, True])
def test_arrays_of_the_host_may_be_changed_afterwards(is_mapped: bool, tmp_path: Path) -> None:
    one = mapped(TARGET, tmp_path / "weights") if is_mapped else aligned(TARGET)
    assert jax.device_put(one).unsafe_buffer_pointer() == one.ctypes.data
    asked = dict(prompt=[1, 2], max_new_tokens=9)
    driver = driver_of(TABLE, one, one)
    for weights in (TARGET, OTHER, TARGET):  # of the constructor, then of `set_params`
        one[...] = np.nan
        assert alone(driver, asked).token_ids == truth(weights, [1, 2], 9, None)
        one[...] = OTHER if weights is TARGET else TARGET
        driver.set_params(one, one, delete=True)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_given_again_by_another_array_of_its_memory_is_not_deleted(
    num_devices: int,
) -> None:
    mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[1 : 1 + num_devices])
    everywhere = jax.NamedSharding(mesh, jax.P())
    one = jax.device_put(TARGET, everywhere)
    driver = driver_of(TABLE, one, jax.device_put(DRAFT, everywhere))
    parts = [shard.data for shard in one.addressable_shards]
    again = jax.make_array_from_single_device_arrays(one.shape, everywhere, parts)
    for other in (one, again, np.asarray(one)):  # the last one lies in its memory, too
        driver.set_params(other, delete=True)
        np.testing.assert_array_equal(driver.weights[0], TARGET)
    assert one.is_deleted() and driver.weights[0].sharding == everywhere


def test_deleted_arrays_are_refused_before_anything_changes() -> None:
    driver = driver_of(TABLE, *jax.device_put((TARGET, DRAFT)))
    gone = jax.device_put(OTHER)
    gone.delete()
    for given in (dict(params=gone), dict(params=OTHER, draft_params=gone)):
        (name, _) = [*given.items()][-1]
        with pytest.raises(RuntimeError, match=f"^{name} must be on a device, .*: it was deleted"):
            driver.set_params(**given, delete=True)
    with pytest.raises(RuntimeError, match="^draft_params must be on a device"):
        driver_of(TABLE, TARGET, gone)
    assert alone(driver, dict(prompt=[1], max_new_tokens=9)).token_ids == truth(
        TARGET, [1], 9, None
    )


@pytest.mark.parametrize("delete", [False, True])
def test_two_sets_are_on_the_device_at_once_unless_the_old_one_is_deleted(
    delete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = jax.device_put(jax.device_get(weights_of(LLAMA)[0]))
    driver = driver_of(LLAMA, old, weights_of(LLAMA)[1])
    leaves, put, most, placed = jax.tree.leaves(old), jax.device_put, [], []

    def noting(array: Any, *args: Any, **named: Any) -> jax.Array:
        found = put(array, *args, **named)
        if isinstance(array, np.ndarray):
            placed.append(found)
        most.append(len(placed) + sum(not one.is_deleted() for one in leaves))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", noting)
        driver.set_params(jax.tree.map(np.array, old), delete=delete)
    assert len(placed) == len(leaves) > 4
    assert max(most) == (1 if delete else 2) * len(leaves)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (TypeError, "^params or draft_params must be given", {}),
        (TypeError, "^params must be an array.* as in the driver", dict(params=np.ones((6,) * 3))),
        (ValueError, "^draft_params must be an array", dict(draft_params=OTHER[1:])),
        (ValueError, "^params must have the structure.*has \\[0\\]", dict(params=[OTHER])),
        (
            ValueError,
            "^params must be committed to no device.* make the driver with",
            dict(params=jax.device_put(OTHER, jax.devices()[0])),
        ),
        (TypeError, "^reread must be", dict(params=OTHER, reread=1)),
        (TypeError, "^delete must be", dict(params=OTHER, delete=None)),
    ],
)  # fmt: skip
def test_what_cannot_take_the_place_of_the_weights_is_refused(
    error: type[Exception], message: str, given: dict[str, Any]
) -> None:
    driver = driver_of(TABLE)
    with pytest.raises(error, match=message):
        driver.set_params(**given)
    assert driver.serving_stats().weights_version == 0


def test_floats_do_not_replace_int8_nor_the_reverse() -> None:
    params, draft = weights_of(LLAMA)
    lean = lm.models.quantize(params)
    one = r"^params\['layers'\]\[0\]\['down_proj'\] must be an "
    driver = driver_of(LLAMA, lean, draft)
    with pytest.raises(ValueError, match=f"{one}Int8Weight.* of float32: give what .*quantize"):
        driver.set_params(params)
    driver = driver_of(LLAMA, params, draft)
    with pytest.raises(ValueError, match=f"{one}array.*Int8Weight: give .* quantize was called"):
        driver.set_params({x: lean[x] for x in params})


@pytest.mark.long
@pytest.mark.parametrize(
    ("reread", "stride"),
    [(True, 3), *(pytest.param(x, 1, marks=pytest.mark.slow) for x in (True, False))],
)
def test_an_interrupt_at_any_line_leaves_the_old_weights_or_the_new(
    reread: bool, stride: int
) -> None:
    versions = set()
    for line in range(1, 1000, stride):
        driver, updates = under_way(ahead=1)
        interrupts = Interrupts(0, every=1e9, only=LINES)
        interrupts.left = line
        interrupts.once(driver.set_params, OTHER, reread=reread)
        version = driver.serving_stats().weights_version
        versions.add(version)
        assert driver.stats().weights_version == version
        assert bool(driver.stats().num_tokens) != bool(version)
        assert_follows(run(driver, updates), OTHER if version else TARGET)
        if not interrupts.count:
            break
    assert line > 40 and versions == {0, 1}
