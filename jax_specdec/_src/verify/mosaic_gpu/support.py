"""Which calls the Mosaic GPU backend serves, and on which GPUs. Imports nothing of the kernel."""

from __future__ import annotations

import dataclasses

import jax

from jax_specdec._src.base.types import DraftDistribution
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.verify.mosaic_gpu.config import MAX_CLUSTER, KernelConfig
from jax_specdec._src.verify.mosaic_gpu.plan import (
    MAX_BARRIERS,
    MAX_CANDIDATES,
    MAX_MAPPED,
    SHARED_BYTES,
    DraftLayout,
    SharedMemory,
)
from jax_specdec._src.verify.rules import RULES, Rule

_MAX_DRAFTS = 30  # a lane for each, and two for the uniforms to recover with

SPLIT = (
    "implementation='mosaic_gpu' verifies whole rows, but the vocabulary is split over devices, "
    "and its rows are too large to be gathered: give 'xla' or None"
)
"""Why it cannot serve a split vocabulary."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """GPUs of one compute capability."""

    name: str  # of the GPUs
    has_run: bool  # whether the kernel has run on one; if not, it only compiles for them
    shared_bytes: int = SHARED_BYTES  # the most shared memory of a CTA
    max_cluster: int = MAX_CLUSTER  # the most CTAs of a cluster


GENERATIONS = {
    "9.0": Generation("H100, H200", has_run=True),
    "10.0": Generation("B200", has_run=False),
    "10.3": Generation("B300", has_run=False),
    "12.0": Generation("RTX PRO 6000, RTX 5090", False, shared_bytes=99 * 1024, max_cluster=8),
}
"""By compute capability. The kernel neither runs on nor compiles for other generations."""

_ONLY_COMPILES = ", ".join(capability for capability, x in GENERATIONS.items() if not x.has_run)
_NEEDS_GPU = (
    "implementation='mosaic_gpu' needs an NVIDIA GPU of compute capability 9.0 (Hopper), or of one "
    f"that it compiles for and has not run on ({_ONLY_COMPILES}), but "
)


def _generation() -> Generation:
    """Returns the generation of the default device; Hopper if it is not in `GENERATIONS`."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return GENERATIONS.get(capability, GENERATIONS["9.0"])


def no_device() -> str | None:
    """Returns why the kernel cannot run on JAX's default device, a sentence; None if it can."""
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
    generation = _generation()
    if why_not is None and not generation.has_run:
        return (
            f"the kernel compiles for {generation.name} but has not run there: it is used only if "
            "it is named, implementation='mosaic_gpu'"
        )
    return why_not


def rule_unsupported(rule: Rule) -> str | None:
    """Returns why the kernel cannot serve a rule, a sentence; None if it can."""
    if rule.kernel_walk is not None:
        return None
    served = ", ".join(x.name for x in RULES if x.kernel_walk is not None)
    return (
        f"implementation='mosaic_gpu' serves the rules {served}, but rejection_sample_method is "
        f"{rule.name!r}: give 'xla' or None"
    )


def unsupported(
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    *,
    is_race: bool,
    num_requests: int,
    k: int,
    size: int,
    config: KernelConfig | None = None,
) -> str | None:
    """Returns why the kernel cannot serve a call, a sentence; None if it can."""
    # A candidate for each thread; a column of a map in half a word.
    ids = None if distribution is None else distribution.ids
    if ids is not None:
        width = ids.shape[-1]
        most = MAX_CANDIDATES
        what = "candidates a row"
        if ids.ndim == 1:
            most = MAX_MAPPED
            what = "ids in a map"
        if not 1 <= width <= most:
            return f"implementation='mosaic_gpu' takes 1 to {most} {what}, but there are {width}"
    if is_race:
        return "implementation='mosaic_gpu' draws by inverse CDF: pass Noise, not RaceNoise"
    if num_requests == 0:
        return "implementation='mosaic_gpu' needs at least one request, but B is 0"
    if k > _MAX_DRAFTS:
        return (
            f"implementation='mosaic_gpu' takes up to {_MAX_DRAFTS} drafts per request, but "
            f"num_speculative_tokens is {k}"
        )
    # The most that the call may take: as many rows at once as the rule could read.
    shared = SharedMemory.of(
        target_logits,
        DraftLayout.of(distribution),
        num_requests=num_requests,
        size=size,
        config=config,
        most_rows=k + 1,
    )
    arrays = [target_logits] if distribution is None else [target_logits, storage_of(distribution)]
    return _too_large(shared, arrays)


def _too_large(shared: SharedMemory, arrays: list[jax.Array]) -> str | None:
    """Returns why the device has too little room for a launch, a sentence; None if it has."""
    generation = _generation()
    ctas = shared.slices.cluster
    if ctas > generation.max_cluster:
        return (
            f"implementation='mosaic_gpu' would verify a request in a cluster of {ctas} blocks, "
            f"but {generation.name} has at most {generation.max_cluster}: give "
            f"kernel_config=KernelConfig(max_cluster={generation.max_cluster})"
        )
    if shared.bytes <= generation.shared_bytes and shared.barriers <= MAX_BARRIERS:
        return None
    dtypes = " and ".join(str(x.dtype) for x in arrays)
    return (
        "implementation='mosaic_gpu' holds a slice of each row in shared memory, but "
        f"{shared.slices.size} ids of {dtypes} need {shared.bytes} bytes and {shared.barriers} "
        f"barriers in each of {ctas} blocks, and a block of {generation.name} has "
        f"{generation.shared_bytes} and {MAX_BARRIERS}"
    )
