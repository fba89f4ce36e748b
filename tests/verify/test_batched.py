"""All requests at once: large batches, rows as TPUs read them, and memory outside of jit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, ones, zeros
from lower_floor import Xla, assume, ragged, rows_lib, statistics

import jax_specdec as sd


def owners_in_python(first_row: np.ndarray, num_rows: np.ndarray, size: int) -> list[int]:
    owners = [-1] * size
    for b, (first, count) in enumerate(zip(first_row, num_rows, strict=True)):
        for row in range(first, first + count):
            assert owners[row] == -1
            owners[row] = b
    return owners


def test_owners_are_those_of_the_loop_in_python():
    batch, size = 9, 40
    search = jax.jit(functools.partial(ragged.owner_of_rows, size=size))
    for seed in range(40):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 4, batch) + seed % 2  # with bonus rows, none is empty
        ends = np.cumsum(counts + (rng.random(batch) < 0.2))  # some rows are nobody's
        num_rows = np.where(rng.random(batch) < 0.7, counts, 0)
        is_out_of_bounds = (num_rows == 0) & (rng.random(batch) < 0.5)
        first_row = np.where(is_out_of_bounds, 0, ends - counts)
        owner, is_owned = search(jnp.asarray(first_row), jnp.asarray(num_rows))
        found = np.where(is_owned, owner, -1).tolist()
        assert found == owners_in_python(first_row, num_rows, size)


def many_requests(count: int) -> tuple[Any, ...]:
    rng, k, vocab = np.random.default_rng(0), 4, 3
    drafts = sd.Drafts.from_flat(rng.integers(0, vocab, count * k), rng.integers(0, k + 1, count))
    logits = rng.normal(size=(count * (k + 1), vocab)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), count)
    return logits, drafts, keys, np.arange(count, dtype=np.int32)


@functools.cache
def compiled_for(count: int, form: str) -> jax.stages.Compiled:
    def verify_many(
        logits: Any, drafts: Any, keys: Any, positions: Any
    ) -> sd.RejectionSampleOutput:
        return sd.rejection_sample(
            logits,
            drafts,
            sampling=sd.SamplingParams(positions % 3 / 2, top_k=positions % 5),
            keys=keys,
            positions=positions,
            config=sd.SpecDecodeConfig(num_speculative_tokens=4),
            active=positions % 7 != 0,
            implementation="xla",
        )

    with assume(form):
        lowered = jax.jit(verify_many).lower(*many_requests(count))
    return lowered.compile()


@pytest.mark.slow
def test_a_thousand_requests_get_the_tokens_of_one_after_another():
    given = many_requests(1000)
    assert given[0].shape[0] * 1000 > statistics.MANY_PAIRS
    found, wanted = (compiled_for(1000, how)(*given) for how in ("cuda", "cpu"))
    assert set(found.num_emitted.tolist()) == set(range(6))
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.status.tolist() == wanted.status.tolist()


@pytest.mark.slow
def test_temporaries_are_linear_in_requests():
    sizes = [
        compiled_for(count, "cuda").memory_analysis().temp_size_in_bytes for count in (1_000, 8_000)
    ]
    assert sizes[1] < 12 * sizes[0]  # were all pairs looked at: 64


# Rows.


def rows_with_ties() -> np.ndarray:
    """``[8, 5000]``: ties within a tile and across tiles, infinities, NaN."""
    x = np.random.default_rng(0).standard_normal((8, 5000)).astype(np.float32)
    x[0, [17, 18]] = x[1, [2047, 2048]] = x[2, [0, 4999]] = 9.0
    x[3] = 0.25
    x[4, :4000] = -np.inf
    x[5, 3] = np.nan
    x[6, 4999] = np.inf
    x[7] = -np.inf
    return x


@pytest.mark.parametrize("platform", ["tpu", "cpu", "cuda"])
@pytest.mark.parametrize("which", [None, np.array([2, 0, 7, 3, 1, 6, 4, 5], np.int32)])
def test_the_largest_entry_is_that_of_numpy_with_ties(platform, which):
    x = rows_with_ties()
    backend = Xla().on(platform)
    rows = rows_lib.VocabRows(jnp.asarray(x), 5000, -math.inf, backend.device)
    peak, best = jax.jit(functools.partial(backend.max_and_argmax, rows))(which)
    x = x if which is None else x[which]
    expected = np.where(np.isnan(x).any(axis=1), np.inf, np.max(x, axis=1))
    np.testing.assert_array_equal(peak, expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(best[finite], np.argmax(x, axis=1)[finite])


# Outside of jit an operation's result is in memory when the next one begins.

B, K, V = 64, 3, 512
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
SAMPLING = sd.SamplingParams(ones(B), min_p=zeros(B), top_k=full(B, 4), top_p=ones(B))
KEYS = jax.random.split(jax.random.key(0), B)
POSITIONS = zeros(B, jnp.int32)
LOGITS, ROWS = zeros((B, V)), zeros((B * (K + 1), V))
STORE = jax.eval_shape(lambda: sd.DraftStore.create(B, K, V))
DRAFTS = sd.Drafts(zeros(B * K, jnp.int32), jax.device_put(np.arange(0, B * K + 1, K, np.int32)))
PENALTIES = sd.Penalties(ones(B), ones(B), ones(B), zeros((B, V), jnp.int32), zeros((B, V), bool))
OUTPUT = sd.RejectionSampleOutput(
    zeros((B, K + 1), jnp.int32), *(zeros((B,), jnp.int32) for _ in range(3))
)

EAGER: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rejection_sample": (
        lambda rows, drafts: sd.rejection_sample(
            rows, drafts, sampling=SAMPLING, keys=KEYS, positions=POSITIONS, config=CONFIG
        ),
        (ROWS, DRAFTS),
    ),
    "sample_draft_tokens": (
        lambda logits: sd.sample_draft_tokens(
            logits, sampling=SAMPLING, keys=KEYS, positions=POSITIONS, offset=0
        ),
        (LOGITS,),
    ),
    "process_logits": (
        lambda rows, processors: sd.process_logits(rows, DRAFTS, processors, config=CONFIG),
        (ROWS, sd.LogitsProcessors(penalties=PENALTIES)),
    ),
    "token_logprobs": (
        lambda rows, output: sd.token_logprobs(
            rows, DRAFTS, output, sampling=SAMPLING, config=CONFIG, num_top=2
        ),
        (ROWS, OUTPUT),
    ),
    "DraftStore.write": (
        lambda store, logits: store.write(
            1, logits, sd.DraftSample(*[zeros(B)] * 3), positions=POSITIONS, sampling=SAMPLING
        ),
        (STORE, LOGITS),
    ),
    "DraftStore.attach": (
        lambda store, drafts: store.attach(drafts, positions=POSITIONS, sampling=SAMPLING),
        (STORE, DRAFTS),
    ),
    "DraftStore.evict": (lambda store: store.evict(POSITIONS < 3), (STORE,)),
}


def largest_result(fn: Callable[..., Any], *args: Any) -> int:
    """Entries of the largest array that any operation of a call outside of jit makes."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return max(math.prod(var.aval.shape) for eqn in jaxpr.eqns for var in eqn.outvars)


@pytest.mark.parametrize(("fn", "args"), EAGER.values(), ids=EAGER)
def test_no_operation_without_jit_makes_more_than_arguments_hold(fn, args):
    given = sum(x.size for x in jax.tree.leaves(args))
    assert largest_result(fn, *args) <= given
