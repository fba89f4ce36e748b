"""`rejection_sample` inside JAX's transformations, its keys, and its ways in and out."""

from __future__ import annotations

import functools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, ones, zeros
from lower_floor import ROW_NUMBERS, Stream, uniforms

import jax_specdec as sd

from .batch import MAX_MARGIN, XLA, Layout, oracle, pack, verify
from .cases import random_batch, random_request
from .suite import take

B, K, V = 4, 3, 16
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
LAYOUT = Layout(vocab=V, num_requests=B, num_drafts=B * K, kind="logits")
TABLE = jax.device_put(np.random.default_rng(0).standard_normal((V, V)).astype(np.float32))

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


@pytest.mark.newest
def test_without_jit_tokens_are_the_same_but_for_close_calls():
    eager = functools.partial(sd.testing.rejection_sample_with_noise, implementation="xla")
    for seed in range(10):
        batch = random_batch(LAYOUT, seed)
        answers = verify(batch, eager), verify(batch, XLA)
        far = oracle(batch).margin > MAX_MARGIN
        chex.assert_trees_all_equal(*(take(answer, far) for answer in answers))


def decode_step(state):
    """One step of a serving loop over a table of logits; greedy drafting by the same table."""
    keys, positions, last, tokens = state
    ids = [last]
    for _ in range(K):
        ids.append(jnp.argmax(TABLE[ids[-1]] + 0.3 * jnp.roll(TABLE[ids[-1]], 1, axis=-1), axis=-1))
        ids[-1] = ids[-1].astype(jnp.int32)
    context = jnp.stack(ids, axis=1)
    output = sd.rejection_sample(
        TABLE[context].reshape(-1, V),
        sd.Drafts.from_dense(context[:, 1:]),
        sampling=sd.SamplingParams(jnp.arange(B, dtype=jnp.float32) / 2),
        keys=keys,
        positions=positions,
        config=CONFIG,
    )
    places = positions[:, None] + jnp.arange(K + 1, dtype=jnp.int32)[None, :]
    places = jnp.where(output.token_ids >= 0, places, tokens.shape[1])
    slots = jnp.arange(B, dtype=jnp.int32)
    tokens = tokens.at[slots[:, None], places].set(output.token_ids, mode="drop")
    last = output.token_ids[slots, output.num_accepted]
    return keys, positions + output.num_emitted, last, tokens


def first_state():
    nothing = zeros(B, jnp.int32)
    return jax.random.split(jax.random.key(1), B), nothing, nothing, full((B, 40), -1, jnp.int32)


@pytest.mark.newest
def test_a_while_loop_over_a_scan_gives_the_tokens_of_single_steps():
    @jax.jit
    def looped(state):
        def two_steps(state):
            return jax.lax.scan(lambda s, _: (decode_step(s), None), state, length=2)[0]

        return jax.lax.while_loop(lambda s: s[1].min() < 20, two_steps, state)

    found, single, step = looped(first_state()), first_state(), jax.jit(decode_step)
    while single[1].min() < 20:
        single = step(step(single))
    chex.assert_trees_all_equal(found[1:], single[1:])
    assert (np.asarray(found[3])[:, :20] >= 0).all()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_export_survives_serialization(platform):
    args, named = keyed_arguments(0)
    noise = jax.device_put(keys_and_positions(0))
    leaves, structure = jax.tree.flatten((args, named, noise))

    @jax.jit
    def flat(*leaves):
        args, named, noise = jax.tree.unflatten(structure, leaves)
        output = sd.rejection_sample(*args, **named, **noise, config=CONFIG)
        return output.token_ids, output.num_accepted, output.num_emitted, output.status

    exported = jax.export.export(flat, platforms=[platform])(*leaves)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == (platform,)
    if platform == jax.default_backend():
        want = keyed(*args, **named, **noise)
        chex.assert_trees_all_equal(sd.RejectionSampleOutput(*loaded.call(*leaves)), want)


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


