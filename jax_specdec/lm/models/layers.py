"""The parts of a decoder layer in plain JAX: what `Llama` and `Eagle3Head` are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.arrays import refuse, require
from jax_specdec._src.attention.api import decode_attention
from jax_specdec.lm.models.llama_config import LlamaConfig
from jax_specdec.lm.models.protocol import PromptRows
from jax_specdec.lm.models.rotary import rotate

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`attend(query, key, value)`: what the heads of a layer read. query ``[B, S, N, D]``, key and
value ``[B, S, N_kv, D]`` of the S new tokens, rotated already; returns ``[B, S, N, D]``."""


def decoder_layer(
    config: LlamaConfig,
    layer: dict[str, jax.Array],
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
    regularize: Callable[[jax.Array], jax.Array] = lambda branch: branch,
) -> jax.Array:
    """Returns the residual stream ``[B, S, H]`` after one more layer.

    Args:
      config: as for `self_attention`.
      layer: the layer's weights.
      x: ``[B, S, H]``, the residual stream before it.
      cos_sin: as for `self_attention`.
      attend: as for `self_attention`.
      regularize: applied to what each half of the layer adds.
    """
    h = rms_norm(x, layer["input_layernorm"], config.rms_norm_eps)
    x = x + regularize(self_attention(config, layer, h, cos_sin, attend))
    h = rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
    return x + regularize(feed_forward(layer, h))


def self_attention(
    config: LlamaConfig,
    layer: dict[str, jax.Array],
    h: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
) -> jax.Array:
    """Returns what attention adds to the residual stream, ``[B, S, H]``.

    Args:
      config: heads, and the switches of queries, keys and values.
      layer: the layer's weights.
      h: ``[B, S, W]``, normed; W is the number of rows of ``qkv_proj``.
      cos_sin: of `rotation`, at the positions of the tokens.
      attend: what the heads read.
    """
    read = attend(*rotated_heads(config, layer, h, cos_sin))
    # [B, S, N, D] -> [B, S, N D] -> [B, S, H]
    branch = read.reshape(*h.shape[:2], -1) @ layer["o_proj"]
    if "o_bias" in layer:
        branch = branch + layer["o_bias"][None, None, :]
    return branch


