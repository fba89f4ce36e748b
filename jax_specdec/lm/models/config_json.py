"""`config.json` of Hugging Face checkpoints: the Llama, Qwen2 and Qwen3 families.

Files differ by age: `transformers` 4 keeps `rope_theta` and `rope_scaling`, 5 keeps both in
`rope_parameters`. Keys that are absent have the defaults of `transformers`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jax_specdec.lm.models.files import JsonObject, errors_name, read_json
from jax_specdec.lm.models.llama_config import LlamaConfig
from jax_specdec.lm.models.rotary import RopeScaling

CONFIG_FILE = "config.json"

_FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
"""What `model_type` says of the computation."""

_UNSUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
}
"""Configuration keys that would change the computation, and the values that do not."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def read_config(path: Path) -> LlamaConfig:
    """Read a `config.json`.

    Raises:
      FileNotFoundError: it does not exist.
      OSError: it is not a file, or cannot be opened.
      ValueError: it is not JSON, lacks a size, has a value out of range, or asks for something that
        `Llama` does not compute.
    """
    return parse_config(read_json(path))


def parse_config(raw: JsonObject) -> LlamaConfig:
    """The sizes in the JSON object of a `config.json`.

    Raises:
      ValueError: as in `read_config`.
    """
    family = raw.given("model_type", "llama")
    is_known = isinstance(family, str) and family in _FAMILIES
    raw.require(is_known, "model_type", _only(*_FAMILIES))
    for key, allowed in _UNSUPPORTED.items():
        raw.require(raw.get(key) in allowed, key, _only(allowed[0]))
    layers = raw.given("layer_types", [])
    are_full = isinstance(layers, list) and all(layer == "full_attention" for layer in layers)
    raw.require(are_full, "layer_types", _only("full_attention"))
    values = {key: raw.needed(key) for key in _SIZES}
    size, heads = values["hidden_size"], values["num_attention_heads"]
    are_whole = isinstance(size, int) and isinstance(heads, int) and heads > 0
    quotient = size // heads if are_whole else size  # LlamaConfig refuses what is not whole
    theta, scaling = _read_rope(raw)
    with errors_name(raw.where):
        return LlamaConfig(
            **values,
            num_key_value_heads=raw.given("num_key_value_heads", heads),
            head_dim=raw.given("head_dim", 128 if family == "qwen3" else quotient),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            num_token_ids=raw.get("num_token_ids"),
            **_FAMILIES[family],
        )


def config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The JSON object of a `config.json` that `parse_config` and `transformers` read.

    Raises:
      ValueError: no family has both biases and norms of queries and keys.
    """
    values = dataclasses.asdict(config)
    switches = {key: values.pop(key) for key in ("qkv_bias", "qk_norm")}
    family = next((name for name, has in _FAMILIES.items() if has == switches), None)
    if family is None:
        raise ValueError("config has both qkv_bias and qk_norm, which no checkpoint format holds.")
    if values["rope_scaling"] is None:
        del values["rope_scaling"]
    else:
        values["rope_scaling"]["rope_type"] = "llama3"
    if values["num_token_ids"] is None:
        del values["num_token_ids"]
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        **values,
    }


def _read_rope(raw: JsonObject) -> tuple[Any, dict[str, Any] | None]:
    """The base of the wavelengths, and the fields of a `RopeScaling`, not checked."""
    names = [name for name in ("rope_parameters", "rope_scaling") if raw.nested(name)]
    found = [_read_rope_of(raw, name) for name in names or ["rope_scaling"]]
    # transformers 5 reads rope_scaling alone where both are there.
    same = found[0] == found[-1]
    raw.require(same, "rope_scaling", "but rope_parameters beside it says something else")
    return found[0]


def _read_rope_of(raw: JsonObject, name: str) -> tuple[Any, dict[str, Any] | None]:
    rope = raw.nested(name)
    is_flat = {"rope_type", "type", "rope_theta"} & rope.keys()
    if not is_flat and any(isinstance(value, dict) for value in rope.values()):  # by type of layer
        has_full = rope.get("full_attention") is not None
        raw.require(has_full, name, "but lacks full_attention in it, the only supported layers")
        rope = rope.nested("full_attention")
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    key = "type" if "rope_type" not in rope else "rope_type"
    kind = rope.get(key, "default")
    rope.require(kind in ("default", "llama3"), key, _only("default", "llama3"))
    rotated = "partial_rotary_factor"
    rope.require(rope.get(rotated) in _UNSUPPORTED[rotated], rotated, _only(1.0))
    if kind == "default":
        return theta, None
    return theta, {x.name: rope.needed(x.name) for x in dataclasses.fields(RopeScaling)}


def _only(*supported: object) -> str:
    *others, last = map(repr, supported)
    listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"but only {listed} supported"
