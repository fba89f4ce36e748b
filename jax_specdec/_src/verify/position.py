"""`Position`: what verification knows of a position of a request, from its rows to its token.

The reader writes it, the rule adds its weight and counts by it, and the last token is drawn from
it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.types import Status
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.draft_rows import DraftScale
from jax_specdec._src.verify.requests import Request


class Position(NamedTuple):
    """Positions of requests. The arrays have equal leading axes, ``[B, P]`` or ``[n]``.

    At position i, draft i is judged, and the last token may be drawn from the weights

    - ``(weight * p - q)+`` if `uses_q`: a rejected draft with a draft distribution;
    - ``p``, and 0 for `token_id`, if the draft is one-hot (`is_one_hot`);
    - ``p`` if no draft was proposed: a bonus token.

    Attributes:
      offset: int32, of the position in its request, from 0 to K.
      row: int32, target row; negative if nothing may be read or drawn.
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
    scale: tiles.Scale
    threshold: jax.Array | None
    p_masses: jax.Array | None
    draft_scale: DraftScale
    p: jax.Array
    q: jax.Array
    weight: jax.Array
    status: jax.Array

    @classmethod
    def unread(cls, requests: Request, size: int, num_tiles: int | None) -> Position:
        """All positions ``[B, K+1]`` of requests, before a row is read.

        Args:
          requests: the requests.
          size: ids from it on are padding.
          num_tiles: tiles of this device, if sums by tile are kept.
        """
        token_id = requests.token_ids
        shape, greedy = token_id.shape, requests.greedy[:, None]
        proposed = (token_id >= 0) & (token_id < size)
        offset = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        zero, none = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
        scale = tiles.Scale(zero, zero)
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
            p_masses=None if num_tiles is None else jnp.zeros((*shape, num_tiles), jnp.float32),
            draft_scale=DraftScale(scale, jnp.zeros(shape, bool)),
            p=zero,
            q=zero + 1,
            weight=zero + 1,
            status=none,
        )

    @property
    def is_one_hot(self) -> jax.Array:
        """Whether a draft was proposed without a draft distribution."""
        return self.proposed & ~self.uses_q

    @property
    def is_good(self) -> jax.Array:
        """Whether a draft was proposed and the rows read are good: later positions may matter."""
        return self.proposed & (self.status == Status.OK)

    def drawn_by(self, requests: Request) -> Position:
        """The same, with `row` -1 where no token of ``requests [B]`` can be drawn.

        What a draw does not need is left out.
        """
        can_be = (requests.is_ok & ~requests.greedy)[:, None] & (self.weight > 0)
        can_be &= self.offset < requests.num_rows[:, None]
        return self._replace(row=jnp.where(can_be, self.row, -1), **_NOT_DRAWN)


_NOT_DRAWN: dict[str, Any] = dict.fromkeys(("offset", "uniform", "p", "q", "status"))
