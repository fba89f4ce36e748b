"""The inverse CDF over what the lanes of a warp hold, or over what each thread holds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.verify.mosaic_gpu.threads import WARP

NONE = 2**24
"""Greater than any place."""


def key_of(place: jax.Array | int, is_past: jax.Array, weight: jax.Array) -> jax.Array:
    """What is least for the place to pick: the first one past the aim, or else the last of weight.

    Args:
      place: int32 below `NONE`.
      is_past: whether the sum up to and including it exceeds the aim.
      weight: float32; a place of none is never picked.
    """
    return jnp.where(weight > 0, jnp.where(is_past, place, 2 * NONE - place), 4 * NONE)


def place_of(key: jax.Array) -> jax.Array:
    """The place of the least key; 0 where none has weight."""
    return jnp.maximum(jnp.where(key < NONE, key, 2 * NONE - key), 0)


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
        least = jnp.minimum(least, key_of(lane + i * WARP, inclusive > past, mass))
    return place_of(threads.warp_min(least))


def pick_of(weights: list[jax.Array], aim: jax.Array) -> jax.Array:
    """The least index whose inclusive sum exceeds `aim`, among positive weights, by each thread.

    Returns:
      int32, the last positive one where rounding finds none.
    """
    keys = [
        key_of(i, total > aim, weight)
        for i, (weight, total) in enumerate(zip(weights, _running(weights), strict=True))
    ]
    return place_of(functools.reduce(jnp.minimum, keys))


def _running(xs: list[jax.Array]) -> list[jax.Array]:
    """Sums up to and including each array, in short chains of additions."""
    step = 1
    while step < len(xs):
        xs = xs[:step] + [a + b for a, b in zip(xs[step:], xs[:-step], strict=True)]
        step *= 2
    return xs