def rotated_heads(
    config: LlamaConfig,
    layer: dict[str, jax.Array],
    h: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns query ``[B, S, N, D]``, key and value ``[B, S, N_kv, D]`` of `self_attention`."""
    c = config
    num_query = c.num_attention_heads
    num_kv = c.num_key_value_heads
    # [B, S, (N + 2 N_kv) D]: one product for all heads
    heads = h @ layer["qkv_proj"]
    if c.qkv_bias:
        heads = heads + layer["qkv_bias"][None, None, :]
    # [B, S, N + 2 N_kv, D]: query heads, then key heads, then value heads
    heads = heads.reshape(*h.shape[:2], num_query + 2 * num_kv, c.head_dim)
    query, key, value = jnp.split(heads, [num_query, num_query + num_kv], axis=2)
    if c.qk_norm:
        query = rms_norm(query, layer["q_norm"], c.rms_norm_eps)
        key = rms_norm(key, layer["k_norm"], c.rms_norm_eps)
    return rotate(query, cos_sin), rotate(key, cos_sin), value


def feed_forward(layer: dict[str, jax.Array], h: jax.Array) -> jax.Array:
    """Returns what SwiGLU adds to the residual stream, ``[B, S, H]``; h ``[B, S, H]`` is normed."""
    # [B, S, 2 I] -> [B, S, I] twice
    gate, up = jnp.split(h @ layer["gate_up_proj"], 2, axis=2)
    return (jax.nn.silu(gate) * up) @ layer["down_proj"]


def output_logits(
    x: jax.Array, lm_head: jax.Array, tied: bool, num_token_ids: int | None
) -> jax.Array:
    """Returns logits ``[B, S, V]`` of normed states ``[B, S, H]``.

    Args:
      x: the states.
      lm_head: ``[H, V]``, or the embedding ``[V, H]`` if `tied`.
      tied: whether the output matrix is an embedding.
      num_token_ids: logits of ids from this on are -inf; None for none.
    """
    # The product of einsum is faster than x @ E.T.
    logits = jnp.einsum("vh,bsh->bsv", lm_head, x) if tied else x @ lm_head
    if num_token_ids is None:
        return logits
    is_token = jnp.arange(logits.shape[2], dtype=jnp.int32) < num_token_ids
    return jnp.where(is_token[None, None, :], logits, -jnp.inf)


def embed_tokens(embedding: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns rows ``[B, S, H]`` of the embedding ``[V, H]``; ids outside read some row."""
    return embedding.at[token_ids].get(mode="clip")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divide by sqrt(mean(x^2) + eps) over the last axis, in float32, and scale by weight."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return jnp.expand_dims(weight, range(x.ndim - weight.ndim)) * y.astype(x.dtype)


def write_cache(
    keys: jax.Array,
    values: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    requests: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write key and value ``[B, S, N_kv, D]`` at positions ``[B, S]`` into the cache, in place.

    Values are finite in it: where one is not, it is written as 0 and its key as NaN, so that those
    who see it become NaN and all others, such as the next request in its slot, do not.

    With `requests`, ``[1, N]`` int32, key and value ``[1, N, N_kv, D]`` are rows of any requests,
    at ``[1, N]`` positions. A position past the end is not written.
    """
    is_finite = jnp.isfinite(value).all(axis=3, keepdims=True)  # [B, S, N_kv, 1]
    key = jnp.where(is_finite, key, jnp.nan)
    value = jnp.where(is_finite, value, 0)
    num_kv, head_dim = key.shape[2:]
    # [B N_kv, D, T] -> [B, N_kv, D, T], and values likewise
    new_keys = keys.reshape(-1, num_kv, *keys.shape[1:])
    new_values = values.reshape(-1, num_kv, *values.shape[1:])
    mode: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}
    if requests is None:
        requests = jnp.arange(key.shape[0])[:, None]
    else:
        mode = {"mode": "drop"}  # a prompt may come twice
    new_keys = new_keys.at[requests, :, :, positions].set(key, **mode)
    new_values = new_values.at[requests, :, positions].set(value, **mode)
    return new_keys.reshape(keys.shape), new_values.reshape(values.shape)


def move_in_cache(
    cache: tuple[jax.Array, jax.Array], start: jax.Array, path: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a cache in which ``start[b] + j`` holds what ``start[b] + path[b, j]`` held before.

    Args:
      cache: keys ``[B N_kv, D, T]`` and values ``[B N_kv, T, D]`` of a layer, changed in place.
      start: ``[B]`` int32.
      path: ``[B, P]`` int32; nothing is moved to ``start[b] + j`` where it is negative.
    """
    keys, values = cache
    batch_size, length = path.shape
    head_dim, room = keys.shape[1:]
    # [B N_kv, D, T] -> [B, N_kv, D, T], and values likewise
    new_keys = keys.reshape(batch_size, -1, head_dim, room)
    new_values = values.reshape(batch_size, -1, room, head_dim)
    requests = jnp.arange(batch_size)[:, None]
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    # [B, P]: where each entry is, and where it goes. What is not moved goes past the end, to a
    # place of its own, and is dropped.
    source = start[:, None] + path
    target = jnp.where(path < 0, room, start[:, None]) + index
    # [B, P, N_kv, D]
    key = new_keys.at[requests, :, :, source].get(mode="clip")
    value = new_values.at[requests, :, source, :].get(mode="clip")
    # All is read before anything is written. Without the barrier XLA for GPUs reads as it writes,
    # for which it copies the whole cache.
    key, value, new_keys, new_values = jax.lax.optimization_barrier(
        (key, value, new_keys, new_values)
    )
    mode: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    new_keys = new_keys.at[requests, :, :, target].set(key, **mode)
    new_values = new_values.at[requests, :, target, :].set(value, **mode)
    return new_keys.reshape(keys.shape), new_values.reshape(values.shape)


def cached_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    visible: jax.Array | np.ndarray | None = None,
    window: int | None = None,
    start: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns what an `Attend` reads of a cache, and the cache, into which it writes first.

    It is softmax(q k / sqrt(D)) v over the positions that are <= the query's own, ``[B, S]``, which
    follow one another, or as `visible` and `window` say; see `decode_attention`. Bits of `visible`
    count from `start`, ``[B]`` int32; None for the first position that is written.
    """
    cache = write_cache(*cache, key, value, positions)
    read = decode_attention(
        query,
        *cache,
        positions[:, 0] if start is None else start,
        visible=visible,
        window=window,
        finite_cache=True,
    )
    return read, cache


def attention_with_prompts(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    prompts: PromptRows,
    places: tuple[jax.Array, jax.Array],
    visible: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns what the rows of a batch and those of prompts read of a cache, and the cache.

    All are written at once, before any is read, so that the cache is changed in place.

    Args:
      query: ``[1, B S + R P, N, D]``, first the rows of the batch, then those of prompts.
      key: ``[1, B S + R P, N_kv, D]``.
      value: as `key`.
      cache: as for `cached_attention`.
      positions: ``[B, S]`` int32, of the batch.
      prompts: R of them, P rows each.
      places: of `places_of_rows`, the same for all layers.
      visible: as for `cached_attention`, of the batch.
    """
    num_rows, shape = positions.size, prompts.token_ids.shape
    requests, places_in_cache = places
    cache = write_cache(*cache, key, value, places_in_cache, requests)
    # [1, B S + R P, N, D] -> [B, S, N, D] and [R, P, N, D]
    own = query[:, :num_rows].reshape(*positions.shape, *query.shape[2:])
    of_prompts = query[:, num_rows:].reshape(*shape, *query.shape[2:])
    read = decode_attention(own, *cache, positions[:, 0], visible=visible, finite_cache=True)
    keys, values = (_of_slots(x, key.shape[2], prompts.slots) for x in cache)
    prompt_read = decode_attention(of_prompts, keys, values, prompts.start, finite_cache=True)
    rows = [x.reshape(1, -1, *x.shape[2:]) for x in (read, prompt_read)]
    return jnp.concatenate(rows, axis=1), cache


def places_of_rows(
    positions: jax.Array, prompts: PromptRows, longest: int
) -> tuple[jax.Array, jax.Array]:
    """Returns requests and positions ``[1, B S + R P]`` of the rows of a pass with prompts.

    A request that has rows of a prompt keeps these alone: its rows in the batch, at positions
    ``[B, S]``, go to position `longest`, which a cache does not have.
    """
    requests = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    is_read = (requests == prompts.slots[None, :]).any(axis=1, keepdims=True)  # [B, 1]
    # [B, S] and [R, P]: the request of each row
    owners = jnp.broadcast_to(requests, positions.shape)
    owners_of_prompts = jnp.broadcast_to(prompts.slots[:, None], prompts.token_ids.shape)
    return (
        all_rows(owners, owners_of_prompts),
        all_rows(jnp.where(is_read, longest, positions), prompts.positions),
    )


def all_rows(of_batch: jax.Array, of_prompts: jax.Array) -> jax.Array:
    """Returns ``[1, B S + R P]``: what ``[B, S]`` and then ``[R, P]`` hold, row after row."""
    return jnp.concatenate([of_batch.reshape(1, -1), of_prompts.reshape(1, -1)], axis=1)


def _of_slots(cache: jax.Array, num_kv: int, slots: jax.Array) -> jax.Array:
    """Returns keys ``[R N_kv, D, T]`` or values ``[R N_kv, T, D]`` of some requests."""
    each = cache.reshape(-1, num_kv, *cache.shape[1:])
    return each.at[slots].get(mode="clip").reshape(-1, *cache.shape[1:])


def check_length(length: int, cache: Any, name: str = "token_ids") -> None:
    """Check that the caches of layers have positions for so many tokens.

    Raises:
      ValueError: they have not: writing would drop the last tokens.
    """
    most = jax.tree.leaves(cache)[0].shape[-1]
    must = f"have at most {most} tokens per request, as the cache"
    require(length <= most, name, must, length)


def random_weights(shapes: Any, key: jax.Array, dtype: Any, num_layers: int) -> Any:
    """Returns random weights of the structure of `shapes`, which has a shape for each array.

    Matrices are normal with variance 1 / fan-in, those that write to the residual stream divided
    by a further 2 L, with L = num_layers; norms are one, biases zero.
    """
    leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    params = []
    for leaf_key, (path, shape) in zip(jax.random.split(key, len(leaves)), leaves, strict=True):
        name = path[-1].key
        if len(shape) == 1:
            params.append(jnp.full(shape, not name.endswith("bias"), dtype))
            continue
        fan_in = shape[1] if name == "embed_tokens" else shape[0]
        residual = name in ("o_proj", "down_proj")
        scale = (fan_in * (2 * num_layers if residual else 1)) ** -0.5
        params.append((jax.random.normal(leaf_key, shape) * scale).astype(dtype))
    return jax.tree.unflatten(treedef, params)


def check_params(name: str, shapes: Any, params: Any, dtype: Any = None) -> None:
    """Check that weights have the structure and shapes of `shapes`, and a dtype, if it is given.

    Raises:
      TypeError: there are none, or one has another dtype.
      ValueError: one is missing, has another shape, or is not among `shapes`.
    """
    must = "be the weights of the model"
    require(params is not None, name, must, None, "pass its .params", TypeError)
    found = dict(jax.tree.leaves_with_path(params))
    for path, shape in jax.tree.leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple)):
        leaf = found.pop(path, None)
        wanted = "int32" if path[-1].key == "target_ids" else dtype
        has_shape = getattr(leaf, "shape", None) == shape
        if has_shape and wanted in (None, leaf.dtype):
            continue
        must = f"be an array {list(shape)}" + (f" of {wanted}" if wanted else "")
        error = TypeError if has_shape else ValueError
        refuse(error, name + jax.tree_util.keystr(path), must, leaf)
    for path, leaf in found.items():
        one = name + jax.tree_util.keystr(path)
        refuse(ValueError, one, "not be there, as no weight of this config", leaf)
