"""Rows of the draft store serve the drafts that were drawn from them, and no others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import zeros
from serving import tiny
from serving.chi_square import CONTROL, assert_distributed, p_value

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

SLOTS, K, VOCAB, NARROW = 5, 3, 7, 6  # the drafter's vocabulary is narrower
BATCH, FLAT = 4, 6  # requests in a verification, and the flattened draft axis


def i32(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def at(*temperature: float) -> sd.SamplingParams:
    return sd.SamplingParams(jnp.asarray(temperature, jnp.float32))


def empty(slots: int = SLOTS, dtype: Any = jnp.float32) -> sd.DraftStore:
    return sd.DraftStore.create(slots, K, NARROW, dtype)


@jax.jit
def write(
    store, offset, logits, normalizer, row_max, positions, sampling, slots=None, threshold=None
):
    drawn = sd.DraftSample(positions, normalizer, row_max, threshold)  # its ids are not read
    given = dict(positions=positions, sampling=sampling, slots=slots)
    return store.write(offset, logits, drawn, **given)


@jax.jit
def attach(store, token_ids, counts, positions, sampling, slots):
    return store.attach(
        sd.Drafts.from_flat(token_ids, counts), positions=positions, sampling=sampling, slots=slots
    )


count_fallbacks = jax.jit(sd.DraftStore.count_fallbacks)
keys_of = jax.jit(jax.vmap(jax.random.key))


# A batch in any order


@dataclasses.dataclass(frozen=True)
class Request:
    """What a request brings to a verification."""

    slot: int  # -1: it has just arrived and has none
    drafts: tuple[int, ...]
    position: int
    temperature: float
    seed: int


A = Request(slot=3, drafts=(2, 5), position=11, temperature=0.8, seed=1)
B = Request(slot=0, drafts=(), position=4, temperature=1.3, seed=2)
C = Request(slot=4, drafts=(1,), position=7, temperature=0.5, seed=3)
NEW = Request(slot=-1, drafts=(4, 0, 3), position=9, temperature=0.8, seed=4)  # n-gram drafts, say
NOBODY = dataclasses.replace(NEW, drafts=())
GREEDY = Request(slot=1, drafts=(2, 2), position=5, temperature=0.0, seed=5)


@functools.cache
def drawn() -> tuple[sd.DraftStore, np.ndarray]:
    """A store to which every slot wrote K rows, and the rows by slot and offset, float64."""
    rng = np.random.default_rng(0)
    rows = 2 * rng.standard_normal((SLOTS, K, NARROW)).astype(np.float32)
    by_slot = {r.slot: r for r in (A, B, C, GREEDY)}
    positions = [by_slot[s].position if s in by_slot else 9 for s in range(SLOTS)]
    temperature = [by_slot[s].temperature if s in by_slot else 0.8 for s in range(SLOTS)]
    divisor = np.float32([t or 1.0 for t in temperature])[:, None]  # a greedy row is not read
    store = empty()
    for offset in range(K):
        logits = rows[:, offset]
        peak = logits.max(axis=1)
        normalizer = np.log(np.exp((logits - peak[:, None]) / divisor).sum(axis=1))
        given = normalizer, peak, i32(positions), at(*temperature)
        store = write(store, i32(offset), logits, *given)
    return store, rows.astype(np.float64)


@jax.jit
def check(store, token_ids, counts, positions, sampling, slots, keys, logits, active):
    drafts = attach(store, token_ids, counts, positions, sampling, slots)
    output = sd.rejection_sample(
        logits,
        drafts,
        sampling=sampling,
        keys=keys,
        positions=positions,
        active=active,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
    )
    fallbacks = sd.DraftStore.count_fallbacks(drafts, sampling=sampling, active=active)
    return output, fallbacks, drafts.distribution.valid


def target_rows(request: Request) -> np.ndarray:
    """``[count + 1, V]``, the request's own."""
    rng = np.random.default_rng(request.seed)
    return rng.standard_normal((len(request.drafts) + 1, VOCAB)).astype(np.float32)


