"""`decode_attention`: what the newest rows of each request read of its cache."""

from __future__ import annotations

import functools
import math
import numbers
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.attention import xla
from jax_specdec._src.attention.arrays import (
    AttentionArrays,
    AttentionImplementation,
    AttentionStatic,
)
from jax_specdec._src.attention.cache import HEADS_LAST, check_cache, room_of
from jax_specdec._src.base.arrays import (
    LOGITS,
    Sizes,
    as_int32,
    check_array,
    check_choice,
    check_int,
    check_type,
    require,
)
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.base.tree import TREE_MASK_BITS
from jax_specdec._src.base.types import Integers
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.rows.blocks import explicit_mesh, laid_as


def decode_attention(
    query: jax.Array | np.ndarray,
    keys: jax.Array | np.ndarray,
    values: jax.Array | np.ndarray,
    start: Integers,
    *,
    pages: jax.Array | np.ndarray | None = None,
    tree_mask: jax.Array | np.ndarray | None = None,
    window: int | None = None,
    depth: jax.Array | np.ndarray | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    finite_cache: bool = False,
    implementation: AttentionImplementation | None = None,
) -> jax.Array:
    """Returns what S new rows of each request read of its cache: ``softmax(scale q k) v``.

    B requests, S rows of each, N query heads, Nkv heads of keys and values (N / Nkv query heads
    share one), D numbers of a head, T positions of room in the cache. The keys and values of the S
    new rows are in the cache already, at positions ``start[b]`` to ``start[b] + S - 1``.

    Row s of request b sees position t if ``t < start[b]``, or if it may see it: for a chain, ``t <=
    start[b] + s``; otherwise as `tree_mask` says, which may also name positions beyond the S new
    rows that other calls have written.

    Scores and softmax are float32. The result does not depend on what lies at positions that a row
    does not see, even where that is NaN; nor, beyond rounding, on T or on the other requests. For a
    given shape of the call, the bits of a row depend on the row and on what it sees alone: not on
    who is beside its request, nor on `start` and the row's place among the S.
    A request whose `start` does not fit its cache gets undefined rows; the others are not affected.

    It has derivatives, forward and reverse, unless a kernel is named; what a row does not see does
    not reach them either. Over explicit mesh axes XLA splits the call, and the result lies as
    `query` does; the kernel runs inside `jax.shard_map`.

    Args:
      query: ``[B, S, N, D]`` float32, bfloat16 or float16.
      keys: of the dtype of `query`: ``[B * Nkv, D, T]``, ``[B, T, Nkv, D]``, or with `pages`
        ``[P, page, Nkv, D]``. A pool ``[P, Nkv, page, D]`` (HND elsewhere) needs ``swapaxes(1,
        2)``: it is refused where `page` does not divide N, and read wrongly where it does.
      values: likewise; beside the first, ``[B * Nkv, T, D]``.
      start: ``[B]`` int32, tokens that were in the cache before the new rows.
      pages: ``[B, L]`` int32: position t of request b is row ``t % page`` of page ``pages[b, t //
        page]``, and T is ``L * page``. Requests may share pages. Entries of positions that no row
        sees are not looked at, whatever they hold.
      tree_mask: ``[S, 2]`` or ``[B, S, 2]`` uint32, for S of at most 64: bit ``j % 32`` of word
        ``j // 32`` says whether the row sees position ``start[b] + j``, for j from 0 to 63,
        whatever S is. A tree sets the bits of a row's ancestors and its own; a block that sees all
        of itself sets S bits. Rows may be written elsewhere than from `start` on, within these 64
        positions, as a tree is that grows by a level a call. Bits of positions from T on are not
        looked at. Each row must see a position. None for a chain.
      window: a row at position ``start[b] + s`` sees no position up to ``start[b] + s - window``;
        with `tree_mask`, no row sees one up to ``start[b] - window``, or as `depth` says. None for
        all positions.
      depth: ``[B, S]`` int32, with `tree_mask` and a window: the window of row s is counted back
        from position ``start[b] + depth[b, s]``, that of a node of a tree in its sequence. None for
        0. Positions from `start[b]` on are seen as `tree_mask` says, within the window or not.
      softcap: a bound of the scores: ``softcap * tanh(x / softcap)`` stands for each ``x = scale q
        k``, as in Gemma 2. None for the scores as they are.
      scale: multiplies products of queries and keys, in float32; None for ``1 / sqrt(D)``.
      finite_cache: a promise that no entry of `values` is NaN or infinite, which spares XLA a
        check; a row that is may then make others NaN. `write_cache` keeps values so.
      implementation: "mosaic_gpu", a Pallas kernel for Hopper GPUs whose cost follows the tokens
        that each request has; "xla", whose cost follows T; None for the kernel where it serves the
        call (bfloat16 and float16, D of 64, 128 or 256, T a multiple of 64, pages of a multiple of
        16 positions) and is no slower: always, but for small caches ``[B * Nkv, D, T]``.

    Returns:
      ``[B, S, N, D]``, of the dtype of `query`.

    Raises:
      TypeError: an argument of another dtype, or `start` not integers.
      ValueError: shapes that do not fit, a `start` out of the range of int32, a cache without
        room, `tree_mask` for more than 64 rows, a window below 1, `depth` without `tree_mask`, or a
        soft cap or a scale that is no finite number above 0.
      NotImplementedError: "mosaic_gpu" was named and does not serve the call; the message says why.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> query, cache = jnp.ones((1, 2, 4, 8)), jnp.zeros((2, 8, 16))
      >>> values = jnp.arange(16.0)[None, :, None] * jnp.ones((2, 1, 8))  # position t holds t
      >>> read = sd.decode_attention(query, cache, values, jnp.array([4], jnp.int32))
      >>> read[0, :, 0, 0].tolist()  # the means of 0..4 and of 0..5
      [2.0, 2.5]
    """
    sizes: Sizes = {}
    # Shapes and dtypes, and heads that share keys alike.
    check_array("query", query, f"[B, S, N, D] {LOGITS}", sizes)
    dtype = query.dtype
    check_cache(keys, values, pages, str(dtype), sizes)
    start = as_int32("start", start, "[B]", sizes)
    batch_size, num_rows, num_heads, num_kv = (sizes[name] for name in ("B", "S", "N", "Nkv"))
    must = f"have B * Nkv heads, for B = {batch_size} and N = {num_heads} query heads"
    hint = None
    if np.ndim(keys) == 4:
        must = f"have a number of heads Nkv that divides N = {num_heads}"
        hint = HEADS_LAST if keys.shape[1] and num_heads % keys.shape[1] == 0 else None
    is_empty = 0 in query.shape  # it reads nothing
    require(is_empty or (num_kv and num_heads % num_kv == 0), "keys", must, keys, hint)
    # The cache has room for the rows, which in a chain lie one after another.
    has_room = is_empty or sizes["T"]
    require(has_room, "pages" if sizes.get("L") == 0 else "keys", "have room for a position", keys)
    must = f"have at most T = {sizes['T']} rows, the positions of the cache"
    require(is_empty or tree_mask is not None or num_rows <= sizes["T"], "query", must, query)
    if tree_mask is not None:
        check_array("tree_mask", tree_mask, "[S, 2] or [B, S, 2] uint32", {**sizes, "2": 2})
        must = f"be None for more than {TREE_MASK_BITS} rows"
        require(num_rows <= TREE_MASK_BITS, "tree_mask", must, tree_mask)
    if window is not None:
        window = check_int("window", window, 1)
    if depth is not None:
        check_array("depth", depth, "[B, S] int32", sizes)
        require(tree_mask is not None, "depth", "be None without tree_mask", depth)
    check_type("finite_cache", finite_cache, bool)
    for name, number in (("softcap", softcap), ("scale", scale)):
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        is_above = is_number and 0 < typing.cast(float, number) < math.inf
        require(number is None or is_above, name, "be a finite number above 0, or None", number)
    check_choice(
        "implementation", implementation, (None, *typing.get_args(AttentionImplementation))
    )
    if is_empty:
        return jnp.zeros(query.shape, dtype)
    # The call, split over devices if its arrays are.
    given = dict(query=query, keys=keys, values=values, start=start, pages=pages, depth=depth)
    arrays = AttentionArrays(**jax.tree.map(jnp.asarray, given))
    static = AttentionStatic(
        scale=float(scale or query.shape[-1] ** -0.5),
        window=window,
        softcap=None if softcap is None else float(softcap),
        finite_cache=finite_cache,
        implementation=implementation,
    )
    return attend(arrays, static, tree_mask)


