"""Which calls the Mosaic GPU backend serves, on which GPUs; imports none of the kernel."""

from __future__ import annotations

import dataclasses

import jax

from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import DraftDistribution, DraftLogits
from jax_specdec._src.verify.mosaic_gpu.config import (
    MAX_BARRIERS,
    MAX_CLUSTER,
    SHARED_BYTES,
    KernelConfig,
    Shared,
    Slices,
    power_of_two,
)
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rows import storage_of

_MAX_DRAFTS = 30  # a lane for each, and two for the uniforms to recover with
_BESIDE_ROW = 8 * 1024  # bytes that a warpgroup holds beside its slice of a row, at most
_NO_REQUESTS = "implementation='mosaic_gpu' needs at least one request, but B is 0"


@dataclasses.dataclass(frozen=True)
class Generation:
    """What is known of the GPUs of one compute capability.

    Attributes:
      name: of the GPUs.
      has_run: whether the kernel has run on one; else it only compiles for them.
      shared_bytes: shared memory that a block may have.
      max_cluster: the most blocks of a cluster.
    """

    name: str
    has_run: bool
    shared_bytes: int = SHARED_BYTES
    max_cluster: int = MAX_CLUSTER


GENERATIONS = {
    "9.0": Generation("H100, H200", has_run=True),
    "10.0": Generation("B200", has_run=False),
    "10.3": Generation("B300", has_run=False),
    "12.0": Generation("RTX PRO 6000, RTX 5090", False, shared_bytes=99 * 1024, max_cluster=8),
}
"""By compute capability. A generation that is not here has the kernel neither run nor compiled."""

_ONLY_COMPILES = ", ".join(capability for capability, x in GENERATIONS.items() if not x.has_run)
_NEEDS_GPU = (
    "implementation='mosaic_gpu' needs an NVIDIA GPU of compute capability 9.0 (Hopper), or of one "
    f"that it compiles for and has not run on ({_ONLY_COMPILES}), but "
)


def _device() -> jax.Device:
    """JAX's default device, which a program is taken to be compiled for."""
    return jax.devices()[0]


def _generation() -> Generation:
    """That of the default device; Hopper's where it is none of those above."""
    capability = str(getattr(_device(), "compute_capability", ""))
    return GENERATIONS.get(capability, GENERATIONS["9.0"])


def no_device() -> str | None:
    """Why the kernel cannot run on JAX's default device, in a sentence; None if it can."""
    device = _device()
    if device.platform != "gpu":
        return f"{_NEEDS_GPU}JAX runs on {device.platform}"
    capability = str(getattr(device, "compute_capability", "")) or "none"
    if capability not in GENERATIONS:
        return f"{_NEEDS_GPU}{device.device_kind} has {capability}"
    return None


def not_by_default() -> str | None:
    """Why a call on the default device that names no implementation does not use the kernel.

    None if it does, where the kernel serves the call.
    """
    why_not, generation = no_device(), _generation()
    if why_not is None and not generation.has_run:
        return (
            f"the kernel compiles for {generation.name} and has not run there: it is used where it "
            "is named, implementation='mosaic_gpu'"
        )
    return why_not


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
    shared = plan(
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


def _too_large(shared: Shared, arrays: list[jax.Array]) -> str | None:
    generation, blocks = _generation(), shared.slices.cluster
    if blocks > generation.max_cluster:
        return (
            f"implementation='mosaic_gpu' has clusters of at most {generation.max_cluster} blocks "
            f"on {generation.name}, but kernel_config.max_cluster asks for {blocks}"
        )
    if shared.bytes <= generation.shared_bytes and shared.barriers <= MAX_BARRIERS:
        return None
    dtypes = " and ".join(str(x.dtype) for x in arrays)
    return (
        "implementation='mosaic_gpu' holds a slice of each row in shared memory, but "
        f"{shared.slices.size} ids of {dtypes} need {shared.bytes} bytes and {shared.barriers} "
        f"barriers in each of {blocks} blocks, and a block of {generation.name} has "
        f"{generation.shared_bytes} and {MAX_BARRIERS}"
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
    shared = plan_rows(arrays.target_logits, num_requests * (k + 1), config)
    return _too_large(shared, [arrays.target_logits])


def plan(
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    *,
    num_requests: int,
    k: int,
    walks: bool,
    is_plain: bool,
    size: int,
    config: KernelConfig | None,
) -> Shared:
    """How rows are cut for a call, and what a block holds in shared memory.

    Args:
      target_logits: its logits.
      distribution: its drafts' distribution, or None.
      num_requests: B.
      k: K.
      walks: whether several positions may be looked at, one after another.
      is_plain: see `request.Call`.
      size: ids that count.
      config: the caller's choices, or None.
    """
    storage = None if distribution is None else storage_of(distribution)
    reads_draft = isinstance(distribution, DraftLogits) and distribution.log_normalizer is None
    target_size = target_logits.dtype.itemsize
    draft_size = 0 if storage is None else storage.dtype.itemsize
    if config is None:
        cores = _num_cores()
        config = KernelConfig.choose(num_requests, size, target_size, cores, draft_size)
        config = _within_limits(config, size, target_size)
    slices = Slices.of(size, config.max_cluster)

    def aligned(x: jax.Array | None) -> bool:
        return x is None or x.shape[1] * x.dtype.itemsize % 16 == 0

    both_aligned = aligned(target_logits) and aligned(storage)
    most_tiles = min(config.tiles_at_once, slices.tiles)
    return Shared(
        slices=slices,
        target_size=target_size,
        draft_size=draft_size,
        target_aligned=aligned(target_logits),
        draft_aligned=aligned(storage),
        values=4 if reads_draft else 2,
        warpgroups=min(config.rows_at_once, k + 1) if walks else 1,
        tiles_at_once=power_of_two(most_tiles) if is_plain and both_aligned else 1,
    )


def plan_rows(logits: jax.Array, num_rows: int, config: KernelConfig | None) -> Shared:
    """What a block holds in shared memory that reads rows of one matrix."""
    size, held = logits.shape[1], logits.dtype.itemsize
    if config is None:
        config = KernelConfig.choose(num_rows, size, held, _num_cores())
        config = _within_limits(config, size, held)
    return Shared(
        slices=Slices.of(size, config.max_cluster),
        target_size=held,
        draft_size=0,
        target_aligned=size * held % 16 == 0,
        draft_aligned=True,
        values=2,
    )


def _within_limits(config: KernelConfig, size: int, target_size: int) -> KernelConfig:
    """The default, where blocks have less shared memory, or clusters fewer blocks, than Hopper's.

    Args:
      config: chosen for Hopper.
      size: ids that count.
      target_size: bytes of a target entry.
    """
    generation = _generation()
    cluster = min(config.max_cluster, generation.max_cluster)
    per_row = Slices.of(size, cluster).ids * target_size + _BESIDE_ROW
    rows = max(1, min(config.rows_at_once, generation.shared_bytes // per_row))
    return dataclasses.replace(config, max_cluster=cluster, rows_at_once=rows)


def _num_cores() -> int:
    return getattr(_device(), "core_count", None) or 132
