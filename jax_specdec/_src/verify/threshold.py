"""The threshold of a filtered row, found without sorting it.

Min-p, top-k and top-p each leave out the entries below a threshold. That of min-p is known from the
largest entry. The others are found by halving an interval of floats: once per bit, the row is read
to see whether the entries not below a candidate are as many, or as heavy, as asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import Filter, limits_count

Total = Callable[[Callable[[jax.Array], jax.Array]], jax.Array]


def find_threshold(
    filter: Filter,
    total: Total,
    *,
    size: int,
    dtype: Any,
    peak: jax.Array,
    inv_temperature: jax.Array,
) -> jax.Array:
    """The largest threshold of the three.

    Args:
      filter: what a request leaves out.
      total: ``total(fn)`` is the sum over the row of what `fn` makes of its entries, elementwise.
      size: ids that count.
      dtype: of the logits before they were float32.
      peak: ``[]`` float32, the row's largest entry, finite.
      inv_temperature: ``[]`` float32.

    Returns:
      ``[]`` float32, at most `peak`; entries equal to it stay.
    """
    bits = 9 + jnp.finfo(dtype).nmant  # sign, exponent of float32, mantissa
    least = jnp.float32(-jnp.inf)
    if filter.min_p is not None:
        least = peak + jnp.log(filter.min_p) / inv_temperature

    if filter.top_k is not None:
        top_k = filter.top_k

        def are_enough(candidate: jax.Array) -> jax.Array:
            return total(lambda x: (x >= candidate).astype(jnp.int32)) >= top_k

        highest = jnp.where(limits_count(top_k, size), peak, least)
        least = _largest(are_enough, least, highest, bits)

    if filter.top_p is not None:
        above = least

        def mass(candidate: jax.Array) -> jax.Array:
            bound = jnp.maximum(candidate, above)
            return total(
                lambda x: jnp.where(x >= bound, jnp.exp((x - peak) * inv_temperature), 0.0)
            )

        limits = filter.top_p < 1
        goal = filter.top_p * only_if(limits, lambda: mass(above), jnp.float32(1))
        highest = jnp.where(limits, peak, least)
        least = _largest(lambda candidate: mass(candidate) >= goal, least, highest, bits)
    return least


def only_if(condition: jax.Array, fn: Callable[[], Any], otherwise: Any) -> Any:
    """``fn()`` where a condition holds; under `vmap`, not computed if it holds nowhere."""

    def once(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jnp.bool_(False), fn()

    return lax.while_loop(lambda state: state[0], once, (condition, otherwise))[1]


def _largest(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, bits: int
) -> jax.Array:
    """The largest float in ``[low, high]`` that a condition holds at; it holds at `low`.

    Only the leading `bits` of the floats tell entries apart.
    """
    shift = 32 - bits

    def value(key: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(_in_order(key << shift), jnp.float32)
        return jnp.where(jnp.abs(x) < jnp.finfo(x).tiny, 0.0, x)  # some devices take it for 0

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up
        reached = holds(value(middle))
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    def key(x: jax.Array) -> jax.Array:
        return _in_order(lax.bitcast_convert_type(x, jnp.int32)) >> shift

    found, _ = lax.while_loop(lambda state: state[0] < state[1], halve, (key(low), key(high)))
    return jnp.where(found > key(low), value(found), low)


def _in_order(bits: jax.Array) -> jax.Array:
    """Bits of a float32 as an int32 with the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
