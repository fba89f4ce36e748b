"""What a caller may get wrong, and what it is told; and how sequences grow."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from upper_floor import append, make_batch

import jax_specdec as sd
from jax_specdec import lm

from . import tiny

pytestmark = pytest.mark.newest

VOCAB = 5


def generate(**changes: Any) -> lm.GenerateOutput:
    named = dict(
        prompts=[[1], [2, 3]],
        drafter=tiny.Scripted(),
        draft_params=jnp.zeros((2, 64), jnp.int32),
        config=sd.SpecDecodeConfig(num_speculative_tokens=1),
        max_new_tokens=2,
        stop_token_ids=(4,),
    )
    named |= changes
    table = jnp.zeros((VOCAB,) * 3)
    return lm.generate(tiny.Trigram(VOCAB), table, named.pop("prompts"), **named)


ERRORS = {
    "an empty prompt": (dict(prompts=[[1], []]), ValueError, r"prompts\[1\]"),
    "an id past the vocabulary": (dict(prompts=[[0, VOCAB], [1]]), ValueError, r"prompts\[0\]"),
    "a negative id": (dict(prompts=[[1], [4, -1]]), ValueError, r"prompts\[1\]"),
    "an id that is no integer": (dict(prompts=[[1], [2.0]]), TypeError, r"prompts\[1\]"),
    "a negative temperature": (dict(temperature=-0.5), ValueError, "temperature"),
    "an argument that is near none": (dict(penalty=0.5), TypeError, "unknown argument 'penalty'$"),
    "a stop past the vocabulary": (dict(stop_token_ids=[4, VOCAB]), ValueError, "stop_token_ids"),
    "an untyped key": (dict(key=np.array([0, 1], np.uint32)), TypeError, "key"),
    "a key per request": (dict(key=jax.random.split(jax.random.key(0), 2)), TypeError, "key"),
}


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_it_is_refused_with_a_reason(changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        generate(**changes)


@pytest.mark.long
def test_arguments_may_be_arrays():
    arrays = generate(
        prompts=[np.array([1]), np.array([2, 3], np.uint8)],
        temperature=jnp.float32(0),
        max_new_tokens=np.int64(2),
        stop_token_ids=np.array([4]),
    )
    tiny.assert_same(arrays, generate())


@pytest.mark.long
@pytest.mark.parametrize("logprobs", [None, sd.LogprobsConfig(num_top=2)], ids=["", "logprobs"])
def test_without_prompts_the_output_is_that_of_no_requests(logprobs):
    some, none = generate(logprobs=logprobs), generate(prompts=[], logprobs=logprobs)
    assert none.completions == none.status == []
    assert jax.tree.structure(none.steps) == jax.tree.structure(some.steps)
    for empty, full in zip(jax.tree.leaves(none.steps), jax.tree.leaves(some.steps), strict=True):
        assert (empty.shape, empty.dtype) == ((0, 0, *full.shape[2:]), full.dtype)
    assert sd.AcceptanceStats.from_steps(none.steps).num_verifications == 0


def test_without_prompts_there_is_no_step_and_no_difference():
    model, table = tiny.Trigram(VOCAB), jnp.zeros((VOCAB,) * 3)
    plain = lm.generate_plain(model, table, [])
    assert plain.completions == [] and plain.steps.num_kept.shape == (0, 0)
    steps = lm.generate_stream(
        model,
        table,
        [],
        drafter=tiny.Scripted(),
        draft_params=jnp.zeros((2, 64), jnp.int32),
        config=sd.SpecDecodeConfig(num_speculative_tokens=1),
        options=[],
    )
    assert list(steps) == []
    assert lm.greedy_differences(model, table, [], plain, plain) == []


@pytest.mark.parametrize(("length", "budget", "slack"), [(1, 0, 1), (32, 32, 6), (33, 500, 33)])
def test_sequences_have_room_for_the_budget_and_a_step(length, budget, slack):
    batch, prompt_size, max_steps = make_batch(
        [[1] * length, [2]],
        tiny.options_of(2, max_new_tokens=[budget, 0]),
        vocab_size=VOCAB,
        key=None,
        slack=slack,
    )
    assert prompt_size >= length
    assert batch.token_ids.shape[1] >= length + budget + slack
    assert batch.lengths.tolist() == [length, 1]
    assert batch.options.max_lengths.tolist() == [length + budget, 1]
    assert batch.done.tolist() == [budget == 0, True]
    assert max_steps >= budget and max_steps > 0
    assert batch.token_ids[0, :length].tolist() == [1] * length


append_jit = jax.jit(append)


def append_one(emitted: list[int], budget: int, stop_token_ids: tuple[int, ...] = ()) -> Any:
    """Appends what a verification emitted to the sequence 3 1."""
    options = [lm.RequestOptions(max_new_tokens=budget)]
    batch, _, _ = make_batch([[3, 1]], options, vocab_size=9, key=None, slack=4)
    stops = np.array([[*stop_token_ids, -1, -1, -1][:3]], np.int32)
    batch = dataclasses.replace(
        batch, options=dataclasses.replace(batch.options, stop_token_ids=stops)
    )
    row = [*emitted, *[-1] * (4 - len(emitted))]
    one = (row, len(emitted) - 1, len(emitted), int(sd.Status.OK))
    output = sd.RejectionSampleOutput(*(np.array([x], np.int32) for x in one))
    batch, record = jax.device_get(append_jit(batch, output, np.array([3], np.int32)))
    sequence = batch.token_ids[0, : batch.lengths[0]].tolist()
    assert record.token_ids[0, : record.num_kept[0]].tolist() == sequence[2:]
    assert (record.token_ids[0, record.num_kept[0] :] == -1).all()
    assert record.num_emitted.tolist() == [len(emitted)]
    return sequence[2:], bool(batch.done[0])


@pytest.mark.parametrize(
    ("emitted", "budget", "stop_token_ids", "kept", "done"),
    [
        ([5, 6, 7], 9, (), [5, 6, 7], False),
        ([5, 6, 7], 3, (), [5, 6, 7], True),
        ([5, 6, 7], 2, (), [5, 6], True),
        ([5, 6, 7], 9, (6,), [5, 6], True),
        ([5, 6, 7], 9, (7, 5), [5], True),
        ([5, 6, 7, 8], 9, (8,), [5, 6, 7, 8], True),
        ([5, 6, 7], 9, (8, 3, 1), [5, 6, 7], False),  # a stop token in the prompt
        ([5, 6, 7], 2, (6,), [5, 6], True),
        ([5, 6, 7], 1, (6,), [5], True),
        ([5], 9, (-1,), [5], False),  # padding is no token
    ],
)
def test_tokens_are_kept_up_to_a_stop_or_the_budget(emitted, budget, stop_token_ids, kept, done):
    assert append_one(emitted, budget, stop_token_ids) == (kept, done)


def kept(row: list[int], count: int, stops: list[int], budget: int) -> tuple[int, bool]:
    """What `truncate` says about one request, token by token in plain Python."""
    for index in range(min(count, max(budget, 0))):
        if row[index] in stops and row[index] >= 0:
            return index + 1, True
    return min(count, max(budget, 0)), False


@pytest.mark.parametrize("width", [1, 5])
def test_truncate_is_that_of_plain_python(width):
    rng = np.random.default_rng(width)
    b, m = 500, 3
    counts = rng.integers(0, width + 1, b)
    tokens = np.where(np.arange(width) < counts[:, None], rng.integers(0, 9, (b, width)), -1)
    stops = rng.integers(-1, 9, (b, m))
    budgets = rng.integers(-1, width + 3, b)
    cut = jax.jit(sd.truncate)
    for stop, budget in ((stops, budgets), (stops[0], 3), (None, budgets), (stops, None)):
        num_kept, is_stopped = cut(tokens, counts, stop_token_ids=stop, max_tokens=budget)
        assert (num_kept.dtype, is_stopped.dtype) == (jnp.int32, bool)
        rows = [] if stop is None else np.broadcast_to(stop, (b, m)).tolist()
        most = np.broadcast_to(width if budget is None else budget, b)
        expected = [
            kept(tokens[i].tolist(), counts[i], rows[i] if rows else [], most[i]) for i in range(b)
        ]
        assert [*zip(num_kept.tolist(), is_stopped.tolist(), strict=True)] == expected


def test_truncate_without_requests_and_without_stop_tokens():
    num_kept, is_stopped = sd.truncate(jnp.zeros((0, 3), jnp.int32), jnp.zeros((0,), jnp.int32))
    assert (num_kept.shape, is_stopped.shape) == ((0,), (0,))
    num_kept, is_stopped = sd.truncate(jnp.array([[1, 2]]), jnp.array([2]), stop_token_ids=[])
    assert (num_kept.tolist(), is_stopped.tolist()) == ([2], [False])


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        (dict(token_ids=jnp.zeros(3, jnp.int32)), ValueError, "token_ids"),
        (dict(token_ids=jnp.zeros((2, 3))), TypeError, "token_ids"),
        (dict(num_emitted=jnp.array([1])), ValueError, "num_emitted"),
        (dict(stop_token_ids=jnp.zeros((3, 1), jnp.int32)), ValueError, "stop_token_ids"),
        (dict(stop_token_ids=jnp.int32(1)), ValueError, "stop_token_ids"),
        (dict(stop_token_ids=[1.5]), TypeError, "stop_token_ids"),
        (dict(max_tokens=jnp.array([1, 2, 3])), ValueError, "max_tokens"),
        (dict(max_tokens=2.5), TypeError, "max_tokens"),
    ],
)
def test_truncate_refuses(changes, error, name):
    arguments = dict(token_ids=jnp.zeros((2, 3), jnp.int32), num_emitted=jnp.array([1, 2]))
    with pytest.raises(error, match=name):
        sd.truncate(**arguments | changes)


def test_a_bias_is_named_as_json_names_it() -> None:
    options = lm.RequestOptions(logit_bias={"5": 1.0, 7: -2.0})
    assert options.logit_bias == {5: 1.0, 7: -2.0}


def test_log_probabilities_of_steps_are_joined_as_tokens_are() -> None:
    """Two steps of two requests: 2 and 1 tokens of the first, none and 2 of the second."""
    own = np.array([[[1, 2], [9, 9]], [[3, 9], [4, 5]]], np.float32)  # [S, B, K+1]
    top = np.stack([own, 10 * own], axis=3)  # [S, B, K+1, 2]
    kept = np.array([[2, 0], [1, 2]], np.int32)
    found = sd.TokenLogprobs(own, top.astype(np.int32), top)
    steps = lm.StepRecord(own.astype(np.int32), kept, kept, kept, kept, found)
    output = lm.GenerateOutput([[1, 2, 3], [4, 5]], steps, [sd.Status.OK] * 2)
    assert output.logprobs is not None
    for tokens, joined in zip(output.completions, output.logprobs, strict=True):
        assert joined.logprobs.tolist() == tokens
        assert joined.top_token_ids.tolist() == [[x, 10 * x] for x in tokens]
        assert joined.top_logprobs.tolist() == [[x, 10 * x] for x in tokens]
        assert joined.thresholds is None
    assert lm.GenerateOutput([[1]], dataclasses.replace(steps, logprobs=None), []).logprobs is None


def test_the_repr_of_an_output_is_short() -> None:
    record = lm.StepRecord(*(np.zeros((2, 3, *rest), np.int32) for rest in ((2,), (), (), (), ())))
    status = [sd.Status.OK, sd.Status.OK, sd.Status.BAD_TARGET_ROW]
    output = lm.GenerateOutput([[1, 2], [3], []], record, status)
    assert repr(output) == "<GenerateOutput: 3 requests, 3 tokens, 2 steps, 1 failed>"
