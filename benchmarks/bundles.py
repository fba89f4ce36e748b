"""Cycles of a TPU program, counted in the instructions that its compiler scheduled.

A TPU issues one bundle of instructions a cycle, in order. libtpu writes the final bundles of each
operation to a folder (`dumped`). A loop counts by its trips: those of an operation's blocks or of a
kernel's grid, and those inside. An operation takes the longer of its bundles and of the time in
which its bytes pass between the chip and its memory.

What this leaves out: waiting for copies inside an operation, bundles that stall, what starts and
joins operations; a branch counts as taken, and a loop as turning once if its trips are not
constants (`Code.open_loops`). So it is no measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hlo_text

BYTES_PER_CYCLE = {"v5e": 819e9 / 1.5e9, "v6e": 1640e9 / 1.75e9}
"""Of a chip's memory (HBM). The clocks follow from the peak of the matrix units."""

BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0) ([A-Z]{2}|  )?\s*: (>*)")
FILE = re.compile(r"\d+-(.*)-\d+-final_bundles\.txt$")  # not the analyses beside


@contextlib.contextmanager
def dumped() -> Iterator[Path]:
    """A folder that libtpu writes bundles to, if it is loaded inside of this context."""
    only = "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {only}"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}"
        yield Path(folder)


@dataclasses.dataclass
class Loop:
    """Bundles of a loop, or of an operation.

    Attributes:
      bundles: outside of the loops in it.
      loops: in it.
      trips: constant trips; None if they are not constants.
      is_of_blocks: whether it walks the blocks of an operation or of a kernel's grid.
    """

    bundles: int = 0
    loops: list[Loop] = dataclasses.field(default_factory=list)
    trips: int | None = 1
    is_of_blocks: bool = False

    def cycles(self, blocks: int | None, others: int) -> int:
        """With the trips of the loop over blocks if they are known, and of innermost open loops."""
        trips = self.trips or (1 if self.loops else others)
        if self.is_of_blocks and blocks is not None:
            trips = blocks
        return trips * (self.bundles + sum(loop.cycles(blocks, others) for loop in self.loops))

    @property
    def is_open(self) -> bool:
        """Whether the trips of a loop in it are not constants."""
        return self.trips is None or any(loop.is_open for loop in self.loops)


def parse(text: str) -> Loop:
    """The loops of an operation, from its bundles."""
    stack, begun = [Loop()], dict[str, Loop]()
    for line in text.splitlines():
        bundle = BUNDLE.match(line)
        if bundle is None:
            continue
        marker, depth = bundle[1], len(bundle[2])
        if ":  {}" not in line:  # a bundle without instructions does not say how deep it is
            del stack[depth + (marker != "LB") :]
        while len(stack) <= depth:
            stack[-1].loops.append(Loop(trips=None))
            stack.append(stack[-1].loops[-1])
        if marker == "LB":
            begun |= dict.fromkeys(re.findall(r"Start region (\d+)", line), stack[-1])
        stack[-1].bundles += 1
        for predicate, region in re.findall(r"sbr\.rel \(!?%(\w+)\) target = \$region(\d+)", line):
            if region in begun:  # back to where a loop begins
                begun[region].trips, begun[region].is_of_blocks = _trips(predicate, text)
    return stack[0]


def _trips(predicate: str, text: str) -> tuple[int | None, bool]:
    """Turns of the loop that a predicate ends, and whether the loop is over blocks."""

    def defined(name: str, pattern: str) -> re.Match[str] | None:
        return re.search(rf"%{name} = {pattern}", text)

    test = defined(predicate, r"scmp\.(\w\w)\.[\w.]+ %(\w+), (\d+)( /\* loop exit test)?")
    if test is None:
        return None, False
    comparison, counter, limit, is_exit = test[1], test[2], int(test[3]), bool(test[4])
    step = defined(counter, r"sadd\.s32 (\d+), %(\w+)")
    phi = step and defined(step[2], r"sphi %(\w+), ")
    start = phi and defined(phi[1], r"smov (?:\(!?%\w+\), )?(\d+)")
    if step is None or start is None:
        return None, is_exit
    distance, by = limit - int(start[1]) + (comparison in ("gt", "le")), int(step[1])
    return max(1, -(-distance // by)), is_exit


@dataclasses.dataclass(frozen=True)
class Code:
    """Operations of one program, by name, each with its bundles; and the bandwidth of its chip."""

    operations: dict[str, Loop]
    bytes_per_cycle: float

    @classmethod
    def taken(cls, folder: Path, device: str) -> Code:
        """What is in a folder, which is empty afterwards, for the next program."""
        found: dict[str, Loop] = {}
        for path in sorted(folder.iterdir()):
            if name := FILE.match(path.name):
                found[name[1]] = parse(path.read_text(errors="replace"))
            path.unlink()
        return cls(found, BYTES_PER_CYCLE[device])

    def cycles(self, it: hlo_text.Instruction, hbm_bytes: int) -> int:
        """Of an operation that moves so many bytes."""
        code, blocks, at_once = self.operations.get(it.name), None, 0
        if found := re.search(r'"iteration_bounds":\[([^\]]*)\]', it.line):
            blocks = math.prod(int(bound) for bound in re.findall(r"\d+", found[1]))
        if found := re.search(r'"integer_config":\{"integer":"(\d+)"', it.line):
            at_once = int(found[1])  # a gather says how many entries it reads at once
        others = -(-hlo_text.count_of(it.shape) // at_once) if at_once else 1
        issued = 0 if code is None else code.cycles(blocks, others)
        return max(issued, round(hbm_bytes / self.bytes_per_cycle))

    def open_loops(self) -> list[str]:
        """Operations that have a loop whose trips are not constants."""
        return [name for name, loop in self.operations.items() if loop.is_open]
