"""The product of rows with an int8 matrix that has a scale for each output.

What is fastest follows the number of rows. For the matrices of one layer of an 8B model on an H100,
in us (2026-11-27, JAX 0.11.2):

  rows                           8    40    72   160   288   512  2,048
  bfloat16                     158   171   189   192   242   335  1,220
  XLA, converts as it reads     98   131   179   339
  the kernel                   111   127   132   171   308   445  1,699
  XLA, converts a matrix first                   478   514   616  1,557
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.mosaic import gpus

FEW_ROWS = 8
"""Fewer rows are filled up on a GPU: one row took XLA 111 us, where 8 take it 95."""
KERNEL_ROWS = range(33, 1400)
"""Rows of which the kernel is the fastest form."""
MANY_ROWS = 96
"""From more rows on, where the kernel does not serve, a matrix is converted first."""


def int8_matmul(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``[M, out]`` of the dtype of x: scale[j] times the sum over i of x[m, i] v[j, i].

    Sums are float32 and scaled before they are rounded. Of many rows on a GPU, weights are rounded
    to the dtype of x instead, after they are scaled.

    Args:
      x: ``[M, in]``, the rows.
      values: ``[out, in]`` int8, in -127..127.
      scale: ``[out]`` float32.
    """
    return traced_for_platform(_product, (x, values, scale))


def _product(arrays: tuple[jax.Array, jax.Array, jax.Array], platform: Platform) -> jax.Array:
    """Returns the product in the fastest form, which is chosen in Python."""
    # The number of rows is a shape, so the choice is static, and a program has one of the forms.
    x, values, scale = arrays
    num_rows = x.shape[0]
    if platform == "cuda" and num_rows in KERNEL_ROWS and _is_served(x, values):
        from jax_specdec.lm.models import int8_kernel  # which imports Pallas

        return int8_kernel.product(x, values, scale)
    if platform == "cuda" and num_rows > MANY_ROWS:
        # Left to itself, XLA converts every tile as often as a block of rows reads it.
        weights = (values.astype(jnp.float32) * scale[:, None]).astype(x.dtype)
        return _dot(x, lax.optimization_barrier(weights), x.dtype)
    if platform == "cuda":
        x = jnp.pad(x, ((0, max(FEW_ROWS - num_rows, 0)), (0, 0)))
    # scale[j] sum x[m, i] v[j, i]: [M, in] x [out, in] -> [M, out]. All integers are exact in the
    # dtype of x, and XLA converts them as it reads them.
    sums = _dot(x, values.astype(x.dtype), jnp.dtype(jnp.float32))
    return (sums[:num_rows] * scale[None, :]).astype(x.dtype)


def _dot(x: jax.Array, weights: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the product ``[M, out]`` of ``[M, in]`` and ``[out, in]``."""
    # Contracts the last axis of both, so that neither is transposed.
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _is_served(x: jax.Array, values: jax.Array) -> bool:
    """Returns whether the kernel serves a product on the default device."""
    # Blocks of 128 outputs, two of which may share rows; tiles of up to 128 inputs. Inside a
    # `jax.shard_map` that checks how values vary, a kernel does not say how its own do.
    num_out, num_in = values.shape
    return (
        gpus.not_by_default() is None
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and num_out % 256 == 0
        and num_in % 128 == 0
        and not jax.typeof(x).manual_axis_type.varying
    )
