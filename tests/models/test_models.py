"""Every model is held to the contract of `CausalModel`, by what it says of texts alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from integrations import test_models as foreign_models
from serving.tiny import Trigram, random_table
from upper_floor import protocol

import jax_specdec as sd
from jax_specdec import lm

from .weights import mixed, random_ids, random_weights, sizes, with_fields

CHECKPOINTS = Path(__file__).parents[1] / "formats"
B, T, S, P = 4, 32, 5, 8  # requests, room, rows of a step and of a prompt
CONFIG = mixed(sizes(41, 24, 40, 3, (6, 2, 8), rope_theta=500.0))
SIX = mixed(sizes(41, 24, 40, 3, (6, 6, 8)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its weights, with those of which it must say the same."""

    model: Any
    params: Any
    whole: Any
    whole_params: Any

    @property
    def vocab_size(self) -> int:
        """Of the ids that have a row, without padding."""
        return self.whole.vocab_size

    @property
    def layers(self) -> tuple[int, ...]:
        if not self.model.serves.features:
            return ()
        count = len(self.whole.config.layers)
        return (0, count - 1, count)


def alone(model: Any, params: Any) -> Case:
    return Case(model, params, model, params)


def llama(**fields: Any) -> Case:
    model = lm.models.Llama(with_fields(CONFIG, **fields))
    return alone(model, random_weights(model, 1, moved=0.3))


def in_int8() -> Case:
    whole = llama(tie_word_embeddings=True)
    return alone(whole.model, lm.models.quantize(whole.params))


def loaded(name: str) -> Case:
    return alone(*lm.load_huggingface(CHECKPOINTS / name, jnp.float32))


def over_devices(count: int, whole: Case) -> Case:
    mesh = jax.make_mesh((count,), ("tensor",), devices=jax.devices()[:count])
    model = lm.models.TensorParallelLlama(whole.model, mesh, "tensor")
    return Case(model, model.shard_params(whole.params), whole.model, whole.params)


def gemma_like() -> Case:
    """Also with biases: whatever a branch adds, devices must add once."""
    biases = dict(qkv_bias=True, o_bias=True)
    fields = dict(scales_embedding=True, logit_softcap=3.0, layers=SIX.layers)
    return llama(norms="around", **biases, **fields)


def of_table() -> Case:
    return alone(Trigram(5), jnp.asarray(random_table(5, 0)))


def of_others() -> Case:
    return alone(foreign_models.MODEL, jax.tree.map(jnp.asarray, foreign_models.weights(0)))


MODELS: dict[str, Callable[[], Case]] = {
    "Llama": llama,
    "int8": in_int8,
    "Gemma 2": lambda: loaded("huggingface/gemma2"),
    "Gemma 3": lambda: loaded("huggingface/gemma3"),
    "Gemma 4, edge": lambda: loaded("gemma4/edge"),
    "Gemma 4, wide": lambda: loaded("gemma4/wide"),
    "3 devices": lambda: over_devices(3, gemma_like()),
    "4 devices, int8": lambda: over_devices(4, in_int8()),
    "2 devices, Gemma 4, edge": lambda: over_devices(2, loaded("gemma4/edge")),
    "2 devices, Gemma 4, wide": lambda: over_devices(2, loaded("gemma4/wide")),
    "plain": of_table,
    "one index": of_others,
}
"""A new model gets a line here, and is held to all that this file asks for."""

DEFAULT = "Llama", "Gemma 4, edge", "3 devices", "plain"
case_of = functools.cache(lambda name: MODELS[name]())


# Passes


def run(
    model: Any, params: Any, groups: Any, cache: Any, layers: tuple[int, ...]
) -> tuple[list[lm.models.Output], Any]:
    wants = lm.models.Wants(layers)
    return protocol.apply_groups(model, params, groups, cache, wants, max_length=T)


jitted = jax.jit(run, static_argnums=(0, 4))


