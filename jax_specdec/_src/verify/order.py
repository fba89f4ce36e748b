"""Which row of a request comes after which: the next one of a chain, or a child in a tree.

Where the agreement rule verifies a tree, it draws the target's token y from the row of a node, goes
on to the child that equals y, and ends at a node without such a child. So it visits one node of
each depth, on a path; with the positions of this path in order, all else is as for a chain.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.tree import depths, lineage, nodes_above
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.verify.position import Position


class ChainOrder(NamedTuple):
    """Drafts that follow one another: row i scores what follows i drafts."""

    def depth(self, offset: jax.Array) -> jax.Array:
        """Returns how many drafts come before rows ``offset [B, P]``."""
        return offset

    def followed(self, token_ids: jax.Array, position: Position) -> Position:
        """Returns a position ``[1, 1]`` that was read, with the draft that is judged there.

        `token_ids` are the drafts ``[1, K+1]`` of its request, here and below.
        """
        return position

    def next_row(self, token_ids: jax.Array, position: Position, index: jax.Array) -> jax.Array:
        """Returns the row ``[]`` uint32 after row `index`, whose position has `followed`."""
        return index + 1

    def along_path(
        self, token_ids: jax.Array, positions: Position
    ) -> tuple[jax.Array, Position, jax.Array | None]:
        """Returns drafts and positions ``[B, K+1]`` in the order of the path; and its nodes."""
        return token_ids, positions, None


class TreeOrder(NamedTuple):
    """Drafts that follow nodes of a tree: row i scores what follows node i.

    Attributes:
      above: ``[B, K+1]`` int32, the parent of each node; node 0 is its own.
      sees: ``[B, K+1, K+1]`` bool, whether node i is node j or comes after it.
    """

    above: jax.Array
    sees: jax.Array

    @classmethod
    def of(cls, parents: jax.Array, token_ids: jax.Array) -> tuple[TreeOrder, jax.Array]:
        """Returns the trees of requests, and whether each is one, ``[B]`` bool.

        Args:
          parents: ``[B, K]`` int32, 0 where nothing is proposed.
          token_ids: ``[B, K]`` int32, -1 where nothing is proposed.
        """
        # [B, K+1]: parents that are no node before are put right here, and so differ
        above = nodes_above(parents)
        is_tree = jnp.all(parents == above[:, 1:], axis=1)
        # [B, K, K]: pairs of a draft and a later one that are siblings, and equal
        is_proposed = token_ids >= 0
        same = (token_ids[:, :, None] == token_ids[:, None, :]) & is_proposed[:, :, None]
        same &= parents[:, :, None] == parents[:, None, :]
        earlier = lax.broadcasted_iota(jnp.int32, same.shape, 1)
        same &= earlier < lax.broadcasted_iota(jnp.int32, same.shape, 2)
        is_tree &= ~jnp.any(same, axis=(1, 2))
        return cls(above, lineage(above)), is_tree

    def depth(self, offset: jax.Array) -> jax.Array:
        """Returns the depth of nodes ``offset [B, P]``: how many drafts lead to each."""
        return jnp.take_along_axis(depths(self.sees), offset, axis=1)

    def followed(self, token_ids: jax.Array, position: Position) -> Position:
        """Returns the position with the child that was drawn as its draft, or without one."""
        # [1, 1]: the token drawn from the node's row, if a child has it
        drawn = position.argmax
        is_there = jnp.any(self._is_child(token_ids, position), axis=1, keepdims=True)
        draft = jnp.where(is_there, drawn, PLACEHOLDER_TOKEN_ID)
        return position._replace(token_id=draft, proposed=is_there)

    def next_row(self, token_ids: jax.Array, position: Position, index: jax.Array) -> jax.Array:
        """Returns the row of the child that was drawn."""
        return lax.argmax(self._is_child(token_ids, position)[0], 0, jnp.uint32) + 1

    def _is_child(self, token_ids: jax.Array, position: Position) -> jax.Array:
        """Returns ``[1, K]``: drafts that follow this node, and equal the token drawn there."""
        is_drawn = token_ids[:, :-1] == position.argmax
        return is_drawn & (self.above[:, 1:] == position.offset)

    def along_path(
        self, token_ids: jax.Array, positions: Position
    ) -> tuple[jax.Array, Position, jax.Array | None]:
        """Returns drafts, positions and nodes in the order of the path.

        Past its end stands its last position, without a draft.
        """
        node = lax.broadcasted_iota(jnp.int32, self.above.shape, 1)
        # [B, K+1]: the token of each node, and whether it was drawn from the row of its parent
        token_of = jnp.pad(token_ids[:, :-1], ((0, 0), (1, 0)))
        is_drawn = token_of == jnp.take_along_axis(positions.argmax, self.above, axis=1)
        is_drawn |= node == 0
        # [B, K+1]: a node is on the path if all nodes that it sees were drawn
        is_on_path = jnp.all(is_drawn[:, None, :] | ~self.sees, axis=2)
        # [B, depth, node] -> [B, K+1]: the node at each depth, -1 past the last. There is one at
        # most, since siblings differ.
        is_here = (depths(self.sees)[:, None, :] == node[:, :, None]) & is_on_path[:, None, :]
        path = jnp.max(jnp.where(is_here, node[:, None, :], -1), axis=2)
        # [B, K+1]: the draft after each position of the path is the token of the next one
        following = jnp.pad(path[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        is_there = following >= 0
        drafts = jnp.take_along_axis(token_of, jnp.maximum(following, 0), axis=1)
        drafts = jnp.where(is_there, drafts, PLACEHOLDER_TOKEN_ID)
        # [B, K+1]: the row of each position; past the end of the path, that of its last node
        last = jnp.max(path, axis=1, keepdims=True)  # nodes of a path have rising numbers
        row = jnp.where(path >= 0, path, last)
        positions = positions._replace(
            token_id=drafts,
            proposed=is_there,
            argmax=jnp.take_along_axis(positions.argmax, row, axis=1),
            status=jnp.take_along_axis(positions.status, row, axis=1),
        )
        return drafts, positions, path
