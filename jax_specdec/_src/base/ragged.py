"""From cumulative offsets to the rows of each request. Only this module knows the packed layout."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import LOGITS, check_array, check_type, require
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.tree import depths, lineage, nodes_above, tokens_before
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Drafts, check_drafts


class Layout(NamedTuple):
    """Where each request's drafts and rows are.

    Attributes:
      first_row: ``[B]`` int32, target row of the first draft position.
      num_drafts: ``[B]`` int32 in [0, K]; 0 if `in_bounds` is false.
      token_ids: ``[B, K]`` int32, -1 past ``num_drafts``.
      draft_rows: ``[B, K]`` int32, row of the draft distribution of each position.
      place: ``[B, K]`` int32, index of each draft on the flattened axis; some index past
        ``num_drafts``.
      in_bounds: ``[B]`` bool. It is false if the request's offsets are out of range, or if its
        drafts begin before those of an earlier request end. So no row has two owners.
    """

    first_row: jax.Array
    num_drafts: jax.Array
    token_ids: jax.Array
    draft_rows: jax.Array
    place: jax.Array
    in_bounds: jax.Array

    def parents(self, drafts: Drafts) -> jax.Array:
        """Returns ``[B, K]`` int32, the parents of drafts of trees; 0 where none is proposed."""
        assert drafts.parents is not None
        # [N] -> [B, K]: past the count an index may be another request's
        found = drafts.parents.at[self.place].get(mode="fill", fill_value=0)
        return jnp.where(self.token_ids >= 0, found, 0)


def locate(
    start: jax.Array, end: jax.Array, index: jax.Array, k: int, n: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns where the drafts of some requests begin, and how many there are.

    Args:
      start: int32 offsets of any shape.
      end: the offsets that follow them.
      index: the requests that these are.

    Returns:
      The first draft and the number of drafts, both 0 if the offsets are out of range, and whether
      the offsets are in range.
    """
    count = end - start
    # Both offsets are on the flattened axis, 0 to K apart. `count` may have wrapped around, but if
    # `start` is not negative, `n - start` has not.
    in_bounds = (start >= 0) & (count >= 0) & (count <= k) & (count <= n - start)
    # The offsets of a batch begin with 0.
    in_bounds &= (index > 0) | (start == 0)
    # A request out of range owns nothing, and indexes nothing out of range.
    return jnp.where(in_bounds, start, 0), jnp.where(in_bounds, count, 0), in_bounds


def unpack(drafts: Drafts, num_speculative_tokens: int, has_bonus_rows: bool) -> Layout:
    """Returns the layout of a flattened batch; bad offsets of a request affect no other.

    Args:
      drafts: the flattened drafts.
      num_speculative_tokens: K, static.
      has_bonus_rows: whether each request owns a bonus row after its draft rows.
    """
    k = num_speculative_tokens
    n = drafts.token_ids.shape[0]
    # [B+1] -> [B]: the first draft of each request, and how many there are
    cu = drafts.cu_num_draft_tokens
    index = jnp.arange(cu.shape[0] - 1, dtype=jnp.int32)
    start, count, in_bounds = locate(cu[:-1], cu[1:], index, k, n)
    # [B]: the furthest that any request up to each one reaches; the next one begins there or later
    reached = lax.cummax(jnp.where(in_bounds, cu[1:], 0))
    in_bounds &= start >= jnp.pad(reached, (1, 0))[:-1]
    start = jnp.where(in_bounds, start, 0)
    count = jnp.where(in_bounds, count, 0)
    # [B]: each earlier request owns a bonus row beside its drafts' rows
    first_row = start + index if has_bonus_rows else start

    # [B, K]: the place of each draft on the flattened axis, some place past its request's count
    offset = jnp.arange(k, dtype=jnp.int32)[None, :]
    flat = start[:, None] + offset
    if n == 0:
        token_ids = jnp.full(flat.shape, PLACEHOLDER_TOKEN_ID, jnp.int32)
        # There is nothing to index.
        place = jnp.zeros(flat.shape, jnp.int32)
        draft_rows = place
    else:
        place = jnp.minimum(flat, n - 1)
        # [N] -> [B, K]: the drafts of each request, -1 past its count
        token_ids = jnp.where(
            offset < count[:, None], drafts.token_ids[place], PLACEHOLDER_TOKEN_ID
        )
        # [B, K]: the row of storage of each draft; without `rows`, its own place
        distribution = drafts.distribution
        draft_rows = place
        if distribution and distribution.rows is not None:
            draft_rows = distribution.rows[place]
    return Layout(first_row, count, token_ids, draft_rows, place, in_bounds)


