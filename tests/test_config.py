"""SpecDecodeConfig and the schedules of acceptance rates."""

import copy
import dataclasses
import fractions
import json
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec import SpecDecodeConfig
from jax_specdec.testing import (
    acceptance_length_to_rates,
    conditional_to_unconditional_rates,
    unconditional_to_conditional_rates,
)

pytestmark = pytest.mark.newest

NAN, INF = math.nan, math.inf


def synthetic(**fields: Any) -> SpecDecodeConfig:
    return SpecDecodeConfig(rejection_sample_method="synthetic", **fields)


def non_increasing_rates(max_size: int = 32) -> st.SearchStrategy[tuple[float, ...]]:
    """Schedules whose entries are 0 or large enough that no product of 32 of them underflows."""
    rate = st.just(0.0) | st.floats(1e-6, 1.0)
    return st.lists(rate, min_size=1, max_size=max_size).map(
        lambda rates: tuple(sorted(rates, reverse=True))
    )


# Building a config


def test_only_the_number_of_tokens_is_required() -> None:
    config = SpecDecodeConfig(num_speculative_tokens=4)
    assert config.to_dict() == {
        "num_speculative_tokens": 4,
        "rejection_sample_method": "standard",
        "draft_sample_method": "probabilistic",
        "synthetic_acceptance_rates": None,
        "synthetic_acceptance_length": None,
    }
    assert config.unconditional_rates is None
    assert config.conditional_rates is None


@pytest.mark.parametrize("k", [1, 2, 32, 1000])
def test_any_number_of_tokens_from_1_builds_every_method(k: int) -> None:
    SpecDecodeConfig(num_speculative_tokens=k)
    by_rates = synthetic(num_speculative_tokens=k, synthetic_acceptance_rates=(0.5,) * k)
    assert by_rates.unconditional_rates == (0.5,) * k
    assert by_rates.conditional_rates == (0.5,) + (1.0,) * (k - 1)
    by_length = synthetic(num_speculative_tokens=k, synthetic_acceptance_length=k + 1)
    assert by_length.unconditional_rates == by_length.conditional_rates == (1.0,) * k


def test_synthetic_length_resolves_to_both_kinds_of_rates() -> None:
    config = synthetic(num_speculative_tokens=3, synthetic_acceptance_length=2.5)
    assert config.unconditional_rates == (1.0, 0.5, 0.0)
    assert config.conditional_rates == (1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    "rates",
    [
        [0.5, 0.25],
        np.array([0.5, 0.25]),
        np.array([0.5, 0.25], np.float32),
        (np.float32(0.5), np.float16(0.25)),
        [fractions.Fraction(1, 2), fractions.Fraction(1, 4)],
    ],
)
def test_rates_become_a_tuple_of_floats(rates: object) -> None:
    config = synthetic(num_speculative_tokens=np.int64(2), synthetic_acceptance_rates=rates)
    assert config.synthetic_acceptance_rates == (0.5, 0.25)
    assert {type(rate) for rate in config.synthetic_acceptance_rates} == {float}
    assert type(config.num_speculative_tokens) is int


BAD_COUNTS = [
    *((k, ValueError) for k in (0, -3, 1025, 10**30)),
    *((k, TypeError) for k in (True, np.True_, 4.0, NAN, "4", None)),
]

BY_LENGTH = dict(synthetic_acceptance_length=2.5)
BY_RATES = dict(synthetic_acceptance_rates=(0.5, 0.5, 0.5))
WHOLE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}  # as vLLM has it
OBJECTS = "is not part of a SpecDecodeConfig: methods and models are objects here; pass a drafter"
# What is not a field, and what the message says of it.
NO_FIELDS: list[tuple[dict[str, object], str]] = [
    (WHOLE, f"method='ngram' {OBJECTS}"),
    ({"model": "org/draft", **WHOLE}, f"model='org/draft' {OBJECTS}"),
    ({"speculative_config": WHOLE}, f"speculative_config={WHOLE!r} {OBJECTS}"),
    ({"prompt_lookup_min": 2}, f"prompt_lookup_min=2 {OBJECTS}"),
    ({"draft_tensor_parallel_size": 1}, f"draft_tensor_parallel_size=1 {OBJECTS}"),
    ({"draft_sample_metod": 4}, "unknown key 'draft_sample_metod'; did you mean 'draft_sample_me"),
]
# The name of the argument is that of the last field.
BAD_CONFIGS: list[tuple[dict[str, object], type[Exception]]] = [
    (dict(rejection_sample_method="strict"), ValueError),
    (dict(rejection_sample_method="fly"), ValueError),
    (dict(rejection_sample_method=None), TypeError),
    (dict(draft_sample_method="random"), ValueError),
    (dict(draft_sample_method="gumbel"), ValueError),
    (dict(draft_sample_method=1), TypeError),
    (dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=None), ValueError),
    (dict(rejection_sample_method="synthetic", **BY_LENGTH, **BY_RATES), ValueError),
    (BY_RATES, ValueError),
    (BY_LENGTH, ValueError),
]

