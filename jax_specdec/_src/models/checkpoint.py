"""Llama checkpoints on disk: a directory with `config.json` and `model.safetensors`.

File names, configuration keys, tensor names and the `[out, in]` layout of matrices are those of
Hugging Face Llama checkpoints. Reading fuses and transposes to the layout of
`llama.param_shapes`, once; writing undoes it.
"""

import dataclasses
import importlib.resources
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jax_specdec._src.models.llama import Llama, LlamaConfig, param_shapes

__all__ = ["LoadedModel", "load_checkpoint", "load_embedded_pair", "save_checkpoint"]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_UNSUPPORTED = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "rope_scaling": (None,),
    "model_type": ("llama", None),
}
"""Configuration keys that would change the computation, and the values that do not."""


class LoadedModel(NamedTuple):
    """A model with its weights.

    Attributes:
        model: the static model object, a `CausalModel`.
        params: its weights.

    Example:
        >>> target, draft = load_embedded_pair()
        >>> model, params = target
        >>> model.vocab_size
        256
    """

    model: Llama
    params: dict[str, Any]


def load_checkpoint(directory: str | Path, dtype: Any = jnp.float32) -> LoadedModel:
    """Reads a Llama checkpoint.

    Args:
        directory: holds `config.json` and `model.safetensors` (one file, not shards).
        dtype: compute dtype; weights are converted to it once, here.

    Returns:
        The model and its weights.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be parsed, asks for something that `Llama` does not compute, or
            lacks a tensor or holds one of another shape or kind than the config says.

    Example:
        >>> import jax, tempfile
        >>> model = Llama(LlamaConfig(
        ...     vocab_size=256, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1, head_dim=4))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint(directory, model, model.init_params(jax.random.key(0)))
        ...     load_checkpoint(directory).model == model
        True
    """
    directory = Path(directory)
    config = _read_config(_existing(directory / CONFIG_FILE))
    model = Llama(config, dtype)
    return LoadedModel(model, _read_params(_existing(directory / WEIGHTS_FILE), model))


def load_embedded_pair(dtype: Any = jnp.float32) -> tuple[LoadedModel, LoadedModel]:
    """The target and the draft model that ship with the package.

    Two byte-level models of Python source text (`bytes`), trained by `training/` of the project's
    repository on the standard library of Python.

    Args:
        dtype: compute dtype.

    Returns:
        The target and the draft model, each with its weights.

    Example:
        >>> target, draft = load_embedded_pair()
        >>> target.model.vocab_size, draft.model.vocab_size
        (256, 256)
    """
    weights = importlib.resources.files("jax_specdec") / "weights"
    with importlib.resources.as_file(weights) as directory:
        return load_checkpoint(directory / "target", dtype), load_checkpoint(
            directory / "draft", dtype
        )


