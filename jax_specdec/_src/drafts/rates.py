"""How often drafts are accepted: by their place in a chain, or by their rank in a tree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import pytree

_DECAY = 0.99
"""What remains of the past after a step: a memory of about 100 steps."""

_PRIOR_RATE = 0.7
_PRIOR_TRIED = 2.0


@pytree(tried="[K] float32", accepted="[K] float32")
@dataclasses.dataclass(frozen=True)
class DraftRates:
    """Counts of drafts that were tried and accepted, by their place in a chain or rank in a tree.

    The past fades by 1% with each step that tries a draft of that place. Of a chain, only drafts up
    to the first rejection were tried: whether later ones would have been accepted is not known. Of
    a tree, whose best draft is first, all that were offered were.

    Attributes:
      tried: ``[K]`` float32, how many drafts were tried, faded.
      accepted: ``[K]`` float32, how many of them were accepted, faded.
      has_trees: whether drafts are trees; static.

    Example:
      >>> import jax.numpy as jnp
      >>> rates = DraftRates.create(2)
      >>> for _ in range(8):  # the first draft is always accepted, the second never
      ...     rates = rates.update(jnp.array([2, 2]), jnp.array([1, 1]))
      >>> [round(rate, 2) for rate in rates.values.tolist()]
      [0.97, 0.11]
    """

    tried: jax.Array
    accepted: jax.Array
    has_trees: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @classmethod
    def create(cls, num_speculative_tokens: int, *, has_trees: bool = False) -> DraftRates:
        """Returns rates that have seen nothing, for K drafts."""
        zeros = jnp.zeros((num_speculative_tokens,), jnp.float32)
        return cls(zeros, jnp.zeros_like(zeros), has_trees)

    @property
    def values(self) -> jax.Array:
        """``[K]`` float32: how often draft k was accepted; of a chain, if those before it were.

        Two made-up drafts are added at each place, which were accepted at the rate of the place
        before (70% at the first). A place of a chain that was never tried has that rate. In a tree
        it is times i / (i + 1) at rank i, so that the rates of ranks that were never tried fall as
        1 / (i + 1).
        """
        # [K]: the rate of a place that was never tried, over the rate of the place before: 1 in a
        # chain and at the first place, i / (i + 1) in a tree
        place = jnp.arange(self.tried.shape[0], dtype=jnp.float32)
        is_same = (place == 0) | (not self.has_trees)
        fall = jnp.where(is_same, 1, place / (place + 1))

        def rate(before: jax.Array, counts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            """Returns the rate of a place, to go on from and as a result."""
            tried, accepted, fall = counts
            # Two made-up drafts, which were accepted at the rate of the place before
            here = (accepted + _PRIOR_TRIED * fall * before) / (tried + _PRIOR_TRIED)
            return here, here

        # From the first place on: each goes on from the one before, so this is a loop.
        return lax.scan(rate, jnp.float32(_PRIOR_RATE), (self.tried, self.accepted, fall))[1]

    def update(
        self, num_drafts: jax.Array, num_accepted: jax.Array, path: jax.Array | None = None
    ) -> DraftRates:
        """Returns the rates after one more verification of a batch.

        Args:
          num_drafts: ``[B]`` int32, drafts offered to each request; 0 for one to leave out.
          num_accepted: ``[B]`` int32, as `rejection_sample` returns it.
          path: ``[B, P]`` int32 likewise, the nodes that were accepted; None for chains.
        """
        # [B, K]: the drafts of each request that were tried, and those that were accepted
        place = jnp.arange(self.tried.shape[0], dtype=jnp.int32)[None, :]
        is_tried = place < num_drafts[:, None]
        if path is None:
            # The first that was rejected was tried too, and none after it.
            is_tried &= place <= num_accepted[:, None]
            is_accepted = place < num_accepted[:, None]
        else:
            # [B, P, K] -> [B, K]: draft i is node i + 1
            is_accepted = jnp.any(path[:, :, None] == place[:, None, :] + 1, axis=1)
        # [B, K] -> [K]: a place that no request has tried keeps its past
        decay = jnp.where(is_tried.any(axis=0), _DECAY, 1.0)
        num_tried = is_tried.sum(axis=0, dtype=jnp.float32)
        num_right = (is_tried & is_accepted).sum(axis=0, dtype=jnp.float32)
        return dataclasses.replace(
            self,
            tried=decay * self.tried + num_tried,
            accepted=decay * self.accepted + num_right,
        )
