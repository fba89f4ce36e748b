"""Tokens have the processed target's distribution, whatever the parameters, mask and drafts.

As in `test_statistics`, Markov chains stand for the models and many sequences are decoded at once.
Drafts are drawn under the same parameters, kept in a store, and verified from there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd

from .batch import packed
from .test_statistics import p_value

pytestmark = [pytest.mark.newest, pytest.mark.long]

V, K, LENGTH = 7, 2, 3  # the third token is a bonus token at times
GROUPS: list[dict[str, Any]] = [
    dict(min_p=0.2),
    dict(top_k=3),
    dict(top_p=0.7),
    dict(temperature=0.8, min_p=0.05, top_k=5, top_p=0.9),
    dict(temperature=1.5),
]
PER_GROUP = 4000
B = PER_GROUP * len(GROUPS)
GROUP = np.arange(B) % len(GROUPS)
ALPHA = 0.01 / (len(GROUPS) * LENGTH)

_rng = np.random.default_rng(3)
TARGET = (0.8 * _rng.standard_normal((V, V))).astype(np.float32)  # row: the token before
TARGET[:, 1] = TARGET[:, 2]  # ties
DRAFTER = (TARGET + 0.6 * _rng.standard_normal((V, V))).astype(np.float32)
ALLOWED = _rng.random((V, V)) < 0.75
ALLOWED[np.arange(V), TARGET.argmax(axis=1)] = True
BITMASK = packed(ALLOWED)


def per_request(name: str, default: float) -> np.ndarray:
    values = np.array([group.get(name, default) for group in GROUPS])
    return values[GROUP].astype(np.int32 if name == "top_k" else np.float32)


SAMPLING = sd.SamplingParams(
    per_request("temperature", 1.0),
    per_request("min_p", 0.0),
    per_request("top_k", 0),
    per_request("top_p", 1.0),
)


def processed(logits: np.ndarray, group: dict[str, Any]) -> np.ndarray:
    """The distribution after each token ``[V, V]``, by sorting."""
    rows = []
    for row, mask in zip(logits.astype(np.float64), ALLOWED, strict=True):
        row = np.where(mask, row, -np.inf)
        p = np.exp((row - row.max()) / group.get("temperature", 1.0))
        p = np.where(p >= group.get("min_p", 0.0) * p.max(), p, 0.0)
        if "top_k" in group:
            p = np.where(p >= np.sort(p)[-group["top_k"]], p, 0.0)
        heavier = np.array([p[p > x].sum() for x in p])
        p = np.where(heavier < group.get("top_p", 1.0) * p.sum(), p, 0.0)
        rows.append(p / p.sum())
    return np.stack(rows)


@jax.jit
def step(store, keys, sampling, last, positions, *, q_unfiltered, bonus_row_unmasked):
    """One program, right or with a mistake: the last two say which.

    Keys and parameters are arguments: XLA computes what depends on constants alone as it compiles.
    """
    ids, before = [], [last]
    for offset in range(K):
        logits = jnp.asarray(DRAFTER)[before[-1]]
        drawn = sd.sample_draft_tokens(
            logits, sampling=sampling, keys=keys, positions=positions, offset=offset
        )
        relative = (logits - drawn.row_max[:, None]) / sampling.temperature[:, None]
        unfiltered = jax.nn.logsumexp(relative, axis=1)
        claimed = drawn._replace(
            log_normalizer=jnp.where(q_unfiltered, unfiltered, drawn.log_normalizer),
            threshold=jnp.where(q_unfiltered, -jnp.inf, drawn.threshold),
        )
        store = store.write(offset, logits, claimed, positions=positions, sampling=sampling)
        ids.append(drawn.token_ids)
        before.append(drawn.token_ids)
    context = jnp.stack(before, axis=1)
    bitmask = jnp.asarray(BITMASK)[context]
    bitmask = bitmask.at[:, -1].set(jnp.where(bonus_row_unmasked, -1, bitmask[:, -1]))
    drafts = sd.Drafts.from_dense(jnp.stack(ids, axis=1))
    drafts = store.attach(drafts, positions=positions, sampling=sampling)
    output = sd.rejection_sample(
        jnp.asarray(TARGET)[context].reshape(-1, V),
        drafts,
        sampling=sampling,
        keys=keys,
        positions=positions,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        token_bitmask=bitmask.reshape(-1, 1),
    )
    return store, output


def decode(mistake: str | None = None) -> np.ndarray:
    """``[B, LENGTH]`` tokens after token 0."""
    tokens = np.full((B, LENGTH + K + 1), -1)
    done, last = np.zeros(B, np.int32), np.zeros(B, np.int32)
    store = sd.DraftStore.create(B, K, V)
    keys = jax.random.split(jax.random.key(5), B)
    while done.min() < LENGTH:
        store, output = step(
            store,
            keys,
            SAMPLING,
            last,
            1 + done,
            q_unfiltered=mistake == "q unfiltered",
            bonus_row_unmasked=mistake == "bonus row unmasked",
        )
        output = jax.device_get(output)
        assert not output.status.any()
        for j in range(K + 1):
            writes = (j < output.num_emitted) & (done + j < tokens.shape[1])
            tokens[writes, done[writes] + j] = output.token_ids[writes, j]
        last = output.token_ids[np.arange(B), output.num_accepted]
        done = np.minimum(done + output.num_emitted, tokens.shape[1]).astype(np.int32)
    return tokens[:, :LENGTH]


def check_lossless(tokens: np.ndarray) -> None:
    for g, group in enumerate(GROUPS):
        p = processed(TARGET, group)
        pairs = p[0][:, None] * p
        for expected in (p[0], pairs, pairs[:, :, None] * p):
            counts = np.zeros(expected.shape)
            np.add.at(counts, tuple(tokens[g == GROUP, : expected.ndim].T), 1)
            impossible = counts[expected == 0].sum()
            assert impossible == 0, f"{group}: {impossible} seen, none expected"
            found, report = p_value(counts[expected > 0], expected[expected > 0])
            assert found > ALPHA, f"{group}: p = {found:.3g}\n{report}"


def test_tokens_have_the_processed_distribution_whatever_is_drafted():
    check_lossless(decode())


@pytest.mark.parametrize("mistake", ["q unfiltered", "bonus row unmasked"])
def test_a_mistake_is_noticed(mistake):
    tokens = decode(mistake)
    with pytest.raises(AssertionError, match="seen"):
        check_lossless(tokens)
