"""Statistics of a row, by warp: maximum, argmax, mass, and the masses of its tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.verify.mosaic_gpu.cluster import tree_max, tree_sum
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, DraftSlice, TargetSlice
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Threads

LOG2E = 1.4426950408889634
LARGEST = 3.4028235e38

_LEAST_MASS, _LARGEST_MASS = 2.0**-80, 2.0**100
_LARGEST_SHIFT = 2.0**10
"""Up to this, rounding the shift of ``x * scale - shift`` costs 2**-14 of a mass at most."""


class Normalizer(NamedTuple):
    """Turns the entries of a row into probabilities.

    ``p = exp2((entry - peak) * scale) / total``, with the scale of the request, for entries that
    are not below `threshold`. The peak is the largest entry, or one of the same order.
    """

    peak: jax.Array
    total: jax.Array
    threshold: jax.Array

    @classmethod
    def of(cls, peak: jax.Array, total: jax.Array) -> Normalizer:
        """Of a row that is not filtered."""
        return cls(peak, total, jnp.float32(-jnp.inf))


class Exponent(NamedTuple):
    """``(entry - peak) * factor - shift``: the logarithm of a probability; no peak is 0.

    In one step, ``entry * factor - (peak * factor + shift)``, the last sum would be rounded, and it
    is as large as the largest entry over the temperature.
    """

    factor: jax.Array
    shift: jax.Array
    peak: jax.Array | None

    @classmethod
    def of(cls, row: Normalizer, scale: jax.Array) -> Exponent:
        return cls(scale, jnp.log2(row.total), row.peak)

    def times(self, weight: jax.Array) -> Exponent:
        """The exponent of the probabilities times a weight that is not 0."""
        return self._replace(shift=self.shift - jnp.log2(weight))

    def __call__(self, entry: jax.Array) -> jax.Array:
        entry = entry if self.peak is None else entry - self.peak
        return entry * self.factor - self.shift

    def probabilities(self, entries: Chunk) -> Chunk:
        """The probabilities of entries."""
        return [jnp.exp2(self(x)) for x in entries]


class Weights(NamedTuple):
    """The weights that a token is drawn by, from the entries of a target and a draft row.

    Attributes:
      p: of the target row.
      weighted: `p` times the joint weight of the drafts before.
      q: of the draft row; None if that holds probabilities.
    """

    p: Exponent
    weighted: Exponent
    q: Exponent | None

    def residual(self, targets: Chunk, drafts: Chunk) -> Chunk:
        """``(weight * p - q)+``; NaN where q is none."""
        return excess((jnp.exp2(self.weighted(x)) for x in targets), drafts, self.q)


def excess(p: Iterable[jax.Array], drafts: Chunk, exponent: Exponent | None) -> Chunk:
    """``(p - q)+``, as `rules.residual`; NaN where q is none.

    Args:
      p: probabilities times a joint weight, each computed when it is needed: fewer registers.
      drafts: entries of the draft row.
      exponent: from these to q; None if they are probabilities.
    """
    left = []
    for x, d in zip(p, drafts, strict=True):
        if exponent is None:
            left.append(jnp.where(d >= 0, jnp.maximum(x, d) - d, jnp.nan))
        else:
            q = jnp.exp2(exponent(d))
            left.append(jnp.maximum(x, q) - q)  # two instructions
    return left


def is_finite(x: jax.Array) -> jax.Array:
    return (x > -jnp.inf) & (x < jnp.inf)


def decay(peak: jax.Array, larger: jax.Array, scale: jax.Array) -> jax.Array:
    """The factor from a mass relative to `peak` to one relative to a `larger` peak."""
    return jnp.exp2(jnp.minimum((peak - larger) * scale, 0.0))


def base_of(peak: jax.Array) -> jax.Array:
    """What masses can be relative to: 0 in place of a peak that is not finite."""
    return jnp.where(is_finite(peak), peak, 0.0)


def weight_function(base: jax.Array, scale: jax.Array, size: int) -> Callable[[Chunk], Chunk]:
    """A function from entries of `size` bytes to ``exp2((entry - base) * scale)``."""
    shift = base * scale

    def weights(entries: Chunk) -> Chunk:
        return [jnp.exp2((x - base) * scale if size == 4 else x * scale - shift) for x in entries]

    return weights


def mass(
    tiles: TargetSlice | DraftSlice,
    row: jax.Array,
    rows_before: jax.Array | None,
    base: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """The mass of each warp's part of a row, relative to `base`; arguments as `TargetSlice.fold`.

    The base may be any number of the order of the row's largest entry: `is_usable` says, from the
    sum over all warps, whether it was.
    """
    threads, weights = tiles.threads, weight_function(base, scale, tiles.entry_size)

    def add(_: jax.Array, entries: list[jax.Array], total: jax.Array) -> jax.Array:
        return total + tree_sum(weights(entries))

    return threads.warp_sum(tiles.fold(row, rows_before, add, threads.filled(0.0)))


def tile_masses(
    tiles: TargetSlice,
    row: jax.Array,
    rows_before: jax.Array | None,
    weights: Callable[[Chunk], Chunk],
) -> list[jax.Array]:
    """Each warp's part of the weight of each tile of the slice; arguments as `TargetSlice.fold`."""
    threads = tiles.threads

    def add(tile: jax.Array, entries: list[jax.Array], sums: TileSums) -> TileSums:
        return sums.put(threads, tile, 0, tree_sum(weights(entries)))

    sums = tiles.fold(row, rows_before, add, TileSums.start(threads))
    return sums.first(threads, tiles.per_slice)


