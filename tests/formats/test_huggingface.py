"""Checkpoints of the families against what `transformers` computes."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.weights import random_weights, sizes, with_fields

from jax_specdec import lm

from .checkpoints import (
    CHECKPOINTS,
    NAMES,
    NUM_TOKEN_IDS,
    SHARDS,
    copy,
    cut_vocabulary,
    edit_json,
    edit_tensors,
    expected,
    logits_of,
)

pytestmark = pytest.mark.newest

TOLERANCE = 1e-5
"""Of float32 logits, relative to the largest of their row."""


@functools.cache
def load(name: str) -> lm.formats.LoadedModel:
    return lm.load_huggingface(CHECKPOINTS / name, jnp.float32)


def logits(loaded: lm.formats.LoadedModel, name: str) -> np.ndarray:
    wanted = expected(name)
    return np.asarray(logits_of(*loaded, wanted["token_ids"][: len(wanted["logits"])]))


def error(found: np.ndarray, name: str) -> float:
    """Largest difference from transformers, relative to the largest logit of its row."""
    wanted = expected(name)["logits"][:, :NUM_TOKEN_IDS]
    scale = np.abs(wanted).max(axis=1, keepdims=True)
    return float((np.abs(found[:, :NUM_TOKEN_IDS] - wanted) / scale).max())


# Values


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    assert error(logits(load(name), name), name) < TOLERANCE


def test_weights_are_read_as_stored_and_computed_in_their_dtype() -> None:
    stored = lm.load_huggingface(CHECKPOINTS / "qwen3")
    assert stored.model.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stored.params)} == {"bfloat16"}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), stored.params)
    jax.tree.map(np.testing.assert_array_equal, wide, load("qwen3").params)
    assert lm.load_huggingface(CHECKPOINTS / "qwen2").model.dtype == jnp.float32


@pytest.mark.parametrize("stored, held", [("float64", "float32"), ("float16", "float16")])
def test_other_widths_are_read(tmp_path: Path, stored: str, held: str) -> None:
    directory = copy("qwen2", tmp_path / "qwen2")
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    edit_tensors(path, **{name: x.astype(stored) for name, x in tensors.items()})
    loaded = lm.load_huggingface(directory)
    assert loaded.model.dtype == held
    wanted = jax.tree.map(lambda x: x.astype(held), load("qwen2").params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, wanted)


def test_shards_are_read_as_one_file_would_be(tmp_path: Path) -> None:
    directory = copy("llama", tmp_path / "llama")
    tensors: dict[str, np.ndarray] = {}
    for shard in SHARDS:
        tensors |= safetensors.numpy.load_file(directory / shard)
        (directory / shard).unlink()
    (directory / "model.safetensors.index.json").unlink()
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    merged = lm.load_huggingface(directory)
    assert merged.model == load("llama").model
    jax.tree.map(np.testing.assert_array_equal, merged.params, load("llama").params)


def test_configurations_of_older_writers_are_read(tmp_path: Path) -> None:
    directory = copy("llama", tmp_path / "llama")
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    }
    for kind in ("rope_type", "type"):
        old = {"rope_theta": 10000.0, "rope_scaling": {kind: "llama3", **scaling}}
        edit_json(directory / "config.json", rope_parameters=..., head_dim=..., **old)
        assert lm.load_huggingface(directory).model == load("llama").model
    # Some hold both, which must mean the same.
    both = {**scaling, "rope_type": "llama3", "rope_theta": 10000.0}
    for old in ({}, both, {**scaling, "type": "llama3"}):
        edit_json(directory / "config.json", rope_parameters=both, rope_scaling=old)
        assert lm.load_huggingface(directory).model == load("llama").model
    edit_json(directory / "config.json", rope_parameters=...)
    # Left out, a value is the default of transformers.
    edit_json(directory / "config.json", rms_norm_eps=..., rope_theta=..., rope_scaling=None)
    layer, *_ = lm.load_huggingface(directory).model.config.layers
    assert (layer.norm.rms_norm_eps, layer.rotation) == (1e-6, lm.models.Rotation(rope_theta=1e4))


def test_parameters_of_positions_may_be_given_by_type_of_layer(tmp_path: Path) -> None:
    directory = copy("llama", tmp_path / "llama")
    own = json.loads((directory / "config.json").read_text())["rope_parameters"]
    assert own["rope_type"] == "llama3"
    local = {"rope_theta": 123.0, "rope_type": "default"}  # of layers that are not there
    nested = {"full_attention": {**own, "rope_theta": 5e5}, "sliding_attention": local}
    edit_json(directory / "config.json", rope_parameters=nested)
    read = lm.load_huggingface(directory).model.config.layers[0].rotation
    known = load("llama").model.config.layers[0].rotation
    assert read == dataclasses.replace(known, rope_theta=5e5)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_file_with_images_is_read(tmp_path: Path, prefix: str) -> None:
    directory = copy("gemma3", tmp_path / "gemma3")
    text = json.loads((directory / "config.json").read_text())
    raw = {"model_type": "gemma3", "text_config": text}
    (directory / "config.json").write_text(json.dumps(raw))
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    renamed = {name.replace("model.", prefix, 1): x for name, x in tensors.items()}
    others = {"model.vision_tower.x": np.ones(3), "multi_modal_projector.y": np.ones(2)}
    safetensors.numpy.save_file(renamed | others, path)
    found = lm.load_huggingface(directory, jnp.float32)
    assert found.model == load("gemma3").model
    jax.tree.map(np.testing.assert_array_equal, found.params, load("gemma3").params)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_tensors_of_images_are_a_mistake_in_files_of_text(tmp_path: Path, name: str) -> None:
    directory = copy(name, tmp_path / name)
    edit_tensors(directory / "model.safetensors", **{"model.vision_tower.x": np.ones(3)})
    with pytest.raises(ValueError, match=r"a tensor model\.vision_tower\.x, which its config"):
        lm.load_huggingface(directory)


def test_tensors_that_follow_from_the_rest_are_no_mistake(tmp_path: Path) -> None:
    directory = copy("qwen2", tmp_path / "qwen2")
    table = safetensors.numpy.load_file(directory / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    derived = {
        "lm_head.weight": table,
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    edit_tensors(directory / "model.safetensors", **derived)
    loaded = lm.load_huggingface(directory)
    assert loaded.model.config.tie_word_embeddings and "lm_head" not in loaded.params


def with_head(
    directory: Path, head_of: Callable[[np.ndarray], np.ndarray]
) -> tuple[Path, np.ndarray]:
    """A tied checkpoint without a tokenizer, with an output matrix made of its embedding."""
    directory = copy("qwen2", directory)
    (directory / "tokenizer.json").unlink()
    path = directory / "model.safetensors"
    head = head_of(safetensors.numpy.load_file(path)[EMBEDDING])
    edit_tensors(path, **{HEAD: np.ascontiguousarray(head)})
    return directory, head


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_stored_output_matrix_counts_though_the_config_says_tied(tmp_path: Path) -> None:
    directory, head = with_head(tmp_path / "untied", lambda table: table[::-1])
    loaded = lm.load_huggingface(directory)
    assert not loaded.model.config.tie_word_embeddings
    np.testing.assert_array_equal(loaded.params["lm_head"], head.T)
    found, wanted = logits(loaded, "qwen2"), expected("qwen2")["logits"]
    atol = TOLERANCE * np.abs(wanted).max()
    np.testing.assert_allclose(found[:, ::-1], wanted, rtol=0, atol=atol)
    lm.formats.save_checkpoint(tmp_path / "again", *loaded)
    again = lm.load_huggingface(tmp_path / "again")
    np.testing.assert_array_equal(logits(again, "qwen2"), found)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    parallel = lm.models.TensorParallelLlama(loaded.model, mesh, "tensor")
    spread = lm.formats.LoadedModel(parallel, parallel.shard_params(loaded.params))
    np.testing.assert_allclose(logits(spread, "qwen2"), found, rtol=0, atol=atol)


def test_an_output_matrix_that_is_the_embedding_in_the_dtype_asked_for_is_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_specdec.lm.formats.tensors._ROWS", 100)  # of 288
    rounded, _ = with_head(
        tmp_path / "rounded", lambda table: table.astype(jnp.bfloat16).astype(np.float32)
    )
    wide, _ = with_head(tmp_path / "wide", lambda table: table.astype(np.float64))
    last, _ = with_head(
        tmp_path / "last", lambda table: np.where(np.arange(288)[:, None] < 287, table, 9)
    )
    for directory, dtype, is_tied in (
        (rounded, jnp.float32, False),
        (rounded, jnp.bfloat16, True),
        (wide, None, True),
        (last, None, False),
    ):
        model, params = lm.load_huggingface(directory, dtype)
        assert (model.config.tie_word_embeddings, "lm_head" not in params) == (is_tied, is_tied)
    cut = lm.load_huggingface(last, max_vocab_size=200)
    assert cut.params["lm_head"].shape[1] == cut.model.vocab_size == 200


@pytest.mark.parametrize(
    "name, tensor, says",
    [
        (HEAD, np.zeros((319, 3), np.int8), r"lm_head.weight of shape \(319, 3\), but"),
        (HEAD, np.zeros((288, 32), np.int8), "lm_head.weight of dtype I8, but only"),
        (HEAD, np.full((288, 32), np.nan, np.float32), "lm_head.weight with a weight of nan"),
        ("lm_head.bias", np.zeros(312, np.float32), "lm_head.bias, which its config"),
        ("model.layers.0.self_attn.o_proj.bias", np.zeros(32, np.float32), "o_proj.bias, which"),
        ("model.layers.0.self_attn.q_norm.weight", np.ones(8, np.float32), "q_norm.weight, which"),
        ("model.embed_tokens.weight_scale", np.ones(312, np.float32), "weight_scale, which"),
    ],
)
def test_a_tensor_that_would_not_be_used_as_stored_is_refused(
    tmp_path: Path, name: str, tensor: np.ndarray, says: str
) -> None:
    directory = copy("qwen2", tmp_path / "qwen2")
    edit_tensors(directory / "model.safetensors", **{name: tensor})
    with pytest.raises(ValueError, match=says):
        lm.load_huggingface(directory)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_family_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    lm.formats.save_checkpoint(tmp_path, *load(name))
    loaded = lm.load_huggingface(tmp_path, jnp.float32)
    assert loaded.model == load(name).model
    jax.tree.map(np.testing.assert_array_equal, loaded.params, load(name).params)


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", ["llama", "qwen2_draft", "qwen3"])
def test_weights_in_int8_are_those_that_quantize_makes(name: str) -> None:
    model, params = load(name)
    wanted = lm.models.quantize(params)
    lean = lm.load_huggingface(CHECKPOINTS / name, jnp.float32, weights="int8")
    assert lean.model == model
    assert_same(lean.params, wanted)
    assert isinstance(lean.params["lm_head"], lm.models.Int8Weight)
    model.check_params("params", lean.params)
    with pytest.raises(TypeError, match="must be an array, but it is an Int8Weight"):
        lm.formats.save_checkpoint(CHECKPOINTS / "never", *lean)


def test_no_more_than_one_matrix_is_held_beside_those_in_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sizes(256, 128, 512, 6, (4, 2, 32))
    model = lm.models.Llama(config, jnp.bfloat16)
    target = lm.formats.LoadedModel(model, random_weights(model, 0))
    head = lm.BlockHead(
        lm.BlockHeadConfig.of_target(
            config, layers=config.layers, aux_hidden_state_layers=(1, 2), block_size=4,
            mask_token_id=0),
        jnp.bfloat16)  # fmt: skip
    lm.formats.save_checkpoint(tmp_path / "target", *target, jnp.bfloat16)
    shared = {name: target.params[name] for name in ("embed_tokens", "lm_head")}
    of_head = random_weights(head, 1) | shared
    lm.formats.save_block_head(tmp_path / "head", head, of_head, jnp.bfloat16)
    del of_head
    put, held = jax.device_put, []

    def count(tensor: np.ndarray) -> jax.Array:  # each that is read
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        return put(tensor)

    monkeypatch.setattr(jax, "device_put", count)
    one_matrix = 2 * (2 * 512 * 128)  # gate and up, in 16 bits
    peaks = {}
    for what in ("target", "target in int8", "head"):
        held.clear()
        if what == "head":
            loaded: Any = lm.load_head(tmp_path / "head", target)
        else:
            weights: Any = "int8" if "int8" in what else None
            loaded = lm.load_huggingface(tmp_path / "target", weights=weights)
        without = shared if what == "head" else ()
        own = {key: x for key, x in loaded.params.items() if key not in without}
        size = sum(x.nbytes for x in jax.tree.leaves(own))
        peaks[what] = max(held) - held[0]
        assert peaks[what] <= size + one_matrix
        del loaded, own
    assert peaks["target in int8"] < 0.7 * peaks["target"]


def quantization(**changes: Any) -> dict[str, Any]:
    """What compressed-tensors writes for int8 weights; `changes` are of weights."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, **changes}
    dynamic = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": dynamic}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def in_int8(name: str, directory: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of one file whose layers are in int8, and its tensors in int8."""
    path = copy(name, directory) / "model.safetensors"
    edit_json(path.with_name("config.json"), quantization_config=quantization())
    changes = {}
    for tensor, stored in safetensors.numpy.load_file(path).items():
        if tensor.endswith("_proj.weight"):
            numbers = stored.astype(np.float32)  # [out, in]
            scale = np.abs(numbers).max(axis=1, keepdims=True) / 127
            values = np.round(numbers / scale).astype(np.int8)
            changes |= {tensor: values, f"{tensor}_scale": scale.astype(stored.dtype)}
    edit_tensors(path, **changes)
    return path, changes


