"""What a request may ask for besides a temperature, on the host and as arrays of a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.config import check_int
from jax_specdec._src.logprobs import Distribution
from jax_specdec._src.penalties import Penalties
from jax_specdec._src.processors import BadWords, LogitBias, LogitsProcessors, MinTokens
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
      logit_bias: added to logits before penalties, a finite number by token id; None for none.
      bad_words: sequences of token ids that must not occur: the last token of one is forbidden
        where the tokens before, prompt included, end with its others; None for none.
      min_tokens: stop tokens are forbidden until that many tokens are generated.

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
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    bad_words: Sequence[Sequence[int]] | None = None
    min_tokens: int = 0

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
        check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is asked for."""
        return self == RequestOptions()

    def check(self, vocab_size: int, max_new_tokens: int | None = None) -> None:
        """Check what depends on the model and the budget.

        Args:
          vocab_size: V.
          max_new_tokens: the request's; None where it is not known.

        Raises:
          ValueError: an id outside the vocabulary, or `min_tokens` above the budget.
        """
        if self.allowed_token_ids is not None:
            inputs.token_list("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if self.logit_bias:
            inputs.token_list("logit_bias", self.logit_bias, vocab_size)
        for i, word in enumerate(self.bad_words or ()):
            inputs.token_list(f"bad_words[{i}]", word, vocab_size)
        if max_new_tokens is not None and self.min_tokens > max_new_tokens:
            raise ValueError(
                f"min_tokens must be at most max_new_tokens = {max_new_tokens}, but it is "
                f"{self.min_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class OptionSizes:
    """The most that a request may ask for, where arrays are made before requests come. Static.

    Attributes:
      logit_bias: C, tokens with a bias.
      bad_words: W, bad words.
      bad_word_length: L, tokens of a bad word.

    Raises:
      TypeError: not integers.
      ValueError: less than 1.

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
        """Sizes that hold some requests' options, powers of 2 so that calls share compilations."""
        words = [one.bad_words or () for one in options]
        return cls(
            _power_of_2(max((len(one.logit_bias or ()) for one in options), default=0)),
            _power_of_2(max(map(len, words), default=0)),
            _power_of_2(max((len(word) for own in words for word in own), default=1)),
        )

    def check(self, options: RequestOptions) -> None:
        """Check that a request's options fit.

        Raises:
          ValueError: they do not.
        """
        words = options.bad_words or ()
        for name, most, what, found in (
            ("logit_bias", self.logit_bias, "tokens", len(options.logit_bias or ())),
            ("bad_words", self.bad_words, "words", len(words)),
            ("bad_words", self.bad_word_length, "tokens each", max(map(len, words), default=0)),
        ):
            if found > most:
                raise ValueError(
                    f"{name} must have at most {most} {what}, as option_sizes says, but it has "
                    f"{found}"
                )


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
      prompt_lengths: ``[B]`` int32, where the output begins, for penalties and `min_tokens`.
      token_bitmask: ``[B, ceil(V/32)]`` uint32, bit ``i % 32`` of word ``i // 32`` is set where
        token i is allowed.
      logit_bias: of B requests.
      bad_words: ``[B, W, L]`` int32, as in `BadWords`.
      min_tokens: ``[B]`` int32.
    """

    min_p: jax.Array | None
    top_k: jax.Array | None
    top_p: jax.Array | None
    penalties: jax.Array | None
    prompt_lengths: jax.Array | None
    token_bitmask: jax.Array | None
    logit_bias: LogitBias | None = None
    bad_words: jax.Array | None = None
    min_tokens: jax.Array | None = None

    @classmethod
    def create(
        cls,
        options: Sequence[RequestOptions],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        *,
        keep_neutral: bool = False,
        sizes: OptionSizes | None = None,
    ) -> BatchOptions | None:
        """NumPy arrays of B requests' options.

        Args:
          options: B.
          prompt_lengths: B.
          vocab_size: V.
          keep_neutral: have every array, even where nobody asked; else None for those.
          sizes: of the arrays; None for what the requests need, or with `keep_neutral` the default.

        Returns:
          The options, or None where nobody asked for anything.

        Raises:
          ValueError: an id outside the vocabulary, or more is asked for than `sizes` hold.
        """
        if sizes is None:
            sizes = OptionSizes() if keep_neutral else OptionSizes.of(options)
        for one in options:
            one.check(vocab_size)
            sizes.check(one)

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
        min_tokens = array(np.int32, "min_tokens")
        counts = penalties is not None or min_tokens is not None
        prompts: Any = np.array(prompt_lengths, np.int32) if counts else None
        bias: Any = None
        words: Any = None
        if keep_neutral or any(one.logit_bias for one in options):
            biases = [one.logit_bias or {} for one in options]
            bias = LogitBias.from_mappings(biases, size=sizes.logit_bias)
        if keep_neutral or any(one.bad_words for one in options):
            words = BadWords.pack(
                [one.bad_words or () for one in options],
                num_words=sizes.bad_words,
                length=sizes.bad_word_length,
            )
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
            logit_bias=bias,
            bad_words=words,
            min_tokens=column(min_tokens),
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

    def processors(
        self,
        token_ids: jax.Array,
        lengths: jax.Array,
        done: jax.Array,
        stop_token_ids: jax.Array,
        vocab_size: int,
    ) -> LogitsProcessors | None:
        """What changes the logits of B sequences; None where nothing does.

        Args:
          token_ids: ``[B, S]`` int32, prompt and then output.
          lengths: ``[B]`` int32.
          done: ``[B]`` bool; those are not penalized.
          stop_token_ids: ``[B, M]`` int32, -1 for none.
          vocab_size: V.
        """
        bad_words, min_tokens = None, None
        if self.bad_words is not None:
            bad_words = BadWords.from_sequences(self.bad_words, token_ids, lengths=lengths)
        if self.min_tokens is not None and self.prompt_lengths is not None:
            remaining = self.min_tokens - (lengths - self.prompt_lengths)
            min_tokens = MinTokens(stop_token_ids, remaining)
        found = LogitsProcessors(
            logit_bias=self.logit_bias,
            penalties=self.count(token_ids, lengths, done, vocab_size),
            bad_words=bad_words,
            min_tokens=min_tokens,
        )
        return found if jax.tree.leaves(found) else None


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


def _bias(logit_bias: Any) -> dict[int, float] | None:
    """A bias as a dictionary of Python's numbers; None for none.

    Raises:
      TypeError: not a mapping of integers to numbers.
      ValueError: a negative id, or a number that is not finite.
    """
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, Mapping):
        raise TypeError(
            f"logit_bias must be a mapping of token ids to numbers, but it is "
            f"{described(logit_bias)}"
        )
    if not logit_bias:
        return None
    ids = inputs.token_list("logit_bias", logit_bias, 2**31)
    found = {}
    for token, value in zip(ids, logit_bias.values(), strict=True):
        try:
            with np.errstate(over="ignore"):
                number = float(np.float32(float(value)))
        except (TypeError, ValueError):
            raise TypeError(
                f"logit_bias must hold numbers, but that of token {token} is {value!r:.80}"
            ) from None
        if not math.isfinite(number):
            raise ValueError(
                f"logit_bias must hold finite numbers, but that of token {token} is {value}"
            )
        found[token] = number
    return found


def _words(bad_words: Any) -> tuple[tuple[int, ...], ...] | None:
    """Bad words as tuples; None for none.

    Raises:
      TypeError: not lists of integers.
      ValueError: a word of no tokens, or a negative id.
    """
    if bad_words is None:
        return None
    if isinstance(bad_words, (str, bytes)) or not isinstance(bad_words, Iterable):
        raise TypeError(f"bad_words must be lists of token ids, but it is {described(bad_words)}")
    words = [
        tuple(inputs.token_list(f"bad_words[{i}]", word, 2**31)) for i, word in enumerate(bad_words)
    ]
    return tuple(words) or None


def _power_of_2(size: int) -> int:
    """The least power of 2 that is at least `size`, and at least 1."""
    return 1 << max(0, size - 1).bit_length()


def _bits(allowed_token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray:
    """``[ceil(V/32)]`` uint32."""
    words = np.zeros((-(-vocab_size // 32),), np.uint32)
    if allowed_token_ids is None:
        return ~words
    ids = np.array(allowed_token_ids)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words
