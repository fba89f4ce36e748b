"""Draft tokens have the distribution that is stored for the check, and noise of their own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from lower_floor import Stream, uniforms
from serving.chi_square import ALPHA, CONTROL, assert_distributed
from upper_floor import drafting_draw

import jax_specdec as sd
from jax_specdec import lm

# Most tests share this shape, and so one compilation.
BATCH, VOCAB = 12_000, 11
TEMPERATURES = np.resize(np.float32([0.0, 0.3, 1.0, 2.5]), BATCH)
POSITION = 6


@jax.jit
def sample(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    offset: jax.Array,
) -> sd.DraftSample:
    return sd.sample_draft_tokens(
        logits,
        sampling=sd.SamplingParams(temperature=temperature),
        keys=keys,
        positions=positions,
        offset=offset,
    )


def draw(
    logits: np.ndarray,
    temperature: Any,
    *,
    seed: int = 0,
    position: int = POSITION,
    offset: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of logits ``[B, V]`` at one temperature or B of them, and relative normalizers."""
    batch = logits.shape[0]
    ids, normalizer, row_max, threshold = sample(
        jnp.asarray(logits),
        jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,)),
        jax.random.split(jax.random.key(seed), batch),
        jnp.full((batch,), position, jnp.int32),
        jnp.int32(offset),
    )
    assert ids.dtype == jnp.int32 and normalizer.dtype == jnp.float32 and threshold is None
    np.testing.assert_array_equal(row_max, logits.max(axis=1))
    assert row_max.dtype == jnp.float32
    return np.asarray(ids), np.asarray(normalizer)


def random_logits(dtype: str = "float32") -> np.ndarray:
    """``[BATCH, VOCAB]``; id 3 can never be drawn."""
    logits = 2 * np.random.default_rng(0).standard_normal((BATCH, VOCAB))
    logits[:, 3] = -np.inf
    return logits.astype(jnp.dtype(dtype))


FLAT = np.zeros((BATCH, VOCAB), np.float32)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_greedy_requests_draft_the_argmax_of_lowest_id(dtype):
    logits = random_logits(dtype)
    logits[::8, 4] = logits[::8, 9] = 50
    ids, _ = draw(logits, TEMPERATURES)
    greedy = TEMPERATURES == 0
    np.testing.assert_array_equal(ids[greedy], np.argmax(logits[greedy], axis=1))


def test_a_greedy_config_drafts_argmaxes_and_keeps_nothing():
    logits = random_logits()
    ids, *others = sd.sample_draft_tokens(
        jnp.asarray(logits),
        sampling=sd.SamplingParams(jnp.asarray(TEMPERATURES)),
        keys=jax.random.split(jax.random.key(0), BATCH),
        positions=jnp.zeros((BATCH,), jnp.int32),
        offset=0,
        config=sd.SpecDecodeConfig(num_speculative_tokens=1, draft_sample_method="greedy"),
    )
    np.testing.assert_array_equal(ids, np.argmax(logits, axis=1))
    assert ids.dtype == jnp.int32 and others == [None] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_normalizer_is_the_logsumexp_of_what_is_stored(dtype):
    logits = random_logits(dtype)
    _, normalizer = draw(logits, TEMPERATURES)
    sampled = TEMPERATURES > 0
    rows = logits[sampled].astype(np.float64)
    relative = (rows - rows.max(axis=1, keepdims=True)) / TEMPERATURES[sampled, None]
    expected = scipy.special.logsumexp(relative, axis=1)
    np.testing.assert_allclose(normalizer[sampled], expected, rtol=1e-5, atol=1e-5)


def test_tokens_are_drawn_by_inverse_cdf_from_the_draft_stream():
    logits, offset = random_logits(), 2
    ids, _ = draw(logits, 1.0, offset=offset)
    keys = jax.random.split(jax.random.key(0), BATCH)
    position, stream = jnp.int32(POSITION), Stream.DRAFT
    pairs = jax.vmap(lambda key: uniforms(key, position, stream, offset))(keys)
    u = np.asarray(pairs, np.float64)[:, 1:]  # all ids lie in one tile: the first one is moot
    cdf = np.cumsum(scipy.special.softmax(logits.astype(np.float64), axis=1), axis=1)
    close = np.abs(cdf - u).min(axis=1) < 1e-6
    assert close.mean() < 1e-3
    np.testing.assert_array_equal(ids[~close], np.argmax(cdf > u, axis=1)[~close])