# In a list of three; and the entry that is named.
BAD_RATES = [
    ((), ValueError, ""),
    ((0.9, NAN, 0.1), ValueError, "[1]"),
    ((INF, 0.5, 0.1), ValueError, "[0]"),
    ((0.9, 0.5, -0.1), ValueError, "[2]"),
    ((1.5, 0.5, 0.1), ValueError, "[0]"),
    ((10**400, 0.5, 0.1), ValueError, "[0]"),
    ((True, 0.5, 0.1), TypeError, "[0]"),
    (np.array([True, False, False]), TypeError, "[0]"),
    ((0.9, "0.5", 0.1), TypeError, "[1]"),
    ((0.9, None, 0.1), TypeError, "[1]"),
    ((0.9, 0.5j, 0.1), TypeError, "[1]"),
    (np.ones((3, 1)), TypeError, "[0]"),
    *((rates, TypeError, "") for rates in ("0.5", b"abc", 0.5, np.array(0.5), {0.5}, {"0": 0.5})),
]

BAD_LENGTHS = [
    *((length, ValueError) for length in (0.99, 4.01, NAN, INF, -INF)),
    *((length, TypeError) for length in (True, "2.5", [2.5])),
]


@pytest.mark.parametrize(("count", "error"), BAD_COUNTS)
def test_a_bad_number_of_tokens_is_refused(count: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="^num_speculative_tokens must"):
        SpecDecodeConfig(num_speculative_tokens=count)
    with pytest.raises(error, match="^num_speculative_tokens must"):
        acceptance_length_to_rates(1.0, count)


