"""How the blocks of a cluster tell each other numbers: stores into each other's shared memory.

A store that completes on the receiver's barrier needs no fence and one trip, where a store to
global memory and a barrier of the cluster need two fences and three. Two boxes and two barriers
take turns: who has everybody's numbers of a turn knows that all have read those of the turn
before, so that box may be filled again.
"""

from __future__ import annotations

from typing import Any

import jax

# JAX offers no public way to write a line of assembly; its stubs do not list this module.
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

_SCALAR = plgpu.Layout.WG_SPLAT(())


def _assembly(text: str, constraints: str, *args: Any) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(args), text, constraints, has_side_effects=True)


def _address(ref: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, utils.memref_ptr(ref))


def _offset(address: Any, index: Any, size: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.addi(address, arith.muli(index, utils.c(size, i32)))


def open_barriers(barriers: Any) -> None:
    """Make two barriers in shared memory, ``[2]`` of eight bytes, ready in every block."""

    def run(_: Any, barriers: Any) -> None:
        _assembly(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared::cta.b64 [$0], 1;
            @first mbarrier.init.shared::cta.b64 [$0+8], 1;
            @first fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.release.aligned;
            barrier.cluster.wait.acquire.aligned;
            }""",
            "r,~{memory}",
            _address(barriers),
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(run)(barriers)


def send_and_wait(
    mail: Any,
    barriers: Any,
    place: jax.Array,
    box: jax.Array,
    parity: jax.Array,
    values: tuple[jax.Array, ...],
    cluster: int,
) -> None:
    """Store `values` at `place` in every block's `mail`; wait for theirs in this one's.

    Args:
      mail: float32 ref in shared memory.
      barriers: what `open_barriers` made ready.
      place: ``[]`` int32, index into `mail`; the values follow each other.
      box: ``[]`` int32, which barrier.
      parity: ``[]`` int32, 0 on that barrier's first turn, then 1, 0, 1 and so on.
      values: float32 scalars.
      cluster: blocks.
    """
    stores = "".join(
        f"@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 "
        f"[theirs+{4 * i}], ${3 + i}, [barrier];\n"
        for i in range(len(values))
    )

    def run(_: Any, mail: Any, barriers: Any, place: Any, box: Any, parity: Any, *xs: Any) -> None:
        place, box, parity, *numbers = (x.registers.item() for x in (place, box, parity, *xs))
        _assembly(
            f"""{{
            .reg .pred first, sends, done;
            .reg .b32 thread, theirs, barrier;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            setp.lt.u32 sends, thread, {cluster};
            @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {4 * len(values) * cluster};
            @sends mapa.shared::cluster.u32 theirs, $0, thread;
            @sends mapa.shared::cluster.u32 barrier, $1, thread;
            {stores}
            WAIT:
            mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
            @!done bra WAIT;
            }}""",
            ",".join(["r", "r", "r", *["f"] * len(numbers), "~{memory}"]),
            _offset(_address(mail), place, 4),
            _offset(_address(barriers), box, 8),
            parity,
            *numbers,
        )

    types = (plgpu.RefType(), plgpu.RefType(), *[_SCALAR] * (3 + len(values)))
    plgpu.inline_mgpu(arg_types=types)(run)(mail, barriers, place, box, parity, *values)
