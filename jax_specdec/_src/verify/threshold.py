"""The threshold of a filtered row, found without sorting the row.

Min-p, top-k and top-p each leave out the entries below a threshold. For min-p it follows from the
largest entry. For the others it is found by bisection over the floats: each round reads the row and
tests whether the entries from a candidate on are as many, or have as much mass, as asked for. A
round may test several candidates, because each costs an exchange if the row is on many devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import Filter, limits_count
from jax_specdec._src.verify.form import Form
from jax_specdec._src.verify.largest import Largest

ALL_ENTRIES = "all_entries"
"""The scope of the operations that search all entries of rows."""


class SomeRows(Protocol):
    """Rows that were selected."""

    def whole(self) -> jax.Array:
        """``[n, W]`` float32 entries."""


class Thresholds(NamedTuple):
    """Thresholds of rows ``[n]``.

    Attributes:
      least: the largest of those of min-p, top-k and top-p.
      above: the largest of those of min-p and top-k: top-p is of the mass that they leave.
    """

    least: jax.Array
    above: jax.Array


def find_thresholds(
    filter: Filter,
    select: Callable[[], SomeRows],
    limited: jax.Array,
    *,
    size: int,
    dtype: Any,
    peak: jax.Array,
    inv_temperature: jax.Array,
    form: Form,
    largest: Callable[[], Largest] | None = None,
) -> jax.Array:
    """The thresholds of rows: of each the largest of those of min-p, top-k and top-p.

    Args:
      filter: min-p, top-k and top-p of each row's request, ``[n]``.
      select: selects the rows, or this device's part of them, once for all reads; not called where
        no row has a threshold.
      limited: ``[n]`` bool, the rows that have a threshold; for others the result is undefined.
      size: ids from it on are padding.
      dtype: of the logits before they were converted to float32.
      peak: ``[n]`` float32, the largest entry of each row, finite.
      inv_temperature: ``[n]`` float32.
      form: how the vocabulary is split. If it is, each round tests 15 candidates: float32 logits
        take at most 8 rounds for each of top-k and top-p, bfloat16 logits 4. A TPU that has all of
        it tests 3, for which it computes about as long as it reads: 16 and 8 rounds.
      largest: finds the largest entries of the rows; not called where nothing is searched for. The
        rows are read if these do not decide all thresholds.

    Returns:
      ``[n]`` float32, at most `peak`; entries equal to it stay.
    """
    search = functools.partial(
        _largest,
        bits=9 + jnp.finfo(dtype).nmant,  # sign, exponent of float32, mantissa
        candidates=15 if form.axis is not None else 3 if form.platform == "tpu" else 1,
    )

    find = functools.partial(_found_in, size=size, search=search, form=form)
    given, none = (limited, filter, peak, inv_temperature), jnp.full_like(peak, -jnp.inf)

    def in_rows() -> jax.Array:
        return find(select(), *given).least

    if largest is None:
        return only_if(jnp.any(limited), in_rows, none)
    find_largest = largest

    def among_largest() -> tuple[jax.Array, jax.Array]:
        them = find_largest()
        found = find(them, *given, mass_of_rows=them.mass)
        is_listed = (found.above > them.bound) | (found.above == -jnp.inf)
        return found.least, is_listed & (found.least > them.bound)

    searched = limited & filter.is_searched(size)
    nothing = _of_min_p(filter, peak, inv_temperature), jnp.zeros_like(limited)
    least, known = only_if(jnp.any(searched), among_largest, nothing)
    unknown = searched & ~known

    with jax.named_scope(ALL_ENTRIES):
        rest = only_if(jnp.any(unknown), in_rows, none)
    return jnp.where(unknown, rest, least)


def _found_in(
    selected: SomeRows,
    limited: jax.Array,
    filter: Filter,
    peak: jax.Array,
    inv_temperature: jax.Array,
    mass_of_rows: Callable[[], jax.Array] | None = None,
    *,
    size: int,
    search: Callable[..., jax.Array],
    form: Form,
) -> Thresholds:
    """The thresholds of rows that are selected; `mass_of_rows` if these lack entries of theirs."""
    least = _of_min_p(filter, peak, inv_temperature)
    if filter.top_k is not None:
        top_k = filter.top_k

        def are_enough(candidates: jax.Array) -> jax.Array:
            x = selected.whole()
            # In a Python loop, XLA reads the rows once for all candidates and writes nothing.
            counts = [jnp.sum(x >= c[:, None], axis=1, dtype=jnp.int32) for c in candidates]
            return form.sum(jnp.stack(counts)) >= top_k[None]

        highest = jnp.where(limits_count(top_k, size), peak, least)
        least = search(are_enough, least, highest)

    above = least
    if filter.top_p is not None:

        def mass(candidates: jax.Array) -> jax.Array:
            x = selected.whole()
            exponent = (x - peak[:, None]) * inv_temperature[:, None]
            bounds = jnp.maximum(candidates, above[None])
            kept = [jnp.where(x >= c[:, None], jnp.exp(exponent), 0.0) for c in bounds]
            return form.sum(jnp.stack([jnp.sum(y, axis=1) for y in kept]))

        limits = filter.top_p < 1
        whole = only_if(jnp.any(limits), lambda: mass(above[None])[0], jnp.ones_like(peak))
        if mass_of_rows is not None:
            is_whole = above == -jnp.inf
            of_rows = only_if(jnp.any(limits & limited & is_whole), mass_of_rows, whole)
            whole = jnp.where(is_whole, of_rows, whole)
        goal = filter.top_p * jnp.where(limits, whole, 1.0)
        highest = jnp.where(limits, peak, least)
        least = search(lambda candidates: mass(candidates) >= goal[None], least, highest)
    return Thresholds(least, above)


def _of_min_p(filter: Filter, peak: jax.Array, inv_temperature: jax.Array) -> jax.Array:
    if filter.min_p is None:
        return jnp.full_like(peak, -jnp.inf)
    return peak + jnp.log(filter.min_p) / inv_temperature


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
    """The largest floats ``[n]`` in ``[low, high]`` at which a condition holds.

    It must hold at `low`. `holds` tests candidates ``[c, n]``. Only floats that are 0 past their
    leading `bits` are tried.
    """
    shift = 32 - bits
    index = jnp.arange(1, candidates + 1, dtype=jnp.uint32)[:, None]

    def value(key: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(_in_order(key << shift), jnp.float32)
        return jnp.where(jnp.abs(x) < jnp.finfo(x).tiny, 0.0, x)  # some devices flush it to 0

    def divide(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        distance = lax.bitcast_convert_type(high - low, jnp.uint32)  # may exceed an int32
        step = distance // (candidates + 1) + 1
        ahead = jnp.minimum(step[None] * index, distance[None])
        middles = low[None] + lax.bitcast_convert_type(ahead, jnp.int32)
        reached, is_left = holds(value(middles)), low < high
        lower = jnp.max(jnp.where(reached, middles, low[None]), axis=0)
        higher = jnp.min(jnp.where(reached, high[None], middles - 1), axis=0)
        return jnp.where(is_left, lower, low), jnp.where(is_left, higher, high)

    start, end = (_in_order(lax.bitcast_convert_type(x, jnp.int32)) >> shift for x in (low, high))
    found, _ = lax.while_loop(lambda state: jnp.any(state[0] < state[1]), divide, (start, end))
    return jnp.where(found > start, value(found), low)


def _in_order(bits: jax.Array) -> jax.Array:
    """From the bits of a float32 to an int32 that orders as the floats do, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
