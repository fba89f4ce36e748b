"""The entry point of `jax-specdec`.

It stands outside of the package because importing that takes a second or two, and whoever presses
Ctrl-C meanwhile wants no traceback either.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line and run it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # the caller may have interrupts ignored
        signal.signal(signal.SIGINT, _interrupted)
    from jax_specdec.__main__ import main as run

    signal.signal(signal.SIGINT, handler)
    run()


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"jax-specdec: interrupted\n")
    os._exit(128 + number)
