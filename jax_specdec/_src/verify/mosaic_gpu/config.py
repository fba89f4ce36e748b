"""How the kernel cuts a row: chosen by a rule of thumb, or by the caller."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_specdec._src.verify.tiles import TILE, num_tiles

LANES = 128
"""Ids per row of shared memory: a row of logits is read as ``[V / LANES, LANES]``."""

TILE_ROWS = TILE // LANES
MAX_CLUSTER = 8
"""The largest cluster every device offers."""

_MAX_SLICE_ROWS = 256  # one copy by the tensor memory accelerator


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Static choices of the kernel that change its speed and not its tokens.

    Attributes:
      max_cluster: blocks that share one request, at most 8; each holds a slice of the row.
      prefetch_draft: fetch the draft row together with the target row of its position, rather
        than once the draft was rejected: shorter to wait for, more to read.
      draft_tiles: tiles of the draft row that a block holds at a time, or 0 for its whole slice:
        fewer leave room for more blocks on a multiprocessor.
    """

    max_cluster: int = MAX_CLUSTER
    prefetch_draft: bool = False
    draft_tiles: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_cluster <= MAX_CLUSTER:
            raise ValueError(
                f"max_cluster must be in [1, {MAX_CLUSTER}], but it is {self.max_cluster}"
            )
        if self.draft_tiles < 0 or (self.draft_tiles and self.prefetch_draft):
            raise ValueError(
                "draft_tiles must not be negative, and 0 where prefetch_draft is true, but it is "
                f"{self.draft_tiles}"
            )

    @classmethod
    def choose(cls, num_requests: int) -> KernelConfig:
        """The default: few requests wait for memory, many share its bandwidth."""
        if num_requests <= 16:
            return cls(prefetch_draft=True)
        return cls(draft_tiles=2)


@dataclasses.dataclass(frozen=True)
class Slices:
    """A row of `size` ids cut among the blocks of a cluster, in whole tiles.

    Attributes:
      size: ids that count.
      cluster: blocks; none is empty.
      tiles: tiles per block.
    """

    size: int
    cluster: int
    tiles: int

    @classmethod
    def of(cls, size: int, max_cluster: int) -> Slices:
        tiles = -(-num_tiles(size) // max_cluster)
        return cls(size, -(-num_tiles(size) // tiles), tiles)

    @property
    def rows(self) -> int:
        """Rows of LANES ids per block."""
        return self.tiles * TILE_ROWS

    @property
    def fits(self) -> bool:
        return self.rows <= _MAX_SLICE_ROWS


def vector_rows(*dtypes: jnp.dtype) -> int:
    """Rows handled as one vector: eight bytes per thread, the same ids of every dtype."""
    return 4 if all(jnp.dtype(dtype).itemsize == 2 for dtype in dtypes) else 2
