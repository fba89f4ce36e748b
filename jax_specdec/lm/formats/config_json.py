"""`config.json` of Hugging Face checkpoints: the Llama, Qwen2 and Qwen3 families.

Files differ by age: `transformers` 4 keeps `rope_theta` and `rope_scaling`, 5 keeps both in
`rope_parameters`. Keys that are absent have the defaults of `transformers`.

A pydantic model in place of these readers was 30 lines longer, because it repeats the fields that
`LlamaConfig` declares and checks for callers, too, and pydantic takes 0.15 s to import.
"""

import dataclasses
from pathlib import Path
from typing import TypeVar

from jax_specdec.lm.formats.files import JsonObject, JsonValue, errors_name, only, read_json
from jax_specdec.lm.formats.head_kinds import check_kind
from jax_specdec.lm.models.llama_config import LlamaConfig, RopeScaling

CONFIG_FILE = "config.json"
_Made = TypeVar("_Made", LlamaConfig, RopeScaling)

_FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
"""What `model_type` says of the computation."""

_SERVED = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "rope_interleave": (False,),
    "no_rope_layers": ([],),
    "clip_qkv": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "attention_multiplier": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "scale_emb": (1.0,),
    "scale_depth": (),
}
"""Keys that would change the computation, and the values that do not."""

_PLAIN_ROPE = {
    "partial_rotary_factor": (1.0,),
    "factor": (1.0,),
    "attention_factor": (1.0,),
    "short_factor": (),
    "long_factor": (),
}
"""Likewise of rotary positions that are not scaled."""

_QUANTIZATION = ("quantization_config", "compression_config")
"""What says how weights are stored, now and in 2024."""
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
"""How weights may be quantized, in a group of it."""
_INT8_FORMATS = ("int-quantized", "naive-quantized")
"""Two names of one layout."""


def read_config(path: Path) -> LlamaConfig:
    """Reads a `config.json`.

    Raises:
      FileNotFoundError: it does not exist.
      OSError: it is not a file, or cannot be opened.
      ValueError: it is not JSON, lacks a size, has a value out of range, or asks for something that
        `Llama` does not compute; or it is of a draft head.
    """
    raw = read_json(path)
    check_kind(None, raw)
    return parse_config(raw)


def parse_config(raw: JsonObject) -> LlamaConfig:
    """Returns the sizes in the JSON object of a `config.json`; raises as `read_config` does."""
    raw.require_one_of("model_type", *_FAMILIES)
    family = raw.given("model_type", "llama")
    for key, served in _SERVED.items():
        raw.require_one_of(key, *served)
    _check_quantization(raw)
    layers = raw.given("layer_types", [])
    are_full = isinstance(layers, list) and all(layer == "full_attention" for layer in layers)
    raw.require(are_full, "layer_types", only("full_attention"))
    size = raw.needed("hidden_size")
    heads = raw.needed("num_attention_heads")
    are_whole = isinstance(size, int) and isinstance(heads, int) and heads > 0
    quotient = size // heads if are_whole else size  # LlamaConfig refuses what is not whole
    theta, scaling = _read_rope(raw)
    values = {
        "rms_norm_eps": 1e-6,
        **raw,
        "num_key_value_heads": raw.given("num_key_value_heads", heads),
        "head_dim": raw.given("head_dim", 128 if family == "qwen3" else quotient),
        "rope_theta": theta,
        "rope_scaling": scaling,
        **_FAMILIES[family],
    }
    return _made(LlamaConfig, JsonObject(values, raw.where))


def _check_quantization(raw: JsonObject) -> None:
    """Raises ValueError unless weights are stored as they are, or in int8 with a scale for a row.

    compressed-tensors then has ``weight_scale`` beside a ``weight``. What it says of activations is
    not followed: they stay in the compute dtype, which is more exact.
    """
    for name in _QUANTIZATION:
        if raw.get(name) is not None:
            _check_compressed(raw.nested(name))


