"""What the `config.json` of a draft head says, in every published layout: a function for each.

The layout of speculators has the sizes of layers in ``transformer_layer_config``, all others in the
object of `config.json` itself. EAGLE, AngelSlim and SpecForge name an EAGLE-3 head's layer
``midlayer``, DeepSpec ``layers.0``. Of heads that draft a block, z-lab (DFlash) has the switches in
``dflash_config`` and leaves out what the target has; DeepSpec (DSpark, and DFlash trained by the
same code) has a copy of the target's config, embedding and output matrix.

A layout says where layers are and what an absent key means. What is written is read under every
name and in every object that any layout has for it, since files mix them. A key that changes what a
head computes is read, or refused by name. Keys that say the same must agree; null and an empty list
say nothing.

`head_files.read_head` calls `read_eagle3_config` or `read_block_config` once the tensors are open:
where no key says whether a norm, a bias or a matrix is there, the names of tensors do.
"""

import dataclasses
from collections.abc import Collection, Sequence

from jax_specdec.lm.formats.config_json import parse_config
from jax_specdec.lm.formats.families import FULL, SLIDING
from jax_specdec.lm.formats.files import JsonObject, JsonValue, errors_name, only
from jax_specdec.lm.formats.tensors import Tensors
from jax_specdec.lm.models.block import BlockHeadConfig
from jax_specdec.lm.models.config import DecoderConfig, LayerSpec
from jax_specdec.lm.models.eagle3 import Eagle3Config
from jax_specdec.lm.models.fields import MAX_INT, quoted

LEGACY_NORMS = tuple(f"aux_norm_{place}.weight" for place in ("low", "mid", "high"))
"""Names that norms of the features of three layers have in some files."""

_SPECULATORS = "speculators_model_type"

_Key = tuple[JsonObject, str]
"""An object and the name of a key in it."""

# As in `config_json`: without values, a key must be absent or null.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Objects of a `config.json`, and what its absent keys mean.

    Attributes:
      raw: all of the file.
      layer_config: the object that says what all layers are.
      block_size: rows of a block; None where the file must say it.
      sample_from_anchor: the first row of a block gives a draft.
      markov_rank: of the bias that depends on the token before; 0 for no bias.
      enable_confidence_head: there is one; None where tensors say it.
    """

    raw: JsonObject
    layer_config: JsonObject
    block_size: int | None = None
    sample_from_anchor: bool = False
    markov_rank: int = 0
    enable_confidence_head: bool | None = None

    @property
    def eagle(self) -> JsonObject:
        """The object in which EAGLE's files say what is read of the target."""
        return self.raw.nested("eagle_config")

    @property
    def dflash(self) -> JsonObject:
        """The object in which z-lab's files have their switches."""
        return self.raw.nested("dflash_config")

    def either(self, key: str) -> tuple[_Key, _Key]:
        """Returns a key of the file, and the one of that name in z-lab's object."""
        return (self.raw, key), (self.dflash, key)


def speculators(raw: JsonObject) -> HeadLayout:
    """Returns the layout of speculators, whose defaults are those of its classes."""
    has_dspark_projector = _has_dspark_projector(raw)
    is_dspark = raw[_SPECULATORS] == "dspark"
    raw.needed("transformer_layer_config")
    # What its classes take where a key is absent. A projector of SpecForge's DSpark needs the first
    # row of a block, whatever the type says.
    return HeadLayout(
        raw=raw,
        layer_config=raw.nested("transformer_layer_config"),
        block_size=8,
        sample_from_anchor=is_dspark or has_dspark_projector,
        markov_rank=256 if is_dspark else 0,
        enable_confidence_head=is_dspark,
    )


def eagle(raw: JsonObject) -> HeadLayout:
    """Returns the layout of all other EAGLE-3 heads: EAGLE, AngelSlim, SpecForge, DeepSpec."""
    return HeadLayout(raw=raw, layer_config=raw)


def z_lab(raw: JsonObject) -> HeadLayout:
    """Returns the layout of z-lab, in which SpecForge writes DSpark heads, too."""
    return HeadLayout(raw=raw, layer_config=raw, sample_from_anchor=_has_dspark_projector(raw))


