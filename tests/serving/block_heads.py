"""A block head in an engine, for other tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from models.weights import random_weights, with_fields

from jax_specdec import lm

from . import engines

IDS = [3, 0, 5, 1]
DSPARK: dict[str, Any] = {
    "sample_from_anchor": True,
    "markov_rank": 3,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def head_of(hidden_size: int, window: int | None = None, **fields: Any) -> lm.BlockHead:
    target = dataclasses.replace(engines.llama(16).config, hidden_size=hidden_size)
    target = with_fields(target, qk_norm=True, window=window)
    plain: dict[str, Any] = {
        "aux_hidden_state_layers": (0, 1),
        "own_embedding": True,
        "own_lm_head": True,
        "block_size": 4,
        "mask_token_id": 2,
    }
    return lm.BlockHead(lm.BlockHeadConfig.of_target(target, target.layers, **plain | fields))


def head_params(head: lm.BlockHead, ids: list[int]) -> dict[str, Any]:
    params = random_weights(head, 5)
    if "target_ids" in params:
        params["target_ids"] = jnp.asarray(np.array(ids, np.int32))
    return params


# Engines

HEAD = head_of(16, **DSPARK, draft_vocab_size=len(IDS), window=6)
ENGINE = dataclasses.replace(engines.LLAMA, drafter=lm.BlockDrafter(HEAD), max_prefill_requests=2)


@functools.cache
def weights_of(engine: lm.Engine) -> tuple[Any, Any]:
    return engines.weights_of(engines.LLAMA)[0], head_params(HEAD, IDS)
