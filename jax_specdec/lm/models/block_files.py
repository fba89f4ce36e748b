"""Reading and writing heads that draft a block: `config.json` and `model.safetensors`.

Three layouts are read; what `config.json` says decides which one it is. That of z-lab (DFlash) has
the switches in ``dflash_config`` and leaves out what the target has; that of DeepSpec (DSpark, and
DFlash trained by the same code) has a copy of the target's config, embedding and output matrix;
that of speculators has the sizes in ``transformer_layer_config``, and is the one that is written.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_specdec._src.arrays import LOGITS, check_type, checked_dtype
from jax_specdec.lm.models.block import BlockHead, BlockHeadConfig, block_shapes
from jax_specdec.lm.models.checkpoint import LoadedModel, stored_tensors, write_files
from jax_specdec.lm.models.fields import MAX_INT, shown
from jax_specdec.lm.models.files import JsonObject, errors_name, is_there, path_of
from jax_specdec.lm.models.head_files import (
    common_fields,
    common_tensors,
    layer_json,
    load_head,
    speculators_json,
    stored_lm_head,
    target_id_tensors,
)
from jax_specdec.lm.models.layers import check_params
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.llama_config import LlamaConfig
from jax_specdec.lm.models.tensors import (
    Tensors,
    check_tensors,
    layer_tensors,
    part_sizes,
    stored_shapes,
    unfuse_arrays,
)

_MASK_FILE = "mask_embedding.pt"
_SLIDING = "sliding_attention"
_ANCHORS = {"DFlashDraftModel": False, "Qwen3DSparkModel": True}
"""Architectures of z-lab and DeepSpec, and whether their first row gives a draft."""
_SPECULATORS = {"dflash": False, "dspark": True}
"""Kinds of speculators, and likewise."""
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
"""Keys that would change the computation, and the values that do not."""


def load_block_head(directory: str | Path, target: LoadedModel[Llama]) -> LoadedModel[BlockHead]:
    """Read a DFlash or DSpark head that was trained for a target, from a local directory.

    The layouts of z-lab, of DeepSpec and of speculators are read. An embedding or output matrix
    that the files do not hold, or that is the target's rounded to their dtype, is the target's own
    array, not a copy.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      target: the target, as `load_huggingface` or `load_checkpoint` gives it. Weights are converted
        to its dtype.

    Returns:
      The head and its weights.

    Raises:
      FileNotFoundError: a file is missing.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: a file cannot be parsed, has a value out of range, does not fit the target, or
        asks for something that `BlockHead` does not compute: Markov heads other than "vanilla",
        attention sinks, value scales, DFlash2's convolutions and selectors, interleaved rotary
        positions, a mask that is an embedding of its own, full attention that is causal; a tensor
        is missing, unknown, of another shape or kind than the config says, or not finite in the
        target's dtype; an id of the head's vocabulary is not one of the target's, or is there
        twice.
      TypeError: `target` is not a loaded `Llama`, or `directory` not a path.

    Example:
      >>> import dataclasses, jax, tempfile
      >>> from jax_specdec import lm
      >>> target, _ = lm.load_embedded_pair()
      >>> layer = dataclasses.replace(target.model.config, num_hidden_layers=1)
      >>> head = lm.BlockHead(lm.BlockHeadConfig(
      ...     layer=layer, draft_vocab_size=256, feature_layers=(2, 4, 5), target_hidden_size=256,
      ...     block_size=6, mask_token_id=255))
      >>> params = head.init_params(jax.random.key(0), target.params)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     lm.models.save_block_head(directory, head, params)
      ...     loaded = lm.load_block_head(directory, target)
      >>> loaded.model == head, loaded.params["embed_tokens"] is target.params["embed_tokens"]
      (True, True)
    """
    if is_there(path_of(directory) / _MASK_FILE):
        raise ValueError(f"{shown(path_of(directory))} has {_MASK_FILE}, which is not read.")
    return load_head(directory, target, BlockHead, _read_config, _read_arrays, "model.")


def save_block_head(
    directory: str | Path,
    model: BlockHead,
    params: dict[str, Any],
    dtype: Any = jnp.float32,
    *,
    target_name: str | None = None,
) -> None:
    """Write a block head in the layout of speculators, which vLLM reads too.

    What the head shares with its target is not written: readers take it from there.

    Args:
      directory: created if it does not exist; existing files are replaced.
      model: the head.
      params: its weights.
      dtype: dtype of the stored tensors.
      target_name: the target's name or path, for readers that look it up.

    Raises:
      TypeError: `model` is not a `BlockHead`, `dtype` is none of float32, bfloat16 and float16, or
        `directory` is not a path.
      ValueError: `params` are not the model's, or a weight is not finite in `dtype`; nothing is
        written then.

    Example:
      See `load_block_head`, which reads what this wrote.

      >>> save_block_head("head", None, {})
      Traceback (most recent call last):
      TypeError: model must be a BlockHead, but it is None
    """
    directory = path_of(directory)
    check_type("model", model, BlockHead)
    stored = checked_dtype(dtype, LOGITS)
    check_params("params", model.weight_shapes, params)
    c = model.config
    arrays = params | {"lm_head": stored_lm_head(c, params["lm_head"])}
    tensors = unfuse_arrays(_tensor_names(c), arrays, {})
    for index, layer in enumerate(params["layers"]):
        tensors |= unfuse_arrays(_layer_names(c, index), layer, part_sizes(c.layer))
    tensors = stored_tensors(tensors, stored) | target_id_tensors(c, params)
    write_files(directory, _config_json(c, stored.name, target_name), tensors)


def _config_json(config: BlockHeadConfig, dtype: str, target_name: str | None) -> dict[str, Any]:
    c = config
    kind = "dspark" if c.markov_rank is not None or c.enable_confidence_head else "dflash"
    names = ["draft_vocab_size", "target_hidden_size", "block_size", "mask_token_id"]
    names += ["sample_from_anchor", "sliding_window_non_causal"]
    if kind == "dspark":
        names += ["enable_confidence_head", "confidence_head_with_markov"]
    kinds = [_SLIDING if i in c.sliding_layers else "full_attention" for i in range(_depth(c))]
    sliding = {
        "layer_types": kinds,
        "sliding_window": c.sliding_window,
        "use_sliding_window": c.sliding_window is not None,
    }
    raw = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "torch_dtype": dtype,
        "aux_hidden_state_layer_ids": list(c.feature_layers),
        **{name: getattr(c, name) for name in names},
        "transformer_layer_config": layer_json(c, dtype) | sliding,
        "speculators_config": speculators_json(kind, target_name, c.max_drafts),
    }
    if kind == "dspark":
        raw |= {"markov_rank": c.markov_rank or 0, "markov_head_type": "vanilla"}
    return raw


def _depth(config: BlockHeadConfig) -> int:
    return config.layer.num_hidden_layers


def _read_config(raw: JsonObject, tensors: Tensors, target: LlamaConfig) -> BlockHeadConfig:
    """The head's config, of what `config.json` says and which tensors are there.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    kind, own, layer_raw = "speculators_model_type", raw.nested("dflash_config"), raw
    is_speculators = raw.get(kind) is not None
    if is_speculators:
        listed = " and ".join(map(repr, _SPECULATORS))
        raw.require(raw[kind] in _SPECULATORS, kind, f"but only {listed} are supported")
        from_anchor, is_dspark = _SPECULATORS[raw[kind]], raw[kind] == "dspark"
        raw.needed("transformer_layer_config")
        layer_raw = raw.nested("transformer_layer_config")
    else:
        from_anchor = is_dspark = _from_anchor(raw)
        raw.require(
            raw.given("num_target_layers", target.num_hidden_layers) == target.num_hidden_layers,
            "num_target_layers",
            f"but the target has {target.num_hidden_layers}",
        )
    for place in (raw, own, layer_raw):
        for key, served in _SERVED.items():
            wanted = f"but only {served[0]!r} is supported" if served else "which is not supported"
            place.require(place.get(key) in (None, *served), key, wanted)
    plain = {**layer_raw, "layer_types": None, "use_sliding_window": None}
    layers = JsonObject(plain, layer_raw.where)
    fields = common_fields(raw, layers, tensors, target, "layers.0")
    depth = fields["layer"].num_hidden_layers
    # Before a list of so many layers is made; it stops at the first that is missing.
    norms = (f"layers.{index}.input_layernorm.weight" for index in range(depth))
    missing = next((norm for norm in norms if norm not in tensors.files), None)
    if missing is not None:
        raise ValueError(f"{shown(tensors.origin)} lacks the tensor {missing}.")
    sliding = _sliding(raw, own, layer_raw, depth, is_speculators)
    rank = raw.given("markov_rank", 256 if is_speculators and is_dspark else 0)
    has_confidence = raw.given(
        "enable_confidence_head",
        is_dspark if is_speculators else "confidence_head.proj.weight" in tensors.files,
    )
    with_markov = raw.given("confidence_head_with_markov", bool(rank)) and has_confidence
    feature_layers = _feature_layers(raw, own, depth, target)
    with errors_name(raw.where):
        config = BlockHeadConfig(
            **fields,
            **sliding,
            feature_layers=feature_layers,
            block_size=raw.given("block_size", 8 if is_speculators else own.get("block_size")),
            mask_token_id=_first("mask_token_id", own, raw),
            sample_from_anchor=raw.given("sample_from_anchor", from_anchor),
            markov_rank=None if rank == 0 else rank,
            enable_confidence_head=has_confidence,
            confidence_head_with_markov=with_markov,
        )
    _check_tensors(tensors, config)
    return config


