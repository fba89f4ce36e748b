"""Lets Ctrl-C end `jax-specdec` in one line while its modules are imported.

`jax_specdec` imports this first, because the installed script can do nothing before it imports the
package, and JAX alone takes a second or two. All other programs keep their handler.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"jax-specdec: interrupted\n")
    os._exit(128 + number)


def restore() -> None:
    """Give Python's own handler back, if `_end` has taken its place."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored
if _is_default and [Path(name).stem for name in sys.argv[:1]] == ["jax-specdec"]:
    signal.signal(signal.SIGINT, _end)
