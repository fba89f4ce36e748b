"""`Part`: how much of the vocabulary a device has, and what it exchanges with the other parts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Part:
    """The whole vocabulary, as the only part of it: there is nothing to exchange.

    `SplitPart` is one of several. Whether a vocabulary is split is static, so that nothing is
    traced for what a whole one does not need.
    """

    is_split: ClassVar[bool] = False

    @property
    def first_id(self) -> Any:
        """The id of the first column: 0, or ``[]`` int32 of one of several parts."""
        return 0

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return 1

    @property
    def index(self) -> jax.Array:
        """``[]`` int32, which part this device has."""
        return jnp.int32(0)

    def columns(self, ids: jax.Array) -> jax.Array:
        """Returns the columns of ids. Those of other parts are out of range."""
        return ids

    def ids(self, columns: jax.Array) -> jax.Array:
        """Returns the ids of columns."""
        return columns

    def moved(self, start: Any) -> Part:
        """Returns it with a column as the first one."""
        return self

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over the parts."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum over the parts."""
        return x

    def gather(self, tree: Any) -> Any:
        """Returns 32-bit arrays ``[B, ...]`` of every part, as ``[num_parts, B, ...]``."""
        return jax.tree.map(lambda x: x[None], tree)


WHOLE = Part()
"""The one part of a vocabulary that is not split."""


@dataclasses.dataclass(frozen=True)
class SplitPart(Part):
    """One of several parts of equal width, inside `jax.shard_map`.

    Attributes:
      axis: the mesh axis that the vocabulary is split over.
      first: ``[]`` int32, the id of the first column.
    """

    is_split: ClassVar[bool] = True
    axis: str
    first: jax.Array

    @property
    def first_id(self) -> jax.Array:
        return self.first

    @property
    def num_parts(self) -> int:
        return lax.axis_size(self.axis)  # static, inside of `jax.shard_map`

    @property
    def index(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def columns(self, ids: jax.Array) -> jax.Array:
        return ids - self.first

    def ids(self, columns: jax.Array) -> jax.Array:
        return self.first + columns

    def moved(self, start: Any) -> SplitPart:
        return dataclasses.replace(self, first=self.first + start)

    def sum(self, x: jax.Array) -> jax.Array:
        return lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        return lax.pmax(x, self.axis)

    def gather(self, tree: Any) -> Any:
        # All arrays go as one: an exchange costs more than the words in it.
        return unpack(lax.all_gather(pack(tree, 1), self.axis, to="invarying"), tree, 1)


def part_of(axis: str | None, width: int) -> Part:
    """Returns this device's part, `width` ids of a vocabulary that is split over `axis` or not."""
    if axis is None:
        return WHOLE
    # This device's first id: parts of equal width lie one after another.
    return SplitPart(axis, lax.axis_index(axis) * width)


def pack(tree: Any, axes: int) -> jax.Array:
    """Returns arrays with `axes` equal axes in front as one array of int32 words ``[..., n]``.

    They are of 32 bits or boolean. `unpack` gives them back.
    """
    # [..., n] each: the bits of a number as they are, a boolean as 0 or 1
    words = [
        x.astype(jnp.int32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.int32)
        for x in jax.tree.leaves(tree)
    ]
    # [..., n]: the words of all arrays, one after another
    return jnp.concatenate([x.reshape(*x.shape[:axes], -1) for x in words], axis=-1)


def unpack(words: jax.Array, like: Any, axes: int) -> Any:
    """Returns what was packed, with the axes that `words` has in front of its last one.

    Args:
      words: from `pack`, perhaps of several parts.
      like: a pytree of the types that were packed.
      axes: as it was packed.
    """
    # Where the words of each array end.
    arrays, tree = jax.tree.flatten(like)
    ends = np.cumsum([math.prod(x.shape[axes:]) for x in arrays])[:-1]
    # Each array's words get its own axes back, and its dtype.
    found = []
    for words_of_one, x in zip(jnp.split(words, ends, axis=-1), arrays, strict=True):
        own = words_of_one.reshape(*words.shape[:-1], *x.shape[axes:])
        is_bool = x.dtype == jnp.bool_
        found.append(own != 0 if is_bool else lax.bitcast_convert_type(own, x.dtype))
    return jax.tree.unflatten(tree, found)


def of_owner(values: jax.Array, ids: jax.Array, width: int) -> jax.Array:
    """Returns of values ``[num_parts, ...]`` those of the part that holds each of `ids`."""
    # Ids out of range are asked of the first or last part, which fills them.
    owner = jnp.clip(ids // width, 0, values.shape[0] - 1)
    return jnp.take_along_axis(values, owner[None], axis=0)[0]