def deep_spec(raw: JsonObject) -> HeadLayout:
    """Returns the layout of DeepSpec, whose heads draft from the first row of a block on."""
    return HeadLayout(raw=raw, layer_config=raw, sample_from_anchor=True)


def _has_dspark_projector(raw: JsonObject) -> bool:
    """Returns whether a file of SpecForge is of a DSpark head."""
    return raw.nested("dflash_config").get("projector_type") == "dspark"


_BLOCK_ARCHITECTURES = {"DFlashDraftModel": z_lab, "Qwen3DSparkModel": deep_spec}
"""Layouts of heads that draft a block, by what a file that is not of speculators calls itself."""


def _block_layout(raw: JsonObject) -> HeadLayout:
    """Returns the layout of a head that drafts a block."""
    raw.require_one_of(_SPECULATORS, "dflash", "dspark")
    if raw.get(_SPECULATORS) is not None:
        return speculators(raw)
    # The name decides whether the first row drafts where no key does: an unknown one is refused.
    names = raw.given("architectures", [])
    known = [x for x in _BLOCK_ARCHITECTURES if isinstance(names, list) and x in names]
    raw.require(len(known) == 1, "architectures", only(*_BLOCK_ARCHITECTURES))
    return _BLOCK_ARCHITECTURES[known[0]](raw)


