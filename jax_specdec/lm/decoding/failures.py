"""Interrupts and failed calls of an `EngineDriver`: how they differ from other exceptions.

A KeyboardInterrupt goes to the caller of the driver; so does what is wrong with a program. An error
of the device becomes a `FailedCall`, where `device.DeviceState` calls a program or where the host
waits for a result. `EngineDriver._changes` catches these alone, and each request that was in the
call gets an update.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from jax_specdec._src.base.arrays import is_error
from jax_specdec.lm.decoding.bookkeeping import ServedRequest


class FailedCall(Exception):
    """A call failed on the device, in which there were some requests."""

    def __init__(self, error: BaseException, requests: Iterable[ServedRequest]) -> None:
        super().__init__(str(error))
        self.error = error
        self.request_ids = {one.request_id for one in requests}


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Surrounds calls of JAX: an interrupt stays one.

    JAX makes a ValueError with the traceback of what stopped it comparing static arguments.
    """
    try:
        yield
    except ValueError as error:
        # JAX's message has the traceback, in which a line begins with the name of what was raised.
        # An error whose own words speak of interrupts has the name elsewhere in a line.
        if re.search("^KeyboardInterrupt", str(error), re.MULTILINE):
            raise KeyboardInterrupt from error
        raise


@contextlib.contextmanager
def awaiting(requests: Iterable[ServedRequest]) -> Iterator[None]:
    """Surrounds what waits for the device: its errors are failed calls.

    So are panics of libraries in Rust, as of a matcher, which are not of type `Exception`.
    """
    try:
        yield
    except BaseException as error:
        # Interrupts, and what ends the program.
        if not is_error(error):
            raise
        raise FailedCall(error, requests) from error
