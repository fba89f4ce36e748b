"""`GrammarMatcher`: what follows one request's grammar, and wrappers around those of others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jax_specdec._src.base.arrays import require

ALL_ALLOWED = -1
"""A word of a bitmask with every bit set."""


class GrammarMatcher(Protocol):
    """Follows one request's tokens and knows which may come next.

    The methods are those of xgrammar's ``GrammarMatcher``. One of llguidance is wrapped in a
    `LlguidanceMatcher`.

    A matcher that cannot go on, such as one whose limits are exceeded, raises any exception. Its
    callers raise a `GrammarError` then, which names the matcher: its request alone has failed.

    Example:
      A grammar in which 3 and 5 alternate:

      >>> import numpy as np
      >>> import jax_specdec as sd
      >>> class Turns:
      ...     def __init__(self):
      ...         self.count = 0
      ...     def fill_next_token_bitmask(self, bitmask, index):
      ...         bitmask[index] = 1 << (3, 5)[self.count % 2]
      ...     def accept_token(self, token_id):
      ...         allowed = token_id == (3, 5)[self.count % 2]
      ...         self.count += allowed
      ...         return allowed
      ...     def rollback(self, num_tokens):
      ...         self.count -= num_tokens
      ...     def is_terminated(self):
      ...         return False
      >>> later = sd.grammar.DelayedMatcher(Turns(), begin_token_ids=[9])
      >>> with sd.grammar.GrammarLookahead([Turns(), later], vocab_size=16) as lookahead:
      ...     lookahead.append([3, 9])
      ...     lookahead.bitmask.tolist()
      [[32], [8]]
      >>> drafts = sd.grammar.forced_drafts([Turns()], np.array([[7, -1]]), vocab_size=8)
      >>> drafts.token_ids.tolist(), drafts.is_forced.tolist()  # both tokens are forced
      ([[3, 5]], [True])
    """

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> object:
        """Writes which tokens may come next. Never called once `is_terminated` is true.

        Args:
          bitmask: ``[R, ceil(V/32)]`` int32. In row `index`, bit ``id % 32`` of word ``id // 32``
            is set iff token ``id`` is allowed.
          index: the row.

        Returns:
          Anything; it is ignored.
        """
        ...

    def accept_token(self, token_id: int) -> bool:
        """Advances by a token, and returns whether it was allowed. If not, nothing changes.

        A `GrammarLookahead` calls this only with tokens that `fill_next_token_bitmask` allowed.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens, at most K, even if they terminated the grammar."""
        ...

    def is_terminated(self) -> bool:
        """Returns whether the grammar has ended, and says nothing about the tokens that follow."""
        ...


class DelayedMatcher:
    """A `GrammarMatcher` that begins after certain tokens, such as those that end reasoning.

    Before that, everything is allowed.

    Example: see `GrammarMatcher`.
    """

    def __init__(self, matcher: GrammarMatcher, begin_token_ids: Sequence[int]) -> None:
        """Waits for tokens.

        Args:
          matcher: the grammar, at its beginning.
          begin_token_ids: the tokens, in this order, after which the grammar begins.

        Raises:
          ValueError: `begin_token_ids` is empty.
        """
        self._matcher = matcher
        self._begin = [int(token) for token in begin_token_ids]
        require(self._begin, "begin_token_ids", "hold at least one token", self._begin)
        self._before: list[int] = []
        self._num_accepted = 0

    @property
    def has_begun(self) -> bool:
        """Whether the last tokens were those after which the grammar begins."""
        return self._before[-len(self._begin) :] == self._begin

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        """Writes what the grammar allows; before it begins, everything is."""
        if self.has_begun:
            self._matcher.fill_next_token_bitmask(bitmask, index)
        else:
            bitmask[index] = ALL_ALLOWED

    def accept_token(self, token_id: int) -> bool:
        """Advances the grammar; before it begins, notes the token."""
        if not self.has_begun:
            self._before.append(token_id)
            return True
        accepted = bool(self._matcher.accept_token(token_id))
        self._num_accepted += accepted
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens: those that the grammar took, then those before it."""
        inside = min(num_tokens, self._num_accepted)
        if inside:
            self._matcher.rollback(inside)
            self._num_accepted -= inside
        if num_tokens > inside:
            del self._before[inside - num_tokens :]

    def is_terminated(self) -> bool:
        """Returns whether the grammar has begun and ended."""
        return self.has_begun and self._matcher.is_terminated()


