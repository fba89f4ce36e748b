"""For those who test an implementation: explicit noise, and comparisons of texts."""

from jax_specdec._src.noise import draw_noise, token_exponentials
from jax_specdec._src.testing import GreedyDifference, greedy_differences
from jax_specdec._src.types import Noise, RaceNoise
from jax_specdec._src.verify.api import rejection_sample_with_noise

__all__ = [
    "GreedyDifference",
    "Noise",
    "RaceNoise",
    "draw_noise",
    "greedy_differences",
    "rejection_sample_with_noise",
    "token_exponentials",
]
