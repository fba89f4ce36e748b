"""Trees of drafts in every loop: the text is that of plain decoding, whatever is proposed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import run as run_pass
from upper_floor import Drafted

import jax_specdec as sd
from jax_specdec import lm

from . import engines, tiny
from .engines import VOCAB
from .grammars import Follows
from .test_draft_budget import Cycling, FromThePast
from .test_grammar_driver import Cycle, constrained_truth

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("engines")]

NODES, DEPTH, NEW_TOKENS, PLANS = 9, 3, 17, 64
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=NODES, rejection_sample_method="agreement")


@dataclasses.dataclass(frozen=True)
class TreeTrigram(tiny.Trigram):
    """A `Trigram` that runs trees: the token before a node is its parent's, of what it sees."""

    serves = lm.models.Serves(trees=True)

    def apply(self, params: Any, groups: Any, cache: Any, wants: Any = None) -> tuple[Any, Any]:
        (rows,) = groups
        token_ids, start, tree = rows.token_ids, rows.start, rows.tree
        if tree is None:
            return super().apply(params, groups, cache, wants)
        size = token_ids.shape[1]
        requests, nodes = jnp.arange(token_ids.shape[0])[:, None], jnp.arange(size)
        cache = cache.at[requests, start[:, None] + nodes[None, :]].set(token_ids)
        shift = (nodes % 32).astype(jnp.uint32)[None, None, :]
        bits = (tree.tree_mask[:, :, nodes // 32] >> shift) & 1
        is_parent = (bits == 1) & (tree.depth[:, None, :] + 1 == tree.depth[:, :, None])
        parent = start[:, None] + jnp.argmax(is_parent, axis=2)
        parent = parent.at[:, 0].set(start - 1)
        before = jnp.where(parent >= 0, cache[requests, jnp.maximum(parent, 0)], 0)
        return [lm.models.Output(params.at[before, token_ids].get(mode="clip"))], cache

    def commit(self, cache: jax.Array, start: jax.Array, path: jax.Array) -> jax.Array:
        requests, offset = jnp.arange(path.shape[0])[:, None], jnp.arange(path.shape[1])[None, :]
        kept = cache[requests, start[:, None] + jnp.maximum(path, 0)]
        place = jnp.where(path < 0, cache.shape[1], start[:, None] + offset)
        # What is not kept is poisoned: the next step must write it before anything sees it.
        is_new = jnp.arange(cache.shape[1])[None, :] >= start[:, None]
        cache = jnp.where(is_new, 5, cache)
        return cache.at[requests, place].set(kept, mode="drop")


MODEL = TreeTrigram(VOCAB)


class Plans:
    """Trees by the seed of a request and the position of their first draft, as `Planned` reads."""

    def __init__(self, ids: np.ndarray, parents: np.ndarray) -> None:
        self.ids, self.parents = ids, parents

    @property
    def params(self) -> Any:
        return jnp.asarray(self.ids), jnp.asarray(self.parents)

    @classmethod
    def random(cls, seed: int, texts: dict[int, list[int]] | None = None) -> Plans:
        """Random trees, ragged; some hold the next tokens of the text of a seed."""
        rng, texts = np.random.default_rng(seed), texts or {}
        ids = np.full((PLANS, engines.LONGEST, NODES), -1, np.int32)
        parents = np.zeros(ids.shape, np.int32)
        for s in range(PLANS):
            for p in range(engines.LONGEST):
                truth = texts.get(s, [])[p:] if rng.random() < 0.6 else []
                ids[s, p], parents[s, p] = random_tree(rng, truth)
        return cls(ids, parents)


def random_tree(rng: np.random.Generator, truth: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and parents of up to `NODES` nodes no deeper than `DEPTH`, in any topological order."""
    ids, parents = np.full(NODES, -1, np.int32), rng.integers(-3, 99, NODES).astype(np.int32)
    above: dict[int, tuple[int, ...]] = {0: ()}  # the path to each node
    for j in range(NODES):
        if rng.random() < 0.15:
            continue  # a node that is not used, wherever it is
        parent = int(rng.choice([*above]))
        path = above[parent]
        token = int(rng.integers(0, VOCAB))
        if path == tuple(truth[: len(path)]) and len(path) < len(truth) and rng.random() < 0.8:
            token = truth[len(path)]
        if len(path) == DEPTH or (*path, token) in above.values():
            continue
        ids[j], parents[j], above[j + 1] = token, parent, (*path, token)
    return ids, parents


@dataclasses.dataclass(frozen=True)
class Planned(lm.Drafter):
    """Proposes `Plans` of the key's seed, which may know the noise, the text, or nothing."""

    tree_depth: int = DEPTH

    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(tree_depth=self.tree_depth)

    def propose(self, params: Any, context: Any, cache: Any, store: None) -> Any:
        seed = jax.random.key_data(context.keys)[:, 1].astype(jnp.int32) % PLANS
        place = jnp.minimum(context.lengths, engines.LONGEST - 1)
        ids, parents = (x[seed, place, : context.config.num_speculative_tokens] for x in params)
        return lm.Proposal(ids, parents=parents if self.tree_depth else None), cache


rng = np.random.default_rng(3)
PROMPTS = [rng.integers(0, VOCAB, n).tolist() for n in (3, 1, 5, 2, 7, 1, 4, 2)]
OPTIONS = [
    lm.RequestOptions(seed=b, max_new_tokens=NEW_TOKENS, **fields)
    for b, fields in enumerate(
        [
            dict(),
            dict(temperature=0.8),
            dict(temperature=0.8, top_k=4, top_p=0.9),
            dict(temperature=1.0, min_p=0.05, frequency_penalty=0.3, repetition_penalty=1.2),
            dict(repetition_penalty=1.3, presence_penalty=0.2),
            dict(temperature=1.2, stop_token_ids=(2,), min_tokens=3),
            dict(temperature=0.8, max_drafts=2, logit_bias={1: 0.7}),
            dict(temperature=1.0, max_drafts=0, bad_words=((1, 1), (3,))),
        ]
    )
]
LOGPROBS = sd.LogprobsConfig(num_top=2, distribution="processed", thresholds=True)


@functools.cache
def plain() -> lm.GenerateOutput:
    return lm.generate_plain(
        MODEL, engines.TABLES[0], PROMPTS, config=CONFIG, options=OPTIONS, logprobs=LOGPROBS
    )


@functools.cache
def peeking(seed: int = 0) -> Plans:
    """Plans that know the texts of the requests above, and those of `random_requests`."""
    texts = {b: p + t for b, (p, t) in enumerate(zip(PROMPTS, plain().completions, strict=True))}
    return Plans.random(seed, texts)


def steps_by_hand(b: int, plans: Plans) -> list[tiny.Step]:
    """The walk of a request over the trees of its plans, in plain Python."""
    prompt, text, asked = PROMPTS[b], plain().completions[b], OPTIONS[b]
    position, end, steps = len(prompt), len(prompt) + len(text), []
    most = NODES if asked.max_drafts is None else asked.max_drafts
    while position < end:
        ids, parents = plans.ids[b, position, :most], plans.parents[b, position, :most]
        rest, node, num_accepted = [*prompt, *text][position:], 0, 0
        depth = np.zeros(NODES + 1, int)
        for j in range(len(ids)):
            depth[j + 1] = depth[parents[j]] + 1 if ids[j] >= 0 else 0
        # Past the end of a text nobody knows what would have been accepted.
        for token in rest:
            found = [j + 1 for j in range(len(ids)) if (ids[j], parents[j]) == (token, node)]
            if not found:
                break
            node, num_accepted = found[0], num_accepted + 1
        kept = rest[: num_accepted + 1]
        steps.append(tiny.Step(kept, int(depth.max()), num_accepted, num_accepted + 1))
        position += len(kept)
    return steps


# What `generate` emits


def run_with(drafter: Any, model: Any = MODEL, seed: int = 0, **fields: Any) -> lm.GenerateOutput:
    config = dataclasses.replace(CONFIG, **fields)
    given = dict(drafter=drafter, draft_params=peeking(seed).params, config=config)
    given |= dict(options=OPTIONS, logprobs=LOGPROBS)
    return lm.generate(model, engines.TABLES[0], PROMPTS, **given)


@functools.cache
def generated(seed: int = 0) -> lm.GenerateOutput:
    return run_with(Planned(), seed=seed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.newest)])
def test_generate_gives_the_text_and_the_steps_of_plain_python(seed: int) -> None:
    plans, output = peeking(seed), generated(seed)
    assert output.completions == plain().completions
    assert output.steps.token_ids.shape[2] == DEPTH + 1
    assert output.steps.num_accepted.max() == DEPTH
    for b in range(len(PROMPTS)):
        found, wanted = tiny.steps_of(output, b), steps_by_hand(b, plans)
        assert [one.kept for one in found] == [one.kept for one in wanted]
        assert [one.num_proposed for one in found] == [one.num_proposed for one in wanted]
        assert found[:-1] == wanted[:-1]  # the last may have been cut


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    outputs = plain(), generated()
    for b, text in enumerate(plain().completions):
        each = []
        for output in outputs:
            steps, kept = output.steps.logprobs, output.steps.num_kept[:, b]
            rows = [(s, i) for s, n in enumerate(kept) for i in range(n)]
            each.append([[x[s, b, i] for s, i in rows] for x in jax.tree.leaves(steps)])
        for one, other in zip(*each, strict=True):
            assert len(one) == len(text)
            np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5)


