"""One device's part of the vocabulary: what it reads of its own columns.

Two computations read whole rows: `RowPart.statistics`, of the rows of every position, and
`tile_masses`, of the chosen row. The others look at single entries, or at one tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify import block, tiles
from jax_specdec._src.verify.decide import Request
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import DraftRows, bits_at


class PartStats(NamedTuple):
    """What one read of a part of a row leaves behind.

    Attributes:
      max: ``[]`` float32, its largest logit; +inf for NaN, -inf where no id counts.
      sum: ``[]`` float32, ``sum(exp((logit - max) / temperature))``.
      best_id: ``[]`` int32, the lowest id of the largest logit.
    """

    max: jax.Array
    sum: jax.Array
    best_id: jax.Array


@dataclasses.dataclass(frozen=True)
class RowPart:
    """The ids ``first_id .. first_id + width - 1`` of a matrix's rows.

    Attributes:
      matrix: ``[R, width]``, these ids; or ``[R, Vd]``, all ids, on every device.
      is_split: which of the two.
      first_id: ``[]`` int32.
      width: ids of a part, alike on every device.
      size: ids of the whole vocabulary that count.
      fill: the entry of ids that do not.
      token_bitmask: ``[R, ceil(V/32)]`` of the whole vocabulary, or None where every id is allowed.
    """

    matrix: jax.Array
    is_split: bool
    first_id: jax.Array
    width: int
    size: int
    fill: float
    token_bitmask: jax.Array | None = None

    def holds(self, ids: jax.Array) -> jax.Array:
        """Whether ids are of this part."""
        return (ids >= self.first_id) & (ids < self.first_id + self.width)

    def at(self, row: jax.Array, ids: jax.Array) -> jax.Array:
        """Entries of ids of this part; of others it may be anything."""
        columns = ids - self.first_id if self.is_split else ids
        columns = jnp.clip(columns, 0, self.matrix.shape[1] - 1)
        entries = self.matrix.at[row, columns].get(mode="clip").astype(jnp.float32)
        return jnp.where(self._counts(row, ids), entries, self.fill)

    def read(self, row: jax.Array, start: Any, length: int) -> jax.Array:
        """``[length]`` entries, from the part's column `start` on."""
        ids = self.first_id + start + jnp.arange(length, dtype=jnp.int32)
        if not self.is_split:
            return self.at(row, ids)
        entries = lax.dynamic_slice(self.matrix, (row, start), (1, length))[0]
        return jnp.where(self._counts(row, ids), entries.astype(jnp.float32), self.fill)

    def _counts(self, row: jax.Array, ids: jax.Array) -> jax.Array:
        counts = ids < self.size
        return (
            counts if self.token_bitmask is None else counts & bits_at(self.token_bitmask, row, ids)
        )

    def statistics(self, row: jax.Array, inv_temperature: jax.Array) -> PartStats:
        """Statistics of this part of a row of logits."""
        stats = tiles.map_tiles(
            lambda x: tiles.max_and_sum(x, inv_temperature),
            lambda start, length: (self.read(row, start, length),),
            self.width,
            chunk=None,
        )
        peak = stats.peak
        total = jnp.sum(stats.masses(inv_temperature))
        tile = jnp.minimum(tiles.first(stats.max == peak), stats.max.shape[0] - 1)
        first_id = self.first_id + tile * tiles.TILE
        ids = first_id + jnp.arange(tiles.TILE, dtype=jnp.int32)
        best = tiles.first(self.holds(ids) & (self.at(row, ids) == peak))
        return PartStats(peak, jnp.where(peak > -jnp.inf, total, 0.0), first_id + best)

    def statistics_by(
        self, read_rows: Any, rows: jax.Array, wanted: jax.Array, requests: Request
    ) -> PartStats:
        """Statistics of rows ``[B, P]`` of B requests, by a kernel; -inf where not `wanted`."""
        peak, total, best = read_rows(
            self.matrix,
            jnp.clip(rows, 0, self.matrix.shape[0] - 1).reshape(-1),
            requests.inv_temperature,
            requests.greedy,
            wanted.reshape(-1),
            self.first_id,
            size=self.size,
        )
        peak = jnp.where(jnp.isnan(peak), jnp.inf, peak)
        parts = (x.reshape(rows.shape) for x in (peak, total, self.first_id + best))
        return PartStats(*parts)


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a request's last token is drawn from, as far as this part holds it.

    Attributes:
      source: target and draft row, and what normalizes them.
      target: target logits.
      draft: the draft storage, or None where no request has any.
      draft_rows: what its entries mean.
    """

    source: Source
    target: RowPart
    draft: RowPart | None
    draft_rows: DraftRows | None

    def at(self, ids: jax.Array) -> jax.Array:
        """``[2, n]``: weights of ids, and their ``p``; 0 for those of other parts."""
        row, draft_row = self.source.row, self.source.draft_row
        q_entries = None if self.draft is None else self.draft.at(draft_row, ids)
        both = jnp.stack(self._of(ids, self.target.at(row, ids), q_entries))
        return jnp.where(self.target.holds(ids), both, 0.0)

    def mass(self, tile: jax.Array) -> jax.Array:
        """``[2]``: their sums over a tile, in one read of as much as the part holds of it."""
        row, draft_row, target = self.source.row, self.source.draft_row, self.target
        length = min(tiles.TILE, target.width)
        start = jnp.clip(tile * tiles.TILE - target.first_id, 0, target.width - length)
        ids = target.first_id + start + jnp.arange(length, dtype=jnp.int32)
        q_entries = None if self.draft is None else self.draft.read(draft_row, start, length)
        both = self._of(ids, target.read(row, start, length), q_entries)
        return jnp.stack([jnp.sum(jnp.where(ids // tiles.TILE == tile, x, 0.0)) for x in both])

    def _of(
        self, ids: jax.Array, p_entries: jax.Array, q_entries: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        source, inv = self.source, self.source.inv_temperature
        p = source.stats.scale(inv).probs(p_entries, inv)
        weights = jnp.where(source.without_token & (ids == source.token_id), 0.0, p)
        if self.draft_rows is not None and q_entries is not None:
            q = self.draft_rows.probs(q_entries, source.scale, inv)
            weights = jnp.where(source.from_residual, block.residual(source.weight, p, q), weights)
        return weights, p


def tile_masses(weights: Weights, num_parts: int) -> jax.Array:
    """Sums of this part's weights, and of its ``p``, by tile.

    Args:
      weights: of the chosen row.
      num_parts: parts of the vocabulary.

    Returns:
      ``[2, n]`` float32: the tiles, counted from id 0, from the one that the part begins in. What
      other parts hold of them is not included.
    """
    count = tiles.tiles_of_part(weights.target.width, num_parts)
    first = weights.target.first_id // tiles.TILE
    return jax.vmap(weights.mass, out_axes=1)(first + jnp.arange(count, dtype=jnp.int32))
