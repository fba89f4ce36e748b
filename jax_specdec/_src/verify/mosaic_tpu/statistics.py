"""Maximum, argmax, sums by tile and largest entries of every row of a matrix, in one pass over it.

A step of the grid has a block of 16 rows, which fill packed registers of 16-bit entries, and up to
nine tiles of ids. It reads the block twice in vector memory: for its maximum, and for the sums
relative to the largest entry so far. Sums of earlier blocks follow it. Lanes are combined once for
each tile.

The largest entries are sorted into lists while the block is in vector memory (`verify.largest`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_specdec._src.verify.largest import LANES, NUM_LISTED, PLACES, sort_in
from jax_specdec._src.verify.tiles import TILE, num_tiles

ROWS = 16
"""Rows of a block."""

_CHUNKS = TILE // LANES
_TILES = 7, 8, 9
"""Tiles that a block may have."""

_CHAINS = 2
"""Maxima of a block that do not wait for each other."""

X = TypeVar("X")

_VMEM = 8 * 2**20
"""Bytes of vector memory that it may take; every TPU gives a kernel twice as many."""

_LOG2E = 1.4426950408889634
_NONE = -1024  # the bits of a float16 -inf


def tiles_of_block(count: int) -> int:
    """How many of a row's tiles a block has: of `_TILES`, those that leave the least empty."""
    return min(count, min(_TILES, key=lambda n: (-(-count // n) * n, -n)))


def row_statistics(
    logits: jax.Array,
    end: jax.Array,
    inv_temperature: jax.Array,
    wants_argmax: jax.Array,
    limits: tuple[jax.Array, jax.Array] | None = None,
    *,
    with_sums: bool = True,
    ranked: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Statistics of rows.

    Args:
      logits: ``[M, W]`` bfloat16, float16 or float32.
      end: ``[]`` int32, columns from it on are read as -inf.
      inv_temperature: ``[M]`` float32.
      wants_argmax: ``[M]`` bool, the rows of which the argmax is wanted.
      limits: ``[M]`` float32 each: the maximum, if it is known, and the least entry that is summed,
        at most the maximum. None for all entries. The argmax is not found again.
      with_sums: whether sums are wanted; if not, the argmax of every row is.
      ranked: ``[M]`` bool, the rows of which the largest entries are wanted; None if of no row.

    Returns:
      The maxima ``[M]`` float32; the argmaxes ``[M]`` int32, ties to the lowest column; and
      ``[M, T]`` float32, ``sum(exp((x - maximum) / temperature))`` by tiles of columns, T of them
      or more. If a row holds a NaN, its maximum or one of its sums is NaN or +inf. And None, or
      the lists ``[M, L]`` of `verify.largest`; of a row that is not `ranked` they may be empty.
    """
    num_rows, width = logits.shape
    count = num_tiles(width)
    tiles = tiles_of_block(count)
    blocks = pl.cdiv(width, tiles * TILE)
    lanes = pl.cdiv(blocks * tiles, LANES) * LANES
    scale = jnp.minimum(inv_temperature * _LOG2E, jnp.finfo(jnp.float32).max)
    numbers, groups = [scale, *(limits or ())], pl.cdiv(num_rows, ROWS)

    def wanted_by_group(rows: jax.Array) -> jax.Array:
        padded = jnp.pad(rows, (0, groups * ROWS - num_rows)).reshape(groups, ROWS)
        return jnp.any(padded, axis=1).astype(jnp.int32)

    if logits.dtype == jnp.float16:  # which no kernel takes: XLA copies the rows
        logits = lax.bitcast_convert_type(logits, jnp.int16)
    one: Any = pl.BlockSpec((ROWS, 1), lambda i, j, *_: (i, 0))
    by_tile: Any = pl.BlockSpec((ROWS, lanes), lambda i, j, *_: (i, 0))
    out = [(one, jnp.float32, 1), (one, jnp.int32, 1), (by_tile, jnp.float32, lanes)]
    flags = [wanted_by_group(wants_argmax)]
    if ranked is not None:
        lists = pl.BlockSpec((ROWS, NUM_LISTED), lambda i, j, *_: (i, 0))
        stored = jnp.bfloat16 if logits.dtype == jnp.bfloat16 else jnp.float32
        out.append((lists, stored, NUM_LISTED))
        flags.append(wanted_by_group(ranked))
    peak, argmax, sums, *largest = pl.pallas_call(
        functools.partial(
            _kernel,
            tiles=tiles,
            has_least=limits is not None,
            with_sums=with_sums,
            with_largest=ranked is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(flags),
            grid=(groups, blocks),
            in_specs=[
                pl.BlockSpec((ROWS, len(numbers)), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((ROWS, tiles * TILE), lambda i, j, *_: (i, j)),
            ],
            out_specs=[spec for spec, _, _ in out],
        ),
        out_shape=[jax.ShapeDtypeStruct((num_rows, n), dtype) for _, dtype, n in out],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        name="row_statistics",
    )(
        end[None],
        *flags,
        jnp.stack(numbers, axis=1),
        logits,
    )
    found = peak[:, 0], argmax[:, 0], sums
    if ranked is None:
        return *found, None
    return *found, largest[0]


def _kernel(
    end_ref: Any,
    wants_argmax_ref: Any,
    *refs: Any,
    tiles: int,
    has_least: bool,
    with_sums: bool,
    with_largest: bool,
) -> None:
    """One block of rows and tiles. What is found is kept from block to block of the same rows."""
    ranked_ref, refs = (refs[0], refs[1:]) if with_largest else (wants_argmax_ref, refs)
    row_ref, x_ref, peak_ref, argmax_ref, sums_ref, *largest_ref = refs
    group, block = pl.program_id(0), pl.program_id(1)
    first, chunks = block * tiles * TILE, tiles * _CHUNKS
    end = end_ref[0] - first

    @pl.when(block == 0)
    def _() -> None:
        none = jnp.full_like(peak_ref, -jnp.inf)
        peak_ref[...] = row_ref[:, 1:2] if has_least else none
        argmax_ref[...] = jnp.zeros_like(argmax_ref)
        sums_ref[...] = jnp.zeros_like(sums_ref)
        for ref in largest_ref:
            ref[...] = jnp.full_like(ref, -jnp.inf)

    @pl.when(end < tiles * TILE)  # what is past the end may hold anything
    def _() -> None:
        def clear(chunk: jax.Array, nothing: None) -> None:
            here = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
            x, is_float = x_ref[:, here], x_ref.dtype != jnp.int16
            x = x.astype(jnp.float32 if is_float else jnp.int32)
            x = jnp.where(chunk * LANES + _lane(LANES) < end, x, -jnp.inf if is_float else _NONE)
            x_ref[:, here] = x.astype(x_ref.dtype)

        start = lax.div(jnp.maximum(end, 0), jnp.int32(LANES))
        lax.fori_loop(start, jnp.int32(chunks), clear, None)

    def load(chunk: int) -> jax.Array:
        return _float32(x_ref[:, pl.ds(chunk * LANES, LANES)])

    def chains(entry: Callable[[int], X], larger: Callable[[X, X], X]) -> list[X]:
        found = [entry(i) for i in range(_CHAINS)]
        for i in range(_CHAINS, chunks):
            found[i % _CHAINS] = larger(found[i % _CHAINS], entry(i))
        return found

    def maximum() -> jax.Array:
        found = functools.reduce(jnp.maximum, chains(load, jnp.maximum))
        return jnp.max(found, axis=1, keepdims=True)

    def maximum_and_argmax() -> jax.Array:
        def entry(chunk: int) -> tuple[jax.Array, jax.Array]:
            x = load(chunk)
            return jnp.where(x != x, jnp.inf, x), jnp.full(x.shape, chunk, jnp.int32)

        def larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
            return jnp.maximum(a[0], b[0]), jnp.where(b[0] > a[0], b[1], a[1])

        def first_of(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
            is_a = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
            return jnp.where(is_a, a[0], b[0]), jnp.where(is_a, a[1], b[1])

        largest, chunk = functools.reduce(first_of, chains(entry, larger))
        peak = jnp.max(largest, axis=1, keepdims=True)
        column = jnp.where(largest == peak, chunk * LANES + _lane(LANES), chunks * LANES)
        column = jnp.min(column, axis=1, keepdims=True)
        argmax_ref[...] = jnp.where(peak > peak_ref[...], first + column, argmax_ref[...])
        return peak

    def listed() -> list[jax.Array]:
        return [largest_ref[0][:, place].astype(jnp.float32) for place in PLACES]

    def listed_maximum() -> jax.Array:
        return jnp.max(functools.reduce(jnp.maximum, listed()), axis=1, keepdims=True)

    def without_argmax() -> jax.Array:
        return lax.cond(is_ranked, listed_maximum, maximum) if with_largest else maximum()

    is_ranked = ranked_ref[group] > 0
    if with_largest:

        @pl.when(is_ranked)
        def _() -> None:
            lists = sort_in(listed(), load, chunks)
            for place, entries in zip(PLACES, lists, strict=True):
                largest_ref[0][:, place] = entries.astype(largest_ref[0].dtype)

    before = peak_ref[...]
    if has_least:
        peak = before
    elif with_sums:
        peak = lax.cond(wants_argmax_ref[group] > 0, maximum_and_argmax, without_argmax)
    else:
        peak = maximum_and_argmax()
    peak = jnp.maximum(before, peak)
    peak_ref[...] = peak
    if not with_sums:
        return
    scale, shape = row_ref[:, 0:1], (ROWS, LANES)
    base = jnp.broadcast_to(jnp.where(jnp.abs(peak) < jnp.inf, peak, 0.0), shape)
    by, least = jnp.broadcast_to(scale, shape), jnp.broadcast_to(row_ref[:, -1:], shape)

    def exponential(chunk: int) -> jax.Array:
        x = load(chunk)
        x = jnp.where(x < least, -jnp.inf, x) if has_least else x
        return jnp.exp2((x - base) * by)

    tile = _lane(sums_ref.shape[1])
    sums = sums_ref[...] * jnp.exp2(jnp.where(before == peak, 0.0, before - peak) * scale)
    for t in range(tiles):
        total = sum(
            map(exponential, range(t * _CHUNKS + 1, (t + 1) * _CHUNKS)), exponential(t * _CHUNKS)
        )
        total = jnp.sum(total, axis=1, keepdims=True)
        sums = jnp.where(tile == block * tiles + t, total, sums)
    sums_ref[...] = sums


def _lane(count: int) -> jax.Array:
    """``[ROWS, count]``, the column of each entry."""
    return lax.broadcasted_iota(jnp.int32, (ROWS, count), 1)


def _float32(x: jax.Array) -> jax.Array:
    """Entries in float32; int16 holds the bits of float16."""
    if x.dtype != jnp.int16:
        return x.astype(jnp.float32)
    bits = x.astype(jnp.int32)
    size = bits & 0x7FFF
    moved = (size << 13) + (112 << 23)  # exponents count from 127 instead of 15
    moved = jnp.where(size < 0x7C00, moved, moved + (112 << 23))  # inf and NaN
    normal = lax.bitcast_convert_type(moved, jnp.float32)
    magnitude = jnp.where(size < 0x0400, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -magnitude, magnitude)
