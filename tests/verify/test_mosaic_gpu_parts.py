"""The kernels that read a part of the vocabulary: row statistics, and verification by them."""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import AxisType, Mesh, PartitionSpec
from lower_floor import CallArrays, Rows, SplitPart, Xla, api, gpu_parts
from lower_floor import gpu_launch as launch

import jax_specdec as sd
from jax_specdec import KernelConfig

from .batch import Batch, Layout, agree, jitted
from .cases import random_batch, random_batches
from .interpret_mode import interpret_gpu_params
from .lists import with_ids

ROWS = np.array([3, 1, 0, 5, 2, 4], np.int32)
INVERSE = np.array([1.0, 2.0, 1.0, 1.0, 0.7, 1.0], np.float32)
BY_ARGMAX = np.array([0, 0, 1, 0, 0, 1], bool)
WANTED = np.array([1, 1, 1, 1, 0, 1], bool)
BAD = 5


def rows_of(vocab: int, dtype: str) -> np.ndarray:
    logits = 3 * np.random.default_rng(vocab).standard_normal((6, vocab))
    logits[BAD, 7] = np.nan
    return logits.astype(jnp.dtype(dtype))


def judge(logits, count, found) -> None:
    for i, (peak, total, best) in enumerate(zip(*found, strict=True)):
        row = logits[ROWS[i]].astype(np.float64)[:count]
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
    part = SplitPart("v", jnp.int32(0))
    rows = Rows(jnp.asarray(logits), count, -np.inf, Xla().on("cuda"), part=part)
    read = jax.jit(functools.partial(gpu_parts.row_statistics, rows, **options))
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
        with changed(
            *((gpu_parts, x, functools.partial(getattr(gpu_parts, x), **options)) for x in kernels)
        ):
            return run(args, kwargs)

    return verifier


@contextlib.contextmanager
def changed(*changes):
    """While a call is traced as if a GPU were there, and with these changes."""
    traced_here = api, "_rejection_sample", api._rejection_sample.__wrapped__
    with contextlib.ExitStack() as stack:
        for change in ((api.support, "no_device", lambda: None), traced_here, *changes):
            stack.enter_context(mock.patch.object(*change))
        yield


def one_by_one(body, operands, **static):
    """`launch`, interpreted: for all parts of a `vmap`, one after another."""
    static["interpret"] = interpret_gpu_params()
    return jax.custom_batching.sequential_vmap(lambda x: launch.launch(body, x, **static))(operands)


@functools.cache
def on_one_device(num_parts: int):
    """The same of so many parts, which are all on one device, by interpreted kernels."""

    @jitted
    def verifier(logits, drafts, noise, **named):
        given, width = drafts.distribution, logits.shape[1]
        name = "probs" if isinstance(given, sd.DraftProbs) else "logits"
        stored = getattr(given, name)
        is_split = given.ids is None and stored.shape[1] == width

        def on_part(logits, stored):
            distribution = dataclasses.replace(given, **{name: stored})
            return sd.testing.rejection_sample_with_noise(
                logits,
                dataclasses.replace(drafts, distribution=distribution),
                noise,
                **named,
                sharding=sd.VerifySharding(None, "v"),
                implementation="mosaic_gpu",
                kernel_config=KernelConfig(max_cluster=1),
            )

        def cut(x):
            return jnp.moveaxis(x.reshape(x.shape[0], num_parts, -1), 1, 0)

        over_parts = jax.vmap(on_part, (0, 0 if is_split else None), axis_name="v")
        interpreted = functools.partial(gpu_parts.row_statistics, interpret=True)
        with changed((gpu_parts, "launch", one_by_one), (gpu_parts, "row_statistics", interpreted)):
            found = over_parts(cut(logits), cut(stored) if is_split else stored)
        return jax.tree.map(lambda x: x[0], found)

    return verifier


def listed(ids: str | None, layout: Layout, seed: int, broken: float = 0.1) -> Batch:
    batch = random_batch(layout, seed, broken=broken)
    return batch if ids is None else with_ids(batch, ids, 40 if ids == "candidates" else 901)[0]


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
    [
        pytest.param(LAYOUTS[1], marks=pytest.mark.long),
        *(pytest.param(LAYOUTS[i], marks=pytest.mark.slow) for i in (0, 2, 3)),
    ],
    ids=str,
)
def test_verification_by_them_gives_the_tokens_of_the_oracle(layout):
    one = over(1, config=KernelConfig(max_cluster=1), interpret=interpret_gpu_params())
    agree([random_batch(layout, seed=layout.vocab, broken=0.2)], one)


SOME = dict(num_speculative_tokens=2, num_requests=4, num_drafts=7)
LEFT_OUT = dict(has_filters=True, has_bitmask=True, has_threshold=True)
UNALIGNED = Layout(vocab=4402, **SOME, **LEFT_OUT, kind="logits", block=True)


