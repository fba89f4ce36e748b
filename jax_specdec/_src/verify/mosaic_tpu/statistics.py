"""Maximum, argmax, sums by tile and largest entries of every row of a matrix, in one pass over it.

A step of the grid has a block of 16 rows, which fill packed registers of 16-bit entries, and up to
nine tiles of ids. It reads the block in vector memory: for its maximum, for the place of it, and
for the sums relative to the largest entry so far. Sums of earlier blocks follow it.

The largest entries are sorted into lists while the block is in vector memory: see `largest`.
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

from jax_specdec._src.verify.mosaic_tpu.blocks import VMEM, Blocks, clear, in_powers_of_two, of_rows
from jax_specdec._src.verify.mosaic_tpu.largest import LANES, NUM_LISTED, PLACES, sort_in

ROWS = 16
"""Rows of a block."""

_TILES = 9
"""Tiles of a block, at most."""

X = TypeVar("X")

_NONE = -1024  # the bits of a float16 -inf


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
    """Returns statistics of rows.

    Args:
      logits: ``[M, W]`` bfloat16, float16 or float32.
      end: ``[]`` int32, columns from it on are read as -inf.
      inv_temperature: ``[M]`` float32.
      wants_argmax: ``[M]`` bool, the rows of which the argmax is wanted.
      limits: ``[M]`` float32 each: the maximum, if it is known, and the least entry that is summed,
        at most the maximum. None for all entries. The argmax is not found again.
      with_sums: whether sums are wanted.
      ranked: ``[M]`` bool, the rows of which the largest entries are wanted; None if of no row.

    Returns:
      The maxima ``[M]`` float32; the argmaxes ``[M]`` int32, ties to the lowest column; and
      ``[M, T]`` float32, ``sum(exp((x - maximum) / temperature))`` by tiles of columns, T of them
      or more. If a row holds a NaN, its maximum or one of its sums is NaN or +inf. And None, or
      the lists ``[M, L]`` of `mosaic_tpu.largest`; of a row that is not `ranked` they may be empty.
    """
    num_rows = logits.shape[0]
    blocks = Blocks.of(logits.shape[1], _TILES)
    # [M, 1 or 3]: the temperature of each row, and perhaps its maximum and threshold
    numbers = [in_powers_of_two(inv_temperature), *(limits or ())]
    groups = pl.cdiv(num_rows, ROWS)

    def wanted_by_group(rows: jax.Array) -> jax.Array:
        """Returns whether any row of each group is wanted, ``[groups]`` int32."""
        padded = jnp.pad(rows, (0, groups * ROWS - num_rows)).reshape(groups, ROWS)
        return jnp.any(padded, axis=1).astype(jnp.int32)

    if logits.dtype == jnp.float16:  # which no kernel takes: XLA copies the rows
        logits = lax.bitcast_convert_type(logits, jnp.int16)
    # What is kept of 16 rows from block to block, by columns: maximum, argmax, sums, lists.
    out = [(1, jnp.float32), (1, jnp.int32), (blocks.num_sums, jnp.float32)]
    if ranked is not None:
        out.append((NUM_LISTED, jnp.bfloat16 if logits.dtype == jnp.bfloat16 else jnp.float32))
    flags = map(wanted_by_group, (wants_argmax, wants_argmax if ranked is None else ranked))
    peak, argmax, sums, *lists = pl.pallas_call(
        functools.partial(
            _kernel, blocks=blocks, has_least=limits is not None, with_sums=with_sums
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,  # the end, and what each group wants
            grid=(groups, blocks.num),
            in_specs=[
                of_rows(ROWS, len(numbers)),
                pl.BlockSpec((ROWS, blocks.width), lambda i, j, *_: (i, j)),
            ],
            out_specs=[of_rows(ROWS, columns) for columns, _ in out],
        ),
        out_shape=[jax.ShapeDtypeStruct((num_rows, *shape), dtype) for *shape, dtype in out],
        compiler_params=pltpu.CompilerParams(
            # Groups do not depend on each other; blocks of a group come in order.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        name="row_statistics",
    )(end[None], *flags, jnp.stack(numbers, axis=1), logits)
    return peak[:, 0], argmax[:, 0], sums, lists[0] if lists else None


def _kernel(
    end_ref: Any,
    wants_argmax_ref: Any,
    ranked_ref: Any,
    row_ref: Any,
    x_ref: Any,
    peak_ref: Any,
    argmax_ref: Any,
    sums_ref: Any,
    *lists_ref: Any,
    blocks: Blocks,
    has_least: bool,
    with_sums: bool,
) -> None:
    """One block of rows and tiles. What is found is kept from block to block of the same rows."""
    group = pl.program_id(0)
    block = pl.program_id(1)
    first = block * blocks.width
    chunks = blocks.width // LANES

    # Before the first block of these rows.
    @pl.when(block == 0)
    def _() -> None:
        none = jnp.full_like(peak_ref, -jnp.inf)
        peak_ref[...] = row_ref[:, 1:2] if has_least else none
        argmax_ref[...] = jnp.zeros_like(argmax_ref)
        sums_ref[...] = jnp.zeros_like(sums_ref)
        for ref in lists_ref:
            ref[...] = jnp.full_like(ref, -jnp.inf)

    # Past the last id anything may stand.
    clear(x_ref, end_ref[0] - first, _NONE if x_ref.dtype == jnp.int16 else -jnp.inf)

    def load(chunk: int) -> jax.Array:
        return _float32(x_ref[:, pl.ds(chunk * LANES, LANES)])

    def chains(entry: Callable[[int], X], larger: Callable[[X, X], X]) -> list[X]:
        """Returns the largest of even and of odd chunks, which do not wait for each other."""
        found = [entry(0), entry(1)]
        for i in range(2, chunks):
            found[i % 2] = larger(found[i % 2], entry(i))
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

        # [16, 128]: the largest entry of each lane, and its chunk; the earlier of equal ones
        (a, i), (b, j) = chains(entry, larger)
        is_a = (a > b) | ((a == b) & (i < j))
        largest, chunk = jnp.where(is_a, a, b), jnp.where(is_a, i, j)
        # [16, 1]: the largest of all lanes, and the lowest column that has it
        peak = jnp.max(largest, axis=1, keepdims=True)
        column = chunk * LANES + lax.broadcasted_iota(jnp.int32, chunk.shape, 1)
        column = jnp.where(largest == peak, column, blocks.width)
        column = jnp.min(column, axis=1, keepdims=True)
        argmax_ref[...] = jnp.where(peak > peak_ref[...], first + column, argmax_ref[...])
        return peak

    def listed() -> list[jax.Array]:
        return [lists_ref[0][:, place].astype(jnp.float32) for place in PLACES]

    def listed_maximum() -> jax.Array:
        return jnp.max(functools.reduce(jnp.maximum, listed()), axis=1, keepdims=True)

    # Where the largest entries are listed, the maximum is among them.
    without_argmax = maximum
    is_ranked = ranked_ref[group] > 0
    for ref in lists_ref:
        without_argmax = functools.partial(lax.cond, is_ranked, listed_maximum, maximum)

        @pl.when(is_ranked)
        def _(ref: Any = ref) -> None:
            lists = sort_in(listed(), load, chunks)
            for place, entries in zip(PLACES, lists, strict=True):
                ref[:, place] = entries.astype(ref.dtype)

    # The maximum of all blocks so far.
    before = peak = peak_ref[...]
    if not with_sums:
        peak = maximum_and_argmax()
    elif not has_least:
        peak = lax.cond(wants_argmax_ref[group] > 0, maximum_and_argmax, without_argmax)
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

    # The sums of earlier blocks are moved to the new maximum; those of this one are put beside.
    sums_ref[...] *= jnp.exp2(jnp.where(before == peak, 0.0, before - peak) * scale)
    blocks.put_sums(sums_ref, exponential)


def _float32(x: jax.Array) -> jax.Array:
    """Returns entries in float32; int16 holds the bits of float16."""
    if x.dtype != jnp.int16:
        return x.astype(jnp.float32)
    bits = x.astype(jnp.int32)
    size = bits & 0x7FFF  # without the sign
    moved = (size << 13) + (112 << 23)  # exponents count from 127 instead of 15
    moved = jnp.where(size < 0x7C00, moved, moved + (112 << 23))  # inf and NaN
    # Below the smallest normal number the bits are an integer times 2^-24.
    normal = lax.bitcast_convert_type(moved, jnp.float32)
    magnitude = jnp.where(size < 0x0400, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -magnitude, magnitude)
