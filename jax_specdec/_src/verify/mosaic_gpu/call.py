"""The Mosaic GPU backend: its operands, and the launch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.noise import key_words
from jax_specdec._src.types import (
    DraftLogits,
    Noise,
    RaceNoise,
    RejectionSampleOutput,
)
from jax_specdec._src.verify.mosaic_gpu import signals
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig, Shared
from jax_specdec._src.verify.mosaic_gpu.draft_rows import DraftRows
from jax_specdec._src.verify.mosaic_gpu.interpreted import Interpreted
from jax_specdec._src.verify.mosaic_gpu.kernel import Verifier
from jax_specdec._src.verify.mosaic_gpu.launch import launch
from jax_specdec._src.verify.mosaic_gpu.mail import Mail
from jax_specdec._src.verify.mosaic_gpu.request import Call, Request
from jax_specdec._src.verify.mosaic_gpu.rows import Tiles
from jax_specdec._src.verify.mosaic_gpu.support import plan
from jax_specdec._src.verify.mosaic_gpu.threads import Gpu
from jax_specdec._src.verify.mosaic_gpu.warpgroups import Warpgroups
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
    """Verify a batch in one launch, of a call that `support.unsupported` has nothing against.

    Args:
      arrays: of the call, M at least 1, the distribution with at least one row or None.
      rule: the rule.
      k: K.
      size: ids that count, at most V.
      config: choices of speed, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.
    """
    target_logits, drafts, randomness, sampling, bonus_token_ids, active, token_bitmask = arrays
    num_requests, distribution = sampling.temperature.shape[0], drafts.distribution
    assert not isinstance(randomness, RaceNoise)

    token_ids = drafts.token_ids
    operands: dict[str, Any] = {
        "target": target_logits,
        "token_ids": token_ids if token_ids.shape[0] else jnp.full((1,), -1, jnp.int32),
        "offsets": drafts.cu_num_draft_tokens,
        "temperature": sampling.temperature,
        **_random_operands(randomness),
    }
    kind = "none"
    if distribution is not None:
        kind = "probs"
        operands["draft"] = storage_of(distribution)
        if isinstance(distribution, DraftLogits):
            normalizer = distribution.log_normalizer
            kind = "logits" if normalizer is None else "normalized"
            operands["normalizer"] = normalizer
            operands["thresholds"] = distribution.threshold
        operands["rows"] = distribution.rows
        operands["valid"] = distribution.valid
    operands["bonus"] = bonus_token_ids
    operands["active"] = active
    if token_bitmask is not None:
        operands["bitmask"] = lax.bitcast_convert_type(token_bitmask, jnp.int32)
    operands["min_p"], operands["top_k"] = sampling.min_p, sampling.top_k
    operands["top_p"] = sampling.top_p
    hides = any(operands.get(x) is not None for x in ("bitmask", "min_p", "top_k", "top_p"))
    call = Call(
        k=k,
        size=size,
        has_bonus_rows=bonus_token_ids is None,
        num_drafts=token_ids.shape[0],
        num_rows=token_ids.shape[0] + (num_requests if bonus_token_ids is None else 0),
        rates=rule.conditional_rates,
        block=rule.is_block,
        is_plain=not hides and not rule.is_block,
        draft=kind,
        draft_rows=operands["draft"].shape[0] if kind != "none" else 0,
        draft_size=min(operands["draft"].shape[1], size) if kind != "none" else 0,
    )
    shared = plan(
        target_logits,
        distribution,
        num_requests=num_requests,
        k=k,
        walks=rule.method == "standard",
        is_plain=call.is_plain,
        size=size,
        config=config,
    )
    present = {name: x for name, x in operands.items() if x is not None}
    return _launch(call, shared, present, num_requests, interpret)


def _random_operands(randomness: Noise | tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    if isinstance(randomness, Noise):
        return {"accept": randomness.accept, "recover": randomness.recover}
    keys, positions = randomness
    return {"keys": key_words(keys), "positions": positions}


def _launch(
    call: Call,
    shared: Shared,
    operands: dict[str, Any],
    num_requests: int,
    interpret: Any,
) -> RejectionSampleOutput:
    slices, interpreted = shared.slices, bool(interpret)
    outputs = {
        "token_ids_out": (num_requests * (call.k + 1),),
        "num_accepted": (num_requests,),
        "num_emitted": (num_requests,),
        "status": (num_requests,),
    }
    warpgroups, held = shared.warpgroups, slices.tiles * shared.target_stride
    scratch: dict[str, Any] = {
        "target_held": plgpu.SMEM((warpgroups, held), operands["target"].dtype)
    }
    if interpreted:
        scratch["barriers"] = plgpu.Barrier(num_barriers=warpgroups * slices.tiles)
    else:
        scratch["mail"] = plgpu.SMEM((warpgroups, shared.mail), jnp.float32)
        scratch["barriers"] = plgpu.SMEM((warpgroups, 2 * shared.barriers), jnp.int32)
    if warpgroups > 1:
        scratch["flags"] = plgpu.SMEM((warpgroups, 2), jnp.int32)
        if interpreted:
            scratch["met"] = plgpu.Barrier(num_arrivals=warpgroups)
    names = [*operands, *outputs, *scratch]

    def verify_drafts(*args: Any) -> None:
        refs = dict(zip(names, args, strict=True))
        threads: Any = Interpreted() if interpreted else Gpu()
        block = jnp.int32(0) if interpreted else lax.axis_index("block")
        warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else jnp.int32(0)
        barriers, mail = refs["barriers"], None
        if not interpreted:
            barriers, mail = barriers.at[warpgroup], refs["mail"].at[warpgroup]

        def open_barriers() -> None:
            if not interpreted:
                signals.open_barriers(barriers, shared.barriers)

        cut: Any = {
            "threads": threads,
            "per_slice": slices.tiles,
            "first": block * slices.ids,
            "each": shared.each,
        }
        target = Tiles(
            **cut,
            rows=refs["target"],
            held=refs["target_held"].at[warpgroup],
            barriers=barriers,
            first_barrier=warpgroup * slices.tiles if interpreted else 3,
            stride=shared.target_stride,
            size=call.size,
            bitmask=refs.get("bitmask"),
        )
        draft = None
        if call.draft != "none":
            draft = DraftRows(
                **cut,
                rows=refs["draft"],
                size=call.draft_size,
                row_size=call.size,
                fill=0.0 if call.draft == "probs" else -jnp.inf,
                aligned=shared.draft_aligned,
                at_once=shared.tiles_at_once,
                thresholds=refs.get("thresholds"),
            )
        Verifier(
            call,
            Request(call, threads, refs, lax.axis_index("request"), open_barriers),
            target,
            draft,
            Mail(threads, shared, mail, barriers, block),
            Warpgroups(threads, warpgroups, warpgroup, refs.get("flags"), refs.get("met")),
        ).run()

    token_ids, num_accepted, num_emitted, status = launch(
        verify_drafts,
        list(operands.values()),
        out=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outputs.values()],
        scratch=list(scratch.values()),
        grid=("request", num_requests),
        cluster=slices.cluster,
        warpgroups=warpgroups,
        interpret=interpret,
    )
    token_ids = token_ids.reshape(num_requests, call.k + 1)
    return RejectionSampleOutput(token_ids, num_accepted, num_emitted, status)
