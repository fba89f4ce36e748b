"""Draws the pictures of docs/kernel.md.

    python tools/draw_kernel.py

Writes docs/kernel_*.svg.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from picture import Picture

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PHASES = ROOT / "benchmarks" / "results" / "verify_gpu_phases.json"


def layout() -> None:
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


def walk() -> None:
    """One request in time, as measured."""
    p = Picture("kernel_walk", 334, "The walk of one request in time")
    p.text(24, 32, "One request: two draft tokens accepted, the third rejected", bold=True)
    p.note(24, 50, "microseconds from the start of its blocks; B = 8, one row read at a time, H200")
    left, scale = 116, 101.0
    steps = phases()

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
        "A row is copied once the draft token before it is accepted. An exchange has passed, so no",
        "warp still reads the row that it replaces. The row of the rejected token stays: the last",
        "token is drawn from it.",
    )
    p.save(DOCS)


def phases() -> dict[str, float]:
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


def exchange() -> None:
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


def draw() -> None:
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


def main() -> None:
    for picture in (layout, walk, exchange, draw):
        picture()


if __name__ == "__main__":
    main()
