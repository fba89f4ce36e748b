"""Launches for a device's part of a split vocabulary: a row of a part has a first id.

`row_statistics` reads each row once, for its mass or its argmax. `part_masses` sums the weights of
the tiles to draw from, and `part_draw` draws by the masses of all parts. The last two read global
memory: each warp has one tile or one request, and needs neither other warps nor shared memory.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.cluster import tree_sum
from jax_specdec._src.verify.mosaic_gpu.draw import pick, pick_of
from jax_specdec._src.verify.mosaic_gpu.launch import Place, launch
from jax_specdec._src.verify.mosaic_gpu.plan import WARPS, KernelConfig, SharedMemory
from jax_specdec._src.verify.mosaic_gpu.rows import Chunk, TargetSlice, WarpRow, words_of
from jax_specdec._src.verify.mosaic_gpu.statistics import LARGEST, LOG2E, Exponent, excess
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Ref, T, Threads
from jax_specdec._src.verify.q import Logits, Mapped, Stored
from jax_specdec._src.verify.rows import Rows
from jax_specdec._src.verify.source import LocalRows, Source
from jax_specdec._src.verify.statistics import Partials
from jax_specdec._src.verify.tiles import TILE, Scale, num_tiles, pieces_of_tiles

_AT_ONCE = 4
"""Reads of each row that a thread has in flight at once."""

X = TypeVar("X")


def row_statistics(
    rows: Rows,
    index: jax.Array,
    inv_temperature: jax.Array,
    by_argmax: jax.Array,
    least: jax.Array | None = None,
    *,
    config: KernelConfig | None = None,
    interpret: Any = False,
) -> Partials:
    """Statistics of some rows of logits.

    Args:
      rows: a device's part of the vocabulary.
      index: ``[G]`` int32, the same number for each of B requests; -1 for a row not to be read.
      inv_temperature: ``[B]`` float32.
      by_argmax: ``[B]`` bool, whether the argmax of a request's rows is wanted instead of the sum.
      least: ``[G]`` float32, entries below it are left out; None for none.
      config: settings that change the speed only, or None for the default.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[G]``: a sum, relative to a logit of the order of the row's largest, or an argmax beside the
      largest itself. The maximum is -inf for an empty row, +inf if a row holds NaN or +inf.
    """
    logits, num_rows, first_id = rows.matrix, index.shape[0], rows.part.first_id
    bitmask = words_of(rows.token_bitmask)
    memory = SharedMemory.of(logits, num_requests=num_rows, size=rows.width, config=config)
    slices = memory.slices
    per_request = num_rows // inv_temperature.shape[0]
    barriers: Any = plgpu.SMEM((2 * slices.tiles,), jnp.int32)
    if interpret:
        barriers = plgpu.Barrier(num_barriers=slices.tiles)

    def read_rows(place: Place, operands: Any, found: Any, scratch: Any) -> None:
        logits, bitmask, rows_of_index, inv, by_argmax, least, first_id = operands
        (peaks, others), (buffer, barriers) = found, scratch
        index, block, _, threads = place
        request, row = lax.div(index, per_request), rows_of_index[index]
        threads.init_barriers(barriers, slices.tiles)
        target = TargetSlice(
            threads=threads,
            rows=logits,
            buffer=buffer,
            barriers=barriers,
            per_slice=slices.tiles,
            stride=memory.stride,
            first_barrier=0,
            first=block * slices.ids,
            size=slices.size,
            each=memory.each,
            bitmask=bitmask,
            first_id=first_id[0],
            end=jnp.clip(rows.size - first_id[0], 0, slices.size),
            threshold=None if least is None else least[index],
        )
        pl.when(row >= 0)(lambda: target.copy(row))
        target.fill_end()
        threads.cluster_wait()
        scale = jnp.minimum(inv[request] * LOG2E, LARGEST)
        zero = jnp.int32(0)

        def look() -> tuple[jax.Array, jax.Array]:
            flag = threads.gather(by_argmax, threads.filled(0, jnp.int32) + request)
            return lax.cond(
                threads.scalar(flag) != 0,
                lambda: statistics.max_and_place(target, row, zero),
                lambda: statistics.base_and_sum(target, row, zero, scale),
            )

        nothing = threads.filled(-jnp.inf), threads.filled(0.0)
        peak, other = lax.cond(row >= 0, look, lambda: nothing)
        warp = (index * slices.cluster + block) * WARPS + lax.div(threads.index, WARP)
        threads.scatter(peaks, warp, peak, threads.lane == 0)
        threads.scatter(others, warp, other, threads.lane == 0)

    warps = jax.ShapeDtypeStruct((num_rows * slices.warps,), jnp.float32)
    found = launch(
        read_rows,
        (logits, bitmask, index, inv_temperature, by_argmax, least, first_id[None]),
        out=(warps, warps),
        scratch=(plgpu.SMEM((slices.tiles * memory.stride,), logits.dtype), barriers),
        grid=num_rows,
        cluster=slices.cluster,
        interpret=interpret,
    )
    peaks, others = [x.reshape(num_rows, slices.warps).T for x in found]
    argmaxes = first_id + lax.bitcast_convert_type(others, jnp.int32)
    parts, inv = Partials(peaks, others, argmaxes), jnp.repeat(inv_temperature, per_request)
    whole = Partials.of_whole(parts, inv)
    return whole._replace(max=jnp.where(jnp.isnan(whole.max), jnp.inf, whole.max))


class PartOperands(NamedTuple, Generic[X]):
    """What the kernels that draw read: arrays, or refs of them.

    Attributes:
      source: a `Source` ``[G]`` of what is read.
      first_id: ``[1]`` int32, the part's first id.
      target: ``[M, width]`` target logits of the part.
      bitmask: ``[M, words]`` int32, the ids that are allowed, or None.
      draft: ``[R, Vd]`` draft rows, or None, as all that follows.
      columns: ``[size]`` int32, the column of each id, of a map.
      thresholds: ``[R]`` float32.
    """

    source: Any
    first_id: X
    target: X
    bitmask: X | None
    draft: X | None
    columns: X | None
    thresholds: X | None

    @classmethod
    def of(cls, rows: LocalRows, source: Source) -> PartOperands[jax.Array]:
        """Those of a call."""
        target, first_id = rows.target, rows.part.first_id
        draft = rows.q if isinstance(rows.q, Stored) else None
        unread = ["proposed", "argmax", "p_masses"]
        if draft is None:
            unread += ["draft_row", "uses_q", "weight"]
        arrays: dict[str, Any] = dict.fromkeys(unread)
        has_scale = draft is not None and isinstance(draft.kind, Logits)
        arrays["draft_scale"] = source.draft_scale.scale if has_scale else None
        return PartOperands(
            source=source._replace(**arrays),
            first_id=first_id[None],
            target=target.matrix,
            bitmask=words_of(target.token_bitmask),
            draft=None if draft is None else draft.storage.matrix,
            columns=draft.columns if isinstance(draft, Mapped) else None,
            thresholds=None if draft is None else draft.storage.thresholds,
        )


class PartWeights:
    """Weights of ids of the part, while a kernel is traced. Each warp has its own source.

    Attributes:
      threads: the operations of the warpgroup.
      each: consecutive ids that a thread reads at once.
      groups: reads that a warp needs for a tile.
      first_id: ``[]`` int32, the part's first id.
      is_wanted: ``[128]`` bool, whether the source is.
      without: ``[128]`` int32, the id that has no weight, unless the weights are the residual: the
        draft, or no id of the vocabulary.
      target: the target row.
      p: from its entries to ``p``.
      draft: the draft row; None if the call has none.
      uses_q: ``[128]`` bool, whether the weights are the residual; None if the call has no drafts.
      weight: ``[128]`` float32, the joint weight of the drafts before; likewise.
      q: from entries of the draft row to ``q``; None of probabilities.
    """

    def __init__(
        self, threads: Threads, rows: LocalRows, operands: PartOperands[Ref], item: jax.Array
    ):
        source = jax.tree.map(lambda ref: threads.gather(ref, item), operands.source)
        self.threads, self.first_id, draft = threads, operands.first_id[0], operands.draft
        self.is_wanted, self.without = source.row >= 0, source.token_id
        scale = jnp.minimum(source.inv_temperature * LOG2E, LARGEST)

        def exponent(of_row: Scale) -> Exponent:
            return Exponent(scale, of_row.log_scale * LOG2E, of_row.shift)

        matrices = [operands.target]
        if draft is not None and operands.columns is None:
            matrices.append(draft)
        self.each = 16 // max([jnp.dtype(x.dtype).itemsize for x in matrices])
        if any([x.shape[1] % self.each for x in matrices]):
            self.each = 1
        self.groups = TILE // (WARP * self.each)
        row_of = functools.partial(WarpRow, threads, each=self.each, size=rows.target.size)
        self.target = row_of(
            operands.target,
            jnp.clip(source.row, 0, operands.target.shape[0] - 1),
            first=self.first_id,
            fill=-jnp.inf,
            threshold=source.threshold,
            bitmask=operands.bitmask,
        )
        self.p, self.weight = exponent(source.scale), source.weight
        self.q = None if source.draft_scale is None else exponent(source.draft_scale)
        self.draft: WarpRow | None = None
        self.uses_q: jax.Array | None = None
        if not isinstance(rows.q, Stored) or draft is None:
            return
        row, storage = jnp.clip(source.draft_row, 0, draft.shape[0] - 1), rows.q.storage
        thresholds, self.uses_q = operands.thresholds, source.uses_q != 0
        self.draft = row_of(
            draft,
            row,
            first=self.first_id if storage.part.is_split else jnp.int32(0),
            fill=storage.fill,
            threshold=None if thresholds is None else threads.gather(thresholds, row),
            columns=operands.columns,
        )

    def ids(self, tile: jax.Array, group: jax.Array | int) -> jax.Array:
        """The id that each thread begins at, in one of the reads of a tile."""
        return tile * TILE + (group * WARP + self.threads.lane) * self.each

    def read(self, firsts: list[jax.Array], *, by_q: bool) -> list[tuple[Chunk, Chunk]]:
        """Weights and ``p`` of several reads, by the ids that each thread begins at.

        The weights are ``(weight * p - q)+``, or else ``p`` without one id.
        """
        draft = self.draft if by_q else None
        both = [(self.target.entries(x), draft.entries(x) if draft else []) for x in firsts]
        of_reads = [self.p.probabilities(x) for x, _ in both]
        found = []
        for first, (_, drafts), p in zip(firsts, both, of_reads, strict=True):
            if draft is None:
                weights = [jnp.where(first + j == self.without, 0.0, x) for j, x in enumerate(p)]
            else:
                weights = excess([self.weight * x for x in p], drafts, self.q)
            found.append((weights, p))
        return found

    def either(self, fn: Callable[[bool], T]) -> T:
        """``fn(by_q)``, by what the warp's weights are."""
        if self.uses_q is None:
            return fn(False)
        return self.threads.cond(self.uses_q, lambda: fn(True), lambda: fn(False))

    def or_p(self, has_mass: jax.Array) -> PartWeights:
        """The same where there is mass by them, else ``p``."""
        chosen = copy.copy(self)
        chosen.without = jnp.where(has_mass, self.without, -1)
        if self.uses_q is not None:
            chosen.uses_q = self.uses_q & has_mass
        return chosen


