"""Sums over each warp of what its threads have of the tiles of a slice."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.mosaic_gpu.threads import WARP


class TileSums(NamedTuple):
    """Sums of the tiles so far, which come in groups; the last group is added during the next.

    Attributes:
      found: ``[128]`` by lane: the sum over the warp of each tile, of group g in the lanes whose
        remainder is g.
      last: ``[128]`` each, what each thread has of the tiles of the group that is not in it yet.
      group: ``[]`` int32, which one that is.
    """

    found: jax.Array
    last: tuple[jax.Array, ...]
    group: jax.Array

    @classmethod
    def start(cls, threads: Any, size: int = 1) -> TileSums:
        """Before the first group, each of `size` tiles, a power of two."""
        return cls(threads.filled(0.0), (threads.filled(0.0),) * size, jnp.int32(-1))

    def begin(self, threads: Any, group: jax.Array, place: int, value: jax.Array) -> TileSums:
        """With `value`, what each thread has of the next tile, at this place in its group."""
        found = self.found if place else self._with_last(threads)
        return TileSums(found, self._but(place, value), group)

    def add(self, place: int, value: jax.Array) -> TileSums:
        """With more of the same tile."""
        return self._replace(last=self._but(place, self.last[place] + value))

    def _but(self, place: int, value: jax.Array) -> tuple[jax.Array, ...]:
        return (*self.last[:place], value, *self.last[place + 1 :])

    def first(self, threads: Any, count: int) -> list[jax.Array]:
        """The sums over the warp of the first tiles, 0 of those that never came."""
        found, size = self._with_last(threads), len(self.last)
        lanes = [i // size + _part_of(i % size, size) * (WARP // size) for i in range(count)]
        return [threads.from_lane(found, lane) for lane in lanes]

    def _with_last(self, threads: Any) -> jax.Array:
        sums = _sums(threads, list(self.last))
        remainder = threads.index() & (WARP // len(self.last) - 1)
        return jnp.where(remainder == self.group, sums, self.found)


def _sums(threads: Any, xs: list[jax.Array]) -> jax.Array:
    """Sums over each warp of so many arrays as a power of two; `_part_of` tells where each is.

    Half of the lanes go on with every other array, so that few steps serve all.
    """
    lanes = WARP
    while len(xs) > 1:
        lanes //= 2
        upper = (threads.index() & lanes) != 0
        pairs = list(zip(xs[::2], xs[1::2], strict=True))
        kept = [jnp.where(upper, b, a) for a, b in pairs]
        given = [jnp.where(upper, a, b) for a, b in pairs]
        both = zip(kept, given, strict=True)
        xs = [x + threads.swapped(y, lanes) for x, y in both]
    return threads.warp_sum(xs[0], lanes)


def _part_of(i: int, count: int) -> int:
    """Which of `count` parts of the lanes, in order, have the sum of array i: its bits reversed."""
    part = 0
    while count > 1:
        count //= 2
        part += (i & 1) * count
        i >>= 1
    return part
