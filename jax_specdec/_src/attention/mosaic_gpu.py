"""Attention over a cache as a Mosaic GPU kernel for Hopper: its cost follows each request's tokens.

A block takes one head of keys of one request, up to 64 rows (new rows times the query heads that
share the keys) and a fixed part of the T positions, its split. Tiles of 64 positions of keys and
values come to shared memory ahead of the products with them, of which a running maximum, sum and
product are kept (Dao et al., "FlashAttention", arXiv 2205.14135). Up to eight splits are a cluster
of blocks, which join what they found; more are joined by XLA, in a second, small launch.

Keys and values may lie in pages. A tile, or each part of it that is in one page, is a rectangle of
the pool ``[P * page, Nkv * D]``; a request without a table has one page of T positions. From then
on all is as for keys ``[B * Nkv, D, T]``, and so are the bits. Rows of some slots alone read the
heads of keys of these, where they lie.

The bits of a row depend on the row, on what it sees and on the shape of the call alone, not on
`start`: where splits begin and which positions share a tile is fixed, every tile is masked by the
same operations, and a position that is not seen adds an exact 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from jax_specdec._src.attention.arrays import PIECE, AttentionArrays, AttentionStatic, rows_of
from jax_specdec._src.attention.cache import room_of
from jax_specdec._src.mosaic.interpret import InterpretedThreads
from jax_specdec._src.mosaic.ptx import GpuThreads
from jax_specdec._src.mosaic.threads import THREADS, Threads

plgpu: Any = mosaic_gpu  # its stubs lack names, and call its transforms abstract

ROWS = 64
"""Of a tile of the matrix unit."""
TILE = 64
"""Positions of a tile."""
STAGES = 2
"""Tiles of keys, and of values, in shared memory. Two blocks fit on a multiprocessor."""
COLUMNS = 128
"""Of values that are in registers as one array, at most."""
BLOCKS = 132
"""Multiprocessors of an H100: as many blocks are wanted, at least."""
JOINED = (1, 2, 4, 8)
"""Numbers of splits that the kernel joins by itself; others, and all if it is empty, XLA does."""
JOINED_TILES = 32
"""Caches of up to so many tiles have splits that the kernel joins."""
LEAST_TILES = 2
"""Of a split: shorter ones cost more to join than they save."""

Places = tuple[jax.Array, ...]
"""Where in a pool of pages the parts of a tile begin, ``[]`` int32 each; none without pages."""

_LEAST = -1e30
"""A maximum before any score. Finite, so that the difference of two such is 0."""


class AttentionShape(NamedTuple):
    """The sizes of a launch."""

    num_kv: int  # heads of keys of a request
    group: int  # query heads that share one
    num_new: int  # S
    # Rows, S * group, rounded up to a multiple of 8, or of 64 if there are more than 64.
    padded: int
    head_dim: int  # D
    room: int  # T
    bounds: tuple[int, ...]  # first tiles of the splits, and the end of the last
    static: AttentionStatic
    has_words: bool  # whether `tree_mask` is given
    page: int | None  # positions of a page, or T; None where keys are [B * Nkv, D, T]
    num_pages: int  # of the pool, or slots of the cache

    @property
    def rows(self) -> int:
        """Returns how many rows a head of keys has."""
        return self.num_new * self.group

    @property
    def row_blocks(self) -> int:
        """Returns how many blocks of 64 rows there are."""
        return -(-self.padded // ROWS)

    @property
    def splits(self) -> int:
        """Returns how many parts of T there are."""
        return len(self.bounds) - 1

    @property
    def stored(self) -> int:
        """Returns how many rows a block writes."""
        return min(self.padded, ROWS)

    @property
    def joins(self) -> bool:
        """Returns whether the kernel joins its splits, and lays rows out as the query's are."""
        return self.splits in JOINED

    @property
    def columns(self) -> list[Any]:
        """Returns the ranges of D that are summed, checked and written by themselves: D, or two."""
        size = min(self.head_dim, COLUMNS)
        return [pl.ds(first, size) for first in range(0, self.head_dim, size)]

    @property
    def part(self) -> int:
        """Returns how many positions of a tile one copy brings: those that are in one page."""
        return TILE if self.page is None else math.gcd(TILE, self.page)


