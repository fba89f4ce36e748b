"""What the threads of a warpgroup do by themselves and together, below what Pallas offers.

The kernel computes with arrays ``[128]`` of one entry per thread: entry t is in a register of
thread t. Every operation here takes and gives such arrays, or scalars that all threads have. Each
is written twice: here in assembly, and in jnp for GPU interpret mode, in `interpreted`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# JAX offers no public way to write a line of assembly; its stubs do not list these modules.
from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128
WARP = 32
WARPS = THREADS // WARP

_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
_UNIFORM = plgpu.Layout.WG_SPLAT(())
_GLOBAL = 1  # the address space
_ALL_LANES = "0xffffffff"


def assembly(
    text: str, constraints: str, *args: Any, result: Any = None, pure: bool = False
) -> Any:
    """A piece of PTX with operands ``$0, $1, ...``, the result first; `pure`: it may move."""
    kind = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(kind, list(args), text, constraints, has_side_effects=not pure)


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def inline(
    fn: Callable[..., Any],
    refs: Sequence[Any],
    values: Sequence[Any],
    out: Sequence[tuple[tuple[int, ...], Any]] = (),
) -> list[jax.Array]:
    """`fn(*refs, *values)` in MLIR: memrefs, then each thread's value; returns one per `out`."""

    def run(_: Any, *args: Any) -> Any:
        given = [a if i < len(refs) else _register(a) for i, a in enumerate(args)]
        results = fn(*given)
        return tuple(_array(r, *o) for r, o in zip(results if out else (), out, strict=True))

    values = [_cast(jnp.asarray(x)) for x in values]
    layouts = [_UNIFORM if x.ndim == 0 else _PER_THREAD for x in values]
    types = tuple(
        plgpu.ShapeDtypeStruct(shape, dtype, layout=_PER_THREAD if shape else _UNIFORM)
        for shape, dtype in out
    )
    call = plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *layouts), return_type=types
    )
    return list(call(run)(*refs, *values))


def _cast(x: jax.Array) -> jax.Array:
    return plgpu.layout_cast(x, _PER_THREAD) if x.ndim else x


def _register(x: Any) -> Any:
    register = x.registers.flat[0]
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
    return register