def verify(requests: tuple[Request, ...], store: sd.DraftStore) -> tuple[list, int, list]:
    """Tokens of each request, the number of fallbacks, and whether its rows were used."""
    flat = [x for r in requests for x in r.drafts]
    logits = np.zeros((FLAT + BATCH, VOCAB), np.float32)
    rows = np.concatenate([target_rows(r) for r in requests])
    logits[: len(rows)] = rows
    output, fallbacks, valid = check(
        store,
        i32([*flat, *[6] * (FLAT - len(flat))]),
        i32([len(r.drafts) for r in requests]),
        i32([r.position for r in requests]),
        at(*(r.temperature for r in requests)),
        i32([r.slot for r in requests]),
        keys_of(i32([r.seed for r in requests])),
        jnp.asarray(logits),
        jnp.asarray([r is not NOBODY for r in requests]),
    )
    return sd.parse_output(output), int(fallbacks), np.asarray(valid).tolist()


draw_noise = jax.jit(functools.partial(sd.testing.draw_noise, num_speculative_tokens=K))


def oracle(request: Request, q: np.ndarray | None) -> tuple[list[int], float]:
    """The tokens of one request alone, by the reference, and the margin; q ``[K, Vd]`` or None."""
    count = len(request.drafts)
    distribution = None if q is None else sd.DraftProbs(q[:count].astype(np.float64))
    drafts = sd.Drafts(np.array(request.drafts, np.int32), np.array([0, count]), distribution)
    noise = draw_noise(jax.random.key(request.seed)[None], i32([request.position]))
    output = sd.testing.reference.rejection_sample(
        target_rows(request),
        drafts,
        noise,
        temperature=[request.temperature],
        method="standard",
        num_speculative_tokens=K,
    )
    return output.token_ids[0, : output.num_emitted[0]].tolist(), float(output.margin[0])


@functools.cache
def expected(request: Request) -> list[int]:
    _, rows = drawn()
    q = None
    if request.slot >= 0 and request.temperature > 0:
        weights = np.exp(rows[request.slot] / request.temperature)
        q = weights / weights.sum(axis=1, keepdims=True)
    tokens, margin = oracle(request, q)
    assert margin > 1e-5, "a close call: choose another seed"
    return tokens


@pytest.mark.long
@pytest.mark.parametrize("fourth", [NEW, NOBODY, GREEDY], ids=["arrival", "empty", "greedy"])
def test_requests_keep_their_rows_in_any_order(fourth):
    store, _ = drawn()
    for requests in itertools.permutations((A, B, C, fourth)):
        tokens, fallbacks, valid = verify(requests, store)
        for request, got, used in zip(requests, tokens, valid, strict=True):
            assert got == ([] if request is NOBODY else expected(request)), (requests, request)
            assert used == (request in (A, B, C))
        assert fallbacks == (fourth is NEW)


# Old rows


def test_evicted_rows_are_not_used_and_touch_no_others():
    store, _ = drawn()
    evicted = store.evict(jnp.asarray([s == A.slot for s in range(SLOTS)]))
    tokens, fallbacks, valid = verify((A, B, C, NEW), evicted)
    assert valid == [False, True, True, False] and fallbacks == 2
    assert tokens == [oracle(A, None)[0], expected(B), expected(C), expected(NEW)]


