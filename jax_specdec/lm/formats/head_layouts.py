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

from jax_specdec.lm.formats.config_json import parse_config
from jax_specdec.lm.formats.families import FULL, SLIDING
from jax_specdec.lm.formats.files import JsonObject, JsonValue, errors_name, only
from jax_specdec.lm.formats.tensors import Tensors
from jax_specdec.lm.models.block import BlockHeadConfig
from jax_specdec.lm.models.config import DecoderConfig, LayerSpec
from jax_specdec.lm.models.eagle3 import Eagle3Config
from jax_specdec.lm.models.fields import MAX_INT, quoted
from jax_specdec.lm.models.heads import HeadConfig

LEGACY_NORMS = tuple(f"aux_norm_{place}.weight" for place in ("low", "mid", "high"))
"""Names that norms of the features of three layers have in some files."""

_SPECULATORS = "speculators_model_type"


_LAYOUTS: dict[type[HeadConfig], dict[str, dict[str, dict[str, JsonValue]]]] = {
    Eagle3Config: {_SPECULATORS: {"eagle3": {}}},  # the others have any architecture
    BlockHeadConfig: {
        _SPECULATORS: {
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
"""By the key that says which layout a file has, and what it says: what absent keys mean then."""

_NO_KEY = (
    "vocab_size hidden_size layers tie_word_embeddings num_token_ids "
    "target_hidden_size own_embedding own_lm_head sliding_window_non_causal"
)
"""Fields that no single key says: tensors, the target or several keys do."""

_PLACES: dict[str, dict[str, int | None]] = {
    **dict.fromkeys(_NO_KEY.split(), {}),
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
        "shift_label": None,
        "dflash_config.shift_label": None,
    },
    "markov_rank": {"markov_rank": None, "dflash_config.markov_rank": None},
    "enable_confidence_head": {
        "enable_confidence_head": None,
        "dflash_config.enable_confidence_head": None,
        "dflash_config.use_confidence_head": None,
    },
    "confidence_head_with_markov": {
        "confidence_head_with_markov": None,
        "dflash_config.confidence_head_with_markov": None,
    },
}
"""Keys that say a field of a head's config, as "key" or "object.key", where that is not only the
key of its name; and what is added to ids of layers: 1 where they count what is read after a layer,
-1 for the embedding."""

_SERVED: dict[str, tuple[JsonValue, ...]] = {
    "markov_head_type": ("vanilla",),
    "projector_type": ("dflash", "dspark"),  # the others correct logits by a network of their own
    "fusion_mode": (),
    "attention_mode": ("gqa", "mha"),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
    "final_logit_softcapping": (),
    "embed_scale": (1.0,),
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


def read_eagle3_config(raw: JsonObject, tensors: Tensors, target: DecoderConfig) -> Eagle3Config:
    """Returns an EAGLE-3 head's config, of what `config.json` says and which tensors are there.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    objects, absent = _opened(Eagle3Config, raw, target)
    layers = _read_layers(objects["layer"], tensors, target)
    raw.require_one_of("parallel_drafting", False)  # heads of blocks draft so, whatever it says
    depth = len(target.layers)
    early_middle_late = tuple(sorted((2, depth // 2, depth - 3)))  # EAGLE's files do not say where
    absent = absent | layers | {"feature_layers": early_middle_late}
    values = _fields(Eagle3Config, objects, tensors, target, absent)
    is_clear = raw.get(_SPECULATORS) is not None or values["fc_norm"]
    if values["norm_output"] is True and not is_clear:
        # SpecForge may mean the norm before lm_head, which every head has. Only with norms of
        # chunks, or in the layout of speculators, norm(h) is to be fed back.
        values["norm_output"] = False
    with errors_name(raw.where):
        return Eagle3Config(**values)


def read_block_config(raw: JsonObject, tensors: Tensors, target: DecoderConfig) -> BlockHeadConfig:
    """Returns the config of a head that drafts a block, as `read_eagle3_config` does."""
    objects, absent = _opened(BlockHeadConfig, raw, target)
    # A Llama has no layers that slide: `_sliding` reads which do.
    own = _read_layers(objects["layer"], tensors, target, "layer_types", "use_sliding_window")
    own |= _sliding(objects, own["layers"])
    absent = absent | own | {"confidence_head_with_markov": None}
    values = _fields(BlockHeadConfig, objects, tensors, target, absent)
    if values["confidence_head_with_markov"] is None:
        values["confidence_head_with_markov"] = values["markov_rank"] not in (None, 0)
    if not values["enable_confidence_head"]:
        values["confidence_head_with_markov"] = False
    values["markov_rank"] = values["markov_rank"] or None  # speculators writes 0
    with errors_name(raw.where):
        return BlockHeadConfig(**values)


def _opened(
    kind: type[HeadConfig], raw: JsonObject, target: DecoderConfig
) -> tuple[dict[str, JsonObject], dict[str, JsonValue]]:
    """Returns objects by their names in `_PLACES`, and what absent keys mean in a file's layout."""
    is_speculators = raw.get(_SPECULATORS) is not None
    key = _SPECULATORS if is_speculators else "architectures"
    layouts = _LAYOUTS[kind].get(key, {})
    absent = {}
    if layouts:
        said = [raw[key]] if is_speculators else raw.given(key, [])
        known = [name for name in layouts if isinstance(said, list) and name in said]
        raw.require(len(known) == 1, key, only(*layouts))
        absent = layouts[known[0]]
        if raw.nested("dflash_config").get("projector_type") == "dspark":
            absent = absent | {"sample_from_anchor": True}  # SpecForge
    if is_speculators:
        raw.needed("transformer_layer_config")
    objects = {
        "": raw,
        "layer": raw.nested("transformer_layer_config") if is_speculators else raw,
        "eagle_config": raw.nested("eagle_config"),
        "dflash_config": raw.nested("dflash_config"),
    }
    sizes = {  # keys, in any object, whose value must be the target's
        "vocab_size": ("vocab_size", target.vocab_size),
        "target_hidden_size": ("hidden_size", target.hidden_size),
        "num_target_layers": ("num_hidden_layers", len(target.layers)),
    }
    for place in objects.values():
        for key, served in _SERVED.items():
            place.require_one_of(key, *served)
        for key, (name, size) in sizes.items():
            place.require(place.given(key, size) == size, key, f"but the target's {name} is {size}")
    return objects, absent


def _read_layers(
    raw: JsonObject, tensors: Tensors, target: DecoderConfig, *elsewhere: str
) -> dict[str, JsonValue]:
    """Returns layers, with what tensors add to them, and sizes; keys `elsewhere` are not read."""
    # A head may have a bias of attention without the norms of its family, which no Llama has.
    bias = raw.given("attention_bias", False)
    raw.require(isinstance(bias, bool), "attention_bias", "but it must be a boolean")
    raw.require_one_of("model_type", "llama", "qwen2", "qwen3")
    own = parse_config(raw.but(**dict.fromkeys(("attention_bias", "logit_scale", *elsewhere))))
    attention = f"{layer_prefix(tensors.stored)}.self_attn"
    layers = [
        dataclasses.replace(
            spec,
            qkv_bias=bias or f"{attention}.q_proj.bias" in tensors.stored,
            o_bias=f"{attention}.o_proj.bias" in tensors.stored,
            qk_norm=spec.qk_norm or f"{attention}.q_norm.weight" in tensors.stored,
        )
        for spec in own.layers
    ]
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": own.hidden_size,
        "layers": tuple(layers),
        "tie_word_embeddings": target.tie_word_embeddings,
        "num_token_ids": target.num_token_ids,
    }


def _fields(
    kind: type[HeadConfig],
    objects: dict[str, JsonObject],
    tensors: Tensors,
    target: DecoderConfig,
    absent: dict[str, JsonValue],
) -> dict[str, JsonValue]:
    """Returns what each field is, not checked: as keys say, or what it is where none does."""
    names = tensors.stored.keys()
    absent = {
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": target.vocab_size,
        "own_embedding": "embed_tokens.weight" in names,
        "own_lm_head": "lm_head.weight" in names,
        "norm_before_fc": "input_norm.weight" in names,
        "fc_norm": bool({"fc_norm.0.weight", LEGACY_NORMS[0]} & names),
        "enable_confidence_head": "confidence_head.proj.weight" in names,
        **absent,
    }
    values = {}
    for field in dataclasses.fields(kind):
        places = _PLACES.get(field.name, {field.name: None})
        default = absent.get(field.name, field.default)
        values[field.name] = _value(objects, places, default, len(target.layers))
    is_listed = values["draft_vocab_size"] != target.vocab_size
    if is_listed and values["hidden_size"] == target.hidden_size:
        values["own_lm_head"] = True  # if no file has it, rows of the target's
    return values


def _value(
    objects: dict[str, JsonObject],
    places: dict[str, int | None],
    default: JsonValue,
    num_layers: int,
) -> JsonValue:
    """Returns what keys say of a field, or the default where none does."""
    found: dict[str, JsonValue] = {}  # by what a message says of the place
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
    may_be_mixed = key.startswith("eagle")  # vLLM reads these in ascending order
    are_ids = isinstance(ids, list) and all(type(x) is int for x in ids)
    in_order = sorted({*ids}) if are_ids else []
    fits = are_ids and in_order == (sorted(ids) if may_be_mixed else ids)
    fits = fits and 0 <= in_order[0] + shift and in_order[-1] + shift <= num_layers
    order = "different" if may_be_mixed else "ascending"
    wanted = f"but it must be {order} layer ids in [{-shift}, {num_layers - shift}]"
    place.require(fits, key, wanted)
    return tuple(x + shift for x in in_order)


def _sliding(objects: dict[str, JsonObject], layers: tuple[LayerSpec, ...]) -> dict[str, JsonValue]:
    """Returns the layers, with windows, and which rows see all of the block in those.

    Keys of several objects decide that together.
    """
    depth = len(layers)
    raw, own, layer = (objects[name] for name in ("", "dflash_config", "layer"))
    kinds = layer.given("layer_types", [])
    are_kinds = isinstance(kinds, list) and all(x in (SLIDING, FULL) for x in kinds)
    wanted = f"but it must be a list of {SLIDING!r} and {FULL!r}, one for each layer"
    fits = are_kinds and (len(kinds) == depth or SLIDING not in kinds)
    layer.require(fits, "layer_types", wanted)
    sliding = [index for index, kind in enumerate(kinds) if kind == SLIDING]
    if not kinds and layer.given("use_sliding_window", False):
        first = layer.given("max_window_layers", 28)  # the default of transformers
        must = "but it must be an integer from 0 on"
        layer.require(type(first) is int and first >= 0, "max_window_layers", must)
        sliding = list(range(min(first, depth), depth))
    # Rows of sliding layers see the block up to themselves, but for z-lab's switch, by which every
    # layer slides and sees all of the block.
    non_causal = raw.given("sliding_window_non_causal", False)
    if own.given("use_swa", False) and not sliding:
        sliding = list(range(depth))
        non_causal = True
    for place, key in ((own, "causal"), (raw, "is_causal")):
        if place.get(key) is not None:
            is_causal = place[key]
            wanted = "but full attention over a block is not causal"
            place.require(is_causal is False or len(sliding) == depth, key, wanted)
            non_causal = not is_causal
    if not sliding:
        return {"sliding_window_non_causal": False}
    of_layers = own.given("sliding_window", layer.get("sliding_window"))
    window = own.given("swa_window_size", of_layers)
    is_size = type(window) is int and 0 < window < MAX_INT
    layer.require(is_size, "sliding_window", "but sliding layers need a positive integer")
    windowed = list(layers)
    for index in sliding:  # the anchor, and the positions before it
        windowed[index] = dataclasses.replace(layers[index], window=window + 1)
    return {"layers": tuple(windowed), "sliding_window_non_causal": non_causal}


def layer_prefix(stored: Collection[str]) -> str:
    """Returns what the names of the first layer's tensors begin with, in files or as written."""
    # EAGLE, AngelSlim and SpecForge have a midlayer; all others, and heads of blocks, have layers.
    begins = {name.partition(".")[0] for name in stored}
    return "midlayer" if "midlayer" in begins and "layers" not in begins else "layers.0"
