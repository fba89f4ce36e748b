"""Launches: operands, shared memory, and a grid of clusters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.noise import key_words
from jax_specdec._src.sampling import Filter, SamplingParams
from jax_specdec._src.types import DraftLogits, Noise, RaceNoise, RejectionSampleOutput
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, Warpgroups
from jax_specdec._src.verify.mosaic_gpu.interpret import ExchangeBarriers, InterpretedThreads
from jax_specdec._src.verify.mosaic_gpu.lists import Candidates, MappedSlice, columns_of_map
from jax_specdec._src.verify.mosaic_gpu.plan import SLOTS, KernelConfig, Plan, is_aligned
from jax_specdec._src.verify.mosaic_gpu.ptx import GpuThreads
from jax_specdec._src.verify.mosaic_gpu.request import Operands, Outputs
from jax_specdec._src.verify.mosaic_gpu.rows import DraftSlice, TargetSlice, words_of
from jax_specdec._src.verify.mosaic_gpu.threads import Ref, Threads
from jax_specdec._src.verify.mosaic_gpu.walk import verify_request
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.rules import Rule, Standard

X = TypeVar("X")


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
    num_requests = arrays.sampling.temperature.shape[0]
    plan = Plan.of(
        arrays.target_logits,
        arrays.drafts.distribution,
        rule,
        num_requests=num_requests,
        num_drafts=arrays.drafts.token_ids.shape[0],
        k=k,
        size=size,
        has_bonus_rows=arrays.bonus_token_ids is None,
        has_limits=arrays.token_bitmask is not None or Filter.of(arrays.sampling) is not None,
        config=config,
    )
    number = jax.ShapeDtypeStruct((num_requests,), jnp.int32)
    outputs = Outputs[Any](
        token_ids=jax.ShapeDtypeStruct((num_requests * (k + 1),), jnp.int32),
        num_accepted=number,
        num_emitted=number,
        status=number,
    )
    found = _run(plan, arrays.target_logits, _operands(arrays, size), outputs, interpret)
    token_ids = found.token_ids.reshape(num_requests, k + 1)
    numbers: Any = found.num_accepted, found.num_emitted, found.status
    return RejectionSampleOutput(token_ids, *numbers)


def sample(
    logits: jax.Array,
    sampling: SamplingParams,
    uniforms: jax.Array,
    *,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Sample one token from each row, as `xla.sample`: a verification without drafts, K = 0.

    Its outputs are a token and what the kernel knows of its row, instead of a status. From a row
    that holds NaN or infinity it "samples" id 0; its maximum tells.

    Args:
      logits: ``[B, V]``, B at least 1.
      sampling: parameters of each row. As in XLA, those out of range are not refused.
      uniforms: ``[B, 2]`` float32, for tile and token.
      config: as for `verify`.
      interpret: as for `verify`.

    Returns:
      What `xla.sample` returns.
    """
    (batch, size), filter = logits.shape, Filter.of(sampling)
    plan = Plan.of(
        logits,
        None,
        Standard(),
        num_requests=batch,
        num_drafts=0,
        k=0,
        size=size,
        has_bonus_rows=True,
        has_limits=filter is not None,
        config=config,
    )
    operands = Operands[jax.Array](
        target=logits,
        token_ids=_no_tokens(),
        temperature=sampling.temperature,
        recover=uniforms,
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    number = jax.ShapeDtypeStruct((batch,), jnp.float32)
    outputs = Outputs[Any](
        token_ids=jax.ShapeDtypeStruct((batch,), jnp.int32),
        log_normalizer=number,
        row_max=number,
        threshold=None if filter is None else number,
    )
    found = _run(plan, logits, operands, outputs, interpret)
    numbers: Any = found.log_normalizer, found.row_max, found.threshold
    return found.token_ids, *numbers


def _run(
    plan: Plan,
    target_logits: jax.Array,
    operands: Operands[jax.Array],
    outputs: Outputs[Any],
    interpret: Any,
) -> Outputs[Any]:
    """Launch `verify_request` for every request."""
    num_requests = operands.temperature.shape[0]
    slices, warpgroups = plan.memory.slices, plan.memory.warpgroups
    if slices.cluster == 1 and not interpret:
        raise NotImplementedError("max_cluster=1 is for interpret mode: on a GPU it is at least 2")
    if interpret:  # global memory, of each cluster
        shape = (num_requests, warpgroups, SLOTS, plan.memory.slot)
        outputs = outputs._replace(slots=jax.ShapeDtypeStruct(shape, jnp.float32))

    def verify_drafts(
        place: Place, operands: Operands[Ref], outputs: Outputs[Ref], scratch: Scratch[Ref]
    ) -> None:
        work = _work(plan, place, operands, outputs, scratch)
        verify_request(plan, place.threads, operands, outputs, place.cluster, *work)

    found: Outputs[Any] = launch(
        verify_drafts,
        operands,
        out=outputs,
        scratch=Scratch.of(plan, target_logits.dtype, interpreted=bool(interpret)),
        grid=num_requests,
        cluster=slices.cluster,
        warpgroups=warpgroups,
        interpret=interpret,
    )
    return found


def _operands(arrays: CallArrays, size: int) -> Operands[jax.Array]:
    """The arrays that the call has."""
    drafts, sampling, distribution = arrays.drafts, arrays.sampling, arrays.drafts.distribution
    token_ids, randomness = drafts.token_ids, arrays.randomness
    assert not isinstance(randomness, RaceNoise)
    noise = randomness if isinstance(randomness, Noise) else None
    keys, positions = (None, None) if isinstance(randomness, Noise) else randomness
    draft, columns, bad_map, ids = None, None, None, None
    if distribution is not None:
        draft, ids = storage_of(distribution), distribution.ids
        if ids is not None and ids.ndim == 1:
            (columns, bad_map), ids = columns_of_map(ids, size), None
    logits = distribution if isinstance(distribution, DraftLogits) else None
    return Operands(
        target=arrays.target_logits,
        token_ids=token_ids if token_ids.shape[0] else _no_tokens(),
        temperature=sampling.temperature,
        offsets=drafts.cu_num_draft_tokens,
        accept=None if noise is None else noise.accept,
        recover=None if noise is None else noise.recover,
        keys=None if keys is None else key_words(keys),
        positions=positions,
        draft=draft,
        columns=columns,
        bad_map=bad_map,
        ids=ids,
        normalizer=None if logits is None else logits.log_normalizer,
        row_max=None if logits is None else logits.row_max,
        thresholds=None if logits is None else logits.threshold,
        rows=None if distribution is None else distribution.rows,
        valid=None if distribution is None else distribution.valid,
        bonus=arrays.bonus_token_ids,
        active=arrays.active,
        bitmask=words_of(arrays.token_bitmask),
        min_p=sampling.min_p,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )


def _no_tokens() -> jax.Array:
    """What stands for an empty array, which a kernel cannot take."""
    return jnp.full((1,), -1, jnp.int32)


class Scratch(NamedTuple, Generic[X]):
    """Shared memory and barriers of a block: their types, or refs. Each warpgroup has its own.

    Attributes:
      tiles: of the target's dtype ``[warpgroups, entries of a slice]``.
      floats: float32 ``[warpgroups, scratch]``.
      flags: int32 ``[warpgroups, 2]``, or None if there is one warpgroup.
      slots: float32 ``[warpgroups, 2, floats of a slot]``; None in interpret mode.
      barriers: mbarriers, int32 ``[warpgroups, two of each]``; None in interpret mode.
      tile_barriers: in interpret mode, instead: barriers of tiles,
      completed: int32 ``[warpgroups, 2]``, phases of the slots' barriers,
      cluster_barrier: the barrier of all blocks, or None if there is one,
      block_barrier: and that of all warpgroups, likewise.
    """

    tiles: X
    floats: X
    flags: X | None
    slots: X | None
    barriers: X | None
    tile_barriers: X | None
    completed: X | None
    cluster_barrier: X | None
    block_barrier: X | None

    @classmethod
    def of(cls, plan: Plan, target_dtype: Any, *, interpreted: bool) -> Scratch[Any]:
        """What a plan asks for."""
        memory, count, smem = plan.memory, plan.memory.warpgroups, plgpu.SMEM
        tiles, several, of_cluster = memory.slices.tiles, count > 1, None
        if interpreted and memory.slices.cluster > 1:
            of_cluster = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=count)
        return Scratch[Any](
            tiles=smem((count, tiles * memory.stride), target_dtype),
            floats=smem((count, memory.scratch), jnp.float32),
            flags=smem((count, SLOTS), jnp.int32) if several else None,
            slots=None if interpreted else smem((count, SLOTS, memory.slot), jnp.float32),
            barriers=None if interpreted else smem((count, 2 * memory.barriers), jnp.int32),
            tile_barriers=plgpu.Barrier(num_barriers=count * tiles) if interpreted else None,
            completed=smem((count, SLOTS), jnp.int32) if interpreted else None,
            cluster_barrier=of_cluster,
            block_barrier=plgpu.Barrier(num_arrivals=count) if interpreted and several else None,
        )


