"""The least number of tokens that a text can have, known before it is tokenized."""

import json
import math
import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from upper_floor import most_bytes_per_token, token_sizes

from jax_specdec import lm

from .checkpoints import CHECKPOINTS, NAMES

pytestmark = pytest.mark.newest

PIECES = ["a", "ab", "def ", " ", "   ", "\n", "1", "<x>", "<0x41>", "日本", "é", "e\u0301", "🙂"]
PIECES += ["\u1fbe\u0308\u0301", "\u1100\u1161\u11a8", "\u212a", "\u1fef", "\0", "\ufffd", "▁"]


def of_bytes(**model: Any) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: a character for each byte, and some merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "ab", "\u0120\u0120", "\u0120ab"]
    merges = [("a", "b"), ("\u0120", "\u0120"), ("\u0120", "ab")]
    own = BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, **model)
    tokenizer = tokenizers.Tokenizer(own)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def with_fallback(first: int = 0) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: what is not in the vocabulary is tokens of bytes."""
    words = ["<unk>", "<s>", "▁", "a", "b", "ab", "▁ab", "日"]
    words += [f"<0x{byte:02X}>" for byte in range(first, 256)]
    vocab, merges = {word: i for i, word in enumerate(words)}, [("a", "b"), ("▁", "ab")]
    own = BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(own)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = begin
    return tokenizer


def changed(
    name: str, value: Any, make: Callable[[], tokenizers.Tokenizer] = of_bytes
) -> tokenizers.Tokenizer:
    tokenizer = make()
    setattr(tokenizer, name, value)
    return tokenizer


def added(**fields: Any) -> tokenizers.Tokenizer:
    tokenizer = of_bytes()
    tokenizer.add_special_tokens([AddedToken("<x>", special=True, **fields)])
    return tokenizer


def split(behavior: str) -> tokenizers.Tokenizer:
    steps = [pre_tokenizers.Split(" ", behavior), pre_tokenizers.ByteLevel(use_regex=False)]
    return changed("pre_tokenizer", pre_tokenizers.Sequence(steps))


KNOWN: dict[str, tuple[tokenizers.Tokenizer, int]] = {
    "bytes": (of_bytes(), 4),
    "NFC": (changed("normalizer", normalizers.NFC()), 16),
    "digits": (
        changed(
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel()]),
        ),
        4,
    ),
    "split": (split("isolated"), 4),
    "an added token": (added(), 4),
    "fallback": (with_fallback(), 6),
}
UNKNOWN: dict[str, tokenizers.Tokenizer] = {
    "words": tokenizers.Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")),
    "pieces of words": tokenizers.Tokenizer(WordPiece({"a": 0, "?": 1}, unk_token="?")),
    "Unigram": tokenizers.Tokenizer(Unigram([("?", 0.0), ("a", -1.0)], unk_id=0)),
    "no tokens of bytes": tokenizers.Tokenizer(BPE({"a": 0}, [])),
    "a byte missing": with_fallback(1),
    "a suffix": of_bytes(end_of_word_suffix="</w>"),
    "Strip": changed("normalizer", normalizers.Strip()),
    "Replace by less": changed("normalizer", normalizers.Replace("ab", "")),
    "Replace of a pattern": changed("normalizer", normalizers.Replace(tokenizers.Regex("a+"), "b")),
    "blanks dropped": changed(
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]),
    ),
    "split and dropped": split("removed"),
    "blanks before a token": added(lstrip=True),
    "blanks after a token": added(rstrip=True),
}


def of_library(tokenizer: tokenizers.Tokenizer) -> lm.Tokenizer:
    return lm.Tokenizer(Path("tokenizer.json"), tokenizer, stop_token_ids=())


@pytest.mark.parametrize("name", [*KNOWN, *NAMES])
def test_no_text_has_fewer_tokens_and_ids_are_those_of_the_librarys_encode(name: str) -> None:
    if name in KNOWN:
        library, most = KNOWN[name]
        tokenizer = of_library(library)
        assert most_bytes_per_token(tokenizer) == most
    else:
        tokenizer = lm.load_tokenizer(CHECKPOINTS / name)
        library, most = tokenizer.library_tokenizer, most_bytes_per_token(tokenizer)
        vocab = json.loads(library.to_str())["model"]["vocab"]
        assert max(map(len, vocab)) <= most < math.inf
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choices(PIECES, k=rng.randrange(20)))
        for special in (True, False):
            ids = library.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            assert len(ids) * most >= len(text.encode())


def test_nfc_makes_no_text_much_shorter() -> None:
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    forms = {one: unicodedata.normalize("NFD", one) for one in characters}
    longest = {one: len(one.encode()) for one in characters}
    for one, form in forms.items():
        if len(form) == 1:
            longest[form] = max(longest[form], len(one.encode()))
    composed = (x for x in characters if unicodedata.normalize("NFC", x) == x)
    ratios = {x: sum(map(longest.__getitem__, forms[x])) / len(x.encode()) for x in composed}
    assert 3 < max(ratios.values()) <= token_sizes._NFC


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_a_token_may_stand_for_any_text_no_bound_is_known(name: str) -> None:
    assert most_bytes_per_token(of_library(UNKNOWN[name])) == math.inf
