"""Marks: what stands for special tokens in messages while a chat template writes them.

A template only sees texts, and a text that spells a special token would become it. So what spells
one is taken out of the messages first, a mark in its place, and is encoded as text by itself once
the template has written the marks. `Tokenizer.encode_chat` does so for plain messages.
"""

import re
import uuid
from collections.abc import Callable, Mapping

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.formats.files import JsonValue
from jax_specdec.lm.models.fields import quoted


class Marks:
    """Marks of one conversation, which no other has.

    Args:
      split: from a text to its pieces: text, what a mark is to stand for, text, ..., text.
    """

    def __init__(self, split: Callable[[str], list[str]]) -> None:
        self._split = split
        # A random text is in no message. This one has letters of both cases, so that a template
        # which changes the case of texts changes each mark.
        self._mark = f"Mark{uuid.uuid4().hex}"
        self._numbers: dict[str, int] = {}  # of what marks stand for; equal texts stay equal

    def put_into(self, value: object, name: str) -> JsonValue:
        """Returns a value of JSON with marks in all texts of it, keys too: templates write any.

        Args:
          value: a message, or what is in one.
          name: what messages of errors call it.

        Raises:
          TypeError: a part of it is none of JSON, so a template might write a text that is not
            seen here.
        """
        if isinstance(value, str):
            pieces = self._split(value)
            for index in range(1, len(pieces), 2):
                number = self._numbers.setdefault(pieces[index], len(self._numbers))
                pieces[index] = f"{self._mark}{number}-"
            return "".join(pieces)
        if isinstance(value, Mapping):
            must = "have keys that are text"
            require(all(isinstance(x, str) for x in value), name, must, value, error=TypeError)
            items = value.items()
            return {
                self.put_into(x, name): self.put_into(y, f"{name}[{quoted(x)}]") for x, y in items
            }
        if isinstance(value, (list, tuple)):
            return [self.put_into(x, f"{name}[{index}]") for index, x in enumerate(value)]
        is_json = value is None or isinstance(value, (bool, int, float))
        must = "be text, a number, a bool, None, or a list or dict of these"
        require(is_json, name, must, value, error=TypeError)
        return value

    def __bool__(self) -> bool:
        """Returns whether any mark was put."""
        return bool(self._numbers)

    def take_out(self, text: str) -> list[str]:
        """Returns pieces of a text with marks: text, what a mark stands for, text, ..., text."""
        stands_for = list(self._numbers)
        pieces = re.split(f"{self._mark}([0-9]+)-", text)
        pieces[1::2] = [stands_for[int(number)] for number in pieces[1::2]]
        return pieces
