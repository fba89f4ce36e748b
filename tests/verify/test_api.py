"""`rejection_sample` inside JAX's transformations, its keys, and its ways in and out."""

from __future__ import annotations

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from filled import ones, zeros
from lower_floor import ROW_NUMBERS

import jax_specdec as sd

from .batch import MAX_MARGIN, XLA, Layout, oracle, take, verify
from .cases import random_batch

B, K, V = 4, 3, 16
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
LAYOUT = Layout(vocab=V, num_requests=B, num_drafts=B * K, kind="logits")
draw_noise = jax.jit(sd.testing.draw_noise, static_argnames="num_speculative_tokens")
keyed = jax.jit(functools.partial(sd.rejection_sample, config=CONFIG))


def keyed_arguments(seed: int):
    """Everything `keyed` takes but keys and positions."""
    args, named = random_batch(LAYOUT, seed, broken=0.0).arguments()
    return args[:2], dict(sampling=named["sampling"])


def keys_and_positions(seed: int):
    keys = jax.random.split(jax.random.key(seed), B)
    return dict(keys=keys, positions=np.arange(B, dtype=np.int32) * 7)


# Transformations.


@pytest.mark.long
@pytest.mark.newest
def test_without_jit_tokens_are_the_same_but_for_close_calls():
    eager = functools.partial(sd.testing.rejection_sample_with_noise, implementation="xla")
    for seed in range(10):
        batch = random_batch(LAYOUT, seed)
        answers = verify(batch, eager), verify(batch, XLA)
        far = oracle(batch).margin > MAX_MARGIN
        chex.assert_trees_all_equal(*(take(answer, far) for answer in answers))


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_export_survives_serialization(platform):
    args, named = keyed_arguments(0)
    noise = jax.device_put(keys_and_positions(0))
    leaves, structure = jax.tree.flatten((args, named, noise))

    @jax.jit
    def flat(config, *leaves):
        args, named, noise = jax.tree.unflatten(structure, leaves)
        output = sd.rejection_sample(*args, **named, **noise, config=config)
        return output.token_ids, output.num_accepted, output.num_emitted, output.status

    exported = jax.export.export(flat, platforms=[platform])(CONFIG, *leaves)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == (platform,)
    if platform == jax.default_backend():
        want = keyed(*args, **named, **noise)
        chex.assert_trees_all_equal(sd.RejectionSampleOutput(*loaded.call(CONFIG, *leaves)), want)


def test_calls_of_one_shape_and_equal_configs_compile_once():
    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnames="config")
    @chex.assert_max_traces(n=1)
    def once(args, named, noise, *, config):
        return sd.rejection_sample(*args, **named, **noise, config=config)

    for seed in range(4):
        args, named = keyed_arguments(seed)
        noise = keys_and_positions(seed)
        once.trace(args, named, noise, config=sd.SpecDecodeConfig(num_speculative_tokens=K))


def test_the_output_has_the_documented_shapes_and_dtypes():
    args, named = keyed_arguments(2)
    output = keyed(*args, **named, **keys_and_positions(2))
    chex.assert_shape(output.token_ids, (B, K + 1))
    for count in (output.num_accepted, output.num_emitted, output.status):
        chex.assert_shape(count, (B,))
    chex.assert_type(jax.tree.leaves(output), jnp.int32)


# Keys.


@pytest.mark.newest
def test_the_keyed_form_is_the_explicit_one_with_drawn_noise():
    for seed in range(3):
        args, named = keyed_arguments(seed)
        noise = keys_and_positions(seed)
        drawn = draw_noise(noise["keys"], noise["positions"], num_speculative_tokens=K)
        explicit = XLA(*args, drawn, **named, config=CONFIG)
        chex.assert_trees_all_equal(keyed(*args, **named, **noise), explicit)


def test_a_negative_position_is_bad_input_of_its_request_alone():
    """It would draw the noise of another position: -1 that of 2**31 - 1."""
    args, named = keyed_arguments(6)
    noise = keys_and_positions(6)
    expected = keyed(*args, **named, **noise)
    for b, position in ((0, -1), (B - 1, -(2**31))):
        positions = noise["positions"].copy()
        positions[b] = position
        output = keyed(*args, **named, keys=noise["keys"], positions=positions)
        assert output.status[b] == sd.Status.BAD_INPUT
        assert sd.parse_output(output)[b] == []
        others = np.delete(np.arange(B), b)
        chex.assert_trees_all_equal(take(output, others), take(expected, others))


# Ways in and out.


def test_dense_storage_may_keep_its_shape():
    q = ones((B, K, V)) / V
    ids = zeros((B, K), jnp.int32)
    for distribution in (
        sd.DraftProbs(q),
        sd.DraftLogits(q, **{name: zeros((B, K)) for name in ROW_NUMBERS}),
        sd.DraftLogits(q.reshape(-1, V), rows=zeros((B, K), jnp.int32)),
    ):
        flattened = sd.Drafts.from_dense(ids, None, distribution).distribution
        shapes = [x.shape for x in jax.tree.leaves(flattened)]
        assert shapes[0] == (B * K, V)
        assert all(shape == (B * K,) for shape in shapes[1:])
    shared, own = jnp.arange(V, dtype=jnp.int32), zeros((B, K, V), jnp.int32)
    for given, shape in ((shared, (V,)), (own, (B * K, V))):
        flattened = sd.Drafts.from_dense(ids, None, sd.DraftProbs(q, ids=given)).distribution
        assert flattened.ids.shape == shape


def test_parse_output_gives_an_empty_list_without_tokens():
    output = sd.RejectionSampleOutput(
        token_ids=jnp.array([[4, 2, 9], [7, -1, -1], [-1, -1, -1]]),
        num_accepted=jnp.array([2, 0, 0]),
        num_emitted=jnp.array([3, 1, 0]),
        status=jnp.array([sd.Status.OK, sd.Status.OK, sd.Status.BAD_TARGET_ROW]),
    )
    assert sd.parse_output(output) == [[4, 2, 9], [7], []]
