"""What the files of draft heads of all kinds have in common."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.arrays import check_listed, require
from jax_specdec.lm.models.checkpoint import LoadedModel
from jax_specdec.lm.models.config_json import CONFIG_FILE, config_json, parse_config
from jax_specdec.lm.models.fields import quoted, shown
from jax_specdec.lm.models.files import JsonObject, errors_name, path_of, read_json
from jax_specdec.lm.models.heads import DraftHead, HeadConfig, shared_params
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.llama_config import LlamaConfig
from jax_specdec.lm.models.tensors import Tensors, open_files

_Head = TypeVar("_Head", bound=DraftHead)


def load_head(
    directory: str | Path,
    target: LoadedModel[Llama],
    kind: type[_Head],
    read_config: Callable[[JsonObject, Tensors, LlamaConfig], HeadConfig],
    read_arrays: Callable[[Tensors, _Head], dict[str, Any]],
    prefix: str = "",
) -> LoadedModel[_Head]:
    """Read a head for a target, whose own arrays stand for those that are equal to them.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      target: the target.
      kind: the class of the head.
      read_config: the config, of `config.json`, the tensors and the target's config.
      read_arrays: the arrays that the files hold, but for ``target_ids``.
      prefix: names of tensors are read without it.

    Raises:
      FileNotFoundError: a file is missing.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: a file cannot be parsed, or does not hold a head for this target.
      TypeError: `target` is not a loaded `Llama`, or `directory` not a path.
    """
    is_target = isinstance(target, LoadedModel) and isinstance(target.model, Llama)
    require(is_target, "target", "be a LoadedModel of a Llama", target, error=TypeError)
    directory = path_of(directory)
    raw = read_json(directory / CONFIG_FILE)
    with open_files(directory) as files:
        tensors = files.without(prefix)
        head = kind(read_config(raw, tensors, target.model.config), target.model.dtype)
        params = read_target_ids(tensors, head.config) | read_arrays(tensors, head)
        config = _shared_again(tensors, head.config, params, target)
    return LoadedModel(kind(config, head.dtype), params | shared_params(config, target.params))


def read_layer(raw: JsonObject, target: LlamaConfig, tensors: Tensors, prefix: str) -> LlamaConfig:
    """Sizes of a head's layers, of a `config.json` and of the tensors of attention `prefix`.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    names = tensors.files
    bias = raw.given("attention_bias", False)
    raw.require(isinstance(bias, bool), "attention_bias", "but it must be a boolean")
    layer = parse_config(JsonObject({**raw, "attention_bias": None}, raw.where))
    wanted = f"but the target's is {target.vocab_size}"
    raw.require(layer.vocab_size == target.vocab_size, "vocab_size", wanted)
    return dataclasses.replace(
        layer,
        tie_word_embeddings=target.tie_word_embeddings,
        num_token_ids=target.num_token_ids,
        qkv_bias=bias or f"{prefix}.q_proj.bias" in names,
        qk_norm=layer.qk_norm or f"{prefix}.q_norm.weight" in names,
    )


def layer_json(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The ``transformer_layer_config`` of speculators that `read_layer` reads."""
    # Biases and norms of queries and keys are both there in a qwen3 layer with attention_bias.
    plain = dataclasses.replace(config.layer, qkv_bias=False, tie_word_embeddings=False)
    return {
        **config_json(plain, dtype),
        "attention_bias": config.layer.qkv_bias,
        "logit_scale": config.logit_scale,
    }


def speculators_json(algorithm: str, target_name: str | None, drafts: int) -> dict[str, Any]:
    """The ``speculators_config``, which names the target and K."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
        "verifier": {"name_or_path": target_name, "architectures": []},
    }