def attend(
    arrays: AttentionArrays,
    static: AttentionStatic,
    *,
    bounds: tuple[int, ...] | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns ``[B, S, N, D]``; see `api.decode_attention`.

    Args:
      bounds: first tiles of the splits, and the end of the last; None for those of `split_bounds`.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.
    """
    batch_size, num_new, num_heads, head_dim = arrays.query.shape
    keys = arrays.keys
    values = arrays.values
    # T, and Nkv heads of keys for each request; a pool is read as a matrix.
    room = room_of(keys, arrays.pages)
    table = arrays.pages
    num_pages = keys.shape[0]
    if arrays.slots is not None:
        assert static.num_kv is not None
        heads = batch_size * static.num_kv
        page = None
        num_pages //= static.num_kv
        table = arrays.slots[:, None]  # a slot is a page of T positions
    elif keys.ndim == 3:
        heads = keys.shape[0]
        page = None
    else:
        heads = batch_size * keys.shape[2]
        page = keys.shape[1]
        # [P, page, Nkv, D] -> [P * page, Nkv * D]: a tile of a head is a rectangle, or several.
        keys = keys.reshape(-1, keys.shape[2] * head_dim)
        values = values.reshape(keys.shape)
    num_kv = heads // batch_size
    group = num_heads // num_kv
    # Rows of one product with a head of keys: every new row, by every query head that shares it.
    rows = num_new * group
    padded = padded_rows(rows)
    if bounds is None:
        bounds = split_bounds(room // TILE, heads * -(-padded // ROWS))
    shape = AttentionShape(
        num_kv=num_kv,
        group=group,
        num_new=num_new,
        padded=padded,
        head_dim=head_dim,
        room=room,
        bounds=bounds,
        static=static,
        has_words=arrays.tree_mask is not None,
        page=page,
        num_pages=num_pages,
    )
    operands = {
        "query": rows_of(arrays.query, num_kv) if arrays.rows is None else arrays.rows,
        "keys": keys,
        "values": values,
        "start": arrays.start,
        "words": _words_of_rows(arrays.tree_mask, shape),
    }
    if table is not None:
        operands["pages"] = table
    with jax.enable_x64(False):
        outputs = _launch(shape, keys.dtype, heads, operands, interpret)
    if shape.joins:
        return outputs["out"].reshape(arrays.query.shape)
    found = _joined(shape, heads, outputs)
    # [B * Nkv, padded, D] -> [B, Nkv, S, group, D] -> [B, S, N, D]
    found = found[:, :rows].reshape(batch_size, num_kv, num_new, group, head_dim)
    return found.astype(keys.dtype).swapaxes(1, 2).reshape(arrays.query.shape)


def _joined(shape: AttentionShape, heads: int, outputs: dict[str, jax.Array]) -> jax.Array:
    """Returns what all splits found, ``[B * Nkv, padded, D]``."""
    found = outputs["found"].reshape(heads, shape.splits, shape.padded, shape.head_dim)
    if shape.splits == 1:
        return found[:, 0]
    # Each split has its own maximum: its product and its total are scaled to the largest of all.
    # [B * Nkv, splits, padded]
    largest, total = (
        outputs[name].reshape(heads, shape.splits, -1)[:, :, : shape.padded]
        for name in ("largest", "total")
    )
    # [B * Nkv, splits, padded]: what each split counts
    weight = jnp.exp2(largest - largest.max(axis=1, keepdims=True))
    total = jnp.sum(weight * total, axis=1)  # [B * Nkv, padded]
    # A split of which a row sees nothing may have written no product.
    found = jnp.where(largest[..., None] == _LEAST, 0, found * weight[..., None])
    return jnp.sum(found, axis=1) / total[..., None]


def is_one_launch(arrays: AttentionArrays) -> bool:
    """Returns whether the kernel leaves nothing to XLA, of a cache with heads first."""
    batch_size, num_new, num_heads, _ = arrays.query.shape
    heads, _, room = arrays.keys.shape
    padded = padded_rows(num_new * batch_size * num_heads // heads)
    bounds = split_bounds(room // TILE, heads * -(-padded // ROWS))
    return len(bounds) - 1 in JOINED


def padded_rows(rows: int) -> int:
    """Returns rows of a head of keys, rounded up to what blocks take."""
    unit = PIECE if rows <= ROWS else ROWS
    return -(-rows // unit) * unit


def split_bounds(num_tiles: int, blocks: int) -> tuple[int, ...]:
    """Returns the first tiles of the splits of T, and the end of the last.

    Few requests fill a GPU only if the positions of each are split among several blocks: n, as many
    as fill it. Of a small cache the kernel joins up to eight, of one size. Of a larger one they are
    wanted for texts of any length, and each costs XLA time to join. So they grow with what lies
    before them, by 8 / n of it, up to an n-th of T.

    Args:
      num_tiles: of T.
      blocks: how many there are for each split.
    """
    # Splits that fill the GPU; one, if the rows of all heads do.
    wanted = BLOCKS // blocks
    if wanted < 2:
        return 0, num_tiles
    if JOINED and num_tiles <= JOINED_TILES:
        most = min(wanted, max(1, num_tiles // LEAST_TILES))
        count = max(count for count in JOINED if count <= most)
        return tuple(-(-i * num_tiles // count) for i in range(count + 1))
    least = LEAST_TILES if wanted > 3 else 2 * LEAST_TILES
    most = max(least, -(-num_tiles // wanted))
    # Each split is 8 / n of what lies before it, within its limits.
    bounds = [0]
    while bounds[-1] < num_tiles:
        size = min(max(least, 8 * bounds[-1] // wanted), most)
        bounds.append(min(bounds[-1] + size, num_tiles))
    return tuple(bounds)


def _words_of_rows(tree_mask: jax.Array | None, shape: AttentionShape) -> Any:
    """Returns ``[B, 2, row_blocks * 64]`` int32, the words of each row; one of each for a chain."""
    if tree_mask is None:
        # NumPy's zeros are constants of the program, those of JAX would be a launch.
        return np.zeros((1, 2, ROWS), np.int32)
    words = lax.bitcast_convert_type(tree_mask, jnp.int32).swapaxes(1, 2)  # [B, 2, S]
    # A row of a product for each query head of a new row: [B, 2, S * group], padded to blocks.
    words = jnp.repeat(words, shape.group, axis=2)
    rest = shape.row_blocks * ROWS - words.shape[2]
    return jnp.pad(words, ((0, 0), (0, 0), (0, rest)))


def _launch(
    shape: AttentionShape, dtype: Any, heads: int, operands: dict[str, Any], interpret: Any
) -> dict[str, jax.Array]:
    """Returns the outputs of the kernel by names of `AttentionOperands`, as `operands` are."""
    # Partial products of several splits are joined in float32.
    found_dtype = dtype if shape.splits == 1 else jnp.dtype(jnp.float32)
    # Shared memory as the matrix unit reads it: tiles of 8 rows of 128 bytes, swizzled.
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    swizzled_out: tuple[Any, ...] = ()  # one split that is joined is read number by number
    if not shape.joins or shape.splits > 1:
        swizzled_out = (plgpu.TilingTransform((8, 128 // found_dtype.itemsize)), swizzled[1])
    # One barrier for each tile in shared memory: the copies of its parts complete it.
    barrier = functools.partial(plgpu.Barrier, num_barriers=STAGES, num_arrivals=TILE // shape.part)
    tile_of_keys = (shape.head_dim, TILE) if shape.page is None else (TILE, shape.head_dim)
    scratch = {
        "query": plgpu.SMEM((ROWS, shape.head_dim), dtype, transforms=swizzled),
        "keys": plgpu.SMEM((STAGES, *tile_of_keys), dtype, transforms=swizzled),
        "values": plgpu.SMEM((STAGES, TILE, shape.head_dim), dtype, transforms=swizzled),
        "found": plgpu.SMEM((ROWS, shape.columns[0].size), found_dtype, transforms=swizzled_out),
        "largest": plgpu.SMEM((ROWS,), jnp.float32),
        "total": plgpu.SMEM((ROWS,), jnp.float32),
        "query_came": plgpu.Barrier(num_arrivals=shape.stored // PIECE),
        "keys_came": barrier(),
        "values_came": barrier(),
        "words": plgpu.SMEM((2, ROWS), jnp.int32),
        "words_came": plgpu.Barrier(),
    }
    # Splits of one head and block of rows are a cluster, if they join what they found.
    is_cluster = shape.joins and shape.splits > 1
    grid: dict[str, Any] = {
        "grid": (shape.splits, shape.row_blocks, heads),
        "grid_names": ("split", "row_block", "head"),
    }
    if is_cluster:
        grid = {"grid": grid["grid"][1:], "grid_names": grid["grid_names"][1:]}
        grid |= {"cluster": (shape.splits,), "cluster_names": ("split",)}
        if interpret:
            scratch["all_found"] = plgpu.ClusterBarrier(collective_axes=("split",))
    outputs = _outputs(shape, dtype, found_dtype, heads)
    names = [*operands, *outputs]

    # A kernel takes operands, outputs and scratch memory as one flat list.
    def run(*refs: Any) -> None:
        arrays = AttentionOperands(**dict(zip(names, refs[: len(names)], strict=True)))
        memory = Scratch(**dict(zip(scratch, refs[len(names) :], strict=True)))
        threads = InterpretedThreads() if interpret else GpuThreads()
        _multiply(shape, BlockWork.of(shape, arrays), arrays, memory, threads)

    run.__name__ = "decode_attention"
    kernel = plgpu.kernel(
        run,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(scratch.values()),
        **grid,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    return dict(zip(outputs, kernel(*operands.values()), strict=True))


def _outputs(
    shape: AttentionShape, dtype: Any, found_dtype: Any, heads: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the outputs of the kernel: the rows, if it joins them, and what each split found."""
    outputs = {}
    if shape.joins:
        rows = heads * shape.num_new * shape.group
        outputs["out"] = jax.ShapeDtypeStruct((rows * shape.head_dim,), dtype)
    if not shape.joins or shape.splits > 1:
        found = (heads * shape.splits * shape.padded, shape.head_dim)
        outputs["found"] = jax.ShapeDtypeStruct(found, found_dtype)
    if shape.splits > 1:
        number = (heads * shape.splits * shape.row_blocks * ROWS,)
        outputs["largest"] = jax.ShapeDtypeStruct(number, jnp.dtype(jnp.float32))
        outputs["total"] = outputs["largest"]
    return outputs


class AttentionOperands(NamedTuple):
    """Refs in global memory: operands, then outputs as far as there are."""

    query: Any  # [B * Nkv * rows, D], and more up to whole pieces; rows are S * group
    keys: Any  # [B * Nkv, D, T], of slots more heads; of pages [P * page, Nkv * D]
    values: Any  # [B * Nkv, T, D], of slots more heads; of pages [P * page, Nkv * D]
    start: Any  # [B] int32
    words: Any  # [B, 2, row_blocks * 64] int32, bits of what each row sees from start on
    # [B, L] int32, or [B, 1] of slots; None where each request has a page of T positions, or none.
    pages: Any = None
    out: Any = None  # [B * S * N * D]
    found: Any = None  # [B * Nkv * splits * padded, D]
    largest: Any = None  # [B * Nkv * splits * row_blocks * 64] float32, largest score of each row
    total: Any = None  # likewise, the sum of its weights relative to that


class Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    query: Any  # [64, D]
    keys: Any  # [STAGES, D, TILE]; of pages [STAGES, TILE, D]
    values: Any  # [STAGES, TILE, D]
    found: Any  # [64, D or half of it], of float32 if splits are to be joined
    largest: Any  # [64] float32
    total: Any  # [64] float32
    query_came: Any
    keys_came: Any  # a barrier for each stage
    values_came: Any  # likewise
    words: Any  # [2, 64] int32
    words_came: Any
    all_found: Any = None  # a barrier of the cluster, in interpret mode


class BlockWork(NamedTuple):
    """Work of a block, ``[]`` int32 each."""

    head: jax.Array  # of keys, of the requests that have rows
    source: jax.Array  # of the cache, if it has heads first: where the head's keys are
    split: jax.Array  # of the positions
    row: jax.Array  # first row
    start: jax.Array  # tokens before the new rows
    begin: jax.Array  # first position that some row sees
    end: jax.Array  # the one after the last
    tile: jax.Array  # first tile of positions
    num_tiles: jax.Array  # how many
    # The first of them that all rows see whole, and the one after the last.
    first_whole: jax.Array
    end_whole: jax.Array

    @classmethod
    def of(cls, shape: AttentionShape, operands: AttentionOperands) -> BlockWork:
        """Returns the work of this block."""
        # The block's head of keys, split of the positions and rows.
        head = lax.axis_index("head")
        request = lax.div(head, jnp.int32(shape.num_kv))
        source = head
        if shape.page is None and operands.pages is not None:
            slot = jnp.clip(operands.pages[request, 0], 0, shape.num_pages - 1)
            source = slot * shape.num_kv + lax.rem(head, jnp.int32(shape.num_kv))
        # The last splits are the longest, and begin first.
        split = (shape.splits - 1) - lax.axis_index("split")
        row = lax.axis_index("row_block") * ROWS
        start = operands.start[request]
        # New rows of the first and of the last row of this block.
        first_new = lax.div(row, jnp.int32(shape.group))
        last_new = jnp.minimum(lax.div(row + (ROWS - 1), jnp.int32(shape.group)), shape.num_new - 1)
        # Some row sees positions begin..end-1; the split's tiles are `tile` to `bound` - 1.
        begin = jnp.int32(0)
        if shape.static.window is not None:
            begin = start + (0 if shape.has_words else first_new)
            begin = jnp.clip(begin + (1 - shape.static.window), 0, shape.room)
        begin_tile = lax.div(begin, jnp.int32(TILE))
        # In a chain a row sees the new rows up to itself; in a tree it may see any that has a bit.
        most = shape.static.num_visible if shape.has_words else last_new + 1
        end = jnp.clip(start + most, 0, shape.room)
        end_tile = lax.div(end + (TILE - 1), jnp.int32(TILE))
        # The tiles of this split, by its place among the bounds.
        tile = jnp.int32(0)
        bound = jnp.int32(shape.bounds[1])
        for i in range(1, shape.splits):
            tile = jnp.where(split < i, tile, shape.bounds[i])
            bound = jnp.where(split < i, bound, shape.bounds[i + 1])
        tile = jnp.maximum(tile, begin_tile)
        num_tiles = jnp.maximum(jnp.minimum(end_tile, bound) - tile, 0)
        # All rows see the tiles up to the first row, from where the last row's window begins.
        first_whole = jnp.int32(0)
        if shape.static.window is not None:
            least = start + (0 if shape.has_words else last_new)
            least = jnp.clip(least + (TILE - shape.static.window), 0, shape.room)
            first_whole = jnp.clip(lax.div(least, jnp.int32(TILE)) - tile, 0, num_tiles)
        seen_by_all = start if shape.has_words else start + first_new + 1
        end_whole = lax.div(jnp.clip(seen_by_all, 0, shape.room), jnp.int32(TILE)) - tile
        end_whole = jnp.clip(end_whole, first_whole, num_tiles)
        return cls(
            head=head,
            source=source,
            split=split,
            row=row,
            start=start,
            begin=begin,
            end=end,
            tile=tile,
            num_tiles=num_tiles,
            first_whole=first_whole,
            end_whole=end_whole,
        )


def _places(
    shape: AttentionShape, block: BlockWork, operands: AttentionOperands, i: jax.Array | int
) -> Places:
    """Returns where in the pool ``[P * page, Nkv * D]`` the parts of a tile begin.

    A part that no row sees may have no page: it gets that of the nearest one that is seen.
    """
    if shape.page is None:
        return ()
    # The request, and how tiles and pages divide into parts.
    request = lax.div(block.head, jnp.int32(shape.num_kv))
    parts = TILE // shape.part  # of a tile
    of_page = jnp.int32(shape.page // shape.part)  # parts of a page
    # What is read of the table does not wait for `start`; a tile past the last is not copied.
    first = jnp.minimum(block.tile + i, shape.room // TILE - 1) * parts
    places = []
    for part in [first + j for j in range(parts)]:
        # Each part's page, then its first row in the pool.
        page = request
        if operands.pages is not None:
            page = jnp.clip(operands.pages[request, lax.div(part, of_page)], 0, shape.num_pages - 1)
        places.append((page * of_page + lax.rem(part, of_page)) * shape.part)
    # After the last part that is seen, and before the first, the nearest one that is.
    for j in range(1, parts):
        places[j] = jnp.where((first + j) * shape.part < block.end, places[j], places[j - 1])
    for j in reversed(range(parts - 1)):
        is_seen = (first + (j + 1)) * shape.part > block.begin
        places[j] = jnp.where(is_seen, places[j], places[j + 1])
    return tuple(places)


def _copy(
    shape: AttentionShape,
    block: BlockWork,
    operands: AttentionOperands,
    scratch: Scratch,
    i: jax.Array | int,
    places: Places,
    *,
    is_keys: bool,
) -> None:
    """Begins to copy a tile of keys or values to shared memory, if there are so many.

    Args:
      shape: of the launch.
      block: whose tile it is.
      operands: in global memory.
      scratch: in shared memory.
      i: which tile. Tiles take turns in the slots; whoever calls has read the one that it replaces.
      places: of tile i, from `_places`.
      is_keys: else values.
    """
    # The slot of shared memory that is this tile's, and its barrier.
    slot = lax.rem(jnp.int32(i), jnp.int32(STAGES))
    source = operands.keys if is_keys else operands.values
    target = (scratch.keys if is_keys else scratch.values).at[slot]
    came = (scratch.keys_came if is_keys else scratch.values_came).at[slot]

    @pl.when(i < block.num_tiles)
    def copy() -> None:
        if shape.page is None:
            positions = pl.ds((block.tile + i) * TILE, TILE)
            index = (slice(None), positions) if is_keys else (positions, slice(None))
            plgpu.copy_gmem_to_smem(source.at[block.source, *index], target, came)
            return
        # [page part, D]: the head's columns of the pool
        columns = lax.rem(block.head, jnp.int32(shape.num_kv)) * shape.head_dim
        for j, place in enumerate(places):
            rows = source.at[pl.ds(place, shape.part), pl.ds(columns, shape.head_dim)]
            own = target.at[pl.ds(j * shape.part, shape.part)]
            plgpu.copy_gmem_to_smem(rows, own, came)


def _multiply(
    shape: AttentionShape,
    block: BlockWork,
    operands: AttentionOperands,
    scratch: Scratch,
    threads: Threads,
) -> None:
    """Reads the block's tiles, and writes what its rows found."""
    layout = plgpu.Layout.WGMMA
    per_row = layout.reduce(1)
    interpreted = threads.interpreted
    places = [_places(shape, block, operands, i) for i in range(STAGES + 1)]
    # The block's rows stay in shared memory; tiles of keys and values pass by, two ahead.
    # Rows past the last may hold anything: none of them is written.
    for first in range(0, shape.stored, PIECE):
        row = block.row + first
        row = jnp.where(row < shape.rows, row, 0) + block.head * shape.rows
        source = operands.query.at[pl.ds(row, PIECE)]
        target = scratch.query.at[pl.ds(first, PIECE)]
        plgpu.copy_gmem_to_smem(source, target, scratch.query_came)
    copy = functools.partial(_copy, shape, block, operands, scratch)
    for i in range(STAGES):
        copy(i, places[i], is_keys=True)
        copy(i, places[i], is_keys=False)
    if shape.has_words:
        # [2, 64]: bits of what the block's rows see
        request = lax.div(block.head, jnp.int32(shape.num_kv))
        source = operands.words.at[request, :, pl.ds(block.row, ROWS)]
        plgpu.copy_gmem_to_smem(source, scratch.words, scratch.words_came)
        plgpu.barrier_wait(scratch.words_came)
    plgpu.barrier_wait(scratch.query_came)
    # [64] the largest score of each row so far, [64] the sum of its weights relative to that, and
    # [64, D] the sum of values by these weights, in ranges of D.
    largest = plgpu.layout_cast(jnp.full((ROWS,), _LEAST, jnp.float32), per_row)
    total = plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), per_row)
    found = [
        plgpu.layout_cast(jnp.full((ROWS, columns.size), 0, jnp.float32), layout)
        for columns in shape.columns
    ]

    def turn(i: jax.Array, carry: Any) -> Any:
        # The table is read a turn before the copies that need it, and its answer carried to them.
        largest, total, found, places = carry
        next_places = _places(shape, block, operands, i + (STAGES + 1))
        slot = lax.rem(i, jnp.int32(STAGES))
        plgpu.barrier_wait(scratch.keys_came.at[slot])
        keys = scratch.keys.at[slot]
        if shape.page is not None:
            keys = keys.transpose((1, 0))
        scores = _product(scratch.query, keys, interpreted)  # [64, TILE]
        plgpu.commit_smem()  # all warps have read the keys: others may come in their place
        copy(i + STAGES, places, is_keys=True)
        plgpu.barrier_wait(scratch.values_came.at[slot])
        if not shape.static.finite_cache:
            # Where all rows see a tile, NaN in it is for all of them, and comes by itself.
            is_whole = (block.first_whole <= i) & (i < block.end_whole)
            scores = lax.cond(
                is_whole,
                lambda scores: scores,
                lambda scores: _poisoned(shape, scratch, slot, scores, interpreted),
                scores,
            )
        # Exponents of 2: exp(x) = 2**(x log2(e)).
        exponents = shape.static.scale * math.log2(math.e)
        if shape.static.softcap is not None:
            # c tanh(x / c) = c - 2 c / (1 + exp(2 x / c)), where tanh itself would be approximate.
            cap = shape.static.softcap
            scores = cap - 2 * cap / (1 + jnp.exp2(scores * (2 / cap * exponents)))
            exponents = math.log2(math.e)
        scores = jnp.where(_seen(shape, block, scratch, i), scores, -jnp.inf)
        scores = scores * exponents
        # What was summed so far is scaled to the new maximum.
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        scale = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
        # [64], then [64, D]: the new tile is added.
        total = total * scale + weights.sum(axis=1)
        found = [part * lax.broadcast_in_dim(scale, part.shape, [0]) for part in found]
        weights = weights.astype(scratch.values.dtype)
        found = [
            _add_product(part, weights, scratch.values.at[slot, :, columns], interpreted)
            for part, columns in zip(found, shape.columns, strict=True)
        ]
        plgpu.commit_smem()  # likewise of the values
        copy(i + STAGES, places, is_keys=False)
        return new_largest, total, found, next_places

    # One loop for tiles that all rows see and for those at the edges: two would round differently.
    carry = largest, total, found, places[STAGES]
    largest, total, found, _ = lax.fori_loop(0, block.num_tiles, turn, carry)

    # Registers -> shared memory -> global memory; rows of padding past `stored` stay behind.
    for part, columns in zip(found, shape.columns, strict=True):
        # With one split the sums are whole; else they are joined, and divided then.
        if shape.splits == 1:
            part = part / lax.broadcast_in_dim(total, part.shape, [0])
        part = part.astype(scratch.found.dtype)
        if shape.joins and shape.splits == 1:
            _lay_out(shape, block, operands, scratch, threads, part, columns)
            continue
        scratch.found[...] = part
        scratch.largest[...] = largest
        scratch.total[...] = total
        plgpu.commit_smem()
        _write(shape, block, operands, scratch, columns)
    if shape.joins and shape.splits > 1:
        threads.cluster_sync(scratch.all_found)
        _join(shape, block, operands, threads)


def _write(
    shape: AttentionShape,
    block: BlockWork,
    operands: AttentionOperands,
    scratch: Scratch,
    columns: Any,
) -> None:
    """Copies what a block found from shared to global memory."""
    own = block.head * shape.splits + block.split

    @pl.when((block.num_tiles > 0) | (shape.splits == 1))
    def write() -> None:
        rows = pl.ds(own * shape.padded + block.row, shape.stored)
        source = scratch.found.at[pl.ds(0, shape.stored)]
        plgpu.copy_smem_to_gmem(source, operands.found.at[rows, columns])

    if shape.splits > 1:
        rows = pl.ds(own * (shape.row_blocks * ROWS) + block.row, ROWS)
        # Each split's maximum and sum of a row, to be joined.
        for source, out in ((scratch.largest, operands.largest), (scratch.total, operands.total)):
            plgpu.copy_smem_to_gmem(source, out.at[rows])
    plgpu.wait_smem_to_gmem(0)


def _lay_out(
    shape: AttentionShape,
    block: BlockWork,
    operands: AttentionOperands,
    scratch: Scratch,
    threads: Threads,
    part: jax.Array,
    columns: Any,
) -> None:
    """Writes columns of rows ``[64, D or half of it]`` to where the query's are."""
    if hasattr(plgpu, "store"):
        plgpu.store(scratch.found, part, optimized=False)  # threads wait for each other's banks
    else:  # JAX 0.10, which asks nothing
        scratch.found[...] = part
    plgpu.commit_smem()

    def step(i: jax.Array, _: None) -> None:
        number = threads.index + i * THREADS
        row = lax.div(number, jnp.int32(columns.size))
        column = lax.rem(number, jnp.int32(columns.size))
        value = threads.gather(scratch.found, row, column)
        place, is_row = _place(shape, block, row)
        threads.scatter_warps(operands.out, place + (column + columns.start), value, is_row)

    lax.fori_loop(0, shape.stored * columns.size // THREADS, step, None)
    plgpu.commit_smem()  # other columns may come in their place


def _join(
    shape: AttentionShape, block: BlockWork, operands: AttentionOperands, threads: Threads
) -> None:
    """Writes the block's share of the cluster's rows, joined, to where the query's are."""
    # Vectors of 128 numbers take turns among the splits.
    vectors = shape.stored * shape.head_dim // THREADS
    count = lax.div(vectors - block.split + (shape.splits - 1), jnp.int32(shape.splits))

    def step(i: jax.Array, _: None) -> None:
        number = threads.index + (i * shape.splits + block.split) * THREADS
        row = lax.div(number, jnp.int32(shape.head_dim))
        column = lax.rem(number, jnp.int32(shape.head_dim))
        largest = []
        totals = []
        found = []
        for split in range(shape.splits):
            own = block.head * shape.splits + split
            at = row + (own * (shape.row_blocks * ROWS) + block.row)
            largest.append(threads.gather(operands.largest, at))
            totals.append(threads.gather(operands.total, at))
            at = row + (own * shape.padded + block.row)
            found.append(threads.gather(operands.found, at, column))
        # Each split has its own maximum: all is scaled to the largest of them.
        most = functools.reduce(jnp.maximum, largest)
        total = threads.filled(0.0)
        sum_ = threads.filled(0.0)
        for one, own_total, own_found in zip(largest, totals, found, strict=True):
            weight = jnp.exp2(one - most)
            total = total + weight * own_total
            # A split of which a row sees nothing may have written no product.
            sum_ = sum_ + jnp.where(one == _LEAST, 0.0, own_found * weight)
        place, is_row = _place(shape, block, row)
        threads.scatter_warps(operands.out, place + column, sum_ / total, is_row)

    lax.fori_loop(0, count, step, None)


def _place(shape: AttentionShape, block: BlockWork, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where in ``[B, S, N, D]`` rows of a block begin, and whether they are rows."""
    group = jnp.int32(shape.group)
    own = row + block.row  # of the head of keys, [S, group]
    request = lax.div(block.head, jnp.int32(shape.num_kv))
    kv = lax.rem(block.head, jnp.int32(shape.num_kv))
    new = lax.div(own, group) + request * shape.num_new
    head = lax.rem(own, group) + kv * shape.group
    return (new * (shape.num_kv * shape.group) + head) * shape.head_dim, own < shape.rows


def _poisoned(
    shape: AttentionShape, scratch: Scratch, slot: jax.Array, scores: jax.Array, interpreted: bool
) -> jax.Array:
    """Returns scores ``[64, TILE]``, NaN where a value is not finite, which becomes 0 then.

    A weight of 0 times NaN is NaN: so NaN reaches those who see it by their scores instead.
    """
    layout = plgpu.Layout.WGMMA
    values = scratch.values.at[slot]
    # 0 times a value is NaN where that is not finite: these sums are [64, TILE] of 0 or NaN.
    parts = [values.at[:, columns] for columns in shape.columns]  # [TILE, D or half of it]
    for part in parts:
        # [64, D] x [D, TILE]
        zeros = plgpu.layout_cast(jnp.full((ROWS, part.shape[1]), 0, jnp.float32), layout)
        zeros = zeros.astype(part.dtype)
        scores = _add_product(scores, zeros, part.transpose((1, 0)), interpreted)
    # Then the values themselves become 0, whole positions at a time.
    is_bad = []
    for part in parts:
        # [TILE]: 1 where a number of the position is not finite
        number = _numbers(part)
        is_bad.append(jnp.where(number - number == 0, 0.0, 1.0).max(axis=1))
        if len(parts) > 1:  # or the compiler keeps both in registers, where there is no room
            plgpu.commit_smem()
    for part in parts:
        number = _numbers(part)
        is_zero = lax.broadcast_in_dim(functools.reduce(jnp.maximum, is_bad), number.shape, [0]) > 0
        part[...] = jnp.where(is_zero, 0.0, number).astype(part.dtype)
    plgpu.commit_smem()
    return scores


def _numbers(part: Any) -> jax.Array:
    """Returns values in shared memory ``[TILE, ..]`` as float32."""
    return plgpu.layout_cast(part[...], plgpu.Layout.WGMMA).astype(jnp.float32)


def _seen(shape: AttentionShape, block: BlockWork, scratch: Scratch, i: jax.Array) -> jax.Array:
    """Returns which positions of a tile each row sees, ``[64, TILE]`` bool."""
    layout = plgpu.Layout.WGMMA
    size = ROWS, TILE
    index = functools.partial(plgpu.broadcasted_iota, jnp.int32, size, layout=layout)
    # Which new row lies at each position, or which bit is for it.
    new = index(1) + ((block.tile + i) * TILE - block.start)
    row = lax.div(index(0) + block.row, jnp.int32(shape.group))  # the new row that each row is of
    if shape.has_words:
        # Bit j of a row's two words: does it see position start + j? Those before start are seen.
        low, high = (plgpu.layout_cast(scratch.words[i], layout.reduce(1)) for i in (0, 1))
        low, high = (lax.broadcast_in_dim(x, size, [0]) for x in (low, high))
        bit = lax.shift_right_logical(jnp.where(new < 32, low, high), new & 31) & 1
        seen = (new < 0) | ((new < shape.static.num_visible) & (bit == 1))
    else:
        # A chain: up to the row itself.
        seen = new <= row
    if shape.static.window is not None:
        seen = seen & (new > (0 if shape.has_words else row) - shape.static.window)
    return seen


def _product(left: Any, right: Any, interpreted: bool) -> jax.Array:
    """Returns the product of two matrices in shared memory, in float32."""
    if interpreted:  # interpret mode does not know accumulators inside loops
        return jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

    def run(sum_: Any) -> jax.Array:
        plgpu.wgmma(sum_, left, right)
        return sum_[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def _add_product(found: jax.Array, left: jax.Array, right: Any, interpreted: bool) -> jax.Array:
    """Returns `found` plus the product of a matrix in registers and one in shared memory."""
    if interpreted:
        return found + jnp.dot(left, right[...], preferred_element_type=jnp.float32)

    def run(sum_: Any) -> None:
        plgpu.wgmma(sum_, left, right)

    return pl.run_state(run)(plgpu.ACC.init(found))
