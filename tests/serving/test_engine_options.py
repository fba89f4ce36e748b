"""Requests with options in the engine: the tokens they get alone, in a plain loop, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec._src.serving import programs

from . import sampled
from .engines import EVERYTHING as ENGINE
from .engines import TABLE, TABLES, TARGET, VOCAB, alone, collect, random_request, run
from .test_engine import FUNCTIONS

pytestmark = pytest.mark.xdist_group("engines")


def driver_of() -> sd.EngineDriver:
    return sd.EngineDriver(ENGINE, *TABLES)


def request_with_options(rng: np.random.Generator) -> dict[str, Any]:
    fields = dict(
        min_p=float(rng.choice([0, 0.1])),
        top_k=int(rng.integers(0, VOCAB)),
        top_p=float(rng.choice([0.8, 1])),
        frequency_penalty=float(rng.choice([0, 0.7])),
        presence_penalty=float(rng.choice([0, -0.4])),
        repetition_penalty=float(rng.choice([1, 1.6])),
        allowed_token_ids=rng.permutation(VOCAB)[:4].tolist(),
        logit_bias={
            int(token): 1.5 * rng.standard_normal() for token in rng.permutation(VOCAB)[:2]
        },
        bad_words=rng.integers(0, VOCAB, (2, 2)).tolist(),
        min_tokens=1,
    )
    asked = {name: value for name, value in fields.items() if rng.random() < 0.4}
    return random_request(rng, (0.0, 0.7)) | dict(options=sd.RequestOptions(**asked))


@pytest.mark.newest
def test_a_request_with_options_gets_the_tokens_it_gets_alone() -> None:
    rng, driver, by_itself = np.random.default_rng(4), driver_of(), driver_of()
    driver.warm_up(), by_itself.warm_up()
    functions = FUNCTIONS
    sizes = [function._cache_size() for function in functions]
    requests = [request_with_options(rng) for _ in range(24)]
    updates: list[sd.serving.RequestUpdate] = []
    for request in requests:
        driver.submit(**request)
        updates += driver.step()
    while not driver.is_idle:
        updates += driver.step()
    found = collect(updates)
    for i, request in enumerate(requests):
        expected = alone(by_itself, request)
        assert found[i].token_ids == expected.token_ids
        assert found[i].status == sd.Status.OK
        for one, other in zip(found[i].updates, expected.updates, strict=True):
            np.testing.assert_array_equal(one.logprobs.logprobs, other.logprobs.logprobs)
            np.testing.assert_array_equal(one.logprobs.top_token_ids, other.logprobs.top_token_ids)
    assert [function._cache_size() for function in functions] == sizes


@pytest.mark.newest
def test_greedy_requests_are_those_of_plain_python_whoever_is_preempted() -> None:
    rng, driver = np.random.default_rng(2), driver_of()
    requests = [
        request_with_options(rng) | dict(temperature=0.0, stop_token_ids=stops, max_new_tokens=10)
        for stops in 4 * ([], [1, 2])
    ]
    requests[-1]["options"] = sd.RequestOptions(min_tokens=6)
    ids = [driver.submit(**request) for request in requests]
    updates = []
    for step in range(6):
        updates += driver.step()
        driver.preempt(ids[step % 4])
    updates += [update for found in run(driver).values() for update in found.updates]
    for i, request in zip(ids, requests, strict=True):
        own = [update for update in updates if update.request_id == i]
        stops = request["stop_token_ids"]
        truth = sampled.greedy(TARGET, request["prompt"], request["options"], 10, stops)
        assert sum((update.token_ids for update in own), []) == truth
        for update in own:  # the emitted token is the likeliest
            assert update.logprobs.top_token_ids[:, 0].tolist() == update.token_ids
            np.testing.assert_array_equal(
                update.logprobs.top_logprobs[:, 0], update.logprobs.logprobs
            )


FEWER = dataclasses.replace(ENGINE, option_sizes=sd.serving.OptionSizes(logit_bias=1))
PAST = sd.RequestOptions(allowed_token_ids=[0, VOCAB])
REFUSED = {
    "options that are none": (ENGINE, dict(options=dict(top_k=3)), TypeError, "options"),
    "options for two": (ENGINE, dict(options=[sd.RequestOptions()] * 2), ValueError, "options"),
    "an id past the vocabulary": (ENGINE, dict(options=PAST), ValueError, "allowed_token_ids"),
    "a bias of NaN": (ENGINE, dict(logit_bias={1: float("nan")}), ValueError, "logit_bias"),
    "biases without room": (FEWER, dict(logit_bias={1: 1.0, 2: 1.0}), ValueError, "logit_bias"),
    "a least length above the budget": (ENGINE, dict(min_tokens=3), ValueError, "min_tokens"),
    "an argument that there is not": (
        ENGINE,
        dict(top=3),
        TypeError,
        "unknown argument 'top'; did you mean 'top_",
    ),
    "an engine without options": (
        TABLE,
        dict(options=sd.RequestOptions(top_k=2)),
        ValueError,
        "options",
    ),
}


@pytest.mark.parametrize(("engine", "changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_be_served_are_refused(
    engine: sd.Engine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    driver = sd.EngineDriver(engine, *TABLES)
    with pytest.raises(error, match=f"^{message}"):
        driver.submit([1], max_new_tokens=2, **changes)
    assert driver.is_idle


@pytest.mark.newest
def test_steps_in_which_nobody_asks_run_the_smaller_program(monkeypatch) -> None:
    driver, step, found = driver_of(), programs.step, []

    def noting(*args: Any, all_neutral: bool, **static: Any) -> Any:
        found.append(all_neutral)
        return step(*args, all_neutral=all_neutral, **static)

    monkeypatch.setattr(programs, "step", noting)
    driver.submit([1], max_new_tokens=12, temperature=0.5)
    driver.step()
    asks = driver.submit([2], max_new_tokens=12, top_k=2)
    driver.step(), driver.step()
    driver.cancel(asks)
    run(driver)
    # One step is ahead when a request comes or goes.
    assert found[:4] == [True, True, False, False] and set(found[4:]) == {True}
    assert driver.state.batch.options.sampling.top_k is not None


def test_an_engine_without_options_takes_neutral_ones() -> None:
    driver = sd.EngineDriver(TABLE, *TABLES)
    assert driver.submit([1], max_new_tokens=2, options=sd.RequestOptions()) == 0
