"""Penalties: rows against a count of each row's own past, written in NumPy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import ones, zeros
from lower_floor import platform

import jax_specdec as sd

V, K = 11, 3
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
PROMPTS = [[4, 4, 7], [1], [0, 2, 9, 9], [5, 6]]
OUTPUTS = [[7, 3, 3, 3], [], [9, 9, 1], [10, 10]]
DRAFTS = [[3, 8, 3], [1, 1], [], [-1, 10]]  # the last proposes nothing at its first position
FREQUENCY, PRESENCE = [0.5, -0.25, 0.0, 1.0], [0.0, 0.75, -1.5, 0.25]
REPETITION = [1.5, 2.0, 0.7, 1.0]

from_sequences = jax.jit(sd.Penalties.from_sequences, static_argnames="vocab_size")


def apply_eagerly(
    rows: Any, drafts: Any, penalties: Any, *, config: sd.SpecDecodeConfig | None
) -> jax.Array:
    return sd.process_logits(rows, drafts, sd.LogitsProcessors(penalties=penalties), config=config)


apply = jax.jit(apply_eagerly, static_argnames="config")


def penalized(row: np.ndarray, prompt: Sequence[int], output: Sequence[int], b: int) -> np.ndarray:
    """One row, float64."""
    x = row.astype(np.float64)
    for token in set(prompt) | set(output):
        if 0 <= token < len(x):
            x[token] = x[token] / REPETITION[b] if x[token] > 0 else x[token] * REPETITION[b]
    for token in output:
        if 0 <= token < len(x):
            x[token] -= FREQUENCY[b]
    for token in set(output):
        if 0 <= token < len(x):
            x[token] -= PRESENCE[b]
    return x


def penalties(**replace: Any) -> sd.Penalties:
    length = 9
    sequences = [p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)]
    values = dict(frequency=FREQUENCY, presence=PRESENCE, repetition=REPETITION) | replace
    return from_sequences(
        np.int32([s + [8] * (length - len(s)) for s in sequences]),  # what is past is not counted
        lengths=np.int32([len(s) for s in sequences]),
        prompt_lengths=np.int32([len(p) for p in PROMPTS]),
        vocab_size=V,
        **{name: np.float32(value) for name, value in values.items()},
    )


def packed() -> sd.Drafts:
    ids = sum(DRAFTS, []) + [2, 2]  # padding
    return sd.Drafts.from_flat(np.int32(ids), np.int32([len(d) for d in DRAFTS]))


def logits(rows: int, columns: int = V, dtype: Any = jnp.float32) -> np.ndarray:
    return (3 * np.random.default_rng(rows).standard_normal((rows, columns))).astype(dtype)


@pytest.mark.newest
def test_counts_are_those_of_the_sequences() -> None:
    found = jax.device_get(penalties())
    for b, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        assert found.counts[b].tolist() == [output.count(token) for token in range(V)]
        assert found.in_prompt[b].tolist() == [token in prompt for token in range(V)]


@pytest.mark.newest
def test_ids_outside_the_vocabulary_are_not_counted() -> None:
    one = np.ones(1, np.float32)
    found = from_sequences(
        np.int32([[-1, V, 2, -V, V + 3, 2]]),
        lengths=np.int32([6]),
        prompt_lengths=np.int32([3]),
        vocab_size=V,
        frequency=one,
        presence=one,
        repetition=one,
    ).append(np.int32([-1]))
    assert np.flatnonzero(found.in_prompt).tolist() == [2]
    assert found.counts.tolist()[0] == [0, 0, 1, *[0] * (V - 3)]


@functools.partial(jax.jit, static_argnames="config")
def apply_in_blocks(*args: Any, config: sd.SpecDecodeConfig) -> jax.Array:
    """As a TPU does it."""
    with platform.assume("tpu"):
        return apply_eagerly(*args, config=config)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("has_bonus_rows", "dtype", "apply"),
    [
        (True, "bfloat16", apply),
        (False, "float32", apply),
        (True, "float32", apply_in_blocks),  # 13 rows: the last block overlaps the first
    ],
)
def test_each_row_counts_the_output_and_the_drafts_before_it(
    has_bonus_rows: bool, dtype: str, apply: Any
) -> None:
    drafts = packed()
    n, batch = drafts.token_ids.shape[0], len(PROMPTS)
    x = logits(n + batch * has_bonus_rows, dtype=dtype)
    found = np.asarray(apply(x, drafts, penalties(), config=CONFIG))
    assert found.dtype == np.float32
    row = 0
    for b in range(batch):
        for offset in range(len(DRAFTS[b]) + has_bonus_rows):
            past = OUTPUTS[b] + DRAFTS[b][:offset]
            wanted = penalized(np.asarray(x[row], np.float32), PROMPTS[b], past, b)
            np.testing.assert_allclose(found[row], wanted, rtol=1e-6, atol=1e-6)
            row += 1
    assert row == len(sum(DRAFTS, [])) + batch * has_bonus_rows


@pytest.mark.newest
@pytest.mark.parametrize(("apply", "times"), [(apply, 1), (apply_in_blocks, 3)])
def test_without_drafts_there_is_one_row_which_may_be_narrower(apply: Any, times: int) -> None:
    """Also of more requests than there are rows in a block."""
    x = logits(len(PROMPTS), V - 2)
    drafted = [3, 1, 2, 10]
    own = jax.device_get(penalties().append(np.int32(drafted)))
    many = jax.tree.map(lambda x: np.concatenate([x] * times), (x, own))
    found = np.asarray(apply(many[0], None, many[1], config=None))
    for row, result in enumerate(found):
        b = row % len(PROMPTS)
        wanted = penalized(np.asarray(x[b]), PROMPTS[b], [*OUTPUTS[b], drafted[b]], b)
        np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-6)


def test_neutral_requests_keep_their_rows_to_the_bit() -> None:
    neutral = dict(frequency=[0.0] * 4, presence=[0.0] * 4, repetition=[1.0] * 4)
    drafts = packed()
    x = logits(drafts.token_ids.shape[0] + len(PROMPTS), dtype=jnp.bfloat16)
    x[:, 3], x[0, 4] = -np.inf, np.nan
    wanted = x.astype(np.float32)
    assert bool(penalties(**neutral).is_neutral)
    found = apply(x, drafts, penalties(**neutral), config=CONFIG)
    np.testing.assert_array_equal(found, wanted)

    one = penalties(**(neutral | dict(frequency=[0.0, 0.0, 0.0, 0.5])))  # the pass runs
    assert not bool(one.is_neutral)
    found = np.asarray(apply(x, drafts, one, config=CONFIG))
    np.testing.assert_array_equal(found[:8], wanted[:8])
    assert (found[8:11] != wanted[8:11]).any()


@pytest.mark.newest
@pytest.mark.parametrize(
    "bad",
    [
        dict(frequency=[np.nan, 0, 0, 0]),
        dict(presence=[np.inf, 0, 0, 0]),
        dict(repetition=[0.0, 1, 1, 1]),
        dict(repetition=[-2.0, 1, 1, 1]),
        dict(repetition=[np.inf, 1, 1, 1]),
    ],
    ids=lambda bad: f"{next(iter(bad))} {next(iter(bad.values()))[0]}",
)
def test_a_penalty_out_of_range_ends_its_own_request_alone(bad: dict[str, list[float]]) -> None:
    drafts = packed()
    x = logits(drafts.token_ids.shape[0] + len(PROMPTS))
    ((name, values),) = bad.items()
    good = {name: [1.0 if name == "repetition" else 0.0, *values[1:]]}
    rows = {
        key: np.asarray(apply(x, drafts, penalties(**p), config=CONFIG))
        for key, p in (("bad", bad), ("good", good))
    }
    assert np.isnan(rows["bad"][:4]).all()
    np.testing.assert_array_equal(rows["bad"][4:11], rows["good"][4:11])
    output = verify(rows["bad"], drafts)
    assert output.status.tolist() == [int(sd.Status.BAD_TARGET_ROW), 0, 0, 0]


@jax.jit
def verify(x: jax.Array, drafts: sd.Drafts) -> sd.RejectionSampleOutput:
    return sd.rejection_sample(
        x,
        drafts,
        sampling=sd.SamplingParams(np.float32([0.0, 1.0, 0.5, 0.0])),
        keys=jax.random.split(jax.random.key(1), 4),
        positions=np.int32([7, 1, 7, 4]),
        config=CONFIG,
    )


def test_bad_offsets_leave_the_rows_of_other_requests() -> None:
    drafts = packed()
    x = logits(drafts.token_ids.shape[0] + len(PROMPTS))
    cu = np.array(drafts.cu_num_draft_tokens)
    cu[4] = 99  # the last request
    bad = dataclasses.replace(drafts, cu_num_draft_tokens=cu)
    good, found = (np.asarray(apply(x, d, penalties(), config=CONFIG)) for d in (drafts, bad))
    np.testing.assert_array_equal(found[:8], good[:8])


@pytest.mark.newest
def test_the_pass_has_no_temporaries_as_large_as_logits() -> None:
    of, b, vocab = jax.ShapeDtypeStruct, 4, 50257
    shapes = sd.Penalties(
        *[of((b,), jnp.float32)] * 3, of((b, vocab), jnp.int32), of((b, vocab), jnp.bool_)
    )
    drafts = sd.Drafts(of((b * K,), jnp.int32), of((b + 1,), jnp.int32))
    lowered = apply.lower(of((b * K + b, vocab), jnp.bfloat16), drafts, shapes, config=CONFIG)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * memory.output_size_in_bytes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(penalties=3), TypeError, r"processors\.penalties"),
        (dict(drafts=3), TypeError, "drafts"),
        (dict(config=None), TypeError, "config"),
        (dict(rows=3.0), TypeError, "logits"),
        (dict(rows=zeros((4, V))), ValueError, "logits"),
        (dict(rows=zeros((13, V + 1))), ValueError, "logits"),
        (
            dict(drafts=sd.Drafts.from_flat(zeros((9,), jnp.int32), jnp.array([9]))),
            ValueError,
            r"drafts\.cu_num_draft_tokens",
        ),
        (dict(frequency=zeros((2, 2))), ValueError, r"processors\.penalties\.frequency"),
        (dict(repetition=ones((4,), jnp.int32)), TypeError, r"processors\.penalties\.repetition"),
        (dict(counts=zeros((3, V), jnp.int32)), ValueError, r"processors\.penalties\.counts"),
        (dict(in_prompt=zeros((4, V))), TypeError, r"processors\.penalties\.in_prompt"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    drafts = packed()
    call = dict(rows=jnp.zeros((13, V)), drafts=drafts, penalties=penalties(), config=CONFIG)
    fields = {f.name for f in dataclasses.fields(sd.Penalties)}
    inner = {name: value for name, value in change.items() if name in fields}
    call |= {name: value for name, value in change.items() if name not in fields}
    if inner:
        call["penalties"] = dataclasses.replace(penalties(), **inner)
    with pytest.raises(error, match=f"^{message}"):
        apply_eagerly(**call)
