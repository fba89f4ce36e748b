"""The matchers of an `EngineDriver`'s requests: what they allow next, and which have failed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jax_specdec._src.grammar import (
    GrammarError,
    GrammarMatcher,
    advance_matchers,
    grammar_bitmask,
)
from jax_specdec._src.types import Drafts
from jax_specdec.lm.decoding.bookkeeping import ServedRequest
from jax_specdec.lm.decoding.failures import awaiting


class Matchers:
    """Calls the matchers of the requests in S slots, in a thread that the first call starts.

    Interrupts reach the main thread only. In a thread of its own, a matcher that has accepted a
    token is always counted as having done so.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)

    def close(self) -> None:
        """End the thread; another call starts another."""
        self._thread.shutdown()
        del self._thread

    def token_bitmask(
        self, slots: Mapping[int, ServedRequest], drafts: Drafts
    ) -> tuple[np.ndarray, dict[int, str]]:
        """The masks, after every matcher has accepted its new tokens, and which have failed.

        Args:
          slots: the requests that take part in the step, with and without a matcher.
          drafts: K of each slot.

        Returns:
          ``[S*(K+1), ceil(V/32)]`` uint32; and by slot, why its matcher has failed. The rows of
          such a slot allow everything.

        Raises:
          FailedCall: anything else went wrong.
        """
        return self._thread.submit(self._token_bitmask, slots, drafts).result()

    def _token_bitmask(
        self, slots: Mapping[int, ServedRequest], drafts: Drafts
    ) -> tuple[np.ndarray, dict[int, str]]:
        matchers: list[GrammarMatcher | None] = [None] * self._num_slots
        failed: dict[int, str] = {}
        for slot, request in slots.items():
            if (matching := request.matching) is None:
                continue
            try:
                for token in request.token_ids[request.prompt_length + matching.num_accepted :]:
                    advance_matchers([matching.matcher], [[token]])
                    matching.num_accepted += 1
                matchers[slot] = matching.matcher
            except GrammarError as error:
                failed[slot] = error.reason
            except ValueError as error:  # it refuses a token that it had allowed
                failed[slot] = str(error)
        with awaiting(one for one in slots.values() if one.matching is not None):
            while True:
                try:
                    mask = grammar_bitmask(matchers, drafts, vocab_size=self._vocab_size)
                    return mask, failed
                except GrammarError as error:
                    failed[error.index] = error.reason
                    matchers[error.index] = None
