"""What a step costs by its number of drafts, a prompt by its tokens, and which numbers to take."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_specdec._src.arrays import check_increasing, check_int, check_type, require
from jax_specdec._src.drafts.estimator import AcceptanceEstimator, TreeEstimator

_TRIAL_SHARE = 0.01
"""The share of the time that trials of more drafts may take."""
_KEPT, _PRIOR_STEPS = 0.99, 2.0
"""What remains of the past after a step with drafts, and made-up steps in which all had some."""
_MOST_BETWEEN, _MOST_WITHIN = 1.1, 0.5
"""What it may cost to read a prompt between two steps, and what within one, in steps."""


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The seconds that a step of an engine takes, by the number of drafts per request.

    Every slot takes part in every pass of the target, with as many rows as the others. So with k
    drafts per request, and ``a_i`` the chance that drafts 0 .. i are all accepted, the engine emits
    ``(1 + a_0 + ... + a_{k-1}) / seconds(k)`` tokens per second and request. The best k is taken
    from what earlier steps have shown, before the drafts of a step are drawn: any rule may be used
    for that, and the output stays lossless.

    Attributes:
      num_slots: S of the engine that was measured.
      num_drafts: numbers of drafts per request, increasing: the engine's `draft_budget`.
      seconds: of a step with each of them, above 0.

    Raises:
      TypeError: a number of drafts, or of slots, is not an int.
      ValueError: the lists have different lengths, `num_drafts` do not increase, or `seconds` are
        not finite and positive.

    Example:
      >>> costs = StepCosts(num_slots=8, num_drafts=(0, 2, 4), seconds=(1.0, 1.2, 2.0))
      >>> costs.best([0.9, 0.8, 0.7, 0.6]), costs.best([0.1, 0.01, 0.001, 0.0])
      (2, 0)
    """

    num_slots: int
    num_drafts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_int("num_slots", self.num_slots)
        object.__setattr__(self, "num_drafts", check_increasing("num_drafts", self.num_drafts, 0))
        seconds = tuple(float(x) for x in self.seconds)
        if len(seconds) != len(self.num_drafts) or not all(0 < x < np.inf for x in seconds):
            raise ValueError(
                f"seconds must hold a positive number for each of num_drafts={self.num_drafts}, "
                f"but they are {seconds}"
            )
        object.__setattr__(self, "seconds", seconds)

    def best(self, survival: Sequence[float] | np.ndarray, share: float = 1.0) -> int:
        """The number of drafts with the most expected tokens per second; of equals, the least.

        Args:
          survival: ``[K]``, the chance that draft i, and so each before it, is accepted, K at least
            the largest of `num_drafts`. Of a tree, that draft i, by rank, is accepted.
          share: of the steps that cost more than the least number does; the others, in which no
            request has a draft, cost as much.

        Returns:
          A number of `num_drafts`; 0 if speculation does not pay.
        """
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.asarray(survival, np.float64))])
        least = self.seconds[0]
        seconds = least + share * (np.array(self.seconds) - least)
        return self.num_drafts[int(np.argmax(tokens[list(self.num_drafts)] / seconds))]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which `load` reads."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepCosts:
        """Read what `save` wrote.

        Raises:
          ValueError: the file holds something else.
        """
        text = Path(path).read_text()
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"path must be a file that save wrote, but {os.fspath(path)} is not: {error}"
            ) from error


class ChunkCosts(NamedTuple):
    """The seconds of a step of an engine, and of reading a prompt with both models.

    Attributes:
      step: all slots busy.
      seconds: of a call between steps, or of what a step with a prompt takes longer, by the tokens
        of the prompt, which increase.
      in_steps: which of the two.
    """

    step: float
    seconds: dict[int, float]
    in_steps: bool = False

    @property
    def largest(self) -> int:
        """The most tokens that are read in 1.1 steps, or within a step in half a step more.

        The least, if all take longer. A step behind a call takes at most 2.1 times as long as one
        without, a step with a prompt 1.5 times.
        """
        most = (_MOST_WITHIN if self.in_steps else _MOST_BETWEEN) * self.step
        least = min(self.seconds)
        return max(size for size, x in self.seconds.items() if size == least or x <= most)


