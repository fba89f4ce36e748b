"""What drafters with heads have in common: what they declare, their cache and their store.

`Eagle3Drafter`, `BlockDrafter` and `GemmaAssistantDrafter` derive from `HeadDrafter`, and say what
is read and drafted in a step. A head's features come with the `DraftContext` of each step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Drafter, DrafterServes
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.gemma_assistant import GemmaAssistantHead
from jax_specdec.lm.models.protocol import Cache, Params

Head = TypeVar("Head", Eagle3Head, BlockHead, GemmaAssistantHead)


@dataclasses.dataclass(frozen=True)
class HeadDrafter(Drafter, Generic[Head]):
    """A `Drafter` with a head; see `Eagle3Drafter`, `BlockDrafter` and `GemmaAssistantDrafter`."""

    head: Head
    store_dtype: Any = None
    tree_depth: int = 0

    @property
    def serves(self) -> DrafterServes:
        """Declares the features that the head reads, and trees if there are."""
        # Each entry of a head's cache belongs to a position, and the tokens up to the next one
        # decide what it is. So a later request may begin with what steps left, whoever drafted.
        return DrafterServes(
            aux_hidden_state_layers=self.head.aux_hidden_state_layers,
            tree_depth=self.tree_depth,
            slots=True,
            kept_rows="texts",
        )

    def check_params(self, name: str, params: Params) -> None:
        """Checks the head's weights."""
        self.head.check_params(name, params)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns the head's cache."""
        return self.head.init_cache(batch_size, max_length)

    def make_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig, num_candidates: int | None
    ) -> DraftStore | None:
        """Returns an empty store for rows of all ids of the head, or of so many candidates.

        None if no draft distribution is read.
        """
        if not config.keeps_draft_distribution:
            return None
        # Rows of candidates have ids of their own; other rows the head's list, if it has one.
        ids = None if num_candidates is not None else params.get("target_ids")
        if ids is not None:
            ids = jnp.array(ids)  # a copy: a state is donated, weights are not
        return DraftStore.create(
            batch_size,
            config.num_speculative_tokens,
            num_candidates or self.head.vocab_size,
            self.head.dtype if self.store_dtype is None else self.store_dtype,
            ids=ids,
            own_ids=num_candidates is not None,
        )


def features_of(context: DraftContext) -> tuple[jax.Array, jax.Array]:
    """Returns the features ``[B, S, A*H]`` of a context, and how many there are, ``[B]``.

    Raises:
      ValueError: there are none.
    """
    if context.features is None or context.num_features is None:
        raise ValueError("context must have features and num_features, but it has none")
    return context.features, context.num_features