class Owners(NamedTuple):
    """The requests that M rows of logits belong to, and the drafts before each row.

    Attributes:
      owner: ``[M]`` int32, the request; undefined, but in range, for a row without an owner.
      offset: ``[M]`` int32, how many of the request's drafts come before the row; undefined too.
      token_ids: ``[M, K]`` int32, the drafts before the row, and then anything; ``[M, 0]`` for rows
        without any.
    """

    owner: jax.Array
    offset: jax.Array
    token_ids: jax.Array


def owners(
    logits: jax.Array,
    drafts: Drafts | None,
    config: SpecDecodeConfig | None,
    padded_rows: bool,
) -> Owners:
    """Returns the request that owns each row of logits, and the drafts before the row.

    Args:
      logits: ``[M, V]``, or ``[B, V]`` if `drafts` is None; checked by `check_rows`.
      drafts: the flattened drafts. None for one row per request, without drafts before it.
    """
    m = logits.shape[0]
    index = jnp.arange(m, dtype=jnp.int32)
    if drafts is None or config is None:
        # Row b is request b's, with no draft before it.
        return Owners(index, jnp.zeros_like(index), jnp.zeros((m, 0), jnp.int32))
    k = config.num_speculative_tokens
    has_bonus_rows = padded_rows or m != drafts.token_ids.shape[0]
    layout = unpack(drafts, k, has_bonus_rows)
    # [B]: how many rows each request owns; none if its offsets are out of range
    count = jnp.where(layout.in_bounds, layout.num_drafts + int(has_bonus_rows), 0)
    # [M]: the owner of each row, and the place of the row among those that it owns
    owner, _ = owner_of_rows(layout.first_row, count, m)
    offset = index - layout.first_row[owner]
    if drafts.parents is None:
        # [B, K] -> [M, K]
        return Owners(owner, offset, layout.token_ids[owner])
    # Of a tree, row i comes after node i: the drafts before it are those on the path there.
    node = jnp.clip(offset, 0, k)
    # [B, K+1, K+1] -> [B, K+1, K]: the drafts before each node
    sees = lineage(nodes_above(layout.parents(drafts)))
    before = tokens_before(sees, layout.token_ids)
    # [M], and [M, K]: those of the node that each row comes after
    return Owners(owner, depths(sees)[owner, node], before[owner, node])


def owner_of_rows(
    first_row: jax.Array, num_rows: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the request that owns each of `size` rows, in time linear in rows and requests.

    Args:
      first_row: ``[B]`` int32, of a `Layout`; B at least 1.
      num_rows: ``[B]`` int32, how many rows each request owns; 0 for requests out of bounds.
      size: static.

    Returns:
      The owner ``[size]`` int32, in range but undefined if there is none, and whether there is one.
    """
    # [B]: where the rows of each request end, or of the last before it that owns any; so they are
    # sorted, and a request without rows is never found.
    row = jnp.arange(size, dtype=jnp.int32)
    ends = lax.cummax(jnp.where(num_rows > 0, first_row + num_rows, 0))
    # [size]: the first request that ends after the row, by binary search
    owner = jnp.searchsorted(ends, row, side="right", method="scan_unrolled").astype(jnp.int32)
    # A row past all ends has no owner, but an index in range.
    owner = jnp.minimum(owner, first_row.shape[0] - 1)
    # The row is in a gap, if it is before its owner's first row or after its last.
    place = row - first_row[owner]
    return owner, (place >= 0) & (place < num_rows[owner])


def check_rows(
    logits: Any,
    drafts: Any,
    batch: int,
    config: Any,
    padded_rows: bool,
    most: float = math.inf,
) -> None:
    """Checks rows of logits, and the drafts that they belong to.

    Args:
      logits: ``[N+B, V]`` or ``[N, V]``; ``[B, V]`` if `drafts` is None.
      drafts: a `Drafts` or None.
      config: a `SpecDecodeConfig`; not checked if `drafts` is None.
      padded_rows: whether `logits` may have any number of rows.
      most: the most columns that `logits` may have.

    Raises:
      TypeError: an argument of the wrong type or dtype.
      ValueError: shapes that do not fit.
    """
    check_type("drafts", drafts, Drafts, None)
    sizes = {"B": batch}
    shapes = "[B, V]"
    if drafts is not None:
        check_type("config", config, SpecDecodeConfig)
        check_drafts(drafts, sizes)
        # With bonus rows or without, by how many rows there are; padded rows may be any number.
        shapes = "[M, V]" if padded_rows else "[N+B, V] or [N, V]"
    check_array("logits", logits, f"{shapes} {LOGITS}", sizes)
    # V is now what `logits` has.
    require(sizes["V"] <= most, "logits", f"have at most V = {most} columns", logits)
