"""Reading and writing draft heads: a directory of `config.json` and `model.safetensors`."""

from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_specdec._src.base.arrays import check_type, require
from jax_specdec.lm.formats.checkpoint import LoadedModel
from jax_specdec.lm.formats.families import FULL, SLIDING
from jax_specdec.lm.formats.files import JsonValue, is_there, path_of
from jax_specdec.lm.formats.head_files import load_head, save_head
from jax_specdec.lm.formats.head_kinds import BLOCK, EAGLE3
from jax_specdec.lm.formats.head_layouts import read_block_config, read_eagle3_config
from jax_specdec.lm.formats.tensors import INDEX_FILE, WEIGHTS_FILE
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.protocol import Params

_TORCH_FILE = "pytorch_model.bin"
_MASK_FILE = "mask_embedding.pt"


def load_eagle3(directory: str | Path, target: LoadedModel[Llama]) -> LoadedModel[Eagle3Head]:
    """Reads an EAGLE-3 head that was trained for a target, from a local directory.

    The layouts of EAGLE, AngelSlim and SpecForge, of DeepSpec, and of speculators are read. An
    embedding or output matrix that the files do not hold, or that is the target's rounded to their
    dtype, is the target's own array, not a copy. Of a head with a list of ids whose files hold no
    output matrix, it is a copy of the target's rows.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      target: the target, as `load_huggingface` gives it. Weights are converted to its dtype.

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
      >>> config = target.model.config
      >>> head = lm.models.Eagle3Head(lm.models.Eagle3Config.of_target(
      ...     config, layers=config.layers[:1], aux_hidden_state_layers=(2, 4, 5)))
      >>> params = head.init_params(jax.random.key(0), target.params)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     lm.formats.save_eagle3(directory, head, params)
      ...     loaded = lm.load_eagle3(directory, target)
      >>> loaded.model == head, loaded.params["embed_tokens"] is target.params["embed_tokens"]
      (True, True)
    """
    file = path_of(directory) / WEIGHTS_FILE
    torch = file.with_name(_TORCH_FILE)
    if is_there(torch) and not (is_there(file) or is_there(file.with_name(INDEX_FILE))):
        raise FileNotFoundError(
            f"{shown(file)} does not exist; tools/convert_eagle3.py of the project makes it "
            f"from {_TORCH_FILE}."
        )
    return load_head(directory, target, Eagle3Head, EAGLE3, read_eagle3_config)


def load_block_head(directory: str | Path, target: LoadedModel[Llama]) -> LoadedModel[BlockHead]:
    """Reads a DFlash or DSpark head that was trained for a target, from a local directory.

    The layouts of z-lab, of DeepSpec and of speculators are read. What is the target's is shared,
    as by `load_eagle3`.

    Args:
      directory: holds `config.json` and `model.safetensors`.
      target: as for `load_eagle3`.

    Returns:
      The head and its weights.

    Raises:
      FileNotFoundError, OSError, TypeError: as for `load_eagle3`.
      ValueError: as for `load_eagle3`. `BlockHead` does not compute Markov heads other than
        "vanilla", Domino's projector, latent attention, soft caps of logits, attention sinks, value
        scales, DFlash2's convolutions and selectors, interleaved rotary positions, a mask that is
        an embedding of its own, full attention that is causal.

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
      ...     loaded = lm.load_block_head(directory, target)
      >>> drafter = lm.BlockDrafter(loaded.model)  # for `generate`, with draft_params=loaded.params
      >>> loaded.model == head, loaded.params["embed_tokens"] is target.params["embed_tokens"]
      (True, True)
    """
    if is_there(path_of(directory) / _MASK_FILE):
        raise ValueError(f"{shown(path_of(directory))} has {_MASK_FILE}, which is not read.")
    return load_head(directory, target, BlockHead, BLOCK, read_block_config, "model.")


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

    Example: see `load_eagle3`.
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
      model: the head.
      params: its weights.
      dtype: dtype of the stored tensors.
      target_name: the target's name or path, for readers that look it up.

    Raises:
      TypeError: `model` is not a `BlockHead`; or as for `save_eagle3`.
      ValueError: as for `save_eagle3`.

    Example: see `load_block_head`.
    """
    check_type("model", model, BlockHead)
    c = model.config
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
    windows = {spec.window for spec in c.layers if spec.window is not None}
    require(len(windows) <= 1, "model", "have windows of one size", sorted(windows))
    said["transformer_layer_config"] = {
        "layer_types": [FULL if spec.window is None else SLIDING for spec in c.layers],
        "sliding_window": next((size - 1 for size in windows), None),  # without the anchor
        "use_sliding_window": bool(windows),
    }
    k = c.max_drafts
    save_head(directory, model, params, dtype, target_name, k, said, write_shared=False)
