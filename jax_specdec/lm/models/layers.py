"""The parts of a decoder layer in plain JAX: what `Llama` and the heads are made of.

Functions of a `LayerSpec`, its weights and rows ``[B, S, ...]``. None knows of a cache: what
attention reads is a function, `Attend`, which the caller gives (`cache.Pass.attend` in a pass, the
whole sequence in training). At the end: random weights, and the check of weights.

References:
  Su et al., 2021, "RoFormer", https://arxiv.org/abs/2104.09864
  Grattafiori et al., 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base.arrays import refuse, require
from jax_specdec.lm.models.config import LayerSpec, Norm, Rotation, Shapes
from jax_specdec.lm.models.int8 import Int8Weight, has_outputs_first, is_int8, matmul
from jax_specdec.lm.models.protocol import Params, check_leaf

LayerWeights = dict[str, Any]
"""The weights of one decoder layer, arrays or `Int8Weight`s; see `layer_shapes`."""

Weights = dict[str, Any]
"""The params of a decoder or head: arrays, and the weights of its layers; see `param_shapes`."""

NewHeads = jax.Array | None
"""Keys or values of the new tokens, an array; None where a layer reads those of another."""

Attend = Callable[[jax.Array, NewHeads, NewHeads], jax.Array]
"""`attend(query, key, value)`: what the heads of a layer read. query ``[B, S, N, D]``, key and
value ``[B, S, N_kv, D]`` of the S new tokens, rotated already; returns ``[B, S, N, D]``."""

AttendInLayer = Callable[[int, jax.Array, NewHeads, NewHeads], jax.Array]
"""An `Attend` in one of several layers, whose index comes first."""

Regularize = Callable[[jax.Array], jax.Array]
"""Applied to the ``[B, S, H]`` that each half of a layer adds to the residual stream. It may be a
sum over devices: each weight of a branch before it is cut in `TensorParallelLlama`, biases too."""


def unchanged(branch: jax.Array) -> jax.Array:
    """Returns its argument: the `Regularize` that does nothing."""
    return branch


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""Functions of the gate, by their names in a `LayerSpec`."""


def decoder_layer(
    spec: LayerSpec,
    layer: LayerWeights,
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
    regularize: Regularize = unchanged,
    layer_input: jax.Array | None = None,
) -> jax.Array:
    """Returns the residual stream ``[B, S, H]`` after one more layer.

    Args:
      spec: what the layer is.
      x: ``[B, S, H]``, the residual stream before it.
      cos_sin: of `rotation`, at the positions of the tokens.
      regularize: applied to what each half of the layer computes, before any norm after it.
      layer_input: ``[B, S, P]``, what the layer gets of each token; None for a layer without.
    """

    def normed(name: str, rows: jax.Array) -> jax.Array:
        return rms_norm(rows, layer[name], spec.norm)

    # x = x + attention(norm(x))
    h = normed("input_layernorm", x)
    branch = regularize(self_attention(spec, layer, h, cos_sin, attend))
    if spec.norms == "before":
        x = x + branch
        h = normed("post_attention_layernorm", x)
    else:  # x = x + norm(attention(norm(x)))
        x = x + normed("post_attention_layernorm", branch)
        h = normed("pre_feedforward_layernorm", x)
    # x = x + mlp(norm(x)), or x + norm(mlp(norm(x)))
    branch = regularize(feed_forward(spec, layer, h))
    if spec.norms == "around":
        branch = normed("post_feedforward_layernorm", branch)
    x = x + branch
    if layer_input is not None:
        # x = x + norm(W (gelu(W_gate x) p)): [B, S, H] -> [B, S, P] -> [B, S, H]
        gate = ACTIVATIONS[spec.activation](matmul(x, layer["per_layer_input_gate"]))
        branch = matmul(gate * layer_input, layer["per_layer_projection"])
        x = x + normed("post_per_layer_input_norm", branch)
    # [1] -> [1, 1, 1], of all rows and columns
    return x * layer["layer_scalar"][None, None, :] if spec.has_scalar else x


def self_attention(
    spec: LayerSpec,
    layer: LayerWeights,
    h: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
) -> jax.Array:
    """Returns what attention computes of normed rows, ``[B, S, H]``.

    Args:
      spec: heads, and the switches of queries, keys and values.
      h: ``[B, S, W]``, normed; W is the number of rows of ``qkv_proj``.
      cos_sin: of `rotation`, at the positions of the tokens.
      attend: what the heads read.
    """
    query, key, value = rotated_heads(spec, layer, h, cos_sin)
    read = attend(query, key, value)
    # [B, S, N, D] -> [B, S, N D] -> [B, S, H]
    branch = matmul(read.reshape(*h.shape[:2], spec.head_sizes[0]), layer["o_proj"])
    if spec.o_bias:
        branch = branch + layer["o_bias"][None, None, :]
    return branch


