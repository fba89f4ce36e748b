"""What a block of the kernel does with its slice of a row, and how blocks meet."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu import exchange
from jax_specdec._src.verify.mosaic_gpu.buffers import RowBuffer, tree_sum
from jax_specdec._src.verify.mosaic_gpu.config import LANES, MAX_CLUSTER, KernelConfig, Slices

LOG2E = 1.4426950408889634
LARGEST = 3.4028235e38
VALUES = 4
MAILBOX = VALUES * MAX_CLUSTER
"""Floats per exchange: up to four values of eight blocks."""


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
      interpreted: whether it runs in GPU interpret mode, which has no inline PTX.
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
    interpreted: bool


# Columns of the array that holds what is known of each request besides rows: integers, ids and
# draft rows; then numbers, bit by bit, so that one fusion lays out all of it.
FIRST_ROW, NUM_DRAFTS, STATUS, GREEDY, STORED, BONUS, TOKEN_IDS = range(7)
INV_TEMPERATURE, U_TILE, U_TOKEN, ACCEPT = range(4)


def is_finite(x: jax.Array) -> jax.Array:
    return (x > -jnp.inf) & (x < jnp.inf)


class Block:
    """One block's view of its request, while the kernel is traced."""

    def __init__(self, call: Call, refs: dict[str, Any], request: jax.Array, block: jax.Array):
        self.call, self.refs, self.b, self.block = call, refs, request, block
        self.first_number = TOKEN_IDS + 2 * call.k
        self.inv = self.number(INV_TEMPERATURE)
        self.scale = jnp.minimum(self.inv * LOG2E, LARGEST)
        self.greedy = self.integer(GREEDY) == 1
        self.stored = self.integer(STORED) == 1
        self.status, self.first_row = self.integer(STATUS), self.integer(FIRST_ROW)
        self.num_drafts = self.integer(NUM_DRAFTS)
        self.num_rows = self.num_drafts + (0 if call.has_bonus else 1)
        self.bonus = self.integer(BONUS)
        self.u_tile, self.u_token = self.number(U_TILE), self.number(U_TOKEN)
        few = call.k <= 8
        self._token_ids = [self.integer(TOKEN_IDS + i) for i in range(call.k)] if few else None
        self._draft_rows = (
            [self.integer(TOKEN_IDS + call.k + i) for i in range(call.k)] if few else None
        )
        self._accept = [self.number(ACCEPT + i) for i in range(call.k)] if few else None

    def integer(self, column: Any) -> jax.Array:
        return self.refs["integers"][self.b, column]

    def number(self, column: Any) -> jax.Array:
        return lax.bitcast_convert_type(self.integer(self.first_number + column), jnp.float32)

    def _at(self, loaded: list[jax.Array] | None, load: Any, position: Any) -> jax.Array:
        """An entry per draft: chosen among registers where they are few, else loaded."""
        position = jnp.minimum(position, self.call.k - 1)
        if loaded is None:
            return load(position)
        chosen = loaded[0]
        for i, value in enumerate(loaded[1:], start=1):
            chosen = jnp.where(position == i, value, chosen)
        return chosen

    def token_id(self, position: Any) -> jax.Array:
        return self._at(self._token_ids, lambda i: self.integer(TOKEN_IDS + i), position)

    def draft_row(self, position: Any) -> jax.Array:
        start = TOKEN_IDS + self.call.k
        return self._at(self._draft_rows, lambda i: self.integer(start + i), position)

    def accept(self, position: Any) -> jax.Array:
        return self._at(self._accept, lambda i: self.number(ACCEPT + i), position)

    def is_proposed(self, position: Any) -> jax.Array:
        token_id = self.token_id(position)
        return (position < self.num_drafts) & (token_id >= 0) & (token_id < self.call.size)

    def exchange(self, turn: Any, *values: jax.Array) -> list[list[jax.Array]]:
        """Each block's numbers, in every block: ``[value][block]``; turns count from 0."""
        cluster = self.call.slices.cluster
        if cluster == 1:
            return [[value] for value in values]
        mail = self.refs["mail"]
        if self.call.interpreted:
            for v, value in enumerate(values):
                mail[self.b, turn, self.block * VALUES + v] = value
            plgpu.barrier_arrive(self.refs["meeting"])
            plgpu.barrier_wait(self.refs["meeting"])
            return [
                [mail[self.b, turn, i * VALUES + v] for i in range(cluster)]
                for v in range(len(values))
            ]
        box = lax.rem(turn, 2)
        exchange.send_and_wait(
            mail,
            self.refs["meeting"],
            box * MAILBOX + self.block * VALUES,
            box,
            lax.rem(lax.div(turn, 2), 2),
            values,
            cluster,
        )
        return [
            [mail[box * MAILBOX + i * VALUES + v] for i in range(cluster)]
            for v in range(len(values))
        ]

    def max_and_sum(self, buffer: RowBuffer) -> tuple[jax.Array, jax.Array]:
        """Of the slice: the largest entry, and the sum relative to it."""
        peak = self.peak(buffer)
        base = jnp.where(is_finite(peak), peak, 0.0)

        def add(tile: Any, total: jax.Array) -> jax.Array:
            return total + tree_sum(
                [jnp.exp2((x - base) * self.scale) for x in buffer.vectors(tile)]
            )

        return peak, jnp.sum(buffer.reduce(add, buffer.constant(0)))

    def peak(self, buffer: RowBuffer) -> jax.Array:
        """Of the slice: the largest entry, NaN if any is."""

        def larger(tile: Any, peaks: jax.Array) -> jax.Array:
            return functools.reduce(jnp.maximum, buffer.raw(tile), peaks)

        # As stored: two of two bytes are compared at a time.
        start = buffer.constant(-jnp.inf, buffer.ref.dtype)
        return jnp.max(buffer.reduce(larger, start)).astype(jnp.float32)

    def max_and_place(self, buffer: RowBuffer) -> tuple[jax.Array, jax.Array]:
        """Of the slice: the largest entry, and the lowest id that has it, as a number."""
        peak, ids = self.peak(buffer), self.call.slices.rows * LANES

        def lowest(tile: Any, places: jax.Array) -> jax.Array:
            hits = [
                jnp.where(x == peak, place, ids)
                for x, place in zip(buffer.vectors(tile), buffer.place(tile), strict=True)
            ]
            return functools.reduce(jnp.minimum, hits, places)

        place = jnp.min(buffer.reduce(lowest, buffer.constant(ids, jnp.int32)))
        return peak, (place + self.block * ids).astype(jnp.float32)

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
