"""Phase 1 on XLA: target and draft rows, read in place.

`TargetRows` and `DraftRows` read one row at a time, in tiles, for the walk that goes request by
request. `Rows` reads many at once, of the whole vocabulary or of one device's part of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import take
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftLogits, DraftProbs
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.exchange import Exchange
from jax_specdec._src.verify.threshold import find_threshold, only_if


def _read(matrix: jax.Array, row: jax.Array, start: Any, length: int) -> jax.Array:
    """``float32(matrix[row, start : start + length])``."""
    start = jnp.asarray(start, jnp.int32)  # a Python int would be int64 in x64 mode
    return lax.dynamic_slice(matrix, (row, start), (1, length))[0].astype(jnp.float32)


def _gather(matrix: jax.Array, row: jax.Array, ids: jax.Array) -> jax.Array:
    """``float32(matrix[row, ids])``, ids clipped into range."""
    ids = jnp.clip(ids, 0, matrix.shape[1] - 1)
    return matrix.at[row, ids].get(mode="clip").astype(jnp.float32)


def sum_of(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The sum, in the dtype of `x` in 64-bit mode too."""
    return jnp.sum(x, axis=axis, dtype=x.dtype)


def _read_bits(words: jax.Array, row: jax.Array, start: Any, length: int) -> jax.Array:
    """Bits ``start .. start + length - 1`` of a row, `start` a multiple of 32."""
    start = jnp.asarray(start // 32, jnp.int32)
    these = lax.dynamic_slice(words, (row, start), (1, -(-length // 32)))[0]
    places = jnp.arange(32, dtype=words.dtype)
    return ((these[:, None] >> places[None, :]) & 1).reshape(-1)[:length] == 1


def bits_at(words: jax.Array, row: jax.Array, ids: jax.Array) -> jax.Array:
    """Bits `ids` of a row, ids clipped into range."""
    ids = jnp.clip(ids, 0, words.shape[1] * 32 - 1)
    these = words.at[row, ids // 32].get(mode="clip")
    return (these >> (ids % 32).astype(words.dtype)) & 1 == 1


@dataclasses.dataclass(frozen=True)
class TargetRows:
    """Target logits ``[M, V]``, of which ids below `size` count.

    `chunk` is the length of the loop over a row (`tiles.map_tiles`). Ids whose bit in
    `token_bitmask` ``[M, ceil(V/32)]`` is not set read as -inf, whatever their logits.
    """

    logits: jax.Array
    size: int
    chunk: int | None
    token_bitmask: jax.Array | None = None

    def read(
        self, row: jax.Array, start: Any, length: int, threshold: jax.Array | None = None
    ) -> jax.Array:
        """Logits of `length` ids from `start` on, a multiple of `TILE`; -inf below a threshold."""
        x = _read(self.logits, row, start, length)
        if self.token_bitmask is not None:
            x = jnp.where(_read_bits(self.token_bitmask, row, start, length), x, -jnp.inf)
        return tiles.keep(x, threshold)

    def stats(
        self,
        row: jax.Array,
        inv_temperature: jax.Array,
        greedy: jax.Array,
        filter: Filter | None = None,
    ) -> tiles.RowStats:
        """One read of the row, and more where it is filtered; a greedy request needs no sum."""

        def map_row(fn: Any, threshold: jax.Array | None = None) -> Any:
            def read(start: Any, length: int) -> tuple[jax.Array, ...]:
                return (self.read(row, start, length, threshold),)

            return tiles.map_tiles(fn, read, self.size, self.chunk)

        def max_and_sum(x: jax.Array) -> tiles.RowStats:
            return tiles.max_and_sum(x, inv_temperature)

        stats = lax.cond(greedy, lambda: map_row(tiles.maxima), lambda: map_row(max_and_sum))
        if filter is None:
            return stats
        peak, used = stats.peak, filter

        def filtered() -> tiles.RowStats:
            least = find_threshold(
                used,
                lambda fn, candidates: jnp.stack(
                    [sum_of(map_row(lambda x, c=c: sum_of(fn(x, c), axis=1))) for c in candidates]
                ),
                size=self.size,
                dtype=self.logits.dtype,
                peak=peak,
                inv_temperature=inv_temperature,
            )
            return map_row(max_and_sum, least)._replace(threshold=least)

        return only_if(
            filter.limits(self.size) & ~greedy & jnp.isfinite(peak),
            filtered,
            stats._replace(threshold=jnp.float32(-jnp.inf)),
        )

    def at(self, row: jax.Array, ids: jax.Array, threshold: jax.Array | None = None) -> jax.Array:
        """Logits of `ids`, -inf for those that do not count or are below a threshold."""
        counts = ids < self.size
        if self.token_bitmask is not None:
            counts &= bits_at(self.token_bitmask, row, ids)
        return tiles.keep(jnp.where(counts, _gather(self.logits, row, ids), -jnp.inf), threshold)

    def best(self, row: jax.Array, stats: tiles.RowStats) -> jax.Array:
        """Argmax of the row, ties to the lowest id; looks into one tile only."""
        peak = stats.peak
        tile = jnp.minimum(tiles.first(stats.max == peak), stats.max.shape[0] - 1)
        ids = tile * tiles.TILE + jnp.arange(tiles.TILE, dtype=jnp.int32)
        return tile * tiles.TILE + tiles.first(self.at(row, ids) == peak)


def storage_of(distribution: DraftDistribution) -> jax.Array:
    """The rows ``[R, Vd]`` of a draft distribution, of either kind."""
    return distribution.probs if isinstance(distribution, DraftProbs) else distribution.logits


class DraftScale(NamedTuple):
    """What normalizes a draft row, or that nothing does. Probabilities need none."""

    scale: tiles.Scale
    bad: jax.Array

    @classmethod
    def unit(cls) -> DraftScale:
        return cls(tiles.Scale(jnp.float32(0), jnp.float32(0)), jnp.bool_(False))


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """Draft distributions ``[R, Vd]``, read in place by row."""

    distribution: DraftDistribution
    target_size: int
    chunk: int | None

    @property
    def storage(self) -> jax.Array:
        return storage_of(self.distribution)

    @property
    def size(self) -> int:
        """Ids the drafter could draw."""
        return min(self.storage.shape[1], self.target_size)

    @property
    def fill(self) -> float:
        """The entry that stands for ``q = 0``."""
        return 0.0 if isinstance(self.distribution, DraftProbs) else -float("inf")

    def threshold(self, row: jax.Array) -> jax.Array | None:
        """Entries of a row below it were left out; None where none ever were."""
        d = self.distribution
        if isinstance(d, DraftProbs) or d.threshold is None:
            return None
        return d.threshold.at[row].get(mode="clip")

    def read(self, row: jax.Array, start: Any, length: int) -> jax.Array:
        return tiles.keep(_read(self.storage, row, start, length), self.threshold(row))

    def scale(self, row: jax.Array, inv_temperature: jax.Array) -> DraftScale:
        """The row's normalizer: the stored one, or one read of the row."""
        outside = (row < 0) | (row >= self.storage.shape[0])
        d = self.distribution
        if not isinstance(d, DraftLogits):
            return DraftScale.unit()._replace(bad=outside)
        threshold = self.threshold(row)
        if threshold is not None:
            outside |= jnp.isnan(threshold)
        if d.log_normalizer is not None:
            stored = d.log_normalizer.at[row].get(mode="clip")
            scale = tiles.Scale(jnp.float32(0), stored)
            return DraftScale(scale, outside | ~jnp.isfinite(stored))
        stats = tiles.map_tiles(
            lambda x: tiles.max_and_sum(x, inv_temperature),
            lambda start, length: (self.read(row, start, length),),
            self.size,
            self.chunk,
        )
        return DraftScale(stats.scale(inv_temperature), outside | ~jnp.isfinite(stats.peak))

    def probs(self, entries: jax.Array, scale: DraftScale, inv_temperature: jax.Array) -> jax.Array:
        """``q`` of entries of a row."""
        if isinstance(self.distribution, DraftProbs):
            return entries
        return scale.scale.probs(entries, inv_temperature)

    def at(
        self, row: jax.Array, ids: jax.Array, scale: DraftScale, inv_temperature: jax.Array
    ) -> jax.Array:
        """``q`` of `ids`, 0 for those the drafter could not draw."""
        entries = tiles.keep(_gather(self.storage, row, ids), self.threshold(row))
        return jnp.where(ids < self.size, self.probs(entries, scale, inv_temperature), 0.0)


class Partials(NamedTuple):
    """What one read of rows of logits, or of a part of each, leaves behind; ``[n]`` each.

    Attributes:
      max: float32, the largest logit before temperature; +inf for NaN, -inf where no id counts.
      sum: float32, ``sum(exp((logit - max) / temperature))``; 0 where nobody samples.
    """

    max: jax.Array
    sum: jax.Array

    @classmethod
    def of_whole(cls, parts: Partials, inv_temperature: jax.Array) -> Partials:
        """Those of whole rows, from those of their parts ``[num_parts, n]``."""
        if parts.max.shape[0] == 1:
            return cls(parts.max[0], parts.sum[0])
        maxima, sums = list(parts.max), list(parts.sum)  # one by one, which XLA fuses
        peak: jax.Array = functools.reduce(jnp.maximum, maxima)
        total = jnp.zeros_like(peak)
        for m, of_part in zip(maxima, sums, strict=True):
            total += of_part * jnp.exp((m - peak) * inv_temperature)
        return cls(peak, total)


def best_of(maxima: jax.Array, best_ids: jax.Array) -> jax.Array:
    """``[n]`` the best id of the first part whose maximum is the largest; of ``[num_parts, n]``."""
    peak, best_id = maxima[-1], best_ids[-1]
    for m, found in zip(reversed(list(maxima[:-1])), reversed(list(best_ids[:-1])), strict=True):
        best_id = jnp.where(m >= peak, found, best_id)
        peak = jnp.maximum(m, peak)
    return best_id


@dataclasses.dataclass(frozen=True)
class Rows:
    """A matrix ``[R, W]`` of logits or probabilities, by row and id.

    Attributes:
      matrix: of any float dtype.
      size: ids from it on do not count.
      fill: the entry of ids that do not count, or are not here.
      token_bitmask: ``[R, ceil(V/32)]``; an id whose bit is not set does not count. None for all.
      thresholds: ``[R]`` float32; an entry below that of its row is `fill`. None for none.
      first_id: ``[]`` int32, the id of the first column; None where the matrix has all ids.
    """

    matrix: jax.Array
    size: int
    fill: float
    token_bitmask: jax.Array | None = None
    thresholds: jax.Array | None = None
    first_id: jax.Array | None = None

    @property
    def width(self) -> int:
        """Ids that are here and may count."""
        columns = self.matrix.shape[1]
        return columns if self.first_id is not None else min(self.size, columns)

    @property
    def first(self) -> jax.Array:
        """``[]`` int32, the first id."""
        return jnp.int32(0) if self.first_id is None else self.first_id

    def masked(self) -> Rows:
        """The same without a bitmask, in a copy: bits of a part of the words are dear to read."""
        if self.token_bitmask is None:
            return self
        fill = jnp.asarray(self.fill, self.matrix.dtype)
        matrix = jnp.where(self._bits(self.token_bitmask), self.matrix[:, : self.width], fill)
        return dataclasses.replace(self, matrix=matrix, token_bitmask=None)

    def at(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """Entries of `ids`, any shape that `rows` broadcasts to."""
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        columns = jnp.clip(ids - self.first, 0, self.width - 1)
        return self._entries(self.matrix[rows, columns], rows, ids)

    def slices(self, rows: jax.Array, first: jax.Array, length: int) -> jax.Array:
        """Entries ``[n, length]`` of ids ``first[i] + (0, ..., length - 1)`` in ``rows[i]``.

        Contiguous reads; all ids are within the vocabulary, or within this part of it.
        """
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        columns, first_column = self.matrix.shape[1], first - self.first
        available = min(length, columns)
        start = jnp.clip(first_column, 0, columns - available)
        x = jax.vmap(lambda r, s: lax.dynamic_slice(self.matrix, (r, s), (1, available))[0])(
            rows, start
        )
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        if self.first_id is None and (available < length or columns != self.size):
            found = first_column[:, None] + place - start[:, None]
            x = jnp.take_along_axis(x, jnp.clip(found, 0, available - 1), axis=1)
        return self._entries(x, rows[:, None], first[:, None] + place)

    def whole(self, rows: jax.Array | None = None) -> jax.Array:
        """``[n, width]`` entries of some rows; None for all rows, where they lie."""
        return self._read(*self._rows(rows))

    def _rows(self, rows: jax.Array | None) -> Any:
        """Some rows, their words and thresholds."""
        found = self.matrix, self.token_bitmask, self.thresholds
        if rows is None:
            return found
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        return jax.tree.map(lambda x: take(x, rows), found)

    def _entries(self, x: jax.Array, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """Of entries of some ids, what counts."""
        place = ids - self.first
        counts = (place >= 0) & (place < self.width) & (ids < self.size)
        if self.token_bitmask is not None:
            word = jnp.clip(ids // 32, 0, self.token_bitmask.shape[1] - 1)
            words = self.token_bitmask[rows, word]
            counts &= (words >> (ids % 32).astype(words.dtype)) & 1 == 1
        x = jnp.where(counts, x.astype(jnp.float32), self.fill)
        return x if self.thresholds is None else self._keep(x, self.thresholds[rows])

    def _read(
        self, matrix: jax.Array, words: jax.Array | None, least: jax.Array | None
    ) -> jax.Array:
        """``[..., width]`` entries of given rows, with their words and thresholds."""
        x = matrix[..., : self.width].astype(jnp.float32)
        if words is not None:
            x = jnp.where(self._bits(words), x, self.fill)
        if self.first_id is not None:
            ids = self.first_id + jnp.arange(self.width, dtype=jnp.int32)
            x = jnp.where(ids.reshape((1,) * (x.ndim - 1) + (-1,)) < self.size, x, self.fill)
        return x if least is None else self._keep(x, least[..., None])

    def _bits(self, words: jax.Array) -> jax.Array:
        """``[..., width]`` bool, from words ``[..., ceil(V/32)]`` of the whole vocabulary."""
        shift = self.first
        if self.first_id is not None:  # as many words as a part may lie in
            count = self.width // 32 + 2 * (self.width % 32 > 0)
            count = min(count, words.shape[-1])
            word = jnp.minimum(self.first_id // 32, words.shape[-1] - count)
            words = lax.dynamic_slice_in_dim(words, word, count, axis=-1)
            shift = self.first_id - 32 * word
        octets = lax.bitcast_convert_type(words, jnp.uint8)[..., None]  # lowest bits first; narrow
        places = jnp.arange(8, dtype=jnp.uint8).reshape((1,) * words.ndim + (1, 8))
        bits = ((octets >> places) & 1 == 1).reshape(*words.shape[:-1], -1)
        if self.first_id is None or self.width % 32 == 0:  # then parts begin with a word
            return bits[..., : self.width]
        return lax.dynamic_slice_in_dim(bits, shift, self.width, axis=-1)

    def _keep(self, x: jax.Array, least: jax.Array) -> jax.Array:
        return jnp.where(x < least, self.fill, x)

    def largest(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Largest entry ``[n]`` of each row, not finite if it holds NaN or inf, and its lowest id.

        `rows` are ``[n]`` int32, or None for all rows, where they lie.
        """
        cpu = self._argmax_by_tiles if self.first_id is None else self._argmax  # which copies less
        return lax.platform_dependent(
            rows, tpu=self._argmax, cpu=cpu, default=self._argmax_by_tiles
        )

    def sums(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None,
    ) -> jax.Array:
        """``[n]`` sums of exponentials relative to `peak`, of what is not below `least`."""
        x = self.whole(rows)
        x = x if least is None else self._keep(x, least[:, None])
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None]
        return jnp.sum(jnp.exp((x - base) * inv_temperature[:, None]), axis=1)

    def find_thresholds(
        self,
        rows: jax.Array | None,
        filter: Filter,
        wanted: jax.Array,
        peak: jax.Array,
        inv_temperature: jax.Array,
        exchange: Exchange,
    ) -> jax.Array:
        """``[n]`` thresholds of what a filter leaves out; -inf where it leaves out nothing.

        Args:
          rows: as of `largest`.
          filter: of each row.
          wanted: ``[n]`` bool, rows that anybody samples from.
          peak: ``[n]`` what `largest` found in whole rows.
          inv_temperature: ``[n]`` float32.
          exchange: over the parts of the vocabulary.
        """
        peak = exchange.max(peak)
        limited = filter.limits(self.size) & wanted & jnp.isfinite(peak)

        def one_row(
            of: Any, filter: Filter, peak: jax.Array, inv_temperature: jax.Array
        ) -> jax.Array:
            return find_threshold(
                filter,
                # One by one, so that XLA reads the row for all of them and writes nothing.
                lambda fn, candidates: exchange.sum(
                    jnp.stack([sum_of(fn(self._read(*of), c)) for c in candidates])
                ),
                size=self.size,
                dtype=self.matrix.dtype,
                peak=peak,
                inv_temperature=inv_temperature,
                bits_per_round=1 if exchange.axis is None else 4,
            )

        least = only_if(
            jnp.any(limited),
            lambda: jax.vmap(one_row)(self._rows(rows), filter, peak, inv_temperature),
            jnp.full_like(peak, -jnp.inf),
        )
        return jnp.where(limited, least, -jnp.inf)

    def _clean(self, rows: jax.Array | None) -> jax.Array:
        x = self.whole(rows)
        return jnp.where(jnp.isnan(x), jnp.inf, x)  # a maximum may pass over a NaN

    def _argmax(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Largest entry of each row, and its lowest id."""
        x = self._clean(rows)
        return jnp.max(x, axis=1), self.first + jnp.argmax(x, axis=1).astype(jnp.int32)

    def _argmax_by_tiles(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The same by a maximum of each tile and a look into one, which GPUs do faster."""
        clean = in_tiles(self._clean(rows), tiles.num_tiles(self.width), -jnp.inf)
        largest = as_they_are(jnp.max(clean, axis=2))
        peak = jnp.max(largest, axis=1)
        length = min(tiles.TILE, self.matrix.shape[1])
        tile = first_of(largest == peak[:, None])
        first = jnp.minimum(tile * tiles.TILE, self.matrix.shape[1] - length) + self.first
        index = jnp.arange(peak.shape[0], dtype=jnp.int32) if rows is None else rows
        hits = self.slices(index, first, length) == peak[:, None]
        return peak, first + first_of(hits)


def in_tiles(x: jax.Array, count: int, fill: float, first_id: jax.Array | None = None) -> jax.Array:
    """``[n, W]`` as ``[n, count, TILE]``, filled up at the end, and before `first_id` if given."""
    before = 0 if first_id is None else tiles.TILE
    missing = ((0, 0), (before, count * tiles.TILE - x.shape[1]))
    x = jnp.pad(x, missing, constant_values=fill)
    if first_id is not None:
        start = tiles.TILE - first_id % tiles.TILE
        x = lax.dynamic_slice_in_dim(x, start, count * tiles.TILE, axis=1)
    return x.reshape(x.shape[0], count, tiles.TILE)


def first_of(hit: jax.Array) -> jax.Array:
    """``[n]`` int32, the place of the first true entry of each row ``[n, L]``; L where none is."""
    return jax.vmap(tiles.first)(hit)


def as_they_are(sums: Any) -> Any:
    """Sums or maxima of tiles, of which XLA shall not make another read of the rows."""
    return lax.optimization_barrier(sums)
