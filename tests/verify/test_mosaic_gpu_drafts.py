"""Draft tokens sampled by the kernel: interpreted on the CPU, lowered for CUDA, and on a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from lower_floor import Stream, gpus, sample, uniforms
from lower_floor import gpu_launch as launch

import jax_specdec as sd
from jax_specdec.testing import KernelConfig, reference

from .batch import MAX_MARGIN
from .interpret_mode import interpret_gpu_params

pytestmark = pytest.mark.long

importlib.import_module("jax.experimental.pallas.fuser")  # as in test_mosaic_gpu

VOCAB, OFFSET = 4200, 2
TEMPERATURES = np.float32([0.7, 0.0, 1.3, 0.2])


@contextlib.contextmanager
def kernel(**options: Any) -> Iterator[None]:
    """Has `implementation="mosaic_gpu"` run, or be lowered, where there is no GPU."""
    with (
        mock.patch.object(gpus, "no_device", lambda: None),
        mock.patch.object(launch, "sample", functools.partial(launch.sample, **options)),
        mock.patch.object(sample, "_sample", sample._sample.__wrapped__),  # not traced before
    ):
        yield


def keys_of(batch: int) -> jax.Array:
    words = np.random.default_rng(3).integers(2**32, size=(batch, 2), dtype=np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def draw(
    logits: jax.Array, sampling: sd.SamplingParams, implementation: Any = "mosaic_gpu"
) -> sd.DraftSample:
    batch = logits.shape[0]
    return sd.sample_draft_tokens(
        logits,
        sampling=sampling,
        keys=keys_of(batch),
        positions=np.arange(batch, dtype=np.int32),
        offset=OFFSET,
        implementation=implementation,
    )


@jax.jit
def interpreted(logits: jax.Array, sampling: sd.SamplingParams) -> sd.DraftSample:
    with kernel(config=KernelConfig(max_cluster=1), interpret=interpret_gpu_params()):
        return draw(logits, sampling)


uniforms_of = jax.jit(uniforms, static_argnums=(2, 3))
in_xla = jax.jit(functools.partial(draw, implementation="xla"))
on_gpu = jax.jit(draw)


def random_sampling(rng: np.random.Generator, batch: int, filters: bool) -> sd.SamplingParams:
    temperature = np.resize(TEMPERATURES, batch)
    if not filters:
        return sd.SamplingParams(temperature)
    return sd.SamplingParams(
        temperature,
        min_p=rng.choice([0, 0.01], batch).astype(np.float32),
        top_k=rng.choice([0, 1, 50], batch).astype(np.int32),
        top_p=rng.choice([1, 0.5, 0.95], batch).astype(np.float32),
    )


def check(logits: jax.Array, sampling: sd.SamplingParams, drawn: sd.DraftSample) -> None:
    """Asserts that a sample is the oracle's, near ties aside, and its numbers those of float64."""
    drawn, batch = jax.device_get(drawn), logits.shape[0]
    positions = np.arange(batch, dtype=np.int32)
    recover = np.asarray(uniforms_of(keys_of(batch), positions, Stream.DRAFT, OFFSET))
    given = {name: np.asarray(x) for name, x in vars(sampling).items() if x is not None}
    none = np.zeros((0,), np.int32), np.zeros((batch + 1,), np.int32)
    want = reference.rejection_sample(
        np.asarray(logits),
        sd.Drafts(*none),
        sd.testing.Noise(np.zeros((batch, 1), np.float32), recover),
        method="standard",
        num_speculative_tokens=1,
        **given,
    )
    same = drawn.token_ids == want.token_ids[:, 0]
    assert (same | (want.margin <= MAX_MARGIN)).all(), (drawn.token_ids, want)

    assert drawn.log_normalizer is not None and drawn.row_max is not None
    rows, sampled = np.asarray(logits, np.float64), np.asarray(sampling.temperature) > 0
    np.testing.assert_array_equal(drawn.row_max, rows.max(axis=1))
    if drawn.threshold is not None:
        assert (drawn.threshold[~sampled] == -np.inf).all()
        kept = rows >= drawn.threshold[:, None]
        by_xla = np.asarray(in_xla(logits, sampling).threshold)
        np.testing.assert_array_equal(kept.sum(axis=1), (rows >= by_xla[:, None]).sum(axis=1))
        assert kept[np.arange(batch), drawn.token_ids].all()
        rows = np.where(kept, rows, -np.inf)
    relative = (rows - rows.max(axis=1, keepdims=True))[sampled]
    expected = scipy.special.logsumexp(relative / given["temperature"][sampled, None], axis=1)
    np.testing.assert_allclose(drawn.log_normalizer[sampled], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "filters"),
    [("float32", False), pytest.param("bfloat16", True, marks=pytest.mark.slow)],
)
def test_a_sample_is_the_oracles_and_its_numbers_are_those_of_float64(dtype, filters):
    rng = np.random.default_rng(0)
    for scale in (0.5, 3.0, 10.0):
        logits = (scale * rng.standard_normal((4, VOCAB)) - 30.0).astype(jnp.dtype(dtype))
        sampling = random_sampling(rng, 4, filters)
        check(logits, sampling, interpreted(logits, sampling))


