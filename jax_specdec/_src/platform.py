"""Tracing a function for the platform that its program is compiled for, and for no other.

`jax.lax.platform_dependent` traces all of its branches. Where many places choose by platform, that
is most of the time before a program runs. Under `jax.jit` the platform is not known until the
program is lowered, so `traced_for_platform` puts the whole function into one equation, and traces
it when that equation is lowered. Inside, `platform_dependent` chooses in Python.

The function is also traced at once, for the default device, to know its output types and to raise
its errors. If the program is for that device, lowering finds this trace in JAX's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_PLATFORMS = ("cpu", "tpu", "cuda")
_current = jax.make_user_context(None)  # JAX's caches have its value in their keys


class _Call(NamedTuple):
    """What is traced: the static parameter of the equation.

    Attributes:
      function: called with the arrays, then with `static`.
      static: its static arguments.
      tree: the structure of the arrays.
      vmaps: for each `jax.vmap` around the call, the innermost first: its size, and the mapped
        axis of each array or None.
    """

    function: Callable[..., Any]
    static: tuple[Hashable, ...]
    tree: Any
    vmaps: tuple[tuple[int, tuple[int | None, ...]], ...] = ()


def traced_for_platform(function: Callable[..., Any], arrays: Any, *static: Hashable) -> Any:
    """``function(arrays, *static)``, traced for one platform.

    It has no derivative: stop gradients before it.

    Args:
      function: a function of a module, since it is traced after the caller has returned: it must
        not close over arrays. Its output has the same structure and types on every platform.
      arrays: a pytree.
      *static: hashable.

    Example:
      >>> import jax.numpy as jnp
      >>> def scaled(x, factor):
      ...     return factor * platform_dependent(x, tpu=jnp.cos, default=jnp.sin)
      >>> float(traced_for_platform(scaled, jnp.float32(0), 2))
      0.0
    """
    flat, tree = jax.tree.flatten(arrays)
    call = _Call(function, static, tree)
    out_tree = jax.tree.structure(jax.eval_shape(_guess(call), *flat))
    return jax.tree.unflatten(out_tree, _bind(flat, call))


def platform_dependent(*arrays: Any, default: Callable[..., Any], **forms: Any) -> Any:
    """`jax.lax.platform_dependent`; inside `traced_for_platform` only one form is traced."""
    platform = _current.value
    if platform is None:
        return lax.platform_dependent(*arrays, default=default, **forms)
    return forms.get(platform, default)(*arrays)


def assume(platform: str) -> Any:
    """A context in which `platform_dependent` chooses the form of "cpu", "tpu" or "cuda".

    Example:
      >>> with assume("tpu"):
      ...     platform_dependent(3, tpu=lambda x: x + 1, default=lambda x: x)
      4
    """
    return _current(platform)


@functools.partial(jax.jit, static_argnames=("call", "platform"))
def _traced(*flat: Any, call: _Call, platform: str) -> Any:
    def run(*flat: Any) -> Any:
        return call.function(jax.tree.unflatten(call.tree, flat), *call.static)

    for size, axes in call.vmaps:
        run = jax.vmap(run, in_axes=axes, axis_size=size)
    with assume(platform):
        return run(*flat)


def _name(platform: str) -> str:
    return {"gpu": "cuda"}.get(platform, platform)


def _guess(call: _Call) -> Callable[..., Any]:
    return functools.partial(_traced, call=call, platform=_name(jax.default_backend()))


def _bind(flat: Sequence[Any], call: _Call) -> list[Any]:
    types = jax.make_jaxpr(_guess(call))(*flat).out_avals
    return _primitive.bind(*flat, call=call, types=tuple(types))


_primitive = Primitive("traced_for_platform")
_primitive.multiple_results = True


def _types(*_: Any, call: _Call, types: tuple[Any, ...]) -> list[Any]:
    del call
    return list(types)


def _run(*flat: Any, call: _Call, types: tuple[Any, ...]) -> list[Any]:
    del types
    found = {d.platform for x in flat if isinstance(x, jax.Array) for d in x.devices()}
    platform = _name(found.pop() if len(found) == 1 else jax.default_backend())
    return jax.tree.leaves(_traced(*flat, call=call, platform=platform))


_primitive.def_abstract_eval(_types)
_primitive.def_impl(_run)  # without jit


def _lower_for(platform: str) -> None:
    def run(*flat: Any, call: _Call, types: tuple[Any, ...]) -> list[Any]:
        del types
        return jax.tree.leaves(_traced(*flat, call=call, platform=platform))

    name = None if platform == "default" else platform
    mlir.register_lowering(_primitive, mlir.lower_fun(run), platform=name)


for _platform in (*_PLATFORMS, "default"):
    _lower_for(_platform)


def _batched(
    flat: Sequence[Any], axes: Sequence[Any], *, call: _Call, types: tuple[Any, ...]
) -> tuple[list[Any], list[int]]:
    """The same equation, of the function under `jax.vmap`."""
    del types
    mapped = tuple(axes)  # None for an array that is not mapped
    size = next(x.shape[a] for x, a in zip(flat, mapped, strict=True) if a is not None)
    found = _bind(flat, call._replace(vmaps=(*call.vmaps, (size, mapped))))
    return found, [0] * len(found)


batching.primitive_batchers[_primitive] = _batched
