"""One draft of each request: its row processed, sampled from, and stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.drafting.context import DraftContext
from jax_specdec._src.drafting.sample import sample_draft_tokens
from jax_specdec._src.drafting.store import DraftStore
from jax_specdec._src.verify.sharding import VerifySharding


def draw_drafts(
    logits: jax.Array,
    offset: jax.Array,
    store: DraftStore | None,
    now: DraftContext | None,
    *,
    context: DraftContext,
    ids: jax.Array | None,
    vocab_size: int,
    num_candidates: int | None = None,
    sharding: VerifySharding | None = None,
) -> tuple[jax.Array, DraftStore | None, DraftContext | None]:
    """Draw draft `offset` of each request from the row that a drafter has for it.

    Args:
      logits: ``[B, Vd]``.
      offset: ``[]`` int32, index of the draft in the step.
      store: to write the rows to, in its dtype; None if no draft distribution is read.
      now: `context` with the drafts before this one, which changes the rows; None if nothing does.
      context: of the step.
      ids: ``[Vd]`` int32, the target ids of the columns; None if column ``j`` is id ``j``.
      vocab_size: greater than any of `ids`.
      num_candidates: draw from this many of the likeliest ids only; the store has rows of them.
      sharding: how `logits` are split.

    Returns:
      Target ids ``[B]`` int32, the store, and `now` with these drafts.
    """
    if now is not None:
        logits = _process(logits, now, ids, vocab_size)
    if store is not None:  # round before sampling, so that q is what is stored
        logits = logits.astype(store.logits.dtype)
    if store is not None and num_candidates is not None:
        logits, columns = lax.top_k(logits, num_candidates)
        ids, sharding = columns if ids is None else ids[columns], None
    samples = context.config.draft_sample_method == "probabilistic"
    if samples and ids is not None and context.config.rejection_sample_method == "agreement":
        # In tiles of target ids, as the target draws, whose noise this shares.
        logits, ids, sharding = _on_target_ids(logits, ids, vocab_size), None, None
    drawn = sample_draft_tokens(
        logits,
        sampling=context.sampling,
        keys=context.keys,
        positions=context.lengths,
        offset=offset,
        config=context.config,
        sharding=sharding,
        ids=ids,
    )
    if store is not None and drawn.log_normalizer is not None:
        assert drawn.row_max is not None
        store = store.write(
            offset,
            logits,
            drawn.log_normalizer,
            drawn.row_max,
            threshold=drawn.threshold,
            ids=ids if store.has_own_ids else None,
            positions=context.lengths,
            sampling=context.sampling,
        )
    return drawn.token_ids, store, None if now is None else now.append(drawn.token_ids)


def _process(
    logits: jax.Array, now: DraftContext, ids: jax.Array | None, vocab_size: int
) -> jax.Array:
    """`DraftContext.process_logits` of a drafter's rows, which requests know by target id."""
    if ids is None:
        return now.process_logits(logits)
    return now.process_logits(_on_target_ids(logits, ids, vocab_size))[:, ids]


def _on_target_ids(logits: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
    """``[B, vocab_size]`` of ``[B, Vd]``: each logit at its target id, -inf at the others."""
    rows = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
    return rows.at[:, ids].set(logits)