@hypothesis.given(st.data())
def test_a_store_is_a_dictionary_of_rows_written_last(data):
    slots = st.lists(st.integers(-2, SLOTS + 1), min_size=2, max_size=2, unique=True)
    positions, temperatures = st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0])
    store, known, tag = empty(), {}, 0
    for _ in range(data.draw(st.integers(0, 6))):
        if data.draw(st.booleans()):
            leaving = data.draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS))
            store = store.evict(jnp.asarray(leaving))
            known = {key: row for key, row in known.items() if not leaving[key[0]]}
        else:
            offset, where = data.draw(st.integers(0, K - 1)), data.draw(slots)
            stamps = [(data.draw(positions), data.draw(temperatures)) for _ in where]
            rows = np.zeros((2, NARROW), np.float32)
            for i, (slot, stamp) in enumerate(zip(where, stamps, strict=True)):
                tag += 1
                rows[i] = tag
                if 0 <= slot < SLOTS:
                    known[slot, offset] = (*stamp, tag)
            store = write(
                store,
                i32(offset),
                jnp.asarray(rows),
                jnp.asarray(rows[:, 0]),
                jnp.asarray(-rows[:, 0]),
                i32([p for p, _ in stamps]),
                at(*(t for _, t in stamps)),
                i32(where),
            )
    counts = data.draw(st.lists(st.integers(0, K), min_size=2, max_size=2))
    order = data.draw(slots)
    asked = st.integers(-1, 2)  # -1: none
    wanted = [(data.draw(asked), data.draw(temperatures)) for _ in order]
    drafts = attach(
        store,
        i32([0] * FLAT),
        i32(counts),
        i32([p for p, _ in wanted]),
        at(*(t for _, t in wanted)),
        i32(order),
    )
    flat = 0
    for slot, count, stamp, valid in zip(
        order, counts, wanted, drafts.distribution.valid.tolist(), strict=True
    ):
        written = [known.get((slot, offset), (None, None, 0)) for offset in range(count)]
        if count:
            assert valid == (stamp[1] > 0 and all(w[:2] == stamp for w in written))
        rows = drafts.distribution.rows[flat : flat + count]
        assert not valid or store.logits[rows, 0].tolist() == [w[2] for w in written]
        assert not valid or store.log_normalizer[rows].tolist() == [w[2] for w in written]
        assert not valid or store.row_max[rows].tolist() == [-w[2] for w in written]
        flat += count
    assert ((drafts.distribution.rows >= 0) & (drafts.distribution.rows < SLOTS * K)).all()


@pytest.mark.parametrize("size", [0, 2])
def test_gaps_and_empty_batches_have_no_fallback(size):
    ids = i32([-1, 3][:size])  # -1: nothing was proposed, so nothing falls back
    drafts = attach(empty(1), ids, i32([size]), i32([4]), at(1.0), None)
    assert drafts.distribution.valid.tolist() == [False]
    assert int(count_fallbacks(drafts, sampling=at(1.0))) == 0


def test_a_normalizer_too_large_makes_a_request_fall_back():
    rng, counts = np.random.default_rng(0), i32([2, 0, 3, 1])
    cu, sampling = np.concatenate([[0], np.cumsum(counts)]), at(1.0, 1.0, 0.0, 0.7)
    seen = set()
    for _ in range(40):
        ids = rng.choice([-1, 3, 4], FLAT + 1, p=[0.2, 0.4, 0.4])
        rows = rng.permutation(FLAT + 3)[: FLAT + 1]
        sizes = np.float32(rng.choice([0.5, -1023.0, 1024.0, -5e3, np.nan, np.inf], FLAT + 3))
        valid = rng.random(BATCH) < 0.7
        given = sd.DraftLogits(
            jnp.zeros((FLAT + 3, NARROW)),
            rows=i32(rows),
            valid=jnp.asarray(valid) if rng.random() < 0.7 else None,
            log_normalizer=jnp.asarray(sizes),
        )
        drafts = sd.Drafts(i32(ids), i32(cu), given)
        want = 0
        for b in (0, 1, 3):  # request 2 is greedy
            proposed = cu[b] + np.flatnonzero(np.cumprod(ids[cu[b] : cu[b + 1]] >= 0))
            is_lost = given.valid is not None and not valid[b]
            want += bool(len(proposed)) and (
                is_lost or any(sizes[rows[n]] in (1024, -5e3) for n in proposed)
            )
        assert int(count_fallbacks(drafts, sampling=sampling)) == want
        seen.add(want)
    assert seen == {0, 1, 2}
    without = dataclasses.replace(drafts, token_ids=i32([]), cu_num_draft_tokens=i32([0, 0]))
    without = dataclasses.replace(without, distribution=dataclasses.replace(given, rows=i32([])))
    assert int(count_fallbacks(without, sampling=at(1.0))) == 0


def test_drafts_without_a_distribution_have_no_fallback():
    drafts = sd.Drafts.from_flat(i32([1]), i32([1]))
    assert int(sd.DraftStore.count_fallbacks(drafts, sampling=at(1.0))) == 0


# Losslessness


MANY = 8000
TARGET = np.array([0.35, 0.05, 0.25, 0.15, 0.0, 0.2, 0.0])


