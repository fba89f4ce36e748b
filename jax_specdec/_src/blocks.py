"""Reading some rows of a matrix, on devices that do not gather them in place.

A GPU does. A CPU and a TPU write gathered rows to memory, and a TPU reads the whole matrix to
gather them. Here both read slices instead: a CPU one row after another, which stays in its cache,
and a TPU a few rows at a time, which fit in its vector memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.platform import Platform

BLOCK = 8
"""Rows that a TPU reads at once. More take longer to copy; fewer take more rounds."""


FEW = 32
"""Up to so many positions of a request, operations on each stand in the program one by one."""


def gathering(
    function: Callable[..., Any], platform: Platform, rows: jax.Array, *arrays: Any
) -> Any:
    """``function(rows, *arrays)``, in the blocks of rows that suit the platform.

    Args:
      function: reads rows of matrices, and returns arrays ``[n, ...]``.
      platform: that the program is for.
      rows: ``[n]`` int32. For row -1 nothing need be read, and the result is undefined.
      *arrays: pytrees of arrays ``[n, ...]``.
    """
    length = {"cpu": 1, "tpu": BLOCK}.get(platform)
    if length is None:
        return function(rows, *arrays)
    return by_blocks(function, length, rows, *arrays)


def by_blocks(function: Callable[..., Any], length: int, rows: jax.Array, *arrays: Any) -> Any:
    """`gathering`, with `length` rows at a time."""
    given, size = (rows, *arrays), rows.shape[0]
    length, function = min(length, size), jax.jit(function)  # which traces it once for both uses

    def block(i: Any) -> Any:  # the last block overlaps the one before it
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i, length), given)

    shapes = jax.eval_shape(lambda: function(*block(jnp.uint32(0))))

    def step(i: jax.Array, found: Any) -> Any:
        start = jnp.minimum(i.astype(jnp.uint32) * length, size - length)
        these = block(start)
        unread = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(shapes)]
        unread = jax.tree.unflatten(jax.tree.structure(shapes), unread)
        read = lax.cond(jnp.any(these[0] >= 0), function, lambda *_: unread, *these)
        return jax.tree.map(
            lambda all, x: lax.dynamic_update_slice_in_dim(all, x, start, 0), found, read
        )

    empty = jax.tree.map(lambda x: lax.full_like(x, 0, shape=(size, *x.shape[1:])), shapes)
    return lax.fori_loop(0, -(-size // length), step, empty)


def take(tree: Any, rows: jax.Array, platform: Platform) -> Any:
    """``x[rows]`` of matrices, for rows ``[n]`` in range. Few are sliced, except on GPUs."""
    if rows.shape[0] > BLOCK or platform not in ("cpu", "tpu"):
        return jax.tree.map(lambda x: x[rows], tree)
    starts = [*rows.astype(jnp.uint32)]

    def slices(x: jax.Array) -> jax.Array:
        found = [lax.dynamic_slice_in_dim(x, start, 1) for start in starts]
        return jnp.concatenate(found) if len(found) > 1 else found[0]

    return jax.tree.map(slices, tree)


def entry_of(tree: Any, index: jax.Array) -> Any:
    """``x[b, index[b]]`` of arrays ``x [B, P, ...]`` for ``index [B]`` in range.

    One of few is selected: XLA fuses that with its use, and no gather.
    """

    def select(x: jax.Array) -> jax.Array:
        which = lax.expand_dims(index, range(1, x.ndim - 1))
        if x.shape[1] > FEW:
            return jnp.take_along_axis(x, which[:, None], axis=1)[:, 0]
        entries = [lax.index_in_dim(x, p, 1, keepdims=False) for p in range(x.shape[1])]
        if len(entries) == 1:
            return entries[0]
        return lax.select_n(jnp.broadcast_to(which, entries[0].shape), *entries)

    return jax.tree.map(select, tree)
