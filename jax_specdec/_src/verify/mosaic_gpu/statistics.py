"""Passes over a warpgroup's slice of a row: its largest entry, its mass, its argmax."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.verify.mosaic_gpu.mail import tree_sum
from jax_specdec._src.verify.mosaic_gpu.rows import Pieces

_LIMIT = 2.0**26


class Normalizer(NamedTuple):
    """What turns the entries of a row into probabilities.

    ``p = exp2((entry - peak) * scale) / total``, scale that of the request.
    """

    peak: jax.Array
    total: jax.Array


class Exponent(NamedTuple):
    """``entry * factor - shift``: the same as ``(entry - peak) * scale - less``, in one step.

    The two roundings agree for all entries of a row, so masses relative to each other do not
    change. For entries of two bytes only: a factor is bounded such that the product with the peak
    stays in range, where all others have no weight anyway. With four bytes, two steps.
    """

    factor: jax.Array
    shift: jax.Array
    peak: jax.Array | None

    @classmethod
    def of(cls, peak: jax.Array, scale: jax.Array, less: Any, size: int) -> Exponent:
        if size == 4:
            return cls(scale, jnp.zeros_like(peak) + less, peak)
        factor = jnp.minimum(scale, _LIMIT / jnp.maximum(jnp.abs(peak), 1e-30))
        return cls(factor, peak * factor + less, None)

    def __call__(self, entry: jax.Array) -> jax.Array:
        entry = entry if self.peak is None else entry - self.peak
        return entry * self.factor - self.shift


def is_finite(x: jax.Array) -> jax.Array:
    return (x > -jnp.inf) & (x < jnp.inf)


def largest(xs: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, xs)


def decay(peak: jax.Array, larger: jax.Array, scale: jax.Array) -> jax.Array:
    """What a mass relative to `peak` is worth relative to a `larger` one."""
    return jnp.exp2(jnp.minimum((peak - larger) * scale, 0.0))


def _base(peak: jax.Array) -> jax.Array:
    return jnp.where(is_finite(peak), peak, 0.0)


def _size(pieces: Pieces) -> int:
    return jnp.dtype(pieces.held.dtype).itemsize


def peak_per_thread(pieces: Pieces, first: jax.Array, turn: jax.Array) -> jax.Array:
    """The largest entry that each thread reads, NaN if any is."""
    threads, dtype = pieces.threads, pieces.held.dtype

    def larger(tile: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
        for start in pieces.starts(turn, tile):
            found = threads.larger(found, pieces.held, start, pieces.each)
        return found

    begin = threads.nothing_yet(dtype, pieces.each)
    return threads.largest(lax.fori_loop(0, pieces.tiles(first), larger, begin), dtype)


def max_and_sum(
    pieces: Pieces, first: jax.Array, turn: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of each warp's part of a held row: the largest entry, and the mass relative to it."""
    threads = pieces.threads
    mine = peak_per_thread(pieces, first, turn)
    exponent = Exponent.of(_base(mine), scale, 0.0, _size(pieces))

    def add(tile: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        for start in pieces.starts(turn, tile):
            weights = [jnp.exp2(exponent(x)) for x in pieces.entries(start)]
            sums = [a + b for a, b in zip(sums, weights, strict=True)]
        return sums

    zeros = [threads.filled(0.0) for _ in range(pieces.each)]
    total = tree_sum(lax.fori_loop(0, pieces.tiles(first), add, zeros))
    return _of_warp(threads, mine, total, scale)


def _of_warp(
    threads: Any, peak: jax.Array, total: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    larger = threads.warp_max(peak)
    return larger, threads.warp_sum(total * decay(_base(peak), _base(larger), scale))


def max_and_place(
    pieces: Pieces, first: jax.Array, turn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of each warp's part: the largest entry, and the lowest id that has it, bit by bit."""
    threads = pieces.threads
    peak = threads.warp_max(peak_per_thread(pieces, first, turn))
    mine = first + threads.index() * pieces.each
    none = jnp.int32(2**30)

    def lowest(tile: jax.Array, found: jax.Array) -> jax.Array:
        for i, start in enumerate(pieces.starts(turn, tile)):
            begin = mine + (tile * pieces.tile_size + i * pieces.chunk)
            places = [
                jnp.where(x == peak, begin + j, none) for j, x in enumerate(pieces.entries(start))
            ]
            found = functools.reduce(jnp.minimum, places, found)
        return found

    start = threads.filled(2**30, jnp.int32)
    place = threads.warp_min(lax.fori_loop(0, pieces.tiles(first), lowest, start))
    return peak, lax.bitcast_convert_type(place, jnp.float32)


# Rows that are held tile by tile.


def open_row(tiles: Pieces, row: jax.Array, first: jax.Array, turn: jax.Array) -> None:
    """Fetch the first tiles of a row's slice, the first of them at `turn`."""
    for tile in range(min(tiles.slots, tiles.per_slice)):
        start = first + tile * tiles.length
        pl.when(tile < tiles.tiles_of(first))(
            lambda start=start, tile=tile: tiles.fetch(row, start, turn + tile)
        )


def ready(tiles: Pieces, row: jax.Array, first: jax.Array, turn: jax.Array, tile: Any) -> None:
    """Wait for one tile of a row that was opened."""
    tiles.wait(row, first + tile * tiles.length, turn + tile)


def release(tiles: Pieces, row: jax.Array, first: jax.Array, turn: jax.Array, tile: Any) -> None:
    """Fetch what follows into the slot of a tile that has been read."""
    if tiles.slots >= tiles.per_slice:
        return
    following = tile + tiles.slots

    @pl.when(following < tiles.tiles_of(first))
    def _() -> None:
        tiles.threads.meet()  # all have read what the copy will overwrite
        tiles.fetch(row, first + following * tiles.length, turn + following)


def max_and_sum_in_turn(
    tiles: Pieces, row: jax.Array, first: jax.Array, turn: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`max_and_sum` of a row that is not open yet, tile by tile."""
    threads = tiles.threads

    def add(tile: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        peak, total = state
        ready(tiles, row, first, turn, tile)
        entries = [x for s in tiles.starts(turn + tile, 0) for x in tiles.entries(s)]
        larger = functools.reduce(jnp.maximum, entries, peak)
        exponent = Exponent.of(_base(larger), scale, 0.0, _size(tiles))
        mass = tree_sum([jnp.exp2(exponent(x)) for x in entries])
        release(tiles, row, first, turn, tile)
        return larger, total * decay(_base(peak), _base(larger), scale) + mass

    open_row(tiles, row, first, turn)
    start = (threads.filled(-jnp.inf), threads.filled(0.0))
    peak, total = lax.fori_loop(0, tiles.tiles_of(first), add, start)
    return _of_warp(threads, peak, total, scale)
