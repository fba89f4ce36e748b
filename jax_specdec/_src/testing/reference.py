"""The contract of verification, written as plainly as possible: NumPy, float64, loops.

Every implementation is tested against it, number by number, so it shares nothing with them but the
types. It is slow, runs on the host and is meant to be read from top to bottom: the call, the rules,
one request, its draft distributions, bitmasks and filters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jax_specdec._src.base.types import (
    PLACEHOLDER_TOKEN_ID,
    DraftDistribution,
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
    """Verify the drafts of each request with explicit noise.

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

    target = _mask(np.asarray(target_logits, dtype=np.float64), token_bitmask)
    if vocab_size is not None:
        target = target[:, :vocab_size]
    ids = np.asarray(drafts.token_ids)
    offsets = np.asarray(drafts.cu_num_draft_tokens)
    accept = np.asarray(noise.accept, dtype=np.float64)
    temperatures = np.asarray(temperature, dtype=np.float64)
    filters = {
        name: np.full(len(temperatures), default) if values is None else np.asarray(values)
        for name, values, default in [
            ("min_p", min_p, 0.0),
            ("top_k", top_k, 0),
            ("top_p", top_p, 1.0),
        ]
    }
    bonus = None if bonus_token_ids is None else np.asarray(bonus_token_ids)
    draft_rows = _Drafts(drafts.distribution, target.shape[1])
    num_requests = len(offsets) - 1

    token_ids = np.full((num_requests, num_speculative_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted = np.zeros(num_requests, np.int32)
    num_emitted = np.zeros(num_requests, np.int32)
    status = np.zeros(num_requests, np.int32)
    path = np.full(token_ids.shape, -1, np.int32)
    margin = np.full(num_requests, np.inf)

    reached = 0  # where the drafts of the requests before end
    for b in range(num_requests):
        start, count = int(offsets[b]), int(offsets[b + 1]) - int(offsets[b])
        in_bounds = 0 <= count <= num_speculative_tokens and 0 <= start <= len(ids) - count
        in_bounds, is_after = in_bounds and (b > 0 or start == 0), start >= reached
        reached = max(reached, start + count) if in_bounds else reached
        if active is not None and not np.asarray(active)[b]:
            status[b] = Status.INACTIVE
            continue
        if (
            not (0 <= temperatures[b] < math.inf)
            or not (0 <= filters["min_p"][b] <= 1 and filters["top_k"][b] >= -1)
            or not (0 < filters["top_p"][b] <= 1)
            or not (in_bounds and is_after)
            or not _is_tree(drafts, start, count)
        ):
            status[b] = Status.BAD_INPUT
            continue

        first_row = start if bonus is not None else start + b
        request = _Request(
            temperature=float(temperatures[b]),
            min_p=float(filters["min_p"][b]),
            top_k=int(filters["top_k"][b]),
            top_p=float(filters["top_p"][b]),
            draft_ids=[int(x) for x in ids[start : start + count]],
            parents=_parents(drafts, start, count),
            target_rows=target[first_row : first_row + count + (bonus is None)],
            drafts=draft_rows,
            first_draft=start,
            one_hot=[draft_rows.is_one_hot(b, n) for n in range(start, start + count)],
            accept=[float(u) for u in accept[b, :count]],
            recover=None if isinstance(noise, RaceNoise) else np.asarray(noise.recover)[b],
            exponential=np.asarray(noise.exponential)[b] if isinstance(noise, RaceNoise) else None,
            bonus_token_id=None if bonus is None else int(bonus[b]),
        )
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


def _parents(drafts: Drafts, start: int, count: int) -> list[int]:
    """The node that each draft of a request follows: of a chain, the draft before it."""
    if drafts.parents is None:
        return [*range(count)]
    return [int(x) for x in np.asarray(drafts.parents)[start : start + count]]


def _is_tree(drafts: Drafts, start: int, count: int) -> bool:
    """Whether each draft that is proposed follows an earlier node, and no two siblings are equal.

    True of drafts without parents.
    """
    if drafts.parents is None:
        return True
    parents = _parents(drafts, start, count)
    ids = [int(x) for x in np.asarray(drafts.token_ids)[start : start + count]]
    proposed = [(i, parents[i], ids[i]) for i in range(count) if ids[i] >= 0]
    siblings = [(parent, x) for _, parent, x in proposed]
    follow = all(0 <= parent <= i for i, parent, _ in proposed)
    return follow and len({*siblings}) == len(siblings)


# The rules. Each returns how many drafts are kept and the one token that follows them.


def _greedy(request: _Request) -> tuple[int, int]:
    """Keep drafts while they equal the argmax; the first argmax that differs follows."""
    for i, x in enumerate(request.draft_ids):
        best = request.target_argmax(i)
        if x != best:
            return i, best
    return len(request.draft_ids), request.bonus()


def _standard(request: _Request) -> tuple[int, int]:
    """Keep x while ``u * q(x) < p(x)``; a sample of ``max(p - q, 0)`` replaces the first other."""
    for i, x in enumerate(request.draft_ids):
        p = request.target_probs(i)
        if not request.is_proposal(x):
            return i, request.sample(p)
        q_x = request.draft_prob(i)
        kept = request.less(0.0, q_x) and request.less(request.accept[i] * q_x, p[x])
        if not kept:
            return i, request.recovered(p, i)
    return len(request.draft_ids), request.bonus()


def _block(request: _Request) -> tuple[int, int]:
    """Keep the longest prefix that passes; a sample of ``max(w p - q, 0)`` follows it."""
    ids = request.draft_ids
    n = next((i for i, x in enumerate(ids) if not request.is_proposal(x)), len(ids))
    weight, mass = [1.0], []  # of the prefixes of 0, 1, ... drafts
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
    while kept > 0 and not request.passes(kept, weight[kept], mass[kept]):
        kept -= 1
    if kept == len(ids):
        return kept, request.bonus()
    p = request.target_probs(kept)
    return kept, request.sample(p) if kept == n else request.recovered(p, kept, weight[kept])


def _agreement(request: _Request) -> tuple[int, int]:
    """Keep x while it is what p draws in two races, with the noise of its position."""
    count, num_rows = len(request.draft_ids), len(request.target_rows)
    for i in range(num_rows):
        own = request.two_races(i, i)
        if i == count or own != request.draft_ids[i]:
            return i, own
    return count, request.bonus()


def _tree(request: _Request) -> tuple[list[int], int]:
    """Go from node 0 to the child that is the row's own token, while there is one.

    Returns the nodes after node 0, and the own token of the last of them.
    """
    nodes = [0]
    while True:
        node, depth = nodes[-1], len(nodes) - 1
        is_greedy = request.temperature == 0
        own = request.target_argmax(node) if is_greedy else request.two_races(node, depth)
        drafts = enumerate(zip(request.parents, request.draft_ids, strict=True), 1)
        children = [i for i, draft in drafts if draft == (node, own)]
        if not children:
            return nodes[1:], own
        nodes.append(children[0])


def _synthetic(request: _Request, conditional_rates: Sequence[float]) -> tuple[int, int]:
    """Keep draft i while ``u < conditional_rates[i]``, whatever the logits say."""
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
    recover: Array | None  # u_tile, u_token
    exponential: Array | None  # [V]; [K+1, T+L] under the agreement rule
    bonus_token_id: int | None
    margin: float = math.inf

    def is_proposal(self, x: int) -> bool:
        return 0 <= x < self.target_rows.shape[1]

    def less(self, a: float, b: float) -> bool:
        """``a < b`` for numbers that are not negative. Its margin is recorded."""
        if b > 0:  # nothing is below 0: that is exact in every precision
            self.record(abs(a - b) / max(abs(a), abs(b), _FLOOR))
        return a < b

    def record(self, margin: float) -> None:
        self.margin = min(self.margin, float(margin))

    def target_row(self, i: int) -> Array:
        row = self.target_rows[i]
        if not math.isfinite(row.max()):  # NaN, +inf, or nothing but -inf
            raise _BadRow(Status.BAD_TARGET_ROW)
        return row

    def target_argmax(self, i: int) -> int:
        return int(np.argmax(self.target_row(i)))  # the lowest id of the largest

    def target_probs(self, i: int) -> Array:
        row, margin = _filter_row(
            self.target_row(i), self.temperature, self.min_p, self.top_k, self.top_p
        )
        self.record(margin)
        weights = np.exp((row - row.max()) / self.temperature)
        return weights / weights.sum()

    def draft_prob(self, i: int) -> float:
        """q(x) of draft i."""
        if self.one_hot[i]:
            return 1.0
        n = self.first_draft + i
        return self.drafts.prob(n, self.draft_ids[i], self.temperature)

    def left(self, p: Array, i: int, weight: float) -> Array:
        """The residual weights ``max(w p - q, 0)`` at draft i."""
        if self.one_hot[i]:
            weights = weight * p
            weights[self.draft_ids[i]] = 0.0
            return weights
        q = self.drafts.probs(self.first_draft + i, self.temperature)
        return np.maximum(weight * p - q, 0.0)

    def residual(self, p: Array, i: int, weight: float = 1.0) -> Array:
        """The weights to replace draft i by: the residual, or p if nothing is left of it."""
        weights = self.left(p, i, weight)
        if weights.sum() > 0 and not self.one_hot[i]:
            # If next to nothing is left, w p and q are equal but for rounding.
            self.record(weights.sum() / weight)
        return weights if weights.sum() > 0 else p

    def recovered(self, p: Array, i: int, weight: float = 1.0) -> int:
        """The id that replaces draft i."""
        lists_ids = not self.one_hot[i] and self.drafts.lists_candidates
        # If so, the mass of a tile may be a difference, which rounds in proportion to the row.
        return self.sample(self.residual(p, i, weight), weight if lists_ids else None)

    def passes(self, i: int, weight: float, mass: float) -> bool:
        """Whether the first i drafts pass the block rule: ``u < S / (S + 1 - w)``.

        S and ``1 - w`` are differences, which round in proportion to w, a product of i factors.
        """
        short = self.accept[i - 1] * (mass + (1.0 - weight))
        self.record(abs(mass - short) / max(i * weight, _FLOOR))
        return short < mass

    def bonus(self) -> int:
        if self.bonus_token_id is not None:
            return self.bonus_token_id
        last = len(self.draft_ids)
        if self.temperature == 0:
            return self.target_argmax(last)
        return self.sample(self.target_probs(last))

    def two_races(self, row: int, position: int) -> int:
        """An id of a row's p: a tile by its mass, then an id of it, by the noise of a position."""
        assert self.exponential is not None
        p, noise = self.target_probs(row), self.exponential[position]
        of_ids = noise[-min(TILE, len(noise) - 1) :]
        tiles = [p[first : first + TILE] for first in range(0, len(p), TILE)]
        t = self.race(np.array([tile.sum() for tile in tiles]), noise[: len(tiles)])
        return t * TILE + self.race(tiles[t], of_ids[: len(tiles[t])])

    def sample(self, weights: Array, row_mass: float | None = None) -> int:
        """An id, with probability in proportion to its weight.

        The margin of the choice of a tile is relative to `row_mass`; None for the sum of weights.
        """
        if self.exponential is not None:
            return self.race(weights, self.exponential[: len(weights)])
        assert self.recover is not None
        u_tile, u_token = self.recover
        tiles = [weights[first : first + TILE] for first in range(0, len(weights), TILE)]
        t = self.pick(np.array([tile.sum() for tile in tiles]), u_tile, row_mass)
        return t * TILE + self.pick(tiles[t], u_token)

    def pick(self, weights: Array, u: float, scale: float | None = None) -> int:
        """The least index of positive weight whose inclusive sum exceeds ``u * total``."""
        sums = np.cumsum(weights)
        total = sums[-1]
        scale = total if scale is None else scale
        positive = np.flatnonzero(weights > 0)
        above = positive[sums[positive] > u * total]
        chosen = above[0] if above.size else positive[-1]
        if chosen != positive[0]:
            self.record((u * total - sums[chosen - 1]) / scale)
        if chosen != positive[-1]:
            self.record((sums[chosen] - u * total) / scale)
        return int(chosen)

    def race(self, weights: Array, exponential: Array) -> int:
        """The id of the largest ``weight / exponential``, the lowest among equals."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(weights > 0, weights / exponential, 0.0)
        chosen = int(np.argmax(scores))
        others = np.delete(scores, chosen)
        if others.size:
            self.less(float(others.max()), float(scores[chosen]))
        return chosen


class _Drafts:
    """The draft distributions of the flattened drafts."""

    def __init__(self, distribution: DraftDistribution | None, vocab_size: int):
        self.vocab_size = vocab_size
        self.has_logits = isinstance(distribution, DraftLogits)
        self.storage: Array | None = None  # [R, Vd]
        self.rows = self.valid = self.threshold = self.ids = None
        self.log_normalizer = self.row_max = None
        if distribution is None:
            return
        if isinstance(distribution, DraftLogits):
            storage = distribution.logits
            if distribution.log_normalizer is not None:
                self.log_normalizer = np.asarray(distribution.log_normalizer, dtype=np.float64)
                self.row_max = np.zeros_like(self.log_normalizer)
            if distribution.row_max is not None:
                self.row_max = np.asarray(distribution.row_max, dtype=np.float64)
            if distribution.threshold is not None:
                self.threshold = np.asarray(distribution.threshold, dtype=np.float64)
        else:
            storage = distribution.probs
        self.storage = np.asarray(storage, dtype=np.float64)
        if distribution.ids is None:
            self.storage = self.storage[:, :vocab_size]
        else:
            self.ids = np.asarray(distribution.ids)
        self.rows = None if distribution.rows is None else np.asarray(distribution.rows)
        self.valid = None if distribution.valid is None else np.asarray(distribution.valid)

    @property
    def lists_candidates(self) -> bool:
        """Whether each row lists ids of its own."""
        return self.ids is not None and self.ids.ndim == 2

    def is_one_hot(self, b: int, n: int) -> bool:
        """Whether draft n, of request b, has no q."""
        if self.storage is None or (self.valid is not None and not self.valid[b]):
            return True
        r = n if self.rows is None else int(self.rows[n])
        if self.log_normalizer is None or not 0 <= r < len(self.storage):
            return False
        return _LARGE <= abs(self.log_normalizer[r]) < math.inf

    def prob(self, n: int, x: int, temperature: float) -> float:
        """q(x) of draft n; 0 if the drafter's row does not have x."""
        q, ids = self._row(n, temperature), self._ids(n)
        q_x = q[ids == x]
        return float(_checked(q_x)[0]) if q_x.size else 0.0

    def probs(self, n: int, temperature: float) -> Array:
        """q of draft n, ``[V]``."""
        q = np.zeros(self.vocab_size)
        row, ids = self._row(n, temperature), self._ids(n)
        q[ids] = _checked(row)
        return q

    def _ids(self, n: int) -> npt.NDArray[np.int64]:
        """The ids that the entries of draft n's row stand for: in range, and each listed once."""
        assert self.storage is not None
        if self.ids is None:
            return np.arange(self.storage.shape[1])
        ids = self.ids if self.ids.ndim == 1 else self.ids[self._index(n)]
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(np.unique(ids)) < len(ids):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        return ids

    def _index(self, n: int) -> int:
        """Which row of the storage is draft n's."""
        assert self.storage is not None
        r = n if self.rows is None else int(self.rows[n])
        if not 0 <= r < len(self.storage):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        return r

    def _row(self, n: int, temperature: float) -> Array:
        """q of draft n over the ids of its row, before the entries are checked."""
        assert self.storage is not None
        r = self._index(n)
        row = self.storage[r]
        if not self.has_logits:
            return row
        if self.threshold is not None:
            if math.isnan(self.threshold[r]):
                raise _BadRow(Status.BAD_DRAFT_ROW)
            row = np.where(row < self.threshold[r], -math.inf, row)
        if self.log_normalizer is None:
            if not math.isfinite(row.max()):
                raise _BadRow(Status.BAD_DRAFT_ROW)
            weights = np.exp((row - row.max()) / temperature)
            return weights / weights.sum()
        assert self.row_max is not None
        if not (math.isfinite(self.log_normalizer[r]) and math.isfinite(self.row_max[r])):
            raise _BadRow(Status.BAD_DRAFT_ROW)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp((row - self.row_max[r]) / temperature - self.log_normalizer[r])


def _checked(q: Array) -> Array:
    if not np.all((q >= 0) & np.isfinite(q)):  # NaN compares false
        raise _BadRow(Status.BAD_DRAFT_ROW)
    return q


# Bitmasks, min-p, top-k and top-p, by sorting.


def _mask(logits: Array, token_bitmask: npt.ArrayLike | None) -> Array:
    """Logits ``[M, V]``, with -inf if bit ``id % 32`` of the row's word ``id // 32`` is not set."""
    if token_bitmask is None:
        return logits
    ids = np.arange(logits.shape[1])
    words = np.asarray(token_bitmask).astype(np.int64)[:, ids // 32]
    return np.where(words >> ids % 32 & 1, logits, -np.inf)


def _filter_row(
    row: Array, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[Array, float]:
    """The row with -inf for what is left out, and the margin of the closest comparison.

    Each step keeps all entries that are not below a threshold.
    """
    peak, margin = float(row.max()), math.inf

    if 0 < min_p < 1:  # p < min_p * max(p)
        depth = temperature * math.log(min_p)
        below = row[(row < peak) & (row > -math.inf)]
        margin = np.min(np.abs(below - (peak + depth)) / (abs(peak) - depth), initial=margin)
        row = np.where(row < peak + depth, -math.inf, row)
    elif min_p == 1:
        row = np.where(row < peak, -math.inf, row)

    if 0 < top_k < len(row):
        row = np.where(row < np.sort(row)[-top_k], -math.inf, row)

    if top_p < 1:
        entries = np.sort(row)[::-1]
        mass = np.cumsum(np.exp((entries - peak) / temperature))
        last_of_ties = np.append(entries[1:] < entries[:-1], True)
        entries, mass = entries[last_of_ties], mass[last_of_ties]
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
    visible: npt.ArrayLike | None = None,
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
      visible: ``[B, S, 2]`` words of 32 bits, or None for a chain.
      window: positions that a row sees, or None for all.
      depth: ``[B, S]``, or None.
      softcap: c tanh(x / c) stands for each score x; None for the scores.
      scale: None for 1 / sqrt(D).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (query, keys, values))
    batch_size, num_rows, num_heads, head_dim = q.shape
    num_kv, room = len(k) // batch_size, k.shape[2]
    words = None if visible is None else np.asarray(visible)
    read = np.zeros(q.shape)
    for b, s in np.ndindex(batch_size, num_rows):
        first, seen = int(np.asarray(start)[b]), []
        for t in range(room):
            j = t - first
            newest = s if words is None else 0
            if depth is not None:
                newest = int(np.asarray(depth)[b, s])
            is_exempt = depth is not None and j >= 0
            if window is not None and j <= newest - window and not is_exempt:
                continue
            if words is None:
                is_seen = j <= s
            else:
                is_seen = j < 0 or (j < 64 and int(words[b, s, j // 32]) >> j % 32 & 1 == 1)
            if is_seen:
                seen.append(t)
        for head in range(num_heads):
            own = b * num_kv + head * num_kv // num_heads
            scores = q[b, s, head] @ k[own][:, seen]
            scores *= head_dim**-0.5 if scale is None else scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            read[b, s, head] = weights / weights.sum() @ v[own][seen]
    return read
