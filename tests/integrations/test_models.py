"""Models of others: one write index for the whole batch, one request at a time under vmap."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import passes
import pytest
from upper_floor import protocol

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.models import foreign

V, H = 11, 8
PROMPTS = [[3, 1, 4], [5], [2, 7, 1, 8, 2, 8]]
NEW = 12


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = dict(embedding=(V, H), key=(H, H), value=(H, H), head=(H, V), position=(64, H))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def new_cache(max_length: int) -> dict[str, Any]:
    rows = jnp.zeros((1, max_length, H))
    return {"layer": {"k": rows, "v": rows, "end_index": jnp.zeros((1,), jnp.int32)}}


def attend(params, token_ids, positions, cache, mask):
    """Attention with one head; writes at `end_index[0]`, as Tunix does."""
    layer, count = cache["layer"], token_ids.shape[1]
    x = jnp.asarray(params["embedding"])[token_ids] + jnp.asarray(params["position"])[positions]
    at = (0, layer["end_index"][0], 0)
    k = jax.lax.dynamic_update_slice(layer["k"], x @ params["key"], at)
    v = jax.lax.dynamic_update_slice(layer["v"], x @ params["value"], at)
    scores = jnp.where(mask, x @ k.transpose(0, 2, 1) / H, -1e30)
    x += jax.nn.softmax(scores, axis=-1) @ v
    return x @ params["head"], {"layer": {"k": k, "v": v, "end_index": layer["end_index"] + count}}


def reference(params: dict[str, np.ndarray], prompt: list[int]) -> list[int]:
    """Greedy text in NumPy, the whole sequence anew for each token."""
    tokens = list(prompt)
    for _ in range(NEW):
        x = (params["embedding"][tokens] + params["position"][: len(tokens)]).astype(np.float64)
        scores = np.exp(x[-1] @ (x @ params["key"]).T / H)
        x = x[-1] + scores @ (x @ params["value"]) / scores.sum()
        tokens.append(int(np.argmax(x @ params["head"])))
    return tokens[len(prompt) :]


class Nnx:
    """Splits and merges, as flax.nnx does, with a graph definition that has no hash."""

    splits = 0

    def split(self, module: Any) -> tuple[Any, Any]:
        self.splits += 1
        return [type(module)], dict(vars(module))

    def merge(self, graph: Any, state: Any) -> Any:
        return graph[0](**state)


MODEL = foreign.OneIndexModel(V, attend, new_cache, index="end_index")


@pytest.mark.slow
@pytest.mark.newest
def test_text_is_the_references_with_a_sampled_draft_model():
    params, draft_params = jax.tree.map(jnp.asarray, (weights(0), weights(1)))
    output = lm.generate(
        MODEL,
        params,
        PROMPTS,
        drafter=lm.ModelDrafter(MODEL),
        draft_params=draft_params,
        config=sd.SpecDecodeConfig(num_speculative_tokens=3),
        options=[
            lm.RequestOptions(temperature=temperature, max_new_tokens=NEW)
            for temperature in (0.0, 0.0, 1.0)
        ],
        key=jax.random.key(0),
    )
    for b in (0, 1):
        assert output.completions[b] == reference(weights(0), PROMPTS[b])
    assert len(output.completions[2]) == NEW
    assert output.steps.num_accepted.sum() > 0


def test_a_module_is_split_once_and_calls_the_same():
    nnx = Nnx()
    model, params = foreign.from_nnx(
        nnx,
        types.SimpleNamespace(**weights(0)),
        lambda module, *arguments: attend(vars(module), *arguments),
        new_cache,
        vocab_size=V,
        index="end_index",
    )
    ids, start = jnp.array([PROMPTS[0], PROMPTS[2][:3]]), jnp.array([0, 4])
    want = jax.jit(MODEL.run)(params, ids, start, MODEL.init_cache(2, 16))
    found = jax.jit(model.run)(params, ids, start, model.init_cache(2, 16))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert nnx.splits == 1 and model.vocab_size == V


def test_an_index_that_is_not_in_the_cache_is_refused():
    with pytest.raises(ValueError, match="index must be a name in the cache, but 'cur_ind'"):
        foreign.OneIndexModel(V, attend, new_cache, index="cur_ind").init_cache(1, 4)


def cache_of(positions: int, **more: Any) -> dict[str, Any]:
    return {"k": jnp.zeros((1, positions, 3)), **more}


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (lambda length: cache_of(4), True),  # a ring of fixed size
        (lambda length: cache_of(min(4, length)), True),  # capped at its window
        (lambda length: cache_of(length) | {"ring": jnp.zeros((4, 1, 3))}, True),  # in one layer
        (lambda length: cache_of(min(8, length)), False),  # a window that holds all
        (lambda length: cache_of(64), False),  # a fixed context
        (lambda length: cache_of(-(-length // 64) * 64), False),
        (lambda length: cache_of(length, scale=jnp.float32(1)), False),
    ],
)
def test_a_ring_shorter_than_the_text_is_refused(made: Any, refused: bool) -> None:
    model = foreign.OneIndexModel(V, attend, made)
    if not refused:
        made_for_two, _ = model.init_cache(2, 8)
        assert made_for_two["k"].shape == (2, *made(8)["k"].shape)
        return
    with pytest.raises(ValueError, match="new_cache must have max_length = 8 .* a ring cannot"):
        model.init_cache(2, 8)
    model.init_cache(2, 4)


@dataclasses.dataclass(frozen=True)
class Unhashable(passes.RunsTokens):
    graph: list[int]
    vocab_size: int = V


def test_a_model_without_a_hash_is_refused_by_name():
    with pytest.raises(TypeError, match="target must be hashable.* eq=False"):
        protocol.check_model("target", Unhashable([1]))
    with pytest.raises(TypeError, match="model must be hashable"):
        lm.ModelDrafter(Unhashable([1]))


def test_what_lies_below_the_name_of_an_index_is_set():
    model = foreign.OneIndexModel(
        3,
        lambda params, token_ids, positions, cache, mask: (params[token_ids], cache),
        lambda max_length: {"cur_ind": {"value": jnp.int32(0)}, "value": jnp.int32(7)},
        index="cur_ind",
    )
    ids, start = jnp.array([[0], [1]]), jnp.array([4, 2])
    _, (cache, _) = model.run(jnp.eye(3), ids, start, model.init_cache(2, 8))
    assert cache["cur_ind"]["value"].tolist() == [4, 2]
    assert cache["value"].tolist() == [7, 7]
