"""The Mosaic GPU backend: interpreted on the CPU, lowered for CUDA, and run on a GPU.

Vocabularies are multiples of 128, which the kernel needs; what it refuses is tested too.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec._src import compat
from jax_specdec._src.verify import api, mosaic_gpu
from jax_specdec._src.verify.mosaic_gpu import KernelConfig

from . import edges
from .batch import Batch, Layout, check, jitted, pack, verify
from .cases import random_batch, random_request

BIG = dict(num_speculative_tokens=4, num_requests=6, num_drafts=20)
RATES = (0.9, 0.75, 0.3, 0.1)
LAYOUTS = [
    Layout(vocab=2176, **BIG, has_active=True),
    Layout(vocab=256, **BIG, kind="probs", draft_vocab=128, dtype="float16"),
    Layout(vocab=2048, **BIG, kind="probs", store_rows=50, has_valid=True),
    Layout(
        vocab=4224,
        **BIG,
        kind="logits",
        dtype="bfloat16",
        draft_vocab=2176,
        vocab_size=4100,
        has_bonus=True,
    ),
    Layout(
        vocab=4224,
        **BIG,
        kind="normalized",
        dtype="bfloat16",
        draft_dtype="bfloat16",
        store_rows=30,
        has_valid=True,
    ),
    Layout(vocab=2176, **BIG, kind="normalized", dtype="bfloat16", rates=RATES),
]


def interpreted(config: KernelConfig, **params):
    """The kernel in GPU interpret mode, as a function like `rejection_sample_with_noise`."""
    run = functools.partial(
        mosaic_gpu.verify, config=config, interpret=compat.interpret_gpu_params(**params)
    )

    @jitted
    def verifier(*args, config, vocab_size, **kwargs):
        inner = api._rejection_sample.__wrapped__  # not traced before, for another backend
        with (
            mock.patch.object(api.xla, "verify", run),
            mock.patch.object(api, "_rejection_sample", inner),
        ):
            return sd.rejection_sample_with_noise(
                *args, config=config, vocab_size=vocab_size, implementation="xla", **kwargs
            )

    return verifier


# Blocks meet in interpret mode from JAX 0.11 on.
CLUSTER = 2 if compat.INTERPRETS_CLUSTERS else 1
alone = interpreted(KernelConfig(max_cluster=1))
in_clusters = interpreted(KernelConfig(max_cluster=CLUSTER, prefetch_draft=True))


@pytest.mark.parametrize("verifier", [alone, in_clusters], ids=["one block", "clusters"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gives_the_tokens_of_the_oracle(layout, verifier):
    batch = random_batch(layout, seed=len(layout.kind) + layout.vocab, broken=0.2)
    check(batch, verify(batch, verifier))
