"""At temperature 0 speculative decoding emits what plain decoding emits, whatever is drafted."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_weights, sizes
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm

from . import tiny

pytestmark = [pytest.mark.long, pytest.mark.newest]

MAX_GAP = 1e-4
"""Two best logits closer than this are within the rounding of float32 sums."""

SEEDS = (0, 1)
MODEL = lm.models.Llama(sizes(97, 16, 24, 2, (4, 2, 8), tie_word_embeddings=True))
LENGTHS = (1, 2, 7, 40, 40, 3)
BUDGETS = (24, 24, 24, 24, 1, 0)


@functools.cache
def params_of(seed: int) -> Any:
    return random_weights(MODEL, seed)


def prompts_of(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MODEL.vocab_size, n).tolist() for n in LENGTHS]


@functools.cache
def plain_of(seed: int) -> lm.GenerateOutput:
    return lm.generate_plain(
        MODEL,
        params_of(seed),
        prompts_of(seed),
        options=tiny.options_of(len(BUDGETS), max_new_tokens=BUDGETS),
    )


def near(params: Any, seed: int, noise: float = 0.05) -> Any:
    """Weights close to a model's own: a draft model that is often right."""
    rng = np.random.default_rng(100 + seed)
    return jax.tree.map(
        lambda x: jax.device_put(
            np.asarray(x) + (noise * rng.standard_normal(x.shape)).astype(x.dtype)
        ),
        params,
    )


def near_model(seed: int) -> tuple[lm.ModelDrafter, Any]:
    return lm.ModelDrafter(MODEL), near(params_of(seed), seed)


@functools.partial(jax.jit, static_argnames="model")
def score(model: lm.models.CausalModel, params: Any, tokens: jax.Array) -> jax.Array:
    """Logits ``[B, S, V]`` of whole sequences, with a fresh cache."""
    batch, length = tokens.shape
    start = jnp.zeros((batch,), jnp.int32)
    return run_pass(model, params, tokens, start, model.init_cache(batch, length)).logits


@pytest.mark.slow
def test_plain_decoding_emits_the_argmax_of_a_full_pass():
    # By induction over the completion this is the loop that scores the whole sequence anew for
    # every token.
    for seed in SEEDS:
        plain, prompts = plain_of(seed), prompts_of(seed)
        assert [len(c) for c in plain.completions] == list(BUDGETS)
        assert plain.status == [sd.Status.OK] * len(prompts)
        rows = np.zeros((len(prompts), max(LENGTHS) + max(BUDGETS)), np.int32)
        for row, prompt, completion in zip(rows, prompts, plain.completions, strict=True):
            row[: len(prompt) + len(completion)] = prompt + completion
        logits = np.asarray(score(MODEL, params_of(seed), jnp.asarray(rows)))
        for b, (prompt, completion) in enumerate(zip(prompts, plain.completions, strict=True)):
            for i, token in enumerate(completion):
                row = logits[b, len(prompt) + i - 1]
                assert row.max() - row[token] <= MAX_GAP, (seed, b, i)


def test_greedy_tokens_are_those_of_plain_decoding():
    config = sd.SpecDecodeConfig(num_speculative_tokens=5, draft_sample_method="greedy")
    accepted = proposed = 0
    for seed in SEEDS:
        drafter, draft_params = near_model(seed)
        params, prompts, plain = params_of(seed), prompts_of(seed), plain_of(seed)
        output = lm.generate(
            MODEL,
            params,
            prompts,
            drafter=drafter,
            draft_params=draft_params,
            config=config,
            options=tiny.options_of(len(BUDGETS), max_new_tokens=BUDGETS),
        )
        differences = lm.greedy_differences(MODEL, params, prompts, output, plain)
        assert all(d.gap <= MAX_GAP for d in differences), differences
        assert output.status == plain.status
        assert [len(c) for c in output.completions] == list(BUDGETS)
        for b in range(len(prompts)):
            steps = tiny.steps_of(output, b)
            assert all(s.num_emitted == s.num_accepted + 1 <= s.num_proposed + 1 for s in steps)
            accepted += sum(s.num_accepted for s in steps)
            proposed += sum(s.num_proposed for s in steps)
    assert 0 < accepted < proposed, "this drafter should be right at times and wrong at times"


