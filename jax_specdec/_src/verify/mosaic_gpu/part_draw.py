"""One launch that draws the last token of every request whose token is in this device's part.

`resample.choose` and `resample.draw` in one: each warp chooses the tile of one request by the
masses of all parts, and finds the token inside it if this part holds it.
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
from jax_specdec._src.verify.mosaic_gpu.pick import NONE, first_past
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Gpu
from jax_specdec._src.verify.resample import Source, pieces_of_tiles
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.tiles import TILE


def part_draw(
    source: Source,
    recover: jax.Array,
    masses: jax.Array,
    target: jax.Array,
    distribution: DraftDistribution | None,
    first_id: jax.Array,
    *,
    size: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Draw by the masses of every part.

    Args:
      source: what to draw from, ``[B]``; nothing where the row is negative.
      recover: ``[B, 2]`` float32 uniforms for tile and token.
      masses: ``[num_parts, B, 2, n]`` float32, of `tile_masses`.
      target: ``[M, width]`` target logits of the part.
      distribution: draft distributions, with as many columns, or None.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary that count.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[B]`` int32 tokens, 0 where another part holds it, and ``[B]`` bool, whether the weights are
      no numbers.
    """
    num_parts, count = masses.shape[0], source.row.shape[0]
    part = Part.of(target, distribution, size=size, num_parts=num_parts)
    pieces = pieces_of_tiles(part.width, num_parts, part.count)
    operands = {
        "recover": recover.reshape(-1),
        "masses": masses.reshape(-1),
        "pieces": jnp.asarray(pieces.reshape(-1)),
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
        one = _Draw(weights, item, num_parts, *pieces.shape)
        zero = threads.filled(0, jnp.int32)
        found = threads.either(inside & weights.is_wanted, one.run, lambda: (zero, zero))
        for ref, x in zip((token_ids, bad), found, strict=True):
            threads.scatter(ref, item, x, inside & (weights.lane == 0))

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
      num_parts: parts of the vocabulary.
      num_tiles: tiles of the whole vocabulary.
      num_pieces: masses of one tile, at most; a lane for each.
    """

    def __init__(
        self,
        weights: PartWeights,
        item: jax.Array,
        num_parts: int,
        num_tiles: int,
        num_pieces: int,
    ):
        self.weights, self.item = weights, item
        self.num_parts, self.num_tiles, self.num_pieces = num_parts, num_tiles, num_pieces
        self.threads, self.part, self.lane = weights.threads, weights.part, weights.lane

    def run(self) -> tuple[jax.Array, jax.Array]:
        """The token, 0 where another part holds it, and 1 if the weights are no numbers, or 0."""
        threads, weights, lane = self.threads, self.weights, self.lane
        left, p = self._by_tile(0), self._by_tile(1)
        mass = threads.warp_sum(tree_sum(left))
        has_mass = mass > 0
        weights.from_residual = weights.from_residual & has_mass
        if weights.without is not None:
            weights.without = jnp.where(has_mass, weights.without, -TILE)

        masses = [jnp.where(has_mass, *both) for both in zip(left, p, strict=True)]
        sums, total = [], threads.filled(0.0)
        for x in masses:
            sums.append(threads.warp_scan(x) + total)
            total = threads.from_lane(sums[-1], WARP - 1)
        tile = first_past(threads, masses, sums, self._uniform(0) * total)

        # An edge between parts may cut the tile: which part of it?
        piece = self._piece(tile, jnp.minimum(lane, self.num_pieces - 1))
        held = self._mass(piece, jnp.where(has_mass, 0, 1))
        held = jnp.where(lane < self.num_pieces, held, 0.0)
        within = threads.warp_scan(held)
        past = self._uniform(1) * threads.from_lane(within, WARP - 1)
        which = first_past(threads, [held], [within], past)
        past = past - (threads.from_lane(within, which) - threads.from_lane(held, which))
        owner = lax.div(threads.from_lane(piece, which), self.part.count)
        token_id = threads.either(
            weights.first_id == owner * self.part.width,
            lambda: self._token(tile, past),
            lambda: threads.filled(0, jnp.int32),
        )
        one, zero = (threads.filled(x, jnp.int32) for x in (1, 0))
        return token_id, jnp.where(mass != mass, one, zero)

    def _uniform(self, which: int) -> jax.Array:
        return self.threads.gather(self.weights.refs["recover"], self.item * 2 + which)

    def _piece(self, tile: jax.Array, place: jax.Array | int) -> jax.Array:
        """An entry of `resample.pieces_of_tiles`."""
        return self.threads.gather(self.weights.refs["pieces"], tile * self.num_pieces + place)

    def _mass(self, piece: jax.Array, kind: jax.Array | int) -> jax.Array:
        """The mass of a piece: of weights, kind 0, or of ``p``, kind 1; 0 where there is none."""
        count, batch = self.part.count, self.weights.refs["row"].shape[0]
        is_piece = piece < self.num_parts * count
        owner = jnp.minimum(lax.div(piece, count), self.num_parts - 1)
        place = ((owner * batch + self.item) * 2 + kind) * count + lax.rem(piece, count)
        return jnp.where(is_piece, self.threads.gather(self.weights.refs["masses"], place), 0.0)

    def _by_tile(self, kind: int) -> list[jax.Array]:
        """The mass of every tile by lane, one array for every 32 tiles."""
        found = []
        for i in range(0, self.num_tiles, WARP):
            tile = self.lane + i
            inside = jnp.minimum(tile, self.num_tiles - 1)
            pieces = [self._mass(self._piece(inside, j), kind) for j in range(self.num_pieces)]
            found.append(jnp.where(tile < self.num_tiles, tree_sum(pieces), 0.0))
        return found

    def _token(self, tile: jax.Array, past: jax.Array) -> jax.Array:
        weights, bits = self.weights, TILE.bit_length() - 1
        tile = tile - (weights.first_id >> bits)
        column = weights.either(lambda weights_of: self._in_tile(tile, past, weights_of))
        return weights.first_id + jnp.clip(column, 0, self.part.width - 1)

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
