"""`ServingStats`: how busy an engine was, and how long its requests waited; and `Histogram`.

Both are immutable, of the host alone: `HostState` has a `ServingStats` and replaces it with every
step that is read (`after_step`) and every request that ends (`after_ends`). Readers subtract two
readings of `EngineDriver.serving_stats`. `PrometheusExporter` and `log_line` show them.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

from jax_specdec._src.base.arrays import require
from jax_specdec._src.stats.acceptance import check_seconds, since

END_REASONS = ("length", "stop", "failed", "cancelled")
"""Why requests end: those of `RequestUpdate.finish_reason`, and `EngineDriver.cancel`."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of times, by their length; the buckets are those of Prometheus.

    Attributes:
      counts: 20 counts; entry i counts times up to ``Histogram.bounds[i]`` seconds that are longer
        than the bound before it, the last one all that are longer than the last bound.
      total_seconds: all times together.

    Example:
      >>> times = Histogram().observe([(0.003, 2), (0.4, 1)])
      >>> times.count, times.mean
      (3, 0.1353)
    """

    bounds: ClassVar[tuple[float, ...]] = tuple(
        float(f"{digit}e{power}") for power in range(-4, 3) for digit in (1, 2, 5)
    )[:19]  # 0.0001, 0.0002, 0.0005, ... 100; 200 and 500 are cut off

    counts: tuple[int, ...] = (0,) * 20
    total_seconds: float = 0.0

    def observe(self, times: Iterable[tuple[float, int]]) -> Histogram:
        """Returns the histogram with more times.

        Args:
          times: seconds, and how often they came.
        """
        counts = [*self.counts]
        total = self.total_seconds
        for seconds, count in times:
            # Prometheus: a bucket holds what is at most its bound
            counts[bisect.bisect_left(self.bounds, seconds)] += count
            total += seconds * count
        return Histogram(tuple(counts), total)

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Returns the times between two readings."""
        return since(earlier, self)

    @property
    def count(self) -> int:
        """How many times there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Seconds of the mean time; 0 without any."""
        return self.total_seconds / max(self.count, 1)


