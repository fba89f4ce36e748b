"""Phase 1 on XLA: rows of the whole vocabulary, or of one device's part of it, read in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import take
from jax_specdec._src.platform import platform_dependent
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftProbs
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.exchange import Exchange
from jax_specdec._src.verify.threshold import find_threshold, only_if


def bits_at(words: jax.Array, row: jax.Array, ids: jax.Array) -> jax.Array:
    """Whether the bit of each id is set in its row of `words`; ids are clipped into range."""
    ids = jnp.clip(ids, 0, words.shape[1] * 32 - 1)
    these = words.at[row, ids // 32].get(mode="clip")
    return (these >> (ids % 32).astype(words.dtype)) & 1 == 1


def storage_of(distribution: DraftDistribution) -> jax.Array:
    """The rows ``[R, Vd]`` of a draft distribution, of either kind."""
    return distribution.probs if isinstance(distribution, DraftProbs) else distribution.logits


class Partials(NamedTuple):
    """Maximum and sum of rows of logits, or of a part of each; ``[n]`` each.

    Attributes:
      max: float32, the largest logit before temperature. It is +inf if the row holds a NaN, and
        -inf if no id is allowed.
      sum: float32, ``sum(exp((logit - max) / temperature))``; 0 if no request samples.
    """

    max: jax.Array
    sum: jax.Array

    def checked(self) -> Partials:
        """With +inf for `max` if the sum is NaN: a maximum may pass over a NaN, a sum cannot."""
        return Partials(jnp.where(jnp.isnan(self.sum), jnp.inf, self.max), self.sum)

    @classmethod
    def of_whole(cls, parts: Partials, inv_temperature: jax.Array) -> Partials:
        """The partials of whole rows, from those of their parts ``[num_parts, n]``."""
        if parts.max.shape[0] == 1:
            return cls(parts.max[0], parts.sum[0])
        maxima, sums = list(parts.max), list(parts.sum)  # in a Python loop, which XLA fuses
        peak: jax.Array = functools.reduce(jnp.maximum, maxima)
        total = jnp.zeros_like(peak)
        for m, of_part in zip(maxima, sums, strict=True):
            total += of_part * jnp.exp((m - peak) * inv_temperature)
        return cls(peak, total)

    def share_of(self, part: Partials, inv_temperature: jax.Array) -> jax.Array:
        """The factor from sums of a part to sums of ``p``, given the partials of the whole row."""
        moved = jnp.where(part.max == self.max, 0.0, part.max - self.max)
        return jnp.exp(moved * inv_temperature) / self.sum


def argmax_of_parts(maxima: jax.Array, argmaxes: jax.Array) -> jax.Array:
    """The argmax ``[n]`` of whole rows, from maxima and argmaxes ``[num_parts, n]`` of parts."""
    peak, argmax = maxima[-1], argmaxes[-1]
    for m, found in zip(reversed(list(maxima[:-1])), reversed(list(argmaxes[:-1])), strict=True):
        argmax = jnp.where(m >= peak, found, argmax)
        peak = jnp.maximum(m, peak)
    return argmax


@dataclasses.dataclass(frozen=True)
class Rows:
    """A matrix ``[R, W]`` of logits or probabilities, read by row and id.

    Attributes:
      matrix: of any float dtype.
      size: ids from it on are padding.
      fill: what is read for padding, for ids that the bitmask forbids or that other devices hold,
        and for entries below the threshold.
      token_bitmask: ``[R, ceil(V/32)]``, the ids that are allowed; None for all.
      thresholds: ``[R]`` float32, one per row; None for none.
      first_id: ``[]`` int32, the id of the first column; None if the matrix has all ids.
    """

    matrix: jax.Array
    size: int
    fill: float
    token_bitmask: jax.Array | None = None
    thresholds: jax.Array | None = None
    first_id: jax.Array | None = None

    @classmethod
    def of_logits(
        cls, logits: jax.Array, size: int, token_bitmask: jax.Array | None, exchange: Exchange
    ) -> Rows:
        """Rows of logits ``[R, V]``, or of this device's columns of them."""
        first_id = None if exchange.axis is None else exchange.part * logits.shape[1]
        return cls(logits, size, -float("inf"), token_bitmask, None, first_id)

    @property
    def width(self) -> int:
        """Ids that are here, padding left out if the matrix has all ids."""
        columns = self.matrix.shape[1]
        return columns if self.first_id is not None else min(self.size, columns)

    @property
    def first(self) -> jax.Array:
        """``[]`` int32, the id of the first column."""
        return jnp.int32(0) if self.first_id is None else self.first_id

    @property
    def cut_by(self) -> jax.Array | None:
        """`first_id` if it may be inside a tile; None if it cannot be."""
        return None if self.width % tiles.TILE == 0 else self.first_id

    def masked(self) -> Rows:
        """A copy with the bitmask applied: a part's bits are too expensive to read repeatedly."""
        if self.token_bitmask is None:
            return self
        fill = jnp.asarray(self.fill, self.matrix.dtype)
        matrix = jnp.where(self._bits(self.token_bitmask), self.matrix[:, : self.width], fill)
        return dataclasses.replace(self, matrix=matrix, token_bitmask=None)

    def at(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """Entries of `ids`, of any shape that `rows` broadcasts to."""
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        columns = jnp.clip(ids - self.first, 0, self.width - 1)
        return self._entries(self.matrix[rows, columns], rows, ids)

    def slices(self, rows: jax.Array, first: jax.Array, length: int) -> jax.Array:
        """Entries ``[n, length]``: of `length` ids from ``first[i]`` on, in row ``rows[i]``.

        Reads are contiguous. All ids must be in the vocabulary, or in this part of it.
        """
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        columns, first_column = self.matrix.shape[1], first - self.first
        available = min(length, columns)
        start = jnp.clip(first_column, 0, columns - available)
        x = jax.vmap(lambda r, s: lax.dynamic_slice(self.matrix, (r, s), (1, available))[0])(
            rows, start
        )
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_whole = available == length and columns == self.size
        if self.first_id is None and not is_whole:
            found = first_column[:, None] + place - start[:, None]
            x = jnp.take_along_axis(x, jnp.clip(found, 0, available - 1), axis=1)
        all_here = self.first_id is None and is_whole
        return self._entries(x, rows[:, None], first[:, None] + place, all_here)

    def whole(self, rows: jax.Array | None = None) -> jax.Array:
        """``[n, width]`` entries of some rows; of all rows, in place, if `rows` is None."""
        return self._read(*self._select(rows))

    def _select(self, rows: jax.Array | None) -> Any:
        """Some rows of the matrix, of the bitmask and of the thresholds."""
        found = self.matrix, self.token_bitmask, self.thresholds
        if rows is None:
            return found
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        return jax.tree.map(lambda x: take(x, rows), found)

    def _entries(
        self, x: jax.Array, rows: jax.Array, ids: jax.Array, all_here: bool = False
    ) -> jax.Array:
        """Entries as they were found at `ids`, with `fill` where it belongs.

        `all_here` says that the ids are known to be in the vocabulary and in this part of it.
        """
        x, place = x.astype(jnp.float32), ids - self.first
        if not all_here:
            is_here = (place >= 0) & (place < self.width) & (ids < self.size)
            x = jnp.where(is_here, x, self.fill)
        if self.token_bitmask is not None:
            x = jnp.where(bits_at(self.token_bitmask, rows, ids), x, self.fill)
        least = None if self.thresholds is None else self.thresholds[rows]
        return tiles.apply_threshold(x, least, self.fill)

    def _read(
        self, matrix: jax.Array, words: jax.Array | None, least: jax.Array | None
    ) -> jax.Array:
        """``[..., width]`` entries of whole rows, with `fill` where it belongs."""
        x = matrix[..., : self.width].astype(jnp.float32)
        if words is not None:
            x = jnp.where(self._bits(words), x, self.fill)
        if self.first_id is not None:
            ids = self.first_id + jnp.arange(self.width, dtype=jnp.int32)
            x = jnp.where(ids.reshape((1,) * (x.ndim - 1) + (-1,)) < self.size, x, self.fill)
        return x if least is None else tiles.apply_threshold(x, least[..., None], self.fill)

    def _bits(self, words: jax.Array) -> jax.Array:
        """``[..., width]`` bool, from words ``[..., ceil(V/32)]`` of the whole vocabulary."""
        shift = self.first
        if self.first_id is not None:  # take as many words as a part may lie in
            count = self.width // 32 + 2 * (self.width % 32 > 0)
            count = min(count, words.shape[-1])
            word = jnp.minimum(self.first_id // 32, words.shape[-1] - count)
            words = lax.dynamic_slice_in_dim(words, word, count, axis=-1)
            shift = self.first_id - 32 * word
        octets = lax.bitcast_convert_type(words, jnp.uint8)[..., None]  # lowest bits first
        places = jnp.arange(8, dtype=jnp.uint8).reshape((1,) * words.ndim + (1, 8))
        bits = ((octets >> places) & 1 == 1).reshape(*words.shape[:-1], -1)
        if self.first_id is None or self.width % 32 == 0:  # then a part begins with a word
            return bits[..., : self.width]
        return lax.dynamic_slice_in_dim(bits, shift, self.width, axis=-1)

    def max_and_argmax(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The maximum ``[n]`` of each row, +inf if the row holds a NaN, and the lowest id of it.

        `rows` is ``[n]`` int32, or None for all rows, in place.
        """
        cpu = self._argmax_by_tiles if self.first_id is None else self._argmax  # copies less
        return platform_dependent(rows, tpu=self._argmax, cpu=cpu, default=self._argmax_by_tiles)

    def peak(self, rows: jax.Array | None) -> jax.Array:
        """The maximum alone, ``[n]``. It may pass over a NaN: see `Partials.checked`."""
        return jnp.max(self.whole(rows), axis=1)

    def partials(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None = None,
    ) -> Partials:
        """Sums of exponentials relative to `peak`, of entries that are not below `least`."""
        x = tiles.apply_threshold(self.whole(rows), None if least is None else least[:, None])
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None]
        sums = jnp.sum(jnp.exp((x - base) * inv_temperature[:, None]), axis=1)
        return Partials(peak, sums)

    def sums_by_tile(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None,
        num_tiles: int,
    ) -> jax.Array:
        """``[n, num_tiles]``, the sums of `partials` by tile, from the tile this part begins in."""
        x = tiles.apply_threshold(self.whole(rows), None if least is None else least[:, None])
        base, inv = jnp.where(jnp.isfinite(peak), peak, 0.0), inv_temperature[:, None, None]

        def sums(_: int, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.exp((x - base[:, None, None]) * inv), axis=2)

        return compute_once(by_tile(sums, [(x, -float("inf"))], num_tiles, self.cut_by))

    def find_thresholds(
        self,
        rows: jax.Array | None,
        filter: Filter,
        wanted: jax.Array,
        peak: jax.Array,
        inv_temperature: jax.Array,
        exchange: Exchange,
    ) -> jax.Array:
        """``[n]`` thresholds below which a filter keeps no entry; -inf if it keeps all.

        Args:
          rows: as for `max_and_argmax`.
          filter: of each row, ``[n]``.
          wanted: ``[n]`` bool, whether a request samples from the row.
          peak: ``[n]`` float32, the maximum of each row.
          inv_temperature: ``[n]`` float32.
          exchange: between the parts of the vocabulary.
        """
        peak = exchange.max(peak)
        limited = filter.limits(self.size) & wanted & jnp.isfinite(peak)

        def one_row(
            of: Any, filter: Filter, peak: jax.Array, inv_temperature: jax.Array
        ) -> jax.Array:
            return find_threshold(
                filter,
                # In a Python loop, XLA reads the row once for all candidates and writes nothing.
                lambda fn, candidates: exchange.sum(
                    jnp.stack([_sum(fn(self._read(*of), c)) for c in candidates])
                ),
                size=self.size,
                dtype=self.matrix.dtype,
                peak=peak,
                inv_temperature=inv_temperature,
                bits_per_round=1 if exchange.axis is None else 4,
            )

        least = only_if(
            jnp.any(limited),
            lambda: jax.vmap(one_row)(self._select(rows), filter, peak, inv_temperature),
            jnp.full_like(peak, -jnp.inf),
        )
        return jnp.where(limited, least, -jnp.inf)

    def _nan_as_inf(self, rows: jax.Array | None) -> jax.Array:
        """`whole` with +inf for NaN, which a maximum may pass over."""
        x = self.whole(rows)
        return jnp.where(jnp.isnan(x), jnp.inf, x)

    def _argmax(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """`max_and_argmax` in two reductions."""
        x = self._nan_as_inf(rows)
        return jnp.max(x, axis=1), self.first + jnp.argmax(x, axis=1).astype(jnp.int32)

    def _argmax_by_tiles(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """`max_and_argmax` by the maximum of each tile, then a look into one: faster on GPUs."""
        count = tiles.num_tiles(self.width)
        found = by_tile(
            lambda _, x: jnp.max(x, axis=2), [(self._nan_as_inf(rows), -float("inf"))], count
        )
        peak, tile = max_and_argmax(compute_once(found))
        length = min(tiles.TILE, self.matrix.shape[1])
        first = jnp.minimum(tile * tiles.TILE, self.matrix.shape[1] - length) + self.first
        index = jnp.arange(peak.shape[0], dtype=jnp.int32) if rows is None else rows
        _, place = max_and_argmax(self.slices(index, first, length))
        return peak, first + place


def _sum(x: jax.Array) -> jax.Array:
    """The sum, in the dtype of `x` even in 64-bit mode."""
    return jnp.sum(x, dtype=x.dtype)


def by_tile(
    function: Callable[..., jax.Array],
    rows: Sequence[tuple[jax.Array, float]],
    count: int,
    first_id: jax.Array | None = None,
) -> jax.Array:
    """Sums or maxima over the tiles of rows.

    Args:
      function: ``function(first, *tiles)`` takes t tiles ``[n, t, L]`` of each matrix, from tile
        `first` on, and returns ``[..., t]``.
      rows: matrices ``[n, W]``, each with what to pad it with.
      count: number of tiles.
      first_id: the id of the first column; None if a tile begins there.
    """

    def filled_up(matrices: Sequence[jax.Array]) -> jax.Array:
        given = zip(matrices, fills, strict=True)
        return function(0, *(_in_tiles(x, count, fill, first_id) for x, fill in given))

    def in_two(matrices: Sequence[jax.Array]) -> jax.Array:
        """The whole tiles, then the last one by itself: this needs no copy."""
        width = max(x.shape[1] for x in matrices)
        whole = width // tiles.TILE
        cut, found = whole * tiles.TILE, []
        given = zip(matrices, fills, strict=True)
        matrices = [_padded(x, (0, width - x.shape[1]), fill) for x, fill in given]
        if whole:
            shape = -1, whole, tiles.TILE
            found.append(function(0, *(x[:, :cut].reshape(shape) for x in matrices)))
        if cut < width:
            found.append(function(whole, *(x[:, None, cut:] for x in matrices)))
        return jnp.concatenate(found, axis=-1)

    matrices, fills = zip(*rows, strict=True)
    cpu = in_two if first_id is None else filled_up
    return platform_dependent(matrices, cpu=cpu, default=filled_up)


def _padded(x: jax.Array, count: tuple[int, int], fill: float) -> jax.Array:
    """``[n, W]`` with ``count[0]`` columns more before and ``count[1]`` after."""
    return jnp.pad(x, ((0, 0), count), constant_values=fill) if any(count) else x


def _in_tiles(x: jax.Array, count: int, fill: float, first_id: jax.Array | None) -> jax.Array:
    """``[n, W]`` as ``[n, count, TILE]``, padded at the end, and before `first_id` if given."""
    before = 0 if first_id is None else tiles.TILE
    x = _padded(x, (before, count * tiles.TILE - x.shape[1]), fill)
    if first_id is not None:
        start = tiles.TILE - first_id % tiles.TILE
        x = lax.dynamic_slice_in_dim(x, start, count * tiles.TILE, axis=1)
    return x.reshape(x.shape[0], count, tiles.TILE)


def max_and_argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum ``[n]`` of rows ``[n, L]`` without NaN, and the first index of it."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)

    def separately(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        peak = jnp.max(x, axis=1)
        return peak, jnp.min(jnp.where(x == peak[:, None], index, x.shape[1]), axis=1)

    def together(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """In one reduction, which is one kernel on a GPU."""

        def larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
            is_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(is_b, b[0], a[0]), jnp.where(is_b, b[1], a[1])

        least = jnp.asarray(-jnp.inf, x.dtype), jnp.int32(x.shape[1])
        peak, place = lax.reduce((x, index), least, larger, (1,))
        return peak, place

    return platform_dependent(x, cpu=separately, default=together)


def compute_once(x: Any) -> Any:
    """The same arrays, which XLA then does not compute again for each of their uses."""
    return lax.optimization_barrier(x)
