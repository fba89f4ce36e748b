"""Heads rotated and written into a cache, by XLA and by the kernel, against float64.

The kernel is interpreted here. `pytest -m gpu` runs the same table on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import assume, gpus
from upper_floor import rotate
from verify.interpret_mode import interpret_gpu_params

from jax_specdec.lm.models import LayerSpec

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of a pass: N, Nkv and D, requests of the cache, T, and where each row goes."""

    heads: tuple[int, int, int]
    num_requests: int
    room: int
    places: tuple[tuple[int, ...], ...]  # [G, S]
    requests: tuple[tuple[int, ...], ...] | None = None
    has_bias: bool = False
    comes_twice: bool = False

    @property
    def spec(self) -> LayerSpec:
        num_query, num_kv, head_dim = self.heads
        return LayerSpec(
            num_attention_heads=num_query,
            num_key_value_heads=num_kv,
            head_dim=head_dim,
            intermediate_size=8,
            qkv_bias=self.has_bias,
        )


CASES = {
    "a row of each of three requests": Case((4, 2, 64), 3, 64, ((5,), (63,), (0,))),
    "a lone row that comes twice": Case((14, 2, 64), 1, 64, ((7,),), None, True, True),
    "rows of each request": Case((6, 2, 128), 2, 64, ((3, 4, 5), (61, 62, 63)), None, True),
    "slots, one of them past the end": Case(
        (3, 1, 64), 4, 64, ((8, 9), (0, 1), (5, 6)), ((2,), (4,), (0,))
    ),
    "groups, and rows that nobody wants": Case(
        (8, 4, 64), 3, 64, ((1, 2, 64, 63, 5),), ((0, 0, 1, 2, 2),)
    ),
}
ON_GPU = CASES | {
    "8B, 32 requests": Case(
        (32, 8, 128), 32, 1024, tuple(tuple(range(9 * b, 9 * b + 5)) for b in range(32))
    ),
    "large heads": Case((4, 1, 256), 2, 128, ((0, 1, 2, 3), (100, 101, 102, 127))),
    "many rows": Case((14, 2, 64), 1, 1024, (tuple(range(500)),), None, True),
}