def attend(
    arrays: AttentionArrays, static: AttentionStatic, tree_mask: jax.Array | np.ndarray | None
) -> jax.Array:
    """Returns what `decode_attention` does, of arrays that need no checks.

    Args:
      arrays: without `tree_mask`.
      static: without `num_visible`.
    """
    batch_size, num_rows = arrays.query.shape[:2]
    if 0 in arrays.query.shape:
        return jnp.zeros_like(arrays.query)
    if tree_mask is not None:
        static = static._replace(num_visible=_num_visible(tree_mask, num_rows))
        each = jnp.broadcast_to(jnp.asarray(tree_mask), (batch_size, num_rows, 2))
        arrays = arrays._replace(tree_mask=each)
    room = room_of(arrays.keys, arrays.pages)
    if static.window is None or static.window >= room:
        static = static._replace(window=None)  # of all positions
        arrays = arrays._replace(depth=None)
    mesh = explicit_mesh(arrays)
    if mesh is not None and mesh.size > 1:  # no kernel is split by a partitioner
        static = static._replace(implementation=static.implementation or "xla")
    run = functools.partial(_decode_attention, static=static)
    return laid_as(arrays.query, run, arrays)


def _num_visible(tree_mask: jax.Array | np.ndarray, num_rows: int) -> int:
    """Returns how many positions from `start` on rows may see: S if bits are known, else 64.

    The kernel reads so many. The bits of a block are a constant, and it sees the S new rows alone.
    """
    if not isinstance(tree_mask, np.ndarray):
        return TREE_MASK_BITS
    # The bits that any row has: positions past the S new rows have none?
    low, high = np.bitwise_or.reduce(tree_mask.reshape(-1, 2), axis=0)
    bits = int(low) | int(high) << 32
    return num_rows if bits >> num_rows == 0 else TREE_MASK_BITS