@dataclasses.dataclass(frozen=True)
class ServingStats:
    """Counts of how busy an `EngineDriver` kept its engine, summed since the driver was made.

    The difference of two readings covers the interval between them.

    Attributes:
      num_slots: S.
      num_running: requests in a slot when this was read.
      num_queued: requests that waited when this was read.
      num_steps: steps whose results were read.
      num_busy_slots: requests that took part in those steps, summed over steps.
      num_steps_ahead: steps that were under way when one was read, summed over steps.
      host_wait_seconds: time that the host waited for results.
      num_admitted: requests that have taken part in a step.
      queue_seconds: time that they had waited for their first slot, summed over requests.
      num_failed_calls: calls that failed on the device.
      time_to_first_token_seconds: from `EngineDriver.submit` until the host had the first token.
      inter_token_latency_seconds: time between two tokens of a request: n tokens of one step count
        n times, each with an n-th of the time since the step before.
      num_prompt_tokens: tokens of the prompts of admitted requests.
      num_ended: requests that have ended by "length"; by "stop", as at a stop string, by a call of
        `EngineDriver.finish`; as "failed"; and by a call of `EngineDriver.cancel`, as when a client
        leaves.
      weights_version: how often `EngineDriver.set_params` had changed the weights by then.
      num_reused_tokens: of `num_prompt_tokens`, those that were not read, because an earlier
        request had left them in a slot; see `Engine.prefix_caching`.

    Example:
      >>> stats = ServingStats(
      ...     num_slots=8, num_running=6, num_queued=1, num_steps=4, num_busy_slots=24,
      ...     num_steps_ahead=4, host_wait_seconds=0.006, num_admitted=2, queue_seconds=0.05)
      >>> print(stats.log_line(seconds=0.5))
      Serving metrics: Running: 6, Queued: 1, Steps: 8.0/s, Slots busy: 6.0 of 8, ...
    """

    num_slots: int
    num_running: int = 0
    num_queued: int = 0
    num_steps: int = 0
    num_busy_slots: int = 0
    num_steps_ahead: int = 0
    host_wait_seconds: float = 0.0
    num_admitted: int = 0
    queue_seconds: float = 0.0
    num_failed_calls: int = 0
    time_to_first_token_seconds: Histogram = Histogram()
    inter_token_latency_seconds: Histogram = Histogram()
    num_prompt_tokens: int = 0
    num_ended: tuple[int, ...] = (0, 0, 0, 0)
    weights_version: int = 0
    num_reused_tokens: int = 0

    def after_step(
        self,
        *,
        num_busy: int,
        num_ahead: int,
        waited: float,
        prompt_tokens: int,
        reused_tokens: int,
        queued: Sequence[float],
        first: Iterable[tuple[float, int]],
        between: Iterable[tuple[float, int]],
    ) -> ServingStats:
        """Returns the statistics with one more step.

        Args:
          num_busy: requests that took part in it; 0 changes nothing.
          num_ahead: steps that are under way.
          waited: seconds that the host waited for it.
          prompt_tokens: of requests whose first step it was.
          reused_tokens: of these, those that were not read.
          queued: seconds in the queue, of the same requests.
          first: for `time_to_first_token_seconds`.
          between: for `inter_token_latency_seconds`.
        """
        # A step that nobody takes part in, as when programs are warmed up, does not count.
        if not num_busy:
            return self
        return dataclasses.replace(
            self,
            num_steps=self.num_steps + 1,
            num_busy_slots=self.num_busy_slots + num_busy,
            num_steps_ahead=self.num_steps_ahead + num_ahead,
            host_wait_seconds=self.host_wait_seconds + waited,
            num_admitted=self.num_admitted + len(queued),
            num_prompt_tokens=self.num_prompt_tokens + prompt_tokens,
            num_reused_tokens=self.num_reused_tokens + reused_tokens,
            queue_seconds=self.queue_seconds + sum(queued),
            time_to_first_token_seconds=self.time_to_first_token_seconds.observe(first),
            inter_token_latency_seconds=self.inter_token_latency_seconds.observe(between),
        )

    def after_ends(self, reasons: Iterable[str | None]) -> ServingStats:
        """Returns the statistics with more ended requests.

        Args:
          reasons: of `END_REASONS`, one for each request; None for one that has not ended.
        """
        # None is counted, too, and read by nobody.
        more = collections.Counter(reasons)
        counts = zip(self.num_ended, END_REASONS, strict=True)
        return dataclasses.replace(self, num_ended=tuple(n + more[reason] for n, reason in counts))

    def __sub__(self, earlier: ServingStats) -> ServingStats:
        """Returns the interval between two readings of one driver.

        What is no sum is as in `self`: requests that run and wait, and the version.

        Args:
          earlier: the first reading.

        Raises:
          ValueError: the two have different numbers of slots, or a sum is larger in `earlier`.
        """
        fits = earlier.num_slots == self.num_slots
        require(fits, "earlier.num_slots", f"be {self.num_slots}", earlier.num_slots)
        # these are no sums: nothing is subtracted from them
        sums = dataclasses.replace(
            earlier, num_slots=0, num_running=0, num_queued=0, weights_version=0
        )
        return since(sums, self)

    @property
    def mean_busy_slots(self) -> float:
        """Busy slots per step; 0 without steps."""
        return self.num_busy_slots / max(self.num_steps, 1)

    @property
    def mean_steps_ahead(self) -> float:
        """Steps ahead per step; 0 without steps."""
        return self.num_steps_ahead / max(self.num_steps, 1)

    @property
    def mean_host_wait(self) -> float:
        """Seconds per step that the host waited; near 0 where the device waits for the host."""
        return self.host_wait_seconds / max(self.num_steps, 1)

    @property
    def mean_queue_time(self) -> float:
        """Seconds that a request waited for its first slot; 0 without requests."""
        return self.queue_seconds / max(self.num_admitted, 1)

    def log_line(self, seconds: float) -> str:
        """Returns one line for a server's log; `AcceptanceStats.log_line` returns the other.

        Args:
          seconds: length of the interval that these statistics cover.

        Raises:
          ValueError: `seconds` is not positive.
        """
        check_seconds(seconds)
        return (
            f"Serving metrics: Running: {self.num_running}, Queued: {self.num_queued},"
            f" Steps: {self.num_steps / seconds:.1f}/s,"
            f" Slots busy: {self.mean_busy_slots:.1f} of {self.num_slots},"
            f" Steps ahead: {self.mean_steps_ahead:.1f},"
            f" Host wait: {self.mean_host_wait * 1e3:.2f} ms/step,"
            f" Admitted: {self.num_admitted} requests,"
            f" Queue time: {self.mean_queue_time * 1e3:.1f} ms,"
            f" Time to first token: {self.time_to_first_token_seconds.mean * 1e3:.1f} ms,"
            f" Time between tokens: {self.inter_token_latency_seconds.mean * 1e3:.2f} ms,"
            f" Failed calls: {self.num_failed_calls}"
        )
