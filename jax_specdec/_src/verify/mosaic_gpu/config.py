"""How the kernel cuts a row and what it holds: chosen by a rule of thumb, or by the caller."""

from __future__ import annotations

import dataclasses

from jax_specdec._src.config import check_int
from jax_specdec._src.verify.tiles import TILE, num_tiles

WARPS = 4
"""Warps of a warpgroup."""

MAX_CLUSTER = 16
"""The largest cluster of a Hopper GPU; more than 8 need one whose parts have 16 cores left."""

MAX_BARRIERS = 32
"""Barriers of a warpgroup: one thread of its first warp makes each ready."""

MAX_WARPGROUPS = 5
"""Warpgroups of a block: more would have too few registers each."""

MAX_TILES = 4
"""Tiles whose entries a thread loads at once, likewise."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have on Hopper and newer."""

_CORES_OF_LARGE = 132  # H100, H200; smaller ones may have no room for a cluster of 16
_TILES_PER_BLOCK = 8  # at most, unless two blocks hold a row: clusters of two use every core
_PAIR_BYTES = 2 * 52 * 1024  # of such a row: four blocks on a multiprocessor
_MAIL_BYTES = 8 * 1024  # at most, what else a warpgroup holds
_FREE_BLOCKS_PER_CORE = 4  # so many are placed without waiting
_MOST_BYTES = 48 * 1024  # of a slice: four blocks on a multiprocessor


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Static choices of the Mosaic GPU kernel that change its speed and not its tokens.

    A request is verified by a cluster of blocks; each holds a slice of the row that is looked at.
    Sums are added in another order where rows are cut otherwise: tokens are the same up to ties of
    float32.

    Attributes:
      max_cluster: blocks that share one request, at most 16; more than 8 need a large device. The
        largest power of two up to it is used: other clusters take up to twice the time.
      rows_at_once: target rows of a request that are read at once, at most 5, each by a warpgroup
        of its own. Those after a rejection are read in vain.
      tiles_at_once: tiles of a draft row, at most 4, that are loaded before the first of them is
        weighed: the largest power of two up to it; of rows that do not all begin at multiples of
        sixteen bytes always one. More wait less and need more registers.

    Raises:
      TypeError: a field is no integer.
      ValueError: a number out of range.

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
        """The default, a rule of thumb.

        Args:
          num_requests: B.
          size: ids of a row that count.
          held: bytes that a block holds per id of its slice.
          num_cores: multiprocessors of the device.
          draft_size: bytes of a draft entry.

        Returns:
          Where requests are few, blocks enough to use the device: they wait for memory and for
          one exponential per entry, not for its bandwidth, so rows that may not be needed are read
          too. Where they are many, as few blocks as have something to do, since every one costs,
          and little shared memory, so that many run at once. Several tiles of a draft row are
          loaded at once where that leaves enough registers to the blocks of a multiprocessor.
        """
        large = num_cores >= _CORES_OF_LARGE
        blocks = num_requests * MAX_CLUSTER
        few = blocks <= _FREE_BLOCKS_PER_CORE * num_cores
        if large and (few or Slices.of(size, 8).ids * held > _MOST_BYTES):
            # Clusters of 16 reach seven eighths of the multiprocessors. Three or four rows have
            # registers enough where each block has a multiprocessor for itself, else two.
            reached = 7 * num_cores // 8
            rows = 2 if blocks <= 2 * reached else 1
            if 2 * blocks <= num_cores:
                rows = 3
            if blocks <= reached < 2 * blocks and max(held, draft_size) == 2:
                rows = 4  # of entries of four bytes registers are too few
            room = SHARED_BYTES if rows > 2 else SHARED_BYTES // 2
            slices = Slices.of(size, MAX_CLUSTER)
            return cls(
                max_cluster=MAX_CLUSTER,
                rows_at_once=max(1, min(rows, room // (slices.ids * held + _MAIL_BYTES))),
                tiles_at_once=_tiles_at_once(slices.tiles, rows),
            )
        at_once = _FREE_BLOCKS_PER_CORE * num_cores // num_requests
        row_tiles = num_tiles(size)
        is_pair = row_tiles * TILE * held <= _PAIR_BYTES
        with_work = 1 if is_pair else -(-row_tiles // _TILES_PER_BLOCK)
        cluster = min(8, 1 << (max(2, at_once, with_work) - 1).bit_length())
        tiles_each = Slices.of(size, cluster).tiles
        return cls(max_cluster=cluster, tiles_at_once=_tiles_at_once(tiles_each, 1))


def _tiles_at_once(tiles_each: int, rows: int) -> int:
    """Tiles to load at once: a divisor of `tiles_each` of a block, or some are weighed in vain.

    Four where few blocks, which read several rows at once, leave registers enough. Else two, which
    leave room for six blocks on a multiprocessor; but not of few tiles, or nothing is weighed while
    others arrive.
    """
    most = MAX_TILES if rows > 1 else 2 if tiles_each > MAX_TILES else 1
    return max(count for count in (1, 2, 4) if count <= most and tiles_each % count == 0)


def power_of_two(count: int) -> int:
    """The largest one up to `count`."""
    return 1 << (count.bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Slices:
    """A row of `size` ids cut among the blocks of a cluster, in whole tiles.

    Attributes:
      size: ids that count.
      tiles: tiles per slice, the last ones of a row aside.
      cluster: blocks, a power of two; those past the row have nothing to do.
    """

    size: int
    tiles: int
    cluster: int

    @classmethod
    def of(cls, size: int, max_cluster: int) -> Slices:
        # Clusters of a power of two are placed well, though blocks be idle; mail needs two blocks.
        cluster = power_of_two(max_cluster)
        tiles = -(-num_tiles(size) // cluster)
        while cluster > 2 and cluster // 2 * tiles >= num_tiles(size):
            cluster //= 2
        return cls(size, tiles, cluster)

    @property
    def ids(self) -> int:
        """Ids per slice."""
        return self.tiles * TILE

    @property
    def warps(self) -> int:
        """Warps of the whole cluster."""
        return self.cluster * WARPS


@dataclasses.dataclass(frozen=True)
class Shared:
    """Where things are in a block's shared memory, in entries of their refs.

    Attributes:
      slices: how rows are cut.
      target_size: bytes of a target entry.
      draft_size: bytes of a draft entry.
      target_aligned: whether every row begins at a multiple of sixteen bytes.
      draft_aligned: the same of draft rows.
      values: numbers that a warp tells the others of a row, at most.
      warpgroups: warpgroups of a block, each of which holds all of this.
      tiles_at_once: tiles of a slice whose draft entries are loaded at once.
    """

    slices: Slices
    target_size: int
    draft_size: int
    target_aligned: bool
    draft_aligned: bool
    values: int
    warpgroups: int = 1
    tiles_at_once: int = 1

    @property
    def target_stride(self) -> int:
        """From one held tile to the next."""
        return TILE + _slack(self.target_aligned, self.target_size)

    @property
    def each(self) -> int:
        """Consecutive ids per thread: the same of target and draft rows, whatever their dtypes."""
        if not (self.target_aligned and self.draft_aligned):
            return 2
        return 4 if 4 in (self.target_size, self.draft_size) else 8

    @property
    def masses_per_warp(self) -> int:
        """Masses of a warp's tiles, padded to what is mailed at once."""
        return -(-self.slices.tiles // 4) * 4

    @property
    def box(self) -> int:
        """Floats of the mail of one row."""
        return self.values * self.slices.warps

    @property
    def masses(self) -> int:
        """Where the mail of masses begins, after two boxes."""
        return -(-2 * self.box // 4) * 4

    @property
    def cells(self) -> int:
        """Where the scratch for the pick begins."""
        return self.masses + self.slices.warps * self.masses_per_warp

    @property
    def mail(self) -> int:
        """Floats in all, of one warpgroup."""
        return -(-(self.cells + TILE // (32 * self.each)) // 4) * 4

    @property
    def barriers(self) -> int:
        """Two boxes, the masses, then the tiles."""
        return 3 + self.slices.tiles

    @property
    def bytes(self) -> int:
        """Shared memory of a block, the compiler's rounding included."""
        held = self.slices.tiles * self.target_stride * self.target_size
        return self.warpgroups * (held + 4 * self.mail + 8 * self.barriers) + 4 * 1024


def _slack(aligned: bool, size: int) -> int:
    return 0 if aligned else 32 // size