@pytest.mark.newest
def test_a_draft_does_not_depend_on_its_neighbours():
    keys = jax.random.split(jax.random.key(1), BATCH)
    positions = jnp.arange(BATCH, dtype=jnp.int32)
    arrays = (jnp.asarray(random_logits()), jnp.asarray(TEMPERATURES), keys, positions)

    def at(order: np.ndarray) -> sd.DraftSample:
        return jax.device_get(sample(*(x[order] for x in arrays), jnp.int32(0)))

    ids, normalizer, _, _ = at(np.arange(BATCH))
    order = np.random.default_rng(0).permutation(BATCH)
    np.testing.assert_array_equal(at(order)[0], ids[order])
    np.testing.assert_array_equal(at(order)[1], normalizer[order])
    np.testing.assert_array_equal(at(np.full(BATCH, 7))[0], np.full(BATCH, ids[7]))


@pytest.mark.newest
def test_what_filters_leave_out_lies_below_the_threshold():
    logits = random_logits("bfloat16")
    top_k = np.resize(np.int32([0, 1, 3]), BATCH)
    drawn = jax.jit(functools.partial(sd.sample_draft_tokens, offset=0))(
        jnp.asarray(logits),
        sampling=sd.SamplingParams(jnp.ones((BATCH,)), top_k=jnp.asarray(top_k)),
        keys=jax.random.split(jax.random.key(0), BATCH),
        positions=jnp.zeros((BATCH,), jnp.int32),
    )
    rows = logits.astype(np.float64)
    kth = np.take_along_axis(np.sort(rows, axis=1), VOCAB - np.maximum(top_k, 1)[:, None], axis=1)
    kept = np.where((rows >= kth) | (top_k == 0)[:, None], rows, -np.inf)
    by_threshold = np.where(rows >= np.asarray(drawn.threshold)[:, None], rows, -np.inf)
    np.testing.assert_array_equal(by_threshold, kept)
    ids = np.asarray(drawn.token_ids)
    assert np.isfinite(kept[np.arange(BATCH), ids]).all()
    assert len(np.unique(ids[top_k == 0])) == VOCAB - 1
    np.testing.assert_array_equal(drawn.row_max, kept.max(axis=1))
    expected = scipy.special.logsumexp(kept - kept.max(axis=1, keepdims=True), axis=1)
    np.testing.assert_allclose(drawn.log_normalizer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_have_the_distribution_of_the_stored_logits(dtype):
    row = random_logits(dtype)[0]
    ids, _ = draw(np.broadcast_to(row, (BATCH, VOCAB)), TEMPERATURES)
    for t in np.unique(TEMPERATURES)[1:]:
        counts = np.bincount(ids[t == TEMPERATURES], minlength=VOCAB)
        expected = scipy.special.softmax(row.astype(np.float64) / t)
        assert_distributed(counts, expected, f"temperature {t}")


@pytest.mark.long
@pytest.mark.newest
def test_drafts_have_the_distribution_of_the_stored_logits_across_tiles():
    vocab_size, batch = 4099, 3000  # a prime, in three tiles of 2048
    row = np.full(vocab_size, -8.0, np.float32)
    row[[0, 5, 2047, 2048, 3000, 4095, 4096, 4098]] = [1.0, 1.5, 0.5, 1.0, 2.0, 0.0, 1.5, 1.0]
    ids, _ = draw(np.broadcast_to(row, (batch, vocab_size)), 1.0)
    counts = np.bincount(ids, minlength=vocab_size)
    assert_distributed(counts, scipy.special.softmax(row.astype(np.float64)), "three tiles")


def independence(ids: np.ndarray, noise: np.ndarray) -> float:
    """P-value of a contingency table: the ids against sixteen bins of a uniform."""
    table = np.zeros((VOCAB, 16))
    np.add.at(table, (ids, (noise * 16).astype(np.int64)), 1)
    return float(scipy.stats.chi2_contingency(table).pvalue)


@pytest.mark.newest
def test_drafts_share_no_noise_with_the_check():
    k = 3
    keys = jax.random.split(jax.random.key(5), BATCH)
    positions = jnp.full((BATCH,), POSITION, jnp.int32)
    draw_noise = jax.jit(functools.partial(sd.testing.draw_noise, num_speculative_tokens=k))
    noise = jax.device_get(draw_noise(keys, positions))
    for offset in range(k):
        ids, _ = draw(FLAT, 1.0, seed=5, offset=offset)
        for what, u in [("accept", noise.accept), ("recover", noise.recover)]:
            for j in range(u.shape[1]):
                p = independence(ids, u[:, j])
                assert p > ALPHA, f"offset {offset} against {what}[{j}]: p = {p:.2g}"
    # Were the noise shared, it would show.
    shared = (noise.accept[:, 0] * VOCAB).astype(np.int64)
    assert independence(shared, noise.accept[:, 0]) < CONTROL


@pytest.mark.slow
def test_by_agreement_the_target_as_drafter_is_always_right():
    """Also over a map in another order."""
    k, batch, vocab = 2, 12, 4099  # three tiles
    rng = np.random.default_rng(3)
    logits = np.float32(rng.standard_normal((batch, k + 1, vocab)))
    agreement = sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method="agreement")
    context = lm.DraftContext(
        token_ids=jnp.zeros((batch, 8), jnp.int32),
        lengths=jnp.arange(1, batch + 1, dtype=jnp.int32),
        sampling=sd.SamplingParams(jnp.resize(jnp.float32([0, 0.5, 1]), batch)),
        keys=jax.random.split(jax.random.key(2), batch),
        config=agreement,
    )
    permuted = jnp.asarray(rng.permutation(vocab))
    common: Any = dict(sampling=context.sampling, keys=context.keys, positions=context.lengths)

    def accepted(drafts: Any) -> np.ndarray:
        rows, drafts = logits.reshape(-1, vocab), sd.Drafts.from_dense(drafts)
        output = sd.rejection_sample(rows, drafts, config=agreement, **common)
        return np.asarray(output.num_accepted)

    def drawn_by_map() -> jax.Array:
        rows = jnp.asarray(logits)[:, :, permuted]
        ids = drafting_draw.ids_of(permuted, vocab)
        first, second = (drafting_draw.Row(rows[:, j], ids) for j in range(k))
        chain = first, None, lambda *at: (second, None), context, None
        return drafting_draw.draft_chain(*chain)[0].token_ids

    drawn = [
        sd.sample_draft_tokens(logits[:, j], offset=j, config=agreement, **common).token_ids
        for j in range(k)
    ]
    assert (accepted(np.stack(drawn, axis=1)) == k).all()
    assert (accepted(jax.jit(drawn_by_map)()) == k).all()
    others = np.stack([drawn[0], np.int32(logits[:, 1].argmin(axis=1))], axis=1)
    assert (accepted(others) == 1).all()


