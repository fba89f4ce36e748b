"""Byte-level tokenization: nothing is lost, and streams decode as their whole."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from upper_floor import BYTE_VOCAB_SIZE

from jax_specdec.lm import TextStream, decode_bytes, encode_bytes

pytestmark = pytest.mark.newest

BYTES = st.lists(st.integers(0, BYTE_VOCAB_SIZE - 1))


@given(st.text())
def test_text_survives_the_round_trip(text: str) -> None:
    token_ids = encode_bytes(text)
    assert decode_bytes(token_ids) == text
    assert all(0 <= token_id < BYTE_VOCAB_SIZE for token_id in token_ids)


@given(BYTES)
def test_any_bytes_decode_as_python_decodes_them(token_ids: list[int]) -> None:
    assert decode_bytes(token_ids) == codecs.decode(bytes(token_ids), "utf-8", "replace")


@given(st.one_of(BYTES, st.text().map(encode_bytes)), st.lists(st.integers(1, 5), min_size=1))
def test_pieces_of_a_stream_join_to_the_whole(token_ids: list[int], sizes: list[int]) -> None:
    decoder, rest, pieces = TextStream(decode_bytes), list(token_ids), []
    for size in sizes * len(token_ids):
        pieces.append(decoder.decode(rest[:size]))
        rest = rest[size:]
    assert "".join(pieces) + decoder.decode([], final=True) == decode_bytes(token_ids)


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    assert encode_bytes("a\ud800b") == [97, 63, 98]


@pytest.mark.parametrize("token_id", [-1, 256])
def test_an_id_that_is_not_a_byte_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="^token_ids must be bytes"):
        decode_bytes([65, token_id])
