"""What an engine's owner meets: requests that must end, parts that must differ, its own mesh."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_specdec as sd
from jax_specdec.adapters import sglang_jax, tpu_inference

from .test_integration_doc import ADAPTERS, DFLASH, run

long = pytest.mark.long

B, K, V = 8, 2, 64
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
PARTS = 4
DATA = ("data", "pcp")
"""The axes of tpu-inference that requests are split over; it has two more, of size 1 mostly."""


@functools.cache
def mesh() -> Mesh:
    """Not made while the file is imported: a machine may have one device."""
    devices = jax.devices("cpu")[: 2 * PARTS]
    return jax.make_mesh((2, 2, 2), (*DATA, "model"), (AxisType.Auto,) * 3, devices=devices)


def chains(logits: Any, tokens: Any, lengths: Any, key: Any, **static: Any) -> jax.Array:
    given = dict(temperatures=jnp.ones(lengths.shape), keys=key, config=CONFIG, **static)
    return sglang_jax.verify_chains(logits, tokens, lengths, **given).verified_ids


def flat(logits: Any, tokens: Any, lengths: Any, key: Any, **static: Any) -> jax.Array:
    """The bonus tokens of requests without drafts."""
    given = dict(temperature=jnp.ones(lengths.shape), keys=key, config=CONFIG, **static)
    found = tpu_inference.verify_flat(logits, tokens[:, 0], 0 * lengths, **given)
    return found.token_ids[-len(lengths) :]


def arguments() -> tuple[Any, ...]:
    """Flat logits: a token says which noise it was drawn with."""
    logits = np.zeros((B * (K + 1), V), np.float32)
    return logits, np.full((B, K + 1), -1, np.int32), np.full(B, 5, np.int32), jax.random.key(0)


# One key for all parts.


@pytest.mark.parametrize(
    ("adapter", "check_vma"),
    [
        (chains, True),
        pytest.param(flat, True, marks=long),
        pytest.param(chains, False, marks=long),
        pytest.param(flat, False, marks=pytest.mark.slow),
    ],
)
def test_parts_of_a_shard_map_share_no_noise(adapter, check_vma):
    """The device's index is folded into one key: where JAX knows, or the batch axis is named."""

    def over_parts(part: Any) -> list[list[int]]:
        specs = P(DATA), P(DATA), P(DATA), P()
        call = jax.shard_map(
            part, mesh=mesh(), in_specs=specs, out_specs=P(DATA), check_vma=check_vma
        )
        return np.asarray(jax.jit(call)(*arguments())).reshape(PARTS, -1).tolist()

    def folded(*given: Any) -> jax.Array:
        *arrays, key = given
        for axis in sorted(DATA):
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return adapter(*arrays, key)

    sharding = None if check_vma else sd.VerifySharding(batch_axis=DATA)
    found = over_parts(functools.partial(adapter, sharding=sharding))
    assert len({*map(tuple, found)}) == PARTS
    assert found == over_parts(folded)  # and one that is folded in already is left as it is


# Meshes of theirs.


def test_requests_are_split_over_several_axes():
    sharding = sd.VerifySharding(mesh(), "model", DATA)
    logits, tokens, lengths, key = arguments()
    logits[:] = np.random.default_rng(0).normal(size=logits.shape)
    split = jax.jit(functools.partial(chains, sharding=sharding))
    np.testing.assert_array_equal(
        split(logits, tokens, lengths, key), chains(logits, tokens, lengths, key)
    )


