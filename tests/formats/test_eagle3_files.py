"""Reading and writing EAGLE-3 heads: three layouts and every option."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.test_eagle3 import NARROW, OPTIONS

from jax_specdec import lm

from .checkpoints import edit_json, edit_tensors
from .head_files import (
    FILE,
    WEIGHTS,
    as_eagle,
    assert_read,
    assert_refused,
    target_for,
    write_eagle3,
)

pytestmark = pytest.mark.newest

# What is written is read


@pytest.mark.parametrize("option", OPTIONS)
def test_what_was_written_is_read(option: str, tmp_path: Path) -> None:
    _, target, head = written = write_eagle3(tmp_path, **OPTIONS[option])
    params, config = assert_read(lm.load_head, written), head.model.config
    if not config.own_embedding:
        assert params["embed_tokens"] is target.params["embed_tokens"]
    if not config.own_lm_head:
        name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
        assert params["lm_head"] is target.params[name]
    stored = json.loads((tmp_path / FILE).read_text())
    assert stored["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    # The class of speculators has both, and takes neither from the target.
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    wanted, lm_head = head.params["embed_tokens"], head.params["lm_head"]
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], wanted)
    tied = head.model.config.output_is_embedding
    np.testing.assert_array_equal(tensors["lm_head.weight"], lm_head if tied else lm_head.T)


@pytest.mark.parametrize(
    "computed, stored",
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("option", ["plain", "tied output", "list of ids"])
def test_what_is_the_targets_is_shared_again_however_it_was_rounded(
    option: str, computed: str, stored: str, tmp_path: Path
) -> None:
    _, target, head = write_eagle3(tmp_path, **OPTIONS[option])
    lm.formats.save_eagle3(tmp_path, *head, stored)
    config = head.model.config
    params = jax.tree.map(lambda x: x.astype(computed), target.params)
    target = lm.formats.LoadedModel(lm.models.Llama(target.model.config, computed), params)
    loaded = lm.load_head(tmp_path, target)
    assert loaded.model.config == config
    assert loaded.params["embed_tokens"] is params["embed_tokens"]
    edit_tensors(tmp_path / WEIGHTS, **{"embed_tokens.weight": np.ones((40, 16), np.float32)})
    own, params = lm.load_head(tmp_path, target)
    assert own.config.own_embedding and (params["embed_tokens"] == 1).all()
    assert own.config.own_lm_head == config.own_lm_head


def test_weights_are_stored_as_asked_and_read_as_the_targets(tmp_path: Path) -> None:
    _, target, (head, params) = write_eagle3(tmp_path, **NARROW)
    lm.formats.save_eagle3(tmp_path, head, params, jnp.bfloat16)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    assert tensors["fc.weight"].dtype == jnp.bfloat16
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    assert tensors["t2d"].nonzero()[0].tolist() == params["target_ids"].tolist()
    found = lm.load_head(tmp_path, target).params["fc"]
    np.testing.assert_array_equal(found, params["fc"].astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_list_without_rows_has_the_targets(tied: bool, in_int8: bool, tmp_path: Path) -> None:
    _, target, head = write_eagle3(tmp_path, **NARROW, tie_word_embeddings=tied)
    edit_tensors(tmp_path / WEIGHTS, **{"lm_head.weight": ...})
    if in_int8:
        target = target._replace(params=lm.models.quantize(target.params))
    model, params = lm.load_head(tmp_path, target)
    assert model == head.model
    rows = target.params["lm_head" if in_int8 or not tied else "embed_tokens"]
    rows = rows.dequantized() if in_int8 else rows.T if tied else rows
    found = params["lm_head"].dequantized() if in_int8 else params["lm_head"]
    np.testing.assert_array_equal(found, rows[:, params["target_ids"]])


def test_rows_of_another_width_are_not_the_targets(tmp_path: Path) -> None:
    _, target, _ = write_eagle3(tmp_path, **OPTIONS["all together"])
    edit_tensors(tmp_path / WEIGHTS, **{"lm_head.weight": ...})
    must = "own_lm_head must be true with draft_vocab_size = 12"
    assert_refused(lm.load_head, tmp_path, target, must)


@pytest.mark.parametrize(
    "option",
    ["plain", "list of ids", "Qwen3", "biases", "norm before fc", "norms of chunks"],
)
def test_the_layout_of_eagle_is_read(option: str, tmp_path: Path) -> None:
    default = {"aux_hidden_state_layers": (2, 4, 5)}  # of 8 layers
    written = write_eagle3(tmp_path, **default | OPTIONS[option])
    as_eagle(tmp_path, norm_before_residual=..., fc_norm=..., attention_bias=...)
    assert_read(lm.load_head, written)


def test_norms_of_chunks_have_older_names(tmp_path: Path) -> None:
    written = write_eagle3(tmp_path, fc_norm=True)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    for index, place in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{index}.weight")
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    assert_read(lm.load_head, written)
    edit_json(tmp_path / FILE, fc_norm=False)
    assert_refused(lm.load_head, tmp_path, written[1], "does not call for")


def test_norm_output_of_specforge_is_fed_back_where_that_is_clear(tmp_path: Path) -> None:
    _, target, _ = write_eagle3(tmp_path, fc_norm=True)

    def found() -> bool:
        return lm.load_head(tmp_path, target).model.config.norm_output

    edit_json(tmp_path / FILE, norm_output=True)
    assert found()
    as_eagle(tmp_path, norm_output=True)
    assert found()  # with norms of chunks, true is EAGLE 3.1's
    edit_json(tmp_path / FILE, norm_output=False, parallel_drafting=False)
    assert not found()
    edit_json(tmp_path / FILE, norm_output="yes")
    assert_refused(lm.load_head, tmp_path, target, "norm_output must be true or false")
    # Without, SpecForge's true may mean the norm before the output matrix.
    write_eagle3(tmp_path)
    as_eagle(tmp_path, norm_output=True)
    assert not found()


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "changes, layers",
    [
        ({IDS: [1, 4, 8]}, (1, 4, 8)),
        ({IDS: [8, 1, 4]}, (1, 4, 8)),
        ({IDS: ..., "target_layer_ids": [1, 3, 7]}, (2, 4, 8)),
        ({IDS: ...}, (2, 4, 5)),
        ({IDS: []}, (2, 4, 5)),
        ({IDS: None, "eagle_config": {IDS: [0, 1, 2]}}, (1, 2, 3)),
        ({"target_layer_ids": [0, 1, 3]}, (1, 2, 4)),  # the same as the other ids
    ],
)
def test_layer_ids_have_three_numberings(
    changes: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    directory, target, _ = write_eagle3(tmp_path)
    edit_json(directory / FILE, **changes)
    assert lm.load_head(directory, target).model.aux_hidden_state_layers == layers


def test_the_layout_of_deepspec_is_read(tmp_path: Path) -> None:
    directory, target, head = write_eagle3(tmp_path, **NARROW)
    raw = json.loads((directory / FILE).read_text())["transformer_layer_config"]
    (directory / FILE).write_text(json.dumps(raw))
    own = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 3], "ttt_length": 7}
    edit_json(directory / FILE, **own)
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    for name in ("d2t", "t2d"):
        del tensors[name]
    rng = np.random.default_rng(0)
    tensors["embed_tokens.weight"] = rng.normal(size=(40, 16)).astype(np.float32)
    tensors["lm_head.weight"] = rng.normal(size=(40, 16)).astype(np.float32)
    safetensors.numpy.save_file(tensors, directory / WEIGHTS)
    model, params = lm.load_head(directory, target)
    assert model.aux_hidden_state_layers == (1, 2, 4) and model.vocab_size == 40
    assert "target_ids" not in params
    np.testing.assert_array_equal(params["lm_head"].T, tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["embed_tokens"], tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(params["layer"]["o_proj"], head.params["layer"]["o_proj"])


def test_a_map_that_changes_nothing_is_read(tmp_path: Path) -> None:
    _, target, _ = write_eagle3(tmp_path)
    edit_tensors(tmp_path / WEIGHTS, d2t=np.zeros(40, np.int64))
    assert "target_ids" not in lm.load_head(tmp_path, target).params
    edit_tensors(tmp_path / WEIGHTS, d2t=np.array([1, -1] + [0] * 38, np.int64))
    assert_refused(lm.load_head, tmp_path, target, "has a d2t that is not zero")


@pytest.mark.long
def test_whole_numbers_are_floats_however_large_they_are(tmp_path: Path) -> None:
    directory, target, _ = write_eagle3(tmp_path)
    layer = json.loads((directory / FILE).read_text())["transformer_layer_config"]
    large = {"logit_scale": 2**31, "rope_theta": 2**40, "rms_norm_eps": 2**31}
    edit_json(directory / FILE, transformer_layer_config={**layer, **large})
    head, params = lm.load_head(directory, target)
    states, ids = jnp.ones((1, 1, 16)), jnp.zeros((1, 1), jnp.int32)
    rows = lm.models.Rows(ids, jnp.zeros(1, jnp.int32))
    logits, *_ = head.apply(params, states, rows, head.init_cache(1, 8))
    assert np.isfinite(logits).all() and head.config.logit_scale == 2**31


def test_default_layers_that_coincide_are_named(tmp_path: Path) -> None:
    _, _, (head, _) = write_eagle3(tmp_path)
    edit_json(tmp_path / FILE, **{IDS: ...})
    says = r"aux_hidden_state_layers must be different layer ids .* \(1, 2, 2\)"
    assert_refused(lm.load_head, tmp_path, target_for(head.config, num_layers=4), says)
