"""What the threads of a warpgroup do, in jnp: for GPU interpret mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu.threads import THREADS, WARP, WARPS


class Interpreted:
    """The operations of `threads.Gpu`: one warpgroup, whose threads are the entries of arrays."""

    interpreted = True

    @staticmethod
    def index() -> jax.Array:
        return jnp.arange(THREADS, dtype=jnp.int32)

    index_anew = index

    @staticmethod
    def _per_warp(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(fn(x.reshape(WARPS, WARP)), (WARPS, WARP)).reshape(THREADS)

    def warp_max(self, x: jax.Array) -> jax.Array:
        return self._per_warp(lambda x: jnp.max(x, axis=1, keepdims=True), x)

    def warp_min(self, x: jax.Array) -> jax.Array:
        return self._per_warp(lambda x: jnp.min(x, axis=1, keepdims=True), x)

    @staticmethod
    def warp_sum(x: jax.Array, lanes: int = WARP) -> jax.Array:
        return jnp.repeat(x.reshape(-1, lanes).sum(axis=1), lanes)

    @staticmethod
    def swapped(x: jax.Array, distance: int) -> jax.Array:
        return x[jnp.arange(THREADS, dtype=jnp.int32) ^ distance]

    def warp_scan(self, x: jax.Array) -> jax.Array:
        return self._per_warp(lambda x: jnp.cumsum(x, axis=1), x)

    @staticmethod
    def from_lane(x: jax.Array, lane: Any) -> jax.Array:
        thread = jnp.arange(THREADS, dtype=jnp.int32)
        return x[thread // WARP * WARP + lane % WARP]

    @staticmethod
    def scalar(x: jax.Array) -> jax.Array:
        return x[0]

    @staticmethod
    def meet() -> None:
        plgpu.commit_smem()

    written = meet

    @staticmethod
    def either(which: jax.Array, first: Any, second: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(which, a, b), first(), second())

    @staticmethod
    def gather(ref: Any, *indices: jax.Array) -> jax.Array:
        values = ref[...][indices]
        return values.astype(
            jnp.float32
            if jnp.issubdtype(values.dtype, jnp.floating)
            else jnp.uint32
            if values.dtype == jnp.uint32
            else jnp.int32
        )

    @staticmethod
    def scatter(ref: Any, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        size = ref.shape[0]
        place = jnp.where(where, index, size)
        ref[...] = ref[...].at[place].set(value.astype(ref.dtype), mode="drop")

    @staticmethod
    def fill(ref: Any, start: jax.Array, begin: jax.Array, end: int, value: float) -> None:
        place, some = jnp.arange(end, dtype=jnp.int32), pl.ds(start, end)
        ref[some] = jnp.where(place >= begin, jnp.asarray(value, ref.dtype), ref[some])

    @staticmethod
    def entries(
        ref: Any, start: jax.Array, each: int, *, aligned: bool, offset: int = 0
    ) -> list[jax.Array]:
        del aligned
        start = start + offset
        if start.ndim:
            place = start + jnp.arange(THREADS, dtype=jnp.int32) * each
            return [ref[...][place + j].astype(jnp.float32) for j in range(each)]
        loaded = ref[pl.ds(start, THREADS * each)].astype(jnp.float32).reshape(THREADS, each)
        return [loaded[:, j] for j in range(each)]

    @staticmethod
    def row_run(
        ref: Any, row: jax.Array, start: jax.Array, offset: int, each: int
    ) -> list[jax.Array]:
        return [ref[...][row, start + offset + j].astype(jnp.float32) for j in range(each)]

    def row_entries(self, ref: Any, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        return self.row_run(ref, row, start, 0, each)

    def row_words(self, ref: Any, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        return self.row_entries(ref, row, start, each)

    @staticmethod
    def numbers(words: list[jax.Array], dtype: Any) -> list[jax.Array]:
        del dtype
        return words

    @staticmethod
    def filled(value: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full((THREADS,), value, dtype)
