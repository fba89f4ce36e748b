"""Weights and caches that do not fit are named where they enter, and not in every pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import tiny
from .engines import CONFIG, LLAMA, SHAPE, TABLES, VOCAB, llama, weights_of

pytestmark = pytest.mark.xdist_group("engines")

MODEL, DRAFT = llama(16), llama(8)
DRAFTER = lm.ModelDrafter(DRAFT)
MESH = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
SPREAD = lm.models.TensorParallelLlama(MODEL, MESH, "tensor")
HEAD = lm.models.Eagle3Head(
    lm.models.Eagle3Config.of_target(
        MODEL.config, layers=MODEL.config.layers, aux_hidden_state_layers=(0, 1)
    )
)


def with_weight(params: Any, name: str, weight: Any) -> Any:
    return {**params, name: weight}


def request() -> lm.NewRequests:
    return lm.NewRequests(
        slots=np.array([0]),
        prompts=LLAMA.pad_prompt([1])[None],
        lengths=np.array([1]),
        keys=np.array([0], np.uint32),
        options=LLAMA.options_of([lm.RequestOptions(max_new_tokens=1)], [1]),
    )


# Every place where weights enter, called with the target's and the drafter's.
WEIGHTS: dict[str, Callable[[Any, Any], object]] = {
    "generate": lambda p, d: lm.generate(
        MODEL, p, [[1]], drafter=DRAFTER, draft_params=d, config=CONFIG, max_new_tokens=1
    ),
    "generate_stream": lambda p, d: lm.generate_stream(
        MODEL, p, [[1]], drafter=DRAFTER, draft_params=d, config=CONFIG, max_new_tokens=1
    ),
    "EngineDriver": lambda p, d: lm.EngineDriver(LLAMA, p, d),
    "measure_steps": lambda p, d: lm.measure_steps(
        dataclasses.replace(LLAMA, draft_budget=(0, 1)), p, d
    ),
    "init_state": lambda p, d: LLAMA.init_state(d, p),
    "admit": lambda p, d: jax.eval_shape(LLAMA.admit, p, d, state(), request()),
    "step": lambda p, d: jax.eval_shape(LLAMA.step, p, d, state()),
    "step with prompts": lambda p, d: jax.eval_shape(LLAMA.step, p, d, state(), request()),
}


def state() -> lm.DecodeState:
    """Shapes alone."""
    return jax.eval_shape(LLAMA.init_state, weights_of(LLAMA)[1])


@pytest.mark.parametrize("place", WEIGHTS)
def test_weights_that_do_not_fit_are_named_where_they_enter(place: str) -> None:
    params, draft_params = weights_of(LLAMA)
    call = WEIGHTS[place]
    for wrong, error, message in [
        (draft_params, ValueError, r"params\['embed_tokens'\] must be an array \[6, 16\] of flo"),
        (
            with_weight(params, "norm", jnp.ones(16, jnp.bfloat16)),
            TypeError,
            r"params\['norm'\] must be an array \[16\] of float32, but it is an array \[16\] of b",
        ),
        (with_weight(params, "more", 0.5), ValueError, r"params\['more'\] must not be there"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            call(wrong, draft_params)
    with pytest.raises(ValueError, match=r"^draft_params\['embed_tokens'\] must be an array \[6,"):
        call(params, params)
    with pytest.raises(TypeError, match="^draft_params must be the weights of the model, but it i"):
        call(params, None)


ENTERING: dict[str, tuple[Callable[[], object], str]] = {
    "generate_plain": (
        lambda: lm.generate_plain(MODEL, None, [[1]], max_new_tokens=1),
        "params must be the weights of the model, but it is None: pass its .params",
    ),
    "draft": (
        lambda: jax.eval_shape(LLAMA.draft, weights_of(LLAMA)[0], state()),
        r"draft_params\['embed_tokens'\] must be an array \[6, 8\]",
    ),
    "verify": (
        lambda: jax.eval_shape(LLAMA.verify, weights_of(LLAMA)[1], state()),
        r"params\['embed_tokens'\] must be an array \[6, 16\]",
    ),
    "greedy_differences": (
        lambda: lm.greedy_differences(MODEL, weights_of(LLAMA)[1], *[[]] * 3),  # type: ignore[arg-type]
        r"params\['embed_tokens'\] must be an array \[6, 16\]",
    ),
    "weights of the whole model for one that is spread": (
        lambda: lm.generate_plain(SPREAD, weights_of(LLAMA)[0], [[1]], max_new_tokens=1),
        r"params\['embed_tokens'\] must be an array \[1, 6, 16\] of float32, but it is an array ",
    ),
    "one layer for a list of layers": (
        lambda: lm.EngineDriver(
            LLAMA, with_weight(weights_of(LLAMA)[0], "layers", weights_of(LLAMA)[0]["layers"][0])
        ),
        r"params\['layers'\]\[0\]\['down_proj'\] must be an array \[24, 16\]",
    ),
    "the target's for a head": (
        lambda: lm.EngineDriver(
            lm.Engine(MODEL, lm.Eagle3Drafter(HEAD), CONFIG, **SHAPE), *[weights_of(LLAMA)[0]] * 2
        ),
        r"draft_params\['fc'\] must be an array \[32, 16\] of float32, but it is None",
    ),
    # Caches
    "verify a state of another engine": (
        lambda: jax.eval_shape(
            LLAMA.verify, weights_of(LLAMA)[0], replaced(target_cache=MODEL.init_cache(1, 48))
        ),
        r"state.target_cache\[0\]\[0\] must be an array \[8, 8, \d+\] of float32, as in "
        r"Llama.init_cache\(4, \d+\), but it is an array \[2, 8, \d+\]",
    ),
    "draft with a cache of too few layers": (
        lambda: jax.eval_shape(LLAMA.draft, weights_of(LLAMA)[1], replaced(draft_cache=[])),
        r"state.draft_cache must have the structure of ModelDrafter.init_cache\(4, \d+\), but it ",
    ),
    "admit into another dtype": (
        lambda: jax.eval_shape(
            LLAMA.admit,
            *weights_of(LLAMA),
            replaced(target_cache=half(state().target_cache)),
            request(),
        ),
        r"state.target_cache\[0\]\[0\] must be .* of float32, .* \[.*\] of bfloat16",
    ),
}


def replaced(**fields: Any) -> lm.DecodeState:
    return dataclasses.replace(state(), **fields)


def half(cache: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), cache)


@pytest.mark.parametrize("name", ENTERING)
def test_what_does_not_fit_is_named_where_it_enters(name: str) -> None:
    call, message = ENTERING[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


@dataclasses.dataclass(frozen=True)
class Counting(tiny.Trigram):
    """Counts how often its weights are checked."""

    counts: Any = dataclasses.field(default_factory=list, compare=False)

    def check_params(self, name: str, params: Any) -> None:
        self.counts.append(name)


@pytest.mark.long
def test_a_generation_looks_at_weights_once() -> None:
    model = Counting(VOCAB)
    lm.generate(
        model,
        TABLES[0],
        [[1]],
        drafter=lm.ModelDrafter(model),
        draft_params=TABLES[1],
        config=sd.SpecDecodeConfig(num_speculative_tokens=1),
        max_new_tokens=2,
    )
    assert model.counts == ["params", "draft_params"]
