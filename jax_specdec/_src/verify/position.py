"""`Position`: what is known of a position of a request; and `Source`: what a token is drawn from.

The reader writes a position once its rows are read, and the rule adds its weight and counts by it.

The weights of the ids at a source are

- ``(weight * p - q)+`` if `uses_q`: a rejected draft with a draft distribution;
- ``p``, and 0 for the draft, if the draft is one-hot;
- ``p`` if no draft was proposed: a bonus token;
- ``p`` too, for a rejected draft, if no id has any weight left: p and q differ by rounding alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax

from jax_specdec._src.base.types import Status
from jax_specdec._src.rows.tiles import Scale


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

    @property
    def is_good(self) -> jax.Array:
        """Whether a draft was proposed and the rows read are good: later positions may matter."""
        return self.proposed & (self.status == Status.OK)


class Source(NamedTuple):
    """What tokens are drawn from. The arrays have equal leading axes, ``[B, P]`` or ``[n]``.

    Attributes:
      row: int32, target row; -1 where nothing is drawn: no row need be read.
      draft_row: as of a `Position`, and so are the next ones.
      token_id: the draft, which is removed if it is one-hot.
      proposed: whether there is a draft.
      uses_q: whether the weights are the residual of a draft distribution.
      inv_temperature: float32.
      argmax: int32, the token of a greedy request.
      scale: normalizer of the target row.
      threshold: float32, target logits below it have no weight; None without a filter.
      p_masses: ``[..., T]`` float32, the mass of ``p`` in each tile of this device, if it is known.
      draft_scale: normalizer of the draft row.
      weight: float32, joint weight of the drafts before.
      residual_masses: ``[..., T]`` float32, the mass of the weights in each tile of this device, of
        sources that use q, if it is known.
    """

    row: jax.Array
    draft_row: jax.Array
    token_id: jax.Array
    proposed: jax.Array
    uses_q: jax.Array
    inv_temperature: jax.Array
    argmax: jax.Array
    scale: Scale
    threshold: jax.Array | None
    p_masses: jax.Array | None
    draft_scale: DraftScale
    weight: jax.Array
    residual_masses: jax.Array | None = None

    @classmethod
    def at(cls, positions: Position) -> Source:
        """Returns what positions are drawn from."""
        return cls(**{name: getattr(positions, name) for name in _OF_POSITION})

    @property
    def is_one_hot(self) -> jax.Array:
        """Whether a draft was proposed without a draft distribution."""
        return self.proposed & ~self.uses_q

    def spread(self, axes: int) -> Source:
        """Returns it with so many axes more, to be used with entries ``[n, ...]`` of rows."""
        # Only what is used beside entries: masses and the argmax stay as they are.
        values = [getattr(self, name) for name in _OF_IDS]
        values = jax.tree.map(lambda x: lax.expand_dims(x, range(1, axes + 1)), values)
        return self._replace(**dict(zip(_OF_IDS, values, strict=True)))


_OF_POSITION = tuple(x for x in Source._fields if x != "residual_masses")
_OF_IDS = tuple(x for x in Source._fields if x not in ("argmax", "p_masses", "residual_masses"))
