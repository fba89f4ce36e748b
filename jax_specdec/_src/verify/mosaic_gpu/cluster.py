"""Exchanges between the CTAs of a cluster, and between the warpgroups of a CTA.

Exchanges take place in rounds. In each, every warp of the cluster stores its values in a slot of
every CTA's shared memory, and waits until the slot of its own CTA is full. Two slots are used
alternately: a warp that has all values of a round knows that all warps have read those of the round
before, so that slot may be filled again. A slot has one mbarrier, whose phase completes once per
round in that slot.

Only this file counts rounds; callers pass on the `round` that an exchange returns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.mosaic.threads import WARP, WARPS, ExchangeSlot, Ref, Threads
from jax_specdec._src.verify.mosaic_gpu.plan import SLOTS, SharedMemory

Count = TypeVar("Count", int, jax.Array)


def slot_of(round: Count, slots: int = SLOTS) -> Count:
    """Returns the slot of a round, which is also its barrier; `slots` is a power of two."""
    return round & (slots - 1)


def parity_of(round: Count, slots: int = SLOTS) -> Count:
    """Returns the parity of the barrier's phase that a round completes: 0, then 1, 0 and so on."""
    return (round >> (slots.bit_length() - 1)) & 1


class Masses(NamedTuple):
    """Masses of all tiles of a row, by lane: lane i of array r has that of tile ``32 r + i``."""

    of_tiles: list[jax.Array]  # float32 [128] each, 0 past the last tile
    sums: list[jax.Array]  # their inclusive sums
    total: jax.Array  # [] float32

    @classmethod
    def of(cls, threads: Threads, of_tiles: list[jax.Array]) -> Masses:
        """Returns masses with their sums."""
        sums, total = sums_by_lane(threads, of_tiles)
        return cls(of_tiles=of_tiles, sums=sums, total=threads.scalar(total))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The CTAs that verify one request, for one warpgroup of one of them."""

    threads: Threads  # the operations of the warpgroup
    memory: SharedMemory  # where the slots are
    # Float32 ref [2, floats of a slot] in shared memory; in interpret mode in global memory, and of
    # the whole cluster.
    slots: Ref
    barriers: Any  # mbarriers, first those of the slots; in interpret mode `ExchangeBarriers`
    scratch: Ref  # float32 ref in shared memory, for `gather_in_cta`
    cta: jax.Array  # [] int32, index of this CTA in the cluster

    def is_first_warp(self) -> jax.Array:
        """Returns whether a thread is in the first warp of the cluster, ``[128]`` bool."""
        return (self.threads.index < WARP) & (self.cta == 0)

    def all_gather(
        self, round: jax.Array, *values: jax.Array
    ) -> tuple[list[list[jax.Array]], jax.Array]:
        """Returns each warp's values, in every warp, and the next round.

        Args:
          round: ``[]`` int32, 0, then as returned by the exchange before.
          *values: float32 ``[128]``, the same in all threads of a warp: one, two or four.

        Returns:
          For each value arrays by lane: lane i of array r has that of warp ``32 r + i``, or of the
          last warp if there are fewer. Then the next round.
        """
        warps = self.memory.slices.warps
        width = max(2, len(values))  # an exchange sends two at least: the first is sent twice
        slot = self._exchange(round, [*values, *values][:width], self.threads.index)
        # The slot is [warps, width]. Each lane reads the values of a warp at once; `entries` adds
        # width * index to where a thread begins, which is taken off here.
        found = []
        for lane in _by_lane(self.threads.index, warps):
            place = width * (jnp.minimum(lane, warps - 1) - self.threads.index)
            found.append(self.threads.entries(slot, place, width, aligned=True))
        by_value = [list(of_value) for of_value in zip(*found, strict=True)]
        return by_value[: len(values)], round + 1

    def sum(self, values: list[jax.Array]) -> jax.Array:
        """Returns the sum of all warps' values, ``[]``, from arrays of `all_gather`."""
        warps = self.memory.slices.warps
        lanes = _by_lane(self.threads.index, warps)
        # Lanes past the last warp have its value again.
        known = [jnp.where(warp < warps, x, 0.0) for warp, x in zip(lanes, values, strict=True)]
        return self.threads.scalar(self.threads.warp_sum(tree_sum(known)))

    def max(self, values: list[jax.Array]) -> jax.Array:
        """Returns the largest of all warps' values, ``[]``, NaN if one is."""
        return self.threads.scalar(self.threads.warp_max(tree_max(values)))

    def gather_masses(self, round: jax.Array, masses: list[jax.Array]) -> tuple[Masses, jax.Array]:
        """Returns the mass of each tile of the row, and the next round.

        Args:
          round: see `all_gather`.
          masses: float32 ``[128]`` per tile of the slice, each warp's part, the same in all of its
            threads.
        """
        threads = self.threads
        slices = self.memory.slices
        stride = self.memory.masses_per_warp
        # Computed anew: nothing made of it is kept in registers while rows are read.
        thread = threads.index_anew()
        padding = [threads.filled(0.0)] * (stride - len(masses))
        # Each warp sends its part of every tile of its slice.
        slot = self._exchange(round, [*masses, *padding], thread)
        # The slot is [CTAs, 4 warps, stride], with the tiles of a CTA's slice along the last axis.
        count = slices.row_tiles
        found = []
        # Each lane gathers the four warps' parts of a tile, wherever they lie, and adds them.
        for tile in _by_lane(thread, count):
            place = jnp.minimum(tile, count - 1)
            first = lax.div(place, slices.tiles) * (WARPS * stride) + lax.rem(place, slices.tiles)
            parts = [threads.gather(slot, first + warp * stride) for warp in range(WARPS)]
            found.append(jnp.where(tile < count, tree_sum(parts), 0.0))
        return Masses.of(threads, found), round + 1

    def no_masses(self) -> Masses:
        """Returns zeros, for a row whose masses are not summed."""
        nothing = [self.threads.filled(0.0)] * -(-self.memory.slices.row_tiles // WARP)
        return Masses(of_tiles=nothing, sums=nothing, total=jnp.float32(0))

    def _exchange(self, round: jax.Array, values: list[jax.Array], thread: jax.Array) -> Ref:
        """Stores `values`, waits for those of all warps, and returns the slot that has them."""
        slot = slot_of(round)
        memory: Ref = self.slots.at[slot]
        # A slot has a place for each warp of the cluster, in order.
        warp = self.cta * WARPS + lax.div(thread, WARP)
        self.threads.exchange(
            ExchangeSlot(
                memory=memory,
                barriers=self.barriers,
                place=warp * len(values),
                barrier=slot,
                parity=parity_of(round),
                cluster=self.memory.slices.cluster,
            ),
            values,
        )
        return memory

    def gather_in_cta(self, values: list[jax.Array]) -> jax.Array:
        """Returns the values of each warp of this CTA's warpgroup, in every warp.

        Args:
          values: float32 ``[128]`` each, at most eight, the same in all threads of a warp.

        Returns:
          By lane: those of the first array by warp, then of the second, and so on, then 0.
        """
        threads = self.threads
        count = len(values) * WARPS
        warp = lax.div(threads.index, WARP)
        lane = threads.index & (WARP - 1)
        # The first lane of each warp stores, and each lane reads one: scratch is [values, 4 warps].
        for i, value in enumerate(values):
            threads.scatter(self.scratch, i * WARPS + warp, value, lane == 0)
        threads.sync()
        found = threads.gather(self.scratch, jnp.minimum(lane, count - 1))
        return jnp.where(lane < count, found, 0.0)


class OneWarpgroup:
    """The warpgroup of a CTA that has one: it reads every position of the request.

    Attributes:
      index: ``[]`` int32, of the warpgroup in its CTA.
      count: warpgroups of a CTA.
    """

    count = 1

    def __init__(self, index: jax.Array):
        self.index = index

    def rows_before(self, position: jax.Array) -> jax.Array:
        """Returns how many rows it copies before that of `position`, if it leaves out none."""
        return position

    def first(self, ends: jax.Array, position: jax.Array) -> jax.Array:
        """Returns the first warpgroup at whose position the walk ends, ``[]`` int32; 1 if none."""
        return jnp.where(ends, 0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warpgroups:
    """Warpgroups of a CTA, each of which reads another position of the request.

    Each has its own rows, slots and barriers; together they find where the walk ends.
    """

    threads: Threads  # the operations of a warpgroup
    count: int  # warpgroups of a CTA
    index: jax.Array  # [] int32, index of this one
    flags: Ref  # int32 ref [count, 2] in shared memory
    barrier: Any  # the barrier of all warpgroups in interpret mode; elsewhere the hardware has one

    def rows_before(self, position: jax.Array) -> jax.Array:
        """Returns how many rows one copies before that of `position`, if it leaves out none."""
        return lax.div(position, self.count)

    def first(self, ends: jax.Array, position: jax.Array) -> jax.Array:
        """Returns the first warpgroup at whose position the walk ends, int32; `count` if none.

        Args:
          ends: ``[]`` bool, whether it ends at this warpgroup's position.
          position: ``[]`` int32, this warpgroup's position.
        """
        # Two flags, used alternately: the last one may still be read by others.
        thread = self.threads.index
        slot = slot_of(self.rows_before(position))
        # One thread of each warpgroup writes its flag, and all warpgroups wait.
        flag = jnp.zeros_like(thread) + ends.astype(jnp.int32)
        place = jnp.zeros_like(thread) + slot
        self.threads.scatter(self.flags.at[self.index], place, flag, thread == 0)
        self.threads.sync_cta(self.count, self.barrier)
        # From the last to the first, so that the first one stays.
        found = jnp.int32(self.count)
        for warpgroup in reversed(range(self.count)):
            found = jnp.where(self.flags[warpgroup, slot] == 1, warpgroup, found)
        return found


def _by_lane(thread: jax.Array, count: int) -> list[jax.Array]:
    """Returns indices from 0 to `count` - 1 over the lanes of a warp: an array for every 32."""
    return [start + (thread & (WARP - 1)) for start in range(0, count, WARP)]


def sums_by_lane(threads: Threads, masses: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Returns inclusive sums over the lanes of a warp, one array after another, and their total."""
    # [128] for each 32 places: sums within an array, then plus the arrays before.
    sums = [threads.warp_scan(mass) for mass in masses]
    total = threads.shuffle(sums[0], WARP - 1)  # the last lane has the sum of all
    for i, inclusive in enumerate(sums[1:], start=1):
        sums[i] = inclusive + total
        total = threads.shuffle(sums[i], WARP - 1)
    return sums, total


def tree_max(xs: list[jax.Array]) -> jax.Array:
    """Returns the maximum of arrays, in pairs; NaN if any entry is."""
    while len(xs) > 1:
        pairs = zip(xs[::2], xs[1::2], strict=False)
        xs = [jnp.maximum(a, b) for a, b in pairs] + xs[len(xs) // 2 * 2 :]
    return xs[0]


def tree_sum(xs: list[jax.Array]) -> jax.Array:
    """Returns the sum of arrays, in pairs: chains of additions stay short."""
    while len(xs) > 1:
        pairs = zip(xs[::2], xs[1::2], strict=False)
        xs = [a + b for a, b in pairs] + xs[len(xs) // 2 * 2 :]  # and the last of an odd number
    return xs[0]
