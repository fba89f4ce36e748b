"""Per-request sampling parameters as the numbers the verifier works with."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.types import SamplingParams

_SMALLEST, _LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


class Filter(NamedTuple):
    """What a request leaves out (batched: a leading ``[B]``); None where nobody asks for it.

    Attributes:
      min_p: ``[]`` float32.
      top_k: ``[]`` int32.
      top_p: ``[]`` float32.
    """

    min_p: jax.Array | None
    top_k: jax.Array | None
    top_p: jax.Array | None

    @classmethod
    def of(cls, sampling: SamplingParams) -> Filter | None:
        """The filter of each request; None where no parameter is given."""
        found = cls(sampling.min_p, sampling.top_k, sampling.top_p)
        return found if any(x is not None for x in found) else None

    def limits(self, size: int) -> jax.Array:
        """Whether anything may be left out of a row of `size` ids."""
        used = jnp.bool_(False)
        if self.min_p is not None:
            used |= self.min_p > 0
        if self.top_k is not None:
            used |= limits_count(self.top_k, size)
        if self.top_p is not None:
            used |= self.top_p < 1
        return used


def limits_count(top_k: jax.Array, size: int) -> jax.Array:
    """Whether a top-k leaves out any of `size` ids."""
    return (top_k > 0) & (top_k < size)


def is_valid(sampling: SamplingParams) -> jax.Array:
    """``[B]`` bool: where all parameters are in range."""
    valid = is_valid_temperature(sampling.temperature)
    if sampling.min_p is not None:
        valid &= (sampling.min_p >= 0) & (sampling.min_p <= 1)
    if sampling.top_k is not None:
        valid &= sampling.top_k >= 0
    if sampling.top_p is not None:
        valid &= (sampling.top_p > 0) & (sampling.top_p <= 1)
    return valid


def is_valid_temperature(temperature: jax.Array) -> jax.Array:
    """True where the temperature is finite and not negative."""
    return (temperature >= 0) & (temperature < jnp.inf)


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """``1 / temperature``, finite and not 0; 1 where it is 0 (greedy) or not valid."""
    usable = is_valid_temperature(temperature) & (temperature > 0)
    return jnp.where(usable, jnp.clip(1.0 / temperature, _SMALLEST, _LARGEST), 1.0)
