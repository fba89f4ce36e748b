"""What block heads draft: in a loop against one pass, and the exact law of drafts and of text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import reference_block, reference_llama
from models.weights import random_weights, sizes, with_fields
from serving.chi_square import CONTROL, assert_distributed, p_value
from upper_floor import drafting_draw

import jax_specdec as sd
from jax_specdec import lm

from . import loops, test_plan
from .loops import CONFIG, PARAMS, SIZES, TARGET, VOCAB, K

pytestmark = pytest.mark.newest

IDS = [7, 2, 9, 4, 0]
LAYERS = (0, 1, 2)
HEAD = lm.BlockHead(
    lm.BlockHeadConfig.of_target(
        SIZES,
        layers=with_fields(SIZES, qk_norm=True, windows=(5, None)).layers,
        draft_vocab_size=len(IDS),
        aux_hidden_state_layers=LAYERS,
        own_lm_head=True,
        block_size=5,  # more than K: the whole block is run
        mask_token_id=VOCAB - 1,
        sample_from_anchor=True,
        markov_rank=3,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
)
HEAD_PARAMS = random_weights(HEAD, 1, moved=0.1) | {
    "embed_tokens": PARAMS["embed_tokens"],
    "target_ids": jnp.asarray(np.array(IDS, np.int32)),
}
DRAFTER = lm.BlockDrafter(HEAD)
LOOP = loops.Loop(DRAFTER, HEAD_PARAMS)


def one_pass(text: np.ndarray, length: int, drafts: np.ndarray) -> np.ndarray:
    """Rows that drafts are drawn from, in NumPy."""
    ids = text[: length - 1].tolist()
    streams = reference_llama.streams(SIZES, PARAMS, ids)
    features = np.concatenate([streams[layer] for layer in LAYERS], axis=1)
    logits, _ = reference_block.forward(HEAD.config, HEAD_PARAMS, features, text[length - 1])
    before = [text[length - 1], *drafts]
    biases = [reference_block.bias(HEAD.config, HEAD_PARAMS, x) for x in before[:K]]
    return logits[:K] + biases


@pytest.mark.long
def test_drafts_are_those_of_one_pass_over_the_text() -> None:
    loops.check(LOOP, one_pass, IDS, plain_step=4)


@pytest.mark.long
def test_nothing_reaches_the_next_request_of_a_slot() -> None:
    loops.check_next_request(LOOP)
    loops.check_between_chunks(LOOP)


def test_the_cache_has_room_for_a_block_after_the_last_token() -> None:
    keys, _ = DRAFTER.init_cache(2, 32)[0]
    assert keys.shape[2] == 32 + 5


# The law of drafts

SIZE = 4
TINY = sizes(SIZE, 8, 12, 1, (2, 1, 4), qk_norm=True, rope_theta=2.0)
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "DFlash": ({"window": 10}, None),
    "DSpark": ({"sample_from_anchor": True, "markov_rank": 3}, None),
    "candidates": ({"sample_from_anchor": True, "markov_rank": 3}, 2),
    "map": ({"markov_rank": 3, "draft_vocab_size": 3, "own_lm_head": True}, None),
    "map and candidates": ({"markov_rank": 3, "draft_vocab_size": 3, "own_lm_head": True}, 2),
}
MAP = [3, 0, 2]
REQUESTS, TEMPERATURE = 8192, 1.3
FEATURES = np.random.default_rng(7).normal(size=(2, 16)).astype(np.float32)
Paths = dict[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What many requests with the same text drafted.

    Attributes:
      params: of the head.
      head: which.
      num_candidates: of the drafter.
      drafts: ``[B, K]``.
      rows: q of each prefix of drafts, ``[V]`` float64, as it was stored.
    """

    params: Any
    head: lm.BlockHead
    num_candidates: int | None
    drafts: np.ndarray
    rows: Paths

    @functools.cached_property
    def block(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits and states of NumPy."""
        return reference_block.forward(self.head.config, self.params, FEATURES, 1)

    def q(self, prefix: tuple[int, ...], row: int, before: int) -> np.ndarray:
        """q by formula, ``[V]`` float64: of a row of the block, and a token before it."""
        c = self.head.config
        logits, ids = self.block[0][row].copy(), MAP if c.draft_vocab_size < SIZE else range(SIZE)
        if self.num_candidates is not None:
            logits[np.argsort(-logits)[self.num_candidates :]] = -np.inf
        logits = (logits + reference_block.bias(c, self.params, before)) / TEMPERATURE
        found = np.zeros(SIZE)
        found[list(ids)] = np.exp(logits - logits.max())
        return found / found.sum()

    def law(self, **fault: Any) -> Paths:
        """q of every prefix; `shift` takes another row, `wrong` another token before."""
        shift, wrong, found = fault.get("shift", 0), fault.get("wrong", 0), {}
        for size in range(K):
            for prefix in itertools.product(range(SIZE), repeat=size):
                before = [1, 1, 1, *prefix][-1 - wrong]
                found[prefix] = self.q(prefix, (size + shift) % K, before)
        return found


@functools.cache
def head_of(kind: str) -> tuple[lm.BlockHead, Any, int | None]:
    """A head, its weights, and how many candidates its drafter has."""
    changes, num_candidates = KINDS[kind]
    plain = lm.BlockHeadConfig.of_target(
        TINY,
        TINY.layers,
        aux_hidden_state_layers=(0, 1),
        block_size=4,
        mask_token_id=3,
        enable_confidence_head=True,
    )
    with_markov = "markov_rank" in changes
    head = lm.BlockHead(with_fields(plain, confidence_head_with_markov=with_markov, **changes))
    # Rows that differ, none of them sharp.
    params = random_weights(head, 3, 2.0)
    scales = {"embed_tokens": 0.1, "lm_head": 0.3, "markov_w2": 0.5}
    params |= {name: scale * params[name] for name, scale in scales.items() if name in params}
    (layer,) = params["layers"]
    layer |= {name: 4 * layer[name] for name in ("q_norm", "k_norm")}
    if "target_ids" in params:
        params["target_ids"] = jnp.array(MAP, jnp.int32)
    return head, params, num_candidates


@functools.cache
def draw(kind: str) -> Drawn:
    head, params, num_candidates = head_of(kind)
    drafter = lm.BlockDrafter(head, num_candidates=num_candidates)
    context = lm.DraftContext(
        token_ids=jnp.tile(jnp.array([[2, 0, 1, 0, 0, 0, 0]], jnp.int32), (REQUESTS, 1)),
        lengths=jnp.full((REQUESTS,), 3, jnp.int32),
        sampling=sd.SamplingParams(jnp.full((REQUESTS,), TEMPERATURE)),
        keys=jax.random.split(jax.random.key(5), REQUESTS),
        config=CONFIG,
        features=jnp.asarray(np.tile(FEATURES[None, 1:], (REQUESTS, 1, 1))),
        num_features=jnp.ones((REQUESTS,), jnp.int32),
    )

    @jax.jit
    def propose(params: Any) -> lm.Proposal:
        cache = drafter.init_cache(REQUESTS, 7)
        first = jnp.asarray(np.tile(FEATURES[None, :1], (REQUESTS, 1, 1)))
        rows = lm.models.Rows(context.token_ids[:, :1], jnp.zeros(REQUESTS, jnp.int32))
        cache = drafter.prefill(params, rows, cache, first)
        store = drafter.init_store(params, REQUESTS, CONFIG)
        return drafter.propose(params, context, cache, store)[0]

    proposal = jax.device_get(propose(params))
    store, drafts = proposal.store, proposal.token_ids
    logits = np.asarray(store.logits, np.float64).reshape(K, REQUESTS, -1) / TEMPERATURE
    width, rows = logits.shape[2], {}
    for j, b in itertools.product(range(K), range(REQUESTS)):
        prefix = tuple(drafts[b, :j].tolist())
        if prefix in rows:
            continue
        ids = np.arange(SIZE)[:width]
        if store.ids is not None:
            of_slots = store.ids.ndim > 1
            ids = store.ids.reshape(K, REQUESTS, width)[j, b] if of_slots else store.ids
        found = np.zeros(SIZE)
        found[ids] = np.exp(logits[j, b] - logits[j, b].max())
        rows[prefix] = found / found.sum()
    return Drawn(params, head, num_candidates, drafts, rows)


def chances(law: Paths) -> np.ndarray:
    """The probability of all K drafts, ``[V] * K``."""
    found = np.zeros((SIZE,) * K)
    for path in np.ndindex(*found.shape):
        found[path] = np.prod([law[path[:j]][path[j]] for j in range(K)])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["DSpark", pytest.param("map and candidates", marks=pytest.mark.slow)]
)
def test_drafts_are_drawn_from_what_is_stored_and_that_is_the_formula(kind: str) -> None:
    drawn = draw(kind)
    law = drawn.law()
    for prefix, row in drawn.rows.items():
        np.testing.assert_allclose(row, law[prefix], rtol=1e-4, atol=1e-6)
    counts = np.zeros((SIZE,) * K, int)
    np.add.at(counts, tuple(drawn.drafts.T), 1)
    assert_distributed(counts, chances(law), kind)
    if kind != "DFlash":  # its rows do not depend on drafts
        assert p_value(counts, chances(drawn.law(wrong=1))) < CONTROL
    assert p_value(counts, chances(drawn.law(shift=1))) < CONTROL


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param("standard", "all ids", marks=pytest.mark.slow),
        ("standard", "a map"),
        ("agreement", "candidates"),
    ],
)
def test_drafts_at_once_are_those_one_after_another(method: str, kind: str) -> None:
    rng, (batch, size) = np.random.default_rng(4), (5, 6)
    logits = jnp.asarray(rng.normal(size=(batch, K, size)), jnp.float32)
    ids = {"all ids": None, "a map": jnp.array([7, 1, 3, 8, 2, 0], jnp.int32)}.get(kind)
    if kind == "candidates":
        ids = jnp.asarray(rng.permuted(np.tile(np.arange(9), (batch, K, 1)), axis=2)[..., :size])
        ids = ids.astype(jnp.int32)
    config = dataclasses.replace(CONFIG, rejection_sample_method=method)
    context = lm.DraftContext(
        token_ids=jnp.zeros((batch, 8), jnp.int32),
        lengths=jnp.arange(1, batch + 1, dtype=jnp.int32),
        sampling=sd.SamplingParams(
            jnp.array([0.0, 0.5, 1.0, 1.0, 2.0]), top_k=jnp.array([0, 3, 0, 2, 5], jnp.int32)
        ),
        keys=jax.random.split(jax.random.key(8), batch),
        config=config,
    )
    store = None
    if config.keeps_draft_distribution:
        listed, own = (ids, False) if kind == "a map" else (None, kind == "candidates")
        store = sd.DraftStore.create(batch, K, size, ids=listed, own_ids=own)

    columns = drafting_draw.ids_of(ids, 9)

    @jax.jit
    def one_after_another(logits: jax.Array) -> lm.Proposal:
        def forward(carry: Any, last: jax.Array, offset: Any) -> Any:
            return drafting_draw.Row(logits[:, offset], columns.of_draft(offset)), carry

        first, _ = forward((), context.lengths, 0)
        return drafting_draw.draft_chain(first, (), forward, context, store)[0]

    found = drafting_draw.draft_at_once(logits, context, store, columns)
    wanted = one_after_another(logits)
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-6), found, wanted)
    assert len(np.unique(found.token_ids)) > 3


# The law of text


def target_law() -> Paths:
    """p of every prefix of K tokens."""
    rng = np.random.default_rng(9)
    every = [x for n in range(K + 1) for x in itertools.product(range(SIZE), repeat=n)]
    return {x: rng.dirichlet(np.ones(SIZE)) for x in every}


def distance(p: Paths, drawn_from: Paths, verified: Paths, counts: Paths) -> float:
    """Total variation between the law of K + 1 emitted tokens and the target's."""
    total: Any = 0.0
    for path in itertools.product(range(SIZE), repeat=K):
        chance = np.prod([drawn_from[path[:j]][path[j]] for j in range(K)])
        if chance > 0:
            total = total + chance * test_plan.speculative(p, verified, path, counts[path])
    return 0.5 * float(np.abs(total - test_plan.plain(p, (), K + 1)).sum())


ALL = {path: K for path in itertools.product(range(SIZE), repeat=K)}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [x if x == "candidates" else pytest.param(x, marks=pytest.mark.slow) for x in KINDS],
)
def test_text_has_exactly_the_targets_law(kind: str) -> None:
    drawn, p = draw(kind), target_law()
    law = drawn.law()
    stored = {prefix: drawn.rows.get(prefix, row) for prefix, row in law.items()}
    assert distance(p, law, stored, ALL) < 1e-5
    assert distance(p, law, drawn.law(shift=1), ALL) > 0.02
    if kind != "DFlash":
        assert distance(p, law, drawn.law(wrong=1), ALL) > 0.02


# Mistakes


def generate(k: int) -> Any:
    config = sd.SpecDecodeConfig(num_speculative_tokens=k)
    given: Any = dict(drafter=DRAFTER, draft_params=HEAD_PARAMS, config=config)
    return lm.generate(TARGET, PARAMS, [[1]], **given)


def test_more_drafts_than_a_block_has_are_refused() -> None:
    with pytest.raises(ValueError, match="^num_speculative_tokens must be at most 5, the drafts"):
        generate(6)