class Requests:
    """The requests of a batch in the cache of a model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.cache = case.model.init_cache(B, T)

    def run(self, *groups: lm.models.Rows) -> list[lm.models.Output]:
        case = self.case
        outputs, self.cache = jitted(case.model, case.params, groups, self.cache, case.layers)
        return outputs

    def step(self, texts: np.ndarray, start: Any) -> lm.models.Output:
        """What follows S tokens of each text from its own position on."""
        start = np.broadcast_to(start, (B,)).astype(np.int32)
        return self.run(lm.models.Rows(np.take_along_axis(texts, places(start), axis=1), start))[0]


def places(start: np.ndarray) -> np.ndarray:
    return start[:, None] + np.arange(S)


def texts_of(case: Case, seed: int = 0) -> np.ndarray:
    return random_ids((B, T - S), case.vocab_size, seed)


@functools.cache
def of_texts(name: str, texts: bytes) -> lm.models.Output:
    """What the whole model says of texts, each from its beginning in one pass."""
    case = case_of(name)
    ids = np.frombuffer(texts, np.int32).reshape(B, -1)
    rows = lm.models.Rows(ids, np.zeros(B, np.int32))
    cache = case.whole.init_cache(B, T)
    (output,), _ = jitted(case.whole, case.whole_params, (rows,), cache, case.layers)
    return output


def same(found: Any, wanted: np.ndarray) -> None:
    """Asserts that rows differ by little of their largest entry."""
    finite = np.isfinite(wanted)  # other ids are no tokens
    largest = np.abs(np.where(finite, wanted, 0)).max(axis=-1, keepdims=True)
    scaled, expected = np.asarray(found) / largest, wanted / largest
    np.testing.assert_allclose(scaled, expected, rtol=0, atol=5e-5)


def check(name: str, found: lm.models.Output, texts: np.ndarray, at: np.ndarray, of: Any) -> None:
    """Asserts that outputs ``[G, S, ..]`` are those of requests `of` at positions ``[G, S]``."""
    case, wanted = case_of(name), of_texts(name, texts.tobytes())
    assert jnp.issubdtype(found.logits.dtype, jnp.floating)
    assert found.logits.shape == (*at.shape, case.model.vocab_size)
    rows = np.asarray(of)[:, None], at
    same(found.logits[..., : case.vocab_size], np.asarray(wanted.logits)[rows])
    assert (found.logits[..., case.vocab_size :] == -np.inf).all()
    sharding = case.model.serves.sharding
    assert sharding is None or found.logits.sharding.spec[-1] == sharding.vocab_axis
    if case.layers:
        same(found.features, np.asarray(wanted.features)[rows])


EVERYBODY = np.arange(B)


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.long] * (x not in DEFAULT)) for x in MODELS]
)
class TestEveryModel:
    def test_it_is_static_and_its_cache_keeps_its_layout(self, name: str) -> None:
        case = case_of(name)
        protocol.check_model("model", case.model)
        assert hash(case.model) == hash(MODELS[name]().model) or name == "one index"
        case.model.check_params("params", case.params)
        requests = Requests(case)
        before = jax.tree.map(jax.typeof, requests.cache)
        requests.step(texts_of(case), 0)
        assert jax.tree.map(jax.typeof, requests.cache) == before

    def test_a_text_may_be_cut_into_calls(self, name: str) -> None:
        case = case_of(name)
        requests, texts = Requests(case), texts_of(case)
        for first in range(0, 4 * S, S):
            found = requests.step(texts, first)
            check(name, found, texts, places(np.full(B, first)), EVERYBODY)

    def test_requests_stand_anywhere_and_go_back(self, name: str) -> None:
        """What was rejected is overwritten, and so is padding, which may be no token."""
        case = case_of(name)
        requests, texts, others = Requests(case), texts_of(case), texts_of(case, seed=7)
        lengths = np.array([3, 5, 1, 4])
        others[:, :S] = -1, case.vocab_size, 2**30, 0, 1
        padded = np.where(np.arange(T - S) < lengths[:, None], texts, others)
        requests.step(padded, 0)
        # Of S drafts some are kept, and are part of the texts.
        start, drafts = lengths, texts_of(case, seed=8)
        kept = np.array([0, 2, 1, 5])
        place = np.arange(T - S)
        is_kept = (place >= start[:, None]) & (place < (start + kept)[:, None])
        texts = np.where(is_kept, drafts, texts)
        requests.step(np.where(place < start[:, None], texts, drafts), start)
        start = start + kept
        check(name, requests.step(texts, start), texts, places(start), EVERYBODY)

    def test_requests_do_not_influence_one_another(self, name: str) -> None:
        case = case_of(name)
        texts, others = texts_of(case), texts_of(case, seed=9)
        others[0] = texts[0]
        found, beside = (Requests(case).step(one, 0) for one in (texts, others))
        np.testing.assert_array_equal(found.logits[0], beside.logits[0])
        assert not np.allclose(found.logits[1], beside.logits[1])


QUICK = (
    ("Llama", False),
    ("Llama", True),
    ("Gemma 4, edge", True),
    ("plain", False),
    ("plain", True),
)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "has_trees"),
    [
        pytest.param(
            *(name, has_trees),
            id=f"{'trees' if has_trees else 'chains'}-{name}",
            marks=[pytest.mark.long] * ((name, has_trees) not in QUICK),
        )
        for name in MODELS
        for has_trees in (False, True)
    ],
)
def test_drafts_and_prompts_are_read_as_if_apart(name: str, has_trees: bool) -> None:
    """Two requests draft, and two read prompts: one twice. Then all go on."""
    case = case_of(name)
    requests, texts = Requests(case), texts_of(case)
    start, drafting, reading = np.array([5, 0, 9, P], np.int32), [0, 2], [1, 3, 3]
    for first in (0, S):  # two calls: 10 tokens, of which those after `start` are overwritten
        requests.step(texts, first)
    ids, tree = np.take_along_axis(texts, places(start), axis=1), None
    nodes = np.arange(S)
    if has_trees:  # node 1 is beside the path, and the text goes on behind it
        nodes = np.array([0, 2, 3, 4])
        parents = np.tile(np.int32([0, 0, 2, 3]), (B, 1))
        ids = np.insert(ids[:, :-1], 1, texts[:, 0], axis=1)
        tree = sd.TreeRows.of(jnp.asarray(parents))
    ids[[1, 3]] = 0  # rows of those who read, which do not matter
    drafts = lm.models.Rows(ids, start, tree=tree)
    begin = start[reading]
    read = [texts[slot, first : first + P] for slot, first in zip(reading, begin, strict=True)]
    prompts = lm.models.Rows(np.stack(read), begin, np.array(reading, np.int32))
    if has_trees and not case.model.serves.trees:
        kind = type(case.model).__name__
        says = f"^model must run trees of drafts, but {kind}.serves says trees=False: use chains"
        with pytest.raises(TypeError, match=says):
            requests.run(drafts, prompts)
        with pytest.raises(NotImplementedError, match=f"^{kind} runs no trees of drafts"):
            case.model.commit(requests.cache, start, parents)
        return
    found, of_prompts = requests.run(drafts, prompts)
    of_drafts = jax.tree.map(lambda x: x[np.array(drafting)][:, nodes], found)
    at = start[drafting][:, None] + np.arange(len(nodes))
    check(name, of_drafts, texts, at, drafting)
    check(name, of_prompts, texts, begin[:, None] + np.arange(P), reading)
    if has_trees:
        path = np.full((B, S), -1, np.int32)
        path[drafting, : len(nodes)] = nodes
        requests.cache = case.model.commit(requests.cache, start, path)
    start[drafting] += len(nodes)
    start[[1, 3]] += P
    check(name, requests.step(texts, start), texts, places(start), EVERYBODY)
