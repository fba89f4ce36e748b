"""The contract between the decoding loops and a model, and what checks it.

The loops know nothing about architectures. They need one operation: run some tokens of requests
through the model at given positions and return logits, with a cache that can be rewound for free.
Any JAX model that can do this fits.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax

from jax_specdec._src.arrays import check_type, described, require
from jax_specdec.lm.models.fields import check_leaf
from jax_specdec.lm.models.rows import Cache, Output, Params, Rows, Serves, Wants

_MEMBERS = ("vocab_size", "serves", "init_cache", "apply", "commit", "check_params")
"""Those of `CausalModel`, for the sentence that says which are missing."""


@runtime_checkable
class CausalModel(Protocol):
    """A causal language model with a cache that is addressed by absolute position.

    The object itself is static: hashable, compared by value, holding configuration and no arrays,
    so that it can be a static argument of `jax.jit`. Weights travel separately, as `params`. A
    model that only knows a plain pass over tokens ``[B, S]`` becomes one by `PlainModel`.

    **What a cache means.** It holds what the model remembers of the tokens at absolute positions
    0, 1, 2, ... of each request. Nothing in it records how many positions are filled: the caller
    gives the position with every call. Two properties follow, on which speculative decoding
    relies:

    - *Rollback is free.* Drafted tokens that were rejected stay in the cache, at positions that
      the next call overwrites before anything can attend to them. To roll back, continue from an
      earlier `start`.
    - *Right padding is harmless.* Prompts of different lengths are read together as one rectangle;
      what the padding wrote is overwritten as decoding reaches it.

    A model whose state cannot be addressed by position (a recurrent one) has to keep enough past
    states for this.

    **A pass is rows.** `apply` runs groups of `Rows`: the newest token and drafts of every request,
    or parts of prompts for some slots, or both. What a model can do beyond one group of consecutive
    tokens it declares in `serves`; it is asked for nothing else.

    - ``groups``: several groups in one pass, which then reads the weights once, also such with
      `slots`. A request that has rows in a group with slots keeps these alone: its rows in a group
      of all requests do not matter. Other models are run group after group, on the caches of the
      slots.
    - ``features``: the output has the residual streams that `Wants.feature_layers` names, before
      any norm, one after another along the last axis. Some drafters (EAGLE-3, for one) read them.
    - ``trees``: token s of a group with a `tree` is node s of the request's tree, node 0 the newest
      token. It is still written at position ``start[b] + s`` of the cache. Its position in the
      sequence, for rotary angles, is ``start[b] + tree.depth[b, s]``. It sees the positions before
      `start[b]`, and of the S nodes its ancestors and itself: ``tree.visible[b, s]`` has their
      bits, as `decode_attention` takes them. Row s of the logits scores what follows node s; what
      nodes that it does not see hold, even NaN, has no influence on it. `commit` then keeps a path.

    Example:
      The smallest model: a bigram table, whose next token depends on the last one alone.

      >>> import jax, jax.numpy as jnp
      >>> from jax_specdec.lm.models import PlainModel, Rows
      >>> model = PlainModel(
      ...     3, lambda table, token_ids, start, cache: (table[token_ids], cache))
      >>> table = jnp.arange(9.0).reshape(3, 3)
      >>> rows = Rows(jnp.array([[2, 0]]), start=jnp.array([0]))
      >>> (output,), _ = model.apply(table, [rows], model.init_cache(1, 8))
      >>> output.logits.tolist()
      [[[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]]

      A model that can only score whole sequences, `score(params, tokens [B, T]) -> logits
      [B, T, V]`, fits as well. Its cache is the token buffer, and every call scores it anew:
      slow, but exact, because a causal model ignores what follows a position.

      >>> def score(params, tokens):  # here: sums the rows of a table so far
      ...     return jnp.cumsum(params[tokens], axis=1)
      >>> def run(params, token_ids, start, cache):
      ...     positions = start[:, None] + jnp.arange(token_ids.shape[1])[None, :]
      ...     requests = jnp.arange(token_ids.shape[0])[:, None]
      ...     cache = cache.at[requests, positions].set(token_ids)
      ...     return score(params, cache)[requests, positions], cache
      >>> def new_cache(batch_size, max_length):
      ...     return jnp.zeros((batch_size, max_length), jnp.int32)
      >>> model = PlainModel(3, run, new_cache)
      >>> cache = model.init_cache(1, 8)
      >>> _, cache = model.apply(table, [rows], cache)
      >>> rollback = Rows(jnp.array([[1]]), start=jnp.array([1]))
      >>> (output,), cache = model.apply(table, [rollback], cache)
      >>> output.logits.tolist()
      [[[9.0, 11.0, 13.0]]]
    """

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary axis of the logits."""
        ...

    @property
    def serves(self) -> Serves:
        """What the model can do beyond one group of consecutive tokens."""
        ...

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache.

        Args:
          batch_size: number of requests, B.
          max_length: number of positions that can be filled per request, T.

        Returns:
          A pytree of arrays whose shapes depend on B and T alone. One axis of each, the same for
          all, holds the requests one after another, with the same number of entries for each, so
          that a serving engine can replace what belongs to one of them: `Serves.batch_axis`.
        """
        ...

    def apply(
        self, params: Params, groups: Sequence[Rows], cache: Cache, wants: Wants = ...
    ) -> tuple[list[Output], Cache]:
        """Runs groups of rows through the model.

        What the model remembers of a token replaces the entry of its position in the cache. A
        consecutive token attends to all positions up to its own; entries beyond it have no
        influence on its logits.

        The result depends on the tokens and positions only, not on how they were cut into calls:
        logits of one call with S tokens equal those of S calls with one token, up to the rounding
        of floating-point sums. Requests do not influence one another.

        The caller guarantees that ``start[g] + S <= max_length`` and that positions before
        `start[g]` have been filled. Callers may pass any token id where they ignore the logits
        (padding): such an id may give meaningless logits, but must not fail or give NaN elsewhere.

        Args:
          params: the weights.
          groups: what to run. Shapes are static; the loops use S = 1, S = K + 1 and the length of
            padded prompts. A model without `Serves.groups` gets one group, without slots.
          cache: the cache, from `init_cache` or a previous call.
          wants: static, what to return beside logits.

        Returns:
          One `Output` for each group, and the cache. It must have the structure, shapes and dtypes
          of the one passed in, so that it can be carried by `jax.lax.while_loop`.
        """
        ...

    def commit(self, cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
        """Returns the cache after a pass over trees, of which each request keeps a path of nodes.

        It then is what a pass over the text alone would have left, up to rounding. Called only if
        `serves` has trees.

        Args:
          cache: that the pass returned.
          start: ``[B]`` int32, as the pass was given it.
          path: ``[B, P]`` int32, the nodes that are kept: from node 0 to a child, and so on, so
            that ``path[b, j] >= j``, and -1 after the last. Position ``start[b] + j`` then holds
            what ``start[b] + path[b, j]`` held; where the path is -1, anything: it is overwritten
            before it is seen.
        """
        ...

    def check_params(self, name: str, params: Params) -> None:
        """Checks weights: the loops call it once, where they enter, so that `apply` need not.

        Raises:
          TypeError, ValueError: they are not the model's; the message begins with `name`.
        """
        ...


class HasCache(Protocol):
    """A model or a drafter, as far as its cache goes."""

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache."""
        ...


class HasParams(Protocol):
    """A model or a drafter, as far as its weights go."""

    def check_params(self, name: str, params: Params) -> None:
        """Checks weights."""
        ...


def check_runs_trees(name: str, model: CausalModel) -> None:
    """Checks that a model can run trees of drafts; see `CausalModel`.

    Args:
      name: of the argument.
      model: what was given for it.

    Raises:
      TypeError: it declares that it cannot.
    """
    if not model.serves.trees:
        raise TypeError(
            f"{name} must run trees of drafts, but {type(model).__name__}.serves says trees=False: "
            "use chains"
        )


def check_batch_axis(name: str, owner: HasCache, axis: int) -> None:
    """Checks that the cache of a model or drafter has an axis that holds the requests.

    Args:
      name: of the argument.
      owner: what was given for it.
      axis: as it declares.

    Raises:
      ValueError: an array has no such axis.
    """
    one = jax.eval_shape(lambda: owner.init_cache(1, 8))
    two = jax.eval_shape(lambda: owner.init_cache(2, 8))

    def check(
        path: jax.tree_util.KeyPath, one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct
    ) -> None:
        # Two requests take twice the room of one along the axis, and no more along others. An entry
        # need not be one: a `Llama` has N_kv of them for each request.
        shape = list(one.shape)
        if axis < len(shape):
            shape[axis] *= 2
        if axis >= len(shape) or shape != list(two.shape):
            raise ValueError(
                f"{name}.init_cache must hold the requests along axis {axis}, as its batch_axis "
                f"says, but the shape of cache{jax.tree_util.keystr(path)} is {one.shape} for one "
                f"request and {two.shape} for two"
            )

    jax.tree.map_with_path(check, one, two)


def is_loaded_model(value: object) -> bool:
    """Returns whether a value is a pair of model and params, such as `LoadedModel`."""
    return isinstance(value, tuple) and hasattr(value, "model") and hasattr(value, "params")


def check_params(name: str, owner: HasParams, params: Params) -> None:
    """Checks weights, as far as the model or drafter they are for knows how.

    Args:
      name: of the argument.
      owner: the model or drafter; None for no drafter.
      params: what was given for it.

    Raises:
      TypeError: they are a model, missing, or of another dtype.
      ValueError: a shape does not fit.
    """
    must = "be a model's weights"
    require(not is_loaded_model(params), name, must, params, "pass its .params", TypeError)
    owner.check_params(name, params)


def check_cache(name: str, owner: HasCache, cache: Cache, batch_size: int, max_length: int) -> None:
    """Checks that a cache is one that a model or drafter made, for so many requests and positions.

    Args:
      name: of the argument.
      owner: the model or drafter.
      cache: what was given for it.
      batch_size: B.
      max_length: T.

    Raises:
      TypeError: an array has another dtype.
      ValueError: the structure or a shape is another.
    """
    # Shapes and dtypes alone: no cache is made.
    wanted = jax.eval_shape(lambda: owner.init_cache(batch_size, max_length))
    source = f"{type(owner).__name__}.init_cache({batch_size}, {max_length})"
    structure = jax.tree.structure(wanted)
    found: object = jax.tree.structure(cache)
    require(found == structure, name, f"have the structure of {source}", found)
    for (path, like), leaf in zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(cache), strict=True
    ):
        one = name + jax.tree_util.keystr(path)
        check_leaf(one, leaf, like.shape, like.dtype, f", as in {source}")


