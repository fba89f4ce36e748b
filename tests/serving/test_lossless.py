"""Sampled speculative decoding has exactly the target's distribution: chi-square tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .chi_square import CONTROL, assert_distributed, p_value, tally

pytestmark = [pytest.mark.long, pytest.mark.newest]

VOCAB = 5
K = 2
PROMPT = [1, 4, 0, 1, 4]  # its end occurred before, so that lookup finds something
NUM_TOKENS = 4  # at least two steps each
REQUESTS = 6912
TEMPERATURES = np.resize([0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.0], REQUESTS)
TARGET = tiny.random_table(VOCAB, seed=5)


def sampled(drafter: Any, draft_params: Any) -> lm.GenerateOutput:
    """Many copies of one request, at mixed temperatures."""
    budgets = [NUM_TOKENS] * REQUESTS
    return lm.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(TARGET),
        [PROMPT] * REQUESTS,
        drafter=drafter,
        draft_params=draft_params,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        options=tiny.options_of(
            REQUESTS, temperature=TEMPERATURES.tolist(), max_new_tokens=budgets
        ),
        key=jax.random.key(11),
    )


@functools.cache
def expected(temperature: float) -> np.ndarray:
    return tiny.exact_distribution(TARGET, PROMPT, NUM_TOKENS, temperature)


def windows(output: lm.GenerateOutput, temperature: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts and probabilities of the first three tokens jointly, and of the last three."""
    tokens = np.array(output.completions)[temperature == TEMPERATURES]
    assert tokens.shape[1] == NUM_TOKENS
    joint = expected(temperature)
    return [
        (tally(tokens[:, :-1], VOCAB), joint.sum(axis=-1)),
        (tally(tokens[:, 1:], VOCAB), joint.sum(axis=0)),
    ]


def assert_lossless(output: lm.GenerateOutput) -> None:
    for temperature in (0.7, 1.5):
        for what, window in zip(("first", "last"), windows(output, temperature), strict=True):
            assert_distributed(*window, f"{what} three tokens at temperature {temperature}")
    script = [-1] * (len(PROMPT) + NUM_TOKENS)
    steps = tiny.greedy_steps(TARGET, PROMPT, script, k=1, budget=NUM_TOKENS)
    greedy = [step.kept[0] for step in steps]
    for completion, temperature in zip(output.completions, TEMPERATURES, strict=True):
        assert temperature or completion == greedy


def assert_some_accepted(output: lm.GenerateOutput) -> None:
    share = output.steps.num_accepted.sum() / output.steps.num_proposed.sum()
    assert 0.05 < share < 0.95, f"{share} of the drafts accepted: too one-sided to show much"


def draft_table(vocab_size: int = VOCAB) -> jax.Array:
    """A drafter that is partly right."""
    other = tiny.random_table(VOCAB, seed=6)
    return jnp.asarray((0.6 * TARGET + 0.6 * other)[:, :, :vocab_size])


@pytest.mark.slow
def test_sampled_drafts_of_a_few_candidates_are_lossless():
    output = sampled(lm.ModelDrafter(tiny.Trigram(VOCAB), num_candidates=2), draft_table())
    assert_some_accepted(output)
    assert_lossless(output)


@pytest.mark.long
def test_arbitrary_drafts_with_gaps_are_lossless():
    rng = np.random.default_rng(0)
    script = rng.integers(-1, VOCAB + 1, (REQUESTS, 32))
    output = sampled(tiny.Scripted(), jnp.asarray(script, jnp.int32))
    assert_some_accepted(output)
    assert_lossless(output)


@pytest.mark.long
def test_drafts_of_a_model_with_another_tokenizer_are_lossless():
    # Its four tokens are four of the target's in another order; the fifth it reads as two.
    pieces = jnp.array([[2, -1], [0, -1], [3, 1], [1, -1], [3, -1]], jnp.int32)
    own = jnp.array([1, 3, 0, 4])
    table = draft_table()[own][:, own][:, :, own]
    drafter = lm.RetokenizingDrafter(tiny.Trigram(VOCAB - 1), ids=[0, 1, 3, 4])
    output = sampled(drafter, lm.RetokenizedParams(table, pieces))
    assert_some_accepted(output)
    assert_lossless(output)


@dataclasses.dataclass(frozen=True)
class Claiming(lm.ModelDrafter):
    """Samples from its model, and claims logits that are shifted.

    ``params`` is the model's, and the shift ``[Vd]``.
    """

    def init_store(self, params: Any, *args: Any) -> sd.DraftStore | None:
        return super().init_store(params[0], *args)

    def prefill(self, params: Any, *args: Any) -> Any:
        return super().prefill(params[0], *args)

    def propose(self, params: Any, *args: Any) -> tuple[lm.Proposal, Any]:
        params, shift = params
        proposal, cache = super().propose(params, *args)
        store, lies = proposal.store, shift.any()
        claimed = store.logits + shift[None, :]
        temperature = jnp.maximum(store.temperature.reshape(-1), 1e-5)  # 0: never read
        peak = jnp.where(lies, claimed.max(axis=1), store.row_max)
        of_claimed = jax.nn.logsumexp((claimed - peak[:, None]) / temperature[:, None], axis=1)
        normalizer = jnp.where(lies, of_claimed, store.log_normalizer)
        store = dataclasses.replace(store, logits=claimed, log_normalizer=normalizer, row_max=peak)
        return lm.Proposal(proposal.token_ids, store), cache


def claiming(table: np.ndarray, shift: Any = (0.0,) * (VOCAB - 1)) -> lm.GenerateOutput:
    """Drafts of a vocabulary that is narrower than the target's."""
    params = jnp.asarray(table, jnp.float32), jnp.asarray(shift, jnp.float32)
    return sampled(Claiming(tiny.Trigram(VOCAB - 1)), params)


@pytest.mark.long
def test_a_drafter_is_lossless_only_if_its_claim_is_right():
    table = draft_table(VOCAB - 1)
    honest = claiming(table)
    assert_some_accepted(honest)
    assert_lossless(honest)

    lying = claiming(table, [0.5, -0.5, 0.5, -0.5])
    assert_some_accepted(lying)
    for temperature in (0.7, 1.5):
        for counts, probabilities in windows(lying, temperature):
            assert p_value(counts, probabilities) < CONTROL
