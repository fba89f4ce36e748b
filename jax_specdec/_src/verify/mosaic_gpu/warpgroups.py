"""Warpgroups of a block, which look at as many positions of a request at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu import signals


@dataclasses.dataclass(frozen=True)
class Warpgroups:
    """Each warpgroup has rows, mail and barriers of its own; together they find where a walk ends.

    Attributes:
      threads: the operations of a warpgroup.
      count: warpgroups of a block.
      index: ``[]`` int32, which one this is.
      flags: int32 ref ``[count, 2]`` in shared memory, or None where there is one warpgroup.
      met: a barrier in interpret mode, else None.
    """

    threads: Any
    count: int
    index: jax.Array
    flags: Any = None
    met: Any = None

    def first(self, ends: jax.Array, turn: jax.Array) -> jax.Array:
        """The first warpgroup with which the walk ends, ``[]`` int32, or how many there are.

        Args:
          ends: ``[]`` bool, whether it does with this one.
          turn: ``[]`` int32, how often this was asked before: flags of the last time are still
            being read.
        """
        if self.count == 1:
            return jnp.where(ends, 0, 1)
        thread, box = self.threads.index(), turn & 1
        flag = jnp.zeros_like(thread) + ends.astype(jnp.int32)
        place = jnp.zeros_like(thread) + box
        self.threads.scatter(self.flags.at[self.index], place, flag, thread == 0)
        self._meet()
        found = jnp.int32(self.count)
        for warpgroup in reversed(range(self.count)):
            found = jnp.where(self.flags[warpgroup, box] == 1, warpgroup, found)
        return found

    def _meet(self) -> None:
        """Wait for all warpgroups."""
        if self.threads.interpreted:
            plgpu.barrier_arrive(self.met)
            plgpu.barrier_wait(self.met)
        else:
            signals.meet_warpgroups(self.count)
