"""Which calls the Mosaic GPU backend serves; imports none of the kernel."""

from __future__ import annotations

import jax

from jax_specdec._src.types import DraftDistribution, DraftProbs
from jax_specdec._src.verify.decide import Request
from jax_specdec._src.verify.mosaic_gpu.config import LANES, KernelConfig, Slices

_SHARED_BYTES = 200 * 1024
_MIN_CAPABILITY = 9.0


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
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    *,
    size: int,
    config: KernelConfig | None = None,
) -> str | None:
    """Why the kernel cannot serve a call, in a sentence; None if it can."""
    storage = None if distribution is None else storage_of(distribution)
    config = KernelConfig.choose(requests.token_ids.shape[0]) if config is None else config
    if requests.exponential is not None:
        return "implementation='mosaic_gpu' draws by inverse CDF: pass Noise, not RaceNoise"
    if requests.token_ids.shape[0] == 0:
        return "implementation='mosaic_gpu' needs at least one request, but B is 0"
    if target_logits.shape[1] % LANES:
        return (
            f"implementation='mosaic_gpu' needs a vocabulary that is a multiple of {LANES}, but V "
            f"is {target_logits.shape[1]}"
        )
    if storage is not None and storage.shape[1] % LANES:
        return (
            f"implementation='mosaic_gpu' needs a draft vocabulary that is a multiple of {LANES}, "
            f"but Vd is {storage.shape[1]}"
        )
    slices = Slices.of(size, config.max_cluster)
    arrays = [target_logits] if storage is None else [target_logits, storage]
    needed = sum(slices.rows * LANES * x.dtype.itemsize for x in arrays)  # held whole, at most
    if not slices.fits or needed > _SHARED_BYTES:
        return (
            f"implementation='mosaic_gpu' holds a slice of each row in shared memory, but {size} "
            f"ids of {' and '.join(str(x.dtype) for x in arrays)} do not fit"
        )
    return None


def storage_of(distribution: DraftDistribution) -> jax.Array:
    """The rows of a draft distribution, ``[R, Vd]``."""
    return distribution.probs if isinstance(distribution, DraftProbs) else distribution.logits
