"""What a user sees: text on standard output, progress on standard error; plain where piped."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.style import Style

_CONTROLS = (*range(9), *range(11, 32), *range(127, 160))
_BIDIRECTIONAL = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS}
_ESCAPES |= {code: f"\\u{code:04x}" for code in _BIDIRECTIONAL}

_animations: list[Live] = []
"""Those that are under way; an interrupt, in another thread, has to stop them."""


def printable(text: str) -> str:
    """Text that a terminal shows as it is, with escapes for what would command the terminal.

    Those are control characters other than newline and tab, and those that change the direction of
    the text around them.
    """
    return text.translate(_ESCAPES)


def prepare_streams() -> None:
    """Let standard streams take every character, escaped where their encoding lacks it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def write(text: str, style: str | None = None, *, stream: TextIO | None = None) -> None:
    """Write text at once, in colour where that can be seen and is wanted.

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
    """Write a line to standard error; see `write`. A line that cannot be written is dropped."""
    with contextlib.suppress(OSError):  # such as on a full disk
        write(line + "\n", style, stream=sys.stderr)


def show(what: RenderableType) -> None:
    """Write a table or a text of `rich` to standard output."""
    console = _console(sys.stdout)
    with console.capture() as captured:
        console.print(what)
    lines = [line.rstrip(" ") for line in captured.get().splitlines()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def show_rule() -> None:
    """Write a line across the terminal to standard output; `rich`'s own is not always ASCII."""
    console = _console(sys.stdout)
    write(("-" if console.options.ascii_only else "\u2500") * console.width, "dim")
    write("\n")


@contextlib.contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """An animation while the body runs, on standard error if it is a terminal.

    Yields:
      A function that changes what it says, and counts the time from 0.
    """
    with _animation(SpinnerColumn(), _description()) as progress:
        task = progress.add_task(what, total=None)

        def say(what: str) -> None:
            progress.reset(task, description=what)

        yield say


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if it is a terminal.

    Yields:
      A function to call with each step's name when the step begins; the bar has `total` steps.
    """
    with _animation(_description(), BarColumn(), MofNCompleteColumn()) as progress:
        task = progress.add_task(what, total=total)
        begun = 0

        def begin(name: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=f"{what}: {name}")
            begun += 1

        yield begin


def _description() -> TextColumn:
    return TextColumn("{task.description}", markup=False)


@contextlib.contextmanager
def _animation(*columns: ProgressColumn) -> Iterator[Progress]:
    """What moves on standard error, if it is a terminal, with the time since it began."""
    console = _console(sys.stderr)
    progress = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        _animations.append(progress.live)
        try:
            yield progress
        finally:
            _animations.remove(progress.live)


def stop_animations() -> bool:
    """Remove animations from the terminal; whether there were any."""
    shown = [live for live in _animations if live.is_started]
    for live in shown:
        live.stop()
    return bool(shown)


def _console(stream: TextIO) -> Console:
    """A console; without any style under NO_COLOR, where `rich` alone would keep bold and dim."""
    no_color = bool(os.environ.get("NO_COLOR"))
    return Console(file=stream, color_system=None if no_color else "auto", highlight=False)
