"""Draws the picture of the README: the demo as a terminal shows it.

    python tools/draw_demo.py [PROMPT]

Runs `jax-specdec generate PROMPT --compare` in a pseudo-terminal and writes docs/demo.svg.
"""

import io
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
TITLE = "make demo"


def shown(arguments: list[str]) -> str:
    """What a command writes to standard output, if that is a terminal."""
    command = shutil.which("jax-specdec", path=str(Path(sys.executable).parent))
    assert command is not None, "jax-specdec is not installed beside this Python"
    ours, terminal = pty.openpty()
    size = {"COLUMNS": str(WIDTH), "LINES": "50", "TERM": "xterm-256color"}
    null = subprocess.DEVNULL  # for what moves
    child = subprocess.Popen(
        [command, *arguments], stdin=null, stdout=terminal, stderr=null, env=os.environ | size
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


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def quicksort(items):"
    text = Text.from_ansi(shown(["generate", "--compare", "--max-new-tokens=200", "--", prompt]))
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(text)
    console.save_svg(str(PICTURE), title=TITLE)


if __name__ == "__main__":
    main()
