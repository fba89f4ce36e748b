"""Attention over a cache in XLA: one product over all T positions, those that are not seen masked.

A loop over tiles up to the longest request was tried on CPUs: 0.1 to 0.3 of the time where a tenth
of the cache is in use, but 1.4 to 2.5 times as long where all of it is, because XLA copies each
tile out of the cache. A choice between both by the longest request would change the last bits of
its neighbours, which attention must not. On GPUs each turn of such a loop waits for the host.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.attention.arrays import AttentionArrays, AttentionStatic
from jax_specdec._src.attention.cache import heads_first


def attend(arrays: AttentionArrays, static: AttentionStatic) -> jax.Array:
    """Returns ``[B, S, N, D]``; see `api.decode_attention`."""
    keys, values = heads_first(arrays.keys, arrays.values, arrays.pages)
    batch_size, num_rows, num_heads, head_dim = arrays.query.shape
    num_kv = keys.shape[0] // batch_size
    room = keys.shape[2]
    group = num_heads // num_kv
    # The query heads that share keys are further rows of one product with them:
    # [B, S, Nkv, group, D] -> [B * Nkv, S * group, D].
    split = (batch_size, num_kv, num_rows, group)
    rows = (batch_size * num_kv, num_rows * group)
    query = arrays.query.reshape(batch_size, num_rows, num_kv, group, head_dim).swapaxes(1, 2)
    scores = jnp.matmul(
        query.reshape(*rows, head_dim), keys, preferred_element_type=jnp.float32
    ) * (head_dim**-0.5)
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    seen = _seen(arrays, room, static)
    # [B, S, T] -> [B * Nkv, S * group, T]
    seen = jnp.broadcast_to(seen[:, None, :, None, :], (*split, room)).reshape(*rows, room)

    def read(scores: jax.Array, values: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.matmul(weights.astype(values.dtype), values)

    def read_apart() -> jax.Array:
        # A weight of 0 times NaN is NaN. So values that are not finite become 0, and the rows that
        # do see them become NaN by their scores.
        is_bad = ~jnp.isfinite(values).all(axis=2)  # [B * Nkv, T]
        poisoned = jnp.where(is_bad[:, None, :], jnp.nan, scores)
        return read(poisoned, jnp.where(is_bad[:, :, None], 0, values))

    found = read(scores, values)
    if not static.finite_cache:
        found = lax.cond(jnp.isfinite(found).all(), lambda: found, read_apart)
    found = found.reshape(*split, head_dim).swapaxes(1, 2)
    return found.reshape(batch_size, num_rows, num_heads, head_dim)


def _seen(arrays: AttentionArrays, room: int, static: AttentionStatic) -> jax.Array:
    """Returns ``[B, S, T]`` bool, which positions each row sees."""
    num_rows = arrays.query.shape[1]
    visible = arrays.visible
    position = jnp.arange(room, dtype=jnp.int32)[None, None, :]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    start = arrays.start[:, None, None]
    if visible is None:
        seen = position <= start + row
    else:
        new = position - start  # [B, 1, T], which bit is for the position
        is_new = (new >= 0) & (new < static.num_visible)
        low, high = visible[:, :, :1], visible[:, :, 1:]  # [B, S, 1]
        word = jnp.where(new < 32, low, high)
        bit = (word >> (new & 31).astype(jnp.uint32)) & 1
        seen = (new < 0) | (is_new & (bit == 1))
    if static.window is None:
        return seen
    newest = start + row if visible is None else start
    return seen & (position > newest - static.window)