@functools.partial(jax.jit, static_argnames="config")
def emit_many(drafts, config):
    """First tokens of MANY equal requests at temperature 1 and position 3."""
    rows = drafts.token_ids.shape[0] + MANY
    output = sd.rejection_sample(
        jnp.broadcast_to(jnp.log(jnp.asarray(TARGET, jnp.float32)), (rows, VOCAB)),
        drafts,
        sampling=sd.SamplingParams(jnp.ones((MANY,))),
        keys=jax.random.split(jax.random.key(9), MANY),
        positions=jnp.full((MANY,), 3, jnp.int32),
        config=config,
    )
    return output.token_ids[:, 0]


@jax.jit
def draw_many(logits, positions):
    return sd.sample_draft_tokens(
        logits,
        sampling=sd.SamplingParams(jnp.ones((MANY,))),
        keys=jax.random.split(jax.random.key(9), MANY),
        positions=positions,
        offset=0,
    )


def tally(store: sd.DraftStore, ids: jax.Array) -> np.ndarray:
    counts, positions = i32(np.ones(MANY)), i32(np.full(MANY, 3))
    drafts = attach(store, ids, counts, positions, at(*np.ones(MANY)), None)
    tokens = emit_many(drafts, sd.SpecDecodeConfig(num_speculative_tokens=1))
    return np.bincount(tokens, minlength=VOCAB)


def filled(logits: np.ndarray, position: int, rounded: bool = True) -> Any:
    """MANY slots that drafted one token at `position`, in a store of bfloat16; their drafts."""
    ones, places = sd.SamplingParams(jnp.ones((MANY,))), jnp.full((MANY,), position, jnp.int32)
    exact = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (MANY, NARROW))
    stored = exact.astype(jnp.bfloat16)
    ids = draw_many(stored if rounded else exact, places).token_ids
    of_row = draw_many(stored, places)
    store = sd.DraftStore.create(MANY, 1, NARROW, stored.dtype)
    numbers = of_row.log_normalizer, of_row.row_max
    return write(store, i32(0), stored, *numbers, places, ones), ids


@pytest.mark.long
def test_a_draft_beside_an_old_row_is_lossless():
    old, _ = filled(np.array([3.0, 0.0, 0.0, -1.0, 0.0, 2.0]), position=2)
    _, ids = filled(np.array([0.0, 2.0, 0.0, 1.0, 0.0, 0.0]), position=3)
    assert_distributed(tally(old, ids), TARGET, "one-hot beside an old row")
    # Were the position not checked, the old row would be taken for what the draft was drawn from.
    unchecked = dataclasses.replace(old, positions=jnp.full((1, MANY), 3, jnp.int32))
    assert p_value(tally(unchecked, ids), TARGET) < CONTROL


@pytest.mark.long
def test_logits_rounded_to_the_stored_dtype_before_sampling_are_lossless():
    logits = 64 + np.array([0.2, -0.2, 0.24, 0.26, 0.6, 0.0])  # bfloat16 has steps of 0.5 there
    store, ids = filled(logits, position=3)
    assert_distributed(tally(store, ids), TARGET, "rounded, then sampled")
    store, ids = filled(logits, position=3, rounded=False)
    assert p_value(tally(store, ids), TARGET) < CONTROL


# No copies


LARGE, LARGE_K = 32_768, 16


@functools.cache
def large_drafter() -> tuple[Any, ...]:
    """A drafter whose model is small beside one row of its store, and arguments for it."""
    drafter = lm.ModelDrafter(tiny.OneRow(LARGE))
    config = sd.SpecDecodeConfig(num_speculative_tokens=LARGE_K)
    params = jnp.linspace(-1, 1, LARGE)

    @functools.partial(jax.jit, donate_argnames="store")
    def propose(params, store, lengths):
        context = tiny.context(jnp.zeros((4, 32), jnp.int32), lengths, 1.0, k=LARGE_K)
        return drafter.propose(params, context, (), store)[0]

    return propose, params, drafter.init_store(params, 4, config)


@pytest.mark.long
def test_drafting_writes_into_the_store_and_holds_no_second_one():
    propose, params, store = large_drafter()
    compiled = propose.lower(params, store, i32([3, 3, 3, 3])).compile()
    memory = compiled.memory_analysis()
    size = store.logits.nbytes
    assert memory.alias_size_in_bytes >= size
    # One step's logits [S, 2, Vd] and rows [S, Vd], not [K, S, Vd].
    assert memory.temp_size_in_bytes < size / 2
    pointer = store.logits.unsafe_buffer_pointer()
    proposal = compiled(params, store, i32([3, 3, 3, 3]))
    assert store.logits.is_deleted()
    assert proposal.store.logits.unsafe_buffer_pointer() == pointer
    assert (proposal.store.logits == params[None, :]).all()


