"""Drafts of each request: rows processed, sampled from, and stored, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.drafts.sample import sample_draft_tokens
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.lm.drafting.context import DraftContext
from jax_specdec.lm.drafting.drafter import Proposal


def draft_chain(
    logits: jax.Array,
    carry: Any,
    forward: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]],
    context: DraftContext,
    store: DraftStore | None,
    *,
    ids: jax.Array | None = None,
    vocab_size: int = 0,
    num_candidates: int | None = None,
    sharding: VerifySharding | None = None,
) -> tuple[Proposal, Any]:
    """Draw K drafts of each request, each from the row that a drafter has after the one before.

    Args:
      logits: ``[B, Vd]``, the rows of the first drafts.
      carry: what `forward` takes and gives, such as a cache.
      forward: `forward(carry, token_ids, offset)` gives the rows of draft `offset`, after drafts
        ``[B]``, and the new carry.
      context: of the step.
      store: to write the rows to, in its dtype; None if no draft distribution is read.
      ids: ``[Vd]`` int32, the target ids of the columns; ``[B, K, C]`` int32, those of the rows of
        each draft; None if column ``j`` is id ``j``.
      vocab_size: greater than any of `ids`.
      num_candidates: draw from this many of the likeliest ids only; the store has rows of them.
      sharding: how rows are split.
    """
    config = context.config
    is_sampled = config.draft_sample_method == "probabilistic"
    # In tiles of target ids, as the target draws, whose noise this shares.
    by_target_id = is_sampled and config.rejection_sample_method == "agreement"

    def draw(
        logits: jax.Array, offset: jax.Array, store: DraftStore | None, now: DraftContext | None
    ) -> tuple[jax.Array, DraftStore | None, DraftContext | None]:
        """One draft of each request, the store, and the context with the draft if it matters."""
        listed, split = ids, sharding
        if listed is not None and listed.ndim == 3:
            listed = lax.dynamic_index_in_dim(listed, offset, axis=1, keepdims=False)
        if now is not None:
            logits = _process(logits, now, listed, vocab_size)
        if store is not None:  # round before sampling, so that q is what is stored
            logits = logits.astype(store.logits.dtype)
        if store is not None and num_candidates is not None:
            logits, columns = lax.top_k(logits, num_candidates)
            listed, split = columns if ids is None else ids[columns], None
        if by_target_id and listed is not None:
            logits, listed, split = _on_target_ids(logits, listed, vocab_size), None, None
        drawn = sample_draft_tokens(
            logits,
            sampling=context.sampling,
            keys=context.keys,
            positions=context.lengths,
            offset=offset,
            config=config,
            sharding=split,
            ids=listed,
        )
        if store is not None and drawn.log_normalizer is not None:
            assert drawn.row_max is not None
            store = store.write(
                offset,
                logits,
                drawn.log_normalizer,
                drawn.row_max,
                threshold=drawn.threshold,
                ids=listed if store.has_own_ids else None,
                positions=context.lengths,
                sampling=context.sampling,
            )
        return drawn.token_ids, store, None if now is None else now.append(drawn.token_ids)

    def draft(state: Any, offset: jax.Array) -> tuple[Any, jax.Array]:
        last, carry, store, now = state
        logits, carry = forward(carry, last, offset)
        drawn, store, now = draw(logits, offset, store, now)
        return (drawn, carry, store, now), drawn

    now = None if context.processors is None else context
    first, store, now = draw(logits, jnp.int32(0), store, now)
    offsets = jnp.arange(1, config.num_speculative_tokens, dtype=jnp.int32)
    (_, carry, store, _), rest = lax.scan(draft, (first, carry, store, now), offsets)
    drafts = jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, 1)
    return Proposal(drafts, store), carry


def _process(
    logits: jax.Array, now: DraftContext, ids: jax.Array | None, vocab_size: int
) -> jax.Array:
    """`DraftContext.process_logits` of a drafter's rows, which requests know by target id."""
    if ids is None:
        return now.process_logits(logits)
    rows = now.process_logits(_on_target_ids(logits, ids, vocab_size))
    return rows[:, ids] if ids.ndim == 1 else jnp.take_along_axis(rows, ids, axis=1)


def _on_target_ids(logits: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
    """``[B, vocab_size]`` of ``[B, Vd]``: each logit at its target id, -inf at the others."""
    rows = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
    if ids.ndim == 1:
        return rows.at[:, ids].set(logits)
    return jnp.put_along_axis(rows, ids, logits, axis=1, inplace=False)
