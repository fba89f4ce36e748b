"""`Position`: what verification knows of a position of a request, once its rows are read.

The reader writes it, and the rule adds its weight and counts by it. What the last token is drawn
from is a `Source`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.types import Status
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.tiles import Scale


class DraftScale(NamedTuple):
    """What normalizes a draft row, and whether the row is bad. Probabilities need no scale."""

    scale: Scale
    bad: jax.Array


class Position(NamedTuple):
    """Positions of requests. The arrays have equal leading axes, ``[B, P]`` or ``[n]``.

    Attributes:
      offset: int32, of the position in its request, from 0 to K.
      row: int32, target row.
      draft_row: int32, row of the draft distribution.
      token_id: int32, the draft.
      proposed: bool, whether a draft was proposed: its id is in the vocabulary.
      uses_q: bool, whether a draft was proposed and its draft distribution is used.
      uniform: float32, by which the draft is accepted; 0 for a greedy request.
      inv_temperature: float32.
      argmax: int32, of the target row; if the rule draws from every row, the token drawn from it.
      scale: normalizer of the target row.
      threshold: float32, target logits below it were filtered out; None if none can be.
      p_masses: ``[..., T]`` float32, the sums of ``p`` over this device's tiles; None if only their
        total was computed.
      draft_scale: normalizer of the draft row.
      p: float32, target probability of the draft; 1 or 0 for a greedy request.
      q: float32, its draft probability; 1 if it is one-hot or the request greedy.
      weight: float32, joint weight of the drafts before; 1 except under the block rule.
      status: int32, of the rows that were read.
    """

    offset: jax.Array
    row: jax.Array
    draft_row: jax.Array
    token_id: jax.Array
    proposed: jax.Array
    uses_q: jax.Array
    uniform: jax.Array
    inv_temperature: jax.Array
    argmax: jax.Array
    scale: Scale
    threshold: jax.Array | None
    p_masses: jax.Array | None
    draft_scale: DraftScale
    p: jax.Array
    q: jax.Array
    weight: jax.Array
    status: jax.Array

    @classmethod
    def unread(cls, requests: Request, size: int, num_sums: int | None) -> Position:
        """Returns all positions ``[B, K+1]`` of requests, before a row is read.

        Args:
          requests: the requests.
          size: ids from it on are padding.
          num_sums: tiles of this device, if the sums of target rows are kept by tile, else None.
        """
        # Ids out of range, among them -1 past the last draft, are no proposal.
        token_id = requests.token_ids
        shape = token_id.shape
        greedy = requests.greedy[:, None]
        proposed = (token_id >= 0) & (token_id < size)
        # [B, K+1]: 0, 1, ..., K of every request
        offset = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        zero = jnp.zeros(shape, jnp.float32)
        none = jnp.zeros(shape, jnp.int32)
        # What is not read stays as it is here: p = 0, q = 1, weight 1, status OK.
        scale = Scale(zero, zero)
        return cls(
            offset=offset,
            row=requests.first_row[:, None] + offset,
            draft_row=requests.draft_rows,
            token_id=token_id,
            proposed=proposed,
            uses_q=proposed & requests.has_q & ~greedy,
            uniform=jnp.where(greedy, 0.0, requests.accept),
            inv_temperature=jnp.broadcast_to(requests.inv_temperature[:, None], shape),
            argmax=none,
            scale=scale,
            threshold=None if requests.filter is None else zero,
            p_masses=None if num_sums is None else jnp.zeros((*shape, num_sums), jnp.float32),
            draft_scale=DraftScale(scale, jnp.zeros(shape, bool)),
            p=zero,
            q=zero + 1,
            weight=zero + 1,
            status=none,
        )

    @property
    def is_good(self) -> jax.Array:
        """Whether a draft was proposed and the rows read are good: later positions may matter."""
        return self.proposed & (self.status == Status.OK)