# Engines

ENGINE = lm.Engine(
    MODEL,
    Planned(),
    CONFIG,
    logprobs=LOGPROBS,
    num_slots=4,
    max_length=engines.LONGEST,
    prefill_sizes=(4,),  # longer prompts are read in pieces
    request_options=True,
)
BUDGET = (0, 3, NODES)


@pytest.mark.slow
def test_engines_give_it_whatever_the_traffic_and_the_budget() -> None:
    engine = dataclasses.replace(ENGINE, draft_budget=BUDGET)
    driver = engines.driver_of(engine, engines.TABLES[0], peeking().params, max_steps_ahead=1)
    driver.draft_choice = FromThePast(BUDGET, driver.draft_choice.rates, has_trees=True)
    traffic, ids, updates = np.random.default_rng(4), {}, []
    for b in traffic.permutation(2 * len(PROMPTS)).tolist():
        b %= len(PROMPTS)
        driver.submit([1, 2], max_new_tokens=3, temperature=1.0, top_k=5)
        ids[driver.submit(PROMPTS[b], OPTIONS[b])] = b
        updates += driver.step()
        if not driver.is_idle and traffic.random() < 0.5:
            driver.preempt(int(traffic.choice([*ids])))
    found = engines.run(driver, updates)
    for request_id, b in ids.items():
        assert found[request_id].token_ids == plain().completions[b]
        each = [update.logprobs.logprobs for update in found[request_id].updates]
        kept = plain().steps.num_kept[:, b] > 0
        np.testing.assert_allclose(
            np.concatenate(each), plain().steps.logprobs.logprobs[kept, b, 0], atol=1e-5
        )
    stats = driver.stats()
    assert len(stats.accepted_per_position) == DEPTH
    assert all(stats.accepted_per_position)


