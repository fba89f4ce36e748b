"""The Pallas TPU kernel: interpreted on the CPU with races detected, and lowered for TPUs."""

import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec
from lower_floor import TILE, DraftScale, LocalRows, Source, Xla, tiles
from lower_floor import tpu_largest as largest
from lower_floor import tpu_residual as residual
from lower_floor import tpu_statistics as statistics
from lower_floor import tpu_support as support

import jax_specdec as sd

from .batch import Layout, Request, agree, jitted, pack
from .cases import random_batch, random_batches


@contextlib.contextmanager
def backend():
    """Has `implementation="mosaic_tpu"` run on the CPU; what was not written reads as NaN."""
    params = pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
    with (
        mock.patch.object(support, "no_device", lambda: None),
        pltpu.force_tpu_interpret_mode(params),
    ):
        yield


def rejection_sample(*args, **kwargs):
    with backend():
        return sd.testing.rejection_sample_with_noise(*args, **kwargs, implementation="mosaic_tpu")


interpreted = jitted(rejection_sample)

SHAPES = [
    # rows, columns, columns read, dtype
    (21, 131, 131, "bfloat16"),
    (5, 5 * TILE + 77, 5 * TILE - 5, "float32"),  # two blocks
    (18, TILE - 5, TILE - 100, "float16"),
]


def rows_of(num_rows: int, width: int, dtype: str) -> np.ndarray:
    """Rows with many ties; the first four are a NaN's, an infinity's, empty and half empty."""
    x = np.random.default_rng(width).standard_normal((num_rows, width))
    x = np.round(8 * x) / 4
    x[0, 7], x[1, 3], x[2], x[3, ::2] = np.nan, np.inf, -np.inf, -np.inf
    x[4, :9] = 3e-6  # below the normal float16
    x[4, 9:] -= 20
    return x.astype(jnp.dtype(dtype))


@jax.jit
def find(logits, end, inverse, wanted, ranked, least):
    """Of rows: the maxima and argmaxes alone, all at once, and the sums from `least` on."""
    given = logits, end, inverse, wanted
    alone = statistics.row_statistics(*given, with_sums=False)
    both = statistics.row_statistics(*given, ranked=ranked)
    kept = statistics.row_statistics(*given, (both[0], least))
    return alone, both, kept, largest.Largest.of(both[3], lambda: jnp.zeros(())).bound


def found(*given):
    """By numpy arrays; of blocks of up to three tiles, so that a program is small."""
    with backend(), mock.patch.object(statistics, "_TILES", 3):
        return jax.device_get(find(*given))


@pytest.mark.parametrize(
    ("num_rows", "width", "end", "dtype"),
    [SHAPES[0], *(pytest.param(*shape, marks=pytest.mark.newest) for shape in SHAPES[1:])],
)
def test_what_is_found_of_rows_is_what_numpy_finds(num_rows, width, end, dtype):
    """Maxima, argmaxes, sums by tile of all entries and of those from `least` on, largest entries.

    The last block's argmaxes are wanted, and the largest entries of all blocks but the last.
    """
    logits = rows_of(num_rows, width, dtype)
    rng = np.random.default_rng(0)
    inverse = rng.uniform(0.5, 2, num_rows).astype(np.float32)
    last = np.arange(num_rows) == num_rows - 1
    ranked = np.arange(num_rows) < max(5, num_rows - num_rows % statistics.ROWS)
    least = np.where(rng.random(num_rows) < 0.5, 1.0, -np.inf).astype(np.float32)
    alone, both, kept, bound = found(logits, np.int32(end), inverse, last, ranked, least)
    x = logits.astype(np.float64)[:, :end]
    assert np.isposinf(alone[0][:2]).all()
    assert not np.isfinite(both[0][:2] + both[2][:2].sum(axis=1)).any()
    for peak, _, sums, _ in (alone, both, kept):
        np.testing.assert_array_equal(peak[2:], x[2:].max(axis=1))
        assert not sums[2].any()
    entries = both[3].astype(np.float64)
    for b in np.flatnonzero(ranked)[3:]:
        listed, wanted = (np.sort(y[b][y[b] > bound[b]]) for y in (entries, x))
        np.testing.assert_array_equal(listed, wanted)
        assert len(wanted) > 20
    x, least, inverse = x[3:], least[3:, None], np.float64(inverse[3:, None])
    np.testing.assert_array_equal(alone[1][3:], x.argmax(axis=1))
    assert both[1][-1] == x[-1].argmax()
    weights, count = np.exp((x - x.max(axis=1, keepdims=True)) * inverse), tiles.num_tiles(width)
    for (_, _, sums, _), limit in ((both, -np.inf), (kept, least)):
        left = np.where(x < limit, 0.0, weights)
        left = np.pad(left, ((0, 0), (0, count * TILE - end))).reshape(-1, count, TILE)
        np.testing.assert_allclose(sums[3:, :count], left.sum(axis=2), rtol=3e-6)
        assert not sums[3:, count:].any()


