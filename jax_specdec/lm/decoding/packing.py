"""What requests ask for, packed into the arrays of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_specdec._src.arrays import check_int, pytree, require
from jax_specdec._src.process_logits import LogitsProcessors
from jax_specdec._src.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Processor,
)
from jax_specdec._src.sampling import SAMPLING_PARAMETERS, TEMPERATURE, SamplingParams
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID
from jax_specdec.lm.decoding.options import RequestOptions


@dataclasses.dataclass(frozen=True)
class OptionSizes:
    """The most that a request may ask for; an `Engine` makes its arrays before requests come.

    Attributes:
      logit_bias: C, tokens that have a bias.
      bad_words: W, bad words.
      bad_word_length: L, tokens of a bad word.

    Raises:
      TypeError: a size is not an integer.
      ValueError: a size is less than 1.

    Example:
      >>> OptionSizes(logit_bias=300).bad_words
      16
    """

    logit_bias: int = 64
    bad_words: int = 16
    bad_word_length: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_int(field.name, getattr(self, field.name))

    @classmethod
    def of(cls, options: Sequence[RequestOptions]) -> OptionSizes:
        """Sizes for these options, rounded up to powers of 2 so that calls share compilations."""
        found = [_sizes(one) for one in options]
        return cls(*(_power_of_2(max(sizes)) for sizes in zip((0, 0, 1), *found, strict=True)))

    def check(self, options: RequestOptions) -> None:
        """Check that a request's options fit.

        Raises:
          ValueError: it asks for more than there is room for.
        """
        for field, found in zip(dataclasses.fields(self), _sizes(options), strict=True):
            most, option = getattr(self, field.name), field.name.replace("word_length", "words")
            require(found <= most, option, f"fit option_sizes.{field.name} = {most}", found)


def _sizes(options: RequestOptions) -> tuple[int, int, int]:
    """The `OptionSizes` that a request needs, in their order."""
    words = options.bad_words or ()
    return len(options.logit_bias or ()), len(words), max(map(len, words), default=0)


class Asked(NamedTuple):
    """The options of B requests, and the room there is for them.

    Attributes:
      options: B.
      sizes: of the arrays; the requests fit.
      stop_token_ids: ``[B, M]`` int32, -1 after the last of a request.
      vocab_size: V.
    """

    options: Sequence[RequestOptions]
    sizes: OptionSizes
    stop_token_ids: Any
    vocab_size: int


def _logit_bias(asked: Asked) -> LogitBias:
    biases = [one.logit_bias or {} for one in asked.options]
    return LogitBias.from_mappings(biases, size=asked.sizes.logit_bias)


def _penalties(asked: Asked) -> Penalties:
    return Penalties.pack(
        [one.frequency_penalty for one in asked.options],
        [one.presence_penalty for one in asked.options],
        [one.repetition_penalty for one in asked.options],
    )


def _bad_words(asked: Asked) -> BadWords:
    given = [one.bad_words or () for one in asked.options]
    num_words, length = asked.sizes.bad_words, asked.sizes.bad_word_length
    words: Any = BadWords.pack(given, num_words=num_words, length=length)
    return BadWords(words, np.full_like(words[:, 0, 1:], PLACEHOLDER_TOKEN_ID))


def _min_tokens(asked: Asked) -> MinTokens:
    least: Any = np.array([one.min_tokens for one in asked.options], np.int32)
    return MinTokens(asked.stop_token_ids, least)


def _allowed_tokens(asked: Asked) -> AllowedTokens:
    allowed = [one.allowed_token_ids for one in asked.options]
    return AllowedTokens.pack(allowed, vocab_size=asked.vocab_size)


PACKING: dict[str, tuple[tuple[str, ...], Callable[[Asked], Processor]]] = {
    "logit_bias": (("logit_bias",), _logit_bias),
    "penalties": (("frequency_penalty", "presence_penalty", "repetition_penalty"), _penalties),
    "bad_words": (("bad_words",), _bad_words),
    "min_tokens": (("min_tokens",), _min_tokens),
    "allowed_tokens": (("allowed_token_ids",), _allowed_tokens),
}
"""For each field of `LogitsProcessors`, the fields of `RequestOptions` that it serves, and what
packs them into NumPy arrays, before `with_sequences`."""

_CHANGE_ROWS = {name for names, _ in PACKING.values() for name in names}


@pytree(
    prompt_lengths="[B] int32",
    max_lengths="[B] int32",
    stop_token_ids="[B, M] int32",
    max_drafts="[B] int32",
    sampling=(SamplingParams,),
    changes_rows="[B] bool",
    processors=(LogitsProcessors,),
)
@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """The options of B requests as arrays; None for what no request asks for.

    Attributes:
      prompt_lengths: ``[B]`` int32, the position where the output begins.
      max_lengths: ``[B]`` int32, the length at which the budget is spent.
      stop_token_ids: ``[B, M]`` int32; -1 is none.
      max_drafts: ``[B]`` int32, the most drafts of a step; the largest int32 for any number.
      sampling: temperatures and filters.
      changes_rows: ``[B]`` bool, whether a request asks for any of `processors`.
      processors: what changes logits, as it was packed, or up to date with the sequences.
    """

    prompt_lengths: jax.Array
    max_lengths: jax.Array
    stop_token_ids: jax.Array
    max_drafts: jax.Array
    sampling: SamplingParams
    changes_rows: jax.Array | None = None
    processors: LogitsProcessors | None = None

    @classmethod
    def create(
        cls,
        options: Sequence[RequestOptions],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        *,
        max_stop_tokens: int | None = None,
        keep_neutral: bool = False,
        sizes: OptionSizes | None = None,
    ) -> BatchOptions:
        """NumPy arrays of B requests' options.

        Args:
          options: B.
          prompt_lengths: B.
          vocab_size: V.
          max_stop_tokens: M; None for the most that a request has.
          keep_neutral: make every array, also where no request asks for it.
          sizes: of the arrays, which the requests fit; None for what they need.
        """
        sizes = OptionSizes.of(options) if sizes is None else sizes
        lengths: Any = np.array(prompt_lengths, np.int32)
        budgets = np.array([one.max_new_tokens for one in options], np.int32)
        limits = [2**31 - 1 if one.max_drafts is None else one.max_drafts for one in options]
        max_drafts: Any = np.array(limits, np.int32)
        stops = _stops(options, max_stop_tokens)
        asked = [one.non_neutral.keys() for one in options]
        served = frozenset[str]().union(*asked)

        sampling = {
            one.name: np.array([getattr(each, one.name) for each in options], one.dtype)
            for one in SAMPLING_PARAMETERS
            if keep_neutral or one is TEMPERATURE or one.name in served
        }
        given = Asked(options, sizes, stops, vocab_size)
        packed: dict[str, Any] = {
            field: pack(given)
            for field, (names, pack) in PACKING.items()
            if keep_neutral or not served.isdisjoint(names)
        }
        changes_rows: Any = np.array([bool(one & _CHANGE_ROWS) for one in asked])
        return cls(
            prompt_lengths=lengths,
            max_lengths=lengths + budgets,
            stop_token_ids=stops,
            max_drafts=max_drafts,
            sampling=SamplingParams(**sampling),
            changes_rows=changes_rows if packed else None,
            processors=LogitsProcessors(**packed) if packed else None,
        )

    @property
    def neutral(self) -> BatchOptions:
        """Without all that only an `Engine` with `request_options` serves."""
        sampling = SamplingParams(self.sampling.temperature)
        return dataclasses.replace(self, sampling=sampling, changes_rows=None, processors=None)


def _stops(options: Sequence[RequestOptions], most: int | None) -> Any:
    """``[B, M]`` int32."""
    if most is None:
        most = max((len(one.stop_token_ids) for one in options), default=0)
    stops = np.full((len(options), most), PLACEHOLDER_TOKEN_ID, np.int32)
    for row, one in zip(stops, options, strict=True):
        row[: len(one.stop_token_ids)] = one.stop_token_ids
    return stops


def _power_of_2(size: int) -> int:
    """The least power of 2 that is at least `size`, and at least 1."""
    return 1 << max(0, size - 1).bit_length()
