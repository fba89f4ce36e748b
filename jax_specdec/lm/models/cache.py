"""The keys and values that a decoder remembers: rows write them, and attention reads them.

`Llama` and the draft heads make a `Pass` of the groups that they are given. It has token ids and
positions in the layout of matrix products; its `attend`, called once for each layer, writes the new
keys and values and reads what each group sees. How rows are laid out in memory, and the kernel of
attention, is in `_src/attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.attention.api import attend
from jax_specdec._src.attention.arrays import AttentionArrays, AttentionStatic
from jax_specdec._src.attention.cache import write_rows
from jax_specdec._src.base.arrays import Sizes, check_array, require
from jax_specdec._src.base.tree import TREE_MASK_BITS
from jax_specdec.lm.models.config import LayerSpec
from jax_specdec.lm.models.protocol import Cache, Rows

Layer = tuple[jax.Array, jax.Array]
"""Keys ``[B N_kv, D, T]`` and values ``[B N_kv, T, D]`` of one layer, of all requests."""


def empty_cache(
    layers: Sequence[LayerSpec], dtype: np.dtype, batch_size: int, max_length: int
) -> list[Layer]:
    """Returns a cache of layers for B = batch_size requests of at most T = max_length positions.

    Layers that read the keys of others have none.

    In 16 bits T is rounded up to a multiple of 64, as the kernel of attention takes it.
    """
    if dtype.itemsize == 2:
        max_length = -(-max_length // 64) * 64
    cache = []
    for spec in layers:
        if spec.keys_of is not None:
            continue
        heads = batch_size * spec.num_key_value_heads
        keys = jnp.zeros((heads, spec.head_dim, max_length), dtype)  # [B N_kv, D, T]
        values = jnp.zeros((heads, max_length, spec.head_dim), dtype)  # [B N_kv, T, D]
        cache.append((keys, values))
    return cache


class Pass(NamedTuple):
    """The rows of all groups of a pass, laid out for matrix products.

    One group is run as it is, ``[G, S]``. Several are M rows of one batch, ``[1, M]``: all rows of
    the first group, then all of the second, so that weights are read once for all of them.

    Attributes:
      groups: what the pass runs.
      token_ids: ``[G, S]`` or ``[1, M]`` int32; of `with_two_rows` ``[1, 2]``.
      positions: of the same shape, in the sequences, for rotary angles.
      places: ``[G, S]`` or ``[1, M]`` int32, in the cache.
      requests: of that shape, or one that broadcasts with it: the requests of the cache. None
        for one group that is all of them.
    """

    groups: tuple[Rows, ...]
    token_ids: jax.Array
    positions: jax.Array
    places: jax.Array
    requests: jax.Array | None

    @classmethod
    def of(cls, groups: Sequence[Rows], cache: list[Layer], layers: Sequence[LayerSpec]) -> Pass:
        """Returns the pass over some groups.

        Where groups write one position, that of the group with `slots` stays: rows of a group of
        all requests are not written for those that another group has.

        Args:
          groups: one or more.
          cache: of all layers; only its shapes are read.
          layers: what each of them is.
        """
        # [B N_kv, D, T]: the requests and the positions of the cache, which all layers share
        keys = cache[0][0]
        num_requests = keys.shape[0] // layers[0].num_key_value_heads
        room = keys.shape[2]
        if len(groups) == 1:
            # All requests in their order need no list of them: their rows are written without the
            # checks that places of other groups need.
            (rows,) = groups
            requests = None if rows.slots is None else rows.slots[:, None]  # [G, 1]
            return cls((rows,), rows.token_ids, rows.positions, rows.places, requests)
        owners = []
        places = []
        # Every G after the other: the requests that groups with slots have rows of. There may be no
        # such group, hence an array of none.
        slots = [rows.slots for rows in groups if rows.slots is not None]
        taken = jnp.concatenate([jnp.zeros((0,), jnp.int32), *slots])
        for rows in groups:
            place = rows.places
            owner = rows.slots
            if owner is None:
                owner = jnp.arange(num_requests, dtype=jnp.int32)
                # [B, 1]: whether another group has rows of the request
                is_other = (owner[:, None] == taken[None, :]).any(axis=1, keepdims=True)
                # A position past the end is not written.
                place = jnp.where(is_other, room, place)
            # [G] -> [G, S]
            owners.append(jnp.broadcast_to(owner[:, None], place.shape))
            places.append(place)
        return cls(
            groups=tuple(groups),
            token_ids=_side_by_side([rows.token_ids for rows in groups]),
            positions=_side_by_side([rows.positions for rows in groups]),
            places=_side_by_side(places),
            requests=_side_by_side(owners),
        )

    def with_two_rows(self) -> Pass:
        """Returns the pass in which a row that is alone comes twice, and attends once.

        Products in 16 bits have at least two rows (see `matmul`). To bring the second to each of
        them is a launch on a GPU, so it is there from the start: of Llama 3 1B on an H100 a pass
        takes 1.24 ms so, 1.29 with a second row in products alone, and 1.51 without any.
        """
        if self.token_ids.size != 1:
            return self
        # [1, 1] -> [1, 2]; `places` has one, by which the second is known.
        ids, positions = (jnp.tile(x, (1, 2)) for x in (self.token_ids, self.positions))
        return self._replace(token_ids=ids, positions=positions)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Returns ``[G, S, ...]`` for each group, of ``[G, S, ...]`` or ``[1, M, ...]``."""
        if len(self.groups) == 1:
            return [x[:, : self.places.shape[1]]]
        parts = []
        first = 0
        for rows in self.groups:
            end = first + rows.token_ids.size
            # [1, M, ...] -> [G S, ...] -> [G, S, ...]
            parts.append(x[0, first:end].reshape(*rows.token_ids.shape, *x.shape[2:]))
            first = end
        return parts

    def attend(
        self,
        spec: LayerSpec,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        layer: Layer,
        block: np.ndarray | None = None,
    ) -> tuple[jax.Array, Layer]:
        """Returns what all rows read of a layer, and the layer, into which they are written first.

        It is softmax(scale q k) v over the positions up to each row's own in its sequence, within
        the layer's window; see `decode_attention`. All rows are written before any is read, so that
        the cache is changed in place.

        Args:
          spec: what the layer is.
          query: ``[G, S, N, D]``, or ``[1, M, N, D]`` of several groups.
          key: ``[G, S, N_kv, D]``, or ``[1, M, N_kv, D]``; None if the layer is that of others,
            who have written it.
          value: as `key`.
          layer: changed in place if it is donated.
          block: ``[S, 2]`` uint32, which of the S rows each one sees, if they are a block, whose
            window is counted from its first row.
        """
        if key is not None and value is not None:
            # [1, 2, N_kv, D] -> [1, 1, N_kv, D] of a row that comes twice; others are as they were.
            num_rows = self.places.shape[1]
            layer = write_rows(
                layer, key[:, :num_rows], value[:, :num_rows], self.places, self.requests
            )
        reads = []
        static = AttentionStatic(
            scale=query.shape[-1] ** -0.5 if spec.scale is None else spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            finite_cache=True,  # `write_rows` keeps values so
            num_kv=spec.num_key_value_heads,
        )
        # Products of weights are shared by all rows; a group attends by itself, as its kind needs.
        # [G, S, N, D] of each group, or [1, 1, N, D] of a row that comes twice
        for rows, group_query in zip(self.groups, self.split(query), strict=True):
            tree_mask, depth = _seen(rows, spec.window) if block is None else (block, None)
            arrays = AttentionArrays(
                query=group_query,
                keys=layer[0],
                values=layer[1],
                start=rows.start,
                depth=depth,
                slots=rows.slots,
                max_seen=rows.max_seen,
            )
            reads.append(attend(arrays, static, tree_mask))
        # A row that comes twice has attended once: [1, 1, N, D] -> [1, 2, N, D]. Others are as they
        # were.
        if len(reads) == 1:
            return jnp.broadcast_to(reads[0], query.shape), layer
        # [G, S, N, D] of each group -> [1, M, N, D], as the query
        return _side_by_side(reads), layer


