"""Tokenizers of checkpoints: ids and text of `transformers`, streams that never break a letter."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tokenizers
from formats.checkpoints import CHECKPOINTS, NAMES, NUM_TOKEN_IDS, copy, edit_json, expected
from hypothesis import strategies as st
from tokenizers import decoders, models
from upper_floor import count_token_ids

from jax_specdec import lm

pytestmark = pytest.mark.newest

TOKENIZER = lm.load_tokenizer(CHECKPOINTS / "qwen2")
TEXT = "Prüfung 草稿 🙂 fertig!"


def in_pieces(stream: lm.TextStream, token_ids: Any) -> list[str]:
    return [*(stream.decode([token_id]) for token_id in token_ids), stream.decode([], final=True)]


# Text and ids


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_text_are_those_of_transformers(name: str) -> None:
    tokenizer, wanted = lm.load_tokenizer(CHECKPOINTS / name), expected(name)
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
    assert lm.load_tokenizer(tmp_path).encode(TEXT) == TOKENIZER.encode(TEXT)


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


def sentencepiece_like() -> lm.Tokenizer:
    """Words begin with ▁, other characters fall back to bytes, as in Llama 2."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "\ufffd", "日"]
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
    return lm.Tokenizer(Path("tokenizer.json"), tokenizer, ())


def of_bytes(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


def of_words(decoder: Any, *words: str) -> lm.Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["<s>", *words])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return lm.Tokenizer(Path("tokenizer.json"), tokenizer, ())


def byte_level() -> lm.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER.path))
    tokenizer.add_tokens(["\ufffd", "日本"])
    return lm.Tokenizer(Path("tokenizer.json"), tokenizer, ())


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece_like()
TOKENIZERS = {
    "byte level": BYTE_LEVEL,
    "byte fallback": SENTENCEPIECE,
    "metaspace": of_words(decoders.Metaspace(), "▁", "▁a", "b", "\ufffd"),
    "word pieces": of_words(decoders.WordPiece(), "a", "##b", ".", "##", "\ufffd"),
    "suffix": of_words(decoders.BPEDecoder(), "a", "b</w>", "</w>"),
    "no decoder": of_words(None, "a", "b", ""),
}


def token_ids_of(tokenizer: lm.Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids, known and unknown, and the bytes of characters, maybe cut."""
    size = tokenizer.library_tokenizer.get_vocab_size()
    one = st.lists(st.integers(0, size + 1), max_size=4) | st.just([size - 2, 0])
    to_ids = {id(SENTENCEPIECE): of_bytes, id(BYTE_LEVEL): lambda x: BYTE_LEVEL.encode(x)[1:]}
    if (encode := to_ids.get(id(tokenizer))) is not None:
        characters = st.text("aé日🙂", max_size=6).map(encode)
        one |= characters | characters.map(lambda ids: ids[:-1])
    return st.lists(one, max_size=8).map(lambda parts: [x for part in parts for x in part])


@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.given(data=st.data())
def test_the_pieces_of_any_ids_are_what_they_add_to_the_prompt(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = data.draw(token_ids_of(tokenizer), label="prompt")
    token_ids = data.draw(token_ids_of(tokenizer), label="token ids")
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *token_ids])
    hypothesis.assume(whole.startswith(before))  # otherwise the prompt ends inside a character
    stream, pieces, rest = tokenizer.stream(prompt), [], token_ids
    while rest:
        count = data.draw(st.integers(1, 5), label="count")
        pieces.append(stream.decode(rest[:count]))
        if stream.is_complete:
            done = [*prompt, *token_ids[: len(token_ids) - len(rest) + count]]
            assert before + "".join(pieces) == tokenizer.decode(done)
        rest = rest[count:]
    pieces.append(stream.decode([], final=True))
    assert before + "".join(pieces) == whole and stream.is_complete


@pytest.mark.parametrize("text", ["🙂", "🙂🙂", "é🙂", "日本語", "a🙂🙂🙂", "🙂\n🙂", "👨‍👩‍👧‍👦"])
def test_characters_of_byte_tokens_arrive_as_they_are(text: str) -> None:
    token_ids = of_bytes(text)
    assert "".join(in_pieces(SENTENCEPIECE.stream(), token_ids)) == text
    assert "".join(in_pieces(lm.TextStream(SENTENCEPIECE.decode), token_ids)) == text
    broken = "\ufffd" * (len(token_ids) - 1)  # one for each byte of the run
    assert "".join(in_pieces(SENTENCEPIECE.stream(), token_ids[:-1])) == broken


def test_no_more_than_four_characters_of_a_prompt_are_decoded_again() -> None:
    counts = []

    def decode(token_ids: list[int]) -> str:
        counts.append(len(token_ids))
        return lm.decode_bytes(token_ids)

    stream = lm.TextStream(decode, lm.encode_bytes("🙂" * 40))
    counts.clear()
    assert "".join(in_pieces(stream, lm.encode_bytes("🙂"))) == "🙂"
    assert max(counts) == 5 * 4


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_prompt_may_end_inside_a_character(count: int) -> None:
    for tokenizer, token_ids in (
        (SENTENCEPIECE, of_bytes("日🙂")),
        (SENTENCEPIECE, [257, *of_bytes("🙂")]),
        (BYTE_LEVEL, BYTE_LEVEL.encode("x🙂")),
    ):
        prompt, rest = token_ids[:-count], token_ids[-count:]
        assert "".join(in_pieces(tokenizer.stream(prompt), rest)) == "🙂"
        end = [tokenizer.library_tokenizer.token_to_id("b")]
        assert "".join(in_pieces(tokenizer.stream(prompt), end)) == "b"  # it is never complete


def test_a_long_run_of_byte_tokens_comes_out_before_its_end() -> None:
    text = "日本語" * 40
    pieces = in_pieces(SENTENCEPIECE.stream(of_bytes(text)), of_bytes(text))
    assert "".join(pieces) == text
    for count in range(len(pieces)):
        assert 3 * len("".join(pieces[:count])) >= count - 68  # 64 bytes and one character
    broken = "".join(in_pieces(SENTENCEPIECE.stream(), [*of_bytes(text), 1 + 0x80, 258]))
    kept = broken.rstrip("b").rstrip("\ufffd")
    assert text.startswith(kept) and len(kept) >= len(text) - 22
    assert broken == kept + "\ufffd" * (3 * (len(text) - len(kept)) + 1) + "b"


class Counting:
    """A library's tokenizer that notes how many ids it decodes."""

    def __init__(self, tokenizer: lm.Tokenizer) -> None:
        self.library_tokenizer, self.counts = tokenizer.library_tokenizer, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library_tokenizer, name)

    def decode(self, token_ids: list[int]) -> str:
        self.counts.append(len(token_ids))
        return self.library_tokenizer.decode(token_ids)


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_token_costs_no_more_after_many_that_are_no_text(name: str, is_function: bool) -> None:
    tokenizer = TOKENIZERS[name]
    library = tokenizer.library_tokenizer
    broken = BYTE_LEVEL.encode("日")[-1] if tokenizer is BYTE_LEVEL else 1 + 0x80
    for token_id in (library.token_to_id("\ufffd"), broken, 0, library.get_vocab_size() + 1):
        counting = Counting(tokenizer)
        counted = lm.Tokenizer(tokenizer.path, counting, ())
        stream = lm.TextStream(counted.decode if is_function else counted, [token_id] * 300)
        counting.counts.clear()
        pieces = in_pieces(stream, [token_id] * 300)
        assert max(counting.counts) <= (300 if is_function else 160), token_id
        assert max(counting.counts[-20:]) <= 70, token_id
        assert "".join(pieces) == tokenizer.decode([token_id] * 300)


