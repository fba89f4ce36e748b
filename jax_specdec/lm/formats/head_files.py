"""Reading and writing the files of EAGLE-3 and block heads: what their public functions share.

`heads` has the public functions; `head_layouts` says what a `config.json` means. Here tensors are
named, checked and read, and the arrays that a head has in common with its target are kept apart
from its own. Files differ in that: some hold copies of the target's embedding and output matrix,
some hold neither, and some hold rows of a part of the vocabulary alone.
"""

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
    head_class: type[_Head],
    read_config: Callable[[JsonObject, Tensors, DecoderConfig], HeadConfig],
    prefix: str = "",
) -> LoadedModel[_Head]:
    """Returns a head for a target, whose own arrays stand for those that are equal to them.

    Args:
      raw: its `config.json`.
      target: that it drafts for.
      head_class: its class.
      read_config: reads the config of the class.
      prefix: names of tensors are read without it; some files have it before some of them.

    Raises:
      OSError, ValueError: as `load_head` says.
    """
    with open_files(directory) as files:
        # By its tensors: the config of a whole model may say no kind, as that of an old head.
        check_is_head(shown(directory), files.stored)
        tensors = files.without(prefix)
        # First as the files have it, with every array that they hold.
        head = head_class(read_config(raw, tensors, target.model.config), target.model.dtype)
        names = _tensor_names(head, tensors.stored)
        shapes = tensor_shapes(names, parts(head.weight_shapes))
        check_tensors(tensors, shapes, ("d2t", "t2d"))
        target_ids = _read_target_ids(tensors, head.config)
        arrays, *layers = read_arrays(tensors, names, head.dtype)
        by_layer = {"layers": layers} if "layers" in head.weight_shapes else {"layer": layers[0]}
        params = {**target_ids, **arrays, **by_layer}
        # Then without copies of what is the target's, whose arrays replace them.
        config = _without_copies(tensors, head.config, params, target)
    params |= shared_params(config, target.params)
    # A head with a list of ids counts as one with an output matrix of its own. If the files have
    # none, it is those rows of the target's. No other head gets here without one.
    if "lm_head" not in params:
        rows = target.params.get("lm_head", target.params["embed_tokens"])
        # An int8 matrix and an embedding are [V, H], any other output matrix is [H, V].
        if not (is_int8(rows) or config.tie_word_embeddings):
            rows = rows.T
        # [V, H] -> [Vd, H], and [V] -> [Vd] of the scales of int8
        rows = jax.tree.map(lambda x: x[params["target_ids"]], rows)
        params["lm_head"] = rows if is_int8(rows) else rows.T
    return LoadedModel(head_class(config, head.dtype), params)


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

    Args:
      target_name: name or path of the target, for readers that look it up.
      num_drafts: K that readers take by default.
      said: keys of `config.json` that only heads of this kind have; those of its
        ``transformer_layer_config`` are added to the keys there.
      write_shared: whether what the head shares with its target is written, too.
    """
    directory = path_of(directory)
    stored = checked_dtype(dtype, LOGITS)
    check_weights("params", model.weight_shapes, params)
    refuse_int8(params)
    c = model.config
    arrays = params
    # An output matrix that is the embedding is [V, H], as the file has it. `unfuse` transposes
    # every output matrix, so it gets this one transposed.
    if c.output_is_embedding:
        arrays = params | {"lm_head": params["lm_head"].T}
    # `_tensor_names` leaves out what is not the head's own: it is written as if it were.
    if write_shared:
        whole = dataclasses.replace(c, own_embedding=True, own_lm_head=True)
        model = dataclasses.replace(model, config=whole)
    tensors = unfuse(_tensor_names(model), arrays)
    tensors = stored_tensors(tensors, stored) | _target_id_tensors(c, params)
    # Biases and norms of queries and keys are both there in a qwen3 layer with attention_bias;
    # windows are among what only heads of some kinds have. So they are taken out for `config_json`,
    # which finds the family, and are said beside what it returns.
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
    """Returns the tensors of each of the `parts`: named as `stored` ones are, or as is written.

    `stored` is empty where a head is written.
    """
    c = head.config
    shapes = head.weight_shapes
    # Layers are named below, ids are read from d2t, and what is the target's has no tensor.
    elsewhere = {"layer", "layers", "target_ids"}
    if not c.own_embedding:
        elsewhere.add("embed_tokens")
    # An output matrix of a list of ids may be missing: see the end of `read_head`.
    if not c.own_lm_head or (stored and "lm_head.weight" not in stored):
        elsewhere.add("lm_head")
    tensors = {x: [_NAMES.get(x, f"{x}.weight")] for x in shapes if x not in elsewhere}
    # [A * Ht] is one array here, and in files a tensor [Ht] for each of the A layers that are read.
    if "fc_norm" in tensors:
        count = len(c.aux_hidden_state_layers)
        is_legacy = count == len(LEGACY_NORMS) and LEGACY_NORMS[0] in stored
        usual = [f"fc_norm.{index}.weight" for index in range(count)]
        tensors["fc_norm"] = list(LEGACY_NORMS) if is_legacy else usual
    names = [Names(tensors, {"fc_norm": [c.target_hidden_size] * len(c.aux_hidden_state_layers)})]
    _, *layers = parts(shapes)
    for index, (spec, arrays) in enumerate(zip(c.layers, layers, strict=True)):
        prefix = layer_prefix(stored) if index == 0 else f"layers.{index}"
        names.append(layer_tensors(spec, arrays, prefix))
    return names


def _without_copies(
    tensors: Tensors, config: HeadConfig, params: Params, target: LoadedModel[Llama]
) -> HeadConfig:
    """Returns the config of a head that owns only what differs from the target's arrays.

    Many files hold copies of the target's matrices, of which a large vocabulary makes gigabytes.
    """
    dtype = target.model.dtype
    embedding = target.params["embed_tokens"]
    # [H, V], as the head's has been read
    lm_head = embedding.T if config.tie_word_embeddings else target.params["lm_head"]

    def is_own(array: str, whole: jax.Array | Int8Weight) -> bool:
        if array not in params or params[array].shape != whole.shape:
            return True
        name = f"{array}.weight"
        # Integers of a file are kept as they are stored, whatever they were made of.
        if tensors.form(name)[1] == "I8":
            return True
        # The file's dtype may be narrower than the target's: a copy has been rounded to it, as the
        # target's array is here.
        if not isinstance(whole, Int8Weight):
            whole = whole.astype(tensors.dtype(name)).astype(dtype)
        pair = [params[array], whole]
        # A target in int8 was quantized when it was read: a copy gives the same integers.
        # [in, out] -> [out, in]
        if any(map(is_int8, pair)):
            pair = [x if is_int8(x) else quantized(x.T) for x in pair]
        return not jax.tree.all(jax.tree.map(jnp.array_equal, *pair))

    return dataclasses.replace(
        config,
        own_embedding=config.own_embedding and is_own("embed_tokens", embedding),
        own_lm_head=config.own_lm_head and is_own("lm_head", lm_head),
    )


def _read_target_ids(tensors: Tensors, config: HeadConfig) -> dict[str, jax.Array]:
    """Returns ``target_ids [Vd]`` if a head has them, as d2t says and t2d, if it is there, too.

    A head that scores all ids may have a d2t of zeros, which says nothing.
    """
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
        # It holds offsets: id j of the head is j + d2t[j]. Clipped, since a sum may not fit in 64
        # bits, and would come out as some id; what is clipped is still far outside the vocabulary.
        ids = ids + np.clip(tensors.read("d2t").astype(np.int64), -(2**62), 2**62)
        # Each an id of the target, and none twice: q of an id must be one number.
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
    """Returns d2t ``[Vd]`` int64 and t2d ``[V]`` bool, if a head has a list of ids."""
    if "target_ids" not in params:
        return {}
    ids = np.asarray(params["target_ids"], np.int64)  # [Vd]
    whole = config.vocab_size
    check_listed("params['target_ids']", ids, whole)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(whole), ids)}
