"""What the `config.json` of a draft head says, in every published layout: tables of keys.

The layout of speculators has the sizes of layers in ``transformer_layer_config``, all others in the
object of `config.json` itself. EAGLE, AngelSlim and SpecForge name an EAGLE-3 head's layer
``midlayer``, DeepSpec ``layers.0``. Of heads that draft a block, z-lab (DFlash) has the switches in
``dflash_config`` and leaves out what the target has; DeepSpec (DSpark, and DFlash trained by the
same code) has a copy of the target's config, embedding and output matrix.

A key that changes what a head computes is read, or refused by name. Keys that say the same must
agree; null and an empty list say nothing.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

from jax_specdec.lm.formats.config_json import only, parse_config
from jax_specdec.lm.formats.files import JsonObject, errors_name
from jax_specdec.lm.formats.tensors import Tensors
from jax_specdec.lm.models.block import BlockHeadConfig
from jax_specdec.lm.models.eagle3 import Eagle3Config
from jax_specdec.lm.models.fields import MAX_INT, quoted, shown
from jax_specdec.lm.models.heads import HeadConfig
from jax_specdec.lm.models.llama_config import LlamaConfig

_Config = TypeVar("_Config", bound=HeadConfig)

LEGACY_NORMS = tuple(f"aux_norm_{place}.weight" for place in ("low", "mid", "high"))
"""Names that norms of the features of three layers have in some files."""

_KIND = "speculators_model_type"
_SLIDING = "sliding_attention"

_ABSENT: dict[type, dict[str, dict[str, dict[str, Any]]]] = {
    Eagle3Config: {_KIND: {"eagle3": {}}},  # the other layouts have any architecture
    BlockHeadConfig: {
        _KIND: {
            "dflash": {
                "block_size": 8,
                "sample_from_anchor": False,
                "enable_confidence_head": False,
            },
            "dspark": {
                "block_size": 8,
                "sample_from_anchor": True,
                "enable_confidence_head": True,
                "markov_rank": 256,
            },
        },
        "architectures": {
            "DFlashDraftModel": {"sample_from_anchor": False},  # z-lab
            "Qwen3DSparkModel": {"sample_from_anchor": True},  # DeepSpec
        },
    },
}
"""Layouts of each kind of head, by the key and the name that say which one a file has, and what an
absent key means in it, where layouts differ."""

_PLACES: dict[str, dict[str, int | None]] = {
    "logit_scale": {"layer.logit_scale": None, "logit_scale": None},
    "feature_layers": {
        "aux_hidden_state_layer_ids": 0,
        "target_layer_ids": 1,
        "dflash_config.target_layer_ids": 1,
        "eagle_aux_hidden_state_layer_ids": 0,
        "eagle_config.eagle_aux_hidden_state_layer_ids": 1,
    },
    "block_size": {"block_size": None, "dflash_config.block_size": None},
    "mask_token_id": {"mask_token_id": None, "dflash_config.mask_token_id": None},
    "sample_from_anchor": {
        "sample_from_anchor": None,
        "query_zero_predicts_next": None,
        "dflash_config.sample_from_anchor": None,
        "dflash_config.query_zero_predicts_next": None,
    },
}
"""Keys that say a field of a head's config, as "key" or "object.key", where that is not only the
key of its name; and what is added to ids of layers: 1 where they count what is read after a layer,
-1 for the embedding."""

_SERVED: dict[str, tuple[Any, ...]] = {
    "markov_head_type": ("vanilla",),
    "is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "conv_kernel_size": (),
    "conv_group_size": (),
    "selector_rank": (),
    "selector_top_k": (),
}
"""Keys that would change the computation, in any object, and the values that do not."""

_TARGETS = {
    "vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
    "num_target_layers": "num_hidden_layers",
}
"""Keys, in any object, whose value must be that of a field of the target's config."""


