"""Requests over "data" and the vocabulary over "tensor", in explicit mode and in `shard_map`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import collectives
from verify.batch import Batch, Layout, check, jitted, pack
from verify.cases import random_request

import jax_specdec as sd

LAYOUT = Layout(
    vocab=1024,
    vocab_size=1000,
    num_speculative_tokens=3,
    num_requests=8,
    num_drafts=24,
    kind="probs",
    has_filters=True,
    has_bitmask=True,
)


@functools.cache
def mesh() -> Mesh:
    """Not made while the file is imported: a machine may have one device."""
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2)


def dense(seed: int, layout: Layout = LAYOUT) -> Batch:
    rng = np.random.default_rng(seed)
    k = layout.num_speculative_tokens
    return pack([random_request(layout, rng, k) for _ in range(layout.num_requests)], layout, seed)


def placed(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Logits and draft probabilities over both axes, what belongs to requests over data."""
    (logits, drafts, noise), named = batch.arguments()

    def put(x: Any, *axes: str | None) -> Any:
        return jax.device_put(x, NamedSharding(mesh(), P(*axes)))

    probs = put(drafts.distribution.probs, "data", "tensor")
    drafts = sd.Drafts(
        put(drafts.token_ids, "data"), put(drafts.cu_num_draft_tokens), sd.DraftProbs(probs)
    )
    for name in ("sampling", "token_bitmask"):
        named[name] = put(named[name], "data")
    return (put(logits, "data", "tensor"), drafts, put(noise, "data")), named


@pytest.mark.slow
def test_filtered_requests_at_top_level_gather_no_row():
    positional, named = placed(dense(0))
    call = jitted(sd.testing.rejection_sample_with_noise).lower(*positional, **named).compile()
    moved = collectives(call.as_text())
    part = positional[0].nbytes // 8
    assert moved and max(moved.values()) < part / 2, moved
    for seed in range(6):
        positional, named = placed(dense(seed))
        del named["config"], named["vocab_size"]  # compiled for
        check(dense(seed), jax.device_get(call(*positional, **named)))


@jitted
def in_shard_map(logits, drafts, noise, *, config, vocab_size, sampling, token_bitmask, **_):
    """In the caller's `shard_map`, whose axes are checked (check_vma, the default)."""
    own, columns = P("data"), P("data", "tensor")

    def part(logits, probs, ids, noise, sampling, words):
        k = config.num_speculative_tokens
        drafts = sd.Drafts.from_dense(ids.reshape(-1, k), distribution=sd.DraftProbs(probs))
        given = dict(
            sampling=sampling,
            config=config,
            vocab_size=vocab_size,
            token_bitmask=words,
            sharding=sd.VerifySharding(vocab_axis="tensor"),
        )
        output = sd.testing.rejection_sample_with_noise(logits, drafts, noise, **given)
        found = sd.token_logprobs(logits, drafts, output, distribution="processed", **given)
        return output, found.logprobs

    specs = columns, columns, own, own, own, own
    arrays = logits, drafts.distribution.probs, drafts.token_ids, noise, sampling, token_bitmask
    put = [
        jax.tree.map(lambda x, spec=spec: jax.reshard(x, NamedSharding(mesh(), spec)), x)
        for x, spec in zip(arrays, specs, strict=True)
    ]
    return jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=own)(*put)


@pytest.mark.long
def test_requests_over_data_in_shard_map_give_the_oracles_tokens():
    for seed in range(4):
        positional, named = placed(dense(seed))
        output, logprobs = jax.device_get(in_shard_map(*positional, **named))
        check(dense(seed), output)
        assert (np.isfinite(logprobs) == (output.token_ids >= 0)).all()


@pytest.mark.long
def test_drafts_of_a_part_are_those_of_all():
    def part(logits, keys, positions):
        k = jnp.full_like(positions, 7)
        sampling = sd.SamplingParams(0.8, top_k=k, top_p=jnp.full(k.shape, 0.9))
        return sd.sample_draft_tokens(
            logits, sampling=sampling, keys=keys, positions=positions, offset=1
        )

    logits = jax.random.normal(jax.random.key(0), (8, 40))
    arrays = logits, jax.random.split(jax.random.key(1), 8), jnp.arange(8)
    split = [jax.device_put(x, NamedSharding(mesh(), P("data"))) for x in arrays]
    mapped = jax.shard_map(part, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
    want, got = jax.device_get((jax.jit(part)(*arrays), jax.jit(mapped)(*split)))
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    np.testing.assert_allclose(got.log_normalizer, want.log_normalizer, rtol=1e-6)
    assert len(set(want.token_ids.tolist())) > 1
