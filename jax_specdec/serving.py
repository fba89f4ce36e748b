"""What engines and decoding loops take and return, and what compares their texts."""

from jax_specdec._src.emitted import StepRecord
from jax_specdec._src.serving.bookkeeping import RequestUpdate
from jax_specdec._src.serving.core import DecodeState
from jax_specdec._src.serving.differences import GreedyDifference, greedy_differences
from jax_specdec._src.serving.engine import NewRequests
from jax_specdec._src.serving.grammar_driver import GrammarDriver
from jax_specdec._src.serving.metrics import Histogram
from jax_specdec._src.serving.packing import OptionSizes
from jax_specdec._src.serving.programs import measure_steps
from jax_specdec._src.serving.step_costs import DraftChoice, StepCosts

__all__ = [
    "DecodeState",
    "DraftChoice",
    "GrammarDriver",
    "GreedyDifference",
    "Histogram",
    "NewRequests",
    "OptionSizes",
    "RequestUpdate",
    "StepCosts",
    "StepRecord",
    "greedy_differences",
    "measure_steps",
]
