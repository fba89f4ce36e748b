"""Noise from keys: bits of its own for every place, by arithmetic that kernels can do too."""

import jax
import jax.numpy as jnp
import numpy as np
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


def test_the_uniforms_of_a_token_are_those_of_a_step_without_drafts_at_its_position():
    positions = jnp.minimum(POSITIONS, 2**31 - 1 - K)
    drawn = noise.token_uniforms(KEYS, positions, K + 1)
    for i in range(K + 1):
        alone = sd.testing.draw_noise(KEYS, positions + i, 1).recover
        np.testing.assert_array_equal(drawn[:, i], alone)


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
