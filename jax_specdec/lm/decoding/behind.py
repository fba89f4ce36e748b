"""Programs that are compiled behind others: an engine goes on without them until they are there.

`device.DeviceState` asks `Behind.get` for the program of each step of some slots, and dispatches
one of all slots while the answer is None. `warm_up.WarmUp` hands over what only some requests need
(`compile_later`), and has these wait in the queue until `lacking` does not name their kind.

On a CPU alone. On a GPU, XLA chooses products by timing them on the device: what is compiled while
others run is chosen badly, and stays so.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

Shapes = Any
"""A pytree of shapes in place of arrays."""


class Compiled(NamedTuple):
    """A program for arrays of given shapes and places.

    Attributes:
      program: a function that `jax.jit` returned; its first argument is static.
      compiled: it, for these arrays.
      returned: shapes of the first thing it returns, or of the only one.
    """

    program: Callable[..., Any]
    compiled: Any
    returned: Shapes

    @classmethod
    def of(cls, program: Any, first: Any, *shapes: Shapes, **static: Any) -> Compiled:
        """Returns the program for arrays of these shapes."""
        lowered = program.lower(first, *shapes, **static)
        compiled = lowered.compile()

        # Shapes to compile the next program for, which takes what this one returns.
        def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        returned = jax.tree.map(placed, lowered.out_info, compiled.output_shardings)
        return cls(program, compiled, returned)

    def __call__(self, first: Any, *args: Any, **static: Any) -> Any:
        """Returns what the program returns."""
        # Called by `jax.eval_shape`, which looks for the cause of an error: what is compiled cannot
        # be traced.
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
            return self.program(first, *args, **static)
        return self.compiled(*args)


class Behind:
    """Compiles programs in a thread, one after another, each when it is first asked for."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, Future[Compiled]] = {}
        # What it is for, and a call that compiles. No lock: only the thread takes something away,
        # and an interrupt of whoever asks could leave a lock taken.
        self._later: list[tuple[str, Callable[[], object]]] = []
        self._first: Collection[str] = ()

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)

    def get(
        self, name: Hashable, program: Any, first: Any, *args: Any, **static: Any
    ) -> Compiled | None:
        """Returns a program for arrays like those of `args`; None until it is compiled.

        Also None if it cannot be, which is a warning: whoever asks goes on without it.

        Args:
          name: of the program for arrays of such shapes.
          program: a function that `jax.jit` returned.
          first: its first argument, which is static.
          *args: its arrays.
          **static: its other static arguments.
        """
        # Whoever asks first goes on without it in any case, also where the thread fails at once.
        # Shapes are taken here, before the caller donates the arrays.
        if name not in self._programs:
            make = functools.partial(Compiled.of, program, first, *shapes_of(args), **static)
            self._programs[name] = self._thread.submit(make)
            return None
        future = self._programs[name]
        if not future.done():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        # A future that is never done: None from now on, with one warning, and no second attempt.
        self._programs[name] = Future()
        warnings.warn(f"{name} cannot be compiled: {error}", stacklevel=2)
        return None

    def compile_later(self, calls: Iterable[tuple[str, Callable[[], object]]]) -> None:
        """Makes calls that compile, one after another, each after all that `get` has asked for.

        Args:
          calls: each after the kind of requests that it is for.
        """
        self._later = [*calls]
        self._thread.submit(self._compile_next, self._thread, self._later)

    def _compile_next(
        self, thread: ThreadPoolExecutor, later: list[tuple[str, Callable[[], object]]]
    ) -> None:
        """Makes one of the calls, and lets the next come after what was asked for by then."""
        # The first of what is to come first, else the first of all: `min` takes the first of
        # equals.
        entry = min(later, key=lambda one: one[0] not in self._first)
        # Whoever needs what cannot be compiled calls it, and gets the error.
        with contextlib.suppress(Exception):
            entry[1]()
        # Taken away when it is compiled, not before: until then its kind is lacking.
        later.remove(entry)
        # Not a loop: between two of these the thread compiles what `get` was asked for meanwhile.
        # It ends where `close` or `compile_later` has put another list in the place of this one.
        if later and later is self._later:
            thread.submit(self._compile_next, thread, later)

    @property
    def lacking(self) -> set[str]:
        """The kinds of which something is still to be compiled."""
        # A copy, which is made at once: the thread may take something away meanwhile.
        return {kind for kind, _ in [*self._later]}

    def put_first(self, kinds: Collection[str]) -> None:
        """Lets what is for some kinds be compiled before what is for others."""
        self._first = kinds

    def wait(self) -> None:
        """Waits for all that was asked for."""
        # There is one thread, so a call that it is given now ends after all that it was given
        # before.
        if self._programs:
            self._thread.submit(int).result()
        # Each of these lets the next come after what was asked for by then.
        while self._later:
            self._thread.submit(int).result()

    def close(self) -> None:
        """Ends the thread, without waiting for what it compiles now; `get` starts another."""
        # What was not compiled is forgotten, so that `get` asks for it again.
        self._later = []
        self._programs = {name: one for name, one in self._programs.items() if one.done()}
        self._thread.shutdown(wait=False, cancel_futures=True)
        del self._thread


def shapes_of(arrays: Any) -> Shapes:
    """Returns the shapes, dtypes and places of arrays, which may be deleted later.

    Shapes that stand for arrays already, as `Compiled.returned`, stay as they are.
    """

    # An array that was never put anywhere goes where the others of a call are: a place that was
    # said for it would be compiled for.
    def shape_of(x: Any) -> jax.ShapeDtypeStruct:
        # What another program is to return: `Compiled.of` has said where it will be.
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        has_place = isinstance(x, jax.Array) and x.committed
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if has_place else None)

    return jax.tree.map(shape_of, arrays)
