"""Layouts that nobody thought of: what is static about a batch, drawn at random, on every form."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from .backends import BACKENDS, over
from .batch import Layout, agree
from .cases import Rng, random_batches
from .layouts import BIG, RATES

WHOLE = [BACKENDS[form] for form in ("in-order", "at-once", "tile-by-tile")]
RULES = [{}, {"block": True}, {"rates": RATES}, {"agreement": True}]
FLAGS = ["has_filters", "has_bitmask", "has_valid", "has_active", "has_bonus"]
WIDTHS = 1, 3, 12, 64, 257, 1024, 1281, 2047, 2048, 2049, 3000, 4099
"""Of a part: less than a tile of 2,048 ids, about one, and more."""


def random_layout(rng: Rng, parts: int) -> Layout:
    """A layout whose vocabulary divides into parts."""
    width = int(rng.choice([n for n in WIDTHS if n * parts > 8]))
    vocab = width * parts
    padding = int(rng.choice([0, 1, 5, width // 2, width + 3]))
    size = max(5, vocab - padding)
    widths = size, vocab, min(vocab, size + 1), size - 1, size // 2
    kind = str(rng.choice(["none", "probs", "logits", "normalized", "relative"]))
    has_logits = kind not in ("none", "probs")
    return Layout(
        vocab=vocab,
        **BIG,
        **RULES[rng.integers(len(RULES))],
        **{name: bool(rng.random() < 0.3) for name in FLAGS},
        vocab_size=size,
        kind=kind,
        draft_vocab=None if kind == "none" else int(rng.choice(widths)),
        store_rows=50 if rng.random() < 0.3 else None,
        has_threshold=has_logits and bool(rng.random() < 0.3),
        dtype=str(rng.choice(["float32", "bfloat16"])),
        draft_dtype=str(rng.choice(["float32", "bfloat16"])),
    )


def check_random_layout(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = int(rng.choice([1, 2, 4, 8]))
    layout = random_layout(rng, parts)
    print(f"seed {seed}: {parts} parts, {layout}")  # a failure shows the last one
    verifier = over(parts) if parts > 1 else WHOLE[rng.integers(len(WHOLE))]
    agree(random_batches(layout, range(4), broken=0.2), verifier)


@pytest.mark.long
def test_tokens_are_those_of_the_oracle_whatever_the_layout() -> None:
    check_random_layout(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 120))
def test_tokens_are_those_of_the_oracle_in_more_layouts(seed: int) -> None:
    check_random_layout(seed)


@pytest.mark.slow
def test_tokens_of_layouts_without_end() -> None:
    for seed in itertools.count(int(np.random.SeedSequence().generate_state(1)[0])):
        check_random_layout(seed)
        jax.clear_caches()  # or the programs would map more memory than a process may
