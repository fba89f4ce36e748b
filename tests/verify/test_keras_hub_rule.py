"""The speculative sampler of keras-hub and ours on the same arrays, by chi-square.

`keras_hub_tokens` states what `SpeculativeSampler` does with a `base_sampler` (version 0.32.0.dev0,
keras_hub/src/samplers/speculative_sampler.py at 71453d0) in our own words, without its guards
against rounding. docs/verification.md has the figures.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from serving.chi_square import ALPHA, CONTROL, p_value

import jax_specdec as sd

V, K, REQUESTS, TEMPERATURE = 6, 2, 20_000, 0.8
_rng = np.random.default_rng(4)
TARGET = _rng.normal(size=(K + 1, V)).astype(np.float32)
DRAFTER = (TARGET[:K] + 0.5 * _rng.normal(size=(K, V))).astype(np.float32)
P = scipy.special.softmax(TARGET.astype(np.float64) / TEMPERATURE, axis=1)  # [K+1, V]
Q = scipy.special.softmax(DRAFTER.astype(np.float64) / TEMPERATURE, axis=1)  # [K, V]
DRAFTS = DRAFTER.argmax(axis=1)  # [K]
PAGE = Path(__file__).parents[2] / "docs" / "verification.md"


def keras_hub_tokens(batch: int, is_one_hot: bool = False, keeps: bool = False) -> np.ndarray:
    """Returns the tokens of a step, ``[REQUESTS, K+1]``, -1 behind the emitted ones.

    Args:
      batch: requests that advance together, by the least number of accepted drafts among them.
      is_one_hot: q is 1 at the draft, as it is for an argmax. Theirs is the drafter's softmax.
      keeps: a draft that was accepted stays where the batch stops. Theirs is overwritten.
    """
    rng = np.random.default_rng(5)
    q = np.eye(V)[DRAFTS] if is_one_hot else Q
    place = np.arange(K)
    u = rng.uniform(size=(REQUESTS // batch, batch, K))
    accepted = u * q[place, DRAFTS] < P[place, DRAFTS]
    counts = np.cumprod(accepted, axis=2).sum(axis=2)  # [batches, batch]
    least = np.broadcast_to(counts.min(axis=1, keepdims=True), counts.shape)
    # One more token at the place where the batch stops: from max(p - q, 0), or p after all drafts.
    rows = np.append(np.maximum(P[:K] - q, 0), P[K:], axis=0)
    rows = np.cumsum(rows / rows.sum(axis=1, keepdims=True), axis=1)
    more = (rng.uniform(size=(*counts.shape, 1)) > rows[least]).sum(axis=2)
    if keeps:
        more = np.where(counts > least, np.append(DRAFTS, 0)[least], more)
    tokens = np.full((*counts.shape, K + 1), -1)
    tokens[..., :K] = np.where(place < least[..., None], DRAFTS, -1)
    np.put_along_axis(tokens, least[..., None], more[..., None], axis=2)
    return tokens.reshape(REQUESTS, K + 1)


def our_tokens(batch: int) -> np.ndarray:
    output = sd.rejection_sample(
        jnp.tile(jnp.asarray(TARGET), (REQUESTS, 1)),
        sd.Drafts.from_dense(jnp.tile(jnp.asarray(DRAFTS, jnp.int32), (REQUESTS, 1))),
        sampling=sd.SamplingParams(jnp.full(REQUESTS, TEMPERATURE, jnp.float32)),
        keys=jax.random.split(jax.random.key(batch), REQUESTS),
        positions=jnp.zeros(REQUESTS, jnp.int32),
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
    )
    return np.asarray(output.token_ids)


RULES = {
    "keras-hub's": (keras_hub_tokens, False, False),
    "with q = 1 at the draft": (lambda batch: keras_hub_tokens(batch, True), True, False),
    "and accepted drafts kept": (lambda batch: keras_hub_tokens(batch, True, True), True, True),
    "`rejection_sample`": (our_tokens, True, True),
}


@pytest.mark.newest
def test_an_argmax_draft_accepted_by_p_over_q_changes_the_text_and_one_line_mends_it() -> None:
    page = PAGE.read_text("utf-8")
    for name, (tokens_of, *is_lossless) in RULES.items():
        cells = []
        for batch, lossless in zip((1, 2), is_lossless, strict=True):
            tokens = tokens_of(batch)
            counts = np.bincount(tokens[:, 0], minlength=V)
            expected = P[0] * REQUESTS
            cells.append(f"{np.sum((counts - expected) ** 2 / expected):,.0f}")
            for place in range(2):  # among the requests that reach it
                reached = tokens[tokens[:, place] >= 0, place]
                p = p_value(np.bincount(reached, minlength=V), P[place])
                assert (p > ALPHA) if lossless else (p < CONTROL), (name, batch, place, p)
        assert f"| {name} | {cells[0]} | {cells[1]} |" in page, (name, cells)