def test_a_checkpoint_in_int8_is_read_as_it_is_stored(tmp_path: Path) -> None:
    path, stored = in_int8("qwen2", tmp_path / "qwen2")
    model, params = lm.load_huggingface(path.parent, jnp.float32)
    model.check_params("params", params)
    prefix = "model.layers.1.self_attn"
    weight = params["layers"][1]["qkv_proj"]
    for of, wanted in ((weight.values, "weight"), (weight.scale[:, None], "weight_scale")):
        parts = [stored[f"{prefix}.{x}_proj.{wanted}"] for x in "qkv"]
        np.testing.assert_array_equal(of, np.concatenate(parts))
    naive = quantization() | {"format": "naive-quantized"}  # the same under another name
    edit_json(path.with_name("config.json"), quantization_config=naive)
    assert_same(lm.load_huggingface(path.parent, jnp.float32).params, params)
    # Scales of activations are not read, nor zero points of weights, if they are 0.
    scale, zero = np.ones(1, np.float32), np.zeros(1, np.int8)
    scalar = np.ones((), np.float32)
    beside = {"input_scale": scale, "input_zero_point": zero + 3, "output_scale": scalar}
    for name, values in stored.items():
        if name.endswith(".weight"):
            static = {name.removesuffix("weight") + key: x for key, x in beside.items()}
            rows = np.zeros((len(values), 1), np.int8)
            edit_tensors(path, **static, **{f"{name}_zero_point": rows})
    static = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    said = quantization()
    said["config_groups"]["group_0"]["input_activations"] = static
    rotated = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
    said["transform_config"] = {"config_groups": {"R1": rotated}}
    edit_json(path.with_name("config.json"), quantization_config=..., compression_config=said)
    assert_same(lm.load_huggingface(path.parent, jnp.float32).params, params)
    # Products with it are those with the float32 matrices that it stands for.
    ids = expected("qwen2")["token_ids"][:5]
    plain = jax.tree.map(
        lambda x: x.dequantized() if isinstance(x, lm.models.Int8Weight) else x,
        params,
        is_leaf=lambda x: isinstance(x, lm.models.Int8Weight),
    )
    wanted = np.asarray(logits_of(model, plain, ids))[:, :NUM_TOKEN_IDS]
    found = np.asarray(logits_of(model, params, ids))[:, :NUM_TOKEN_IDS]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NOT_INT8: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fp8": ({}, {"type": "float"}, "weights has type = 'float', but only 'int' is supported"),
    "groups": ({}, {"strategy": "group"}, "has strategy = 'group', but only 'channel' is"),
    "4 bits": ({}, {"num_bits": 4}, "has num_bits = 4, but only 8 is supported"),
    "another writer": ({"quant_method": "gptq"}, {}, "has quant_method = 'gptq', but only 'compr"),
    "packed": ({"format": "pack-quantized"}, {}, "has format = 'pack-quantized', but only 'int-"),
    "keys and values": ({"kv_cache_scheme": {"num_bits": 8}}, {}, "has kv_cache_scheme = "),
    "no group": ({"config_groups": {}}, {}, "has config_groups = {}, which names no group"),
    "a group of 4 bits": (
        {"config_groups": {"group_0": {"format": "pack-quantized"}}},
        {},
        "group_0 has format = 'pack-quantized', but only",
    ),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "has format = 'sparse-24"),
    "rotated activations": (
        {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
        {},
        "R4 applies R4_input, which is not supported",
    ),
    "rotations that are no list": (
        {"transform_config": {"config_groups": {"R4": {"apply": "input"}}}},
        {},
        "has apply = 'input', which is not a list of objects",
    ),
}


