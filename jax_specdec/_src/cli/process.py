"""How a command ends: interrupts, closed pipes and full disks in one line, or in none."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from jax_specdec._src.cli import terminal

INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + 13  # SIGPIPE, which not every system has


def run_to_end(work: Callable[[], None]) -> None:
    """Run a command and let it end as a shell expects.

    The work is done in a thread of its own: Python hears of an interrupt once XLA has compiled the
    program at hand, and that may take long.

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
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.1)  # not for ever: wherever a system calls nobody, look for interrupts
        if outcome:
            raise outcome[0]
    except KeyboardInterrupt:
        interrupted()
    except BrokenPipeError:  # whoever reads has seen enough
        _end_quietly(PIPE_CLOSED)
    except OSError as error:  # a full disk, for example; what is read has errors of its own
        sys.stderr.write(f"jax-specdec: output cannot be written: {error.strerror}\n")
        _end_quietly(1)


def interrupted() -> NoReturn:
    """End the process now, whatever other threads are doing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        in_text = not terminal.stand_still() and sys.stderr.isatty()
        sys.stderr.write("\n" * in_text + "jax-specdec: interrupted\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def _end_quietly(code: int) -> NoReturn:
    """Exit; what a stream still holds and cannot write goes nowhere."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
