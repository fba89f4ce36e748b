"""Reading and writing EAGLE-3 heads: `config.json` and `model.safetensors` in a directory.

Three layouts are read. That of EAGLE, AngelSlim and SpecForge names the layer ``midlayer`` and has
the layer's sizes in the object of `config.json` itself; that of DeepSpec names it ``layers.0``;
that of speculators has the sizes in ``transformer_layer_config``, and is the one that is written.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_specdec._src.arrays import (
    LOGITS,
    check_type,
    checked_dtype,
)
from jax_specdec.lm.models.checkpoint import LoadedModel, stored_tensors, write_files
from jax_specdec.lm.models.eagle3 import Eagle3Config, Eagle3Head, head_shapes
from jax_specdec.lm.models.fields import is_token_id, quoted, shown
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
    INDEX_FILE,
    WEIGHTS_FILE,
    Tensors,
    check_tensors,
    layer_tensors,
    part_sizes,
    stored_shapes,
    unfuse_arrays,
)

_TORCH_FILE = "pytorch_model.bin"
_LEGACY_NORMS = tuple(f"aux_norm_{place}.weight" for place in ("low", "mid", "high"))
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_DEEPSPEC_LAYER_IDS = "target_layer_ids"


def load_eagle3(directory: str | Path, target: LoadedModel[Llama]) -> LoadedModel[Eagle3Head]:
    """Read an EAGLE-3 head that was trained for a target, from a local directory.

    The layouts of EAGLE, AngelSlim and SpecForge, of DeepSpec, and of speculators are read. An
    embedding or output matrix that the files do not hold, or that is the target's rounded to their
    dtype, is the target's own array, not a copy.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      target: the target, as `load_huggingface` or `load_checkpoint` gives it. Weights are converted
        to its dtype.

    Returns:
      The head and its weights.

    Raises:
      FileNotFoundError: a file is missing, or there is only a `pytorch_model.bin`.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: a file cannot be parsed, has a value out of range, does not fit the target, or
        asks for something that `Eagle3Head` does not compute: more than one layer, parallel
        drafting (``mask_hidden``), feature layers that coincide; a tensor is missing, unknown, of
        another shape or kind than the config says, or not finite in the target's dtype; an id of
        the head's vocabulary is not one of the target's, or is there twice.
      TypeError: `target` is not a loaded `Llama`, or `directory` not a path.

    Example:
      >>> import jax, tempfile
      >>> from jax_specdec import lm
      >>> target, _ = lm.load_embedded_pair()
      >>> layer = dataclasses.replace(target.model.config, num_hidden_layers=1)
      >>> head = lm.models.Eagle3Head(lm.models.Eagle3Config(
      ...     layer=layer, draft_vocab_size=256, feature_layers=(2, 4, 5),
      ...     target_hidden_size=256))
      >>> params = head.init_params(jax.random.key(0), target.params)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     lm.models.save_eagle3(directory, head, params)
      ...     loaded = lm.load_eagle3(directory, target)
      >>> loaded.model == head, loaded.params["embed_tokens"] is target.params["embed_tokens"]
      (True, True)
    """
    weights = path_of(directory) / WEIGHTS_FILE
    torch = weights.with_name(_TORCH_FILE)
    if is_there(torch) and not (is_there(weights) or is_there(weights.with_name(INDEX_FILE))):
        raise FileNotFoundError(
            f"{shown(weights)} does not exist; tools/convert_eagle3.py of the project makes it "
            f"from {_TORCH_FILE}."
        )
    return load_head(directory, target, Eagle3Head, _read_config, _read_arrays)


def save_eagle3(
    directory: str | Path,
    model: Eagle3Head,
    params: dict[str, Any],
    dtype: Any = jnp.float32,
    *,
    target_name: str | None = None,
    num_speculative_tokens: int = 4,
) -> None:
    """Write an EAGLE-3 head in the layout of speculators, which vLLM and SGLang read too.

    What the head shares with its target is written too, because some readers do not take it from
    there. `load_eagle3` shares it again.

    Args:
      directory: created if it does not exist; existing files are replaced.
      model: the head.
      params: its weights.
      dtype: dtype of the stored tensors.
      target_name: the target's name or path, for readers that look it up. The class of speculators
        reads nothing without it.
      num_speculative_tokens: K that readers take by default.

    Raises:
      TypeError: `model` is not an `Eagle3Head`, `dtype` is none of float32, bfloat16 and float16,
        or `directory` is not a path.
      ValueError: `params` are not the model's, or a weight is not finite in `dtype`; nothing is
        written then.

    Example:
      See `load_eagle3`, which reads what this wrote.

      >>> save_eagle3("head", None, {})
      Traceback (most recent call last):
      TypeError: model must be an Eagle3Head, but it is None
    """
    directory = path_of(directory)
    check_type("model", model, Eagle3Head)
    stored = checked_dtype(dtype, LOGITS)
    check_params("params", model.weight_shapes, params)
    c, arrays = model.config, _flat(params)
    arrays["lm_head"] = stored_lm_head(c, arrays["lm_head"])
    whole = dataclasses.replace(c, own_embedding=True, own_lm_head=True)
    tensors = unfuse_arrays(_tensor_names(whole, "layers.0"), arrays, _part_sizes(c))
    tensors = stored_tensors(tensors, stored) | target_id_tensors(c, params)
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    raw = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "torch_dtype": stored.name,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        _LAYER_IDS: list(c.feature_layers),
        **{name: getattr(c, name) for name in switches},
        "transformer_layer_config": layer_json(c, stored.name),
        "speculators_config": speculators_json("eagle3", target_name, num_speculative_tokens),
    }
    write_files(directory, raw, tensors)


def _read_config(raw: JsonObject, tensors: Tensors, target: LlamaConfig) -> Eagle3Config:
    """The head's config, of what `config.json` says and which tensors are there.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    names, kind, layer_raw = tensors.files, "speculators_model_type", raw
    is_speculators = raw.get(kind) is not None
    if is_speculators:
        raw.require(raw[kind] == "eagle3", kind, "but only 'eagle3' is supported")
        raw.needed("transformer_layer_config")
        layer_raw = raw.nested("transformer_layer_config")
    prefix = _prefix(tensors)
    fields = common_fields(raw, layer_raw, tensors, target, prefix)
    norm_output = raw.given("norm_output", False)
    # Without speculators' fields it says whether a norm comes before lm_head. vLLM gives it another
    # meaning; a head that means that is read like the others, which costs acceptance alone.
    if not is_speculators:
        raw.require(raw.given("norm_output", True) is True, "norm_output", "but only True")
        norm_output = False
    has_norms = bool({"fc_norm.0.weight", _LEGACY_NORMS[0]} & names.keys())
    feature_layers = _feature_layers(raw, target.num_hidden_layers)
    with errors_name(raw.where):
        config = Eagle3Config(
            **fields,
            feature_layers=feature_layers,
            norm_before_fc=raw.given("norm_before_fc", "input_norm.weight" in names),
            fc_norm=raw.given("fc_norm", has_norms),
            norm_before_residual=raw.given("norm_before_residual", False),
            norm_output=norm_output,
        )
    tensor_names = _tensor_names(config, prefix, tensors)
    # fc.weight first: there, other kinds of heads differ from EAGLE-3's.
    shapes = stored_shapes(tensor_names, _flat(head_shapes(config)), _part_sizes(config))
    check_tensors(tensors, shapes, ("d2t", "t2d"))
    return config


