"""Launches for a device's part of a split vocabulary: a row of a part has a first id.

`row_statistics` reads each row once, for its mass or its argmax. `part_masses` sums the weights of
the tiles to draw from, and `part_draw` draws by the masses of all parts. The last two read global
memory: each warp has one tile or one request, and needs neither other warps nor shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

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
from jax_specdec._src.verify.mosaic_gpu.request import OneHotOperands
from jax_specdec._src.verify.mosaic_gpu.rows import (
    Below,
    Chunk,
    ForbiddenInPart,
    Limit,
    MappedWarpRow,
    NoThresholds,
    TargetSlice,
    Thresholds,
    WarpRow,
    words_of,
)
from jax_specdec._src.verify.mosaic_gpu.statistics import (
    LARGEST,
    LOG2E,
    Exponent,
    Given,
    Probability,
    RelativeExponent,
    excess,
)
from jax_specdec._src.verify.mosaic_gpu.threads import WARP, Ref, T, Threads
from jax_specdec._src.verify.q import Logits, Mapped, Stored
from jax_specdec._src.verify.rows import Rows
from jax_specdec._src.verify.source import LocalRows, Source
from jax_specdec._src.verify.statistics import Partials
from jax_specdec._src.verify.tiles import TILE, Scale, num_tiles, pieces_of_tiles

_AT_ONCE = 4
"""Reads of each row that a thread has in flight at once."""

X = TypeVar("X")

Read: TypeAlias = Callable[[list[jax.Array]], list[tuple[Chunk, Chunk]]]
"""Takes the ids that each thread begins at, of several reads; returns weights and ``p`` of each."""


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
    """Returns statistics of some rows of logits.

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
    logits = rows.matrix
    first_id = rows.part.first_id
    num_rows = index.shape[0]
    per_request = num_rows // inv_temperature.shape[0]
    bitmask = jax.tree.map(words_of, rows.token_bitmask)
    memory = SharedMemory.of(logits, num_requests=num_rows, size=rows.width, config=config)
    slices = memory.slices
    barriers: Any = plgpu.SMEM((2 * slices.tiles,), jnp.int32)
    if interpret:
        barriers = plgpu.Barrier(num_barriers=slices.tiles)

    def read_rows(place: Place, operands: Any, found: Any, scratch: Any) -> None:
        # A cluster of CTAs has one row; each holds a slice of it in shared memory.
        logits, bitmask, rows_of_index, inv, by_argmax, least, first_id = operands
        peaks, others = found
        buffer, barriers = scratch
        threads = place.threads
        request = lax.div(place.cluster, per_request)
        row = rows_of_index[place.cluster]
        threads.init_barriers(barriers, slices.tiles)
        # The bitmask and `size` count from id 0 of the vocabulary, slices from the part's first id.
        first = place.cta * slices.ids
        first_of_part = first_id[0]
        end = jnp.clip(rows.size - first_id[0], 0, slices.size)
        limits: tuple[Limit, ...] = ()
        if bitmask is not None:
            limits += (ForbiddenInPart(bitmask, first_of_part),)
        if least is not None:
            limits += (Below(least[place.cluster]),)
        target = TargetSlice(
            threads=threads,
            matrix=logits,
            buffer=buffer,
            barriers=barriers,
            per_slice=slices.tiles,
            stride=memory.stride,
            first_barrier=0,
            first=first,
            size=slices.size,
            each=memory.each,
            limits=limits,
            end=end,
        )
        # A row that is not wanted is not copied; its CTAs write that there is nothing.
        pl.when(row >= 0)(lambda: target.copy(row))
        target.fill_end()
        threads.cluster_wait()
        factor = jnp.minimum(inv[request] * LOG2E, LARGEST)
        zero = jnp.int32(0)

        def look() -> tuple[jax.Array, jax.Array]:
            flag = threads.gather(by_argmax, threads.filled(0, jnp.int32) + request)
            return lax.cond(
                threads.scalar(flag) != 0,
                lambda: statistics.max_and_place(target, row, zero),
                lambda: statistics.base_and_sum(target, row, zero, factor),
            )

        # A maximum and the bits of its place, or a base and the mass relative to it; by warp.
        nothing = threads.filled(-jnp.inf), threads.filled(0.0)
        peak, other = lax.cond(row >= 0, look, lambda: nothing)
        warp = (place.cluster * slices.cluster + place.cta) * WARPS + lax.div(threads.index, WARP)
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
    # [warps, G]: XLA joins what the warps found.
    peaks, others = [x.reshape(num_rows, slices.warps).T for x in found]
    argmaxes = first_id + lax.bitcast_convert_type(others, jnp.int32)
    parts = Partials(peaks, others, argmaxes)
    whole = Partials.of_whole(parts, jnp.repeat(inv_temperature, per_request))
    return whole._replace(max=jnp.where(jnp.isnan(whole.max), jnp.inf, whole.max))


