"""The threshold of a filtered row is that of a sort, and nobody pays for what nobody uses."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import Xla, api, gather, platform, sampling, threshold, tpu_largest
from lower_floor import rows_lib as rows

import jax_specdec as sd

pytestmark = pytest.mark.newest

B = 6
SIZES = {"float32": 33, "bfloat16": 2051, "float16": 33}


@functools.partial(jax.jit, static_argnames="platform")
def thresholds(
    logits: jax.Array, temperature: jax.Array, filter: sampling.Filter, platform: str = "cpu"
) -> jax.Array:
    backend = Xla().on(platform)
    target = rows.VocabRows(logits, logits.shape[1], -jnp.inf, backend.device)
    wanted, inv = jnp.ones((B,), bool), sampling.inverse_temperature(temperature)
    peak = backend.peak(target, None)
    return backend.thresholds(target, None, filter, wanted, peak, inv)


def kept_by_sorting(row, temperature, min_p, top_k, top_p) -> tuple[np.ndarray, bool]:
    """Which entries are kept, and whether float32 can tell."""
    row = row.astype(np.float64)
    p = np.exp((row - row.max()) / temperature)
    kept = p >= min_p
    close = 0 < min_p < 1 and np.min(np.abs(p - min_p)) < 1e-4 * min_p
    if 0 < top_k < len(row):
        kept &= row >= np.sort(np.where(kept, row, -np.inf))[::-1][top_k - 1]
    p = np.where(kept, p, 0.0)
    if top_p < 1:
        heavier = np.array([p[row > x].sum() for x in row])
        close |= np.min(np.abs(heavier - top_p * p.sum())) < 1e-4 * top_p * p.sum()
        kept &= heavier < top_p * p.sum()
    return kept & (row > -np.inf), close


@pytest.mark.long
@pytest.mark.parametrize("dtype", list(SIZES))
@hypothesis.settings(max_examples=25)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), shift=st.sampled_from([0.0, -50.0, 3.0, 1e-3]))
def test_the_threshold_keeps_what_a_sort_keeps(dtype, seed, shift):
    rng = np.random.default_rng(seed)
    x = rng.choice([1e-3, 1.0, 4.0], (B, 1)) * rng.standard_normal((B, SIZES[dtype])) + shift
    x = np.where(rng.random((B, 1)) < 0.3, np.round(2 * x) / 2, x)  # ties, also at 0
    x[(rng.random(x.shape) < 0.4) & (rng.random((B, 1)) < 0.3)] = -np.inf
    x[:, 0] = shift
    logits = x.astype(jnp.dtype(dtype))
    temperature = np.float32(rng.choice([0.1, 0.7, 1.0, 3.0], B))
    filter = sampling.Filter(
        np.float32(rng.choice([0.0, 0.1, 0.6, 1.0], B)),
        np.int32(rng.choice([0, 1, 2, 10, x.shape[1], 2**31 - 1], B)),
        np.float32(rng.choice([1.0, 1e-9, 0.3, 0.9, 0.999], B)),
    )
    found = np.asarray(thresholds(logits, temperature, filter))
    for b, row in enumerate(logits.astype(np.float32)):
        values = [values[b].item() for values in filter]
        kept, close = kept_by_sorting(row, temperature[b], *values)
        if not close:
            got = (row >= found[b]) & (row > -np.inf)
            np.testing.assert_array_equal(got, kept, err_msg=f"{values} at {temperature[b]}")
        assert row[row.argmax()] >= found[b]


OF_OTHER_ROWS = jax.jit(lambda *given: thresholds.__wrapped__(*given, platform="tpu"))
"""Traced apart."""

# Deviation, min-p, top-k, top-p, and whether the entries that a TPU lists decide.
FEW, MANY, SAME = 4.0, 0.01, 0.0  # standard deviations, of which few, many or all entries matter
LISTED = {
    "few": (FEW, 0.0, 50, 0.9, True),
    "a whole row's mass": (FEW, 0.0, 0, 0.5, True),
    "min-p": (FEW, 0.3, 0, 0.9, True),
    "more than are listed": (FEW, 0.0, 4000, 1.0, False),
    "flat rows": (MANY, 0.0, 0, 0.9, False),
    "one flat row": ([FEW] * (B - 1) + [MANY], 0.0, 0, 0.5, False),
    "min-p alone": (MANY, 0.5, 0, 1.0, True),
    "min-p of flat rows": (MANY, 0.5, 0, 1e-6, False),
    "ties": (SAME, 0.0, 3, 0.9, False),
}


@pytest.mark.long
@pytest.mark.parametrize("case", LISTED.values(), ids=LISTED)
def test_thresholds_among_the_largest_entries_are_those_of_all(case):
    """And they do not depend on the rows where the largest entries decide."""
    deviation, min_p, top_k, top_p, is_listed = case
    x = np.random.default_rng(0).standard_normal((B, 2 * 4096 + 100))
    x *= np.broadcast_to(deviation, B)[:, None]
    x[0, ::3] = -np.inf
    numbers = zip((min_p, top_k, top_p), ("float32", "int32", "float32"), strict=True)
    filter = sampling.Filter(*(np.full(B, number, dtype) for number, dtype in numbers))
    given = x.astype(jnp.bfloat16), np.ones(B, np.float32), filter
    wanted = np.asarray(thresholds(*given))
    np.testing.assert_array_equal(thresholds(*given, platform="tpu"), wanted)

    def in_other_rows(rows: Any, *args: Any) -> Any:
        return threshold.XlaAmounts(dataclasses.replace(rows, matrix=rows.matrix - 0.125), *args)

    with mock.patch.object(tpu_largest, "XlaAmounts", in_other_rows):
        found = OF_OTHER_ROWS(*given)
    assert (np.asarray(found) == wanted).all() == is_listed


def test_only_if_computes_nothing_where_the_condition_holds_nowhere():
    calls: list[int] = []

    @jax.jit
    def run(condition: jax.Array) -> jax.Array:
        def fn(x: jax.Array) -> jax.Array:
            jax.debug.callback(lambda _: calls.append(1), x)
            return x + 1

        x = jnp.arange(condition.shape[0], dtype=jnp.float32)
        return jax.vmap(lambda c, x: threshold.only_if(c, lambda: fn(x), -x))(condition, x)

    np.testing.assert_array_equal(run(np.array([False] * 3)), [0, -1, -2])
    jax.effects_barrier()
    assert not calls
    np.testing.assert_array_equal(run(np.array([False, True, False])), [0, 2, -2])
    jax.effects_barrier()
    assert calls


def traced(sampling: sd.SamplingParams, form: str = "cuda", **given: Any) -> Any:
    """The jaxpr of a verification; the cached trace of another is not looked at."""
    config = sd.SpecDecodeConfig(num_speculative_tokens=2)
    drafts = sd.Drafts.from_dense(jnp.zeros((B, 2), jnp.int32))
    noise = sd.testing.Noise(jnp.zeros((B, 2)), jnp.zeros((B, 2)))

    def verify(target: jax.Array, sampling: sd.SamplingParams, given: Any) -> Any:
        return sd.testing.rejection_sample_with_noise(
            target, drafts, noise, sampling=sampling, config=config, implementation="xla", **given
        )

    with (
        mock.patch.object(api, "_rejection_sample", api._rejection_sample.__wrapped__),
        platform.assume(form),  # else the form would hide in its equation
    ):
        return jax.make_jaxpr(verify)(jnp.zeros((3 * B, 5000), jnp.bfloat16), sampling, given)


def count_reads(jaxpr: Any) -> int:
    """Reads of logits, at any depth."""
    some = r":bf16\[[\d,]*\] = (dynamic_slice|gather)\["
    all_rows = rf":f32\[{3 * B},5000\] = convert_element_type\["
    return len(re.findall(f"{some}|{all_rows}", str(jaxpr)))


@pytest.mark.parametrize("form", ["cpu", "cuda"])
def test_neutral_parameters_read_no_row_again(form):
    ones = jnp.ones(B)
    plain = traced(sd.SamplingParams(ones), form)
    neutral = sd.SamplingParams(ones, jnp.zeros(B), jnp.zeros(B, jnp.int32), ones)
    filtered = traced(neutral, form)
    # All that the filters read is what `only_if` runs, and it does not for these values.
    with mock.patch.object(threshold, "only_if", lambda condition, fn, otherwise: otherwise):
        skipped = traced(neutral, form)
    assert count_reads(filtered) > count_reads(skipped) == count_reads(plain) > 0
    for size in (1, 5000):
        assert not sampling.Filter(jnp.float32(0), jnp.int32(0), jnp.float32(1)).limits(size)
        assert not sampling.Filter(jnp.float32(0), jnp.int32(size), jnp.float32(1)).limits(size)
        assert sampling.Filter(jnp.float32(0), jnp.int32(0), jnp.float32(0.9)).limits(size)


def test_nothing_is_compiled_for_parameters_that_are_none():
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("traced")

    with (
        mock.patch.object(threshold, "only_if", fail),
        mock.patch.object(gather, "find_thresholds", fail),
        mock.patch.object(rows.VocabRows, "_bits", fail),
        mock.patch.object(rows, "bits_at", fail),
    ):
        traced(sd.SamplingParams(jnp.ones(B)))
        with pytest.raises(AssertionError, match="traced"):
            traced(sd.SamplingParams(jnp.ones(B), top_p=jnp.ones(B)))
        with pytest.raises(AssertionError, match="traced"):
            bits = jnp.zeros((3 * B, 157), jnp.int32)
            traced(sd.SamplingParams(jnp.ones(B)), token_bitmask=bits)
