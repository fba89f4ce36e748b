"""Test batches: requests one by one, the packing of them, the oracle's answer and a backend's.

A test writes `Request`s, which say what one request owns, and `pack`s them by a `Layout`, which
holds everything static, so that many batches share one compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from lower_floor import assume

import jax_specdec as sd
from jax_specdec.testing import reference

MAX_MARGIN = 1e-5
"""A backend may differ from the oracle only in decisions closer than this."""

ALMOST_ONE = np.float32(1 - 2.0**-24)
"""The largest uniform."""


HALF: Any = dict(dtype="bfloat16", draft_dtype="bfloat16")
FILTERS: Any = dict(has_filters=True, has_bitmask=True, has_threshold=True)
"""Fields of layouts that stand together."""


def stored(rows: int) -> Any:
    """Fields of a layout whose rows are permuted in a store."""
    return dict(store_rows=rows, has_valid=True)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is static about a batch."""

    vocab: int = 8
    num_speculative_tokens: int = 3
    num_requests: int = 3
    num_drafts: int = 9  # N
    kind: str = "none"  # none, probs, logits, normalized (by one number), relative (and row_max)
    draft_vocab: int | None = None
    store_rows: int | None = None  # R; None: row n belongs to draft n
    has_valid: bool = False
    has_active: bool = False
    has_bonus: bool = False
    vocab_size: int | None = None
    rates: tuple[float, ...] | None = None  # unconditional; given: synthetic
    block: bool = False
    agreement: bool = False
    dtype: str = "float32"
    draft_dtype: str = "float32"
    race: bool = False
    has_filters: bool = False  # min_p, top_k and top_p
    has_bitmask: bool = False
    has_threshold: bool = False  # of draft logits

    @property
    def method(self) -> str:
        if self.rates is not None:
            return "synthetic"
        if self.agreement:
            return "agreement"
        return "block" if self.block else "standard"

    @property
    def real_vocab(self) -> int:
        return self.vocab if self.vocab_size is None else self.vocab_size

    @property
    def stored_vocab(self) -> int:
        return self.vocab if self.draft_vocab is None else self.draft_vocab

    @property
    def race_shape(self) -> tuple[int, ...]:
        """Of the exponential noise of a request."""
        if not self.agreement:
            return (self.vocab,)
        num_tiles = -(-self.vocab // reference.TILE)
        return self.num_speculative_tokens + 1, num_tiles + min(self.vocab, reference.TILE)

    @property
    def config(self) -> sd.SpecDecodeConfig:
        return sd.SpecDecodeConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            rejection_sample_method=self.method,
            synthetic_acceptance_rates=self.rates,
        )

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ",".join(changed) or "default"


@dataclasses.dataclass(frozen=True)
class Request:
    """What one request owns: rows for its drafts and its bonus, and its noise."""

    target: np.ndarray  # [count + 1, V] logits
    draft_ids: Sequence[int]
    draft: np.ndarray | None = None  # [count, Vd], as stored
    log_normalizer: np.ndarray | None = None  # [count]
    row_max: np.ndarray | None = None  # [count], what log_normalizer is relative to
    accept: Sequence[float] = ()  # [count]
    recover: Any = (0.5, 0.5)
    exponential: np.ndarray | None = None  # [V]; [count + 1, T + L] under the agreement rule
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    allowed: np.ndarray | None = None  # [count + 1, V] bool
    threshold: np.ndarray | None = None  # [count], of draft logits
    bonus: int = 0
    valid: bool = True
    active: bool = True
    bad_rows: frozenset[int] = frozenset()  # positions whose row index lies outside the store

    @property
    def count(self) -> int:
        return len(self.draft_ids)


