"""Speculative decoding for JAX: lossless verification of drafted tokens, and what it needs."""

from jax_specdec._src import reference
from jax_specdec._src.config import SpecDecodeConfig, acceptance_length_to_rates
from jax_specdec._src.drafting.context import DraftContext
from jax_specdec._src.drafting.draft_model import ModelDrafter
from jax_specdec._src.drafting.drafter import Drafter, Proposal
from jax_specdec._src.drafting.ngram import NGramDrafter
from jax_specdec._src.drafting.sample import DraftSample, sample_draft_tokens
from jax_specdec._src.drafting.store import DraftStore, count_fallbacks
from jax_specdec._src.grammar import (
    CopyingMatcher,
    DelayedMatcher,
    GrammarLookahead,
    GrammarMatcher,
    advance_matchers,
    grammar_bitmask,
)
from jax_specdec._src.logprobs import TokenLogprobs, token_logprobs
from jax_specdec._src.models.bytes import DOCUMENT_SEPARATOR, decode, encode
from jax_specdec._src.models.checkpoint import (
    LoadedModel,
    load_checkpoint,
    load_embedded_pair,
    load_huggingface,
    save_checkpoint,
)
from jax_specdec._src.models.llama import Llama, LlamaConfig, stack_layers, unstack_layers
from jax_specdec._src.models.protocol import CausalModel
from jax_specdec._src.models.rotary import RopeScaling
from jax_specdec._src.models.tensor_parallel import TensorParallelLlama
from jax_specdec._src.models.tokenizer import TextStream, Tokenizer, load_tokenizer
from jax_specdec._src.noise import draw_noise
from jax_specdec._src.penalties import Penalties, apply_penalties
from jax_specdec._src.processors import (
    BadWords,
    LogitBias,
    LogitsProcessors,
    MinTokens,
    process_logits,
)
from jax_specdec._src.ragged import PackedDrafts, pack_drafts
from jax_specdec._src.serving.batch import StepRecord
from jax_specdec._src.serving.bookkeeping import RequestUpdate
from jax_specdec._src.serving.core import DecodeState
from jax_specdec._src.serving.driver import EngineDriver
from jax_specdec._src.serving.engine import Engine, NewRequests
from jax_specdec._src.serving.generate import (
    GenerateOutput,
    GreedyDifference,
    generate,
    generate_plain,
    generate_stream,
    greedy_differences,
)
from jax_specdec._src.serving.metrics import AcceptanceCounters, AcceptanceStats, ServingStats
from jax_specdec._src.serving.options import LogprobsConfig, OptionSizes, RequestOptions
from jax_specdec._src.serving.prometheus import PrometheusExporter
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
from jax_specdec._src.verify.api import (
    rejection_sample,
    rejection_sample_with_noise,
    which_implementation,
)
from jax_specdec._src.verify.mosaic_gpu.plan import KernelConfig
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec._src.verify.validate import validate

__version__ = "0.2.0"

_RETIRED_NAMES = {
    "ByteDecoder": "TextStream(decode)",
    "EngineState": "DecodeState",
    "apply_logit_bias": "process_logits with LogitsProcessors(logit_bias=...)",
    "conditional_to_unconditional_rates": "numpy.cumprod(rates)",
    "forbid_bad_words": "process_logits with LogitsProcessors(bad_words=...)",
    "forbid_stop_tokens": "process_logits with LogitsProcessors(min_tokens=...)",
    "rates_to_acceptance_length": "1 + sum(rates)",
    "unconditional_to_conditional_rates": "SpecDecodeConfig.conditional_rates",
}

__all__ = [
    "DOCUMENT_SEPARATOR",
    "PLACEHOLDER_TOKEN_ID",
    "AcceptanceCounters",
    "AcceptanceStats",
    "BadWords",
    "CausalModel",
    "CopyingMatcher",
    "DecodeState",
    "DelayedMatcher",
    "DraftContext",
    "DraftLogits",
    "DraftProbs",
    "DraftSample",
    "DraftStore",
    "Drafter",
    "Drafts",
    "Engine",
    "EngineDriver",
    "GenerateOutput",
    "GrammarLookahead",
    "GrammarMatcher",
    "GreedyDifference",
    "KernelConfig",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "LogitBias",
    "LogitsProcessors",
    "LogprobsConfig",
    "MinTokens",
    "ModelDrafter",
    "NGramDrafter",
    "NewRequests",
    "Noise",
    "OptionSizes",
    "PackedDrafts",
    "Penalties",
    "PrometheusExporter",
    "Proposal",
    "RaceNoise",
    "RejectionSampleOutput",
    "RequestOptions",
    "RequestUpdate",
    "RopeScaling",
    "SamplingParams",
    "ServingStats",
    "SpecDecodeConfig",
    "Status",
    "StepRecord",
    "TensorParallelLlama",
    "TextStream",
    "TokenLogprobs",
    "Tokenizer",
    "VerifySharding",
    "acceptance_length_to_rates",
    "advance_matchers",
    "apply_penalties",
    "count_fallbacks",
    "decode",
    "draw_noise",
    "encode",
    "generate",
    "generate_plain",
    "generate_stream",
    "grammar_bitmask",
    "greedy_differences",
    "load_checkpoint",
    "load_embedded_pair",
    "load_huggingface",
    "load_tokenizer",
    "pack_drafts",
    "parse_output",
    "process_logits",
    "reference",
    "rejection_sample",
    "rejection_sample_with_noise",
    "sample_draft_tokens",
    "save_checkpoint",
    "stack_layers",
    "token_logprobs",
    "unstack_layers",
    "validate",
    "which_implementation",
]


def __getattr__(name: str) -> object:
    if name in _RETIRED_NAMES:
        raise AttributeError(f"{name} is retired; use {_RETIRED_NAMES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
