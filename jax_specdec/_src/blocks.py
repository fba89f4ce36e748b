"""Rows of a matrix by index, where a device does not read them in place.

A GPU does. A CPU and a TPU write to memory what they gather, and to gather rows a TPU reads the
whole matrix. So they read slices: a CPU one row after another, which stays in its cache, a TPU a
few at a time, which fit in its vector memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 8
"""Rows that a TPU takes at once. More take longer to copy; fewer take more trips."""


def gathering(function: Callable[..., Any], rows: jax.Array, *arrays: Any) -> Any:
    """``function(rows, *arrays)``, which reads rows ``[n]`` of matrices and gives arrays ``[n]``.

    Arrays are ``[n, ...]``. Where the row is -1 nothing need be read: what comes then is anything.
    """
    one = functools.partial(by_blocks, function, 1)
    some = functools.partial(by_blocks, function, BLOCK)
    return lax.platform_dependent(rows, *arrays, cpu=one, tpu=some, default=function)


def by_blocks(function: Callable[..., Any], length: int, rows: jax.Array, *arrays: Any) -> Any:
    """`gathering` of so many rows at a time."""
    size = rows.shape[0]
    length = min(length, size)
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[:length], (rows, *arrays)))

    def unread(size: int) -> Any:
        return jax.tree.map(lambda x: lax.full_like(x, 0, shape=(size, *x.shape[1:])), shapes)

    def step(i: jax.Array, found: Any) -> Any:
        start = i * length  # clamped: the last block overlaps the one before it
        block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, length), (rows, *arrays))
        read = lax.cond(jnp.any(block[0] >= 0), function, lambda *_: unread(length), *block)
        return jax.tree.map(
            lambda all, x: lax.dynamic_update_slice_in_dim(all, x, start, 0), found, read
        )

    return lax.fori_loop(0, -(-size // length), step, unread(size))


def take(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """``matrix[rows]``, rows ``[n]`` in range; few of them by slices, but where read in place."""

    def gather(matrix: jax.Array, rows: jax.Array) -> jax.Array:
        return matrix[rows]

    def slices(matrix: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.concatenate([lax.dynamic_slice_in_dim(matrix, row, 1) for row in rows])

    if rows.shape[0] > BLOCK:
        return gather(matrix, rows)
    return lax.platform_dependent(matrix, rows, cpu=slices, tpu=slices, default=gather)


def entry_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[b, index[b]]`` of ``x [B, P, ...]``, few P: a choice among P, as no gather fuses."""
    return entries_of(x, index[:, None])[:, 0]


def entries_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[b, index[b, i]]`` of ``x [B, P, ...]``, and ``index [B, n]`` in range; see `entry_of`."""
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    found = jnp.broadcast_to(x[:, :1], (*index.shape[:2], *x.shape[2:]))
    for p in range(1, x.shape[1]):
        found = jnp.where(index == p, x[:, p : p + 1], found)
    return found
