"""Statistics of rows of logits, and moving numbers between rows, requests and positions."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.base import ragged
from jax_specdec._src.verify.requests import Request

MANY_PAIRS = 2**22
"""Pairs of a row and a request from which on owners are searched for."""


class Partials(NamedTuple):
    """Statistics of rows of logits, or of a part of each; ``[n]`` each.

    Attributes:
      max: float32, the largest logit before temperature. It is +inf if the row holds a NaN, and
        -inf if no id is allowed.
      sum: float32, ``sum(exp((logit - max) / temperature))``; 0 if no request samples.
      argmax: int32, the lowest id of the largest logit; None if it is not wanted.
    """

    max: jax.Array
    sum: jax.Array
    argmax: jax.Array | None = None

    def checked(self) -> Partials:
        """Returns them with +inf for `max` where the sum is NaN.

        A maximum may pass over a NaN, a sum cannot.
        """
        return self._replace(max=jnp.where(jnp.isnan(self.sum), jnp.inf, self.max))

    @classmethod
    def of_whole(cls, parts: Partials, inv_temperature: jax.Array) -> Partials:
        """Returns the partials of whole rows, from those of their parts ``[num_parts, n]``.

        The parts stand in the program one by one, each sliced once: XLA fuses that with its use.
        """
        if parts.max.shape[0] == 1:
            return jax.tree.map(lambda x: x[0], parts)
        maxima = list(parts.max)
        sums = list(parts.sum)
        peak: jax.Array = functools.reduce(jnp.maximum, maxima)
        # Each sum is relative to the maximum of its part. Moved to the maximum of all:
        total = jnp.zeros_like(peak)
        for m, of_part in zip(maxima, sums, strict=True):
            lower = jnp.where(m == peak, 0.0, m - peak)  # inf - inf would be NaN
            total += of_part * jnp.exp(lower * inv_temperature)
        argmax = None if parts.argmax is None else argmax_of_parts(maxima, parts.argmax)
        return cls(peak, total, argmax)


class TargetStatistics(NamedTuple):
    """Statistics of target rows, or of this device's part of them.

    Attributes:
      partials: of the part.
      threshold: of the whole row; None without a filter.
      sums: ``[..., num_tiles]``, the sum of `partials` by tile; None if only the total is kept.
    """

    partials: Partials
    threshold: jax.Array | None
    sums: jax.Array | None


def argmax_of_parts(maxima: Iterable[jax.Array], argmaxes: Iterable[jax.Array]) -> jax.Array:
    """Returns the lowest argmax ``[n]`` of whole rows, from those of parts, ``[n]`` each."""
    maxima = list(maxima)
    peak: jax.Array = functools.reduce(jnp.maximum, maxima)
    # An argmax of a part that has a lower maximum is passed over.
    ids = [jnp.where(m == peak, x, 2**30) for m, x in zip(maxima, argmaxes, strict=True)]
    return functools.reduce(jnp.minimum, ids)


def of_owners(requests: Request, size: int, values: Any) -> Any:
    """Returns arrays ``[B]`` as ``[size]``: for each target row, the value of its owner.

    Rows without an owner get 0. A sum over all pairs of a row and a request takes one kernel on a
    GPU; finding the owners and indexing with them take several, but their time and memory do not
    grow with B squared.
    """
    # A bad request owns no row: its offsets may lie.
    num_rows = jnp.where(requests.is_ok, requests.num_rows, 0)
    if size * num_rows.shape[0] > MANY_PAIRS:
        owner, is_owned = ragged.owner_of_rows(requests.first_row, num_rows, size)
        return jax.tree.map(lambda x: jnp.where(is_owned, x[owner], jnp.zeros_like(x[0])), values)
    # [size, B]: the row as the request counts its own
    row = jnp.arange(size, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    owns = (row >= 0) & (row < num_rows[None, :])

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(owns, x[None, :], jnp.zeros_like(x)), axis=1, dtype=x.dtype)

    return jax.tree.map(summed, values)
