"""Which slot a round of an exchange uses, and which parity of its mbarrier a reader waits for.

Rounds count 0, 1, 2, ... and take the slots in turn. Every slot has an mbarrier of its own, and
every round that uses a slot completes one phase of it. Both functions take Python ints and traced
int32 alike, so what the kernel computes is what the tests enumerate.
"""

from __future__ import annotations

import typing

import jax

Round = typing.TypeVar("Round", int, jax.Array)


def slot_of(round: Round, slots: int) -> Round:
    """The slot of a round: ``round mod slots``.

    Args:
      round: an int, or ``[]`` int32; from 0 on.
      slots: a power of two.

    Raises:
      ValueError: `slots` is no power of two.

    Example:
      >>> [slot_of(i, 2) for i in range(6)]
      [0, 1, 0, 1, 0, 1]
    """
    return round & (_power_of_two(slots) - 1)


def parity_of(round: Round, slots: int) -> Round:
    """The parity of the phase that a round completes: ``(round div slots) mod 2``.

    A wait for parity p ends once the phase that is under way has the other parity.

    Args:
      round: an int, or ``[]`` int32; from 0 on.
      slots: a power of two.

    Raises:
      ValueError: `slots` is no power of two.

    Example:
      >>> [parity_of(i, 2) for i in range(6)]
      [0, 0, 1, 1, 0, 0]
    """
    return (round >> (_power_of_two(slots).bit_length() - 1)) & 1


def _power_of_two(slots: int) -> int:
    if slots < 1 or slots & (slots - 1):
        raise ValueError(f"{slots=} must be a power of two")
    return slots
