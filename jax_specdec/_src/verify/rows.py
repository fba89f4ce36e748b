"""Phase 1 on XLA: rows, of the whole vocabulary or one device's part of it, read in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import take
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftProbs
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.exchange import Exchange
from jax_specdec._src.verify.threshold import find_threshold, only_if


def bits_at(words: jax.Array, row: jax.Array, ids: jax.Array) -> jax.Array:
    """Bits `ids` of rows, ids clipped into range."""
    ids = jnp.clip(ids, 0, words.shape[1] * 32 - 1)
    these = words.at[row, ids // 32].get(mode="clip")
    return (these >> (ids % 32).astype(words.dtype)) & 1 == 1


def storage_of(distribution: DraftDistribution) -> jax.Array:
    """The rows ``[R, Vd]`` of a draft distribution, of either kind."""
    return distribution.probs if isinstance(distribution, DraftProbs) else distribution.logits


class Partials(NamedTuple):
    """What one read of rows of logits, or of a part of each, leaves behind; ``[n]`` each.

    Attributes:
      max: float32, the largest logit before temperature; +inf for NaN, -inf where no id counts.
      sum: float32, ``sum(exp((logit - max) / temperature))``; 0 where nobody samples.
    """

    max: jax.Array
    sum: jax.Array

    def checked(self) -> Partials:
        """The same where `max` may have passed over a NaN, which a sum does not."""
        return Partials(jnp.where(jnp.isnan(self.sum), jnp.inf, self.max), self.sum)

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

    def share_of(self, part: Partials, inv_temperature: jax.Array) -> jax.Array:
        """What turns sums of a part into sums of ``p`` of the whole row that these are of."""
        moved = jnp.where(part.max == self.max, 0.0, part.max - self.max)
        return jnp.exp(moved * inv_temperature) / self.sum


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

    @classmethod
    def of_logits(
        cls, logits: jax.Array, size: int, token_bitmask: jax.Array | None, exchange: Exchange
    ) -> Rows:
        """Rows of logits ``[R, V]``, or this device's columns of them."""
        first_id = None if exchange.axis is None else exchange.part * logits.shape[1]
        return cls(logits, size, -float("inf"), token_bitmask, None, first_id)

    @property
    def width(self) -> int:
        """Ids that are here and may count."""
        columns = self.matrix.shape[1]
        return columns if self.first_id is not None else min(self.size, columns)

    @property
    def first(self) -> jax.Array:
        """``[]`` int32, the first id."""
        return jnp.int32(0) if self.first_id is None else self.first_id

    @property
    def cut_by(self) -> jax.Array | None:
        """``[]`` int32, the first id, if a tile may be cut there; None where none is."""
        return None if self.width % tiles.TILE == 0 else self.first_id

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
        elif self.first_id is None and self.token_bitmask is None:  # all of them count
            x = x.astype(jnp.float32)
            least = None if self.thresholds is None else self.thresholds[rows, None]
            return tiles.keep(x, least, self.fill)
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
            counts &= bits_at(self.token_bitmask, rows, ids)
        x = jnp.where(counts, x.astype(jnp.float32), self.fill)
        return x if self.thresholds is None else tiles.keep(x, self.thresholds[rows], self.fill)

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
        return x if least is None else tiles.keep(x, least[..., None], self.fill)

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

    def largest(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Largest entry ``[n]`` of each row, not finite if it holds NaN or inf, and its lowest id.

        `rows` are ``[n]`` int32, or None for all rows, where they lie.
        """
        cpu = self._argmax_by_tiles if self.first_id is None else self._argmax  # which copies less
        return lax.platform_dependent(
            rows, tpu=self._argmax, cpu=cpu, default=self._argmax_by_tiles
        )

    def peak(self, rows: jax.Array | None) -> jax.Array:
        """``[n]`` the largest entry alone, which may pass over a NaN: see `Partials.checked`."""
        return jnp.max(self.whole(rows), axis=1)

    def partials(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None = None,
    ) -> Partials:
        """``[n]`` sums of exponentials relative to `peak`, of what is not below `least`."""
        x = tiles.keep(self.whole(rows), None if least is None else least[:, None])
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
        """``[n, num_tiles]``, the sums of `partials`, by tile from the one this part begins in."""
        x = tiles.keep(self.whole(rows), None if least is None else least[:, None])
        base, inv = jnp.where(jnp.isfinite(peak), peak, 0.0), inv_temperature[:, None, None]

        def sums(_: int, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.exp((x - base[:, None, None]) * inv), axis=2)

        return as_they_are(by_tile(sums, [(x, -float("inf"))], num_tiles, self.cut_by))

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
          peak: ``[n]`` largest entries.
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
        count = tiles.num_tiles(self.width)
        found = by_tile(
            lambda _, x: jnp.max(x, axis=2), [(self._clean(rows), -float("inf"))], count
        )
        peak, tile = largest_of(as_they_are(found))
        length = min(tiles.TILE, self.matrix.shape[1])
        first = jnp.minimum(tile * tiles.TILE, self.matrix.shape[1] - length) + self.first
        index = jnp.arange(peak.shape[0], dtype=jnp.int32) if rows is None else rows
        _, place = largest_of(self.slices(index, first, length))
        return peak, first + place


def _sum(x: jax.Array) -> jax.Array:
    """The sum, in the dtype of `x` in 64-bit mode too."""
    return jnp.sum(x, dtype=x.dtype)


def by_tile(
    function: Callable[..., jax.Array],
    rows: Sequence[tuple[jax.Array, float]],
    count: int,
    first_id: jax.Array | None = None,
) -> jax.Array:
    """Sums or maxima of the tiles of rows.

    Args:
      function: ``function(first, *tiles)`` of tiles ``[n, t, L]`` of each matrix, from tile `first`
        on, gives ``[..., t]``.
      rows: matrices ``[n, W]`` and what to fill them up with.
      count: of tiles.
      first_id: the id of the first column; None where a tile begins with it.
    """

    def filled_up(matrices: Sequence[jax.Array]) -> jax.Array:
        given = zip(matrices, fills, strict=True)
        return function(0, *(_in_tiles(x, count, fill, first_id) for x, fill in given))

    def in_two(matrices: Sequence[jax.Array]) -> jax.Array:
        """Whole tiles, and the last one by itself, which needs no copy."""
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
    return lax.platform_dependent(matrices, cpu=cpu, default=filled_up)


def _padded(x: jax.Array, count: tuple[int, int], fill: float) -> jax.Array:
    """``[n, W]``, with so many columns more before and after."""
    return jnp.pad(x, ((0, 0), count), constant_values=fill) if any(count) else x


def _in_tiles(x: jax.Array, count: int, fill: float, first_id: jax.Array | None) -> jax.Array:
    """``[n, W]`` as ``[n, count, TILE]``, filled up at the end, and before `first_id` if given."""
    before = 0 if first_id is None else tiles.TILE
    x = _padded(x, (before, count * tiles.TILE - x.shape[1]), fill)
    if first_id is not None:
        start = tiles.TILE - first_id % tiles.TILE
        x = lax.dynamic_slice_in_dim(x, start, count * tiles.TILE, axis=1)
    return x.reshape(x.shape[0], count, tiles.TILE)


def largest_of(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest entry ``[n]`` of each row ``[n, L]``, none NaN, and where it is first."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)

    def apart(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        peak = jnp.max(x, axis=1)
        return peak, jnp.min(jnp.where(x == peak[:, None], index, x.shape[1]), axis=1)

    def together(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The same, in one kernel on a GPU."""

        def larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
            is_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(is_b, b[0], a[0]), jnp.where(is_b, b[1], a[1])

        least = jnp.asarray(-jnp.inf, x.dtype), jnp.int32(x.shape[1])
        peak, place = lax.reduce((x, index), least, larger, (1,))
        return peak, place

    return lax.platform_dependent(x, cpu=apart, default=together)


def as_they_are(sums: Any) -> Any:
    """Sums or maxima of tiles, of which XLA shall not make another read of the rows."""
    return lax.optimization_barrier(sums)
