"""The contract between the decoding loop and a model.

The loop knows nothing about architectures. It needs one operation: run some tokens of every
request through the model at given positions and return logits, with a cache that can be rewound
for free. Any JAX model that can do this fits.
"""

import inspect
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jax_specdec._src.arrays import described, refuse, require
from jax_specdec._src.tree import TreeRows
from jax_specdec._src.verify.sharding import VerifySharding

Cache = Any
"""Any pytree of arrays. The loop carries it and hands it back; it never looks inside."""

Params = Any
"""Any pytree of arrays. The loop passes it to `CausalModel.apply` and never looks inside."""


class TargetOutput(NamedTuple):
    """What a model computes for S tokens of each request.

    Attributes:
      logits: ``[B, S, V]``, in any float dtype: row ``[b, s]`` scores the token at position
        `start[b] + s + 1`.
      cache: of the same structure, shapes and dtypes as the one passed in.
      features: ``[B, S, A H]``, for the A layers of `feature_layers`; None if there are none.

    Example: see `Llama`.
    """

    logits: jax.Array
    cache: Cache
    features: jax.Array | None = None


class PromptRows(NamedTuple):
    """P tokens of each of R prompts, which a pass reads into the cache.

    Attributes:
      token_ids: ``[R, P]`` int32; what follows the end of a prompt is padding.
      start: ``[R]`` int32, absolute position of each prompt's first token among these.
      slots: ``[R]`` int32, the requests of the cache that they are for. One may come twice, with
        the same tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> rows = PromptRows(jnp.zeros((2, 64), jnp.int32), jnp.array([0, 128]), jnp.array([3, 1]))
      >>> rows.token_ids.shape
      (2, 64)
    """

    token_ids: jax.Array
    start: jax.Array
    slots: jax.Array

    @property
    def positions(self) -> jax.Array:
        """``[R, P]`` int32, of each token."""
        place = jnp.arange(self.token_ids.shape[1], dtype=jnp.int32)
        return self.start[:, None] + place[None, :]


