"""An EAGLE-3 head in every loop: greedy text is the target's, and so is sampled text's law."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_weights
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm

from . import engines, tiny
from .chi_square import CONTROL, assert_distributed, p_value, tally

pytestmark = pytest.mark.newest

VOCAB = engines.VOCAB


def head_of(hidden_size: int, layers: tuple[int, ...], ids: list[int]) -> lm.models.Eagle3Head:
    target = dataclasses.replace(engines.llama(16).config, hidden_size=hidden_size)
    config = lm.models.Eagle3Config.of_target(
        target,
        layers=target.layers,
        draft_vocab_size=len(ids),
        aux_hidden_state_layers=layers,
        own_embedding=True,
        own_lm_head=True,
    )
    return lm.models.Eagle3Head(config)


def head_params(head: lm.models.Eagle3Head, ids: list[int]) -> dict[str, Any]:
    return random_weights(head, 5) | {"target_ids": jnp.asarray(np.array(ids, np.int32))}


# Engines

HEAD = head_of(16, (0, 1), [3, 0, 5, 1])
ENGINE = dataclasses.replace(engines.LLAMA, drafter=lm.Eagle3Drafter(HEAD), max_prefill_requests=2)


@functools.cache
def weights_of(engine: lm.Engine) -> tuple[Any, Any]:
    return engines.weights_of(engines.LLAMA)[0], head_params(HEAD, [3, 0, 5, 1])


@pytest.mark.long
def test_neither_traffic_nor_chunks_nor_leaving_change_a_request() -> None:
    check_traffic(ENGINE, weights_of(ENGINE))


def check_traffic(engine: lm.Engine, weights: tuple[Any, Any]) -> None:
    """Compares requests in traffic, some of which leave, with each of them alone.

    Args:
      engine: with the target of `engines.LLAMA`.
      weights: of the target and of the drafter.
    """
    rng = np.random.default_rng(3)
    requests = [engines.random_request(rng, [0.0, 1.0]) for _ in range(10)]
    driver = engines.driver_of(engine, *weights)
    alone = [engines.alone(driver, request) for request in requests]
    busy = engines.driver_of(engine, *weights, max_steps_ahead=2, max_prefills=1)
    ids = [busy.submit(**request) for request in requests]
    cancelled = busy.submit([1] * 12, max_new_tokens=20)
    updates = []
    for _ in range(6):
        updates += busy.step()
    assert busy.cancel(cancelled)
    assert any([busy.preempt(ids[i]) for i in range(4)])
    found = engines.run(busy, [u for u in updates if u.request_id != cancelled])
    accepted = 0
    for request_id, request, one in zip(ids, requests, alone, strict=True):
        other = found[request_id]
        assert (other.token_ids, other.finish_reason) == (one.token_ids, one.finish_reason)
        drafts = [(u.num_proposed, u.num_accepted) for u in other.updates]
        assert drafts == [(u.num_proposed, u.num_accepted) for u in one.updates]
        accepted += sum(u.num_accepted for u in one.updates)
        if not request["temperature"]:
            asked = {k: x for k, x in request.items() if k in ("max_new_tokens", "stop_token_ids")}
            assert one.token_ids == greedy(request["prompt"], **asked)
    assert accepted > 5


@functools.cache
def score() -> Any:
    model, params = ENGINE.model, weights_of(ENGINE)[0]
    cache, start = model.init_cache(1, engines.LONGEST), jnp.zeros(1, jnp.int32)
    return jax.jit(lambda ids: run_pass(model, params, ids[None], start, cache).logits[0].argmax(1))


def greedy(prompt: list[int], max_new_tokens: int, stop_token_ids: list[int]) -> list[int]:
    """Each token from a pass over all before it."""
    text = [*prompt]
    while len(text) < len(prompt) + max_new_tokens:
        text.append(int(score()(np.resize(text, engines.LONGEST).astype(np.int32))[len(text) - 1]))
        if text[-1] in stop_token_ids:
            break
    return text[len(prompt) :]


# Sampled text


@dataclasses.dataclass(frozen=True)
class Featured(tiny.Trigram):
    """Features of layer 0: which token; of layer 1: which token before it. One-hot, of width 8."""

    serves = lm.models.Serves(features=True)

    def apply(self, params: Any, groups: Any, cache: Any, wants: Any = None) -> tuple[Any, Any]:
        ((logits, _),), cache = super().apply(params, groups, cache)
        (rows,) = groups
        token_ids, start, layers = rows.token_ids, rows.start, wants.aux_hidden_state_layers
        if not layers:
            return [lm.models.Output(logits)], cache
        place = start[:, None] + jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :] - 1
        before = jnp.take_along_axis(cache, jnp.maximum(place, 0), axis=1)
        both = [jax.nn.one_hot(x, 8) for x in (token_ids, before)]
        features = jnp.concatenate([both[layer] for layer in layers], axis=2)
        return [lm.models.Output(logits, features)], cache


K, NUM_TOKENS, REQUESTS = 2, 4, 6144
PROMPTS = [[1, 4, 0, 1, 4], [1, 4, 0, 5, 4]]
IDS = [5, 2, 3, 0]
LISTED = head_of(8, (0, 1), IDS)
TEMPERATURES = np.resize([0.7, 1.5], REQUESTS)
WHICH = np.arange(REQUESTS) // 2 % 2  # of the prompts


@functools.cache
def skipping() -> tuple[np.ndarray, dict[str, Any]]:
    """A target that looks at the token before the last one most, and a head that knows how.

    For row i that is t_i: all that the head's first draft, of t_{i+2}, needs is its features.
    """
    table = tiny.random_table(VOCAB, seed=7, scale=0.7)
    table = table + 2.0 * np.random.default_rng(8).standard_normal((VOCAB, 1, VOCAB))
    params = head_params(LISTED, IDS)
    params["fc"] = jnp.asarray(np.eye(16, 8, dtype=np.float32))
    for name in ("o_proj", "down_proj"):
        params["layer"][name] = jnp.asarray(0.1 * np.asarray(params["layer"][name]))
    skipped = np.zeros((8, len(IDS)))
    skipped[:VOCAB] = table.mean(axis=1)[:, IDS] / np.sqrt(8)
    return table.astype(np.float32), params | {"lm_head": jnp.asarray(skipped, jnp.float32)}


@dataclasses.dataclass(frozen=True)
class OfFirst(lm.Eagle3Drafter):
    """Drafts with the head's weights, the first of its params."""

    def check_params(self, name: str, params: Any) -> None:
        super().check_params(name, params[0])

    def init_store(self, params: Any, *args: Any) -> Any:
        return super().init_store(params[0], *args)

    def prefill(self, params: Any, *args: Any) -> Any:
        return super().prefill(params[0], *args)