def rotated_heads(
    spec: LayerSpec, layer: LayerWeights, h: jax.Array, cos_sin: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, NewHeads, NewHeads]:
    """Returns query ``[B, S, N, D]``, key and value ``[B, S, N_kv, D]`` of `self_attention`.

    Key and value are None where the layer has those of another.
    """
    batch_size, length = h.shape[:2]
    num_query = spec.num_attention_heads
    num_kv = spec.num_key_value_heads
    # [B, S, W] -> [B, S, (N + 2 N_kv) D]: one product for all heads
    heads = matmul(h, layer["qkv_proj"])
    if spec.qkv_bias:
        heads = heads + layer["qkv_bias"][None, None, :]
    # -> [B, S, N + 2 N_kv, D]: query heads, then key heads, then value heads, as far as there are
    num_heads = heads.shape[2] // spec.head_dim
    heads = heads.reshape(batch_size, length, num_heads, spec.head_dim)
    query = heads[:, :, :num_query]
    if spec.qk_norm:
        # over D, before the rotation
        query = rms_norm(query, layer["q_norm"], spec.norm)
    query = rotate(query, cos_sin)
    if spec.keys_of is not None:
        return query, None, None
    key = heads[:, :, num_query : num_query + num_kv]
    # The last N_kv heads: with `value_is_key` those are the keys, before norm and rotation.
    value = heads[:, :, -num_kv:]
    if spec.v_norm:
        value = rms_norm(value, None, spec.norm)
    if spec.qk_norm:
        key = rms_norm(key, layer["k_norm"], spec.norm)
    return query, rotate(key, cos_sin), value


