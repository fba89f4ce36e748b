"""Grammars: an automaton of our own against decoding one token at a time, and real loops."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llguidance
import numpy as np
import pytest

import jax_specdec as sd

from .chi_square import CONTROL, assert_distributed, p_value, tally_texts
from .grammars import of_digits

pytestmark = pytest.mark.long

V, K = 37, 3  # two words of a bitmask
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
EOS, BEGIN = 0, 35
IDS = (EOS, 1, 2, 5, 7, 9, 33, 34, BEGIN, 36)
"""Tokens that the target ever writes, so that all texts can be counted."""

EDGES: dict[int, dict[int, int]] = {
    0: {1: 1, 33: 1, 5: 2},
    1: {2: 1, 34: 2, 7: 3, 9: 0},
    2: {1: 0, 36: 3, EOS: 4, 34: 5},
    3: {EOS: 4},
}
"""Of each state, the tokens allowed and where they lead; 4 and 5 are the end, with and without a
stop token."""


class Automaton:
    """A matcher that never forgives a call that it should not get."""

    def __init__(self) -> None:
        self.states = [0]

    def is_terminated(self) -> bool:
        return self.states[-1] in (4, 5)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        assert not self.is_terminated()
        assert bitmask.dtype == np.int32 and bitmask.shape[1] == 2
        row = np.zeros((2,), np.uint32)
        for token in EDGES[self.states[-1]]:
            row[token // 32] |= np.uint32(1 << token % 32)
        bitmask[index] = row.view(np.int32)

    def accept_token(self, token_id: int) -> bool:
        assert type(token_id) is int and not self.is_terminated()
        self.states.append(EDGES[self.states[-1]][token_id])  # a KeyError if it is not allowed
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens < len(self.states)
        del self.states[-num_tokens:]


KINDS: dict[str, Callable[[], Any]] = {
    "grammar": Automaton,
    "delayed": lambda: sd.grammar.DelayedMatcher(Automaton(), [BEGIN]),
    "after two": lambda: sd.grammar.DelayedMatcher(Automaton(), [7, BEGIN]),
    "none": lambda: None,
}


def allowed(kind: str, text: Sequence[int], end: Sequence[int] | None = None) -> set[int]:
    """The tokens that may follow a text: all that a grammar is, without a matcher."""
    text = list(text)
    begin = {"grammar": [], "delayed": [BEGIN], "after two": [7, BEGIN]}.get(kind)
    everything = set(range(V))
    if begin is None:
        return everything
    starts = [
        i for i in range(len(text) + 1) if i >= len(begin) and text[i - len(begin) : i] == begin
    ]
    if not starts:
        return everything
    state = 0
    for token in text[starts[0] :]:
        if state not in EDGES:
            break
        state = EDGES[state].get(token, -1)
        assert state >= 0, f"{text} is not legal"
    return set(EDGES[state]) if state in EDGES else everything if end is None else set(end)


def unpacked(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:V]).tolist())


# Rows

CASES: list[tuple[str, list[int], list[int]]] = [  # a grammar, a text, and drafts
    ("grammar", [], [1, 2, 7]),
    ("grammar", [33, 34], [1, 5, 36]),
    ("grammar", [], [9, 1, 2]),  # the first is refused
    ("grammar", [1], [34, 9, 2]),  # the second
    ("grammar", [5], [EOS, 1]),  # ends in mid-draft, with a stop token
    ("grammar", [5], [34, 8, 2]),  # and without one
    ("grammar", [5, 36, EOS], [1, 2, 3]),  # has ended
    ("grammar", [1, 7], []),
    ("grammar", [1], [-1, 2]),
    ("grammar", [1], [2, V, 2]),
    ("delayed", [8], [4, 6, 8]),
    ("delayed", [8], [BEGIN, 1, 7]),  # begins in mid-draft
    ("delayed", [8], [6, BEGIN, 2]),  # and the token after it is refused
    ("delayed", [8, BEGIN, 5], [36, EOS, 3]),
    ("delayed", [BEGIN], [5, EOS, BEGIN]),
    ("after two", [7], [BEGIN, 1, 2]),
    ("after two", [BEGIN, 7], [7, BEGIN, 5]),
    ("after two", [7, BEGIN, 1], [9, 36]),
    ("none", [3, 9], [8, 8, 8]),
    ("none", [], []),
]


def matchers(cases: Sequence[tuple[str, list[int], list[int]]]) -> list[Any]:
    found = [KINDS[kind]() for kind, _, _ in cases]
    sd.grammar.advance_matchers(found, [text for _, text, _ in cases])
    return found


def expected_rows(
    kind: str, text: list[int], drafts: list[int], end: Sequence[int] | None
) -> list[set[int]]:
    rows, everything = [], set(range(V))
    for i in range(len(drafts) + 1):
        before = drafts[:i]
        legal = all(
            0 <= token < V and token in allowed(kind, [*text, *before[:j]], end)
            for j, token in enumerate(before)
        )
        rows.append(allowed(kind, [*text, *before], end) if legal else everything)
    return rows


@pytest.mark.parametrize("end", [None, [EOS, 33]])
def test_each_row_allows_what_may_follow_the_drafts_before_it(end: list[int] | None) -> None:
    found = matchers(CASES)
    drafts = sd.Drafts.from_flat(
        jnp.array([token for _, _, drafts in CASES for token in drafts] + [8, 8]),  # padding
        jnp.array([len(drafts) for _, _, drafts in CASES]),
    )
    rows = sd.grammar.grammar_bitmask(found, drafts, vocab_size=V, end_token_ids=end)
    assert rows.dtype == np.uint32
    assert rows.shape == (drafts.token_ids.shape[0] + len(CASES), 2)
    place = 0
    for kind, text, own in CASES:
        for want in expected_rows(kind, text, own, end):
            assert unpacked(rows[place]) == want, (kind, text, own)
            place += 1
    assert (rows[place:] == 2**32 - 1).all()
    again = sd.grammar.grammar_bitmask(found, drafts, vocab_size=V, end_token_ids=end)
    np.testing.assert_array_equal(rows, again, "they went back")


def test_a_drafters_masks_are_those_of_the_targets_rows() -> None:
    cases = [case for case in CASES if len(case[2]) == K]
    found = matchers(cases)
    token_ids = np.array([drafts for _, _, drafts in cases])
    masks = []
    with sd.grammar.GrammarLookahead(found, vocab_size=V) as lookahead:
        for i in range(K):
            masks.append(lookahead.bitmask)
            lookahead.append(token_ids[:, i])
        masks.append(lookahead.bitmask)
    drafts = sd.Drafts.from_dense(jnp.asarray(token_ids))
    wanted = sd.grammar.grammar_bitmask(found, drafts, vocab_size=V)
    np.testing.assert_array_equal(np.stack(masks, axis=1).reshape(-1, 2), wanted)


def test_matchers_go_back_when_drafting_fails() -> None:
    matcher = Automaton()
    with (
        pytest.raises(ZeroDivisionError),
        sd.grammar.GrammarLookahead([matcher], vocab_size=V) as walk,
    ):
        walk.append([1])
        assert matcher.states == [0, 1]
        raise ZeroDivisionError
    assert matcher.states == [0]
    walk.close()
    assert matcher.states == [0]


# Decoding

RANDOM = np.random.default_rng(3)
TARGET = np.full((V, V), -30.0, np.float32)
TARGET[:, IDS] = 1.2 * RANDOM.standard_normal((V, len(IDS)))
DRAFT = (0.7 * TARGET + 0.8 * RANDOM.standard_normal((V, V))).astype(np.float32)
FIRST = 9
TEMPERATURE = 0.9


@functools.partial(jax.jit, static_argnames="masked")
def draw(
    last: jax.Array, mask: jax.Array, keys: jax.Array, positions: jax.Array, masked: bool
) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(DRAFT)[last] / TEMPERATURE
    if masked:
        bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
        x = jnp.where(bits.reshape(x.shape[0], -1)[:, :V] == 1, x, -jnp.inf)
    keys = jax.vmap(lambda key, p: jax.random.fold_in(jax.random.fold_in(key, 99), p))(
        keys, positions
    )
    return jax.vmap(jax.random.categorical)(keys, x), jax.nn.softmax(x)


@jax.jit
def verify(
    last: jax.Array,
    ids: jax.Array,
    probs: jax.Array,
    counts: jax.Array,
    mask: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
) -> sd.RejectionSampleOutput:
    tokens = jnp.concatenate([last[:, None], jnp.maximum(ids, 0)], axis=1)
    return sd.rejection_sample(
        jnp.asarray(TARGET)[tokens.reshape(-1)],
        sd.Drafts.from_dense(ids, counts, sd.DraftProbs(probs)),
        sampling=sd.SamplingParams(temperature),
        keys=keys,
        positions=positions,
        config=CONFIG,
        token_bitmask=mask,
    )


def decode(
    kinds: Sequence[str],
    count: int,
    temperature: float,
    *,
    masked_drafter: bool = False,
    forbidden_to_placeholder: bool = False,
) -> tuple[list[list[int]], float]:
    """Texts of `count` tokens, cut after a stop token, and the share of drafts accepted."""
    batch = len(kinds)
    found = [KINDS[kind]() for kind in kinds]
    texts: list[list[int]] = [[] for _ in kinds]
    keys = jax.random.split(jax.random.key(8), batch)
    counts = (np.arange(batch) // 4 + 3) % (K + 1) if not masked_drafter else np.full(batch, K)
    accepted, proposed = 0, 0
    while min(map(len, texts)) < count:
        last = np.array([([FIRST] + text)[-1] for text in texts])
        positions = jnp.array([len(text) for text in texts])
        ids, probs, token = [], [], jnp.asarray(last)
        with sd.grammar.GrammarLookahead(found, vocab_size=V) as lookahead:
            for i in range(K):
                token, q = draw(token, lookahead.bitmask, keys, positions + i, masked_drafter)
                ids.append(np.asarray(token))
                probs.append(q)
                lookahead.append(ids[-1])
        drafted = np.stack(ids, axis=1)
        drafts = sd.Drafts.from_dense(drafted, counts)
        mask = sd.grammar.grammar_bitmask(found, drafts, vocab_size=V)
        if forbidden_to_placeholder:  # what must not be done
            drafted = without_forbidden(found, drafted)
        output = verify(
            last, drafted, jnp.stack(probs, axis=1), counts, mask,
            jnp.full((batch,), temperature), keys, positions,
        )  # fmt: skip
        assert not np.asarray(output.status).any()
        emitted = sd.parse_output(output)
        sd.grammar.advance_matchers(found, emitted)
        texts = [text + new for text, new in zip(texts, emitted, strict=True)]
        accepted += int(output.num_accepted.sum())
        proposed += int(counts.sum())
    return [text[:count] for text in texts], accepted / proposed


def without_forbidden(found: list[Any], drafted: np.ndarray) -> np.ndarray:
    drafted = drafted.copy()
    with sd.grammar.GrammarLookahead(found, vocab_size=V) as lookahead:
        for i in range(K):
            column = drafted[:, i]
            request = np.arange(len(column))
            bits = lookahead.bitmask[request, column // 32] >> (column % 32).astype(np.uint32)
            drafted[bits & 1 == 0, i] = -1
            lookahead.append(drafted[:, i])
    return drafted


def cut(text: Sequence[int]) -> tuple[int, ...]:
    """A text up to its first stop token, after which nothing counts."""
    text = tuple(text)
    return text[: text.index(EOS) + 1] if EOS in text else text


def exact(kind: str, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text by plain decoding under the grammar, one token at a time."""
    found: dict[tuple[int, ...], float] = {}
    stack: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while stack:
        text, p = stack.pop()
        if len(text) == length or EOS in text:
            found[text] = p
            continue
        x = TARGET[([FIRST, *text])[-1]].astype(np.float64) / TEMPERATURE
        x[list(set(range(V)) - allowed(kind, text))] = -np.inf
        weights = np.exp(x - x.max())
        for token in IDS:
            if weights[token]:
                stack.append(((*text, token), p * weights[token] / weights.sum()))
    return found


