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

from . import tiny
from .chi_square import CONTROL, assert_distributed, p_value, tally

pytestmark = [pytest.mark.statistics, pytest.mark.dearest]

VOCAB = 5
K = 2
PROMPT = [1, 4, 0, 1, 4]  # its end occurred before, so that lookup finds something
NUM_TOKENS = 4  # at least two steps each
REQUESTS = 6912
TEMPERATURES = np.resize([0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.7, 1.5, 0.0], REQUESTS)
TARGET = tiny.random_table(VOCAB, seed=5)


def sampled(drafter: Any, draft_params: Any, **config: Any) -> sd.GenerateOutput:
    """Many copies of one request, at mixed temperatures."""
    return sd.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(TARGET),
        [PROMPT] * REQUESTS,
        drafter=drafter,
        draft_params=draft_params,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K, **config),
        options=tiny.options_of(REQUESTS, temperature=TEMPERATURES),
        max_new_tokens=NUM_TOKENS,
        key=jax.random.key(11),
    )


@functools.cache
def expected(temperature: float) -> np.ndarray:
    return tiny.exact_distribution(TARGET, PROMPT, NUM_TOKENS, temperature)


def windows(output: sd.GenerateOutput, temperature: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts and probabilities of the first three tokens jointly, and of the last three."""
    tokens = np.array(output.completions)[temperature == TEMPERATURES]
    assert tokens.shape[1] == NUM_TOKENS
    joint = expected(temperature)
    return [
        (tally(tokens[:, :-1], VOCAB), joint.sum(axis=-1)),
        (tally(tokens[:, 1:], VOCAB), joint.sum(axis=0)),
    ]


def assert_lossless(output: sd.GenerateOutput) -> None:
    for temperature in (0.7, 1.5):
        for what, window in zip(("first", "last"), windows(output, temperature), strict=True):
            assert_distributed(*window, f"{what} three tokens at temperature {temperature}")
    script = [-1] * (len(PROMPT) + NUM_TOKENS)
    steps = tiny.greedy_steps(TARGET, PROMPT, script, k=1, budget=NUM_TOKENS)
    greedy = [step.kept[0] for step in steps]
    for completion, temperature in zip(output.completions, TEMPERATURES, strict=True):
        assert temperature or completion == greedy


def assert_some_accepted(output: sd.GenerateOutput) -> None:
    share = output.steps.num_accepted.sum() / output.steps.num_proposed.sum()
    assert 0.05 < share < 0.95, f"{share} of the drafts accepted: too one-sided to show much"


def draft_table(vocab_size: int = VOCAB) -> jax.Array:
    """A drafter that is partly right."""
    other = tiny.random_table(VOCAB, seed=6)
    return jnp.asarray((0.6 * TARGET + 0.6 * other)[:, :, :vocab_size])


def test_plain_sampling_has_the_targets_distribution():
    output = sd.generate_plain(
        tiny.Trigram(VOCAB),
        jnp.asarray(TARGET),
        [PROMPT] * REQUESTS,
        options=tiny.options_of(REQUESTS, temperature=TEMPERATURES),
        max_new_tokens=NUM_TOKENS,
        key=jax.random.key(11),
    )
    assert_lossless(output)


@pytest.mark.parametrize("method", ["standard", pytest.param("block", marks=pytest.mark.slow)])
def test_sampled_drafts_of_a_model_with_a_narrower_vocabulary_are_lossless(method):
    drafter = sd.ModelDrafter(tiny.Trigram(VOCAB - 1))
    output = sampled(drafter, draft_table(VOCAB - 1), rejection_sample_method=method)
    assert_some_accepted(output)
    assert_lossless(output)


@pytest.mark.parametrize(
    "own_ids",
    [pytest.param(False, id="map", marks=pytest.mark.long), pytest.param(True, id="candidates")],
)
def test_sampled_drafts_of_a_few_ids_are_lossless(own_ids):
    ids = np.array([4, 0, 2])
    drafter = sd.ModelDrafter(tiny.Trigram(VOCAB), num_candidates=2)
    params = draft_table()
    if not own_ids:
        drafter, params = sd.ModelDrafter(tiny.Trigram(3), ids=ids), params[:, :, ids]
    output = sampled(drafter, params)
    assert_some_accepted(output)
    assert_lossless(output)


@pytest.mark.slow
def test_argmax_drafts_of_a_model_are_lossless():
    drafter = sd.ModelDrafter(tiny.Trigram(VOCAB))
    output = sampled(drafter, draft_table(), draft_sample_method="greedy")
    assert_some_accepted(output)
    assert_lossless(output)


def test_drafts_by_lookup_are_lossless():
    output = sampled(sd.NGramDrafter(min_ngram=1), None)
    assert_some_accepted(output)
    assert_lossless(output)


def test_arbitrary_drafts_with_gaps_are_lossless():
    rng = np.random.default_rng(0)
    script = rng.integers(-1, VOCAB + 1, (REQUESTS, 32))
    output = sampled(tiny.Scripted(), jnp.asarray(script, jnp.int32))
    assert_some_accepted(output)
    assert_lossless(output)


def test_a_drafter_is_lossless_only_if_it_claims_what_it_sampled_from():
    drafter = tiny.Claiming(tiny.Trigram(VOCAB))
    honest = sampled(drafter, (draft_table(), jnp.zeros((VOCAB,))))
    assert_some_accepted(honest)
    assert_lossless(honest)

    shift = jnp.array([0.5, -0.5, 0.0, 0.5, -0.5])
    lying = sampled(drafter, (draft_table(), shift))
    assert_some_accepted(lying)
    for temperature in (0.7, 1.5):
        for counts, probabilities in windows(lying, temperature):
            assert p_value(counts, probabilities) < CONTROL


# A very low temperature


@dataclasses.dataclass(frozen=True)
class ByOneNumber(sd.ModelDrafter):
    """Stores normalizers of ``x / temperature`` itself, not relative to the maximum of the row.

    Attributes:
      relative: whether they are made relative after all, when their last digits are lost already.
    """

    relative: bool = False

    def propose(self, *args: Any) -> tuple[sd.Proposal, Any]:
        proposal, cache = super().propose(*args)
        store = proposal.store
        size = store.row_max / jnp.maximum(store.temperature.reshape(-1), COLD)
        number, row_max = store.log_normalizer + size, jnp.zeros_like(size)
        if self.relative:
            number, row_max = number - size, store.row_max
        store = dataclasses.replace(store, log_normalizer=number, row_max=row_max)
        return sd.Proposal(proposal.token_ids, store), cache


COLD = 1e-5
NEAR_100 = (100 + COLD * TARGET).astype(np.float32)


@pytest.mark.parametrize(
    ("drafter", "is_lossless"),
    [
        (sd.ModelDrafter, True),
        pytest.param(ByOneNumber, True, marks=pytest.mark.long),  # all verified one-hot
        (functools.partial(ByOneNumber, relative=True), False),
    ],
    ids=["relative", "one number", "control"],
)
def test_a_draft_model_is_lossless_near_temperature_0(drafter, is_lossless):
    other = 100 + COLD * np.asarray(draft_table())
    output = sd.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(NEAR_100),
        [PROMPT] * REQUESTS,
        drafter=drafter(tiny.Trigram(VOCAB)),
        draft_params=jnp.asarray(other, jnp.float32),
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        temperature=COLD,
        max_new_tokens=NUM_TOKENS,
        key=jax.random.key(11),
    )
    assert_some_accepted(output)
    joint = tiny.exact_distribution(NEAR_100, PROMPT, NUM_TOKENS, float(np.float32(COLD)))
    tokens = np.array(output.completions)
    first = tally(tokens[:, :-1], VOCAB), joint.sum(axis=-1)
    print("p-value", p_value(*first))
    if is_lossless:
        assert_distributed(*first, "first three tokens")
        assert_distributed(tally(tokens[:, 1:], VOCAB), joint.sum(axis=0), "last three tokens")
    else:
        assert p_value(*first) < CONTROL


# Synthetic acceptance


SYNTHETIC_K = 3


def synthetic_steps(**schedule: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """``num_accepted`` and ``num_proposed`` of every step, for greedy and sampled requests."""
    requests, rng = 256, np.random.default_rng(1)
    script = rng.integers(0, VOCAB, (requests, 96))
    script = np.where(rng.random(script.shape) < 0.1, -1, script)
    temperature = np.resize([0.0, 1.0], requests)
    output = sd.generate(
        tiny.Trigram(VOCAB),
        jnp.asarray(TARGET),
        [PROMPT] * requests,
        drafter=tiny.Scripted(),
        draft_params=jnp.asarray(script, jnp.int32),
        config=sd.SpecDecodeConfig(
            num_speculative_tokens=SYNTHETIC_K, rejection_sample_method="synthetic", **schedule
        ),
        options=tiny.options_of(requests, temperature=temperature),
        max_new_tokens=48,
        key=jax.random.key(2),
    )
    assert output.status == [sd.Status.OK] * requests
    found = []
    for t in (0.0, 1.0):
        steps = jax.tree.map(lambda x, t=t: x[:, temperature == t], output.steps)
        alive = steps.num_emitted > 0
        found.append((steps.num_accepted[alive], steps.num_proposed[alive]))
    return found


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (dict(synthetic_acceptance_rates=(0.9, 0.45, 0.2)), (0.9, 0.45, 0.2)),
        pytest.param(
            dict(synthetic_acceptance_length=2.5), (1.0, 0.5, 0.0), marks=pytest.mark.slow
        ),
    ],
    ids=["rates", "length"],
)
def test_measured_acceptance_per_position_is_the_synthetic_schedule(schedule, rates):
    for accepted, proposed in synthetic_steps(**schedule):
        assert (accepted <= proposed).all()
        complete = accepted[proposed == SYNTHETIC_K]
        n = len(complete)
        assert n > 1000
        for i, rate in enumerate(rates):
            # Five standard deviations of a binomial count: one false alarm in two million.
            bound = 5 * np.sqrt(n * rate * (1 - rate))
            count = int((complete > i).sum())
            assert abs(count - n * rate) <= bound, f"position {i}: {count} of {n}, rate {rate}"
        # A gap in the proposals cuts a step short and changes nothing before it.
        short = accepted[proposed == 1]
        bound = 5 * np.sqrt(len(short) * rates[0] * (1 - rates[0]))
        assert len(short) > 100
        assert abs(int((short > 0).sum()) - len(short) * rates[0]) <= bound
