"""DFlash and DSpark heads against NumPy, with every option, and against `speculators`."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec import lm

from . import reference_block as reference
from .weights import dequantized, random_weights, sizes, with_fields

SPECULATORS = Path(__file__).parent / "speculators"
TARGET = sizes(40, 16, 24, 4, (4, 2, 6), qk_norm=True)
CONFIG = lm.BlockHeadConfig.of_target(
    TARGET,
    layers=TARGET.layers[:2],
    aux_hidden_state_layers=(1, 2, 4),
    block_size=5,
    mask_token_id=39,
)
NARROW = {"draft_vocab_size": 12, "own_lm_head": True}
DSPARK = {
    "sample_from_anchor": True,
    "markov_rank": 3,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DSpark": DSPARK,
    "anchor first without a bias": {"sample_from_anchor": True},
    "bias and confidence after the anchor": {"markov_rank": 2, "enable_confidence_head": True},
    "a window": {"windows": (None, 4)},
    "a window in which the block sees itself": {
        "window": 3,
        "sliding_window_non_causal": True,
    },
    "a block of one": {"sample_from_anchor": True, "block_size": 1},
    "tied output": {"tie_word_embeddings": True},
    "no norms of heads": {"qk_norm": False, "rope_theta": 1e6},
    "list of ids": NARROW,
    "all together": {
        **NARROW,
        **DSPARK,
        "qkv_bias": True,
        "tie_word_embeddings": True,
        "aux_hidden_state_layers": (0, 8),
        "target_hidden_size": 10,
        "own_embedding": True,
        "o_bias": True,
        "logit_scale": 2.0,
        "windows": (5, None),
    },
}


def head_of(**changes: Any) -> lm.BlockHead:
    return lm.BlockHead(with_fields(CONFIG, **changes))


def random_params(head: lm.BlockHead, seed: int = 0) -> dict[str, Any]:
    """Weights of which none is one or zero."""
    return random_weights(head, seed, moved=0.2)


def run_block(
    head: lm.BlockHead, params: Any, newest: Any, start: Any, cache: Any, **count: Any
) -> lm.models.BlockOutput:
    rows = lm.models.Rows(jnp.asarray(newest)[:, None], start)
    return head.apply(params, rows, cache, **count)


@functools.partial(jax.jit, static_argnums=0)
def blocks(
    head: lm.BlockHead, params: Any, features: Any, newest: Any, start: Any
) -> lm.models.BlockOutput:
    """A block of each request after all of its context, in a new cache."""
    cache = head.init_cache(len(newest), features.shape[1])
    cache = head.write_context(params, features, jnp.zeros_like(start), cache)
    return run_block(head, params, newest, start, cache)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "option",
    [
        *(
            x if x in ("DFlash", "DSpark") else pytest.param(x, marks=pytest.mark.slow)
            for x in OPTIONS
        ),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("DSpark, int8", "tied output, int8")),
    ],
)
def test_a_block_is_that_of_numpy(option: str) -> None:
    option, _, bits = option.partition(", int")
    head = head_of(**OPTIONS[option])
    params, rng = random_params(head), np.random.default_rng(1)
    exact = params
    if bits:
        params = lm.models.quantize(params)
        exact = dequantized(params, exact)
    features = rng.normal(size=(2, 7, head.num_features)).astype(np.float32)
    newest, start = np.array([3, 11], np.int32), np.array([6, 1], np.int32)
    found = blocks(head, params, features, newest, start)
    before = rng.integers(0, 40, (2, head.config.max_drafts), np.int32)
    if head.config.markov_rank is not None:
        biases = head.bias(params, before)
        columns = np.array([[[4, 0, 11]] * head.config.max_drafts] * 2)
        assert_close(head.bias(params, before, columns), np.take_along_axis(biases, columns, 2))
    for b in range(2):
        wanted = reference.forward(head.config, exact, features[b, : start[b]], newest[b])
        assert_close(found.logits[b], wanted[0])
        assert_close(found.states[b], wanted[1])
        for j in range(head.config.max_drafts):
            if head.config.markov_rank is not None:
                assert_close(biases[b, j], reference.bias(head.config, exact, before[b, j]))


# Against speculators


def tiny_target(expected: Any) -> lm.formats.LoadedModel:
    """The target that the heads of `speculators/make.py` belong to; only what they share counts."""
    model = lm.models.Llama(sizes(24, 16, 8, 4, (2, 2, 4)))
    shared = {"embed_tokens": expected["embed_tokens"], "lm_head": expected["lm_head"].T}
    return lm.formats.LoadedModel(model, random_weights(model, 0) | jax.device_put(shared))


@pytest.mark.newest
@pytest.mark.parametrize("name", [pytest.param("dflash", marks=pytest.mark.long), "dspark"])
def test_a_block_is_that_of_speculators(name: str) -> None:
    with np.load(SPECULATORS / name / "expected.npz") as arrays:
        expected = {key: arrays[key] for key in arrays}
    head, params = lm.load_head(SPECULATORS / name, tiny_target(expected))
    assert head.config.sample_from_anchor == (name == "dspark")
    tokens, anchors = expected["tokens"].astype(np.int32), expected["anchors"].astype(np.int32)
    features = np.repeat(expected["features"][None], len(anchors), axis=0)
    found = blocks(head, params, features, tokens[anchors], anchors)
    first = head.config.block_size - head.config.max_drafts
    assert_close(found.logits, expected["logits"][:, first:])
    if name == "dspark":
        before = tokens[anchors[:, None] + np.arange(head.config.block_size)]
        assert_close(found.logits + head.bias(params, before), expected["biased"])
        likely = [
            [reference.confidence(head.config, params, *one) for one in zip(*row, strict=True)]
            for row in zip(found.states, before, strict=True)
        ]  # nothing drafts by these weights, but they are where a trainer looks for them
        assert_close(likely, 1 / (1 + np.exp(-expected["confidence_logits"])))
        assert params["target_ids"].tolist() == [*range(0, 24, 3)]


# Incremental


@pytest.mark.long
@pytest.mark.newest
def test_a_block_is_the_same_however_its_context_came_and_whatever_lies_after_it() -> None:
    head = head_of(**DSPARK, windows=(None, 4))
    params, rng = random_params(head), np.random.default_rng(2)
    features = rng.normal(size=(2, 12, head.num_features)).astype(np.float32)
    newest, start = np.array([3, 5], np.int32), np.array([9, 4], np.int32)
    whole = blocks(head, params, features, newest, start)
    write, apply = (
        jax.jit(head.write_context),
        jax.jit(functools.partial(run_block, head), static_argnames="num_drafts"),
    )
    # `write_rows` keeps values finite, and keys of those that are not are NaN.
    cache = [
        (jnp.full_like(keys, jnp.nan), jnp.full_like(values, 1e9))
        for keys, values in head.init_cache(2, 12)
    ]
    place = np.zeros(2, np.int32)
    # Pieces of three rows, of which one request keeps some; what it does not keep is NaN.
    for kept in ([3, 1], [1, 3], [2, 0], [3, 0]):
        rows = np.stack([features[b, place[b] : place[b] + 3] for b in range(2)])
        rows[np.arange(3)[None, :] >= np.array(kept)[:, None]] = np.nan
        cache = write(params, rows, place, cache)
        place = place + np.array(kept, np.int32)
        cache = apply(params, newest + 1, place, cache).cache  # drafts that are rejected
    assert place.tolist() == start.tolist()
    found = apply(params, newest, start, cache)
    assert_close(found.logits, whole.logits)
    few = apply(params, newest, start, cache, num_drafts=2)
    assert_close(few.states, found.states[:, :2])
    assert few.logits.shape == (2, 2, 40)


# Sizes and weights


def test_ids_that_are_no_tokens_are_never_drafted_but_may_be_the_mask() -> None:
    head = head_of(num_token_ids=33)
    params, zero = random_params(head), np.zeros(1, np.int32)
    found = jax.jit(run_block, static_argnums=0)(head, params, zero, zero, head.init_cache(1, 4))
    logits = np.asarray(found.logits)
    assert np.isneginf(logits[..., 33:]).all() and np.isfinite(logits[..., :33]).all()


@pytest.mark.long
@pytest.mark.newest
def test_params_share_what_is_the_targets() -> None:
    target = lm.models.Llama(TARGET)
    weights = random_weights(target, 0)
    shared = head_of().init_params(jax.random.key(1), weights)
    assert shared["embed_tokens"] is weights["embed_tokens"]
    assert shared["lm_head"] is weights["lm_head"]
    params = head_of(**NARROW, **DSPARK).init_params(jax.random.key(1), weights)
    assert params["lm_head"].shape == (16, 12) and params["target_ids"].tolist() == [*range(12)]
    assert params["markov_w2"].shape == (12, 3) and params["confidence_proj"].shape == (19, 1)


def test_a_head_is_compared_by_value() -> None:
    assert head_of() == lm.BlockHead(CONFIG, jnp.float32)
    assert hash(head_of()) == hash(lm.BlockHead(CONFIG, jnp.float32))
    assert head_of() != lm.BlockHead(CONFIG, jnp.bfloat16)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"block_size": 1}, r"block_size must be in \[2, 64\]"),
        ({"block_size": 65}, r"block_size must be in \[2, 64\]"),
        ({"block_size": 0, "sample_from_anchor": True}, "block_size must be a positive integer"),
        ({"mask_token_id": 40}, r"mask_token_id must be an id in \[0, 40\)"),
        ({"mask_token_id": None}, "mask_token_id must be an id"),
        ({"window": 0}, "window must be a positive integer or None"),
        ({"markov_rank": 0}, "markov_rank must be a positive integer"),
        ({"confidence_head_with_markov": True}, "confidence_head_with_markov must be false"),
        ({"aux_hidden_state_layers": (2, 1)}, "aux_hidden_state_layers must be"),
        ({"draft_vocab_size": 8}, "own_lm_head must be true"),
        ({"target_hidden_size": 20}, "target_hidden_size must be"),
        ({"sample_from_anchor": 1}, "sample_from_anchor must be true or false"),
    ],
)
def test_what_a_config_cannot_have_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        head_of(**changes)


def test_arguments_that_do_not_fit_are_named() -> None:
    head = head_of()
    params = random_params(head)
    ids, cache, features = jnp.zeros(2, jnp.int32), head.init_cache(2, 8), jnp.zeros((2, 3, 48))

    def apply(ids: Any = ids, start: Any = ids, cache: Any = cache, **count: Any) -> Any:
        return lambda: run_block(head, params, ids, start, cache, **count)

    def write(features: Any = features, start: Any = ids) -> Any:
        return lambda: head.write_context(params, features, start, cache)

    wrong = {**params, "fc": params["norm"]}
    for error, says, call in (
        (TypeError, "rows.token_ids must", apply(ids=ids.astype(float))),
        (ValueError, "rows.start must", apply(start=ids[:1])),
        (ValueError, "num_drafts must", apply(num_drafts=5)),
        (ValueError, "a block must have", apply(cache=head_of(block_size=2).init_cache(2, 1))),
        (ValueError, "features must", write(features=features[..., :9])),
        (TypeError, "features must", write(features=features.astype(jnp.bfloat16))),
        (ValueError, "features must have", write(features=jnp.zeros((2, 20, 48)))),
        (TypeError, "start must", write(start=ids.astype(float))),
        (ValueError, "positions must", lambda: head.context(params, features, ids[None])),
        (ValueError, r"params\['fc'\] must", lambda: head.check_params("params", wrong)),
        (TypeError, "dtype must", lambda: lm.BlockHead(CONFIG, jnp.int32)),
    ):
        with pytest.raises(error, match=f"^{says}"):
            call()