def _seen(rows: Rows, window: int | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns `tree_mask` and `depth` of `decode_attention` for rows of a layer with a window."""
    # Consecutive rows have no mask, and without a window nothing is counted back.
    if rows.tree is None or window is None:
        return rows.tree_mask, None
    # By `depth`, attention counts a window back over positions before the tree. Which of its nodes
    # are in the window, the mask has to say.
    tree_mask = rows.tree.tree_mask
    if window < TREE_MASK_BITS:
        # A node's bits are the path to it: its window are the last of them. A parent comes before
        # its children, so bits are in the order of the path.
        shifts = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]
        bits = (tree_mask[..., None] >> shifts) & 1  # [G, S, 2, 32]
        flat = bits.reshape(*tree_mask.shape[:2], TREE_MASK_BITS)
        to_end = lax.cumsum(flat, axis=2, reverse=True)  # [G, S, 64]: 1 at the node itself
        in_window = jnp.where(to_end <= window, flat, 0).reshape(bits.shape)
        # [G, S, 2, 32] -> [G, S, 2]: bits are put together again
        tree_mask = (in_window << shifts).sum(axis=3, dtype=jnp.uint32)
    return tree_mask, rows.tree.depth


def _side_by_side(parts: list[jax.Array]) -> jax.Array:
    """Returns ``[1, M, ...]``: each ``[G, S, ...]``, row after row, one after another."""
    # [G, S, ...] -> [1, G S, ...]
    rows = [x.reshape(1, -1, *x.shape[2:]) for x in parts]
    return jnp.concatenate(rows, axis=1)


def check_rows(name: str, rows: Rows, cache: Cache) -> None:
    """Checks the shapes and dtypes of rows, and that the cache has positions for them.

    Raises:
      ValueError: another shape, or more tokens than the cache has positions.
      TypeError: another dtype.
    """
    sizes: Sizes = {}
    check_array(f"{name}.token_ids", rows.token_ids, "[G, S] int32", sizes)
    check_array(f"{name}.start", rows.start, "[G] int32", sizes)
    if rows.slots is not None:
        check_array(f"{name}.slots", rows.slots, "[G] int32", sizes)
    if rows.max_seen is not None:
        check_array(f"{name}.max_seen", rows.max_seen, "[] int32", sizes)
    if rows.tree is not None:
        check_array(f"{name}.tree.depth", rows.tree.depth, "[G, S] int32", sizes)
        tree_mask = rows.tree.tree_mask
        check_array(f"{name}.tree.tree_mask", tree_mask, "[G, S, 2] uint32", {**sizes, "2": 2})
    check_length(f"{name}.token_ids", rows.token_ids.shape[1], cache)


def check_length(name: str, length: int, cache: Cache) -> None:
    """Checks that the caches of layers have positions for so many tokens.

    Args:
      length: S.

    Raises:
      ValueError: they have not: writing would drop the last tokens.
    """
    # Keys are [B N_kv, D, T].
    room = min(keys.shape[2] for keys, _ in cache)
    must = f"have at most {room} tokens per request, as the cache"
    require(length <= room, name, must, length)
