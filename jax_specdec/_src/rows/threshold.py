"""The threshold of a filtered row, found without sorting the row.

Min-p, top-k and top-p each leave out the entries below a threshold. For min-p it follows from the
largest entry. For the others it is found by bisection over the floats: each round reads the row and
tests whether the entries from a candidate on are as many, or have as much mass, as asked for. A
round may test several candidates, because each costs an exchange if the row is on many devices.

`search` is this, by whatever reads the rows:

- `XlaAmounts` reads many rows at once, for all backends by XLA (`Gather.search`);
- `verify.backends.largest` looks at the largest entries of rows first, for TPUs (`Tiles.search`);
- `verify.mosaic_gpu.reader.RowFilter` reads one row, which a cluster has in shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.sampling import Filter, limits_count
from jax_specdec._src.rows.part import Part

S = TypeVar("S")

Candidate = Callable[[Any], jax.Array]
"""From the index of a candidate, 1 for the least, to a float32 threshold of each row."""


class Amounts(Protocol[S]):
    """Reads rows for `search`. `state` goes from one read to the next."""

    def count(self, candidate: Candidate, goal: jax.Array, state: S) -> tuple[jax.Array, S]:
        """Returns int32: how many candidates have at least `goal` entries at or above them."""

    def mass(self, candidate: Candidate, goal: jax.Array, state: S) -> tuple[jax.Array, S]:
        """Returns int32: how many candidates have at least the mass `goal` at or above them.

        Masses are sums of exponentials relative to the peak of the row.
        """

    def total(self, least: jax.Array, wanted: jax.Array, state: S) -> tuple[jax.Array, S]:
        """Returns the mass at or above `least`; anything but 0 for rows that are not `wanted`."""


def search(
    filter: Filter,
    amounts: Amounts[S],
    state: S,
    *,
    size: int,
    bits: int,
    candidates: int,
    peak: jax.Array,
    inv_temperature: jax.Array,
) -> tuple[jax.Array, S]:
    """Returns the thresholds of rows ``[...]``, of each the largest of its three filters'.

    Args:
      filter: min-p, top-k and top-p of each row's request.
      amounts: reads the rows.
      state: for its first read.
      size: ids of a row, without padding.
      bits: by which the entries differ; see `bits_of`.
      candidates: that are tested at once; one less than a power of two.
      peak: float32, the largest entry of each row, finite.
      inv_temperature: float32.

    Returns:
      Float32, at most `peak`; entries equal to it stay. And the state after the last read.
    """
    largest = functools.partial(_largest, bits=bits, candidates=candidates)
    # Min-p: the logit whose probability is that share of the largest.
    threshold = of_min_p(filter, peak, inv_temperature)
    if filter.top_k is not None:
        # Top-k: the largest threshold that leaves k entries, between min-p's and the peak.
        highest = jnp.where(limits_count(filter.top_k, size), peak, threshold)
        threshold, state = largest(amounts.count, filter.top_k, threshold, highest, state)
    if filter.top_p is not None:
        # Top-p: the largest that leaves that share of the mass which min-p and top-k have left.
        limits = filter.top_p < 1
        above = threshold
        whole, state = amounts.total(above, limits, state)

        def mass(candidate: Candidate, goal: jax.Array, state: S) -> tuple[jax.Array, S]:
            return amounts.mass(lambda i: jnp.maximum(candidate(i), above), goal, state)

        highest = jnp.where(limits, peak, threshold)
        threshold, state = largest(mass, filter.top_p * whole, threshold, highest, state)
    return threshold, state


class SomeRows(Protocol):
    """Rows that were selected."""

    def read(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Returns ``function(entries, *arrays)``, of float32 entries ``[n, W]``."""


def find_thresholds(
    filter: Filter,
    select: Callable[[], SomeRows],
    limited: jax.Array,
    *,
    size: int,
    dtype: Any,
    peak: jax.Array,
    inv_temperature: jax.Array,
    part: Part,
    candidates: int,
) -> jax.Array:
    """Returns the thresholds of rows, ``[n]`` float32, found by XLA.

    They are at most `peak`; entries equal to them stay.

    Args:
      filter: min-p, top-k and top-p of each row's request, ``[n]``.
      select: selects the rows, or this device's part of them, once for all reads; not called where
        no row has a threshold.
      limited: ``[n]`` bool, the rows that have a threshold; for others the result is undefined.
      size: ids from it on are padding.
      dtype: of the logits before they were converted to float32.
      peak: ``[n]`` float32, the largest entry of each row, finite.
      inv_temperature: ``[n]`` float32.
      part: of the vocabulary, which the entries are.
      candidates: that each round tests. With 15, float32 logits take at most 8 rounds for each of
        top-k and top-p, bfloat16 logits 4; with 3, 16 and 8; with 1, 32 and 16.
    """
    none = jnp.full_like(peak, -jnp.inf)

    # Rows are selected once, inside of the branch: nothing is read where no row has a threshold.
    def in_rows() -> jax.Array:
        amounts: XlaAmounts[None] = XlaAmounts(select(), peak, inv_temperature, part, candidates)
        return search(
            filter,
            amounts,
            None,
            size=size,
            bits=bits_of(dtype),
            candidates=candidates,
            peak=peak,
            inv_temperature=inv_temperature,
        )[0]

    return only_if(jnp.any(limited), in_rows, none)


