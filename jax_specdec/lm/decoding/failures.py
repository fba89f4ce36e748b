"""Interrupts and failed calls of an `EngineDriver`: how they differ from other exceptions."""

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
        if not is_error(error):
            raise
        raise FailedCall(error, requests) from error
