"""A batch of no requests gives empty output in every form, rule and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import ones, zeros
from lower_floor import assume

import jax_specdec as sd
from jax_specdec.adapters import sglang_jax, tpu_inference

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
NOBODY = zeros((0,), jnp.int32)
SAMPLING = sd.SamplingParams(ones(0))
FILTERED = sd.SamplingParams(1.0, min_p=0.1, top_k=3, top_p=0.9)
OUTPUT = sd.RejectionSampleOutput(zeros((0, K + 1), jnp.int32), NOBODY, NOBODY, NOBODY)
EMPTY = [(0, K + 1), (0,), (0,), (0,)]


def drafts(n: int, distribution: Any = None) -> sd.Drafts:
    """N places of padding, and no request."""
    return sd.Drafts(zeros((n,), jnp.int32), zeros((1,), jnp.int32), distribution)


def shapes(tree: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(tree)]


def verify(n: int = 0, rows: int | None = None, **changes: Any) -> sd.RejectionSampleOutput:
    named: dict[str, Any] = dict(
        drafts=drafts(n), sampling=SAMPLING, keys=KEYS[:0], positions=NOBODY, config=CONFIG
    )
    named |= changes
    return sd.rejection_sample(zeros((n if rows is None else rows, V)), **named)


@pytest.mark.parametrize("jits", [False, True], ids=["eager", "jit"])
def test_an_empty_batch_emits_nothing(jits: bool) -> None:
    def calls() -> list[sd.RejectionSampleOutput]:
        return [
            verify(n, config=config, implementation=implementation)
            for n in (0, 3)
            for config in RULES.values()
            for implementation in (None, "xla")
        ]

    for output in jax.jit(calls)() if jits else calls():
        assert shapes(output) == EMPTY and sd.parse_output(output) == []
        assert {x.dtype for x in jax.tree.leaves(output)} == {jnp.dtype("int32")}


CALLS: dict[str, Callable[[], Any]] = {
    "bonus tokens given": lambda: verify(3, bonus_token_ids=NOBODY),
    "padded rows": lambda: verify(3, rows=5, padded_rows=True),
    "no rows, padded": lambda: verify(3, rows=0, padded_rows=True),
    "probabilities": lambda: verify(drafts=drafts(0, sd.DraftProbs(zeros((0, V))))),
    "probabilities of padding": lambda: verify(3, drafts=drafts(3, sd.DraftProbs(zeros((3, V))))),
    "logits": lambda: verify(drafts=drafts(0, sd.DraftLogits(zeros((0, V))))),
    "a dense batch": lambda: verify(drafts=sd.Drafts.from_dense(zeros((0, K), int))),
    "lists": lambda: verify(sampling=sd.SamplingParams([]), positions=[]),
    "filters": lambda: verify(sampling=FILTERED),
    "a mask": lambda: verify(token_bitmask=zeros((0, 1), jnp.int32), active=NOBODY > 0),
    "noise": lambda: sd.testing.rejection_sample_with_noise(
        zeros((0, V)),
        drafts(0),
        sd.testing.Noise(zeros((0, K)), zeros((0, 2))),
        sampling=SAMPLING,
        config=CONFIG,
    ),
    "a race": lambda: sd.testing.rejection_sample_with_noise(
        zeros((0, V)),
        drafts(0),
        sd.testing.RaceNoise(zeros((0, K)), zeros((0, V))),
        sampling=SAMPLING,
        config=CONFIG,
    ),
    "a flat batch": lambda: (
        tpu_inference.verify_flat(
            zeros((0, V)), NOBODY, NOBODY, config=CONFIG, temperature=None
        ).output
    ),
    "chains": lambda: (
        sglang_jax.verify_chains(
            zeros((0, V)),
            zeros((0, K + 1), jnp.int32),
            NOBODY,
            config=CONFIG,
            temperatures=zeros((0,)),
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
        zeros((0, V)),
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
            zeros((batch, V)),
            sampling=FILTERED if filtered else sd.SamplingParams(1.0),
            keys=KEYS[:batch],
            positions=zeros((batch,), jnp.int32),
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
    empty, rows = zeros((0,)), zeros((n, V))
    given = dict(positions=NOBODY, sampling=SAMPLING, slots=NOBODY)

    def processed() -> Any:
        processors = sd.LogitsProcessors(
            logit_bias=sd.LogitBias.from_mappings([]),
            penalties=sd.Penalties(
                empty, empty, empty, zeros((0, V), jnp.int32), zeros((0, V), bool)
            ),
            bad_words=sd.BadWords(zeros((0, 1, 2), jnp.int32), zeros((0, 1), jnp.int32)),
            min_tokens=sd.MinTokens(zeros((0, 1), jnp.int32), NOBODY),
        )
        return (
            sd.process_logits(rows, drafts(n), processors, config=CONFIG),
            sd.process_logits(rows[:0], None, processors),
            processors.append(NOBODY).is_neutral,
        )

    def logprobs() -> Any:
        call = dict(sampling=SAMPLING, config=CONFIG, num_top=2)
        return [
            sd.token_logprobs(rows, drafts(n), OUTPUT, distribution=distribution, **call)
            for distribution in ("raw", "processed")
        ]

    def stored() -> Any:
        store = sd.DraftStore.create(num_slots=2, num_speculative_tokens=K, vocab_size=V)
        attached = store.attach(drafts(n), **given)
        fallbacks = sd.DraftStore.count_fallbacks(attached, sampling=SAMPLING)
        drawn = sd.DraftSample(NOBODY, empty, empty)
        return store, store.write(0, rows[:0], drawn, **given), attached, fallbacks

    def counted() -> Any:
        counters = sd.AcceptanceCounters.create(K)
        nothing = dict(num_proposed=NOBODY, num_accepted=NOBODY, num_emitted=NOBODY)
        return counters.words, counters.update(**nothing).words

    calls = processed, logprobs, stored, counted
    found = jax.jit(lambda: [call() for call in calls])()
    (of_drafts, of_none, is_neutral), tops, (store, written, attached, fallbacks), words = found
    assert of_drafts.shape == (n, V) and of_none.shape == (0, V) and bool(is_neutral)
    assert [shapes(top) for top in tops] == [[(0, K + 1), (0, K + 1, 2), (0, K + 1, 2)]] * 2
    assert shapes(written) == shapes(store)
    assert attached.distribution.valid.shape == (0,) and int(fallbacks) == 0
    assert words[0].tolist() == words[1].tolist()
    sd.testing.validate(rows, drafts(n), sampling=SAMPLING, config=CONFIG, positions=NOBODY)
    assert sd.testing.draw_noise(KEYS[:0], NOBODY, K).accept.shape == (0, K)
    assert sd.testing.which_implementation(rows, drafts(n), config=CONFIG) in ("xla", "mosaic_gpu")


def without_drafts(form: str, bonus: bool) -> sd.RejectionSampleOutput:
    """N = 0 with B = 2."""
    logits = np.eye(2, V, dtype=np.float32)
    with assume(form):
        return sd.rejection_sample(
            logits[:0] if bonus else logits,
            sd.Drafts(NOBODY, zeros((3,), jnp.int32), sd.DraftProbs(zeros((0, V)))),
            sampling=sd.SamplingParams(0.0),
            keys=KEYS,
            positions=zeros((2,), jnp.int32),
            config=CONFIG,
            bonus_token_ids=np.int32([5, 6]) if bonus else None,
            implementation="xla",
        )


@pytest.mark.parametrize(("form", "bonus"), [("cpu", True), ("cuda", False)])
def test_requests_without_drafts_take_the_argmax(form: str, bonus: bool) -> None:
    output = without_drafts(form, bonus)
    assert sd.parse_output(output) == ([[5], [6]] if bonus else [[0], [1]])


def test_requests_without_drafts_or_rows_may_be_batched() -> None:
    """Its bonus tokens are those of any batch."""
    output = jax.eval_shape(lambda: without_drafts("cuda", True))
    assert shapes(output) == [(2, K + 1), (2,), (2,), (2,)]
