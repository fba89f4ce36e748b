"""Barriers, bulk copies and mail between the blocks of a cluster, in PTX.

Copies name no tensor, so no descriptor has to be made before the launch, and rows may begin at any
multiple of their entries' size: what is copied is whole pieces of sixteen bytes around them.

A number is mailed by a store into the receiver's shared memory that completes on the receiver's
barrier: no fence and one trip, where a store to global memory and a barrier of the cluster need
two fences and three.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

from jax_specdec._src.verify.mosaic_gpu.threads import (
    THREADS,
    add_scaled,
    assembly,
    i32,
    i64,
    inline,
    shared_address,
)

COPIED = 16
"""Bytes that a copy's two ends are multiples of."""


def open_barriers(barriers: Any, count: int) -> None:
    """Make up to 32 barriers of eight bytes ready, by the first warp; the others after `meet`."""

    def run(barriers: Any) -> None:
        assembly(
            f"""{{
            .reg .pred mine;
            .reg .b32 thread, place;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.lt.u32 mine, thread, {count};
            mad.lo.u32 place, thread, 8, $0;
            @mine mbarrier.init.shared::cta.b64 [place], 1;
            @mine fence.mbarrier_init.release.cluster;
            bar.warp.sync 0xffffffff;
            barrier.cluster.arrive.relaxed.aligned;
            }}""",
            "r,~{memory}",
            shared_address(barriers),
        )

    inline(run, (barriers,), ())


def meet() -> None:
    """Wait until every block of the cluster has its barriers ready."""
    inline(lambda: assembly("barrier.cluster.wait.acquire.aligned;", "~{memory}"), (), ())


def meet_warpgroups(count: int) -> None:
    """Wait for all warpgroups of the block, by a barrier that none of them has for itself."""
    inline(lambda: assembly(f"bar.sync 15, {THREADS * count};", "~{memory}"), (), ())


def copy_pieces(
    rows: Any,
    row: jax.Array,
    first: jax.Array,
    held: Any,
    place: jax.Array,
    barriers: Any,
    barrier: jax.Array,
    count: jax.Array,
) -> None:
    """Begin to copy pieces of a row, each by one thread.

    A copy begins up to fifteen bytes before its first entry: see `shift`.

    Args:
      rows: ref ``[R, columns]`` in global memory.
      row: ``[]`` int32.
      first: ``[128]`` int32, the first entry of each thread's piece.
      held: flat ref in shared memory.
      place: ``[128]`` int32, where it goes.
      barriers: what `open_barriers` made ready.
      barrier: ``[128]`` int32, which one completes with it.
      count: ``[128]`` int32, entries of the piece; 0 or less where a thread has none.
    """
    columns, size = rows.shape[1], rows.dtype.itemsize

    def run(rows: Any, held: Any, barriers: Any, *args: Any) -> None:
        row, first, place, barrier, count = args
        begin, length = _whole_units(rows, row, first, count, columns, size)
        assembly(
            """{
            .reg .pred mine;
            setp.gt.s32 mine, $4, 0;
            @mine mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], $2;
            @mine cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                [$0], [$1], $2, [$3];
            }""",
            "r,l,r,r,r,~{memory}",
            add_scaled(shared_address(held), place, size),
            begin,
            length,
            add_scaled(shared_address(barriers), barrier, 8),
            count,
        )

    inline(run, (rows, held, barriers), (row, first, place, barrier, count))


def prefetch_pieces(rows: Any, row: jax.Array, first: jax.Array, count: jax.Array) -> None:
    """Begin to bring pieces of a row into the second-level cache: see `copy_pieces`."""
    columns, size = rows.shape[1], rows.dtype.itemsize

    def run(rows: Any, row: Any, first: Any, count: Any) -> None:
        begin, length = _whole_units(rows, row, first, count, columns, size)
        assembly(
            """{
            .reg .pred mine;
            setp.gt.s32 mine, $2, 0;
            @mine cp.async.bulk.prefetch.L2.global [$0], $1;
            }""",
            "l,r,r",
            begin,
            length,
            count,
        )

    inline(run, (rows,), (row, first, count))


