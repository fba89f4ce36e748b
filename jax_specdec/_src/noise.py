"""Keys to uniforms: the only place that draws random bits.

Every number depends on (request key, position, stream, offset) and nothing else, so a token does
not depend on who else is in the batch, on the slot, or on padding. Positions grow with every
step, so no bits serve twice; streams share none.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jax import lax

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


def uniform(
    key: tuple[jax.Array, jax.Array],
    position: jax.Array,
    stream: jax.Array,
    offset: jax.Array,
    index: jax.Array,
) -> jax.Array:
    """Entry `index` of what `uniforms` draws from a Threefry key, by elementwise arithmetic alone.

    For kernels, where `jax.random` cannot be called; see `is_threefry`.

    Args:
      key: the key's two words, uint32.
      position: uint32 of any shape.
      stream: uint32, what the numbers are for.
      offset: uint32, place within the step.
      index: uint32.

    Returns:
      float32 of the same shape.

    References:
      Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    zero = jnp.zeros_like(position)
    key = _threefry(key, (zero, position))
    key = _threefry(key, (zero, offset * jnp.uint32(len(Stream)) + stream))
    high, low = _threefry(key, (zero, index))
    return lax.shift_right_logical(high ^ low, jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


def is_threefry(keys: jax.Array) -> bool:
    """Whether `uniform` draws what `uniforms` draws from these keys: JAX's default keys."""
    name = str(jax.random.key_impl(keys))
    return name == "threefry2x32" and bool(jax.config.jax_threefry_partitionable)


def _threefry(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds."""
    words = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + words[0], counter[1] + words[1]
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left = lax.shift_left(y, jnp.uint32(distance))
            right = lax.shift_right_logical(y, jnp.uint32(32 - distance))
            x = x + y
            y = (left | right) ^ x
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


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
