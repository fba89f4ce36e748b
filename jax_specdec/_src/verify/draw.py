"""Drawing tokens in two levels: a tile of the vocabulary by its mass, then an id inside it.

`inverse_cdf_draw`, of recovered and bonus tokens, picks the tile by one uniform (`choose_tile`) and
the id by another (`draw_in_tile`), each by inverse CDF. `race_draw`, of the agreement rule, picks
both by exponential races: two rows of nearly the same weights nearly always have the same winner.

Where the vocabulary is split, the masses of all parts are known on every device, and the device
that holds the token draws it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.rows import tiles
from jax_specdec._src.rows.blocks import entry_of
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.rows.tiles import TILE, pieces_of_tiles
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.position import Source
from jax_specdec._src.verify.q import Listed
from jax_specdec._src.verify.statistics import argmax_of_parts


class TileMasses(NamedTuple):
    """Masses of tiles: the sums of the weights of a source, and those of its ``p``.

    They are one array, so that one exchange has both, and one cumulative sum.

    Attributes:
      both: ``[num_parts, ..., 2, num_tiles]`` float32, of every part; weights first.
    """

    both: jax.Array

    @property
    def weights(self) -> jax.Array:
        """``[num_parts, ..., num_tiles]``, 0 in all tiles if there is nothing left to draw from."""
        return self.both[..., 0, :]

    def at(self, place: jax.Array) -> TileMasses:
        """Returns those of one position of each request, of all ``[num_parts, B, P, ...]``."""
        return TileMasses(jnp.stack(entry_of([*self.both], place)))


class Residuals(NamedTuple):
    """Positions with their residual masses, which the block rule takes of all of them.

    Attributes:
      sources: ``[B, P]``, perhaps with the masses that were summed.
      masses: ``[num_parts, B, P, 2, num_tiles]``; None if not all of them were summed.
      residual: ``[B, P]`` float32, the masses of whole rows where `uses_q`.
    """

    sources: Source
    masses: TileMasses | None
    residual: jax.Array

    def at(self, place: jax.Array) -> tuple[Source, TileMasses | None]:
        """Returns what one position of each request is drawn from."""
        masses = None if self.masses is None else self.masses.at(place)
        return lax.optimization_barrier(entry_of(self.sources, place)), masses


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


def inverse_cdf_draw(
    rows: LocalRows, source: Source, masses: TileMasses, recover: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws tokens by inverse CDF.

    Args:
      rows: the rows on this device.
      source: what to draw from, ``[n]``.
      masses: of its tiles.
      recover: ``[n, 2]`` uniforms for tile and token.

    Returns:
      ``[n]`` int32 tokens, and ``[n]`` bool, whether the draft row is bad.
    """
    chosen = choose_tile(rows, source, masses, recover)
    if not isinstance(rows.q, Listed):
        return draw_in_tile(rows, source, chosen)[0], chosen.bad_draft

    # With listed ids, masses are differences (see `Gather._without_listed`), and the mass of a tile
    # may be a rounding error, though rarely. Then the token is drawn from the largest of the other
    # tiles. Both draws are made at once: a loop on a GPU waits for the host.
    both = masses.both
    # [num_parts, 1, num_tiles]: the tile of each mass
    first = jnp.arange(both.shape[0], dtype=jnp.int32) * rows.target.width // TILE
    tile = (first[:, None] + jnp.arange(rows.num_tiles, dtype=jnp.int32)[None, :])[:, None, :]
    others = jnp.where(tile == chosen.tile[None, :, None], 0.0, both[:, :, 0])
    # [1, n, 1]: the largest of the others, the last of equal ones
    largest = jnp.max(others, axis=(0, 2), keepdims=True)
    of_largest = jnp.max(jnp.where(others == largest, tile, -1), axis=(0, 2), keepdims=True)
    others = both.at[:, :, 0].set(jnp.where(tile == of_largest, others, 0.0))
    instead = choose_tile(rows, source, TileMasses(others), recover)
    # [2 n]: the sources twice, with the tile that was chosen and with the other
    source_twice, either = jax.tree.map(
        lambda *x: jnp.concatenate(x), (source, chosen), (source, instead)
    )
    token_ids, is_empty = draw_in_tile(rows, source_twice, either)
    token_ids, another = jnp.split(token_ids, 2)
    is_empty, _ = jnp.split(is_empty, 2)
    return jnp.where(is_empty & source.uses_q, another, token_ids), chosen.bad_draft


def choose_tile(
    rows: LocalRows, source: Source, masses: TileMasses, recover: jax.Array
) -> ChosenTile:
    """Returns a tile for each source, and the part of the vocabulary that holds the token.

    Args:
      rows: the rows on this device.
      source: what to draw from, ``[n]``.
      masses: ``[num_parts, n, 2, num_tiles]``, of every part.
      recover: ``[n, 2]`` uniforms for tile and token.
    """
    num_parts = masses.both.shape[0]
    u = recover[:, 1]
    by_tile = masses.both[0]
    if num_parts > 1:
        # [n, 2, T]: the pieces of a tile that an edge between parts cuts are added
        pieces = pieces_of_tiles(rows.target.width, num_parts, rows.num_tiles)
        flat = _of_all_parts(masses.both)
        by_tile = jnp.sum(flat[:, :, pieces], axis=3)
    # [n]: the first uniform picks the tile; NaN in any weight is in the total
    tile, total = rows.device.pick_of_both(by_tile, recover[:, 0])
    has_mass = total > 0
    bad_draft = source.uses_q & (jnp.isnan(total) | source.draft_scale.bad)
    part = jnp.zeros_like(tile)
    if num_parts > 1:
        # [n, m]: the pieces of the tile, and which of them holds the token
        of_tile = jnp.asarray(pieces)[tile]
        flat = jnp.where(has_mass[:, None], flat[:, 0], flat[:, 1])
        held = jnp.take_along_axis(flat, of_tile, axis=1)
        piece = rows.device.pick(held[:, None], u)[0][:, 0]
        own, sums = entry_of((held, jnp.cumsum(held, axis=1)), piece)
        part = entry_of(of_tile, piece) // rows.num_tiles
        # How far into the piece, from 0 to 1.
        inside = u * jnp.sum(held, axis=1) - (sums - own)
        u = u if pieces.shape[1] == 1 else jnp.clip(inside / own, 0.0, 1.0)
    return ChosenTile(tile, part, u, has_mass, bad_draft)


