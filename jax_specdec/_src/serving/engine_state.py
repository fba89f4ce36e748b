"""What an engine carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.drafting.store import DraftStore
from jax_specdec._src.serving.batch import Batch
from jax_specdec._src.serving.metrics import AcceptanceCounters
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything that an `Engine` reads and writes; donate it to every function that takes it.

    Between two steps it holds drafts that are not verified yet. Whatever happens to a slot in
    between, its neighbours' drafts stay where they are.

    Attributes:
      batch: the sequences in the S slots; an empty slot is one that is done.
      target_cache: the target's cache.
      draft_cache: the drafter's cache.
      draft_token_ids: ``[S, K]`` int32, drafts to verify; -1 where there is none.
      store: what they were drawn from; None for drafts without a distribution.
      counters: acceptance of all verifications so far.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> engine = sd.Engine(
      ...     model, sd.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=4, max_length=64)
      >>> state = engine.init_state()
      >>> state.draft_token_ids.shape, state.store
      ((4, 2), None)
    """

    batch: Batch
    target_cache: Any
    draft_cache: Any
    draft_token_ids: jax.Array
    store: DraftStore | None
    counters: AcceptanceCounters


def forget_drafts(state: EngineState, slots: jax.Array) -> EngineState:
    """The state without the drafts of some slots ``[S]`` bool, and without their rows."""
    ids = jnp.where(slots[:, None], PLACEHOLDER_TOKEN_ID, state.draft_token_ids)
    store = None if state.store is None else state.store.evict(slots)
    return dataclasses.replace(state, draft_token_ids=ids, store=store)
