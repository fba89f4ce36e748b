"""Rows a few at a time, as TPUs take them: to gather rows of a matrix they read all of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 8
"""Requests, or rows, that a TPU takes at once. More no longer fit in its vector memory and take
longer to gather from; fewer take more trips."""


def starts(size: int) -> jax.Array:
    """``[n]`` int32, where blocks begin; the last one earlier if they do not divide `size`."""
    return jnp.minimum(jnp.arange(0, size, BLOCK, dtype=jnp.int32), size - BLOCK)


def copies(array: jax.Array, first: jax.Array, length: int = 1) -> tuple[jax.Array, jax.Array]:
    """Copies of some rows, by slices.

    Args:
      array: ``[R, ...]``.
      first: ``[n]`` int32, which row each slice begins with.
      length: rows of each slice, at most R.

    Returns:
      ``[n * length, ...]``, and where the first rows are in it, ``[n]`` int32; of a first row
      outside of the array, anywhere.
    """
    start = jnp.clip(first, 0, array.shape[0] - length)
    slices = [lax.dynamic_slice_in_dim(array, s, length) for s in start]
    index = jnp.arange(len(slices), dtype=jnp.int32) * length
    return jnp.concatenate(slices), index + jnp.clip(first - start, 0, length - 1)
