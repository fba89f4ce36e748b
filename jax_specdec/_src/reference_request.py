"""One request of the oracle: its rows, its noise, and how close its comparisons were."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from jax_specdec._src import reference_sampling
from jax_specdec._src.reference_sampling import Array
from jax_specdec._src.types import DraftDistribution, DraftLogits, Status

TILE = 2048
"""Ids per vocabulary tile of the two-level inverse CDF, counted from id 0."""

_LARGE = 2.0**10
"""From this size on a log-normalizer is not used: its draft is one-hot."""

# Below float32's normal range an implementation may see 0: differences so small are close calls.
_FLOOR = 1e5 * float(np.finfo(np.float32).tiny)


class BadRow(Exception):
    """A visited row cannot be used: the request emits nothing."""

    def __init__(self, status: Status):
        self.status = status


@dataclasses.dataclass
class ReferenceRequest:
    """One request: its drafts, rows and noise, and the closest comparison so far."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    draft_ids: list[int]
    target_rows: Array  # [count + 1, V], or [count, V] where the bonus token is given
    drafts: ReferenceDrafts
    first_draft: int  # index of draft 0 on the flattened axis
    one_hot: list[bool]  # of each draft
    accept: list[float]
    recover: Array | None  # u_tile, u_token; [K+1, 2] before the agreement rule takes its own
    exponential: Array | None  # [V]
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
            raise BadRow(Status.BAD_TARGET_ROW)
        return row

    def target_argmax(self, i: int) -> int:
        return int(np.argmax(self.target_row(i)))  # the lowest id of the largest

    def target_probs(self, i: int) -> Array:
        row, margin = reference_sampling.filter_row(
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


class ReferenceDrafts:
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
            raise BadRow(Status.BAD_DRAFT_ROW)
        return ids

    def _index(self, n: int) -> int:
        """Which row of the storage is draft n's."""
        assert self.storage is not None
        r = n if self.rows is None else int(self.rows[n])
        if not 0 <= r < len(self.storage):
            raise BadRow(Status.BAD_DRAFT_ROW)
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
                raise BadRow(Status.BAD_DRAFT_ROW)
            row = np.where(row < self.threshold[r], -math.inf, row)
        if self.log_normalizer is None:
            if not math.isfinite(row.max()):
                raise BadRow(Status.BAD_DRAFT_ROW)
            weights = np.exp((row - row.max()) / temperature)
            return weights / weights.sum()
        assert self.row_max is not None
        if not (math.isfinite(self.log_normalizer[r]) and math.isfinite(self.row_max[r])):
            raise BadRow(Status.BAD_DRAFT_ROW)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.exp((row - self.row_max[r]) / temperature - self.log_normalizer[r])


def _checked(q: Array) -> Array:
    if not np.all((q >= 0) & np.isfinite(q)):  # NaN compares false
        raise BadRow(Status.BAD_DRAFT_ROW)
    return q
