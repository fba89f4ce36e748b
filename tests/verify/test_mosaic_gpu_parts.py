"""The kernels that read a part of the vocabulary: row statistics, and verification by them."""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import AxisType, Mesh, PartitionSpec

import jax_specdec as sd
from jax_specdec._src.verify import api
from jax_specdec._src.verify.mosaic_gpu import phases
from jax_specdec._src.verify.mosaic_gpu.plan import KernelConfig
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rows import Rows

from .batch import Layout, check, jitted, verify
from .cases import random_batch
from .interpret_mode import interpret_gpu_params

ROWS = np.array([3, 1, 0, 5, 2, 4], np.int32)
INVERSE = np.array([1.0, 2.0, 1.0, 1.0, 0.7, 1.0], np.float32)
BY_ARGMAX = np.array([0, 0, 1, 0, 0, 1], bool)
WANTED = np.array([1, 1, 1, 1, 0, 1], bool)
BAD = 5


def rows_of(vocab: int, dtype: str) -> jax.Array:
    logits = 3 * np.random.default_rng(vocab).standard_normal((6, vocab))
    logits[BAD, 7] = np.nan
    return jnp.asarray(logits, dtype)


def judge(logits, count, found) -> None:
    (peaks, totals), ids = found
    for i, (peak, total, best) in enumerate(zip(peaks, totals, ids, strict=True)):
        row = np.asarray(logits[ROWS[i]], np.float64)[:count]
        if not WANTED[i] or count == 0:
            assert peak == -np.inf
        elif ROWS[i] == BAD:
            assert not np.isfinite(peak)
        elif BY_ARGMAX[i]:
            assert (peak, best) == (row.max(), row.argmax())
        else:
            expected = scipy.special.logsumexp(row * INVERSE[i])
            np.testing.assert_allclose(peak * INVERSE[i] + np.log(total), expected, rtol=1e-6)


def run(logits, count, **options):
    rows = Rows(logits, count, -np.inf, "cuda", first_id=jnp.int32(0))
    read = jax.jit(functools.partial(phases.row_statistics, rows, **options))
    return jax.device_get(read(np.where(WANTED, ROWS, -1), INVERSE, BY_ARGMAX))


CASES = [(4224, 4224, "bfloat16"), (2203, 2100, "float32"), (4224, 0, "float16")]


@pytest.mark.parametrize(
    ("vocab", "count", "dtype"), [*CASES[:2], pytest.param(*CASES[2], marks=pytest.mark.slow)]
)
def test_masses_and_argmaxes_of_rows_are_those_of_numpy(vocab, count, dtype):
    logits = rows_of(vocab, dtype)
    options = dict(config=KernelConfig(max_cluster=1), interpret=interpret_gpu_params())
    judge(logits, count, run(logits, count, **options))


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "count", "dtype"), [*CASES, (32064, 30000, "bfloat16")])
def test_masses_and_argmaxes_of_rows_are_those_of_numpy_on_a_gpu(vocab, count, dtype):
    logits = rows_of(vocab, dtype)
    judge(logits, count, run(logits, count))


def mesh_of(num_parts: int) -> Mesh:
    devices = jax.devices()[:num_parts]
    return jax.make_mesh((num_parts,), ("v",), (AxisType.Auto,), devices=devices)


def over(num_parts: int, *, config: KernelConfig | None = None, **options):
    """`rejection_sample_with_noise` whose parts of the vocabulary are read by the kernels."""
    mesh = mesh_of(num_parts)
    kernels = "row_statistics", "part_masses", "part_draw"

    def on_part(args, kwargs, static):
        return sd.testing.rejection_sample_with_noise(
            *args,
            **kwargs,
            **static,
            sharding=sd.VerifySharding(None if num_parts == 1 else mesh, "v"),
            implementation="mosaic_gpu",
            kernel_config=config,
        )

    @jitted
    def verifier(*args, config, vocab_size, **kwargs):
        static = dict(config=config, vocab_size=vocab_size)
        run = functools.partial(on_part, static=static)
        if num_parts == 1:  # a part that is all there is: a mesh of one device splits nothing
            everywhere = PartitionSpec()
            run = jax.shard_map(
                run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
            )
        with contextlib.ExitStack() as stack:
            changes = [
                (api.support, "no_device", lambda: None),
                (api, "_rejection_sample", api._rejection_sample.__wrapped__),
                *((phases, x, functools.partial(getattr(phases, x), **options)) for x in kernels),
            ]
            for change in changes:
                stack.enter_context(mock.patch.object(*change))
            return run(args, kwargs)

    return verifier