@dataclasses.dataclass(frozen=True)
class XlaAmounts(Generic[S]):
    """`Amounts` of rows ``[n]``. The exchange is one for all candidates of a round."""

    rows: SomeRows
    peak: jax.Array
    inv_temperature: jax.Array
    part: Part
    candidates: int

    def count(self, candidate: Candidate, goal: jax.Array, state: S) -> tuple[jax.Array, S]:
        def counts(x: jax.Array, bounds: list[jax.Array]) -> list[jax.Array]:
            # In a Python loop, XLA reads the rows once for all candidates and writes nothing.
            return [jnp.sum(x >= c[:, None], axis=1, dtype=jnp.int32) for c in bounds]

        return self._reached(self.rows.read(counts, self._each(candidate)), goal), state

    def mass(self, candidate: Candidate, goal: jax.Array, state: S) -> tuple[jax.Array, S]:
        return self._reached(self._masses(self._each(candidate)), goal), state

    def total(self, least: jax.Array, wanted: jax.Array, state: S) -> tuple[jax.Array, S]:
        def whole() -> jax.Array:
            return self.part.sum(self._masses([least])[0])

        found = only_if(jnp.any(wanted), whole, jnp.ones_like(self.peak))
        return jnp.where(wanted, found, 1.0), state

    def _each(self, candidate: Candidate) -> list[jax.Array]:
        return [*jax.vmap(candidate)(jnp.arange(1, self.candidates + 1, dtype=jnp.int32))]

    def _masses(self, bounds: list[jax.Array]) -> list[jax.Array]:
        def masses(
            x: jax.Array, peak: jax.Array, inv_temperature: jax.Array, bounds: list[jax.Array]
        ) -> list[jax.Array]:
            # [n, W]: the mass of each entry, relative to the row's peak
            weights = jnp.exp((x - peak[:, None]) * inv_temperature[:, None])
            return [jnp.sum(jnp.where(x >= c[:, None], weights, 0.0), axis=1) for c in bounds]

        found: list[jax.Array] = self.rows.read(masses, self.peak, self.inv_temperature, bounds)
        return found

    def _reached(self, sums: list[jax.Array], goal: jax.Array) -> jax.Array:
        # [candidates, n]: the sums over all parts, by one exchange
        reaches = self.part.sum(jnp.stack(sums)) >= goal[None]
        # [n]: how many candidates reach the goal
        return jnp.sum(reaches, axis=0, dtype=jnp.int32)


def of_min_p(filter: Filter, peak: jax.Array, inv_temperature: jax.Array) -> jax.Array:
    """Returns the thresholds of min-p; -inf without one."""
    if filter.min_p is None:
        return jnp.full_like(peak, -jnp.inf)
    # exp((x - peak) / temperature) = min_p
    return peak + jnp.log(filter.min_p) / inv_temperature


def only_if(condition: jax.Array, fn: Callable[[], Any], otherwise: Any) -> Any:
    """Returns ``fn()`` if a condition holds, else `otherwise`.

    Under `vmap` it is skipped if the condition holds for none, which `lax.cond` would not do.
    """

    def once(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jnp.bool_(False), fn()

    return lax.while_loop(lambda state: state[0], once, (condition, otherwise))[1]


def bits_of(dtype: Any) -> int:
    """Returns in how many leading bits of a float32 entries of a dtype can differ."""
    return 9 + int(jnp.finfo(dtype).nmant)  # sign, exponent, mantissa


def _largest(
    reached: Callable[[Candidate, jax.Array, S], tuple[jax.Array, S]],
    goal: jax.Array,
    low: jax.Array,
    high: jax.Array,
    state: S,
    *,
    bits: int,
    candidates: int,
) -> tuple[jax.Array, S]:
    """Returns the largest floats in ``[low, high]`` that reach a goal, and the last read's state.

    `low` must reach it, and so must every float between `low` and one that does. `reached` says how
    many of the candidates do. Only floats that are 0 past their leading `bits` are tried.
    """
    shift = 32 - bits
    halvings = (candidates + 1).bit_length() - 1

    # Floats become integers of the same order, their keys: the middle of two keys is a float
    # between theirs, whatever their exponents are.
    def value(key: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(in_order(key << shift), jnp.float32)
        return jnp.where(jnp.abs(x) < jnp.finfo(x).tiny, 0.0, x)  # some devices flush it to 0

    def divide(given: tuple[jax.Array, jax.Array, S]) -> tuple[jax.Array, jax.Array, S]:
        # Candidates divide what is left into equal parts, of which one is left.
        low, high, state = given
        # The distance may exceed an int32; so may products, but not their sums.
        step = lax.shift_right_logical(high - low, np.int32(halvings)) + 1

        def key(index: Any) -> jax.Array:
            return jnp.minimum(low + step * index, high)

        # The last candidate that reaches the goal is the new lower end; the next is out.
        count, state = reached(lambda index: value(key(index)), goal, state)
        is_left = low < high
        lower = jnp.where(is_left, key(count), low)
        return lower, jnp.where(is_left & (count < candidates), key(count + 1) - 1, high), state

    def goes_on(given: tuple[jax.Array, jax.Array, S]) -> jax.Array:
        is_left = given[0] < given[1]
        return jnp.any(is_left) if is_left.ndim else is_left  # a kernel has no reductions of none

    # The ends of the interval, as keys.
    start, end = (in_order(lax.bitcast_convert_type(x, jnp.int32)) >> shift for x in (low, high))
    # At most `bits` halvings. A row that is done waits for the others.
    found, _, state = lax.while_loop(goes_on, divide, (start, end, state))
    return jnp.where(found > start, value(found), low), state


def in_order(bits: jax.Array) -> jax.Array:
    """Returns, from the bits of a float32, an int32 that orders as floats do; and from it the bits.

    A positive NaN comes last, a negative one first.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
