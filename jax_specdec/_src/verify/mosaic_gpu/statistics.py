"""Statistics of a row, by warp: maximum, argmax, mass, and the masses of its tiles.

The mass of entries is the sum of ``exp2((entry - base) * factor)``, where `factor` is that of the
request, log2(e) / temperature: a sum of exponentials, up to the base. Every warp reads its part of
every tile of the slice that its CTA holds, so a function here gives what one warp found. `cluster`
joins what all warps found.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.mosaic.threads import WARP, Threads
from jax_specdec._src.verify.mosaic_gpu.cluster import tree_max, tree_sum
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, DraftSlice, TargetSlice

LOG2E = 1.4426950408889634
"""exp(x) = exp2(x * LOG2E); GPUs have an instruction for exp2 alone."""

LARGEST = 3.4028235e38
"""The largest float32."""

NO_PLACE = 2**30
"""Greater than any id: what a thread gives that has not found one."""

_LEAST_MASS = 2.0**-80
"""A mass below this may have lost entries to underflow: exp2 gives 0 from 2**-126 on."""

_LARGEST_MASS = 2.0**100
"""A mass above this may be near overflow, at 2**128."""

_LARGEST_SHIFT = 2.0**10
"""Up to this, rounding the shift of ``x * factor - shift`` costs 2**-14 of a mass at most."""


class Normalizer(NamedTuple):
    """Turns the entries of a row into probabilities.

    ``p = exp2((entry - peak) * factor) / total``, with the factor of the request, for entries that
    are not below `threshold`. The peak is the largest entry, or one of the same order.
    """

    peak: jax.Array  # [] float32, not finite for a bad row
    total: jax.Array  # [] float32, the mass of the row relative to the peak
    threshold: jax.Array  # [] float32, entries below it were filtered out; -inf if none were

    @classmethod
    def of(cls, peak: jax.Array, total: jax.Array) -> Normalizer:
        """Returns the normalizer of a row that is not filtered."""
        return cls(peak=peak, total=total, threshold=jnp.float32(-jnp.inf))

    def exponent(self, factor: jax.Array) -> RelativeExponent:
        """Returns what turns the row's entries into probabilities."""
        return RelativeExponent(factor=factor, shift=jnp.log2(self.total), peak=self.peak)


# From the entries of a row to probabilities.


class Probability(Protocol):
    """Turns entries of a row into probabilities, by each thread."""

    def of(self, entry: jax.Array) -> jax.Array:
        """Returns the probability of an entry."""

    def excess(self, p: jax.Array, entry: jax.Array) -> jax.Array:
        """Returns ``(p - q)+`` for the probability q of an entry; NaN where it is none."""


