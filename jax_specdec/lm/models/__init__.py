"""Models: what a target or a draft model is, and the models of this package."""

from jax_specdec.lm.models import foreign
from jax_specdec.lm.models.block import BlockOutput
from jax_specdec.lm.models.config import (
    DecoderConfig,
    LayerSpec,
    LinearScaling,
    Norm,
    RopeScaling,
    Rotation,
)
from jax_specdec.lm.models.eagle3 import Eagle3Config, Eagle3Head
from jax_specdec.lm.models.gemma_assistant import GemmaAssistantConfig, GemmaAssistantHead
from jax_specdec.lm.models.int8 import Int8Weight, quantize
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.plain import PlainModel
from jax_specdec.lm.models.protocol import CausalModel, Output, Rows, Serves, Wants
from jax_specdec.lm.models.tensor_parallel import TensorParallelLlama

__all__ = [
    "BlockOutput",
    "CausalModel",
    "DecoderConfig",
    "Eagle3Config",
    "Eagle3Head",
    "GemmaAssistantConfig",
    "GemmaAssistantHead",
    "Int8Weight",
    "LayerSpec",
    "LinearScaling",
    "Llama",
    "Norm",
    "Output",
    "PlainModel",
    "RopeScaling",
    "Rotation",
    "Rows",
    "Serves",
    "TensorParallelLlama",
    "Wants",
    "foreign",
    "quantize",
]
