"""One launch that reads many rows once each: of every row its mass, or its argmax.

What a device knows of its part of a vocabulary. Each warp writes what its part of a row shows, and
what all warps show is put together outside.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu import signals, statistics
from jax_specdec._src.verify.mosaic_gpu.config import WARPS, KernelConfig
from jax_specdec._src.verify.mosaic_gpu.interpreted import Interpreted
from jax_specdec._src.verify.mosaic_gpu.launch import launch
from jax_specdec._src.verify.mosaic_gpu.request import LARGEST, LOG2E
from jax_specdec._src.verify.mosaic_gpu.rows import Tiles
from jax_specdec._src.verify.mosaic_gpu.support import plan_rows
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Gpu


def row_statistics(
    logits: jax.Array,
    rows: jax.Array,
    inv_temperature: jax.Array,
    by_argmax: jax.Array,
    wanted: jax.Array,
    first_id: jax.Array,
    *,
    size: int,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Statistics of some rows of a matrix.

    Args:
      logits: ``[M, V]``, a device's part of the vocabulary.
      rows: ``[G]`` int32, in range; those of B requests, as many of each.
      inv_temperature: ``[B]`` float32.
      by_argmax: ``[B]`` bool, requests of whose rows the argmax is wanted and no sum.
      wanted: ``[G]`` bool, rows to read at all.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary that count.
      config: choices of speed, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[G]`` each: a logit of the order of the row's largest, that one itself for an argmax, -inf
      where there is none; ``sum(exp((x - that) / temperature))``; and the argmax, ties to the
      lowest id. A row that holds NaN or +inf has one for the first.
    """
    num_rows, interpreted = rows.shape[0], bool(interpret)
    shared = plan_rows(logits, num_rows, config)
    slices = shared.slices
    per_request = num_rows // inv_temperature.shape[0]
    operands = [logits, rows, inv_temperature, by_argmax, wanted, first_id[None]]
    scratch: list[Any] = [plgpu.SMEM((slices.tiles * shared.target_stride,), logits.dtype)]
    if interpreted:
        scratch.append(plgpu.Barrier(num_barriers=slices.tiles))
    else:
        scratch.append(plgpu.SMEM((2 * slices.tiles,), jnp.int32))

    def read_rows(*refs: Any) -> None:
        logits, rows, inv, by_argmax, wanted, first_id, peaks, others, held, barriers = refs
        threads: Any = Interpreted() if interpreted else Gpu()
        block = jnp.int32(0) if interpreted else lax.axis_index("block")
        index = lax.axis_index("row")
        request = lax.div(index, per_request)
        if not interpreted:
            signals.open_barriers(barriers, slices.tiles)
        target = Tiles(
            threads=threads,
            rows=logits,
            held=held,
            barriers=barriers,
            per_slice=slices.tiles,
            stride=shared.target_stride,
            first_barrier=0,
            first=block * slices.ids,
            size=slices.size,
            each=shared.each,
            end=jnp.clip(size - first_id[0], 0, slices.size),
        )

        def flag(ref: Any, index: jax.Array) -> jax.Array:
            return threads.scalar(threads.gather(ref, threads.filled(0, jnp.int32) + index)) != 0

        is_wanted, row = flag(wanted, index), rows[index]
        pl.when(is_wanted)(lambda: target.open(row))
        target.prepare()
        if not interpreted:
            signals.meet()
        scale = jnp.minimum(inv[request] * LOG2E, LARGEST)
        zero = jnp.int32(0)

        def look() -> tuple[jax.Array, jax.Array]:
            return lax.cond(
                flag(by_argmax, request),
                lambda: statistics.max_and_place(target, row, zero),
                lambda: statistics.base_and_sum(target, row, zero, scale),
            )

        nothing = threads.filled(-jnp.inf), threads.filled(0.0)
        peak, other = lax.cond(is_wanted, look, lambda: nothing)
        lane = threads.index() & (WARP - 1)
        place = (index * slices.cluster + block) * WARPS + lax.div(threads.index(), WARP)
        threads.scatter(peaks, place, peak, lane == 0)
        threads.scatter(others, place, other, lane == 0)

    warps = jax.ShapeDtypeStruct((num_rows * slices.warps,), jnp.float32)
    found = launch(
        read_rows,
        operands,
        out=[warps, warps],
        scratch=scratch,
        grid=("row", num_rows),
        cluster=slices.cluster,
        interpret=interpret,
    )
    peaks, others = (x.reshape(num_rows, slices.warps) for x in found)
    return _together(list(peaks.T), list(others.T), jnp.repeat(inv_temperature, per_request))


def _together(
    peaks: list[jax.Array], others: list[jax.Array], inv_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each warp ``[G]`` shows of a row; one by one, which XLA fuses with what follows."""
    peak, total, place = functools.reduce(jnp.maximum, peaks), jnp.float32(0), jnp.int32(2**30)
    for mine, other in zip(peaks, others, strict=True):
        decay = jnp.exp(jnp.minimum((mine - peak) * inv_temperature, 0.0))
        total = total + jnp.where(mine > -jnp.inf, other * decay, 0.0)
        found = lax.bitcast_convert_type(other, jnp.int32)
        place = jnp.where(mine == peak, jnp.minimum(place, found), place)
    return peak, total, place
