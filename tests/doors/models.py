"""Tiny models on disk as checkpoints are published, and what plain decoding makes of them."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from formats.checkpoints import NUM_TOKEN_IDS, copy, edit_json, other_tokenizer
from models.weights import random_weights
from passes import run as run_pass
from upper_floor import loading

from jax_specdec import lm

TEMPLATES = Path(__file__).parents[1] / "text/chat_templates"
CHAT = {"llama": "llama3.1", "qwen2": "qwen2.5", "qwen3": "qwen3", "gemma3": "gemma3"}
CHAT |= {"gemma4": "gemma3"}  # its own has no place among the templates yet
"""By model, the template of the published models of its kind."""
FIXTURES = {"gemma4": "../gemma4/edge", "gemma": "../gemma4/edge_assistant"}
"""By model, where it is recorded, if not beside the others."""
SURENESS = {"gemma4": 8}
"""By model, how large its logits are made; 32 times for most. Soft caps make large ones equal."""
NUM_SURE = 12
"""Tokens that are compared, at most."""
LEAST_GAP = {"float32": 1e-3, "bfloat16": 0.06}
"""Of the two largest logits, relative to the largest: sums of other order change no token."""


def write(name: str, dtype: str, directory: Path) -> Path:
    """Writes a checkpoint with weights in a dtype and a chat template; returns where.

    The token with the next id follows, or the same one where the output matrix is the embedding,
    most of the time: random weights decide by margins that are no wider than bfloat16 rounds.
    """
    copy(FIXTURES.get(name, name), directory)
    edit_json(directory / "config.json", dtype=dtype)
    files = {path: safetensors.numpy.load_file(path) for path in directory.glob("*.safetensors")}
    key = "model.embed_tokens.weight"
    (embedding,) = [x[key].astype(np.float32) for x in files.values() if key in x]
    embedding *= SURENESS.get(name, 32)
    # The rows after those of tokens are padding.
    following = np.roll(embedding[:NUM_TOKEN_IDS], 1, axis=0)
    head = np.concatenate([following, embedding[NUM_TOKEN_IDS:]])
    changed = {key: embedding, "lm_head.weight": head}
    for path, tensors in files.items():
        tensors |= {key: x for key, x in changed.items() if key in tensors}
        stored = {key: x.astype(jax.numpy.dtype(dtype)) for key, x in tensors.items()}
        safetensors.numpy.save_file(stored, path, metadata={"format": "pt"})
    if name in CHAT:
        shutil.copy(TEMPLATES / f"{CHAT[name]}.jinja", directory / "chat_template.jinja")
    return directory


def write_draft(drafter: str, target: Path, dtype: str, directory: Path) -> str:
    """Writes what drafts for a target; returns how `--draft` names it."""
    if drafter in ("draft", "other"):
        write("qwen2_draft", dtype, directory)
        if drafter == "other":
            other_tokenizer(directory)
        return str(directory)
    if drafter == "gemma":
        return f"{drafter}:{copy(FIXTURES[drafter], directory)}"
    loaded = lm.load_huggingface(target)
    config = loaded.model.config
    first = config.layers[0]
    plain = lm.models.LayerSpec(
        num_attention_heads=first.num_attention_heads,
        num_key_value_heads=first.num_key_value_heads,
        head_dim=first.head_dim,
        intermediate_size=first.intermediate_size,
        qk_norm=first.qk_norm,
    )
    how: dict[str, Any] = dict(layers=(plain,), aux_hidden_state_layers=(0, 1, 2))
    if drafter == "eagle3":
        own: Any = lm.models.Eagle3Config.of_target(config, **how)
        head: Any = lm.models.Eagle3Head(own, loaded.model.dtype)
        save: Any = lm.formats.save_eagle3
    else:
        how |= dict(block_size=8, mask_token_id=config.vocab_size - 1)
        head = lm.BlockHead(lm.BlockHeadConfig.of_target(config, **how), loaded.model.dtype)
        save = lm.formats.save_block_head
    shared = {
        name: loaded.params[name] for name in ("embed_tokens", "lm_head") if name in loaded.params
    }
    shared = {"lm_head": shared["embed_tokens"]} | shared  # a tied one
    save(directory, head, random_weights(head, 0) | shared, dtype)
    return f"{drafter}:{directory}"


@functools.cache
def sure_text(target: Path | None, prompt: str, *, chat: bool = False) -> str:
    """Returns how plain greedy decoding goes on, up to the first token that is nearly tied.

    Each token is the argmax of a pass over the whole text so far.

    Args:
      target: the directory of a checkpoint; None for the target of the package.
      prompt: what goes on, or what a user says.
      chat: whether a user says it.
    """
    text = loading.read_target_text(target)
    ids = text.encode(prompt)
    if chat:
        assert text.tokenizer is not None
        ids = text.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    model, params = lm.load_embedded_pair()[0] if target is None else lm.load_huggingface(target)
    least = LEAST_GAP[model.dtype.name]
    stream = text.stream(ids)
    row, zero = np.zeros((1, 512), np.int32), np.zeros(1, np.int32)
    found = ""
    for position in range(len(ids), len(ids) + NUM_SURE):
        row[0, : len(ids)] = ids
        output = _apply(model, params, row, zero, model.init_cache(1, 512))
        logits = np.asarray(output.logits, np.float32)[0, position - 1]
        second, first = np.sort(logits)[-2:]
        token = int(logits.argmax())
        if first - second < least * first or token in text.stop_token_ids:
            break
        ids.append(token)
        found += stream.decode([token])
    return found


_apply = jax.jit(run_pass, static_argnums=0)