@long
def test_arrays_that_lie_over_several_axes_are_verified_and_have_logprobs_there():
    """With draft storage, whose rows go with their requests, and axes that JAX knows."""
    explicit = jax.make_mesh(
        (2, 2, 2), (*DATA, "model"), (AxisType.Explicit,) * 3, devices=jax.devices("cpu")[:8]
    )
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(B * (K + 1), V)).astype(np.float32)
    probs = np.float32(rng.dirichlet(np.ones(V), B * K))
    ids = rng.integers(0, V, (B, K)).astype(np.int32)
    keys, positions = jax.random.split(jax.random.key(2), B), jnp.arange(B)

    @functools.partial(jax.jit, static_argnames="sharding")
    def verify(logits: Any, probs: Any, sharding: Any = None) -> Any:
        drafts = sd.Drafts.from_dense(ids, distribution=sd.DraftProbs(probs))
        given = dict(sampling=sd.SamplingParams(0.8), config=CONFIG, sharding=sharding)
        output = sd.rejection_sample(logits, drafts, keys=keys, positions=positions, **given)
        return output, sd.token_logprobs(logits, drafts, output, **given).logprobs

    want, wanted = verify(logits, probs)
    assert (np.asarray(want.num_accepted) > 0).any()
    place = NamedSharding(explicit, P(DATA, "model"))
    for sharding in (sd.VerifySharding(explicit, "model", DATA), None):
        found, logprobs = verify(*jax.device_put((logits, probs), place), sharding=sharding)
        np.testing.assert_array_equal(found.token_ids, want.token_ids)
        np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "sentence", "axes"),
    [
        (TypeError, "batch_axis must be a str", ("data", 3)),
        (ValueError, "batch_axis must be", ("data", "x")),
        (ValueError, "vocab_axis and batch_axis must differ", ("data", "model")),
        (ValueError, "vocab_axis and batch_axis must differ", ("data", "data")),
    ],
)
def test_axes_that_make_no_sense_are_refused(error, sentence, axes):
    with pytest.raises(error, match=f"^{sentence}"):
        sd.VerifySharding(mesh(), "model", axes)


def test_a_size_must_divide_over_all_axes_together():
    sharding = sd.VerifySharding(mesh(), batch_axis=DATA)
    logits, tokens, lengths, key = (x[: 6 * (K + 1)] if np.ndim(x) else x for x in arguments())
    with pytest.raises(
        ValueError, match=r"^bs must divide over the 4 devices of \('data', 'pcp'\)"
    ):
        chains(logits, tokens[:6], lengths[:6], key, sharding=sharding)
    drafts = sd.Drafts.from_dense(tokens[:6, 1:])
    with pytest.raises(ValueError, match="^B must divide over the 4 devices"):
        sd.rejection_sample(
            logits,
            drafts,
            sampling=sd.SamplingParams(None),
            keys=None,
            positions=None,
            config=CONFIG,
            sharding=sharding,
        )


def calls_over(sharding: sd.VerifySharding) -> list[Any]:
    logits, tokens, lengths, key = arguments()
    drafts, sampling = sd.Drafts.from_dense(tokens[:, 1:]), sd.SamplingParams(1.0)
    given = dict(sampling=sampling, keys=jax.random.split(key, B), positions=lengths)
    split: dict[str, Any] = dict(config=CONFIG, sharding=sharding)
    return [
        lambda: chains(logits, tokens, lengths, key, sharding=sharding),
        lambda: flat(logits, tokens, lengths, key, sharding=sharding),
        lambda: sd.rejection_sample(logits, drafts, **given, **split),
        lambda: sd.sample_draft_tokens(logits[:B], **given, offset=0, **split),
    ]


def test_a_mesh_without_devices_takes_those_of_the_call_or_is_refused():
    sharding = sd.VerifySharding(mesh().abstract_mesh, "model", "data")
    for call in calls_over(sharding):
        with pytest.raises(ValueError, match="^sharding.mesh must have devices, but .*set_mesh"):
            call()
    greedy = dict(sampling=sd.SamplingParams(None), keys=None, positions=None, config=CONFIG)
    logits, tokens, *_ = arguments()
    with jax.set_mesh(mesh()):
        found = sd.rejection_sample(
            logits, sd.Drafts.from_dense(tokens[:, 1:]), sharding=sharding, **greedy
        )
    assert found.token_ids[:, 0].tolist() == [0] * B


# What cannot be verified has a token all the same.


