"""The head of EAGLE-3: one decoder layer that drafts from features of the target.

With g_i the target's residual streams before some of its layers at position i, one after another,
and t_{i+1} the token after that position:

    x_i      = fc(g_i)                          features; in later draft steps the head's own h
    u_i      = [input_layernorm(embed(t_{i+1})), hidden_norm(x_i)]
    h_i      = x_i + attention(u_i)             rotary position i
    h_i      = h_i + mlp(post_attention_layernorm(h_i))
    logits_i = lm_head(norm(h_i))               about t_{i+2}

References:
  Li et al., 2025, "EAGLE-3", https://arxiv.org/abs/2503.01840
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import check_array, require
from jax_specdec.lm.models.cache import Pass, check_rows, empty_cache
from jax_specdec.lm.models.config import Shapes, layer_shapes
from jax_specdec.lm.models.heads import DraftHead, HeadConfig, common_shapes, head_logits
from jax_specdec.lm.models.int8 import matmul
from jax_specdec.lm.models.layers import (
    Attend,
    NewHeads,
    Weights,
    embed_tokens,
    feed_forward,
    rms_norm,
    rotation,
    self_attention,
)
from jax_specdec.lm.models.protocol import Cache, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Sizes and switches of an `Eagle3Head`.

    Attributes:
      vocab_size: V, the target's.
      hidden_size: H, width of the residual stream.
      layers: the one layer.
      tie_word_embeddings: the target's output matrix is its embedding.
      num_token_ids: the target's.
      draft_vocab_size: Vd, ids that the head scores, at most V. Fewer than V are a list of the
        target's ids, and the head has an output matrix of its own.
      aux_hidden_state_layers: ids of the target's layers before which the residual stream is read,
        0-based and ascending; L, the number of layers, is after the last one.
      target_hidden_size: width of the target's residual stream.
      norm_before_fc: an RMSNorm over all features before ``fc``.
      fc_norm: an RMSNorm over the features of each layer before ``fc``.
      norm_before_residual: the residual stream begins with the normed x_i.
      norm_output: the next draft step gets norm(h), not h.
      own_embedding: the head has an embedding of its own; otherwise the target's.
      own_lm_head: the head has an output matrix of its own; otherwise the target's.
      logit_scale: multiplies the logits.

    Raises:
      ValueError: a field is out of range, or fields contradict one another.

    Example: see `Eagle3Head`.
    """

    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.layers)
        hint = "systems differ in what more layers of a head compute"
        require(count == 1, "num_hidden_layers", "be 1", count, hint)
        norms = self.norm_before_fc, self.fc_norm
        require(not all(norms), "norm_before_fc and fc_norm", "not both be true", norms)


def head_shapes(config: Eagle3Config) -> Shapes:
    """Returns the params pytree of a config, with a shape in place of each array.

    A dict with ``embed_tokens [V, H]``, ``fc [A * H_target, H]``, ``norm [H]``, ``lm_head [H, Vd]``
    (the target's embedding ``[V, H]`` if that is its output matrix and shared), and `layer`, as in
    `layer_shapes` with ``qkv_proj [2 H, (N + 2 N_kv) D]`` and ``hidden_norm [H]``. With
    `norm_before_fc` there is `input_norm`, with `fc_norm` there is `fc_norm`, both
    ``[A * H_target]``. With Vd < V there is ``target_ids [Vd]`` int32, the target's id of each of
    the head's.
    """
    size = config.hidden_size
    (spec,) = config.layers
    # It reads two normed vectors side by side: the embedding's and the features'.
    layer = layer_shapes(spec, size)
    layer |= {"qkv_proj": (2 * size, sum(spec.head_sizes)), "hidden_norm": (size,)}
    shapes = common_shapes(config) | {"layer": layer}
    if config.norm_before_fc:
        shapes["input_norm"] = (config.num_features,)
    if config.fc_norm:
        shapes["fc_norm"] = (config.num_features,)
    return shapes


