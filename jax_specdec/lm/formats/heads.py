"""Reading and writing draft heads: a directory of `config.json` and `model.safetensors`.

The public functions of heads of all kinds. `head_kinds` says which kind a directory holds; then
`head_files` or `gemma_assistant` reads it. Heads are written in one layout, that of speculators.
"""

from pathlib import Path
from typing import Any, TypeVar, overload

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_specdec._src.base.arrays import check_type, require
from jax_specdec.lm.formats.checkpoint import LoadedModel
from jax_specdec.lm.formats.config_json import CONFIG_FILE
from jax_specdec.lm.formats.families import FULL, SLIDING
from jax_specdec.lm.formats.files import JsonObject, JsonValue, is_there, path_of, read_json
from jax_specdec.lm.formats.gemma_assistant import read_assistant
from jax_specdec.lm.formats.head_files import read_head, save_head
from jax_specdec.lm.formats.head_kinds import BLOCK, EAGLE3, checked_kind
from jax_specdec.lm.formats.head_layouts import read_block_config, read_eagle3_config
from jax_specdec.lm.formats.tensors import INDEX_FILE, WEIGHTS_FILE
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.models.gemma_assistant import GemmaAssistantHead
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.protocol import Params

LoadedHead = LoadedModel[Eagle3Head] | LoadedModel[BlockHead] | LoadedModel[GemmaAssistantHead]
"""A head of any kind, and its weights."""

_Head = TypeVar("_Head", Eagle3Head, BlockHead, GemmaAssistantHead)

# In which EAGLE-3 heads are published, too: a pickle, which may hold code.
_TORCH_FILE = "pytorch_model.bin"
# An embedding of the mask that is no row of the target's embedding.
_MASK_FILE = "mask_embedding.pt"


@overload
def load_head(
    directory: str | Path, target: LoadedModel[Llama], kind: type[_Head]
) -> LoadedModel[_Head]: ...


@overload
def load_head(directory: str | Path, target: LoadedModel[Llama]) -> LoadedHead: ...


def load_head(
    directory: str | Path, target: LoadedModel[Llama], kind: type | None = None
) -> LoadedModel[Any]:
    """Reads a draft head that was trained for a target, from a local directory.

    Its files say what it is: an `Eagle3Head` in the layouts of EAGLE, AngelSlim and SpecForge, of
    DeepSpec, or of speculators; a `BlockHead` (DFlash, DSpark) in those of z-lab, of DeepSpec, or
    of speculators; a `GemmaAssistantHead`. Files that do not say it are of an EAGLE-3 head.

    An embedding or output matrix that the files do not hold, or that is the target's rounded to
    their dtype, is the target's own array, not a copy. Of a head with a list of ids whose files
    hold no output matrix, it is a copy of the target's rows. Of an ordered head of an assistant,
    rows of the output matrix are put in the order of its groups.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      target: the target, as `load_huggingface` gives it. Weights are converted to its dtype.
      kind: the class that is wanted, which a type checker then knows; another is refused.

    Returns:
      The head and its weights.

    Raises:
      FileNotFoundError: a file is missing, or there is only a `pytorch_model.bin`.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: the head is of another kind; a file cannot be parsed, has a value out of range,
        does not fit the target, or asks for something that is not computed; a tensor is missing,
        unknown, of another shape or kind than the config says, or not finite in the target's dtype;
        an id of the head's vocabulary, or of an assistant's ordered head, is not one of the
        target's, or is there twice.

        `Eagle3Head` does not compute more than one layer, parallel drafting (``mask_hidden``),
        layers of features that coincide; `BlockHead` no Markov heads other than "vanilla", Domino's
        projector, latent attention, soft caps of logits, attention sinks, value scales, DFlash2's
        convolutions and selectors, interleaved rotary positions, a mask that is an embedding of its
        own, full attention that is causal.
      TypeError: `target` is not a loaded `Llama`, `directory` not a path, or `kind` none of these
        classes.

    Example:
      >>> import jax, tempfile
      >>> from jax_specdec import lm
      >>> target, _ = lm.load_embedded_pair()
      >>> config = target.model.config
      >>> head = lm.BlockHead(lm.BlockHeadConfig.of_target(
      ...     config, layers=config.layers[:1], aux_hidden_state_layers=(2, 4, 5), block_size=6,
      ...     mask_token_id=255))
      >>> params = head.init_params(jax.random.key(0), target.params)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     lm.formats.save_block_head(directory, head, params)
      ...     loaded = lm.load_head(directory, target, lm.BlockHead)
      >>> drafter = lm.BlockDrafter(loaded.model)  # for `generate`, with draft_params=loaded.params
      >>> loaded.model == head, loaded.params["embed_tokens"] is target.params["embed_tokens"]
      (True, True)
    """
    is_target = isinstance(target, LoadedModel) and isinstance(target.model, Llama)
    must = "be a LoadedModel of a Llama"
    hint = "pass what load_huggingface returned, model and params in one"
    require(is_target, "target", must, target, hint, TypeError)
    directory = path_of(directory)
    raw = read_json(directory / CONFIG_FILE)
    head_kind = checked_kind(raw, kind)
    if head_kind is EAGLE3:
        return _read_eagle3(directory, raw, target)
    if head_kind is BLOCK:
        return _read_block(directory, raw, target)
    return read_assistant(directory, raw, target)


