"""A check of a model's pass: do a token's results depend on the row that it is read in?"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.base.arrays import check_int

Params = Any
Cache = Any
Outputs = Any  # each a pytree of arrays

Apply = Callable[[Params, jax.Array, jax.Array, Cache], tuple[Outputs, Cache]]
"""``(params, token_ids [B, S], start [B], cache) -> outputs, cache``, as a pass of a model."""

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class RowDependence:
    """What differs between two readings of one text.

    Attributes:
      output: the first array that differs: of the cache, such as ``"cache[3][0]"``, or else of the
        outputs. Keys of a layer depend on the layers before it.
      reason: what it depends on: ``"its row"``, or ``"its slot or neighbours"``.
      num_texts: how many of the texts differ there.

    Example: see `row_dependence`.
    """

    output: str
    reason: str
    num_texts: int


def row_dependence(
    apply: Apply,
    params: Params,
    init_cache: Callable[[int, int], Cache],
    *,
    vocab_size: int,
    num_requests: int,
    num_rows: int,
    max_length: int,
    batch_axis: int = 0,
    seed: int = 0,
) -> RowDependence | None:
    """Returns what of a token depends on its row in a pass, or on its neighbours; None if nothing.

    Speculative decoding changes no bit of a text only if a token's logits, and what the cache holds
    of it, are the same in whatever row of a pass it is read. Not all products are so. This reads B
    random texts three times, by passes of one shape: token by token in the first row, before random
    drafts that are then rejected; so in another slot, beside other texts; and with several tokens
    of a text in a pass. Each text begins at another position, after random keys and values. In the
    end it compares outputs and caches, as bits: a hash of 32 bits of each array, token and text.

    Args:
      apply: the pass: token s of request b is at position ``start[b] + s``. `outputs` are a pytree
        of arrays ``[B, S, ...]``, such as the logits. It is compiled once.
      params: weights.
      init_cache: of B and T, returns an empty cache, a pytree of arrays.
      vocab_size: V, from which tokens are drawn.
      num_requests: B.
      num_rows: S, the rows of a request in each pass: K + 1.
      max_length: T, positions of a request in the cache; more than S. The more, the farther apart
        the texts begin.
      batch_axis: the axis of the cache's arrays that holds the requests.
      seed: of what is random.

    Raises:
      TypeError: a number is no integer.
      ValueError: a number is too small.

    Example:
      Scores that depend on the row:

      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> def apply(table, token_ids, start, cache):
      ...     return table[token_ids] * jnp.array([1, 1, 1.001])[None, :, None], cache
      >>> table = jax.random.normal(jax.random.key(0), (8, 8))
      >>> sizes = dict(vocab_size=8, num_requests=2, num_rows=3, max_length=32)
      >>> sd.testing.row_dependence(apply, table, lambda *sizes: (), **sizes)
      RowDependence(output='outputs', reason='its row', num_texts=2)
      >>> def apply(table, token_ids, start, cache):
      ...     return table[token_ids], cache
      >>> sd.testing.row_dependence(apply, table, lambda *sizes: (), **sizes)
    """
    check_int("vocab_size", vocab_size)
    check_int("num_requests", num_requests)
    check_int("num_rows", num_rows, 2)
    check_int("max_length", max_length, num_rows + 1)
    rng = np.random.default_rng(seed)
    # N: passes enough that each text is read in several rows, but not past the end of the cache
    size = min(4 * num_rows, max_length - num_rows)
    # [B, N + S]: N tokens of each text, and S that follow
    texts = rng.integers(vocab_size, size=(num_requests, size + num_rows), dtype=np.int32)
    # [B]: from the last position that leaves room to the first
    starts = np.linspace(max_length - size - num_rows, 0, num_requests).astype(np.int32)

    @functools.partial(jax.jit, donate_argnums=3)
    def run(
        params: Params, ids: jax.Array, start: jax.Array, cache: Cache
    ) -> tuple[Outputs, Cache]:
        """Returns the hashes ``[B, S]`` of a pass's outputs, and the cache."""
        outputs, cache = apply(params, ids, start, cache)
        return jax.tree.map(lambda x: _hashes(x, ids.shape), outputs), cache

    @jax.jit
    def filled() -> Cache:
        """Returns a cache that holds the same noise for each request."""
        fill = functools.partial(_with_noise, seed=seed, num_requests=num_requests, axis=batch_axis)
        return jax.tree.map(fill, init_cache(num_requests, max_length))

    @jax.jit
    def hashes_of_cache(cache: Cache) -> Cache:
        """Returns the hashes ``[B]`` of each array of a cache."""
        # [B, ...]: requests first
        firsts = jax.tree.map(lambda x: jnp.moveaxis(x, batch_axis, 0), cache)
        return jax.tree.map(lambda x: _hashes(x, (num_requests,)), firsts)

    def read(shift: int, least: int, most: int) -> dict[str, np.ndarray]:
        """Returns for each array the hashes ``[B]`` or ``[B, N]`` of the texts, by its name."""
        cache = filled()
        # [B]: the text of each slot, and how many tokens of it were read
        order = np.roll(np.arange(num_requests), shift)
        at = np.zeros(num_requests, np.int32)
        passes = []
        while at.min() < size:
            # [B]: so many rows are of the text; the others are drafts, and rejected
            kept = np.minimum(rng.integers(least, most + 1, num_requests), size - at)
            row = np.arange(num_rows)[None, :]
            # [B, S]: the tokens of the text that come next, then drafts in place of some
            own = texts[order[:, None], at[:, None] + row]
            drafts = rng.integers(vocab_size, size=own.shape, dtype=np.int32)
            ids = np.where(row < kept[:, None], own, drafts)
            hashes, cache = run(params, ids, starts[order] + at, cache)
            # Hashes stay on the device, so that no pass waits for them.
            passes.append((at.copy(), kept, hashes))
            at += kept.astype(np.int32)
        # What stands behind the texts is the same then, too.
        _, cache = run(params, texts[order, size:], starts[order] + at, cache)
        found = {}
        # [B] each, by slot -> by text
        for path, hashes in jax.tree.leaves_with_path(jax.device_get(hashes_of_cache(cache))):
            found["cache" + jax.tree_util.keystr(path)] = hashes[np.argsort(order)]
        # [B, S] of each pass -> [B, N]: of rejected drafts nothing is kept
        for at, kept, outputs in jax.device_get(passes):
            for path, hashes in jax.tree.leaves_with_path(outputs):
                name = "outputs" + jax.tree_util.keystr(path)
                whole = found.setdefault(name, np.zeros((num_requests, size), np.uint32))
                for slot, text in enumerate(order):
                    place = slice(at[slot], at[slot] + kept[slot])
                    whole[text, place] = hashes[slot, : kept[slot]]
        return found

    alone = read(shift=0, least=1, most=1)
    # Some wait for others, so that those beside a token are not the same ones in another order.
    readings = {"its slot or neighbours": (1, 0, 1), "its row": (0, 1, num_rows)}
    for reason, given in readings.items():
        for name, hashes in read(*given).items():
            differs = hashes != alone[name]
            # [B] or [B, N] -> []: how many texts have a hash that differs
            num_texts = int(differs.reshape(num_requests, -1).any(axis=1).sum())
            if num_texts:
                return RowDependence(name, reason, num_texts)
    return None


