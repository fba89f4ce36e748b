"""The contract between the decoding loops and a model: `Rows` in, an `Output` for each group back.

The loops know nothing about architectures. They need one operation: run some tokens of requests
through the model at given positions and return logits, with a cache that can be rewound for free.
Any JAX model that can do this fits.

Below the contract are the checks that the loops make where a model, weights or a cache enter, and
what they run through instead of calling a model themselves: `apply_groups`, for models that run one
group alone, too, and `run_in_slots`, for models and drafters that know of no slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import (
    LOGITS,
    check_array,
    check_type,
    described,
    refuse,
    require,
)
from jax_specdec._src.base.tree import TreeRows
from jax_specdec._src.verify.sharding import VerifySharding

_Result = TypeVar("_Result")

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
      max_seen: ``[]`` int32, positions of the cache that some of the tokens see. Attention need not
        read those past them, and on CPUs does not. Last bits of its sums then depend on the longest
        request; if it is None they do not.

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
    max_seen: jax.Array | None = None

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
    def tree_mask(self) -> jax.Array | None:
        """``[G, S, 2]`` uint32, the nodes that each one sees; None for consecutive tokens."""
        return None if self.tree is None else self.tree.tree_mask


@dataclasses.dataclass(frozen=True)
class Wants:
    """What a pass is to return beside logits.

    Attributes:
      aux_hidden_state_layers: A layers, increasing, each from 0 to the number of layers L: the
        residual stream that enters each of them (for L: that leaves the last one) is wanted. None
        if empty.

    Example: see `Llama`.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()


class Output(NamedTuple):
    """What a model computes for one group of rows.

    Attributes:
      logits: ``[G, S, V]`` float32, bfloat16 or float16: row ``[g, s]`` scores the token that
        follows token s of request g.
      features: ``[G, S, A*H]``, of the A layers of `Wants.aux_hidden_state_layers`; None if there
        are none.

    Example: see `Llama`.
    """

    logits: jax.Array
    features: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Serves:
    """What a model declares that it can do; see `CausalModel`.

    Attributes:
      trees: it runs rows with a `tree`, and has a method `commit`.
      features: it returns the features that `Wants.aux_hidden_state_layers` names.
      groups: it runs several groups in one pass, also such with `slots`. The loops run the groups
        of other models one after another.
      batch_axis: the axis of every array of its cache that holds the requests.
      sharding: a `VerifySharding` with a mesh if its logits are split over the vocabulary: they
        are then read where they are. None: XLA may move them.
      index: a name in the path of each array of its cache that every pass sets anew, such as a
        write index ("end_index"), and of no other; None for none. All others hold positions.

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
    index: str | None = None

    def is_index(self, path: jax.tree_util.KeyPath) -> bool:
        """Returns whether the path of an array of the cache has the name `index`."""
        # Keys of dicts, names of attributes and places of lists, each as its text without brackets.
        return any(jax.tree_util.keystr((key,), simple=True) == self.index for key in path)


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
    - ``features``: the output has the residual streams that `Wants.aux_hidden_state_layers` names,
      before any norm, one after another along the last axis. Some drafters (EAGLE-3, for one) read
      them.
    - ``trees``: token s of a group with a `tree` is node s of the request's tree, node 0 the newest
      token. It is still written at position ``start[b] + s`` of the cache. Its position in the
      sequence, for rotary angles, is ``start[b] + tree.depth[b, s]``. It sees the positions before
      `start[b]`, and of the S nodes its ancestors and itself: ``tree.tree_mask[b, s]`` has their
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
      axis: as it declares.

    Raises:
      ValueError: an array has no such axis.
    """
    # Shapes alone: no cache is made. Any number of positions would do.
    of_one = jax.eval_shape(lambda: owner.init_cache(1, 8))
    of_two = jax.eval_shape(lambda: owner.init_cache(2, 8))

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

    jax.tree.map_with_path(check, of_one, of_two)


def is_loaded_model(value: object) -> bool:
    """Returns whether a value is a pair of model and params, such as `LoadedModel`."""
    return isinstance(value, tuple) and hasattr(value, "model") and hasattr(value, "params")


def check_params(name: str, owner: HasParams, params: Params) -> None:
    """Checks weights, as far as the model or drafter they are for knows how.

    Args:
      owner: the model or drafter; None for no drafter.

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
      owner: the model or drafter.
      batch_size: B.
      max_length: T.

    Raises:
      TypeError: an array has another dtype.
      ValueError: the structure or a shape is another.
    """
    # Shapes and dtypes alone: no cache is made.
    wanted = jax.eval_shape(lambda: owner.init_cache(batch_size, max_length))
    source = f"{type(owner).__name__}.init_cache({batch_size}, {max_length})"
    check_like(name, cache, wanted, source)


