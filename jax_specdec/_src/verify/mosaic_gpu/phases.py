"""Launches for a device's part of a split vocabulary: a row of a part has a first id.

`row_statistics` reads each row once, for its mass or its argmax. `part_masses` sums the weights of
the tiles to draw from, and `part_draw` draws by the masses of all parts. The last two read global
memory: each warp has one tile or one request, and needs neither other warps nor shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.types import DraftDistribution, DraftLogits
from jax_specdec._src.verify.draw import pieces_of_tiles
from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.cluster import tree_sum
from jax_specdec._src.verify.mosaic_gpu.draw import pick, pick_of
from jax_specdec._src.verify.mosaic_gpu.launch import Place, launch
from jax_specdec._src.verify.mosaic_gpu.plan import WARPS, KernelConfig, shared_memory_of_rows
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, TargetSlice
from jax_specdec._src.verify.mosaic_gpu.statistics import LARGEST, LOG2E, Exponent, excess
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Ref, T, Threads
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.tiles import TILE, tiles_of_part

_FAR = 2**30
"""More than any column."""

_AT_ONCE = 4
"""Reads of each row that a thread has in flight at once."""

X = TypeVar("X")

WeightsOf: TypeAlias = Callable[[list[jax.Array]], list[tuple[Chunk, Chunk]]]
"""Takes, for several reads, the column that each thread begins at; returns weights and ``p``."""


def row_statistics(
    logits: jax.Array,
    rows: jax.Array,
    inv_temperature: jax.Array,
    by_argmax: jax.Array,
    wanted: jax.Array,
    first_id: jax.Array,
    *,
    size: int,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Statistics of some rows of a matrix.

    Args:
      logits: ``[M, V]``, a device's part of the vocabulary.
      rows: ``[G]`` int32, in range; the same number for each of B requests.
      inv_temperature: ``[B]`` float32.
      by_argmax: ``[B]`` bool, whether the argmax of a request's rows is wanted instead of the sum.
      wanted: ``[G]`` bool, whether a row is read at all.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary, without padding.
      config: settings that change the speed only, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      Three arrays ``[G]``: a logit of the order of the row's largest, which it is itself for an
      argmax, or -inf for an empty row; ``sum(exp((x - that) / temperature))``; and the argmax, ties
      to the lowest id. If a row holds NaN or +inf, the first of them is NaN or +inf.
    """
    num_rows = rows.shape[0]
    memory = shared_memory_of_rows(logits, num_rows, config)
    slices = memory.slices
    per_request = num_rows // inv_temperature.shape[0]
    barriers: Any = plgpu.SMEM((2 * slices.tiles,), jnp.int32)
    if interpret:
        barriers = plgpu.Barrier(num_barriers=slices.tiles)

    def read_rows(place: Place, operands: Any, found: Any, scratch: Any) -> None:
        logits, rows, inv, by_argmax, wanted, first_id = operands
        (peaks, others), (buffer, barriers) = found, scratch
        index, block, _, threads = place
        request = lax.div(index, per_request)
        threads.init_barriers(barriers, slices.tiles)
        target = TargetSlice(
            threads=threads,
            rows=logits,
            buffer=buffer,
            barriers=barriers,
            per_slice=slices.tiles,
            stride=memory.target_stride,
            first_barrier=0,
            first=block * slices.ids,
            size=slices.size,
            each=memory.each,
            end=jnp.clip(size - first_id[0], 0, slices.size),
        )

        def flag(ref: Any, index: jax.Array) -> jax.Array:
            return threads.scalar(threads.gather(ref, threads.filled(0, jnp.int32) + index)) != 0

        is_wanted, row = flag(wanted, index), rows[index]
        pl.when(is_wanted)(lambda: target.copy(row))
        target.fill_end()
        threads.cluster_wait()
        scale = jnp.minimum(inv[request] * LOG2E, LARGEST)
        zero = jnp.int32(0)

        def look() -> tuple[jax.Array, jax.Array]:
            return lax.cond(
                flag(by_argmax, request),
                lambda: statistics.max_and_place(target, row, zero),
                lambda: statistics.base_and_sum(target, row, zero, scale),
            )

        nothing = threads.filled(-jnp.inf), threads.filled(0.0)
        peak, other = lax.cond(is_wanted, look, lambda: nothing)
        lane = threads.lane
        warp = (index * slices.cluster + block) * WARPS + lax.div(threads.index, WARP)
        threads.scatter(peaks, warp, peak, lane == 0)
        threads.scatter(others, warp, other, lane == 0)

    warps = jax.ShapeDtypeStruct((num_rows * slices.warps,), jnp.float32)
    found = launch(
        read_rows,
        (logits, rows, inv_temperature, by_argmax, wanted, first_id[None]),
        out=(warps, warps),
        scratch=(plgpu.SMEM((slices.tiles * memory.target_stride,), logits.dtype), barriers),
        grid=num_rows,
        cluster=slices.cluster,
        interpret=interpret,
    )
    peaks, others = (x.reshape(num_rows, slices.warps) for x in found)
    return _combine_warps(list(peaks.T), list(others.T), jnp.repeat(inv_temperature, per_request))


