"""Reading Gemma 4 assistants: a directory of `config.json` and `model.safetensors`.

An assistant is a small Gemma 4 whose layers all read the keys of its target, between a projection
from the target's width and one back to it. So its layers come from `families.gemma4_layers`, and
what is checked here is that target and assistant belong together. `heads.load_head` calls this.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.formats.checkpoint import LoadedModel
from jax_specdec.lm.formats.families import FULL, SLIDING, gemma4_layers
from jax_specdec.lm.formats.files import JsonObject, errors_name
from jax_specdec.lm.formats.head_kinds import ASSISTANT_TYPES, check_is_head
from jax_specdec.lm.formats.tensors import (
    Names,
    Tensors,
    check_tensors,
    layer_tensors,
    open_files,
    parts,
    read_arrays,
    tensor_shapes,
)
from jax_specdec.lm.models.config import DecoderConfig, same_heads
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.models.gemma_assistant import (
    GemmaAssistantConfig,
    GemmaAssistantHead,
    target_arrays,
)
from jax_specdec.lm.models.int8 import Int8Weight
from jax_specdec.lm.models.llama import Llama

_NAMES = {
    "pre_projection": "pre_projection.weight",
    "norm": "model.norm.weight",
    "post_projection": "post_projection.weight",
    "centroids": "masked_embedding.centroids.weight",
    "lm_head": "model.embed_tokens.weight",  # not read to embed: tokens enter by the target's
}
"""The tensor of each array that is not of a layer."""

# The ids of an ordered head, group after group.
_ORDER = "masked_embedding.token_ordering"


def read_assistant(
    directory: Path, raw: JsonObject, target: LoadedModel[Llama]
) -> LoadedModel[GemmaAssistantHead]:
    """Returns an assistant for a Gemma 4; `raw` is its `config.json`.

    The embedding and the final norm of the target are its own arrays, not copies. Of an ordered
    head, rows of the output matrix are put in the order of its groups. Raises as `load_head` does.
    """
    with open_files(directory) as tensors:
        # Before its config, which would be refused for its model_type alone.
        check_is_head(shown(directory), tensors.stored)
        raw.require_one_of("model_type", *ASSISTANT_TYPES)
        head = GemmaAssistantHead(_read_config(raw, target.model.config), target.model.dtype)
        c = head.config
        # As the file has it, the output matrix of an ordered head is whole: [H, V] here, and not
        # yet [M, V / M, H].
        shapes = head.weight_shapes | {"lm_head": (c.hidden_size, c.vocab_size)}
        outer, *layers = parts(shapes)
        # The target's own arrays are in `weight_shapes` and have no name: no file has them.
        names = [Names({array: [name] for array, name in _NAMES.items() if array in outer})]
        for index, (spec, arrays) in enumerate(zip(c.layers, layers, strict=True)):
            names.append(layer_tensors(spec, arrays, f"model.layers.{index}"))
        check_tensors(tensors, tensor_shapes(names, parts(shapes)), (_ORDER,))
        params, *layers = read_arrays(tensors, names, head.dtype)
        if c.num_centroids is not None:
            ids = _read_groups(tensors, c.vocab_size)
            params["target_ids"] = jnp.asarray(ids)
            matrix = params["lm_head"]
            # Blocks of rows are gathered from it, for which int8 has no product.
            if isinstance(matrix, Int8Weight):
                matrix = matrix.dequantized().astype(head.dtype)
            # [H, V] -> [V, H] -> [M, V / M, H]: candidates of a group are one block of memory
            params["lm_head"] = matrix.T[ids].reshape(c.num_centroids, -1, c.hidden_size)
    return LoadedModel(head, {**params, "layers": layers, **target_arrays(target.params)})


def _read_config(raw: JsonObject, target: DecoderConfig) -> GemmaAssistantConfig:
    """Returns the config of an assistant; raises as `load_head` does."""
    # Sizes of the target, said twice: at the top its width, in the object of text its vocabulary.
    size = target.hidden_size
    rule = f"but the target's hidden_size is {size}"
    raw.require(raw.needed("backbone_hidden_size") == size, "backbone_hidden_size", rule)
    text = raw.nested("text_config")
    rule = f"but the target's is {target.vocab_size}"
    text.require(text.needed("vocab_size") == target.vocab_size, "vocab_size", rule)
    # What a decoder may have, and an assistant has not.
    text.require_one_of("hidden_size_per_layer_input", 0)
    text.require_one_of("use_double_wide_mlp", False)
    text.require_one_of("attention_bias", False)
    # The last layer of each kind that writes keys; an assistant's own write none.
    keys_of = {
        FULL if spec.window is None else SLIDING: index
        for index, spec in enumerate(target.layers)
        if spec.keys_of is None
    }
    must = "be a Gemma 4, which has layers with a window and without"
    require(len(keys_of) == 2, "target", must, type(target).__name__)
    # All layers share, whatever the file says of that, and 0 stands for no inputs per layer, of
    # which a file that leaves the key out would have 256.
    all_shared = dict(num_kv_shared_layers=text.get("num_hidden_layers"))
    layers = gemma4_layers(text.but(hidden_size_per_layer_input=0, **all_shared), keys_of)
    for index, spec in enumerate(layers):
        assert spec.keys_of is not None
        source = target.layers[spec.keys_of]
        heads = f"{spec.num_key_value_heads} heads of {spec.head_dim}"
        of_target = f"{source.num_key_value_heads} of {source.head_dim}"
        rule = f"whose layer {index} reads {heads}, but the target's layer has {of_target}"
        raw.require(same_heads(spec, source), "text_config", rule)
    is_ordered = raw.given("use_ordered_embeddings", False)
    ordered = {}
    if is_ordered:
        ordered["num_centroids"] = raw.given("num_centroids", 2048)
        ordered["num_active_centroids"] = raw.given("centroid_intermediate_top_k", 32)
    with errors_name(raw.where):
        return GemmaAssistantConfig(
            vocab_size=target.vocab_size,
            hidden_size=text.needed("hidden_size"),
            layers=tuple(layers),
            num_token_ids=target.num_token_ids,
            target_hidden_size=size,
            target_layers=len(target.layers),
            target_norm=target.norm,
            **ordered,
        )


def _read_groups(tensors: Tensors, vocab_size: int) -> np.ndarray:
    """Returns the ids of all groups, one group after another, ``[V]`` int32."""
    # A group is V / M ids in a row. Each id must be in one of them: one that is not could never be
    # drafted, and one that is there twice would get twice its probability.
    if _ORDER not in tensors.stored:
        raise ValueError(f"{shown(tensors.origin)} lacks the tensor {_ORDER}.")
    order = tensors.read(_ORDER)
    is_whole = np.issubdtype(order.dtype, np.integer) and order.shape == (vocab_size,)
    if not is_whole or not np.array_equal(np.sort(order), np.arange(vocab_size)):
        must = f"must have each id below {vocab_size} once, and has not"
        raise ValueError(f"{tensors.where(_ORDER)} has {_ORDER}, which {must}.")
    return order.astype(np.int32)
