"""Tracing a function for the platform that its program is compiled for, and for no other.

`jax.lax.platform_dependent` traces all of its branches. Where many places choose by platform, that
is most of the time before a program runs. Under `jax.jit` the platform is not known until the
program is lowered, so `traced_for_platform` puts the whole function into one equation, and traces
it when that equation is lowered. The function gets the platform's name, and chooses in Python.

The function is also traced at once, for the default device, to know its output types and to raise
its errors. If the program is for that device, lowering finds this trace in JAX's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Platform = str
"""A platform's name: "cpu", "tpu", "cuda", or another, which is treated as a GPU."""

HAS_OLD_XLA = jax.__version_info__ < (0, 11)
"""Whether XLA for CPUs is that of JAX 0.10, which has no product in 16 bits: it then converts all
weights in every pass. And it copies a whole cache of which a branch of a condition changes some."""

_PLATFORMS = ("cpu", "tpu", "cuda")
_NAMES = {"gpu": "cuda"}
_assumed = jax.make_user_context(None)  # JAX's caches have its value in their keys


class _Call(NamedTuple):
    """What is traced: the static parameter of the equation.

    Attributes:
      function: called with the arrays, `static`, and the platform.
      static: its static arguments.
      tree: the structure of the arrays.
      vmaps: for each `jax.vmap` around the call, the innermost first: its size, and the mapped
        axis of each array or None.
    """

    function: Callable[..., Any]
    static: tuple[Hashable, ...]
    tree: Any
    vmaps: tuple[tuple[int, tuple[int | None, ...]], ...] = ()


def traced_for_platform(
    function: Callable[..., Any], arrays: Any, *static: Hashable, only: Platform | None = None
) -> Any:
    """Returns ``function(arrays, *static, platform)``, traced for one platform.

    Derivatives are those of the form of "default", a GPU without kernels of ours.

    Args:
      function: a function of a module, since it is traced after the caller has returned: it must
        not close over arrays. Its output has the same structure and types on every platform.
      arrays: a pytree.
      *static: hashable.
      only: the one platform that there is a form for; the function is then traced in place.

    Example:
      >>> import jax.numpy as jnp
      >>> def scaled(x, factor, platform):
      ...     return factor * (jnp.cos(x) if platform == "tpu" else jnp.sin(x))
      >>> float(traced_for_platform(scaled, jnp.float32(0), 2))
      0.0
    """
    platform = only or _assumed.value
    # The platform is known: no equation is needed.
    if platform:
        arrays = jax.tree.map(jnp.asarray, arrays)  # nothing else does under jax.disable_jit
        return function(arrays, *static, platform)
    flat, tree = jax.tree.flatten(arrays)
    found, shapes = _bind(flat, _Call(function, static, tree))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def assume(platform: Platform) -> Any:
    """Returns a context in which functions are traced in place, for one platform.

    Example:
      >>> with assume("tpu"):
      ...     traced_for_platform(lambda x, platform: platform, 3)
      'tpu'
    """
    return _assumed(platform)


@functools.partial(jax.jit, static_argnames=("call", "platform"))
def _traced(*flat: Any, call: _Call, platform: Platform) -> Any:
    """Returns the function's output for one platform, under the `jax.vmap` around the call."""
    # One `jax.vmap` after another is put around it, the outermost first.
    if not call.vmaps:
        return call.function(jax.tree.unflatten(call.tree, flat), *call.static, platform)
    *inner, (size, axes) = call.vmaps
    run = functools.partial(_traced, call=call._replace(vmaps=(*inner,)), platform=platform)
    return jax.vmap(run, in_axes=axes, axis_size=size)(*flat)


def _bind(flat: Sequence[Any], call: _Call) -> tuple[list[Any], Any]:
    """Returns the outputs of an equation of the call, and a pytree of their shapes."""
    # Output types are those for the default device, for which the program most likely is.
    backend = jax.default_backend()
    guess = functools.partial(_traced, call=call, platform=_NAMES.get(backend, backend))
    jaxpr, shapes = jax.make_jaxpr(guess, return_shape=True)(*flat)
    return _primitive.bind(*flat, call=call, types=tuple(jaxpr.out_avals)), shapes


_primitive = Primitive("traced_for_platform")
_primitive.multiple_results = True


def _types(*_: Any, call: _Call, types: tuple[Any, ...]) -> list[Any]:
    """Returns the types of the equation's outputs, known when it was made."""
    del call
    return list(types)


def _run(*flat: Any, call: _Call, types: tuple[Any, ...]) -> list[Any]:
    """Runs the equation without jit, on the platform that its arrays are on."""
    del types
    # Where the arrays are, if that is one platform; arrays of NumPy are nowhere yet.
    found = {d.platform for x in flat if isinstance(x, jax.Array) for d in x.devices()}
    platform = found.pop() if len(found) == 1 else jax.default_backend()
    platform = _NAMES.get(platform, platform)
    arrays = map(jnp.asarray, flat)  # under jax.disable_jit nothing else makes them JAX's
    return jax.tree.leaves(_traced(*arrays, call=call, platform=platform))


_primitive.def_abstract_eval(_types)
_primitive.def_impl(_run)  # without jit


def _lower_for(platform: str) -> None:
    """Registers that the equation, lowered for a platform, is the function traced for it."""

    def run(*flat: Any, call: _Call, types: tuple[Any, ...]) -> list[Any]:
        del types
        return jax.tree.leaves(_traced(*flat, call=call, platform=platform))

    # JAX has None for all the platforms without a lowering of their own.
    name = None if platform == "default" else platform
    mlir.register_lowering(_primitive, mlir.lower_fun(run), platform=name)


for _platform in (*_PLATFORMS, "default"):
    _lower_for(_platform)


def _batched(
    flat: Sequence[Any], axes: Sequence[Any], *, call: _Call, types: tuple[Any, ...]
) -> tuple[list[Any], list[int]]:
    """Returns the outputs under one more `jax.vmap`, and their mapped axes, all 0."""
    del types
    mapped = tuple(axes)  # None for an array that is not mapped
    size = next(x.shape[a] for x, a in zip(flat, mapped, strict=True) if a is not None)
    # The equation of the same call, with this `jax.vmap` as the outermost.
    found, _ = _bind(flat, call._replace(vmaps=(*call.vmaps, (size, mapped))))
    return found, [0] * len(found)


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call, types: tuple[Any, ...]
) -> tuple[list[Any], list[Any]]:
    """Returns outputs and derivatives of the form of other platforms, of plain operations."""
    del types
    form = functools.partial(_traced, call=call, platform="default")
    steps = tuple(ad.instantiate_zeros(t) for t in tangents)  # `jax.jvp` takes two tuples
    return jax.jvp(lambda *flat: jax.tree.leaves(form(*flat)), tuple(primals), steps)


batching.primitive_batchers[_primitive] = _batched
ad.primitive_jvps[_primitive] = _derivative
