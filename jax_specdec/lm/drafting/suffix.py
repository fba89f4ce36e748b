"""Lookup of the longest matches with counts, in the text so far and in a history of others.

`SuffixDrafter.propose` is three steps, each a pass over arrays of a fixed size, without a suffix
tree: `_Corpus.of` says for each place of a text how many tokens before it equal the last ones;
`_nearest` takes the E places with the longest matches; `_draft` or `_tree` counts which tokens
follow these. `FirstOf` reads the `Lookup` itself, because its probabilities say what to expect.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import as_int32, check_array, check_int, require
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Integers
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Drafter, DrafterServes, Proposal
from jax_specdec.lm.drafting.prediction import Predicted, look_up_predictions
from jax_specdec.lm.drafting.tree import Candidates, best_nodes
from jax_specdec.lm.models.protocol import Cache, Params

_MOST_HISTORY = 2**24
"""Up to 127 tokens or occurrences, times places, are numbered in int32."""

_NO_TOKEN = -2
"""Stands before the first token of a text: nothing in a corpus equals it."""


class Lookup(NamedTuple):
    """What a lookup found for B requests.

    Attributes:
      token_ids: ``[B, K]`` int32, -1 from the first position without a draft on.
      probabilities: ``[B, K]`` float32, how likely draft i and those before it on its path are all
        accepted, by the counts; 0 where there is no draft.
      scores: ``[B]`` float32, the sum of them: how many drafts are likely to be accepted.
      parents: ``[B, K]`` int32, as in `Drafts`; None for chains.
    """

    token_ids: jax.Array
    probabilities: jax.Array
    scores: jax.Array
    parents: jax.Array | None = None

    def or_predicted(
        self, predicted: Predicted, num_matching: jax.Array, tree_depth: int
    ) -> Lookup:
        """Returns the lookup with the drafts of predictions, where as many tokens match there.

        Each is as likely as what occurred once. In a tree they are a chain.

        Args:
          predicted: for the same requests.
          num_matching: ``[B]`` int32, tokens of the longest match of this lookup.
          tree_depth: the most drafts of a path through a tree; 0 for chains.
        """
        k = self.token_ids.shape[1]
        deepest = tree_depth or k
        is_deep = jnp.arange(k, dtype=jnp.int32) >= deepest
        # [B, K]: up to the depth. A place that occurred once agrees with 1 of 1 + 1, see `_draft`.
        token_ids = jnp.where(is_deep[None, :], PLACEHOLDER_TOKEN_ID, predicted.token_ids)
        probabilities = jnp.where(token_ids >= 0, jnp.float32(0.5), 0)
        # [K] -> [B, K]: draft j follows draft j - 1, which parents have as number j
        chain = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), token_ids.shape)
        parents = None if self.parents is None else chain
        others = Lookup(token_ids, probabilities, probabilities.sum(axis=1), parents)
        is_predicted = predicted.is_as_long(num_matching)

        def chosen(other: jax.Array, own: jax.Array) -> jax.Array:
            # [B] for scores, [B, 1] for the fields of K drafts
            here = is_predicted[:, None] if own.ndim > 1 else is_predicted
            return jnp.where(here, other, own)

        return jax.tree.map(chosen, others, self)


@dataclasses.dataclass(frozen=True)
class SuffixDrafter(Drafter):
    """Drafts by lookup of the last tokens, for matches of every length, with counts; no weights.

    For each m, the places before which the last m tokens occurred say what may follow. The draft
    goes on with the token that most of them have next (the latest, if two are equally frequent),
    and with the places that agree. With c of n places in agreement, the token has a probability of
    c / (n + 1), and c' / c after the next one: the end of the text is a place, too. So one earlier
    occurrence gives 1/2, two that agree 2/3, and a draft that many places share is trusted most.

    The score of a draft is the sum of the probabilities along it, that is, how many of its tokens
    are likely to be accepted. The m with the largest score is taken, the longest of equals. A match
    of m tokens gives at most ``m * spec_factor`` drafts, and none that is less probable than
    `min_probability`. So each request has as many drafts as the text lets one expect, and none
    where nothing matches.

    **Trees.** With `tree_depth`, the K drafts are nodes of a tree: what followed the places is
    merged where it agrees. If c of the n places where m tokens match go on to a node, it has a
    probability of c / (n + 1), by the m for which that is largest; a match of m tokens gives nodes
    of at most the depth that it gives a draft. The K likeliest nodes are taken. The agreement rule
    is needed.

    **History.** With `history`, texts of other requests are searched, too. They are an array in the
    drafter's `params` (see `init_params`), to which `add` writes and in which the oldest are
    overwritten; an `EngineDriver` adds what each generated when it ends or is cancelled. What a
    request drafts then depends on other requests. Its text does not if it is greedy or verified by
    agreement, so an `Engine` refuses all others.

    **Predictions.** What a request expects its text to be (`RequestOptions.prediction`) is searched
    too, and taken where as many tokens match there, at least one.

    Attributes:
      max_match: D. Match and draft together have at most D tokens, so a step has at most D / 2
        drafts; 2 to 127.
      min_match: the shortest match that counts; short ones pay where a wide pass is not slower than
        a narrow one, as on GPUs.
      spec_factor: the most drafts for each token of a match.
      min_probability: of the least probable draft.
      max_occurrences: E, how many places are looked at, 1 to 127: those of the longest matches, the
        latest of equals. Counts are exact where a match occurs at most so often.
      history: N, how many tokens of other texts are kept; 0 for none.
      tree_depth: the most drafts of a path through a tree, less than D; 0 for chains.

    Raises:
      TypeError: a field is not a number of its type.
      ValueError: a field is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> context = lm.DraftContext(
      ...     token_ids=jnp.array([[1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 0]]),
      ...     lengths=jnp.array([13]), sampling=sd.SamplingParams(jnp.zeros(1)),
      ...     keys=jax.random.split(jax.random.key(0), 1),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=4))
      >>> proposal, _ = jax.jit(lm.SuffixDrafter().propose)(None, context, (), None)
      >>> proposal.token_ids.tolist()  # 9 1 2 3 occurred once: as many drafts
      [[5, 9, 1, 2]]

    References:
      Oliaro et al., 2024, "SuffixDecoding", https://arxiv.org/abs/2411.04975
    """

    max_match: int = 24
    min_match: int = 3
    spec_factor: float = 1.0
    min_probability: float = 0.1
    max_occurrences: int = 16
    history: int = 0
    tree_depth: int = 0

    def __post_init__(self) -> None:
        check_int("max_match", self.max_match, 2, 127)
        check_int("min_match", self.min_match, 1, self.max_match - 1)
        check_int("max_occurrences", self.max_occurrences, 1, 127)
        check_int("history", self.history, 0, _MOST_HISTORY)
        check_int("tree_depth", self.tree_depth, 0, self.max_match - 1)
        for name, largest in (("spec_factor", 127.0), ("min_probability", 1.0)):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(is_number, name, "be a number", value, error=TypeError)
            require(0 < value <= largest, name, f"be in (0, {largest:g}]", value)
            object.__setattr__(self, name, float(value))
        largest = self.max_match - 1
        must = f"give a match of max_match - 1 = {largest} tokens a draft"
        require(largest * self.spec_factor >= 1, "spec_factor", must, self.spec_factor)

    @property
    def serves(self) -> DrafterServes:
        """Declares that often nothing matches, and predictions; trees and a history, if any."""
        return DrafterServes(
            tree_depth=self.tree_depth,
            may_abstain=True,
            has_history=self.history > 0,
            predictions=True,
        )

    def init_params(self) -> Params:
        """Returns an empty history; None without one."""
        if not self.history:
            return None
        token_ids = jnp.full((self.history,), PLACEHOLDER_TOKEN_ID, jnp.int32)
        return {"token_ids": token_ids, "next": jnp.int32(0)}

    def check_params(self, name: str, params: Params) -> None:
        """Checks the history.

        Raises:
          ValueError: it is none, or has another size.
        """
        if not self.history:
            return
        is_history = isinstance(params, dict) and params.keys() == {"token_ids", "next"}
        must = "be a history"
        require(is_history, name, must, params, "SuffixDrafter.init_params makes one")
        sizes = {"N": self.history}
        check_array(f"{name}['token_ids']", params["token_ids"], "[N] int32", sizes)
        check_array(f"{name}['next']", params["next"], "[] int32", sizes)

    def add(self, params: Params, token_ids: Integers) -> Params:
        """Returns the history with one more text, in place of the oldest if there is no room.

        Args:
          params: from `init_params`, or from the last call.
          token_ids: ``[A]`` integers, followed by any number of -1. Of a text with N tokens or
            more, the last N - 1 are kept.

        Returns:
          The new `params`, of the same shapes; `params` without a history.

        Raises:
          TypeError: ids that are not integers.
          ValueError: no history of this size, or ids of another shape.
        """
        self.check_params("params", params)
        if not self.history:
            return params
        return _added(params, as_int32("token_ids", token_ids, "[A]"))

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Looks up; see `Drafter.propose`. All -1 where nothing matches."""
        del store
        lookup = self.lookup(params, context)
        return Proposal(lookup.token_ids, parents=lookup.parents), cache

    def lookup(self, params: Params, context: DraftContext) -> Lookup:
        """Returns the drafts, and how likely they are.

        Args:
          params: from `init_params`.
          context: of the step; its token ids, lengths and number of drafts are read.
        """
        k = context.config.num_speculative_tokens
        history = params if self.history else None
        arrays = (context.token_ids, context.lengths, history)
        lookup: Lookup
        lookup, num_matching = traced_for_platform(_lookup, arrays, self, k)
        # Of as many tokens at most as a match in a text has, so that lengths can be compared.
        predicted = look_up_predictions(context, self.max_match - 1)
        if predicted is None:
            return lookup
        return lookup.or_predicted(predicted, num_matching, self.tree_depth)


