"""What their tests of sampled verification ask of distributions, asked of the adapter.

Inputs are those of vllm-project/tpu-inference's tests (commit b8692ff): ten requests of three
drafts over 100 ids, of which top-k or top-p leave some; and drafts of one distribution over ten
ids, of which another must come out. They count distances; here it is a chi-square test.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving.chi_square import CONTROL, assert_distributed, p_value, tally

import jax_specdec as sd
from jax_specdec.integrations import tpu_inference

B, K, V = 10, 3, 100


@functools.cache
def verifier(k: int) -> Any:
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)
    return jax.jit(functools.partial(tpu_inference.verify_flat, config=config))


def top_k_rows(top_k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(42)
    allowed = np.zeros((B * K, V), bool)
    for row in allowed:
        row[rng.permutation(V)[:top_k]] = True
    return np.where(allowed, 0.1, 0.0).astype(np.float32), allowed


def top_p_rows(top_p: float, top_k: int = V) -> tuple[np.ndarray, np.ndarray]:
    """The largest entries that together have `top_p` of the mass of the largest `top_k`."""
    logits = np.random.default_rng(42).normal(size=(B * K, V)).astype(np.float32)
    order = np.argsort(-logits, axis=1)
    mass = np.take_along_axis(np.exp(logits.astype(np.float64)), order, axis=1)
    mass[:, top_k:] = 0
    before = (np.cumsum(mass, axis=1) - mass) / mass.sum(axis=1, keepdims=True)
    allowed = np.zeros((B * K, V), bool)
    np.put_along_axis(allowed, order, (before < top_p) & (mass > 0), axis=1)
    return logits, allowed


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(1, 1.0), (5, 1.0), (99, 1.0), (-1, 0.5), (-1, 0.9), (-1, 0.99), (10, 0.8)],
)
def test_no_token_that_a_filter_leaves_out_is_emitted(top_k, top_p):
    logits, allowed = top_k_rows(top_k) if top_p == 1 else top_p_rows(top_p, top_k % V)
    rng = np.random.default_rng(7)
    probs = rng.dirichlet(np.ones(V), B * K).astype(np.float32)
    drafts = np.array([rng.choice(V, p=q / q.sum()) for q in probs.astype(np.float64)], np.int32)
    num_emitted = 0
    for seed in range(10):
        found = verifier(K)(
            jnp.asarray(logits),
            jnp.asarray(drafts),
            jnp.full((B,), K),
            temperature=jnp.ones((B,)),
            top_k=jnp.full((B,), top_k),
            top_p=jnp.full((B,), top_p),
            keys=jax.random.key(seed),
            draft_probs=jnp.asarray(probs),
            bonus_token_ids=jnp.zeros((B,), jnp.int32),
        )
        assert not found.output.status.any()
        at_drafts = np.asarray(found.token_ids[: B * K])
        emitted = at_drafts >= 0
        assert allowed[np.flatnonzero(emitted), at_drafts[emitted]].all()
        num_emitted += emitted.sum()
    assert num_emitted >= 10 * B


@pytest.mark.statistics
def test_the_targets_distribution_comes_out_of_drafts_of_another():
    many, k, v = 30000, 2, 10
    rng = np.random.default_rng(42)
    q, target = (np.exp(rng.normal(size=v)) for _ in range(2))
    p, q = target / target.sum(), q / q.sum()
    drafts = rng.choice(v, size=many * k, p=q).astype(np.int32)
    found = verifier(k)(
        jnp.broadcast_to(jnp.asarray(np.log(p), jnp.float32), (many * (k + 1), v)),
        jnp.asarray(drafts),
        jnp.full((many,), k),
        temperature=jnp.ones((many,)),
        keys=jax.random.key(456),
        draft_probs=jnp.broadcast_to(jnp.asarray(q, jnp.float32), (many * k, v)),
    )
    tokens = np.asarray(found.output.token_ids)
    counts = tally(tokens[:, :1], v)
    print(np.round(counts / many, 4).tolist())
    assert_distributed(counts, p, "first tokens")
    second = tally(tokens[tokens[:, 1] >= 0][:, 1:2], v)
    assert_distributed(second, p, "second tokens")
    assert p_value(counts, q) < CONTROL