def test_an_end_before_the_first_column_leaves_nothing():
    """As of a part of the vocabulary that is all padding."""
    (num_rows, width, _, dtype), every = SHAPES[0], np.ones(21, bool)
    one = np.ones(num_rows, np.float32)
    _, (peak, _, sums, _), *_ = found(
        rows_of(num_rows, width, dtype), np.int32(-5), one, every, every, one
    )
    assert np.isneginf(peak).all() and not sums.any()


RESIDUALS = [
    # target rows, draft rows, columns, columns read, sources, dtypes, whether q is in logits
    (22, 14, 5 * TILE + 256, 5 * TILE + 50, 19, "bfloat16", "bfloat16", True),
    (8, 6, 3 * TILE + 128, 3 * TILE + 128, 9, "bfloat16", "float32", False),
]


def rows_and_source(target, draft, size, values):
    """What the kernel is given: only what it reads is filled in."""
    rows = LocalRows.of(target, draft, None, size=size, backend=Xla().on("tpu"), keeps_sums=True)
    unread = dict.fromkeys(Source._fields, jnp.zeros(len(values["row"])))
    return rows.target, rows.q, Source(**unread | values)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(RESIDUALS[0], marks=pytest.mark.newest), RESIDUALS[1]],
    ids=str,
)
def test_residual_masses_are_those_of_numpy(shape):
    """Rows of a request follow each other, as those of the block rule; some are not read."""
    num_rows, num_drafts, width, end, n, dtype, draft_dtype, has_logits = shape
    rng = np.random.default_rng(width)
    target = (3 * rng.standard_normal((num_rows, width))).astype(jnp.dtype(dtype))
    draft = 3 * rng.standard_normal((num_drafts, width))
    if not has_logits:
        draft = scipy.special.softmax(draft, axis=1)
        draft[0, 5], draft[1, 6], draft[2, TILE + 1] = np.nan, -1.0, np.inf
    draft = draft.astype(jnp.dtype(draft_dtype))
    index = np.arange(n, dtype=np.int32)
    rows, is_read = [(index + index // 4) % num_rows, (index + 1) % num_drafts], index % 7 != 2
    inverse, weight = rng.uniform(0.2, 2, (2, n)).astype(np.float32)
    least = np.where(rng.random(n) < 0.5, 1.0, -np.inf).astype(np.float32)
    of_drafts = np.full(num_drafts, 1.0, np.float32)

    def scale_and_probs(matrix: np.ndarray, index: np.ndarray, least: np.ndarray) -> tuple:
        x = matrix.astype(np.float64)[index, :end]
        kept, shift = x >= least[:, None], x.max(axis=1).astype(np.float32)
        x = (x - shift[:, None]) * inverse[:, None]
        log_scale = np.log(np.exp(x).sum(axis=1)).astype(np.float32)
        return tiles.Scale(shift, log_scale), np.where(kept, np.exp(x - log_scale[:, None]), 0.0)

    scale, p = scale_and_probs(target, rows[0], least)
    if has_logits:
        q_scale, q = scale_and_probs(draft, rows[1], of_drafts[rows[1]])
        given = sd.DraftLogits(draft, threshold=of_drafts)
    else:
        q_scale, q = scale, draft.astype(np.float64)[rows[1], :end]
        given = sd.DraftProbs(draft)
    left = np.where((q >= 0) & (q < np.inf), np.maximum(weight[:, None] * p - q, 0.0), np.nan)
    count = tiles.num_tiles(width)
    left = np.pad(left, ((0, 0), (0, count * TILE - end))).reshape(n, count, TILE).sum(axis=2)
    values = dict(row=rows[0], draft_row=rows[1], uses_q=is_read, inv_temperature=inverse)
    values |= dict(scale=scale, threshold=least, draft_scale=DraftScale(q_scale, is_read))

    @jax.jit
    def compute(target, given, values):
        return residual.residual_masses(*rows_and_source(target, given, end, values))

    with backend(), mock.patch.object(residual, "_TILES", 3):  # more than one block
        got = compute(target, given, values | dict(weight=weight))
    assert has_logits == (not np.isnan(got).any())
    np.testing.assert_allclose(got, np.where(is_read[:, None], left, 0.0), atol=3e-6)


@pytest.mark.parametrize(
    ("num_rows", "width", "dtype"),
    [(4, 131, "float32"), (3, 256, "bfloat16"), (4, 256, "float16")],
)
def test_rows_that_cannot_be_copied_alone_are_left_to_xla(num_rows, width, dtype):
    matrix, row = jnp.zeros((num_rows, width), dtype), jnp.zeros(1, jnp.int32)
    target, q, _ = rows_and_source(matrix, sd.DraftLogits(matrix), width, dict(row=row))
    assert not residual.serves(target, q)


@pytest.mark.parametrize(("kind", "copies"), [("TPU v3", False), ("TPU v4", True)])
def test_old_tpus_leave_the_residual_to_xla(kind, copies):
    matrix = jnp.zeros((4, 256))
    target, q, _ = rows_and_source(matrix, sd.DraftProbs(matrix), 256, dict(row=jnp.zeros(1)))
    with mock.patch.object(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)]):
        assert residual.serves(target, q) == copies


