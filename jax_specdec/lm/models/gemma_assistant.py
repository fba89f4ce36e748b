"""An assistant of Gemma 4: a few layers that draft from the target's own cache.

With t_n the newest token, whose keys the target has not computed, h the target's stream after its
final norm at n - 1, E its scaled embedding, and y = t_n or the last draft:

    x       = W_pre [E[y], h]
    x       = layers(x)                one row; keys and values are the target's, of 0 .. n - 1
    u       = norm(x)
    logits  = W_out u
    h       = W_post u                 for the next draft

The row stands at one rotary position, whatever drafts came before it. An ordered head scores part
of the ids: tokens are in M groups, each with a centroid, and those of the C groups whose centroids
have the largest products with u are the candidates.

Reference: Google, 2026, Gemma 4 assistants, as `transformers` 5.24 computes them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import check_array, checked_dtype, require
from jax_specdec.lm.models.cache import Layer, Pass
from jax_specdec.lm.models.config import LayersConfig, LayerSpec, Norm, Shapes, layer_shapes
from jax_specdec.lm.models.int8 import matmul
from jax_specdec.lm.models.layers import (
    NewHeads,
    Weights,
    check_weights,
    decoder_layer,
    embed_tokens,
    output_logits,
    random_weights,
    rms_norm,
    rotations,
)
from jax_specdec.lm.models.protocol import Cache, Params, Rows

POSITION = 0
"""The rotary position of all drafts, counted from that of the newest token. transformers and
keras-hub have it there; vLLM at the last position with a key, -1. Which one the assistants were
trained with is not published: it changes how many drafts are accepted, never the text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaAssistantConfig(LayersConfig):
    """Sizes of a `GemmaAssistantHead`.

    Attributes:
      vocab_size: V, the target's.
      hidden_size: H, width of the head's residual stream.
      layers: of the head; `keys_of` says which of the target's layers each one reads.
      num_token_ids: the target's.
      target_hidden_size: Ht, width of the target's residual stream.
      target_layers: L, how many layers the target has.
      target_norm: the target's final norm.
      num_centroids: M, groups of V / M ids each; None for a head that scores all ids.
      num_active_centroids: C, the groups whose ids are scored; None as `num_centroids`.

    Raises:
      ValueError: a size is not a positive integer below 2**31, or sizes do not fit together; a
        layer has keys of its own.
      TypeError: there are no layers.

    Example: see `GemmaAssistantHead`.
    """

    target_hidden_size: int
    target_layers: int
    target_norm: Norm
    num_centroids: int | None = None
    num_active_centroids: int | None = None

    def __post_init__(self) -> None:
        # Each layer reads a layer of the target: the assistant has no cache.
        super().__post_init__()
        for index, spec in enumerate(self.layers):
            must = f"be a layer of the target, below {self.target_layers}"
            fits = spec.keys_of is not None and spec.keys_of < self.target_layers
            require(fits, f"layers[{index}].keys_of", must, spec.keys_of)
        groups = self.num_centroids
        active = self.num_active_centroids
        # Ordered heads have both, others neither. Groups are of one size, as `lm_head` has them.
        must = f"be None or not as num_centroids = {groups} is"
        require((groups is None) == (active is None), "num_active_centroids", must, active)
        if groups is not None and active is not None:
            must = f"divide vocab_size = {self.vocab_size}"
            require(self.vocab_size % groups == 0, "num_centroids", must, groups)
            must = f"be at most num_centroids = {groups}"
            require(active <= groups, "num_active_centroids", must, active)

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The stream that leaves the target's last layer."""
        return (self.target_layers,)

    @property
    def num_candidates(self) -> int | None:
        """How many ids of each row are scored; None for all, without a list."""
        if self.num_centroids is None or self.num_active_centroids is None:
            return None
        return self.num_active_centroids * (self.vocab_size // self.num_centroids)


class AssistantOutput(NamedTuple):
    """What a `GemmaAssistantHead` computes for S drafts of each request.

    Attributes:
      logits: ``[B, S, V]``, or ``[B, S, Vd]`` of candidates, of the token after each.
      states: ``[B, S, Ht]``, for the draft after each.
      ids: ``[B, S, Vd]`` int32, the ids of the candidates; None for all ids.
    """

    logits: jax.Array
    states: jax.Array
    ids: jax.Array | None


@dataclasses.dataclass(frozen=True)
class GemmaAssistantHead:
    """An assistant of Gemma 4; see `load_head`. It has no cache.

    Attributes:
      config: the sizes.
      dtype: compute dtype of matrix products, states and logits, the target's.

    Example:
      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> from jax_specdec.lm.models import (
      ...     DecoderConfig, GemmaAssistantConfig, LayerSpec, Llama, Rows)
      >>> layer = LayerSpec(
      ...     num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=16)
      >>> target = Llama(DecoderConfig(vocab_size=32, hidden_size=16, layers=(layer,)))
      >>> head = GemmaAssistantHead(GemmaAssistantConfig(
      ...     vocab_size=32, hidden_size=8, layers=(dataclasses.replace(layer, keys_of=0),),
      ...     target_hidden_size=16, target_layers=1, target_norm=target.config.norm,
      ...     num_centroids=8, num_active_centroids=2))
      >>> params = jax.jit(head.init_params)(jax.random.key(0))
      >>> cache = target.init_cache(batch_size=1, max_length=16)
      >>> features = jnp.zeros((1, 1, 16))  # of the target, at position 4
      >>> states = head.first_states(params, features)
      >>> newest = Rows(jnp.array([[7]]), start=jnp.array([5]))
      >>> output = jax.jit(head.apply)(params, states, newest, cache)
      >>> output.logits.shape, output.ids.shape  # of two groups of four ids
      ((1, 1, 8), (1, 1, 8))
    """

    config: GemmaAssistantConfig
    dtype: Any = jnp.dtype("float32")

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary."""
        return self.config.vocab_size

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The stream that leaves the target's last layer."""
        return self.config.aux_hidden_state_layers

    @property
    def weight_shapes(self) -> Shapes:
        """The structure of the params, with a shape in place of each array.

        A dict with the target's ``embed_tokens [V, Ht]`` and ``target_norm [Ht]``,
        ``pre_projection [2 Ht, H]``, `layers`, as in `param_shapes`, ``norm [H]``,
        ``post_projection [H, Ht]``, and ``lm_head [H, V]``. An ordered head has ``centroids
        [H, M]``, ``target_ids [V]`` int32, the ids of one group after another, and ``lm_head
        [M, V / M, H]``, their rows in this order.
        """
        c = self.config
        shapes: Shapes = {
            "embed_tokens": (c.vocab_size, c.target_hidden_size),
            "target_norm": (c.target_hidden_size,),
            "pre_projection": (2 * c.target_hidden_size, c.hidden_size),
            "layers": [layer_shapes(spec, c.hidden_size) for spec in c.layers],
            "norm": (c.hidden_size,),
            "post_projection": (c.hidden_size, c.target_hidden_size),
        }
        if c.num_centroids is None:
            return shapes | {"lm_head": (c.hidden_size, c.vocab_size)}
        size = c.vocab_size // c.num_centroids
        return shapes | {
            "centroids": (c.hidden_size, c.num_centroids),
            "target_ids": (c.vocab_size,),
            "lm_head": (c.num_centroids, size, c.hidden_size),
        }

    def check_params(self, name: str, params: Params) -> None:
        """Checks weights; see `CausalModel`."""
        check_weights(name, self.weight_shapes, params, self.dtype)

    def init_params(self, key: jax.Array, target_params: Weights | None = None) -> Weights:
        """Returns random weights in the compute dtype, as those of `Llama.init_params`.

        Args:
          key: a typed PRNG key.
          target_params: weights of the target, whose embedding and final norm are shared; without
            it those are random too.

        Returns:
          A dict; see `weight_shapes`. `target_ids` are in order.
        """
        c = self.config
        # Vectors come out as norms of the head's kind, so `target_norm` and `target_ids` are
        # written over.
        params = random_weights(self.weight_shapes, key, self.dtype, c.layers)
        is_one = not c.target_norm.adds_one
        params["target_norm"] = jnp.full((c.target_hidden_size,), is_one, self.dtype)
        if target_params is not None:
            params |= target_arrays(target_params)
        if c.num_centroids is not None:
            params["target_ids"] = jnp.arange(c.vocab_size, dtype=jnp.int32)
        return params

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns a cache of no layers: keys are the target's."""
        del batch_size, max_length
        return []

    def first_states(self, params: Weights, features: jax.Array) -> jax.Array:
        """Returns the states ``[B, S, Ht]`` for first drafts: features after the target's norm.

        Args:
          params: weights of the structure and shapes of `weight_shapes`, in the compute dtype.
          features: ``[B, S, Ht]`` in the compute dtype, the stream that left the last layer.

        Raises:
          ValueError: features have another shape.
          TypeError: features are not of the compute dtype.
        """
        sizes = {"Ht": self.config.target_hidden_size}
        check_array("features", features, f"[B, S, Ht] {self.dtype}", sizes)
        # h = norm(g): features are the stream before the target's final norm, [B, S, Ht]
        return rms_norm(features, params["target_norm"], self.config.target_norm)

    def apply(
        self,
        params: Weights,
        states: jax.Array,
        rows: Rows,
        cache: Cache,
        position: int = POSITION,
    ) -> AssistantOutput:
        """Runs S drafts of each request, none of which sees another.

        Weights are not checked; `check_params` does that, where they enter.

        Args:
          params: weights of the structure and shapes of `weight_shapes`, in the compute dtype.
          states: ``[B, S, Ht]``, of `first_states`, or of the row that each was drafted from.
          rows: the newest token, or S drafts, at most 64. `start` is n, the position of each
            request's newest token, whatever they are: keys of the positions before it are read.
            Where n is 0 there are none, and rows are undefined.
          cache: the target's; it is only read.
          position: the rotary position, counted from n.
        """
        c = self.config
        read = [self._layer(cache, spec) for spec in c.layers]
        # Each row sees what the target's row n - 1 has seen: as that row, the first of a block. The
        # block starts at n - 1, and bit 0 of its mask is that position; none sees another row.
        num_rows = rows.token_ids.shape[1]
        # [S, 2] uint32
        first_alone = np.tile(np.array([1, 0], np.uint32), (num_rows, 1))
        block = rows._replace(start=jnp.maximum(rows.start - 1, 0))
        step = Pass.of([block], read, c.layers)
        # A single row in 16 bits comes twice, [1, 1] -> [1, 2], as in `Llama`; one of the two is
        # left after the last layer.
        if self.dtype.itemsize == 2:
            step = step.with_two_rows()

        def attend(index: int, query: jax.Array, key: NewHeads, value: NewHeads) -> jax.Array:
            # Layers have no key and value: nothing is written, and the cache comes back as it was.
            spec = c.layers[index]
            return step.attend(spec, query, key, value, read[index], first_alone)[0]

        # x = W_pre [E[y], h]: [B, S, Ht] twice -> [B, S, H]
        scale = jnp.asarray(c.target_hidden_size**0.5, self.dtype)
        embedded = embed_tokens(params["embed_tokens"], step.token_ids) * scale
        # [B, S, Ht], or [1, 1, Ht] -> [1, 2, Ht] of a row that comes twice
        states = jnp.broadcast_to(states, embedded.shape)
        x = matmul(jnp.concatenate([embedded, states], axis=2), params["pre_projection"])
        # [B] -> [B, 1]: one position for all drafts, whatever their place in the step
        cos_sin = rotations(c.layers, rows.start[:, None] + position)
        for index, (spec, layer) in enumerate(zip(c.layers, params["layers"], strict=True)):
            # x = layer(x): [B, S, H]
            layer_attend = functools.partial(attend, index)
            x = decoder_layer(spec, layer, x, cos_sin[index], layer_attend)
        # u = norm(x): [B, S, H]; then logits W_out u, and states W_post u of [B, S, Ht]
        output = rms_norm(x[:, :num_rows], params["norm"], c.norm)
        logits, ids = self._logits(params, output)
        return AssistantOutput(logits, matmul(output, params["post_projection"]), ids)

    def _layer(self, cache: Cache, spec: LayerSpec) -> Layer:
        """Returns the keys and values of the target that a layer reads.

        Raises:
          ValueError: the cache is not that of a `Llama` that fits.
        """
        # The cache is another model's: whether it fits the head is known only here.
        index = spec.keys_of
        assert index is not None
        fits = isinstance(cache, list) and len(cache) > index
        fits = fits and np.shape(cache[index][0])[1:-1] == (spec.head_dim,)
        must = f"have keys [B * Nkv, {spec.head_dim}, T] at layer {index}, as that of a Llama"
        require(fits, "the target's cache", must, cache)
        layer: Layer = cache[index]
        return layer

    def _logits(self, params: Weights, output: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the logits of rows ``[B, S, H]``, and the ids of candidates; see `apply`."""
        c = self.config
        if c.num_active_centroids is None:
            return output_logits(output, params["lm_head"], False, c.num_token_ids), None
        # [B, S, H] -> [B, S, M] -> [B, S, C]: the groups whose centroids are the nearest
        _, groups = lax.top_k(matmul(output, params["centroids"]), c.num_active_centroids)
        # [M, V / M, H] -> [B, S, C, V / M, H]: each group is one block of memory
        rows = params["lm_head"][groups]
        # [B, S, C, V / M] -> [B, S, Vd]: logits, and their ids, group after group
        shape = (*output.shape[:2], -1)
        logits = jnp.einsum("bscvh,bsh->bscv", rows, output).reshape(shape)
        ids = params["target_ids"].reshape(c.num_centroids, -1)[groups].reshape(shape)
        if c.num_token_ids is not None:
            logits = jnp.where(ids < c.num_token_ids, logits, -jnp.inf)
        return logits, ids


def target_arrays(target_params: Weights) -> Weights:
    """Returns the target's arrays that an assistant uses, under the assistant's names."""
    return {
        "embed_tokens": target_params["embed_tokens"],
        "target_norm": target_params["norm"],
    }
