"""What an EAGLE-3 head drafts in a loop, against one pass over the text that was accepted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import passes
import pytest
from models.weights import random_weights
from passes import run as run_pass

from jax_specdec import lm

from . import loops
from .loops import CONFIG, PARAMS, SIZES, TARGET, VOCAB, K

pytestmark = pytest.mark.newest

LAYERS = (0, 1, 2)  # the last one is the stream that leaves the target
IDS = [7, 2, 9, 4, 0]
HEAD = lm.models.Eagle3Head(
    lm.models.Eagle3Config.of_target(
        SIZES,
        layers=SIZES.layers[:1],
        draft_vocab_size=len(IDS),
        aux_hidden_state_layers=LAYERS,
        own_lm_head=True,
    )
)
HEAD_PARAMS = random_weights(HEAD, 1) | {
    "embed_tokens": PARAMS["embed_tokens"],
    "target_ids": jnp.asarray(np.array(IDS, np.int32)),
}
DRAFTER = lm.Eagle3Drafter(HEAD)
LOOP = loops.Loop(DRAFTER, HEAD_PARAMS)
ENGINE = LOOP.engine


@jax.jit
def one_pass(text: jax.Array, length: jax.Array, drafts: jax.Array) -> jax.Array:
    """Rows ``[K, Vd]`` that K drafts after a text are drawn from, by formula.

    The head runs once over the whole text, in a new cache. Each further row is a pass of its own
    over all rows so far, with the head's output of the row before as its input.
    """
    start, place = jnp.zeros(1, jnp.int32), jnp.arange(text.shape[0])
    cache = TARGET.init_cache(1, len(text))
    features = run_pass(TARGET, PARAMS, text[None], start, cache, LAYERS).features
    states = HEAD.project(HEAD_PARAMS, features)
    text, rows = jax.lax.dynamic_update_slice(text, drafts, (length,)), []
    for offset in range(K):
        last = length - 2 + offset
        head_rows = lm.models.Rows(jnp.roll(text, -1)[None], start)
        logits, feedback, _ = HEAD.apply(
            HEAD_PARAMS, states, head_rows, HEAD.init_cache(1, len(text))
        )
        rows.append(logits[0, last])
        states = jnp.where(place[None, :, None] == last + 1, feedback[:, [last]], states)
    return jnp.stack(rows)


@pytest.mark.long
def test_drafts_are_those_of_one_pass_over_the_text() -> None:
    loops.check(LOOP, one_pass, IDS)


@pytest.mark.long
def test_nothing_reaches_the_next_request_of_a_slot() -> None:
    loops.check_next_request(LOOP)


@pytest.mark.long
def test_a_step_between_two_chunks_leaves_no_trace() -> None:
    loops.check_between_chunks(LOOP)


@dataclasses.dataclass(frozen=True)
class Pair(passes.RunsTokens):
    """A model without features, as one's own may be."""

    model: lm.models.Llama
    vocab_size: int = VOCAB

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return self.model.init_cache(batch_size, max_length)

    def run(self, params: Any, token_ids: Any, start: Any, cache: Any) -> tuple[Any, Any]:
        logits, cache, features = run_pass(self.model, params, token_ids, start, cache)
        assert features is None
        return logits, cache


@pytest.mark.parametrize("drafter", [lm.NGramDrafter(), lm.ModelDrafter(TARGET)])
def test_without_features_a_step_is_that_of_a_plain_model(drafter) -> None:
    def program(model: lm.models.CausalModel) -> str:
        engine = dataclasses.replace(ENGINE, model=model, drafter=drafter)
        state = jax.eval_shape(functools.partial(engine.init_state, PARAMS))
        assert state.features is None
        return str(jax.make_jaxpr(functools.partial(engine.step, PARAMS, PARAMS))(state))

    assert program(TARGET) == program(Pair(TARGET))


# Mistakes


@dataclasses.dataclass(frozen=True)
class NoFeatures(Pair):
    """Declares them and gives none, or too few."""

    size: int | None = None
    serves = lm.models.Serves(features=True)

    def apply(self, *args: Any, **named: Any) -> tuple[Any, Any]:
        ((logits, _),), cache = super().apply(*args)
        features = None if self.size is None else logits[..., : self.size]
        return [lm.models.Output(logits, features)], cache


def generate(model: Any = TARGET, **given: Any) -> Any:
    settings = dict(drafter=DRAFTER, draft_params=HEAD_PARAMS, config=CONFIG) | given
    return lm.generate(model, PARAMS, [[1]], **settings)


def apply_layers(*layers: Any) -> Any:
    zero = jnp.zeros(1, jnp.int32)
    return run_pass(TARGET, PARAMS, zero[None], zero, TARGET.init_cache(1, 1), layers)


def verify_without_draft() -> Any:
    return ENGINE.verify(PARAMS, ENGINE.init_state(HEAD_PARAMS, PARAMS))


MISTAKES: list[tuple[type[Exception], str, Any]] = [
    (
        TypeError,
        "model must give features, .* Pair.serves says features=False: see CausalModel",
        lambda: generate(Pair(TARGET)),
    ),
    (
        TypeError,
        "model must give features, .* NoFeatures.apply returns none",
        lambda: generate(NoFeatures(TARGET)),
    ),
    (
        ValueError,
        r"features must be \[G, S, A\*H\] = \[1, 1, 3 H\], but NoFeatures.apply returns",
        lambda: generate(NoFeatures(TARGET, size=10)),
    ),
    (ValueError, "aux_hidden_state_layers must", lambda: apply_layers(2, 0)),
    (ValueError, r"aux_hidden_state_layers\[0\] must", lambda: apply_layers(4)),
    (TypeError, r"aux_hidden_state_layers\[0\] must", lambda: apply_layers(1.0)),
    (
        ValueError,
        "state must come from draft, because Eagle3Drafter reads the features",
        verify_without_draft,
    ),
    (TypeError, "params must be the target's", lambda: ENGINE.init_state(HEAD_PARAMS)),
]


@pytest.mark.parametrize(("error", "message", "call"), MISTAKES)
def test_a_mistake_is_told(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()
