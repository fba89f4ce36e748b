"""`Q`: the draft distributions of a call, by the ids that their columns stand for.

`OneHot` has none, column j of `Dense` is id j, rows of `Mapped` share one list of ids, and each row
of `Listed` has a list of its own. All are read by id as `VocabRows` are. To memory they write
nothing of the vocabulary's size but the columns of `Mapped`, ``[size]`` once for all rows, and
``[n, size]`` for a race of all ids. What is read comes as a list of arrays, which is empty if every
draft is one-hot.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.types import DraftDistribution, DraftLogits, DraftProbs
from jax_specdec._src.rows.device import Device, entries_of
from jax_specdec._src.rows.part import WHOLE, Part
from jax_specdec._src.rows.rows import VocabRows, storage_of
from jax_specdec._src.rows.tiles import Scale
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.position import DraftScale, Source
from jax_specdec._src.verify.statistics import Partials


@dataclasses.dataclass(frozen=True)
class Probabilities:
    """Storage that holds q itself.

    Attributes:
      fill: the entry of an id that the drafter cannot draw.
      is_normalized: whether no row must be read to normalize it.
      thresholds: ``[R]`` float32, the drafter's filter kept no entry below it; None for none.
    """

    fill: ClassVar[float] = 0.0
    is_normalized: ClassVar[bool] = True
    thresholds: ClassVar[None] = None  # what a drafter's filter left out is stored as 0

    def probs(self, entries: jax.Array, scale: DraftScale, inv_temperature: jax.Array) -> jax.Array:
        """Returns ``q``, from entries of rows."""
        return entries

    def checked(self, q: jax.Array) -> jax.Array:
        """Returns ``q``, NaN where it cannot be a probability."""
        return jnp.where(q >= 0, q, jnp.nan)

    def scales(self, index: jax.Array, partials: Partials | None, bad: jax.Array) -> DraftScale:
        """Returns the scales of rows in range, of which some are known to be bad."""
        zero = jnp.zeros(index.shape, jnp.float32)
        return DraftScale(Scale(zero, zero), bad)


@dataclasses.dataclass(frozen=True)
class Logits:
    """Storage that holds logits of q, with what is known of each row, as `Probabilities`."""

    fill: ClassVar[float] = -float("inf")
    given: DraftLogits

    @property
    def is_normalized(self) -> bool:
        return self.given.log_normalizer is not None

    @property
    def thresholds(self) -> jax.Array | None:
        return self.given.threshold

    def probs(self, entries: jax.Array, scale: DraftScale, inv_temperature: jax.Array) -> jax.Array:
        """Returns ``q``, from entries of rows."""
        return scale.scale.probs(entries, inv_temperature)

    def checked(self, q: jax.Array) -> jax.Array:
        """Returns ``q`` as it is: an exponential is not negative."""
        return q

    def scales(self, index: jax.Array, partials: Partials | None, bad: jax.Array) -> DraftScale:
        """Returns the scales of rows in range, from their `partials` or from what is stored."""
        zero = jnp.zeros(index.shape, jnp.float32)
        # Rows out of range are bad already. They are read in range.
        index = jnp.clip(index, 0, self.given.logits.shape[0] - 1)
        if self.given.threshold is not None:
            bad |= jnp.isnan(self.given.threshold[index])
        if partials is not None:
            scale = Scale(partials.max, jnp.log(partials.sum))
            return DraftScale(scale, bad | ~jnp.isfinite(partials.max))
        # Stored beside the row, perhaps relative to its maximum.
        assert self.given.log_normalizer is not None
        # [n]: exp((x - peak) / temperature - log_scale) is q
        peak = zero if self.given.row_max is None else self.given.row_max[index]
        stored = Scale(peak, self.given.log_normalizer[index])
        return DraftScale(stored, bad | ~(jnp.isfinite(peak) & jnp.isfinite(stored.log_scale)))


class Q(abc.ABC):
    """The draft distributions of a call, as far as a draw asks for them."""

    is_one_hot: ClassVar[bool] = False

    @abc.abstractmethod
    def slices(self, index: jax.Array, first: jax.Array, length: int, end: int) -> list[jax.Array]:
        """Returns the entries of some ids, as `VocabRows.slices`."""

    @abc.abstractmethod
    def whole(self, index: jax.Array, width: int) -> list[jax.Array]:
        """Returns the entries ``[n, width]`` of rows."""

    @abc.abstractmethod
    def weights(
        self, source: Source, p: jax.Array, is_removed: jax.Array, *entries: jax.Array
    ) -> jax.Array:
        """Returns the weights that a token is drawn by, from ``p`` and entries of draft rows.

        Args:
          source: what is drawn from, with axes as `p` has.
          p: target probabilities of some ids.
          is_removed: whether an id is a rejected one-hot draft, which has no weight.
          *entries: of the same ids in draft rows; none if every draft is one-hot.
        """


@dataclasses.dataclass(frozen=True)
class OneHot(Q):
    """No draft distribution: every draft is one-hot."""

    is_one_hot: ClassVar[bool] = True

    def slices(self, index: jax.Array, first: jax.Array, length: int, end: int) -> list[jax.Array]:
        return []

    def whole(self, index: jax.Array, width: int) -> list[jax.Array]:
        return []

    def weights(
        self, source: Source, p: jax.Array, is_removed: jax.Array, *entries: jax.Array
    ) -> jax.Array:
        return jnp.where(is_removed, 0.0, p)


@dataclasses.dataclass(frozen=True)
class Stored(Q):
    """Draft distributions that are stored, ``[R, Vd]``, or this device's part of each row.

    Attributes:
      storage: their rows, read by column.
      kind: what the rows hold.
    """

    storage: VocabRows
    kind: Probabilities | Logits

    def at(self, index: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the entries of `ids`, as `VocabRows.at`."""
        return self.storage.at(index, ids)

    def slices(self, index: jax.Array, first: jax.Array, length: int, end: int) -> list[jax.Array]:
        return [self.storage.slices(index, first, length, end)]

    def whole(self, index: jax.Array, width: int) -> list[jax.Array]:
        entries = self.storage.whole(index)
        # Past Vd, q is 0.
        missing = (0, 0), (0, width - entries.shape[1])
        return [jnp.pad(entries, missing, constant_values=self.storage.fill)]

    def weights(
        self, source: Source, p: jax.Array, is_removed: jax.Array, *entries: jax.Array
    ) -> jax.Array:
        (of_row,) = entries
        q = self.kind.probs(of_row, source.draft_scale, source.inv_temperature)
        q = self.kind.checked(q)  # NaN makes the residual mass NaN, and the draft row bad
        # One formula for every source: q = 2 removes a token, as no p exceeds it.
        q = jnp.where(source.uses_q, q, jnp.where(is_removed, 2.0, 0.0))
        return rules.residual(jnp.where(source.uses_q, source.weight, 1.0), p, q)

    def are_bad(self, index: jax.Array) -> jax.Array:
        """Returns whether rows cannot be used, whatever they hold; `index` of any shape."""
        return (index < 0) | (index >= self.storage.matrix.shape[0])

    def scales(self, index: jax.Array, partials: Partials | None) -> DraftScale:
        """Returns the scales of rows of any shape, from their `partials`; None if not read."""
        return self.kind.scales(index, partials, self.are_bad(index))


