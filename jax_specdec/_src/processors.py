"""Logits processors that change a few entries of a row: biases, bad words, minimum lengths.

Each is a pytree with the parameters of B requests, and a function on rows of logits in the layout
of `rejection_sample`. Entries are scattered into the rows; no other array of the vocabulary's size
is made. `process_logits` applies all of them, and penalties, in the order of vLLM and transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding

from jax_specdec._src import ragged
from jax_specdec._src.arrays import Sizes, check_tree, check_type, pytree, require
from jax_specdec._src.blocks import BLOCK
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.penalties import Penalties, apply_penalties
from jax_specdec._src.platform import Platform, traced_for_platform
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, Array, Drafts


@pytree(token_ids="[B, C] int32", values="[B, C] float32")
@dataclasses.dataclass(frozen=True)
class LogitBias:
    """Biases that are added to a few logits of each of B requests.

    Attributes:
      token_ids: ``[B, C]`` int32, each at most once per request. An id outside the vocabulary, such
        as -1, is ignored.
      values: ``[B, C]`` float32.

    Example:
      >>> import jax_specdec as sd
      >>> bias = sd.LogitBias.from_mappings([{7: 2.5}, {}])
      >>> bias.token_ids.tolist(), bias.values.tolist()
      ([[7], [-1]], [[2.5], [0.0]])
    """

    token_ids: jax.Array
    values: jax.Array

    @classmethod
    def from_mappings(
        cls, biases: Sequence[Mapping[int, float]], *, size: int | None = None
    ) -> LogitBias:
        """A bias, as NumPy arrays, from B mappings of token ids to values.

        Args:
          biases: one mapping per request.
          size: C; None for the size of the largest mapping.

        Raises:
          ValueError: a mapping has more than `size` entries.
        """
        most = max(map(len, biases), default=0)
        size = most if size is None else size
        require(most <= size, "biases", f"have at most size = {size} entries each", most)
        token_ids = np.full((len(biases), size), PLACEHOLDER_TOKEN_ID, np.int32)
        values = np.zeros((len(biases), size), np.float32)
        for b, bias in enumerate(biases):
            token_ids[b, : len(bias)] = list(bias.keys())
            values[b, : len(bias)] = list(bias.values())
        return cls(token_ids, values)  # type: ignore[arg-type]  # NumPy: packing needs no device

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request has a bias."""
        return jnp.all(self.token_ids < 0)


@pytree(words="[B, W, L] int32", recent="[B, L-1] int32")
@dataclasses.dataclass(frozen=True)
class BadWords:
    """Words, as sequences of tokens, that B requests must not emit; and their latest tokens.

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
        """The words of B requests as an array ``[B, W, L]``.

        Args:
          words: for each request a list of words, each of at least one token.
          num_words: W; None for the most words of any request.
          length: L; None for the length of the longest word, 1 if there is none.

        Raises:
          ValueError: a request has more than `num_words` words, or a word more than `length`
            tokens.
        """
        most = max(map(len, words), default=0)
        longest = max((len(word) for own in words for word in own), default=1)
        num_words = most if num_words is None else num_words
        length = longest if length is None else length
        require(most <= num_words, "words", f"be at most num_words = {num_words}", most)
        require(longest <= length, "words", f"have at most length = {length} tokens", longest)
        packed = np.full((len(words), num_words, length), PLACEHOLDER_TOKEN_ID, np.int32)
        for b, own in enumerate(words):
            for w, word in enumerate(own):
                packed[b, w, length - len(word) :] = word
        return packed

    @classmethod
    def from_sequences(
        cls, words: jax.Array, token_ids: jax.Array, *, lengths: jax.Array
    ) -> BadWords:
        """The bad words of B sequences, from whose ends `recent` is taken.

        Args:
          words: ``[B, W, L]`` int32.
          token_ids: ``[B, S]`` int32, prompt and then output; not read past a length.
          lengths: ``[B]`` int32, prompt and output together.
        """
        num_recent = words.shape[2] - 1
        offset = jnp.arange(-num_recent, 0, dtype=jnp.int32)
        place = lengths[:, None] + offset[None, :]
        recent = jnp.take_along_axis(token_ids, jnp.maximum(place, 0), axis=1, mode="clip")
        return cls(jnp.asarray(words), jnp.where(place >= 0, recent, PLACEHOLDER_TOKEN_ID))

    def append(self, token_ids: jax.Array) -> BadWords:
        """The bad words after one more token of each request, such as a draft; ``[B]`` int32."""
        if self.recent.shape[1] == 0:
            return self
        recent = jnp.concatenate([self.recent[:, 1:], token_ids[:, None]], axis=1)
        return dataclasses.replace(self, recent=recent)

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request has a bad word."""
        return jnp.all(self.words[:, :, -1] < 0)