@pytest.mark.parametrize("what", NOT_INT8)
def test_weights_that_are_quantized_otherwise_are_refused(tmp_path: Path, what: str) -> None:
    changes, of_weights, says = NOT_INT8[what]
    directory = copy("qwen2", tmp_path / "qwen2")
    said = quantization(**of_weights) | changes
    edit_json(directory / "config.json", quantization_config=said)
    with pytest.raises(ValueError, match=says):
        lm.load_huggingface(directory)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({Q_PROJ: np.ones((32, 32), np.float32), f"{Q_PROJ}_scale": ...}, "of another dtype than"),
        ({f"{Q_PROJ}_scale": np.ones(3, np.float32)}, "weight_scale of shape"),
        ({f"{Q_PROJ}_scale": ...}, "q_proj.weight of dtype I8, but only"),
        ({f"{Q_PROJ}_zero_point": np.ones((32, 1), np.int8)}, "_zero_point that is not zero"),
        ({"model.embed_tokens.weight": np.ones((288, 32), np.int8)}, "of dtype I8, but only"),
        (
            {"model.norm.weight": np.ones(32, np.int8), "model.norm.weight_scale": np.ones(32)},
            "norm.weight of dtype I8, but only",
        ),
    ],
)
def test_tensors_in_int8_that_do_not_fit_are_named(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path, _ = in_int8("qwen2", tmp_path / "qwen2")
    edit_tensors(path, **changes)
    with pytest.raises(ValueError, match=says):
        lm.load_huggingface(path.parent)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_layers_that_differ_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    model, params = load(name)
    lm.formats.save_checkpoint(tmp_path, model, params)
    again = lm.load_huggingface(tmp_path)
    assert dataclasses.replace(again.model.config, num_token_ids=NUM_TOKEN_IDS) == model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, params)


