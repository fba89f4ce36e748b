"""Sizes of a Llama decoder, and the shapes of its weights."""

import dataclasses
from typing import Any

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.models.fields import check_fields

Shapes = dict[str, Any]
"""A pytree of params with a shape in place of each array."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama decoder; fields are named as in a Hugging Face `config.json`.

    Attributes:
      vocab_size: V, size of the vocabulary axis of embedding and logits.
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
      rope_scaling: how rotary frequencies are scaled; None if they are not.
      qkv_bias: queries, keys and values have biases, as in Qwen2.
      qk_norm: queries and keys pass an RMSNorm over each head before rotation, as in Qwen3.
      num_token_ids: ids from this on are padding of the vocabulary axis: their logits are -inf, so
        they are never drawn. None if all V ids are tokens.

    Raises:
      ValueError: a size is not a positive integer below 2**31, a number is not positive or not one
        that float32 holds, `rope_theta` is less than 1, or sizes do not fit together.

    Example: see `Llama`.
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
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    num_token_ids: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        # Otherwise the slowest wavelength would be the shortest.
        require(self.rope_theta >= 1, "rope_theta", "be at least 1", self.rope_theta)
        heads = self.num_attention_heads
        shared = self.num_key_value_heads
        must = f"be a multiple of num_key_value_heads = {shared}"
        require(heads % shared == 0, "num_attention_heads", must, heads)
        require(self.head_dim % 2 == 0, "head_dim", "be even", self.head_dim)
        count = self.num_token_ids
        size = self.vocab_size
        fits = count is None or (type(count) is int and 1 <= count <= size)
        must = f"be an integer in [1, vocab_size] = [1, {size}]"
        require(fits, "num_token_ids", must, count)


def param_shapes(config: LlamaConfig) -> Shapes:
    """Returns the params pytree of a config, with a shape in place of each array.

    A dict with ``embed_tokens [V, H]``, ``norm [H]``, ``lm_head [H, V]`` (absent if tied), and
    `layers`, a list of one dict per layer: ``input_layernorm [H]``,
    ``qkv_proj [H, (N + 2 N_kv) D]`` (query heads, then key heads, then value heads),
    ``o_proj [N D, H]``, ``post_attention_layernorm [H]``, ``gate_up_proj [H, 2 I]`` (gate, then
    up), ``down_proj [I, H]``; with `qkv_bias` also ``qkv_bias [(N + 2 N_kv) D]``, with `qk_norm`
    also ``q_norm [D]`` and ``k_norm [D]``.
    """
    c = config
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim  # (N + 2 N_kv) D
    layer = {
        "input_layernorm": (c.hidden_size,),
        "qkv_proj": (c.hidden_size, heads),
        "o_proj": (c.num_attention_heads * c.head_dim, c.hidden_size),
        "post_attention_layernorm": (c.hidden_size,),
        "gate_up_proj": (c.hidden_size, 2 * c.intermediate_size),
        "down_proj": (c.intermediate_size, c.hidden_size),
    }
    if c.qkv_bias:
        layer["qkv_bias"] = (heads,)
    if c.qk_norm:
        layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    shapes = {
        "embed_tokens": (c.vocab_size, c.hidden_size),
        "layers": [dict(layer) for _ in range(c.num_hidden_layers)],
        "norm": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head"] = (c.hidden_size, c.vocab_size)
    return shapes
