"""Reading and writing EAGLE-3 heads: three layouts, every option, and what is refused."""

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
from models.test_eagle3 import CONFIG, NARROW, OPTIONS, random_params
from models.weights import random_weights

from jax_specdec import lm

from .checkpoints import edit_json, edit_tensors
from .test_hostile_files import sentence

pytestmark = pytest.mark.newest

FILE, WEIGHTS = "config.json", "model.safetensors"
Written = tuple[Path, lm.formats.LoadedModel, lm.formats.LoadedModel]
"""A directory of a head, its target, and the head."""


def target_for(config: lm.models.Eagle3Config, num_layers: int = 8) -> lm.formats.LoadedModel:
    """A target that a head of this config fits; weights come with the head's."""
    layer = dataclasses.replace(
        config.layer,
        num_hidden_layers=num_layers,
        hidden_size=config.target_hidden_size,
        qkv_bias=False,
        qk_norm=False,
    )
    model = lm.models.Llama(layer)
    return lm.formats.LoadedModel(model, random_weights(model, 3))


def head_for(head: Any, target: lm.formats.LoadedModel) -> lm.formats.LoadedModel:
    """The head, of which what is the target's has the target's weights."""
    config, mine, theirs = head.config, random_params(head), target.params
    if not config.own_embedding:
        mine["embed_tokens"] = theirs["embed_tokens"]
    if not config.own_lm_head:
        is_tied = config.layer.tie_word_embeddings
        mine["lm_head"] = theirs["embed_tokens" if is_tied else "lm_head"]
    if "target_ids" in mine:
        mine["target_ids"] = jnp.array([0, 3, 4, 9, 11, 12, 20, 21, 30, 33, 38, 39], jnp.int32)
    return lm.formats.LoadedModel(head, mine)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A directory in the layout of speculators, its target and its head; with a list of ids."""
    config = dataclasses.replace(CONFIG, **NARROW)
    target = target_for(config)
    head = head_for(lm.models.Eagle3Head(config), target)
    directory = tmp_path_factory.mktemp("head")
    lm.formats.save_eagle3(directory, *head)
    return directory, target, head


@pytest.fixture
def written(plain: Written, tmp_path: Path) -> Written:
    directory, target, head = plain
    return Path(shutil.copytree(directory, tmp_path / "head")), target, head


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


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


# What is written is read


@pytest.mark.parametrize("option", OPTIONS)
def test_what_was_written_is_read(option: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, **OPTIONS[option])
    target = target_for(config)
    head = head_for(lm.models.Eagle3Head(config), target)
    lm.formats.save_eagle3(tmp_path, *head, target_name="tiny")
    loaded = lm.load_eagle3(tmp_path, target)
    assert loaded.model == head.model
    assert_same(loaded.params, head.params)
    if not config.own_embedding:
        assert loaded.params["embed_tokens"] is target.params["embed_tokens"]
    if not config.own_lm_head:
        tied = config.layer.tie_word_embeddings
        name = "embed_tokens" if tied else "lm_head"
        assert loaded.params["lm_head"] is target.params[name]
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
    config = dataclasses.replace(CONFIG, **OPTIONS[option])
    target = target_for(config)
    head = head_for(lm.models.Eagle3Head(config), target)
    lm.formats.save_eagle3(tmp_path, *head, stored)
    params = jax.tree.map(lambda x: x.astype(computed), target.params)
    target = lm.formats.LoadedModel(lm.models.Llama(target.model.config, computed), params)
    loaded = lm.load_eagle3(tmp_path, target)
    assert loaded.model.config == config
    assert loaded.params["embed_tokens"] is params["embed_tokens"]
    edit_tensors(tmp_path / WEIGHTS, **{"embed_tokens.weight": np.ones((40, 16), np.float32)})
    own, params = lm.load_eagle3(tmp_path, target)
    assert own.config.own_embedding and (params["embed_tokens"] == 1).all()
    assert own.config.own_lm_head == config.own_lm_head


def test_weights_are_stored_as_asked_and_read_as_the_targets(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, **NARROW)
    target = target_for(config)
    head, params = head_for(lm.models.Eagle3Head(config), target)
    lm.formats.save_eagle3(tmp_path, head, params, jnp.bfloat16)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    assert tensors["fc.weight"].dtype == jnp.bfloat16
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    assert tensors["t2d"].nonzero()[0].tolist() == params["target_ids"].tolist()
    found = lm.load_eagle3(tmp_path, target).params["fc"]
    np.testing.assert_array_equal(found, params["fc"].astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("option", ["plain", "list of ids", "Qwen3", "biases", "norms of chunks"])
def test_the_layout_of_eagle_is_read(option: str, tmp_path: Path) -> None:
    config = dataclasses.replace(
        CONFIG, **{"feature_layers": (2, 4, 5), **OPTIONS[option]}
    )  # the default of 8 layers
    target = target_for(config)
    head = head_for(lm.models.Eagle3Head(config), target)
    lm.formats.save_eagle3(tmp_path, *head)
    as_eagle(tmp_path, norm_before_residual=..., fc_norm=..., attention_bias=...)
    loaded = lm.load_eagle3(tmp_path, target)
    assert loaded.model == head.model
    assert_same(loaded.params, head.params)


def test_norms_of_chunks_have_older_names(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, fc_norm=True)
    target = target_for(config)
    head = head_for(lm.models.Eagle3Head(config), target)
    lm.formats.save_eagle3(tmp_path, *head)
    tensors = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    for index, place in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{place}.weight"] = tensors.pop(f"fc_norm.{index}.weight")
    safetensors.numpy.save_file(tensors, tmp_path / WEIGHTS)
    assert_same(lm.load_eagle3(tmp_path, target).params, head.params)
    edit_json(tmp_path / FILE, fc_norm=False)
    with pytest.raises(ValueError, match="does not call for"):
        lm.load_eagle3(tmp_path, target)


def test_norm_output_of_specforge_is_fed_back_where_that_is_clear(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, fc_norm=True)
    target = target_for(config)
    lm.formats.save_eagle3(tmp_path, *head_for(lm.models.Eagle3Head(config), target))

    def found() -> bool:
        return lm.load_eagle3(tmp_path, target).model.config.norm_output

    edit_json(tmp_path / FILE, norm_output=True)
    assert found()
    as_eagle(tmp_path, norm_output=True)
    assert found()  # with norms of chunks, true is EAGLE 3.1's
    edit_json(tmp_path / FILE, norm_output=False, parallel_drafting=False)
    assert not found()
    edit_json(tmp_path / FILE, norm_output="yes")
    assert_refused(tmp_path, target, "norm_output must be true or false")
    # Without, SpecForge's true may mean the norm before the output matrix.
    lm.formats.save_eagle3(tmp_path, *head_for(lm.models.Eagle3Head(CONFIG), target))
    as_eagle(tmp_path, norm_output=True)
    assert not found()


@pytest.mark.parametrize(
    "changes, layers",
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, (1, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [8, 1, 4]}, (1, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": ..., "target_layer_ids": [1, 3, 7]}, (2, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": ...}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": []}, (2, 4, 5)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            },
            (1, 2, 3),
        ),
        ({"target_layer_ids": [0, 1, 3]}, (1, 2, 4)),  # the same as the other ids
    ],
)
def test_layer_ids_have_three_numberings(
    changes: dict[str, Any], layers: tuple[int, ...], written: Written
) -> None:
    directory, target, _ = written
    edit_json(directory / FILE, **changes)
    assert lm.load_eagle3(directory, target).model.feature_layers == layers


def test_the_layout_of_deepspec_is_read(written: Written) -> None:
    directory, target, head = written
    raw = json.loads((directory / FILE).read_text())
    (directory / FILE).write_text(
        json.dumps(
            {
                **raw["transformer_layer_config"],
                "architectures": ["Qwen3Eagle3Model"],
                "target_layer_ids": [0, 1, 3],
                "ttt_length": 7,
            }
        )
    )
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    for name in ("d2t", "t2d"):
        del tensors[name]
    rng = np.random.default_rng(0)
    tensors["embed_tokens.weight"] = rng.normal(size=(40, 16)).astype(np.float32)
    tensors["lm_head.weight"] = rng.normal(size=(40, 16)).astype(np.float32)
    safetensors.numpy.save_file(tensors, directory / WEIGHTS)
    model, params = lm.load_eagle3(directory, target)
    assert model.feature_layers == (1, 2, 4) and model.vocab_size == 40
    assert "target_ids" not in params
    np.testing.assert_array_equal(params["lm_head"].T, tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["embed_tokens"], tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(params["layer"]["o_proj"], head.params["layer"]["o_proj"])


def test_a_map_that_changes_nothing_is_read(tmp_path: Path) -> None:
    target = target_for(CONFIG)
    lm.formats.save_eagle3(tmp_path, *head_for(lm.models.Eagle3Head(CONFIG), target))
    edit_tensors(tmp_path / WEIGHTS, d2t=np.zeros(40, np.int64))
    assert "target_ids" not in lm.load_eagle3(tmp_path, target).params
    edit_tensors(tmp_path / WEIGHTS, d2t=np.array([1, -1] + [0] * 38, np.int64))
    with pytest.raises(ValueError, match="has a d2t that is not zero"):
        lm.load_eagle3(tmp_path, target)


# What is refused


def assert_refused(directory: Path, target: lm.formats.LoadedModel, says: str) -> None:
    with pytest.raises(Exception) as raised:
        lm.load_eagle3(directory, target)
    text = sentence(raised.value)
    assert re.search(says, text), text


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type = 'peagle', but only"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"draft_vocab_size": 41}, "draft_vocab_size must be at most"),
        ({"draft_vocab_size": 11}, r"has lm_head.weight of shape \(12, 16\)"),
        ({"target_hidden_size": 32}, "target_hidden_size = 32, but the target's hidden_size is 16"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"norm_before_fc": True}, "lacks the tensor input_norm.weight"),
        ({"fc_norm": True}, "lacks the tensor fc_norm.0.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "must not both be true"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]},
            r"must be different layer ids in \[0, 8\]",
        ),
        ({"eagle_aux_hidden_state_layer_ids": {"a": 1}}, "must be different layer ids in"),
        ({"target_layer_ids": [1, 2, 3]}, "= .1, 2, 3. and .*, which contradict each other"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"has fc.weight of shape \(16, 48\), but"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        ({"parallel_drafting": True}, "parallel_drafting = True, but only False is supported"),
    ],
)
def test_a_config_that_is_not_served_is_named(
    changes: dict[str, Any], says: str, written: Written
) -> None:
    directory, target, _ = written
    edit_json(directory / FILE, **changes)
    assert_refused(directory, target, says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, but it is 2: systems differ"),
        ({"vocab_size": 41}, "vocab_size = 41, but the target's vocab_size is 40"),
        (
            {"hidden_size": 32},
            r"fc.weight of shape \(16, 48\), but its config.json says \(32, 48\)",
        ),
        ({"model_type": "gpt2"}, "model_type = 'gpt2', but only"),
        ({"attention_bias": 1}, "attention_bias = 1, but it must be a boolean"),
        ({"attention_bias": True}, "lacks the tensor layers.0.self_attn.q_proj.bias"),
        ({"model_type": "qwen3"}, "lacks the tensor layers.0.self_attn.q_norm.weight"),
        ({"logit_scale": 0}, "logit_scale must be a positive number"),
    ],
)
def test_a_layer_that_is_not_served_is_named(
    changes: dict[str, Any], says: str, written: Written
) -> None:
    directory, target, _ = written
    layer = json.loads((directory / FILE).read_text())["transformer_layer_config"]
    edit_json(directory / FILE, transformer_layer_config={**layer, **changes})
    assert_refused(directory, target, says)


def test_whole_numbers_are_floats_however_large_they_are(written: Written) -> None:
    directory, target, _ = written
    layer = json.loads((directory / FILE).read_text())["transformer_layer_config"]
    large = {"logit_scale": 2**31, "rope_theta": 2**40, "rms_norm_eps": 2**31}
    edit_json(directory / FILE, transformer_layer_config={**layer, **large})
    head, params = lm.load_eagle3(directory, target)
    states, ids = jnp.ones((1, 1, 16)), jnp.zeros((1, 1), jnp.int32)
    rows = lm.models.Rows(ids, jnp.zeros(1, jnp.int32))
    logits, *_ = head.apply(params, states, rows, head.init_cache(1, 8))
    assert np.isfinite(logits).all() and head.config.logit_scale == 2**31


OFFSETS = np.array([0, 2, 2, 6, 7, 7, 14, 14, 22, 24, 28, 28], np.int64)  # of the ids above


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"mask_hidden": np.zeros((1, 1, 48), np.float32)}, "has a tensor mask_hidden, which its"),
        ({"midlayer.hidden_norm.weight": np.zeros(16, np.float32)}, "does not call for"),
        ({"fc.weight": ...}, "lacks the tensor fc.weight"),
        ({"fc.weight": np.zeros((16, 32), np.float32)}, r"fc.weight of shape \(16, 32\), but"),
        ({"fc.weight": np.full((16, 48), np.nan, np.float32)}, "fc.weight with a weight of nan"),
        ({"lm_head.weight": ...}, "own_lm_head must be true with draft_vocab_size = 12"),
        ({"d2t": ...}, "lacks the tensor d2t"),
        ({"d2t": OFFSETS[:-1].copy()}, r"d2t of dtype I64 and shape \(11,\)"),
        ({"d2t": OFFSETS.astype(np.float32)}, "d2t of dtype F32"),
        ({"d2t": OFFSETS + (np.arange(12) == 11)}, r"ids of d2t\[11\] must be an id in \[0, 40\)"),
        ({"d2t": OFFSETS - (np.arange(12) == 2)}, "ids of d2t must list each id once"),
        ({"d2t": np.full(12, 2**63 - 1, np.int64)}, r"ids of d2t\[0\] must"),
        ({"t2d": np.ones(40, np.bool_)}, "a t2d that is not the mask of the ids that d2t lists"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    changes: dict[str, Any], says: str, written: Written
) -> None:
    directory, target, _ = written
    edit_tensors(directory / WEIGHTS, **changes)
    assert_refused(directory, target, says)


def test_default_layers_that_coincide_are_named(written: Written) -> None:
    directory, _, _ = written
    edit_json(directory / FILE, eagle_aux_hidden_state_layer_ids=...)
    target = target_for(dataclasses.replace(CONFIG, **NARROW), num_layers=4)
    assert_refused(directory, target, r"feature_layers must be different layer ids .* \(1, 2, 2\)")


def test_a_file_of_torch_names_the_converter(written: Written) -> None:
    directory, target, _ = written
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    assert_refused(directory, target, r"tools/convert_eagle3\.py")
    (directory / "pytorch_model.bin").unlink()
    assert_refused(directory, target, "does not exist, nor does model.safetensors.index.json")


# Arguments


def test_arguments_of_other_kinds_are_named(written: Written, tmp_path: Path) -> None:
    directory, target, (head, params) = written
    load: Any = lm.load_eagle3
    save: Any = lm.formats.save_eagle3
    for name, call in (
        ("target", lambda: load(directory, target.model)),
        ("target", lambda: load(directory, lm.formats.LoadedModel(head, params))),
        ("directory", lambda: load(5, target)),
        ("directory", lambda: save(None, head, params)),
        ("model", lambda: save(tmp_path, target.model, params)),
        ("dtype", lambda: save(tmp_path, head, params, jnp.int8)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must"):
            call()


def test_weights_that_cannot_be_stored_are_named_nothing_is_written(
    plain: Written, tmp_path: Path
) -> None:
    _, _, (head, params) = plain
    directory = tmp_path / "new"
    without = {name: x for name, x in params.items() if name != "fc"}
    twice = jnp.zeros(12, jnp.int32)
    for changed, says in (
        (without, r"params\['fc'\] must"),
        ({**params, "norm": params["norm"] * jnp.inf}, "norm.weight with a weight of"),
        ({**params, "target_ids": twice}, r"params\['target_ids'\] must list each id once"),
        ({**params, "target_ids": twice + 40}, r"params\['target_ids'\]\[0\] must"),
    ):
        with pytest.raises(ValueError, match=says):
            lm.formats.save_eagle3(directory, head, changed)
    assert not directory.exists()
