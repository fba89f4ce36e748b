"""`FirstOf`: lookup beside a drafter that runs a model; in a step, a request has drafts of one.

Both draft in every step. A `_Memory` lies beside the head's cache, so the decoding loops carry it
and move it between requests as they do any cache. It holds, for each request, how many drafts of
the lookup and of the head came true so far. With the counts of this step's lookup that says which
of the two promises more accepted drafts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import check_type, require
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.types import Integers
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Drafter, DrafterServes, Proposal
from jax_specdec.lm.drafting.suffix import Lookup, SuffixDrafter
from jax_specdec.lm.models.protocol import (
    Cache,
    Params,
    Rows,
    check_params,
    put_cache,
    take_cache,
)

_FADE = 0.9
"""What remains of a request's past after a step that teaches something."""

_FIRST_RATE = 0.7
"""The rate at which the head's drafts are expected to be accepted before any step."""

_WEIGHT = 2.0
"""How many drafts what is expected before any step counts as, beside those seen: `_FIRST_RATE` for
the head, for the lookup that as many drafts come true as its counts say."""


class _Memory(NamedTuple):
    """What `FirstOf` knows of each request; all zero before its first drafts.

    Attributes:
      length: ``[B]`` int32, of the text when it last drafted; 0 if it did not.
      first: ``[B, 2]`` int32, what the lookup and the head then drafted first; -1 for nothing.
      expected: ``[B, 2]`` float32, the probability of the lookup's first draft, and its score.
      num_drafts: ``[B, 2]`` int32, how many drafts the lookup and the head then had.
      is_lookup: ``[B]`` bool, whether the drafts were those of the lookup.
      lookup: ``[B, 2]`` float32, how many of its drafts came true, and how many had to by counts.
      head: ``[B, 2]`` float32, how many of its drafts were accepted, and how many were verified.
    """

    length: jax.Array
    first: jax.Array
    expected: jax.Array
    num_drafts: jax.Array
    is_lookup: jax.Array
    lookup: jax.Array
    head: jax.Array

    @classmethod
    def create(cls, batch_size: int) -> _Memory:
        """Returns the memory of requests that have had no drafts."""
        # Each field has an array of its own: a state that holds one twice cannot be donated.
        return cls(
            length=jnp.zeros((batch_size,), jnp.int32),
            first=jnp.zeros((batch_size, 2), jnp.int32),
            expected=jnp.zeros((batch_size, 2), jnp.float32),
            num_drafts=jnp.zeros((batch_size, 2), jnp.int32),
            is_lookup=jnp.zeros((batch_size,), bool),
            lookup=jnp.zeros((batch_size, 2), jnp.float32),
            head=jnp.zeros((batch_size, 2), jnp.float32),
        )

    def after(self, context: DraftContext) -> _Memory:
        """Returns the memory with what became of the last drafts, as far as the text shows.

        All new tokens but the last were drafts that were accepted, of the lookup or the head, or
        of another in their place, such as a grammar, which may have had more or others. A first
        draft that equals the only new token was not verified: nobody wanted drafts, or others were
        verified. A draft after accepted ones counts as rejected, also where a limit of the request
        dropped it, which the text does not show.
        """
        # [B] -> [B, 1]: a step adds the drafts that it accepts, and one token more
        num_new = (context.lengths - self.length)[:, None]
        # [B] -> [B, 1]: the first of the new tokens, at the position of the drafts that came first
        came = jnp.take_along_axis(context.token_ids, self.length[:, None], axis=1, mode="clip")
        # [B, 2]: how many drafts of the lookup, and of the head, are known to be right. The number
        # of accepted drafts is read below only for the one of the two that was verified.
        # Of accepted drafts that begin with another token, none was theirs.
        is_right = (self.first == came).astype(jnp.int32)
        num_right = is_right * jnp.clip(num_new - 1, 1, self.num_drafts)
        is_known = (self.length > 0)[:, None] & (num_new > 0)
        # [B, 2]: right and expected, of all drafts of a lookup that was verified, or of its first.
        # Had its drafts been verified, a right first one would have come with one token more.
        was_verified = self.is_lookup[:, None] & ((num_new > 1) | (is_right[:, :1] == 0))
        lookup = jnp.where(
            was_verified,
            jnp.stack([num_right[:, 0].astype(jnp.float32), self.expected[:, 1]], axis=1),
            jnp.stack([is_right[:, 0].astype(jnp.float32), self.expected[:, 0]], axis=1),
        )
        # [B, 2]: accepted and verified, of the head's drafts. The first that is wrong was verified,
        # those after it were not; if all are right, there is none that is wrong. Of drafts past the
        # new tokens nothing is known.
        visited = jnp.minimum(num_right + 1, jnp.minimum(num_new, self.num_drafts))
        head = jnp.stack([num_right[:, 1], visited[:, 1]], axis=1).astype(jnp.float32)
        # [B, 2]: who learns: the lookup, of any step; the head, only of steps with its own drafts.
        # Neither learns of a step in which it drafted nothing.
        taught = (
            is_known
            & (self.first >= 0)
            & jnp.stack([jnp.ones_like(self.is_lookup), ~self.is_lookup], axis=1)
        )
        # [B, 2] each: sums over steps, in which a step counts 0.9 times as much as the next one
        return self._replace(
            lookup=jnp.where(taught[:, :1], _FADE * self.lookup + lookup, self.lookup),
            head=jnp.where(taught[:, 1:], _FADE * self.head + head, self.head),
        )

    def prefers_lookup(self, looked_up: Lookup, k: int) -> jax.Array:
        """Returns ``[B]`` bool, whether a lookup promises more accepted drafts than a head.

        The counts of a lookup are careful: one occurrence is a half, whatever came of those before.
        So they are scaled by what came true of them.
        """
        # [B, K] -> [B]: the expected number of accepted drafts, a sum over the chances of each
        # A scaled chance is one still: at most 1.
        right, due = self.lookup.T
        scale = (right + _WEIGHT) / (due + _WEIGHT)
        by_lookup = jnp.sum(jnp.minimum(scale[:, None] * looked_up.probabilities, 1.0), axis=1)
        # [B, K] -> [B]: rate + rate^2 + ..., since a draft is accepted only after all before it
        accepted, visited = self.head.T
        rate = (accepted + _WEIGHT * _FIRST_RATE) / (visited + _WEIGHT)
        by_head = jnp.sum(jnp.cumprod(jnp.broadcast_to(rate[:, None], (rate.size, k)), 1), axis=1)
        return by_lookup > by_head

    def with_drafts(
        self, context: DraftContext, looked_up: Lookup, drafts: jax.Array, is_lookup: jax.Array
    ) -> _Memory:
        """Returns the memory with this step's drafts of the lookup and of the head.

        That of a request that does not run stays: its next tokens may be those of its prompt.
        """
        # [B, K] twice -> [B, 2, K]
        both = jnp.stack([looked_up.token_ids, drafts], axis=1)
        new = self._replace(
            length=context.lengths,
            first=both[:, :, 0],
            expected=jnp.stack([looked_up.probabilities[:, 0], looked_up.scores], axis=1),
            # [B, 2, K] -> [B, 2]: those before the first -1
            num_drafts=jnp.cumprod((both >= 0).astype(jnp.int32), axis=2).sum(2, dtype=jnp.int32),
            is_lookup=is_lookup,
        )
        # [B] -> [B, 1]: fields are [B] or [B, 2]
        runs = context.runs[:, None]

        def if_it_runs(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(runs if new.ndim > 1 else runs[:, 0], new, old)

        return jax.tree.map(if_it_runs, new, self)


@dataclasses.dataclass(frozen=True)
class FirstOf(Drafter):
    """Drafts by lookup where that is likely to have more drafts accepted, else with a head.

    Each request, in each step, has the drafts of the one or of the other. How many drafts of the
    head are likely to be accepted is taken from its earlier drafts for this request; for the lookup
    it is the score, scaled by what came true of earlier scores. Neither depends on what is drafted
    in this step, so the head's drafts have the distribution that they are verified with. A request
    that drafts by lookup is verified one-hot. The head drafts in every step all the same, which
    keeps its cache whole.

    A request that comes back after a preemption begins to learn anew.

    Attributes:
      lookup: what looks up.
      head: any other `Drafter`, such as an `Eagle3Drafter` or a `ModelDrafter`. The `draft_params`
        are a pair: those of the lookup (None without a history), and those of the head.

    Raises:
      TypeError: `lookup` is no `SuffixDrafter`, or `head` no `Drafter`.
      ValueError: one of them proposes trees.

    Example:
      >>> from jax_specdec import lm
      >>> _, (draft, draft_params) = lm.load_embedded_pair()
      >>> drafter = lm.FirstOf(lm.SuffixDrafter(), lm.ModelDrafter(draft))
      >>> draft_params = (None, draft_params)  # for `generate`, beside the drafter
    """

    lookup: SuffixDrafter
    head: Drafter

    def __post_init__(self) -> None:
        check_type("lookup", self.lookup, SuffixDrafter)
        check_type("head", self.head, Drafter)
        # A choice between a tree and a chain would have to choose parents, too.
        for name, drafter in (("lookup", self.lookup), ("head", self.head)):
            must = "propose chains, without a tree_depth"
            require(not drafter.serves.tree_depth, name, must, drafter)

    @property
    def serves(self) -> DrafterServes:
        """Declares what the head does, which always drafts, and in what the lookup looks."""
        lookup = self.lookup.serves
        # Features, slots, chunks and kept rows are what the head's cache needs. The memory needs
        # none of them: it lies along the same axis, and `prefill` resets it.
        return dataclasses.replace(
            self.head.serves,
            may_abstain=False,
            has_history=lookup.has_history,
            predictions=lookup.predictions,
        )

    def add(self, params: Params, token_ids: Integers) -> Params:
        """Returns the params with one more text in the history; see `SuffixDrafter.add`."""
        return self.lookup.add(params[0], token_ids), params[1]

    def check_params(self, name: str, params: Params) -> None:
        """Checks the params of both.

        Raises:
          ValueError: they are no pair.
        """
        is_pair = isinstance(params, (tuple, list)) and len(params) == 2
        must = "be a pair, the params of the lookup (None without a history) and of the head"
        require(is_pair, name, must, params)
        check_params(f"{name}[0]", self.lookup, params[0])
        check_params(f"{name}[1]", self.head, params[1])

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns the head's cache, and what is known of each request."""
        memory = _with_batch_axis(_Memory.create(batch_size), self.serves.batch_axis)
        return self.head.init_cache(batch_size, max_length), memory

    def init_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Returns the head's store."""
        return self.head.init_store(params[1], batch_size, config)

    def prefill(
        self,
        params: Params,
        rows: Rows,
        cache: Cache,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> Cache:
        """Reads the prompts with the head; see `Drafter.prefill`. Nothing else is known yet."""
        head_cache, memory = cache
        axis = self.serves.batch_axis
        head_cache = self.head.prefill(params[1], rows, head_cache, features, next_token_ids)
        # A slot may hold what a request before this one left.
        new = _Memory.create(rows.token_ids.shape[0])
        return head_cache, _with_memory_of(memory, new, rows.slots, axis)

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Drafts with both, and chooses; see `Drafter.propose`."""
        axis = self.serves.batch_axis
        head_cache, all_memory = cache
        # Read: what came of the drafts of the last step, of the B requests of this one.
        memory = _memory_of(all_memory, context.slots, axis).after(context)
        # Draft: [B, K] of each. The head drafts whatever is chosen, which keeps its cache whole.
        looked_up = self.lookup.lookup(params[0], context)
        (drafts, store, _), head_cache = self.head.propose(params[1], context, head_cache, store)
        # [B]: a request drafts by lookup where that promises more, or the head has nothing
        k = context.config.num_speculative_tokens
        is_better = memory.prefers_lookup(looked_up, k) | (drafts[:, 0] < 0)
        is_lookup = (looked_up.token_ids[:, 0] >= 0) & is_better
        # Store: the first drafts of both, so that the next step can compare them with the text.
        memory = memory.with_drafts(context, looked_up, drafts, is_lookup)
        token_ids = jnp.where(is_lookup[:, None], looked_up.token_ids, drafts)
        if store is not None:
            # What a lookup drafts was not drawn from these rows: it is verified one-hot.
            store = store.evict(is_lookup)
        all_memory = _with_memory_of(all_memory, memory, context.slots, axis)
        return Proposal(token_ids, store), (head_cache, all_memory)


def _with_batch_axis(memory: _Memory, axis: int) -> _Memory:
    """Returns arrays whose axis `axis` holds the requests, as that of the head's cache does."""
    # [B, ..] -> [1, .., B, ..]
    return jax.tree.map(lambda x: x.reshape((1,) * axis + x.shape), memory)


def _memory_of(all_memory: _Memory, slots: jax.Array | None, axis: int) -> _Memory:
    """Returns the memory of some requests, or of all, whose first axes hold them."""
    if slots is not None:
        # Of `like` the shapes alone are read: they say how many entries a request has.
        like = _with_batch_axis(_Memory.create(slots.shape[0]), axis)
        all_memory = take_cache(all_memory, like, slots, axis)
    # [1, .., B, ..] -> [B, ..]
    return jax.tree.map(lambda x: x.reshape(x.shape[axis:]), all_memory)


def _with_memory_of(
    all_memory: _Memory, memory: _Memory, slots: jax.Array | None, axis: int
) -> _Memory:
    """Returns the memory of all requests, of which some, or all, have a new one."""
    memory = _with_batch_axis(memory, axis)
    if slots is None:
        return memory
    all_memory = put_cache(all_memory, memory, slots, axis)
    return all_memory