def draw_in_tile(
    rows: LocalRows, source: Source, chosen: ChosenTile
) -> tuple[jax.Array, jax.Array]:
    """Returns a token of each chosen tile.

    Returns:
      ``[n]`` int32 tokens, and ``[n]`` bool, whether the tile turned out to have no weight. Both
      are known to all parts.
    """
    part = rows.part
    ids, inside = rows.in_tile(source, chosen.tile)  # [n, L] and [n, 2, L]
    # Rounding can leave a tile of tiny residual mass without a positive weight of its own.
    place, total = rows.device.pick_of_both(inside, chosen.uniform, chosen.has_mass)
    token_ids = ids[:, 0] + place
    # The part that holds the token says it; the others say 0. The third exchange.
    if not part.is_split:
        return token_ids, chosen.has_mass & ~(total > 0)
    is_empty = chosen.has_mass & ~(part.sum(total) > 0)
    return part.sum(jnp.where(chosen.part == part.index, token_ids, 0)), is_empty


def _of_all_parts(masses: jax.Array) -> jax.Array:
    """Returns ``[num_parts, ..., T]`` as ``[..., num_parts * T + 1]``; the last is 0."""
    flat = jnp.moveaxis(masses, 0, -2).reshape(*masses.shape[1:-1], -1)
    return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, 1)])


# Races.


def race(rows: LocalRows, source: Source, exponential: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tokens drawn by an exponential race of all ids; the vocabulary must not be split.

    Args:
      rows: the rows on this device.
      source: what to draw from, ``[n]``.
      exponential: ``[n, V]`` float32 Exp(1) noise.

    Returns:
      What `inverse_cdf_draw` does.
    """
    width = rows.target.width
    q_entries = rows.q.whole(source.draft_row, width)
    ids = jnp.arange(width, dtype=jnp.int32)[None, :]
    # [n, V]: the only place where rows are written to memory as float32
    weights, p = rows.weights(source, ids, rows.target.whole(source.row), *q_entries)
    total = jnp.sum(weights, axis=1)
    bad_draft = source.uses_q & (jnp.isnan(total) | source.draft_scale.bad)
    weights = jnp.where((total > 0)[:, None], weights, p)
    return winner(weights, exponential[:, :width])[0], bad_draft


def race_draw(
    rows: LocalRows, source: Source, masses: jax.Array, exponential: jax.Array
) -> jax.Array:
    """Returns tokens drawn from ``p`` by two exponential races: of tiles, then of ids of one.

    Args:
      rows: the rows on this device.
      source: what to draw from, ``[n]``.
      masses: ``[num_parts, n, num_tiles]``, sums of ``p`` of every part.
      exponential: ``[n, T+L]`` float32 Exp(1) noise, as in `RaceNoise`.

    Returns:
      ``[n]`` int32 tokens, known to all parts.
    """
    by_tile = masses[0]
    num_parts = rows.part.num_parts
    if num_parts > 1:
        pieces = pieces_of_tiles(rows.target.width, num_parts, rows.num_tiles)
        by_tile = jnp.sum(_of_all_parts(masses)[:, pieces], axis=2)
    # [n]: the winner of the tiles, then [n, L] the ids in it
    tile, _ = winner(by_tile, exponential[:, : by_tile.shape[1]])
    ids, inside = rows.in_tile(source, tile)
    # The noise of an id is that of its place in the tile; `ids` need not begin with the first. It
    # is taken from two copies of the noise side by side, as a slice from that place on.
    of_ids = exponential[:, tiles.num_tiles(rows.padded_vocab_size) :]
    twice = VocabRows(jnp.tile(of_ids, 2), 2 * of_ids.shape[1], 0.0, rows.device)
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    of_ids = twice.slices(index, ids[:, 0] % TILE, ids.shape[1], twice.size)
    # The best of each part, then of all parts.
    place, score = winner(inside[:, 1], of_ids)
    return argmax_of_parts(*rows.part.gather((score, ids[:, 0] + place)))


def winner(weights: jax.Array, exponential: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the place and the score ``[n]`` of the largest ``weight / exponential [n, L]``.

    Ties go to the lowest place. A weight of zero never wins, unless all are.
    """
    score = jnp.where(weights > 0, weights / exponential, -1.0)
    best = jnp.max(score, axis=1)
    place = lax.broadcasted_iota(jnp.int32, score.shape, 1)
    # Two plain reductions: on a CPU, an argmax takes four times as long.
    is_best = ~(score < best[:, None])
    return jnp.min(jnp.where(is_best, place, score.shape[1]), axis=1), best
