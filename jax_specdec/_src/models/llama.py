"""A Llama decoder in plain JAX, for one device; `tensor_parallel` spreads it over several.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as the Llama checkpoints published
on Hugging Face define them, so that those can be read (`checkpoint`); Qwen2's biases and Qwen3's
norms of queries and keys are switches of the config. Weights are stored `[in, out]`,
query/key/value and gate/up fused: XLA on the CPU then reads each matrix once, in order.

References:
    Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models",
    https://arxiv.org/abs/2302.13971
    Ainslie et al., 2023, "GQA", https://arxiv.org/abs/2305.13245
    Qwen Team, 2024, "Qwen2 Technical Report", https://arxiv.org/abs/2407.10671
    Qwen Team, 2025, "Qwen3 Technical Report", https://arxiv.org/abs/2505.09388
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.models.llama_config import LlamaConfig, param_shapes, stacked_shapes
from jax_specdec._src.models.rotary import frequencies, rotate, rotation

__all__ = ["Llama", "LlamaConfig", "param_shapes", "stack_layers", "unstack_layers"]

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""`attend(layer, query, key, value)`: what a layer's heads read. query `[B, S, N, D]`, key and
value `[B, S, N_kv, D]` of the S new tokens, rotated already; returns `[B, S, N, D]`."""


