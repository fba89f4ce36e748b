"""`threads.Threads` on a GPU: the operations that Pallas does not offer.

They are built from MLIR's `nvvm` and `llvm` dialects where possible. PTX is used for:

- copies, prefetches and stores to other CTAs: each is predicated, for one thread or lane;
- waiting for an mbarrier: the dialect's loop suspends the thread between two tries;
- `index_anew`: only code with side effects is computed again rather than kept in a register;
- first bytes of rows: what all rows have in common would be kept in registers;
- funnel shifts, which no dialect has.

An operation has two halves. The outer one is traced by JAX, with arrays ``[128]``; the inner one,
`run`, builds MLIR when the kernel is lowered, with the value that each thread holds. `_inline`
joins them. In inline PTX, ``$0`` is the result if there is one, then come the operands; constraints
name their registers: r and l for 32 and 64 bits, f for a float32, ~{memory} for code that reads or
writes memory and so stays where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jax_specdec._src.mosaic.threads import (
    COPIED,
    THREADS,
    WARP,
    WARPS,
    ExchangeSlot,
    Ref,
    RowTiles,
    Shuffle,
    Threads,
)
from jax_specdec._src.rows.threshold import in_order
from jax_specdec._src.rows.tiles import TILE

# How Mosaic lays out arrays in registers: entry t in thread t; a scalar in every thread.
_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
_UNIFORM = plgpu.Layout.WG_SPLAT(())
_GLOBAL = 1  # the address space
_ALL_LANES = -1  # a mask of 32 bits: every lane takes part

# Tries until the phase is complete. A try suspends the thread for a while.
_WAIT = """
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};
    @!done bra WAIT;
