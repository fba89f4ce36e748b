"""Tokenizers of checkpoints: ids and text of `transformers`, streams that never break a letter."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models

import jax_specdec as sd
from jax_specdec._src.models.tokenizer import count_token_ids

from .checkpoints import CHECKPOINTS, NAMES, NUM_TOKEN_IDS, copy, edit_json, expected

pytestmark = pytest.mark.newest

TOKENIZER = sd.load_tokenizer(CHECKPOINTS / "qwen2")
TEXT = "Prüfung 草稿 🙂 fertig!"


def in_pieces(stream: sd.TextStream, token_ids: Any) -> list[str]:
    return [*(stream.decode([token_id]) for token_id in token_ids), stream.decode([], final=True)]


# Text and ids


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_text_are_those_of_transformers(name: str) -> None:
    tokenizer, wanted = sd.load_tokenizer(CHECKPOINTS / name), expected(name)
    assert tokenizer.encode(str(wanted["text"])) == wanted["token_ids"].tolist()
    assert tokenizer.encode(str(wanted["prompt"])) == wanted["prompt_token_ids"].tolist()
    assert tokenizer.decode(wanted["greedy_token_ids"]) == str(wanted["greedy_text"])


def test_special_tokens_begin_a_text_and_have_none() -> None:
    begin = TOKENIZER.library_tokenizer.token_to_id("<|begin|>")
    assert TOKENIZER.encode(TEXT)[0] == begin
    assert TOKENIZER.decode(TOKENIZER.encode(TEXT)) == TEXT


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert TOKENIZER.encode("a\udc80") == TOKENIZER.encode("a?")


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_what_is_no_id_has_no_text(token_id: int) -> None:
    stream = TOKENIZER.stream()
    for decode in (TOKENIZER.decode, stream.decode):
        with pytest.raises(ValueError, match=rf"^token_ids must be ids, in .*{token_id}$"):
            decode([0, token_id])
    assert stream.decode(TOKENIZER.encode(TEXT), final=True) == TEXT  # nothing was kept


def test_the_file_does_not_cut_or_pad_a_text(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER.path))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert sd.load_tokenizer(tmp_path).encode(TEXT) == TOKENIZER.encode(TEXT)


def test_ids_are_counted_up_to_the_last_that_is_known(tmp_path: Path) -> None:
    assert count_token_ids(TOKENIZER.path) == NUM_TOKEN_IDS
    assert TOKENIZER.library_tokenizer.get_vocab_size() == NUM_TOKEN_IDS
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0))
    unigram.save(str(tmp_path / "tokenizer.json"))
    assert count_token_ids(tmp_path / "tokenizer.json") == 2
    with_hole = '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "b"}]}'
    (tmp_path / "tokenizer.json").write_text(with_hole)
    assert count_token_ids(tmp_path / "tokenizer.json") == 8


# Streams


def test_a_letter_comes_as_soon_as_it_is_complete() -> None:
    token_ids = TOKENIZER.encode(TEXT)[1:]
    stream = TOKENIZER.stream()
    pieces = in_pieces(stream, token_ids)
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""  # nothing was left for the end
    for count in range(len(token_ids)):
        complete = TOKENIZER.decode(token_ids[: count + 1]).rstrip("\ufffd")
        assert "".join(pieces[: count + 1]) == complete


def test_an_incomplete_letter_is_replaced_at_the_end() -> None:
    first = TOKENIZER.encode("🙂")[1:2]
    assert in_pieces(TOKENIZER.stream(), first) == ["", "\ufffd"]


@hypothesis.given(
    st.lists(st.integers(0, NUM_TOKEN_IDS - 1), max_size=40), st.text("aü草🙂", max_size=5)
)
def test_the_pieces_of_any_ids_are_their_text(token_ids: list[int], prompt: str) -> None:
    prompt_ids = TOKENIZER.encode(prompt)
    pieces = in_pieces(TOKENIZER.stream(prompt_ids), token_ids)
    assert prompt + "".join(pieces) == TOKENIZER.decode([*prompt_ids, *token_ids])


def sentencepiece_like() -> sd.Tokenizer:
    """Words begin with ▁, other characters fall back to bytes, as in Llama 2."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return sd.Tokenizer(Path("tokenizer.json"), tokenizer, ())


