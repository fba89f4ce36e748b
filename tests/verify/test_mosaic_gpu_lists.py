"""The Mosaic GPU kernel and draft distributions on a list of ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special

from jax_specdec.testing import KernelConfig

from .backends import alone, interpreted, on_gpu
from .batch import HALF, Layout, Request, agree, check, pack, verify
from .cases import random_batch
from .layouts import FEW, KERNEL_BLOCK, KERNEL_FILTERED, RATES, SYNTHETIC, TILES, few
from .lists import with_ids
from .test_listed import KERNEL as SMALL
from .test_mosaic_gpu import lowered, refusal

pytestmark = [pytest.mark.newest, pytest.mark.long]
STORED: Any = dict(dtype="bfloat16", store_rows=50, has_valid=True)
PROBS = few(Layout(vocab=4224, **FEW, **STORED, kind="probs"))
UNALIGNED = few(Layout(vocab=4203, **FEW, kind="logits", vocab_size=4100, has_bonus=True))
BLOCK_LOGITS = few(dataclasses.replace(KERNEL_BLOCK[0], draft_vocab=None))


def agrees(
    ids: str,
    length: int,
    layout: Layout,
    verifier: Any,
    seeds: Any = range(1, 6),  # 0 has no drafts
    scatters: bool = True,
) -> None:
    """The tokens of the oracle, and of the same rows over all ids, which compile a kernel more."""
    drawn = 0
    for seed in seeds:
        batch = random_batch(layout, seed, broken=0.2)
        listed, scattered = with_ids(batch, ids, length, seed)
        output = verify(listed, verifier)
        if check(listed, output) == 0 and scatters:
            dense = verify(scattered, verifier)
            np.testing.assert_array_equal(output.token_ids, dense.token_ids)
            np.testing.assert_array_equal(output.status, dense.status)
        counts = np.diff(batch.drafts.cu_num_draft_tokens)
        rejected = (output.num_emitted > 0) & (output.num_accepted < counts)
        drawn += (rejected & (batch.temperature > 0)).sum()
    assert drawn > 1


MANY = Layout(vocab=2176, num_requests=2, num_drafts=24, num_speculative_tokens=12, kind="logits")
CASES: list[tuple[str, int, Layout]] = [
    ("candidates", 24, BLOCK_LOGITS),
    ("candidates", 40, few(KERNEL_FILTERED[1])),
    ("map", 1001, UNALIGNED),
    ("candidates", 70, MANY),
    ("candidates", 128, TILES),
    ("candidates", 33, UNALIGNED),
    ("candidates", 3, PROBS),
    ("candidates", 24, SYNTHETIC),
    ("candidates", 100, dataclasses.replace(PROBS, block=True)),
    ("candidates", 24, KERNEL_FILTERED[0]),
    ("map", 9000, TILES),
    ("map", 3000, few(KERNEL_FILTERED[0])),
    ("map", 3000, PROBS),
    ("map", 3000, BLOCK_LOGITS),
    ("map", 1500, dataclasses.replace(PROBS, rates=RATES)),
]


def test_gives_the_tokens_of_the_oracle():
    agrees(*CASES[1], alone, scatters=False)


@pytest.mark.slow
def test_what_is_left_on_many_candidates_of_a_tile_is_drawn_from():
    rng, found = np.random.default_rng(5), []
    for seed in range(10):
        requests = []
        for _ in range(3):
            listed = rng.permutation(SMALL.vocab)[:70]
            target, q = rng.normal(size=(2, SMALL.vocab)), np.zeros((1, SMALL.vocab))
            target[0, listed] += 5
            q[0, listed] = scipy.special.softmax(2 * rng.normal(size=70))
            x = int(q[0].argmax())
            requests.append(Request(target, [x], q, accept=[0.999], recover=rng.random(2)))
        batch, _ = with_ids(pack(requests, SMALL, seed), "candidates", 70, seed)
        (output,) = agree([batch], alone)
        found += output.token_ids[output.num_accepted == 0, 0].tolist()
    assert len(set(found)) > 20


@pytest.mark.slow
def test_no_thread_reads_an_entry_that_another_hides():
    """While the row is summed without its candidates."""
    layout = dataclasses.replace(SMALL, num_requests=2, num_drafts=8, block=True)
    verifier = interpreted(KernelConfig(max_cluster=1), detect_races=True)  # a race is an error
    batch, _ = with_ids(random_batch(layout, seed=3), "candidates", 40)
    agree([batch], verifier)


@pytest.mark.slow
def test_lowers_for_cuda_in_64_bit_mode():
    listed, _ = with_ids(random_batch(UNALIGNED, 0, broken=0), "map", 3000)
    with jax.enable_x64(True):
        assert lowered(UNALIGNED, batch=listed).count("@mosaic_gpu") == 1


def test_lists_that_are_too_long_are_refused_in_a_sentence():
    layout = dataclasses.replace(SMALL, vocab=70_000)
    batch = random_batch(layout, 0, broken=0)
    listed, _ = with_ids(batch, "candidates", 129)
    assert "1 to 128 candidates a row, but there are 129" in refusal(layout, batch=listed)
    listed, _ = with_ids(batch, "map", 65_536)
    assert "1 to 65535 ids in a map, but there are 65536" in refusal(layout, batch=listed)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("ids", "length", "layout"), CASES, ids=str)
def test_gives_the_tokens_of_scattered_rows_on_a_gpu(ids, length, layout):
    agrees(ids, length, layout, on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("ids", "length"), [("map", 32000), ("candidates", 32)])
@pytest.mark.parametrize("block", [False, True])
def test_gives_the_tokens_of_a_large_vocabulary_on_a_gpu(ids, length, block):
    layout = Layout(vocab=128256, **FEW, **HALF, kind="normalized", block=block)
    agrees(ids, length, layout, on_gpu, range(3))
