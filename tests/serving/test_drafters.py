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
        (dict(feature_layers=[0, 1]), TypeError, "feature_layers must be a tuple of ints"),
        (dict(feature_layers=(0.5,)), TypeError, "feature_layers must be a tuple of ints"),
        (dict(tree_depth=1.5), TypeError, "tree_depth must be an int"),
        (dict(tree_depth=-1), ValueError, "tree_depth must be at least 0"),
        (dict(batch_axis=-1), ValueError, "batch_axis must be at least 0"),
        (dict(reads_target_cache=0), TypeError, "reads_target_cache must be a bool"),
        (dict(may_abstain=1), TypeError, "may_abstain must be a bool"),
        (dict(has_history=None), TypeError, "has_history must be a bool"),
        (dict(chunks="yes"), TypeError, "chunks must be a bool"),
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


# Donation

MODEL = lm.ModelDrafter(engines.llama(8))
LISTED = lm.ModelDrafter(engines.llama(8), ids=[5, 3, 1, 0, 2, 4])
PIECES = lm.RetokenizingDrafter(engines.llama(8), ids=[5, 3, 1])
SUFFIX = lm.SuffixDrafter(history=9)
EAGLE3, BLOCK = test_eagle3.ENGINE, block_heads.ENGINE
AGREEMENT = dataclasses.replace(engines.CONFIG, rejection_sample_method="agreement")


DRAFTERS: dict[str, tuple[lm.Drafter, Callable[[], Any]]] = {
    "n-grams": (lm.NGramDrafter(), lambda: None),
    "history": (SUFFIX, SUFFIX.init_params),
    "model": (MODEL, lambda: engines.weights_of(engines.LLAMA)[1]),
    "listed": (LISTED, lambda: engines.weights_of(engines.LLAMA)[1]),
    "pieces": (
        PIECES,
        lambda: lm.RetokenizedParams(
            engines.weights_of(engines.LLAMA)[1], jnp.arange(6, dtype=jnp.int32)[:, None]
        ),
    ),
    "EAGLE-3": (EAGLE3.drafter, lambda: test_eagle3.weights_of(EAGLE3)[1]),
    "block": (BLOCK.drafter, lambda: block_heads.weights_of(BLOCK)[1]),
    "lookup and head": (
        lm.FirstOf(SUFFIX, EAGLE3.drafter),
        lambda: pair(test_eagle3.weights_of(EAGLE3)[1]),
    ),
    "lookup and model": (
        lm.FirstOf(SUFFIX, MODEL),
        lambda: pair(engines.weights_of(engines.LLAMA)[1]),
    ),
    "tree": (
        dataclasses.replace(EAGLE3.drafter, tree_depth=2),
        lambda: test_eagle3.weights_of(EAGLE3)[1],
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize(("drafter", "params_of"), DRAFTERS.values(), ids=DRAFTERS)
def test_a_new_state_can_be_donated_whole_and_leaves_the_weights(drafter, params_of):
    """No two of its arrays are one buffer, and none is one of the weights."""
    engine = engine_of(drafter, draft_budget=(0, 2))
    weights = params_of(), engines.weights_of(engines.LLAMA)[0]
    state = engine.init_state(*weights)
    jax.block_until_ready(jax.jit(lambda x: x, donate_argnums=0)(state))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(weights))


# Steps of some slots


def engine_of(drafter: lm.Drafter, **fields: Any) -> lm.Engine:
    needs_agreement = drafter.serves.tree_depth or drafter.serves.has_history
    config = AGREEMENT if needs_agreement else engines.CONFIG
    return dataclasses.replace(engines.LLAMA, drafter=drafter, config=config, **fields)


FEW = ("model", "EAGLE-3", "lookup and head")


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", [x if x in FEW else pytest.param(x, marks=pytest.mark.long) for x in DRAFTERS]
)
def test_steps_of_some_slots_are_together_a_step_of_all(name):
    """Records, sequences, features, caches and stores; two pairs of slots, in any order."""
    drafter, params_of = DRAFTERS[name]
    engine, params = engine_of(drafter), (engines.weights_of(engines.LLAMA)[0], params_of())
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
@pytest.mark.parametrize("drafter", [SUFFIX, EAGLE3.drafter, BLOCK.drafter])
def test_trees_need_their_rule_and_room_for_their_nodes(drafter, changes, message):
    drafter = dataclasses.replace(drafter, tree_depth=2)
    config = dataclasses.replace(AGREEMENT, **changes)
    message = rf"^config\.{message}.*: {type(drafter).__name__} with tree_depth=2 proposes trees"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(engines.LLAMA, drafter=drafter, config=config)


def pair(params: Any) -> tuple[Any, Any]:
    return SUFFIX.init_params(), params
