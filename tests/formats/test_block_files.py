"""Reading and writing heads that draft a block: three layouts, every option, what is refused."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.test_block import CONFIG, DSPARK, NARROW, OPTIONS

from jax_specdec import lm

from .checkpoints import edit_json, edit_tensors
from .test_eagle3_files import assert_same, head_for, target_for
from .test_hostile_files import sentence

pytestmark = pytest.mark.newest

FILE, WEIGHTS = "config.json", "model.safetensors"
Written = tuple[Path, lm.formats.LoadedModel, lm.formats.LoadedModel]
"""A directory of a head, its target, and the head."""


def write(directory: Path, **changes: Any) -> Written:
    config = dataclasses.replace(CONFIG, **changes)
    target = target_for(config)
    head = head_for(lm.BlockHead(config), target)
    lm.formats.save_block_head(directory, *head)
    return directory, target, head


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


def assert_read(written: Written) -> None:
    directory, target, head = written
    loaded = lm.load_block_head(directory, target)
    assert loaded.model == head.model
    assert_same(loaded.params, head.params)


# What is read


@pytest.mark.parametrize("option", OPTIONS)
def test_what_was_written_is_read(option: str, tmp_path: Path) -> None:
    written = directory, target, head = write(tmp_path, **OPTIONS[option])
    assert_read(written)
    stored = safetensors.numpy.load_file(directory / WEIGHTS)
    config = head.model.config
    if not config.own_embedding:  # shared, and not stored
        loaded = lm.load_block_head(directory, target).params
        assert loaded["embed_tokens"] is target.params["embed_tokens"]
        assert "embed_tokens.weight" not in stored
    assert ("lm_head.weight" in stored) == config.own_lm_head


WINDOW = {"sliding_window": 3, "sliding_layers": (0, 1)}
SWA = {"use_swa": True, "swa_window_size": 3, "mask_token_id": 39}


@pytest.mark.parametrize(
    "fields, changes",
    [
        ({}, {}),
        ({"feature_layers": (0, 8)}, {}),  # the embedding's output, and what leaves the last layer
        ({"layer": dataclasses.replace(CONFIG.layer, tie_word_embeddings=True)}, {}),
        (
            {**WINDOW, "sliding_window_non_causal": True, "feature_layers": (2, 6)},
            {"dflash_config": SWA | {"target_layer_ids": [1, 5]}},
        ),
        (  # the window of z-lab's switch counts, not that of the layers
            {**WINDOW, "sliding_window_non_causal": True, "feature_layers": (2, 6)},
            {"dflash_config": SWA | {"target_layer_ids": [1, 5]}, "sliding_window": 9},
        ),
        (
            {"sliding_window": 3, "sliding_layers": (1,)},
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 3},
        ),
        ({}, {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 3}),
        (WINDOW, {"layer_types": ["sliding_attention"] * 2}),
        (
            {"sliding_window": 3, "sliding_layers": (1,)},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
        (
            {**WINDOW, "sliding_window_non_causal": True},
            {"layer_types": ["sliding_attention"] * 2, "is_causal": False},
        ),
    ],
)
def test_the_layout_of_zlab_is_read(fields: Any, changes: Any, tmp_path: Path) -> None:
    written = write(tmp_path, **fields)
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
    written = write(tmp_path, **fields)
    as_deepspec(written, prefix)
    assert_read(written)
    loaded = lm.load_block_head(tmp_path, written[1]).params
    for name in ("embed_tokens", "lm_head"):
        assert loaded[name] is written[1].params[name]


def test_defaults_are_those_of_each_layout(tmp_path: Path) -> None:
    _, target, _ = written = write(tmp_path / "dspark", **DSPARK | {"block_size": 8})
    edit_json(tmp_path / "dspark" / FILE, sample_from_anchor=..., block_size=..., markov_rank=3)
    edit_json(tmp_path / "dspark" / FILE, enable_confidence_head=..., markov_head_type=...)
    edit_json(tmp_path / "dspark" / FILE, confidence_head_with_markov=...)
    assert_read(written)
    written = write(tmp_path / "dflash", block_size=8)
    edit_json(tmp_path / "dflash" / FILE, sample_from_anchor=..., block_size=...)
    assert_read(written)
    # The switch decides, not the name.
    edit_json(tmp_path / "dflash" / FILE, sample_from_anchor=True)
    assert lm.load_block_head(tmp_path / "dflash", target).model.config.max_drafts == 8


@pytest.mark.parametrize("key", ["sample_from_anchor", "query_zero_predicts_next"])
def test_the_first_row_of_a_block_is_read_wherever_it_is_said(key: str, tmp_path: Path) -> None:
    directory, target, _ = write(tmp_path, feature_layers=(2, 6))
    own = {"mask_token_id": 39, "target_layer_ids": [1, 5]}
    as_zlab(directory, dflash_config=own)
    for changes in ({key: True}, {"dflash_config": own | {key: True}}):
        edit_json(directory / FILE, **{key: ..., **changes})
        assert lm.load_block_head(directory, target).model.config.sample_from_anchor
    edit_json(directory / FILE, sample_from_anchor=False)
    says = f"sample_from_anchor = False and .*{key} = True, which contradict each other"
    assert_refused(directory, target, says)


@pytest.mark.parametrize("ids", [..., None, []])
def test_layers_that_a_block_head_does_not_name_are_not_guessed(ids: Any, tmp_path: Path) -> None:
    directory, target, _ = write(tmp_path)
    own = {"mask_token_id": 39, "target_layer_ids": ids}
    as_zlab(directory, dflash_config={key: x for key, x in own.items() if x is not ...})
    assert_refused(directory, target, "config.json lacks .*target_layer_ids")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_weights_are_converted(stored: str, tmp_path: Path) -> None:
    _, target, (head, params) = write(tmp_path)
    lm.formats.save_block_head(tmp_path, head, params, stored)
    loaded = lm.load_block_head(tmp_path, target)
    np.testing.assert_array_equal(loaded.params["fc"], params["fc"].astype(stored))
    assert loaded.params["fc"].dtype == jnp.float32


# What is refused


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("head"), **NARROW, **DSPARK)


@pytest.fixture
def written(plain: Written, tmp_path: Path) -> Written:
    directory, target, head = plain
    return Path(shutil.copytree(directory, tmp_path / "head")), target, head


def assert_refused(directory: Path, target: lm.formats.LoadedModel, says: str) -> None:
    with pytest.raises(Exception) as raised:
        lm.load_block_head(directory, target)
    text = sentence(raised.value)
    assert re.search(says, text), text


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"speculators_model_type": "dflash2"}, "= 'dflash2', but only 'dflash' and 'dspark' are"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"markov_head_type": "gated"}, "markov_head_type = 'gated', but only 'vanilla' is"),
        ({"is_neox_style": False}, "is_neox_style = False, but only True is supported"),
        ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias = True, but only"),
        ({"attention_value_scale": 0.5}, "attention_value_scale = 0.5, but only 1.0"),
        ({"conv_kernel_size": 4}, "conv_kernel_size = 4, which is not supported"),
        ({"is_causal": True}, "is_causal = True, but full attention over a block is not causal"),
        ({"block_size": 65}, r"block_size must be in \[1, 64\]"),
        ({"block_size": "8"}, "block_size must be a positive integer"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"mask_token_id": 40}, r"mask_token_id must be an id in \[0, 40\)"),
        ({"markov_rank": 4}, r"markov_head.markov_w1.weight of shape \(40, 3\), but"),
        ({"markov_rank": 0}, "confidence_head_with_markov must be false"),
        ({"markov_rank": "3"}, "markov_rank must be a positive integer or None"),
        ({"enable_confidence_head": False}, "confidence_head.proj.bias, which its"),
        ({"confidence_head_with_markov": False}, r"confidence_head.proj.weight of shape \(1, 19\)"),
        ({"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [4, 2, 1]}, r"must be ascending layer ids in \[0, 8\]"),
        (
            {"aux_hidden_state_layer_ids": []},
            "lacks aux_hidden_state_layer_ids or target_layer_ids",
        ),
        ({"aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight of shape \(16, 48\), but"),
        ({"target_hidden_size": 32}, "target_hidden_size = 32, but the target's hidden_size is 16"),
        ({"draft_vocab_size": 11}, r"has lm_head.weight of shape \(12, 16\)"),
    ],
)
def test_a_config_that_is_not_served_is_named(changes: Any, says: str, written: Written) -> None:
    directory, target, _ = written
    edit_json(directory / FILE, **changes)
    assert_refused(directory, target, says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types = .* one for each layer"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types = .* it must be a list of"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            "sliding_window = None, but sliding layers need a positive integer",
        ),
        (
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": "1"},
            "max_window_layers = '1', but it must be an integer from 0 on",
        ),
        ({"num_hidden_layers": 3}, "lacks the tensor layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"layers\.1\.[a-z._]*, which its config.json does not call for"),
        ({"vocab_size": 41}, "vocab_size = 41, but the target's vocab_size is 40"),
    ],
)
def test_a_layer_that_is_not_served_is_named(changes: Any, says: str, written: Written) -> None:
    directory, target, _ = written
    layer = json.loads((directory / FILE).read_text())["transformer_layer_config"]
    edit_json(directory / FILE, transformer_layer_config={**layer, **changes})
    assert_refused(directory, target, says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures = .*, but only"),
        ({"architectures": "DFlashDraftModel"}, "architectures = 'DFlashDraftModel', but only"),
        (
            {"num_target_layers": 36},
            "num_target_layers = 36, but the target's num_hidden_layers is 8",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 1, 3]}}, "lacks mask_token_id"),
        ({"dflash_config": 5}, "dflash_config = 5, which is not a JSON object"),
        (
            {"dflash_config": {"target_layer_ids": [1, 2, 8]}},
            r"target_layer_ids = \[1, 2, 8\], but it must be ascending layer ids in \[-1, 7\]",
        ),
        ({"block_size": None}, "lacks block_size"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "is_causal": True},
            "is_causal = True, but full attention over a block is not causal",
        ),
    ],
)
def test_a_config_of_zlab_that_is_not_served_is_named(
    changes: Any, says: str, tmp_path: Path
) -> None:
    directory, target, _ = write(tmp_path)
    as_zlab(directory, **changes)
    assert_refused(directory, target, says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}, "does not call for"),
        (
            {"markov_head.gate_proj.weight": np.zeros((3, 19), np.float32)},
            "gate_proj.weight, which",
        ),
        ({"hidden_norm.weight": ...}, "lacks the tensor hidden_norm.weight"),
        (
            {"markov_head.markov_w2.weight": np.zeros((40, 3), np.float32)},
            "markov_w2.weight of sha",
        ),
        ({"d2t": ...}, "lacks the tensor d2t"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changes: Any, says: str, written: Written) -> None:
    directory, target, _ = written
    edit_tensors(directory / WEIGHTS, **changes)
    assert_refused(directory, target, says)


def test_two_tensors_of_one_name_are_named(written: Written) -> None:
    directory, target, _ = written
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    edit_tensors(directory / WEIGHTS, **{"model.fc.weight": tensors["fc.weight"]})
    assert_refused(directory, target, "has both fc.weight and model.fc.weight")


def test_a_mask_of_its_own_is_named(written: Written) -> None:
    directory, target, _ = written
    (directory / "mask_embedding.pt").write_bytes(b"")
    assert_refused(directory, target, "has mask_embedding.pt, which is not read")


def test_arguments_of_other_kinds_are_named(written: Written, tmp_path: Path) -> None:
    directory, target, (head, params) = written
    load: Any = lm.load_block_head
    save: Any = lm.formats.save_block_head
    for name, call in (
        ("target", lambda: load(directory, target.model)),
        ("directory", lambda: load(5, target)),
        ("directory", lambda: save(None, head, params)),
        ("model", lambda: save(tmp_path, target.model, params)),
        ("dtype", lambda: save(tmp_path, head, params, jnp.int8)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must"):
            call()
    twice = params | {"target_ids": jax.numpy.zeros(12, jnp.int32)}
    with pytest.raises(ValueError, match=r"params\['target_ids'\] must list each id once"):
        save(tmp_path / "new", head, twice)
    assert not (tmp_path / "new").exists()
