"""One launch that draws the last token of every request, where this device's part holds it.

The two-level inverse CDF of `sharded`: by what all parts hold a warp finds the piece, then the
tile, then the token. Each warp does so for one request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.types import DraftDistribution
from jax_specdec._src.verify.mosaic_gpu.config import WARPS
from jax_specdec._src.verify.mosaic_gpu.interpreted import Interpreted
from jax_specdec._src.verify.mosaic_gpu.launch import launch
from jax_specdec._src.verify.mosaic_gpu.mail import tree_sum
from jax_specdec._src.verify.mosaic_gpu.part_weights import Part, PartWeights, source_operands
from jax_specdec._src.verify.mosaic_gpu.pick import NONE, first_past
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Gpu
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.tiles import TILE


def part_draw(
    source: Source,
    recover: jax.Array,
    masses: jax.Array,
    held: jax.Array,
    target: jax.Array,
    distribution: DraftDistribution | None,
    first_id: jax.Array,
    *,
    size: int,
    unit_of: np.ndarray,
    rounding: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Draw by this part's `masses` and everyone's `held`.

    Args:
      source: what to draw from, ``[B]``; nothing where the row is negative.
      recover: ``[B, 2]`` float32 uniforms for tile and token.
      masses: ``[B, 2, n]`` float32, of `tile_masses`.
      held: ``[num_parts, B, 2, 3]`` float32: pieces of weights and of ``p``.
      target: ``[M, width]`` target logits of the part.
      distribution: draft distributions, with as many columns, or None.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary that count.
      unit_of: ``[3 * num_parts]``, which pieces are one unit, ascending; a lane for each.
      rounding: residual mass that counts as none.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[B]`` int32 tokens, 0 where another part holds it, and ``[B]`` bool, whether the residual
      has no mass.
    """
    num_parts, count = held.shape[0], source.row.shape[0]
    part = Part.of(target, distribution, size=size, num_parts=num_parts)
    operands = {
        "recover": recover.reshape(-1),
        "masses": masses.reshape(-1),
        "held": held.reshape(-1),
        "target": target,
        "first_id": first_id[None],
    }
    if distribution is not None:
        operands["draft"] = storage_of(distribution)
    operands |= source_operands(source, part)

    def draw(*args: Any) -> None:
        threads: Any = Interpreted() if interpret else Gpu()
        refs, (token_ids, bad) = dict(zip(operands, args, strict=False)), args[-2:]
        item = lax.axis_index("block") * WARPS + lax.div(threads.index(), WARP)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, refs, part, item, refs["first_id"][0])
        one = _Draw(weights, item, unit_of, rounding)
        is_wanted = inside & weights.is_wanted
        zero = threads.filled(0, jnp.int32)
        token_id, is_bad = threads.either(is_wanted, one.run, lambda: (zero, zero))
        writes = inside & (weights.lane == 0)
        threads.scatter(token_ids, item, token_id, writes)
        threads.scatter(bad, item, is_bad, writes)

    result = jax.ShapeDtypeStruct((count,), jnp.int32)
    token_ids, bad = launch(
        draw,
        list(operands.values()),
        out=[result, result],
        scratch=[],
        grid=("block", -(-count // WARPS)),
        interpret=interpret,
    )
    return token_ids, bad != 0


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
      unit_of: which pieces are one unit.
      rounding: residual mass that counts as none.
    """

    def __init__(self, weights: PartWeights, item: jax.Array, unit_of: np.ndarray, rounding: float):
        self.weights, self.item, self.rounding = weights, item, rounding
        self.threads, self.part, self.lane = weights.threads, weights.part, weights.lane
        self.unit_of = unit_of

    def run(self) -> tuple[jax.Array, jax.Array]:
        """The token, 0 where another part holds it, and whether the residual has no mass."""
        threads, weights, lane = self.threads, self.weights, self.lane
        batch = weights.refs["row"].shape[0]
        num_pieces = len(self.unit_of)
        is_piece = lane < num_pieces
        begin = jnp.minimum(lax.div(lane, 3), num_pieces // 3 - 1) * batch + self.item

        def pieces(kind: int) -> jax.Array:
            found = threads.gather(weights.refs["held"], begin * 6 + kind * 3 + lax.rem(lane, 3))
            return jnp.where(is_piece, found, 0.0)

        left, p = pieces(0), pieces(1)
        mass = threads.warp_sum(left)
        least = jnp.where(weights.from_residual, self.rounding, 0.0)
        is_left = mass > least  # else what is left of equal p and q is rounding
        weights.from_residual = weights.from_residual & is_left
        if weights.without is not None:
            weights.without = jnp.where(is_left, weights.without, -TILE)
        kind = jnp.where(is_left, 0, 1)
        pieces_of_all = jnp.where(is_left, left, p)

        # Pieces of one tile are one unit, as are the tiles that lie in one part alone.
        sums = threads.warp_scan(pieces_of_all)
        total = threads.from_lane(sums, WARP - 1)
        first, last = self._bounds()
        past_tile = self._uniform(0) * total
        chosen = first_past(
            self.threads, [pieces_of_all], [threads.from_lane(sums, last)], past_tile
        )
        first, last = threads.from_lane(first, chosen), threads.from_lane(last, chosen)
        before_unit = jnp.where(first > 0, threads.from_lane(sums, jnp.maximum(first - 1, 0)), 0.0)

        in_unit = jnp.where((lane >= first) & (lane <= last), pieces_of_all, 0.0)
        sums = threads.warp_scan(in_unit)
        past = self._uniform(1) * threads.from_lane(sums, WARP - 1)
        piece = first_past(threads, [in_unit], [sums], past)
        past = past - (threads.from_lane(sums, piece) - threads.from_lane(in_unit, piece))
        part_begins = weights.first_id == lax.div(piece, 3) * self.part.width
        token_id = threads.either(
            part_begins,
            lambda: self._token(lax.rem(piece, 3), kind, past_tile - before_unit, past),
            lambda: threads.filled(0, jnp.int32),
        )
        one, zero = (threads.filled(x, jnp.int32) for x in (1, 0))
        return token_id, jnp.where(mass != mass, one, zero)

    def _uniform(self, which: int) -> jax.Array:
        return self.threads.gather(self.weights.refs["recover"], self.item * 2 + which)

    def _bounds(self) -> tuple[jax.Array, jax.Array]:
        """By lane: the first and the last piece of a piece's unit."""
        first, last = self.lane, self.lane
        for unit in np.unique(self.unit_of):
            where = np.flatnonzero(self.unit_of == unit)
            if len(where) > 1:
                inside = (self.lane >= where[0]) & (self.lane <= where[-1])
                first = jnp.where(inside, int(where[0]), first)
                last = jnp.where(inside, int(where[-1]), last)
        return first, last

    def _token(
        self, which: jax.Array, kind: jax.Array, past_tile: jax.Array, past: jax.Array
    ) -> jax.Array:
        """The token: `which` is 0 in the part's first tile, 2 in its last, 1 in those between."""
        threads, part, first_id = self.threads, self.part, self.weights.first_id
        shift = TILE.bit_length() - 1
        last = ((first_id + part.width - 1) >> shift) - (first_id >> shift)
        begin = (self.item * 2 + kind) * part.count
        masses, sums, before = [], [], threads.filled(0.0)
        for i in range(0, part.count, WARP):
            place = self.lane + i
            found = threads.gather(
                self.weights.refs["masses"], begin + jnp.minimum(place, part.count - 1)
            )
            masses.append(jnp.where((place > 0) & (place < last), found, 0.0))
            sums.append(threads.warp_scan(masses[-1]) + before)
            before = threads.from_lane(sums[-1], WARP - 1)
        inner = jnp.minimum(first_past(threads, masses, sums, past_tile), part.count - 1)
        is_inner = which == 1
        tile = jnp.where(is_inner, inner, jnp.where(which == 0, 0, last))
        mass = threads.gather(self.weights.refs["masses"], begin + tile)
        past = jnp.where(is_inner, self._uniform(1) * mass, past)
        column = self.weights.either(lambda weights_of: self._in_tile(tile, past, weights_of))
        return first_id + jnp.clip(column, 0, part.width - 1)

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
