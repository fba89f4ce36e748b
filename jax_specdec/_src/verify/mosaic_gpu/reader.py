"""Reading the rows of one position: their argmax, or what normalizes them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_specdec._src.verify.mosaic_gpu import statistics
from jax_specdec._src.verify.mosaic_gpu.filter import Filter
from jax_specdec._src.verify.mosaic_gpu.mail import Mail, Masses, tree_sum
from jax_specdec._src.verify.mosaic_gpu.statistics import Normalizer, is_finite


class Shown(NamedTuple):
    """What the rows of a position show; every warp of the cluster has the same.

    Attributes:
      target: normalizer of the target row; of a sampled request.
      best: ``[]`` int32, the row's argmax; of a greedy request.
      draft: normalizer of the draft row; where normalizers are not stored.
      told: ``[]`` int32, how often warps have told each other of rows.
      masses: of its tiles, where they were weighed; else their total is 0.
    """

    target: Normalizer
    best: jax.Array
    draft: Normalizer
    told: jax.Array
    masses: Masses

    @classmethod
    def nothing(cls, mail: Mail) -> Shown:
        """Stands for a position not visited."""
        zero, unit = jnp.int32(0), Normalizer.of(jnp.float32(0), jnp.float32(1))
        return cls(unit, zero, unit, zero, mail.no_masses())


class Reader:
    """Reading one position, while the kernel is traced.

    Each warp reads its part; then all tell each other. Masses are relative to the entry of the
    drafted token, which all know beforehand: nothing has to be compared. Where that entry is too
    far from the others, the rows, still held, are read again for their largest entries.

    From a row without a draft the last token is drawn, by the target alone: its tiles are weighed
    while it is read.

    Args:
      verifier: the block at work.
      position: ``[]`` int32; the copy of its target row is under way.
      turn: ``[]`` int32, of its target row.
    """

    def __init__(self, verifier: Any, position: jax.Array, turn: jax.Array):
        self.request, self.threads = verifier.request, verifier.threads
        self.mail, self.target, self.draft = verifier.mail, verifier.target, verifier.draft
        self.position, self.turn = position, turn
        request = self.request
        self.row, self.scale = request.first_row + position, request.scale
        filters = request.filters
        self.needs_peak = request.greedy if filters is None else request.greedy | filters
        self.is_plain, self.weighs = verifier.call.is_plain, verifier.weighs(position)
        self.target_base = self.base(verifier.logit)
        self.reads_draft = verifier.call.draft == "logits"
        if self.reads_draft:
            self.uses_q = verifier.knows_q(position)
            self.draft_row = request.at(verifier.draft_row, position)
            self.draft_base = self.base(verifier.entry)

    def read(self, told: jax.Array) -> Shown:
        """Read, and filter or weigh; `told` is how often warps have told each other of rows."""
        if not self.is_plain:
            return self.look(told)
        masses = lax.cond(self.weighs, self.weigh, self.mail.no_masses)
        shown = Shown.nothing(self.mail)._replace(
            target=Normalizer.of(self.target_base, masses.total), told=told, masses=masses
        )
        usable = statistics.is_usable(masses.total, self.target_base, self.scale)
        return lax.cond(usable, lambda: shown, lambda: self.look(told))

    def weigh(self) -> Masses:
        """What the tiles weigh of a row that is drawn from: all that anybody needs of it."""
        weight = statistics.weigher(self.target_base, self.scale, self.size(self.target))
        mine = statistics.tile_masses(self.target, self.row, self.turn, weight)
        return self.mail.tell_masses(jnp.int32(0), mine)

    def look(self, told: jax.Array) -> Shown:
        """Read, and filter."""
        if self.reads_draft:
            pl.when(self.uses_q)(lambda: self.draft.fetch(self.draft_row))
        mine = lax.cond(
            self.needs_peak,
            lambda: statistics.max_and_place(self.target, self.row, self.turn),
            self.target_mass,
        )
        parts = self.of_draft(self.draft_mass) if self.reads_draft else ()
        first, second, *of_draft = self.mail.tell(told, *mine, *parts)
        best, target = lax.cond(
            self.needs_peak,
            lambda: self.argmax(first, second),
            lambda: (jnp.int32(0), Normalizer.of(self.target_base, self.sum(second))),
        )
        usable = self.needs_peak | statistics.is_usable(target.total, self.target_base, self.scale)
        draft = Normalizer.of(jnp.float32(0), jnp.float32(1))
        if self.reads_draft:
            draft = Normalizer.of(self.draft_base, self.sum(of_draft[1]))
            usable &= ~self.uses_q | statistics.is_usable(draft.total, draft.peak, self.scale)
        target, draft, told = lax.cond(
            usable,
            lambda: (target, draft, told + 1),
            lambda: (*self.read_again(told + 1, draft), told + 2),
        )
        if self.request.filters is not None:
            target, told = lax.cond(
                self.request.filters & is_finite(target.peak),
                lambda: Filter(self, target.peak).run(told),
                lambda: (target, told),
            )
        return Shown(target, best, draft, told, self.mail.no_masses())

    def read_again(self, told: jax.Array, draft: Normalizer) -> tuple[Normalizer, Normalizer]:
        """Normalizers by the largest entries."""
        mine = statistics.max_and_sum(self.target, self.row, self.scale)
        parts = self.of_draft(self.draft_max_and_sum) if self.reads_draft else ()
        peaks, sums, *of_draft = self.mail.tell(told, *mine, *parts)
        return self.by_largest(peaks, sums), self.by_largest(*of_draft) if of_draft else draft

    def of_draft(self, read: Any) -> tuple[jax.Array, jax.Array]:
        """What `read` gives of each warp's part of the draft row, if that counts."""
        return lax.cond(
            self.uses_q, read, lambda: (self.threads.filled(0.0), self.threads.filled(1.0))
        )

    def target_mass(self) -> tuple[jax.Array, jax.Array]:
        """Nothing that anybody needs, and the mass of each warp's part; 0 if weighed in vain."""
        nothing = self.threads.filled(0.0)
        fold = functools.partial(self.target.fold, self.row, self.turn)
        return nothing, lax.cond(
            self.weighs, lambda: nothing, lambda: self.mass(self.target, fold, self.target_base)
        )

    def draft_mass(self) -> tuple[jax.Array, jax.Array]:
        """The same of the draft row."""
        fold = functools.partial(self.draft.fold, self.draft_row)
        return self.threads.filled(0.0), self.mass(self.draft, fold, self.draft_base)

    def draft_max_and_sum(self) -> tuple[jax.Array, jax.Array]:
        """Of each warp's part of the draft row."""
        return statistics.max_and_sum(self.draft, self.draft_row, self.scale)

    def mass(self, rows: Any, fold: Any, base: jax.Array) -> jax.Array:
        return statistics.mass(self.threads, fold, self.size(rows), base, self.scale)

    @staticmethod
    def size(rows: Any) -> int:
        """Bytes of an entry."""
        return jnp.dtype(rows.rows.dtype).itemsize

    # What all warps have, from what each has.

    def base(self, by_lane: jax.Array) -> jax.Array:
        """An entry of the order of a row's largest: that of its draft, or else of the last one's.

        Args:
          by_lane: the drafted tokens' entries.

        Returns:
          ``[]`` float32, finite.
        """
        last = jnp.maximum(self.request.num_drafts - 1, 0)
        entry = self.request.at(by_lane, jnp.minimum(self.position, last))
        return jnp.where(is_finite(entry), entry, 0.0)

    def known(self, values: list[jax.Array], other: float) -> list[jax.Array]:
        """Values by warp, `other` where there is none."""
        there = self.mail.is_warp()
        return [jnp.where(is_warp, x, other) for is_warp, x in zip(there, values, strict=True)]

    def sum(self, values: list[jax.Array]) -> jax.Array:
        """The sum of all warps' numbers."""
        return self.threads.scalar(self.threads.warp_sum(tree_sum(self.known(values, 0.0))))

    def peak(self, peaks: list[jax.Array]) -> jax.Array:
        """The largest of all warps' entries, NaN if one is."""
        largest = statistics.largest(self.known(peaks, -jnp.inf))
        return self.threads.scalar(self.threads.warp_max(largest))

    def argmax(
        self, peaks: list[jax.Array], places: list[jax.Array]
    ) -> tuple[jax.Array, Normalizer]:
        """The least of the places of the row's largest entry, and that entry."""
        peak = self.peak(peaks)
        found = [
            jnp.where(m == peak, lax.bitcast_convert_type(p, jnp.int32), jnp.int32(2**30))
            for m, p in zip(self.known(peaks, -jnp.inf), places, strict=True)
        ]
        best = self.threads.warp_min(functools.reduce(jnp.minimum, found))
        return self.threads.scalar(best), Normalizer.of(peak, jnp.float32(1))

    def by_largest(self, peaks: list[jax.Array], sums: list[jax.Array]) -> Normalizer:
        """From each warp's largest entry, and its mass relative to that."""
        peak, scale = self.peak(peaks), self.request.scale
        masses = [
            jnp.where(m > -jnp.inf, s * statistics.decay(m, peak, scale), 0.0)
            for m, s in zip(self.known(peaks, -jnp.inf), sums, strict=True)
        ]
        return Normalizer.of(peak, self.sum(masses))
