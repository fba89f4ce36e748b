"""The Mosaic GPU backend: how its arguments are laid out, and the launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.types import DraftDistribution, DraftProbs, RejectionSampleOutput
from jax_specdec._src.verify.decide import Request
from jax_specdec._src.verify.mosaic_gpu.block import MAILBOX, Block, Call
from jax_specdec._src.verify.mosaic_gpu.buffers import RowBuffer, TileRing
from jax_specdec._src.verify.mosaic_gpu.config import (
    LANES,
    TILE_ROWS,
    KernelConfig,
    Slices,
    vector_rows,
)
from jax_specdec._src.verify.mosaic_gpu.kernel import Verifier
from jax_specdec._src.verify.mosaic_gpu.support import storage_of, unsupported


def verify(
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    *,
    size: int,
    conditional_rates: tuple[float, ...] | None,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> RejectionSampleOutput:
    """Verify a batch in one launch.

    Args:
      requests: batched requests.
      target_logits: ``[M, V]``, M at least 1.
      distribution: draft distributions, or None where every request is one-hot.
      size: ids that count, at most V.
      conditional_rates: K rates of the synthetic rule, or None for greedy and standard.
      config: choices of speed, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.

    Raises:
      NotImplementedError: the kernel cannot serve this call.
    """
    batch, k = requests.token_ids.shape
    config = KernelConfig.choose(batch) if config is None else config
    why_not = unsupported(requests, target_logits, distribution, size=size, config=config)
    if why_not is not None:
        raise NotImplementedError(why_not)
    storage = None if distribution is None else storage_of(distribution)
    slices = Slices.of(size, config.max_cluster)

    kind = "none"
    operands = {
        "integers": _packed(requests),
        "target": _rows(target_logits),
    }
    if distribution is not None and storage is not None:
        kind = "probs"
        operands["draft"] = _rows(storage)
        if not isinstance(distribution, DraftProbs):
            kind = "logits"
            if distribution.log_normalizer is not None:
                kind = "normalized"
                operands["normalizer"] = distribution.log_normalizer
    call = Call(
        k=k,
        size=size,
        has_bonus=requests.bonus_token_id is not None,
        rates=conditional_rates,
        draft=kind,
        draft_rows=0 if storage is None else storage.shape[0],
        draft_size=0 if storage is None else min(storage.shape[1], size),
        slices=slices,
        config=config,
        interpreted=bool(interpret),
    )
    return _launch(call, operands, batch, interpret)


def _rows(matrix: jax.Array) -> jax.Array:
    return matrix.reshape(matrix.shape[0], matrix.shape[1] // LANES, LANES)


def _packed(requests: Request) -> jax.Array:
    """``[B, 9 + 3K]`` int32, columns as `block` names them."""
    assert requests.recover is not None
    bonus = requests.bonus_token_id
    columns = [
        requests.first_row,
        requests.num_drafts,
        requests.status,
        requests.greedy.astype(jnp.int32),
        requests.stored.astype(jnp.int32),
        jnp.zeros_like(requests.status) if bonus is None else bonus,
    ]
    stacked = jnp.stack(columns, axis=1)
    inv = requests.inv_temperature[:, None]
    numbers = [
        lax.bitcast_convert_type(x, jnp.int32) for x in (inv, requests.recover, requests.accept)
    ]
    ids = [requests.token_ids, requests.draft_rows]
    return jnp.concatenate([stacked, *ids, *numbers], axis=1)


def _draft_tiles(call: Call) -> int:
    """Tiles of the draft row held at a time; 0 for the whole slice."""
    tiles = call.config.draft_tiles
    if call.draft == "logits" or tiles >= call.slices.tiles:
        return 0
    return tiles


def _launch(
    call: Call, operands: dict[str, jax.Array], batch: int, interpret: Any
) -> RejectionSampleOutput:
    slices, draft = call.slices, operands.get("draft")
    target = operands["target"]
    vector = vector_rows(target.dtype, target.dtype if draft is None else draft.dtype)
    integer = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    outputs = {
        "token_ids": integer((batch, call.k + 1)),
        "num_accepted": integer((batch,)),
        "num_emitted": integer((batch,)),
        "status": integer((batch,)),
    }
    scratch: dict[str, Any] = {
        "target_slice": plgpu.SMEM((slices.rows, LANES), target.dtype),
        "target_arrived": plgpu.Barrier(),
        "weights": plgpu.SMEM((vector, LANES), jnp.float32),
        "tile_masses": plgpu.SMEM((slices.tiles,), jnp.float32),
    }
    draft_tiles = _draft_tiles(call)
    if draft is not None:
        whole, some = (slices.rows, LANES), (draft_tiles, TILE_ROWS, LANES)
        scratch["draft_slice"] = plgpu.SMEM(some if draft_tiles else whole, draft.dtype)
        scratch["draft_arrived"] = plgpu.Barrier(num_barriers=max(draft_tiles, 1))
    if slices.cluster > 1:
        if call.interpreted:
            outputs["mail"] = jax.ShapeDtypeStruct((batch, call.k + 2, MAILBOX), jnp.float32)
            scratch["meeting"] = plgpu.ClusterBarrier(collective_axes=("block",))
        else:
            scratch["mail"] = plgpu.SMEM((2 * MAILBOX,), jnp.float32)
            scratch["meeting"] = plgpu.SMEM((4,), jnp.int32)
    names = [*operands, *outputs, *scratch]

    def verify_drafts(*args: Any) -> None:
        refs = dict(zip(names, args, strict=True))
        request = lax.axis_index("request")
        index = lax.axis_index("block") if slices.cluster > 1 else jnp.int32(0)

        def buffer(name: str, size: int, fill: float) -> dict[str, Any]:
            return dict(
                rows=refs[name],
                ref=refs[f"{name}_slice"],
                barrier=refs[f"{name}_arrived"],
                slices=slices,
                size=size,
                fill=fill,
                block=index,
                vector=vector,
                interpreted=call.interpreted,
            )

        draft_buffer: RowBuffer | None = None
        if draft is not None:
            held = buffer("draft", call.draft_size, 0.0 if call.draft == "probs" else -jnp.inf)
            masked = not call.draft_size == call.size == draft.shape[1] * LANES
            draft_buffer = TileRing(**held, masked=masked) if draft_tiles else RowBuffer(**held)
        target_buffer = RowBuffer(**buffer("target", call.size, -jnp.inf))
        Verifier(Block(call, refs, request, index), target_buffer, draft_buffer).run()

    cluster: dict[str, Any] = {}
    if slices.cluster > 1:
        cluster = dict(cluster=(slices.cluster,), cluster_names=("block",))
    kernel = plgpu.kernel(
        verify_drafts,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(scratch.values()),
        grid=(batch,),
        grid_names=("request",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
        **cluster,
    )
    token_ids, num_accepted, num_emitted, status, *_ = kernel(*operands.values())
    return RejectionSampleOutput(token_ids, num_accepted, num_emitted, status)
