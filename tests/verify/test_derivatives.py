"""Derivatives: zero through whatever draws tokens, those of log softmax through log-probabilities.

The losses here are what a policy gradient differentiates. They are compared with the same losses
whose tokens are constants, and with the derivatives of plain `jax.nn.log_softmax`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import assume, platform

import jax_specdec as sd

B, K, V = 4, 2, 40
SIZE, TOP_K, NUM_TOP = 37, 6, 3
ROWS = B * (K + 1)
RULES = {
    "standard": {},
    "block": dict(rejection_sample_method="block"),
    "synthetic": dict(rejection_sample_method="synthetic", synthetic_acceptance_length=2.0),
}
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
KEYS = jax.random.split(jax.random.key(0), B)
POSITIONS = np.arange(B, dtype=np.int32)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(ROWS, V)).astype(np.float32)
DRAFT_LOGITS = RNG.normal(size=(B * K, V)).astype(np.float32)
IDS = RNG.integers(0, SIZE, (B, K)).astype(np.int32)
TEMPERATURE = np.float32([0.7, 0.0, 1.0, 1.3])
REWARD = RNG.normal(size=(B, K + 1)).astype(np.float32)
TOP_REWARD = RNG.normal(size=(B, K + 1, NUM_TOP)).astype(np.float32)


def sample(
    rule: str, form: Any, kind: str, logits: Any, storage: Any, temperature: Any
) -> sd.RejectionSampleOutput:
    distribution: Any = sd.DraftLogits(storage)
    if kind == "probs":
        distribution = sd.DraftProbs(jax.nn.softmax(storage))
    if kind == "normalizers":
        distribution = sd.DraftLogits(storage, log_normalizer=jax.nn.logsumexp(storage, axis=1))
    with assume(form):
        return sd.rejection_sample(
            logits,
            sd.Drafts.from_dense(IDS, distribution=distribution),
            sampling=sd.SamplingParams(temperature, top_p=jnp.full((B,), 0.9)),
            keys=KEYS,
            positions=POSITIONS,
            config=sd.SpecDecodeConfig(num_speculative_tokens=K, **RULES[rule]),
        )


def policy_loss(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    each = jax.nn.log_softmax(logits).reshape(B, K + 1, V)
    each = jnp.take_along_axis(each, jnp.maximum(tokens, 0)[:, :, None], axis=2)[:, :, 0]
    return jnp.sum(jnp.where(tokens >= 0, REWARD * each, 0.0))


policy_gradient = jax.jit(jax.grad(policy_loss, 1))


@pytest.mark.parametrize(
    ("form", "rule", "kind"),
    [
        ("cpu", "standard", "probs"),
        pytest.param(None, "synthetic", "logits", marks=pytest.mark.slow),
    ],
)
def test_a_policy_gradient_is_that_of_constant_tokens(form: Any, rule: str, kind: str) -> None:
    given = LOGITS, DRAFT_LOGITS, TEMPERATURE + 0.5
    draw = functools.partial(sample, rule, form, kind)

    def loss(logits: Any, storage: Any, temperature: Any) -> tuple[jax.Array, jax.Array]:
        tokens, accepted = (x := draw(logits, storage, temperature)).token_ids, x.num_accepted
        return policy_loss(tokens, logits) + accepted.sum().astype(float), tokens

    (of_logits, *others), tokens = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*given)
    wanted = policy_gradient(tokens, LOGITS)
    assert np.any(wanted != 0)
    np.testing.assert_allclose(of_logits, wanted, rtol=1e-5, atol=1e-6)
    assert not any(np.any(x) for x in others)


@pytest.mark.slow
def test_they_are_zero_forward_and_of_a_batch_of_losses() -> None:
    draw = functools.partial(sample, "block", "cuda", "normalizers")
    temperature = TEMPERATURE + 0.5

    def loss(logits: jax.Array, storage: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = draw(logits, storage, temperature).token_ids
        return policy_loss(tokens, logits), tokens

    both = np.stack([LOGITS, LOGITS[::-1]]), np.stack([DRAFT_LOGITS, DRAFT_LOGITS])
    found, tokens = jax.device_get(jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))(*both))
    wanted = policy_gradient(tokens[0], LOGITS)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-6)
    given = LOGITS, DRAFT_LOGITS
    forward = jax.jit(lambda *steps: jax.jvp(loss, given, steps, has_aux=True)[1])(*given)
    np.testing.assert_allclose(forward, np.sum(wanted * LOGITS), rtol=1e-4)


def test_a_split_call_has_zero_derivatives() -> None:
    mesh = jax.make_mesh((2, 2), ("model", "data"), devices=jax.devices()[:4])
    sharding = sd.VerifySharding(mesh, vocab_axis="model", batch_axis="data")

    def verified(logits: jax.Array) -> jax.Array:
        output = sd.rejection_sample(
            logits,
            sd.Drafts.from_dense(IDS),
            sampling=sd.SamplingParams(1.0),
            keys=KEYS,
            positions=POSITIONS,
            config=CONFIG,
            sharding=sharding,
        )
        return output.token_ids.astype(jnp.float32).sum() + logits.sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(verified))(LOGITS), jnp.ones_like(LOGITS))


def derivatives(loss: Any, given: Any, steps: Any) -> Any:
    """Of both arguments, and forward along `steps`: one program."""
    steps = jax.tree.map(np.float32, steps)
    both = jax.jit(lambda *x: (jax.grad(loss, (0, 1))(*x[0]), jax.jvp(loss, *x)[1]))
    return jax.device_get(both(given, steps))


def test_drafting_has_zero_derivatives() -> None:
    def drawn(logits: jax.Array, temperature: jax.Array) -> jax.Array:
        sample = sd.sample_draft_tokens(
            logits,
            sampling=sd.SamplingParams(temperature, min_p=jnp.full((B,), 0.1)),
            keys=KEYS,
            positions=POSITIONS,
            offset=0,
        )
        floats = [x for x in jax.tree.leaves(sample) if x.dtype == jnp.float32]
        return sum((jnp.sum(x) for x in floats), jnp.sum(logits * logits))

    given = LOGITS[:B], TEMPERATURE + 0.5
    (of_logits, of_temperature), forward = derivatives(drawn, given, (np.ones((B, V)), np.ones(B)))
    np.testing.assert_array_equal(of_logits, 2 * given[0])
    assert not np.any(of_temperature)
    np.testing.assert_allclose(forward, 2 * np.sum(given[0]), rtol=1e-5)


# Log-probabilities. Request 1 is greedy, 2 emitted one token, 3 could not be verified.

TOKENS = np.int32([[0, 1, 2], [3, 4, 5], [6, -1, -1], [-1, -1, -1]])
COUNTS = np.int32([3, 3, 1, 0])
IS_TOKEN = TOKENS >= 0
OUTPUT = sd.RejectionSampleOutput(TOKENS, np.int32([2, 2, 0, 0]), COUNTS, np.int32([0, 0, 0, 2]))
# The six likeliest tokens, of which -inf is what a mask of the caller's own leaves.
RAISED = LOGITS + np.where(np.arange(V) < 7, np.float32(6), 0)
RAISED[:, 20], RAISED[-1] = -np.inf, np.nan
MASK = np.full((ROWS, 2), -2, np.int32)  # forbids 0
MASK[0, 0] = -9  # in row 0: 3, not 0


def found_loss(distribution: Any, logits: jax.Array, temperature: jax.Array, **named: Any) -> Any:
    found = sd.token_logprobs(
        logits,
        sd.Drafts.from_dense(IDS),
        OUTPUT,
        sampling=sd.SamplingParams(temperature, top_k=jnp.full((B,), TOP_K, jnp.int32)),
        config=CONFIG,
        num_top=NUM_TOP,
        distribution=distribution,
        thresholds=distribution == "processed",
        vocab_size=SIZE,
        token_bitmask=MASK,
        **named,
    )
    own = jnp.where(IS_TOKEN, REWARD * found.logprobs, 0.0)
    if found.thresholds is not None:  # constants
        own += jnp.where(jnp.isfinite(found.thresholds), found.thresholds, 0.0)
    return jnp.sum(own) + jnp.sum(
        jnp.where(IS_TOKEN[:, :, None], TOP_REWARD * found.top_logprobs, 0)
    )


def plain_loss(distribution: str, logits: jax.Array, temperature: jax.Array) -> jax.Array:
    rows = np.array(RAISED).reshape(B, K + 1, V)
    kept = np.isfinite(rows) & (np.arange(V) < SIZE)
    is_greedy = np.asarray(TEMPERATURE)[:, None] == 0
    if distribution == "processed":
        kept &= (np.asarray(MASK)[:, np.arange(V) // 32] >> np.arange(V) % 32 & 1 == 1).reshape(
            B, K + 1, V
        )
        least = np.sort(np.where(kept, rows, -np.inf))[:, :, -TOP_K, None]
        kept &= (rows >= least) | is_greedy[:, :, None]
        temperature = jnp.where(is_greedy, 1.0, temperature[:, None])[:, :, None]
    else:
        temperature = jnp.ones((B, 1, 1))
    x = jnp.where(kept, logits.reshape(B, K + 1, V), 0.0) / temperature
    each = jax.nn.log_softmax(jnp.where(kept, x, -1e9))
    top = np.argsort(-np.where(kept, rows, -np.inf), kind="stable")[:, :, :NUM_TOP]
    own = jnp.take_along_axis(each, jnp.maximum(TOKENS, 0)[:, :, None], axis=2)[:, :, 0]
    likeliest = jnp.take_along_axis(each, top, axis=2)
    loss = jnp.sum(jnp.where(IS_TOKEN, REWARD * own, 0.0))
    return loss + jnp.sum(jnp.where(IS_TOKEN[:, :, None], TOP_REWARD * likeliest, 0.0))


@functools.cache
def derivatives_of(form: Any, distribution: str) -> Any:
    given = (RAISED, TEMPERATURE), (LOGITS[::-1], REWARD[:, 0])
    return derivatives(functools.partial(form, distribution), *given)


def by_offset(*args: Any) -> Any:
    with platform.assume("default"):
        return found_loss(*args)


def over_mesh(*args: Any) -> Any:
    mesh = jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])
    return found_loss(*args, sharding=sd.VerifySharding(mesh, "model"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "distribution"), [(by_offset, "raw"), (over_mesh, "raw"), (found_loss, "processed")]
)
def test_log_probabilities_have_the_derivatives_of_log_softmax(
    form: Any, distribution: str
) -> None:
    found, forward = derivatives_of(form, distribution)
    wanted, wanted_forward = derivatives_of(plain_loss, distribution)
    # A token that the mask forbids is not among those kept; its log-probability is -inf.
    assert np.sum(wanted[0] != 0) > 30
    for got, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(forward, wanted_forward, rtol=1e-4)
    assert not found[0][-3:].any()  # a row of NaN that emitted nothing
