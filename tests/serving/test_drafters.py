"""What a drafter returns is held to its contract while the loop is traced."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import zeros
from models.weights import random_weights
from upper_floor import protocol

import jax_specdec as sd
from jax_specdec import lm

from . import block_heads, engines, test_eagle3, tiny

B, K, V = 2, engines.K, engines.VOCAB
GOOD = np.zeros((B, K), np.int32)


@dataclasses.dataclass(frozen=True)
class Returning(tiny.Scripted):
    """Returns whatever it is told to, made of the store and the cache it is given."""

    make: Callable[[Any, Any], Any]
    has_store: bool = False

    def init_store(self, params: Any, batch_size: int, config: sd.SpecDecodeConfig) -> Any:
        return sd.DraftStore.create(batch_size, K, V) if self.has_store else None

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return {"seen": jnp.zeros((batch_size,), jnp.int32)}

    def propose(self, params: Any, context: lm.DraftContext, cache: Any, store: Any) -> Any:
        return self.make(store, cache)


def ids(array: Any) -> Callable[[Any, Any], Any]:
    return lambda store, cache: (lm.Proposal(array, store), cache)


def cached(proposal: Any) -> Callable[[Any, Any], Any]:
    return lambda store, cache: (proposal, cache)


IDS = "the token_ids of Returning.propose must "
OTHER_CACHE = {"seen": zeros((B,))}
LAYOUT = "with the layout it was given, "
CASES: list[tuple[type[Exception], str, Callable[[Any, Any], Any], bool]] = [
    (ValueError, IDS, ids(np.zeros((B, K + 1), np.int32)), False),
    (ValueError, IDS, ids(np.zeros((B - 1, K), np.int32)), False),
    (TypeError, IDS, ids(np.zeros((B, K), np.float32)), False),
    (TypeError, IDS, ids(None), False),
    (TypeError, "what Returning.propose returns must ", lambda store, cache: None, False),
    (TypeError, "the proposal of Returning.propose must ", cached(GOOD), False),
    (
        ValueError,
        f"return the cache {LAYOUT}{{'seen': 'int32[2]'}}, but it returned None",
        lambda store, cache: (lm.Proposal(GOOD, store), None),
        False,
    ),
    (
        ValueError,
        "it returned {'seen': 'float32[2]'}",
        lambda store, cache: (lm.Proposal(GOOD), OTHER_CACHE),
        False,
    ),
    (
        ValueError,
        f"return the store {LAYOUT}DraftStore(logits='float32[4, 6]'",
        cached(lm.Proposal(GOOD)),
        True,
    ),
    (
        ValueError,
        f"return the store {LAYOUT}None, but it returned DraftStore(",
        lambda *given: cached(lm.Proposal(GOOD, sd.DraftStore.create(B, K, V)))(*given),
        False,
    ),
]


def generate(drafter: lm.Drafter) -> lm.GenerateOutput:
    return lm.generate(
        tiny.Trigram(V),
        jnp.asarray(engines.TARGET),
        [[1], [2, 3]],
        drafter=drafter,
        draft_params=zeros((B, 4), jnp.int32),
        config=engines.CONFIG,
        max_new_tokens=2,
    )


@pytest.mark.parametrize(("error", "message", "make", "has_store"), CASES)
def test_what_breaks_the_contract_is_named_with_the_drafter(error, message, make, has_store):
    with pytest.raises(error, match=re.escape(message)):
        generate(Returning(make, has_store))


class Old:
    """Has the methods of a `Drafter`, and is none."""

    def propose(self, params: Any, context: Any, cache: Any, store: Any) -> Any: ...


class Lacking(lm.Drafter):
    """Proposes nothing."""


class Undeclared(tiny.Scripted):
    """Declares something else than what a drafter serves."""

    serves: Any = {"chunks": False}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Old, "drafter must be a Drafter, but it is .*: derive Old from jax_specdec.lm.Drafter"),
        (lambda: lm.NGramDrafter, "drafter must be a Drafter, but it is .*: make an object, NGram"),
        (Undeclared, "drafter.serves must be a DrafterServes, but it is {'chunks': False}"),
        (Lacking, "Can't instantiate abstract class Lacking"),
    ],
)
def test_what_is_no_drafter_is_refused_by_name(make, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        generate(make())
    with pytest.raises(TypeError, match=f"^{message}"):
        lm.Engine(tiny.Trigram(V), make(), engines.CONFIG, num_slots=B, max_length=8)


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        (
            dict(aux_hidden_state_layers=[0, 1]),
            TypeError,
            "aux_hidden_state_layers must be a tuple of ints",
        ),
        (
            dict(aux_hidden_state_layers=(0.5,)),
            TypeError,
            "aux_hidden_state_layers must be a tuple of ints",
        ),
        (dict(tree_depth=1.5), TypeError, "tree_depth must be an int"),
        (dict(tree_depth=-1), ValueError, "tree_depth must be at least 0"),
        (dict(batch_axis=-1), ValueError, "batch_axis must be at least 0"),
        (dict(reads_target_cache=0), TypeError, "reads_target_cache must be a bool"),
        (dict(may_abstain=1), TypeError, "may_abstain must be a bool"),
        (dict(has_history=None), TypeError, "has_history must be a bool"),
        (dict(chunks="yes"), TypeError, "chunks must be a bool"),
        (dict(slots=1), TypeError, "slots must be a bool"),
        (dict(reads_target_cache=True), ValueError, "slots must be true with reads_target_cache"),
    ],
)
def test_what_no_drafter_can_declare_is_refused(declared, error, message):
    with pytest.raises(error, match=f"^serves.{message}"):
        lm.DrafterServes(**declared)


def test_an_engine_names_it_too():
    engine = lm.Engine(
        tiny.Trigram(V),
        Returning(ids(np.zeros((B, 1), np.int32))),
        engines.CONFIG,
        num_slots=B,
        max_length=8,
    )
    state = jax.eval_shape(engine.init_state)
    with pytest.raises(ValueError, match=re.escape(IDS)):
        jax.eval_shape(engine.step, jnp.asarray(engines.TARGET), None, state)


@pytest.mark.newest
def test_what_keeps_the_contract_is_taken():
    assert [len(tokens) for tokens in generate(Returning(ids(GOOD))).completions] == [2, 2]


# Every drafter

MODEL = lm.ModelDrafter(engines.llama(8))
LISTED = lm.ModelDrafter(engines.llama(8), ids=[5, 3, 1, 0, 2, 4])
PIECES = lm.RetokenizingDrafter(engines.llama(8), ids=[5, 3, 1])
SUFFIX = lm.SuffixDrafter(history=9)
EAGLE3, BLOCK = test_eagle3.ENGINE, block_heads.ENGINE
READS = lm.models.GemmaAssistantConfig(
    vocab_size=engines.VOCAB,
    hidden_size=8,
    layers=(dataclasses.replace(engines.LLAMA.model.config.layers[0], keys_of=0),),
    target_hidden_size=16,
    target_layers=1,
    target_norm=engines.LLAMA.model.config.norm,
    num_centroids=3,
    num_active_centroids=2,
)
ASSISTANT = lm.GemmaAssistantDrafter(lm.models.GemmaAssistantHead(READS))
AGREEMENT = dataclasses.replace(engines.CONFIG, rejection_sample_method="agreement")


def of_model() -> Any:
    return engines.weights_of(engines.LLAMA)[1]


def of_pieces() -> lm.RetokenizedParams:
    return lm.RetokenizedParams(of_model(), jnp.arange(6, dtype=jnp.int32)[:, None])


def of_eagle3() -> Any:
    return test_eagle3.weights_of(EAGLE3)[1]


def of_block() -> Any:
    return block_heads.weights_of(BLOCK)[1]


def of_assistant() -> Any:
    params = random_weights(ASSISTANT.head, 8, 4.0)
    return params | {"target_ids": jnp.array([3, 0, 5, 1, 4, 2])}


def with_suffix(params_of: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (SUFFIX.init_params(), params_of())


DRAFTERS: dict[str, tuple[lm.Drafter, Callable[[], Any]]] = {
    "ngram": (lm.NGramDrafter(), lambda: None),
    "suffix": (SUFFIX, SUFFIX.init_params),
    "suffix trees": (dataclasses.replace(SUFFIX, tree_depth=2), SUFFIX.init_params),
    "model": (MODEL, of_model),
    "model of some ids": (LISTED, of_model),
    "model of pieces": (PIECES, of_pieces),
    "eagle3": (EAGLE3.drafter, of_eagle3),
    "eagle3 trees": (dataclasses.replace(EAGLE3.drafter, tree_depth=2), of_eagle3),
    "block": (BLOCK.drafter, of_block),
    "block trees": (dataclasses.replace(BLOCK.drafter, tree_depth=2), of_block),
    "assistant": (ASSISTANT, of_assistant),
    "assistant trees": (dataclasses.replace(ASSISTANT, tree_depth=2), of_assistant),
    "suffix, then eagle3": (lm.FirstOf(SUFFIX, EAGLE3.drafter), with_suffix(of_eagle3)),
    "suffix, then model": (lm.FirstOf(SUFFIX, MODEL), with_suffix(of_model)),
}
"""A new drafter gets a line here, and is held to all that `TestEveryDrafter` asks for."""

TEXTS = [[1, 4, 1, 4, 1], [3], [2, 5, 0, 2, 5, 0, 2], [4, 4, 4]]
OTHERS = [TEXTS[0], [5, 5], [0, 1, 2, 3, 4, 5, 0, 1], [2]]
# Each is read in two chunks.
LONGER = [[1, 4, 1, 4, 1, 0, 2] * 2, [3] * 9, [2, 5, 0] * 4, [4, 1, 5, 5, 0, 3, 2, 4, 1, 5]]


def config_of(drafter: lm.Drafter) -> sd.SpecDecodeConfig:
    needs_agreement = drafter.serves.tree_depth or drafter.serves.has_history
    return AGREEMENT if needs_agreement else engines.CONFIG


def engine_of(drafter: lm.Drafter, **fields: Any) -> lm.Engine:
    config = config_of(drafter)
    return dataclasses.replace(engines.LLAMA, drafter=drafter, config=config, **fields)


@functools.cache
def calls_of(name: str) -> tuple[Any, Any]:
    """Of a drafter: what reads prompts, and what proposes; each compiled once."""
    drafter, params_of = DRAFTERS[name]
    params = params_of()
    return (
        jax.jit(functools.partial(drafter.prefill, params)),
        jax.jit(functools.partial(drafter.propose, params)),
    )


def features_of(name: str, texts: list[list[int]]) -> np.ndarray:
    """``[B, L, A*H]``, as a target might compute them: those of a text, wherever it stands."""
    size = (
        len(DRAFTERS[name][0].serves.aux_hidden_state_layers)
        * engines.LLAMA.model.config.hidden_size
    )
    shape = engines.LONGEST, size
    rows = [np.random.default_rng(text).normal(size=shape) for text in texts]
    return np.stack(rows).astype(np.float32)


def target_cache_of(texts: list[list[int]]) -> Any:
    """As a target might leave it: keys and values of a text, wherever it stands."""
    one = jax.eval_shape(lambda: engines.LLAMA.model.init_cache(1, engines.LONGEST))

    def filled(text: list[int]) -> Any:
        rng = np.random.default_rng(text)
        return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), one)

    return jax.tree.map(lambda *x: jnp.concatenate(x), *map(filled, texts))


def padded(texts: list[list[int]]) -> np.ndarray:
    """``[B, L]`` int32."""
    return np.array([text + [0] * (engines.LONGEST - len(text)) for text in texts], np.int32)


def read(name: str, texts: list[list[int]], cache: Any, start: int = 0) -> Any:
    """The cache after a chunk of the prompts; a new one where there is none."""
    chunk = slice(start, start + engines.PIECE)
    ids, features = padded(texts), features_of(name, texts)[:, chunk]
    begin = jnp.full(len(texts), start, jnp.int32)
    rows = protocol.Rows(jnp.asarray(ids[:, chunk]), begin)
    if not features.size:
        return calls_of(name)[0](rows, cache)
    following = jnp.asarray(ids[:, start + engines.PIECE])
    return calls_of(name)[0](rows, cache, jnp.asarray(features), following)


def context_of(name: str, texts: list[list[int]], *, runs: bool = True) -> lm.DraftContext:
    """Of requests that run, after their prompts were read; or of some that do not."""
    lengths = np.array([len(text) for text in texts], np.int32)
    features = features_of(name, texts)
    given: dict[str, Any] = {}
    if features.size:
        # Of a prompt its last row that has a next token comes once more.
        last = features[np.arange(len(texts)), np.maximum(lengths - 2, 0)]
        given["features"] = jnp.asarray(last[:, None])
        given["num_features"] = jnp.asarray(((lengths > 1) & runs).astype(np.int32))
    if DRAFTERS[name][0].serves.reads_target_cache:
        given["target_cache"] = target_cache_of(texts)
    # A request has the key and the temperature of its text, wherever it stands.
    sums = np.array([sum(text) for text in texts], np.uint32)
    return lm.DraftContext(
        jnp.asarray(padded(texts)),
        jnp.asarray(lengths),
        sd.SamplingParams(jnp.asarray(np.float32(sums % 3 / 2))),
        jax.vmap(jax.random.key)(jnp.asarray(sums)),
        config_of(DRAFTERS[name][0]),
        active=jnp.full(len(texts), runs),
        **given,
    )


def empty(name: str) -> tuple[Any, Any]:
    """A cache and a store."""
    drafter, params_of = DRAFTERS[name]
    store = drafter.init_store(params_of(), len(TEXTS), config_of(drafter))
    return drafter.init_cache(len(TEXTS), engines.LONGEST), store


def drafts_of(name: str, texts: list[list[int]]) -> np.ndarray:
    """What is proposed after prompts of one chunk."""
    cache, store = empty(name)
    cache = read(name, texts, cache)
    return proposed(calls_of(name)[1](context_of(name, texts), cache, store)[0])


def proposed(proposal: lm.Proposal) -> np.ndarray:
    """Ids ``[B, 1, K]``, and of trees the parents of these as the second row."""
    given = [x for x in (proposal.token_ids, proposal.parents) if x is not None]
    return np.stack([np.asarray(x) for x in given], axis=1)


LONG = {"suffix trees", "eagle3 trees", "block trees", "assistant trees", "suffix, then model"}


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in DRAFTERS]
)
class TestEveryDrafter:
    def test_a_new_state_can_be_donated_whole_and_leaves_the_weights(self, name):
        """No two of its arrays are one buffer, and none is one of the weights."""
        drafter, params_of = DRAFTERS[name]
        engine = engine_of(drafter, draft_budget=(0, 2))
        weights = params_of(), engines.weights_of(engines.LLAMA)[0]
        state = engine.init_state(*weights)
        jax.block_until_ready(jax.jit(lambda x: x, donate_argnums=0)(state))
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        assert not any(x.is_deleted() for x in jax.tree.leaves(weights))

    def test_drafts_are_ids_and_nodes_follow_nodes_before_them(self, name):
        ids, *parents = np.moveaxis(drafts_of(name, TEXTS), 1, 0)
        assert ((ids >= -1) & (ids < engines.VOCAB)).all() and (ids >= 0).any()
        for above in parents:  # of trees; in a chain none comes after a gap
            assert ((above >= 0) & (above <= np.arange(K)))[ids >= 0].all()
        assert parents or (np.diff((ids < 0).astype(int), axis=1) >= 0).all()

    def test_drafts_depend_neither_on_the_slot_nor_on_the_others(self, name):
        alike = drafts_of(name, TEXTS)
        order = [2, 0, 3, 1]
        moved = drafts_of(name, [TEXTS[b] for b in order])
        np.testing.assert_array_equal(moved, alike[order])
        beside = drafts_of(name, OTHERS)
        np.testing.assert_array_equal(beside[0], alike[0])
        assert (beside[1:] != alike[1:]).any()

    def test_what_was_read_of_a_prompt_stays_while_its_request_does_not_run(self, name):
        """A step for others between two chunks leaves no trace, whatever it is told of this one."""
        propose = calls_of(name)[1]
        cache, store = empty(name)
        cache = read(name, LONGER, cache)
        between = [[5 - x for x in text[: engines.PIECE]] + [text[8]] for text in LONGER]
        proposal, after = propose(context_of(name, between, runs=False), cache, store)
        found = []
        for kept, written in ((cache, store), (after, proposal.store)):
            kept = read(name, LONGER, kept, start=engines.PIECE)
            found.append(propose(context_of(name, LONGER), kept, written)[0])
        jax.tree.map(np.testing.assert_array_equal, *found)  # the rows of the store, too


# Steps of some slots


FEW = ("ngram", "model", "eagle3")


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", [x if x in FEW else pytest.param(x, marks=pytest.mark.long) for x in DRAFTERS]
)
def test_steps_of_some_slots_are_together_a_step_of_all(name):
    """Records, sequences, features, caches and stores; two pairs of slots, in any order."""
    drafter, params_of = DRAFTERS[name]
    config = AGREEMENT if drafter.serves.has_history else config_of(drafter)  # it samples
    engine = dataclasses.replace(engines.LLAMA, drafter=drafter, config=config)
    params = engines.weights_of(engines.LLAMA)[0], params_of()
    driver = engines.driver_of(engine, *params)
    for slot in range(engines.SLOTS):
        prompt, sampled = [1 + slot, 3, slot, 3, 1 + slot, 3], 0.9 * (slot % 2)
        driver.submit(prompt[slot:], max_new_tokens=20, temperature=sampled)
    for _ in range(3):
        driver.step()
    step = jax.jit(engine.step)
    wanted, whole = step(*params, driver.state)
    some, first = step(*params, driver.state, slots=jnp.array([2, 0]))
    found, last = step(*params, some, slots=jnp.array([1, 3]))
    assert (np.asarray(first.num_kept)[[1, 3]] == 0).all() and (first.token_ids[1] == -1).all()
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    for slot, record in ((0, first), (1, last), (2, first), (3, last)):
        jax.tree.map(lambda x, y, slot=slot: compare(x[slot], y[slot]), record, whole)
    if drafter.serves.may_abstain:  # of one slot, without drafts, the pass is of one token
        for slot in range(engines.SLOTS):
            _, record = step(*params, driver.state, slots=jnp.array([slot]))
            jax.tree.map(lambda x, y, slot=slot: compare(x[slot], y[slot]), record, whole)
    keys = found.batch.keys, wanted.batch.keys
    assert (jax.random.key_data(keys[0]) == jax.random.key_data(keys[1])).all()
    found, wanted = (
        jax.tree.leaves(dataclasses.replace(x, batch=dataclasses.replace(x.batch, keys=None)))
        for x in (found, wanted)
    )
    for x, y in zip(found, wanted, strict=True):
        compare(x, y)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejection_sample_method": "standard"}, 'rejection_sample_method must be "agreement"'),
        ({"rejection_sample_method": "block"}, 'rejection_sample_method must be "agreement"'),
        ({"num_speculative_tokens": 64}, "num_speculative_tokens must be below 64"),
    ],
)
@pytest.mark.parametrize("drafter", [SUFFIX, EAGLE3.drafter, BLOCK.drafter, ASSISTANT])
def test_trees_need_their_rule_and_room_for_their_nodes(drafter, changes, message):
    drafter = dataclasses.replace(drafter, tree_depth=2)
    config = dataclasses.replace(AGREEMENT, **changes)
    message = rf"^config\.{message}.*: {type(drafter).__name__} with tree_depth=2 proposes trees"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(engines.LLAMA, drafter=drafter, config=config)
