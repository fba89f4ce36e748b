"""For those who test an implementation: explicit noise."""

from jax_specdec._src.noise import draw_noise, token_exponentials
from jax_specdec._src.types import Noise, RaceNoise
from jax_specdec._src.verify.api import rejection_sample_with_noise

__all__ = [
    "Noise",
    "RaceNoise",
    "draw_noise",
    "rejection_sample_with_noise",
    "token_exponentials",
]
