"""`AttentionArrays`: the arrays of a call of `decode_attention`, as implementations take them."""

from __future__ import annotations

from typing import NamedTuple

import jax


class AttentionArrays(NamedTuple):
    """The arrays of a call.

    Attributes:
      query: ``[B, S, N, D]``.
      keys: ``[B * Nkv, D, T]``.
      values: ``[B * Nkv, T, D]``.
      start: ``[B]`` int32.
      visible: ``[B, S, 2]`` uint32, or None for a chain.
    """

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    start: jax.Array
    visible: jax.Array | None = None
