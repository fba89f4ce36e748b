"""Pytrees that declare the shapes and dtypes of their arrays, and the one checker of arguments.

Every refusal is one sentence: the argument's name, what it must be, what came, and perhaps a hint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

LOGITS = "float32, bfloat16 or float16"
"""The dtypes of logits, in the words of a declaration."""

Sizes = dict[str, int]
"""What the letters of shapes stand for in one call. A letter is bound by the first array."""

Declared = str | tuple[type, ...]
_Class = TypeVar("_Class", bound=type)
_DECLARED: dict[type, dict[str, Declared]] = {}
_ARRAY = (jax.Array, np.ndarray)
_MADE_BY = {
    "Drafts": "Drafts.from_dense makes it of ids [B, K], Drafts.from_flat of ids [N]",
    "DraftProbs": "DraftProbs(probs) and DraftLogits(logits) hold arrays",
    "LogprobsConfig": "LogprobsConfig(num_top=5), for example",
    "RejectionSampleOutput": "rejection_sample returns it",
    "SamplingParams": "SamplingParams(temperature=0.8), for example",
    "SpecDecodeConfig": "SpecDecodeConfig(num_speculative_tokens=4), for example",
    "StepRecord": "the steps of what generate returned, for example",
}
"""By the name of a class: where its objects come from, for messages."""


def pytree(**fields: Declared) -> Callable[[_Class], _Class]:
    """Registers a dataclass as a pytree, also for `jax.export`, and declares its fields.

    Args:
      fields: the shape and dtype of an array, ``"[R, Vd] float32"``, as in the class's docstring.
        There may be several of both: ``"[Vd] or [R, Vd] float32 or bfloat16"``. Or the classes that
        a field may have, each of them declared. A field whose default is None may be None.

    Example:
      >>> @pytree(scores="[B, V] float32", rows="[B] int32")
      ... @dataclasses.dataclass(frozen=True)
      ... class Scores:
      ...     scores: jax.Array
      ...     rows: jax.Array | None = None
      >>> sizes = {"B": 2}
      >>> check_tree("scores", Scores(jnp.zeros((2, 5))), (Scores,), sizes)
      >>> sizes
      {'B': 2, 'V': 5}
    """

    def register(cls: _Class) -> _Class:
        # A class with static fields cannot be exported: nothing says how they are written.
        static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static")]
        jax.tree_util.register_dataclass(cls)
        if not static:
            export.register_pytree_node_serialization(
                cls,
                serialized_name=f"jax_specdec.{cls.__name__}",
                serialize_auxdata=lambda _: b"",
                deserialize_auxdata=lambda _: (),
            )
        _DECLARED[cls] = fields
        return cls

    return register


def static_pytree(cls: _Class) -> _Class:
    """Registers a frozen dataclass of plain values as a pytree without arrays, also for export.

    `jax.jit` takes such an argument without ``static_argnames``.
    """
    export.register_pytree_node_serialization(
        jax.tree_util.register_static(cls),
        serialized_name=f"jax_specdec.{cls.__name__}",
        serialize_auxdata=lambda one: json.dumps(dataclasses.asdict(one)).encode(),
        deserialize_auxdata=lambda data: cls(**json.loads(data)),
    )
    return cls


def refuse(
    error: type[Exception], name: str, must: str, came: object, hint: str | None = None
) -> NoReturn:
    """Raises `error` with a sentence: what `name` must be or do, what came, and a hint."""
    hint = f": {hint}" if hint else ""
    # Subclasses of `error` would show in tracebacks: the name is an attribute.
    refusal = error(f"{name} must {must}, but it is {described(came)}{hint}")
    vars(refusal)["argument"] = name
    raise refusal


def require(
    holds: object,
    name: str,
    must: str,
    came: object,
    hint: str | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raises what `refuse` does, unless something holds."""
    if not holds:
        refuse(error, name, must, came, hint)


