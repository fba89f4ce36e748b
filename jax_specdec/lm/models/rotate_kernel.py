"""Heads of new rows rotated, and their keys and values written into a cache, in one launch.

XLA for GPUs makes a launch for queries, one for keys and one for values, each of which adds the
bias, rotates, and sums again what a product has left in parts; a scatter into keys takes several
times as long as its bytes. Here a thread takes one pair of numbers of a head: those that turn
together. The cache is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from jax_specdec._src.attention.arrays import PIECE
from jax_specdec._src.mosaic.interpret import InterpretedThreads
from jax_specdec._src.mosaic.ptx import GpuThreads
from jax_specdec._src.mosaic.threads import THREADS, Threads

plgpu: Any = mosaic_gpu  # its stubs lack names, and call its transforms abstract


class RotateShape(NamedTuple):
    """The sizes of a launch."""

    num_rows: int  # M
    each: int  # S, rows of a request: queries of its heads lie side by side
    num_query: int  # N
    num_kv: int  # Nkv
    head_dim: int  # D
    num_requests: int  # of the cache
    room: int  # T
    has_bias: bool

    @property
    def half(self) -> int:
        """Returns how many pairs of numbers a head has."""
        return self.head_dim // 2

    @property
    def query_blocks(self) -> int:
        """Returns how many blocks the pairs of a row's queries take."""
        return -(-self.num_query * self.half // THREADS)

    @property
    def kv_blocks(self) -> int:
        """Returns how many blocks the pairs of its keys, and of its values, take."""
        return -(-self.num_kv * self.half // THREADS)


class RotateOperands(NamedTuple):
    """RotateArrays in global memory, or refs to them. Those that are written are flat."""

    query: Any  # [M * N * D], and more up to vectors of whole pieces; see `place_of_query`
    heads: Any  # [M, (N + 2 Nkv) D]
    cos: Any  # [M, D/2] float32
    sin: Any  # [M, D/2] float32
    places: Any  # [M] int32, positions of requests; others are not written
    owners: Any  # [M] int32, the requests of the cache
    keys: Any  # [B * Nkv * D * T]
    values: Any  # [B * Nkv * T * D]
    bias: Any = None  # [(N + 2 Nkv) D]


def rotate_and_write(
    operands: RotateOperands, shape: RotateShape, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries as `rows_of` has them, flat, then keys and values, flat.

    Args:
      operands: without `query`; rows of heads past M are not read.
      shape: of the launch.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.
    """
    # Refs are changed in place: a donated cache is not copied.
    keys = jax.new_ref(operands.keys)
    values = jax.new_ref(operands.values)
    arrays = [operands.heads, operands.cos, operands.sin, operands.places, operands.owners]
    bias = [operands.bias] if shape.has_bias else []
    with jax.enable_x64(False):
        launch = _launch(shape, operands.heads.dtype, interpret)
        query = launch(*arrays, keys, values, *bias)
    return query, jax.freeze(keys), jax.freeze(values)


def place_of_query(shape: RotateShape, row: Any, head: Any) -> Any:
    """Returns which row of `rows_of` a query is, in the order ``[B, Nkv, S, group]``."""
    each = jnp.int32(shape.each)
    group = jnp.int32(shape.num_query // shape.num_kv)
    request = lax.div(row, each)
    kv = lax.div(head, group)
    own = (request * shape.num_kv + kv) * each + lax.rem(row, each)
    return own * group + lax.rem(head, group)


def _launch(shape: RotateShape, dtype: Any, interpret: Any) -> Callable[..., jax.Array]:
    """Returns the kernel, a function of the arrays of `RotateOperands` after `query`."""

    def run(*refs: Any) -> None:
        *arrays, query = refs  # the output comes last
        threads = InterpretedThreads() if interpret else GpuThreads()
        _rotate(shape, RotateOperands(query, *arrays), threads)

    run.__name__ = "rotate_and_write"
    vectors = -(-shape.num_rows * shape.num_query // PIECE) * PIECE
    return plgpu.kernel(
        run,
        out_type=jax.ShapeDtypeStruct((vectors * shape.head_dim,), dtype),
        grid=(shape.query_blocks + shape.kv_blocks, shape.num_rows),
        grid_names=("block", "row"),
        compiler_params=plgpu.CompilerParams(
            approx_math=False, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )


def _rotate(shape: RotateShape, operands: RotateOperands, threads: Threads) -> None:
    """Writes the pairs of one block: of queries, or of keys and values."""
    block = lax.axis_index("block")
    row = lax.axis_index("row")

    def queries() -> None:
        pair, is_pair = _pairs(block, shape.num_query * shape.half, threads)
        head = lax.div(pair, jnp.int32(shape.half))
        i = lax.rem(pair, jnp.int32(shape.half))
        first, second = _turned(shape, operands, threads, row, head, i)
        place = place_of_query(shape, row, head) * shape.head_dim + i
        threads.scatter(operands.query, place, first, is_pair)
        threads.scatter(operands.query, place + shape.half, second, is_pair)

    def keys_and_values() -> None:
        pair, is_pair = _pairs(block - shape.query_blocks, shape.num_kv * shape.half, threads)
        kv = lax.div(pair, jnp.int32(shape.half))
        i = lax.rem(pair, jnp.int32(shape.half))
        keys = _turned(shape, operands, threads, row, kv + shape.num_query, i)
        values = _numbers(shape, operands, threads, row, kv + shape.num_query + shape.num_kv, i)
        # Where the row is in the cache, if it is.
        place = operands.places[row]
        owner = operands.owners[row]
        is_inside = (place >= 0) & (place < shape.room)
        is_inside = is_inside & (owner >= 0) & (owner < shape.num_requests)
        where = is_pair & is_inside
        head = kv + owner * shape.num_kv
        for offset, key, value in zip((0, shape.half), keys, values, strict=True):
            # Number by number, as `write_rows`: a value is finite, its key tells.
            is_finite = value - value == 0
            key = jnp.where(is_finite, key, jnp.nan)
            value = jnp.where(is_finite, value, 0.0)
            d = i + offset
            # [B * Nkv, D, T] and [B * Nkv, T, D]
            own = (head * shape.head_dim + d) * shape.room + place
            threads.scatter(operands.keys, own, key, where)
            own = (head * shape.room + place) * shape.head_dim + d
            threads.scatter(operands.values, own, value, where)

    pl.when(block < shape.query_blocks)(queries)
    pl.when(block >= shape.query_blocks)(keys_and_values)


def _pairs(block: jax.Array, count: int, threads: Threads) -> tuple[jax.Array, jax.Array]:
    """Returns the pair of each thread, and whether there is one; if not, it is the last."""
    pair = threads.index + block * THREADS
    return jnp.minimum(pair, count - 1), pair < count


def _numbers(
    shape: RotateShape, operands: RotateOperands, threads: Threads, row: Any, head: Any, i: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers i and i + D/2 of a head as float32, with their bias, rounded."""
    dtype = operands.query.dtype
    column = head * shape.head_dim + i
    found = []
    for at in (column, column + shape.half):
        number = threads.gather(operands.heads, row, at)
        if shape.has_bias:
            number = number + threads.gather(operands.bias, at)
            number = number.astype(dtype).astype(jnp.float32)
        found.append(number)
    return found[0], found[1]


def _turned(
    shape: RotateShape, operands: RotateOperands, threads: Threads, row: Any, head: Any, i: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers i and i + D/2 of a head, rotated."""
    first, second = _numbers(shape, operands, threads, row, head, i)
    cos = threads.gather(operands.cos, row, i)
    sin = threads.gather(operands.sin, row, i)
    return first * cos - second * sin, second * cos + first * sin