def rotations(
    layers: Sequence[LayerSpec], positions: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the `rotation` of each layer; layers of one kind share it."""
    # A dict as an ordered set: the program has one cos and sin for each kind, in a fixed order.
    kinds = {(spec.rotation, spec.head_dim): None for spec in layers}
    by_kind = {kind: rotation(positions, *kind) for kind in kinds}
    return [by_kind[spec.rotation, spec.head_dim] for spec in layers]


def rotation(positions: jax.Array, kind: Rotation, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Returns the cos and sin of position * frequency: two ``[B, S, 1, D/2]`` float32."""
    # [B, S] * [D/2] -> [B, S, 1, D/2]: the same for all heads. In float32, whatever the compute
    # dtype: bfloat16 has not even all positions above 256.
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(
        kind.frequencies(head_dim)[None, None, None, :], jnp.float32
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns ``[B, S, N, D]``, the pairs (x[i], x[i + D/2]) of each head turned, in float32."""
    cos, sin = rotation
    # [B, S, N, D] -> two [B, S, N, D/2]: pair i is x[i] and x[i + D/2], as in Hugging Face's files
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    # (a, b) -> (a cos - b sin, b cos + a sin)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def feed_forward(spec: LayerSpec, layer: LayerWeights, h: jax.Array) -> jax.Array:
    """Returns what a gated feed-forward layer computes of normed rows, ``[B, S, H]`` both."""
    # [B, S, H] -> [B, S, 2 I] -> [B, S, I] twice
    gate, up = jnp.split(matmul(h, layer["gate_up_proj"]), 2, axis=2)
    # silu(g) u, or gelu(g) u: [B, S, I] -> [B, S, H]
    return matmul(ACTIVATIONS[spec.activation](gate) * up, layer["down_proj"])


def output_logits(
    x: jax.Array,
    lm_head: jax.Array | Int8Weight,
    tied: bool,
    num_token_ids: int | None,
    softcap: float | None = None,
) -> jax.Array:
    """Returns logits ``[B, S, V]`` of normed states ``[B, S, H]``.

    Args:
      lm_head: ``[H, V]``, or the embedding ``[V, H]`` if `tied`.
      tied: whether the output matrix is an embedding, if it is an array.
      num_token_ids: logits of ids from this on are -inf; None for none.
      softcap: ``softcap * tanh(x / softcap)`` stands for each logit x; None for x.
    """
    # [B, S, H] -> [B, S, V]
    logits = matmul(x, lm_head, outputs_first=tied)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if num_token_ids is None:
        return logits
    # [V] -> [1, 1, V]: padding of the vocabulary axis is never drawn
    is_token = jnp.arange(logits.shape[2], dtype=jnp.int32) < num_token_ids
    return jnp.where(is_token[None, None, :], logits, -jnp.inf)


def embed_tokens(embedding: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Returns rows ``[B, S, H]`` of the embedding ``[V, H]``; ids outside read some row."""
    # Loops pass any id in padding. By default, one past the end would read NaN.
    return embedding.at[token_ids].get(mode="clip")


def rms_norm(x: jax.Array, weight: jax.Array | None, norm: Norm) -> jax.Array:
    """Returns weight * x / sqrt(mean(x^2) + eps), the mean over the last axis, in float32.

    Without a weight, it is 1.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm.rms_norm_eps)
    if weight is None:
        return y.astype(x.dtype)
    if norm.in_float32:
        weight = weight.astype(jnp.float32)
    if norm.adds_one:
        weight = 1 + weight
    # [n] -> [1, .., 1, n], or [A, n] -> [1, .., A, n] where features of A layers are normed
    weight = jnp.expand_dims(weight, range(x.ndim - weight.ndim))
    if not norm.in_float32:
        # It is rounded before it is scaled, as in `transformers`.
        y = y.astype(x.dtype)
    return (weight * y).astype(x.dtype)


def random_weights(
    shapes: Shapes, key: jax.Array, dtype: np.dtype, layers: Sequence[LayerSpec]
) -> Weights:
    """Returns random weights of the structure of `shapes`.

    Matrices are normal with variance 1 / fan-in, those that write to the residual stream divided
    by a further 2 L, with L the number of layers; norms and scalars multiply by one, biases are
    zero.
    """
    leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=is_shape)
    arrays = []
    for leaf_key, (path, shape) in zip(jax.random.split(key, len(leaves)), leaves, strict=True):
        name = path[-1].key
        if len(shape) == 1:
            # Of a norm, a scalar or a bias, of ["layers"][index] or beside the layers. Where 1 + w
            # stands for w, a norm that multiplies by one has w = 0.
            norm = layers[path[1].idx if len(path) == 3 else -1].norm
            is_zero = name.endswith("bias") or (norm.adds_one and name != "layer_scalar")
            arrays.append(jnp.full(shape, 0 if is_zero else 1, dtype))
            continue
        # An embedding is [V, H], the rows of groups of ids [M, V / M, H]; all others [in, out].
        is_by_id = name.startswith("embed_tokens") or len(shape) > 2
        fan_in = shape[-1] if is_by_id else shape[0]
        if name in ("o_proj", "down_proj"):
            fan_in *= 2 * len(layers)
        arrays.append((jax.random.normal(leaf_key, shape) * fan_in**-0.5).astype(dtype))
    return jax.tree.unflatten(treedef, arrays)


def check_weights(name: str, shapes: Shapes, params: Params, dtype: np.dtype | None = None) -> None:
    """Checks that weights have the structure and shapes of `shapes`, and a dtype, if it is given.

    Args:
      shapes: of `param_shapes`, or those of a head.
      dtype: of all arrays but `target_ids`, which are int32; None for any.

    Raises:
      TypeError: no mapping of weights, or one has another dtype.
      ValueError: one is missing, has another shape, or is not among `shapes`.
    """
    must = "be the weights of the model"
    require(isinstance(params, Mapping), name, must, params, "pass its .params", TypeError)
    # By path: each that `shapes` names is taken out, and what is left has no place in the model.
    leaves = dict(jax.tree.leaves_with_path(params, is_leaf=is_int8))
    embedding = shapes["embed_tokens"]
    if "lm_head" not in shapes and is_int8(params.get("lm_head")):
        shapes = shapes | {"lm_head": embedding}  # beside an embedding that is the output matrix
    for path, shape in jax.tree.leaves_with_path(shapes, is_leaf=is_shape):
        leaf_name = name + jax.tree_util.keystr(path)
        leaf = leaves.pop(path, None)
        if isinstance(leaf, Int8Weight):
            # Its integers are [.., out, in], its scales [.., out], with the axis of devices if the
            # weights are split; `shapes` says [.., in, out] of most matrices.
            if not has_outputs_first(path[-1].key, shape, embedding):
                shape = (*shape[:-2], shape[-1], shape[-2])
            check_leaf(f"{leaf_name}.values", leaf.values, shape, jnp.dtype("int8"))
            check_leaf(f"{leaf_name}.scale", leaf.scale, shape[:-1], jnp.dtype("float32"))
            continue
        wanted = jnp.dtype("int32") if path[-1].key == "target_ids" else dtype
        check_leaf(leaf_name, leaf, shape, wanted)
    for path, leaf in leaves.items():
        leaf_name = name + jax.tree_util.keystr(path)
        refuse(ValueError, leaf_name, "not be there, as no weight of this config", leaf)


def is_shape(value: object) -> bool:
    """Returns whether a value is the shape of an array: a leaf, for JAX's functions of trees."""
    return isinstance(value, tuple)
