"""Min-p, top-k and top-p inside the kernel: one threshold on the entries of a row that is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import limits_count
from jax_specdec._src.verify.mosaic_gpu.mail import tree_sum
from jax_specdec._src.verify.mosaic_gpu.statistics import Normalizer

_SIGN = jnp.iinfo(jnp.int32).min


class Filter:
    """Finding a row's threshold, while the kernel is traced.

    Entries are never sorted: the bits of the threshold are found one by one, from the sign down,
    each by what the entries amount to that are not less than a candidate.

    Args:
      reader: of the target row that is held.
      peak: ``[]`` float32, its largest entry.
    """

    def __init__(self, reader: Any, peak: jax.Array):
        self.reader, self.row, self.peak = reader, reader.row, peak
        self.request, self.threads = reader.request, reader.threads
        self.target, self.mail = reader.target, reader.mail

    def run(self, told: jax.Array) -> tuple[Normalizer, jax.Array]:
        """Hide what is filtered out.

        Args:
          told: ``[]`` int32, how often warps have told each other.

        Returns:
          What normalizes the rest, and how often they have now.
        """
        min_p, top_k, top_p = self.request.filter
        least = jnp.float32(-jnp.inf)
        if min_p is not None:
            lowest = self.peak + jnp.log2(min_p) / self.request.scale
            least = jnp.where(min_p > 0, lowest, least)
        if top_k is not None:
            least, told = lax.cond(
                limits_count(top_k, self.target.size),
                lambda: self.search(self.count, top_k.astype(jnp.float32), least, told),
                lambda: (least, told),
            )
        if top_p is not None:
            least, told = lax.cond(
                top_p < 1,
                lambda: self.largest_of_mass(top_p, least, told),
                lambda: (least, told),
            )

        def hide(tile: jax.Array, total: jax.Array) -> jax.Array:
            self.target.hide_below(least, self.row, tile)
            return total + self.mass(tile, least)

        total, told = self.everywhere(hide, told)
        return Normalizer(self.peak, total, least), told

    def largest_of_mass(
        self, share: jax.Array, least: jax.Array, told: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The largest threshold that a share of the mass above `least` reaches."""

        def mass(tile: jax.Array, candidate: jax.Array) -> jax.Array:
            return self.mass(tile, jnp.maximum(candidate, least))

        total, told = self.everywhere(lambda tile, x: x + self.mass(tile, least), told)
        return self.search(mass, share * total, least, told)

    def search(
        self,
        amount: Callable[[jax.Array, jax.Array], jax.Array],
        goal: jax.Array,
        least: jax.Array,
        told: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The largest threshold, from `least` on, with an amount of at least `goal` above it."""

        def trip(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            found, told = state
            candidate = found | lax.shift_left(jnp.int32(1), 31 - i)
            value = _value(candidate)
            reached, told = self.everywhere(lambda tile, x: x + amount(tile, value), told)
            return jnp.where(reached >= goal, candidate, found), told

        # Sign, exponent of float32, mantissa: what tells entries apart.
        trips = 9 + jnp.finfo(self.target.held.dtype).nmant
        found, told = lax.fori_loop(0, trips, trip, (jnp.int32(0), told))
        return jnp.maximum(jnp.where(found == 0, -jnp.inf, _value(found)), least), told

    def everywhere(
        self, add: Callable[[jax.Array, jax.Array], jax.Array], told: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A sum over the tiles of the whole row, ``[]``."""
        threads = self.threads
        mine = lax.fori_loop(0, self.target.count(), add, threads.filled(0.0))
        (sums,) = self.mail.tell(told, threads.warp_sum(mine))
        return self.reader.sum(sums), told + 1

    def count(self, tile: jax.Array, candidate: jax.Array) -> jax.Array:
        """How many entries of a tile reach a threshold; exact up to 2**24 ids per thread."""
        return tree_sum(
            [jnp.where(x >= candidate, 1.0, 0.0) for x in self.target.of_tile(self.row, tile)]
        )

    def mass(self, tile: jax.Array, candidate: jax.Array) -> jax.Array:
        """What those weigh, relative to the largest entry."""
        scale = self.request.scale
        weights = [
            jnp.where(x >= candidate, jnp.exp2((x - self.peak) * scale), 0.0)
            for x in self.target.of_tile(self.row, tile)
        ]
        return tree_sum(weights)


def _value(key: jax.Array) -> jax.Array:
    """The float32 of a key; keys have the order of their floats when read as unsigned."""
    bits = jnp.where(key < 0, key ^ _SIGN, ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)
