"""Lookup beside a head: the law of the text, by enumeration, and who drafts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from upper_floor import Lookup

import jax_specdec as sd
from jax_specdec import lm

from . import engines, test_lossless, tiny

pytestmark = [pytest.mark.long, pytest.mark.newest]

V, K = 3, 2
TEMPERATURE = 0.5
TARGET = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])  # of the next token
DRAFT = np.array([[0.2, 0.6, 0.2], [0.4, 0.3, 0.3], [0.1, 0.8, 0.1]])
LOOKUP = lm.SuffixDrafter(max_match=8, min_match=1)

COPIES = [0, 1, 2, 0, 1, 2, 0, 1]  # 2 0 came twice after 0 1: more than the head is likely to get
BRIEF = [2, 1, 1, 2]  # one draft by lookup: less
NEW = [0, 1]  # none


@dataclasses.dataclass(frozen=True)
class Forced(lm.Drafter):
    """Drafts what ``params [B, K]`` say, which are samples of `DRAFT`, and stores the rows."""

    def init_store(
        self, params: Any, batch_size: int, config: sd.SpecDecodeConfig
    ) -> sd.DraftStore | None:
        return sd.DraftStore.create(batch_size, config.num_speculative_tokens, V)

    def propose(
        self, params: Any, context: lm.DraftContext, cache: Any, store: sd.DraftStore
    ) -> tuple[lm.Proposal, Any]:
        last = jnp.take_along_axis(context.token_ids, context.lengths[:, None] - 1, axis=1)
        for offset in range(context.config.num_speculative_tokens):
            logits = TEMPERATURE * jnp.log(jnp.asarray(DRAFT, jnp.float32))[last[:, 0]]
            normalizer = jax.nn.logsumexp(logits / TEMPERATURE, axis=1)
            drawn = sd.DraftSample(params[:, offset], normalizer, jnp.zeros(last.shape[0]))
            given = dict(positions=context.lengths, sampling=context.sampling)
            store = store.write(offset, logits, drawn, **given)
            last = params[:, offset, None]
        return lm.Proposal(params[:, : context.config.num_speculative_tokens], store), cache


def law(
    last: int, drafts: list[int], rows: list[np.ndarray], num_tokens: int
) -> dict[tuple[int, ...], float]:
    """The law of the next tokens, of which the first are emitted by the standard rule."""
    if not num_tokens:
        return {(): 1.0}
    p = TARGET[last]
    if not drafts:
        followed: list[tuple[int, float, list[int]]] = [(y, p[y], []) for y in range(V)]
    else:
        (x, *_), q = drafts, rows[0]
        accepted = min(1.0, p[x] / q[x])
        residual = np.maximum(p - q, 0)
        residual /= max(residual.sum(), 1e-30)
        followed = [(x, accepted, drafts[1:])]
        followed += [(y, (1 - accepted) * residual[y], []) for y in range(V)]
    found: dict[tuple[int, ...], float] = {}
    for y, weight, rest in followed:
        if weight > 0:
            for text, probability in law(y, rest, rows[1:], num_tokens - 1).items():
                text = (y, *text)
                found[text] = found.get(text, 0.0) + weight * probability
    return found


def laws(drafter: Any, texts: list[list[int]]) -> tuple[list[float], np.ndarray]:
    """How far the law of three tokens is from the target's, by text; and the drafts.

    All that the head may draft is drafted, each by a request of its own, in one batch.
    """
    sampled = [*itertools.product(range(V), repeat=K)]
    prompts = [text for text in texts for _ in sampled]
    forced = jnp.asarray(sampled * len(texts), jnp.int32)
    size = len(prompts)
    token_ids = np.zeros((size, 16), np.int32)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)
    context = tiny.context(token_ids, lengths, TEMPERATURE, k=K)
    params = None, forced
    store = drafter.init_store(params, size, config)

    @jax.jit
    def drafted() -> tuple[jax.Array, Any]:
        proposal, _ = drafter.propose(params, context, drafter.init_cache(size, 16), store)
        drafts = sd.Drafts.from_dense(proposal.token_ids)
        attached = proposal.store.attach(drafts, positions=lengths, sampling=context.sampling)
        return proposal.token_ids, attached.distribution

    ids, read = jax.device_get(drafted())
    scaled = read.logits / TEMPERATURE - (read.row_max / TEMPERATURE + read.log_normalizer)[:, None]
    q = np.exp(scaled)[read.rows.reshape(size, K)]
    distances = []
    for i, text in enumerate(texts):
        found: dict[tuple[int, ...], float] = {}
        for b in range(i * len(sampled), (i + 1) * len(sampled)):
            chance = DRAFT[text[-1], forced[b, 0]] * DRAFT[forced[b, 0], forced[b, 1]]
            own = [int(x) for x in ids[b][: np.cumprod(ids[b] >= 0).sum()]]
            rows = [q[b, j] if read.valid[b] else np.eye(V)[x] for j, x in enumerate(own)]
            for tokens, probability in law(text[-1], own, rows, 3).items():
                found[tokens] = found.get(tokens, 0.0) + float(chance) * probability
        wanted = law(text[-1], [], [], 3)
        distances.append(max(abs(found.get(x, 0.0) - p) for x, p in wanted.items()))
    return distances, ids.reshape(len(texts), len(sampled), K)


def test_the_law_of_one_or_the_other_is_the_targets() -> None:
    distances, ids = laws(lm.FirstOf(LOOKUP, Forced()), [COPIES, BRIEF, NEW])
    assert max(distances) < 1e-6
    sampled = [*itertools.product(range(V), repeat=K)]
    assert (ids[0] == [2, 0]).all()  # by lookup
    assert ids[1].tolist() == ids[2].tolist() == [list(x) for x in sampled]  # by the head


class Sideways(Forced):
    """Its cache holds the requests along the second axis."""

    @property
    def serves(self) -> lm.DrafterServes:
        return lm.DrafterServes(batch_axis=1)

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return jnp.zeros((2, batch_size))


def test_requests_are_along_the_axis_of_the_heads_cache() -> None:
    drafter = lm.FirstOf(LOOKUP, Sideways())
    assert {x.shape[:2] for x in jax.tree.leaves(drafter.init_cache(5, 8)[1])} == {(1, 5)}
    distances, ids = laws(drafter, [COPIES])
    assert max(distances) < 1e-6 and (ids[0] == [2, 0]).all()


def test_of_a_request_that_does_not_run_nothing_is_known() -> None:
    """Between two chunks of a prompt, whose next tokens are no accepted drafts."""
    _, memory = lm.FirstOf(LOOKUP, Forced()).init_cache(2, 16)
    two = jnp.full((2, K), 0.5)
    found = Lookup(jnp.zeros((2, K), jnp.int32), two, two[:, 0])
    for length in (5, 8):
        ids, lengths = jnp.zeros((2, 16), jnp.int32), jnp.full((2,), length, jnp.int32)
        context = tiny.context(ids, lengths, 0.0, k=K, active=jnp.array([True, False]))
        drafts = found.token_ids, jnp.array([False, False])
        memory = memory.after(context).with_drafts(context, found, *drafts)
    assert memory.length.tolist() == [8, 0]
    assert memory.lookup[0].all() and memory.head[0].all()
    assert not any(x[1].any() for x in jax.tree.leaves(memory))


@pytest.mark.parametrize("is_lookup", [False, True])
def test_what_is_learned_is_what_the_text_shows(is_lookup: bool) -> None:
    """Whoever made the drafts that were verified, after two drafts of the lookup or of the head."""
    drafts = [1, 2]
    # [accepted, verified] of the head, and [right, expected] of the lookup, which expected 0.5 of
    # its first draft and 0.9 of both
    learned = {
        (3,): ([0, 1], [0, 0.9]),
        (1,): ([1, 1], [1, 0.5]),  # nothing was verified
        (1, 3): ([1, 2], [1, 0.9]),
        (1, 2, 0): ([2, 2], [2, 0.9]),
        (1, 2, 0, 1, 3): ([2, 2], [2, 0.9]),  # of another drafter, which had more
        (0, 1, 2, 0, 3): ([0, 1], [0, 0.9]),  # and of one that had others
    }
    size = len(learned)
    _, memory = lm.FirstOf(LOOKUP, Forced()).init_cache(size, 8)
    token_ids = np.zeros((size, 8), np.int32)
    for row, new in zip(token_ids, learned, strict=True):
        row[2 : 2 + len(new)] = new
    token_ids = jnp.asarray(token_ids)
    ids = jnp.tile(jnp.asarray(drafts, jnp.int32), (size, 1))
    found = Lookup(ids, jnp.tile(jnp.asarray([0.5, 0.4]), (size, 1)), jnp.full(size, 0.9))
    before = tiny.context(token_ids, jnp.full(size, 2, jnp.int32), 0.0, k=K)
    memory = memory.with_drafts(before, found, ids, jnp.full(size, is_lookup))
    lengths = jnp.asarray([2 + len(new) for new in learned], jnp.int32)
    memory = memory.after(tiny.context(token_ids, lengths, 0.0, k=K))
    wanted = np.array([new[is_lookup] for new in learned.values()])
    np.testing.assert_allclose(memory.lookup if is_lookup else memory.head, wanted)


@pytest.mark.parametrize("fault", ["rows that stay valid", "a look at the drafts"])
def test_a_wrong_choice_changes_the_law(fault: str, monkeypatch) -> None:
    if fault == "rows that stay valid":
        monkeypatch.setattr(sd.DraftStore, "evict", lambda self, slots: self)
        wrong: Any = lm.FirstOf(LOOKUP, Forced())
    else:

        class Peeking(lm.FirstOf):
            def propose(self, params: Any, context: Any, *rest: Any) -> Any:
                proposal, cache = super().propose(params, context, *rest)
                drafts = params[1]  # of the head: those that begin with 1 are never given up
                is_kept = (drafts[:, 0] == 1)[:, None]
                store = self.head.propose(drafts, context, (), rest[1])[0].store
                positions = jnp.where(is_kept.T, store.positions, proposal.store.positions)
                store = dataclasses.replace(store, positions=positions)
                return lm.Proposal(jnp.where(is_kept, drafts, proposal.token_ids), store), cache

        wrong = Peeking(LOOKUP, Forced())
    distances, _ = laws(wrong, [COPIES, NEW])
    assert distances[0] > 0.01
    assert distances[1] < 1e-6  # where the head drafts, nothing is wrong


# Through the loops


@pytest.mark.long
def test_sampled_texts_have_the_targets_distribution() -> None:
    drafter = lm.FirstOf(LOOKUP, lm.ModelDrafter(tiny.Trigram(test_lossless.VOCAB)))
    output = test_lossless.sampled(drafter, (None, test_lossless.draft_table()))
    test_lossless.assert_some_accepted(output)
    test_lossless.assert_lossless(output)


def tokens_per_pass(drafter: Any, draft_params: Any, target: np.ndarray, budget: int) -> float:
    config = sd.SpecDecodeConfig(num_speculative_tokens=4)
    output = lm.generate(
        tiny.Trigram(engines.VOCAB),
        jnp.asarray(target),
        [[1, 4, 0, 1]],
        drafter=drafter,
        draft_params=draft_params,
        config=config,
        max_new_tokens=budget,
    )
    request = dict(prompt=[1, 4, 0, 1], max_new_tokens=budget)
    assert output.completions == [engines.greedy_truth(request, target)]
    return budget / len(output.steps.num_kept)


@pytest.mark.slow
@pytest.mark.parametrize("is_right", [False, True])
def test_who_was_right_before_drafts(is_right: bool) -> None:
    """A text that comes to repeat itself, with a head that is always right, or never."""
    model, budget = tiny.Trigram(engines.VOCAB), 80
    head = lm.ModelDrafter(model)
    params = jnp.asarray(engines.TARGET if is_right else -engines.TARGET)
    by_head = tokens_per_pass(head, params, engines.TARGET, budget)
    by_lookup = tokens_per_pass(LOOKUP, None, engines.TARGET, budget)
    by_both = tokens_per_pass(lm.FirstOf(LOOKUP, head), (None, params), engines.TARGET, budget)
    assert by_both >= 0.98 * max(by_head, by_lookup)
    assert (by_head > by_lookup) == is_right


MODEL = lm.ModelDrafter(tiny.Trigram(V))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lm.FirstOf(lm.NGramDrafter(), MODEL), TypeError, "lookup must be a SuffixDrafter"),
        (lambda: lm.FirstOf(LOOKUP, tiny.Trigram(V)), TypeError, "head must be a Drafter"),
        (
            lambda: plain_text(lm.FirstOf(LOOKUP, MODEL), None),
            ValueError,
            "must be a pair, the par",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def plain_text(drafter: Any, draft_params: Any) -> lm.GenerateOutput:
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)
    model, params = tiny.Trigram(V), jnp.zeros((V, V, V))
    given: dict[str, Any] = dict(drafter=drafter, draft_params=draft_params, config=config)
    return lm.generate(model, params, [[1]], max_new_tokens=2, **given)
