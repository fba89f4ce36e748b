"""Reading and writing the files of draft heads of all kinds: what their public functions share."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_specdec._src.base.arrays import LOGITS, check_listed, checked_dtype
from jax_specdec.lm.formats.checkpoint import LoadedModel, refuse_int8, stored_tensors, write_files
from jax_specdec.lm.formats.config_json import config_json
from jax_specdec.lm.formats.files import JsonObject, JsonValue, errors_name, path_of
from jax_specdec.lm.formats.head_kinds import check_is_head
from jax_specdec.lm.formats.head_layouts import LEGACY_NORMS, layer_prefix
from jax_specdec.lm.formats.tensors import (
    Names,
    Tensors,
    check_tensors,
    layer_tensors,
    open_files,
    parts,
    read_arrays,
    tensor_shapes,
    unfuse,
)
from jax_specdec.lm.models.config import DecoderConfig
from jax_specdec.lm.models.fields import quoted, shown
from jax_specdec.lm.models.heads import DraftHead, HeadConfig, shared_params
from jax_specdec.lm.models.int8 import Int8Weight, is_int8, quantized
from jax_specdec.lm.models.layers import check_weights
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.protocol import Params

_Head = TypeVar("_Head", bound=DraftHead)

_NAMES = {
    "markov_w1": "markov_head.markov_w1.weight",
    "markov_w2": "markov_head.markov_w2.weight",
    "confidence_proj": "confidence_head.proj.weight",
    "confidence_bias": "confidence_head.proj.bias",
}
"""Tensors whose names are not those of the arrays."""


def read_head(
    directory: Path,
    raw: JsonObject,
    target: LoadedModel[Llama],
    kind: type[_Head],
    read_config: Callable[[JsonObject, Tensors, DecoderConfig], HeadConfig],
    prefix: str = "",
) -> LoadedModel[_Head]:
    """Returns a head for a target, whose own arrays stand for those that are equal to them.

    `raw` is its `config.json`; `read_config` reads the config of its `kind`; names of tensors are
    read without a `prefix`. Raises as `load_head` does.
    """
    with open_files(directory) as files:
        check_is_head(shown(directory), files.stored)
        tensors = files.without(prefix)
        head = kind(read_config(raw, tensors, target.model.config), target.model.dtype)
        names = _tensor_names(head, tensors.stored)
        shapes = tensor_shapes(names, parts(head.weight_shapes))
        check_tensors(tensors, shapes, ("d2t", "t2d"))
        target_ids = _read_target_ids(tensors, head.config)
        arrays, *layers = read_arrays(tensors, names, head.dtype)
        whole = {"layers": layers} if "layers" in head.weight_shapes else {"layer": layers[0]}
        params = {**target_ids, **arrays, **whole}
        shared = _shared_again(tensors, head.config, params, target)
    params |= shared_params(shared, target.params)
    if "lm_head" not in params:  # of a list of ids
        rows = target.params.get("lm_head", target.params["embed_tokens"])
        if not (is_int8(rows) or shared.tie_word_embeddings):
            rows = rows.T
        # [V, H] -> [Vd, H], and [V] -> [Vd] of the scales of int8
        rows = jax.tree.map(lambda x: x[params["target_ids"]], rows)
        params["lm_head"] = rows if is_int8(rows) else rows.T
    return LoadedModel(kind(shared, head.dtype), params)


def save_head(
    directory: str | Path,
    model: DraftHead,
    params: Params,
    dtype: DTypeLike,
    target_name: str | None,
    num_drafts: int,
    said: dict[str, JsonValue],
    *,
    write_shared: bool,
) -> None:
    """Writes a head in the layout of speculators; raises as `save_eagle3` does.

    `said` are the keys of `config.json` that only heads of this kind have, `num_drafts` is the K
    that readers take by default. What the head shares with its target is left out or written, too.
    """
    directory = path_of(directory)
    stored = checked_dtype(dtype, LOGITS)
    check_weights("params", model.weight_shapes, params)
    refuse_int8(params)
    c = model.config
    arrays = params
    if c.output_is_embedding:  # [Vd, H], which `unfuse` transposes
        arrays = params | {"lm_head": params["lm_head"].T}
    if write_shared:
        whole = dataclasses.replace(c, own_embedding=True, own_lm_head=True)
        model = dataclasses.replace(model, config=whole)
    tensors = unfuse(_tensor_names(model), arrays)
    tensors = stored_tensors(tensors, stored) | _target_id_tensors(c, params)
    # Biases and norms of queries and keys are both there in a qwen3 layer with attention_bias;
    # windows are among what only heads of some kinds have.
    layers = [dataclasses.replace(x, qkv_bias=False, o_bias=False, window=None) for x in c.layers]
    plain = DecoderConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        layers=tuple(layers),
        num_token_ids=c.num_token_ids,
    )
    config = {
        "torch_dtype": stored.name,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        **said,
        "transformer_layer_config": {
            **config_json(plain, stored.name),
            "attention_bias": c.layers[0].qkv_bias,
            "logit_scale": c.logit_scale,
            **said.get("transformer_layer_config", {}),
        },
        "speculators_config": {
            "algorithm": said["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }
    write_files(directory, config, tensors)


def _tensor_names(head: DraftHead, stored: Collection[str] = ()) -> list[Names]:
    """Returns the tensors of each of the `parts`: named as `stored` ones are, or as is written."""
    c = head.config
    shapes = head.weight_shapes
    elsewhere = {"layer", "layers", "target_ids"}
    if not c.own_embedding:
        elsewhere.add("embed_tokens")
    if not c.own_lm_head or (stored and "lm_head.weight" not in stored):
        elsewhere.add("lm_head")
    own = {x: [_NAMES.get(x, f"{x}.weight")] for x in shapes if x not in elsewhere}
    if "fc_norm" in own:
        count = len(c.aux_hidden_state_layers)
        is_legacy = count == len(LEGACY_NORMS) and LEGACY_NORMS[0] in stored
        usual = [f"fc_norm.{index}.weight" for index in range(count)]
        own["fc_norm"] = list(LEGACY_NORMS) if is_legacy else usual
    names = [Names(own, {"fc_norm": [c.target_hidden_size] * len(c.aux_hidden_state_layers)})]
    _, *layers = parts(shapes)
    for index, (spec, arrays) in enumerate(zip(c.layers, layers, strict=True)):
        prefix = layer_prefix(stored) if index == 0 else f"layers.{index}"
        names.append(layer_tensors(spec, arrays, prefix))
    return names


def _shared_again(
    tensors: Tensors, config: HeadConfig, params: Params, target: LoadedModel[Llama]
) -> HeadConfig:
    """Returns the config of a head that owns only what differs from the target's arrays."""
    dtype = target.model.dtype
    embedding = target.params["embed_tokens"]
    lm_head = embedding.T if config.tie_word_embeddings else target.params["lm_head"]

    def is_own(array: str, whole: jax.Array | Int8Weight) -> bool:
        if array not in params or params[array].shape != whole.shape:
            return True
        name = f"{array}.weight"
        if tensors.form(name)[1] == "I8":
            return True
        if not isinstance(whole, Int8Weight):  # a file's dtype may round what the target has
            whole = whole.astype(tensors.dtype(name)).astype(dtype)
        pair = [params[array], whole]
        if any(map(is_int8, pair)):  # [in, out] -> [out, in]
            pair = [x if is_int8(x) else quantized(x.T) for x in pair]
        return not jax.tree.all(jax.tree.map(jnp.array_equal, *pair))

    return dataclasses.replace(
        config,
        own_embedding=config.own_embedding and is_own("embed_tokens", embedding),
        own_lm_head=config.own_lm_head and is_own("lm_head", lm_head),
    )


