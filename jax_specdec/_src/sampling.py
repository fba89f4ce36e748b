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
    """`sampling` with arrays ``[B]`` in place of numbers, lists and NumPy arrays.

    JAX arrays stay as they are, except for scalars of the right dtype. Anything else stays too, for
    the checks that follow.

    Raises:
      ValueError: a top-k that int32 does not hold.
    """
    taken = {}
    for field in dataclasses.fields(sampling):
        value = getattr(sampling, field.name)
        if value is not None:
            dtype = np.int32 if field.name == "top_k" else np.float32
            taken[field.name] = _as_array(f"sampling.{field.name}", value, dtype, batch)
    return dataclasses.replace(sampling, **taken)


def _as_array(name: str, value: Any, dtype: Any, batch: int) -> Any:
    if isinstance(value, jax.Array):
        is_scalar = value.ndim == 0 and value.dtype == dtype
        return jnp.broadcast_to(value, (batch,)) if is_scalar else value
    if not isinstance(value, (bool, int, float, list, tuple, np.generic, np.ndarray)):
        return value
    array = np.asarray(value)
    kinds = "iu" if dtype == np.int32 else "iuf"
    if array.dtype.kind not in kinds:  # text, booleans, or floats for top_k
        return value
    if dtype == np.int32:
        array = host_int32(name, array)
    with np.errstate(over="ignore"):  # to inf, which the status will report
        array = array.astype(dtype)
    return np.full((batch,), array) if array.ndim == 0 else array


class Filter(NamedTuple):
    """Min-p, top-k and top-p of a request, each None if the call does not have it.

    The shapes are those of one request. A batch has a leading ``[B]``.

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
        """The filter of each request; None if the call has none of the three."""
        found = cls(sampling.min_p, sampling.top_k, sampling.top_p)
        return found if any(x is not None for x in found) else None

    def limits(self, size: int) -> jax.Array:
        """Whether the filter may leave out any of `size` ids."""
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
    """``[B]`` bool: whether all parameters of a request are in range."""
    valid = is_valid_temperature(sampling.temperature)
    if sampling.min_p is not None:
        valid &= (sampling.min_p >= 0) & (sampling.min_p <= 1)
    if sampling.top_k is not None:
        valid &= sampling.top_k >= 0
    if sampling.top_p is not None:
        valid &= (sampling.top_p > 0) & (sampling.top_p <= 1)
    return valid


def is_valid_temperature(temperature: jax.Array) -> jax.Array:
    """Whether the temperature is finite and not negative."""
    return (temperature >= 0) & (temperature < jnp.inf)


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """``1 / temperature``, finite and not 0; 1 if the temperature is 0 (greedy) or not valid."""
    usable = is_valid_temperature(temperature) & (temperature > 0)
    return jnp.where(usable, jnp.clip(1.0 / temperature, _SMALLEST, _LARGEST), 1.0)