def test_a_bad_row_gives_an_id_and_numbers_that_tell():
    """The same as in XLA, and the row beside it is as it was."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, VOCAB)).astype(np.float32)
    sampling = random_sampling(rng, 4, filters=False)
    good = interpreted(logits, sampling)
    logits[0, 100], logits[1, 4150], logits[2] = np.nan, np.inf, -np.inf
    drawn = jax.device_get(interpreted(logits, sampling))
    by_xla = jax.device_get(in_xla(logits, sampling))
    np.testing.assert_array_equal(drawn.row_max, by_xla.row_max)
    np.testing.assert_array_equal(drawn.row_max[:3], [np.inf, np.inf, -np.inf])
    np.testing.assert_array_equal(drawn.log_normalizer[:3], by_xla.log_normalizer[:3])
    np.testing.assert_array_equal(drawn.log_normalizer[:3], [np.nan, np.inf, -np.inf])
    assert drawn.token_ids[:3].tolist() == [0, 0, 0]
    for got, want in zip(drawn, good, strict=True):
        if got is not None:
            np.testing.assert_array_equal(got[3], want[3])


def test_parameters_out_of_range_are_not_refused_but_sampled_as_in_xla():
    logits = np.random.default_rng(0).standard_normal((4, VOCAB), np.float32)
    sampling = sd.SamplingParams(np.float32([-1, np.nan, np.inf, 0.5]))
    drawn, by_xla = interpreted(logits, sampling), in_xla(logits, sampling)
    np.testing.assert_array_equal(drawn.token_ids, by_xla.token_ids)
    np.testing.assert_allclose(drawn.log_normalizer, by_xla.log_normalizer, rtol=1e-6)


# Where it is chosen, and what it refuses.


class Hopper:
    platform, compute_capability, device_kind, core_count = "gpu", "9.0", "device", 132


def kernels(batch: int = 8, platform: str = "cuda", filters: bool = False, **given: Any) -> int:
    """Kernels in the program that samples by default, where the default device is a Hopper GPU."""
    one = np.ones((batch,), np.float32)

    def call(logits: jax.Array, keys: jax.Array) -> sd.DraftSample:
        sampling = sd.SamplingParams(one, top_p=one if filters else None)
        return sd.sample_draft_tokens(
            logits,
            sampling=sampling,
            keys=keys,
            positions=np.arange(batch, dtype=np.int32),
            offset=0,
            **given,
        )

    logits = jax.ShapeDtypeStruct((batch, VOCAB), jnp.bfloat16)
    with (
        mock.patch.object(jax, "devices", lambda: [Hopper()]),
        mock.patch.object(sample, "_sample", sample._sample.__wrapped__),
    ):
        traced = jax.jit(call).trace(logits, keys_of(batch))
        return traced.lower(lowering_platforms=(platform,)).as_text().count("@mosaic_gpu")


def config(**given: Any) -> sd.SpecDecodeConfig:
    return sd.SpecDecodeConfig(num_speculative_tokens=2, **given)


@pytest.mark.slow
def test_it_is_the_default_on_hopper_for_the_calls_it_serves():
    assert kernels(filters=True) == 1
    by_block = config(rejection_sample_method="block")
    assert kernels(batch=300, config=by_block, ids=jnp.arange(VOCAB, dtype=jnp.int32)) == 1
    assert kernels(platform="cpu") == kernels(implementation="xla") == 0
    assert kernels(config=config(draft_sample_method="greedy")) == 0
    assert kernels(config=config(rejection_sample_method="agreement")) == 0
    assert kernels(sharding=sd.VerifySharding(split_mesh(), vocab_axis="v")) == 0
    assert kernels(sharding=sd.VerifySharding(split_mesh(), batch_axis="v")) == 1


def test_logits_that_are_split_are_not_gathered_for_it():
    by_default: list[bool] = []

    def sampled(*given: Any) -> sd.DraftSample:
        by_default.append(given[-1])
        return sd.DraftSample(jnp.zeros((2,), jnp.int32))

    sampling, keys = sd.SamplingParams(np.ones((2,), np.float32)), keys_of(2)
    logits, mesh = np.zeros((2, 128), np.float32), split_mesh()
    for axes in [(), (None, "v"), ("v",)]:
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        with (
            mock.patch.object(jax, "devices", lambda: [Hopper()]),
            mock.patch.object(sample, "_sample", sampled),
        ):
            sd.sample_draft_tokens(
                jax.device_put(logits, place),
                sampling=sampling,
                keys=keys,
                positions=np.arange(2, dtype=np.int32),
                offset=0,
            )
    assert by_default == [True, False, False]


def split_mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.local_devices(backend="cpu")[:2]), ("v",))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_lowers_for_cuda_in_64_bit_mode(dtype):
    with jax.enable_x64(True), kernel():
        sampling = sd.SamplingParams(np.ones((3,), np.float32))
        logits = jax.ShapeDtypeStruct((3, 131), dtype)
        traced = jax.jit(lambda logits: draw(logits, sampling)).trace(logits)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (dict(config=config(draft_sample_method="greedy")), "draft_sample_method='greedy' takes"),
        (dict(config=config(rejection_sample_method="agreement")), "'agreement' draws by races"),
        (dict(sharding=sd.VerifySharding(split_mesh(), vocab_axis="v")), "vocabulary is split"),
    ],
)
def test_calls_it_cannot_serve_are_refused_in_a_sentence(given, why):
    with pytest.raises(NotImplementedError, match=why):
        kernels(implementation="mosaic_gpu", **given)


def test_it_needs_a_gpu_and_the_name_of_an_implementation():
    with (
        mock.patch.object(jax, "devices", lambda: jax.local_devices(backend="cpu")),
        pytest.raises(NotImplementedError, match="runs on cpu"),
    ):
        draw(jnp.zeros((1, 8)), sd.SamplingParams(jnp.ones(1)))
    with pytest.raises(ValueError, match="implementation must be 'xla', 'mosaic_gpu' or None"):
        draw(jnp.zeros((1, 8)), sd.SamplingParams(jnp.ones(1)), "triton")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(("batch", "vocab"), [(1, 128256), (9, 128256), (300, 32000), (5, 50257)])
def test_samples_on_a_gpu_are_those_of_the_oracle(batch, vocab, dtype, filters):
    rng = np.random.default_rng(batch)
    logits = (3 * rng.standard_normal((batch, vocab))).astype(jnp.dtype(dtype))
    sampling = random_sampling(rng, batch, filters)
    drawn = on_gpu(logits, sampling)
    check(logits, sampling, drawn)
    by_xla = in_xla(logits, sampling)
    assert (np.asarray(drawn.token_ids) == np.asarray(by_xla.token_ids)).mean() > 0.98