"""


class GpuThreads(Threads):
    """A warpgroup's operations; see `threads.Threads`."""

    interpreted = False

    def __init__(self) -> None:
        super().__init__(plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_PER_THREAD))

    def index_anew(self) -> jax.Array:
        def run() -> Any:
            text = "{ .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 $0, thread, 127; }"
            return (_ptx(text, "=r", result=_i32()),)

        return _inline(run, (), (), [jnp.int32])[0]

    def filled(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        return plgpu.layout_cast(jnp.full((THREADS,), value, dtype), _PER_THREAD)

    # Within a warp.

    def shuffle(self, x: jax.Array, lane: jax.Array | int, how: Shuffle = "idx") -> jax.Array:
        # A register of the array's type, and one for the lane.
        letter = "f" if x.dtype == jnp.float32 else "r"
        # The lane that no thread reads past: the lowest when lanes are counted down.
        bound = 0 if how == "up" else 31

        def run(x: Any, lane: Any) -> Any:
            text = f"shfl.sync.{how}.b32 $0, $1, $2, {bound}, 0xffffffff;"
            return (_ptx(text, f"={letter},{letter},r", x, lane, result=x.type),)

        return _inline(run, (), (x, jnp.asarray(lane, jnp.int32)), [x.dtype])[0]

    def _reduce(self, kind: str, x: jax.Array) -> jax.Array:
        def run(x: Any) -> Any:
            how = getattr(nvvm.ReductionKind, kind)
            return (nvvm.redux_sync(x, how, utils.c(_ALL_LANES, _i32())),)

        return _inline(run, (), (x,), [jnp.int32])[0]

    def warp_max(self, x: jax.Array) -> jax.Array:
        # As integers: `redux.sync` has them alone on Hopper. The bits of floats, put in order, have
        # the same maximum; a NaN of either sign becomes the positive one, which is the largest.
        bits = lax.bitcast_convert_type(jnp.where(x == x, x, jnp.nan), jnp.int32)
        return lax.bitcast_convert_type(in_order(self._reduce("MAX", in_order(bits))), x.dtype)

    def warp_min(self, x: jax.Array) -> jax.Array:
        return self._reduce("MIN", x)

    def has_twin(self, x: jax.Array) -> jax.Array:
        def run(x: Any) -> Any:
            text = "match.any.sync.b32 $0, $1, 0xffffffff;"
            return (_ptx(text, "=r,r", x, result=_i32()),)

        # A bit for each lane that has the same: more than one?
        lanes = _inline(run, (), (x,), [jnp.int32])[0]
        return (lanes & (lanes - 1)) != 0

    def warp_sum(self, x: jax.Array, lanes: int = WARP) -> jax.Array:
        # Each lane adds what its partner has, at half the distance each time: all get the sum.
        while lanes > 1:
            lanes //= 2
            x = x + self.shuffle(x, lanes, "bfly")
        return x

    def warp_scan(self, x: jax.Array) -> jax.Array:
        # After each step a lane has the sum of twice as many lanes up to it.
        for distance in (1, 2, 4, 8, 16):
            x = jnp.where(self.lane >= distance, x + self.shuffle(x, distance, "up"), x)
        return x

    def scalar(self, x: jax.Array) -> jax.Array:
        # The same register, which Mosaic takes for one value from here on.
        return _inline(lambda x: (x,), (), (x,), [x.dtype], shape=())[0]

    # Barriers.

    def sync(self) -> None:
        _inline(lambda: utils.warpgroup_barrier())

    def sync_cta(self, warpgroups: int, barrier: Ref | None) -> None:
        del barrier  # on a GPU, number 15 of the hardware's: warpgroups use the lower numbers
        text = f"bar.sync 15, {THREADS * warpgroups};"
        _inline(lambda: _ptx(text, "~{memory}"))

    def fence_copies(self) -> None:
        # Bulk copies are another proxy: without a fence they may overtake ordinary writes.
        text = "fence.proxy.async.shared::cta;"
        _inline(lambda: _ptx(text, "~{memory}"))

    def init_barriers(self, barriers: Any, count: int) -> None:
        # Thread i initializes barrier i, for one arrival, and makes that visible in the cluster;
        # then the warp signals the other CTAs, whose `cluster_wait` waits for all of them.
        def run(barriers: Any) -> None:
            _ptx(
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
                _address(barriers),
            )

        _inline(run, (barriers,))

    def cluster_wait(self) -> None:
        _inline(lambda: nvvm.cluster_wait(aligned=True))

    def cluster_sync(self, barrier: Any) -> None:
        del barrier

        def run() -> None:
            nvvm.cluster_arrive(aligned=True)  # releases, as the wait acquires
            nvvm.cluster_wait(aligned=True)

        _inline(run)

    def wait(self, barriers: Ref, barrier: jax.Array, parity: jax.Array) -> None:
        def run(barriers: Any, barrier: Any, parity: Any) -> None:
            text = "{\n.reg .pred done;" + _WAIT.format(barrier="$0", parity="$1") + "}"
            address = _add_scaled(_address(barriers), barrier, 8)
            _ptx(text, "r,r,~{memory}", address, parity)

        _inline(run, (barriers,), (barrier, parity))

    def exchange(self, slot: ExchangeSlot, values: list[jax.Array]) -> None:
        # A store completes on the receiver's barrier: no fence, and one round trip. A store to
        # global memory and a barrier of the cluster would take two fences and three trips.
        # [128] each: a store sends two or four of them.
        count = len(values)
        width = min(count, 4)  # values of a store
        num_bytes = 4 * count * slot.cluster * WARPS  # that a CTA receives in this round
        registers = [f"${3 + j}" for j in range(count)]
        # Only stores are predicated. A register that is written under a predicate keeps its value
        # if that is false, so it would be occupied from the kernel's beginning on.
        stores = [
            f"@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{width}.b32 "
            f"[theirs+{4 * j}], {{{', '.join(registers[j : j + width])}}}, [barrier];"
            for j in range(0, count, width)
        ]
        sends = "\n".join(stores)

        # One thread of each CTA says how many bytes its barrier is to wait for. In every warp, lane
        # i sends the warp's values to CTA i: `mapa` finds the same address and the same barrier
        # there. Then all wait for their own barrier.
        def run(
            memory: Any, barriers: Any, place: Any, barrier: Any, parity: Any, *xs: Any
        ) -> None:
            _ptx(
                f"""{{
                .reg .pred first, sends, done;
                .reg .b32 thread, lane, block, theirs, barrier;
                mov.u32 thread, %tid.x;
                and.b32 thread, thread, 127;
                setp.eq.u32 first, thread, 0;
                and.b32 lane, thread, 31;
                setp.lt.u32 sends, lane, {slot.cluster};
                @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {num_bytes};
                and.b32 block, lane, {slot.cluster - 1};
                mapa.shared::cluster.u32 theirs, $0, block;
                mapa.shared::cluster.u32 barrier, $1, block;
                {sends}
                {_WAIT.format(barrier="$1", parity="$2")}
                }}""",
                ",".join(["r", "r", "r", *["f"] * count, "~{memory}"]),
                _add_scaled(_address(memory), place, 4),
                _add_scaled(_address(barriers), barrier, 8),
                parity,
                *xs,
            )

        numbers = slot.place, slot.barrier, slot.parity, *values
        _inline(run, (slot.memory, slot.barriers), numbers)

    # Copies.

    def copy_tiles(
        self,
        tiles: RowTiles,
        buffer: Ref,
        stride: int,
        barriers: Ref,
        first_barrier: jax.Array | int,
    ) -> None:
        columns = tiles.matrix.shape[1]
        bytes_each = tiles.matrix.dtype.itemsize
        # Thread i copies tile i: it says how many bytes barrier i is to wait for, and begins.
        index, begin, length = self._by_thread(tiles)

        def run(matrix: Any, buffer: Any, barriers: Any, *args: Any) -> None:
            row, first, place, barrier, count = args
            begin, length = _whole_units(matrix, row, first, count, columns, bytes_each)
            _ptx(
                """{
                .reg .pred mine;
                setp.gt.s32 mine, $4, 0;
                @mine mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], $2;
                @mine cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                    [$0], [$1], $2, [$3];
                }""",
                "r,l,r,r,r,~{memory}",
                _add_scaled(_address(buffer), place, bytes_each),
                begin,
                length,
                _add_scaled(_address(barriers), barrier, 8),
                count,
            )

        values = tiles.row, begin, index * stride, first_barrier + index, length
        _inline(run, (tiles.matrix, buffer, barriers), values)

    def copy_shift(self, matrix: Ref, row: jax.Array) -> jax.Array | int:
        columns = matrix.shape[1]
        size = matrix.dtype.itemsize

        # Entries between the last multiple of sixteen bytes and the row's first entry. Every tile
        # begins as many after one, for a tile is a multiple of sixteen bytes.
        def run(matrix: Any, row: Any) -> Any:
            begin = _first_byte(matrix, row, utils.c(0, _i32()), columns, size)
            before = arith.trunci(_i32(), arith.andi(begin, utils.c(COPIED - 1, _i64())))
            return (arith.shrui(before, utils.c(size.bit_length() - 1, _i32())),)

        return _inline(run, (matrix,), (row,), [jnp.int32], shape=())[0]

    def prefetch_tiles(self, tiles: RowTiles) -> None:
        columns = tiles.matrix.shape[1]
        bytes_each = tiles.matrix.dtype.itemsize
        _, begin, length = self._by_thread(tiles)

        def run(matrix: Any, row: Any, first: Any, count: Any) -> None:
            begin, length = _whole_units(matrix, row, first, count, columns, bytes_each)
            _ptx(
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

        _inline(run, (tiles.matrix,), (tiles.row, begin, length))

    def _by_thread(self, tiles: RowTiles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns each thread's tile: index, first entry, and entries, 0 or less for none."""
        index = self.index_anew()
        begin = tiles.first + index * TILE
        is_tile = index < tiles.num_tiles
        return index, begin, jnp.where(is_tile, jnp.minimum(tiles.size - begin, TILE), 0)

    # Reading and writing.

    def gather(self, ref: Ref, *indices: jax.Array) -> jax.Array:
        dtype = jnp.dtype(ref.dtype)
        # Floats of any width come as float32, words of keys as they are.
        columns = ref.shape[-1]
        widened = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
        if dtype == jnp.uint32:
            widened = jnp.uint32

        def run(ref: Any, *at: Any) -> Any:
            return (_load(ref, _address_of(ref, at, columns, dtype.itemsize), dtype),)

        return _inline(run, (ref,), indices, [widened])[0]

    def scatter(self, ref: Ref, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        dtype = ref.dtype
        size = jnp.dtype(ref.dtype).itemsize

        # A branch around the store: the address of a thread that does not store may be none.
        def run(ref: Any, index: Any, value: Any, where: Any) -> None:
            kind = _element_type(dtype)
            # A pointer to the entry, and the value in the ref's type.
            address = _add_scaled(_address(ref), index, size)
            if value.type != kind:  # a float32 for a narrower ref
                value = arith.truncf(kind, value)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ne, where, utils.c(0, _i32()))):
                llvm.store(value, _pointer(ref, address))

        _inline(run, (ref,), (index, value, where.astype(jnp.int32)))

    def scatter_warps(self, ref: Ref, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        self.scatter(ref, index, value, where)

    def entries(
        self, ref: Ref, start: jax.Array, each: int, *, aligned: bool, offset: int = 0
    ) -> list[jax.Array]:
        dtype = jnp.dtype(ref.dtype)
        size = dtype.itemsize
        if aligned:  # otherwise reading several tiles takes more registers
            start = start + offset

        def run(ref: Any, start: Any, thread: Any) -> Any:
            # Entry `start`, and from there `each` entries for every thread before.
            begin = _add_scaled(_address(ref), start, size)
            begin = _add_scaled(begin, thread, each * size)
            if aligned:
                words = _aligned_words(ref, begin, each * size)
            else:
                words = _any_words(ref, begin, offset * size, each * size)
            return [x for word in words for x in _numbers(word, dtype)]

        return _inline(run, (ref,), (start, self.index), [jnp.float32] * each)

    def row_words(self, ref: Ref, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        dtype = jnp.dtype(ref.dtype)
        columns = ref.shape[1]

        def run(ref: Any, row: Any, start: Any) -> Any:
            begin = _address_of(ref, (row, start), columns, dtype.itemsize)
            return _aligned_words(ref, begin, each * dtype.itemsize)

        return _inline(run, (ref,), (row, start), [jnp.int32] * (each * dtype.itemsize // 4))

    def numbers(self, words: list[jax.Array], dtype: Any) -> list[jax.Array]:
        dtype = jnp.dtype(dtype)

        def run(*words: Any) -> Any:
            return [x for word in words for x in _numbers(word, dtype)]

        return _inline(run, (), words, [jnp.float32] * (4 // dtype.itemsize * len(words)))

    def row_run(
        self, ref: Ref, row: jax.Array, start: jax.Array, offset: int, each: int
    ) -> list[jax.Array]:
        dtype = jnp.dtype(ref.dtype)
        columns = ref.shape[1]

        # Offsets are constants of the instructions: one address serves all entries.
        def run(ref: Any, row: Any, start: Any) -> Any:
            begin = _address_of(ref, (row, start), columns, dtype.itemsize)
            offsets = [utils.c((offset + j) * dtype.itemsize, begin.type) for j in range(each)]
            return [_load(ref, arith.addi(begin, offset), dtype) for offset in offsets]

        return _inline(run, (ref,), (row, start), [jnp.float32] * each)


# MLIR.


def _inline(
    fn: Callable[..., Any],
    refs: Sequence[Any] = (),
    values: Sequence[Any] = (),
    out: Sequence[Any] = (),
    shape: tuple[int, ...] = (THREADS,),
) -> list[jax.Array]:
    """Returns ``fn(*refs, *values)``, computed in MLIR on memrefs and each thread's values.

    Its results are of the dtypes `out`, and of one shape: ``[128]``, or ``[]`` if they are the same
    in all threads.
    """

    def run(_: Any, *args: Any) -> Any:
        # Refs are memrefs already; of an array each thread has one value.
        given = [a if i < len(refs) else _register(a) for i, a in enumerate(args)]
        results = fn(*given)
        if not out:
            return ()
        return tuple([_array(x, shape, dtype) for x, dtype in zip(results, out, strict=True)])

    # Arrays may come with another layout, from a loop or a constant.
    values = [jnp.asarray(x) for x in values]
    values = [plgpu.layout_cast(x, _PER_THREAD) if x.ndim else x for x in values]
    layouts = [_PER_THREAD if x.ndim else _UNIFORM for x in values]
    layout = _PER_THREAD if shape else _UNIFORM
    types = [plgpu.ShapeDtypeStruct(shape, dtype, layout=layout) for dtype in out]
    call = plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *layouts), return_type=tuple(types)
    )
    return list(call(run)(*refs, *values))


def _ptx(text: str, constraints: str, *args: Any, result: Any = None, pure: bool = False) -> Any:
    """Returns inline PTX with operands ``$0, $1, ...``, the result first.

    It may be moved, and computed once for many uses, if it is `pure`.
    """
    kind = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(kind, list(args), text, constraints, has_side_effects=not pure)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _i64() -> Any:
    return ir.IntegerType.get_signless(64)


def _register(x: Any) -> Any:
    """Returns the one value that a thread has of an array: Mosaic keeps vectors of one."""
    # [128] or []: one register, perhaps a vector of one.
    register = x.registers.flat[0]
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
    return register


def _array(value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an array of Mosaic, from each thread's value."""
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if dtype != jnp.float32 else None
    if not shape:
        return mgpu.FragmentedArray.splat(value, (), is_signed=signed)
    one = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    return mgpu.FragmentedArray(
        _registers=np.array([one], dtype=object),
        _layout=_PER_THREAD.to_mgpu(),
        _is_signed=signed,
    )


def _element_type(dtype: Any) -> Any:
    return utils.dtype_to_ir_type(jnp.dtype(dtype))


def _address(ref: Any) -> Any:
    """Returns the address of a ref: 32 bits in shared memory, 64 in global memory."""
    return llvm.ptrtoint(_i32() if utils.is_smem_ref(ref) else _i64(), utils.memref_ptr(ref))


def _address_of(ref: Any, at: Sequence[Any], columns: int, size: int) -> Any:
    """Returns the address of an entry of a ref: of one index, or of two and `columns` columns.

    In 64 bits in global memory: a matrix of logits may have more than 2**31 entries.
    """
    start = _address(ref)
    if len(at) == 2:
        start = _add_scaled(start, at[0], columns * size)
    return _add_scaled(start, at[-1], size)


def _pointer(ref: Any, address: Any) -> Any:
    """Returns an address as a pointer into the memory that a ref lies in."""
    kind = utils.memref_ptr(ref).type if utils.is_smem_ref(ref) else llvm.PointerType.get(_GLOBAL)
    return llvm.inttoptr(kind, address)


def _add_scaled(address: Any, index: Any, size: int) -> Any:
    """Returns ``address + index * size`` in the width of `address`."""
    if index.type != address.type:
        index = arith.extsi(address.type, index)
    return arith.addi(address, arith.muli(index, utils.c(size, address.type)))


def _whole_units(
    matrix: Any, row: Any, first: Any, count: Any, columns: int, size: int
) -> tuple[Any, Any]:
    """Returns the address of the sixteen-byte units that hold `count` entries, and their length."""
    begin = _first_byte(matrix, row, first, columns, size)
    mask = utils.c(-COPIED, _i64())
    end = arith.addi(_add_scaled(begin, count, size), utils.c(COPIED - 1, _i64()))
    begin = arith.andi(begin, mask)  # down to a unit
    end = arith.andi(end, mask)  # up to one, by what was added
    return begin, arith.trunci(_i32(), arith.subi(end, begin))


def _first_byte(matrix: Any, row: Any, first: Any, columns: int, size: int) -> Any:
    """Returns the address of entry `first` of a row, 64 bits: base + row * bytes + first * size."""
    text = f"{{ mad.wide.s32 $0, $2, {columns * size}, $1; mad.wide.s32 $0, $3, {size}, $0; }}"
    # Two steps of PTX, which LLVM does not take apart.
    start = llvm.ptrtoint(_i64(), utils.memref_ptr(matrix))
    return _ptx(text, "=&l,l,r,r", start, row, first, result=_i64(), pure=True)


def _load(ref: Any, address: Any, dtype: Any) -> Any:
    """Returns one entry; of booleans as an integer, of floats as float32."""
    if dtype == jnp.bool_:
        byte = llvm.load(ir.IntegerType.get_signless(8), _pointer(ref, address))
        return arith.extui(_i32(), byte)
    value = llvm.load(_element_type(dtype), _pointer(ref, address))
    return value if dtype.itemsize == 4 else arith.extf(ir.F32Type.get(), value)


def _aligned_words(ref: Any, begin: Any, size: int) -> list[Any]:
    """Returns the words of `size` bytes, from a multiple of as many bytes, or of sixteen."""
    # A load of up to four words, then each word of it.
    per_load = min(16, size)
    kind = ir.VectorType.get((per_load // 4,), _i32())
    words = []
    for offset in range(0, size, per_load):
        pointer = _pointer(ref, arith.addi(begin, utils.c(offset, begin.type)))
        loaded = llvm.load(kind, pointer, alignment=per_load)
        words += [
            vector.extract(loaded, [], ir.DenseI64ArrayAttr.get([j])) for j in range(per_load // 4)
        ]
    return words


def _any_words(ref: Any, begin: Any, offset: int, size: int) -> list[Any]:
    """Returns the words of `size` bytes, `offset` after any address in shared memory."""

    def load(first: Any, place: int) -> Any:
        return llvm.load(_i32(), _pointer(ref, arith.addi(first, utils.c(place, _i32()))))

    if utils.bitwidth(ir.MemRefType(ref.type).element_type) == 32:  # they begin with a word
        return [load(begin, place) for place in range(offset, offset + size, 4)]
    # Entries of two bytes may begin in the middle of a word. Each word of theirs is put together
    # from the two that it overlaps: a funnel shift by 0 or 16 bits, the address's last two bits.
    first = arith.andi(begin, utils.c(-4, _i32()))
    bits = arith.shli(begin, utils.c(3, _i32()))
    words = [load(first, place) for place in range(offset, offset + size + 4, 4)]
    text = "shf.r.wrap.b32 $0, $1, $2, $3;"
    return [
        _ptx(text, "=r,r,r,r", low, high, bits, result=_i32(), pure=True)
        for low, high in itertools.pairwise(words)
    ]


def _numbers(word: Any, dtype: Any) -> list[Any]:
    """Returns the one or two numbers in a word, as float32."""
    f32 = ir.F32Type.get()
    if dtype == jnp.float32:
        return [arith.bitcast(f32, word)]
    if dtype == jnp.bfloat16:  # bfloat16 is the upper half of float32
        low = arith.shli(word, utils.c(16, _i32()))
        high = arith.andi(word, utils.c(-65536, _i32()))
        return [arith.bitcast(f32, low), arith.bitcast(f32, high)]
    # float16: the word as two of them, then each widened.
    one = vector.broadcast(ir.VectorType.get((1,), _i32()), word)
    pair = vector.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), one)
    wide = arith.extf(ir.VectorType.get((2,), f32), pair)
    return [vector.extract(wide, [], ir.DenseI64ArrayAttr.get([j])) for j in range(2)]