EMPTY = Request(target=np.zeros((1, 1)), draft_ids=())
"""Fills a slot: no drafts."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The arguments of a verification."""

    layout: Layout
    target_logits: Any
    drafts: sd.Drafts
    noise: Any
    temperature: np.ndarray
    bonus_token_ids: np.ndarray | None = None
    active: np.ndarray | None = None
    filters: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    token_bitmask: np.ndarray | None = None

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `rejection_sample_with_noise` takes: device arrays, and static values."""
        positional = self.target_logits, self.drafts, self.noise
        named = dict(
            sampling=sd.SamplingParams(temperature=self.temperature, **self.filters),
            bonus_token_ids=self.bonus_token_ids,
            active=self.active,
        )
        if self.token_bitmask is not None:
            named["token_bitmask"] = self.token_bitmask
        positional, named = jax.device_put((positional, named))
        static = dict(config=self.layout.config, vocab_size=self.layout.vocab_size)
        return positional, named | static


def oracle(batch: Batch) -> reference.ReferenceOutput:
    rates = batch.layout.rates
    conditional = rates and [
        rate / before if before else 0.0 for before, rate in itertools.pairwise((1.0, *rates))
    ]
    return reference.rejection_sample(
        batch.target_logits,
        batch.drafts,
        batch.noise,
        temperature=batch.temperature,
        **batch.filters,
        method=batch.layout.method,
        num_speculative_tokens=batch.layout.num_speculative_tokens,
        conditional_rates=conditional,
        bonus_token_ids=batch.bonus_token_ids,
        active=batch.active,
        vocab_size=batch.layout.vocab_size,
        token_bitmask=batch.token_bitmask,
    )


Verifier = Callable[..., sd.RejectionSampleOutput]


def jitted(verifier: Verifier) -> Verifier:
    """A function like `rejection_sample_with_noise`, compiled once per layout."""
    static = ("config", "vocab_size")
    return jax.jit(verifier, static_argnames=static)


def on(platform: str, **options: Any) -> Verifier:
    """What XLA runs on a platform: on "cpu" in order, elsewhere all rows at once."""

    @jitted
    def verifier(*args: Any, **kwargs: Any) -> sd.RejectionSampleOutput:
        with assume(platform):
            return sd.testing.rejection_sample_with_noise(
                *args, implementation="xla", **options, **kwargs
            )

    return verifier


XLA = on("cpu")
OPTIMIZED = jitted(functools.partial(sd.testing.rejection_sample_with_noise, implementation="xla"))
"""For tests that use `optimized`: a function is compiled once, as its first test asks."""


def verify(batch: Batch, verifier: Verifier) -> sd.RejectionSampleOutput:
    """A backend's answer, as NumPy arrays."""
    args, kwargs = batch.arguments()
    return jax.device_get(verifier(*args, **kwargs))


def check(batch: Batch, got: sd.RejectionSampleOutput) -> int:
    """Asserts that a backend agrees with the oracle; returns how many close calls differ."""
    want = oracle(batch)
    assert got.token_ids.dtype == np.int32
    assert got.token_ids.shape == want.token_ids.shape
    close = 0
    for b in range(len(want.status)):
        same = all(
            np.array_equal(getattr(got, name)[b], getattr(want, name)[b])
            for name in ("token_ids", "num_accepted", "num_emitted", "status")
        )
        if same:
            continue
        report = (
            f"request {b} of {batch.layout}: got {got.token_ids[b]} status {got.status[b]},"
            f" the oracle {want.token_ids[b]} status {want.status[b]},"
            f" margin {want.margin[b]:.3g}, temperature {batch.temperature[b]}"
        )
        print(report)
        assert want.margin[b] <= MAX_MARGIN, report
        close += 1
    return close


def agree(batches: Iterable[Batch], verifier: Verifier) -> list[sd.RejectionSampleOutput]:
    """Asserts that a backend agrees with the oracle on each batch; returns what it gave."""
    outputs, close = [], 0
    for batch in batches:
        outputs.append(verify(batch, verifier))
        close += check(batch, outputs[-1])
    print(f"{close} close calls differ in {len(outputs)} batches")
    return outputs


def take(output: sd.RejectionSampleOutput, index) -> sd.RejectionSampleOutput:
    """The entries of some requests."""
    return sd.RejectionSampleOutput(
        output.token_ids[index],
        output.num_accepted[index],
        output.num_emitted[index],
        output.status[index],
    )


