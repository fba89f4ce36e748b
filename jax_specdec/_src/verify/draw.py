"""Drawing tokens on XLA in two levels: a tile of the vocabulary by its mass, then an id inside it.

`LocalRows.masses` sums the weights of each tile. `draw`, of recovered and bonus tokens, picks the
tile by one uniform (`choose_tile`) and the id by another (`draw_in_tile`), each by inverse CDF.
`race_draw`, under the agreement rule, picks both by exponential races: two rows of nearly the same
weights nearly always have the same winner. Where the vocabulary is split, the masses of all parts
are known on every device, and the device that holds the token draws it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.blocks import any_under_vmap, entry_of, gathering
from jax_specdec._src.platform import Platform
from jax_specdec._src.types import DraftDistribution, DraftProbs
from jax_specdec._src.verify import rules, tiles
from jax_specdec._src.verify.draft_rows import CandidateRows, DraftRows, MappedRows
from jax_specdec._src.verify.form import Form
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rows import (
    Partials,
    Rows,
    TargetStatistics,
    argmax_of_parts,
)
from jax_specdec._src.verify.tiles import TILE

_FEW = 256
"""Up to so many weights, one sum for each costs less than a cumulative sum."""


class Kernels(Protocol):
    """Kernels that read rows in place of XLA. Where one gives None, XLA reads them."""

    def statistics(
        self, rows: LocalRows, requests: Request, positions: Position, samples: bool
    ) -> TargetStatistics:
        """Of the target rows of positions ``[B, P]``. If not `samples`, no sum is needed."""

    def draft_partials(
        self, rows: LocalRows, draft: DraftRows, requests: Request, index: jax.Array
    ) -> Partials | None:
        """Of the draft rows ``index [B, P]`` that are not negative."""
        return None

    def masses(self, rows: LocalRows, source: Position) -> jax.Array | None:
        """As `LocalRows.masses`."""
        return None

    def residual_masses(self, rows: LocalRows, source: Position) -> jax.Array | None:
        """As `LocalRows.residual_masses`."""
        return None

    def draw(
        self, rows: LocalRows, source: Position, masses: jax.Array, recover: jax.Array
    ) -> tuple[jax.Array, jax.Array] | None:
        """As `inverse_cdf_draw`."""
        return None


@dataclasses.dataclass(frozen=True)
class LocalRows:
    """Target and draft rows, as far as they are on this device, and the weights they give.

    Attributes:
      target: target rows, or this device's part of them.
      draft: draft rows, whole or in the same parts; None if every request is one-hot.
      form: how they are read.
      num_parts: parts that the vocabulary is split into.
      num_tiles: tiles that a part overlaps at most, counted from the one that it begins in.
      sums_kept: `num_tiles` if sums of target rows are kept by tile, else None.
      kernels: what reads them in place of XLA, or None.
    """

    target: Rows
    draft: DraftRows | None
    form: Form
    num_parts: int
    num_tiles: int
    sums_kept: int | None = None
    kernels: Kernels | None = None

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        distribution: DraftDistribution | None,
        token_bitmask: jax.Array | None,
        size: int,
        form: Form,
        kernels: Kernels | None = None,
    ) -> LocalRows:
        """The rows of a call.

        Args:
          target_logits: ``[M, V]``, or this device's columns of them.
          distribution: draft distributions, or None.
          token_bitmask: ``[M, ceil(V/32)]`` or None.
          size: ids from it on are padding.
          form: how rows are read.
          kernels: what reads them in place of XLA, or None.
        """
        target = Rows.of_logits(target_logits, size, token_bitmask, form)
        # Bits of a part, and on a TPU, are expensive to read repeatedly.
        on_tpu = form.platform == "tpu" and not form.in_order
        if on_tpu or (target.first_id is not None and kernels is None):
            target = target.masked()
        first_id = target.first_id if form.draft_is_split else None
        draft = None
        if distribution is not None:
            draft = DraftRows.of(distribution, size, form.platform, first_id)
        num_tiles = tiles_of_part(target.width, form.num_parts)
        kept = num_tiles if form.keeps_sums else None
        return cls(target, draft, form, form.num_parts, num_tiles, kept, kernels)

    @property
    def candidates(self) -> CandidateRows | None:
        """Draft rows, if each lists ids of its own."""
        rows = None if self.draft is None else self.draft.rows
        return rows if isinstance(rows, CandidateRows) else None

    @property
    def vocab_size(self) -> int:
        """V, padding included."""
        return self.target.matrix.shape[1] * self.num_parts

    @property
    def end(self) -> int:
        """All ids that are read are below it; the last of several parts has padding among them."""
        return self.target.width * self.num_parts

    def tile_ids(self) -> jax.Array:
        """``[num_tiles]`` int32, the tiles of this part, counted from id 0."""
        index = jnp.arange(self.num_tiles, dtype=jnp.int32)
        first = self.target.first_id
        return index if first is None else first // TILE + index

    def masses(self, source: Position, residual: jax.Array | None = None) -> jax.Array:
        """``[n, 2, num_tiles]`` of sources ``[n]``: sums of the weights, and of ``p``, by tile.

        `residual` is what `residual_masses` gives.
        """
        p_masses, candidates = source.p_masses, self.candidates
        reads_rows = residual is None and (p_masses is None or self.draft is not None)
        if candidates is None and reads_rows:
            sums = self._tile_sums(source)
            return jnp.stack(sums if p_masses is None else [*sums, p_masses], axis=1)
        if p_masses is None:
            p_masses = dataclasses.replace(self, draft=None).masses(source)[:, 1]
        masses = self._without_token(source, p_masses)
        if candidates is not None:
            residual = self._without_candidates(source, p_masses, candidates)
        if residual is not None:
            masses = jnp.where(source.uses_q[:, None], residual, masses)
        return jnp.stack([masses, p_masses], axis=1)

    def residual_masses(self, source: Position) -> jax.Array | None:
        """``[n, num_tiles]``, the masses of sources ``[n]`` that use q; None to sum them with p.

        On a TPU they are summed apart, and XLA reads the rows of no other source.
        """
        if self.draft is None or source.p_masses is None:
            return None
        found = None if self.kernels is None else self.kernels.residual_masses(self, source)
        if found is not None or not self.reads_tiles:
            return found
        of_q = source._replace(uses_q=jnp.ones_like(source.uses_q))
        return lax.cond(
            any_under_vmap(jnp.any(source.uses_q & (source.row >= 0))),
            lambda: self._tile_sums(of_q)[0],
            lambda: jnp.zeros((source.row.shape[0], self.num_tiles), jnp.float32),
        )

    @property
    def reads_tiles(self) -> bool:
        """Whether many rows are read by tiles of all rows, as a TPU reads them best."""
        target, draft = self.target, self.draft
        is_whole = target.first_id is None and target.token_bitmask is None
        has_ids = draft is None or (
            draft.rows is draft.storage and draft.storage.width == target.width
        )
        return self.form.platform == "tpu" and is_whole and has_ids

    def _tile_sums(self, source: Position) -> list[jax.Array]:
        """Sums of weights by tile, and of ``p`` if not known yet, in one read of the rows."""
        target, draft, mapped = self.target, self.draft, None
        if self.reads_tiles:
            tile_sums = tiles.each_tile(functools.partial(self._sums_of_tile, source), target.width)
            return [*jnp.moveaxis(tile_sums, 0, 2)]
        entries = [(target.whole(source.row), target.fill)]
        if draft is not None and isinstance(draft.rows, MappedRows):
            mapped = draft.rows
            columns = mapped.columns_of(target.first_id, target.width)
            entries.append((columns[None], mapped.unlisted))
        elif draft is not None and target.first_id is not None and draft.storage.first_id is None:
            first = jnp.broadcast_to(target.first_id, source.row.shape)
            part = draft.rows.slices(source.draft_row, first, target.width, self.end)
            entries.append((part, draft.storage.fill))
        elif draft is not None:
            entries.append((draft.rows.whole(source.draft_row), draft.storage.fill))
        place, tile_ids, found = jnp.arange(TILE, dtype=jnp.int32), self.tile_ids(), []
        for first_tile, xs in target.in_tiles(entries, self.num_tiles):
            _, count, length = xs[0].shape
            these = tile_ids[first_tile : first_tile + count, None]
            ids = (place[None, :length] + these * TILE)[None]
            if mapped is not None:  # looked up tile by tile: XLA fuses this, but not whole rows
                xs[1] = mapped.storage.at(source.draft_row[:, None, None], xs[1])
            found.append(lax.optimization_barrier(self._sums(source, ids, *xs)))
        return [jnp.concatenate(of_tiles, axis=1) for of_tiles in zip(*found, strict=True)]

    def _sums_of_tile(self, source: Position, start: Any, length: int) -> jax.Array:
        """``[1 or 2, n]``, the sums of columns that all rows have in vector memory."""
        ids = start + jnp.arange(length, dtype=jnp.int32)[None, :]
        entries = [self.target.columns(source.row, start, length).whole()]
        if self.draft is not None:
            entries.append(self.draft.storage.columns(source.draft_row, start, length).whole())
        return jnp.stack(self._sums(source, ids, *entries))

    def _sums(self, source: Position, ids: jax.Array, *entries: jax.Array) -> list[jax.Array]:
        """Sums of the weights of `ids`, and of ``p`` if not known, from entries ``[..., L]``."""
        sums = [jnp.sum(self._weights(source, ids, *entries)[0], axis=-1)]
        if source.p_masses is None:
            # XLA writes to memory what two sums share. Behind a barrier, p is computed twice.
            _, p = self._weights(lax.optimization_barrier(source), ids, *entries)
            sums.append(jnp.sum(p, axis=-1))
        return sums

    def _without_token(self, source: Position, p_masses: jax.Array) -> jax.Array:
        """`p_masses`, with the tile of a rejected one-hot draft summed again without the draft."""
        tile = source.token_id // TILE
        _, inside = dataclasses.replace(self, draft=None).in_tile(source, tile)
        is_its = source.is_one_hot[:, None] & (self.tile_ids()[None, :] == tile[:, None])
        return jnp.where(is_its, jnp.sum(inside[:, 0], axis=1)[:, None], p_masses)

    def _without_candidates(
        self, source: Position, p_masses: jax.Array, candidates: CandidateRows
    ) -> jax.Array:
        """Masses of the residual if few ids have a q: ``weight * p - sum(min(weight * p, q))``.

        A difference of sums has a rounding error in proportion to the row's mass: `draw` skips
        tiles whose mass is nothing else.
        """
        ids, q_entries = candidates.listed(source.draft_row)
        p_entries = self.target.at(source.row[:, None], ids)
        left, p = self._weights(source, ids, p_entries, q_entries)
        taken = source.weight[:, None] * p - left
        is_inside = (ids // TILE)[:, None, :] == self.tile_ids()[None, :, None]
        taken = jnp.sum(jnp.where(is_inside, taken[:, None, :], 0.0), axis=2)
        return jnp.maximum(source.weight[:, None] * p_masses - taken, 0.0)

    def in_tile(self, source: Position, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of tiles ``[n]``: the local ids ``[n, L]``, and ``[n, 2, L]`` their weights and ``p``."""
        target, width = self.target, self.target.width
        length, start = min(TILE, width), 0 if target.first_id is None else target.first_id
        first = jnp.clip(tile * TILE, start, start + width - length)
        ids = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        q_entries = None
        if self.draft is not None:
            q_entries = self.draft.rows.slices(source.draft_row, first, length, self.end)
        p_entries = target.slices(source.row, first, length, self.end)
        both = self._weights(source, ids, p_entries, q_entries)
        is_inside = ids // TILE == tile[:, None]
        return ids, jnp.where(is_inside[:, None], jnp.stack(both, axis=1), 0.0)

    def race(self, source: Position, exponential: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw by an exponential race instead, from a vocabulary that is not split.

        Args:
          source: what to draw from, ``[n]``.
          exponential: ``[n, V]`` float32 Exp(1) noise.

        Returns:
          As `draw`.
        """
        width = self.target.width
        q_entries = None
        if self.draft is not None:
            q_entries = self.draft.rows.whole(source.draft_row)
            missing = ((0, 0), (0, width - q_entries.shape[1]))
            q_entries = jnp.pad(q_entries, missing, constant_values=self.draft.storage.fill)
        ids = jnp.arange(width, dtype=jnp.int32)[None, :]
        weights, p = self._weights(source, ids, self.target.whole(source.row), q_entries)
        total = jnp.sum(weights, axis=1)
        bad_draft = source.uses_q & (jnp.isnan(total) | source.draft_scale.bad)
        weights = jnp.where((total > 0)[:, None], weights, p)
        return winner(weights, exponential[:, :width])[0], bad_draft

    def _weights(
        self,
        source: Position,
        ids: jax.Array,
        p_entries: jax.Array,
        q_entries: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Weights and ``p`` of `ids`, from entries ``[n, ...]`` of the target and draft rows."""
        known = source._replace(p_masses=None, argmax=None)  # type: ignore[arg-type]
        dims = range(1, p_entries.ndim)
        source = jax.tree.map(lambda x: lax.expand_dims(x, dims), known)
        inv, draft = source.inv_temperature, self.draft
        if source.threshold is not None:
            p_entries = jnp.where(p_entries < source.threshold, -jnp.inf, p_entries)
        p = source.scale.probs(p_entries, inv)
        is_removed = source.is_one_hot & (ids == source.token_id)
        if draft is None or q_entries is None:
            return jnp.where(is_removed, 0.0, p), p
        q = draft.probs(q_entries, source.draft_scale, inv)
        if isinstance(draft.distribution, DraftProbs):
            q = jnp.where(q >= 0, q, jnp.nan)
        # One formula for every source: q = 2 removes a token, as no p exceeds it.
        q = jnp.where(source.uses_q, q, jnp.where(is_removed, 2.0, 0.0))
        return rules.residual(jnp.where(source.uses_q, source.weight, 1.0), p, q), p


class ChosenTile(NamedTuple):
    """Where in the vocabulary a token is drawn. Batched, ``[n]``.

    Attributes:
      tile: int32, counted from id 0.
      part: int32, the part of the vocabulary that holds the token.
      uniform: float32, the uniform that picks the token inside the tile, rescaled to the piece of
        the tile that the part holds.
      has_mass: bool; if false, no weight is left and the token is drawn from ``p``.
      bad_draft: bool, whether the draft row is bad.
    """

    tile: jax.Array
    part: jax.Array
    uniform: jax.Array
    has_mass: jax.Array
    bad_draft: jax.Array


def tile_masses(rows: LocalRows, source: Position, residual: jax.Array | None = None) -> jax.Array:
    """``[num_parts, n, 2, num_tiles]``: `LocalRows.masses` of sources ``[n]``, of every part.

    `residual` is what `LocalRows.residual_masses` gives, if it is known.
    """
    found = None if rows.kernels is None else rows.kernels.masses(rows, source)
    if found is None:
        residual = rows.residual_masses(source) if residual is None else residual
        given = (source,) if residual is None else (source, residual)
        if rows.reads_tiles:
            found = rows.masses(*given)
        else:
            found = gathering(rows.masses, rows.form.platform, source.row, *given)
    return rows.form.gather(found)


def masses_of_positions(rows: LocalRows, positions: Position) -> jax.Array:
    """``[num_parts, B, P, 2, num_tiles]``: `tile_masses` at positions ``[B, P]``."""
    p_masses, (read, is_cut) = positions.p_masses, _proposed(positions)
    masses = tile_masses(rows, jax.tree.map(lambda x: lax.collapse(x, 0, 2), read))
    masses = masses.reshape(masses.shape[0], *read.row.shape, *masses.shape[2:])
    if p_masses is None or not is_cut:
        return masses
    last = jnp.stack([p_masses[None, :, -1:]] * 2, axis=3)
    return jnp.concatenate([masses, last], axis=2)


def residual_of_positions(rows: LocalRows, positions: Position) -> jax.Array | None:
    """``[B, P, num_tiles]``: `LocalRows.residual_masses` at positions ``[B, P]``; on TPUs alone."""
    if rows.form.platform != "tpu":
        return None
    read, is_cut = _proposed(positions)
    found = rows.residual_masses(jax.tree.map(lambda x: lax.collapse(x, 0, 2), read))
    if found is None:
        return None
    return jnp.pad(found.reshape(*read.row.shape, -1), ((0, 0), (0, int(is_cut)), (0, 0)))


def _proposed(positions: Position) -> tuple[Position, bool]:
    """Positions ``[B, P]`` without the last of several, if there ``p`` is known; whether it is cut.

    Nothing is proposed at it, so its weights are ``p``.
    """
    is_cut = positions.p_masses is not None and positions.row.shape[1] > 1
    return jax.tree.map(lambda x: x[:, :-1], positions) if is_cut else positions, is_cut


def draw(
    rows: LocalRows,
    requests: Request,
    last: Position,
    masses: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw the last token of each request.

    Args:
      rows: the rows on this device.
      requests: ``[B]``.
      last: ``[B]``, the positions to draw from.
      masses: their `tile_masses`, if they are known.
      residual: their `LocalRows.residual_masses`, if these alone are known.

    Returns:
      ``[B]`` int32 tokens, and ``[B]`` bool, whether the draft row is bad.
    """
    if requests.exponential is not None:
        drawn, bad_draft = rows.race(last, requests.exponential)
    else:
        assert requests.recover is not None
        if masses is None:
            masses = tile_masses(rows, last, residual)
        given, found = (rows, last, masses, requests.recover), None
        if rows.kernels is not None:
            found = rows.kernels.draw(*given)
        drawn, bad_draft = inverse_cdf_draw(*given) if found is None else found
    return jnp.where(requests.greedy, last.argmax, drawn), bad_draft & ~requests.greedy


def inverse_cdf_draw(
    rows: LocalRows, source: Position, masses: jax.Array, recover: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`draw` on XLA, of sources ``[n]`` whose masses are known, by uniforms ``[n, 2]``."""
    width, num_tiles = rows.target.width, rows.num_tiles
    chosen = choose_tile(rows, source, masses, recover)
    if rows.candidates is None:
        return draw_in_tile(rows, source, chosen)[0], chosen.bad_draft

    # The mass of a tile may be a rounding error, though rarely. Then the token is drawn from the
    # largest of the other tiles. Both draws are made at once: a loop on a GPU waits for the host.
    first = jnp.arange(masses.shape[0], dtype=jnp.int32) * width // TILE
    tile = (first[:, None] + jnp.arange(num_tiles, dtype=jnp.int32)[None, :])[:, None, :]
    others = jnp.where(tile == chosen.tile[None, :, None], 0.0, masses[:, :, 0])
    largest = jnp.max(others, axis=(0, 2), keepdims=True)
    of_largest = jnp.max(jnp.where(others == largest, tile, -1), axis=(0, 2), keepdims=True)
    others = masses.at[:, :, 0].set(jnp.where(tile == of_largest, others, 0.0))
    instead = choose_tile(rows, source, others, recover)
    of_both = (source, chosen), (source, instead)
    source_twice, both = jax.tree.map(lambda *x: jnp.concatenate(x), *of_both)
    token_ids, is_empty = draw_in_tile(rows, source_twice, both)
    (token_ids, another), (is_empty, _) = jnp.split(token_ids, 2), jnp.split(is_empty, 2)
    return jnp.where(is_empty & source.uses_q, another, token_ids), chosen.bad_draft


def choose_tile(
    rows: LocalRows, source: Position, masses: jax.Array, recover: jax.Array
) -> ChosenTile:
    """Choose a tile for each source, and the part of the vocabulary that holds the token.

    Args:
      rows: the rows on this device.
      source: what to draw from, ``[n]``.
      masses: ``[num_parts, n, 2, num_tiles]``, of every part.
      recover: ``[n, 2]`` uniforms for tile and token.
    """
    width, num_tiles, platform = rows.target.width, rows.num_tiles, rows.form.platform
    num_parts, n = masses.shape[:2]
    u, by_tile = recover[:, 1], masses[0]
    if num_parts > 1:
        pieces, flat = pieces_of_tiles(width, num_parts, num_tiles), of_all_parts(masses)
        by_tile = jnp.sum(flat[:, :, pieces], axis=3)
    chosen, total = first_of_both(by_tile, recover[:, 0], platform)
    has_mass = total > 0
    bad_draft = source.uses_q & (jnp.isnan(total) | source.draft_scale.bad)
    part = jnp.zeros_like(chosen)
    if num_parts > 1:
        of_tile = jnp.asarray(pieces)[chosen]
        flat = jnp.where(has_mass[:, None], flat[:, 0], flat[:, 1])
        held = jnp.take_along_axis(flat, of_tile, axis=1)
        piece = inverse_cdf(held[:, None], u, platform)[0][:, 0]
        own, sums = entry_of((held, jnp.cumsum(held, axis=1)), piece)
        part = entry_of(of_tile, piece) // num_tiles
        # How far into the piece, from 0 to 1.
        inside = u * jnp.sum(held, axis=1) - (sums - own)
        u = u if pieces.shape[1] == 1 else jnp.clip(inside / own, 0.0, 1.0)
    return ChosenTile(chosen, part, u, has_mass, bad_draft)


def draw_in_tile(
    rows: LocalRows, source: Position, chosen: ChosenTile
) -> tuple[jax.Array, jax.Array]:
    """Draw a token inside each chosen tile.

    Returns:
      ``[n]`` int32 tokens, and ``[n]`` bool, whether the tile turned out to have no weight. Both
      are known to all parts.
    """
    form, (ids, inside) = rows.form, rows.in_tile(source, chosen.tile)
    # Rounding can leave a tile of tiny residual mass without a positive weight of its own.
    place, total = first_of_both(inside, chosen.uniform, form.platform, chosen.has_mass)
    token_ids = ids[:, 0] + place
    if form.axis is None:
        return token_ids, chosen.has_mass & ~(total > 0)
    is_empty = chosen.has_mass & ~(form.sum(total) > 0)
    return form.sum(jnp.where(chosen.part == form.part, token_ids, 0)), is_empty


def of_all_parts(masses: jax.Array) -> jax.Array:
    """``[num_parts, ..., num_tiles]`` as ``[..., num_parts * num_tiles + 1]``; the last is 0."""
    flat = jnp.moveaxis(masses, 0, -2).reshape(*masses.shape[1:-1], -1)
    return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, 1)])


