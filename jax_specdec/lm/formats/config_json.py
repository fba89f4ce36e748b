"""`config.json` of Hugging Face checkpoints: what is refused in all of them, and how it is written.

A key that is not read does no harm if it leaves the computation as it is: files have many of those.
One that would change it must be read by the family or have a value that changes nothing; else the
checkpoint would run, and its text would be wrong without an error. What a file means is up to its
family, see `families`; readers of heads use `parse_config` for their layers.

A pydantic model in place of these readers was 30 lines longer, because it repeats the fields that
`LayerSpec` declares and checks for callers, too, and pydantic takes 0.15 s to import.
"""

import contextlib
import dataclasses
from pathlib import Path

from jax_specdec.lm.formats.families import FAMILIES, FULL, SCALINGS, SLIDING, Family
from jax_specdec.lm.formats.files import JsonObject, JsonValue, errors_name, only, read_json
from jax_specdec.lm.formats.head_kinds import check_is_no_head
from jax_specdec.lm.models.config import DecoderConfig

CONFIG_FILE = "config.json"

# Architectures that are Llama's but for a switch or a factor call themselves "llama", too. The soft
# caps are Gemma 2's, multipliers and `logits_scaling` Granite's, `scale_emb` and `scale_depth`
# MiniCPM's. Without values a key must be absent or null.
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
"""Keys that would change the computation, and the values that do not; a family may read some."""

_QUANTIZATION = ("quantization_config", "compression_config")
"""What says how weights are stored, now and in 2024."""
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
"""How weights may be quantized, in a group of it."""
_INT8_FORMATS = ("int-quantized", "naive-quantized")
"""Two names of one layout."""


def read_config(path: Path) -> DecoderConfig:
    """Reads a `config.json`.

    Raises:
      FileNotFoundError: it does not exist.
      OSError: it is not a file, or cannot be opened.
      ValueError: it is not JSON, lacks a size, has a value out of range, or asks for something that
        `Llama` does not compute; or it is of a draft head.
    """
    return parse_config(read_model_json(path))


def read_model_json(path: Path) -> JsonObject:
    """Reads a `config.json` that is of no draft head; raises as `read_config` does."""
    raw = read_json(path)
    check_is_no_head(raw)
    return raw


def family_of(raw: JsonObject) -> Family:
    """Returns the family that a `config.json` names; that of Llama if it names none.

    Raises:
      ValueError: it names another.
    """
    raw.require_one_of("model_type", *FAMILIES)
    return FAMILIES[raw.given("model_type", "llama")]


def parse_config(raw: JsonObject) -> DecoderConfig:
    """Returns the sizes in the JSON object of a `config.json`; raises as `read_config` does."""
    family = family_of(raw)
    # How weights are stored stands beside the object of text, what is computed in it.
    _check_quantization(raw)
    if family.inside is not None:
        raw = raw.nested(family.inside)
    for key, served in _SERVED.items():
        if key not in family.reads:
            raw.require_one_of(key, *served)
    if "layer_types" not in family.reads:
        kinds = raw.given("layer_types", [])
        are_full = isinstance(kinds, list) and all(kind == FULL for kind in kinds)
        raw.require(are_full, "layer_types", only(FULL))
    with errors_name(raw.where):
        return family.config(raw)


def _check_quantization(raw: JsonObject) -> None:
    """Raises ValueError unless weights are stored as they are, or in int8 with a scale for a row.

    compressed-tensors then has ``weight_scale`` beside a ``weight``. What it says of activations is
    not followed: they stay in the compute dtype, which is more exact. Nor is the list of layers
    that a group is for, or that are left out: the dtype of each tensor says that.
    """
    for name in _QUANTIZATION:
        if raw.get(name) is not None:
            _check_compressed(raw.nested(name))


def _check_compressed(said: JsonObject) -> None:
    """Raises ValueError unless compressed-tensors says that weights are in int8."""
    # These two must be there: another writer's file has neither, or other values.
    served = {"quant_method": ("compressed-tensors",), "format": _INT8_FORMATS}
    for key, values in served.items():
        said.require(said.get(key) in values, key, only(*values))
    said.require(said.get("kv_cache_scheme") is None, "kv_cache_scheme", only(None))
    groups = said.nested("config_groups")
    said.require(groups, "config_groups", "which names no group")
    for name in groups:
        group = groups.nested(name)
        # Files of mixed formats say it of each group.
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
    # A rotation of weights is in the stored tensors already. One of activations would have to be
    # computed in every pass.
    for application in applied:
        where = application.get("location")
        if where not in ("weight_input", "weight_output"):
            raise ValueError(f"{transform.where} applies {name}_{where}, {only()}.")


def config_json(config: DecoderConfig, dtype: str) -> dict[str, JsonValue]:
    """Returns the JSON object of a `config.json` that `parse_config` and `transformers` read.

    Raises:
      ValueError: no family has such layers.
    """
    # The same keys for all families: each passes over those that it does not read, or refuses them.
    # The first family that reads the config back is the one. What no key says, such as layers of
    # different sizes, comes back otherwise, and no family is left. One that has its keys in an
    # object of text finds none, so Gemma 3 is written as gemma3_text.
    first = config.layers[0]
    for name, family in FAMILIES.items():
        said: dict[str, JsonValue] = {
            "architectures": [family.architecture],
            "model_type": name,
            "hidden_act": "silu",
            "torch_dtype": dtype,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": first.intermediate_size,
            "num_hidden_layers": len(config.layers),
            "num_attention_heads": first.num_attention_heads,
            "num_key_value_heads": first.num_key_value_heads,
            "head_dim": first.head_dim,
            "rms_norm_eps": first.norm.rms_norm_eps,
            "tie_word_embeddings": config.tie_word_embeddings,
            "max_position_embeddings": config.max_position_embeddings,
            **_written_layers(config),
        }
        if config.num_token_ids is not None:
            said["num_token_ids"] = config.num_token_ids
        with contextlib.suppress(ValueError):
            if parse_config(JsonObject(said, CONFIG_FILE)) == config:
                return said
    raise ValueError("config has layers that no family of checkpoints has.")


def _written_layers(config: DecoderConfig) -> dict[str, JsonValue]:
    """Returns the keys that say what differs between layers, as Llama's and as Gemma's files do."""
    # One layer of each kind stands for all of it: `config_json` reads back what this says.
    by_kind = {FULL if spec.window is None else SLIDING: spec for spec in config.layers}
    full = by_kind.get(FULL, config.layers[0])
    said: dict[str, JsonValue] = {"rope_theta": full.rotation.rope_theta}
    if (scaling := full.rotation.scaling) is not None:
        kind = next(name for name, made in SCALINGS.items() if isinstance(scaling, made))
        said["rope_scaling"] = {"rope_type": kind, **dataclasses.asdict(scaling)}
    # The keys below are Gemma's; a Llama or a Qwen has none of them.
    if full.norms == "before":
        return said
    sliding = by_kind.get(SLIDING, full)
    kinds = [FULL if spec.window is None else SLIDING for spec in config.layers]
    return said | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": kinds,
        "sliding_window": sliding.window,
        "rope_local_base_freq": sliding.rotation.rope_theta,
        # The scale was computed as this to the power of -1/2: 9 digits give back a whole number
        # that rounding has moved by a few units of the last place.
        "query_pre_attn_scalar": float(f"{(full.scale or 1) ** -2:.9g}"),
        "attn_logit_softcapping": full.softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
