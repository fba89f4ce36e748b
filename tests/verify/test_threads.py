"""The operations of a warpgroup: those of a GPU and those of interpret mode are separate."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from lower_floor import THREADS, GpuThreads, InterpretedThreads, Threads

OPERATIONS = {name: x for name, x in vars(Threads).items() if inspect.isfunction(x)}
OPERATIONS = {name: x for name, x in OPERATIONS.items() if not name.startswith("_")}


@pytest.mark.parametrize("kind", [GpuThreads, InterpretedThreads])
def test_each_kind_has_every_operation_itself(kind):
    """One that is missing would otherwise run the other's, or nothing."""
    assert kind.__mro__ == (kind, object)
    for name, operation in OPERATIONS.items():
        wanted, found = (inspect.signature(x).parameters for x in (operation, vars(kind)[name]))
        assert list(found) == list(wanted), name
        assert [x.default for x in found.values()] == [x.default for x in wanted.values()], name
    assert {name for name in vars(kind) if not name.startswith("_")} == {*OPERATIONS}


@pytest.mark.parametrize("kind", [GpuThreads, InterpretedThreads])
def test_each_kind_has_the_attributes(kind):
    found = {}

    def trace():
        found.update(vars(kind()))
        return found["index"]

    assert jax.eval_shape(trace) == jax.ShapeDtypeStruct((THREADS,), jnp.int32)
    assert set(found) == set(Threads.__annotations__)
    assert found["interpreted"] == (kind is InterpretedThreads)
