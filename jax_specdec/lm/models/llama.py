"""A Llama decoder in plain JAX, for one device; `tensor_parallel` spreads it over several.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as the Llama checkpoints published
on Hugging Face define them, so that those can be read (`checkpoint`); Qwen2's biases and Qwen3's
norms of queries and keys are switches of the config. Weights are stored ``[in, out]``,
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

from jax_specdec._src.arrays import (
    Sizes,
    check_array,
    check_increasing,
    checked_dtype,
)
from jax_specdec._src.tree import TreeRows
from jax_specdec.lm.models.layers import (
    all_rows,
    attention_with_prompts,
    cached_attention,
    check_length,
    check_params,
    decoder_layer,
    embed_tokens,
    move_in_cache,
    output_logits,
    places_of_rows,
    random_weights,
    rms_norm,
)
from jax_specdec.lm.models.llama_config import LlamaConfig, param_shapes, stacked_shapes
from jax_specdec.lm.models.protocol import PromptRows, TargetOutput
from jax_specdec.lm.models.rotary import rotation


@dataclasses.dataclass(frozen=True)
class Llama:
    """A Llama decoder; a `CausalModel`.

    The cache is a list of one `(keys, values)` pair per layer, keys ``[B N_kv, D, T]`` and values
    ``[B N_kv, T, D]`` in the compute dtype: the layouts in which attention reads them, so that XLA
    neither transposes nor copies a cache in a loop (if B N_kv is one, it copies). With
    `scan_layers` it is one such pair, of arrays with a leading axis of L.

    Attributes:
      config: the sizes.
      dtype: compute dtype of matrix products, residual stream, cache and logits. Norms, rotary
        angles and the attention softmax are float32 whatever it is.
      scan_layers: compile one layer and loop over it, instead of all L one after another. A program
        compiles several times as fast, and a pass over a few tokens takes longer, because each
        layer's weights are copied out of arrays that hold those of all layers (docs/models.md
        has figures). Weights are then those of `stack_layers`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> model = Llama(LlamaConfig(
      ...     vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
      ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8))
      >>> params = jax.jit(model.init_params)(jax.random.key(0))
      >>> cache = model.init_cache(batch_size=1, max_length=16)
      >>> apply = jax.jit(model.apply, static_argnames="feature_layers")
      >>> logits, cache, features = apply(
      ...     params, jnp.array([[104, 105, 33]]), jnp.array([0]), cache, feature_layers=(0, 2))
      >>> logits.shape, features.shape
      ((1, 3, 256), (1, 3, 64))
    """

    config: LlamaConfig
    dtype: Any = jnp.dtype("float32")
    scan_layers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary axis of the logits."""
        return self.config.vocab_size

    @property
    def weight_shapes(self) -> dict[str, Any]:
        """The structure of the params, with a shape in place of each array."""
        return (stacked_shapes if self.scan_layers else param_shapes)(self.config)

    def check_params(self, name: str, params: Any) -> None:
        """Check weights; see `CausalModel`."""
        check_params(name, self.weight_shapes, params, self.dtype)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        """Random weights in the compute dtype, of the structure that `apply` takes.

        Matrices are normal with variance 1 / fan-in, those that write to the residual stream
        divided by a further 2 L; norms are one, biases zero.

        Args:
          key: a typed PRNG key.
        """
        c = self.config
        listed = random_weights(param_shapes(c), key, self.dtype, c.num_hidden_layers)
        return stack_layers(listed) if self.scan_layers else listed

    @property
    def cache_batch_axis(self) -> int:
        """See `CausalModel`."""
        return 1 if self.scan_layers else 0

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """An empty cache for B = batch_size requests of at most T = max_length positions.

        In 16 bits T is rounded up to a multiple of 64, as the kernel of attention takes it.
        """
        c = self.config
        if self.dtype.itemsize == 2:
            max_length = -(-max_length // 64) * 64
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
        feature_layers: tuple[int, ...] = (),
        tree: TreeRows | None = None,
    ) -> TargetOutput:
        """Run S consecutive tokens of each request, or a tree; see `CausalModel`.

        Weights are not checked; `check_params` does that, where they enter.

        Args:
          params: weights of the structure and shapes of `param_shapes`, in the compute dtype; with
            `scan_layers` those of `stack_layers`.
          token_ids: ``[B, S]`` int32; ids outside the vocabulary, such as -1, are read as some id
            in it.
          start: ``[B]`` int32, absolute position of each request's first token.
          cache: from `init_cache` or a previous call.
          feature_layers: A increasing layers, 0 to L, whose features to return.
          tree: of S nodes, which the tokens then are; None for consecutive tokens.

        Returns:
          Logits ``[B, S, V]`` in the compute dtype, the cache, and features ``[B, S, A H]`` in the
          compute dtype; None without `feature_layers`.

        Raises:
          ValueError: ids, positions or the tree have another shape, there are more tokens than the
            cache has positions, or `feature_layers` do not increase or are no layers.
          TypeError: ids or positions are not int32, or the tree has other dtypes.
        """
        given = params, token_ids, start, cache, feature_layers, embed_tokens
        return self.apply_with(*given, tree=tree)[0]

    def apply_with_prompts(
        self,
        params: dict[str, Any],
        token_ids: jax.Array,
        start: jax.Array,
        cache: Any,
        prompts: PromptRows,
        feature_layers: tuple[int, ...] = (),
        tree: TreeRows | None = None,
    ) -> tuple[TargetOutput, jax.Array | None]:
        """Run `apply`, and read prompts in the same pass; see `CausalModel`.

        The arguments are those of `apply`, and `prompts`: R of them, of P tokens each.

        Returns:
          What `apply` returns, and the features of the prompts, ``[R, P, A H]``.

        Raises:
          ValueError: as in `apply`, or `prompts` have other shapes, or more tokens than the cache
            has positions.
          TypeError: as in `apply`, or `prompts` are not int32.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from jax_specdec import lm
          >>> model, params = lm.load_embedded_pair()[1]
          >>> cache = model.init_cache(2, 8)
          >>> prompts = lm.models.PromptRows(
          ...     jnp.array([[104, 105, 33]]), start=jnp.array([0]), slots=jnp.array([1]))
          >>> output, _ = jax.jit(model.apply_with_prompts)(
          ...     params, jnp.array([[97], [0]]), jnp.array([0, 0]), cache, prompts)
          >>> output.logits.shape
          (2, 1, 256)
        """
        given = params, token_ids, start, cache, feature_layers, embed_tokens
        return self.apply_with(*given, tree=tree, prompts=prompts)

    def commit(self, cache: Any, start: jax.Array, path: jax.Array) -> Any:
        """Moves what the cache holds of the nodes of a path together; see `CausalModel`.

        Args:
          cache: that `apply` returned for trees at the positions `start`.
          start: ``[B]`` int32, the position of each request's node 0.
          path: ``[B, P]`` int32, nodes from node 0 on, increasing; -1 after the last.

        Returns:
          The cache, in which position ``start[b] + j`` holds what ``start[b] + path[b, j]`` held.

        Raises:
          ValueError: `start` or `path` has another shape, or the cache fewer positions than P.
          TypeError: they are not int32.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import jax_specdec as sd
          >>> from jax_specdec import lm
          >>> model, params = lm.load_embedded_pair()[1]
          >>> cache, start = model.init_cache(1, 8), jnp.array([0])
          >>> ids = jnp.array([[104, 97, 105]])  # "h", and two drafts that follow it: "a" and "i"
          >>> tree = sd.TreeRows.of(jnp.array([[0, 0]]))
          >>> cache = jax.jit(model.apply)(params, ids, start, cache, tree=tree).cache
          >>> cache = jax.jit(model.commit)(cache, start, jnp.array([[0, 2]]))  # "hi"
        """
        sizes: Sizes = {}
        check_array("start", start, "[B] int32", sizes)
        check_array("path", path, "[B, P] int32", sizes)
        check_length(path.shape[1], cache, "path")
        if self.scan_layers:
            return move_in_cache(cache, start, path)
        return [move_in_cache(layer, start, path) for layer in cache]

    def apply_with(
        self,
        params: dict[str, Any],
        token_ids: jax.Array,
        start: jax.Array,
        cache: Any,
        feature_layers: tuple[int, ...],
        embed: Callable[[jax.Array, jax.Array], jax.Array],
        regularize: Callable[[jax.Array], jax.Array] = lambda branch: branch,
        tree: TreeRows | None = None,
        prompts: PromptRows | None = None,
    ) -> tuple[TargetOutput, jax.Array | None]:
        """`apply_with_prompts` with another way to read embeddings, or to end a branch; see `run`.

        `embed(embed_tokens, token_ids)` gives the rows ``[B, S, H]``.
        """
        sizes: Sizes = {}
        check_array("token_ids", token_ids, "[B, S] int32", sizes)
        check_array("start", start, "[B] int32", sizes)
        batch_size, length = token_ids.shape
        check_length(length, cache)
        if feature_layers:
            check_increasing("feature_layers", feature_layers, 0, self.config.num_hidden_layers)
        # [B, S]: where the cache holds each token, and where it is in the sequence.
        slots = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        positions = slots
        visible = None
        if tree is not None:
            check_array("tree.depth", tree.depth, "[B, S] int32", sizes)
            check_array("tree.visible", tree.visible, "[B, S, 2] uint32", {**sizes, "2": 2})
            positions = start[:, None] + tree.depth
            visible = tree.visible
        if prompts is not None:
            check_array("prompts.token_ids", prompts.token_ids, "[R, P] int32", sizes)
            check_array("prompts.start", prompts.start, "[R] int32", sizes)
            check_array("prompts.slots", prompts.slots, "[R] int32", sizes)
            check_length(prompts.token_ids.shape[1], cache, "prompts.token_ids")
            places = places_of_rows(slots, prompts, jax.tree.leaves(cache)[0].shape[-1])
            token_ids = all_rows(token_ids, prompts.token_ids)
            positions = all_rows(positions, prompts.positions)
        embedded = embed(params["embed_tokens"], token_ids)

        def cached(
            query: jax.Array, key: jax.Array, value: jax.Array, cache: Any, layer: Any = None
        ) -> tuple[jax.Array, Any]:
            given = query, key, value, cache, slots
            if prompts is not None:
                return attention_with_prompts(*given, prompts, places, layer, visible)
            return cached_attention(*given, layer, visible)

        layers = self._scan if self.scan_layers else self._listed
        x, cache, features = layers(
            params, embedded, positions, cached, cache, feature_layers, regularize
        )
        prompt_features = None
        if prompts is not None:
            num_rows = batch_size * length
            if features is not None:
                # [1, B S + R P, A H] -> [R, P, A H] and [B, S, A H]
                prompt_features = features[:, num_rows:].reshape(*prompts.token_ids.shape, -1)
                features = features[:, :num_rows].reshape(batch_size, length, -1)
            x = x[:, :num_rows].reshape(batch_size, length, -1)  # logits of prompts nobody needs
        return TargetOutput(self._logits(params, x), cache, features), prompt_features

    def _listed(
        self,
        params: dict[str, Any],
        embedded: jax.Array,
        positions: jax.Array,
        cached: Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]],
        cache: list[tuple[jax.Array, jax.Array]],
        feature_layers: tuple[int, ...],
        regularize: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """The stream that leaves the last layer, the cache and features, layer after layer."""
        new_cache = list(cache)

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            read, new_cache[layer] = cached(query, key, value, cache[layer])
            return read

        x, features = self._layers(params, embedded, positions, attend, regularize, feature_layers)
        return x, new_cache, features

    def _scan(
        self,
        params: dict[str, Any],
        embedded: jax.Array,
        positions: jax.Array,
        cached: Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]],
        cache: tuple[jax.Array, jax.Array],
        feature_layers: tuple[int, ...],
        regularize: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """What `_listed` returns, in a loop over stacked layers; `cached` writes and attends."""
        cos_sin = self._rotation(positions)
        num_layers, num_features = self.config.num_hidden_layers, len(feature_layers)
        # Where the stream that enters each layer goes: the last place is for those nobody asks for.
        places = [
            feature_layers.index(i) if i in feature_layers else num_features
            for i in range(num_layers)
        ]
        streams = None
        if feature_layers:
            streams = jnp.zeros((num_features + 1, *embedded.shape), self.dtype)

        def step(carry: Any, given: Any) -> tuple[Any, None]:
            x, cache, streams = carry
            layer, index = given
            if streams is not None:
                streams = streams.at[jnp.array(places, jnp.int32)[index]].set(x)

            def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                nonlocal cache
                read, cache = cached(query, key, value, cache, index)
                return read

            x = decoder_layer(self.config, layer, x, cos_sin, attend, regularize)
            return (x, cache, streams), None

        indices = jnp.arange(num_layers, dtype=jnp.int32)
        carry, _ = lax.scan(step, (embedded, cache, streams), (params["layers"], indices))
        x, cache, streams = carry
        features = None
        if streams is not None:
            chosen = [x if i == num_layers else streams[n] for n, i in enumerate(feature_layers)]
            features = jnp.concatenate(chosen, axis=2)
        return x, cache, features

    def run(
        self,
        params: dict[str, Any],
        embedded: jax.Array,
        positions: jax.Array,
        attend: Callable[..., jax.Array],
        regularize: Callable[[jax.Array], jax.Array] = lambda branch: branch,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array | None]:
        """The decoder around a given attention: what `apply` and training share.

        Args:
          params: weights of the structure and shapes of `param_shapes`, in the compute dtype, not
            stacked.
          embedded: ``[B, S, H]``, rows of the embedding, in the compute dtype.
          positions: ``[B, S]`` int32, absolute positions, for the rotary embedding.
          attend: an `Attend` whose first argument is the index of the layer, called once for each.
          regularize: applied to the ``[B, S, H]`` that each half of a layer adds to the residual
            stream; training drops parts of it, `TensorParallelLlama` sums it over devices.
          feature_layers: as in `apply`.

        Returns:
          Logits ``[B, S, V]`` and features ``[B, S, A H]``, or None, in the compute dtype.
        """
        x, features = self._layers(params, embedded, positions, attend, regularize, feature_layers)
        return self._logits(params, x), features

    def _layers(
        self,
        params: dict[str, Any],
        embedded: jax.Array,
        positions: jax.Array,
        attend: Callable[..., jax.Array],
        regularize: Callable[[jax.Array], jax.Array],
        feature_layers: tuple[int, ...],
    ) -> tuple[jax.Array, jax.Array | None]:
        """The stream ``[B, S, H]`` that leaves the last layer, and features; see `run`."""
        cos_sin = self._rotation(positions)
        streams = [embedded]  # that enter each layer, and that leaves the last one
        for index, layer in enumerate(params["layers"]):
            one = functools.partial(attend, index)
            x = decoder_layer(self.config, layer, streams[-1], cos_sin, one, regularize)
            streams.append(x)
        chosen = [streams[i] for i in feature_layers]
        features = jnp.concatenate(chosen, axis=2) if chosen else None
        return streams[-1], features

    def _rotation(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rotation(positions, c.head_dim, c.rope_theta, c.rope_scaling)

    def _logits(self, params: dict[str, Any], x: jax.Array) -> jax.Array:
        """Logits ``[B, S, V]`` of the residual stream after the last layer."""
        c = self.config
        x = rms_norm(x, params["norm"], c.rms_norm_eps)
        tied = c.tie_word_embeddings
        lm_head = params["embed_tokens" if tied else "lm_head"]
        return output_logits(x, lm_head, tied, c.num_token_ids)


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The weights of a `Llama` for `scan_layers`: ``layers`` as one dict of ``[L, ...]`` arrays.

    Args:
      params: of the structure of `param_shapes`, where ``layers`` is a list of dicts.

    Returns:
      New arrays for the layers; the others are shared.

    Example:
      >>> import dataclasses
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()
      >>> model = dataclasses.replace(model, scan_layers=True)
      >>> params = lm.models.stack_layers(params)
      >>> params["layers"]["input_layernorm"].shape[0] == model.config.num_hidden_layers
      True
    """
    return {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])}


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `stack_layers`.

    Example:
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()
      >>> len(lm.models.unstack_layers(lm.models.stack_layers(params))["layers"])
      2
    """
    layers = params["layers"]
    size = len(next(iter(layers.values())))
    return {**params, "layers": [{k: x[i] for k, x in layers.items()} for i in range(size)]}
