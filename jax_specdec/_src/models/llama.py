"""A Llama decoder in plain JAX, for one device.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as the Llama checkpoints published
on Hugging Face define them, so that those can be read (`checkpoint`). Weights are stored
`[in, out]`, query/key/value and gate/up fused: XLA on the CPU then reads each matrix once, in
order.

References:
    Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models",
    https://arxiv.org/abs/2302.13971
    Ainslie et al., 2023, "GQA", https://arxiv.org/abs/2305.13245
    Su et al., 2021, "RoFormer", https://arxiv.org/abs/2104.09864
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Llama", "LlamaConfig", "param_shapes"]

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""`attend(layer, query, key, value)`: what a layer's heads read. query `[B, S, N, D]`, key and
value `[B, S, N_kv, D]` of the S new tokens, rotated already; returns `[B, S, N, D]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama decoder; fields are named as in a Hugging Face `config.json`.

    Attributes:
        vocab_size: V, ids the model reads and scores.
        hidden_size: H, width of the residual stream.
        intermediate_size: I, width of the feed-forward layers.
        num_hidden_layers: L.
        num_attention_heads: N, query heads.
        num_key_value_heads: N_kv, heads of keys and values; each serves N / N_kv query heads.
        head_dim: D, width of one head; even.
        rms_norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary wavelengths.
        tie_word_embeddings: the output matrix is the embedding, transposed.
        max_position_embeddings: longest context seen in training; information only.

    Raises:
        ValueError: a size is not a positive integer, or sizes do not fit together.

    Example:
        >>> config = LlamaConfig(
        ...     vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        >>> config.rope_theta
        10000.0
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, not {value!r}.")
            if field.type is float and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{field.name} must be a positive number, not {value!r}.")
        if type(self.tie_word_embeddings) is not bool:
            raise ValueError(
                f"tie_word_embeddings must be true or false, not {self.tie_word_embeddings!r}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, but they are "
                f"{self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}.")


def param_shapes(config: LlamaConfig) -> dict[str, Any]:
    """The params pytree of a config, with a shape in place of each array.

    A dict with `embed_tokens [V, H]`, `norm [H]`, `lm_head [H, V]` (absent if tied), and
    `layers`, a list of one dict per layer: `input_layernorm [H]`, `qkv_proj [H, (N + 2 N_kv) D]`
    (query heads, then key heads, then value heads), `o_proj [N D, H]`,
    `post_attention_layernorm [H]`, `gate_up_proj [H, 2 I]` (gate, then up), `down_proj [I, H]`.
    """
    c = config
    layer = {
        "input_layernorm": (c.hidden_size,),
        "qkv_proj": (
            c.hidden_size,
            (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim,
        ),
        "o_proj": (c.num_attention_heads * c.head_dim, c.hidden_size),
        "post_attention_layernorm": (c.hidden_size,),
        "gate_up_proj": (c.hidden_size, 2 * c.intermediate_size),
        "down_proj": (c.intermediate_size, c.hidden_size),
    }
    shapes = {
        "embed_tokens": (c.vocab_size, c.hidden_size),
        "layers": [dict(layer) for _ in range(c.num_hidden_layers)],
        "norm": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head"] = (c.hidden_size, c.vocab_size)
    return shapes


@dataclasses.dataclass(frozen=True)
class Llama:
    """A Llama decoder; a `CausalModel`.

    The cache is a list of one `(keys, values)` pair per layer, keys `[B N_kv, D, T]` and values
    `[B N_kv, T, D]` in the compute dtype: the layouts in which attention reads them, so that XLA
    neither transposes nor copies a cache in a loop (if B N_kv is one, it copies).

    Attributes:
        config: the sizes.
        dtype: compute dtype of matrix products, residual stream, cache and logits. Norms, rotary
            angles and the attention softmax are float32 whatever it is.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = Llama(LlamaConfig(
        ...     vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8))
        >>> params = model.init_params(jax.random.key(0))
        >>> cache = model.init_cache(batch_size=1, max_length=16)
        >>> logits, cache = model.apply(
        ...     params, jnp.array([[104, 105, 33]]), jnp.array([0]), cache)
        >>> logits.shape
        (1, 3, 256)
    """

    config: LlamaConfig
    dtype: Any = jnp.dtype("float32")

    def __post_init__(self) -> None:
        dtype = jnp.dtype(self.dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype must be a floating dtype, not {dtype}.")
        object.__setattr__(self, "dtype", dtype)

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary axis of the logits."""
        return self.config.vocab_size

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        """Random weights in the compute dtype, of the structure of `param_shapes`.

        Matrices are normal with variance 1 / fan-in, those that write to the residual stream
        divided by a further 2 L; norms are one.

        Args:
            key: a typed PRNG key.
        """
        leaves, treedef = jax.tree.flatten_with_path(
            param_shapes(self.config), is_leaf=lambda x: isinstance(x, tuple)
        )
        params = []
        for leaf_key, (path, shape) in zip(jax.random.split(key, len(leaves)), leaves, strict=True):
            name = path[-1].key
            if len(shape) == 1:
                params.append(jnp.ones(shape, self.dtype))
                continue
            fan_in = shape[1] if name == "embed_tokens" else shape[0]
            residual = name in ("o_proj", "down_proj")
            scale = (fan_in * (2 * self.config.num_hidden_layers if residual else 1)) ** -0.5
            params.append((jax.random.normal(leaf_key, shape) * scale).astype(self.dtype))
        return jax.tree.unflatten(treedef, params)

    def init_cache(self, batch_size: int, max_length: int) -> list[tuple[jax.Array, jax.Array]]:
        """An empty cache for B = batch_size requests of at most T = max_length positions."""
        c = self.config
        heads = batch_size * c.num_key_value_heads
        keys, values = (heads, c.head_dim, max_length), (heads, max_length, c.head_dim)
        return [
            (jnp.zeros(keys, self.dtype), jnp.zeros(values, self.dtype))
            for _ in range(c.num_hidden_layers)
        ]

    def apply(
        self,
        params: dict[str, Any],
        token_ids: jax.Array,
        start: jax.Array,
        cache: list[tuple[jax.Array, jax.Array]],
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """Runs S consecutive tokens of each request; see `CausalModel.apply`.

        Args:
            params: weights of the structure and shapes of `param_shapes`, in the compute dtype.
            token_ids: `[B, S]` int32; ids outside the vocabulary, such as -1, are read as some
                id in it.
            start: `[B]` int32, absolute position of each request's first token.
            cache: from `init_cache` or a previous call.

        Returns:
            Logits `[B, S, V]` in the compute dtype, and the cache.

        Raises:
            ValueError: a shape does not fit the config or the other arguments.
            TypeError: ids or positions are not int32, or weights or cache not of the compute dtype.
        """
        _check_integers("token_ids", token_ids, 2)
        _check_integers("start", start, 1)
        batch_size, length = token_ids.shape
        if start.shape != (batch_size,):
            raise ValueError(
                f"start must have shape {(batch_size,)}, one position per row of token_ids, "
                f"but has {start.shape}."
            )
        _check_cache(self, cache, batch_size, length)
        positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        new_cache = list(cache)

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            keys, values = _write(*cache[layer], key, value, positions)
            new_cache[layer] = (keys, values)
            return _attention(query, keys, values, positions)

        _check_params(self, params)
        embedded = params["embed_tokens"].at[token_ids].get(mode="clip")
        return self.run(params, embedded, positions, attend), new_cache

    def run(
        self,
        params: dict[str, Any],
        embedded: jax.Array,
        positions: jax.Array,
        attend: Attend,
        regularize: Callable[[jax.Array], jax.Array] = lambda branch: branch,
    ) -> jax.Array:
        """The decoder around a given attention: what `apply` and training share.

        Args:
            params: weights of the structure and shapes of `param_shapes`, in the compute dtype.
            embedded: `[B, S, H]`, rows of the embedding, in the compute dtype.
            positions: `[B, S]` int32, absolute positions, for the rotary embedding.
            attend: called once per layer with rotated queries and keys; see `Attend`.
            regularize: applied to the `[B, S, H]` that each half of a layer adds to the residual
                stream; training drops parts of it.

        Returns:
            Logits `[B, S, V]` in the compute dtype.
        """
        c = self.config
        num_query, num_kv = c.num_attention_heads, c.num_key_value_heads
        leading = embedded.shape[:2]
        rotation = _rotation(positions, c.head_dim, c.rope_theta)
        x = embedded
        for index, layer in enumerate(params["layers"]):
            h = _rms_norm(x, layer["input_layernorm"], c.rms_norm_eps)
            heads = (h @ layer["qkv_proj"]).reshape(*leading, num_query + 2 * num_kv, c.head_dim)
            query, key, value = jnp.split(heads, [num_query, num_query + num_kv], axis=2)
            read = attend(index, _rotate(query, rotation), _rotate(key, rotation), value)
            read = read.reshape(*leading, num_query * c.head_dim)
            x = x + regularize(read @ layer["o_proj"])
            h = _rms_norm(x, layer["post_attention_layernorm"], c.rms_norm_eps)
            gate, up = jnp.split(h @ layer["gate_up_proj"], 2, axis=2)
            x = x + regularize((jax.nn.silu(gate) * up) @ layer["down_proj"])
        x = _rms_norm(x, params["norm"], c.rms_norm_eps)
        if c.tie_word_embeddings:
            return jnp.einsum("vh,bsh->bsv", params["embed_tokens"], x)  # faster than x @ E.T
        return x @ params["lm_head"]


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides by sqrt(mean(x^2) + eps) over the last axis, in float32, and scales by weight."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return jnp.expand_dims(weight, range(x.ndim - 1)) * y.astype(x.dtype)


def _rotation(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """The cos and sin of position * theta^(-2i/D), i < D/2: two `[B, S, 1, D/2]` float32."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(
        frequencies[None, None, None, :], jnp.float32
    )
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (x[i], x[i + D/2]) of each head by their angles, in float32."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _write(
    keys: jax.Array, values: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes key and value `[B, S, N_kv, D]` at positions `[B, S]` into the cache, in place."""
    batch_size, _, num_kv, head_dim = key.shape
    requests = jnp.arange(batch_size)[:, None]
    new_keys = keys.reshape(batch_size, num_kv, head_dim, -1)
    new_values = values.reshape(batch_size, num_kv, -1, head_dim)
    mode: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}
    new_keys = new_keys.at[requests, :, :, positions].set(key, **mode)
    new_values = new_values.at[requests, :, positions].set(value, **mode)
    return new_keys.reshape(keys.shape), new_values.reshape(values.shape)


def _attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array
) -> jax.Array:
    """softmax(q k / sqrt(D)) v over the cache positions that are <= the query's own.

    query `[B, S, N, D]`, keys and values as in the cache, positions `[B, S]`; `[B, S, N, D]`.
    """
    batch_size, length, num_query, head_dim = query.shape
    max_length = keys.shape[2]
    num_kv = keys.shape[0] // batch_size
    group = num_query // num_kv
    # The query heads that share keys are further rows of one matrix product with them.
    split = (batch_size, num_kv, length, group)
    rows = (batch_size * num_kv, length * group)
    query = query.reshape(batch_size, length, num_kv, group, head_dim).swapaxes(1, 2)
    visible = jnp.arange(max_length, dtype=jnp.int32)[None, None, :] <= positions[:, :, None]
    visible = jnp.broadcast_to(visible[:, None, :, None, :], (*split, max_length))
    scores = jnp.matmul(
        query.reshape(*rows, head_dim), keys, preferred_element_type=jnp.float32
    ) * (head_dim**-0.5)
    scores = jnp.where(visible.reshape(*rows, max_length), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    read = jnp.matmul(weights, values).reshape(*split, head_dim)
    return read.swapaxes(1, 2).reshape(batch_size, length, num_query, head_dim)


def _check_integers(name: str, value: jax.Array, ndim: int) -> None:
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, but has shape {value.shape}.")
    if value.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, not {value.dtype}.")


def _check_params(model: Llama, params: dict[str, Any]) -> None:
    found = dict(jax.tree.leaves_with_path(params))
    shapes = param_shapes(model.config)
    for path, shape in jax.tree.leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple)):
        name = "params" + jax.tree_util.keystr(path)
        if path not in found:
            raise ValueError(f"{name} must have shape {shape}, but is missing.")
        leaf = found.pop(path)
        if leaf.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, but has {leaf.shape}.")
        if leaf.dtype != model.dtype:
            raise TypeError(f"{name} must be {model.dtype}, not {leaf.dtype}.")
    if found:
        name = "params" + jax.tree_util.keystr(next(iter(found)))
        raise ValueError(f"{name} is not a weight of this config.")


def _check_cache(model: Llama, cache: Any, batch_size: int, length: int) -> None:
    c = model.config
    if [len(pair) for pair in cache] != [2] * c.num_hidden_layers:
        raise ValueError(
            f"cache must be a list of {c.num_hidden_layers} (keys, values) pairs, from init_cache."
        )
    max_length = cache[0][0].shape[-1]
    expected = jax.eval_shape(lambda: model.init_cache(batch_size, max_length))
    for found, wanted in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        if found.shape != wanted.shape:
            raise ValueError(
                f"cache for {batch_size} requests must hold arrays of shape {wanted.shape}, "
                f"but one has {found.shape}."
            )
        if found.dtype != wanted.dtype:
            raise TypeError(f"cache must be {wanted.dtype}, not {found.dtype}.")
    if length > max_length:
        raise ValueError(
            f"token_ids has {length} tokens per request, but the cache holds {max_length}."
        )
