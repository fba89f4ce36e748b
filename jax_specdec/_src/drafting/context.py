"""`DraftContext`: what a step knows of its requests, and how it processes their logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.arrays import pytree
from jax_specdec._src.blocks import BLOCK, by_blocks, take
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.platform import Platform, traced_for_platform
from jax_specdec._src.processors import LogitsProcessors, process_logits
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.types import Drafts
from jax_specdec._src.verify.rows import Rows


@pytree(
    token_ids="[B, L] int32",
    lengths="[B] int32",
    sampling=(SamplingParams,),
    keys="[B]",
    changes_rows="[] bool",
    processors=(LogitsProcessors,),
    token_bitmask="[B, ceil(V/32)] uint32",
    features="[B, S, A*H]",
    num_features="[B] int32",
)
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a drafter knows of B requests. Its drafts are verified under the same parameters.

    More fields may be added; a drafter reads those that it needs.

    Attributes:
      token_ids: ``[B, L]`` int32, the sequences so far; undefined past their lengths.
      lengths: ``[B]`` int32, at least 1: absolute position of the first draft.
      sampling: temperatures and filters.
      keys: ``[B]`` typed keys.
      config: static settings.
      changes_rows: ``[]`` bool, whether any request uses `processors` or `token_bitmask`; None if
        the program has neither.
      processors: the logits processors, up to date with the sequences, or None.
      token_bitmask: ``[B, ceil(V/32)]`` uint32, tokens that each request allows, or None.
      features: ``[B, S, A*H]``, what the target computed for the tokens that it ran last, at the
        layers that the drafter's `feature_layers` names; None if it names none.
      num_features: ``[B]`` int32 in [0, S], how many rows of `features` belong to tokens of the
        sequence; the others were for drafts that were rejected. Row s is at position ``lengths[b] -
        1 - num_features[b] + s``, so the newest token, which the target has not run, has none.
        After a `prefill` there is one row, of those that it got (none for a prompt of one token).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> context = sd.DraftContext(
      ...     token_ids=jnp.array([[5, 6, 0, 0]]), lengths=jnp.array([2]),
      ...     sampling=sd.SamplingParams(jnp.zeros(1)), keys=jax.random.split(jax.random.key(0), 1),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2))
      >>> context.append(jnp.array([7])).token_ids.tolist()
      [[5, 6, 7, 0]]
    """

    token_ids: jax.Array
    lengths: jax.Array
    sampling: SamplingParams
    keys: jax.Array
    config: SpecDecodeConfig = dataclasses.field(metadata=dict(static=True))
    changes_rows: jax.Array | None = None
    processors: LogitsProcessors | None = None
    token_bitmask: jax.Array | None = None
    features: jax.Array | None = None
    num_features: jax.Array | None = None

    def append(self, token_ids: jax.Array) -> DraftContext:
        """The context after one more token of each request, such as a draft.

        Args:
          token_ids: ``[B]`` int32.
        """
        requests = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids.at[requests, self.lengths].set(token_ids, mode="drop"),
            lengths=self.lengths + 1,
            processors=self.processors and self.processors.append(token_ids),
        )

    def process_logits(self, logits: jax.Array, drafts: Drafts | None = None) -> jax.Array:
        """Apply each request's processors and bitmask to its rows, before temperature and filters.

        A drafter that processes its own rows in the same way has more drafts accepted. Whatever it
        does, the emitted tokens are distributed as the target's.

        Args:
          logits: the rows of `drafts`, ``[B*(K+1), V]``. Without drafts ``[B, V]``, or fewer
            columns if the drafter has fewer.
          drafts: from `Drafts.from_dense`. Each row takes account of the drafts before it.

        Returns:
          float32 of the shape of `logits`; `logits` itself if `changes_rows` is None. Without
          drafts, a row in which no token is left stays as it was: a drafter may know none of the
          allowed tokens.
        """
        if self.changes_rows is None:
            return logits

        def process(rows: jax.Array) -> jax.Array:
            processed = rows
            if self.processors is not None:
                processed = process_logits(rows, drafts, self.processors, config=self.config)
            if self.token_bitmask is not None:
                processed = _allow(processed, self.token_bitmask)
            if drafts is None:
                is_empty = jnp.all(processed == -jnp.inf, axis=1, keepdims=True)
                processed = jnp.where(is_empty, rows, processed)
            return processed

        # Always float32, so that a request's sums do not depend on what its neighbours ask for. A
        # loop that runs at most once leaves the rows in place, where `lax.cond` would copy them.
        return lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.bool_(False), process(carry[1])),
            (self.changes_rows, logits.astype(jnp.float32)),
        )[1]


def _allow(rows: jax.Array, token_bitmask: jax.Array) -> jax.Array:
    """Rows ``[B*n, V]`` with -inf for tokens that are not allowed."""
    return traced_for_platform(_allowed, (rows, token_bitmask))


def _allowed(arrays: tuple[jax.Array, jax.Array], platform: Platform) -> jax.Array:
    """`_allow`; a few rows at a time on TPUs."""
    rows, token_bitmask = arrays
    owner = jnp.arange(rows.shape[0], dtype=jnp.int32) // (rows.shape[0] // token_bitmask.shape[0])

    def at_once(owner: jax.Array, rows: jax.Array) -> jax.Array:
        words = take(token_bitmask, owner, platform)
        return Rows(rows, rows.shape[1], -jnp.inf, platform, words).masked().matrix

    if platform == "tpu":
        return by_blocks(at_once, BLOCK, owner, rows)
    return at_once(owner, rows)
