"""Reading and changing some rows of a matrix, on devices that do not gather them in place.

A GPU does. A CPU and a TPU write gathered rows to memory, and a TPU reads the whole matrix to
gather them. Here both read slices instead: a CPU one row after another, which stays in its cache,
and a TPU a few rows at a time, which fit in its vector memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_specdec._src.base.platform import Platform

BLOCK = 8
"""Rows that a TPU reads at once. More take longer to copy; fewer take more rounds."""


FEW = 32
"""Up to so many positions of a request, operations on each stand in the program one by one."""


def by_blocks(function: Callable[..., Any], length: int, rows: jax.Array, *arrays: Any) -> Any:
    """Returns ``function(*arrays)``, of `length` rows at a time.

    Args:
      function: reads rows of matrices, and returns arrays ``[n, ...]``.
      length: rows of a block.
      rows: ``[n]`` int32, those read. For row -1 nothing need be read: the result is undefined.
      *arrays: pytrees of arrays ``[n, ...]``.
    """
    size = rows.shape[0]
    length = min(length, size)
    function = jax.jit(function)  # traced once for both uses
    given, tree = jax.tree.flatten(arrays)

    def read(start: jax.Array) -> Any:
        # [length, ...] each: a block's part of every array
        block = [lax.dynamic_slice_in_dim(x, start, length) for x in given]
        return function(*jax.tree.unflatten(tree, block))

    # What a block gives says what all rows give: [n, ...] each, not read yet.
    shapes, found_tree = jax.tree.flatten(jax.eval_shape(read, jnp.uint32(0)))
    unread = [lax.full_like(x, 0, shape=(size, *x.shape[1:])) for x in shapes]

    def step(i: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
        first = jnp.uint32(i) * length  # an int under jax.disable_jit
        start = jnp.minimum(first, size - length)  # the last one overlaps
        # A block without a row to read is not read, and leaves what stood there.
        is_read = any_under_vmap(jnp.any(lax.dynamic_slice_in_dim(rows, start, length) >= 0))
        nothing = jax.tree.unflatten(found_tree, [x[:length] for x in unread])
        of_block = jax.tree.leaves(lax.cond(is_read, read, lambda _: nothing, start))
        both = zip(found, of_block, strict=True)
        return [lax.dynamic_update_slice_in_dim(all, x, start, 0) for all, x in both]

    found = lax.fori_loop(0, -(-size // length), step, unread)
    return jax.tree.unflatten(found_tree, found)


def take_few(tree: Any, rows: jax.Array) -> Any:
    """Returns ``x[rows]`` of matrices, for rows ``[n]`` in range, of which few are sliced."""
    matrices, treedef = jax.tree.flatten(tree)
    if rows.shape[0] > BLOCK:
        return jax.tree.unflatten(treedef, [x[rows] for x in matrices])
    # [1, ...] each: a slice for every row, which no device turns into a gather
    starts = [*rows.astype(jnp.uint32)]
    found = [[lax.dynamic_slice_in_dim(x, start, 1) for start in starts] for x in matrices]
    return jax.tree.unflatten(treedef, [jnp.concatenate(x) for x in found])


@jax.custom_batching.custom_vmap
def any_under_vmap(condition: jax.Array) -> jax.Array:
    """Returns a condition ``[]`` bool; under `jax.vmap`, whether it holds for any mapped call.

    `jax.lax.cond` on it stays a branch. On a condition that differs between mapped calls, `vmap`
    runs both branches, and copies for each call what they close over.
    """
    return condition


@any_under_vmap.def_vmap
def _any_of_mapped(size: int, mapped: list[bool], condition: jax.Array) -> tuple[jax.Array, bool]:
    del size, mapped
    return any_under_vmap(jnp.any(condition)), False


def entry_of(tree: Any, index: jax.Array) -> Any:
    """Returns ``x[b, index[b]]`` of arrays ``x [B, P, ...]`` for ``index [B]`` in range.

    One of few is selected: XLA fuses that with its use, and no gather.
    """
    arrays, treedef = jax.tree.flatten(tree)
    found = []
    for x in arrays:
        which = lax.expand_dims(index, range(1, x.ndim - 1))
        if x.shape[1] > FEW:
            found.append(jnp.take_along_axis(x, which[:, None], axis=1)[:, 0])
            continue
        # [B, ...] each: a place of the P
        entries = [lax.index_in_dim(x, p, 1, keepdims=False) for p in range(x.shape[1])]
        many = len(entries) > 1
        which = jnp.broadcast_to(which, entries[0].shape)
        found.append(lax.select_n(which, *entries) if many else entries[0])
    return jax.tree.unflatten(treedef, found)


def scatter(
    x: jax.Array, token_ids: jax.Array, added: jax.Array | None, platform: Platform
) -> jax.Array:
    """Returns rows with ``added [M, n]`` added at ``token_ids [M, n]``; -inf put there for None.

    Ids outside the vocabulary are ignored.
    """
    # [M, n]: ids, or the column after the last, which a scatter drops
    is_token = (token_ids >= 0) & (token_ids < x.shape[1])
    ids = jnp.where(is_token, token_ids, x.shape[1])  # dropped
    if platform == "tpu" and x.shape[0] > BLOCK:
        return _scatter_blocks(x, ids, added)
    return _scatter_rows(x, ids, added)


def _scatter_rows(x: jax.Array, ids: jax.Array, added: jax.Array | None = None) -> jax.Array:
    # [M, 1] and [M, n]: a row and a column for each id
    place = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], ids
    if added is None:
        return x.at[place].set(-jnp.inf, mode="drop", out_sharding=explicit_place(x))
    return x.at[place].add(added, mode="drop", out_sharding=explicit_place(x))


def _scatter_blocks(x: jax.Array, ids: jax.Array, added: jax.Array | None = None) -> jax.Array:
    """Does `_scatter_rows` a few rows at a time: a TPU copies all rows that it is given.

    The last block overlaps the one before; rows that are in both are skipped in the last.
    """
    size = x.shape[0]
    # [blocks]: the first row of each; the last begins early, so that it is whole
    starts = jnp.minimum(jnp.arange(0, size, BLOCK, dtype=jnp.int32), size - BLOCK)

    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        given = (x, ids) if added is None else (x, ids, added)
        rows, own, *more = (lax.dynamic_slice_in_dim(y, starts[i], BLOCK) for y in given)
        # [BLOCK]: rows that no block before this one had
        is_new = starts[i] + jnp.arange(BLOCK, dtype=jnp.int32) >= i * BLOCK
        own = jnp.where(is_new[:, None], own, x.shape[1])
        return lax.dynamic_update_slice_in_dim(x, _scatter_rows(rows, own, *more), starts[i], 0)

    return lax.fori_loop(0, starts.shape[0], step, x)


def explicit_place(x: jax.Array) -> NamedSharding | None:
    """Returns the sharding of `x` on a mesh with explicit axes; None on any other."""
    place = jax.typeof(x).sharding
    return place if AxisType.Explicit in place.mesh.axis_types else None


def explicit_mesh(arrays: Any) -> Mesh | AbstractMesh | None:
    """Returns the mesh with explicit axes that some of the arrays lie on; None if none does."""
    places = map(explicit_place, jax.tree.leaves(arrays))
    return next((place.mesh for place in places if place is not None), None)


def laid_as(like: Any, function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns ``function(*arrays)``, whose outputs lie as the arrays `like` do.

    Over explicit mesh axes XLA splits the call, as it does over others. An output lies on all
    devices of such a mesh if the array that it is to lie as is on none.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return function(*arrays)
    everywhere = NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda x: explicit_place(x) or everywhere, like)
    return jax.sharding.auto_axes(function, out_sharding=places)(*arrays)
