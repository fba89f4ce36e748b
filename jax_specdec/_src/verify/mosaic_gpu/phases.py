"""Launches for a device's part of a split vocabulary.

`row_statistics` reads each row once, for its mass or its argmax. `part_masses` sums the weights of
the tiles to draw from, and `part_draw` draws by the masses of all parts. The last two read global
memory: each warp has one tile or one request, and needs neither other warps nor shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.types import DraftDistribution, DraftLogits, DraftProbs
from jax_specdec._src.verify import rules
from jax_specdec._src.verify.draw import pieces_of_tiles
from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.cluster import tree_sum
from jax_specdec._src.verify.mosaic_gpu.draw import first_past, pick_of
from jax_specdec._src.verify.mosaic_gpu.launch import Place, launch
from jax_specdec._src.verify.mosaic_gpu.plan import WARPS, KernelConfig, shared_memory_of_rows
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, TargetSlice
from jax_specdec._src.verify.mosaic_gpu.statistics import LARGEST, LOG2E
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, T, Threads
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.tiles import TILE, tiles_of_part

_FAR = 2**30
"""More than any column."""

_AT_ONCE = 4
"""Reads of each row that a thread has in flight at once."""

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
    num_rows, interpreted = rows.shape[0], bool(interpret)
    memory = shared_memory_of_rows(logits, num_rows, config)
    slices = memory.slices
    per_request = num_rows // inv_temperature.shape[0]
    operands = [logits, rows, inv_temperature, by_argmax, wanted, first_id[None]]
    scratch: list[Any] = [plgpu.SMEM((slices.tiles * memory.target_stride,), logits.dtype)]
    if interpreted:
        scratch.append(plgpu.Barrier(num_barriers=slices.tiles))
    else:
        scratch.append(plgpu.SMEM((2 * slices.tiles,), jnp.int32))

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
        operands,
        out=[warps, warps],
        scratch=scratch,
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
      draft: "none", "probs" or "logits".
      one_hot: whether drafts may be one-hot.
    """

    width: int
    size: int
    count: int
    each: int
    draft: str
    one_hot: bool

    @classmethod
    def of(
        cls,
        target: jax.Array,
        distribution: DraftDistribution | None,
        *,
        size: int,
        num_parts: int,
    ) -> Part:
        storage = [] if distribution is None else [storage_of(distribution)]
        width = target.shape[1]
        each = 16 // max(x.dtype.itemsize for x in (target, *storage))
        kind = "probs" if isinstance(distribution, DraftProbs) else "logits"
        return cls(
            width=width,
            size=size,
            count=tiles_of_part(width, num_parts),
            each=each if width % each == 0 else 1,
            draft=kind if storage else "none",
            one_hot=distribution is None
            or distribution.valid is not None
            or (isinstance(distribution, DraftLogits) and distribution.log_normalizer is not None),
        )

    @property
    def groups(self) -> int:
        """Reads that a warp needs for a tile."""
        return TILE // self.chunk

    @property
    def chunk(self) -> int:
        """Ids that a warp reads at once."""
        return WARP * self.each


def _operands(
    part: Part,
    source: Position,
    target: jax.Array,
    distribution: DraftDistribution | None,
    first_id: jax.Array,
) -> dict[str, jax.Array]:
    """The arrays that the kernels read for sources ``[G]``, by name."""
    operands = {
        "target": target,
        "first_id": first_id[None],
        "row": source.row,
        "shift": source.scale.shift,
        "log": source.scale.log_scale,
        "inv": source.inv_temperature,
    }
    if part.one_hot:
        operands["without"] = jnp.where(source.is_one_hot, source.token_id, -1)
    if distribution is not None:
        operands |= {
            "draft": storage_of(distribution),
            "draft_row": source.draft_row,
            "from_residual": source.uses_q,
            "weight": source.weight,
        }
    if part.draft == "logits":
        operands |= {
            "draft_shift": source.draft_scale.scale.shift,
            "draft_log": source.draft_scale.scale.log_scale,
        }
    return operands


