"""What a draft model proposes, and the distribution stored beside it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import jax_specdec as sd

VOCAB = 31
K = 3
SIZE = 48
MODEL = sd.Llama(
    sd.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
)
DRAFTER = sd.ModelDrafter(MODEL)
PROMPTS = [[4], [7, 2], [1, 2, 3, 4, 5, 6, 7], [9] * 20]
TEMPERATURES = np.array([1.0, 0.5, 0.0, 2.0], np.float32)
PARAMS = MODEL.init_params(jax.random.key(0))


@functools.partial(jax.jit, static_argnames="config")
def propose(token_ids, lengths, cache, keys, *, config):
    return DRAFTER.propose(
        PARAMS,
        token_ids,
        lengths,
        cache,
        sampling=sd.SamplingParams(temperature=jnp.asarray(TEMPERATURES)),
        keys=keys,
        config=config,
    )


@jax.jit
def score(token_ids):
    """Logits of whole sequences, by a fresh cache."""
    batch = token_ids.shape[0]
    start = jnp.zeros((batch,), jnp.int32)
    return MODEL.apply(PARAMS, token_ids, start, MODEL.init_cache(batch, SIZE))[0]


@jax.jit
def prefill(token_ids):
    return DRAFTER.prefill(PARAMS, token_ids, DRAFTER.init_cache(token_ids.shape[0], SIZE))


def buffers(sequences) -> tuple[jax.Array, jax.Array]:
    """Sequences in buffers whose rest is rubbish, and their lengths."""
    rows = np.random.default_rng(len(sequences[0])).integers(0, VOCAB, (len(sequences), SIZE))
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return jnp.asarray(rows, jnp.int32), jnp.asarray([len(s) for s in sequences], jnp.int32)


def drafts(sequences, cache=None, method="probabilistic"):
    """Drafts ``[B, K]``, the fresh logits at their positions ``[B, K, V]``, proposal, cache."""
    token_ids, lengths = buffers(sequences)
    if cache is None:
        cache = prefill(token_ids[:, :32])
    config = sd.SpecDecodeConfig(num_speculative_tokens=K, draft_sample_method=method)
    keys = jax.random.split(jax.random.key(3), len(sequences))
    proposal, cache = propose(token_ids, lengths, cache, keys, config=config)
    ids = np.asarray(proposal.token_ids)
    assert ids.shape == (len(sequences), K) and ids.dtype == np.int32
    extended, _ = buffers([[*s, *row] for s, row in zip(sequences, ids.tolist(), strict=True)])
    logits = np.asarray(score(extended))
    fresh = [logits[b, n - 1 : n - 1 + K] for b, n in enumerate(lengths.tolist())]
    return ids, np.array(fresh), proposal, cache


def test_the_stored_rows_are_the_models_logits_at_the_drafts_positions():
    _, fresh, proposal, _ = drafts(PROMPTS)
    stored = proposal.distribution
    assert stored.logits.shape == (len(PROMPTS) * K, VOCAB)
    assert stored.rows is None and stored.valid is None
    np.testing.assert_allclose(stored.logits, fresh.reshape(-1, VOCAB), rtol=1e-4, atol=1e-5)


def test_the_stored_normalizers_are_those_of_the_stored_rows_at_each_temperature():
    _, _, proposal, _ = drafts(PROMPTS)
    stored = proposal.distribution
    temperature = np.repeat(TEMPERATURES, K)
    sampled = temperature > 0
    expected = scipy.special.logsumexp(
        np.asarray(stored.logits, np.float64)[sampled] / temperature[sampled, None], axis=1
    )
    np.testing.assert_allclose(np.asarray(stored.log_normalizer)[sampled], expected, rtol=1e-5)


def test_each_draft_is_sampled_from_its_stored_row_with_the_noise_of_its_offset():
    ids, _, proposal, _ = drafts(PROMPTS)
    rows = proposal.distribution.logits.reshape(len(PROMPTS), K, VOCAB)

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
        alone, _ = draw(rows[:, offset], jnp.int32(offset))
        np.testing.assert_array_equal(alone, ids[:, offset])


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_greedy_drafts_are_argmaxes(method):
    ids, fresh, proposal, _ = drafts(PROMPTS, method=method)
    best = np.argmax(fresh, axis=-1)
    if method == "greedy":
        np.testing.assert_array_equal(ids, best)
        assert proposal.distribution is None
    else:
        (greedy,) = np.flatnonzero(TEMPERATURES == 0)
        np.testing.assert_array_equal(ids[greedy], best[greedy])


def test_the_cache_serves_after_any_number_of_accepted_drafts():
    # 0 to K drafts are kept, then one other token follows; the rest of the cache is stale. After
    # K the model has not even seen the last draft.
    sequences = PROMPTS
    ids, _, _, cache = drafts(sequences)
    for _ in range(2):
        sequences = [
            [*sequence, *row[:kept], (row[min(kept, K - 1)] + 1) % VOCAB]
            for kept, (sequence, row) in enumerate(zip(sequences, ids.tolist(), strict=True))
        ]
        ids, fresh, proposal, cache = drafts(sequences, cache)
        np.testing.assert_allclose(
            proposal.distribution.logits, fresh.reshape(-1, VOCAB), rtol=1e-4, atol=1e-5
        )
