"""Sums over each warp of what its threads have of the tiles of a slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.mosaic_gpu.threads import WARP


class TileSums(NamedTuple):
    """Sums of the tiles so far; the last one is added while the next is read.

    Attributes:
      found: ``[128]`` by lane, the same in all warps' lanes: a sum over the warp of each tile.
      last: ``[128]``, what each thread has of the tile that is not in it yet.
    """

    found: jax.Array
    last: jax.Array

    @classmethod
    def start(cls, threads: Any) -> TileSums:
        """Before the first tile."""
        return cls(threads.filled(0.0), threads.filled(0.0))

    def begin(self, threads: Any, tile: jax.Array, value: jax.Array) -> TileSums:
        """With `value`, what each thread has of the tile that comes next."""
        return TileSums(self._up_to(threads, tile - 1), value)

    def add(self, value: jax.Array) -> TileSums:
        """With more of the same tile."""
        return self._replace(last=self.last + value)

    def of_slice(self, threads: Any, count: jax.Array, most: int) -> list[jax.Array]:
        """Each tile's sum over the warp, of `count` tiles, of which there are `most`."""
        found = self._up_to(threads, count - 1)
        return [threads.from_lane(found, i) for i in range(most)]

    def _up_to(self, threads: Any, tile: jax.Array) -> jax.Array:
        lane = threads.index() & (WARP - 1)
        return jnp.where(lane == tile, threads.warp_sum(self.last), self.found)