def argument_of(error: BaseException) -> str | None:
    """Returns the argument that `refuse` named, without indices; None for an error of others."""
    name: str | None = vars(error).get("argument")
    return name and name.partition("[")[0]


def renamed(error: BaseException, name: str) -> str:
    """Returns the sentence of an error, with another name for the argument of `refuse`."""
    argument = argument_of(error)
    if not argument:
        return str(error)
    rest = str(error).removeprefix(argument)
    return name + rest.replace(f"{argument}[", f"{name}[")  # it may be compared with another entry


def is_error(raised: BaseException) -> bool:
    """Returns whether what was raised is an error; else it is an interrupt, or ends the program.

    Panics of libraries in Rust are errors, though pyo3 makes them no `Exception`.
    """
    return isinstance(raised, Exception) or type(raised).__name__ == "PanicException"


def check_type(
    name: str, value: object, *types: type | None, hint: str | None = None
) -> type | None:
    """Returns the first of the types that `value` is of; None among them allows None.

    Raises:
      TypeError: it is of none of them.
    """
    for one in types:
        if isinstance(value, one or type(None)):
            return one
    hint = hint or next((_MADE_BY[x.__name__] for x in types if x and x.__name__ in _MADE_BY), None)
    listed = (with_article(one.__name__) if one else "None" for one in types)
    refuse(TypeError, name, f"be {either(listed)}", value, hint)


def check_choice(name: str, value: object, choices: Sequence[object], of: type = object) -> None:
    """Raises ValueError unless `value` is one of the choices, TypeError unless it is an `of`."""
    if not isinstance(value, of):
        refuse(TypeError, name, f"be {with_article(of.__name__)}", value)
    if value not in choices:
        refuse(ValueError, name, f"be {either(map(repr, choices))}", value)


def check_tree(name: str, value: object, types: tuple[type, ...], sizes: Sizes) -> None:
    """Checks the type of a declared pytree, and each of its arrays.

    If `name` is empty, its fields are named as arguments of their own.

    Raises:
      TypeError: of another type, or an array of another dtype.
      ValueError: an array of another shape.
    """
    cls: Any = check_type(name, value, *types)
    # Only a field whose default is None may be None.
    optional = {field.name for field in dataclasses.fields(cls) if field.default is None}
    for field, declared in _DECLARED[cls].items():
        own = getattr(value, field)
        path = f"{name}.{field}" if name else field
        if own is None and field in optional:
            continue
        if isinstance(declared, str):
            check_array(path, own, declared, sizes)
        else:
            check_tree(path, own, declared, sizes)


def check_array(
    name: str,
    value: object,
    declared: str,
    sizes: Sizes,
    hint: str | Callable[[], str | None] | None = None,
) -> None:
    """Checks one array, and adds what its shape says to `sizes`.

    Args:
      value: its value.
      declared: as for `pytree`; without a shape or a dtype, any will do.
      sizes: what letters stand for. A letter that is not in it may have any size.
      hint: ends the message; a function if it takes work to find.

    Raises:
      TypeError: not an array, or of another dtype.
      ValueError: of another shape.

    Example:
      >>> check_array("positions", jnp.zeros(3, jnp.int32), "[B] int32", {"B": 2})
      Traceback (most recent call last):
      ValueError: positions must be an array [B] = [2] of int32, but it is an array [3] of int32
    """
    shapes, dtypes = _parsed(declared)
    fits = isinstance(value, _ARRAY) and (not shapes or _fits(shapes, value.shape, sizes))
    if fits and (not dtypes or str(value.dtype) in dtypes):  # type: ignore[attr-defined]
        return
    # A wrong shape is a ValueError, whatever the dtype; anything else that is wrong is its type.
    wanted = " " + either(_shape_text(shape, sizes) for shape in shapes) if shapes else ""
    of = f" of {either(dtypes)}" if dtypes else ""
    error = ValueError if isinstance(value, _ARRAY) and not fits else TypeError
    refuse(error, name, f"be an array{wanted}{of}", value, hint() if callable(hint) else hint)


