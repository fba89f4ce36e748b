"""`PlainModel`: a `CausalModel` of a pass that knows tokens ``[B, S]`` and a cache, and no more.

`OneGroup` is what such models have in common: it turns `Rows` into the arguments of a plain pass,
and logits into an `Output`. `foreign.OneIndexModel` is another one of them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import jax

from jax_specdec._src.base.arrays import check_int, require
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.lm.models.protocol import Cache, Output, Params, Rows, Serves, Wants

PlainPass = Callable[[Params, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]
"""``(params, token_ids [B, S], start [B], cache) -> logits [B, S, V], cache``."""


class OneGroup(abc.ABC):
    """What every `CausalModel` does that runs one group of consecutive tokens, and no features."""

    @abc.abstractmethod
    def run(
        self, params: Params, token_ids: jax.Array, start: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Returns logits ``[B, S, V]`` of tokens ``[B, S]``, and the cache.

        Token s of request b is at position ``start[b] + s``.
        """

    @property
    def serves(self) -> Serves:
        """Nothing beyond one group of consecutive tokens."""
        return Serves()

    def apply(
        self, params: Params, groups: Sequence[Rows], cache: Cache, wants: Wants = Wants()
    ) -> tuple[list[Output], Cache]:
        """Runs the tokens of the one group; see `CausalModel`."""
        # As `serves` declares, there is one group, without slots, a tree or wanted features: its
        # tokens are of all requests, in their order, and their positions follow from `start`.
        (rows,) = groups
        logits, cache = self.run(params, rows.token_ids, rows.start, cache)
        return [Output(logits)], cache

    def commit(self, cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
        """Raises NotImplementedError: there are no trees to commit."""
        raise NotImplementedError(f"{type(self).__name__} runs no trees of drafts")

    def check_params(self, name: str, params: Params) -> None:
        """Accepts everything: what weights fit is not known here."""
        del name, params


def no_cache(batch_size: int, max_length: int) -> Cache:
    """Returns the cache of a model that remembers nothing."""
    # A pytree without arrays.
    del batch_size, max_length
    return ()


@dataclasses.dataclass(frozen=True)
class PlainModel(OneGroup):
    """A `CausalModel` of a function.

    Hashable and compared by its functions: define them once, at the top of a module, or take the
    methods of an object that is compared by value; with new functions all programs are compiled
    again.

    Attributes:
      vocab_size: V.
      function: runs token s of request b at position ``start[b] + s``: ``(params, token_ids [B, S],
        start [B], cache)`` to logits ``[B, S, V]`` and the cache.
      new_cache: ``(batch_size, max_length)`` to an empty cache; by default there is none.
      batch_axis: as in `Serves`.
      sharding: as in `Serves`.

    Raises:
      TypeError: a function is none, or `vocab_size` no int.
      ValueError: `vocab_size` is below 1.

    Example: see `CausalModel`. A model of another library, which keeps weights and methods apart:

      >>> import jax.numpy as jnp
      >>> class Theirs:
      ...     def forward(self, params, token_ids, start, cache):
      ...         return params[token_ids], cache
      >>> model = PlainModel(3, Theirs().forward)
      >>> rows = Rows(jnp.array([[2]]), start=jnp.array([0]))
      >>> (output,), _ = model.apply(jnp.eye(3), [rows], model.init_cache(1, 4))
      >>> output.logits.tolist()
      [[[0.0, 0.0, 1.0]]]
    """

    vocab_size: int
    function: PlainPass
    new_cache: Callable[[int, int], Cache] = no_cache
    batch_axis: int = 0
    sharding: VerifySharding | None = None

    def __post_init__(self) -> None:
        check_int("vocab_size", self.vocab_size)
        for name in ("function", "new_cache"):
            function = getattr(self, name)
            require(callable(function), name, "be a function", function, error=TypeError)

    @property
    def serves(self) -> Serves:
        """Nothing beyond one group of consecutive tokens."""
        return Serves(batch_axis=self.batch_axis, sharding=self.sharding)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache; see `CausalModel.init_cache`."""
        return self.new_cache(batch_size, max_length)

    def run(
        self, params: Params, token_ids: jax.Array, start: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Calls the function."""
        return self.function(params, token_ids, start, cache)