def check_like(name: str, given: Cache | Params, wanted: Cache | Params, source: str) -> None:
    """Checks that arrays have the structure, shapes and dtypes of others.

    Args:
      given: its value.
      wanted: arrays, or their shapes and dtypes.
      source: where these are from.

    Raises:
      TypeError: an array has another dtype.
      ValueError: the structure or a shape is another.
    """
    structure = jax.tree.structure(wanted)
    structure_given: object = jax.tree.structure(given)
    if structure_given != structure:
        # The message names one array that only one of the two has. There may be none, as where a
        # tuple stands for a list; an array that is no part of a pytree has an empty path.
        paths = [{path for path, _ in jax.tree.leaves_with_path(x)} for x in (wanted, given)]
        names = map(jax.tree_util.keystr, paths[0] ^ paths[1])
        first = min(filter(None, names), default=None)
        hint = None if first is None else f"only one of the two has {first}"
        refuse(ValueError, name, f"have the structure of {source}", structure_given, hint)
    # Of one structure, leaves are in one order.
    for (path, like), leaf in zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(given), strict=True
    ):
        leaf_name = name + jax.tree_util.keystr(path)
        check_leaf(leaf_name, leaf, like.shape, like.dtype, f", as in {source}")


def check_leaf(name: str, leaf: Any, shape: tuple[int, ...], dtype: Any, source: str = "") -> None:
    """Checks one array of weights or of a cache.

    Args:
      name: of the argument, and the path of the array in it.
      shape: that it must have.
      dtype: that it must have; None for any.
      source: the end of the rule, of where the shape is from.

    Raises:
      ValueError: it has another shape, or none.
      TypeError: it has another dtype.
    """
    has_shape = getattr(leaf, "shape", None) == shape
    if has_shape and dtype in (None, leaf.dtype):
        return
    must = f"be an array {list(shape)}" + (f" of {dtype}" if dtype else "") + source
    refuse(TypeError if has_shape else ValueError, name, must, leaf)


def check_model(name: str, model: object) -> None:
    """Checks that a value can be used as a model.

    Raises:
      TypeError: it is not a `CausalModel`, or it has no hash.
      ValueError: no axis of its cache holds the requests.
    """
    if is_loaded_model(model):
        raise TypeError(
            f"{name} must be a CausalModel, but it is a LoadedModel, which holds one and its "
            "params: pass its .model here, and its .params where they belong"
        )
    # A class has all members that are looked for below, so it is refused before.
    if isinstance(model, type):
        kind = model.__name__
        raise TypeError(f"{name} must be a CausalModel, but it is the class {kind}: make an object")
    if not isinstance(model, CausalModel):
        lacks = [x for x in _MEMBERS if not hasattr(model, x)]
        # What has none of them was never meant to be one: a list of all would say nothing.
        hint = f", which has no {', '.join(lacks)}" if len(lacks) < len(_MEMBERS) else ""
        hint += ": PlainModel makes one of a plain pass" if hasattr(model, "apply") else ""
        hint += ": params come after their model" if isinstance(model, Mapping) else ""
        raise TypeError(f"{name} must be a CausalModel, but it is {described(model)}{hint}")
    # That members are there says nothing about their values.
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


def apply_groups(
    model: CausalModel,
    params: Params,
    groups: Sequence[Rows],
    cache: Cache,
    wants: Wants = Wants(),
    max_length: int = 0,
) -> tuple[list[Output], Cache]:
    """Returns what a model says of each group, and its cache, as `CausalModel.apply` does.

    Args:
      model: may run one group alone: several are then run in turn, those with slots on the caches
        of these.
      groups: of any number.
      cache: from `init_cache` or a previous call.
      max_length: positions of each request of the cache; only read for groups with slots.

    Raises:
      TypeError: features are wanted, and the model gives none; or rows are trees, and it runs none;
        or logits have another dtype than those of `Output`.
      ValueError: the logits of a group are not ``[G, S, V]``, or its features ``[G, S, A*H]``.
    """
    kind = type(model).__name__
    layers = wants.aux_hidden_state_layers
    must = f"model must give features, because the drafter reads those of layers {layers}, but"
    # What a model declares is checked before it runs, what it returns after it has.
    if layers and not model.serves.features:
        raise TypeError(f"{must} {kind}.serves says features=False: see CausalModel")
    if any(rows.tree is not None for rows in groups):
        check_runs_trees("model", model)
    if model.serves.groups:
        outputs, cache = model.apply(params, groups, cache, wants)
    else:
        outputs, cache = _in_turn(model, params, groups, cache, wants, max_length)
    # This is traced once for each program: the checks cost nothing when it runs.
    for rows, output in zip(groups, outputs, strict=True):
        size, length = rows.token_ids.shape
        sizes = {"G": size, "S": length, "V": model.vocab_size}
        declared = f"[G, S, V] {LOGITS}"
        check_array(f"the logits of {kind}.apply", output.logits, declared, sizes)
        if not layers:
            continue
        if output.features is None:
            raise TypeError(f"{must} {kind}.apply returns none")
        shape = output.features.shape
        if len(shape) != 3 or shape[:2] != rows.token_ids.shape or shape[2] % len(layers):
            raise ValueError(
                f"features must be [G, S, A*H] = [{size}, {length}, {len(layers)} H], but "
                f"{kind}.apply returns {list(shape)}"
            )
    return outputs, cache