def test_a_decoder_that_panics_is_an_error_in_a_sentence() -> None:
    panics = of_words(decoders.Strip(" ", 0, 1), "", "a")  # of an empty token
    stream = panics.stream()
    for decode in (panics.decode, stream.decode):
        with pytest.raises(ValueError, match=r"^tokenizer.json cannot decode the ids: .*\.$"):
            decode([1])
    assert stream.decode([2], final=True) == "a"


def test_bytes_of_tokens_joined_are_the_text() -> None:
    for tokenizer, token_ids in (
        (BYTE_LEVEL, BYTE_LEVEL.encode(TEXT)),
        (SENTENCEPIECE, of_bytes(TEXT)),
    ):
        assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == TEXT
    for token_id, wanted in {257: b" a", 1 + 0x20: b" ", 0: b"", 999: b""}.items():
        assert SENTENCEPIECE.token_bytes(token_id) == wanted
    replacement = BYTE_LEVEL.library_tokenizer.token_to_id("\ufffd")
    assert BYTE_LEVEL.token_bytes(replacement).decode() == "\ufffd"


def test_the_space_before_a_word_stays_inside_a_text() -> None:
    tokenizer, a, b = sentencepiece_like(), 257, 258
    assert in_pieces(tokenizer.stream(), [a, b, a, 0, a]) == ["a", "b", " a", "", " a", ""]
    assert in_pieces(tokenizer.stream([0, a]), [a, b]) == [" a", "b", ""]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lm.TextStream("tokenizer.json"), "tokenizer must be a Tokenizer or a function"),
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
    assert lm.load_tokenizer(directory).stop_token_ids == (281, 282)
    edit_json(directory / "generation_config.json", eos_token_id=7)
    assert lm.load_tokenizer(directory).stop_token_ids == (7,)
    edit_json(directory / "config.json", eos_token_id=9)
    edit_json(directory / "generation_config.json", eos_token_id=...)
    assert lm.load_tokenizer(directory).stop_token_ids == (9,)
    (directory / "generation_config.json").unlink()
    assert lm.load_tokenizer(directory).stop_token_ids == (9,)
    (directory / "config.json").unlink()
    assert lm.load_tokenizer(directory).stop_token_ids == ()


# Mistakes


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json does not exist; a checkpoint"):
        lm.load_tokenizer(tmp_path)


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="^tokenizers is not installed: .* the extra lm, pip"):
        lm.load_tokenizer(CHECKPOINTS / "qwen2")
    assert lm.load_huggingface(CHECKPOINTS / "qwen2").model.vocab_size == 288


def changed(tmp_path: Path, change: Callable[[tokenizers.Tokenizer], Any]) -> lm.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER.path))
    change(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return lm.load_tokenizer(tmp_path)


def test_tokenizers_with_the_same_ids_are_the_same(tmp_path: Path) -> None:
    TOKENIZER.check_same_vocabulary(changed(tmp_path, lambda tokenizer: None))


def test_a_tokenizer_may_know_more_than_the_other(tmp_path: Path) -> None:
    longer = changed(tmp_path, lambda tokenizer: tokenizer.add_tokens(["<think>"]))
    TOKENIZER.check_same_vocabulary(longer)
    assert longer.has_same_vocabulary(TOKENIZER)


def test_the_first_id_that_differs_is_named() -> None:
    ours, theirs = (
        lm.Tokenizer(Path("x"), tokenizers.Tokenizer(models.WordLevel(vocab)), ())
        for vocab in ({"a": 0, "b": 1}, {"a": 1, "b": 0, "c": 2})
    )
    with pytest.raises(ValueError, match="token id 0 is 'a' in the first and 'b' in the second"):
        ours.check_same_vocabulary(theirs)
    assert not theirs.has_same_vocabulary(ours)
