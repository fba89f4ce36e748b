"""Which GPUs the Mosaic GPU backend serves, by default or where it is named."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from lower_floor import gpus, support

import jax_specdec as sd
from jax_specdec.testing import KernelConfig


class Device:
    def __init__(self, platform: str, capability: str = "", core_count: int | None = None):
        self.platform, self.compute_capability, self.device_kind = platform, capability, "device"
        self.core_count = core_count


@pytest.mark.parametrize(
    ("device", "why_not"),
    [
        (Device("cpu"), "runs on cpu"),
        (Device("gpu", "8.0"), "device has 8.0"),
        (Device("gpu", "11.0"), "device has 11.0"),
        (Device("gpu", "gfx942"), "device has gfx942"),
        (Device("gpu"), "device has none"),
        (Device("gpu", "9.0"), None),
        (Device("gpu", "10.0"), None),
        (Device("gpu", "10.3"), None),
        (Device("gpu", "12.0"), None),
    ],
)
def test_it_needs_a_gpu_that_it_compiles_for(device, why_not):
    with mock.patch.object(jax, "devices", lambda: [device]):
        answer = gpus.no_device()
    assert answer is None if why_not is None else why_not in answer


@pytest.mark.parametrize(
    ("device", "why_not"),
    [
        (Device("gpu", "9.0"), None),
        (Device("gpu", "10.0"), "compiles for B200 but has not run there"),
        (Device("gpu", "10.3"), "compiles for B300 but has not run there"),
        (Device("gpu", "12.0"), "compiles for RTX"),
        (Device("gpu", "8.0"), "device has 8.0"),
        (Device("cpu"), "runs on cpu"),
    ],
)
def test_it_is_the_default_only_where_it_has_run(device, why_not):
    logits = jax.ShapeDtypeStruct((6, 128256), jnp.bfloat16)
    drafts = sd.Drafts.from_dense(jnp.array([[7, 3], [4, 0]]))
    config = sd.SpecDecodeConfig(num_speculative_tokens=2)
    with mock.patch.object(jax, "devices", lambda: [device]):
        answer = gpus.not_by_default()
        implementation = sd.testing.which_implementation(logits, drafts, config=config)
        agreement = dataclasses.replace(config, rejection_sample_method="agreement")
        assert sd.testing.which_implementation(logits, drafts, config=agreement) == "xla"
    assert answer is None if why_not is None else why_not in answer
    assert implementation == ("xla" if why_not else "mosaic_gpu")


def unsupported_on(device: Device, logits: jax.ShapeDtypeStruct, **options: Any) -> str | None:
    batch = logits.shape[0] // 5
    with mock.patch.object(jax, "devices", lambda: [device]):
        return support.unsupported(
            logits, None, is_race=False, num_requests=batch, k=4, size=logits.shape[1], **options
        )


def test_less_shared_memory_and_smaller_clusters_are_known_before_the_launch():
    hopper, rtx = Device("gpu", "9.0", 132), Device("gpu", "12.0", 188)

    def logits(vocab: int, batch: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((5 * batch, vocab), dtype)

    for vocab, batch in itertools.product((32000, 128256), (64, 256)):
        assert unsupported_on(rtx, logits(vocab, batch)) is None
    large = logits(262144, 64, jnp.float32)
    config = KernelConfig(max_cluster=8)
    assert unsupported_on(hopper, large, config=config) is None
    answer = unsupported_on(rtx, large, config=config)
    assert "262144 ids of float32 need" in answer and "has 101376 and 32" in answer
    assert unsupported_on(hopper, logits(128256, 1)) is None
    answer = unsupported_on(rtx, logits(128256, 1))
    assert "cluster of 16 blocks, but RTX" in answer and "has at most 8: give" in answer
    assert unsupported_on(rtx, logits(128256, 1), config=config) is None