def is_usable(total: jax.Array, base: jax.Array, scale: jax.Array) -> jax.Array:
    """Whether a mass relative to `base` neither overflowed nor lost anything to underflow."""
    in_range = (total > _LEAST_MASS) & (total < _LARGEST_MASS)
    return in_range & (jnp.abs(base * scale) < _LARGEST_SHIFT)


def base_and_sum(
    tiles: TargetSlice, row: jax.Array, rows_before: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A base of each warp's part of a row, and the mass of that part relative to it.

    Tiles are read as they arrive, into memory that holds all of them. The base is the largest entry
    of the first tile: any entry of the order of the row's largest will do, so that the others need
    no comparison. If it turns out not to be of that order, `max_and_sum` reads the row again. The
    base is not finite if there is no mass.
    """
    threads, size = tiles.threads, jnp.dtype(tiles.rows.dtype).itemsize
    none, some = jnp.int32(0), tiles.count() > 0
    pl.when(some)(lambda: tiles.ready(row, none, rows_before))
    first = threads.warp_max(jnp.where(some, tree_max(tiles.of_tile(row, none)), -jnp.inf))
    base = base_of(first)
    weights = weight_function(base, scale, size)

    def add(tile: jax.Array, total: jax.Array) -> jax.Array:
        pl.when(tile > 0)(lambda: tiles.ready(row, tile, rows_before))
        return total + tree_sum(weights(tiles.of_tile(row, tile)))

    total = threads.warp_sum(lax.fori_loop(0, tiles.count(), add, threads.filled(0.0)))
    usable = is_finite(first) & (total < _LARGEST_MASS) & (jnp.abs(base * scale) < _LARGEST_SHIFT)
    return threads.cond(usable, lambda: (base, total), lambda: max_and_sum(tiles, row, scale))


def max_and_sum(
    tiles: TargetSlice | DraftSlice, row: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The maximum of each warp's part of a row that has arrived, and the mass relative to it."""
    threads = tiles.threads

    def add(tile: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        peak, total = state
        entries = tiles.of_tile(row, tile)
        larger = functools.reduce(jnp.maximum, entries, peak)
        base = base_of(larger)
        mass = tree_sum([jnp.exp2((x - base) * scale) for x in entries])
        return larger, total * decay(base_of(peak), base, scale) + mass

    start = (threads.filled(-jnp.inf), threads.filled(0.0))
    peak, total = lax.fori_loop(0, tiles.count(), add, start)
    larger = threads.warp_max(peak)
    return larger, threads.warp_sum(total * decay(base_of(peak), base_of(larger), scale))


def max_and_place(
    tiles: TargetSlice, row: jax.Array, rows_before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The maximum of each warp's part of a row, and the lowest id of it, as the bits of a float."""
    threads = tiles.threads

    def larger(tile: jax.Array, entries: list[jax.Array], state: Any) -> Any:
        peak, where = state
        mine = tree_max(entries)
        return jnp.maximum(peak, mine), jnp.where(peak >= mine, where, tile)

    start = (threads.filled(-jnp.inf), threads.filled(0, jnp.int32))
    peak, where = tiles.fold(row, rows_before, larger, start)
    best = threads.warp_max(peak)
    # Each thread reads the tile of its largest entry again.
    place = threads.filled(2**30, jnp.int32)
    both = zip(tiles.offsets, tiles.chunks(row, where), strict=True)
    for offset, chunk in reversed(list(both)):
        first = tiles.ids(where) + offset
        for j, x in reversed(list(enumerate(chunk))):
            place = jnp.where(x == best, first + j, place)
    return best, lax.bitcast_convert_type(threads.warp_min(place), jnp.float32)


class TileSums(NamedTuple):
    """Sums over each warp of the tiles so far.

    Tiles come in groups. The sums of a group are added up while the next group is read.

    Attributes:
      found: ``[128]`` by lane, the sums over the warp. Those of group g, of n tiles, are in the
        lanes whose index modulo ``32 / n`` is g.
      last: ``[128]`` each, each thread's part of the tiles of the latest group.
      group: ``[]`` int32, the index of that group.
    """

    found: jax.Array
    last: tuple[jax.Array, ...]
    group: jax.Array

    @classmethod
    def start(cls, threads: Threads, size: int = 1) -> TileSums:
        """Before the first group. Groups have `size` tiles, a power of two."""
        zero = threads.filled(0.0)
        return cls(zero, (zero,) * size, jnp.int32(-1))

    def put(
        self,
        threads: Threads,
        group: jax.Array,
        place: int,
        value: jax.Array,
        *,
        begins: bool = True,
    ) -> TileSums:
        """Put each thread's part of the tile at `place` of its group, or add more of it."""
        found = self._with_last(threads) if begins and not place else self.found
        value = value if begins else self.last[place] + value
        return TileSums(found, (*self.last[:place], value, *self.last[place + 1 :]), group)

    def first(self, threads: Threads, count: int) -> list[jax.Array]:
        """The sums over the warp of the first `count` tiles; 0 for tiles that never came."""
        found, size = self._with_last(threads), len(self.last)
        lanes = [i // size + _part_of(i % size, size) * (WARP // size) for i in range(count)]
        return [threads.shuffle(found, lane) for lane in lanes]

    def _with_last(self, threads: Threads) -> jax.Array:
        sums = _sums(threads, list(self.last))
        remainder = threads.index & (WARP // len(self.last) - 1)
        return jnp.where(remainder == self.group, sums, self.found)


def _sums(threads: Threads, xs: list[jax.Array]) -> jax.Array:
    """Sums over each warp of several arrays, as many as a power of two.

    `_part_of` says which lanes have which sum. At each step half of the lanes go on with every
    other array, so that few steps serve all.
    """
    lanes = WARP
    while len(xs) > 1:
        lanes //= 2
        upper = (threads.index & lanes) != 0
        pairs = list(zip(xs[::2], xs[1::2], strict=True))
        kept = [jnp.where(upper, b, a) for a, b in pairs]
        given = [jnp.where(upper, a, b) for a, b in pairs]
        both = zip(kept, given, strict=True)
        xs = [x + threads.shuffle(y, lanes, "bfly") for x, y in both]
    return threads.warp_sum(xs[0], lanes)


def _part_of(i: int, count: int) -> int:
    """Which of `count` parts of the lanes has the sum of array i: the bits of i reversed."""
    part = 0
    while count > 1:
        count //= 2
        part += (i & 1) * count
        i >>= 1
    return part
