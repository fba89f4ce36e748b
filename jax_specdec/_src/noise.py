"""Keys to uniforms: the only place that draws random bits.

Every number depends on (request key, position, stream, offset) and nothing else, so a token does
not depend on who else is in the batch, on the slot, or on padding. Positions grow with every
step, so no bits serve twice; streams share none.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

from jax_specdec._src.types import Noise


class Stream(enum.IntEnum):
    """What a uniform is for. Drafter and verifier must never share bits."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2


def uniforms(
    key: jax.Array, position: jax.Array, stream: Stream, offset: jax.Array | int, count: int
) -> jax.Array:
    """`count` uniforms on [0, 1) for one request.

    Computes ``(bits >> 8) * 2**-24``: 2**24 equally likely values, so a comparison with a
    probability is exact to 2**-24. (`jax.random.uniform` has 2**23.)

    Args:
      key: ``[]`` typed key of the request.
      position: ``[]`` int32, absolute position of the step's first draft.
      stream: what the numbers are for.
      offset: ``[]`` int32, place within the step.
      count: how many, static.

    Returns:
      ``[count]`` float32.

    Example:
      >>> import jax
      >>> u = uniforms(jax.random.key(0), 7, Stream.ACCEPT, 0, 2)
      >>> u.shape, bool((u >= 0).all() and (u < 1).all())
      ((2,), True)
    """
    place = jnp.asarray(offset, jnp.uint32) * len(Stream) + int(stream)
    key = jax.random.fold_in(jax.random.fold_in(key, position), place)
    bits = jax.random.bits(key, (count,), jnp.uint32)
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def draw_noise(keys: jax.Array, positions: jax.Array, num_speculative_tokens: int) -> Noise:
    """The noise `rejection_sample` uses: one accept uniform per position, two to recover.

    Args:
      keys: ``[B]`` typed keys, one per request, the same on every step.
      positions: ``[B]`` int32, absolute position of each step's first draft. It must grow
        with every step; noise repeats where a position repeats.
      num_speculative_tokens: K, static. Entry ``[b, j]`` does not depend on it.

    Returns:
      `Noise` with ``accept [B, K]`` and ``recover [B, 2]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> draw_noise(keys, jnp.array([10, 20, 30]), 4).accept.shape
      (3, 4)
    """
    offsets = jnp.arange(num_speculative_tokens, dtype=jnp.uint32)

    def one_request(key: jax.Array, position: jax.Array) -> Noise:
        accept = jax.vmap(lambda j: uniforms(key, position, Stream.ACCEPT, j, 1)[0])(offsets)
        return Noise(accept, uniforms(key, position, Stream.RECOVER, 0, 2))

    return jax.vmap(one_request)(keys, positions)
