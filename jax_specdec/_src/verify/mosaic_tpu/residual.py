"""Residual masses of rows by tile, of rows copied where they lie, in pairs.

A step of the grid has eight sources, one in each sublane of a register, and up to nine tiles of
ids. The next step's rows are copied meanwhile. 16-bit rows lie in memory two by two, so that a pair
is copied, and each sublane takes its half.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_specdec._src.verify import rules
from jax_specdec._src.verify.largest import LANES
from jax_specdec._src.verify.mosaic_tpu.statistics import tiles_of_block
from jax_specdec._src.verify.tiles import TILE, num_tiles

ROWS = 8
"""Sources of a step."""

_CHUNKS = TILE // LANES
_LOG2E = 1.4426950408889634


def residual_masses(
    target: jax.Array,
    draft: jax.Array,
    end: int,
    rows: tuple[jax.Array, jax.Array],
    of_target: tuple[jax.Array, jax.Array, jax.Array],
    of_draft: tuple[jax.Array, jax.Array, jax.Array] | None,
    inv_temperature: jax.Array,
    weight: jax.Array,
) -> jax.Array | None:
    """Sums of ``(weight * p - q)+`` by tile, NaN where a tile has a bad q.

    Args:
      target: ``[M, V]`` logits.
      draft: ``[R, V]`` probabilities or logits.
      end: columns from it on are padding.
      rows: ``[n]`` int32, the row of each source in `target` and in `draft`, in range.
      of_target: ``[n]`` float32 each: what is subtracted from a logit, then from its product with
        `inv_temperature`, to give the logarithm of p; and the least logit that p is not 0 for.
      of_draft: the same of q; None if `draft` has probabilities.
      inv_temperature: ``[n]`` float32.
      weight: ``[n]`` float32.

    Returns:
      ``[n, T]`` float32, of all tiles; None if it cannot copy the rows: if they are float16 or not
      a multiple of 128 wide, or bfloat16 and not an even number.
    """
    for x in (target, draft):
        if x.dtype == jnp.float16 or x.shape[1] % LANES or x.shape[0] % _copied(x):
            return None
    n, width = rows[0].shape[0], target.shape[1]
    count = num_tiles(width)
    tiles = tiles_of_block(count)
    blocks, groups = pl.cdiv(count, tiles), pl.cdiv(n, ROWS)
    lanes = pl.cdiv(blocks * tiles, LANES) * LANES
    numbers = [jnp.minimum(inv_temperature * _LOG2E, jnp.finfo(jnp.float32).max), weight]
    for shift, log_scale, least in filter(None, (of_target, of_draft)):
        numbers += [shift, log_scale * _LOG2E, least]
    odd = [jnp.where(row % 2 == 1, 1.0, 0.0) for row in rows]
    sources = jnp.stack(numbers + odd, axis=1)
    missing = groups * ROWS - n
    sources = jnp.pad(sources, ((0, missing), (0, 0)))
    rows_padded = [jnp.pad(row, (0, missing)) for row in rows]
    matrices = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (target, draft)]
    taken = sum(n * _copied(x) * width * x.dtype.itemsize for x in matrices)
    found = pl.pallas_call(
        functools.partial(
            _kernel, end=end, width=width, tiles=tiles, is_logits=of_draft is not None
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, blocks),
            in_specs=[
                pl.BlockSpec((ROWS, sources.shape[1]), lambda i, j, *_: (i, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec((ROWS, lanes), lambda i, j, *_: (i, 0)),
            scratch_shapes=[
                *(pltpu.VMEM((2, ROWS * _copied(x), tiles * TILE), x.dtype) for x in matrices),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((groups * ROWS, lanes), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=8 * 2**20
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * n * width, transcendentals=2 * n * width, bytes_accessed=taken
        ),
        name="residual_masses",
    )(*rows_padded, sources, *matrices)
    return found[:n, :count]


def _copied(matrix: jax.Array) -> int:
    """Rows that are copied to have one."""
    return 4 // matrix.dtype.itemsize


def _kernel(
    row_ref: Any,
    draft_row_ref: Any,
    source_ref: Any,
    target_ref: Any,
    draft_ref: Any,
    masses_ref: Any,
    target_rows: Any,
    draft_rows: Any,
    arrived: Any,
    *,
    end: int,
    width: int,
    tiles: int,
    is_logits: bool,
) -> None:
    """One block of sources and tiles."""
    group, block = pl.program_id(0), pl.program_id(1)
    groups, blocks = pl.num_programs(0), pl.num_programs(1)
    step, size = group * blocks + block, tiles * TILE
    slot = lax.rem(step, 2)
    given = (target_ref, row_ref, target_rows), (draft_ref, draft_row_ref, draft_rows)
    rest = width - (math.ceil(width / size) - 1) * size  # columns of the last block

    def copies(step: jax.Array, columns: int) -> list[Any]:
        of_group, of_block, slot = lax.div(step, blocks), lax.rem(step, blocks), lax.rem(step, 2)
        from_column = pl.ds(pl.multiple_of(of_block * size, TILE), columns)
        found = []
        for matrix, rows, kept in given:
            pair = _copied(matrix)
            for k in range(ROWS):
                first = lax.div(rows[of_group * ROWS + k], pair) * pair
                source = matrix.at[pl.ds(pl.multiple_of(first, pair), pair), from_column]
                to = kept.at[slot, pl.ds(k * pair, pair), pl.ds(0, columns)]
                found.append(pltpu.make_async_copy(source, to, arrived.at[slot]))
        return found

    def for_all(step: jax.Array, act: Any) -> None:
        is_last = lax.rem(step, blocks) == blocks - 1

        @pl.when(is_last)
        def _() -> None:
            for copy in copies(step, rest):
                act(copy)

        @pl.when(jnp.logical_not(is_last))
        def _() -> None:
            for copy in copies(step, size):
                act(copy)

    @pl.when(step == 0)
    def _() -> None:
        for_all(step, lambda copy: copy.start())

    @pl.when(step + 1 < groups * blocks)
    def _() -> None:
        for_all(step + 1, lambda copy: copy.start())

    for_all(step, lambda copy: copy.wait())

    @pl.when(block == 0)
    def _() -> None:
        masses_ref[...] = jnp.zeros_like(masses_ref)

    inv, weight, *numbers = (
        jnp.broadcast_to(source_ref[:, i : i + 1], (ROWS, LANES))
        for i in range(source_ref.shape[1])
    )
    is_odd = [x > 0 for x in numbers[-2:]]

    def entries(kept: Any, is_odd: jax.Array, chunk: int) -> jax.Array:
        x = kept[slot, :, pl.ds(chunk * LANES, LANES)]
        if x.dtype == jnp.float32:
            return x
        bits = pltpu.bitcast(x, jnp.int32)  # an even row is in the low half
        bits = jnp.where(is_odd, bits & jnp.int32(-65536), bits << 16)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def probs(x: jax.Array, shift: jax.Array, log_scale: jax.Array, least: jax.Array) -> jax.Array:
        return jnp.where(x < least, 0.0, jnp.exp2((x - shift) * inv - log_scale))

    left_here = end - block * size
    lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)

    def residual(chunk: int) -> jax.Array:
        p = probs(entries(target_rows, is_odd[0], chunk), *numbers[:3])
        q = entries(draft_rows, is_odd[1], chunk)
        q = probs(q, *numbers[3:6]) if is_logits else jnp.where(q >= 0, q, jnp.nan)
        return rules.residual(weight, p, q)

    def masses(is_last: bool) -> None:
        tile, found = lax.broadcasted_iota(jnp.int32, masses_ref.shape, 1), masses_ref[...]
        for t in range(tiles):
            total = jnp.zeros((ROWS, LANES), jnp.float32)
            for chunk in range(t * _CHUNKS, (t + 1) * _CHUNKS):
                here = residual(chunk)
                if is_last:
                    here = jnp.where(lane + chunk * LANES < left_here, here, 0.0)
                total += here
            of_tile = jnp.sum(total, axis=1, keepdims=True)
            found = jnp.where(tile == block * tiles + t, of_tile, found)
        masses_ref[...] = found

    @pl.when(left_here < size)
    def _() -> None:
        masses(True)

    @pl.when(left_here >= size)
    def _() -> None:
        masses(False)
