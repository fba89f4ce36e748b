"""`AttentionArrays`: the arrays of a call of `decode_attention`, as implementations take them."""

from __future__ import annotations

from typing import NamedTuple

import jax


class AttentionArrays(NamedTuple):
    """The arrays of a call.

    Attributes:
      query: ``[B, S, N, D]``.
      keys: of one of the three layouts of `cache`.
      values: of the same.
      start: ``[B]`` int32.
      visible: ``[B, S, 2]`` uint32, or None for a chain.
      pages: ``[B, L]`` int32, or None where the layout is not that of pages.
    """

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    start: jax.Array
    visible: jax.Array | None = None
    pages: jax.Array | None = None
