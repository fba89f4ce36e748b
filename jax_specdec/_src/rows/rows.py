"""`VocabRows`: entries of a matrix by row and id, read in place on XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.types import DraftDistribution, DraftProbs
from jax_specdec._src.rows import tiles
from jax_specdec._src.rows.device import Device
from jax_specdec._src.rows.part import WHOLE, Part


def bits_at(words: jax.Array, index: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns whether the bit of each id is set in its row of words; ids are clipped into range."""
    ids = jnp.clip(ids, 0, words.shape[1] * 32 - 1)
    # The word that has the bit of each id, then its bit.
    these = words.at[index, ids // 32].get(mode="clip")
    return (these >> (ids % 32).astype(words.dtype)) & 1 == 1


def storage_of(distribution: DraftDistribution) -> jax.Array:
    """Returns the rows ``[R, Vd]`` of a draft distribution, of either kind."""
    return distribution.probs if isinstance(distribution, DraftProbs) else distribution.logits


@dataclasses.dataclass(frozen=True)
class VocabRows:
    """A matrix ``[R, W]`` of logits or probabilities, read by row and id.

    An `index` is int32, the rows that are read; those out of range are clipped into it.

    Attributes:
      matrix: of any float dtype.
      size: ids from it on are padding.
      fill: what is read for padding, for ids that the bitmask forbids or that other devices hold,
        and for entries below the threshold.
      device: moves rows and bits as it does best.
      token_bitmask: ``[R, ceil(V/32)]``, the ids that are allowed; None for all.
      thresholds: ``[R]`` float32, one per row; None for none.
      part: of the vocabulary, which the columns are.
    """

    matrix: jax.Array
    size: int
    fill: float
    device: Device
    token_bitmask: jax.Array | None = None
    thresholds: jax.Array | None = None
    part: Part = WHOLE

    @functools.cached_property
    def width(self) -> int:
        """How many ids are here; padding is left out if the matrix has all ids."""
        columns = self.matrix.shape[1]
        return columns if self.part.is_split else min(self.size, columns)

    def masked(self) -> VocabRows:
        """Returns a copy with the bitmask applied, where bits are expensive to read repeatedly."""
        if self.token_bitmask is None:
            return self
        # [R, W], of the dtype of the logits: float32 would be twice as large
        allowed = self._bits(self.token_bitmask, self.matrix.shape[1])
        matrix = jnp.where(allowed, self.matrix, jnp.asarray(self.fill, self.matrix.dtype))
        return dataclasses.replace(self, matrix=matrix, token_bitmask=None)

    def at(self, index: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the entries of `ids`, of any shape that `index` broadcasts to."""
        index = jnp.clip(index, 0, self.matrix.shape[0] - 1)
        # What is not here is read somewhere in range, and filled afterwards.
        columns = self.part.columns(ids)
        in_range = jnp.clip(columns, 0, self.width - 1)
        found = self.matrix.at[index, in_range].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )
        return self._entries(found, index, ids, columns)

    def slices(self, index: jax.Array, first: jax.Array, length: int, end: int) -> jax.Array:
        """Returns ``[n, length]``: the entries of `length` ids from ``first[i]`` on, row by row.

        Reads are contiguous. No id may be `end` or more: by this static bound, nothing is moved or
        filled if the matrix has all ids. It does not matter if the vocabulary is split.
        """
        index = jnp.clip(index, 0, self.matrix.shape[0] - 1)
        num_columns = self.matrix.shape[1]
        # A slice may begin left of the matrix or end right of it: what is there of it is read.
        first_column = self.part.columns(first)
        available = min(length, num_columns)
        start = jnp.clip(first_column, 0, num_columns - available)
        x = lax.gather(
            self.matrix,
            jnp.stack([index, start], axis=1),
            _SLICES,
            (1, available),
            mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        # [1, length] and [n, available]: places of the slice, and what was read
        offset = jnp.arange(length, dtype=jnp.int32)[None, :]
        is_whole = available == length and end <= num_columns == self.size
        if not self.part.is_split and not is_whole:
            # Back to where it would have begun; what is out of range is filled below.
            found = first_column[:, None] + offset - start[:, None]
            x = jnp.take_along_axis(x, jnp.clip(found, 0, available - 1), axis=1)
        is_inside = is_whole and not self.part.is_split
        # [n, length]: the column of each id; not needed where all of them are here
        columns = None if is_inside else first_column[:, None] + offset
        return self._entries(x, index[:, None], first[:, None] + offset, columns)

    def whole(self, index: jax.Array | None = None) -> jax.Array:
        """Returns ``[n, width]`` entries of some rows; of all rows, in place, without an index."""
        these = self.select(index)
        # [n, width]
        x = these.matrix[..., : self.width].astype(jnp.float32)
        if these.token_bitmask is not None:
            x = jnp.where(self._bits(these.token_bitmask, self.width), x, self.fill)
        if self.part.is_split:  # the last parts may have padding
            ids = self.part.ids(jnp.arange(self.width, dtype=jnp.int32))
            x = jnp.where(ids[None, :] < self.size, x, self.fill)
        return tiles.kept_of_rows(x, these.thresholds, self.fill)

    def read(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Returns ``function(entries, *arrays)`` of all rows, ``[n, width]`` at a time."""
        return self.device.each_row(
            lambda index, *given: function(self.whole(index), *given), self.matrix.shape[0], *arrays
        )

    def select(self, index: jax.Array | None) -> VocabRows:
        """Returns some rows, with their bits and thresholds; all of them without an index."""
        # A device takes rows of all three alike: None has no leaves.
        if index is None:
            return self
        given = self.matrix, self.token_bitmask, self.thresholds
        found = self.device.take(given, jnp.clip(index, 0, self.matrix.shape[0] - 1))
        matrix, words, thresholds = found
        return dataclasses.replace(self, matrix=matrix, token_bitmask=words, thresholds=thresholds)

    def _entries(
        self, x: jax.Array, index: jax.Array, ids: jax.Array, columns: jax.Array | None
    ) -> jax.Array:
        """Returns entries as they were found at `ids`, with `fill` where it belongs.

        `columns` are those of the ids; None if all are in the vocabulary and in this part of it.
        """
        x = x.astype(jnp.float32)
        # Ids of other parts, and padding.
        if columns is not None:
            is_here = (columns >= 0) & (columns < self.width)
            if self.part.is_split:
                is_here &= ids < self.size
            x = jnp.where(is_here, x, self.fill)
        # Ids that are forbidden, and entries that a filter has left out.
        if self.token_bitmask is not None:
            x = jnp.where(bits_at(self.token_bitmask, index, ids), x, self.fill)
        return tiles.kept(x, jax.tree.map(lambda of_row: of_row[index], self.thresholds), self.fill)

    def _bits(self, words: jax.Array, columns: int) -> jax.Array:
        """Returns ``[..., columns]`` bool, from words ``[..., ceil(V/32)]`` of all ids."""
        if not self.part.is_split:
            return self.device.bits(words)[..., :columns]
        # As many words as a part may lie in: it may begin and end inside of one.
        first = self.part.first_id
        count = columns // 32 + 2 * (columns % 32 > 0)
        count = min(count, words.shape[-1])
        word = jnp.minimum(first // 32, words.shape[-1] - count)
        words = lax.dynamic_slice_in_dim(words, word, count, axis=-1)
        # Bits of the first word that belong to the part before are cut off.
        shift = first - 32 * word
        bits = self.device.bits(words)
        if columns % 32 == 0:  # then a part begins with a word
            return bits[..., :columns]
        return lax.dynamic_slice_in_dim(bits, shift, columns, axis=-1)


_SLICES: Any = lax.GatherDimensionNumbers(
    offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
)
