"""Tokens that files beside a `tokenizer.json` add or call special, by the rules of `transformers`.

A `tokenizer_config.json` with an `added_tokens_decoder` says all. Without one, as in checkpoints of
earlier versions, a `special_tokens_map.json` goes before it, and `added_tokens.json` adds tokens.

`token_ids` counts ids with this, without a library, and `text.tokenizer` adds the tokens to that of
the `tokenizers` library. So ids are given out here as the library gives them.
"""

import contextlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

from jax_specdec.lm.formats.config_json import CONFIG_FILE, parse_config
from jax_specdec.lm.formats.files import JsonObject, JsonValue, read_json
from jax_specdec.lm.models.fields import MAX_INT, is_token_id, quoted

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

# Keys of `tokenizer_config.json`. Some files have an object of names and tokens in the second list.
_DECODER = "added_tokens_decoder"
_NAMES = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Members of a token in JSON, and arguments of the library's `AddedToken`, under the same names.
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class Token(NamedTuple):
    """A token: its text, and those of its flags that a file gives; the library has the others."""

    content: str
    flags: dict[str, bool]


def special_tokens(directory: Path) -> dict[str, str]:
    """Returns special tokens by name, such as `eos_token`.

    Raises:
      OSError: something other than a file is in place of one, or it cannot be opened.
      ValueError: a file cannot be parsed, or a special token is not text.
    """
    files = _files(directory)
    return {name: token.content for name in _NAMES for token in _special(files, name)}


def tokens_beside(
    directory: Path, vocab: Mapping[str, int], added: Mapping[int, Mapping[str, JsonValue]]
) -> dict[int, Token]:
    """Returns what is to be added to a tokenizer, by id and in order.

    A special token without an id gets the next one, if the model has as many and it is no
    `eos_token`: what no file gives an id ends no text. Tokens that the tokenizer has are among what
    is returned where other files change their flags.

    Args:
      vocab: ids of the model in `tokenizer.json`, by token.
      added: the objects of the tokens that the file adds itself, by id.

    Raises:
      OSError, ValueError: as for `special_tokens`; or a token has a wrong id.
    """
    files = _files(directory)
    specials = [token for name in (*_NAMES, *_LISTS) for token in _special(files, name)]
    specials = [token for token in specials if token.content]  # a name without a token is ""
    # By text, what tokenizer.json has: objects of the tokens that it adds, and ids of all tokens.
    objects = {str(token.get("content")): token for token in added.values()}
    ids = {**vocab, **{str(token.get("content")): token_id for token_id, token in added.items()}}
    taken = set(ids.values())
    # The library numbers a new token so, by the size of the vocabulary and not by its last id. In a
    # vocabulary with gaps that id may be taken: the library would then give it a second meaning.
    next_id = max([len(vocab), *(token_id + 1 for token_id in added)])
    additions: dict[int, Token] = {}
    # Tokens that a file gives ids: those that are new must follow those of tokenizer.json.
    names = {token.content for token in specials}
    where, stated = _stated(directory, files[-1], names, added)
    for token_id in sorted(i for i, token in stated.items() if token.content):
        token = stated[token_id]
        # A token that is known keeps its id of tokenizer.json, and gets the flags of this file.
        if token.content not in ids:
            if token_id != next_id or next_id in taken:
                raise ValueError(
                    f"{where} has the id {token_id} for {quoted(token.content)}, but the next free "
                    f"id of the tokenizer.json beside it is {next_id}."
                )
            ids[token.content] = next_id
            next_id += 1
        additions[ids[token.content]] = token
    # Special tokens that only have a name. Their ids end where the embedding does.
    size = _vocab_size(directory)
    ends = {token.content for token in _special(files, "eos_token")}
    for token in specials:
        if token.content not in ids:
            if token.content in ends or next_id in taken or next_id >= size:
                continue
            ids[token.content] = next_id
            next_id += 1
        # Flags of tokenizer.json stay, but its token becomes special where no decoder says all.
        flags = {x: value for x, value in objects.get(token.content, {}).items() if x in _FLAGS}
        if not (flags and (flags.get("special") or _DECODER in files[-1])):
            flags = {**token.flags, **flags, "special": True}
            # Tokens that a file gave an id above have the flags that it gave them.
            additions.setdefault(ids[token.content], Token(token.content, flags))
    return additions


