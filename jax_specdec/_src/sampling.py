"""Per-request sampling parameters as the numbers the verifier multiplies by."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_SMALLEST, _LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


def is_valid_temperature(temperature: jax.Array) -> jax.Array:
    """True where the temperature is finite and not negative."""
    return (temperature >= 0) & (temperature < jnp.inf)


def inverse_temperature(temperature: jax.Array) -> jax.Array:
    """``1 / temperature``, finite and not 0; 1 where it is 0 (greedy) or not valid."""
    usable = is_valid_temperature(temperature) & (temperature > 0)
    return jnp.where(usable, jnp.clip(1.0 / temperature, _SMALLEST, _LARGEST), 1.0)