WITH_GRAMMARS = dataclasses.replace(
    ENGINE, draft_budget=(0, NODES), logprobs=None, prefill_sizes=None, max_prefill_requests=1
)


@pytest.mark.slow
def test_requests_with_grammars_beside_others() -> None:
    """Their drafts are chains, the first paths; the others' are trees in the same pass."""
    driver = engines.driver_of(WITH_GRAMMARS, engines.TABLES[0], Plans.random(5).params)
    driver.warm_up(grammars=True)
    texts = plain().completions  # before compilations are counted: this may be its first call
    truths: dict[int, list[int]] = {}
    proposed = dict.fromkeys((True, False), 0)
    with engines.compilations() as compiled:
        for b, (prompt, asked) in enumerate(zip(PROMPTS, OPTIONS, strict=True)):
            truths[driver.submit(prompt, asked)] = texts[b]
            request_id = driver.submit(prompt, max_new_tokens=9, seed=b, matcher=Cycle())
            truths[request_id] = constrained_truth(prompt, 9)
        found = engines.run(driver)
    driver.close()
    assert compiled == []
    for request_id, one in found.items():
        assert one.token_ids == truths[request_id]
        proposed[bool(request_id % 2)] += sum(x.num_accepted for x in one.updates)
    assert all(proposed.values())


