"""The static configuration of speculative decoding, and schedules of acceptance rates."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, get_args

import numpy as np

from jax_specdec._src.base.arrays import (
    Range,
    check_choice,
    check_int,
    check_type,
    refuse,
    require,
    static_pytree,
)

RejectionSampleMethod = Literal["standard", "block", "agreement", "synthetic"]
DraftSampleMethod = Literal["greedy", "probabilistic"]

_MOST_SPECULATIVE_TOKENS = 1024

# What other projects have, and what to write here. A `speculative_config` of vLLM holds the first.
_DRAFTER_KEYS = (
    "speculative_config",
    "method",
    "model",
    "draft_tensor_parallel_size",
    "prompt_lookup_min",
    "prompt_lookup_max",
)
_OTHER_KEYS = {
    "synthetic_acceptance_rate": (
        "synthetic_acceptance_rate is retired; give synthetic_acceptance_length (for a mean rate r"
        " over all positions, 1 + r * num_speculative_tokens) or synthetic_acceptance_rates (one"
        " unconditional rate per position) instead of {value!r}"
    )
} | dict.fromkeys(
    _DRAFTER_KEYS,
    "{key}={value!r} is not part of a SpecDecodeConfig: methods and models are objects here; pass"
    " a drafter, such as NGramDrafter() or ModelDrafter(model), beside the config",
)
_OTHER_CHOICES = {
    ("draft_sample_method", "gumbel"): (
        "draft_sample_method='gumbel' is retired; give 'probabilistic' instead"
    ),
    ("rejection_sample_method", "fly"): (
        "rejection_sample_method='fly' changes the distribution of the text and is not here; give"
        " 'standard' or 'block' instead"
    ),
}


@static_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDecodeConfig:
    """What to draft and how to verify it: everything static about speculative decoding.

    A pytree without arrays: ``jax.jit`` takes it as an argument, and compiles a program for each
    config. It is immutable and hashable, so it may be a static argument too. Everything is checked
    when it is built. Rates may be given as a list or a NumPy array; they are stored as a
    tuple.

    Attributes:
      num_speculative_tokens: K, the most drafts a request may have in one step; 1 to 1024. The
        time to compile grows with it.
      rejection_sample_method: ``"standard"`` keeps the output distribution exactly that of the
        target model, judging drafts one by one. ``"block"`` does too, but judges a request's drafts
        jointly: in expectation it never accepts fewer. ``"agreement"`` samples the target's own
        token at each position, with the noise of that position, and accepts a draft that equals it:
        the text for a key is that of plain decoding, whatever is drafted. ``"synthetic"`` accepts
        drafts at given rates, whatever the models say; its output is for benchmarks only.
      draft_sample_method: ``"greedy"`` drafts the argmax of the draft model, which is then verified
        as a one-hot distribution. ``"probabilistic"`` samples the draft from the draft model's
        distribution at the request's temperature, and verification uses that distribution; under
        the agreement rule drafts are sampled with the noise of the target's own tokens instead, and
        no distribution is kept.
      synthetic_acceptance_rates: K unconditional acceptance rates in [0, 1], non-increasing;
        ``rates[i]`` is the probability that drafts ``0 .. i`` are all accepted. Synthetic only.
      synthetic_acceptance_length: the mean number of tokens emitted per step of K drafts, in
        [1, K + 1], turned into rates by ``acceptance_length_to_rates``. Steps with fewer drafts
        may have a lower mean. Synthetic only; exactly one of this and the rates must be given.

    Raises:
      ValueError: a value is out of range, two fields contradict each other, or a name is unknown.
      TypeError: a field has the wrong type, or there is no such field. Booleans are not taken for
        numbers.

    Example:
      >>> config = SpecDecodeConfig(
      ...     num_speculative_tokens=3,
      ...     rejection_sample_method="synthetic",
      ...     synthetic_acceptance_rates=[0.9, 0.45, 0.0],
      ... )
      >>> config.conditional_rates
      (0.9, 0.5, 0.0)
      >>> SpecDecodeConfig(num_speculative_tokens=0)
      Traceback (most recent call last):
      ValueError: num_speculative_tokens must be in [1, 1024], but it is 0

    References:
      The names are those of vLLM's ``SpeculativeConfig``, which drafts greedily by default:
      https://docs.vllm.ai/en/latest/api/vllm/config/speculative/
      Block verification: Sun et al., arXiv 2403.10444.
    """

    num_speculative_tokens: int
    rejection_sample_method: RejectionSampleMethod = "standard"
    draft_sample_method: DraftSampleMethod = "probabilistic"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            num_speculative_tokens: SupportsIndex,
            rejection_sample_method: RejectionSampleMethod = "standard",
            draft_sample_method: DraftSampleMethod = "probabilistic",
            synthetic_acceptance_rates: Sequence[float] | np.ndarray | None = None,
            synthetic_acceptance_length: float | None = None,
        ) -> None: ...

    def __new__(cls, *args: object, **fields: object) -> Self:
        """Refuses fields that there are not by a sentence, before `__init__` would by name."""
        require(not args, "the fields", "be given by name", args, error=TypeError)
        _check_keys(cls, fields, TypeError)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        k = check_num_speculative_tokens(self.num_speculative_tokens)
        object.__setattr__(self, "num_speculative_tokens", k)
        # A name that other projects have is refused with what to write here.
        for name, choices in (
            ("rejection_sample_method", get_args(RejectionSampleMethod)),
            ("draft_sample_method", get_args(DraftSampleMethod)),
        ):
            value = getattr(self, name)
            if isinstance(value, str) and (name, value) in _OTHER_CHOICES:
                raise ValueError(_OTHER_CHOICES[name, value])
            check_choice(name, value, choices, str)
        # A schedule is given in one of two forms under the synthetic rule, and in none elsewhere.
        method = self.rejection_sample_method
        names = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if method == "synthetic":
            require(len(given) == 1, " or ".join(names), "be given, and not both", given)
        for name, value in given.items():
            if method != "synthetic":
                refuse(ValueError, name, "be None", value, f"rejection_sample_method is {method!r}")
            # Stored as numbers of Python, which are hashable; a length stays what it is, so that
            # `to_dict` gives it back.
            if name == "synthetic_acceptance_length":
                object.__setattr__(self, name, _check_real(name, value, 1, k + 1))
                continue
            rates = _check_rates(name, value)
            require(len(rates) == k, name, f"have K = {k} entries", rates)
            object.__setattr__(self, name, rates)

    @property
    def keeps_draft_distribution(self) -> bool:
        """Whether verification reads what drafts were drawn from, so that a drafter stores it."""
        is_read = self.rejection_sample_method != "agreement"
        return is_read and self.draft_sample_method == "probabilistic"

    @property
    def unconditional_rates(self) -> tuple[float, ...] | None:
        """``[K]``: P(drafts 0 .. i all accepted); None unless the method is synthetic."""
        if self.synthetic_acceptance_length is not None:
            return acceptance_length_to_rates(
                self.synthetic_acceptance_length, self.num_speculative_tokens
            )
        return self.synthetic_acceptance_rates

    @property
    def conditional_rates(self) -> tuple[float, ...] | None:
        """``[K]``: P(draft i accepted given 0 .. i-1 were); None unless the method is synthetic."""
        rates = self.unconditional_rates
        return rates and unconditional_to_conditional_rates(rates)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds a config from a dict as JSON or YAML gives it.

        Args:
          values: field names to values; fields with a default may be absent.

        Returns:
          The config.

        Raises:
          ValueError: a key is unknown (one that is near is named), retired or a drafter's (what to
            write instead is named), ``num_speculative_tokens`` is absent, or a value is not valid.
          TypeError: ``values`` is not a mapping, or a value has the wrong type.

        Example:
          >>> SpecDecodeConfig.from_dict({"num_speculative_tokens": 4}).num_speculative_tokens
          4
          >>> SpecDecodeConfig.from_dict({"draft_method": "greedy"})
          Traceback (most recent call last):
          ValueError: unknown key 'draft_method'; did you mean 'draft_sample_method'?
        """
        check_type("values", values, Mapping)
        _check_keys(cls, values, ValueError)
        given = "num_speculative_tokens" in values
        require(given, "values", "have the key num_speculative_tokens", dict(values))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON or YAML can hold them; ``from_dict`` is the inverse.

        Example:
          >>> SpecDecodeConfig(num_speculative_tokens=4).to_dict()["rejection_sample_method"]
          'standard'
        """
        values = dataclasses.asdict(self)
        return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}


def _check_keys(cls: type[Any], values: Mapping[Any, Any], error: type[Exception]) -> None:
    """Raises `error` for the first key that is no field of a class, with what to write instead."""
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in values.items():
        if key in _OTHER_KEYS:
            raise error(_OTHER_KEYS[key].format(key=key, value=value))
        if key not in known:
            raise error(f"unknown key {key!r}{did_you_mean(key, known)}")


def did_you_mean(name: Any, known: Sequence[str]) -> str:
    """Returns how a message about an unknown name ends: with a known one near it, if any is."""
    # Flags of the command line are compared without their dashes, and shown with them.
    given = str(name).lstrip("-")
    names = {one.lstrip("-"): one for one in known}
    # The beginning of a name is nearer than any likeness.
    near = [one for one in names if len(given) > 2 and one.startswith(given)]
    near = near or difflib.get_close_matches(given, names, n=1, cutoff=0.7)
    if not near:
        return ""
    return f"; did you mean {names[near[0]]!r}?"


def acceptance_length_to_rates(length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Turns a mean acceptance length into the schedule of rates with the least variance.

    Let ``length - 1 = n + f`` with n an integer and ``0 <= f < 1``. The schedule is n ones, then f,
    then zeros: every step accepts n drafts, and one more with probability f.

    Its variance is the least possible. Let A be the number of accepted drafts, so that
    ``P(A > i) = rates[i]``. Every schedule of this length has the mean
    ``E[A] = sum(rates) = n + f``. A is an integer, and no integer lies strictly between n and
    n + 1, so ``(A - n)(A - n - 1) >= 0``. In the mean ``E[A^2] >= (2n + 1) E[A] - n(n + 1)``, hence
    ``Var[A] >= f(1 - f)``. Equality needs A to be n or n + 1 at every step, which only the schedule
    above gives.

    The mean is that of steps with K drafts. A step with c of them can keep no more than c: it has
    the first c rates, and the mean ``1 + sum(rates[:c])``. Where counts differ, the mean over all
    steps is therefore lower than `length`: the mean of these means. Where c is never below n + 1,
    nothing is lost.

    Args:
      length: mean number of tokens emitted per step of K drafts, the recovered or bonus token
        included; in ``[1, num_speculative_tokens + 1]``.
      num_speculative_tokens: K, 1 to 1024.

    Returns:
      K unconditional rates; ``1 + sum(rates)`` is ``length``.

    Raises:
      ValueError: ``length`` or ``num_speculative_tokens`` is out of range.
      TypeError: an argument is not a number.

    Example:
      >>> rates = acceptance_length_to_rates(2.5, 3)
      >>> rates
      (1.0, 0.5, 0.0)
      >>> [1 + sum(rates[:c]) for c in range(4)]  # mean 2.0 if all counts are as frequent
      [1, 2.0, 2.5, 2.5]

    References:
      ``synthetic_acceptance_length`` in vLLM:
      https://docs.vllm.ai/en/latest/api/vllm/config/speculative/
    """
    k = check_num_speculative_tokens(num_speculative_tokens)
    # n + f drafts: n ones, then f, then zeros
    mean_accepted = _check_real("length", length, 1, k + 1) - 1.0
    return tuple(min(max(mean_accepted - i, 0.0), 1.0) for i in range(k))


