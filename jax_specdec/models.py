"""Models and their files: what a target or a draft model is, and the models of this package."""

from jax_specdec._src.models.checkpoint import LoadedModel, load_checkpoint, save_checkpoint
from jax_specdec._src.models.eagle3 import Eagle3Config, Eagle3Head
from jax_specdec._src.models.eagle3_files import save_eagle3
from jax_specdec._src.models.llama import Llama, stack_layers, unstack_layers
from jax_specdec._src.models.llama_config import LlamaConfig
from jax_specdec._src.models.protocol import CausalModel, TargetOutput
from jax_specdec._src.models.rotary import RopeScaling
from jax_specdec._src.models.tensor_parallel import TensorParallelLlama

__all__ = [
    "CausalModel",
    "Eagle3Config",
    "Eagle3Head",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "RopeScaling",
    "TargetOutput",
    "TensorParallelLlama",
    "load_checkpoint",
    "save_checkpoint",
    "save_eagle3",
    "stack_layers",
    "unstack_layers",
]