def read_eagle3_config(raw: JsonObject, tensors: Tensors, target: DecoderConfig) -> Eagle3Config:
    """Returns an EAGLE-3 head's config, of what `config.json` says and which tensors are there.

    Raises:
      ValueError: they ask for something that is not computed, or do not fit the target.
    """
    raw.require_one_of(_SPECULATORS, "eagle3")
    is_speculators = raw.get(_SPECULATORS) is not None
    layout = speculators(raw) if is_speculators else eagle(raw)
    _check_served(layout, target)
    values = _read_layers(layout.layer_config, tensors, target)
    # Not among `_SERVED`: heads of blocks draft in parallel, whatever this says.
    raw.require_one_of("parallel_drafting", False)
    # EAGLE's files do not say which layers are read: an early, a middle and a late one. Of a target
    # of few layers two of them are the same, which `Eagle3Config` refuses.
    depth = len(target.layers)
    early_middle_late = tuple(sorted((2, depth // 2, depth - 3)))
    values["aux_hidden_state_layers"] = _read_aux_layers(layout, depth, early_middle_late)
    values |= _read_shared(layout, values["hidden_size"], tensors, target)
    # Tensors say which norms there are where no key does.
    names = tensors.stored.keys()
    has_input_norm = "input_norm.weight" in names
    has_fc_norm = bool({"fc_norm.0.weight", LEGACY_NORMS[0]} & names)
    values["norm_before_fc"] = _read(has_input_norm, (raw, "norm_before_fc"))
    values["fc_norm"] = _read(has_fc_norm, (raw, "fc_norm"))
    values["norm_before_residual"] = _read(False, (raw, "norm_before_residual"))
    values["norm_output"] = _read(False, (raw, "norm_output"))
    is_clear = is_speculators or values["fc_norm"]
    if values["norm_output"] is True and not is_clear:
        # SpecForge may mean the norm before lm_head, which every head has. Only with norms of
        # chunks, or in the layout of speculators, norm(h) is to be fed back.
        values["norm_output"] = False
    with errors_name(raw.where):
        return Eagle3Config(**values)


def read_block_config(raw: JsonObject, tensors: Tensors, target: DecoderConfig) -> BlockHeadConfig:
    """Returns the config of a head that drafts a block, as `read_eagle3_config` does."""
    layout = _block_layout(raw)
    _check_served(layout, target)
    # A Llama has no layers that slide: `_sliding` reads which do.
    values = _read_layers(layout.layer_config, tensors, target, "layer_types", "use_sliding_window")
    values |= _sliding(layout, values["layers"])
    values["aux_hidden_state_layers"] = _read_aux_layers(layout, len(target.layers), None)
    values |= _read_shared(layout, values["hidden_size"], tensors, target)
    values |= _read_block(layout, tensors)
    with errors_name(raw.where):
        return BlockHeadConfig(**values)


def _check_served(layout: HeadLayout, target: DecoderConfig) -> None:
    """Raises ValueError for a key, in any object, that is not served or not as in the target."""
    sizes = {
        "vocab_size": ("vocab_size", target.vocab_size),
        "target_hidden_size": ("hidden_size", target.hidden_size),
        "num_target_layers": ("num_hidden_layers", len(target.layers)),
    }
    for place in (layout.raw, layout.layer_config, layout.eagle, layout.dflash):
        for key, served in _SERVED.items():
            place.require_one_of(key, *served)
        for key, (name, size) in sizes.items():
            place.require(place.given(key, size) == size, key, f"but the target's {name} is {size}")


def _read_layers(
    raw: JsonObject, tensors: Tensors, target: DecoderConfig, *elsewhere: str
) -> dict[str, JsonValue]:
    """Returns layers, with what tensors add to them, and sizes; keys `elsewhere` are not read."""
    # A head may have a bias of attention without the norms of its family, which no Llama has.
    bias = raw.given("attention_bias", False)
    raw.require(isinstance(bias, bool), "attention_bias", "but it must be a boolean")
    raw.require_one_of("model_type", "llama", "qwen2", "qwen3")
    # The layers are read as those of a model would be, without keys that are refused there and read
    # here. Its vocabulary and whether it is tied are not used: those are the target's.
    parsed = parse_config(raw.but(**dict.fromkeys(("attention_bias", "logit_scale", *elsewhere))))
    # All layers are as the tensors of the first say; `check_tensors` then looks at each of them.
    attention = f"{layer_prefix(tensors.stored)}.self_attn"
    layers = [
        dataclasses.replace(
            spec,
            qkv_bias=bias or f"{attention}.q_proj.bias" in tensors.stored,
            o_bias=f"{attention}.o_proj.bias" in tensors.stored,
            qk_norm=spec.qk_norm or f"{attention}.q_norm.weight" in tensors.stored,
        )
        for spec in parsed.layers
    ]
    return {
        "vocab_size": target.vocab_size,
        "hidden_size": parsed.hidden_size,
        "layers": tuple(layers),
        "tie_word_embeddings": target.tie_word_embeddings,
        "num_token_ids": target.num_token_ids,
    }


def _read_shared(
    layout: HeadLayout, hidden_size: int, tensors: Tensors, target: DecoderConfig
) -> dict[str, JsonValue]:
    """Returns the other fields that heads of all kinds have, not checked."""
    raw = layout.raw
    names = tensors.stored.keys()
    draft_vocab_size = _read(target.vocab_size, (raw, "draft_vocab_size"))
    # Rows of a list of ids are the head's own: if no file has them, copies of the target's. They
    # have the target's width, so a head of another width must bring its own.
    is_listed = draft_vocab_size != target.vocab_size
    has_own_rows = is_listed and hidden_size == target.hidden_size
    return {
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": target.hidden_size,
        "own_embedding": "embed_tokens.weight" in names,
        "own_lm_head": has_own_rows or "lm_head.weight" in names,
        "logit_scale": _read(1.0, (layout.layer_config, "logit_scale"), (raw, "logit_scale")),
    }


def _read_block(layout: HeadLayout, tensors: Tensors) -> dict[str, JsonValue]:
    """Returns what a block is, and what DSpark adds to it, not checked."""
    raw = layout.raw
    dflash = layout.dflash
    # The block, whose first row is used by DSpark alone.
    block_size = _read(layout.block_size, *layout.either("block_size"))
    mask_token_id = _read(None, *layout.either("mask_token_id"))
    # Three names of one switch, which any of the objects may have.
    sample_from_anchor = _read(
        layout.sample_from_anchor,
        (raw, "sample_from_anchor"),
        (raw, "query_zero_predicts_next"),
        (dflash, "sample_from_anchor"),
        (dflash, "query_zero_predicts_next"),
        *layout.either("shift_label"),
    )
    # What DSpark adds: a bias, and a confidence head, which looks at what the bias does by default.
    markov_rank = _read(layout.markov_rank, *layout.either("markov_rank"))
    has_confidence = layout.enable_confidence_head
    if has_confidence is None:
        has_confidence = "confidence_head.proj.weight" in tensors.stored
    has_confidence = _read(
        has_confidence, *layout.either("enable_confidence_head"), (dflash, "use_confidence_head")
    )
    with_markov = _read(markov_rank != 0, *layout.either("confidence_head_with_markov"))
    # A rank of 0 is no bias, and the last switch says nothing where there is no confidence head.
    return {
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "sample_from_anchor": sample_from_anchor,
        "markov_rank": markov_rank or None,
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": with_markov if has_confidence else False,
    }


def _read_aux_layers(
    layout: HeadLayout, num_layers: int, default: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Returns the layers before which features are read, or the default, as `_read` does."""
    # Here id i is what enters layer i: 0 is the embedding's output, and the number of layers what
    # leaves the last one. Some keys have the layer that it leaves, -1 for the embedding: to those 1
    # is added. Ids are compared after that, so that a file may have several of the keys.
    shifts = (
        (layout.raw, "aux_hidden_state_layer_ids", 0),
        (layout.raw, "target_layer_ids", 1),
        (layout.dflash, "target_layer_ids", 1),
        (layout.raw, "eagle_aux_hidden_state_layer_ids", 0),
        (layout.eagle, "eagle_aux_hidden_state_layer_ids", 1),
    )
    stated = {
        _sentence(place, key): _layer_ids(place, key, shift, num_layers)
        for place, key, shift in shifts
        if _is_said(place, key)
    }
    return _agreed(stated, default, [(place, key) for place, key, _ in shifts])


def _read(default: JsonValue, *keys: _Key) -> JsonValue:
    """Returns what keys say, or the default where none says anything; None where one must.

    The value is not checked: the dataclass that is made of it does that.
    """
    stated = {_sentence(place, key): place[key] for place, key in keys if _is_said(place, key)}
    return _agreed(stated, default, keys)


def _is_said(place: JsonObject, key: str) -> bool:
    """Returns whether a key says anything."""
    return place.get(key) not in (None, [])


def _sentence(place: JsonObject, key: str) -> str:
    """Returns how a message begins about what a key says."""
    return f"{place.where} has {key} = {quoted(place[key])}"


def _agreed(found: dict[str, JsonValue], default: JsonValue, keys: Sequence[_Key]) -> JsonValue:
    """Returns the value that was found, by sentences, at some of the keys, or the default.

    Raises:
      ValueError: two values contradict each other; or there is neither a value nor a default.
    """
    # Each name once, in whatever objects it may stand.
    if not found and default is None:
        (place, _), *_ = keys
        names = dict.fromkeys(key for _, key in keys)
        raise ValueError(f"{place.where} lacks {' or '.join(names)}.")
    if not found:
        return default
    (first, value), *others = found.items()
    for says, other in others:
        if other != value:
            raise ValueError(f"{first} and {says}, which contradict each other.")
    return value


def _layer_ids(place: JsonObject, key: str, shift: int, num_layers: int) -> tuple[int, ...]:
    """Returns the layers before which features are read, ascending, of ids without `shift`."""
    ids = place[key]
    # The order decides which part of `fc` a feature meets. vLLM reads the ids of EAGLE's key in
    # ascending order, whatever theirs is; those of other keys are to be in it.
    may_be_mixed = key.startswith("eagle")
    are_ids = isinstance(ids, list) and all(type(x) is int for x in ids)
    in_order = sorted({*ids}) if are_ids else []
    fits = are_ids and in_order == (sorted(ids) if may_be_mixed else ids)
    fits = fits and 0 <= in_order[0] + shift and in_order[-1] + shift <= num_layers
    order = "different" if may_be_mixed else "ascending"
    wanted = f"but it must be {order} layer ids in [{-shift}, {num_layers - shift}]"
    place.require(fits, key, wanted)
    return tuple(x + shift for x in in_order)


def _sliding(layout: HeadLayout, layers: tuple[LayerSpec, ...]) -> dict[str, JsonValue]:
    """Returns the layers, with windows, and which rows see all of the block in those."""
    sliding = _sliding_layers(layout, len(layers))
    # By z-lab's switch every layer slides, also where a list says full of all, and its rows see all
    # of the block. Others see it up to themselves. Further keys may say what rows see.
    layout.dflash.require_one_of("use_swa", False, True)
    by_switch = layout.dflash.given("use_swa", False)
    if by_switch:
        must = "by which all layers slide, but of the others some do not"
        layout.dflash.require(len(sliding) in (0, len(layers)), "use_swa", must)
    sees_all = by_switch and not sliding
    if by_switch:
        sliding = list(range(len(layers)))
    non_causal = _read_non_causal(layout, len(layers), len(sliding), sees_all)
    if not sliding:
        return {"sliding_window_non_causal": False}
    window = _read_window(layout)
    windowed = list(layers)
    # A window of W in files is that many positions before the anchor, the first row of the block.
    # In a LayerSpec it counts the anchor, too.
    for index in sliding:
        windowed[index] = dataclasses.replace(layers[index], window=window + 1)
    return {"layers": tuple(windowed), "sliding_window_non_causal": non_causal}


def _sliding_layers(layout: HeadLayout, depth: int) -> list[int]:
    """Returns the layers that slide by keys that models have, too."""
    # Those of the list, or, without one, those from max_window_layers on.
    config = layout.layer_config
    kinds = config.given("layer_types", [])
    are_kinds = isinstance(kinds, list) and all(x in (SLIDING, FULL) for x in kinds)
    wanted = f"but it must be a list of {SLIDING!r} and {FULL!r}, one for each layer"
    # A list of another length does no harm if all of it is full.
    fits = are_kinds and (len(kinds) == depth or SLIDING not in kinds)
    config.require(fits, "layer_types", wanted)
    if kinds or not config.given("use_sliding_window", False):
        return [index for index, kind in enumerate(kinds) if kind == SLIDING]
    first = config.given("max_window_layers", 28)  # the default of transformers
    must = "but it must be an integer from 0 on"
    config.require(type(first) is int and first >= 0, "max_window_layers", must)
    return list(range(min(first, depth), depth))


def _read_non_causal(
    layout: HeadLayout, depth: int, num_sliding: int, default: JsonValue
) -> JsonValue:
    """Returns whether rows of layers that slide see all of the block, or the default."""
    stated = {}
    switch = "sliding_window_non_causal"  # of such layers alone
    if num_sliding and _is_said(layout.raw, switch):
        stated[_sentence(layout.raw, switch)] = layout.raw[switch]
    # These are of all layers. `BlockHead` has no causal layer without a window, so true is for
    # heads of which every layer slides; false says of full layers what they do anyway.
    for place, key in ((layout.dflash, "causal"), *layout.either("is_causal")):
        if _is_said(place, key):
            place.require(isinstance(place[key], bool), key, "but it must be a boolean")
            wanted = "but full attention over a block is not causal"
            place.require(not place[key] or num_sliding == depth, key, wanted)
            stated[_sentence(place, key)] = not place[key]
    return _agreed(stated, default, ())


def _read_window(layout: HeadLayout) -> int:
    """Returns the window of layers that slide, which z-lab's object may have by two names."""
    names = ((layout.dflash, name) for name in ("sliding_window", "swa_window_size"))
    keys = [(layout.layer_config, "sliding_window"), *names]
    window = _read(None, *keys)
    is_size = type(window) is int and 0 < window < MAX_INT
    place, key = next((place, key) for place, key in keys if _is_said(place, key))
    place.require(is_size, key, "but it must be a positive integer")
    return window


def layer_prefix(stored: Collection[str]) -> str:
    """Returns what the names of the first layer's tensors begin with, in files or as written.

    `stored` are the names in a file; without any, the layout of speculators is meant.
    """
    # EAGLE, AngelSlim and SpecForge have a midlayer; all others, and heads of blocks, have layers.
    begins = {name.partition(".")[0] for name in stored}
    return "midlayer" if "midlayer" in begins and "layers" not in begins else "layers.0"
