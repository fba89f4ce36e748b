"""Grammars: token bitmasks for a step, from matchers that follow its drafts on the host.

Each row of target logits is masked by what the grammar allows after the drafts before that row. A
draft that the grammar refuses keeps its id: the mask gives it probability 0 in its row, so it is
rejected, and the recovered token comes from the right residual. Rows after it are never reached.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jax_specdec._src.arrays import (
    check_array,
    check_int,
    check_type,
    is_error,
    known_values,
    refuse,
    require,
)
from jax_specdec._src.types import Drafts

_ALL_ALLOWED = -1
"""A word of a bitmask with every bit set."""


class GrammarError(ValueError):
    """A matcher has failed: a method of it raised, so that it cannot say what may come next.

    Attributes:
      index: of the matcher in the list that was given.
      reason: what it said.

    Example:
      >>> import jax_specdec as sd
      >>> sd.grammar.GrammarError(2, "too many states")
      GrammarError('matchers[2] has failed: too many states')
    """

    def __init__(self, index: int, reason: str) -> None:
        """A failure of one matcher among others."""
        super().__init__(f"matchers[{index}] has failed: {reason}")
        self.index, self.reason = index, reason


@contextlib.contextmanager
def _calling(index: int) -> Iterator[None]:
    """Around calls of one matcher: what it raises becomes a `GrammarError`."""
    try:
        yield
    except BaseException as error:
        if not is_error(error):
            raise
        raise GrammarError(index, str(error) or type(error).__name__) from error


class GrammarMatcher(Protocol):
    """Follows one request's tokens and knows which may come next.

    The methods are those of xgrammar's ``GrammarMatcher``. One of llguidance is wrapped in a
    `LlguidanceMatcher`, and one that cannot roll back in a `CopyingMatcher`.

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
      >>> with sd.grammar.GrammarLookahead([Turns()], vocab_size=8) as lookahead:
      ...     lookahead.bitmask.tolist()
      [[8]]
    """

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> object:
        """Write which tokens may come next. Never called once `is_terminated` is true.

        Args:
          bitmask: ``[R, ceil(V/32)]`` int32. In row `index`, bit ``id % 32`` of word ``id // 32``
            is set iff token ``id`` is allowed.
          index: the row.

        Returns:
          Anything; it is ignored.
        """
        ...

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, and return whether it was allowed. If not, nothing changes.

        A `GrammarLookahead` calls this only with tokens that `fill_next_token_bitmask` allowed.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens, at most K, even if they terminated the grammar."""
        ...

    def is_terminated(self) -> bool:
        """Whether the grammar has ended, so that it says nothing about the tokens that follow."""
        ...


