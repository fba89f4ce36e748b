"""Weights in 8 bits: `quantize` as NumPy states it, and a Llama with them in float64.

The heads stand beside their other options, in `test_eagle3` and `test_block`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.models import Int8Weight, Llama, quantize

from . import reference_llama, test_block, test_eagle3
from .weights import dequantized, random_ids, random_weights, sizes

SIZES = sizes(37, 16, 24, 2, (4, 2, 6))
UNTIED, TIED = Llama(SIZES), Llama(dataclasses.replace(SIZES, tie_word_embeddings=True))
EAGLE = functools.partial(dataclasses.replace, test_eagle3.CONFIG)
MODELS: dict[str, Any] = {
    "Llama": UNTIED,
    "tied": TIED,
    "EAGLE-3": lm.models.Eagle3Head(EAGLE(**test_eagle3.NARROW)),
    "EAGLE-3, tied": lm.models.Eagle3Head(EAGLE(**test_eagle3.OPTIONS["tied output"])),
    "DSpark": test_block.head_of(**test_block.DSPARK),
    "DFlash, tied": test_block.head_of(**test_block.OPTIONS["tied output"]),
}
PRODUCTS = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "fc", "lm_head", "markov_w2"}


def is_int8(x: Any) -> bool:
    return isinstance(x, Int8Weight)


@pytest.mark.parametrize("name", MODELS)
def test_each_column_is_integers_times_its_largest_entry_by_127(name: str) -> None:
    model = MODELS[name]
    params = random_weights(model, 1, moved=0.3)
    layer = params["layers"][1] if "layers" in params else params["layer"]
    layer["down_proj"] = layer["down_proj"].at[:, 2].set(0)
    found = quantize(params)
    model.check_params("params", found)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, found, quantize(found), is_leaf=is_int8))
    before = params if "lm_head" in params else params | {"lm_head": params["embed_tokens"]}
    leaves = jax.tree.leaves_with_path(found, is_leaf=is_int8)
    for (path, new), old in zip(leaves, jax.tree.leaves(before), strict=True):
        if path[-1].key not in PRODUCTS:
            assert new is old
            continue
        assert (new.values.dtype, new.scale.dtype) == (jnp.int8, jnp.float32)
        weight = np.asarray(old, np.float64)
        values = np.asarray(new.values, np.float64)
        # [in, out] -> [out, in], but where it is that already
        weight = weight.T if weight.T.shape == values.shape else weight
        largest = np.abs(weight).max(axis=1)
        scale = np.where(largest > 0, largest / 127, 1)
        np.testing.assert_allclose(new.scale, scale, rtol=1e-6)
        assert (np.abs(values).max(axis=1) == np.where(largest > 0, 127, 0)).all()
        assert (np.abs(values * scale[:, None] - weight) <= 0.50001 * scale[:, None]).all()


def test_some_columns_are_those_of_the_whole_product() -> None:
    rng = np.random.default_rng(0)
    values, scale = rng.integers(-127, 128, (9, 5)), rng.uniform(0.01, 2, 9)
    weight = Int8Weight(values.astype(np.int8), scale.astype(np.float32))
    rows = rng.normal(size=(2, 3, 5)).astype(np.float32)  # [B, W, in]
    ids = rng.integers(0, 9, (2, 1, 4)).astype(np.int32)  # [B, 1, C]
    found = jax.jit(Int8Weight.columns)(weight, rows, ids)
    expected = rows @ (values * scale[:, None]).T
    expected = np.take_along_axis(expected, np.broadcast_to(ids, (2, 3, 4)), axis=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_cannot_be_quantized_is_refused() -> None:
    params = random_weights(UNTIED, 0)
    with pytest.raises(ValueError, match="^bits must be 8, but it is 4"):
        quantize(params, bits=4)
    square = {"embed_tokens": jnp.zeros((4, 4)), "lm_head": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="^lm_head must be the array embed_tokens, or not square"):
        quantize(square)
    own = quantize(square | {"lm_head": square["embed_tokens"]})
    assert is_int8(own["lm_head"])


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("values", jnp.zeros((16, 3), jnp.int8), ValueError),
        ("values", jnp.zeros((37, 16)), TypeError),
        ("scale", jnp.zeros(36), ValueError),
        ("scale", jnp.zeros(37, jnp.bfloat16), TypeError),
    ],
)
def test_int8_weights_that_do_not_fit_are_named(field: str, value: Any, error: type) -> None:
    params = quantize(random_weights(UNTIED, 0))
    params["lm_head"] = dataclasses.replace(params["lm_head"], **{field: value})
    with pytest.raises(error, match=rf"^params\['lm_head'\]\.{field} must"):
        UNTIED.check_params("params", params)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: Llama, params: Any, ids: Any) -> jax.Array:
    return run_pass(model, params, ids, jnp.zeros(2, jnp.int32), model.init_cache(2, 8)).logits


@pytest.mark.parametrize(
    "model",
    [pytest.param(UNTIED, marks=pytest.mark.long, id="untied"), pytest.param(TIED, id="tied")],
)
def test_logits_are_those_of_the_dequantized_weights(model: Llama) -> None:
    params = random_weights(model, 1, moved=0.3)
    found = quantize(params)
    exact = dequantized(found, {"lm_head": params["embed_tokens"].T} | params)
    ids = random_ids((2, 8), SIZES.vocab_size)
    logits = logits_of(model, found, ids)
    for one, row in zip(logits, ids, strict=True):
        expected = reference_llama.forward(SIZES, exact, row.tolist())
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=2e-5)
    # The weights before them give others, which these bounds tell apart.
    assert np.abs(np.asarray(logits - logits_of(model, params, ids))).max() > 1e-3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_show_in_logits_as_they_do_in_floats(bad: float) -> None:
    params = random_weights(TIED, 1)
    ids = random_ids((2, 8), 30)
    embedding = params["embed_tokens"].at[33, 4].set(bad)  # of an id that no text has
    for changed in (params | {"embed_tokens": embedding}, with_bad_layer(params, bad)):
        shows = ~np.isfinite(logits_of(TIED, quantize(changed), ids))
        np.testing.assert_array_equal(shows, ~np.isfinite(logits_of(TIED, changed, ids)))
        assert shows.any()
    assert shows.all()


def with_bad_layer(params: Any, bad: float) -> Any:
    first, *others = params["layers"]
    changed = first | {"down_proj": first["down_proj"].at[3, 2].set(bad)}
    return params | {"layers": [changed, *others]}


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_have_no_logits(shape: tuple[int, int]) -> None:
    params = random_weights(UNTIED, 0)
    rows = lm.models.Rows(np.zeros(shape, np.int32), np.zeros(shape[0], np.int32))
    cache = UNTIED.init_cache(shape[0], 8)
    for weights in (params, jax.eval_shape(quantize, params)):
        (output,), _ = jax.eval_shape(UNTIED.apply, weights, [rows], cache)
        assert output.logits.shape == (*shape, 37)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_token_does_not_depend_on_its_row(dtype: str, optimized: None) -> None:
    model = Llama(SIZES, dtype)
    params = quantize(random_weights(model, 1))

    def run(params: Any, ids: Any, start: Any, cache: Any) -> Any:
        return run_pass(model, params, ids, start, cache)[:2]

    sizes = dict(vocab_size=37, num_requests=3, num_rows=5, max_length=32)
    assert sd.testing.row_dependence(run, params, model.init_cache, **sizes) is None