BIG = dict(num_speculative_tokens=3, num_requests=4, num_drafts=10)
LAYOUTS = [
    Layout(vocab=2176, **BIG, has_active=True),
    Layout(vocab=4224, **BIG, kind="logits", dtype="bfloat16", vocab_size=4100, has_valid=True),
    Layout(vocab=2176, **BIG, kind="probs", rates=(0.9, 0.75, 0.3)),
    Layout(vocab=2176, **BIG, kind="relative", block=True),
]


# Interpreted kernels of several devices would disturb each other: one part that is all there is.
@pytest.mark.newest
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[1], *(pytest.param(LAYOUTS[i], marks=pytest.mark.slow) for i in (0, 2, 3))],
    ids=str,
)
def test_verification_by_them_gives_the_tokens_of_the_oracle(layout):
    one = over(1, config=KernelConfig(max_cluster=1), interpret=interpret_gpu_params())
    batch = random_batch(layout, seed=layout.vocab, broken=0.2)
    check(batch, verify(batch, one))


@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (LAYOUTS[1], 4),
        *(pytest.param(LAYOUTS[i], 3, marks=pytest.mark.long) for i in (0, 2, 3)),
    ],
    ids=str,
)
def test_lowers_for_cuda(layout, kernels):
    args, named = random_batch(layout, seed=0, broken=0).arguments()
    named = {name: x for name, x in named.items() if x is not None}
    config, size = named.pop("config"), named.pop("vocab_size", None)

    def call(args, named):
        return over(2).__wrapped__(*args, **named, config=config, vocab_size=size)

    for bits64 in (False, True):
        with jax.enable_x64(bits64):
            lowered = jax.jit(call).trace(args, named).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("@mosaic_gpu") == kernels


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, Layout(vocab=128256, **BIG, kind="normalized")], ids=str
)
def test_the_parts_of_one_gpu_or_more_give_the_tokens_of_the_oracle(layout):
    verifier = over(len(jax.devices()))
    for seed in range(4):
        batch = random_batch(layout, seed, broken=0.2)
        check(batch, verify(batch, verifier))


def arrays_of(logits: jax.Array, batch: int, **given) -> CallArrays:
    drafts = sd.Drafts(jnp.zeros((0,), jnp.int32), jnp.zeros((batch + 1,), jnp.int32))
    noise = sd.testing.Noise(jnp.zeros((batch, 3)), jnp.zeros((batch, 2)))
    sampling = sd.SamplingParams(jnp.ones(batch))
    return CallArrays(logits, drafts, noise, sampling, None, None, None)._replace(**given)


FILTERED = sd.SamplingParams(jnp.ones(4), top_k=jnp.ones(4, jnp.int32))
LEFT_OUT = sd.DraftLogits(jnp.zeros((0, 64)), threshold=jnp.zeros((0,)))
EMPTY = sd.Drafts(jnp.zeros((0,), jnp.int32), jnp.zeros((5,), jnp.int32), LEFT_OUT)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"token_bitmask": jnp.zeros((4, 2), jnp.int32)}, "without a token_bitmask"),
        ({"sampling": FILTERED}, "without min_p, top_k and top_p"),
        ({"drafts": EMPTY}, "without DraftLogits.threshold"),
    ],
)
def test_what_the_kernels_do_not_read_is_refused_in_a_sentence(given, sentence):
    logits = jnp.zeros((4, 64))
    assert sentence in api.support.part_unsupported(arrays_of(logits, 4, **given), 3)
    assert api.support.part_unsupported(arrays_of(logits, 4), 3) is None


def test_a_call_without_requests_or_with_vma_is_refused_in_a_sentence():
    none = arrays_of(jnp.zeros((0, 64)), 0)
    assert "B is 0" in api.support.part_unsupported(none, 3)
    refusals = []

    def inside(x):
        refusals.append(api.support.part_unsupported(arrays_of(x, 4), 3))
        return x

    spec = PartitionSpec(None, "v")
    over_parts = jax.shard_map(inside, mesh=mesh_of(1), in_specs=spec, out_specs=spec)
    jax.eval_shape(over_parts, jnp.ones((4, 64)))
    assert "check_vma=False" in refusals[0]
