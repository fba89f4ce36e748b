"""`Source`: what a token is drawn from, and `LocalRows`, the rows that give its weights.

The weights of the ids at a source are

- ``(weight * p - q)+`` if `uses_q`: a rejected draft with a draft distribution;
- ``p``, and 0 for the draft, if the draft is one-hot;
- ``p`` if no draft was proposed: a bonus token;
- ``p`` too, for a rejected draft, if no id has any weight left: p and q differ by rounding alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import DraftDistribution
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.part import WHOLE, Part
from jax_specdec._src.verify.position import DraftScale, Position
from jax_specdec._src.verify.q import OneHot, Q, Stored, q_of
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rows import Rows
from jax_specdec._src.verify.tiles import TILE, Scale, tiles_of_part

if TYPE_CHECKING:  # backends read these
    from jax_specdec._src.verify.backends.base import Backend


class Source(NamedTuple):
    """What tokens are drawn from. The arrays have equal leading axes, ``[B, P]`` or ``[n]``.

    Attributes:
      row: int32, target row; `Source.of` gives -1 where nothing is drawn: no row need be read.
      draft_row: as of a `Position`, and so are the next ones.
      token_id: the draft, which is removed if it is one-hot.
      proposed: whether there is a draft.
      uses_q: whether the weights are the residual of a draft distribution.
      inv_temperature: float32.
      argmax: int32, the token of a greedy request.
      scale: normalizer of the target row.
      threshold: float32, target logits below it have no weight; None without a filter.
      p_masses: ``[..., T]`` float32, the mass of ``p`` in each tile of this device, if it is known.
      draft_scale: normalizer of the draft row.
      weight: float32, joint weight of the drafts before.
      residual_masses: ``[..., T]`` float32, the mass of the weights in each tile of this device, of
        sources that use q, if it is known.
    """

    row: jax.Array
    draft_row: jax.Array
    token_id: jax.Array
    proposed: jax.Array
    uses_q: jax.Array
    inv_temperature: jax.Array
    argmax: jax.Array
    scale: Scale
    threshold: jax.Array | None
    p_masses: jax.Array | None
    draft_scale: DraftScale
    weight: jax.Array
    residual_masses: jax.Array | None = None

    @classmethod
    def at(cls, positions: Position) -> Source:
        """Returns what positions are drawn from."""
        return cls(**{name: getattr(positions, name) for name in _OF_POSITION})

    @classmethod
    def of(cls, requests: Request, positions: Position) -> Source:
        """Returns the same of positions ``[B, P]``; `row` is -1 where no token can be drawn."""
        # Of a request that samples, a position that has a row and that a prefix can end at.
        may_draw = (requests.is_ok & ~requests.greedy)[:, None] & (positions.weight > 0)
        may_draw &= positions.offset < requests.num_rows[:, None]
        return cls.at(positions)._replace(row=jnp.where(may_draw, positions.row, -1))

    @property
    def is_one_hot(self) -> jax.Array:
        """Whether a draft was proposed without a draft distribution."""
        return self.proposed & ~self.uses_q

    def spread(self, axes: int) -> Source:
        """Returns it with so many axes more, to be used with entries ``[n, ...]`` of rows."""
        # Only what is used beside entries: masses and the argmax stay as they are.
        values = [getattr(self, name) for name in _OF_IDS]
        values = jax.tree.map(lambda x: lax.expand_dims(x, range(1, axes + 1)), values)
        return self._replace(**dict(zip(_OF_IDS, values, strict=True)))


_OF_POSITION = tuple(x for x in Source._fields if x != "residual_masses")
_OF_IDS = tuple(x for x in Source._fields if x not in ("argmax", "p_masses", "residual_masses"))


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """Target and draft rows, as far as they are on this device, and the weights they give.

    Attributes:
      target: target rows, or this device's part of them.
      q: draft distributions, whole or in the same parts.
      backend: reads them.
      num_tiles: tiles that a part overlaps at most, counted from the one that it begins in.
      keeps_sums: whether the sums of target rows are kept by tile.
    """

    target: Rows
    q: Q
    backend: Backend
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
        backend: Backend,
        part: Part = WHOLE,
        draft_is_split: bool = False,
        keeps_sums: bool = False,
    ) -> LocalRows:
        """Returns the rows of a call.

        Args:
          target_logits: ``[M, V]``, or this device's columns of them.
          distribution: draft distributions, or None.
          token_bitmask: ``[M, ceil(V/32)]`` or None.
          size: ids from it on are padding.
          backend: reads them.
          part: of the vocabulary, which the columns are.
          draft_is_split: whether draft rows are split in the same way.
          keeps_sums: whether the sums of target rows are kept by tile.
        """
        # The target's rows: padding, bits and other parts' ids are filled with -inf.
        logits = Rows(target_logits, size, -math.inf, backend, token_bitmask, None, part)
        target = backend.prepared(logits)
        q = q_of(distribution, size, backend, part if draft_is_split else WHOLE)
        num_tiles = tiles_of_part(target.width, part.num_parts)
        return cls(target, q, backend, num_tiles, keeps_sums)

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
