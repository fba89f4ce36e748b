"""The kernel: what each warpgroup does for one request.

A cluster of CTAs verifies one request. Every CTA has one slice of a target row in shared memory,
and all make the same decisions from the same numbers. A row is read once its position is reached,
or with the one before it where a CTA has several warpgroups. The row to draw from is still there
when that is known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_specdec._src.base.types import Status
from jax_specdec._src.mosaic.threads import WARP, Ref, Threads
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.mosaic_gpu.block_rule import BlockRuleWalk
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster, OneWarpgroup, Warpgroups
from jax_specdec._src.verify.mosaic_gpu.drafted import (
    DraftedTokens,
    DraftLoads,
    KernelDraftRows,
    Work,
)
from jax_specdec._src.verify.mosaic_gpu.plan import Plan
from jax_specdec._src.verify.mosaic_gpu.request import (
    KernelRequest,
    Operands,
    Outputs,
    RequestLoads,
)
from jax_specdec._src.verify.mosaic_gpu.rows import TargetSlice
from jax_specdec._src.verify.mosaic_gpu.walk import Walk, copy_row


def verify_request(
    plan: Plan,
    threads: Threads,
    operands: Operands[Ref],
    outputs: Outputs[Ref],
    index: jax.Array,
    target: TargetSlice,
    draft: KernelDraftRows,
    cluster: Cluster,
    warpgroups: OneWarpgroup | Warpgroups,
) -> None:
    """Verifies one request by a warpgroup.

    What is loaded and copied, and when, is decided here. Each load begins as early as its address
    is known, and what does not need it comes between.
    """
    loads = RequestLoads.begin(plan, threads, operands, index)
    # This PTX keeps the loads above in place: all of them are in flight.
    threads.init_barriers(cluster.barriers, plan.memory.barriers)
    request = KernelRequest.of(plan, threads, operands, outputs, index, loads)
    ok = request.status == Status.OK

    @pl.when(ok)
    def _() -> None:
        # Small loads come before rows: behind these they would wait for megabytes.
        draft_loads = DraftLoads(request, target, draft)
        is_known = plan.rule.reads_one_position
        # The first row to read: one for each warpgroup, or the only one that the synthetic rule
        # reads, which its uniforms alone decide.
        position = warpgroups.index
        if is_known:
            uniforms = request.uniforms()
            position = _accepted_by_rate(request, uniforms)
        copy_row(request, target, position)
        target.fill_end()
        if warpgroups.count > 1 and plan.has_draft_rows:
            # Several rows at once are for few requests, where latency counts: the draft row is
            # fetched too, before it is known whether the position is reached.
            uses_q = threads.at(draft_loads.uses_q, position)
            pl.when(uses_q)(lambda: draft_loads.prefetch(position))
        if not is_known:  # while rows are under way
            uniforms = request.uniforms()
        drafted = DraftedTokens(draft_loads, uniforms)
        # From here on other CTAs' barriers may be signalled: all are initialized.
        threads.cluster_wait()
        work = Work(request=request, target=target, draft=draft, drafted=drafted, cluster=cluster)
        walk = Walk(work, warpgroups)
        round = jnp.int32(0)
        match plan.rule.kernel_walk:
            case "one row":  # the one that the last token comes from
                result, round = walk.visit(position, round)
                walk.emit(position, result, round)
            case "by residual masses":
                # Of a greedy request both rules accept the same drafts.
                pl.when(request.greedy)(lambda: walk.walk_and_emit(round))
                pl.when(~request.greedy)(lambda: BlockRuleWalk(walk).run(round))
            case "row by row":
                walk.walk_and_emit(round)
            case None:
                raise TypeError(f"the kernel has no walk for the rule {plan.rule.name!r}")

    @pl.when(~ok)
    def _() -> None:
        threads.cluster_wait()  # all CTAs of a cluster must
        zero = jnp.int32(0)
        request.write(zero, zero, request.status, cluster.is_first_warp())


def _accepted_by_rate(request: KernelRequest, uniforms: jax.Array) -> jax.Array:
    """Returns how many drafts the synthetic rule accepts, ``[]`` int32."""
    lane = request.lane
    threads = request.threads
    rate = threads.filled(0.0)
    for i, value in enumerate(request.plan.rule.conditional_rates):
        rate = jnp.where(lane == i, jnp.float32(value), rate)
    accepted = request.proposed & rules.accepts_synthetic(uniforms, rate)
    # By lane: its index if its draft is the end, else past every lane. The least is where it ends.
    rejected = jnp.where(accepted & (lane < request.plan.k), WARP, lane)
    return threads.scalar(threads.warp_min(rejected))
