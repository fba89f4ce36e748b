"""Verification over a mesh: the same tokens, wherever the vocabulary and the requests lie."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lower_floor import Backend, assume, gpus, sharding
from measure import collectives

import jax_specdec as sd

from . import test_edges
from .backends import mesh_of, over
from .batch import Batch, Layout, agree, check, jitted, pack, verify
from .cases import random_batch, random_batches, random_request
from .layouts import BIG, CUT_IN_PARTS, FILTERED_PARTS

EVEN = dict(num_speculative_tokens=4, num_requests=8, num_drafts=32)


long, slow = pytest.mark.long, pytest.mark.slow

# On GPUs.

GATHERED = Layout(vocab=4120, vocab_size=4099, **BIG, kind="normalized", dtype="bfloat16")
# A constant is no part of what JAX caches by.
OTHER = dataclasses.replace(FILTERED_PARTS, vocab=2608)


@long
@pytest.mark.parametrize(
    ("layout", "most"), [pytest.param(GATHERED, 2**23, marks=slow), (OTHER, 0)], ids=str
)
def test_a_form_for_gpus_gives_the_tokens_of_the_oracle(layout, most, monkeypatch):
    """With the rows gathered first, and split."""
    monkeypatch.setattr(sharding, "MOST_GATHERED", most)
    with assume("cuda"):
        agree(random_batches(layout, range(4)), over(8))


@pytest.mark.gpu
@pytest.mark.parametrize("most", [0, 2**40])
@pytest.mark.parametrize("layout", [CUT_IN_PARTS, FILTERED_PARTS, GATHERED], ids=str)
def test_one_gpu_or_more_give_the_tokens_of_the_oracle(layout, most, monkeypatch):
    monkeypatch.setattr(sharding, "MOST_GATHERED", most)
    jax.clear_caches()
    num_parts = 2 ** (len(jax.devices()).bit_length() - 1)
    mesh = jax.make_mesh((num_parts,), ("v",), (AxisType.Auto,), devices=jax.devices()[:num_parts])
    call = functools.partial(
        sd.testing.rejection_sample_with_noise, sharding=sd.VerifySharding(mesh, "v")
    )
    agree(random_batches(layout, range(4)), jitted(call))


def on_a_gpu(batch: int, **options: Any) -> str:
    """The program of a call over four GPUs."""
    k, v, mesh = 4, 128256, mesh_of(4)
    split, whole = NamedSharding(mesh, P(None, "v")), NamedSharding(mesh, P())

    def array(*shape, dtype="float32", where=whole):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where)

    drafts = sd.Drafts(
        array(batch * k, dtype="int32"),
        array(batch + 1, dtype="int32"),
        sd.DraftLogits(array(batch * k, v, dtype="bfloat16", where=split)),
    )
    run = functools.partial(
        sd.rejection_sample,
        config=sd.SpecDecodeConfig(num_speculative_tokens=k),
        sharding=sd.VerifySharding(mesh, "v"),
        **options,
    )
    with assume("cuda"):
        lowered = jax.jit(run).lower(
            array(batch * (k + 1), v, dtype="bfloat16", where=split),
            drafts,
            sampling=sd.SamplingParams(array(batch)),
            keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
            positions=array(batch, dtype="int32"),
        )
    return lowered.as_text()


@long
@pytest.mark.parametrize(
    ("batch", "gathered"), [(1, {"4x128256xbf16", "5x128256xbf16"}), (8, set())]
)
def test_gpus_gather_the_rows_of_a_few_requests_alone(batch, gathered):
    """The matrices that an exchange leaves."""
    left = re.findall(r"stablehlo.all_gather.*-> tensor<([^>]*)>", on_a_gpu(batch))
    assert left and {x for x in left if "128256" in x} == gathered


def test_the_kernel_refuses_rows_that_are_not_gathered():
    with (
        mock.patch.object(gpus, "no_device", lambda: None),
        pytest.raises(NotImplementedError, match="split over devices.*too large to be gathered"),
    ):
        on_a_gpu(8, implementation="mosaic_gpu")


# Requests split over a mesh axis.


def even_batch(layout: Layout, seed: int) -> Batch:
    """Every request owns K drafts, as `Drafts.from_dense` has it."""
    rng = np.random.default_rng(seed)
    k = layout.num_speculative_tokens
    return pack([random_request(layout, rng, k) for _ in range(layout.num_requests)], layout, seed)


@long
def test_requests_split_over_an_axis_give_the_oracles_tokens():
    layout = Layout(vocab=5000, **EVEN, kind="logits", has_valid=True)
    agree((even_batch(layout, seed) for seed in range(12)), over(2, 4))


@long
def test_requests_whose_drafts_lie_in_another_part_are_bad_input():
    layout = Layout(vocab=96, num_speculative_tokens=2, num_requests=4, num_drafts=4)
    rng = np.random.default_rng(0)
    verifier = over(2, 2)
    for counts, bad in (((1, 1, 2, 0), []), ((2, 1, 1, 0), [1, 2]), ((0, 1, 1, 2), [2])):
        requests = [random_request(layout, rng, count, temperature=0.7) for count in counts]
        output = verify(pack(requests, layout), verifier)
        assert np.flatnonzero(output.status == sd.Status.BAD_INPUT).tolist() == bad
        assert not np.delete(output.status, bad).any()


# Ways in.


def in_shard_map(layout: Layout, *, draft_spec: P, check_vma: bool):
    """A verifier inside a `shard_map` of its own, over eight parts."""

    @jitted
    def verifier(target_logits, drafts, noise, *, sampling, config, vocab_size, **_):
        storage = dataclasses.replace(drafts.distribution, rows=None, valid=None)
        specs = (P(None, "v"), jax.tree.map(lambda _: draft_spec, storage), P())

        def part(target_logits, storage, rest):
            drafts, noise, sampling = rest
            drafts = dataclasses.replace(drafts, distribution=storage)
            return sd.testing.rejection_sample_with_noise(
                target_logits,
                drafts,
                noise,
                sampling=sampling,
                config=config,
                vocab_size=vocab_size,
                sharding=sd.VerifySharding(vocab_axis="v"),
            )

        rest = dataclasses.replace(drafts, distribution=None), noise, sampling
        mapped = jax.shard_map(
            part, mesh=mesh_of(8), in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        return mapped(target_logits, storage, rest)

    return verifier


@pytest.mark.long
@pytest.mark.parametrize(
    ("draft_vocab", "draft_spec"),
    [(None, P(None, "v")), pytest.param(9, P(), marks=slow)],  # narrower than a part, and whole
)
def test_a_call_inside_shard_map_gives_the_oracles_tokens(draft_vocab, draft_spec):
    layout = Layout(vocab=96, **BIG, kind="logits", draft_vocab=draft_vocab, vocab_size=90)
    verifier = in_shard_map(layout, draft_spec=draft_spec, check_vma=True)
    agree(random_batches(layout, range(6)), verifier)


@pytest.mark.parametrize(
    ("vocab", "axis_type", "under_jit"),  # of which `vocab` has it traced each time
    [
        pytest.param(96, AxisType.Auto, False, marks=slow, id="top level, automatic axes"),
        pytest.param(104, AxisType.Explicit, True, marks=long, id="jit, explicit axes"),
    ],
)
def test_arrays_that_are_split_are_verified_where_they_are(
    vocab, axis_type, under_jit, monkeypatch
):
    layout = Layout(vocab=vocab, **EVEN, kind="probs")
    mesh, seen = mesh_of(4, 2, axis_type), []
    inner = Backend.verify

    def watched(self, arrays, *given):
        seen.append((arrays.target_logits.shape, arrays.drafts.distribution.probs.shape))
        return inner(self, arrays, *given)

    monkeypatch.setattr(Backend, "verify", watched)
    call = sd.testing.rejection_sample_with_noise
    batch = even_batch(layout, 3)
    (target_logits, drafts, noise), options = batch.arguments()
    target_logits, probs = jax.device_put(
        (target_logits, drafts.distribution.probs), NamedSharding(mesh, P("b", "v"))
    )
    drafts = dataclasses.replace(drafts, distribution=sd.DraftProbs(probs))
    if under_jit:
        if axis_type == AxisType.Auto:  # then nothing is known of a traced array's place
            call = functools.partial(call, sharding=sd.VerifySharding(mesh, "v", "b"))
        call = jitted(call)
    output = jax.device_get(call(target_logits, drafts, noise, **options))
    assert seen == [((20, vocab // 4), (16, vocab // 4))]
    check(batch, output)


@slow
@pytest.mark.parametrize(
    ("spec", "options"),
    [(P("b", None), {}), (P(None, "v"), {"sharding": sd.VerifySharding()})],
    ids=["three requests over two devices", "not wanted"],
)
def test_other_arrays_are_verified_as_if_they_were_not_split(spec, options, monkeypatch):
    monkeypatch.delattr(sharding, "over_mesh")
    layout = Layout(vocab=96, num_requests=3, num_drafts=5)
    batch = random_batch(layout, 1)
    (target_logits, drafts, noise), named = batch.arguments()
    target_logits = jax.device_put(target_logits, NamedSharding(mesh_of(4, 2), spec))
    output = sd.testing.rejection_sample_with_noise(
        target_logits, drafts, noise, **named, **options
    )
    check(batch, jax.device_get(output))


@long
def test_a_vocabulary_on_one_device_is_not_split(monkeypatch):
    inner, axes = Backend.verify, []

    def watched(self, arrays, rule, static):
        axes.append(static.layout.vocab_axis)
        return inner(self, arrays, rule, static)

    monkeypatch.setattr(Backend, "verify", watched)
    layout = Layout(vocab=97, num_requests=3, num_drafts=5, race=True)
    batch = random_batch(layout, 2)
    args, named = batch.arguments()
    named["sharding"] = sd.VerifySharding(mesh_of(1), "v")
    call = functools.partial(sd.testing.rejection_sample_with_noise, **named)
    jax.eval_shape(call, *args)  # a race, which no parts can run
    assert set(axes) == {None}


# What crosses the links.

WHOLE = P()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["standard", pytest.param("block", marks=pytest.mark.slow)])
def test_three_small_collectives_and_no_copy_of_logits(method):
    b, k, v = 64, 4, 128256
    mesh = mesh_of(8)

    def array(*shape, dtype="float32", spec=WHOLE):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), b))
    lowered = jax.jit(sd.rejection_sample, static_argnames=("config", "sharding")).lower(
        array(b * (k + 1), v, spec=P(None, "v")),
        sd.Drafts(
            array(b * k, dtype="int32"),
            array(b + 1, dtype="int32"),
            sd.DraftLogits(array(b * k, v, spec=P(None, "v"))),
        ),
        sampling=sd.SamplingParams(array(b)),
        keys=keys,
        positions=array(b, dtype="int32"),
        config=sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method=method),
        sharding=sd.VerifySharding(mesh, "v"),
    )
    compiled = lowered.compile()
    moved = collectives(compiled.as_text())
    # By blocks, the sums of every position: of its 9 tiles, twice, from each of 8 parts.
    most = 8 * b * (k + 1) * 2 * 9 * 4 if method == "block" else 2**16
    assert len(moved) == 3 and max(moved.values()) <= most, moved
    used = compiled.memory_analysis().temp_size_in_bytes
    # On a CPU, which writes exponentials to memory before it sums them.
    assert used < 1.5 * (b * (k + 1) * v // 8 * 4), f"{used} bytes"


@long
def test_filters_exchange_sums_and_no_row():
    """16 bits of a threshold, two at a time on CPUs: 3 sums of each row in each exchange."""
    b, k, v = 16, 4, 16384
    mesh = mesh_of(4)

    def array(*shape, dtype="float32", spec=WHOLE):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    sampling = sd.SamplingParams(array(b), array(b), array(b, dtype="int32"), array(b))
    lowered = jax.jit(sd.rejection_sample, static_argnames=("config", "sharding")).lower(
        array(b * (k + 1), v, dtype="bfloat16", spec=P(None, "v")),
        sd.Drafts(array(b * k, dtype="int32"), array(b + 1, dtype="int32")),
        sampling=sampling,
        keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), b)),
        positions=array(b, dtype="int32"),
        config=sd.SpecDecodeConfig(num_speculative_tokens=k),
        sharding=sd.VerifySharding(mesh, "v"),
    )
    compiled = lowered.compile()
    moved = collectives(compiled.as_text())
    # Besides the three of any call: a maximum, 3 sums in a loop for each of two, and a total.
    sums = 3 * 4 * b * (k + 1)
    assert len(moved) == 7 and list(moved.values()).count(sums) == 2, moved
    assert max(moved.values()) < 2**14 < b * (k + 1) * v * 2 / 100, moved
    # Rows stay in the cache of a CPU: nothing as large as its part of the logits is written.
    part = b * (k + 1) * v // 4 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < part


# What is refused, at trace time.


@functools.cache
def mesh() -> Mesh:
    """Not made while the file is imported: a machine may have one device."""
    return mesh_of(2, 2)


SMALL = Layout(vocab=96, num_requests=4, num_drafts=8, num_speculative_tokens=2, kind="logits")


def call(layout: Layout, sharding, **options) -> None:
    args, named = random_batch(layout, 0).arguments()
    sd.testing.rejection_sample_with_noise(*args, **(named | options), sharding=sharding)


@pytest.mark.parametrize(
    ("error", "sentence", "layout", "options"),
    [
        (ValueError, r"target_logits\.shape", {"vocab": 97}, {}),
        (ValueError, "B", {"num_requests": 3}, {}),
        (ValueError, "N", {"num_drafts": 9}, {}),
        (NotImplementedError, "RaceNoise", {"race": True}, {}),
    ],
    ids=["V", "B", "N", "race"],
)
def test_what_cannot_be_split_is_refused(error, sentence, layout, options):
    with pytest.raises(error, match=f"^{sentence}"):
        call(dataclasses.replace(SMALL, **layout), sd.VerifySharding(mesh(), "v", "b"), **options)


@pytest.mark.parametrize(
    ("error", "sentence", "arguments"),
    [
        (TypeError, "mesh", ("v",)),
        (TypeError, "vocab_axis", (mesh, 0)),
        (ValueError, "batch_axis", (mesh, "v", "x")),
        (ValueError, "vocab_axis", (mesh, "v", "v")),
        (ValueError, "vocab_axis and batch_axis", (mesh,)),
    ],
    ids=["mesh", "name", "unknown axis", "same axis", "no axis"],
)
def test_a_sharding_that_is_none_is_refused(error, sentence, arguments):
    with pytest.raises(error, match=f"^{sentence}"):
        sd.VerifySharding(*[x() if callable(x) else x for x in arguments])


def test_something_else_is_no_sharding():
    with pytest.raises(TypeError, match="sharding"):
        call(SMALL, mesh())


def test_an_axis_without_mesh_or_shard_map_is_refused():
    with pytest.raises(ValueError, match="sharding"):
        call(SMALL, sd.VerifySharding(vocab_axis="v"))


@pytest.mark.parametrize(
    ("width", "spec", "check_vma", "sentence"),
    [
        (64, P(None, "v"), True, r"drafts\.distribution"),
        (64, P(None, "v"), False, r"drafts\.distribution"),
        (9, P(), False, r"drafts\.distribution"),
    ],
)
def test_draft_storage_that_could_be_whole_or_part_is_refused(width, spec, check_vma, sentence):
    layout = dataclasses.replace(SMALL, draft_vocab=width)
    with pytest.raises(ValueError, match=f"^{sentence}"):
        verify(random_batch(layout, 0), in_shard_map(layout, draft_spec=spec, check_vma=check_vma))


def test_draft_storage_that_cannot_be_read_in_parts_is_refused():
    (target_logits, drafts, noise), named = random_batch(SMALL, 0).arguments()
    rows = jax.device_put(jnp.zeros((8, 64)), NamedSharding(mesh(), P(None, "v")))
    drafts = dataclasses.replace(drafts, distribution=sd.DraftLogits(rows))
    with pytest.raises(ValueError, match=r"^drafts\.distribution"):
        sd.testing.rejection_sample_with_noise(
            target_logits, drafts, noise, **named, sharding=sd.VerifySharding(mesh(), "v")
        )


@pytest.mark.parametrize(
    "temperature", [pytest.param(0.6, marks=long), pytest.param(1.0, marks=slow)]
)
def test_a_residual_of_rounding_gives_a_sample_of_the_target(temperature):
    edges = test_edges.TestEdges()
    edges.verifier = over(8)
    edges.test_an_empty_residual_of_equal_logits_samples_the_target(temperature)
