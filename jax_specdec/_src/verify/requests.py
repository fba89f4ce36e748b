"""From the arguments of a call to what verification knows of each request."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_specdec._src import ragged
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.types import (
    DraftDistribution,
    Drafts,
    Noise,
    RaceNoise,
    SamplingParams,
    Status,
)
from jax_specdec._src.verify.decide import Request


def unpack(
    drafts: Drafts,
    noise: Noise | RaceNoise,
    sampling: SamplingParams,
    bonus_token_ids: jax.Array | None,
    active: jax.Array | None,
    k: int,
    positions: jax.Array | None = None,
) -> Request:
    """Everything but the rows, batched; each with the status that it begins with.

    `positions` are those that `noise` was drawn for; None where the caller gave the noise.
    """
    layout = ragged.unpack(drafts, k, has_bonus_rows=bonus_token_ids is None)
    temperature = sampling.temperature
    valid_input = layout.in_bounds & sampling_lib.is_valid(sampling)
    if positions is not None:
        valid_input &= positions >= 0
    status = jnp.where(valid_input, int(Status.OK), int(Status.BAD_INPUT)).astype(jnp.int32)
    if active is not None:
        status = jnp.where(active, status, int(Status.INACTIVE))

    distribution = drafts.distribution
    stored = jnp.full(temperature.shape, distribution is not None)
    if distribution is not None and distribution.valid is not None:
        stored = distribution.valid
    return Request(
        first_row=layout.first_row,
        num_drafts=layout.num_drafts,
        token_ids=layout.token_ids,
        draft_rows=layout.draft_rows,
        stored=stored,
        inv_temperature=sampling_lib.inverse_temperature(temperature),
        filter=sampling_lib.Filter.of(sampling),
        greedy=temperature == 0,
        accept=noise.accept,
        recover=noise.recover if isinstance(noise, Noise) else None,
        exponential=noise.exponential if isinstance(noise, RaceNoise) else None,
        bonus_token_id=bonus_token_ids,
        status=status,
    )


def readable(distribution: DraftDistribution | None) -> DraftDistribution | None:
    """The distribution, unless its storage is empty: then there are no drafts either."""
    if distribution is None or jax.tree.leaves(distribution)[0].shape[0] == 0:
        return None
    return distribution