# What the kernels that draw read: arrays, refs of them, or what was loaded of them. The order of
# the fields is that of the kernel's parameters.


class TargetSource(NamedTuple, Generic[X]):
    """Source of a draw where the call has no draft rows, ``[G]`` each; see `source.Source`."""

    row: X  # int32, target row; nothing is drawn if it is negative
    token_id: X  # int32, the id that has no weight; no id of the vocabulary where all have
    inv_temperature: X  # float32
    scale: Scale  # normalizer of the target row
    threshold: X | None  # float32, target logits below it were filtered out; None if none can be


class ResidualSource(NamedTuple, Generic[X]):
    """Source of a draw where the call has draft rows, ``[G]`` each."""

    row: X  # as in `TargetSource`, and so are the next ones that say nothing
    draft_row: X  # int32
    token_id: X
    uses_q: X  # bool, whether the weights are the residual; else as without draft rows
    inv_temperature: X
    scale: Scale
    threshold: X | None
    draft_scale: Scale | None  # normalizer of the draft row; None of probabilities
    weight: X  # float32, joint weight of the drafts before


class PartDraftOperands(NamedTuple, Generic[X]):
    """Draft rows of the kernels that draw."""

    matrix: X  # [R, Vd]
    columns: tuple[X, ...]  # of a map: one [size] int32, the column of each id; else none
    thresholds: Thresholds | NoThresholds  # of the rows


class PartOperands(NamedTuple, Generic[X]):
    """Operands of the kernels that draw."""

    source: TargetSource[X] | ResidualSource[X]  # what is drawn from
    first_id: X  # [1] int32, the part's first id
    target: X  # [M, width] target logits of the part
    bitmask: X | None  # [M, words] int32, the ids that are allowed; None: all are
    draft: OneHotOperands | PartDraftOperands[X]  # draft rows, if the call has any

    @classmethod
    def of(cls, rows: LocalRows, source: Source) -> PartOperands[jax.Array]:
        """Returns those of a call."""
        target = rows.target
        q = rows.q
        common: dict[str, Any] = dict(
            first_id=rows.part.first_id[None],
            target=target.matrix,
            bitmask=jax.tree.map(words_of, target.token_bitmask),
        )
        of_target: dict[str, Any] = dict(
            row=source.row,
            token_id=source.token_id,
            inv_temperature=source.inv_temperature,
            scale=source.scale,
            threshold=source.threshold,
        )
        if not isinstance(q, Stored):
            return PartOperands(source=TargetSource(**of_target), draft=OneHotOperands(), **common)
        has_scale = isinstance(q.kind, Logits)
        thresholds = q.storage.thresholds
        return PartOperands(
            source=ResidualSource(
                draft_row=source.draft_row,
                uses_q=source.uses_q,
                draft_scale=source.draft_scale.scale if has_scale else None,
                weight=source.weight,
                **of_target,
            ),
            draft=PartDraftOperands(
                matrix=q.storage.matrix,
                columns=(q.columns,) if isinstance(q, Mapped) else (),
                thresholds=NoThresholds() if thresholds is None else Thresholds(thresholds),
            ),
            **common,
        )


