"""Tokens that a grammar forces as drafts: the exact law of the output, and the engine's texts."""

from __future__ import annotations

import contextlib
import copy as copy_lib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import numpy as np
import pytest
from formats.checkpoints import copy
from upper_floor import decoding_matchers, schemas

import jax_specdec as sd
from jax_specdec import lm

from . import engines
from .engines import VOCAB
from .grammars import Allowed, Follows, of_digits

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("engines")]


def bits(row: np.ndarray, vocab_size: int) -> np.ndarray:
    return (row[np.arange(vocab_size) // 32] >> np.arange(vocab_size) % 32 & 1).astype(float)


# The exact law, over all drafts that there can be

V, K = 4, 2
TREES: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {
    "from the start": {(): (2,), (2,): (1,), (2, 1): (0, 3)},
    "one, then free": {(): (3,)},
    "behind some drafts": {(0,): (1,), (1,): (0, 2), (2, 3): (0,)},
    "behind all drafts": {(x,): (3 - x,) for x in range(V)},
    "a choice, then forced": {(): (0, 1), (0,): (2,), (0, 2): (3,)},
}


def allowed_by(tree: dict[tuple[int, ...], tuple[int, ...]]) -> Allowed:
    """By a tree of texts; every token after a text that is not in it."""
    return lambda prefix: tree.get(prefix, (0, 1, 2, 3))


def by_length(*sets: tuple[int, ...]) -> Allowed:
    """By the length of the text; two tokens after the last."""
    return lambda text: sets[len(text)] if len(text) < len(sets) else (7, 8)


Table = dict[tuple[int, ...], np.ndarray]


def random_table(rng: np.random.Generator) -> Table:
    prefixes = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(K + 1)))
    return {prefix: rng.dirichlet(np.ones(V)) for prefix in prefixes}


def tail(p: Table, allowed: Allowed, prefix: tuple[int, ...]) -> np.ndarray:
    """The law of K + 1 tokens that begin with `prefix`, the others sampled one by one."""
    if len(prefix) == K + 1:
        law = np.zeros((V,) * (K + 1))
        law[prefix] = 1
        return law
    row = p[prefix] * [token in allowed(prefix) for token in range(V)]
    laws = (x * tail(p, allowed, (*prefix, y)) for y, x in enumerate(row / row.sum()) if x)
    return sum(laws, np.zeros((V,) * (K + 1)))


def verified(
    p: Table, q: Table | None, ids: tuple[int, ...], mask: np.ndarray, block: bool, then: Any
) -> np.ndarray:
    """The law of K + 1 tokens by either rule; drafts of no `q` are one-hot."""
    count = next((i for i, x in enumerate(ids) if x < 0), K)
    ids = ids[:count]
    rows = [p[ids[:i]] * bits(mask[i], V) for i in range(count + 1)]
    rows = [row / row.sum() for row in rows]
    drawn = [np.eye(V)[x] if q is None else q[ids[:i]] for i, x in enumerate(ids)]
    weight, pass_ = [1.0], [1.0]
    for i, x in enumerate(ids):
        ratio = rows[i][x] / drawn[i][x]
        weight.append(min(1.0, weight[i] * ratio) if block else min(1.0, ratio))
    left = [np.maximum((weight[i] if block else 1) * rows[i] - drawn[i], 0) for i in range(count)]
    law: Any = np.zeros((V,) * (K + 1))
    if block:  # the longest prefix that passes, each by itself
        for i in range(1, count + 1):
            mass = left[i].sum() if i < count else weight[i]
            pass_.append(mass / (mass + 1 - weight[i]) if mass + 1 - weight[i] > 0 else 1.0)
        kept = [pass_[i] * np.prod([1 - x for x in pass_[i + 1 :]]) for i in range(count + 1)]
    else:  # the first draft that is rejected
        reached = np.cumprod(weight)
        kept = [reached[i] * (1 - weight[i + 1]) for i in range(count)] + [reached[count]]
    for i, chance in enumerate(kept):
        row = rows[i] if i == count or not left[i].sum() else left[i]
        for y, x in enumerate(row / row.sum()):
            if chance * x > 0:
                law = law + chance * x * then((*ids[:i], y))
    return law


