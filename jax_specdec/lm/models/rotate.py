"""Heads of new rows, rotated and written into a cache: by one kernel where it serves, or by XLA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.attention.arrays import rows_of
from jax_specdec._src.attention.cache import LayerCache, write_rows
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.rows.blocks import explicit_mesh
from jax_specdec.lm.models.config import LayerSpec
from jax_specdec.lm.models.layers import NewHeads

BY_KERNEL = True
"""Whether the kernel is used where it serves; else XLA does it all."""
MOST_ROWS = 512
"""More rows than these are those of prompts, which need few launches for each."""


class RotateArrays(NamedTuple):
    """The arrays of a call."""

    product: jax.Array  # [G, S, (N + 2 Nkv) D], or [1, 2, ..] of a row that comes twice
    bias: jax.Array | None  # [(N + 2 Nkv) D]
    cos_sin: tuple[jax.Array, jax.Array]  # [G, S, 1, D/2] float32 each
    places: jax.Array  # [G, S] int32
    requests: jax.Array | None  # as for `rotate_and_write`
    cache: LayerCache  # keys [B * Nkv, D, T] and values [B * Nkv, T, D]

    @property
    def each(self) -> int:
        """Returns how many rows of a request attend together: S, or 1 of several groups."""
        is_mixed = self.requests is not None and self.requests.shape[1] > 1
        return 1 if is_mixed else self.places.shape[1]


class RotatedQuery(NamedTuple):
    """Rotated queries.

    Attributes:
      heads: ``[G, S, N, D]``.
      rows: `rows_of` them, if they are of one group and the kernel has made them; else None.
    """

    heads: jax.Array
    rows: jax.Array | None


def rotate_and_write(
    heads: NewHeads, cache: LayerCache, places: jax.Array, requests: jax.Array | None
) -> tuple[RotatedQuery, LayerCache]:
    """Returns rotated queries, and the layer's cache with keys and values written.

    Args:
      heads: of a layer with keys of its own; a row that comes twice is written once.
      cache: keys ``[B * N_kv, D, T]`` and values ``[B * N_kv, T, D]``, changed in place if it is
        donated.
      places: ``[G, S]`` int32, or ``[1, M]`` of several groups; see `write_rows`.
      requests: ``[G, 1]`` or ``[1, M]`` int32; None: row g is of request g.
    """
    arrays = RotateArrays(
        product=heads.product,
        bias=heads.layer["qkv_bias"] if heads.spec.qkv_bias else None,
        cos_sin=heads.cos_sin,
        places=places,
        requests=requests,
        cache=cache,
    )
    if not _is_served(heads.spec, arrays):
        query, cache = by_xla(heads, arrays)
        return RotatedQuery(query, None), cache
    rows, cache = traced_for_platform(_for_platform, arrays, heads.spec)
    # [R, D] -> [B, Nkv, S, group, D] -> [B, S, Nkv, group, D] -> [G, S, N, D]
    spec = heads.spec
    num_query = spec.num_attention_heads
    num_kv = spec.num_key_value_heads
    query = rows[: places.size * num_query]
    query = query.reshape(-1, num_kv, arrays.each, num_query // num_kv, spec.head_dim)
    query = query.swapaxes(1, 2).reshape(*places.shape, num_query, spec.head_dim)
    if heads.product.shape[1] > places.shape[1]:  # a row that comes twice
        query = jnp.broadcast_to(query, (*heads.product.shape[:2], *query.shape[2:]))
    return RotatedQuery(query, rows if arrays.each == places.shape[1] else None), cache


def _for_platform(
    arrays: RotateArrays, spec: LayerSpec, platform: Platform
) -> tuple[jax.Array, LayerCache]:
    """Returns `rows_of` the queries, and the cache; the form is chosen in Python."""
    if platform == "cuda":
        return by_kernel(arrays, spec)
    layer = {} if arrays.bias is None else {"qkv_bias": arrays.bias}
    query, cache = by_xla(NewHeads(spec, layer, arrays.product, arrays.cos_sin), arrays)
    query = query[:, : arrays.places.shape[1]].reshape(-1, arrays.each, *query.shape[2:])
    return rows_of(query, spec.num_key_value_heads), cache


def by_xla(heads: NewHeads, arrays: RotateArrays) -> tuple[jax.Array, LayerCache]:
    """Returns queries ``[G, S, N, D]`` and the cache: the definition of `rotate_and_write`."""
    query, key, value = heads.rotated()
    assert key is not None and value is not None
    # [1, 2, N_kv, D] -> [1, 1, N_kv, D] of a row that comes twice; others are as they were.
    num_rows = arrays.places.shape[1]
    key = key[:, :num_rows]
    value = value[:, :num_rows]
    return query, write_rows(arrays.cache, key, value, arrays.places, arrays.requests)


def by_kernel(
    arrays: RotateArrays, spec: LayerSpec, interpret: Any = False
) -> tuple[jax.Array, LayerCache]:
    """Returns `rows_of` the queries, and the cache, in one launch.

    Args:
      arrays: of the call.
      spec: of the layer.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.
    """
    from jax_specdec.lm.models import rotate_kernel  # which imports Pallas

    keys, values = arrays.cache
    num_kv = spec.num_key_value_heads
    shape = rotate_kernel.RotateShape(
        num_rows=arrays.places.size,
        each=arrays.each,
        num_query=spec.num_attention_heads,
        num_kv=num_kv,
        head_dim=spec.head_dim,
        num_requests=keys.shape[0] // num_kv,
        room=keys.shape[2],
        has_bias=spec.qkv_bias,
    )
    # [G, S] int32: the request of each row
    owners = arrays.requests
    if owners is None:
        owners = jnp.asarray(np.arange(arrays.places.shape[0], dtype=np.int32)[:, None])
    owners = jnp.broadcast_to(owners, arrays.places.shape)
    # [G, S, 1, D/2] -> [G S, D/2]
    angles = (*arrays.product.shape[:2], shape.half)
    cos, sin = (jnp.broadcast_to(x[:, :, 0], angles) for x in arrays.cos_sin)
    operands = rotate_kernel.RotateOperands(
        query=None,
        heads=arrays.product.reshape(-1, arrays.product.shape[2]),
        cos=cos.reshape(-1, shape.half),
        sin=sin.reshape(-1, shape.half),
        places=arrays.places.reshape(-1),
        owners=owners.reshape(-1),
        keys=keys.reshape(-1),
        values=values.reshape(-1),
        bias=arrays.bias,
    )
    query, new_keys, new_values = rotate_kernel.rotate_and_write(operands, shape, interpret)
    cache = new_keys.reshape(keys.shape), new_values.reshape(values.shape)
    return query.reshape(-1, spec.head_dim), cache


def _is_served(spec: LayerSpec, arrays: RotateArrays) -> bool:
    """Returns whether the kernel serves a call on the default device."""
    keys, _ = arrays.cache
    width = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    has_norms = spec.qk_norm or spec.v_norm
    return (
        BY_KERNEL
        and gpus.not_by_default() is None
        and not has_norms
        and arrays.product.shape[2] == width  # else keys are values, too
        and arrays.product.dtype in (jnp.bfloat16, jnp.float16)
        and keys.dtype == arrays.product.dtype
        and 0 < arrays.places.size <= MOST_ROWS
        and keys.size < 2**31  # places are int32
        and not jax.typeof(arrays.product).manual_axis_type.varying
        and explicit_mesh(arrays) is None
    )
