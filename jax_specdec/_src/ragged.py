"""Cumulative offsets to rows per request: the only place that knows the packed layout."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, Drafts


class Layout(NamedTuple):
    """Where each request's drafts and rows are.

    Attributes:
      first_row: ``[B]`` int32, target row of the first draft position.
      num_drafts: ``[B]`` int32 in [0, K]; 0 where the offsets are not in bounds.
      token_ids: ``[B, K]`` int32, -1 past ``num_drafts``.
      draft_rows: ``[B, K]`` int32, row of the draft distribution of each position.
      in_bounds: ``[B]`` bool, false where the offsets make no sense.
    """

    first_row: jax.Array
    num_drafts: jax.Array
    token_ids: jax.Array
    draft_rows: jax.Array
    in_bounds: jax.Array


def locate(
    start: jax.Array, end: jax.Array, index: jax.Array, k: int, n: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where requests' drafts are.

    Args:
      start: int32 offsets of any shape.
      end: the offsets that follow.
      index: which requests these are.
      k: K.
      n: N.

    Returns:
      First draft, number of drafts (both 0 where the offsets make no sense), and whether they do.
    """
    count = end - start
    in_bounds = (start >= 0) & (count >= 0) & (count <= k) & (count <= n - start)
    in_bounds &= (index > 0) | (start == 0)
    return jnp.where(in_bounds, start, 0), jnp.where(in_bounds, count, 0), in_bounds


def unpack(drafts: Drafts, num_speculative_tokens: int, has_bonus_rows: bool) -> Layout:
    """The layout of a flattened batch.

    Args:
      drafts: the packed drafts.
      num_speculative_tokens: K, static.
      has_bonus_rows: whether each request owns a bonus row after its draft rows.

    Returns:
      A `Layout`; a request whose offsets are bad does not disturb the others.
    """
    k, n = num_speculative_tokens, drafts.token_ids.shape[0]
    cu = drafts.cu_num_draft_tokens
    index = jnp.arange(cu.shape[0] - 1, dtype=jnp.int32)
    start, count, in_bounds = locate(cu[:-1], cu[1:], index, k, n)
    first_row = start + index if has_bonus_rows else start

    offset = jnp.arange(k, dtype=jnp.int32)[None, :]
    flat = start[:, None] + offset
    if n == 0:
        token_ids = jnp.full(flat.shape, PLACEHOLDER_TOKEN_ID, jnp.int32)
        draft_rows = jnp.zeros(flat.shape, jnp.int32)
    else:
        place = jnp.minimum(flat, n - 1)
        token_ids = jnp.where(
            offset < count[:, None], drafts.token_ids[place], PLACEHOLDER_TOKEN_ID
        )
        rows = drafts.distribution.rows if drafts.distribution is not None else None
        draft_rows = place if rows is None else rows[place]
    return Layout(first_row, count, token_ids, draft_rows, in_bounds)


def rows(drafts: Drafts, k: int, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whose rows of target logits are whose.

    Args:
      drafts: the packed drafts.
      k: K, static.
      num_rows: M, static: N + B with bonus rows, N without.

    Returns:
      ``owner [M]``, the request of each row; ``offset [M]``, how many drafts of the request come
      before it; ``token_ids [B, K]``, the drafts. Of a row that is nobody's, anything; of one that
      bad offsets give to several requests, the first.
    """
    batch = drafts.cu_num_draft_tokens.shape[0] - 1
    has_bonus_rows = num_rows != drafts.token_ids.shape[0]
    layout = unpack(drafts, k, has_bonus_rows)
    request = jnp.arange(batch, dtype=jnp.int32)[:, None]
    offset = jnp.arange(k + 1, dtype=jnp.int32)[None, :]
    is_own = (offset < layout.num_drafts[:, None] + int(has_bonus_rows)) & layout.in_bounds[:, None]
    place = jnp.where(is_own, layout.first_row[:, None] + offset, num_rows)  # dropped
    owner = jnp.full((num_rows,), batch - 1, jnp.int32)
    owner = owner.at[place].min(jnp.broadcast_to(request, place.shape), mode="drop")
    index = jnp.arange(num_rows, dtype=jnp.int32)
    return owner, index - layout.first_row[owner], layout.token_ids
