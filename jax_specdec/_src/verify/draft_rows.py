"""Rows of draft distributions, whichever ids their columns stand for.

Column ``j`` of `Rows` is id ``j``. `MappedRows` share one list of ids, `CandidateRows` have a list
each. Both are read by id as `Rows` are, and neither writes anything of the vocabulary's size. For a
shared list, the column of each id is computed once. Candidates are few: their ids are compared with
those that are asked for.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import take
from jax_specdec._src.platform import Platform
from jax_specdec._src.types import DraftDistribution, DraftLogits, DraftProbs
from jax_specdec._src.verify.rows import Partials, Rows, storage_of
from jax_specdec._src.verify.tiles import Scale


class DraftScale(NamedTuple):
    """What normalizes a draft row, and whether the row is bad. Probabilities need no scale."""

    scale: Scale
    bad: jax.Array

    @classmethod
    def unit(cls) -> DraftScale:
        """Of a row of probabilities, or of no row."""
        return cls(Scale(jnp.float32(0), jnp.float32(0)), jnp.bool_(False))


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """Draft distributions ``[R, Vd]``, or this device's part of each row.

    Attributes:
      distribution: probabilities or logits.
      storage: their rows, read by column.
      rows: the same rows, read by id.
      is_normalized: whether no row must be read to normalize it.
    """

    distribution: DraftDistribution
    storage: Rows
    rows: Rows | MappedRows | CandidateRows
    is_normalized: bool

    @classmethod
    def of(
        cls,
        distribution: DraftDistribution,
        size: int,
        platform: Platform,
        first_id: jax.Array | None = None,
    ) -> DraftRows:
        """The rows of a distribution.

        Args:
          distribution: with storage ``[R, Vd]``, or this device's columns of it.
          size: ids from it on are padding.
          platform: that the program is for.
          first_id: ``[]`` int32, the id of the first column; None if the storage is whole.
        """
        fill, thresholds = 0.0, None
        if isinstance(distribution, DraftLogits):
            fill, thresholds = -float("inf"), distribution.threshold
        storage, ids = storage_of(distribution), distribution.ids
        normal = isinstance(distribution, DraftProbs) or distribution.log_normalizer is not None
        if ids is None:
            rows = Rows(storage, size, fill, platform, None, thresholds, first_id)
            return cls(distribution, rows, rows, normal)
        rows = Rows(storage, storage.shape[1], fill, platform, None, thresholds)
        if ids.ndim == 1:
            return cls(distribution, rows, MappedRows.of(rows, ids, size), normal)
        return cls(distribution, rows, CandidateRows(rows, size, ids), normal)

    def scales(self, rows: jax.Array, partials: Partials | None) -> DraftScale:
        """Scales of `rows`, of any shape: from `partials`, or from what is stored."""
        d, count = self.distribution, self.storage.matrix.shape[0]
        bad = (rows < 0) | (rows >= count)
        if not isinstance(self.rows, Rows):
            bad |= self.rows.are_bad(rows)
        zero = jnp.zeros(rows.shape, jnp.float32)
        if not isinstance(d, DraftLogits):
            return DraftScale(Scale(zero, zero), bad)
        rows = jnp.clip(rows, 0, count - 1)
        if d.threshold is not None:
            bad |= jnp.isnan(d.threshold[rows])
        if partials is not None:
            scale = Scale(partials.max, jnp.log(partials.sum))
            return DraftScale(scale, bad | ~jnp.isfinite(partials.max))
        assert d.log_normalizer is not None
        peak = zero if d.row_max is None else d.row_max[rows]
        stored = Scale(peak, d.log_normalizer[rows])
        return DraftScale(stored, bad | ~(jnp.isfinite(peak) & jnp.isfinite(stored.log_scale)))

    def probs(self, entries: jax.Array, scale: DraftScale, inv_temperature: jax.Array) -> jax.Array:
        """``q``, from entries of rows."""
        if isinstance(self.distribution, DraftProbs):
            return entries
        return scale.scale.probs(entries, inv_temperature)


@dataclasses.dataclass(frozen=True)
class MappedRows:
    """Rows ``[R, Vd]`` that share one list of ids.

    Attributes:
      storage: the rows, read by column.
      size: ids from it on are padding.
      columns: ``[size]`` int32, the column of each id; Vd if it is not listed.
    """

    storage: Rows
    size: int
    columns: jax.Array

    @classmethod
    def of(cls, storage: Rows, ids: jax.Array, size: int) -> MappedRows:
        """Rows whose column ``j`` is id ``ids[j]``."""
        width = ids.shape[0]
        index = jnp.where(ids < 0, size, ids)  # dropped
        columns = jnp.full((size,), width, jnp.int32)
        columns = columns.at[index].set(jnp.arange(width, dtype=jnp.int32), mode="drop")
        return cls(storage, size, columns)

    def are_bad(self, rows: jax.Array) -> jax.Array:
        """Whether the list has an id out of range, or one twice; then every row is bad."""
        listed = jnp.sum(self.columns < self.unlisted, dtype=jnp.int32)
        return jnp.broadcast_to(listed != self.unlisted, rows.shape)

    @property
    def unlisted(self) -> int:
        """The column of ids that are not listed."""
        return self.storage.matrix.shape[1]

    def columns_of(self, first: jax.Array | None, width: int) -> jax.Array:
        """``[width]`` int32, the columns of ids from `first` on, or from 0."""
        if first is None:
            return self.columns[:width]
        columns = jnp.pad(self.columns, (0, width), constant_values=self.unlisted)
        return lax.dynamic_slice_in_dim(columns, first, width)

    def at(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """As `Rows`."""
        return self.storage.at(rows, self.columns[jnp.clip(ids, 0, self.size - 1)])

    def slices(self, rows: jax.Array, first: jax.Array, length: int, end: int) -> jax.Array:
        """As `Rows`."""
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        return self.at(rows[:, None], first[:, None] + place)

    def whole(self, rows: jax.Array) -> jax.Array:
        """As `Rows`."""
        return self.storage.at(rows[:, None], self.columns[None, :])


@dataclasses.dataclass(frozen=True)
class CandidateRows:
    """Rows ``[R, C]``, each with a list of ids of its own.

    Attributes:
      storage: the rows, read by column.
      size: ids from it on are padding.
      ids: ``[R, C]`` int32, in any order.
    """

    storage: Rows
    size: int
    ids: jax.Array

    def listed(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Ids ``[n, C]`` of some rows, and their entries."""
        return self._ids(rows), self.storage.whole(rows)

    def are_bad(self, rows: jax.Array) -> jax.Array:
        """Whether a row lists an id out of range, or one twice; `rows` of any shape."""
        ids = jnp.sort(self._ids(rows.reshape(-1)), axis=1)
        bad = (ids[:, 0] < 0) | (ids[:, -1] >= self.size)
        return (bad | jnp.any(ids[:, 1:] == ids[:, :-1], axis=1)).reshape(rows.shape)

    def at(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """As `Rows`; `rows` must have the shape of `ids`."""
        return self._find(rows.reshape(-1), ids.reshape(-1, 1)).reshape(ids.shape)

    def slices(self, rows: jax.Array, first: jax.Array, length: int, end: int) -> jax.Array:
        """As `Rows`."""
        if self.storage.platform != "cpu":
            return self._find(rows, first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :])
        # By n * C writes: faster on a CPU than n * length * C comparisons.
        listed, entries = self.listed(rows)
        place = listed - first[:, None]
        place = jnp.where(place < 0, length, place)  # dropped
        found = jnp.full((rows.shape[0], length), self.storage.fill, jnp.float32)
        index = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
        return found.at[index, place].set(entries, mode="drop")

    def whole(self, rows: jax.Array) -> jax.Array:
        """As `Rows`. Only a race needs it."""
        return self.slices(rows, jnp.zeros_like(rows), self.size, self.size)

    def _ids(self, rows: jax.Array) -> jax.Array:
        return take(self.ids, jnp.clip(rows, 0, self.ids.shape[0] - 1), self.storage.platform)

    def _find(self, rows: jax.Array, ids: jax.Array) -> jax.Array:
        """Entries of ids ``[n, L]`` in rows ``[n]``."""
        listed, entries = self.listed(rows)
        hits = listed[:, None, :] == ids[:, :, None]
        found = jnp.sum(jnp.where(hits, entries[:, None, :], 0.0), axis=2)
        return jnp.where(jnp.any(hits, axis=2), found, self.storage.fill)
