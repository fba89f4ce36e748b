"""Acceptance, counted on the device or from step records."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_specdec._src.base.arrays import (
    Sizes,
    as_int32,
    check_outside_jit,
    check_tree,
    check_type,
    host_int32,
    pytree,
    require,
)
from jax_specdec._src.base.config import check_num_speculative_tokens
from jax_specdec._src.base.types import Integers
from jax_specdec._src.stats.emitted import StepRecord

_Sums = TypeVar("_Sums")


@pytree(words="[2, 3K+3] uint32")
@dataclasses.dataclass(frozen=True)
class AcceptanceCounters:
    """Counts of verifications on the device, in one small array, so that counting is one fusion.

    Carry it in the state of a serving loop, `update` it with every verification, and read it now
    and then with `AcceptanceStats.from_counters`. Counts have 64 bits, in two halves because JAX's
    integers have 32 bits by default. They never need a reset: at a billion tokens a second they
    last 580 years.

    Attributes:
      words: ``[2, 3K+3]`` uint32, the low and the high halves of these counts: drafts offered,
        reached and accepted at each of K positions, tokens, verifications, and fallbacks; see
        `AcceptanceStats`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> count = jax.jit(AcceptanceCounters.update)
      >>> counters = count(
      ...     AcceptanceCounters.create(2),
      ...     num_proposed=jnp.array([2, 2, 1]), num_accepted=jnp.array([2, 0, 1]),
      ...     num_emitted=jnp.array([3, 1, 2]))
      >>> AcceptanceStats.from_counters(counters).accepted_per_position
      (2, 1)
    """

    words: jax.Array

    @classmethod
    def create(cls, num_speculative_tokens: int) -> AcceptanceCounters:
        """Returns counters that are all 0.

        Args:
          num_speculative_tokens: K, 1 to 1024.

        Raises:
          TypeError: K is not an int.
          ValueError: K is out of range.
        """
        k = check_num_speculative_tokens(num_speculative_tokens)
        return cls(jnp.zeros((2, 3 * k + 3), jnp.uint32))

    def update(
        self,
        *,
        num_proposed: Integers,
        num_accepted: Integers,
        num_emitted: Integers,
        num_kept: Integers | None = None,
        num_fallbacks: ArrayLike = 0,
    ) -> AcceptanceCounters:
        """Adds one verification of a batch. Pure; for use inside jit.

        A request that emitted nothing (an empty slot, a row with NaN) is not counted. But for
        `num_kept`, give the numbers of the verification itself, before stop tokens and budgets cut
        its tokens, or the rates are biased.

        Args:
          num_proposed: ``[B]`` int32, drafts offered to each request: the ids in range before the
            first -1.
          num_accepted: ``[B]`` int32, as `rejection_sample` returns it.
          num_emitted: ``[B]`` int32, as `rejection_sample` returns it.
          num_kept: ``[B]`` int32, what a stop token or the budget left of these, as `truncate`
            returns it; None for all of them.
          num_fallbacks: ``[]`` int32, requests whose drafts were verified one-hot because they
            had no valid draft distribution.

        Returns:
          The new counters.

        Raises:
          TypeError: an argument does not hold integers.
          ValueError: shapes that do not fit.
        """
        check_tree("counters", self, (AcceptanceCounters,), {})
        # [B] each: the first says what B is
        sizes: Sizes = {}
        num_emitted = as_int32("num_emitted", num_emitted, "[B]", sizes)
        num_proposed = as_int32("num_proposed", num_proposed, "[B]", sizes)
        num_accepted = as_int32("num_accepted", num_accepted, "[B]", sizes)
        # Where nothing says what was kept, all that was emitted is.
        num_kept = num_emitted if num_kept is None else num_kept
        num_kept = as_int32("num_kept", num_kept, "[B]", sizes)
        num_fallbacks = as_int32("num_fallbacks", num_fallbacks, "[]", sizes)
        # [B, K] three times and [B, 1] twice -> [B, 3K+2], a column for each count
        k = self.words.shape[1] // 3 - 1
        columns = _columns(k, num_proposed, num_accepted, num_emitted, num_kept)
        counts = jnp.concatenate([one.astype(jnp.int32) for one in columns], axis=1)
        # [3K+3]: what the batch adds to each count, that of fallbacks last
        sums = counts.sum(axis=0, dtype=jnp.int32)
        added = jnp.append(sums, num_fallbacks).astype(jnp.uint32)
        # A sum of uint32 that wraps around is less than what was added: 1 more of the high half.
        low = self.words[0] + added
        carry = (low < added).astype(jnp.uint32)
        return AcceptanceCounters(jnp.stack([low, self.words[1] + carry]))


def _columns(k: int, proposed: Any, accepted: Any, emitted: Any, kept: Any) -> list[Any]:
    """Returns what verifications add to each count but that of fallbacks, as ``[..., n]`` each."""
    # [1, K], and [..., 1] of what belongs to a verification as a whole
    position = np.arange(k, dtype=np.int32)[None, :]
    proposed, accepted, kept = (x[..., None] for x in (proposed, accepted, kept))
    # [..., 1]: an empty slot, or a bad row, emits nothing
    is_verified = emitted[..., None] > 0
    # [..., K]: a draft is reached if those before it were accepted, and accepted if it was too
    offered = (proposed > position) & is_verified
    reached = offered & (accepted >= position)
    return [offered, reached, offered & (accepted > position), kept, is_verified]


@dataclasses.dataclass(frozen=True)
class AcceptanceStats:
    """How verification went, summed over steps and requests; on the host.

    Drafts are counted before stop tokens and budgets cut tokens, so that the rates are not biased.
    `num_tokens` are those that were left. Everything else follows from the counts. The difference
    of two readings covers the interval between them. Where drafts are trees, position i is depth
    i + 1, and a verification is offered drafts up to the depth of its tree.

    Two lengths describe a step. `mean_acceptance_length` covers verifications that had drafts and
    says how good the drafts were. `tokens_per_target_pass` covers all verifications and says what
    drafting gained: it is lower for a drafter that often proposes nothing, such as a lookup.

    Attributes:
      offered_per_position: K counts; entry i counts verifications that were offered draft i.
      reached_per_position: K counts; entry i counts those that also accepted drafts ``0..i-1``.
      accepted_per_position: K counts; entry i counts those that accepted drafts ``0..i``.
      num_tokens: tokens of all requests, without those that a stop token or the budget cut off.
      num_verifications: passes of the target, summed over the requests that took part in each and
        emitted tokens, with drafts or without.
      num_fallbacks: requests verified one-hot because they had no valid draft distribution, summed
        over steps; 0 from `from_steps`, since records do not hold it.
      weights_version: how often a serving loop had changed the weights before it began to count.

    Example:
      >>> import numpy as np
      >>> steps = StepRecord(
      ...     token_ids=np.array([[[5, 6, 7]], [[8, -1, -1]]]), num_kept=np.array([[3], [1]]),
      ...     num_proposed=np.array([[2], [2]]), num_accepted=np.array([[2], [0]]),
      ...     num_emitted=np.array([[3], [1]]))
      >>> stats = AcceptanceStats.from_steps(steps)
      >>> stats.mean_acceptance_length, stats.tokens_per_target_pass, stats.unconditional_rates
      (2.0, 2.0, (0.5, 0.5))
      >>> print(stats.log_line(seconds=0.5))
      SpecDecoding metrics: Mean acceptance length: 2.00, Tokens per target pass: 2.00, ...
    """

    offered_per_position: tuple[int, ...]
    reached_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    num_tokens: int
    num_verifications: int
    num_fallbacks: int = 0
    weights_version: int = 0

    @classmethod
    def from_counters(cls, counters: AcceptanceCounters) -> AcceptanceStats:
        """Reads counters: waits for the device and copies a few bytes.

        Args:
          counters: outside jit; they are not changed.

        Returns:
          The statistics since the counters were created.

        Raises:
          TypeError: `counters` is not an `AcceptanceCounters`, or is traced.
          ValueError: its array has another shape.
        """
        check_outside_jit("from_counters", counters=counters)
        check_tree("counters", counters, (AcceptanceCounters,), {})
        # [2, 3K+3] -> [3K+3] of 64 bits, as Python's ints, which have any size
        low, high = jax.device_get(counters.words).astype(object)
        return cls._of((low + (high << 32)).tolist())

    @classmethod
    def from_steps(cls, steps: StepRecord) -> AcceptanceStats:
        """Sums up records ``[S, B, ...]``.

        Args:
          steps: one record, of all steps stacked along leading axes.

        Returns:
          The statistics.

        Raises:
          TypeError: `steps` is not a `StepRecord` of integers, or is traced.
          ValueError: shapes that do not fit.
        """
        check_type("steps", steps, StepRecord)
        check_outside_jit("from_steps", steps=steps)
        ids = host_int32("steps.token_ids", steps.token_ids)
        require(ids.ndim, "steps.token_ids", "be an array [..., K+1]", ids)
        # [S, B] each
        names = ("num_proposed", "num_accepted", "num_emitted", "num_kept")
        given = {name: host_int32(f"steps.{name}", getattr(steps, name)) for name in names}
        for name, counts in given.items():
            of_ids = list(ids.shape[:-1])
            must = f"be an array {of_ids}, as token_ids {list(ids.shape)} have"
            require(list(counts.shape) == of_ids, f"steps.{name}", must, counts)
        # [S, B, K] three times and [S, B, 1] twice
        columns = _columns(ids.shape[-1] - 1, *given.values())
        # [n] each: summed over steps and requests. Records hold no fallbacks.
        sums = [one.reshape(-1, one.shape[-1]).sum(axis=0) for one in columns]
        return cls._of([*np.concatenate(sums).tolist(), 0])

    @classmethod
    def _of(cls, counts: list[int]) -> AcceptanceStats:
        """Returns the statistics of 3K + 3 counts, in the order of `AcceptanceCounters.words`."""
        k = len(counts) // 3 - 1
        # K offered, K reached, K accepted, then the three that are not by position
        offered, reached, accepted = (tuple(counts[i * k : (i + 1) * k]) for i in range(3))
        return cls(offered, reached, accepted, *counts[3 * k :])

    def __sub__(self, earlier: AcceptanceStats) -> AcceptanceStats:
        """Returns the interval between two readings of the same counters.

        If the weights have changed since the first, the interval begins with that: all of `self`.

        Args:
          earlier: the first reading.

        Raises:
          TypeError: `earlier` is not an `AcceptanceStats`.
          ValueError: the two have different K, or a count is larger in `earlier`.
        """
        check_type("earlier", earlier, AcceptanceStats)
        k = len(self.offered_per_position)
        given = len(earlier.offered_per_position)
        require(given == k, "earlier's K", f"be {k}", given)
        if earlier.weights_version != self.weights_version:
            return self
        # Of the version nothing is taken away: it is no sum.
        return since(dataclasses.replace(earlier, weights_version=0), self)

    @property
    def num_drafts(self) -> int:
        """The number of verifications of a request that were offered at least one draft."""
        return self.offered_per_position[0]

    @property
    def num_draft_tokens(self) -> int:
        """The number of drafts offered."""
        return sum(self.offered_per_position)

    @property
    def num_accepted_tokens(self) -> int:
        """The number of drafts accepted."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """``1 + accepted / num_drafts``: tokens of a verification that had drafts; 1 without any.

        The recovered or bonus token counts, and tokens that a stop token or the budget cut off.
        Verifications without drafts do not, as in vLLM. Where nothing was drafted it says nothing:
        log lines and tables show a dash.
        """
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def tokens_per_target_pass(self) -> float:
        """``num_tokens / num_verifications``; 0 where nothing was verified.

        Tokens of one request per pass of the target that it took part in: plain decoding has 1.
        """
        return self.num_tokens / max(self.num_verifications, 1)

    @property
    def draft_acceptance_rate(self) -> float:
        """``accepted / drafts``; 0 where nothing was drafted."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def unconditional_rates(self) -> tuple[float, ...]:
        """``[K]``, of the verifications offered draft i, the share that accepted ``0..i``."""
        return _rates(self.accepted_per_position, self.offered_per_position)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """``[K]``, of those that also accepted the drafts before i, the share that accepted i.

        Where every verification was offered K drafts, this is ``r[i] / r[i-1]`` of
        `unconditional_rates`. It has counts of its own, so it stays in [0, 1] where it is not.
        """
        return _rates(self.accepted_per_position, self.reached_per_position)

    @property
    def length_text(self) -> str:
        """`mean_acceptance_length` with two decimals; a dash where nothing was drafted."""
        return f"{self.mean_acceptance_length:.2f}" if self.num_drafts else "-"

    def log_line(self, seconds: float) -> str:
        """Returns one line for a server's log, in vLLM's words where vLLM has them.

        The rates per position are `unconditional_rates`, and the line says so.

        Args:
          seconds: length of the interval that these statistics cover.

        Raises:
          ValueError: `seconds` is not positive.
        """
        check_seconds(seconds)
        # K rates; the line says which of the two kinds they are
        rates = ", ".join(f"{rate:.3f}" for rate in self.unconditional_rates)
        return (
            "SpecDecoding metrics:"
            f" Mean acceptance length: {self.length_text},"
            f" Tokens per target pass: {self.tokens_per_target_pass:.2f},"
            f" Accepted throughput: {self.num_accepted_tokens / seconds:.2f} tokens/s,"
            f" Drafted throughput: {self.num_draft_tokens / seconds:.2f} tokens/s,"
            f" Accepted: {self.num_accepted_tokens} tokens,"
            f" Drafted: {self.num_draft_tokens} tokens,"
            f" Per-position acceptance rate (unconditional): {rates},"
            f" Avg Draft acceptance rate: {self.draft_acceptance_rate:.1%},"
            f" Fallbacks: {self.num_fallbacks}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts and what follows from them, in types that JSON has."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in (*names, *_DERIVED)}
        # JSON has no tuples.
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def since(earlier: _Sums, later: _Sums) -> _Sums:
    """Returns what was added between two readings: numbers, tuples, or dataclasses of these.

    Raises:
      ValueError: a number is larger in `earlier`.
    """
    # One call for each entry of a tuple and each field of a dataclass, down to numbers.
    both: Any = (earlier, later)
    if isinstance(later, tuple):
        added: Any = tuple(map(since, *both))
    elif dataclasses.is_dataclass(later) and not isinstance(later, type):
        names = [field.name for field in dataclasses.fields(later)]
        sums = {name: since(*(getattr(x, name) for x in both)) for name in names}
        added = dataclasses.replace(later, **sums)
    else:
        require(both[1] >= both[0], "earlier", "hold no larger sums", both[0])
        added = both[1] - both[0]
    return cast(_Sums, added)


def check_seconds(seconds: float) -> None:
    """Checks the length of an interval.

    Raises:
      TypeError: not a number.
      ValueError: not positive.
    """
    is_number = isinstance(seconds, (int, float, np.number))
    require(is_number, "seconds", "be a number", seconds, error=TypeError)
    require(seconds > 0, "seconds", "be positive", seconds)


# What `to_dict` gives beside the fields.
_DERIVED = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "tokens_per_target_pass",
    "draft_acceptance_rate",
    "unconditional_rates",
    "conditional_rates",
)


def _rates(counts: tuple[int, ...], of: tuple[int, ...]) -> tuple[float, ...]:
    """Returns the share of each total that each count is; 0 of nothing."""
    # A position that no draft reached has no rate: it says 0.
    return tuple(n / total if total else 0.0 for n, total in zip(counts, of, strict=True))