def _hashes(x: jax.Array, kept: tuple[int, ...]) -> jax.Array:
    """Returns hashes ``[*kept]`` of the bits of an array, which depend on the place of each."""
    # Booleans have no bits that can be cast.
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    words = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    # [*kept, n]: 64 bits are two words, the last axis of the cast
    words = words.reshape(*kept, -1).astype(jnp.uint32)
    # Mixed before they are added: in a sum of the words themselves, however weighted, flipped sign
    # bits cancel in pairs.
    place = lax.broadcasted_iota(jnp.uint32, words.shape, len(kept))
    return jnp.sum(_mixed(words ^ _mixed(place)), axis=-1, dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Returns 32 bits of which each depends on all 32 bits of x, one for each x.

    The finalizer of MurmurHash3 (Appleby, 2011), after an addition: 0 does not stay 0.
    """
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _with_noise(x: jax.Array, seed: int, num_requests: int, axis: int) -> jax.Array:
    """Returns an array of the cache plus noise from -2 to 2, the same for each request."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # The shape of one request's part
    shape = [*x.shape]
    shape[axis] //= num_requests
    # `jax.random` takes ten times as long to compile.
    place = lax.iota(jnp.uint32, math.prod(shape))
    # Signed integers of 32 bits, times 2**-30
    bits = _mixed(place ^ _mixed(jnp.uint32(seed % 2**32)))
    noise = lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * 2.0**-30
    # As many times as there are requests: a text finds the same noise in every slot.
    one = noise.astype(x.dtype).reshape(shape)
    return x + jnp.concatenate([one] * num_requests, axis=axis)