@dataclasses.dataclass(frozen=True)
class Dense(Stored):
    """Rows ``[R, Vd]`` whose column j is id j."""


@dataclasses.dataclass(frozen=True)
class Mapped(Stored):
    """Rows ``[R, Vd]`` that share one list of ids. The column of each id is computed once.

    Attributes:
      size: ids from it on are padding.
      columns: ``[size]`` int32, the column of each id; Vd if it is not listed.
    """

    size: int
    columns: jax.Array

    @classmethod
    def of(
        cls, storage: VocabRows, kind: Probabilities | Logits, ids: jax.Array, size: int
    ) -> Mapped:
        """Returns rows whose column ``j`` is id ``ids[j]``."""
        width = ids.shape[0]
        # The list turned around: of each id its column.
        index = jnp.where(ids < 0, size, ids)  # dropped
        columns = jnp.full((size,), width, jnp.int32)
        columns = columns.at[index].set(jnp.arange(width, dtype=jnp.int32), mode="drop")
        return cls(storage, kind, size, columns)

    @property
    def unlisted(self) -> int:
        """The column of ids that are not listed."""
        return self.storage.matrix.shape[1]

    def columns_of(self, part: Part, width: int) -> jax.Array:
        """Returns ``[width]`` int32, the columns of the ids of a part."""
        if not part.is_split:
            return self.columns[:width]
        # The last part has padding, which no list has.
        columns = jnp.pad(self.columns, (0, width), constant_values=self.unlisted)
        return lax.dynamic_slice_in_dim(columns, part.first_id, width)

    def at(self, index: jax.Array, ids: jax.Array) -> jax.Array:
        # Ids that are not listed have column Vd, past the last: it is read as `fill`.
        return self.storage.at(index, self.columns[jnp.clip(ids, 0, self.size - 1)])

    def slices(self, index: jax.Array, first: jax.Array, length: int, end: int) -> list[jax.Array]:
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        # [n, length]: one entry after another, since listed ids lie anywhere
        return [self.at(index[:, None], first[:, None] + place)]

    def whole(self, index: jax.Array, width: int) -> list[jax.Array]:
        # [n, size]: the entry of every id, by its column
        entries = self.storage.at(index[:, None], self.columns[None, :])
        missing = (0, 0), (0, width - entries.shape[1])
        return [jnp.pad(entries, missing, constant_values=self.storage.fill)]

    def are_bad(self, index: jax.Array) -> jax.Array:
        bad = super().are_bad(index)
        # If an id is out of range, or there twice, fewer have a column. Then every row is bad.
        listed = jnp.sum(self.columns < self.unlisted, dtype=jnp.int32)
        return bad | jnp.broadcast_to(listed != self.unlisted, index.shape)


