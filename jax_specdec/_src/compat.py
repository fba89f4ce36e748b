"""What differs between versions of JAX."""

from __future__ import annotations

from typing import Any

import jax

INTERPRETS_CLUSTERS = jax.__version_info__ >= (0, 11, 0)
"""Whether blocks of a cluster can wait for each other in GPU interpret mode."""


def interpret_gpu_params(**params: Any) -> Any:
    """Parameters of GPU interpret mode, which runs Mosaic GPU kernels on the CPU."""
    if INTERPRETS_CLUSTERS:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams(**params)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**params)