def test_files_of_gemma_say_by_what_default_a_layer_slides(tmp_path: Path) -> None:
    directory = copy("gemma3", tmp_path / "gemma3")
    path = directory / "config.json"
    older = {"rope_theta": 1e3, "rope_local_base_freq": 100.0}
    scaling = {"rope_type": "linear", "factor": 8.0}
    edit_json(path, rope_parameters=..., rope_scaling=scaling, **older)
    assert lm.load_huggingface(directory).model.config.layers == load("gemma3").model.config.layers
    edit_json(path, layer_types=..., num_hidden_layers=2)
    assert [x.window for x in lm.load_huggingface(directory).model.config.layers] == [6, 6]
    edit_json(path, sliding_window_pattern=2)
    assert [x.window for x in lm.load_huggingface(directory).model.config.layers] == [6, None]


OF_GEMMA: dict[str, tuple[dict[str, Any], str]] = {
    "no window": ({"sliding_window": None}, "sliding_window = None, but sliding layers need"),
    "a kind": ({"layer_types": ["chunked_attention"] * 2}, "layer_types = .*one for each layer"),
    "too few kinds": ({"layer_types": ["full_attention"]}, "layer_types = .*one for each layer"),
    "no period": ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive"),
    "scale": ({"query_pre_attn_scalar": "a"}, "query_pre_attn_scalar = 'a', but it must be"),
    "activation": ({"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh' is supported"),
    "both ways": ({"use_bidirectional_attention": True}, "only False is supported"),
    "cap": ({"final_logit_softcapping": 30.0}, "which is not supported"),
    "rotation": ({"rope_parameters": {"full_attention": {}}}, "lacks sliding_attention in it"),
}


@pytest.mark.parametrize("mistake", OF_GEMMA)
def test_what_a_file_of_gemma_cannot_say_is_named(mistake: str, tmp_path: Path) -> None:
    changes, says = OF_GEMMA[mistake]
    directory = copy("gemma3", tmp_path / "gemma3")
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ValueError, match=says):
        lm.load_huggingface(directory)