@pytest.mark.slow
@pytest.mark.newest
def test_shared_noise_agrees_as_often_as_one_race():
    """One race of p and of q has the winner i in both with 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    batch, vocab = 2000, 2100  # two tiles
    rng = np.random.default_rng(4)
    target = 1.5 * rng.standard_normal(vocab)
    draft = target + 0.8 * rng.standard_normal(vocab)
    p, q = scipy.special.softmax([target, draft], axis=1)

    def same(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return 1 / np.array([np.maximum(p / p[i], q / q[i]).sum() for i in range(len(p))])

    parts = slice(2048), slice(2048, None)
    of_tile = same(*(np.array([x[part].sum() for part in parts]) for x in (p, q)))
    expected = sum(
        chance * same(p[part], q[part]).sum() for chance, part in zip(of_tile, parts, strict=True)
    )
    common: Any = dict(
        sampling=sd.SamplingParams(jnp.ones(batch)),
        keys=jax.random.split(jax.random.key(8), batch),
        positions=jnp.full((batch,), POSITION),
    )

    def agrees(drafting: str) -> np.ndarray:
        ids = [
            sd.sample_draft_tokens(
                jnp.asarray(np.repeat(row[None], batch, axis=0), jnp.float32),
                offset=0,
                config=sd.SpecDecodeConfig(
                    num_speculative_tokens=1, rejection_sample_method=method
                ),
                **common,
            ).token_ids
            for row, method in ((target, "agreement"), (draft, drafting))
        ]
        return np.asarray(ids[0] == ids[1])

    shared = scipy.stats.binomtest(int(agrees("agreement").sum()), batch, expected)
    assert shared.pvalue > ALPHA, f"{shared.statistic:.3f} agree, {expected:.3f} expected"
    alone = scipy.stats.binomtest(int(agrees("standard").sum()), batch, expected)
    assert alone.pvalue < CONTROL


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize("rule", ["standard", pytest.param("agreement", marks=pytest.mark.slow)])
def test_split_logits_give_the_tokens_of_whole_ones(rule):
    batch, vocab = 8, 24
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("vocab",))
    temperature = jnp.resize(jnp.float32([0, 0.5, 1, 2]), batch)
    min_p, top_k = (jnp.resize(jnp.array(x), batch) for x in ([0, 0.1, 0], [0, 0, 3, 0, 7]))
    top_p = jnp.resize(jnp.array([1, 0.5, 0.9]), batch)

    def drawn(logits: jax.Array, sharding: sd.VerifySharding | None, method: str) -> Any:
        return sd.sample_draft_tokens(
            logits,
            sampling=sd.SamplingParams(temperature, min_p, top_k, top_p),
            keys=jax.random.split(jax.random.key(1), batch),
            positions=jnp.full((batch,), POSITION),
            offset=2,
            config=sd.SpecDecodeConfig(
                num_speculative_tokens=1, rejection_sample_method=rule, draft_sample_method=method
            ),
            sharding=sharding,
        )

    @jax.jit
    def each_way(logits: jax.Array) -> Any:
        with_a_mesh = sd.VerifySharding(mesh, vocab_axis="vocab")
        inside = jax.shard_map(
            lambda part: drawn(part, sd.VerifySharding(vocab_axis="vocab"), "probabilistic"),
            mesh=mesh,
            in_specs=jax.sharding.PartitionSpec(None, "vocab"),
            out_specs=jax.sharding.PartitionSpec(),
        )
        whole, split = (drawn(logits, s, "probabilistic") for s in (None, with_a_mesh))
        if rule == "agreement":
            return whole, split
        return whole, split, inside(logits), drawn(logits, with_a_mesh, "greedy")

    logits = np.float32(3 * np.random.default_rng(0).standard_normal((batch, vocab)))
    whole, *others = jax.device_get(each_way(logits))
    sampled = np.asarray(temperature) > 0
    if rule == "standard":
        best = others.pop()
        np.testing.assert_array_equal(best.token_ids, np.argmax(logits, axis=1))
        assert best.log_normalizer is None
    for other in others:
        np.testing.assert_array_equal(other.token_ids, whole.token_ids)
        normalizers = other.log_normalizer[sampled], whole.log_normalizer[sampled]
        np.testing.assert_allclose(*normalizers, rtol=1e-6)
        np.testing.assert_array_equal(other.row_max, whole.row_max)
        np.testing.assert_array_equal(other.threshold, whole.threshold)
        assert np.count_nonzero(np.isfinite(other.threshold)) == 4


LOGITS = jnp.zeros((2, 5))
CALL = {
    "sampling": sd.SamplingParams(0.8),
    "keys": jax.random.split(jax.random.key(0), 2),
    "positions": [5, 9],
    "offset": 0,
}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"logits": LOGITS[0]}, ValueError),
        ({"logits": LOGITS.astype(jnp.int32)}, TypeError),
        ({"sampling": None}, TypeError),
        ({"sampling.temperature": sd.SamplingParams(jnp.ones(3))}, ValueError),
        ({"sampling.top_p": sd.SamplingParams(0.8, top_p=jnp.ones(3))}, ValueError),
        ({"keys": None}, TypeError),
        ({"keys": CALL["keys"][:1]}, ValueError),
        ({"positions": jnp.zeros(3, jnp.int32)}, ValueError),
        ({"offset": jnp.zeros(3, jnp.int32)}, ValueError),
        ({"offset": 0.5}, TypeError),
        ({"config": "agreement"}, TypeError),
        ({"sharding": "data"}, TypeError),
        ({"ids": jnp.zeros(3, jnp.int32)}, ValueError),
    ],
    ids=lambda changes: next(iter(changes)) if isinstance(changes, dict) else "",
)
def test_an_argument_that_does_not_fit_is_named(changes, error):
    ((name, value),) = changes.items()
    given = {"logits": LOGITS, **CALL, name.partition(".")[0]: value}
    with pytest.raises(error, match=f"^{name} must"):
        sd.sample_draft_tokens(given.pop("logits"), **given)