Verify = Callable[[sd.grammar.ForcedDrafts, Table, Table, bool, Any], np.ndarray]


def as_it_is(
    drafts: sd.grammar.ForcedDrafts, p: Table, q: Table | None, block: bool, then: Any
) -> np.ndarray:
    own = None if drafts.is_forced[0] else q
    ids = tuple(drafts.token_ids[0].tolist())
    return verified(p, own, ids, drafts.token_bitmask, block, then)


def one_hot(drafts: Any, p: Table, q: Table, block: bool, then: Any) -> np.ndarray:
    """Drafts that were made without a distribution."""
    return as_it_is(drafts, p, None, block, then)


def law_of(
    matcher: Any, p: Table, q: Table, block: bool, then: Any, verify: Verify, **given: Any
) -> np.ndarray:
    law = np.zeros((V,) * (K + 1))
    for ids in itertools.product(range(V), repeat=K):
        chance = np.prod([q[ids[:i]][x] for i, x in enumerate(ids)])
        if chance == 0:
            continue
        token_ids = np.array([ids], np.int32)
        drafts = sd.grammar.forced_drafts([matcher], token_ids, vocab_size=V, **given)
        law += chance * verify(drafts, p, q, block, then)
    return law


@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
@pytest.mark.parametrize("name", TREES)
def test_the_law_is_that_of_sampling_under_the_grammar(name: str, block: bool) -> None:
    """For drafts with q, for one-hot drafts, and for both with a limit."""
    tree = TREES[name]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        p, q = random_table(rng), random_table(rng)
        allowed = allowed_by(tree)
        then = functools.cache(functools.partial(tail, p, allowed))
        plain = then(())
        for most in (0, 1, K):
            given: dict[str, Any] = dict(max_drafts=most)
            found = law_of(Follows(allowed), p, q, block, then, as_it_is, **given)
            np.testing.assert_allclose(found, plain, atol=1e-12)
            found = law_of(Follows(allowed), p, q, block, then, one_hot, one_hot=True, **given)
            np.testing.assert_allclose(found, plain, atol=1e-12)


def test_a_token_that_its_mask_does_not_force_is_verified_and_a_planted_fault_is_seen() -> None:
    grammar = llguidance.LLMatcher.grammar_from_regex("[1-3]{9}")
    matcher = of_digits(grammar, b"123")
    matcher.forced_token_ids = lambda: [2, 1]  # though its mask allows others
    rng = np.random.default_rng(0)
    p, q = random_table(rng), random_table(rng)
    then = functools.cache(functools.partial(tail, p, lambda prefix: (1, 2, 3)))

    def trusting(drafts: Any, p: Table, q: Table, block: bool, then: Any) -> np.ndarray:
        """The planted fault: what is called forced is accepted without its mask."""
        return then(tuple(drafts.token_ids[0].tolist()))

    for block in (False, True):
        given = matcher, p, q, block, then
        np.testing.assert_allclose(law_of(*given, as_it_is), then(()), atol=1e-12)
        assert np.abs(law_of(*given, trusting) - then(())).sum() > 0.2


def test_what_is_forced_is_asked_for_once_and_masks_are_those_of_a_new_matcher() -> None:
    class Ones:
        eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)
        tokens, num_read = (b"<end>", b"1", b"11", b"2"), 0

        def __call__(self, text: str) -> list[int]:
            self.num_read += len(text)
            return [3 if x == "2" else len(x) for x in re.findall("11|1|2", text)]

    ones = Ones()
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ones), eos_token=[0])
    grammar = llguidance.LLMatcher.grammar_from_regex("2?1{201}2")
    library = llguidance.LLMatcher(tokenizer, grammar)
    matcher = sd.grammar.LlguidanceMatcher(library, [0])
    text, ones.num_read = [1], 0
    assert matcher.accept_token(1)
    while 0 not in text:
        matcher = copy_lib.deepcopy(matcher)
        given: Any = dict(vocab_size=32, max_drafts=len(text) % 4)
        found = sd.grammar.forced_drafts([matcher], [[-1] * 3], **given)
        new = [x for x in found.token_ids[0].tolist() if x >= 0]
        new.append(int(np.flatnonzero(bits(found.token_bitmask[len(new)], 4))[0]))
        sd.grammar.advance_matchers([matcher], [new])
        text += new
    assert text == [1, *[2] * 100, 3, 0] and ones.num_read < 1000


