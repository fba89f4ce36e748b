"""Launches: operands, shared memory, and a grid of clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.base.noise import key_words
from jax_specdec._src.base.sampling import Filter, SamplingParams
from jax_specdec._src.base.types import (
    DraftDistribution,
    DraftLogits,
    Noise,
    RaceNoise,
    RejectionSampleOutput,
)
from jax_specdec._src.mosaic.interpret import ExchangeBarriers, InterpretedThreads
from jax_specdec._src.mosaic.ptx import GpuThreads
from jax_specdec._src.mosaic.threads import Ref, Threads
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, OneWarpgroup, Warpgroups
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.mosaic_gpu.drafted import KernelDraftRows
from jax_specdec._src.verify.mosaic_gpu.kernel import verify_request
from jax_specdec._src.verify.mosaic_gpu.lists import CandidateRows, MappedSlice, columns_of_map
from jax_specdec._src.verify.mosaic_gpu.plan import (
    NO_DRAFT,
    SLOTS,
    DraftLayout,
    Plan,
    is_aligned,
)
from jax_specdec._src.verify.mosaic_gpu.request import (
    DraftOperands,
    GivenNoise,
    KeyNoise,
    Operands,
    Outcome,
    Outputs,
    RowNumbers,
    SampledRow,
)
from jax_specdec._src.verify.mosaic_gpu.rows import (
    DraftSlice,
    Forbidden,
    Limit,
    NoDraftRows,
    TargetSlice,
    words_of,
)
from jax_specdec._src.verify.requests import CallArrays
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
    """Verifies a batch in one launch, for a call that `support.unsupported` does not object to.

    Args:
      arrays: of the call, with M at least 1. The distribution is None or has at least one row.
      size: ids from it on are padding; at most V.
      config: settings that change the speed only, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.

    Raises:
      NotImplementedError: a cluster of one CTA on a GPU.
    """
    # Static: how the batch is cut, and what a CTA holds.
    num_requests = arrays.num_requests
    plan = Plan.of(
        arrays.target_logits,
        DraftLayout.of(arrays.drafts.distribution),
        rule,
        num_requests=num_requests,
        n=arrays.drafts.token_ids.shape[0],
        k=k,
        size=size,
        has_bonus_rows=arrays.bonus_token_ids is None,
        has_filter=Filter.of(arrays.sampling) is not None,
        has_bitmask=arrays.token_bitmask is not None,
        config=config,
    )
    # Flat, [B * (K+1)]: a lane stores at one index.
    number = jax.ShapeDtypeStruct((num_requests,), jnp.int32)
    outputs = Outputs[Any](
        token_ids=jax.ShapeDtypeStruct((num_requests * (k + 1),), jnp.int32),
        numbers=Outcome[Any](num_accepted=number, num_emitted=number, status=number),
    )
    # [B * (K+1)] -> [B, K+1]
    found = _run(plan, _operands_of(arrays, size), outputs, interpret)
    verdict: Any = found.numbers
    return RejectionSampleOutput(
        token_ids=found.token_ids.reshape(num_requests, k + 1),
        num_accepted=verdict.num_accepted,
        num_emitted=verdict.num_emitted,
        status=verdict.status,
    )


def sample(
    logits: jax.Array,
    sampling: SamplingParams,
    uniforms: jax.Array,
    *,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Samples one token from each row, as `Gather.sample`: a verification without drafts, K = 0.

    Its outputs are a token and what the kernel knows of its row, instead of a status. From a row
    that holds NaN or infinity it "samples" id 0; its maximum shows it.

    Args:
      logits: ``[B, V]``, B at least 1.
      sampling: parameters of each row. As in XLA, those out of range are not refused.
      uniforms: ``[B, 2]`` float32, for tile and token.

    Returns:
      What `Gather.sample` returns.
    """
    # K = 0: each request owns one row, the bonus row.
    batch, size = logits.shape
    has_filter = Filter.of(sampling) is not None
    plan = Plan.of(
        logits,
        NO_DRAFT,
        Standard(),
        num_requests=batch,
        n=0,
        k=0,
        size=size,
        has_bonus_rows=True,
        has_filter=has_filter,
        has_bitmask=False,
        config=config,
    )
    operands = Operands[jax.Array](
        target=logits,
        token_ids=_no_tokens(),
        temperature=sampling.temperature,
        offsets=None,
        noise=GivenNoise(None, uniforms),
        draft=None,
        row_of_draft=None,
        valid=None,
        bonus=None,
        active=None,
        bitmask=None,
        filter=Filter(sampling.min_p, sampling.top_k, sampling.top_p),
    )
    number = jax.ShapeDtypeStruct((batch,), jnp.float32)
    outputs = Outputs[Any](
        token_ids=jax.ShapeDtypeStruct((batch,), jnp.int32),
        numbers=SampledRow[Any](
            log_normalizer=number, row_max=number, threshold=number if has_filter else None
        ),
    )
    # [B] each: a token, and what normalizes the row it was drawn from
    found = _run(plan, operands, outputs, interpret)
    row: Any = found.numbers
    return found.token_ids, row.log_normalizer, row.row_max, row.threshold


