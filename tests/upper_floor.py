"""What the tests take from inside `jax_specdec.lm`, in one place: see `lower_floor.py`."""

# ruff: noqa: F401

from jax_specdec.lm import drafters, loading
from jax_specdec.lm import terminal as cli_terminal
from jax_specdec.lm.cli import process as cli_process
from jax_specdec.lm.cli import prompts as cli_prompts
from jax_specdec.lm.cli import run as cli_run
from jax_specdec.lm.cli import serve as cli_serve
from jax_specdec.lm.cli.models import load as load_models
from jax_specdec.lm.cli.models import load_served
from jax_specdec.lm.cli.other_names import OTHER_NAMES
from jax_specdec.lm.cli.parsing import parse
from jax_specdec.lm.cli.serve import make_driver
from jax_specdec.lm.decoding import generate as generate_lib
from jax_specdec.lm.decoding import matchers as decoding_matchers
from jax_specdec.lm.decoding import programs, schedule, stopwatch
from jax_specdec.lm.decoding.batch import append
from jax_specdec.lm.decoding.core import Decoder
from jax_specdec.lm.decoding.differences import _processed
from jax_specdec.lm.decoding.generate import make_batch
from jax_specdec.lm.decoding.options import NUMBERS, PACKING, RequestFields, options_per_request
from jax_specdec.lm.decoding.packing import BatchOptions
from jax_specdec.lm.decoding.state import Drafted
from jax_specdec.lm.drafting import draw as drafting_draw
from jax_specdec.lm.drafting import tree as drafting_tree
from jax_specdec.lm.drafting.suffix import Lookup
from jax_specdec.lm.formats.config_json import read_config
from jax_specdec.lm.formats.tensors import open_tensors
from jax_specdec.lm.formats.token_ids import count_token_ids
from jax_specdec.lm.models import int8_kernel, int8_matmul, plain, protocol, rotate
from jax_specdec.lm.server import app as server_app
from jax_specdec.lm.server import schemas
from jax_specdec.lm.server.answer import ChoiceText, Piece, _event
from jax_specdec.lm.server.app import Server
from jax_specdec.lm.server.connection import Connection, close_stuck
from jax_specdec.lm.server.limits import ApiError, Limits
from jax_specdec.lm.server.request import (
    OPTIONS,
    CheckedRequest,
    Parameters,
    read_parameters,
    read_request,
)
from jax_specdec.lm.server.vocabulary import Vocabulary
from jax_specdec.lm.server.worker import EngineFailed
from jax_specdec.lm.text import chat
from jax_specdec.lm.text.bytes import BYTE_VOCAB_SIZE
from jax_specdec.lm.text.chat import read_chat_template
