"""Drafting with an assistant of Gemma 4, which reads the target's cache.

A step makes one state of the target's last feature, then runs the assistant once for each draft, or
for each level of a tree. Nothing is written: there is no cache of its own, so nothing is read of
prompts and nothing is to be taken back. The assistant itself is in `models/gemma_assistant.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import check_int, check_type
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, DrafterServes, Proposal
from jax_specdec.lm.drafting.draw import Row, draft_chain, ids_of
from jax_specdec.lm.drafting.heads import HeadDrafter, features_of
from jax_specdec.lm.drafting.tree import draft_tree
from jax_specdec.lm.models.gemma_assistant import GemmaAssistantHead
from jax_specdec.lm.models.protocol import Cache, Params, Rows, is_loaded_model


@dataclasses.dataclass(frozen=True)
class GemmaAssistantDrafter(HeadDrafter[GemmaAssistantHead]):
    """Drafts K tokens with an assistant of Gemma 4.

    With t_n the newest token, which the target has not run, and h its stream after the final norm
    at n - 1, the row whose logits gave t_n:

    1. The assistant runs one row, of t_n and h, which reads the target's keys and values of 0 to
       n - 1. The first draft is drawn from its logits.
    2. Each further draft is from a row of the draft before and the state that its row left, at the
       same rotary position, over the same keys.

    It has no cache: prompts are not read, and a request that comes back or begins with another's
    tokens is served as any other. With ``draft_sample_method="probabilistic"``, drafts are sampled
    under each request's sampling parameters; those of an ordered head from the candidates of the
    row, and their logits and ids are stored and verified as they are. With "greedy" they are
    argmaxes, verified one-hot. A prompt of one token has no row before its newest, so its first
    step has no drafts.

    With `tree_depth`, the K drafts are the best nodes of a tree, at most so deep. Step 2 then runs
    the 8 best nodes of each level in one pass, each with the state of the row before it; all of
    them see the same keys. The agreement rule is needed, under which drafts are chosen by what the
    noise of the target's tokens says, too.

    Attributes:
      head: static; its weights are the `draft_params`. In the target's dtype.
      store_dtype: dtype that logits are sampled from and stored in; None for that of the head.
      tree_depth: D, the most drafts of a path through a tree; 0 for chains.

    Raises:
      TypeError: `head` is not a `GemmaAssistantHead`, or `tree_depth` not an int.
      ValueError: `tree_depth` is negative.

    Example: see `GemmaAssistantHead`.
    """

    def __post_init__(self) -> None:
        hint = "pass its .model" if is_loaded_model(self.head) else None
        check_type("head", self.head, GemmaAssistantHead, hint=hint)
        check_int("tree_depth", self.tree_depth, 0)

    @property
    def serves(self) -> DrafterServes:
        """Declares the feature that the assistant reads, and the target's cache."""
        return dataclasses.replace(super().serves, reads_target_cache=True)

    def init_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Returns an empty store for the logits of K drafts per request; None if none is read."""
        return self.make_store(params, batch_size, config, self.head.config.num_candidates)

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Drafts K tokens; see `Drafter.propose`.

        Raises:
          ValueError: the context has no features, or no cache of the target.
        """
        features, num_features = features_of(context)
        if context.target_cache is None:
            raise ValueError("context must have the target_cache, but it has none")
        # [B]: the position n of the newest token, whose keys the target's cache has not, and its id
        newest = context.lengths - 1
        token = jnp.take_along_axis(context.token_ids, newest[:, None], axis=1)[:, 0]
        # [B, S, Ht] -> [B, 1, Ht]: of position n - 1, the last row that the target has kept
        row = jnp.maximum(num_features - 1, 0)
        last = jnp.take_along_axis(features, row[:, None, None], axis=1)
        state = self.head.first_states(params, last)

        def run(states: jax.Array, token_ids: jax.Array) -> tuple[Row, jax.Array]:
            """Returns the rows after tokens ``[B, S]``, and the states that they leave."""
            # Whatever is drafted, rows stand at n, and see positions 0 to n - 1.
            rows = Rows(token_ids, newest, context.slots)
            output = self.head.apply(params, states, rows, context.target_cache)
            # [B, S, C] -> [B * S, C]: of an ordered head, known with the rows
            ids = None if output.ids is None else output.ids.reshape(-1, output.ids.shape[2])
            return Row(output.logits, ids_of(ids, self.head.vocab_size)), output.states

        def after_draft(
            state: jax.Array, token: jax.Array, offset: jax.Array
        ) -> tuple[Row, jax.Array]:
            # [B] -> [B, 1] -> [B, 1, Vd] -> [B, Vd]
            row, state = run(state, token[:, None])
            return Row(row.logits[:, 0], row.ids), state

        def after_level(
            states: jax.Array, _: None, token_ids: jax.Array, level: jax.Array
        ) -> tuple[Row, jax.Array, None]:
            rows, states = run(states, token_ids)
            return rows, states, None

        # The row of the newest token gives the first draft, or the children of node 0.
        if self.tree_depth:
            first, state = run(state, token[:, None])
            proposal, _ = draft_tree(first, state, None, after_level, context, self.tree_depth)
        else:
            first, state = after_draft(state, token, jnp.int32(0))
            proposal, _ = draft_chain(first, state, after_draft, context, store)
        # A prompt of one token has no row before its newest, and so no drafts. [B] -> [B, 1]
        is_read = (num_features > 0)[:, None]
        drafts = jnp.where(is_read, proposal.token_ids, PLACEHOLDER_TOKEN_ID)
        return proposal._replace(token_ids=drafts), cache
