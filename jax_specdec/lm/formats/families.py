"""Families of models: what a `config.json` of each means, and what its tensors are called.

A family is a function from the object of a `config.json` to a `DecoderConfig`, and one row of
`FAMILIES`. A layer that computes something new also needs a field of `LayerSpec`. Keys that are
absent have the defaults of `transformers`, which differ from family to family.

`config_json` calls these functions, after it has refused keys that they do not read. Here a value
is only checked where an error of `LayerSpec` or `DecoderConfig` would not name the key, or where
the value is computed with before one of those sees it.
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
    "per_layer_input_gate": ["per_layer_input_gate.weight"],
    "per_layer_projection": ["per_layer_projection.weight"],
    "post_per_layer_input_norm": ["post_per_layer_input_norm.weight"],
    "layer_scalar": ["layer_scalar"],
    "hidden_norm": ["hidden_norm.weight"],  # of an EAGLE-3 head
}
"""The tensors that make up each array of a layer, in the order in which they are fused; their names
follow that of the layer."""

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    # The output matrix. It comes after the first prefix, which begins alike.
    "language_model.": "",
}
"""What names of tensors begin with in files of text and images, and in those of text alone."""

IMAGES = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in (
        "vision_tower",
        "audio_tower",
        "vision_embedder",
        "embed_vision",
        "embed_audio",
        "multi_modal_projector",
    )
)
"""What names of tensors begin with that families with images or sound have beside text."""

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


# Of the two ways to give a key a default, `or_else` leaves null as it is, and `given` does not. A
# soft cap that is null is none at all, so only one that is absent has the default.


def _llama(raw: JsonObject, **switches: bool) -> DecoderConfig:
    """Returns a config of equal layers with full attention."""
    return _decoder(raw, [_layer(raw, rotation=_rotation(raw), **switches)] * _num_layers(raw))


def _qwen3(raw: JsonObject) -> DecoderConfig:
    """Returns a config of layers with norms of queries and keys."""
    # A Llama's head dim would be hidden_size / num_attention_heads by default.
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
    sizes = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    others = dict(sliding_window=4096, rope_theta=1e6, max_position_embeddings=131072)
    raw = raw.or_else(**sizes, **others)
    # Files of transformers 5 have a rotation for each kind of layers in rope_parameters. In others
    # rope_theta and rope_scaling are of full layers alone, and sliding ones have a base of their
    # own, without scaling.
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
    kinds = _kinds(raw, period)
    scalar = raw.given("query_pre_attn_scalar", 256)
    is_number = type(scalar) in (int, float) and scalar > 0
    raw.require(is_number, "query_pre_attn_scalar", "but it must be a number above 0")
    window = raw["sliding_window"]
    is_window = (type(window) is int and window > 0) or SLIDING not in kinds
    raw.require(is_window, "sliding_window", "but sliding layers need a positive integer")
    # One LayerSpec a kind, which all layers of the kind share.
    layers = {
        kind: _layer(
            raw,
            rotation=rotations[kind],
            window=window if kind == SLIDING else None,
            scale=scalar**-0.5,
            norm=_norm(raw, adds_one=True, in_float32=True),
            norms="around",
            activation="gelu_tanh",
            **fields,
        )
        for kind in set(kinds)
    }
    softcap = raw.get("final_logit_softcapping")
    config = _decoder(raw, [layers[kind] for kind in kinds])
    return dataclasses.replace(config, scales_embedding=True, logit_softcap=softcap)


def _kinds(raw: JsonObject, period: JsonValue) -> list[str]:
    """Returns the kind of each layer, sliding or full; every `period`-th is full by default."""
    count = _num_layers(raw)
    is_period = type(period) is int and period > 0
    require(is_period, "sliding_window_pattern", "be a positive integer", period)
    # Older files have no list, and a period or nothing.
    usual = [SLIDING if (index + 1) % period else FULL for index in range(count)]
    kinds: JsonValue = raw.given("layer_types", usual)
    are_kinds = isinstance(kinds, list) and all(x in (SLIDING, FULL) for x in kinds)
    rule = f"but it must be a list of {SLIDING!r} and {FULL!r}, one for each layer"
    raw.require(are_kinds and len(kinds) == count, "layer_types", rule)
    return list(kinds)


def _gemma4(raw: JsonObject) -> DecoderConfig:
    """Returns a config of layers of two head dims; the last may read the keys of earlier ones."""
    layers = gemma4_layers(raw)
    if layers[0].per_layer_input is not None:
        # Both embeddings are looked up by the same ids, and have as many rows here.
        size = raw.given("vocab_size_per_layer_input", 262144)
        raw.require(size == raw.get("vocab_size"), "vocab_size_per_layer_input", "not vocab_size")
    config = _decoder(raw.or_else(tie_word_embeddings=True, max_position_embeddings=131072), layers)
    softcap = raw.get("final_logit_softcapping")
    return dataclasses.replace(config, scales_embedding=True, logit_softcap=softcap)


def gemma4_layers(raw: JsonObject, keys_of: dict[str, int] | None = None) -> list[LayerSpec]:
    """Returns the layers of a Gemma 4 decoder, or of an assistant to one.

    Args:
      raw: the object of text.
      keys_of: of an assistant, the target's layer that layers of a kind read; None for a decoder.

    Raises:
      ValueError: a value is out of range or not supported.
    """
    raw.require_one_of("hidden_activation", "gelu_pytorch_tanh")
    raw.require_one_of("use_bidirectional_attention", "vision")  # of images, which are not read
    raw.require_one_of("use_double_wide_mlp", False, True)
    why = "but a mixture of experts, as of Gemma 4 26B-A4B, is not supported"
    raw.require(not raw.given("enable_moe_block", False), "enable_moe_block", why)
    raw = raw.or_else(num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    raw = raw.or_else(sliding_window=512, hidden_size_per_layer_input=256)
    kinds = _kinds(raw, 6)
    kinds[-1] = FULL  # whatever the file says
    # The last layers of a decoder have no keys of their own; of an assistant, none has.
    num_shared = raw.given("num_kv_shared_layers", 0)
    max_shared = len(kinds) if keys_of is not None else len(kinds) - 1
    is_count = type(num_shared) is int and 0 <= num_shared <= max_shared
    raw.require(is_count, "num_kv_shared_layers", f"but it must be in [0, {max_shared}]")
    num_own = len(kinds) - num_shared
    if keys_of is None:
        # A layer without keys reads those of the last layer of its kind that has some: later
        # indices replace earlier ones here.
        keys_of = {kind: index for index, kind in enumerate(kinds[:num_own])}
        missing = set(kinds) - keys_of.keys()
        raw.require(not missing, "num_kv_shared_layers", "which leaves a kind of layers no keys")
    rotations = {kind: _gemma4_rotation(raw, kind) for kind in (SLIDING, FULL)}
    layers = []
    for index, kind in enumerate(kinds):
        is_own = index < num_own
        layer = _layer(
            raw.but(**_gemma4_heads(raw, index, kind)),
            rotation=rotations[kind],
            window=raw["sliding_window"] if kind == SLIDING else None,
            scale=1.0,
            norm=_norm(raw, in_float32=True),
            norms="around",
            activation="gelu_tanh",
            qk_norm=True,
            v_norm=True,
            value_is_key=kind == FULL and raw.given("attention_k_eq_v", False),
            keys_of=None if is_own else keys_of[kind],
            per_layer_input=raw["hidden_size_per_layer_input"] or None,
            has_scalar=True,
        )
        # Only layers that save the matrices of keys and values have the wider ones.
        if raw.get("use_double_wide_mlp") and not is_own:
            size = 2 * layer.intermediate_size
            layer = dataclasses.replace(layer, intermediate_size=size)
        layers.append(layer)
    return layers


def _gemma4_rotation(raw: JsonObject, kind: str) -> Rotation:
    """Returns how queries and keys turn in layers of a kind: the first pairs of full ones."""
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    raw = raw.but(rope_parameters=raw.given("rope_parameters", {SLIDING: sliding, FULL: full}))
    rope = raw.nested("rope_parameters").nested(kind)
    if rope.get("rope_type") != "proportional":
        return _rotation(raw, kind)
    # Frequencies are those of the whole head dim, and only a part of the pairs has one. It is a
    # `partial_rotary_factor` of another meaning than the one that `_rotation_of` refuses.
    rope.require_one_of("factor", 1.0)
    fraction = rope.given("partial_rotary_factor", 1.0)
    with errors_name(rope.where):
        return Rotation(rope_theta=rope.needed("rope_theta"), fraction=fraction)


def _gemma4_heads(raw: JsonObject, index: int, kind: str) -> dict[str, JsonValue]:
    """Returns the keys of sizes of heads that a layer has of its own, in place of those of all."""
    by_layer = raw.nested("per_layer_config")  # of transformers 5.24 and later
    if by_layer:
        # A layer that is not listed is as the others. What else could be said of one layer would
        # change what it computes.
        layer = by_layer.nested(str(index))
        known = ("head_dim", "num_key_value_heads")
        by_layer.require(layer.keys() <= {*known}, str(index), only(*known))
        return layer
    # Older files say it by kind: full layers have a head dim of their own, and, where their values
    # are their keys, their own number of heads.
    if kind == SLIDING:
        return {}
    sizes = {"head_dim": raw.given("global_head_dim", 512)}
    heads = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    return sizes if heads is None else sizes | {"num_key_value_heads": heads}


def _decoder(raw: JsonObject, layers: list[LayerSpec]) -> DecoderConfig:
    """Returns a config of these layers."""
    # `num_token_ids` is a key that `config_json` writes; `transformers` has none for it.
    optional = ("tie_word_embeddings", "max_position_embeddings", "num_token_ids")
    return DecoderConfig(
        vocab_size=raw.needed("vocab_size"),
        hidden_size=raw.needed("hidden_size"),
        layers=tuple(layers),
        **{key: raw[key] for key in optional if key in raw},
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
    # An empty object says nothing, and where neither says anything the default is made of one.
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.nested(name)]
    rotations = [_rotation_of(raw, name, kind) for name in names or ["rope_scaling"]]
    same = rotations[0] == rotations[-1]
    raw.require(same, "rope_scaling", "but rope_parameters beside it says something else")
    return rotations[0]


def _rotation_of(raw: JsonObject, name: str, kind: str) -> Rotation:
    """Returns a rotation, as the object of one key says."""
    # Either an object for each kind of layers, also in files of families with full layers alone, or
    # the keys of the one rotation.
    rope = raw.nested(name)
    is_flat = {"rope_type", "type", "rope_theta"} & rope.keys()
    if not is_flat and any(isinstance(value, dict) for value in rope.values()):  # by kind of layer
        raw.require(rope.get(kind) is not None, name, f"but lacks {kind} in it")
        rope = rope.nested(kind)
    # The base stands beside a rope_scaling, and in a rope_parameters.
    theta: JsonValue = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    # Older files have "type"; the newer key counts where both are there.
    key = "type" if "rope_type" not in rope else "rope_type"
    rope_type = rope.get(key, "default")
    rope.require(rope_type in ("default", *SCALINGS), key, only("default", *SCALINGS))
    scaling = None
    if rope_type == "default":
        # A factor without a type would otherwise be passed over in silence.
        for key, served in _PLAIN_ROPE.items():
            rope.require_one_of(key, *served)
    else:
        rope.require_one_of("partial_rotary_factor", *_PLAIN_ROPE["partial_rotary_factor"])
        # The fields of the classes have the names of the keys.
        fields = [field.name for field in dataclasses.fields(SCALINGS[rope_type])]
        with errors_name(rope.where):
            scaling = SCALINGS[rope_type](**{name: rope.needed(name) for name in fields})
    return Rotation(rope_theta=theta, scaling=scaling)


class Family(NamedTuple):
    """What a `model_type` of a `config.json` stands for.

    Attributes:
      name: what people call it.
      config: what such a file says, as a config.
      architecture: the class of transformers that is written as `architectures`.
      reads: keys that it reads and that must be as in Llama elsewhere; see `config_json`.
      inside: the key of an object in the file that says all of it; None for the file itself.
      unread: what names of tensors begin with that are of no text, and not read.
    """

    name: str
    config: Callable[[JsonObject], DecoderConfig]
    architecture: str
    reads: tuple[str, ...] = ()
    inside: str | None = None
    unread: tuple[str, ...] = ()


# Gemma's functions check `hidden_activation`, by which these families compute, not `hidden_act`.
_GEMMA = ("layer_types", "hidden_act")
_GEMMA2 = (*_GEMMA, "attn_logit_softcapping", "final_logit_softcapping")
_INSIDE = ("text_config", IMAGES)  # of files that have images or sound beside text
FAMILIES = {
    "llama": Family("Llama", _llama, "LlamaForCausalLM"),
    "qwen2": Family("Qwen2", lambda raw: _llama(raw, qkv_bias=True), "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3", _qwen3, "Qwen3ForCausalLM"),
    "gemma2": Family("Gemma 2", _gemma2, "Gemma2ForCausalLM", _GEMMA2),
    "gemma3_text": Family("Gemma 3", _gemma3, "Gemma3ForCausalLM", _GEMMA),
    "gemma3": Family("Gemma 3", _gemma3, "Gemma3ForConditionalGeneration", _GEMMA, *_INSIDE),
    "gemma4_text": Family("Gemma 4", _gemma4, "Gemma4ForCausalLM", _GEMMA2),
    "gemma4": Family("Gemma 4", _gemma4, "Gemma4ForConditionalGeneration", _GEMMA2, *_INSIDE),
    "gemma4_unified_text": Family("Gemma 4", _gemma4, "Gemma4UnifiedForCausalLM", _GEMMA2),
    "gemma4_unified": Family(
        "Gemma 4", _gemma4, "Gemma4UnifiedForConditionalGeneration", _GEMMA2, *_INSIDE
    ),
}
"""By `model_type`."""

FAMILY_NAMES = [*dict.fromkeys(family.name for family in FAMILIES.values())]
"""Each once: several `model_type`s may be one family."""