def greedy(kind: str, length: int) -> list[int]:
    text: list[int] = []
    while len(text) < length and EOS not in text:
        row = TARGET[([FIRST, *text])[-1]].copy()
        row[list(set(range(V)) - allowed(kind, text))] = -np.inf
        text.append(int(row.argmax()))
    return text


@pytest.mark.parametrize("masked_drafter", [False, True])
def test_greedy_texts_are_those_of_one_token_at_a_time(masked_drafter: bool) -> None:
    kinds = list(itertools.islice(itertools.cycle(KINDS), 16))
    texts, share = decode(kinds, 10, 0.0, masked_drafter=masked_drafter)
    assert 0 < share < 1
    for kind, text in zip(kinds, texts, strict=True):
        want = greedy(kind, 10)
        assert text[: len(want)] == want


@pytest.mark.long
def test_texts_have_the_distribution_of_plain_decoding_under_the_grammar() -> None:
    kinds = ["grammar", "delayed", "after two"] * 4000
    texts, share = decode(kinds, 3, TEMPERATURE)
    assert 0.05 < share < 0.95, f"{share} of the drafts accepted: too one-sided to show much"
    for kind in ("grammar", "delayed", "after two"):
        own = [cut(text) for other, text in zip(kinds, texts, strict=True) if other == kind]
        assert_distributed(*tally_texts(own, exact(kind, 3)), kind)


