"""`config.json` of Hugging Face checkpoints: the Llama, Qwen2 and Qwen3 families.

Files differ by age: `transformers` 4 keeps `rope_theta` and `rope_scaling`, 5 keeps both in
`rope_parameters`. Keys that are absent have the defaults of `transformers`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax_specdec._src.models.fields import quoted, shown
from jax_specdec._src.models.files import read_json
from jax_specdec._src.models.llama_config import LlamaConfig
from jax_specdec._src.models.rotary import RopeScaling

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
    return parse_config(read_json(path), shown(path))


def parse_config(raw: dict[str, Any], where: str) -> LlamaConfig:
    """The sizes in the JSON object of a `config.json`.

    Args:
      raw: the object.
      where: what messages call it.

    Raises:
      ValueError: as in `read_config`.
    """
    family = "llama" if raw.get("model_type") is None else raw["model_type"]
    if not isinstance(family, str) or family not in _FAMILIES:
        only = _one_of(_FAMILIES)
        raise ValueError(f"{where} has model_type = {quoted(family)}, but only {only}.")
    for key, allowed in _UNSUPPORTED.items():
        if raw.get(key) not in allowed:
            only = _one_of(allowed[:1])
            raise ValueError(f"{where} has {key} = {quoted(raw[key])}, but only {only}.")
    layers = raw.get("layer_types")
    if layers is not None and not (
        isinstance(layers, list) and all(layer == "full_attention" for layer in layers)
    ):
        raise ValueError(
            f"{where} has layer_types other than 'full_attention', the only supported."
        )
    for key in _SIZES:
        if raw.get(key) is None:
            raise ValueError(f"{where} lacks {key}.")
    values = {key: raw[key] for key in _SIZES}
    heads = raw["num_attention_heads"]
    if (head_dim := raw.get("head_dim")) is None:
        head_dim = 128 if family == "qwen3" else _quotient(raw["hidden_size"], heads)
    key_value_heads = raw.get("num_key_value_heads")
    theta, scaling = _read_rope(where, raw)
    try:
        return LlamaConfig(
            **values,
            num_key_value_heads=heads if key_value_heads is None else key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            num_token_ids=raw.get("num_token_ids"),
            **_FAMILIES[family],
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def config_text(config: LlamaConfig, dtype: str) -> str:
    """A `config.json` that `read_config` and `transformers` read; see `config_json`."""
    return json.dumps(config_json(config, dtype), indent=2) + "\n"


def config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The JSON object of a `config.json`, the inverse of `parse_config`.

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


def _read_rope(where: str, raw: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The base of the wavelengths, and the fields of a `RopeScaling`, not checked."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    rope = {} if raw.get(name) is None else raw[name]
    if not isinstance(rope, dict):
        raise ValueError(f"{where} has {name} = {quoted(rope)}, which is not a JSON object.")
    flat = {"rope_type", "type", "rope_theta"} & rope.keys()
    if not flat and any(isinstance(value, dict) for value in rope.values()):  # by type of layer
        if not isinstance(rope.get("full_attention"), dict):
            raise ValueError(
                f"{where} has {name} = {quoted(rope)}, but lacks full_attention in it, the only "
                "supported type of layer."
            )
        rope = rope["full_attention"]
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        only = _one_of(("default", "llama3"))
        raise ValueError(f"{where} has {name} of rope_type {quoted(kind)}, but only {only}.")
    rotated = rope.get("partial_rotary_factor")
    if rotated not in _UNSUPPORTED["partial_rotary_factor"]:
        raise ValueError(
            f"{where} has partial_rotary_factor = {quoted(rotated)} in {name}, "
            f"but only {_one_of((1.0,))}."
        )
    if kind == "default":
        return theta, None
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    for key in names:
        if key not in rope:
            raise ValueError(f"{where} lacks {key} in {name}.")
    return theta, {key: rope[key] for key in names}


def _quotient(size: Any, heads: Any) -> Any:
    whole = isinstance(size, int) and isinstance(heads, int) and heads > 0
    return size // heads if whole else size  # what is not whole is refused by LlamaConfig


def _one_of(values: Any) -> str:
    *others, last = [repr(value) for value in values]
    return f"{', '.join(others)} and {last} are supported" if others else f"{last} is supported"
