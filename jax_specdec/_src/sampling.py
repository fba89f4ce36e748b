"""Per-request sampling parameters as the numbers the verifier multiplies by."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LARGEST = float(jnp.finfo(jnp.float32).max)


def is_valid_temperature(temperature: jax.Array) -> jax.Array:
    """True where the temperature is finite and not negative."""
    return (temperature >= 0) & (temperature < jnp.inf)


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """``1 / temperature``, finite for every temperature; 1 where it is 0 (greedy) or not valid."""
    usable = is_valid_temperature(temperature) & (temperature > 0)
    return jnp.where(usable, jnp.minimum(1.0 / temperature, _LARGEST), 1.0)