@dataclasses.dataclass(eq=False)
class DraftChoice:
    """How many drafts per request the next step of an engine has, from what earlier steps showed.

    That is the number which pays best. What no step tries cannot be learned: so 1% of the time is
    saved up, and when it is enough for a step with the next larger number, that one is tried.

    Attributes:
      num_drafts: the numbers there are, increasing.
      rates: ``[K]``, after the steps that were read: how often draft k was accepted if those before
        it were, as in `AcceptanceEstimator`. Of trees, how often the draft of rank k was accepted.
      costs: what steps cost; None if that is not known: every step then has the largest number,
        or the least that is enough for the `limits`.
      saved: seconds that were saved up for a trial.
      limits: the most drafts that each running request may have; empty for any number.
      has_trees: whether drafts are trees.
      may_be_narrow: whether a step in which no request has a draft costs what one of the least
        number costs, as on CPUs with a drafter that often proposes nothing.
      is_fixed: whether `next` is the largest number, or the least that is enough, whatever is best.
      num_steps: steps with drafts that were read, faded.
      num_wide: those of them in which a request had a draft.

    Example:
      >>> costs = StepCosts(num_slots=8, num_drafts=(0, 2), seconds=(1.0, 4.0))
      >>> choice = DraftChoice((0, 2), rates=[0.5, 0.5], costs=costs)
      >>> choice.best, sum(choice.next() > 0 for _ in range(1000))  # one trial in 400 steps
      (0, 2)
    """

    num_drafts: tuple[int, ...]
    rates: Sequence[float] | np.ndarray
    costs: StepCosts | None = None
    saved: float = 0.0
    limits: Sequence[int] = ()
    has_trees: bool = False
    may_be_narrow: bool = False
    is_fixed: bool = False
    num_steps: float = 0.0
    num_wide: float = 0.0

    @classmethod
    def of(
        cls,
        num_slots: int,
        draft_budget: tuple[int, ...] | None,
        costs: StepCosts | None,
        estimator: AcceptanceEstimator | TreeEstimator | None,
    ) -> DraftChoice | None:
        """The choice for an engine; None without a `draft_budget`.

        Args:
          num_slots: of the engine.
          draft_budget: of the engine.
          costs: of its steps, or None.
          estimator: that has seen nothing; None without a `draft_budget`.

        Raises:
          TypeError: `costs` are not `StepCosts`.
          ValueError: `costs` are of another number of slots, or of other numbers of drafts.
        """
        check_type("step_costs", costs, StepCosts, None)
        wanted, came = (num_slots, draft_budget), costs and (costs.num_slots, costs.num_drafts)
        must = f"be of num_slots={num_slots} and draft_budget={draft_budget}"
        require(costs is None or came == wanted, "step_costs", must, came)
        if draft_budget is None or estimator is None:
            return None
        has_trees = isinstance(estimator, TreeEstimator)
        return cls(draft_budget, np.asarray(estimator.rates), costs, has_trees=has_trees)

    @property
    def best(self) -> int:
        """The number of drafts that pays best; 0 if speculation does not pay."""
        if self.costs is None:
            return self.num_drafts[self._last]
        survival = np.asarray(self.rates) if self.has_trees else np.cumprod(self.rates)
        share = 1.0
        if self.may_be_narrow:
            share = (self.num_wide + _PRIOR_STEPS) / (self.num_steps + _PRIOR_STEPS)
        return self.costs.best(survival * self._shares, share)

    @property
    def is_loss(self) -> bool:
        """Whether steps without drafts would emit more tokens per second than steps with some."""
        return self.best == 0 < self.num_drafts[-1]

    def learn(
        self, rates: Sequence[float] | np.ndarray, num_drafts: int | None, has_drafts: bool
    ) -> None:
        """Note what a step has shown.

        Args:
          rates: of the estimator, after the step.
          num_drafts: that its requests could have; None for the most.
          has_drafts: whether one of them had any.
        """
        self.rates = rates
        if num_drafts != 0:
            self.num_steps = _KEPT * self.num_steps + 1
            self.num_wide = _KEPT * self.num_wide + has_drafts

    @property
    def _shares(self) -> np.ndarray:
        """``[K]``, the share of the requests that may have draft i."""
        position = np.arange(len(self.rates))
        if not self.limits:
            return np.ones(position.shape)
        return np.mean(position[None, :] < np.array(self.limits)[:, None], axis=0)

    @property
    def _last(self) -> int:
        """The index of the least number that is enough for every request, or of the largest."""
        most = max(self.limits, default=self.num_drafts[-1])
        return int(np.searchsorted(self.num_drafts[:-1], most))

    def next(self) -> int:
        """The number of drafts of the next step."""
        if self.is_fixed:
            return self.num_drafts[self._last]
        at = self.num_drafts.index(self.best)
        if self.costs is None or at >= self._last:
            return self.num_drafts[at]
        self.saved += _TRIAL_SHARE * self.costs.seconds[at]
        if self.saved < self.costs.seconds[at + 1]:
            return self.num_drafts[at]
        self.saved = 0.0
        return self.num_drafts[at + 1]
