"""Tokens that files beside a `tokenizer.json` add: those that `transformers` adds."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from upper_floor import count_token_ids, read_chat_template

from jax_specdec import lm

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
USER, OTHER = {"content": "<user>", "special": True}, {"content": "<other>", "special": False}


def checkpoint(directory: Path, files: dict[str, Any]) -> Path:
    """Words a, b and </s>, ids 0 to 2, then <s>, a special token."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def gemma3(**text: Any) -> dict[str, Any]:
    """A config of a model for text and images."""
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 4}
    return {"model_type": "gemma3", "text_config": {**sizes, **text}}


# Files; the tokens that are added, by id, True for special ones; the names of special tokens.
# Version 4.57 of `transformers` adds the same, but for ids that the model does not have.
CASES: dict[str, tuple[dict[str, Any], dict[int, tuple[str, bool]], dict[str, str]]] = {
    "nothing": ({}, {}, {}),
    "decoder": (
        {CONFIG: {"added_tokens_decoder": {"5": OTHER, "4": USER}}},
        {4: ("<user>", True), 5: ("<other>", False)},
        {},
    ),
    "added tokens": (
        {ADDED: {"<user>": 4, "<other>": 5}, CONFIG: {"additional_special_tokens": ["<user>"]}},
        {4: ("<user>", True), 5: ("<other>", False)},
        {},
    ),
    "the decoder goes before the other files": (
        {
            CONFIG: {"added_tokens_decoder": {"4": USER}, "bos_token": "<s>"},
            MAP: {"bos_token": "<user>", "pad_token": "b"},
            ADDED: {"<other>": 4},
        },
        {4: ("<user>", True)},
        {"bos_token": "<s>"},
    ),
    "the map goes before the configuration": (
        {
            CONFIG: {"bos_token": "a", "eos_token": "</s>", "unk_token": ""},
            MAP: {"bos_token": {"content": "<s>", "lstrip": False}, "mask_token": "b"},
        },
        {1: ("b", True), 2: ("</s>", True)},
        {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "b", "unk_token": ""},
    ),
    "special tokens without an id get the next ones": (
        {
            MAP: {
                "additional_special_tokens": ["<user>", {"content": "<other>"}],
                "cls_token": "<c>",
            }
        },
        {4: ("<c>", True), 5: ("<user>", True), 6: ("<other>", True)},
        {"cls_token": "<c>"},
    ),
    "no more ids than the model has": (
        {CONFIG: {"pad_token": "<pad>", "cls_token": "<c>"}, "config.json": {"vocab_size": 5}},
        {4: ("<pad>", True)},
        {"pad_token": "<pad>", "cls_token": "<c>"},
    ),
    "the model has its ids in an object of text": (
        {CONFIG: {"pad_token": "<pad>", "cls_token": "<c>"}, "config.json": gemma3(vocab_size=5)},
        {4: ("<pad>", True)},
        {"pad_token": "<pad>", "cls_token": "<c>"},
    ),
    "an added token that a name makes special": (
        {CONFIG: {"added_tokens_decoder": {"4": OTHER}, "sep_token": "<other>"}},
        {4: ("<other>", True)},
        {"sep_token": "<other>"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_added_as_transformers_adds_them(tmp_path: Path, name: str) -> None:
    files, added, names = CASES[name]
    tokenizer = lm.load_tokenizer(checkpoint(tmp_path, files))
    found = tokenizer.library_tokenizer.get_added_tokens_decoder()
    wanted = {3: ("<s>", True), **added}
    assert {i: (token.content, token.special) for i, token in found.items()} == wanted
    for token_id, (content, _) in wanted.items():
        assert tokenizer.encode(content) == [token_id]
    assert count_token_ids(tmp_path / "tokenizer.json") == max(wanted) + 1
    template = "".join(f"{{{{ {one} }}}}|" for one in names)
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": ""}]
    assert read_chat_template(tmp_path).apply(messages) == "".join(
        f"{token}|" for token in names.values()
    )


@pytest.mark.parametrize("last_id", [262206, 262207])
def test_a_size_that_a_family_has_by_default_bounds_the_ids_of_names(
    tmp_path: Path, last_id: int
) -> None:
    files = {CONFIG: {"pad_token": "<pad>"}, "config.json": gemma3()}
    path = checkpoint(tmp_path, files) / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["added_tokens"][0]["id"] = last_id
    path.write_text(json.dumps(raw))
    assert count_token_ids(path) == 262208


@pytest.mark.parametrize(
    ("content", "token_id", "given"), [("<x>", 7, 3), ("<x>", 1, 3), ("b", 7, 1)]
)
def test_an_added_token_with_an_id_that_the_library_does_not_give_it_is_named(
    tmp_path: Path, content: str, token_id: int, given: int
) -> None:
    path = checkpoint(tmp_path, {}) / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["added_tokens"][0] |= {"id": token_id, "content": content}
    path.write_text(json.dumps(raw))
    message = f"has added_tokens with the id {token_id} for '{content}', but .* gives it {given}: "
    with pytest.raises(ValueError, match=message):
        lm.load_tokenizer(tmp_path)


def test_an_end_that_only_another_file_adds_ends_a_text(tmp_path: Path) -> None:
    files = {ADDED: {"<end>": 4}, MAP: {"eos_token": "<end>"}}
    assert lm.load_tokenizer(checkpoint(tmp_path, files)).stop_token_ids == (4,)
    files = {ADDED: {}, MAP: {"eos_token": "<end>"}}  # no file gives it an id
    assert lm.load_tokenizer(checkpoint(tmp_path, files)).stop_token_ids == ()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({ADDED: {"<x>": 9}}, "added_tokens.json has the id 9 for '<x>', but the next free id"),
        ({ADDED: {"<x>": "4"}}, "added_tokens.json has <x> = '4', which is no token id"),
        ({CONFIG: {"added_tokens_decoder": []}}, "added_tokens_decoder = .* not a JSON object"),
        ({CONFIG: {"added_tokens_decoder": {"-4": USER}}}, "has -4 = .* whose key is no token id"),
        ({CONFIG: {"added_tokens_decoder": {"4": {}}}}, "has 4 = {}, which is not text"),
        ({CONFIG: {"added_tokens_decoder": {"4": USER | {"lstrip": 1}}}}, "flags are not true or"),
        ({MAP: {"bos_token": 7}}, "special_tokens_map.json has bos_token = 7, which is not text"),
        ({MAP: {"additional_special_tokens": "<x>"}}, "additional_special_tokens = .* not a list"),
    ],
)
def test_a_file_that_adds_what_cannot_be_is_named(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lm.load_tokenizer(checkpoint(tmp_path, files))
