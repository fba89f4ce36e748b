"""Block heads in every loop: greedy text is the target's, and so is the law of sampled text."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_weights

import jax_specdec as sd
from jax_specdec import lm

from . import engines, test_eagle3, tiny
from .chi_square import CONTROL, assert_distributed, p_value

pytestmark = pytest.mark.newest

IDS = [3, 0, 5, 1]
DSPARK: dict[str, Any] = {
    "sample_from_anchor": True,
    "markov_rank": 3,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def head_of(hidden_size: int, **fields: Any) -> lm.BlockHead:
    layer = dataclasses.replace(engines.llama(16).config, hidden_size=hidden_size, qk_norm=True)
    plain: dict[str, Any] = {
        "layer": layer,
        "draft_vocab_size": engines.VOCAB,
        "feature_layers": (0, 1),
        "target_hidden_size": hidden_size,
        "own_embedding": True,
        "own_lm_head": True,
        "block_size": 4,
        "mask_token_id": 2,
    }
    return lm.BlockHead(lm.BlockHeadConfig(**plain | fields))


def head_params(head: lm.BlockHead, ids: list[int]) -> dict[str, Any]:
    params = random_weights(head, 5)
    if "target_ids" in params:
        params["target_ids"] = jnp.asarray(np.array(ids, np.int32))
    return params


# Engines

HEAD = head_of(16, **DSPARK, draft_vocab_size=len(IDS), sliding_window=5, sliding_layers=(0,))
ENGINE = dataclasses.replace(engines.LLAMA, drafter=lm.BlockDrafter(HEAD), max_prefill_requests=2)


@functools.cache
def weights_of(engine: lm.Engine) -> tuple[Any, Any]:
    return engines.weights_of(engines.LLAMA)[0], head_params(HEAD, IDS)


@pytest.mark.long
def test_confidences_take_the_place_of_what_was_accepted() -> None:
    engine = dataclasses.replace(ENGINE, draft_budget=(0, 2))
    target, params = weights_of(engine)
    for bias, least, most in ((-9.0, 0.0, 0.2), (9.0, 0.9, 1.0)):
        sure = {"confidence_proj": 0 * params["confidence_proj"]}
        sure["confidence_bias"] = jnp.full((1,), bias)
        driver = engines.driver_of(engine, target, params | sure)
        for _ in range(4):
            driver.submit([1, 2, 3], max_new_tokens=30, temperature=1.0)
        engines.run(driver)
        assert (np.asarray(driver.state.estimator.rates) >= least).all()
        assert (np.asarray(driver.state.estimator.rates) <= most).all()
        assert driver.state.confidences is None


# Sampled text

K, REQUESTS = test_eagle3.K, test_eagle3.REQUESTS
KINDS: dict[str, tuple[lm.BlockHead, int | None, str]] = {
    "DFlash": (head_of(8), None, "standard"),
    "DSpark, a map, candidates": (
        head_of(8, **DSPARK, draft_vocab_size=len(IDS)),
        3,
        "standard",
    ),
    "DSpark, block verification": (head_of(8, **DSPARK), None, "block"),
}


@dataclasses.dataclass(frozen=True)
class Rolling(lm.BlockDrafter):
    """Claims, for each draft, the row of another one: its own where that is 0 further.

    ``params`` is the head's and how far.
    """

    def check_params(self, name: str, params: Any) -> None:
        super().check_params(name, params[0])

    def init_store(self, params: Any, *args: Any) -> Any:
        return super().init_store(params[0], *args)

    def prefill(
        self, params: Any, *args: Any, features: Any = None, next_token_ids: Any = None
    ) -> Any:
        given = dict(features=features, next_token_ids=next_token_ids)
        return super().prefill(params[0], *args, **given)

    def propose(self, params: Any, *args: Any) -> tuple[lm.Proposal, Any]:
        proposal, cache = super().propose(params[0], *args)
        store, names = proposal.store, ["logits", "log_normalizer", "row_max"]
        names += ["ids"] if store.has_own_ids else []
        rows = {name: jnp.roll(getattr(store, name), params[1], axis=0) for name in names}
        return proposal._replace(store=dataclasses.replace(store, **rows)), cache


def sampled(kind: str, roll: int = 0) -> lm.GenerateOutput:
    head, num_candidates, method = KINDS[kind]
    return lm.generate(
        test_eagle3.Featured(engines.VOCAB),
        jnp.asarray(test_eagle3.skipping()[0]),
        [test_eagle3.PROMPTS[which] for which in test_eagle3.WHICH],
        drafter=Rolling(head, num_candidates=num_candidates),
        draft_params=(head_params(head, IDS), jnp.int32(roll)),
        config=sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method=method),
        options=tiny.options_of(
            REQUESTS,
            temperature=test_eagle3.TEMPERATURES.tolist(),
            max_new_tokens=[test_eagle3.NUM_TOKENS] * REQUESTS,
        ),
        key=jax.random.key(12),
    )


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if "candidates" in kind else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_sampled_text_is_distributed_as_the_targets(kind: str) -> None:
    right = sampled(kind)
    for window in test_eagle3.windows(right):
        assert_distributed(*window, kind)
    assert 0.1 < test_eagle3.rates(right) < 0.9
    # The row of the other draft of a step, and of another request.
    for roll in (REQUESTS, 2):
        first_tokens = test_eagle3.windows(sampled(kind, roll))[::2]
        assert min(p_value(*window) for window in first_tokens) < CONTROL
