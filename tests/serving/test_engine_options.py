"""Options in the engine: what is refused, and which program runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from upper_floor import programs

from jax_specdec import lm

from .engines import EVERYTHING as ENGINE
from .engines import TABLE, TABLES, VOCAB, run

pytestmark = pytest.mark.xdist_group("engines")


def driver_of() -> lm.EngineDriver:
    return lm.EngineDriver(ENGINE, *TABLES)


FEWER = dataclasses.replace(ENGINE, option_sizes=lm.OptionSizes(logit_bias=1))
PAST = lm.RequestOptions(allowed_token_ids=[0, VOCAB])
REFUSED = {
    "options that are none": (ENGINE, dict(options=dict(top_k=3)), TypeError, "options"),
    "options for two": (ENGINE, dict(options=[lm.RequestOptions()] * 2), ValueError, "options"),
    "an id past the vocabulary": (ENGINE, dict(options=PAST), ValueError, "allowed_token_ids"),
    "a bias of NaN": (ENGINE, dict(logit_bias={1: float("nan")}), ValueError, "logit_bias"),
    "biases without room": (FEWER, dict(logit_bias={1: 1.0, 2: 1.0}), ValueError, "logit_bias"),
    "a least length above the budget": (ENGINE, dict(min_tokens=3), ValueError, "min_tokens"),
    "an argument that there is not": (ENGINE, dict(top=3), TypeError, "unknown argument 'top'"),
    "an engine without options": (TABLE, dict(top_k=2), ValueError, "options"),
}


@pytest.mark.parametrize(("engine", "changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_cannot_be_served_are_refused(
    engine: lm.Engine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    driver = lm.EngineDriver(engine, *TABLES)
    with pytest.raises(error, match=f"^{message}"):
        driver.submit([1], max_new_tokens=2, **changes)
    assert driver.is_idle


@pytest.mark.long
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
    driver = lm.EngineDriver(TABLE, *TABLES)
    assert driver.submit([1], max_new_tokens=2, options=lm.RequestOptions()) == 0
