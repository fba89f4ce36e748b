"""The inverse CDF over what the lanes of a warp hold, or over what each thread holds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.mosaic_gpu.threads import WARP

NONE = 2**24
"""Greater than any place."""


def first_past(
    threads: Any, masses: list[jax.Array], sums: list[jax.Array], past: jax.Array
) -> jax.Array:
    """The least place of mass whose inclusive sum exceeds `past`, never one of no mass.

    Args:
      threads: the operations of the warpgroup.
      masses: float32 by lane, one array for every 32 places.
      sums: up to and including each place.
      past: what the sum must exceed.

    Returns:
      ``[128]`` int32, the same in all threads of a warp: the last place of mass where rounding
      finds none, 0 where there is no mass.
    """
    lane, least = threads.index() & (WARP - 1), threads.filled(4 * NONE, jnp.int32)
    for i, (mass, inclusive) in enumerate(zip(masses, sums, strict=True)):
        place = lane + i * WARP
        key = jnp.where(inclusive > past, place, 2 * NONE - place)
        least = jnp.minimum(least, jnp.where(mass > 0, key, 4 * NONE))
    key = threads.warp_min(least)
    return jnp.maximum(jnp.where(key < NONE, key, 2 * NONE - key), 0)


def pick_of(weights: list[jax.Array], aim: jax.Array) -> jax.Array:
    """The least index whose inclusive sum exceeds `aim`, among positive weights, by each thread.

    Returns:
      int32, the last positive one where rounding finds none.
    """
    places = [
        jnp.where(total > aim, i, 2 * NONE - i) + jnp.where(weight > 0, 0, 4 * NONE)
        for i, (weight, total) in enumerate(zip(weights, _running(weights), strict=True))
    ]
    least = functools.reduce(jnp.minimum, places)
    return jnp.where(least < NONE, least, jnp.maximum(2 * NONE - least, 0))


def _running(xs: list[jax.Array]) -> list[jax.Array]:
    """Sums up to and including each array, in short chains of additions."""
    step = 1
    while step < len(xs):
        xs = xs[:step] + [a + b for a, b in zip(xs[step:], xs[:-step], strict=True)]
        step *= 2
    return xs
