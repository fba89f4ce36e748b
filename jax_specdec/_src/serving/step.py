"""The two halves of a decoding step, shared by the loop and the engine: verify, and draft."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.drafter import Drafter, Proposal
from jax_specdec._src.drafting.store import count_fallbacks
from jax_specdec._src.models.protocol import CausalModel, sharding_of
from jax_specdec._src.serving import batch as batch_lib
from jax_specdec._src.serving.batch import Batch, StepRecord
from jax_specdec._src.types import Drafts, SamplingParams
from jax_specdec._src.verify.api import rejection_sample


def verify(
    model: CausalModel,
    params: Any,
    batch: Batch,
    cache: Any,
    proposal: Proposal,
    config: SpecDecodeConfig,
) -> tuple[Batch, Any, StepRecord, jax.Array]:
    """One pass of the target over the proposed tokens; adds what it emits to the sequences.

    Args:
      model: the target.
      params: its weights.
      batch: the sequences; those that are done emit nothing.
      cache: the target's.
      proposal: drafts for positions ``lengths[b]`` on; rows of the store that were drawn at
        another position or temperature are not used.
      config: static settings.

    Returns:
      The batch, the cache, the record of the step, and ``[]`` int32: requests that were verified
      one-hot because their rows of the store could not be used.
    """
    sampling = SamplingParams(temperature=batch.temperature)
    drafts = Drafts.from_dense(proposal.token_ids)
    if proposal.store is not None:
        drafts = proposal.store.attach(drafts, positions=batch.lengths, sampling=sampling)
    last = jnp.take_along_axis(batch.token_ids, batch.lengths[:, None] - 1, axis=1)
    tokens = jnp.concatenate([last, jnp.maximum(proposal.token_ids, 0)], axis=1)
    logits, cache = model.apply(params, tokens, batch.lengths - 1, cache)
    output = rejection_sample(
        logits.reshape(-1, logits.shape[-1]),
        drafts,
        sampling=sampling,
        keys=batch.keys,
        positions=batch.lengths,
        active=~batch.done,
        config=config,
        sharding=sharding_of(model),
    )
    in_range = (proposal.token_ids >= 0) & (proposal.token_ids < logits.shape[-1])
    num_proposed = jnp.cumprod(in_range.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    fallbacks = count_fallbacks(drafts, sampling=sampling, active=output.num_emitted > 0)
    batch, record = batch_lib.append(batch, output, num_proposed)
    return batch, cache, record, fallbacks


def draft(
    drafter: Drafter,
    params: Any,
    batch: Batch,
    cache: Any,
    store: Any,
    config: SpecDecodeConfig,
) -> tuple[Proposal, Any]:
    """Drafts for positions ``lengths[b]`` on, and the drafter's cache; see `Drafter.propose`."""
    return drafter.propose(
        params,
        batch.token_ids,
        batch.lengths,
        cache,
        store,
        sampling=SamplingParams(temperature=batch.temperature),
        keys=batch.keys,
        config=config,
    )