def _read_eagle3(
    directory: Path, raw: JsonObject, target: LoadedModel[Llama]
) -> LoadedModel[Eagle3Head]:
    """Returns an EAGLE-3 head, as `load_head` does."""
    file = directory / WEIGHTS_FILE
    torch = file.with_name(_TORCH_FILE)
    if is_there(torch) and not (is_there(file) or is_there(file.with_name(INDEX_FILE))):
        raise FileNotFoundError(
            f"{shown(file)} does not exist; tools/convert_eagle3.py of the project makes it "
            f"from {_TORCH_FILE}."
        )
    return read_head(directory, raw, target, Eagle3Head, read_eagle3_config)


def _read_block(
    directory: Path, raw: JsonObject, target: LoadedModel[Llama]
) -> LoadedModel[BlockHead]:
    """Returns a DFlash or DSpark head, as `load_head` does."""
    if is_there(directory / _MASK_FILE):
        raise ValueError(f"{shown(directory)} has {_MASK_FILE}, which is not read.")
    # DeepSpec's files may have the prefix before all names but that of the output matrix.
    return read_head(directory, raw, target, BlockHead, read_block_config, "model.")


def save_eagle3(
    directory: str | Path,
    model: Eagle3Head,
    params: Params,
    dtype: DTypeLike = jnp.float32,
    *,
    target_name: str | None = None,
    num_speculative_tokens: int = 4,
) -> None:
    """Writes an EAGLE-3 head in the layout of speculators, which vLLM and SGLang read too.

    What the head shares with its target is written too, because some readers do not take it from
    there. `load_head` shares it again.

    Args:
      directory: created if it does not exist; existing files are replaced.
      dtype: dtype of the stored tensors.
      target_name: the target's name or path, for readers that look it up. The class of speculators
        reads nothing without it.
      num_speculative_tokens: K that readers take by default.

    Raises:
      TypeError: `model` is not an `Eagle3Head`, `dtype` is none of float32, bfloat16 and float16,
        or `directory` is not a path.
      ValueError: `params` are not the model's, or a weight is not finite in `dtype`; nothing is
        written then.

    Example: see `load_head`.
    """
    check_type("model", model, Eagle3Head)
    c = model.config
    said: dict[str, JsonValue] = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": list(c.aux_hidden_state_layers),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
    }
    k = num_speculative_tokens
    save_head(directory, model, params, dtype, target_name, k, said, write_shared=True)


def save_block_head(
    directory: str | Path,
    model: BlockHead,
    params: Params,
    dtype: DTypeLike = jnp.float32,
    *,
    target_name: str | None = None,
) -> None:
    """Writes a block head in the layout of speculators, which vLLM reads too.

    What the head shares with its target is not written: readers take it from there.

    Args:
      directory: created if it does not exist; existing files are replaced.
      dtype: dtype of the stored tensors.
      target_name: the target's name or path, for readers that look it up.

    Raises:
      TypeError: `model` is not a `BlockHead`; or as for `save_eagle3`.
      ValueError: as for `save_eagle3`.

    Example: see `load_head`.
    """
    check_type("model", model, BlockHead)
    c = model.config
    # Only the class of DSpark has keys for what it adds. Both have `sample_from_anchor`.
    is_dspark = c.markov_rank is not None or c.enable_confidence_head
    said: dict[str, JsonValue] = {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "speculators_model_type": "dspark" if is_dspark else "dflash",
        "aux_hidden_state_layer_ids": list(c.aux_hidden_state_layers),
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": c.sample_from_anchor,
        "sliding_window_non_causal": c.sliding_window_non_causal,
    }
    if is_dspark:
        said |= {
            "enable_confidence_head": c.enable_confidence_head,
            "confidence_head_with_markov": c.confidence_head_with_markov,
            "markov_rank": c.markov_rank or 0,
            "markov_head_type": "vanilla",
        }
    # The file has one size for all layers that slide, and counts it without the anchor.
    windows = {spec.window for spec in c.layers if spec.window is not None}
    require(len(windows) <= 1, "model", "have windows of one size", sorted(windows))
    said["transformer_layer_config"] = {
        "layer_types": [FULL if spec.window is None else SLIDING for spec in c.layers],
        "sliding_window": next((size - 1 for size in windows), None),
        "use_sliding_window": bool(windows),
    }
    k = c.max_drafts
    save_head(directory, model, params, dtype, target_name, k, said, write_shared=False)
