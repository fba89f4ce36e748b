"""Trees of drafts, verified by the walk of the agreement rule."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import assume
from serving.chi_square import CONTROL, assert_distributed, p_value, tally

import jax_specdec as sd
from jax_specdec.testing import reference

pytestmark = pytest.mark.long

B, K, VOCAB, SIZE = 8, 11, 2100, 2090
LIKELY = np.array([3, 7, 2050, 2061])
"""Ids of two tiles that have nearly all of the mass."""

CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")
NAN_TOKEN, BAD = 5, (1, 2, 6)
"""A token after which rows are NaN; requests that no verification takes."""


@dataclasses.dataclass
class Trees:
    """A batch as `rejection_sample` takes it, and what every call of it is given."""

    logits: np.ndarray
    drafts: sd.Drafts
    noise: sd.testing.RaceNoise
    given: dict[str, Any]
    filters: dict[str, Any]
    temperature: np.ndarray

    def verify(self, by: Any = None, **changed: Any) -> sd.RejectionSampleOutput:
        sampling = sd.SamplingParams(self.temperature, **self.filters)
        arrays = dict(logits=self.logits, drafts=self.drafts, noise=self.noise) | changed
        return (by or jitted)(**arrays, sampling=sampling, **self.given)

    def oracle(self) -> reference.ReferenceOutput:
        return reference.rejection_sample(
            self.logits,
            self.drafts,
            self.noise,
            temperature=self.temperature,
            **self.filters,
            method="agreement",
            num_speculative_tokens=K,
            vocab_size=SIZE,
            **self.given,
        )


@jax.jit
def jitted(logits, drafts, noise, **given) -> sd.RejectionSampleOutput:
    return sd.testing.rejection_sample_with_noise(
        logits, drafts, noise, config=CONFIG, vocab_size=SIZE, **given
    )


def random_tree(rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
    """Parents and ids; siblings differ, one node in six proposes nothing."""
    parents: list[int] = []
    ids: list[int] = []
    while len(ids) < count:
        parent = int(rng.integers(max(0, len(ids) - 4), len(ids) + 1))
        left = {*LIKELY.tolist(), NAN_TOKEN, SIZE} - {
            x for p, x in zip(parents, ids, strict=True) if p == parent
        }
        parents.append(parent)
        ids.append(int(rng.choice([*left])) if left and rng.random() < 9 / 10 else -1)
    return parents, ids


def random_trees(seed: int, is_dense: bool = False) -> Trees:
    """Trees of any sizes and padding after them, or K drafts for each request: one program."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(K if is_dense else 0, K + 1, B)
    counts[[*BAD]] = K
    trees = [random_tree(rng, count) for count in counts]
    trees[1] = ([0, 2, *range(2, K)], [3] * K)  # after a node that does not precede it
    trees[2] = ([0, 0, *range(1, K - 1)], [7, 7, *trees[2][1][2:]])  # equal siblings
    trees[6] = ([-1, *range(1, K)], [3] * K)
    spare = B * K - counts.sum()
    parents = np.concatenate([np.int32(p) for p, _ in trees] + [np.full(spare, -7, np.int32)])
    ids = np.concatenate([np.int32(x) for _, x in trees] + [np.full(spare, 9, np.int32)])
    drafts = sd.Drafts.from_flat(ids.astype(np.int32), counts, parents=parents.astype(np.int32))
    logits = rng.normal(0, 0.5, (len(ids) + B, VOCAB)).astype(np.float32)
    logits[:, LIKELY] += rng.normal(10, 3, (len(logits), 4))
    logits[:, SIZE:] = 50
    # Rows after a certain token are bad: only those who take it notice.
    first = np.asarray(drafts.cu_num_draft_tokens)[:-1] + np.arange(B)
    for row, (_, own) in zip(first, trees, strict=True):
        logits[[row + 1 + i for i, x in enumerate(own) if x == NAN_TOKEN]] = np.nan
    words = rng.integers(0, 2**32, (len(logits), -(-VOCAB // 32)), np.uint64).astype(np.uint32)
    for x in (*LIKELY, NAN_TOKEN):
        words[:, x // 32] |= np.uint32(1 << x % 32)
    keys = jax.random.split(jax.random.key(seed), B)
    at = rng.integers(0, 50, B)[:, None] + np.arange(K + 1)
    exponential = sd.testing.token_exponentials(keys[:, None], jnp.int32(at), VOCAB)
    temperature = rng.choice([0, 0.5, 1, 1.5], B).astype(np.float32)
    return Trees(
        logits,
        drafts,
        sd.testing.RaceNoise(np.zeros((B, K), np.float32), np.asarray(exponential)),
        dict(token_bitmask=words, active=np.arange(B) != 4),
        dict(
            min_p=rng.choice([0, 0.01], B).astype(np.float32),
            top_k=rng.choice([0, 3], B).astype(np.int32),
            top_p=rng.choice([1, 0.9], B).astype(np.float32),
        ),
        temperature,
    )


@functools.cache
def with_oracle(seed: int) -> tuple[Trees, reference.ReferenceOutput]:
    """Half of the requests get, four times, a child that the target draws where their path ends."""
    batch = random_trees(seed)
    for _ in range(4):
        batch.drafts = with_own_tokens(batch.drafts, batch.oracle())
    return batch, batch.oracle()


def with_own_tokens(drafts: sd.Drafts, found: reference.ReferenceOutput) -> sd.Drafts:
    """The drafts, where a child of the last node is the token drawn there, if it has children."""
    ids, cu = np.array(drafts.token_ids), np.asarray(drafts.cu_num_draft_tokens)
    for b in np.flatnonzero(found.num_emitted)[::2]:
        last = found.num_accepted[b]
        own = slice(cu[b], cu[b + 1])
        children = np.flatnonzero(np.asarray(drafts.parents)[own] == found.path[b, last])
        if children.size:
            ids[cu[b] + children[0]] = found.token_ids[b, last]
    return dataclasses.replace(drafts, token_ids=jnp.asarray(ids))


@pytest.mark.parametrize(
    "platform", ["cpu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cuda", "tpu"))]
)
def test_gives_the_tokens_and_the_path_of_the_oracle(platform):
    depths = []
    for seed in range(24):
        batch, want = with_oracle(seed)
        with assume(platform):
            found = jax.tree.map(np.asarray, batch.verify())
        close = want.margin < 1e-5
        for name in ("token_ids", "num_accepted", "num_emitted", "status", "path"):
            one, other = getattr(found, name)[~close], getattr(want, name)[~close]
            np.testing.assert_array_equal(one, other, err_msg=f"{name}, seed {seed}")
        assert set(want.status[[*BAD]]) == {sd.Status.BAD_INPUT}
        depths += want.num_accepted.tolist()
    # Paths of several drafts, and ends by a bad row, do occur.
    assert sum(x >= 3 for x in depths) > 5, np.bincount(depths)


@pytest.mark.parametrize(
    "platform", ["cpu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cuda", "tpu"))]
)
def test_greedy_trees_need_no_temperatures(platform):
    accepted = []
    for seed in range(6):
        batch, _ = with_oracle(seed)
        batch = dataclasses.replace(batch, temperature=np.zeros_like(batch.temperature))
        batch.drafts = with_own_tokens(batch.drafts, batch.oracle())
        none = dataclasses.replace(batch, temperature=None)
        with assume(platform):
            found = jax.tree.map(np.asarray, none.verify())
        want = batch.oracle()
        for name in ("token_ids", "num_accepted", "num_emitted", "status", "path"):
            np.testing.assert_array_equal(getattr(found, name), getattr(want, name), err_msg=name)
        accepted += want.num_accepted.tolist()
    assert sum(x >= 1 for x in accepted) > 5


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_chain_with_parents_is_the_chain_to_the_last_bit(platform):
    rng = np.random.default_rng(0)
    for seed in range(6):
        batch = random_trees(seed)
        counts = np.diff(np.asarray(batch.drafts.cu_num_draft_tokens))
        n = len(batch.drafts.token_ids)
        parents = np.zeros(n, np.int32)
        parents[: counts.sum()] = np.concatenate([np.arange(x) for x in counts])
        ids = rng.choice(LIKELY, n).astype(np.int32)
        chain = sd.Drafts(jnp.asarray(ids), batch.drafts.cu_num_draft_tokens)
        tree = dataclasses.replace(chain, parents=jnp.asarray(parents))
        with assume(platform):
            want, found = batch.verify(drafts=chain), batch.verify(drafts=tree)
        index = np.arange(K + 1)[None, :]
        path = np.where(index < np.asarray(want.num_emitted)[:, None], index, -1)
        chex.assert_trees_all_equal(found, dataclasses.replace(want, path=jnp.int32(path)))


