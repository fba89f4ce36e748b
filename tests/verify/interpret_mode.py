"""GPU interpret mode, which runs Mosaic GPU kernels on the CPU, for every supported JAX."""

from __future__ import annotations

from typing import Any

import jax


def interpret_gpu_params(**params: Any) -> Any:
    """Parameters of GPU interpret mode."""
    if jax.__version_info__ >= (0, 11):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams(**params)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**params)
