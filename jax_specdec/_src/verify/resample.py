"""Phase 3 on XLA: the recovered or bonus token of one request, from one row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.verify import block, tiles
from jax_specdec._src.verify.rows import DraftRows, DraftScale, TargetRows


class Source(NamedTuple):
    """What one request's last token is drawn from.

    Attributes:
      row: ``[]`` int32, target row.
      draft_row: ``[]`` int32, draft row, if the residual needs it.
      token_id: ``[]`` int32, the rejected draft.
      stats: statistics of the target row.
      scale: normalizer of the draft row.
      weight: ``[]`` float32, joint weight of the drafts before; 1 but in block verification.
      from_residual: ``[]`` bool, weights ``(weight * p - q)+``.
      without_token: ``[]`` bool, weights ``p`` with `token_id` removed: a rejected one-hot draft.
      inv_temperature: ``[]`` float32.
    """

    row: jax.Array
    draft_row: jax.Array
    token_id: jax.Array
    stats: tiles.RowStats
    scale: DraftScale
    weight: jax.Array
    from_residual: jax.Array
    without_token: jax.Array
    inv_temperature: jax.Array


def resample(
    source: Source,
    target: TargetRows,
    draft: DraftRows | None,
    recover: jax.Array | None,
    exponential: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw the token. No weight left to draw from means drawing from ``p``.

    Args:
      source: what to draw from.
      target: target rows.
      draft: draft rows, or None where no request has any.
      recover: ``[2]`` uniforms for tile and token, or None for a race.
      exponential: ``[V]`` Exp(1) noise of a race, or None.

    Returns:
      ``(token_id [], draft_is_bad [])``.
    """
    inv, stats = source.inv_temperature, source.stats
    p_masses, p_scale = _p_masses(source), stats.scale(inv)

    # A rejected one-hot draft: only the tile that holds it changes.
    token_tile = source.token_id // tiles.TILE
    kept = _tile_weights(source, target, token_tile)
    rest = jnp.sum(jnp.where(_tile_ids(token_tile) == source.token_id, 0.0, kept))
    tile_scale = p_scale.probs(stats.max[token_tile], inv)
    rest_masses = p_masses.at[token_tile].set(rest * tile_scale, mode="drop")

    left_masses = jnp.zeros_like(p_masses)
    if draft is not None:
        left_masses = lax.cond(
            source.from_residual,
            lambda: residual_masses(source, target, draft),
            lambda: jnp.zeros_like(p_masses),
        )
    bad = jnp.isnan(jnp.sum(left_masses)) | (source.from_residual & source.scale.bad)

    from_residual = source.from_residual & (jnp.sum(left_masses) > 0)
    without_token = source.without_token & (jnp.sum(rest_masses) > 0)
    masses = jnp.where(without_token, rest_masses, p_masses)
    masses = jnp.where(from_residual, left_masses, masses)

    def weights_of(ids: jax.Array, p_weights: jax.Array) -> jax.Array:
        """Weights of `ids`, whose weight under ``p`` is `p_weights` up to a factor."""
        weights = jnp.where(without_token & (ids == source.token_id), 0.0, p_weights)
        if draft is not None:
            q = draft.at(source.draft_row, ids, source.scale, inv)
            p = p_scale.probs(target.at(source.row, ids, stats.threshold), inv)
            residual = block.residual(source.weight, p, q)
            weights = jnp.where(from_residual, residual, weights)
        return weights

    if exponential is not None:
        ids = jnp.arange(target.size, dtype=jnp.int32)
        entries = target.at(source.row, ids, stats.threshold)
        weights = weights_of(ids, p_scale.probs(entries, inv))
        score = jnp.where(weights > 0, weights / exponential[: target.size], -1.0)
        return tiles.first(score == jnp.max(score)), bad

    assert recover is not None
    tile = tiles.pick(masses, recover[0])
    p_weights = _tile_weights(source, target, tile)
    weights = weights_of(_tile_ids(tile), p_weights)
    # Rounding can leave a tile of tiny residual mass without a positive weight of its own.
    weights = jnp.where(jnp.sum(weights) > 0, weights, p_weights)
    return tile * tiles.TILE + tiles.pick(weights, recover[1]), bad


def _tile_ids(tile: jax.Array) -> jax.Array:
    return tile * tiles.TILE + jnp.arange(tiles.TILE, dtype=jnp.int32)


def _tile_weights(source: Source, target: TargetRows, tile: jax.Array) -> jax.Array:
    """``p`` inside a tile, relative to its largest weight, so that none underflows whole."""
    entries = target.at(source.row, _tile_ids(tile), source.stats.threshold)
    largest = source.stats.max.at[tile].get(mode="clip")
    return jnp.exp((entries - largest) * source.inv_temperature)


def residual_masses(source: Source, target: TargetRows, draft: DraftRows) -> jax.Array:
    """``sum((weight * p - q)+)`` of each tile; past the drafter's vocabulary q is 0."""
    p_scale = source.stats.scale(source.inv_temperature)
    shared = min(tiles.num_tiles(draft.size) * tiles.TILE, target.size)

    def read(start: Any, length: int) -> tuple[jax.Array, jax.Array]:
        p_entries = target.read(source.row, start, length, source.stats.threshold)
        available = min(length, draft.size - start) if isinstance(start, int) else length
        q_entries = draft.read(source.draft_row, start, available)
        missing = length - available
        if missing:
            q_entries = jnp.pad(q_entries, (0, missing), constant_values=draft.fill)
        return p_entries, q_entries

    def mass(p_entries: jax.Array, q_entries: jax.Array) -> jax.Array:
        p = p_scale.probs(p_entries, source.inv_temperature)
        q = draft.probs(q_entries, source.scale, source.inv_temperature)
        return jnp.sum(block.residual(source.weight, p, q), axis=1)

    masses = tiles.map_tiles(mass, read, shared, draft.chunk, whole=draft.size)
    beyond = source.weight * _p_masses(source)[masses.shape[0] :]
    return jnp.concatenate([masses, beyond])


def residual_mass(source: Source, target: TargetRows, draft: DraftRows) -> jax.Array:
    """``sum((weight * p - q)+)`` of the row."""
    return jnp.sum(residual_masses(source, target, draft))


def _p_masses(source: Source) -> jax.Array:
    """``p`` of each tile."""
    relative = source.stats.masses(source.inv_temperature)
    return relative / jnp.sum(relative)
