"""A Llama decoder in plain JAX, for one device; `tensor_parallel` spreads it over several.

RMSNorm, rotary positions, grouped-query attention and gated feed-forward layers, as the checkpoints
published on Hugging Face define them, so that those can be read (`checkpoint`). What a layer is, a
`LayerSpec` says; the Qwen and Gemma families differ in those alone. Weights are stored
``[in, out]``, query/key/value and gate/up fused: XLA on the CPU then reads each matrix once, in
order.

References:
  Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models",
  https://arxiv.org/abs/2302.13971
  Ainslie et al., 2023, "GQA", https://arxiv.org/abs/2305.13245
  Qwen Team, 2024, "Qwen2 Technical Report", https://arxiv.org/abs/2407.10671
  Qwen Team, 2025, "Qwen3 Technical Report", https://arxiv.org/abs/2505.09388
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.attention.cache import move_rows
from jax_specdec._src.base.arrays import check_array, check_increasing, check_type, checked_dtype
from jax_specdec.lm.models.cache import Pass, check_length, check_rows, empty_cache
from jax_specdec.lm.models.config import DecoderConfig, Shapes, param_shapes
from jax_specdec.lm.models.int8 import matmul
from jax_specdec.lm.models.layers import (
    AttendInLayer,
    NewHeads,
    Regularize,
    Weights,
    check_weights,
    decoder_layer,
    embed_tokens,
    output_logits,
    random_weights,
    rms_norm,
    rotations,
    unchanged,
)
from jax_specdec.lm.models.protocol import Cache, Output, Params, Rows, Serves, Wants

Embed = Callable[[jax.Array, jax.Array], jax.Array]
"""`embed(embedding, token_ids)`: rows ``[B, S, H]`` of an embedding ``[V, H]``."""


@dataclasses.dataclass(frozen=True)
class Llama:
    """A decoder of Llama's kind, whatever its layers are; a `CausalModel`.

    The cache is a list of one `(keys, values)` pair per layer, keys ``[B N_kv, D, T]`` and values
    ``[B N_kv, T, D]`` in the compute dtype: the layouts in which attention reads them, so that XLA
    neither transposes nor copies a cache in a loop (if B N_kv is one, it copies). A layer with a
    window keeps all positions, too: rolling back stays free.

    Attributes:
      config: what it is.
      dtype: compute dtype of matrix products, residual stream, cache and logits. Norms, rotary
        angles and the attention softmax are float32 whatever it is.

    Raises:
      TypeError: `config` is no `DecoderConfig`, or `dtype` no floating dtype.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_specdec.lm.models import DecoderConfig, LayerSpec, Rows, Wants
      >>> layer = LayerSpec(
      ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64)
      >>> model = Llama(DecoderConfig(vocab_size=256, hidden_size=32, layers=(layer,) * 2))
      >>> params = jax.jit(model.init_params)(jax.random.key(0))
      >>> cache = model.init_cache(batch_size=1, max_length=16)
      >>> rows = Rows(jnp.array([[104, 105, 33]]), start=jnp.array([0]))
      >>> apply = jax.jit(model.apply, static_argnames="wants")
      >>> wants = Wants(aux_hidden_state_layers=(0, 2))
      >>> (output,), cache = apply(params, [rows], cache, wants=wants)
      >>> output.logits.shape, output.features.shape
      ((1, 3, 256), (1, 3, 64))
    """

    config: DecoderConfig
    dtype: Any = jnp.dtype("float32")

    def __post_init__(self) -> None:
        check_type("config", self.config, DecoderConfig)
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary axis of the logits."""
        return self.config.vocab_size

    @property
    def weight_shapes(self) -> Shapes:
        """The structure of the params, with a shape in place of each array."""
        return param_shapes(self.config)

    def check_params(self, name: str, params: Params) -> None:
        """Checks weights; see `CausalModel`."""
        check_weights(name, self.weight_shapes, params, self.dtype)

    def init_params(self, key: jax.Array) -> Weights:
        """Returns random weights in the compute dtype, of the structure that `apply` takes.

        Matrices are normal with variance 1 / fan-in, those that write to the residual stream
        divided by a further 2 L; norms and scalars multiply by one, biases are zero.

        Args:
          key: a typed PRNG key.
        """
        return random_weights(self.weight_shapes, key, self.dtype, self.config.layers)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache for B = batch_size requests of at most T = max_length positions.

        In 16 bits T is rounded up to a multiple of 64, as the kernel of attention takes it.
        """
        return empty_cache(self.config.layers, self.dtype, batch_size, max_length)

    @property
    def serves(self) -> Serves:
        """Trees, features, and several groups in one pass."""
        return Serves(trees=True, features=True, groups=True)

    def apply(
        self,
        params: Weights,
        groups: Sequence[Rows],
        cache: Cache,
        wants: Wants = Wants(),
    ) -> tuple[list[Output], Cache]:
        """Runs rows of requests, all groups in one pass; see `CausalModel`.

        Weights are not checked; `check_params` does that, where they enter.

        Args:
          params: weights of the structure and shapes of `param_shapes`, in the compute dtype.
          groups: ids outside the vocabulary, such as -1, are read as some id in it.
          cache: from `init_cache` or a previous call.
          wants: features are wanted of increasing layers, 0 to L.

        Returns:
          For each group logits ``[G, S, V]`` and features ``[G, S, A*H]`` in the compute dtype; and
          the cache.

        Raises:
          ValueError: rows have other shapes, or more tokens than the cache has positions, or
            `aux_hidden_state_layers` do not increase or are no layers.
          TypeError: rows have other dtypes.
        """
        return self.apply_with(params, groups, cache, wants, embed_tokens)

    def commit(self, cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
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
          >>> rows = lm.models.Rows(ids, start, tree=tree)
          >>> _, cache = jax.jit(model.apply)(params, [rows], cache)
          >>> cache = jax.jit(model.commit)(cache, start, jnp.array([[0, 2]]))  # "hi"
        """
        check_array("path", path, "[B, P] int32", {})
        check_length("path", path.shape[1], cache)
        return [move_rows(layer, start, path) for layer in cache]

    def apply_with(
        self,
        params: Weights,
        groups: Sequence[Rows],
        cache: Cache,
        wants: Wants,
        embed: Embed,
        regularize: Regularize = unchanged,
    ) -> tuple[list[Output], Cache]:
        """Runs `apply` with another way to read embeddings, or to end a branch.

        Args:
          embed: how rows of embeddings are read.
        """
        # Shapes are static, so a pass is checked where it is traced, at no cost when it runs.
        specs = self.config.layers
        layers = wants.aux_hidden_state_layers
        if layers:
            check_increasing("aux_hidden_state_layers", layers, 0, len(specs))
        for index, rows in enumerate(groups):
            check_rows(f"groups[{index}]", rows, cache)
        step = Pass.of(groups, cache, specs)
        if self.dtype.itemsize == 2:
            step = step.with_two_rows()
        # [G, S] -> [G, S, H], or [1, M] -> [1, M, H] of several groups
        embedded = embed(params["embed_tokens"], step.token_ids)
        new_cache = list(cache)

        def attend(layer: int, query: jax.Array, key: NewHeads, value: NewHeads) -> jax.Array:
            spec = specs[layer]
            # A layer without keys of its own reads those that an earlier one has just written.
            owner = layer if spec.keys_of is None else spec.keys_of
            # It has neither key nor value then: nothing is written a second time.
            read, new_cache[owner] = step.attend(spec, query, key, value, new_cache[owner])
            return read

        # [G, S, H] -> [G, S, H], and features [G, S, A H] or None.
        # Rotary angles follow positions in the sequence; `attend` goes by places in the cache.
        x, features = self._layers(
            params,
            embedded,
            step.positions,
            attend,
            regularize,
            layers,
            self._layer_inputs(params, step.token_ids, embedded, embed),
        )
        # [1, M, H] -> [G, S, H] of each group; one group is that already. Group by group, because
        # a compiler then leaves out the logits that nobody reads, as of prompts.
        logits = [self._logits(params, states) for states in step.split(x)]
        if features is None:
            return [Output(scores) for scores in logits], new_cache
        return list(map(Output, logits, step.split(features))), new_cache

    def run(
        self,
        params: Weights,
        embedded: jax.Array,
        positions: jax.Array,
        attend: AttendInLayer,
        regularize: Regularize = unchanged,
        aux_hidden_state_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array | None]:
        """Runs the decoder around an attention other than that of `apply`, as training does.

        Args:
          params: weights of the structure and shapes of `param_shapes`, in the compute dtype.
          embedded: ``[B, S, H]``, rows of the embedding, in the compute dtype.
          positions: ``[B, S]`` int32, absolute positions, for the rotary embedding.
          attend: called once for each layer.
          regularize: training drops parts of a branch, `TensorParallelLlama` sums it over devices.

        Returns:
          Logits ``[B, S, V]`` and features ``[B, S, A H]``, or None, in the compute dtype.
        """
        x, features = self._layers(
            params, embedded, positions, attend, regularize, aux_hidden_state_layers, None
        )
        return self._logits(params, x), features

    def _scaled(self, embedded: jax.Array) -> jax.Array:
        """Returns the residual stream ``[B, S, H]`` before the first layer."""
        c = self.config
        if not c.scales_embedding:
            return embedded
        # The factor is rounded to the compute dtype first, as in Gemma.
        return embedded * jnp.asarray(c.hidden_size**0.5, embedded.dtype)

    def _layer_inputs(
        self, params: Weights, token_ids: jax.Array, embedded: jax.Array, embed: Embed
    ) -> jax.Array | None:
        """Returns what each layer gets of each token, ``[B, S, L, P]``; None if there is nothing.

        It is (norm(W x / sqrt(H)) + sqrt(P) e) / sqrt(2) of the scaled embedding x and the token's
        row e of a second embedding.
        """
        c = self.config
        size = c.per_layer_input
        if size is None:
            return None
        shape = (*token_ids.shape, len(c.layers), size)
        # norm(W x / sqrt(H)): [B, S, H] -> [B, S, L P] -> [B, S, L, P], normed over P
        context = matmul(self._scaled(embedded), params["per_layer_model_projection"])
        context = (context * c.hidden_size**-0.5).reshape(shape)
        context = rms_norm(context, params["per_layer_projection_norm"], c.norm)
        # sqrt(P) e: [B, S] -> [B, S, L P] -> [B, S, L, P]
        rows = embed(params["embed_tokens_per_layer"], token_ids).reshape(shape)
        rows = rows * jnp.asarray(size**0.5, rows.dtype)
        # [B, S, L, P]: what layer l gets is [:, :, l]
        return (context + rows) * 2**-0.5

    def _layers(
        self,
        params: Weights,
        embedded: jax.Array,
        positions: jax.Array,
        attend: AttendInLayer,
        regularize: Regularize,
        aux_hidden_state_layers: tuple[int, ...],
        layer_inputs: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the stream ``[B, S, H]`` that leaves the last layer, and features; see `run`."""
        c = self.config
        cos_sin = rotations(c.layers, positions)
        # L + 1 times [B, S, H]: what enters each layer, and what leaves the last one
        streams = [self._scaled(embedded)]
        for index, (spec, layer) in enumerate(zip(c.layers, params["layers"], strict=True)):
            layer_attend = functools.partial(attend, index)
            # [B, S, L, P] -> [B, S, P]
            layer_input = None if layer_inputs is None else layer_inputs[:, :, index]
            x = decoder_layer(
                spec, layer, streams[-1], cos_sin[index], layer_attend, regularize, layer_input
            )
            # Without it, XLA joins the end of a layer with what follows, features or not, and
            # rounds one and the other differently.
            streams.append(jax.lax.optimization_barrier(x))
        if not aux_hidden_state_layers:
            return streams[-1], None
        # A times [B, S, H] -> [B, S, A H]
        features = jnp.concatenate([streams[i] for i in aux_hidden_state_layers], axis=2)
        return streams[-1], features

    def _logits(self, params: Weights, x: jax.Array) -> jax.Array:
        """Returns logits ``[B, S, V]`` of the residual stream ``[B, S, H]`` after all layers."""
        c = self.config
        # logits = W norm(x): [B, S, H] -> [B, S, V]
        x = rms_norm(x, params["norm"], c.norm)
        # [H, V], or [V, H] if the embedding is the output matrix, and there is no int8 one
        lm_head = params["lm_head" if "lm_head" in params else "embed_tokens"]
        return output_logits(x, lm_head, c.tie_word_embeddings, c.num_token_ids, c.logit_softcap)
