"""Reading and writing EAGLE-3 heads: `config.json` and `model.safetensors` in a directory.

Three layouts are read. That of EAGLE, AngelSlim and SpecForge names the layer ``midlayer`` and has
the layer's sizes in the object of `config.json` itself; that of DeepSpec names it ``layers.0``;
that of speculators has the sizes in ``transformer_layer_config``, and is the one that is written.
"""

import dataclasses
import importlib.resources
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.models.checkpoint import (
    LoadedModel,
    check_structure,
    path_of,
    stored_dtype,
    stored_tensors,
    write_files,
)
from jax_specdec._src.models.config_json import CONFIG_FILE, config_json, parse_config
from jax_specdec._src.models.eagle3 import Eagle3Config, Eagle3Head, head_shapes, shared_params
from jax_specdec._src.models.fields import is_token_id, quoted, shown
from jax_specdec._src.models.files import is_there, read_json
from jax_specdec._src.models.llama import Llama
from jax_specdec._src.models.llama_config import LlamaConfig
from jax_specdec._src.models.tensors import (
    INDEX_FILE,
    WEIGHTS_FILE,
    Tensors,
    check_tensors,
    layer_tensors,
    open_files,
    part_sizes,
    stored_shapes,
    unfuse_arrays,
)

_EmbeddedHead = Literal["eagle3", "eagle3-64"]
_TORCH_FILE = "pytorch_model.bin"
_LEGACY_NORMS = tuple(f"aux_norm_{place}.weight" for place in ("low", "mid", "high"))
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def load_eagle3(directory: str | Path, target: LoadedModel[Llama]) -> LoadedModel[Eagle3Head]:
    """Read an EAGLE-3 head that was trained for a target, from a local directory.

    The layouts of EAGLE, AngelSlim and SpecForge, of DeepSpec, and of speculators are read. An
    embedding or output matrix that the files do not hold is the target's own array, not a copy.

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
      >>> import jax_specdec as sd
      >>> target, _ = sd.load_embedded_pair()
      >>> layer = dataclasses.replace(target.model.config, num_hidden_layers=1)
      >>> head = sd.models.Eagle3Head(sd.models.Eagle3Config(
      ...     layer=layer, draft_vocab_size=256, feature_layers=(2, 4, 5),
      ...     target_hidden_size=256))
      >>> params = head.init_params(jax.random.key(0), target.params)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     sd.models.save_eagle3(directory, head, params)
      ...     loaded = sd.load_eagle3(directory, target)
      >>> loaded.model == head, loaded.params["embed_tokens"] is target.params["embed_tokens"]
      (True, True)
    """
    if not (isinstance(target, LoadedModel) and isinstance(target.model, Llama)):
        raise TypeError(f"target must be a LoadedModel of a Llama, not {quoted(target)}.")
    directory = path_of(directory)
    raw = read_json(directory / CONFIG_FILE)
    weights = directory / WEIGHTS_FILE
    only_torch = is_there(directory / _TORCH_FILE) and not is_there(directory / INDEX_FILE)
    if only_torch and not is_there(weights):
        raise FileNotFoundError(
            f"{shown(weights)} does not exist; tools/convert_eagle3.py of the project makes it "
            f"from {_TORCH_FILE}."
        )
    with open_files(directory) as tensors:
        config = _read_config(shown(directory / CONFIG_FILE), raw, tensors, target.model.config)
        head = Eagle3Head(config, target.model.dtype)
        return LoadedModel(head, _read_params(tensors, head, target.params))


