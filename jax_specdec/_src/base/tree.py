"""Trees of drafts: the depth of each node, its ancestors, and the drafts before it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import check_array, require
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID

TREE_MASK_BITS = 64
"""Rows that a row of a tree mask has bits for."""


class TreeRows(NamedTuple):
    """How the target runs the K + 1 nodes of each request's tree, node 0 the newest token.

    Node i is written at position ``start[b] + i`` of the cache, like the token i of a chain.

    Attributes:
      depth: ``[B, K+1]`` int32, drafts from node 0 to each node: its token is at position
        ``start[b] + depth[b, i]`` of the sequence, for rotary angles.
      tree_mask: ``[B, K+1, 2]`` uint32, which nodes each one sees, its ancestors and itself, as
        `decode_attention` takes it.

    Example:
      >>> import jax.numpy as jnp
      >>> rows = TreeRows.of(jnp.array([[0, 0, 1]]))
      >>> rows.depth.tolist()
      [[0, 1, 1, 2]]
      >>> [f"{bits:04b}" for bits in rows.tree_mask[0, :, 0].tolist()]
      ['0001', '0011', '0101', '1011']
    """

    depth: jax.Array
    tree_mask: jax.Array

    @classmethod
    def of(cls, parents: jax.Array) -> TreeRows:
        """Returns the depth of each node of trees of drafts, and the nodes that it sees.

        Args:
          parents: ``[B, K]`` int32, K at most 63, the node that each draft follows, as in `Drafts`.
            A parent out of range is read as one in range: such a request is not verified.

        Returns:
          `TreeRows` of K + 1 nodes.

        Raises:
          TypeError: not int32.
          ValueError: not ``[B, K]``, or more than 63 drafts.
        """
        sizes: dict[str, int] = {}
        check_array("parents", parents, "[B, K] int32", sizes)
        must = f"have at most {TREE_MASK_BITS - 1} drafts per request"
        require(sizes["K"] < TREE_MASK_BITS, "parents", must, parents)
        # [B, K+1, K+1]: whether node i sees node j
        sees = lineage(nodes_above(parents))
        # [B, K+1, K+1, 2] -> [B, K+1, 2]: the bits of all nodes that a node sees
        bits = node_bits(jnp.arange(sees.shape[2], dtype=jnp.int32))[None, None]
        tree_mask = jnp.sum(jnp.where(sees[..., None], bits, 0), axis=2, dtype=jnp.uint32)
        return cls(depths(sees), tree_mask)


def node_bits(nodes: jax.Array) -> jax.Array:
    """Returns the bit of each node, ``[n, 2]`` uint32: bit i % 32 of word i // 32 for node i.

    Args:
      nodes: ``[n]`` int32 below 64.
    """
    # [n, 2]: the bit in the word that it belongs to, 0 in the other
    word = lax.broadcasted_iota(jnp.int32, (nodes.shape[0], 2), 1)
    bit = jnp.uint32(1) << (nodes & 31).astype(jnp.uint32)
    return jnp.where(nodes[:, None] // 32 == word, bit[:, None], 0)


def nodes_above(parents: jax.Array) -> jax.Array:
    """Returns ``[B, K+1]`` int32, the parent of each node, in range; node 0 is its own.

    Args:
      parents: ``[B, K]`` int32.
    """
    # Draft j is node j + 1, so a parent in range is at most j. Node 0 comes before the drafts:
    # [B, K] -> [B, K+1].
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)[None, :]
    return jnp.pad(jnp.clip(parents, 0, node), ((0, 0), (1, 0)))


def lineage(above: jax.Array) -> jax.Array:
    """Returns ``[B, K+1, K+1]`` bool, whether node i is node j or comes after it.

    Args:
      above: ``[B, K+1]`` int32, from `nodes_above`.
    """
    # [B, K+1, K+1]: at first each node sees itself
    num_nodes = above.shape[1]
    sees = jnp.broadcast_to(jnp.eye(num_nodes, dtype=bool), (*above.shape, num_nodes))
    # After round r each node sees its 2**r - 1 nearest ancestors, and `above` is the next one.
    for _ in range((num_nodes - 1).bit_length()):
        # What that ancestor sees is seen as well, and its own next one is twice as far up.
        sees = sees | jnp.take_along_axis(sees, above[:, :, None], axis=1)
        above = jnp.take_along_axis(above, above, axis=1)
    return sees


def depths(sees: jax.Array) -> jax.Array:
    """Returns ``[B, K+1]`` int32, the drafts from node 0 to each node, its own included."""
    # A node sees its ancestors and itself, of which node 0 is no draft.
    return jnp.sum(sees, axis=2, dtype=jnp.int32) - 1


def tokens_before(sees: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns ``[B, K+1, K]`` int32, the drafts on the path to each node, then -1.

    Args:
      sees: from `lineage`.
      token_ids: ``[B, K]`` int32.
    """
    batch_size, num_drafts = token_ids.shape
    # [B, K+1, K]: where draft j goes in the list of node i; past its end if it is not on the path
    place = jnp.where(sees[:, :, 1:], depths(sees)[:, None, 1:] - 1, num_drafts)
    # [B, K+1, K]: each draft at its place; what is past the end is dropped
    nothing = jnp.full((batch_size, num_drafts + 1, num_drafts), PLACEHOLDER_TOKEN_ID, jnp.int32)
    drafts = jnp.broadcast_to(token_ids[:, None, :], nothing.shape)
    return jnp.put_along_axis(nothing, place, drafts, axis=2, inplace=False, mode="drop")