def _run(
    plan: Plan, operands: Operands[jax.Array], outputs: Outputs[Any], interpret: Any
) -> Outputs[Any]:
    """Launches `verify_request` for every request."""
    num_requests = operands.temperature.shape[0]
    memory = plan.memory
    if memory.slices.cluster == 1 and not interpret:
        raise NotImplementedError("max_cluster=1 is for interpret mode: on a GPU it is at least 2")
    # In interpret mode, CTAs exchange through global memory, of each cluster.
    shared: Any = None
    scratch: GpuScratch[Any] | InterpretScratch[Any]
    if interpret:
        # [B, warpgroups, 2, floats of a slot]
        shape = (num_requests, memory.warpgroups, SLOTS, memory.slot)
        shared = jax.ShapeDtypeStruct(shape, jnp.float32)
        scratch = InterpretScratch.of(plan, operands.target.dtype)
    else:
        scratch = GpuScratch.of(plan, operands.target.dtype)

    # What each warpgroup does for one request: it takes up what it has, then verifies.
    def verify_drafts(place: GridPosition, operands: Operands[Ref], out: Any, scratch: Any) -> None:
        outputs, shared = out
        own = scratch.of_warpgroup(plan, place, shared)
        first = place.cta * memory.slices.ids
        # Its slice of every row begins at the same id.
        limits: tuple[Limit, ...] = ()
        if operands.bitmask is not None:
            limits = (Forbidden(operands.bitmask),)
        target = TargetSlice(
            threads=place.threads,
            matrix=operands.target,
            per_slice=memory.slices.tiles,
            first=first,
            size=plan.size,
            each=memory.each,
            buffer=own.tiles,
            barriers=own.tile_barriers,
            stride=memory.stride,
            first_barrier=own.first_barrier,
            limits=limits,
        )
        cluster = Cluster(
            threads=place.threads,
            memory=memory,
            slots=own.slots,
            barriers=own.barriers,
            scratch=own.floats,
            cta=place.cta,
        )
        draft = draft_rows_of(plan, place.threads, operands.draft, first)
        verify_request(
            plan,
            place.threads,
            operands,
            outputs,
            place.cluster,
            target,
            draft,
            cluster,
            own.warpgroups,
        )

    outputs, _ = launch(
        verify_drafts,
        operands,
        out=(outputs, shared),
        scratch=scratch,
        grid=num_requests,
        cluster=memory.slices.cluster,
        warpgroups=memory.warpgroups,
        interpret=interpret,
    )
    return outputs


# Operands.


