"""`Rows`: the tokens of some requests that a model runs, and what it declares and returns."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.tree import TreeRows
from jax_specdec._src.verify.sharding import VerifySharding

Cache = Any
"""Any pytree of arrays. The loop carries it and hands it back; it never looks inside."""

Params = Any
"""Any pytree of arrays. The loop passes it to a model or drafter and never looks inside."""


class Rows(NamedTuple):
    """S tokens of each of G requests: prompts, drafts, a tree of drafts, or a level of one.

    Attributes:
      token_ids: ``[G, S]`` int32. What follows the end of a prompt is padding.
      start: ``[G]`` int32, absolute position of each request's first token; with `tree`, that of
        node 0.
      slots: ``[G]`` int32, the requests of the cache that the tokens belong to. One may come twice,
        with the same tokens. None: all requests of the cache, in their order.
      tree: the nodes that the tokens are, see `CausalModel`; None for consecutive tokens.
      first_row: ``[]`` int32, nodes of the tree that passes before this one have run; None for 0.

    Example:
      >>> import jax.numpy as jnp
      >>> rows = Rows(jnp.zeros((2, 3), jnp.int32), jnp.array([0, 128]), slots=jnp.array([3, 1]))
      >>> rows.positions.tolist()
      [[0, 1, 2], [128, 129, 130]]
    """

    token_ids: jax.Array
    start: jax.Array
    slots: jax.Array | None = None
    tree: TreeRows | None = None
    first_row: jax.Array | None = None

    @property
    def places(self) -> jax.Array:
        """``[G, S]`` int32, the position of the cache that each token is written to."""
        # [G, 1] + [1, S]; nodes of a tree follow those that were run before, whatever their depth
        places = self.start[:, None] + jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)[None, :]
        return places if self.first_row is None else places + self.first_row

    @property
    def positions(self) -> jax.Array:
        """``[G, S]`` int32, the position of each token in its sequence, for rotary angles."""
        return self.places if self.tree is None else self.start[:, None] + self.tree.depth

    @property
    def visible(self) -> jax.Array | None:
        """``[G, S, 2]`` uint32, the nodes that each one sees; None for consecutive tokens."""
        return None if self.tree is None else self.tree.visible


@dataclasses.dataclass(frozen=True)
class Wants:
    """What a pass is to return beside logits.

    Attributes:
      feature_layers: A layers, increasing, each from 0 to the number of layers L: the residual
        stream that enters each of them (for L: that leaves the last one) is wanted. None if empty.

    Example: see `Llama`.
    """

    feature_layers: tuple[int, ...] = ()


class Output(NamedTuple):
    """What a model computes for one group of rows.

    Attributes:
      logits: ``[G, S, V]``, in any float dtype: row ``[g, s]`` scores the token that follows
        token s of request g.
      features: ``[G, S, A*H]``, of the A layers of `Wants.feature_layers`; None if there are none.

    Example: see `Llama`.
    """

    logits: jax.Array
    features: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Serves:
    """What a model declares that it can do; see `CausalModel`.

    Attributes:
      trees: it runs rows with a `tree`, and has a method `commit`.
      features: it returns the features that `Wants.feature_layers` names.
      groups: it runs several groups in one pass, also such with `slots`. The loops run the groups
        of other models one after another.
      batch_axis: the axis of every array of its cache that holds the requests.
      sharding: a `VerifySharding` with a mesh if its logits are split over the vocabulary: they
        are then read where they are. None: XLA may move them.

    Example:
      >>> from jax_specdec import lm
      >>> model, _ = lm.load_embedded_pair()[0]
      >>> model.serves.trees, model.serves.batch_axis
      (True, 0)
    """

    trees: bool = False
    features: bool = False
    groups: bool = False
    batch_axis: int = 0
    sharding: VerifySharding | None = None
