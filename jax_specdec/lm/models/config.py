"""What a decoder is, as data: its layers, one by one, and the shapes of its weights.

A family of models is a function from a `config.json` to a `DecoderConfig`; see `formats.families`.
`layers` computes what a `LayerSpec` says, `llama` a whole decoder; draft heads have configs of
their own, of the same layers (`heads`). The shapes of a layer's weights are written here alone:
what makes, checks, reads or saves weights walks them.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from jax_specdec._src.base.arrays import check_choice, check_type, require
from jax_specdec.lm.models.fields import check_fields

Shapes = dict[str, Any]
"""A pytree of params with a shape in place of each array."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """How longer contexts slow all of a rotation down (`rope_type` "linear").

    Attributes:
      factor: by which frequencies are divided.

    Raises:
      ValueError: the factor is not a number of at least 1 that float32 holds.

    Example: see `Rotation`.
    """

    factor: float

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.factor >= 1, "factor", "be at least 1", self.factor)

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the frequencies ``[D/2]``, scaled."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later slow the rotation down (`rope_type` "llama3").

    With wavelength w = 2 pi / f of a frequency f and C = original_max_position_embeddings:
    f stays where C / w > high_freq_factor, becomes f / factor where C / w < low_freq_factor, and is
    interpolated linearly in C / w in between. Fields are named as in a Hugging Face `config.json`.

    Attributes:
      factor: by which slow frequencies are divided.
      low_freq_factor: rotations in the original context up to which a frequency is slow.
      high_freq_factor: rotations in the original context from which a frequency is fast.
      original_max_position_embeddings: longest context before the model was extended.

    Raises:
      ValueError: a field is not a positive number that float32 holds, the context is not an
        integer, the factor is less than 1, or the two limits are not in order.

    Example:
      >>> scaling = RopeScaling(
      ...     factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
      ...     original_max_position_embeddings=8192)
      >>> scaling.factor
      8.0
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.factor >= 1, "factor", "be at least 1", self.factor)
        low = self.low_freq_factor
        high = self.high_freq_factor
        require(low < high, "low_freq_factor", f"be less than high_freq_factor = {high}", low)

    def scaled(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns the frequencies ``[D/2]``, scaled."""
        # C / w = C f / (2 pi): how often a pair turns in the original context.
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        low = self.low_freq_factor
        high = self.high_freq_factor
        # 1 where it is fast: f stays. 0 where it is slow: f / factor. In between, both are mixed.
        fast = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (fast + (1 - fast) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotation:
    """How queries and keys turn with their position.

    Attributes:
      rope_theta: base of the wavelengths.
      scaling: how frequencies are scaled; None if they are not.
      fraction: of the pairs, from the first one on, that turn; the others stay, as in Gemma 4.

    Raises:
      ValueError: `rope_theta` is not a number of at least 1 that float32 holds, or `fraction` not
        one above 0 and at most 1.

    Example:
      >>> Rotation(rope_theta=100.0).frequencies(4).tolist()
      [1.0, 0.1]
      >>> longer = Rotation(rope_theta=100.0, scaling=LinearScaling(factor=4.0))
      >>> longer.frequencies(4).tolist()
      [0.25, 0.025]
    """

    rope_theta: float = 10000.0
    scaling: LinearScaling | RopeScaling | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.fraction <= 1, "fraction", "be at most 1", self.fraction)
        # Otherwise the slowest wavelength would be the shortest.
        require(self.rope_theta >= 1, "rope_theta", "be at least 1", self.rope_theta)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns the radians per position of the pairs ``[D/2]``; float64."""
        # theta^(-2i/D) of pair i, from 1 on downwards. On the host, in float64: `layers.rotation`
        # rounds them to float32 once, after they are scaled.
        plain = self.rope_theta ** (-np.arange(0, head_dim, 2) / head_dim)
        # A frequency of 0 is an angle of 0 at every position: the pair stays as it is.
        plain[int(self.fraction * head_dim // 2) :] = 0
        return plain if self.scaling is None else self.scaling.scaled(plain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """What an RMSNorm computes, of a weight w: w x / sqrt(mean(x^2) + eps).

    Attributes:
      rms_norm_eps: added to the mean square.
      adds_one: 1 + w stands for w, as in Gemma.
      in_float32: x is rounded to its dtype after it is scaled, as in Gemma, and not before.

    Raises:
      ValueError: `rms_norm_eps` is not a positive number that float32 holds.

    Example: see `LayerSpec`.
    """

    rms_norm_eps: float = 1e-5
    adds_one: bool = False
    in_float32: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What a decoder layer is; sizes are named as in a Hugging Face `config.json`.

    Attributes:
      num_attention_heads: N, query heads.
      num_key_value_heads: N_kv, heads of keys and values; each serves N / N_kv query heads.
      head_dim: D, width of one head; even.
      intermediate_size: I, width of the feed-forward layer.
      rotation: of queries and keys.
      window: positions that a row sees, its own included; None for all.
      softcap: a bound of attention scores, as in Gemma 2; None without one.
      scale: multiplies the products of queries and keys; None for 1 / sqrt(D).
      norm: of all norms of the layer.
      norms: "before" each half of the layer, as in Llama; "around": before and after, as in Gemma.
      activation: of the gate: "silu", or "gelu_tanh", the approximation of GELU by tanh.
      qkv_bias: queries, keys and values have biases, as in Qwen2.
      o_bias: the output of attention has a bias.
      qk_norm: queries and keys pass an RMSNorm over each head before rotation, as in Qwen3.
      v_norm: values pass an RMSNorm over each head, without a weight, as in Gemma 4.
      value_is_key: values are the keys before norm and rotation, without a matrix of their own.
      keys_of: the earlier layer whose keys and values are read, in place of own ones, of the same
        heads and head dim; of a head, the layer of its target. None for own ones.
      per_layer_input: P, width of what the layer gets of each token beside the residual stream, as
        in Gemma 4's E2B and E4B; None for nothing.
      has_scalar: the residual stream is multiplied by a number at the end of the layer.

    Raises:
      ValueError: a size is not a positive integer below 2**31, a number is not positive or not one
        that float32 holds, or sizes do not fit together.
      TypeError: a norm or a rotation is something else.

    Example:
      >>> gemma = LayerSpec(
      ...     num_attention_heads=4, num_key_value_heads=1, head_dim=256, intermediate_size=2048,
      ...     window=512, norm=Norm(rms_norm_eps=1e-6, adds_one=True, in_float32=True),
      ...     norms="around", activation="gelu_tanh", qk_norm=True)
      >>> gemma.head_sizes  # of queries, keys and values
      (1024, 256, 256)
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rotation: Rotation = Rotation()
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    norm: Norm = Norm()
    norms: Literal["before", "around"] = "before"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    value_is_key: bool = False
    keys_of: int | None = dataclasses.field(default=None, metadata=dict(least=0))
    per_layer_input: int | None = None
    has_scalar: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_type("rotation", self.rotation, Rotation)
        check_type("norm", self.norm, Norm)
        check_choice("norms", self.norms, ("before", "around"))
        check_choice("activation", self.activation, ("silu", "gelu_tanh"))
        # Each head of keys is shared by as many query heads, and a head is turned in pairs.
        heads = self.num_attention_heads
        shared = self.num_key_value_heads
        must = f"be a multiple of num_key_value_heads = {shared}"
        require(heads % shared == 0, "num_attention_heads", must, heads)
        require(self.head_dim % 2 == 0, "head_dim", "be even", self.head_dim)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Widths of all query heads, all key heads and all value heads: N D, N_kv D, N_kv D.

        Those that the layer computes with matrices of its own, of the three.
        """
        query = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        # Columns of `qkv_proj` side by side; `rotated_heads` takes them apart again.
        if self.keys_of is not None:
            return (query,)
        return (query, keys) if self.value_is_key else (query, keys, keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig:
    """What decoders and draft heads have in common; `DecoderConfig` and heads say what it is."""

    vocab_size: int
    hidden_size: int
    # Not hashed, which would take longer than a call does: few configs differ in layers alone.
    layers: tuple[LayerSpec, ...] = dataclasses.field(hash=False)
    tie_word_embeddings: bool = False
    num_token_ids: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        # A tuple, because a config is static: hashed, and compared by value.
        layers = self.layers
        are_layers = isinstance(layers, tuple) and all(isinstance(x, LayerSpec) for x in layers)
        must = "be a tuple of at least one LayerSpec"
        require(are_layers and layers, "layers", must, layers, error=TypeError)
        size = self.vocab_size
        fits = self.num_token_ids is None or self.num_token_ids <= size
        must = f"be an integer in [1, vocab_size] = [1, {size}]"
        require(fits, "num_token_ids", must, self.num_token_ids)

    @property
    def norm(self) -> Norm:
        """The norm after the last layer, of the same kind as those in it."""
        return self.layers[-1].norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayersConfig):
    """A decoder: its layers, and what is before and after them.

    Attributes:
      vocab_size: V, size of the vocabulary axis of embedding and logits.
      hidden_size: H, width of the residual stream.
      layers: one `LayerSpec` for each layer, the first one first.
      tie_word_embeddings: the output matrix is the embedding, transposed.
      num_token_ids: ids from this on are padding of the vocabulary axis: their logits are -inf, so
        they are never drawn. None if all V ids are tokens.
      scales_embedding: rows of the embedding are multiplied by sqrt(H) in their dtype, as in Gemma.
      logit_softcap: a bound of the logits, as in Gemma 2; None without one.
      max_position_embeddings: longest context seen in training; information only.

    Raises:
      ValueError: a size is not a positive integer below 2**31, or sizes do not fit together; layers
        with the keys of others are not the last, or those have other heads or none; some have
        inputs of their own and others none.
      TypeError: there are no layers.

    Example:
      >>> layer = LayerSpec(
      ...     num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64)
      >>> config = DecoderConfig(vocab_size=256, hidden_size=32, layers=(layer,) * 2)
      >>> param_shapes(config)["layers"][0]["o_proj"]
      (32, 32)
    """

    scales_embedding: bool = False
    logit_softcap: float | None = None
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        # What layers get of a token comes from one matrix of all layers, [V, L P].
        inputs = {spec.per_layer_input for spec in self.layers}
        require(len(inputs) == 1, "layers", "all have the same per_layer_input", inputs)
        # A cache has keys and values of the first layers alone, those with keys of their own, so
        # that the number of a layer is its place in the cache.
        owners = [spec for spec in self.layers if spec.keys_of is None]
        for index, spec in enumerate(self.layers):
            name = f"layers[{index}].keys_of"
            source = spec.keys_of
            is_last = (source is None) == (index < len(owners))
            require(is_last, name, f"be None in the first {len(owners)} layers alone", source)
            if source is not None:
                must = f"be one of the first {len(owners)} layers, of the same heads"
                fits = source < len(owners) and same_heads(spec, owners[source])
                require(fits, name, must, source)

    @property
    def per_layer_input(self) -> int | None:
        """P, width of what each layer gets of a token; None for nothing."""
        return self.layers[0].per_layer_input


