"""What a tree of drafts asks of the target's pass: the depth of each node, and what it sees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.arrays import check_array, require
from jax_specdec._src.attention.api import MAX_VISIBLE


class TreeRows(NamedTuple):
    """How the target runs the K + 1 nodes of each request's tree, node 0 the newest token.

    Node i is written at position ``start[b] + i`` of the cache, like the token i of a chain.

    Attributes:
      depth: ``[B, K+1]`` int32, drafts from node 0 to each node: its token is at position ``start[b]
        + depth[b, i]`` of the sequence, for rotary angles.
      visible: ``[B, K+1, 2]`` uint32, which nodes each one sees, its ancestors and itself, as
        `decode_attention` takes it.

    Example:
      >>> import jax.numpy as jnp
      >>> rows = tree_rows(jnp.array([[0, 0, 1]]))
      >>> rows.depth.tolist()
      [[0, 1, 1, 2]]
      >>> [f"{bits:04b}" for bits in rows.visible[0, :, 0].tolist()]
      ['0001', '0011', '0101', '1011']
    """

    depth: jax.Array
    visible: jax.Array


def tree_rows(parents: jax.Array) -> TreeRows:
    """Returns the depth of each node of trees of drafts, and the nodes that it sees.

    Args:
      parents: ``[B, K]`` int32, K at most 63, the node that each draft follows, as in `Drafts`. A
        parent out of range is read as one in range: such a request is not verified.

    Returns:
      `TreeRows` of K + 1 nodes.

    Raises:
      TypeError: not int32.
      ValueError: not ``[B, K]``, or more than 63 drafts.
    """
    sizes: dict[str, int] = {}
    check_array("parents", parents, "[B, K] int32", sizes)
    batch_size, num_drafts = sizes["B"], sizes["K"]
    must = f"have at most {MAX_VISIBLE - 1} drafts per request"
    require(num_drafts < MAX_VISIBLE, "parents", must, parents)
    node = jnp.arange(num_drafts + 1, dtype=jnp.int32)
    # [B, K+1]: the parent of each node; node 0 is its own
    above = jnp.pad(jnp.clip(parents, 0, node[None, :-1]), ((0, 0), (1, 0)))
    depth = jnp.broadcast_to(jnp.minimum(node, 1), above.shape)
    # [K+1, 2]: the bit of each node, in the first word or the second
    bit = jnp.uint32(1) << (node & 31).astype(jnp.uint32)
    own = jnp.where(node[:, None] // 32 == jnp.arange(2, dtype=jnp.int32)[None, :], bit[:, None], 0)
    visible = jnp.broadcast_to(own, (batch_size, *own.shape))
    # After step i each node knows its 2**i nearest ancestors, and `above` is the one after them.
    for _ in range(num_drafts.bit_length()):
        depth = depth + jnp.take_along_axis(depth, above, axis=1)
        visible = visible | jnp.take_along_axis(visible, above[:, :, None], axis=1)
        above = jnp.take_along_axis(above, above, axis=1)
    return TreeRows(depth, visible)