def test_min_p_is_that_of_the_verifier():
    """Ids 3 and 5 have 1 and 0.4 of the largest probability."""
    logits = np.full((2 * B, V), -np.inf, np.float32)
    logits[:, 3], logits[:, 5] = 0.0, np.log(0.4)
    given = dict(config=CONFIG, temperature=jnp.ones(1), keys=jax.random.key(1))
    verify = functools.partial(
        tpu_inference.verify_flat, logits, np.full(B, 5, np.int32), np.ones(B, np.int32), **given
    )
    assert {3, 5} <= {*verify(min_p=jnp.float32([0.3])).token_ids.tolist()}
    assert {*verify(min_p=jnp.float32([0.5])).token_ids.tolist()} == {3, -1}
    some = np.where(np.arange(B) % 2, 0.5, 0.0).astype(np.float32)
    found = np.asarray(verify(min_p=jnp.asarray(some)).output.token_ids)
    assert {*found[1::2].ravel().tolist()} == {3, -1} and 5 in found[::2]
    with pytest.raises(ValueError, match="^min_p"):
        verify(min_p=jnp.ones(3))


@pytest.mark.parametrize("temperature", [None, pytest.param(1.0, marks=long)])
def test_a_request_with_nan_logits_has_one_token_in_each_step(temperature):
    """0, as an argmax of NaN; with drafts, without, and beside an empty slot and a good request."""
    counts = np.array([2, 0, 1, 0], np.int32)
    active = np.array([True, True, True, False])
    rows = np.full((8, V), np.nan, np.float32)
    rows[4:6] = 9 * np.eye(V, dtype=np.float32)[[7, 8]]  # those of request 2
    rows[4:6] *= 100
    of_each = None if temperature is None else jnp.full(4, temperature)
    keys = None if temperature is None else jax.random.key(0)
    found = tpu_inference.verify_flat(
        rows,
        np.array([4, 4, 7, 0], np.int32),
        counts,
        active=active,
        config=CONFIG,
        temperature=of_each,
        keys=keys,
    )
    assert found.token_ids.tolist() == [-1, -1, 7, -1, 0, 0, 8, -1]
    assert found.output.status.tolist() == [2, 2, 0, 1]
    assert found.output.num_emitted.tolist() == [0, 0, 2, 0]

    lengths = np.array([9, 0, 5, 6], np.int32)
    rows = np.full((4, K + 1, V), np.nan, np.float32)
    rows[2] = 900 * np.eye(V, dtype=np.float32)[[7, 8, 9]]
    chain = sglang_jax.verify_chains(
        rows.reshape(-1, V),
        np.int32([[1, 7, 3]] * 4),
        lengths,
        config=CONFIG,
        temperatures=of_each,
        keys=keys,
    )
    assert chain.accept_lens.tolist() == [1, 0, 2, 1]
    assert chain.predict.reshape(4, -1).tolist() == [[0, 0, 0], [0, 0, 0], [7, 8, 0], [0, 0, 0]]
    assert chain.verified_ids.tolist() == [0, 0, 8, 0]
    assert chain.accept_index.tolist() == [0, -1, -1, -1, -1, -1, 6, 7, -1, 9, -1, -1]
    assert chain.output.status.tolist() == [2, 1, 0, 2]


# The recipes on the page, against stand-ins of what they touch.


class Finished(Exception):
    """Stands for their FINISH_ABORT and FINISH_LENGTH."""


@dataclasses.dataclass
class Req:
    """Their request: what ends it."""

    limit: int
    output_ids: list[int] = dataclasses.field(default_factory=list)
    to_finish: Any = None
    finished_reason: Any = None

    def check_finished(self) -> None:
        if self.to_finish is not None:
            self.finished_reason = self.to_finish
        elif len(self.output_ids) >= self.limit:
            self.finished_reason = Finished("length")