@pytree(stop_token_ids="[B, M] int32", remaining="[B] int32")
@dataclasses.dataclass(frozen=True)
class MinTokens:
    """How many more tokens each of B requests must emit before it may stop.

    Attributes:
      stop_token_ids: ``[B, M]`` int32. An id outside the vocabulary, such as -1, is ignored.
      remaining: ``[B]`` int32, tokens that must come before a stop token is allowed:
        ``min_tokens - (lengths - prompt_lengths)``. If it is not positive, nothing is forbidden.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> least = sd.MinTokens(jnp.array([[2]]), remaining=jnp.array([3]))
      >>> least.append(jnp.array([7])).remaining.tolist()
      [2]
    """

    stop_token_ids: jax.Array
    remaining: jax.Array

    def append(self, token_ids: jax.Array) -> MinTokens:
        """The same after one more token of each request, such as a draft; ``[B]`` int32."""
        return dataclasses.replace(self, remaining=self.remaining - 1)

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether every request may stop."""
        return jnp.all((self.remaining <= 0)[:, None] | (self.stop_token_ids < 0))


@pytree(
    logit_bias=(LogitBias,), penalties=(Penalties,), bad_words=(BadWords,), min_tokens=(MinTokens,)
)
@dataclasses.dataclass(frozen=True)
class LogitsProcessors:
    """The processors of B requests, which change logits before mask, temperature and filters.

    If a field is None, nothing is compiled for it.

    Attributes:
      logit_bias: added to the logits.
      penalties: applied to the biased logits, by `apply_penalties`.
      bad_words: whose last tokens get -inf where the sequence ends with their other tokens.
      min_tokens: stop tokens get -inf as long as a request has fewer tokens.

    Example:
      >>> import jax_specdec as sd
      >>> processors = sd.LogitsProcessors(logit_bias=sd.LogitBias.from_mappings([{3: -1.0}]))
      >>> bool(processors.is_neutral)
      False
    """

    logit_bias: LogitBias | None = None
    penalties: Penalties | None = None
    bad_words: BadWords | None = None
    min_tokens: MinTokens | None = None

    def append(self, token_ids: jax.Array) -> LogitsProcessors:
        """The processors after one more token of each request, such as a draft.

        Args:
          token_ids: ``[B]`` int32.
        """
        return dataclasses.replace(
            self,
            penalties=self.penalties and self.penalties.append(token_ids),
            bad_words=self.bad_words and self.bad_words.append(token_ids),
            min_tokens=self.min_tokens and self.min_tokens.append(token_ids),
        )

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request uses any of the processors."""
        neutral = jnp.bool_(True)
        if self.logit_bias is not None:
            neutral &= self.logit_bias.is_neutral
        if self.penalties is not None:
            neutral &= self.penalties.is_neutral
        if self.bad_words is not None:
            neutral &= self.bad_words.is_neutral
        if self.min_tokens is not None:
            neutral &= self.min_tokens.is_neutral
        return neutral


def process_logits(
    logits: Array,
    drafts: Drafts | None,
    processors: LogitsProcessors,
    *,
    config: SpecDecodeConfig | None = None,
    padded_rows: bool = False,
) -> jax.Array:
    """Apply the processors to rows of logits; each row takes account of the drafts before it.

    The order is that of vLLM and transformers: biases first, then penalties, so that a repetition
    penalty scales a biased logit, then bad words and stop tokens, whose logits become -inf. Give
    the result to `rejection_sample`, which applies bitmask, temperature, min-p, top-k and top-p, in
    this order. Accepted, recovered and bonus tokens are then all drawn from processed rows.

    A drafter may process its own rows, so that its q is closer to p: one position at a time, with
    `drafts` None, and ``processors.append`` after each token. If no token is left in a row, because
    the drafter knows fewer tokens, it must use the row as it was. The emitted tokens are still
    distributed as the target's.

    Args:
      logits: ``[N+B, V]`` as `rejection_sample` takes them, or ``[N, V]`` if there are no bonus
        rows; float32, bfloat16 or float16. If `drafts` is None, ``[B, V]``, one row per request.
      drafts: the drafts to verify; None for rows without drafts before them.
      processors: of the sequences before this step.
      config: static settings; required with drafts.
      padded_rows: as in `rejection_sample`, for logits with bonus rows.

    Returns:
      Rows of the shape of `logits`: float32 if there are biases or penalties, else of the same
      dtype. A request with a row in which no token is left ends with ``BAD_TARGET_ROW``, and no
      other.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> processors = sd.LogitsProcessors(
      ...     logit_bias=sd.LogitBias.from_mappings([{0: 2.0}]),
      ...     min_tokens=sd.MinTokens(jnp.array([[1]]), remaining=jnp.array([1])))
      >>> sd.process_logits(
      ...     jnp.zeros((2, 3)), sd.Drafts.from_dense(jnp.array([[2]])), processors,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=1)).tolist()
      [[2.0, -inf, 0.0], [2.0, 0.0, 0.0]]

    References:
      vLLM, `vllm/v1/sample/sampler.py`; transformers, `_get_logits_processor` in
      `generation/utils.py`.
    """
    check_type("processors", processors, LogitsProcessors)
    p, x = processors, cast(jax.Array, logits)
    if p.logit_bias is not None:
        x = apply_logit_bias(x, drafts, p.logit_bias, config=config, padded_rows=padded_rows)
    if p.penalties is not None:
        x = apply_penalties(x, drafts, p.penalties, config=config, padded_rows=padded_rows)
    if p.bad_words is not None:
        x = forbid_bad_words(x, drafts, p.bad_words, config=config, padded_rows=padded_rows)
    if p.min_tokens is not None:
        x = forbid_stop_tokens(x, drafts, p.min_tokens, config=config, padded_rows=padded_rows)
    return x


