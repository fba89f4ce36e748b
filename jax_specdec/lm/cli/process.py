"""How a command ends when a signal asks it to, its pipe is closed or the disk is full.

The main thread waits and handles signals; `command` gives the work of a command to `run_to_end`,
which does it in another thread. `serve` takes the first signal for itself by `handling_interrupt`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from jax_specdec.lm import terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what `kill`, systemd and containers send."""

PIPE_CLOSED = 128 + 13  # SIGPIPE, which not every system has

_on_interrupt: list[Callable[[], None]] = []
"""What the next interrupt does instead of ending the process."""


@contextlib.contextmanager
def handling_interrupt(handle: Callable[[], None]) -> Iterator[None]:
    """Lets the first interrupt call a function in the main thread, while the body runs."""
    _on_interrupt[:] = [handle]
    try:
        yield
    finally:
        _on_interrupt.clear()


def run_to_end(work: Callable[[], None]) -> None:
    """Runs a command and lets it end as a shell expects.

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

    # A daemon: Python's exit must not wait for it after an error of the main thread.
    thread = threading.Thread(target=run, daemon=True)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # What the caller ignores, or handles outside of Python, stays.
    handled = [x for x in SIGNALS if before[x] not in (None, signal.SIG_IGN)]
    try:
        for number in handled:
            signal.signal(number, _on_signal)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)  # some systems handle interrupts only between waits
        # Also a SystemExit, whose code is then the process's: in its own thread it would be lost.
        if outcome:
            raise outcome[0]
    except BrokenPipeError:  # the reader of the output has left
        drop_unwritten()
        sys.exit(PIPE_CLOSED)
    except OSError as error:  # those of reading are reported where they occur
        terminal.log(f"jax-specdec: output cannot be written: {error.strerror}")
        drop_unwritten()
        sys.exit(1)
    finally:
        for number in handled:
            signal.signal(number, before[number])


def drop_unwritten() -> None:
    """Lets Python, which flushes its streams at exit, find nothing to complain about."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # What the buffer still holds is written to nowhere, at exit.
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Does what `handling_interrupt` was given, or ends, whatever other threads are doing."""
    # Taken away when it is called: the second interrupt ends the process.
    if _on_interrupt:
        _on_interrupt.pop()()
        return
    # Text that was decoded is shown, and a moving line of the terminal is left as it is.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        terminal.leave_line()
    terminal.log("jax-specdec: interrupted")
    # Not `sys.exit`: the other thread may be within XLA, which Python cannot interrupt.
    os._exit(128 + number)  # the code names the signal
