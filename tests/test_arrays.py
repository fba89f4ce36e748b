"""Declared pytrees and the one checker: what is declared is documented, and what does not fit."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from lower_floor import Range, arrays, check_array, check_tree, described, pytree, sampling
from upper_floor import PENALTIES

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
    for one in (*sampling.FILTERS, *PENALTIES):
        assert getattr(default, one.name) == one.neutral and one.range.holds(one.neutral)
    # Text, a bool or a wrong dtype is described, never compared.
    assert (
        described(np.float32(0.1)) == "0.1" and described(jnp.zeros(2)) == "an array [2] of float32"
    )
