"""Draws the pictures of docs/architecture.md.

    python tools/draw_architecture.py

Writes docs/phases.svg and docs/imports.svg. What imports what is read from the source.
"""

from __future__ import annotations

import functools
from pathlib import Path

from imports import imports_by_module, unit_of
from picture import WIDTH, Picture

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "jax_specdec"

PURPOSES = {  # of each unit: what stands below its name
    "jax_specdec": "the public names",
    "cli": "generate, bench, serve",
    "integrations": "other stacks' layouts",
    "serving": "the step and its loops",
    "drafting": "drafters and their q",
    "models": "Llama, checkpoints, text",
    "logprobs": "of emitted tokens",
    "processors": "biases, bad words",
    "penalties": "by earlier tokens",
    "verify": "XLA and the kernel",
    "reference": "the oracle, in NumPy",
    "grammar": "masks from matchers",
    "noise": "uniforms from keys",
    "ragged": "flat layouts",
    "sampling": "a table of parameters",
    "blocks": "rows a few at a time",
    "platform": "one form is traced",
    "types": "drafts, noise, output",
    "arrays": "declared, and checked",
    "config": "static settings",
}
KINDS = {"verify": "green", "reference": "orange", "drafting": "blue", "serving": "purple"}


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
    p.note(columns[0], 324, "max, sum of exp, argmax,", "and the draft token's entry")

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
    p.note(columns[1], 342, "u q(x) < p(x), or the greedy, block", "or synthetic rule")

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
        "another one an id in it",
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
    """What each file or folder of the package imports of the others; the oracle's count as one."""

    def name(module: str) -> str:
        unit = unit_of(module)
        return "reference" if unit.startswith("reference") else unit or "jax_specdec"

    found: dict[str, set[str]] = {unit: set() for unit in PURPOSES}
    for module, targets in imports_by_module(package).items():
        if name(module) in PURPOSES:
            found[name(module)] |= {name(target) for target in targets}
    return {unit: (of_unit & set(PURPOSES)) - {unit} for unit, of_unit in found.items()}


def imports() -> None:
    """The units by levels: each above everything that it imports."""
    imported = units(PACKAGE)

    @functools.cache
    def level(unit: str) -> int:
        return 1 + max((level(below) for below in imported[unit]), default=-1)

    @functools.cache
    def reached(unit: str) -> frozenset[str]:
        return frozenset(imported[unit]).union(*(reached(below) for below in imported[unit]))

    levels: list[list[str]] = [[] for _ in range(1 + max(map(level, imported)))]
    for unit in PURPOSES:  # in this order from left to right
        levels[level(unit)].append(unit)
    height, width, box = 82, 152, 46
    p = Picture("imports", 92 + height * len(levels), "What imports what")
    p.text(24, 34, "What imports what", size=17, bold=True)
    p.note(24, 54, "lines lead down to imported modules; indirect imports are left out")
    place = {}
    for i, row in enumerate(reversed(levels)):
        gap = (WIDTH - 48 - width * len(row)) / len(row)
        for j, unit in enumerate(row):
            place[unit] = (24 + gap / 2 + (width + gap) * j, 82 + height * i)
    for unit, below in imported.items():
        direct = [other for other in below if not any(other in reached(o) for o in below)]
        x, y = place[unit]
        for other in sorted(direct):
            to_x, to_y = place[other]
            p.line([(x + width / 2, y + box), (to_x + width / 2, to_y)], KINDS.get(unit, "plain"))
    for unit, (x, y) in place.items():
        p.box(x, y, width, box, KINDS.get(unit, "plain"))
        p.text(x + width / 2, y + 20, unit, anchor="middle", bold=True)
        p.text(x + width / 2, y + 37, PURPOSES[unit], kind="soft", anchor="middle", size=11.5)
    p.save(DOCS)


def main() -> None:
    for picture in (phases, imports):
        picture()


if __name__ == "__main__":
    main()