@pytest.mark.parametrize(("fields", "error"), BAD_CONFIGS)
def test_a_bad_field_is_named(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{list(fields)[-1]}"):
        SpecDecodeConfig(**{"num_speculative_tokens": 3, **fields})


@pytest.mark.parametrize(("fields", "message"), NO_FIELDS)
def test_what_is_no_field_is_refused_by_a_sentence(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        SpecDecodeConfig(**fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        SpecDecodeConfig.from_dict(fields)
    with pytest.raises(TypeError, match="^the fields must be given by name"):
        SpecDecodeConfig(fields)


@pytest.mark.parametrize(
    ("rates", "error", "entry"),
    [
        *BAD_RATES,
        ((0.9, 0.5, 0.6), ValueError, "[2]"),
        ((0.5, 0.5), ValueError, ""),
        ([0.5] * 4, ValueError, ""),
    ],
)
def test_bad_synthetic_rates_are_refused(rates: object, error: type[Exception], entry: str) -> None:
    with pytest.raises(error, match=re.escape(f"synthetic_acceptance_rates{entry} must")):
        synthetic(num_speculative_tokens=3, synthetic_acceptance_rates=rates)


@pytest.mark.parametrize(("length", "error"), BAD_LENGTHS)
def test_a_bad_synthetic_length_is_refused(length: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="^synthetic_acceptance_length must"):
        synthetic(num_speculative_tokens=3, synthetic_acceptance_length=length)


# A config is a value


def test_replace_checks_again() -> None:
    config = synthetic(num_speculative_tokens=2, synthetic_acceptance_rates=(0.5, 0.25))
    with pytest.raises(ValueError, match="^synthetic_acceptance_rates must"):
        dataclasses.replace(config, num_speculative_tokens=3)


def test_configs_built_from_equal_values_are_equal_and_hash_alike() -> None:
    a = synthetic(num_speculative_tokens=2, synthetic_acceptance_rates=[1, 0])
    b = synthetic(num_speculative_tokens=np.int32(2), synthetic_acceptance_rates=np.array([1.0, 0]))
    c = synthetic(num_speculative_tokens=2, synthetic_acceptance_rates=(1.0, 0.5))
    assert a == b
    assert hash(a) == hash(b)
    assert a != c
    assert len({a, b, c}) == 2
    assert copy.deepcopy(a) == a
    assert pickle.loads(pickle.dumps(a)) == a


# Dicts


@pytest.mark.parametrize(
    "config",
    [
        SpecDecodeConfig(num_speculative_tokens=4, draft_sample_method="probabilistic"),
        synthetic(num_speculative_tokens=2, synthetic_acceptance_rates=(0.5, 0.25)),
        synthetic(num_speculative_tokens=2, synthetic_acceptance_length=1.1),
    ],
)
def test_a_config_survives_a_round_trip_through_json(config: SpecDecodeConfig) -> None:
    assert SpecDecodeConfig.from_dict(config.to_dict()) == config
    assert SpecDecodeConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


FOUR = {"num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({**FOUR, 7: "standard"}, ValueError, "unknown key 7"),
        (
            {**FOUR, "synthetic_acceptance_rate": 0.6},
            ValueError,
            "synthetic_acceptance_rate is retired; give synthetic_acceptance_length (for a mean"
            " rate r over all positions, 1 + r * num_speculative_tokens) or"
            " synthetic_acceptance_rates (one unconditional rate per position) instead of 0.6",
        ),
        (
            {**FOUR, "draft_sample_method": "gumbel"},
            ValueError,
            "draft_sample_method='gumbel' is retired; give 'probabilistic' instead",
        ),
        ({}, ValueError, "values must have the key num_speculative_tokens"),
        ({"num_speculative_tokens": "4"}, TypeError, "num_speculative_tokens must"),
        ([("num_speculative_tokens", 4)], TypeError, "values must"),
        (None, TypeError, "values must"),
    ],
)
def test_from_dict_says_what_is_wrong(values: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        SpecDecodeConfig.from_dict(values)
    assert message in str(caught.value)


# Schedules


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [
        (2.5, 3, (1.0, 0.5, 0.0)),
        (1.0, 4, (0.0, 0.0, 0.0, 0.0)),
        (5.0, 4, (1.0, 1.0, 1.0, 1.0)),
        (1, 1, (0.0,)),
        (2, 1, (1.0,)),
        (1.25, 1, (0.25,)),
        (3, 4, (1.0, 1.0, 0.0, 0.0)),
        (np.float32(4.75), 4, (1.0, 1.0, 1.0, 0.75)),
    ],
)
def test_a_length_becomes_ones_a_fraction_and_zeros(
    length: float, k: int, rates: tuple[float, ...]
) -> None:
    assert acceptance_length_to_rates(length, k) == rates


@given(st.integers(1, 32).flatmap(lambda k: st.tuples(st.just(k), st.floats(1, k + 1))))
def test_the_schedule_of_a_length_has_exactly_that_length(case: tuple[int, float]) -> None:
    k, length = case
    rates = acceptance_length_to_rates(length, k)
    assert len(rates) == k
    assert math.fsum((1.0, *rates)) == length


def variance_of_accepted(rates: tuple[float, ...]) -> float:
    """Var[A] of the accepted count A from P(A = a) itself, with a in 0 .. K."""
    survival = (1.0, *rates, 0.0)
    p = [survival[a] - survival[a + 1] for a in range(len(rates) + 1)]
    mean = math.fsum(a * p[a] for a in range(len(p)))
    return math.fsum((a - mean) ** 2 * p[a] for a in range(len(p)))


@given(non_increasing_rates())
def test_no_schedule_of_the_same_length_varies_less(rates: tuple[float, ...]) -> None:
    best = acceptance_length_to_rates(math.fsum((1.0, *rates)), len(rates))
    assert math.isclose(sum(best), sum(rates), abs_tol=1e-12)
    assert variance_of_accepted(best) <= variance_of_accepted(rates) + 1e-12
    fraction = sum(rates) % 1.0
    assert math.isclose(variance_of_accepted(best), fraction * (1 - fraction), abs_tol=1e-9)


@pytest.mark.parametrize(
    ("unconditional", "conditional"),
    [
        ((0.9, 0.45, 0.0), (0.9, 0.5, 0.0)),
        ((0.8, 0.0, 0.0), (0.8, 0.0, 0.0)),
        ((1.0,) * 32, (1.0,) * 32),
        ((0.0,), (0.0,)),
        ((0.5, 0.5, 0.5), (0.5, 1.0, 1.0)),
        ((1.0, 1e-300, 5e-324), (1.0, 1e-300, 5e-324 / 1e-300)),
    ],
)
def test_unconditional_rates_become_conditional(
    unconditional: tuple[float, ...], conditional: tuple[float, ...]
) -> None:
    assert unconditional_to_conditional_rates(unconditional) == conditional


@given(non_increasing_rates())
def test_products_of_conditional_rates_are_the_unconditional_ones(rates: tuple[float, ...]) -> None:
    conditional = unconditional_to_conditional_rates(rates)
    assert all(0.0 <= rate <= 1.0 for rate in conditional)
    np.testing.assert_allclose(np.cumprod(conditional), rates, rtol=1e-14)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=32))
def test_products_of_rates_have_those_as_conditional_ones(rates: list[float]) -> None:
    unconditional = conditional_to_unconditional_rates(rates)
    np.testing.assert_allclose(unconditional, np.cumprod(rates), rtol=1e-14)
    np.testing.assert_allclose(unconditional_to_conditional_rates(unconditional), rates, rtol=1e-14)


@pytest.mark.parametrize(("rates", "error", "entry"), BAD_RATES)
def test_bad_rates_have_no_conditional_ones(rates: Any, error: type[Exception], entry: str) -> None:
    for convert in unconditional_to_conditional_rates, conditional_to_unconditional_rates:
        with pytest.raises(error, match=re.escape(f"rates{entry} must")):
            convert(rates)


def test_unconditional_rates_must_not_increase() -> None:
    with pytest.raises(ValueError, match=r"^rates\[2\] must"):
        unconditional_to_conditional_rates([0.5, 0.5, 0.6])


@pytest.mark.parametrize(("length", "error"), BAD_LENGTHS)
def test_acceptance_length_to_rates_refuses_a_bad_length(
    length: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="^length must"):
        acceptance_length_to_rates(length, 3)  # type: ignore[arg-type]