@pytest.mark.slow
def test_rows_that_are_not_visited_do_not_matter():
    for seed in range(6):
        batch = random_trees(seed)
        want = batch.verify()
        cu, path = np.asarray(batch.drafts.cu_num_draft_tokens), np.asarray(want.path)
        kept = np.concatenate([cu[b] + b + path[b][path[b] >= 0] for b in range(B)])
        ended = np.asarray(want.status) == sd.Status.BAD_TARGET_ROW
        kept = np.append(kept, [x for b in np.flatnonzero(ended) for x in cu[b] + b + np.arange(K)])
        logits = np.full_like(batch.logits, np.nan)
        logits[kept[kept < len(logits)].astype(int)] = batch.logits[
            kept[kept < len(logits)].astype(int)
        ]
        chex.assert_trees_all_equal(batch.verify(logits=logits), want)


@pytest.mark.slow
@pytest.mark.newest
def test_a_mesh_changes_nothing():
    """The vocabulary in two parts, the requests in two."""
    mesh = jax.make_mesh((2, 2), ("b", "v"), devices=jax.devices("cpu")[:4])
    split = sd.VerifySharding(mesh, vocab_axis="v", batch_axis="b")
    over_mesh = jax.jit(functools.partial(jitted.__wrapped__, sharding=split))
    for seed in range(3):
        batch = random_trees(seed, is_dense=True)
        found, wanted = batch.verify(over_mesh), batch.verify()
        chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(wanted))