@jax.jit
def _added(history: dict[str, jax.Array], token_ids: jax.Array) -> dict[str, jax.Array]:
    """Returns the history with one more text ``[A]`` int32, which is padded with -1.

    It is a ring of N places, and `next` is where the next text begins. As each text ends with a -1,
    the place before `next` always has one: of the oldest text, which may be overwritten in part,
    what is left seems to begin at `next`.
    """
    size = history["token_ids"].shape[0]
    first = history["next"]
    # [A] -> [A + 1]: with a -1 at its end, which no match and no draft goes over
    text = jnp.pad(token_ids, (0, 1), constant_values=PLACEHOLDER_TOKEN_ID)
    count = jnp.sum(text >= 0, dtype=jnp.int32)
    offset = jnp.arange(text.shape[0], dtype=jnp.int32)
    # [A + 1]: the text and one -1, of a long text the end; nothing of an empty one
    is_kept = (offset <= count) & (offset > count - size) & (count > 0)
    # [A + 1] -> places of the ring: at most N that follow one another, so none comes twice
    place = jnp.where(is_kept, (first + offset) % size, size)  # others are dropped
    following = first + jnp.where(count > 0, count + 1, 0)
    return {
        "token_ids": history["token_ids"].at[place].set(text, mode="drop"),
        "next": following % size,
    }


