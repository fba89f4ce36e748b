"""Cycles of a TPU program, counted in the instructions that its compiler scheduled.

A TPU issues one bundle of instructions a cycle, in order. libtpu writes the final bundles of each
operation to a folder (`dumped`). Here they are followed as the chip issues them: integers and
predicates are computed, so that every loop turns as often as it does, over the blocks of an
operation, over the grid of a kernel and inside, and branches are taken or not. Vectors are not
computed. An operation takes the longer of its bundles and of the time in which its bytes pass
between the chip and its memory. Those are the bytes of its copies, where it has any that say how
long they are: to read one row of a matrix, XLA copies the eight that lie together.

What this leaves out: waiting for copies inside an operation, bundles that stall, what starts and
joins operations. What depends on data counts as if no branch were taken. So it is no measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import hlo_text

BYTES_PER_CYCLE = {"v5e": 819e9 / 1.5e9, "v6e": 1640e9 / 1.75e9}
"""Of a chip's memory (HBM). The clocks follow from the peak of the matrix units."""

SLOTS = 4
"""Bundles after a branch that are issued before it is taken."""

MOST = 2_000_000
"""Bundles from which on an operation is not followed."""

FILE = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt$")  # not the analyses beside
BEGIN = re.compile(r"\s*(?:0x[0-9a-f]+|0) ([A-Z]{2}|  )?\s*: [> ]*\{")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
BRANCH = re.compile(r"sbr\.rel (?:\((!?)%\w+?_(p\d+)\) )?target = \$region(\d+)")
SPILL = re.compile(r"sst (\[smem:\[#\w+_spill\]\]) (?:\((!?)%\w+?_(p\d+)\), )?(\S+)")
ASSIGNMENT = re.compile(
    r"%\w+?_([sp]\d+) = ([\w.]+) (?:\((!?)%\w+?_(p\d+)(?:, ([^)]*))?\),? ?)?([^;}]*)"
)
COPY = re.compile(
    r"dma\.(?:hbm_to_vmem|vmem_to_hbm) [^/]*?(?:\((!?)%\w+?_(p\d+)\), )?/\*\w+=\*/[^,]*, "
    r"/\*size_in_granules=\*/([^,]+),"
)
GRANULE = 32
"""Bytes in which copies say how long they are."""

COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
OPERATIONS = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b & 31),
    "sshrl": lambda a, b: a >> (b & 31),
    "smin": min,
    "smax": max,
    "por": lambda a, b: a | b,
    "pand": lambda a, b: a & b,
    "pnand": lambda a, b: 1 - (a & b),
    "pnor": lambda a, b: 1 - (a | b),
    "pxor": operator.xor,
    "pneg": lambda a: 1 - a,
    "pmov": lambda a: a,
    "smov": lambda a: a,
    "sld": lambda a: a,
}
"""Of unsigned numbers and of predicates, 0 or 1."""


@contextlib.contextmanager
def dumped() -> Iterator[Path]:
    """A folder that libtpu writes bundles to, if it is loaded inside of this context."""
    only = "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {only}"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
        yield Path(folder)


class Write(NamedTuple):
    """An assignment to a register or to spilled memory.

    Attributes:
      place: that is written.
      op: by which function of the operands.
      operands: registers, spilled memory, or numbers.
      on: the predicate that the write depends on, and its value; None if it always happens.
      otherwise: what is written if not; None for nothing.
    """

    place: str
    op: str
    operands: tuple[str, ...]
    on: tuple[str, bool] | None
    otherwise: str | None


class Bundle(NamedTuple):
    """What of a bundle decides where the program goes.

    Attributes:
      writes: that happen at once.
      branch: the predicate and the region, or None.
      copies: between the chip and its memory: the predicate or None, and the number of granules.
    """

    writes: list[Write]
    branch: tuple[tuple[str, bool] | None, str] | None
    copies: list[tuple[tuple[str, bool] | None, str]]


class Issued(NamedTuple):
    """What an operation issues.

    Attributes:
      bundles: None if they do not end, as where data decide a branch.
      bytes: of its copies, as far as they say how long they are.
    """

    bundles: int | None
    bytes: int


def parse(text: str) -> tuple[list[Bundle], dict[str, int]]:
    """The bundles of an operation, and the first one of each region."""
    texts: list[tuple[str, str]] = []
    for line in text.splitlines():
        if begins := BEGIN.match(line):
            texts.append((begins[1] or "", line))
        elif texts:
            texts[-1] = (texts[-1][0], texts[-1][1] + line)
    regions: dict[str, int] = {}
    found: list[Bundle] = []
    for marker, lines in texts:
        if marker.strip():
            regions |= dict.fromkeys(REGION.findall(lines), len(found))
        copies = [
            ((predicate, not negated) if predicate else None, _operand(granules))
            for negated, predicate, granules in COPY.findall(lines)
        ]
        found.append(_bundle(COMMENT.sub("", lines))._replace(copies=copies))
    return found, regions


def _bundle(text: str) -> Bundle:
    writes: list[Write] = []
    for place, op, negated, predicate, otherwise, rest in ASSIGNMENT.findall(text):
        operands = tuple(_operand(x) for x in rest.split(","))
        if op == "sphi":  # the registers are the same
            continue
        on = (predicate, not negated) if predicate else None
        writes.append(Write(place, op, operands, on, _operand(otherwise) if otherwise else None))
    for place, negated, predicate, value in SPILL.findall(text):
        on = (predicate, not negated) if predicate else None
        writes.append(Write(place, "smov", (_operand(value),), on, None))
    branch = BRANCH.search(text)
    if branch is None:
        return Bundle(writes, None, [])
    return Bundle(writes, ((branch[2], not branch[1]) if branch[2] else None, branch[3]), [])


