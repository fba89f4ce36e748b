"""The contract of verification, written as plainly as possible: NumPy, float64, loops.

Every implementation is tested against it, number by number, so it shares nothing with them but the
types. It is slow, runs on the host and is meant to be read from top to bottom: the call, the rules,
one request, its draft distributions, bitmasks and filters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jax_specdec._src.base.types import (
    PLACEHOLDER_TOKEN_ID,
    DraftLogits,
    Drafts,
    Noise,
    RaceNoise,
    Status,
)

Array = npt.NDArray[np.float64]

TILE = 2048
"""Ids per vocabulary tile of the two-level inverse CDF, counted from id 0."""

_LARGE = 2.0**10
"""From this size on a log-normalizer is not used: its draft is one-hot."""

# Below float32's normal range an implementation may see 0: differences so small are close calls.
_FLOOR = 1e5 * float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class ReferenceOutput:
    """What `rejection_sample` of this module returns.

    Attributes:
      token_ids: ``[B, K+1]`` int32: accepted tokens, one recovered or bonus token, then -1.
      num_accepted: ``[B]`` int32, drafts kept.
      num_emitted: ``[B]`` int32, tokens emitted: accepted + 1, or 0 where `status` is not OK.
      status: ``[B]`` int32, a `Status`.
      path: ``[B, K+1]`` int32, the node whose row each token comes from, then -1; for drafts
        without parents 0, 1, 2, ...
      margin: ``[B]`` float64, the least relative distance between the two sides of a comparison
        that the request's outcome rests on; inf if every comparison is exact. An implementation in
        float32 may give other tokens only if it is at most 1e-5.
    """

    token_ids: npt.NDArray[np.int32]
    num_accepted: npt.NDArray[np.int32]
    num_emitted: npt.NDArray[np.int32]
    status: npt.NDArray[np.int32]
    path: npt.NDArray[np.int32]
    margin: Array


def rejection_sample(
    target_logits: npt.ArrayLike,
    drafts: Drafts,
    noise: Noise | RaceNoise,
    *,
    temperature: npt.ArrayLike,
    min_p: npt.ArrayLike | None = None,
    top_k: npt.ArrayLike | None = None,
    top_p: npt.ArrayLike | None = None,
    method: str,
    num_speculative_tokens: int,
    conditional_rates: Sequence[float] | None = None,
    bonus_token_ids: npt.ArrayLike | None = None,
    active: npt.ArrayLike | None = None,
    vocab_size: int | None = None,
    token_bitmask: npt.ArrayLike | None = None,
) -> ReferenceOutput:
    """Verifies the drafts of each request with explicit noise.

    With ``p = softmax(target row / temperature)`` and ``q`` the draft distribution, the standard
    rule keeps draft ``x`` iff ``u * q(x) < p(x)``; the first draft not kept is replaced by a
    sample from ``max(p - q, 0)``; after the last draft kept comes one bonus token from ``p``.
    The block rule judges prefixes: ``w_0 = 1`` and ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))`` are
    their weights, ``S_i = sum(max(w_i p - q, 0))`` the mass left after i drafts (``S = w`` after
    the last), and the longest prefix with ``u_i < S_i / (S_i + 1 - w_i)`` is kept, followed by a
    sample of ``max(w_i p - q, 0)``. The agreement rule samples from ``p`` at each position, with
    noise of its own, and keeps a draft iff it is what was sampled. It verifies trees of drafts too:
    from the row of a node it goes on to the child that was sampled.

    Args:
      target_logits: ``[N+B, V]``, or ``[N, V]`` where `bonus_token_ids` is given; any float dtype.
      drafts: as for `jax_specdec.rejection_sample`; NumPy arrays will do.
      noise: `Noise`, or `RaceNoise` to pick tokens by ``argmax(weight / exponential)``.
      temperature: ``[B]``; 0 is greedy.
      min_p: ``[B]``; tokens with ``p < min_p * max(p)`` are left out first. None for 0.
      top_k: ``[B]``; then those less likely than the k-th likeliest, unless it is 0 or -1, or None.
      top_p: ``[B]``; then those less likely than it takes to have this share of the rest. None
        for 1.
      method: "standard", "block", "agreement" or "synthetic".
      num_speculative_tokens: K.
      conditional_rates: ``[K]``, needed by "synthetic": draft ``i`` is kept iff
        ``u < conditional_rates[i]``.
      bonus_token_ids: ``[B]`` int32, or None to sample the bonus from the request's last row.
      active: ``[B]`` bool, or None for all true.
      vocab_size: ids from it on have weight 0; None for V.
      token_bitmask: ``[M, ceil(V/32)]``, M the rows of `target_logits`; None allows all tokens.

    Returns:
      The emitted tokens of each request, and how close a call they were.

    Raises:
      ValueError: `method` is unknown, or "synthetic" comes without rates.

    Example:
      The draft has target probability 1/2 and is one-hot, so ``u = 0.4`` keeps it:

      >>> import numpy as np
      >>> drafts = Drafts(np.array([1]), np.array([0, 1]))
      >>> noise = Noise(accept=np.array([[0.4]]), recover=np.array([[0.0, 0.9]]))
      >>> rejection_sample(
      ...     np.zeros((2, 2)), drafts, noise, temperature=[1.0],
      ...     method="standard", num_speculative_tokens=1,
      ... ).token_ids.tolist()
      [[1, 1]]

    References:
      Leviathan et al. 2023, arXiv 2211.17192. Chen et al. 2023, arXiv 2302.01318.
      Sun et al. 2024, arXiv 2403.10444 (block).
    """
    methods = ("standard", "block", "agreement", "synthetic")
    if method not in methods:
        raise ValueError(f"method must be one of {methods}, but is {method!r}")
    if method == "synthetic" and conditional_rates is None:
        raise ValueError("method 'synthetic' needs conditional_rates")

    # [M, V]: a slice to None is all of an axis
    target = _mask(np.asarray(target_logits, dtype=np.float64), token_bitmask)[:, :vocab_size]
    ids = np.asarray(drafts.token_ids)
    offsets = np.asarray(drafts.cu_num_draft_tokens)
    num_requests = len(offsets) - 1
    # [B] each: what was left out, as what it stands for
    temperatures = np.asarray(temperature, dtype=np.float64)
    min_ps = _given(min_p, 0.0, num_requests)
    top_ks = _given(top_k, 0, num_requests)
    top_ps = _given(top_p, 1.0, num_requests)
    is_active = _given(active, True, num_requests)
    has_bonus_rows = bonus_token_ids is None
    bonus = _given(bonus_token_ids, PLACEHOLDER_TOKEN_ID, num_requests)
    # [B, K] uniforms, and what tokens are drawn by
    accept = np.asarray(noise.accept, dtype=np.float64)
    is_race = isinstance(noise, RaceNoise)
    draws = np.asarray(noise.exponential if isinstance(noise, RaceNoise) else noise.recover)
    draft_rows = _drafts_of(drafts, num_requests, target.shape[1])

    # [B, K+1] and [B]: of a request that emits nothing this is all
    token_ids = np.full((num_requests, num_speculative_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted = np.zeros(num_requests, np.int32)
    num_emitted = np.zeros(num_requests, np.int32)
    status = np.zeros(num_requests, np.int32)
    path = np.full(token_ids.shape, -1, np.int32)
    margin = np.full(num_requests, np.inf)

    reached = 0  # where the drafts of the requests before end
    for b in range(num_requests):
        # Its drafts lie within the axis, and after those of the requests before.
        start = int(offsets[b])
        count = int(offsets[b + 1]) - start
        in_bounds = 0 <= count <= num_speculative_tokens and 0 <= start <= len(ids) - count
        in_bounds = in_bounds and (b > 0 or start == 0)
        is_after = start >= reached
        if in_bounds:
            reached = max(reached, start + count)
        # An empty slot is no error, whatever else it holds.
        if not is_active[b]:
            status[b] = Status.INACTIVE
            continue
        if (
            not (0 <= temperatures[b] < math.inf)
            or not (0 <= min_ps[b] <= 1 and top_ks[b] >= -1)
            or not (0 < top_ps[b] <= 1)
            or not (in_bounds and is_after)
        ):
            status[b] = Status.BAD_INPUT
            continue
        draft_ids = [int(x) for x in ids[start : start + count]]
        parents = _parents(drafts, start, count)
        if not _is_tree(parents, draft_ids):
            status[b] = Status.BAD_INPUT
            continue

        # Each request before it that owns a bonus row moves its rows by one.
        first_row = start + b * has_bonus_rows
        request = _Request(
            temperature=float(temperatures[b]),
            min_p=float(min_ps[b]),
            top_k=int(top_ks[b]),
            top_p=float(top_ps[b]),
            draft_ids=draft_ids,
            parents=parents,
            target_rows=target[first_row : first_row + count + has_bonus_rows],
            drafts=draft_rows,
            first_draft=start,
            one_hot=[draft_rows.is_one_hot(b, n) for n in range(start, start + count)],
            accept=[float(u) for u in accept[b, :count]],
            draws=draws[b],
            is_race=is_race,
            bonus_token_id=int(bonus[b]),
        )
        # Which drafts are kept, by the rule, and the token after them.
        nodes = [*range(1, count + 1)]  # that may be kept, in order
        try:
            if drafts.parents is not None:
                nodes, token = _tree(request)
                accepted = len(nodes)
            elif method == "synthetic":
                assert conditional_rates is not None
                accepted, token = _synthetic(request, conditional_rates)
            elif request.temperature == 0:
                accepted, token = _greedy(request)
            elif method == "block":
                accepted, token = _block(request)
            elif method == "agreement":
                accepted, token = _agreement(request)
            else:
                accepted, token = _standard(request)
        except _BadRow as bad:
            status[b] = bad.status
        else:
            kept = nodes[:accepted]
            token_ids[b, : accepted + 1] = [*(request.draft_ids[i - 1] for i in kept), token]
            path[b, : accepted + 1] = [0, *kept]
            num_accepted[b] = accepted
            num_emitted[b] = accepted + 1
        margin[b] = request.margin

    return ReferenceOutput(token_ids, num_accepted, num_emitted, status, path, margin)


def _given(values: npt.ArrayLike | None, default: float, size: int) -> npt.NDArray[Any]:
    """Returns values ``[size]``; the default for each if there are none."""
    return np.full(size, default) if values is None else np.asarray(values)


def _parents(drafts: Drafts, start: int, count: int) -> list[int]:
    """Returns the node that each draft of a request follows: of a chain, the draft before it."""
    if drafts.parents is None:
        return [*range(count)]
    return [int(x) for x in np.asarray(drafts.parents)[start : start + count]]


def _is_tree(parents: list[int], ids: list[int]) -> bool:
    """Returns whether each proposed draft follows an earlier node, and no siblings are equal.

    True of a chain.
    """
    nodes = enumerate(zip(parents, ids, strict=True))
    proposed = [(i, parent, x) for i, (parent, x) in nodes if x >= 0]
    # Of a tree each child of a node is another token.
    siblings = [(parent, x) for _, parent, x in proposed]
    follow = all(0 <= parent <= i for i, parent, _ in proposed)
    return follow and len({*siblings}) == len(siblings)


# The rules. Each returns how many drafts are kept and the one token that follows them.


def _greedy(request: _Request) -> tuple[int, int]:
    """Keeps drafts while they equal the argmax; the first argmax that differs follows."""
    for i, x in enumerate(request.draft_ids):
        best = request.target_argmax(i)
        if x != best:
            return i, best
    return len(request.draft_ids), request.bonus()


def _standard(request: _Request) -> tuple[int, int]:
    """Keeps x while ``u * q(x) < p(x)``; a sample of ``max(p - q, 0)`` follows."""
    for i, x in enumerate(request.draft_ids):
        p = request.target_probs(i)
        if not request.is_proposal(x):
            return i, request.sample(p)
        # Strict: a token of p = 0 is never kept, one of p = q always.
        q_x = request.draft_prob(i)
        kept = request.less(0.0, q_x) and request.less(request.accept[i] * q_x, p[x])
        if not kept:
            return i, request.recovered(p, i)
    return len(request.draft_ids), request.bonus()


def _block(request: _Request) -> tuple[int, int]:
    """Keeps the longest prefix that passes; a sample of ``max(w p - q, 0)`` follows it."""
    ids = request.draft_ids
    # No draft after one out of range is looked at.
    n = next((i for i, x in enumerate(ids) if not request.is_proposal(x)), len(ids))
    # Of the prefixes of 0, 1, ... drafts: joint weight, and residual mass.
    weight = [1.0]
    mass = []
    for i, x in enumerate(ids[:n]):
        p = request.target_probs(i)
        mass.append(float(request.left(p, i, weight[i]).sum()))
        q_x = request.draft_prob(i)
        weight.append(min(1.0, weight[i] * (p[x] / q_x)) if request.less(0.0, q_x) else 0.0)
        if not request.less(0.0, weight[-1]):
            break  # no longer prefix can pass
    else:
        mass.append(weight[n])
    kept = len(mass) - 1
    # From the longest prefix down; the empty one always passes.
    while kept > 0 and not request.passes(kept, weight[kept], mass[kept]):
        kept -= 1
    # The token after it: a bonus, or a sample of p or of the residual at the first draft not kept.
    if kept == len(ids):
        return kept, request.bonus()
    p = request.target_probs(kept)
    return kept, request.sample(p) if kept == n else request.recovered(p, kept, weight[kept])


def _agreement(request: _Request) -> tuple[int, int]:
    """Keeps x while it is what p draws in two races, with the noise of its position."""
    count = len(request.draft_ids)
    for i in range(len(request.target_rows)):
        # The target's own token, by the noise of its position.
        own = request.two_races(i, i)
        if i == count or own != request.draft_ids[i]:
            return i, own
    return count, request.bonus()


def _tree(request: _Request) -> tuple[list[int], int]:
    """Goes from node 0 to the child that is the row's own token, while there is one.

    Returns the nodes after node 0, and the own token of the last of them.
    """
    nodes = [0]
    while True:
        node = nodes[-1]
        depth = len(nodes) - 1
        is_greedy = request.temperature == 0
        own = request.target_argmax(node) if is_greedy else request.two_races(node, depth)
        drafts = enumerate(zip(request.parents, request.draft_ids, strict=True), 1)
        # There is one at most: siblings differ.
        children = [i for i, draft in drafts if draft == (node, own)]
        if not children:
            return nodes[1:], own
        nodes.append(children[0])


def _synthetic(request: _Request, conditional_rates: Sequence[float]) -> tuple[int, int]:
    """Keeps draft i while ``u < conditional_rates[i]``, whatever the logits say."""
    for i, x in enumerate(request.draft_ids):
        proposed = request.is_proposal(x)
        if proposed and request.less(request.accept[i], float(conditional_rates[i])):
            continue
        if request.temperature == 0:
            return i, request.target_argmax(i)
        p = request.target_probs(i)
        return i, request.recovered(p, i) if proposed else request.sample(p)
    return len(request.draft_ids), request.bonus()


# One request, its rows, its noise, and how close its comparisons were.


class _BadRow(Exception):
    """A visited row cannot be used: the request emits nothing."""

    def __init__(self, status: Status):
        self.status = status


@dataclasses.dataclass
class _Request:
    """One request: its drafts, rows and noise, and the closest comparison so far."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    draft_ids: list[int]
    parents: list[int]  # the node that each draft follows
    target_rows: Array  # [count + 1, V], or [count, V] where the bonus token is given
    drafts: _Drafts
    first_draft: int  # index of draft 0 on the flattened axis
    one_hot: list[bool]  # of each draft
    accept: list[float]
    # What a token is drawn by: two uniforms, for its tile and for it; of a race, exponentials [V],
    # or [K+1, T+L] under the agreement rule.
    draws: Array
    is_race: bool
    bonus_token_id: int  # given where no row is left for it
    margin: float = math.inf

    def is_proposal(self, x: int) -> bool:
        """Returns whether an id is in the vocabulary."""
        return 0 <= x < self.target_rows.shape[1]

    def less(self, a: float, b: float) -> bool:
        """Returns ``a < b`` for numbers that are not negative. Its margin is recorded."""
        if b > 0:  # nothing is below 0: that is exact in every precision
            self.record(abs(a - b) / max(abs(a), abs(b), _FLOOR))
        return a < b

    def record(self, margin: float) -> None:
        """Keeps the margin of a comparison if it is the closest so far."""
        self.margin = min(self.margin, float(margin))

    def target_row(self, i: int) -> Array:
        """Returns row i; ends the request if it has no finite maximum."""
        row = self.target_rows[i]
        if not math.isfinite(row.max()):  # NaN, +inf, or nothing but -inf
            raise _BadRow(Status.BAD_TARGET_ROW)
        return row

    def target_argmax(self, i: int) -> int:
        """Returns the lowest id of the largest entry of row i."""
        return int(np.argmax(self.target_row(i)))

    def target_probs(self, i: int) -> Array:
        """Returns ``p`` of row i, ``[V]``: filtered, then a softmax at its temperature."""
        row, margin = _filter_row(
            self.target_row(i), self.temperature, self.min_p, self.top_k, self.top_p
        )
        self.record(margin)
        # [V]: exp of differences from the maximum, none above 1
        weights = np.exp((row - row.max()) / self.temperature)
        return weights / weights.sum()

    def draft_prob(self, i: int) -> float:
        """Returns q(x) of draft i."""
        if self.one_hot[i]:
            return 1.0
        n = self.first_draft + i
        return self.drafts.prob(n, self.draft_ids[i], self.temperature)

    def left(self, p: Array, i: int, weight: float) -> Array:
        """Returns the residual weights ``max(w p - q, 0)`` at draft i."""
        # q = 1 at the draft, and 0 elsewhere.
        if self.one_hot[i]:
            weights = weight * p
            weights[self.draft_ids[i]] = 0.0
            return weights
        # [V]
        q = self.drafts.probs(self.first_draft + i, self.temperature)
        return np.maximum(weight * p - q, 0.0)

    def residual(self, p: Array, i: int, weight: float = 1.0) -> Array:
        """Returns the weights to replace draft i by: the residual, or p if nothing is left."""
        weights = self.left(p, i, weight)
        if weights.sum() > 0 and not self.one_hot[i]:
            # If next to nothing is left, w p and q are equal but for rounding.
            self.record(weights.sum() / weight)
        return weights if weights.sum() > 0 else p

    def recovered(self, p: Array, i: int, weight: float = 1.0) -> int:
        """Returns the id that replaces draft i."""
        # With listed ids the mass of a tile may be a difference, which rounds in proportion to the
        # row.
        lists_ids = not self.one_hot[i] and self.drafts.lists_candidates
        return self.sample(self.residual(p, i, weight), weight if lists_ids else None)

    def passes(self, i: int, weight: float, mass: float) -> bool:
        """Returns whether the first i drafts pass the block rule: ``u < S / (S + 1 - w)``.

        S and ``1 - w`` are differences, which round in proportion to w, a product of i factors.
        """
        short = self.accept[i - 1] * (mass + (1.0 - weight))
        self.record(abs(mass - short) / max(i * weight, _FLOOR))
        return short < mass

    def bonus(self) -> int:
        """Returns the token after all drafts: from the row after them, or as it was given."""
        last = len(self.draft_ids)
        if last == len(self.target_rows):
            return self.bonus_token_id
        if self.temperature == 0:
            return self.target_argmax(last)
        return self.sample(self.target_probs(last))

    def two_races(self, row: int, position: int) -> int:
        """Returns an id of a row's p: a tile by its mass, then an id of it, each by a race."""
        # [V], and [T+L]: the noise of the position, first of tiles, then of the ids of one
        p = self.target_probs(row)
        noise = self.draws[position]
        # [L]: shared by the tiles, of which the last may be shorter
        of_ids = noise[-min(TILE, len(noise) - 1) :]
        tiles = [p[first : first + TILE] for first in range(0, len(p), TILE)]
        t = self.race(np.array([tile.sum() for tile in tiles]), noise[: len(tiles)])
        return t * TILE + self.race(tiles[t], of_ids[: len(tiles[t])])

    def sample(self, weights: Array, row_mass: float | None = None) -> int:
        """Returns an id, with probability in proportion to its weight.

        The margin of the choice of a tile is relative to `row_mass`; None for the sum of weights.
        """
        if self.is_race:
            return self.race(weights, self.draws[: len(weights)])
        # The first uniform picks a tile by its mass, the second an id of it.
        u_tile, u_token = self.draws
        tiles = [weights[first : first + TILE] for first in range(0, len(weights), TILE)]
        t = self.pick(np.array([tile.sum() for tile in tiles]), u_tile, row_mass)
        return t * TILE + self.pick(tiles[t], u_token)

    def pick(self, weights: Array, u: float, scale: float | None = None) -> int:
        """Returns the least index of positive weight whose inclusive sum exceeds ``u * total``."""
        sums = np.cumsum(weights)
        total = sums[-1]
        scale = total if scale is None else scale
        # The first past the share of the total that u is; rounding may leave none.
        positive = np.flatnonzero(weights > 0)
        above = positive[sums[positive] > u * total]
        chosen = above[0] if above.size else positive[-1]
        # How near its sum, and the sum before it, are to that share.
        if chosen != positive[0]:
            self.record((u * total - sums[chosen - 1]) / scale)
        if chosen != positive[-1]:
            self.record((sums[chosen] - u * total) / scale)
        return int(chosen)

    def race(self, weights: Array, exponential: Array) -> int:
        """Returns the id of the largest ``weight / exponential``, the lowest among equals."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(weights > 0, weights / exponential, 0.0)
        chosen = int(np.argmax(scores))
        # The second best is the closest comparison.
        others = np.delete(scores, chosen)
        if others.size:
            self.less(float(others.max()), float(scores[chosen]))
        return chosen


@dataclasses.dataclass(frozen=True)
class _Drafts:
    """Draft rows that hold q itself, and which of them each draft has.

    Attributes:
      storage: ``[R, Vd]``; no rows if the call has no draft distribution.
      ids: ``[Vd]``, the ids of the columns; or ``[R, C]``, those of each row.
      rows: ``[N]``, the row of each draft.
      is_stored: ``[B]``, whether the rows of a request's drafts are there.
      vocab_size: V.
    """

    storage: Array
    ids: npt.NDArray[Any]
    rows: npt.NDArray[Any]
    is_stored: npt.NDArray[Any]
    vocab_size: int

    @property
    def lists_candidates(self) -> bool:
        """Whether each row lists ids of its own."""
        return self.ids.ndim == 2

    def is_one_hot(self, b: int, n: int) -> bool:
        """Returns whether draft n, of request b, has no q."""
        return not self.is_stored[b]

    def prob(self, n: int, x: int, temperature: float) -> float:
        """Returns q(x) of draft n; 0 if the drafter's row does not have x."""
        row = self.of_row(self._index(n), temperature)
        # [0 or 1]: the entry of x, if the row has it
        q_x = row[self._ids(n) == x]
        return float(_checked(q_x)[0]) if q_x.size else 0.0

    def probs(self, n: int, temperature: float) -> Array:
        """Returns q of draft n, ``[V]``."""
        q = np.zeros(self.vocab_size)
        row = self.of_row(self._index(n), temperature)
        q[self._ids(n)] = _checked(row)
        return q

    def of_row(self, r: int, temperature: float) -> Array:
        """Returns q over the ids of row r, ``[Vd]``, before the entries are checked."""
        return self.storage[r]

    def _ids(self, n: int) -> npt.NDArray[Any]:
        """Returns the ids of draft n's row: in range, and each listed once."""
        ids = self.ids[self._index(n)] if self.lists_candidates else self.ids
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(np.unique(ids)) < len(ids):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        return ids

    def _index(self, n: int) -> int:
        """Returns which row of the storage is draft n's."""
        r = int(self.rows[n])
        if not 0 <= r < len(self.storage):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        return r


