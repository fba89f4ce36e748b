"""Models over 8 devices: the tokens are those of one device, and no logits leave theirs."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from models.weights import random_weights, sizes
from upper_floor import programs

import jax_specdec as sd
from jax_specdec import lm

from .engines import Finished, compilations, run
from .grammars import Follows
from .test_greedy import near

VOCAB, K, SLOTS, NEW = 61, 3, 4, 24  # the last 3 of 8 * 8 ids are padding
MODEL = lm.models.Llama(sizes(VOCAB, 16, 20, 1, (4, 2, 8)))
PARAMS = random_weights(MODEL, 0, 2.0)
DRAFT_PARAMS = near(PARAMS, 0)
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 9, 1, 20)]
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
ON_ONE = dict(model=MODEL, params=PARAMS, drafter=lm.ModelDrafter(MODEL), draft_params=DRAFT_PARAMS)


@functools.cache
def on_eight() -> dict[str, Any]:
    """The same models over 8 devices."""
    model = lm.models.TensorParallelLlama(MODEL, jax.make_mesh((8,), ("tensor",)), "tensor")
    params, draft_params = model.shard_params(PARAMS), model.shard_params(DRAFT_PARAMS)
    drafter = lm.ModelDrafter(model)
    return dict(model=model, params=params, drafter=drafter, draft_params=draft_params)


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


def driver_of(given: dict[str, Any], **settings: Any) -> lm.EngineDriver:
    sizes = dict(num_slots=SLOTS, max_length=40, prefill_sizes=(8,))
    engine = lm.Engine(given["model"], given["drafter"], CONFIG, **sizes)
    return lm.EngineDriver(engine, given["params"], given["draft_params"], **settings)


def serve(driver: lm.EngineDriver) -> dict[int, Finished]:
    """More requests than slots, of which some come while others run."""
    rng, updates = np.random.default_rng(1), []
    for seed in range(9):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 16)).tolist()
        budget, temperature = int(rng.integers(1, 20)), float(rng.choice([0.0, 0.8]))
        driver.submit(prompt, max_new_tokens=budget, temperature=temperature, seed=seed)
        if seed > 5:
            updates += driver.step()
    return run(driver, updates)


@functools.cache
def served(on_one_device: bool) -> tuple[dict[int, Finished], list[str], lm.EngineDriver]:
    """What became of the requests, what was compiled meanwhile, and the driver."""
    driver = driver_of(ON_ONE if on_one_device else on_eight())
    driver.warm_up()
    with compilations() as names:
        found = serve(driver)
        last = driver.submit([1, 2], max_new_tokens=9)
        driver.step()
        assert driver.cancel(last)
    return found, names, driver


@pytest.mark.slow
def test_an_engine_over_devices_serves_the_tokens_of_one() -> None:
    found, names, driver = served(on_one_device=False)
    assert names == []
    expected = served(on_one_device=True)[0]
    assert len(found) == len(expected) == 9
    # Sampled ones too: a near tie, 1e-5 of its threshold, would be a chance in thousands.
    for request, one in expected.items():
        assert found[request].token_ids == one.token_ids, request
        assert found[request].finish_reason == "length"
    stats = driver.stats()
    drivers = driver, served(on_one_device=True)[2]
    with compilations() as names:
        for one, given in zip(drivers, (on_eight(), ON_ONE), strict=True):
            one.set_params(*reversed(jax.device_get((given["params"], given["draft_params"]))))
        texts = [[x.token_ids for x in serve(one).values()] for one in drivers]
    assert names == [] and texts[0] == texts[1]
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


@pytest.mark.slow
def test_steps_of_some_slots_over_devices_serve_the_tokens_of_one() -> None:
    driver = driver_of(on_eight(), step_widths=(1, 2))
    found, expected = serve(driver), served(on_one_device=True)[0]
    driver.close()
    assert [x.token_ids for x in found.values()] == [x.token_ids for x in expected.values()]


@pytest.mark.slow
def test_requests_with_grammars_over_devices_get_narrow_steps() -> None:
    """Their second half is compiled for the places of what the first half returns."""
    allowed = [range(6 * i, 6 * i + 6) for i in range(5)]
    found = {}
    for widths in ((), (1, 2)):
        with driver_of(on_eight(), step_widths=widths) as driver:
            for prompt in PROMPTS[:3]:
                matcher = Follows(lambda text: allowed[len(text) % 5])
                driver.submit(prompt, max_new_tokens=12, matcher=matcher)
            found[widths] = [(x.token_ids, x.finish_reason) for x in run(driver).values()]
            assert driver.serving_stats().num_failed_calls == 0
    assert found[()] == found[1, 2]
    for token_ids, reason in found[()]:
        assert all(token in allowed[i % 5] for i, token in enumerate(token_ids))
        assert (len(token_ids), reason) == (12, "length")


@pytest.mark.long
def test_a_step_moves_no_logits_and_works_in_place() -> None:
    given = on_eight()
    driver = driver_of(given)
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


@pytest.mark.long
def test_weights_of_the_host_take_the_place_of_those_on_devices() -> None:
    given = on_eight()
    params = given["model"].shard_params(near(PARAMS, 1))
    driver = driver_of(given | dict(params=params))
    driver.set_params(jax.device_get(given["params"]), delete=True)
    for old, new, like in zip(
        *map(jax.tree.leaves, (params, driver.weights[0], given["params"])), strict=True
    ):
        assert old.is_deleted() and new.sharding == like.sharding and new.committed
        np.testing.assert_array_equal(new, like)