@dataclasses.dataclass(frozen=True)
class Rolling(OfFirst):
    """Claims, for each draft, the row of another request: its own where that is 0 further.

    The second of its params is how far.
    """

    def propose(self, params: Any, *args: Any) -> tuple[lm.Proposal, Any]:
        proposal, cache = super().propose(params[0], *args)
        store, names = proposal.store, ("logits", "log_normalizer")
        rows = {name: jnp.roll(getattr(store, name), params[1], axis=0) for name in names}
        return proposal._replace(store=dataclasses.replace(store, **rows)), cache


def rolled(roll: int = 0, **changes: Any) -> lm.GenerateOutput:
    return sampled(Rolling(LISTED), (skipping()[1] | changes, jnp.int32(roll)))


def sampled(drafter: lm.Drafter, draft_params: Any) -> lm.GenerateOutput:
    return lm.generate(
        Featured(VOCAB),
        jnp.asarray(skipping()[0]),
        [PROMPTS[which] for which in WHICH],
        drafter=drafter,
        draft_params=draft_params,
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        options=tiny.options_of(
            REQUESTS, temperature=TEMPERATURES.tolist(), max_new_tokens=[NUM_TOKENS] * REQUESTS
        ),
        key=jax.random.key(11),
    )


def windows(output: lm.GenerateOutput) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts and probabilities after each prompt, of the first three tokens and the last three."""
    found = []
    for which, temperature in itertools.product((0, 1), (0.7, 1.5)):
        asked = (temperature == TEMPERATURES) & (which == WHICH)
        tokens = np.array(output.completions)[asked]
        joint = tiny.exact_distribution(skipping()[0], PROMPTS[which], NUM_TOKENS, temperature)
        found.append((tally(tokens[:, :-1], VOCAB), joint.sum(axis=-1)))
        found.append((tally(tokens[:, 1:], VOCAB), joint.sum(axis=0)))
    return found


def rates(output: lm.GenerateOutput) -> float:
    return float(output.steps.num_accepted.sum() / output.steps.num_proposed.sum())


@pytest.mark.slow
def test_sampled_text_is_distributed_as_the_targets_whatever_the_map() -> None:
    right = rolled()
    shifted = rolled(target_ids=(skipping()[1]["target_ids"] + 1) % VOCAB)
    for what, output in ("own map", right), ("map of other ids", shifted):
        for window in windows(output):
            assert_distributed(*window, what)
    assert 0.1 < rates(shifted) < rates(right) - 0.1 < 0.85


@dataclasses.dataclass(frozen=True)
class Claiming(OfFirst):
    """Draws with the first of two weights, and stores the distributions of the second."""

    def check_params(self, name: str, params: Any) -> None:
        for weights in params:
            super().check_params(name, (weights,))

    def propose(self, params: Any, *args: Any) -> tuple[lm.Proposal, Any]:
        proposal, cache = super().propose(params[0], *args)
        claimed = super().propose(params[1], *args)[0]
        return proposal._replace(store=claimed.store), cache


def coarse() -> dict[str, Any]:
    """Returns the weights with an output matrix that 8 bits round to few values.

    Its last two rows are large, and belong to features that stay zero: those of no token.
    """
    params = dict(skipping()[1])
    params["layer"] = dict(params["layer"])
    for name in ("o_proj", "down_proj"):
        params["layer"][name] = params["layer"][name].at[:, VOCAB:].set(0)
    params["lm_head"] = params["lm_head"].at[VOCAB:].set(100.0)
    return params


@pytest.mark.long
def test_int8_drafts_are_lossless_if_the_store_has_their_own_distributions() -> None:
    weights = coarse()
    int8 = lm.models.quantize(weights)
    honest = sampled(Claiming(LISTED), (int8, int8))
    for window in windows(honest):
        assert_distributed(*window, "int8")
    assert 0.1 < rates(honest) < 0.9
    lying = sampled(
        Claiming(LISTED), (int8, weights)
    )  # the first draft's row is that of the weights before
    assert all(p_value(*window) < CONTROL for window in windows(lying)[::2])


@pytest.mark.long
def test_the_row_of_another_request_is_not_lossless() -> None:
    first_tokens = windows(rolled(roll=2))[::2]  # the other prompt's
    assert all(p_value(*window) < CONTROL for window in first_tokens)
