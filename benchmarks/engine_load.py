"""Requests for a whole engine, when they come, and what is counted of how they were served."""

from __future__ import annotations

import abc
import collections
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

ALPHABET = 64
"""Prompts have ids below this alone, and models are made that sample no others: so the last token
of a text has always occurred before, and a lookup drafts in every step."""

Event = tuple[int, int, bool]
"""What a step gave a request: its number, how many tokens, and whether it has ended."""

Log = list[tuple[float, list[Event]]]
"""Seconds from the beginning at which a step's tokens were there, and the step's events."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are to follow it."""

    prompt: list[int]
    budget: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens: of each prompt, the least and the most of a budget, and the room of a request."""

    prompt: int = 512
    least: int = 96
    most: int = 288
    max_length: int = 1024

    @property
    def mean(self) -> float:
        """The mean of a budget."""
        return (self.least + self.most) / 2

    def requests(self, count: int, seed: int) -> list[Request]:
        """Returns requests that depend on the arguments alone; budgets are uniform."""
        rng = np.random.default_rng(seed)
        prompts = rng.integers(ALPHABET, size=(count, self.prompt)).tolist()
        budgets = rng.integers(self.least, self.most, size=count, endpoint=True).tolist()
        return [Request(*each) for each in zip(prompts, budgets, strict=True)]


class Engine(abc.ABC):
    """An engine that serves requests, as the benchmark calls it.

    Attributes:
      has_arrivals: whether requests may come while others run.
      most_requests: that may run at a time.
    """

    has_arrivals = True
    most_requests: float = math.inf

    def prepare(self) -> None:  # noqa: B027
        """Is called before requests are served that are more or fewer than those before."""

    def close(self) -> None:  # noqa: B027
        """Is called at the end, so that no process stays."""

    @abc.abstractmethod
    def submit(self, number: int, request: Request) -> None:
        """Queues a request."""

    @abc.abstractmethod
    def step(self) -> list[Event]:
        """Goes on, until the next tokens are there."""

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether all requests have ended."""

    def serve(self, requests: Sequence[Request], due: Sequence[float] | None = None) -> Log:
        """Returns when each token was there; `due` has the second at which each request comes."""
        coming = collections.deque(enumerate(due or [0.0] * len(requests)))
        log: Log = []
        begin = time.perf_counter()
        while coming or not self.is_idle:
            now = time.perf_counter() - begin
            while coming and coming[0][1] <= now:
                number = coming.popleft()[0]
                self.submit(number, requests[number])
            if self.is_idle:
                time.sleep(max(coming[0][1] - now, 0.0))
            elif events := self.step():
                log.append((time.perf_counter() - begin, events))
        return log


def even_log(budgets: Sequence[int], first: float, last: float, steps: int) -> Log:
    """Returns a log of requests whose texts grow alike.

    Args:
      budgets: tokens of each request; what follows them is left out.
      first: when each request has its first token.
      last: when the largest budget is spent.
      steps: how many there are after the first token.
    """
    log: Log = []
    most, before = max(budgets), 0
    for step in range(steps + 1):
        length = 1 + round((most - 1) * step / steps)
        events = [
            (number, min(length, budget) - before, length >= budget)
            for number, budget in enumerate(budgets)
            if before < budget
        ]
        log.append((first + (last - first) * step / steps, events))
        before = length
    return log


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Returns the seconds at which requests come: `rate` a second, independently of each other."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return np.cumsum(gaps).tolist()


def firsts(log: Log) -> dict[int, float]:
    """Returns when each request had its first token."""
    found: dict[int, float] = {}
    for seconds, events in log:
        for number, _, _ in events:
            found.setdefault(number, seconds)
    return found


def ends(log: Log) -> dict[int, float]:
    """Returns when each request ended."""
    return {number: seconds for seconds, events in log for number, _, ended in events if ended}


def between(log: Log, begin: float, end: float) -> dict[str, float]:
    """Returns what happened after `begin` and not after `end`.

    Returns:
      ``tokens_per_second``; ``step_ms``, milliseconds per step; ``emitted``, tokens that a step
      gave each request that it gave any. NaN where there was no step.
    """
    steps = [events for seconds, events in log if begin < seconds <= end]
    if not steps:
        return dict.fromkeys(("tokens_per_second", "step_ms", "emitted"), math.nan)
    tokens = sum(count for events in steps for _, count, _ in events)
    return {
        "tokens_per_second": tokens / (end - begin),
        "step_ms": (end - begin) / len(steps) * 1e3,
        "emitted": tokens / sum(len(events) for events in steps),
    }


def batch_figures(log: Log) -> dict[str, Any]:
    """Returns what is counted of requests that came at once, as many as can run.

    Returns:
      ``prompts_s``, seconds until all had their first token. From then on: ``steady``, until the
      first ended, and ``with_ends``, until the last did; each as `between` gives it.
    """
    begin, last = max(firsts(log).values()), log[-1][0]
    return {
        "prompts_s": begin,
        "seconds": last,
        "steady": between(log, begin, min(ends(log).values())),
        "with_ends": between(log, begin, last),
    }


def step_ms(log: Log) -> list[float]:
    """Returns the milliseconds of each step after all requests had their first token."""
    begin = max(firsts(log).values())
    times = [seconds for seconds, _ in log if seconds >= begin]
    return (np.diff(times) * 1e3).round(3).tolist()


def saturated_tokens(log: Log, batch: int) -> float:
    """Returns tokens a second while all `batch` places were taken and others waited for one."""
    begun = sorted(firsts(log).values())
    return between(log, begun[batch - 1], begun[-1])["tokens_per_second"]


def arrival_figures(log: Log, due: Sequence[float], requests: Sequence[Request]) -> dict[str, Any]:
    """Returns what requests waited for that came at the seconds `due`.

    Returns:
      ``tokens_per_second`` of all, from the first that came to the last that ended; percentiles of
      ``first_ms``, from coming to the first token, and of ``token_ms``, per token after the first
      step's; and the seconds that these are made of.
    """
    begun, ended, early = firsts(log), ends(log), {}
    for _, events in log:
        for number, count, _ in events:
            early.setdefault(number, count)
    numbers = range(len(requests))
    first_ms = [(begun[i] - due[i]) * 1e3 for i in numbers]
    token_ms = [
        (ended[i] - begun[i]) * 1e3 / (requests[i].budget - early[i])
        for i in numbers
        if requests[i].budget > early[i]
    ]
    tokens = sum(request.budget for request in requests)
    return {
        "tokens_per_second": tokens / (log[-1][0] - due[0]),
        "first_ms": percentiles(first_ms),
        "token_ms": percentiles(token_ms),
        "samples": {
            name: [round(seconds[i], 5) for i in numbers]
            for name, seconds in (("due", due), ("first", begun), ("end", ended))
        },
    }


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile."""
    p50, p99 = np.percentile(samples, (50, 99)).tolist()
    return {"p50": p50, "p99": p99}