def _array(value: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if dtype != jnp.float32 else None
    if not shape:
        return mgpu.FragmentedArray.splat(value, (), is_signed=signed)
    one = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    return mgpu.FragmentedArray(
        _registers=np.array([one], dtype=object),
        _layout=_PER_THREAD.to_mgpu(),
        _is_signed=signed,
    )


def shared_address(ref: Any) -> Any:
    """Where a ref of shared memory begins, in 32 bits."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def add_scaled(address: Any, index: Any, size: int) -> Any:
    """``address + index * size`` in the width of `address`."""
    if index.type != address.type:
        index = arith.extsi(address.type, index)
    return arith.addi(address, arith.muli(index, utils.c(size, address.type)))


def _element_type(dtype: Any) -> Any:
    return utils.dtype_to_ir_type(jnp.dtype(dtype))


class Gpu:
    """The operations on a GPU."""

    interpreted = False

    @staticmethod
    def index() -> jax.Array:
        """Each thread's place in the warpgroup, ``[128]`` int32."""
        return plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_PER_THREAD)

    @staticmethod
    def index_anew() -> jax.Array:
        """The same, computed again: what is computed of it is not kept in registers until then."""

        def run() -> Any:
            text = "{ .reg .b32 thread; mov.u32 thread, %tid.x; and.b32 $0, thread, 127; }"
            return (assembly(text, "=r", result=i32()),)

        return inline(run, (), (), [((THREADS,), jnp.int32)])[0]

    # Within a warp.

    @staticmethod
    def _shuffle(kind: str, x: jax.Array, lane: Any) -> jax.Array:
        is_float = x.dtype == jnp.float32
        letter = "f" if is_float else "r"
        bound = 0 if kind == "up" else 31

        def run(x: Any, lane: Any) -> Any:
            text = f"shfl.sync.{kind}.b32 $0, $1, $2, {bound}, {_ALL_LANES};"
            return (assembly(text, f"={letter},{letter},r", x, lane, result=x.type),)

        out = [((THREADS,), x.dtype)]
        return inline(run, (), (x, jnp.asarray(lane, jnp.int32)), out)[0]

    @staticmethod
    def _reduce(kind: str, x: jax.Array) -> jax.Array:
        def run(x: Any) -> Any:
            text = f"redux.sync.{kind}.s32 $0, $1, {_ALL_LANES};"
            return (assembly(text, "=r,r", x, result=x.type),)

        return inline(run, (), (x,), [((THREADS,), jnp.int32)])[0]

    def warp_max(self, x: jax.Array) -> jax.Array:
        """The largest float32 of each warp, NaN if any is, in all of its threads."""
        bits = lax.bitcast_convert_type(jnp.where(x == x, x, jnp.nan), jnp.int32)
        return lax.bitcast_convert_type(_ordered(self._reduce("max", _ordered(bits))), x.dtype)

    def warp_min(self, x: jax.Array) -> jax.Array:
        """The least int32 of each warp, in all of its threads."""
        return self._reduce("min", x)

    def warp_sum(self, x: jax.Array, lanes: int = WARP) -> jax.Array:
        """The sum of each warp, or of each `lanes` of it in order, in all of its threads."""
        while lanes > 1:
            lanes //= 2
            x = x + self.swapped(x, lanes)
        return x

    def swapped(self, x: jax.Array, distance: int) -> jax.Array:
        """The entry of the lane whose number differs in one bit, `distance`."""
        return self._shuffle("bfly", x, distance)

    def warp_scan(self, x: jax.Array) -> jax.Array:
        """Sums up to and including each thread, within its warp."""
        lane = self.index() & (WARP - 1)
        for distance in (1, 2, 4, 8, 16):
            x = jnp.where(lane >= distance, x + self._shuffle("up", x, distance), x)
        return x

    def from_lane(self, x: jax.Array, lane: Any) -> jax.Array:
        """The entry of one lane of each warp; `lane` may differ between threads."""
        return self._shuffle("idx", x, lane)

    def scalar(self, x: jax.Array) -> jax.Array:
        """What all threads have in common, ``[]``."""
        return inline(lambda x: (x,), (), (x,), [((), x.dtype)])[0]

    @staticmethod
    def meet() -> None:
        """Wait for the whole warpgroup, which then knows what it wrote to shared memory."""
        inline(lambda: utils.warpgroup_barrier(), (), ())

    @staticmethod
    def written() -> None:
        """What a thread wrote to shared memory precedes copies that begin once others know it."""
        inline(lambda: assembly("fence.proxy.async.shared::cta;", "~{memory}"), (), ())

    def either(self, which: jax.Array, first: Any, second: Any) -> Any:
        """What `first` or `second` gives; `which` is the same in all threads of a warp."""
        return lax.cond(self.scalar(which.astype(jnp.int32)) == 1, first, second)

    # Memory.

    def gather(self, ref: Any, *indices: jax.Array) -> jax.Array:
        """``ref[indices]`` of each thread, for one or two indices; bools and floats widened."""
        dtype = jnp.dtype(ref.dtype)
        widened = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
        if dtype == jnp.uint32:
            widened = jnp.uint32
        size = dtype.itemsize
        columns = ref.shape[-1] if len(indices) == 2 else 0

        def run(ref: Any, *at: Any) -> Any:
            is_bool = dtype == jnp.bool_
            kind = ir.IntegerType.get_signless(8) if is_bool else _element_type(dtype)
            start = _address(ref)
            if columns:
                start = add_scaled(start, at[0], columns * size)
            value = llvm.load(kind, _pointer(ref, add_scaled(start, at[-1], size)))
            if is_bool:
                return (arith.extui(i32(), value),)
            if widened == jnp.float32 and size < 4:
                return (arith.extf(ir.F32Type.get(), value),)
            return (value,)

        return inline(run, (ref,), indices, [((THREADS,), widened)])[0]

    def scatter(self, ref: Any, index: jax.Array, value: jax.Array, where: jax.Array) -> None:
        """``ref[index] = value`` by each thread whose entry of `where` is true."""
        dtype, size = ref.dtype, jnp.dtype(ref.dtype).itemsize

        def run(ref: Any, index: Any, value: Any, where: Any) -> None:
            kind = _element_type(dtype)
            address = add_scaled(_address(ref), index, size)
            if value.type != kind:
                value = arith.truncf(kind, value)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ne, where, utils.c(0, i32()))):
                llvm.store(value, _pointer(ref, address))

        inline(run, (ref,), (index, value, where.astype(jnp.int32)))

    def fill(self, ref: Any, start: jax.Array, begin: jax.Array, end: int, value: float) -> None:
        """``ref[start + begin : start + end] = value``; `end` is a multiple of 128."""

        def run(i: jax.Array, _: None) -> None:
            place = i * THREADS + self.index()
            self.scatter(ref, start + place, self.filled(value), place >= begin)

        lax.fori_loop(lax.div(begin, THREADS), end // THREADS, run, None)

    def entries(
        self, ref: Any, start: jax.Array, each: int, *, aligned: bool, offset: int = 0
    ) -> list[jax.Array]:
        """``ref[start + offset + each * t + j]`` as float32, ``[128]`` for each j.

        From shared memory; `start` may be ``[128]``. `aligned`: a multiple of sixteen bytes, so
        many of which are read at a time; else any entry. `offset`: whole words.
        """
        dtype = jnp.dtype(ref.dtype)
        size = dtype.itemsize
        if aligned:  # else more registers are needed where several tiles are read
            start = start + offset

        def run(ref: Any, start: Any, thread: Any) -> Any:
            begin = add_scaled(_address(ref), start, size)
            begin = add_scaled(begin, thread, each * size)
            if aligned:
                words = _aligned_words(ref, begin, each * size)
            else:
                words = _any_words(ref, begin, offset * size, each * size)
            return [x for word in words for x in _numbers(word, dtype)]

        out = [((THREADS,), jnp.float32)] * each
        return inline(run, (ref,), (start, self.index()), out)

    def row_entries(self, ref: Any, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        """``ref[row, start + j]`` of each thread as float32, ``[128]`` for each j of `each`.

        From global memory. `each` and `start` fit a row of aligned pieces of up to sixteen bytes,
        which are read at once.
        """
        if each == 1:
            return [self.gather(ref, row, start)]
        return self.numbers(self.row_words(ref, row, start, each), ref.dtype)

    def row_run(
        self, ref: Any, row: jax.Array, start: jax.Array, offset: int, each: int
    ) -> list[jax.Array]:
        """``ref[row, start + offset + j]`` likewise, one entry at a time, wherever it begins."""
        dtype, columns = jnp.dtype(ref.dtype), ref.shape[1]

        def run(ref: Any, row: Any, start: Any) -> Any:
            begin = add_scaled(_address(ref), row, columns * dtype.itemsize)
            begin = add_scaled(begin, start, dtype.itemsize)
            offsets = [utils.c((offset + j) * dtype.itemsize, begin.type) for j in range(each)]
            return [_entry(ref, arith.addi(begin, offset), dtype) for offset in offsets]

        return inline(run, (ref,), (row, start), [((THREADS,), jnp.float32)] * each)

    def row_words(self, ref: Any, row: jax.Array, start: jax.Array, each: int) -> list[jax.Array]:
        """`row_entries` as they are loaded: what `numbers` makes entries of."""
        dtype, columns = jnp.dtype(ref.dtype), ref.shape[1]

        def run(ref: Any, row: Any, start: Any) -> Any:
            begin = add_scaled(_address(ref), row, columns * dtype.itemsize)
            begin = add_scaled(begin, start, dtype.itemsize)
            return _aligned_words(ref, begin, each * dtype.itemsize)

        out = [((THREADS,), jnp.int32)] * (each * dtype.itemsize // 4)
        return inline(run, (ref,), (row, start), out)

    def numbers(self, words: list[jax.Array], dtype: Any) -> list[jax.Array]:
        """Entries as float32, from words that hold one or two of them."""
        dtype = jnp.dtype(dtype)

        def run(*words: Any) -> Any:
            return [x for word in words for x in _numbers(word, dtype)]

        out = [((THREADS,), jnp.float32)] * (4 // dtype.itemsize * len(words))
        return inline(run, (), words, out)

    def filled(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        """``[128]`` of one value, in a register of each thread, to start a loop with."""
        return _cast(jnp.full((THREADS,), value, dtype))


def _ordered(bits: jax.Array) -> jax.Array:
    """Integers in the order of the floats of these bits, NaN last; and back."""
    return bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF)


def _address(ref: Any) -> Any:
    """Where a ref begins: 32 bits in shared memory, 64 in global memory."""
    return llvm.ptrtoint(i32() if utils.is_smem_ref(ref) else i64(), utils.memref_ptr(ref))


def _pointer(ref: Any, address: Any) -> Any:
    kind = utils.memref_ptr(ref).type if utils.is_smem_ref(ref) else llvm.PointerType.get(_GLOBAL)
    return llvm.inttoptr(kind, address)


def _entry(ref: Any, address: Any, dtype: Any) -> Any:
    """One entry, as float32."""
    value = llvm.load(_element_type(dtype), _pointer(ref, address))
    return value if dtype == jnp.float32 else arith.extf(ir.F32Type.get(), value)


def _aligned_words(ref: Any, begin: Any, size: int) -> list[Any]:
    """`size` bytes from an address that is a multiple of them, or of sixteen."""
    per_load = min(16, size)
    kind = ir.VectorType.get((per_load // 4,), i32())
    words = []
    for offset in range(0, size, per_load):
        pointer = _pointer(ref, arith.addi(begin, utils.c(offset, begin.type)))
        loaded = llvm.load(kind, pointer, alignment=per_load)
        words += [
            vector.extract(loaded, [], ir.DenseI64ArrayAttr.get([j])) for j in range(per_load // 4)
        ]
    return words


def _any_words(ref: Any, begin: Any, offset: int, size: int) -> list[Any]:
    """`size` bytes, `offset` after any address: each word from the two that it lies in."""

    def load(first: Any, place: int) -> Any:
        return llvm.load(i32(), _pointer(ref, arith.addi(first, utils.c(place, i32()))))

    if utils.bitwidth(ir.MemRefType(ref.type).element_type) == 32:
        return [load(begin, place) for place in range(offset, offset + size, 4)]
    first = arith.andi(begin, utils.c(-4, i32()))
    bits = arith.shli(begin, utils.c(3, i32()))
    words = [load(first, place) for place in range(offset, offset + size + 4, 4)]
    text = "shf.r.wrap.b32 $0, $1, $2, $3;"
    return [
        assembly(text, "=r,r,r,r", low, high, bits, result=i32(), pure=True)
        for low, high in itertools.pairwise(words)
    ]


def _numbers(word: Any, dtype: Any) -> list[Any]:
    """What a word holds, as float32."""
    f32 = ir.F32Type.get()
    if dtype == jnp.float32:
        return [arith.bitcast(f32, word)]
    if dtype == jnp.bfloat16:  # the upper half of a number is the number
        low, high = arith.shli(word, utils.c(16, i32())), arith.andi(word, utils.c(-65536, i32()))
        return [arith.bitcast(f32, low), arith.bitcast(f32, high)]
    one = vector.broadcast(ir.VectorType.get((1,), i32()), word)
    pair = vector.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), one)
    wide = arith.extf(ir.VectorType.get((2,), f32), pair)
    return [vector.extract(wide, [], ir.DenseI64ArrayAttr.get([j])) for j in range(2)]
