"""Drafting with a smaller model of the same vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.drafter import Proposal
from jax_specdec._src.drafting.sample import sample_draft_tokens
from jax_specdec._src.models.protocol import CausalModel
from jax_specdec._src.types import DraftLogits, SamplingParams


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts token by token with a model; its vocabulary may be narrower than the target's.

    With ``draft_sample_method="probabilistic"`` tokens are sampled at each request's temperature
    and their logits are kept for the check; with "greedy" they are argmaxes, verified one-hot.

    Attributes:
      model: any `CausalModel`.

    Example:
      >>> import jax_specdec as sd
      >>> _, (draft, draft_params) = sd.load_embedded_pair()
      >>> drafter = sd.ModelDrafter(draft)
    """

    model: CausalModel

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """The model's cache."""
        return self.model.init_cache(batch_size, max_length)

    def prefill(self, params: Any, token_ids: jax.Array, cache: Any) -> Any:
        """Read the prompts."""
        start = jnp.zeros((token_ids.shape[0],), jnp.int32)
        return self.model.apply(params, token_ids, start, cache)[1]

    def propose(
        self,
        params: Any,
        token_ids: jax.Array,
        lengths: jax.Array,
        cache: Any,
        *,
        sampling: SamplingParams,
        keys: jax.Array,
        config: SpecDecodeConfig,
    ) -> tuple[Proposal, Any]:
        """Draft K tokens; see `Drafter.propose`."""
        probabilistic = config.draft_sample_method == "probabilistic"

        def draw(logits: jax.Array, offset: jax.Array) -> tuple[jax.Array, Any]:
            if not probabilistic:
                return jnp.argmax(logits, axis=-1).astype(jnp.int32), ()
            ids, log_normalizer = sample_draft_tokens(
                logits, sampling=sampling, keys=keys, positions=lengths, offset=offset
            )
            return ids, (logits, log_normalizer)

        def draft(carry: tuple[jax.Array, Any], offset: jax.Array) -> tuple[Any, Any]:
            last, cache = carry
            logits, cache = self.model.apply(params, last[:, None], lengths + offset - 1, cache)
            ids, kept = draw(logits[:, 0], offset)
            return (ids, cache), (ids, kept)

        # After a fully accepted step the model has not seen the last draft: read two tokens.
        start = jnp.maximum(lengths - 2, 0)
        place = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
        recent = jnp.take_along_axis(token_ids, place, axis=1)
        logits, cache = self.model.apply(params, recent, start, cache)
        newest = (lengths - 1 - start)[:, None, None]
        ids, kept = draw(jnp.take_along_axis(logits, newest, axis=1)[:, 0], jnp.int32(0))

        offsets = jnp.arange(1, config.num_speculative_tokens, dtype=jnp.int32)
        (_, cache), rest = lax.scan(draft, (ids, cache), offsets)
        ids, kept = jax.tree.map(
            lambda first, more: jnp.moveaxis(jnp.concatenate([first[None], more]), 0, 1),
            (ids, kept),
            rest,
        )
        if not probabilistic:
            return Proposal(ids, None), cache
        logits, log_normalizer = kept
        storage = logits.reshape(-1, logits.shape[-1])
        distribution = DraftLogits(storage, log_normalizer=log_normalizer.reshape(-1))
        return Proposal(ids, distribution), cache
