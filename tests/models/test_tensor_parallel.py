"""A model spread over devices gives the logits of the whole one, and each device holds a part."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import run as run_pass

from jax_specdec import lm

from .weights import mixed, random_ids, random_weights, sizes, with_fields

CONFIG = sizes(64, 24, 40, 1, (8, 8, 8))
SIX = sizes(64, 24, 40, 3, (6, 6, 8))
B, T, S = 2, 16, 7

# Sizes, devices, and how many groups the heads are split into.
CASES = {
    "everything divides": (dict(layers=CONFIG.layers * 2), 8, 8),
    "fewer key heads than devices": (dict(num_key_value_heads=2, tie_word_embeddings=True), 4, 4),
    "layers that differ": (
        dict(norms="around", scales_embedding=True, logit_softcap=3.0, layers=mixed(SIX).layers),
        *(3, 3),
    ),
    "int8": (dict(num_key_value_heads=2, tie_word_embeddings=True), 8, 8),
}


def mesh_of(n: int) -> jax.sharding.Mesh:
    return jax.make_mesh((n,), ("tensor",), devices=jax.devices()[:n])


@functools.partial(jax.jit, static_argnums=0)
def apply(model: lm.models.CausalModel, *args: Any) -> Any:
    return run_pass(model, *args, (0, 1))


def two_calls(model: lm.models.CausalModel, params: Any) -> list[np.ndarray]:
    """Logits and features of a prefill; logits of a call that goes back and overwrites."""
    tokens = random_ids((B, S), CONFIG.vocab_size - 14)
    start, cache = np.zeros((B,), np.int32), model.init_cache(B, T)
    first, cache, features = apply(model, params, tokens, start, cache)
    again = np.concatenate([tokens[:, :0:-1], [[-1], [2**30]]], axis=1, dtype=np.int32)  # padding
    second = apply(model, params, again, np.array([3, 5], np.int32), cache).logits
    for logits in (first, second):
        if isinstance(model, lm.models.TensorParallelLlama):
            assert logits.sharding.spec == jax.sharding.PartitionSpec(None, None, "tensor")
        assert not np.isnan(logits).any()
    return [np.asarray(first), np.asarray(features), np.asarray(second)[:, :-1]]


LONG = ("everything divides", "fewer key heads than devices")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.long if x in LONG else ()) for x in CASES]
)
def test_the_logits_are_those_of_the_whole_model(case: str) -> None:
    changes, n, groups = CASES[case]
    model = lm.models.Llama(with_fields(CONFIG, **changes))
    params = random_weights(model, 1, moved=0.5)
    if case == "int8":
        params = lm.models.quantize(params)
    parallel = lm.models.TensorParallelLlama(model, mesh_of(n), "tensor")
    assert {parallel.num_head_groups(spec) for spec in model.config.layers} == {groups}
    assert parallel.vocab_size == -(-model.vocab_size // n) * n
    found = two_calls(parallel, parallel.shard_params(params))
    wanted = two_calls(model, params)
    np.testing.assert_allclose(found.pop(1), wanted.pop(1), rtol=1e-5, atol=1e-5)
    for ours, whole in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours[..., : model.vocab_size], whole, rtol=1e-5, atol=1e-5)
        assert (ours[..., model.config.num_token_ids or model.vocab_size :] == -np.inf).all()


def test_a_device_holds_an_nth_and_only_sums_are_moved() -> None:
    n, model = 8, lm.models.Llama(CONFIG)
    parallel = lm.models.TensorParallelLlama(model, mesh_of(n), "tensor")
    whole = random_weights(model, 1)
    params = parallel.shard_params(whole)
    for one, many in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        (here,) = {shard.data.shape for shard in many.addressable_shards}
        assert here[0] == 1 and np.prod(here) == one.size // (n if one.ndim == 2 else 1)
    cache = parallel.init_cache(B, T)
    for one, many in zip(
        jax.tree.leaves(model.init_cache(B, T)), jax.tree.leaves(cache), strict=True
    ):
        assert {shard.data.size for shard in many.addressable_shards} == {one.size // n}

    tokens, start = jnp.zeros((B, S), jnp.int32), jnp.zeros((B,), jnp.int32)
    lowered = apply.lower(parallel, params, tokens, start, cache)
    text = lowered.compile().as_text()
    moved = re.findall(
        r"= (\S+) (all-\w+|collective-\w+|reduce-scatter|ragged\S+)(?:-start)?\(", text
    )
    # The embedding and both halves of each layer, one [B, S, H] each.
    assert len(moved) == 1 + 2 * len(CONFIG.layers)
    shape = f"f32[{B},{S},{CONFIG.hidden_size}]"
    assert all(kind == "all-reduce" and what.startswith(shape) for what, kind in moved), moved


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "n", "groups"),
    [(3, 1, 4, 1), (14, 2, 8, 2), (28, 4, 8, 4), (32, 8, 8, 8), (12, 6, 8, 2), (12, 3, 4, 1)],
)
def test_heads_are_split_over_the_most_groups_that_divide(num_heads, num_kv, n, groups) -> None:
    config = with_fields(CONFIG, num_attention_heads=num_heads, num_key_value_heads=num_kv)
    model = lm.models.TensorParallelLlama(lm.models.Llama(config), mesh_of(n), "tensor")
    assert model.num_head_groups(*config.layers) == groups


def test_bfloat16_stays_bfloat16() -> None:
    model = lm.models.Llama(CONFIG, jnp.bfloat16)
    parallel = lm.models.TensorParallelLlama(model, mesh_of(2), "tensor")
    params = parallel.shard_params(random_weights(model, 1))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    args = jnp.zeros((B, S), jnp.int32), jnp.zeros((B,), jnp.int32), parallel.init_cache(B, T)
    logits = jax.eval_shape(functools.partial(run_pass, parallel), params, *args).logits
    assert logits.dtype == jnp.bfloat16


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"axis must be one of the mesh, \['tensor'\], but it is 'x'"
    ):
        lm.models.TensorParallelLlama(lm.models.Llama(CONFIG), mesh_of(2), "x")


def test_it_is_a_static_causal_model() -> None:
    one, other = (
        lm.models.TensorParallelLlama(lm.models.Llama(CONFIG), mesh_of(2), "tensor") for _ in "ab"
    )
    assert isinstance(one, lm.models.CausalModel)
    assert one == other and hash(one) == hash(other)
    params = random_weights(lm.models.Llama(CONFIG), 0)
    one.check_params("params", one.shard_params(params))
    with pytest.raises(ValueError, match="^params.* must be an array"):  # of the whole model
        one.check_params("params", params)