class _Corpus(NamedTuple):
    """Places where the last tokens of a text may have occurred before.

    Attributes:
      token_ids: ``[N]`` int32, a ring: texts, each followed by a -1.
      first: ``[]`` int32, where the oldest begins.
      matches: ``[N]`` int32, how many tokens before each place equal the last ones of the text;
        0 for a place without a token, or with too short a match.
    """

    token_ids: jax.Array
    first: jax.Array
    matches: jax.Array

    @classmethod
    def of(cls, token_ids: jax.Array, first: jax.Array, last: jax.Array, min_match: int) -> _Corpus:
        """Returns the corpus with its matches of the tokens `last`, the newest first."""
        size = token_ids.shape[0]
        longest = last.shape[0]
        # [N] -> [D - 1 + N]: the tokens before the first are the last of the ring. No run goes over
        # the end of a text: there is a -1, which none of the last tokens equals. Where the ring's
        # newest text ends and the oldest begins, that is so, too.
        ring = jnp.pad(token_ids, (longest, 0), mode="wrap")
        # [N]: whether all tokens so far before each place are equal, and how many are
        run = token_ids >= 0
        matches = jnp.zeros((size,), jnp.int32)
        for back in range(longest):
            # [N]: the token back + 1 places before each place
            begin = longest - 1 - back
            run &= ring[begin : begin + size] == last[back]
            matches += run.astype(jnp.int32)
        return cls(token_ids, first, jnp.where(matches >= min_match, matches, 0))


