"""Drafts of each request: rows processed, sampled from, and stored, one after another.

A drafter that computes rows of logits gives the first of them, and a function for those after it,
to `draft_chain`; or all K at once, if none depends on a draft, to `draft_at_once`. Its columns need
not be the target's ids: `Ids` says which they stand for, one class for each kind of list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.drafts.sample import DraftRows, sample
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.lm.drafting.drafter import DraftContext, Proposal

Carry = TypeVar("Carry")


# Which target ids the columns of a drafter's rows stand for.


@dataclasses.dataclass(frozen=True)
class Ids:
    """All ids in their order: column ``j`` is id ``j``.

    Attributes:
      vocab_size: V, greater than any of the ids.
    """

    vocab_size: int

    @property
    def columns(self) -> jax.Array | None:
        """The id of each column, ``[Vd]`` or ``[N, Vd]`` int32; None where they are all ids."""
        return None

    def of_draft(self, offset: jax.Array) -> Ids:
        """Returns the ids of the rows ``[B, Vd]`` of one draft."""
        return self

    def of_rows(self) -> Ids:
        """Returns the ids of the rows ``[K * B, Vd]`` of all drafts, in the order of a store."""
        return self

    def at(self, columns: jax.Array) -> Ids:
        """Returns the ids of some columns ``[N, C]`` of each row."""
        return _ListedIds(self.vocab_size, columns)

    def to_vocabulary(self, logits: jax.Array) -> jax.Array:
        """Returns ``[N, V]`` of ``[N, Vd]``: each logit at its target id, -inf at the others."""
        return logits

    def to_columns(self, rows: jax.Array) -> jax.Array:
        """Returns the columns ``[N, Vd]`` of rows ``[N, V]``."""
        return rows


@dataclasses.dataclass(frozen=True)
class _MappedIds(Ids):
    """A list of ids that all rows share.

    Attributes:
      ids: ``[Vd]`` int32.
    """

    ids: jax.Array

    @property
    def columns(self) -> jax.Array:
        return self.ids

    def at(self, columns: jax.Array) -> Ids:
        # [Vd] -> [N, C]: each row has its own columns
        return _ListedIds(self.vocab_size, self.ids[columns])

    def to_vocabulary(self, logits: jax.Array) -> jax.Array:
        # [N, Vd] -> [N, V]: an id that the drafter does not score is never drawn
        rows = jnp.full((logits.shape[0], self.vocab_size), -jnp.inf, logits.dtype)
        return rows.at[:, self.ids].set(logits)

    def to_columns(self, rows: jax.Array) -> jax.Array:
        return rows[:, self.ids]


@dataclasses.dataclass(frozen=True)
class _ListedIds(Ids):
    """A list of ids for each row.

    Attributes:
      ids: ``[B, K, C]`` int32, of the rows of K drafts; ``[N, C]`` of N rows.
    """

    ids: jax.Array

    @property
    def columns(self) -> jax.Array:
        return self.ids

    def of_draft(self, offset: jax.Array) -> Ids:
        # [B, K, C] -> [B, C]
        of_draft = lax.dynamic_index_in_dim(self.ids, offset, axis=1, keepdims=False)
        return _ListedIds(self.vocab_size, of_draft)

    def of_rows(self) -> Ids:
        # [B, K, C] -> [K * B, C]
        return _ListedIds(self.vocab_size, _by_draft(self.ids))

    def at(self, columns: jax.Array) -> Ids:
        return _ListedIds(self.vocab_size, jnp.take_along_axis(self.ids, columns, axis=1))

    def to_vocabulary(self, logits: jax.Array) -> jax.Array:
        # [N, C] -> [N, V]
        rows = jnp.full((logits.shape[0], self.vocab_size), -jnp.inf, logits.dtype)
        return jnp.put_along_axis(rows, self.ids, logits, axis=1, inplace=False)

    def to_columns(self, rows: jax.Array) -> jax.Array:
        return jnp.take_along_axis(rows, self.ids, axis=1)


def ids_of(ids: jax.Array | None, vocab_size: int) -> Ids:
    """Returns what the columns of rows stand for.

    Args:
      ids: ``[Vd]`` int32, the target ids of the columns of all rows; ``[N, C]`` int32, those of
        each of N rows, or ``[B, K, C]`` of the rows of K drafts; None if column ``j`` is id ``j``.
      vocab_size: greater than any of `ids`.
    """
    if ids is None:
        return Ids(vocab_size)
    return _MappedIds(vocab_size, ids) if ids.ndim == 1 else _ListedIds(vocab_size, ids)


class Row(NamedTuple):
    """What a draft of each request is drawn from.

    Attributes:
      logits: ``[B, Vd]``.
      ids: what the columns stand for.
    """

    logits: jax.Array
    ids: Ids


# Drawing.


@dataclasses.dataclass(frozen=True)
class Draws:
    """Draws the drafts of a step, a row of each request at a time, and stores the rows.

    Attributes:
      context: of the step.
      store: of the rows so far, which are in its dtype; None if no draft distribution is read.
      now: the context after the drafts so far, which processors count; None without processors.
      num_candidates: drawn from so many of the likeliest ids only, of which the store has rows.
      sharding: how rows are split.
    """

    context: DraftContext
    store: DraftStore | None
    now: DraftContext | None
    num_candidates: int | None = None
    sharding: VerifySharding | None = None

    def row(self, row: Row, offset: jax.Array) -> tuple[jax.Array, Draws]:
        """Returns a draft of each request from its row, and the draws after it.

        Args:
          row: of each request.
          offset: ``[]`` int32, the draft's place in the step.
        """
        logits, ids = row
        sharding = self.sharding
        if self.now is not None:
            # [B, Vd] -> [B, V] -> [B, Vd]: processors know target ids
            logits = ids.to_columns(self.now.processed(ids.to_vocabulary(logits)))
        if self.store is not None:
            # Rounded before anything is drawn, so that q is what is stored. Verification reads the
            # stored row, and is exact only for the distribution that the draft was drawn from.
            logits = logits.astype(self.store.logits.dtype)
            if self.num_candidates is not None:
                # [B, Vd] -> [B, C], which are on every device
                logits, best = lax.top_k(logits, self.num_candidates)
                ids = ids.at(best)
                sharding = None
        drawn, store = _draw(logits, ids, self.context, self.store, offset, offset, sharding)
        # Penalties and bad words count the draft; nothing else looks at it.
        now = None if self.now is None else self.now.append(drawn)
        return drawn, dataclasses.replace(self, store=store, now=now)


def draft_chain(
    row: Row,
    carry: Carry,
    forward: Callable[[Carry, jax.Array, jax.Array], tuple[Row, Carry]],
    context: DraftContext,
    store: DraftStore | None,
    *,
    num_candidates: int | None = None,
    sharding: VerifySharding | None = None,
) -> tuple[Proposal, Carry]:
    """Draws K drafts of each request, each from the row that a drafter has after the one before.

    Args:
      row: of the first drafts.
      carry: what `forward` takes and gives, such as a cache.
      forward: `forward(carry, token_ids, offset)` gives the rows of draft `offset`, after drafts
        ``[B]``, and the new carry.
      store: to write the rows to, in its dtype; None if no draft distribution is read.
      num_candidates: draw from this many of the likeliest ids only; the store has rows of them.
      sharding: how rows are split.

    Returns:
      The proposal, and the last carry.
    """
    # Only processors read the sequence with its drafts: without them it is not carried.
    now = None if context.processors is None else context
    draws = Draws(context, store, now, num_candidates, sharding)

    def step(
        state: tuple[jax.Array, Carry, DraftStore | None, DraftContext | None], offset: jax.Array
    ) -> tuple[tuple[jax.Array, Carry, DraftStore | None, DraftContext | None], jax.Array]:
        """Returns the state after one more draft of each request, and these drafts ``[B]``."""
        # Read the last draft, draw the next one from the row after it, and store that row.
        last, carry, store, now = state
        row, carry = forward(carry, last, offset)
        drawn, after = dataclasses.replace(draws, store=store, now=now).row(row, offset)
        return (drawn, carry, after.store, after.now), drawn

    # The first row is there already: the drafter runs K - 1 times, in a scan, so that its pass is
    # compiled once.
    first, after = draws.row(row, jnp.int32(0))
    offsets = jnp.arange(1, context.config.num_speculative_tokens, dtype=jnp.int32)
    start = (first, carry, after.store, after.now)
    (_, carry, store, _), later = lax.scan(step, start, offsets)
    # [B] and [K - 1, B] -> [B, K]
    drafts = jnp.moveaxis(jnp.concatenate([first[None], later]), 0, 1)
    return Proposal(drafts, store), carry


def draft_at_once(
    logits: jax.Array,
    context: DraftContext,
    store: DraftStore | None,
    ids: Ids,
) -> Proposal:
    """Draws K drafts of each request from rows that depend on none of them.

    The drafts, and the store, are those of `draft_chain`.

    Args:
      logits: ``[B, K, Vd]``.
      context: of the step, without processors.
      store: as there, of K drafts; the rows become its own.
      ids: what the columns of these rows stand for.
    """
    batch_size, count, _ = logits.shape

    def repeated(x: jax.Array) -> jax.Array:
        # [B, ...] -> [K * B, ...]: all requests for draft 0, then for draft 1, as the rows lie
        return jnp.concatenate([x] * count)

    def with_slots(store: DraftStore, *shape: int) -> DraftStore:
        return dataclasses.replace(
            store,
            positions=store.positions.reshape(shape),
            temperature=store.temperature.reshape(shape),
        )

    # [B, K, Vd] -> [K * B, Vd]
    rows = _by_draft(logits)
    row_ids = ids.of_rows()
    if store is not None:
        rows = rows.astype(store.logits.dtype)
        # One write of one draft for each of K * B slots, in place of K writes. Row offset * B + b
        # of a store of B slots is row 0 * (K * B) + (offset * B + b) of a store of K * B.
        store = with_slots(store, 1, count * batch_size)
    # [B] -> [K * B]: a request for each row
    sampling = jax.tree.map(repeated, context.sampling)
    keys = repeated(context.keys)
    lengths = repeated(context.lengths)
    row_context = dataclasses.replace(context, sampling=sampling, keys=keys, lengths=lengths)
    # [K * B]: the draft that each row is of
    offset = jnp.repeat(jnp.arange(count, dtype=jnp.int32), batch_size)
    # Noise goes by the draft's offset; in the store as it is here, all rows are of its draft 0.
    drawn, store = _draw(rows, row_ids, row_context, store, offset, jnp.int32(0), None)
    if store is not None:
        store = with_slots(store, count, batch_size)
    # [K * B] -> [B, K]
    return Proposal(drawn.reshape(count, batch_size).T, store)


def _by_draft(x: jax.Array) -> jax.Array:
    """Returns ``[K * B, n]`` of ``[B, K, n]``: in the order of a store."""
    batch_size, count, size = x.shape
    return jnp.swapaxes(x, 0, 1).reshape(count * batch_size, size)


def _draw(
    logits: jax.Array,
    ids: Ids,
    context: DraftContext,
    store: DraftStore | None,
    offset: jax.Array,
    place: jax.Array,
    sharding: VerifySharding | None,
) -> tuple[jax.Array, DraftStore | None]:
    """Returns a draft ``[N]`` from each row, and the store with the rows.

    Args:
      logits: ``[N, Vd]``, in the stored dtype.
      ids: what their columns stand for.
      context: of the step; its parameters, keys and lengths are those of N requests.
      store: to write to, or None.
      offset: ``[]`` or ``[N]`` int32, of the drafts in the step.
      place: ``[]`` int32, the draft of the store that the rows are written as.
      sharding: how rows are split.
    """
    config = context.config
    is_sampled = config.draft_sample_method == "probabilistic"
    shares_noise = is_sampled and config.rejection_sample_method == "agreement"
    if shares_noise and ids.columns is not None:
        # [N, Vd] -> [N, V]: the target draws in tiles of its ids, and this shares its noise
        logits = ids.to_vocabulary(logits)
        ids = Ids(ids.vocab_size)
        sharding = None
    rows = DraftRows(logits, context.sampling, context.lengths, offset, ids.columns)
    drawn = sample(rows, context.keys, config, sharding)
    # None if the config drafts greedily: such drafts are verified one-hot, and no row is read.
    if store is not None and drawn.log_normalizer is not None:
        store = store.write_rows(rows._replace(offset=place), drawn)
    return drawn.token_ids, store