@dataclasses.dataclass(frozen=True)
class _SummedDrafts(_Drafts):
    """Draft rows of logits, whose softmax over their ids is q.

    Attributes:
      threshold: ``[R]``, entries below it have no q.
    """

    threshold: Array

    def of_row(self, r: int, temperature: float) -> Array:
        row = self.kept(r)
        if not math.isfinite(row.max()):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        weights = np.exp((row - row.max()) / temperature)
        return weights / weights.sum()

    def kept(self, r: int) -> Array:
        """Returns row r, -inf where its filter left out an entry."""
        if math.isnan(self.threshold[r]):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        row = self.storage[r]
        return np.where(row < self.threshold[r], -math.inf, row)


@dataclasses.dataclass(frozen=True)
class _NormalizedDrafts(_SummedDrafts):
    """Draft rows of logits, with what normalizes them.

    Attributes:
      log_normalizer: ``[R]``.
      row_max: ``[R]``, what it is relative to.
    """

    log_normalizer: Array
    row_max: Array

    def is_one_hot(self, b: int, n: int) -> bool:
        """Returns whether draft n has no q; as by a normalizer that is too large to be exact."""
        r = int(self.rows[n])
        is_large = 0 <= r < len(self.storage) and (_LARGE <= abs(self.log_normalizer[r]) < math.inf)
        return super().is_one_hot(b, n) or is_large

    def of_row(self, r: int, temperature: float) -> Array:
        row = self.kept(r)
        if not (math.isfinite(self.log_normalizer[r]) and math.isfinite(self.row_max[r])):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp((row - self.row_max[r]) / temperature - self.log_normalizer[r])


