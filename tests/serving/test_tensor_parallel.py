"""Models over 8 devices: the tokens are those of one device, and no logits leave theirs."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_weights
from upper_floor import programs

import jax_specdec as sd
from jax_specdec import lm

from .engines import Finished, compilations, run
from .test_greedy import MAX_GAP, near, score

VOCAB, K, SLOTS, NEW = 61, 3, 4, 24  # the last 3 of 8 * 8 ids are padding
MODEL = lm.models.Llama(
    lm.models.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
)
PARAMS = random_weights(MODEL, 0, 2.0)
DRAFT_PARAMS = near(PARAMS, 0)
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 9, 1, 20)]
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
ON_ONE = dict(model=MODEL, params=PARAMS, drafter=lm.ModelDrafter(MODEL), draft_params=DRAFT_PARAMS)


@functools.cache
def on_eight(split_drafter: bool) -> dict[str, Any]:
    """The same models with the target over 8 devices, and the drafter too or whole on each."""
    model = lm.models.TensorParallelLlama(MODEL, jax.make_mesh((8,), ("tensor",)), "tensor")
    given = ON_ONE | dict(model=model, params=model.shard_params(PARAMS))
    if split_drafter:
        given |= dict(drafter=lm.ModelDrafter(model), draft_params=model.shard_params(DRAFT_PARAMS))
    return given


def assert_argmaxes(output: lm.GenerateOutput, requests: list[int]) -> None:
    """Each token is the argmax of a full pass on one device over what stands before it."""
    rows = np.zeros((len(PROMPTS), max(map(len, PROMPTS)) + NEW), np.int32)
    for row, prompt, completion in zip(rows, PROMPTS, output.completions, strict=True):
        row[: len(prompt) + len(completion)] = prompt + completion
    logits = np.asarray(score(MODEL, PARAMS, jnp.asarray(rows)))
    for b in requests:
        assert len(output.completions[b]) == NEW
        for i, token in enumerate(output.completions[b]):
            row = logits[b, len(PROMPTS[b]) + i - 1]
            assert row.max() - row[token] <= MAX_GAP, (b, i)


@pytest.mark.slow
def test_greedy_tokens_with_a_block_head_are_those_of_the_whole_model() -> None:
    config = lm.BlockHeadConfig(
        layer=MODEL.config,
        draft_vocab_size=VOCAB,
        feature_layers=(0, 1),
        target_hidden_size=16,
        block_size=5,
        mask_token_id=VOCAB - 1,
        sample_from_anchor=True,
        markov_rank=3,
    )
    head = lm.BlockHead(config)
    shared = {name: PARAMS[name] for name in ("embed_tokens", "lm_head")}
    given = on_eight(split_drafter=False)
    given |= dict(drafter=lm.BlockDrafter(head), draft_params=random_weights(head, 1) | shared)
    output = lm.generate(**given, prompts=PROMPTS, config=CONFIG, max_new_tokens=NEW)
    assert_argmaxes(output, [0, 1, 2, 3])
    assert output.steps.num_accepted.sum() > 0


def moved(program: str) -> list[tuple[str, list[int]]]:
    """Kind of every collective of a compiled program, and the shapes it gives."""
    found = re.findall(
        r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-\S+?)"
        r"(?:-start)?\(",
        program,
    )
    return [
        (kind, [int(n) for n in dims.split(",")])
        for shapes, kind in found
        for dims in re.findall(r"\[([\d,]+)\]", shapes)
    ]


def driver_of(given: dict[str, Any], has_options: bool) -> lm.EngineDriver:
    sizes = dict(num_slots=SLOTS, max_length=40, prefill_sizes=(8,), request_options=has_options)
    engine = lm.Engine(given["model"], given["drafter"], CONFIG, **sizes)
    return lm.EngineDriver(engine, given["params"], given["draft_params"])


def serve(driver: lm.EngineDriver) -> dict[int, Finished]:
    """More requests than slots, of which some come while others run."""
    rng, updates = np.random.default_rng(1), []
    for seed in range(9):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 16)).tolist()
        budget, temperature = int(rng.integers(1, 20)), float(rng.choice([0.0, 0.8]))
        options = (
            lm.RequestOptions(top_p=0.9, presence_penalty=0.5, allowed_token_ids=range(seed, 50))
            if driver.engine.request_options and seed % 3
            else None
        )
        driver.submit(
            prompt, max_new_tokens=budget, temperature=temperature, seed=seed, options=options
        )
        if seed > 5:
            updates += driver.step()
    return run(driver, updates)


@functools.cache
def served(
    on_one_device: bool, has_options: bool = False
) -> tuple[dict[int, Finished], list[str], lm.EngineDriver]:
    """What became of the requests, what was compiled meanwhile, and the driver."""
    driver = driver_of(ON_ONE if on_one_device else on_eight(split_drafter=True), has_options)
    driver.warm_up()
    with compilations() as names:
        found = serve(driver)
        last = driver.submit([1, 2], max_new_tokens=9)
        driver.step()
        assert driver.cancel(last)
    return found, names, driver


@pytest.mark.slow
@pytest.mark.parametrize("has_options", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_over_devices_serves_the_tokens_of_one(
    has_options: bool,
) -> None:
    found, names, driver = served(on_one_device=False, has_options=has_options)
    assert names == []
    expected = served(on_one_device=True, has_options=has_options)[0]
    assert len(found) == len(expected) == 9
    # Sampled ones too: a near tie, 1e-5 of its threshold, would be a chance in thousands.
    for request, one in expected.items():
        assert found[request].token_ids == one.token_ids, request
        assert found[request].finish_reason == "length"
    stats = driver.stats()
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.long
def test_a_step_moves_no_logits_and_works_in_place() -> None:
    given = on_eight(split_drafter=True)
    driver = driver_of(given, has_options=False)
    weights, state = (given["params"], given["draft_params"]), driver.state
    step = programs.step.lower(driver.engine, *weights, state).compile()
    kinds = set()
    for kind, shape in moved(step.as_text()):
        kinds.add(kind)
        if kind == "all-reduce":  # the residual stream, or one number per request
            assert shape[-1] in (MODEL.config.hidden_size, SLOTS), shape
        else:  # what each device says of its part of the rows
            assert np.prod(shape) <= 8 * SLOTS * (5 * K + 4) < SLOTS * (K + 1) * VOCAB
    assert kinds == {"all-reduce", "all-gather"}
    step(*weights, state)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.target_cache, state.store)))