def made(case: Case, dtype: Any) -> tuple[rotate.NewHeads, Any, Any]:
    """Heads of a case, and the other arguments; some values and keys are not finite."""
    num_query, num_kv, head_dim = case.heads
    rng = np.random.default_rng(num_query)
    num_groups, each = np.shape(case.places)
    rows = 2 if case.comes_twice else each
    product = rng.normal(size=(num_groups, rows, num_query + 2 * num_kv, head_dim))
    product[0, 0, -1, :3] = NAN, np.inf, -np.inf
    product[-1, -1, num_query, 1] = np.inf
    if case.comes_twice:
        product[:, 1] = product[:, 0]
    angles = rng.uniform(-1000, 1000, (num_groups, rows, 1, head_dim // 2))
    bias = rng.normal(size=(num_query + 2 * num_kv) * head_dim)
    cache = (
        jnp.asarray(rng.normal(size=(case.num_requests * num_kv, head_dim, case.room)), dtype),
        jnp.asarray(rng.normal(size=(case.num_requests * num_kv, case.room, head_dim)), dtype),
    )
    heads = rotate.NewHeads(
        case.spec,
        {"qkv_bias": jnp.asarray(bias, dtype)} if case.has_bias else {},
        jnp.asarray(product.reshape(num_groups, rows, -1), dtype),
        (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)),
    )
    requests = None if case.requests is None else jnp.asarray(case.requests, jnp.int32)
    return heads, cache, (jnp.asarray(case.places, jnp.int32), requests)


def oracle(
    case: Case, heads: rotate.NewHeads, cache: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values in float64."""
    num_query, num_kv, head_dim = case.heads
    rows = heads.product
    if case.has_bias:
        rows = rows + heads.layer["qkv_bias"][None, None, :]
    rows = np.asarray(rows, np.float64).reshape(*rows.shape[:2], -1, head_dim)
    cos, sin = (np.asarray(x, np.float64) for x in heads.cos_sin)
    first, second = np.split(rows, 2, axis=3)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=3)
    keys, values = (np.array(x, np.float64) for x in cache)
    each_own = np.arange(len(case.places))[:, None]
    owners = np.broadcast_to(
        each_own if case.requests is None else case.requests, np.shape(case.places)
    )
    for g, s in np.ndindex(np.shape(case.places)):
        place = case.places[g][s]
        owner = owners[g, s]
        if place >= case.room or owner >= case.num_requests:
            continue
        value = rows[g, s, num_query + num_kv :]
        own = slice(owner * num_kv, (owner + 1) * num_kv)
        is_finite = np.isfinite(value)
        keys[own, :, place] = np.where(is_finite, turned[g, s, num_query:-num_kv], np.nan)
        values[own, place] = np.where(is_finite, value, 0)
    return turned[:, :, :num_query], keys, values


def check(case: Case, dtype: Any, run: Callable[..., Any]) -> None:
    """Checks what is read and what is written; all that is not written stays, to the last bit."""
    heads, cache, where = made(case, dtype)
    wanted = oracle(case, heads, cache)
    is_kept = wanted[1] == np.asarray(cache[0], np.float64)
    query, (keys, values) = run(heads, cache, *where)
    assert (query.dtype, keys.dtype, values.dtype) == (dtype,) * 3
    found = [np.asarray(x, np.float64) for x in (query, keys, values)]
    each = len(case.places[0])  # of a row that comes twice, the second may be anything
    error = 2e-2 if dtype == jnp.bfloat16 else 4e-3
    assert found[0].shape == wanted[0].shape
    for x, y in zip(
        (found[0][:, :each], *found[1:]), (wanted[0][:, :each], *wanted[1:]), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=error, atol=error)
    # Values are not rotated: they are what they were, with the bias.
    np.testing.assert_array_equal(found[2], np.asarray(jnp.asarray(wanted[2], dtype), np.float64))
    np.testing.assert_array_equal(found[1][is_kept], wanted[1][is_kept])


def by_kernel(
    heads: rotate.NewHeads, cache: Any, places: jax.Array, requests: jax.Array | None
) -> Any:
    """The front door, as on a GPU, with the kernel interpreted."""
    interpreted = functools.partial(rotate.by_kernel, interpret=interpret_gpu_params())
    with (
        mock.patch.object(gpus, "no_device", lambda: None),
        mock.patch.object(rotate, "by_kernel", interpreted),
        assume("cuda"),
    ):
        return by_default(heads, cache, places, requests)


def by_default(heads: rotate.NewHeads, *given: Any) -> Any:
    """The front door, with the cache donated."""

    @functools.partial(jax.jit, donate_argnums=1)
    def run(arrays: Any, *given: Any) -> Any:
        return rotate.rotate_and_write(rotate.NewHeads(heads.spec, *arrays), *given)

    (query, rows), cache = run(heads[1:], *given)
    if rows is not None:
        count = given[1].shape[1]  # S; a row that comes twice is there once
        wanted = rotate.rows_of(query[:, :count], heads.spec.num_key_value_heads)
        own = query[:, :count].size // query.shape[3]
        np.testing.assert_array_equal(rows[:own], wanted[:own])
    return query, cache


@pytest.mark.parametrize("name", CASES)
def test_xla_is_the_oracle(name: str) -> None:
    check(CASES[name], jnp.bfloat16, by_default)


@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (i not in (1, 3)))
        for i, name in enumerate(CASES)
    ],
)
def test_the_interpreted_kernel_is_the_oracle(name: str) -> None:
    check(CASES[name], jnp.bfloat16, by_kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_the_kernel_is_the_oracle_on_a_gpu(name: str, dtype: Any) -> None:
    check(ON_GPU[name], dtype, by_default)


def lowered(case: Case, dtype: Any = jnp.bfloat16, platform: str = "cuda", **fields: Any) -> str:
    """The program of a pass's heads on a GPU that is not there."""
    heads, cache, where = made(case, dtype)
    spec = dataclasses.replace(heads.spec, **fields)
    norms = jnp.ones((case.heads[2],), dtype)
    layer = {**heads.layer, "q_norm": norms, "k_norm": norms}

    def run(product: Any, cos_sin: Any, cache: Any, *where: Any) -> Any:
        return rotate.rotate_and_write(
            rotate.NewHeads(spec, layer, product, cos_sin), cache, *where
        )

    with mock.patch.object(gpus, "no_device", lambda: None):
        traced = jax.jit(run, donate_argnums=2).trace(heads.product, heads.cos_sin, cache, *where)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.newest
def test_the_kernel_is_chosen_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["rows of each request"]
    text = lowered(case)
    assert text.count("@mosaic_gpu") == 1
    assert text.count("tf.aliasing_output") == 2  # the cache is changed in place
    for other in (
        lowered(case, platform="cpu"),
        lowered(case, jnp.float32),
        lowered(case, qk_norm=True),
        lowered(dataclasses.replace(case, places=((*range(64),),) * 16, requests=((0,),) * 16)),
    ):
        assert "@mosaic_gpu" not in other
    monkeypatch.setattr(rotate, "BY_KERNEL", False)
    assert "@mosaic_gpu" not in lowered(case)
