"""How the Mosaic GPU kernel is laid out: its config, the slices of rows, and shared memory."""

import jax
import jax.numpy as jnp
import pytest
from lower_floor import SHARED_BYTES, SharedMemory, Slices, default_config, power_of_two

from jax_specdec.testing import KernelConfig

from .batch import Layout
from .test_mosaic_gpu import lowered


@pytest.mark.parametrize(
    ("name", "most"), [("max_cluster", 16), ("rows_at_once", 5), ("tiles_at_once", 4)]
)
def test_a_config_out_of_range_is_refused(name, most):
    for value in (0, most + 1):
        with pytest.raises(
            ValueError, match=rf"{name} must be in \[1, {most}\], but it is {value}"
        ):
            KernelConfig(**{name: value})
    for value in (2.0, True, None):
        with pytest.raises(TypeError, match=f"{name} must be an int, but it is {value}"):
            KernelConfig(**{name: value})


def test_the_default_config_uses_the_device_and_no_more():
    def blocks(num_requests, size, held=2, num_cores=132):
        config = default_config(num_requests, size, held, num_cores)
        return config.max_cluster

    assert blocks(1, 128256) == blocks(32, 128256) == 16
    assert blocks(64, 128256) == blocks(256, 128256) == 8
    for size in (32000, 50257):
        assert [blocks(n, size) for n in (64, 128, 256)] == [8, 4, 2]
    assert blocks(256, 100352) == 8  # two would leave little room
    assert blocks(64, 128256, held=4) == 16  # a slice in eight would leave little room
    assert blocks(1, 128256, num_cores=78) == 8  # a small device may have no cluster of 16


@pytest.mark.long
@pytest.mark.newest
def test_rows_are_read_at_once_where_requests_are_few_and_shared_memory_has_room():
    def rows(num_requests, size=128256, held=2, num_cores=132):
        return default_config(num_requests, size, held, num_cores).rows_at_once

    assert [rows(n) for n in (1, 3, 4, 7, 8, 14, 15, 256)] == [3, 3, 4, 4, 2, 2, 1, 1]
    assert [rows(n, held=4) for n in (4, 5, 14, 15)] == [3, 2, 2, 1]  # four have few registers
    assert rows(1, num_cores=78) == 1
    assert rows(4, size=2**18, held=4) == 3 and rows(4, size=2**19, held=4) == 1
    assert rows(8, size=2**18, held=4) == 1  # two blocks on a multiprocessor
    for size in (2**18, 300_000, 2**19 - 1):
        shape = jax.ShapeDtypeStruct((1, size), jnp.float32)
        memory = SharedMemory.of(shape, num_requests=1, size=size, config=None, most_rows=4)
        assert memory.bytes <= SHARED_BYTES
    layout = Layout(vocab=2**19 - 1, num_requests=1, num_drafts=0)
    assert lowered(layout).count("@mosaic_gpu") == 1


def test_tiles_are_loaded_at_once_where_blocks_have_registers_to_spare():
    def tiles(num_requests, size=128256, **sizes):
        held = sizes.pop("held", 2)
        return default_config(num_requests, size, held, 132, **sizes).tiles_at_once

    assert [tiles(n) for n in (1, 14, 15, 33, 34, 256)] == [4, 4, 1, 1, 2, 2]
    assert [tiles(n, held=4) for n in (1, 5, 64, 256)] == [4, 4, 1, 1]  # four in each block
    assert [tiles(n, draft_size=4) for n in (1, 5, 64, 256)] == [4, 4, 2, 2]
    assert tiles(256, size=32000) == 2 and tiles(128, size=32000) == 1  # as many as a block has
    assert tiles(64, size=151936) == 2 and tiles(8, size=2**18) == 4
    assert tiles(8, size=151936) == tiles(64, size=100352) == 1  # five each, and seven


def test_a_power_of_two_is_the_largest_one_that_fits():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 7, 8, 16)] == [1, 2, 2, 4, 4, 8, 16]


@pytest.mark.parametrize("max_cluster", [1, 2, 3, 5, 8, 12, 16])
def test_slices_cover_the_row_in_a_cluster_of_a_power_of_two(max_cluster):
    for size in (1, 2048, 2049, 32000, 50257, 100352, 128256):
        slices = Slices.of(size, max_cluster)
        assert slices.cluster.bit_count() == 1 and slices.cluster <= max_cluster
        assert slices.cluster * slices.ids >= size > (slices.cluster // 2 - 1) * slices.ids
