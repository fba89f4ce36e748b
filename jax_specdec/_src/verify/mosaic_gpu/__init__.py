"""Verification in one launch, written in Pallas Mosaic GPU, for Hopper GPUs and newer."""

from jax_specdec._src.verify.mosaic_gpu.call import no_device, unsupported, verify
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig

__all__ = ["KernelConfig", "no_device", "unsupported", "verify"]
