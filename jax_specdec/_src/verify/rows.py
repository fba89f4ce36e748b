"""Reading rows of target logits and draft distributions on XLA, in place and in tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftLogits, DraftProbs
from jax_specdec._src.verify import tiles
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
                lambda fn: sum_of(map_row(lambda x: sum_of(fn(x), axis=1))),
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