@functools.cache
def _parsed(declared: str) -> tuple[list[list[str]], list[str]]:
    """Returns the shapes and the dtypes of a declaration."""
    shapes = [shape.split(", ") if shape else [] for shape in re.findall(r"\[(.*?)\]", declared)]
    dtypes = re.findall(r"\w+", declared.rpartition("]")[2])
    return shapes, [dtype for dtype in dtypes if dtype != "or"]


def _fits(shapes: list[list[str]], came: tuple[int, ...], sizes: Sizes) -> bool:
    """Returns whether a shape is one of those declared; if so, adds its letters to `sizes`."""
    for shape in shapes:
        found = dict(sizes)
        # What is not known is bound by what came: a letter, or a letter and a number, as in B+1.
        for dimension, size in zip(shape, came, strict=False):
            if _size(dimension, found) is None:
                letter, _, more = dimension.partition("+")
                found[letter] = size - int(more or 0)
        # No letter stands for a negative size, which [0] would give B of [B+1].
        fits = [_size(dimension, found) for dimension in shape] == list(came)
        if fits and min(found.values(), default=0) >= 0:
            sizes |= found
            return True
    return False


def _size(dimension: str, sizes: Sizes) -> int | None:
    """Returns the size of a dimension such as ``2``, ``B`` or ``N+B``; None if it is not known."""
    if dimension.isdecimal() or dimension in sizes:
        return int(sizes.get(dimension, dimension))
    for sign, compute in (("+", operator.add), ("-", operator.sub), ("*", operator.mul)):
        left, _, right = dimension.partition(sign)
        if right:
            parts = (_size(left, sizes), _size(right, sizes))
            return None if None in parts else compute(*parts)
    return None


def _shape_text(shape: list[str], sizes: Sizes) -> str:
    """Returns a declared shape in words: ``[B, K] = [2, 3]``, as far as sizes are known."""
    known = [_size(dimension, sizes) for dimension in shape]
    sized = [dimension if n is None else str(n) for dimension, n in zip(shape, known, strict=True)]
    text = f"[{', '.join(shape)}]"
    return text if sized == shape else f"{text} = [{', '.join(sized)}]"


# Values


class Range(NamedTuple):
    """The numbers from `low` to `high`; `ends` says whether they are among them.

    Example:
      >>> Range(0, 1, "(]").must, Range(0, 1, "(]").holds(0.0)
      ('be in (0, 1]', False)
    """

    low: float
    high: float | None = None
    ends: str = "[]"

    def holds(self, x: Any) -> Any:
        """Returns whether numbers are in the range: of Python, NumPy, JAX, or a kernel."""
        above = x >= self.low if self.ends[0] == "[" else x > self.low
        if self.high is None:
            return above
        below = x <= self.high if self.ends[1] == "]" else x < self.high
        return above & below

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError unless a number is in the range."""
        if not self.holds(value):
            refuse(ValueError, name, self.must, value)

    @property
    def must(self) -> str:
        """What a number must be, in words."""
        if self.high is None:
            return f"be at least {self.low}"
        return f"be in {self.ends[0]}{self.low}, {self.high}{self.ends[1]}"


def check_int(name: str, value: Any, low: int = 1, high: int | None = None) -> int:
    """Returns `value` as a Python int, if it is an integer in ``[low, high]``, and no boolean.

    Raises:
      TypeError: not an integer.
      ValueError: out of range.
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        refuse(TypeError, name, "be an int", value)
    Range(low, high).check(name, number)
    return number