def _operand(text: str) -> str:
    """A register without its value's name."""
    return re.sub(r"%\w+?_([sp]\d+)$", r"\1", text.strip())


def follow(text: str) -> Issued:
    """What an operation issues."""
    program, regions = parse(text)
    idle = [0] * (len(program) + 1)  # bundles from each on that decide nothing
    for i in reversed(range(len(program))):
        decides = program[i].writes or program[i].branch or program[i].copies
        idle[i] = 0 if decides else idle[i + 1] + 1
    state: dict[str, int | None] = {}
    at = issued = slots = granules = 0
    target: int | None = None
    while at < len(program):
        step = max(1, idle[at] if target is None else 1)
        bundle = program[at]
        at, issued = at + step, issued + step
        for on, count in bundle.copies:
            if on is None or state.get(on[0]) == on[1]:
                granules += (int(count) if count.isdigit() else state.get(count)) or 0
        changed = [(w.place, _value(w, state)) for w in bundle.writes if _happens(w, state)]
        if bundle.branch is not None:
            on, region = bundle.branch
            if (on is None or state.get(on[0]) == on[1]) and region in regions:
                target, slots = regions[region], SLOTS + 1
        state.update(changed)
        if target is not None:
            slots -= 1
            if slots == 0:
                at, target = target, None
        if issued > MOST:
            return Issued(None, GRANULE * granules)
    return Issued(issued, GRANULE * granules)


def _happens(write: Write, state: dict[str, int | None]) -> bool:
    return (
        write.on is None or write.otherwise is not None or state.get(write.on[0]) in _maybe(write)
    )


def _maybe(write: Write) -> tuple[int | None, ...]:
    assert write.on is not None
    return None, int(write.on[1])


def _value(write: Write, state: dict[str, int | None]) -> int | None:
    """What is written; None if it is not known."""

    def known(operand: str) -> int | None:
        return int(operand) if operand.isdigit() else state.get(operand)

    if write.on is not None:
        predicate = state.get(write.on[0])
        if predicate is None:
            return None
        if predicate != write.on[1]:
            assert write.otherwise is not None
            return known(write.otherwise)
    values = [known(operand) for operand in write.operands]
    name, *kind = write.op.split(".")
    if write.op == "scalar_select":
        return None if values[0] is None else values[2 - values[0]]
    if None in values:
        return None
    numbers = [value for value in values if value is not None]
    if name == "scmp":
        if kind[1].startswith("s"):
            numbers = [value - 2**32 * (value >> 31) for value in numbers]
        return int(COMPARISONS[kind[0]](*numbers))
    if name not in OPERATIONS:
        return None
    return int(OPERATIONS[name](*numbers)) & 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Code:
    """Of one program what each operation issues; and the bandwidth of its chip.

    Attributes:
      issued: by operation. Of equal operations libtpu writes one.
      equal: by what operations are, those that were written.
      computations: by name, their lines.
      bytes_per_cycle: of HBM.
    """

    issued: dict[str, Issued]
    equal: dict[str, str]
    computations: dict[str, list[str]]
    bytes_per_cycle: float

    @classmethod
    def taken(cls, folder: Path, device: str, text: str) -> Code:
        """Of the program `text`, whose bundles are in a folder, which is empty afterwards."""
        issued: dict[str, Issued] = {}
        for path in sorted(folder.iterdir()):
            if (name := FILE.match(path.name)) and name[1] != "TLP":
                issued[name[1]] = follow(path.read_text(errors="replace"))
            path.unlink()
        if not issued:
            raise RuntimeError("libtpu wrote no bundles: was it loaded before `dumped`?")
        parsed = hlo_text.parse(text)[0]
        lines = {name: [it.line for it in inside.values()] for name, inside in parsed.items()}
        code = cls(issued, {}, lines, BYTES_PER_CYCLE[device])
        for inside in parsed.values():
            of_these = {code._what(it): it.name for it in inside.values() if it.name in issued}
            code.equal.update(of_these)
        return code

    @property
    def is_known(self) -> bool:
        """Whether the bundles of every operation are."""
        return all(each.bundles is not None for each in self.issued.values())

    def cycles(self, it: hlo_text.Instruction, hbm_bytes: int) -> int:
        """Of an operation that moves so many bytes by its text, which of a kernel is believed."""
        name = it.name if it.name in self.issued else self.equal.get(self._what(it), "")
        bundles, copied = self.issued.get(name, Issued(0, 0))
        moved = hbm_bytes if it.op == "custom-call" else max(hbm_bytes, copied)
        return max(bundles or 0, round(moved / self.bytes_per_cycle))

    def _what(self, it: hlo_text.Instruction) -> str:
        """An operation without names and places: its types and those of what it calls."""
        called = re.search(r"calls=%([\w.\-]+)", it.line)
        lines = [it.line, *(self.computations[called[1]] if called else [])]
        names: dict[str, str] = {}

        def number(name: re.Match[str]) -> str:
            return names.setdefault(name[0], f"%{len(names)}")

        text = re.sub(r", (metadata|backend_config|calls)=.*", "", "\n".join(lines))
        return re.sub(r"%[\w.\-]+", number, text)