def unconditional_to_conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Returns the rate at each position, given that all drafts before it were accepted.

    ``c[0] = r[0]`` and ``c[i] = r[i] / r[i-1]``, 0 where ``r[i-1] = 0``.

    Args:
      rates: r, unconditional: ``r[i]`` is P(drafts 0 .. i all accepted); in [0, 1], non-increasing.

    Returns:
      c, conditional: ``c[i]`` is P(draft i accepted given that drafts 0 .. i-1 were).

    Raises:
      ValueError: ``rates`` is empty, increases, or has an entry outside [0, 1].
      TypeError: ``rates`` is not a sequence of numbers.

    Example:
      >>> unconditional_to_conditional_rates([0.9, 0.45, 0.0])
      (0.9, 0.5, 0.0)
    """
    checked = _check_rates("rates", rates)
    # r[i-1] and r[i]; the empty prefix is always accepted
    pairs = itertools.pairwise((1.0, *checked))
    return tuple(rate / before if before > 0.0 else 0.0 for before, rate in pairs)


def conditional_to_unconditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Returns the rate at which all drafts up to each position are accepted.

    ``r[i]`` is the product of ``c[0]`` to ``c[i]``.

    Args:
      rates: c, conditional: ``c[i]`` is P(draft i accepted given that drafts 0 .. i-1 were); in
        [0, 1].

    Returns:
      r, unconditional, as `SpecDecodeConfig.synthetic_acceptance_rates` takes it.

    Raises:
      ValueError: ``rates`` is empty, or has an entry outside [0, 1].
      TypeError: ``rates`` is not a sequence of numbers.

    Example:
      >>> conditional_to_unconditional_rates([0.9, 0.5, 0.0])
      (0.9, 0.45, 0.0)
    """
    checked = _check_rates("rates", rates, may_increase=True)
    return tuple(itertools.accumulate(checked, operator.mul))


