"""The Mosaic GPU backend: interpreted on the CPU, lowered for CUDA, and run on a GPU."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import TILE, OneByOne, api, support
from lower_floor import gpu_request as request

import jax_specdec as sd
from jax_specdec.testing import KernelConfig

from .backends import four_tiles, interpreted, kernel_without_gpu
from .batch import ALMOST_ONE, EMPTY, Batch, Layout, Request, agree, check, jitted, pack
from .between import with_offsets
from .cases import random_batch, random_batches
from .interpret_mode import interpret_gpu_params
from .layouts import GIVEN_BONUS, KERNEL, KERNEL_BLOCK, KERNEL_FILTERED, TILES, few

two_rows = KernelConfig(max_cluster=1, rows_at_once=2, tiles_at_once=2)  # three rows may never end


# An interpreted kernel takes seconds to compile and little to run, so each program has many seeds,
# and edges are packed into batches of layouts that are there already.
def agrees(layout, verifier, seeds=range(4)):
    first = len(layout.kind) + layout.vocab
    agree(random_batches(layout, [first + seed for seed in seeds], broken=0.2), verifier)


@pytest.mark.slow
@pytest.mark.newest
def test_recovered_tokens_come_from_all_tiles_that_the_oracle_draws_from():
    layout, rng, found = TILES, np.random.default_rng(8), set()
    for u in np.arange(0.5, 12).reshape(3, 4) / 12:  # no tile has less than a twelfth
        target, draft = rng.normal(size=(2, layout.num_requests, 2, layout.vocab))
        likelihood = np.log([2, 3, 2.2, 3.5, 2.4, 2.6, 40])  # no two tiles have the same mass
        target += np.repeat(likelihood, TILE)[: layout.vocab]
        target, draft = target.astype(jnp.bfloat16), draft[:, :1].astype(jnp.bfloat16)
        normalizer = np.log(np.exp(draft.astype(np.float64)).sum(axis=-1))
        likelier = np.argmax(draft[:, 0].astype(float) - target[:, 0].astype(float), axis=-1)
        requests = [
            Request(t, [i], d, n, accept=[0.99], recover=[u_tile, 0.5])
            for t, i, d, n, u_tile in zip(target, likelier, draft, normalizer, u, strict=True)
        ]
        batch = pack(requests, layout)
        (output,) = agree([batch], four_tiles)
        assert (output.num_accepted == 0).all()
        found |= set(output.token_ids[:, 0] // TILE)
    assert found == set(range(-(-layout.vocab // TILE)))


@pytest.mark.slow
@pytest.mark.newest
def test_noise_from_keys_is_what_draw_noise_gives():
    layout, rng = dataclasses.replace(KERNEL[1], has_bonus=True), np.random.default_rng(5)
    words = rng.integers(2**32, size=(layout.num_requests, 4), dtype="uint32")
    keys = jax.random.wrap_key_data(words, impl="rbg")
    positions = np.arange(layout.num_requests, dtype=np.int32) * 1000
    draw_noise = jax.jit(sd.testing.draw_noise, static_argnums=2)
    noise = jax.device_get(draw_noise(keys, positions, layout.num_speculative_tokens))

    @jax.jit
    def keyed(logits, drafts, named, positions):
        with kernel_without_gpu(interpret=interpret_gpu_params()):
            return sd.rejection_sample(
                logits,
                drafts,
                keys=keys,
                positions=positions,
                config=layout.config,
                implementation="mosaic_gpu",
                kernel_config=KernelConfig(max_cluster=1),
                **named,
            )

    for seed in range(2):
        batch = random_batch(layout, seed, broken=0.2).replace(noise=noise)
        (logits, drafts, _), named = batch.arguments()
        named = {name: named[name] for name in ("sampling", "bonus_token_ids", "active")}
        output = jax.device_get(keyed(logits, drafts, named, positions))
        check(batch, output)
    positions[-1] = -1
    negative = jax.device_get(keyed(logits, drafts, named, positions))
    assert negative.status[-1] in (sd.Status.BAD_INPUT, sd.Status.INACTIVE)
    assert (negative.token_ids[-1] == sd.PLACEHOLDER_TOKEN_ID).all()
    np.testing.assert_array_equal(negative.token_ids[:-1], output.token_ids[:-1])


@pytest.mark.long
def test_two_rows_at_once_overwrite_nothing_still_read():
    layout = few(GIVEN_BONUS, num_speculative_tokens=5, num_requests=1, num_drafts=5)
    agree([random_batch(layout, seed=3)], interpreted(two_rows, detect_races=True))


SMALL = Layout(vocab=128, num_requests=67, num_drafts=67 * 3, has_active=True)
IDLE = dataclasses.replace(EMPTY, active=False)


def in_one_group(*args, **kwargs):
    """`alone`, with loads of the offsets of one group of 32 requests in flight."""
    with mock.patch.object(request, "_GROUPS", 1):
        return of_groups(*args, **kwargs)


of_groups = interpreted(KernelConfig(max_cluster=1))


def answers(requests, layout, verifier):
    """What is emitted for each of the first requests of a batch, or their status."""
    (output,) = agree([pack(requests, layout)], verifier)
    return [
        output.token_ids[b, : output.num_emitted[b]].tolist() or sd.Status(output.status[b])
        for b in range(len(requests))
    ]


def logits(rows, fill=-np.inf, vocab=128):
    target = np.full((len(rows), vocab), fill)
    for row, ids in zip(target, rows, strict=True):
        row[list(ids)] = 2.0
    return target


def far_entries(layout):
    target = logits([[3], [5], [7]], vocab=layout.vocab)
    target[0, 6] = -500.0  # exp(502) is out of range
    target[1, 5] = -300.0  # and exp(-302), relative to the row before
    draft = None if layout.kind == "none" else target[:2, : layout.stored_vocab]
    yield Request(target, [6, 5], draft=draft, accept=[ALMOST_ONE] * 2), [[3]]
    yield Request(target, [3, 5], draft=draft, accept=[0.0] * 2, bonus=7), [[3, 5, 7]]


@pytest.mark.slow
@pytest.mark.newest
def test_a_request_sees_all_before_it_whose_rows_it_would_share():
    index = np.arange(SMALL.num_requests + 1)
    # Some begin too early.
    late = [3 * index - 4 * np.sum(index > np.c_[last], axis=0) for last in ([1, 31, 33, 65], [32])]
    for offsets in (*late, np.r_[0, 3, np.full(SMALL.num_requests - 1, 2)]):
        back = np.flatnonzero(np.diff(offsets) < 0)  # the request after that one shares a row
        bad = index[1:-1] if offsets[-1] == 2 else np.union1d(back, back + 1)
        active = np.isin(index[:-1], [*bad, *back - 1, *back + 2])  # others only take time
        batch = with_offsets(offsets, SMALL).replace(active=active)
        (output,) = agree([batch], in_one_group)
        np.testing.assert_array_equal(np.flatnonzero(output.status == sd.Status.BAD_INPUT), bad)


# Lowering for CUDA, on the CPU.


def lowered(layout: Layout, config: KernelConfig | None = None, batch: Batch | None = None) -> str:
    def call(logits, drafts, noise, sampling, bonus, active):
        with kernel_without_gpu():
            return sd.testing.rejection_sample_with_noise(
                logits,
                drafts,
                noise,
                sampling=sampling,
                config=layout.config,
                bonus_token_ids=bonus,
                active=active,
                vocab_size=layout.vocab_size,
                implementation="mosaic_gpu",
                kernel_config=config,
            )

    batch = random_batch(layout, seed=0, broken=0) if batch is None else batch
    positional, named = batch.arguments()
    arguments = (*positional, named["sampling"], named["bonus_token_ids"], named["active"])
    return jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        GIVEN_BONUS,
        pytest.param(KERNEL_BLOCK[0], marks=pytest.mark.slow),
        pytest.param(KERNEL_FILTERED[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lowers_for_cuda_to_one_kernel(layout):
    assert lowered(layout).count("@mosaic_gpu") == 1


@pytest.mark.long
def test_lowers_for_cuda_in_64_bit_mode():
    with jax.enable_x64(True):
        assert lowered(KERNEL[3]).count("@mosaic_gpu") == 1


# What it refuses, and when it is chosen.


def refusal(layout: Layout, **options) -> str:
    with pytest.raises(NotImplementedError) as error:
        lowered(layout, **options)
    return str(error.value)


def test_calls_it_cannot_serve_are_refused_in_a_sentence():
    assert "not RaceNoise" in refusal(Layout(vocab=128, race=True))
    drawing = Layout(vocab=128, agreement=True)
    assert "but rejection_sample_method is 'agreement'" in refusal(drawing)
    many = Layout(vocab=128, num_speculative_tokens=31, num_requests=1, num_drafts=31)
    assert "up to 30 drafts per request, but num_speculative_tokens is 31" in refusal(many)
    large = Layout(vocab=2**20, num_requests=1, num_drafts=0)
    assert "1048576 ids of float32 need" in refusal(large)
    small = Layout(vocab=128, num_requests=1, num_drafts=1)
    assert "interpret mode" in refusal(small, config=KernelConfig(max_cluster=1))


def test_a_rule_that_the_kernel_lacks_is_refused_by_name():
    class Newer(OneByOne):
        name = "newer"

        def goes_on(self, positions):
            return positions.is_good

    assert "rejection_sample_method is 'newer'" in support.rule_unsupported(Newer())
    # Past that check, the kernel does not verify by another rule instead.
    with mock.patch.object(api, "rule_of", lambda config: Newer()):
        with pytest.raises(TypeError, match="no walk for the rule 'newer'"):
            lowered(Layout(vocab=128, num_requests=1, num_drafts=1))


class Device:
    def __init__(self, platform: str, capability: str = ""):
        self.platform, self.compute_capability, self.device_kind = platform, capability, "device"


@pytest.mark.parametrize(("k", "kernels"), [(3, 1), (31, 0)])
def test_it_is_the_default_on_hopper_for_the_calls_it_serves(k, kernels):
    layout = Layout(vocab=97, num_speculative_tokens=k, num_drafts=2 * k)
    batch = random_batch(layout, seed=0)
    positional, named = batch.arguments()
    config = named.pop("config")
    named.pop("vocab_size")

    def call(positional, named):
        inner = api._rejection_sample.__wrapped__
        with mock.patch.object(api, "_rejection_sample", inner):
            return sd.testing.rejection_sample_with_noise(*positional, **named, config=config)

    with mock.patch.object(jax, "devices", lambda: [Device("gpu", "9.0")]):
        traced = jax.jit(call).trace(positional, named)
        lowered = [traced.lower(lowering_platforms=(x,)).as_text() for x in ("cuda", "cpu")]
    assert [text.count("@mosaic_gpu") for text in lowered] == [kernels, 0]

    logits, drafts = positional[:2]
    for config in (layout.config, dataclasses.replace(layout, block=True).config):
        assert sd.testing.which_implementation(logits, drafts, config=config) == "xla"
        with mock.patch.object(jax, "devices", lambda: [Device("gpu", "9.0")]):
            found = sd.testing.which_implementation(logits, drafts, config=config)
        assert found == ("mosaic_gpu" if kernels else "xla")


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
def test_the_compiled_program_holds_the_kernel(implementation):
    batch = random_batch(Layout(vocab=256, kind="probs"), seed=0)
    args, kwargs = batch.arguments()
    verifier = jitted(
        functools.partial(sd.testing.rejection_sample_with_noise, implementation=implementation)
    )
    assert "mosaic_gpu" in verifier.lower(*args, **kwargs).compile().as_text()


@pytest.mark.gpu
def test_rows_past_two_to_the_31_entries_are_read_where_they_are():
    k, size, count = 4, 151936, 3276
    rows = count * (k + 1)
    assert (rows - 1) * size > 2**31

    @jax.jit
    def make(key):
        def fill(i, logits):
            some = 3 * jax.random.normal(jax.random.fold_in(key, i), (k + 1, size), jnp.bfloat16)
            return jax.lax.dynamic_update_slice(logits, some, (i * (k + 1), 0))

        return jax.lax.fori_loop(0, count, fill, jnp.zeros((rows, size), jnp.bfloat16))

    logits = make(jax.random.key(0))
    last = logits[-8 * (k + 1) :]
    ids = jnp.argmax(logits.reshape(count, k + 1, size)[:, :k], axis=-1).astype(jnp.int32)
    noise = sd.testing.draw_noise(jax.random.split(jax.random.key(1), count), jnp.arange(count), k)
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)

    def run(logits, ids, noise, temperature, implementation="mosaic_gpu", **kwargs):
        drafts, sampling = sd.Drafts.from_dense(ids), sd.SamplingParams(temperature)
        return jax.device_get(
            sd.testing.rejection_sample_with_noise(
                logits,
                drafts,
                noise,
                sampling=sampling,
                config=config,
                implementation=implementation,
                **kwargs,
            )
        )

    temperature = jnp.where(jnp.arange(count) % 2 == 0, 0.0, 0.3)
    whole = run(logits, ids, noise, temperature)
    end = jax.tree.map(lambda x: x[-8:], (ids, noise, temperature))
    small = run(last, *end, kernel_config=KernelConfig())
    assert (small.num_emitted > 1).any()
    np.testing.assert_array_equal(whole.token_ids[-8:], small.token_ids)
    np.testing.assert_array_equal(run(last, *end, implementation="xla").token_ids, small.token_ids)