def _drafts_of(drafts: Drafts, num_requests: int, vocab_size: int) -> _Drafts:
    """Returns the draft rows of a call, with what was left out as what it stands for."""
    q = drafts.distribution
    own_rows = np.arange(len(drafts.token_ids))
    if q is None:
        none = np.zeros(num_requests, bool)
        return _Drafts(np.zeros((0, 0)), own_rows, own_rows, none, vocab_size)
    storage = np.asarray(q.logits if isinstance(q, DraftLogits) else q.probs, dtype=np.float64)
    # Columns past the vocabulary are padding, unless their ids are listed.
    if q.ids is None:
        storage = storage[:, :vocab_size]
    ids = np.arange(storage.shape[1]) if q.ids is None else np.asarray(q.ids)
    rows = own_rows if q.rows is None else np.asarray(q.rows)
    common = storage, ids, rows, _given(q.valid, True, num_requests), vocab_size
    if not isinstance(q, DraftLogits):
        return _Drafts(*common)
    # [R] each, of rows of logits
    threshold = _given(q.threshold, -math.inf, len(storage))
    if q.log_normalizer is None:
        return _SummedDrafts(*common, threshold)
    log_normalizer = np.asarray(q.log_normalizer, dtype=np.float64)
    row_max = _given(q.row_max, 0.0, len(storage))
    return _NormalizedDrafts(*common, threshold, log_normalizer, row_max)