# The drafts


def forced(allowed: Allowed, *drafts: int, **given: Any) -> list[int]:
    found = sd.grammar.forced_drafts(
        [Follows(allowed)], np.array([drafts], np.int32), vocab_size=32, **given
    )
    return found.token_ids[0].tolist()


def test_drafts_stay_behind_what_they_were_drafted_after() -> None:
    two = by_length((3,), (5,))
    assert forced(two, 3, 5, 7, 9) == [3, 5, 7, 9]
    assert forced(two, 3, 6, 7, 8) == [3, 5, -1, -1]
    assert forced(two, -1, -1, -1, -1) == [3, 5, -1, -1]
    assert forced(two, 4, 4, 4, 4, max_drafts=1) == [3, -1, -1, -1]
    assert forced(two, 4, 4, 4, 4, max_drafts=0) == [4, 4, 4, 4]
    later = by_length((3, 4), (5,), (6,))
    assert forced(later, 3, 9, 9, 9) == [3, 9, 9, 9]
    assert forced(later, 3, 9, 9, 9, one_hot=True) == [3, 5, 6, -1]
    assert forced(later, 3, 5, 6, 7, one_hot=True) == [3, 5, 6, 7]
    assert forced(later, 9, 5, 6, 7, one_hot=True) == [9, 5, 6, 7]  # refused: keeps its id
    assert forced(later, 3, 5, 9, 7, one_hot=True, max_drafts=2) == [3, 5, 9, 7]


def test_the_masks_are_those_of_the_drafts_that_are_returned() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        table = {
            text: tuple(rng.permutation(6)[: rng.integers(1, 4)].tolist())
            for n in range(4)
            for text in itertools.product(range(6), repeat=n)
        }
        ids = rng.integers(-1, 6, (2, 3)).astype(np.int32)
        matchers = [Follows(table.__getitem__), None]
        given: Any = dict(vocab_size=40, end_token_ids=[1])
        found = sd.grammar.forced_drafts(matchers, ids, one_hot=rng.random() < 0.5, **given)
        drafts = sd.Drafts.from_dense(found.token_ids)
        mask = sd.grammar.grammar_bitmask(matchers, drafts, **given)
        np.testing.assert_array_equal(found.token_bitmask, mask)
        assert found.token_ids[1].tolist() == ids[1].tolist() and not found.is_forced[1]
        assert matchers[0].tokens == ()
        with sd.grammar.GrammarLookahead(matchers, vocab_size=40) as lookahead:
            only = table[()] if len(table[()]) == 1 else (-1,)
            assert lookahead.forced_token_ids.tolist() == [*only, -1]


SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "role": {"enum": ["admin", "administrator", "guest"]},
        },
        "required": ["name", "age", "role"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"const": "yes"}, "minItems": 2, "maxItems": 3},
    "nothing to choose": {"const": {"answer": [1, True, None]}},
}


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def grammar_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    if request.param == "bytes":
        yield schemas.byte_tokenizer(), 256, [0]
        return
    directory = copy("qwen2", tmp_path_factory.mktemp("words") / "tiny")
    tokenizer = lm.load_tokenizer(directory)
    described = tokenizer.library_tokenizer.to_str()
    size, stops = 288, [*tokenizer.stop_token_ids]
    yield llguidance.LLTokenizer(described, n_vocab=size, eos_token=stops), size, stops


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_llguidance_forces_is_all_that_its_masks_allow(
    name: str, grammar_tokenizer: Any
) -> None:
    tokenizer, size, stops = grammar_tokenizer
    rng, num_forced = np.random.default_rng(0), 0
    for _ in range(4):
        matcher = schemas.compile_schema(json.dumps(SCHEMAS[name]), tokenizer)
        matcher = sd.grammar.LlguidanceMatcher(matcher, stops)
        text: list[int] = []
        while not {*text} & {*stops} and len(text) < 80:
            drafts = sd.grammar.forced_drafts(
                [matcher], np.full((1, 6), -1, np.int32), vocab_size=size, one_hot=True
            )
            run = [token for token in drafts.token_ids[0].tolist() if token >= 0]
            rows = [bits(row, size) for row in drafts.token_bitmask]
            for token, row in zip(run, rows, strict=False):
                assert np.flatnonzero(row).tolist() == [token]
            num_forced += len(run)
            follows = np.flatnonzero(rows[len(run)])
            if len(run) < 6 and not {*run} & {*stops} and len(follows) == 1:
                assert len(stops) > 1 or follows[0] not in stops, "a token that was not found"
            new = [*run, *([] if {*run} & {*stops} else [int(rng.choice(follows))])]
            sd.grammar.advance_matchers([matcher], [new])
            text += new
    assert num_forced > 8


