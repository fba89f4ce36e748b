"""How the kernel cuts a row and what it holds: chosen by a rule of thumb, or by the caller."""

from __future__ import annotations

import dataclasses

from jax_specdec._src.verify.tiles import TILE, num_tiles

WARPS = 4
"""Warps of a warpgroup."""

MAX_CLUSTER = 8
"""The largest cluster that every device offers."""


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Static choices of the Mosaic GPU kernel that change its speed and not its tokens.

    A request is verified by a cluster of blocks; each warpgroup holds a slice of the row that is
    looked at. Sums are added in another order where rows are cut otherwise: tokens are the same
    up to ties of float32.

    Attributes:
      max_cluster: blocks that share one request, at most 8.
      warpgroups: warpgroups of 128 threads per block.
      target_rows: target rows held at a time. With 1, a row is read once its position is reached,
        and rows after a rejection never are; with more, so many are fetched ahead.
      draft_tiles: tiles of a draft row that a warpgroup holds at a time, at least 1.
      prefetch_draft: fetch the draft row with the target row of its position, rather than once
        its draft was rejected; needs `draft_tiles` to hold a whole slice.

    Raises:
      ValueError: a number out of range.

    Example:
      >>> KernelConfig(max_cluster=4).warpgroups
      1
    """

    max_cluster: int = MAX_CLUSTER
    warpgroups: int = 1
    target_rows: int = 1
    draft_tiles: int = 2
    prefetch_draft: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_cluster", 1, 16),
            ("warpgroups", 1, 4),
            ("target_rows", 1, 32),
            ("draft_tiles", 1, 32),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], but it is {value}")


    @classmethod
    def choose(cls, num_requests: int) -> KernelConfig:
        """The default: few requests wait for memory, many share its bandwidth."""
        if num_requests <= 16:
            return cls(warpgroups=2, draft_tiles=4, prefetch_draft=True)
        return cls()


@dataclasses.dataclass(frozen=True)
class Slices:
    """A row of `size` ids cut among the warpgroups of a cluster, in whole tiles.

    Attributes:
      size: ids that count.
      tiles: tiles per slice, the last ones of a row aside.
      cluster: blocks.
      warpgroups: slices per block; those past the row are empty.
    """

    size: int
    tiles: int
    cluster: int
    warpgroups: int

    @classmethod
    def of(cls, size: int, config: KernelConfig) -> Slices:
        tiles = -(-num_tiles(size) // (config.max_cluster * config.warpgroups))
        slices = -(-num_tiles(size) // tiles)
        warpgroups = min(config.warpgroups, slices)
        # Mail needs a cluster, be it one with a block that has nothing to do.
        cluster = max(-(-slices // warpgroups), min(2, config.max_cluster))
        return cls(size, tiles, cluster, warpgroups)

    @property
    def ids(self) -> int:
        """Ids per slice."""
        return self.tiles * TILE

    @property
    def warps(self) -> int:
        """Warps of the whole cluster."""
        return self.cluster * self.warpgroups * WARPS


@dataclasses.dataclass(frozen=True)
class Shared:
    """Where things are in a block's shared memory, in entries of their refs.

    Attributes:
      slices: how rows are cut.
      target_rows: target rows held per warpgroup.
      draft_tiles: draft tiles held per warpgroup, 0 without draft rows.
      target_size: bytes of a target entry.
      draft_size: bytes of a draft entry.
      target_aligned: whether every row begins at a multiple of sixteen bytes.
      draft_aligned: the same of draft rows.
      values: numbers that a warp tells the others of a row, at most.
    """

    slices: Slices
    target_rows: int
    draft_tiles: int
    target_size: int
    draft_size: int
    target_aligned: bool
    draft_aligned: bool
    values: int

    @property
    def target_stride(self) -> int:
        """From one held tile to the next."""
        return TILE + _slack(self.target_aligned, self.target_size)

    @property
    def target_tiles(self) -> int:
        """Tiles of target rows held per warpgroup."""
        return self.target_rows * self.slices.tiles

    @property
    def draft_stride(self) -> int:
        """The same of draft tiles."""
        return TILE + _slack(self.draft_aligned, self.draft_size)

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
        """Where each warpgroup's scratch for the pick begins."""
        return self.masses + self.slices.warps * self.masses_per_warp

    @property
    def cells_per_warpgroup(self) -> int:
        """Parts of a tile among which the pick chooses first, at most."""
        return 4 * WARPS

    @property
    def mail(self) -> int:
        """Floats in all."""
        return self.cells + self.slices.warpgroups * self.cells_per_warpgroup

    @property
    def barriers(self) -> int:
        """Two boxes, the masses, then the tiles of each warpgroup."""
        return 3 + self.slices.warpgroups * (self.target_tiles + self.draft_tiles)

    @property
    def bytes(self) -> int:
        """Shared memory of a block, the compiler's rounding included."""
        held = self.slices.warpgroups * (
            self.target_tiles * self.target_stride * self.target_size
            + self.draft_tiles * self.draft_stride * self.draft_size
        )
        return held + 4 * self.mail + 8 * self.barriers + 4 * 1024


def _slack(aligned: bool, size: int) -> int:
    return 0 if aligned else 32 // size