def _work(
    plan: Plan,
    place: Place,
    operands: Operands[Ref],
    outputs: Outputs[Ref],
    scratch: Scratch[Ref],
) -> tuple[TargetSlice, DraftSlice | Candidates | None, Cluster, Warpgroups]:
    """What a warpgroup works with: its slices of rows, its cluster, and its block."""
    memory, slices = plan.memory, plan.memory.slices
    index, block, warpgroup, threads = place
    first_barrier: jax.Array | int = SLOTS
    if scratch.barriers is not None and scratch.slots is not None:
        barriers: Any = scratch.barriers.at[warpgroup]
        slots, tile_barriers = scratch.slots, barriers
    else:
        assert outputs.slots is not None and scratch.tile_barriers is not None
        assert scratch.completed is not None
        slots, tile_barriers = outputs.slots.at[index], scratch.tile_barriers
        first_barrier = warpgroup * slices.tiles
        completed, of_cluster = scratch.completed.at[warpgroup], scratch.cluster_barrier
        completed[...] = jnp.zeros((SLOTS,), jnp.int32)
        of_cluster = None if of_cluster is None else of_cluster.at[warpgroup]
        barriers = ExchangeBarriers(of_cluster, completed)
    first = block * slices.ids
    target = TargetSlice(
        threads=threads,
        rows=operands.target,
        buffer=scratch.tiles.at[warpgroup],
        barriers=tile_barriers,
        per_slice=slices.tiles,
        stride=memory.stride,
        first_barrier=first_barrier,
        first=first,
        size=plan.size,
        each=memory.each,
        bitmask=operands.bitmask,
    )
    draft = draft_rows_of(plan, threads, operands, first)
    floats, flags = scratch.floats.at[warpgroup], scratch.flags
    cluster = Cluster(threads, memory, slots.at[warpgroup], barriers, floats, block)
    warpgroups = Warpgroups(threads, memory.warpgroups, warpgroup, flags, scratch.block_barrier)
    return target, draft, cluster, warpgroups


