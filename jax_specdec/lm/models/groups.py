"""Groups of rows through any model: in one pass where it serves that, else one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.lm.models.protocol import CausalModel, HasCache, check_runs_trees
from jax_specdec.lm.models.rows import Cache, Output, Params, Rows, Wants

_Result = TypeVar("_Result")


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
      params: the weights.
      groups: of any number.
      cache: from `init_cache` or a previous call.
      wants: as for `CausalModel.apply`.
      max_length: positions of each request of the cache; only read for groups with slots.

    Raises:
      TypeError: features are wanted, and the model gives none; or rows are trees, and it runs none.
      ValueError: the features of a group are not ``[G, S, A*H]``.
    """
    kind = type(model).__name__
    layers = wants.feature_layers
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
    if not layers:
        return outputs, cache
    for rows, output in zip(groups, outputs, strict=True):
        if output.features is None:
            raise TypeError(f"{must} {kind}.apply returns none")
        shape = output.features.shape
        if len(shape) != 3 or shape[:2] != rows.token_ids.shape or shape[2] % len(layers):
            size, length = rows.token_ids.shape
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
    assert rows.slots is not None
    empty = owner.init_cache(rows.slots.shape[0], length)
    own = take_cache(cache, empty, rows.slots, axis)
    is_new = rows.start == 0

    # A cache may hold more than positions, such as a count, which only an empty one resets.
    def cleared(old: jax.Array, new: jax.Array) -> jax.Array:
        # [R] -> [R entries] -> [.., R entries, ..], along the axis of the requests
        each = jnp.repeat(is_new, new.shape[axis] // is_new.shape[0])
        shape = [1] * new.ndim
        shape[axis] = each.shape[0]
        return jnp.where(each.reshape(shape), new, old)

    own, result = run(jax.tree.map(cleared, own, empty))
    return put_cache(cache, own, rows.slots, axis), result


def take_cache(cache: Cache, like: Cache, slots: jax.Array, axis: int) -> Cache:
    """Returns the caches of R requests, out of a cache of all.

    Args:
      cache: of S requests.
      like: of R requests; its shapes are used.
      slots: ``[R]`` int32.
      axis: that holds the requests.
    """

    def take(all_: jax.Array, some: jax.Array) -> jax.Array:
        size = some.shape[axis] // slots.shape[0]  # entries of one request
        # R times [.., entries, ..] -> [.., R entries, ..]
        rows = [
            lax.dynamic_slice_in_dim(all_, slots[row] * size, size, axis)
            for row in range(slots.shape[0])
        ]
        return jnp.concatenate(rows, axis=axis)

    return jax.tree.map(take, cache, like)


def put_cache(cache: Cache, some: Cache, slots: jax.Array, axis: int) -> Cache:
    """Returns `cache` with the caches of R requests in the place of what `slots` held.

    Args:
      cache: of S requests; changed in place if it is donated.
      some: of R requests.
      slots: ``[R]`` int32.
      axis: that holds the requests.
    """

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        size = new.shape[axis] // slots.shape[0]  # entries of one request
        # One after another: a scatter would copy the cache where `axis` is not the first.
        for row in range(slots.shape[0]):
            one = lax.slice_in_dim(new, row * size, (row + 1) * size, axis=axis)
            all_ = lax.dynamic_update_slice_in_dim(all_, one, slots[row] * size, axis)
        return all_

    return jax.tree.map(put, cache, some)