def _vocab_size(directory: Path) -> int:
    """Returns the ids of the model beside a tokenizer; where none is known, all that may be."""
    raw = read_json(directory / CONFIG_FILE, optional=True)
    # As its family has it: in an object of text, or as a default that the file leaves out.
    with contextlib.suppress(ValueError):
        return parse_config(raw).vocab_size
    # of a model that is not read here; who reads the model says why
    size = raw.get("vocab_size")
    return size if is_token_id(size) else MAX_INT


def _files(directory: Path) -> list[JsonObject]:
    """Returns where special tokens are named; the last one is `tokenizer_config.json`."""
    config = read_json(directory / TOKENIZER_CONFIG_FILE, optional=True)
    if _DECODER in config:
        return [config]
    return [read_json(directory / SPECIAL_TOKENS_MAP_FILE, optional=True), config]


def _special(files: list[JsonObject], name: str) -> list[Token]:
    """Returns the token or tokens of a name, from the first file that has it; none if none does.

    A file that has null under the name counts, and hides what another file says.
    """
    raw = next((file for file in files if name in file), files[-1])
    value = raw.given(name, [])
    if name in _LISTS:
        is_list = isinstance(value, (list, dict))
        raw.require(is_list, name, "which is not a list or an object")
        values = list(value.values()) if isinstance(value, dict) else value
    else:
        values = [] if name not in raw or raw[name] is None else [value]
    tokens = [_token(raw, name, item) for item in values]
    # Without flags, a special token is looked for in the text as it is, before it is normalized.
    return [Token(x.content, {"normalized": False, **x.flags, "special": True}) for x in tokens]


def _stated(
    directory: Path, config: JsonObject, names: set[str], added: Container[int]
) -> tuple[str, dict[int, Token]]:
    """Returns the tokens that a file adds by id, and what messages call it.

    Args:
      config: the object of `tokenizer_config.json`.
      names: texts of special tokens, which need not say here that they are special.
      added: ids of tokens that `tokenizer.json` adds.
    """
    tokens = {}
    if _DECODER in config:
        raw = config.nested(_DECODER)
        for key in raw:
            # Ids are keys, so they are text. Of more than 4,300 digits `int` makes no number.
            token_id = int(key) if key.isdecimal() and len(key) <= 10 else -1
            raw.require(is_token_id(token_id), key, "whose key is no token id")
            token = _token(raw, key, raw[key])
            is_special = token.flags.get("special", False) or token.content in names
            tokens[token_id] = Token(token.content, {**token.flags, "special": is_special})
        return raw.where, tokens
    # The older file has ids by text, without flags; what tokenizer.json has under an id stays.
    raw = read_json(directory / ADDED_TOKENS_FILE, optional=True)
    for content, token_id in raw.items():
        raw.require(is_token_id(token_id), content, "which is no token id")
        if token_id not in added:
            is_special = content in names
            flags = {"normalized": not is_special, "special": is_special}
            tokens[token_id] = Token(content, flags)
    return raw.where, tokens


def _token(raw: JsonObject, key: str, value: JsonValue) -> Token:
    """Returns a token with its flags, from a text, or from an object as `AddedToken` is stored."""
    fields = value if isinstance(value, dict) else {"content": value}
    raw.require(isinstance(fields.get("content"), str), key, "which is not text")
    flags = {flag: fields[flag] for flag in _FLAGS if flag in fields}
    are_flags = all(isinstance(flag, bool) for flag in flags.values())
    raw.require(are_flags, key, "whose flags are not true or false")
    return Token(fields["content"], flags)
