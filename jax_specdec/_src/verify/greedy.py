"""Greedy rule: a draft stays while it is the target's most likely token."""

from __future__ import annotations

import jax


def accepts(token_id: jax.Array, best_id: jax.Array) -> jax.Array:
    """Whether one greedy request keeps one draft.

    Args:
      token_id: ``[]`` int32, the proposed token.
      best_id: ``[]`` int32, the target's argmax at its position, ties to the lowest id.

    Returns:
      ``[]`` bool.
    """
    return token_id == best_id