def _read_target_ids(tensors: Tensors, config: HeadConfig) -> dict[str, jax.Array]:
    """Returns ``target_ids [Vd]`` if a head has them, as d2t says and t2d, if it is there, too."""
    size = config.draft_vocab_size
    whole = config.vocab_size
    ids = np.arange(size)  # [Vd]
    if "d2t" in tensors.stored:
        where = tensors.where("d2t")
        shape, kind = tensors.form("d2t")
        if kind not in ("I64", "I32") or shape != (size,):
            raise ValueError(
                f"{where} has d2t of dtype {kind} and shape {quoted(shape)}, but it must be I64 or "
                f"I32 of shape {(size,)}."
            )
        # It holds offsets: id j of the head is j + d2t[j]. Clipped, since a sum may not fit.
        ids = ids + np.clip(tensors.read("d2t").astype(np.int64), -(2**62), 2**62)
        with errors_name(where):
            check_listed("ids of d2t", ids, whole)
        if size == whole and ids.tolist() != list(range(size)):
            rule = "draft_vocab_size is vocab_size"
            raise ValueError(f"{where} has a d2t that is not zero, but {rule}.")
    elif size < whole:
        raise ValueError(f"{shown(tensors.origin)} lacks the tensor d2t.")
    if "t2d" in tensors.stored:  # [V], which of the target's ids the head has
        fits = tensors.form("t2d") == ((whole,), "BOOL")
        if not fits or not np.array_equal(tensors.read("t2d").nonzero()[0], np.sort(ids)):
            where = tensors.where("t2d")
            raise ValueError(f"{where} has a t2d that is not the mask of the ids that d2t lists.")
    return {"target_ids": jnp.asarray(ids, jnp.int32)} if size < whole else {}


def _target_id_tensors(config: HeadConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns d2t and t2d, if a head has a list of ids."""
    if "target_ids" not in params:
        return {}
    ids = np.asarray(params["target_ids"], np.int64)  # [Vd]
    whole = config.vocab_size
    check_listed("params['target_ids']", ids, whole)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(whole), ids)}
