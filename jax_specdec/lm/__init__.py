"""What is built around the verifier: drafters, decoding loops, an engine, models, a server.

What reads models, tokenizers and templates needs the extra `lm`: `pip install ".[lm]"` in a clone.
Those libraries are imported where they are used, so this module can be imported without them. The
command line and the server are not among its names: they import them from here.
"""

from typing import TYPE_CHECKING

import jax_specdec
from jax_specdec._src.base.config import did_you_mean
from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec.lm import formats, models
from jax_specdec.lm.decoding.bookkeeping import RequestUpdate
from jax_specdec.lm.decoding.differences import GreedyDifference, greedy_differences
from jax_specdec.lm.decoding.driver import EngineDriver
from jax_specdec.lm.decoding.engine import Engine, NewRequests
from jax_specdec.lm.decoding.generate import (
    GenerateOutput,
    generate,
    generate_plain,
    generate_stream,
)
from jax_specdec.lm.decoding.metrics import Histogram, ServingStats
from jax_specdec.lm.decoding.options import OptionSizes, RequestOptions
from jax_specdec.lm.decoding.prometheus import PrometheusExporter
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.decoding.step_costs import DraftChoice, StepCosts
from jax_specdec.lm.decoding.stopwatch import measure_steps
from jax_specdec.lm.decoding.text import generate_text
from jax_specdec.lm.drafting.block import BlockDrafter
from jax_specdec.lm.drafting.combined import FirstOf
from jax_specdec.lm.drafting.draft_model import ModelDrafter
from jax_specdec.lm.drafting.drafter import DraftContext, Drafter, DrafterServes, Proposal
from jax_specdec.lm.drafting.eagle3 import Eagle3Drafter
from jax_specdec.lm.drafting.gemma_assistant import GemmaAssistantDrafter
from jax_specdec.lm.drafting.ngram import NGramDrafter
from jax_specdec.lm.drafting.retokenized import RetokenizedParams, RetokenizingDrafter, retokenize
from jax_specdec.lm.drafting.suffix import SuffixDrafter
from jax_specdec.lm.formats.checkpoint import load_huggingface
from jax_specdec.lm.formats.embedded import load_embedded_head, load_embedded_pair
from jax_specdec.lm.formats.heads import load_head
from jax_specdec.lm.models.block import BlockHead, BlockHeadConfig
from jax_specdec.lm.text.bytes import DOCUMENT_SEPARATOR, decode_bytes, encode_bytes
from jax_specdec.lm.text.tokenizer import TextStream, Tokenizer, load_tokenizer

__all__ = [
    "DOCUMENT_SEPARATOR",
    "BlockDrafter",
    "BlockHead",
    "BlockHeadConfig",
    "DecodeState",
    "DraftChoice",
    "DraftContext",
    "Drafter",
    "DrafterServes",
    "Eagle3Drafter",
    "Engine",
    "EngineDriver",
    "FirstOf",
    "GemmaAssistantDrafter",
    "GenerateOutput",
    "GreedyDifference",
    "Histogram",
    "ModelDrafter",
    "NGramDrafter",
    "NewRequests",
    "OptionSizes",
    "PrometheusExporter",
    "Proposal",
    "RequestOptions",
    "RequestUpdate",
    "RetokenizedParams",
    "RetokenizingDrafter",
    "ServingStats",
    "StepCosts",
    "StepRecord",
    "SuffixDrafter",
    "TextStream",
    "Tokenizer",
    "decode_bytes",
    "encode_bytes",
    "formats",
    "generate",
    "generate_plain",
    "generate_stream",
    "generate_text",
    "greedy_differences",
    "load_embedded_head",
    "load_embedded_pair",
    "load_head",
    "load_huggingface",
    "load_tokenizer",
    "measure_steps",
    "models",
    "retokenize",
]

_READS = "load_huggingface reads a checkpoint, load_embedded_pair the models of the package"
_OTHER_NAMES = {
    **dict.fromkeys(("load_model", "load_checkpoint", "load", "from_pretrained"), _READS),
    "AutoModelForCausalLM": _READS,
    "AutoTokenizer": "load_tokenizer reads one from a directory",
    "LLM": "generate decodes prompts, Engine and EngineDriver serve requests",
    "SamplingParams": "RequestOptions is what one request asks for",
}
"""What callers of others look for, and what there is."""

# Hidden from type checkers, for which a module with `__getattr__` has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Refuses a name that there is not, with one that is meant or near."""
        # The last of three that fits: a name like one here, the same name elsewhere in the package,
        # and one that callers of other libraries know.
        hint = did_you_mean(name, __all__)
        for module in (jax_specdec, jax_specdec.grammar):
            if name in module.__all__:
                hint = f"; {module.__name__} has it"
        if name in _OTHER_NAMES:
            hint = f"; {_OTHER_NAMES[name]}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
