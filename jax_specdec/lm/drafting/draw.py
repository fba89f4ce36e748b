"""Drafts of each request: rows processed, sampled from, and stored, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafts.sample import sample_draft_tokens
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.sampling import SamplingParams
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
            listed, split = columns if listed is None else listed[columns], None
        requests = context.sampling, context.keys, context.lengths
        drawn, store = _draw(
            logits, requests, offset, offset, config, store, listed, vocab_size, split
        )
        return drawn, store, None if now is None else now.append(drawn)

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


def draft_at_once(
    logits: jax.Array,
    context: DraftContext,
    store: DraftStore | None,
    *,
    ids: jax.Array | None = None,
    vocab_size: int = 0,
) -> Proposal:
    """Draw K drafts of each request from rows that depend on none of them: those of `draft_chain`.

    Args:
      logits: ``[B, K, Vd]``.
      context: of the step, without processors.
      store: as there, of K drafts; the rows become its own.
      ids: as there.
      vocab_size: as there.
    """
    batch_size, count, _ = logits.shape

    def flat(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 0, 1).reshape(count * batch_size, x.shape[2])

    if ids is not None and ids.ndim == 3:
        ids = flat(ids)
    rows, whole = flat(logits), None
    if store is not None:  # a store of one draft for each of K * B slots
        rows = rows.astype(store.logits.dtype)
        stamps = {name: getattr(store, name) for name in ("positions", "temperature")}
        whole = dataclasses.replace(store, **{k: x.reshape(1, -1) for k, x in stamps.items()})
    requests = context.sampling, context.keys, context.lengths
    requests = jax.tree.map(lambda x: jnp.concatenate([x] * count), requests)
    offsets = jnp.repeat(jnp.arange(count, dtype=jnp.int32), batch_size)
    drawn, whole = _draw(
        rows, requests, offsets, jnp.int32(0), context.config, whole, ids, vocab_size, None
    )
    if store is not None and whole is not None:
        shape = store.positions.shape
        stamps = {name: getattr(whole, name).reshape(shape) for name in stamps}
        store = dataclasses.replace(whole, **stamps)
    return Proposal(drawn.reshape(count, batch_size).T, store)


def _draw(
    logits: jax.Array,
    requests: tuple[SamplingParams, jax.Array, jax.Array],
    offset: jax.Array,
    place: jax.Array,
    config: SpecDecodeConfig,
    store: DraftStore | None,
    listed: jax.Array | None,
    vocab_size: int,
    sharding: VerifySharding | None,
) -> tuple[jax.Array, DraftStore | None]:
    """A draft from each row, and the store with the rows at a place.

    Args:
      logits: ``[N, Vd]``, in the stored dtype.
      requests: parameters, keys and positions of the N rows.
      offset: ``[]`` or ``[N]`` int32, of the drafts in the step.
      place: ``[]`` int32, where the store has the rows.
      config: of the step.
      store: to write to, or None.
      listed: ``[Vd]`` or ``[N, Vd]`` int32, target ids of the columns, or None.
      vocab_size: greater than any of these.
      sharding: how rows are split.
    """
    sampling, keys, positions = requests
    is_sampled = config.draft_sample_method == "probabilistic"
    # In tiles of target ids, as the target draws, whose noise this shares.
    by_target_id = is_sampled and config.rejection_sample_method == "agreement"
    if by_target_id and listed is not None:
        logits, listed, sharding = on_target_ids(logits, listed, vocab_size), None, None
    drawn = sample_draft_tokens(
        logits,
        sampling=sampling,
        keys=keys,
        positions=positions,
        offset=offset,
        config=config,
        sharding=sharding,
        ids=listed,
    )
    if store is not None and drawn.log_normalizer is not None:
        assert drawn.row_max is not None
        store = store.write(
            place,
            logits,
            drawn.log_normalizer,
            drawn.row_max,
            threshold=drawn.threshold,
            ids=listed if store.has_own_ids else None,
            positions=positions,
            sampling=sampling,
        )
    return drawn.token_ids, store


def _process(
    logits: jax.Array, now: DraftContext, ids: jax.Array | None, vocab_size: int
) -> jax.Array:
    """`DraftContext.process_logits` of a drafter's rows, which requests know by target id."""
    if ids is None:
        return now.process_logits(logits)
    rows = now.process_logits(on_target_ids(logits, ids, vocab_size))
    return rows[:, ids] if ids.ndim == 1 else jnp.take_along_axis(rows, ids, axis=1)


def on_target_ids(logits: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
    """``[B, vocab_size]`` of ``[B, Vd]``: each logit at its target id, -inf at the others."""
    rows = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
    if ids.ndim == 1:
        return rows.at[:, ids].set(logits)
    return jnp.put_along_axis(rows, ids, logits, axis=1, inplace=False)