def test_the_space_before_a_word_stays_inside_a_text() -> None:
    tokenizer, a, b = sentencepiece_like(), 257, 258
    assert in_pieces(tokenizer.stream(), [a, b, a, 0, a]) == ["a", "b", " a", "", " a", ""]
    assert in_pieces(tokenizer.stream([0, a]), [a, b]) == [" a", "b", ""]


def test_bytes_that_stand_for_a_letter_are_held_back() -> None:
    smile = [1 + byte for byte in "🙂".encode()]
    pieces = in_pieces(sentencepiece_like().stream(), [257, *smile, 258])
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_a_run_of_broken_bytes_comes_out_before_the_end() -> None:
    pieces = in_pieces(TOKENIZER.stream(), TOKENIZER.encode("🙂")[1:2] * 50)
    assert "".join(pieces) == "\ufffd" * 50
    assert len("".join(pieces[:-1])) >= 47


def test_a_tokenizer_and_its_decode_stream_alike() -> None:
    token_ids = np.array(TOKENIZER.encode(TEXT)[1:])
    for decoder in (TOKENIZER, TOKENIZER.decode):
        assert "".join(in_pieces(sd.TextStream(decoder), token_ids)) == TEXT


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sd.TextStream("tokenizer.json"), "tokenizer must be a Tokenizer or a function"),
        (lambda: TOKENIZER.stream([0.5]), "token_ids must be a list of ints"),
        (lambda: TOKENIZER.stream().decode(np.array([0.5])), "token_ids must be a list of ints"),
    ],
)
def test_what_no_stream_is_made_of_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_the_repr_of_a_tokenizer_is_short() -> None:
    assert repr(TOKENIZER) == f"Tokenizer(path={TOKENIZER.path!r}, stop_token_ids=(281, 282))"


# What ends a text


def test_generation_config_says_what_ends_a_text_or_else_config(tmp_path: Path) -> None:
    directory = copy("qwen2", tmp_path / "qwen2")
    assert sd.load_tokenizer(directory).stop_token_ids == (281, 282)
    edit_json(directory / "generation_config.json", eos_token_id=7)
    assert sd.load_tokenizer(directory).stop_token_ids == (7,)
    edit_json(directory / "config.json", eos_token_id=9)
    edit_json(directory / "generation_config.json", eos_token_id=...)
    assert sd.load_tokenizer(directory).stop_token_ids == (9,)
    (directory / "generation_config.json").unlink()
    assert sd.load_tokenizer(directory).stop_token_ids == (9,)
    (directory / "config.json").unlink()
    assert sd.load_tokenizer(directory).stop_token_ids == ()


# Mistakes


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json does not exist; a checkpoint"):
        sd.load_tokenizer(tmp_path)


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ImportError, match=r"tokenizers library, .* pip install tokenizers, or the extra hf"
    ):
        sd.load_tokenizer(CHECKPOINTS / "qwen2")
    assert sd.load_huggingface(CHECKPOINTS / "qwen2").model.vocab_size == 288


def changed(tmp_path: Path, change: Callable[[tokenizers.Tokenizer], Any]) -> sd.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER.path))
    change(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return sd.load_tokenizer(tmp_path)


def test_tokenizers_with_the_same_ids_are_the_same(tmp_path: Path) -> None:
    TOKENIZER.check_same_vocabulary(changed(tmp_path, lambda tokenizer: None))


def test_the_first_id_that_differs_is_named(tmp_path: Path) -> None:
    longer = changed(tmp_path, lambda tokenizer: tokenizer.add_tokens(["<think>"]))
    first, second = TOKENIZER.path, tmp_path / "tokenizer.json"
    message = f"{first} and {second} differ: token id 283 is unknown in the first and '<think>' in"
    with pytest.raises(ValueError, match=message):
        TOKENIZER.check_same_vocabulary(longer)
    with pytest.raises(ValueError, match="283 is '<think>' in the first and unknown in the second"):
        longer.check_same_vocabulary(TOKENIZER)


def test_a_swap_of_ids_is_named() -> None:
    ours, theirs = (
        sd.Tokenizer(Path("x"), tokenizers.Tokenizer(models.WordLevel(vocab)), ())
        for vocab in ({"a": 0, "b": 1}, {"a": 1, "b": 0})
    )
    with pytest.raises(ValueError, match="token id 0 is 'a' in the first and 'b' in the second"):
        ours.check_same_vocabulary(theirs)
