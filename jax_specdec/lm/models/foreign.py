"""Models of others as a `CausalModel`: caches with one write index for the whole batch.

Most JAX models keep one index that says where the whole batch writes next. Speculative decoding
needs one per request. Here each request runs as a batch of one under `jax.vmap`, with the index set
to its own position. Nothing of theirs is imported: give the functions, or the nnx module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.lm.models.plain import OneGroup
from jax_specdec.lm.models.protocol import Cache, Params, Serves

Call = Callable[[Params, jax.Array, jax.Array, Cache, jax.Array], tuple[jax.Array, Cache]]
"""``(params, token_ids [1, S], positions [1, S], cache, mask [1, S, T]) -> logits, cache``."""

NewCache = Callable[[int], Cache]
"""``max_length -> cache`` of one request, a pytree of arrays."""


@dataclasses.dataclass(frozen=True, eq=False)
class OneIndexModel(OneGroup):
    """A `CausalModel` of a model whose cache has one write index for the whole batch.

    Equal to itself only, because most graph definitions and functions have no useful equality:
    make it once, and use that object everywhere. A new one compiles all programs again.

    Attributes:
      vocab_size: V.
      call: runs S tokens of one request. Token s is at ``positions[0, s]``, writes its entry there,
        and sees the entries t of the cache with ``mask[0, s, t]``, which is ``t <= positions[0,
        s]``. Returns logits ``[1, S, V]`` and the cache.
      new_cache: the empty cache of one request with room for ``max_length`` tokens. An array whose
        shape does not depend on `max_length` must have an axis that is as long.
      index: a name in the path of each write index in the cache ("end_index"), and of nothing else.
        They are set to ``positions[0, 0]``, whatever their shape. None: `call` takes it from
        `positions`.

    Example:
      A functional model that adds up the embeddings it has seen.

      >>> import jax, jax.numpy as jnp
      >>> def call(params, token_ids, positions, cache, mask):
      ...     rows = jax.lax.dynamic_update_slice(
      ...         cache["rows"], params[token_ids[0]], (cache["end_index"], 0))
      ...     cache = {"rows": rows, "end_index": cache["end_index"] + token_ids.shape[1]}
      ...     return (mask[0].astype(rows.dtype) @ rows)[None], cache
      >>> def new_cache(max_length):
      ...     return {"rows": jnp.zeros((max_length, 3)), "end_index": jnp.int32(0)}
      >>> model = OneIndexModel(3, call, new_cache, index="end_index")
      >>> cache = model.init_cache(batch_size=2, max_length=8)
      >>> table = jnp.arange(9.0).reshape(3, 3)
      >>> _, cache = model.run(table, jnp.array([[2, 0], [1, 1]]), jnp.array([0, 0]), cache)
      >>> logits, cache = model.run(table, jnp.array([[1], [0]]), jnp.array([1, 2]), cache)
      >>> logits.tolist()
      [[[9.0, 11.0, 13.0]], [[6.0, 9.0, 12.0]]]
    """

    vocab_size: int
    call: Call
    new_cache: NewCache
    index: str | None = None

    @property
    def serves(self) -> Serves:
        """One group of consecutive tokens, and the name of the write index."""
        return Serves(index=self.index)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns the cache of each request, one after another along a new first axis.

        Raises:
          ValueError: no array of the cache has the name `index`; or one has fewer positions than
            `max_length`, as a ring has: rejected drafts would overwrite what it held before.
        """
        of_request = jax.tree.map(jnp.asarray, self.new_cache(max_length))
        arrays = jax.tree_util.tree_leaves_with_path(of_request)
        if self.index is not None and not any(self.serves.is_index(path) for path, _ in arrays):
            raise ValueError(f"index must be a name in the cache, but {self.index!r} is not in it")
        shortest = jax.eval_shape(lambda: self.new_cache(1))
        for (path, array), least in zip(arrays, jax.tree.leaves(shortest), strict=True):
            # The axis of positions is the one that grows with max_length, wherever they have it. If
            # none does, as in a cache of fixed size, it may be any.
            grows = [n for n, small in zip(array.shape, least.shape, strict=True) if n != small]
            # A number that all positions share is no part of a ring.
            holds_all = not array.ndim or max(grows or array.shape) >= max_length
            if not (self.serves.is_index(path) or holds_all):
                raise ValueError(
                    f"new_cache must have max_length = {max_length} positions, but the shape of "
                    f"cache{jax.tree_util.keystr(path)} is {array.shape}: a ring cannot take back "
                    "rejected drafts"
                )
        # The room is written down as a shape, for the mask.
        room = jnp.zeros((batch_size, max_length), bool)
        # [...] -> [1, ...] -> [B, ...]
        return jax.tree.map(lambda x: jnp.repeat(x[None], batch_size, axis=0), of_request), room

    def run(
        self, params: Params, token_ids: jax.Array, start: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Returns logits ``[B, S, V]`` and the cache; see `OneGroup.run`."""
        # Caches with a first axis of B, and [B, T] of nothing but its shape.
        caches, room = cache
        length = token_ids.shape[1]
        max_length = room.shape[1]

        def run_request(
            token_ids: jax.Array, start: jax.Array, cache: Cache
        ) -> tuple[jax.Array, Cache]:
            """Returns logits ``[S, V]`` of one request, and its cache."""
            # One request: token_ids [S], start [], positions [S], mask [S, T].
            positions = start + jnp.arange(length, dtype=jnp.int32)
            mask = jnp.arange(max_length, dtype=jnp.int32)[None, :] <= positions[:, None]
            # Their index says where they write next, which is what a rollback moves.
            cache = jax.tree_util.tree_map_with_path(
                lambda path, x: jnp.full_like(x, start) if self.serves.is_index(path) else x, cache
            )
            # They take a batch, here of one: [S] -> [1, S], [S, T] -> [1, S, T].
            logits, after = self.call(params, token_ids[None], positions[None], cache, mask[None])
            # [1, S, V] -> [S, V]
            return logits[0], after

        # Over requests: [B, S, V]. `run_request` closes over the weights, the same for all.
        logits, caches = jax.vmap(run_request)(token_ids, start, caches)
        return logits, (caches, room)


def from_nnx(
    nnx: Any,
    module: Any,
    call: Call,
    new_cache: NewCache,
    *,
    vocab_size: int,
    index: str | None = None,
) -> tuple[OneIndexModel, Params]:
    """Returns an nnx module as a model, and its params.

    The module is split once, here, and merged inside each traced call.

    Args:
      nnx: the module ``flax.nnx``.
      module: an ``nnx.Module``.
      call: as in `OneIndexModel`, with the merged module in the place of the params.
      new_cache: as in `OneIndexModel`.
      vocab_size: V.
      index: as in `OneIndexModel`.

    Returns:
      The model, and its params: the module's state.

    Example:
      ``nnx`` may be anything that splits and merges.

      >>> import types
      >>> import jax.numpy as jnp
      >>> nnx = types.SimpleNamespace(
      ...     split=lambda table: ("graph", {"table": table}),
      ...     merge=lambda graph, state: state["table"])
      >>> def call(table, token_ids, positions, cache, mask):
      ...     return table[token_ids], cache
      >>> model, params = from_nnx(nnx, jnp.eye(3), call, lambda max_length: (), vocab_size=3)
      >>> logits, _ = model.run(
      ...     params, jnp.array([[2]]), jnp.array([0]), model.init_cache(1, 4))
      >>> logits.tolist()
      [[[0.0, 0.0, 1.0]]]
    """
    # The graph is static, and closed over; the state is the weights, a pytree of arrays.
    graph, params = nnx.split(module)

    def merged(
        params: Params, token_ids: jax.Array, positions: jax.Array, cache: Cache, mask: jax.Array
    ) -> tuple[jax.Array, Cache]:
        return call(nnx.merge(graph, params), token_ids, positions, cache, mask)

    return OneIndexModel(vocab_size, merged, new_cache, index), params


def from_tunix(nnx: Any, module: Any) -> tuple[OneIndexModel, Params]:
    """Returns a language model of google/tunix (written for its Qwen3) as a model, and its params.

    Args:
      nnx: the module ``flax.nnx``.
      module: a model with tunix's ``module(tokens, positions, cache, attention_mask)``,
        ``init_cache(batch, length, dtype)``, ``config.vocab_size`` and ``config.dtype``.

    Returns:
      The model, and its params: the module's state.
    """
    config = module.config

    def call(
        module: Any, token_ids: jax.Array, positions: jax.Array, cache: Cache, mask: jax.Array
    ) -> tuple[jax.Array, Cache]:
        return module(token_ids, positions, cache, mask)

    return from_nnx(
        nnx,
        module,
        call,
        lambda max_length: module.init_cache(1, max_length, config.dtype),
        vocab_size=config.vocab_size,
        index="end_index",
    )


def from_keras_hub(keras: Any, module: Any) -> tuple[OneIndexModel, Params]:
    """Returns a ``CausalLM`` of keras-hub, with Keras's JAX backend, as a model, and its params.

    For those whose ``call_with_cache(token_ids, cache, cache_update_index)`` has no more arguments,
    such as its Llama, Qwen3, Mistral, Gemma and GPT-2.

    Args:
      keras: the module ``keras``.
      module: a ``keras_hub.models.CausalLM``.

    Returns:
      The model, and its params: a list of the values of the variables of ``module.backbone``.
    """
    variables = module.backbone.variables

    def call(
        params: Params, token_ids: jax.Array, positions: jax.Array, cache: Cache, mask: jax.Array
    ) -> tuple[jax.Array, Cache]:
        # They make a mask of their own, from the index. Inside the scope, each variable has the
        # value that is passed, so that weights are arguments of the program and no constants.
        del mask
        with keras.StatelessScope(state_mapping=list(zip(variables, params, strict=True))):
            logits, _, cache = module.call_with_cache(token_ids, cache, positions[0, 0])
        return logits, cache

    def new_cache(max_length: int) -> Cache:
        # Theirs runs the prompt to fill a cache; here only its shape is asked for.
        ids = jax.ShapeDtypeStruct((1, max_length), jnp.int32)
        like = jax.eval_shape(lambda ids: module._build_cache(ids)[1], ids)
        return jnp.zeros(like.shape, like.dtype)

    model = OneIndexModel(module.backbone.vocabulary_size, call, new_cache)
    return model, [variable.value for variable in variables]
