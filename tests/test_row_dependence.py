"""`row_dependence` finds what in a pass depends on more than the tokens up to a row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_specdec.testing import RowDependence, row_dependence

V, B, S, T = 8, 3, 4, 32
TABLE = jax.random.normal(jax.random.key(0), (V, 5))
Cache = list[dict[str, jax.Array]]


def init_cache(num_requests: int, max_length: int) -> Cache:
    count = jnp.zeros((num_requests,), jnp.int32)
    return [{"keys": jnp.zeros((num_requests, max_length, 5), jnp.bfloat16), "count": count}] * 2


def apply(
    table: jax.Array, token_ids: jax.Array, start: jax.Array, cache: Cache, *, fault: str
) -> tuple[dict[str, jax.Array], Cache]:
    """Two layers, each of which adds what the cache has of the token before; and a `fault`."""
    x = table[token_ids]  # [B, S, 5]
    request = jnp.arange(x.shape[0])[:, None]
    row = jnp.arange(x.shape[1])[None, :]
    place = start[:, None] + row  # [B, S]
    wrong = {
        "row": row[:, :, None] == S - 1,
        "slot": request[:, :, None] == 1,
        "neighbours": x.mean(axis=0, keepdims=True) > 0,
    }
    new_cache = []
    for index, layer in enumerate(cache):
        keys = layer["keys"].at[request, place].set(x.astype(jnp.bfloat16))
        x = x + keys[request, jnp.maximum(place - 1, 0)].astype(jnp.float32)
        new_cache.append({"keys": keys, "count": start + 1})
        if index == 0 and fault in wrong:
            x = jnp.where(wrong[fault], x + 0.01, x)
    logits = x @ table.T
    wrong_logits = {
        "next float": jnp.nextafter(logits, jnp.inf),
        "negated": -logits,  # an even number of sign bits, of which sums of bits lose all
        "two negated": logits.at[:, :, 2:4].multiply(-1),
        "swapped": logits.at[:, :, 2:4].set(logits[:, :, 3:1:-1]),
        "reversed": logits[:, :, ::-1],
        "rolled": jnp.roll(logits, 1, axis=2),
        "doubled and halved": logits.at[:, :, 0].multiply(2).at[:, :, 1].multiply(0.5),
    }
    logits = jnp.where(row[:, :, None] == S - 1, wrong_logits.get(fault, logits), logits)
    return {"hidden": x, "logits": logits}, new_cache


LOGITS = RowDependence("outputs['logits']", "its row", B)
WRONG_LOGITS = (
    "next float",
    "negated",
    "two negated",
    "swapped",
    "reversed",
    "rolled",
    "doubled and halved",
)


SIZES = dict(vocab_size=V, num_requests=B, num_rows=S, max_length=T)


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("none", None),
        ("row", RowDependence("cache[1]['keys']", "its row", B)),
        ("neighbours", RowDependence("cache[1]['keys']", "its slot or neighbours", B)),
        ("slot", RowDependence("cache[1]['keys']", "its slot or neighbours", 2)),
        *((fault, LOGITS) for fault in WRONG_LOGITS),
    ],
)
def test_the_first_array_that_differs_is_named(fault: str, wanted: RowDependence | None) -> None:
    found = row_dependence(functools.partial(apply, fault=fault), TABLE, init_cache, **SIZES)
    assert found == wanted


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 0}, "^vocab_size must"),
        ({"num_requests": 0}, "^num_requests must"),
        ({"num_rows": 1}, "^num_rows must"),
        ({"max_length": S}, "^max_length must"),
    ],
)
def test_sizes_that_say_nothing_are_refused(changed: dict[str, int], message: str) -> None:
    never: Any = None
    with pytest.raises(ValueError, match=message):
        row_dependence(never, None, never, **SIZES | changed)
