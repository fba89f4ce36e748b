"""The largest entries of rows, among which nearly all thresholds of filters are, for TPUs.

A TPU compares lane by lane. So each lane of every third register has a list of the largest entries
that it has met, in order: an entry is sorted in without a look at another lane. All entries that
are larger than the last one of every list are listed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.sampling import Filter
from jax_specdec._src.rows import threshold
from jax_specdec._src.rows.device import LANES
from jax_specdec._src.rows.rows import VocabRows
from jax_specdec._src.rows.threshold import XlaAmounts
from jax_specdec._src.rows.tiles import TILE

ALL_ENTRIES = "all_entries"
"""The scope of the operations that search all entries of rows."""

_LISTS = 3
"""Lists of each lane."""

_DEPTH = 5
"""Entries of each list. Of entries that lie at random, the 50 largest do not
fit in 1 of 10,000 rows, the 100 largest in 1 of 300."""

PLACES = [slice(i * LANES, (i + 1) * LANES) for i in range(_LISTS * _DEPTH)]
"""The columns of each rank of each list, a list after another."""


class Largest(NamedTuple):
    """The largest entries of rows, as `threshold.SomeRows`.

    Attributes:
      entries: ``[n, L]``, of the dtype of the rows.
      bound: ``[n]`` float32, all entries larger than it are listed.
      mass: gives ``[n]`` float32, the masses of whole rows.
    """

    entries: jax.Array
    bound: jax.Array
    mass: Callable[[], jax.Array]

    @classmethod
    def of(cls, entries: jax.Array, mass: Callable[[], jax.Array]) -> Largest:
        """Returns them with their bound, from the lists ``[n, L]``."""
        # What is not listed is at most the last entry of the list that passed it over.
        last = [entries[:, place] for place in PLACES[_DEPTH - 1 :: _DEPTH]]
        # [n, 128] -> [n]
        bound = jnp.max(functools.reduce(jnp.maximum, last), axis=1)
        return cls(entries, bound.astype(jnp.float32), mass)

    def read(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Returns ``function(entries, *arrays)``, as of rows that have no other entries."""
        return function(self.entries.astype(jnp.float32), *arrays)


def _sort_in(
    lists: list[jax.Array], load: Callable[[int], jax.Array], count: int
) -> list[jax.Array]:
    """Returns lists, float32 ``[n, 128]`` each, with `count` chunks of 128 columns sorted in."""
    # Every third chunk belongs to the same list.
    lists = list(lists)
    for first in range(_LISTS):  # one list after another: few registers are in use
        of_list = slice(first * _DEPTH, (first + 1) * _DEPTH)
        ranks = lists[of_list]
        for chunk in range(first, count, _LISTS):
            x = load(chunk)
            # Each rank keeps the larger one, and hands the smaller one down.
            for i, rank in enumerate(ranks):
                ranks[i] = jnp.maximum(rank, x)
                x = jnp.minimum(rank, x)
        lists[of_list] = ranks
    return lists


def lists_of(matrix: jax.Array, width: int) -> jax.Array:
    """Returns the lists ``[n, L]`` of the first `width` columns, one tile of all rows a step."""

    def read(start: int | jax.Array, count: int, lists: list[jax.Array]) -> list[jax.Array]:
        tile = lax.dynamic_slice_in_dim(matrix, start, count, axis=1)
        # A chunk that is cut is filled up with what is never listed.
        missing = -count % LANES
        if missing:
            tile = jnp.pad(tile, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        # [n, 128] each
        chunks = jnp.split(tile, tile.shape[1] // LANES, axis=1)
        found = [x.astype(jnp.float32) for x in lists]
        found = _sort_in(found, lambda i: chunks[i].astype(jnp.float32), len(chunks))
        return [x.astype(matrix.dtype) for x in found]

    # The lists go from tile to tile in the dtype of the rows, which is exact for entries of them.
    whole, cut = divmod(width, TILE)
    lists = [jnp.full((matrix.shape[0], LANES), -jnp.inf, matrix.dtype)] * len(PLACES)
    if whole:
        lists = lax.fori_loop(0, whole, lambda i, found: read(i * TILE, TILE, found), lists)
    return jnp.concatenate(read(whole * TILE, cut, lists) if cut else lists, axis=1)


def search_among_largest(
    largest: Callable[[], Largest],
    rows: VocabRows,
    filter: Filter,
    limited: jax.Array,
    peak: jax.Array,
    inv_temperature: jax.Array,
    candidates: int,
) -> jax.Array:
    """Returns the thresholds of all rows, as `find_thresholds` does.

    Args:
      largest: finds the largest entries of the rows; not called where nothing is searched for. The
        rows are read if these do not decide all thresholds.
      rows: whole rows.
      filter: min-p, top-k and top-p of each row's request, ``[n]``.
      limited: ``[n]`` bool, the rows that have a threshold.
      peak: ``[n]`` float32, the largest entry of each row, finite.
      inv_temperature: ``[n]`` float32.
      candidates: that each round tests.
    """
    search = functools.partial(
        threshold.search,
        filter,
        size=rows.size,
        bits=threshold.bits_of(rows.matrix.dtype),
        candidates=candidates,
        peak=peak,
        inv_temperature=inv_temperature,
    )
    none = jnp.full_like(peak, -jnp.inf)

    # All entries of all rows: where one row's largest entries do not decide.
    def in_rows() -> jax.Array:
        amounts: XlaAmounts[None] = XlaAmounts(rows, peak, inv_temperature, rows.part, candidates)
        return search(amounts, None)[0]

    def among_largest() -> tuple[jax.Array, jax.Array]:
        them = largest()
        amounts = _AmongLargest(them, peak, inv_temperature, rows.part, candidates, limited)
        least, above = search(amounts, none)
        # A threshold is right if it and all that was asked about lie above what is not listed.
        is_listed = (above > them.bound) | (above == -jnp.inf)
        return least, is_listed & (least > them.bound)

    # Min-p alone needs no search.
    searched = limited & filter.is_searched(rows.size)
    nothing = threshold.of_min_p(filter, peak, inv_temperature), jnp.zeros_like(limited)
    least, known = threshold.only_if(jnp.any(searched), among_largest, nothing)
    # Rows are read only if any threshold is left unknown.
    unknown = searched & ~known
    with jax.named_scope(ALL_ENTRIES):
        rest = threshold.only_if(jnp.any(unknown), in_rows, none)
    return jnp.where(unknown, rest, least)


@dataclasses.dataclass(frozen=True)
class _AmongLargest(XlaAmounts[jax.Array]):
    """`Amounts` of the largest entries of rows.

    The state is the threshold of min-p and top-k, once top-p asks for the mass that they leave.
    """

    rows: Largest
    limited: jax.Array

    def total(
        self, least: jax.Array, wanted: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        found, _ = super().total(least, wanted, state)
        # If nothing is left out before, the mass is that of the whole row, which is known.
        of_rows = wanted & self.limited & (least == -jnp.inf)
        return jnp.where(
            of_rows, threshold.only_if(jnp.any(of_rows), self.rows.mass, found), found
        ), least
