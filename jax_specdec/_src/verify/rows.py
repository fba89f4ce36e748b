"""Rows of the whole vocabulary, or of one device's part of it, read in place on XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import take
from jax_specdec._src.platform import Platform
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftProbs
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.form import Form
from jax_specdec._src.verify.largest import LANES, Largest, lists_of
from jax_specdec._src.verify.threshold import find_thresholds


def bits_at(words: jax.Array, row: jax.Array, ids: jax.Array) -> jax.Array:
    """Whether the bit of each id is set in its row of `words`; ids are clipped into range."""
    ids = jnp.clip(ids, 0, words.shape[1] * 32 - 1)
    these = words.at[row, ids // 32].get(mode="clip")
    return (these >> (ids % 32).astype(words.dtype)) & 1 == 1


def storage_of(distribution: DraftDistribution) -> jax.Array:
    """The rows ``[R, Vd]`` of a draft distribution, of either kind."""
    return distribution.probs if isinstance(distribution, DraftProbs) else distribution.logits


def _bits_of(words: jax.Array) -> jax.Array:
    """The bits of words ``[..., n]``, ``[..., 32 n]`` bool."""
    octets = lax.bitcast_convert_type(words, jnp.uint8)[..., None]  # lowest bits first
    places = jnp.arange(8, dtype=jnp.uint8).reshape((1,) * words.ndim + (1, 8))
    return ((octets >> places) & 1 == 1).reshape(*words.shape[:-1], -1)


def _bits_by_product(words: jax.Array) -> jax.Array:
    """`_bits_of` on a TPU, perhaps with more bits at the end.

    It is slow to move numbers between lanes, but a product with zeros and ones does it: one octet
    goes to eight lanes, exactly.
    """
    words = jnp.pad(words, (*[(0, 0)] * (words.ndim - 1), (0, -words.shape[-1] % (LANES // 32))))
    octets = jnp.stack([(words >> i) & 255 for i in range(0, 32, 8)], axis=-1)
    octets = octets.reshape(*words.shape[:-1], -1, LANES // 8).astype(jnp.bfloat16)
    to_lanes = jnp.repeat(jnp.eye(LANES // 8, dtype=jnp.bfloat16), 8, axis=1)
    given = jnp.dot(octets, to_lanes, preferred_element_type=jnp.float32).astype(jnp.int32)
    places = lax.broadcasted_iota(jnp.int32, given.shape, given.ndim - 1) % 8
    return ((given >> places) & 1 == 1).reshape(*words.shape[:-1], -1)


class Partials(NamedTuple):
    """What is known of rows of logits, or of a part of each; ``[n]`` each.

    Attributes:
      max: float32, the largest logit before temperature. It is +inf if the row holds a NaN, and
        -inf if no id is allowed.
      sum: float32, ``sum(exp((logit - max) / temperature))``; 0 if no request samples.
      argmax: int32, the lowest id of the largest logit; None if it is not wanted.
    """

    max: jax.Array
    sum: jax.Array
    argmax: jax.Array | None = None

    def checked(self) -> Partials:
        """With +inf for `max` if the sum is NaN: a maximum may pass over a NaN, a sum cannot."""
        return self._replace(max=jnp.where(jnp.isnan(self.sum), jnp.inf, self.max))

    @classmethod
    def of_whole(cls, parts: Partials, inv_temperature: jax.Array) -> Partials:
        """The partials of whole rows, from those of their parts ``[num_parts, n]``.

        The parts stand in the program one by one, each sliced once: XLA fuses that with its use.
        """
        if parts.max.shape[0] == 1:
            return jax.tree.map(lambda x: x[0], parts)
        maxima, sums = list(parts.max), list(parts.sum)
        peak: jax.Array = functools.reduce(jnp.maximum, maxima)
        total = jnp.zeros_like(peak)
        for m, of_part in zip(maxima, sums, strict=True):
            lower = jnp.where(m == peak, 0.0, m - peak)
            total += of_part * jnp.exp(lower * inv_temperature)
        argmax = None if parts.argmax is None else argmax_of_parts(maxima, parts.argmax)
        return cls(peak, total, argmax)


class TargetStatistics(NamedTuple):
    """Statistics of target rows, or of this device's part of them.

    Attributes:
      partials: of the part.
      threshold: of the whole row, or None.
      sums: ``[..., num_tiles]``, the sum of `partials` by tile; None if only the total is kept.
    """

    partials: Partials
    threshold: jax.Array | None
    sums: jax.Array | None


def argmax_of_parts(maxima: Iterable[jax.Array], argmaxes: Iterable[jax.Array]) -> jax.Array:
    """The lowest argmax ``[n]`` of whole rows, from those of parts, ``[n]`` each."""
    maxima = list(maxima)
    peak: jax.Array = functools.reduce(jnp.maximum, maxima)
    ids = [jnp.where(m == peak, x, 2**30) for m, x in zip(maxima, argmaxes, strict=True)]
    return functools.reduce(jnp.minimum, ids)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A matrix ``[R, W]`` of logits or probabilities, read by row and id.

    Attributes:
      matrix: of any float dtype.
      size: ids from it on are padding.
      fill: what is read for padding, for ids that the bitmask forbids or that other devices hold,
        and for entries below the threshold.
      platform: that the program is for.
      token_bitmask: ``[R, ceil(V/32)]``, the ids that are allowed; None for all.
      thresholds: ``[R]`` float32, one per row; None for none.
      first_id: ``[]`` int32, the id of the first column; None if the matrix has all ids.
    """

    matrix: jax.Array
    size: int
    fill: float
    platform: Platform
    token_bitmask: jax.Array | None = None
    thresholds: jax.Array | None = None
    first_id: jax.Array | None = None

    @classmethod
    def of_logits(
        cls, logits: jax.Array, size: int, token_bitmask: jax.Array | None, form: Form
    ) -> Rows:
        """Rows of logits ``[R, V]``, or of this device's columns of them."""
        first_id = None if form.axis is None else form.part * logits.shape[1]
        return cls(logits, size, -float("inf"), form.platform, token_bitmask, None, first_id)

    @functools.cached_property
    def width(self) -> int:
        """Ids that are here, padding left out if the matrix has all ids."""
        columns = self.matrix.shape[1]
        return columns if self.first_id is not None else min(self.size, columns)

    def masked(self) -> Rows:
        """A copy with the bitmask applied, where bits are too expensive to read repeatedly."""
        if self.token_bitmask is None:
            return self
        allowed = self._bits(self.token_bitmask, self.matrix.shape[1])
        matrix = jnp.where(allowed, self.matrix, jnp.asarray(self.fill, self.matrix.dtype))
        return dataclasses.replace(self, matrix=matrix, token_bitmask=None)

    def at(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """Entries of `ids`, of any shape that `rows` broadcasts to."""
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        place = ids if self.first_id is None else ids - self.first_id
        columns = jnp.clip(place, 0, self.width - 1)
        found = self.matrix.at[rows, columns].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        return self._entries(found, rows, ids, place)

    def slices(self, rows: jax.Array, first: jax.Array, length: int, end: int) -> jax.Array:
        """Entries ``[n, length]``: of `length` ids from ``first[i]`` on, in row ``rows[i]``.

        Reads are contiguous. All ids must be below `end`, or in this part of the vocabulary.
        """
        rows = jnp.clip(rows, 0, self.matrix.shape[0] - 1)
        columns = self.matrix.shape[1]
        first_column = first if self.first_id is None else first - self.first_id
        available = min(length, columns)
        start = jnp.clip(first_column, 0, columns - available)
        x = lax.gather(
            self.matrix,
            jnp.stack([rows, start], axis=1),
            _SLICES,
            (1, available),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_whole = available == length and end <= columns == self.size
        if self.first_id is None and not is_whole:
            found = first_column[:, None] + place - start[:, None]
            x = jnp.take_along_axis(x, jnp.clip(found, 0, available - 1), axis=1)
        here = None if self.first_id is None and is_whole else first_column[:, None] + place
        return self._entries(x, rows[:, None], first[:, None] + place, here)

    def whole(self, rows: jax.Array | None = None) -> jax.Array:
        """``[n, width]`` entries of some rows; of all rows, in place, if `rows` is None."""
        these = self.select(rows)
        x = these.matrix[..., : self.width].astype(jnp.float32)
        if these.token_bitmask is not None:
            x = jnp.where(self._bits(these.token_bitmask, self.width), x, self.fill)
        if self.first_id is not None:
            ids = self.first_id + jnp.arange(self.width, dtype=jnp.int32)
            x = jnp.where(ids[None, :] < self.size, x, self.fill)
        least = these.thresholds
        return x if least is None else jnp.where(x < least[:, None], self.fill, x)

    def select(self, rows: jax.Array | None) -> Rows:
        """Some rows, with their bits and thresholds; all of them, in place, if `rows` is None."""
        if rows is None:
            return self
        given = self.matrix, self.token_bitmask, self.thresholds
        found = take(given, jnp.clip(rows, 0, self.matrix.shape[0] - 1), self.platform)
        matrix, words, least = found
        return Rows(matrix, self.size, self.fill, self.platform, words, least, self.first_id)

    def _entries(
        self, x: jax.Array, rows: jax.Array, ids: jax.Array, place: jax.Array | None
    ) -> jax.Array:
        """Entries as they were found at `ids`, with `fill` where it belongs.

        `place` is the columns of the ids; None if all are in the vocabulary and in this part of it.
        """
        x = x.astype(jnp.float32)
        if place is not None:
            is_here = (place >= 0) & (place < self.width)
            if self.first_id is not None:
                is_here &= ids < self.size
            x = jnp.where(is_here, x, self.fill)
        if self.token_bitmask is not None:
            x = jnp.where(bits_at(self.token_bitmask, rows, ids), x, self.fill)
        return x if self.thresholds is None else jnp.where(x < self.thresholds[rows], self.fill, x)

    def _bits(self, words: jax.Array, columns: int) -> jax.Array:
        """``[..., columns]`` bool, from words ``[..., ceil(V/32)]`` of the whole vocabulary."""
        shift: Any = 0
        if self.first_id is not None:  # take as many words as a part may lie in
            count = columns // 32 + 2 * (columns % 32 > 0)
            count = min(count, words.shape[-1])
            word = jnp.minimum(self.first_id // 32, words.shape[-1] - count)
            words = lax.dynamic_slice_in_dim(words, word, count, axis=-1)
            shift = self.first_id - 32 * word
        bits = (_bits_by_product if self.platform == "tpu" else _bits_of)(words)
        if self.first_id is None or columns % 32 == 0:  # then a part begins with a word
            return bits[..., :columns]
        return lax.dynamic_slice_in_dim(bits, shift, columns, axis=-1)

    def max_and_argmax(self, rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The maximum ``[n]`` of each row, +inf if the row holds a NaN, and the lowest id of it.

        `rows` is ``[n]`` int32, or None for all rows, in place.
        """
        x = self.whole(rows)
        x = jnp.where(jnp.isnan(x), jnp.inf, x)  # which a maximum may pass over
        if self.platform == "tpu":
            peak, place = self._max_and_place(x)
        elif self.platform == "cpu" and self.first_id is not None:
            peak, place = jnp.max(x, axis=1), jnp.argmax(x, axis=1).astype(jnp.int32)
        else:  # by the maximum of each tile, then a look into one: faster on GPUs
            views = self.in_tiles([(x, -float("inf"))], -(-self.width // tiles.TILE), False)
            found = jnp.concatenate([jnp.max(x, axis=2) for _, (x,) in views], axis=1)
            peak, tile = self._max_and_place(lax.optimization_barrier(found))
            columns = self.matrix.shape[1]
            length = min(tiles.TILE, columns)
            place = jnp.minimum(tile * tiles.TILE, columns - length)
            first = place if self.first_id is None else place + self.first_id
            index = jnp.arange(peak.shape[0], dtype=jnp.int32) if rows is None else rows
            place = place + self._max_and_place(self.slices(index, first, length, columns))[1]
        return peak, place if self.first_id is None else self.first_id + place

    def _max_and_place(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The maximum ``[n]`` of ``[n, L]`` without NaN, and the first index of it."""
        index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        if self.platform == "cpu":
            peak = jnp.max(x, axis=1)
            return peak, jnp.min(jnp.where(x == peak[:, None], index, x.shape[1]), axis=1)

        def larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
            is_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(is_b, b[0], a[0]), jnp.where(is_b, b[1], a[1])

        least = jnp.asarray(-jnp.inf, x.dtype), jnp.int32(x.shape[1])
        # One kernel on a GPU; on a TPU half the code of `jnp.argmax`, and less time than its bytes.
        peak, place = lax.reduce((x, index), least, larger, (1,))
        return peak, place

    def columns(self, rows: jax.Array | None, start: Any, length: int) -> Rows:
        """Some columns of many rows, or of all if `rows` is None; without a bitmask.

        A TPU copies these columns of every row to its vector memory, and takes the rows there: to
        read one row of its main memory, it copies the eight that lie together.
        """
        matrix = lax.dynamic_slice_in_dim(self.matrix, start, length, axis=1)
        matrix, least = lax.optimization_barrier(matrix), self.thresholds
        if rows is not None:
            rows = jnp.clip(rows, 0, matrix.shape[0] - 1)
            matrix, least = matrix[rows], None if least is None else least[rows]
        first_id = None if self.first_id is None else self.first_id + start
        return Rows(matrix, self.size, self.fill, self.platform, None, least, first_id)

    def by_tile(
        self, rows: jax.Array | None, inv_temperature: jax.Array, wants_argmax: jax.Array
    ) -> tuple[Partials, jax.Array]:
        """Partials and sums by tile of many rows, in one pass over the tiles of all.

        For TPUs: in vector memory, the sum of a tile is taken relative to its own maximum. Without
        a bitmask. Tiles are counted from the first column.

        Args:
          rows: ``[n]`` int32, or None for all rows.
          inv_temperature: ``[n]`` float32.
          wants_argmax: ``[]`` bool, whether the argmax of any row is wanted.

        Returns:
          Partials ``[n]``, whose argmax is undefined if it is not wanted; and ``[n, T]``, the sums
          relative to their maxima.
        """

        def read(start: Any, length: int) -> jax.Array:
            tile = self.columns(rows, start, length)
            peak = tile.peak(None)

            def argmax() -> jax.Array:  # as float32, whose minimum is one operation
                place = jnp.arange(length, dtype=jnp.float32)[None, :]
                return jnp.min(jnp.where(tile.whole() == peak[:, None], place, length), axis=1)

            place = lax.cond(wants_argmax, argmax, lambda: jnp.zeros_like(peak))
            return jnp.stack([peak, place, tile.sums(None, peak, inv_temperature)])

        peaks, places, sums = jnp.moveaxis(tiles.each_tile(read, self.width), 1, 0)
        starts = jnp.arange(peaks.shape[0], dtype=jnp.int32) * tiles.TILE
        argmaxes = starts[:, None] + places.astype(jnp.int32)
        argmaxes = argmaxes if self.first_id is None else argmaxes + self.first_id
        peak = jnp.max(peaks, axis=0)
        none = jnp.iinfo(jnp.int32).max
        argmax = jnp.min(jnp.where(peaks == peak[None], argmaxes, none), axis=0)
        base = jnp.where(jnp.isfinite(peak), peak, 0.0)[None]
        sums = (sums * jnp.exp((peaks - base) * inv_temperature[None])).T
        return Partials(peak, jnp.sum(sums, axis=1), argmax).checked(), sums

    def peak(self, rows: jax.Array | None) -> jax.Array:
        """The maximum alone, ``[n]``. It may pass over a NaN: see `Partials.checked`."""
        x = self.whole(rows)
        if self.platform != "tpu" or x.shape[0] > 1:
            return jnp.max(x, axis=1)
        count = tiles.num_tiles(x.shape[1])
        views = self.in_tiles([(x, -float("inf"))], count, False, by_lanes=True)
        return jnp.max(jnp.stack([jnp.max(x) for _, (x,) in views]), keepdims=True)

    def sums(
        self,
        rows: jax.Array | None,
        peak: jax.Array,
        inv_temperature: jax.Array,
        least: jax.Array | None = None,
        num_tiles: int | None = None,
    ) -> jax.Array:
        """Sums of exponentials relative to `peak`, of entries that are not below `least`.

        They are ``[n]``, or ``[n, num_tiles]`` by tile, from the tile that this part begins in.
        """
        x = self.whole(rows)
        if least is not None:
            x = jnp.where(x < least[:, None], -jnp.inf, x)
        base, inv = jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None], inv_temperature[:, None]
        if num_tiles is None:
            return jnp.sum(jnp.exp((x - base) * inv), axis=1)
        found = []
        for _, (view,) in self.in_tiles([(x, -float("inf"))], num_tiles, by_lanes=True):
            shift, scale = (lax.expand_dims(y, range(2, view.ndim)) for y in (base, inv))
            found.append(sum_of_tiles(jnp.exp((view - shift) * scale)))
        return lax.optimization_barrier(jnp.concatenate(found, axis=1))

    def find_thresholds(
        self,
        rows: jax.Array | None,
        filter: Filter,
        wanted: jax.Array,
        peak: jax.Array,
        inv_temperature: jax.Array,
        form: Form,
        largest: Callable[[], Largest] | None = None,
    ) -> jax.Array:
        """``[n]`` thresholds below which a filter keeps no entry; -inf if it keeps all.

        Args:
          rows: as for `max_and_argmax`.
          filter: of each row, ``[n]``.
          wanted: ``[n]`` bool, whether a request samples from the row.
          peak: ``[n]`` float32, the maximum of each row.
          inv_temperature: ``[n]`` float32.
          form: how the vocabulary is split.
          largest: finds the largest entries of each row. Without it, XLA finds those of all whole
            rows on a TPU.
        """
        peak = form.max(peak)
        limited = filter.limits(self.size) & wanted & jnp.isfinite(peak)
        masked = self.first_id is not None and self.token_bitmask is not None
        if largest is None and rows is None and self.platform == "tpu" and self.first_id is None:
            mass = functools.partial(self.sums, None, peak, inv_temperature)

            def largest() -> Largest:
                return Largest.of(lists_of(self.matrix, self.width), mass)

        least = find_thresholds(
            filter,
            lambda: (self.masked() if masked else self).select(rows),
            limited,
            size=self.size,
            dtype=self.matrix.dtype,
            peak=peak,
            inv_temperature=inv_temperature,
            form=form,
            largest=largest,
        )
        return jnp.where(limited, least, -jnp.inf)

    def in_tiles(
        self,
        matrices: Sequence[tuple[jax.Array, float]],
        count: int,
        by_first_id: bool = True,
        by_lanes: bool = False,
    ) -> list[tuple[int, list[jax.Array]]]:
        """Matrices ``[n, W]`` of this part's ids as tiles ``[n, t, L]``.

        Args:
          matrices: each with what to pad it with.
          count: number of tiles, from the one that this part begins in.
          by_first_id: whether tiles are counted from id 0; if not, from the first column.
          by_lanes: whether whole tiles of one row on a TPU are ``[1, t, 16, 128]``, which fill
            registers as they lie: ``[t, L]`` would be moved, ``[1, W]`` fills an eighth of each.

        Returns:
          Some tiles of each matrix, after the number of the first: all tiles or, on a CPU and by
          lanes, the whole ones, then the last one by itself, which needs no copy.
        """
        width, found = max([x.shape[1] for x, _ in matrices]), []
        size = count * tiles.TILE
        is_cut = by_first_id and self.first_id is not None and self.width % tiles.TILE > 0
        of_one_row = by_lanes and self.platform == "tpu" and matrices[0][0].shape[0] == 1
        if (self.platform == "cpu" or of_one_row) and not is_cut:
            xs = [_padded(x, 0, width - x.shape[1], fill) for x, fill in matrices]
            whole = width // tiles.TILE
            cut = whole * tiles.TILE
            if whole:
                of_tile = (tiles.TILE // LANES, LANES) if of_one_row else (tiles.TILE,)
                views = [x[:, :cut].reshape(-1, whole, *of_tile) for x in xs]
                found.append((0, lax.optimization_barrier(views) if of_one_row else views))
            if cut < width:
                found.append((whole, [x[:, None, cut:] for x in xs]))
            return found
        if self.first_id is None or not is_cut:
            xs = [_padded(x, 0, size - x.shape[1], fill) for x, fill in matrices]
        else:  # an edge between parts may be inside a tile
            start = tiles.TILE - self.first_id % tiles.TILE
            xs = [_padded(x, tiles.TILE, size - x.shape[1], fill) for x, fill in matrices]
            xs = [lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in xs]
        return [(0, [x.reshape(x.shape[0], count, tiles.TILE) for x in xs])]


def sum_of_tiles(x: jax.Array) -> jax.Array:
    """``[n, t]`` of tiles ``[n, t, ...]``, as `Rows.in_tiles` gives them."""
    if x.ndim == 4:  # lanes are added last, and at once
        x = lax.optimization_barrier(jnp.sum(x, axis=2))
    return jnp.sum(x, axis=2)


_SLICES = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
)


def _padded(x: jax.Array, before: int, after: int, fill: float) -> jax.Array:
    """``[n, W]`` with columns more."""
    count = (0, 0), (before, after)
    return jnp.pad(x, count, constant_values=fill) if before or after else x
