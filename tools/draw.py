"""Draws the pictures of the documents, from the source and from what was measured.

    python tools/draw.py [NAME...]

Writes docs/NAME.svg: all of them, but for the README's demo, which decodes and is drawn if named.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from imports import imports_by_module, unit_of
from picture import WIDTH, Picture
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

# The architecture: docs/architecture.md

PACKAGE = ROOT / "jax_specdec"

UPPER = {  # of each unit of the upper floor: what stands below its name
    "cli": "generate, bench, serve",
    "server": "OpenAI's API",
    "loading": "what --target names",
    "drafters": "what --draft names",
    "lm": "the public names",
    "decoding": "the step and its loops",
    "drafting": "what proposes tokens",
    "text": "tokenizers, templates",
    "formats": "files of models",
    "models": "Llama, heads",
}
LOWER = {  # and of the lower floor
    "jax_specdec": "the public names",
    "adapters": "other stacks' layouts",
    "_src.testing": "the oracle, in NumPy",
    "_src.stats": "tokens kept, counters",
    "_src.attention": "over a cache",
    "_src.drafts": "draft distributions",
    "_src.logits": "processors, logprobs",
    "_src.verify": "XLA and the kernel",
    "_src.mosaic": "how to write a kernel",
    "_src.rows": "read on a device",
    "_src.base": "arrays, types, noise",
}
DOORS = ("", "grammar", "testing")  # files of public names alone: one box
PURPOSES = UPPER | LOWER
FLOORS = (
    ("jax_specdec.lm", "drafters, decoding loops, models, a server: needs the extra lm", UPPER),
    ("jax_specdec", "the verifier: needs JAX and NumPy", LOWER),
)
KINDS = {"_src.verify": "green", "_src.testing": "orange", "drafting": "blue", "decoding": "purple"}


def phases() -> None:
    """What a call does: read, count, draw."""
    p = Picture("phases", 452, "The three phases of a call, for two requests")
    kinds, columns = ("blue", "green"), (24, 320, 596)
    headings = (
        ("1  Read", "over rows, in place"),
        ("2  Count", "over requests: a few numbers each"),
        ("3  Draw", "over requests: one row each"),
    )
    for x, (name, what) in zip(columns, headings, strict=True):
        p.text(x, 36, name, size=17, bold=True)
        p.note(x, 56, what)

    # Request a has three drafts and four rows, request b has one draft and two rows.
    rows = [
        ("a", 0, "x1"),
        ("a", 1, "x2"),
        ("a", 2, "x3"),
        ("a", 3, ""),
        ("b", 0, "y1"),
        ("b", 1, ""),
    ]
    place = {}
    for i, (request, row, draft) in enumerate(rows):
        y = 78 + 32 * i + (14 if request == "b" else 0)
        place[request, row] = y + 12
        kind = kinds[request == "b"]
        p.note(columns[0], y + 16, f"{request}{row}")
        for tile in range(6):
            p.box(columns[0] + 26 + 25 * tile, y, 25, 24, kind)
        p.note(columns[0] + 184, y + 16, f"checks {draft}" if draft else "bonus")
    p.note(columns[0], 306, "target_logits, in tiles of 2048 ids")
    p.note(columns[0], 324, "max, sum of exp, argmax,", "and the draft's entry")

    for i, request in enumerate("ab"):
        p.box(columns[1], 92 + 124 * i, 206, 92, "page")
        p.text(columns[1] + 12, 114 + 124 * i, f"request {request}", bold=True)
    marks = {
        "a": [("x1", "accepted", "green"), ("x2", "accepted", "green"), ("x3", "rejected", "red")],
        "b": [("y1", "accepted", "green"), ("", "bonus", "purple")],
    }
    for request, steps in marks.items():
        y = 124 + 124 * (request == "b")
        for j, (draft, result, kind) in enumerate(steps):
            p.box(columns[1] + 12 + 62 * j, y, 56, 26, kind, draft or "\N{BULLET}")
            p.note(columns[1] + 12 + 62 * j, y + 44, result)
    p.note(columns[1], 342, "u q(x) < p(x), or the greedy, block,", "agreement or synthetic rule")

    for request, y, label, kind in (
        ("a", 92, "recovered from (p - q)+ of row a2", "orange"),
        ("b", 216, "bonus from p of row b1", "purple"),
    ):
        masses = (6, 16, 9, 34, 20, 12) if request == "a" else (10, 7, 30, 12, 18, 5)
        best = 3 if request == "a" else 2
        for tile, mass in enumerate(masses):
            chosen = kind if tile == best else "plain"
            p.box(columns[2] + 30 * tile, y + 40 - mass, 25, mass + 4, chosen)
        p.note(columns[2], y + 64, label)
    p.note(
        columns[2],
        324,
        "one uniform picks a tile by its mass,",
        "another one an id in it;",
        "agreement: a race in every row",
    )

    for x, y, label in ((282, 209, "positions"), (544, 209, "position")):
        p.arrow([(x - 8, y), (x + 28, y)], "plain")
        p.text(x + 10, y - 8, label, kind="soft", size=12, anchor="middle")

    p.line([(24, 376), (WIDTH - 24, 376)], "page")
    p.text(24, 400, "A split vocabulary", bold=True)
    p.note(
        190,
        400,
        "each device has a part of every row; there is an exchange after phase 1 (statistics),",
        "within phase 3 (masses of tiles) and at its end (the token). No row leaves its device.",
    )
    p.save(DOCS)


def units(package: Path) -> dict[str, set[str]]:
    """What each room, file or folder of the package imports of the others."""

    def name(module: str) -> str:
        unit = unit_of(module)
        return "jax_specdec" if unit in DOORS else unit

    found: dict[str, set[str]] = {unit: set() for unit in PURPOSES}
    for module, targets in imports_by_module(package).items():
        if name(module) in PURPOSES:
            found[name(module)] |= {name(target) for target in targets}
    return {unit: (of_unit & set(PURPOSES)) - {unit} for unit, of_unit in found.items()}


def imports() -> None:
    """The units of each floor by levels: each above everything that it imports."""
    imported = units(PACKAGE)

    @functools.cache
    def level(unit: str) -> int:
        floor = UPPER if unit in UPPER else LOWER
        return 1 + max((level(below) for below in imported[unit] if below in floor), default=-1)

    @functools.cache
    def reached(unit: str) -> frozenset[str]:
        return frozenset(imported[unit]).union(*(reached(below) for below in imported[unit]))

    height, width, box, heading = 82, 152, 46, 40
    place = {}
    y = 76
    tops = []
    for _, _, floor in FLOORS:
        tops.append(y)
        y += heading
        for of_level in range(max(map(level, floor)), -1, -1):
            row = [unit for unit in floor if level(unit) == of_level]
            gap = (WIDTH - 48 - width * len(row)) / len(row)
            for j, unit in enumerate(row):
                place[unit] = (24 + gap / 2 + (width + gap) * j, y)
            y += height
    p = Picture("imports", y, "What imports what")
    p.text(24, 34, "What imports what", size=17, bold=True)
    p.note(24, 54, "lines lead down to imported modules; indirect imports are left out")
    for top, (name, what, _) in zip(tops, FLOORS, strict=True):
        p.line([(24, top), (WIDTH - 24, top)], "plain", dashed=True)
        p.text(24, top + 22, name, bold=True)
        p.note(170, top + 22, what)
    for unit, below in imported.items():
        direct = [other for other in below if not any(other in reached(o) for o in below)]
        x, y = place[unit]
        for other in sorted(direct):
            to_x, to_y = place[other]
            p.line([(x + width / 2, y + box), (to_x + width / 2, to_y)], KINDS.get(unit, "plain"))
    for unit, (x, y) in place.items():
        p.box(x, y, width, box, KINDS.get(unit, "plain"))
        p.text(x + width / 2, y + 20, unit.removeprefix("_src."), anchor="middle", bold=True)
        p.text(x + width / 2, y + 37, PURPOSES[unit], kind="soft", anchor="middle", size=11.5)
    p.save(DOCS)


# A step: docs/serving.md

CELL, GAP = 24, 4
TOP, ROW = 92, 46
PANELS = (108, 340, 590)  # where draft, verify and append begin

LEGEND = (
    ("plain", "sequence"),
    ("blue", "draft"),
    ("green", "accepted"),
    ("red", "rejected"),
    ("orange", "recovered"),
    ("purple", "bonus, or no drafts"),
)

SLOTS = (  # name; the sequence; drafts; how many of them are accepted; the last token
    ("slot 0", "the cat", (" ", "s", "a", "t"), 2, ("l", "orange")),
    ("slot 1", "1 2 3 4", (" ", "5", " ", "6"), 4, (" ", "purple")),
    ("slot 2, new", "import ", (), 0, ("o", "purple")),
    ("slot 3, empty", "", (), 0, None),
)
HEADINGS = (
    ("draft", "K tokens per request"),
    ("verify", "one target pass, K + 1 rows"),
    ("append", "emitted tokens, until the end"),
)
TRAFFIC = (
    ("drafter.propose(context)", "writes drafts and their q"),
    ("process_logits, rejection_sample", "under each request's options"),
    ("token_ids, lengths, done, counters", "drafts are dropped"),
)


def cells(p: Picture, x: float, y: float, letters: str | tuple[str, ...], kind: str) -> float:
    """Tokens in a row; where the next begins."""
    for letter in letters:
        p.box(x, y, CELL, CELL, kind, "\N{OPEN BOX}" if letter == " " else letter)
        x += CELL + GAP
    return x


def step() -> None:
    """One step of decoding, for four slots."""
    p = Picture("step", 372, "One step: draft, verify, append")
    for x, (name, what) in zip(PANELS, HEADINGS, strict=True):
        p.text(x, 34, name, size=17, bold=True)
        p.note(x, 54, what)
    for x in PANELS[1:]:
        p.arrow([(x - 30, 29), (x - 12, 29)], "plain")
    for slot, (name, sequence, drafts, accepted, last) in enumerate(SLOTS):
        y = TOP + slot * ROW - 14
        p.note(18, y + 17, name)
        ending = sequence[-3:]
        x = cells(p, PANELS[0], y, ending, "plain")
        cells(p, x, y, drafts, "blue")
        if last is None:
            p.note(PANELS[1], y + 17, "takes part, emits nothing")
            continue
        x = cells(p, PANELS[1], y, drafts[:accepted], "green")
        x = cells(p, x, y, drafts[accepted : accepted + 1], "red")
        cells(p, x, y, *last)
        cells(p, PANELS[2], y, (*ending, *drafts[:accepted], last[0]), "plain")
    for x, lines in zip(PANELS, TRAFFIC, strict=True):
        p.note(x, TOP + len(SLOTS) * ROW + 4, *lines)
    x = 18.0
    for kind, name in LEGEND:
        p.box(x, 330, 14, 14, kind)
        p.text(x + 20, 342, name, size=12)
        x += 46 + 6.6 * len(name)
    p.save(DOCS)


# The kernel: docs/kernel.md

PHASES = ROOT / "benchmarks" / "results" / "verify_gpu_phases.json"


def kernel_layout() -> None:
    """Requests over clusters, a row over CTAs and tiles."""
    p = Picture("kernel_layout", 476, "A cluster for each request, a slice of the row for each CTA")
    p.text(24, 32, "target_logits", bold=True)
    p.note(24, 50, "K + 1 rows for each request")
    kinds = ("blue", "green", "purple")
    for b, kind in enumerate(kinds):
        top = 66 + 62 * b
        for row in range(5):
            p.box(24, top + 10 * row, 196, 8, kind)
        p.arrow([(226, top + 24), (272, top + 24)], kind)
        p.text(280, top + 13, f"request {b}: one cluster", kind="soft", size=12)
        for block in range(8):
            p.box(280 + 45 * block, top + 20, 41, 26, kind, f"CTA {block}" if b == 0 else "")
    p.note(
        660, 84, "2 to 16 CTAs, a power of two:", "many for few requests,", "few for many requests"
    )

    p.text(24, 278, "One row, V = 128256", bold=True)
    p.note(190, 278, "63 tiles of 2048 ids; CTA i holds tiles 8 i to 8 i + 7")
    for tile in range(63):
        p.box(24 + 12.7 * tile, 288, 11, 22, "blue" if tile // 8 == 2 else "plain")
    left, right = 24 + 12.7 * 16, 24 + 12.7 * 24 - 1.7
    p.line([(left, 312), (24, 338)], "blue", dashed=True)
    p.line([(right, 312), (836, 338)], "blue", dashed=True)
    p.box(24, 338, 812, 118, "page")
    p.text(36, 358, "CTA 2", bold=True)
    p.note(90, 358, "4 warps = 128 threads; all warps read a part of every tile")
    for tile in range(8):
        p.box(36 + 50 * tile, 368, 46, 30, "blue", f"{16 + tile}")
    p.note(
        36,
        416,
        "shared memory: its slice of the target row,",
        "copied tile by tile, an mbarrier for each (32 KB)",
    )
    p.box(456, 368, 78, 30, "orange", "slot 0")
    p.box(540, 368, 78, 30, "orange", "slot 1")
    p.note(456, 416, "values sent by the warps", "of all CTAs (1 to 2 KB)")
    for i in range(4):
        p.box(648 + 45 * i, 368, 41, 30, "green", f"warp {i}")
    p.note(648, 416, "lane i of every warp", "handles position i")
    p.save(DOCS)


def kernel_walk() -> None:
    """One request in time, as measured."""
    p = Picture("kernel_walk", 334, "The walk of one request in time")
    p.text(24, 32, "One request: two drafts accepted, the third rejected", bold=True)
    p.note(24, 50, "microseconds from the start of its blocks; B = 8, one row read at a time, H200")
    left, scale = 116, 101.0
    steps = measured_phases()

    def at(us: float) -> float:
        return left + scale * us

    for tick in range(8):
        p.line([(at(tick), 78), (at(tick), 236)], "page")
        p.text(at(tick), 74, str(tick), kind="soft", anchor="middle", size=11)
    for y, label in ((101, "threads"), (155, "copies"), (209, "exchange")):
        p.text(24, y, label)

    now = 0.0

    def step(name: str, kind: str, label: str, *, exchange: bool = False) -> None:
        """A box as wide as the step is long."""
        nonlocal now
        wide = scale * steps[name]
        if exchange:
            p.box(at(now), 190, wide - 2, 30, kind)
            middle = at(now) + wide / 2
            p.line([(middle, 190), (middle, 112)], kind, dashed=True)
        else:
            p.box(at(now), 82, wide - 2, 30, kind, label)
        now += steps[name]

    step("start", "plain", "start")
    copied = now - 0.3
    for row in range(3):
        kind = ("blue", "green", "purple")[row]
        step(f"waiting {row}", "page", "wait" if row else "")
        p.box(at(copied), 136, at(now + 0.4) - at(copied), 30, kind, f"row {row}")
        step(f"reading {row}", kind, f"row {row}")
        step(f"exchange {row}", "orange", "", exchange=True)
        copied = now + 0.1
        if row < 2:
            p.arrow([(at(now) + 1, 190), (at(copied) - 1, 168)], kind)
    p.box(at(now + 0.1), 136, scale * 1.0, 30, "plain", "draft row to L2")
    step("decision", "page", "decide")
    step("residual", "purple", "masses of p - q")
    step("masses", "orange", "", exchange=True)
    step("draw", "green", "draw")
    p.note(
        24,
        262,
        "wait: for the first tile of the row; the decision about the row before is part of it.",
        "A row is copied once the draft before it is accepted. An exchange has passed, so no",
        "warp still reads the row that it replaces. The row of the rejected token stays: the last",
        "token is drawn from it.",
    )
    p.save(DOCS)


def measured_phases() -> dict[str, float]:
    """Medians of requests with two accepted drafts, by step, in microseconds."""
    cases = json.loads(PHASES.read_text())["cases"]
    (case,) = (x for x in cases if x["batch"] == 8)
    found = case["by_accepted"]["2"]
    steps = {"start": found["small loads, copies begun"] + found["noise"]}
    for row in range(3):
        of_row = found[f"row {row}"]
        steps[f"waiting {row}"], steps[f"reading {row}"] = of_row["waiting"], of_row["reading"]
        steps[f"exchange {row}"] = of_row["mail"]
    steps |= {name: found[name] for name in ("decision", "residual")}
    steps["masses"] = found["masses told"]
    return steps | {"draw": found["life"] - sum(steps.values())}


def kernel_exchange() -> None:
    """The exchange between two CTAs, and its rounds."""
    p = Picture("kernel_exchange", 372, "How warps exchange values, and how slots are used again")
    p.text(24, 32, "One exchange, two CTAs", bold=True)
    p.note(24, 50, "every warp stores its values into every CTA, its own included (DSMEM)")
    for block, left in enumerate((24, 296)):
        p.box(left, 66, 240, 198, "page")
        p.text(left + 12, 88, f"CTA {block}", bold=True)
        for warp in range(4):
            kind = "blue" if block == 0 else "green"
            p.box(left + 12 + 55 * warp, 98, 50, 24, kind, f"warp {warp}")
        for place in range(8):
            kind = "blue" if place < 4 else "green"
            p.box(left + 12 + 27 * place, 186, 24, 24, kind, str(place % 4))
        p.note(left + 12, 178, "slot")
        p.box(left + 12, 222, 216, 28, "orange", "mbarrier: 1 arrival + 8 values")
    for source, warp, kind in ((0, 3, "blue"), (1, 0, "green")):
        x = (24 if source == 0 else 296) + 12 + 55 * warp + 25
        for target in (0, 1):
            place = warp + 4 * source
            to = (24 if target == 0 else 296) + 12 + 27 * place + 12
            p.arrow([(x, 122), (to, 184)], kind)
    p.note(
        24,
        290,
        "A store carries its own completion to the receiver's mbarrier: no fence.",
        "All threads wait for the phase, then read all values, lane i those of warp i.",
    )
    p.note(
        24,
        334,
        "A warp that has all values of round r + 1 knows that every warp has sent in r + 1,",
        "and so has read round r. Its slot may be reused in round r + 2.",
    )

    p.text(572, 32, "Rounds", bold=True)
    p.note(572, 50, "slot = r mod 2, parity = r div 2 mod 2")
    for x, label in ((588, "round"), (652, "slot"), (708, "parity"), (780, "slot 0 / 1")):
        p.text(x, 82, label, kind="soft", size=12, anchor="middle")
    for r in range(6):
        y = 106 + 28 * r
        for x, value in ((588, r), (652, r % 2), (708, r // 2 % 2)):
            p.text(x, y, str(value), anchor="middle")
        for slot in range(2):
            kind = ("blue", "purple")[r // 2 % 2] if slot == r % 2 else "plain"
            p.box(746 + 36 * slot, y - 15, 32, 20, kind, f"{r}" if slot == r % 2 else "")
    p.note(
        572,
        286,
        "An mbarrier completes one phase",
        "in each round of its slot; the",
        "parity says which of two phases",
        "a wait is for.",
    )
    p.save(DOCS)


def kernel_draw() -> None:
    """The two-level inverse CDF."""
    p = Picture("kernel_draw", 366, "The two-level inverse CDF")
    masses = [0.03, 0.10, 0.06, 0.28, 0.16, 0.0, 0.22, 0.15]
    sums = list(itertools.accumulate(masses))
    p.text(24, 32, "First uniform: which tile", bold=True)
    p.note(24, 50, "masses of all tiles, known to every warp after one exchange")
    u = 0.36
    for i, mass in enumerate(masses):
        x, kind = 24 + 44 * i, "blue" if i == 3 else "plain"
        p.box(x, 190 - 400 * mass, 36, 400 * mass + 0.5, kind)
        p.text(x + 18, 208, str(i), anchor="middle", kind="soft", size=12)
    p.note(24, 226, "tile")
    left, width = 24, 348
    p.note(24, 252, "inclusive sums")
    for i, total in enumerate(sums):
        begin = total - masses[i]
        if masses[i]:
            p.box(left + width * begin, 262, width * masses[i], 24, "blue" if i == 3 else "plain")
    x = left + width * u
    p.arrow([(x, 314), (x, 288)], "orange")
    p.text(x, 330, "u0 · total", anchor="middle", size=12)
    p.note(24, 352, "the first tile whose inclusive sum exceeds it")

    p.arrow([(386, 170), (436, 170)], "blue")
    p.text(450, 32, "Second uniform: which id in the tile", bold=True)
    p.note(
        450,
        50,
        "weights computed again from the row in shared memory,",
        "by the one CTA that holds the tile",
    )
    weights = [0.02, 0.05, 0.01, 0.22, 0.08, 0.03, 0.30, 0.04, 0.09, 0.02, 0.12, 0.02]
    sums = list(itertools.accumulate(weights))
    v = 0.53
    for i, weight in enumerate(weights):
        p.box(
            450 + 32 * i, 190 - 330 * weight, 26, 330 * weight + 0.5, "green" if i == 6 else "plain"
        )
    p.note(450, 208, "ids of tile 3")
    p.note(450, 252, "inclusive sums")
    left, width = 450, 380
    for i, total in enumerate(sums):
        begin = total - weights[i]
        p.box(left + width * begin, 262, width * weights[i], 24, "green" if i == 6 else "plain")
    x = left + width * v
    p.arrow([(x, 314), (x, 288)], "orange")
    p.text(x, 330, "u1 · mass of the tile", anchor="middle", size=12)
    p.note(450, 352, "in three steps: a warp's part, a thread of it, one of the thread's ids")
    p.save(DOCS)


# The demo: README.md

COLUMNS = 100
TITLE = "make demo"


def shown(arguments: list[str]) -> str:
    """What `jax-specdec` writes to standard output, if that is a terminal."""
    command = [sys.executable, "-m", "jax_specdec", *arguments]
    ours, terminal = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    null = subprocess.DEVNULL  # for what moves
    child = subprocess.Popen(
        command, stdin=null, stdout=terminal, stderr=null, env=os.environ | size
    )
    os.close(terminal)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 2**16)
        except OSError:  # the terminal is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    assert child.wait() == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


def demo() -> None:
    """What `make demo` prints, as a terminal shows it."""
    text = Text.from_ansi(shown(["generate", "--compare", "--", "def quicksort(items):"]))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(text)
    console.save_svg(str(DOCS / "demo.svg"), title=TITLE, unique_id="demo")


PICTURES = (
    phases,
    imports,
    step,
    kernel_layout,
    kernel_walk,
    kernel_exchange,
    kernel_draw,
)


def main(names: Sequence[str] = ()) -> None:
    """Draws those that are named, or all but the demo."""
    drawn = {picture.__name__: picture for picture in (*PICTURES, demo)}
    for picture in [drawn[name] for name in names] or PICTURES:
        picture()


if __name__ == "__main__":
    main(sys.argv[1:])
