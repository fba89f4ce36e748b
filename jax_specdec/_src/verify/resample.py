"""Phase 3 on XLA: recovered and bonus tokens, by a two-level inverse CDF.

`Weights.masses` sums tiles, `choose` picks one, `draw` a token inside it; rows may lie in parts on
devices.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.blocks import entry_of
from jax_specdec._src.types import DraftProbs
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.draft_rows import CandidateRows, DraftRows, DraftScale, MappedRows
from jax_specdec._src.verify.exchange import Exchange
from jax_specdec._src.verify.rows import Rows, as_they_are, by_tile

_FEW = 256
"""Weights of which a sum for each costs less than a cumulative sum."""


class Source(NamedTuple):
    """What one request's last token is drawn from.

    Attributes:
      row: ``[]`` int32, target row; -1 where no token is drawn.
      draft_row: ``[]`` int32, draft row, if the residual needs it.
      token_id: ``[]`` int32, the rejected draft.
      scale: normalizer of the target row.
      threshold: ``[]`` float32, entries of the target row below it count as -inf; None for none.
      p_masses: ``[T]`` float32, the sums of ``p`` by tile, of this part; None where not at hand.
      draft_scale: normalizer of the draft row.
      weight: ``[]`` float32, joint weight of the drafts before; 1 but in block verification.
      from_residual: ``[]`` bool, weights ``(weight * p - q)+``.
      without_token: ``[]`` bool, weights ``p`` with `token_id` removed: a rejected one-hot draft.
      inv_temperature: ``[]`` float32.
    """

    row: jax.Array
    draft_row: jax.Array
    token_id: jax.Array
    scale: tiles.Scale
    threshold: jax.Array | None
    p_masses: jax.Array | None
    draft_scale: DraftScale
    weight: jax.Array
    from_residual: jax.Array
    without_token: jax.Array
    inv_temperature: jax.Array


@dataclasses.dataclass(frozen=True)
class Weights:
    """What tokens are drawn by, for a batch of sources, as far as it lies on this device.

    Attributes:
      target: target rows, or this device's part of them.
      draft: draft rows, whole or in parts likewise; None where every request is one-hot.
      num_parts: parts of the vocabulary.
    """

    target: Rows
    draft: DraftRows | None = None
    num_parts: int = 1

    @property
    def num_tiles(self) -> int:
        """Tiles that this part lies in, at most, counted from the one that it begins in."""
        return tiles.tiles_of_part(self.target.width, self.num_parts)

    @property
    def first_tile(self) -> jax.Array:
        """``[]`` int32."""
        return self.target.first // tiles.TILE

    def masses(self, source: Source) -> jax.Array:
        """Of sources ``[n]``: ``[n, 2, num_tiles]``, the sums of weights, and of ``p``, by tile."""
        p_masses, draft = source.p_masses, self.draft
        candidates = draft.rows if draft and isinstance(draft.rows, CandidateRows) else None
        if p_masses is None and candidates is None:
            return jnp.stack(self._sums(source), axis=1)
        if p_masses is None:
            _, p_masses = dataclasses.replace(self, draft=None)._sums(source)
        if draft is not None and candidates is None:
            (masses,) = self._sums(source)
        else:
            masses = self._without_token(source, p_masses)
        if candidates is not None:
            residual = self._without_candidates(source, p_masses, candidates)
            masses = jnp.where(source.from_residual[:, None], residual, masses)
        return jnp.stack([masses, p_masses], axis=1)

    def _sums(self, source: Source) -> list[jax.Array]:
        """Sums of weights by tile, and of ``p`` if not at hand, in one read of the rows."""
        entries = [(self.target.whole(source.row), self.target.fill)]
        mapped = None
        if self.draft is not None and isinstance(self.draft.rows, MappedRows):
            mapped = self.draft.rows
            columns = mapped.columns_of(self.target.first, self.target.width)
            entries.append((columns[None], mapped.unlisted))
        elif self.draft is not None:
            entries.append((self._draft_part(source.draft_row), self.draft.rows.fill))
        ids = self.first_tile * tiles.TILE + jnp.arange(tiles.TILE, dtype=jnp.int32)

        def sums(first: int, *entries: jax.Array) -> jax.Array:
            """Of tiles ``[n, t, L]`` from the first on."""
            count, length = entries[0].shape[1:]
            tile = first + jnp.arange(count, dtype=jnp.int32)
            of_tiles = (ids[None, :length] + tile[:, None] * tiles.TILE)[None]
            if mapped is not None:  # by tile, which XLA fuses; rows that are cut up it writes first
                p_entries, columns = entries
                rows = source.draft_row[:, None, None]
                entries = p_entries, mapped.entries.at(rows, columns)
            found = [jnp.sum(self._of(source, of_tiles, *entries)[0], axis=2)]
            if source.p_masses is None:
                # Computed apart, p is written nowhere: XLA writes to memory what two sums share.
                _, p = self._of(as_they_are(source), of_tiles, *entries)
                found.append(jnp.sum(p, axis=2))
            return jnp.stack(as_they_are(found))

        return list(by_tile(sums, entries, self.num_tiles, self.target.cut_by))

    def _without_token(self, source: Source, p_masses: jax.Array) -> jax.Array:
        """`p_masses` without the token of a rejected one-hot draft: its tile is summed again."""
        tile = source.token_id // tiles.TILE
        _, inside = dataclasses.replace(self, draft=None).inside(source, tile)
        index = self.first_tile + jnp.arange(self.num_tiles, dtype=jnp.int32)[None, :]
        is_its = source.without_token[:, None] & (index == tile[:, None])
        return jnp.where(is_its, jnp.sum(inside[:, 0], axis=1)[:, None], p_masses)

    def _without_candidates(
        self, source: Source, p_masses: jax.Array, candidates: CandidateRows
    ) -> jax.Array:
        """Residual masses where few ids have a q, which takes away ``sum(min(weight * p, q))``.

        A difference of sums rounds in proportion to the row: `pick_and_draw` passes over tiles
        that have mass by rounding alone.
        """
        ids, q_entries = candidates.listed(source.draft_row)
        p_entries = self.target.at(source.row[:, None], ids)
        left, p = self._of(source, ids, p_entries, q_entries)
        taken = source.weight[:, None] * p - left
        tile = self.first_tile + jnp.arange(self.num_tiles, dtype=jnp.int32)
        is_inside = (ids // tiles.TILE)[:, None, :] == tile[None, :, None]
        taken = jnp.sum(jnp.where(is_inside, taken[:, None, :], 0.0), axis=2)
        return jnp.maximum(source.weight[:, None] * p_masses - taken, 0.0)

    def inside(self, source: Source, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of tiles ``[n]``: ids ``[n, L]`` that are here, and ``[n, 2, L]`` weights and ``p``."""
        target, length = self.target, min(tiles.TILE, self.target.width)
        first = jnp.clip(tile * tiles.TILE, target.first, target.first + target.width - length)
        ids = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        q_entries = None
        if self.draft is not None:
            q_entries = self.draft.rows.slices(source.draft_row, first, length)
        both = self._of(source, ids, target.slices(source.row, first, length), q_entries)
        is_inside = ids // tiles.TILE == tile[:, None]
        return ids, jnp.where(is_inside[:, None], jnp.stack(both, axis=1), 0.0)

    def race(self, source: Source, exponential: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`draw` by a race of Exp(1) noise ``[n, V]``, over a vocabulary that is not split."""
        width = self.target.width
        q_entries = None
        if self.draft is not None:
            entries = self.draft.rows
            q_entries = entries.whole(source.draft_row)
            missing = ((0, 0), (0, width - q_entries.shape[1]))
            q_entries = jnp.pad(q_entries, missing, constant_values=entries.fill)
        ids = jnp.arange(width, dtype=jnp.int32)[None, :]
        weights, p = self._of(source, ids, self.target.whole(source.row), q_entries)
        total = jnp.sum(weights, axis=1)
        bad_draft = source.from_residual & (jnp.isnan(total) | source.draft_scale.bad)
        weights = jnp.where((total > 0)[:, None], weights, p)
        score = jnp.where(weights > 0, weights / exponential[:, :width], -1.0)
        return jnp.argmax(score, axis=1).astype(jnp.int32), bad_draft

    def _draft_part(self, rows: jax.Array) -> jax.Array:
        """Entries of draft rows, of the ids of this part."""
        assert self.draft is not None
        entries, target = self.draft.rows, self.target
        if target.first_id is None or entries.first_id is not None:
            return entries.whole(rows)
        first = jnp.broadcast_to(target.first_id, rows.shape)
        return entries.slices(rows, first, target.width)

    def _of(
        self,
        source: Source,
        ids: jax.Array,
        p_entries: jax.Array,
        q_entries: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Weights of entries ``[n, ...]`` whose ids are `ids`, and their ``p``."""
        dims = (1,) * (p_entries.ndim - 1)
        source = jax.tree.map(lambda x: x.reshape(-1, *dims), source)
        inv = source.inv_temperature
        p = source.scale.probs(tiles.keep(p_entries, source.threshold), inv)
        is_removed = source.without_token & (ids == source.token_id)
        if self.draft is None or q_entries is None:
            return jnp.where(is_removed, 0.0, p), p
        q = self.draft.probs(q_entries, source.draft_scale, inv)
        if isinstance(self.draft.distribution, DraftProbs):
            q = jnp.where(q >= 0, q, jnp.nan)
        # `rules.residual` in one formula for all sources, of which each exponential is used once:
        # XLA may write to memory what is used twice.
        q = jnp.where(source.from_residual, q, jnp.where(is_removed, 2.0, 0.0))
        left = jnp.where(source.from_residual, source.weight, 1.0) * p - q
        return jnp.where(left > -jnp.inf, jnp.maximum(left, 0.0), jnp.nan), p


class Chosen(NamedTuple):
    """Where in the vocabulary tokens are drawn, ``[n]`` each.

    Attributes:
      tile: int32, counted from id 0.
      part: int32, which part of the vocabulary holds the token.
      uniform: float32, the uniform for the token inside the tile, as far as that part has it.
      has_mass: bool; if not, no weight is left, and the token is drawn from ``p``.
      bad_draft: bool, whether the draft row is none.
    """

    tile: jax.Array
    part: jax.Array
    uniform: jax.Array
    has_mass: jax.Array
    bad_draft: jax.Array


def choose(
    source: Source, masses: jax.Array, recover: jax.Array, width: int, num_tiles: int
) -> Chosen:
    """Choose the tile of each source, and the part of the vocabulary that its token is in.

    Args:
      source: what to draw from, ``[n]``.
      masses: ``[num_parts, n, 2, num_tiles]``, of every part.
      recover: ``[n, 2]`` uniforms for tile and token.
      width: ids of a part.
      num_tiles: tiles that a part lies in, at most.
    """
    num_parts, n = masses.shape[:2]
    pieces = pieces_of_tiles(width, num_parts, num_tiles)
    flat = jnp.moveaxis(masses, 0, 2).reshape(n, 2, -1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, 1))) if num_parts > 1 else flat
    by_tile = jnp.sum(flat[:, :, pieces], axis=3) if num_parts > 1 else flat
    u = recover[:, 1]
    tile, total = pick_each(by_tile, recover[:, 0])
    has_mass = total[:, 0] > 0
    bad_draft = source.from_residual & (jnp.isnan(total[:, 0]) | source.draft_scale.bad)
    chosen = jnp.where(has_mass, tile[:, 0], tile[:, 1])
    part = jnp.zeros_like(chosen)
    if num_parts > 1:
        of_tile = jnp.asarray(pieces)[chosen]
        flat = jnp.where(has_mass[:, None], flat[:, 0], flat[:, 1])
        held = jnp.take_along_axis(flat, of_tile, axis=1)
        piece = pick_each(held[:, None], u)[0][:, 0]
        own, sums = (entry_of(x, piece) for x in (held, jnp.cumsum(held, axis=1)))
        part = entry_of(of_tile, piece) // num_tiles
        # How far into the piece: 0 to 1.
        inside = u * jnp.sum(held, axis=1) - (sums - own)
        u = u if pieces.shape[1] == 1 else jnp.clip(inside / own, 0.0, 1.0)
    return Chosen(chosen, part, u, has_mass, bad_draft)


