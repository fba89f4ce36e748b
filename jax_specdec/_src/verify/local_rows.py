"""`LocalRows`: the rows of a call that are on this device, and the weights that they give."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_specdec._src.base.types import DraftDistribution
from jax_specdec._src.rows import tiles
from jax_specdec._src.rows.device import Device
from jax_specdec._src.rows.part import WHOLE, Part
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.rows.tiles import TILE, tiles_of_part
from jax_specdec._src.verify.position import Source
from jax_specdec._src.verify.q import OneHot, Q, Stored, q_of


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """Target and draft rows, as far as they are on this device, and the weights they give.

    Attributes:
      target: target rows, or this device's part of them.
      q: draft distributions, whole or in the same parts.
      num_tiles: tiles that a part overlaps at most, counted from the one that it begins in.
      keeps_sums: whether the sums of target rows are kept by tile.
    """

    target: VocabRows
    q: Q
    num_tiles: int
    keeps_sums: bool = False

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        distribution: DraftDistribution | None,
        token_bitmask: jax.Array | None,
        *,
        size: int,
        device: Device,
        part: Part = WHOLE,
        draft_is_split: bool = False,
        keeps_sums: bool = False,
        applies_bitmask: bool = False,
    ) -> LocalRows:
        """Returns the rows of a call.

        Args:
          target_logits: ``[M, V]``, or this device's columns of them.
          distribution: draft distributions, or None.
          token_bitmask: ``[M, ceil(V/32)]`` or None.
          size: ids from it on are padding.
          device: that they are on.
          part: of the vocabulary, which the columns are.
          draft_is_split: whether draft rows are split in the same way.
          keeps_sums: whether the sums of target rows are kept by tile.
          applies_bitmask: whether a copy of the target rows is made with the bitmask.
        """
        # The target's rows: padding, bits and other parts' ids are filled with -inf.
        target = VocabRows(target_logits, size, -math.inf, device, token_bitmask, None, part)
        if applies_bitmask:
            target = target.masked()
        q = q_of(distribution, size, device, part if draft_is_split else WHOLE)
        num_tiles = tiles_of_part(target.width, part.num_parts)
        return cls(target, q, num_tiles, keeps_sums)

    @property
    def device(self) -> Device:
        """What the rows are on."""
        return self.target.device

    @property
    def part(self) -> Part:
        """Which part of the vocabulary the target rows are."""
        return self.target.part

    @property
    def draft_is_split(self) -> bool:
        """Whether draft rows are split as the target's are."""
        return isinstance(self.q, Stored) and self.q.storage.part.is_split

    @property
    def num_sums(self) -> int | None:
        """How many sums of a target row are kept; None for its total alone."""
        return self.num_tiles if self.keeps_sums else None

    @property
    def padded_vocab_size(self) -> int:
        """V, padding included: the columns of all parts."""
        return self.target.matrix.shape[1] * self.part.num_parts

    @property
    def end(self) -> int:
        """All ids that are read are below it; the last of several parts has padding among them."""
        return self.target.width * self.part.num_parts

    def alone(self) -> LocalRows:
        """Returns the target rows without draft distributions."""
        return dataclasses.replace(self, q=OneHot())

    def tile_ids(self) -> jax.Array:
        """Returns ``[num_tiles]`` int32, the tiles of this part, counted from id 0."""
        # A part begins inside of its first tile, unless the edge is between two.
        index = jnp.arange(self.num_tiles, dtype=jnp.int32)
        return self.part.first_id // TILE + index if self.part.is_split else index

    def weights(
        self, source: Source, ids: jax.Array, p_entries: jax.Array, *q_entries: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns weights and ``p`` of `ids`, from entries ``[n, ...]`` of their rows."""
        # [n, 1, ...]: the numbers of a source beside the entries of its rows
        source = source.spread(p_entries.ndim - 1)
        # The target's probability; 0 below the threshold.
        p_entries = tiles.kept(p_entries, source.threshold)
        p = source.scale.probs(p_entries, source.inv_temperature)
        # A rejected one-hot draft has no weight. q does the rest.
        is_removed = source.is_one_hot & (ids == source.token_id)
        return self.q.weights(source, p, is_removed, *q_entries), p

    def in_tile(self, source: Source, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns local ids ``[n, L]`` of tiles ``[n]``; ``[n, 2, L]`` their weights and ``p``."""
        # As many ids as a tile has, or all there are.
        width = self.target.width
        length = min(TILE, width)
        start = self.part.first_id
        # A tile that an edge cuts is read from within this part; other tiles' ids get weight 0.
        first = jnp.clip(tile * TILE, start, start + width - length)
        ids = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        q_entries = self.q.slices(source.draft_row, first, length, self.end)
        p_entries = self.target.slices(source.row, first, length, self.end)
        both = self.weights(source, ids, p_entries, *q_entries)
        # Ids before and after the tile have been read too where it is cut.
        is_inside = ids // TILE == tile[:, None]
        return ids, jnp.where(is_inside[:, None], jnp.stack(both, axis=1), 0.0)
