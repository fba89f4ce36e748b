"""What devices tell each other of their parts of rows, and the rows as `decide` then reads them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.rows import DraftRows, DraftScale
from jax_specdec._src.verify.vocabulary_shard import RowPart


class Told(NamedTuple):
    """What one device says of one request, at positions ``[P]`` and drafts ``[D]``.

    Attributes:
      max: ``[P]`` float32, the part's largest logit.
      sum: ``[P]`` float32, relative to it.
      choice: ``[P]`` int32, the part's argmax if the request is greedy, else the bits of the
        drafted token's logit, which only the device that holds it knows.
      draft_entry: ``[D]`` float32, likewise of the draft row; None without draft distributions.
      draft_max: ``[D]`` float32; None where normalizers are stored.
      draft_sum: ``[D]`` float32.
    """

    max: jax.Array
    sum: jax.Array
    choice: jax.Array
    draft_entry: jax.Array | None = None
    draft_max: jax.Array | None = None
    draft_sum: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class ToldTarget:
    """A request's target rows, as `decide` reads them, by what all devices told of them."""

    told: Told
    part: RowPart

    @property
    def size(self) -> int:
        return self.part.size

    def stats(self, row: jax.Array, inv_temperature: jax.Array, *_: Any) -> tiles.RowStats:
        return _together(self.told.max[:, row], self.told.sum[:, row], inv_temperature)

    def at(self, row: jax.Array, token_id: jax.Array, *_: jax.Array | None) -> jax.Array:
        entry = _of_holder(self.told.choice[:, row], token_id, self.part.width)
        entry = lax.bitcast_convert_type(entry, jnp.float32)
        return jnp.where(token_id < self.size, entry, -jnp.inf)

    def best(self, row: jax.Array, stats: tiles.RowStats) -> jax.Array:
        best = self.told.choice[-1, row]
        for part in reversed(range(self.told.max.shape[0] - 1)):
            best = jnp.where(
                self.told.max[part, row] == stats.peak, self.told.choice[part, row], best
            )
        return best


@dataclasses.dataclass(frozen=True)
class ToldDraft:
    """A request's draft rows, likewise; `rows` are their indices ``[D]`` in the storage."""

    told: Told
    width: int
    storage: DraftRows
    rows: jax.Array

    def scale(self, row: jax.Array, inv_temperature: jax.Array) -> DraftScale:
        if self.told.draft_max is None or self.told.draft_sum is None:
            return self.storage.scale(self.rows[row], inv_temperature)
        told = self.told.draft_max[:, row], self.told.draft_sum[:, row]
        stats = _together(*told, inv_temperature)
        outside = (self.rows[row] < 0) | (self.rows[row] >= self.storage.storage.shape[0])
        bad = outside | ~jnp.isfinite(stats.peak)
        return DraftScale(stats.scale(inv_temperature), bad)

    def at(
        self, row: jax.Array, token_id: jax.Array, scale: DraftScale, inv_temperature: jax.Array
    ) -> jax.Array:
        assert self.told.draft_entry is not None
        entry = _of_holder(self.told.draft_entry[:, row], token_id, self.width)
        return self.storage.probs(entry, scale, inv_temperature)


def _together(maxima: jax.Array, sums: jax.Array, inv_temperature: jax.Array) -> tiles.RowStats:
    """Of parts ``[num_parts]`` one tile; one by one, which XLA fuses with what follows."""
    peak: jax.Array = functools.reduce(jnp.maximum, list(maxima))
    total = jnp.zeros_like(peak)
    for m, s in zip(maxima, sums, strict=True):
        total += s * jnp.exp((m - peak) * inv_temperature)
    return tiles.RowStats(peak[None], total[None])


def _of_holder(values: jax.Array, token_id: jax.Array, width: int) -> jax.Array:
    """Of values ``[num_parts]``, that of the part which holds a token."""
    return values[jnp.clip(token_id // width, 0, values.shape[0] - 1)]
