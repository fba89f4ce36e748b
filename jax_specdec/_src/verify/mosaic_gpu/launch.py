"""Launches: operands, shared memory, and a grid of clusters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.noise import key_words
from jax_specdec._src.types import DraftLogits, Noise, RaceNoise, RejectionSampleOutput, Status
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, Warpgroups
from jax_specdec._src.verify.mosaic_gpu.interpret import ExchangeBarriers, InterpretedThreads
from jax_specdec._src.verify.mosaic_gpu.kernel import Walk
from jax_specdec._src.verify.mosaic_gpu.lists import Candidates, MappedSlice, columns_of_map
from jax_specdec._src.verify.mosaic_gpu.plan import SLOTS, KernelConfig, Plan, is_aligned
from jax_specdec._src.verify.mosaic_gpu.ptx import Threads
from jax_specdec._src.verify.mosaic_gpu.request import DraftedTokens, KernelRequest, Work
from jax_specdec._src.verify.mosaic_gpu.rows import DraftSlice, TargetSlice
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.rules import Rule


def verify(
    arrays: CallArrays,
    rule: Rule,
    *,
    k: int,
    size: int,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> RejectionSampleOutput:
    """Verify a batch in one launch, for a call that `support.unsupported` does not object to.

    Args:
      arrays: of the call, with M at least 1. The distribution is None or has at least one row.
      rule: the rule.
      k: K.
      size: ids from it on are padding; at most V.
      config: settings that change the speed only, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.

    Raises:
      NotImplementedError: a cluster of one block on a GPU.
    """
    plan = Plan.of(arrays, rule, k=k, size=size, config=config)
    num_requests = arrays.sampling.temperature.shape[0]
    slices, warpgroups = plan.memory.slices, plan.memory.warpgroups
    if slices.cluster == 1 and not interpret:
        raise NotImplementedError("max_cluster=1 is for interpret mode: on a GPU it is at least 2")
    operands = _operands(arrays, size)
    outputs = {
        "token_ids_out": (num_requests * (k + 1),),
        "num_accepted": (num_requests,),
        "num_emitted": (num_requests,),
        "status": (num_requests,),
    }
    out = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outputs.values()]
    scratch = _scratch(plan, operands["target"].dtype, interpreted=bool(interpret))
    names = [*operands, *outputs]
    if interpret:  # global memory, of each cluster
        names.append("slots")
        shape = (num_requests, warpgroups, SLOTS, plan.memory.slot)
        out.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    names += scratch

    def verify_drafts(*args: Any) -> None:
        _verify_request(plan, dict(zip(names, args, strict=True)), interpreted=bool(interpret))

    token_ids, *counts_and_status = launch(
        verify_drafts,
        list(operands.values()),
        out=out,
        scratch=list(scratch.values()),
        grid=("request", num_requests),
        cluster=slices.cluster,
        warpgroups=warpgroups,
        interpret=interpret,
    )
    token_ids = token_ids.reshape(num_requests, k + 1)
    return RejectionSampleOutput(token_ids, *counts_and_status[:3])


def _operands(arrays: CallArrays, size: int) -> dict[str, jax.Array]:
    """The arrays that the call has, by name."""
    drafts, sampling, distribution = arrays.drafts, arrays.sampling, arrays.drafts.distribution
    token_ids, mask = drafts.token_ids, arrays.token_bitmask
    operands: dict[str, Any] = {
        "target": arrays.target_logits,
        "token_ids": token_ids if token_ids.shape[0] else jnp.full((1,), -1, jnp.int32),
        "offsets": drafts.cu_num_draft_tokens,
        "temperature": sampling.temperature,
    }
    assert not isinstance(arrays.randomness, RaceNoise)
    if isinstance(arrays.randomness, Noise):
        operands |= {"accept": arrays.randomness.accept, "recover": arrays.randomness.recover}
    else:
        keys, positions = arrays.randomness
        operands |= {"keys": key_words(keys), "positions": positions}
    if distribution is not None:
        operands["draft"], ids = storage_of(distribution), distribution.ids
        if ids is not None and ids.ndim == 1:
            operands["columns"], operands["bad_map"] = columns_of_map(ids, size)
        elif ids is not None:
            operands["ids"] = ids
        if isinstance(distribution, DraftLogits):
            operands["normalizer"] = distribution.log_normalizer
            operands["row_max"] = distribution.row_max
            operands["thresholds"] = distribution.threshold
        operands |= {"rows": distribution.rows, "valid": distribution.valid}
    operands |= {"bonus": arrays.bonus_token_ids, "active": arrays.active}
    if mask is not None:
        operands["bitmask"] = lax.bitcast_convert_type(mask, jnp.int32)
    for name in ("min_p", "top_k", "top_p"):
        operands[name] = getattr(sampling, name)
    return {name: x for name, x in operands.items() if x is not None}


def _scratch(plan: Plan, target_dtype: Any, *, interpreted: bool) -> dict[str, Any]:
    """Shared memory and barriers of a block, by name."""
    memory, warpgroups = plan.memory, plan.memory.warpgroups
    tiles = memory.slices.tiles
    scratch: dict[str, Any] = {
        "tiles": plgpu.SMEM((warpgroups, tiles * memory.target_stride), target_dtype),
        "scratch": plgpu.SMEM((warpgroups, memory.scratch), jnp.float32),
    }
    if warpgroups > 1:
        scratch["flags"] = plgpu.SMEM((warpgroups, SLOTS), jnp.int32)
    if not interpreted:
        scratch["slots"] = plgpu.SMEM((warpgroups, SLOTS, memory.slot), jnp.float32)
        scratch["barriers"] = plgpu.SMEM((warpgroups, 2 * memory.barriers), jnp.int32)
        return scratch
    scratch["tile_barriers"] = plgpu.Barrier(num_barriers=warpgroups * tiles)
    scratch["completed"] = plgpu.SMEM((warpgroups, SLOTS), jnp.int32)
    if memory.slices.cluster > 1:
        scratch["cluster_barrier"] = plgpu.ClusterBarrier(
            collective_axes=("block",), num_barriers=warpgroups
        )
    if warpgroups > 1:
        scratch["block_barrier"] = plgpu.Barrier(num_arrivals=warpgroups)
    return scratch


def _verify_request(plan: Plan, refs: dict[str, Any], *, interpreted: bool) -> None:
    """The kernel: what each warpgroup does."""
    memory, slices = plan.memory, plan.memory.slices
    threads = InterpretedThreads() if interpreted else Threads()
    block = lax.axis_index("block") if slices.cluster > 1 else jnp.int32(0)
    warpgroup = lax.axis_index("warpgroup") if memory.warpgroups > 1 else jnp.int32(0)
    index = lax.axis_index("request")
    slots, tile_barriers = refs["slots"], refs.get("tile_barriers")
    first_barrier: Any = SLOTS
    if interpreted:
        slots, first_barrier = slots.at[index], warpgroup * slices.tiles
        completed = refs["completed"].at[warpgroup]
        completed[...] = jnp.zeros((SLOTS,), jnp.int32)
        cluster_barrier = refs.get("cluster_barrier")
        if cluster_barrier is not None:
            cluster_barrier = cluster_barrier.at[warpgroup]
        barriers: Any = ExchangeBarriers(cluster_barrier, completed)
    else:
        barriers = tile_barriers = refs["barriers"].at[warpgroup]
    first = block * slices.ids
    target = TargetSlice(
        threads=threads,
        rows=refs["target"],
        buffer=refs["tiles"].at[warpgroup],
        barriers=tile_barriers,
        per_slice=slices.tiles,
        stride=memory.target_stride,
        first_barrier=first_barrier,
        first=first,
        size=plan.size,
        each=memory.each,
        bitmask=refs.get("bitmask"),
    )
    draft: DraftSlice | Candidates | None = None
    thresholds = refs.get("thresholds")
    fill = 0.0 if plan.holds_probs else -jnp.inf
    if plan.draft == "candidates":
        draft = Candidates(
            threads=threads,
            rows=refs["draft"],
            ids=refs["ids"],
            first=first,
            size=plan.size,
            fill=fill,
            each=memory.each,
            sums=not plan.holds_probs and "normalizer" not in refs,
            thresholds=thresholds,
        )
    elif plan.draft != "none":
        width = refs["draft"].shape[1]
        draft = DraftSlice(
            threads=threads,
            rows=refs["draft"],
            per_slice=slices.tiles,
            first=first,
            size=width if plan.is_mapped else plan.draft_size,
            row_size=width if plan.is_mapped else plan.size,
            fill=fill,
            each=memory.each,
            aligned=is_aligned(refs["draft"]) and width >= memory.each,
            at_once=memory.tiles_at_once,
            thresholds=thresholds,
        )
        if plan.is_mapped:
            fields = {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
            fields |= {"size": plan.size, "row_size": plan.size, "aligned": False}
            draft = MappedSlice(**fields, columns=refs["columns"], storage=draft)
    scratch = refs["scratch"].at[warpgroup]
    cluster = Cluster(threads, memory, slots.at[warpgroup], barriers, scratch, block)
    warpgroups = Warpgroups(
        threads, memory.warpgroups, warpgroup, refs.get("flags"), refs.get("block_barrier")
    )
    init = functools.partial(threads.init_barriers, barriers, memory.barriers)
    request = KernelRequest(plan, threads, refs, index, meanwhile=init)
    ok = request.status == Status.OK

    @pl.when(ok)
    def _() -> None:
        drafted = DraftedTokens(request, target, draft)  # small: loaded before rows
        Walk(Work(request, target, draft, drafted, cluster), warpgroups).run()

    @pl.when(~ok)
    def _() -> None:
        threads.cluster_wait()
        zero = jnp.int32(0)
        request.write(zero, zero, request.status, cluster.is_first_warp())


def launch(
    body: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    grid: tuple[str, int],
    cluster: int = 1,
    warpgroups: int = 1,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Run a kernel.

    Args:
      body: takes the refs of operands, outputs and scratch. Its axes are the name in `grid`,
        "block" in a cluster of several blocks, and "warpgroup" in a block of several warpgroups.
      operands: arrays.
      out: shapes and dtypes of the outputs.
      scratch: of each block.
      grid: name and length of the axis of clusters.
      cluster: blocks of a cluster; 1 for independent blocks.
      warpgroups: warpgroups of a block.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      The outputs.
    """
    axes: dict[str, Any] = {}
    if cluster > 1:
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
    with jax.enable_x64(False):  # indices are int32, whatever the caller's default is
        return kernel(*operands)