# Losslessness


TOY = 3
"""Vocabulary of a toy whose next token depends on the last two."""
DEPTH = 2
TOY_P = np.random.default_rng(3).dirichlet(np.ones(TOY), (TOY + 1, TOY + 1)).astype(np.float32)


def toy_row(text: tuple[int, ...]) -> np.ndarray:
    return np.log(TOY_P[tuple(([TOY, TOY, *text])[-2:])])


def toy_own(text: tuple[int, ...], exponential: np.ndarray) -> int:
    """The token that plain decoding draws: a race of all ids, for there is one tile."""
    return int(np.argmax(np.exp(toy_row(text)) / exponential))


def plain_text(noise: np.ndarray) -> tuple[int, ...]:
    text: tuple[int, ...] = ()
    for exponential in noise:
        text += (toy_own(text, exponential),)
    return text


TREES = [
    # Parents and ids: nothing, a chain, siblings, all of two levels, deep and wide, a hole.
    ([0, 0, 0, 0], [-1, -1, -1, -1]),
    ([0, 1, 2, 3], [1, 0, 2, 2]),
    ([0, 0, 0, 1], [2, 0, 1, 1]),
    ([0, 0, 1, 1], [0, 2, 1, 0]),
    ([0, 1, 1, 0], [1, 2, 0, 2]),
    ([0, 1, 0, 3], [-1, 0, 2, 1]),
]


