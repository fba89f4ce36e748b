"""Prompts that the pass over drafts reads beside: what stands in `test_models` for no model."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import Passed
from passes import run as run_pass
from upper_floor import protocol

import jax_specdec as sd
from jax_specdec import lm

from .test_tree_pass import CONFIG, LAYERS, WHOLE, B, T, entries, made, read, weights
from .weights import random_ids

pytestmark = pytest.mark.newest

P = 8
READING = (1, 3)
"""Requests whose prompts are read: one from its beginning, one from position P on."""
TEXTS = random_ids((B, 2 * P), CONFIG.vocab_size, 11)


@functools.partial(jax.jit, static_argnums=0)
def both(
    model: Any, params: Any, token_ids: Any, start: Any, cache: Any, prompts: Any, parents: Any
) -> Any:
    tree = None if parents is None else sd.TreeRows.of(parents)
    rows = lm.models.Rows(token_ids, start, tree=tree)
    wants = lm.models.Wants(LAYERS)
    (output, read), cache = protocol.apply_groups(model, params, [rows, prompts], cache, wants)
    return Passed(output.logits, cache, output.features), read.features


def prompts_of(texts: np.ndarray) -> lm.models.Rows:
    """Three of them: the last request comes twice."""
    start = np.array([0, P, P], np.int32)
    slots = np.array([*READING, READING[1]], np.int32)
    rows = [texts[slot, first : first + P] for slot, first in zip(slots, start, strict=True)]
    return lm.models.Rows(np.array(rows, np.int32), start, slots)


def given(model: Any, params: Any, texts: np.ndarray) -> tuple[Any, ...]:
    """Trees of drafts of all requests, after the first P tokens of the second prompt."""
    case = made(4)
    before = [*case.texts]
    before[READING[0]], before[READING[1]] = [0], texts[READING[1], :P].tolist()
    start = case.start.copy()
    start[list(READING)] = 0, P
    cache = read(model, params, before, model.init_cache(B, T))
    return params, case.token_ids, start, cache, case.parents


@pytest.mark.long
def test_nan_in_a_prompt_reaches_nobody_else() -> None:
    model, params = WHOLE, weights()
    bad = CONFIG.vocab_size - 1
    params = params | {"embed_tokens": params["embed_tokens"].at[bad].set(jnp.inf)}
    texts = np.minimum(TEXTS, bad - 1)
    spoiled = texts.copy()
    spoiled[READING[0], 2] = bad
    args = given(model, params, texts)
    args = args[0], np.minimum(args[1], bad - 1), *args[2:]
    good, nan = (both(model, *args[:4], prompts_of(one), args[4])[0] for one in (texts, spoiled))
    others = np.array([b for b in range(B) if b != READING[0]])
    used = args[1][others] >= 0
    assert np.isfinite(np.asarray(good.logits)[others][used]).all()
    np.testing.assert_array_equal(nan.logits[others], good.logits[others])
    for b in others:
        for ours, whole in zip(*(entries(x.cache, b, P) for x in (nan, good)), strict=True):
            np.testing.assert_array_equal(ours, whole)


def test_the_cache_is_written_in_place() -> None:
    length = 8192
    cache = jax.eval_shape(lambda: WHOLE.init_cache(B, length))
    params = jax.eval_shape(WHOLE.init_params, jax.random.key(0))
    tokens, start = np.zeros((B, 3), np.int32), np.zeros(B, np.int32)
    groups = [lm.models.Rows(tokens, start), prompts_of(TEXTS)]
    compiled = jax.jit(WHOLE.apply, donate_argnums=2).lower(params, groups, cache).compile()
    whole = sum(x.size * 4 for x in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= whole
    copies = re.findall(rf"= \S*\b{length}\b\S* copy\(", compiled.as_text())
    assert not copies, "nor are parts of it copied while it is read"


GOOD = prompts_of(TEXTS)


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (GOOD._replace(start=GOOD.start[:2]), ValueError, r"groups\[1\]\.start must be .*\[G\]"),
        (GOOD._replace(slots=GOOD.slots * 1.0), TypeError, r"groups\[1\]\.slots must be .*int32"),
        (
            GOOD._replace(token_ids=TEXTS[0]),
            ValueError,
            r"groups\[1\]\.token_ids must be .*\[G, S\]",
        ),
        (
            GOOD._replace(token_ids=np.zeros((3, T + 1), np.int32)),
            ValueError,
            rf"groups\[1\]\.token_ids must have at most {T} tokens per request",
        ),
    ],
)
def test_prompts_that_do_not_fit_are_refused(
    prompts: Any, error: type[Exception], message: str
) -> None:
    params, token_ids, start, cache, _ = given(WHOLE, weights(), TEXTS)
    with pytest.raises(error, match=message):
        both(WHOLE, params, token_ids, start, cache, prompts, None)


@dataclasses.dataclass(frozen=True)
class Features(lm.models.Llama):
    """Gives other features of prompts than it should."""

    shape: tuple[int, ...] | None = None

    def apply(self, *args: Any, **named: Any) -> Any:
        (output, read), cache = super().apply(*args, **named)
        features = None if self.shape is None else jnp.zeros(self.shape)
        return [output, read._replace(features=features)], cache


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (None, TypeError, "model must give features.* returns none"),
        ((3, P, 2), ValueError, rf"features must be \[G, S, A\*H\] = \[3, {P}, 3 H\]"),
    ],
)
def test_features_of_prompts_are_checked(shape: Any, error: type[Exception], message: str) -> None:
    params, token_ids, start, cache, _ = given(WHOLE, weights(), TEXTS)
    with pytest.raises(error, match=message):
        both(Features(CONFIG, shape=shape), params, token_ids, start, cache, GOOD, None)


class ReadOnly(lm.models.Rows):
    """Rows that read the cache and are not written: one property of the record."""

    @property
    def positions(self) -> jax.Array:
        return super().places

    @property
    def places(self) -> jax.Array:
        return super().places + T  # past the end


@pytest.mark.long
def test_a_group_that_reads_without_writing_is_one_property() -> None:
    params, token_ids, start, cache, _ = given(WHOLE, weights(), TEXTS)
    slots = np.array([READING[1]], np.int32)
    begin = np.array([P - 2], np.int32)
    # Tokens that were read before, and others in their place: their keys are not written.
    rows = [ReadOnly(x[slots, P - 2 : P], begin, slots) for x in (TEXTS, TEXTS[:, ::-1])]

    @jax.jit
    def run(rows: lm.models.Rows) -> Any:
        drafts = lm.models.Rows(token_ids, start)
        return WHOLE.apply(params, [drafts, rows], cache)

    ((_, again), after), ((_, other), unchanged) = (run(x) for x in rows)
    wanted = read_logits(TEXTS[slots, :P])[:, P - 2 :]
    np.testing.assert_allclose(again.logits, wanted, rtol=1e-5, atol=1e-5)
    assert not np.allclose(other.logits, wanted, atol=1e-2)
    for found in (after, unchanged):
        pairs = (entries(x, READING[1], P) for x in (found, cache))
        for ours, whole in zip(*pairs, strict=True):
            np.testing.assert_array_equal(ours, whole)


def read_logits(token_ids: np.ndarray) -> Any:
    """Logits ``[B, S, V]`` of whole texts, in a cache of their own."""
    start = np.zeros(len(token_ids), np.int32)
    cache = WHOLE.init_cache(len(token_ids), T)
    return run_pass(WHOLE, weights(), token_ids, start, cache).logits
