"""Which calls the Mosaic GPU backend serves. Imports nothing of the kernel."""

from __future__ import annotations

import jax

from jax_specdec._src.base.types import DraftDistribution
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.mosaic_gpu.plan import (
    MAX_BARRIERS,
    MAX_CANDIDATES,
    MAX_MAPPED,
    DraftLayout,
    SharedMemory,
)
from jax_specdec._src.verify.rules import RULES, Rule

_MAX_DRAFTS = 30  # a lane for each, and two for the uniforms to recover with

SPLIT = (
    "implementation='mosaic_gpu' verifies whole rows, but the vocabulary is split over devices, "
    "and its rows are too large to be gathered: give 'xla' or None"
)
"""Why it cannot serve a split vocabulary."""


def rule_unsupported(rule: Rule) -> str | None:
    """Returns why the kernel cannot serve a rule, a sentence; None if it can."""
    if rule.kernel_walk is not None:
        return None
    # The rules that have a walk in the kernel.
    served = ", ".join(x.name for x in RULES if x.kernel_walk is not None)
    return (
        f"implementation='mosaic_gpu' serves the rules {served}, but rejection_sample_method is "
        f"{rule.name!r}: give 'xla' or None"
    )


def unsupported(
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    *,
    is_race: bool,
    num_requests: int,
    k: int,
    size: int,
    config: KernelConfig | None = None,
) -> str | None:
    """Returns why the kernel cannot serve a call, a sentence; None if it can."""
    # A candidate for each thread; a column of a map in half a word.
    ids = None if distribution is None else distribution.ids
    if ids is not None:
        width = ids.shape[-1]
        most = MAX_CANDIDATES
        what = "candidates a row"
        if ids.ndim == 1:
            most = MAX_MAPPED
            what = "ids in a map"
        if not 1 <= width <= most:
            return f"implementation='mosaic_gpu' takes 1 to {most} {what}, but there are {width}"
    if is_race:
        return "implementation='mosaic_gpu' draws by inverse CDF: pass Noise, not RaceNoise"
    if num_requests == 0:
        return "implementation='mosaic_gpu' needs at least one request, but B is 0"
    if k > _MAX_DRAFTS:
        return (
            f"implementation='mosaic_gpu' takes up to {_MAX_DRAFTS} drafts per request, but "
            f"num_speculative_tokens is {k}"
        )
    # The most that the call may take: as many rows at once as the rule could read.
    shared = SharedMemory.of(
        target_logits,
        DraftLayout.of(distribution),
        num_requests=num_requests,
        size=size,
        config=config,
        most_rows=k + 1,
    )
    # Whose dtypes the message names.
    arrays = [target_logits] if distribution is None else [target_logits, storage_of(distribution)]
    return _too_large(shared, arrays)


def _too_large(shared: SharedMemory, arrays: list[jax.Array]) -> str | None:
    """Returns why the device has too little room for a launch, a sentence; None if it has."""
    generation = gpus.generation()
    # More CTAs than a cluster may have, or more memory than a CTA has.
    ctas = shared.slices.cluster
    if ctas > generation.max_cluster:
        return (
            f"implementation='mosaic_gpu' would verify a request in a cluster of {ctas} blocks, "
            f"but {generation.name} has at most {generation.max_cluster}: give "
            f"kernel_config=KernelConfig(max_cluster={generation.max_cluster})"
        )
    if shared.bytes <= generation.shared_bytes and shared.barriers <= MAX_BARRIERS:
        return None
    dtypes = " and ".join(str(x.dtype) for x in arrays)
    return (
        "implementation='mosaic_gpu' holds a slice of each row in shared memory, but "
        f"{shared.slices.size} ids of {dtypes} need {shared.bytes} bytes and {shared.barriers} "
        f"barriers in each of {ctas} blocks, and a block of {generation.name} has "
        f"{generation.shared_bytes} and {MAX_BARRIERS}"
    )
