"""What a compiled program does, counted in its text (HLO): bytes, loops, fusions.

XLA's own `cost_analysis` counts the body of a loop once, and a fusion that reads ten rows of a
matrix as if it read the matrix. Here a body counts as often as the loop turns, and a slice counts
what it takes. Cycles are counted by whoever is given (`bundles`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8}
BYTES |= {"u64": 8, "f64": 8}

SHAPE = re.compile(rf"({'|'.join(BYTES)})\[([\d,]*)\](\{{[^}}]*\}})?")
HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
NAME = re.compile(r"%([\w.\-]+)")

KERNEL_BYTES = re.compile(r'"bytes_accessed":"([1-9]\d*)"')
"""What a Pallas kernel says that it copies, if it copies parts of its operands by itself."""

FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast iota after-all partition-id".split()
    + ["call-update"]
)
"""Operations that move nothing."""

CALLS = ("call", "call-start")
"""Operations that run a computation once, the latter beside others: a TPU's sparse cores gather."""

SLICES = ("dynamic-slice", "slice", "gather")
"""Operations that read of their first operand no more than they give."""


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    line: str
    is_root: bool


class Counted(NamedTuple):
    """What a computation moves and takes.

    Attributes:
      bytes: read and written, in any memory.
      hbm_bytes: of these, in the device's main memory. A TPU keeps some arrays in its
        vector memory (VMEM), which are marked ``S(1)``.
      cycles: of a TPU; 0 where nobody counts them.
    """

    bytes: int = 0
    hbm_bytes: int = 0
    cycles: int = 0

    def plus(self, other: Counted, times: int = 1) -> Counted:
        return Counted(*(a + times * b for a, b in zip(self, other, strict=True)))


def bytes_of(shape: str, only_hbm: bool = False) -> int:
    """Bytes of all arrays in the text of a shape."""
    total = 0
    for dtype, dims, layout in SHAPE.findall(shape):
        if only_hbm and "S(" in layout:
            continue
        total += BYTES[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim)
    return total


