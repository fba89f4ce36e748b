"""The arrays of a call, and the `Request` that verification makes of them for each request."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src import ragged
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.noise import draw_noise
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import (
    DraftDistribution,
    Drafts,
    Noise,
    RaceNoise,
    SamplingParams,
    Status,
)


class CallArrays(NamedTuple):
    """The arrays of a call of `rejection_sample`, after the checks.

    Attributes:
      target_logits: ``[M, V]``, or this device's part of them.
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


class Request(NamedTuple):
    """All that verification knows of a request before it reads any row.

    The shapes are those of one request. A batch has a leading ``[B]``.

    Attributes:
      first_row: ``[]`` int32, target row of the first position.
      num_drafts: ``[]`` int32.
      token_ids: ``[K]`` int32, -1 past ``num_drafts``.
      draft_rows: ``[K]`` int32, row of the draft distribution of each draft.
      stored: ``[]`` bool, whether its draft distribution is stored; if not, its drafts are one-hot.
      inv_temperature: ``[]`` float32.
      filter: its min-p, top-k and top-p; None if the call has none of them.
      greedy: ``[]`` bool.
      accept: ``[K]`` float32 uniforms.
      recover: ``[2]`` float32 uniforms, or None if `exponential` is given.
      exponential: ``[V]`` float32 noise of an exponential race, or None.
      bonus_token_id: ``[]`` int32, or None if the request owns a bonus row.
      status: ``[]`` int32. If it is not OK, none of the request's rows may be read.
    """

    first_row: jax.Array
    num_drafts: jax.Array
    token_ids: jax.Array
    draft_rows: jax.Array
    stored: jax.Array
    inv_temperature: jax.Array
    filter: Filter | None
    greedy: jax.Array
    accept: jax.Array
    recover: jax.Array | None
    exponential: jax.Array | None
    bonus_token_id: jax.Array | None
    status: jax.Array

    @property
    def num_rows(self) -> jax.Array:
        """Target rows that the request owns."""
        return self.num_drafts + (1 if self.bonus_token_id is None else 0)

    def place(self, position: jax.Array) -> jax.Array:
        """Index into the ``[K]`` arrays for a position in ``[0, K]``."""
        return jnp.minimum(position, self.token_ids.shape[0] - 1)

    def is_proposed(self, position: jax.Array, size: int) -> jax.Array:
        """Whether a token was proposed at a position: its id is in ``[0, size)``."""
        token_id = self.token_ids[self.place(position)]
        return (position < self.num_drafts) & (token_id >= 0) & (token_id < size)

    def uses_q(self, position: jax.Array, size: int) -> jax.Array:
        """Whether the stored draft distribution of a position is used."""
        return self.is_proposed(position, size) & self.stored & ~self.greedy

    def uniforms(self, count: int) -> jax.Array:
        """The accept uniforms of the first `count` positions; 0 for a greedy request."""
        accept = jnp.pad(self.accept, (0, max(0, count - self.accept.shape[0])))
        return jnp.where(self.greedy, 0.0, accept[:count])


def requests_of(arrays: CallArrays, k: int) -> Request:
    """The requests of a call, batched, each with the status that is known before rows are read."""
    drafts, sampling, noise = arrays.drafts, arrays.sampling, arrays.randomness
    temperature, has_bonus_rows = sampling.temperature, arrays.bonus_token_ids is None
    layout = ragged.unpack(drafts, k, has_bonus_rows=has_bonus_rows)
    valid_input = layout.in_bounds & sampling_lib.is_valid(sampling)
    end = layout.first_row + layout.num_drafts + int(has_bonus_rows)
    valid_input &= end <= arrays.target_logits.shape[0]  # else its rows were left out
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
        filter=Filter.of(sampling),
        greedy=temperature == 0,
        accept=noise.accept,
        recover=noise.recover if isinstance(noise, Noise) else None,
        exponential=noise.exponential if isinstance(noise, RaceNoise) else None,
        bonus_token_id=arrays.bonus_token_ids,
        status=status,
    )


def unless_empty(distribution: DraftDistribution | None) -> DraftDistribution | None:
    """The distribution; None if its storage has no rows, for then there are no drafts either."""
    if distribution is None or jax.tree.leaves(distribution)[0].shape[0] == 0:
        return None
    return distribution