class LlguidanceMatcher:
    """llguidance's ``LLMatcher`` as a `GrammarMatcher`, after whose end only stop tokens may come.

    `grammar_bitmask` has llguidance fill the rows of all such requests at once, in parallel.

    An ``LLMatcher`` never raises: one that has failed, by a wrong grammar or a limit, allows only
    the stop tokens, as if its text were complete. This one raises llguidance's message then.

    Example:
      >>> import llguidance
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> class Digits:  # the vocabulary, as llguidance asks for it
      ...     eos_token_id, bos_token_id, special_token_ids = 0, None, [0]
      ...     tokens = [b"<end>", *(b"%d" % i for i in range(10))]
      ...     def __call__(self, text):
      ...         return [1 + i - ord("0") for i in text]
      >>> tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Digits()), eos_token=[0])
      >>> grammar = llguidance.LLMatcher.grammar_from_regex("12[34]")
      >>> matcher = sd.grammar.LlguidanceMatcher(llguidance.LLMatcher(tokenizer, grammar), [0])
      >>> drafts = sd.Drafts.from_dense(jnp.array([[2, 3]]))
      >>> sd.grammar.grammar_bitmask([matcher], drafts, vocab_size=11).tolist()  # 1 2, then 3 or 4
      [[4], [8], [48]]
    """

    def __init__(self, matcher: Any, stop_token_ids: Sequence[int]) -> None:
        """Wraps a matcher.

        Args:
          matcher: an ``LLMatcher``.
          stop_token_ids: the ``eos_token`` of its tokenizer, all of them.
        """
        self._matcher = matcher
        self._stops = frozenset(stop_token_ids)
        self._num_stops = 0
        # llguidance's last answer of what is forced, which is all at once, however long; and how
        # many of these tokens the text ends with.
        self._forced: list[int] = []
        self._num_followed = 0

    def __deepcopy__(self, memo: Any) -> LlguidanceMatcher:
        """Returns a matcher in the same state, which is independent."""
        other = LlguidanceMatcher(self._matcher.deep_copy(), [*self._stops])
        other._num_stops = self._num_stops
        other._num_followed = self._num_followed
        other._forced = self._forced  # it is replaced, never changed
        return other

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        """Writes what llguidance allows here; only stop tokens after the end."""
        bitmask[index] = ALL_ALLOWED
        fill_rows(bitmask, [(self, index, [])])
        self._check()

    def accept_token(self, token_id: int) -> bool:
        """Advances by a token that llguidance allows; counts a stop token and those after it."""
        if not self._num_stops and token_id not in self._stops:
            # A token that is refused would be a failure, for ever, if llguidance consumed it.
            allowed = self._matcher.validate_tokens([token_id]) == 1
            allowed = bool(allowed and self._matcher.consume_token(token_id))
            self._check()
            if allowed and [token_id] == self._forced[self._num_followed : self._num_followed + 1]:
                self._num_followed += 1
            elif allowed:
                self._forget_forced()
            return allowed
        self._num_stops += 1  # llguidance does not take back those after the end
        return True

    def forced_token_ids(self) -> list[int]:
        """Returns the tokens that must come next, as llguidance tokenizes them."""
        if self._num_stops:
            return []
        if self._matcher.is_stopped():
            self._check()
            return [*self._stops] if len(self._stops) == 1 else []
        return self._run()

    def _run(self) -> list[int]:
        """Returns what llguidance forces here, which is asked anew after its last answer's end."""
        if self._num_followed == len(self._forced):
            self._forced = list(self._matcher.compute_ff_tokens())
            self._num_followed = 0
        return self._forced[self._num_followed :]

    def _force(self, drafts: list[int], most: int, one_hot: bool) -> tuple[list[int], list[bool]]:
        """Returns the drafts with forced tokens in their place, and which these are.

        The matcher is where it was. `forced_drafts` says which tokens may be forced.
        """
        tokens: list[int] = []
        is_forced: list[bool] = []
        run: list[int] = []  # forced tokens that come next
        while len(tokens) < most and (run or one_hot or all(is_forced)):
            run = run or self.forced_token_ids()
            # A forced token, else a draft if those before it are the ones it was drafted after
            token = -1
            if run:
                token = run[0]
            elif tokens == drafts[: len(tokens)]:
                token = drafts[len(tokens)]
            if token < 0 or not self.accept_token(token):
                break
            tokens.append(token)
            is_forced.append(bool(run))
            run = run[1:]
        self.rollback(len(tokens))
        # The rest of the drafts stays only where it follows what was drafted.
        rest = drafts[len(tokens) :]
        if tokens != drafts[: len(tokens)]:
            rest = [-1] * len(rest)
        return tokens + rest, is_forced + [False] * len(rest)

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens: those after the end, then those that llguidance consumed."""
        stops = min(num_tokens, self._num_stops)
        self._num_stops -= stops
        if num_tokens > stops:
            self._matcher.rollback(num_tokens - stops)
            self._num_followed -= num_tokens - stops
            if self._num_followed < 0:  # the text no longer reaches to where that was forced
                self._forget_forced()

    def is_terminated(self) -> bool:
        """Returns False: after its end it allows stop tokens."""
        return False

    def _forget_forced(self) -> None:
        """Forgets llguidance's last answer, which does not go on from here."""
        self._forced = []
        self._num_followed = 0

    @property
    def error(self) -> str:
        """llguidance's message if the matcher has failed, and so never goes on; or empty."""
        return str(self._matcher.get_error())

    def _check(self) -> None:
        """Raises llguidance's message if the matcher has failed.

        Raises:
          ValueError: it has.
        """
        if self._matcher.is_error():
            raise ValueError(self.error)