def _first(key: str, *places: JsonObject) -> Any:
    """The value of a key in the first object that has it; the last one must have it."""
    for place in places[:-1]:
        if place.get(key) is not None:
            return place[key]
    return places[-1].needed(key)


def _from_anchor(raw: JsonObject) -> bool:
    """Whether the first row gives a draft, by the architecture."""
    names = raw.given("architectures", [])
    known = [name for name in names if name in _ANCHORS] if isinstance(names, list) else []
    listed = " and ".join(map(repr, _ANCHORS))
    raw.require(len(known) == 1, "architectures", f"but only {listed} are supported")
    return _ANCHORS[known[0]]


def _sliding(
    raw: JsonObject, own: JsonObject, layer_raw: JsonObject, depth: int, is_speculators: bool
) -> dict[str, Any]:
    """The fields about sliding layers.

    Raises:
      ValueError: layers are of unknown kinds, or the mask contradicts them.
    """
    kinds = layer_raw.given("layer_types", [])
    are_kinds = isinstance(kinds, list) and {*kinds} <= {_SLIDING, "full_attention"}
    wanted = f"but it must be a list of {_SLIDING!r} and 'full_attention', one for each layer"
    fits = are_kinds and (len(kinds) == depth or _SLIDING not in kinds)
    layer_raw.require(fits, "layer_types", wanted)
    layers = tuple(index for index, kind in enumerate(kinds) if kind == _SLIDING)
    if is_speculators:
        is_causal = not raw.given("sliding_window_non_causal", False)
    else:
        is_causal = bool(layers)
        if own.given("use_swa", False) and not layers:  # slides every layer, and sees the block
            layers = tuple(range(depth))
    for place, key in ((own, "causal"), (raw, "is_causal")):
        override = place.get(key)
        if override is not None:
            wanted = "but full attention over a block is not causal"
            place.require(override is False or len(layers) == depth, key, wanted)
            is_causal = override
    if not layers:
        return {}
    window = own.given("swa_window_size", layer_raw.get("sliding_window"))
    is_size = type(window) is int and 0 < window <= MAX_INT
    layer_raw.require(is_size, "sliding_window", "but sliding layers need a positive integer")
    return {
        "sliding_window": window,
        "sliding_layers": layers,
        "sliding_window_non_causal": not is_causal,
    }


