"""What a user sees: text on standard output, progress on standard error; plain where piped.

Results go to standard output alone, so that they can be piped into a file or another program. Text
of a model may hold anything, also what a terminal takes for a command: it is escaped where a
terminal shows it, and written as it is anywhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

# `rich` comes with an extra. What an installation without it shows has no style.
with contextlib.suppress(ModuleNotFoundError):
    from rich.color import ColorSystem
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.rule import Rule
    from rich.style import Style

# All control characters but tab (9) and newline (10): C0, DEL and C1.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_BIDIRECTIONAL = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS}
_ESCAPES |= {code: f"\\u{code:04x}" for code in _BIDIRECTIONAL}


def printable(text: str) -> str:
    """Returns text that a terminal shows as it is, with escapes for what would command it.

    Those are control characters other than newline and tab, and those that change the direction of
    the text around them.
    """
    return text.translate(_ESCAPES)


def prepare_streams() -> None:
    """Lets standard streams take every character, escaped where their encoding lacks it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def write(text: str, style: str | None = None, *, stream: TextIO | None = None) -> None:
    """Writes text at once, in colour where that can be seen and is wanted.

    Args:
      text: a terminal gets escapes for its control characters, and any other stream the text.
      style: as `rich` names it.
      stream: None for standard output.
    """
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        text = printable(text)
    if style is not None and _console(stream).color_system is not None:
        text = Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
    stream.write(text)
    stream.flush()


def log(line: str, style: str | None = None) -> None:
    """Writes a line to standard error; see `write`. A line that cannot be written is dropped."""
    with contextlib.suppress(OSError):  # such as on a full disk
        write(line + "\n", style, stream=sys.stderr)


def show(what: RenderableType) -> None:
    """Writes a table or a text of `rich` to standard output."""
    console = _console(sys.stdout)
    with console.capture() as captured:
        console.print(what)
    # `rich` fills each line of a table with spaces.
    lines = [line.rstrip(" ") for line in captured.get().splitlines()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def show_rule() -> None:
    """Writes a line across the terminal to standard output."""
    # `rich` does this by itself for a rule with a title only.
    is_ascii = _console(sys.stdout).options.ascii_only
    show(Rule(characters="-" if is_ascii else "\u2500", style="dim"))


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Shows what goes on, and for how long, on standard error if it is a terminal.

    Args:
      what: goes on first.
      total: how many steps follow, for a bar; None for an animation.

    Yields:
      A function to call with each step's name when the step begins.
    """
    moving = [SpinnerColumn()] if total is None else []
    counted = [] if total is None else [BarColumn(), MofNCompleteColumn()]
    console = _console(sys.stderr)
    with Progress(
        *moving,
        TextColumn("{task.description}", markup=False),
        *counted,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as display:
        task = display.add_task(what, total=total)
        # When the n-th step begins, from 0, n steps are complete.
        begun = itertools.count()
        # Shown at once: a step may be over before the next of ten pictures a second.
        yield lambda name: display.update(
            task, description=name, completed=next(begun), refresh=True
        )


def leave_line() -> None:
    """Lets what follows begin a line of the terminal, with a cursor, whatever moves there."""
    # False where standard error is no terminal: then nothing is to be ended.
    if _console(sys.stderr).show_cursor():
        sys.stderr.write("\n")


def _console(stream: TextIO) -> Console:
    """Returns a console; without style under NO_COLOR, where `rich` would keep bold and dim."""
    no_color = bool(os.environ.get("NO_COLOR"))
    return Console(file=stream, color_system=None if no_color else "auto", highlight=False)
