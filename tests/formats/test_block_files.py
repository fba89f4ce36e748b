"""Reading and writing heads that draft a block: three layouts and every option."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.test_block import DSPARK, OPTIONS

from jax_specdec import lm

from . import head_files
from .checkpoints import edit_json
from .head_files import FILE, WEIGHTS, Written, as_zlab, assert_refused, write_block

pytestmark = pytest.mark.newest


def as_deepspec(written: Written, prefix: str = "", **changes: Any) -> None:
    """Rewrites a directory in the layout of DeepSpec, with copies of what is the target's."""
    directory, target, _ = written
    raw = json.loads((directory / FILE).read_text())
    layer = raw["transformer_layer_config"] | {"architectures": ["Qwen3DSparkModel"]}
    names = ("block_size", "mask_token_id", "markov_rank", "markov_head_type")
    names += ("enable_confidence_head", "confidence_head_with_markov")
    layer |= {name: raw[name] for name in names if name in raw}
    layer["target_layer_ids"] = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
    layer |= {"num_target_layers": 8, "num_anchors": 512}
    (directory / FILE).write_text(json.dumps(layer))
    edit_json(directory / FILE, **changes)
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    tensors["embed_tokens.weight"] = np.asarray(target.params["embed_tokens"])
    tensors = {f"{prefix}{name}": x for name, x in tensors.items()}
    tensors["lm_head.weight"] = np.ascontiguousarray(np.asarray(target.params["lm_head"]).T)
    safetensors.numpy.save_file(tensors, directory / WEIGHTS)


def assert_read(written: Written) -> Any:
    return head_files.assert_read(lm.load_head, written)


# What is read


@pytest.mark.parametrize("option", OPTIONS)
def test_what_was_written_is_read(option: str, tmp_path: Path) -> None:
    written = directory, target, head = write_block(tmp_path, **OPTIONS[option])
    params = assert_read(written)
    stored = safetensors.numpy.load_file(directory / WEIGHTS)
    config = head.model.config
    if not config.own_embedding:  # shared, and not stored
        assert params["embed_tokens"] is target.params["embed_tokens"]
        assert "embed_tokens.weight" not in stored
    assert ("lm_head.weight" in stored) == config.own_lm_head


WINDOW = {"window": 4}
SWA = {"use_swa": True, "swa_window_size": 3, "mask_token_id": 39}


@pytest.mark.parametrize(
    "fields, changes",
    [
        ({}, {}),
        (
            {"aux_hidden_state_layers": (0, 8)},
            {},
        ),  # the embedding's output, and what leaves the last layer
        ({"tie_word_embeddings": True}, {}),
        (
            {**WINDOW, "sliding_window_non_causal": True, "aux_hidden_state_layers": (2, 6)},
            {"dflash_config": SWA | {"target_layer_ids": [1, 5]}},
        ),
        (  # as ModelOpt writes it, with a list that says full of all layers
            {**WINDOW, "sliding_window_non_causal": True, "aux_hidden_state_layers": (2, 6)},
            {
                "dflash_config": SWA | {"target_layer_ids": [1, 5], "causal": False},
                "layer_types": ["full_attention"] * 2,
                "sliding_window": 3,
            },
        ),
        (  # the switch does not say it where another key does
            {**WINDOW, "aux_hidden_state_layers": (2, 6)},
            {"dflash_config": SWA | {"target_layer_ids": [1, 5], "is_causal": True}},
        ),
        (
            {"windows": (None, 4)},
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3},
        ),
        ({}, {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 3}),
        (WINDOW, {"layer_types": ["sliding_attention"] * 2}),
        (
            {"windows": (None, 4)},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
        (
            {**WINDOW, "sliding_window_non_causal": True},
            {"layer_types": ["sliding_attention"] * 2, "is_causal": False},
        ),
        # of layers that slide alone, of which there is none
        ({}, {"sliding_window_non_causal": True, "is_causal": False, "sliding_window": 9}),
    ],
)
def test_the_layout_of_zlab_is_read(fields: Any, changes: Any, tmp_path: Path) -> None:
    written = write_block(tmp_path, **fields)
    as_zlab(tmp_path, **changes)
    assert_read(written)