class GrammarLookahead:
    """Advances B matchers along the drafts of a step, and rolls them back when it ends.

    For drafters that are called position by position. `bitmask` masks the drafter's rows at each
    position, and the same K + 1 masks serve the target's rows. If all drafts are known
    already, `grammar_bitmask` makes the masks at once.

    Attributes:
      bitmask: ``[B, ceil(V/32)]`` uint32, the tokens that may follow the drafts appended so far.
        All tokens are allowed for a request without a grammar, and after a draft that was refused,
        where no row is reached.

    Example:
      >>> import jax_specdec as sd
      >>> with sd.grammar.GrammarLookahead([None], vocab_size=40) as lookahead:  # no grammar
      ...     lookahead.append([7])
      ...     lookahead.bitmask.tolist()
      [[4294967295, 4294967295]]
    """

    bitmask: np.ndarray

    def __init__(
        self,
        matchers: Sequence[GrammarMatcher | None],
        *,
        vocab_size: int,
        end_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Begin at the state of the matchers.

        Args:
          matchers: B matchers that have accepted all tokens so far; None for a request without a
            grammar. They must not be used until `close`.
          vocab_size: V of the target's logits, for which the matchers were made.
          end_token_ids: the tokens allowed after a grammar has terminated, such as the stop token
            for grammars that end without one; None for all tokens.

        Raises:
          TypeError: `matchers` is not a list of matchers, or an id is not an integer.
          ValueError: an id outside the vocabulary.
          GrammarError: a matcher has failed.
        """
        words = -(-check_int("vocab_size", vocab_size) // 32)
        self._matchers = check_matchers(matchers)
        self._vocab_size = vocab_size
        self._end = np.full((words,), _ALL_ALLOWED, np.int32)
        if end_token_ids is not None:
            for token in end_token_ids:
                check_int("end_token_ids", token, 0, vocab_size - 1)
            self._end = bitmask_of(end_token_ids, vocab_size).view(np.int32)
        self._is_reached = [matcher is not None for matcher in self._matchers]
        self._num_accepted = [0] * len(self._matchers)
        self._fill()

    def append(self, token_ids: Any) -> None:
        """Advance by one draft of each request.

        Args:
          token_ids: ``[B]``. An id outside the vocabulary, such as -1, is no proposal. It ends the
            request's drafts, as does a token that the grammar refuses.

        Raises:
          ValueError: `token_ids` is not ``[B]``.
          GrammarError: a matcher has failed.
        """
        ids = np.asarray(token_ids)
        check_array("token_ids", ids, "[B]", {"B": len(self._matchers)})
        for b, (matcher, token) in enumerate(zip(self._matchers, ids.tolist(), strict=True)):
            if matcher is None or not self._is_reached[b]:
                continue
            is_token = 0 <= token < self._vocab_size
            allowed = is_token and bool(self.bitmask[b, token // 32] >> (token % 32) & 1)
            with _calling(b):
                if allowed and not matcher.is_terminated():
                    allowed = bool(matcher.accept_token(token))
                    self._num_accepted[b] += allowed
            self._is_reached[b] = allowed
        self._fill()

    def close(self) -> None:
        """Roll the matchers back to where they were; a second call does nothing.

        Raises:
          GrammarError: a matcher has failed; the others are where they were.
        """
        self._is_reached = [False] * len(self._matchers)
        with contextlib.ExitStack() as stack:
            for b in range(len(self._matchers)):
                stack.callback(self._roll_back, b)

    def _roll_back(self, b: int) -> None:
        matcher, count = self._matchers[b], self._num_accepted[b]
        self._num_accepted[b] = 0
        if matcher is not None and count:
            with _calling(b):
                matcher.rollback(count)

    def __enter__(self) -> GrammarLookahead:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """`close`."""
        self.close()

    def _fill(self) -> None:
        """Make the masks of this position, in a new array."""
        rows = np.full((len(self._matchers), self._end.shape[0]), _ALL_ALLOWED, np.int32)
        for b, matcher in enumerate(self._matchers):
            if matcher is None or not self._is_reached[b]:
                continue
            with _calling(b):
                if matcher.is_terminated():
                    rows[b] = self._end
                else:
                    matcher.fill_next_token_bitmask(rows, b)
        self.bitmask = rows.view(np.uint32)


def grammar_bitmask(
    matchers: Sequence[GrammarMatcher | None],
    drafts: Drafts,
    *,
    vocab_size: int,
    end_token_ids: Sequence[int] | None = None,
) -> np.ndarray:
    """The `token_bitmask` of a step: the tokens that each target row may emit. Runs on the host.

    A row with i drafts of its request before it allows what the grammar allows after these drafts.
    If one of them is refused, or is not a token, the row is never reached and allows everything. A
    matcher that terminates within the drafts is not asked again; a `DelayedMatcher` may begin
    within them. Rows of a `LlguidanceMatcher` are filled by llguidance, in parallel. Afterwards the
    matchers are where they were: give them the emitted tokens by `advance_matchers`.

    Args:
      matchers: B matchers that have accepted all tokens so far; None for a request without a
        grammar.
      drafts: the drafts to verify. A draft that a grammar refuses must keep its id.
      vocab_size: V of the target's logits, for which the matchers were made.
      end_token_ids: the tokens allowed after a grammar has terminated; None for all.

    Returns:
      ``[N+B, ceil(V/32)]`` uint32, for `rejection_sample`. If a matcher allows no token in a row
      that is reached, its request ends with ``BAD_TARGET_ROW``.

    Raises:
      TypeError: an argument of the wrong type, or drafts whose values are not known, under jit.
      ValueError: there is not one matcher per request, an id is outside the vocabulary, or offsets
        are out of range.
      GrammarError: a matcher has failed; the others are where they were.

    Example:
      >>> import numpy as np
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drafts = sd.Drafts.from_flat(jnp.array([3, 1]), jnp.array([2, 0]))
      >>> sd.grammar.grammar_bitmask([None, None], drafts, vocab_size=32).shape
      (4, 1)
    """
    check_type("drafts", drafts, Drafts)
    ids, cu = known_values(drafts.token_ids), known_values(drafts.cu_num_draft_tokens)
    if ids is None or cu is None:
        must, hint = "hold values that the host can read", "call this outside of jit"
        refuse(TypeError, "drafts", must, drafts.token_ids, hint)
    counts = np.diff(cu)
    is_rising = cu[0] == 0 and (counts >= 0).all() and cu[-1] <= len(ids)
    must = f"rise from 0 to at most N = {len(ids)}"
    require(is_rising, "drafts.cu_num_draft_tokens", must, cu.tolist())
    is_one_each = len(check_matchers(matchers)) == len(counts)
    require(is_one_each, "matchers", f"be one per request, {len(counts)}", matchers)
    known = {b: x for b, x in enumerate(matchers) if isinstance(x, LlguidanceMatcher)}
    others = [None if b in known else matcher for b, matcher in enumerate(matchers)]
    lookahead = GrammarLookahead(others, vocab_size=vocab_size, end_token_ids=end_token_ids)
    request = np.arange(len(counts))
    shape = len(ids) + len(counts), lookahead.bitmask.shape[1]
    rows = np.full(shape, _ALL_ALLOWED, np.int32).view(np.uint32)
    with lookahead:
        for offset in range(counts.max(initial=0) + 1):
            own = request[counts >= offset]
            rows[cu[own] + own + offset] = lookahead.bitmask[own]
            has_draft = counts > offset
            if not has_draft.any():
                break
            place = np.minimum(cu[:-1] + offset, len(ids) - 1)
            lookahead.append(np.where(has_draft, ids[place], -1))

    def tokens(b: int) -> list[int]:
        own = ids[cu[b] : cu[b + 1]].tolist()
        return [*itertools.takewhile(lambda token: 0 <= token < vocab_size, own)]

    _fill_rows(rows.view(np.int32), [(one, int(cu[b]) + b, tokens(b)) for b, one in known.items()])
    for b, one in known.items():
        with _calling(b):
            one._check()
    return rows


def advance_matchers(
    matchers: Sequence[GrammarMatcher | None], token_ids: Sequence[Sequence[int]]
) -> None:
    """Advance matchers by the tokens that a step emitted.

    Tokens after the end of a grammar are skipped. Remove tokens after a stop token first.

    Args:
      matchers: B matchers; None for a request without a grammar.
      token_ids: the tokens that each request emitted, as from `parse_output`.

    Raises:
      TypeError: `matchers` is not a list of matchers.
      ValueError: there is not one list per request, or a matcher refuses a token, which masked rows
        never emit.
      GrammarError: a matcher has failed.

    Example:
      >>> import jax_specdec as sd
      >>> sd.grammar.advance_matchers([None], [[4, 2]])
    """
    is_one_each = len(check_matchers(matchers)) == len(token_ids)
    require(is_one_each, "token_ids", f"have {len(matchers)} lists, one per request", token_ids)
    for b, (matcher, tokens) in enumerate(zip(matchers, token_ids, strict=True)):
        for token in tokens:
            with _calling(b):
                if matcher is None or matcher.is_terminated():
                    break
                accepted = matcher.accept_token(int(token))
            require(accepted, f"token_ids[{b}]", "hold tokens that its matcher takes", token)


class DelayedMatcher:
    """A `GrammarMatcher` that begins after certain tokens, such as those that end reasoning.

    Before that, everything is allowed.

    Example:
      >>> import numpy as np
      >>> import jax_specdec as sd
      >>> class Only3:
      ...     def fill_next_token_bitmask(self, bitmask, index):
      ...         bitmask[index] = 1 << 3
      ...     def accept_token(self, token_id):
      ...         return token_id == 3
      ...     def rollback(self, num_tokens):
      ...         pass
      ...     def is_terminated(self):
      ...         return False
      >>> matcher = sd.grammar.DelayedMatcher(Only3(), begin_token_ids=[9])
      >>> with sd.grammar.GrammarLookahead([matcher], vocab_size=16) as lookahead:
      ...     lookahead.append([9])
      ...     lookahead.bitmask.tolist()
      [[8]]
    """

    def __init__(self, matcher: GrammarMatcher, begin_token_ids: Sequence[int]) -> None:
        """Wait for tokens.

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
        """See `GrammarMatcher`."""
        if self.has_begun:
            self._matcher.fill_next_token_bitmask(bitmask, index)
        else:
            bitmask[index] = _ALL_ALLOWED

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher`."""
        if not self.has_begun:
            self._before.append(token_id)
            return True
        accepted = bool(self._matcher.accept_token(token_id))
        self._num_accepted += accepted
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher`."""
        inside = min(num_tokens, self._num_accepted)
        if inside:
            self._matcher.rollback(inside)
            self._num_accepted -= inside
        if num_tokens > inside:
            del self._before[inside - num_tokens :]

    def is_terminated(self) -> bool:
        """See `GrammarMatcher`."""
        return self.has_begun and self._matcher.is_terminated()


class CopyingMatcher:
    """A `GrammarMatcher` that adds `rollback` to a matcher without it, by keeping copies.

    Example:
      >>> import numpy as np
      >>> import jax_specdec as sd
      >>> class Countdown:
      ...     count = 3
      ...     def fill_next_token_bitmask(self, bitmask, index):
      ...         bitmask[index] = 1 << self.count
      ...     def accept_token(self, token_id):
      ...         allowed = token_id == self.count
      ...         self.count -= allowed
      ...         return allowed
      ...     def is_terminated(self):
      ...         return self.count == 0
      >>> matcher = sd.grammar.CopyingMatcher(Countdown(), max_rollback_tokens=4)
      >>> matcher.accept_token(3), matcher.accept_token(2), matcher.rollback(2)
      (True, True, None)
      >>> matcher.accept_token(3)
      True
    """

    def __init__(self, matcher: Any, max_rollback_tokens: int) -> None:
        """Keep copies.

        Args:
          matcher: has the other methods of `GrammarMatcher`, and can be copied by `copy.deepcopy`.
          max_rollback_tokens: K, how many copies are kept.
        """
        size = check_int("max_rollback_tokens", max_rollback_tokens) + 1
        self._states: collections.deque[Any] = collections.deque([matcher], size)  # the last is now

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        """See `GrammarMatcher`."""
        self._states[-1].fill_next_token_bitmask(bitmask, index)

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher`."""
        after = copy.deepcopy(self._states[-1])
        if not after.accept_token(token_id):
            return False
        self._states.append(after)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher`.

        Raises:
          ValueError: `num_tokens` is more than the copies that are kept.
        """
        kept = len(self._states) - 1
        require(num_tokens <= kept, "num_tokens", f"be at most {kept}, which are kept", num_tokens)
        for _ in range(num_tokens):
            self._states.pop()

    def is_terminated(self) -> bool:
        """See `GrammarMatcher`."""
        return bool(self._states[-1].is_terminated())


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
        """Wrap a matcher.

        Args:
          matcher: an ``LLMatcher``.
          stop_token_ids: the ``eos_token`` of its tokenizer, all of them.
        """
        self._matcher, self._stops = matcher, frozenset(stop_token_ids)
        self._num_stops = 0

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        """See `GrammarMatcher`."""
        bitmask[index] = _ALL_ALLOWED
        _fill_rows(bitmask, [(self, index, [])])
        self._check()

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher`."""
        if not self._num_stops and token_id not in self._stops:
            # A token that is refused would be a failure, for ever, if llguidance consumed it.
            allowed = self._matcher.validate_tokens([token_id]) == 1
            allowed = allowed and self._matcher.consume_token(token_id)
            self._check()
            return bool(allowed)
        self._num_stops += 1  # llguidance does not take back those after the end
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher`."""
        stops = min(num_tokens, self._num_stops)
        self._num_stops -= stops
        if num_tokens > stops:
            self._matcher.rollback(num_tokens - stops)

    def is_terminated(self) -> bool:
        """See `GrammarMatcher`; it allows stop tokens after its end."""
        return False

    @property
    def error(self) -> str:
        """llguidance's message if the matcher has failed, and so never goes on; or empty."""
        return str(self._matcher.get_error())

    def _check(self) -> None:
        """Do nothing, unless the matcher has failed.

        Raises:
          ValueError: it has.
        """
        if self._matcher.is_error():
            raise ValueError(self.error)


@functools.cache
def _executor() -> Any:
    """llguidance's threads."""
    import llguidance

    return llguidance.LLExecutor()


def _fill_rows(
    bitmask: np.ndarray, matchers: Sequence[tuple[LlguidanceMatcher, int, list[int]]]
) -> None:
    """Write the rows of llguidance's matchers.

    Args:
      bitmask: ``[R, ceil(V/32)]`` int32, everything allowed.
      matchers: each with its first row, and the drafts between that and the following rows. Rows
        after a draft that is refused or stops, and of texts that have stopped, are not written.
    """
    open_ = [(one._matcher, *rest) for one, *rest in matchers if not one._num_stops]
    if not open_:
        return
    import llguidance.numpy as library

    with_drafts = [one for one in open_ if one[2]]
    if with_drafts:
        library.fill_next_token_bitmask_par_with_draft_tokens(_executor(), with_drafts, bitmask)
    for matcher, row, drafts in open_:
        if not drafts:
            library.fill_next_token_bitmask(matcher, bitmask, row)


def check_matchers(matchers: Any) -> list[GrammarMatcher | None]:
    """A list of matchers, each with the methods it must have.

    Raises:
      TypeError: `matchers` is not a list, or an entry is not a matcher.
    """
    is_list = isinstance(matchers, Sequence) and not isinstance(matchers, (str, bytes))
    require(is_list, "matchers", "be a list, one per request", matchers, error=TypeError)
    methods = [name for name in vars(GrammarMatcher) if not name.startswith("_")]
    for b, matcher in enumerate(matchers):
        missing = [name for name in methods if not callable(getattr(matcher, name, None))]
        hint = f"it has no {', '.join(missing)}"
        hint += "; wrap it in a CopyingMatcher" if missing == ["rollback"] else ""
        is_matcher = matcher is None or not missing
        must = "be a GrammarMatcher or None"
        require(is_matcher, f"matchers[{b}]", must, type(matcher), hint, TypeError)
    return list(matchers)


def bitmask_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """``[ceil(V/32)]`` uint32, with the bits of `token_ids` set."""
    words = np.zeros((-(-vocab_size // 32),), np.uint32)
    ids = np.array(token_ids, np.int64)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words