def test_a_model_of_no_family_is_not_written(tmp_path: Path) -> None:
    model, params = load("qwen2")
    both = lm.models.Llama(with_fields(model.config, qk_norm=True))
    with pytest.raises(ValueError, match="config has layers that no family of checkpoints has"):
        lm.formats.save_checkpoint(tmp_path, both, params)


# Padding of the vocabulary


@pytest.mark.parametrize("name", NAMES)
def test_padding_has_no_probability(name: str) -> None:
    found = logits(load(name), name)
    assert found.shape[1] == expected(name)["logits"].shape[1] > NUM_TOKEN_IDS
    assert np.isneginf(found[:, NUM_TOKEN_IDS:]).all()
    assert np.isfinite(found[:, :NUM_TOKEN_IDS]).all()
    # It would have been the first choice.
    assert (expected(name)["logits"].argmax(axis=1) >= NUM_TOKEN_IDS).any()


def test_a_stop_token_can_be_drawn_even_if_the_tokenizer_lacks_it(tmp_path: Path) -> None:
    directory = copy("qwen2", tmp_path / "qwen2")
    edit_json(directory / "generation_config.json", eos_token_id=[0, NUM_TOKEN_IDS + 1, 5000])
    found = lm.load_huggingface(directory).model.config
    assert found.num_token_ids == NUM_TOKEN_IDS + 2 < found.vocab_size
    assert lm.load_tokenizer(directory).decode([NUM_TOKEN_IDS + 1]) == ""


