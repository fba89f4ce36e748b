"""`DecodeState`: what a step reads and writes, a pytree of arrays, donated to each call.

It has the sequences, the caches of both models, what drafts were drawn from, and, between the two
halves of a step, the drafts (`Drafted`). A step may be of R requests of the B that there are: then
`take_slots` and `put_slots` lead from arrays ``[B, ...]`` to ``[R, ...]`` and back.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import pytree
from jax_specdec._src.base.tree import TreeRows
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.rates import DraftRates
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.stats.acceptance import AcceptanceCounters
from jax_specdec.lm.decoding.batch import Batch
from jax_specdec.lm.drafting.tree import with_chains
from jax_specdec.lm.models.protocol import Cache

_Arrays = TypeVar("_Arrays")  # a pytree


@pytree(
    token_ids="[R, K] int32",
    max_drafts="[R] int32",
    parents="[R, K] int32",
    slots="[R] int32",
)
@dataclasses.dataclass(frozen=True)
class Drafted:
    """The drafts of R requests, from `draft` to `verify`.

    Attributes:
      token_ids: ``[R, K]`` int32, drafts to verify; -1 for none. Of a step with fewer drafts ``[R,
        num_drafts]``.
      max_drafts: ``[R]`` int32, the most drafts that might have been made for each request.
      parents: ``[R, K]`` int32, as in `Proposal`; None for chains.
      slots: ``[R]`` int32, which requests these are; None for all, in their order.

    Example: see `Engine`.
    """

    token_ids: jax.Array
    max_drafts: jax.Array
    parents: jax.Array | None = None
    slots: jax.Array | None = None

    @property
    def are_chains(self) -> jax.Array:
        """``[R]`` bool, whether each draft follows the one before it; for drafts with parents."""
        # [R, K] -> [R]: draft i is node i + 1, so in a chain its parent is node i
        nodes = jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)
        return jnp.all(self.parents == nodes[None, :], axis=1)

    def with_chains(self, requests: jax.Array) -> Drafted:
        """Returns the drafts in which the trees of some slots, ``[B]`` bool, are chains."""
        if self.parents is None:
            return self
        # [B] -> [R] of the requests; ids and parents stay [R, K]
        ids, parents = with_chains(self.token_ids, self.parents, take_slots(requests, self.slots))
        return dataclasses.replace(self, token_ids=ids, parents=parents)

    def num_proposed(self, vocab_size: int) -> jax.Array:
        """Returns ``[R]`` int32, the drafts of each request that could be accepted."""
        ids = self.token_ids
        in_range = ((ids >= 0) & (ids < vocab_size)).astype(jnp.int32)
        if self.parents is None:
            # [R, K] -> [R]: those before the first that is no token
            return jnp.cumprod(in_range, axis=1).sum(axis=1, dtype=jnp.int32)
        # [R, K] -> [R]: those of the longest path. A draft's depth counts the drafts up to it; node
        # 0 of the K + 1 is the newest token, and no draft.
        depth = TreeRows.of(self.parents).depth[:, 1:]
        return jnp.max(in_range * depth, axis=1)


class Features(NamedTuple):
    """What the target computed for the tokens that it ran last, as `DraftContext` has it.

    Attributes:
      values: ``[B, D+1, A*H]``, with D the most drafts that a step accepts: K, or the depth of
        trees.
      lengths: ``[B]`` int32, how many rows belong to tokens of the sequence.
    """

    values: jax.Array
    lengths: jax.Array


@pytree(
    batch=(Batch,),
    store=(DraftStore,),
    counters=(AcceptanceCounters,),
    proposal=(Drafted,),
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a step reads and writes; donate it to every function that takes it.

    Attributes:
      batch: the B sequences; those that are done take part in a step and are not changed by it.
      target_cache: the target's cache.
      draft_cache: the drafter's cache.
      store: what drafts were drawn from; None for drafts without a distribution.
      counters: acceptance of all verifications so far.
      features: that the next `draft` reads; None if the drafter reads none. Between `draft` and
        `verify` there are those of slots that take no part, if there are such.
      draft_rates: what verifications have shown of acceptance; None unless the `Engine` has a
        `draft_budget`.
      proposal: the drafts, between `draft` and `verify`; else None.

    Example: see `Engine`.
    """

    batch: Batch
    target_cache: Cache
    draft_cache: Cache
    store: DraftStore | None
    counters: AcceptanceCounters
    features: Features | None = None
    draft_rates: DraftRates | None = None
    proposal: Drafted | None = None

    @property
    def slots(self) -> jax.Array | None:
        """``[R]`` int32, the requests that there are drafts of; None for all."""
        return None if self.proposal is None else self.proposal.slots

    @property
    def running(self) -> Batch:
        """The R requests of `slots`."""
        return take_slots(self.batch, self.slots)

    def without_drafts(self, requests: jax.Array) -> DecodeState:
        """Returns the state without the drafts of some requests, ``[B]`` bool, nor their store."""
        proposal = self.proposal
        # Between the halves of a step there are drafts, of all slots or of some.
        if proposal is not None:
            # [B] -> [R] -> [R, 1]
            is_left_out = take_slots(requests, proposal.slots)[:, None]
            ids = jnp.where(is_left_out, PLACEHOLDER_TOKEN_ID, proposal.token_ids)
            proposal = dataclasses.replace(proposal, token_ids=ids)
        store = None if self.store is None else self.store.evict(requests)
        return dataclasses.replace(self, proposal=proposal, store=store)


def take_slots(arrays: _Arrays, slots: jax.Array | None) -> _Arrays:
    """Returns what arrays ``[B, ...]`` hold of some requests, ``[R]`` int32; None for all."""
    if slots is None:
        return arrays
    # Calls that warm up have slots past the last one. "clip" reads the last one's in their place.
    taken: _Arrays = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), arrays)
    return taken


def put_slots(arrays: _Arrays, some: _Arrays, slots: jax.Array | None) -> _Arrays:
    """Returns arrays ``[B, ...]`` in which `some`, ``[R, ...]``, stand in the place of slots."""
    if slots is None:
        return some
    # What such calls return for slots past the last one changes none.
    changed: _Arrays = jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), arrays, some)
    return changed
