"""Reading some rows of a matrix, on devices that do not gather them in place.

A GPU does. A CPU and a TPU write gathered rows to memory, and a TPU reads the whole matrix to
gather them. Here both read slices instead: a CPU one row after another, which stays in its cache,
and a TPU a few rows at a time, which fit in its vector memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.platform import platform_dependent

BLOCK = 8
"""Rows that a TPU reads at once. More take longer to copy; fewer take more rounds."""


FEW = 32
"""Up to so many positions of a request, operations on each stand in the program one by one."""


def gathering(function: Callable[..., Any], rows: jax.Array, *arrays: Any) -> Any:
    """``function(rows, *arrays)``, in the blocks of rows that suit the platform.

    Args:
      function: reads rows of matrices, and returns arrays ``[n, ...]``.
      rows: ``[n]`` int32. For row -1 nothing need be read, and the result is undefined.
      *arrays: pytrees of arrays ``[n, ...]``.
    """
    one = functools.partial(by_blocks, function, 1)
    some = functools.partial(by_blocks, function, BLOCK)
    return platform_dependent(rows, *arrays, cpu=one, tpu=some, default=function)


def by_blocks(function: Callable[..., Any], length: int, rows: jax.Array, *arrays: Any) -> Any:
    """`gathering`, with `length` rows at a time."""
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
    """``matrix[rows]``, for rows ``[n]`` in range. A few rows are sliced, except on GPUs."""

    def gather(matrix: jax.Array, rows: jax.Array) -> jax.Array:
        return matrix[rows]

    def slices(matrix: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.concatenate([lax.dynamic_slice_in_dim(matrix, row, 1) for row in rows])

    if rows.shape[0] > BLOCK:
        return gather(matrix, rows)
    return platform_dependent(matrix, rows, cpu=slices, tpu=slices, default=gather)


def entry_of(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[b, index[b]]`` of ``x [B, P, ...]`` for ``index [B]`` in range.

    One of few is selected: XLA fuses that with its use, and no gather.
    """
    index = index.reshape(-1, *(1,) * (x.ndim - 2))
    if x.shape[1] > FEW:
        return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
    found = x[:, 0]
    for p in range(1, x.shape[1]):
        found = jnp.where(index == p, x[:, p], found)
    return found