@pytest.mark.slow
def test_forced_tokens_are_accepted_up_to_the_depth_of_trees() -> None:
    driver = engines.driver_of(WITH_GRAMMARS, engines.TABLES[0], Plans.random(7).params)
    one_each = Follows(lambda text: (len(text) % 5,))
    driver.submit([1, 2], max_new_tokens=12, temperature=1.0, matcher=one_each)
    (found,) = engines.run(driver).values()
    driver.close()
    assert found.token_ids == [i % 5 for i in range(12)]
    assert [len(x.token_ids) for x in found.updates] == [DEPTH + 1] * 3
    assert {x.num_proposed for x in found.updates} == {DEPTH}


@pytest.mark.long
def test_chains_of_a_grammar_teach_nothing_of_the_ranks_of_trees() -> None:
    driver = engines.driver_of(WITH_GRAMMARS, engines.TABLES[0], Plans.random(5).params)
    driver.submit(PROMPTS[0], max_new_tokens=9, matcher=Cycle())
    (found,) = engines.run(driver).values()
    driver.close()
    assert sum(x.num_proposed for x in found.updates) > 0
    assert not driver.state.draft_rates.tried.any()


@pytest.mark.slow
def test_a_verification_alone_is_a_plain_step_or_one_of_chains() -> None:
    """Drafts of the caller's own, without parents, follow one another."""
    driver = engines.driver_of(ENGINE, engines.TABLES[0], peeking().params)
    driver.submit(PROMPTS[3], OPTIONS[3])
    driver.step()
    state, text = driver.state, plain().completions[3]
    verify = jax.jit(ENGINE.verify)
    nothing = jnp.zeros((engines.SLOTS,), jnp.int32)
    token_ids = jnp.full((engines.SLOTS, NODES), -1, jnp.int32)
    token_ids = token_ids.at[0].set(jnp.array(text[1 : 1 + NODES]))
    chains = dataclasses.replace(state, proposal=Drafted(token_ids, nothing))
    for one, count in ((state, 1), (chains, DEPTH + 1)):
        after, record = verify(engines.TABLES[0], one)
        assert record.token_ids[0, :count].tolist() == text[1 : 1 + count]
        assert (int(record.num_kept[0]), int(record.num_proposed[0])) == (count, count - 1)
        assert after.batch.lengths[0] == len(PROMPTS[3]) + 1 + count


def test_first_paths() -> None:
    parents = jnp.array([[0, 0, 2, 1, 4, 3], [0, 0, 2, 1, 4, 3], [0, 0, 2, 1, 4, 3]])
    ids = jnp.array([[9, 1, 2, 3, 4, 5], [-1, 1, 2, -1, -1, 5], [9, 1, 2, 3, 4, 5]])
    drafted = Drafted(ids, jnp.zeros((3,), jnp.int32), parents)
    drafted = drafted.with_chains(jnp.array([True, True, False]))
    assert drafted.token_ids.tolist() == [
        [9, 3, 4, -1, -1, -1],
        [1, 2, 5, -1, -1, -1],
        [*ids[2]],
    ]
    assert drafted.parents.tolist() == [[0, 1, 2, 3, 4, 5]] * 2 + [[*parents[2]]]
    assert drafted.are_chains.tolist() == [True, True, False]


# Caches and features of a real model


@dataclasses.dataclass(frozen=True)
class Reading(Planned):
    """Keeps the features that it is given, by position."""

    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(aux_hidden_state_layers=(0, 1), tree_depth=self.tree_depth)

    def init_cache(self, batch_size: int, max_length: int) -> jax.Array:
        return jnp.zeros((batch_size, max_length, 32))

    def prefill(
        self, params: Any, rows: Any, cache: Any, features: Any = None, next_token_ids: Any = None
    ) -> Any:
        return self.written(cache, rows.start, features, rows.token_ids.shape[1])

    def propose(self, params: Any, context: Any, cache: Any, store: None) -> Any:
        count = context.num_features
        cache = self.written(cache, context.lengths - 1 - count, context.features, count[:, None])
        return super().propose(params, context, cache, store)

    def written(self, cache: jax.Array, start: jax.Array, rows: jax.Array, count: Any) -> jax.Array:
        offset = jnp.arange(rows.shape[1])[None, :]
        place = jnp.where(offset < count, start[:, None] + offset, cache.shape[1])
        return cache.at[jnp.arange(len(cache))[:, None], place].set(rows, mode="drop")


