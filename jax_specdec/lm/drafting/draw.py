"""Drafts of each request: rows processed, sampled from, and stored, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.drafts.sample import sample_draft_tokens
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.lm.drafting.drafter import DraftContext, Proposal

Carry = TypeVar("Carry")


class DraftRow(NamedTuple):
    """What a draft of each request is drawn from.

    Attributes:
      logits: ``[B, Vd]``.
      ids: ``[Vd]`` int32, the target ids of the columns of all rows; ``[B, Vd]`` int32, those of
        each row; None if column ``j`` is id ``j``.
    """

    logits: jax.Array
    ids: jax.Array | None = None


def draft_chain(
    row: DraftRow,
    carry: Carry,
    forward: Callable[[Carry, jax.Array, jax.Array], tuple[DraftRow, Carry]],
    context: DraftContext,
    store: DraftStore | None,
    *,
    vocab_size: int = 0,
    num_candidates: int | None = None,
    sharding: VerifySharding | None = None,
) -> tuple[Proposal, Carry]:
    """Draws K drafts of each request, each from the row that a drafter has after the one before.

    Args:
      row: of the first drafts.
      carry: what `forward` takes and gives, such as a cache.
      forward: `forward(carry, token_ids, offset)` gives the rows of draft `offset`, after drafts
        ``[B]``, and the new carry.
      context: of the step.
      store: to write the rows to, in its dtype; None if no draft distribution is read.
      vocab_size: greater than any of the ids of a row.
      num_candidates: draw from this many of the likeliest ids only; the store has rows of them.
      sharding: how rows are split.

    Returns:
      The proposal, and the last carry.
    """

    def draw(
        row: DraftRow, offset: jax.Array, store: DraftStore | None, now: DraftContext | None
    ) -> tuple[jax.Array, DraftStore | None, DraftContext | None]:
        """Returns a draft of each request, the store, and the context after the draft."""
        logits, columns = row
        split = sharding
        if now is not None:
            logits = _process(logits, now, columns, vocab_size)
        if store is not None:
            # Rounded before anything is drawn, so that q is what is stored.
            logits = logits.astype(store.logits.dtype)
            if num_candidates is not None:
                # [B, Vd] -> [B, C], and the ids of these columns
                logits, best = lax.top_k(logits, num_candidates)
                columns = best if columns is None else columns[best]
                split = None  # the candidates of a row are on every device
        drawn, store = _draw(
            logits,
            context,
            store,
            offset=offset,
            place=offset,
            columns=columns,
            vocab_size=vocab_size,
            sharding=split,
        )
        # Penalties and bad words count the drafts; nothing else looks at them.
        return drawn, store, None if now is None else now.append(drawn)

    def step(
        state: tuple[jax.Array, Carry, DraftStore | None, DraftContext | None], offset: jax.Array
    ) -> tuple[tuple[jax.Array, Carry, DraftStore | None, DraftContext | None], jax.Array]:
        last, carry, store, now = state
        row, carry = forward(carry, last, offset)
        drawn, store, now = draw(row, offset, store, now)
        return (drawn, carry, store, now), drawn

    now = None if context.processors is None else context
    first, store, now = draw(row, jnp.int32(0), store, now)
    offsets = jnp.arange(1, context.config.num_speculative_tokens, dtype=jnp.int32)
    (_, carry, store, _), rest = lax.scan(step, (first, carry, store, now), offsets)
    # [B] and [K - 1, B] -> [B, K]
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
    """Draws K drafts of each request from rows that depend on none of them.

    The drafts, and the store, are those of `draft_chain`.

    Args:
      logits: ``[B, K, Vd]``.
      context: of the step, without processors.
      store: as there, of K drafts; the rows become its own.
      ids: ``[Vd]`` int32, the target ids of the columns; ``[B, K, Vd]`` int32, those of each row;
        None if column ``j`` is id ``j``.
      vocab_size: greater than any of these.
    """
    batch_size, count, _ = logits.shape

    def by_draft(x: jax.Array) -> jax.Array:
        # [B, K, n] -> [K * B, n]: in the order of a store
        return jnp.swapaxes(x, 0, 1).reshape(count * batch_size, x.shape[2])

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x] * count)

    def with_slots(store: DraftStore, *shape: int) -> DraftStore:
        return dataclasses.replace(
            store,
            positions=store.positions.reshape(shape),
            temperature=store.temperature.reshape(shape),
        )

    rows = by_draft(logits)
    if ids is not None and ids.ndim == 3:
        ids = by_draft(ids)
    if store is not None:
        rows = rows.astype(store.logits.dtype)
        # One write of one draft for each of K * B slots, in place of K writes.
        store = with_slots(store, 1, count * batch_size)
    # [B] -> [K * B]: a request for each row
    sampling = jax.tree.map(repeated, context.sampling)
    keys = repeated(context.keys)
    lengths = repeated(context.lengths)
    drawn, store = _draw(
        rows,
        dataclasses.replace(context, sampling=sampling, keys=keys, lengths=lengths),
        store,
        offset=jnp.repeat(jnp.arange(count, dtype=jnp.int32), batch_size),
        place=jnp.int32(0),
        columns=ids,
        vocab_size=vocab_size,
        sharding=None,
    )
    if store is not None:
        store = with_slots(store, count, batch_size)
    # [K * B] -> [B, K]
    return Proposal(drawn.reshape(count, batch_size).T, store)


def _draw(
    logits: jax.Array,
    context: DraftContext,
    store: DraftStore | None,
    *,
    offset: jax.Array,
    place: jax.Array,
    columns: jax.Array | None,
    vocab_size: int,
    sharding: VerifySharding | None,
) -> tuple[jax.Array, DraftStore | None]:
    """Returns a draft from each row, and the store with the rows.

    Args:
      logits: ``[N, Vd]``, in the stored dtype.
      context: of the step; its parameters, keys and lengths are those of N requests.
      store: to write to, or None.
      offset: ``[]`` or ``[N]`` int32, of the drafts in the step.
      place: ``[]`` int32, the draft of the store that the rows are written as.
      columns: ``[Vd]`` or ``[N, Vd]`` int32, the target ids of the columns, or None.
      vocab_size: greater than any of these.
      sharding: how rows are split.
    """
    config = context.config
    is_sampled = config.draft_sample_method == "probabilistic"
    if columns is not None and is_sampled and config.rejection_sample_method == "agreement":
        # [N, Vd] -> [N, V]: the target draws in tiles of its ids, and this shares its noise
        logits = on_target_ids(logits, columns, vocab_size)
        columns = None
        sharding = None
    drawn = sample_draft_tokens(
        logits,
        sampling=context.sampling,
        keys=context.keys,
        positions=context.lengths,
        offset=offset,
        config=config,
        sharding=sharding,
        ids=columns,
    )
    if store is not None and drawn.log_normalizer is not None:
        store = store.write(
            place,
            logits,
            drawn,
            ids=columns if store.has_own_ids else None,
            positions=context.lengths,
            sampling=context.sampling,
        )
    return drawn.token_ids, store


def _process(
    logits: jax.Array, now: DraftContext, columns: jax.Array | None, vocab_size: int
) -> jax.Array:
    """Returns a drafter's rows ``[B, Vd]`` after the processors, which know target ids."""
    if columns is None:
        return now.process_logits(logits)
    # [B, Vd] -> [B, V] -> [B, Vd]
    rows = now.process_logits(on_target_ids(logits, columns, vocab_size))
    if columns.ndim == 1:
        return rows[:, columns]
    return jnp.take_along_axis(rows, columns, axis=1)


def on_target_ids(logits: jax.Array, columns: jax.Array, vocab_size: int) -> jax.Array:
    """Returns ``[N, V]`` of ``[N, Vd]``: each logit at its target id, -inf at the others.

    Args:
      logits: ``[N, Vd]``.
      columns: ``[Vd]`` or ``[N, Vd]`` int32, the target ids of the columns.
      vocab_size: V.
    """
    rows = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
    if columns.ndim == 1:
        return rows.at[:, columns].set(logits)
    return jnp.put_along_axis(rows, columns, logits, axis=1, inplace=False)
