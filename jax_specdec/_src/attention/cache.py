"""The keys and values of a layer: how they may lie in memory, and rows written, moved and laid out.

Three layouts are distinguished by their shapes:

- heads first, keys ``[B * Nkv, D, T]`` and values ``[B * Nkv, T, D]``, as products read them;
- positions first, ``[B, T, Nkv, D]`` both;
- pages, ``[P, page, Nkv, D]`` both, with a table ``pages [B, L]``: position t of request b is row
  ``t % page`` of page ``pages[b, t // page]``, and T is ``L * page``.

A pool ``[P, Nkv, page, D]``, which others call HND, is none of them. Its shape shows it only where
the heads are known, and differ.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import LOGITS, Sizes, as_int32, check_array, require
from jax_specdec._src.base.types import Integers
from jax_specdec._src.rows.blocks import laid_as

Array = jax.Array | np.ndarray
LayerCache = tuple[jax.Array, jax.Array]
"""Keys and values of one layer, of all requests."""

HEADS_LAST = (
    "heads lie after positions, where swapaxes(1, 2) puts those of a pool [P, Nkv, page, D]"
)
"""Ends the message about keys whose second axis has the size of heads."""


def check_cache(keys: Array, values: Array, pages: Array | None, dtype: str, sizes: Sizes) -> None:
    """Checks the shapes and dtypes of a layer's cache, and adds "Nkv" and "T" to `sizes`.

    Args:
      keys: of any layout.
      pages: the table, or None.
      dtype: that they may have, in the words of `check_array`; both have the same.
      sizes: of the call; "B" is known. "Nkv" becomes 0 where the heads are not those of B requests.

    Raises:
      TypeError: an array of another dtype.
      ValueError: an array of another shape.
    """
    hint = None
    if pages is not None:
        check_array("pages", pages, "[B, L] int32", sizes)
    # New keys of a call say how many heads there are: then a pool with heads first shows.
    is_4d = len(getattr(keys, "shape", ())) == 4
    if is_4d and sizes.get("Nkv") == keys.shape[1] != keys.shape[2]:
        hint = HEADS_LAST
    if pages is not None:
        check_array("keys", keys, f"[P, page, Nkv, D] {dtype}", sizes, hint)
        check_array("values", values, f"[P, page, Nkv, D] {keys.dtype}", sizes)
        sizes["T"] = sizes["L"] * sizes["page"]
        require(sizes["P"] or not sizes["T"], "keys", "have a page", keys)
    elif is_4d:
        hint = hint or "a pool of pages needs `pages`"
        check_array("keys", keys, f"[B, T, Nkv, D] {dtype}", sizes, hint)
        check_array("values", values, f"[B, T, Nkv, D] {keys.dtype}", sizes)
    else:
        check_array("keys", keys, f"[B*Nkv, D, T] {dtype}", sizes)
        check_array("values", values, f"[B*Nkv, T, D] {keys.dtype}", sizes)
        heads = keys.shape[0]
        batch_size = sizes["B"]
        # Heads of all requests lie one after another: Nkv is a share of them.
        is_whole = batch_size > 0 and heads % batch_size == 0
        sizes.setdefault("Nkv", heads // batch_size if is_whole else 0)


def room_of(keys: jax.Array, pages: Array | None) -> int:
    """Returns T, the positions of a request."""
    if pages is not None:
        return pages.shape[1] * keys.shape[1]
    return keys.shape[1 if keys.ndim == 4 else 2]


def heads_first(keys: jax.Array, values: jax.Array, pages: jax.Array | None) -> LayerCache:
    """Returns keys ``[B * Nkv, D, T]`` and values ``[B * Nkv, T, D]`` of a cache of any layout."""
    if keys.ndim == 3:
        return keys, values
    if pages is not None:
        # [P, page, Nkv, D] -> [B, L, page, Nkv, D] -> [B, T, Nkv, D]. An entry that names no page
        # reads another one: it is of positions that nobody sees.
        shape = pages.shape[0], room_of(keys, pages), *keys.shape[2:]
        keys = keys.at[pages].get(mode="clip").reshape(shape)
        values = values.at[pages].get(mode="clip").reshape(shape)
    batch_size, room, num_kv, head_dim = keys.shape
    # [B, T, Nkv, D] -> [B, Nkv, D, T] -> [B * Nkv, D, T], and values likewise
    keys = keys.transpose(0, 2, 3, 1).reshape(batch_size * num_kv, head_dim, room)
    values = values.transpose(0, 2, 1, 3).reshape(batch_size * num_kv, room, head_dim)
    return keys, values


def of_slots(cache: LayerCache, slots: jax.Array, num_kv: int, room: int) -> LayerCache:
    """Returns copies of keys ``[B * Nkv, D, room]`` and values ``[B * Nkv, room, D]`` of B slots.

    Slices, one after another: a CPU gathers number by number.
    """
    # Without the barrier XLA for CPUs lays the whole cache out as the product of one slot wants it.
    cache = lax.optimization_barrier(cache)
    size = slots.shape[0]

    def copied(array: jax.Array, *shape: int) -> jax.Array:
        # Heads of a request lie one after another.
        first = [slots[b] * num_kv for b in range(size)]
        slices = [lax.dynamic_slice(array, (head, 0, 0), (num_kv, *shape)) for head in first]
        return slices[0] if size == 1 else jnp.concatenate(slices)

    keys, values = cache
    head_dim = keys.shape[1]
    return copied(keys, head_dim, room), copied(values, room, head_dim)


def write_cache(
    keys: Array,
    values: Array,
    new_keys: Array,
    new_values: Array,
    start: Integers,
    *,
    pages: Array | None = None,
) -> LayerCache:
    """Writes the keys and values of S new rows of each request into a layer's cache.

    Row s of request b is written to position ``start[b] + s``, where `decode_attention` looks for
    it. Under `jax.jit` with ``donate_argnums=(0, 1)`` the cache is changed in place. A row is
    dropped if its position is not one of 0 to T - 1, or if its entry of `pages` names no page.

    What is written as a value is finite: a number of it that is not is written as 0, and that of
    its key as NaN, so that those who see it read NaN, and others do not. A cache of zeros into
    which nothing else writes keeps the promise of `finite_cache`.

    Args:
      keys: ``[B * Nkv, D, T]``, ``[B, T, Nkv, D]`` or with `pages` ``[P, page, Nkv, D]``; float32,
        bfloat16 or float16. Over explicit mesh axes XLA splits the call, and the cache stays where
        it lies.
      values: as `keys`, or ``[B * Nkv, T, D]`` beside the first.
      new_keys: ``[B, S, Nkv, D]``, of the dtype of `keys`.
      new_values: likewise.
      start: ``[B]`` int32, tokens that are in the cache before the new rows.
      pages: ``[B, L]`` int32, the pages of each request in the order of its positions, ``T = L *
        page``. Where two requests write to one place, either may stay; a page that they share must
        lie before the `start` of both.

    Returns:
      `keys` and `values` with the new rows.

    Raises:
      TypeError: an argument of another dtype.
      ValueError: shapes that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> pool = jnp.zeros((3, 2, 1, 1)), jnp.zeros((3, 2, 1, 1))  # three pages of two positions
      >>> rows = jnp.array([[5.0, 6.0, 7.0]]).reshape(1, 3, 1, 1)
      >>> start, pages = jnp.array([1], jnp.int32), jnp.array([[2, 0]], jnp.int32)
      >>> keys, values = sd.write_cache(*pool, rows, rows, start, pages=pages)
      >>> keys[:, :, 0, 0].tolist()
      [[6.0, 7.0], [0.0, 0.0], [0.0, 5.0]]
    """
    sizes: Sizes = {}
    check_array("new_keys", new_keys, f"[B, S, Nkv, D] {LOGITS}", sizes)
    check_array("new_values", new_values, f"[B, S, Nkv, D] {new_keys.dtype}", sizes)
    start = as_int32("start", start, "[B]", sizes)
    check_cache(keys, values, pages, str(new_keys.dtype), sizes)
    cache = jnp.asarray(keys), jnp.asarray(values)
    new = jnp.asarray(new_keys), jnp.asarray(new_values)
    return laid_as(cache, _write_cache, cache, new, start, pages)


def move_rows(
    cache: tuple[Array, Array], start: Integers, path: Array, *, pages: Array | None = None
) -> LayerCache:
    """Moves what a layer's cache holds of the nodes of a path together, once a tree is verified.

    Position ``start[b] + j`` then holds what ``start[b] + path[b, j]`` held before. Under `jax.jit`
    with the cache donated it is changed in place. What would go to a position that is not one of 0
    to T - 1, or to an entry of `pages` that names no page, is dropped.

    Args:
      cache: keys and values of a layer, as for `write_cache`.
      start: ``[B]`` int32, the position of each request's node 0.
      path: ``[B, J]`` int32, increasing, such as `RejectionSampleOutput.path`; nothing is moved to
        ``start[b] + j`` where it is negative.
      pages: ``[B, L]`` int32, as for `write_cache`.

    Returns:
      The cache, changed.

    Raises:
      TypeError: an argument of another dtype.
      ValueError: shapes that do not fit, or a cache that is not two arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> rows = jnp.arange(6.0).reshape(1, 6, 1, 1)  # [B, T, Nkv, D], position t holds t
      >>> start, path = jnp.array([1], jnp.int32), jnp.array([[0, 2, 4, -1]], jnp.int32)
      >>> keys, values = sd.move_rows((rows, rows), start, path)
      >>> keys[0, :, 0, 0].tolist()
      [0.0, 1.0, 3.0, 5.0, 4.0, 5.0]
    """
    sizes: Sizes = {}
    must = "be two arrays, keys and values of a layer"
    require(isinstance(cache, (tuple, list)), "cache", must, cache, error=TypeError)
    require(len(cache) == 2, "cache", must, cache)
    keys, values = cache
    start = as_int32("start", start, "[B]", sizes)
    path = as_int32("path", path, "[B, J]", sizes)
    check_cache(keys, values, pages, LOGITS, sizes)
    keys = jnp.asarray(keys)
    values = jnp.asarray(values)
    if not keys.size:
        return keys, values
    require(sizes["Nkv"], "keys", f"have B * Nkv heads, for B = {sizes['B']}", keys)
    move = functools.partial(_move_rows, sizes["Nkv"])
    return laid_as((keys, values), move, (keys, values), start, path, pages)


def _write_cache(
    cache: LayerCache, new: LayerCache, start: jax.Array, pages: Array | None
) -> LayerCache:
    """Returns the cache with new rows; see `write_cache`."""
    # [1, S] -> [B, S]: the position of each new row, then its place in memory
    index = jnp.arange(new[0].shape[1], dtype=jnp.int32)[None, :]
    blocks, rows = _places(cache[0], start[:, None] + index, pages)
    return write_rows(cache, *new, rows, blocks)


def _move_rows(
    num_kv: int, cache: LayerCache, start: jax.Array, path: jax.Array, pages: Array | None
) -> LayerCache:
    """Returns the cache with rows moved; see `move_rows`."""
    keys, values = cache
    index = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    # [B, J]: where each entry is, and where it goes. What is not moved goes nowhere.
    source = _places(keys, start[:, None] + path, pages)
    target = _places(keys, jnp.where(path < 0, -1, start[:, None] + index), pages)
    # [B, J, Nkv, D]
    key, value = _get(cache, *source, num_kv)
    # All is read before anything is written. Without the barrier XLA for GPUs reads as it writes,
    # for which it copies the whole cache.
    key, value, keys, values = lax.optimization_barrier((key, value, keys, values))
    return _set((keys, values), *target, key, value, mode="drop", is_unique=pages is None)


def write_rows(
    cache: LayerCache,
    key: jax.Array,
    value: jax.Array,
    rows: jax.Array,
    blocks: jax.Array | None = None,
) -> LayerCache:
    """Returns a layer's cache with the keys and values of rows at given places, values finite.

    Args:
      cache: of any layout.
      key: ``[G, S, Nkv, D]``.
      value: as `key`.
      rows: ``[G, S]`` int32, positions of requests, or rows of pages. With `blocks`, one past the
        end is not written; without, there is none.
      blocks: int32 of a shape that broadcasts to ``[G, S]``, the requests or pages that they are
        of; None: row g is of request g.
    """
    # Number by number: one NaN in a key makes its score NaN, and on a GPU a search for others in
    # the value would be a launch of its own.
    is_finite = jnp.isfinite(value)
    key = jnp.where(is_finite, key, jnp.nan)
    value = jnp.where(is_finite, value, 0)
    # Two rows may name one place, such as those of a prompt that comes twice.
    if blocks is not None:
        return _set(cache, blocks, rows, key, value, mode="drop", is_unique=False)
    keys, values = cache
    if key.shape[:2] == (1, 1) and keys.ndim == 3:
        # XLA for GPUs makes two launches of a scatter of one row, and one of this.
        # [1, 1, Nkv, D] -> [Nkv, D, 1] and [Nkv, 1, D]
        key = key[0, 0, :, :, None]
        value = value[0, 0, :, None, :]
        new_keys = lax.dynamic_update_slice(keys, key, (0, 0, rows[0, 0]))
        return new_keys, lax.dynamic_update_slice(values, value, (0, rows[0, 0], 0))
    # One row of each request of the cache, at places that exist: a scatter is spared its checks.
    blocks = jnp.arange(key.shape[0])[:, None]  # [G, 1]
    return _set(cache, blocks, rows, key, value, mode="promise_in_bounds", is_unique=True)


def _places(
    keys: jax.Array, position: jax.Array, pages: Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns blocks, which are requests or pages, and their rows, of positions ``[B, S]``.

    What is not in the cache is past the end: in a request at a row of its own, or in no page.
    """
    room = room_of(keys, pages)
    # [B, S]
    is_inside = (position >= 0) & (position < room)
    if pages is None:
        index = jnp.arange(position.shape[1], dtype=jnp.int32)[None, :]
        blocks = jnp.arange(position.shape[0])[:, None]  # [B, 1]
        return blocks, jnp.where(is_inside, position, room + index)
    num_pages, page = keys.shape[:2]
    # [B, L] -> [B, S]
    block = jnp.take_along_axis(jnp.asarray(pages), position // page, axis=1, mode="clip")
    return jnp.where(is_inside & (block >= 0), block, num_pages), position % page


def _get(
    cache: LayerCache, blocks: jax.Array, rows: jax.Array, num_kv: int
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values ``[G, S, Nkv, D]`` at the places of `_places`."""
    keys, values = cache
    if keys.ndim == 4:
        key, value = (x.at[blocks, rows].get(mode="clip") for x in cache)
        return key, value
    # [B * Nkv, D, T] -> [B, Nkv, D, T], and values likewise
    keys = keys.reshape(-1, num_kv, *keys.shape[1:])
    values = values.reshape(-1, num_kv, *values.shape[1:])
    # The axes of indices with slices between them come first: [G, S, Nkv, D].
    key = keys.at[blocks, :, :, rows].get(mode="clip")
    return key, values.at[blocks, :, rows].get(mode="clip")


def _set(
    cache: LayerCache,
    blocks: jax.Array,
    rows: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mode: str,
    is_unique: bool,
) -> LayerCache:
    """Returns a cache with ``[G, S, Nkv, D]`` at the places of `_places`."""
    keys, values = cache
    if keys.ndim == 4:
        new_keys = keys.at[blocks, rows].set(key, mode=mode, unique_indices=is_unique)
        return new_keys, values.at[blocks, rows].set(value, mode=mode, unique_indices=is_unique)
    # [B * Nkv, D, T] -> [B, Nkv, D, T], and values likewise
    num_kv = key.shape[2]
    batch_size = keys.shape[0] // max(num_kv, 1)
    new_keys = keys.reshape(batch_size, num_kv, *keys.shape[1:])
    new_values = values.reshape(batch_size, num_kv, *values.shape[1:])
    # The axes of indices with slices between them come first: [G, S, Nkv, D], as in `key`.
    new_keys = new_keys.at[blocks, :, :, rows].set(key, mode=mode, unique_indices=is_unique)
    new_values = new_values.at[blocks, :, rows].set(value, mode=mode, unique_indices=is_unique)
    # -> [B * Nkv, D, T] and [B * Nkv, T, D]
    return new_keys.reshape(keys.shape), new_values.reshape(values.shape)