@dataclasses.dataclass(frozen=True)
class Llama:
    """A Llama decoder; a `CausalModel`.

    The cache is a list of one `(keys, values)` pair per layer, keys `[B N_kv, D, T]` and values
    `[B N_kv, T, D]` in the compute dtype: the layouts in which attention reads them, so that XLA
    neither transposes nor copies a cache in a loop (if B N_kv is one, it copies). With
    `scan_layers` it is one such pair, of arrays with a leading axis of L.

    Attributes:
        config: the sizes.
        dtype: compute dtype of matrix products, residual stream, cache and logits. Norms, rotary
            angles and the attention softmax are float32 whatever it is.
        scan_layers: compile one layer and loop over it, instead of all L one after another. A
            program compiles several times as fast, and a pass over a few tokens takes longer,
            because each layer's weights are copied out of arrays that hold those of all layers
            (docs/compile_time.md has figures). Weights are then those of `stack_layers`.

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
    scan_layers: bool = False

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
        """Random weights in the compute dtype, of the structure that `apply` takes.

        Matrices are normal with variance 1 / fan-in, those that write to the residual stream
        divided by a further 2 L; norms are one, biases zero.

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
                params.append(jnp.full(shape, name != "qkv_bias", self.dtype))
                continue
            fan_in = shape[1] if name == "embed_tokens" else shape[0]
            residual = name in ("o_proj", "down_proj")
            scale = (fan_in * (2 * self.config.num_hidden_layers if residual else 1)) ** -0.5
            params.append((jax.random.normal(leaf_key, shape) * scale).astype(self.dtype))
        listed = jax.tree.unflatten(treedef, params)
        return stack_layers(listed) if self.scan_layers else listed

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """An empty cache for B = batch_size requests of at most T = max_length positions."""
        c = self.config
        heads = batch_size * c.num_key_value_heads
        keys, values = (heads, c.head_dim, max_length), (heads, max_length, c.head_dim)
        layers = c.num_hidden_layers
        if self.scan_layers:
            return jnp.zeros((layers, *keys), self.dtype), jnp.zeros((layers, *values), self.dtype)
        return [(jnp.zeros(keys, self.dtype), jnp.zeros(values, self.dtype)) for _ in range(layers)]

    def apply(
        self,
        params: dict[str, Any],
        token_ids: jax.Array,
        start: jax.Array,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """Runs S consecutive tokens of each request; see `CausalModel.apply`.

        Args:
            params: weights of the structure and shapes of `param_shapes`, in the compute dtype;
                with `scan_layers` those of `stack_layers`.
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
        return self.apply_with(params, token_ids, start, cache, _embed)

    def apply_with(
        self,
        params: dict[str, Any],
        token_ids: jax.Array,
        start: jax.Array,
        cache: Any,
        embed: Callable[[jax.Array, jax.Array], jax.Array],
        regularize: Callable[[jax.Array], jax.Array] = lambda branch: branch,
    ) -> tuple[jax.Array, Any]:
        """`apply` with another way to read embeddings, or to end a branch.

        Args:
            params: as in `apply`.
            token_ids: as in `apply`.
            start: as in `apply`.
            cache: as in `apply`.
            embed: `embed(embed_tokens, token_ids)`: the rows `[B, S, H]`.
            regularize: as in `run`.

        Returns:
            As `apply`.
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
        _check_params(self, params)
        positions = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        embedded = embed(params["embed_tokens"], token_ids)
        if self.scan_layers:
            return self._scan(params, embedded, positions, cache, regularize)
        new_cache = list(cache)

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            keys, values = cache[layer]
            keys, values = _write(keys, values, key, value, positions)
            new_cache[layer] = (keys, values)
            return _attention(query, keys, values, positions)

        return self.run(params, embedded, positions, attend, regularize), new_cache

    def _scan(
        self,
        params: dict[str, Any],
        embedded: jax.Array,
        positions: jax.Array,
        cache: tuple[jax.Array, jax.Array],
        regularize: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """`run` and the cache, in a loop over stacked layers."""
        cos_sin = self._rotation(positions)

        def step(carry: Any, given: Any) -> tuple[Any, None]:
            x, keys, values = carry
            layer, index = given

            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                nonlocal keys, values
                written = _write(keys, values, key, value, positions, index)
                # Otherwise XLA writes a second time, into a copy of the whole cache, as it reads.
                keys, values = lax.optimization_barrier(written)
                return _attention(query, keys[index], values[index], positions)

            x = self._layer(layer, x, cos_sin, attend, regularize)
            return (x, keys, values), None

        indices = jnp.arange(self.config.num_hidden_layers, dtype=jnp.int32)
        carry, _ = lax.scan(step, (embedded, *cache), (params["layers"], indices))
        x, keys, values = carry
        return self._logits(params, x), (keys, values)

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
            params: weights of the structure and shapes of `param_shapes`, in the compute dtype, not
                stacked.
            embedded: `[B, S, H]`, rows of the embedding, in the compute dtype.
            positions: `[B, S]` int32, absolute positions, for the rotary embedding.
            attend: called once per layer with rotated queries and keys; see `Attend`.
            regularize: applied to the `[B, S, H]` that each half of a layer adds to the residual
                stream; training drops parts of it, `TensorParallelLlama` sums it over devices.

        Returns:
            Logits `[B, S, V]` in the compute dtype.
        """
        cos_sin = self._rotation(positions)
        x = embedded
        for index, layer in enumerate(params["layers"]):
            x = self._layer(layer, x, cos_sin, functools.partial(attend, index), regularize)
        return self._logits(params, x)

    def _rotation(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rotation(positions, frequencies(c.head_dim, c.rope_theta, c.rope_scaling))

    def _layer(
        self,
        layer: dict[str, jax.Array],
        x: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
        regularize: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """The residual stream `[B, S, H]` after one more layer."""
        c = self.config
        num_query, num_kv = c.num_attention_heads, c.num_key_value_heads
        leading = x.shape[:2]
        h = _rms_norm(x, layer["input_layernorm"], c.rms_norm_eps)
        heads = h @ layer["qkv_proj"]
        if c.qkv_bias:
            heads = heads + layer["qkv_bias"][None, None, :]
        heads = heads.reshape(*leading, num_query + 2 * num_kv, c.head_dim)
        query, key, value = jnp.split(heads, [num_query, num_query + num_kv], axis=2)
        if c.qk_norm:
            query = _rms_norm(query, layer["q_norm"], c.rms_norm_eps)
            key = _rms_norm(key, layer["k_norm"], c.rms_norm_eps)
        read = attend(rotate(query, cos_sin), rotate(key, cos_sin), value)
        read = read.reshape(*leading, num_query * c.head_dim)
        x = x + regularize(read @ layer["o_proj"])
        h = _rms_norm(x, layer["post_attention_layernorm"], c.rms_norm_eps)
        gate, up = jnp.split(h @ layer["gate_up_proj"], 2, axis=2)
        return x + regularize((jax.nn.silu(gate) * up) @ layer["down_proj"])

    def _logits(self, params: dict[str, Any], x: jax.Array) -> jax.Array:
        """Logits `[B, S, V]` of the residual stream after the last layer."""
        c = self.config
        x = _rms_norm(x, params["norm"], c.rms_norm_eps)
        if c.tie_word_embeddings:
            logits = jnp.einsum("vh,bsh->bsv", params["embed_tokens"], x)  # faster than x @ E.T
        else:
            logits = x @ params["lm_head"]
        if c.num_token_ids is None:
            return logits
        is_token = jnp.arange(c.vocab_size, dtype=jnp.int32) < c.num_token_ids
        return jnp.where(is_token[None, None, :], logits, -jnp.inf)


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The weights of a `Llama` for `scan_layers`: ``layers`` as one dict of `[L, ...]` arrays.

    Args:
        params: of the structure of `param_shapes`, where ``layers`` is a list of dicts.

    Returns:
        New arrays for the layers; the others are shared.

    Example:
        >>> import dataclasses
        >>> import jax_specdec as sd
        >>> _, (model, params) = sd.load_embedded_pair()
        >>> model, params = dataclasses.replace(model, scan_layers=True), sd.stack_layers(params)
        >>> params["layers"]["input_layernorm"].shape[0] == model.config.num_hidden_layers
        True
    """
    return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `stack_layers`.

    Example:
        >>> import jax_specdec as sd
        >>> _, (model, params) = sd.load_embedded_pair()
        >>> len(sd.unstack_layers(sd.stack_layers(params))["layers"])
        2
    """
    layers = params["layers"]
    size = len(next(iter(layers.values())))
    return {**params, "layers": [{k: x[i] for k, x in layers.items()} for i in range(size)]}


def _embed(embed_tokens: jax.Array, token_ids: jax.Array) -> jax.Array:
    return embed_tokens.at[token_ids].get(mode="clip")


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides by sqrt(mean(x^2) + eps) over the last axis, in float32, and scales by weight."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return jnp.expand_dims(weight, range(x.ndim - 1)) * y.astype(x.dtype)


def _write(
    keys: jax.Array,
    values: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes key and value `[B, S, N_kv, D]` at positions `[B, S]` into the cache, in place.

    It is one layer's, or has an axis of layers, of which `layer` is one.
    """
    batch_size, _, num_kv, head_dim = key.shape
    requests = jnp.arange(batch_size)[:, None]
    one = () if layer is None else (layer,)
    new_keys = keys.reshape(*keys.shape[:-3], batch_size, num_kv, head_dim, -1)
    new_values = values.reshape(*values.shape[:-3], batch_size, num_kv, -1, head_dim)
    mode: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}
    new_keys = new_keys.at[*one, requests, :, :, positions].set(key, **mode)
    new_values = new_values.at[*one, requests, :, positions].set(value, **mode)
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
    shapes = stacked_shapes(model.config) if model.scan_layers else param_shapes(model.config)
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
    wanted = f"a list of {c.num_hidden_layers} (keys, values) pairs"
    if model.scan_layers:
        wanted = "one pair (keys, values) of all layers"
    structure: Any = jax.tree.structure(jax.eval_shape(lambda: model.init_cache(1, 1)))
    if jax.tree.structure(cache) != structure:
        raise ValueError(f"cache must be {wanted}, from init_cache.")
    max_length = jax.tree.leaves(cache)[0].shape[-1]
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
