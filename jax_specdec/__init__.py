"""Speculative decoding for JAX: lossless verification of drafted tokens, and what it needs."""

from jax_specdec._src import reference
from jax_specdec._src.config import (
    SpecDecodeConfig,
    acceptance_length_to_rates,
    conditional_to_unconditional_rates,
    rates_to_acceptance_length,
    unconditional_to_conditional_rates,
)
from jax_specdec._src.noise import draw_noise
from jax_specdec._src.types import (
    PLACEHOLDER_TOKEN_ID,
    DraftLogits,
    DraftProbs,
    Drafts,
    Noise,
    RaceNoise,
    RejectionSampleOutput,
    SamplingParams,
    Status,
    parse_output,
)
from jax_specdec._src.verify.api import rejection_sample, rejection_sample_with_noise
from jax_specdec._src.verify.validate import validate

__version__ = "0.1.0"

__all__ = [
    "PLACEHOLDER_TOKEN_ID",
    "DraftLogits",
    "DraftProbs",
    "Drafts",
    "Noise",
    "RaceNoise",
    "RejectionSampleOutput",
    "SamplingParams",
    "SpecDecodeConfig",
    "Status",
    "acceptance_length_to_rates",
    "conditional_to_unconditional_rates",
    "draw_noise",
    "parse_output",
    "rates_to_acceptance_length",
    "reference",
    "rejection_sample",
    "rejection_sample_with_noise",
    "unconditional_to_conditional_rates",
    "validate",
]