@pytest.mark.slow
def test_forbidden_drafts_changed_to_no_proposal_bias_the_text() -> None:
    texts, _ = decode(["grammar"] * 12000, 3, TEMPERATURE, forbidden_to_placeholder=True)
    assert p_value(*tally_texts(map(cut, texts), exact("grammar", 3))) < CONTROL


def test_a_masked_drafter_has_more_drafts_accepted() -> None:
    shares = [
        decode(["grammar"] * 16, 4, TEMPERATURE, masked_drafter=masked)[1]
        for masked in (False, True)
    ]
    assert shares[1] > 1.5 * shares[0]


# The page

PAGE = Path(__file__).parents[2] / "docs" / "grammar.md"


@pytest.mark.slow
def test_the_loop_on_the_page_writes_what_its_grammar_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(compile(code[0], str(PAGE), "exec"), scope)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r"\d{3}-\d{4}\n?", line), line
    assert scope["num_accepted"] > 0


# Errors

NONE = sd.Drafts.from_flat(jnp.array([1, 2]), jnp.array([2, 0]))


def lookahead(matchers: Any, **changes: Any) -> sd.grammar.GrammarLookahead:
    return sd.grammar.GrammarLookahead(matchers, **({"vocab_size": V} | changes))


def bitmask(matchers: Any = (None, None), drafts: Any = NONE) -> np.ndarray:
    return sd.grammar.grammar_bitmask(matchers, drafts, vocab_size=V)