def part_masses(rows: LocalRows, source: Source, *, interpret: Any = False) -> jax.Array:
    """Sums of this part's weights, and of its ``p``, by tile.

    Args:
      rows: target and draft rows. Draft rows do not list candidates.
      source: whose weights to sum, ``[G]``; none if the row is negative.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[G, 2, n]`` float32, as `Gather.own_masses`; 0 if the row is negative.
    """
    count, of_part = source.row.shape[0], rows.num_tiles

    def sum_tiles(place: Place, operands: PartOperands[Ref], masses: Ref, _: None) -> None:
        threads = place.threads
        warp = place.cluster * WARPS + lax.div(threads.index, WARP)
        item, tile = lax.div(warp, of_part), lax.rem(warp, of_part)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, rows, operands, item)
        at_once = min(_AT_ONCE, weights.groups)
        nothing = threads.filled(0.0), threads.filled(0.0)

        def add(by_q: bool) -> tuple[jax.Array, jax.Array]:
            whole_tile = lax.div(weights.first_id, TILE) + tile

            def step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Any:
                firsts = [weights.ids(whole_tile, i * at_once + j) for j in range(at_once)]
                found = zip(*weights.read(firsts, by_q=by_q), strict=True)
                return tuple([s + tree_sum(sum(xs, [])) for s, xs in zip(sums, found, strict=True)])

            mass, p = lax.fori_loop(0, weights.groups // at_once, step, nothing)
            return threads.warp_sum(mass), threads.warp_sum(p)

        is_wanted = inside & weights.is_wanted
        sums = threads.cond(is_wanted, lambda: weights.either(add), lambda: nothing)
        for kind, total in enumerate(sums):
            where = (item * 2 + kind) * of_part + tile
            threads.scatter(masses, where, total, inside & (threads.lane == 0))

    masses = launch(
        sum_tiles,
        PartOperands.of(rows, source),
        out=jax.ShapeDtypeStruct((count * 2 * of_part,), jnp.float32),
        scratch=None,
        grid=-(-count * of_part // WARPS),
        interpret=interpret,
    )
    return masses.reshape(count, 2, of_part)


def part_draw(
    rows: LocalRows,
    source: Source,
    recover: jax.Array,
    masses: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Draw by the masses of every part.

    Args:
      rows: as for `part_masses`.
      source: what to draw from, ``[B]``; nothing if the row is negative.
      recover: ``[B, 2]`` float32 uniforms for tile and token.
      masses: ``[num_parts, B, 2, n]`` float32, from `part_masses`.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[B]`` int32 tokens, 0 for those of another part, and ``[B]`` bool, whether a weight is NaN.
    """
    count = source.row.shape[0]

    def draw(place: Place, operands: Any, found: tuple[Ref, Ref], _: None) -> None:
        threads, (of_part, recover, masses) = place.threads, operands
        item = place.cluster * WARPS + lax.div(threads.index, WARP)
        inside, item = item < count, jnp.minimum(item, count - 1)
        weights = PartWeights(threads, rows, of_part, item)
        one = PartDraw(weights, rows, recover, masses, count, item)
        zero = threads.filled(0, jnp.int32)
        drawn = threads.cond(inside & weights.is_wanted, one.run, lambda: (zero, zero))
        for ref, x in zip(found, drawn, strict=True):
            threads.scatter(ref, item, x, inside & (threads.lane == 0))

    token_ids, bad = launch(
        draw,
        (PartOperands.of(rows, source), recover.reshape(-1), masses.reshape(-1)),
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
      rows: the static side of the part.
      recover: ref ``[B * 2]`` float32.
      masses: ref ``[num_parts * B * 2 * n]`` float32.
      batch: B.
      item: ``[128]`` int32, index of the request.
    """

    weights: PartWeights
    rows: LocalRows
    recover: Ref
    masses: Ref
    batch: int
    item: jax.Array

    def run(self) -> tuple[jax.Array, jax.Array]:
        """The token, or 0 if it is another part's; and 1 if a weight is NaN, else 0."""
        weights, threads, lane = self.weights, self.weights.threads, self.weights.threads.lane
        by_weight, by_p = self._by_tile(0), self._by_tile(1)
        mass = threads.warp_sum(tree_sum(by_weight))
        has_mass = mass > 0
        both = zip(by_weight, by_p, strict=True)
        masses = [jnp.where(has_mass, of_weight, of_p) for of_weight, of_p in both]
        uniform = threads.gather(self.recover, self.item * 2)
        tile, _ = pick(threads, masses, uniform, is_share=True)

        # An edge between parts may cut the tile: which part of it?
        held = self._mass(tile, lane, jnp.where(has_mass, 0, 1))
        uniform = threads.gather(self.recover, self.item * 2 + 1)
        which, past = pick(threads, [held], uniform, is_share=True)
        zero, one = [threads.filled(x, jnp.int32) for x in (0, 1)]
        token_id = threads.cond(
            weights.first_id == self._owner(tile, which) * self.rows.target.width,
            lambda: self._token(tile, past, weights.or_p(has_mass)),
            lambda: zero,
        )
        return token_id, jnp.where(mass != mass, one, zero)

    def _owner(self, tile: jax.Array, piece: jax.Array | int) -> jax.Array:
        """The part that holds a piece of a tile, counted from the first part that has any of it."""
        return lax.div(tile * TILE, self.rows.target.width) + piece

    def _mass(self, tile: jax.Array, piece: jax.Array | int, kind: jax.Array | int) -> jax.Array:
        """The mass of a piece: of weights (kind 0) or of ``p`` (kind 1); 0 if there is no piece."""
        owner, count = self._owner(tile, piece), self.rows.num_tiles
        first = owner * self.rows.target.width
        is_piece = (first < (tile + 1) * TILE) & (owner < self.rows.part.num_parts)
        place = ((owner * self.batch + self.item) * 2 + kind) * count + tile - lax.div(first, TILE)
        mass = self.weights.threads.gather(self.masses, jnp.where(is_piece, place, 0))
        return jnp.where(is_piece, mass, 0.0)

    def _by_tile(self, kind: int) -> list[jax.Array]:
        """The mass of every tile by lane, one array for every 32 tiles."""
        rows, found = self.rows, []
        most = pieces_of_tiles(rows.target.width, rows.part.num_parts, rows.num_tiles).shape[1]
        count = num_tiles(rows.target.width * rows.part.num_parts)
        for i in range(0, count, WARP):
            tile = self.weights.threads.lane + i
            inside = jnp.minimum(tile, count - 1)
            mass = tree_sum([self._mass(inside, j, kind) for j in range(most)])
            found.append(jnp.where(tile < count, mass, 0.0))
        return found

    def _token(self, tile: jax.Array, past: jax.Array, weights: PartWeights) -> jax.Array:
        """Pick an id in a tile: first a read of the warp, then a thread, then an id."""
        threads, lane, groups = weights.threads, weights.threads.lane, weights.groups
        arrays = -(-groups // WARP)

        def pick_id(by_q: bool) -> jax.Array:
            def add(i: jax.Array, masses: list[jax.Array]) -> list[jax.Array]:
                ((group, _),) = weights.read([weights.ids(tile, i)], by_q=by_q)
                mass = threads.warp_sum(tree_sum(group))
                return [jnp.where(lane + j * WARP == i, mass, x) for j, x in enumerate(masses)]

            masses = lax.fori_loop(0, groups, add, [threads.filled(0.0)] * arrays)
            group, rest = pick(threads, masses, past)
            first = weights.ids(tile, group)
            ((of_thread, _),) = weights.read([first], by_q=by_q)
            thread, rest = pick(threads, [tree_sum(of_thread)], rest)
            return threads.shuffle(first + pick_of(of_thread, rest), thread)

        token_id = weights.either(pick_id)
        last = weights.first_id + self.rows.target.width - 1
        return jnp.clip(token_id, weights.first_id, last)