def _operands_of(arrays: CallArrays, size: int) -> Operands[jax.Array]:
    """Returns the arrays that a call has."""
    drafts = arrays.drafts
    sampling = arrays.sampling
    randomness = arrays.randomness
    assert not isinstance(randomness, RaceNoise)
    none = jnp.zeros((arrays.num_requests,), jnp.int32)  # greedy requests alone need no noise
    # Uniforms that are given, or that the kernel draws itself from the words of keys.
    noise: GivenNoise[jax.Array] | KeyNoise[jax.Array]
    if isinstance(randomness, Noise):
        noise = GivenNoise(randomness.accept, randomness.recover)
    else:
        keys, positions = randomness
        words = jnp.zeros((*none.shape, 2), jnp.uint32) if keys is None else key_words(keys)
        noise = KeyNoise(words, none if positions is None else positions)
    # What the draft distribution has, for all drafts and for each.
    distribution = drafts.distribution
    draft = row_of_draft = valid = None
    if distribution is not None:
        draft = _draft_of(distribution, size)
        row_of_draft = distribution.rows
        valid = distribution.valid
    # Greedy requests alone come without a temperature.
    return Operands(
        target=arrays.target_logits,
        token_ids=drafts.token_ids if drafts.token_ids.shape[0] else _no_tokens(),
        temperature=none.astype(jnp.float32) if arrays.is_greedy else sampling.temperature,
        offsets=drafts.cu_num_draft_tokens,
        noise=noise,
        draft=draft,
        row_of_draft=row_of_draft,
        valid=valid,
        bonus=arrays.bonus_token_ids,
        active=arrays.active,
        bitmask=jax.tree.map(words_of, arrays.token_bitmask),
        filter=Filter(sampling.min_p, sampling.top_k, sampling.top_p),
    )


def _draft_of(distribution: DraftDistribution, size: int) -> DraftOperands[jax.Array]:
    """Returns the arrays that a draft distribution has."""
    # Which ids the columns stand for. A map is turned round once for the whole batch.
    ids = distribution.ids
    columns = bad = None
    if ids is not None and ids.ndim == 1:
        columns, bad = columns_of_map(ids, size)
        ids = None
    # What the drafter stored beside each row.
    numbers = RowNumbers[jax.Array]()
    thresholds = None
    if isinstance(distribution, DraftLogits):
        numbers = RowNumbers(distribution.log_normalizer, distribution.row_max)
        thresholds = distribution.threshold
    return DraftOperands(
        matrix=storage_of(distribution),
        columns=columns,
        bad=bad,
        ids=ids,
        numbers=numbers,
        thresholds=thresholds,
    )


def _no_tokens() -> jax.Array:
    """Returns what stands for an empty array, which a kernel cannot take."""
    return jnp.full((1,), -1, jnp.int32)


def draft_rows_of(
    plan: Plan, threads: Threads, operands: DraftOperands[Ref] | None, first: jax.Array
) -> KernelDraftRows:
    """Returns a CTA's slice of draft rows, from id `first` on."""
    if operands is None:
        return NoDraftRows()
    memory = plan.memory
    # Rows of candidates are read whole, other rows by the slices of target rows.
    matrix = operands.matrix
    # The probability of an id that the drafter could not draw is 0: fill is its entry.
    fill = 0.0 if plan.entries == "probs" else -jnp.inf
    if operands.ids is not None:
        return CandidateRows(
            threads=threads,
            matrix=matrix,
            ids=operands.ids,
            first=first,
            size=plan.size,
            fill=fill,
            each=memory.each,
            sums=plan.entries == "logits",
            thresholds=operands.thresholds,
        )
    width = matrix.shape[1]
    # In the order of ids, or of the columns that a map gives them. The sum of a row needs no map:
    # `storage` is read in the order of columns, by as many CTAs.
    common: dict[str, Any] = dict(
        threads=threads,
        matrix=matrix,
        per_slice=memory.slices.tiles,
        first=first,
        each=memory.each,
        fill=fill,
        at_once=memory.tiles_at_once,
        thresholds=operands.thresholds,
    )
    # Whether a thread may load `each` entries of a row at once.
    aligned = is_aligned(matrix) and width >= memory.each
    if operands.columns is None:
        return DraftSlice(size=plan.size, draft_size=plan.draft_size, aligned=aligned, **common)
    return MappedSlice(
        size=plan.size,
        draft_size=plan.size,
        aligned=False,  # entries of ids in order lie anywhere
        columns=operands.columns,
        storage=DraftSlice(size=width, draft_size=width, aligned=aligned, **common),
        **common,
    )


# Shared memory and barriers.