def pick_and_draw(
    weights: Weights,
    source: Source,
    masses: jax.Array,
    recover: jax.Array,
    exchange: Exchange,
) -> tuple[jax.Array, jax.Array]:
    """A token of each source, and whether its draft row is none, ``[n]`` each.

    Args:
      weights: what tokens are drawn by.
      source: what to draw from, ``[n]``.
      masses: ``[num_parts, n, 2, num_tiles]``, of every part.
      recover: ``[n, 2]`` uniforms for tile and token.
      exchange: over the parts.
    """
    width, num_tiles = weights.target.width, weights.num_tiles
    chosen = choose(source, masses, recover, width, num_tiles)
    if weights.draft is None or not isinstance(weights.draft.rows, CandidateRows):
        return draw(weights, source, chosen, exchange)[0], chosen.bad_draft

    # A tile may have mass by rounding alone, which is rare: then the token is drawn from the tile
    # of the largest mass among the others. From both at once: a GPU's loop waits for the host.
    first = jnp.arange(masses.shape[0], dtype=jnp.int32) * width // tiles.TILE
    tile = (first[:, None] + jnp.arange(num_tiles, dtype=jnp.int32)[None, :])[:, None, :]
    others = jnp.where(tile == chosen.tile[None, :, None], 0.0, masses[:, :, 0])
    largest = jnp.max(others, axis=(0, 2), keepdims=True)
    of_largest = jnp.max(jnp.where(others == largest, tile, -1), axis=(0, 2), keepdims=True)
    others = masses.at[:, :, 0].set(jnp.where(tile == of_largest, others, 0.0))
    instead = choose(source, others, recover, width, num_tiles)
    of_both = (source, chosen), (source, instead)
    source_twice, both = jax.tree.map(lambda *x: jnp.concatenate(x), *of_both)
    token_ids, is_empty = draw(weights, source_twice, both, exchange)
    (token_ids, another), (is_empty, _) = jnp.split(token_ids, 2), jnp.split(is_empty, 2)
    return jnp.where(is_empty & source.from_residual, another, token_ids), chosen.bad_draft


