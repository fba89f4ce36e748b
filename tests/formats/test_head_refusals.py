"""What no reader of heads takes, by name: keys of the config, of its layers, and tensors."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.test_block import DSPARK, NARROW

from jax_specdec import lm

from .checkpoints import edit_json, edit_tensors
from .head_files import (
    FILE,
    WEIGHTS,
    Written,
    as_eagle,
    as_zlab,
    assert_refused,
    write_block,
    write_eagle3,
)

pytestmark = pytest.mark.newest

KINDS = {"eagle3": lm.models.Eagle3Head, "dspark": lm.BlockHead, "zlab": lm.BlockHead}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """A directory of each kind, its target and its head; both of speculators with a list of ids."""
    make = functools.partial(tmp_path_factory.mktemp, numbered=False)
    zlab = write_block(make("zlab"))
    as_zlab(zlab[0])
    dspark = write_block(make("dspark"), **NARROW, **DSPARK)
    return {"eagle3": write_eagle3(make("eagle3"), **NARROW), "dspark": dspark, "zlab": zlab}


def copied(site: dict[str, Written], kind: str, tmp_path: Path) -> Written:
    directory, target, head = site[kind]
    return Path(shutil.copytree(directory, tmp_path / "head")), target, head


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_another_kind_is_told_what_reads_it(site: dict[str, Written], kind: str) -> None:
    directory, target, head = site[kind]
    assert lm.load_head(directory, target, KINDS[kind]).model == head.model
    is_eagle3 = kind == "eagle3"
    own, prefix = ("Eagle3Head", "eagle3") if is_eagle3 else ("BlockHead", "block")
    other = lm.BlockHead if is_eagle3 else lm.models.Eagle3Head
    says = rf"; load_head with {own} and --draft {prefix}:DIR read it\."
    assert_refused(lambda *given: lm.load_head(*given, other), directory, target, says)
    says = rf", which load_head and --draft {prefix}:DIR read\."
    assert_refused(lambda path, _: lm.load_huggingface(path), directory, target, says)


def test_a_file_that_does_not_say_its_kind_is_of_an_eagle3_head_or_of_what_is_wanted(
    site: dict[str, Written], tmp_path: Path
) -> None:
    directory, target, _ = copied(site, "eagle3", tmp_path)
    as_eagle(directory, architectures=["LlamaForCausalLM"], draft_vocab_size=...)
    load: Any = lm.load_head
    says = r"lm_head.weight of shape \(12, 16\), but its config.json says \(40, 16\)"
    assert_refused(load, directory, target, says)
    says = "architectures = .*, but only 'DFlashDraftModel' and 'Qwen3DSparkModel' are"
    assert_refused(lambda *given: load(*given, lm.BlockHead), directory, target, says)
    says = "model_type = 'llama', but only 'gemma4_assistant' and"
    assistant = lm.models.GemmaAssistantHead
    assert_refused(lambda *given: load(*given, assistant), directory, target, says)
    for kind in ("eagle3", [lm.BlockHead], lm.Eagle3Drafter):
        with pytest.raises(TypeError, match="^kind must be Eagle3Head, BlockHead or "):
            load(directory, target, kind)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_whole_model_is_told_from_a_head(
    site: dict[str, Written], kind: str, tmp_path: Path
) -> None:
    target = site[kind][1]
    lm.formats.save_checkpoint(tmp_path, *target)
    says = "holds a whole model and no head, which load_huggingface and --draft DIR read"
    for wanted in (None, KINDS[kind], lm.models.GemmaAssistantHead):
        load = functools.partial(lm.load_head, kind=wanted)
        assert_refused(load, tmp_path, target, says)


OFFSETS = np.array([0, 2, 2, 6, 7, 7, 14, 14, 22, 24, 28, 28], np.int64)  # of the ids there
ONES, NAN = np.ones((16, 32), np.float32), np.full((16, 48), np.nan, np.float32)
EMBEDDING, INT8 = "embed_tokens.weight", np.ones((40, 16), np.int8)
LAYER_IDS, AUX_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
SLIDING = "sliding_attention"
SWA = {"use_swa": True, "swa_window_size": 3, "mask_token_id": 39, "target_layer_ids": [0, 1, 3]}
AGAINST = " and .*, which contradict each other"
# By kind and place. What readers share is refused for one kind.
REFUSED: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {
    ("eagle3", "config"): [
        ({"speculators_model_type": "peagle"}, "speculators_model_type = 'peagle', but only"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"draft_vocab_size": 41}, "draft_vocab_size must be at most"),
        ({"draft_vocab_size": 11}, r"has lm_head.weight of shape \(12, 16\)"),
        ({"target_hidden_size": 32}, "target_hidden_size = 32, but the target's hidden_size is 16"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"norm_before_fc": True}, "lacks the tensor input_norm.weight"),
        ({"fc_norm": True}, "lacks the tensor fc_norm.0.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "must not both be true"),
        ({LAYER_IDS: [1, 1, 2]}, r"must be different layer ids in \[0, 8\]"),
        ({LAYER_IDS: {"a": 1}}, "must be different layer ids in"),
        ({"target_layer_ids": [1, 2, 3]}, "= .1, 2, 3. and .*, which contradict each other"),
        ({LAYER_IDS: [1, 2]}, r"has fc.weight of shape \(16, 48\), but"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        ({"logit_scale": 2.0}, "logit_scale = 1.0 and .* = 2.0, which contradict each other"),
        ({"parallel_drafting": True}, "parallel_drafting = True, but only False is supported"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step = 2, but only 1 is"),
    ],
    ("eagle3", "layer"): [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, but it is 2: systems differ"),
        ({"vocab_size": 41}, "vocab_size = 41, but the target's vocab_size is 40"),
        ({"hidden_size": 32}, r"fc.weight of shape .16, 48., but its config.json says .32, 48."),
        ({"model_type": "gpt2"}, "model_type = 'gpt2', but only"),
        ({"attention_bias": 1}, "attention_bias = 1, but it must be a boolean"),
        ({"attention_bias": True}, "lacks the tensor layers.0.self_attn.q_proj.bias"),
        ({"model_type": "qwen3"}, "lacks the tensor layers.0.self_attn.q_norm.weight"),
        ({"logit_scale": 0}, "logit_scale must be a positive number"),
    ],
    ("eagle3", "tensors"): [
        ({"mask_hidden": ONES}, "has a tensor mask_hidden, which its"),
        ({"midlayer.hidden_norm.weight": ONES}, "does not call for"),
        ({"fc.weight": ...}, "lacks the tensor fc.weight"),
        ({"fc.weight": ONES}, r"fc.weight of shape \(16, 32\), but"),
        ({"fc.weight": NAN}, "fc.weight with a weight of nan"),
        ({EMBEDDING: INT8, f"{EMBEDDING}_scale": INT8[:, 0]}, f"{EMBEDDING} of dtype I8, but"),
        ({"d2t": ...}, "lacks the tensor d2t"),
        ({"d2t": OFFSETS[:-1].copy()}, r"d2t of dtype I64 and shape \(11,\)"),
        ({"d2t": OFFSETS.astype(np.float32)}, "d2t of dtype F32"),
        ({"d2t": OFFSETS + (np.arange(12) == 11)}, r"of d2t\[11\] must be an id in \[0, 40\)"),
        ({"d2t": OFFSETS - (np.arange(12) == 2)}, "ids of d2t must list each id once"),
        ({"d2t": np.full(12, 2**63 - 1, np.int64)}, r"ids of d2t\[0\] must"),
        ({"t2d": np.ones(40, np.bool_)}, "a t2d that is not the mask of the ids that d2t lists"),
    ],
    ("dspark", "config"): [
        ({"speculators_model_type": "dflash2"}, "= 'dflash2', but only 'dflash' and 'dspark' are"),
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
        ({"markov_rank": None}, r"of shape \(40, 3\), but its config.json says \(40, 256\)"),
        ({"markov_rank": 0}, "confidence_head_with_markov must be false"),
        ({"markov_rank": "3"}, "markov_rank must be a positive integer or None"),
        ({"enable_confidence_head": False}, "confidence_head.proj.bias, which its"),
        ({"confidence_head_with_markov": False}, r"confidence_head.proj.weight of shape \(1, 19\)"),
        ({AUX_IDS: None}, "lacks aux_hidden_state_layer_ids or target_layer_ids"),
        ({AUX_IDS: []}, "lacks aux_hidden_state_layer_ids or target_layer_ids"),
        ({AUX_IDS: [4, 2, 1]}, r"must be ascending layer ids in \[0, 8\]"),
    ],
    ("dspark", "layer"): [
        ({"layer_types": [SLIDING]}, "layer_types = .* one for each layer"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types = .* it must be a list of"),
        (
            {"layer_types": ["full_attention", SLIDING], "sliding_window": None},
            "lacks sliding_window or swa_window_size",
        ),
        (
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": "1"},
            "max_window_layers = '1', but it must be an integer from 0 on",
        ),
        ({"num_hidden_layers": 3}, "lacks the tensor layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"layers\.1\.[a-z._]*, which its config.json does not call for"),
    ],
    ("dspark", "tensors"): [
        ({"markov_head.gate_proj.weight": ONES}, "gate_proj.weight, which its config"),
        ({"hidden_norm.weight": ...}, "lacks the tensor hidden_norm.weight"),
        ({"markov_head.markov_w2.weight": ONES}, "markov_w2.weight of shape"),
    ],
    ("zlab", "config"): [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures = .*, but only"),
        ({"architectures": "DFlashDraftModel"}, "architectures = 'DFlashDraftModel', but only"),
        ({"num_target_layers": 36}, "= 36, but the target's num_hidden_layers is 8"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 3]}}, "lacks mask_token_id"),
        ({"dflash_config": 5}, "dflash_config = 5, which is not a JSON object"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type = 'domino', but only"),
        ({"dflash_config": {"attention_mode": "mla"}}, "attention_mode = 'mla', but only 'gqa'"),
        ({"final_logit_softcapping": 30.0}, "softcapping = 30.0, which is not supported"),
        ({"shift_label": "yes"}, "sample_from_anchor must be true or false"),
        (
            {"dflash_config": {"target_layer_ids": [1, 2, 8]}},
            r"target_layer_ids = \[1, 2, 8\], but it must be ascending layer ids in \[-1, 7\]",
        ),
        ({"block_size": None}, "lacks block_size"),
        (
            {"layer_types": ["full_attention", SLIDING], "is_causal": True},
            "is_causal = True, but full attention over a block is not causal",
        ),
        ({"is_causal": "no"}, "is_causal = 'no', but it must be a boolean"),
        ({"dflash_config": SWA | {"use_swa": "no"}}, "use_swa = 'no', but only False and True are"),
        ({"layer_types": [SLIDING] * 2}, "lacks sliding_window or swa_window_size"),
        (
            {"layer_types": [SLIDING] * 2, "sliding_window": 0},
            "sliding_window = 0, but it must be a positive integer",
        ),
        ({"dflash_config": SWA | {"causal": True}, "is_causal": False}, f"causal = True{AGAINST}"),
        (
            {"dflash_config": SWA | {"causal": False}, "sliding_window_non_causal": False},
            f"sliding_window_non_causal = False{AGAINST}",
        ),
        ({"dflash_config": SWA, "sliding_window": 9}, f"sliding_window = 9{AGAINST}"),
        ({"dflash_config": SWA | {"sliding_window": 9}}, f"sliding_window = 9{AGAINST}"),
        (
            {"dflash_config": SWA, "layer_types": ["full_attention", SLIDING]},
            "use_swa = True, by which all layers slide, but of the others some do not",
        ),
        *(
            ({"dflash_config": {"mask_token_id": 39} | ids}, "lacks .*target_layer_ids")
            for ids in ({}, {"target_layer_ids": None}, {"target_layer_ids": []})
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "place", "changes", "says"),
    [(*where, *one) for where, cases in REFUSED.items() for one in cases],
)
def test_what_is_not_served_is_named(
    kind: str, place: str, changes: Any, says: str, site: dict[str, Written], tmp_path: Path
) -> None:
    directory, target, _ = copied(site, kind, tmp_path)
    if place == "tensors":
        edit_tensors(directory / WEIGHTS, **changes)
    elif place == "layer":
        layer = json.loads((directory / FILE).read_text())["transformer_layer_config"]
        edit_json(directory / FILE, transformer_layer_config={**layer, **changes})
    else:
        edit_json(directory / FILE, **changes)
    assert_refused(lm.load_head, directory, target, says)


def test_two_tensors_of_one_name_are_named(site: dict[str, Written], tmp_path: Path) -> None:
    directory, target, _ = copied(site, "dspark", tmp_path)
    tensors = safetensors.numpy.load_file(directory / WEIGHTS)
    edit_tensors(directory / WEIGHTS, **{"model.fc.weight": tensors["fc.weight"]})
    says = "has both fc.weight and model.fc.weight"
    assert_refused(lm.load_head, directory, target, says)


def test_files_of_torch_are_named(site: dict[str, Written], tmp_path: Path) -> None:
    directory, target, _ = copied(site, "dspark", tmp_path / "block")
    (directory / "mask_embedding.pt").write_bytes(b"")
    says = "has mask_embedding.pt, which is not read"
    assert_refused(lm.load_head, directory, target, says)
    directory, target, _ = copied(site, "eagle3", tmp_path)
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    assert_refused(lm.load_head, directory, target, r"tools/convert_eagle3\.py")
    (directory / "pytorch_model.bin").unlink()
    says = "does not exist, nor does model.safetensors.index.json"
    assert_refused(lm.load_head, directory, target, says)


def test_arguments_of_other_kinds_are_named(site: dict[str, Written], tmp_path: Path) -> None:
    directory, target, (head, params) = site["eagle3"]
    load: Any = lm.load_head
    save: Any = lm.formats.save_eagle3
    save_block: Any = lm.formats.save_block_head
    for name, call in (
        ("target", lambda: load(directory, target.model)),
        ("target", lambda: load(directory, lm.formats.LoadedModel(head, params))),
        ("directory", lambda: load(5, target)),
        ("kind", lambda: load(directory, target, lm.models.Llama)),
        ("directory", lambda: save(None, head, params)),
        ("model", lambda: save(tmp_path, target.model, params)),
        ("model", lambda: save_block(tmp_path, head, params)),
        ("dtype", lambda: save(tmp_path, head, params, jnp.int8)),
    ):
        with pytest.raises(TypeError, match=f"^{name} must"):
            call()


def test_weights_that_cannot_be_stored_are_named_nothing_is_written(
    site: dict[str, Written], tmp_path: Path
) -> None:
    _, _, (head, params) = site["eagle3"]
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
