"""An assistant of Gemma 4 in loops: its rows, the target's texts, and the law of sampled ones."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_weights
from passes import run as run_pass
from serving.chi_square import CONTROL, assert_distributed, p_value, tally
from upper_floor import drafting_draw

import jax_specdec as sd
from jax_specdec import lm

from . import loops

pytestmark = pytest.mark.newest

VOCAB, SIZE, WINDOW = 12, 16, 6
COMMON: dict[str, Any] = dict(
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    norm=lm.models.Norm(rms_norm_eps=1e-6, in_float32=True),
    norms="around",
    activation="gelu_tanh",
    scale=1.0,
    qk_norm=True,
    v_norm=True,
    has_scalar=True,
)
SLIDING = lm.models.LayerSpec(**COMMON, head_dim=4, window=WINDOW)
TURN = lm.models.Rotation(rope_theta=1e6, fraction=0.25)
FULL = lm.models.LayerSpec(**COMMON, head_dim=8, rotation=TURN, value_is_key=True)
TARGET = lm.models.Llama(
    lm.models.DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        layers=(SLIDING, FULL),
        tie_word_embeddings=True,
        scales_embedding=True,
        logit_softcap=30.0,
    )
)
PARAMS = random_weights(TARGET, 0, 1.5, moved=0.2)
GROUPS = dict(num_centroids=6, num_active_centroids=3)
"""Of an ordered head: two ids each, so that six of the twelve are candidates."""


def head_of(**groups: int) -> lm.models.GemmaAssistantHead:
    reads = [dataclasses.replace(x, keys_of=i) for i, x in enumerate((SLIDING, FULL))]
    return lm.models.GemmaAssistantHead(
        lm.models.GemmaAssistantConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            layers=(reads[0], reads[1]),
            target_hidden_size=SIZE,
            target_layers=2,
            target_norm=TARGET.config.norm,
            **groups,
        )
    )


def params_of(head: lm.models.GemmaAssistantHead) -> dict[str, Any]:
    params = random_weights(head, 1, 1.5, moved=0.2)
    if head.config.num_centroids is not None:
        order = np.random.default_rng(2).permutation(VOCAB).astype(np.int32)
        params["target_ids"] = jnp.asarray(order)
    return params | {"embed_tokens": PARAMS["embed_tokens"], "target_norm": PARAMS["norm"]}


ORDERED = head_of(**GROUPS)
DENSE = head_of()


# Rows


@functools.partial(jax.jit, static_argnums=0)
def one_pass(
    head: lm.models.GemmaAssistantHead, text: jax.Array, length: jax.Array, drafts: jax.Array
) -> jax.Array:
    """Rows ``[K, V]`` that drafts after a text are drawn from: the target reads it anew."""
    params = params_of(head)
    cache = TARGET.init_cache(1, len(text))
    passed = run_pass(TARGET, PARAMS, text[None], jnp.zeros(1, jnp.int32), cache, (2,))
    newest = length - 1
    state = head.first_states(params, passed.features[:, newest - 1][:, None])
    tokens = jnp.concatenate([text[newest][None], drafts])
    rows = []
    for token in tokens[: loops.K]:
        at = lm.models.Rows(token[None, None], newest[None])
        found = head.apply(params, state, at, passed.cache)
        row, state = found.logits[:, 0], found.states
        if found.ids is not None:
            row = drafting_draw.ids_of(found.ids[:, 0], VOCAB).on_target(row)
        rows.append(row[0])
    return jnp.stack(rows)


@pytest.mark.parametrize("head", [ORDERED, pytest.param(DENSE, marks=pytest.mark.long)])
def test_rows_are_those_of_a_fresh_pass_after_any_acceptances(
    head: lm.models.GemmaAssistantHead,
) -> None:
    """Requests with different counts, of one that leaves and comes back, past the window."""
    loop = loops.Loop(lm.GemmaAssistantDrafter(head), params_of(head), (TARGET, PARAMS))
    loops.check(loop, functools.partial(one_pass, head), [*range(VOCAB)], plain_step=4)
    if head is ORDERED:
        loops.check_between_chunks(loop)
        loops.check_next_request(loop)
        check_slots(loop)


def check_slots(loop: loops.Loop) -> None:
    """Requests that draft by themselves have the drafts that they have among all."""
    state = loop.start()
    for slot, prompt in enumerate(loops.PROMPTS):
        state = loop.read(state, slot, prompt)
    slots = np.array([3, 1], np.int32)
    alone = jax.jit(functools.partial(loop.engine.draft, loop.params))(state, slots=slots)
    among = loop.draft(state)
    drafts = np.asarray(among.proposal.token_ids)[slots]
    assert (drafts >= 0).all() and np.array_equal(alone.proposal.token_ids, drafts)


def test_the_cache_and_features_must_be_there() -> None:
    ones = jnp.ones(1, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 1)
    context = lm.DraftContext(ones[None], ones, sd.SamplingParams(jnp.zeros(1)), keys, loops.CONFIG)
    drafter = lm.GemmaAssistantDrafter(ORDERED)
    with pytest.raises(ValueError, match="^context must have features"):
        drafter.propose({}, context, (), None)
    features = dataclasses.replace(context, features=jnp.zeros((1, 1, SIZE)), num_features=ones)
    with pytest.raises(ValueError, match="^context must have the target_cache, but it has none"):
        drafter.propose({}, features, (), None)
    with pytest.raises(ValueError, match="^tree_depth must be 0"):
        lm.GemmaAssistantDrafter(ORDERED, tree_depth=2)
    with pytest.raises(TypeError, match="^head must be a GemmaAssistantHead"):
        lm.GemmaAssistantDrafter(TARGET)  # type: ignore[type-var]


# Texts


DRAFTERS = {
    "alone": (lm.GemmaAssistantDrafter(ORDERED), params_of(ORDERED)),
    "beside a lookup": (
        lm.FirstOf(lm.SuffixDrafter(), lm.GemmaAssistantDrafter(ORDERED)),
        (lm.SuffixDrafter().init_params(), params_of(ORDERED)),
    ),
}


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("alone", True),
        pytest.param("alone", False, marks=pytest.mark.long),
        pytest.param("beside a lookup", True, marks=pytest.mark.long),
    ],
)
def test_texts_are_those_of_plain_decoding(name: str, exact: bool) -> None:
    """Greedy, and sampled under the agreement rule; requests accept different counts."""
    config = sd.SpecDecodeConfig(num_speculative_tokens=3, rejection_sample_method="agreement")
    options = [lm.RequestOptions(max_new_tokens=20, temperature=t) for t in (0.0, 2.0)]
    given: Any = dict(config=config, options=options, key=jax.random.key(3), exact=exact)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    plain = lm.generate_plain(TARGET, PARAMS, prompts, **given)
    drafter, draft_params = DRAFTERS[name]
    drafted = {"drafter": drafter, "draft_params": draft_params}
    output = lm.generate(TARGET, PARAMS, prompts, **drafted, **given)
    assert output.completions == plain.completions
    accepted = output.steps.num_accepted
    assert (accepted.sum(axis=0) > 0).all() and (accepted[:, 0] != accepted[:, 1]).any()


# The law

K, NUM_TOKENS, REQUESTS, TEMPERATURE = 2, 3, 6144, 2.0
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # longer than the window


@functools.cache
def law() -> np.ndarray:
    """Probability of every continuation, ``[V] * NUM_TOKENS``, float64."""
    texts = np.stack(np.meshgrid(*[np.arange(VOCAB)] * (NUM_TOKENS - 1), indexing="ij"), axis=-1)
    texts = texts.reshape(-1, NUM_TOKENS - 1)
    ids = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1).astype(np.int32)
    start = jnp.zeros(len(ids), jnp.int32)
    cache = TARGET.init_cache(len(ids), ids.shape[1])
    logits = jax.jit(lambda x: run_pass(TARGET, PARAMS, x, start, cache).logits)(ids)
    rows = np.asarray(logits[:, -NUM_TOKENS:], np.float64) / TEMPERATURE
    rows = np.exp(rows - rows.max(axis=2, keepdims=True))
    rows /= rows.sum(axis=2, keepdims=True)
    first = rows[:, 0].reshape(*[VOCAB] * 2, VOCAB)[0, 0][:, None, None]
    second = rows[:, 1].reshape(*[VOCAB] * 2, VOCAB)[:, 0][:, :, None]
    return first * second * rows[:, 2].reshape(*[VOCAB] * 3)


@dataclasses.dataclass(frozen=True)
class Biased(lm.GemmaAssistantDrafter):
    """Drafts argmaxes, and claims that they were drawn from the softmax."""

    def propose(self, params: Any, context: Any, cache: Any, store: Any) -> Any:
        proposal, cache = super().propose(params, context, cache, store)
        best = proposal.store.logits.argmax(axis=1)
        # [K B, C] -> [K B] -> [B, K]
        ids = jnp.take_along_axis(proposal.store.ids, best[:, None], axis=1)
        return proposal._replace(token_ids=ids.reshape(K, -1).T), cache


def sampled(drafter: lm.Drafter) -> lm.GenerateOutput:
    options = lm.RequestOptions(temperature=TEMPERATURE, max_new_tokens=NUM_TOKENS)
    return lm.generate(
        TARGET,
        PARAMS,
        [PROMPT] * REQUESTS,
        drafter=drafter,
        draft_params=params_of(ORDERED),
        config=sd.SpecDecodeConfig(num_speculative_tokens=K),
        options=options,
        key=jax.random.key(11),
    )


def test_sampled_text_has_the_targets_law_and_with_argmaxes_of_a_softmax_it_has_not() -> None:
    output = sampled(lm.GemmaAssistantDrafter(ORDERED))
    rate = output.steps.num_accepted.sum() / output.steps.num_proposed.sum()
    print(f"accepted {rate:.2f}")
    assert 0.1 < rate < 0.9
    assert_distributed(tally(np.array(output.completions), VOCAB), law(), "candidates")
    biased = sampled(Biased(ORDERED))
    assert p_value(tally(np.array(biased.completions), VOCAB), law()) < CONTROL
