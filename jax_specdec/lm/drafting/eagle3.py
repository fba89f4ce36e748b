"""Drafting with an EAGLE-3 head, which reads what the target computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.arrays import check_type
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID
from jax_specdec.lm.drafting.context import DraftContext
from jax_specdec.lm.drafting.drafter import Proposal
from jax_specdec.lm.drafting.draw import draft_chain
from jax_specdec.lm.drafting.heads import HeadDrafter, features_of
from jax_specdec.lm.models.eagle3 import Eagle3Head


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

    Attributes:
      head: static; its weights are the `draft_params`. In the target's dtype.
      store_dtype: dtype that logits are sampled from and stored in; None for that of the head.

    Raises:
      TypeError: `head` is not an `Eagle3Head`.

    Example:
      >>> from jax_specdec import lm
      >>> target, _ = lm.load_embedded_pair()
      >>> head, head_params = lm.load_embedded_head(target)
      >>> drafter = lm.Eagle3Drafter(head)  # for `generate`, with draft_params=head_params
      >>> drafter.feature_layers
      (2, 4, 5)

    References:
      Li et al., 2025, "EAGLE-3", https://arxiv.org/abs/2503.01840
    """

    def __post_init__(self) -> None:
        check_type("head", self.head, Eagle3Head)

    def prefill(
        self,
        params: Any,
        token_ids: jax.Array,
        cache: Any,
        start: jax.Array | None = None,
        *,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> Any:
        """Run the head over the prompts, or a chunk of them; see `Drafter.prefill`.

        Raises:
          ValueError: there are no features.
        """
        if features is None or next_token_ids is None:
            raise ValueError("prefill must get features and next_token_ids, but it got none")
        if start is None:
            start = jnp.zeros((token_ids.shape[0],), jnp.int32)
        shifted = jnp.concatenate([token_ids[:, 1:], next_token_ids[:, None]], axis=1)
        states = self.head.project(params, features)
        return self.head.apply(params, states, shifted, start, cache)[2]

    def propose(
        self, params: Any, context: DraftContext, cache: Any, store: DraftStore | None
    ) -> tuple[Proposal, Any]:
        """Draft K tokens; see `Drafter.propose`.

        Raises:
          ValueError: the context has no features.
        """
        features, num_features = features_of(context)
        lengths, longest = context.lengths, context.token_ids.shape[1]

        def forward(carry: Any, last: jax.Array, offset: jax.Array) -> tuple[jax.Array, Any]:
            state, cache = carry
            start = jnp.minimum(lengths - 2 + offset, longest - 1)
            logits, state, cache = self.head.apply(params, state, last[:, None], start, cache)
            return logits[:, 0], (state, cache)

        size = features.shape[1]
        start = jnp.clip(lengths - 1 - num_features, 0, longest - size)
        place = start[:, None] + 1 + jnp.arange(size, dtype=jnp.int32)[None, :]
        shifted = jnp.take_along_axis(context.token_ids, place, axis=1, mode="clip")
        states, row = self.head.project(params, features), jnp.maximum(num_features - 1, 0)
        logits, state, cache = self.head.apply(params, states, shifted, start, cache, row)
        proposal, (_, cache) = draft_chain(
            logits[:, 0],
            (state, cache),
            forward,
            context,
            store,
            ids=params.get("target_ids"),
            vocab_size=self.head.config.layer.vocab_size,
        )
        is_read = (num_features > 0)[:, None]
        drafts = jnp.where(is_read, proposal.token_ids, PLACEHOLDER_TOKEN_ID)
        return proposal._replace(token_ids=drafts), cache
