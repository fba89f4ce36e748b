"""Keys to uniforms: the only place that draws random bits.

Every number depends on (request key, position, stream, offset) and nothing else, so a token does
not depend on the rest of the batch, on its slot or on padding. Positions grow with every step, so
no bits are used twice, and streams share none.

Keys of every kind are used as keys of Threefry. JAX's own draws from "rbg" and "unsafe_rbg" keys
would not be lossless here: under `vmap` they use the first key of the batch for all requests.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import Sizes, as_int32, check_array, check_int, refuse, require
from jax_specdec._src.base.types import TILE, Noise


class Stream(enum.IntEnum):
    """What a uniform is used for. Drafter and verifier share no bits, but under agreement."""

    DRAFT = 0
    ACCEPT = 1
    RECOVER = 2


def uniforms(
    key: jax.Array, position: jax.Array, stream: jax.Array | Stream, offset: jax.Array | int
) -> jax.Array:
    """Returns two uniforms on [0, 1) for each request.

    Computes ``(bits >> 8) * 2**-24``: 2**24 equally likely values, so a comparison with a
    probability is exact to 2**-24. (`jax.random.uniform` has 2**23.) The bits are those of
    `threefry_bits` for the words of `key_words`.

    Args:
      key: ``[...]`` typed key of the request.
      position: ``[...]`` int32, absolute position of the step's first draft, not negative.
      stream: what the numbers are used for.
      offset: int32, place within the step; a scalar, as `stream`, or both of a shape that
        broadcasts with that of `position`.

    Returns:
      ``[..., 2]`` float32.

    Example:
      >>> import jax
      >>> u = uniforms(jax.random.key(0), 7, Stream.ACCEPT, 0)
      >>> u.shape, bool((u >= 0).all() and (u < 1).all())
      ((2,), True)
    """
    # [..., 2]: the two words of each key
    words = key_words(key)
    # One evaluation of Threefry gives two words of bits, each of the shape of `position`.
    place = counter_of(stream, jnp.asarray(offset, jnp.uint32))
    bits = threefry_bits((words[..., 0], words[..., 1]), jnp.asarray(position), place)
    # [..., 2]: a uniform of each word
    return to_uniform(jnp.stack(bits, axis=-1))


def counter_of(stream: jax.Array | int, offset: jax.Array) -> jax.Array:
    """Returns a uint32 that is another one for each stream and offset."""
    # The streams take turns: offset 0 of each, then offset 1 of each.
    return offset * jnp.uint32(len(Stream)) + jnp.asarray(stream, jnp.uint32)


def to_uniform(bits: jax.Array) -> jax.Array:
    """Returns the high 24 of 32 random bits as a float32 in [0, 1)."""
    # float32 holds every integer of 24 bits, so nothing is rounded, and 1 is not reached.
    return lax.shift_right_logical(bits, jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


def key_words(keys: jax.Array) -> jax.Array:
    """Returns the two words of the Threefry key that each key is used as.

    Keys of two words are used as they are. A key of four words (w, x, y, z), as "rbg" keys have,
    becomes the Threefry block of the counter (y, z) under the key (w, x). The exclusive or of its
    halves would lose the seed s of an "rbg" key, which JAX stores as (0, s, 0, s).

    Args:
      keys: typed keys of any shape.

    Returns:
      ``[..., 2]`` uint32.

    Raises:
      TypeError: not typed keys, or keys that have neither two nor four words.

    Example:
      >>> import jax
      >>> key_words(jax.random.key(7)).tolist()
      [0, 7]
    """
    check_keys("keys", keys)
    # [..., 2] or [..., 4]
    words = jax.random.key_data(keys)
    if words.shape[-1] == 2:
        return words
    # Of four words, a block: [...] each to [..., 2].
    w, x, y, z = (words[..., i] for i in range(4))
    return jnp.stack(_threefry((w, x), (y, z)), axis=-1)


def check_keys(name: str, keys: Any, sizes: Sizes | None = None) -> None:
    """Checks that noise can be drawn from keys.

    Args:
      keys: its value.
      sizes: with B, if there must be a key for each request.

    Raises:
      TypeError: not typed keys, or keys that have neither two nor four words.
      ValueError: not a key for each request.
    """
    # Raw words are refused with what makes keys of them.
    is_typed = isinstance(keys, jax.Array) and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    if not is_typed:
        is_raw = getattr(keys, "dtype", None) == jnp.uint32
        hint = f"pass jax.random.wrap_key_data({name})" if is_raw else None
        must = "be typed, as jax.random.key and jax.random.split give"
        refuse(TypeError, name, must, keys, hint)
    size = _words_shape(keys.dtype)
    if size not in ((2,), (4,)):
        must = "be of two or four words, as those of threefry2x32 and rbg are"
        refuse(TypeError, name, must, keys, f"words have shape {list(size)}")
    if sizes is not None:
        check_array(name, keys, "[B]", sizes, "jax.random.split gives one per request")


@functools.cache
def _words_shape(dtype: Any) -> tuple[int, ...]:
    """Returns the shape of a key's words, which takes JAX a millisecond to find out."""
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape


