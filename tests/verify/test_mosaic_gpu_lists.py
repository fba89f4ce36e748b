"""The Mosaic GPU kernel and draft distributions on a list of ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special

import jax_specdec as sd
from jax_specdec.testing import KernelConfig

from .batch import HALF, Batch, Layout, Request, agree, check, pack, verify
from .cases import random_batch, random_request
from .lists import with_ids
from .suite import RATES
from .test_listed import GRID, agree_on
from .test_mosaic_gpu import (
    BIG,
    BLOCK,
    FILTERED,
    SYNTHETIC,
    TILES,
    alone,
    few,
    interpreted,
    lowered,
    on_gpu,
    refusal,
    row_by_row,
)

pytestmark = [pytest.mark.newest, pytest.mark.long]
STORED: Any = dict(dtype="bfloat16", store_rows=50, has_valid=True)
PROBS = few(Layout(vocab=4224, **BIG, **STORED, kind="probs"))
UNALIGNED = few(Layout(vocab=4203, **BIG, kind="logits", vocab_size=4100, has_bonus=True))
BLOCK_LOGITS = few(dataclasses.replace(BLOCK[0], draft_vocab=None))
SMALL = Layout(vocab=2176, num_requests=3, num_drafts=12, num_speculative_tokens=4, kind="probs")


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
    ("candidates", 40, few(FILTERED[1])),
    ("map", 1001, UNALIGNED),
    ("candidates", 70, MANY),
    ("candidates", 128, TILES),
    ("candidates", 33, UNALIGNED),
    ("candidates", 3, PROBS),
    ("candidates", 24, SYNTHETIC),
    ("candidates", 100, dataclasses.replace(PROBS, block=True)),
    ("candidates", 24, FILTERED[0]),
    ("map", 9000, TILES),
    ("map", 3000, few(FILTERED[0])),
    ("map", 3000, PROBS),
    ("map", 3000, BLOCK_LOGITS),
    ("map", 1500, dataclasses.replace(PROBS, rates=RATES)),
]


def test_gives_the_tokens_of_the_oracle():
    agrees(*CASES[1], alone, scatters=False)


def spoilt(batch: Batch, seed: int) -> Batch:
    """A batch of whose rows with candidates some list an id twice, or none of the vocabulary."""
    rng, given = np.random.default_rng(seed), batch.drafts.distribution
    ids = np.array(given.ids)
    for n, row in enumerate(np.flatnonzero(rng.random(len(ids)) < 0.3), start=seed):
        here, there = rng.choice(ids.shape[1], 2, replace=False)
        ids[row, here] = (ids[row, there], -1, batch.layout.real_vocab)[n % 3]
    changed = dataclasses.replace(given, ids=ids)
    return batch.replace(drafts=dataclasses.replace(batch.drafts, distribution=changed))


def ordinary(seed: int) -> Batch:
    """Sampled requests, all with drafts."""
    rng = np.random.default_rng(seed)
    return pack([random_request(SMALL, rng, 4, 0.8) for _ in range(3)], SMALL, seed)


def bad_lists(verifier: Any) -> None:
    found = 0
    for seed in range(6):
        batch, _ = with_ids(ordinary(seed), "candidates", 70, seed)
        (output,) = agree([spoilt(batch, seed)], verifier)
        found += (output.status == sd.Status.BAD_DRAFT_ROW).sum()
    assert found > 5


def bad_maps(verifier: Any) -> None:
    for seed, other in enumerate((None, 7, -1, SMALL.vocab, 2**31 - 1, -(2**31))):
        batch, _ = with_ids(ordinary(seed), "map", 900, seed)
        given: Any = batch.drafts.distribution
        ids = np.array(given.ids)
        if other is not None:
            ids[5] = ids[other] if other == 7 else other
        changed = dataclasses.replace(given, ids=ids)
        batch = batch.replace(drafts=dataclasses.replace(batch.drafts, distribution=changed))
        (output,) = agree([batch], verifier)
        status = sd.Status.OK if other is None else sd.Status.BAD_DRAFT_ROW
        assert (output.status == status).all()


@pytest.mark.slow
def test_a_row_that_lists_an_id_twice_or_one_that_is_none_is_bad():
    bad_lists(alone)


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
@pytest.mark.parametrize("verifier", [on_gpu, row_by_row], ids=["default", "row by row"])
@pytest.mark.parametrize(("ids", "layout"), GRID, ids=str)
def test_gives_the_tokens_of_the_oracle_on_a_gpu(ids, layout, verifier):
    agree_on(ids, layout, verifier, range(6))


@pytest.mark.gpu
@pytest.mark.parametrize(("ids", "length", "layout"), CASES, ids=str)
def test_gives_the_tokens_of_scattered_rows_on_a_gpu(ids, length, layout):
    agrees(ids, length, layout, on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize(("ids", "length"), [("map", 32000), ("candidates", 32)])
@pytest.mark.parametrize("block", [False, True])
def test_gives_the_tokens_of_a_large_vocabulary_on_a_gpu(ids, length, block):
    layout = Layout(vocab=128256, **BIG, **HALF, kind="normalized", block=block)
    agrees(ids, length, layout, on_gpu, range(3))


@pytest.mark.gpu
def test_bad_lists_are_bad_on_a_gpu():
    bad_lists(on_gpu)
    bad_maps(on_gpu)
