"""`Device`: how a kind of device does what rows and draws are made of, as it does it best.

It knows arrays alone: `VocabRows` and `Q` hold one, and so does each backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.platform import Platform
from jax_specdec._src.rows.blocks import BLOCK, by_blocks, take_few

LANES = 128
"""Lanes of a TPU's registers."""

_MOST_SUMMED_APART = 256
"""Up to so many weights, one sum for each costs less than a cumulative sum."""


class Device:
    """A GPU, or a device that nothing is known of."""

    def in_blocks(self, function: Callable[..., Any], index: jax.Array, *arrays: Any) -> Any:
        """Returns ``function(*arrays)``, which reads rows ``index [n]``, some of them at a time.

        Row -1 need not be read: the result for it is undefined.
        """
        return function(*arrays)  # all rows: a GPU gathers them in place

    def each_row(self, function: Callable[..., Any], count: int, *arrays: Any) -> Any:
        """Returns ``function(None, *arrays)``, which reads all rows of a matrix where they are.

        Or it reads the rows ``index [n]`` of it, if that is the first argument. The arrays have an
        entry for each of the `count` rows.
        """
        return function(None, *arrays)

    def take(self, tree: Any, index: jax.Array) -> Any:
        """Returns ``x[index]`` of matrices, for rows ``[n]`` in range."""
        return jax.tree.map(lambda x: x[index], tree)

    def bits(self, words: jax.Array) -> jax.Array:
        """Returns the bits of words ``[..., n]`` as ``[..., 32 n]`` bool, perhaps with more."""
        # [..., n] -> [..., n, 4, 1] octets -> [..., n, 4, 8] bits -> [..., 32 n]
        octets = lax.bitcast_convert_type(words, jnp.uint8)[..., None]  # lowest bits first
        places = jnp.arange(8, dtype=jnp.uint8).reshape((1,) * words.ndim + (1, 8))
        return ((octets >> places) & 1 == 1).reshape(*words.shape[:-1], -1)

    def listed(
        self, ids: jax.Array, entries: jax.Array, first: jax.Array, length: int, fill: float
    ) -> jax.Array:
        """Returns ``[n, length]``: the entries of the ids from ``first[i]`` on.

        Args:
          ids: ``[n, C]`` int32, those that are listed.
          entries: ``[n, C]`` float32.
          first: ``[n]`` int32.
          length: how many ids are asked for.
          fill: the entry of an id that is not listed.
        """
        # [n, length]: the ids asked for
        asked = first[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        return entries_of(ids, entries, asked, fill)

    def pick(self, weights: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the places picked of weights ``[n, m, L]`` by ``u [n]``, and totals ``[n, m]``.

        The place picked is the least whose inclusive sum exceeds ``u * total``. It never has weight
        zero: if rounding leaves none, it is the last of positive weight.
        """
        index = jnp.arange(weights.shape[2], dtype=jnp.int32)
        if weights.shape[2] > _MOST_SUMMED_APART:
            sums = jnp.cumsum(weights, axis=-1)
        else:  # [n, m, L, L]: a sum for each, one kernel on a GPU
            is_before = index[None, :] <= index[:, None]
            sums = jnp.sum(jnp.where(is_before, weights[..., None, :], 0.0), axis=-1)
        return _pick_by_sums(weights, index, sums, u)

    def pick_of_both(
        self, both: jax.Array, u: jax.Array, may_have_mass: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Does `pick` on the first of two rows of weights, or on the second if it has no mass.

        Args:
          both: ``[n, 2, L]``.
          u: ``[n]`` uniforms.
          may_have_mass: ``[n]`` bool, if False the second is drawn from; None for all True.

        Returns:
          The places ``[n]``, and the totals ``[n]`` of the first.
        """
        place, totals = self.pick(both, u)  # of both rows: fewer operations than to choose first
        total = totals[:, 0]
        return jnp.where(_has_mass(total, may_have_mass), place[:, 0], place[:, 1]), total


class Cpu(Device):
    """A CPU: it reads one row after another, which stays in its cache."""

    def in_blocks(self, function: Callable[..., Any], index: jax.Array, *arrays: Any) -> Any:
        return by_blocks(function, 1, index, *arrays)

    def each_row(self, function: Callable[..., Any], count: int, *arrays: Any) -> Any:
        if count == 1:
            return function(None, *arrays)
        # [count]: the index of every row, which is also an array of the call
        index = jnp.arange(count, dtype=jnp.int32)
        return self.in_blocks(function, index, index, *arrays)

    def take(self, tree: Any, index: jax.Array) -> Any:
        return take_few(tree, index)

    def listed(
        self, ids: jax.Array, entries: jax.Array, first: jax.Array, length: int, fill: float
    ) -> jax.Array:
        # By n * C writes: faster on a CPU than n * length * C comparisons.
        place = ids - first[:, None]
        place = jnp.where(place < 0, length, place)  # dropped
        # [n, length]: each listed entry goes to the place of its id
        found = jnp.full((ids.shape[0], length), fill, jnp.float32)
        these = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return found.at[these, place].set(entries, mode="drop")


class Tpu(Device):
    """A TPU: it reads a few rows at a time, which fit in its vector memory."""

    def in_blocks(self, function: Callable[..., Any], index: jax.Array, *arrays: Any) -> Any:
        return by_blocks(function, BLOCK, index, *arrays)

    def take(self, tree: Any, index: jax.Array) -> Any:
        return take_few(tree, index)

    def bits(self, words: jax.Array) -> jax.Array:
        # It is slow to move numbers between lanes, but a product with zeros and ones does it: one
        # octet goes to eight lanes, exactly.
        missing = -words.shape[-1] % (LANES // 32)
        words = jnp.pad(words, (*[(0, 0)] * (words.ndim - 1), (0, missing)))
        # [..., n, 4], then [..., octets / 16, 16]: an octet goes into one of 16 lanes
        octets = jnp.stack([(words >> i) & 255 for i in range(0, 32, 8)], axis=-1)
        octets = octets.reshape(*words.shape[:-1], -1, LANES // 8).astype(jnp.bfloat16)
        to_lanes = jnp.repeat(jnp.eye(LANES // 8, dtype=jnp.bfloat16), 8, axis=1)
        # [..., octets / 16, 128]: each lane has the octet that its bit is in
        given = jnp.dot(octets, to_lanes, preferred_element_type=jnp.float32).astype(jnp.int32)
        places = lax.broadcasted_iota(jnp.int32, given.shape, given.ndim - 1) % 8
        return ((given >> places) & 1 == 1).reshape(*words.shape[:-1], -1)

    def pick(self, weights: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = jnp.arange(weights.shape[2], dtype=jnp.int32)
        return _pick_by_sums(weights, index, _sums_by_matrix(weights), u)

    def pick_of_both(
        self, both: jax.Array, u: jax.Array, may_have_mass: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        # Which row it is comes first: a product with a matrix costs more than a sum.
        total = jnp.sum(both[:, 0], axis=1)
        is_first = _has_mass(total, may_have_mass)
        # [n, L]: one row is left
        weights = jnp.where(is_first[:, None], both[:, 0], both[:, 1])
        return self.pick(weights[:, None], u)[0][:, 0], total


def device_of(platform: Platform) -> Device:
    """Returns the kind of device of a platform."""
    return {"cpu": Cpu(), "tpu": Tpu()}.get(platform, Device())


def entries_of(listed: jax.Array, entries: jax.Array, asked: jax.Array, fill: float) -> jax.Array:
    """Returns the entries of ids ``asked [n, L]``, of those that are ``listed [n, C]``."""
    # [n, L, C]: which of the listed ids it is, if any
    hits = listed[:, None, :] == asked[:, :, None]
    found = jnp.sum(jnp.where(hits, entries[:, None, :], 0.0), axis=2)
    return jnp.where(jnp.any(hits, axis=2), found, fill)


def _pick_by_sums(
    weights: jax.Array, index: jax.Array, sums: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Does `Device.pick`, from the places ``index [L]`` and the cumulative sums ``[n, m, L]``."""
    size = weights.shape[2]
    # [n, m]
    total = sums[:, :, -1]
    place = index[None, None, :]
    positive = weights > 0
    # [n, m, L]: whether the sum up to here exceeds the share of the total that u is
    hit = positive & (sums > (u[:, None] * total)[:, :, None])
    # One reduction finds the first hit, or else the last of positive weight, counted from the end.
    key = jnp.where(hit, place, jnp.where(positive, 2 * size - place, 2 * size))
    found = jnp.min(key, axis=2)
    return jnp.where(found < size, found, 2 * size - found), total


def _has_mass(total: jax.Array, may_have_mass: jax.Array | None) -> jax.Array:
    """Returns ``total > 0``, and False where `may_have_mass` is."""
    return total > 0 if may_have_mass is None else may_have_mass & (total > 0)


def _sums_by_matrix(x: jax.Array) -> jax.Array:
    """Returns the cumulative sums of the last axis of ``[n, m, L]``.

    128 entries at a time by a triangular matrix, then of the sums of these.
    """
    size = x.shape[-1]
    index = jnp.arange(LANES, dtype=jnp.int32)
    ones = (index[:, None] <= index[None, :]).astype(jnp.float32)
    missing = [(0, 0)] * (x.ndim - 1) + [(0, -size % LANES)]
    # [n, m, chunks, 128]
    chunks = jnp.pad(x, missing).reshape(*x.shape[:-1], -1, LANES)
    inside = jnp.matmul(chunks, ones, precision=lax.Precision.HIGHEST)
    # [n, m, chunks]: the sum of all chunks before each
    chunk = jnp.arange(chunks.shape[-2], dtype=jnp.int32)
    is_before = chunk[None, :] < chunk[:, None]
    before = jnp.sum(jnp.where(is_before, inside[..., None, :, -1], 0.0), axis=-1)
    return (inside + before[..., None]).reshape(*x.shape[:-1], -1)[..., :size]
