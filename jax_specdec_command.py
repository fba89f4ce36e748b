"""The entry point of `jax-specdec`.

It stands outside of the package because importing that takes a second or two, and whoever presses
Ctrl-C meanwhile wants no traceback either.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Import the command line and run it."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    handlers = {number: signal.getsignal(number) for number in defaults}
    for number, handler in handlers.items():
        if handler is defaults[number]:  # the caller may have interrupts ignored
            signal.signal(number, _interrupted)
    from jax_specdec.__main__ import main as run

    for number, handler in handlers.items():
        signal.signal(number, handler)
    run()


def _interrupted(number: int, frame: FrameType | None) -> None:
    os.write(2, b"jax-specdec: interrupted\n")
    os._exit(128 + number)
