"""Draws the picture of docs/serving.md: one step of decoding, for four slots.

    python tools/draw_step.py

Writes docs/step.svg.
"""

from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parents[1] / "docs" / "step.svg"
WIDTH, HEIGHT = 940, 372
CELL, GAP = 24, 4
LEFT, TOP, ROW = 118, 92, 46
PANELS = (LEFT, LEFT + 278, LEFT + 570)  # where draft, verify and append begin

GRAY, BLUE, GREEN, RED, ORANGE, PURPLE = (
    "#d0d7de", "#9ecbff", "#7ccf8f", "#f5a3a3", "#ffc680", "#cdb4f6",
)  # fmt: skip
LEGEND = (
    (GRAY, "sequence"),
    (BLUE, "draft"),
    (GREEN, "accepted"),
    (RED, "rejected"),
    (ORANGE, "recovered"),
    (PURPLE, "bonus, or a token without drafts"),
)

SLOTS = (  # name; the sequence; drafts; how many of them are accepted; the last token
    ("slot 0", "the cat", (" ", "s", "a", "t"), 2, ("l", ORANGE)),
    ("slot 1", "1 2 3 4", (" ", "5", " ", "6"), 4, (" ", PURPLE)),
    ("slot 2, new", "import ", (), 0, ("o", PURPLE)),
    ("slot 3, empty", "", (), 0, None),
)
HEADINGS = (
    ("draft", "K tokens per request"),
    ("verify", "one pass of the target, K + 1 rows"),
    ("append", "what was emitted, until it ends"),
)
TRAFFIC = (
    ("drafter.propose(context)", "writes drafts and their q"),
    ("process_logits, rejection_sample", "under each request's options"),
    ("token_ids, lengths, done, counters", "the drafts are gone"),
)


class Drawing:
    """Shapes, as lines of SVG."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def text(self, x: float, y: float, text: str, size: int = 13, **style: str) -> None:
        """Text whose baseline begins at a point."""
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{given}>{escape(text)}</text>'
        )

    def cell(self, x: float, y: float, letter: str, color: str) -> None:
        """A token."""
        self.lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="4" fill="{color}"/>'
        )
        shown = "\N{OPEN BOX}" if letter == " " else letter
        mono = {"font_family": "monospace", "text_anchor": "middle"}
        self.text(x + CELL / 2, y + 17, shown, 14, **mono)

    def cells(self, x: float, y: float, letters: str | tuple[str, ...], color: str) -> float:
        """Tokens in a row; where the next begins."""
        for letter in letters:
            self.cell(x, y, letter, color)
            x += CELL + GAP
        return x

    def arrow(self, x: float, y: float) -> None:
        """To the right."""
        style = 'fill="none" stroke="#57606a" stroke-width="1.5"'
        self.lines.append(f'<path d="M{x:g} {y:g}h16m-5 -5l5 5l-5 5" {style}/>')


def draw() -> str:
    """The picture."""
    drawing = Drawing()
    for x, (name, what) in zip(PANELS, HEADINGS, strict=True):
        drawing.text(x, 34, name, 17, font_weight="bold")
        drawing.text(x, 54, what, fill="#57606a")
    for x in PANELS[1:]:
        drawing.arrow(x - 26, 30)
    for slot, (name, sequence, drafts, accepted, last) in enumerate(SLOTS):
        y = TOP + slot * ROW - 14
        drawing.text(14, y + 17, name, fill="#57606a")
        ending = sequence[-3:]
        x = drawing.cells(PANELS[0], y, ending, GRAY)
        drawing.cells(x, y, drafts, BLUE)
        x = PANELS[1]
        x = drawing.cells(x, y, drafts[:accepted], GREEN)
        if last is not None:
            x = drawing.cells(x, y, drafts[accepted : accepted + 1], RED)
            drawing.cells(x, y, *last)
            x = drawing.cells(PANELS[2], y, ending, GRAY)
            x = drawing.cells(x, y, drafts[:accepted], GRAY)
            drawing.cells(x, y, last[0], GRAY)
        else:
            drawing.text(PANELS[1], y + 17, "takes part, emits nothing", fill="#57606a")
    y = TOP + len(SLOTS) * ROW + 4
    for x, lines in zip(PANELS, TRAFFIC, strict=True):
        for i, line in enumerate(lines):
            drawing.text(x, y + 18 * i, line, fill="#57606a")
    x = 14.0
    for color, name in LEGEND:
        drawing.lines.append(
            f'<rect x="{x:g}" y="{HEIGHT - 42}" width="14" height="14" rx="3" fill="{color}"/>'
        )
        drawing.text(x + 20, HEIGHT - 30, name)
        x += 48 + 7 * len(name)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" fill="#24292f">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, background, *drawing.lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