@runtime_checkable
class CausalModel(Protocol):
    """A causal language model with a cache that is addressed by absolute position.

    The object itself is static: hashable, compared by value, holding configuration and no arrays,
    so that it can be a static argument of `jax.jit`. Weights travel separately, as `params`.

    **What a cache means.** It holds what the model remembers of the tokens at absolute positions
    0, 1, 2, ... of each request. Nothing in it records how many positions are filled: the caller
    gives the position with every call. Two properties follow, on which speculative decoding
    relies:

    - *Rollback is free.* Drafted tokens that were rejected stay in the cache, at positions that
      the next call overwrites before anything can attend to them. To roll back, continue from an
      earlier `start`.
    - *Right padding is harmless.* Prompts of different lengths are prefilled together as one
      rectangle; what the padding wrote is overwritten as decoding reaches it.

    A model whose state cannot be addressed by position (a recurrent one) has to keep enough past
    states for this.

    **Slots.** `cache_batch_axis`, if a model has it, is the axis of every array of its cache that
    holds the requests; it is 0 otherwise.

    **Weights.** A model may have a method ``check_params(name, params)``, which raises a TypeError
    or ValueError that begins with `name` if weights are not its own. The decoding loops call it
    once, where weights enter, so that `apply` need not check them.

    **Many devices.** A model whose logits are split over the vocabulary says so in an attribute
    `sharding`, a `VerifySharding` with a mesh: its logits are then read where they are. Without it,
    XLA may move them.

    **Features.** Some drafters (EAGLE-3, for one) read what the target computes inside: features.
    A model that can give them takes one more argument, `feature_layers`: a static tuple of A
    layers, increasing, each from 0 to the number of layers L. It is passed only if a drafter asks
    for features. The model then returns a `TargetOutput` whose features are the residual stream
    that enters each of these layers (for L: that leaves the last one), before any norm, one after
    another along the last axis. `Llama` and `TensorParallelLlama` do this.

    **Trees.** Drafts may form a tree instead of a chain: several tokens that may follow the same
    one. A model that can run trees takes one more argument of `apply`, `tree`, and has a method
    `commit`. Without them it runs chains only, and drafters that propose trees are refused.

    - ``apply(..., tree: TreeRows | None = None)`` is given `tree` only if drafts form trees. Token
      s of request b is then node s of its tree, node 0 the newest token. It is still written at
      position ``start[b] + s`` of the cache. Its position in the sequence, for rotary angles, is
      ``start[b] + tree.depth[b, s]``. It sees the positions before `start[b]`, and of the S nodes
      its ancestors and itself: ``tree.visible[b, s]`` has their bits, as `decode_attention` takes
      them. Row s of the logits scores what follows node s; what nodes that it does not see hold,
      even NaN, has no influence on it. `feature_layers` may be given with it.
    - ``commit(cache, start [B], path [B, P]) -> cache`` keeps a path of nodes. Position ``start[b]
      + j`` then holds what ``start[b] + path[b, j]`` held, for every j with ``path[b, j] >= 0``.
      All others may hold anything: they are overwritten before they are seen. A path goes from node
      0 to a child, and so on, so that ``path[b, j] >= j``, and ends with -1s. The cache then is
      what a pass over the text alone would have left, up to rounding.

    `Llama` and `TensorParallelLlama` do this.

    **Prompts beside.** A model may have a method ``apply_with_prompts(params, token_ids, start,
    cache, prompts: PromptRows, feature_layers, tree)``, where `feature_layers` may be empty and
    `tree` None. It does what `apply` does, and also reads the tokens of prompts into the cache, in
    the same pass over the weights. It returns the `TargetOutput` of the S tokens, and the features
    ``[R, P, A H]`` of the prompts, or None; nobody needs their logits. The S tokens of a request
    that has rows in `prompts` do not matter, and where both write one position, the prompt's stays.
    A model without the method is called twice. `Llama` and `TensorParallelLlama` have it.

    Example:
      The smallest model: a bigram table, whose next token depends on the last one alone.

      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> @dataclasses.dataclass(frozen=True)
      ... class Bigram:
      ...     vocab_size: int
      ...     def init_cache(self, batch_size, max_length):
      ...         return ()
      ...     def apply(self, params, token_ids, start, cache):
      ...         return params[token_ids], cache
      >>> model = Bigram(vocab_size=3)
      >>> isinstance(model, CausalModel)
      True
      >>> table = jnp.arange(9.0).reshape(3, 3)
      >>> logits, _ = model.apply(
      ...     table, jnp.array([[2, 0]]), jnp.array([0]), model.init_cache(1, 8))
      >>> logits.tolist()
      [[[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]]

      A model that can only score whole sequences, `score(params, tokens [B, T]) -> logits
      [B, T, V]`, fits as well. Its cache is the token buffer, and every call scores it anew:
      slow, but exact, because a causal model ignores what follows a position.

      >>> def score(params, tokens):  # here: sums the rows of a table so far
      ...     return jnp.cumsum(params[tokens], axis=1)
      >>> @dataclasses.dataclass(frozen=True)
      ... class WholeSequence:
      ...     vocab_size: int
      ...     def init_cache(self, batch_size, max_length):
      ...         return jnp.zeros((batch_size, max_length), jnp.int32)
      ...     def apply(self, params, token_ids, start, cache):
      ...         positions = start[:, None] + jnp.arange(token_ids.shape[1])[None, :]
      ...         requests = jnp.arange(token_ids.shape[0])[:, None]
      ...         cache = cache.at[requests, positions].set(token_ids)
      ...         return score(params, cache)[requests, positions], cache
      >>> model = WholeSequence(vocab_size=3)
      >>> cache = model.init_cache(1, 8)
      >>> _, cache = model.apply(table, jnp.array([[2, 0]]), jnp.array([0]), cache)
      >>> logits, cache = model.apply(table, jnp.array([[1]]), jnp.array([1]), cache)  # rollback
      >>> logits.tolist()
      [[[9.0, 11.0, 13.0]]]
    """

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary axis of the logits."""
        ...

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache.

        Args:
          batch_size: number of requests, B.
          max_length: number of positions that can be filled per request, T.

        Returns:
          A pytree of arrays whose shapes depend on B and T alone. One axis of each, the same for
          all, holds the requests one after another, with the same number of entries for each, so
          that a serving engine can replace what belongs to one of them: the first axis, or that
          of the attribute `cache_batch_axis`.
        """
        ...

    def apply(
        self, params: Params, token_ids: jax.Array, start: jax.Array, cache: Cache
    ) -> TargetOutput | tuple[jax.Array, Cache]:
        """Runs S consecutive tokens of each request through the model.

        Token s of request b is at absolute position `start[b] + s`. What the model remembers of it
        replaces the entry of that position in the cache. It attends to positions 0 to
        `start[b] + s`, its own included; entries beyond its own position have no influence on its
        logits.

        The result depends on the tokens and positions only, not on how they were cut into calls:
        logits of one call with S tokens equal those of S calls with one token, up to the rounding
        of floating-point sums. Requests do not influence one another.

        The caller guarantees that `start[b] + S <= max_length` and that positions before
        `start[b]` have been filled. Callers may pass any token id where they ignore the logits
        (padding): such an id may give meaningless logits, but must not fail or give NaN elsewhere.

        Args:
          params: the weights.
          token_ids: ``[B, S]`` int32. S is static; the loop uses S = 1, S = K + 1 and the length
            of the padded prompts.
          start: ``[B]`` int32, absolute position of the first token of each request.
          cache: the cache, from `init_cache` or a previous call.

        Returns:
          A `TargetOutput`, or a plain pair of logits and cache. The cache must have the structure
          of the one passed in, so that it can be carried by `jax.lax.while_loop`.
        """
        ...