def _feature_layers(raw: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Ids of the layers before which features are read, ascending."""
    nested, uses = raw.nested("eagle_config"), "use_aux_hidden_state"
    nested.require(nested.given(uses, True) is True, uses, "but an EAGLE-3 head must use them")
    found = {}
    # Ids of the last two count what is read after a layer.
    places = (raw, _LAYER_IDS, 0), (nested, _LAYER_IDS, 1), (raw, _DEEPSPEC_LAYER_IDS, 1)
    for place, key, shift in places:
        ids = place.given(key, [])
        are_ids = isinstance(ids, list) and all(is_token_id(layer) for layer in ids)
        place.require(are_ids, key, "but it must be a list of layer ids")
        if ids:
            found[f"{place.where} has {key}"] = tuple(sorted(layer + shift for layer in ids))
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(found)}, which name different layers.")
    default = f"{raw.where} has no layer ids", tuple(sorted((2, num_layers // 2, num_layers - 3)))
    has, ids = next(iter(found.items()), default)
    if len(set(ids)) < len(ids) or not 0 <= ids[0] <= ids[-1] <= num_layers:
        raise ValueError(
            f"{has}, which means the feature layers {quoted(ids)}, but they must be different ones "
            f"in [0, {num_layers}] of the target's {num_layers} layers."
        )
    return ids


def _prefix(tensors: Tensors) -> str:
    """What the names of the layer's tensors begin with."""
    return "layers.0" if any(name.startswith("layers.") for name in tensors.files) else "midlayer"


def _flat(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a head and of its layer in one dict."""
    return {**arrays, **arrays["layer"]}


def _tensor_names(
    config: Eagle3Config, prefix: str, tensors: Tensors | None = None
) -> dict[str, list[str]]:
    """The tensors of each array but the maps of ids, as in `tensors` or as they are written."""
    c, num_layers = config, len(config.feature_layers)
    norms = [f"fc_norm.{index}.weight" for index in range(num_layers)]
    if num_layers == 3 and tensors is not None and _LEGACY_NORMS[0] in tensors.files:
        norms = list(_LEGACY_NORMS)
    names = {
        **common_tensors(c),
        "hidden_norm": [f"{prefix}.hidden_norm.weight"],
        **layer_tensors(c.layer, prefix),
    }
    if c.norm_before_fc:
        names["input_norm"] = ["input_norm.weight"]
    if c.fc_norm:
        names["fc_norm"] = norms
    if c.o_proj_bias:
        names["o_bias"] = [f"{prefix}.self_attn.o_proj.bias"]
    return names


def _part_sizes(config: Eagle3Config) -> dict[str, list[int]]:
    """How the last axis of each fused array is cut into tensors."""
    norms = [config.target_hidden_size] * len(config.feature_layers)
    return part_sizes(config.layer) | {"fc_norm": norms}


def _read_arrays(tensors: Tensors, head: Eagle3Head) -> dict[str, Any]:
    """The arrays that the files hold, but for the ids."""
    names = _tensor_names(head.config, _prefix(tensors), tensors)
    read = {name: tensors.fused(name, parts, head.dtype) for name, parts in names.items()}
    layer = {name: read.pop(name) for name in head.weight_shapes["layer"]}
    return {**read, "layer": layer}
