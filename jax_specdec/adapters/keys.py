"""A key for each request, from one key per step or one per request."""

from __future__ import annotations

import jax

from jax_specdec._src.base.arrays import as_int32, check_array
from jax_specdec._src.base.noise import check_keys, threefry_keys
from jax_specdec._src.base.types import Integers


def step_keys(key: jax.Array, slots: Integers) -> jax.Array:
    """Returns one key per request, from one key per step.

    Entry b is ``fold_in(key, slots[b])``, for keys of every kind as keys of Threefry. Verification
    with these keys is exact over any number of steps, under padding, and if requests change their
    slots between steps, provided that

    - `key` differs on every step (`jax.random.split` it off a chain, or fold the step in),
    - no two requests of a step have the same slot, also in different parts of a `jax.shard_map`:
      fold `jax.lax.axis_index` into the key of each part first, as the adapters do, and
    - nothing else draws from `key`: a drafter gets a key of its own.

    Positions then need not grow: give 0, or those of the requests. In return, a request's tokens
    depend on its slot, and on how many steps the loop had taken before it arrived. To avoid this,
    give each request a key from its own seed.

    Args:
      key: ``[]`` typed key of two or four words (threefry2x32, rbg, unsafe_rbg), fresh in each
        step.
      slots: ``[B]`` int32, a different number for each request of the step: its slot, or its id.

    Returns:
      ``[B]`` typed keys, for ``keys`` of `jax_specdec.rejection_sample`.

    Raises:
      TypeError: `key` is not a typed key of two or four words, or `slots` are not integers.
      ValueError: `key` is not one key, or `slots` are not ``[B]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> chain, key = jax.random.split(jax.random.key(0, impl="rbg"))
      >>> step_keys(key, jnp.arange(3)).shape
      (3,)
    """
    check_keys("key", key)
    check_array("key", key, "[]", {})
    slots = as_int32("slots", slots, "[B]")
    # Into a key of Threefry first, because under vmap JAX folds into "unsafe_rbg" keys differently.
    return jax.vmap(jax.random.fold_in, (None, 0))(threefry_keys(key), slots)
