"""`KernelConfig`: what a caller may set of the kernel."""

from __future__ import annotations

import dataclasses

from jax_specdec._src.base.arrays import check_int, static_pytree
from jax_specdec._src.mosaic.gpus import MAX_CLUSTER

MAX_WARPGROUPS = 5
"""Warpgroups of a CTA, at most: more would have too few registers each."""

MAX_TILES = 4
"""Tiles whose entries a thread loads at once, at most, for the same reason."""


@static_pytree
@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Static settings of the Mosaic GPU kernel. They change its speed, not its tokens.

    A request is verified by a cluster of CTAs, each of which holds a slice of the current row. If
    rows are cut into other slices, sums are added in another order: tokens are then the same but
    for float32 ties.

    Attributes:
      max_cluster: CTAs that share one request, at most 16; more than 8 need a large device. The
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