class PartWeights:
    """Weights of the ids of a tile, while a kernel is traced. Each warp has its own source.

    Args:
      threads: the operations of the warpgroup.
      refs: from `_operands`.
      part: the static side.
      item: ``[128]`` int32, index of the source.
    """

    def __init__(self, threads: Threads, refs: dict[str, Any], part: Part, item: jax.Array):
        self.threads, self.refs, self.part = threads, refs, part
        self.first_id = first_id = refs["first_id"][0]
        self.end = jnp.clip(part.size - first_id, 0, part.width)
        self.lane = threads.lane

        def of(name: str) -> jax.Array:
            return threads.gather(refs[name], item)

        row = of("row")
        self.is_wanted, self.row = row >= 0, jnp.clip(row, 0, refs["target"].shape[0] - 1)
        self.shift, self.log = of("shift"), of("log") * LOG2E
        self.scale = jnp.minimum(of("inv") * LOG2E, LARGEST)
        self.from_residual = self.row < 0
        self.without = of("without") - first_id if part.one_hot else None
        if part.draft != "none":
            self.draft_row = jnp.clip(of("draft_row"), 0, refs["draft"].shape[0] - 1)
            self.from_residual, self.weight = of("from_residual") != 0, of("weight")
        if part.draft == "logits":
            self.draft_shift, self.draft_log = of("draft_shift"), of("draft_log") * LOG2E

    def start(self, tile: jax.Array, group: jax.Array | int) -> jax.Array:
        """The column that each thread begins to read at; negative for ids of other parts.

        Args:
          tile: counted from the part's first.
          group: index of the read.
        """
        begin = tile * TILE - jnp.bitwise_and(self.first_id, TILE - 1)
        return begin + group * self.part.chunk + self.lane * self.part.each

    def entries(self, name: str, row: jax.Array, start: jax.Array, fill: float) -> list[jax.Array]:
        """Entries from `start` on; `fill` for padding and for ids of other parts."""
        each = self.part.each
        inside = jnp.clip(start, 0, self.part.width - each)
        found = self.threads.row_entries(self.refs[name], row, inside, each)
        place = jnp.where(start < 0, _FAR, start)
        return [jnp.where(place < self.end - j, x, fill) for j, x in enumerate(found)]

    def targets(self, start: jax.Array) -> list[jax.Array]:
        return self.entries("target", self.row, start, -jnp.inf)

    def drafts(self, start: jax.Array) -> list[jax.Array]:
        fill = 0.0 if self.part.draft == "probs" else -jnp.inf
        return self.entries("draft", self.draft_row, start, fill)

    def probs(self, entries: list[jax.Array]) -> list[jax.Array]:
        """``p``."""
        return [jnp.exp2((x - self.shift) * self.scale - self.log) for x in entries]

    def plain(self, start: jax.Array, p: list[jax.Array]) -> list[jax.Array]:
        """``p``, with 0 for a rejected one-hot draft."""
        if self.without is None:
            return p
        return [jnp.where(start + j == self.without, 0.0, x) for j, x in enumerate(p)]

    def residual(self, p: list[jax.Array], entries: list[jax.Array]) -> list[jax.Array]:
        """``(weight * p - q)+``."""
        if self.part.draft == "probs":
            q = [jnp.where(x >= 0, x, jnp.nan) for x in entries]
        else:
            q = [jnp.exp2((x - self.draft_shift) * self.scale - self.draft_log) for x in entries]
        return [rules.excess(self.weight * a, b) for a, b in zip(p, q, strict=True)]

    def either(self, fn: Callable[[WeightsOf], T]) -> T:
        """``fn(weights_of)``, with the `WeightsOf` of the warp's source."""

        def plain(starts: list[jax.Array]) -> list[tuple[Chunk, Chunk]]:
            p = [self.probs(x) for x in [self.targets(start) for start in starts]]
            return [(self.plain(start, x), x) for start, x in zip(starts, p, strict=True)]

        def residual(starts: list[jax.Array]) -> list[tuple[Chunk, Chunk]]:
            both = [(self.targets(start), self.drafts(start)) for start in starts]
            p = [self.probs(x) for x, _ in both]
            return [(self.residual(x, q), x) for x, (_, q) in zip(p, both, strict=True)]

        if self.part.draft == "none":
            return fn(plain)
        return self.threads.cond(self.from_residual, lambda: fn(residual), lambda: fn(plain))


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
    operands, count = _operands(part, source, target, distribution, first_id), source.row.shape[0]
    at_once = min(_AT_ONCE, part.groups)

    def sum_tiles(place: Place, refs: dict[str, Any], masses: Any, _: None) -> None:
        threads = place.threads
        warp = place.cluster * WARPS + lax.div(threads.index, WARP)
        item, tile = lax.div(warp, part.count), lax.rem(warp, part.count)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, refs, part, item)
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
        operands,
        out=jax.ShapeDtypeStruct((count * 2 * part.count,), jnp.float32),
        scratch=None,
        grid=-(-count * part.count // WARPS),
        interpret=interpret,
    )
    return masses.reshape(count, 2, part.count)


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
    operands = _operands(part, source, target, distribution, first_id)
    operands |= {"recover": recover.reshape(-1), "masses": masses.reshape(-1)}
    operands["pieces"] = jnp.asarray(pieces.reshape(-1))

    def draw(place: Place, refs: dict[str, Any], found: Any, _: None) -> None:
        threads = place.threads
        item = place.cluster * WARPS + lax.div(threads.index, WARP)
        inside, item = item < count, jnp.minimum(item, count - 1)
        one = PartDraw(PartWeights(threads, refs, part, item), item, num_parts, *pieces.shape)
        zero, is_wanted = threads.filled(0, jnp.int32), inside & one.weights.is_wanted
        drawn = threads.cond(is_wanted, one.run, lambda: (zero, zero))
        for ref, x in zip(found, drawn, strict=True):
            threads.scatter(ref, item, x, inside & (one.lane == 0))

    result = jax.ShapeDtypeStruct((count,), jnp.int32)
    token_ids, bad = launch(
        draw,
        operands,
        out=[result, result],
        scratch=None,
        grid=-(-count // WARPS),
        interpret=interpret,
    )
    return token_ids, bad != 0


class PartDraw:
    """One warp's draw for one request, while the kernel is traced.

    Args:
      weights: of the ids of the part.
      item: ``[128]`` int32, index of the request.
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
        """The token, or 0 if it is another part's; and 1 if a weight is NaN, else 0."""
        threads, weights, lane = self.threads, self.weights, self.lane
        by_weight, by_p = self._by_tile(0), self._by_tile(1)
        mass = threads.warp_sum(tree_sum(by_weight))
        has_mass = mass > 0
        weights.from_residual = weights.from_residual & has_mass
        if weights.without is not None:
            weights.without = jnp.where(has_mass, weights.without, -TILE)
        masses = [jnp.where(has_mass, *both) for both in zip(by_weight, by_p, strict=True)]
        tile, _ = self._pick(masses, self._uniform(0), is_share=True)

        # An edge between parts may cut the tile: which part of it?
        piece = self._piece(tile, jnp.minimum(lane, self.num_pieces - 1))
        mass_of_piece = self._mass(piece, jnp.where(has_mass, 0, 1))
        mass_of_piece = jnp.where(lane < self.num_pieces, mass_of_piece, 0.0)
        which, past = self._pick([mass_of_piece], self._uniform(1), is_share=True)
        owner = lax.div(threads.shuffle(piece, which), self.part.count)
        zero, one = (threads.filled(x, jnp.int32) for x in (0, 1))
        tile = tile - lax.div(weights.first_id, TILE)
        column = threads.cond(
            weights.first_id == owner * self.part.width,
            lambda: weights.either(lambda weights_of: self._column(tile, past, weights_of)),
            lambda: zero - weights.first_id,
        )
        return weights.first_id + column, jnp.where(mass != mass, one, zero)

    def _uniform(self, which: int) -> jax.Array:
        return self.threads.gather(self.weights.refs["recover"], self.item * 2 + which)

    def _piece(self, tile: jax.Array, place: jax.Array | int) -> jax.Array:
        """An entry of `draw.pieces_of_tiles`."""
        return self.threads.gather(self.weights.refs["pieces"], tile * self.num_pieces + place)

    def _mass(self, piece: jax.Array, kind: jax.Array | int) -> jax.Array:
        """The mass of a piece: of weights (kind 0) or of ``p`` (kind 1); 0 if there is no piece."""
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

    def _pick(
        self, masses: list[jax.Array], aim: jax.Array, *, is_share: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """The least place whose inclusive sum exceeds `aim`, or this share of the total.

        Returns:
          ``[128]`` int32 places, and the aim less the sum before the place.
        """
        threads, total, sums = self.threads, self.threads.filled(0.0), []
        for mass in masses:
            sums.append(threads.warp_scan(mass) + total)
            total = threads.shuffle(sums[-1], WARP - 1)
        past = aim * total if is_share else aim
        place = first_past(threads, masses, sums, past)
        before = threads.filled(0.0)
        for i, (mass, inclusive) in enumerate(zip(masses, sums, strict=True)):
            up_to = threads.shuffle(inclusive - mass, place & (WARP - 1))
            before = jnp.where(lax.div(place, WARP) == i, up_to, before)
        return place, past - before

    def _column(self, tile: jax.Array, past: jax.Array, weights_of: WeightsOf) -> jax.Array:
        """Pick a column in a tile: first a read of the warp, then a thread, then an id."""
        threads, weights, groups = self.threads, self.weights, self.part.groups

        def add(i: jax.Array, masses: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ((group, _),) = weights_of([weights.start(tile, i)])
            mass = threads.warp_sum(tree_sum(list(group)))
            firsts = range(0, groups, WARP)
            return tuple(
                jnp.where(self.lane + first == i, mass, x)
                for first, x in zip(firsts, masses, strict=True)
            )

        nothing = (threads.filled(0.0),) * -(-groups // WARP)
        masses = lax.fori_loop(0, groups, add, nothing)
        group, past = self._pick(list(masses), past)
        start = weights.start(tile, group)
        ((of_thread, _),) = weights_of([start])
        thread, past = self._pick([tree_sum(list(of_thread))], past)
        column = threads.shuffle(start + pick_of(of_thread, past), thread)
        return jnp.clip(column, 0, self.part.width - 1)