# The engine


def by_step(text: tuple[int, ...]) -> tuple[int, ...]:
    """A choice, another, what one of its tokens alone forces, and two forced tokens."""
    place = len(text) % 5
    if place < 2:
        return ((0, 1, 2), (1, 4, 5))[place]
    if place == 2:
        return (0,) if text[-1] == 4 else (1, 2, 3, 5)
    return ((text[-1] + 3) % VOCAB,)


@contextlib.contextmanager
def nothing_forced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        function = decoding_matchers.forced_drafts

        def without(*args: Any, **given: Any) -> Any:
            return function(*args, **(given | dict(max_drafts=0)))

        patch.setattr(decoding_matchers, "forced_drafts", without)
        yield


@pytest.mark.long
def test_texts_are_those_without_forced_drafts_in_fewer_steps() -> None:
    found, passes = [], []
    for context in (contextlib.nullcontext, nothing_forced):
        with context():
            rng, driver = np.random.default_rng(0), engines.driver_of(engines.TABLE)
            updates: list[lm.RequestUpdate] = []
            for i in range(10):
                asked: dict[str, Any] = dict(
                    prompt=rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist(),
                    max_new_tokens=int(rng.integers(8, 24)),
                )
                request_id = driver.submit(**asked, matcher=Follows(by_step) if i % 3 else None)
                updates += driver.step()
                if i % 5 == 4:
                    driver.preempt(request_id)
            found.append(engines.run(driver, updates))
            passes.append(driver.stats().num_verifications)
    with_, without = found
    assert {i: x.token_ids for i, x in with_.items()} == {
        i: x.token_ids for i, x in without.items()
    }
    assert passes[0] < 0.9 * passes[1]


def test_forced_drafts_come_in_the_first_step_and_keep_to_limits() -> None:
    driver = engines.driver_of(engines.TABLE)

    def allowed(text: tuple[int, ...]) -> tuple[int, ...]:
        return ((len(text) + 1) % VOCAB,)

    asked: dict[str, Any] = dict(prompt=[1], max_new_tokens=9)
    for most, sizes in ((None, [3, 3, 3]), (1, [2, 2, 2, 2, 1]), (0, [1] * 9)):
        i = driver.submit(**asked, max_drafts=most, matcher=Follows(allowed))
        one = engines.run(driver)[i]
        assert one.token_ids == [i % VOCAB for i in range(1, 10)]
        assert [len(update.token_ids) for update in one.updates] == sizes


@pytest.mark.slow
def test_rates_learn_nothing_of_forced_drafts() -> None:
    driver = engines.driver_of(engines.BUDGETED)
    before = driver.state.draft_rates.tried.tolist()
    driver.submit([1], max_new_tokens=9, matcher=Follows(lambda text: (2,)))
    engines.run(driver)
    assert driver.state.draft_rates.tried.tolist() == before


# Mistakes


@pytest.mark.parametrize(
    ("error", "name", "token_ids"),
    [
        (ValueError, "token_ids", np.zeros((3,), np.int32)),
        (TypeError, "token_ids", np.zeros((1, 3))),
        (ValueError, "matchers", np.zeros((2, 3), np.int32)),
    ],
)
def test_mistakes_are_named(error: type[Exception], name: str, token_ids: np.ndarray) -> None:
    with pytest.raises(error, match=f"^{name}"):
        sd.grammar.forced_drafts([None], token_ids, vocab_size=8)