@pytest.mark.parametrize("slots", [None, [2, 0]], ids=["all slots", "some slots"])
def test_writing_and_evicting_touch_only_what_they_change(slots):
    batch = 4 if slots is None else len(slots)

    @functools.partial(jax.jit, donate_argnames="store")
    def change(store, offset, rows, leaving):
        places, temperature = jnp.zeros((batch,), jnp.int32), jnp.ones((batch,))
        where = None if slots is None else i32(slots)
        store = store.write(
            offset,
            rows,
            sd.DraftSample(places, *[jnp.zeros((batch,))] * 2),
            positions=places,
            sampling=sd.SamplingParams(temperature),
            slots=where,
        )
        return store.evict(leaving)

    store = sd.DraftStore.create(4, LARGE_K, LARGE)
    arguments = (store, i32(3), jnp.ones((batch, LARGE)), jnp.zeros((4,), bool))
    compiled = change.lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < store.logits.nbytes / 8
    pointer = store.logits.unsafe_buffer_pointer()
    after = compiled(*arguments)
    assert after.logits.unsafe_buffer_pointer() == pointer
    written = [3 * 4 + slot for slot in (range(4) if slots is None else slots)]
    assert np.flatnonzero(np.asarray(after.logits).any(axis=1)).tolist() == sorted(written)


@pytest.mark.parametrize("own_ids", [False, True])
def test_what_a_store_of_some_slots_holds_is_put_where_they_are(own_ids):
    """As if it had been written there; a slot out of range holds nothing."""
    rng, width, count = np.random.default_rng(0), 5, 2
    store = sd.DraftStore.create(4, count, width, own_ids=own_ids)
    some = store.empty(3)
    wanted = store
    slots = i32([3, 9, 1])
    for offset in range(count):
        numbers = rng.normal(size=(3, 3)).astype(np.float32)
        rows = jnp.asarray(rng.normal(size=(3, width)), jnp.float32)
        given = dict(
            drawn=sd.DraftSample(i32([0, 0, 0]), *map(jnp.asarray, numbers)),
            ids=jnp.asarray(rng.integers(0, 9, (3, width)), jnp.int32) if own_ids else None,
            positions=i32([5, 6, 7]),
            sampling=sd.SamplingParams(jnp.array([1.0, 0.5, 0.0])),
        )
        some = some.write(offset, rows, **given)
        wanted = wanted.write(offset, rows, **given, slots=slots)
    jax.tree.map(np.testing.assert_array_equal, store.put(some, slots), wanted)


@pytest.mark.long
def test_verification_reads_the_store_in_place():
    store = sd.DraftStore.create(4, LARGE_K, LARGE)
    sampling, positions = sd.SamplingParams(jnp.ones((4,))), i32([3, 3, 3, 3])

    @jax.jit
    def check(store, token_ids, logits):
        drafts = store.attach(
            sd.Drafts.from_dense(token_ids), positions=positions, sampling=sampling
        )
        return sd.rejection_sample(
            logits,
            drafts,
            sampling=sampling,
            keys=jax.random.split(jax.random.key(0), 4),
            positions=positions,
            config=sd.SpecDecodeConfig(num_speculative_tokens=LARGE_K),
        )

    token_ids = jax.ShapeDtypeStruct((4, LARGE_K), jnp.int32)
    logits = jax.ShapeDtypeStruct((4 * (LARGE_K + 1), LARGE), jnp.float32)
    memory = check.lower(store, token_ids, logits).compile().memory_analysis()
    assert memory.temp_size_in_bytes < store.logits.nbytes / 8


# Errors


ROW = (zeros((SLOTS, NARROW)), zeros((SLOTS,)), zeros((SLOTS,)))
DRAWN = sd.DraftSample(zeros((SLOTS,), jnp.int32), *ROW[1:])
ALL = dict(positions=zeros((SLOTS,), jnp.int32), sampling=at(*[1.0] * SLOTS))
DRAFTS = sd.Drafts.from_flat(zeros((FLAT,), jnp.int32), i32([0] * SLOTS))
TWO = zeros((2,))