def steps_until_all_have_finished(ends_at_once: bool) -> tuple[int, list[str]]:
    """Their decoding loop around the recipe: logits of request 0 are NaN, slots 2 and 3 empty."""
    recipe = run(DFLASH)
    verify, of_slots = recipe["dflash_verify"], recipe["seq_lens_of"]
    data = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices("cpu")[:4])
    logits = np.full((4, K + 1, V), np.nan, np.float32)
    logits[1] = 900 * np.eye(V, dtype=np.float32)[[7, 8, 9]]
    used = np.array([True, True, False, False])
    reqs, prefix = [Req(limit=6), Req(limit=6)], np.array([4, 9, 0, 0], np.int32)

    @jax.jit
    def target_verify(draft_token: Any, logits: Any, prefix: Any, mask: Any) -> Any:
        return verify(
            draft_token,
            logits,
            draft_token_num=K + 1,
            seq_lens=of_slots(prefix, mask),
            mesh=data,
            keys=None,
            temperatures=None,
        )

    steps = 0
    while not all(req.finished_reason for req in reqs):
        steps += 1
        assert steps < 20, "a request never ends"
        block = np.tile(np.int32([1, 7, 3]), 4)
        found = target_verify(block, logits.reshape(-1, V), prefix, used)
        accept_lens, predict, verified, accepted = (np.asarray(x) for x in found)
        assert accept_lens[:2].tolist() == [1, 2] and accepted[:2].tolist() == [0, 1]
        assert verified.tolist() == [0, 8, 0, 0]
        if ends_at_once:
            recipe["end_unverified"](reqs, [sd.Status.BAD_TARGET_ROW, sd.Status.OK], Finished)
        for b, req in enumerate(reqs):
            if req.finished_reason is None:
                req.output_ids += predict[b * (K + 1) :][: accept_lens[b]].tolist()
                req.check_finished()
        prefix = prefix + accept_lens
    assert reqs[1].output_ids == [7, 8] * 3
    return len(reqs[0].output_ids), [str(req.finished_reason) for req in reqs]


def test_requests_end_in_the_loop_around_dflash():
    assert steps_until_all_have_finished(False) == (6, ["length", "length"])
    reasons = ["not verified: BAD_TARGET_ROW", "length"]
    assert steps_until_all_have_finished(True) == (1, reasons)


@long
def test_dflash_fetches_a_fresh_key_and_the_parameters_of_its_slots(monkeypatch):
    """By stand-ins with the signatures of sglang-jax cddbf6f."""

    def prepare(sampling_info: Any, batch: Any, total_bs: int, vocab_size: int) -> tuple[Any, ...]:
        assert (sampling_info, total_bs, vocab_size) == (batch.sampling_info, 4, V)
        of_slots = np.ones((4, 1), np.float32), np.full(4, 2**30, np.int32), np.ones(4, np.float32)
        return *of_slots, False, False

    engine = types.SimpleNamespace(_prepare_rejection_sampling=prepare)
    for name in ("sgl_jax", "sgl_jax.srt", "sgl_jax.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sgl_jax.srt.speculative.draft_extend_fused", engine)
    data = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices("cpu")[:4])
    runner = types.SimpleNamespace(
        mesh=data, _sampler_step=0, _sampler_base_rng=jax.random.PRNGKey(3)
    )
    target = types.SimpleNamespace(
        model_runner=runner, model_config=types.SimpleNamespace(vocab_size=V)
    )
    batch = types.SimpleNamespace(sampling_info="info", seq_lens=np.zeros(4, np.int32))
    recipe = run(DFLASH)
    sampling_of, worker = recipe["sampling_of"], types.SimpleNamespace(target_worker=target)
    one, other = sampling_of(worker, batch), sampling_of(worker, batch)
    assert runner._sampler_step == 2 and one["keys"].tolist() != other["keys"].tolist()
    assert all(one[name].sharding.spec == P("data") for name in ("temperatures", "top_ks"))
    verify = functools.partial(recipe["dflash_verify"], draft_token_num=K + 1, mesh=data)
    logits, tokens = np.zeros((4 * (K + 1), V), np.float32), np.full(4 * (K + 1), 5, np.int32)
    drawn = [
        np.asarray(jax.jit(verify)(tokens, logits, seq_lens=np.full(4, 9, np.int32), **given)[2])
        for given in (one, other)
    ]
    assert len({*map(int, np.concatenate(drawn))}) > 4  # other noise in each slot, and step


@long
@pytest.mark.parametrize("block", [0, 1], ids=["flat", "chains"])
def test_requests_of_nan_logits_go_on_in_the_loops_of_the_page(block):
    """Each has one token in each of the 12 steps; an empty slot none."""
    code = ADAPTERS[block]
    logits = "table = jax.random.normal(jax.random.key(0), (V, V))"
    assert logits in code
    texts = run(code.replace(logits, "table = jnp.full((V, V), jnp.nan)"))["texts"]
    assert texts == [[1] + [0] * 12, [2] + [0] * 12, [3] + [0] * 12, []]