@pytest.mark.parametrize(
    "prefix, fields",
    [
        ("", DSPARK),
        ("model.", DSPARK),
        ("", {"sample_from_anchor": True}),  # trained by the same code, and called DFlash
    ],
)
def test_the_layout_of_deepspec_is_read(prefix: str, fields: Any, tmp_path: Path) -> None:
    written = write_block(tmp_path, **fields)
    as_deepspec(written, prefix)
    params = assert_read(written)
    for name in ("embed_tokens", "lm_head"):
        assert params[name] is written[1].params[name]


def test_the_layout_of_zlab_is_read_with_the_heads_of_dspark(tmp_path: Path) -> None:
    """Whose keys stand in its object: `shift_label` says it, or the type that needs it."""
    written = write_block(tmp_path, **DSPARK)
    raw = json.loads((tmp_path / FILE).read_text())
    as_zlab(tmp_path)
    own = json.loads((tmp_path / FILE).read_text())["dflash_config"]
    own |= {"projector_type": "dspark", "markov_head_type": "vanilla", "use_confidence_head": True}
    own |= {"markov_rank": raw["markov_rank"], "confidence_head_with_markov": True}
    for more in ({}, {"shift_label": True}, {"use_confidence_head": None}):  # tensors say it, too
        edit_json(tmp_path / FILE, dflash_config=own | more)
        assert_read(written)
    edit_json(tmp_path / FILE, dflash_config=own | {"shift_label": False})
    head = lm.load_head(tmp_path, written[1]).model
    assert not head.config.sample_from_anchor
    edit_json(tmp_path / FILE, dflash_config=own | {"use_confidence_head": False})
    says = "has a tensor confidence_head.proj.bias, which its"
    assert_refused(lm.load_head, tmp_path, written[1], says)


def test_defaults_are_those_of_each_layout(tmp_path: Path) -> None:
    _, target, _ = written = write_block(tmp_path / "dspark", **DSPARK | {"block_size": 8})
    edit_json(tmp_path / "dspark" / FILE, sample_from_anchor=..., block_size=..., markov_rank=3)
    edit_json(tmp_path / "dspark" / FILE, enable_confidence_head=..., markov_head_type=...)
    edit_json(tmp_path / "dspark" / FILE, confidence_head_with_markov=...)
    assert_read(written)
    written = write_block(tmp_path / "dflash", block_size=8)
    edit_json(tmp_path / "dflash" / FILE, sample_from_anchor=..., block_size=...)
    assert_read(written)
    # The switch decides, and what needs it, not the name.
    edit_json(tmp_path / "dflash" / FILE, sample_from_anchor=True)
    assert lm.load_head(tmp_path / "dflash", target).model.config.max_drafts == 8
    changes = {"sample_from_anchor": ..., "dflash_config": {"projector_type": "dspark"}}
    edit_json(tmp_path / "dflash" / FILE, **changes)
    assert lm.load_head(tmp_path / "dflash", target).model.config.max_drafts == 8


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next", "shift_label"])
def test_the_first_row_of_a_block_is_read_wherever_it_is_said(key: str, tmp_path: Path) -> None:
    directory, target, _ = write_block(tmp_path, aux_hidden_state_layers=(2, 6))
    own = {"mask_token_id": 39, "target_layer_ids": [1, 5]}
    as_zlab(directory, dflash_config=own)
    for changes in ({key: True}, {"dflash_config": own | {key: True}}):
        edit_json(directory / FILE, **{key: ..., **changes})
        assert lm.load_head(directory, target).model.config.sample_from_anchor
    edit_json(directory / FILE, sample_from_anchor=False)
    says = f"sample_from_anchor = False and .*{key} = True, which contradict each other"
    assert_refused(lm.load_head, directory, target, says)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_are_converted(stored: str, tmp_path: Path) -> None:
    _, target, (head, params) = write_block(tmp_path)
    lm.formats.save_block_head(tmp_path, head, params, stored)
    loaded = lm.load_head(tmp_path, target)
    np.testing.assert_array_equal(loaded.params["fc"], params["fc"].astype(stored))
    assert loaded.params["fc"].dtype == jnp.float32
