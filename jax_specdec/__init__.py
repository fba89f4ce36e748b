"""Speculative decoding for JAX: lossless verification of drafted tokens, and what it needs.

`from jax_specdec import lm` has what is built around it: drafters, decoding loops, models. What is
here needs JAX and NumPy alone; to import it does not import `lm`.
"""

import importlib
from typing import TYPE_CHECKING

from jax_specdec import grammar, testing
from jax_specdec._src.attention.api import decode_attention
from jax_specdec._src.attention.cache import move_rows, write_cache
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.tree import TreeRows
from jax_specdec._src.base.types import (
    PLACEHOLDER_TOKEN_ID,
    DraftLogits,
    DraftProbs,
    Drafts,
    RejectionSampleOutput,
    Status,
    parse_output,
)
from jax_specdec._src.drafts.sample import DraftSample, sample_draft_tokens
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.logits.logprobs import LogprobsConfig, TokenLogprobs, token_logprobs
from jax_specdec._src.logits.process_logits import LogitsProcessors, process_logits
from jax_specdec._src.logits.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
)
from jax_specdec._src.stats.acceptance import AcceptanceCounters, AcceptanceStats
from jax_specdec._src.stats.emitted import truncate
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding

if TYPE_CHECKING:
    from jax_specdec import lm

__version__ = "0.2.0"

__all__ = [
    "PLACEHOLDER_TOKEN_ID",
    "AcceptanceCounters",
    "AcceptanceStats",
    "AllowedTokens",
    "BadWords",
    "DraftLogits",
    "DraftProbs",
    "DraftSample",
    "DraftStore",
    "Drafts",
    "LogitBias",
    "LogitsProcessors",
    "LogprobsConfig",
    "MinTokens",
    "Penalties",
    "RejectionSampleOutput",
    "SamplingParams",
    "SpecDecodeConfig",
    "Status",
    "TokenLogprobs",
    "TreeRows",
    "VerifySharding",
    "decode_attention",
    "grammar",
    "lm",
    "move_rows",
    "parse_output",
    "process_logits",
    "rejection_sample",
    "sample_draft_tokens",
    "testing",
    "token_logprobs",
    "truncate",
    "write_cache",
]

# Hidden from type checkers, for which a module with `__getattr__` has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports `lm` when it is asked for, and refuses any other name."""
        # Once it is imported it is an attribute of this module, and this is not called again.
        if name == "lm":
            return importlib.import_module("jax_specdec.lm")
        which = "module 'jax_specdec', which has models, drafters and loops in jax_specdec.lm"
        raise AttributeError(f"{which}, has no attribute {name!r}")