@functools.cache
def _executor() -> Any:
    """Returns llguidance's threads."""
    import llguidance

    return llguidance.LLExecutor()


def fill_rows(
    bitmask: np.ndarray, matchers: Sequence[tuple[LlguidanceMatcher, int, list[int]]]
) -> None:
    """Writes the rows of llguidance's matchers.

    Args:
      bitmask: ``[R, ceil(V/32)]`` int32, everything allowed.
      matchers: each with its first row, and the drafts between that and the following rows. Rows
        after a draft that is refused or stops, and of texts that have stopped, are not written.
    """
    # Rows that llguidance must fill; those of drafts that it forces are known without it.
    open_ = []
    for one, row, drafts in matchers:
        if one._num_stops:
            continue
        size = len(drafts)
        run = [] if one._matcher.is_stopped() else one._run()
        # Every row allows one token: row i the i-th that is forced
        if len(run) > size and run[:size] == drafts:
            bitmask[row : row + size + 1] = 0
            for i, token in enumerate(run[: size + 1]):
                bitmask.view(np.uint32)[row + i, token // 32] = 1 << token % 32
        else:
            open_.append((one._matcher, row, drafts))
    if not open_:
        return
    import llguidance.numpy as library

    # Several rows of a request at once, for all requests in parallel; then single rows
    with_drafts = [one for one in open_ if one[2]]
    if with_drafts:
        library.fill_next_token_bitmask_par_with_draft_tokens(_executor(), with_drafts, bitmask)
    for matcher, row, drafts in open_:
        if not drafts:
            library.fill_next_token_bitmask(matcher, bitmask, row)
