"""The engine and its driver: ends, failures, old rows, compilations, buffers, errors."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import passes
import pytest
from upper_floor import Decoder, generate_lib, programs, protocol

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import (
    DRAFT,
    LLAMA,
    LONGEST,
    LOOKUP,
    NAMES,
    SHAPE,
    SLOTS,
    TABLE,
    TABLES,
    TARGET,
    VOCAB,
    K,
    alone,
    compilations,
    driver_of,
    greedy_truth,
    run,
    weights_of,
)
from .test_loop import bigram

pytestmark = [pytest.mark.long, pytest.mark.newest, pytest.mark.xdist_group("engines")]

# What a request gets


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 2, 8, 9, LONGEST - 6])
def test_a_prompt_is_read_in_the_least_size_that_fits(length):
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    assert len(TABLE.pad_prompt(prompt)) == (8 if length <= 8 else LONGEST)
    request = dict(prompt=prompt, max_new_tokens=6)
    assert alone(driver_of(TABLE), request).token_ids == greedy_truth(request)


def test_a_request_ends_at_its_budget_or_stop_token():
    prompt = [1, 2]
    truth = greedy_truth(dict(prompt=prompt, max_new_tokens=12))
    stop = truth[5]
    first = truth.index(stop) + 1
    other = next(t for t in range(VOCAB) if t not in truth)
    driver = driver_of(TABLE)
    cases = [
        (12, [], 12, "length"),
        (12, [other, stop], first, "stop"),
        (12, [stop] * 9, first, "stop"),  # one that is given twice counts once
        (1, [], 1, "length"),
        (first, [stop], first, "stop"),
    ]
    for budget, stops, _, _ in cases:
        driver.submit(prompt, max_new_tokens=budget, stop_token_ids=stops)
    found = run(driver)
    for i, (_, _, count, reason) in enumerate(cases):
        assert (found[i].token_ids, found[i].finish_reason) == (truth[:count], reason)


def test_a_stop_token_ends_a_step_inside_an_accepted_run():
    # The target drafts for itself, so every step emits K + 1 tokens.
    driver = driver_of(TABLE, TABLES[0], TABLES[0])
    prompt = [3, 0]
    truth = greedy_truth(dict(prompt=prompt, max_new_tokens=9))
    index = next(i for i in range(1, 9) if i % (K + 1) != 0 and truth.index(truth[i]) == i)
    driver.submit(prompt, max_new_tokens=9, stop_token_ids=[truth[index]])
    found = run(driver)[0]
    assert found.token_ids == truth[: index + 1]
    assert found.finish_reason == "stop"
    # The verification's own counts are not cut.
    assert found.updates[-1].num_accepted == K > len(found.updates[-1].token_ids) - 1


def test_prompts_draw_their_own_noise_and_equal_seeds_the_same():
    driver = driver_of(TABLE)
    common = dict(max_new_tokens=12, temperature=2.0)
    ids = [driver.submit([1, 2], **common) for _ in range(4)]
    seeded = [driver.submit([1, 2], **common, seed=2**32 - 1) for _ in range(2)]
    found = run(driver)
    assert len({tuple(found[i].token_ids) for i in [*ids, seeded[0]]}) == 5
    assert found[seeded[0]].token_ids == found[seeded[1]].token_ids
    # A request without a seed has its id for one.
    again = alone(driver_of(TABLE), dict(prompt=[1, 2], seed=ids[2], **common))
    assert again.token_ids == found[ids[2]].token_ids


def test_a_cancelled_request_gets_nothing_more_its_slot_is_free():
    driver = driver_of(TABLE)
    running = [driver.submit([i], max_new_tokens=12) for i in range(SLOTS)]
    waiting = driver.submit([5], max_new_tokens=12)
    dropped = driver.submit([5], max_new_tokens=12)
    first = driver.step()
    assert driver.cancel(running[1]) and driver.cancel(dropped)
    assert (driver.num_running, driver.num_queued) == (SLOTS - 1, 1)
    second = driver.step()
    assert {u.request_id for u in first} == set(running)
    assert {u.request_id for u in second} == {*running, waiting} - {running[1]}
    assert not driver.cancel(running[1]) and not driver.cancel(dropped) and not driver.cancel(99)
    rest = run(driver)
    assert not {running[1], dropped} & set(rest)
    assert not driver.cancel(waiting)


def test_a_finished_request_gets_nothing_more_and_counts_as_stopped():
    driver = driver_of(TABLE)
    running, left = driver.submit([1], max_new_tokens=12), driver.submit([2], max_new_tokens=12)
    driver.step()
    assert driver.finish(running) and not driver.finish(running) and driver.cancel(left)
    assert driver.is_idle
    assert driver.serving_stats().num_ended == (0, 1, 0, 1)


def test_only_a_running_request_can_be_preempted():
    driver = driver_of(TABLE)
    running = [driver.submit([i], max_new_tokens=12) for i in range(SLOTS)]
    waiting = driver.submit([5], max_new_tokens=2)
    assert not driver.preempt(running[0])
    driver.step()
    assert driver.preempt(running[0])
    assert not driver.preempt(running[0]) and not driver.preempt(waiting)
    assert driver.num_queued == 2
    assert running[0] in {u.request_id for u in driver.step()}  # before the one that waited


# Failures


def poisoned(table: np.ndarray) -> np.ndarray:
    """Nothing usable follows token 5."""
    table = table.copy()
    table[:, :, 5] = -np.inf
    table[:, 5, :] = np.nan
    return table


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_cannot_be_verified_ends_alone(temperature):
    weights = jnp.asarray(poisoned(TARGET)), jnp.asarray(poisoned(DRAFT))
    good = [
        dict(prompt=[i, 2], max_new_tokens=10, temperature=t, seed=i)
        for i, t in enumerate([0.0, 1.0, 0.7])
    ]
    by_itself = driver_of(TABLE, *weights)
    expected = [alone(by_itself, request) for request in good]

    driver = driver_of(TABLE, *weights)
    for request in good:
        driver.submit(**request)
    bad = driver.submit([1, 5], max_new_tokens=10, temperature=temperature)
    later = driver.submit(**good[1])
    found = run(driver)
    assert (found[bad].token_ids, found[bad].finish_reason) == ([], "failed")
    assert found[bad].status == sd.Status.BAD_TARGET_ROW
    for i, one in enumerate(expected):
        assert found[i].token_ids == one.token_ids and found[i].status == sd.Status.OK
    assert found[later].token_ids == expected[1].token_ids  # in the slot of the one that failed
    assert found[bad].updates[-1].num_proposed == 0
    assert driver.stats().num_verifications == sum(
        len(f.updates) for i, f in found.items() if i != bad
    )


def test_tokens_before_a_failure_are_kept():
    table = TARGET.copy()
    table[:, 3] = np.nan
    table[0, 2] = np.eye(VOCAB)[3] * 9  # after 0 2 comes 3, and nothing can follow
    driver = driver_of(TABLE, jnp.asarray(table), TABLES[1])
    found = alone(driver, dict(prompt=[0, 2], max_new_tokens=9))
    assert found.token_ids == [3]
    assert (found.finish_reason, found.status) == ("failed", sd.Status.BAD_TARGET_ROW)


@pytest.mark.long
def test_nan_in_a_slots_cache_does_not_reach_the_next():
    params, draft_params = weights_of(LLAMA)
    broken = params | dict(embed_tokens=params["embed_tokens"].at[5].set(jnp.nan))
    requests = [dict(prompt=[i, 1], max_new_tokens=8, stop_token_ids=[5]) for i in range(4)]
    by_itself = driver_of(LLAMA, broken, draft_params)
    expected = [alone(by_itself, request).token_ids for request in requests]
    driver = driver_of(LLAMA, broken, draft_params)
    # Short prompts are read at once, long ones in pieces.
    bad = [driver.submit([5] * (8, 30)[i % 2], max_new_tokens=8) for i in range(SLOTS)]
    good = [driver.submit(**request) for request in requests]
    found = run(driver)
    assert all(found[i].status == sd.Status.BAD_TARGET_ROW for i in bad)
    assert [found[i].token_ids for i in good] == expected


# Drafts between the halves of a step


verify = jax.jit(TABLE.verify)
draft = jax.jit(TABLE.draft)
admit = jax.jit(TABLE.admit)


@functools.cache
def drafted(seed: int = 0) -> lm.DecodeState:
    """A full engine with drafts at hand: slot 0 is greedy, the others sample."""
    driver = driver_of(TABLE)
    for i in range(SLOTS):
        driver.submit(
            [1, i], max_new_tokens=30, temperature=[0.0, 1.0, 1.0, 0.5][i], seed=SLOTS * seed + i
        )
    for _ in range(3):
        driver.step()
    assert driver.state.proposal is None
    state = draft(TABLES[1], driver.state)
    assert (np.asarray(state.proposal.token_ids) >= 0).all()
    return state


def fallbacks(state: lm.DecodeState) -> int:
    after, _ = verify(TABLES[0], state)
    counted = sd.AcceptanceStats.from_counters(after.counters).num_fallbacks
    return counted - sd.AcceptanceStats.from_counters(state.counters).num_fallbacks


def has_drafts(state: lm.DecodeState) -> list[bool]:
    """Of each slot, whether it has a draft or a row of one."""
    has_row = (state.store.positions >= 0).any(axis=0)
    return ((state.proposal.token_ids >= 0).any(axis=1) | has_row).tolist()


def assert_same_tokens(state: lm.DecodeState, other: lm.DecodeState, slots: list[int]) -> None:
    one, two = (verify(TABLES[0], x)[1].token_ids[np.array(slots)].tolist() for x in (state, other))
    assert one == two


@pytest.mark.long
def test_drafts_at_hand_have_rows_for_sampled_requests():
    assert fallbacks(drafted()) == 0


def test_after_a_step_without_drafts_old_rows_are_unused():
    differences = 0
    for seed in range(10):
        state = drafted(seed)
        moved, _ = verify(TABLES[0], state)
        assert moved.proposal is None
        assert verify(TABLES[0], moved)[1].num_emitted.tolist() == [1] * SLOTS
        # Even if someone kept the drafts: their rows are of another position.
        kept = dataclasses.replace(moved, proposal=state.proposal)
        evicted = dataclasses.replace(kept, store=kept.store.evict(jnp.ones((SLOTS,), bool)))
        assert fallbacks(kept) == fallbacks(evicted) == SLOTS - 1
        # Were the position not checked, the old rows would be used, and show in the tokens.
        here = jnp.broadcast_to(kept.batch.lengths, (K, SLOTS))
        unchecked = dataclasses.replace(kept, store=dataclasses.replace(kept.store, positions=here))
        assert fallbacks(unchecked) == 0
        checked, wanted, wrong = (
            verify(TABLES[0], s)[1].token_ids.tolist() for s in (kept, evicted, unchecked)
        )
        assert checked == wanted
        differences += wrong != wanted
    assert differences >= 3


def test_a_slot_given_to_another_request_has_no_drafts():
    state = drafted()
    length = int(state.batch.lengths[2])
    newcomer = lm.NewRequests(
        slots=np.array([2]),
        # The position and the temperature of the old one.
        prompts=TABLE.pad_prompt([2] * length)[None],
        lengths=np.array([length]),
        keys=jax.random.split(jax.random.key(0), 1),
        options=TABLE.options_of([lm.RequestOptions(temperature=1.0, max_new_tokens=5)], [length]),
    )
    after = admit(*TABLES, state, newcomer)
    assert has_drafts(after) == [True, True, False, True]
    kept = dataclasses.replace(after, proposal=state.proposal)
    assert fallbacks(kept) == 1
    # Its neighbours' drafts stand as they stood.
    for slot in (0, 1, 3):
        ids = after.proposal.token_ids, state.proposal.token_ids
        assert (ids[0][slot] == ids[1][slot]).all()
        assert (after.store.positions[:, slot] == state.store.positions[:, slot]).all()
    assert (after.store.logits == state.store.logits).all()
    assert_same_tokens(state, after, [0, 1, 3])


def test_an_empty_slot_holds_no_drafts():
    driver = driver_of(TABLE)
    driver.submit([1], max_new_tokens=2, temperature=1.0)
    driver.submit([1], max_new_tokens=30, temperature=1.0)
    driver.step()
    while driver.num_running > 1:
        driver.step()
    state = draft(TABLES[1], driver.state)
    assert state.batch.done.tolist() == [True, False, True, True]
    assert ((state.proposal.token_ids >= 0).all(axis=1) == ~state.batch.done).all()


def test_a_new_request_has_no_drafts_in_its_first_step():
    driver = driver_of(TABLE)
    driver.submit([1, 2], max_new_tokens=9, temperature=1.0)
    counts = [driver.step()[0].num_proposed for _ in range(2)]
    assert counts == [0, K]


def test_a_released_slot_emits_nothing_and_forgets_its_drafts():
    state = drafted()
    leaving = jnp.asarray([False, True, False, False])
    after = TABLE.release(state, leaving)
    assert has_drafts(after) == [True, False, True, True]
    now = verify(TABLES[0], after)[1]
    assert now.num_emitted[1] == now.num_kept[1] == now.num_proposed[1] == 0
    assert_same_tokens(state, after, [0, 2, 3])


# Compilations and buffers


FUNCTIONS = (programs.init, programs.admit, programs.step, programs.release)


def test_nothing_is_compiled_after_warm_up():
    engine = dataclasses.replace(LOOKUP, max_length=LONGEST + 1, prefill_sizes=None)
    assert {size for _, size in engine.admit_shapes} == {32, LONGEST + 1}
    driver = driver_of(engine, *weights_of(LOOKUP))
    expected, progress = {"jit(admit)", "jit(step)", "jit(release)"}, []
    with compilations() as names:
        driver.warm_up(
            lambda *counts: progress.append((*counts, sum(name in expected for name in names)))
        )
    assert expected <= set(names)
    assert progress == [(done, 5, done) for done in range(6)]  # as many as were compiled by then
    assert driver.is_idle and driver.stats().num_tokens == 0
    sizes = [function._cache_size() for function in FUNCTIONS]
    rng = np.random.default_rng(0)
    with compilations() as names:
        for i in range(30):
            driver.submit(
                rng.integers(0, VOCAB, 1 + i).tolist(),
                max_new_tokens=1 + i % 9,
                temperature=[0, 0.5, 1.5][i % 3],
                seed=None if i % 2 else i,
                stop_token_ids=range(i % 3),
            )
            if i % 3 == 0:
                driver.step()
            if i % 7 == 3:
                driver.cancel(i - 2)
                driver.preempt(i - 3)
        found = run(driver)
        driver.stats()
    assert names == []
    assert [function._cache_size() for function in FUNCTIONS] == sizes
    assert len(found) > 10
    with compilations() as names:  # the counter counts
        jax.jit(lambda x: x + 41)(1)
    assert len(names) == 1


def test_progress_is_told_to_functions_only():
    with pytest.raises(TypeError, match="^on_progress"):
        driver_of(TABLE).warm_up(True)


def test_warming_up_disturbs_no_queue_and_waits_for_no_request():
    driver = driver_of(TABLE)
    request = dict(prompt=[2, 1], max_new_tokens=7)
    driver.submit(**request)
    driver.warm_up()
    driver.step()
    with pytest.raises(RuntimeError, match="^num_running"):
        driver.warm_up()
    rest = run(driver)
    assert rest[0].finish_reason == "length"
    assert rest[0].token_ids == greedy_truth(request)[-len(rest[0].token_ids) :]


@pytest.mark.parametrize("engine", [TABLE, LLAMA], ids=NAMES.get)
def test_every_function_works_on_the_buffers_it_is_given(engine):
    driver = driver_of(engine)

    def pointers() -> list[int]:
        large = (driver.state.target_cache, driver.state.draft_cache, driver.state.store.logits)
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(large)]

    before = pointers()
    ids = [driver.submit([1, 2, 3], max_new_tokens=9) for _ in range(2)]
    driver.step()
    assert pointers() == before
    driver.step()
    assert driver.cancel(ids[0])
    driver.step()
    assert pointers() == before


def operations(program: str, size: str) -> set[str]:
    """Names of the operations in a compiled program whose result has this size."""
    return set(re.findall(rf"= \(?\w+\[{size}\]\S* ([a-z-]+)\(", program))


@pytest.mark.slow
def test_no_compiled_loop_copies_anything_of_the_stores_size():
    vocab_size, narrow, k = 4096, 4095, 16
    params, draft_params = jnp.linspace(-1, 1, vocab_size), jnp.linspace(-1, 1, narrow)
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)
    drafter = lm.ModelDrafter(tiny.OneRow(narrow))
    engine = lm.Engine(tiny.OneRow(vocab_size), drafter, config, num_slots=SLOTS, max_length=32)
    state = engine.init_state(draft_params)
    step = programs.step.lower(engine, params, draft_params, state).compile()
    batch, prompt_size, max_steps = generate_lib.make_batch(
        [[1]] * SLOTS,
        [lm.RequestOptions(temperature=1.0, max_new_tokens=8)] * SLOTS,
        vocab_size=vocab_size,
        key=None,
        slack=k + 1,
    )
    decoder = Decoder(engine.model, drafter, config)
    generate = generate_lib._generate.lower(
        params, draft_params, batch, decoder=decoder, prompt_size=prompt_size, max_steps=max_steps
    ).compile()
    store, logits = state.store.logits.nbytes, SLOTS * (k + 1) * vocab_size * 4
    own = {"step": 0, "generate": store}  # the one makes its store, the other is given it
    for name, program in {"step": step, "generate": generate}.items():
        found: set[str] = set()
        for size in (f"{k * SLOTS},{narrow}", f"{k},{SLOTS},{narrow}", f"{SLOTS},{k},{narrow}"):
            found |= operations(program.as_text(), size)
        assert "dynamic-update-slice" in found
        assert not found & {"copy", "copy-start", "concatenate", "gather", "transpose"}, found
        temporary = program.memory_analysis().temp_size_in_bytes
        assert temporary < logits + own[name] + 0.75 * store, name


def test_counters_read_what_the_records_of_the_steps_say():
    driver, records = driver_of(TABLE), []
    for i in range(SLOTS):
        driver.submit([i], max_new_tokens=12, temperature=0.5 * i)
    driver.step()
    state = driver.state
    begin = sd.AcceptanceStats.from_counters(state.counters)
    for _ in range(5):
        state, record = verify(TABLES[0], draft(TABLES[1], state))
        records.append(record)
    steps = jax.tree.map(lambda *xs: np.stack(xs), *records)
    counted = sd.AcceptanceStats.from_counters(state.counters) - begin
    assert counted == sd.AcceptanceStats.from_steps(steps)
    assert counted.num_accepted_tokens > 0


# Errors


REFUSED = {
    "an empty prompt": (dict(prompt=[]), ValueError, "prompt"),
    "an id past the vocabulary": (dict(prompt=[1, VOCAB]), ValueError, "prompt"),
    "text": (dict(prompt="ab"), TypeError, "prompt"),
    "no budget": (dict(max_new_tokens=0), ValueError, "max_new_tokens must be at least 1"),
    "more than a slot holds": (
        dict(prompt=[1] * 30, max_new_tokens=LONGEST - 29),
        ValueError,
        "prompt and max_new_tokens must fit into max_length=40 tokens",
    ),
    "a negative temperature": (dict(temperature=-1.0), ValueError, "temperature"),
    "a stop token past the vocabulary": (dict(stop_token_ids=[VOCAB]), ValueError, "stop_token_id"),
    "too many stop tokens": (dict(stop_token_ids=[1, 2, 3]), ValueError, "stop_token_ids"),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_and_disturbs_no_other(changes, error, message):
    driver = driver_of(TABLE)
    requests = [dict(prompt=[i], max_new_tokens=6) for i in range(SLOTS + 1)]
    for request in requests:
        driver.submit(**request)
    driver.step()
    with pytest.raises(error, match=message):
        driver.submit(**(dict(prompt=[1], max_new_tokens=6) | changes))
    assert (driver.num_running, driver.num_queued) == (SLOTS, 1)
    assert driver.submit([1], max_new_tokens=1) == SLOTS + 1
    rest = run(driver)
    assert rest[SLOTS].token_ids == greedy_truth(requests[SLOTS])
    assert rest[SLOTS + 1].finish_reason == "length"


def test_the_longest_request_fits():
    prompt = [1, 2] * (LONGEST // 4)
    for engine in (TABLE, LLAMA):
        found = alone(driver_of(engine), dict(prompt=prompt, max_new_tokens=LONGEST - len(prompt)))
        assert len(found.token_ids) == LONGEST - len(prompt)
        assert found.status == sd.Status.OK
        longest = alone(driver_of(engine), dict(prompt=[1] * (LONGEST - 1), max_new_tokens=1))
        assert len(longest.token_ids) == 1


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "num_slots", 0),
        (TypeError, "num_slots", 0.5),
        (ValueError, "max_length", 1),
        (ValueError, "max_stop_tokens", -1),
        *((ValueError, "prefill_sizes", x) for x in ((8, 48), (8, 8, 40), (), (0, 40))),
    ],
)
def test_an_engine_is_not_built_with(error, name, value):
    with pytest.raises(error, match=f"^{name}"):
        lm.Engine(TABLE.model, TABLE.drafter, TABLE.config, **(SHAPE | {name: value}))


@pytest.mark.parametrize(
    ("longest", "sizes"), [(2, (2,)), (32, (32,)), (33, (32, 33)), (100, (32, 64, 100))]
)
def test_prompts_are_padded_to_powers_of_two_by_default(longest, sizes):
    shape = dict(num_slots=1, max_length=longest)
    engine = lm.Engine(TABLE.model, TABLE.drafter, TABLE.config, **shape)
    assert engine.prompt_sizes == sizes
    # Chosen again when another length replaces it, so that such prompts are still read whole.
    longer = dataclasses.replace(engine, max_length=longest + 100)
    assert (longer.chunk_size, longer.prompt_sizes[0]) == (longest + 100, 32)


def test_caches_have_room_for_a_step_and_are_aligned():
    for longest in (26, 29, 30, 1000):
        engine = dataclasses.replace(TABLE, max_length=longest, prefill_sizes=None)
        length, needed = engine.buffer_length, longest + K + 1
        assert length % 32 == 0 and 0 <= length - needed < 32
        assert engine.init_state(TABLES[1]).batch.token_ids.shape == (SLOTS, length)


def test_admitting_refuses_shapes_that_do_not_fit():
    request = dict(slots=[0], lengths=[1], keys=jax.random.split(jax.random.key(0), 1))
    options = TABLE.options_of([lm.RequestOptions()], [1])
    others = dataclasses.replace(TABLE, max_stop_tokens=1).options_of([lm.RequestOptions()], [1])
    state = jax.eval_shape(TABLE.init_state, TABLES[1])
    for prompt, given, message in [
        (jnp.zeros((8,), jnp.int32), options, r"prompts must be \[R, P\] with P in \[1, 40\]"),
        (jnp.zeros((1, 41), jnp.int32), options, r"prompts must be \[R, P\] with P in \[1, 40\]"),
        (jnp.zeros((1, 8), jnp.int32), others, r"options.stop_token_ids must have shape \[1, 2\]"),
        (jnp.zeros((2, 8), jnp.int32), options, r"options.stop_token_ids must have shape \[2, 2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            new = lm.NewRequests(**request, prompts=prompt, options=given)
            jax.eval_shape(TABLE.admit, *TABLES, state, new)
    with pytest.raises(ValueError, match="prompt must hold at most max_length=40 tokens"):
        TABLE.pad_prompt([1] * 41)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (np.zeros((SLOTS * (K + 1), 2), np.uint32), ValueError),
        (np.zeros((SLOTS * K, 1), np.uint32), ValueError),
        (np.zeros((SLOTS * (K + 1), 1), np.float32), TypeError),
    ],
)
def test_a_bitmask_that_does_not_fit_is_refused(words, error):
    state = jax.eval_shape(TABLE.init_state, TABLES[1])
    rows = SLOTS * (K + 1)
    message = rf"^token_bitmask must be an array \[M, ceil\(V/32\)\] = \[{rows}, 1\] of int32"
    with pytest.raises(error, match=message):
        jax.eval_shape(TABLE.verify, TABLES[0], state, words)


@pytest.mark.parametrize(
    ("is_forced", "error"),
    [(np.zeros(SLOTS + 1, bool), ValueError), (np.zeros(SLOTS), TypeError), ([True], TypeError)],
)
def test_what_does_not_say_of_each_request_whether_it_is_forced_is_refused(is_forced, error):
    state = jax.eval_shape(TABLE.init_state, TABLES[1])
    verify = functools.partial(TABLE.verify, is_forced=is_forced)
    with pytest.raises(error, match=rf"^is_forced must be an array \[B\] = \[{SLOTS}\] of bool"):
        jax.eval_shape(verify, TABLES[0], state)


@dataclasses.dataclass(frozen=True)
class Cut(tiny.Trigram):
    """Gives other logits than it declares."""

    cut: Callable[[jax.Array], jax.Array]

    def run(self, *args: Any) -> Any:
        logits, cache = super().run(*args)
        return self.cut(logits), cache


@pytest.mark.parametrize(
    ("cut", "error"),
    [
        (lambda x: x[..., 1:], ValueError),
        (lambda x: x[:, 0], ValueError),
        (lambda x: x.astype(jnp.int32), TypeError),
    ],
)
@pytest.mark.parametrize("is_drafter", [False, True])
def test_logits_that_a_model_does_not_declare_are_refused(cut, error, is_drafter):
    """A row that is too narrow would be stored beside what the row before it left."""
    models = [TABLE.model, TABLE.model]
    models[is_drafter] = Cut(VOCAB, cut)
    engine = dataclasses.replace(TABLE, model=models[0], drafter=lm.ModelDrafter(models[1]))
    state = jax.eval_shape(TABLE.init_state, TABLES[1])
    with pytest.raises(error, match=r"^the logits of Cut.apply must be an array \[G, S, V\] = "):
        jax.eval_shape(engine.step, *TABLES, state)


# Caches of any layout


def fused(batch_size: int) -> tuple[int, ...]:
    return (2 * batch_size, 5)


@dataclasses.dataclass(frozen=True)
class HasCache(passes.RunsTokens):
    """As much of a model as is asked about its cache."""

    shape: Callable[[int], tuple[int, ...]]
    axis: int
    vocab_size: int = 2

    @property
    def serves(self) -> lm.models.Serves:
        return lm.models.Serves(batch_axis=self.axis)

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return {"of": [jnp.zeros(self.shape(batch_size))]}


@pytest.mark.parametrize(
    ("axis", "shape"),
    [(0, lambda b: (b, 5)), (1, lambda b: (3, b, 5)), (1, lambda b: (5, b)), (0, fused)],
)
def test_some_requests_are_replaced_along_the_axis_of_the_cache(axis, shape):
    protocol.check_model("model", HasCache(shape, axis))
    rng = np.random.default_rng(0)
    before, both = (jnp.asarray(rng.integers(1, 9, shape(b))) for b in (4, 2))
    after = protocol.put_cache({"of": [before]}, {"of": [both]}, jnp.array([2, 0]), axis)["of"][0]
    before, after, both = (np.moveaxis(np.asarray(x), axis, 0) for x in (before, after, both))
    old, found, new = np.split(before, 4), np.split(after, 4), np.split(both, 2)
    for one, wanted in zip(found, (new[1], old[1], new[0], old[3]), strict=True):
        np.testing.assert_array_equal(one, wanted)


def test_a_slot_that_does_not_exist_changes_no_other() -> None:
    """As in calls that warm up: it is read from the last slot, and nothing is written."""
    cache = np.arange(1, 13).reshape(3, 4)  # [.., S, ..]
    like, slots = np.zeros((3, 2), int), jnp.array([4, 1])
    taken = protocol.take_cache(cache, like, slots, 1)
    np.testing.assert_array_equal(taken, cache[:, [3, 1]])
    after = protocol.put_cache(jnp.asarray(cache), -taken, slots, 1)
    np.testing.assert_array_equal(after, cache * [1, -1, 1, 1])


@pytest.mark.parametrize(
    ("axis", "shape"),
    [
        (0, lambda b: (5,)),
        (0, lambda b: (b, b)),
        (0, lambda b: (b + 1,)),
        (0, lambda b: (3, b)),
        (2, lambda b: (3, b)),
    ],
    ids=["none", "two", "another", "not this one", "too few axes"],
)
def test_a_cache_without_an_axis_of_requests_is_refused(axis, shape):
    model = HasCache(shape, axis)
    with pytest.raises(ValueError, match=r"^model\.init_cache .* cache\['of'\]\[0\]"):
        protocol.check_model("model", model)
    with pytest.raises(ValueError, match=r"^drafter\.init_cache"):
        dataclasses.replace(TABLE, drafter=Drafting(shape, axis))


class Drafting(HasCache, lm.Drafter):
    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(batch_axis=self.axis)

    def propose(self, params: Any, context: Any, cache: Any, store: Any) -> Any:
        raise NotImplementedError


@pytest.mark.long
def test_an_engine_without_caches_serves():
    table = np.random.default_rng(4).standard_normal((9, 9)).astype(np.float32)
    engine = lm.Engine(
        lm.models.PlainModel(9, bigram), lm.NGramDrafter(min_ngram=1), TABLE.config, **SHAPE
    )
    found = alone(driver_of(engine, jnp.asarray(table)), dict(prompt=[3], max_new_tokens=20))
    sequence = [3]
    for _ in range(20):
        sequence.append(int(np.argmax(table[sequence[-1]])))
    assert found.token_ids == sequence[1:]