def apply_model(
    model: CausalModel,
    params: Params,
    token_ids: jax.Array,
    start: jax.Array,
    cache: Cache,
    feature_layers: tuple[int, ...] = (),
    tree: TreeRows | None = None,
) -> TargetOutput:
    """`CausalModel.apply`, with the features of some layers, or on trees of drafts.

    Args:
      model: any `CausalModel`.
      params: as in `CausalModel.apply`.
      token_ids: as in `CausalModel.apply`.
      start: as in `CausalModel.apply`.
      cache: as in `CausalModel.apply`.
      feature_layers: A layers whose features are needed; with none, the model is not asked.
      tree: whose nodes the tokens are; None for consecutive tokens, and the model is not asked.

    Raises:
      TypeError: features are needed, and the model's `apply` does not take `feature_layers` or
        returns none; or trees, and it does not take `tree`.
      ValueError: the features are not ``[B, S, A H]``.
    """
    apply: Any = model.apply
    asked: dict[str, Any] = {}
    if tree is not None:
        check_runs_trees("model", model)
        asked["tree"] = tree
    if not feature_layers:
        logits, cache = apply(params, token_ids, start, cache, **asked)[:2]
        return TargetOutput(logits, cache)
    if not _takes(apply, "feature_layers"):
        raise TypeError(
            f"{_must_give_features(model, feature_layers)} takes {inspect.signature(apply)}: see "
            "feature_layers in CausalModel"
        )
    output = apply(params, token_ids, start, cache, feature_layers=feature_layers, **asked)
    _check_features(model, feature_layers, output, token_ids)
    return output


def apply_with_prompts(
    model: CausalModel,
    params: Params,
    token_ids: jax.Array,
    start: jax.Array,
    cache: Cache,
    prompts: PromptRows,
    feature_layers: tuple[int, ...] = (),
    tree: TreeRows | None = None,
) -> tuple[TargetOutput, jax.Array | None]:
    """`apply_model`, and the features of R prompts that are read in the same pass.

    The model is one that `reads_beside`; the arguments but `prompts` are those of `apply_model`.

    Raises:
      TypeError: features are needed, and the model returns none.
      ValueError: they are not ``[B, S, A H]`` and ``[R, P, A H]``.
    """
    owner: Any = model  # the method is optional, so not of the protocol
    given = params, token_ids, start, cache, prompts, feature_layers, tree
    output, features = owner.apply_with_prompts(*given)
    if feature_layers:
        _check_features(model, feature_layers, output, token_ids)
        of_prompts = TargetOutput(output.logits, output.cache, features)
        _check_features(model, feature_layers, of_prompts, prompts.token_ids)
    return output, features


def reads_beside(model: CausalModel) -> bool:
    """Whether a model reads prompts in the pass that verifies drafts; see `CausalModel`."""
    return callable(getattr(model, "apply_with_prompts", None))


def _must_give_features(model: CausalModel, feature_layers: tuple[int, ...]) -> str:
    return (
        f"model must give features, because the drafter reads those of layers {feature_layers}, "
        f"but {type(model).__name__}.apply"
    )


def _check_features(
    model: CausalModel, feature_layers: tuple[int, ...], output: Any, token_ids: jax.Array
) -> None:
    """Check that there are features of tokens ``[B, S]``, ``[B, S, A H]``.

    Raises:
      TypeError: there are none.
      ValueError: they have another shape.
    """
    if not isinstance(output, TargetOutput) or output.features is None:
        must = _must_give_features(model, feature_layers)
        raise TypeError(f"{must} returns none: it must return a TargetOutput with features")
    shape = output.features.shape
    if len(shape) != 3 or shape[:2] != token_ids.shape or shape[2] % len(feature_layers):
        batch_size, length = token_ids.shape
        raise ValueError(
            f"features must be [B, S, A H] = [{batch_size}, {length}, {len(feature_layers)} H], "
            f"but {type(model).__name__}.apply returns {list(shape)}"
        )


