"""Exchanges between the devices that split a vocabulary, over a mesh axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange between phases, inside `jax.shard_map`. Without an axis it does nothing.

    Attributes:
      axis: the mesh axis that the vocabulary is split over, in parts of equal width; None if this
        device has all of it, which is then the only part.
    """

    axis: str | None = None

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
        words = [_as_int32(x).reshape(x.shape[0], -1) for x in arrays]
        ends = np.cumsum([w.shape[1] for w in words])[:-1]
        gathered = lax.all_gather(jnp.concatenate(words, axis=1), self.axis, to="invarying")
        parts = [
            lax.bitcast_convert_type(part, x.dtype).reshape(-1, *x.shape)
            for part, x in zip(jnp.split(gathered, ends, axis=2), arrays, strict=True)
        ]
        return jax.tree.unflatten(treedef, parts)


WHOLE = Exchange()
"""For a vocabulary that is not split."""


def of_owner(values: jax.Array, ids: jax.Array, width: int) -> jax.Array:
    """Select from values ``[num_parts, ...]`` those of the part that holds each of `ids`."""
    if values.shape[0] == 1:
        return values[0]
    owner = jnp.clip(ids // width, 0, values.shape[0] - 1)
    return jnp.take_along_axis(values, owner[None], axis=0)[0]


def _as_int32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)
