"""Growing trees of drafts: candidates level by level, and the best of them as nodes."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Candidates(NamedTuple):
    """Nodes that a tree may have, level by level: a parent comes before its children.

    Attributes:
      token_ids: ``[B, n]`` int32.
      parents: ``[B, n]`` int32, 0 for the sequence, i for candidate ``i - 1``.
      scores: ``[B, n]`` float32, the logarithm of the chance that the target takes the path to the
        candidate; at most that of its parent. -inf for none.
    """

    token_ids: jax.Array
    parents: jax.Array
    scores: jax.Array


def best_nodes(candidates: Candidates, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ids and parents ``[B, K]`` of the K = `num_nodes` best candidates, best first.

    Of equal scores the earlier candidate comes first, so a parent comes before its children. Id -1,
    with parent 0, where there are fewer candidates.
    """
    raise NotImplementedError
