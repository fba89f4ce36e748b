"""The noise of kernels, by arithmetic alone, is the noise that JAX draws from the same keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec._src import noise

K = 5
POSITIONS = jnp.array([0, 1, 77, 2**31 - 1, 123456], jnp.int32)
KEYS = jax.random.split(jax.random.key(3), len(POSITIONS))


def drawn(stream: noise.Stream, offsets: list[int], indices: list[int]) -> np.ndarray:
    shape = (len(POSITIONS), len(offsets))
    data = jax.random.key_data(KEYS)
    words = tuple(jnp.broadcast_to(data[:, i : i + 1], shape) for i in range(2))
    position = jnp.broadcast_to(POSITIONS.astype(jnp.uint32)[:, None], shape)
    offset, index = (
        jnp.broadcast_to(jnp.array(x, jnp.uint32)[None, :], shape) for x in (offsets, indices)
    )
    return noise.uniform(words, position, jnp.full(shape, stream, jnp.uint32), offset, index)


def test_uniforms_by_arithmetic_are_those_of_jax():
    expected = sd.draw_noise(KEYS, POSITIONS, K)
    accept = drawn(noise.Stream.ACCEPT, list(range(K)), [0] * K)
    np.testing.assert_array_equal(accept, expected.accept)
    np.testing.assert_array_equal(drawn(noise.Stream.RECOVER, [0, 0], [0, 1]), expected.recover)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_keys_than_threefry_are_told_apart(impl):
    assert noise.is_threefry(KEYS)
    assert not noise.is_threefry(jax.random.split(jax.random.key(0, impl=impl), 2))


def test_keys_whose_bits_are_not_partitioned_are_told_apart():
    with jax.threefry_partitionable(False):
        assert not noise.is_threefry(KEYS)