def threefry_keys(keys: jax.Array) -> jax.Array:
    """Returns typed Threefry keys, of the shape of `keys`, that give the same noise.

    Raises:
      TypeError: as `key_words`.

    Example:
      >>> import jax
      >>> threefry_keys(jax.random.key(7, impl="rbg")).dtype
      key<fry>
    """
    return jax.random.wrap_key_data(key_words(keys), impl="threefry2x32")


@functools.partial(jax.jit, static_argnames="count")
def fold_in_each(key: jax.Array, count: int) -> jax.Array:
    """Returns ``fold_in(key, b)`` for each b below `count`, as Threefry keys ``[count]``.

    Numbers are folded in one after another, because under `vmap` JAX folds them into "unsafe_rbg"
    keys in another way.

    Raises:
      TypeError: as `key_words`.

    Example:
      >>> import jax
      >>> bool(fold_in_each(jax.random.key(7), 3)[2] == jax.random.fold_in(jax.random.key(7), 2))
      True
    """
    # [count], of the kind of `key`
    each = lax.map(lambda b: jax.random.fold_in(key, b), jnp.arange(count, dtype=jnp.uint32))
    return threefry_keys(each)


def threefry_bits(
    key: tuple[jax.Array, jax.Array], position: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the 64 bits of a place: Threefry-2x32 at the counter (2**31 + position, place).

    It has 20 rounds. This is one evaluation; to fold in both numbers and then draw would take
    three. It needs nothing but elementwise arithmetic, which kernels have. `jax.random` counts its
    own draws from 0 on, so they use other counters.

    Args:
      key: the key's two words, uint32.
      position: int32, not negative, of any shape: -1 gives the bits of 2**31 - 1.
      place: from `counter_of`, uint32 of the same shape.

    Returns:
      Two words of 32 bits, uint32 of the same shape.

    References:
      Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    # The highest bit is set, where the counters of `jax.random` have 0.
    return _threefry(key, (position.astype(jnp.uint32) | jnp.uint32(2**31), place))


def _threefry(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the two words of a counter's block, by Threefry-2x32 with 20 rounds."""
    # The key's two words, and a third that makes the exclusive or of all three a constant.
    words = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x = counter[0] + words[0]
    y = counter[1] + words[1]
    # Five groups of four rounds, by two lists of distances in turn.
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            # A round: y is rotated, and x and y are mixed.
            left = lax.shift_left(y, jnp.uint32(distance))
            right = lax.shift_right_logical(y, jnp.uint32(32 - distance))
            x = x + y
            y = (left | right) ^ x
        # After each group the key goes in again, at the next of its words, with a count.
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def draw_noise(keys: jax.Array, positions: jax.Array, num_speculative_tokens: int) -> Noise:
    """Returns the noise of `rejection_sample`: a uniform per position, and two to recover.

    Args:
      keys: ``[B]`` typed keys, one per request, the same on every step.
      positions: ``[B]`` int32, absolute position of each step's first draft. It must grow with
        every step: a position used twice gets the same noise twice.
      num_speculative_tokens: K, static. Entry ``[b, j]`` does not depend on it.

    Returns:
      `Noise` with ``accept [B, K]`` and ``recover [B, 2]``.

    Raises:
      TypeError: `keys` are not typed keys of two or four words, or another argument not integers.
      ValueError: shapes that do not fit, or K below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> draw_noise(keys, jnp.array([10, 20, 30]), 4).accept.shape
      (3, 4)
    """
    sizes: Sizes = {}
    check_keys("keys", keys, sizes)
    positions = as_int32("positions", positions, "[B]", sizes)
    k = check_int("num_speculative_tokens", num_speculative_tokens, 1)
    # [1, K+1]: the K accept uniforms, then those to recover. All bits come of one evaluation,
    # without vmap: this takes a quarter of the time to trace.
    offsets = jnp.array([[*range(k), 0]], jnp.uint32)
    streams = jnp.array([[Stream.ACCEPT] * k + [Stream.RECOVER]], jnp.uint32)
    # [B, K+1, 2]: of an accept uniform only the first of two numbers is used.
    both = uniforms(keys.reshape(-1, 1), positions[:, None], streams, offsets)
    return Noise(accept=both[:, :k, 0], recover=both[:, k])


def token_exponentials(keys: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Returns the noise of the two races by which the agreement rule draws the target's token.

    It belongs to the position of the token, whichever step comes to it. Each number is
    ``-log1p(-u)`` of a uniform ``u = (bits + 1/2) * 2**-32``: never 0, and where races are decided,
    near 0, as fine as that. (With 24 bits, the tail of a row would not get its mass.)

    Args:
      keys: ``[...]`` typed keys.
      positions: ``[...]`` int32, of the tokens; as many axes as `keys`, of sizes that broadcast.
      vocab_size: V, static. What a tile, or an id of a tile, gets does not depend on it.

    Returns:
      ``[..., T + L]`` float32 samples of Exp(1): of the T = ceil(V / 2048) tiles, then of L =
      min(V, 2048) ids, for whichever tile wins.

    Raises:
      TypeError: `keys` are not typed keys of two or four words, or another argument not integers.
      ValueError: axes that do not broadcast with those of `keys`, or V below 1.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> token_exponentials(keys, jnp.array([10, 20, 30]), 5000).shape
      (3, 2051)
    """
    vocab_size = check_int("vocab_size", vocab_size, 1)
    check_keys("keys", keys)
    positions = as_int32("positions", positions)
    # Sizes of 1 are repeated.
    both = zip(positions.shape, keys.shape, strict=False)
    fits = positions.ndim == keys.ndim and all(1 in pair or len({*pair}) == 1 for pair in both)
    must = f"have axes that broadcast with those of keys, {list(keys.shape)}"
    require(fits, "positions", must, positions)
    num_tiles = -(-vocab_size // TILE)
    num_ids = min(vocab_size, TILE)
    half = TILE // 2
    # Both words of a place serve ids of a tile, so that there are half as many places: one for two
    # ids, which are `half` apart, and after those one for each tile.
    places = np.array([*range(min(num_ids, half)), *range(half, half + num_tiles)], np.uint32)
    # [..., 1, 2] and [..., 1], which broadcast with the places
    words = key_words(keys)[..., None, :]
    at = positions[..., None]
    # [..., places], of the axes of `positions`: counters, then the two words of each
    place = counter_of(Stream.RECOVER, jnp.broadcast_to(places, (*at.shape[:-1], len(places))))
    first, second = threefry_bits((words[..., 0], words[..., 1]), at, place)
    # The first words serve the first half of the ids, and the tiles; the second words serve the
    # other half of the ids, if a tile has so many.
    ids = first[..., :-num_tiles]
    tiles = first[..., -num_tiles:]
    more = second[..., : max(num_ids - half, 0)]
    # [..., T + L]
    return to_exponential(jnp.concatenate([tiles, ids, more], axis=-1))


def to_exponential(bits: jax.Array) -> jax.Array:
    """Returns a float32 sample of Exp(1), positive and finite, of 32 random bits."""
    # Half a step up, so that u is not 0; the cast may round it to 1, so it is held below.
    u = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24))
