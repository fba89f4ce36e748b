"""What a drafter returns is held to its contract while the loop is traced."""

from __future__ import annotations

import dataclasses
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

from . import engines, test_block, test_eagle3, tiny

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


IDS = "the token_ids of Returning.propose must "
CASES: list[tuple[Callable[[Any, Any], Any], bool, type[Exception], str]] = [
    (ids(np.zeros((B, K + 1), np.int32)), False, ValueError, IDS),
    (ids(np.zeros((B - 1, K), np.int32)), False, ValueError, IDS),
    (ids(np.zeros((B, K), np.float32)), False, TypeError, IDS),
    (ids(None), False, TypeError, IDS),
    (lambda store, cache: None, False, TypeError, "what Returning.propose returns must "),
    (
        lambda store, cache: (GOOD, cache),
        False,
        TypeError,
        "the proposal of Returning.propose must ",
    ),
    (
        lambda store, cache: (lm.Proposal(GOOD, store, zeros((B,))), cache),
        False,
        ValueError,
        "the confidences of Returning.propose must ",
    ),
    (
        lambda store, cache: (lm.Proposal(GOOD, store), None),
        False,
        ValueError,
        "return the cache with the layout it was given, {'seen': 'int32[2]'}, but it returned None",
    ),
    (
        lambda store, cache: (lm.Proposal(GOOD), {"seen": zeros((B,))}),
        False,
        ValueError,
        "it returned {'seen': 'float32[2]'}",
    ),
    (
        lambda store, cache: (lm.Proposal(GOOD), cache),
        True,
        ValueError,
        "return the store with the layout it was given, DraftStore(logits='float32[4, 6]'",
    ),
    (
        lambda store, cache: (lm.Proposal(GOOD, sd.DraftStore.create(B, K, V)), cache),
        False,
        ValueError,
        "return the store with the layout it was given, None, but it returned DraftStore(",
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


@pytest.mark.parametrize(("make", "has_store", "error", "message"), CASES)
def test_what_breaks_the_contract_is_named_with_the_drafter(make, has_store, error, message):
    with pytest.raises(error, match=re.escape(message)):
        generate(Returning(make, has_store))


@dataclasses.dataclass(frozen=True)
class Old(tiny.Scripted):
    """A drafter of the form before `DraftContext`."""

    def propose(self, params, token_ids, lengths, cache, store, *, sampling, keys, config): ...


def test_a_drafter_of_the_old_form_hears_the_new_one():
    message = re.escape(
        "drafter must have a propose that takes (params, context, cache, store), but Old.propose "
        "takes (params, token_ids, lengths, cache, store, *, sampling, keys, config): token_ids, "
        "lengths, sampling, keys, config and the rest are fields of the context, a "
        "DraftContext"
    )
    with pytest.raises(TypeError, match=message):
        generate(Old())
    with pytest.raises(TypeError, match=message):
        lm.Engine(tiny.Trigram(V), Old(), engines.CONFIG, num_slots=B, max_length=8)


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
SUFFIX = lm.SuffixDrafter(history=9)
EAGLE3, BLOCK = test_eagle3.ENGINE, test_block.ENGINE
AGREEMENT = dataclasses.replace(engines.CONFIG, rejection_sample_method="agreement")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("drafter", "params_of"),
    [
        (lm.NGramDrafter(), lambda: None),
        (SUFFIX, SUFFIX.init_params),
        (MODEL, lambda: engines.weights_of(engines.LLAMA)[1]),
        (LISTED, lambda: engines.weights_of(engines.LLAMA)[1]),
        (EAGLE3.drafter, lambda: test_eagle3.weights_of(EAGLE3)[1]),
        (BLOCK.drafter, lambda: test_block.weights_of(BLOCK)[1]),
        (lm.FirstOf(SUFFIX, EAGLE3.drafter), lambda: pair(test_eagle3.weights_of(EAGLE3)[1])),
        (lm.FirstOf(SUFFIX, MODEL), lambda: pair(engines.weights_of(engines.LLAMA)[1])),
        (
            dataclasses.replace(EAGLE3.drafter, tree_depth=2),
            lambda: test_eagle3.weights_of(EAGLE3)[1],
        ),
    ],
)
def test_a_new_state_can_be_donated_whole_and_leaves_the_weights(drafter, params_of):
    """No two of its arrays are one buffer, and none is one of the weights."""
    is_tree = getattr(drafter, "tree_depth", 0) > 0
    config = AGREEMENT if is_tree or drafter == SUFFIX else engines.CONFIG
    engine = dataclasses.replace(engines.LLAMA, drafter=drafter, config=config, draft_budget=(0, 2))
    weights = params_of(), engines.weights_of(engines.LLAMA)[0]
    state = engine.init_state(*weights)
    jax.block_until_ready(jax.jit(lambda x: x, donate_argnums=0)(state))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(weights))


def pair(params: Any) -> tuple[Any, Any]:
    return SUFFIX.init_params(), params
