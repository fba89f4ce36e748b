"""The matchers of an `EngineDriver`'s requests: what they allow next, and which have failed.

Between the halves of a masked step (`device.DeviceState.draft` and `verify`) the driver calls
`Matchers.forced_drafts`. It gives each matcher the tokens that its request has got since the last
such step, walks it along the drafts to make a mask for each row, and back to where it was.
"""

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
        # If this wait is interrupted, the thread makes the call to its end, and the next one comes
        # after it. So no matcher is left between two tokens, or somewhere along the drafts.
        call = self._thread.submit(self._forced_drafts, slots, token_ids, max_drafts, has_store)
        return call.result()

    def _forced_drafts(
        self,
        slots: Mapping[int, ServedRequest],
        token_ids: np.ndarray,
        max_drafts: Mapping[int, int],
        has_store: bool,
    ) -> tuple[ForcedDrafts, dict[int, str]]:
        # [S]: whether all drafts of a slot are verified one-hot, whichever of them are forced
        one_hot = [not has_store] * self._num_slots
        matchers: list[GrammarMatcher | None] = [None] * self._num_slots
        failed: dict[int, str] = {}
        for slot, request in slots.items():
            if (matching := request.matching) is None:
                continue
            try:
                # All new tokens of the text, also those that are known and still to be generated
                # again. No step is ahead when a masked one is dispatched, so none is missing.
                for token in request.new_token_ids[matching.num_accepted :]:
                    advance_matchers([matching.matcher], [[token]])
                    matching.num_accepted += 1
                matchers[slot] = matching.matcher
                # Of a greedy request p is 1 or 0, whatever q its drafts were drawn from.
                one_hot[slot] |= request.options.temperature == 0
            except GrammarError as error:
                failed[slot] = error.reason
            except ValueError as error:
                # It refuses a token that it had allowed.
                failed[slot] = str(error)
        # What a request says again was allowed: its matcher stands behind it, and drafts nothing.
        known = {
            slot: slots[slot].known_token_ids
            for slot, matcher in enumerate(matchers)
            if matcher is not None
        }
        repeats = [slot for slot, tokens in known.items() if tokens]
        # [S, K]: no drafts of the drafter, and none that may be forced, where tokens are known
        ids = token_ids.copy()
        ids[repeats] = PLACEHOLDER_TOKEN_ID
        limits = [max_drafts.get(i, 0) * (i not in repeats) for i in range(self._num_slots)]
        # What is no error of one matcher, such as too little memory, concerns all that have one.
        with awaiting(request for request in slots.values() if request.matching is not None):
            # Until no matcher fails: each round leaves out one that has, and the others are where
            # they were. `ids` are copied by each, and so are the same in the next.
            while True:
                try:
                    drafts = forced_drafts(
                        matchers,
                        ids,
                        vocab_size=self._vocab_size,
                        max_drafts=limits,
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
    # [S*(K+1), ceil(V/32)] -> [K+1, ceil(V/32)], a view: the slot's rows
    rows = drafts.token_bitmask[slot * (k + 1) : (slot + 1) * (k + 1)]
    # Row i allows known token i alone. Where more are known than there are rows, the next step has
    # the others; where fewer are, the step ends after the last of them (`Batch.most_new`).
    for row, token in zip(rows, known, strict=False):
        row[:] = bitmask_of([token], vocab_size)
    drafts.token_ids[slot, : len(known)] = known[:k]
    # One-hot, as no drafter drew them; and nothing is learned of their acceptance.
    drafts.is_forced[slot] = True
