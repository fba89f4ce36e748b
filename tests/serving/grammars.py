"""Matchers that the tests share: of a function, and of llguidance with few tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import llguidance
import numpy as np

import jax_specdec as sd

Allowed = Callable[[tuple[int, ...]], Collection[int]]
"""The tokens that may follow some."""


class Follows:
    """A matcher of a function of the text so far, for ids below 32."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed, self.tokens = allowed, ()

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        bitmask[index] = 0
        bitmask[index, 0] = sum(1 << token for token in self.allowed(self.tokens))

    def accept_token(self, token_id: int) -> bool:
        assert token_id in self.allowed(self.tokens)
        self.tokens += (token_id,)
        return True

    def rollback(self, num_tokens: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - num_tokens]

    def is_terminated(self) -> bool:
        return False


class _Digits:
    """A vocabulary for llguidance: ids that end a text, and digits."""

    eos_token_id, bos_token_id = 0, None

    def __init__(self, digits: bytes, num_stops: int) -> None:
        self.digits, self.special_token_ids = digits, range(num_stops)
        self.tokens = [*(b"<%d>" % i for i in range(num_stops)), *(b"%c" % x for x in digits)]

    def __call__(self, text: bytes) -> list[int]:
        return [len(self.special_token_ids) + self.digits.index(byte) for byte in text]


@functools.cache
def _tokenizer(digits: bytes, num_stops: int) -> llguidance.LLTokenizer:
    words = llguidance.TokenizerWrapper(_Digits(digits, num_stops))
    return llguidance.LLTokenizer(words, eos_token=[*range(num_stops)])


def of_digits(
    grammar: str, digits: bytes, num_stops: int = 1, **limits: int
) -> sd.grammar.LlguidanceMatcher:
    """A matcher whose first ids end a text; the others are these digits, in their order."""
    tokenizer, few = _tokenizer(digits, num_stops), llguidance.LLParserLimits(**limits)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=few)
    return sd.grammar.LlguidanceMatcher(matcher, [*range(num_stops)])
