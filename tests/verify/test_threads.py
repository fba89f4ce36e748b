"""The operations of a warpgroup: those of a GPU and those of interpret mode are separate."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from lower_floor import THREADS, GpuThreads, InterpretedThreads, Threads


@pytest.mark.parametrize("kind", [GpuThreads, InterpretedThreads])
def test_each_kind_has_every_operation_itself(kind):
    """With the parameters that are declared, and no other public ones."""
    assert not kind.__abstractmethods__
    for name in Threads.__abstractmethods__:
        wanted, found = (
            inspect.signature(x).parameters for x in (vars(Threads)[name], vars(kind)[name])
        )
        assert list(found) == list(wanted), name
        assert [x.default for x in found.values()] == [x.default for x in wanted.values()], name
    public = {name for name in vars(kind) if not name.startswith("_")}
    assert public == {*Threads.__abstractmethods__, "interpreted"}


@pytest.mark.parametrize("kind", [GpuThreads, InterpretedThreads])
def test_each_kind_has_the_attributes(kind):
    found = {}

    def trace():
        found.update(vars(kind()))
        return found["index"]

    assert jax.eval_shape(trace) == jax.ShapeDtypeStruct((THREADS,), jnp.int32)
    assert set(found) == {"index", "lane"}
    assert kind.interpreted == (kind is InterpretedThreads)
