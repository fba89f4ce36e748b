"""Grammars: token bitmasks for a step, from matchers that follow its drafts on the host.

Each row of target logits is masked by what the grammar allows after the drafts before that row. A
draft that the grammar refuses keeps its id: the mask gives it probability 0 in its row, so it is
rejected, and the recovered token comes from the right residual. Rows after it are never reached.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_specdec._src.base.arrays import (
    check_array,
    check_int,
    host_array,
    host_int32,
    is_error,
    known_values,
    named_entries,
    refuse,
    require,
)
from jax_specdec._src.base.types import Drafts, check_drafts
from jax_specdec._src.logits.matchers import (
    ALL_ALLOWED,
    GrammarMatcher,
    LlguidanceMatcher,
    fill_rows,
)


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
        """Takes which matcher among others has failed, and why."""
        super().__init__(f"matchers[{index}] has failed: {reason}")
        self.index = index
        self.reason = reason


@contextlib.contextmanager
def _calling(index: int) -> Iterator[None]:
    """Makes what calls of one matcher raise within it a `GrammarError`."""
    try:
        yield
    except BaseException as error:
        if not is_error(error):
            raise
        raise GrammarError(index, str(error) or type(error).__name__) from error


class GrammarLookahead:
    """Advances B matchers along the drafts of a step, and rolls them back when it ends.

    For drafters that are called position by position. `bitmask` masks the drafter's rows at each
    position, and the same K + 1 masks serve the target's rows. If all drafts are known
    already, `grammar_bitmask` makes the masks at once.

    Attributes:
      bitmask: ``[B, ceil(V/32)]`` uint32, the tokens that may follow the drafts appended so far.
        All tokens are allowed for a request without a grammar, and after a draft that was refused,
        where no row is reached.

    Example: see `GrammarMatcher`.
    """

    bitmask: np.ndarray

    def __init__(
        self,
        matchers: Sequence[GrammarMatcher | None],
        *,
        vocab_size: int,
        end_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Begins at the state of the matchers.

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
        vocab_size = check_int("vocab_size", vocab_size)
        words = -(-vocab_size // 32)
        found = check_matchers(matchers)
        self._num_requests = len(found)
        # By request: the matchers of those that have a grammar
        self._matchers = {b: matcher for b, matcher in enumerate(found) if matcher is not None}
        self._vocab_size = vocab_size
        # [ceil(V/32)]: the row after the end of a grammar
        self._end = np.full((words,), ALL_ALLOWED, np.int32)
        if end_token_ids is not None:
            for name, token in named_entries("end_token_ids", end_token_ids):
                check_int(name, token, 0, vocab_size - 1)
            self._end = bitmask_of(end_token_ids, vocab_size).view(np.int32)
        # Of those: whose rows are reached, and the tokens of each that `close` takes back
        self._reached = set(self._matchers)
        self._num_accepted = dict.fromkeys(self._matchers, 0)
        self._fill()

    @property
    def forced_token_ids(self) -> np.ndarray:
        """``[B]`` int32, the only token that a grammar allows here; -1 where it allows others."""
        forced = [
            _only_token(row, self._vocab_size) if b in self._reached else -1
            for b, row in enumerate(self.bitmask)
        ]
        return np.array(forced, np.int32)

    def append(self, token_ids: Any) -> None:
        """Advances by one draft of each request.

        Args:
          token_ids: ``[B]``. An id outside the vocabulary, such as -1, is no proposal. It ends the
            request's drafts, as does a token that the grammar refuses.

        Raises:
          TypeError: not integers.
          ValueError: `token_ids` is not ``[B]``.
          GrammarError: a matcher has failed.
        """
        ids = host_int32("token_ids", token_ids)
        check_array("token_ids", ids, "[B]", {"B": self._num_requests})
        for b in sorted(self._reached):
            matcher = self._matchers[b]
            token = ids[b].item()
            # A matcher is only given tokens that its mask allows: bit id % 32 of word id // 32.
            is_token = 0 <= token < self._vocab_size
            allowed = is_token and bool(self.bitmask[b, token // 32] >> (token % 32) & 1)
            with _calling(b):
                # After its end a grammar is not asked, and what its row allows goes on.
                if allowed and not matcher.is_terminated():
                    allowed = bool(matcher.accept_token(token))
                    self._num_accepted[b] += allowed
            if not allowed:
                self._reached.remove(b)
        self._fill()

    def close(self) -> None:
        """Rolls the matchers back to where they were; a second call does nothing.

        Raises:
          GrammarError: a matcher has failed; the others are where they were.
        """
        self._reached = set()
        # The stack calls all of them, also where one raises.
        with contextlib.ExitStack() as stack:
            for b in self._matchers:
                stack.callback(self._roll_back, b)

    def _roll_back(self, b: int) -> None:
        """Takes back what one matcher has accepted; once, whether or not that fails."""
        count = self._num_accepted[b]
        self._num_accepted[b] = 0
        if count:
            with _calling(b):
                self._matchers[b].rollback(count)

    def __enter__(self) -> GrammarLookahead:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it; see `close`."""
        self.close()

    def _fill(self) -> None:
        """Makes the masks of this position, in a new array."""
        # [B, ceil(V/32)]: int32 for matchers, which write their own row; handed out as uint32
        # Rows that nobody writes stay open: without a grammar, or not reached.
        rows = np.full((self._num_requests, self._end.shape[0]), ALL_ALLOWED, np.int32)
        for b in sorted(self._reached):
            matcher = self._matchers[b]
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
    """Returns the `token_bitmask` of a step: what each target row may emit. Runs on the host.

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
    check_drafts(drafts, {})
    ids = known_values(drafts.token_ids)
    cu = known_values(drafts.cu_num_draft_tokens)
    if ids is None or cu is None:
        must = "hold values that the host can read"
        hint = "call this outside of jit"
        refuse(TypeError, "drafts", must, drafts.token_ids, hint)
    # [B]: the drafts of each request
    counts = np.diff(cu)
    is_rising = cu[0] == 0 and (counts >= 0).all() and cu[-1] <= len(ids)
    must = f"rise from 0 to at most N = {len(ids)}"
    require(is_rising, "drafts.cu_num_draft_tokens", must, cu.tolist())
    # [N] -> [B, K]: the drafts of each request, -1 past its count
    dense = np.full((len(counts), counts.max(initial=0)), -1, np.int32)
    for b, count in enumerate(counts):
        dense[b, :count] = ids[cu[b] : cu[b + 1]]
    # [B*(K+1), W]: of all rows of the rectangle; with at most 0 forced drafts, the ids stay
    masks = forced_drafts(
        matchers, dense, vocab_size=vocab_size, end_token_ids=end_token_ids, max_drafts=0
    ).token_bitmask
    # [B*(K+1), W] -> [N+B, W]: the first count + 1 rows of each request, one after another
    rows = np.full((len(ids) + len(counts), masks.shape[1]), ALL_ALLOWED, np.int32)
    rows = rows.view(np.uint32)
    for b, count in enumerate(counts):
        # A request owns K + 1 rows in the rectangle, and count + 1 among the flat ones.
        first = b * (dense.shape[1] + 1)
        rows[cu[b] + b :][: count + 1] = masks[first:][: count + 1]
    return rows


class ForcedDrafts(NamedTuple):
    """Drafts of a step, some of them forced by grammars, and the masks of its rows.

    Attributes:
      token_ids: ``[B, K]`` int32; -1 is no draft.
      is_forced: ``[B]`` bool, requests that have forced drafts. They are to be verified one-hot:
        `DraftStore.evict` their rows.
      token_bitmask: ``[B*(K+1), ceil(V/32)]`` uint32, for `rejection_sample`.

    Example: see `GrammarMatcher`.
    """

    token_ids: np.ndarray
    is_forced: np.ndarray
    token_bitmask: np.ndarray


def forced_drafts(
    matchers: Sequence[GrammarMatcher | None],
    token_ids: Any,
    *,
    vocab_size: int,
    end_token_ids: Sequence[int] | None = None,
    max_drafts: Any = None,
    one_hot: Any = False,
) -> ForcedDrafts:
    """Puts the tokens that grammars force in the place of drafts, and makes the masks of the step.

    Where a matcher allows one token only, that token is a draft that cannot be rejected, because
    its row's mask leaves nothing else. The tokens that are forced from a request's text on come
    first. A draft of `token_ids` follows if those before it are the ones that it was drafted after.
    Every draft, forced or not, is verified under its mask.

    Of a `LlguidanceMatcher` the forced tokens are those of llguidance, which tokenizes the forced
    bytes as its tokenizer does. Its mask allows nothing else where that is certain.

    Args:
      matchers: as `grammar_bitmask` gets them; afterwards they are where they were.
      token_ids: ``[B, K]`` integers, the drafts; an id outside the vocabulary is no draft.
      vocab_size: V.
      end_token_ids: as for `grammar_bitmask`.
      max_drafts: ``[B]`` or one integer, the most drafts up to which one may be forced; None for K.
      one_hot: ``[B]`` or one bool, requests whose drafts are verified one-hot in any case: greedy
        ones, and those that have no q. Of these, a forced token may also stand behind drafts that
        are not forced. Of others it must not: that a request is verified one-hot would then depend
        on which tokens were drafted, and the output would not be distributed as the target's.

    Returns:
      The drafts and the masks.

    Raises:
      TypeError: an argument of the wrong type or dtype.
      ValueError: there is not one matcher per request, an id of `end_token_ids` is outside the
        vocabulary, or a shape does not fit.
      GrammarError: a matcher has failed; the others are where they were.

    Example: see `GrammarMatcher`.
    """
    ids = host_int32("token_ids", token_ids, "[B, K]")
    # [B, K]: -1 where nothing is drafted
    vocab_size = check_int("vocab_size", vocab_size)
    ids = np.where((ids >= 0) & (ids < vocab_size), ids, -1).astype(np.int32)
    size, k = ids.shape
    is_one_each = len(check_matchers(matchers)) == size
    require(is_one_each, "matchers", f"be one per request, {size}", matchers)
    # [B]: of each request, the place of the first draft that must not be forced
    most = host_int32("max_drafts", k if max_drafts is None else max_drafts)
    one_hot = host_array("one_hot", one_hot, "be bools")
    check_array("max_drafts", most, "[] or [B]", {"B": size})
    check_array("one_hot", one_hot, "[] or [B] bool", {"B": size})
    most = np.broadcast_to(most, (size,))
    one_hot = np.broadcast_to(one_hot, (size,))
    # First the matchers of llguidance, which says at once what it forces; their rows come last.
    is_forced = np.zeros((size, k), bool)
    known = {b: x for b, x in enumerate(matchers) if isinstance(x, LlguidanceMatcher)}
    for b, matcher in known.items():
        if most[b]:
            with _calling(b):
                ids[b], is_forced[b] = matcher._force(ids[b].tolist(), most[b], one_hot[b])
    # Then the others, position by position: of these, the first have no grammar.
    others = [None if b in known else matcher for b, matcher in enumerate(matchers)]
    masks = []
    # [B]: whether the tokens so far are the drafts, so that the next draft was drafted after them
    is_drafted = np.ones((size,), bool)
    with GrammarLookahead(others, vocab_size=vocab_size, end_token_ids=end_token_ids) as lookahead:
        for offset in range(k):
            masks.append(lookahead.bitmask)
            drafted = ids[:, offset].copy()
            forced = lookahead.forced_token_ids
            # [B]: whether a token may be forced here
            may_be = one_hot | is_forced[:, :offset].all(axis=1)
            here = (forced >= 0) & (offset < most) & may_be
            # [B]: the forced token, else the draft, else nothing
            ids[:, offset] = np.where(here, forced, np.where(is_drafted, drafted, -1))
            is_drafted &= ids[:, offset] == drafted
            is_forced[here, offset] = True
            lookahead.append(ids[:, offset])
        masks.append(lookahead.bitmask)
    # K+1 times [B, W] -> [B*(K+1), W], in which llguidance fills the rows of its own requests
    rows = np.stack(masks, axis=1).reshape(size * (k + 1), -1)
    # Of each request: the drafts before its first -1, after which no row is reached
    drafts = [[*itertools.takewhile(lambda token: token >= 0, own)] for own in ids.tolist()]
    fill_rows(rows.view(np.int32), [(one, b * (k + 1), drafts[b]) for b, one in known.items()])
    # Filling does not raise: a matcher that fails there is asked.
    for b, one in known.items():
        with _calling(b):
            one._check()
    return ForcedDrafts(ids, is_forced.any(axis=1), rows)


def advance_matchers(
    matchers: Sequence[GrammarMatcher | None], token_ids: Sequence[Sequence[int]]
) -> None:
    """Advances matchers by the tokens that a step emitted.

    Tokens after the end of a grammar are skipped. Remove tokens after a stop token first.

    Args:
      matchers: B matchers; None for a request without a grammar.
      token_ids: the tokens that each request emitted, as from `parse_output`.

    Raises:
      TypeError: `matchers` is not a list of matchers, or `token_ids` no list of lists of ints.
      ValueError: there is not one list per request, or a matcher refuses a token, which masked rows
        never emit.
      GrammarError: a matcher has failed.

    Example:
      >>> import jax_specdec as sd
      >>> sd.grammar.advance_matchers([None], [[4, 2]])
    """
    found = check_matchers(matchers)
    emitted = named_entries("token_ids", token_ids)
    is_one_each = len(found) == len(emitted)
    require(is_one_each, "token_ids", f"have {len(found)} lists, one per request", token_ids)
    for b, (matcher, (name, tokens)) in enumerate(zip(found, emitted, strict=True)):
        for entry in named_entries(name, tokens):
            token = check_int(*entry, 0)
            with _calling(b):
                if matcher is None or matcher.is_terminated():
                    break
                accepted = matcher.accept_token(token)
            require(accepted, name, "hold tokens that its matcher takes", token)


def check_matchers(matchers: Any) -> list[GrammarMatcher | None]:
    """Returns a list of the matchers, each of which has the methods that it must have.

    Raises:
      TypeError: `matchers` is not a list, or an entry is not a matcher.
    """
    is_list = isinstance(matchers, Sequence) and not isinstance(matchers, (str, bytes))
    require(is_list, "matchers", "be a list, one per request", matchers, error=TypeError)
    methods = [name for name in vars(GrammarMatcher) if not name.startswith("_")]
    for b, matcher in enumerate(matchers):
        missing = [name for name in methods if not callable(getattr(matcher, name, None))]
        hint = f"it has no {', '.join(missing)}"
        is_matcher = matcher is None or not missing
        must = "be a GrammarMatcher or None"
        require(is_matcher, f"matchers[{b}]", must, type(matcher), hint, TypeError)
    return list(matchers)


def _only_token(row: np.ndarray, vocab_size: int) -> int:
    """Returns the only token that ``row [ceil(V/32)]`` allows; -1 if it allows another number."""
    # One word that is not 0, with one bit set: token 32 * word + bit
    words = np.flatnonzero(row)
    if len(words) != 1:
        return -1
    bits = int(row[words[0]])
    token = 32 * int(words[0]) + bits.bit_length() - 1
    return token if bits.bit_count() == 1 and token < vocab_size else -1


def bitmask_of(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns ``[ceil(V/32)]`` uint32, with the bits of `token_ids` set."""
    words = np.zeros((-(-vocab_size // 32),), np.uint32)
    ids = np.array(token_ids, np.int64)
    # Unlike words[...] |= bits, this sets all bits of ids that share a word.
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words
