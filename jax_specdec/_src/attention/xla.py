"""Attention over a cache in XLA: one product over the positions that are read, all T by default.

What is not seen is masked. A loop over tiles up to the longest request was tried on CPUs: 0.1 to
0.3 of the time where a tenth of the cache is in use, but 1.4 to 2.5 times as long where all of it
is, because XLA copies each tile out of the cache. A choice between few products by the longest
request takes no longer than one over all, but changes the last bits of its neighbours: the caller
allows it, by `AttentionArrays.max_seen`. On GPUs each choice waits for the host.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.attention.arrays import AttentionArrays, AttentionStatic
from jax_specdec._src.attention.cache import heads_first, of_slots, room_of

_LEAST_ROOM = 256
"""Positions, of which a product takes a small part of a pass."""


class _Laid(NamedTuple):
    """The arrays of a call as products take them; query heads that share keys are rows of one."""

    query: jax.Array  # [B * Nkv, S * group, D]
    keys: jax.Array  # [B * Nkv, D, T]
    values: jax.Array  # [B * Nkv, T, D]
    seen: jax.Array  # [B * Nkv, S * group, T] bool

    def scores(self, static: AttentionStatic) -> jax.Array:
        """Returns ``[B * Nkv, S * group, T]`` float32, of all positions."""
        # [rows, D] x [D, T], summed in float32
        products = jnp.matmul(self.query, self.keys, preferred_element_type=jnp.float32)
        scores = products * static.scale
        cap = static.softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def read(self, scores: jax.Array, values: jax.Array) -> jax.Array:
        """Returns ``[B * Nkv, S * group, D]``: values weighted by what is seen of scores."""
        # [.., T] x [T, D]: weights in the dtype of the values, as the kernel has them
        weights = jax.nn.softmax(jnp.where(self.seen, scores, -jnp.inf), axis=-1)
        return jnp.matmul(weights.astype(values.dtype), values)


def attend(arrays: AttentionArrays, static: AttentionStatic) -> jax.Array:
    """Returns ``[B, S, N, D]``; see `api.decode_attention`.

    With `AttentionArrays.max_seen` it reads all positions, a quarter of them, a quarter of that and
    so on. A choice from more would take longer to compile than it saves.
    """
    max_seen = arrays.max_seen
    if max_seen is None:
        return _attend(static, arrays)
    rooms = [room_of(arrays.keys, arrays.pages)]
    while rooms[0] >= 4 * _LEAST_ROOM:
        rooms.insert(0, rooms[0] // 4)
    reads = [functools.partial(_attend, static._replace(room=room)) for room in rooms]
    # The least room that holds all that is seen; the last one also where a text has no room
    index = (max_seen > np.array(rooms[:-1], np.int32)).sum()
    found: jax.Array = lax.switch(index, reads, arrays._replace(max_seen=None))
    return found


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(static: AttentionStatic, arrays: AttentionArrays) -> jax.Array:
    laid = _laid(arrays, static)
    scores = laid.scores(static)

    def read_apart() -> jax.Array:
        # A weight of 0 times NaN is NaN. So values that are not finite become 0, and the rows that
        # do see them become NaN by their scores.
        is_bad = ~jnp.isfinite(laid.values).all(axis=2)  # [B * Nkv, T]
        poisoned = jnp.where(is_bad[:, None, :], jnp.nan, scores)
        return laid.read(poisoned, jnp.where(is_bad[:, :, None], 0, laid.values))

    # First as if all values were finite: most caches are.
    found = laid.read(scores, laid.values)
    if not static.finite_cache:
        found = lax.cond(jnp.isfinite(found).all(), lambda: found, read_apart)
    return _of_heads(found, arrays.query.shape)


@_attend.defjvp
def _derivative(
    static: AttentionStatic, primals: tuple[AttentionArrays], tangents: tuple[AttentionArrays]
) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(functools.partial(_attend_apart, static), primals, tangents)


def _attend_apart(static: AttentionStatic, arrays: AttentionArrays) -> jax.Array:
    """Returns what `_attend` does, with derivatives that positions which are not seen do not reach.

    A product's derivative multiplies keys, too, by 0 where a position is not seen.
    """
    laid = _laid(arrays, static)
    # [B * Nkv, T]: positions with a number that is not finite; a row that sees one becomes NaN
    is_bad = ~(jnp.isfinite(laid.keys).all(axis=1) & jnp.isfinite(laid.values).all(axis=2))
    keys = jnp.where(is_bad[:, None, :], 0, laid.keys)
    values = jnp.where(is_bad[:, :, None], 0, laid.values)
    scores = laid._replace(keys=keys).scores(static)
    found = laid.read(jnp.where(is_bad[:, None, :], jnp.nan, scores), values)
    return _of_heads(found, arrays.query.shape)


def _laid(arrays: AttentionArrays, static: AttentionStatic) -> _Laid:
    keys, values = heads_first(arrays.keys, arrays.values, arrays.pages)
    room = keys.shape[2] if static.room is None else static.room
    if arrays.slots is not None:
        assert static.num_kv is not None
        keys, values = of_slots((keys, values), arrays.slots, static.num_kv, room)
    else:
        keys, values = keys[:, :, :room], values[:, :room]
    batch_size, num_rows, num_heads, head_dim = arrays.query.shape
    num_kv = keys.shape[0] // batch_size
    group = num_heads // num_kv
    rows = (batch_size * num_kv, num_rows * group)
    # [B, S, Nkv, group, D] -> [B, Nkv, S, group, D] -> [B * Nkv, S * group, D]
    query = arrays.query.reshape(batch_size, num_rows, num_kv, group, head_dim).swapaxes(1, 2)
    # [B, S, T] -> [B, Nkv, S, group, T] -> [B * Nkv, S * group, T]
    seen = _seen(arrays, room, static)[:, None, :, None, :]
    seen = jnp.broadcast_to(seen, (batch_size, num_kv, num_rows, group, room))
    return _Laid(query.reshape(*rows, head_dim), keys, values, seen.reshape(*rows, room))


def _of_heads(found: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns ``[B, S, N, D]``, of ``[B * Nkv, S * group, D]``."""
    batch_size, num_rows, num_heads, head_dim = shape
    num_kv = found.shape[0] // batch_size
    # [B, Nkv, S, group, D] -> [B, S, Nkv, group, D] -> [B, S, N, D]
    split = (batch_size, num_kv, num_rows, num_heads // num_kv, head_dim)
    return found.reshape(split).swapaxes(1, 2).reshape(shape)


def _seen(arrays: AttentionArrays, room: int, static: AttentionStatic) -> jax.Array:
    """Returns ``[B, S, T]`` bool, which positions each row sees."""
    num_rows = arrays.query.shape[1]
    tree_mask = arrays.tree_mask
    # [1, 1, T], [1, S, 1] and [B, 1, 1]
    position = jnp.arange(room, dtype=jnp.int32)[None, None, :]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    start = arrays.start[:, None, None]
    # [B, S or 1, 1]: the position that a window ends at
    if tree_mask is None:
        newest = start + row
        seen = position <= newest
    else:
        newest = start
        new = position - start  # [B, 1, T], which bit is for the position
        is_new = (new >= 0) & (new < static.num_visible)
        low = tree_mask[:, :, :1]  # [B, S, 1], as the next
        high = tree_mask[:, :, 1:]
        # [B, S, T]: the bit of each position, in the row's first or second word
        word = jnp.where(new < 32, low, high)
        bit = (word >> (new & 31).astype(jnp.uint32)) & 1
        seen = (new < 0) | (is_new & (bit == 1))
    if static.window is None:
        return seen
    if arrays.depth is not None:
        newest += arrays.depth[:, :, None]
        return seen & ((position > newest - static.window) | is_new)
    return seen & (position > newest - static.window)
