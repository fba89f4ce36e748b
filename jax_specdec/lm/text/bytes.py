"""Byte-level tokenization: token id = byte of the UTF-8 text, vocabulary 256.

For the embedded pair, which needs no library and no files for its texts.
"""

import operator
from collections.abc import Iterable

from jax_specdec._src.base.arrays import check_type, refuse, require

BYTE_VOCAB_SIZE = 256
"""Size of the vocabulary: one token id per byte value."""

DOCUMENT_SEPARATOR = 0
"""The token id before, between and after documents: both start of text and stop token."""


def encode_bytes(text: str) -> list[int]:
    """Returns the UTF-8 bytes of a text as token ids of the embedded pair; adds no separator.

    Another model needs the ids of its own tokenizer: see `load_tokenizer`.

    A lone surrogate, which UTF-8 cannot hold, becomes a question mark.

    Raises:
      TypeError: `text` is not a str.

    Example:
      >>> encode_bytes("né")
      [110, 195, 169]
    """
    check_type("text", text, str)
    return list(text.encode("utf-8", errors="replace"))


def decode_bytes(token_ids: Iterable[int]) -> str:
    """Returns the text of token ids of the embedded pair; bytes that are not UTF-8 become U+FFFD.

    `TextStream` decodes ids as they come, with this function.

    Args:
      token_ids: ids in [0, 256).

    Raises:
      TypeError: an id is not an integer.
      ValueError: an id is not a byte.

    Example:
      >>> decode_bytes([110, 195, 169])
      'né'
    """
    # `bytes` would refuse such an id, too, in a sentence that does not name the argument.
    token_ids = id_list(token_ids)
    for token_id in token_ids:
        require(0 <= token_id < BYTE_VOCAB_SIZE, "token_ids", "be bytes, in [0, 256)", token_id)
    return bytes(token_ids).decode("utf-8", errors="replace")


def id_list(token_ids: Iterable[int], name: str = "token_ids") -> list[int]:
    """Returns token ids of any integer type, such as those of an array, as a list of ints.

    Raises:
      TypeError: they are not integers.
    """
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        refuse(TypeError, name, "be a list of ints", token_ids)
