"""The threshold of a filtered row, found without sorting it.

Min-p, top-k and top-p each leave out the entries below a threshold. That of min-p is known from the
largest entry. The others are found by dividing an interval of floats: in each round the row is read
to see whether the entries not below a candidate are as many, or as heavy, as asked for. A round may
have several candidates: for rows that lie on many devices each round costs an exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import Filter, limits_count

Total = Callable[[Callable[[jax.Array, jax.Array], jax.Array], jax.Array], jax.Array]
"""``total(fn, candidates)`` is, for each of the candidates ``[c]``, the sum over the row of what
``fn(entries, candidate)`` makes of its entries, elementwise."""


def find_threshold(
    filter: Filter,
    total: Total,
    *,
    size: int,
    dtype: Any,
    peak: jax.Array,
    inv_temperature: jax.Array,
    bits_per_round: int = 1,
) -> jax.Array:
    """The largest threshold of the three.

    Args:
      filter: what a request leaves out.
      total: how the row is summed.
      size: ids that count.
      dtype: of the logits before they were float32.
      peak: ``[]`` float32, the row's largest entry, finite.
      inv_temperature: ``[]`` float32.
      bits_per_round: d, for ``2**d - 1`` candidates in each round. Float32 logits then need at most
        ``ceil(32 / d)`` rounds for each of top-k and top-p, bfloat16 ``ceil(16 / d)``.

    Returns:
      ``[]`` float32, at most `peak`; entries equal to it stay.
    """
    search = functools.partial(
        _largest,
        bits=9 + jnp.finfo(dtype).nmant,  # sign, exponent of float32, mantissa
        candidates=2**bits_per_round - 1,
    )
    least = jnp.float32(-jnp.inf)
    if filter.min_p is not None:
        least = peak + jnp.log(filter.min_p) / inv_temperature

    if filter.top_k is not None:
        top_k = filter.top_k

        def are_enough(candidates: jax.Array) -> jax.Array:
            return total(lambda x, c: (x >= c).astype(jnp.int32), candidates) >= top_k

        highest = jnp.where(limits_count(top_k, size), peak, least)
        least = search(are_enough, least, highest)

    if filter.top_p is not None:
        above = least

        def mass(candidates: jax.Array) -> jax.Array:
            return total(
                lambda x, bound: jnp.where(x >= bound, jnp.exp((x - peak) * inv_temperature), 0.0),
                jnp.maximum(candidates, above),
            )

        limits = filter.top_p < 1
        goal = filter.top_p * only_if(limits, lambda: mass(above[None])[0], jnp.float32(1))
        highest = jnp.where(limits, peak, least)
        least = search(lambda candidates: mass(candidates) >= goal, least, highest)
    return least


def only_if(condition: jax.Array, fn: Callable[[], Any], otherwise: Any) -> Any:
    """``fn()`` where a condition holds; under `vmap`, not computed if it holds nowhere."""

    def once(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jnp.bool_(False), fn()

    return lax.while_loop(lambda state: state[0], once, (condition, otherwise))[1]


def _largest(
    holds: Callable[[jax.Array], jax.Array],
    low: jax.Array,
    high: jax.Array,
    *,
    bits: int,
    candidates: int,
) -> jax.Array:
    """The largest float in ``[low, high]`` that a condition holds at; it holds at `low`.

    `holds` says so of candidates ``[c]``. Entries differ in the leading `bits` only.
    """
    shift = 32 - bits

    def value(key: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(_in_order(key << shift), jnp.float32)
        return jnp.where(jnp.abs(x) < jnp.finfo(x).tiny, 0.0, x)  # some devices take it for 0

    def divide(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        distance = lax.bitcast_convert_type(high - low, jnp.uint32)  # may exceed an int32
        step = distance // (candidates + 1) + 1
        ahead = jnp.minimum(step * jnp.arange(1, candidates + 1, dtype=jnp.uint32), distance)
        middles = low + lax.bitcast_convert_type(ahead, jnp.int32)
        reached = holds(value(middles))
        low = jnp.max(jnp.where(reached, middles, low))
        high = jnp.min(jnp.where(reached, high, middles - 1))
        return low, high

    def key(x: jax.Array) -> jax.Array:
        return _in_order(lax.bitcast_convert_type(x, jnp.int32)) >> shift

    found, _ = lax.while_loop(lambda state: state[0] < state[1], divide, (key(low), key(high)))
    return jnp.where(found > key(low), value(found), low)


def _in_order(bits: jax.Array) -> jax.Array:
    """Bits of a float32 as an int32 with the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
