"""Sums over each warp of what its threads have of the tiles of a slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.mosaic_gpu.threads import WARP


class TileSums(NamedTuple):
    """Sums of the tiles so far; the last one is added while the next is read.

    Attributes:
      found: ``[128]`` by lane, the same in all warps: the sum over the warp of each tile.
      last: ``[128]``, what each thread has of the tile that is not in it yet.
      tile: ``[]`` int32, which one that is.
    """

    found: jax.Array
    last: jax.Array
    tile: jax.Array

    @classmethod
    def start(cls, threads: Any) -> TileSums:
        """Before the first tile."""
        return cls(threads.filled(0.0), threads.filled(0.0), jnp.int32(-1))

    def begin(self, threads: Any, tile: jax.Array, value: jax.Array) -> TileSums:
        """With `value`, what each thread has of the next tile."""
        return TileSums(self._with_last(threads), value, tile)

    def add(self, value: jax.Array) -> TileSums:
        """With more of the same tile."""
        return self._replace(last=self.last + value)

    def first(self, threads: Any, count: int) -> list[jax.Array]:
        """The sums over the warp of the first tiles, 0 of those that never came."""
        found = self._with_last(threads)
        return [threads.from_lane(found, i) for i in range(count)]

    def _with_last(self, threads: Any) -> jax.Array:
        lane = threads.index() & (WARP - 1)
        return jnp.where(lane == self.tile, threads.warp_sum(self.last), self.found)
