"""What the tests take from inside the verifier, in one place.

Tests prefer public names. Where one needs more, it stands here, so that a move inside the package
changes this file alone; `test_repository.py` holds both and that this file does not grow.
"""

# ruff: noqa: F401

from jax_specdec._src.attention import mosaic_gpu as attention_gpu
from jax_specdec._src.attention import xla as attention_xla
from jax_specdec._src.base import arrays, noise, platform, ragged, sampling
from jax_specdec._src.base.arrays import Range, check_array, check_tree, described, pytree
from jax_specdec._src.base.noise import Stream, fold_in_each, uniforms
from jax_specdec._src.base.platform import assume
from jax_specdec._src.base.types import ROW_NUMBERS
from jax_specdec._src.drafts import sample
from jax_specdec._src.drafts.rates import DraftRates
from jax_specdec._src.logits.process_logits import PROCESSORS
from jax_specdec._src.logits.processors import Sequences
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.mosaic.gpus import SHARED_BYTES
from jax_specdec._src.mosaic.interpret import InterpretedThreads
from jax_specdec._src.mosaic.ptx import GpuThreads
from jax_specdec._src.mosaic.threads import THREADS, Threads
from jax_specdec._src.rows import rows as rows_lib
from jax_specdec._src.rows import threshold, tiles
from jax_specdec._src.rows.blocks import BLOCK
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.rows.tiles import TILE
from jax_specdec._src.verify import api, sharding, statistics
from jax_specdec._src.verify import draw as draw_lib
from jax_specdec._src.verify.backends import base, gather
from jax_specdec._src.verify.backends import largest as tpu_largest
from jax_specdec._src.verify.backends.base import Backend
from jax_specdec._src.verify.backends.xla import Xla
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.mosaic_gpu import cluster as gpu_cluster
from jax_specdec._src.verify.mosaic_gpu import launch as gpu_launch
from jax_specdec._src.verify.mosaic_gpu import request as gpu_request
from jax_specdec._src.verify.mosaic_gpu import support
from jax_specdec._src.verify.mosaic_gpu.cluster import parity_of, slot_of
from jax_specdec._src.verify.mosaic_gpu.draw import pick_of
from jax_specdec._src.verify.mosaic_gpu.plan import (
    SLOTS,
    SharedMemory,
    Slices,
    default_config,
    power_of_two,
)
from jax_specdec._src.verify.position import Source
from jax_specdec._src.verify.q import q_of
from jax_specdec._src.verify.requests import CallArrays, Request, Uniforms
from jax_specdec._src.verify.rules import OneByOne, Standard