def test_without_a_tokenizer_every_id_is_a_token(tmp_path: Path) -> None:
    directory = copy("qwen2", tmp_path / "qwen2")
    (directory / "tokenizer.json").unlink()
    found = logits(lm.load_huggingface(directory), "qwen2")
    wanted = expected("qwen2")["logits"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_ids_that_a_target_lacks_leave_the_drafter() -> None:
    whole = load("qwen2_draft")
    for size, known in ((288, NUM_TOKEN_IDS), (270, None), (1000, NUM_TOKEN_IDS)):
        cut = lm.load_huggingface(CHECKPOINTS / "qwen2_draft", max_vocab_size=size)
        kept = min(size, 312)
        assert (cut.model.vocab_size, cut.model.config.num_token_ids) == (kept, known)
        np.testing.assert_array_equal(
            cut.params["embed_tokens"], whole.params["embed_tokens"][:kept]
        )
    untied = lm.load_huggingface(CHECKPOINTS / "llama", max_vocab_size=290)
    np.testing.assert_array_equal(
        untied.params["lm_head"], load("llama").params["lm_head"][:, :290]
    )
    with pytest.raises(ValueError, match="max_vocab_size must be at least 1, but it is 0"):
        lm.load_huggingface(CHECKPOINTS / "llama", max_vocab_size=0)


def test_a_tokenizer_may_know_more_ids_than_a_drafter(tmp_path: Path) -> None:
    directory = cut_vocabulary(copy("qwen2", tmp_path / "qwen2"), 270)
    config = lm.load_huggingface(directory).model.config
    assert (config.vocab_size, config.num_token_ids) == (270, None)


# Mistakes


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "config.json", **changes)


