"""Noise from keys: bits of its own for every place, by arithmetic that kernels can do too."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

import jax_specdec as sd
from jax_specdec._src import noise

K = 5
POSITIONS = jnp.array([0, 1, 77, 2**31 - 1, 123456], jnp.int32)
KEYS = jax.random.split(jax.random.key(3), len(POSITIONS))


def bits_of_jax(key: jax.Array, position: int, stream: noise.Stream, offset: int) -> np.ndarray:
    """Two words of Threefry by JAX's own primitive, at the counter that stands for a place."""
    counter = jnp.array([2**31 + int(position), 3 * offset + stream], jnp.uint32)
    return np.asarray(threefry_2x32(jax.random.key_data(key), counter))


def test_uniforms_are_the_high_bits_of_threefry_at_a_counter_of_their_own():
    drawn = sd.testing.draw_noise(KEYS, POSITIONS, K)
    for b, (key, position) in enumerate(zip(KEYS, POSITIONS, strict=True)):
        places = [(noise.Stream.ACCEPT, j) for j in range(K)]
        expected = [(bits_of_jax(key, position, *at) >> 8) * 2.0**-24 for at in places]
        np.testing.assert_array_equal(drawn.accept[b], [e[0] for e in expected])
        recover = (bits_of_jax(key, position, noise.Stream.RECOVER, 0) >> 8) * 2.0**-24
        np.testing.assert_array_equal(drawn.recover[b], recover)


@pytest.mark.parametrize("vocab", [3, 700, 1500, 5000])
def test_the_noise_of_races_is_that_of_threefry_whatever_the_vocabulary(vocab):
    num_tiles, num_ids = -(-vocab // 2048), min(vocab, 2048)
    drawn = sd.testing.token_exponentials(KEYS, POSITIONS, vocab)
    assert drawn.shape == (len(KEYS), num_tiles + num_ids)
    places = [(1024 + tile, 0) for tile in range(num_tiles)]
    ids = {i for i in (0, 1, 1023, 1024, num_ids - 1) if i < num_ids}
    places += [(i % 1024, i // 1024) for i in sorted(ids)]
    found = drawn[:, [*range(num_tiles), *(num_tiles + i for i in sorted(ids))]]
    for b, (key, position) in enumerate(zip(KEYS, POSITIONS, strict=True)):
        bits = [bits_of_jax(key, position, noise.Stream.RECOVER, at)[word] for at, word in places]
        expected = -np.log1p(-(np.float64(bits) + 0.5) * 2.0**-32)
        np.testing.assert_allclose(found[b], expected, rtol=1e-6)


def distance(exponential_of: Callable[[jax.Array], jax.Array]) -> float:
    """From Exp(1), over its whole range: near 0, where races are decided, in units of 2**-32."""
    x = np.geomspace(2.0**-31, 16, 2000).astype(np.float32)
    below, above = np.zeros(x.shape, np.int64), np.full(x.shape, 2**32, np.int64)
    of = jax.jit(exponential_of)
    for _ in range(32):  # how many of all bits give less than x
        middle = (below + above) // 2
        less = np.asarray(of(jnp.asarray(middle.astype(np.uint32)))) < x
        below, above = np.where(less, middle, below), np.where(less, above, middle)
    expected = -np.expm1(-np.float64(x)) * 2**32
    return float(np.max(np.abs(above - expected) / (1 + expected * 2.0**-22)))


def test_exponentials_are_exact_near_0_and_none_is_0_or_infinite():
    ends = np.asarray(noise.to_exponential(jnp.array([0, 2**32 - 1], jnp.uint32)))
    assert 0 < ends[0] < ends[1] < np.inf
    assert distance(noise.to_exponential) < 2
    coarse = distance(lambda bits: -jnp.log1p(-noise.to_uniform(bits)))
    assert coarse > 50, "24 bits would pass"


def test_keys_that_jax_derives_share_no_counter_with_our_bits():
    """JAX counts from 0 on: no word of 100,000 keys is one of ours, but by chance."""
    key = KEYS[0]
    words = [bits_of_jax(key, p, s, j) for p in range(50) for s in noise.Stream for j in range(K)]
    theirs = np.asarray(jax.random.key_data(jax.random.split(key, 100_000)))
    assert np.isin(np.concatenate(words), theirs).sum() < 5  # 0.07 by chance
    from_zero = threefry_2x32(jax.random.key_data(key), jnp.array([0, 77], jnp.uint32))
    assert np.isin(from_zero, theirs).all()  # what would be shared


def test_bits_are_the_same_whether_jax_partitions_its_own_or_not():
    expected = sd.testing.draw_noise(KEYS, POSITIONS, K)
    with jax.threefry_partitionable(False):
        drawn = sd.testing.draw_noise(KEYS, POSITIONS, K)
    np.testing.assert_array_equal(drawn.accept, expected.accept)
