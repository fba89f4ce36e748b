"""Random requests: ordinary ones, and a few that are broken in one way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.special

from .batch import ALMOST_ONE, Batch, Layout, Request, oracle, pack

Rng = np.random.Generator


def random_batch(layout: Layout, seed: int, *, broken: float = 0.08) -> Batch:
    """A batch with ragged counts; a share `broken` of its requests is spoilt in one way."""
    rng = np.random.default_rng(seed)
    k, left = layout.num_speculative_tokens, layout.num_drafts
    requests = []
    for _ in range(layout.num_requests):
        # Now and then nobody drafts, or everybody as much as there is room for.
        count = {0: 0, 1: k}.get(seed % 8, int(rng.integers(k + 1)))
        count = min(count, left)
        left -= count
        request = random_request(layout, rng, count)
        requests.append(spoil(request, layout, rng) if rng.random() < broken else request)
    return pack(requests, layout, seed)


def random_batches(layout: Layout, seeds: Iterable[int], **options: Any) -> list[Batch]:
    return [random_batch(layout, seed, **options) for seed in seeds]


def random_request(
    layout: Layout, rng: Rng, count: int, temperature: float | None = None
) -> Request:
    """An ordinary request whose drafts are kept more often than not."""
    v, real, stored = layout.vocab, layout.real_vocab, layout.stored_vocab
    shared = min(stored, real)
    if temperature is None:
        temperature = 0.0 if rng.random() < 0.35 else float(np.float32(rng.uniform(0.3, 1.5)))
    scale = temperature or 1.0

    target = rng.choice([0.5, 2.0]) * rng.standard_normal((count + 1, v))
    draft = target[:count, :stored] + 0.5 * rng.standard_normal((count, stored))
    if rng.random() < 0.3:  # a grammar's mask, which the drafter may not know
        target[rng.random(target.shape) < 0.3] = -np.inf
        target[:, rng.integers(real)] = 1.0
    processed: dict[str, Any] = {}
    if layout.has_filters:
        if rng.random() < 0.4:  # ties
            target = np.round(2 * target) / 2
        processed |= random_filters(rng, real)
    allowed = np.ones((count + 1, v), bool)
    if layout.has_bitmask and rng.random() < 0.6:
        allowed = rng.random((count + 1, v)) < rng.choice([0.1, 0.7])
        allowed[:, rng.integers(real)] = True
        processed["allowed"] = allowed
    target = target.astype(jnp.dtype(layout.dtype)).astype(np.float64)
    draft = draft.astype(jnp.dtype(layout.draft_dtype)).astype(np.float64)
    possible = np.where(allowed, target, -np.inf)[:, :real]
    possible = np.maximum(possible, -1e9)  # where two masks leave nothing, p is still something
    p = scipy.special.softmax(possible / scale, axis=1)
    if layout.has_bitmask:  # what a bit hides may hold anything
        hides = ~allowed & (rng.random(allowed.shape) < 0.05)
        target[hides] = rng.choice([np.nan, np.inf], hides.sum())
    kept = draft[:, :shared]
    if layout.has_threshold and rng.random() < 0.8:
        threshold = np.quantile(kept, rng.uniform(0, 0.95, count), axis=1).diagonal()
        processed["threshold"] = threshold.astype(np.float32)
        kept = np.where(kept >= processed["threshold"][:, None], kept, -np.inf)
    q = scipy.special.softmax(kept / scale, axis=1)

    draft_ids = []
    for i in range(count):
        # What proposes: the drafter, the target's argmax, chance, nobody.
        who = rng.choice(
            4, p=[0.2, 0.65, 0.1, 0.05] if temperature == 0 else [0.8, 0.1, 0.06, 0.04]
        )
        if who == 0:
            drawn = (
                rng.choice(shared, p=q[i]) if layout.kind != "none" else rng.choice(real, p=p[i])
            )
        elif who == 1:
            drawn = p[i].argmax()
        elif who == 2:
            drawn = rng.integers(real)
        else:
            drawn = rng.choice([-1, -7, real, v, v + 3, 2**31 - 1, -(2**31)])
        draft_ids.append(int(drawn))

    accept = uniforms(rng, count)
    accept[rng.random(count) < 0.05] = 0.0
    accept[rng.random(count) < 0.05] = ALMOST_ONE
    stored_rows: dict[str, Any] = {}
    if layout.kind == "probs":
        stored_rows["draft"] = np.pad(q, ((0, 0), (0, stored - shared))).astype(np.float32)
    elif layout.kind != "none":
        stored_rows["draft"] = draft
    if layout.kind in ("normalized", "relative"):
        row_max = kept.max(axis=1) if layout.kind == "relative" else np.zeros(count)
        normalizer = scipy.special.logsumexp((kept - row_max[:, None]) / scale, axis=1)
        stored_rows |= dict(log_normalizer=normalizer.astype(np.float32), row_max=row_max)
    request = Request(
        target=target,
        draft_ids=draft_ids,
        accept=accept,
        recover=uniforms(rng, 2),
        exponential=rng.exponential(size=layout.race_shape)[: count + 1]
        if layout.agreement
        else rng.exponential(size=v)
        if layout.race
        else None,
        temperature=temperature,
        bonus=int(rng.integers(v)),
        valid=bool(rng.random() < 0.75),
        active=bool(rng.random() < 0.8),
        **stored_rows,
        **processed,
    )
    return with_own_tokens(request, layout, rng) if layout.agreement else request


def with_own_tokens(request: Request, layout: Layout, rng: Rng) -> Request:
    """The request with most drafts those that the agreement rule keeps, by the oracle."""
    alone = dataclasses.replace(
        layout, num_requests=1, num_drafts=request.count, kind="none", has_active=False
    )
    for i in np.flatnonzero(rng.random(request.count) < 0.85):
        found = oracle(pack([request], alone))
        ids = list(request.draft_ids)
        if found.num_accepted[0] == i and found.num_emitted[0] > i:
            ids[i] = int(found.token_ids[0, i])
        request = dataclasses.replace(request, draft_ids=ids)
    return request


def cold_batch(layout: Layout, seed: int) -> Batch:
    """Sampled requests at very low temperatures, by logits far from 0 that are near each other."""
    rng, requests = np.random.default_rng(seed), []
    k, v = layout.num_speculative_tokens, layout.vocab
    for _ in range(min(layout.num_requests, layout.num_drafts // k)):
        temperature = float(np.float32(rng.choice([1e-3, 1e-4, 1e-5])))
        peak = rng.choice([30.0, 1000.0])
        x = peak + 1.5 * temperature * rng.standard_normal((2, k + 1, v))
        x = np.where(rng.random(x.shape) < 0.95, x - peak / 8, x)  # these weigh nothing
        target, draft = x.astype(jnp.dtype(layout.dtype)).astype(np.float64)
        draft = np.where(rng.random(x.shape[1:]) < 0.7, target, draft)[:k]
        row_max = draft.max(axis=1)
        scaled = (draft - row_max[:, None]) / temperature
        q = scipy.special.softmax(scaled, axis=1)
        request = Request(
            target,
            [int(rng.choice(v, p=of_row)) for of_row in q],
            draft,
            log_normalizer=scipy.special.logsumexp(scaled, axis=1),
            row_max=row_max,
            accept=uniforms(rng, k),
            recover=uniforms(rng, 2),
            temperature=temperature,
        )
        requests.append(request)
    return pack(requests, layout, seed)


def random_filters(rng: Rng, vocab_size: int) -> dict[str, Any]:
    """Each of the three used or not."""
    return dict(
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.3, 1.0, rng.random()])),
        top_k=int(rng.choice([0, 0, 1, 3, vocab_size // 2, vocab_size, 2**31 - 1])),
        top_p=float(rng.choice([1.0, 1.0, 1e-6, 0.5, 0.95, rng.uniform(0.01, 1.0)])),
    )


def uniforms(rng: Rng, count: int) -> np.ndarray:
    return (rng.integers(0, 2**24, count) * 2.0**-24).astype(np.float32)


def spoil(request: Request, layout: Layout, rng: Rng) -> Request:
    """The request with one thing broken, which it may or may not come across."""
    whats = ["target", "temperature", "row", "draft", "normalizer"]
    what = rng.choice([*whats, "filter", "threshold"] if layout.has_filters else whats)
    if what == "filter":
        bad = dict(min_p=[-0.1, 1.5, np.nan], top_k=[-2, -(2**31)], top_p=[0.0, -0.5, 1.5, np.nan])
        name = rng.choice(list(bad))
        return dataclasses.replace(request, **{name: rng.choice(bad[name])})
    if what == "threshold":
        return dataclasses.replace(request, threshold=np.full(request.count, np.nan))
    if what == "target":
        target = request.target.copy()
        row = rng.integers(len(target))
        id_ = rng.integers(layout.real_vocab)
        if rng.random() < 0.3:
            target[row] = -np.inf
        else:
            target[row, id_] = rng.choice([np.nan, np.inf])
        return dataclasses.replace(request, target=target)
    if what == "temperature":
        bad = float(rng.choice([-1.0, np.nan, np.inf, -np.inf]))
        return dataclasses.replace(request, temperature=bad)
    if not request.count or request.draft is None:
        return request
    i = rng.integers(request.count)
    if what == "row" and layout.store_rows is not None:
        return dataclasses.replace(request, bad_rows=frozenset([int(i)]))
    if what == "draft":
        draft = request.draft.copy()
        id_ = request.draft_ids[i] if rng.random() < 0.5 else rng.integers(draft.shape[1])
        id_ = min(max(id_, 0), draft.shape[1] - 1)
        draft[i, id_] = rng.choice([np.nan, np.inf, -0.25 if layout.kind == "probs" else -np.inf])
        if layout.kind == "logits" and rng.random() < 0.2:
            draft[i] = -np.inf
        return dataclasses.replace(request, draft=draft)
    if what == "normalizer" and request.log_normalizer is not None:
        name = "row_max" if layout.kind == "relative" and rng.random() < 0.3 else "log_normalizer"
        numbers = getattr(request, name).copy()
        bad, large = [np.nan, np.inf, -np.inf], [1024.0, -5000.0]
        numbers[i] = rng.choice(bad if name == "row_max" else bad + large)
        return dataclasses.replace(request, **{name: numbers})
    return request