def shift(rows: Any, row: jax.Array) -> jax.Array:
    """How many entries come before the first one in copies of a row's tiles, ``[]`` int32."""
    columns, size = rows.shape[1], rows.dtype.itemsize

    def run(rows: Any, row: Any) -> Any:
        begin = _first_byte(rows, row, utils.c(0, i32()), columns, size)
        before = arith.trunci(i32(), arith.andi(begin, _c64(COPIED - 1)))
        return (arith.shrui(before, utils.c(size.bit_length() - 1, i32())),)

    return inline(run, (rows,), (row,), [((), "int32")])[0]


def _whole_units(
    rows: Any, row: Any, first: Any, count: Any, columns: int, size: int
) -> tuple[Any, Any]:
    """Where the units begin that hold a piece, and their bytes."""
    begin = _first_byte(rows, row, first, columns, size)
    end = arith.addi(add_scaled(begin, count, size), _c64(COPIED - 1))
    begin, end = arith.andi(begin, _c64(-COPIED)), arith.andi(end, _c64(-COPIED))
    return begin, arith.trunci(i32(), arith.subi(end, begin))


def _first_byte(rows: Any, row: Any, first: Any, columns: int, size: int) -> Any:
    """In assembly, lest the part that all rows have in common be kept in registers meanwhile."""
    text = f"{{ mad.wide.s32 $0, $2, {columns * size}, $1; mad.wide.s32 $0, $3, {size}, $0; }}"
    start = llvm.ptrtoint(i64(), utils.memref_ptr(rows))
    return assembly(text, "=&l,l,r,r", start, row, first, result=i64(), pure=True)


def _c64(value: int) -> Any:
    return utils.c(value, i64())


_WAIT = """
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};
    @!done bra WAIT;
"""


def wait(barriers: Any, barrier: jax.Array, parity: jax.Array) -> None:
    """Wait for a barrier's turn: `parity` is 0 for the first, then 1, 0, 1 and so on."""

    def run(barriers: Any, barrier: Any, parity: Any) -> None:
        text = "{\n.reg .pred done;" + _WAIT.format(barrier="$0", parity="$1") + "}"
        address = add_scaled(shared_address(barriers), barrier, 8)
        assembly(text, "r,r,~{memory}", address, parity)

    inline(run, (barriers,), (barrier, parity))


def exchange(
    mail: Any,
    barriers: Any,
    place: jax.Array,
    barrier: jax.Array,
    parity: jax.Array,
    values: list[jax.Array],
    *,
    cluster: int,
    warps: int,
) -> None:
    """Each warp stores its values in the mail of every block; all wait for all.

    Args:
      mail: float32 ref in shared memory.
      barriers: what `open_barriers` made ready.
      place: ``[]`` or ``[128]`` int32, where this warp's values go: a multiple of four, or of two
        for two values; the same in all threads of a warp.
      barrier: which barrier.
      parity: of its turn.
      values: float32 ``[128]`` each, two or a multiple of four, the same in all threads of a warp.
      cluster: blocks.
      warps: of all blocks.
    """
    count = len(values)
    width = min(count, 4)
    stores = [
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{width}.b32 "
        f"[theirs+{4 * j}], {{{', '.join(f'${3 + j + i}' for i in range(width))}}}, [barrier];"
        for j in range(0, count, width)
    ]

    def run(mail: Any, barriers: Any, place: Any, barrier: Any, parity: Any, *xs: Any) -> None:
        # Only stores have a predicate. A register that is written under one keeps what it held
        # where that is false, and so is taken from the kernel's beginning on.
        sends = "\n".join(f"@sends {store}" for store in stores)
        assembly(
            f"""{{
            .reg .pred first, sends, done;
            .reg .b32 thread, lane, block, theirs, barrier;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 first, thread, 0;
            and.b32 lane, thread, 31;
            setp.lt.u32 sends, lane, {cluster};
            @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {4 * count * warps};
            and.b32 block, lane, {cluster - 1};
            mapa.shared::cluster.u32 theirs, $0, block;
            mapa.shared::cluster.u32 barrier, $1, block;
            {sends}
            {_WAIT.format(barrier="$1", parity="$2")}
            }}""",
            ",".join(["r", "r", "r", *["f"] * count, "~{memory}"]),
            add_scaled(shared_address(mail), place, 4),
            add_scaled(shared_address(barriers), barrier, 8),
            parity,
            *xs,
        )

    inline(run, (mail, barriers), (place, barrier, parity, *values))
