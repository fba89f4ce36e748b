"""What the functions of an `Engine` and the steps of a decoding loop take and return."""

from jax_specdec._src.emitted import StepRecord
from jax_specdec._src.serving.bookkeeping import RequestUpdate
from jax_specdec._src.serving.core import DecodeState
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
    "Histogram",
    "NewRequests",
    "OptionSizes",
    "RequestUpdate",
    "StepCosts",
    "StepRecord",
    "measure_steps",
]
