"""How a command ends when a signal asks it to, its pipe is closed or the disk is full."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from jax_specdec.lm.cli import terminal

PIPE_CLOSED = 128 + 13  # SIGPIPE, which not every system has

_DEFAULTS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,  # Ctrl-C
    signal.SIGTERM: signal.SIG_DFL,  # what `kill`, systemd and containers send
}
"""The signals that interrupt a command, and what they do by default."""

_on_interrupt: list[Callable[[], None]] = []
"""What the next interrupt does instead of ending the process."""


@contextlib.contextmanager
def handling_interrupt(handle: Callable[[], None]) -> Iterator[None]:
    """While the body runs, the first interrupt calls a function in the main thread."""
    _on_interrupt[:] = [handle]
    try:
        yield
    finally:
        _on_interrupt.clear()


def run_to_end(work: Callable[[], None]) -> None:
    """Run a command and let it end as a shell expects.

    The work is done in a thread of its own, because the main thread could not handle an interrupt
    while XLA compiles a program, which may take long.

    Args:
      work: what to do; whatever it raises is raised here.
    """
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            work()
            sys.stdout.flush()
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    # The caller may have one ignored. Process 1 of a container gets none that is not handled.
    handled = [one for one, default in _DEFAULTS.items() if signal.getsignal(one) is default]
    try:
        for number in handled:
            signal.signal(number, _handle)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)  # some systems handle interrupts only between waits
        if outcome:
            raise outcome[0]
    except KeyboardInterrupt:
        interrupted()
    except BrokenPipeError:  # the reader has closed the pipe
        _end_quietly(PIPE_CLOSED)
    except OSError as error:  # such as a full disk; errors of reading are reported where they occur
        terminal.log(f"jax-specdec: output cannot be written: {error.strerror}")
        _end_quietly(1)
    finally:
        for number in handled:
            signal.signal(number, _DEFAULTS[number])


def _handle(number: int, frame: FrameType | None) -> None:
    """Call what `handling_interrupt` was given, wherever the main thread is, or else end."""
    if not _on_interrupt:
        interrupted(number)
    _on_interrupt.pop()()


def interrupted(number: int = signal.SIGINT) -> NoReturn:
    """End the process now, whatever other threads are doing; the exit code names the signal."""
    for each in _DEFAULTS:
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        in_text = not terminal.stop_animations() and sys.stderr.isatty()
        sys.stderr.write("\n" * in_text + "jax-specdec: interrupted\n")
        sys.stderr.flush()
    os._exit(128 + number)


def _end_quietly(code: int) -> NoReturn:
    """Exit, and drop what a stream cannot write."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