def test_a_target_that_drafts_for_itself_has_everything_accepted():
    k = 5
    for seed in SEEDS:
        output = lm.generate(
            MODEL,
            params_of(seed),
            prompts_of(seed),
            drafter=lm.ModelDrafter(MODEL),
            draft_params=params_of(seed),
            config=sd.SpecDecodeConfig(num_speculative_tokens=k, draft_sample_method="greedy"),
            options=tiny.options_of(len(BUDGETS), max_new_tokens=BUDGETS),
        )
        assert output.completions == plain_of(seed).completions
        for b, budget in enumerate(BUDGETS):
            steps = tiny.steps_of(output, b)
            assert len(steps) == -(-budget // (k + 1))
            assert all(s.num_proposed == s.num_accepted == k for s in steps)
            assert all(len(s.kept) == k + 1 for s in steps[:-1])


# With a model and drafts of which everything is known, the whole loop has a plain Python form.

VOCAB = 5
SCRIPT_SIZE = 64
MAX_BUDGET = 12


@st.composite
def generations(draw):
    requests = []
    table = tiny.random_table(VOCAB, draw(st.integers(0, 2**16)))
    budgets = [MAX_BUDGET, *draw(st.lists(st.integers(0, MAX_BUDGET), min_size=3, max_size=3))]
    for budget in draw(st.permutations(budgets)):
        prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=32))
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        script = rng.integers(0, VOCAB, SCRIPT_SIZE)
        truth = list(prompt)
        while len(truth) < len(prompt) + MAX_BUDGET + 6:
            truth.append(int(np.argmax(tiny.next_logits(table, truth))))
        right = rng.random(len(truth)) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
        script[: len(truth)] = np.where(right, truth, script[: len(truth)])
        nothing = rng.random(SCRIPT_SIZE) < draw(st.sampled_from([0.0, 0.0, 0.2]))
        script = np.where(nothing, rng.choice([-7, -1, VOCAB, 1000], SCRIPT_SIZE), script)
        requests.append((prompt, budget, script))
    return table, requests


@pytest.mark.slow
@hypothesis.given(generations())
def test_every_step_is_that_of_the_loop_in_python(generation):
    k, stop_token_ids = 5, (3,)
    table, requests = generation
    prompts, budgets, scripts = zip(*requests, strict=True)
    output = lm.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(table),
        prompts,
        drafter=tiny.Scripted(),
        draft_params=jnp.asarray(np.stack(scripts), jnp.int32),
        config=sd.SpecDecodeConfig(num_speculative_tokens=k),
        options=tiny.options_of(len(prompts), max_new_tokens=budgets),
        stop_token_ids=stop_token_ids,
    )
    for b, (prompt, budget, script) in enumerate(requests):
        wanted = tiny.greedy_steps(
            table, prompt, script, k=k, budget=budget, stop_token_ids=stop_token_ids
        )
        assert tiny.steps_of(output, b) == wanted


def test_nothing_is_kept_after_an_accepted_stop_token():
    counting = np.zeros((VOCAB,) * 3, np.float32)  # 0 1 2 3 4 0 1 ...
    for last in range(VOCAB):
        counting[:, last, (last + 1) % VOCAB] = 1
    output = lm.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(counting),
        [[0], [3], [4, 2], [2]],
        drafter=tiny.Scripted(),
        draft_params=jnp.asarray(
            [(np.arange(SCRIPT_SIZE) + shift) % VOCAB for shift in (0, 3, 1, 2)], jnp.int32
        ),
        config=sd.SpecDecodeConfig(num_speculative_tokens=5),
        options=tiny.options_of(4, max_new_tokens=[MAX_BUDGET, MAX_BUDGET, MAX_BUDGET, 1]),
        stop_token_ids=[3],
    )
    # The last one meets the stop token as its budget ends; a stop token in a prompt stops nothing.
    assert output.completions == [[1, 2, 3], [4, 0, 1, 2, 3], [3], [3]]
    for b in range(4):
        (step,) = tiny.steps_of(output, b)
        assert (step.num_proposed, step.num_accepted, step.num_emitted) == (5, 5, 6)


# Reporting a difference.


def output_with(completions: list[list[int]]) -> lm.GenerateOutput:
    empty = np.zeros((0, len(completions)), np.int32)
    steps = lm.StepRecord(empty[..., None], empty, empty, empty, empty)
    return lm.GenerateOutput(completions, steps, [sd.Status.OK] * len(completions))


def test_greedy_differences_are_the_first_with_their_gap():
    table = tiny.random_table(VOCAB, seed=3)
    prompts = [[1, 2], [4], [3], [0, 0]]
    plain = [[1, 2, 3], [4, 4, 1], [2, 0], [1]]
    other = [[1, 2, 3], [4, 0, 2], [2], [1, 2]]
    found = lm.greedy_differences(
        tiny.Trigram(VOCAB), jnp.asarray(table), prompts, output_with(other), output_with(plain)
    )

    def gap(sequence: list[int]) -> float:
        second, best = np.sort(tiny.next_logits(table, sequence))[-2:]
        return float(best - second)

    assert found == [
        lm.GreedyDifference(1, 1, 0, 4, gap([4, 4])),
        lm.GreedyDifference(2, 1, None, 0, gap([3, 2])),
        lm.GreedyDifference(3, 1, 2, None, gap([0, 0, 1])),
    ]
