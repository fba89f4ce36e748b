"""What the threads of a warpgroup can do, whether on a GPU or in interpret mode.

The kernels compute with arrays ``[128]`` of one entry per thread: entry t is in a register of
thread t. Every operation takes and returns such arrays, or scalars that all threads share.
`ptx.GpuThreads` has them on a GPU, `interpret.InterpretedThreads` in jnp.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

WARPS = 4
"""Warps of a warpgroup."""

WARP = 32
THREADS = WARP * WARPS

COPIED = 16
"""Copies begin and end at multiples of this many bytes."""

Shuffle = Literal["idx", "bfly", "up"]
"""How a shuffle counts lanes, by PTX's names."""


class Ref(Protocol):
    """An array in global or shared memory, while a kernel is traced."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def at(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


class RowTiles(NamedTuple):
    """Tiles of a row of a matrix, to be copied or fetched."""

    matrix: Ref  # ref [R, columns] in global memory
    row: jax.Array  # [] int32
    first: jax.Array  # [] int32, the first entry of the first tile
    size: int  # entries of the row; nothing past them is copied
    num_tiles: int  # at most 128


class ExchangeSlot(NamedTuple):
    """Where the warps of a cluster store what they exchange in one round."""

    # Float32 ref in shared memory, the same in each CTA; in interpret mode in global memory.
    memory: Ref
    barriers: Any  # initialized by `init_barriers`; in interpret mode `ExchangeBarriers`
    # [128] int32, where this warp's values go: a multiple of four, or of two for two values; the
    # same in all threads of a warp.
    place: jax.Array
    barrier: jax.Array  # [] int32, index of the barrier
    parity: jax.Array  # [] int32, of its phase
    cluster: int  # CTAs


class Threads(abc.ABC):
    """A warpgroup's operations.

    Args:
      index: ``[128]`` int32, each thread's index in the warpgroup.

    Attributes:
      interpreted: whether this is interpret mode.
      index: as given.
      lane: ``[128]`` int32, each thread's index in its warp.
    """

    interpreted: ClassVar[bool]

    def __init__(self, index: jax.Array):
        self.index = index
        self.lane = index & (WARP - 1)

    @abc.abstractmethod
    def index_anew(self) -> jax.Array:
        """Returns `index`, computed again: values made from it are not kept in registers."""

    @abc.abstractmethod
    def filled(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        """Returns ``[128]`` of one value, in a register of each thread, to start a loop with."""

    # Within a warp. Its 32 threads run together: they exchange registers without shared memory, and
    # need no barrier.

    @abc.abstractmethod
    def warp_max(self, x: jax.Array) -> jax.Array:
        """Returns the maximum float32 of each warp, in all of its threads; NaN if any entry is."""

    @abc.abstractmethod
    def warp_min(self, x: jax.Array) -> jax.Array:
        """Returns the minimum int32 of each warp, in all of its threads."""

    @abc.abstractmethod
    def has_twin(self, x: jax.Array) -> jax.Array:
        """Returns whether another lane of the warp has the same int32, ``[128]`` bool."""

    @abc.abstractmethod
    def warp_sum(self, x: jax.Array, lanes: int = WARP) -> jax.Array:
        """Returns the sum of each warp, or of each `lanes` of it, in all threads of the group."""

    @abc.abstractmethod
    def warp_scan(self, x: jax.Array) -> jax.Array:
        """Returns inclusive sums over the threads of each warp."""

    @abc.abstractmethod
    def shuffle(self, x: jax.Array, lane: jax.Array | int, how: Shuffle = "idx") -> jax.Array:
        """Returns the entry of one lane of each warp; `lane` may differ between threads.

        The lane is `lane`; if `how` is "bfly", the thread's own xor `lane`; if it is "up", the
        thread's own less `lane`, or itself if there is none.
        """

    @abc.abstractmethod
    def scalar(self, x: jax.Array) -> jax.Array:
        """Returns the value of an array that is the same in all threads, ``[]``."""

    def at(self, x: jax.Array, lane: jax.Array | int) -> jax.Array:
        """Returns the entry of one lane, ``[]``, of any dtype.

        It is the same in all warps, and so is `lane`.
        """
        if x.dtype == jnp.bool_:
            return self.at(x.astype(jnp.int32), lane) == 1  # a shuffle moves 32 bits
        return self.scalar(self.shuffle(x, lane))

    # Barriers. `sync` orders what the threads of a warpgroup do; an mbarrier counts arrivals and
    # bytes, and completes one phase after another.

    @abc.abstractmethod
    def sync(self) -> None:
        """Waits for the whole warpgroup. Its writes to shared memory are then visible to all."""

    @abc.abstractmethod
    def sync_cta(self, warpgroups: int, barrier: Ref | None) -> None:
        """Waits for all warpgroups of the CTA. `barrier` is for interpret mode."""

    @abc.abstractmethod
    def fence_copies(self) -> None:
        """Orders a thread's writes to shared memory before copies that begin after a sync."""

    @abc.abstractmethod
    def init_barriers(self, barriers: Any, count: int) -> None:
        """Initializes up to 32 mbarriers, by the first warp. All CTAs see it after `cluster_wait`.

        Args:
          barriers: int32 ref in shared memory, two for each barrier.
          count: barriers.
        """

    @abc.abstractmethod
    def cluster_wait(self) -> None:
        """Waits until every CTA of the cluster has initialized its barriers."""

    @abc.abstractmethod
    def cluster_sync(self, barrier: Any) -> None:
        """Waits for every CTA of the cluster: what they wrote to global memory is then visible.

        Args:
          barrier: of the cluster, for interpret mode.
        """

    @abc.abstractmethod
    def wait(self, barriers: Ref, barrier: jax.Array, parity: jax.Array) -> None:
        """Waits for a phase of a barrier: `parity` is 0 for the first, then 1, 0, 1 and so on."""

    @abc.abstractmethod
    def exchange(self, slot: ExchangeSlot, values: list[jax.Array]) -> None:
        """Stores each warp's values in the shared memory of every CTA, and waits for all warps'.

        Args:
          slot: of this round.
          values: float32 ``[128]`` each, two or a multiple of four, the same in all threads of a
            warp.
        """

    # Copies. They use no tensor descriptor, so nothing is prepared before the launch, and rows may
    # begin at any multiple of their entries' size. Whole units of sixteen bytes are copied.

    @abc.abstractmethod
    def copy_tiles(
        self,
        tiles: RowTiles,
        buffer: Ref,
        stride: int,
        barriers: Ref,
        first_barrier: jax.Array | int,
    ) -> None:
        """Begins to copy the tiles of a row to shared memory, each by one thread.

        A copy begins up to fifteen bytes before its first entry: see `copy_shift`.

        Args:
          tiles: what is copied.
          buffer: flat ref in shared memory.
          stride: distance from one tile to the next in `buffer`.
          barriers: initialized by `init_barriers`.
          first_barrier: the one that completes with the first tile; the next tiles have the next.
        """

    @abc.abstractmethod
    def copy_shift(self, matrix: Ref, row: jax.Array) -> jax.Array | int:
        """Returns how many entries a copy of a row's tiles has before the first, ``[]`` int32."""

    @abc.abstractmethod
    def prefetch_tiles(self, tiles: RowTiles) -> None:
        """Begins to fetch the tiles of a row into the L2 cache."""

    # Reading and writing. Threads read consecutive entries at once where they can: a vector load of
    # sixteen bytes takes one instruction, and the entries of a chunk lie next to each other.

    @abc.abstractmethod
    def gather(self, ref: Ref, *indices: jax.Array) -> jax.Array:
        """Returns ``ref[indices]`` by each thread, for one or two indices.

        Floats are widened to float32, booleans to int32.
        """

    @abc.abstractmethod
    def scatter(self, ref: Ref, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        """Stores ``ref[index] = value`` by each thread whose entry of `where` is true."""

    @abc.abstractmethod
    def scatter_warps(self, ref: Ref, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        """Does what `scatter` does where the lanes of a warp store consecutive entries, or none.

        CTAs of a cluster may do it at the same time, in interpret mode too.
        """

    @abc.abstractmethod
    def entries(
        self, ref: Ref, start: jax.Array, each: int, *, aligned: bool, offset: int = 0
    ) -> list[jax.Array]:
        """Returns ``ref[start + offset + each * t + j]`` as float32, ``[128]`` for each j.

        From shared memory; `start` may be ``[128]``. If `aligned`, the addresses are multiples of
        sixteen bytes, which are read at once; if not, they may be any. `offset` is whole words.
        """

    @abc.abstractmethod
    def row_words(self, ref: Ref, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        """Returns the words of ``ref[row, start + j]``; `numbers` turns them into entries.

        From global memory. The entries must be an aligned piece of up to sixteen bytes, which is
        read at once, or several such pieces.
        """

    @abc.abstractmethod
    def numbers(self, words: list[jax.Array], dtype: Any) -> list[jax.Array]:
        """Returns entries as float32, from words that hold one or two of them."""

    @abc.abstractmethod
    def row_run(
        self, ref: Ref, row: jax.Array, start: jax.Array, offset: int, each: int
    ) -> list[jax.Array]:
        """Returns ``ref[row, start + offset + j]`` by each thread as float32, ``[128]`` for each j.

        From global memory, at any address, one entry at a time.
        """
