"""Maximum, argmax, sums by tile and largest entries of every row of a matrix, in one pass over it.

A step of the grid has a block of 16 rows, which fill packed registers of 16-bit entries, and up to
nine tiles of ids. It reads the block twice in vector memory: for its maximum, and for the sums
relative to the largest entry so far. Sums of earlier blocks follow it. Lanes are combined once for
each tile.

The largest entries of a row are those of lists: each lane of every second register has one, so that
an entry is sorted in without looking at another lane.
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

from jax_specdec._src.verify.tiles import TILE, num_tiles

ROWS = 16
"""Rows of a block."""

_LANES = 128
_CHUNKS = TILE // _LANES
_TILES = 7, 8, 9
"""Tiles that a block may have."""

_CHAINS = 2
"""Maxima of a block that do not wait for each other."""

_LISTS, _DEPTH = 2, 6
"""Lists of largest entries in each lane, and how many entries each of them has."""

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
    least: jax.Array | None = None,
    *,
    with_sums: bool = True,
    ranked: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Statistics of rows.

    Args:
      logits: ``[M, W]`` bfloat16, float16 or float32.
      end: ``[]`` int32, columns from it on are read as -inf.
      inv_temperature: ``[M]`` float32.
      wants_argmax: ``[M]`` bool, the rows of which the argmax is wanted.
      least: ``[M]`` float32, at most the row's maximum: entries below it are left out of the sums.
        None to leave out none.
      with_sums: whether sums are wanted; if not, the argmax of every row is.
      ranked: ``[M]`` bool, the rows of which the largest entries are wanted; None if of no row.

    Returns:
      The maxima ``[M]`` float32; the argmaxes ``[M]`` int32, ties to the lowest column; and
      ``[M, T]`` float32, ``sum(exp((x - maximum) / temperature))`` by tiles of columns, T of them
      or more. If a row holds a NaN, its maximum or one of its sums is NaN or +inf. And None; if
      there are `ranked` rows, of each ``[M, L]`` float32 largest entries, and ``[M]`` float32: all
      entries larger than it are among them.
    """
    num_rows, width = logits.shape
    count = num_tiles(width)
    tiles = tiles_of_block(count)
    blocks = pl.cdiv(width, tiles * TILE)
    lanes = pl.cdiv(blocks * tiles, _LANES) * _LANES
    scale = jnp.minimum(inv_temperature * _LOG2E, jnp.finfo(jnp.float32).max)
    bounds = jnp.full_like(scale, -jnp.inf) if least is None else least
    groups = pl.cdiv(num_rows, ROWS)

    def wanted_by_group(rows: jax.Array) -> jax.Array:
        padded = jnp.pad(rows, (0, groups * ROWS - num_rows)).reshape(groups, ROWS)
        return jnp.any(padded, axis=1).astype(jnp.int32)

    if logits.dtype == jnp.float16:  # which no kernel takes: XLA copies the rows
        logits = lax.bitcast_convert_type(logits, jnp.int16)
    one: Any = pl.BlockSpec((ROWS, 1), lambda i, j, *_: (i, 0))
    by_tile: Any = pl.BlockSpec((ROWS, lanes), lambda i, j, *_: (i, 0))
    listed, kept = _LISTS * _DEPTH * _LANES, [] if ranked is None else [wanted_by_group(ranked)]
    of_row: Any = pl.BlockSpec((ROWS, listed), lambda i, j, *_: (i, 0))
    out_specs, shapes = (
        [one, one, by_tile],
        [(1, jnp.float32), (1, jnp.int32), (lanes, jnp.float32)],
    )
    if ranked is not None:
        is_float32 = logits.dtype != jnp.bfloat16
        out_specs.append(of_row)
        shapes.append((listed, jnp.float32 if is_float32 else jnp.bfloat16))
    peak, argmax, sums, *largest = pl.pallas_call(
        functools.partial(
            _kernel,
            tiles=tiles,
            has_least=least is not None,
            with_sums=with_sums,
            with_largest=ranked is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 + len(kept),
            grid=(groups, blocks),
            in_specs=[
                pl.BlockSpec((ROWS, 2), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((ROWS, tiles * TILE), lambda i, j, *_: (i, j)),
            ],
            out_specs=out_specs,
        ),
        out_shape=[jax.ShapeDtypeStruct((num_rows, n), dtype) for n, dtype in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        name="row_statistics",
    )(
        end[None],
        wanted_by_group(wants_argmax),
        *kept,
        jnp.stack([scale, bounds], axis=1),
        logits,
    )
    found = peak[:, 0], argmax[:, 0], sums
    if ranked is None:
        return *found, None
    entries = largest[0].astype(jnp.float32)
    ends = range(_DEPTH * _LANES, listed + 1, _DEPTH * _LANES)
    last = functools.reduce(jnp.maximum, [entries[:, end - _LANES : end] for end in ends])
    return *found, (entries, jnp.max(last, axis=1))


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
        peak_ref[...] = jnp.full_like(peak_ref, -jnp.inf)
        argmax_ref[...] = jnp.zeros_like(argmax_ref)
        sums_ref[...] = jnp.zeros_like(sums_ref)
        for ref in largest_ref:
            ref[...] = jnp.full_like(ref, -jnp.inf)

    @pl.when(end < tiles * TILE)  # what is past the end may hold anything
    def _() -> None:
        def clear(chunk: jax.Array, nothing: None) -> None:
            here = pl.ds(pl.multiple_of(chunk * _LANES, _LANES), _LANES)
            x, is_float = x_ref[:, here], x_ref.dtype != jnp.int16
            x = x.astype(jnp.float32 if is_float else jnp.int32)
            x = jnp.where(chunk * _LANES + _lane(_LANES) < end, x, -jnp.inf if is_float else _NONE)
            x_ref[:, here] = x.astype(x_ref.dtype)

        start = lax.div(jnp.maximum(end, 0), jnp.int32(_LANES))
        lax.fori_loop(start, jnp.int32(chunks), clear, None)

    def load(chunk: int) -> jax.Array:
        return _float32(x_ref[:, pl.ds(chunk * _LANES, _LANES)])

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
        column = jnp.where(largest == peak, chunk * _LANES + _lane(_LANES), chunks * _LANES)
        column = jnp.min(column, axis=1, keepdims=True)
        argmax_ref[...] = jnp.where(peak > peak_ref[...], first + column, argmax_ref[...])
        return peak

    def sort_in() -> None:
        (ref,) = largest_ref
        places = [pl.ds(i * _LANES, _LANES) for i in range(_LISTS * _DEPTH)]
        lists = [ref[:, place].astype(jnp.float32) for place in places]
        for chunk in range(chunks):
            x, its = load(chunk), chunk % _LISTS * _DEPTH
            for i in range(its, its + _DEPTH):
                lists[i], x = jnp.maximum(lists[i], x), jnp.minimum(lists[i], x)
        for place, entries in zip(places, lists, strict=True):
            ref[:, place] = entries.astype(ref.dtype)

    if with_largest:
        pl.when(ranked_ref[group] > 0)(sort_in)
    if with_sums:
        peak = lax.cond(wants_argmax_ref[group] > 0, maximum_and_argmax, maximum)
    else:
        peak = maximum_and_argmax()
    before = peak_ref[...]
    peak = jnp.maximum(before, peak)
    peak_ref[...] = peak
    if not with_sums:
        return
    scale, shape = row_ref[:, 0:1], (ROWS, _LANES)
    base = jnp.broadcast_to(jnp.where(jnp.abs(peak) < jnp.inf, peak, 0.0), shape)
    by, least = jnp.broadcast_to(scale, shape), jnp.broadcast_to(row_ref[:, 1:2], shape)

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
