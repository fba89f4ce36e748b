"""Each device holds a part of a model; that it says what the whole one does, `test_models` has."""

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

from .weights import random_weights, sizes, with_fields

CONFIG = sizes(64, 24, 40, 1, (8, 8, 8))
B, T, S = 2, 16, 7


def mesh_of(n: int) -> jax.sharding.Mesh:
    return jax.make_mesh((n,), ("tensor",), devices=jax.devices()[:n])


@functools.partial(jax.jit, static_argnums=0)
def apply(model: lm.models.CausalModel, *args: Any) -> Any:
    return run_pass(model, *args, (0, 1))


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


def test_weights_of_the_whole_model_are_refused_and_its_vocabulary_is_padded() -> None:
    model = lm.models.TensorParallelLlama(lm.models.Llama(CONFIG), mesh_of(3), "tensor")
    assert model.vocab_size == 66
    with pytest.raises(ValueError, match="^params.* must be an array"):
        model.check_params("params", random_weights(lm.models.Llama(CONFIG), 0))
