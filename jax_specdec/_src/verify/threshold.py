"""The threshold of a filtered row, found without sorting the row.

Min-p, top-k and top-p each leave out the entries below a threshold. For min-p it follows from the
largest entry. For the others it is found by bisection over the floats: each round reads the row and
tests whether the entries from a candidate on are as many, or have as much mass, as asked for. A
round may test several candidates, because each costs an exchange if the row is on many devices.
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
"""``total(fn, candidates)`` is ``[c]``: for each candidate, ``fn(entries, candidate)`` summed over
the entries of the row."""


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
    """The threshold of a row: the largest of those of min-p, top-k and top-p.

    Args:
      filter: min-p, top-k and top-p of the row's request.
      total: sums over the row.
      size: ids from it on are padding.
      dtype: of the logits before they were converted to float32.
      peak: ``[]`` float32, the row's largest entry, finite.
      inv_temperature: ``[]`` float32.
      bits_per_round: d, for ``2**d - 1`` candidates per round. Float32 logits then take at most
        ``ceil(32 / d)`` rounds for each of top-k and top-p, bfloat16 logits ``ceil(16 / d)``.

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
    """``fn()`` if a condition holds, else `otherwise`. Under `vmap`, skipped if it never holds."""

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
    """The largest float in ``[low, high]`` at which a condition holds. It must hold at `low`.

    `holds` tests candidates ``[c]``. Only floats that are 0 past their leading `bits` are tried.
    """
    shift = 32 - bits

    def value(key: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(_in_order(key << shift), jnp.float32)
        return jnp.where(jnp.abs(x) < jnp.finfo(x).tiny, 0.0, x)  # some devices flush it to 0

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
    """From the bits of a float32 to an int32 that orders as the floats do, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