def load_embedded_head(
    target: LoadedModel[Llama], name: _EmbeddedHead = "eagle3"
) -> LoadedModel[Eagle3Head]:
    """An EAGLE-3 head for the embedded target, which ships with the package.

    Args:
      target: the first of `load_embedded_pair`.
      name: "eagle3" scores all 256 bytes, "eagle3-64" the 64 most frequent ones.

    Returns:
      The head and its weights, in the target's dtype.

    Raises:
      ValueError: no head has this name, or the target is another model.

    Example:
      >>> import jax_specdec as sd
      >>> target, _ = sd.load_embedded_pair()
      >>> sd.load_embedded_head(target, "eagle3-64").params["target_ids"].shape
      (64,)
    """
    if name not in get_args(_EmbeddedHead):
        raise ValueError(f"name must be one of {get_args(_EmbeddedHead)}, not {quoted(name)}.")
    weights = importlib.resources.files("jax_specdec") / "weights" / name
    with importlib.resources.as_file(weights) as directory:
        return load_eagle3(directory, target)


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

    What the head shares with its target is not written.

    Args:
      directory: created if it does not exist; existing files are replaced.
      model: the head.
      params: its weights.
      dtype: dtype of the stored tensors.
      target_name: the target's name or path, for readers that look it up.
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
      TypeError: model must be an Eagle3Head, but it is a NoneType.
    """
    directory = path_of(directory)
    if not isinstance(model, Eagle3Head):
        raise TypeError(f"model must be an Eagle3Head, but it is a {type(model).__name__}.")
    stored = stored_dtype(dtype)
    check_structure(model, params)
    c = model.config
    layout = _Layout.of(c, "layers.0")
    tensors = unfuse_arrays(layout.head, params, layout.head_sizes)
    tensors |= unfuse_arrays(layout.layer, params["layer"], part_sizes(c.layer))
    tensors = stored_tensors(tensors, stored)
    if "target_ids" in params:
        ids = np.asarray(params["target_ids"], np.int64)
        _check_target_ids("params['target_ids']", ids, c.layer.vocab_size)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(c.layer.vocab_size), ids)
    text = _config_text(c, stored.name, target_name, num_speculative_tokens)
    write_files(directory, text, tensors)


def _config_text(config: Eagle3Config, dtype: str, target_name: str | None, drafts: int) -> str:
    c = config
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    # Biases and norms of queries and keys are both there in a qwen3 layer with attention_bias.
    plain = dataclasses.replace(c.layer, qkv_bias=False, tie_word_embeddings=False)
    raw = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "torch_dtype": dtype,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        _LAYER_IDS: list(c.feature_layers),
        **{name: getattr(c, name) for name in switches},
        "transformer_layer_config": {
            **config_json(plain, dtype),
            "attention_bias": c.layer.qkv_bias,
            "logit_scale": c.logit_scale,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }
    return json.dumps(raw, indent=2) + "\n"


def _read_config(
    where: str, raw: dict[str, Any], tensors: Tensors, target: LlamaConfig
) -> Eagle3Config:
    """The head's config, of what `config.json` says and which tensors are there.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    is_speculators = raw.get("speculators_model_type") is not None
    layer_raw: Any = raw
    if is_speculators:
        if raw["speculators_model_type"] != "eagle3":
            raise ValueError(
                f"{where} has speculators_model_type = {quoted(raw['speculators_model_type'])}, "
                "but only 'eagle3' is supported."
            )
        layer_raw = raw.get("transformer_layer_config")
        if not isinstance(layer_raw, dict):
            raise ValueError(f"{where} lacks transformer_layer_config.")
    names = tensors.files
    if "mask_hidden" in names:
        raise ValueError(
            f"{shown(tensors.origin)} has mask_hidden: heads for parallel drafting are not "
            "supported."
        )
    if (layers := layer_raw.get("num_hidden_layers")) != 1 or type(layers) is not int:
        raise ValueError(
            f"{where} has num_hidden_layers = {quoted(layers)}, but an EAGLE-3 head must have one "
            "layer: systems differ in what more layers compute."
        )
    bias = layer_raw.get("attention_bias")
    if bias not in (None, True, False) or type(bias) is int:
        raise ValueError(f"{where} has attention_bias = {quoted(bias)}, but it must be a boolean.")
    layer = parse_config({**layer_raw, "attention_bias": None}, where)
    if layer.vocab_size != target.vocab_size:
        raise ValueError(
            f"{where} has vocab_size = {layer.vocab_size}, but the target's is {target.vocab_size}."
        )
    prefix = _prefix(tensors)
    layer = dataclasses.replace(
        layer,
        tie_word_embeddings=target.tie_word_embeddings,
        num_token_ids=target.num_token_ids,
        qkv_bias=bool(bias) or f"{prefix}.self_attn.q_proj.bias" in names,
        qk_norm=layer.qk_norm or f"{prefix}.self_attn.q_norm.weight" in names,
    )

    def number(name: str, default: Any) -> Any:
        value = raw.get(name)
        return default if value is None else value

    if (width := number("target_hidden_size", target.hidden_size)) != target.hidden_size:
        raise ValueError(
            f"{where} has target_hidden_size = {quoted(width)}, but the target's hidden_size is "
            f"{target.hidden_size}."
        )
    norm_output = number("norm_output", False)
    if not is_speculators:  # here it says whether a norm comes before lm_head
        if number("norm_output", True) is not True:
            raise ValueError(f"{where} has norm_output = {quoted(norm_output)}, but only True.")
        norm_output = False
    scale = layer_raw.get("logit_scale", raw.get("logit_scale"))
    feature_layers = _feature_layers(where, raw, target.num_hidden_layers)
    try:
        config = Eagle3Config(
            layer=layer,
            draft_vocab_size=number("draft_vocab_size", target.vocab_size),
            feature_layers=feature_layers,
            target_hidden_size=target.hidden_size,
            norm_before_fc=number("norm_before_fc", "input_norm.weight" in names),
            fc_norm=number("fc_norm", bool({"fc_norm.0.weight", _LEGACY_NORMS[0]} & names.keys())),
            norm_before_residual=number("norm_before_residual", False),
            norm_output=norm_output,
            o_proj_bias=f"{prefix}.self_attn.o_proj.bias" in names,
            own_embedding="embed_tokens.weight" in names,
            own_lm_head="lm_head.weight" in names,
            logit_scale=1.0 if scale is None else scale,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    _check_width(tensors, config)
    check_tensors(tensors, _Layout.of(config, prefix, tensors).shapes(config), ("d2t", "t2d"))
    if config.draft_vocab_size < layer.vocab_size and "d2t" not in names:
        raise ValueError(f"{shown(tensors.origin)} lacks the tensor d2t.")
    return config


def _feature_layers(where: str, raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Ids of the layers before which features are read, ascending."""
    nested = raw.get("eagle_config")
    if not isinstance(nested, dict):
        nested = {}
    if nested.get("use_aux_hidden_state") not in (None, True):
        raise ValueError(
            f"{where} has use_aux_hidden_state = {quoted(nested['use_aux_hidden_state'])} in "
            "eagle_config, but an EAGLE-3 head must use them."
        )
    # Ids of the last two count what is read after a layer.
    given = {
        _LAYER_IDS: (raw.get(_LAYER_IDS), 0),
        f"{_LAYER_IDS} in eagle_config": (nested.get(_LAYER_IDS), 1),
        "target_layer_ids": (raw.get("target_layer_ids"), 1),
    }
    found = {}
    for name, (ids, shift) in given.items():
        if ids is None or ids == []:
            continue
        if not isinstance(ids, list) or not all(is_token_id(layer) for layer in ids):
            raise ValueError(
                f"{where} has {name} = {quoted(ids)}, but it must be a list of layer ids."
            )
        found[name] = tuple(sorted(layer + shift for layer in ids))
    if len(set(found.values())) > 1:
        raise ValueError(f"{where} has {' and '.join(found)}, which name different layers.")
    name, ids = next(iter(found.items()), ("no layer ids", (2, num_layers // 2, num_layers - 3)))
    ids = tuple(sorted(ids))
    if len(set(ids)) < len(ids) or not 0 <= ids[0] <= ids[-1] <= num_layers:
        raise ValueError(
            f"{where} has {name}, which means the feature layers {quoted(ids)}, but they must be "
            f"different ones in [0, {num_layers}] of the target's {num_layers} layers."
        )
    return ids


def _prefix(tensors: Tensors) -> str:
    """What the names of the layer's tensors begin with."""
    layers = {name.split(".")[1] for name in tensors.files if name.startswith("layers.")}
    if layers - {"0"}:
        raise ValueError(
            f"{shown(tensors.origin)} has tensors of more than one layer, but an EAGLE-3 head must "
            "have one: systems differ in what more layers compute."
        )
    return "layers.0" if layers else "midlayer"


def _check_width(tensors: Tensors, config: Eagle3Config) -> None:
    """Check fc.weight before the others, since other kinds of heads differ there from EAGLE-3's."""
    if "fc.weight" not in tensors.files:
        raise ValueError(f"{shown(tensors.origin)} lacks the tensor fc.weight.")
    shape, wanted = tensors.shape("fc.weight"), (config.layer.hidden_size, config.num_features)
    if shape != wanted:
        raise ValueError(
            f"{shown(tensors.origin)} has fc.weight of shape {quoted(shape)}, but features of "
            f"{len(config.feature_layers)} layers of width {config.target_hidden_size} need "
            f"{wanted}."
        )


class _Layout(NamedTuple):
    """The tensors that make up each array of a head, and of its layer; see `unfuse_arrays`."""

    head: dict[str, list[str]]
    head_sizes: dict[str, list[int]]
    layer: dict[str, list[str]]

    @classmethod
    def of(cls, config: Eagle3Config, prefix: str, tensors: Tensors | None = None) -> "_Layout":
        """That of `tensors`, or the one that is written; the maps of ids are not in it."""
        c, num_layers = config, len(config.feature_layers)
        norms = [f"fc_norm.{index}.weight" for index in range(num_layers)]
        if num_layers == 3 and tensors is not None and _LEGACY_NORMS[0] in tensors.files:
            norms = list(_LEGACY_NORMS)
        layer = layer_tensors(c.layer, prefix)
        layer["hidden_norm"] = [f"{prefix}.hidden_norm.weight"]
        if c.o_proj_bias:
            layer["o_bias"] = [f"{prefix}.self_attn.o_proj.bias"]
        head = {"fc": ["fc.weight"], "norm": ["norm.weight"]}
        if c.norm_before_fc:
            head["input_norm"] = ["input_norm.weight"]
        if c.fc_norm:
            head["fc_norm"] = norms
        if c.own_embedding:
            head["embed_tokens"] = ["embed_tokens.weight"]
        if c.own_lm_head:
            head["lm_head"] = ["lm_head.weight"]
        return cls(head, {"fc_norm": [c.target_hidden_size] * num_layers}, layer)

    def shapes(self, config: Eagle3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and ``[out, in]`` shape of every tensor."""
        shapes = head_shapes(config)
        yield from stored_shapes(self.head, shapes, self.head_sizes)
        yield from stored_shapes(self.layer, shapes["layer"], part_sizes(config.layer))


def _read_params(
    tensors: Tensors, head: Eagle3Head, target_params: dict[str, Any]
) -> dict[str, Any]:
    c, layout = head.config, _Layout.of(head.config, _prefix(tensors), tensors)

    def read(names: dict[str, list[str]]) -> dict[str, jax.Array]:
        return {name: tensors.fused(name, parts, head.dtype) for name, parts in names.items()}

    params = shared_params(c, target_params) | read(layout.head) | {"layer": read(layout.layer)}
    ids = _read_target_ids(tensors, c)
    if c.draft_vocab_size < c.layer.vocab_size:
        params["target_ids"] = jnp.asarray(ids, jnp.int32)
    elif ids is not None and (ids != np.arange(len(ids))).any():
        raise ValueError(
            f"{shown(tensors.origin)} has a d2t that is not zero, but draft_vocab_size is "
            "vocab_size."
        )
    return params


def _read_target_ids(tensors: Tensors, config: Eagle3Config) -> np.ndarray | None:
    """The target's ids of the head's, ``[Vd]``; None without d2t."""
    if "d2t" not in tensors.files:
        return None
    path, file = tensors.files["d2t"]
    kind, shape = file.get_slice("d2t").get_dtype(), tensors.shape("d2t")
    if kind not in ("I64", "I32") or shape != (config.draft_vocab_size,):
        raise ValueError(
            f"{shown(path)} has d2t of dtype {kind} and shape {quoted(shape)}, but it must be I64 "
            f"or I32 of shape {(config.draft_vocab_size,)}."
        )
    offsets, size = tensors.read("d2t").astype(np.int64), config.layer.vocab_size
    is_far = (offsets < -size) | (offsets > size)
    if is_far.any():  # before a sum that may not fit into 64 bits
        raise ValueError(
            f"{shown(path)} has d2t, which must lead to ids in [0, {size}), but holds "
            f"{offsets[is_far.argmax()]}."
        )
    ids = np.arange(len(offsets)) + offsets
    _check_target_ids(f"{shown(path)} has d2t, which", ids, size)
    return ids


def _check_target_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise ValueError(
            f"{name} must name ids in [0, {vocab_size}), but names {ids[outside.argmax()]}."
        )
    known, counts = np.unique(ids, return_counts=True)
    if len(known) < len(ids):
        raise ValueError(
            f"{name} must name each id once, but names {known[counts.argmax()]} twice."
        )
