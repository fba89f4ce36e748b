"""The product with an int8 matrix as a Mosaic GPU kernel for Hopper, for tens to hundreds of rows.

XLA keeps up with the memory for a few rows only. Here a block takes 128 outputs, 64 for each of two
warpgroups, up to 256 rows, and a part of the inputs, its split: few outputs would leave
multiprocessors idle otherwise. A third warpgroup brings tiles of integers and of rows to shared
memory, ahead of the products; the two turn integers into 16 bits in registers, from where the
matrix unit takes them. Splits are summed by XLA, in float32.

Many rows come from the L2 cache faster if two blocks share them: each brings half of a tile of rows
to both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # its stubs lack names, and call its transforms abstract

WARPGROUPS = 2
"""That multiply."""
OUTPUTS = 64
"""Of a warpgroup: rows of a tile of the matrix unit."""
MOST_ROWS = 256
"""Of a block: columns of a tile of the matrix unit."""
SHARED_ROWS = 160
"""More rows than these are split evenly over pairs of blocks that share them."""
SHARED_BYTES = 225 * 1024
"""Of tiles in the shared memory of a multiprocessor."""
MULTIPROCESSORS = 132
"""Of an H100: as many blocks are wanted, or twice as many if two fit on one."""
LEAST_TILES = 4
"""Of a split."""
MANY_OUTPUTS = 30_000
"""A matrix with more is an output matrix, whose product, the logits, many programs read."""


class Int8Shape(NamedTuple):
    """The sizes of a launch."""

    num_out: int  # a multiple of the outputs of a cluster
    num_in: int  # a multiple of `tile`
    padded: int  # rows, a multiple of `rows`
    rows: int  # of a block, a multiple of 8
    tile: int  # inputs of a tile
    stages: int  # tiles in shared memory
    splits: int  # of the inputs
    cluster: int  # blocks that share tiles of rows

    @classmethod
    def of(cls, num_rows: int, num_out: int, num_in: int) -> Int8Shape:
        """Returns the sizes that were fastest on an H100, for matrices of an 8B model."""
        row_blocks = 1
        unit = 8
        cluster = 1
        tile = 128
        if num_rows > SHARED_ROWS:
            # 32 sums are a line of memory, which a block then writes whole.
            row_blocks = -(-num_rows // MOST_ROWS)
            unit = 16 if row_blocks % 2 == 0 else 32
            cluster = 2
            tile = 64
        # Rows of a block: an even share of all, rounded up to whole units.
        rows = -(-num_rows // (row_blocks * unit)) * unit
        of_tile = tile * (WARPGROUPS * OUTPUTS + 2 * rows)  # bytes: integers, and rows of 16 bits
        stages = min(SHARED_BYTES // of_tile, 8)
        blocks = row_blocks * num_out // (WARPGROUPS * OUTPUTS)
        wanted = MULTIPROCESSORS
        if rows <= 40:  # two blocks fit on a multiprocessor, by their registers
            wanted = 2 * MULTIPROCESSORS
            stages = stages // 2
        # As many splits as fill the multiprocessors, each of 4 tiles at least.
        splits = min(wanted // blocks, num_in // tile // LEAST_TILES)
        return cls(
            num_out=num_out,
            num_in=num_in,
            padded=row_blocks * rows,
            rows=rows,
            tile=tile,
            stages=stages,
            splits=max(splits, 1),
            cluster=cluster,
        )


def product(x: jax.Array, values: jax.Array, scale: jax.Array, interpret: Any = False) -> jax.Array:
    """Returns ``[M, out]``; see `int8_matmul`.

    Args:
      x: ``[M, in]`` bfloat16 or float16; `in` is a multiple of 128.
      values: ``[out, in]`` int8; `out` is a multiple of 256.
      scale: ``[out]`` float32.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.
    """
    num_rows = x.shape[0]
    shape = Int8Shape.of(num_rows, *values.shape)
    # [M, in] -> [padded, in]
    rows = jnp.pad(x, ((0, shape.padded - num_rows), (0, 0)))
    with jax.enable_x64(False):
        sums = _launch(shape, x.dtype, interpret)(values, rows)
    # [splits, out, padded] -> [out, padded] -> [M, out]
    total = jnp.sum(sums, axis=0) * scale[:, None]
    scaled = total.astype(x.dtype).T[:num_rows]
    if shape.num_out > MANY_OUTPUTS:
        # Left to itself, XLA sums and transposes again in every program that reads a row of them.
        scaled = with_layout_constraint(scaled, Layout((0, 1)))
    return scaled


class Int8Operands(NamedTuple):
    """Refs in global memory, shared memory and barriers of a block."""

    values: Any  # [out, in] int8
    rows: Any  # [padded, in]
    sums: Any  # [splits, out, padded] float32
    tile_of_values: Any  # [stages, outputs of a block, tile]
    tile_of_rows: Any  # [stages, rows, tile]
    came: Any  # a barrier for each stage: both tiles are here
    read: Any  # likewise: all that multiply have read them, in all blocks of the cluster


def _launch(shape: Int8Shape, dtype: Any, interpret: Any) -> Callable[..., jax.Array]:
    """Returns the kernel, a function of the integers and the rows."""
    outputs = WARPGROUPS * OUTPUTS
    # Shared memory as the matrix unit reads it: tiles of 8 rows, swizzled. A row of integers has
    # 64 or 128 bytes.
    of_values = (plgpu.TilingTransform((8, shape.tile)), plgpu.SwizzleTransform(shape.tile))
    of_rows = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    read = plgpu.Barrier
    if shape.cluster > 1:
        read = functools.partial(plgpu.ClusterBarrier, collective_axes=("block",))
    scratch = (
        plgpu.SMEM((shape.stages, outputs, shape.tile), jnp.int8, transforms=of_values),
        plgpu.SMEM((shape.stages, shape.rows, shape.tile), dtype, transforms=of_rows),
        plgpu.Barrier(num_barriers=shape.stages, num_arrivals=2),
        read(num_barriers=shape.stages, num_arrivals=WARPGROUPS),
    )

    def run(*refs: Any) -> None:
        _multiply(shape, Int8Operands(*refs), bool(interpret))

    run.__name__ = "int8_matmul"
    clusters = shape.num_out // (outputs * shape.cluster)
    return plgpu.kernel(
        run,
        out_type=jax.ShapeDtypeStruct((shape.splits, shape.num_out, shape.padded), jnp.float32),
        scratch_types=scratch,
        grid=(shape.padded // shape.rows, clusters, shape.splits),
        grid_names=("rows", "outputs", "split"),
        cluster=(shape.cluster,),
        cluster_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )


def _multiply(shape: Int8Shape, operands: Int8Operands, interpreted: bool) -> None:
    """Writes the sums of a block: its outputs, for its rows, over the inputs of its split."""
    warpgroup = lax.axis_index("warpgroup")
    row = lax.axis_index("rows") * shape.rows
    block = lax.axis_index("outputs") * shape.cluster + lax.axis_index("block")
    output = block * (WARPGROUPS * OUTPUTS)
    # Tiles first..end-1 of the inputs, as many as others have, or one more.
    split = lax.axis_index("split")
    tiles = shape.num_in // shape.tile
    first = lax.div(split * tiles, jnp.int32(shape.splits))
    num_tiles = lax.div((split + 1) * tiles, jnp.int32(shape.splits)) - first
    # A tile of all 256 rows takes more registers than a warpgroup has; the third needs few.
    lends = shape.rows > 192 and not interpreted

    @pl.when(warpgroup == WARPGROUPS)
    def bring() -> None:
        if lends:
            plgpu.set_max_registers(40, action="decrease")
        _bring(shape, operands, row, output, first, num_tiles)

    @pl.when(warpgroup < WARPGROUPS)
    def multiply() -> None:
        if lends:
            plgpu.set_max_registers(232, action="increase")
        first_output = warpgroup * OUTPUTS
        total = _sums(shape, operands, first_output, num_tiles, interpreted)
        place = operands.sums.at[
            split, pl.ds(output + first_output, OUTPUTS), pl.ds(row, shape.rows)
        ]
        place[...] = total


def _bring(
    shape: Int8Shape,
    operands: Int8Operands,
    row: jax.Array,
    output: jax.Array,
    first: jax.Array,
    num_tiles: jax.Array,
) -> None:
    """Copies tiles of integers and rows to shared memory, each as soon as there is room."""

    def copy(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(shape.stages))

        @pl.when(i >= shape.stages)
        def wait() -> None:
            plgpu.barrier_wait(operands.read.at[slot])

        came = operands.came.at[slot]
        inputs = pl.ds((first + i) * shape.tile, shape.tile)
        values = operands.values.at[pl.ds(output, WARPGROUPS * OUTPUTS), inputs]
        plgpu.copy_gmem_to_smem(values, operands.tile_of_values.at[slot], came)
        rows = operands.rows.at[pl.ds(row, shape.rows), inputs]
        # Of a pair, each block brings half of the rows to both.
        axes = "block" if shape.cluster > 1 else None
        plgpu.copy_gmem_to_smem(rows, operands.tile_of_rows.at[slot], came, collective_axes=axes)

    lax.fori_loop(0, num_tiles, copy, None)
    if shape.cluster > 1:
        # A block stays until the other one has read the last tiles, and has said so here.
        def wait(i: jax.Array, _: None) -> None:
            plgpu.barrier_wait(operands.read.at[lax.rem(i, jnp.int32(shape.stages))])

        lax.fori_loop(jnp.maximum(num_tiles - shape.stages, 0), num_tiles, wait, None)


def _sums(
    shape: Int8Shape,
    operands: Int8Operands,
    first_output: jax.Array,
    num_tiles: jax.Array,
    interpreted: bool,
) -> jax.Array:
    """Returns the sums ``[64, rows]`` of a warpgroup's outputs over all tiles, float32."""
    size = OUTPUTS, shape.rows

    def tile(i: jax.Array) -> tuple[jax.Array, Any, Any]:
        """Returns integers ``[64, tile]`` in 16 bits, rows ``[tile, rows]``, and who waits."""
        slot = lax.rem(i, jnp.int32(shape.stages))
        plgpu.barrier_wait(operands.came.at[slot])
        values = operands.tile_of_values.at[slot, pl.ds(first_output, OUTPUTS)]
        rows = operands.tile_of_rows.at[slot].transpose((1, 0))
        if interpreted:
            return values[...].astype(rows.dtype), rows, operands.read.at[slot]
        # Two neighbours become a word each where they are; then words go to where they are read.
        integers = plgpu.load(values, layout=plgpu.Layout.WGMMA_UPCAST_2X, optimized=False)
        numbers = plgpu.layout_cast(integers.astype(rows.dtype), plgpu.Layout.WGMMA)
        return numbers, rows, operands.read.at[slot]

    if interpreted:  # interpret mode does not know accumulators inside loops

        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            numbers, rows, read = tile(i)
            total = total + jnp.dot(numbers, rows[...], preferred_element_type=jnp.float32)
            plgpu.barrier_arrive(read)
            return total

        return lax.fori_loop(0, num_tiles, add, jnp.zeros(size, jnp.float32))

    def run(total: Any) -> jax.Array:
        def add(i: jax.Array, _: None) -> None:
            numbers, rows, read = tile(i)
            plgpu.wgmma(total, numbers, rows)
            # Without it the next integers would take registers that are being read.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(read)

        lax.fori_loop(0, num_tiles, add, None)
        return total[...]

    return pl.run_scoped(run, plgpu.ACC(size, jnp.float32))
