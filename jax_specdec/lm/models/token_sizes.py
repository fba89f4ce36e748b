"""How much text a token can stand for, which bounds the tokens of a text before it is tokenized."""

import json
import math
from typing import Any

from jax_specdec.lm.models.tokenizer import Tokenizer

_NFC = 4
"""The most by which NFC shortens a text in UTF-8: 3.5 times, for U+0390 from U+1FBE and accents."""

_KEEPING = {"Prepend", "NFC", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
"""Normalizers and pre-tokenizers that lose nothing of a text; NFC only makes it shorter."""


def most_bytes_per_token(tokenizer: Tokenizer) -> float:
    """The most bytes of a text, in UTF-8, that one of its tokens stands for.

    It is known for byte-pair encoding that has a token for every byte and drops nothing, as Llama,
    Qwen, Mistral and Gemma use; infinite for any other tokenizer.

    Example:
      >>> import tokenizers
      >>> from pathlib import Path
      >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"no": 0, "yes": 1}))
      >>> most_bytes_per_token(Tokenizer(Path("tokenizer.json"), words, stop_token_ids=()))
      inf
    """
    fields = json.loads(tokenizer.library_tokenizer.to_str())
    model, added = fields["model"], fields["added_tokens"]
    steps = _flat(fields["normalizer"], "normalizers")
    steps += _flat(fields["pre_tokenizer"], "pretokenizers")
    is_known = _has_all_bytes(model, steps) and all(map(_keeps, steps))
    if not is_known or any(one["lstrip"] or one["rstrip"] for one in added):
        return math.inf
    texts = *model["vocab"], *(one["content"] for one in added)
    shortening = _NFC if any(step["type"] == "NFC" for step in steps) else 1
    return shortening * max(len(text.encode()) for text in texts)


def _flat(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a sequence, which may be nested."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [one for part in step[inner] for one in _flat(part, inner)]


def _keeps(step: dict[str, Any]) -> bool:
    """Whether all of a text is still there after a normalizer or a pre-tokenizer."""
    if step["type"] in {"Split", "Punctuation"}:
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        old = step["pattern"].get("String")
        return old is not None and len(old.encode()) <= len(step["content"].encode())
    return step["type"] in _KEEPING


def _has_all_bytes(model: dict[str, Any], steps: list[dict[str, Any]]) -> bool:
    """Whether a model has a token for each byte, so that nothing is unknown to it."""
    if model["type"] != "BPE":
        return False
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        from tokenizers import pre_tokenizers

        return set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
    return bool(model["byte_fallback"]) and all(
        f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)
    )