BIG = dict(num_speculative_tokens=4, num_requests=8, num_drafts=34)
RATES = (0.9, 0.75, 0.3, 0.1)
FIRST = Layout(vocab=97, **BIG, dtype="bfloat16", has_active=True)
LAYOUTS = [
    Layout(
        vocab=TILE + 1,
        **BIG,
        dtype="bfloat16",
        kind="probs",
        vocab_size=TILE - 48,
        store_rows=50,
        has_valid=True,
        block=True,
        has_bonus=True,
    ),
    Layout(
        vocab=2 * TILE + 79,
        **BIG,
        dtype="bfloat16",
        kind="normalized",
        draft_dtype="bfloat16",
        vocab_size=2 * TILE - 1,
        has_filters=True,
        has_bitmask=True,
    ),
    Layout(vocab=4224, **BIG, kind="logits", agreement=True, has_filters=True),
    Layout(vocab=2203, **BIG, kind="relative", dtype="float16", rates=RATES),
]


@pytest.mark.parametrize(
    "layout",
    [
        FIRST,
        *(pytest.param(x, marks=pytest.mark.newest) for x in LAYOUTS[:2]),
        *(pytest.param(x, marks=pytest.mark.long) for x in LAYOUTS[2:]),
    ],
    ids=str,
)
def test_gives_the_tokens_of_the_oracle(layout):
    agree(random_batches(layout, range(2 if layout.has_filters else 6), broken=0.2), interpreted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_hurts_only_its_own_request(bad):
    """Wherever it lies in the row; -inf fills it."""
    layout, rng = FIRST, np.random.default_rng(3)
    for column in (0, 50, layout.vocab - 1):
        requests = [
            Request(rng.standard_normal((2, layout.vocab)), [5], accept=[0.0], temperature=t)
            for t in (0.0, 0.7, 0.0, 0.7, 1.0)
        ]
        for request in requests[:2]:
            request.target[0, slice(None) if bad == -np.inf else column] = bad
        (got,) = agree([pack(requests, layout)], interpreted)
        assert got.status[:5].tolist() == [sd.Status.BAD_TARGET_ROW] * 2 + [sd.Status.OK] * 3


def test_over_a_split_vocabulary_tokens_are_those_of_the_oracle():
    layout = Layout(vocab=2 * 1100, **BIG, dtype="bfloat16", kind="logits", vocab_size=2100)
    mesh = jax.make_mesh((2,), ("v",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = jitted(
        functools.partial(rejection_sample, sharding=sd.VerifySharding(mesh, vocab_axis="v"))
    )
    agree(random_batches(layout, range(3), broken=0.2), split)


@pytest.mark.parametrize("is_x64", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_is_lowered_for_a_tpu_by_every_jax(dtype, is_x64):
    shapes = [(21, 300), (), (21,), (21,), (21,)]
    dtypes = [dtype, "int32", "float32", "bool", "float32"]
    arrays = map(jax.ShapeDtypeStruct, shapes, map(jnp.dtype, dtypes))

    @jax.jit
    def both(*given):
        *given, wanted, least = given
        peak, argmax, _, lists = statistics.row_statistics(*given, wanted, ranked=wanted)
        return argmax, lists, statistics.row_statistics(*given, wanted, (peak, least))[2]

    with jax.enable_x64(is_x64):
        traced = both.trace(*arrays)
        lowered = traced.lower(lowering_platforms=("tpu",))
    listed = "bfloat16" if dtype == "bfloat16" else "float32"
    assert [str(x.dtype) for x in traced.out_info] == ["int32", listed, "float32"]
    assert "tpu_custom_call" in lowered.as_text()


def call(**options):
    batch = random_batch(FIRST, 0)
    args, kwargs = batch.arguments()
    return rejection_sample(*args, **kwargs, **options)


def test_refuses_values_that_vary_over_a_mesh():
    mesh = jax.make_mesh((1,), ("v",), (AxisType.Auto,), devices=jax.devices()[:1])
    args, kwargs = random_batch(FIRST, 0).arguments()
    sharding = sd.VerifySharding(vocab_axis="v")

    def verify_part(logits):
        return rejection_sample(logits, *args[1:], **kwargs, sharding=sharding)

    over = jax.shard_map(
        verify_part, mesh=mesh, in_specs=PartitionSpec(None, "v"), out_specs=PartitionSpec()
    )
    with pytest.raises(NotImplementedError, match="mosaic_tpu.*check_vma=False"):
        over(args[0])


def test_needs_a_tpu():
    args, kwargs = random_batch(FIRST, 0).arguments()
    with pytest.raises(NotImplementedError, match="mosaic_tpu.*needs a TPU.*runs on cpu"):
        sd.testing.rejection_sample_with_noise(*args, **kwargs, implementation="mosaic_tpu")
