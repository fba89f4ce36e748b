"""`threads.Threads` in jnp, for GPU interpret mode.

Exchanges between CTAs go through global memory and a barrier of the cluster. They take the same
slots, phases and parities as on a GPU, and check them: if a GPU would wait for the wrong phase, NaN
is read here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.mosaic.threads import (
    THREADS,
    WARP,
    WARPS,
    ExchangeSlot,
    Ref,
    RowTiles,
    Shuffle,
    Threads,
)
from jax_specdec._src.rows.tiles import TILE


class ExchangeBarriers(NamedTuple):
    """Replaces the mbarriers of exchanges."""

    cluster: Any  # the barrier of all CTAs; None if there is one
    completed: Ref  # int32 ref in shared memory, how many phases of each mbarrier are complete


class InterpretedThreads(Threads):
    """A warpgroup's operations; see `threads.Threads`. Threads are the entries of arrays."""

    interpreted = True

    def __init__(self) -> None:
        super().__init__(jnp.arange(THREADS, dtype=jnp.int32))

    def index_anew(self) -> jax.Array:
        return self.index

    def filled(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((THREADS,), value, dtype)

    # Within a warp.

    def _per_warp(self, fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        # [4 warps, 32 lanes], and what `fn` gives of each warp for all of its lanes.
        return jnp.broadcast_to(fn(x.reshape(WARPS, WARP)), (WARPS, WARP)).reshape(THREADS)

    def warp_max(self, x: jax.Array) -> jax.Array:
        return self._per_warp(lambda x: jnp.max(x, axis=1, keepdims=True), x)

    def warp_min(self, x: jax.Array) -> jax.Array:
        return self._per_warp(lambda x: jnp.min(x, axis=1, keepdims=True), x)

    def has_twin(self, x: jax.Array) -> jax.Array:
        # [warps, lanes, lanes]: each lane equals itself, and its twins.
        x = x.reshape(WARPS, WARP)
        return ((x[:, :, None] == x[:, None, :]).sum(axis=2) > 1).reshape(THREADS)

    def warp_sum(self, x: jax.Array, lanes: int = WARP) -> jax.Array:
        return jnp.repeat(x.reshape(-1, lanes).sum(axis=1), lanes)

    def warp_scan(self, x: jax.Array) -> jax.Array:
        return self._per_warp(lambda x: jnp.cumsum(x, axis=1), x)

    def shuffle(self, x: jax.Array, lane: jax.Array | int, how: Shuffle = "idx") -> jax.Array:
        # [128]: the lane that each thread reads, then its thread
        if how == "bfly":
            lane = self.lane ^ lane
        elif how == "up":
            lane = jnp.where(self.lane < lane, self.lane, self.lane - lane)
        return x[self.index - self.lane + lane % WARP]  # in the thread's own warp

    def scalar(self, x: jax.Array) -> jax.Array:
        return x[0]

    # Barriers.

    def sync(self) -> None:
        plgpu.commit_smem()

    def sync_cta(self, warpgroups: int, barrier: Any) -> None:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def fence_copies(self) -> None:
        plgpu.commit_smem()

    def init_barriers(self, barriers: Any, count: int) -> None:
        pass

    def cluster_wait(self) -> None:
        pass

    def cluster_sync(self, barrier: Any) -> None:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def wait(self, barriers: Ref, barrier: jax.Array, parity: jax.Array) -> None:
        plgpu.barrier_wait(barriers.at[barrier])

    def exchange(self, slot: ExchangeSlot, values: list[jax.Array]) -> None:
        """Exchanges as on a GPU, but through global memory, which the whole cluster shares."""
        plgpu.commit_smem()  # all wait for all: copies may now overwrite what was read
        barriers: ExchangeBarriers = slot.barriers
        completed = barriers.completed[slot.barrier]
        # An mbarrier passes those that wait for the parity of the phase completed last.
        right = (completed & 1) == slot.parity
        barriers.completed[slot.barrier] = completed + 1
        # [4 warps, values]: what a warp sends lies together in memory.
        by_warp = jnp.stack([x[::WARP] for x in values], axis=1)
        sent = jnp.where(right, by_warp, jnp.nan).reshape(-1)
        slot.memory[pl.ds(slot.place[0], sent.size)] = sent
        if barriers.cluster is not None:
            plgpu.barrier_arrive(barriers.cluster)
            plgpu.barrier_wait(barriers.cluster)

    # Copies.

    def copy_tiles(
        self,
        tiles: RowTiles,
        buffer: Ref,
        stride: int,
        barriers: Ref,
        first_barrier: jax.Array | int,
    ) -> None:
        matrix, row, first, size, count = tiles

        def copy(tile: int, length: int) -> None:
            plgpu.copy_gmem_to_smem(
                matrix.at[row, pl.ds(first + tile * TILE, length)],
                buffer.at[pl.ds(tile * stride, length)],
                barriers.at[first_barrier + tile],
            )

        # A copy has a static length here: that of a whole tile, or of the last one of the row.
        for tile in range(count):
            # Entries from the tile's first one to the end of the row.
            rest = size - (first + tile * TILE)
            pl.when(rest >= TILE)(functools.partial(copy, tile, TILE))
            if size % TILE:
                is_part = (rest > 0) & (rest < TILE)
                pl.when(is_part)(functools.partial(copy, tile, size % TILE))

    def copy_shift(self, matrix: Ref, row: jax.Array) -> jax.Array | int:
        return 0

    def prefetch_tiles(self, tiles: RowTiles) -> None:
        pass

    # Reading and writing.

    def gather(self, ref: Ref, *indices: jax.Array) -> jax.Array:
        # The whole ref is loaded: interpret mode knows no indices that differ between threads.
        # [128]: then widened as a GPU does
        values = ref[...][indices]
        if jnp.issubdtype(values.dtype, jnp.floating):
            return values.astype(jnp.float32)
        return values if values.dtype == jnp.uint32 else values.astype(jnp.int32)

    def scatter(self, ref: Ref, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        @pl.when(where.any())  # the whole of it is written
        def _() -> None:
            # A place past the end is dropped.
            place = jnp.where(where, index, ref.shape[0])
            ref[...] = ref[...].at[place].set(value.astype(ref.dtype), mode="drop")

    def scatter_warps(self, ref: Ref, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        def store(first: int) -> None:
            own = value[first : first + WARP].astype(ref.dtype)
            ref[pl.ds(index[first], WARP)] = own

        for first in range(0, THREADS, WARP):
            pl.when(where[first])(functools.partial(store, first))

    def entries(
        self, ref: Ref, start: jax.Array, each: int, *, aligned: bool, offset: int = 0
    ) -> list[jax.Array]:
        start = start + offset
        # [128] for each of `each` entries, from a start for each thread or for all.
        if start.ndim:  # a start for each thread
            place = start + self.index * each
            return [ref[...][place + j].astype(jnp.float32) for j in range(each)]
        # [128 * each] -> [128, each], a row for each thread.
        loaded = ref[pl.ds(start, THREADS * each)].astype(jnp.float32).reshape(THREADS, each)
        return [loaded[:, j] for j in range(each)]

    def row_words(self, ref: Ref, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        return [ref[...][row, start + j] for j in range(each)]  # entries stand for words

    def numbers(self, words: list[jax.Array], dtype: Any) -> list[jax.Array]:
        return [x.astype(jnp.float32) for x in words]

    def row_run(
        self, ref: Ref, row: jax.Array, start: jax.Array, offset: int, each: int
    ) -> list[jax.Array]:
        return [ref[...][row, start + offset + j].astype(jnp.float32) for j in range(each)]
