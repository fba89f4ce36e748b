"""Frequency, presence and repetition penalties on rows of logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import ragged
from jax_specdec._src.arrays import Sizes, check_tree, pytree
from jax_specdec._src.blocks import BLOCK, by_blocks, take
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.platform import Platform, traced_for_platform
from jax_specdec._src.types import Array, Drafts

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


@pytree(
    frequency="[B] float32",
    presence="[B] float32",
    repetition="[B] float32",
    counts="[B, V] int32",
    in_prompt="[B, V] bool",
)
@dataclasses.dataclass(frozen=True)
class Penalties:
    """The penalties of B requests, and the tokens that each has seen.

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
      >>> penalties = sd.Penalties.from_sequences(
      ...     jnp.array([[3, 1, 1, 2]]), lengths=jnp.array([3]), prompt_lengths=jnp.array([1]),
      ...     vocab_size=4, frequency=jnp.array([0.5]), presence=jnp.zeros(1),
      ...     repetition=jnp.ones(1))
      >>> penalties.counts.tolist(), penalties.in_prompt.tolist()
      ([[0, 2, 0, 0]], [[False, False, False, True]])
    """

    frequency: jax.Array
    presence: jax.Array
    repetition: jax.Array
    counts: jax.Array
    in_prompt: jax.Array

    @classmethod
    def from_sequences(
        cls,
        token_ids: jax.Array,
        *,
        lengths: jax.Array,
        prompt_lengths: jax.Array,
        vocab_size: int,
        frequency: jax.Array,
        presence: jax.Array,
        repetition: jax.Array,
    ) -> Penalties:
        """Count the tokens of B sequences.

        Args:
          token_ids: ``[B, L]`` int32, prompt and then output. Ids past a length, and ids outside
            the vocabulary, are not counted.
          lengths: ``[B]`` int32, prompt and output together.
          prompt_lengths: ``[B]`` int32.
          vocab_size: V, static.
          frequency: ``[B]`` float32.
          presence: ``[B]`` float32.
          repetition: ``[B]`` float32.
        """
        batch, length = token_ids.shape
        place = jnp.arange(length, dtype=jnp.int32)[None, :]
        exists = (token_ids >= 0) & (place < lengths[:, None])
        is_prompt = place < prompt_lengths[:, None]
        request = jnp.arange(batch, dtype=jnp.int32)[:, None]
        in_output = jnp.where(exists & ~is_prompt, token_ids, vocab_size)  # dropped
        in_prompt = jnp.where(exists & is_prompt, token_ids, vocab_size)
        shape = (batch, vocab_size)
        return cls(
            frequency,
            presence,
            repetition,
            jnp.zeros(shape, jnp.int32).at[request, in_output].add(1, mode="drop"),
            jnp.zeros(shape, bool).at[request, in_prompt].set(True, mode="drop"),
        )

    def append(self, token_ids: jax.Array) -> Penalties:
        """The penalties after one more token of each request, such as a draft.

        Args:
          token_ids: ``[B]`` int32; an id outside the vocabulary is not counted.
        """
        ids = jnp.where(token_ids < 0, self.counts.shape[1], token_ids)
        request = jnp.arange(ids.shape[0], dtype=jnp.int32)
        return dataclasses.replace(self, counts=self.counts.at[request, ids].add(1, mode="drop"))

    @property
    def is_neutral(self) -> jax.Array:
        """``[]`` bool, whether no request is penalized."""
        neutral = (self.frequency == 0) & (self.presence == 0) & (self.repetition == 1)
        return jnp.all(neutral)


def apply_penalties(
    logits: Array,
    drafts: Drafts | None,
    penalties: Penalties,
    *,
    config: SpecDecodeConfig | None = None,
    padded_rows: bool = False,
) -> jax.Array:
    """Penalize rows of logits; each row counts the drafts of its request that come before it.

    Let ``n`` be how often a token occurs in the output and in the drafts before the row. If
    ``n > 0``, or if the token is in the prompt, its logit is divided by `repetition` if positive
    and multiplied by it if not. Then ``frequency * n`` is subtracted, and `presence` if ``n > 0``.
    Neutral values (0, 0, 1) leave a request's rows as they are.

    Call it on raw logits, before a bitmask and temperature, and give the result to
    `rejection_sample` in their place. A drafter may call it on its own rows, so that its q is
    closer to p. Whatever q is, the emitted tokens are distributed as the target's.

    Args:
      logits: ``[N+B, V]`` as `rejection_sample` takes them, or ``[N, V]`` if there are no bonus
        rows; float32, bfloat16 or float16. If `drafts` is None, ``[B, V]``, one row per request.
        There may be fewer columns than in ``penalties.counts``, for a drafter that has fewer.
      drafts: the drafts to verify; None for rows without drafts before them.
      penalties: of the sequences before this step.
      config: static settings; required with drafts.
      padded_rows: as in `rejection_sample`, for logits with bonus rows.

    Returns:
      float32 of the shape of `logits`. If one of a request's penalties is out of range, all of its
      rows are NaN: `rejection_sample` ends that request, and no other, with ``BAD_TARGET_ROW``.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time.

    Numerics:
      One elementwise pass over the logits writes float32 rows. If no request in the batch is
      penalized, the pass only casts.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> one = jnp.ones(1)
      >>> penalties = sd.Penalties(  # token 2 is in the prompt, 0 was generated twice
      ...     frequency=0.5 * one, presence=0 * one, repetition=2 * one,
      ...     counts=jnp.array([[2, 0, 0]]), in_prompt=jnp.array([[False, False, True]]))
      >>> drafts = sd.Drafts.from_flat(jnp.array([1]), jnp.array([1]))
      >>> sd.apply_penalties(
      ...     jnp.array([[4.0, 4.0, -4.0], [4.0, 4.0, -4.0]]), drafts, penalties,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=1)).tolist()
      [[1.0, 4.0, -8.0], [1.0, 1.5, -8.0]]
    """
    sizes: Sizes = {}
    check_tree("penalties", penalties, (Penalties,), sizes)
    ragged.check_rows(logits, drafts, sizes["B"], config, padded_rows, most=sizes["V"])
    logits = jnp.asarray(logits)
    if logits.shape[0] == 0 or sizes["B"] == 0:
        return logits.astype(jnp.float32)
    drafts = None if drafts is None else dataclasses.replace(drafts, distribution=None)
    return traced_for_platform(_penalized, (logits, drafts, penalties), config, padded_rows)


def _penalized(
    arrays: tuple[jax.Array, Drafts | None, Penalties],
    config: SpecDecodeConfig | None,
    padded_rows: bool,
    platform: Platform,
) -> jax.Array:
    """`apply_penalties` after the checks; a few rows at a time on TPUs."""
    logits, drafts, penalties = arrays

    def of_owners(owner: jax.Array, logits: jax.Array, before: list[jax.Array]) -> jax.Array:
        return _penalize(logits, take(penalties, owner, platform), before)

    def penalized() -> jax.Array:
        if drafts is None or config is None:
            return _penalize(logits, penalties, ())
        owner, offset, token_ids = ragged.owners(logits, drafts, config, padded_rows)
        k = token_ids.shape[1]
        before = [jnp.where(i < offset, token_ids[owner, i], -1) for i in range(k)]
        if platform == "tpu":
            return by_blocks(of_owners, BLOCK, owner, logits, before)
        return of_owners(owner, logits, before)

    return lax.cond(penalties.is_neutral, lambda: logits.astype(jnp.float32), penalized)


def _penalize(logits: jax.Array, penalties: Penalties, before: Sequence[jax.Array]) -> jax.Array:
    """Penalize rows ``[M]`` by penalties ``[M]``; drafts ``before[i] [M]`` come before them."""
    size = logits.shape[1]
    ids = jnp.arange(size, dtype=jnp.int32)[None, :]
    count = penalties.counts[:, :size]
    for drafted in before:
        count += (drafted[:, None] == ids).astype(jnp.int32)
    frequency, presence, repetition = (
        x[:, None] for x in (penalties.frequency, penalties.presence, penalties.repetition)
    )
    valid = jnp.isfinite(frequency) & jnp.isfinite(presence)
    valid &= jnp.isfinite(repetition) & (repetition >= _SMALLEST)

    x = logits.astype(jnp.float32)
    seen = (count > 0) | penalties.in_prompt[:, :size]
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * count.astype(jnp.float32) + jnp.where(count > 0, presence, 0.0)
    return jnp.where(valid, x, jnp.nan)
