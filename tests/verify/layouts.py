"""Layouts of batches: few, because each compiles; many seeds of each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lower_floor import BLOCK as BLOCK_OF_ROWS

from .batch import FILTERS, HALF, Layout, stored

RATES = (0.9, 0.75, 0.3, 0.1)
BIG = dict(num_speculative_tokens=4, num_requests=8, num_drafts=34)
LONG = dict(num_speculative_tokens=30, num_requests=3, num_drafts=90)

F16 = dict(dtype="float16", draft_dtype="float16")
MASKED: Any = dict(has_filters=True, has_bitmask=True)
CUT = dict(vocab_size=4500, has_active=True)
NARROW = dict(draft_vocab=4097, has_bonus=True)

GRID = [
    # Every kind of draft distribution with every dtype, full and narrower, in place and permuted.
    Layout(vocab=97, **BIG),
    Layout(vocab=2049, **BIG, dtype="bfloat16", has_active=True),
    Layout(vocab=97, **LONG, **stored(100), kind="probs", draft_vocab=60),
    Layout(vocab=2048, **BIG, kind="probs", dtype="float16", has_bonus=True, has_active=True),
    Layout(vocab=97, **BIG, kind="logits", draft_dtype="bfloat16"),
    Layout(vocab=10243, **BIG, **HALF, **stored(64), kind="logits"),
    Layout(vocab=5000, **BIG, **NARROW, kind="logits", vocab_size=4500),
    Layout(vocab=2048, **BIG, **F16, **stored(40), kind="normalized"),
    Layout(vocab=8195, **BIG, **CUT, dtype="bfloat16", kind="relative", draft_vocab=6500),
    # Small numbers of everything.
    Layout(vocab=1, kind="logits", store_rows=12, has_valid=True, has_active=True),
    Layout(vocab=2, num_speculative_tokens=1, num_requests=8, num_drafts=8, kind="probs"),
    Layout(vocab=97, num_speculative_tokens=4, num_requests=1, num_drafts=4, kind="logits"),
    Layout(vocab=97, num_drafts=0),
    Layout(vocab=97, num_drafts=0, kind="probs", store_rows=5, has_bonus=True),
    # Synthetic.
    Layout(vocab=97, **BIG, rates=RATES, dtype="float16", has_active=True),
    Layout(vocab=97, **BIG, **stored(50), rates=RATES, kind="probs"),
    Layout(vocab=2049, **BIG, rates=RATES, kind="logits", dtype="bfloat16"),
    Layout(vocab=5000, **BIG, **NARROW, rates=RATES, kind="normalized", vocab_size=4999),
]
BLOCK = [
    Layout(vocab=97, **BIG, block=True, has_bonus=True, has_active=True),
    Layout(vocab=5000, **BIG, **HALF, **NARROW, block=True, kind="logits", vocab_size=4500),
    Layout(vocab=2049, **BIG, **stored(50), block=True, kind="probs", draft_vocab=60),
    Layout(
        vocab=10243,
        **BIG,
        **stored(64),
        block=True,
        kind="normalized",
        dtype="bfloat16",
        has_active=True,
    ),
    Layout(vocab=37, **LONG, block=True, kind="probs"),
]
AGREEMENT = Layout(
    vocab=5000,
    **BIG,
    **FILTERS,
    **CUT,
    agreement=True,
    kind="relative",
    dtype="bfloat16",
    draft_vocab=4097,
)
RACE = Layout(
    vocab=2049, **BIG, **stored(50), race=True, kind="logits", vocab_size=2040, has_bonus=True
)
PROCESSED = [
    Layout(vocab=2049, **BIG, **HALF, **FILTERS, kind="logits"),
    Layout(
        vocab=5000,
        **BIG,
        **stored(64),
        has_filters=True,
        has_threshold=True,
        kind="normalized",
        dtype="float16",
        draft_vocab=4097,
        vocab_size=4500,
    ),
    Layout(vocab=97, **BIG, **FILTERS, block=True, kind="relative"),
    Layout(vocab=97, **BIG, **MASKED, rates=RATES, vocab_size=90, has_bonus=True),
]

# Over several devices: parts smaller and larger than a tile, tiles that parts cut; vocabularies
# that are padded to divide; every kind of draft distribution, split and whole.
CUT_IN_PARTS = Layout(vocab=4104, vocab_size=4099, **BIG, kind="probs", has_bonus=True)
FILTERED_PARTS = Layout(
    vocab=2600, vocab_size=2500, **BIG, **FILTERS, **HALF, kind="relative", draft_vocab=2049
)
WHOLE_DRAFTS = Layout(vocab=5128, vocab_size=4741, **BIG, kind="normalized", draft_vocab=4741)

# Rows by slices, in blocks, as TPUs read them.
MANY: Any = dict(num_speculative_tokens=3, num_requests=2 * BLOCK_OF_ROWS + 3, num_drafts=50)
IN_BLOCKS = [
    Layout(
        vocab=97,
        **MANY,
        store_rows=64,
        has_valid=True,
        has_active=True,
        kind="normalized",
        has_filters=True,
        has_bitmask=True,
    ),
    Layout(vocab=2049, **MANY, kind="probs", block=True, has_bonus=True),
    Layout(vocab=2049, **MANY, **MASKED, agreement=True),
]

# At very low temperatures.
PAIRS: Any = dict(num_requests=16, num_drafts=32, num_speculative_tokens=2, kind="relative")
COLD = [Layout(vocab=256, **PAIRS), Layout(vocab=4224, **PAIRS, **HALF, block=True)]

# Of the interpreted kernel.
FEW: Any = dict(num_speculative_tokens=4, num_requests=4, num_drafts=14)
KERNEL = [
    Layout(vocab=2176, **FEW, has_active=True),
    Layout(vocab=256, **FEW, kind="probs", draft_vocab=128, dtype="float16"),
    Layout(
        vocab=4224,
        **FEW,
        kind="logits",
        dtype="bfloat16",
        draft_vocab=2176,
        vocab_size=4100,
        has_bonus=True,
    ),
    Layout(vocab=4224, **FEW, **HALF, **stored(30), kind="relative"),
    Layout(vocab=2176, **FEW, kind="normalized", dtype="bfloat16", rates=RATES),
]
KERNEL_BLOCK = [
    Layout(vocab=4224, **FEW, block=True, kind="logits", dtype="bfloat16", draft_vocab=2176),
    Layout(vocab=4224, **FEW, **HALF, block=True, kind="normalized", has_active=True),
]
KERNEL_FILTERED = [
    Layout(vocab=4224, **FEW, **FILTERS, kind="logits", dtype="bfloat16", block=True),
    Layout(vocab=4224, **FEW, **FILTERS, **HALF, kind="relative"),
]
GIVEN_BONUS, SYNTHETIC = KERNEL[2], KERNEL[4]
TILES = dataclasses.replace(KERNEL[3], vocab=12416)  # six whole tiles and 128 ids of another

few = functools.partial(dataclasses.replace, num_requests=2, num_drafts=7)
