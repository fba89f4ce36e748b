"""Drafting a whole block in one pass, with a DFlash or DSpark head.

`BlockDrafter` writes the target's features of new tokens into the head's cache, runs the head once,
and draws the drafts from its rows: by `draw` as a chain, by `tree` as the best nodes of a tree. The
head itself, and what its rows mean, is in `models/block.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import check_int, check_type, require
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Proposal
from jax_specdec.lm.drafting.draw import Row, draft_at_once, draft_chain, ids_of
from jax_specdec.lm.drafting.heads import HeadDrafter, features_of
from jax_specdec.lm.drafting.tree import Children, best_nodes, grow, likeliest, with_bias
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.protocol import Cache, Params, Rows, is_loaded_model

_NUM_EXTENDED = 8
_NUM_CHILDREN = 16
"""Nodes of a level that are extended, and children of each, where rows depend on the node."""


@dataclasses.dataclass(frozen=True)
class BlockDrafter(HeadDrafter[BlockHead]):
    """Drafts K tokens in one pass of a DFlash or DSpark head.

    With t_n the newest token, and g_i the target's features at position i:

    1. The keys and values of g_i, for the tokens that the target has run since the last call, go
       into the head's cache. They overwrite what the last block left there.
    2. The head runs its whole block, of which K rows are used: it was trained with all of them.
    3. Drafts are drawn from these rows, all at once. For a head with a Markov bias (DSpark), which
       adds to each row what the draft before it says, they are drawn one after another.

    With ``draft_sample_method="probabilistic"``, drafts are sampled under each request's sampling
    parameters. What they were sampled from is stored and verified. With "greedy" they are argmaxes,
    verified one-hot. A prompt of one token has no features, so its first step has no drafts.

    With `tree_depth`, the K drafts are the best nodes of a tree, at most so deep: as many rows of
    the block are used. The agreement rule is needed, under which drafts are chosen by what the
    noise of the target's tokens says, too.

    Attributes:
      head: static; its weights are the `draft_params`. In the target's dtype.
      store_dtype: dtype that logits are sampled from and stored in; None for that of the head.
      num_candidates: C, or None. If given, each draft is one of the C likeliest ids of its row,
        chosen before the bias is added, and the store holds C logits per draft. This saves memory
        and the reading of most of the bias, and costs acceptance. With a `tree_depth`, each node's
        children are among the C likeliest ids of its level, chosen before the bias; the whole
        vocabulary is then looked at once for all levels, not by each. What a chain would draft
        need not be among them. Filters are those of the row without the bias.
      tree_depth: D, the most drafts of a path through a tree; 0 for chains.

    Raises:
      TypeError: `head` is not a `BlockHead`, or `num_candidates` or `tree_depth` not an int.
      ValueError: `num_candidates` is below 1 or more than the ids of the head; `tree_depth` is
        negative or more than the drafts of a block.

    Example: see `load_head`.

    References:
      DFlash, 2026, https://arxiv.org/abs/2602.06036
      DSpark, 2026, https://arxiv.org/abs/2607.05147
    """

    num_candidates: int | None = None

    def __post_init__(self) -> None:
        hint = "pass its .model" if is_loaded_model(self.head) else None
        check_type("head", self.head, BlockHead, hint=hint)
        check_int("tree_depth", self.tree_depth, 0, self.head.config.max_drafts)
        if self.num_candidates is not None:
            check_int("num_candidates", self.num_candidates, 1, self.head.vocab_size)

    def init_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Returns an empty store for the logits of K drafts per request; None if none is read.

        Raises:
          ValueError: K is more than the drafts of a block, for chains.
        """
        if self.tree_depth:
            return None
        c = self.head.config
        k = config.num_speculative_tokens
        must = f"be at most {c.max_drafts}, the drafts of a block of {c.block_size}"
        require(k <= c.max_drafts, "num_speculative_tokens", must, k)
        return self.make_store(params, batch_size, config, self.num_candidates)

    def prefill(
        self,
        params: Params,
        rows: Rows,
        cache: Cache,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> Cache:
        """Writes the context of the prompts, or a chunk of them, into the cache.

        See `Drafter.prefill`; tokens are not looked at.

        Raises:
          ValueError: there are no features.
        """
        # The context of a token needs its features alone. No block is run: nothing is drafted yet.
        if features is None:
            raise ValueError("prefill must get features and next_token_ids, but it got none")
        return self.head.write_context(params, features, rows.start, cache, rows.slots)

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Drafts K tokens; see `Drafter.propose`.

        Raises:
          ValueError: the context has no features.
        """
        features, num_features = features_of(context)
        head = self.head
        # [B]: the position of the newest token, and its id
        last = context.lengths - 1
        newest = jnp.take_along_axis(context.token_ids, last[:, None], axis=1)[:, 0]
        # Read: [B, S, A*H], of which num_features rows belong to the text, the last to the token
        # before the newest. The others, of rejected drafts, are written as well, from the newest
        # token's position on, where the block is written next.
        start = last - num_features
        cache = head.write_context(params, features, start, cache, context.slots)
        # Draft: [B, n, Vd], of the first n positions of the block. All S rows of it are run.
        wanted = self.tree_depth or context.config.num_speculative_tokens
        # The block stays in the cache from the newest token on; the next call's context is written
        # over it.
        rows = Rows(newest[:, None], last, context.slots)
        logits, _, cache = head.apply(params, rows, cache, wanted)
        if self.tree_depth:
            proposal = self._tree(params, logits, newest, context)
        else:
            proposal = self._chain(params, logits, newest, context, store)
        # A prompt of one token has no context yet, and so no drafts. [B] -> [B, 1]
        is_read = (num_features > 0)[:, None]
        drafts = jnp.where(is_read, proposal.token_ids, PLACEHOLDER_TOKEN_ID)
        return proposal._replace(token_ids=drafts), cache

    def _chain(
        self,
        params: Params,
        logits: jax.Array,
        newest: jax.Array,
        context: DraftContext,
        store: DraftStore | None,
    ) -> Proposal:
        """Returns a chain of drafts, from rows ``[B, K, Vd]`` of a block."""
        head = self.head
        size = head.config.vocab_size
        has_bias = head.config.markov_rank is not None
        ids = params.get("target_ids")
        columns: jax.Array | None = None
        if self.num_candidates is not None:
            # [B, K, Vd] -> [B, K, C], and the columns and ids of these
            logits, columns = lax.top_k(logits, self.num_candidates)
            ids = columns if ids is None else ids[columns]
        # [Vd] of all rows, [B, K, C] of candidates, or all ids in their order
        of_columns = ids_of(ids, size)

        def forward(carry: None, last: jax.Array, offset: jax.Array) -> tuple[Row, None]:
            """Returns the row of a draft, which is there already, after the draft before."""
            # [B, K, Vd] -> [B, Vd]: what the draft before adds is known only now
            row = logits[:, offset]
            if has_bias:
                # [B, C]: the bias is needed for the candidates of this row alone
                candidates = None if columns is None else columns[:, offset]
                row = row + head.bias(params, last, candidates)
            return Row(row, of_columns.of_draft(offset)), carry

        # At once, unless rows depend on drafts, or the store has more of them than this step.
        # Processors count the drafts before a row, so they too make it depend on them.
        num_rows = logits.shape[1]
        is_partial = store is not None and len(store.positions) > num_rows
        if not (has_bias or is_partial or context.processors is not None):
            return draft_at_once(logits, context, store, of_columns)
        # The first row's bias is that of the newest token.
        first, _ = forward(None, newest, jnp.int32(0))
        proposal, _ = draft_chain(first, None, forward, context, store)
        return proposal

    def _tree(
        self, params: Params, logits: jax.Array, newest: jax.Array, context: DraftContext
    ) -> Proposal:
        """Returns a tree of K drafts, from rows ``[B, D, Vd]`` of a block."""
        head = self.head
        size = head.config.vocab_size
        has_bias = head.config.markov_rank is not None
        num_candidates = self.num_candidates
        num_nodes = context.config.num_speculative_tokens
        # Without a bias, nodes have the same children: to extend all of them costs little.
        num_extended = min(num_nodes, _NUM_EXTENDED) if has_bias else num_nodes
        ids = params.get("target_ids")
        depth = jnp.arange(self.tree_depth, dtype=jnp.int32)

        def best(logits: jax.Array, offsets: jax.Array, count: int) -> Children:
            return likeliest(logits, offsets, context, count, ids_of(ids, size))

        # Three ways to the children of the nodes [B, W] of a level, for `grow`.
        if has_bias and num_candidates is None:
            count = min(num_nodes, size, _NUM_CHILDREN)

            def children(d: int, token_ids: jax.Array) -> Children:
                # [B, W, Vd]: the row of each node, with the bias of its token
                rows = logits[:, d, None] + head.bias(params, token_ids)
                return best(rows, depth[d : d + 1], count)

        elif has_bias:
            assert num_candidates is not None
            # [B, D, C]: chosen once, and where each is among the head's columns
            every_level = best(logits, depth, num_candidates)
            columns = every_level.token_ids
            if ids is not None:
                # [Vd] -> [V] -> [B, D, C]: the column of each target id. Ids that the head does not
                # score have column 0; they are candidates with a score of -inf alone.
                column = jnp.arange(len(ids), dtype=jnp.int32)
                columns = jnp.zeros((size,), jnp.int32).at[ids].set(column)[columns]

            def children(d: int, token_ids: jax.Array) -> Children:
                # [B, W, C]: of each node's token, for the candidates of the level
                bias = head.bias(params, token_ids, columns[:, d, None])
                level = Children(every_level.token_ids[:, d, None], every_level.scores[:, d, None])
                return with_bias(level, bias)

        else:
            # [B, D, C]: the nodes of a level have the same children
            every_level = best(logits, depth, min(num_nodes, num_candidates or size))

            def children(d: int, token_ids: jax.Array) -> Children:
                # [B, 1, C]: one entry on the axis of nodes says to `grow` that they are shared
                return Children(every_level.token_ids[:, d, None], every_level.scores[:, d, None])

        nodes = grow(children, newest, self.tree_depth, num_nodes, num_extended)
        token_ids, parents = best_nodes(nodes, num_nodes)
        return Proposal(token_ids, parents=parents)
