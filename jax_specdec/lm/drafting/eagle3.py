"""Drafting with an EAGLE-3 head, which reads what the target computed.

A step has two halves: `_extend` runs the head over what the target ran last, in one pass; then
`_chain` or `_tree` drafts, by a pass for each draft or for each level. The head itself is in
`models/eagle3.py`, what is drawn from its rows in `draw` and `tree`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import check_int, check_type
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.tree import TREE_MASK_BITS, TreeRows, node_bits
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Proposal
from jax_specdec.lm.drafting.draw import Row, draft_chain, ids_of
from jax_specdec.lm.drafting.heads import HeadDrafter, features_of
from jax_specdec.lm.drafting.tree import WIDTH, draft_tree
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.protocol import Cache, Params, Rows, is_loaded_model

_MOST_DEPTH = 17
"""Levels of a tree, of which the last is not run: at least 4 nodes of each of the others."""


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(HeadDrafter[Eagle3Head]):
    """Drafts a chain of K tokens with an EAGLE-3 head.

    With t_i the token at position i, t_n the newest, and g_i the target's features there:

    1. The head runs over the tokens that the target has run since the last call, which overwrites
       what drafting left in its cache. Row i reads g_i and t_{i+1}, and is about t_{i+2}; so the
       last row, n - 1, gives the first draft.
    2. Row n reads the head's own state of row n - 1 in place of g_n, and the first draft; and so on
       for each further draft.

    With ``draft_sample_method="probabilistic"``, drafts are sampled under each request's sampling
    parameters over the head's Vd ids. What they were sampled from is stored and verified on these
    ids. With "greedy" they are argmaxes, verified one-hot. A prompt of one token has no row 0, so
    its first step has no drafts.

    With `tree_depth`, the K drafts are the best nodes of a tree, at most so deep. Step 2 then runs
    the best nodes of each level in one pass, each with the state of the row before it: 8 of them,
    beyond a depth of 9 fewer. The agreement rule is needed, under which drafts are chosen by what
    the noise of the target's tokens says, too.

    Attributes:
      head: static; its weights are the `draft_params`. In the target's dtype.
      store_dtype: dtype that logits are sampled from and stored in; None for that of the head.
      tree_depth: D, the most drafts of a path through a tree, at most 17; 0 for chains.

    Raises:
      TypeError: `head` is not an `Eagle3Head`, or `tree_depth` not an int.
      ValueError: `tree_depth` is out of range.

    Example:
      >>> from jax_specdec import lm
      >>> target, _ = lm.load_embedded_pair()
      >>> head, head_params = lm.load_embedded_head(target)
      >>> drafter = lm.Eagle3Drafter(head)  # for `generate`, with draft_params=head_params
      >>> drafter.serves.aux_hidden_state_layers
      (2, 4, 5)

    References:
      Li et al., 2025, "EAGLE-3", https://arxiv.org/abs/2503.01840
    """

    def __post_init__(self) -> None:
        hint = "pass its .model" if is_loaded_model(self.head) else None
        check_type("head", self.head, Eagle3Head, hint=hint)
        check_int("tree_depth", self.tree_depth, 0, _MOST_DEPTH)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns the head's cache, with room for the nodes of a tree after the text."""
        # `tree_mask` has a bit for each of 64 positions from the newest token's on: as much room is
        # enough for all levels.
        room = TREE_MASK_BITS if self.tree_depth else 0
        return self.head.init_cache(batch_size, max_length + room)

    def init_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Returns an empty store for the logits of K drafts per request; None if none is read."""
        return self.make_store(params, batch_size, config, None)

    def prefill(
        self,
        params: Params,
        rows: Rows,
        cache: Cache,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> Cache:
        """Runs the head over the prompts, or a chunk of them; see `Drafter.prefill`.

        Raises:
          ValueError: there are no features.
        """
        if features is None or next_token_ids is None:
            raise ValueError("prefill must get features and next_token_ids, but it got none")
        # [B, P]: row i reads the features of token i, and token i + 1
        shifted = jnp.concatenate([rows.token_ids[:, 1:], next_token_ids[:, None]], axis=1)
        # Past the end of a prompt rows are of padding, which later rows overwrite.
        states = self.head.project(params, features)
        return self.head.apply(params, states, rows._replace(token_ids=shifted), cache)[2]

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Drafts K tokens; see `Drafter.propose`.

        Raises:
          ValueError: the context has no features.
        """
        # Read: what the target ran last. Its last row gives the first draft, [B, 1, Vd].
        _, num_features = features_of(context)
        logits, state, cache = self._extend(params, context, cache)
        if self.tree_depth:
            proposal, cache = self._tree(params, logits, state, context, cache)
        else:
            proposal, cache = self._chain(params, logits, state, context, cache, store)
        # A prompt of one token has no row before its newest, and so no drafts. [B] -> [B, 1]
        is_read = (num_features > 0)[:, None]
        drafts = jnp.where(is_read, proposal.token_ids, PLACEHOLDER_TOKEN_ID)
        return proposal._replace(token_ids=drafts), cache

    def _extend(
        self, params: Params, context: DraftContext, cache: Cache
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Runs the head over the tokens that the target ran last.

        Returns:
          Logits ``[B, 1, Vd]`` of the first draft, the feedback ``[B, 1, H]``, and the cache.
        """
        features, num_features = features_of(context)
        size = features.shape[1]
        longest = context.token_ids.shape[1] + (TREE_MASK_BITS if self.tree_depth else 0)
        # [B]: the position of the first of these, so that the last one is n - 1. Rows of rejected
        # drafts come after it. A text has room for K + 1 tokens more (`DraftContext`), and S is at
        # most K + 1; it has no more features than tokens. So the bounds move no rows of a request
        # that runs: they are for empty slots, whose features were those of another text.
        start = jnp.clip(context.lengths - 1 - num_features, 0, longest - size)
        # [B, S]: row i reads the features of token i, and token i + 1
        place = start[:, None] + 1 + jnp.arange(size, dtype=jnp.int32)[None, :]
        shifted = jnp.take_along_axis(context.token_ids, place, axis=1, mode="clip")
        states = self.head.project(params, features)
        # [B]: the only row that is about a draft is the last one, at n - 1. All S are written.
        row = jnp.maximum(num_features - 1, 0)
        return self.head.apply(params, states, Rows(shifted, start, context.slots), cache, row)

    def _chain(
        self,
        params: Params,
        logits: jax.Array,
        state: jax.Array,
        context: DraftContext,
        cache: Cache,
        store: DraftStore | None,
    ) -> tuple[Proposal, Cache]:
        """Returns a chain of drafts and the cache, from what `_extend` returns."""
        longest = context.token_ids.shape[1]
        ids = ids_of(params.get("target_ids"), self.head.config.vocab_size)

        def forward(
            carry: tuple[jax.Array, Cache], last: jax.Array, offset: jax.Array
        ) -> tuple[Row, tuple[jax.Array, Cache]]:
            """Returns the row of a draft, and the head's state and cache after the one before."""
            # Read the last draft; the head's state takes the place of features. Its row is written
            # at n - 1 + offset, and the next call overwrites it with one of true features.
            state, cache = carry
            # [B, 1]: row n - 1 + offset, inside the cache, reads its own state and the last draft
            start = jnp.minimum(context.lengths - 2 + offset, longest - 1)
            rows = Rows(last[:, None], start, context.slots)
            logits, state, cache = self.head.apply(params, state, rows, cache)
            return Row(logits[:, 0], ids), (state, cache)

        first = Row(logits[:, 0], ids)
        proposal, (_, cache) = draft_chain(first, (state, cache), forward, context, store)
        return proposal, cache

    def _tree(
        self,
        params: Params,
        logits: jax.Array,
        state: jax.Array,
        context: DraftContext,
        cache: Cache,
    ) -> tuple[Proposal, Cache]:
        """Returns a tree of drafts and the cache, from what `_extend` returns.

        The tree begins at the newest token's position of the cache, n. What a level leaves there
        is overwritten by the next call, or not seen.
        """
        ids = ids_of(params.get("target_ids"), self.head.config.vocab_size)

        def forward(
            states: tuple[jax.Array, jax.Array],
            cache: Cache,
            token_ids: jax.Array,
            level: jax.Array,
        ) -> tuple[Row, tuple[jax.Array, jax.Array], Cache]:
            """Returns the rows after the nodes of a level, what they leave, and the cache."""
            # [B, W, H], and the bits [B, W, 2] of the nodes above, which their rows left
            feedback, above = states
            width = token_ids.shape[1]
            # [W] -> [B, W, 2]: each node sees its ancestors, and itself. Levels of W nodes lie one
            # after another, so node w of a level is row level * W + w of the tree.
            first_row = level * width
            own_bits = node_bits(first_row + jnp.arange(width, dtype=jnp.int32))
            tree_mask = above | own_bits[None]
            # Level 0 is at position n, where a chain has the row of its first draft.
            rows = Rows(
                token_ids,
                start=context.lengths - 1,
                slots=context.slots,
                tree=TreeRows(jnp.broadcast_to(level, token_ids.shape), tree_mask),
                first_row=first_row,
            )
            logits, feedback, cache = self.head.apply(params, feedback, rows, cache)
            return Row(logits, ids), (feedback, tree_mask), cache

        # [B, 1, 2]: node 0 has no row of its own here
        none = jnp.zeros((*state.shape[:2], 2), jnp.uint32)
        # The last level is not run, and `tree_mask` has a bit for each node that is: at most 64.
        num_levels = min(self.tree_depth, context.config.num_speculative_tokens) - 1
        width = min(WIDTH, TREE_MASK_BITS // max(num_levels, 1))
        first = Row(logits, ids)
        return draft_tree(first, (state, none), cache, forward, context, self.tree_depth, width)
