"""Logits processors: what a request asks for that changes its rows of logits.

A parameter that changes logits is one `Processor`: a pytree with the parameters of B requests and
what it has to know of their sequences. `LogitsProcessors` has all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import (
    Sizes,
    as_int32,
    check_array,
    check_entries,
    check_int,
    check_type,
    host_int32,
    host_numbers,
    named_entries,
    pytree,
    require,
)
from jax_specdec._src.base.platform import Platform
from jax_specdec._src.base.ragged import Owners
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Array, IntegerRows, Integers
from jax_specdec._src.logits.grammar import bitmask_of
from jax_specdec._src.rows.blocks import BLOCK, by_blocks, scatter
from jax_specdec._src.rows.device import device_of
from jax_specdec._src.rows.rows import VocabRows

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


class Sequences(NamedTuple):
    """B sequences.

    Attributes:
      token_ids: ``[B, L]`` int32, prompt and then output; not read past a length.
      lengths: ``[B]`` int32, prompt and output together.
      prompt_lengths: ``[B]`` int32.
      vocab_size: V, static.
    """

    token_ids: jax.Array
    lengths: jax.Array
    prompt_lengths: jax.Array
    vocab_size: int


class Processor(Protocol):
    """The parameters of B requests, a pytree, and how they change the requests' rows of logits.

    A new one is a subclass, and a field of `LogitsProcessors`.
    """

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows ``[M, V]`` after the change.

        Args:
          logits: ``[M, V]``.
          rows: the request of each row, and the drafts before it.
          platform: that the program is for.
        """
        ...

    def append(self, token_ids: jax.Array) -> Self:
        """Returns the processor after more tokens of each request, such as a draft.

        Args:
          token_ids: ``[B]`` or ``[B, n]`` int32; -1 after the last of a request.
        """
        return self

    def with_sequences(self, sequences: Sequences) -> Self:
        """Returns a processor as it was packed, for the next token of these sequences."""
        return self

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether it changes no row."""
        ...


@pytree(token_ids="[B, C] int32", values="[B, C] float32")
@dataclasses.dataclass(frozen=True)
class LogitBias(Processor):
    """Biases that are added to a few logits of each of B requests.

    A bias of NaN or +inf makes `rejection_sample` end its request, and no other, with
    ``BAD_TARGET_ROW``; a bias of -inf forbids its token.

    Attributes:
      token_ids: ``[B, C]`` int32, each at most once per request. An id outside the vocabulary, such
        as -1, is ignored.
      values: ``[B, C]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> bias = sd.LogitBias.from_mappings([{0: 2.0}, {}])  # of two requests
      >>> bias.token_ids.tolist(), bias.values.tolist()
      ([[0], [-1]], [[2.0], [0.0]])
      >>> processors = sd.LogitsProcessors(logit_bias=bias)
      >>> sd.process_logits(jnp.ones((2, 3)), None, processors).tolist()
      [[3.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    token_ids: jax.Array
    values: jax.Array

    @classmethod
    def from_mappings(
        cls, biases: Sequence[Mapping[int, float]], *, size: int | None = None
    ) -> LogitBias:
        """Returns a bias, as NumPy arrays, of B mappings of token ids to values.

        Args:
          biases: one mapping per request.
          size: C; None for the size of the largest mapping.

        Raises:
          TypeError: no list of mappings of ints to numbers.
          ValueError: a mapping has more than `size` entries.
        """
        given = named_entries("biases", biases)
        for name, bias in given:
            check_type(name, bias, Mapping)
        most = max((len(bias) for _, bias in given), default=0)
        size = most if size is None else check_int("size", size, 0)
        require(most <= size, "biases", f"have at most size = {size} entries each", most)
        # [B, C]: the entries of each request, then -1 and 0
        token_ids = np.full((len(given), size), PLACEHOLDER_TOKEN_ID, np.int32)
        values = np.zeros((len(given), size), np.float32)
        for b, (name, bias) in enumerate(given):
            token_ids[b, : len(bias)] = host_int32(f"{name}.keys()", list(bias.keys()))
            values[b, : len(bias)] = host_numbers(f"{name}.values()", list(bias.values()))
        return cls(token_ids, values)  # type: ignore[arg-type]  # NumPy: packing needs no device

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request has a bias."""
        return jnp.all(self.token_ids < 0)

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows, in float32, after the biases are added."""
        # [M, C]: the biases of each row's request
        ids = self.token_ids[rows.owner]
        values = self.values[rows.owner]
        # In float32: a bias added to 16 bits would be rounded, and so would not be the caller's.
        return scatter(logits.astype(jnp.float32), ids, values, platform)


@pytree(
    frequency="[B] float32",
    presence="[B] float32",
    repetition="[B] float32",
    counts="[B, V] int32",
    in_prompt="[B, V] bool",
)
@dataclasses.dataclass(frozen=True)
class Penalties(Processor):
    """The penalties of B requests, and the tokens that each has seen.

    Repetition goes first, then frequency, then presence. Each row counts the drafts of its request
    that come before it, too. Rows may have fewer columns than `counts`, for a drafter that has
    fewer. Where no request is penalized (0, 0 and 1), rows are only cast to float32.

    Attributes:
      frequency: ``[B]`` float32, finite, subtracted from a token's logit for every occurrence in
        the output.
      presence: ``[B]`` float32, finite, subtracted once if the token occurs in the output.
      repetition: ``[B]`` float32, positive and finite. If a token occurs in the prompt or the
        output, its logit is divided by it if positive, and multiplied by it if not.
      counts: ``[B, V]`` int32, occurrences of each token in the output so far.
      in_prompt: ``[B, V]`` bool, whether a token occurs in the prompt.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> none, one = jnp.zeros(1), jnp.ones(1)
      >>> penalties = sd.Penalties.from_sequences(
      ...     jnp.array([[2, 0]]), lengths=jnp.array([2]), prompt_lengths=jnp.array([1]),
      ...     vocab_size=3, frequency=0.5 * one, presence=none, repetition=one)
      >>> after = penalties.append(jnp.array([0]))  # the token that was emitted
      >>> processors = sd.LogitsProcessors(penalties=after)
      >>> after.counts.tolist(), sd.process_logits(jnp.ones((1, 3)), None, processors).tolist()
      ([[2, 0, 0]], [[0.0, 1.0, 1.0]])
    """

    frequency: jax.Array
    presence: jax.Array
    repetition: jax.Array
    counts: jax.Array
    in_prompt: jax.Array

    @classmethod
    def from_sequences(
        cls,
        token_ids: IntegerRows,
        *,
        lengths: Integers,
        prompt_lengths: Integers,
        vocab_size: int,
        frequency: jax.Array,
        presence: jax.Array,
        repetition: jax.Array,
    ) -> Penalties:
        """Returns penalties that have counted the tokens of B sequences.

        Args:
          token_ids: ``[B, L]`` int32, prompt and then output. Ids past a length, and ids outside
            the vocabulary, are not counted.
          lengths: ``[B]`` int32, prompt and output together.
          prompt_lengths: ``[B]`` int32.
          vocab_size: V, static.
          frequency: ``[B]`` float32.
          presence: ``[B]`` float32.
          repetition: ``[B]`` float32.

        Raises:
          TypeError: an argument of another dtype, or ids, lengths or V not integers.
          ValueError: shapes that do not fit, or V below 0.
        """
        sizes: Sizes = {}
        token_ids = as_int32("token_ids", token_ids, "[B, L]", sizes)
        lengths = as_int32("lengths", lengths, "[B]", sizes)
        prompt_lengths = as_int32("prompt_lengths", prompt_lengths, "[B]", sizes)
        vocab_size = check_int("vocab_size", vocab_size, 0)
        numbers = {"frequency": frequency, "presence": presence, "repetition": repetition}
        for name, value in numbers.items():
            check_array(name, value, "[B] float32", sizes)
        batch, length = token_ids.shape
        # [B, L]: which places hold a token, and which of them are of the prompt
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        exists = (token_ids >= 0) & (place < lengths[:, None])
        is_prompt = place < prompt_lengths[:, None]
        request = jnp.arange(batch, dtype=jnp.int32)[:, None]
        # [B, L]: an output's and a prompt's ids; V elsewhere, which the scatters below drop
        in_output = jnp.where(exists & ~is_prompt, token_ids, vocab_size)
        in_prompt = jnp.where(exists & is_prompt, token_ids, vocab_size)
        # [B, L] -> [B, V]
        shape = (batch, vocab_size)
        return cls(
            frequency,
            presence,
            repetition,
            jnp.zeros(shape, jnp.int32).at[request, in_output].add(1, mode="drop"),
            jnp.zeros(shape, bool).at[request, in_prompt].set(True, mode="drop"),
        )

    @classmethod
    def pack(
        cls, frequency: Sequence[float], presence: Sequence[float], repetition: Sequence[float]
    ) -> Penalties:
        """Returns penalties of B requests, as NumPy arrays; `with_sequences` counts tokens.

        Raises:
          TypeError: no lists of numbers.
          ValueError: lists of different lengths.
        """
        numbers = {"frequency": frequency, "presence": presence, "repetition": repetition}
        sizes: Sizes = {}
        # [B] each
        given: dict[str, Any] = {
            name: np.float32(host_numbers(name, x)) for name, x in numbers.items()
        }
        for name, x in given.items():
            check_array(name, x, "[B]", sizes)
        # Counts of no columns: their size is the vocabulary's, which comes later
        none: Any = np.zeros((sizes["B"], 0), np.int32)
        return cls(**given, counts=none, in_prompt=none.astype(bool))

    def with_sequences(self, sequences: Sequences) -> Penalties:
        """Returns penalties that have counted the tokens of these sequences."""
        return self.from_sequences(
            **sequences._asdict(),
            frequency=self.frequency,
            presence=self.presence,
            repetition=self.repetition,
        )

    def append(self, token_ids: jax.Array) -> Penalties:
        """Returns penalties that count these tokens too; an id outside the vocabulary is none."""
        ids = _columns(token_ids, len(self.counts))
        # A negative id would count from the end of the vocabulary: V is dropped.
        ids = jnp.where(ids < 0, self.counts.shape[1], ids)
        # [B, n] -> [B, V]: one more of each id, in the request's own row
        request = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return dataclasses.replace(self, counts=self.counts.at[request, ids].add(1, mode="drop"))

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows in float32, penalized."""
        num_drafts = rows.token_ids.shape[1]
        # K times [M]: draft i of each row's request, if it comes before the row
        before = [
            jnp.where(i < rows.offset, rows.token_ids[:, i], PLACEHOLDER_TOKEN_ID)
            for i in range(num_drafts)
        ]

        def of_owners(owner: jax.Array, logits: jax.Array, before: list[jax.Array]) -> jax.Array:
            # Without drafts row b is request b's, but on TPUs rows come in blocks.
            is_whole = num_drafts == 0 and platform != "tpu"
            own = self if is_whole else device_of(platform).take(self, owner)
            return own._penalize(logits, before)

        # The pass over counts [B, V] is left out where nobody is penalized.
        return lax.cond(
            self.is_neutral,
            lambda: logits.astype(jnp.float32),
            lambda: _by_owner(of_owners, rows, platform, logits, before),
        )

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request is penalized."""
        neutral = (self.frequency == 0) & (self.presence == 0) & (self.repetition == 1)
        return jnp.all(neutral)

    def _penalize(self, logits: jax.Array, before: Sequence[jax.Array]) -> jax.Array:
        """Returns rows ``[M, V]`` of M requests, with drafts ``before[i] [M]`` before them."""
        # The rows of a drafter may have fewer columns than the counts.
        size = logits.shape[1]
        ids = jnp.arange(size, dtype=jnp.int32)[None, :]
        # [M, V]: occurrences in the output and in the drafts before the row. A comparison for each
        # draft is elementwise, so that all is one pass over the logits; a scatter would be another.
        count = self.counts[:, :size]
        for drafted in before:
            count += (drafted[:, None] == ids).astype(jnp.int32)
        # [M] -> [M, 1]
        frequency, presence, repetition = (
            x[:, None] for x in (self.frequency, self.presence, self.repetition)
        )
        # [M, 1]: a subnormal divisor may be flushed to 0, so it is out of range
        valid = jnp.isfinite(frequency) & jnp.isfinite(presence)
        valid &= jnp.isfinite(repetition) & (repetition >= _SMALLEST)

        x = logits.astype(jnp.float32)
        # Repetition: x / r where x is positive and x * r where it is not, of all tokens seen
        seen = (count > 0) | self.in_prompt[:, :size]
        x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
        # Frequency and presence: x - (frequency * n + presence), of tokens of the output
        x -= frequency * count.astype(jnp.float32) + jnp.where(count > 0, presence, 0.0)
        return jnp.where(valid, x, jnp.nan)


@pytree(words="[B, W, L] int32", recent="[B, L-1] int32")
@dataclasses.dataclass(frozen=True)
class BadWords(Processor):
    """Words, as sequences of tokens, that B requests must not emit; and their latest tokens.

    The last token of a word is forbidden in rows that come right after its other tokens, which may
    be of the prompt. A word of one token is forbidden in every row. (transformers reads the prompt
    too; vLLM looks for the other tokens in the output alone.)

    Attributes:
      words: ``[B, W, L]`` int32. A word is at the end of its row, with -1 before it; a row without
        a word is all -1.
      recent: ``[B, L-1]`` int32, the last tokens of each sequence, prompt included; -1 before its
        first.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> words = sd.BadWords.pack([[[5], [8, 9, 5]], []])
      >>> words.tolist()
      [[[-1, -1, 5], [8, 9, 5]], [[-1, -1, -1], [-1, -1, -1]]]
      >>> sd.BadWords.from_sequences(
      ...     words, jnp.array([[1, 8, 9], [4, 0, 0]]), lengths=jnp.array([3, 1])).recent.tolist()
      [[8, 9], [-1, 4]]
    """

    words: jax.Array
    recent: jax.Array

    @staticmethod
    def pack(
        words: Sequence[Sequence[Sequence[int]]],
        *,
        num_words: int | None = None,
        length: int | None = None,
    ) -> np.ndarray:
        """Returns the words of B requests as an array ``[B, W, L]``.

        Args:
          words: for each request a list of words, each of at least one token.
          num_words: W; None for the most words of any request.
          length: L; None for the length of the longest word, 1 if there is none.

        Raises:
          TypeError: no lists of lists of lists of ints.
          ValueError: a request has more than `num_words` words, or a word more than `length`
            tokens.
        """
        # Of each request a list of words, each a list of tokens
        given = [
            [[token for _, token in named_entries(*word)] for word in named_entries(*own)]
            for own in named_entries("words", words)
        ]
        host_int32("words", [token for own in given for word in own for token in word], "[n]")
        # W and L, if they are not given
        most = max(map(len, given), default=0)
        longest = max((len(word) for own in given for word in own), default=1)
        num_words = most if num_words is None else check_int("num_words", num_words, 0)
        length = longest if length is None else check_int("length", length, 1)
        require(most <= num_words, "words", f"be at most num_words = {num_words}", most)
        require(longest <= length, "words", f"have at most length = {length} tokens", longest)
        # [B, W, L]: each word at the end of its row
        packed = np.full((len(given), num_words, length), PLACEHOLDER_TOKEN_ID, np.int32)
        for b, own in enumerate(given):
            for w, word in enumerate(own):
                packed[b, w, length - len(word) :] = word
        return packed

    @classmethod
    def from_sequences(cls, words: Array, token_ids: IntegerRows, *, lengths: Integers) -> BadWords:
        """Returns the bad words of B sequences, from whose ends `recent` is taken.

        Args:
          words: ``[B, W, L]`` int32.
          token_ids: ``[B, S]`` int32, prompt and then output; not read past a length.
          lengths: ``[B]`` int32, prompt and output together.

        Raises:
          TypeError: not integers.
          ValueError: shapes that do not fit.
        """
        sizes: Sizes = {}
        words = as_int32("words", words, "[B, W, L]", sizes)
        token_ids = as_int32("token_ids", token_ids, "[B, S]", sizes)
        lengths = as_int32("lengths", lengths, "[B]", sizes)
        # [B, L-1]: the places of each sequence's last tokens, negative before its first
        num_recent = words.shape[2] - 1
        offset = jnp.arange(-num_recent, 0, dtype=jnp.int32)
        place = lengths[:, None] + offset[None, :]
        recent = jnp.take_along_axis(token_ids, jnp.maximum(place, 0), axis=1, mode="clip")
        return cls(words, jnp.where(place >= 0, recent, PLACEHOLDER_TOKEN_ID))

    def with_sequences(self, sequences: Sequences) -> BadWords:
        """Returns the words with the last tokens of these sequences."""
        return self.from_sequences(self.words, sequences.token_ids, lengths=sequences.lengths)

    def append(self, token_ids: jax.Array) -> BadWords:
        """Returns the words with the last tokens after these."""
        ids = _columns(token_ids, len(self.recent))
        size = self.recent.shape[1]
        if not size:  # words of one token need nothing before them
            return self
        # [B, L-1]: the last L - 1 of the recent tokens and the m new ones begin at place m
        place = jnp.sum(ids >= 0, axis=1, dtype=jnp.int32)[:, None] + _range(size)
        tokens = jnp.concatenate([self.recent, ids], axis=1)
        recent = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
        return dataclasses.replace(self, recent=recent)

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows with -inf where a word would be completed."""
        *_, size = self.words[:, :, 1:].shape
        # [M, L-1+K] -> [M, L-1]: the recent tokens and drafts of each row's request, of which those
        # right before the row begin at its offset
        tokens = jnp.concatenate([self.recent[rows.owner], rows.token_ids], axis=1)
        place = rows.offset[:, None] + _range(size)
        if size:
            before = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
        else:  # words of one token need nothing before them
            before = tokens[:, :0]
        # [M, W, L]: a word begins where each token but its last matches, or is -1
        words = self.words[rows.owner]
        begins = (words[:, :, :-1] < 0) | (words[:, :, :-1] == before[:, None, :])
        # [M, W]: the last tokens of the words that have begun, -1 of the others
        completed = jnp.where(begins.all(axis=2), words[:, :, -1], PLACEHOLDER_TOKEN_ID)
        # -inf at these columns of [M, V]; a column of -1 is dropped
        return scatter(logits, completed, None, platform)

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request has a bad word."""
        return jnp.all(self.words[:, :, -1] < 0)


@pytree(stop_token_ids="[B, M] int32", remaining="[B] int32")
@dataclasses.dataclass(frozen=True)
class MinTokens(Processor):
    """How many more tokens each of B requests must emit before it may stop.

    Its stop tokens are forbidden in rows with fewer than `remaining` drafts before them. With
    ``min_tokens = n``, a stop token is token n + 1 of the output at the earliest.

    Attributes:
      stop_token_ids: ``[B, M]`` int32. An id outside the vocabulary, such as -1, is ignored.
      remaining: ``[B]`` int32, tokens that must come before a stop token is allowed:
        ``min_tokens - (lengths - prompt_lengths)``. If it is not positive, nothing is forbidden.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> least = sd.MinTokens(jnp.array([[1]]), remaining=jnp.array([1]))  # token 1 ends a text
      >>> for least in (least, least.append(jnp.array([0]))):
      ...     processors = sd.LogitsProcessors(min_tokens=least)
      ...     print(sd.process_logits(jnp.ones((1, 3)), None, processors).tolist())
      [[1.0, -inf, 1.0]]
      [[1.0, 1.0, 1.0]]
    """

    stop_token_ids: jax.Array
    remaining: jax.Array

    def with_sequences(self, sequences: Sequences) -> MinTokens:
        """Returns what remains of ``remaining = min_tokens``, after these sequences' output."""
        emitted = sequences.lengths - sequences.prompt_lengths
        return dataclasses.replace(self, remaining=self.remaining - emitted)

    def append(self, token_ids: jax.Array) -> MinTokens:
        """Returns what remains after these tokens."""
        # [B]: -1 is no token
        ids = _columns(token_ids, len(self.remaining))
        emitted = jnp.sum(ids >= 0, axis=1, dtype=jnp.int32)
        return dataclasses.replace(self, remaining=self.remaining - emitted)

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows with -inf for stop tokens that come too early."""
        # [M, 1]: the row's token would be the offset-th from here on, and before the least number
        is_early = (rows.offset < self.remaining[rows.owner])[:, None]
        # [M, S]: the stop tokens of each row's request, -1 where they are allowed
        stops = jnp.where(is_early, self.stop_token_ids[rows.owner], PLACEHOLDER_TOKEN_ID)
        return scatter(logits, stops, None, platform)

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether every request may stop."""
        return jnp.all((self.remaining <= 0)[:, None] | (self.stop_token_ids < 0))


@pytree(token_bitmask="[B, ceil(V/32)] uint32")
@dataclasses.dataclass(frozen=True)
class AllowedTokens(Processor):
    """The only tokens that each of B requests may emit.

    Attributes:
      token_bitmask: ``[B, ceil(V/32)]`` uint32, bit ``i % 32`` of word ``i // 32`` is set where
        token i is allowed.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> processors = sd.LogitsProcessors(
      ...     allowed_tokens=sd.AllowedTokens.pack([[0, 2], None], vocab_size=3))
      >>> sd.process_logits(jnp.ones((2, 3)), None, processors).tolist()
      [[1.0, -inf, 1.0], [1.0, 1.0, 1.0]]
    """

    token_bitmask: jax.Array

    @classmethod
    def pack(cls, token_ids: Sequence[Sequence[int] | None], *, vocab_size: int) -> AllowedTokens:
        """Returns the allowed ids of B requests, as a NumPy array; None allows every token.

        Raises:
          TypeError: no list of lists of ints.
          ValueError: an id is outside the vocabulary.
        """
        vocab_size = check_int("vocab_size", vocab_size)
        # Of no ids no bit is set: turned over, every token is allowed.
        every = ~bitmask_of((), vocab_size)
        words = []
        for name, own in named_entries("token_ids", token_ids):
            if own is None:
                words.append(every)
                continue
            ids = host_int32(name, own, "[n]")
            fits = (ids >= 0) & (ids < vocab_size)
            check_entries(f"{name}[{{}}]", ids, fits, f"be an id in [0, {vocab_size})")
            # [ceil(V/32)]
            words.append(bitmask_of(ids, vocab_size))
        # [B, ceil(V/32)], also of no requests; NumPy, because packing needs no device
        packed: Any = np.array(words, every.dtype).reshape(-1, every.shape[0])
        return cls(packed)

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows with -inf for tokens that are not allowed."""

        def masked(owner: jax.Array, logits: jax.Array) -> jax.Array:
            device = device_of(platform)
            # [M, ceil(V/32)]: the words of each row's request
            words = device.take(self.token_bitmask, owner)
            return VocabRows(logits, logits.shape[1], -jnp.inf, device, words).masked().matrix

        return _by_owner(masked, rows, platform, logits)

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether every token is allowed."""
        return jnp.all(self.token_bitmask == jnp.uint32(2**32 - 1))


def _by_owner(
    function: Callable[..., jax.Array], rows: Owners, platform: Platform, *arrays: Any
) -> jax.Array:
    """Returns ``function(rows.owner, *arrays)``; a few rows at a time on TPUs."""
    if platform == "tpu":
        return cast(jax.Array, by_blocks(function, BLOCK, rows.owner, rows.owner, *arrays))
    return function(rows.owner, *arrays)


def _columns(token_ids: Integers | IntegerRows, batch: int) -> jax.Array:
    """Returns ids ``[B]`` or ``[B, n]`` as ``[B, n]`` int32.

    Raises:
      TypeError: not integers.
      ValueError: not of B requests.
    """
    token_ids = as_int32("token_ids", token_ids, "[B] or [B, n]", {"B": batch})
    return token_ids[:, None] if token_ids.ndim == 1 else token_ids


def _range(size: int) -> jax.Array:
    """Returns ``[1, size]`` int32, 0, 1, ..."""
    return jnp.arange(size, dtype=jnp.int32)[None, :]
