"""The Mosaic GPU backend: its operands, and the launch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.config import RejectionSampleMethod
from jax_specdec._src.noise import draw_noise, is_threefry
from jax_specdec._src.types import (
    DraftLogits,
    Drafts,
    Noise,
    RaceNoise,
    RejectionSampleOutput,
    SamplingParams,
)
from jax_specdec._src.verify.mosaic_gpu import signals
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig, Shared
from jax_specdec._src.verify.mosaic_gpu.interpreted import Interpreted
from jax_specdec._src.verify.mosaic_gpu.kernel import Verifier
from jax_specdec._src.verify.mosaic_gpu.launch import launch
from jax_specdec._src.verify.mosaic_gpu.mail import Mail
from jax_specdec._src.verify.mosaic_gpu.request import Call, Request
from jax_specdec._src.verify.mosaic_gpu.rows import Tiles
from jax_specdec._src.verify.mosaic_gpu.support import plan
from jax_specdec._src.verify.mosaic_gpu.threads import Gpu
from jax_specdec._src.verify.rows import storage_of


def verify(
    target_logits: jax.Array,
    drafts: Drafts,
    randomness: Noise | RaceNoise | tuple[jax.Array, jax.Array],
    sampling: SamplingParams,
    bonus_token_ids: jax.Array | None,
    active: jax.Array | None,
    token_bitmask: jax.Array | None = None,
    *,
    k: int,
    size: int,
    method: RejectionSampleMethod,
    conditional_rates: tuple[float, ...] | None,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> RejectionSampleOutput:
    """Verify a batch in one launch, of a call that `support.unsupported` has nothing against.

    Args:
      target_logits: ``[M, V]``, M at least 1.
      drafts: as in `rejection_sample`, a distribution with at least one row or None.
      randomness: noise, or keys ``[B]`` and positions ``[B]`` to draw it from.
      sampling: per-request parameters.
      bonus_token_ids: ``[B]`` int32 or None.
      active: ``[B]`` bool or None.
      token_bitmask: ``[M, ceil(V/32)]`` int32 or uint32, or None.
      k: K.
      size: ids that count, at most V.
      method: the rule for sampled requests.
      conditional_rates: K rates of the synthetic rule, or None for the others.
      config: choices of speed, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.
    """
    num_requests, distribution = sampling.temperature.shape[0], drafts.distribution
    assert not isinstance(randomness, RaceNoise)

    token_ids = drafts.token_ids
    operands: dict[str, Any] = {
        "target": target_logits,
        "token_ids": token_ids if token_ids.shape[0] else jnp.full((1,), -1, jnp.int32),
        "offsets": drafts.cu_num_draft_tokens,
        "temperature": sampling.temperature,
        **_random_operands(randomness, k),
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
    call = Call(
        k=k,
        size=size,
        has_bonus_rows=bonus_token_ids is None,
        num_drafts=token_ids.shape[0],
        rates=conditional_rates,
        block=method == "block",
        draft=kind,
        draft_rows=operands["draft"].shape[0] if kind != "none" else 0,
        draft_size=min(operands["draft"].shape[1], size) if kind != "none" else 0,
    )
    shared = plan(target_logits, distribution, num_requests=num_requests, size=size, config=config)
    present = {name: x for name, x in operands.items() if x is not None}
    return _launch(call, shared, present, num_requests, interpret)


def _random_operands(
    randomness: Noise | tuple[jax.Array, jax.Array], k: int
) -> dict[str, jax.Array]:
    if isinstance(randomness, tuple) and is_threefry(randomness[0]):
        keys, positions = randomness
        return {"keys": jax.random.key_data(keys), "positions": positions}
    noise = draw_noise(*randomness, k) if isinstance(randomness, tuple) else randomness
    assert noise.recover is not None
    return {"accept": noise.accept, "recover": noise.recover}


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
    scratch: dict[str, Any] = {
        "target_held": plgpu.SMEM((slices.tiles * shared.target_stride,), operands["target"].dtype)
    }
    if shared.draft_tiles:
        scratch["draft_held"] = plgpu.SMEM(
            (shared.draft_tiles * shared.draft_stride,), operands["draft"].dtype
        )
    if interpreted:
        scratch["target_arrived"] = plgpu.Barrier(num_barriers=slices.tiles)
        if shared.draft_tiles:
            scratch["draft_arrived"] = plgpu.Barrier(num_barriers=shared.draft_tiles)
    else:
        scratch["mail"] = plgpu.SMEM((shared.mail,), jnp.float32)
        scratch["barriers"] = plgpu.SMEM((2 * shared.barriers,), jnp.int32)
    names = [*operands, *outputs, *scratch]

    def verify_drafts(*args: Any) -> None:
        refs = dict(zip(names, args, strict=True))
        threads: Any = Interpreted() if interpreted else Gpu()
        block = jnp.int32(0) if interpreted else lax.axis_index("block")
        if not interpreted:
            signals.open_barriers(refs["barriers"], shared.barriers)

        def tiles(name: str, slots: int, first_barrier: int, **kwargs: Any) -> Tiles:
            return Tiles(
                threads=threads,
                rows=refs[name],
                held=refs[f"{name}_held"],
                barriers=refs[f"{name}_arrived" if interpreted else "barriers"],
                slots=slots,
                per_slice=slices.tiles,
                first_barrier=first_barrier,
                first=block * slices.ids,
                row_size=call.size,
                each=shared.each,
                **kwargs,
            )

        stride = shared.target_stride
        target = tiles(
            "target",
            slices.tiles,
            3,
            stride=stride,
            size=call.size,
            fill=-jnp.inf,
            bitmask=refs.get("bitmask"),
        )
        draft = None
        if shared.draft_tiles:
            draft = tiles(
                "draft",
                shared.draft_tiles,
                3 + slices.tiles,
                stride=shared.draft_stride,
                size=call.draft_size,
                fill=0.0 if call.draft == "probs" else -jnp.inf,
                thresholds=refs.get("thresholds"),
            )
        mail = Mail(threads, shared, refs.get("mail"), refs.get("barriers"), block)
        request = Request(call, threads, refs, lax.axis_index("request"))
        Verifier(call, request, target, draft, mail).run()

    token_ids, num_accepted, num_emitted, status = launch(
        verify_drafts,
        list(operands.values()),
        out=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outputs.values()],
        scratch=list(scratch.values()),
        grid=("request", num_requests),
        cluster=slices.cluster,
        interpret=interpret,
    )
    token_ids = token_ids.reshape(num_requests, call.k + 1)
    return RejectionSampleOutput(token_ids, num_accepted, num_emitted, status)