def read_head_config(
    kind: type[_Config], raw: JsonObject, tensors: Tensors, target: LlamaConfig
) -> _Config:
    """Returns a head's config, of what `config.json` says and which tensors are there.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    names = tensors.files.keys()
    num_layers = target.num_hidden_layers
    absent_in_layout = _absent(kind, raw)
    is_speculators = raw.get(_KIND) is not None
    objects = {
        "": raw,
        "layer": raw.nested("transformer_layer_config") if is_speculators else raw,
        "eagle_config": raw.nested("eagle_config"),
        "dflash_config": raw.nested("dflash_config"),
    }
    for place in objects.values():
        _check_served(place, target)
    # What tensors say, and the sizes of layers.
    attention = f"{layer_prefix(names)}.self_attn"
    is_block = kind is BlockHeadConfig
    layer = _read_layer(objects["layer"], target, names, attention, is_block)
    values: dict[str, Any] = {
        "layer": layer,
        "target_hidden_size": target.hidden_size,
        "o_proj_bias": f"{attention}.o_proj.bias" in names,
        "own_embedding": "embed_tokens.weight" in names,
        "own_lm_head": "lm_head.weight" in names,
    }
    if is_block:
        _check_depth(layer.num_hidden_layers, tensors)  # before anything is made for each layer
        values |= _sliding(objects, layer.num_hidden_layers)
    else:
        key = "parallel_drafting"  # which is what heads of blocks do anyway
        raw.require(raw.get(key) in (None, False), key, only(False))
    # All other fields, by the tables.
    absent = {
        "draft_vocab_size": target.vocab_size,
        "norm_before_fc": "input_norm.weight" in names,
        "fc_norm": bool({"fc_norm.0.weight", LEGACY_NORMS[0]} & names),
        "enable_confidence_head": "confidence_head.proj.weight" in names,
        **absent_in_layout,
    }
    if not is_block:
        absent["feature_layers"] = tuple(sorted((2, num_layers // 2, num_layers - 3)))
    for field in dataclasses.fields(kind):
        if field.name not in values:
            places = _PLACES.get(field.name, {field.name: None})
            default = absent.get(field.name, field.default)
            if field.name == "confidence_head_with_markov":
                default = values["markov_rank"] not in (None, 0)
            values[field.name] = _value(objects, places, default, num_layers)
    if is_block:
        values["markov_rank"] = values["markov_rank"] or None
        if not values["enable_confidence_head"]:
            values["confidence_head_with_markov"] = False
    elif values["norm_output"] is True and not (is_speculators or values["fc_norm"]):
        # Only with norms of chunks it is clear that norm(h) is to be fed back: a file of SpecForge
        # may mean the norm before lm_head, which every head has.
        values["norm_output"] = False
    with errors_name(raw.where):
        return kind(**values)


def _check_served(place: JsonObject, target: LlamaConfig) -> None:
    """Check that no key of an object asks for what is not computed, or for another target."""
    for key, served in _SERVED.items():
        wanted = only(*served) if served else "which is not supported"
        place.require(place.get(key) in (None, *served), key, wanted)
    for key, name in _TARGETS.items():
        size = getattr(target, name)
        wanted = f"but the target's {name} is {size}"
        place.require(place.given(key, size) == size, key, wanted)


def _check_depth(num_layers: int, tensors: Tensors) -> None:
    """Check that there are so many layers; it stops at the first that is missing."""
    for index in range(num_layers):
        norm = f"layers.{index}.input_layernorm.weight"
        if norm not in tensors.files:
            raise ValueError(f"{shown(tensors.origin)} lacks the tensor {norm}.")


def _absent(kind: type[HeadConfig], raw: JsonObject) -> dict[str, Any]:
    """Returns what absent keys mean in a file's layout, where layouts differ."""
    key = "architectures" if raw.get(_KIND) is None else _KIND
    layouts = _ABSENT[kind].get(key)
    if layouts is None:
        return {}
    given = [raw[key]] if key == _KIND else raw.given(key, [])
    known = [name for name in layouts if isinstance(given, list) and name in given]
    raw.require(len(known) == 1, key, only(*layouts))
    if key == _KIND:
        raw.needed("transformer_layer_config")
    return layouts[known[0]]


def _value(
    objects: dict[str, JsonObject], places: dict[str, int | None], default: Any, num_layers: int
) -> Any:
    """Returns what keys say of a field, or the default where none does."""
    found: dict[str, Any] = {}  # by what a message says of the place
    for path, shift in places.items():
        name, _, key = path.rpartition(".")
        place = objects[name]
        if place.get(key) in (None, []):
            continue
        says = f"{place.where} has {key} = {quoted(place[key])}"
        if shift is None:
            found[says] = place[key]
        else:
            found[says] = _layer_ids(place, key, shift, num_layers)
    if not found:
        if default is dataclasses.MISSING:
            keys = dict.fromkeys(path.rpartition(".")[2] for path in places)
            raise ValueError(f"{objects[''].where} lacks {' or '.join(keys)}.")
        return default
    (first, value), *others = found.items()
    for says, other in others:
        if other != value:
            raise ValueError(f"{first} and {says}, which contradict each other.")
    return value


