"""Biases, bad words and a least length: rows against plain Python, arrays, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lower_floor import PROCESSORS, Sequences, assume, platform
from scipy import special
from upper_floor import PACKING, BatchOptions

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm import OptionSizes

from . import sampled

V, K = 7, 3
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)

# Rows


PROMPTS = [[4, 3], [1, 4, 5], [0, 2, 9], [5, 6]]
OUTPUTS = [[7, 3, 8], [], [9, 5, 1], [10]]
DRAFTS = [[3, 8, 3], [1, 1], [], [-1, 10]]  # the last proposes nothing at its first position
ROW_STOPS = (9, 2)
WIDE = 11
OPTIONS = [
    lm.RequestOptions(bad_words=[[3, 8, 3, 8], [8, 0], [3], [8, 3, 8, 5]], min_tokens=5),
    lm.RequestOptions(logit_bias={0: 1.5, 10: -2.0}, repetition_penalty=1.5, min_tokens=2),
    lm.RequestOptions(bad_words=[[2, 9, 9, 5, 1, 7], [5, 1, 2], [1, 2]], min_tokens=1),
    lm.RequestOptions(logit_bias={4: -0.5}, frequency_penalty=0.7, bad_words=[[6, 10, 1]]),
]


def with_sequences(options: BatchOptions, sequences: Sequence[Sequence[int]]) -> Any:
    """Processors that are up to date; what is past a sequence is not read."""
    assert options.processors is not None
    arrays = (
        np.array([[*s, *[8] * (12 - len(s))] for s in sequences], np.int32),
        np.array([len(s) for s in sequences], np.int32),
        options.prompt_lengths,
    )
    return up_to_date(options.processors, *arrays)


@jax.jit
def up_to_date(processors: Any, *arrays: jax.Array) -> Any:
    return processors.with_sequences(Sequences(*arrays, WIDE))


def processors(options: Sequence[lm.RequestOptions] = OPTIONS) -> sd.LogitsProcessors:
    """What `options` ask of the sequences above."""
    sequences = [p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)]
    stopping = [dataclasses.replace(one, stop_token_ids=ROW_STOPS) for one in options]
    lengths = [len(p) for p in PROMPTS]
    asked = BatchOptions.create(stopping, lengths, WIDE, max_stop_tokens=3)
    return with_sequences(asked, sequences)


def packed() -> sd.Drafts:
    ids = sum(DRAFTS, []) + [2, 2]  # padding
    return sd.Drafts.from_flat(jnp.array(ids), jnp.array([len(d) for d in DRAFTS]))


def logits(rows: int, columns: int = WIDE, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(rows).standard_normal((rows, columns)), dtype)


def expected(row: np.ndarray, b: int, drafts: Sequence[int]) -> np.ndarray:
    """One row of request b, before temperature: log p at temperature 1, where nothing is masked."""
    with np.errstate(divide="ignore"):
        return np.log(
            sampled.processed(row, PROMPTS[b], [*OUTPUTS[b], *drafts], 1.0, OPTIONS[b], ROW_STOPS)
        )


apply = jax.jit(sd.process_logits, static_argnames=("config", "padded_rows"))
append = jax.jit(sd.LogitsProcessors.append)


@functools.partial(jax.jit, static_argnames="config")
def in_blocks(*args: Any, config: sd.SpecDecodeConfig) -> jax.Array:
    """As a TPU does it."""
    with platform.assume("tpu"):
        return sd.process_logits(*args, config=config)


@pytest.mark.parametrize(
    ("extra_rows", "dtype", "apply"),
    [
        (4, "bfloat16", apply),
        (0, "float32", apply),
        (4, "float32", sd.process_logits),
        (4, "float32", in_blocks),  # 13 rows: the last block overlaps the first
    ],
)
def test_each_row_sees_the_sequence_and_the_drafts_before_it(
    extra_rows: int, dtype: str, apply: Any
) -> None:
    drafts = packed()
    x = logits(drafts.token_ids.shape[0] + extra_rows, dtype=dtype)
    found = apply(x, drafts, processors(), config=CONFIG)
    assert found.dtype == jnp.float32
    found = special.log_softmax(np.asarray(found), axis=1)
    row, num_forbidden = 0, 0
    for b in range(len(PROMPTS)):
        for offset in range(len(DRAFTS[b]) + (extra_rows > 0)):
            want = expected(np.asarray(x[row], np.float32), b, DRAFTS[b][:offset])
            np.testing.assert_allclose(found[row], want, rtol=2e-6, atol=2e-6)
            num_forbidden += np.isneginf(want).sum()
            row += 1
    assert num_forbidden >= 12


@pytest.mark.newest
def test_rows_may_be_padded() -> None:
    x = logits(20, dtype=jnp.bfloat16)
    found = apply(x, packed(), processors(), config=CONFIG, padded_rows=True)
    np.testing.assert_array_equal(
        found[:11], apply(x[:13], packed(), processors(), config=CONFIG)[:11]
    )


def test_a_drafter_appends_its_draws_and_may_know_fewer_tokens() -> None:
    drafted = [[3, 1, 2, 6], [8, 2, 7, 10]]
    now = processors()
    for j, ids in enumerate(drafted):
        now = append(now, np.array(ids, np.int32))
        x = logits(4, WIDE - 2)
        found = special.log_softmax(np.asarray(apply(x, None, now)), axis=1)
        for b in range(4):
            row = np.full(WIDE, -np.inf)
            row[: WIDE - 2] = x[b]
            want = expected(row, b, [ids[b] for ids in drafted[: j + 1]])
            np.testing.assert_allclose(found[b], want[: WIDE - 2], rtol=2e-6, atol=2e-6)


def test_what_nobody_asks_for_changes_nothing() -> None:
    x = logits(13, dtype=jnp.bfloat16).at[3, 4].set(jnp.nan)
    options = [lm.RequestOptions(stop_token_ids=ROW_STOPS)] * 4
    none = BatchOptions.create(options, [2, 3, 3, 2], WIDE, keep_neutral=True)
    found = with_sequences(none, [[0] * n for n in (5, 3, 6, 3)])
    assert bool(found.is_neutral)
    np.testing.assert_array_equal(apply(x, packed(), found, config=CONFIG), x.astype(jnp.float32))
    only_masks = dataclasses.replace(found, logit_bias=None, penalties=None)
    assert apply(x, packed(), only_masks, config=CONFIG).dtype == jnp.bfloat16
    for name in ("logit_bias", "penalties", "bad_words", "min_tokens"):
        one = dataclasses.replace(found, **{name: getattr(processors(), name)})
        assert not bool(one.is_neutral)


@pytest.mark.newest
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bias_out_of_range_ends_its_own_request_alone(bad: float) -> None:
    x = logits(13)
    bias = sd.LogitBias.from_mappings([{3: bad}, {}, {4: 1.0}, {}], size=2)
    output = sd.rejection_sample(
        apply(x, packed(), sd.LogitsProcessors(logit_bias=bias), config=CONFIG),
        packed(),
        sampling=sd.SamplingParams(jnp.array([0.0, 1.0, 0.5, 0.0])),
        keys=jax.random.split(jax.random.key(1), 4),
        positions=jnp.array([7, 1, 7, 4]),
        config=CONFIG,
    )
    assert output.status.tolist() == [int(sd.Status.BAD_TARGET_ROW), 0, 0, 0]


@pytest.mark.newest
def test_what_is_carried_along_is_what_the_longer_sequence_gives() -> None:
    steps = [[[3, 8, 3], [9], [1, 2], [6]], [[10], [1, 4], [], [7, 7, 7]]]
    stopping = [dataclasses.replace(one, stop_token_ids=ROW_STOPS) for one in OPTIONS]
    asked = BatchOptions.create(stopping, [len(p) for p in PROMPTS], WIDE)
    sequences = [p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)]
    carried = with_sequences(asked, sequences)
    for step in steps:
        sequences = [s + new for s, new in zip(sequences, step, strict=True)]
        rows = [new + [-1] * (3 - len(new)) for new in step]
        carried = append(carried, np.array(rows, np.int32))
    outputs = [s[len(p) :] for s, p in zip(sequences, PROMPTS, strict=True)]
    counts = [np.bincount(output, minlength=WIDE) for output in outputs]
    np.testing.assert_array_equal(carried.penalties.counts, counts)
    assert carried.bad_words.recent.tolist() == [([-1] * 5 + s)[-7:] for s in sequences]
    left = [one.min_tokens - len(o) for one, o in zip(OPTIONS, outputs, strict=True)]
    assert carried.min_tokens.remaining.tolist() == left


@pytest.mark.newest
def test_ids_outside_the_vocabulary_are_no_entries() -> None:
    outside = jnp.array([[-1, WIDE, -WIDE, 2**31 - 1]])
    x = logits(1)
    everything = sd.LogitsProcessors(
        sd.LogitBias(outside, jnp.ones((1, 4))),
        None,
        sd.BadWords(outside[:, :, None], jnp.zeros((1, 0), jnp.int32)),
        sd.MinTokens(outside, jnp.array([1])),
    )
    np.testing.assert_array_equal(apply(x, None, everything), x)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a jaxpr and those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from equations(value.jaxpr)


def test_nothing_but_the_rows_has_the_vocabularys_size() -> None:
    vocab, rows = 50257, 13
    given = dataclasses.replace(processors(), penalties=None)
    x = jax.ShapeDtypeStruct((rows, vocab), jnp.bfloat16)
    process = functools.partial(sd.process_logits, config=CONFIG)
    with assume("tpu"):
        traced = jax.make_jaxpr(process)(x, packed(), given)
    large = {
        variable.aval.shape
        for equation in equations(traced.jaxpr)
        for variable in equation.outvars
        if variable.aval.size >= vocab
    }
    assert large == {(rows, vocab), (8, vocab)}  # a TPU takes eight rows at a time
    lowered = jax.jit(process).lower(x, packed(), given)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * memory.output_size_in_bytes


@pytest.mark.long
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_of_a_split_vocabulary_stay_where_they_are(kind: AxisType) -> None:
    columns = 64
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(kind,))
    x = jax.device_put(logits(13, columns), NamedSharding(mesh, P(None, "tensor")))
    given = dataclasses.replace(processors(), penalties=None)
    compiled = apply.lower(x, packed(), given, config=CONFIG).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    found = compiled(x, packed(), given)
    assert found.sharding.spec == P(None, "tensor")
    np.testing.assert_array_equal(found, apply(np.asarray(x), packed(), given, config=CONFIG))


@pytest.mark.newest
def test_without_requests_or_rows_nothing_is_done() -> None:
    given = dataclasses.replace(processors(), penalties=None)
    none = jax.tree.map(lambda x: x[:0], given)
    drafts = sd.Drafts.from_flat(jnp.array([1, 2]), jnp.zeros((0,), jnp.int32))
    assert apply(logits(2), drafts, none, config=CONFIG).shape == (2, WIDE)


# Arrays of a batch


def test_every_option_that_changes_rows_is_packed_once() -> None:
    assert list(PACKING) == list(PROCESSORS)
    packed = [name for names, _ in PACKING.values() for name in names]
    others = ["temperature", "max_new_tokens", "stop_token_ids", "seed", "min_p", "top_k", "top_p"]
    others += ["max_drafts", "cache_salt", "prediction"]
    fields = [field.name for field in dataclasses.fields(lm.RequestOptions)]
    assert sorted(packed + others) == sorted(fields)


def test_arrays_have_room_in_powers_of_2() -> None:
    asked = BatchOptions.create(OPTIONS, [2, 3, 3, 2], WIDE)
    given: Any = asked.processors
    assert given.logit_bias.token_ids.shape == (4, 2)
    assert given.bad_words.words.shape == (4, 4, 8)
    assert given.min_tokens.remaining.tolist() == [5, 2, 1, 0]
    assert given.penalties.counts.shape == (4, 0)  # counted on the device
    assert OptionSizes.of(OPTIONS) == OptionSizes(2, 4, 8, prediction=0)  # nobody has one
    fixed = OptionSizes(3, 5, 6)
    asked = BatchOptions.create(OPTIONS, [2, 3, 3, 2], WIDE, keep_neutral=True, sizes=fixed)
    given = asked.processors
    assert given.logit_bias.values.shape == (4, 3) and given.bad_words.words.shape == (4, 5, 6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (OptionSizes(1, 9, 9), "logit_bias"),
        (OptionSizes(9, 3, 9), "bad_words"),
        (OptionSizes(9, 9, 5), "bad_words"),
    ],
)
def test_more_than_there_is_room_for_is_refused(sizes: OptionSizes, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        for one in OPTIONS:
            sizes.check(one)


def test_options_are_values() -> None:
    one = lm.RequestOptions(logit_bias={np.int64(3): np.float32(0.5)}, bad_words=[np.array([1])])
    same = lm.RequestOptions(logit_bias={3: 0.5}, bad_words=((1,),))
    assert one == same and hash(one) == hash(same) and not one.is_neutral
    assert lm.RequestOptions(logit_bias={}, bad_words=[]).is_neutral


# Errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(logit_bias={7: 1.0}), "logit_bias"),
        (dict(bad_words=[[1], [9, 2]]), r"bad_words\[1\]"),
        (dict(allowed_token_ids=[7]), "allowed_token_ids"),
        (dict(min_tokens=6), "min_tokens"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, Mapping) else "",
)
def test_options_past_the_model_or_the_budget_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        lm.RequestOptions(**fields, max_new_tokens=5).check(V)
    fitting = dict(min_tokens=5, bad_words=[[6]], logit_bias={6: 1.0}, stop_token_ids=[6])
    lm.RequestOptions(**fitting, max_new_tokens=5).check(V)


INTS = np.zeros((4, 2), np.int32)


def process(x: Any, drafts: Any, config: Any = None, **processor: Any) -> Any:
    return sd.process_logits(x, drafts, sd.LogitsProcessors(**processor), config=config)


CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda x, d: sd.process_logits(x, d, None, config=CONFIG), TypeError, "processors"),
    (
        lambda x, d: process(x[:5], d, CONFIG, min_tokens=sd.MinTokens(INTS, INTS[:, 0])),
        ValueError,
        "logits",
    ),
    (lambda x, d: process(x, d, min_tokens=sd.MinTokens(INTS, INTS[:, 0])), TypeError, "config"),
    (lambda x, d: sd.AllowedTokens.pack([None, [12, 13]], vocab_size=13), ValueError, "token_ids"),
    (lambda x, d: sd.LogitBias.from_mappings([{1: 1.0, 2: 1.0}], size=1), ValueError, "biases"),
    (lambda x, d: sd.BadWords.pack([[[1], [2, 3]]], length=1), ValueError, "words"),
    (lambda x, d: sd.BadWords.pack([[[1], [2, 3]]], num_words=1), ValueError, "words"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(logits(13), packed())


@pytest.mark.parametrize(
    ("error", "name", "processor"),
    [
        (TypeError, "logit_bias", {1: 2.0}),
        (ValueError, "logit_bias.values", sd.LogitBias(INTS, np.zeros((4, 3), np.float32))),
        (TypeError, "logit_bias.values", sd.LogitBias(INTS, INTS)),
        (ValueError, "logit_bias.token_ids", sd.LogitBias(INTS[0], np.zeros((2,), np.float32))),
        (TypeError, "bad_words", [[1]]),
        (ValueError, "bad_words.recent", sd.BadWords(INTS[:, :, None][:, :, :0], INTS)),
        (ValueError, "bad_words.recent", sd.BadWords(INTS[:, :, None], INTS)),
        (TypeError, "min_tokens", 3),
        (ValueError, "min_tokens.remaining", sd.MinTokens(INTS, INTS[:1, 0])),
        (TypeError, "allowed_tokens.token_bitmask", sd.AllowedTokens(INTS)),
    ],
)
def test_a_processors_array_that_does_not_fit_is_named(
    error: type[Exception], name: str, processor: Any
) -> None:
    with pytest.raises(error, match=rf"^processors\.{name}"):
        process(logits(13), packed(), CONFIG, **{name.partition(".")[0]: processor})
