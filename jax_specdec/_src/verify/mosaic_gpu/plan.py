"""The static side of a launch: how rows are cut into slices, and what shared memory holds.

A caller may set it by a `KernelConfig`; if not, `KernelConfig.choose` does, by a rule of thumb.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax

from jax_specdec._src.arrays import check_int
from jax_specdec._src.types import DraftDistribution, DraftLogits
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.rules import Rule, Standard
from jax_specdec._src.verify.tiles import TILE, num_tiles

Entries = Literal["probs", "logits", "normalized"]
"""What draft rows hold; logits may have their log-normalizers stored beside them."""

Ids = Literal["map", "candidates"]
"""How draft rows list their ids: one map for all rows, or candidates of each row."""

WARPS = 4
"""Warps of a warpgroup."""

SLOTS = 2
"""Slots of an exchange between blocks; see `cluster`."""

MAX_CLUSTER = 16
"""Blocks of a cluster on a Hopper GPU, at most; more than 8 need a GPC with 16 cores."""

MAX_BARRIERS = 32
"""Barriers of a warpgroup, at most: each is initialized by one thread of its first warp."""

MAX_WARPGROUPS = 5
"""Warpgroups of a block, at most: more would have too few registers each."""

MAX_TILES = 4
"""Tiles whose entries a thread loads at once, at most, for the same reason."""

MAX_CANDIDATES = 128
"""Ids that a draft row may list, at most: one for each thread of a warpgroup."""

MAX_MAPPED = 2**16 - 1
"""Ids that a map of draft rows may list, at most: a column takes two bytes."""

SHARED_BYTES = 227 * 1024
"""Shared memory of a block on Hopper and newer, at most."""

_CORES_OF_LARGE = 132  # H100, H200; smaller ones may have no room for a cluster of 16
_TILES_PER_BLOCK = 8  # at most, unless two blocks hold a row: clusters of two use every core
_PAIR_BYTES = 2 * 52 * 1024  # of such a row: four blocks on a multiprocessor
_SLOT_BYTES = 8 * 1024  # at most, what else a warpgroup holds
_FREE_BLOCKS_PER_CORE = 4  # so many are placed without waiting
_MOST_BYTES = 48 * 1024  # of a slice: four blocks on a multiprocessor


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Static settings of the Mosaic GPU kernel. They change its speed, not its tokens.

    A request is verified by a cluster of blocks, each of which holds a slice of the current row. If
    rows are cut into other slices, sums are added in another order: tokens are then the same but
    for float32 ties.

    Attributes:
      max_cluster: blocks that share one request, at most 16; more than 8 need a large device. The
        largest power of two up to it is used, because other clusters take up to twice the time.
      rows_at_once: target rows of a request that are read at once, at most 5, each by its own
        warpgroup. Rows after a rejection are read in vain.
      tiles_at_once: tiles of a draft row, at most 4, that are loaded before the first of them is
        used. The largest power of two up to it is used, but one if not all rows begin at multiples
        of sixteen bytes. With more tiles, threads wait less and need more registers.

    Raises:
      TypeError: a field is not an integer.
      ValueError: a number is out of range.

    Example:
      >>> KernelConfig(max_cluster=16, rows_at_once=2)
      KernelConfig(max_cluster=16, rows_at_once=2, tiles_at_once=1)
    """

    max_cluster: int = 8
    rows_at_once: int = 1
    tiles_at_once: int = 1

    def __post_init__(self) -> None:
        check_int("max_cluster", self.max_cluster, 1, MAX_CLUSTER)
        check_int("rows_at_once", self.rows_at_once, 1, MAX_WARPGROUPS)
        check_int("tiles_at_once", self.tiles_at_once, 1, MAX_TILES)

    @classmethod
    def choose(
        cls, num_requests: int, size: int, held: int, num_cores: int, draft_size: int = 0
    ) -> KernelConfig:
        """The default settings, by a rule of thumb.

        Args:
          num_requests: B.
          size: ids of a row, without padding.
          held: bytes that a block holds per id of its slice.
          num_cores: multiprocessors of the device.
          draft_size: bytes of a draft entry.

        Returns:
          For few requests, enough blocks to use the whole device. Time then goes into latency and
          one exponential per entry, not into bandwidth, so rows that may not be needed are read
          too. For many requests, no more blocks than have work, because each costs time, and
          little shared memory, so that many run at once. Several tiles of a draft row are loaded
          at once if that leaves enough registers for the blocks of a multiprocessor.
        """
        large = num_cores >= _CORES_OF_LARGE
        blocks = num_requests * MAX_CLUSTER
        few = blocks <= _FREE_BLOCKS_PER_CORE * num_cores
        if large and (few or Slices.of(size, 8).ids * held > _MOST_BYTES):
            # Clusters of 16 reach seven eighths of the multiprocessors. For three or four rows
            # there are registers enough if each block has its own multiprocessor; else for two.
            cluster, reached = MAX_CLUSTER, 7 * num_cores // 8
            rows = 2 if blocks <= 2 * reached else 1
            if 2 * blocks <= num_cores:
                rows = 3
            if blocks <= reached < 2 * blocks and max(held, draft_size) == 2:
                rows = 4  # of entries of four bytes registers are too few
        else:
            at_once = _FREE_BLOCKS_PER_CORE * num_cores // num_requests
            row_tiles = num_tiles(size)
            is_pair = row_tiles * TILE * held <= _PAIR_BYTES
            with_work = 1 if is_pair else -(-row_tiles // _TILES_PER_BLOCK)
            cluster = min(8, 1 << (max(2, at_once, with_work) - 1).bit_length())
            rows = 1
        slices, room = Slices.of(size, cluster), SHARED_BYTES if rows > 2 else SHARED_BYTES // 2
        # Of a block's tiles a divisor, or some would be read in vain. Four if there are registers
        # enough, since blocks are few and read several rows. Else two, so that six blocks fit on a
        # multiprocessor; one if there are few tiles: none would be summed while others arrive.
        most = MAX_TILES if rows > 1 else 2 if slices.tiles > MAX_TILES else 1
        return cls(
            max_cluster=cluster,
            rows_at_once=max(1, min(rows, room // (slices.ids * held + _SLOT_BYTES))),
            tiles_at_once=math.gcd(slices.tiles, most),
        )


def power_of_two(count: int) -> int:
    """The largest power of two up to `count`."""
    return 1 << (count.bit_length() - 1)


class Slices(NamedTuple):
    """A row of `size` ids cut among the blocks of a cluster, in whole tiles.

    Attributes:
      size: ids of the row, without padding.
      tiles: tiles of a slice; the last slices of a row may have fewer.
      ids: ids of a slice.
      cluster: blocks, a power of two; blocks past the end of the row have nothing to do.
      warps: warps of the whole cluster.
      row_tiles: tiles of the row.
    """

    size: int
    tiles: int
    ids: int
    cluster: int
    warps: int
    row_tiles: int

    @classmethod
    def of(cls, size: int, max_cluster: int) -> Slices:
        """The slices of rows of `size` ids in a cluster of at most `max_cluster` blocks."""
        # Powers of two are scheduled well, even with idle blocks. An exchange takes two blocks.
        cluster, row_tiles = power_of_two(max_cluster), num_tiles(size)
        tiles = -(-row_tiles // cluster)
        while cluster > 2 and cluster // 2 * tiles >= row_tiles:
            cluster //= 2
        return cls(size, tiles, tiles * TILE, cluster, cluster * WARPS, row_tiles)


class SharedMemory(NamedTuple):
    """What a block holds in shared memory, in entries of its refs.

    Attributes:
      slices: how rows are cut into slices.
      stride: distance from one tile to the next. Copies of unaligned rows begin a little earlier.
      each: consecutive ids per thread, the same for target and draft rows of any dtype.
      masses_per_warp: masses of a warp's tiles, padded to a multiple of what is sent at once.
      slot: floats of a slot: the masses that all warps send, or up to four other values of each.
      scratch: floats for exchanges between the warps of a block.
      barriers: number of barriers: one for each slot, then one for each tile.
      warpgroups: warpgroups of a block, each of which has its own copy of all of this.
      tiles_at_once: tiles of a slice whose draft entries are loaded at once.
      bytes: shared memory of a block, with a margin for the compiler's rounding.
    """

    slices: Slices
    stride: int
    each: int
    masses_per_warp: int
    slot: int
    scratch: int
    barriers: int
    warpgroups: int
    tiles_at_once: int
    bytes: int

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        distribution: DraftDistribution | None = None,
        *,
        num_requests: int,
        size: int,
        config: KernelConfig | None,
        most_rows: int = 1,
        is_plain: bool = False,
    ) -> SharedMemory:
        """That of a call, or of a launch that reads rows of one matrix.

        Args:
          target_logits: of the call.
          distribution: the draft distribution, or None.
          num_requests: B, or how many rows are read.
          size: ids of a row, without padding.
          config: the caller's choice, or None.
          most_rows: rows of a request that can be read at once.
          is_plain: see `Plan`.
        """
        is_listed = distribution is not None and distribution.ids is not None
        storage = None if distribution is None or is_listed else storage_of(distribution)
        target_size = target_logits.dtype.itemsize
        draft_size = 0 if storage is None else storage.dtype.itemsize
        if config is None:
            cores = getattr(jax.devices()[0], "core_count", None) or _CORES_OF_LARGE
            config = KernelConfig.choose(num_requests, size, target_size, cores, draft_size)
        slices, stride, each, tiles_at_once = Slices.of(size, config.max_cluster), TILE, 2, 1
        if not is_aligned(target_logits):
            stride += 32 // target_size
        elif storage is None or is_aligned(storage):
            each = 4 if 4 in (target_size, draft_size) else 8
            if is_plain and not is_listed:
                tiles_at_once = power_of_two(min(config.tiles_at_once, slices.tiles))
        warpgroups = min(config.rows_at_once, most_rows)
        masses_per_warp = -(-slices.tiles // 4) * 4
        slot, scratch = slices.warps * masses_per_warp, TILE // (128 * each) * WARPS
        barriers = SLOTS + slices.tiles
        tiles, floats = slices.tiles * stride * target_size, SLOTS * slot + scratch
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
            bytes=warpgroups * (tiles + 4 * floats + 8 * barriers) + 4 * 1024,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a launch that verifies a batch.

    Attributes:
      k: K.
      size: ids of a row, without padding.
      has_bonus_rows: whether each request owns a bonus row.
      num_drafts: N.
      num_rows: target rows if none is left out.
      rule: the rule that sampled requests follow.
      is_plain: whether there is no mask, no filter and no block rule. Then there are enough
        registers to sum masses of tiles while a row is read, and to load several tiles at once.
      entries: what draft rows hold, or None if the call has none.
      ids: how draft rows list their ids, or None if they are in the order of ids.
      sums_draft_rows: whether whole draft rows are read to normalize them.
      draft_rows: R.
      draft_size: ids that the drafter could draw.
      memory: how rows are cut into slices, and what shared memory holds.
    """

    k: int
    size: int
    has_bonus_rows: bool
    num_drafts: int
    num_rows: int
    rule: Rule
    is_plain: bool
    entries: Entries | None
    ids: Ids | None
    sums_draft_rows: bool
    draft_rows: int
    draft_size: int
    memory: SharedMemory

    @classmethod
    def of(
        cls,
        target_logits: jax.Array,
        distribution: DraftDistribution | None,
        rule: Rule,
        *,
        num_requests: int,
        num_drafts: int,
        k: int,
        size: int,
        has_bonus_rows: bool,
        has_limits: bool,
        config: KernelConfig | None,
    ) -> Plan:
        """The plan of a call.

        Args:
          target_logits: of the call.
          distribution: the draft distribution, or None.
          rule: the rule that sampled requests follow.
          num_requests: B.
          num_drafts: N.
          k: K.
          size: ids of a row, without padding.
          has_bonus_rows: whether each request owns a bonus row.
          has_limits: whether the call has a mask or a filter.
          config: the caller's choice, or None.
        """
        draft_rows, draft_size = 0, 0
        entries: Entries | None = None
        ids: Ids | None = None
        if distribution is not None:
            entries, (draft_rows, draft_size) = "probs", storage_of(distribution).shape
            if isinstance(distribution, DraftLogits):
                entries = "logits" if distribution.log_normalizer is None else "normalized"
            if distribution.ids is not None:
                ids, draft_size = "map" if distribution.ids.ndim == 1 else "candidates", size
        is_plain = not has_limits and not rule.is_block
        return cls(
            k=k,
            size=size,
            has_bonus_rows=has_bonus_rows,
            num_drafts=num_drafts,
            num_rows=num_drafts + (num_requests if has_bonus_rows else 0),
            rule=rule,
            is_plain=is_plain,
            entries=entries,
            ids=ids,
            sums_draft_rows=entries == "logits" and ids != "candidates",
            draft_rows=draft_rows,
            draft_size=min(draft_size, size),
            memory=SharedMemory.of(
                target_logits,
                distribution,
                num_requests=num_requests,
                size=size,
                config=config,
                most_rows=k + 1 if type(rule) is Standard else 1,
                is_plain=is_plain,
            ),
        )


def is_aligned(rows: Any) -> bool:
    """Whether every row of a matrix begins at a multiple of sixteen bytes."""
    return rows.shape[1] * rows.dtype.itemsize % 16 == 0