@dataclasses.dataclass(frozen=True)
class Listed(Stored):
    """Rows ``[R, C]``, each with a list of few ids of its own, which are compared with those asked.

    Attributes:
      size: ids from it on are padding.
      ids: ``[R, C]`` int32, in any order.
    """

    size: int
    ids: jax.Array

    def listed(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the ids ``[n, C]`` of some rows, and their entries."""
        return self._ids(index), self.storage.whole(index)

    def at(self, index: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the entries of `ids`; `index` must have their shape."""
        # [n]: one id of each row
        flat = index.reshape(-1)
        asked = ids.reshape(-1, 1)
        return entries_of(*self.listed(flat), asked, self.storage.fill).reshape(ids.shape)

    def slices(self, index: jax.Array, first: jax.Array, length: int, end: int) -> list[jax.Array]:
        listed, entries = self.listed(index)
        return [self.storage.device.listed(listed, entries, first, length, self.storage.fill)]

    def whole(self, index: jax.Array, width: int) -> list[jax.Array]:
        """Returns what `Q.whole` does; only a race asks for it."""
        (entries,) = self.slices(index, jnp.zeros_like(index), self.size, self.size)
        missing = (0, 0), (0, width - entries.shape[1])
        return [jnp.pad(entries, missing, constant_values=self.storage.fill)]

    def are_bad(self, index: jax.Array) -> jax.Array:
        bad = super().are_bad(index)
        # [n, C]: in order, equal ids stand side by side.
        ids = jnp.sort(self._ids(index.reshape(-1)), axis=1)
        # [n]: the least and the largest id show what is out of range.
        bad_list = (ids[:, 0] < 0) | (ids[:, -1] >= self.size)
        bad_list |= jnp.any(ids[:, 1:] == ids[:, :-1], axis=1)
        return bad | bad_list.reshape(index.shape)

    def _ids(self, index: jax.Array) -> jax.Array:
        # [n, C]: lists of the rows, taken as the device takes rows
        found: jax.Array = self.storage.device.take(
            self.ids, jnp.clip(index, 0, self.ids.shape[0] - 1)
        )
        return found


def q_of(
    distribution: DraftDistribution | None, size: int, device: Device, part: Part = WHOLE
) -> Q:
    """Returns the rows of a draft distribution.

    Args:
      distribution: with storage ``[R, Vd]``, or this device's columns of it; None without one.
      size: ids from it on are padding.
      device: that they are on.
      part: of the vocabulary, which the columns are.
    """
    if distribution is None:
        return OneHot()
    # What rows hold, and which ids their columns stand for, are separated here and nowhere below.
    kind = Probabilities() if isinstance(distribution, DraftProbs) else Logits(distribution)
    storage = storage_of(distribution)
    ids = distribution.ids
    if ids is None:
        # Column j is id j: rows are read as target rows are.
        rows = VocabRows(storage, size, kind.fill, device, None, kind.thresholds, part)
        return Dense(rows, kind)
    # Rows are read by column; which id a column is, the class knows.
    rows = VocabRows(storage, storage.shape[1], kind.fill, device, None, kind.thresholds)
    if ids.ndim == 1:
        return Mapped.of(rows, kind, ids, size)
    return Listed(rows, kind, size, ids)
