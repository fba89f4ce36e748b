"""Which GPUs the kernels run on. Imports nothing of a kernel."""

from __future__ import annotations

import dataclasses

import jax

MAX_CLUSTER = 16
"""CTAs of a cluster on a Hopper GPU, at most; more than 8 need a GPC with 16 cores."""

SHARED_BYTES = 227 * 1024
"""Shared memory of a CTA on Hopper and newer, at most."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """GPUs of one compute capability."""

    name: str  # of the GPUs
    has_run: bool  # whether a kernel has run on one; if not, they only compile for them
    shared_bytes: int = SHARED_BYTES  # the most shared memory of a CTA
    max_cluster: int = MAX_CLUSTER  # the most CTAs of a cluster


GENERATIONS = {
    "9.0": Generation("H100, H200", has_run=True),
    "10.0": Generation("B200", has_run=False),
    "10.3": Generation("B300", has_run=False),
    "12.0": Generation("RTX PRO 6000, RTX 5090", False, shared_bytes=99 * 1024, max_cluster=8),
}
"""By compute capability. The kernels neither run on nor compile for other generations."""

_ONLY_COMPILES = ", ".join(capability for capability, x in GENERATIONS.items() if not x.has_run)
_NEEDS_GPU = (
    "implementation='mosaic_gpu' needs an NVIDIA GPU of compute capability 9.0 (Hopper), or of one "
    f"that it compiles for and has not run on ({_ONLY_COMPILES}), but "
)


def generation() -> Generation:
    """Returns the generation of the default device; Hopper if it is not in `GENERATIONS`."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return GENERATIONS.get(capability, GENERATIONS["9.0"])


def no_device() -> str | None:
    """Returns why the kernel cannot run on JAX's default device, a sentence; None if it can."""
    # Another platform, or a generation that no kernel is compiled for.
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"{_NEEDS_GPU}JAX runs on {device.platform}"
    capability = str(getattr(device, "compute_capability", "")) or "none"
    if capability not in GENERATIONS:
        return f"{_NEEDS_GPU}{device.device_kind} has {capability}"
    return None


def not_by_default() -> str | None:
    """Returns why the kernel is not the default on JAX's device, a sentence; None if it is."""
    why_not = no_device()
    # It could run, but none has: it must be named.
    gpu = generation()
    if why_not is None and not gpu.has_run:
        return (
            f"the kernel compiles for {gpu.name} but has not run there: it is used only if it is "
            "named, implementation='mosaic_gpu'"
        )
    return why_not