# The weights that a token is drawn by.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartWeights:
    """Weights of ids of the part, while a kernel is traced: ``p`` without one id.

    Each warp has its own source.
    """

    threads: Threads  # the operations of the warpgroup
    each: int  # consecutive ids that a thread reads at once
    first_id: jax.Array  # [] int32, the part's first id
    is_wanted: jax.Array  # [128] bool, whether the source is
    # [128] int32, the id that has no weight: the draft, or no id of the vocabulary.
    without: jax.Array
    target: WarpRow  # the target row
    p: Exponent  # from its entries to p

    @staticmethod
    def of(
        threads: Threads, rows: LocalRows, operands: PartOperands[Ref], item: jax.Array
    ) -> PartWeights:
        """Returns the weights of each warp's source.

        Args:
          threads: the operations of the warpgroup.
          rows: the static side of the part.
          operands: refs.
          item: ``[128]`` int32, index of the source, the same in all threads of a warp.
        """
        # [128] each: the fields of each warp's source, loaded; what is absent stays so.
        source = jax.tree.map(lambda ref: threads.gather(ref, item), operands.source)
        first_id = operands.first_id[0]
        factor = jnp.minimum(source.inv_temperature * LOG2E, LARGEST)
        each = _entries_at_once(operands)
        limits: tuple[Limit, ...] = ()
        if source.threshold is not None:
            limits += (Below(source.threshold),)
        if operands.bitmask is not None:
            limits += (ForbiddenInPart(operands.bitmask, first_id),)
        target = WarpRow(
            threads=threads,
            matrix=operands.target,
            row=jnp.clip(source.row, 0, operands.target.shape[0] - 1),
            each=each,
            first=first_id,
            size=rows.target.size,
            fill=-jnp.inf,
            limits=limits,
        )
        of_target: dict[str, Any] = dict(
            threads=threads,
            each=each,
            first_id=first_id,
            is_wanted=source.row >= 0,
            without=source.token_id,
            target=target,
            p=_exponent(source.scale, factor),
        )
        if isinstance(source, TargetSource):
            return PartWeights(**of_target)
        q: Probability = Given()
        if source.draft_scale is not None:
            q = _exponent(source.draft_scale, factor)
        return ResidualWeights(
            draft=_draft_row(threads, rows, operands, source.draft_row, each),
            uses_q=source.uses_q != 0,
            weight=source.weight,
            q=q,
            **of_target,
        )

    @property
    def groups(self) -> int:
        """Returns how many reads a warp needs for a tile."""
        return TILE // (WARP * self.each)

    def ids(self, tile: jax.Array, group: jax.Array | int) -> jax.Array:
        """Returns the id that each thread begins at, in one of the reads of a tile."""
        return tile * TILE + (group * WARP + self.threads.lane) * self.each

    def by_target(self, firsts: list[jax.Array]) -> list[tuple[Chunk, Chunk]]:
        """Returns ``p`` without one id, and ``p``; see `Read`."""
        entries = [self.target.entries(first) for first in firsts]
        found = []
        for first, p in zip(firsts, [self.p.of_chunk(x) for x in entries], strict=True):
            weights = [jnp.where(first + j == self.without, 0.0, x) for j, x in enumerate(p)]
            found.append((weights, p))
        return found

    def either(self, do: Callable[[Read], T]) -> T:
        """Returns what `do` gives of the warp's weights."""
        return do(self.by_target)

    def or_p(self, has_mass: jax.Array) -> PartWeights:
        """Returns these weights where there is mass by them, else ``p``."""
        return dataclasses.replace(self, without=jnp.where(has_mass, self.without, -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualWeights(PartWeights):
    """Weights of ids of the part: ``(weight * p - q)+``, or for some warps ``p`` without one id."""

    draft: WarpRow  # the draft row
    uses_q: jax.Array  # [128] bool, whether the weights are the residual
    weight: jax.Array  # [128] float32, the joint weight of the drafts before
    q: Probability  # from entries of the draft row to q

    def by_residual(self, firsts: list[jax.Array]) -> list[tuple[Chunk, Chunk]]:
        """Returns the residual, and ``p``; see `Read`."""
        # All loads begin before any of them is used.
        entries = [(self.target.entries(first), self.draft.entries(first)) for first in firsts]
        ps = [self.p.of_chunk(targets) for targets, _ in entries]
        found = []
        for (_, drafts), p in zip(entries, ps, strict=True):
            found.append((excess([self.weight * x for x in p], drafts, self.q), p))
        return found

    def either(self, do: Callable[[Read], T]) -> T:
        """Returns what `do` gives of the warp's weights."""
        return self.threads.cond(
            self.uses_q, lambda: do(self.by_residual), lambda: do(self.by_target)
        )

    def or_p(self, has_mass: jax.Array) -> PartWeights:
        """Returns these weights where there is mass by them, else ``p``."""
        without = jnp.where(has_mass, self.without, -1)
        return dataclasses.replace(self, without=without, uses_q=self.uses_q & has_mass)


def _entries_at_once(operands: PartOperands[Ref]) -> int:
    """Returns how many consecutive entries a thread reads at once, of target and draft rows alike.

    Sixteen bytes of the wider entries, if they are aligned in all rows; else one. A map's columns
    lie anywhere, and are read one by one.
    """
    draft = operands.draft
    matrices = [operands.target]
    if isinstance(draft, PartDraftOperands) and not draft.columns:
        matrices.append(draft.matrix)
    each = 16 // max([jnp.dtype(x.dtype).itemsize for x in matrices])
    return 1 if any([x.shape[1] % each for x in matrices]) else each


def _draft_row(
    threads: Threads, rows: LocalRows, operands: PartOperands[Ref], row: jax.Array, each: int
) -> WarpRow:
    """Returns the draft row ``[128]`` of each warp, whole or in the same parts as the target's."""
    draft = operands.draft
    assert isinstance(draft, PartDraftOperands) and isinstance(rows.q, Stored)
    storage = rows.q.storage
    row = jnp.clip(row, 0, draft.matrix.shape[0] - 1)
    common: dict[str, Any] = dict(
        threads=threads,
        matrix=draft.matrix,
        row=row,
        each=each,
        first=operands.first_id[0] if storage.part.is_split else jnp.int32(0),
        size=rows.target.size,
        fill=storage.fill,
        limits=draft.thresholds.limits(threads, row),
    )
    if draft.columns:
        return MappedWarpRow(columns=draft.columns[0], **common)
    return WarpRow(**common)


def _exponent(scale: Scale, factor: jax.Array) -> Exponent:
    """Returns what turns entries into probabilities, from a normalizer of base e."""
    return RelativeExponent(factor=factor, shift=scale.log_scale * LOG2E, peak=scale.shift)


# The launches.


def part_masses(rows: LocalRows, source: Source, *, interpret: Any = False) -> jax.Array:
    """Returns sums of this part's weights, and of its ``p``, by tile.

    Args:
      rows: target and draft rows. Draft rows do not list candidates.
      source: whose weights to sum, ``[G]``; none if the row is negative.
      interpret: parameters of GPU interpret mode, or False to run on a GPU.

    Returns:
      ``[G, 2, n]`` float32, as `Gather.own_masses`; 0 if the row is negative.
    """
    count = source.row.shape[0]
    of_part = rows.num_tiles

    def sum_tiles(place: Place, operands: PartOperands[Ref], masses: Ref, _: None) -> None:
        # Each warp has a tile of a source; those past the last one have the last one again.
        threads = place.threads
        warp = place.cluster * WARPS + lax.div(threads.index, WARP)
        item = lax.div(warp, of_part)
        tile = lax.rem(warp, of_part)
        inside = item < count
        item = jnp.minimum(item, count - 1)
        weights = PartWeights.of(threads, rows, operands, item)
        at_once = min(_AT_ONCE, weights.groups)
        nothing = threads.filled(0.0), threads.filled(0.0)

        def add(read: Read) -> tuple[jax.Array, jax.Array]:
            whole_tile = lax.div(weights.first_id, TILE) + tile  # counted from id 0

            # Several reads of 32 * each ids at a time, whose loads are in flight together.
            def step(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> Any:
                firsts = [weights.ids(whole_tile, i * at_once + j) for j in range(at_once)]
                of_weights, of_p = zip(*read(firsts), strict=True)
                mass, p = sums
                return mass + tree_sum(sum(of_weights, [])), p + tree_sum(sum(of_p, []))

            # [128], a sum for each thread, then for each warp.
            mass, p = lax.fori_loop(0, weights.groups // at_once, step, nothing)
            return threads.warp_sum(mass), threads.warp_sum(p)

        is_wanted = inside & weights.is_wanted
        sums = threads.cond(is_wanted, lambda: weights.either(add), lambda: nothing)
        # [G, 2, n], flat.
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
    """Returns tokens drawn by the masses of all parts, each from the part that has it.

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
        # Each warp has a request.
        threads = place.threads
        of_part, recover, masses = operands
        item = place.cluster * WARPS + lax.div(threads.index, WARP)
        inside = item < count
        item = jnp.minimum(item, count - 1)
        one = PartDraw(
            weights=PartWeights.of(threads, rows, of_part, item),
            rows=rows,
            recover=recover,
            masses=masses,
            batch=count,
            item=item,
        )
        zero = threads.filled(0, jnp.int32)
        is_wanted = inside & one.weights.is_wanted
        drawn = threads.cond(is_wanted, one.run, lambda: (zero, zero))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartDraw:
    """One warp's draw for one request, while the kernel is traced.

    The walk's draw (`draw.Draw`) picks in a tile by a whole warpgroup. It has a lane for each of at
    most 32 reads of a tile by a warp, but a tile of rows that are not aligned takes 64. It would
    also cost registers and warps: see "The draw" in ``docs/kernel.md``. What both draws share is
    `pick`, `pick_of` and what they are made of.
    """

    weights: PartWeights  # of the ids of the part
    rows: LocalRows  # the static side of the part
    recover: Ref  # ref [B * 2] float32
    masses: Ref  # ref [num_parts * B * 2 * n] float32
    batch: int  # B
    item: jax.Array  # [128] int32, index of the request

    def run(self) -> tuple[jax.Array, jax.Array]:
        """Returns the token, or 0 if it is another part's; and 1 if a weight is NaN, else 0."""
        weights = self.weights
        threads = weights.threads
        # By lane, an array for every 32 tiles of the whole vocabulary.
        by_weight = self._by_tile(0)
        by_p = self._by_tile(1)
        # By p, where nothing has weight by any part.
        mass = threads.warp_sum(tree_sum(by_weight))
        has_mass = mass > 0
        masses = [
            jnp.where(has_mass, of_weight, of_p)
            for of_weight, of_p in zip(by_weight, by_p, strict=True)
        ]
        # The first uniform picks the tile: every part finds the same one.
        uniform = threads.gather(self.recover, self.item * 2)
        tile, _ = pick(threads, masses, uniform, is_share=True)

        # An edge between parts may cut the tile: which piece of it? By lane, the piece of a part.
        held = self._mass(tile, threads.lane, jnp.where(has_mass, 0, 1))
        # The second picks the piece, and with what is left of it the id, by the part that has it.
        uniform = threads.gather(self.recover, self.item * 2 + 1)
        piece, past = pick(threads, [held], uniform, is_share=True)
        zero = threads.filled(0, jnp.int32)
        one = threads.filled(1, jnp.int32)
        token_id = threads.cond(
            weights.first_id == self._owner(tile, piece) * self.rows.target.width,
            lambda: self._token(tile, past, weights.or_p(has_mass)),
            lambda: zero,
        )
        return token_id, jnp.where(mass != mass, one, zero)

    def _owner(self, tile: jax.Array, piece: jax.Array | int) -> jax.Array:
        """Returns the index of the part that has a piece of a tile.

        Pieces count from the first part that overlaps the tile.
        """
        return lax.div(tile * TILE, self.rows.target.width) + piece

    def _mass(self, tile: jax.Array, piece: jax.Array | int, kind: jax.Array | int) -> jax.Array:
        """Returns the mass of a piece: of weights (kind 0) or ``p`` (1); 0 if there is no piece."""
        owner = self._owner(tile, piece)
        count = self.rows.num_tiles
        first = owner * self.rows.target.width  # the owner's first id
        is_piece = (first < (tile + 1) * TILE) & (owner < self.rows.part.num_parts)
        # In [num_parts, B, 2, n], where a part's tiles count from the one that it begins in.
        place = ((owner * self.batch + self.item) * 2 + kind) * count + tile - lax.div(first, TILE)
        mass = self.weights.threads.gather(self.masses, jnp.where(is_piece, place, 0))
        return jnp.where(is_piece, mass, 0.0)

    def _by_tile(self, kind: int) -> list[jax.Array]:
        """Returns the mass of every tile by lane, one array for every 32 tiles."""
        rows = self.rows
        most = pieces_of_tiles(rows.target.width, rows.part.num_parts, rows.num_tiles).shape[1]
        count = num_tiles(rows.target.width * rows.part.num_parts)
        found = []
        # A tile lies in one part, or a few: where parts are narrower than a tile, in many.
        for i in range(0, count, WARP):
            tile = self.weights.threads.lane + i
            tile_in_range = jnp.minimum(tile, count - 1)
            mass = tree_sum([self._mass(tile_in_range, j, kind) for j in range(most)])
            found.append(jnp.where(tile < count, mass, 0.0))
        return found

    def _token(self, tile: jax.Array, past: jax.Array, weights: PartWeights) -> jax.Array:
        """Returns an id of a tile: of its reads one is picked, then a thread, then an id."""
        threads = weights.threads
        lane = threads.lane
        groups = weights.groups

        def pick_id(read: Read) -> jax.Array:
            # By lane: the mass of each read, an array for every 32.
            def add(i: jax.Array, masses: list[jax.Array]) -> list[jax.Array]:
                ((group, _),) = read([weights.ids(tile, i)])
                mass = threads.warp_sum(tree_sum(group))
                return [jnp.where(lane + j * WARP == i, mass, x) for j, x in enumerate(masses)]

            nothing = [threads.filled(0.0)] * -(-groups // WARP)
            masses = lax.fori_loop(0, groups, add, nothing)
            group, rest = pick(threads, masses, past)
            # That read again: of its threads one, and of its ids one.
            first = weights.ids(tile, group)
            ((of_thread, _),) = read([first])
            thread, rest = pick(threads, [tree_sum(of_thread)], rest)
            return threads.shuffle(first + pick_of(of_thread, rest), thread)

        token_id = weights.either(pick_id)
        # Where all weights of the piece are 0, an id of the tile that may be another part's.
        last = weights.first_id + self.rows.target.width - 1
        return jnp.clip(token_id, weights.first_id, last)
