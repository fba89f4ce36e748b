"""Bringing one request to where it stands: both models read its prompt, and one drafts again."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.drafter import Drafter, Proposal
from jax_specdec._src.models.protocol import CausalModel
from jax_specdec._src.serving import step as step_lib
from jax_specdec._src.serving.batch import Batch
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID


def check_reads_pieces(drafter: Drafter, piece: int) -> None:
    """Refuse a drafter that cannot begin to read anywhere but at position 0.

    Raises:
      TypeError: its `prefill` takes no `start`.
    """
    signature = inspect.signature(drafter.prefill)
    try:
        signature.bind(None, None, None, start=None)
    except TypeError:
        raise TypeError(
            f"drafter must have a prefill that takes start, because prompts longer than "
            f"prefill_sizes[-1]={piece} are read in pieces, but {type(drafter).__name__}.prefill "
            f"takes {signature}"
        ) from None


def read_prompt(
    model: CausalModel,
    drafter: Drafter,
    params: Any,
    draft_params: Any,
    prompt: jax.Array,
    length: jax.Array,
    *,
    piece: int,
    max_length: int,
) -> tuple[Any, Any]:
    """Caches of one request, filled by both models with its prompt.

    Args:
      model: the target.
      drafter: what drafts.
      params: the target's weights.
      draft_params: the drafter's weights.
      prompt: ``[P]`` int32, padded.
      length: ``[]`` int32, how many of them there are.
      piece: the most tokens of one call; a longer prompt is read in pieces of this many, as many
        as hold its `length`. The last one begins early enough not to reach past P.
      max_length: of the caches.

    Returns:
      The target's cache and the drafter's.
    """
    caches = model.init_cache(1, max_length), drafter.init_cache(1, max_length)
    last = prompt.shape[0] - piece
    if last <= 0:
        start = jnp.zeros((1,), jnp.int32)
        _, target_cache = model.apply(params, prompt[None, :], start, caches[0])
        return target_cache, drafter.prefill(draft_params, prompt[None, :], caches[1])

    def read(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        count, target_cache, draft_cache = carry
        start = jnp.minimum(count * piece, last)
        tokens = lax.dynamic_slice(prompt, (start,), (piece,))[None, :]
        _, target_cache = model.apply(params, tokens, start[None], target_cache)
        draft_cache = drafter.prefill(draft_params, tokens, draft_cache, start=start[None])
        return count + 1, target_cache, draft_cache

    _, target_cache, draft_cache = lax.while_loop(
        lambda carry: carry[0] * piece < length, read, (jnp.int32(0), *caches)
    )
    return target_cache, draft_cache


def draft_if(
    resume: jax.Array,
    drafter: Drafter,
    params: Any,
    request: Batch,
    cache: Any,
    config: SpecDecodeConfig,
    vocab_size: int,
) -> tuple[Proposal, Any]:
    """Drafts for where one request stands, with a store of one slot, and the drafter's cache.

    Args:
      resume: ``[]`` bool; where false, the drafts are -1 and nothing else changes.
      drafter: what drafts.
      params: its weights.
      request: one, its arrays without the leading axis.
      cache: the drafter's, filled with the request's tokens.
      config: static settings.
      vocab_size: the target's.
    """
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], request)
    store = drafter.init_store(params, 1, config)
    none = jnp.full((1, config.num_speculative_tokens), PLACEHOLDER_TOKEN_ID, jnp.int32)
    return lax.cond(
        resume,
        lambda cache: step_lib.draft(drafter, params, batch, cache, store, config, vocab_size),
        lambda cache: (Proposal(none, store), cache),
        cache,
    )