def check_increasing(
    name: str, values: Sequence[Any], low: int, high: int | None = None
) -> tuple[int, ...]:
    """Returns `values` as a tuple, if they are increasing ints in ``[low, high]``, at least one.

    Raises:
      TypeError: there is no list of them, or one is not an integer.
      ValueError: one is out of range, or they do not increase.
    """
    must = "be increasing ints, at least one"
    numbers = tuple(check_int(*entry, low, high) for entry in named_entries(name, values, must))
    is_rising = bool(numbers) and list(numbers) == sorted(set(numbers))
    require(is_rising, name, must, numbers)
    return numbers


def check_entries(
    name: str,
    values: np.ndarray,
    holds: Any,
    must: str,
    at: Any = slice(None),
    hint: str | None = None,
) -> None:
    """Raises ValueError for the first of ``values [n]`` that does not hold.

    Args:
      name: of an entry, with ``{}`` for its index.
      values: on the host.
      holds: ``[n]`` bool.
      must: what an entry must do.
      at: indices of the entries to look at; all by default.
      hint: ends the message.
    """
    # The indices of the entries that do not hold
    wrong = np.arange(len(values))[at][~np.asarray(holds, bool)[at]]
    if wrong.size:
        refuse(ValueError, name.format(wrong[0]), must, values[wrong[0]], hint)


def check_listed(name: str, ids: np.ndarray, size: int) -> None:
    """Checks the values of one list of ids.

    Raises:
      ValueError: an id is out of range or listed twice.
    """
    check_entries(name + "[{}]", ids, (ids >= 0) & (ids < size), f"be an id in [0, {size})")
    listed, counts = np.unique(ids, return_counts=True)
    twice = listed[counts > 1]
    require(not twice.size, name, "list each id once", ids.tolist(), f"{twice[:1]} comes twice")


def as_int32(name: str, values: Any, declared: str = "", sizes: Sizes | None = None) -> jax.Array:
    """Returns `values` as int32, if that changes none; and checks a shape that is declared.

    Under jit, where values are not known, one that int32 does not hold becomes the nearest that it
    does. With ``jax_enable_x64`` every sum of integers has a dtype that includes such.

    Raises:
      TypeError: not integers.
      ValueError: an integer out of the range of int32, or another shape.
    """
    # Three ways: a dtype that int32 includes; another one under jit, held to the range of int32;
    # and anything else on the host, where the values are known.
    is_array = isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jnp.integer)
    if is_array and np.can_cast(values.dtype, np.int32):
        array = jnp.asarray(values, jnp.int32)
    elif is_array and isinstance(values, jax.core.Tracer):
        ends = np.iinfo(np.int32)
        least = max(ends.min, int(jnp.iinfo(values.dtype).min))
        array = jnp.clip(values, least, ends.max).astype(jnp.int32)
    else:
        array = jax.device_put(host_int32(name, values))
    if declared:
        check_array(name, array, declared, {} if sizes is None else sizes)
    return array


def checked_dtype(dtype: Any, named: str = "", name: str = "dtype") -> np.dtype:
    """Returns a dtype that was given: one of those `named` in words, or any floating one.

    Raises:
      TypeError: another one, or none.
    """
    must = f"be {named or 'a floating dtype'}"
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):  # the latter for a dict
        refuse(TypeError, name, must, dtype)
    names = re.findall(r"\w+", named)
    fits = found.name in names if names else jnp.issubdtype(found, jnp.floating)
    require(fits, name, must, found, error=TypeError)
    return found


def host_array(name: str, values: Any, must: str) -> np.ndarray:
    """Returns values on the host, in the dtype that NumPy gives them.

    Args:
      must: what the values must be, for the message.

    Raises:
      TypeError: lists of different lengths, which make no array.
    """
    try:
        return np.asarray(values)
    except ValueError:
        refuse(TypeError, name, must, values, "lists of one length make an array")


def named_entries(name: str, values: Any, must: str = "be a list") -> list[tuple[str, Any]]:
    """Returns the entries of a list, each after its name in messages.

    Args:
      must: what the list must be, for the message.

    Raises:
      TypeError: no list: text, a dict, or what has no entries.
    """
    try:
        entries = None if isinstance(values, (str, bytes, Mapping)) else list(values)
    except TypeError:
        entries = None
    if entries is None:
        refuse(TypeError, name, must, values)
    return [(f"{name}[{i}]", entry) for i, entry in enumerate(entries)]