def commit_path(model: CausalModel, cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
    """Returns the cache after a pass over trees, of which each request keeps one path of nodes.

    Args:
      model: a `CausalModel` that runs trees.
      cache: that the pass returned.
      start: ``[B]`` int32, as the pass was given it.
      path: ``[B, P]`` int32, the nodes that are kept, from node 0 on; -1 after the last.

    Raises:
      TypeError: the model has no `commit`, or its `apply` takes no `tree`.
    """
    check_runs_trees("model", model)
    owner: Any = model  # the method is optional, so not of the protocol
    return owner.commit(cache, start, path)


def check_runs_trees(name: str, model: CausalModel) -> None:
    """Checks that a model can run trees of drafts; see `CausalModel`.

    Args:
      name: of the argument.
      model: what was given for it.

    Raises:
      TypeError: its `apply` takes no `tree`, or it has no `commit`.
    """
    must = f"{name} must run trees of drafts, but {type(model).__name__}"
    if not _takes(model.apply, "tree"):
        raise TypeError(f"{must}.apply takes {inspect.signature(model.apply)}: use chains")
    if not callable(getattr(model, "commit", None)):
        raise TypeError(f"{must} has no method commit(cache, start, path): use chains")


def _takes(apply: Any, argument: str) -> bool:
    """Whether a model's `apply` takes an argument beside those of the protocol."""
    try:
        inspect.signature(apply).bind(None, None, None, None, **{argument: None})
    except TypeError:
        return False
    return True


def sharding_of(model: CausalModel) -> VerifySharding | None:
    """How the model's logits are split, if they are."""
    return getattr(model, "sharding", None)


def cache_batch_axis_of(owner: Any) -> int:
    """The axis of every array of a model's or drafter's cache that holds the requests."""
    if hasattr(owner, "serves"):
        axis: int = owner.serves.batch_axis
        return axis
    return getattr(owner, "cache_batch_axis", 0)


def check_batch_axis(name: str, owner: Any) -> None:
    """Checks that the cache of a model or drafter has an axis that holds the requests.

    Args:
      name: of the argument.
      owner: what was given for it.

    Raises:
      ValueError: an array has no such axis.
    """
    axis = cache_batch_axis_of(owner)
    one, two = (jax.eval_shape(lambda n=n: owner.init_cache(n, 8)) for n in (1, 2))

    def check(path: Any, one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> None:
        shape = list(one.shape)
        if axis < len(shape):
            shape[axis] *= 2
        if axis >= len(shape) or shape != list(two.shape):
            raise ValueError(
                f"{name}.init_cache must hold the requests along axis {axis}, as cache_batch_axis "
                f"says, but the shape of cache{jax.tree_util.keystr(path)} is {one.shape} for one "
                f"request and {two.shape} for two"
            )

    jax.tree.map_with_path(check, one, two)


def is_loaded_model(value: Any) -> bool:
    """Whether a value is a pair of model and params, such as `LoadedModel`."""
    return isinstance(value, tuple) and hasattr(value, "model") and hasattr(value, "params")


def check_params(name: str, owner: Any, params: Params) -> None:
    """Checks weights, as far as the model or drafter they are for knows how.

    Args:
      name: of the argument.
      owner: the model or drafter; None for no drafter.
      params: what was given for it.

    Raises:
      TypeError: they are a model, missing, or of another dtype.
      ValueError: a shape does not fit.
    """
    must, hint = "be a model's weights", "pass its .params"
    require(not is_loaded_model(params), name, must, params, hint, TypeError)
    check = getattr(owner, "check_params", None)
    if check is not None:
        check(name, params)


def check_cache(name: str, owner: Any, cache: Cache, batch_size: int, max_length: int) -> None:
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
    wanted = jax.eval_shape(lambda: owner.init_cache(batch_size, max_length))
    source = f"{type(owner).__name__}.init_cache({batch_size}, {max_length})"
    structure: Any = jax.tree.structure(wanted)
    found = jax.tree.structure(cache)
    require(found == structure, name, f"have the structure of {source}", found)
    for (path, like), leaf in zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(cache), strict=True
    ):
        has_shape = getattr(leaf, "shape", None) == like.shape
        if has_shape and leaf.dtype == like.dtype:
            continue
        must = f"be an array {list(like.shape)} of {like.dtype}, as in {source}"
        error = TypeError if has_shape else ValueError
        refuse(error, name + jax.tree_util.keystr(path), must, leaf)


def check_model(name: str, model: Any) -> None:
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
    methods = [getattr(model, method, None) for method in ("init_cache", "apply")]
    if isinstance(model, type) or not all(map(callable, methods)):
        raise TypeError(f"{name} must be a CausalModel, but it is {described(model)}")
    try:
        hash(model)
    except TypeError as error:
        raise TypeError(
            f"{name} must be hashable, because it is a static argument of jax.jit, but for "
            f"{type(model).__name__}: {error}. Keep arrays in params; a dataclass with frozen=True "
            "and eq=False is compared by identity"
        ) from None
    check_batch_axis(name, model)
