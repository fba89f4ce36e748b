"""Reading and writing checkpoints: directories in the layout of Hugging Face.

`load_huggingface` puts together what `config_json`, `tensors` and `token_ids` read. `LoadedModel`
is the result of all readers of weights, those of heads too, and `stored_tensors` and `write_files`
write the files of both.
"""

import dataclasses
import json
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_specdec._src.base.arrays import (
    LOGITS,
    check_choice,
    check_int,
    check_type,
    checked_dtype,
    require,
)
from jax_specdec.lm.extras import extra
from jax_specdec.lm.formats.config_json import (
    CONFIG_FILE,
    config_json,
    family_of,
    parse_config,
    read_model_json,
)
from jax_specdec.lm.formats.files import JsonValue, is_there, path_of
from jax_specdec.lm.formats.tensors import (
    EMBEDDING,
    WEIGHTS_FILE,
    check_finite,
    decoder_tensors,
    open_tensors,
    read_arrays,
    stores_own_head,
    unfuse,
)
from jax_specdec.lm.formats.token_ids import TOKENIZER_FILE, count_token_ids, stop_token_ids
from jax_specdec.lm.models.int8 import is_int8, quantize
from jax_specdec.lm.models.layers import check_weights
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.protocol import Params

Model = TypeVar("Model")


class LoadedModel(NamedTuple, Generic[Model]):
    """A model with its weights.

    Attributes:
      model: the static model object, a `CausalModel` or a draft head.
      params: its weights.

    Example: see `load_embedded_pair`.
    """

    model: Model
    params: Params


def load_huggingface(
    directory: str | Path,
    dtype: DTypeLike | None = None,
    *,
    weights: Literal["int8"] | None = None,
    max_vocab_size: int | None = None,
    allow_nonfinite: bool = False,
) -> LoadedModel[Llama]:
    """Reads a Hugging Face checkpoint of a Llama, Qwen or Gemma family from a local directory.

    Checkpoints pad the vocabulary axis, differently even within a family: the small Qwen2.5 models
    have 151936 entries, the large ones 152064, and their tokenizer 151665 ids. Ids past the last
    one in `tokenizer.json`, and past the stop tokens, get logits of -inf, so they are never drawn.

    An ``lm_head.weight`` that is stored and differs from the embedding is used, even if
    ``tie_word_embeddings`` is true; so does transformers. One that is equal is not held twice then.

    Args:
      directory: holds `config.json`, the weights (`model.safetensors`, or shards with
        `model.safetensors.index.json`) and `tokenizer.json`. Without the last, all ids of the
        vocabulary axis count as tokens.
      dtype: compute dtype; weights are converted to it once, here. None for that of the stored
        embedding.
      weights: "int8" for matrices in 8 bits, as `quantize` makes them, each as soon as it is read:
        an 8B model takes 9 GB. Those that the file has in int8 (compressed-tensors, a scale for
        each row) stay so whatever this is. None for others in `dtype`.
      max_vocab_size: ids from this one on are left out. For a drafter, give the target's
        `vocab_size`: verification needs Vd <= V.
      allow_nonfinite: read weights that are NaN or infinite in the compute dtype, too.

    Returns:
      The model and its weights.

    Raises:
      ImportError: the `safetensors` library is not installed.
      FileNotFoundError: a file is missing.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: a file cannot be parsed, has a value out of range, asks for something that `Llama`
        does not compute, or names files outside the directory; a tensor is missing, unknown, of
        another shape or kind than the config says, or not finite in the compute dtype; `weights`
        is something else; or `max_vocab_size` is less than 1.
      TypeError: `max_vocab_size` is not an integer, `dtype` not a floating dtype, or `directory`
        not a path.

    Example:
      >>> import tempfile
      >>> from jax_specdec import lm
      >>> _, draft = lm.load_embedded_pair()
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save_checkpoint(directory, *draft, jnp.bfloat16)
      ...     model, params = load_huggingface(directory)
      >>> model.vocab_size, model.dtype.name
      (256, 'bfloat16')
    """
    check_choice("weights", weights, (None, "int8"))
    if max_vocab_size is not None:
        max_vocab_size = check_int("max_vocab_size", max_vocab_size)
    directory = path_of(directory)
    # `config` has the sizes of the files, by which tensors are checked. Of its vocabulary axis the
    # first `size` ids are read, and `known` of these are tokens.
    raw = read_model_json(directory / CONFIG_FILE)
    config = parse_config(raw)
    size = config.vocab_size
    if is_there(directory / TOKENIZER_FILE):
        # A stop token must be drawn, even if only other files know it. One outside the vocabulary
        # axis never can be; the command line refuses a target with one.
        ends = [token_id + 1 for token_id in stop_token_ids(directory) if token_id < size]
        # The tokenizer of a whole family may have more ids than a small model of it has rows.
        known = min(max([count_token_ids(directory / TOKENIZER_FILE), *ends]), size)
        config = dataclasses.replace(config, num_token_ids=known)
    # Without a tokenizer, num_token_ids is what config.json says, which `save_checkpoint` writes.
    size = min(size, max_vocab_size or size)
    known = min(config.num_token_ids or size, size)
    with open_tensors(directory, config, family_of(raw).unread) as tensors:
        stored = tensors.dtype(EMBEDDING)
        dtype = checked_dtype(stored if dtype is None else dtype)
        # Compared in the compute dtype, in which a wider or a rounded copy may be the same. This
        # must precede `decoder_tensors`, which names an output matrix only if it is not tied.
        if config.tie_word_embeddings and stores_own_head(tensors, dtype):
            config = dataclasses.replace(config, tie_word_embeddings=False)
        num_token_ids = known if known < size else None
        loaded_config = dataclasses.replace(config, vocab_size=size, num_token_ids=num_token_ids)
        arrays, *layers = read_arrays(
            tensors,
            decoder_tensors(config),
            dtype,
            vocab_size=size,
            allow_nonfinite=allow_nonfinite,
            int8=weights == "int8",
        )
    params: Params = {**arrays, "layers": layers}
    if weights == "int8":
        # All matrices are in int8 by now. What this adds, where the embedding is the output matrix,
        # is a copy of it in int8 as `lm_head`.
        params = quantize(params)
    return LoadedModel(Llama(loaded_config, dtype), params)


