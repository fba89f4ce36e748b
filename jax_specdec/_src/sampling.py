"""Per-request sampling parameters as the numbers the verifier works with."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.types import SamplingParams, host_int32

_SMALLEST, _LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


def per_request(sampling: SamplingParams, batch: int) -> SamplingParams:
    """The same with arrays ``[B]``, where a field is one number, a list or a NumPy array.

    JAX arrays are left as they are, but for scalars of the right dtype. So is what is none of
    these, for the checks that follow.

    Raises:
      ValueError: a top-k that int32 does not hold.
    """
    taken = {}
    for field in dataclasses.fields(sampling):
        value = getattr(sampling, field.name)
        if value is not None:
            dtype = np.int32 if field.name == "top_k" else np.float32
            taken[field.name] = _array(f"sampling.{field.name}", value, dtype, batch)
    return dataclasses.replace(sampling, **taken)


def _array(name: str, value: Any, dtype: Any, batch: int) -> Any:
    if isinstance(value, jax.Array):
        is_scalar = value.ndim == 0 and value.dtype == dtype
        return jnp.broadcast_to(value, (batch,)) if is_scalar else value
    if not isinstance(value, (bool, int, float, list, tuple, np.generic, np.ndarray)):
        return value
    array = np.asarray(value)
    kinds = "iu" if dtype == np.int32 else "iuf"
    if array.dtype.kind not in kinds:  # text, booleans, or a fraction for a count
        return value
    if dtype == np.int32:
        array = host_int32(name, array)
    with np.errstate(over="ignore"):  # infinite: not a valid parameter, as the status says
        array = array.astype(dtype)
    return np.full((batch,), array) if array.ndim == 0 else array


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
