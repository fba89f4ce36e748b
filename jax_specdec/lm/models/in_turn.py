"""`InTurn`: groups of rows one after another, for models that run one group at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec.lm.models.protocol import CausalModel, HasCache
from jax_specdec.lm.models.rows import Cache, Output, Params, Rows, Serves, Wants

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class InTurn:
    """A `CausalModel` that runs several groups, also such with slots, by one pass for each.

    Attributes:
      model: runs one group, of all requests of a cache.
      max_length: positions of each request of the cache.
    """

    model: CausalModel
    max_length: int

    @property
    def vocab_size(self) -> int:
        """That of the model."""
        return self.model.vocab_size

    @property
    def serves(self) -> Serves:
        """What the model serves, and several groups."""
        return dataclasses.replace(self.model.serves, groups=True)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns the model's cache."""
        return self.model.init_cache(batch_size, max_length)

    def apply(
        self, params: Params, groups: Sequence[Rows], cache: Cache, wants: Wants = Wants()
    ) -> tuple[list[Output], Cache]:
        """Runs group after group; see `CausalModel`."""
        outputs = []
        for rows in groups:
            alone = rows._replace(slots=None)

            def run(cache: Cache, alone: Rows = alone) -> tuple[Cache, Output]:
                (output,), cache = self.model.apply(params, [alone], cache, wants)
                return cache, output

            if rows.slots is None:
                cache, output = run(cache)
            else:
                axis = self.model.serves.batch_axis
                cache, output = run_in_slots(self.model, axis, cache, rows, self.max_length, run)
            outputs.append(output)
        return outputs, cache

    def commit(self, cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
        """Calls that of the model."""
        return self.model.commit(cache, start, path)

    def check_params(self, name: str, params: Params) -> None:
        """Calls that of the model."""
        self.model.check_params(name, params)


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

    def cleared(old: jax.Array, new: jax.Array) -> jax.Array:
        # [R] -> [.., R entries, ..], along the axis of the requests
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
        size = some.shape[axis] // slots.shape[0]
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
        size = new.shape[axis] // slots.shape[0]
        for row in range(slots.shape[0]):  # a scatter would copy where `axis` is not the first
            one = lax.slice_in_dim(new, row * size, (row + 1) * size, axis=axis)
            all_ = lax.dynamic_update_slice_in_dim(all_, one, slots[row] * size, axis)
        return all_

    return jax.tree.map(put, cache, some)
