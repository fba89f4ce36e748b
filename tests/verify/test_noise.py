"""Noise from keys: bits of its own for every place, by arithmetic that kernels can do too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from lower_floor import noise

import jax_specdec as sd

K = 5
POSITIONS = np.int32([0, 1, 77, 2**31 - 1, 123456])
KEYS = jax.random.split(jax.random.key(3), len(POSITIONS))
WORDS = np.asarray(jax.random.key_data(KEYS))


threefry = jax.jit(threefry_2x32)
draw_noise = jax.jit(sd.testing.draw_noise, static_argnums=2)
token_exponentials = jax.jit(sd.testing.token_exponentials, static_argnums=2)


def bits_of_jax(words: np.ndarray, positions: Any, stream: Any, offset: Any) -> np.ndarray:
    """``[..., 2]`` of Threefry by JAX's own primitive, at the counters that stand for places."""
    counters = np.broadcast_arrays(2**31 + np.int64(positions), 3 * np.asarray(offset) + stream)
    flat = np.stack(counters).reshape(-1).astype(np.uint32)
    return np.asarray(threefry(words, flat)).reshape(2, *counters[0].shape).transpose()


def test_uniforms_are_high_bits_of_threefry_at_their_own_counter():
    drawn = jax.device_get(draw_noise(KEYS, POSITIONS, K))
    for b, (words, position) in enumerate(zip(WORDS, POSITIONS, strict=True)):
        accept = bits_of_jax(words, position, noise.Stream.ACCEPT, np.arange(K))
        np.testing.assert_array_equal(drawn.accept[b], (accept[:, 0] >> 8) * 2.0**-24)
        recover = bits_of_jax(words, position, noise.Stream.RECOVER, [0])[0]
        np.testing.assert_array_equal(drawn.recover[b], (recover >> 8) * 2.0**-24)


@pytest.mark.parametrize("vocab", [3, 700, 1500, 5000])
def test_the_noise_of_races_is_threefrys_whatever_the_vocabulary(vocab):
    num_tiles, num_ids = -(-vocab // 2048), min(vocab, 2048)
    drawn = np.asarray(token_exponentials(KEYS, POSITIONS, vocab))
    assert drawn.shape == (len(KEYS), num_tiles + num_ids)
    places = [(1024 + tile, 0) for tile in range(num_tiles)]
    ids = {i for i in (0, 1, 1023, 1024, num_ids - 1) if i < num_ids}
    places += [(i % 1024, i // 1024) for i in sorted(ids)]
    found = drawn[:, [*range(num_tiles), *(num_tiles + i for i in sorted(ids))]]
    at, word = np.transpose(places)
    for b, (words, position) in enumerate(zip(WORDS, POSITIONS, strict=True)):
        both = bits_of_jax(words, position, noise.Stream.RECOVER, at)
        bits = both[np.arange(len(word)), word]
        expected = -np.log1p(-(np.float64(bits) + 0.5) * 2.0**-32)
        np.testing.assert_allclose(found[b], expected, rtol=1e-6)


def distance(exponential_of: Callable[[jax.Array], jax.Array]) -> float:
    """From Exp(1), over its whole range: near 0, where races are decided, in units of 2**-32."""
    x = np.geomspace(2.0**-31, 16, 2000).astype(np.float32)
    below, above = np.zeros(x.shape, np.int64), np.full(x.shape, 2**32, np.int64)
    of = jax.jit(exponential_of)
    for _ in range(32):  # how many of all bits give less than x
        middle = (below + above) // 2
        less = np.asarray(of(middle.astype(np.uint32))) < x
        below, above = np.where(less, middle, below), np.where(less, above, middle)
    expected = -np.expm1(-np.float64(x)) * 2**32
    return float(np.max(np.abs(above - expected) / (1 + expected * 2.0**-22)))


def test_exponentials_are_exact_near_0_positive_and_finite():
    ends = np.asarray(noise.to_exponential(jax.device_put(np.uint32([0, 2**32 - 1]))))
    assert 0 < ends[0] < ends[1] < np.inf
    assert distance(noise.to_exponential) < 2
    coarse = distance(lambda bits: -jnp.log1p(-noise.to_uniform(bits)))
    assert coarse > 50, "24 bits would pass"


def test_keys_that_jax_derives_share_no_counter_with_our_bits():
    """JAX counts from 0 on: no word of 100,000 keys is one of ours, but by chance."""
    positions, streams, offsets = np.ix_(np.arange(50), list(noise.Stream), np.arange(K))
    words = bits_of_jax(WORDS[0], positions, streams, offsets)
    theirs = np.asarray(jax.random.key_data(jax.random.split(KEYS[0], 100_000)))
    assert np.isin(words, theirs).sum() < 5  # 0.07 by chance
    from_zero = threefry(WORDS[0], np.uint32([0, 77]))
    assert np.isin(from_zero, theirs).all()  # what would be shared


def test_bits_do_not_depend_on_how_jax_partitions_its_own():
    expected = draw_noise(KEYS, POSITIONS, K)
    with jax.threefry_partitionable(False):
        drawn = draw_noise(KEYS, POSITIONS, K)
    np.testing.assert_array_equal(drawn.accept, expected.accept)
