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


@pytest.mark.long
def test_random_weights_begin_with_norms_that_multiply_by_one() -> None:
    """Where 1 + w stands for w in the target's norm alone."""
    norm = lm.models.Norm(adds_one=True)
    head = lm.models.GemmaAssistantHead(dataclasses.replace(DENSE.config, target_norm=norm))
    params = jax.jit(head.init_params)(jax.random.key(0))
    assert np.unique(params["target_norm"]) == 0 and np.unique(params["norm"]) == 1
    assert np.unique(params["layers"][0]["layer_scalar"]) == 1


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
            row = drafting_draw.ids_of(found.ids[:, 0], VOCAB).to_vocabulary(row)
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
    with pytest.raises(ValueError, match="^tree_depth must be at least 0"):
        lm.GemmaAssistantDrafter(ORDERED, tree_depth=-1)
    with pytest.raises(TypeError, match="^tree_depth must be an int"):
        lm.GemmaAssistantDrafter(ORDERED, tree_depth=2.0)
    with pytest.raises(TypeError, match="^head must be a GemmaAssistantHead"):
        lm.GemmaAssistantDrafter(TARGET)  # type: ignore[type-var]


# Trees

DEPTH, NODES = 3, 20
LENGTHS, TEMPERATURES = [9, 5, 1], [0.7, 0.0, 1.0]
TEXTS = np.random.default_rng(4).integers(0, VOCAB, (len(LENGTHS), 10)).astype(np.int32)
KEYS = jax.random.split(jax.random.key(5), len(LENGTHS))


@functools.cache
def texts_passed() -> Any:
    cache = TARGET.init_cache(len(TEXTS), TEXTS.shape[1])
    start = jnp.zeros(len(TEXTS), jnp.int32)
    return jax.jit(lambda x: run_pass(TARGET, PARAMS, x, start, cache, (2,)))(TEXTS)


def paths_of_a_tree(head: lm.models.GemmaAssistantHead) -> list[list[tuple[int, ...]]]:
    """The tokens on the way to each node that is proposed after the texts, by request."""
    lengths = np.array(LENGTHS, np.int32)
    before = np.maximum(lengths - 2, 0)[:, None, None]
    context = lm.DraftContext(
        jnp.asarray(TEXTS),
        jnp.asarray(lengths),
        sd.SamplingParams(jnp.array(TEMPERATURES)),
        KEYS,
        sd.SpecDecodeConfig(num_speculative_tokens=NODES, rejection_sample_method="agreement"),
        features=jnp.take_along_axis(texts_passed().features, before, axis=1),
        num_features=jnp.asarray(np.minimum(lengths - 1, 1)),
        target_cache=texts_passed().cache,
    )
    drafter = lm.GemmaAssistantDrafter(head, tree_depth=DEPTH)
    propose = jax.jit(functools.partial(drafter.propose, params_of(head)))
    proposal, _ = propose(context, drafter.init_cache(len(TEXTS), 10), None)
    assert proposal.store is None and proposal.parents is not None
    found = []
    for ids, parents in zip(*map(np.asarray, (proposal.token_ids, proposal.parents)), strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(ids[ids >= 0], parents, strict=False):
            paths.append((*paths[parent], int(token)))
        found.append(paths[1:])
    return found


def searched(head: lm.models.GemmaAssistantHead, request: int) -> list[tuple[int, ...]]:
    """The best paths of a beam that runs one node at a time, best first."""
    params, width, newest = params_of(head), 8, LENGTHS[request] - 1
    cache = [tuple(x[request : request + 1] for x in layer) for layer in texts_passed().cache]

    @jax.jit
    def one(token: Any, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = lm.models.Rows(jnp.reshape(token, (1, 1)), jnp.full(1, newest))
        found = head.apply(params, state, rows, cache)
        row = jnp.full(VOCAB, -jnp.inf)
        columns = jnp.arange(VOCAB) if found.ids is None else found.ids[0, 0]
        return row.at[columns].set(found.logits[0, 0]), found.states

    features = texts_passed().features[request, newest - 1][None, None]
    above = [(0.0, (), int(TEXTS[request, newest]), head.first_states(params, features))]
    every: list[tuple[float, tuple[int, ...]]] = []
    for depth in range(DEPTH):
        position = jnp.int32(LENGTHS[request] + depth)
        noise = sd.testing.token_exponentials(KEYS[request], position, VOCAB)
        # One tile, whose noise comes first.
        gumbel = -np.log(np.asarray(noise, np.float64)[1:])
        children = []
        for score, path, token, state in above:
            row, left = one(token, state)
            chance = np.asarray(row, np.float64) + TEMPERATURES[request] * gumbel
            chance -= np.log(np.sum(np.exp(chance)))
            tokens = [i for i in range(VOCAB) if chance[i] > -np.inf]
            children += [(score + chance[i], (*path, i), i, left) for i in tokens]
        every += [child[:2] for child in children]
        above = sorted(children, key=lambda child: -child[0])[:width]
    return [path for _, path in sorted(every, reverse=True)[:NODES]]


@pytest.mark.parametrize("head", [ORDERED, pytest.param(DENSE, marks=pytest.mark.long)])
def test_nodes_are_those_of_a_search_that_runs_them_one_by_one(
    head: lm.models.GemmaAssistantHead,
) -> None:
    """With noise and without; a text is longer than the window, and one has no row to begin."""
    found = paths_of_a_tree(head)
    for request in range(2):
        assert found[request] == searched(head, request)
        assert len(found[request]) == NODES
        assert {*map(len, found[request])} == {1, 2, 3}
    assert found[2] == []


# Texts


DRAFTERS = {
    "alone": (lm.GemmaAssistantDrafter(ORDERED), params_of(ORDERED)),
    "beside a lookup": (
        lm.FirstOf(lm.SuffixDrafter(), lm.GemmaAssistantDrafter(ORDERED)),
        (lm.SuffixDrafter().init_params(), params_of(ORDERED)),
    ),
    "trees": (lm.GemmaAssistantDrafter(ORDERED, tree_depth=DEPTH), params_of(ORDERED)),
}


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("alone", True),
        pytest.param("alone", False, marks=pytest.mark.long),
        pytest.param("beside a lookup", True, marks=pytest.mark.long),
        pytest.param("trees", False, marks=pytest.mark.long),
    ],
)
def test_texts_are_those_of_plain_decoding(name: str, exact: bool) -> None:
    """Greedy, and sampled under the agreement rule; requests accept different counts."""
    drafter, draft_params = DRAFTERS[name]
    count = 9 if drafter.serves.tree_depth else 3
    config = sd.SpecDecodeConfig(num_speculative_tokens=count, rejection_sample_method="agreement")
    options = [lm.RequestOptions(max_new_tokens=20, temperature=t) for t in (0.0, 2.0)]
    given: Any = dict(config=config, options=options, key=jax.random.key(3), exact=exact)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    plain = lm.generate_plain(TARGET, PARAMS, prompts, **given)
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