@pytest.mark.newest
def test_with_keys_no_other_request_or_slot_changes_a_token():
    rng = np.random.default_rng(5)
    requests = [random_request(LAYOUT, rng, int(rng.integers(K + 1))) for _ in range(2 * B)]
    keys = jax.random.split(jax.random.key(9), 2 * B)
    positions = rng.integers(1000, size=2 * B).astype(np.int32)
    seen: dict[int, list[int]] = {}
    for _ in range(8):
        chosen = rng.permutation(2 * B)[:B]
        batch = pack([requests[i] for i in chosen], LAYOUT, int(rng.integers(99)))
        args, named = batch.arguments()
        output = keyed(
            *args[:2], sampling=named["sampling"], keys=keys[chosen], positions=positions[chosen]
        )
        for i, tokens in zip(chosen.tolist(), sd.parse_output(output), strict=True):
            assert seen.setdefault(i, tokens) == tokens
    assert len(seen) == 2 * B


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


def test_greedy_tokens_do_not_depend_on_the_keys():
    args, _ = keyed_arguments(4)
    sampling = sd.SamplingParams(np.zeros(B, np.float32))
    outputs = [keyed(*args, sampling=sampling, **keys_and_positions(s)) for s in range(3)]
    chex.assert_trees_all_equal(*outputs)


def test_uniforms_are_24_bits_below_1():
    keys = jax.random.split(jax.random.key(0), 500)
    noise = draw_noise(keys, np.arange(500, dtype=np.int32), num_speculative_tokens=8)
    for x in (noise.accept, noise.recover):
        chex.assert_type(x, jnp.float32)
        steps = np.asarray(x, np.float64) * 2**24
        assert (steps == np.floor(steps)).all()
        assert (steps % 2 == 1).any()  # 23 bits would all be even
        assert 0 <= x.min() < 0.01 < 0.99 < x.max() < 1
        assert abs(x.mean() - 0.5) < 0.03


@pytest.mark.newest
def test_no_two_places_share_bits():
    """Keys, positions, offsets and streams: 12000 numbers, about 4 of them equal by chance."""
    keys = jax.random.split(jax.random.key(0), 20)
    positions, offsets = jnp.arange(25), jnp.arange(8)

    @jax.jit
    def draw(keys, positions, offsets):
        drawn = []
        for stream in Stream:
            by_offset = jax.vmap(lambda k, p, o, s=stream: uniforms(k, p, s, o)[0], (None, None, 0))
            by_position = jax.vmap(by_offset, (None, 0, None))
            drawn.append(jax.vmap(by_position, (0, None, None))(keys, positions, offsets))
        return jnp.stack(drawn)

    values = np.asarray(draw(keys, positions, offsets)).ravel()
    assert values.size == 12000
    assert values.size - np.unique(values).size < 25


def test_accept_noise_does_not_depend_on_k():
    keys, positions = jax.random.split(jax.random.key(1), B), jnp.arange(B)
    few, many = (draw_noise(keys, positions, num_speculative_tokens=k) for k in (2, 7))
    chex.assert_trees_all_equal(few.accept, many.accept[:, :2])
    chex.assert_trees_all_equal(few.recover, many.recover)


# Ways in and out.


@pytest.mark.newest
def test_the_dense_constructor_gives_what_the_flat_one_gives():
    rng = np.random.default_rng(6)
    for counts in ([K] * B, [0, 1, 2, 3], [0] * B):
        logits = rng.standard_normal((B, K + 1, V)).astype(np.float32)
        ids = rng.integers(V, size=(B, K)).astype(np.int32)
        q = rng.dirichlet(np.ones(V), size=(B, K)).astype(np.float32)
        noise = draw_noise(**keys_and_positions(6), num_speculative_tokens=K)
        sampling = sd.SamplingParams(np.float32([0.0, 1.0, 0.7, 1.0]))
        dense = sd.Drafts.from_dense(ids, np.int32(counts), sd.DraftProbs(q))
        verified = XLA(logits.reshape(-1, V), dense, noise, sampling=sampling, config=CONFIG)
        kept = np.arange(K) < np.array(counts)[:, None]
        rows = np.arange(K + 1) <= np.array(counts)[:, None]
        padding = B * K - sum(counts)
        flat = sd.Drafts.from_flat(
            np.pad(ids[kept], (0, padding)),
            np.int32(counts),
            sd.DraftProbs(np.pad(q[kept], ((0, padding), (0, 0)))),
        )
        flat_logits = np.pad(logits[rows], ((0, padding), (0, 0)))
        want = XLA(flat_logits, flat, noise, sampling=sampling, config=CONFIG)
        chex.assert_trees_all_equal(verified, want)


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