@dataclasses.dataclass(frozen=True)
class Eagle3Head(DraftHead):
    """An EAGLE-3 head: predicts the target's next tokens from its features and last tokens.

    The cache is that of a `Llama` of one layer, addressed by absolute position: entry i belongs to
    the features at position i and the token at i + 1.

    Attributes:
      config: the sizes.
      dtype: compute dtype of matrix products, states, cache and logits, the target's. Norms, rotary
        angles and the attention softmax are float32 whatever it is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_specdec.lm.models import DecoderConfig, Eagle3Config, LayerSpec, Rows
      >>> layer = LayerSpec(
      ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64)
      >>> target = DecoderConfig(vocab_size=256, hidden_size=32, layers=(layer,) * 6)
      >>> config = Eagle3Config.of_target(
      ...     target, layers=(layer,), aux_hidden_state_layers=(2, 4, 5))
      >>> head = Eagle3Head(config)
      >>> params = jax.jit(head.init_params)(jax.random.key(0))
      >>> cache = head.init_cache(batch_size=1, max_length=16)
      >>> features = jnp.zeros((1, 3, head.num_features))  # of the tokens at positions 0, 1, 2
      >>> states = head.project(params, features)
      >>> next_ids = jnp.array([[105, 33, 10]])  # of the tokens at positions 1, 2, 3
      >>> apply = jax.jit(head.apply)
      >>> rows = Rows(next_ids, start=jnp.array([0]))
      >>> logits, feedback, cache = apply(params, states, rows, cache)
      >>> logits.shape  # the last row is about position 4
      (1, 3, 256)

      A draft step takes its own state, and the token drafted from the last row:

      >>> rows = Rows(jnp.array([[104]]), start=jnp.array([3]))
      >>> logits, feedback, cache = apply(params, feedback[:, -1:], rows, cache)
      >>> logits.shape
      (1, 1, 256)
    """

    config: Eagle3Config
    dtype: Any = jnp.dtype("float32")

    @property
    def weight_shapes(self) -> Shapes:
        """The structure of the params, with a shape in place of each array."""
        return head_shapes(self.config)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache for B = batch_size requests of T = max_length positions."""
        return empty_cache(self.config.layers, self.dtype, batch_size, max_length)

    def project(self, params: Weights, features: jax.Array) -> jax.Array:
        """Returns the states fc(g) with which true features enter the layer.

        Args:
          params: weights of the structure and shapes of `head_shapes`, in the compute dtype.
          features: ``[B, S, A * H_target]`` in the compute dtype, the target's residual streams
            before the layers of `aux_hidden_state_layers`, one after another.

        Returns:
          ``[B, S, H]`` in the compute dtype.

        Raises:
          ValueError: features have another shape.
          TypeError: features are not of the compute dtype.
        """
        c = self.config
        check_array("features", features, f"[B, S, A*H] {self.dtype}", {"A*H": c.num_features})
        # At most one of the two norms is there, see `Eagle3Config`.
        if c.norm_before_fc:
            features = rms_norm(features, params["input_norm"], c.norm)
        if c.fc_norm:
            chunks = (len(c.aux_hidden_state_layers), c.target_hidden_size)
            # [B, S, A H_target] -> [B, S, A, H_target] and back: a mean for each layer. The weight
            # [A H_target] likewise.
            split = features.reshape(*features.shape[:2], *chunks)
            split = rms_norm(split, params["fc_norm"].reshape(chunks), c.norm)
            features = split.reshape(features.shape)
        # [B, S, A H_target] -> [B, S, H]
        return matmul(features, params["fc"])

    def apply(
        self,
        params: Weights,
        states: jax.Array,
        rows: Rows,
        cache: Cache,
        row: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Runs S consecutive positions of each request, or S nodes of a tree of drafts.

        It attends to positions 0 to its own and replaces its own entry of the cache, as in
        `CausalModel.apply`: rollback is free. Weights are not checked; `check_params` does that,
        where they enter.

        Args:
          params: weights of the structure and shapes of `head_shapes`, in the compute dtype.
          states: ``[B, S, H]`` in the compute dtype: `project` of the features at these positions,
            or the feedback of the draft step before.
          rows: of all requests. `token_ids` are the tokens **after** these positions, as ids of the
            target. With a `tree`, such as one level of a tree that grows, `start` is the position
            where the tree begins.
          cache: from `init_cache` or a previous call.
          row: ``[B]`` int32 in [0, S), the only position of each request whose logits and feedback
            are wanted; S is then 1 in their shapes. None for all.

        Returns:
          Logits ``[B, S, Vd]`` of the token at position + 2, the feedback ``[B, S, H]`` that the
          next draft step takes for its states, and the cache.

        Raises:
          ValueError: rows or states have another shape, or there are more of them than the cache
            has positions.
          TypeError: rows have other dtypes, or states not the compute dtype.
        """
        # A head has one layer, and its cache one pair of keys and values.
        c = self.config
        (spec,) = c.layers
        (layer,) = cache
        check_rows("rows", rows, cache)
        step = Pass.of([rows], cache, c.layers)
        batch_size, length = rows.token_ids.shape
        sizes = {"B": batch_size, "S": length, "H": c.hidden_size}
        check_array("states", states, f"[B, S, H] {self.dtype}", sizes)

        # All S rows are written, whichever of them is asked about.
        def attend(query: jax.Array, key: NewHeads, value: NewHeads) -> jax.Array:
            nonlocal layer
            read, layer = step.attend(spec, query, key, value, layer)
            return read

        # [B, S] -> [B, S, H]
        embedded = embed_tokens(params["embed_tokens"], step.token_ids)
        logits, feedback = self.run(params, states, embedded, step.positions, attend, row)
        return logits, feedback, [layer]

    def run(
        self,
        params: Weights,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        attend: Attend,
        row: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the head around a given attention: what `apply` and training share.

        Args:
          states: ``[B, S, H]`` in the compute dtype, as for `apply`.
          embedded: ``[B, S, H]``, rows of the embedding, in the compute dtype.
          positions: ``[B, S]`` int32, for the rotary embedding.
          attend: called once.
          row: ``[B]`` int32 or None, as for `apply`.

        Returns:
          Logits ``[B, S, Vd]``, and the feedback ``[B, S, H]``.
        """
        c = self.config
        (spec,) = c.layers
        layer = params["layer"]
        # u = [norm(embed(t)), norm(x)]: [B, S, H] twice -> [B, S, 2 H]
        normed = rms_norm(states, layer["hidden_norm"], c.norm)
        h = rms_norm(embedded, layer["input_layernorm"], c.norm)
        h = jnp.concatenate([h, normed], axis=-1)
        # h = x + attention(u): [B, S, 2 H] -> [B, S, H]
        cos_sin = rotation(positions, spec.rotation, spec.head_dim)
        branch = self_attention(spec, layer, h, cos_sin, attend)
        # The residual stream begins with the state itself, or with its norm.
        x = (normed if c.norm_before_residual else states) + branch
        if row is not None:
            # [B, S, H] -> [B, 1, H]: all positions were written, one is asked about
            x = jnp.take_along_axis(x, row[:, None, None], axis=1)
        # h = h + mlp(norm(h))
        h = rms_norm(x, layer["post_attention_layernorm"], c.norm)
        x = x + feed_forward(spec, layer, h)
        # logits = lm_head(norm(h)): [B, S, H] -> [B, S, Vd]
        # Feedback is h, or norm(h); in the next draft step it stands where fc(g) does here.
        output = rms_norm(x, params["norm"], c.norm)
        logits = head_logits(c, params, output)
        return logits, output if c.norm_output else x