def _in_turn(
    model: CausalModel,
    params: Params,
    groups: Sequence[Rows],
    cache: Cache,
    wants: Wants,
    max_length: int,
) -> tuple[list[Output], Cache]:
    """Returns what `apply_groups` does, by a pass for each group."""
    outputs = []
    for rows in groups:
        # The caches of the slots are taken out of the cache: they are all requests of the pass.
        # Each group is written over what the one before left. The loops put prompts after drafts,
        # so of a request that is in both, the rows with slots stay.
        alone = rows._replace(slots=None)

        def run(cache: Cache, alone: Rows = alone) -> tuple[Cache, Output]:
            (output,), cache = model.apply(params, [alone], cache, wants)
            return cache, output

        if rows.slots is None:
            cache, output = run(cache)
        else:
            axis = model.serves.batch_axis
            cache, output = run_in_slots(model, axis, cache, rows, max_length, run)
        outputs.append(output)
    return outputs, cache


def run_in_slots(
    owner: HasCache,
    axis: int,
    cache: Cache,
    rows: Rows,
    length: int,
    run: Callable[[Cache], tuple[Cache, _Result]],
) -> tuple[Cache, _Result]:
    """Returns the cache of all requests after R of them have read rows, and what `run` returns.

    Args:
      owner: the model or drafter that the cache is of.
      axis: of the cache's arrays, that holds the requests.
      cache: of all requests; changed in place if it is donated.
      rows: with slots. A prompt that begins at position 0 finds an empty cache.
      length: positions of each request.
      run: is given the caches of the R requests, and returns them and anything else.
    """
    # Take the caches of R slots, [.., S entries, ..] -> [.., R entries, ..]; run; put them back.
    assert rows.slots is not None
    empty = owner.init_cache(rows.slots.shape[0], length)
    slots_cache = take_cache(cache, empty, rows.slots, axis)
    is_new = rows.start == 0

    def cleared(old: jax.Array, new: jax.Array) -> jax.Array:
        """Returns the entries of R requests, of those that begin anew the empty ones."""
        # A cache may hold more than positions, such as a count, which only an empty one resets.
        # What lies at positions would be overwritten before it is seen.
        # [R] -> [R entries] -> [.., R entries, ..], along the axis of the requests
        is_new_entry = jnp.repeat(is_new, new.shape[axis] // is_new.shape[0])
        shape = [1] * new.ndim
        shape[axis] = is_new_entry.shape[0]
        return jnp.where(is_new_entry.reshape(shape), new, old)

    slots_cache, result = run(jax.tree.map(cleared, slots_cache, empty))
    return put_cache(cache, slots_cache, rows.slots, axis), result


def take_cache(cache: Cache, like: Cache, slots: jax.Array, axis: int) -> Cache:
    """Returns the caches of R requests, out of a cache of all.

    Args:
      cache: of S requests.
      like: of R requests; its shapes are used.
      slots: ``[R]`` int32; past the last one that one's cache is taken, as calls that warm up do.
      axis: that holds the requests.
    """

    def take(array: jax.Array, like: jax.Array) -> jax.Array:
        size = like.shape[axis] // slots.shape[0]  # entries of one request
        # R times [.., entries, ..] -> [.., R entries, ..]
        rows = [
            lax.dynamic_slice_in_dim(array, slots[row] * size, size, axis)
            for row in range(slots.shape[0])
        ]
        return jnp.concatenate(rows, axis=axis)

    return jax.tree.map(take, cache, like)


def put_cache(cache: Cache, slots_cache: Cache, slots: jax.Array, axis: int) -> Cache:
    """Returns `cache` with the caches of R requests in the place of what `slots` held.

    Args:
      cache: of S requests; changed in place if it is donated.
      slots_cache: of R requests.
      slots: ``[R]`` int32; what is for one past the last is dropped.
      axis: that holds the requests.
    """

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        size = new.shape[axis] // slots.shape[0]  # entries of one request
        # One after another: a scatter would copy the cache where `axis` is not the first.
        for row in range(slots.shape[0]):
            start = slots[row] * size
            # [.., R entries, ..] -> [.., entries, ..]
            entries = lax.slice_in_dim(new, row * size, (row + 1) * size, axis=axis)
            # A slice past the end is moved to the last slot, which keeps what it holds.
            old = lax.dynamic_slice_in_dim(array, start, size, axis)
            entries = jnp.where(start < array.shape[axis], entries, old)
            array = lax.dynamic_update_slice_in_dim(array, entries, start, axis)
        return array

    return jax.tree.map(put, cache, slots_cache)
