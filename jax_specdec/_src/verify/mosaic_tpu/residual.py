"""Residual masses of rows by tile, of rows copied where they lie, in pairs.

A step of the grid has eight sources, one in each sublane of a register, and a block of tiles. The
next step's rows are copied meanwhile. 16-bit rows lie in memory two by two, so that a pair is
copied, and each sublane takes its half. Where a source has the other half of the pair of the source
before it, as those of one request have, the pair is copied once.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_tpu import support
from jax_specdec._src.verify.mosaic_tpu.blocks import VMEM, Blocks, clear, in_powers_of_two, of_rows
from jax_specdec._src.verify.mosaic_tpu.largest import LANES
from jax_specdec._src.verify.q import Dense, Logits, Stored
from jax_specdec._src.verify.rows import Rows
from jax_specdec._src.verify.source import Source
from jax_specdec._src.verify.tiles import num_tiles

ROWS = 8
"""Sources of a step."""

_TILES = 21
"""Tiles of a step, at most: with two steps' rows in float32, 5.5 MB of vector memory."""


def serves(target: Rows, q: Stored) -> bool:
    """Returns whether rows can be copied.

    They cannot if they are parts, or not of the same ids, or float16, or not a multiple of 128
    wide, or bfloat16 and not an even number, or on a TPU v2 or v3.
    """
    if not isinstance(q, Dense) or target.part.is_split or not support.copies_rows():
        return False
    width = target.matrix.shape[1]
    for x in (target.matrix, q.storage.matrix):
        is_even = x.shape[0] % _copied(x) == 0
        if x.dtype == jnp.float16 or x.shape[1] != width or width % LANES or not is_even:
            return False
    return True