def _lookup(
    arrays: tuple[jax.Array, jax.Array, dict[str, jax.Array] | None],
    drafter: SuffixDrafter,
    k: int,
    platform: Platform,
) -> tuple[Lookup, jax.Array]:
    """Returns the lookup in texts and history, and ``[B]`` int32 its longest matches.

    Args:
      arrays: the texts ``[B, L]``, their lengths ``[B]``, and the history or None.
      drafter: whose fields say what is looked for.
      platform: that it is compiled for.
    """
    token_ids, lengths, history = arrays
    back = jnp.arange(1, drafter.max_match, dtype=jnp.int32)

    def corpora_of(text: jax.Array, length: jax.Array) -> list[_Corpus]:
        """Returns where one text ``[L]`` may be searched: in itself, and in the history."""
        # [D - 1]: its last tokens, the newest first
        place = length - back
        last = jnp.where(place >= 0, text[jnp.maximum(place, 0)], _NO_TOKEN)
        # [L] -> [L + 1]: ended by a -1, even if the text fills the buffer
        is_text = jnp.arange(text.shape[0] + 1, dtype=jnp.int32) < length
        ended = jnp.where(is_text, jnp.pad(text, (0, 1)), PLACEHOLDER_TOKEN_ID)
        corpora = [_Corpus.of(ended, jnp.int32(0), last, drafter.min_match)]
        if history is not None:
            # The next text takes the place of the oldest, so this begins there.
            others = _Corpus.of(history["token_ids"], history["next"], last, drafter.min_match)
            corpora.append(others)
        return corpora

    draft = _tree if drafter.tree_depth else _draft

    def best(corpora: list[_Corpus]) -> Lookup:
        """Returns the drafts of one request with the largest score; of equal ones, of its text."""
        lookup, *others = (draft(corpus, drafter, k) for corpus in corpora)
        for other in others:
            is_better = other.scores > lookup.scores
            lookup = jax.tree.map(lambda x, y, b=is_better: jnp.where(b, y, x), lookup, other)
        return lookup

    # Arrays of each corpus get a first axis of B: [B, L + 1], and [B, N] of the history.
    corpora = jax.vmap(corpora_of)(token_ids, lengths)
    # [B, N] -> [B] of each corpus, and of these the longest
    longest = jnp.max(jnp.stack([jnp.max(corpus.matches, axis=1) for corpus in corpora]), axis=0)
    size = lengths.shape[0]
    nothing = Lookup(
        jnp.full((size, k), PLACEHOLDER_TOKEN_ID, jnp.int32),
        jnp.zeros((size, k), jnp.float32),
        jnp.zeros((size,), jnp.float32),
        jnp.zeros((size, k), jnp.int32) if drafter.tree_depth else None,
    )
    if platform != "cpu":
        return jax.vmap(best)(corpora), longest
    # Only CPUs compute nothing where nothing matches: elsewhere the host would wait to know. It is
    # one choice for all requests: under `jax.vmap` a choice for each would compute both branches.
    is_found = jnp.any(jnp.stack([jnp.any(corpus.matches > 0) for corpus in corpora]))
    lookup: Lookup = lax.cond(is_found, jax.vmap(best), lambda _: nothing, corpora)
    return lookup, longest