def save_checkpoint(
    directory: str | Path,
    model: Llama,
    params: Params,
    dtype: DTypeLike = jnp.float32,
    *,
    allow_nonfinite: bool = False,
) -> None:
    """Writes a checkpoint that `load_huggingface` and other readers of its family read.

    Args:
      directory: created if it does not exist; existing files are replaced.
      dtype: dtype of the stored tensors.
      allow_nonfinite: write weights that are NaN or infinite in `dtype`, too.

    Raises:
      TypeError: `model` is not a `Llama`, `dtype` is none of float32, bfloat16 and float16,
        `directory` is not a path, or a weight is in int8.
      ValueError: `params` are not the model's, or a weight is not finite in `dtype`; nothing is
        written then.

    Example: see `load_huggingface`.
    """
    # All that may be refused is, before the first file is written.
    directory = path_of(directory)
    check_type("model", model, Llama)
    stored = checked_dtype(dtype, LOGITS)
    config = config_json(model.config, stored.name)
    check_weights("params", model.weight_shapes, params)
    refuse_int8(params)
    tensors = unfuse(decoder_tensors(model.config), params)
    tensors = stored_tensors(tensors, stored, allow_nonfinite=allow_nonfinite)
    write_files(directory, config, tensors)


def refuse_int8(params: Params) -> None:
    """Checks that no weight is in int8: files are written before that."""
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_int8):
        name = "params" + jax.tree_util.keystr(path)
        hint = "write the weights that quantize was called with"
        require(not is_int8(leaf), name, "be an array", leaf, hint, TypeError)


def stored_tensors(
    tensors: dict[str, np.ndarray], dtype: np.dtype, *, allow_nonfinite: bool = False
) -> dict[str, np.ndarray]:
    """Returns weights in the dtype of a file, in which they are finite if they must be."""
    if not allow_nonfinite:
        for name, tensor in tensors.items():
            check_finite("params", name, tensor, dtype)
    # Most tensors are transposed views of params, and `astype` keeps their order of axes in memory:
    # each is copied into the order of the file. What overflows now was allowed to.
    with np.errstate(over="ignore"):
        return {name: np.ascontiguousarray(x.astype(dtype)) for name, x in tensors.items()}


def write_files(
    directory: Path, config: dict[str, JsonValue], tensors: dict[str, np.ndarray]
) -> None:
    """Writes `config.json` and the weights, in one file. Without safetensors, writes nothing."""
    with extra("lm"):
        import safetensors.numpy
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    # Readers of other frameworks ask for the metadata to know how the tensors are laid out.
    data = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).write_bytes(data)
