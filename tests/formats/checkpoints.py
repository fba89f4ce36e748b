"""The tiny checkpoints of `huggingface/make.py`, and copies of them with something changed."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from passes import run as run_pass

CHECKPOINTS = Path(__file__).parent / "huggingface"
NAMES = ("llama", "qwen2", "qwen2_draft", "qwen3", "gemma2", "gemma3")
NUM_TOKEN_IDS = 283  # of the tokenizer that all of them share
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def expected(name: str) -> dict[str, Any]:
    """What `transformers` computed."""
    with np.load(CHECKPOINTS / name / "expected.npz") as arrays:
        return {key: arrays[key] for key in arrays}


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Any, params: Any, token_ids: jax.Array) -> jax.Array:
    """Logits ``[S, V]`` of one sequence of ids ``[S]`` from position 0."""
    cache, start = model.init_cache(1, len(token_ids)), jnp.zeros(1, jnp.int32)
    return run_pass(model, params, token_ids[None], start, cache).logits[0]


def copy(name: str, directory: Path) -> Path:
    shutil.copytree(CHECKPOINTS / name, directory)
    for path in directory.iterdir():
        path.chmod(0o644)
    return directory


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of the object in a file; removes those set to `...`."""
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def edit_tensors(path: Path, **changes: Any) -> None:
    """Sets tensors of a file; removes those set to `...`."""
    tensors = {**safetensors.numpy.load_file(path), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not ...}
    safetensors.numpy.save_file(kept, path, metadata={"format": "pt"})


def cut_vocabulary(directory: Path, vocab_size: int) -> Path:
    """Leaves out the ids from `vocab_size` on; for a checkpoint of one file and tied embeddings."""
    edit_json(directory / "config.json", vocab_size=vocab_size)
    path, name = directory / "model.safetensors", "model.embed_tokens.weight"
    table = safetensors.numpy.load_file(path)[name][:vocab_size]
    edit_tensors(path, **{name: np.ascontiguousarray(table)})
    return directory


def other_tokenizer(directory: Path) -> Path:
    """Gives the ids of a checkpoint's tokenizer another order, without tokens of four merges."""
    path = directory / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    model = raw["model"]
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    left_out = ["".join(pair) for pair in model["merges"][-4:]]
    kept = [name for name in names[::-1] if name not in left_out]
    model["vocab"] = {name: i for i, name in enumerate(kept)}
    model["merges"] = model["merges"][:-4]
    # As the library gives them: after those of the vocabulary.
    added = [token | {"id": i} for i, token in enumerate(raw["added_tokens"], len(kept))]
    edit_json(path, model=model, added_tokens=added)
    return directory
