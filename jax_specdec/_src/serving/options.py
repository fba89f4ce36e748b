"""What a request may ask for besides a temperature, on the host and as arrays of a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import check_int
from jax_specdec._src.logprobs import Distribution
from jax_specdec._src.penalties import Penalties
from jax_specdec._src.serving import inputs
from jax_specdec._src.types import described


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """How a request's tokens are sampled, beyond its temperature. By default nothing is changed.

    Attributes:
      min_p: in [0, 1]; tokens less likely than `min_p` times the likeliest are left out.
      top_k: only the k likeliest tokens; 0 for all.
      top_p: in (0, 1]; only the likeliest tokens that together have this probability.
      frequency_penalty: taken off a token's logit for every occurrence in the output.
      presence_penalty: taken off the logit of a token that occurs in the output.
      repetition_penalty: positive; divides the positive logits of tokens of the prompt and the
        output, and multiplies their other ones.
      allowed_token_ids: the only tokens that may be emitted; None for all.

    Raises:
      TypeError: not a number, or not integers.
      ValueError: out of range.

    Example:
      >>> import jax_specdec as sd
      >>> sd.RequestOptions(top_p=0.9, presence_penalty=0.5).is_neutral
      False
    """

    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        rules = {
            "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
            "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
            "frequency_penalty": ("finite", math.isfinite),
            "presence_penalty": ("finite", math.isfinite),
            "repetition_penalty": ("positive and finite", lambda x: 0 < x < math.inf),
        }
        for name, (rule, holds) in rules.items():
            value = getattr(self, name)
            try:
                with np.errstate(over="ignore"):
                    number = float(np.float32(float(value)))
            except (TypeError, ValueError):
                raise TypeError(f"{name} must be a number, but it is {value!r:.80}") from None
            if not holds(number):
                raise ValueError(f"{name} must be {rule}, but it is {value}")
        check_int("top_k", self.top_k, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            ids = tuple(inputs.token_list("allowed_token_ids", self.allowed_token_ids, 2**31))
            object.__setattr__(self, "allowed_token_ids", ids)

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is asked for."""
        return self == RequestOptions()


@dataclasses.dataclass(frozen=True)
class LogprobsConfig:
    """That log-probabilities of the emitted tokens are wanted, and which. Static.

    Attributes:
      num_top: how many of the likeliest tokens at each position besides.
      distribution: "raw" for the model's, "processed" for what the token was drawn from; see
        `token_logprobs`.

    Raises:
      TypeError: `num_top` is not an integer.
      ValueError: out of range.

    Example:
      >>> import jax_specdec as sd
      >>> sd.LogprobsConfig(num_top=5).distribution
      'raw'
    """

    num_top: int = 0
    distribution: Distribution = "raw"

    def __post_init__(self) -> None:
        check_int("num_top", self.num_top, 0)
        if self.distribution not in get_args(Distribution):
            raise ValueError(
                f"distribution must be 'raw' or 'processed', but it is {self.distribution!r}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """The options of B requests; None for what nobody asked for.

    Attributes:
      min_p: ``[B]`` float32.
      top_k: ``[B]`` int32.
      top_p: ``[B]`` float32.
      penalties: ``[B, 3]`` float32: frequency, presence, repetition.
      prompt_lengths: ``[B]`` int32, where the output begins, for the penalties.
      token_bitmask: ``[B, ceil(V/32)]`` uint32, bit ``i % 32`` of word ``i // 32`` is set where
        token i is allowed.
    """

    min_p: jax.Array | None
    top_k: jax.Array | None
    top_p: jax.Array | None
    penalties: jax.Array | None
    prompt_lengths: jax.Array | None
    token_bitmask: jax.Array | None

    @classmethod
    def create(
        cls,
        options: Sequence[RequestOptions],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        *,
        keep_neutral: bool = False,
    ) -> BatchOptions | None:
        """NumPy arrays of B requests' options.

        Args:
          options: B.
          prompt_lengths: B.
          vocab_size: V.
          keep_neutral: have every array, even where nobody asked; else None for those.

        Returns:
          The options, or None where nobody asked for anything.

        Raises:
          ValueError: an allowed id outside the vocabulary.
        """

        def array(dtype: Any, *names: str) -> Any:
            neutral = RequestOptions()
            rows = [[getattr(one, name) for name in names] for one in options]
            if keep_neutral or any(row != [getattr(neutral, n) for n in names] for row in rows):
                return np.array(rows, dtype)
            return None

        def column(values: Any) -> Any:
            return None if values is None else values[:, 0]

        allowed = [one.allowed_token_ids for one in options]
        penalties = array(np.float32, "frequency_penalty", "presence_penalty", "repetition_penalty")
        prompts: Any = None if penalties is None else np.array(prompt_lengths, np.int32)
        bits: Any = None
        if keep_neutral or any(ids is not None for ids in allowed):
            bits = np.stack([_bits(ids, vocab_size) for ids in allowed])
        found = cls(
            min_p=column(array(np.float32, "min_p")),
            top_k=column(array(np.int32, "top_k")),
            top_p=column(array(np.float32, "top_p")),
            penalties=penalties,
            prompt_lengths=prompts,
            token_bitmask=bits,
        )
        return found if jax.tree.leaves(found) else None

    @property
    def filters(self) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
        """Min-p, top-k and top-p."""
        return self.min_p, self.top_k, self.top_p

    def count(
        self, token_ids: jax.Array, lengths: jax.Array, done: jax.Array, vocab_size: int
    ) -> Penalties | None:
        """The penalties of B sequences; those that are done are not penalized."""
        if self.penalties is None or self.prompt_lengths is None:
            return None
        penalties = jnp.where(
            done[:, None], jnp.array([[0.0, 0.0, 1.0]], jnp.float32), self.penalties
        )
        return Penalties.from_sequences(
            token_ids,
            lengths=lengths,
            prompt_lengths=self.prompt_lengths,
            vocab_size=vocab_size,
            frequency=penalties[:, 0],
            presence=penalties[:, 1],
            repetition=penalties[:, 2],
        )


def check_logprobs(value: Any) -> None:
    """Check what log-probabilities are asked for.

    Raises:
      TypeError: not a `LogprobsConfig`.
    """
    if value is not None and not isinstance(value, LogprobsConfig):
        raise TypeError(f"logprobs must be a LogprobsConfig or None, but it is {described(value)}")


def per_request(
    options: RequestOptions | Sequence[RequestOptions] | None, count: int
) -> list[RequestOptions]:
    """One `RequestOptions` for each of `count` requests.

    Raises:
      TypeError: something else.
      ValueError: not one per request.
    """
    if options is None or isinstance(options, RequestOptions):
        return [options or RequestOptions()] * count
    if not isinstance(options, Sequence):
        raise TypeError(f"options must be RequestOptions, one or a list, but it is {options!r:.80}")
    found = list(options)
    for one in found:
        if not isinstance(one, RequestOptions):
            raise TypeError(
                f"options must be RequestOptions, one or a list, but it has {one!r:.80}"
            )
    if len(found) != count:
        raise ValueError(
            f"options must be one value or one per prompt ({count}), but it has {len(found)}"
        )
    return found


def _bits(allowed_token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray:
    """``[ceil(V/32)]`` uint32."""
    words = np.zeros((-(-vocab_size // 32),), np.uint32)
    if allowed_token_ids is None:
        return ~words
    ids = np.array(inputs.token_list("allowed_token_ids", allowed_token_ids, vocab_size))
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words