def check_num_speculative_tokens(value: Any) -> int:
    """Returns K as a Python int.

    Raises:
      TypeError: not an integer.
      ValueError: not in [1, 1024].
    """
    return check_int("num_speculative_tokens", value, 1, _MOST_SPECULATIVE_TOKENS)


def _check_real(name: str, value: Any, low: int, high: int) -> float:
    """Returns a number in ``[low, high]`` as a float of Python; booleans are not numbers."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(is_number, name, "be a number", value, error=TypeError)
    Range(low, high).check(name, value)
    return float(value)


def _check_rates(name: str, rates: Any, *, may_increase: bool = False) -> tuple[float, ...]:
    """Returns rates in [0, 1] as a tuple, checked not to increase unless they may."""
    if isinstance(rates, np.ndarray):
        rates = rates.tolist()
    is_sequence = isinstance(rates, Sequence) and not isinstance(rates, str | bytes)
    require(is_sequence, name, "be a sequence of numbers", rates, error=TypeError)
    require(rates, name, "have at least one entry", rates)
    checked = tuple(_check_real(f"{name}[{i}]", rate, 0, 1) for i, rate in enumerate(rates))
    for i, (before, rate) in enumerate(itertools.pairwise(checked), start=1):
        holds = may_increase or rate <= before
        require(holds, f"{name}[{i}]", f"be at most {name}[{i - 1}] = {before}", rate)
    return checked