@pytest.mark.parametrize(
    ("ids", "layout", "kernels"),
    [
        (None, LAYOUTS[1], 4),
        *(pytest.param(None, LAYOUTS[i], 3, marks=pytest.mark.long) for i in (0, 2, 3)),
        *(
            pytest.param(ids, UNALIGNED, count, marks=pytest.mark.long)
            for ids, count in ((None, 5), ("candidates", 3))
        ),
        pytest.param("map", UNALIGNED, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lowers_for_cuda(ids, layout, kernels):
    args, named = listed(ids, layout, seed=0, broken=0).arguments()
    named = {name: x for name, x in named.items() if x is not None}
    config, size = named.pop("config"), named.pop("vocab_size", None)

    def call(args, named):
        return over(2).__wrapped__(*args, **named, config=config, vocab_size=size)

    for bits64 in (False, True):
        with jax.enable_x64(bits64):
            lowered = jax.jit(call).trace(args, named).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("@mosaic_gpu") == kernels


READ = [
    (2, None, Layout(vocab=4400, vocab_size=4300, **SOME, **LEFT_OUT, kind="relative")),
    (4, "map", Layout(vocab=4356, **SOME, has_bitmask=True, kind="relative", dtype="bfloat16")),
    (2, "candidates", Layout(vocab=4400, **SOME, **LEFT_OUT, kind="logits", dtype="bfloat16")),
    (4, None, Layout(vocab=2600, **SOME, **LEFT_OUT, kind="logits", draft_dtype="bfloat16")),
    (2, None, Layout(vocab=2600, **SOME, **LEFT_OUT, kind="relative", draft_vocab=2100)),
    (2, None, Layout(vocab=4400, vocab_size=4300, **SOME, kind="relative", draft_vocab=4300)),
    (4, "candidates", Layout(vocab=2600, **SOME, kind="probs", block=True)),
    (2, "map", UNALIGNED),
    (2, None, Layout(vocab=2600, **SOME, **LEFT_OUT, kind="logits", rates=(0.9, 0.5))),
]
"""Parts, lists, and what else a part is read by: masks, filters, thresholds, whole draft rows."""


@pytest.mark.newest
@pytest.mark.parametrize(
    ("parts", "ids", "layout"),
    [
        READ[0],
        pytest.param(*READ[1], marks=pytest.mark.long),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in READ[2:]),
    ],
    ids=str,
)
def test_masks_thresholds_and_lists_of_parts_give_the_tokens_of_the_oracle(parts, ids, layout):
    # Of the first case, three tokens are drawn from residuals and one is a bonus.
    agree([listed(ids, layout, seed=19)], on_one_device(parts))


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "ids", "layout"), READ, ids=str)
def test_masks_thresholds_and_lists_of_parts_on_one_gpu_or_more(parts, ids, layout):
    parts = min(parts, len(jax.devices()))
    if parts == 1:  # whole draft rows of another width than the part's are refused then
        layout = dataclasses.replace(layout, draft_vocab=None)
    verifier = over(parts)
    agree((listed(ids, layout, seed) for seed in range(4)), verifier)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, Layout(vocab=128256, **BIG, kind="normalized")], ids=str
)
def test_the_parts_of_one_gpu_or_more_give_the_tokens_of_the_oracle(layout):
    verifier = over(len(jax.devices()))
    agree(random_batches(layout, range(4), broken=0.2), verifier)


def arrays_of(logits: jax.Array, batch: int, **given) -> CallArrays:
    drafts = sd.Drafts(jnp.zeros((0,), jnp.int32), jnp.zeros((batch + 1,), jnp.int32))
    noise = sd.testing.Noise(jnp.zeros((batch, 3)), jnp.zeros((batch, 2)))
    sampling = sd.SamplingParams(jnp.ones(batch))
    arrays = CallArrays(logits, drafts, noise, sampling)
    return dataclasses.replace(arrays, **given)


def test_a_call_without_requests_or_with_vma_is_refused_in_a_sentence():
    none, whole = arrays_of(jnp.zeros((0, 64)), 0), dict(size=64, num_parts=1)
    assert "B is 0" in api.support.part_unsupported(none, 3, **whole)
    refusals = []

    def inside(x):
        refusals.append(api.support.part_unsupported(arrays_of(x, 4), 3, **whole))
        return x

    spec = PartitionSpec(None, "v")
    over_parts = jax.shard_map(inside, mesh=mesh_of(1), in_specs=spec, out_specs=spec)
    jax.eval_shape(over_parts, jnp.ones((4, 64)))
    assert "check_vma=False" in refusals[0]


def test_a_part_that_is_padding_alone_is_left_to_xla():
    layout = Layout(vocab=128, vocab_size=60, **SOME, kind="probs")
    with pytest.raises(NotImplementedError, match="2 parts begins with id 64 and vocab_size is 60"):
        agree([random_batch(layout, 0)], on_one_device(2))
    refused = functools.partial(api.support.part_unsupported, arrays_of(jnp.zeros((4, 64)), 4), 3)
    assert refused(size=65, num_parts=2) is None and refused(size=64, num_parts=2) is not None