class OfWarpgroup(NamedTuple):
    """Shared memory and barriers of one warpgroup."""

    tiles: Ref  # flat ref, of the target's dtype, for a slice of a target row
    floats: Ref  # float32 ref, for exchanges in a CTA
    slots: Ref  # float32 ref [2, floats of a slot], for exchanges in the cluster
    barriers: Any  # of the slots
    tile_barriers: Any  # of the tiles
    first_barrier: jax.Array | int  # the first of these
    warpgroups: OneWarpgroup | Warpgroups  # those of the CTA


class GpuScratch(NamedTuple, Generic[X]):
    """Shared memory and barriers of a CTA: their types, or refs. Each warpgroup has its own."""

    tiles: X  # of the target's dtype [warpgroups, entries of a slice]
    floats: X  # float32 [warpgroups, scratch]
    flags: X | None  # int32 [warpgroups, 2]; None if there is one warpgroup
    slots: X  # float32 [warpgroups, 2, floats of a slot]
    barriers: X  # mbarriers, int32 [warpgroups, two of each]: of slots, then of tiles

    @classmethod
    def of(cls, plan: Plan, target_dtype: Any) -> GpuScratch[Any]:
        """Returns what a plan asks for."""
        memory = plan.memory
        # Memory for each warpgroup, and one barrier for every slot and tile.
        count = memory.warpgroups
        smem = plgpu.SMEM
        return GpuScratch[Any](
            tiles=smem((count, memory.slices.tiles * memory.stride), target_dtype),
            floats=smem((count, memory.scratch), jnp.float32),
            flags=smem((count, SLOTS), jnp.int32) if count > 1 else None,
            slots=smem((count, SLOTS, memory.slot), jnp.float32),
            barriers=smem((count, 2 * memory.barriers), jnp.int32),  # 64 bits each
        )

    def of_warpgroup(self, plan: Plan, place: GridPosition, shared: None) -> OfWarpgroup:
        """Returns what a warpgroup has of it; a cluster shares nothing else."""
        refs: GpuScratch[Any] = self
        # Barriers of the two slots come first, then those of tiles.
        barriers = refs.barriers.at[place.warpgroup]
        return OfWarpgroup(
            tiles=refs.tiles.at[place.warpgroup],
            floats=refs.floats.at[place.warpgroup],
            slots=refs.slots.at[place.warpgroup],
            barriers=barriers,
            tile_barriers=barriers,
            first_barrier=SLOTS,
            warpgroups=_warpgroups_of(plan, place, self.flags, None),
        )


class InterpretScratch(NamedTuple, Generic[X]):
    """Stands for `GpuScratch` in interpret mode; slots are in global memory there."""

    tiles: X  # as there, and so are the next two
    floats: X  # see there
    flags: X | None  # see there
    tile_barriers: X  # barriers of all warpgroups' tiles
    completed: X  # int32 [warpgroups, 2], phases of the slots' barriers
    of_cluster: X | None  # the barrier of all CTAs; None if there is one
    of_cta: X | None  # that of all warpgroups; likewise

    @classmethod
    def of(cls, plan: Plan, target_dtype: Any) -> InterpretScratch[Any]:
        """Returns what a plan asks for."""
        memory = plan.memory
        count = memory.warpgroups
        smem = plgpu.SMEM
        # Arrivals of all CTAs, one barrier for each of their warpgroups.
        of_cluster = None
        if memory.slices.cluster > 1:
            of_cluster = plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=count)
        return InterpretScratch[Any](
            tiles=smem((count, memory.slices.tiles * memory.stride), target_dtype),
            floats=smem((count, memory.scratch), jnp.float32),
            flags=smem((count, SLOTS), jnp.int32) if count > 1 else None,
            tile_barriers=plgpu.Barrier(num_barriers=count * memory.slices.tiles),
            completed=smem((count, SLOTS), jnp.int32),
            of_cluster=of_cluster,
            of_cta=plgpu.Barrier(num_arrivals=count) if count > 1 else None,
        )

    def of_warpgroup(self, plan: Plan, place: GridPosition, shared: Ref) -> OfWarpgroup:
        """Returns what a warpgroup has of it; `shared` are the slots of all clusters."""
        refs: InterpretScratch[Any] = self
        # A CTA cannot store in another's shared memory here: all of a cluster share its slots.
        slots = shared.at[place.cluster]
        # Phases are counted from 0, by this warpgroup.
        completed = refs.completed.at[place.warpgroup]
        completed[...] = jnp.zeros((SLOTS,), jnp.int32)  # shared memory begins with rubbish
        of_cluster = None if refs.of_cluster is None else refs.of_cluster.at[place.warpgroup]
        return OfWarpgroup(
            tiles=refs.tiles.at[place.warpgroup],
            floats=refs.floats.at[place.warpgroup],
            slots=slots.at[place.warpgroup],
            barriers=ExchangeBarriers(of_cluster, completed),
            tile_barriers=refs.tile_barriers,
            first_barrier=place.warpgroup * plan.memory.slices.tiles,
            warpgroups=_warpgroups_of(plan, place, self.flags, self.of_cta),
        )


