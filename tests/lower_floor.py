"""What the tests take from inside the verifier, in one place.

Tests prefer public names. Where one needs more, it stands here, so that a move inside the package
changes this file alone; `test_repository.py` holds both and that this file does not grow.
"""

# ruff: noqa: F401

from jax_specdec._src import arrays, int8_kernel, int8_matmul, noise, platform, ragged, sampling
from jax_specdec._src.arrays import Range, check_array, check_tree, described, pytree
from jax_specdec._src.attention import mosaic_gpu as attention_gpu
from jax_specdec._src.attention import xla as attention_xla
from jax_specdec._src.blocks import BLOCK
from jax_specdec._src.drafts import sample
from jax_specdec._src.drafts.rates import DraftRates
from jax_specdec._src.noise import Stream, fold_in_each, uniforms
from jax_specdec._src.platform import assume
from jax_specdec._src.process_logits import PROCESSORS
from jax_specdec._src.processors import Sequences
from jax_specdec._src.types import ROW_NUMBERS
from jax_specdec._src.verify import api, sharding, statistics, threshold, tiles
from jax_specdec._src.verify import draw as draw_lib
from jax_specdec._src.verify import rows as rows_lib
from jax_specdec._src.verify.api import support
from jax_specdec._src.verify.backends import base, gather
from jax_specdec._src.verify.backends import largest as tpu_largest
from jax_specdec._src.verify.backends.base import Backend
from jax_specdec._src.verify.backends.xla import Xla
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.mosaic_gpu import cluster as gpu_cluster
from jax_specdec._src.verify.mosaic_gpu import launch as gpu_launch
from jax_specdec._src.verify.mosaic_gpu import request as gpu_request
from jax_specdec._src.verify.mosaic_gpu.cluster import parity_of, slot_of
from jax_specdec._src.verify.mosaic_gpu.draw import pick_of
from jax_specdec._src.verify.mosaic_gpu.interpret import InterpretedThreads
from jax_specdec._src.verify.mosaic_gpu.plan import (
    SHARED_BYTES,
    SLOTS,
    SharedMemory,
    Slices,
    default_config,
    power_of_two,
)
from jax_specdec._src.verify.mosaic_gpu.ptx import GpuThreads
from jax_specdec._src.verify.mosaic_gpu.threads import THREADS, Threads
from jax_specdec._src.verify.position import Source
from jax_specdec._src.verify.q import q_of
from jax_specdec._src.verify.requests import CallArrays, Request, Uniforms
from jax_specdec._src.verify.rows import Rows
from jax_specdec._src.verify.rules import OneByOne, Standard
from jax_specdec._src.verify.tiles import TILE
