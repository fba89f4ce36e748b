"""Replacing what one request owns in arrays that are shared by all slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.drafting.store import DraftStore


def insert(
    init_cache: Callable[[int, int], Any], cache: Any, one: Any, slot: jax.Array, max_length: int
) -> Any:
    """`cache` with everything of `slot` replaced by a cache of one request; in place if donated.

    Which axis holds the requests is found by asking for caches of one and of two.

    Args:
      init_cache: of a model or a drafter.
      cache: of S requests.
      one: of one request.
      slot: ``[]`` int32.
      max_length: of both caches.

    Raises:
      ValueError: an array has no such axis, or more than one.
    """
    shapes = [jax.eval_shape(lambda n=n: init_cache(n, max_length)) for n in (1, 2)]

    def put(path: Any, single: Any, double: Any, all_: jax.Array, new: jax.Array) -> jax.Array:
        pairs = enumerate(zip(single.shape, double.shape, strict=True))
        axes = [(axis, size) for axis, (size, larger) in pairs if larger != size]
        if len(axes) != 1 or double.shape[axes[0][0]] != 2 * axes[0][1]:
            raise ValueError(
                f"cache{jax.tree_util.keystr(path)} must have one axis that holds the requests, "
                f"equally much of each, but its shape is {single.shape} for one request and "
                f"{double.shape} for two"
            )
        ((axis, size),) = axes
        start = [jnp.int32(0)] * all_.ndim
        start[axis] = slot * size
        return lax.dynamic_update_slice(all_, new, start)

    return jax.tree.map_with_path(put, *shapes, cache, one)


def insert_rows(
    store: DraftStore, one: DraftStore, slot: jax.Array, is_given: jax.Array
) -> DraftStore:
    """`store` with the rows of `slot` replaced by those of a store of one slot.

    Args:
      store: of S slots.
      one: of one slot, and of the same K and Vd.
      slot: ``[]`` int32.
      is_given: ``[]`` bool; where false, everything stays as it is.
    """
    k, s = store.positions.shape
    place = jnp.where(is_given, slot, s)  # out of range: dropped

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        rows, values = all_.reshape(k, s, -1), new.reshape(k, -1)
        return rows.at[:, place].set(values, mode="drop").reshape(all_.shape)

    return jax.tree.map(put, store, one)