def count_of(shape: str) -> int:
    """Entries of the first array in the text of a shape."""
    found = SHAPE.search(shape)
    assert found is not None, shape
    return bytes_of(found[0]) // BYTES[found[1]]


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations by name, each its instructions by name, and which is the program."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            header = HEADER.match(line)
            if header:
                current = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := INSTRUCTION.match(line):
            root, name, shape, op, rest = found.groups()
            operands = tuple(NAME.findall(rest.partition("), ")[0]))
            current[name] = Instruction(name, shape, op, operands, line, bool(root))
    return computations, entry


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program's text, taken apart.

    Attributes:
      computations: by name, each its instructions by name.
      entry: the program's.
      trips: how often a loop turns that does not say: how far it goes depends on the data.
      cycles: of an operation that moves so many bytes of HBM.
      skipped: the scope (`jax.named_scope`) whose loops do not turn; None if there is none.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str
    trips: int
    cycles: Callable[[Instruction, int], int]
    skipped: str | None = None

    @classmethod
    def of(
        cls, text: str, trips: int, cycles: Callable[[Instruction, int], int] = lambda *_: 0
    ) -> Program:
        return cls(*parse(text), trips, cycles)

    def count(self, name: str | None = None) -> Counted:
        """What a computation takes, loops by their trips; of two branches the dearer."""
        total = Counted()
        for _, counted, times in self.operations(name):
            total = total.plus(counted, times)
        return total

    def operations(self, name: str | None = None) -> Iterator[tuple[Instruction, Counted, int]]:
        """Every operation that runs, what it takes, and how often; of two branches the dearer."""
        computation = self.computations[name or self.entry]
        for it in computation.values():
            if it.op == "while":
                trips = self.trips_of(it)
                for inner, counted, times in self.operations(_called(it, "body")):
                    yield inner, counted, trips * times
            elif it.op == "conditional":
                yield from self.operations(max(_branches(it), key=self._price))
            elif it.op in CALLS:
                yield from self.operations(_called(it, "to_apply"))
            else:
                moved, hbm = (self._moved(it, computation, only_hbm) for only_hbm in (False, True))
                yield it, Counted(moved, hbm, self.cycles(it, hbm)), 1

    def _price(self, name: str) -> tuple[int, ...]:
        counted = self.count(name)
        return counted.cycles, counted.hbm_bytes, counted.bytes

    def trips_of(self, loop: Instruction) -> int:
        """As often as the loop turns: `trips` where the data decide, once if it only asks."""
        if self.skipped and f"/{self.skipped}/" in loop.line:
            return 0
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line)
        if known:
            return int(known[1])
        condition = self.computations[_called(loop, "condition")]
        (root,) = (it for it in condition.values() if it.is_root)
        if root.op == "get-tuple-element":  # what a turn before has decided: it turns if at all
            return 1
        if root.op == "compare" and "direction=LT" in root.line:
            limit = re.search(r" constant\((\d+)\)", condition[root.operands[1]].line)
            if limit:
                return int(limit[1])
        return self.trips

    def loops(self, name: str | None = None) -> Iterator[tuple[Instruction, int]]:
        """Every loop that the program may run, and how often it turns."""
        for it in self.computations[name or self.entry].values():
            called: list[str] = []
            if it.op == "while":
                yield it, self.trips_of(it)
                called = [_called(it, "body")]
            elif it.op == "conditional":
                called = _branches(it)
            elif it.op in CALLS:
                called = [_called(it, "to_apply")]
            for other in called:
                yield from self.loops(other)

    def ops(self, name: str | None = None) -> collections.Counter[str]:
        """Operations by kind, those of a loop once; of two branches the one with more fusions."""
        found: collections.Counter[str] = collections.Counter()
        for it in self.computations[name or self.entry].values():
            found[it.op] += 1
            if it.op == "while":
                found += self.ops(_called(it, "body"))
            elif it.op == "conditional":
                found += max(map(self.ops, _branches(it)), key=lambda ops: ops["fusion"])
            elif it.op in CALLS:
                found += self.ops(_called(it, "to_apply"))
        return found

    def _moved(self, it: Instruction, within: dict[str, Instruction], hbm: bool) -> int:
        if it.op in FREE or it.op.endswith("-done") or "AllocateBuffer" in it.line:
            return 0
        if it.op in ("copy-start", "slice-start"):  # the shape: what is read and what is written
            arrays = [found[0] for found in SHAPE.finditer(it.shape)]
            source, result = arrays[:2] if it.op == "slice-start" else arrays[1::-1]
            return bytes_of(result, hbm) + _like(source, result, hbm)
        if stated := KERNEL_BYTES.search(it.line):
            return int(stated[1])
        if it.op == "fusion":
            return self._moved_by_fusion(it, within, hbm)
        if it.op in SLICES:
            return bytes_of(it.shape, hbm) + _like(within[it.operands[0]].shape, it.shape, hbm)
        if it.op == "dynamic-update-slice":
            update = within[it.operands[1]].shape
            return bytes_of(update, hbm) + _like(it.shape, update, hbm)
        read = sum(bytes_of(within[name].shape, hbm) for name in it.operands if name in within)
        return read + bytes_of(it.shape, hbm)

    def _moved_by_fusion(self, it: Instruction, within: dict[str, Instruction], hbm: bool) -> int:
        inside = self.computations[_called(it, "calls")]
        users: dict[str, list[Instruction]] = collections.defaultdict(list)
        for inner in inside.values():
            for operand in inner.operands:
                users[operand].append(inner)
        total = 0
        for inner in inside.values():
            if inner.op != "parameter":
                continue
            (index,) = re.findall(r" parameter\((\d+)\)", inner.line)
            given = within[it.operands[int(index)]].shape
            total += _read(inner, given, users, inside, hbm)
        (root,) = (inner for inner in inside.values() if inner.is_root)
        if root.op != "tuple":
            return total + _written(root, it.shape, inside, hbm)
        shapes = [found[0] for found in SHAPE.finditer(it.shape)]
        for name, shape in zip(root.operands, shapes, strict=True):
            total += _written(inside[name], shape, inside, hbm)
        return total


def _read(
    inner: Instruction,
    given: str,
    users: dict[str, list[Instruction]],
    inside: dict[str, Instruction],
    hbm: bool,
) -> int:
    """What a fusion reads of one operand: all of it, unless it only takes slices or writes one."""
    total, whole = 0, bytes_of(given, hbm)
    for user in users[inner.name]:
        if user.op == "bitcast":
            total += _read(user, given, users, inside, hbm)
        elif user.op in SLICES and user.operands[0] == inner.name:
            total += _like(given, user.shape, hbm)
        elif user.op == "dynamic-update-slice" and user.operands[0] == inner.name:
            continue
        else:
            return whole
    return min(total, whole)


def _written(result: Instruction, shape: str, inside: dict[str, Instruction], hbm: bool) -> int:
    """What a fusion writes of one result: all of it, unless it updates a slice in place."""
    while result.op == "bitcast":
        result = inside[result.operands[0]]
    if result.op == "dynamic-update-slice":
        return _like(shape, inside[result.operands[1]].shape, hbm)
    return bytes_of(shape, hbm)


def _like(shape: str, size: str, hbm: bool) -> int:
    """Bytes of `size`, which lies in the memory of `shape`; of a tuple the first."""
    first = SHAPE.search(size)
    assert first is not None
    layout = SHAPE.search(shape)
    assert layout is not None
    return 0 if hbm and "S(" in (layout[3] or "") else bytes_of(first[0])


def _called(it: Instruction, role: str) -> str:
    found = re.search(rf"{role}=%?([\w.\-]+)", it.line)
    assert found is not None, it.line
    return found[1]


def _branches(it: Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", it.line)
    if found:
        return [name.strip().lstrip("%") for name in found[1].split(",")]
    return [_called(it, "true_computation"), _called(it, "false_computation")]