def host_numbers(name: str, values: Any) -> np.ndarray:
    """Returns a list of numbers on the host, ``[n]`` float64.

    Raises:
      TypeError: not numbers.
      ValueError: another shape.
    """
    must = "be numbers"
    array = host_array(name, values, must)
    require(array.dtype.kind in "iuf", name, must, values, error=TypeError)
    check_array(name, array, "[n]", {})
    return array.astype(np.float64)


def host_int32(name: str, values: Any, declared: str = "") -> np.ndarray:
    """Returns values on the host as int32, if that changes none; and checks a declared shape.

    Raises:
      TypeError: not integers.
      ValueError: an integer out of the range of int32, or another shape.
    """
    must = "be integers"
    array = values if isinstance(values, _ARRAY) else host_array(name, values, must)
    # NumPy makes an empty list float64
    if array.size == 0 and isinstance(array, np.ndarray):
        array = array.astype(np.int32)
    require(jnp.issubdtype(array.dtype, jnp.integer), name, must, values, error=TypeError)
    array = np.asarray(array)
    limits = np.iinfo(np.int32)
    too_large = array[(array < limits.min) | (array > limits.max)]
    if too_large.size:
        refuse(ValueError, name, "be integers that int32 holds", too_large[0])
    check_array(name, array, declared, {})
    return array.astype(np.int32)


def as_positions(positions: Any) -> jax.Array | np.ndarray:
    """Returns positions as an array: JAX arrays as they are, all else as int32 on the host.

    Raises:
      TypeError: not integers.
      ValueError: an integer out of the range of int32.
    """
    return positions if isinstance(positions, jax.Array) else host_int32("positions", positions)


def check_positions(positions: Any, sizes: Sizes) -> None:
    """Checks the positions of first drafts, ``[B]`` int32 for the B in `sizes`.

    Raises:
      TypeError: not an array, or of another dtype.
      ValueError: another shape; if there are more than B, the message says which are wanted.
    """
    hint = "one per request, that of its first draft, not one per token"
    is_per_token = np.size(positions) > sizes["B"]
    check_array("positions", positions, "[B] int32", sizes, hint if is_per_token else None)


def check_outside_jit(function: str, **arguments: object) -> None:
    """Checks that no array of the arguments is traced, for a function that needs their values.

    Raises:
      TypeError: one is.
    """
    for path, leaf in jax.tree.leaves_with_path(arguments):
        if isinstance(leaf, jax.core.Tracer):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise TypeError(f"{function} must be called outside of jax.jit, but {name} is traced")


def known_values(values: Any) -> np.ndarray | None:
    """Returns values, read on the host; None if they are traced or on other hosts."""
    if isinstance(values, jax.core.Tracer):
        return None
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        return None
    return np.asarray(values)


# Words


def described(value: object) -> str:
    """Returns a value for a message, in one line: of an array, its shape and dtype."""
    if isinstance(value, np.generic):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type):
        return f"an array {list(value.shape)} of {value.dtype}"
    try:
        text = " ".join(f"{value!r}".split())
    except (ValueError, RecursionError):  # Python refuses to write longer integers, or deeper lists
        return f"{with_article(type(value).__name__)} that is too long to write"
    # An object whose text is long is named by its class; a list or a string is cut.
    is_object = type(value).__module__ != "builtins"
    if is_object and len(text) > 80:
        return with_article(type(value).__name__)
    return text[:80]


def either(texts: Any) -> str:
    """Returns texts as a list in words: "a, b or c"."""
    *first, last = texts
    return f"{', '.join(first)} or {last}" if first else last


def with_article(noun: str) -> str:
    """Returns a noun after "a" or "an"."""
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"
