"""What `bench_verify_gpu.py` measures: cases, variants, and the bytes that a call must read."""

from __future__ import annotations

from typing import Any, NamedTuple

import inputs
import jax.numpy as jnp

import jax_specdec as sd

K = inputs.K
V = 128256


class Variant(NamedTuple):
    """One way to run a case.

    Attributes:
      implementation: "mosaic_gpu", "xla", or "plain" for the plain formulation.
      noise_given: noise is an argument, not drawn from keys.
      cold: the cache is swept between trips over the inputs, for inputs that fit into it.
    """

    implementation: str
    noise_given: bool = False
    cold: bool = False

    @property
    def label(self) -> str:
        marks = ("noise given", self.noise_given), ("cold", self.cold)
        return ", ".join([self.implementation, *(mark for mark, is_set in marks if is_set)])


MOSAIC, XLA, PLAIN = Variant("mosaic_gpu"), Variant("xla"), Variant("plain")
NOISE_GIVEN = Variant("mosaic_gpu", noise_given=True)
COLD = Variant("mosaic_gpu", cold=True)


class Case(NamedTuple):
    """One call. `noise`: how far the drafter's logits are from the target's; `goal`: in us.

    `ids`: "map" or "candidates" where drafts are drawn from `LISTED` ids; `scattered`: whether they
    are passed as rows over all ids nevertheless.
    """

    name: str
    batch: int
    k: int = K
    vocabulary: int = V
    temperature: float = 0.8
    distribution: str = "normalized"
    noise: float = 0.6
    dtype: str = "bfloat16"
    rates: tuple[float, ...] | None = None
    method: str = "standard"
    ids: str | None = None
    scattered: bool = False
    goal: float | None = None
    variants: tuple[Variant, ...] = (MOSAIC, XLA, PLAIN)

    @property
    def label(self) -> str:
        return f"{self.name}, B={self.batch}"

    @property
    def config(self) -> sd.SpecDecodeConfig:
        if self.rates is None:
            return sd.SpecDecodeConfig(
                num_speculative_tokens=self.k,
                rejection_sample_method=self.method,
            )
        return sd.SpecDecodeConfig(
            num_speculative_tokens=self.k,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=self.rates,
        )


STANDARD, EARLY = "standard, 2.9 emitted", "standard, 1.0 emitted"
FLOAT32 = "float32, 2.9 emitted"
GREEDY: dict[str, Any] = {"temperature": 0, "distribution": "none", "noise": 0.5}
WITHOUT_PLAIN = (MOSAIC, XLA)
"""Rules that the plain formulation does not have."""

LISTED = inputs.LISTED
LISTS = tuple(
    Case(
        name + ", scattered" * scattered,
        batch,
        ids=ids,
        scattered=scattered,
        variants=WITHOUT_PLAIN,
    )
    for ids, name in (("map", "a map of 32000 ids"), ("candidates", "32 candidates"))
    for batch in (64, 256)
    for scattered in (False, True)
)
"""Drafts from a list of ids, and the same drafts with rows over all ids."""

SAME_BYTES = (32000, 1024), (50257, 652), (131071, 250), (151936, 216), (262144, 125)
"""Vocabularies, and how many requests have as many bytes as 256 of 128256 ids."""

CASES = (
    Case(STANDARD, 1, goal=8, variants=(MOSAIC, COLD, NOISE_GIVEN, XLA, PLAIN)),
    *(
        Case(STANDARD, batch, goal=goal, variants=(MOSAIC, NOISE_GIVEN, XLA, PLAIN))
        for batch, goal in ((8, 10), (64, 28), (256, 80))
    ),
    Case(EARLY, 256, noise=3.0, goal=45),
    Case("greedy", 1, **GREEDY, goal=6, variants=(MOSAIC, COLD, XLA, PLAIN)),
    Case("greedy", 8, **GREEDY),
    Case("greedy", 64, **GREEDY),
    Case("greedy", 256, **GREEDY, goal=60),
    Case("synthetic", 256, rates=(0.8, 0.6, 0.4, 0.2), goal=45, variants=WITHOUT_PLAIN),
    *(
        Case("block", batch, method="block", goal=goal, variants=WITHOUT_PLAIN)
        for batch, goal in ((64, None), (256, 250))
    ),
    *(Case("agreement", batch, method="agreement", variants=(XLA,)) for batch in (8, 64, 256)),
    Case(FLOAT32, 1, dtype="float32", goal=9, variants=(MOSAIC, COLD, XLA, PLAIN)),
    Case(FLOAT32, 64, dtype="float32", goal=45),
    Case(FLOAT32, 256, dtype="float32", goal=150),
    *(Case(f"V = {v}", 64, vocabulary=v) for v in (32000, 50257, 131071, 151936, 256000, 262144)),
    *(Case(f"V = {v}", batch, vocabulary=v) for v, batch in SAME_BYTES),
    Case("one-hot drafts", 64, distribution="none"),
    Case("draft probabilities", 64, distribution="probs"),
    Case("draft logits, no normalizer", 64, distribution="logits"),
    Case("K = 8", 64, k=8),
    *LISTS,
)

SWEPT = (
    Case(STANDARD, 64),
    Case("one-hot drafts", 64, distribution="none"),
    Case("draft probabilities", 64, distribution="probs"),
    Case("draft logits, no normalizer", 64, distribution="logits"),
    Case("greedy", 64, **GREEDY),
    Case("synthetic", 64, rates=(0.8, 0.6, 0.4, 0.2)),
    Case("block", 64, method="block"),
    Case("V = 131071", 64, vocabulary=131071),
    *(case for case in LISTS if case.batch == 64 and not case.scattered),
)

TINY = (
    Case(STANDARD, 2, vocabulary=300, goal=8, variants=(XLA, Variant("xla", True), PLAIN)),
    Case("greedy", 2, vocabulary=300, **GREEDY, variants=(XLA, Variant("xla", cold=True), PLAIN)),
)
"""Takes seconds anywhere: whether the harness works."""


def bytes_read(case: Case, calls: int, emitted: int, rejected: int) -> float:
    """Bytes that one call has to read, on average: each visited row once, and nothing else.

    Target rows: one per emitted token; the chosen one alone if acceptance is synthetic. Draft
    rows: the one of the rejected draft, for the residual; if its normalizer was not stored, that
    of each visited draft. The block rule reads the target and draft row of every draft, and the
    bonus row where all are accepted. A map of ids is not counted.

    Args:
      case: the call.
      calls: how many calls were made.
      emitted: tokens they emitted in all.
      rejected: requests whose drafts were not all accepted, in all.
    """
    size = jnp.dtype(case.dtype).itemsize
    row, width = size * case.vocabulary, case.vocabulary
    if case.ids is not None and not case.scattered:
        width = min(LISTED[case.ids], width)
    draft_row = (4 if case.distribution == "probs" else size) * width
    if case.ids == "candidates" and not case.scattered:
        draft_row += 4 * width  # its ids; a map is there once
    requests = calls * case.batch
    target_rows = emitted if case.rates is None else requests
    draft_rows = 0 if case.distribution == "none" or case.method == "agreement" else rejected
    if case.distribution == "logits" and case.rates is None:
        draft_rows = emitted - requests + rejected
    if case.method == "block":
        target_rows, draft_rows = case.k * requests + requests - rejected, case.k * requests
    return (target_rows * row + draft_rows * draft_row) / calls