def _combine_warps(
    peaks: list[jax.Array], others: list[jax.Array], inv_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Combine the results ``[G]`` of all warps, in a Python loop, which XLA fuses with its use."""
    peak, total, place = functools.reduce(jnp.maximum, peaks), jnp.float32(0), jnp.int32(2**30)
    for mine, other in zip(peaks, others, strict=True):
        decay = jnp.exp(jnp.minimum((mine - peak) * inv_temperature, 0.0))
        total = total + jnp.where(mine > -jnp.inf, other * decay, 0.0)
        found = lax.bitcast_convert_type(other, jnp.int32)
        place = jnp.where(mine == peak, jnp.minimum(place, found), place)
    return peak, total, place


@dataclasses.dataclass(frozen=True)
class Part:
    """The static side of a part of the vocabulary, and of the draft distributions there.

    Attributes:
      width: ids of a part.
      size: ids of the whole vocabulary, without padding.
      count: tiles that a part overlaps at most.
      each: consecutive ids that a thread reads at once.
    """

    width: int
    size: int
    count: int
    each: int

    @classmethod
    def of(
        cls,
        target: jax.Array,
        distribution: DraftDistribution | None,
        *,
        size: int,
        num_parts: int,
    ) -> Part:
        """The part that `target` is."""
        storage = [] if distribution is None else [storage_of(distribution)]
        width = target.shape[1]
        each = 16 // max(x.dtype.itemsize for x in (target, *storage))
        each = each if width % each == 0 else 1
        return cls(width, size, tiles_of_part(width, num_parts), each)

    @property
    def chunk(self) -> int:
        """Ids that a warp reads at once."""
        return WARP * self.each

    @property
    def groups(self) -> int:
        """Reads that a warp needs for a tile."""
        return TILE // self.chunk


class PartOperands(NamedTuple, Generic[X]):
    """What the kernels read of sources ``[G]``: arrays, or refs of them.

    Attributes:
      target: ``[M, width]`` target logits of the part.
      first_id: ``[1]`` int32, its first id.
      row: ``[G]`` int32, target row; negative if nothing is wanted.
      peak: ``[G]`` float32, of the target row's normalizer.
      log: ``[G]`` float32, likewise.
      inv_temperature: ``[G]`` float32.
      without: ``[G]`` int32, the rejected one-hot draft or -1; None if no draft can be one-hot.
      draft: ``[R, width]`` draft rows, or None, as all that follows.
      draft_row: ``[G]`` int32.
      from_residual: ``[G]`` bool.
      weight: ``[G]`` float32.
      draft_peak: ``[G]`` float32; None of probabilities.
      draft_log: ``[G]`` float32, likewise.
    """

    target: X
    first_id: X
    row: X
    peak: X
    log: X
    inv_temperature: X
    without: X | None
    draft: X | None
    draft_row: X | None
    from_residual: X | None
    weight: X | None
    draft_peak: X | None
    draft_log: X | None

    @classmethod
    def of(
        cls,
        source: Position,
        target: jax.Array,
        distribution: DraftDistribution | None,
        first_id: jax.Array,
    ) -> PartOperands[jax.Array]:
        """Those of a call."""
        logits = distribution if isinstance(distribution, DraftLogits) else None
        has_q, scale = distribution is not None, source.draft_scale.scale
        may_be_one_hot = distribution is None or distribution.valid is not None
        may_be_one_hot |= logits is not None and logits.log_normalizer is not None
        return PartOperands(
            target=target,
            first_id=first_id[None],
            row=source.row,
            peak=source.scale.shift,
            log=source.scale.log_scale,
            inv_temperature=source.inv_temperature,
            without=jnp.where(source.is_one_hot, source.token_id, -1) if may_be_one_hot else None,
            draft=None if distribution is None else storage_of(distribution),
            draft_row=source.draft_row if has_q else None,
            from_residual=source.uses_q if has_q else None,
            weight=source.weight if has_q else None,
            draft_peak=None if logits is None else scale.shift,
            draft_log=None if logits is None else scale.log_scale,
        )


class PartWeights:
    """Weights of the ids of a tile, while a kernel is traced. Each warp has its own source.

    Attributes:
      threads: the operations of the warpgroup.
      operands: refs.
      part: the static side.
      lane: ``[128]`` int32, the index of each thread in its warp.
      first_id: ``[]`` int32, the part's first id.
      end: ``[]`` int32, ids of the part that count.
      is_wanted: ``[128]`` bool, whether the source is.
      row: ``[128]`` int32, target row, in range.
      p: of the target row.
      without: ``[128]`` int32, the column that has no weight, or None if there is none.
      draft_row: ``[128]`` int32, in range.
      from_residual: ``[128]`` bool, whether the weights are the residual.
      weight: ``[128]`` float32, the joint weight of the drafts before.
      q: of the draft row; None of probabilities.
    """

    def __init__(self, threads: Threads, operands: PartOperands[Ref], part: Part, item: jax.Array):
        def number(ref: Ref | None) -> jax.Array:
            assert ref is not None
            return threads.gather(ref, item)

        self.threads, self.operands, self.part, self.lane = threads, operands, part, threads.lane
        self.first_id = operands.first_id[0]
        self.end = jnp.clip(part.size - self.first_id, 0, part.width)
        row = number(operands.row)
        self.is_wanted, self.row = row >= 0, jnp.clip(row, 0, operands.target.shape[0] - 1)
        peak, log = number(operands.peak), number(operands.log) * LOG2E
        scale = jnp.minimum(number(operands.inv_temperature) * LOG2E, LARGEST)
        self.p, self.q, self.without, self.weight = Exponent(scale, log, peak), None, None, None
        self.draft_row, self.from_residual = self.row, self.row < 0
        if operands.without is not None:
            self.without = number(operands.without) - self.first_id
        if operands.draft is not None:
            self.draft_row = jnp.clip(number(operands.draft_row), 0, operands.draft.shape[0] - 1)
            self.from_residual = number(operands.from_residual) != 0
            self.weight = number(operands.weight)
        if operands.draft_peak is not None:
            peak, log = number(operands.draft_peak), number(operands.draft_log) * LOG2E
            self.q = Exponent(scale, log, peak)

    def start(self, tile: jax.Array, group: jax.Array | int) -> jax.Array:
        """The column that each thread begins to read at; negative for ids of other parts.

        Args:
          tile: counted from the part's first.
          group: index of the read.
        """
        begin = tile * TILE - jnp.bitwise_and(self.first_id, TILE - 1)
        return begin + group * self.part.chunk + self.lane * self.part.each

    def entries(self, ref: Ref, row: jax.Array, start: jax.Array, fill: float) -> Chunk:
        """Entries from `start` on; `fill` for padding and for ids of other parts."""
        each = self.part.each
        inside = jnp.clip(start, 0, self.part.width - each)
        found = self.threads.row_entries(ref, row, inside, each)
        place = jnp.where(start < 0, _FAR, start)
        return [jnp.where(place < self.end - j, x, fill) for j, x in enumerate(found)]

    def plain(
        self, starts: list[jax.Array], without: jax.Array | None
    ) -> list[tuple[Chunk, Chunk]]:
        """Of several reads ``p`` without one column, and ``p``."""
        read = [self.entries(self.operands.target, self.row, x, -jnp.inf) for x in starts]
        found = []
        for start, p in zip(starts, [self.p.probabilities(x) for x in read], strict=True):
            weights = p
            if without is not None:
                weights = [jnp.where(start + j == without, 0.0, x) for j, x in enumerate(p)]
            found.append((weights, p))
        return found

    def residual(self, starts: list[jax.Array]) -> list[tuple[Chunk, Chunk]]:
        """Of several reads ``(weight * p - q)+``, and ``p``."""
        target, draft = self.operands.target, self.operands.draft
        assert draft is not None and self.weight is not None
        fill, found, both = 0.0 if self.q is None else -jnp.inf, [], []
        for x in starts:
            targets = self.entries(target, self.row, x, -jnp.inf)
            both.append((targets, self.entries(draft, self.draft_row, x, fill)))
        for p, (_, drafts) in zip([self.p.probabilities(x) for x, _ in both], both, strict=True):
            found.append((excess([self.weight * x for x in p], drafts, self.q), p))
        return found

    def either(self, fn: Callable[[WeightsOf], T], has_mass: jax.Array | None = None) -> T:
        """``fn(weights_of)``, with the `WeightsOf` of the warp's source.

        They are ``p`` where there is no mass by the others, which is where `has_mass` is false.
        """
        from_residual, without = self.from_residual, self.without
        if has_mass is not None:
            from_residual = from_residual & has_mass
            without = None if without is None else jnp.where(has_mass, without, -TILE)

        def plain() -> T:
            return fn(functools.partial(self.plain, without=without))

        if self.operands.draft is None:
            return plain()
        return self.threads.cond(from_residual, lambda: fn(self.residual), plain)


def part_masses(
    source: Position,
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
      source: whose weights to sum, ``[G]``; none if the row is negative.
      target: ``[M, width]`` target logits of the part.
      distribution: draft distributions, with as many columns, or None.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary, without padding.
      num_parts: parts of the vocabulary.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[G, 2, n]`` float32, as `draw.LocalRows.masses`; 0 if the row is negative.
    """
    part = Part.of(target, distribution, size=size, num_parts=num_parts)
    count, at_once = source.row.shape[0], min(_AT_ONCE, part.groups)

    def sum_tiles(place: Place, operands: PartOperands[Ref], masses: Ref, _: None) -> None:
        threads = place.threads
        warp = place.cluster * WARPS + lax.div(threads.index, WARP)
        item, tile = lax.div(warp, part.count), lax.rem(warp, part.count)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, operands, part, item)
        nothing = threads.filled(0.0), threads.filled(0.0)

        def add(weights_of: WeightsOf) -> tuple[jax.Array, jax.Array]:
            def step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Any:
                starts = [weights.start(tile, i * at_once + j) for j in range(at_once)]
                found = zip(*weights_of(starts), strict=True)
                return tuple(s + tree_sum(sum(xs, [])) for s, xs in zip(sums, found, strict=True))

            mass, p = lax.fori_loop(0, part.groups // at_once, step, nothing)
            return threads.warp_sum(mass), threads.warp_sum(p)

        is_wanted = inside & weights.is_wanted
        sums = threads.cond(is_wanted, lambda: weights.either(add), lambda: nothing)
        for kind, total in enumerate(sums):
            where = (item * 2 + kind) * part.count + tile
            threads.scatter(masses, where, total, inside & (weights.lane == 0))

    masses = launch(
        sum_tiles,
        PartOperands.of(source, target, distribution, first_id),
        out=jax.ShapeDtypeStruct((count * 2 * part.count,), jnp.float32),
        scratch=None,
        grid=-(-count * part.count // WARPS),
        interpret=interpret,
    )
    return masses.reshape(count, 2, part.count)


class DrawOperands(NamedTuple, Generic[X]):
    """What `part_draw` reads besides `PartOperands`: arrays, or refs of them.

    Attributes:
      recover: ``[B * 2]`` float32.
      masses: ``[num_parts * B * 2 * n]`` float32.
      pieces: ``[T * m]`` int32, of `draw.pieces_of_tiles`.
    """

    recover: X
    masses: X
    pieces: X


def part_draw(
    source: Position,
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
      source: what to draw from, ``[B]``; nothing if the row is negative.
      recover: ``[B, 2]`` float32 uniforms for tile and token.
      masses: ``[num_parts, B, 2, n]`` float32, from `part_masses`.
      target: ``[M, width]`` target logits of the part.
      distribution: draft distributions, with as many columns, or None.
      first_id: ``[]`` int32, the part's first id.
      size: ids of the whole vocabulary, without padding.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[B]`` int32 tokens, 0 for those of another part, and ``[B]`` bool, whether a weight is NaN.
    """
    num_parts, count = masses.shape[0], source.row.shape[0]
    part = Part.of(target, distribution, size=size, num_parts=num_parts)
    pieces = pieces_of_tiles(part.width, num_parts, part.count)

    def draw(place: Place, operands: Any, found: tuple[Ref, Ref], _: None) -> None:
        threads, (of_part, of_draw) = place.threads, operands
        item = place.cluster * WARPS + lax.div(threads.index, WARP)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, of_part, part, item)
        one = PartDraw(weights, of_draw, item, num_parts, *pieces.shape)
        zero = threads.filled(0, jnp.int32)
        is_wanted = inside & weights.is_wanted
        drawn = threads.cond(is_wanted, one.run, lambda: (zero, zero))
        for ref, x in zip(found, drawn, strict=True):
            threads.scatter(ref, item, x, inside & (weights.lane == 0))

    of_part = PartOperands.of(source, target, distribution, first_id)
    flat = recover.reshape(-1), masses.reshape(-1), jnp.asarray(pieces.reshape(-1))
    token_ids, bad = launch(
        draw,
        (of_part, DrawOperands(*flat)),
        out=(jax.ShapeDtypeStruct((count,), jnp.int32),) * 2,
        scratch=None,
        grid=-(-count // WARPS),
        interpret=interpret,
    )
    return token_ids, bad != 0


@dataclasses.dataclass(frozen=True)
class PartDraw:
    """One warp's draw for one request, while the kernel is traced.

    Attributes:
      weights: of the ids of the part.
      operands: refs.
      item: ``[128]`` int32, index of the request.
      num_parts: parts of the vocabulary.
      num_tiles: tiles of the whole vocabulary.
      num_pieces: masses of one tile, at most; a lane for each.
    """

    weights: PartWeights
    operands: DrawOperands[Ref]
    item: jax.Array
    num_parts: int
    num_tiles: int
    num_pieces: int

    def run(self) -> tuple[jax.Array, jax.Array]:
        """The token, or 0 if it is another part's; and 1 if a weight is NaN, else 0."""
        weights, threads, lane = self.weights, self.weights.threads, self.weights.lane
        by_weight, by_p = self._by_tile(0), self._by_tile(1)
        mass = threads.warp_sum(tree_sum(by_weight))
        has_mass = mass > 0
        masses = [jnp.where(has_mass, *both) for both in zip(by_weight, by_p, strict=True)]
        tile, _ = pick(threads, masses, self._uniform(0), is_share=True)

        # An edge between parts may cut the tile: which part of it?
        piece = self._piece(tile, jnp.minimum(lane, self.num_pieces - 1))
        mass_of_piece = self._mass(piece, jnp.where(has_mass, 0, 1))
        mass_of_piece = jnp.where(lane < self.num_pieces, mass_of_piece, 0.0)
        which, past = pick(threads, [mass_of_piece], self._uniform(1), is_share=True)
        owner = lax.div(threads.shuffle(piece, which), weights.part.count)
        zero, one = (threads.filled(x, jnp.int32) for x in (0, 1))
        tile = tile - lax.div(weights.first_id, TILE)
        column = threads.cond(
            weights.first_id == owner * weights.part.width,
            lambda: weights.either(functools.partial(_column, weights, tile, past), has_mass),
            lambda: zero - weights.first_id,
        )
        return weights.first_id + column, jnp.where(mass != mass, one, zero)

    def _uniform(self, which: int) -> jax.Array:
        return self.weights.threads.gather(self.operands.recover, self.item * 2 + which)

    def _piece(self, tile: jax.Array, place: jax.Array | int) -> jax.Array:
        """An entry of `draw.pieces_of_tiles`."""
        place = tile * self.num_pieces + place
        return self.weights.threads.gather(self.operands.pieces, place)

    def _mass(self, piece: jax.Array, kind: jax.Array | int) -> jax.Array:
        """The mass of a piece: of weights (kind 0) or of ``p`` (kind 1); 0 if there is no piece."""
        count, batch = self.weights.part.count, self.weights.operands.row.shape[0]
        is_piece = piece < self.num_parts * count
        owner = jnp.minimum(lax.div(piece, count), self.num_parts - 1)
        place = ((owner * batch + self.item) * 2 + kind) * count + lax.rem(piece, count)
        return jnp.where(is_piece, self.weights.threads.gather(self.operands.masses, place), 0.0)

    def _by_tile(self, kind: int) -> list[jax.Array]:
        """The mass of every tile by lane, one array for every 32 tiles."""
        found = []
        for i in range(0, self.num_tiles, WARP):
            tile = self.weights.lane + i
            inside = jnp.minimum(tile, self.num_tiles - 1)
            pieces = [self._mass(self._piece(inside, j), kind) for j in range(self.num_pieces)]
            found.append(jnp.where(tile < self.num_tiles, tree_sum(pieces), 0.0))
        return found


def _column(
    weights: PartWeights, tile: jax.Array, past: jax.Array, weights_of: WeightsOf
) -> jax.Array:
    """Pick a column in a tile: first a read of the warp, then a thread, then an id."""
    threads, groups = weights.threads, weights.part.groups

    def add(i: jax.Array, masses: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ((group, _),) = weights_of([weights.start(tile, i)])
        mass = threads.warp_sum(tree_sum(list(group)))
        firsts = range(0, groups, WARP)
        return tuple(
            jnp.where(weights.lane + first == i, mass, x)
            for first, x in zip(firsts, masses, strict=True)
        )

    nothing = (threads.filled(0.0),) * -(-groups // WARP)
    masses = lax.fori_loop(0, groups, add, nothing)
    group, past = pick(threads, list(masses), past)
    start = weights.start(tile, group)
    ((of_thread, _),) = weights_of([start])
    thread, past = pick(threads, [tree_sum(list(of_thread))], past)
    column = threads.shuffle(start + pick_of(of_thread, past), thread)
    return jnp.clip(column, 0, weights.part.width - 1)
