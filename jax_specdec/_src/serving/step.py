"""The two halves of a decoding step, shared by the loop and the engine: verify, and draft."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.drafter import Drafter, Proposal
from jax_specdec._src.drafting.store import DraftStore, count_fallbacks
from jax_specdec._src.logprobs import TokenLogprobs, token_logprobs
from jax_specdec._src.models.protocol import CausalModel, sharding_of
from jax_specdec._src.penalties import apply_penalties
from jax_specdec._src.serving import batch as batch_lib
from jax_specdec._src.serving.batch import Batch, StepRecord
from jax_specdec._src.serving.options import LogprobsConfig
from jax_specdec._src.types import Drafts, RejectionSampleOutput
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding


def verify(
    model: CausalModel,
    params: Any,
    batch: Batch,
    cache: Any,
    proposal: Proposal,
    config: SpecDecodeConfig,
    logprobs: LogprobsConfig | None = None,
    *,
    may_abstain: bool = False,
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
      logprobs: which log-probabilities the record has; None for none.
      may_abstain: the drafter may propose nothing; see `Drafter`. Where it did for a batch of one
        request, the pass is over one token.

    Returns:
      The batch, the cache, the record of the step, and ``[]`` int32: requests that were verified
      one-hot because their rows of the store could not be used.
    """
    drafts = Drafts.from_dense(proposal.token_ids)
    if proposal.store is not None:
        drafts = proposal.store.attach(drafts, positions=batch.lengths, sampling=batch.sampling)
    last = jnp.take_along_axis(batch.token_ids, batch.lengths[:, None] - 1, axis=1)
    tokens = jnp.concatenate([last, jnp.maximum(proposal.token_ids, 0)], axis=1)
    start = batch.lengths - 1
    # Of one request alone: were neighbours to choose the width, float32 sums would depend on them.
    if may_abstain and tokens.shape[0] == 1:
        logits, cache = lax.cond(
            proposal.token_ids[0, 0] >= 0,
            functools.partial(model.apply, params, tokens, start),
            functools.partial(_one_token, model, params, tokens, start),
            cache,
        )
    else:
        logits, cache = model.apply(params, tokens, start, cache)
    rows = logits.reshape(-1, logits.shape[-1])
    output, found = sample(rows, drafts, batch, config, logprobs, sharding_of(model))
    in_range = (proposal.token_ids >= 0) & (proposal.token_ids < logits.shape[-1])
    num_proposed = jnp.cumprod(in_range.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    fallbacks = count_fallbacks(drafts, sampling=batch.sampling, active=output.num_emitted > 0)
    batch, record = batch_lib.append(batch, output, num_proposed, found)
    return batch, cache, record, fallbacks


def _one_token(
    model: CausalModel, params: Any, token_ids: jax.Array, start: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """A pass over the first token of each request; zeros stand in the rows of the others."""
    logits, cache = model.apply(params, token_ids[:, :1], start, cache)
    return jnp.pad(logits, ((0, 0), (0, token_ids.shape[1] - 1), (0, 0))), cache


def sample(
    logits: jax.Array,
    drafts: Drafts,
    batch: Batch,
    config: SpecDecodeConfig,
    logprobs: LogprobsConfig | None,
    sharding: VerifySharding | None,
) -> tuple[RejectionSampleOutput, TokenLogprobs | None]:
    """Verify under the options of each request, and look up the log-probabilities asked for.

    Args:
      logits: ``[N+B, V]``, of the model.
      drafts: of the requests that `batch` holds.
      batch: the sequences; those that are done emit nothing.
      config: static settings.
      logprobs: None for none.
      sharding: how `logits` are split.

    Returns:
      What was emitted, and its log-probabilities.
    """
    penalties = batch.penalties(logits.shape[-1])
    rows = logits
    if penalties is not None:
        rows = apply_penalties(logits, drafts, penalties, config=config)
    mask = batch.token_bitmask
    if mask is not None:  # of a request, for each of its rows
        mask = jnp.repeat(mask, logits.shape[0] // mask.shape[0], axis=0)
    output = rejection_sample(
        rows,
        drafts,
        sampling=batch.sampling,
        keys=batch.keys,
        positions=batch.lengths,
        active=~batch.done,
        config=config,
        token_bitmask=mask,
        sharding=sharding,
    )
    if logprobs is None:
        return output, None
    found = token_logprobs(
        rows if logprobs.distribution == "processed" else logits,
        drafts,
        output,
        sampling=batch.sampling,
        config=config,
        num_top=logprobs.num_top,
        token_bitmask=mask,
        distribution=logprobs.distribution,
        sharding=sharding,
    )
    return output, found


def draft(
    drafter: Drafter,
    params: Any,
    batch: Batch,
    cache: Any,
    store: DraftStore | None,
    config: SpecDecodeConfig,
    vocab_size: int,
) -> tuple[Proposal, Any]:
    """Drafts for positions ``lengths[b]`` on, and the drafter's cache; see `Drafter.propose`.

    Raises:
      TypeError, ValueError: the drafter returned something else than its contract says.
    """
    returned = drafter.propose(
        params,
        batch.token_ids,
        batch.lengths,
        cache,
        store,
        sampling=batch.sampling,
        keys=batch.keys,
        config=config,
        penalties=batch.penalties(vocab_size),
        token_bitmask=batch.token_bitmask,
    )
    size = batch.lengths.shape[0]
    _check_proposal(drafter, returned, (size, config.num_speculative_tokens), store, cache)
    return returned


def _check_proposal(
    drafter: Drafter, returned: Any, shape: tuple[int, int], store: DraftStore | None, cache: Any
) -> None:
    """Check what `drafter` returned, given `store` and `cache`."""
    name = f"{type(drafter).__name__}.propose"
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{name} must return a Proposal and a cache, but it returned {returned!r:.80}"
        )
    proposal, new_cache = returned
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{name} must return a Proposal first, but it returned {proposal!r:.80}")
    ids = proposal.token_ids
    if not isinstance(ids, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must return token_ids as an array, but they are {ids!r:.80}")
    if ids.dtype != jnp.int32:
        raise TypeError(f"{name} must return token_ids as int32, but they are {ids.dtype}")
    if ids.shape != shape:
        raise ValueError(
            f"{name} must return token_ids of shape [B, K] = {list(shape)}, but their shape is "
            f"{list(ids.shape)}"
        )
    for what, given, new in (("store", store, proposal.store), ("cache", cache, new_cache)):
        given, new = (
            jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
            for tree in (given, new)
        )
        if jax.tree.flatten(given) != jax.tree.flatten(new):
            raise ValueError(
                f"{name} must return the {what} laid out as it was given, {given!r:.300}, but it "
                f"returned {new!r:.300}"
            )
