"""From updates to the text of a choice: stop strings, `min_tokens`, the bytes of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from upper_floor import ChoiceText, Limits, Piece, Vocabulary, loading

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

SPECIAL = ["<sp>", "<sp>more"]


def byte_fallback() -> lm.Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "\ufffd", "xy"]
    library = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, []))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    library.add_special_tokens(SPECIAL)
    return lm.Tokenizer(Path("tokenizer.json"), library, ())


def byte_level() -> lm.Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    ((smile, _),) = split("🙂")  # a letter for each byte
    parts = [smile[:2], smile[2:], "a" + smile[:1], "xy"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *parts]
    library = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    return lm.Tokenizer(Path("tokenizer.json"), library, ())


TOKENIZERS = {"byte fallback": byte_fallback(), "byte level": byte_level()}


def ids_of(tokenizer: lm.Tokenizer, *tokens: str | bytes) -> list[int]:
    """Ids of tokens by their names, and of bytes."""
    find = tokenizer.library_tokenizer.token_to_id
    if find("<0x00>") is not None:
        of_byte = [find(f"<0x{byte:02X}>") for byte in range(256)]
    else:
        own = {tokenizer.token_bytes(i): i for i in range(256)}
        of_byte = [own[bytes([byte])] for byte in range(256)]
    found: list[int] = []
    for token in tokens:
        found += [find(token)] if isinstance(token, str) else [of_byte[byte] for byte in token]
    return found


def choice_text(
    tokenizer: lm.Tokenizer, *stops: str, prompt: Any = (), min_tokens: int = 0
) -> ChoiceText:
    size = tokenizer.library_tokenizer.get_vocab_size()
    words = Vocabulary(loading.TargetText(tokenizer, size, (), tokenizer.stream, 64), Limits())
    return ChoiceText(tokenizer.stream(prompt), words, stops, 1, min_tokens)


def answer(text: ChoiceText, token_ids: list[int], sizes: Iterable[int] = ()) -> Piece:
    """All pieces of a choice in one; `sizes` are those of its updates, 1 if there are no more."""
    whole, rest = Piece("", [], None), list(token_ids)
    for count in itertools.chain(sizes, itertools.repeat(1)):
        now, rest = rest[:count], rest[count:]
        top = np.array(now, np.int32)[:, None]
        zeros = np.zeros(len(now), np.float32)
        numbers = sd.TokenLogprobs(logprobs=zeros, top_token_ids=top, top_logprobs=zeros[:, None])
        update = lm.RequestUpdate(0, now, None if rest else "length", logprobs=numbers)
        piece = text.add(update)
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.finish_reason = piece.finish_reason
        if text.is_done:
            return whole
        assert whole.text.encode().startswith(joined(whole))  # tokens never come before their text
    raise AssertionError


def joined(piece: Piece) -> bytes:
    return b"".join(bytes(one["bytes"]) for one in piece.tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_string_may_be_a_special_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = ids_of(
        tokenizer, b"one", "<sp>", b"two", "<sp>more", "xy", b"\xe6\x97", "<sp>", b"b"
    )
    for stop, wanted in {
        "<sp>": "one",
        "<sp>more": "onetwo",
        "e<sp>t": "on",
        "<sp>twoX": None,
        "<sp>morexy": "onetwo",
        "sp": None,  # a part of a special token is in no text
        ">": None,
        "two": "one",  # what is not asked for is in no text
        "onetwo": "",
    }.items():
        found = answer(choice_text(tokenizer, stop, "never"), token_ids)
        whole = tokenizer.decode(token_ids)
        assert (found.text, found.finish_reason) == (
            (whole, "length") if wanted is None else (wanted, "stop")
        )
        assert joined(found) == found.text.encode()


def test_a_stop_string_may_spell_a_special_token_in_letters() -> None:
    tokenizer = TOKENIZERS["byte level"]
    found = answer(choice_text(tokenizer, "<sp>"), ids_of(tokenizer, b"one<sp>two"))
    assert (found.text, found.finish_reason) == ("one", "stop")


@pytest.mark.parametrize("sizes", [[], [2, 5], [9]])
def test_min_tokens_holds_for_stop_strings(sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = ids_of(tokenizer, b"ab", "<sp>", b"cabab", "<sp>", b"c")
    for stop, min_tokens, wanted, count in (
        ("ab", 0, "", 2),
        ("ab", 1, "", 2),  # complete with the second token
        ("ab", 2, "abc", 6),
        ("<sp>", 2, "ab", 3),
        ("<sp>", 3, "abcabab", 9),
        ("c", 4, "abcabab", 10),
        ("ab", 8, "abcababc", 10),
        ("c", 10, "abcababc", 10),
    ):
        text = choice_text(tokenizer, stop, min_tokens=min_tokens)
        assert (answer(text, token_ids, sizes).text, text.num_tokens) == (wanted, count)


@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.given(data=st.data())
def test_the_bytes_of_tokens_are_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.library_tokenizer.get_vocab_size()
    characters = st.text("aé日🙂 ", max_size=5).map(lambda x: ids_of(tokenizer, x.encode()))
    parts = st.lists(characters | st.lists(st.integers(0, size), max_size=3), max_size=6)
    prompt = data.draw(characters, label="prompt")
    token_ids = [x for part in data.draw(parts, label="token ids") for x in part] or [0]
    stops = data.draw(st.sampled_from([(), ("é",), ("日🙂", "y"), ("<sp>", "a "), ("\ufffd",)]))
    sizes = data.draw(st.lists(st.integers(1, 5)), label="sizes")
    found = answer(choice_text(tokenizer, *stops, prompt=prompt), token_ids, sizes)
    assert joined(found) == found.text.encode()
    for i, one in enumerate(found.tokens):
        before = b"".join(bytes(x["bytes"]) for x in found.tokens[:i])
        assert one["offset"] == len(before.decode(errors="ignore"))
    if not stops:
        assert len(found.tokens) == len(token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_are_parts_of_a_character_have_their_own_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    found = answer(choice_text(tokenizer), ids_of(tokenizer, "🙂日".encode(), "b", b"\xf0\x9f"))
    own = [*"🙂日b".encode()]
    assert [one["bytes"] for one in found.tokens[:8]] == [[byte] for byte in own]
    assert [one["offset"] for one in found.tokens] == [0, 0, 0, 0, 1, 1, 1, 2, 3, 3]
    assert found.tokens[0]["top_logprobs"][0]["bytes"] == [0xF0]
    assert joined(found) == found.text.encode()  # with U+FFFD for what is broken


def test_the_space_that_a_text_loses_is_in_no_token() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = ids_of(tokenizer, "▁a", "▁a")
    for prompt, wanted in {(): "a a", (257,): " a a"}.items():
        found = answer(choice_text(tokenizer, prompt=prompt), token_ids)
        assert found.text == wanted and joined(found) == wanted.encode()
        assert [one["token"] for one in found.tokens] == [" a", " a"]


def test_a_token_that_a_stop_string_cuts_has_bytes_up_to_there() -> None:
    tokenizer = TOKENIZERS["byte level"]
    found = answer(choice_text(tokenizer, "y"), ids_of(tokenizer, b"a", "xy", b"b"))
    assert [(one["token"], one["bytes"]) for one in found.tokens] == [("a", [97]), ("xy", [120])]


@hypothesis.given(
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=8),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_however_a_text_is_cut(pieces: list[str], stops: Any) -> None:
    whole = "".join(pieces)
    ends = [n for n in range(len(whole) + 1) if any(whole[:n].endswith(stop) for stop in stops)]
    truth, reason = whole, "length"
    if ends:  # the first end; of several stop strings that end there, the longest
        before = [whole[: ends[0]].removesuffix(s) for s in stops if whole[: ends[0]].endswith(s)]
        truth, reason = min(before, key=len), "stop"

    class Words:
        special_tokens: dict[int, str] = {}

        def decode(self, token_ids: list[int], *, final: bool = False) -> str:
            return "".join(pieces[i] for i in token_ids)

    words: Any = Words()
    text = ChoiceText(words, words, stops)
    shown = ""
    for token_ids, end in [*(([i], None) for i in range(len(pieces))), ([], "length")]:
        piece = text.add(lm.RequestUpdate(0, token_ids, end))
        shown += piece.text
        assert truth.startswith(shown), "what was sent stays"
        if piece.finish_reason:
            break
    assert (shown, piece.finish_reason) == (truth, reason)
