"""Families of models: what a `config.json` of each means, and what its tensors are called.

A family is a function from the object of a `config.json` to a `DecoderConfig`, and one row of
`FAMILIES`. A layer that computes something new also needs a field of `LayerSpec`. Keys that are
absent have the defaults of `transformers`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.formats.files import JsonObject, JsonValue, errors_name, only
from jax_specdec.lm.models.config import (
    DecoderConfig,
    LayerSpec,
    LinearScaling,
    Norm,
    RopeScaling,
    Rotation,
)

MAX_LAYERS = 1000
"""More than models have, and few enough to be listed before tensors are looked at."""

LAYER_TENSORS = {
    "input_layernorm": ["input_layernorm.weight"],
    "qkv_proj": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "qkv_bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "q_norm": ["self_attn.q_norm.weight"],
    "k_norm": ["self_attn.k_norm.weight"],
    "o_proj": ["self_attn.o_proj.weight"],
    "o_bias": ["self_attn.o_proj.bias"],
    "post_attention_layernorm": ["post_attention_layernorm.weight"],
    "pre_feedforward_layernorm": ["pre_feedforward_layernorm.weight"],
    "gate_up_proj": [f"mlp.{x}_proj.weight" for x in ("gate", "up")],
    "down_proj": ["mlp.down_proj.weight"],
    "post_feedforward_layernorm": ["post_feedforward_layernorm.weight"],
    "hidden_norm": ["hidden_norm.weight"],  # of an EAGLE-3 head
}
"""The tensors that make up each array of a layer, in the order in which they are fused; their names
follow that of the layer."""

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",  # the output matrix
}
"""What names of tensors begin with in files of text and images, and in those of text alone."""

IMAGES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
"""What names of tensors begin with that are not read."""

SCALINGS: dict[str, type[LinearScaling] | type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": RopeScaling,
}
"""By `rope_type`."""

_PLAIN_ROPE = {
    "partial_rotary_factor": (1.0,),
    "factor": (1.0,),
    "attention_factor": (1.0,),
    "short_factor": (),
    "long_factor": (),
}
"""Keys that would change how queries and keys turn, and the values that do not."""

SLIDING = "sliding_attention"
FULL = "full_attention"


def _llama(raw: JsonObject, **switches: bool) -> DecoderConfig:
    """Returns a config of equal layers with full attention."""
    return _decoder(raw, [_layer(raw, rotation=_rotation(raw), **switches)] * _num_layers(raw))


def _qwen3(raw: JsonObject) -> DecoderConfig:
    """Returns a config of layers with norms of queries and keys."""
    return _llama(raw.but(head_dim=raw.given("head_dim", 128)), qk_norm=True)


def _gemma2(raw: JsonObject) -> DecoderConfig:
    """Returns a config of layers with soft caps, every second of which has full attention."""
    defaults = dict(head_dim=256, sliding_window=4096, attn_logit_softcapping=50.0)
    raw = raw.or_else(**defaults, final_logit_softcapping=30.0)
    rotation = _rotation(raw)
    softcap = raw["attn_logit_softcapping"]
    return _gemma(raw, 2, {SLIDING: rotation, FULL: rotation}, softcap=softcap)


def _gemma3(raw: JsonObject) -> DecoderConfig:
    """Returns a config of layers with two rotations, every sixth of which has full attention."""
    if "text_config" in raw:
        raw = raw.nested("text_config")
    sizes = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    others = dict(sliding_window=4096, rope_theta=1e6, max_position_embeddings=131072)
    raw = raw.or_else(**sizes, **others)
    local = JsonObject({"rope_theta": raw.given("rope_local_base_freq", 1e4)}, raw.where)
    by_kind = any(isinstance(x, dict) for x in raw.nested("rope_parameters").values())
    sliding = _rotation(raw, SLIDING) if by_kind else _rotation(local)
    period = raw.given("sliding_window_pattern", 6)
    return _gemma(raw, period, {SLIDING: sliding, FULL: _rotation(raw)}, qk_norm=True)


def _gemma(
    raw: JsonObject, period: JsonValue, rotations: dict[str, Rotation], **fields: Any
) -> DecoderConfig:
    """Returns what Gemma 2 and 3 have in common; every `period`-th layer has full attention."""
    raw.require_one_of("hidden_activation", "gelu_pytorch_tanh")
    raw.require_one_of("use_bidirectional_attention", False)
    raw = raw.or_else(tie_word_embeddings=True)
    count = _num_layers(raw)
    require(type(period) is int and period > 0, "sliding_window_pattern", "be above 0", period)
    usual = [SLIDING if (index + 1) % period else FULL for index in range(count)]
    kinds = raw.given("layer_types", usual)
    are_kinds = isinstance(kinds, list) and all(x in (SLIDING, FULL) for x in kinds)
    rule = f"but it must be a list of {SLIDING!r} and {FULL!r}, one for each layer"
    raw.require(are_kinds and len(kinds) == count, "layer_types", rule)
    scalar = raw.given("query_pre_attn_scalar", 256)
    is_number = type(scalar) in (int, float) and scalar > 0
    raw.require(is_number, "query_pre_attn_scalar", "but it must be a number above 0")
    layers = {
        kind: _layer(
            raw,
            rotation=rotations[kind],
            window=raw["sliding_window"] if kind == SLIDING else None,
            scale=scalar**-0.5,
            norm=_norm(raw, adds_one=True, in_float32=True),
            norms="around",
            activation="gelu_tanh",
            **fields,
        )
        for kind in rotations
    }
    softcap = raw.get("final_logit_softcapping")
    own = _decoder(raw, [layers[kind] for kind in kinds])
    return dataclasses.replace(own, scales_embedding=True, logit_softcap=softcap)


def _decoder(raw: JsonObject, layers: list[LayerSpec]) -> DecoderConfig:
    """Returns a config of these layers."""
    given = ("tie_word_embeddings", "max_position_embeddings", "num_token_ids")
    return DecoderConfig(
        vocab_size=raw.needed("vocab_size"),
        hidden_size=raw.needed("hidden_size"),
        layers=tuple(layers),
        **{key: raw[key] for key in given if key in raw},
    )


def _layer(raw: JsonObject, **fields: Any) -> LayerSpec:
    """Returns a layer of the sizes that a file gives all of them, and of some fields."""
    size = raw.needed("hidden_size")
    heads = raw.needed("num_attention_heads")
    are_whole = isinstance(size, int) and isinstance(heads, int) and heads > 0
    quotient = size // heads if are_whole else size  # LayerSpec refuses what is not whole
    return LayerSpec(
        num_attention_heads=heads,
        num_key_value_heads=raw.given("num_key_value_heads", heads),
        head_dim=raw.given("head_dim", quotient),
        intermediate_size=raw.needed("intermediate_size"),
        **{"norm": _norm(raw), **fields},
    )


def _norm(raw: JsonObject, **switches: bool) -> Norm:
    """Returns the norm of all layers."""
    return Norm(rms_norm_eps=raw.get("rms_norm_eps", 1e-6), **switches)


def _num_layers(raw: JsonObject) -> int:
    """Returns how many layers there are."""
    count = raw.needed("num_hidden_layers")
    is_count = type(count) is int and 0 < count <= MAX_LAYERS
    require(is_count, "num_hidden_layers", f"be an integer in [1, {MAX_LAYERS}]", count)
    return count


def _rotation(raw: JsonObject, kind: str = FULL) -> Rotation:
    """Returns how queries and keys turn in layers of a kind."""
    # transformers 5 has rope_parameters, 4 rope_scaling; 5 reads the latter where both are there.
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.nested(name)]
    found = [_rotation_of(raw, name, kind) for name in names or ["rope_scaling"]]
    same = found[0] == found[-1]
    raw.require(same, "rope_scaling", "but rope_parameters beside it says something else")
    return found[0]


def _rotation_of(raw: JsonObject, name: str, kind: str) -> Rotation:
    """Returns a rotation, as the object of one key says."""
    rope = raw.nested(name)
    is_flat = {"rope_type", "type", "rope_theta"} & rope.keys()
    if not is_flat and any(isinstance(value, dict) for value in rope.values()):  # by kind of layer
        raw.require(rope.get(kind) is not None, name, f"but lacks {kind} in it")
        rope = rope.nested(kind)
    theta: JsonValue = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    key = "type" if "rope_type" not in rope else "rope_type"
    said = rope.get(key, "default")
    rope.require(said in ("default", *SCALINGS), key, only("default", *SCALINGS))
    scaling = None
    if said == "default":
        for key, served in _PLAIN_ROPE.items():
            rope.require_one_of(key, *served)
    else:
        rope.require_one_of("partial_rotary_factor", *_PLAIN_ROPE["partial_rotary_factor"])
        fields = [field.name for field in dataclasses.fields(SCALINGS[said])]
        with errors_name(rope.where):
            scaling = SCALINGS[said](**{name: rope.needed(name) for name in fields})
    return Rotation(rope_theta=theta, scaling=scaling)


class Family(NamedTuple):
    """What a `model_type` of a `config.json` stands for.

    Attributes:
      config: what such a file says, as a config.
      architecture: the class of transformers that is written as `architectures`.
      reads: keys that it reads and that must be as in Llama elsewhere; see `config_json`.
    """

    config: Callable[[JsonObject], DecoderConfig]
    architecture: str
    reads: tuple[str, ...] = ()


_GEMMA = ("layer_types", "hidden_act")
_GEMMA2 = (*_GEMMA, "attn_logit_softcapping", "final_logit_softcapping")
FAMILIES = {
    "llama": Family(_llama, "LlamaForCausalLM"),
    "qwen2": Family(lambda raw: _llama(raw, qkv_bias=True), "Qwen2ForCausalLM"),
    "qwen3": Family(_qwen3, "Qwen3ForCausalLM"),
    "gemma2": Family(_gemma2, "Gemma2ForCausalLM", _GEMMA2),
    "gemma3_text": Family(_gemma3, "Gemma3ForCausalLM", _GEMMA),
    "gemma3": Family(_gemma3, "Gemma3ForConditionalGeneration", _GEMMA),
}
"""By `model_type`."""
