"""What a step knows of its requests when it begins, and how it changes rows of logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import BLOCK, by_blocks, take
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.processors import LogitsProcessors, process_logits
from jax_specdec._src.types import Drafts, SamplingParams
from jax_specdec._src.verify.rows import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a drafter knows of B requests. The check of its drafts goes by the same.

    More fields may follow; a drafter reads those that it needs.

    Attributes:
      token_ids: ``[B, L]`` int32, the sequences so far; what lies past a length is undefined.
      lengths: ``[B]`` int32, at least 1: absolute position of the first draft.
      sampling: temperatures and filters.
      keys: ``[B]`` typed keys.
      config: static settings.
      changes_rows: ``[]`` bool, whether anybody asks for one of the following; None where the
        program has none of them.
      processors: what changes logits, of the sequences so far, or None.
      token_bitmask: ``[B, ceil(V/32)]`` uint32, tokens that each request allows, or None.

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
        """Rows of logits as each request wants them, before temperature and filters.

        A drafter whose rows are processed in the same way has more drafts accepted; whatever it
        does, the tokens are the target's.

        Args:
          logits: the rows of `drafts`, ``[B*(K+1), V]``; without drafts ``[B, V]``, or fewer
            columns, as a drafter may have.
          drafts: from `Drafts.from_dense`; each row counts those of its request before it.

        Returns:
          float32 of the shape of `logits`; or `logits` themselves, where `changes_rows` is None.
          Without drafts, a row that has nothing left stays as it is: a drafter may know none of
          the tokens that are allowed.
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

        # One dtype whoever asks, so that a request's sums do not depend on its neighbours. A loop
        # of one turn or none, because XLA leaves its rows where they are: `lax.cond` copies them.
        return lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.bool_(False), process(carry[1])),
            (self.changes_rows, logits.astype(jnp.float32)),
        )[1]


def _allow(rows: jax.Array, token_bitmask: jax.Array) -> jax.Array:
    """Rows ``[B*n, V]`` with -inf where a token is not allowed; on TPUs, a few at a time."""
    owner = jnp.arange(rows.shape[0], dtype=jnp.int32) // (rows.shape[0] // token_bitmask.shape[0])

    def at_once(owner: jax.Array, rows: jax.Array) -> jax.Array:
        words = take(token_bitmask, owner)
        return Rows(rows, rows.shape[1], -jnp.inf, words).masked().matrix

    in_blocks = functools.partial(by_blocks, at_once, BLOCK)
    return lax.platform_dependent(owner, rows, tpu=in_blocks, default=at_once)
