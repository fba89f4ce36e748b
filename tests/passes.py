"""A pass over tokens ``[B, S]`` of all requests, as most tests of models run it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from upper_floor import plain, protocol

from jax_specdec import lm


class Passed(NamedTuple):
    """What a pass over one group leaves."""

    logits: Any
    cache: Any
    features: Any


def run(
    model: Any,
    params: Any,
    token_ids: Any,
    start: Any,
    cache: Any,
    aux_hidden_state_layers: tuple[int, ...] = (),
    tree: Any = None,
) -> Passed:
    rows = lm.models.Rows(jnp.asarray(token_ids), jnp.asarray(start), tree=tree)
    wants = lm.models.Wants(aux_hidden_state_layers)
    (output,), cache = protocol.apply_groups(model, params, [rows], cache, wants)
    return Passed(output.logits, cache, output.features)


class RunsTokens(plain.OneGroup):
    """A `CausalModel` for tests: `run` is a plain pass, and there is no cache."""

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return ()

    def run(self, params: Any, token_ids: Any, start: Any, cache: Any) -> tuple[Any, Any]:
        raise NotImplementedError
