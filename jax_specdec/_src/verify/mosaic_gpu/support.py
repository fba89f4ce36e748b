"""Which calls the Mosaic GPU backend serves; imports none of the kernel."""

from __future__ import annotations

import jax

from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftLogits
from jax_specdec._src.verify.mosaic_gpu.plan import (
    MAX_BARRIERS,
    SHARED_BYTES,
    KernelConfig,
    SharedMemory,
    shared_memory,
    shared_memory_of_rows,
)
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rows import storage_of

_MAX_DRAFTS = 30  # a lane for each, and two for the uniforms to recover with
_MIN_CAPABILITY = 9.0
_NO_REQUESTS = "implementation='mosaic_gpu' needs at least one request, but B is 0"


def no_device() -> str | None:
    """Why the kernel cannot run on JAX's default device, in a sentence; None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return (
            "implementation='mosaic_gpu' needs an NVIDIA GPU of compute capability 9.0 (Hopper) or "
            f"newer, but JAX runs on {device.platform}"
        )
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.replace(".", "").isdigit() or float(capability) < _MIN_CAPABILITY:
        return (
            "implementation='mosaic_gpu' needs an NVIDIA GPU of compute capability 9.0 (Hopper) or "
            f"newer, but {device.device_kind} has {capability or 'none'}"
        )
    return None


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
    """Why the kernel cannot serve a call, in a sentence; None if it can."""
    if is_race:
        return "implementation='mosaic_gpu' draws by inverse CDF: pass Noise, not RaceNoise"
    if num_requests == 0:
        return _NO_REQUESTS
    if k > _MAX_DRAFTS:
        return (
            f"implementation='mosaic_gpu' takes up to {_MAX_DRAFTS} drafts per request, but "
            f"num_speculative_tokens is {k}"
        )
    shared = shared_memory(
        target_logits,
        distribution,
        num_requests=num_requests,
        k=k,
        walks=True,
        is_plain=True,
        size=size,
        config=config,
    )
    arrays = [target_logits] if distribution is None else [target_logits, storage_of(distribution)]
    return _too_large(shared, arrays)


def _too_large(shared: SharedMemory, arrays: list[jax.Array]) -> str | None:
    if shared.bytes <= SHARED_BYTES and shared.barriers <= MAX_BARRIERS:
        return None
    dtypes, blocks = " and ".join(str(x.dtype) for x in arrays), shared.slices.cluster
    return (
        "implementation='mosaic_gpu' holds a slice of each row in shared memory, but "
        f"{shared.slices.size} ids of {dtypes} need {shared.bytes} bytes and {shared.barriers} "
        f"barriers in each of {blocks} blocks, and a block has {SHARED_BYTES} and {MAX_BARRIERS}"
    )


def part_unsupported(arrays: CallArrays, k: int, config: KernelConfig | None = None) -> str | None:
    """Why the kernels cannot read a part of the vocabulary, in a sentence; None if they can."""
    without = "implementation='mosaic_gpu' reads parts of a vocabulary without "
    distribution, num_requests = arrays.drafts.distribution, arrays.sampling.temperature.shape[0]
    if arrays.token_bitmask is not None:
        return without + "a token_bitmask"
    if Filter.of(arrays.sampling) is not None:
        return without + "min_p, top_k and top_p"
    if isinstance(distribution, DraftLogits) and distribution.threshold is not None:
        return without + "DraftLogits.threshold"
    if num_requests == 0:
        return _NO_REQUESTS
    if jax.typeof(arrays.target_logits).manual_axis_type.varying:
        return (
            "implementation='mosaic_gpu' knows nothing of how values vary over a mesh: give "
            "jax.shard_map check_vma=False"
        )
    shared = shared_memory_of_rows(arrays.target_logits, num_requests * (k + 1), config)
    return _too_large(shared, [arrays.target_logits])
