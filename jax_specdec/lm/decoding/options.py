"""`RequestOptions`: what a request may ask for, and the tables that say all of an option.

Each field of `RequestOptions` has a row (`OptionRow`): its check, which engines serve it, and
whether clients of a server ask for it by this name. `NUMBERS` are the options that are one number.
The server and the command line take their own options from these tables, so that an option stands
here once. What changes logits becomes arrays of a batch by the functions in `PACKING`, which
`BatchOptions.create` calls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

import jax
import numpy as np

from jax_specdec._src.base.arrays import (
    Range,
    check_int,
    check_type,
    named_entries,
    refuse,
    require,
)
from jax_specdec._src.base.config import did_you_mean
from jax_specdec._src.base.sampling import FILTERS, SAMPLING_PARAMETERS, Parameter
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.logits.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Processor,
)
from jax_specdec.lm.decoding import inputs

# No logit overflows by any of these three, whatever occurs how often.
_ADDED = Range(-1e20, 1e20)
_FACTOR = Range(1e-6, 10**6)
_BIAS = Range(-math.inf, 1e20, "(]")  # a large negative one forbids its token

_MAX_INT32 = 2**31 - 1

_F32 = np.float32
PENALTIES = (
    Parameter(
        "frequency_penalty", _F32, 0.0, _ADDED, "subtracted for each occurrence in the output"
    ),
    Parameter(
        "presence_penalty", _F32, 0.0, _ADDED, "subtracted from tokens that are in the output"
    ),
    Parameter(
        "repetition_penalty",
        _F32,
        1.0,
        _FACTOR,
        "divides positive logits of tokens that have occurred, multiplies negative ones",
    ),
)
_MIN_TOKENS = Parameter("min_tokens", np.int32, 0, Range(0), "tokens before a stop token may come")
NUMBERS = (*SAMPLING_PARAMETERS, *PENALTIES, _MIN_TOKENS)
"""What a request may ask for that is one number, and has a neutral one."""
FLAGS = (*FILTERS, *PENALTIES)
"""Those of them that options of the command line set in the same way."""


# What checks an argument of some name, and returns the value as it is kept. Options are made before
# anybody knows the vocabulary, so ids need only fit int32 here; see `RequestOptions.check`.


def _real(range: Range, name: str, value: Any) -> float:
    """Returns a number in a range as it was given; 0 where devices have 0."""
    number = _float32(name, value)
    # The float32 that devices get must be in the range; the number that was given is kept.
    hint = "devices take it for 0" if number == 0 != value else None
    require(range.holds(number), name, range.must, value, hint)
    return float(value) if number else 0.0


def _count(range: Range, name: str, value: Any) -> int:
    """Returns a number of things; -1, of what may be negative, means 0."""
    return max(0, _integer(int(range.low), _MAX_INT32, name, value))


def _integer(least: int, most: int, name: str, value: Any) -> int:
    _check_one(name, value)
    return check_int(name, value, least, most)


def _stops(name: str, value: Any) -> tuple[int, ...]:
    stops = inputs.integers(name, value)
    inputs.check_range(name, stops, 2**31)
    # Each once, in order: an engine has room for few.
    return tuple(dict.fromkeys(stops))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(inputs.token_list(name, value, 2**31))


def _text(name: str, value: Any) -> str:
    check_type(name, value, str, None)
    return str(value)


def _float32(name: str, value: Any) -> np.float32:
    """Returns a number, rounded to float32 as devices have it: infinite where it overflows.

    Raises:
      TypeError: it is not one number.
    """
    _check_one(name, value)
    number = None
    try:
        if not isinstance(value, (str, bool, np.bool_)):  # which `float` would take
            number = float(value)
    except OverflowError:  # an integer beyond float64
        number = -math.inf if value < 0 else math.inf
    except (TypeError, ValueError):
        pass  # refused below, with no other error beside it
    if number is None:
        refuse(TypeError, name, "be a number", value)
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    # devices take what is below the least normal number for 0
    return np.float32(0) if abs(rounded) < np.finfo(np.float32).tiny else rounded


def _check_one(name: str, value: Any) -> None:
    hint = f"for requests that differ, give a list, options=[RequestOptions({name}=...), ...]"
    require(np.ndim(value) == 0, name, "be one value", value, hint, TypeError)


def _bias(name: str, logit_bias: Mapping[int, float]) -> dict[int, float] | None:
    """Returns biases as a dictionary of ints to floats; None for an empty one.

    Raises:
      TypeError: not a mapping of integers to numbers.
      ValueError: a negative id, one twice, or a number that is out of range.
    """
    must = "be a mapping of token ids to numbers"
    require(isinstance(logit_bias, Mapping), name, must, logit_bias, error=TypeError)
    if not logit_bias:
        return None
    # keys of JSON are strings; one of more digits is no id
    keys = [
        int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else key
        for key in logit_bias
    ]
    ids = inputs.token_list(name, keys, 2**31)
    require(len(set(ids)) == len(ids), name, "name a token once", logit_bias)
    biases = {}
    for token, value in zip(ids, logit_bias.values(), strict=True):
        number = _float32(f"{name}[{token}]", value)
        require(_BIAS.holds(number), f"{name}[{token}]", _BIAS.must, value)
        biases[token] = float(number)
    return biases


def _words(name: str, bad_words: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...] | None:
    """Returns bad words as tuples; None for an empty list.

    Raises:
      TypeError: not lists of integers.
      ValueError: a word without tokens, or a negative id.
    """
    entries = named_entries(name, bad_words, "be lists of token ids")
    words = [tuple(inputs.token_list(*entry, 2**31)) for entry in entries]
    return tuple(words) or None


# The table.


class OptionRow(NamedTuple):
    """A row of the table of options, which the fields of `RequestOptions` are.

    Attributes:
      check: returns the value of an argument of this name as it is kept, or raises.
      everywhere: whether every engine serves it, also one without `request_options`.
      by_clients: whether clients of a server ask for it, under this name.
    """

    check: Callable[[str, Any], Any]
    everywhere: bool = False
    by_clients: bool = True


def _row(default: Any, check: Callable[[str, Any], Any], **row: Any) -> Any:
    """Returns a field of `RequestOptions`, with its row."""
    # A mapping cannot be hashed, so the hash leaves this field out; None is what a field has else.
    has_hash = None if check is not _bias else False
    return dataclasses.field(
        default=default, hash=has_hash, metadata={"row": OptionRow(check, **row)}
    )


def _up_to(most: int) -> Callable[[str, Any], int]:
    """Returns the check of an integer from 0 on."""
    return functools.partial(_integer, 0, most)


def _number(name: str, default: float | None = None, **row: Any) -> Any:
    """Returns the field of one of `NUMBERS`, at its neutral value unless another is given."""
    (parameter,) = (one for one in NUMBERS if one.name == name)
    check = functools.partial(_real if parameter.dtype is np.float32 else _count, parameter.range)
    return _row(parameter.neutral if default is None else default, check, **row)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """The options of one request: `generate`, `generate_plain` and `EngineDriver.submit` take them.

    They also take each field by its name, for every request: ``temperature=0.8`` is short for
    ``options=RequestOptions(temperature=0.8)``.

    Attributes:
      temperature: 0 is greedy.
      max_new_tokens: the budget; the request ends when it is spent.
      stop_token_ids: the request ends after emitting one of these.
      seed: in [0, 2**32); the request samples with ``jax.random.key(seed)``. None: `generate`
        folds the request's index into its key, and `EngineDriver` uses the request's id as seed.
      min_p: in [0, 1]; leaves out tokens less likely than `min_p` times the likeliest one.
      top_k: only the k likeliest tokens; 0 or -1 for all.
      top_p: in (0, 1]; only the likeliest tokens that together have this probability.
      frequency_penalty: in [-1e20, 1e20]; subtracted from a token's logit for every occurrence in
        the output.
      presence_penalty: in [-1e20, 1e20]; subtracted from the logit of a token that occurs in the
        output.
      repetition_penalty: in [1e-6, 1e6]. Of tokens that occur in the prompt or the output, positive
        logits are divided by it and all others are multiplied by it.
      allowed_token_ids: the only tokens that may be emitted; None for all.
      logit_bias: at most 1e20 each; added to the logits of a few tokens, before penalties; None for
        none. Its keys may be strings of digits, as in JSON.
      bad_words: sequences of token ids that must not occur. The last token of a sequence is
        forbidden where the text so far, prompt included, ends with its other tokens. None for
        none.
      min_tokens: stop tokens are forbidden until this many tokens are generated.
      max_drafts: at most K, the most drafts that are verified in a step; 0 for none, which is
        plain decoding. None for K. It changes neither greedy text nor that of the agreement rule,
        and other text only to another sample of the same distribution.
      prediction: token ids that the output is expected to be, or to be near: a file before an edit,
        say. A drafter that looks in texts (`NGramDrafter`, `SuffixDrafter`, `FirstOf`) takes drafts
        from it; others refuse it. It changes texts as little as `max_drafts` does. None for none.
      cache_salt: only requests with the same one share what was read of their prompts, see
        `Engine.prefix_caching`: otherwise the time to a first token shows whether somebody else
        asked for the same text. It changes no text.

    Raises:
      TypeError: a field that is not a number, or not integers.
      ValueError: a field is out of range.

    Example:
      >>> from jax_specdec import lm
      >>> lm.RequestOptions(temperature=0.8, top_p=0.9, presence_penalty=0.5).is_neutral
      False
    """

    temperature: float = _number("temperature", 0.0, everywhere=True)
    max_new_tokens: int = _row(128, _up_to(_MAX_INT32), everywhere=True, by_clients=False)
    stop_token_ids: Sequence[int] = _row((), _stops, everywhere=True, by_clients=False)
    seed: int | None = _row(None, _up_to(2**32 - 1), everywhere=True, by_clients=False)
    min_p: float = _number("min_p")
    top_k: int = _number("top_k")
    top_p: float = _number("top_p")
    frequency_penalty: float = _number("frequency_penalty")
    presence_penalty: float = _number("presence_penalty")
    repetition_penalty: float = _number("repetition_penalty")
    allowed_token_ids: Sequence[int] | None = _row(None, _token_ids, by_clients=False)
    logit_bias: Mapping[int, float] | None = _row(None, _bias)
    bad_words: Sequence[Sequence[int]] | None = _row(None, _words, by_clients=False)
    min_tokens: int = _number("min_tokens")
    max_drafts: int | None = _row(None, _up_to(_MAX_INT32), everywhere=True)
    prediction: Sequence[int] | None = _row(None, _token_ids, by_clients=False)
    cache_salt: str | None = _row(None, _text, everywhere=True)

    def __post_init__(self) -> None:
        for name, row in ROWS.items():
            value = getattr(self, name)
            # None asks for nothing, where that is the default. Elsewhere the check refuses it.
            if value is not None or getattr(type(self), name) is not None:
                # Frozen: what is kept takes the place of what was given, such as a tuple of a list.
                object.__setattr__(self, name, row.check(name, value))

    def check(self, vocab_size: int) -> None:
        """Checks what depends on the model's vocabulary or on another field.

        Raises:
          TypeError: `vocab_size` is not an int.
          ValueError: an id outside the vocabulary, or `min_tokens` above the budget.
        """
        vocab_size = check_int("vocab_size", vocab_size)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "prediction"):
            inputs.check_range(name, list(getattr(self, name) or ()), vocab_size)
        for i, word in enumerate(self.bad_words or ()):
            inputs.check_range(f"bad_words[{i}]", word, vocab_size)
        fits = self.min_tokens <= self.max_new_tokens
        must = f"be at most max_new_tokens = {self.max_new_tokens}"
        require(fits, "min_tokens", must, self.min_tokens)

    def check_drafts(self, num_speculative_tokens: int) -> None:
        """Checks that no more drafts are asked for than a step has.

        Raises:
          ValueError: `max_drafts` is above `num_speculative_tokens`.
        """
        fits = self.max_drafts is None or self.max_drafts <= num_speculative_tokens
        must = f"be at most num_speculative_tokens = {num_speculative_tokens}"
        require(fits, "max_drafts", must, self.max_drafts)

    @functools.cached_property  # a driver asks for every running request before every step
    def is_neutral(self) -> bool:
        """Whether every engine serves this, also one without `request_options`."""
        return not self.non_neutral

    @property
    def non_neutral(self) -> dict[str, object]:
        """The fields that need an `Engine` with `request_options` and are not at their default."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if not ROWS[field.name].everywhere
            and (value := getattr(self, field.name)) != field.default
        }


