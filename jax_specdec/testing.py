"""For those who test an implementation, a model or a loop: the oracle, noise, and all checks.

What serves a call, the settings of the kernel, and rates for synthetic acceptance are here, too.
"""

from jax_specdec._src.base.config import (
    acceptance_length_to_rates,
    conditional_to_unconditional_rates,
    unconditional_to_conditional_rates,
)
from jax_specdec._src.base.noise import draw_noise, token_exponentials
from jax_specdec._src.base.types import Noise, RaceNoise
from jax_specdec._src.testing import reference
from jax_specdec._src.testing.row_dependence import RowDependence, row_dependence
from jax_specdec._src.verify.api import rejection_sample_with_noise, which_implementation
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.validate import validate

__all__ = [
    "KernelConfig",
    "Noise",
    "RaceNoise",
    "RowDependence",
    "acceptance_length_to_rates",
    "conditional_to_unconditional_rates",
    "draw_noise",
    "reference",
    "rejection_sample_with_noise",
    "row_dependence",
    "token_exponentials",
    "unconditional_to_conditional_rates",
    "validate",
    "which_implementation",
]