TEXTS = [str(i) for i in (*range(10, 100), 1, 347, 3478, *range(8000, 8100))]
NUMBER = llguidance.LLMatcher.grammar_from_regex("|".join(TEXTS))
# Ids 0 and 1 end a text, 2 to 11 are digits.
ten_digits = functools.partial(of_digits, digits=b"0123456789", num_stops=2)


def may_follow(text: str) -> set[int]:
    """The tokens that may follow the beginning of a text."""
    longer = [one for one in TEXTS if len(one) > len(text) and one.startswith(text)]
    return {2 + int(one[len(text)]) for one in longer} | ({0, 1} if text in TEXTS else set())


@pytest.mark.parametrize("is_delayed", [False, True])
def test_rows_that_llguidance_fills_allow_what_may_follow(is_delayed: bool) -> None:
    """All in one call; within a `DelayedMatcher`, draft by draft."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        texts = [str(text)[: rng.integers(0, 4)] for text in rng.choice(TEXTS, 5)]
        matchers: list[Any] = [ten_digits(NUMBER) for _ in texts]
        begin = [9] if is_delayed else []
        if is_delayed:
            matchers = [sd.grammar.DelayedMatcher(matcher, begin) for matcher in matchers]
        sd.grammar.advance_matchers(
            matchers, [begin + [2 + int(x) for x in text] for text in texts]
        )
        drafts = []
        for text in texts:
            ids = [2 + int(x) for x in str(rng.choice(TEXTS))[len(text) :]]
            ids += rng.choice([-1, 0, 1, 3, 9, 99], 2).tolist()
            drafts.append(ids[: rng.integers(0, 5)])
        counts = jnp.array([len(one) for one in drafts])
        flat = sd.Drafts.from_flat(jnp.array([*itertools.chain(*drafts), 5], jnp.int32), counts)
        for _ in range(2):  # the matchers are where they were
            rows = iter(sd.grammar.grammar_bitmask(matchers, flat, vocab_size=12)[:, 0].tolist())
            for text, own in zip(texts, drafts, strict=True):
                allowed: set[int] | None = may_follow(text)
                for token in [*own, -1]:
                    row = next(rows)
                    if allowed is None:
                        continue
                    assert {i for i in range(12) if row >> i & 1} == allowed
                    text += str(token - 2)
                    allowed = may_follow(text) if token in allowed and token > 1 else None


def test_llguidance_takes_back_stops_and_allows_anything_after_them() -> None:
    matcher = ten_digits(NUMBER)
    assert [matcher.accept_token(token) for token in (3, 7, 1, 0)] == [True] * 4
    bitmask = np.zeros((2, 1), np.int32)
    matcher.fill_next_token_bitmask(bitmask, 1)
    assert bitmask.tolist() == [[0], [-1]] and not matcher.is_terminated()
    matcher.rollback(3)
    matcher.fill_next_token_bitmask(bitmask, 0)
    assert {i for i in range(12) if bitmask[0, 0] >> i & 1} == may_follow("1")
    assert not ten_digits(NUMBER).accept_token(2)


class Fails(Automaton):
    """Raises in one of its methods."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, self.fail)

    def fail(self, *args: Any) -> Any:
        raise ZeroDivisionError("too many states")


