"""The options of requests, packed into the arrays of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jax_specdec._src.base.arrays import check_int, pytree, require
from jax_specdec._src.base.sampling import SAMPLING_PARAMETERS, TEMPERATURE, SamplingParams
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.logits.process_logits import LogitsProcessors
from jax_specdec._src.logits.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Processor,
)
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
        """Returns sizes for these options, powers of 2 so that calls share compilations."""
        found = [_sizes(one) for one in (RequestOptions(), *options)]
        most = {name: max(sizes[name] for sizes in found) for name in found[0]}
        # the least power of 2 that is at least n, and at least 1
        return cls(**{name: 1 << max(0, n - 1).bit_length() for name, n in most.items()})

    def check(self, options: RequestOptions) -> None:
        """Checks that a request's options fit.

        Raises:
          ValueError: it asks for more than there is room for.
        """
        for name, needed in _sizes(options).items():
            most = getattr(self, name)
            option = "bad_words" if name == "bad_word_length" else name
            require(needed <= most, option, f"fit option_sizes.{name} = {most}", needed)


def _sizes(options: RequestOptions) -> dict[str, int]:
    """Returns the least of each of the `OptionSizes` that a request needs."""
    words = options.bad_words or ()
    longest = max(map(len, words), default=0)
    return dict(
        logit_bias=len(options.logit_bias or ()), bad_words=len(words), bad_word_length=longest
    )


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
    stop_token_ids: jax.Array
    vocab_size: int


def _logit_bias(asked: Asked) -> LogitBias:
    biases = [one.logit_bias or {} for one in asked.options]
    return LogitBias.from_mappings(biases, size=asked.sizes.logit_bias)


def _penalties(asked: Asked) -> Penalties:
    return Penalties.pack(
        frequency=[one.frequency_penalty for one in asked.options],
        presence=[one.presence_penalty for one in asked.options],
        repetition=[one.repetition_penalty for one in asked.options],
    )


def _bad_words(asked: Asked) -> BadWords:
    sizes = asked.sizes
    words = [one.bad_words or () for one in asked.options]
    packed = BadWords.pack(words, num_words=sizes.bad_words, length=sizes.bad_word_length)
    # [B, W, L] -> [B, L-1]: the latest tokens of each sequence, not known yet
    recent = np.full_like(packed[:, 0, 1:], PLACEHOLDER_TOKEN_ID)
    return BadWords(_on_host(packed), _on_host(recent))


def _min_tokens(asked: Asked) -> MinTokens:
    least = np.array([one.min_tokens for one in asked.options], np.int32)
    return MinTokens(asked.stop_token_ids, _on_host(least))


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
packs them into NumPy arrays ``[B, ...]``. What these need of the tokens of the sequences is empty
until `Batch.with_processors`."""

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
      processors: what changes logits, as it was packed, or, in a step, up to date with the
        sequences.
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
        """Returns the options of B requests as NumPy arrays.

        Args:
          options: B.
          prompt_lengths: B.
          vocab_size: V.
          max_stop_tokens: M; None for the most that a request has.
          keep_neutral: make every array, also where no request asks for it, so that the compiled
            programs of an `Engine` do not depend on who comes.
          sizes: of the arrays, which the requests fit; None for what they need.
        """
        lengths = np.array(prompt_lengths, np.int32)
        budgets = np.array([one.max_new_tokens for one in options], np.int32)
        most_drafts = np.iinfo(np.int32).max
        limits = [most_drafts if one.max_drafts is None else one.max_drafts for one in options]
        # [B, M]: -1 after the last stop token of a request
        if max_stop_tokens is None:
            max_stop_tokens = max((len(one.stop_token_ids) for one in options), default=0)
        stops = np.full((len(options), max_stop_tokens), PLACEHOLDER_TOKEN_ID, np.int32)
        for row, one in zip(stops, options, strict=True):
            row[: len(one.stop_token_ids)] = one.stop_token_ids

        # Arrays that no request asks for are left out, and nothing is compiled for them.
        asked = [one.non_neutral.keys() for one in options]
        served = frozenset[str]().union(*asked)
        sampling = {
            one.name: np.array([getattr(each, one.name) for each in options], one.dtype)
            for one in SAMPLING_PARAMETERS
            if keep_neutral or one is TEMPERATURE or one.name in served
        }
        sizes = OptionSizes.of(options) if sizes is None else sizes
        given = Asked(options, sizes, _on_host(stops), vocab_size)
        packed: dict[str, Any] = {
            field: pack(given)
            for field, (names, pack) in PACKING.items()
            if keep_neutral or not served.isdisjoint(names)
        }
        changes_rows = np.array([bool(names & _CHANGE_ROWS) for names in asked])
        return cls(
            prompt_lengths=_on_host(lengths),
            max_lengths=_on_host(lengths + budgets),
            stop_token_ids=given.stop_token_ids,
            max_drafts=_on_host(np.array(limits, np.int32)),
            sampling=SamplingParams(**sampling),
            changes_rows=_on_host(changes_rows) if packed else None,
            processors=LogitsProcessors(**packed) if packed else None,
        )

    @property
    def neutral(self) -> BatchOptions:
        """The options without all that only an `Engine` with `request_options` serves."""
        sampling = SamplingParams(self.sampling.temperature)
        return dataclasses.replace(self, sampling=sampling, changes_rows=None, processors=None)


def _on_host(array: np.ndarray) -> jax.Array:
    """Returns a NumPy array as fields declare it: packing needs no device."""
    return cast(jax.Array, array)
