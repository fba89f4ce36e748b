"""One request as the oracle sees it: its rows, its noise, and how close its calls were."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from jax_specdec._src import reference_sampling
from jax_specdec._src.types import DraftDistribution, DraftLogits, Status

Array = npt.NDArray[np.float64]

TILE = 2048
"""Ids per vocabulary tile of the two-level inverse CDF, counted from id 0."""

# Below float32's normal range an implementation may see 0: differences so small are close calls.
_FLOOR = 1e5 * float(np.finfo(np.float32).tiny)


class BadRow(Exception):
    """A visited row cannot be used: the request emits nothing."""

    def __init__(self, status: Status):
        self.status = status


@dataclasses.dataclass
class Request:
    """One request: its drafts, its rows and its noise, and the closest call so far."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    draft_ids: list[int]
    target_rows: Array  # [count + 1, V], or [count, V] where the bonus token is given
    draft_store: DraftStore
    first_draft: int  # index of draft 0 on the flattened axis
    one_hot: bool
    accept: list[float]
    recover: Array | None  # u_tile, u_token
    exponential: Array | None  # [V]
    bonus_token_id: int | None
    margin: float = math.inf

    def is_proposal(self, x: int) -> bool:
        return 0 <= x < self.target_rows.shape[1]

    def less(self, a: float, b: float) -> bool:
        """``a < b`` of numbers that are not negative, recorded as a call that may be close."""
        if b > 0:  # below 0 is nothing: exact in every precision
            self.record(abs(a - b) / max(abs(a), abs(b), _FLOOR))
        return a < b

    def record(self, margin: float) -> None:
        self.margin = min(self.margin, float(margin))

    def target_row(self, i: int) -> Array:
        row = self.target_rows[i]
        if not math.isfinite(row.max()):  # NaN, +inf, or nothing but -inf
            raise BadRow(Status.BAD_TARGET_ROW)
        return row

    def target_argmax(self, i: int) -> int:
        return int(np.argmax(self.target_row(i)))  # the lowest id of the largest

    def target_probs(self, i: int) -> Array:
        row, margin = reference_sampling.keep(
            self.target_row(i), self.temperature, self.min_p, self.top_k, self.top_p
        )
        self.record(margin)
        weights = np.exp((row - row.max()) / self.temperature)
        return weights / weights.sum()

    def draft_prob(self, i: int) -> float:
        """q(x) of draft i."""
        if self.one_hot:
            return 1.0
        n = self.first_draft + i
        return self.draft_store.prob(n, self.draft_ids[i], self.temperature)

    def left(self, p: Array, i: int, weight: float) -> Array:
        """What the draft distribution leaves of the target's at draft i: ``max(w p - q, 0)``."""
        if self.one_hot:
            weights = weight * p
            weights[self.draft_ids[i]] = 0.0
            return weights
        q = self.draft_store.probs(self.first_draft + i, self.temperature)
        return np.maximum(weight * p - q, 0.0)

    def residual(self, p: Array, i: int, weight: float = 1.0) -> Array:
        """The weights that replace draft i: what is left, or p where nothing is."""
        weights = self.left(p, i, weight)
        if weights.sum() > 0 and not self.one_hot:
            # Next to nothing left: w p and q are equal but for rounding.
            self.record(weights.sum() / weight)
        return weights if weights.sum() > 0 else p

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

    def sample(self, weights: Array) -> int:
        """An id, with probability in proportion to its weight."""
        if self.exponential is not None:
            return self.race(weights, self.exponential[: len(weights)])
        assert self.recover is not None
        u_tile, u_token = self.recover
        tiles = [weights[first : first + TILE] for first in range(0, len(weights), TILE)]
        t = self.pick(np.array([tile.sum() for tile in tiles]), u_tile)
        return t * TILE + self.pick(tiles[t], u_token)

    def pick(self, weights: Array, u: float) -> int:
        """The least index of positive weight whose inclusive sum exceeds ``u * total``."""
        sums = np.cumsum(weights)
        total = sums[-1]
        positive = np.flatnonzero(weights > 0)
        above = positive[sums[positive] > u * total]
        chosen = above[0] if above.size else positive[-1]
        if chosen != positive[0]:
            self.record((u * total - sums[chosen - 1]) / total)
        if chosen != positive[-1]:
            self.record((sums[chosen] - u * total) / total)
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


class DraftStore:
    """The draft distributions, read in place through a row index per draft."""

    def __init__(self, distribution: DraftDistribution | None, vocab_size: int):
        self.vocab_size = vocab_size
        self.has_logits = isinstance(distribution, DraftLogits)
        self.storage: Array | None = None  # [R, Vd]
        self.rows = self.valid = self.log_normalizer = self.threshold = None
        if distribution is None:
            return
        if isinstance(distribution, DraftLogits):
            storage = distribution.logits
            if distribution.log_normalizer is not None:
                self.log_normalizer = np.asarray(distribution.log_normalizer, dtype=np.float64)
            if distribution.threshold is not None:
                self.threshold = np.asarray(distribution.threshold, dtype=np.float64)
        else:
            storage = distribution.probs
        self.storage = np.asarray(storage, dtype=np.float64)[:, :vocab_size]
        self.rows = None if distribution.rows is None else np.asarray(distribution.rows)
        self.valid = None if distribution.valid is None else np.asarray(distribution.valid)

    def is_one_hot(self, b: int) -> bool:
        return self.storage is None or (self.valid is not None and not self.valid[b])

    def prob(self, n: int, x: int, temperature: float) -> float:
        """q(x) of draft n; 0 beyond the drafter's vocabulary."""
        q = self._row(n, temperature)
        q_x = float(q[x]) if x < len(q) else 0.0
        return float(_checked(np.array([q_x]))[0])

    def probs(self, n: int, temperature: float) -> Array:
        """q of draft n, ``[V]``."""
        q = _checked(self._row(n, temperature))
        return np.concatenate([q, np.zeros(self.vocab_size - len(q))])

    def _row(self, n: int, temperature: float) -> Array:
        """q of draft n over the ids the drafter shares with the target, entries not checked."""
        assert self.storage is not None
        r = n if self.rows is None else int(self.rows[n])
        if not 0 <= r < len(self.storage):
            raise BadRow(Status.BAD_DRAFT_ROW)
        row = self.storage[r]
        if not self.has_logits:
            return row
        if self.threshold is not None:
            if math.isnan(self.threshold[r]):
                raise BadRow(Status.BAD_DRAFT_ROW)
            row = np.where(row < self.threshold[r], -math.inf, row)
        if self.log_normalizer is None:
            if not math.isfinite(row.max()):
                raise BadRow(Status.BAD_DRAFT_ROW)
            weights = np.exp((row - row.max()) / temperature)
            return weights / weights.sum()
        if not math.isfinite(self.log_normalizer[r]):
            raise BadRow(Status.BAD_DRAFT_ROW)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp(row / temperature - self.log_normalizer[r])


def _checked(q: Array) -> Array:
    if not np.all((q >= 0) & np.isfinite(q)):  # NaN compares false
        raise BadRow(Status.BAD_DRAFT_ROW)
    return q
