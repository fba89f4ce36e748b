"""`DraftContext`: what a step knows of its requests, and how it processes their logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.arrays import pytree
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.process_logits import LogitsProcessors, process_logits
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.types import Drafts


@pytree(
    token_ids="[B, L] int32",
    lengths="[B] int32",
    sampling=(SamplingParams,),
    keys="[B]",
    processors=(LogitsProcessors,),
    changes_rows="[] bool",
    active="[B] bool",
    features="[B, S, A*H]",
    num_features="[B] int32",
)
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a drafter knows of B requests. Its drafts are verified under the same parameters.

    More fields may be added; a drafter reads those that it needs.

    Attributes:
      token_ids: ``[B, L]`` int32, the sequences so far; undefined past their lengths. L is at least
        a sequence's length and K + 1, so that caches of L positions have room for drafts.
      lengths: ``[B]`` int32, at least 1: absolute position of the first draft.
      sampling: temperatures and filters.
      keys: ``[B]`` typed keys.
      config: static settings.
      processors: the logits processors, up to date with the sequences, or None.
      changes_rows: ``[]`` bool, whether any request uses `processors`; None for yes.
      active: ``[B]`` bool, the requests that run; None for all. What is proposed for the others is
        dropped, and one of them may have a part of its prompt still to be read: what is known of
        it, in the cache before its newest token too, must stay as it is.
      features: ``[B, S, A*H]``, what the target computed for the tokens that it ran last, at the
        layers that the drafter's `feature_layers` names; None if it names none.
      num_features: ``[B]`` int32 in [0, S], how many rows of `features` belong to tokens of the
        sequence; the others were for drafts that were rejected. Row s is at position ``lengths[b] -
        1 - num_features[b] + s``, so the newest token, which the target has not run, has none.
        After a `prefill` there is one row, of those that it got (none for a prompt of one token,
        or one that is not read to its end).

    Example: see `NGramDrafter`.
    """

    token_ids: jax.Array
    lengths: jax.Array
    sampling: SamplingParams
    keys: jax.Array
    config: SpecDecodeConfig = dataclasses.field(metadata=dict(static=True))
    processors: LogitsProcessors | None = None
    changes_rows: jax.Array | None = None
    active: jax.Array | None = None
    features: jax.Array | None = None
    num_features: jax.Array | None = None

    @property
    def runs(self) -> jax.Array:
        """``[B]`` bool, `active`; all, where it is None."""
        return jnp.ones(self.lengths.shape, bool) if self.active is None else self.active

    def append(self, token_ids: jax.Array) -> DraftContext:
        """Returns the context after one more token of each request, such as a draft.

        Args:
          token_ids: ``[B]`` int32.
        """
        requests = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        processors = self.processors
        if processors is not None:
            processors = processors.append(token_ids)
        return dataclasses.replace(
            self,
            # A token past the end of the buffer, which nobody reads, is dropped.
            token_ids=self.token_ids.at[requests, self.lengths].set(token_ids, mode="drop"),
            lengths=self.lengths + 1,
            processors=processors,
        )

    def process_logits(self, logits: jax.Array, drafts: Drafts | None = None) -> jax.Array:
        """Returns each request's rows after its processors, before temperature and filters.

        A drafter that processes its own rows in the same way has more drafts accepted. Whatever it
        does, the emitted tokens are distributed as the target's.

        Args:
          logits: the rows of `drafts`, ``[B*(K+1), V]``. Without drafts ``[B, V]``, or fewer
            columns if the drafter has fewer.
          drafts: from `Drafts.from_dense`. Each row takes account of the drafts before it.

        Returns:
          float32 of the shape of `logits`; `logits` itself if `processors` is None. Without
          drafts, a row in which no token is left stays as it was: a drafter may know none of the
          allowed tokens.
        """
        processors = self.processors
        if processors is None:
            return logits
        changes = jnp.bool_(True) if self.changes_rows is None else self.changes_rows

        def process(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            _, rows = carry
            processed = process_logits(rows, drafts, processors, config=self.config)
            if drafts is None:
                is_empty = jnp.all(processed == -jnp.inf, axis=1, keepdims=True)
                processed = jnp.where(is_empty, rows, processed)
            return jnp.bool_(False), processed

        # Always float32, so that a request's sums do not depend on what its neighbours ask for. A
        # loop that runs at most once leaves the rows in place, where `lax.cond` would copy them.
        start = (changes, logits.astype(jnp.float32))
        _, rows = lax.while_loop(lambda carry: carry[0], process, start)
        return rows


def with_fewer_drafts(config: SpecDecodeConfig, num_drafts: int) -> SpecDecodeConfig:
    """Returns the config of a step with fewer drafts."""
    rates = config.unconditional_rates
    return dataclasses.replace(
        config,
        num_speculative_tokens=num_drafts,
        synthetic_acceptance_rates=None if rates is None else rates[:num_drafts],
        synthetic_acceptance_length=None,
    )
