"""Lookup with counts equals a count of all substrings written in plain Python."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import tiny

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

SIZE = 24  # of the buffers
K = 4
HISTORY = 16
EXACT = dict(min_match=1, max_occurrences=SIZE, min_probability=0.11)  # no count is 11 in 100

Draft = tuple[list[int], list[float]]


def places(corpus: Sequence[int], last: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Where a token may follow the last ones: how many of these stand before it, and where it is.

    The longest matches first, the latest first of equals. Texts of the corpus end with -1.
    """
    found = []
    for place, token in enumerate(corpus):
        n = 0
        while n < min(most, place, len(last)) and corpus[place - 1 - n] == last[-1 - n]:
            n += 1
        if token >= 0 and n:
            found.append((n, place))
    return sorted(found, reverse=True)


def oracle(
    corpus: Sequence[int], last: Sequence[int], drafter: lm.SuffixDrafter, k: int
) -> list[tuple[float, Draft]]:
    """For each length of a match, its draft and the score of it: one token after another."""
    corpus = [*corpus, -1]
    nearest = places(corpus, last, drafter.max_match - 1)[: drafter.max_occurrences]
    drafts = []
    for m in range(drafter.min_match, drafter.max_match):
        alive = [place for n, place in nearest if n >= m]
        limit = min(k, int(m * drafter.spec_factor + 1e-6), drafter.max_match - m)
        ids: list[int] = []
        probabilities: list[float] = []
        p, total = 1.0, len(alive) + 1
        while len(ids) < limit:
            alive = [place for place in alive if corpus[place] >= 0]
            counts = Counter(corpus[place] for place in alive)
            most = max(counts.values(), default=0)
            p *= most / total
            if p < drafter.min_probability:
                break
            token = corpus[max(place for place in alive if counts[corpus[place]] == most)]
            alive = [place + 1 for place in alive if corpus[place] == token]
            total = len(alive)
            ids.append(token)
            probabilities.append(p)
        drafts.append((sum(probabilities), (ids, probabilities)))
    return drafts


def best(*drafts: tuple[float, Draft]) -> list[Draft]:
    """Those with the largest score, which may be several: float32 decides between equals."""
    most = max(score for score, _ in drafts)
    return [draft for score, draft in drafts if score > most - 1e-5]


def context(token_ids: jax.Array, lengths: jax.Array, k: int = K) -> lm.DraftContext:
    return tiny.context(token_ids, lengths, 0.0, k=k)


@functools.partial(jax.jit, static_argnames=("drafter", "k"))
def looked_up(
    drafter: lm.SuffixDrafter, params: Any, token_ids: jax.Array, lengths: jax.Array, k: int
) -> Any:
    given = context(token_ids, lengths, k)
    proposal, cache = drafter.propose(params, given, drafter.init_cache(*token_ids.shape), None)
    assert proposal.store is None and cache == ()
    found = drafter.lookup(params, given)
    return found.token_ids, found.probabilities, found.scores, proposal.token_ids


