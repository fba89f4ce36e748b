"""Prompt lookup equals a search written in plain Python."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import tiny

from jax_specdec import lm

pytestmark = pytest.mark.newest

SIZE = 24  # of the buffers
K = 4


def oracle(tokens: Sequence[int], min_ngram: int, max_ngram: int, k: int) -> list[int]:
    """The longest n first, then the latest earlier occurrence of the last n tokens; one by one."""
    for n in range(max_ngram, min_ngram - 1, -1):
        if n > len(tokens):
            continue
        suffix = list(tokens[len(tokens) - n :])
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == suffix:
                copied = list(tokens)
                for source in range(start + n, start + n + k):
                    copied.append(copied[source])
                return copied[len(tokens) :]
    return [-1] * k


@functools.partial(jax.jit, static_argnames=("drafter", "k"))
def propose(drafter: lm.NGramDrafter, token_ids: jax.Array, lengths: jax.Array, k: int):
    context = tiny.context(token_ids, lengths, 0.0, k=k)
    proposal, cache = drafter.propose(None, context, drafter.init_cache(*token_ids.shape), None)
    assert proposal.store is None
    assert proposal.token_ids.dtype == jnp.int32
    return proposal.token_ids


def proposals(
    sequences: Sequence[Sequence[int]], min_ngram: int, max_ngram: int, *, seed: int = 0, k: int = K
) -> list[list[int]]:
    """The drafter's answer for sequences in buffers whose rest is rubbish."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 4, (len(sequences), SIZE))
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    lengths = jnp.asarray([len(s) for s in sequences], jnp.int32)
    drafter = lm.NGramDrafter(min_ngram, max_ngram)
    return propose(drafter, jnp.asarray(rows, jnp.int32), lengths, k).tolist()


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 3), (2, 4), (3, 30)])
@hypothesis.given(
    sequences=st.integers(1, 3).flatmap(
        lambda ids: st.lists(
            st.lists(st.integers(0, ids), min_size=1, max_size=SIZE), min_size=3, max_size=3
        )
    ),
    seed=st.integers(0, 99),
)
def test_proposals_are_those_of_the_search_in_python(min_ngram, max_ngram, sequences, seed):
    found = proposals(sequences, min_ngram, max_ngram, seed=seed)
    assert found == [oracle(sequence, min_ngram, max_ngram, K) for sequence in sequences]