def check_model(name: str, model: object) -> None:
    """Checks that a value can be used as a model.

    Args:
      name: of the argument.
      model: what was given for it.

    Raises:
      TypeError: it is not a `CausalModel`, or it has no hash.
      ValueError: no axis of its cache holds the requests.
    """
    if is_loaded_model(model):
        raise TypeError(
            f"{name} must be a CausalModel, but it is a LoadedModel, which holds one and its "
            "params: pass its .model here, and its .params where they belong"
        )
    if isinstance(model, type):
        kind = model.__name__
        raise TypeError(f"{name} must be a CausalModel, but it is the class {kind}: make an object")
    if not isinstance(model, CausalModel):
        lacks = [x for x in _MEMBERS if not hasattr(model, x)]
        # What has none of them was never meant to be one: a list of all would say nothing.
        hint = f", which has no {', '.join(lacks)}" if len(lacks) < len(_MEMBERS) else ""
        hint += ": PlainModel makes one of a plain pass" if hasattr(model, "apply") else ""
        raise TypeError(f"{name} must be a CausalModel, but it is {described(model)}{hint}")
    check_type(f"{name}.serves", model.serves, Serves)
    try:
        hash(model)
    except TypeError as error:
        raise TypeError(
            f"{name} must be hashable, because it is a static argument of jax.jit, but for "
            f"{type(model).__name__}: {error}. Keep arrays in params; a dataclass with frozen=True "
            "and eq=False is compared by identity"
        ) from None
    check_batch_axis(name, model, model.serves.batch_axis)
