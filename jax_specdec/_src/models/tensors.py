"""The tensors of a checkpoint, `[out, in]` under Hugging Face names, and the params of `Llama`.

Reading fuses and transposes to the layout of `param_shapes`, once, tensor by tensor: no more than
one fused matrix is in memory beside the params. Writing undoes it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from jax_specdec._src.models.config_json import existing, read_json
from jax_specdec._src.models.llama_config import LlamaConfig, param_shapes

__all__ = ["INDEX_FILE", "WEIGHTS_FILE", "open_tensors", "read_params", "unfuse"]

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes that are read, by their names in the file, and what holds them here."""


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The open files of a checkpoint.

    Attributes:
        origin: the file that names all tensors.
        files: which file holds a tensor, with its path.
    """

    origin: Path
    files: dict[str, tuple[Path, Any]]

    def read(self, name: str) -> np.ndarray:
        """One tensor, from disk."""
        return self.files[name][1].get_tensor(name)

    def dtype(self, name: str) -> str:
        """The dtype that holds a tensor here."""
        return _DTYPES[self.files[name][1].get_slice(name).get_dtype()]


@contextlib.contextmanager
def open_tensors(directory: Path, config: LlamaConfig) -> Iterator[Tensors]:
    """Opens the weights of a checkpoint, one file or shards, and checks them against the config.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be parsed, or a tensor is missing, unknown, or of another shape or
            kind than the config says.
    """
    with contextlib.ExitStack() as stack:
        tensors = _open(directory, stack)
        _check(tensors, config)
        yield tensors


def _open(directory: Path, stack: contextlib.ExitStack) -> Tensors:
    origin = directory / WEIGHTS_FILE
    if origin.is_file():
        file = _open_file(origin, stack)
        return Tensors(origin, {name: (origin, file) for name in file.keys()})
    if not (directory / INDEX_FILE).is_file():
        raise FileNotFoundError(
            f"{origin} does not exist, nor does {INDEX_FILE}; a checkpoint directory must hold "
            "one of them."
        )
    origin = directory / INDEX_FILE
    shard_of = read_json(origin).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(x, str) for x in shard_of.values()):
        raise ValueError(f"{origin} lacks a weight_map from names of tensors to names of files.")
    shards = {}
    for shard in sorted(set(shard_of.values())):
        path = directory / shard
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist, but {INDEX_FILE} lists it.")
        shards[shard] = (path, _open_file(path, stack))
    held = {shard: set(file.keys()) for shard, (_, file) in shards.items()}
    for name, shard in shard_of.items():
        if name not in held[shard]:
            raise ValueError(
                f"{directory / shard} lacks the tensor {name}, which {INDEX_FILE} says it holds."
            )
    return Tensors(origin, {name: shards[shard] for name, shard in shard_of.items()})


def _open_file(path: Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safetensors.safe_open(existing(path), framework="np"))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error


def _check(tensors: Tensors, config: LlamaConfig) -> None:
    expected = _tensor_shapes(config)
    for name, shape in expected.items():
        if name not in tensors.files:
            raise ValueError(f"{tensors.origin} lacks the tensor {name}.")
        path, file = tensors.files[name]
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{path} has {name} of shape {tuple(stored.get_shape())}, "
                f"but its config.json says {shape}."
            )
        if stored.get_dtype() not in _DTYPES:
            raise ValueError(
                f"{path} has {name} of dtype {stored.get_dtype()}, but only {', '.join(_DTYPES)} "
                "are supported."
            )
    for name, (path, _) in tensors.files.items():
        # Writers store what follows from the rest: tables of angles, an output matrix that is tied.
        derived = name.endswith(".rotary_emb.inv_freq") or name == "lm_head.weight"
        if name not in expected and not derived:
            raise ValueError(
                f"{path} has a tensor {name}, which its config.json does not call for."
            )


def read_params(tensors: Tensors, config: LlamaConfig, dtype: Any, vocab_size: int) -> Any:
    """The params of `Llama`.

    Args:
        tensors: from `open_tensors`.
        config: of the whole checkpoint.
        dtype: of the params.
        vocab_size: ids from this on are left out.

    Returns:
        The pytree of `param_shapes`, with `vocab_size` ids.
    """

    def read(name: str, size: int | None = None) -> jax.Array:
        return jax.device_put(tensors.read(name)[:size]).astype(dtype)

    def fused(*names: str) -> jax.Array:
        # Converted and transposed by XLA, which is much quicker at both than NumPy.
        return jnp.concatenate([read(name) for name in names]).T

    params = {
        "embed_tokens": read("model.embed_tokens.weight", vocab_size),
        "layers": [
            {name: fused(*parts) for name, parts in _layer_tensors(config, index).items()}
            for index in range(config.num_hidden_layers)
        ],
        "norm": fused("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = read("lm_head.weight", vocab_size).T
    return params


def unfuse(config: LlamaConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, `[out, in]`, by name."""
    tensors = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"],
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = params["lm_head"].T
    query = config.num_attention_heads * config.head_dim
    heads = [query, query + config.num_key_value_heads * config.head_dim]
    splits = {"qkv_proj": heads, "qkv_bias": heads, "gate_up_proj": [config.intermediate_size]}
    for index, layer in enumerate(params["layers"]):
        for name, parts in _layer_tensors(config, index).items():
            pieces = np.split(np.asarray(layer[name]), splits.get(name, []), axis=-1)
            for part, piece in zip(parts, pieces, strict=True):
                tensors[part] = piece.T if piece.ndim == 2 else piece
    return tensors


def _layer_tensors(config: LlamaConfig, index: int) -> dict[str, list[str]]:
    """Which tensors of a checkpoint make up each array of layer `index`, in order of fusion."""
    prefix = f"model.layers.{index}"
    names = {
        "input_layernorm": [f"{prefix}.input_layernorm.weight"],
        "qkv_proj": [f"{prefix}.self_attn.{x}_proj.weight" for x in "qkv"],
        "o_proj": [f"{prefix}.self_attn.o_proj.weight"],
        "post_attention_layernorm": [f"{prefix}.post_attention_layernorm.weight"],
        "gate_up_proj": [f"{prefix}.mlp.{x}_proj.weight" for x in ("gate", "up")],
        "down_proj": [f"{prefix}.mlp.down_proj.weight"],
    }
    if config.qkv_bias:
        names["qkv_bias"] = [f"{prefix}.self_attn.{x}_proj.bias" for x in "qkv"]
    if config.qk_norm:
        names |= {f"{x}_norm": [f"{prefix}.self_attn.{x}_norm.weight"] for x in "qk"}
    return names


def _tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and `[out, in]` shape of every tensor of a checkpoint."""
    abstract = jax.tree.map(  # stand-ins without data
        lambda shape: np.broadcast_to(np.zeros(()), shape),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return {name: tensor.shape for name, tensor in unfuse(config, abstract).items()}
