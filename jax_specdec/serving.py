"""What the functions of an `Engine` and the steps of a decoding loop take and return."""

from jax_specdec._src.serving.batch import StepRecord
from jax_specdec._src.serving.bookkeeping import RequestUpdate
from jax_specdec._src.serving.core import DecodeState
from jax_specdec._src.serving.engine import NewRequests
from jax_specdec._src.serving.grammar_driver import GrammarDriver
from jax_specdec._src.serving.metrics import Histogram
from jax_specdec._src.serving.options import OptionSizes

__all__ = [
    "DecodeState",
    "GrammarDriver",
    "Histogram",
    "NewRequests",
    "OptionSizes",
    "RequestUpdate",
    "StepRecord",
]