def _layer_ids(place: JsonObject, key: str, shift: int, num_layers: int) -> tuple[int, ...]:
    """Returns the layers before which features are read, ascending, of ids without `shift`."""
    ids = place[key]
    may_be_mixed = key.startswith("eagle")
    are_ids = isinstance(ids, list) and all(type(x) is int for x in ids)
    in_order = sorted({*ids}) if are_ids else []
    fits = are_ids and in_order == (sorted(ids) if may_be_mixed else ids)
    fits = fits and 0 <= in_order[0] + shift and in_order[-1] + shift <= num_layers
    order = "different" if may_be_mixed else "ascending"
    wanted = f"but it must be {order} layer ids in [{-shift}, {num_layers - shift}]"
    place.require(fits, key, wanted)
    return tuple(x + shift for x in in_order)


def _read_layer(
    raw: JsonObject, target: LlamaConfig, names: Collection[str], attention: str, is_block: bool
) -> LlamaConfig:
    """Returns the sizes of layers, and what the tensors of attention add to them."""
    bias = raw.given("attention_bias", False)
    raw.require(isinstance(bias, bool), "attention_bias", "but it must be a boolean")
    # What a Llama has not: a bias without the norms of its family, layers that slide.
    elsewhere = ["attention_bias", *(("layer_types", "use_sliding_window") if is_block else ())]
    layer = parse_config(JsonObject(raw | dict.fromkeys(elsewhere), raw.where))
    return dataclasses.replace(
        layer,
        tie_word_embeddings=target.tie_word_embeddings,
        num_token_ids=target.num_token_ids,
        qkv_bias=bias or f"{attention}.q_proj.bias" in names,
        qk_norm=layer.qk_norm or f"{attention}.q_norm.weight" in names,
    )


def _sliding(objects: dict[str, JsonObject], depth: int) -> dict[str, Any]:
    """Returns the fields about sliding layers, which keys of several objects decide together."""
    raw, own, layer = (objects[name] for name in ("", "dflash_config", "layer"))
    kinds = layer.given("layer_types", [])
    are_kinds = isinstance(kinds, list) and all(x in (_SLIDING, "full_attention") for x in kinds)
    wanted = f"but it must be a list of {_SLIDING!r} and 'full_attention', one for each layer"
    fits = are_kinds and (len(kinds) == depth or _SLIDING not in kinds)
    layer.require(fits, "layer_types", wanted)
    layers = tuple(index for index, kind in enumerate(kinds) if kind == _SLIDING)
    if not kinds and layer.given("use_sliding_window", False):
        first = layer.given("max_window_layers", 28)  # the default of transformers
        must = "but it must be an integer from 0 on"
        layer.require(type(first) is int and first >= 0, "max_window_layers", must)
        layers = tuple(range(min(first, depth), depth))
    # Rows of sliding layers see the block up to themselves, but for z-lab's switch, by which every
    # layer slides and sees all of the block.
    non_causal = raw.given("sliding_window_non_causal", False)
    if own.given("use_swa", False) and not layers:
        layers = tuple(range(depth))
        non_causal = True
    for place, key in ((own, "causal"), (raw, "is_causal")):
        if place.get(key) is not None:
            is_causal = place[key]
            wanted = "but full attention over a block is not causal"
            place.require(is_causal is False or len(layers) == depth, key, wanted)
            non_causal = not is_causal
    if not layers:
        return {"sliding_window": None, "sliding_layers": (), "sliding_window_non_causal": False}
    window = own.given("swa_window_size", layer.get("sliding_window"))
    is_size = type(window) is int and 0 < window <= MAX_INT
    layer.require(is_size, "sliding_window", "but sliding layers need a positive integer")
    return {
        "sliding_window": window,
        "sliding_layers": layers,
        "sliding_window_non_causal": non_causal,
    }


def layer_prefix(stored: Collection[str]) -> str:
    """Returns what the names of the first layer's tensors begin with, in files or as written."""
    begins = {name.partition(".")[0] for name in stored}
    return "midlayer" if "midlayer" in begins and "layers" not in begins else "layers.0"
