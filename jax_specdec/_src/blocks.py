"""Rows of a matrix by index, where a device does not read them in place.

A GPU does. A CPU and a TPU write to memory what they gather, and to gather rows a TPU reads the
whole matrix: it gets them by slices, a few at a time, which fit in its vector memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 8
"""Rows that are taken at once. More take longer to copy; fewer take more trips."""


def gathering(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` of arrays ``[n, ...]``; in blocks where it writes to memory what it gathers."""
    in_blocks = functools.partial(by_blocks, function)
    return lax.platform_dependent(*arrays, tpu=in_blocks, cpu=in_blocks, default=function)


def by_blocks(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` of arrays ``[n, ...]``, which gives arrays ``[n, ...]``, `BLOCK` at a time."""
    size = jax.tree.leaves(arrays)[0].shape[0]
    if size <= BLOCK:
        return function(*arrays)

    def step(i: jax.Array, found: Any) -> Any:
        start = i * BLOCK  # clamped: the last block overlaps the one before it
        block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, BLOCK), arrays)
        return jax.tree.map(
            lambda all, x: lax.dynamic_update_slice_in_dim(all, x, start, 0),
            found,
            function(*block),
        )

    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[:BLOCK], arrays))
    found = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), shapes)
    return lax.fori_loop(0, -(-size // BLOCK), step, found)


def take(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """``matrix[rows]``, of few rows ``[n]`` in range."""

    def by_slices(matrix: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.concatenate([lax.dynamic_slice_in_dim(matrix, row, 1) for row in rows])

    return lax.platform_dependent(
        matrix, rows, tpu=by_slices, default=lambda matrix, rows: matrix[rows]
    )