def same_heads(one: LayerSpec, other: LayerSpec) -> bool:
    """Returns whether the keys and values of two layers have the same shapes."""
    heads = one.num_key_value_heads, one.head_dim
    return heads == (other.num_key_value_heads, other.head_dim)


def layer_shapes(spec: LayerSpec, hidden_size: int) -> Shapes:
    """Returns the params of a layer, with a shape in place of each array.

    ``qkv_proj [H, (N + 2 N_kv) D]`` (query heads, then key heads, then value heads),
    ``o_proj [N D, H]``, ``gate_up_proj [H, 2 I]`` (gate, then up), ``down_proj [I, H]``; norms
    ``[H]``: ``input_layernorm`` and ``post_attention_layernorm`` before the two halves, or, with
    norms around them, ``input_layernorm``, ``post_attention_layernorm``,
    ``pre_feedforward_layernorm`` and ``post_feedforward_layernorm``. With `qkv_bias` also
    ``qkv_bias [(N + 2 N_kv) D]``, with `o_bias` ``o_bias [H]``, with `qk_norm` ``q_norm [D]`` and
    ``k_norm [D]``. Heads that the layer does not compute are not among these. With
    `per_layer_input` ``per_layer_input_gate [H, P]``, ``per_layer_projection [P, H]`` and
    ``post_per_layer_input_norm [H]``; with `has_scalar` ``layer_scalar [1]``.
    """
    heads = sum(spec.head_sizes)  # (N + 2 N_kv) D
    shapes: Shapes = {
        "input_layernorm": (hidden_size,),
        "qkv_proj": (hidden_size, heads),
        "o_proj": (spec.head_sizes[0], hidden_size),
        "post_attention_layernorm": (hidden_size,),
        "gate_up_proj": (hidden_size, 2 * spec.intermediate_size),
        "down_proj": (spec.intermediate_size, hidden_size),
    }
    # A Llama's `post_attention_layernorm` comes before its second half; with norms around both
    # halves, as in Gemma, it comes after the first one.
    if spec.norms == "around":
        shapes["pre_feedforward_layernorm"] = (hidden_size,)
        shapes["post_feedforward_layernorm"] = (hidden_size,)
    if spec.qkv_bias:
        shapes["qkv_bias"] = (heads,)
    if spec.o_bias:
        shapes["o_bias"] = (hidden_size,)
    # One weight for all heads; a norm of values has none.
    if spec.qk_norm:
        shapes["q_norm"] = (spec.head_dim,)
    if spec.qk_norm and spec.keys_of is None:
        shapes["k_norm"] = (spec.head_dim,)
    if (size := spec.per_layer_input) is not None:
        shapes["per_layer_input_gate"] = (hidden_size, size)
        shapes["per_layer_projection"] = (size, hidden_size)
        shapes["post_per_layer_input_norm"] = (hidden_size,)
    if spec.has_scalar:
        shapes["layer_scalar"] = (1,)
    return shapes


def param_shapes(config: DecoderConfig) -> Shapes:
    """Returns the params pytree of a config, with a shape in place of each array.

    A dict with ``embed_tokens [V, H]``, ``norm [H]``, ``lm_head [H, V]`` (absent if tied), and
    `layers`, a list of one dict per layer, as `layer_shapes` says. With `per_layer_input`
    ``embed_tokens_per_layer [V, L P]``, ``per_layer_model_projection [H, L P]`` and
    ``per_layer_projection_norm [P]``.
    """
    c = config
    shapes = {
        "embed_tokens": (c.vocab_size, c.hidden_size),
        "layers": [layer_shapes(spec, c.hidden_size) for spec in c.layers],
        "norm": (c.hidden_size,),
    }
    # Of each token, [P] for each of L layers: as L P columns, so that one product gives all.
    if c.per_layer_input is not None:
        width = len(c.layers) * c.per_layer_input
        shapes["embed_tokens_per_layer"] = (c.vocab_size, width)
        shapes["per_layer_model_projection"] = (c.hidden_size, width)
        shapes["per_layer_projection_norm"] = (c.per_layer_input,)
    if not c.tie_word_embeddings:
        shapes["lm_head"] = (c.hidden_size, c.vocab_size)
    return shapes
