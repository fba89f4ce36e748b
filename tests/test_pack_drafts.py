"""`pack_drafts`: flat ids and the owners of rows, against loops in Python."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd

pytestmark = pytest.mark.newest

B, K, V = 4, 3, 16


def by_hand(ids: Any, counts: list[int], size: int) -> tuple[list[int], list[int], list[Any]]:
    """Flat ids, offsets, and (request, offset) of each row that is somebody's."""
    flat: list[int] = []
    cu, rows = [0], []
    for b, count in enumerate(counts):
        count = min(count, size - len(flat))  # later requests lose their drafts first
        flat += [int(x) for x in ids[b][:count]]
        cu.append(len(flat))
        rows += [(b, j) for j in range(count + 1)]
    return flat, cu, rows


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ([3, 0, 1, 2], 6),  # no room to spare
        ([3, 0, 1, 2], 9),  # padding
        ([3, 3, 3, 3], None),  # a full rectangle
        ([0, 0, 0, 0], 5),
        ([0, 0, 0, 0], 0),
        ([2, 3, 3, 1], 4),  # too many: the last ones find no room
        ([0, 3, 0, 0], 3),
    ],
    ids=str,
)
def test_ids_and_owners_are_those_of_a_loop(counts: list[int], size: int | None) -> None:
    ids = np.random.default_rng(0).integers(0, V, (B, K))
    packed = jax.jit(sd.pack_drafts, static_argnames="size")(
        np.int32(ids), np.int32(counts), size=size
    )
    n = B * K if size is None else size
    flat, cu, rows = by_hand(ids, counts, n)
    assert packed.drafts.token_ids.tolist() == flat + [-1] * (n - len(flat))
    assert packed.drafts.cu_num_draft_tokens.tolist() == cu
    padding = [(B, 0)] * (n + B - len(rows))
    found = zip(packed.requests.tolist(), packed.offsets.tolist(), strict=True)
    assert list(found) == rows + padding
    dtypes = {x.dtype.name for x in jax.tree.leaves(packed)}
    assert dtypes == {"int32"}


@pytest.mark.long
def test_packed_and_dense_drafts_give_each_request_the_same_tokens() -> None:
    """Of logits that depend on the request and the place in it alone."""
    rng = np.random.default_rng(1)
    ids, counts = np.int32(rng.integers(0, V, (B, K))), np.int32([2, 0, 3, 1])
    logits = np.float32(rng.normal(size=(B, K + 1, V)))
    logits[np.arange(B)[:, None], np.arange(K)[None, :], ids] += 3  # likely drafts
    stored = np.float32(rng.normal(size=(B, K, V)))
    shuffled = np.int32(rng.permutation(B * K))
    distribution = sd.DraftLogits(stored, rows=shuffled.reshape(B, K))

    def verify(rows: jax.Array, drafts: sd.Drafts) -> sd.RejectionSampleOutput:
        return sd.rejection_sample(
            rows,
            drafts,
            sampling=sd.SamplingParams(1.0),
            keys=jax.random.split(jax.random.key(5), B),
            positions=[9, 8, 7, 6],
            config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        )

    @jax.jit
    def both(logits: jax.Array) -> tuple[sd.RejectionSampleOutput, sd.RejectionSampleOutput]:
        packed = sd.pack_drafts(ids, counts, size=8, distribution=distribution)
        dense = sd.Drafts.from_dense(ids, counts, distribution)
        return (
            verify(logits.reshape(-1, V), dense),
            verify(logits[packed.requests, packed.offsets], packed.drafts),
        )

    dense, sparse = both(logits)
    assert sparse.token_ids.tolist() == dense.token_ids.tolist()
    assert sparse.num_accepted.tolist() == dense.num_accepted.tolist()
    assert int(sparse.num_accepted.sum()) > 0


def test_counts_that_cannot_be_seen_are_cut_to_fit() -> None:
    ids = jnp.arange(B * K, dtype=jnp.int32).reshape(B, K)
    packed = jax.jit(sd.pack_drafts)(ids, jnp.array([9, -4, 1, 0]))
    assert packed.drafts.cu_num_draft_tokens.tolist() == [0, 3, 3, 4, 4]
    assert packed.drafts.token_ids.tolist()[:4] == [0, 1, 2, 6]


def test_a_batch_of_nothing_has_no_rows() -> None:
    packed = sd.pack_drafts(jnp.zeros((0, K), jnp.int32), [])  # type: ignore[arg-type]
    assert packed.drafts.cu_num_draft_tokens.tolist() == [0]
    assert packed.requests.shape == (0,)
