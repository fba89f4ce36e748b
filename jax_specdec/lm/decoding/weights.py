"""Weights: put on devices, and checked and put where others were that they replace."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.models.int8 import is_int8
from jax_specdec.lm.models.protocol import (
    CausalModel,
    HasParams,
    Params,
    check_like,
    check_params,
)

_Arrays = TypeVar("_Arrays")  # a pytree

Weights = tuple[Params, Params]
"""Those of the target and of the drafter."""


def check_are_there(name: str, given: Params) -> None:
    """Checks that no array of weights was deleted.

    Args:
      given: arrays of the host or of devices.

    Raises:
      RuntimeError: one was, as by a donation.
    """
    for path, array in jax.tree.leaves_with_path(given):
        is_there = not (isinstance(array, jax.Array) and array.is_deleted())
        leaf = name + jax.tree_util.keystr(path)
        hint = "it was deleted, as by a donation"
        require(is_there, leaf, "be on a device", array, hint, RuntimeError)


def check_replaces(name: str, owner: HasParams, given: Params, held: Params) -> None:
    """Checks that weights can take the place of others, and nothing is compiled again.

    Args:
      owner: the model or drafter.
      given: arrays of the host or of devices.
      held: arrays of devices, which may have been deleted.

    Raises:
      TypeError: an array has another dtype.
      ValueError: the structure or a shape is another, or an array is committed to devices where
        the one that is held is not.
      RuntimeError: an array was deleted.
    """
    check_params(name, owner, given)
    # Before the structures are compared: a weight in int8 is two arrays, so its absence would be
    # reported as another structure.
    _check_int8(name, given, held)
    check_like(name, given, held, "the driver's weights")
    check_are_there(name, given)
    for (path, new), old in zip(
        jax.tree.leaves_with_path(given), jax.tree.leaves(held), strict=True
    ):
        # JAX compiles for committed arrays anew where the old ones were not, also on the same
        # device.
        is_committed = isinstance(new, jax.Array) and new.committed
        must = "be committed to no device, as the driver's weights are not"
        hint = "make the driver with arrays that jax.device_put has put on devices"
        leaf = name + jax.tree_util.keystr(path)
        require(old.committed or not is_committed, leaf, must, new, hint)


def _check_int8(name: str, given: Params, held: Params) -> None:
    """Checks that weights are in int8 where those held are, and nowhere else."""
    leaves = dict(jax.tree.leaves_with_path(given, is_leaf=is_int8))
    for path, old in jax.tree.leaves_with_path(held, is_leaf=is_int8):
        # One that is missing is not this check's: `check_like` reports it.
        new = leaves.get(path, old)
        must = "be an array"
        hint = "give the weights that quantize was called with"
        if is_int8(old):
            must = "be an Int8Weight"
            hint = "give what jax_specdec.lm.models.quantize returns of the weights"
        leaf = name + jax.tree_util.keystr(path)
        require(is_int8(new) == is_int8(old), leaf, f"{must}, as the driver's weight is", new, hint)


def put(new: jax.Array | np.ndarray, sharding: Sharding | None = None) -> jax.Array:
    """Returns an array on devices; itself, if it is one that is there.

    When it is ready, nothing that is done to an array of the host reaches it any more.
    """
    array = jax.device_put(new, sharding)
    if isinstance(new, np.ndarray) and any(x.platform == "cpu" for x in array.devices()):
        # A CPU takes the memory of the host as it is, where that is aligned.
        array = jax.device_put(array, may_alias=False)
    return array


def put_like(new: jax.Array | np.ndarray, held: jax.Array) -> jax.Array:
    """Returns an array where another is or was; itself, if it is there."""
    # A deleted array still says where it was. One that was committed to no device has no place to
    # pass on.
    return put(new, held.sharding if held.committed else None)


def replaced(held: Weights, given: Weights, delete: bool) -> Weights:
    """Returns the weights in which those given, if not None, have taken the place of those held.

    Waits until they are there, so that an error shows now.

    Args:
      given: as `check_replaces` wants them.
      delete: whether each array is deleted before the new one is put in its place; one that stays,
        or is given again, also by another array of its memory, is not.
    """
    # What the new weights consist of: the memory of none of these may be deleted with an old array.
    # Two arrays may have one memory: `jax.device_put` to the device where an array is makes another
    # of it.
    pairs = zip(given, held, strict=True)
    staying = jax.tree.leaves([old if new is None else new for new, old in pairs])
    stays = set[Hashable]().union(*map(_memory, staying if delete else []))

    # Array by array: the room of an old one is free before the new one is copied there.
    def put_in_place(new: jax.Array | np.ndarray, old: jax.Array) -> jax.Array:
        if delete and stays.isdisjoint(_memory(old)):
            old.delete()
        return put_like(new, old)

    def put_all(new: Params, old: Params) -> Params:
        return old if new is None else jax.block_until_ready(jax.tree.map(put_in_place, new, old))

    params, draft_params = map(put_all, given, held)
    return params, draft_params


def _memory(array: jax.Array | np.ndarray) -> set[Hashable]:
    """Returns the device and the address of each part of an array; none of one of the host."""
    if not isinstance(array, jax.Array) or array.is_deleted():
        return set()
    parts = [shard.data for shard in array.addressable_shards]
    return {(one.device, one.unsafe_buffer_pointer()) for one in parts}


def on_all_devices(arrays: _Arrays, model: CausalModel) -> _Arrays:
    """Returns arrays that had no place, copied to every device of the model's mesh.

    Done once, not with every call. A step then finds its state where the last step left it, and is
    compiled once.

    Args:
      arrays: a pytree.
      model: the target; without a mesh, everything stays where it is.
    """
    sharding = model.serves.sharding
    if sharding is None or sharding.mesh is None:
        return arrays
    everywhere = NamedSharding(sharding.mesh, P())

    def copied(x: jax.Array) -> jax.Array:
        if isinstance(x, jax.Array) and x.committed:
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put keeps keys to one process
            data = jax.device_put(jax.random.key_data(x), everywhere)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return put(x, everywhere)

    placed: _Arrays = jax.tree.map(copied, arrays)
    return placed