def pack(requests: Sequence[Request], layout: Layout, seed: int = 0) -> Batch:
    """One batch of the requests; all that belongs to none of them is filled with rubbish."""
    rng = np.random.default_rng(seed)
    requests = [*requests, *[EMPTY] * (layout.num_requests - len(requests))]
    b, k = layout.num_requests, layout.num_speculative_tokens
    n, v = layout.num_drafts, layout.vocab
    counts = np.array([r.count for r in requests])
    assert counts.sum() <= n
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    target = _rubbish(rng, (n if layout.has_bonus else n + b, v))
    token_ids = rng.integers(-5, v + 5, n).astype(np.int32)
    accept = rng.random((b, k))
    recover = rng.random((b, 2))
    exponential = rng.exponential(size=(b, *layout.race_shape))
    stored = n if layout.store_rows is None else layout.store_rows
    rows = rng.permutation(stored)[:n] if layout.store_rows else np.arange(n)
    store = _rubbish(rng, (stored, layout.stored_vocab))
    normalizer, row_max = _rubbish(rng, (stored,)), np.full(stored, np.nan)
    threshold = _rubbish(rng, (stored,)) if layout.has_threshold else np.zeros(stored)
    allowed = rng.random((len(target), -(-v // 32) * 32)) < 0.5 if layout.has_bitmask else None

    for i, r in enumerate(requests):
        start, end = offsets[i], offsets[i + 1]
        width = r.target.shape[1]
        first = start if layout.has_bonus else start + i
        own_rows = r.target[: r.count] if layout.has_bonus else r.target
        target[first : first + len(own_rows), :width] = own_rows
        token_ids[start:end] = r.draft_ids
        accept[i, : r.count] = r.accept if len(r.accept) else 0.5
        recover[i] = r.recover
        if r.exponential is not None:
            exponential[i, : len(r.exponential)] = r.exponential
        if r.draft is not None:
            store[rows[start:end], : r.draft.shape[1]] = r.draft
        if r.log_normalizer is not None:
            normalizer[rows[start:end]] = r.log_normalizer
            row_max[rows[start:end]] = 0.0 if r.row_max is None else r.row_max
        if layout.has_threshold:
            threshold[rows[start:end]] = -np.inf if r.threshold is None else r.threshold
        if allowed is not None:
            own = np.ones(own_rows.shape, bool) if r.allowed is None else r.allowed[: len(own_rows)]
            allowed[first : first + len(own), : own.shape[1]] = own
    if layout.vocab_size is not None:
        target[:, layout.vocab_size :] = _rubbish(rng, target[:, layout.vocab_size :].shape)

    indices = rows.astype(np.int32)
    for i, r in enumerate(requests):
        for j in r.bad_rows:
            indices[offsets[i] + j] = (-1, stored)[j % 2]
    shared = dict(
        rows=None if layout.store_rows is None else indices,
        valid=np.array([r.valid for r in requests]) if layout.has_valid else None,
    )
    distribution: Any = None
    if layout.kind == "probs":
        distribution = sd.DraftProbs(store.astype(np.float32), **shared)
    elif layout.kind in ("logits", "normalized", "relative"):
        numbers = dict(log_normalizer=normalizer, row_max=row_max, threshold=threshold)
        has = layout.kind != "logits", layout.kind == "relative", layout.has_threshold
        distribution = sd.DraftLogits(
            _cast(store, layout.draft_dtype),
            **{
                name: x.astype(np.float32)
                for (name, x), it_has in zip(numbers.items(), has, strict=True)
                if it_has
            },
            **shared,
        )
    uniforms = accept.astype(np.float32)
    return Batch(
        layout=layout,
        target_logits=_cast(target, layout.dtype),
        drafts=sd.Drafts(token_ids, offsets, distribution),
        noise=sd.testing.RaceNoise(uniforms, exponential.astype(np.float32))
        if layout.race or layout.agreement
        else sd.testing.Noise(uniforms, recover.astype(np.float32)),
        temperature=np.array([r.temperature for r in requests], np.float32),
        bonus_token_ids=np.array([r.bonus for r in requests], np.int32)
        if layout.has_bonus
        else None,
        active=np.array([r.active for r in requests]) if layout.has_active else None,
        filters=_filters(requests) if layout.has_filters else {},
        token_bitmask=None if allowed is None else packed(allowed),
    )


def packed(allowed: np.ndarray) -> np.ndarray:
    """A bitmask ``[..., ceil(V/32)]`` int32 of what is allowed ``[..., V]``."""
    padding = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    bits = np.packbits(np.pad(allowed, padding), axis=-1, bitorder="little")
    return bits.view("<i4").astype(np.int32)


def _filters(requests: Sequence[Request]) -> dict[str, np.ndarray]:
    dtypes = dict(min_p=np.float32, top_k=np.int32, top_p=np.float32)
    return {
        name: np.array([getattr(r, name) for r in requests], dtype)
        for name, dtype in dtypes.items()
    }


def _rubbish(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What memory may hold: numbers, and some NaN and infinities."""
    x = 10 * rng.standard_normal(shape)
    bad = rng.random(shape)
    x[bad < 0.05] = np.nan
    x[bad > 0.95] = np.inf
    return x


def _cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype))