def _lengths(drafter: SuffixDrafter) -> tuple[np.ndarray, np.ndarray]:
    """Returns the M numbers m of tokens that may match, and the most drafts for each, ``[M]``."""
    # Static, so that the loops of `_draft` and `_tree` have fixed sizes. M is D - min_match.
    m = np.arange(drafter.min_match, drafter.max_match)
    # Rounding must not take a draft away: a factor of 0.7 gives 10 tokens 7 drafts.
    return m, np.minimum(np.floor(m * drafter.spec_factor + 1e-6), drafter.max_match - m)


def _nearest(corpus: _Corpus, count: int, longest: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the E = `count` places with the longest matches, the latest first among equals.

    Three arrays: how many tokens match, ``[E]`` int32, 0 for no place; the age of the place,
    ``[E]`` int32, 0 for the oldest; the tokens from there on, ``[E, longest]``.
    """
    size = corpus.token_ids.shape[0]
    # [N]: one number that orders by match, then by age; both can be read from it again. At most
    # 126 N + N - 1, which int32 holds for N up to 2**24.
    age = (jnp.arange(size, dtype=jnp.int32) - corpus.first) % size
    ranked = jnp.where(corpus.matches > 0, corpus.matches * size + age, 0)
    # [N] -> [E]
    ranked = lax.top_k(ranked, min(count, size))[0]
    matches = ranked // size
    age = ranked % size
    # [E, longest]: where the tokens from each place on are in the ring. They end at a -1: what
    # comes after it, of another text, is not drafted.
    offset = jnp.arange(longest, dtype=jnp.int32)
    place = (age[:, None] + corpus.first + offset[None, :]) % size
    return matches, age, corpus.token_ids[place]


def _draft(corpus: _Corpus, drafter: SuffixDrafter, k: int) -> Lookup:
    """Returns the draft with the largest score, of those for each number m of tokens that match."""
    m, limits = _lengths(drafter)
    size = corpus.token_ids.shape[0]
    longest = min(k, int(limits.max()))
    matches, age, following = _nearest(corpus, drafter.max_occurrences, longest)
    # [M, E]: the places that agree with the draft so far, and [M] their number, with the end
    alive = matches[None, :] >= m[:, None]
    total = jnp.sum(alive, axis=1, dtype=jnp.int32) + 1
    # c / (n + 1) at first, then c' / c. [M]: the product of these over the drafts so far
    probability = jnp.ones((m.size,), jnp.float32)
    every_token: list[jax.Array] = []
    every_probability: list[jax.Array] = []
    for j in range(longest):
        # [E], [E, E]: the next token of each place, and which places have the same
        token = following[:, j]
        is_same = (token[:, None] == token[None, :]) & (token >= 0)[None, :]
        # [M, E]: how many places have the token of this one next
        counts = jnp.sum(alive[:, :, None] & is_same[None, :, :], axis=1, dtype=jnp.int32)
        counts = jnp.where(alive, counts, 0)
        # [M]: a place with the most frequent token, the latest of equals. If no place has a token
        # left, the count is 0, and so are this probability and all after it.
        chosen = jnp.argmax(counts * size + age[None, :], axis=1)
        count = jnp.take_along_axis(counts, chosen[:, None], axis=1)[:, 0]
        probability *= count / total
        # A draft that ends here has no probability from here on: 0 times anything stays 0.
        goes_on = (probability >= drafter.min_probability) & (j < limits)
        probability = jnp.where(goes_on, probability, 0)
        # [M, E]: the places that have the drafted token go on
        alive &= token[None, :] == token[chosen][:, None]
        total = jnp.maximum(count, 1)
        every_token.append(token[chosen])
        every_probability.append(probability)
    # [M]: the scores, and of these the largest; of equals that of the longest match
    scores = sum(every_probability, start=jnp.zeros((m.size,), jnp.float32))
    # m ascends, and argmax takes the first of equals: so it looks from the end.
    best = m.size - 1 - jnp.argmax(scores[::-1])
    # [longest, M] -> [longest] -> [K]
    probabilities = jnp.stack(every_probability)[:, best]
    token_ids = jnp.where(probabilities > 0, jnp.stack(every_token)[:, best], PLACEHOLDER_TOKEN_ID)
    missing = (0, k - longest)
    return Lookup(
        jnp.pad(token_ids, missing, constant_values=PLACEHOLDER_TOKEN_ID),
        jnp.pad(probabilities, missing),
        scores[best],
    )


def _tree(corpus: _Corpus, drafter: SuffixDrafter, k: int) -> Lookup:
    """Returns the K likeliest nodes of the tree that what followed the places is merged into.

    Node (j, e) is the first j + 1 tokens from place e on. The first of the places that agree in
    these stands for all of them: it has the longest match, so it is among those of every m.
    """
    m, limits = _lengths(drafter)
    depth = min(k, drafter.tree_depth, int(limits.max()))
    matches, _, following = _nearest(corpus, drafter.max_occurrences, depth)
    # [E, E, L] -> [L, E, E], with L the depth: whether two places agree in their first j + 1 tokens
    is_same = (following[:, None, :] == following[None, :, :]) & (following >= 0)[:, None, :]
    agrees = jnp.moveaxis(jnp.cumprod(is_same.astype(jnp.int32), axis=2), 2, 0)
    # [L, E]: the place that stands for each node
    first = jnp.argmax(agrees, axis=2).astype(jnp.int32)
    stands = first == jnp.arange(matches.shape[0], dtype=jnp.int32)[None, :]
    # [M, E]: the places where m tokens match, and [M] their number, with the end of the text
    alive = (matches[None, :] >= m[:, None]).astype(jnp.int32)
    total = jnp.sum(alive, axis=1, dtype=jnp.int32) + 1
    # [M, L, E]: how many of these go on to a node, and its probability by them
    counts = jnp.einsum("me,jfe->mjf", alive, agrees)
    probability = counts / total[:, None, None]
    # [M, L] -> [M, L, E]: not too deep for m, not too improbable, and a node of its own
    is_drafted = np.arange(depth)[None, :] < limits[:, None]
    is_drafted = is_drafted[:, :, None] & (probability >= drafter.min_probability)
    is_drafted &= (alive[:, None, :] > 0) & stands[None, :, :]
    # [L, E]: by the m for which it is largest. A node has no more than the node above it, for each
    # m, so the best nodes have their parents among them.
    best = jnp.max(jnp.where(is_drafted, probability, 0), axis=0)
    # [L - 1, E] -> [L, E]: the node above, of the place that stands for one token less
    level = jnp.arange(depth - 1, dtype=jnp.int32)[:, None]
    above = 1 + level * matches.shape[0] + first[:-1]
    parents = jnp.pad(above, ((1, 0), (0, 0)))
    # [L, E] -> [1, L * E], of which the K best; the logarithm of 0 is -inf, which is no candidate
    nodes = Candidates(*(x.reshape(1, -1) for x in (following.T, parents, jnp.log(best))))
    token_ids, parents = best_nodes(nodes, k)
    # [L * E] -> [K]: their probabilities, in the same order, as both take the first of equals
    likely = lax.top_k(best.reshape(-1), min(k, best.size))[0]
    likely = jnp.pad(likely, (0, k - likely.shape[0]))
    return Lookup(token_ids[0], likely, jnp.sum(likely), parents[0])
