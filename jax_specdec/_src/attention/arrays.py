"""What implementations of `decode_attention` take: the arrays of a call, and what it settles."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

from jax_specdec._src.base.tree import TREE_MASK_BITS

AttentionImplementation = Literal["xla", "mosaic_gpu"]


class AttentionArrays(NamedTuple):
    """The arrays of a call.

    Attributes:
      query: ``[B, S, N, D]``.
      keys: of one of the three layouts of `cache`.
      values: of the same.
      start: ``[B]`` int32.
      tree_mask: ``[B, S, 2]`` uint32, or None for a chain.
      pages: ``[B, L]`` int32, or None where the layout is not that of pages.
      depth: ``[B, S]`` int32, positions beyond `start` from which windows count back; or None.
      slots: ``[B]`` int32, the requests of the cache that rows are of; None for all, in their
        order. Of a cache with heads first alone.
      max_seen: ``[]`` int32, positions that some row sees, of a cache with heads first. Those past
        them need not be read, and last bits of a row may depend on it; if it is None they do not.
    """

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    start: jax.Array
    tree_mask: jax.Array | None = None
    pages: jax.Array | None = None
    depth: jax.Array | None = None
    slots: jax.Array | None = None
    max_seen: jax.Array | None = None


class AttentionStatic(NamedTuple):
    """What a call settles before it is traced.

    Attributes:
      scale: multiplies the products of queries and keys.
      window: positions that a row of a chain sees, its own included; None for all.
      softcap: the bound of the scores, or None.
      finite_cache: whether no value of the cache is NaN or infinite.
      num_visible: positions from `start` on that some row may see by `tree_mask`.
      implementation: that was named.
      num_kv: heads of keys of a request; where there are slots, the shapes do not say it.
      room: positions that XLA reads, of a cache with heads first; None for all.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    finite_cache: bool = False
    num_visible: int = TREE_MASK_BITS
    implementation: AttentionImplementation | None = None
    num_kv: int | None = None
    room: int | None = None