def apply_logit_bias(
    logits: jax.Array,
    drafts: Drafts | None,
    logit_bias: LogitBias,
    *,
    config: SpecDecodeConfig | None = None,
    padded_rows: bool = False,
) -> jax.Array:
    """Add a bias to a few logits of each request, in all of its rows.

    Args:
      logits: as for `process_logits`.
      drafts: the drafts to verify; None for one row per request.
      logit_bias: what to add.
      config: static settings; required with drafts.
      padded_rows: as in `rejection_sample`.

    Returns:
      float32 of the shape of `logits`. A bias of NaN or +inf makes `rejection_sample` end its
      request, and no other, with ``BAD_TARGET_ROW``; a bias of -inf forbids its token.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> bias = sd.LogitBias(jnp.array([[2, -1]]), jnp.array([[1.5, 0.0]]))
      >>> apply_logit_bias(jnp.zeros((1, 3)), None, bias).tolist()
      [[0.0, 0.0, 1.5]]
    """
    batch = _check("logit_bias", logit_bias, LogitBias, logits, drafts, config, padded_rows)
    x = jnp.asarray(logits).astype(jnp.float32)
    if x.shape[0] == 0 or batch == 0:
        return x
    logit_bias = jax.tree.map(jnp.asarray, logit_bias)
    owner, _, _ = ragged.owners(logits, drafts, config, padded_rows)
    ids, values = logit_bias.token_ids[owner], logit_bias.values[owner]
    return _scatter(x, ids, values)


def forbid_bad_words(
    logits: jax.Array,
    drafts: Drafts | None,
    bad_words: BadWords,
    *,
    config: SpecDecodeConfig | None = None,
    padded_rows: bool = False,
) -> jax.Array:
    """Forbid the last token of a bad word in rows that come right after its other tokens.

    The tokens before a row are the request's sequence, prompt included, and the drafts before the
    row's position. A word of one token is forbidden in every row. (transformers reads the prompt
    too; vLLM looks for the other tokens in the output alone.)

    Args:
      logits: as for `process_logits`.
      drafts: the drafts to verify; None for rows without drafts before them.
      bad_words: of the sequences before this step.
      config: static settings; required with drafts.
      padded_rows: as in `rejection_sample`.

    Returns:
      `logits` with -inf for forbidden tokens.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time.

    Example:
      The word [0, 1] must not be completed: neither after the sequence, which ends with 0, nor
      after the draft 0:

      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> bad_words = sd.BadWords(jnp.array([[[0, 1]]]), recent=jnp.array([[0]]))
      >>> forbid_bad_words(
      ...     jnp.zeros((3, 2)), sd.Drafts.from_dense(jnp.array([[1, 0]])), bad_words,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2)).tolist()
      [[0.0, -inf], [0.0, 0.0], [0.0, -inf]]
    """
    batch = _check("bad_words", bad_words, BadWords, logits, drafts, config, padded_rows)
    length = bad_words.words.shape[2]
    if logits.shape[0] == 0 or batch == 0:
        return jnp.asarray(logits)
    bad_words = jax.tree.map(jnp.asarray, bad_words)
    owner, offset, token_ids = ragged.owners(logits, drafts, config, padded_rows)
    k = token_ids.shape[1]
    before = jnp.concatenate([bad_words.recent, token_ids], axis=1)
    beginning = bad_words.words[:, :, :-1]
    is_before = [  # for each offset: whether the tokens before it are all of a word but its last
        jnp.all((beginning < 0) | (beginning == before[:, None, i : i + length - 1]), axis=2)
        for i in range(k + 1)
    ]
    completes = jnp.stack(is_before, axis=1)[owner, jnp.clip(offset, 0, k)]  # [M, W]
    return _forbid(logits, jnp.where(completes, bad_words.words[:, :, -1][owner], -1))


