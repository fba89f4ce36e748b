"""A batch of no requests gives empty output in every form, rule and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_specdec as sd
from jax_specdec.integrations import sglang_jax, tpu_inference

K, V = 2, 8
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
RULES = {
    "standard": CONFIG,
    "block": sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="block"),
    "synthetic": sd.SpecDecodeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=2.0,
    ),
}
KEYS = jax.random.split(jax.random.key(0), 2)
NOBODY = jnp.zeros((0,), jnp.int32)
SAMPLING = sd.SamplingParams(jnp.ones(0))
FILTERED = sd.SamplingParams(1.0, min_p=0.1, top_k=3, top_p=0.9)
OUTPUT = sd.RejectionSampleOutput(jnp.zeros((0, K + 1), jnp.int32), NOBODY, NOBODY, NOBODY)
EMPTY = [(0, K + 1), (0,), (0,), (0,)]


def drafts(n: int, distribution: Any = None) -> sd.Drafts:
    """N places of padding, and no request."""
    return sd.Drafts(jnp.zeros((n,), jnp.int32), jnp.zeros((1,), jnp.int32), distribution)


def shapes(tree: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tree)]


def verify(n: int = 0, rows: int | None = None, **changes: Any) -> sd.RejectionSampleOutput:
    named: dict[str, Any] = dict(
        drafts=drafts(n), sampling=SAMPLING, keys=KEYS[:0], positions=NOBODY, config=CONFIG
    )
    named |= changes
    return sd.rejection_sample(jnp.zeros((n if rows is None else rows, V)), **named)


@pytest.mark.parametrize("jits", [False, True], ids=["eager", "jit"])
def test_an_empty_batch_emits_nothing(jits: bool) -> None:
    def calls() -> list[sd.RejectionSampleOutput]:
        return [
            verify(n, config=config, implementation=implementation)
            for n in (0, 3)
            for config in RULES.values()
            for implementation in (None, "xla", "xla_lazy", "xla_batched")
        ]

    for output in jax.jit(calls)() if jits else calls():
        assert shapes(output) == EMPTY and sd.parse_output(output) == []
        assert {x.dtype for x in jax.tree.leaves(output)} == {jnp.dtype("int32")}


CALLS: dict[str, Callable[[], Any]] = {
    "bonus tokens given": lambda: verify(3, bonus_token_ids=NOBODY),
    "padded rows": lambda: verify(3, rows=5, padded_rows=True),
    "no rows, padded": lambda: verify(3, rows=0, padded_rows=True),
    "probabilities": lambda: verify(drafts=drafts(0, sd.DraftProbs(jnp.zeros((0, V))))),
    "probabilities of padding": lambda: verify(
        3, drafts=drafts(3, sd.DraftProbs(jnp.zeros((3, V))))
    ),
    "logits": lambda: verify(drafts=drafts(0, sd.DraftLogits(jnp.zeros((0, V))))),
    "a dense batch": lambda: verify(drafts=sd.Drafts.from_dense(jnp.zeros((0, K), int))),
    "lists": lambda: verify(sampling=sd.SamplingParams([]), positions=[]),
    "filters": lambda: verify(sampling=FILTERED),
    "a mask": lambda: verify(token_bitmask=jnp.zeros((0, 1), jnp.int32), active=NOBODY > 0),
    "noise": lambda: sd.testing.rejection_sample_with_noise(
        jnp.zeros((0, V)),
        drafts(0),
        sd.testing.Noise(jnp.zeros((0, K)), jnp.zeros((0, 2))),
        sampling=SAMPLING,
        config=CONFIG,
    ),
    "a race": lambda: sd.testing.rejection_sample_with_noise(
        jnp.zeros((0, V)),
        drafts(0),
        sd.testing.RaceNoise(jnp.zeros((0, K)), jnp.zeros((0, V))),
        sampling=SAMPLING,
        config=CONFIG,
    ),
    "a flat batch": lambda: (
        tpu_inference.verify_flat(
            jnp.zeros((0, V)), NOBODY, NOBODY, config=CONFIG, temperature=None
        ).output
    ),
    "chains": lambda: (
        sglang_jax.verify_chains(
            jnp.zeros((0, V)),
            jnp.zeros((0, K + 1), jnp.int32),
            NOBODY,
            config=CONFIG,
            temperatures=jnp.zeros((0,)),
            keys=jax.random.key(0),
        ).output
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_emits_nothing(name: str) -> None:
    assert shapes(CALLS[name]()) == EMPTY


@pytest.mark.parametrize("axes", [("model", None), (None, "data"), ("model", "data")])
def test_a_split_empty_batch_emits_nothing(axes: tuple[str | None, str | None]) -> None:
    mesh = jax.make_mesh((2, 2), ("model", "data"), devices=jax.devices()[:4])
    sharding = sd.VerifySharding(mesh, vocab_axis=axes[0], batch_axis=axes[1])
    assert shapes(verify(sharding=sharding)) == EMPTY
    drawn = sd.sample_draft_tokens(
        jnp.zeros((0, V)),
        sampling=SAMPLING,
        keys=KEYS[:0],
        positions=NOBODY,
        offset=0,
        sharding=sharding,
    )
    assert shapes(drawn) == [(0,), (0,), (0,)]


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_no_requests_draft_what_one_drafts_without_its_row(method: Any, filtered: bool) -> None:
    def draw(batch: int) -> sd.DraftSample:
        return sd.sample_draft_tokens(
            jnp.zeros((batch, V)),
            sampling=FILTERED if filtered else sd.SamplingParams(1.0),
            keys=KEYS[:batch],
            positions=jnp.zeros((batch,), jnp.int32),
            offset=0,
            config=sd.SpecDecodeConfig(num_speculative_tokens=K, draft_sample_method=method),
            ids=jnp.arange(V, dtype=jnp.int32),
        )

    none, one = draw(0), jax.eval_shape(lambda: draw(1))
    assert jax.tree.structure(none) == jax.tree.structure(one)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(none)] == [
        ((0, *x.shape[1:]), x.dtype) for x in jax.tree.leaves(one)
    ]


@pytest.mark.parametrize("n", [0, 3])
def test_what_stands_around_the_verifier_takes_no_requests(n: int) -> None:
    empty = jnp.zeros((0,))
    processors = sd.LogitsProcessors(
        logit_bias=sd.LogitBias.from_mappings([]),
        penalties=sd.Penalties(
            empty, empty, empty, jnp.zeros((0, V), jnp.int32), jnp.zeros((0, V), bool)
        ),
        bad_words=sd.BadWords(jnp.zeros((0, 1, 2), jnp.int32), jnp.zeros((0, 1), jnp.int32)),
        min_tokens=sd.MinTokens(jnp.zeros((0, 1), jnp.int32), NOBODY),
    )
    rows = jnp.zeros((n, V))
    assert sd.process_logits(rows, drafts(n), processors, config=CONFIG).shape == (n, V)
    assert sd.process_logits(rows[:0], None, processors).shape == (0, V)
    assert bool(processors.append(NOBODY).is_neutral)

    for distribution in ("raw", "processed"):
        found = sd.token_logprobs(
            rows,
            drafts(n),
            OUTPUT,
            sampling=SAMPLING,
            config=CONFIG,
            num_top=2,
            distribution=distribution,
        )
        assert shapes(found) == [(0, K + 1), (0, K + 1, 2), (0, K + 1, 2)]

    packed = sd.pack_drafts(
        jnp.zeros((0, K), int),
        NOBODY,
        size=n,
        distribution=sd.DraftProbs(jnp.zeros((0, K, V))),
    )
    assert packed.drafts.token_ids.tolist() == [sd.PLACEHOLDER_TOKEN_ID] * n
    assert packed.requests.tolist() == packed.offsets.tolist() == [0] * n

    store = sd.DraftStore.create(num_slots=2, num_speculative_tokens=K, vocab_size=V)
    given = dict(positions=NOBODY, sampling=SAMPLING, slots=NOBODY)
    assert shapes(store.write(0, rows[:0], empty, empty, **given)) == shapes(store)
    attached = store.attach(drafts(n), **given)
    assert attached.distribution is not None and attached.distribution.valid is not None
    assert attached.distribution.valid.shape == (0,)
    assert int(sd.count_fallbacks(attached, sampling=SAMPLING)) == 0

    counters = sd.AcceptanceCounters.create(K)
    counted = counters.update(num_proposed=NOBODY, num_accepted=NOBODY, num_emitted=NOBODY)
    assert counted.words.tolist() == counters.words.tolist()
    sd.validate(rows, drafts(n), sampling=SAMPLING, config=CONFIG, positions=NOBODY)
    assert sd.testing.draw_noise(KEYS[:0], NOBODY, K).accept.shape == (0, K)
    assert sd.which_implementation(rows, drafts(n), config=CONFIG) in ("xla", "mosaic_gpu")


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("implementation", ["xla_lazy", "xla_batched"])
def test_requests_without_drafts_take_the_argmax(implementation: Any, bonus: bool) -> None:
    """N = 0 with B > 0."""
    logits = jnp.eye(2, V)
    output = sd.rejection_sample(
        logits[:0] if bonus else logits,
        sd.Drafts(NOBODY, jnp.zeros((3,), jnp.int32), sd.DraftProbs(jnp.zeros((0, V)))),
        sampling=sd.SamplingParams(0.0),
        keys=KEYS,
        positions=jnp.zeros((2,), jnp.int32),
        config=CONFIG,
        bonus_token_ids=jnp.array([5, 6]) if bonus else None,
        implementation=implementation,
    )
    assert sd.parse_output(output) == ([[5], [6]] if bonus else [[0], [1]])
