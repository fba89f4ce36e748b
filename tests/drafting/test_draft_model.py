"""What a draft model proposes, and the distribution stored beside it."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import assume
from models.weights import random_weights, sizes
from passes import run as run_pass
from serving import tiny
from upper_floor import drafting_draw

import jax_specdec as sd
from jax_specdec import lm

pytestmark = [pytest.mark.long, pytest.mark.newest]

VOCAB = 31
K = 3
SIZE = 48
MODEL = lm.models.Llama(sizes(VOCAB, 16, 24, 1, (2, 1, 8)))
DRAFTER = lm.ModelDrafter(MODEL)
HALF = lm.ModelDrafter(MODEL, store_dtype=jnp.bfloat16)
PROMPTS = [[4], [7, 2], [1, 2, 3, 4, 5, 6, 7], [9] * 20]
TEMPERATURES = np.array([1.0, 0.5, 0.0, 2.0], np.float32)
PARAMS = random_weights(MODEL, 0)


@functools.partial(jax.jit, static_argnames=("config", "drafter"))
def propose(token_ids, lengths, cache, keys, active, *, config, drafter=DRAFTER):
    sampling = sd.SamplingParams(temperature=jnp.asarray(TEMPERATURES))
    return drafter.propose(
        PARAMS,
        lm.DraftContext(token_ids, lengths, sampling, keys, config, active=active),
        cache,
        drafter.init_store(PARAMS, token_ids.shape[0], config),
    )


@jax.jit
def score(token_ids):
    """Logits of whole sequences, by a fresh cache."""
    batch = token_ids.shape[0]
    start = jnp.zeros((batch,), jnp.int32)
    return run_pass(MODEL, PARAMS, token_ids, start, MODEL.init_cache(batch, SIZE)).logits


@jax.jit
def prefill(token_ids):
    size = token_ids.shape[0]
    rows = lm.models.Rows(token_ids, jnp.zeros(size, jnp.int32))
    return DRAFTER.prefill(PARAMS, rows, DRAFTER.init_cache(size, SIZE))


def buffers(sequences) -> tuple[jax.Array, jax.Array]:
    """Sequences in buffers whose rest is rubbish, and their lengths."""
    rows = np.random.default_rng(len(sequences[0])).integers(0, VOCAB, (len(sequences), SIZE))
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return jnp.asarray(rows, jnp.int32), jnp.asarray([len(s) for s in sequences], jnp.int32)


def in_order(rows):
    """Rows of the store, ``[K*B, ...]``, as ``[B, K, ...]``."""
    return np.moveaxis(np.asarray(rows).reshape(K, -1, *rows.shape[1:]), 0, 1)


def drafts(sequences, cache=None, method="probabilistic", drafter=DRAFTER, active=True):
    """Drafts ``[B, K]``, the fresh logits at their positions ``[B, K, V]``, proposal, cache."""
    token_ids, lengths = buffers(sequences)
    if cache is None:
        cache = prefill(token_ids[:, :32])
    config = sd.SpecDecodeConfig(num_speculative_tokens=K, draft_sample_method=method)
    keys = jax.random.split(jax.random.key(3), len(sequences))
    given = token_ids, lengths, cache, keys, np.full(len(sequences), active)
    proposal, cache = propose(*given, config=config, drafter=drafter)
    ids = np.asarray(proposal.token_ids)
    assert ids.shape == (len(sequences), K) and ids.dtype == np.int32
    extended, _ = buffers([[*s, *row] for s, row in zip(sequences, ids.tolist(), strict=True)])
    logits = np.asarray(score(extended))
    fresh = [logits[b, n - 1 : n - 1 + K] for b, n in enumerate(lengths.tolist())]
    return ids, np.array(fresh), proposal, cache


@pytest.fixture(scope="module")
def sampled():
    return drafts(PROMPTS)


def test_the_stored_rows_are_the_models_logits_at_the_drafts(sampled):
    _, fresh, proposal, _ = sampled
    assert proposal.store.logits.shape == (len(PROMPTS) * K, VOCAB)
    np.testing.assert_allclose(in_order(proposal.store.logits), fresh, rtol=1e-4, atol=1e-5)


def test_stored_rows_say_at_which_position_and_temperature(sampled):
    store = sampled[2].store
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    expected = np.where(TEMPERATURES > 0, lengths, -1)  # a greedy request's rows are not for use
    np.testing.assert_array_equal(store.positions, np.tile(expected, (K, 1)))
    np.testing.assert_array_equal(store.temperature, np.tile(TEMPERATURES, (K, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [DRAFTER, HALF], ids=["float32", "bfloat16"])
def test_each_draft_is_sampled_from_its_row_by_own_noise(drafter, sampled):
    ids, fresh, proposal, _ = drafts(PROMPTS, drafter=drafter) if drafter is HALF else sampled
    rows = in_order(proposal.store.logits)
    if drafter is HALF:
        assert rows.dtype == jnp.bfloat16
        np.testing.assert_allclose(rows.astype(np.float32), fresh, rtol=2e-2, atol=1e-3)

    @jax.jit
    def draw(logits, offset):
        return sd.sample_draft_tokens(
            logits,
            sampling=sd.SamplingParams(temperature=jnp.asarray(TEMPERATURES)),
            keys=jax.random.split(jax.random.key(3), len(PROMPTS)),
            positions=jnp.asarray([len(p) for p in PROMPTS], jnp.int32),
            offset=offset,
        )

    for offset in range(K):
        drawn = draw(jnp.asarray(rows[:, offset]), jnp.int32(offset))
        np.testing.assert_array_equal(drawn.token_ids, ids[:, offset])
        np.testing.assert_allclose(
            drawn.log_normalizer, in_order(proposal.store.log_normalizer)[:, offset], rtol=1e-6
        )


def test_greedy_drafts_are_argmaxes(sampled):
    ids, fresh, proposal, _ = drafts(PROMPTS, method="greedy")
    np.testing.assert_array_equal(ids, np.argmax(fresh, axis=-1))
    assert proposal.store is None
    ids, fresh, *_ = sampled
    greedy = TEMPERATURES == 0
    np.testing.assert_array_equal(ids[greedy], np.argmax(fresh[greedy], axis=-1))


def test_the_cache_serves_after_any_number_of_accepted_drafts(sampled):
    # 0 to K drafts are kept, then one other token follows; the rest of the cache is stale. After
    # K the model has not even seen the last draft. The second time they are drafts of others, none
    # of which it has seen.
    sequences = PROMPTS
    ids, _, _, cache = sampled
    for is_own in (True, False):
        kept_ids = ids if is_own else (ids + 1) % VOCAB
        sequences = [
            [*sequence, *row[:kept], (row[min(kept, K - 1)] + 1) % VOCAB]
            for kept, (sequence, row) in enumerate(zip(sequences, kept_ids.tolist(), strict=True))
        ]
        ids, fresh, proposal, cache = drafts(sequences, cache)
        np.testing.assert_allclose(in_order(proposal.store.logits), fresh, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("active", [True, False])
def test_nothing_that_was_read_is_written_again_of_a_request_that_does_not_run(active):
    marked = jax.tree.map(lambda x: jnp.full_like(x, 7), MODEL.init_cache(len(PROMPTS), SIZE))
    ((_, values),) = drafts(PROMPTS, marked, active=active)[3]
    kept = [(np.asarray(values[b, : len(p) - 1]) == 7).all() for b, p in enumerate(PROMPTS)]
    assert kept == [active is False or len(p) == 1 for p in PROMPTS]


def test_a_row_is_masked_unless_no_allowed_token_is_known() -> None:
    logits = jnp.arange(8.0).reshape(2, 4)
    ids, lengths = jnp.zeros((2, 8), jnp.int32), jnp.ones((2,), jnp.int32)
    allowed = sd.AllowedTokens.pack([[0, 2, 5], [4, 5]], vocab_size=6)
    processors = sd.LogitsProcessors(allowed_tokens=allowed)
    context = tiny.context(ids, lengths, 0.0, k=2, processors=processors)
    inf = jnp.inf
    found = context.process_logits(logits)
    assert found.tolist() == [[0.0, -inf, 2.0, -inf], [4.0, 5.0, 6.0, 7.0]]
    # A drafter of one's own enters by the same checks as a loop of one's own.
    with pytest.raises(ValueError, match=r"^logits must be an array \[B, V\] = \[2, V\]"):
        context.process_logits(logits[:1])
    nobody = dataclasses.replace(context, changes_rows=jnp.bool_(False))
    assert nobody.process_logits(logits).tolist() == logits.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 9, SIZE - K])
def test_a_lone_request_gets_the_same_drafts_where_its_tokens_are_read_with_a_second_row(length):
    token_ids, lengths = buffers([list(range(length))])
    arguments = token_ids, lengths, jax.random.split(jax.random.key(7), 1)
    found = {}
    for platform in ("cpu", "cuda"):
        with assume(platform):
            found[platform] = _propose_twice(*arguments)
    assert found["cpu"][2] == 1 and found["cuda"][2] == 2
    chex.assert_trees_all_close(found["cpu"][:2], found["cuda"][:2], rtol=1e-5, atol=1e-5)


def test_candidates_are_ids_of_the_whole_vocabulary(monkeypatch):
    """Whoever puts their logits on target ids gets rows of all."""
    drafter = lm.ModelDrafter(MODEL, num_candidates=4)
    draw, widths = drafting_draw._draw, set()

    def watched(logits, ids, *rest):
        widths.add((logits.shape[1], ids.to_vocabulary(logits).shape[1]))
        return draw(logits, ids, *rest)

    def drafted():
        context = tiny.context(jnp.zeros((1, SIZE), jnp.int32), jnp.full(1, 2), 1.0, k=K)
        store = drafter.init_store(PARAMS, 1, context.config)
        return drafter.propose(PARAMS, context, drafter.init_cache(1, SIZE), store)

    monkeypatch.setattr(drafting_draw, "_draw", watched)
    jax.eval_shape(drafted)
    assert widths == {(4, VOCAB)}


def _propose_twice(token_ids, lengths, keys):
    """Drafts and stored logits of a second pass over the cache of the first, and rows of tokens."""
    rows = []

    @dataclasses.dataclass(frozen=True)
    class Watched(lm.models.Llama):
        def apply(self, params, groups, *rest, **options):
            rows.append(groups[0].token_ids.shape[1])
            return super().apply(params, groups, *rest, **options)

    drafter = lm.ModelDrafter(Watched(MODEL.config))
    sampling = sd.SamplingParams(jnp.ones((1,)))
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)
    context = lm.DraftContext(token_ids, lengths, sampling, keys, config)
    cache = prefill(token_ids[:, :32])
    for _ in range(2):
        store = drafter.init_store(PARAMS, 1, context.config)
        proposal, cache = drafter.propose(PARAMS, context, cache, store)
    return proposal.token_ids, proposal.store.logits, rows[-1]
