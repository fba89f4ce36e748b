"""The product of float rows with an int8 matrix that has a scale for each output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.platform import Platform, traced_for_platform

FEW_ROWS = 8
"""Fewer rows than these are filled up on a GPU: one row took XLA 111 us on an H100, and 8 rows 95,
for the matrices of one layer of an 8B model (as bfloat16: 158)."""


def int8_matmul(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``[M, out]`` of the dtype of x: scale[j] times the sum over i of x[m, i] v[j, i].

    Sums are float32, and are scaled before they are rounded.

    Args:
      x: ``[M, in]``, the rows.
      values: ``[out, in]``, integers in -127..127: int8, or the dtype of x, which CPUs take faster.
      scale: ``[out]`` float32.
    """
    return traced_for_platform(_product, (x, values, scale))


def _product(arrays: tuple[jax.Array, jax.Array, jax.Array], platform: Platform) -> jax.Array:
    """Returns the product in the form of a platform."""
    x, values, scale = arrays
    num_rows = x.shape[0]
    rows = x
    if platform == "cuda" and num_rows < FEW_ROWS:
        rows = jnp.pad(x, ((0, FEW_ROWS - num_rows), (0, 0)))
    # [M, in] [out, in]^T -> [M, out]. All integers are exact in the dtype of x.
    sums = lax.dot_general(
        rows,
        values.astype(x.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (sums[:num_rows] * scale[None, :]).astype(x.dtype)