def missing(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


INDEX = "model.safetensors.index.json"
LLAMA3 = {
    "rope_theta": 1e4,
    "rope_type": "llama3",
    "low_freq_factor": 5.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Values and bytes that no file can have: `test_hostile_files`.
MISTAKES = {
    "no config": (missing("config.json"), "config.json does not exist"),
    "no weights": (missing(INDEX), f"model.safetensors does not exist, nor does {INDEX}"),
    "no shard": (missing(SHARDS[1]), f"{SHARDS[1]} does not exist, but {INDEX} lists it"),
    "no size": (config(hidden_size=...), "config.json lacks hidden_size"),
    "wrong family": (config(model_type="qwen2"), "lacks the tensor model.layers.0.self_attn.q_pro"),
    "fewer layers": (config(num_hidden_layers=1), "has a tensor model.layers.1"),
    "other old scaling": (
        config(rope_parameters=..., rope_scaling={"type": "yarn", "factor": 4.0}),
        "rope_scaling has type = 'yarn', but only 'default', 'linear' and 'llama3' are supported",
    ),
    "scaling of no kind": (
        config(rope_parameters=..., rope_scaling={"factor": 4.0}),
        "rope_scaling has factor = 4.0, but only 1.0 is supported",
    ),
    "two scalings": (
        config(rope_scaling={"rope_theta": 1e4}),  # no scaling; the other is llama3
        "has rope_scaling = {'rope_theta': 10000.0}, but rope_parameters beside it says something",
    ),
    "scaling of other layers": (
        config(rope_parameters={"sliding_attention": {"rope_theta": 1e4}}),
        "lacks full_attention",
    ),
    "no factor": (config(rope_parameters=LLAMA3), "rope_parameters lacks factor"),
    "limits": (
        config(rope_parameters={**LLAMA3, "factor": 8.0}),
        "rope_parameters: low_freq_factor must be",
    ),
}


BESIDE = {
    "config.json": ("snapshots", "name a directory in snapshots there, as this is one of the hub"),
    "tokenizer.json": ("tokenizer.model", "save_pretrained of transformers writes it"),
    INDEX: ("pytorch_model.bin", "save_pretrained of transformers writes it"),
}


@pytest.mark.parametrize("file", BESIDE)
def test_what_is_there_in_place_of_a_missing_file_is_told(tmp_path: Path, file: str) -> None:
    directory = copy("llama", tmp_path / "llama")
    (directory / file).unlink()
    other, hint = BESIDE[file]
    read = lm.load_tokenizer if file.startswith("token") else lm.load_huggingface
    for there in (False, True):
        with pytest.raises(FileNotFoundError, match="must hold") as raised:
            read(directory)
        assert (hint in str(raised.value)) == there
        (directory / other).touch()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_checkpoint_is_named_in_one_sentence(tmp_path: Path, mistake: str) -> None:
    make, message = MISTAKES[mistake]
    directory = copy("llama", tmp_path / "llama")
    make(directory)
    with pytest.raises((FileNotFoundError, ValueError), match=message) as raised:
        lm.load_huggingface(directory)
    assert str(raised.value).count("\n") == 0 and str(directory) in str(raised.value)
    is_missing = "does not exist" in message
    assert isinstance(raised.value, FileNotFoundError) == is_missing