def seen_by(features: Any, cache: Any, length: int, request: int) -> tuple[Any, Any]:
    """What the drafter and the target keep of the tokens of a request but the newest."""
    heads = slice(2 * request, 2 * request + 2)
    pairs = [(k[heads, :, : length - 1], v[heads, : length - 1]) for k, v in cache]
    return features[request, : length - 1], pairs


@pytest.mark.slow
def test_caches_and_features_are_those_of_a_pass_over_the_text() -> None:
    llama, params = engines.LLAMA.model, engines.weights_of(engines.LLAMA)[0]
    asked: dict[str, Any] = dict(max_new_tokens=30, temperature=0.8)
    options = [lm.RequestOptions(seed=b, **asked) for b in range(4)]
    texts = lm.generate_plain(llama, params, PROMPTS[:4], config=CONFIG, options=options)
    whole = [p + t for p, t in zip(PROMPTS, texts.completions, strict=False)]
    plans = Plans.random(8, dict(enumerate(whole)))
    engine = dataclasses.replace(
        ENGINE, model=llama, drafter=Reading(), draft_budget=(0, NODES), request_options=False
    )
    driver = engines.driver_of(engine, params, plans.params)
    driver.draft_choice = Cycling(engine.draft_budget, driver.draft_choice.rates)
    for prompt, one in zip(PROMPTS, options, strict=False):
        driver.submit(prompt, one)
    counts = [len(prompt) for prompt in PROMPTS[:4]]
    for _ in range(9):
        for update in driver.step():
            counts[update.request_id] += len(update.token_ids)
    assert driver.stats().accepted_per_position[DEPTH - 1] > 0
    # The newest features are with the state until the next step drafts from them.
    state = driver.state
    features, number = state.features
    kept = Reading().written(
        state.draft_cache, state.batch.lengths - 1 - number, features, number[:, None]
    )
    # One pass over all texts, padded.
    ids = np.zeros((len(whole), max(map(len, whole))), np.int32)
    for row, text in zip(ids, whole, strict=True):
        row[: len(text)] = text
    cache, start = llama.init_cache(len(ids), engine.buffer_length), np.zeros(len(ids), np.int32)
    read = jax.jit(run_pass, static_argnums=(0, 5))
    output = read(llama, params, ids, start, cache, (0, 1))
    ours = jax.device_get((kept, state.target_cache))
    theirs = jax.device_get((output.features, output.cache))
    token_ids, keys = np.asarray(state.batch.token_ids), jax.random.key_data(state.batch.keys)
    for slot, b in enumerate(np.asarray(keys)[:, 1].tolist()):
        text, count = whole[b], counts[b]
        assert count < len(text)
        assert token_ids[slot, :count].tolist() == text[:count]
        found, fresh = seen_by(*ours, count, slot), seen_by(*theirs, count, b)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-3), found, fresh)


# What a budget goes by


@pytest.mark.slow
def test_rates_are_those_of_the_ranks() -> None:
    """By the plans and the texts: which drafts of a request were accepted in each of its steps."""
    engine = dataclasses.replace(ENGINE, draft_budget=BUDGET)
    plans, b = peeking(), 3
    driver = engines.driver_of(engine, engines.TABLES[0], plans.params)
    driver.submit(PROMPTS[b], OPTIONS[b])
    (found,) = engines.run(driver).values()
    offered, kept, position = np.zeros(NODES), np.zeros(NODES), len(PROMPTS[b])
    for i, update in enumerate(found.updates):
        hits, node = np.zeros(NODES), 0
        tree = list(zip(plans.ids[b, position], plans.parents[b, position], strict=True))
        for token in update.token_ids[: update.num_accepted]:
            node = tree.index((token, node)) + 1
            hits[node - 1] = 1
        if i:  # a request begins without drafts
            offered, kept = 0.99 * offered + 1, 0.99 * kept + hits
        position += len(update.token_ids)
    assert kept.sum() > 3
    rates = driver.state.draft_rates
    np.testing.assert_allclose(rates.tried, offered, rtol=1e-6)
    np.testing.assert_allclose(rates.accepted, kept, rtol=1e-6)
    np.testing.assert_array_equal(driver.draft_choice.rates, rates.values)
    assert driver.draft_choice.has_trees


