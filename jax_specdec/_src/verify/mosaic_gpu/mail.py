"""What the warps of a cluster tell each other: every warp's numbers, in every warp."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify.mosaic_gpu import signals
from jax_specdec._src.verify.mosaic_gpu.config import WARPS, Shared
from jax_specdec._src.verify.mosaic_gpu.threads import THREADS, WARP
from jax_specdec._src.verify.tiles import TILE

_MASSES = 2
"""The barrier of masses, after those of two boxes."""


class Masses(NamedTuple):
    """Masses of all tiles of a row, by lane: entry i of array r is of tile ``32 r + i``.

    Attributes:
      of_tiles: float32 ``[128]`` each, 0 past the last tile.
      sums: up to and including each tile.
      total: ``[]`` float32.
    """

    of_tiles: list[jax.Array]
    sums: list[jax.Array]
    total: jax.Array

    @classmethod
    def of(cls, threads: Any, of_tiles: list[jax.Array]) -> Masses:
        """With their sums."""
        sums, total = [threads.warp_scan(mass) for mass in of_tiles], jnp.float32(0)
        for i, inclusive in enumerate(sums):
            sums[i] = inclusive + total if i else inclusive
            total = threads.scalar(threads.from_lane(sums[i], WARP - 1))
        return cls(of_tiles, sums, total)


@dataclasses.dataclass(frozen=True)
class Mail:
    """Two boxes that take turns, and one for the masses of tiles.

    Who has everybody's numbers of a turn knows that all have read those of the turn before, so
    that box may be filled again.

    Attributes:
      threads: the operations of the warpgroup.
      shared: where the boxes are.
      ref: float32 ref in shared memory, or None in interpret mode.
      barriers: ref of barriers, or None in interpret mode.
      block: ``[]`` int32, which block of the cluster this is.
    """

    threads: Any
    shared: Shared
    ref: Any
    barriers: Any
    block: jax.Array

    def _warp(self, thread: jax.Array) -> jax.Array:
        """Which warp of the cluster each thread is in."""
        return self.block * WARPS + lax.div(thread, WARP)

    def tell(self, turn: jax.Array, *values: jax.Array) -> list[list[jax.Array]]:
        """Each warp's numbers.

        Args:
          turn: ``[]`` int32, from 0 on.
          *values: float32 ``[128]``, the same in all threads of a warp: one, two or four.

        Returns:
          For each value arrays by lane: entry i of array r is that of warp ``32 r + i``. Past the
          last warp they are of no meaning: see `is_warp`.
        """
        warps = self.shared.slices.warps
        if self.threads.interpreted:
            self.threads.meet()  # all wait for all
            return [[_by_lane(v.reshape(WARPS, WARP)[:, 0])] for v in values]
        box = lax.rem(turn, 2)
        begin, width = box * self.shared.box, max(2, len(values))
        signals.exchange(
            self.ref,
            self.barriers,
            begin + width * self._warp(self.threads.index()),
            box,
            lax.rem(lax.div(turn, 2), 2),
            [*values, *values][:width],
            cluster=self.shared.slices.cluster,
            warps=warps,
        )
        found = []
        for lane in _rounds(self.threads.index(), warps):
            place = begin + width * (jnp.minimum(lane, warps - 1) - self.threads.index())
            found.append(self.threads.entries(self.ref, place, width, aligned=True))
        return [list(of_value) for of_value in zip(*found, strict=True)][: len(values)]

    def is_warp(self) -> list[jax.Array]:
        """Where the arrays of `tell` have numbers."""
        warps = self.shared.slices.warps
        return [warp < warps for warp in _rounds(self.threads.index(), warps)]

    def tile_places(self) -> list[jax.Array]:
        """Which tiles the arrays of `tell_masses` are of."""
        slices = self.shared.slices
        return _rounds(self.threads.index(), -(-slices.size // TILE))

    def tell_masses(self, turn: jax.Array, masses: list[jax.Array]) -> Masses:
        """Each tile's mass, summed over the warps that have a part of it.

        Between two turns the boxes must have been used, so that all have read the first.

        Args:
          turn: ``[]`` int32, from 0 on.
          masses: float32 ``[128]`` per tile of the slice, the same in all threads of a warp.
        """
        return Masses.of(self.threads, self._tell_masses(turn, masses))

    def no_masses(self) -> Masses:
        """Stands for those that nobody told."""
        nothing = [self.threads.filled(0.0) for _ in self.tile_places()]
        return Masses(nothing, nothing, jnp.float32(0))

    def _tell_masses(self, turn: jax.Array, masses: list[jax.Array]) -> list[jax.Array]:
        shared, slices = self.shared, self.shared.slices
        count = -(-slices.size // TILE)
        if self.threads.interpreted:
            self.threads.meet()
            totals = jnp.stack([tree_sum(list(m.reshape(WARPS, WARP)[:, 0])) for m in masses])
            padded = jnp.pad(totals, (0, -len(masses) % WARP))
            return [_by_lane(x) for x in padded.reshape(-1, WARP)]
        thread = self.threads.index_anew()
        padding = [self.threads.filled(0.0)] * (shared.masses_per_warp - len(masses))
        signals.exchange(
            self.ref,
            self.barriers,
            shared.masses + self._warp(thread) * shared.masses_per_warp,
            jnp.int32(_MASSES),
            lax.rem(turn, 2),
            [*masses, *padding],
            cluster=slices.cluster,
            warps=slices.warps,
        )
        found = []
        for tile in _rounds(thread, count):
            place = jnp.minimum(tile, count - 1)
            first = lax.div(place, slices.tiles) * (WARPS * shared.masses_per_warp)
            first = shared.masses + first + lax.rem(place, slices.tiles)
            parts = [
                self.threads.gather(self.ref, first + w * shared.masses_per_warp)
                for w in range(WARPS)
            ]
            found.append(jnp.where(tile < count, tree_sum(parts), 0.0))
        return found

    def cells(self, masses: list[jax.Array]) -> jax.Array:
        """Each warp's numbers, within the block.

        Args:
          masses: float32 ``[128]`` each, at most eight, the same in all threads of a warp.

        Returns:
          By lane: those of the first array by warp, then of the second, and so on, then 0.
        """
        if self.threads.interpreted:
            return _by_lane(jnp.stack([m[w * WARP] for m in masses for w in range(WARPS)]))
        begin, count = self.shared.cells, len(masses) * WARPS
        thread = self.threads.index()
        warp, lane = lax.div(thread, WARP), thread & (WARP - 1)
        for i, mass in enumerate(masses):
            self.threads.scatter(self.ref, begin + i * WARPS + warp, mass, lane == 0)
        self.threads.meet()
        found = self.threads.gather(self.ref, begin + jnp.minimum(lane, count - 1))
        return jnp.where(lane < count, found, 0.0)


def _rounds(thread: jax.Array, count: int) -> list[jax.Array]:
    """So many things dealt to the lanes of a warp, 32 at a time."""
    return [start + (thread & (WARP - 1)) for start in range(0, count, WARP)]


def _by_lane(values: jax.Array) -> jax.Array:
    """Up to 32 values as ``[128]``, the same in each warp."""
    padded = jnp.pad(values, (0, WARP - values.shape[0]))
    return jnp.broadcast_to(padded, (THREADS // WARP, WARP)).reshape(THREADS)


def tree_sum(xs: list[jax.Array]) -> jax.Array:
    """Sum of arrays, in pairs: short chains of additions."""
    while len(xs) > 1:
        xs = [a + b for a, b in zip(xs[::2], xs[1::2], strict=False)] + xs[len(xs) // 2 * 2 :]
    return xs[0]
