"""Acceptance statistics, against counting by hand."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import jax_specdec as sd


def records(proposed: list[int], accepted: list[int], k: int = 3) -> sd.StepRecord:
    """One request; a step emits one token more than it accepts, and a proposal of -1 is no step."""
    ran = np.array(proposed)[:, None] >= 0
    return sd.StepRecord(
        token_ids=np.full((len(proposed), 1, k + 1), -1),
        num_kept=np.zeros((len(proposed), 1), int),  # cut by the budget: must not matter
        num_proposed=np.maximum(np.array(proposed)[:, None], 0),
        num_accepted=np.array(accepted)[:, None],
        num_emitted=np.where(ran, np.array(accepted)[:, None] + 1, 0),
    )


def test_rates_of_a_position_count_only_verifications_that_were_offered_it() -> None:
    stats = sd.AcceptanceStats.from_steps(records([3, 3, 1, 0, -1], [3, 1, 1, 0, 0]))
    assert stats == sd.AcceptanceStats(
        num_verifications=4,
        num_draft_tokens=7,
        num_accepted_tokens=5,
        num_emitted_tokens=9,
        mean_acceptance_length=1 + 5 / 4,
        draft_acceptance_rate=5 / 7,
        unconditional_rates=(1.0, 0.5, 0.5),
    )


def test_nothing_verified_has_length_one_and_no_rates() -> None:
    stats = sd.AcceptanceStats.from_steps(records([], []))
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate) == (1.0, 0.0)
    assert stats.unconditional_rates == (0.0, 0.0, 0.0)


@given(st.lists(st.integers(0, 3), min_size=1))
def test_with_full_offers_the_rates_sum_to_the_mean_length_less_one(accepted: list[int]) -> None:
    stats = sd.AcceptanceStats.from_steps(records([3] * len(accepted), accepted))
    length = sd.rates_to_acceptance_length(stats.unconditional_rates)
    np.testing.assert_allclose(stats.mean_acceptance_length, length)
