"""One launch that draws the last token of every request whose token is in this device's part.

`resample.choose` has chosen the tile; each warp finds the token inside it, for one request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import DraftDistribution
from jax_specdec._src.verify.mosaic_gpu.config import WARPS
from jax_specdec._src.verify.mosaic_gpu.interpreted import Interpreted
from jax_specdec._src.verify.mosaic_gpu.launch import launch
from jax_specdec._src.verify.mosaic_gpu.mail import tree_sum
from jax_specdec._src.verify.mosaic_gpu.part_weights import Part, PartWeights, source_operands
from jax_specdec._src.verify.mosaic_gpu.pick import NONE
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Gpu
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import storage_of


def part_draw(
    source: Source,
    tile: jax.Array,
    past: jax.Array,
    target: jax.Array,
    distribution: DraftDistribution | None,
    first_id: jax.Array,
    *,
    size: int,
    interpret: Any = False,
) -> jax.Array:
    """Draw the first token whose inclusive sum of weights, in its tile, exceeds a mass.

    Args:
      source: what to draw from, ``[B]``; nothing where the row is negative.
      tile: ``[B]`` int32, counted from the tile that the part begins in.
      past: ``[B]`` float32, the mass.
      target: ``[M, width]`` target logits of the part.
      distribution: draft distributions, with as many columns, or None.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary that count.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[B]`` int32 tokens, 0 where nothing is drawn.
    """
    count = source.row.shape[0]
    part = Part.of(target, distribution, size=size, num_parts=1)
    operands = {"tile": tile, "past": past, "target": target, "first_id": first_id[None]}
    if distribution is not None:
        operands["draft"] = storage_of(distribution)
    operands |= source_operands(source, part)

    def draw(*args: Any) -> None:
        threads: Any = Interpreted() if interpret else Gpu()
        refs, token_ids = dict(zip(operands, args, strict=False)), args[-1]
        item = lax.axis_index("block") * WARPS + lax.div(threads.index(), WARP)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, refs, part, item, refs["first_id"][0])
        one = _Draw(weights, item)
        is_wanted = inside & weights.is_wanted
        zero = threads.filled(0, jnp.int32)
        token_id = threads.either(is_wanted, one.run, lambda: zero)
        threads.scatter(token_ids, item, token_id, inside & (weights.lane == 0))

    (token_ids,) = launch(
        draw,
        list(operands.values()),
        out=[jax.ShapeDtypeStruct((count,), jnp.int32)],
        scratch=[],
        grid=("block", -(-count // WARPS)),
        interpret=interpret,
    )
    return token_ids


class _Pick(NamedTuple):
    """What each lane has seen of the groups of a tile.

    Attributes:
      place: ``[128]`` int32, its first group whose sum exceeds what is aimed at; `NONE` for none.
      before: ``[128]`` float32, the sum before it.
      last: ``[128]`` int32, its last group of mass, -1 for none.
      before_last: ``[128]`` float32, the sum before it.
    """

    place: jax.Array
    before: jax.Array
    last: jax.Array
    before_last: jax.Array


class _Draw:
    """One warp at work on one request, while the kernel is traced.

    Args:
      weights: of the ids of the part.
      item: ``[128]`` int32, the request.
    """

    def __init__(self, weights: PartWeights, item: jax.Array):
        self.weights, self.item = weights, item
        self.threads, self.part, self.lane = weights.threads, weights.part, weights.lane

    def run(self) -> jax.Array:
        """The token."""
        refs, gather = self.weights.refs, self.threads.gather
        tile, past = gather(refs["tile"], self.item), gather(refs["past"], self.item)
        column = self.weights.either(lambda weights_of: self._in_tile(tile, past, weights_of))
        return self.weights.first_id + jnp.clip(column, 0, self.part.width - 1)

    def _in_tile(self, tile: jax.Array, past: jax.Array, weights_of: Any) -> jax.Array:
        """The column picked in a tile: first the group of a thread, then the id in it."""
        threads, weights = self.threads, self.weights

        def look(i: jax.Array, state: tuple[_Pick, jax.Array]) -> tuple[_Pick, jax.Array]:
            seen, before = state
            ((group, _),) = weights_of([weights.start(tile, i)])
            mass = tree_sum(list(group))
            total = before + threads.warp_scan(mass)
            place, so_far = i * WARP + self.lane, total - mass
            hit = (mass > 0) & (total > past) & (seen.place == NONE)
            seen = _Pick(
                jnp.where(hit, place, seen.place),
                jnp.where(hit, so_far, seen.before),
                jnp.where(mass > 0, place, seen.last),
                jnp.where(mass > 0, so_far, seen.before_last),
            )
            return seen, threads.from_lane(total, WARP - 1)

        zero = threads.filled(0.0)
        nothing = _Pick(threads.filled(NONE, jnp.int32), zero, threads.filled(-1, jnp.int32), zero)
        seen, _ = lax.fori_loop(0, self.part.groups, look, (nothing, zero))
        place = threads.warp_min(seen.place)
        last = -threads.warp_min(-seen.last)
        is_hit = place < NONE
        place = jnp.maximum(jnp.where(is_hit, place, last), 0)
        owner = jnp.bitwise_and(place, WARP - 1)
        running = jnp.where(is_hit, seen.before, seen.before_last)

        start = weights.start(tile, lax.div(place, WARP))
        ((group, _),) = weights_of([start])
        found, searching = start, running == running
        for j, weight in enumerate(group):
            take = (weight > 0) & searching
            found = jnp.where(take, start + j, found)
            running = running + weight
            searching = searching & ~(take & (running > past))
        return threads.from_lane(found, owner)
