"""Reading rows of target logits and draft distributions on XLA, in place and in tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import DraftDistribution, DraftLogits, DraftProbs
from jax_specdec._src.verify import tiles


def _read(matrix: jax.Array, row: jax.Array, start: Any, length: int) -> jax.Array:
    """``float32(matrix[row, start : start + length])``."""
    return lax.dynamic_slice(matrix, (row, start), (1, length))[0].astype(jnp.float32)


def _gather(matrix: jax.Array, row: jax.Array, ids: jax.Array) -> jax.Array:
    """``float32(matrix[row, ids])``, ids clipped into range."""
    ids = jnp.clip(ids, 0, matrix.shape[1] - 1)
    return matrix.at[row, ids].get(mode="clip").astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class TargetRows:
    """Target logits ``[M, V]``, of which ids below `size` count.

    `chunk` is the length of the loop over a row (`tiles.map_tiles`).
    """

    logits: jax.Array
    size: int
    chunk: int | None

    def stats(
        self, row: jax.Array, inv_temperature: jax.Array, greedy: jax.Array
    ) -> tiles.RowStats:
        """One read of the row; a greedy request is spared the sum."""

        def read(start: Any, length: int) -> tuple[jax.Array, ...]:
            return (_read(self.logits, row, start, length),)

        def map_row(fn: Any) -> tiles.RowStats:
            return tiles.map_tiles(fn, read, self.size, self.chunk)

        return lax.cond(
            greedy,
            lambda: map_row(tiles.maxima),
            lambda: map_row(lambda x: tiles.max_and_sum(x, inv_temperature)),
        )

    def at(self, row: jax.Array, ids: jax.Array) -> jax.Array:
        """Logits of `ids`, -inf for those that do not count."""
        return jnp.where(ids < self.size, _gather(self.logits, row, ids), -jnp.inf)

    def best(self, row: jax.Array, stats: tiles.RowStats) -> jax.Array:
        """Argmax of the row, ties to the lowest id; looks into one tile only."""
        peak = stats.peak
        tile = jnp.minimum(tiles.first(stats.max == peak), stats.max.shape[0] - 1)
        ids = tile * tiles.TILE + jnp.arange(tiles.TILE, dtype=jnp.int32)
        return tile * tiles.TILE + tiles.first(self.at(row, ids) == peak)


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
        d = self.distribution
        return d.probs if isinstance(d, DraftProbs) else d.logits

    @property
    def size(self) -> int:
        """Ids the drafter could draw."""
        return min(self.storage.shape[1], self.target_size)

    @property
    def fill(self) -> float:
        """The entry that stands for ``q = 0``."""
        return 0.0 if isinstance(self.distribution, DraftProbs) else -float("inf")

    def read(self, row: jax.Array, start: Any, length: int) -> jax.Array:
        return _read(self.storage, row, start, length)

    def scale(self, row: jax.Array, inv_temperature: jax.Array) -> DraftScale:
        """The row's normalizer: the stored one, or one read of the row."""
        outside = (row < 0) | (row >= self.storage.shape[0])
        d = self.distribution
        if not isinstance(d, DraftLogits):
            return DraftScale.unit()._replace(bad=outside)
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
        entries = _gather(self.storage, row, ids)
        return jnp.where(ids < self.size, self.probs(entries, scale, inv_temperature), 0.0)
