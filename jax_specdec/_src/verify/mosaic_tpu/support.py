"""Which calls ``implementation="mosaic_tpu"`` serves. Imports nothing of the kernel."""

from __future__ import annotations

import jax

from jax_specdec._src.verify.requests import CallArrays


def no_device() -> str | None:
    """Why the kernel cannot run on JAX's default device, as a sentence; None if it can."""
    platform = jax.devices()[0].platform
    if platform == "tpu":
        return None
    return f"implementation='mosaic_tpu' needs a TPU, but JAX runs on {platform}"


def copies_rows() -> bool:
    """Whether JAX's default device copies single rows; if not, XLA sums the residual."""
    return jax.devices()[0].device_kind not in ("TPU v2", "TPU v3")


def unsupported(arrays: CallArrays) -> str | None:
    """Why the kernel cannot serve a call, as a sentence; None if it can."""
    if jax.typeof(arrays.target_logits).manual_axis_type.varying:
        return (
            "implementation='mosaic_tpu' knows nothing of how values vary over a mesh: give "
            "jax.shard_map check_vma=False"
        )
    return None