def save_checkpoint(
    directory: str | Path, model: Llama, params: dict[str, Any], dtype: Any = jnp.float32
) -> None:
    """Writes a checkpoint that `load_checkpoint` and other readers of Llama checkpoints read.

    Args:
        directory: created if it does not exist; existing files are replaced.
        model: the model.
        params: its weights.
        dtype: dtype of the stored tensors.

    Example:
        >>> import os, tempfile
        >>> _, draft = load_embedded_pair()
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_checkpoint(directory, *draft, jnp.bfloat16)
        ...     sorted(os.listdir(directory))
        ['config.json', 'model.safetensors']
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": jnp.dtype(dtype).name,
        **dataclasses.asdict(model.config),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: np.ascontiguousarray(np.asarray(tensor).astype(jnp.dtype(dtype)))
        for name, tensor in _unfuse(model.config, params).items()
    }
    # Readers of other frameworks ask for the metadata to know how the tensors are laid out.
    data = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).write_bytes(data)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a checkpoint directory must hold it.")
    return path


def _read_config(path: Path) -> LlamaConfig:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    for key, allowed in _UNSUPPORTED.items():
        if raw.get(key) not in allowed:
            raise ValueError(
                f"{path} has {key} = {raw[key]!r}, but only {allowed[0]!r} is supported."
            )
    if isinstance(rope := raw.get("rope_parameters"), dict):  # how newer writers store it
        if rope.get("rope_type", "default") != "default":
            raise ValueError(
                f"{path} has rope_type = {rope['rope_type']!r}, but only 'default' is supported."
            )
        raw = {**raw, "rope_theta": rope.get("rope_theta", 10000.0)}
    heads = raw.get("num_attention_heads")
    if raw.get("num_key_value_heads") is None:
        raw = {**raw, "num_key_value_heads": heads}
    if raw.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        raw = {**raw, "head_dim": raw.get("hidden_size", 0) // heads}
    values = {}
    for field in dataclasses.fields(LlamaConfig):
        if field.name in raw:
            values[field.name] = raw[field.name]
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{path} lacks {field.name}.")
    try:
        return LlamaConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_params(path: Path, model: Llama) -> dict[str, Any]:
    try:
        tensors = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error
    for name, shape in _tensor_shapes(model.config).items():
        if name not in tensors:
            raise ValueError(f"{path} lacks the tensor {name}.")
        if tensors[name].shape != shape:
            raise ValueError(
                f"{path} has {name} of shape {tensors[name].shape}, "
                f"but its config.json says {shape}."
            )
        if not jnp.issubdtype(tensors[name].dtype, jnp.floating):
            raise ValueError(
                f"{path} has {name} of dtype {tensors[name].dtype}, which is not floating."
            )

    def read(name: str) -> np.ndarray:
        return tensors[name].T if tensors[name].ndim == 2 else tensors[name]

    def fused(*names: str) -> jax.Array:
        parts = [read(name) for name in names]
        return jnp.asarray(np.concatenate(parts, axis=-1), model.dtype)

    params = {
        "embed_tokens": jnp.asarray(tensors["model.embed_tokens.weight"], model.dtype),
        "layers": [
            {name: fused(*parts) for name, parts in _layer_tensors(index).items()}
            for index in range(model.config.num_hidden_layers)
        ],
        "norm": fused("model.norm.weight"),
    }
    if not model.config.tie_word_embeddings:
        params["lm_head"] = fused("lm_head.weight")
    return params


def _layer_tensors(index: int) -> dict[str, list[str]]:
    """Which tensors of a checkpoint make up each array of layer `index`, in order of fusion."""
    prefix = f"model.layers.{index}"
    return {
        "input_layernorm": [f"{prefix}.input_layernorm.weight"],
        "qkv_proj": [f"{prefix}.self_attn.{x}_proj.weight" for x in "qkv"],
        "o_proj": [f"{prefix}.self_attn.o_proj.weight"],
        "post_attention_layernorm": [f"{prefix}.post_attention_layernorm.weight"],
        "gate_up_proj": [f"{prefix}.mlp.{x}_proj.weight" for x in ("gate", "up")],
        "down_proj": [f"{prefix}.mlp.down_proj.weight"],
    }


def _unfuse(config: LlamaConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, `[out, in]`, by name."""
    tensors = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"],
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = params["lm_head"].T
    query = config.num_attention_heads * config.head_dim
    splits = {
        "qkv_proj": [query, query + config.num_key_value_heads * config.head_dim],
        "gate_up_proj": [config.intermediate_size],
    }
    for index, layer in enumerate(params["layers"]):
        for name, parts in _layer_tensors(index).items():
            pieces = np.split(np.asarray(layer[name]), splits.get(name, []), axis=-1)
            for part, piece in zip(parts, pieces, strict=True):
                tensors[part] = piece.T if piece.ndim == 2 else piece
    return tensors


def _tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and `[out, in]` shape of every tensor of a checkpoint."""
    abstract = jax.tree.map(  # stand-ins without data
        lambda shape: np.broadcast_to(np.zeros(()), shape),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return {name: tensor.shape for name, tensor in _unfuse(config, abstract).items()}