@functools.partial(jax.jit, static_argnums=1)
def _decode_attention(arrays: AttentionArrays, static: AttentionStatic) -> jax.Array:
    only = "cuda" if static.implementation == "mosaic_gpu" else None
    return traced_for_platform(_attend, arrays, static, only=only)


def _attend(arrays: AttentionArrays, static: AttentionStatic, platform: Platform) -> jax.Array:
    """Chooses an implementation, in Python."""
    is_named = static.implementation == "mosaic_gpu"
    by_default = not static.implementation and platform == "cuda" and not _is_small(arrays)
    if is_named or (by_default and not gpus.not_by_default()):
        why_not = _unserved(arrays)
        if not why_not:
            from jax_specdec._src.attention import mosaic_gpu  # which imports Pallas

            return mosaic_gpu.attend(arrays, static)
        if is_named:
            raise NotImplementedError(f"implementation='mosaic_gpu' {why_not}")
    if platform != "cpu":
        arrays = arrays._replace(max_seen=None)  # a GPU waits for the host to choose
    elif _is_one_row(arrays):
        # Of one row in 16 bits XLA makes no product, but a sum, for which it converts the cache: 50
        # times as long for a large one. So each head comes twice. [B, 1, N, D] -> [B, 1, 2 N, D]
        twice = arrays._replace(query=jnp.repeat(arrays.query, 2, axis=2))
        return xla.attend(twice, static)[:, :, ::2]
    return xla.attend(arrays, static)


def _is_one_row(arrays: AttentionArrays) -> bool:
    """Returns whether each product is of one row in 16 bits: one new row and head for its keys."""
    batch_size, num_rows, num_heads, _ = arrays.query.shape
    heads = arrays.keys.shape[0] if arrays.keys.ndim == 3 else batch_size * arrays.keys.shape[2]
    is_one = num_rows == 1 and batch_size * num_heads == heads
    return is_one and arrays.query.dtype.itemsize == 2


def _is_small(arrays: AttentionArrays) -> bool:
    """Returns whether XLA takes less time, because it launches less; measured on an H100."""
    if arrays.keys.ndim == 4 or arrays.slots is not None:
        return False  # XLA moves such a cache first, and copies slots
    batch_size, num_rows = arrays.query.shape[:2]
    room = room_of(arrays.keys, arrays.pages)
    # Positions and not bytes: as many bytes of D = 256 take either one less time, by how they are
    # spread over requests and how long texts are. XLA reads less for a row than for several.
    least = 4097 if num_rows == 1 else 4096
    return batch_size * room < least or (num_rows == 1 and room <= 512)


def _unserved(arrays: AttentionArrays) -> str | None:
    """Returns why the kernel does not serve a call, the end of a sentence; None if it does."""
    query = arrays.query
    head_dim = query.shape[-1]
    room = room_of(arrays.keys, arrays.pages)
    if arrays.depth is not None:
        return "counts windows back from start alone, but depth is given"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, but query is {query.dtype}"
    if head_dim not in (64, 128, 256):
        return f"takes heads of D = 64, 128 and 256, but D is {head_dim}"
    if room % 64 or not room:  # tiles of the copy engine
        return f"takes caches of T positions, a multiple of 64, but T is {room}"
    if arrays.pages is not None and arrays.keys.shape[1] % 16:
        return f"takes pages of a multiple of 16 positions, but they have {arrays.keys.shape[1]}"
    if jax.typeof(query).manual_axis_type.varying:
        return "knows nothing of how values vary over a mesh: give jax.shard_map check_vma=False"
    return None
