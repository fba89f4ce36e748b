"""Tokens that vLLM 0.33.0's own kernels gave, replayed with their noise."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import jax_specdec as sd

from .batch import ALMOST_ONE, XLA, Batch, Layout, oracle, verify

pytestmark = pytest.mark.newest

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden"
V1 = sorted(path.stem for path in GOLDEN.glob("v1_*.npz"))
V2 = sorted(path.stem for path in GOLDEN.glob("v2_*.npz"))


def load(name: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def v1_batch(case: dict[str, Any]) -> Batch:
    """Target rows of drafts only, the bonus given, Exp(1) noise per request."""
    counts = case["num_draft_tokens"]
    n, v = case["target_probs"].shape
    k = max(1, int(case["max_spec_len"]))
    if "target_logits" in case:
        target, temperature = case["target_logits"], case["temperature"]
    else:
        with np.errstate(divide="ignore"):
            target = np.log(case["target_probs"])
        temperature = np.where(case["is_greedy"], 0, 1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    accept = np.zeros((len(counts), k), np.float32)
    for b, count in enumerate(counts):
        accept[b, :count] = case["uniform_probs"][offsets[b] : offsets[b] + count]
    rates = case.get("synthetic_rates")
    has_probs = "draft_probs" in case
    return Batch(
        layout=Layout(
            vocab=v,
            num_speculative_tokens=k,
            num_requests=len(counts),
            num_drafts=n,
            kind="probs" if has_probs else "none",
            has_bonus=True,
            rates=None if rates is None else tuple(rates.tolist()),
            race=True,
        ),
        target_logits=target.astype(np.float32),
        drafts=sd.Drafts(
            case["draft_token_ids"],
            offsets,
            sd.DraftProbs(case["draft_probs"]) if has_probs else None,
        ),
        noise=sd.testing.RaceNoise(accept, case["q"].astype(np.float32)),
        temperature=temperature.astype(np.float32),
        bonus_token_ids=case["bonus_token_ids"],
    )


def v2_batch(case: dict[str, Any]) -> Batch:
    """Target rows at temperature, the bonus sampled inside, Gumbel noise per row.

    Only the noise of the row that is resampled counts, so each request gets that of the row their
    answer came from.
    """
    counts, slots = case["num_draft_tokens"], case["idx_mapping"]
    first_row = case["cu_num_logits"][:-1]
    b, v, k = len(counts), case["target_logits"].shape[1], int(case["num_speculative_steps"])
    temperature = case["temperature"][slots]
    per_row = np.repeat(np.where(temperature > 0, temperature, 1), counts + 1)
    block = bool(case["use_block_verification"])
    uniforms = case["u_block" if block else "u"]
    accept = np.zeros((b, k), np.float32)
    token_ids, rows = [], []
    for i, count in enumerate(counts):
        accept[i, :count] = uniforms[first_row[i] : first_row[i] + count]
        token_ids.extend(case["draft_sampled"][first_row[i] + 1 : first_row[i] + 1 + count])
        rows.extend(slots[i] * k + np.arange(count))
    has_logits = "draft_logits" in case
    chosen = first_row + case["num_sampled"] - 1
    distribution = None
    if has_logits:
        store = case["draft_logits"].reshape(-1, v)
        distribution = sd.DraftLogits(store, rows=np.array(rows, np.int32))
    return Batch(
        layout=Layout(
            vocab=v,
            num_speculative_tokens=k,
            num_requests=b,
            num_drafts=len(token_ids),
            kind="logits" if has_logits else "none",
            store_rows=len(store) if has_logits else None,
            block=block,
            race=True,
        ),
        target_logits=case["target_logits"] * per_row[:, None].astype(np.float32),
        drafts=sd.Drafts(
            np.array(token_ids, np.int32),
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            distribution,
        ),
        noise=sd.testing.RaceNoise(accept, np.exp(-case["gumbel"][chosen]).astype(np.float32)),
        temperature=temperature,
    )


def golden_batch(name: str) -> tuple[Batch, np.ndarray]:
    """The inputs of a case and the tokens it must give."""
    case = load(name)
    if name.startswith("v1"):
        batch, tokens = v1_batch(case), case["output_token_ids"]
        padding = batch.layout.num_speculative_tokens + 1 - tokens.shape[1]
        return batch, np.pad(tokens, ((0, 0), (0, padding)), constant_values=-1)
    tokens, emitted = case["sampled"], case["num_sampled"]
    return v2_batch(case), np.where(np.arange(tokens.shape[1]) < emitted[:, None], tokens, -1)


def pad(batch: Batch) -> Batch:
    """A V1 case in the common shape of all V1 cases, which spares compilations."""
    b, n, k, v = 6, 14, 5, 257
    layout = batch.layout

    def fill(x: Any, shape: tuple[int, ...], value: float) -> np.ndarray:
        widths = [(0, want - have) for want, have in zip(shape, x.shape, strict=True)]
        return np.pad(x, widths, constant_values=value)

    drafts, noise = batch.drafts, batch.noise
    distribution = drafts.distribution
    if isinstance(distribution, sd.DraftProbs):
        distribution = sd.DraftProbs(fill(distribution.probs, (n, v), 0.0))
    rates = layout.rates and (*layout.rates, *[0.0] * (k - len(layout.rates)))
    return Batch(
        layout=dataclasses.replace(
            layout, vocab=v, num_speculative_tokens=k, num_requests=b, num_drafts=n, rates=rates
        ),
        target_logits=fill(batch.target_logits, (n, v), -np.inf),
        drafts=sd.Drafts(
            fill(drafts.token_ids, (n,), 0),
            fill(drafts.cu_num_draft_tokens, (b + 1,), drafts.cu_num_draft_tokens[-1]),
            distribution,
        ),
        noise=sd.testing.RaceNoise(
            fill(noise.accept, (b, k), 0.0), fill(noise.exponential, (b, v), 1.0)
        ),
        temperature=fill(batch.temperature, (b,), 1.0),
        bonus_token_ids=fill(batch.bonus_token_ids, (b,), 0),
    )


def xla(batch: Batch) -> sd.RejectionSampleOutput:
    b, k = batch.noise.accept.shape
    got = verify(pad(batch) if batch.layout.has_bonus else batch, XLA)
    assert (got.token_ids[:, k + 1 :] == -1).all()
    return sd.RejectionSampleOutput(
        got.token_ids[:b, : k + 1], got.num_accepted[:b], got.num_emitted[:b], got.status[:b]
    )


both = pytest.mark.parametrize("answer", [oracle, xla])


def test_every_case_is_here():
    assert len(V1) == 15
    assert len(V2) == 4


@both
@pytest.mark.parametrize("name", V1 + V2)
def test_the_tokens_are_those_of_the_golden_case(name, answer):
    batch, tokens = golden_batch(name)
    got = answer(batch)
    np.testing.assert_array_equal(got.token_ids, tokens)
    np.testing.assert_array_equal(got.num_emitted, (tokens != -1).sum(axis=1))
    np.testing.assert_array_equal(got.num_accepted, got.num_emitted - 1)


def race(weights: np.ndarray, exponential: np.ndarray) -> int:
    return int(np.argmax(weights / exponential))


@both
def test_zero_target_probability_is_rejected_at_u_0_unlike_vllm(answer):
    case = load("v1_target_prob_zero")
    batch, _ = golden_batch("v1_target_prob_zero")
    noise = dataclasses.replace(batch.noise, accept=np.zeros_like(batch.noise.accept))
    got = answer(batch.replace(noise=noise))
    for b, first in enumerate((0, 3)):
        assert case["target_probs"][first, case["draft_token_ids"][first]] == 0
        theirs = case["draft_token_ids"][first]  # accepted: 0 / q >= 0
        assert got.token_ids[b, 0] == case["recovered_token_ids"][first] != theirs
        assert got.num_accepted[b] == 0


@both
def test_a_ratio_equal_to_u_is_rejected_where_vllm_accepts(answer):
    batch, _ = golden_batch("v1_random_ngram_2")
    logits = np.full_like(batch.target_logits, -np.inf)
    logits[0, [7, batch.drafts.token_ids[0]]] = 0  # p(x) = 1/2 of a one-hot draft
    at, below = np.float32([[0.5]]), np.float32([[0.5 - 2.0**-24]])
    for accept, tokens in ((at, [7, -1]), (below, [batch.drafts.token_ids[0], 131])):
        noise = dataclasses.replace(batch.noise, accept=accept)
        got = answer(batch.replace(target_logits=logits, noise=noise))
        assert got.token_ids[0].tolist() == tokens


@both
def test_an_empty_residual_is_the_target_where_vllm_emits_0(answer):
    case = load("v1_synth_random_0")
    batch, _ = golden_batch("v1_synth_random_0")
    certain = np.full_like(case["target_probs"], -np.inf)
    certain[:, 5] = 0  # p = q: all mass on id 5
    noise = dataclasses.replace(batch.noise, accept=np.full_like(batch.noise.accept, ALMOST_ONE))
    drafts = dataclasses.replace(
        batch.drafts, distribution=sd.DraftProbs(np.exp(certain).astype(np.float32))
    )
    got = answer(
        batch.replace(target_logits=certain.astype(np.float32), drafts=drafts, noise=noise)
    )
    drafting = case["num_draft_tokens"] > 0
    assert got.num_accepted.tolist() == [0] * 5
    assert got.token_ids[drafting, 0].tolist() == [5] * 4


@both
def test_id_minus_1_samples_from_the_target_unlike_vllm_v1(answer):
    case = load("v1_random_dp_0")
    batch, _ = golden_batch("v1_random_dp_0")
    firsts = {0: 0, 2: 3, 3: 5}  # request: its first draft
    token_ids = case["draft_token_ids"].copy()
    token_ids[list(firsts.values())] = -1
    got = answer(batch.replace(drafts=dataclasses.replace(batch.drafts, token_ids=token_ids)))
    differ = 0
    for b, first in firsts.items():
        ours = race(case["target_probs"][first], case["q"][b])
        assert got.token_ids[b].tolist() == [ours, -1, -1, -1]
        differ += ours != case["recovered_token_ids"][first]
    assert differ > 0
