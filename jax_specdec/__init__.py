"""Speculative decoding for JAX: lossless verification of drafted tokens, and what it needs."""

from jax_specdec import integrations, models, serving, testing
from jax_specdec._src import reference
from jax_specdec._src.acceptance import AcceptanceCounters, AcceptanceStats
from jax_specdec._src.config import (
    SpecDecodeConfig,
    acceptance_length_to_rates,
    conditional_to_unconditional_rates,
    unconditional_to_conditional_rates,
)
from jax_specdec._src.drafting.context import DraftContext
from jax_specdec._src.drafting.draft_model import ModelDrafter
from jax_specdec._src.drafting.drafter import Drafter, Proposal
from jax_specdec._src.drafting.eagle3 import Eagle3Drafter
from jax_specdec._src.drafting.estimator import AcceptanceEstimator
from jax_specdec._src.drafting.ngram import NGramDrafter
from jax_specdec._src.drafting.plan import plan_drafts
from jax_specdec._src.drafting.sample import DraftSample, sample_draft_tokens
from jax_specdec._src.drafting.store import DraftStore, count_fallbacks
from jax_specdec._src.emitted import truncate
from jax_specdec._src.grammar import (
    CopyingMatcher,
    DelayedMatcher,
    GrammarError,
    GrammarLookahead,
    GrammarMatcher,
    LlguidanceMatcher,
    advance_matchers,
    grammar_bitmask,
)
from jax_specdec._src.logprobs import LogprobsConfig, TokenLogprobs, token_logprobs
from jax_specdec._src.models.bytes import DOCUMENT_SEPARATOR, decode_bytes, encode_bytes
from jax_specdec._src.models.checkpoint import load_embedded_pair, load_huggingface
from jax_specdec._src.models.eagle3_files import load_eagle3, load_embedded_head
from jax_specdec._src.models.tokenizer import TextStream, Tokenizer, load_tokenizer
from jax_specdec._src.process_logits import LogitsProcessors, apply_penalties, process_logits
from jax_specdec._src.processors import AllowedTokens, BadWords, LogitBias, MinTokens, Penalties
from jax_specdec._src.ragged import PackedDrafts, pack_drafts
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.serving.driver import EngineDriver
from jax_specdec._src.serving.engine import Engine
from jax_specdec._src.serving.generate import (
    GenerateOutput,
    generate,
    generate_plain,
    generate_stream,
)
from jax_specdec._src.serving.metrics import ServingStats
from jax_specdec._src.serving.options import RequestOptions
from jax_specdec._src.serving.prometheus import PrometheusExporter
from jax_specdec._src.types import (
    PLACEHOLDER_TOKEN_ID,
    DraftLogits,
    DraftProbs,
    Drafts,
    RejectionSampleOutput,
    Status,
    parse_output,
)
from jax_specdec._src.verify.api import rejection_sample, which_implementation
from jax_specdec._src.verify.mosaic_gpu.plan import KernelConfig
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec._src.verify.validate import validate

__version__ = "0.2.0"

__all__ = [
    "DOCUMENT_SEPARATOR",
    "PLACEHOLDER_TOKEN_ID",
    "AcceptanceCounters",
    "AcceptanceEstimator",
    "AcceptanceStats",
    "AllowedTokens",
    "BadWords",
    "CopyingMatcher",
    "DelayedMatcher",
    "DraftContext",
    "DraftLogits",
    "DraftProbs",
    "DraftSample",
    "DraftStore",
    "Drafter",
    "Drafts",
    "Eagle3Drafter",
    "Engine",
    "EngineDriver",
    "GenerateOutput",
    "GrammarError",
    "GrammarLookahead",
    "GrammarMatcher",
    "KernelConfig",
    "LlguidanceMatcher",
    "LogitBias",
    "LogitsProcessors",
    "LogprobsConfig",
    "MinTokens",
    "ModelDrafter",
    "NGramDrafter",
    "PackedDrafts",
    "Penalties",
    "PrometheusExporter",
    "Proposal",
    "RejectionSampleOutput",
    "RequestOptions",
    "SamplingParams",
    "ServingStats",
    "SpecDecodeConfig",
    "Status",
    "TextStream",
    "TokenLogprobs",
    "Tokenizer",
    "VerifySharding",
    "acceptance_length_to_rates",
    "advance_matchers",
    "apply_penalties",
    "conditional_to_unconditional_rates",
    "count_fallbacks",
    "decode_bytes",
    "encode_bytes",
    "generate",
    "generate_plain",
    "generate_stream",
    "grammar_bitmask",
    "integrations",
    "load_eagle3",
    "load_embedded_head",
    "load_embedded_pair",
    "load_huggingface",
    "load_tokenizer",
    "models",
    "pack_drafts",
    "parse_output",
    "plan_drafts",
    "process_logits",
    "reference",
    "rejection_sample",
    "sample_draft_tokens",
    "serving",
    "testing",
    "token_logprobs",
    "truncate",
    "unconditional_to_conditional_rates",
    "validate",
    "which_implementation",
]
