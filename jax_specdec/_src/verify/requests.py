"""From the arguments of a call to what verification knows of each request."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src import ragged
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.noise import draw_noise
from jax_specdec._src.types import (
    DraftDistribution,
    Drafts,
    Noise,
    RaceNoise,
    SamplingParams,
    Status,
)
from jax_specdec._src.verify.decide import Request


class CallArrays(NamedTuple):
    """The arrays of a call of `rejection_sample`, checked.

    Attributes:
      target_logits: ``[M, V]``, or a device's part of them.
      drafts: the drafts.
      randomness: explicit noise, or keys ``[B]`` and positions ``[B]`` to draw it from.
      sampling: parameters of each request.
      bonus_token_ids: ``[B]`` int32 or None.
      active: ``[B]`` bool or None.
      token_bitmask: ``[M, ceil(V/32)]`` or None.
    """

    target_logits: jax.Array
    drafts: Drafts
    randomness: Noise | RaceNoise | tuple[jax.Array, jax.Array]
    sampling: SamplingParams
    bonus_token_ids: jax.Array | None
    active: jax.Array | None
    token_bitmask: jax.Array | None


def unpack(arrays: CallArrays, k: int) -> Request:
    """Everything but the rows, batched; each with the status that it begins with."""
    drafts, sampling, noise = arrays.drafts, arrays.sampling, arrays.randomness
    layout = ragged.unpack(drafts, k, has_bonus_rows=arrays.bonus_token_ids is None)
    temperature, has_bonus_rows = sampling.temperature, arrays.bonus_token_ids is None
    valid_input = layout.in_bounds & sampling_lib.is_valid(sampling)
    end = layout.first_row + layout.num_drafts + int(has_bonus_rows)
    valid_input &= end <= arrays.target_logits.shape[0]  # or its rows were left out
    if isinstance(noise, tuple):
        keys, positions = noise
        noise = draw_noise(keys, positions, k)
        valid_input &= positions >= 0
    status = jnp.where(valid_input, int(Status.OK), int(Status.BAD_INPUT)).astype(jnp.int32)
    if arrays.active is not None:
        status = jnp.where(arrays.active, status, int(Status.INACTIVE))

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
        bonus_token_id=arrays.bonus_token_ids,
        status=status,
    )


def readable(distribution: DraftDistribution | None) -> DraftDistribution | None:
    """The distribution, unless its storage is empty: then there are no drafts either."""
    if distribution is None or jax.tree.leaves(distribution)[0].shape[0] == 0:
        return None
    return distribution
