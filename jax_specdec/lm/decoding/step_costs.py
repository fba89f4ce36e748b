"""Costs of steps by their number of drafts, of prompts by their tokens, and which to choose.

`stopwatch` measures `StepCosts` and `ChunkCosts` on the device. `EngineDriver` asks a `DraftChoice`
for the number of drafts of each step (`next`), and gives it what each step that was read has shown
(`learn`); `warm_up` takes the size of chunks from `ChunkCosts.largest`. Here nothing calls a
program.
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_specdec._src.base.arrays import (
    check_increasing,
    check_int,
    check_type,
    host_numbers,
    named_entries,
    require,
)
from jax_specdec._src.drafts.rates import DraftRates

_TRIAL_SHARE = 0.01
"""The share of the time that trials of more drafts may take."""
_KEPT = 0.99
"""What remains of the past after a step that could have drafts."""
_PRIOR_STEPS = 2.0
"""Made-up steps in which a request had a draft, added to those that were read."""
_MOST_BETWEEN = 1.1
"""What it may cost to read a prompt between two steps, in steps."""
_MOST_WITHIN = 0.5
"""What a step may take longer because it reads a prompt, in steps."""


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The seconds that a step of an engine takes, by the number of drafts per request.

    Every slot takes part in every pass of the target, with as many rows as the others. So with k
    drafts per request, and ``a_i`` the chance that drafts 0 .. i are all accepted, the engine emits
    ``(1 + a_0 + ... + a_{k-1}) / seconds(k)`` tokens per second and request: a draft that is
    accepted is a token, and so is the recovered or bonus token of every step. The best k is taken
    from what earlier steps have shown, before the drafts of a step are drawn: any rule may be used
    for that, and the output stays lossless.

    Attributes:
      num_slots: S of the engine that was measured.
      draft_budget: numbers of drafts per request, increasing, as those of the engine.
      seconds: of a step with each of them, above 0.

    Raises:
      TypeError: a number of drafts, or of slots, is not an int, or `seconds` are no numbers.
      ValueError: the lists have different lengths, `draft_budget` does not increase, or `seconds`
        are not finite and positive.

    Example:
      >>> costs = StepCosts(num_slots=8, draft_budget=(0, 2, 4), seconds=(1.0, 1.2, 2.0))
      >>> costs.best([0.9, 0.8, 0.7, 0.6]), costs.best([0.1, 0.01, 0.001, 0.0])
      (2, 0)
    """

    num_slots: int
    draft_budget: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check_int("num_slots", self.num_slots)
        # Lists of a JSON file become tuples: costs are compared with what the engine has.
        budget = check_increasing("draft_budget", self.draft_budget, 0)
        object.__setattr__(self, "draft_budget", budget)
        entries = named_entries("seconds", self.seconds)
        for name, x in entries:
            require(isinstance(x, numbers.Real), name, "be a number", x, error=TypeError)
        seconds = tuple(float(x) for _, x in entries)
        if len(seconds) != len(self.draft_budget) or not all(0 < x < np.inf for x in seconds):
            raise ValueError(
                f"seconds must hold a positive number for each of draft_budget={self.draft_budget}"
                f", but they are {seconds}"
            )
        object.__setattr__(self, "seconds", seconds)

    def best(self, unconditional_rates: Sequence[float] | np.ndarray, share: float = 1.0) -> int:
        """Returns the number of drafts with the most expected tokens per second.

        Args:
          unconditional_rates: ``[K]``, the chance that draft i, and so each before it, is accepted,
            K at least the largest of `draft_budget`. Of a tree, that the draft of rank i is
            accepted.
          share: of the steps that cost what `seconds` says. In the others no request has a draft,
            and they cost what the least number does.

        Returns:
          A number of `draft_budget`, of equals the least; 0 if speculation does not pay.

        Raises:
          TypeError: rates that are no numbers, or `share` is none.
          ValueError: fewer rates than the largest of `draft_budget`.
        """
        # [K+1], by the number of drafts k: 1 + a_0 + ... + a_{k-1} tokens per step and request
        rates = host_numbers("unconditional_rates", unconditional_rates)
        most = self.draft_budget[-1]
        must = f"have at least {most} entries, the largest number of draft_budget"
        require(len(rates) >= most, "unconditional_rates", must, unconditional_rates)
        require(isinstance(share, numbers.Real), "share", "be a number", share, error=TypeError)
        tokens = 1 + np.concatenate([[0.0], np.cumsum(rates)])
        # From here on an entry for each of `draft_budget`: seconds of the mean step, of which
        # `share` are as wide as that number, and the others as the least.
        least = self.seconds[0]
        seconds = least + share * (np.array(self.seconds) - least)
        # [K+1] -> one for each of `draft_budget`; `argmax` takes the first, so the least, of equals
        tokens_per_second = tokens[list(self.draft_budget)] / seconds
        return self.draft_budget[int(np.argmax(tokens_per_second))]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, which `load` reads.

        Raises:
          TypeError: not a path.
        """
        check_type("path", path, str, os.PathLike)
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepCosts:
        """Reads what `save` wrote.

        Raises:
          TypeError: not a path.
          ValueError: the file holds something else.
        """
        check_type("path", path, str, os.PathLike)
        text = Path(path).read_text()
        # What `save` did not write is refused by one of these calls, or by `__post_init__`.
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"path must be a file that save wrote, but {os.fspath(path)} is not: {error}"
            ) from error


class ChunkCosts(NamedTuple):
    """The seconds of a step of an engine, and of reading a part of a prompt with both models.

    Attributes:
      step: seconds of a step without a prompt, all slots busy.
      seconds: by the tokens of the part, which increase: those of a call between steps, or those
        that a step which reads it takes longer.
      in_steps: whether parts are read in steps, and not between them.
    """

    step: float
    seconds: dict[int, float]
    in_steps: bool = False

    @property
    def largest(self) -> int:
        """The most tokens that are read in 1.1 steps, or within a step in half a step more.

        The least, if all take longer. So running requests wait for their next tokens at most 2.1
        times as long as without a prompt (a call, then a step), or 1.5 times (one longer step).
        """
        limit = self.step * (_MOST_WITHIN if self.in_steps else _MOST_BETWEEN)
        # `seconds` has an entry for each size: the least one stays where all take longer.
        least = min(self.seconds)
        return max(size for size, cost in self.seconds.items() if size == least or cost <= limit)


@dataclasses.dataclass(eq=False)
class DraftChoice:
    """The choice of how many drafts per request the next step of an engine has.

    That is the number which pays best by what earlier steps have shown. What no step tries cannot
    be learned: so 1% of the time is saved up, and when it is enough for a step with the next larger
    number, that one is tried.

    Attributes:
      draft_budget: the numbers there are, increasing.
      rates: ``[K]``, after the steps that were read: how often draft k was accepted if those before
        it were. Of trees, how often the draft of rank k was accepted.
      costs: what steps cost; None if that is not known: every step then has the largest number,
        or the least that is enough for `max_drafts`.
      saved: seconds that were saved up for a trial.
      max_drafts: the most drafts that each running request may have; empty for any number.
      has_trees: whether drafts are trees.
      may_be_narrow: whether a step in which no request has a draft costs what one of the least
        number costs, as on CPUs with a drafter that often proposes nothing.
      is_fixed: whether `next` is the largest number, or the least that is enough, whatever is best.
      num_steps: steps that were read and could have drafts, faded.
      num_wide: those of them in which a request had one.

    Example:
      >>> costs = StepCosts(num_slots=8, draft_budget=(0, 2), seconds=(1.0, 4.0))
      >>> choice = DraftChoice((0, 2), rates=[0.5, 0.5], costs=costs)
      >>> choice.best, sum(choice.next() > 0 for _ in range(1000))  # one trial in 400 steps
      (0, 2)
    """

    draft_budget: tuple[int, ...]
    rates: Sequence[float] | np.ndarray
    costs: StepCosts | None = None
    saved: float = 0.0
    max_drafts: Sequence[int] = ()
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
        rates: DraftRates | None,
    ) -> DraftChoice | None:
        """Returns the choice for an engine; None without a `draft_budget`.

        Args:
          costs: of its steps, or None.
          rates: that have seen nothing; None without a `draft_budget`.

        Raises:
          TypeError: `costs` are not `StepCosts`.
          ValueError: `costs` are of another number of slots, or of other numbers of drafts.
        """
        check_type("step_costs", costs, StepCosts, None)
        if costs is not None:
            measured = (costs.num_slots, costs.draft_budget)
            must = f"be of num_slots={num_slots} and draft_budget={draft_budget}"
            require(measured == (num_slots, draft_budget), "step_costs", must, measured)
        if draft_budget is None or rates is None:
            return None
        return cls(draft_budget, np.asarray(rates.values), costs, has_trees=rates.has_trees)

    @property
    def best(self) -> int:
        """The number of drafts that pays best; 0 if speculation does not pay."""
        if self.costs is None:
            return self.draft_budget[self._enough]
        # [K]: the chance that draft i is accepted, of a request that may have it. A draft of a
        # chain needs all before it, c_0 * ... * c_i; rates of ranks are such chances already.
        accepted = np.asarray(self.rates) if self.has_trees else np.cumprod(self.rates)
        # [K]: of any request. Where `max_drafts` leaves fewer, a request gains as much less.
        if self.max_drafts:
            draft = np.arange(len(accepted))
            may_have = draft[None, :] < np.array(self.max_drafts)[:, None]  # [R, K]
            accepted = accepted * np.mean(may_have, axis=0)
        # Of steps that may have drafts, those in which somebody has one, faded. Two made-up ones
        # keep the share near 1 until there are some.
        share = 1.0
        if self.may_be_narrow:
            share = (self.num_wide + _PRIOR_STEPS) / (self.num_steps + _PRIOR_STEPS)
        return self.costs.best(accepted, share)

    @property
    def is_loss(self) -> bool:
        """Whether steps without drafts would emit more tokens per second than steps with some."""
        return self.best == 0 < self.draft_budget[-1]

    def learn(
        self, rates: Sequence[float] | np.ndarray, num_drafts: int | None, has_drafts: bool
    ) -> None:
        """Notes what a step has shown.

        Args:
          rates: after the step.
          num_drafts: that its requests could have; None for the most.
          has_drafts: whether one of them had any.
        """
        self.rates = rates
        # A step that could have none says nothing about how often there is one.
        if num_drafts != 0:
            self.num_steps = _KEPT * self.num_steps + 1
            self.num_wide = _KEPT * self.num_wide + has_drafts

    def forget(self, rates: Sequence[float] | np.ndarray) -> None:
        """Forgets what steps have shown; `rates` are those before the first."""
        self.rates = rates
        self.num_steps = self.num_wide = 0.0

    @property
    def _enough(self) -> int:
        """The index of the least number that is enough for every request, or of the largest."""
        most_drafts = max(self.max_drafts, default=self.draft_budget[-1])
        # The search leaves out the last number, and so ends at its index where none is enough.
        return int(np.searchsorted(self.draft_budget[:-1], most_drafts))

    def next_for(self, max_drafts: Sequence[int]) -> int:
        """Returns what `next` does, for a step whose requests may have so many drafts each."""
        self.max_drafts = max_drafts
        return self.next()

    def next(self) -> int:
        """Returns the number of drafts of the next step, and saves up or spends time for trials."""
        if self.is_fixed:
            return self.draft_budget[self._enough]
        # The best, by what is known. More drafts than that are tried now and then, unless no
        # request may have more, or nobody knows what a trial costs.
        at = self.draft_budget.index(self.best)
        if self.costs is None or at >= self._enough:
            return self.draft_budget[at]
        # 1% of this step's seconds is saved up; a trial spends those of a whole larger step.
        self.saved += _TRIAL_SHARE * self.costs.seconds[at]
        if self.saved < self.costs.seconds[at + 1]:
            return self.draft_budget[at]
        self.saved = 0.0
        return self.draft_budget[at + 1]
