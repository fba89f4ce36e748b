"""Drafting with a smaller model of the same vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.context import DraftContext
from jax_specdec._src.drafting.drafter import Proposal
from jax_specdec._src.drafting.sample import sample_draft_tokens
from jax_specdec._src.drafting.store import DraftStore
from jax_specdec._src.models.protocol import CausalModel, check_model, sharding_of


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """Drafts token by token with a model; its vocabulary may be narrower than the target's.

    With ``draft_sample_method="probabilistic"`` tokens are sampled under each request's parameters,
    as the target's are, and their logits are kept for the check; with "greedy" they are argmaxes,
    verified one-hot.

    Attributes:
      model: any `CausalModel`.
      store_dtype: in which logits are sampled from and kept; None for the dtype of the model's. A
        narrower one saves memory and changes what is drafted, never what is emitted.

    Raises:
      TypeError: `model` is no `CausalModel`.

    Example:
      >>> import jax_specdec as sd
      >>> _, (draft, draft_params) = sd.load_embedded_pair()
      >>> drafter = sd.ModelDrafter(draft)
    """

    model: CausalModel
    store_dtype: Any = None

    def __post_init__(self) -> None:
        check_model("model", self.model)

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """The model's cache."""
        return self.model.init_cache(batch_size, max_length)

    def init_store(
        self, params: Any, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Room for the logits of K drafts per request; None where drafts are argmaxes."""
        if config.draft_sample_method == "greedy":
            return None

        def one_token(params: Any) -> jax.Array:
            zero = jnp.zeros((1,), jnp.int32)
            return self.model.apply(params, zero[None, :], zero, self.model.init_cache(1, 1))[0]

        logits = jax.eval_shape(one_token, params)
        store = DraftStore.create(
            batch_size,
            config.num_speculative_tokens,
            logits.shape[-1],
            logits.dtype if self.store_dtype is None else self.store_dtype,
        )
        sharding = sharding_of(self.model)
        if sharding is None or sharding.mesh is None:
            return store
        rows = NamedSharding(sharding.mesh, P(None, sharding.vocab_axis))
        return dataclasses.replace(store, logits=lax.with_sharding_constraint(store.logits, rows))

    def prefill(
        self, params: Any, token_ids: jax.Array, cache: Any, start: jax.Array | None = None
    ) -> Any:
        """Read the prompts, or a piece of them; see `Drafter.prefill`."""
        if start is None:
            start = jnp.zeros((token_ids.shape[0],), jnp.int32)
        return self.model.apply(params, token_ids, start, cache)[1]

    def propose(
        self, params: Any, context: DraftContext, cache: Any, store: DraftStore | None
    ) -> tuple[Proposal, Any]:
        """Draft K tokens; see `Drafter.propose`."""
        lengths, sampling, config = context.lengths, context.sampling, context.config

        def draw(
            logits: jax.Array, store: DraftStore | None, now: DraftContext | None, offset: jax.Array
        ) -> tuple[jax.Array, DraftStore | None, DraftContext | None]:
            if now is not None:
                logits = now.process_logits(logits)
            if store is not None:  # round, then sample: what is kept is what was drawn from
                logits = logits.astype(store.logits.dtype)
            drawn = sample_draft_tokens(
                logits,
                sampling=sampling,
                keys=context.keys,
                positions=lengths,
                offset=offset,
                config=config,
                sharding=sharding_of(self.model),
            )
            if store is not None and drawn.log_normalizer is not None:
                store = store.write(
                    offset,
                    logits,
                    drawn.log_normalizer,
                    threshold=drawn.threshold,
                    positions=lengths,
                    sampling=sampling,
                )
            ids = drawn.token_ids
            return ids, store, None if now is None else now.append(ids)

        def draft(carry: Any, offset: jax.Array) -> tuple[Any, jax.Array]:
            last, cache, store, now = carry
            logits, cache = self.model.apply(params, last[:, None], lengths + offset - 1, cache)
            ids, store, now = draw(logits[:, 0], store, now, offset)
            return (ids, cache, store, now), ids

        # After a fully accepted step the model has not seen the last draft: read two tokens.
        start = jnp.maximum(lengths - 2, 0)
        place = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None, :]
        recent = jnp.take_along_axis(context.token_ids, place, axis=1)
        logits, cache = self.model.apply(params, recent, start, cache)
        newest = (lengths - 1 - start)[:, None, None]
        logits = jnp.take_along_axis(logits, newest, axis=1)[:, 0]
        now = None if context.changes_rows is None else context
        first, store, now = draw(logits, store, now, jnp.int32(0))

        offsets = jnp.arange(1, config.num_speculative_tokens, dtype=jnp.int32)
        (_, cache, store, _), rest = lax.scan(draft, (first, cache, store, now), offsets)
        ids = jnp.moveaxis(jnp.concatenate([first[None], rest]), 0, 1)
        return Proposal(ids, store), cache
