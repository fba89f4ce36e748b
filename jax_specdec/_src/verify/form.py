"""`Form`: how XLA reads rows on a device, as plain values that are settled once for a call."""

from __future__ import annotations

import dataclasses
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
        arrays, treedef = jax.tree.flatten(tree)
        words = [lax.bitcast_convert_type(x, jnp.int32).reshape(x.shape[0], -1) for x in arrays]
        ends = np.cumsum([w.shape[1] for w in words])[:-1]
        gathered = lax.all_gather(jnp.concatenate(words, axis=1), self.axis, to="invarying")
        parts = [
            lax.bitcast_convert_type(part, x.dtype).reshape(-1, *x.shape)
            for part, x in zip(jnp.split(gathered, ends, axis=2), arrays, strict=True)
        ]
        return jax.tree.unflatten(treedef, parts)


def of_owner(values: jax.Array, ids: jax.Array, width: int) -> jax.Array:
    """Select from values ``[num_parts, ...]`` those of the part that holds each of `ids`."""
    owner = jnp.clip(ids // width, 0, values.shape[0] - 1)
    return jnp.take_along_axis(values, owner[None], axis=0)[0]
