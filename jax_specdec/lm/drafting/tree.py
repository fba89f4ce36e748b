"""Growing trees of drafts: candidates level by level, and the best of them as nodes.

Each token has a score, the logarithm of the chance that the target takes it if it has taken the
token's parent; a node's is the sum of those on its path. A tree of the nodes with the best scores
has the most drafts accepted, as far as scores are right.

Under the agreement rule, the target's token at a position is drawn with noise that is known before:
it is the largest ``l(x) + T g(x)`` of the target's logits l, at temperature T, with Gumbel noise g.
A drafter's logits differ from them. With differences like Gumbel noise of scale s, the chance of x
is ``softmax((l + T g) / s)``, with the drafter's own logits in place of l.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.noise import token_exponentials
from jax_specdec._src.base.sampling import SamplingParams, inverse_temperature
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, TILE
from jax_specdec._src.drafts.sample import sample_by_races
from jax_specdec.lm.drafting.drafter import DraftContext, Proposal
from jax_specdec.lm.drafting.draw import Ids, Row

Carry = TypeVar("Carry")
States = TypeVar("States")

WIDTH = 8
"""Nodes of a level that a drafter runs, at most, and children of each that are looked at."""

SPREAD = 1.0
"""Scale of the noise that logits of a drafter and of the target differ by."""

_GROUP = 64
"""Ids that the largest scores of a row are looked for in, group by group."""


class Candidates(NamedTuple):
    """Nodes that a tree may have, level by level: a parent comes before its children.

    Attributes:
      token_ids: ``[B, n]`` int32.
      parents: ``[B, n]`` int32, 0 for the sequence, i for candidate ``i - 1``.
      scores: ``[B, n]`` float32, the logarithm of the chance that the target takes the path to the
        candidate; at most that of its parent. -inf for none.
    """

    token_ids: jax.Array
    parents: jax.Array
    scores: jax.Array


class Children(NamedTuple):
    """The likeliest tokens after each of W nodes of a level, the best first if all have the same.

    Attributes:
      token_ids: ``[B, W, C]`` int32.
      scores: ``[B, W, C]`` float32, the logarithm of the chance of each token, after its parent;
        at most 0. -inf for none.
    """

    token_ids: jax.Array
    scores: jax.Array


class _Level(NamedTuple, Generic[States, Carry]):
    """W nodes of the same depth in the tree of each request, and what they are run with.

    Attributes:
      token_ids: ``[B, W]`` int32.
      scores: ``[B, W]`` float32, of the paths to them.
      numbers: ``[B, W]`` int32, of the nodes among all candidates, as parents have it.
      states: arrays ``[B, W, n]``, which the rows of their parents left.
      carry: what passes take and give, such as a cache.
    """

    token_ids: jax.Array
    scores: jax.Array
    numbers: jax.Array
    states: States
    carry: Carry


def best_nodes(candidates: Candidates, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ids and parents ``[B, K]`` of the K = `num_nodes` best candidates, best first.

    Of equal scores the earlier candidate comes first, so a parent comes before its children. Id -1,
    with parent 0, where there are fewer candidates. A candidate whose score is NaN is none.
    """
    token_ids, parents, scores = candidates
    # `lax.top_k` orders NaN above all numbers, and -0 below 0, though it may be the parent.
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    scores = jnp.where(scores == 0, 0.0, scores)
    # [B, n] -> [B, max(n, K)]
    missing = max(num_nodes - scores.shape[1], 0)
    scores = jnp.pad(scores, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    # [B, K]: the best, and their places; of equal ones the first
    best, place = lax.top_k(scores, num_nodes)
    is_node = best > -jnp.inf
    chosen = jnp.where(is_node, place, -1)
    # [B, K]: the candidate that each node follows, and its number among the nodes
    above = jnp.take_along_axis(parents, place, axis=1, mode="clip") - 1
    is_parent = chosen[:, None, :] == above[:, :, None]  # [B, K, K]
    node = jnp.where(above < 0, 0, jnp.argmax(is_parent, axis=2).astype(jnp.int32) + 1)
    # [B, K]: places past the n candidates, of padding, are clipped, and their ids are not used
    node_ids = jnp.take_along_axis(token_ids, place, axis=1, mode="clip")
    return jnp.where(is_node, node_ids, PLACEHOLDER_TOKEN_ID), jnp.where(is_node, node, 0)


def with_chains(
    token_ids: jax.Array, parents: jax.Array, requests: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the ids and parents of drafts in which the trees of some requests are chains.

    A chain holds the drafts of one path: the first of the tree, the first that follows it, and so
    on; then -1.

    Args:
      token_ids: ``[B, K]`` int32, as in `Proposal`.
      parents: ``[B, K]`` int32, as there.
      requests: ``[B]`` bool.
    """
    k = token_ids.shape[1]
    # [B, K+1, K]: whether draft j follows node i
    node = jnp.arange(k + 1, dtype=jnp.int32)[None, :, None]
    follows = (parents[:, None, :] == node) & (token_ids >= 0)[:, None, :]
    # [B, K+1]: the first node that follows each one; 0, which follows none, if there is none
    first = jnp.where(follows.any(axis=2), jnp.argmax(follows, axis=2).astype(jnp.int32) + 1, 0)

    def step(node: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        # [B]: the node that follows; none after the end of the path, whose node is -1
        following = jnp.take_along_axis(first, node[:, None], axis=1)[:, 0]
        following = jnp.where(node < 0, 0, following)
        place = jnp.maximum(following - 1, 0)
        token = jnp.take_along_axis(token_ids, place[:, None], axis=1)[:, 0]
        token = jnp.where(following > 0, token, PLACEHOLDER_TOKEN_ID)
        return jnp.where(following > 0, following, -1), token

    # [K, B]
    _, path = lax.scan(step, jnp.zeros_like(token_ids[:, 0]), None, length=k)
    chosen = requests[:, None]
    chain = jnp.arange(k, dtype=jnp.int32)[None, :]
    return jnp.where(chosen, path.T, token_ids), jnp.where(chosen, chain, parents)


def draft_tree(
    row: Row,
    states: States,
    carry: Carry,
    forward: Callable[[States, Carry, jax.Array, jax.Array], tuple[Row, States, Carry]],
    context: DraftContext,
    depth: int,
    width: int = WIDTH,
) -> tuple[Proposal, Carry]:
    """Drafts a tree of K nodes of each request, whose levels a drafter runs one after another.

    All W children of node 0 are run in one pass, then the W best of all their children, and so on;
    nodes of the last level are not run. The K best of all candidates are the tree.

    Args:
      row: ``[B, 1, Vd]`` logits after node 0, and the ids of rows ``[B, Vd]``.
      states: arrays ``[B, 1, n]``, which the row of node 0 left.
      carry: what `forward` takes and gives, such as a cache.
      forward: ``forward(states, carry, token_ids, level)`` runs nodes ``[B, W]`` of level 0, 1 and
        so on, each with the states ``[B, W, n]`` that its parent left. It gives their logits
        ``[B, W, Vd]`` with the ids of rows ``[B * W, Vd]``, their own states, and the new carry.
      context: of the step, under the agreement rule.
      depth: the most drafts of a path.
      width: the most nodes of a level that are run.

    Returns:
      The proposal, and the last carry.
    """
    num_nodes = context.config.num_speculative_tokens
    # K nodes reach no deeper than K, and no level needs more than K of them.
    depth = min(depth, num_nodes)
    width = min(width, num_nodes, row.ids.vocab_size)

    def grow(
        level: _Level[States, Carry], offset: jax.Array
    ) -> tuple[_Level[States, Carry], Candidates]:
        """Runs a level; returns the next one, and the candidates that it was chosen from."""
        row, states, carry = forward(level.states, level.carry, level.token_ids, offset)
        # [B, W, Vd] -> [B, W, C] -> [B, W * C]: of each node C = W children, all candidates
        children = likeliest(row.logits, (offset + 1)[None], context, width, row.ids)
        # The logarithm of a path's chance is the sum of those on it: [B, W, 1] + [B, W, C]
        scores = level.scores[:, :, None] + children.scores
        candidates = Candidates(
            _flat(children.token_ids), jnp.repeat(level.numbers, width, axis=1), _flat(scores)
        )
        # [B, W * C] -> [B, W]: the best of them are run next, with the states of their parents
        best, place = lax.top_k(candidates.scores, width)
        parent = (place // width)[:, :, None]
        following = _Level(
            token_ids=jnp.take_along_axis(candidates.token_ids, place, axis=1),
            scores=best,
            numbers=1 + width + offset * width**2 + place,  # after W, and W * C of each level
            states=jax.tree.map(lambda x: jnp.take_along_axis(x, parent, axis=1), states),
            carry=carry,
        )
        return following, candidates

    # [B, 1, Vd] -> [B, 1, C] -> [B, W]: all children of node 0 are run
    children = likeliest(row.logits, jnp.zeros(1, jnp.int32), context, width, row.ids)
    first = Candidates(
        _flat(children.token_ids), jnp.zeros_like(children.token_ids[:, 0]), _flat(children.scores)
    )
    level = _Level(
        token_ids=first.token_ids,
        scores=first.scores,
        # Numbers 1 to W: parents of these are 0, the sequence.
        numbers=first.parents + 1 + jnp.arange(width, dtype=jnp.int32)[None, :],
        states=jax.tree.map(lambda x: jnp.repeat(x, width, axis=1), states),
        carry=carry,
    )
    # A scan: the drafter's pass is compiled once for all levels. The last level is not run.
    level, deeper = lax.scan(grow, level, jnp.arange(depth - 1, dtype=jnp.int32))
    # [D - 1, B, W * C] -> [B, (D - 1) * W * C], after the first level
    deeper = jax.tree.map(lambda x: _flat(jnp.moveaxis(x, 0, 1)), deeper)
    every_node = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, deeper)
    token_ids, parents = best_nodes(every_node, num_nodes)
    return Proposal(token_ids, parents=parents), level.carry


def _flat(x: jax.Array) -> jax.Array:
    """Returns ``[B, n]`` of an array whose first axis is B."""
    return x.reshape(x.shape[0], -1)


def grow(
    children: Callable[[int, jax.Array], Children],
    newest: jax.Array,
    depth: int,
    num_nodes: int,
    num_extended: int,
) -> Candidates:
    """Returns the nodes that a tree of the best nodes may have: at most `num_nodes` of each level.

    Level by level, the best nodes of the level above are extended by their children, and the best
    of these are kept. If as many nodes are extended as wanted, and each has as many children, all
    of the best nodes are found: the ancestors of each are better than it, so they are kept.

    Args:
      children: ``children(d, token_ids)`` gives the children of nodes with ids ``[B, W]``, which
        have d tokens before them from node 0 on; or ``[B, 1, C]`` if they are the same for all.
      newest: ``[B]`` int32, the token of node 0.
      depth: D, the most drafts of a path.
      num_nodes: K.
      num_extended: W, how many nodes of a level are extended.
    """
    # [B, 1]: node 0 is the level above the first
    token_ids = newest[:, None]
    scores = jnp.zeros((newest.shape[0], 1), jnp.float32)
    levels: list[Candidates] = []
    # The numbers of the first node above, and of the first of this level, as parents have them.
    first_above = 0
    first = 1
    for d in range(depth):
        # [B, W], and their children [B, W, C] or [B, 1, C]
        scores = scores[:, :num_extended]
        following = children(d, token_ids[:, :num_extended])
        # A single node's children are its own, in any order.
        is_shared = following.scores.shape[1] < scores.shape[1]
        above, rank = _pairs(scores.shape[1], following.scores.shape[2], num_nodes, is_shared)
        after = np.zeros_like(above) if is_shared else above
        # [B, P]: the paths to pairs of a node above and one of its children
        paths = scores[:, above] + following.scores[:, after, rank]
        # [B, P] -> [B, n]: the best nodes of the level, best first, as `_pairs` needs them
        scores, best = lax.top_k(paths, min(num_nodes, len(above)))
        token_ids = jnp.take_along_axis(following.token_ids[:, after, rank], best, axis=1)
        parents = jnp.asarray(above)[best]
        levels.append(Candidates(token_ids, first_above + parents, scores))
        first_above = first
        first += scores.shape[1]
    # D of [B, n] -> [B, the sum of n]
    return Candidates(*(jnp.concatenate(x, axis=1) for x in zip(*levels, strict=True)))


def _pairs(
    num_above: int, num_children: int, num_nodes: int, is_shared: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of a node above and a child, int32, without those that cannot be in the tree.

    If all nodes above have the same children, as good a path as (i, j) is each (i', j') with i' <=
    i and j' <= j: there are (i + 1) (j + 1) of them.
    """
    above, rank = np.indices((num_above, num_children), np.int32).reshape(2, -1)
    if not is_shared:
        return above, rank
    may_be = (above + 1) * (rank + 1) <= num_nodes
    return above[may_be], rank[may_be]


def likeliest(
    logits: jax.Array,
    offsets: jax.Array,
    context: DraftContext,
    num_children: int,
    ids: Ids,
) -> Children:
    """Returns the tokens that the target is likeliest to take after each of R nodes.

    The first is the draft that a chain under the agreement rule has from the same row. Filters
    leave out the same tokens as there. Requests with logits processors have them applied, as if the
    sequence ended at node 0.

    Args:
      logits: ``[B, R, Vd]``, a row of the drafter after each node.
      offsets: ``[R]`` int32, tokens from node 0 to each node: 0 for those after node 0; or ``[1]``,
        if they are the same for all R, whose noise is then drawn once.
      context: of the step; its config has the agreement rule. If it drafts greedily, noise and
        filters are left out.
      num_children: C, at most as many as the target's ids.
      ids: what the columns of rows ``[B * R, Vd]`` stand for.
    """
    batch_size, num_rows, _ = logits.shape

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(batch_size * num_rows, *x.shape[2:])

    # [B, R, Vd] -> [B, R, V]: processors know target ids, and races are run in tiles of them
    logits = ids.to_vocabulary(flat(logits)).reshape(batch_size, num_rows, -1)
    if context.processors is not None:
        logits = jax.vmap(context.processed, in_axes=1, out_axes=1)(logits)
    # [B] -> [B*R]: the parameters of each row's request
    sampling = context.sampling
    if context.config.draft_sample_method == "greedy":
        sampling = SamplingParams(jnp.zeros_like(sampling.temperature))
    sampling = jax.tree.map(lambda x: jnp.repeat(x, num_rows, axis=0), sampling)
    # [B, R, T+L] -> [B*R, T+L]: the noise of each row's position, of T tiles of L ids
    positions = context.lengths[:, None] + offsets[None, :]
    noise = token_exponentials(context.keys[:, None], positions, logits.shape[2])
    noise = flat(jnp.broadcast_to(noise, (batch_size, num_rows, noise.shape[2])))
    # [B*R, V] -> [B*R, C]: the target's token if its logits are these, and the best ones after it
    drawn = sample_by_races(flat(logits), sampling, noise)
    scores = log_scores(flat(logits), sampling.temperature, noise, drawn.threshold)
    token_ids, scores = _largest(scores, drawn.token_ids, num_children)
    # [B*R, C] -> [B, R, C]
    shape = (batch_size, num_rows, num_children)
    return Children(token_ids.reshape(shape), scores.reshape(shape))


def with_bias(candidates: Children, bias: jax.Array) -> Children:
    """Returns candidates of a level, scored again for each of its W nodes, whose token adds a bias.

    The chances ``exp(score + b / s)`` of candidates are made to sum to 1 with what the ids that are
    none had before.

    Args:
      candidates: ``[B, 1, C]``, of a row without bias; the same for all nodes.
      bias: ``[B, W, C]``, what each node adds to their logits.

    Returns:
      ``[B, W, C]``, in the order of `candidates`.
    """
    scores = candidates.scores + bias.astype(jnp.float32) / SPREAD
    # [B, 1, 1]: the mass of other ids; rounding may leave less than none
    others = 1 - jnp.sum(jnp.exp(candidates.scores), axis=2, keepdims=True)
    others = jnp.log(jnp.maximum(others, 0.0))
    total = jnp.logaddexp(jax.nn.logsumexp(scores, axis=2, keepdims=True), others)
    scores = jnp.minimum(scores - total, 0.0)
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)  # NaN is none
    return Children(jnp.broadcast_to(candidates.token_ids, scores.shape), scores)


def log_scores(
    logits: jax.Array, temperature: jax.Array, noise: jax.Array, threshold: jax.Array | None
) -> jax.Array:
    """Returns the logarithm of the chance that each id is the target's token, ``[n, V]`` float32.

    The target draws a tile of the vocabulary, then an id in it. With the mass ``m`` of a tile, and
    Gumbel noise g, the chance of a tile is ``softmax((T log m + T g) / s)``, that of an id in it
    ``softmax((l + T g) / s)``. At T = 0 the chance of an id is ``softmax(l / s)``.

    Args:
      logits: ``[n, V]``.
      temperature: ``[n]`` float32.
      noise: ``[n, T+L]`` float32, from `token_exponentials`.
      threshold: ``[n]`` float32, the least logit that filters keep; None without filters.
    """
    count, size = logits.shape
    width = min(TILE, size)
    is_sampled = (temperature > 0)[:, None]
    x = logits.astype(jnp.float32)
    if threshold is not None:
        x = jnp.where(is_sampled & (x < threshold[:, None]), -jnp.inf, x)
    # [n, V] -> [n, T, L]: tiles; the last may be padded
    num_tiles = -(-size // width)
    x = jnp.pad(x, ((0, 0), (0, num_tiles * width - size)), constant_values=-jnp.inf)
    x = x.reshape(count, num_tiles, width)
    # [n, T+L]: T g of the tiles, and then of the ids of a tile, which all tiles share
    gumbel = -jnp.log(noise) * temperature[:, None]
    # [n, T, L]: (l + T g) / s, and [n, T] its sum in each tile
    inside = (x + gumbel[:, None, num_tiles:]) / SPREAD
    of_tile = jax.nn.logsumexp(inside, axis=2)
    # [n, T]: T log m of each tile
    inverse = inverse_temperature(temperature)[:, None]
    mass = jax.nn.logsumexp(x * inverse[:, :, None], axis=2) / inverse
    # [n, T]: the chance of each tile; at T = 0 the sum of those of its ids
    tiles = jnp.where(is_sampled, (mass + gumbel[:, :num_tiles]) / SPREAD, of_tile)
    tiles = tiles - jax.nn.logsumexp(tiles, axis=1, keepdims=True)
    # [n, T, L] -> [n, V]: the chance of an id in its tile, times that of the tile
    chances = inside - of_tile[:, :, None] + tiles[:, :, None]
    # Rounding may leave a chance above 1, and a node then a score above its parent's.
    return jnp.minimum(chances.reshape(count, -1)[:, :size], 0.0)


def _largest(scores: jax.Array, first: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ids of the largest scores, and these, ``[n, C]`` each, the largest first.

    Of equal ones the lowest id comes first. NaN counts as -inf.

    Args:
      scores: ``[n, V]``.
      first: ``[n]`` int32, the id to come first, whatever its score: that which wins a race of
        tiles and then one in its tile need not have the best chance. Its score becomes that of the
        next one if it is less.
      count: C.
    """
    size = scores.shape[1]
    ids = jnp.arange(size, dtype=jnp.int32)
    # [n, V]: inf for the id that comes first, unless it is none
    ranked = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    ranked = jnp.where((ids[None, :] == first[:, None]) & (ranked > -jnp.inf), jnp.inf, ranked)
    num_groups = -(-size // _GROUP)
    if num_groups <= count:
        place = _places(ranked, count)
    else:
        # Whole rows would be sorted on GPUs. The C largest are in the C groups with the largest
        # maxima; in order of ids, so that equal scores are.
        # [n, V] -> [n, groups, 64]
        fill = ((0, 0), (0, num_groups * _GROUP - size))
        groups = jnp.pad(ranked, fill, constant_values=-jnp.inf)
        groups = groups.reshape(-1, num_groups, _GROUP)
        # [n, C]: which groups, and [n, C, 64]: what they hold
        group = jnp.sort(_places(jnp.max(groups, axis=2), count), axis=1)
        entries = jnp.take_along_axis(groups, group[:, :, None], axis=1)
        # [n, C]: places among these entries, and in the row
        inside = _places(entries.reshape(-1, count * _GROUP), count)
        of_group = jnp.take_along_axis(group, inside // _GROUP, axis=1)
        place = of_group * _GROUP + inside % _GROUP
    # [n, C]; padding of the last group may come if there are fewer finite scores than wanted
    top = jnp.take_along_axis(scores, place, axis=1, mode="fill", fill_value=-jnp.inf)
    top = jnp.where(top > -jnp.inf, top, -jnp.inf)
    if count > 1:
        # The id that comes first, whatever its score, gets that of the second if it has less.
        top = jnp.concatenate([jnp.maximum(top[:, :1], top[:, 1:2]), top[:, 1:]], axis=1)
    return jnp.minimum(place, size - 1), top


def _places(x: jax.Array, count: int) -> jax.Array:
    """Returns ``[n, C]`` int32, where the C largest of each row are; of equal ones the first.

    A sort takes half the time of `lax.top_k` on an H100 for rows of a thousand numbers.
    """
    # A stable sort of -x, with the index as what is carried along: ascending, so the largest first.
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return lax.sort((-x, index), dimension=1, num_keys=1, is_stable=True)[1][:, :count]
