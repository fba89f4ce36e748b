"""`Form`: how XLA reads rows on a device, as plain values that are settled once for a call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.platform import Platform


@dataclasses.dataclass(frozen=True)
class Form:
    """How a device reads rows, and what it exchanges with others inside `jax.shard_map`.

    Attributes:
      platform: that the program is for.
      axis: the mesh axis that the vocabulary is split over, in parts of equal width; None if this
        device has all of it, which is then the only part.
      draft_is_split: whether draft rows are split in the same way. If not, each device has all of
        them.
      in_order: whether rows are read in order, instead of all at once.
      keeps_sums: whether the sums of target rows are kept by tile, to draw by them.
    """

    platform: Platform
    axis: str | None = None
    draft_is_split: bool = False
    in_order: bool = False
    keeps_sums: bool = False

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return 1 if self.axis is None else lax.axis_size(self.axis)

    @property
    def part(self) -> jax.Array:
        """``[]`` int32, which part this device has."""
        return jnp.int32(0) if self.axis is None else lax.axis_index(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """Over the parts."""
        return x if self.axis is None else lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """Over the parts."""
        return x if self.axis is None else lax.pmax(x, self.axis)

    def gather(self, tree: Any) -> Any:
        """32-bit arrays ``[B, ...]`` of every part, as ``[num_parts, B, ...]``, in one gather."""
        if self.axis is None:
            return jax.tree.map(lambda x: x[None], tree)
        return unpack(lax.all_gather(pack(tree, 1), self.axis, to="invarying"), tree, 1)


def pack(tree: Any, axes: int) -> jax.Array:
    """Arrays with `axes` equal axes in front, as one array of int32 words ``[..., n]``.

    They are of 32 bits or boolean. `unpack` gives them back.
    """
    words = [
        x.astype(jnp.int32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.int32)
        for x in jax.tree.leaves(tree)
    ]
    return jnp.concatenate([x.reshape(*x.shape[:axes], -1) for x in words], axis=-1)


def unpack(words: jax.Array, like: Any, axes: int) -> Any:
    """What was packed, with the axes that `words` has in front; `like` is of the same types."""
    arrays, tree = jax.tree.flatten(like)
    ends = np.cumsum([math.prod(x.shape[axes:]) for x in arrays])[:-1]
    found = []
    for part, x in zip(jnp.split(words, ends, axis=-1), arrays, strict=True):
        own = part.reshape(*words.shape[:-1], *x.shape[axes:])
        is_bool = x.dtype == jnp.bool_
        found.append(own != 0 if is_bool else lax.bitcast_convert_type(own, x.dtype))
    return jax.tree.unflatten(tree, found)


def of_owner(values: jax.Array, ids: jax.Array, width: int) -> jax.Array:
    """Select from values ``[num_parts, ...]`` those of the part that holds each of `ids`."""
    owner = jnp.clip(ids // width, 0, values.shape[0] - 1)
    return jnp.take_along_axis(values, owner[None], axis=0)[0]