def draw(
    weights: Weights, source: Source, chosen: Chosen, exchange: Exchange
) -> tuple[jax.Array, jax.Array]:
    """The token of each source, drawn where it lies, and whether its tile has no weight.

    Returns:
      ``[n]`` int32 and ``[n]`` bool, known to all parts.
    """
    ids, inside = weights.inside(source, chosen.tile)
    place, total = pick_each(inside, chosen.uniform)
    # Rounding can leave a tile of tiny residual mass without a positive weight of its own.
    has_mass = chosen.has_mass & (total[:, 0] > 0)
    token_ids = ids[:, 0] + jnp.where(has_mass, place[:, 0], place[:, 1])
    is_empty = chosen.has_mass & ~(exchange.sum(total[:, 0]) > 0)
    if exchange.axis is None:
        return token_ids, is_empty
    return exchange.sum(jnp.where(chosen.part == exchange.part, token_ids, 0)), is_empty


def pieces_of_tiles(width: int, num_parts: int, num_tiles: int) -> np.ndarray:
    """Which masses are of which tile: ``[T, m]``, as indices into ``[num_parts * num_tiles]``.

    The parts of `width` ids each have `num_tiles` masses, from the tile that they begin in on. A
    tile that an edge between parts cuts has several; the others are filled up with
    ``num_parts * num_tiles``.
    """
    found: list[list[int]] = [[] for _ in range(tiles.num_tiles(width * num_parts))]
    for part, start in enumerate(range(0, num_parts * width, width)):
        first = start // tiles.TILE
        for tile in range(first, (start + width - 1) // tiles.TILE + 1):
            found[tile].append(part * num_tiles + tile - first)
    most = max(len(pieces) for pieces in found)
    filled = [pieces + [num_parts * num_tiles] * (most - len(pieces)) for pieces in found]
    return np.array(filled, np.int32)


def pick_each(weights: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places in weights ``[n, m, L]``, picked by uniforms ``[n]``, and totals, ``[n, m]`` each.

    Inverse CDF: the least place whose inclusive sum exceeds ``u * total``; never one of zero
    weight, but the last of positive weight where rounding finds none.
    """
    sums = _prefix_sums(weights)
    total = sums[:, :, -1]
    place = jnp.arange(weights.shape[2], dtype=jnp.int32)[None, None, :]
    size, positive = weights.shape[2], weights > 0
    hit = positive & (sums > (u[:, None] * total)[:, :, None])
    # The first hit; or else, counted from the end, the last of positive weight: one reduction.
    key = jnp.where(hit, place, jnp.where(positive, 2 * size - place, 2 * size))
    found = jnp.min(key, axis=2)
    return jnp.where(found < size, found, 2 * size - found), total


def _prefix_sums(weights: jax.Array) -> jax.Array:
    """Inclusive sums along the last axis; of few weights each by itself, one kernel on a GPU."""
    size = weights.shape[-1]
    if size > _FEW:
        return jnp.cumsum(weights, axis=-1)
    index = jnp.arange(size, dtype=jnp.int32)
    is_before = index[None, :] <= index[:, None]
    return jnp.sum(jnp.where(is_before, weights[..., None, :], 0.0), axis=-1)