@pytest.mark.parametrize(
    "name", ["is_terminated", "fill_next_token_bitmask", "accept_token", "rollback"]
)
def test_a_matcher_that_raises_is_named_and_the_others_go_back(name: str) -> None:
    good = [Automaton(), Automaton()]
    drafts = sd.Drafts.from_dense(jnp.array([[1, 2]] * 3))
    with pytest.raises(
        sd.grammar.GrammarError, match="^.*1.* has failed: too many states$"
    ) as error:
        sd.grammar.grammar_bitmask([good[0], Fails(name), good[1]], drafts, vocab_size=V)
    assert error.value.index == 1 and error.value.reason == "too many states"
    assert [one.states for one in good] == [[0], [0]]


LONG = llguidance.LLMatcher.grammar_from_regex("[23]*2[23]{12}")
FAILING = {  # with the drafts that are allowed before it fails
    "a wrong grammar": (lambda: ten_digits("start: ("), [], "Expected token"),
    "limits": (lambda: ten_digits(LONG, max_lexer_states=20), [4, 4, 4, 5], "many states"),
}


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize(("make", "drafts", "message"), FAILING.values(), ids=FAILING)
def test_a_matcher_of_llguidance_that_fails_raises_its_message(
    make: Callable[[], sd.grammar.LlguidanceMatcher],
    drafts: list[int],
    message: str,
    is_delayed: bool,
) -> None:
    """It would allow stop tokens only, as if its text were complete."""
    first, failing = ten_digits(NUMBER), make()
    matchers: list[Any] = [first, failing]
    if is_delayed:
        matchers[1] = sd.grammar.DelayedMatcher(failing, [9])
        drafts = [9, *drafts]
    flat = sd.Drafts.from_flat(jnp.array([*drafts, 0]), jnp.array([0, len(drafts)]))
    with pytest.raises(sd.grammar.GrammarError, match=message) as error:
        sd.grammar.grammar_bitmask(matchers, flat, vocab_size=12)
    assert error.value.index == 1 and message in failing.error and not first.error
    with pytest.raises(sd.grammar.GrammarError, match=message):
        sd.grammar.advance_matchers(matchers, [[3], [9, 4]])
    first._check()


def test_llguidance_goes_on_after_a_token_that_it_refuses() -> None:
    matcher = ten_digits(LONG)
    assert [matcher.accept_token(token) for token in (7, 4, 7, 5)] == [False, True, False, True]


class Refuses(Automaton):
    def accept_token(self, token_id: int) -> bool:
        return False


class NoRollback:
    accept_token = fill_next_token_bitmask = is_terminated = Automaton.accept_token


advance = sd.grammar.advance_matchers
FALLING = sd.Drafts(np.int32([1, 2]), np.int32([0, 2, 1]))
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: lookahead(Automaton()), TypeError, "matchers"),
    (lambda: lookahead([None, "json"]), TypeError, r"matchers\[1\]"),
    (lambda: lookahead([NoRollback]), TypeError, r"matchers\[0\] must be a .* it has no rollback"),
    (lambda: lookahead([None], vocab_size=0), ValueError, "vocab_size"),
    (lambda: lookahead([None], end_token_ids=[V]), ValueError, "end_token_ids"),
    (lambda: lookahead([None]).append([1, 2]), ValueError, "token_ids"),
    (lambda: bitmask(drafts=[[1]]), TypeError, "drafts"),
    (lambda: jax.jit(lambda drafts: bitmask(drafts=drafts))(NONE), TypeError, "drafts"),
    (lambda: bitmask(drafts=FALLING), ValueError, r"drafts\.cu_num_draft_tokens"),
    (lambda: bitmask([None]), ValueError, "matchers"),
    (lambda: advance([None, None], [[1]]), ValueError, "token_ids"),
    (lambda: advance([None, Refuses()], [[1], [7]]), ValueError, r"token_ids\[1\]"),
    (lambda: sd.grammar.DelayedMatcher(Automaton(), []), ValueError, "begin_token_ids"),
]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_mistakes_get_a_sentence(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()