COSTS = lm.StepCosts(4, (0, 2, 4), (1.0, 1.2, 1.3))


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ([0.6, 0.3, 0.05, 0.05], 2),  # 1.0, 1.9 / 1.2, 2.0 / 1.3
        ([0.6, 0.3, 0.3, 0.3], 4),  # 2.5 / 1.3
        ([0.1, 0.05, 0.05, 0.0], 0),
    ],
)
def test_a_choice_adds_the_rates_of_ranks(rates: list[float], best: int) -> None:
    assert lm.DraftChoice((0, 2, 4), rates, COSTS, has_trees=True).best == best


@pytest.mark.slow
def test_a_choice_learns_at_which_rank_drafts_are_accepted() -> None:
    """Trees whose fourth draft is the next token, and no other: three drafts are worth nothing."""
    texts = np.full((PLANS, engines.LONGEST), -1, np.int32)
    for b, prompt in enumerate(PROMPTS):
        asked = dict(prompt=prompt, max_new_tokens=NEW_TOKENS)
        own = prompt + engines.greedy_truth(asked)
        texts[b, : len(own)] = own
    ids = np.where(texts[:, :, None] >= 0, (texts[:, :, None] + np.arange(1, 5)) % VOCAB, -1)
    ids = np.pad(ids, ((0, 0), (0, 0), (0, NODES - 4)), constant_values=-1).astype(np.int32)
    ids[:, :, 3] = texts
    engine = dataclasses.replace(ENGINE, draft_budget=BUDGET)
    costs = lm.StepCosts(4, BUDGET, (1.0, 1.05, 1.1))
    for rank, wanted in ((3, NODES), (5, 0)):
        own = ids.copy()
        if rank != 3:
            own[:, :, 3] = -1
        weights = engines.TABLES[0], Plans(own, np.zeros_like(own)).params
        driver = engines.driver_of(engine, *weights, step_costs=costs)
        for b, prompt in [*enumerate(PROMPTS)] * 4:
            # The bias changes nothing; steps with options are compiled for other tests too.
            driver.submit(prompt, max_new_tokens=NEW_TOKENS, seed=b, logit_bias={0: 0.0})
        engines.run(driver)
        print(driver.draft_choice.rates)
        assert driver.draft_choice.best == wanted


# Mistakes

CHAINS = tiny.Trigram(VOCAB)
BLOCK = dataclasses.replace(CONFIG, rejection_sample_method="block")
engine_with = functools.partial(dataclasses.replace, ENGINE)


@dataclasses.dataclass(frozen=True)
class Wrong(Planned):
    """Proposes something else than the parents of `Planned`, or trees without saying so."""

    change: Any = None

    def propose(self, *args: Any) -> Any:
        proposal, cache = Planned().propose(*args)
        return proposal._replace(parents=self.change(proposal.parents)), cache


PARENTS = "parents of Wrong.propose must be"


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (
            ValueError,
            r'rejection_sample_method must be "agreement", .*standard.*Planned with tree_depth=3',
            lambda: run_with(Planned(), rejection_sample_method="standard"),
        ),
        (ValueError, r'sample_method must be "agreement"', lambda: engine_with(config=BLOCK)),
        (
            ValueError,
            "num_speculative_tokens must be below 64, but it is 64",
            lambda: run_with(Planned(), num_speculative_tokens=64),
        ),
        (TypeError, "model must run trees.* chains", lambda: run_with(Planned(), CHAINS)),
        (TypeError, "model must run trees.* chains", lambda: engine_with(model=CHAINS)),
        (ValueError, "tree_depth must be .*0", lambda: run_with(Planned(-1))),
        (TypeError, "tree_depth must be an int", lambda: run_with(Planned(1.5))),
        (TypeError, f"{PARENTS} there", lambda: run_with(Wrong(change=lambda x: None))),
        (TypeError, f"{PARENTS} an array", lambda: run_with(Wrong(change=jnp.float32))),
        (TypeError, f"{PARENTS} there", lambda: run_with(Wrong(0, change=lambda x: x))),
        (ValueError, "head must propose chains", lambda: lm.FirstOf(lm.SuffixDrafter(), Planned())),
    ],
)
def test_mistakes_are_named(error: type, says: str, call: Any) -> None:
    with pytest.raises(error, match=says):
        call()