def _warpgroups_of(
    plan: Plan, place: GridPosition, flags: Any, barrier: Any
) -> OneWarpgroup | Warpgroups:
    """Returns the warpgroups of a CTA; with one there are no flags and no barrier."""
    if plan.memory.warpgroups == 1:
        return OneWarpgroup(place.warpgroup)
    return Warpgroups(
        threads=place.threads,
        count=plan.memory.warpgroups,
        index=place.warpgroup,
        flags=flags,
        barrier=barrier,
    )


# The launch.


class GridPosition(NamedTuple):
    """Place of a kernel's program in the grid, while it is traced."""

    cluster: jax.Array  # [] int32, index of the cluster
    cta: jax.Array  # [] int32, index of the CTA in its cluster
    warpgroup: jax.Array  # [] int32, index of the warpgroup in its CTA
    threads: Threads  # the operations of the warpgroup


def launch(
    body: Callable[..., None],
    operands: Any,
    *,
    out: Any,
    scratch: Any,
    grid: int,
    cluster: int,
    warpgroups: int,
    interpret: Any,
) -> Any:
    """Runs a kernel.

    Args:
      body: takes a `GridPosition`, then refs in the structures of `operands`, `out` and `scratch`.
      operands: a pytree of arrays.
      out: a pytree of the shapes and dtypes of the outputs.
      scratch: a pytree of what each CTA has.
      grid: number of clusters.
      cluster: CTAs of a cluster.
      warpgroups: warpgroups of a CTA.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      The outputs, in the structure of `out`.
    """
    # An axis for what there is more than one of; indices of the others are 0.
    axes: dict[str, Any] = {}
    if cluster > 1:
        axes |= dict(cluster=(cluster,), cluster_names=("cta",))
    if warpgroups > 1:
        axes |= dict(num_threads=warpgroups, thread_name="warpgroup")
    # A kernel takes flat lists of refs. Fields that are absent have no leaf, and take no parameter.
    structure = jax.tree.structure((operands, out, scratch))

    def run(*refs: Ref) -> None:
        # `pl.program_id` is silently 0 in interpret mode; the index of an axis is right.
        cta = lax.axis_index("cta") if cluster > 1 else jnp.int32(0)
        warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
        index = lax.axis_index("cluster")
        threads = InterpretedThreads() if interpret else GpuThreads()
        # Refs come back in the structures that they were given in.
        given, outputs, own = jax.tree.unflatten(structure, refs)
        body(GridPosition(index, cta, warpgroup, threads), given, outputs, own)

    run.__name__ = body.__name__
    kernel = plgpu.kernel(
        run,
        out_type=tuple(jax.tree.leaves(out)),
        scratch_types=tuple(jax.tree.leaves(scratch)),
        grid=(grid,),
        grid_names=("cluster",),  # a request each
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp2, log2 and divisions by the hardware's instructions
            # All barriers are set by hand: between two, threads touch different entries.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        **axes,
    )
    with jax.enable_x64(False):  # indices are int32, whatever the caller's default is
        found = kernel(*jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(out), found)
