"""Files that are damaged, or that somebody made to do damage: each ends in one sentence, soon.

Nothing here computes: files are refused before the first weight is read. Sentences of libraries
about their formats are theirs; each must name the file, and what this package checks is named, too.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from upper_floor import count_token_ids, open_tensors, read_config

from jax_specdec import lm

from .checkpoints import SHARDS, copy

pytestmark = pytest.mark.newest

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READERS: dict[str, tuple[Callable[[Path], Any], ...]] = {
    **dict.fromkeys((CONFIG, WEIGHTS, INDEX, SHARDS[1]), (lm.load_huggingface,)),
    GENERATION: (lm.load_tokenizer,),
    TOKENIZER: (lm.load_huggingface, lm.load_tokenizer),
}
JSON_FILES = (CONFIG, GENERATION, TOKENIZER, INDEX)
MEMORY = 2**30
SECONDS = 60


@pytest.fixture(autouse=True)
def bounds() -> Iterator[None]:
    """A gibibyte more than the process has, and a minute: who needs more never ends."""

    def give_up(*_: object) -> None:
        pytest.fail(f"still busy after {SECONDS} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def checkpoint(tmp_path: Path, file: str) -> Path:
    """A copy of a checkpoint that has the file."""
    name = "qwen2" if file == WEIGHTS else "llama"
    return copy(name, tmp_path / name)


def sentence(error: BaseException) -> str:
    """What an error says: of a documented type, one line, and short."""
    assert type(error) in (ValueError, FileNotFoundError, OSError), repr(error)
    text = str(error)
    assert text.isprintable() and text.endswith(".") and len(text) < 900, text
    return text


def assert_refused(directory: Path, file: str, says: str) -> None:
    for read in READERS[file]:
        with pytest.raises(Exception) as raised:
            read(directory)
        text = sentence(raised.value)
        assert file in text, text
        assert re.search(says, text), text


Damage = Callable[[Path], Any]
Kinds = dict[str, tuple[Damage, str]]


def assert_each_refused(tmp_path: Path, file: str, kinds: Kinds) -> None:
    """Damages a file in each of the ways, one after another."""
    directory = checkpoint(tmp_path, file)
    original = (directory / file).read_bytes()
    for kind, (damage, says) in kinds.items():
        print(kind)  # the last one printed is the one that failed
        (directory / file).write_bytes(original)
        damage(directory / file)
        assert_refused(directory, file, says)
        remove(directory / file)


def remove(path: Path) -> None:
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_undamaged_files_are_read(tmp_path: Path) -> None:
    for file in READERS:
        directory = checkpoint(tmp_path / file, file)
        tokenizer = lm.load_tokenizer(directory)
        assert tokenizer.stop_token_ids == (281, 282)
        config = read_config(directory / CONFIG)
        with open_tensors(directory, config) as tensors:
            assert tensors.read("model.norm.weight").shape == (config.hidden_size,)
        assert count_token_ids(directory / TOKENIZER) == 283


# Something else in place of a file


def in_place(make: Damage) -> Damage:
    return lambda path: (path.unlink(), make(path))


def link(to: str) -> Damage:
    return in_place(lambda path: path.symlink_to(to))


PLACES: Kinds = {
    "directory": (in_place(Path.mkdir), "is a directory, but must be a file"),
    "named pipe": (in_place(os.mkfifo), "is a named pipe, but must be a file"),
    "link to nothing": (link("blobs/0123"), "is a link to blobs/0123, which does not exist"),
    "link to zeros": (link("/dev/zero"), "is a device, but must be a file"),
    "file that fails": (link("/proc/self/mem"), "cannot be opened: "),
}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
WHATEVER: Kinds = {
    "named pipe": PLACES["named pipe"],
    "pointer": (in_place(lambda path: path.write_text(POINTER)), "is a pointer of Git LFS, not th"),
}


def test_what_stands_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    assert_each_refused(tmp_path, CONFIG, PLACES)


@pytest.mark.parametrize("file", [file for file in READERS if file != CONFIG])
def test_whatever_the_file_what_is_in_its_place_is_named(tmp_path: Path, file: str) -> None:
    assert_each_refused(tmp_path / "kinds", file, WHATEVER)


@pytest.mark.parametrize(
    "name, says",
    [
        ("a" * 5000, r"^a{120}\.\.\..*/config.json cannot be opened: "),
        ("a\0b", r"'a\\x00b/config.json' cannot be opened: "),
        ("a\ud800b", r"'a\\ud800b/config.json' cannot be opened: "),
        ("a\nb", r"'a\\nb' does not exist"),
        (__file__, "test_hostile_files.py is a file, but a checkpoint must be a directory of conf"),
    ],
    ids=["long", "null", "surrogate", "line", "file"],
)
def test_a_directory_that_cannot_be_is_named(name: str, says: str) -> None:
    with pytest.raises(OSError) as raised:
        lm.load_huggingface(name)
    assert re.search(says, sentence(raised.value)), str(raised.value)


# JSON


def in_json(path: Path, *keys: str | int, text: str) -> None:
    """Puts JSON text where the keys lead."""
    root = json.loads(path.read_text())
    place = root
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = "PLACE"
    path.write_text(json.dumps(root).replace('"PLACE"', text))


def json_text(*keys: str | int, text: str) -> Damage:
    return lambda path: in_json(path, *keys, text=text)


def replace(content: str | bytes) -> Callable[[Path], Any]:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(data)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


NOT_JSON: Kinds = {
    "two objects": (rewrite(lambda data: data + b"{}"), "is not valid JSON: "),
    "UTF-16": (rewrite(lambda data: data.decode().encode("utf-16")), "is not text in UTF-8: "),
    "list": (replace("[]"), "must hold a JSON object"),
    "deep": (replace('{"a":' + "[" * 10**6), "is not valid JSON: "),
    "many digits": (replace(f'{{"a": {"9" * 10**6}}}'), "is not valid JSON: "),
    "key twice": (
        rewrite(lambda data: b'{"K": 1, "K": 2, '.replace(b"K", b"\\n" * 10**5) + data[1:]),
        r"is not valid JSON: an object has the key '[\\n]*\.\.\.[\\n]*' twice",
    ),
    "too large": (lambda path: os.truncate(path, 2**40), "must have at most 67108864 bytes, but"),
}


def test_what_is_no_json_object_is_named(tmp_path: Path) -> None:
    assert_each_refused(tmp_path, CONFIG, NOT_JSON)


@pytest.mark.parametrize("file", JSON_FILES)
def test_whatever_the_file_json_cut_short_is_named(tmp_path: Path, file: str) -> None:
    cut = rewrite(lambda data: data[:-40])
    assert_each_refused(tmp_path, file, {"cut": (cut, "is not valid JSON: ")})


NO_NUMBER = ('"8"', "true", "[]", "[8]", "{}", "null", "-1", "0", "-0.0", "NaN", "-1e400")
NO_INTEGER = (*NO_NUMBER, "8.0", "1.5", "1e400", "Infinity", "2147483648", "1" + 30 * "0")
NO_FLOAT32 = (*NO_NUMBER, "1e400", "Infinity", "1e39", "1e-39", "1" + 400 * "0")
NO_SWITCH = ('"false"', "0", "1", "null", "[]", "NaN")
NO_TOKEN_ID = ('"5"', "true", "5.9", "5.0", "-1", "NaN", "1e400", "[[]]", "{}", "2147483648")

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "num_token_ids",
)  # fmt: skip
FIELDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("vocab_size",): NO_INTEGER,
    **{(size,): ('"8"', "0") for size in SIZES},
    ("rms_norm_eps",): NO_FLOAT32,
    ("rope_parameters", "rope_theta"): ("null", "0.5"),
    ("rope_parameters", "factor"): ("null", "0.5"),
    ("rope_parameters", "low_freq_factor"): ('"8"',),
    ("rope_parameters", "high_freq_factor"): ('"8"',),
    ("rope_parameters", "original_max_position_embeddings"): ("8.0",),
    ("rope_parameters", "rope_type"): ('"yarn"', "null", "[]", "1e400"),
    ("rope_parameters", "partial_rotary_factor"): ('"1"', "0.5", "NaN"),
    ("rope_parameters",): ('"llama3"', "[]", "NaN"),
    ("tie_word_embeddings",): NO_SWITCH,
    ("attention_bias",): ("true", '"false"', "NaN"),
    ("mlp_bias",): ("true",),
    ("use_sliding_window",): ("true",),
    ("logit_scale",): ("0.5", "NaN"),
    ("final_logit_softcapping",): ("30.0",),
    ("no_rope_layers",): ("[1, 0]",),
    ("hidden_act",): ('"gelu"', '"' + "s" * 10**5 + '"'),
    ("quantization_config",): ("{}",),
    ("layer_types",): ('"sliding_attention"', '["full_attention", 5]', "{}", "[[]]"),
    ("model_type",): ('"gpt2"', "5", "[]", '"\\n\\ud800"'),
}


@pytest.mark.parametrize("keys", FIELDS, ids="-".join)
def test_a_value_that_config_json_cannot_have_is_named(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    kinds = {text: (json_text(*keys, text=text), keys[-1]) for text in FIELDS[keys]}
    assert_each_refused(tmp_path, CONFIG, kinds)


def test_more_layers_than_tensors_are_refused_without_memory(tmp_path: Path) -> None:
    for file in (WEIGHTS, INDEX):
        directory = checkpoint(tmp_path, file)
        for count in (3, 1000):
            in_json(directory / CONFIG, "num_hidden_layers", text=str(count))
            assert_refused(directory, file, "lacks the tensor model.layers.2.input_layernorm")
        for count in (1001, 2**31 - 1, 10**12):
            in_json(directory / CONFIG, "num_hidden_layers", text=str(count))
            says = r"num_hidden_layers must be an integer in \[1, 1000\]"
            assert_refused(directory, CONFIG, says)


TOKEN_IDS: dict[str, tuple[str, tuple[str | int, ...], tuple[str, ...], str]] = {
    "vocabulary": (TOKENIZER, ("model", "vocab", "a"), (*NO_TOKEN_ID, "null"), "vocab .* for 'a'"),
    "added token": (TOKENIZER, ("added_tokens", 1, "id"), ("5.0", "null"), "added.* for 1"),
    "stop token": (GENERATION, ("eos_token_id",), ('"5"', "-1"), "eos_token_id = "),
    "stop tokens": (GENERATION, ("eos_token_id", 1), ("5.9", "null"), r"eos_token_id = \["),
    "two tokens": (TOKENIZER, ("model", "vocab", "a"), ("5", "0"), "for '.' and for 'a', but an"),
    "no vocabulary": (
        TOKENIZER,
        ("model", "vocab"),
        ("5", "null", "{}", "[1, 2]", '["a"]'),
        "has no vocabulary of token ids",
    ),
    "no model": (TOKENIZER, ("model",), ("5", "null", "{}"), "has no vocabulary"),
    "no added tokens": (TOKENIZER, ("added_tokens",), ("5", "[1]"), "added_to"),
}


@pytest.mark.parametrize("kind", TOKEN_IDS)
def test_what_is_no_token_id_is_named_with_its_field(tmp_path: Path, kind: str) -> None:
    file, keys, texts, says = TOKEN_IDS[kind]
    kinds = {text: (json_text(*keys, text=text), says) for text in texts}
    assert_each_refused(tmp_path, file, kinds)


def test_what_the_tokenizers_library_refuses_is_named(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, TOKENIZER)
    original = (directory / TOKENIZER).read_bytes()
    for keys, text in (
        (("model", "merges"), "5"),
        (("model", "continuing_subword_prefix"), '"' + "x" * 50 + '"'),  # the library panics
        (("post_processor", "special_tokens"), "{}"),  # and at the first text
    ):
        (directory / TOKENIZER).write_bytes(original)
        in_json(directory / TOKENIZER, *keys, text=text)
        with pytest.raises(ValueError) as raised:
            lm.load_tokenizer(directory)
        assert "tokenizer.json is not a tokenizer that can be read: " in sentence(raised.value)


# Tensors


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Changes the header of a safetensors file; the length before it is made to fit."""

    def edit(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        parsed = json.loads(data[8 : 8 + length])
        change(parsed)
        write_header(path, json.dumps(parsed).encode(), data[8 + length :])

    return edit


def write_header(path: Path, text: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def norm(**fields: Any) -> Callable[[Path], Any]:
    """Changes the entry of the last norm; `...` removes a field."""

    def change(entries: dict[str, Any]) -> None:
        entry = {**entries["model.norm.weight"], **fields}
        entries["model.norm.weight"] = {k: v for k, v in entry.items() if v is not ...}

    return header(change)


def added(name: str) -> Callable[[Path], Any]:
    return header(
        lambda x: x.update({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    )


TENSORS: Kinds = {
    "empty": (replace(""), "is not a readable safetensors file: "),
    "data cut": (rewrite(lambda data: data[:-1]), "is not a readable safetensors file: "),
    "no tensors": (header(dict.clear), "is not a readable safetensors file: |lacks the tensor"),
    **{
        f"another tensor {name[:9]!r}": (added(name), "has a tensor .*, which its config.json does")
        for name in ("x", "a\nb", "\u202e", "a" * 10**5)
    },
    "rank 100000": (
        norm(shape=[1] * 10**5 + [32]),
        r"norm.weight of shape \(1, 1, 1, 1, 1, 1, \.\.\.\), but its config.json says \(32,\)",
    ),
    "shape transposed": (
        header(lambda x: x["model.embed_tokens.weight"]["shape"].reverse()),
        r"model.embed_tokens.weight of shape \(32, 288\), but its config.json says \(288, 32\)",
    ),
    "integers": (norm(dtype="I32"), "model.norm.weight of dtype I32, but only F64, F32, F16, BF16"),
}


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    assert_each_refused(tmp_path, WEIGHTS, TENSORS)


# The index of shards

LEAVES = "in its weight_map, which must not leave the directory"
INDICES: dict[str, tuple[str, ...]] = {
    "lacks a weight_map from names": ("[]", "null", '{"a": 1}'),
    "lacks the tensor": ("{}", '{"a": "SHARD"}', '{"a\\n\\n": "SHARD"}'),
    LEAVES: ('{"a": "OUTSIDE/SHARD"}', '{"a": "b/../../outside/SHARD"}', '{"a": ".."}'),
    "is a directory, but must be a file": ('{"a": ""}',),
    "does not exist, but model.safetensors.index.json lists it": (
        '{"a": "b\\nc"}',
        '{"a": "' + "b" * 10**5 + '"}',
        '{"a": "b\\u0000"}',
        '{"a": "\\ud800"}',
    ),
    "config.json is not a readable safetensors file": ('{"a": "config.json"}',),
}


@pytest.mark.parametrize("says", INDICES)
def test_an_index_that_lies_is_named(tmp_path: Path, says: str) -> None:
    outside = copy("llama", tmp_path / "outside")  # there is something to find
    directory = copy("llama", tmp_path / "llama")
    for text in INDICES[says]:
        text = text.replace("SHARD", SHARDS[0]).replace("OUTSIDE", str(outside))
        in_json(directory / INDEX, "weight_map", text=text)
        for read in READERS[INDEX]:
            with pytest.raises(Exception) as raised:
                read(directory)
            assert says in sentence(raised.value), str(raised.value)


def test_a_file_outside_is_read_through_a_link(tmp_path: Path) -> None:
    # As `huggingface_hub` stores them.
    directory = copy("llama", tmp_path / "llama")
    (directory / SHARDS[0]).rename(tmp_path / "blob")
    (directory / SHARDS[0]).symlink_to("../blob")
    with open_tensors(directory, read_config(directory / CONFIG)) as tensors:
        assert len(tensors.stored) == 21


# Damage at random

VALUES = (*NO_INTEGER, *NO_FLOAT32, *NO_TOKEN_ID, '"\\ud800"', '""', '{"a": [1]}', "5", "1")


def damage_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flips, cuts out, doubles or inserts bytes, mostly near the beginning."""
    for _ in range(chance.randint(1, 4)):
        reach = len(data) if chance.random() < 0.3 else min(len(data), 4000)
        start = chance.randrange(reach + 1)
        end = min(len(data), start + chance.randint(1, 20))
        piece = chance.choice([b"", 2 * data[start:end], chance.randbytes(end - start), b'"', b"9"])
        data = data[:start] + piece + data[end if chance.random() < 0.8 else start :]
    return data


def damage_value(path: Path, chance: random.Random) -> None:
    """Puts something else in one place of a JSON file."""
    keys: list[str | int] = []
    place = json.loads(path.read_text())
    while isinstance(place, dict | list) and place and (not keys or chance.random() < 0.8):
        keys.append(
            chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        )
        place = place[keys[-1]]
    in_json(path, *keys, text=chance.choice(VALUES))


def damage_at_random(directory: Path, file: str, chance: random.Random) -> None:
    if file in JSON_FILES and chance.random() < 0.6:
        damage_value(directory / file, chance)
    else:
        rewrite(lambda data: damage_bytes(data, chance))(directory / file)


def read_headers(directory: Path) -> None:
    """All of a checkpoint but its weights."""
    with open_tensors(directory, read_config(directory / CONFIG)):
        count_token_ids(directory / TOKENIZER)


def test_damage_at_random_is_harmless_or_named(tmp_path: Path) -> None:
    taken = 0
    for seed in range(300):
        chance = random.Random(seed)
        file = chance.choice(list(READERS))
        directory = checkpoint(tmp_path / str(seed), file)
        damage_at_random(directory, file, chance)
        for read in (read_headers, lm.load_tokenizer):
            try:
                read(directory)
                taken += 1
            except Exception as error:
                print(f"seed {seed}, {file}: {error!r}")
                sentence(error)
        shutil.rmtree(tmp_path / str(seed))
    assert 150 < taken < 450  # both happen
