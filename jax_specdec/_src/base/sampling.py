"""The table of sampling parameters, and the numbers that the verifier makes of each request's."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base.arrays import Range, check_type, host_array, host_int32, pytree
from jax_specdec._src.base.types import Integers, Numbers

# The normal float32 nearest to 0, and the largest.
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)
_LARGEST = float(jnp.finfo(jnp.float32).max)


class Parameter(NamedTuple):
    """A sampling parameter of a request.

    Attributes:
      name: as users write it, and of its field in `SamplingParams` if verification reads it.
      dtype: of its array.
      neutral: the value that changes nothing.
      range: the values that it may have.
      words: what it does.
    """

    name: str
    dtype: type[np.generic]
    neutral: float
    range: Range
    words: str


_F32 = np.float32
_I32 = np.int32

TEMPERATURE = Parameter(
    "temperature", _F32, 1.0, Range(0, math.inf, "[)"), "divides the logits; 0 is greedy"
)
FILTERS = (
    Parameter(
        "min_p", _F32, 0.0, Range(0, 1), "leave out tokens below this times the likeliest one"
    ),
    Parameter("top_k", _I32, 0, Range(-1), "only the k likeliest tokens; 0 or -1 for all"),
    Parameter(
        "top_p", _F32, 1.0, Range(0, 1, "(]"), "only the likeliest that have this mass together"
    ),
)
SAMPLING_PARAMETERS = (TEMPERATURE, *FILTERS)
"""The fields of `SamplingParams`."""


@pytree(**{one.name: f"[B] {one.dtype.__name__}" for one in SAMPLING_PARAMETERS})
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each request samples: by temperature, then min-p, then top-k, then top-p.

    Min-p, top-k and top-p each leave out the tokens below a threshold; what is left is normalized
    again. Tokens equal to the threshold all stay. If a field is None, nothing is compiled for it;
    if no request uses it, nothing is computed. Greedy requests ignore all three.

    Functions that take a `SamplingParams` accept a number for all requests in each field, a list,
    or a NumPy array of any precision. A JAX array must have the dtype given here.

    Attributes:
      temperature: ``[B]`` float32. ``p = softmax(float32(logits) / temperature)``; 0 is greedy.
        None: every request is greedy, and nothing that sampling needs is compiled.
      min_p: ``[B]`` float32 in [0, 1], or None. Tokens with ``p < min_p * max(p)`` are left out;
        0 leaves out none.
      top_k: ``[B]`` int32, at least -1, or None. Tokens less likely than the k-th likeliest are
        left out; 0 and -1 leave out none.
      top_p: ``[B]`` float32 in (0, 1], or None. Of the tokens left so far, the likeliest stay that
        together have at least `top_p` of the mass; 1 leaves out none.

    Example:
      >>> import jax.numpy as jnp
      >>> sampling = SamplingParams(jnp.array([0.0, 0.8]), top_p=jnp.array([1.0, 0.95]))
      >>> sampling.temperature.shape, sampling.top_k is None
      ((2,), True)
    """

    temperature: jax.Array
    min_p: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            temperature: Numbers | None,
            min_p: Numbers | None = None,
            top_k: Integers | int | np.integer | None = None,
            top_p: Numbers | None = None,
        ) -> None: ...

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


def per_request(sampling: SamplingParams, batch: int) -> SamplingParams:
    """Returns `sampling` with arrays ``[B]`` in place of numbers, lists and NumPy arrays.

    A temperature of None becomes zeros. JAX arrays stay as they are, except for scalars of the
    right dtype. Anything else stays too, for the checks that follow.

    Raises:
      TypeError: not a `SamplingParams`.
      ValueError: a top-k that int32 does not hold.
    """
    check_type("sampling", sampling, SamplingParams)
    if sampling.temperature is None:
        sampling = dataclasses.replace(sampling, temperature=0)
    # [B] each, of the fields that are given
    given = sampling.given
    taken = {
        one.name: _as_array(f"sampling.{one.name}", given[one.name], one.dtype, batch)
        for one in SAMPLING_PARAMETERS
        if one.name in given
    }
    return dataclasses.replace(sampling, **taken)


def _as_array(name: str, value: Any, dtype: Any, batch: int) -> Any:
    """Returns a field's value as an array ``[B]``, or as it is, if the checks are to refuse it."""
    # A JAX array may be traced: [] -> [B], and no dtype is changed.
    if isinstance(value, jax.Array):
        is_scalar = value.ndim == 0 and value.dtype == dtype
        return jnp.broadcast_to(value, (batch,)) if is_scalar else value
    # The rest is converted on the host.
    if not isinstance(value, (bool, int, float, list, tuple, np.generic, np.ndarray)):
        return value
    array = host_array(name, value, "be a number or a list of numbers")
    kinds = "iu" if dtype == np.int32 else "iuf"
    if array.dtype.kind not in kinds:  # text, booleans, or floats for top_k
        return value
    if dtype == np.int32:
        array = host_int32(name, array)
    with np.errstate(over="ignore"):  # to inf, which the status will report
        array = array.astype(dtype)
    # [] -> [B]; a list has its own length, which is checked later
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
        """Returns the filter of each request; None if the call has none of the three."""
        found = cls(sampling.min_p, sampling.top_k, sampling.top_p)
        # A field that is None is no leaf.
        return found if jax.tree.leaves(found) else None

    def where(self, used: jax.Array) -> Filter:
        """Returns the filter with neutral values for requests where `used` is false."""
        # A field that the call does not have stays None, and nothing is compiled for it.
        values = zip(self, FILTERS, strict=True)
        return Filter(*(x if x is None else jnp.where(used, x, of.neutral) for x, of in values))

    def limits(self, size: int) -> jax.Array:
        """Returns whether the filter may leave out any of `size` ids."""
        # [], or [B] of a batch: min-p needs no search, but leaves out ids as well.
        used = self.is_searched(size)
        return used if self.min_p is None else used | (self.min_p > 0)

    def is_searched(self, size: int) -> jax.Array:
        """Returns whether its threshold must be searched for, as that of min-p alone need not."""
        # [], or [B] of a batch, once a field is there
        used = jnp.bool_(False)
        if self.top_k is not None:
            used |= limits_count(self.top_k, size)
        if self.top_p is not None:
            used |= self.top_p < 1
        return used


def limits_count(top_k: jax.Array, size: int) -> jax.Array:
    """Returns whether a top-k leaves out any of `size` ids."""
    # 0 and -1 leave out none, and neither does a k that all ids fit in.
    return (top_k > 0) & (top_k < size)


def is_valid(sampling: SamplingParams) -> jax.Array:
    """Returns ``[B]`` bool, whether all parameters of a request are in range; or ``[]`` True."""
    # [B] bool for each parameter that the call has; NaN is in no range.
    given = sampling.given
    parameters = [one for one in SAMPLING_PARAMETERS if one.name in given]
    holds = [one.range.holds(given[one.name]) for one in parameters]
    if not holds:
        return jnp.bool_(True)
    return functools.reduce(operator.and_, holds)


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """Returns ``1 / temperature``, finite and not 0; 1 if the temperature is 0 or not valid."""
    # Greedy rows, and rows of a bad status, are read with it too: so it is a number.
    usable = TEMPERATURE.range.holds(temperature) & (temperature > 0)
    # Held to normal numbers: the inverse of a subnormal one may be inf, and that of the largest is
    # subnormal, which some devices take for 0.
    return jnp.where(usable, jnp.clip(1.0 / temperature, _SMALLEST, _LARGEST), 1.0)
