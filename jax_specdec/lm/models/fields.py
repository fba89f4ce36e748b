"""Checks of numbers from files and callers, and how messages quote them.

Configs of models are dataclasses that call `check_fields` before rules of their own.
"""

import dataclasses
import functools
import reprlib
import typing
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from jax_specdec._src.base.arrays import refuse

MAX_INT = 2**31 - 1
"""Sizes, positions and token ids are int32 on the device."""

_MAX_SHOWN = 240


def shown(name: str | Path) -> str:
    """Returns a name or path for a message, on one line and not too long."""
    text = str(name)
    if not text.isprintable():
        text = repr(text)
    half = _MAX_SHOWN // 2
    return text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def quoted(value: object) -> str:
    """Returns a value for a message: as Python writes it, shortened if it is long or deep."""
    return reprlib.repr(value)


def reason(error: BaseException | str) -> str:
    """Returns a library's error, or its message, as the end of a sentence."""
    return shown(" ".join(str(error).split()).rstrip("."))


def is_token_id(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer that can be a token id; True and 5.0 are not."""
    return type(value) is int and 0 <= value <= MAX_INT


def check_fields(config: Any) -> None:
    """Checks the fields of a dataclass that are annotated `int`, `float` or `bool`, or None beside.

    A whole number in a field of `float` becomes one: as an integer, JAX might not hold it.

    An integer may be 0 where the field's metadata has ``least=0``.

    Raises:
      ValueError: an integer is not positive or more than int32 holds, a number is not positive or
        not one that float32 holds, or a switch is not a boolean.
    """
    types = _types_of(config.__class__)
    for field in dataclasses.fields(config):
        kind = types[field.name]
        value = getattr(config, field.name)
        least = field.metadata.get("least", 1)
        if (rule := _broken_rule(kind, value, least)) is not None:
            refuse(ValueError, field.name, f"be {rule}", value)
        if kind is float or (kind == float | None and value is not None):
            # By `object`, because the dataclass is frozen.
            object.__setattr__(config, field.name, float(value))


@functools.cache
def _types_of(config_class: type) -> dict[str, Any]:
    """Returns the type of each field, also where annotations are strings; `Annotated` as it is."""
    return typing.get_type_hints(config_class, include_extras=True)


def _broken_rule(kind: Any, value: object, least: int) -> str | None:
    """Returns what a value of a field must be and is not; None where it may be what it is."""
    # `int | None`: the rule of the first type, unless the value is None
    if type(None) in typing.get_args(kind):
        value_kind, *_ = typing.get_args(kind)
        rule = None if value is None else _broken_rule(value_kind, value, least)
        return None if rule is None else f"{rule} or None"
    # A bool is an int to Python, and neither a size nor a number here.
    if kind is int:
        if type(value) is not int or value < least:
            return "a positive integer" if least else "an integer of at least 0"
        return None if value <= MAX_INT else f"at most {MAX_INT}"
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            return "a positive number"
        # Neither infinite in float32, nor so small that a device may take it for 0.
        normal = np.finfo(np.float32)
        is_held = float(normal.tiny) <= value <= float(normal.max)
        return None if is_held else "a number that float32 holds"
    return "true or false" if kind is bool and type(value) is not bool else None
