"""A drafter that may abstain: the target then runs over one token, and nothing else changes."""

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

pytestmark = [pytest.mark.long, pytest.mark.newest]

K = 3
VOCAB = 7
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)


@dataclasses.dataclass(frozen=True)
class EmitsWidth(passes.RunsTokens):
    """Its greedy token is the number of tokens that the pass ran over."""

    vocab_size: int

    def run(
        self, params: None, token_ids: jax.Array, start: jax.Array, cache: tuple
    ) -> tuple[jax.Array, tuple]:
        row = jax.nn.one_hot(token_ids.shape[1], self.vocab_size)
        return jnp.broadcast_to(row, (*token_ids.shape, self.vocab_size)), cache


@dataclasses.dataclass(frozen=True)
class Abstaining(tiny.Scripted):
    may_abstain: bool = True

    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(may_abstain=self.may_abstain)


# Entry i is drafted for position i; what is drafted here is never right.
SOME = [-1, -1, 2, -1, -1, 2, 2, 2]
NONE = [-1] * 8


def test_a_pass_without_drafts_is_narrow_for_one_request() -> None:
    output = lm.generate(
        EmitsWidth(VOCAB),
        None,
        [[0]],
        drafter=Abstaining(),
        draft_params=jnp.array([SOME], jnp.int32),
        config=CONFIG,
        max_new_tokens=6,
    )
    assert output.completions == [[1, 4, 1, 1, 4, 4]]


@pytest.mark.slow
def test_tokens_and_log_probabilities_are_those_of_wide_passes() -> None:
    # A table sums no floats, so nothing may differ by a bit.
    rng = np.random.default_rng(0)
    script = np.where(rng.random((1, 64)) < 0.5, rng.integers(0, VOCAB, (1, 64)), -1)
    given: dict[str, Any] = dict(
        model=tiny.Trigram(VOCAB),
        params=jnp.asarray(tiny.random_table(VOCAB, 1)),
        prompts=[[1, 2, 3]],
        draft_params=jnp.asarray(script, jnp.int32),
        config=CONFIG,
        temperature=0.9,
        max_new_tokens=40,
        options=lm.RequestOptions(frequency_penalty=0.3, allowed_token_ids=range(1, VOCAB)),
        logprobs=sd.LogprobsConfig(num_top=2, distribution="processed"),
    )
    output = lm.generate(drafter=Abstaining(), **given)
    tiny.assert_same(output, lm.generate(drafter=tiny.Scripted(), **given))
    proposed = output.steps.num_proposed[:, 0]
    assert (proposed == 0).any() and (proposed > 0).any()


@pytest.mark.parametrize(
    ("scripts", "budget", "wanted"),
    [
        ([SOME, NONE], (K,), [1, 4, 1, 1]),  # one that drafts makes all passes wide
        ([NONE, NONE], (K,), [1, 1, 1, 1]),
    ],
)
def test_an_engine_makes_narrow_passes_where_none_drafts(scripts, budget, wanted) -> None:
    sizes = dict(num_slots=len(scripts), max_length=16, draft_budget=budget)
    engine = lm.Engine(EmitsWidth(VOCAB), Abstaining(), CONFIG, **sizes)
    params = jnp.array(scripts, jnp.int32)
    driver = lm.EngineDriver(engine, None, params, max_prefills=None)
    ids = [driver.submit([0], max_new_tokens=4) for _ in scripts]
    texts: dict[int, list[int]] = {i: [] for i in ids}
    while not driver.is_idle:
        for update in driver.step():
            texts[update.request_id] += update.token_ids
    assert [*texts.values()] == [wanted] * len(scripts)
