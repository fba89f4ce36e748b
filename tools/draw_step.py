"""Draws the picture of docs/engine.md: one step of decoding, for four slots.

    python tools/draw_step.py

Writes docs/step.svg.
"""

from pathlib import Path

from picture import Picture

DOCS = Path(__file__).parents[1] / "docs"
CELL, GAP = 24, 4
TOP, ROW = 92, 46
PANELS = (108, 340, 590)  # where draft, verify and append begin

LEGEND = (
    ("plain", "sequence"),
    ("blue", "draft"),
    ("green", "accepted"),
    ("red", "rejected"),
    ("orange", "recovered"),
    ("purple", "bonus, or no draft tokens"),
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
    ("drafter.propose(context)", "writes draft tokens and their q"),
    ("process_logits, rejection_sample", "under each request's options"),
    ("token_ids, lengths, done, counters", "draft tokens are dropped"),
)


def cells(p: Picture, x: float, y: float, letters: str | tuple[str, ...], kind: str) -> float:
    """Tokens in a row; where the next begins."""
    for letter in letters:
        p.box(x, y, CELL, CELL, kind, "\N{OPEN BOX}" if letter == " " else letter)
        x += CELL + GAP
    return x


def main() -> None:
    """The picture."""
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


if __name__ == "__main__":
    main()