def common_fields(
    raw: JsonObject, layer_raw: JsonObject, tensors: Tensors, target: LlamaConfig, prefix: str
) -> dict[str, Any]:
    """The fields of a `HeadConfig` but the feature layers, as `config.json` says and the tensors.

    Raises:
      ValueError: they do not fit the target.
    """
    names = tensors.files
    layer = read_layer(layer_raw, target, tensors, f"{prefix}.self_attn")
    key, width = "target_hidden_size", target.hidden_size
    fits = raw.given(key, width) == width
    raw.require(fits, key, f"but the target's hidden_size is {width}")
    scale = layer_raw.get("logit_scale", raw.get("logit_scale"))
    return {
        "layer": layer,
        "draft_vocab_size": raw.given("draft_vocab_size", target.vocab_size),
        "target_hidden_size": width,
        "o_proj_bias": f"{prefix}.self_attn.o_proj.bias" in names,
        "own_embedding": "embed_tokens.weight" in names,
        "own_lm_head": "lm_head.weight" in names,
        "logit_scale": 1.0 if scale is None else scale,
    }


def common_tensors(config: HeadConfig) -> dict[str, list[str]]:
    """The tensor of each array that every head has, beside those of its layers."""
    names = {"fc": ["fc.weight"], "norm": ["norm.weight"]}
    if config.own_embedding:
        names["embed_tokens"] = ["embed_tokens.weight"]
    if config.own_lm_head:
        names["lm_head"] = ["lm_head.weight"]
    return names


def stored_lm_head(config: HeadConfig, lm_head: jax.Array) -> jax.Array:
    """The output matrix ``[H, Vd]``, whether it is the target's embedding or not."""
    return lm_head.T if config.output_is_embedding else lm_head


def _shared_again(
    tensors: Tensors, config: HeadConfig, params: dict[str, Any], target: LoadedModel[Llama]
) -> HeadConfig:
    """The config of a head that owns only what differs from the target's arrays."""
    embedding, dtype = target.params["embed_tokens"], target.model.dtype
    lm_head = embedding.T if config.layer.tie_word_embeddings else target.params["lm_head"]

    def is_own(array: str, whole: jax.Array) -> bool:
        stored = tensors.dtype(f"{array}.weight")
        return not jnp.array_equal(params[array], whole.astype(stored).astype(dtype))

    return dataclasses.replace(
        config,
        own_embedding=config.own_embedding and is_own("embed_tokens", embedding),
        own_lm_head=config.own_lm_head and is_own("lm_head", lm_head),
    )


def read_target_ids(tensors: Tensors, config: HeadConfig) -> dict[str, jax.Array]:
    """``target_ids`` if a head has them, as d2t says and t2d, if it is there, too.

    Raises:
      ValueError: d2t or t2d are not of the config's sizes, or contradict each other.
    """
    size, whole, where = config.draft_vocab_size, config.layer.vocab_size, shown(tensors.origin)
    ids = np.arange(size)
    if "d2t" in tensors.files:
        where, (shape, kind) = shown(tensors.files["d2t"][0]), tensors.form("d2t")
        if kind not in ("I64", "I32") or shape != (size,):
            raise ValueError(
                f"{where} has d2t of dtype {kind} and shape {quoted(shape)}, but it must be I64 or "
                f"I32 of shape {(size,)}."
            )
        # Clipped, because a sum may not fit into 64 bits.
        ids = ids + np.clip(tensors.read("d2t").astype(np.int64), -(2**62), 2**62)
        with errors_name(where):
            check_listed("ids of d2t", ids, whole)
        if size == whole and ids.tolist() != list(range(size)):
            rule = "draft_vocab_size is vocab_size"
            raise ValueError(f"{where} has a d2t that is not zero, but {rule}.")
    elif size < whole:
        raise ValueError(f"{where} lacks the tensor d2t.")
    if "t2d" in tensors.files:
        fits = tensors.form("t2d") == ((whole,), "BOOL")
        if not fits or not np.array_equal(tensors.read("t2d").nonzero()[0], np.sort(ids)):
            where = shown(tensors.files["t2d"][0])
            raise ValueError(f"{where} has a t2d that is not the mask of the ids that d2t lists.")
    return {"target_ids": jnp.asarray(ids, jnp.int32)} if size < whole else {}


def target_id_tensors(config: HeadConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """d2t and t2d, if a head has a list of ids.

    Raises:
      ValueError: `params` list an id twice, or one that is not the target's.
    """
    if "target_ids" not in params:
        return {}
    ids, whole = np.asarray(params["target_ids"], np.int64), config.layer.vocab_size
    check_listed("params['target_ids']", ids, whole)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(whole), ids)}
