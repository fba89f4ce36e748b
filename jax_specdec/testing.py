"""For those who test an implementation or a model: the oracle, noise, and what serves a call."""

from jax_specdec._src.base.noise import draw_noise, token_exponentials
from jax_specdec._src.base.types import Noise, RaceNoise
from jax_specdec._src.testing import reference
from jax_specdec._src.testing.row_dependence import RowDependence, row_dependence
from jax_specdec._src.verify.api import rejection_sample_with_noise, which_implementation

__all__ = [
    "Noise",
    "RaceNoise",
    "RowDependence",
    "draw_noise",
    "reference",
    "rejection_sample_with_noise",
    "row_dependence",
    "token_exponentials",
    "which_implementation",
]
