"""Caches of some requests among those of all: prompts are read into them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.lm.models.protocol import PromptRows, cache_batch_axis_of


def read_into_slots(
    owner: Any,
    cache: Any,
    prompts: PromptRows,
    length: int,
    read: Callable[[Any], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """The cache after R of its requests have read a part of their prompts, and what `read` returns.

    Args:
      owner: the model or drafter that the cache is of.
      cache: of all requests; changed in place if it is donated.
      prompts: whose slots are read into. A prompt that begins at position 0 finds an empty cache.
      length: positions of each request.
      read: is given the caches of the R requests, and returns them and anything else.
    """
    axis = cache_batch_axis_of(owner)
    empty = owner.init_cache(prompts.slots.shape[0], length)
    own = take_cache(cache, empty, prompts.slots, axis)
    is_new = prompts.start == 0

    def cleared(old: jax.Array, new: jax.Array) -> jax.Array:
        # [R] -> [.., R entries, ..], along the axis of the requests
        each = jnp.repeat(is_new, new.shape[axis] // is_new.shape[0])
        shape = [1] * new.ndim
        shape[axis] = each.shape[0]
        return jnp.where(each.reshape(shape), new, old)

    own, result = read(jax.tree.map(cleared, own, empty))
    return put_cache(cache, own, prompts.slots, axis), result


def take_cache(cache: Any, like: Any, slots: jax.Array, axis: int) -> Any:
    """The caches of R requests, out of a cache of all.

    Args:
      cache: of S requests.
      like: of R requests; its shapes are used.
      slots: ``[R]`` int32.
      axis: that holds the requests.
    """

    def take(all_: jax.Array, some: jax.Array) -> jax.Array:
        size = some.shape[axis] // slots.shape[0]
        rows = [
            lax.dynamic_slice_in_dim(all_, slots[row] * size, size, axis)
            for row in range(slots.shape[0])
        ]
        return jnp.concatenate(rows, axis=axis)

    return jax.tree.map(take, cache, like)


def put_cache(cache: Any, some: Any, slots: jax.Array, axis: int) -> Any:
    """`cache` with the caches of R requests in place of what `slots` held; in place if donated.

    Args:
      cache: of S requests.
      some: of R requests.
      slots: ``[R]`` int32.
      axis: that holds the requests.
    """

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        size = new.shape[axis] // slots.shape[0]
        for row in range(slots.shape[0]):  # a scatter would copy where `axis` is not the first
            one = lax.slice_in_dim(new, row * size, (row + 1) * size, axis=axis)
            all_ = lax.dynamic_update_slice_in_dim(all_, one, slots[row] * size, axis)
        return all_

    return jax.tree.map(put, cache, some)
