"""One launch that weighs the tiles of many rows: what a device knows of its part of each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import DraftDistribution
from jax_specdec._src.verify.mosaic_gpu.config import WARPS
from jax_specdec._src.verify.mosaic_gpu.interpreted import Interpreted
from jax_specdec._src.verify.mosaic_gpu.launch import launch
from jax_specdec._src.verify.mosaic_gpu.mail import tree_sum
from jax_specdec._src.verify.mosaic_gpu.part_weights import Part, PartWeights, source_operands
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Gpu
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import storage_of

_AT_ONCE = 4
"""Reads of each row that a thread begins before it uses one."""


def tile_masses(
    source: Source,
    target: jax.Array,
    distribution: DraftDistribution | None,
    first_id: jax.Array,
    *,
    size: int,
    num_parts: int,
    interpret: Any = False,
) -> jax.Array:
    """Sums of this part's weights, and of its ``p``, by tile.

    Args:
      source: what to weigh, ``[G]``; nothing where the row is negative.
      target: ``[M, width]`` target logits of the part.
      distribution: draft distributions, with as many columns, or None.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary that count.
      num_parts: parts of the vocabulary.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[G, 2, n]`` float32, as of `resample.Weights.masses`; 0 where the row is negative.
    """
    part = Part.of(target, distribution, size=size, num_parts=num_parts)
    operands = {"target": target, "first_id": first_id[None]}
    if distribution is not None:
        operands["draft"] = storage_of(distribution)
    operands |= source_operands(source, part)
    count = source.row.shape[0]

    def weigh(*args: Any) -> None:
        threads: Any = Interpreted() if interpret else Gpu()
        refs, masses = dict(zip(operands, args, strict=False)), args[-1]
        warp = lax.axis_index("block") * WARPS + lax.div(threads.index(), WARP)
        item, tile = lax.div(warp, part.count), lax.rem(warp, part.count)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, refs, part, item, refs["first_id"][0])
        nothing = threads.filled(0.0), threads.filled(0.0)

        def add(weights_of: Any) -> tuple[jax.Array, jax.Array]:
            def step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Any:
                groups = range(min(_AT_ONCE, part.groups))
                starts = [weights.start(tile, i * len(groups) + j) for j in groups]
                found = zip(*weights_of(starts), strict=True)
                return tuple(s + tree_sum(sum(xs, [])) for s, xs in zip(sums, found, strict=True))

            steps = part.groups // min(_AT_ONCE, part.groups)
            found, p = lax.fori_loop(0, steps, step, nothing)
            return threads.warp_sum(found), threads.warp_sum(p)

        is_wanted = inside & weights.is_wanted
        sums = threads.either(is_wanted, lambda: weights.either(add), lambda: nothing)
        for kind, total in enumerate(sums):
            place = (item * 2 + kind) * part.count + tile
            threads.scatter(masses, place, total, inside & (weights.lane == 0))

    (masses,) = launch(
        weigh,
        list(operands.values()),
        out=[jax.ShapeDtypeStruct((count * 2 * part.count,), jnp.float32)],
        scratch=[],
        grid=("block", -(-count * part.count // WARPS)),
        interpret=interpret,
    )
    return masses.reshape(count, 2, part.count)
