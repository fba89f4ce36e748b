"""The loop around the verification: steps, independence, failures, compilations."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import passes
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import compilations

pytestmark = pytest.mark.long

# One compilation serves most tests here: a table that drafts for a table, K = 2, four requests.
VOCAB = 6
K = 2
BUDGETS = (12, 12, 12, 7)
TEMPERATURES = (1.0, 0.0, 0.7, 2.0)
PROMPTS = [[1, 2, 3], [4, 4], [0], [2, 0, 1, 3, 3]]  # none holds token 5
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
POISON = 5


def table_without(token: int, seed: int) -> np.ndarray:
    """A table that never emits `token`."""
    table = tiny.random_table(VOCAB, seed)
    table[:, :, token] = -np.inf
    return table


TARGET = table_without(POISON, seed=1)
DRAFT = (0.7 * TARGET + 0.5 * tiny.random_table(VOCAB, seed=2)).astype(np.float32)


def arguments(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = dict(
        drafter=lm.ModelDrafter(tiny.Trigram(VOCAB)),
        draft_params=DRAFT,
        config=CONFIG,
        temperature=TEMPERATURES,
        key=jax.random.key(7),
        max_new_tokens=BUDGETS,
        target=TARGET,
        prompts=PROMPTS,
    )
    named |= changes
    named["draft_params"] = jnp.asarray(named["draft_params"])
    count = len(named["prompts"])
    temperature, budgets = (
        np.broadcast_to(named.pop(name), (count,)).tolist()
        for name in ("temperature", "max_new_tokens")
    )
    named["options"] = tiny.options_of(count, temperature=temperature, max_new_tokens=budgets)
    positional = tiny.Trigram(VOCAB), jnp.asarray(named.pop("target")), named.pop("prompts")
    return positional, named


def run(**changes: Any) -> lm.GenerateOutput:
    positional, named = arguments(**changes)
    return lm.generate(*positional, **named)


def streamed(**changes: Any) -> lm.StepRecord:
    positional, named = arguments(**changes)
    records = list(lm.generate_stream(*positional, **named))
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(records))
    return jax.tree.map(lambda *xs: np.stack(xs), *records)


def plain(**changes: Any) -> lm.GenerateOutput:
    positional, named = arguments(**changes)
    for name in ("drafter", "draft_params", "config"):
        del named[name]
    return lm.generate_plain(*positional, **named)


# Both loops


@pytest.mark.long
@pytest.mark.newest
def test_the_stream_yields_the_steps_of_generate():
    # A draft table equal to the target's gives the two caches equal contents: they must not
    # become one donated buffer.
    for draft_params in (DRAFT, TARGET):
        output = run(draft_params=draft_params)
        records = streamed(draft_params=draft_params)
        jax.tree.map(np.testing.assert_array_equal, records, output.steps)
        for b, completion in enumerate(output.completions):
            kept = records.token_ids[:, b][records.token_ids[:, b] >= 0]
            assert kept.tolist() == completion
            assert len(completion) == BUDGETS[b]


@pytest.mark.newest
def test_a_target_that_drafts_for_itself_has_samples_accepted_too():
    output = run(draft_params=TARGET)
    for b, budget in enumerate(BUDGETS):
        steps = tiny.steps_of(output, b)
        assert len(steps) == -(-budget // (K + 1))
        assert all(step.num_accepted == K for step in steps)


def test_a_stream_can_be_left_early():
    positional, named = arguments()
    stream = lm.generate_stream(*positional, **named)
    first = next(stream)
    stream.close()
    np.testing.assert_array_equal(first.token_ids, run().steps.token_ids[0])


def test_the_stream_refuses_bad_input_when_it_is_called():
    positional, named = arguments(prompts=[[1], [], [1], [1]])
    with pytest.raises(ValueError, match=r"^prompts\[1\]"):
        lm.generate_stream(*positional, **named)


def test_a_stream_of_empty_budgets_has_no_steps():
    positional, named = arguments(max_new_tokens=0)
    assert list(lm.generate_stream(*positional, **named)) == []


@pytest.mark.parametrize("generate", [run, plain])
def test_a_generation_of_empty_budgets_has_no_steps(generate):
    output = generate(max_new_tokens=0)
    assert output.completions == [[]] * len(PROMPTS)
    assert output.steps.num_kept.shape == (0, len(PROMPTS))
    assert output.status == [sd.Status.OK] * len(PROMPTS)


def test_empty_budgets_beside_others_emit_nothing():
    output = run(max_new_tokens=(0, 12, 0, 1))
    assert [len(c) for c in output.completions] == [0, 12, 0, 1]
    assert tiny.steps_of(output, 0) == tiny.steps_of(output, 2) == []


def test_prompts_are_prefilled_before_the_first_step():
    # The first token depends on two prompt tokens, the older one read from the cache.
    output = run(temperature=0.0)
    for prompt, completion in zip(PROMPTS, output.completions, strict=True):
        assert completion[0] == np.argmax(tiny.next_logits(TARGET, prompt))


# Randomness


def test_a_generation_is_repeatable_and_depends_on_the_key():
    tiny.assert_same(run(), run())
    tiny.assert_same(run(key=None), run(key=jax.random.key(0)))
    assert run(key=jax.random.key(8)).completions[0] != run().completions[0]


def test_a_requests_tokens_do_not_depend_on_its_neighbours():
    expected = run()
    for kept in range(len(PROMPTS)):
        prompts, temperatures = [[3, 1, 4, 1]] * len(PROMPTS), [0.3] * len(PROMPTS)
        budgets = [12] * len(PROMPTS)
        prompts[kept], temperatures[kept] = PROMPTS[kept], TEMPERATURES[kept]
        budgets[kept] = BUDGETS[kept]
        output = run(prompts=prompts, temperature=temperatures, max_new_tokens=budgets)
        assert output.completions[kept] == expected.completions[kept]
        assert tiny.steps_of(output, kept) == tiny.steps_of(expected, kept)


def test_equal_requests_draw_their_own_noise():
    output = run(prompts=[[1, 2]] * 4, temperature=2.0, max_new_tokens=12)
    assert len({tuple(c) for c in output.completions}) == 4


# Failures


def poisoned(bad: float) -> np.ndarray:
    """A target whose row after token 5 is unusable."""
    table = TARGET.copy()
    table[:, POISON, :] = bad
    return table


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_target_row_is_unusable_ends_alone(bad, temperature):
    prompts = [[1, 2, 3], [4, POISON], [0], [2, 0, 1, 3, 3]]
    temperatures = [1.0, temperature, 0.7, 2.0]
    output = run(target=poisoned(bad), prompts=prompts, temperature=temperatures)
    expected = run(temperature=temperatures)
    assert output.completions[1] == []
    assert tiny.steps_of(output, 1) == []
    assert output.status == [0, sd.Status.BAD_TARGET_ROW, 0, 0]
    for b in (0, 2, 3):
        assert output.completions[b] == expected.completions[b]
        assert tiny.steps_of(output, b) == tiny.steps_of(expected, b)


def test_what_was_generated_before_an_unusable_row_is_kept():
    table = poisoned(np.nan)
    table[2, 3] = [0, 0, 0, 0, 0, 100]  # after 2 3 comes 5, and nothing can follow
    prompts = [[2], [0, 2, 3], [1, 2, 3], [5]]
    table[0, 2] = [0, 0, 0, 100, 0, 0]  # the token before the first counts as 0
    output = run(target=table, prompts=prompts, temperature=0.0)
    assert output.completions == [[3, POISON], [POISON], [POISON], []]
    assert output.status == [sd.Status.BAD_TARGET_ROW] * 4
    sequential = plain(target=table, prompts=prompts, temperature=0.0)
    assert sequential.completions == output.completions
    assert sequential.status == output.status


def test_unusable_rows_of_the_drafter_end_sampled_requests_alone():
    draft = DRAFT.copy()
    draft[:, 4, :] = np.nan  # after token 4, which both requests 1 and 3 end with
    prompts = [[1, 2, 3], [4, 4], [0], [2, 0, 1, 3, 4]]
    temperatures = [0.0, 0.0, 0.0, 1.0]
    output = run(draft_params=draft, prompts=prompts, temperature=temperatures)
    assert output.status == [0, 0, 0, sd.Status.BAD_DRAFT_ROW]
    assert output.completions[3] == []
    expected = plain(prompts=prompts, temperature=temperatures)
    assert output.completions[:3] == expected.completions[:3]


# Compilations


def test_calls_of_one_shape_share_one_compilation():
    changes = [
        dict(),
        dict(prompts=[[4], [1] * 32, [2, 2], [3] * 17]),  # prompts of the same bucket
        dict(max_new_tokens=(12, 0, 3, 5)),
        dict(temperature=0.5),
        dict(key=jax.random.key(3)),
        dict(target=tiny.random_table(VOCAB, seed=9), draft_params=TARGET),
    ]
    run(), plain(), streamed()
    with compilations() as names:
        for change in changes:
            run(**change), plain(**change), streamed(**change)
    assert names == []
    with compilations() as names:  # the counter counts
        jax.jit(lambda x: x + 43)(1)
    assert len(names) == 1


# Any model


def bigram(params, token_ids, start, cache):
    """The first example of `CausalModel`."""
    return params[token_ids], cache


@dataclasses.dataclass(frozen=True)
class WholeSequence(passes.RunsTokens):
    """The second: scores the token buffer anew on every call."""

    vocab_size: int

    def init_cache(self, batch_size, max_length):
        return jnp.zeros((batch_size, max_length), jnp.int32)

    def run(self, params, token_ids, start, cache):
        positions = start[:, None] + jnp.arange(token_ids.shape[1])[None, :]
        requests = jnp.arange(token_ids.shape[0])[:, None]
        cache = cache.at[requests, positions].set(token_ids)
        return jnp.cumsum(params[cache], axis=1)[requests, positions], cache


@pytest.mark.long
def test_the_second_example_of_the_protocol_decodes():
    table = np.random.default_rng(4).standard_normal((9, 9)).astype(np.float32)
    prompts = [[1, 2, 3], [8]]
    output = lm.generate(
        WholeSequence(9),
        jnp.asarray(table),
        prompts,
        drafter=lm.NGramDrafter(min_ngram=1),
        config=sd.SpecDecodeConfig(num_speculative_tokens=3),
        max_new_tokens=15,
    )
    for prompt, completion in zip(prompts, output.completions, strict=True):
        sequence = list(prompt)
        for _ in range(15):
            sequence.append(int(np.argmax(table.astype(np.float64)[sequence].sum(axis=0))))
        assert completion == sequence[len(prompt) :]
    assert output.steps.num_accepted.sum() > 0