def _feature_layers(
    raw: JsonObject, own: JsonObject, depth: int, target: LlamaConfig
) -> tuple[int, ...]:
    """Ids of the layers before which features are read, ascending."""
    most = target.num_hidden_layers
    # z-lab and DeepSpec count what is read after a layer, -1 for the embedding.
    places = (
        (raw, "aux_hidden_state_layer_ids", 0),
        (own, "target_layer_ids", 1),
        (raw, "target_layer_ids", 1),
    )
    for place, key, shift in places:
        ids = place.get(key)
        if ids is None:
            continue
        are_ids = isinstance(ids, list) and all(type(x) is int for x in ids) and len(ids) > 0
        ascend = are_ids and sorted({*ids}) == ids and -shift <= ids[0] and ids[-1] <= most - shift
        wanted = f"but it must be ascending layer ids in [{-shift}, {most - shift}]"
        place.require(ascend, key, wanted)
        return tuple(x + shift for x in ids)
    if raw.get("speculators_model_type") is not None:
        raw.needed("aux_hidden_state_layer_ids")
    return _default_layers(depth, most)


def _default_layers(depth: int, num_layers: int) -> tuple[int, ...]:
    """The layers of z-lab's heads that name none."""
    if depth == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (depth - 1)) + 1 for i in range(depth))


def _tensor_names(config: BlockHeadConfig) -> dict[str, list[str]]:
    """The tensors of each array but those of layers and the maps of ids."""
    names = common_tensors(config) | {"hidden_norm": ["hidden_norm.weight"]}
    if config.markov_rank is not None:
        names |= {f"markov_{x}": [f"markov_head.markov_{x}.weight"] for x in ("w1", "w2")}
    if config.enable_confidence_head:
        names["confidence_proj"] = ["confidence_head.proj.weight"]
        names["confidence_bias"] = ["confidence_head.proj.bias"]
    return names


def _layer_names(config: BlockHeadConfig, index: int) -> dict[str, list[str]]:
    """The tensors of each array of a layer."""
    names = layer_tensors(config.layer, f"layers.{index}")
    if config.o_proj_bias:
        names["o_bias"] = [f"layers.{index}.self_attn.o_proj.bias"]
    return names


def _check_tensors(tensors: Tensors, config: BlockHeadConfig) -> None:
    """Check names, shapes and dtypes; see `check_tensors`."""
    shapes = block_shapes(config)
    wanted = list(stored_shapes(_tensor_names(config), shapes, {}))
    for index, layer in enumerate(shapes["layers"]):
        wanted += stored_shapes(_layer_names(config, index), layer, part_sizes(config.layer))
    check_tensors(tensors, wanted, ("d2t", "t2d"))


def _read_arrays(tensors: Tensors, head: BlockHead) -> dict[str, Any]:
    """The arrays that the files hold, but for the ids."""
    c = head.config

    def read(names: dict[str, list[str]]) -> dict[str, Any]:
        return {name: tensors.fused(name, parts, head.dtype) for name, parts in names.items()}

    layers = [read(_layer_names(c, index)) for index in range(_depth(c))]
    return {**read(_tensor_names(c)), "layers": layers}