def peeking(text: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Trees that were chosen by what will be drawn: all of it, or anything else."""
    x, y, *_ = text
    return [
        ([0, 1, 2, 0], [x, y, text[2], (x + 1) % TOY]),
        ([0, 0, 1, 3], [(x + 1) % TOY, (x + 2) % TOY, y, y]),
    ]


@functools.cache
def toy_verify():
    config = sd.SpecDecodeConfig(num_speculative_tokens=4, rejection_sample_method="agreement")

    def verify(logits, ids, parents, exponential):
        noise = sd.testing.RaceNoise(jnp.zeros((len(ids), 4)), exponential)
        drafts = sd.Drafts.from_dense(ids, parents=parents)
        one = sd.SamplingParams(jnp.ones(len(ids)))
        return sd.testing.rejection_sample_with_noise(
            logits.reshape(-1, TOY), drafts, noise, sampling=one, config=config
        )

    return jax.jit(verify)


@functools.cache
def toy_logits(parents: tuple[int, ...], ids: tuple[int, ...]) -> np.ndarray:
    """``[5, V]``, the row of each node."""
    texts: list[tuple[int, ...]] = [()]
    for parent, x in zip(parents, ids, strict=True):
        texts.append((*texts[parent], max(x, 0)))
    return np.stack([toy_row(text) for text in texts])


def toy_rows(trees: list[tuple[list[int], list[int]]]) -> np.ndarray:
    return np.stack([toy_logits(tuple(parents), tuple(ids)) for parents, ids in trees])


@pytest.mark.slow
@pytest.mark.newest  # 125,000 requests at once take JAX 0.10.2 minutes, the newest three seconds
def test_all_noise_of_a_toy_gives_the_text_of_plain_decoding():
    """Every tree, those that read the noise too, over a grid of the noise of three tokens."""
    of_token = [np.float32(x) for x in itertools.product((0.1, 0.7, 2.0), repeat=TOY)]
    seen: dict[bytes, np.ndarray] = {}  # rows that race alike, up to a factor, are one
    for x in of_token:
        seen.setdefault((x / x.min()).tobytes(), x)
    noises = [np.array(x) for x in itertools.product(seen.values(), repeat=3)]
    assert len(noises) == 25**3
    texts = [plain_text(noise) for noise in noises]
    cases = [
        (noise, text, tree)
        for noise, text in zip(noises, texts, strict=True)
        for tree in [*TREES, *peeking(text)]
    ]
    given = np.stack([noise for noise, *_ in cases])
    output = toy_verify()(
        toy_rows([tree for *_, tree in cases]),
        np.array([ids for *_, (_, ids) in cases], np.int32),
        np.array([parents for *_, (parents, _) in cases], np.int32),
        np.pad(given, ((0, 0), (0, 2), (1, 0)), constant_values=1),  # a tile, and K = 4
    )
    emitted = np.asarray(output.num_emitted)[:, None]
    found, want = np.asarray(output.token_ids)[:, :3], np.array([text for _, text, _ in cases])
    is_emitted = np.arange(3)[None, :] < emitted
    np.testing.assert_array_equal(found[is_emitted], want[is_emitted])
    assert {*emitted.ravel().tolist()} == {1, 2, 3, 4, 5}


def test_tokens_of_random_trees_are_distributed_as_the_target():
    """Two tokens; the control drops candidates after it has seen what was drawn."""
    count, rng = 60_000, np.random.default_rng(1)
    keys = jax.random.split(jax.random.key(5), count)
    at = jnp.arange(5, dtype=jnp.int32)[None, :]
    exponential = np.asarray(sd.testing.token_exponentials(keys[:, None], at, TOY))
    which = rng.integers(0, len(TREES), count)
    rows = toy_rows(TREES)[which]
    parents, ids = (np.array([tree[i] for tree in TREES], np.int32)[which] for i in (0, 1))

    def tokens(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
        """The first two tokens, the second by plain decoding where the step emitted one."""
        output = toy_verify()(rows, ids, parents, exponential)
        found = np.asarray(output.token_ids)[of, :2].copy()
        later = exponential[of, 1, 1:]
        p = np.stack([TOY_P[TOY, x] for x in range(TOY)])
        second = np.argmax(p[found[:, 0]] / later, axis=1)
        found[:, 1] = np.where(found[:, 1] < 0, second, found[:, 1])
        return found

    everyone = np.arange(count)
    law = TOY_P[TOY, TOY][:, None] * TOY_P[TOY][:TOY]
    assert_distributed(tally(tokens(ids, everyone), TOY), law, "two tokens")
    # A planted fault: a step whose second token is 0 is made again with other noise.
    found = tokens(ids, everyone)
    redrawn = np.where(found[:, 1] == 0, rng.integers(0, TOY, count), found[:, 1])
    faulty = np.stack([found[:, 0], redrawn], axis=1)
    assert p_value(tally(faulty, TOY), law) < CONTROL


# What goes with it


@pytest.mark.long
def test_processors_and_log_probabilities_go_by_the_path():
    """Rows of a tree are those of the chains to its nodes."""
    rng = np.random.default_rng(2)
    parents, ids = [0, 0, 1, 3, 3, 2], [3, 1, 3, 0, 2, 1]
    vocab, k = 6, len(ids)
    config = sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method="agreement")
    logits = rng.normal(0, 2, (k + 1, vocab)).astype(np.float32)
    one = jnp.ones(1)
    processors = sd.LogitsProcessors(
        penalties=sd.Penalties(
            frequency=0.5 * one,
            presence=0.3 * one,
            repetition=1.3 * one,
            counts=jnp.array([[1, 0, 0, 0, 2, 0]]),
            in_prompt=jnp.zeros((1, vocab), bool),
        ),
        bad_words=sd.BadWords(jnp.array([[[3, 3, 0]]]), recent=jnp.array([[5, 4]])),
        min_tokens=sd.MinTokens(jnp.array([[2]]), remaining=jnp.array([2])),
    )
    tree = sd.Drafts.from_dense(np.int32([ids]), parents=np.int32([parents]))
    process = jax.jit(functools.partial(sd.process_logits, config=config))
    found = process(logits, tree, processors)
    lines: list[list[int]] = [[]]
    for node, (parent, x) in enumerate(zip(parents, ids, strict=True), 1):
        lines.append([*lines[parent], x])
        chain = np.full((1, k), -1, np.int32)
        chain[0, : len(lines[node])] = lines[node]
        rows = np.tile(logits[node], (k + 1, 1))
        want = process(rows, sd.Drafts.from_dense(chain), processors)
        np.testing.assert_array_equal(found[node], want[len(lines[node])])

    path = np.full((1, k + 1), -1, np.int32)
    path[0, :4] = [0, 1, 3, 4]
    tokens = np.full((1, k + 1), -1, np.int32)
    tokens[0, :4] = [3, 3, 0, 5]
    count = jnp.array([3], jnp.int32)
    output = sd.RejectionSampleOutput(
        jnp.asarray(tokens), count, count + 1, 0 * count, jnp.asarray(path)
    )
    given: Any = dict(sampling=sd.SamplingParams(one), config=config)
    logprobs = sd.token_logprobs(logits, tree, output, num_top=2, **given)
    want = np.asarray(jax.nn.log_softmax(logits[[0, 1, 3, 4]], axis=1))
    np.testing.assert_allclose(
        logprobs.logprobs[0, :4], want[np.arange(4), tokens[0, :4]], rtol=1e-5
    )
    np.testing.assert_array_equal(logprobs.top_token_ids[0, :4, 0], want.argmax(axis=1))
    with pytest.raises(ValueError, match=r"output\.path must be there if and only if"):
        sd.token_logprobs(logits, tree, dataclasses.replace(output, path=None), **given)


def test_rows_of_trees_are_those_of_the_ancestors():
    rng = np.random.default_rng(4)
    for k in (1, 7, 63):
        parents = np.stack([[rng.integers(0, j + 1) for j in range(k)] for _ in range(5)])
        rows = jax.device_get(jax.jit(sd.TreeRows.of)(np.int32(parents)))
        for own, depth, tree_mask in zip(parents, rows.depth, rows.tree_mask, strict=True):
            lines = [{0}]
            for node, parent in enumerate(own, 1):
                lines.append({*lines[parent], node})
            assert depth.tolist() == [len(line) - 1 for line in lines]
            words = [int(low) | int(high) << 32 for low, high in tree_mask]
            assert words == [sum(1 << node for node in line) for line in lines]


# Refusals


def test_other_rules_and_given_bonus_tokens_are_refused_by_name():
    drafts = sd.Drafts.from_dense(np.int32([[1, 2]]), parents=np.int32([[0, 0]]))
    arrays: Any = dict(
        sampling=sd.SamplingParams(jnp.ones(1)),
        keys=jax.random.split(jax.random.key(0), 1),
        positions=jnp.array([3]),
    )
    for method in ("standard", "block", "synthetic"):
        rates = dict(synthetic_acceptance_rates=(0.5, 0.5)) if method == "synthetic" else {}
        config = sd.SpecDecodeConfig(
            num_speculative_tokens=2, rejection_sample_method=method, **rates
        )
        with pytest.raises(NotImplementedError, match=f"be 'agreement' .* but it is '{method}'"):
            sd.rejection_sample(jnp.zeros((3, 4)), drafts, config=config, **arrays)
    config = sd.SpecDecodeConfig(num_speculative_tokens=2, rejection_sample_method="agreement")
    bonus: Any = dict(bonus_token_ids=jnp.array([1]), config=config)
    with pytest.raises(NotImplementedError, match="bonus_token_ids must be None for drafts with"):
        sd.rejection_sample(jnp.zeros((2, 4)), drafts, **bonus, **arrays)


@pytest.mark.parametrize(
    ("parents", "ids", "message"),
    [
        ([0, 2], [1, 1], r"drafts.parents\[1\] must be a node before it, .* but it is 2"),
        ([-1, 0], [1, 1], r"drafts.parents\[0\] must be a node before it, .* but it is -1"),
        ([0, 0], [1, 1], r"drafts.token_ids\[1\] must differ from its siblings, but it is 1"),
    ],
)
def test_validate_says_what_is_wrong_with_a_tree(parents, ids, message):
    config = sd.SpecDecodeConfig(num_speculative_tokens=2, rejection_sample_method="agreement")
    given: Any = dict(sampling=sd.SamplingParams(jnp.ones(1)), config=config)
    drafts = sd.Drafts.from_dense(np.int32([ids]), parents=np.int32([parents]))
    with pytest.raises(ValueError, match=message):
        sd.testing.validate(jnp.zeros((3, 4)), drafts, **given)
    with pytest.raises(ValueError, match=message):
        keys = jax.random.split(jax.random.key(0), 1)
        sd.rejection_sample(jnp.zeros((3, 4)), drafts, keys=keys, positions=[3], **given)
    sd.testing.validate(
        jnp.zeros((3, 4)), dataclasses.replace(drafts, parents=jnp.array([0, 1])), **given
    )


def test_parents_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"parents must be an array \[N\] = \[2\]"):
        sd.Drafts.from_flat([1, 2], [2], parents=[0])
    with pytest.raises(ValueError, match=r"parents must be an array \[B, K\] = \[1, 2\]"):
        sd.Drafts.from_dense([[1, 2]], parents=[[0]])
    with pytest.raises(ValueError, match="parents must have at most 63 drafts per request"):
        sd.TreeRows.of(jnp.zeros((1, 64), jnp.int32))
    with pytest.raises(TypeError, match=r"parents must be .* int32"):
        sd.TreeRows.of(jnp.zeros((1, 4)))