def residual_masses(target: Rows, q: Stored, source: Source) -> jax.Array:
    """Returns sums of ``(weight * p - q)+`` by tile, NaN where a tile has a bad q.

    Args:
      target: target rows that `serves` serves.
      q: draft rows.
      source: ``[n]``, of which those are read that use q.

    Returns:
      ``[n, T]`` float32, 0 for sources that are not read.
    """
    storage = q.storage
    n = source.row.shape[0]
    matrices = target.matrix, storage.matrix
    width = target.matrix.shape[1]
    # [n]: the rows of each source, -1 where nothing is read
    is_read = source.uses_q & (source.row >= 0)
    draft_row = jnp.clip(source.draft_row, 0, matrices[1].shape[0] - 1)
    index = [jnp.where(is_read, row, -1) for row in (source.row, draft_row)]
    pairs, halves = zip(*map(_places, index, matrices), strict=True)
    # [n, 8]: the numbers of each source, in powers of two; q has three if it is in logits
    scales = [(source.scale, source.threshold)]
    if isinstance(q.kind, Logits):
        least = None if storage.thresholds is None else storage.thresholds[draft_row]
        scales.append((source.draft_scale.scale, least))
    numbers = [in_powers_of_two(source.inv_temperature), source.weight, *halves]
    for (shift, log_scale), least in scales:
        none = jnp.full_like(shift, -jnp.inf)
        numbers += [shift, in_powers_of_two(log_scale), none if least is None else least]
    # The grid goes over groups of eight sources, and over the blocks of their rows.
    blocks = Blocks.of(width, _TILES)
    groups = pl.cdiv(n, ROWS)
    missing = groups * ROWS - n
    in_place = pl.BlockSpec(memory_space=pltpu.HBM)
    # At most every row once: sources of neighbouring rows follow each other.
    taken = sum(min(n * _copied(x), x.shape[0]) * width * x.dtype.itemsize for x in matrices)
    found = pl.pallas_call(
        functools.partial(
            _kernel,
            end=min(target.width, storage.width),
            width=width,
            blocks=blocks,
            fills=(target.fill, storage.fill),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,  # which rows to copy
            grid=(groups, blocks.num),
            in_specs=[of_rows(ROWS, len(numbers)), in_place, in_place],
            out_specs=of_rows(ROWS, blocks.num_sums),
            # Of each matrix the rows of two steps, and a semaphore for each.
            scratch_shapes=[
                *(pltpu.VMEM((2, ROWS * _copied(x), blocks.width), x.dtype) for x in matrices),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((n, blocks.num_sums), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            # One step starts the copies of the next.
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * n * width, transcendentals=2 * n * width, bytes_accessed=taken
        ),
        name="residual_masses",
    )(
        *(jnp.pad(pair, (0, missing), constant_values=-1) for pair in pairs),
        jnp.stack(numbers, axis=1),
        *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in matrices),
    )
    return jnp.where(is_read[:, None], found[:, : num_tiles(width)], 0.0)


def _copied(matrix: jax.Array) -> int:
    """Returns how many rows are copied to have one."""
    return 4 // matrix.dtype.itemsize


def _places(row: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where the row of each source is.

    Returns:
      ``[n]`` int32, the pair that is copied for it, or -1; and ``[n]`` float32: 0 or 1 if it is the
      first or second row of that pair, 2 if it is the second row of the pair of the source before.
    """
    copied = _copied(matrix)
    half = row % copied
    # The first source of a step has none before it.
    is_first = jnp.arange(row.shape[0], dtype=jnp.int32) % ROWS == 0
    is_shared = (half == 1) & (jnp.roll(row, 1) == row - 1) & ~is_first
    pair = jnp.where(is_shared | (row < 0), -1, lax.div(row, jnp.int32(copied)))
    return pair, jnp.where(is_shared, 2.0, half.astype(jnp.float32))


def _kernel(
    target_pair_ref: Any,
    draft_pair_ref: Any,
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
    blocks: Blocks,
    fills: tuple[float, float],
) -> None:
    """One block of sources and tiles."""
    step = pl.program_id(0) * blocks.num + pl.program_id(1)
    block = pl.program_id(1)
    slot = lax.rem(step, 2)  # rows of this step are in one, those of the next arrive in the other
    last = blocks.num - 1
    given = (target_ref, target_pair_ref, target_rows), (draft_ref, draft_pair_ref, draft_rows)

    def for_copies(step: jax.Array, act: Callable[[Any], None]) -> None:
        """Calls `act` with each copy of a step: to start it, or to wait for it."""
        of_group = lax.div(step, blocks.num)
        of_block = lax.rem(step, blocks.num)
        slot = lax.rem(step, 2)

        def of_columns(count: int) -> None:
            columns = pl.ds(of_block * blocks.width, count)
            for k, (matrix, pairs, kept) in itertools.product(range(ROWS), given):
                pair, copied = pairs[of_group * ROWS + k], _copied(matrix)
                source = matrix.at[pl.ds(pair * copied, copied), columns]
                to = kept.at[slot, pl.ds(k * copied, copied), pl.ds(0, count)]
                copy = pltpu.make_async_copy(source, to, arrived.at[slot])
                pl.when(pair >= 0)(functools.partial(act, copy))

        pl.when(of_block == last)(lambda: of_columns(width - last * blocks.width))
        pl.when(of_block < last)(lambda: of_columns(blocks.width))

    start, num_steps = operator.methodcaller("start"), pl.num_programs(0) * blocks.num
    pl.when(step == 0)(lambda: for_copies(step, start))
    pl.when(step + 1 < num_steps)(lambda: for_copies(step + 1, start))
    for_copies(step, operator.methodcaller("wait"))
    # Past the last id anything may stand.
    for kept, fill in zip((target_rows, draft_rows), fills, strict=True):
        clear(kept.at[slot], end - block * blocks.width, fill)

    # [8, 128] each: a number of each source in all lanes
    inv, weight, *halves_and_scales = (
        jnp.broadcast_to(source_ref[:, i : i + 1], (ROWS, LANES))
        for i in range(source_ref.shape[1])
    )
    halves, of_target, of_draft = (halves_and_scales[i:j] for i, j in ((0, 2), (2, 5), (5, 8)))

    def entries(kept: Any, half: jax.Array, chunk: int) -> jax.Array:
        """Returns ``[8, 128]`` float32, a chunk of the row of each source."""
        x = kept[slot, :, pl.ds(chunk * LANES, LANES)]
        if x.dtype == jnp.float32:
            return x
        # Of 16-bit rows the pairs have come: take the half that the row is in.
        bits = pltpu.bitcast(x, jnp.int32)  # the first row is in the low half
        bits = jnp.where(half > 1, pltpu.roll(bits, 1, axis=0), bits)
        bits = jnp.where(half > 0, bits & jnp.int32(-65536), bits << 16)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def probs(x: jax.Array, shift: jax.Array, log_scale: jax.Array, least: jax.Array) -> jax.Array:
        return jnp.where(x < least, 0.0, jnp.exp2((x - shift) * inv - log_scale))

    def residual(chunk: int) -> jax.Array:
        p = probs(entries(target_rows, halves[0], chunk), *of_target)
        q = entries(draft_rows, halves[1], chunk)
        q = probs(q, *of_draft) if of_draft else jnp.where(q >= 0, q, jnp.nan)
        return rules.residual(weight, p, q)

    @pl.when(block == 0)
    def _() -> None:
        masses_ref[...] = jnp.zeros_like(masses_ref)

    blocks.put_sums(masses_ref, residual)
