"""What a block of the kernel does with its slice of a row, and how blocks meet."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu.buffers import RowBuffer, tree_sum
from jax_specdec._src.verify.mosaic_gpu.config import LANES, KernelConfig, Slices

LOG2E = 1.4426950408889634
LARGEST = 3.4028235e38
MAILBOX = 32
"""Floats per exchange in global memory: one cache line, four values of eight blocks."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about a launch.

    Attributes:
      k: drafts per request at most.
      size: ids that count.
      has_bonus: whether bonus tokens are given.
      rates: conditional rates of the synthetic rule, or None.
      draft: "none", "probs", "logits" or "normalized".
      draft_rows: rows stored.
      draft_size: ids that the drafter could draw.
      slices: how rows are cut.
      config: choices of speed.
      fenced: whether memory fences are needed: always, but in interpret mode.
    """

    k: int
    size: int
    has_bonus: bool
    rates: tuple[float, ...] | None
    draft: str
    draft_rows: int
    draft_size: int
    slices: Slices
    config: KernelConfig
    fenced: bool


# Columns of the two arrays that hold what is known of each request besides rows.
FIRST_ROW, NUM_DRAFTS, STATUS, GREEDY, STORED, BONUS, TOKEN_IDS = range(7)
INV_TEMPERATURE, U_TILE, U_TOKEN, ACCEPT = range(4)


def is_finite(x: jax.Array) -> jax.Array:
    return (x > -jnp.inf) & (x < jnp.inf)


def _fence() -> None:
    """Order memory among the blocks of a cluster: `barrier_arrive` does not."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import llvm

        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], "fence.acq_rel.cluster;", "~{memory}", has_side_effects=True)

    fence()


class Block:
    """One block's view of its request, while the kernel is traced."""

    def __init__(self, call: Call, refs: dict[str, Any], request: jax.Array, block: jax.Array):
        self.call, self.refs, self.b, self.block = call, refs, request, block
        self.inv = self.number(INV_TEMPERATURE)
        self.scale = jnp.minimum(self.inv * LOG2E, LARGEST)
        self.greedy = self.integer(GREEDY) == 1
        self.stored = self.integer(STORED) == 1
        self.num_drafts = self.integer(NUM_DRAFTS)
        self.num_rows = self.num_drafts + (0 if call.has_bonus else 1)

    def integer(self, column: Any) -> jax.Array:
        return self.refs["integers"][self.b, column]

    def number(self, column: Any) -> jax.Array:
        return self.refs["numbers"][self.b, column]

    def place(self, position: jax.Array) -> jax.Array:
        return jnp.minimum(position, self.call.k - 1)

    def token_id(self, position: jax.Array) -> jax.Array:
        return self.integer(TOKEN_IDS + self.place(position))

    def draft_row(self, position: jax.Array) -> jax.Array:
        return self.integer(TOKEN_IDS + self.call.k + self.place(position))

    def is_proposed(self, position: jax.Array) -> jax.Array:
        token_id = self.token_id(position)
        return (position < self.num_drafts) & (token_id >= 0) & (token_id < self.call.size)

    def exchange(self, slot: Any, *values: jax.Array) -> list[list[jax.Array]]:
        """Each block's numbers, in every block: ``[value][block]``."""
        cluster = self.call.slices.cluster
        if cluster == 1:
            return [[value] for value in values]
        mail = self.refs["mail"]
        for v, value in enumerate(values):
            mail[self.b, slot, v * 8 + self.block] = value
        if self.call.fenced:
            _fence()
        plgpu.barrier_arrive(self.refs["meeting"])
        plgpu.barrier_wait(self.refs["meeting"])
        if self.call.fenced:
            _fence()
        return [[mail[self.b, slot, v * 8 + i] for i in range(cluster)] for v in range(len(values))]

    def max_and_sum(self, buffer: RowBuffer) -> tuple[jax.Array, jax.Array]:
        """Of the slice: the largest entry, and the sum relative to it."""
        peak = self.peak(buffer)
        base = jnp.where(is_finite(peak), peak, 0.0)
        sums = [
            tree_sum([jnp.exp2((x - base) * self.scale) for x in buffer.vectors(tile)])
            for tile in range(self.call.slices.tiles)
        ]
        return peak, jnp.sum(tree_sum(sums))

    def peak(self, buffer: RowBuffer) -> jax.Array:
        peaks = None
        for tile in range(self.call.slices.tiles):
            for x in buffer.vectors(tile):
                peaks = x if peaks is None else jnp.maximum(peaks, x)
        return jnp.max(peaks)

    def max_and_place(self, buffer: RowBuffer) -> tuple[jax.Array, jax.Array]:
        """Of the slice: the largest entry, and the lowest id that has it, as a number."""
        peak = self.peak(buffer)
        first = None
        for tile in range(self.call.slices.tiles):
            for x, place in zip(buffer.vectors(tile), buffer.place(tile), strict=True):
                hit = jnp.where(x == peak, place, self.call.slices.rows * LANES)
                first = hit if first is None else jnp.minimum(first, hit)
        place = jnp.min(first) + self.block * (self.call.slices.rows * LANES)
        return peak, place.astype(jnp.float32)

    def combine(
        self, peaks: list[jax.Array], sums: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The row's largest entry, and each slice's mass relative to it."""
        peak = peaks[0]
        for other in peaks[1:]:
            peak = jnp.maximum(peak, other)
        return peak, [
            s * jnp.exp2((m - peak) * self.scale) for m, s in zip(peaks, sums, strict=True)
        ]
