"""Acceptance statistics, on the device and on the host, against counting by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

K = 3


def records(proposed: list[int], accepted: list[int]) -> lm.StepRecord:
    """One request; a step emits one token more than it accepts, and a proposal of -1 is no step."""
    ran = np.array(proposed)[:, None] >= 0
    return lm.StepRecord(
        token_ids=np.full((len(proposed), 1, K + 1), -1),
        num_kept=np.where(ran, np.array(accepted)[:, None] + 1, 0),
        num_proposed=np.maximum(np.array(proposed)[:, None], 0),
        num_accepted=np.array(accepted)[:, None],
        num_emitted=np.where(ran, np.array(accepted)[:, None] + 1, 0),
    )


def array(values: list[int]) -> jax.Array:
    return jnp.array(values, jnp.int32)


@jax.jit
def count(
    counters: sd.AcceptanceCounters, steps: jax.Array, fallbacks: jax.Array
) -> sd.AcceptanceCounters:
    """Accumulate ``[S, 3, B]`` proposed, accepted and emitted counts in a while_loop."""

    def body(carry: tuple[jax.Array, sd.AcceptanceCounters]) -> tuple:
        i, counters = carry
        proposed, accepted, emitted = steps[i]
        counters = counters.update(
            num_proposed=proposed,
            num_accepted=accepted,
            num_emitted=emitted,
            num_fallbacks=fallbacks[i],
        )
        return i + 1, counters

    return jax.lax.while_loop(lambda carry: carry[0] < len(steps), body, (0, counters))[1]


# The host's statistics


def test_a_positions_rates_count_verifications_offered_it() -> None:
    stats = sd.AcceptanceStats.from_steps(records([3, 3, 1, 0, -1], [3, 1, 1, 0, 0]))
    assert stats == sd.AcceptanceStats(
        offered_per_position=(3, 2, 2),
        reached_per_position=(3, 2, 1),
        accepted_per_position=(3, 1, 1),
        num_tokens=9,
        num_verifications=4,
    )
    assert stats.to_dict() == dataclasses.asdict(stats) | {
        "offered_per_position": [3, 2, 2],
        "reached_per_position": [3, 2, 1],
        "accepted_per_position": [3, 1, 1],
        "num_drafts": 3,
        "num_draft_tokens": 7,
        "num_accepted_tokens": 5,
        "mean_acceptance_length": 1 + 5 / 3,
        "tokens_per_target_pass": 9 / 4,
        "draft_acceptance_rate": 5 / 7,
        "unconditional_rates": [1.0, 0.5, 0.5],
        "conditional_rates": [1.0, 0.5, 1.0],
    }
    json.dumps(stats.to_dict())


def test_nothing_verified_has_length_one_and_no_rates() -> None:
    for stats in (
        sd.AcceptanceStats.from_steps(records([], [])),
        sd.AcceptanceStats.from_counters(sd.AcceptanceCounters.create(K)),
    ):
        assert (stats.mean_acceptance_length, stats.draft_acceptance_rate) == (1.0, 0.0)
        assert stats.tokens_per_target_pass == 0.0
        assert stats.unconditional_rates == stats.conditional_rates == (0.0, 0.0, 0.0)


def test_steps_without_drafts_count_for_tokens_per_target_pass_alone() -> None:
    drafted, undrafted = records([3, 2], [3, 1]), records([0] * 8, [0] * 8)
    without = sd.AcceptanceStats.from_steps(drafted)
    both = sd.AcceptanceStats.from_steps(
        jax.tree.map(lambda *parts: np.concatenate(parts), drafted, undrafted)
    )
    assert without.mean_acceptance_length == without.tokens_per_target_pass == 3.0
    assert both.mean_acceptance_length == 3.0
    assert both.tokens_per_target_pass == 14 / 10


def test_tokens_per_target_pass_counts_no_cut_token() -> None:
    """Tokens delivered by passes; the rates of drafts are as if nothing had been cut."""
    whole = records([3, 3, 0], [3, 3, 0])
    cut = dataclasses.replace(whole, num_kept=np.array([[4], [1], [1]]))
    stats = sd.AcceptanceStats.from_steps(cut)
    assert (stats.num_tokens, stats.num_verifications, stats.tokens_per_target_pass) == (6, 3, 2.0)
    assert stats.mean_acceptance_length == 4.0
    counters = sd.AcceptanceCounters.create(K)
    for kept in (array([4, 1]), None):
        counters = jax.jit(sd.AcceptanceCounters.update)(
            counters,
            num_proposed=array([3, 3]),
            num_accepted=array([3, 3]),
            num_emitted=array([4, 4]),
            num_kept=kept,
        )
    counted = sd.AcceptanceStats.from_counters(counters)
    assert (counted.num_tokens, counted.num_verifications) == (5 + 8, 4)
    assert counted.mean_acceptance_length == 4.0


def test_where_nothing_was_drafted_the_length_is_a_dash() -> None:
    undrafted = sd.AcceptanceStats.from_steps(records([0, 0], [0, 0]))
    assert undrafted.log_line(1.0).startswith(
        "SpecDecoding metrics: Mean acceptance length: -, Tokens per target pass: 1.00, "
    )


def test_the_log_line_is_that_of_a_computed_example() -> None:
    early = sd.AcceptanceStats.from_steps(records([3, 2], [1, 2]))
    late = sd.AcceptanceStats.from_steps(records([3, 2, 3, 3, 1, 0], [1, 2, 3, 1, 1, 0]))
    interval = dataclasses.replace(late, num_fallbacks=2) - early
    assert interval.log_line(seconds=0.5) == (
        "SpecDecoding metrics: Mean acceptance length: 2.67, Tokens per target pass: 2.25, "
        "Accepted throughput: 10.00 tokens/s, Drafted throughput: 14.00 tokens/s, "
        "Accepted: 5 tokens, Drafted: 7 tokens, "
        "Per-position acceptance rate (unconditional): 1.000, 0.500, 0.500, "
        "Avg Draft acceptance rate: 71.4%, Fallbacks: 2"
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_an_interval_without_duration_has_no_log_line(seconds: float) -> None:
    for stats in (sd.AcceptanceStats.from_steps(records([3], [1])), lm.ServingStats(4)):
        with pytest.raises(ValueError, match="^seconds"):
            stats.log_line(seconds)


def test_a_histogram_counts_times_like_plain_python() -> None:
    rng = np.random.default_rng(0)
    times = [*np.exp(rng.uniform(-12, 6, 200)).tolist(), 0.0, 0.001, 100.0, 1e9]
    numbers = rng.integers(1, 5, len(times)).tolist()
    early = lm.Histogram().observe([(0.3, 2)])
    found = early.observe(zip(times, numbers, strict=True)) - early
    bounds = lm.Histogram.bounds
    assert bounds[:4] == (0.0001, 0.0002, 0.0005, 0.001) and bounds[-1] == 100 and len(bounds) == 19
    for i, bound in enumerate(bounds):  # as Prometheus counts: all up to a bound
        below = sum(n for time, n in zip(times, numbers, strict=True) if time <= bound)
        assert sum(found.counts[: i + 1]) == below
    assert found.count == sum(numbers)
    total = sum(time * n for time, n in zip(times, numbers, strict=True))
    assert found.total_seconds == pytest.approx(total)
    assert found.mean == pytest.approx(total / sum(numbers)) and lm.Histogram().mean == 0


def test_readings_of_different_counters_have_no_difference() -> None:
    stats = sd.AcceptanceStats.from_steps(records([3], [1]))
    with pytest.raises(ValueError, match="^earlier"):
        stats - sd.AcceptanceStats.from_steps(records([3, 3], [1, 0]))
    with pytest.raises(ValueError, match="^earlier"):
        stats - sd.AcceptanceStats((0, 0), (0, 0), (0, 0), 0, 0)


# The device's counters


def random_steps(seed: int) -> np.ndarray:
    """``[20, 3, 4]``; every fifth request is an empty slot with drafts left over in its row."""
    rng = np.random.default_rng(seed)
    proposed = rng.integers(0, K + 1, (20, 4))
    accepted = rng.integers(0, proposed + 1)
    empty = rng.random((20, 4)) < 0.2
    accepted[empty] = 0
    return np.stack([proposed, accepted, np.where(empty, 0, accepted + 1)], axis=1).astype(np.int32)


def test_counting_in_a_loop_agrees_with_the_records() -> None:
    steps = random_steps(0)
    offered, reached, accepted_at = [0] * K, [0] * K, [0] * K
    total = drafts = 0
    for proposed, accepted, emitted in steps.transpose(0, 2, 1).reshape(-1, 3).tolist():
        if emitted == 0:
            continue
        total += emitted
        drafts += proposed > 0
        for i in range(proposed):
            offered[i] += 1
            reached[i] += i <= accepted
            accepted_at[i] += i < accepted
    counters = count(sd.AcceptanceCounters.create(K), steps, jnp.arange(20))
    stats = sd.AcceptanceStats.from_counters(counters)
    assert stats == sd.AcceptanceStats(
        tuple(offered),
        tuple(reached),
        tuple(accepted_at),
        num_tokens=total,
        num_verifications=(steps[:, 2] > 0).sum(),
        num_fallbacks=190,
    )
    assert stats.num_drafts == drafts


def test_counts_past_32_bits_do_not_wrap() -> None:
    steps = random_steps(2)
    fallbacks = jnp.full(20, 2**31 - 1, jnp.int32)
    once = sd.AcceptanceStats.from_counters(
        count(sd.AcceptanceCounters.create(K), steps, fallbacks)
    )
    assert once.num_fallbacks == 20 * (2**31 - 1)
    full = jnp.full((2, 3 * K + 3), 2**32 - 1, jnp.uint32).at[1].set(jnp.uint32(6))
    later = sd.AcceptanceStats.from_counters(count(sd.AcceptanceCounters(full), steps, fallbacks))
    before = 7 * 2**32 - 1
    assert later == sd.AcceptanceStats(
        *(
            tuple(before + n for n in counts) if isinstance(counts, tuple) else before + counts
            for counts in dataclasses.astuple(once)[:-1]  # all but the version
        )
    )
    assert later - sd.AcceptanceStats.from_counters(sd.AcceptanceCounters(full)) == once


def test_an_update_talks_to_no_host() -> None:
    steps = jnp.asarray(random_steps(3))
    fallbacks, counters = jnp.zeros(20, jnp.int32), sd.AcceptanceCounters.create(K)
    program = count.lower(counters, steps, fallbacks).compile()
    with jax.transfer_guard("disallow"):
        counters = program(counters, steps, fallbacks)
    assert "callback" not in str(jax.make_jaxpr(count)(counters, steps, fallbacks))
    assert counters.words.shape == (2, 3 * K + 3)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_emitted": jnp.int32(1)}, ValueError, "num_emitted"),
        ({"num_proposed": array([1])}, ValueError, "num_proposed"),
        ({"num_kept": array([1])}, ValueError, "num_kept"),
        ({"num_accepted": array([1])}, ValueError, "num_accepted"),
        ({"num_fallbacks": array([1])}, ValueError, "num_fallbacks"),
        ({"num_accepted": jnp.ones(2)}, TypeError, "num_accepted"),
        ({"num_fallbacks": True}, TypeError, "num_fallbacks"),
    ],
)
def test_an_update_names_the_argument_that_does_not_fit(
    changed: dict, error: type[Exception], message: str
) -> None:
    good = dict(num_proposed=array([3, 2]), num_accepted=array([1, 0]), num_emitted=array([2, 1]))
    with pytest.raises(error, match=f"^{message}"):
        sd.AcceptanceCounters.create(K).update(**(good | changed))


def test_statistics_are_read_from_records_of_steps() -> None:
    output = lm.GenerateOutput([], records([1], [1]), [])
    with pytest.raises(TypeError, match="^steps"):
        sd.AcceptanceStats.from_steps(output)  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError)])
def test_counters_need_a_position(k: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="^num_speculative_tokens"):
        sd.AcceptanceCounters.create(k)