def _check_compressed(said: JsonObject) -> None:
    """Raises ValueError unless compressed-tensors says that weights are in int8."""
    served = {"quant_method": ("compressed-tensors",), "format": _INT8_FORMATS}
    for key, values in served.items():
        said.require(said.get(key) in values, key, only(*values))
    said.require(said.get("kv_cache_scheme") is None, "kv_cache_scheme", only(None))
    groups = said.nested("config_groups")
    said.require(groups, "config_groups", "which names no group")
    for name in groups:
        group = groups.nested(name)
        group.require_one_of("format", *_INT8_FORMATS)
        weights = group.nested("weights")
        for key, value in _INT8.items():
            weights.require(weights.get(key) == value, key, only(value))
    sparsity = said.nested("sparsity_config")
    sparsity.require_one_of("format", "dense")
    transforms = said.nested("transform_config").nested("config_groups")
    for name in transforms:
        _check_transform(name, transforms.nested(name))


def _check_transform(name: str, transform: JsonObject) -> None:
    """Raises ValueError unless a rotation is of weights alone, which the file has rotated."""
    applied = transform.given("apply", [])
    are_objects = isinstance(applied, list) and all(isinstance(x, dict) for x in applied)
    transform.require(are_objects, "apply", "which is not a list of objects")
    for one in applied:
        where = one.get("location")
        if where not in ("weight_input", "weight_output"):
            raise ValueError(f"{transform.where} applies {name}_{where}, {only()}.")


def _made(kind: type[_Made], raw: JsonObject) -> _Made:
    """Returns a dataclass of the values of its fields; those without a default must be there."""
    fields = dataclasses.fields(kind)
    for field in fields:
        if field.default is dataclasses.MISSING:
            raw.needed(field.name)
    with errors_name(raw.where):
        return kind(**{field.name: raw[field.name] for field in fields if field.name in raw})


def config_json(config: LlamaConfig, dtype: str) -> dict[str, JsonValue]:
    """Returns the JSON object of a `config.json` that `parse_config` and `transformers` read.

    Raises:
      ValueError: no family has both biases and norms of queries and keys.
    """
    values = {key: x for key, x in dataclasses.asdict(config).items() if x is not None}
    switches = {key: values.pop(key) for key in ("qkv_bias", "qk_norm")}
    family = next((name for name, has in _FAMILIES.items() if has == switches), None)
    if family is None:
        raise ValueError("config has both qkv_bias and qk_norm, which no checkpoint format holds.")
    if "rope_scaling" in values:
        values["rope_scaling"]["rope_type"] = "llama3"
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        **values,
    }


def _read_rope(raw: JsonObject) -> tuple[JsonValue, RopeScaling | None]:
    """Returns the base of the wavelengths, not checked, and how they are scaled."""
    # transformers 5 has rope_parameters, 4 rope_scaling; 5 reads the latter where both are there.
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.nested(name)]
    found = [_read_rope_of(raw, name) for name in names or ["rope_scaling"]]
    same = found[0] == found[-1]
    raw.require(same, "rope_scaling", "but rope_parameters beside it says something else")
    return found[0]


def _read_rope_of(raw: JsonObject, name: str) -> tuple[JsonValue, RopeScaling | None]:
    """Returns base and scaling, as the object of one key says."""
    rope = raw.nested(name)
    is_flat = {"rope_type", "type", "rope_theta"} & rope.keys()
    if not is_flat and any(isinstance(value, dict) for value in rope.values()):  # by type of layer
        has_full = rope.get("full_attention") is not None
        raw.require(has_full, name, "but lacks full_attention in it, the only supported layers")
        rope = rope.nested("full_attention")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    key = "type" if "rope_type" not in rope else "rope_type"
    kind = rope.get(key, "default")
    rope.require(kind in ("default", "llama3"), key, only("default", "llama3"))
    if kind == "llama3":
        rope.require_one_of("partial_rotary_factor", *_PLAIN_ROPE["partial_rotary_factor"])
        return theta, _made(RopeScaling, rope)
    for key, served in _PLAIN_ROPE.items():
        rope.require_one_of(key, *served)
    return theta, None
