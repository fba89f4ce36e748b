"""Files of draft heads: written, read, and rewritten in the layouts of others."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models import test_block, test_eagle3
from models.weights import random_weights, with_fields

from jax_specdec import lm

from .checkpoints import edit_json
from .test_hostile_files import sentence

FILE, WEIGHTS = "config.json", "model.safetensors"
Written = tuple[Path, lm.formats.LoadedModel, lm.formats.LoadedModel]
"""A directory of a head, its target, and the head."""


def target_for(config: Any, num_layers: int = 8) -> lm.formats.LoadedModel:
    """A target that a head of this config fits; weights come with the head's."""
    layer = dataclasses.replace(
        config.layers[0], qkv_bias=False, o_bias=False, qk_norm=False, window=None
    )
    own = lm.models.DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.target_hidden_size,
        layers=(layer,) * num_layers,
        tie_word_embeddings=config.tie_word_embeddings,
        num_token_ids=config.num_token_ids,
    )
    model = lm.models.Llama(own)
    return lm.formats.LoadedModel(model, random_weights(model, 3))


def head_for(head: Any, target: lm.formats.LoadedModel) -> lm.formats.LoadedModel:
    """The head, of which what is the target's has the target's weights."""
    config, mine, theirs = head.config, test_eagle3.random_params(head), target.params
    if not config.own_embedding:
        mine["embed_tokens"] = theirs["embed_tokens"]
    if not config.own_lm_head:
        is_tied = config.tie_word_embeddings
        mine["lm_head"] = theirs["embed_tokens" if is_tied else "lm_head"]
    if "target_ids" in mine:
        mine["target_ids"] = jnp.array([0, 3, 4, 9, 11, 12, 20, 21, 30, 33, 38, 39], jnp.int32)
    return lm.formats.LoadedModel(head, mine)


def write_eagle3(directory: Path, **changes: Any) -> Written:
    config = with_fields(test_eagle3.CONFIG, **changes)
    target = target_for(config)
    head = head_for(lm.models.Eagle3Head(config), target)
    lm.formats.save_eagle3(directory, *head, target_name="tiny")
    return directory, target, head


def write_block(directory: Path, **changes: Any) -> Written:
    config = with_fields(test_block.CONFIG, **changes)
    target = target_for(config)
    head = head_for(lm.BlockHead(config), target)
    lm.formats.save_block_head(directory, *head)
    return directory, target, head


def as_eagle(directory: Path, **changes: Any) -> None:
    """Rewrites a directory in the layout of EAGLE."""
    raw = json.loads((directory / FILE).read_text())
    layer = raw["transformer_layer_config"]
    kept = {name: raw[name] for name in ("draft_vocab_size", "norm_before_residual", "fc_norm")}
    old = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    raw = {**layer, **kept, **old, **changes}
    (directory / FILE).write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    renamed = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    safetensors.numpy.save_file(renamed, directory / WEIGHTS)


def as_zlab(directory: Path, **changes: Any) -> None:
    """Rewrites a directory in the layout of z-lab."""
    raw = json.loads((directory / FILE).read_text())
    own = {
        "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
        "mask_token_id": raw["mask_token_id"],
    }
    layer = raw["transformer_layer_config"] | {"architectures": ["DFlashDraftModel"]}
    layer |= {"block_size": raw["block_size"], "num_target_layers": 8, "dflash_config": own}
    layer.pop("layer_types")
    (directory / FILE).write_text(json.dumps(layer))
    edit_json(directory / FILE, **changes)


def assert_read(load: Callable[..., lm.formats.LoadedModel], written: Written) -> Any:
    """Returns the weights that were read, which are those that were written."""
    directory, target, head = written
    loaded = load(directory, target)
    assert loaded.model == head.model
    assert loaded.params.keys() == head.params.keys()
    for (path, x), y in zip(
        jax.tree.leaves_with_path(loaded.params), jax.tree.leaves(head.params), strict=True
    ):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))
    return loaded.params


def assert_refused(load: Any, directory: Path, target: lm.formats.LoadedModel, says: str) -> None:
    with pytest.raises(Exception) as raised:
        load(directory, target)
    text = sentence(raised.value)
    assert re.search(says, text), text
