"""The static side of a launch: how rows are cut into slices, and what shared memory holds.

A caller may set it by a `KernelConfig`; if not, `default_config` does, by a rule of thumb.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax

from jax_specdec._src.base.types import DraftDistribution, DraftLogits
from jax_specdec._src.mosaic.gpus import MAX_CLUSTER, SHARED_BYTES
from jax_specdec._src.mosaic.threads import WARPS
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.rows.tiles import TILE, num_tiles
from jax_specdec._src.verify.mosaic_gpu.config import MAX_TILES, KernelConfig
from jax_specdec._src.verify.rules import Rule

Entries = Literal["none", "probs", "logits", "normalized"]
"""What draft rows hold, "none" without any; "normalized" if log-normalizers are stored too."""

Ids = Literal["in order", "map", "candidates"]
"""Which ids the columns of draft rows stand for: one map for all rows, or candidates of each."""

SLOTS = 2
"""Slots of an exchange between CTAs; see `cluster`."""

MAX_BARRIERS = 32
"""Barriers of a warpgroup, at most: each is initialized by one thread of its first warp."""

MAX_CANDIDATES = 128
"""Ids that a draft row may list, at most: one for each thread of a warpgroup."""

MAX_MAPPED = 2**16 - 1
"""Ids that a map of draft rows may list, at most: a column takes two bytes."""

_CORES_OF_LARGE = 132  # H100, H200; smaller ones may have no room for a cluster of 16
_TILES_PER_CTA = 8  # at most, unless two CTAs hold a row: clusters of two use every core
_PAIR_BYTES = 2 * 52 * 1024  # of such a row: four CTAs on a multiprocessor
_SLOT_BYTES = 8 * 1024  # at most, what else a warpgroup holds
_FREE_CTAS_PER_CORE = 4  # so many are placed without waiting
_MOST_BYTES = 48 * 1024  # of a slice: four CTAs on a multiprocessor


def default_config(
    num_requests: int, size: int, held: int, num_cores: int, draft_size: int = 0
) -> KernelConfig:
    """Returns the default settings, by a rule of thumb.

    For few requests, enough CTAs to use the whole device. Time then goes into latency and one
    exponential per entry, not into bandwidth, so rows that may not be needed are read too. For
    many requests, no more CTAs than have work, because each costs time, and little shared
    memory, so that many run at once. Several tiles of a draft row are loaded at once if that
    leaves enough registers for the CTAs of a multiprocessor.

    Args:
      num_requests: B.
      size: ids of a row, without padding.
      held: bytes that a CTA holds per id of its slice.
      num_cores: multiprocessors of the device.
      draft_size: bytes of a draft entry.
    """
    # Few requests: a row over the whole device. Many: over the CTAs that have work.
    is_large = num_cores >= _CORES_OF_LARGE
    ctas = num_requests * MAX_CLUSTER
    is_few = ctas <= _FREE_CTAS_PER_CORE * num_cores
    if is_large and (is_few or Slices.of(size, 8).ids * held > _MOST_BYTES):
        # Clusters of 16 reach seven eighths of the multiprocessors. For three or four rows
        # there are registers enough if each CTA has its own multiprocessor; else for two.
        cluster = MAX_CLUSTER
        reached = 7 * num_cores // 8
        rows = 2 if ctas <= 2 * reached else 1
        if 2 * ctas <= num_cores:
            rows = 3
        if ctas <= reached < 2 * ctas and max(held, draft_size) == 2:
            rows = 4  # of entries of four bytes registers are too few
    else:
        at_once = _FREE_CTAS_PER_CORE * num_cores // num_requests
        row_tiles = num_tiles(size)
        is_pair = row_tiles * TILE * held <= _PAIR_BYTES
        with_work = 1 if is_pair else -(-row_tiles // _TILES_PER_CTA)
        # The next power of two, from 2 to 8.
        cluster = min(8, 1 << (max(2, at_once, with_work) - 1).bit_length())
        rows = 1
    slices = Slices.of(size, cluster)
    # With up to two rows, two CTAs share a multiprocessor and its memory.
    room = SHARED_BYTES if rows > 2 else SHARED_BYTES // 2
    # Tiles at once: of a CTA's tiles a divisor, or some would be read in vain. Four if there
    # are registers enough, since CTAs are few and read several rows. Else two, so that six CTAs
    # fit on a multiprocessor; one if there are few tiles: none would be summed while others
    # arrive.
    most = 1
    if rows > 1:
        most = MAX_TILES
    elif slices.tiles > MAX_TILES:
        most = 2
    return KernelConfig(
        max_cluster=cluster,
        rows_at_once=max(1, min(rows, room // (slices.ids * held + _SLOT_BYTES))),
        tiles_at_once=math.gcd(slices.tiles, most),
    )


def power_of_two(count: int) -> int:
    """Returns the largest power of two up to `count`."""
    return 1 << (count.bit_length() - 1)


class Slices(NamedTuple):
    """A row of `size` ids cut among the CTAs of a cluster, in whole tiles."""

    size: int  # ids of the row, without padding
    tiles: int  # tiles of a slice; the last slices of a row may have fewer
    ids: int  # ids of a slice
    cluster: int  # CTAs, a power of two; those past the end of the row have nothing to do
    warps: int  # warps of the whole cluster
    row_tiles: int  # tiles of the row

    @classmethod
    def of(cls, size: int, max_cluster: int) -> Slices:
        """Returns the slices of rows of `size` ids in a cluster of at most `max_cluster` CTAs."""
        # Powers of two are scheduled well, even with idle CTAs. An exchange takes two CTAs.
        cluster = power_of_two(max_cluster)
        row_tiles = num_tiles(size)
        tiles = -(-row_tiles // cluster)
        while cluster > 2 and cluster // 2 * tiles >= row_tiles:
            cluster //= 2
        return cls(
            size=size,
            tiles=tiles,
            ids=tiles * TILE,
            cluster=cluster,
            warps=cluster * WARPS,
            row_tiles=row_tiles,
        )


class DraftLayout(NamedTuple):
    """Layout of the draft distribution of a call."""

    entries: Entries  # what draft rows hold
    ids: Ids  # which ids their columns stand for
    num_rows: int  # R
    num_columns: int  # Vd
    entry_size: int  # bytes of an entry; 0 without draft rows
    is_aligned: bool  # whether every row begins at a multiple of sixteen bytes

    @classmethod
    def of(cls, distribution: DraftDistribution | None) -> DraftLayout:
        """Returns that of a draft distribution; `NO_DRAFT` for None."""
        if distribution is None:
            return NO_DRAFT
        # What rows hold, then which ids their columns stand for.
        entries: Entries = "probs"
        if isinstance(distribution, DraftLogits):
            entries = "logits" if distribution.log_normalizer is None else "normalized"
        ids: Ids = "in order"
        if distribution.ids is not None:
            ids = "map" if distribution.ids.ndim == 1 else "candidates"
        storage = storage_of(distribution)
        num_rows, num_columns = storage.shape
        return cls(
            entries=entries,
            ids=ids,
            num_rows=num_rows,
            num_columns=num_columns,
            entry_size=storage.dtype.itemsize,
            is_aligned=is_aligned(storage),
        )


NO_DRAFT = DraftLayout("none", "in order", 0, 0, entry_size=0, is_aligned=True)
"""Stands for a draft distribution where a call has none."""


class SharedMemory(NamedTuple):
    """Shared memory of a CTA, in entries of its refs."""

    slices: Slices  # how rows are cut into slices
    # Distance from one tile to the next. Copies of unaligned rows begin a little earlier.
    stride: int
    each: int  # consecutive ids per thread, the same for target and draft rows of any dtype
    masses_per_warp: int  # masses of a warp's tiles, padded to a multiple of what is sent at once
    # Floats of a slot: the masses that all warps send, or up to four other values of each.
    slot: int
    scratch: int  # floats for exchanges between the warps of a CTA
    barriers: int  # number of barriers: one for each slot, then one for each tile
    warpgroups: int  # warpgroups of a CTA, each of which has its own copy of all of this
    tiles_at_once: int  # tiles of a slice whose draft entries are loaded at once
    bytes: int  # shared memory of a CTA, with a margin for the compiler's rounding

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        draft: DraftLayout = NO_DRAFT,
        *,
        num_requests: int,
        size: int,
        config: KernelConfig | None,
        most_rows: int,
        is_plain: bool = False,
    ) -> SharedMemory:
        """Returns that of a call.

        Args:
          draft: how the draft distribution is stored.
          num_requests: B.
          size: ids of a row, without padding.
          config: the caller's choice, or None.
          most_rows: rows of a request that can be read at once.
          is_plain: see `Plan`.
        """
        # Bytes of an entry, and how many CTAs share a row.
        target_size = target_logits.dtype.itemsize
        in_order = draft.ids == "in order"  # else draft rows are not read in the tiles of a row
        draft_size = draft.entry_size if in_order else 0
        if config is None:
            cores = getattr(jax.devices()[0], "core_count", None) or _CORES_OF_LARGE
            config = default_config(num_requests, size, target_size, cores, draft_size)
        slices = Slices.of(size, config.max_cluster)
        stride = TILE
        each = 2  # what is loaded one by one
        tiles_at_once = 1
        if not is_aligned(target_logits):
            # A copy begins up to 15 bytes early, and ends up to 15 bytes late.
            stride += 32 // target_size
        elif draft.is_aligned or not in_order:
            # Sixteen bytes at once of the wider entries.
            each = 4 if 4 in (target_size, draft_size) else 8
            if is_plain and in_order:
                tiles_at_once = power_of_two(min(config.tiles_at_once, slices.tiles))
        # A warpgroup for each row at once, with its own memory: the slice, then two slots.
        warpgroups = min(config.rows_at_once, most_rows)
        masses_per_warp = -(-slices.tiles // 4) * 4  # a store sends four
        slot = slices.warps * masses_per_warp
        scratch = TILE // (128 * each) * WARPS  # a float for each chunk of a tile, by warp
        barriers = SLOTS + slices.tiles
        tile_bytes = slices.tiles * stride * target_size
        float_bytes = 4 * (SLOTS * slot + scratch)
        return cls(
            slices=slices,
            stride=stride,
            each=each,
            masses_per_warp=masses_per_warp,
            slot=slot,
            scratch=scratch,
            barriers=barriers,
            warpgroups=warpgroups,
            tiles_at_once=tiles_at_once,
            bytes=warpgroups * (tile_bytes + float_bytes + 8 * barriers) + 4 * 1024,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static side of a launch that verifies a batch."""

    k: int  # K
    n: int  # N
    size: int  # ids of a row, without padding
    has_bonus_rows: bool  # whether each request owns a bonus row
    num_rows: int  # target rows if none is left out
    rule: Rule  # the rule that sampled requests follow
    has_filter: bool  # whether the call has min-p, top-k or top-p
    # Whether there is no mask, no filter and no block rule. Then there are enough registers to sum
    # masses of tiles while a row is read, and to load several tiles at once.
    is_plain: bool
    entries: Entries  # what draft rows hold
    ids: Ids  # which ids their columns stand for
    num_draft_rows: int  # R
    draft_size: int  # ids that the drafter could draw
    memory: SharedMemory  # how rows are cut into slices, and what shared memory holds

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        draft: DraftLayout,
        rule: Rule,
        *,
        num_requests: int,
        n: int,
        k: int,
        size: int,
        has_bonus_rows: bool,
        has_filter: bool,
        has_bitmask: bool,
        config: KernelConfig | None,
    ) -> Plan:
        """Returns the plan of a call.

        Args:
          draft: how the draft distribution is stored.
          rule: the rule that sampled requests follow.
          num_requests: B.
          size: ids of a row, without padding.
          has_bonus_rows: whether each request owns a bonus row.
          has_filter: whether the call has min-p, top-k or top-p.
          has_bitmask: whether the call has a bitmask.
          config: the caller's choice, or None.
        """
        is_plain = not has_filter and not has_bitmask and not rule.is_block
        return cls(
            k=k,
            n=n,
            size=size,
            has_bonus_rows=has_bonus_rows,
            num_rows=n + (num_requests if has_bonus_rows else 0),
            rule=rule,
            has_filter=has_filter,
            is_plain=is_plain,
            entries=draft.entries,
            ids=draft.ids,
            num_draft_rows=draft.num_rows,
            draft_size=min(draft.num_columns, size) if draft.ids == "in order" else size,
            memory=SharedMemory.of(
                target_logits,
                draft,
                num_requests=num_requests,
                size=size,
                config=config,
                most_rows=k + 1 if rule.reads_ahead else 1,
                is_plain=is_plain,
            ),
        )

    @property
    def has_draft_rows(self) -> bool:
        """Returns whether the call has a draft distribution; if not, every draft is one-hot."""
        return self.entries != "none"

    @property
    def sums_draft_rows(self) -> bool:
        """Returns whether whole draft rows are read to normalize them, where they are visited."""
        return self.entries == "logits" and self.ids != "candidates"


def is_aligned(matrix: Any) -> bool:
    """Returns whether every row of a matrix begins at a multiple of sixteen bytes."""
    return matrix.shape[1] * matrix.dtype.itemsize % 16 == 0
