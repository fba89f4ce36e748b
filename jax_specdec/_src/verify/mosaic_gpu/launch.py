"""How the kernels are launched: a block, or a cluster of blocks, for each entry of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def launch(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    grid: tuple[str, int],
    cluster: int | None = None,
    warpgroups: int = 1,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Run a kernel.

    Args:
      body: of the refs of operands, outputs and scratch; its axes are named as in `grid`, "block"
        within a cluster and "warpgroup" within a block of several.
      operands: arrays.
      out: what it writes.
      scratch: of each block.
      grid: name and number of the blocks or clusters.
      cluster: blocks of a cluster; 1 to interpret, at least 2 on a GPU. None for blocks that know
        nothing of each other.
      warpgroups: warpgroups of a block.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      The outputs.

    Raises:
      NotImplementedError: a cluster of one on a GPU, where mail needs more.
    """
    interpreted = bool(interpret)
    if cluster is not None and interpreted != (cluster == 1):
        raise NotImplementedError("max_cluster=1 is for interpret mode, which has no other")
    axes: dict[str, Any] = {}
    if cluster is not None and not interpreted:
        axes = dict(cluster=(cluster,), cluster_names=("block",))
    if warpgroups > 1:
        axes |= dict(num_threads=warpgroups, thread_name="warpgroup")
    name, count = grid
    kernel = plgpu.kernel(
        body,
        out_type=tuple(out),
        scratch_types=tuple(scratch),
        grid=(count,),
        grid_names=(name,),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        **axes,
    )
    return kernel(*operands)
