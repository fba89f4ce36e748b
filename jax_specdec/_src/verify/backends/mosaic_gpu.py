"""`MosaicGpu`: a kernel for Hopper GPUs that verifies whole rows.

It is imported where a call uses it: see the docstring of the package `mosaic_gpu`.
"""

from __future__ import annotations

from typing import ClassVar

from jax_specdec._src.base.platform import Platform
from jax_specdec._src.base.types import RaceNoise, RejectionSampleOutput
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.verify.backends.gather import Gather
from jax_specdec._src.verify.call import Static
from jax_specdec._src.verify.mosaic_gpu import support
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rules import Rule, rule_of


class MosaicGpu(Gather):
    """One launch verifies a batch of whole rows."""

    only: ClassVar[Platform | None] = "cuda"

    def no_device(self) -> str | None:
        return gpus.no_device()

    def unserved(self, arrays: CallArrays, static: Static) -> str | None:
        # The vocabulary is split, the rule is another, or the rows do not fit its memory.
        if static.layout.vocab_axis is not None:
            return support.SPLIT
        return support.rule_unsupported(rule_of(static.config)) or support.unsupported(
            arrays.target_logits,
            arrays.drafts.distribution,
            is_race=isinstance(arrays.randomness, RaceNoise),
            num_requests=arrays.num_requests,
            k=static.config.num_speculative_tokens,
            size=static.size,
            config=static.kernel_config,
        )

    def verify(self, arrays: CallArrays, rule: Rule, static: Static) -> RejectionSampleOutput:
        # The kernel does all that `Backend.verify` does.
        from jax_specdec._src.verify.mosaic_gpu import launch

        return launch.verify(
            arrays,
            rule,
            k=static.config.num_speculative_tokens,
            size=static.size,
            config=static.kernel_config,
        )