def drafts_of(
    drafter: lm.SuffixDrafter,
    texts: Sequence[Sequence[int]],
    params: Any = None,
    *,
    seed: int = 0,
    k: int = K,
) -> list[Draft]:
    """What is drafted for texts in buffers whose rest is rubbish."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 4, (len(texts), SIZE))
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    found = looked_up(drafter, params, jnp.asarray(rows, jnp.int32), lengths, k)
    drafts = []
    for ids, probabilities, score, proposed in zip(*map(np.asarray, found), strict=True):
        count = int((ids >= 0).sum())
        assert (ids[count:] == -1).all() and (probabilities[count:] == 0).all()
        assert (ids == proposed).all()
        assert score == pytest.approx(probabilities.sum(), abs=1e-5)
        drafts.append((ids[:count].tolist(), probabilities[:count].tolist()))
    return drafts


def assert_among(found: Draft, wanted: list[Draft]) -> None:
    assert any(found == (ids, pytest.approx(likely, abs=1e-5)) for ids, likely in wanted), wanted


def texts(count: int, longest: int = SIZE) -> Any:
    """Lists of texts over one to four ids, of which some repeat a part again and again."""
    ids = st.integers(0, 3).flatmap(lambda most: st.integers(0, most))
    plain = st.lists(ids, min_size=1, max_size=longest)
    part = st.lists(ids, min_size=1, max_size=5)
    repeated = st.builds(lambda x, y, n: (x + y * n)[:longest], part, part, st.integers(1, 9))
    return st.lists(st.one_of(plain, repeated), min_size=count, max_size=count)


LONG_DRAFTS = lm.SuffixDrafter(max_match=12, spec_factor=2.5, **EXACT)


def test_of_equal_scores_that_of_the_longest_match_is_taken() -> None:
    """After 3 1 2 once 1 1 2 0, after 1 2 also twice 0 0 0 0: one half each, four times."""
    text = [3, 1, 2, 1, *[1, 2, 0, 0, 0, 0] * 2, 3, 1, 2]
    drafts = drafts_of(LONG_DRAFTS, [text] * 3)
    assert drafts == [([1, 1, 2, 0], [0.5] * 4)] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    "drafter",
    [
        lm.SuffixDrafter(max_match=8, **EXACT),
        LONG_DRAFTS,
        lm.SuffixDrafter(**(EXACT | dict(max_occurrences=3, spec_factor=0.5))),
        lm.SuffixDrafter(max_match=5, **(EXACT | dict(min_match=3))),
    ],
    ids=["counts", "long drafts", "few occurrences", "long matches"],
)
@hypothesis.given(texts=texts(3), seed=st.integers(0, 99))
def test_drafts_are_those_of_a_count_of_all_substrings(drafter, texts, seed) -> None:
    for text, found in zip(texts, drafts_of(drafter, texts, seed=seed), strict=True):
        assert_among(found, best(*oracle(text, text, drafter, K)))


# Drafts of SuffixTree(8).speculate(text, 4, 1.0, 0.0, 0.1) of the package arctic-inference 0.3.0.
GOLDEN = [
    ("bccbcbacacabbcbbccbababbcbb", "ccba", [0.5, 0.5, 0.5, 0.5]),
    ("ccacbbaaacabcabb", "aa", [0.5, 0.5]),
    ("acaccbaca", "ccb", [0.5, 0.5, 0.5]),
    ("cbcbccbac", "b", [0.6]),
    ("caaaccacaaaaa", "aa", [0.6667, 0.3333]),
    ("aabcbaababacbaaabcaacc", "b", [0.4]),
    ("aaabcabcb", "c", [0.6667]),
    ("cbcbbbbccccbab", "b", [0.4286]),
    ("aaccbccaccabcccaaabbcccbba", "a", [0.375]),
    ("caaaaabbabbcbaa", "aa", [0.6, 0.4]),
    ("aaaaaccccbcbbbcacbbbbbb", "bbb", [0.6, 0.4, 0.2]),
    ("aaacbbbbbbb", "bbb", [0.8, 0.6, 0.4]),
    ("abbabbaaaccaacbbabcacbbbb", "ab", [0.5, 0.3333]),
    ("bbbcbabbcabbcacbabba", "bb", [0.6667, 0.6667]),
    ("ccbccbccbccbbbccacccaacacbc", "cbc", [0.75, 0.75, 0.5]),
]


def test_drafts_are_those_of_a_suffix_tree() -> None:
    drafter = lm.SuffixDrafter(max_match=8, min_match=1, max_occurrences=32)
    rows = np.full((len(GOLDEN), 32), -1)
    for row, (text, _, _) in zip(rows, GOLDEN, strict=True):
        row[: len(text)] = ["abc".index(x) for x in text]
    lengths = jnp.asarray([len(text) for text, _, _ in GOLDEN], jnp.int32)
    ids, probabilities, *_ = looked_up(drafter, None, jnp.asarray(rows, jnp.int32), lengths, K)
    for b, (_, draft, wanted) in enumerate(GOLDEN):
        assert "".join("abc"[x] for x in ids[b].tolist() if x >= 0) == draft
        np.testing.assert_allclose(probabilities[b, : len(draft)], wanted, atol=1e-4)


# History


def history_of(drafter: lm.SuffixDrafter, texts: Sequence[Sequence[int]]) -> Any:
    params = drafter.init_params()
    add = jax.jit(drafter.add)
    for text in texts:
        padded = np.full(2 * HISTORY, -1, np.int32)  # one shape: one program
        padded[: len(text)] = text
        params = add(params, padded)
    return params


WITH_HISTORY = lm.SuffixDrafter(max_match=8, history=HISTORY, **EXACT)


@pytest.mark.long
@hypothesis.given(own=texts(1), others=st.integers(0, 5).flatmap(lambda n: texts(n, 2 * HISTORY)))
def test_a_history_holds_the_newest_texts_and_no_match_goes_over_their_ends(own, others) -> None:
    """The ring wraps around again and again; the oracle has a list of tokens."""
    params = history_of(WITH_HISTORY, others)
    newest = [token for text in others for token in [*text, -1]][-HISTORY:]
    assert params["token_ids"].shape == (HISTORY,)
    ring = np.roll(params["token_ids"], -int(params["next"])).tolist()
    assert ring == [-1] * (HISTORY - len(newest)) + newest
    (found,) = drafts_of(WITH_HISTORY, own, params)
    local, other = (oracle(x, own[0], WITH_HISTORY, K) for x in (own[0], newest))
    assert_among(found, best(*local, *other))


def test_of_equal_scores_the_texts_own_draft_is_taken() -> None:
    params = history_of(WITH_HISTORY, [[1, 2, 7, 7]])
    assert drafts_of(WITH_HISTORY, [[1, 2, 8, 8, 1, 2]], params) == [([8, 8], [0.5, 0.5])]
    assert drafts_of(WITH_HISTORY, [[1, 2]], params) == [([7, 7], [0.5, 0.5])]


def test_an_empty_text_changes_nothing() -> None:
    params = history_of(WITH_HISTORY, [[1, 2]])
    jax.tree.map(np.testing.assert_array_equal, params, WITH_HISTORY.add(params, np.full(3, -1)))
    assert lm.SuffixDrafter().add(None, [1, 2]) is None


@pytest.mark.parametrize(
    "params", [None, (), lm.SuffixDrafter(history=8).init_params(), jnp.zeros(HISTORY)]
)
def test_a_history_of_another_kind_is_refused(params) -> None:
    engine = dict(num_slots=2, max_length=16)
    config = sd.SpecDecodeConfig(num_speculative_tokens=2)
    model, weights = lm.load_embedded_pair()[1]
    with pytest.raises(ValueError, match=r"draft_params(\['token_ids'\])? must"):
        lm.EngineDriver(lm.Engine(model, WITH_HISTORY, config, **engine), weights, params)