class GivenProbability(NamedTuple):
    """For rows that hold probabilities."""

    def of(self, entry: jax.Array) -> jax.Array:
        """Returns the entry."""
        return entry

    def excess(self, p: jax.Array, entry: jax.Array) -> jax.Array:
        """Returns ``(p - q)+``; NaN where q is negative or NaN."""
        return jnp.where(entry >= 0, jnp.maximum(p, entry) - entry, jnp.nan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exponent:
    """For rows of logits: log2 of a probability is ``entry * factor - shift``."""

    factor: jax.Array  # [] or [128] float32, log2(e) / temperature
    shift: jax.Array  # of the same shape, log2 of the row's mass

    def log2_of(self, entry: jax.Array) -> jax.Array:
        """Returns log2 of the probability of an entry."""
        return entry * self.factor - self.shift

    def times(self, weight: jax.Array) -> Exponent:
        """Returns the exponent of the probabilities times a weight that is not 0."""
        return dataclasses.replace(self, shift=self.shift - jnp.log2(weight))

    def of(self, entry: jax.Array) -> jax.Array:
        """Returns the probability of an entry."""
        return jnp.exp2(self.log2_of(entry))

    def of_chunk(self, entries: Chunk) -> Chunk:
        """Returns the probability of each entry."""
        return [self.of(x) for x in entries]

    def excess(self, p: jax.Array, entry: jax.Array) -> jax.Array:
        """Returns ``(p - q)+``, in two instructions: a maximum and a subtraction."""
        q = self.of(entry)
        return jnp.maximum(p, q) - q


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeExponent(Exponent):
    """An exponent relative to a peak: ``(entry - peak) * factor - shift``.

    In one step, ``entry * factor - (peak * factor + shift)``, the last sum would be rounded, and it
    is as large as the largest entry over the temperature.
    """

    # Float32 of the same shape, the largest entry of the row or one of the same order.
    peak: jax.Array

    def log2_of(self, entry: jax.Array) -> jax.Array:
        return (entry - self.peak) * self.factor - self.shift


def excess(p: Iterable[jax.Array], drafts: Chunk, q: Probability) -> Chunk:
    """Returns ``(p - q)+`` for each id of a chunk, as `rules.residual`; NaN where q is none.

    Args:
      p: probabilities times a joint weight, each computed when it is needed: fewer registers.
      drafts: entries of the draft row.
      q: from these to probabilities.
    """
    return [q.excess(x, entry) for x, entry in zip(p, drafts, strict=True)]


def is_finite(x: jax.Array) -> jax.Array:
    """Returns whether x is neither NaN nor infinite."""
    return (x > -jnp.inf) & (x < jnp.inf)


# Masses. Their base need not be the largest entry: any number of the order of it will do.


def decay(peak: jax.Array, larger: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns what turns a mass relative to `peak` into one relative to a `larger` peak."""
    return jnp.exp2(jnp.minimum((peak - larger) * factor, 0.0))


def base_of(peak: jax.Array) -> jax.Array:
    """Returns a base for masses: the peak, or 0 where it is not finite."""
    return jnp.where(is_finite(peak), peak, 0.0)


def is_usable(total: jax.Array, base: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns whether a mass relative to `base` neither overflowed nor lost anything to underflow.

    If not, the base was not of the order of the row's largest entry, and the row is read again.
    """
    in_range = (total > _LEAST_MASS) & (total < _LARGEST_MASS)
    return in_range & (jnp.abs(base * factor) < _LARGEST_SHIFT)


def weight_function(base: jax.Array, factor: jax.Array, size: int) -> Callable[[Chunk], Chunk]:
    """Returns a function from entries of `size` bytes to ``exp2((entry - base) * factor)``."""
    shift = base * factor

    def weights(entries: Chunk) -> Chunk:
        if size == 4:
            return [jnp.exp2((x - base) * factor) for x in entries]
        # One fused multiply-add. Rounding the shift costs 2**-14 of a mass, see _LARGEST_SHIFT: too
        # much for entries of four bytes.
        return [jnp.exp2(x * factor - shift) for x in entries]

    return weights


def mass(
    tiles: TargetSlice | DraftSlice,
    row: jax.Array,
    rows_before: jax.Array | None,
    base: jax.Array,
    factor: jax.Array,
) -> jax.Array:
    """Returns the mass of each warp's part of a row, relative to `base`.

    Args:
      tiles: the slice to read; it, `row` and `rows_before` are as in `TargetSlice.fold`.
      row: ``[]`` int32.
      rows_before: ``[]`` int32, or None for a row that has arrived.
      base: ``[]`` float32. `is_usable` says, from the sum over all warps, whether it would do.
      factor: ``[]`` float32.
    """
    threads = tiles.threads
    weights = weight_function(base, factor, tiles.entry_size)

    def add(_: jax.Array, entries: list[jax.Array], total: jax.Array) -> jax.Array:
        return total + tree_sum(weights(entries))

    # [128], a sum for each thread; then the same for all threads of a warp.
    by_thread = tiles.fold(row, rows_before, add, threads.filled(0.0))
    return threads.warp_sum(by_thread)


def tile_masses(
    tiles: TargetSlice,
    row: jax.Array,
    rows_before: jax.Array | None,
    weights: Callable[[Chunk], Chunk],
) -> list[jax.Array]:
    """Returns each warp's part of the weight of each tile of the slice, a ``[128]`` for each tile.

    Args:
      tiles: the slice to read; it, `row` and `rows_before` are as in `TargetSlice.fold`.
      row: ``[]`` int32.
      rows_before: ``[]`` int32, or None for a row that has arrived.
      weights: from a tile's entries to what is summed.
    """
    threads = tiles.threads

    def add(tile: jax.Array, entries: list[jax.Array], sums: TileSums) -> TileSums:
        return sums.put(threads, tile, 0, tree_sum(weights(entries)))

    sums = tiles.fold(row, rows_before, add, TileSums.start(threads))
    return sums.first(threads, tiles.per_slice)


def max_and_sum(
    tiles: TargetSlice | DraftSlice, row: jax.Array, factor: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum of each warp's part of a row that has arrived, and its mass by that.

    In one pass: where a larger entry comes, the mass so far is scaled down to it.
    """
    threads = tiles.threads

    def add(tile: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        peak, total = state
        entries = tiles.of_tile(row, tile)
        larger = functools.reduce(jnp.maximum, entries, peak)
        # The mass of this tile by the larger maximum, and what was summed so far with it.
        base = base_of(larger)
        mass = tree_sum([jnp.exp2((x - base) * factor) for x in entries])
        return larger, total * decay(base_of(peak), base, factor) + mass

    # [128] each: a maximum and a mass for each thread.
    start = (threads.filled(-jnp.inf), threads.filled(0.0))
    peak, total = lax.fori_loop(0, tiles.count(), add, start)
    # All threads of a warp: the mass of each relative to the largest of all.
    larger = threads.warp_max(peak)
    return larger, threads.warp_sum(total * decay(base_of(peak), base_of(larger), factor))


def max_and_place(
    tiles: TargetSlice, row: jax.Array, rows_before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum of each warp's part of a row, and the lowest id of it.

    The id comes as the bits of a float32, because an exchange sends floats.
    """
    threads = tiles.threads

    def larger(tile: jax.Array, entries: list[jax.Array], state: Any) -> Any:
        peak, where = state
        mine = tree_max(entries)
        return jnp.maximum(peak, mine), jnp.where(peak >= mine, where, tile)

    # [128] each: the maximum of each thread, and the first tile that has it. The id itself would
    # take a comparison for each entry.
    start = (threads.filled(-jnp.inf), threads.filled(0, jnp.int32))
    peak, where = tiles.fold(row, rows_before, larger, start)
    best = threads.warp_max(peak)
    # Each thread reads the tile of its largest entry again, from the last id to the first, so that
    # the lowest id stays.
    place = threads.filled(NO_PLACE, jnp.int32)
    chunks = list(zip(tiles.offsets, tiles.chunks(row, where), strict=True))
    for offset, chunk in reversed(chunks):
        first = tiles.ids(where) + offset
        for j, x in reversed(list(enumerate(chunk))):
            place = jnp.where(x == best, first + j, place)
    return best, lax.bitcast_convert_type(threads.warp_min(place), jnp.float32)


class TileSums(NamedTuple):
    """Sums over each warp of the tiles so far, while a row is read.

    Tiles come in groups of n, a power of two. A sum over the threads of a warp takes five
    shuffles, one waiting for another. So those of a group are made while the next group is read,
    and n sums share most of their shuffles.
    """

    # [128] by lane, the sums over the warp. Those of group g are in the lanes whose index modulo 32
    # / n is g; `_part_of` says which of them has which tile.
    found: jax.Array
    last: tuple[jax.Array, ...]  # [128] each, each thread's part of the tiles of the latest group
    group: jax.Array  # [] int32, the index of that group

    @classmethod
    def start(cls, threads: Threads, size: int = 1) -> TileSums:
        """Returns the state before the first group. Groups have `size` tiles."""
        zero = threads.filled(0.0)
        return cls(found=zero, last=(zero,) * size, group=jnp.int32(-1))

    def put(
        self,
        threads: Threads,
        group: jax.Array,
        place: int,
        value: jax.Array,
        *,
        begins: bool = True,
    ) -> TileSums:
        """Returns the state with each thread's part of a tile.

        Args:
          threads: the operations of the warpgroup.
          group: ``[]`` int32, the index of the tile's group.
          place: index of the tile in its group.
          value: ``[128]`` float32.
          begins: whether this is the first part of the tile; if not, it is added to those before.
        """
        found = self.found
        if begins and place == 0:  # a new group: the one before is complete
            found = self._with_last(threads)
        if not begins:
            value = self.last[place] + value
        last = (*self.last[:place], value, *self.last[place + 1 :])
        return TileSums(found=found, last=last, group=group)

    def first(self, threads: Threads, count: int) -> list[jax.Array]:
        """Returns the sums over the warp of the first `count` tiles; 0 for those that never came.

        They are ``[128]`` each, the same in all threads of a warp.
        """
        found = self._with_last(threads)
        size = len(self.last)
        lanes = [i // size + _part_of(i % size, size) * (WARP // size) for i in range(count)]
        return [threads.shuffle(found, lane) for lane in lanes]

    def _with_last(self, threads: Threads) -> jax.Array:
        """Returns `found` with the sums of the latest group, in the lanes of that group."""
        sums = _sums(threads, list(self.last))
        remainder = threads.index & (WARP // len(self.last) - 1)
        return jnp.where(remainder == self.group, sums, self.found)


def _sums(threads: Threads, xs: list[jax.Array]) -> jax.Array:
    """Returns the sums over each warp of n arrays, a power of two, in one array by lane.

    The lanes are cut into n parts of neighbours; `_part_of` says which part has which sum.
    """
    lanes = WARP
    while len(xs) > 1:
        # The lower half of each part goes on with the arrays of even index, the upper half with
        # the odd ones; each gives the other half what it does not go on with.
        lanes //= 2
        upper = (threads.index & lanes) != 0
        pairs = list(zip(xs[::2], xs[1::2], strict=True))
        kept = [jnp.where(upper, b, a) for a, b in pairs]
        given = [jnp.where(upper, a, b) for a, b in pairs]
        xs = [x + threads.shuffle(y, lanes, "bfly") for x, y in zip(kept, given, strict=True)]
    # One array is left, whose n parts are of n sums.
    return threads.warp_sum(xs[0], lanes)


def _part_of(i: int, count: int) -> int:
    """Returns which of `count` parts of the lanes has the sum of array i: its bits reversed."""
    part = 0
    while count > 1:
        count //= 2
        part += (i & 1) * count
        i >>= 1
    return part