def _checked(q: Array) -> Array:
    """Returns q; ends the request if one is negative or not finite."""
    if not np.all((q >= 0) & np.isfinite(q)):  # NaN compares false
        raise _BadRow(Status.BAD_DRAFT_ROW)
    return q


# Bitmasks, min-p, top-k and top-p, by sorting.


def _mask(logits: Array, token_bitmask: npt.ArrayLike | None) -> Array:
    """Returns logits ``[M, V]``, -inf if bit ``id % 32`` of the row's word ``id // 32`` is 0."""
    if token_bitmask is None:
        return logits
    # [M, V]: the word of each id, in each row
    ids = np.arange(logits.shape[1])
    words = np.asarray(token_bitmask).astype(np.int64)[:, ids // 32]
    return np.where(words >> ids % 32 & 1, logits, -np.inf)


def _filter_row(
    row: Array, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[Array, float]:
    """Returns the row with -inf for what is left out, and the margin of the closest comparison.

    Each step keeps all entries that are not below a threshold.
    """
    peak = float(row.max())
    margin = math.inf

    # Min-p: p < min_p * max(p) is a bound of logits.
    if 0 < min_p < 1:
        depth = temperature * math.log(min_p)
        # The margin is relative to the numbers compared; the peak itself always stays.
        below = row[(row < peak) & (row > -math.inf)]
        margin = np.min(np.abs(below - (peak + depth)) / (abs(peak) - depth), initial=margin)
        row = np.where(row < peak + depth, -math.inf, row)
    elif min_p == 1:
        row = np.where(row < peak, -math.inf, row)

    # Top-k: the k-th largest entry, and what equals it.
    if 0 < top_k < len(row):
        row = np.where(row < np.sort(row)[-top_k], -math.inf, row)

    # Top-p: the largest entries in order, and the mass up to the last of equal ones.
    if top_p < 1:
        entries = np.sort(row)[::-1]
        mass = np.cumsum(np.exp((entries - peak) / temperature))
        last_of_ties = np.append(entries[1:] < entries[:-1], True)
        entries = entries[last_of_ties]
        mass = mass[last_of_ties]
        # The first of them with the wanted share of the mass is the threshold.
        goal = top_p * mass[-1]
        margin = np.min(np.abs(mass[:-1] - goal) / np.maximum(mass[:-1], goal), initial=margin)
        row = np.where(row < entries[mass >= goal][0], -math.inf, row)

    return row, float(margin)


def decode_attention(
    query: npt.ArrayLike,
    keys: npt.ArrayLike,
    values: npt.ArrayLike,
    start: npt.ArrayLike,
    *,
    tree_mask: npt.ArrayLike | None = None,
    window: int | None = None,
    depth: npt.ArrayLike | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Array:
    """Returns ``[B, S, N, D]`` float64, what each new row reads of its request's cache.

    Row s sees position t if ``t < start``, or if bit ``j = t - start`` of its 64 is set (for a
    chain, ``j <= s``), and if ``t > start - window`` (for a chain, ``t > start + s - window``; with
    `depth`, ``t > start + depth - window`` for ``t < start``). It reads
    ``sum_t softmax_t(scale q k_t) v_t`` over the positions that it sees.

    Args:
      query: ``[B, S, N, D]``.
      keys: ``[B * Nkv, D, T]``.
      values: ``[B * Nkv, T, D]``.
      start: ``[B]``.
      tree_mask: ``[B, S, 2]`` words of 32 bits, or None for a chain.
      window: positions that a row sees, or None for all.
      depth: ``[B, S]``, or None.
      softcap: c tanh(x / c) stands for each score x; None for the scores.
      scale: None for 1 / sqrt(D).

    Example:
      >>> query, keys = np.ones((1, 1, 1, 2)), np.zeros((1, 2, 4))
      >>> values = np.arange(4.0)[None, :, None] * np.ones((1, 1, 2))  # position t holds t
      >>> decode_attention(query, keys, values, [1])[0, 0, 0].tolist()  # the mean of 0 and 1
      [0.5, 0.5]
    """
    # [B, S, N, D], [B * Nkv, D, T] and [B * Nkv, T, D]
    q, k, v = (np.asarray(x, np.float64) for x in (query, keys, values))
    batch_size, num_rows, num_heads, head_dim = q.shape
    num_kv = len(k) // batch_size
    room = k.shape[2]
    width = math.inf if window is None else window
    read = np.zeros(q.shape)
    for b, s in np.ndindex(batch_size, num_rows):
        # [T]: positions, counted from the first new row
        new = np.arange(room) - np.asarray(start)[b]
        if tree_mask is None:
            newest = s
            is_seen = new <= s
        else:
            newest = 0 if depth is None else int(np.asarray(depth)[b, s])
            place = np.clip(new, 0, 63)
            bits = np.asarray(tree_mask)[b, s][place // 32] >> place % 32 & 1
            is_seen = (new < 0) | ((new < 64) & (bits == 1))
        # With depths, bits alone say which of the new rows are seen.
        is_exempt = (depth is not None) & (new >= 0)
        seen = np.flatnonzero(is_seen & ((new > newest - width) | is_exempt))
        # [D] of each head: a softmax over what is seen, of the keys that it shares
        for head in range(num_heads):
            # Consecutive query heads share a head of keys.
            own = b * num_kv + head * num_kv // num_heads
            scores = q[b, s, head] @ k[own][:, seen]
            scores *= head_dim**-0.5 if scale is None else scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            read[b, s, head] = weights / weights.sum() @ v[own][seen]
    return read
