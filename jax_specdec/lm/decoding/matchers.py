"""The matchers of an `EngineDriver`'s requests: what they allow next, and which have failed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.logits.grammar import (
    ForcedDrafts,
    GrammarError,
    advance_matchers,
    bitmask_of,
    forced_drafts,
)
from jax_specdec._src.logits.matchers import GrammarMatcher
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
        """Ends the thread; another call starts another."""
        self._thread.shutdown()
        del self._thread

    def forced_drafts(
        self,
        slots: Mapping[int, ServedRequest],
        token_ids: np.ndarray,
        max_drafts: Mapping[int, int],
        has_store: bool,
    ) -> tuple[ForcedDrafts, dict[int, str]]:
        """Returns drafts and masks, after matchers have accepted new tokens, and who has failed.

        Args:
          slots: the requests that take part in the step, with and without a matcher.
          token_ids: ``[S, K]`` int32, what the drafter proposes.
          max_drafts: by slot, the most drafts.
          has_store: whether drafts may have a distribution.

        Returns:
          The drafts; and by slot, why its matcher has failed. The rows of such a slot allow
          everything.

        Raises:
          FailedCall: anything else went wrong.
        """
        call = self._thread.submit(self._forced_drafts, slots, token_ids, max_drafts, has_store)
        return call.result()

    def _forced_drafts(
        self,
        slots: Mapping[int, ServedRequest],
        token_ids: np.ndarray,
        max_drafts: Mapping[int, int],
        has_store: bool,
    ) -> tuple[ForcedDrafts, dict[int, str]]:
        one_hot = [not has_store] * self._num_slots
        matchers: list[GrammarMatcher | None] = [None] * self._num_slots
        failed: dict[int, str] = {}
        for slot, request in slots.items():
            if (matching := request.matching) is None:
                continue
            try:
                for token in request.new_token_ids[matching.num_accepted :]:
                    advance_matchers([matching.matcher], [[token]])
                    matching.num_accepted += 1
                matchers[slot] = matching.matcher
                one_hot[slot] |= request.options.temperature == 0  # greedy: p is 1 or 0
            except GrammarError as error:
                failed[slot] = error.reason
            except ValueError as error:  # it refuses a token that it had allowed
                failed[slot] = str(error)
        # What a request says again was allowed: its matcher stands behind it, and drafts nothing.
        known = {i: slots[i].known_token_ids for i, one in enumerate(matchers) if one is not None}
        repeats = [slot for slot, tokens in known.items() if tokens]
        ids = token_ids.copy()
        ids[repeats] = PLACEHOLDER_TOKEN_ID
        most = [max_drafts.get(i, 0) * (i not in repeats) for i in range(self._num_slots)]
        with awaiting(one for one in slots.values() if one.matching is not None):
            while True:  # until no matcher fails
                try:
                    drafts = forced_drafts(
                        matchers,
                        ids,
                        vocab_size=self._vocab_size,
                        max_drafts=most,
                        one_hot=one_hot,
                    )
                    for slot in repeats:
                        _repeat(drafts, slot, known[slot], self._vocab_size)
                    return drafts, failed
                except GrammarError as error:
                    failed[error.index] = error.reason
                    matchers[error.index] = None


def _repeat(drafts: ForcedDrafts, slot: int, known: list[int], vocab_size: int) -> None:
    """Makes a request say known tokens again; what comes after them is not taken."""
    k = drafts.token_ids.shape[1]
    rows = drafts.token_bitmask[slot * (k + 1) : (slot + 1) * (k + 1)]  # [K+1, ceil(V/32)]
    for row, token in zip(rows, known, strict=False):
        row[:] = bitmask_of([token], vocab_size)
    drafts.token_ids[slot, : len(known)] = known[:k]
    drafts.is_forced[slot] = True
