"""The parts of a decoder layer in plain JAX: what `Llama` and `Eagle3Head` are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.arrays import refuse, require
from jax_specdec.lm.models.llama_config import LlamaConfig
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