def draft_rows_of(
    plan: Plan, threads: Threads, operands: Operands[Ref], first: jax.Array
) -> DraftSlice | Candidates | None:
    """A block's slice of draft rows, from id `first` on; None if the call has none."""
    memory, rows, fill = plan.memory, operands.draft, 0.0 if plan.entries == "probs" else -jnp.inf
    if rows is None:
        return None
    if operands.ids is not None:
        return Candidates(
            threads=threads,
            rows=rows,
            ids=operands.ids,
            first=first,
            size=plan.size,
            fill=fill,
            each=memory.each,
            sums=plan.entries == "logits",
            thresholds=operands.thresholds,
        )
    width, is_mapped = rows.shape[1], operands.columns is not None
    draft = DraftSlice(
        threads=threads,
        rows=rows,
        per_slice=memory.slices.tiles,
        first=first,
        size=width if is_mapped else plan.size,
        draft_size=width if is_mapped else plan.draft_size,
        fill=fill,
        each=memory.each,
        aligned=is_aligned(rows) and width >= memory.each,
        at_once=memory.tiles_at_once,
        thresholds=operands.thresholds,
    )
    if operands.columns is None:
        return draft
    fields = {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
    fields |= {"size": plan.size, "draft_size": plan.size, "aligned": False}
    return MappedSlice(**fields, columns=operands.columns, storage=draft)


class Place(NamedTuple):
    """Where a kernel's program runs, while it is traced.

    Attributes:
      cluster: ``[]`` int32, index of the cluster.
      block: ``[]`` int32, index of the block in its cluster.
      warpgroup: ``[]`` int32, index of the warpgroup in its block.
      threads: the operations of the warpgroup.
    """

    cluster: jax.Array
    block: jax.Array
    warpgroup: jax.Array
    threads: Threads


def launch(
    body: Callable[..., None],
    operands: Any,
    *,
    out: Any,
    scratch: Any,
    grid: int,
    cluster: int = 1,
    warpgroups: int = 1,
    interpret: Any,
) -> Any:
    """Run a kernel.

    Args:
      body: takes a `Place`, then refs in the structures of `operands`, `out` and `scratch`.
      operands: a pytree of arrays.
      out: a pytree of the shapes and dtypes of the outputs.
      scratch: a pytree of what each block has.
      grid: number of clusters.
      cluster: blocks of a cluster; 1 for independent blocks.
      warpgroups: warpgroups of a block.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      The outputs, in the structure of `out`.
    """
    axes: dict[str, Any] = {}
    if cluster > 1:
        axes = dict(cluster=(cluster,), cluster_names=("block",))
    if warpgroups > 1:
        axes |= dict(num_threads=warpgroups, thread_name="warpgroup")
    structure = jax.tree.structure((operands, out, scratch))

    def run(*refs: Ref) -> None:
        block = lax.axis_index("block") if cluster > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
        index = lax.axis_index("cluster")
        threads = InterpretedThreads() if interpret else GpuThreads()
        body(Place(index, block, warpgroup, threads), *jax.tree.unflatten(structure, refs))

    run.__name__ = body.__name__
    kernel = plgpu.kernel(
        run,
        out_type=tuple(jax.tree.leaves(out)),
        scratch_types=tuple(jax.tree.leaves(scratch)),
        grid=(grid,),
        grid_names=("cluster",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        **axes,
    )
    with jax.enable_x64(False):  # indices are int32, whatever the caller's default is
        found = kernel(*jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(out), found)