def tiles_of_part(width: int, num_parts: int) -> int:
    """The most tiles that any part of `width` ids overlaps; its first and last may be shared."""
    starts = range(0, num_parts * width, width)
    return max([(start + width - 1) // TILE - start // TILE + 1 for start in starts])


def pieces_of_tiles(width: int, num_parts: int, num_tiles: int) -> np.ndarray:
    """Which masses belong to which tile: ``[T, m]`` indices into ``[num_parts * num_tiles]``.

    Each part of `width` ids has `num_tiles` masses, beginning with the tile that it begins in. A
    tile that an edge between parts cuts has a piece in several parts. Tiles with fewer than m
    pieces are filled up with the index ``num_parts * num_tiles``.
    """
    found: list[list[int]] = [[] for _ in range(tiles.num_tiles(width * num_parts))]
    for part, start in enumerate(range(0, num_parts * width, width)):
        first = start // TILE
        for tile in range(first, (start + width - 1) // TILE + 1):
            found[tile].append(part * num_tiles + tile - first)
    most = max([len(pieces) for pieces in found])
    filled = [pieces + [num_parts * num_tiles] * (most - len(pieces)) for pieces in found]
    return np.array(filled, np.int32)


def race_draw(
    rows: LocalRows, source: Position, masses: jax.Array, exponential: jax.Array
) -> jax.Array:
    """Draw from ``p`` by two exponential races: of tiles, then of the ids of the winner.

    Args:
      rows: the rows on this device.
      source: what to draw from, ``[n]``.
      masses: ``[num_parts, n, num_tiles]``, sums of ``p`` of every part.
      exponential: ``[n, T+L]`` float32 Exp(1) noise, as in `RaceNoise`.

    Returns:
      ``[n]`` int32 tokens, known to all parts.
    """
    by_tile, width, form = masses[0], rows.target.width, rows.form
    if rows.num_parts > 1:
        pieces = pieces_of_tiles(width, rows.num_parts, rows.num_tiles)
        by_tile = jnp.sum(of_all_parts(masses)[:, pieces], axis=2)
    tile, _ = winner(by_tile, exponential[:, : by_tile.shape[1]])
    ids, inside = rows.in_tile(source, tile)
    # The noise of an id is that of its place in the tile; `ids` need not begin with the first.
    of_ids = exponential[:, tiles.num_tiles(rows.vocab_size) :]
    twice = Rows(jnp.tile(of_ids, 2), 2 * of_ids.shape[1], 0.0, form.platform)
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    of_ids = twice.slices(index, ids[:, 0] % TILE, ids.shape[1], twice.size)
    place, score = winner(inside[:, 1], of_ids)
    return argmax_of_parts(*form.gather((score, ids[:, 0] + place)))


def winner(weights: jax.Array, exponential: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The place and the score ``[n]`` of the largest ``weight / exponential`` of ``[n, L]``.

    Ties go to the lowest place. A weight of zero never wins, unless all are.
    """
    score = jnp.where(weights > 0, weights / exponential, -1.0)
    best, place = jnp.max(score, axis=1), lax.broadcasted_iota(jnp.int32, score.shape, 1)
    # Two plain reductions: on a CPU, an argmax takes four times as long.
    is_best = ~(score < best[:, None])
    return jnp.min(jnp.where(is_best, place, score.shape[1]), axis=1), best


def first_of_both(
    both: jax.Array, u: jax.Array, platform: Platform, may_have_mass: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """`inverse_cdf` of the first of two rows of weights, or of the second if it has no mass.

    Args:
      both: ``[n, 2, L]``.
      u: ``[n]`` uniforms.
      platform: that the program is for.
      may_have_mass: ``[n]`` bool, if False the second is drawn from; None for all True.

    Returns:
      The places ``[n]``, and the totals ``[n]`` of the first.
    """

    def has_mass(total: jax.Array) -> jax.Array:
        return total > 0 if may_have_mass is None else may_have_mass & (total > 0)

    if platform != "tpu":  # fewer operations
        place, totals = inverse_cdf(both, u, platform)
        total = totals[:, 0]
        return jnp.where(has_mass(total), place[:, 0], place[:, 1]), total
    total = jnp.sum(both[:, 0], axis=1)
    weights = jnp.where(has_mass(total)[:, None], both[:, 0], both[:, 1])
    return inverse_cdf(weights[:, None], u, platform)[0][:, 0], total


def inverse_cdf(
    weights: jax.Array, u: jax.Array, platform: Platform
) -> tuple[jax.Array, jax.Array]:
    """Pick from weights ``[n, m, L]`` by uniforms ``[n]``: places and totals, ``[n, m]`` each.

    The place picked is the least whose inclusive sum exceeds ``u * total``. It never has weight
    zero: if rounding leaves none, it is the last of positive weight.
    """
    index, size = jnp.arange(weights.shape[2], dtype=jnp.int32), weights.shape[2]
    if platform == "tpu":
        sums = _sums_by_matrix(weights)
    elif size > _FEW:
        sums = jnp.cumsum(weights, axis=-1)
    else:  # one kernel on a GPU
        is_before = index[None, :] <= index[:, None]
        sums = jnp.sum(jnp.where(is_before, weights[..., None, :], 0.0), axis=-1)
    total, place, positive = sums[:, :, -1], index[None, None, :], weights > 0
    hit = positive & (sums > (u[:, None] * total)[:, :, None])
    # One reduction finds the first hit, or else the last of positive weight, counted from the end.
    key = jnp.where(hit, place, jnp.where(positive, 2 * size - place, 2 * size))
    found = jnp.min(key, axis=2)
    return jnp.where(found < size, found, 2 * size - found), total


def _sums_by_matrix(x: jax.Array) -> jax.Array:
    """The cumulative sums of the last axis: of 128 entries by a triangular matrix, then of sums."""
    size, lanes = x.shape[-1], 128
    index = jnp.arange(lanes, dtype=jnp.int32)
    ones = (index[:, None] <= index[None, :]).astype(jnp.float32)
    missing = [(0, 0)] * (x.ndim - 1) + [(0, -size % lanes)]
    chunks = jnp.pad(x, missing).reshape(*x.shape[:-1], -1, lanes)
    inside = jnp.matmul(chunks, ones, precision=lax.Precision.HIGHEST)
    chunk = jnp.arange(chunks.shape[-2], dtype=jnp.int32)
    is_before = chunk[None, :] < chunk[:, None]
    before = jnp.sum(jnp.where(is_before, inside[..., None, :, -1], 0.0), axis=-1)
    return (inside + before[..., None]).reshape(*x.shape[:-1], -1)[..., :size]
