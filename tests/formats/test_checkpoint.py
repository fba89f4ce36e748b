"""Checkpoints: what is written is read back, and what is wrong is named."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.weights import random_weights, sizes

from jax_specdec.lm import load_huggingface
from jax_specdec.lm.formats import save_checkpoint
from jax_specdec.lm.models import Llama

from .checkpoints import edit_json, edit_tensors

pytestmark = pytest.mark.newest


def make(tied: bool = False) -> tuple[Llama, Any]:
    config = sizes(11, 12, 20, 2, (3, 1, 4), rms_norm_eps=1e-6, tie_word_embeddings=tied)
    model = Llama(config)
    return model, random_weights(model, 0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, *make())
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
def test_float32_survives_the_round_trip_exactly(tmp_path: Path, tied: bool) -> None:
    model, params = make(tied)
    save_checkpoint(tmp_path / "new" / "directory", model, params)
    loaded = load_huggingface(tmp_path / "new" / "directory")
    assert loaded.model == model
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    model, params = make()
    save_checkpoint(tmp_path, model, params, jnp.bfloat16)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {jnp.dtype("bfloat16")}
    loaded = load_huggingface(tmp_path, jnp.float32)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16).astype("float32"), params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, rounded)
    half = load_huggingface(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}


def test_tensors_have_the_names_and_the_layout_of_hugging_face(saved: Path) -> None:
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    layer = {
        "input_layernorm.weight": (12,),
        "self_attn.q_proj.weight": (12, 12),
        "self_attn.k_proj.weight": (4, 12),
        "self_attn.v_proj.weight": (4, 12),
        "self_attn.o_proj.weight": (12, 12),
        "post_attention_layernorm.weight": (12,),
        "mlp.gate_proj.weight": (20, 12),
        "mlp.up_proj.weight": (20, 12),
        "mlp.down_proj.weight": (12, 20),
    }
    assert {name: tensor.shape for name, tensor in stored.items()} == {
        "model.embed_tokens.weight": (11, 12),
        "model.norm.weight": (12,),
        "lm_head.weight": (11, 12),
        **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }
    _, params = make()
    qkv = np.asarray(params["layers"][1]["qkv_proj"])
    for name, columns in (("q", slice(0, 12)), ("k", slice(12, 16)), ("v", slice(16, 20))):
        tensor = stored[f"model.layers.1.self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(tensor, qkv[:, columns].T)


def test_configurations_of_other_writers_are_read(saved: Path) -> None:
    # Newer files keep theta in rope_parameters; head_dim and the key/value heads may be implied.
    model, params = make()
    edit_json(
        saved / "config.json",
        rope_theta=...,
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
    )
    assert load_huggingface(saved).model.config.layers[0].rotation.rope_theta == 77.0
    edit_json(saved / "config.json", head_dim=..., some_key_of_the_future=1, rope_scaling=None)
    assert load_huggingface(saved).model.config.layers[0].head_dim == 4
    edit_json(saved / "config.json", num_key_value_heads=...)
    with pytest.raises(ValueError, match="k_proj.weight of shape .4, 12., .* says .12, 12."):
        load_huggingface(saved)


# Weights that are not finite

FIRST, LAST = "model.embed_tokens.weight", "model.norm.weight"


def store(directory: Path, name: str, value: float, stored: str) -> np.ndarray:
    """Writes a value into the middle of a tensor, and all tensors in a dtype."""
    path = directory / "model.safetensors"
    tensors = {name: x.astype(stored) for name, x in safetensors.numpy.load_file(path).items()}
    tensors[name].flat[7] = np.asarray(value).astype(stored)
    safetensors.numpy.save_file(tensors, path)
    return tensors[name]


@pytest.mark.parametrize(
    "value, stored, dtype, says",
    [
        (np.nan, "float32", "float32", "-?nan, which is nan in float32"),
        (-np.nan, "float16", "float32", "-?nan, which is nan in float32"),
        (np.nan, "bfloat16", "bfloat16", "-?nan, which is nan in bfloat16"),
        (-np.inf, "bfloat16", "float32", "-inf, which is -inf in float32"),
        (np.inf, "float64", "float16", "inf, which is inf in float16"),
        (-1e300, "float64", "float32", r"-1e\+300, which is -inf in float32"),
        (65520.0, "float32", "float16", "65520.0, which is inf in float16"),
        (-3.4e38, "float32", "bfloat16", r"-3.*e\+38, which is -inf in bfloat16"),
    ],
)
def test_a_weight_that_is_not_finite_is_refused_by_name(
    saved: Path, value: float, stored: str, dtype: str, says: str
) -> None:
    store(saved, FIRST, value, stored)
    with pytest.raises(ValueError) as raised:
        load_huggingface(saved, dtype)
    assert re.search(f"model.safetensors has {FIRST} with a weight of {says}; ", str(raised.value))
    assert str(raised.value).endswith("weights must be finite unless allow_nonfinite is true.")


@pytest.mark.parametrize("value", [1e9, -1e9])
@pytest.mark.parametrize("others", [0.0, -0.0, 1.0, -1.0])
def test_one_weight_too_large_is_found_among_any(saved: Path, others: float, value: float) -> None:
    edit_tensors(saved / "model.safetensors", **{FIRST: np.full((11, 12), others, np.float32)})
    store(saved, FIRST, value, "float32")
    with pytest.raises(ValueError, match=f"has {FIRST} with a weight of {value},"):
        load_huggingface(saved, "float16")


def test_a_weight_that_is_not_finite_is_read_where_allowed(saved: Path) -> None:
    for value in (np.nan, -np.inf, -1e300):
        tensor = store(saved, LAST, value, "float64")
        with pytest.raises(ValueError, match=f"has {LAST} with a weight of"):
            load_huggingface(saved, "float32")
        with np.errstate(over="ignore"):
            wanted = tensor.astype(np.float32)
        assert not np.isfinite(wanted).all()
        loaded = load_huggingface(saved, "float32", allow_nonfinite=True)
        np.testing.assert_array_equal(loaded.params["norm"], wanted)


def test_the_largest_finite_weights_and_the_smallest_are_read(saved: Path) -> None:
    for value, dtype in ((-65519.0, "float16"), (1e-40, "float32"), (-0.0, "float32")):
        tensor = store(saved, FIRST, value, "float32")
        loaded = load_huggingface(saved, dtype).params["embed_tokens"]
        np.testing.assert_array_equal(loaded, tensor.astype(dtype))