def create(*sizes: Any) -> Any:
    return lambda: sd.DraftStore.create(*sizes)


def writing(dtype: Any = jnp.float32, **changes: Any) -> Any:
    row = {"logits": ROW[0], "drawn": DRAWN}
    return lambda: empty(dtype=dtype).write(0, **row | ALL | changes)


def storing(**changes: Any) -> Any:
    return writing(drawn=DRAWN._replace(**changes))


def attaching(**changes: Any) -> Any:
    return lambda: empty().attach(DRAFTS, **ALL | changes)


def counting(**changes: Any) -> Any:
    return lambda: sd.DraftStore.count_fallbacks(attaching()(), **changes)


ERRORS = [
    (create(0, K, NARROW), ValueError, "num_slots"),
    (create(2.5, K, NARROW), TypeError, "num_slots"),
    (create(1, 0, NARROW), ValueError, "num_speculative_tokens"),
    (create(1, K, 0), ValueError, "vocab_size"),
    (create(1, K, NARROW, jnp.int32), TypeError, "dtype"),
    (writing(jnp.bfloat16), TypeError, "logits"),  # not rounded
    (writing(logits=zeros((SLOTS, VOCAB))), ValueError, "logits"),
    (writing(drawn=ROW[1]), TypeError, "drawn"),  # a number of the row alone
    (storing(log_normalizer=TWO), ValueError, r"drawn\.log_normalizer"),
    (storing(row_max=TWO), ValueError, r"drawn\.row_max"),
    (storing(threshold=TWO), ValueError, r"drawn\.threshold"),
    (storing(log_normalizer=None), TypeError, r"drawn\.log_normalizer"),
    (writing(positions=i32([1])), ValueError, "positions"),
    (writing(sampling=at(1.0)), ValueError, r"sampling\.temperature"),
    (writing(sampling=None), TypeError, "sampling"),
    (writing(slots=i32([[1]])), ValueError, "slots"),
    (lambda: empty().evict(zeros((2,), bool)), ValueError, "slots"),
    (attaching(slots=i32([1])), ValueError, r"drafts\.cu_num_draft_tokens"),
    (attaching(positions=i32([1])), ValueError, "positions"),
    (attaching(sampling=at(1.0)), ValueError, r"sampling\.temperature"),
    (counting(sampling=None), TypeError, "sampling"),
]


@pytest.mark.parametrize(
    ("call", "error", "name"), ERRORS, ids=[f"{i}-{name}" for i, (*_, name) in enumerate(ERRORS)]
)
def test_an_argument_that_does_not_fit_is_named(call, error, name):
    with pytest.raises(error, match=f"^{name} must"):
        call()


def test_a_filtered_row_serves_only_with_its_threshold():
    temperature, positions = at(*[0.8] * SLOTS), i32([4] * SLOTS)
    threshold = np.array([-np.inf, 0.5, -np.inf, 1.0, -np.inf], np.float32)
    slots = np.array([1, 2, 3, 0, -1], np.int32)  # of threshold 0.5 at slot 2, of 1.0 at slot 0
    stored = positions, temperature
    by_slots = write(empty(), i32(0), *ROW, *stored, slots, threshold)
    in_place = write(empty(), i32(0), *ROW, *stored, None, threshold)
    each = i32([1] * SLOTS)  # a draft of each slot
    top_p = dataclasses.replace(temperature, top_p=jnp.full((SLOTS,), 0.9))
    for store, kept in ((in_place, threshold), (by_slots, [1.0, -np.inf, 0.5, -np.inf, -np.inf])):
        without = attach(store, each, each, positions, temperature, None).distribution
        assert without.threshold is None
        written = np.isin(np.arange(SLOTS), slots) | (store is in_place)
        np.testing.assert_array_equal(without.valid, np.isneginf(kept) & written)
        filtered = jax.device_get(attach(store, each, each, positions, top_p, None)).distribution
        np.testing.assert_array_equal(filtered.threshold[filtered.rows], kept)
        np.testing.assert_array_equal(filtered.valid, written)
        again = write(store, i32(0), *ROW, positions, temperature)
        assert attach(again, each, each, positions, temperature, None).distribution.valid.all()
