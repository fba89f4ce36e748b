"""Declared pytrees and the one checker: what is declared is documented, and what does not fit."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from lower_floor import Range, arrays, check_array, check_tree, described, pytree, sampling
from upper_floor import NUMBERS

import jax_specdec as sd
from jax_specdec import lm

CLASSES = [
    cls for cls in arrays._DECLARED if vars(sys.modules[cls.__module__]).get(cls.__name__) is cls
]

EXPORTED = [
    cls for cls in CLASSES if not any(one.metadata.get("static") for one in dataclasses.fields(cls))
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_a_class_declares_is_what_its_docstring_says(cls: type) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    documented = re.sub(r"\s+", " ", (cls.__doc__ or "").partition("Attributes:")[2])
    for name, declared in arrays._DECLARED[cls].items():
        assert name in fields
        if isinstance(declared, str):
            said = documented.split(f" {name}: ")[1]
            for other in fields - {name}:
                said = said.split(f" {other}: ")[0]
            assert any(shape in said for shape in re.findall(r"\[.*?\]", declared)), said
            assert all(dtype in said for dtype in re.findall(r"[a-z]+\d+|bool", declared)), said
        else:
            assert all(one in CLASSES for one in declared)


@pytest.mark.parametrize("cls", EXPORTED, ids=lambda cls: cls.__name__)
def test_a_declared_class_travels_through_export(cls: type) -> None:
    fields = dataclasses.fields(cls)
    tree = cls(*(jnp.full(1, i) for i in range(len(fields))))
    exported = export.export(jax.jit(lambda tree: tree))(tree)
    again = export.deserialize(exported.serialize()).call(tree)
    assert type(again) is cls
    assert [leaf.tolist() for leaf in jax.tree.leaves(again)] == [[i] for i in range(len(fields))]


# The whole sentence of each checker. Where a function calls it, its own tests name the argument.

NB, ABC = {"N": 3, "B": 2}, ("a", "b", "c")
SENTENCES: dict[type[Exception], dict[str, Callable[[], Any]]] = {
    TypeError: {
        "x must be an int, but it is 1.5": lambda: arrays.check_int("x", 1.5),
        "x must be an int, but it is True": lambda: arrays.check_int("x", True),
        "x must be a Drafts, an int or None, but it is 'a': use b": lambda: arrays.check_type(
            "x", "a", sd.Drafts, int, None, hint="use b"
        ),
        "x must be a str, but it is None": lambda: arrays.check_choice("x", None, ABC, str),
        "x must be an array [B] = [2] of int32, but it is [1, 2]": lambda: check_array(
            "x", [1, 2], "[B] int32", NB
        ),
        "x[1] must be an int, but it is 2.5": lambda: arrays.check_increasing("x", (8, 2.5), 1),
        "x must be integers, but it is [2.5]": lambda: arrays.as_int32("x", [2.5]),
        "dtype must be a floating dtype, but it is 'float23'": lambda: arrays.checked_dtype(
            "float23"
        ),
        "dtype must be float32 or float16, but it is dtype('int8')": lambda: arrays.checked_dtype(
            "int8", "float32 or float16"
        ),
    },
    ValueError: {
        "x must be at least 1, but it is 0": lambda: arrays.check_int("x", 0),
        "x must be in [1, 3], but it is 4": lambda: arrays.check_int("x", 4, 1, 3),
        "x must be in (0, 1], but it is 0.0": lambda: Range(0, 1, "(]").check("x", 0.0),
        "x must be 'a', 'b' or 'c', but it is 'd'": lambda: arrays.check_choice("x", "d", ABC),
        "x must be an array [N+B, V] = [5, V] of float32 or bfloat16, but it is an array [4, 7] of "
        "float32: why": lambda: check_array(
            "x", np.ones((4, 7), "f4"), "[N+B, V] float32 or bfloat16", NB, "why"
        ),
        "x must be increasing ints, at least one, but it is (8, 8)": (
            lambda: arrays.check_increasing("x", (8, 8), 1)
        ),
        "x[1] must be at least 0, but it is -3: why": lambda: arrays.check_entries(
            "x[{}]", np.array([0, -3, -4]), [True, False, False], "be at least 0", hint="why"
        ),
        "x[1] must be an id in [0, 5), but it is 7": lambda: arrays.check_listed(
            "x", np.array([2, 7]), 5
        ),
        "x must list each id once, but it is [2, 4, 2]: [2] comes twice": (
            lambda: arrays.check_listed("x", np.array([2, 4, 2]), 5)
        ),
        "x must be integers that int32 holds, but it is 2147483648": (
            lambda: arrays.as_int32("x", [5, 2**31])
        ),
        "x must be an array [B] = [2], but it is an array [] of int32": (
            lambda: arrays.as_int32("x", 5, "[B]", NB)
        ),
    },
}


@pytest.mark.parametrize(
    ("error", "sentence", "check"),
    [(error, *one) for error, sentences in SENTENCES.items() for one in sentences.items()],
)
def test_a_refusal_is_one_sentence(
    error: type[Exception], sentence: str, check: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=f"^{re.escape(sentence)}$") as refused:
        check()
    name = re.split(r"\[| must", sentence)[0]
    assert arrays.argument_of(refused.value) == name
    assert arrays.renamed(refused.value, "--y") == sentence.replace(name, "--y", 1)
    assert arrays.argument_of(error(sentence)) is None


def test_a_value_is_described_in_one_short_line() -> None:
    short = [np.float32(0.1), jnp.zeros(2), "a\nb", lm.models.LayerSpec]
    assert [described(value) for value in short] == [
        "0.1",
        "an array [2] of float32",
        r"'a\nb'",
        "<class 'jax_specdec.lm.models.config.LayerSpec'>",
    ]
    assert described(list(range(100))) == str(list(range(100)))[:80]
    assert described(sd.SpecDecodeConfig(num_speculative_tokens=1)) == "a SpecDecodeConfig"
    assert described(9**9999) == "an int that is too long to write"


# Integers


NO_INT32: list[tuple[Any, type[Exception]]] = [
    *((values, TypeError) for values in ([2.7], np.float32([1]), [True], ["5"], [None])),
    *((values, ValueError) for values in ([2**40], [-(2**31) - 1], np.uint32([2**31]))),
    (jnp.uint32([2**32 - 1]), ValueError),
    (jnp.float32([1]), TypeError),
]


@pytest.mark.parametrize(("values", "error"), NO_INT32, ids=str)
def test_what_a_cast_to_int32_would_change_is_refused(values: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="^x must be integers"):
        arrays.as_int32("x", values)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_traced_values_that_are_no_integers_are_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=f"^x must be integers, .* of {dtype}"):
        jax.eval_shape(lambda x: arrays.as_int32("x", x), jax.ShapeDtypeStruct((1,), dtype))


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_traced_integers_that_int32_does_not_hold_are_the_nearest_that_it_does(dtype: str) -> None:
    limits, far = np.iinfo(np.int32), np.iinfo(dtype)
    with jax.enable_x64(True):
        values = jnp.asarray([far.min, 5, far.max], dtype)
        found = jax.jit(lambda x: arrays.as_int32("x", x))(values)
    assert found.tolist() == [max(far.min, limits.min), 5, limits.max]
    assert found.dtype == jnp.int32


# Shapes: declared, what letters stand for, what came, and what the letters stand for afterwards

FIT: list[tuple[str, dict[str, int], tuple[int, ...], dict[str, int]]] = [
    ("[B, V]", {}, (2, 5), {"B": 2, "V": 5}),
    ("[B, V]", {"V": 5}, (2, 5), {"B": 2, "V": 5}),
    ("[B+1]", {}, (3,), {"B": 2}),
    ("[N+B, V]", {"N": 3, "B": 2}, (5, 7), {"N": 3, "B": 2, "V": 7}),
    ("[B, L-1]", {"B": 2, "L": 4}, (2, 3), {"B": 2, "L": 4}),
    ("[K*S]", {"K": 2, "S": 3}, (6,), {"K": 2, "S": 3}),
    ("[B, 2]", {}, (4, 2), {"B": 4}),
    ("[]", {}, (), {}),
    ("[Vd] or [R, Vd]", {"R": 3}, (4,), {"R": 3, "Vd": 4}),
    ("[Vd] or [R, Vd]", {"R": 3}, (3, 4), {"R": 3, "Vd": 4}),
    ("[B, B]", {}, (2, 2), {"B": 2}),
]
DO_NOT: list[tuple[str, dict[str, int], tuple[int, ...]]] = [
    ("[B, V]", {"B": 3}, (2, 5)),
    ("[B, V]", {}, (2,)),
    ("[B+1]", {}, (0,)),
    ("[B+1]", {"B": 3}, (3,)),
    ("[N+B, V]", {"N": 3, "B": 2}, (6, 7)),
    ("[B, L-1]", {"L": 0}, (2, 0)),
    ("[]", {}, (1,)),
    ("[Vd] or [R, Vd]", {"R": 3}, (2, 4)),
    ("[B, B]", {}, (2, 3)),
]


@pytest.mark.parametrize(("declared", "sizes", "shape", "after"), FIT, ids=str)
def test_a_shape_that_fits_binds_its_letters(
    declared: str, sizes: dict[str, int], shape: tuple[int, ...], after: dict[str, int]
) -> None:
    found = dict(sizes)
    check_array("x", np.zeros(shape, np.int32), declared + " int32", found)
    assert found == after
    for wrong in (np.zeros(shape), jnp.zeros(shape), np.zeros(shape).tolist(), None):
        with pytest.raises(TypeError, match="^x must be an array"):
            check_array("x", wrong, declared + " int32 or uint32", dict(sizes))


@pytest.mark.parametrize(("declared", "sizes", "shape"), DO_NOT, ids=str)
def test_a_shape_that_does_not_fit_binds_nothing(
    declared: str, sizes: dict[str, int], shape: tuple[int, ...]
) -> None:
    found = dict(sizes)
    with pytest.raises(ValueError, match="^x must be an array"):
        check_array("x", np.zeros(shape), declared, found)
    assert found == sizes


def test_traced_arrays_are_checked_while_tracing() -> None:
    def call(x: jax.Array) -> jax.Array:
        check_array("x", x, "[B, 3] float32", {})
        return x

    assert jax.eval_shape(call, jnp.zeros((2, 3))).shape == (2, 3)
    with pytest.raises(ValueError, match="^x must"):
        jax.eval_shape(call, jnp.zeros((2, 4)))


def test_a_tree_is_checked_field_by_field() -> None:
    sizes: dict[str, int] = {}
    drafts = sd.Drafts.from_flat([1, 2, 3], [2, 1], sd.DraftProbs(jnp.ones((3, 4)) / 4))
    check_tree("drafts", drafts, (sd.Drafts,), sizes)
    assert sizes == {"N": 3, "B": 2, "R": 3, "Vd": 4}
    distribution: Any = sd.DraftProbs(jnp.ones((3, 4)), valid=jnp.ones(3, bool))
    wrong = dataclasses.replace(drafts, distribution=distribution)
    with pytest.raises(ValueError, match=r"^drafts\.distribution\.valid must"):
        check_tree("drafts", wrong, (sd.Drafts,), {})
    with pytest.raises(TypeError, match="^drafts must be a Drafts"):
        check_tree("drafts", drafts.token_ids, (sd.Drafts,), {})


def test_a_class_with_static_fields_is_a_pytree_too() -> None:
    @pytree(x="[B] float32")
    @dataclasses.dataclass(frozen=True)
    class Scaled:
        x: jax.Array
        scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))

    doubled = jax.jit(lambda one: dataclasses.replace(one, x=one.x * one.scale))(
        Scaled(jnp.ones(2), 2.0)
    )
    assert doubled.x.tolist() == [2.0, 2.0] and doubled.scale == 2.0


# Ranges and the table


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        (Range(0, 1), [0.0, 0.5, 1.0], [-1e-9, 1.0001, math.nan, math.inf]),
        (Range(0, 1, "(]"), [1e-9, 1.0], [0.0, 1.0001, math.nan]),
        (Range(0, math.inf, "[)"), [0.0, 1e38], [-1e-9, math.inf, math.nan]),
        (Range(-math.inf, math.inf, "()"), [-1e38, 1e38], [-math.inf, math.inf, math.nan]),
        (Range(0), [0, 2**31 - 1], [-1]),
    ],
    ids=lambda x: x.must if isinstance(x, Range) else "",
)
def test_a_range_is_the_same_for_numbers_and_arrays(
    limits: Range, inside: list[float], outside: list[float]
) -> None:
    values = [*inside, *outside]
    wanted = [True] * len(inside) + [False] * len(outside)
    assert [bool(limits.holds(x)) for x in values] == wanted
    assert limits.holds(np.array(values)).tolist() == wanted
    assert limits.holds(jnp.asarray(values)).tolist() == wanted


def test_the_table_is_what_classes_and_options_have() -> None:
    fields = [field.name for field in dataclasses.fields(sd.SamplingParams)]
    assert [one.name for one in sampling.SAMPLING_PARAMETERS] == fields
    default = lm.RequestOptions()
    assert default.temperature == 0.0
    for one in NUMBERS[1:]:
        assert getattr(default, one.name) == one.neutral and one.range.holds(one.neutral)
