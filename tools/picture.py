"""Pictures of the documentation, as SVG that is readable on light and dark pages.

Each has a background of its own, and its colours follow the reader's scheme.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 860

# Fill and line of each kind of thing, on a light and on a dark page.
COLOURS = {
    "page": (("#ffffff", "#d0d7de"), ("#0d1117", "#3d444d")),
    "plain": (("#f6f8fa", "#8c959f"), ("#1b222b", "#7d8590")),
    "blue": (("#ddf4ff", "#0969da"), ("#11305c", "#4493f8")),
    "green": (("#dafbe1", "#1a7f37"), ("#133a20", "#3fb950")),
    "orange": (("#fff1e5", "#bc4c00"), ("#47280f", "#e0823d")),
    "purple": (("#fbefff", "#8250df"), ("#33235a", "#ab7df8")),
    "red": (("#ffebe9", "#cf222e"), ("#5a1e1f", "#f47067")),
}
INK = ("#1f2328", "#e6edf3")
SOFT = ("#59636e", "#9198a1")


def style() -> str:
    """The colours, of both schemes."""
    rules: list[list[str]] = [[], []]
    for i, of_scheme in enumerate(rules):
        for name, schemes in COLOURS.items():
            fill, line = schemes[i]
            of_scheme.append(f".{name}{{fill:{fill};stroke:{line}}}")
            of_scheme.append(f".{name}-line{{fill:none;stroke:{line}}}")
            of_scheme.append(f".{name}-ink{{fill:{line}}}")
        of_scheme.append(f".ink{{fill:{INK[i]}}} .soft{{fill:{SOFT[i]}}}")
    light, dark = ("\n".join(of_scheme) for of_scheme in rules)
    font = "text{font-family:-apple-system,'Segoe UI','DejaVu Sans',Helvetica,Arial,sans-serif}"
    return f"{font}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


class Picture:
    """Shapes, from top to bottom of what lies on what."""

    def __init__(self, name: str, height: int, title: str):
        self.name, self.height, self.title = name, height, title
        self.shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str, label: str = "") -> None:
        """A rectangle, with a label in its middle."""
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        self.shapes.append(f'<rect class="{kind}" {place} rx="3"/>')
        if label:
            self.text(x + w / 2, y + h / 2 + 4, label, anchor="middle", size=11.5)

    def text(
        self,
        x: float,
        y: float,
        label: str,
        *,
        kind: str = "ink",
        anchor: str = "start",
        size: float = 13,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}"'
        self.shapes.append(f'<text class="{kind}" {place}{weight}>{escape(label)}</text>')

    def note(self, x: float, y: float, *lines: str) -> None:
        """Small lines of text, one below another."""
        for i, line in enumerate(lines):
            self.text(x, y + 18 * i, line, kind="soft", size=12)

    def line(self, points: list[tuple[float, float]], kind: str, *, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        shape = f'<polyline class="{kind}-line" points="{path}" stroke-width="1.3"{dashes}/>'
        self.shapes.append(shape)

    def arrow(self, points: list[tuple[float, float]], kind: str) -> None:
        """A line with a head at its end."""
        self.line(points, kind)
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = 7 * (x - x0) / length, 7 * (y - y0) / length
        head = [(x, y), (x - dx - dy / 2, y - dy + dx / 2), (x - dx + dy / 2, y - dy - dx / 2)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in head)
        self.shapes.append(f'<polygon class="{kind}-ink" points="{path}"/>')

    def save(self, folder: Path) -> None:
        """Write it to a file of its name."""
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        page = f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" '
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>\n{style()}\n</style>",
            f'{page}rx="8"/>',
            *self.shapes,
            "</svg>\n",
        ]
        (folder / f"{self.name}.svg").write_text("\n".join(lines), "utf-8")
