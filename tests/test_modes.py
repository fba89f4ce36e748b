"""JAX's modes change no token: 64 bits, and nothing compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import engines

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

B, K, V = 3, 2, 300
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((B * (K + 1), V)).astype(np.float32)
Q = RNG.standard_normal((B * K, V)).astype(np.float32)
IDS = RNG.integers(0, V, (B, K)).astype(np.int32)
MASK = np.full((B * (K + 1), -(-V // 32)), -2, np.int32)  # id 0 of every 32 is not allowed
KEYS = np.array([[0, 7], [0, 8], [3, 9]], np.uint32)


def config(**fields: Any) -> sd.SpecDecodeConfig:
    return sd.SpecDecodeConfig(num_speculative_tokens=K, **fields)


def sampling(filtered: bool) -> sd.SamplingParams:
    temperature = np.float32([0.0, 1.0, 0.7])
    if not filtered:
        return sd.SamplingParams(temperature)
    filters = np.float32([0.0, 0.01, 0.0]), np.int32([4, 0, 40]), np.float32([1, 0.9, 0.95])
    return sd.SamplingParams(temperature, *filters)


def keys() -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(KEYS), impl="threefry2x32")


def verified(distribution: Callable[[], Any], filtered: bool, **fields: Any) -> Any:
    given: dict[str, Any] = dict(
        sampling=sampling(filtered),
        config=config(**fields),
        token_bitmask=MASK if filtered else None,
    )

    @jax.jit
    def both(logits: jax.Array, keys: jax.Array) -> tuple[Any, Any]:
        drafts = sd.Drafts.from_dense(IDS, None, distribution())
        positions = np.int32([5, 6, 7])
        output = sd.rejection_sample(logits, drafts, keys=keys, positions=positions, **given)
        named = dict(num_top=2, distribution="processed")
        return output, sd.token_logprobs(logits, drafts, output, **named, **given)

    output, found = both(LOGITS, keys())
    return sd.parse_output(output), found.top_token_ids.tolist()


def normalized() -> sd.DraftLogits:
    normalizer = np.log(np.exp(Q.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return sd.DraftLogits(Q, log_normalizer=normalizer)


def served() -> Any:
    driver = lm.EngineDriver(engines.LOOKUP, jnp.asarray(engines.TARGET))
    for seed in range(3):
        driver.submit([1, 2, 1], max_new_tokens=9, temperature=0.4 * seed, seed=seed)
    finished = engines.run(driver)
    return [one.token_ids for one in finished.values()], driver.stats().mean_acceptance_length


def processed() -> Any:
    """A logit bias, and the penalties of sequences that the drafts go on with."""
    ids, lengths = jnp.asarray(IDS), jnp.full((B,), K, jnp.int32)
    one, none = jnp.ones((B,), jnp.float32), jnp.zeros((B,), jnp.int32)
    amounts = dict(frequency=one / 2, presence=one, repetition=one * 2)
    penalties = sd.Penalties.from_sequences(
        ids, lengths=lengths, prompt_lengths=none, vocab_size=V, **amounts
    )
    processors = sd.LogitsProcessors(
        logit_bias=sd.LogitBias.from_mappings([{3: 1.0}, {}, {5: -2.0}]),
        penalties=penalties,
        bad_words=sd.BadWords.from_sequences(ids[:, None], ids, lengths=lengths),
        min_tokens=sd.MinTokens(ids, lengths),
    )
    drafts = sd.Drafts.from_dense(IDS)
    return plain(sd.process_logits(LOGITS, drafts, processors, config=config()))


def counted() -> Any:
    """Everything that takes counts, which are of 64 bits in 64-bit mode."""

    @jax.jit
    def all_of(counts: jax.Array, ids: jax.Array) -> Any:
        kept, stopped = sd.truncate(ids, counts + 1, max_tokens=counts, stop_token_ids=ids[:, 0])
        named: dict[str, Any] = dict(num_proposed=counts, num_accepted=kept, num_emitted=kept + 1)
        return (
            (kept, stopped),
            sd.AcceptanceCounters.create(K).update(**named),
            sd.Drafts.from_flat(ids.ravel(), counts),
        )

    return plain(all_of(jnp.array([2, 1, 0]), jnp.asarray(IDS.tolist())))


def plain(arrays: Any) -> Any:
    return [(x.dtype.name, x.tolist()) for x in jax.tree.leaves(arrays)]


CALLS: dict[str, Callable[[], Any]] = {
    "standard": lambda: verified(normalized, True),
    "block": lambda: verified(lambda: sd.DraftLogits(Q), False, rejection_sample_method="block"),
    "drafting": lambda: sd.sample_draft_tokens(
        LOGITS[:B], sampling=sampling(True), keys=keys(), positions=np.int32([5, 6, 7]), offset=1
    ).token_ids.tolist(),
    "processors": processed,
    "counts": counted,
    "engine": served,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [x if x == "drafting" else pytest.param(x, marks=pytest.mark.slow) for x in CALLS]
)
@pytest.mark.parametrize(
    "mode",
    [lambda: jax.enable_x64(True), pytest.param(jax.disable_jit, marks=pytest.mark.slow)],
)
def test_tokens_are_the_same_in_64_bit_mode_and_where_nothing_is_compiled(mode, name):
    call = CALLS[name]
    expected = call()
    with mode():  # with strict promotion, as in all tests
        assert call() == expected
