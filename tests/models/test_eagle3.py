"""The EAGLE-3 head against NumPy, with every option."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import reference_eagle3 as reference
from .weights import dequantized, random_ids, random_weights, sizes, with_fields

TARGET = sizes(40, 16, 24, 4, (4, 2, 6))
CONFIG = lm.models.Eagle3Config.of_target(
    TARGET, layers=TARGET.layers[:1], aux_hidden_state_layers=(1, 2, 4)
)
NARROW = {"draft_vocab_size": 12, "own_lm_head": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before fc": {"norm_before_fc": True},
    "norms of chunks": {"fc_norm": True},
    "norm before the residual": {"norm_before_residual": True},
    "normed feedback": {"norm_output": True},
    "tied output": {"tie_word_embeddings": True},
    "Qwen3": {"qk_norm": True, "rope_theta": 1e6},
    "biases": {"qkv_bias": True, "o_bias": True},
    "scaled logits": {"logit_scale": 0.25},
    "list of ids": NARROW,
    "one wide feature layer": {
        "aux_hidden_state_layers": (3,),
        "target_hidden_size": 20,
        "own_embedding": True,
        "own_lm_head": True,
    },
    "all together": {
        **NARROW,
        "qkv_bias": True,
        "qk_norm": True,
        "tie_word_embeddings": True,
        "aux_hidden_state_layers": (0, 1, 2, 3, 8),
        "target_hidden_size": 10,
        "own_embedding": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "norm_output": True,
        "o_bias": True,
        "logit_scale": 2.0,
    },
}


def random_params(head: lm.models.Eagle3Head, seed: int = 0) -> dict[str, Any]:
    """Weights of which none is one or zero."""
    return random_weights(head, seed, moved=0.2)


def run_head(
    head: lm.models.Eagle3Head,
    params: Any,
    states: Any,
    token_ids: Any,
    start: Any,
    cache: Any,
    **of_rows: Any,
) -> Any:
    return head.apply(params, states, lm.models.Rows(token_ids, start, **of_rows), cache)


@pytest.mark.parametrize(
    "option",
    [
        *(
            name if name == "plain" else pytest.param(name, marks=pytest.mark.slow)
            for name in OPTIONS
        ),
        "list of ids, int8",
        pytest.param("tied output, int8", marks=pytest.mark.long),
    ],
)
def test_logits_and_feedback_are_those_of_numpy(option: str) -> None:
    option, _, bits = option.partition(", int")
    head = lm.models.Eagle3Head(dataclasses.replace(CONFIG, **OPTIONS[option]))
    params, rng = random_params(head), np.random.default_rng(1)
    exact = params
    if bits:
        params = lm.models.quantize(params)
        exact = dequantized(params, exact)
    batch_size, given, drafted = 2, 5, 3
    features = rng.normal(size=(batch_size, given, head.num_features)).astype(np.float32)
    next_ids = rng.integers(0, 40, (batch_size, given + drafted), np.int32)
    apply = jax.jit(functools.partial(run_head, head))

    cache = head.init_cache(batch_size, 16)
    states = head.project(params, features)
    chunk = np.zeros(batch_size, np.int32)
    logits, feedback, cache = apply(params, states, next_ids[:, :given], chunk, cache)
    rows = [np.asarray(logits)]
    for step in range(drafted):
        position = chunk + given + step
        ids = next_ids[:, given + step, None]
        logits, feedback, cache = apply(params, feedback[:, -1:], ids, position, cache)
        rows.append(np.asarray(logits))
    found = np.concatenate(rows, 1)

    for request in range(batch_size):
        states = reference.project(head.config, exact, features[request])
        for end in range(given, given + drafted + 1):
            ids = next_ids[request, :end]
            logits, fed_back = reference.forward(head.config, exact, states, ids)
            states = np.concatenate([states, fed_back[-1:]])
        np.testing.assert_allclose(found[request], logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(feedback[request, 0], fed_back[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.newest
def test_it_starts_anywhere_and_overwrites_what_drafting_wrote() -> None:
    head = lm.models.Eagle3Head(CONFIG)
    params, rng = random_params(head), np.random.default_rng(2)
    states, ids = rng.normal(size=(2, 9, 16)).astype(np.float32), random_ids((2, 9), 40)
    apply, start = jax.jit(functools.partial(run_head, head)), np.zeros(2, np.int32)
    whole, _, _ = apply(params, states, ids, start, head.init_cache(2, 12))
    cache = head.init_cache(2, 12)
    _, _, cache = apply(params, states[:, :4], ids[:, :4], start, cache)
    _, _, cache = apply(params, -states[:, :4], ids[:, :4], start + 4, cache)  # drafts
    # One request goes on from position 4, the other one earlier.
    first = np.array([4, 3], np.int32)
    part, next_ids = (np.stack([x[0, 4:8], x[1, 3:7]]) for x in (states, ids))
    logits, _, _ = apply(params, part, next_ids, first, cache)
    expected = np.stack([whole[0, 4:8], whole[1, 3:7]])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_levels_of_a_tree_are_numpy_on_each_path() -> None:
    head = lm.models.Eagle3Head(CONFIG)
    params, rng = random_params(head), np.random.default_rng(3)
    batch_size, given, width = 2, 5, 3
    features = rng.normal(size=(batch_size, given, head.num_features)).astype(np.float32)
    next_ids = random_ids((batch_size, given), 40)
    apply, start = jax.jit(functools.partial(run_head, head)), np.zeros(batch_size, np.int32)
    # A request may have fewer tokens, and something else after them in the cache.
    lengths = np.array([given, given - 2], np.int32)
    cache = head.init_cache(batch_size, 48)
    states = head.project(params, features)
    _, feedback, cache = apply(params, states, next_ids, start, cache)
    states = np.repeat(np.asarray(feedback)[[0, 1], lengths - 1][:, None], width, axis=1)
    prefix = [
        (list(next_ids[b, :n]), reference.project(head.config, params, features[b, :n]))
        for b, n in enumerate(lengths)
    ]
    # [B, W] lists: ids and states of the rows of each node's path, without its own
    paths = [[prefix[b]] * width for b in range(batch_size)]
    tree_mask = np.zeros((batch_size, width, 2), np.uint32)
    for b, (ids, before) in enumerate(prefix):
        _, fed_back = reference.forward(head.config, params, before, ids)
        paths[b] = [(ids, np.concatenate([before, fed_back[-1:]]))] * width
    for depth in range(12):  # 36 rows: both words of bits
        drafts = rng.integers(0, 40, (batch_size, width), np.int32)
        row = depth * width + np.arange(width)
        tree_mask[:, np.arange(width), row // 32] |= np.uint32(1) << (row % 32).astype(np.uint32)
        tree = sd.TreeRows(np.full((batch_size, width), depth, np.int32), tree_mask)
        logits, feedback, cache = apply(
            params, states, drafts, lengths, cache, tree=tree, first_row=np.int32(depth * width)
        )
        parents = rng.integers(0, width, (batch_size, width))
        for b in range(batch_size):
            nodes = []
            for node in range(width):
                ids, before = paths[b][node]
                ids = [*ids, drafts[b, node]]
                expected, fed_back = reference.forward(head.config, params, before, ids)
                at = {"rtol": 2e-5, "atol": 2e-5}
                np.testing.assert_allclose(logits[b, node], expected[-1], **at)
                np.testing.assert_allclose(feedback[b, node], fed_back[-1], **at)
                nodes.append((ids, np.concatenate([before, fed_back[-1:]])))
            paths[b] = [nodes[parent] for parent in parents[b]]
        states = np.take_along_axis(np.asarray(feedback), parents[:, :, None], axis=1)
        tree_mask = np.take_along_axis(tree_mask, parents[:, :, None], axis=1)


def test_ids_that_are_no_tokens_are_never_drafted() -> None:
    head = lm.models.Eagle3Head(dataclasses.replace(CONFIG, num_token_ids=33))
    params = random_weights(head, 0)
    states, ids = np.ones((1, 1, 16), np.float32), np.zeros((1, 1), np.int32)
    start = np.zeros(1, np.int32)
    run = jax.jit(run_head, static_argnums=0)
    logits, _, _ = run(head, params, states, ids, start, head.init_cache(1, 4))
    logits = np.asarray(logits)
    assert np.isneginf(logits[0, 0, 33:]).all() and np.isfinite(logits[0, 0, :33]).all()


@pytest.mark.newest
def test_params_share_what_is_the_targets() -> None:
    target = lm.models.Llama(TARGET)
    weights = random_weights(target, 0)
    shared = lm.models.Eagle3Head(CONFIG).init_params(jax.random.key(1), weights)
    assert shared["embed_tokens"] is weights["embed_tokens"]
    assert shared["lm_head"] is weights["lm_head"]
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    shared = lm.models.Eagle3Head(tied).init_params(jax.random.key(1), weights)
    assert shared["lm_head"] is weights["embed_tokens"]
    own = dataclasses.replace(CONFIG, own_embedding=True, **NARROW)
    params = lm.models.Eagle3Head(own).init_params(jax.random.key(1), weights)
    assert params["embed_tokens"] is not weights["embed_tokens"]
    assert params["lm_head"].shape == (16, 12)
    assert params["target_ids"].shape == (12,) and params["target_ids"].dtype == jnp.int32


def test_a_head_is_compared_by_value() -> None:
    assert lm.models.Eagle3Head(CONFIG) == lm.models.Eagle3Head(CONFIG, "float32")
    assert hash(lm.models.Eagle3Head(CONFIG)) == hash(lm.models.Eagle3Head(CONFIG, jnp.float32))
    assert lm.models.Eagle3Head(CONFIG) != lm.models.Eagle3Head(CONFIG, jnp.bfloat16)


# Errors


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size must be a positive integer"),
        ({"draft_vocab_size": 41, "own_lm_head": True}, "draft_vocab_size must be at most"),
        ({"draft_vocab_size": 8}, "own_lm_head must be true"),
        ({"aux_hidden_state_layers": ()}, "aux_hidden_state_layers must be"),
        ({"aux_hidden_state_layers": (2, 1)}, "aux_hidden_state_layers must be"),
        ({"aux_hidden_state_layers": (1, 1)}, "aux_hidden_state_layers must be"),
        ({"aux_hidden_state_layers": (-1, 1)}, "aux_hidden_state_layers must be"),
        ({"aux_hidden_state_layers": [1, 2]}, "aux_hidden_state_layers must be"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ({"target_hidden_size": 20}, "target_hidden_size must be"),
        ({"layers": TARGET.layers[:2]}, "num_hidden_layers must be 1"),
        ({"norms": "around"}, "layers must have norms before their halves alone"),
        ({"keys_of": 0}, "layers must have keys of their own"),
        ({"norm_output": 1}, "norm_output must be true or false"),
        ({"logit_scale": 0.0}, "logit_scale must be a positive number"),
    ],
)
def test_what_a_config_cannot_have_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        with_fields(CONFIG, **changes)


def test_a_head_computes_in_floating_point() -> None:
    with pytest.raises(TypeError, match="^dtype must"):
        lm.models.Eagle3Head(CONFIG, jnp.int32)


def test_arguments_that_do_not_fit_are_named() -> None:
    head = lm.models.Eagle3Head(CONFIG)
    params = jax.eval_shape(head.init_params, jax.random.key(0))

    def call(tree: Any = None, **changes: Any) -> None:
        arguments = {
            "params": params,
            "states": jnp.zeros((2, 3, 16)),
            "token_ids": jnp.zeros((2, 3), jnp.int32),
            "start": jnp.zeros(2, jnp.int32),
            "cache": head.init_cache(2, 8),
            **changes,
        }
        jax.eval_shape(functools.partial(run_head, head, tree=tree), *arguments.values())

    call()
    head.check_params("params", params)
    with pytest.raises(ValueError, match="^states must"):
        call(states=jnp.zeros((2, 3, 48)))
    with pytest.raises(ValueError, match="^states must"):
        call(states=jnp.zeros((2, 4, 16)))
    with pytest.raises(TypeError, match="^states must"):
        call(states=jnp.zeros((2, 3, 16), jnp.bfloat16))
    with pytest.raises(TypeError, match="^rows.token_ids must"):
        call(token_ids=jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="^rows.start must"):
        call(start=jnp.zeros(3, jnp.int32))
    rows = sd.TreeRows(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3, 2), jnp.uint32))
    call(rows)
    with pytest.raises(ValueError, match=r"^rows.tree\.depth must"):
        call(rows._replace(depth=rows.depth[:, 1:]))
    with pytest.raises(TypeError, match=r"^rows.tree\.tree_mask must"):
        call(rows._replace(tree_mask=rows.depth[:, :, None] + jnp.zeros((1, 1, 2), jnp.int32)))
    with pytest.raises(ValueError, match="^rows.token_ids must"):
        call(cache=head.init_cache(2, 2))
    with pytest.raises(ValueError, match=r"^params\['fc'\] must"):
        head.check_params("params", {**params, "fc": params["norm"]})
    with pytest.raises(ValueError, match=r"^params\['input_norm'\] must"):
        head.check_params("params", {**params, "input_norm": params["norm"]})
    with pytest.raises(ValueError, match="^features must"):
        jax.eval_shape(head.project, params, jnp.zeros((2, 3, 16)))
    with pytest.raises(TypeError, match="^features must"):
        jax.eval_shape(head.project, params, jnp.zeros((2, 3, 48), jnp.float16))
