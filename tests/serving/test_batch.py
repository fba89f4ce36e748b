"""What a caller may get wrong, and what it is told; and how sequences grow."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec._src.serving.batch import append
from jax_specdec._src.serving.generate import make_batch

from . import tiny

pytestmark = pytest.mark.newest

VOCAB = 5


def generate(**changes: Any) -> sd.GenerateOutput:
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
    return sd.generate(tiny.Trigram(VOCAB), table, named.pop("prompts"), **named)


ERRORS = {
    "no prompts": (dict(prompts=[]), ValueError, "prompts must hold at least one prompt"),
    "an empty prompt": (
        dict(prompts=[[1], []]),
        ValueError,
        r"prompts\[1\] must hold at least one token, but it is empty",
    ),
    "an id past the vocabulary": (
        dict(prompts=[[0, VOCAB], [1]]),
        ValueError,
        r"prompts\[0\] must hold ids in \[0, 5\), but they span 0 to 5",
    ),
    "a negative id": (
        dict(prompts=[[1], [4, -1]]),
        ValueError,
        r"prompts\[1\] must hold ids in \[0, 5\), but they span -1 to 4",
    ),
    "an id that is no integer": (dict(prompts=[[1], [2.0]]), TypeError, r"prompts\[1\] must"),
    "text for ids": (dict(prompts=["a", "b"]), TypeError, r"prompts\[0\] must"),
    "one prompt, not a list of them": (dict(prompts=[1, 2]), TypeError, "prompts.* must"),
    "temperatures, one per prompt": (
        dict(temperature=[0.0, 1.0]),
        TypeError,
        r"temperature must be one value, but it is \[0.0, 1.0\]: for requests that differ, "
        r"give a list, options=\[RequestOptions\(temperature=...\), ...\]",
    ),
    "an array of temperatures": (
        dict(temperature=np.zeros(2)),
        TypeError,
        r"temperature must be one value, but it is an array of float64\[2\]: for requests",
    ),
    "a negative temperature": (
        dict(temperature=-0.5),
        ValueError,
        "temperature must be finite and not negative, but it is -0.5",
    ),
    "a temperature that is NaN": (
        dict(temperature=float("nan")),
        ValueError,
        "temperature must be finite and not negative, but it is nan",
    ),
    "an infinite temperature": (
        dict(temperature=float("inf")),
        ValueError,
        "temperature must be finite and not negative, but it is inf",
    ),
    "a temperature past float32": (
        dict(temperature=1e39),
        ValueError,
        "temperature must be finite and not negative, but it is 1e.39",
    ),
    "budgets, one per prompt": (
        dict(max_new_tokens=[1, 2]),
        TypeError,
        r"max_new_tokens must be one value, but it is \[1, 2\]: for requests that differ,",
    ),
    "a negative budget": (
        dict(max_new_tokens=-1),
        ValueError,
        "max_new_tokens must be at least 0, but it is -1",
    ),
    "a budget that is no integer": (dict(max_new_tokens=2.5), TypeError, "max_new_tokens must"),
    "a temperature that is no number": (dict(temperature=None), TypeError, "temperature must"),
    "an argument that there is not": (
        dict(temprature=0.5),
        TypeError,
        "unknown argument 'temprature'; RequestOptions has 'temperature'",
    ),
    "one stop token, not a list": (dict(stop_token_ids=3), TypeError, "stop_token_ids must"),
    "a stop token that is no integer": (
        dict(stop_token_ids=[2.5]),
        TypeError,
        "stop_token_ids must",
    ),
    "a stop token past the vocabulary": (
        dict(stop_token_ids=[4, VOCAB]),
        ValueError,
        r"stop_token_ids must hold ids in \[0, 5\), but they span 4 to 5",
    ),
    "an untyped key": (
        dict(key=np.array([0, 1], np.uint32)),
        TypeError,
        "key must be typed, as jax.random.key and jax.random.split give, but it is",
    ),
    "a seed for a key": (dict(key=0), TypeError, "key must be typed"),
    "a key per request": (
        dict(key=jax.random.split(jax.random.key(0), 2)),
        TypeError,
        r"key must be one key, but its shape is \[2\]",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_it_is_refused_with_a_reason(changes, error, message):
    with pytest.raises(error, match=message):
        generate(**changes)


def test_arguments_may_be_arrays():
    arrays = generate(
        prompts=[np.array([1]), np.array([2, 3], np.uint8)],
        temperature=jnp.float32(0),
        max_new_tokens=np.int64(2),
        stop_token_ids=np.array([4]),
    )
    tiny.assert_same(arrays, generate())


@pytest.mark.parametrize(("length", "budget", "slack"), [(1, 0, 1), (32, 32, 6), (33, 500, 33)])
def test_sequences_have_room_for_the_budget_and_for_a_step_past_it(length, budget, slack):
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


def append_one(emitted: list[int], budget: int, stop_token_ids: tuple[int, ...] = ()) -> Any:
    """Appends what a verification emitted to the sequence 3 1."""
    options = [sd.RequestOptions(max_new_tokens=budget)]
    batch, _, _ = make_batch([[3, 1]], options, vocab_size=9, key=None, slack=4)
    stops = jnp.asarray(np.array([stop_token_ids], np.int32))
    batch = dataclasses.replace(
        batch, options=dataclasses.replace(batch.options, stop_token_ids=stops)
    )
    row = [*emitted, *[-1] * (4 - len(emitted))]
    output = sd.RejectionSampleOutput(
        jnp.array([row], jnp.int32),
        jnp.array([len(emitted) - 1]),
        jnp.array([len(emitted)]),
        jnp.array([int(sd.Status.OK)]),
    )
    batch, record = append(batch, output, jnp.array([3]))
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
def test_tokens_are_kept_up_to_a_stop_token_or_the_budget(
    emitted, budget, stop_token_ids, kept, done
):
    assert append_one(emitted, budget, stop_token_ids) == (kept, done)