ROWS: dict[str, OptionRow] = {
    field.name: field.metadata["row"] for field in dataclasses.fields(RequestOptions)
}
"""The table of options, by the names of fields."""


class RequestFields(TypedDict, total=False):
    """The fields of `RequestOptions`, as keyword arguments.

    They stand twice because type checkers and editors read this one, and cannot compute it from the
    dataclass. A test holds the two together.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    seed: int | None
    min_p: float
    top_k: int
    top_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[Sequence[int]] | None
    min_tokens: int
    max_drafts: int | None
    prediction: Sequence[int] | None
    cache_salt: str | None


def options_per_request(
    options: RequestOptions | Sequence[RequestOptions] | None, count: int, fields: RequestFields
) -> list[RequestOptions]:
    """Returns the `RequestOptions` of each of `count` requests, overridden by `fields`.

    Raises:
      TypeError: options of another type, or a field that does not exist.
      ValueError: a list of another length, or a field out of range.
    """
    # Python would name `RequestOptions.__init__`, and not the argument that was meant.
    known = [field.name for field in dataclasses.fields(RequestOptions)]
    for name in fields:
        if name not in known:
            raise TypeError(f"unknown argument {name!r}{did_you_mean(name, known)}")
    # One object for all requests: it is immutable, and checked once.
    if options is None or isinstance(options, RequestOptions):
        request = options or RequestOptions()
        return [dataclasses.replace(request, **fields) if fields else request] * count
    hint = "RequestOptions(temperature=0.8), for example, is what one request asks for"
    check_type("options", options, RequestOptions, Sequence, None, hint=hint)
    for i, request in enumerate(options):
        check_type(f"options[{i}]", request, RequestOptions, hint=hint)
    must = f"be one value, or one for each of {count} prompts"
    require(len(options) == count, "options", must, options)
    return [dataclasses.replace(one, **fields) if fields else one for one in options]


# What of them changes logits, as arrays of a batch.


def on_host(array: np.ndarray) -> jax.Array:
    """Returns a NumPy array as fields declare it: packing needs no device."""
    return cast(jax.Array, array)


@dataclasses.dataclass(frozen=True)
class OptionSizes:
    """The most that a request may ask for; an `Engine` makes its arrays before requests come.

    Attributes:
      logit_bias: C, tokens that have a bias.
      bad_words: W, bad words.
      bad_word_length: L, tokens of a bad word.
      prediction: A, tokens of a prediction; 0 where no request may have one.

    Raises:
      TypeError: a size is not an integer.
      ValueError: a size is less than 1, or `prediction` less than 0.

    Example:
      >>> OptionSizes(logit_bias=300).bad_words
      16
    """

    logit_bias: int = 64
    bad_words: int = 16
    bad_word_length: int = 8
    prediction: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_int(field.name, getattr(self, field.name), 0 if field.default == 0 else 1)

    @classmethod
    def of(cls, options: Sequence[RequestOptions]) -> OptionSizes:
        """Returns sizes for these options, powers of 2 so that calls share compilations.

        Raises:
          TypeError: no list of `RequestOptions`.
        """
        # With those of a default request, so that there is one even if there are no requests
        entries = [("", RequestOptions()), *named_entries("options", options)]
        needed = [_sizes(*entry) for entry in entries]
        largest = {name: max(sizes[name] for sizes in needed) for name in needed[0]}
        # The least power of 2 that is at least n, and at least 1
        sizes = {name: 1 << max(0, n - 1).bit_length() for name, n in largest.items()}
        if not largest["prediction"]:
            sizes["prediction"] = 0
        return cls(**sizes)

    def check(self, options: RequestOptions) -> None:
        """Checks that a request's options fit.

        Raises:
          TypeError: not a `RequestOptions`.
          ValueError: it asks for more than there is room for.
        """
        for name, needed in _sizes("options", options).items():
            size = getattr(self, name)
            # Two sizes are of one option.
            option = "bad_words" if name == "bad_word_length" else name
            require(needed <= size, option, f"fit option_sizes.{name} = {size}", needed)


def _sizes(name: str, options: RequestOptions) -> dict[str, int]:
    """Returns the least of each of the `OptionSizes` that a request needs."""
    check_type(name, options, RequestOptions)
    words = options.bad_words or ()
    longest = max(map(len, words), default=0)
    return dict(
        logit_bias=len(options.logit_bias or ()),
        bad_words=len(words),
        bad_word_length=longest,
        prediction=len(options.prediction or ()),
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


# What packs options: NumPy arrays [B, ...] of the sizes that are asked for, neutral where a request
# asks for nothing.


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
    # [B, W, L]
    packed = BadWords.pack(words, num_words=sizes.bad_words, length=sizes.bad_word_length)
    # [B, W, L] -> [B, L-1]: the latest tokens of each sequence, not known yet
    recent = np.full_like(packed[:, 0, 1:], PLACEHOLDER_TOKEN_ID)
    return BadWords(on_host(packed), on_host(recent))


def _min_tokens(asked: Asked) -> MinTokens:
    # [B], beside the stop tokens [B, M] that are forbidden until then
    least = np.array([one.min_tokens for one in asked.options], np.int32)
    return MinTokens(asked.stop_token_ids, on_host(least))


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

CHANGE_ROWS = {name for names, _ in PACKING.values() for name in names}
"""The options that change logits."""