def forbid_stop_tokens(
    logits: jax.Array,
    drafts: Drafts | None,
    min_tokens: MinTokens,
    *,
    config: SpecDecodeConfig | None = None,
    padded_rows: bool = False,
) -> jax.Array:
    """Forbid a request's stop tokens until it has its minimum number of tokens.

    They are forbidden in rows with fewer than ``remaining`` drafts before them. With
    ``min_tokens = n``, a stop token is token n + 1 of the output at the earliest.

    Args:
      logits: as for `process_logits`.
      drafts: the drafts to verify; None for rows without drafts before them.
      min_tokens: of the sequences before this step.
      config: static settings; required with drafts.
      padded_rows: as in `rejection_sample`.

    Returns:
      `logits` with -inf for forbidden tokens.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> least = sd.MinTokens(jnp.array([[1], [1]]), remaining=jnp.array([2, 0]))
      >>> forbid_stop_tokens(jnp.zeros((2, 2)), None, least).tolist()
      [[0.0, -inf], [0.0, 0.0]]
    """
    batch = _check("min_tokens", min_tokens, MinTokens, logits, drafts, config, padded_rows)
    if logits.shape[0] == 0 or batch == 0:
        return jnp.asarray(logits)
    min_tokens = jax.tree.map(jnp.asarray, min_tokens)
    owner, offset, _ = ragged.owners(logits, drafts, config, padded_rows)
    is_early = offset < min_tokens.remaining[owner]
    return _forbid(logits, jnp.where(is_early[:, None], min_tokens.stop_token_ids[owner], -1))


def _forbid(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows with -inf at ``token_ids [M, n]``; ids outside the vocabulary are ignored."""
    return _scatter(jnp.asarray(logits), token_ids, None)


def _scatter(x: jax.Array, token_ids: jax.Array, added: jax.Array | None) -> jax.Array:
    """Rows with ``added [M, n]`` added at ``token_ids [M, n]``, or -inf put there if it is None."""
    is_token = (token_ids >= 0) & (token_ids < x.shape[1])
    ids = jnp.where(is_token, token_ids, x.shape[1])  # dropped
    if x.shape[0] <= BLOCK:
        return _scatter_rows(x, ids, added)
    return traced_for_platform(_scattered, (x, ids, added))


def _scattered(
    given: tuple[jax.Array, jax.Array, jax.Array | None], platform: Platform
) -> jax.Array:
    return _scatter_blocks(*given) if platform == "tpu" else _scatter_rows(*given)


def _scatter_rows(x: jax.Array, ids: jax.Array, added: jax.Array | None = None) -> jax.Array:
    place = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], ids
    if added is None:
        return x.at[place].set(-jnp.inf, mode="drop", out_sharding=_place_of(x))
    return x.at[place].add(added, mode="drop", out_sharding=_place_of(x))


def _scatter_blocks(x: jax.Array, ids: jax.Array, added: jax.Array | None = None) -> jax.Array:
    """`_scatter_rows` of a few rows at a time: a TPU copies all rows that it is given to scatter.

    The last block overlaps the one before; rows that are in both are skipped in the last.
    """
    size = x.shape[0]
    starts = jnp.minimum(jnp.arange(0, size, BLOCK, dtype=jnp.int32), size - BLOCK)

    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        given = (x, ids) if added is None else (x, ids, added)
        rows, own, *more = (lax.dynamic_slice_in_dim(y, starts[i], BLOCK) for y in given)
        is_new = starts[i] + jnp.arange(BLOCK, dtype=jnp.int32) >= i * BLOCK
        own = jnp.where(is_new[:, None], own, x.shape[1])
        return lax.dynamic_update_slice_in_dim(x, _scatter_rows(rows, own, *more), starts[i], 0)

    return lax.fori_loop(0, starts.shape[0], step, x)


def _place_of(x: jax.Array) -> NamedSharding | None:
    """The sharding of `x` on a mesh with explicit axes, which an update there has to name."""
    place = jax.typeof(x).sharding
    return place if AxisType.Explicit in place.mesh.axis_types else None


def _check(
    name: str,
    processor: object,
    cls: type,
    logits: Array,
    drafts: Drafts | None,
    config: SpecDecodeConfig | None,
    padded_rows: bool,
) -> int:
    """Check a processor and the rows that it is applied to; returns B."""
    sizes: Sizes = {}
    check_tree(name, processor, (cls,), sizes)
    ragged.check_rows(logits, drafts, sizes["B"], config, padded_rows)
    return sizes["B"]
