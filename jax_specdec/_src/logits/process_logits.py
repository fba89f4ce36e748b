"""All logits processors of a batch, and what applies them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast, get_args, get_type_hints

import jax
import jax.numpy as jnp

from jax_specdec._src.base import ragged
from jax_specdec._src.base.arrays import Sizes, check_tree, check_type, pytree
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.base.ragged import Owners
from jax_specdec._src.base.types import Array, Drafts
from jax_specdec._src.logits.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Processor,
    Sequences,
)


@dataclasses.dataclass(frozen=True)
class LogitsProcessors(Processor):
    """The processors of B requests, applied before mask, temperature and filters; itself one.

    They are applied in the order of the fields. If one is None, nothing is compiled for it.

    Attributes:
      logit_bias: added to the logits.
      penalties: applied to the biased logits.
      bad_words: whose last tokens get -inf where the sequence ends with their other tokens.
      min_tokens: stop tokens get -inf as long as a request has fewer tokens.
      allowed_tokens: all others get -inf.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> processors = sd.LogitsProcessors(
      ...     min_tokens=sd.MinTokens(jnp.array([[1]]), remaining=jnp.array([1])),
      ...     allowed_tokens=sd.AllowedTokens.pack([None], vocab_size=3))
      >>> after = processors.append(jnp.array([0]))  # a token of each request
      >>> bool(processors.is_neutral), bool(after.is_neutral)
      (False, True)
    """

    logit_bias: LogitBias | None = None
    penalties: Penalties | None = None
    bad_words: BadWords | None = None
    min_tokens: MinTokens | None = None
    allowed_tokens: AllowedTokens | None = None

    def apply(self, logits: jax.Array, rows: Owners, platform: Platform) -> jax.Array:
        """Returns the rows after all changes, of which the order matters."""
        for one in self._given().values():
            logits = one.apply(logits, rows, platform)
        return logits

    def append(self, token_ids: jax.Array) -> LogitsProcessors:
        """Returns the processors after more tokens of each request, ``[B]`` or ``[B, n]``."""
        return self._map(lambda one: one.append(token_ids))

    def with_sequences(self, sequences: Sequences) -> LogitsProcessors:
        """Returns packed processors for the next token of these sequences."""
        return self._map(lambda one: one.with_sequences(sequences))

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request uses any of the processors."""
        # []: one flag of all, by which a caller may leave out the whole change
        neutral = jnp.bool_(True)
        for one in self._given().values():
            neutral &= one.is_neutral
        return neutral

    def _given(self) -> dict[str, Processor]:
        """Returns the processors that are not None by name, in their order."""
        values = {name: getattr(self, name) for name in PROCESSORS}
        return {name: value for name, value in values.items() if value is not None}

    def _map(self, function: Callable[[Processor], Any]) -> LogitsProcessors:
        """Returns the processors after `function` of each that is not None."""
        return dataclasses.replace(
            self, **{name: function(one) for name, one in self._given().items()}
        )


_TYPES = get_type_hints(LogitsProcessors)
PROCESSORS: dict[str, type[Processor]] = {
    field.name: get_args(_TYPES[field.name])[0] for field in dataclasses.fields(LogitsProcessors)
}
"""The classes of the fields of `LogitsProcessors`; a new processor needs a new field, no more."""

pytree(**{name: (cls,) for name, cls in PROCESSORS.items()})(LogitsProcessors)


def process_logits(
    logits: Array,
    drafts: Drafts | None,
    processors: LogitsProcessors,
    *,
    config: SpecDecodeConfig | None = None,
    padded_rows: bool = False,
) -> jax.Array:
    """Applies the processors to rows of logits; each row takes account of the drafts before it.

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
      dtype. A request with a row in which no token is left, or with a penalty out of range, whose
      rows are all NaN, ends with ``BAD_TARGET_ROW``, and no other.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> processors = sd.LogitsProcessors(
      ...     allowed_tokens=sd.AllowedTokens.pack([[0, 1]], vocab_size=3),
      ...     logit_bias=sd.LogitBias.from_mappings([{0: 2.0}]),
      ...     min_tokens=sd.MinTokens(jnp.array([[1]]), remaining=jnp.array([1])))
      >>> sd.process_logits(
      ...     jnp.zeros((2, 3)), sd.Drafts.from_dense(jnp.array([[0]])), processors,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=1)).tolist()
      [[2.0, -inf, -inf], [2.0, 0.0, -inf]]

    References:
      vLLM, `vllm/v1/sample/sampler.py`; transformers, `_get_logits_processor` in
      `generation/utils.py`.
    """
    check_processed(logits, drafts, processors, config, padded_rows)
    return processed(logits, drafts, processors, config, padded_rows)


def check_processed(
    logits: Array,
    drafts: Drafts | None,
    processors: object,
    config: SpecDecodeConfig | None,
    padded_rows: bool = False,
) -> None:
    """Checks processors, and the rows that they are to change.

    Raises:
      TypeError, ValueError: as `process_logits`.
    """
    sizes: Sizes = {}
    check_type("padded_rows", padded_rows, bool)
    check_tree("processors", processors, (LogitsProcessors,), sizes)
    # Without arrays, which would give B, there is no processor at all.
    if sizes:
        # A drafter's rows may have fewer columns than there are counts, but never more.
        most = sizes.get("V", math.inf)
        ragged.check_rows(logits, drafts, sizes["B"], config, padded_rows, most)


def processed(
    logits: Array,
    drafts: Drafts | None,
    processors: LogitsProcessors,
    config: SpecDecodeConfig | None,
    padded_rows: bool = False,
) -> jax.Array:
    """Returns what `process_logits` does, of arrays that need no checks."""
    leaves = jax.tree.leaves(processors)
    if not leaves:
        return jnp.asarray(logits)
    # Gathers from no row, or by no request, have no meaning.
    if 0 in (logits.shape[0], leaves[0].shape[0]):
        return jnp.asarray(logits, jnp.float32)
    # Processors read ids alone: q would be an argument of the program for nothing.
    drafts = None if drafts is None else dataclasses.replace(drafts, distribution=None)
    arrays = jnp.asarray(logits), drafts, processors
    # Which request owns a row is found once for all processors.
    return cast(jax.Array, traced_for_platform(_applied, arrays, config, padded_rows))


def _applied(
    arrays: tuple[jax.Array, Drafts | None, LogitsProcessors],
    config: SpecDecodeConfig | None,
    padded_rows: bool,
    platform: Platform,
) -> jax.Array:
    """Returns the rows that processors make on a platform."""
    logits, drafts, processors = arrays
    # [M]: the request of each row, its offset, and the drafts of that request, [M, K]: once for all
    rows = ragged.owners(logits, drafts, config, padded_rows)
    return processors.apply(logits, rows, platform)
