"""The backends that verify, by name, and the classes of tests that are run on them."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from lower_floor import api, base, gpus, statistics
from lower_floor import gpu_launch as mosaic_gpu

import jax_specdec as sd
from jax_specdec.testing import KernelConfig

from .batch import XLA, Verifier, jitted, on
from .interpret_mode import interpret_gpu_params

# Interpret mode imports this later, which changes what JAX caches programs by: between two calls,
# everything would be compiled again.
importlib.import_module("jax.experimental.pallas.fuser")

with_noise = sd.testing.rejection_sample_with_noise


# Over several devices


def mesh_of(
    vocab: int, batch: int = 1, axis_type: jax.sharding.AxisType = jax.sharding.AxisType.Auto
) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: vocab * batch]  # also where there is a GPU
    return jax.make_mesh((batch, vocab), ("b", "v"), (axis_type,) * 2, devices=devices)


@functools.cache
def over(vocab: int, batch: int | None = None) -> Verifier:
    """A verifier over so many parts of the vocabulary, padded until it divides, and of the batch.

    Its mesh is made as it is traced: where files are collected there may be one device.
    """

    @jitted
    def verifier(
        target_logits: Any, *args: Any, vocab_size: int | None, **kwargs: Any
    ) -> sd.RejectionSampleOutput:
        axes = "v", None if batch is None else "b"
        size = target_logits.shape[1]
        if size % vocab:
            vocab_size = vocab_size or size
            padding = ((0, 0), (0, -size % vocab))
            target_logits = jnp.pad(target_logits, padding, constant_values=jnp.nan)
        sharding = sd.VerifySharding(mesh_of(vocab, batch or 1), *axes)
        return with_noise(target_logits, *args, vocab_size=vocab_size, sharding=sharding, **kwargs)

    return verifier


# XLA


all_at_once = on("cuda")


@jitted
def large(*args: Any, **kwargs: Any) -> sd.RejectionSampleOutput:
    """All at once, with whether anybody samples asked first, and owners of rows searched for."""
    inner = api._rejection_sample.__wrapped__  # not traced before, as a small batch
    with (
        mock.patch.object(base, "_LARGE", 0),
        mock.patch.object(statistics, "MANY_PAIRS", 0),
        mock.patch.object(api, "_rejection_sample", inner),
    ):
        return all_at_once.__wrapped__(*args, **kwargs)


# The kernel


@contextlib.contextmanager
def kernel_without_gpu(**options: Any) -> Iterator[None]:
    """Has `implementation="mosaic_gpu"` run, or be lowered, where there is no GPU."""
    with (
        mock.patch.object(gpus, "no_device", lambda: None),
        mock.patch.object(mosaic_gpu, "verify", functools.partial(mosaic_gpu.verify, **options)),
        # not traced before, for another backend
        mock.patch.object(api, "_rejection_sample", api._rejection_sample.__wrapped__),
    ):
        yield


def interpreted(config: KernelConfig, *, padded_rows: bool = False, **params: Any) -> Verifier:
    """The kernel in GPU interpret mode."""
    interpret = interpret_gpu_params(**params)

    @jitted
    def verifier(*args: Any, **kwargs: Any) -> sd.RejectionSampleOutput:
        with kernel_without_gpu(interpret=interpret):
            return with_noise(
                *args,
                **kwargs,
                kernel_config=config,
                implementation="mosaic_gpu",
                padded_rows=padded_rows,
            )

    return verifier


# One warpgroup for a request: interpreted blocks that wait for each other block the threads that
# the others need, and with two cores may never end. Clusters are tested on a GPU.
alone = interpreted(KernelConfig(max_cluster=1))
four_tiles = interpreted(KernelConfig(max_cluster=1, tiles_at_once=4))
on_gpu = jitted(functools.partial(with_noise, implementation="mosaic_gpu"))
row_by_row = jitted(
    functools.partial(with_noise, implementation="mosaic_gpu", kernel_config=KernelConfig())
)


BACKENDS: dict[str, Verifier] = {
    "in-order": XLA,  # as XLA for CPUs
    "at-once": all_at_once,  # for GPUs
    "at-once-large": large,
    "tile-by-tile": on("tpu"),
    "2-devices": over(2),
    "4-devices": over(4),
    "8-devices": over(8),
    "kernel": alone,
    "kernel-four-tiles": four_tiles,
    "GPU": on_gpu,
    "GPU-row-by-row": row_by_row,
}
"""A new backend gets a line here, and is held to what the classes of `run_on` ask for."""


def run_on(*groups: tuple[str, tuple[pytest.MarkDecorator, ...]]) -> Callable[[type], type]:
    """Has a class run once on each backend that is named, with its marks.

    Its methods find the backend as `self.verifier`.
    """
    given = [pytest.param(BACKENDS[name], id=name, marks=marks) for name, marks in groups]

    def decorate(tests: type) -> type:
        tests = pytest.mark.parametrize("verifier", given)(tests)
        return pytest.mark.xdist_group("backends")(tests)  # they compile the same programs

    return decorate
